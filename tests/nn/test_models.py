"""DLRM and DCNv2 against the same networks in plain PyTorch with the same weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.kernels.test_interaction import by_loop
from tests.strategies import random_batch, rows_of

pytestmark = pytest.mark.public
TABLES = [te.TableConfig("a", 20, 8), te.TableConfig("b", 7, 8, features=["b", "c"], pooling="mean")]
NUM_DENSE, BATCH = 5, 6
# The same float32 operations, but for pooled sums and products in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def make(kind: str, optimizer: te.optim.Optimizer | None = None, device=None) -> nn.Module:
    torch.manual_seed(1)
    if kind == "dlrm":
        return te.nn.DLRM(TABLES, NUM_DENSE, [16], [32, 9], optimizer, device=device)
    low_rank = 3 if kind == "dcn low rank" else None
    return te.nn.DCNv2(TABLES, NUM_DENSE, 2, low_rank, [9], optimizer, device=device)


class Plain(nn.Module):
    """The model's layers around `nn.EmbeddingBag`s with its tables' weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        state = copy.deepcopy(model.state_dict())
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(
                c.num_embeddings, c.embedding_dim, mode=c.pooling, include_last_offset=True,
                _weight=state[f"embeddings.{c.name}.weight"],
            )
            for c in TABLES
        )  # fmt: skip
        self.layers = nn.ParameterDict({k.replace(".", "/"): v for k, v in state.items() if not k.startswith("emb")})

    def linear(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        bias = self.layers.get(f"{name}/bias")
        return nn.functional.linear(inputs, self.layers[f"{name}/weight"], bias)

    def mlp(self, name: str, inputs: torch.Tensor, last_activation: bool) -> torch.Tensor:
        indices = sorted({int(key.split("/")[1]) for key in self.layers if key.startswith(f"{name}/")})
        for index in indices:
            inputs = self.linear(f"{name}/{index}", inputs)
            if last_activation or index != indices[-1]:
                inputs = inputs.relu()
        return inputs

    def forward(self, dense: torch.Tensor, sparse: te.KeyedJaggedTensor) -> torch.Tensor:
        parts = []
        for config, bag in zip(TABLES, self.bags, strict=True):
            parts += [bag(sparse[f].values(), sparse[f].offsets()) for f in config.feature_names]
        pooled = torch.cat(parts, dim=1)
        if "bottom/0/weight" in self.layers:
            vector = self.mlp("bottom", dense, True)
            return self.mlp("top", by_loop(vector, pooled, 3), False)[:, 0]
        first = crossed = torch.cat([dense, pooled], dim=1)
        for layer in range(2):
            down = f"cross/down/{layer}"
            low = self.linear(down, crossed) if f"{down}/weight" in self.layers else crossed
            crossed = first * self.linear(f"cross/up/{layer}", low) + crossed
        return self.mlp("top", crossed, False)[:, 0]


def batch(seed: int = 0, weighted: bool = False) -> tuple[torch.Tensor, te.KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = rows_of(TABLES)
    dense = torch.randn(BATCH, NUM_DENSE, generator=generator)
    return dense, random_batch(rows, list(rows), BATCH, 4, weighted, seed=seed)


@pytest.fixture(params=["dlrm", "dcn", "dcn low rank"])
def kind(request) -> str:
    return request.param


def test_forward_and_gradients_are_those_of_plain_layers(kind):
    model = make(kind)
    twin = Plain(model)
    out, expected = model(*batch()), twin(*batch())
    assert out.shape == (BATCH,)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    for logits in (out, expected):
        nn.functional.binary_cross_entropy_with_logits(logits, torch.arange(BATCH) % 2.0).backward()
    for config, bag in zip(TABLES, twin.bags, strict=True):
        gradient = model.get_parameter(f"embeddings.{config.name}.weight").grad
        torch.testing.assert_close(gradient, bag.weight.grad, **TOLERANCE)
    for name, parameter in twin.layers.items():
        torch.testing.assert_close(model.get_parameter(name.replace("/", ".")).grad, parameter.grad, **TOLERANCE)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.more
def test_training_is_that_of_plain_layers(kind, compiled):
    model = make(kind, te.optim.SGD(lr=0.1))
    twin = Plain(model)
    function = torch.compile(model, fullgraph=True) if compiled else model
    tables = {f"embeddings.{config.name}.weight" for config in TABLES}
    dense = [parameter for name, parameter in model.named_parameters() if name not in tables]
    optimizers = [torch.optim.SGD(dense, lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)]
    for seed in range(5):
        for module, optimizer in zip((function, twin), optimizers, strict=True):
            optimizer.zero_grad()
            logits = module(*batch(seed))
            nn.functional.binary_cross_entropy_with_logits(logits, torch.arange(BATCH) % 2.0).backward()
            optimizer.step()
    torch.testing.assert_close(model(*batch(9)), twin(*batch(9)), **TOLERANCE)
    for config, bag in zip(TABLES, twin.bags, strict=True):
        torch.testing.assert_close(model.get_parameter(f"embeddings.{config.name}.weight"), bag.weight, **TOLERANCE)


@pytest.mark.parametrize("optimizer", [None, te.optim.Adam()], ids=["plain", "fused"])
def test_a_model_can_be_exported_for_inference(kind, optimizer):
    model = make(kind, optimizer).eval()
    with torch.no_grad():
        exported = torch.export.export(model, batch())
        for inputs in (batch(), batch()):
            assert torch.equal(exported.module()(*inputs), model(*inputs))
    assert "embedding_bag_fused" not in exported.graph_module.code
    assert "row_update_" not in exported.graph_module.code


def test_an_exported_model_takes_any_number_of_ids(kind):
    model = make(kind).eval()
    dense, sparse = batch()
    ids = torch.export.Dim("ids", min=2)
    shapes = ({}, [{0: ids}, None, {}, None])
    assert sparse.lengths_or_none() is not None
    with torch.no_grad():
        exported = torch.export.export(model, (dense, sparse), dynamic_shapes=shapes)
        for seed in range(3):
            other_dense, other = batch(seed)
            fresh = te.KeyedJaggedTensor(other.keys(), other.values(), lengths=other.lengths())
            torch.testing.assert_close(exported.module()(other_dense, fresh), model(other_dense, other), rtol=0, atol=0)


def test_a_model_may_start_on_the_meta_device(kind):
    model = make(kind, te.optim.Adam(), device="meta").to_empty(device="cpu")
    source = make(kind, te.optim.Adam())
    model.load_state_dict(source.state_dict())
    model.embeddings.set_learning_rate(0.01)
    assert torch.equal(model(*batch()), source(*batch()))
    assert_same_bits(dict(model.state_dict()), dict(source.state_dict()))


def test_bad_input():
    with pytest.raises(ValueError, match=r"need one embedding_dim, got \{'a': 8, 'b': 4\}"):
        te.nn.DLRM([te.TableConfig("a", 2, 8), te.TableConfig("b", 2, 4)], 3)
    with pytest.raises(ValueError, match="num_dense must be at least 0, got -1"):
        te.nn.DCNv2(TABLES, -1)
    with pytest.raises(ValueError, match="positive widths"):
        te.nn.MLP(3, [])
    with pytest.raises(ValueError, match="positive widths"):
        te.nn.MLP(3, [4, 0])
    for layers, rank in ((0, None), (1, 0)):
        with pytest.raises(ValueError, match="num_layers and low_rank of at least 1"):
            te.nn.CrossNetwork(4, layers, rank)


@pytest.mark.parametrize("optimizer", [None, te.optim.SGD(lr=0.1)], ids=["plain", "fused"])
def test_dlrm_without_dense_features_has_no_bottom_mlp(optimizer):
    model = te.nn.DLRM(TABLES, 0, [16], [32, 9], optimizer)
    assert model.bottom is None
    _, sparse = batch()
    pooled = model.embeddings(sparse)
    first, peers = pooled.split([8, 16], dim=1)
    logits = model(torch.empty(BATCH, 0), sparse)
    expected = model.top(torch.cat([by_loop(first, peers, 2), peers], dim=1))[:, 0]
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.endswith("weight")}
    logits.sum().backward()
    if optimizer is not None:
        assert all(
            not torch.equal(model.state_dict()[f"embeddings.{t.name}.weight"], initial[f"embeddings.{t.name}.weight"])
            for t in TABLES
        )
    with pytest.raises(ValueError, match="without dense features needs at least two sparse features, got 1; use DCNv2"):
        te.nn.DLRM(TABLES[:1], 0)


def test_dcn_without_dense_features():
    model = te.nn.DCNv2(TABLES, 0, 1, None, [4])
    _, sparse = batch()
    assert torch.equal(model(torch.empty(BATCH, 0), sparse), model.top(model.cross(model.embeddings(sparse)))[:, 0])
