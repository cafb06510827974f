"""Shards that live in host memory or on disk train as whole tables on the device of one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import tritonemb as te
from tests.helpers import CACHED, assert_same_bits, living
from tests.sharding.cases import (
    Case,
    alone,
    differences,
    groups_of,
    sizes,
    tables,
    together,
    train_steps,
)
from tests.sharding.models import whole_state
from tritonemb.optim import OPTIMIZERS
from tritonemb.sharding import (
    ColumnWise,
    DataParallel,
    Grid,
    RowWise,
    TableColumnWise,
    TablePlacement,
    TableRowWise,
    TableWise,
)
from tritonemb.tables.table_set import PrefetchedFeatures
from tritonemb.types import CacheConfig

SMALLEST = CacheConfig(rows=1)


def placed(case: Case, *placements: str) -> Case:
    """The same with its tables placed in turn as told."""
    return replace(
        case,
        tables=tuple(
            living(table, placements[number % len(placements)], SMALLEST) for number, table in enumerate(case.tables)
        ),
    )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("placements", [("host",), ("disk",), (CACHED, "device", "host")], ids="-".join)
def test_shards_elsewhere_train_as_one_process_on_the_device(ranks, world, placements):
    by_rows = [TableWise(world - 1), RowWise(), TableRowWise(0)]
    by_columns = [ColumnWise(), RowWise(), TableColumnWise(0)]
    cases = [
        Case(
            tables(pooled, 3),
            tuple(by_rows if optimizer in ("row_wise_adagrad", "lamb") else by_columns),
            OPTIMIZERS[optimizer](lr=0.05),
            sizes(world, 4, 1 + (optimizer == "adam")),
            pooled,
            world,
            weighted=pooled,
            seed=21,
        )
        for pooled in (True, False)
        for optimizer in ("row_wise_adagrad", "lamb", "adam", "sgd")
    ]
    results = ranks(world).run(together, [placed(case, *placements) for case in cases])
    for number, case in enumerate(cases):
        assert not differences(case, alone(case), [of_rank[number][0] for of_rank in results])


def test_int8_shards_train_as_one_process(ranks):
    configs = [replace(config, dtype=torch.int8, placement="host", cache=SMALLEST) for config in tables(True, 3)]
    cuts = (TableWise(1), RowWise(), DataParallel())
    case = Case(tuple(configs), cuts, te.optim.RowWiseAdagrad(lr=0.05), sizes(2, 4), True, 2, seed=23)
    expected = alone(case).state
    state = ranks(2).run(together, [case])[0][0][0].state
    for name, tensor in expected.items():
        assert name.startswith("table2") or torch.equal(state[name], tensor), name
    # Replicas add gradients in another order.
    values = [tensors["table2.weight"] * tensors["table2.weight_scale"][:, None] for tensors in (state, expected)]
    assert (values[0] - values[1]).abs().max() < 8 * expected["table2.weight_scale"].max()
    for sharding, problem in (
        (ColumnWise([0, 1]), "into 2 blocks"),
        (TableColumnWise(0, [8, 8]), "begin at multiples of 16"),
    ):
        plan = te.sharding.ShardingPlan({"table0": sharding}, 2)
        with pytest.raises(ValueError, match=f"table 'table0': .* torch.int8 .*{problem}"):
            plan.shards(configs[0])


def reload(rank: int, case: Case, other_case: Case) -> list[dict[str, torch.Tensor]]:
    """State of a trained collection, and of others that have loaded it: from the device elsewhere, and back."""
    groups = groups_of(case.local)
    trained, other_tier, back = case.sharded(groups), other_case.sharded(groups), case.sharded(groups)
    for step in range(2):
        trained(case.batches(step)[0][rank]).sum().backward()
    whole = whole_state(trained, groups.world)
    other_tier(case.batches(0)[0][rank]).sum().backward()  # rows are on the device when others are loaded
    other_tier.load_state_dict(whole)
    state = whole_state(other_tier, groups.world)
    back.load_state_dict(state)
    last = whole_state(back, groups.world)
    outputs = [collection(case.batches(1)[0][rank]).detach() for collection in (trained, other_tier, back)]
    return [whole, state, last, *[{"output": output} for output in outputs]]


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_state_is_loaded_wherever_shards_live(ranks, placement):
    cuts = (TableWise(1), RowWise([1, 0], [5, 32]), ColumnWise())
    case = Case(tables(True, 3), cuts, te.optim.Adam(lr=0.1), sizes(2, 2), True, 2, seed=22)
    for results in ranks(2).run(reload, case, placed(case, placement)):
        whole, other_tier, back, *outputs = results
        assert_same_bits(other_tier, whole)
        assert_same_bits(back, whole)
        assert_same_bits(outputs[1], outputs[0])
        assert_same_bits(outputs[2], outputs[0])


def loaded_in_place(rank: int, case: Case) -> list[dict[str, torch.Tensor]]:
    """State as `torch.distributed.checkpoint` loads it, into the tensors of `state_dict`; and what came of it."""
    collection = case.sharded(groups_of(case.local))
    collection(case.batches(0)[0][rank]).sum().backward()
    saved = {name: own_of(shards).clone() for name, shards in collection.state_dict().items()}
    collection(case.batches(0)[0][rank]).sum().backward()
    ahead = collection.prefetch(case.batches(0)[0][rank])  # holds rows that have changed
    live = collection.state_dict()
    for name, shards in live.items():
        tensor = shards.shards[0].tensor
        assert not torch.equal(tensor, saved[name]), name
        tensor.copy_(saved[name])
    collection.load_state_dict(live)
    del ahead
    return [{name: own_of(shards).clone() for name, shards in collection.state_dict().items()}, saved]


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_state_is_loaded_in_place_while_a_batch_that_was_sent_waits(ranks, placement):
    case = Case(tables(True, 2), (TableWise(0),) * 2, te.optim.Adam(lr=0.1), sizes(1, 1), True, 1, seed=22)
    for loaded, saved in ranks(1).run(loaded_in_place, placed(case, placement)):
        assert_same_bits(loaded, saved)


def drawn(rank: int, placement: str) -> dict[str, torch.Tensor]:
    """First values of shards of a model that nobody has made whole."""
    torch.manual_seed(5)
    config = te.TableConfig("t", 70, 16, placement=placement, cache=SMALLEST)
    model = te.nn.EmbeddingBagCollection([config], te.optim.SGD(lr=0.1), device="meta")
    plan = te.sharding.ShardingPlan({"t": RowWise()}, 2)
    sharded = te.HybridParallel(model, plan, device="cpu")
    return whole_state(sharded.module, sharded.group)


def test_first_values_are_the_same_wherever_shards_live(ranks):
    expected = ranks(2).run(drawn, "device")
    assert float(expected[0]["t.weight"].abs().max()) > 0
    for placement in ("host", "disk"):
        for actual, one in zip(ranks(2).run(drawn, placement), expected, strict=True):
            assert_same_bits(actual, one)


def cached(rank: int) -> dict[str, tuple[int, int, int]]:
    """Rows of shards of different sizes, and their slots on the device and in host memory."""
    configs = [te.TableConfig("static", 1_000, 8), te.TableConfig("dynamic", None, 8, capacity=100_000)]
    uneven = {"static": RowWise([1, 0], [800, 200]), "dynamic": RowWise([0, 1], [4, 12])}
    shares = TablePlacement("disk", cache_share=0.25, host_share=0.5)
    plan = te.sharding.ShardingPlan(uneven, 2, placements={"static": shares, "dynamic": shares})
    model = te.HybridParallel(te.nn.EmbeddingBagCollection(configs, te.optim.SGD(lr=0.1)), plan)
    tables: list[Any] = [table for local in model.collections[0].table_sets for table in local.tables]
    return {
        table.config.name: (table.rows.config.num_embeddings, len(table.weight), len(table.rows.store._cache._records))
        for table in tables
    }


def test_each_rank_caches_a_share_of_its_own_rows(ranks):
    assert ranks(2).run(cached) == [
        {"static": (200, 64, 128), "dynamic": (25_000, 6_272, 12_512)},
        {"static": (800, 224, 416), "dynamic": (75_000, 18_752, 37_504)},
    ]


# Ways in which gradients of several ranks update the same rows: the cuts, copies of the tables, ranks of a node.
GATHERED = {
    "column-wise": ([ColumnWise(), TableColumnWise(0), ColumnWise([1, 1], [8, 8])], 1, 2),
    "grid": ([Grid(), Grid([0, 0], [8, 8])], 1, 2),
    "data-parallel": ([DataParallel()], 1, 0),
    "copies": ([TableWise(0), RowWise()], 2, 0),
    "mixed": ([DataParallel(), TableWise(1), ColumnWise()], 1, 0),
    "copied columns": ([ColumnWise(), DataParallel(), RowWise()], 2, 0),
}


def larger(pooled: bool, dtype: torch.dtype = torch.float32) -> tuple[te.TableConfig, ...]:
    """Tables of which a cache of 32 rows holds a part, and one that two features look up."""
    return tuple(
        te.TableConfig(
            f"table{index}",
            rows,
            16,
            features=[f"a{index}", f"b{index}"] if index == 1 else [f"a{index}"],
            pooling=("sum", "mean", "sum")[index] if pooled else "none",
            dtype=dtype,
        )
        for index, rows in enumerate((70, 300, 41))
    )


def gathered(way: str, optimizer: str, world: int = 2, pooled: bool = True, steps: int = 5, **options: Any) -> Case:
    """Batches of more distinct rows than there are slots, of few, and of none."""
    cuts, copies, local = GATHERED[way]
    by_step = (((17, 5), (3, 9)), ((0, 4),), ((2, 2),), ((0, 0),), ((12, 0), (1, 30)))
    if world == 4:
        by_step = tuple(tuple((*micro, *micro[::-1]) for micro in step) for step in by_step)
    dtype = options.pop("dtype", torch.float32)
    return Case(
        larger(pooled, dtype),
        tuple(cuts[number % len(cuts)] for number in range(3)),
        OPTIMIZERS[optimizer](lr=0.05, **options),
        tuple(by_step[step % 5] for step in range(steps)),
        pooled,
        local,
        copies,
        weighted=pooled,
        seed=31,
        title=f"{way} {optimizer} {options}",
    )


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("way", GATHERED)
@pytest.mark.more
def test_rows_that_several_ranks_update_may_live_anywhere(ranks, way, pooled, world):
    """The bits of the same plan on the device."""
    skips = {"dtype": torch.bfloat16, "on_nonfinite": "skip"}
    cases = [
        gathered(way, name, 2 if way == "grid" else world, pooled, **options)
        for name, options in (
            ("row_wise_adagrad", {"max_gradient": 0.05}),
            ("row_wise_adagrad", skips),
            ("lamb", {}),
            ("lars_sgd", {"max_norm": 0.9, **skips}),
        )
    ]
    world = cases[0].world
    expected = ranks(world).run(together, cases)
    for place, look_ahead in ((["disk"], None), (["host", "device", CACHED], 4)):
        results = ranks(world).run(together, [placed(case, *place) for case in cases], 1, look_ahead)
        for of_rank, expected_of_rank in zip(results, expected, strict=True):
            for case, (actual,), (reference,) in zip(cases, of_rank, expected_of_rank, strict=True):
                title = f"{case.title} on {place} with a look-ahead of {look_ahead}:"
                assert_same_bits(actual.state, reference.state, title)
                assert actual.skipped == reference.skipped, title
                for step, outputs in enumerate(zip(actual.outputs, reference.outputs, strict=True)):
                    assert_same_bits({"output": outputs[0]}, {"output": outputs[1]}, f"{title} step {step}")


def resumed(rank: int, case: Case, other_case: Case) -> list[dict[str, torch.Tensor]]:
    """State and outputs of a training, and of one that another collection went on with."""
    groups = groups_of(case.local or None, case.copies)
    whole, first, second = case.sharded(groups), other_case.sharded(groups), other_case.sharded(groups)
    outputs = [train_steps(case, whole, rank, range(6))]
    outputs.append(train_steps(case, first, rank, range(3), 2))
    second.load_state_dict(whole_state(first, groups.world))
    outputs[1] += train_steps(case, second, rank, range(3, 6), 1)
    states = [whole_state(collection, groups.world) for collection in (whole, second)]
    return [{**state, **{str(n): o for n, o in enumerate(of)}} for state, of in zip(states, outputs, strict=True)]


@pytest.mark.parametrize("way", ["data-parallel", "column-wise"])
@pytest.mark.few(1)
def test_training_goes_on_with_a_loaded_state(ranks, way):
    case = gathered(way, "row_wise_adagrad", steps=6)
    for whole, actual in ranks(2).run(resumed, case, placed(case, "disk", "host")):
        assert_same_bits(actual, whole)


def drawn_apart(rank: int, case: Case, device: str) -> list[dict[str, torch.Tensor]]:
    """First values of a copy of each table on ranks whose generators differ, and those after an average."""
    torch.manual_seed(rank)
    groups = groups_of(case.local or None, case.copies)
    model = te.nn.EmbeddingBagCollection(case.tables, case.optimizer, device=device)
    parallel = te.HybridParallel(
        model, case.plan(), init_device_mesh("cpu", (2, 1)), device="cpu", average_every=2, local_world_size=1
    )
    results = []
    for _ in range(3):
        results.append({name: own_of(shards) for name, shards in parallel.state_dict().items()})
        parallel(case.batches(0)[0][rank]).sum().backward()
        parallel.end_step()
    assert groups.replicas.size == 2
    return [*results, {name: own_of(shards) for name, shards in parallel.state_dict().items()}]


def own_of(shards: Any) -> torch.Tensor:
    (shard,) = shards.shards
    return shard.tensor.clone()


@pytest.mark.parametrize(("placement", "device"), [("host", "meta"), ("disk", "cpu"), ("disk", "meta")])
@pytest.mark.few(1)
def test_copies_that_train_apart_begin_alike_and_are_averaged(ranks, placement, device):
    case = gathered("copies", "row_wise_adagrad")
    case = replace(case, shardings=(TableWise(0),) * 3, weighted=False)
    expected = ranks(2).run(drawn_apart, case, device)
    results = ranks(2).run(drawn_apart, placed(case, placement), device)
    for rank in range(2):
        for step in range(4):
            assert_same_bits(results[rank][step], expected[rank][step], f"after step {step} on rank {rank}")
    assert_same_bits(results[0][0], results[1][0])
    assert not torch.equal(results[0][1]["table0.weight"], results[1][1]["table0.weight"])
    assert_same_bits(results[0][2], results[1][2])


def twice(rank: int, case: Case) -> dict[str, torch.Tensor]:
    """A batch that was sent once and is looked up twice, in one backward pass."""
    groups = groups_of(case.local or None)
    collection = case.sharded(groups)
    for step in range(3):
        batch = case.batches(step)[0][rank]
        sent = PrefetchedFeatures(batch, {id(collection): collection.prefetch(batch)})
        with torch.no_grad():
            collection(case.batches(4)[0][rank])
        (collection(sent).sum() + collection(sent).square().sum()).backward()
    return whole_state(collection, groups.world)


def bring_some(collection: Any, first: int, count: int) -> None:
    """Bring rows of every shard on this rank, which nobody holds afterwards."""
    for local in collection.table_sets:
        ids = {}
        for config in local.configs:
            rows = [[row for row in range(first, first + count) if row < config.num_embeddings]]
            ids |= dict.fromkeys(config.feature_names, rows)
        with torch.no_grad():
            local.group(te.KeyedJaggedTensor.from_lists(ids))


def with_other_caches(rank: int, case: Case) -> dict[str, torch.Tensor]:
    """Ranks have other rows in other slots to begin with."""
    groups = groups_of(case.local or None)
    collection = case.sharded(groups)
    bring_some(collection, 20 * rank, 9)
    outputs = train_steps(case, collection, rank, range(len(case.sizes)))
    return whole_state(collection, groups.world) | {str(step): output for step, output in enumerate(outputs)}


class BringsInBackward(torch.autograd.Function):
    """Brings rows of all tables when it is differentiated."""

    @staticmethod
    def forward(ctx, x, collection):
        ctx.collection = collection
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        bring_some(ctx.collection, 3, 300)  # so rows 0 to 2, which most batches have, would make room
        return grad, None


def busy(rank: int, case: Case) -> dict[str, torch.Tensor]:
    """States after steps whose backward passes evict rows behind the tables' gradients."""
    groups = groups_of(case.local or None)
    collection = case.sharded(groups)
    for step in range(3):
        early = BringsInBackward.apply(torch.ones((), requires_grad=True), collection)  # first, so differentiated last
        (collection(case.batches(step)[0][rank]).sum() + early).backward()
    return whole_state(collection, groups.world)


def busy_after_accumulation(rank: int, case: Case) -> dict[str, torch.Tensor]:
    """States after accumulated steps, where other rows are prefetched before updates of whole rows are applied."""
    groups = groups_of(case.local or None)
    collection = case.sharded(groups)
    for update in collection._updates.of_whole_rows.values():
        update.flush = partial(_bring_and_flush, collection, update.flush)
    for step in range(3):
        with collection.accumulate():
            for micro in case.batches(step):
                collection(micro[rank]).sum().backward()
    return whole_state(collection, groups.world)


def _bring_and_flush(collection: Any, flush: Callable[[], None]) -> None:
    bring_some(collection, 3, 300)
    flush()


@pytest.mark.parametrize("way", ["data-parallel", "column-wise"])
@pytest.mark.parametrize("steps", [twice, with_other_caches, busy, busy_after_accumulation])
def test_no_bit_depends_on_what_caches_hold(ranks, steps, way):
    case = gathered(way, "row_wise_adagrad")
    expected = ranks(2).run(steps, case)
    for actual, one in zip(ranks(2).run(steps, placed(case, "disk", "host")), expected, strict=True):
        assert_same_bits(actual, one)


def bad_ids(rank: int, case: Case) -> tuple[str, str]:
    """Error of each rank for an id out of range on rank 1; a later step succeeds."""
    collection = case.sharded(groups_of())
    batch = case.batches(0)[0][rank]
    if rank == 1:
        batch = te.KeyedJaggedTensor(batch.keys(), batch.values() + 1000, batch.weights(), lengths=batch.lengths())
    with pytest.raises((ValueError, RuntimeError)) as caught:
        collection(batch)
    collection(case.batches(1)[0][rank]).sum().backward()
    return type(caught.value).__name__, str(caught.value)


def test_ids_out_of_range_are_told_to_ranks_that_have_the_table_too(ranks):
    case = placed(gathered("data-parallel", "row_wise_adagrad"), "host")
    (remote_kind, remote_error), (local_kind, local_error) = ranks(2).run(bad_ids, case)
    assert (remote_kind, local_kind) == ("RuntimeError", "ValueError")
    assert "rank 1 rejected its batch" in remote_error
    assert "out of range" in local_error


def in_another_order(rank: int, case: Case) -> str:
    """Error of a rank if rank 0 trains the batch prefetched first, and rank 1 the other."""
    collection = case.sharded(groups_of())
    sent = []
    for step in (0, 5):
        batch = case.batches(step)[0][rank]
        sent.append(PrefetchedFeatures(batch, {id(collection): collection.prefetch(batch)}))
    with pytest.raises(RuntimeError, match="other ranks train rows of table") as caught:
        collection(sent[rank]).sum().backward()
    return str(caught.value)


def test_ranks_that_train_batches_in_another_order_are_told(ranks):
    case = placed(gathered("data-parallel", "row_wise_adagrad", steps=6), "host")
    for message in ranks(2).run(in_another_order, case):
        assert "in the same order" in message
