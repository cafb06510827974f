"""`te.quantize`: results against the decoded tables' in the original model; dtypes by table; state, copies, errors."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import tritonemb as te
from tests.strategies import random_batch, rows_of

pytestmark = pytest.mark.public
POOLED = [
    te.TableConfig("a", 40, 13, features=["x", "y"]), te.TableConfig("b", 30, 16, features=["y"], pooling="mean"),
    te.TableConfig("c", 20, 7, features=["z"]),
]  # fmt: skip
UNPOOLED = [te.TableConfig(name, 30, 12, pooling="none", features=[name]) for name in "xyz"]
DTYPES = {"a": "int8", "b": "int4", "c": "int2"}


class Model(nn.Module):
    """Two collections and a dense layer."""

    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        self.bags = te.nn.EmbeddingBagCollection(POOLED, te.optim.SGD(lr=0.1), output_dtype=dtype)
        self.rows = te.nn.EmbeddingCollection(UNPOOLED)
        self.dense = nn.Linear(49, 3)

    def forward(self, batch):
        return self.dense(self.bags(batch).float()), self.rows(batch).values()


def batch_of(weighted=True, id_dtype=torch.int64):
    return random_batch({"x": 20, "y": 20, "z": 20}, ["z", "x", "y"], 9, 4, weighted, id_dtype, id_dtype)


@torch.no_grad()
def decoded(model: Model, quantized: Model) -> Model:
    """The model with the decoded tables of its quantized copy."""
    result = copy.deepcopy(model)
    for name in ("bags", "rows"):
        for table in getattr(result, name).tables:
            table.weight.copy_(getattr(quantized, name)[table.config.name].dequantize())
    return result.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_the_decoded_tables(dtype):
    model = Model(dtype)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantized = te.quantize(model, "int4", tables=DTYPES)
    assert not quantized.training
    assert model.training
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    shapes = {name: quantized.bags[name].weight.shape for name in "abc"}
    assert shapes == {"a": (40, 4 + 13), "b": (30, 4 + 8), "c": (20, 4 + 2)}
    assert quantized.rows["x"].weight.shape == (30, 4 + 6)
    assert quantized.bags.embedding_dims == model.bags.embedding_dims
    expected = decoded(model, quantized)
    for batch in (batch_of(), batch_of(False, torch.int32)):
        with torch.no_grad():
            for result, wanted in zip(quantized(batch), expected(batch), strict=True):
                assert torch.equal(result, wanted)
    assert quantized.bags(batch).dtype == dtype


def test_state_and_copies():
    batch, one, other = batch_of(), te.quantize(Model(), tables=DTYPES), te.quantize(Model(), tables=DTYPES)
    state = one.state_dict()
    assert {name for name in state if "bags" in name} == {f"bags.{table}.weight" for table in "abc"}
    expected = one(batch)
    file = io.BytesIO()
    torch.save(state, file)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for result in (other(batch), copy.deepcopy(one)(batch)):
        assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))
    with pytest.raises(RuntimeError, match=r"size mismatch for bags\.a\.weight"):
        te.quantize(Model(), "int4").load_state_dict(state)


@pytest.mark.usefixtures("dynamo")
def test_compiled_as_one_graph():
    quantized = te.quantize(Model(), "int4", tables=DTYPES)
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for batch in (batch_of(), batch_of(False)):
            for result, expected in zip(compiled(batch), quantized(batch), strict=True):
                assert torch.equal(result, expected)


def test_mistakes():
    dynamic = te.TableConfig("ids", None, 4, capacity=100)
    host = te.TableConfig("host", 100, 4, placement="host")
    collection, sgd = te.nn.EmbeddingBagCollection, te.optim.SGD(lr=0.1)
    cases = [
        (Model(), {"dtype": "int3"}, "unknown dtype 'int3'; expected one of"),
        (Model(), {"tables": {"a": torch.int8}}, "unknown dtype torch.int8"),
        (Model(), {"tables": {"d": "int8"}}, r"unknown tables \['d'\]; expected some of \['a', 'b'"),
        (nn.Linear(2, 2), {}, "no EmbeddingBagCollection or EmbeddingCollection"),
        (collection([dynamic], sgd), {}, "table 'ids' is dynamic"),
        (collection([host], sgd), {}, "table 'host' has placement 'host'"),
    ]
    for model, options, message in cases:
        with pytest.raises(ValueError, match=message):
            te.quantize(model, **options)
    model = Model()
    with torch.no_grad():
        model.bags["b"].weight[3, 2] = float("inf")
    with pytest.raises(ValueError, match="table 'b': rows have values that are not finite"):
        te.quantize(model)
    quantized, rows = te.quantize(Model()), rows_of(POOLED)
    batch = te.KeyedJaggedTensor.from_lists({"x": [[0, rows["x"]]], "y": [[]], "z": [[]]})
    with pytest.raises(ValueError, match="table 'a': id 40 of feature 'x'"):
        quantized.bags(batch)
    with pytest.raises(ValueError, match="lacks the features"):
        quantized.bags(te.KeyedJaggedTensor.from_lists({"x": [[0]]}))
