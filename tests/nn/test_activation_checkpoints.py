"""Activation checkpoints around lookups with a fused optimizer: they read the rows of the forward again."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tritonemb as te
from tests.helpers import assert_same_bits, contents
from tritonemb.sharding import ColumnWise, DataParallel, RowWise, ShardingPlan

pytestmark = pytest.mark.public

PLACEMENTS = {
    "device": {},
    "host": {"placement": "host", "cache": te.CacheConfig(rows=5)},
    "dynamic": {"num_embeddings": None, "capacity": 20},
}


class Stack(nn.Module):
    """Layers that look up the same tables; `checkpointed` are the numbers of those in activation checkpoints."""

    def __init__(self, placement: str, checkpointed: str, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = {"name": "t", "num_embeddings": 5, "embedding_dim": 4, **PLACEMENTS[placement]}
        self.collection = te.nn.EmbeddingBagCollection([te.TableConfig(**config)], te.optim.Adagrad(lr=0.5))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, features: te.KeyedJaggedTensor) -> torch.Tensor:
        x = torch.ones(2, 4, requires_grad=True)
        for number, layer in enumerate(self.layers):

            def part(x: torch.Tensor, layer: nn.Module = layer) -> torch.Tensor:
                return torch.tanh(layer(x) * self.collection(features))

            is_checkpointed = str(number) in self.checkpointed
            x = checkpoint(part, x, use_reentrant=self.reentrant) if is_checkpointed else part(x)
        return x.square().sum()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("checkpointed", "reentrant"), [("012", False), ("012", True), ("0", False), ("02", False)])
def test_a_checkpoint_repeats_a_lookup_before_its_table_is_updated(placement, checkpointed, reentrant):
    features = te.KeyedJaggedTensor.from_lists({"t": [[1, 3, 1], [4]]})
    model, reference = Stack(placement, checkpointed, reentrant), Stack(placement, "")
    for _ in range(2):
        for stack in (model, reference):
            stack.layers.zero_grad()
            stack(features).backward()
        for layer, expected in zip(model.layers, reference.layers, strict=True):
            assert torch.equal(layer.weight.grad, expected.weight.grad)
    assert int(model.collection.step) == 6
    assert_same_bits(contents(model.collection), contents(reference.collection))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_lookup_that_would_read_updated_rows_again_is_an_error(placement):
    model = Stack(placement, "0", reentrant=True)
    with pytest.raises(RuntimeError, match=r"updated already.*use_reentrant=False"):
        model(te.KeyedJaggedTensor.from_lists({"t": [[1, 3, 1], [4]]})).backward()


def train_shards(rank):
    """Gradients of the layers, and rows, by sharding type and checkpointed layers."""
    features, results = te.KeyedJaggedTensor.from_lists({"t": [[1, 3 - rank, 1], [4]]}), {}
    for sharding in (DataParallel(), RowWise(), ColumnWise()):
        for checkpointed in ("", "012", "0"):
            model = Stack("device", checkpointed)
            model.collection = te.HybridParallel(model.collection, ShardingPlan({"t": sharding}, 2))
            for _ in range(2):
                model(features).backward()
            rows = model.collection.state_dict()["t.weight"].gather(model.collection.group)
            results[type(sharding).__name__, checkpointed] = [*(p.grad for p in model.layers.parameters()), rows]
    return results


def test_a_checkpoint_repeats_a_lookup_of_shards_before_they_are_updated(ranks):
    for results in ranks(2).run(train_shards):
        for (sharding, checkpointed), tensors in results.items():
            for actual, expected in zip(tensors, results[sharding, ""], strict=True):
                assert torch.equal(actual, expected), (sharding, checkpointed)
