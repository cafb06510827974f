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
MIXED = te.serving.ByFrequency(int8=0.2, int4=0.3, int2=0.4, drop=0.1)


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
            for result, rows in zip(quantized(batch), expected(batch), strict=True):
                assert torch.equal(result, rows)
    assert quantized.bags(batch).dtype == dtype


def test_state_and_copies():
    batch, one, other = batch_of(), te.quantize(Model(), tables=DTYPES), te.quantize(Model(), tables=DTYPES)
    state = one.state_dict()
    names = {f"bags.{table}.{name}" for table in "abc" for name in ("weight", "sizes")}
    assert {name for name in state if "bags" in name} == names
    expected = one(batch)
    file = io.BytesIO()
    torch.save(state, file)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for result in (other(batch), copy.deepcopy(one)(batch)):
        assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))
    with pytest.raises(RuntimeError, match=r"'a': the state_dict has .* rows of int8, the model has rows of int4;"):
        te.quantize(Model(), "int4").load_state_dict(state)
    del state["bags.a.sizes"]
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(state)


@pytest.mark.usefixtures("dynamo")
def test_compiled_as_one_graph():
    quantized = te.quantize(Model(), "int4", tables=DTYPES)
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for batch in (batch_of(), batch_of(False)):
            for result, expected in zip(compiled(batch), quantized(batch), strict=True):
                assert torch.equal(result, expected)


def test_mistakes():
    with pytest.raises(ValueError, match=r"at least 0 and add up to 1, got ByFrequency\(int8=0.5"):
        te.serving.ByFrequency(int8=0.5, int4=0.4)
    cases = [
        (Model(), {"dtype": "int3"}, "unknown dtype 'int3'; expected one of"),
        (Model(), {"tables": {"a": torch.int8}}, "unknown dtype torch.int8"),
        (Model(), {"tables": {"d": "int8"}}, r"unknown tables \['d'\]; expected some of \['a', 'b'"),
        (nn.Linear(2, 2), {}, "no collection, te.nn.EmbeddingBag"),
        (Model(), {"dtype": te.serving.ByFrequency(int8=1)}, r"table 'a': ByFrequency .*of shape \(40,\), as"),
        (Model(), {"counts": {"d": torch.ones(3)}}, r"unknown tables \['d'\]"),
        (Model(), {"tables": {"b": MIXED}, "counts": {"b": torch.ones(3)}}, r"counts=\{'b': ...\} of shape \(30,\)"),
        (te.nn.EmbeddingBag(5, 3, mode="max"), {}, "mode='max' or max_norm"),
        (te.nn.Embedding(5, 3, max_norm=1.0), {}, "mode='max' or max_norm"),
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


def configs_of_all_kinds(placement, pooled):
    """Dynamic tables, one with initial values of zero and one with fallback rows, and a static one."""
    pooling, cache = "sum" if pooled else "none", te.CacheConfig(rows=64)
    dims = (9, 16, 12) if pooled else (12, 12, 12)
    kinds = [
        ("a", None, ["x", "y"], {"capacity": 100, "init_bound": 0.0}), ("b", 30, ["y"] if pooled else ["w"], {}),
        ("c", None, ["z"], {"capacity": 100, "fallback_rows": 3, "admission": te.AdmissionConfig(appearances=2)}),
    ]  # fmt: skip
    return [
        te.TableConfig(name, size, dim, features, pooling, placement=placement, cache=cache, **options)
        for (name, size, features, options), dim in zip(kinds, dims, strict=True)
    ]


def trained_collection(placement, pooled):
    """A collection after two steps, and a batch for it, some of whose ids are unknown."""
    torch.manual_seed(0)
    configs = configs_of_all_kinds(placement, pooled)
    kind = te.nn.EmbeddingBagCollection if pooled else te.nn.EmbeddingCollection
    collection = kind(configs, te.optim.SGD(lr=0.3))
    keys = ["z", "x", "w", "y"]
    batches = [random_batch(dict.fromkeys(keys, 30), keys, 20, 4, weighted=True) for _ in range(3)]
    for batch in batches[:2]:
        rows = collection(batch)
        (rows if pooled else rows.values()).square().sum().backward()
    return collection, batches[2]


def assert_decoded(quantized, collection, batch):
    """Load the decoded tables into the original collection, and compare the results of a batch."""
    with torch.no_grad():
        result, state = quantized(batch), collection.state_dict()
        for config in collection.configs:
            table, name = quantized[config.name], config.name
            if config.is_dynamic:
                state[f"{name}.weight"][torch.isin(state[f"{name}.ids"], table.ids)] = table.dequantize()
            else:
                state[f"{name}.weight"] = table.dequantize()
            if config.fallback_rows:
                state[f"{name}.fallback_weight"] = decoded_fallback_rows(table)
        collection.load_state_dict(state)
        expected = collection(batch)
    pair = (result, expected) if isinstance(result, torch.Tensor) else (result.values(), expected.values())
    assert torch.equal(*pair)


def decoded_fallback_rows(table):
    num_rows, *sizes = table.sizes.tolist()
    bits = next(bits for bits, size in zip((8, 4, 2), sizes, strict=True) if size)
    row_bytes = 4 + -(-table.config.embedding_dim * bits // 8)
    return te.serving.dequantize_rows(table.weight.view(-1)[: num_rows * row_bytes].view(num_rows, -1), bits, 12)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("placement", ["device", "host", "disk"])
def test_tables_of_all_kinds(placement, pooled):
    collection, batch = trained_collection(placement, pooled)
    dtypes = {"a": "int4", "b": "int8", "c": "int2"}
    quantized = te.quantize(nn.ModuleList([collection]), tables=dtypes)[0]
    assert torch.equal(quantized["a"].ids, collection["a"].ids())
    assert_decoded(quantized, collection, batch)


def test_unknown_ids_have_initial_values():
    config = te.TableConfig("a", None, 32, capacity=100)
    collection = te.nn.EmbeddingBagCollection([config], te.optim.SGD(lr=0.1))
    batch = te.KeyedJaggedTensor.from_lists({"a": [[5], [-7, 2**40]]})
    with torch.no_grad():
        for known in (False, True):
            if known:
                collection["a"].insert([5], torch.ones(1, 32))
            result = te.quantize(collection, "int2")(batch)
            torch.testing.assert_close(result, collection(batch), rtol=0, atol=2 * config.bound / 255)
            assert bool((result[0] == 1).all()) == known


@pytest.mark.parametrize("fallback_rows", [0, 4])
def test_a_table_without_stored_rows(fallback_rows):
    """None was trained, or all were dropped."""
    config = te.TableConfig("a", None, 8, capacity=100, fallback_rows=fallback_rows)
    batch, drop = te.KeyedJaggedTensor.from_lists({"a": [[5], [-7, 2**40]]}), te.serving.ByFrequency(drop=1)
    collection = te.nn.EmbeddingBagCollection([config], te.optim.SGD(lr=0.1))
    expected = te.quantize(collection, "int8")(batch)
    for dtype in (te.serving.ByFrequency(int8=1), drop):
        assert torch.equal(te.quantize(collection, dtype)(batch), expected)
    collection(batch).sum().backward()
    assert not te.quantize(collection, drop)["a"].dequantize().numel()
    assert torch.equal(te.quantize(collection, drop)(batch), expected)


def test_mixed_by_frequency():
    collection, batch = trained_collection("device", True)
    counts = {"b": batch["y"].values().bincount(minlength=30)}
    quantized = te.quantize(collection, MIXED, counts=counts)
    static, dynamic = quantized["b"], quantized["a"]
    assert static.sizes.tolist() == [0, 6, 9, 12]
    order = counts["b"].argsort(descending=True, stable=True)
    assert static.row_numbers[order].tolist() == [*range(27), -1, -1, -1]
    assert not static.dequantize()[order[27:]].any()
    error = (static.dequantize() - collection["b"].weight).abs().mean(1)[order]
    assert error[:6].mean() < error[6:15].mean() / 8 < error[15:27].mean() / 16
    state = collection["a"].get_state()
    stored_ids = state["ids"][state["count"].argsort(descending=True, stable=True)[: dynamic.ids.numel()]]
    assert torch.equal(stored_ids.sort()[0], dynamic.ids)
    assert dynamic.ids.numel() == round(0.9 * len(state["ids"]))
    collection["a"].remove(state["ids"][~torch.isin(state["ids"], dynamic.ids)])
    collection["c"].remove(collection["c"].ids()[~torch.isin(collection["c"].ids(), quantized["c"].ids)])
    assert_decoded(quantized, collection, batch)


def test_state_of_tables_with_an_index():
    collection, batch = trained_collection("device", True)
    counts = {"b": batch["y"].values().bincount(minlength=30)}
    dtypes = {"a": "int4", "b": MIXED}
    quantized = te.quantize(collection, MIXED, dtypes, counts)
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    empty = te.nn.EmbeddingBagCollection(collection.configs, te.optim.SGD(lr=0.1))
    for assign in (False, True):
        ones = {"b": torch.ones(30)}
        loaded = te.quantize(empty, MIXED, dtypes, ones)
        loaded.load_state_dict(state, assign=assign)
        assert torch.equal(loaded(batch), quantized(batch))
    with pytest.raises(RuntimeError, match=r"'a': the state_dict has .* rows of int4, the model has rows of int8;"):
        te.quantize(empty, "int8", {"b": MIXED, "c": MIXED}, ones).load_state_dict(state)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("num_embeddings", [20, None])
def test_modules_of_one_table(mode, padding_idx, num_embeddings):
    torch.manual_seed(1)
    options = {} if num_embeddings else {"optimizer": te.optim.SGD(lr=0.1), "capacity": 50, "init_bound": 0.0}
    last = mode == "sum"
    bag = te.nn.EmbeddingBag(
        num_embeddings, 6, mode=mode, padding_idx=padding_idx, include_last_offset=last, **options
    )  # fmt: skip
    rows = te.nn.Embedding(num_embeddings, 6, padding_idx=padding_idx, **options)
    if num_embeddings:
        torch.nn.init.normal_(rows.weight)  # as `from_pretrained`, also the row of the padding, which is read
    if num_embeddings is None:
        for module in (bag, rows):
            module.table.insert(range(15), torch.randn(15, 6))
    model = nn.ModuleDict({"bag": bag, "rows": rows})
    quantized = te.quantize(model, "int8", {"rows": "int4"})
    assert isinstance(quantized["bag"], te.nn.EmbeddingBag)
    with torch.no_grad():
        for module in (bag, rows):
            table = quantized["bag" if module is bag else "rows"].table
            if num_embeddings is None:
                module.table.insert(table.ids, table.dequantize())
            else:
                module.weight.copy_(table.dequantize())
        ids, matrix = torch.randint(20, (12,)), torch.randint(20, (5, 4))
        calls = [(bag, (ids, torch.tensor([0, 0, 5, 12] if last else [0, 0, 5]))), (bag, (matrix,)), (rows, (matrix,))]
        weights = torch.rand(5, 4)
        calls += [(bag, (matrix, None, weights))] if mode == "sum" else []
        for module, args in calls:
            result = quantized["bag" if module is bag else "rows"](*args)
            torch.testing.assert_close(result, module(*args), rtol=1e-6, atol=1e-6)
    names = {"weight", "sizes", *(() if num_embeddings else ("ids", "seed"))}
    assert {*quantized.state_dict()} == {f"{path}.{name}" for path in model for name in names}
    loaded = te.quantize(model, "int8", {"rows": "int4"})
    loaded.load_state_dict(quantized.state_dict())
    assert torch.equal(loaded["rows"](matrix), quantized["rows"](matrix))
    with pytest.raises(RuntimeError, match=r"the state_dict has .* rows of int8, the model has rows of int2;"):
        te.quantize(model, "int2").load_state_dict(quantized.state_dict())
    if num_embeddings:
        with pytest.raises(ValueError, match="table 'rows': id 20 "):
            quantized["rows"](torch.tensor([20]))


@pytest.mark.usefixtures("dynamo")
def test_tables_with_an_index_in_one_graph():
    configs = [te.TableConfig("a", None, 8, capacity=50), te.TableConfig("b", 30, 8)]
    collection = te.nn.EmbeddingBagCollection(configs, te.optim.SGD(lr=0.1))
    batch = random_batch({"a": 30, "b": 30}, ["a", "b"], 5, 3)
    collection(batch).sum().backward()
    quantized = te.quantize(collection, MIXED, counts={"b": batch["b"].values().bincount(minlength=30)})
    bag = te.quantize(te.nn.EmbeddingBag(30, 8, mode="sum"), "int4")
    with torch.no_grad():
        compiled = torch.compile(quantized, backend="aot_eager")
        assert torch.equal(compiled(batch), quantized(batch))
        torch._dynamo.reset()  # else the graphs above are taken
        with pytest.raises(Exception, match="the host finds rows of dynamic tables"):
            torch.compile(quantized, fullgraph=True, backend="aot_eager")(batch)
        matrix = torch.randint(30, (4, 3))
        assert torch.equal(torch.compile(bag, fullgraph=True, backend="aot_eager")(matrix), bag(matrix))


@pytest.mark.more
def test_tables_on_servers():
    config = te.TableConfig("a", None, 8, capacity=100, placement="server", init_bound=0.0)
    static = te.TableConfig("b", 30, 8, placement="server")
    collection = te.nn.EmbeddingBagCollection([config, static], te.optim.SGD(lr=0.1))
    with te.server.start(1) as servers:
        te.server.attach(collection, servers, staleness=1)
        batch = random_batch({"a": 30, "b": 30}, ["a", "b"], 5, 3)
        collection(batch).sum().backward()
        with torch.no_grad():
            result, expected = te.quantize(collection, "int8")(batch), collection(batch)
        torch.testing.assert_close(result, expected, rtol=0, atol=0.02)
