"""Same inputs, same bits: on any number of threads, compiled or not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tritonemb as te
from tests.helpers import assert_same_bits, configurations, contents, fewer, make_collection, random_steps, train
from tests.strategies import TABLE_DTYPES

NUM_STEPS = 12
THREADS = (1, 2, 4)
NUM_OTHERS = fewer(40, 10)  # samples beside the one that is looked at
# Enough elements that kernels share their work among threads.
TABLES = [
    te.TableConfig(f"{pooling}{index}", 400, fewer(60, 12) + index, pooling=pooling, dtype=dtype)
    for index, dtype in enumerate(TABLE_DTYPES)
    for pooling in ("sum", "mean")
]
SHAPE = {"batch_size": 48, "max_length": 9, "weighted": True}


class Several(nn.Module):
    """All optimizers side by side, so that one compilation serves them all."""

    def __init__(self) -> None:
        super().__init__()
        self.collections = nn.ModuleList(make_collection(TABLES, spec) for spec in configurations())

    def forward(self, batch):
        return torch.cat([collection(batch) for collection in self.collections], dim=1)


def trained(num_threads: int, num_steps: int = NUM_STEPS, compiled: bool = False) -> dict[str, torch.Tensor]:
    torch.set_num_threads(num_threads)
    model = Several()
    steps = random_steps(model.collections[0], num_steps, **SHAPE)
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(model, fullgraph=True, dynamic=True)
        for batch, grad in steps:
            function(batch).backward(grad.repeat(1, len(model.collections)))
    else:
        for collection in model.collections:
            train(collection, steps)
    return {
        f"{collection.optimizer.name} {index} {name}": tensor
        for index, collection in enumerate(model.collections)
        for name, tensor in contents(collection).items()
    }


@pytest.fixture(scope="module")
def on_one_thread() -> dict[str, torch.Tensor]:
    initial = torch.get_num_threads()
    result, untrained = trained(1), trained(1, num_steps=0)
    torch.set_num_threads(initial)
    assert not [name for name, tensor in untrained.items() if torch.equal(tensor, result[name])]
    return result


@pytest.mark.parametrize("num_threads", THREADS)
def test_any_number_of_threads_gives_the_same_bits(num_threads, on_one_thread):
    assert_same_bits(trained(num_threads), on_one_thread)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.more
def test_compiled_on_any_number_of_threads_gives_the_same_bits(on_one_thread):
    assert_same_bits(trained(4, compiled=True), on_one_thread)


@pytest.mark.public
@pytest.mark.parametrize("spec", configurations(), ids=lambda spec: spec.name)
def test_a_row_is_updated_alike_whatever_else_is_in_the_batch(spec):
    """Samples and features that do not touch a row leave its bits, and the sample's output, as they would be."""
    collection = make_collection(TABLES, spec)
    single = copy.deepcopy(collection)
    width = sum(config.embedding_dim for config in TABLES)
    for seed in range(fewer(3, 1)):
        grad = torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
        local = {config.name: [[3, 9, 3]] for config in TABLES}
        more = [[100 + i, 200 + i + seed] for i in range(NUM_OTHERS)]
        peers = {config.name: [[3, 9, 3], *more] for config in TABLES}
        small = single(te.KeyedJaggedTensor.from_lists(local))
        large = collection(te.KeyedJaggedTensor.from_lists(peers))
        assert torch.equal(small[0], large[0])
        small.backward(grad)
        large.backward(torch.cat([grad, torch.ones(NUM_OTHERS, width)]))
    actual, expected = contents(collection), contents(single)
    for name in expected.keys() - {"step"}:
        assert torch.equal(actual[name][[3, 9]], expected[name][[3, 9]]), name
        assert not torch.equal(actual[name], expected[name])
