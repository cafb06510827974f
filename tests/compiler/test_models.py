"""Models in plain `torch.nn` train to the same losses by our backend, with one lookup, grouping and update a graph."""

import copy
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.nn import functional as F

import tritonemb as te
from tests.compiler.graphs import Recorded, copies_of, count_ops
from tests.compiler.models import DCN, DLRM, DeepFM, SequenceTower, TwoTower
from tests.helpers import breadth

BATCH_SIZE, NUM_STEPS = 64, 100
# Losses in float32 after up to 100 steps whose sums are taken in another order.
CLOSE = {"rtol": 1e-5, "atol": 0.0}
ROWS = [3 + (k * 37) % 90 for k in range(8)]

# Features that have as many ids in the first batch, by chance, are taken to have as many always, until they do not.
MOST_GRAPHS = 3

Step = tuple[Any, ...]


def by_seed(draw: Callable[[torch.Generator], Step]) -> Callable[[int], list[Step]]:
    """A function that makes a number of steps, each of its own seed."""
    return lambda count: [draw(torch.Generator().manual_seed(number)) for number in range(count)]


@by_seed
def dlrm_steps(g: torch.Generator) -> Step:
    lengths = [torch.randint(0, 4, (BATCH_SIZE,), generator=g) for _ in ROWS]
    ids = [torch.randint(rows, (int(n.sum()),), generator=g) for rows, n in zip(ROWS, lengths, strict=True)]
    return torch.randn(BATCH_SIZE, 13, generator=g), ids, [n.cumsum(0) - n for n in lengths]


@by_seed
def field_steps(g: torch.Generator) -> Step:
    return (torch.stack([torch.randint(rows, (BATCH_SIZE,), generator=g) for rows in ROWS], 1),)


@by_seed
def dense_and_field_steps(g: torch.Generator) -> Step:
    sparse = torch.stack([torch.randint(rows, (BATCH_SIZE,), generator=g) for rows in ROWS], 1)
    return torch.randn(BATCH_SIZE, 13, generator=g), sparse


@by_seed
def tower_steps(g: torch.Generator) -> Step:
    user, country, item = (torch.randint(rows, (BATCH_SIZE,), generator=g) for rows in (50, 5, 70))
    offsets = F.pad(torch.randint(0, 4, (BATCH_SIZE,), generator=g).cumsum(0), (1, 0))
    return user, country, item, torch.randint(9, (int(offsets[-1]),), generator=g), offsets


@by_seed
def sequence_steps(g: torch.Generator) -> Step:
    user, item = (torch.randint(1, rows, (BATCH_SIZE,), generator=g) for rows in (50, 70))
    present = torch.randint(2, (BATCH_SIZE, 5), generator=g)
    return user, torch.randint(1, 70, (BATCH_SIZE, 5), generator=g) * present, item


def click_loss(out: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, (torch.arange(out.shape[0]) % 3 == 0).float())


def in_batch_softmax(out: Tensor) -> Tensor:
    return F.cross_entropy(out, torch.arange(out.shape[0]))


class Case:
    """A model, its batches, its loss, and how many lookups are left of all."""

    def __init__(self, make: Callable[[], nn.Module], steps: Callable[[int], list[Step]], loss: Any, num_lookups: int):
        self.make, self.steps, self.loss, self.num_lookups = make, steps, loss, num_lookups


CASES = {
    "dlrm": Case(lambda: DLRM(ROWS, 8), dlrm_steps, click_loss, 1),
    "dcn": Case(lambda: DCN(ROWS), dense_and_field_steps, click_loss, 1),
    "deepfm": Case(lambda: DeepFM(ROWS), field_steps, click_loss, 1),
    "two-tower": Case(lambda: TwoTower(50, 5, 70, 9), tower_steps, in_batch_softmax, 1),
    # A row for every id of a history has another form than one for every sample.
    "sequence": Case(lambda: SequenceTower(50, 70), sequence_steps, in_batch_softmax, 1),
}


def train(forward: Any, case: Case, optimizers: list[torch.optim.Optimizer], steps: list[Step]) -> list[float]:
    losses = []
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = case.loss(forward(*step))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def pair(case: Case) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = case.make()
    return model, copy.deepcopy(model)


def graphs_of(recorded: Recorded) -> list[tuple[Counter[str], Counter[str]]]:
    """The ops of every graph, forward and backward."""
    assert 1 <= len(recorded.forwards) == len(recorded.backwards) <= MOST_GRAPHS
    return [
        (count_ops(forward), count_ops(backward))
        for forward, backward in zip(recorded.forwards, recorded.backwards, strict=True)
    ]


def table_shapes(model: nn.Module) -> set[tuple[int, ...]]:
    kinds = (nn.EmbeddingBag, nn.Embedding)
    return {tuple(module.weight.shape) for module in model.modules() if isinstance(module, kinds)}


@pytest.mark.parametrize("name", breadth(CASES, ["dcn"]))
class TestGraphs:
    @pytest.mark.more
    def test_one_lookup_one_grouping_one_gradient(self, name):
        case = CASES[name]
        model, plain = pair(case)
        recorded = Recorded(model, fullgraph=True, dynamic=True)
        steps = case.steps(12)
        optimizers = [torch.optim.Adagrad(item.parameters(), lr=0.05) for item in (model, plain)]
        result = train(recorded, case, optimizers[:1], steps)
        torch.testing.assert_close(result, train(plain, case, optimizers[1:], steps), **CLOSE)
        for forward, backward in graphs_of(recorded):
            assert forward["tritonemb.embedding_bag"] == case.num_lookups
            assert (forward + backward)["tritonemb.row_groups"] == case.num_lookups
            assert backward["tritonemb.row_gradients"] == case.num_lookups
        for graph in (*recorded.forwards, *recorded.backwards):
            for shape in table_shapes(model):
                assert not copies_of(graph, shape)

    def test_one_lookup_one_update(self, name):
        """The update groups the ids."""
        case = CASES[name]
        model, plain = pair(case)
        fused = te.optim.fused(model, te.optim.Adagrad(lr=0.05, eps=1e-10))
        recorded = Recorded(model, fullgraph=True, dynamic=True)
        steps = case.steps(12)
        result = train(recorded, case, [fused], steps)
        other = torch.optim.Adagrad(plain.parameters(), lr=0.05)
        torch.testing.assert_close(result, train(plain, case, [other], steps), **CLOSE)
        for forward, backward in graphs_of(recorded):
            assert forward["tritonemb.embedding_bag_fused"] == case.num_lookups
            assert (forward + backward)["tritonemb.row_groups"] == 0
            assert backward["tritonemb.row_update_"] == case.num_lookups
        for graph in recorded.forwards:
            for shape in table_shapes(model):
                assert not copies_of(graph, shape)


@pytest.mark.parametrize("name", ["dlrm", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "dlrm")])
@pytest.mark.more
def test_by_inductor_many_steps_have_the_same_losses(name):
    case = CASES[name]
    model, plain = pair(case)
    forward = torch.compile(model, backend=te.compiler.tritonemb, fullgraph=True, dynamic=True)
    steps = case.steps(NUM_STEPS)
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.05) for item in (model, plain)]
    actual = train(forward, case, optimizers[:1], steps)
    expected = train(plain, case, optimizers[1:], steps)
    assert sum(expected[-10:]) < sum(expected[:10])
    torch.testing.assert_close(actual, expected, **CLOSE)


class Bags(nn.Module):
    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(count, 8, mode="sum") for count in rows])
        self.top = nn.Linear(8 * len(rows), 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.top(torch.cat([bag(ids, offsets) for bag in self.bags], 1))


@pytest.mark.more
@pytest.mark.usefixtures("dynamo")
def test_by_inductor_no_table_is_copied():
    rows = [10_007, 10_009, 10_037]  # numbers that nothing else in a graph has
    model = Bags(rows)
    te.fuse(model, te.optim.Adagrad(lr=0.05))
    twin = copy.deepcopy(model)
    pointers = [tensor.data_ptr() for bag in model.bags for tensor in (bag.weight, bag.sum, bag.step)]
    initial = [bag.weight.detach().clone() for bag in model.bags]
    args = torch.arange(6), torch.tensor([0, 2, 2])
    forward = torch.compile(model, backend=te.compiler.tritonemb, fullgraph=True)
    output, codes = run_fw_bw_and_get_code(lambda: forward(*args))
    code = "\n".join(codes)
    assert code.count("embedding_bag_fused.default(") == code.count("row_update_.default(") == 1
    assert "row_gradients" not in code
    allocated = re.compile(r"= *(empty_strided\w*|aten\.\w+|torch\.\w+|extern_kernels\.\w+)\(.*(10007|10009|10037)")
    copied = re.compile(r"copy_|clone|\b(80056|80072|80296)L?\b")  # elements of a table
    assert [line for line in code.splitlines() if allocated.search(line) or copied.search(line)] == []
    assert pointers == [tensor.data_ptr() for bag in model.bags for tensor in (bag.weight, bag.sum, bag.step)]
    assert not any(torch.equal(bag.weight, old) for bag, old in zip(model.bags, initial, strict=True))
    expected = twin(*args)
    expected.sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-5, atol=1e-6)
