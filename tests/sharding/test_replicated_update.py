"""Updates that need other ranks, where a backward pass fails or reaches a table several times."""

import copy
from contextlib import ExitStack

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.sharding.cases import EXACT
from tests.sharding.models import whole_state
from tritonemb.sharding import (
    ColumnWise,
    DataParallel,
    ExchangePrecision,
    Grid,
    RowWise,
    ShardingPlan,
    TableColumnWise,
    TableWise,
)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("as wanted")


def change_after_a_failure(rank):
    """Change of a table in the pass after one that failed once its gradients had arrived."""
    tables = te.nn.EmbeddingBagCollection([te.TableConfig("a", 20, 16)], te.optim.RowWiseAdagrad(lr=0.1))
    plan = ShardingPlan({"a": ColumnWise()}, 2)
    parallel = te.HybridParallel(tables, plan, exchange=EXACT)
    batch = te.KeyedJaggedTensor.from_lists({"a": [[1, 2], [3]]})
    failed = False
    try:
        early = Fails.apply(torch.ones((), requires_grad=True))  # made first, so differentiated last
        (parallel(batch).sum() + early).backward()
    except ValueError:
        failed = True
    changes = []
    previous = parallel.state_dict()["a.weight"].gather(parallel.group)
    for _ in range(2):
        parallel(batch).sum().backward()
        current = parallel.state_dict()["a.weight"].gather(parallel.group)
        changes.append((previous - current).abs().amax(1))
        previous = current
    return failed, changes


def test_a_backward_that_failed_leaves_nothing_behind(ranks):
    """Gradients that waited for its end are void, and later passes update as ever."""
    for failed, (first, second) in ranks(2).run(change_after_a_failure):
        assert failed
        # Adagrad's first step on gradients of ones is the learning rate; an earlier one would have made it smaller.
        torch.testing.assert_close(first[1:4], torch.full((3,), 0.1))
        torch.testing.assert_close(second[1:4], torch.full((3,), 0.1 / 2**0.5))
        assert not first[4:].any()


def two_lookups(rank, pooled):
    """Tables after passes in which they were looked up twice: cut by columns, and whole on one rank."""
    kind = te.nn.EmbeddingBagCollection if pooled else te.nn.EmbeddingCollection
    configs = [te.TableConfig(name, 20, 16, pooling="sum" if pooled else "none") for name in "ab"]
    torch.manual_seed(0)
    tables = kind(configs, te.optim.RowWiseAdagrad(lr=0.1))
    whole = copy.deepcopy(tables)
    plan = ShardingPlan({"a": ColumnWise(), "b": ColumnWise(columns=[5, 11])}, 2)
    parallel = te.HybridParallel(tables, plan, exchange=EXACT)
    for step in range(3):
        results = {"cut": [], "whole": []}
        for use in range(2):
            lists = {name: [[step, use, (7 * r + use) % 20] for r in range(2)] for name in "ab"}
            features = te.KeyedJaggedTensor.from_lists({name: [bags[rank]] for name, bags in lists.items()})
            results["cut"].append(parallel(features))
            results["whole"].append(whole(te.KeyedJaggedTensor.from_lists(lists)))
        for name, actual in results.items():
            rows = [result if pooled else result.values() for result in actual]
            # The ranks' gradients are averaged.
            (
                sum((use + 1) * (row * row).sum() for use, row in enumerate(rows)) * (2 if name == "cut" else 1)
            ).backward()
    expected = whole.state_dict()
    return {name: torch.equal(value, expected[name]) for name, value in whole_state(parallel).items()}


@pytest.mark.parametrize("pooled", [True, False])
def test_tables_that_are_looked_up_twice_are_updated_twice(ranks, pooled):
    """Two lookups in one pass are bitwise identical to those of one rank."""
    for equal in ranks(2).run(two_lookups, pooled):
        assert set(equal) == {"step", "a.weight", "a.sum", "b.weight", "b.sum"}
        assert all(equal.values()), equal


def under_default_dtype(rank, dtype):
    """State after two steps of each kind of sharding under a default dtype of torch."""
    torch.manual_seed(0)
    configs = [te.TableConfig(name, 20, 8) for name in "abcd"]
    shardings = {"a": TableWise(0), "b": RowWise(), "c": ColumnWise(), "d": DataParallel()}
    try:
        torch.set_default_dtype(dtype)
        tables = te.nn.EmbeddingBagCollection(configs, te.optim.Adam(lr=0.1))
        parallel = te.HybridParallel(tables, ShardingPlan(shardings, 2), exchange=EXACT)
        for step in range(2):
            lists = {name: [[step, 3, 3, rank], [7 + rank]] for name in "abcd"}
            (parallel(te.KeyedJaggedTensor.from_lists(lists)) * 1.3).sum().backward()
        return whole_state(parallel)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_torch_changes_nothing(ranks, dtype):
    for actual, expected in zip(*(ranks(2).run(under_default_dtype, d) for d in (dtype, torch.float32)), strict=True):
        assert_same_bits(actual, expected)


DIMS = (8, 16, 32, 64, 96, 128, 7, 33, 129)
SQUARES = {  # how optimizers that read a row's mean of squares are set
    "row_wise_adagrad": te.optim.RowWiseAdagrad(lr=0.1, weight_decay=0.01),
    "decoupled": te.optim.RowWiseAdagrad(
        lr=0.1, weight_decay=0.01, weight_decay_mode="decoupled", on_nonfinite="raise"
    ),
    "partial_row_wise_adam": te.optim.PartialRowWiseAdam(lr=0.1, max_gradient=0.5),
}


def trained_by_columns(rank, world, name, dtype, plans):
    """Return whether column-wise sharded tables are bitwise identical to unsharded ones, and bytes per step by kind."""
    configs = [te.TableConfig(f"d{dim}", 40, dim, dtype=dtype) for dim in DIMS if plans != "uneven" or dim > 8]
    torch.manual_seed(1)
    tables = te.nn.EmbeddingBagCollection(configs, SQUARES[name])
    whole = copy.deepcopy(tables)
    kinds = {"default": ColumnWise(), "node": TableColumnWise(1), "grid": Grid()}
    shardings = {c.name: kinds.get(plans, ColumnWise(range(2), columns=[c.embedding_dim - 5, 5])) for c in configs}
    local = world if plans in ("default", "uneven") else world // 2
    parallel = te.HybridParallel(tables, ShardingPlan(shardings, world, local), exchange=EXACT)
    sizes = [3, 0, 5, 1]  # samples of each rank
    for step in range(4):
        parts = [
            {
                c.name: [[(7 * step + 3 * s + r + u) % 40 for u in range(s % 3 + 1)] for s in range(sizes[r])]
                for c in configs
            }
            for r in range(world)
        ]
        parallel.group.traffic.reset()
        with ExitStack() as stack:
            if step == 3:  # in two micro-batches
                stack.enter_context(parallel.collections[0].accumulate())
            for part in [parts[rank], parts[rank]] if step == 3 else [parts[rank]]:
                output = parallel(te.KeyedJaggedTensor.from_lists(part))
                (output.float() * output.float().sin()).sum().mul(world).backward()
        batches = parts + parts if step == 3 else parts
        everything = {c.name: [bag for part in batches for bag in part[c.name]] for c in configs}
        output = whole(te.KeyedJaggedTensor.from_lists(everything))
        (output.float() * output.float().sin()).sum().backward()
    sent = {kind: bytes_sent.total for kind, bytes_sent in parallel.group.traffic.by_kind().items()}
    expected = whole.state_dict()
    wrong = [name for name, value in whole_state(parallel).items() if not torch.equal(value, expected[name])]
    rows = {name: len({i for bag in bags for i in bag}) for name, bags in everything.items()}
    return wrong, sent, rows


QUICK = [
    (2, "default", "row_wise_adagrad", torch.float32),
    (2, "default", "decoupled", torch.bfloat16),
    (2, "default", "partial_row_wise_adam", torch.float16),
    (2, "uneven", "partial_row_wise_adam", torch.float32),
]
MORE = [
    (2, "uneven", "row_wise_adagrad", torch.float32),
    (4, "node", "decoupled", torch.float32),
    (4, "node", "row_wise_adagrad", torch.bfloat16),
    (4, "grid", "partial_row_wise_adam", torch.float32),
    (4, "grid", "decoupled", torch.float16),
]
ALL = [
    (world, plans, name, dtype)
    for world, plans in ((2, "default"), (2, "uneven"), (4, "default"), (4, "node"), (4, "grid"))
    for name in SQUARES
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if plans != "uneven" or dtype == torch.float32  # 16-bit tables are cut at multiples of 8
]


@pytest.mark.parametrize(
    ("world", "plans", "name", "dtype"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.more) for case in MORE),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in QUICK + MORE),
    ],
)
def test_columns_on_several_ranks_are_updated_as_whole_rows_are(ranks, world, plans, name, dtype):
    """Bit for bit, by a few sums of squares for each row, whatever the blocks of columns."""
    results = ranks(world).run(trained_by_columns, world, name, dtype, plans)
    for rank, (wrong, sent, rows) in enumerate(results):
        assert not wrong, wrong
        assert "row columns" not in sent
        if plans == "default" and world == 2:
            # The columns of a block are added as far as blocks begin with multiples of a power of two.
            numbers = {"d96": (3, 3), "d7": (3, 4), "d33": (1, 2), "d129": (1, 2)}
            if dtype == torch.float32:
                assert sent["row squares"] == 4 * sum(n * numbers.get(name, (1, 1))[rank] for name, n in rows.items())


def refused_gradients(rank, optimizer):
    """The error of a backward whose gradient has a NaN in the last column of one row; whether anything has changed."""
    parallel = te.HybridParallel(
        te.nn.EmbeddingBagCollection([te.TableConfig("a", 20, 32)], optimizer),
        ShardingPlan({"a": ColumnWise()}, 2), exchange=EXACT,
    )  # fmt: skip
    initial = whole_state(parallel)
    output = parallel(te.KeyedJaggedTensor.from_lists({"a": [[1, 2], [3 + rank]]}))
    grad = torch.full_like(output, 1e30)  # whose square is infinite, but it is finite
    grad[1, 31] = torch.nan if rank == 1 else 1.0
    try:
        output.backward(grad)
        message = ""
    except ValueError as error:
        message = str(error)
    current = whole_state(parallel)
    changed = {i for i in range(20) if not torch.equal(current["a.weight"][i], initial["a.weight"][i])}
    return message, changed, int(current["step"]), parallel.collections[0].skipped_rows()


@pytest.mark.parametrize("name", ["RowWiseAdagrad", "PartialRowWiseAdam", "SGD", "Adam"])
def test_gradients_that_are_not_finite_in_columns_of_another_rank(ranks, name):
    """Every rank skips the row, the ranks whose own columns are finite, too; or raises before anything is changed."""
    kind = getattr(te.optim, name)
    for message, changed, step, skipped in ranks(2).run(refused_gradients, kind(lr=0.1)):
        assert (message, step, skipped) == ("", 1, {"a": 1})
        assert 4 not in changed
        assert name != "SGD" or {1, 2, 3} <= changed  # others divide by infinite squares
    for message, changed, step, _ in ranks(2).run(refused_gradients, kind(lr=0.1, on_nonfinite="raise")):
        assert "row 4" in message
        assert "'a'" in message
        assert not changed
        assert step == 0


def replicated(rank, codecs):
    """States of a data-parallel table, and of one with replicas of column blocks, by codec."""
    states = []
    for codec in codecs:
        torch.manual_seed(0)
        configs = [te.TableConfig("a", 30, 16), te.TableConfig("b", 30, 16)]
        tables = te.nn.EmbeddingBagCollection(configs, te.optim.RowWiseAdagrad(lr=0.1))
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        plan = ShardingPlan({"a": DataParallel(), "b": ColumnWise()}, 2)
        parallel = te.HybridParallel(tables, plan, mesh, exchange=ExchangePrecision("fp32", codec))
        for step in range(3):
            lists = [[(5 * step + 3 * sample + rank) % 30 for _ in range(2)] for sample in range(rank)]
            output = parallel(te.KeyedJaggedTensor.from_lists({"a": lists, "b": lists}))
            (output.square().sum() / 1000).backward()
        shards = [s.tensor.clone() for w in parallel.table_weights().values() for s in w.shards]
        states.append((shards, parallel.saturated()))
    return states


def test_replicas_stay_bitwise_identical_under_every_codec(ranks):
    steps = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8, "fp8_e5m2": 2**-3, "fp8_e4m3": 2**-4, "int8": 2**-8}
    results = ranks(4).run(replicated, list(steps))
    for number, (codec, step) in enumerate(steps.items()):
        for rank, of_rank in enumerate(results):
            (a, b), saturated = of_rank[number]
            assert saturated == 0
            assert torch.equal(a, results[0][number][0][0]), codec
            assert torch.equal(b, results[rank % 2][number][0][1]), codec
            if codec in ("fp32", "fp16", "bf16"):  # a rounding each of 3 steps of 0.4 at most, or two for two exchanges
                for actual, expected in zip((a, b), of_rank[0][0], strict=True):
                    assert (actual - expected).abs().max() <= 3 * 0.4 * 2 * step, codec
