"""The planner: what it chooses against brute force, bounds and other plans, what it refuses, and what it says."""

import ctypes
import itertools
import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import tritonemb as te
from tritonemb import cli
from tritonemb.sharding import (
    ColumnWise,
    Constraint,
    CostModel,
    DataParallel,
    Grid,
    RowWise,
    ShardingPlan,
    TablePlacement,
    TableRowWise,
    TableStats,
    TableWise,
    uniform_plan,
)
from tritonemb.sharding.planner import planner, search
from tritonemb.sharding.planner.cost_model import STAGES
from tritonemb.sharding.planner.options import make_problem
from tritonemb.sharding.planner.search import relax, solve
from tritonemb.sharding.planner.topology import machine
from tritonemb.utils import MissingExtraError

GB = 1e9


def zipf_tables(number: int, seed: int, rows: float = 1e7):
    """Tables whose sizes fall like Zipf's law, and one of which has 30 % of the ids."""
    random = np.random.default_rng(seed)
    sizes = random.permutation(rows / np.arange(1, number + 1) ** 1.05).astype(int) + 100
    dims = random.choice([16, 32, 64, 128], number)
    tables = [
        te.TableConfig(f"t{n}", int(size), int(dim)) for n, (size, dim) in enumerate(zip(sizes, dims, strict=True))
    ]
    pooling = random.uniform(1, 20, number)
    pooling[0] = 0.3 / 0.7 * pooling[1:].sum()
    return tables, {table.name: TableStats(float(ids)) for table, ids in zip(tables, pooling, strict=True)}


def fits(plan, tables, topology, batch_size, **options):
    seen = CostModel(tables, topology, batch_size, copies=plan.copies, **options).predict(plan)
    assert seen.hbm.max() <= topology.hbm * (1 + 1e-9)
    assert seen.host.max(initial=0) <= topology.host * (1 + 1e-9)
    assert seen.disk.max(initial=0) <= topology.disk * (1 + 1e-9)
    return seen


@pytest.mark.parametrize(
    ("number", "ranks"),
    [(200, 8), pytest.param(1_000, 16, marks=pytest.mark.more), pytest.param(2_000, 128, marks=pytest.mark.more)],
)
def test_the_slowest_rank_is_near_the_bound(number, ranks):
    tables, stats = zipf_tables(number, 1)
    topology = te.Topology(ranks, 8)
    plan = te.plan(tables, topology, batch_size=512, stats=stats)
    report = plan.report
    assert report.bound <= report.load <= 1.03 * report.bound
    assert report.load <= report.greedy
    seen = fits(plan, tables, topology, 512, stats=stats)
    assert seen.load == pytest.approx(report.load, rel=1e-9)
    uniform = CostModel(tables, topology, 512, stats=stats).predict(uniform_plan(tables, ranks, 8))
    assert seen.load < uniform.load


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("types", [("table_wise",), ("table_wise", "data_parallel", "row_wise")])
@pytest.mark.few(2)
def test_few_tables_are_placed_as_brute_force_places_them(seed, types):
    random = np.random.default_rng(seed)
    tables = [
        te.TableConfig(f"t{n}", int(10 ** random.uniform(2, 6)), int(random.choice([8, 32, 64]))) for n in range(5)
    ]
    stats = {table.name: TableStats(float(random.uniform(1, 30))) for table in tables}
    topology = te.Topology(3, 3)
    model = CostModel(tables, topology, 256, stats=stats)
    choices = [TableWise(rank) for rank in range(3)]
    if len(types) > 1:
        choices += [DataParallel(), RowWise(), *(RowWise(pair) for pair in itertools.permutations(range(3), 2))]
    names = [table.name for table in tables]
    # Loads add up, so each choice is predicted once, alone.
    costs = np.array([
        [CostModel([table], topology, 256, stats={table.name: stats[table.name]}).predict(
            ShardingPlan({table.name: choice}, 3)).seconds.sum(1) for choice in choices]
        for table in tables
    ])  # fmt: skip
    loads = costs[0]  # of each rank, for all choices for the first tables
    schemes = of_choice = np.array([2 if isinstance(choice, DataParallel) else 1 for choice in choices])
    for of_table in costs[1:]:
        loads = (loads[:, None] + of_table).reshape(-1, 3)
        schemes = (schemes[:, None] | of_choice).ravel()
    latency = [0.0] + [
        model.predict(ShardingPlan(dict(zip(names, shardings * 5, strict=False)), 3)).latency
        for shardings in ([TableWise(0)], [DataParallel()], [TableWise(0), DataParallel()])
    ]
    best = (loads.max(1) + np.array(latency)[schemes]).min()
    constraints = {name: Constraint(types=types) for name in names}
    plan = te.plan(tables, topology, batch_size=256, stats=stats, constraints=constraints)
    assert model.predict(plan).load <= 1.01 * best
    assert plan.report.bound <= best * (1 + 1e-9)


def least_largest_sum(values: list[float], ranks: int) -> float:
    """The least that the largest of `ranks` sums of these can be, by branch and bound."""
    values, sums, best = sorted(values, reverse=True), [0.0] * ranks, sum(values)
    mean = best / ranks

    def place(number: int) -> None:
        nonlocal best
        if number == len(values):
            best = max(sums)
            return
        for rank in range(ranks):
            if sums[rank] in sums[:rank] or sums[rank] + values[number] >= best or best <= mean:
                continue
            sums[rank] += values[number]
            place(number + 1)
            sums[rank] -= values[number]

    place(0)
    return best


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", [7, pytest.param(10, marks=pytest.mark.more), 12])
@pytest.mark.few(1)
def test_whole_tables_on_four_ranks_are_placed_as_branch_and_bound_places_them(number, seed):
    random = np.random.default_rng(seed)
    tables = [te.TableConfig(f"t{n}", int(10 ** random.uniform(3, 6)), 32) for n in range(number)]
    stats = {table.name: TableStats(float(random.uniform(5, 60))) for table in tables}
    costs = np.array([
        CostModel([table], te.Topology(4), 4_096, stats={table.name: stats[table.name]}).predict(
            ShardingPlan({table.name: TableWise(0)}, 4)).seconds.sum(1) for table in tables
    ])  # fmt: skip
    margins = (costs[:, 0] - costs[:, 1]).tolist()
    constraints = {"*": Constraint(types="table_wise", placements="device")}
    plan = te.plan(tables, te.Topology(4), batch_size=4_096, stats=stats, constraints=constraints)
    best = least_largest_sum(margins, 4) + costs[:, 1].sum() + plan.report.prediction.latency
    assert best * (1 - 1e-9) <= plan.report.load <= 1.01 * best
    assert plan.report.bound <= best * (1 + 1e-9)


SLOW_MESSAGES = te.Topology(2, control_latency=6e-3, intra_latency=1e-3, id_rate=5e7, lookup_rate=1e8)


@pytest.mark.parametrize(
    "topology",
    [
        SLOW_MESSAGES,
        te.Topology(4),
        te.Topology(8, 4, inter_latency=2e-3),
        te.Topology(8, 4, lookup_latency=1e-3, host=0),
        te.Topology(4, hbm=0.16 * GB, host=10 * GB),
        te.Topology(4, rank_speed=(1, 0.5, 1, 1), rank_memory=(1, 1, 0.3, 1)),
    ],
    ids=["slow messages", "node", "slow network", "slow launches", "host", "unlike ranks"],
)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.few(3)
def test_no_plan_of_one_sharding_is_faster(topology, seed):
    """Steps wait for latencies: a plan without an ID exchange may be faster than one of less load."""
    tables, stats = zipf_tables(9, seed, rows=2e5)
    report = te.plan(tables, topology, batch_size=256, stats=stats).report
    ranks, local = topology.world_size, topology.local_world_size
    shardings = [itertools.repeat(sharding) for sharding in (DataParallel(), RowWise(), ColumnWise(), TableWise(0))]
    shardings += [map(TableWise, itertools.cycle(range(ranks)))]
    if topology.nodes > 1:
        shardings += [itertools.repeat(Grid()), map(TableRowWise, itertools.cycle(range(topology.nodes)))]
    names = [table.name for table in tables]
    uniform = [ShardingPlan(dict(zip(names, sharding, strict=False)), ranks, local) for sharding in shardings]
    for prediction in map(report.model.predict, [*uniform, uniform_plan(tables, ranks, local)]):
        if (prediction.hbm <= report.model.rank_hbm).all():
            assert report.prediction.step <= prediction.step * (1 + 1e-9)
            assert report.bound <= prediction.load * (1 + 1e-9)
    assert report.load <= 1.05 * report.bound


def test_replicas_save_the_latencies_of_the_id_exchange():
    tables = [te.TableConfig(f"t{n}", 20_000, 32) for n in range(4)]
    stats = {table.name: TableStats(8.0) for table in tables}
    report = te.plan(tables, SLOW_MESSAGES, batch_size=1_024, stats=stats).report
    assert {table.option.kind for table in report.tables} == {"data_parallel"}
    assert all("next best: " in report.explain(table.name) for table in tables)
    quick = te.plan(tables, SLOW_MESSAGES.but(control_latency=0.0, intra_latency=0.0), batch_size=1_024, stats=stats)
    assert {table.option.kind for table in quick.report.tables} != {"data_parallel"}


def test_ranks_may_differ():
    tables, stats = zipf_tables(20, 2)
    options = {"batch_size": 512, "stats": stats}
    alike = te.plan(tables, te.Topology(4), **options).report
    # A rank of half the speed has half the load, and the same time.
    slow = te.plan(tables, te.Topology(4, rank_speed=(1, 1, 0.5, 1)), **options)
    fits(slow, tables, slow.report.model.topology, 512, stats=stats)
    seconds = slow.report.prediction.seconds.sum(1)
    work = CostModel(tables, te.Topology(4), 512, stats=stats).predict(slow).seconds.sum(1)
    np.testing.assert_allclose(seconds, work / [1, 1, 0.5, 1])
    assert slow.report.load <= 1.03 * slow.report.bound
    assert 4 / 3.5 * 0.95 < slow.report.bound / alike.bound < 4 / 3.5 * 1.1
    # Tables go where the memory is.
    size, reserved = sum(alike.model.sizes), alike.model.reserved_bytes
    topology = te.Topology(4, hbm=1.7 * size, rank_memory=(0.3, 1, 0.3, (reserved + 1e6) / (1.7 * size)), host=0)
    plan = te.plan(tables, topology, **options)
    used = plan.report.prediction.hbm
    assert (used <= plan.report.model.rank_hbm * (1 + 1e-9)).all()
    assert used[1] > used[0] > used[3]
    assert te.Topology.from_json(topology.to_json()) == topology
    with pytest.raises(te.PlanError, match="8 ranks"):
        te.plan(tables, topology.but(hbm=0.3 * size + reserved, rank_memory=(1, 0.7, 0.7, 0.7)), **options)


def test_a_table_that_only_several_nodes_have_room_for_is_not_put_on_one():
    table = te.TableConfig("a", 10_000_000, 64)
    topology = te.Topology(8, 4, hbm=1 * GB, host=2 * GB)
    with pytest.raises(te.PlanError, match="short"):
        te.plan([table], topology, batch_size=64, constraints={"a": Constraint("host", "table_row_wise")})
    spread = te.plan([table], topology, batch_size=64, constraints={"a": Constraint("host")})
    fits(spread, [table], topology, 64)


def test_int8_tables_are_in_host_memory_or_on_disk_with_whole_rows():
    tables = [te.TableConfig(f"t{n}", 10**n, 64, dtype=torch.int8, placement="host") for n in (3, 7)]
    optimizer, topology = te.optim.RowWiseAdagrad(), te.Topology(2, host=2 * GB)
    plan = te.plan(tables, topology, batch_size=512, optimizer=optimizer)
    for table in tables:
        assert plan.placement(table.name).placement == "host"
        assert all(shard.num_columns == 64 for shard in plan.shards(table))
    rows = CostModel(tables, topology, 512, optimizer=optimizer)
    assert rows.sizes.tolist() == [72.0 * 10**3, 72.0 * 10**7]
    float_tables = [replace(table, dtype=torch.float32) for table in tables]
    with pytest.raises(te.PlanError, match="host"):
        te.plan(float_tables, replace(topology, hbm=GB), batch_size=512, optimizer=optimizer)


def test_a_large_table_is_on_one_tier():
    """The LP would have parts of it on several: its bound is lower, and it finds room where there is none."""
    tables = [te.TableConfig("large", 40_000_000, 64), *(te.TableConfig(f"t{n}", 2_000_000, 64) for n in range(10))]
    topology = te.Topology(4, hbm=2 * GB, host=9 * GB, disk=22 * GB)
    plan = te.plan(tables, topology, batch_size=256)
    fits(plan, tables, topology, 256)
    mixed = relaxed(tables, topology, {}).bound - plan.report.model.latencies.sum()
    assert mixed < 0.95 * (plan.report.bound - plan.report.prediction.latency)
    assert plan.report.bound <= plan.report.load <= 1.03 * plan.report.bound
    less = topology.but(disk=18 * GB)
    assert relaxed(tables, less, {}) is not None
    with pytest.raises(te.PlanError, match="a tier is too small, and a table must fit on one tier; it fits with"):
        te.plan(tables, less, batch_size=256)


def relaxed(tables, topology, stats, slack=0.0):
    """The relaxation of the problem, with budgets cut by `slack`; None if it is not feasible."""
    try:
        problem = make_problem(CostModel(tables, topology, 256, stats=stats), [Constraint()] * len(tables))[1]
    except te.PlanError:
        return None
    return relax(problem, slack=slack)


def tight_topology(tables, stats, ranks):
    """All three budgets 5 % above what makes the relaxation feasible, within 5 %."""
    size = sum(table.num_embeddings * (4 * table.embedding_dim + 4) for table in tables)
    rank_memory = CostModel(tables, te.Topology(ranks, 8), 256, stats=stats).reserved_bytes

    def scaled(factor):
        hbm, nodes = 0.3 * size / ranks * factor + rank_memory, ranks // 8
        return te.Topology(ranks, 8, hbm=hbm, host=0.4 * size / nodes * factor, disk=0.6 * size / nodes * factor)

    low, high = 0.05, 4.0
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if relaxed(tables, scaled(middle), stats) is not None else (middle, high)
    return scaled(1.05 * high)


MODELS = [*((number, 8) for number in (50, 100, 200, 500, 1_000, 2_000)), *((n, 128) for n in (50, 200, 500, 2_000))]


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("number", "ranks"), MODELS)
def test_plans_with_tight_budgets_fit_and_are_near_the_bound(number, ranks, seed):
    tables, stats = zipf_tables(number, seed, 1e7 * number)
    topology = tight_topology(tables, stats, ranks)
    assert relaxed(tables, topology, stats, 0.03) is not None
    plan = te.plan(tables, topology, batch_size=256, stats=stats)
    fits(plan, tables, topology, 256, stats=stats)
    assert plan.report.load <= plan.report.greedy
    assert number < 200 or plan.report.gap <= 0.03


@pytest.mark.parametrize("types", [None, ("column_wise",), ("row_wise",), ("grid", "table_wise")])
@pytest.mark.few(2)
def test_the_search_counts_what_the_cost_model_predicts(types, monkeypatch):
    rows = [3_000_000_000, 40_000_000, 9_000_000, 1_000_000, 700]
    tables = [
        te.TableConfig(f"t{n}", size, dim) for n, (size, dim) in enumerate(zip(rows, (64, 100, 64, 12, 8), strict=True))
    ]
    tables.append(te.TableConfig("unpooled", 20_000_000, 32, pooling="none"))
    tables.append(te.TableConfig("half", 30_000_000, 128, dtype=torch.bfloat16))
    stats = {
        "t0": TableStats(3.0), "t1": TableStats(40.0, hotness=((1e4, 0.7), (1e7, 0.3))), "t2": TableStats(20.0),
        "t3": TableStats(8.0, row_share=(0.5, 0.2, 0.1, 0.1, 0.05, 0.05)), "unpooled": TableStats(5.0),
    }  # fmt: skip
    topology = te.Topology(8, 4, hbm=30 * GB, host=200 * GB, disk=2_000 * GB)
    plans = []
    monkeypatch.setattr(planner, "solve", lambda problem: plans.append(solve(problem)) or plans[-1])
    constraints = {"t[1-9]": Constraint(types=types)} if types else None
    plan = te.plan(tables, topology, batch_size=256, stats=stats, constraints=constraints)
    fits(plan, tables, topology, 256, stats=stats)
    assert plans[0].violation == 0
    # It takes a table in blocks of columns to have two, whose ranks exchange sums of squares.
    assert plan.report.load == pytest.approx(plans[0].load, rel=0.05)
    assert plan.report.bound <= plan.report.load


@pytest.mark.parametrize(
    ("table", "stats", "topology"),
    [
        ((64_000, 64), {"pooling_factor": 50.0, "row_share": (0.9, *[0.1 / 63] * 63)}, (4, 4)),
        ((300_000, 128), {"row_share": (0.95, *[0.05 / 63] * 63)}, (8, 4)),
        ((500_000, 28, torch.float16), {"pooling_factor": 9.0}, (6, 2)),
        ((300_000, 100, torch.bfloat16), {}, (6, 2)),
        ((900_000, 5), {"pooling_factor": 0.0}, (8, 2)),
        ((3, 7), {}, (5, 1)),
    ],
    ids=["hot range", "hotter range", "fp16", "bf16", "no ids", "fewer rows than ranks"],
)
@pytest.mark.parametrize("types", [None, ("row_wise",), ("column_wise",), ("grid", "table_wise")])
def test_odd_tables_keep_their_budgets_and_stay_where_they_are(table, stats, topology, types):
    rows, dim, *dtype = table
    config = te.TableConfig("a", rows, dim, **({"dtype": dtype[0]} if dtype else {}))
    ranks, local = topology
    if types == ("grid", "table_wise") and local in (1, ranks):
        types = ("table_wise",)
    use = {"a": TableStats(**stats)}
    rank_memory = CostModel([config], te.Topology(ranks, local), 256, stats=use).reserved_bytes
    size = rows * (dim * config.dtype.itemsize + 4)
    cluster = te.Topology(ranks, local, hbm=rank_memory + 3 * size + 1e7, host=2 * size + 1e6)
    options = {"batch_size": 256, "stats": use, "constraints": {"a": Constraint(types=types)}}
    plan = te.plan([config], cluster, **options)
    fits(plan, [config], cluster, 256, stats=use)
    assert plan.shards(config)
    assert te.plan([config], cluster, **options, previous=plan).diff(plan).bytes == 0


def test_rows_fill_what_others_leave():
    tables = [te.TableConfig(f"t{n}", 1_000_000, 64) for n in range(3)]
    stats = {"t0": TableStats(40.0), "t1": TableStats(20.0), "t2": TableStats(6.0)}
    plan = te.plan(
        tables, te.Topology(4), batch_size=4_096, stats=stats, constraints={"*": Constraint(types="row_wise")}
    )
    assert any(sharding.rows is not None for sharding in plan.tables.values())
    even = ShardingPlan({table.name: RowWise() for table in tables}, 4)
    assert plan.report.load <= CostModel(tables, te.Topology(4), 4_096, stats=stats).predict(even).load
    assert plan.report.load <= 1.03 * plan.report.bound


@pytest.mark.more
def test_budgets_are_kept_where_they_are_tight():
    tables, stats = zipf_tables(60, 3, 1e8)
    size = sum(table.num_embeddings * (4 * table.embedding_dim + 4) for table in tables)
    topology = te.Topology(8, 4, hbm=0.5 * size / 8, host=0.35 * size / 2, disk=0.45 * size / 2)
    plan = te.plan(tables, topology, batch_size=256, stats=stats)
    fits(plan, tables, topology, 256, stats=stats)
    assert {where.placement for where in plan.placements.values()} >= {"device", "host"}


def test_text_of_the_solver_stays_off_stdout(monkeypatch, capfd):
    """HiGHS prints a line of debug text by printf when a solution is not feasible in the original problem."""
    milp, libc = search.optimize.milp, ctypes.CDLL(None)
    monkeypatch.setattr(
        search.optimize, "milp", lambda *args, **options: (libc.puts(b"debug"), milp(*args, **options))[1]
    )
    tables, stats = zipf_tables(20, 2)
    te.plan(tables, te.Topology(8, 4), batch_size=512, stats=stats)
    libc.fflush(None)
    print("after")
    assert capfd.readouterr().out == "after\n"


def test_the_same_arguments_give_the_same_plan():
    tables, stats = zipf_tables(20, 2)
    plans = [te.plan(tables, te.Topology(8, 4), batch_size=512, stats=stats) for _ in range(2)]
    assert plans[0] == plans[1]
    assert str(plans[0]) == str(plans[1])


@pytest.mark.parametrize("ranks", [1, 4])
def test_planning_without_scipy_says_what_to_install(ranks, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingExtraError, match=r"scipy is required .* pip install 'tritonemb\[plan\]'"):
        te.plan([te.TableConfig("a", 1_000, 8)], te.Topology(ranks), batch_size=16)


def f1(number: int = 40):
    """The size of the Neo paper's F1: 12 T parameters of 16 bits, dim 256; the number of tables is recalled."""
    return [te.TableConfig(f"f{n}", int(12e12 / 256 / number), 256, dtype=torch.bfloat16) for n in range(number)]


@pytest.mark.more
def test_twelve_trillion_parameters_fit_128_gpus_with_their_hosts():
    topology = te.Topology.preset("zionex-16x8")
    tables = f1(6)
    stats = {table.name: TableStats(130.0) for table in tables}
    plan = te.plan(tables, topology, batch_size=512, stats=stats)
    seen = fits(plan, tables, topology, 512, stats=stats)
    assert seen.host.sum() + seen.hbm.sum() >= 24e12


def test_twelve_trillion_parameters_are_refused_where_hosts_are_too_small():
    topology = te.Topology.preset("zionex-16x8", host=1.1e12, disk=0)
    with pytest.raises(te.PlanError, match=r"short by .* TB") as refused:
        te.plan(f1(8), topology, batch_size=512)
    text = str(refused.value)
    assert "24.2 TB" in text  # 12 T x 2 bytes, and 4 a row
    assert "256 ranks" in text
    assert "host memory per node" in text


def test_what_an_error_names_helps():
    tables = [te.TableConfig(f"t{n}", 4_000_000, 64) for n in range(8)]
    topology = te.Topology(4, hbm=1.2 * GB, host=0)
    with pytest.raises(te.PlanError, match="8 ranks, or 16-bit tables"):
        te.plan(tables, topology, batch_size=64)
    te.plan(tables, topology.but(world_size=8, local_world_size=4), batch_size=64)
    te.plan([te.TableConfig(f"t{n}", 4_000_000, 64, dtype=torch.bfloat16) for n in range(8)], topology, batch_size=64)


def refused(*args, **options):
    with pytest.raises(te.PlanError) as caught:
        te.plan(*args, **options)
    return str(caught.value)


def test_an_error_says_what_takes_the_memory_beside_tables():
    small = [te.TableConfig("a", 100, 64)]
    text = refused(small, te.Topology(1, hbm=100e6, host=0), batch_size=16)
    assert "no device memory is left for tables, 0 B per rank: 100 MB less 120 MB for the runtime, " in text
    assert ": short by 20" in text
    assert "device memory per rank" in text
    text = refused(
        small, te.Topology(1, hbm=1e9, host=0), batch_size=65_536, dense_parameters=20_000_000, activation_bytes=6e8,
    )  # fmt: skip
    for part in ("600 MB for activations", "320 MB for other layers", "MB for batches of 65,536 samples in flight"):
        assert part in text
    text = refused(small, te.Topology(1, hbm=1e9, host=0), batch_size=2_000_000)
    assert "it fits with 8 GB of device memory per rank, or batches of 500,000 samples per rank" in text


def test_an_error_says_what_the_smallest_shard_lacks():
    """Tables would fit, but not beside the batches of all ranks."""
    tables = [te.TableConfig(f"t{n}", 1_000, 128) for n in range(2)]
    topology = te.Topology(64, hbm=1e9, host=0)
    text = refused(tables, topology, batch_size=20_000, constraints={"*": Constraint(types="table_wise")})
    assert "table 't0' cannot be placed under" in text
    match = re.search(r"its smallest shard, .*, needs ([\d.]+) GB of device memory, short by ([\d.]+) (.B)", text)
    model = CostModel(tables, topology, 20_000)
    at = model.shards(ShardingPlan(dict.fromkeys(("t0", "t1"), TableWise(0)), 64))[0]
    size = model.costs(at)[1][0, 0]
    assert float(match[1]) == pytest.approx(size / 1e9, rel=0.01)
    short = float(match[2]) * {"MB": 1e6, "GB": 1e9}[match[3]]
    assert short == pytest.approx(size - (1e9 - model.reserved_bytes), rel=0.01)


@pytest.mark.parametrize("number", [7, 47])  # on one rank; the largest, sharded by rows
@pytest.mark.few(1)
def test_a_table_that_grows_moves_little(number):
    tables, stats = zipf_tables(100, 5)
    topology = te.Topology(8)
    previous = te.plan(tables, topology, batch_size=512, stats=stats)
    grown = [
        te.TableConfig(t.name, int(t.num_embeddings * (1.1 if n == number else 1)), t.embedding_dim)
        for n, t in enumerate(tables)
    ]
    replanned = te.plan(grown, topology, batch_size=512, stats=stats, previous=previous)
    moved = replanned.diff(previous)
    assert moved.fraction <= 0.05
    assert replanned.report.load <= 1.05 * replanned.report.bound
    assert te.plan(tables, topology, batch_size=512, stats=stats, previous=previous).diff(previous).bytes == 0


def test_what_moves_is_counted_by_rows_and_columns():
    table = te.TableConfig("a", 100, 16)
    plan = te.plan([table], te.Topology(2), batch_size=4)
    one = ShardingPlan({"a": TableWise(0)}, 2, report=plan.report)
    other = ShardingPlan({"a": TableWise(1)}, 2, placements={"a": TablePlacement("host", 32)}, report=plan.report)
    halves = ShardingPlan({"a": ColumnWise([0, 1])}, 2, report=plan.report)
    size = 100 * (16 * 4 + 4)
    assert other.diff(one).bytes == size
    assert other.diff(one).tiers == {"a": ("device", "host")}
    assert halves.diff(one).bytes == size / 2
    assert one.diff(one).bytes == 0


def test_a_plan_says_what_it_is(tmp_path):
    tables, stats = zipf_tables(60, 1)
    plan = te.plan(tables, te.Topology(16, 8), batch_size=512, stats=stats)
    text = str(plan)
    assert "Plan for 16 ranks, 8 per node" in text
    assert "20 more" in text
    assert "next best" in text
    slowest = max(plan.report.tables, key=lambda item: item.seconds)
    assert slowest.table.name in text
    assert "ids per sample" in plan.explain(slowest.table.name)
    page = plan.to_html()
    assert page.count("<svg") == 2
    assert "<script" not in page
    assert len(plan.report.summary().splitlines()) == 2
    plan.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == plan
    with pytest.raises(ValueError, match="no table 'nobody'"):
        plan.explain("nobody")
    with pytest.raises(ValueError, match="by hand"):
        ShardingPlan(plan.tables, 16, 8).explain("t0")


def test_a_report_is_the_same_in_json():
    tables, stats = zipf_tables(12, 1)
    tables += [
        te.TableConfig("half", 10_000, 32, ["x", "y"], "none", torch.float16, init=torch.nn.init.zeros_),
        te.TableConfig("ids", None, 16, capacity=50_000),
    ]
    stats["half"] = TableStats(2.0, ((100, 0.5), (9_900, 0.5)), (0.5, 0.3, 0.2))
    topology = te.Topology(4, 2, rank_speed=(1, 1, 0.5, 1))
    precision = te.sharding.ExchangePrecision("fp32", "fp16", 8.0)
    options = {"exchange": precision, "optimizer": te.optim.LAMB(lr=0.3), "activation_bytes": 1e6}
    plan = te.plan(tables, topology, batch_size=512, stats=stats, **options)
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan
    assert str(again) == str(plan)
    assert again.to_html() == plan.to_html()
    assert [again.explain(table.name) for table in tables] == [plan.explain(table.name) for table in tables]
    assert again.check(stats) == []
    assert again.diff(plan).bytes == 0
    assert again.report.model.optimizer == te.optim.LAMB(lr=0.3)
    assert again.to_json() == plan.to_json()
    function = te.optim.Custom(step=lambda rows, states, g, lr, t: (rows, states))
    assert (
        ShardingPlan.from_json(te.plan(tables, topology, batch_size=512, optimizer=function).to_json()).report is None
    )
    for old, new in (('"id_rate"', '"rate"'), ('"lamb"', '"lam"'), ("torch.float16", "torch.load")):
        with pytest.raises(ValueError, match="the report of a sharding plan is invalid"):
            ShardingPlan.from_json(plan.to_json().replace(old, new))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.few(2)
def test_what_is_next_best_is_worse(seed):
    tables, stats = zipf_tables(30, seed, 1e6)
    plan = te.plan(tables, te.Topology(4, 2, hbm=0.3 * GB), batch_size=512, stats=stats)
    shown = [report for report in plan.report.tables if report.runner_up is not None]
    assert len(shown) > 10
    for report in shown:
        assert report.runner_up[:2] != report.option[:2]
        text = plan.explain(report.table.name)
        assert float(re.search(r"next best: .*, \+([\d.e-]+) [mu]s$", text)[1]) > 0
    assert "+0 us" not in str(plan)


def test_statistics_that_drift_are_a_reason_to_plan_anew():
    tables, stats = zipf_tables(64, 4)
    plan = te.plan(tables, te.Topology(8), batch_size=512, stats=stats)
    assert plan.check(stats) == []
    busy = max(
        (t.name for t in tables if isinstance(plan.tables[t.name], TableWise)),
        key=lambda name: stats[name].pooling_factor,
    )
    (reason,) = plan.check(stats | {busy: TableStats(30 * stats[busy].pooling_factor)})
    assert "of the mean" in reason


def test_caches_too_small_for_new_statistics_are_named():
    table = te.TableConfig("big", 10_000_000, 64)
    topology = te.Topology(2, hbm=1 * GB, host=8 * GB)
    plan = te.plan([table], topology, batch_size=128)
    assert plan.placements["big"].placement == "host"
    assert any("'big': its cache" in reason for reason in plan.check({"big": TableStats(20_000.0)}))


def test_constraints_bind_and_placements_of_tables_do_not():
    tables = [
        te.TableConfig("a", 1_000, 32, placement="host"),
        te.TableConfig("b_1", 1_000, 32),
        te.TableConfig("b_2", 1_000, 32),
    ]
    constraints = {"b_*": Constraint(types="row_wise", placements=("host",))}
    plan = te.plan(tables, te.Topology(2), batch_size=64, constraints=constraints)
    assert plan.placements["a"].placement == "device"
    for name in ("b_1", "b_2"):
        assert isinstance(plan.tables[name], RowWise)
        assert plan.placements[name].placement == "host"


@pytest.mark.parametrize("names", [("a", "*"), ("*", "a")])
def test_the_constraint_of_a_name_wins_over_that_of_a_pattern(names):
    constraints = {name: Constraint(types="row_wise" if name == "a" else "table_wise") for name in names}
    tables = [te.TableConfig(name, 1_000, 32) for name in ("a", "b")]
    plan = te.plan(tables, te.Topology(2), batch_size=64, constraints=constraints)
    assert isinstance(plan.tables["a"], RowWise)
    assert isinstance(plan.tables["b"], TableWise)


def test_copies_are_chosen_where_they_help():
    tables = [te.TableConfig(f"t{n}", 100_000, 64) for n in range(64)]
    slow = te.Topology(16, 4, inter_bandwidth=1e8, control_bandwidth=1e9)
    one = te.plan(tables, slow, batch_size=4_096)
    best = te.plan(tables, slow, batch_size=4_096, copies=None)
    assert best.report.prediction.step <= one.report.prediction.step
    assert best.copies * best.world_size == 16


def test_tables_that_only_servers_can_have_go_there():
    topology = te.Topology(8, hbm=4 * GB, host=0, servers=4, server_memory=1e12)
    plan = te.plan([te.TableConfig("ids", 2_000_000_000, 64)], topology, batch_size=64)
    assert plan.placements["ids"].placement == "server"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"tables": []}, ValueError, "there are no tables"),
        ({"tables": [te.TableConfig("a", 10, 4), te.TableConfig("a", 10, 4)]}, ValueError, "two tables are named 'a'"),
        ({"batch_size": None}, ValueError, "pass batch_size"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 1.5}, TypeError, "batch_size must be an int"),
        ({"stats": {"nobody": TableStats()}}, ValueError, "statistics of an unknown table 'nobody'"),
        ({"constraints": {"nobody": Constraint()}}, ValueError, r"constraints\['nobody'\] matches no table"),
        ({"constraints": {"a*": Constraint(), "*": Constraint()}}, ValueError, r"'a' has two constraints, 'a\*' and"),
        ({"constraints": {"a": "row_wise"}}, TypeError, "must be a te.sharding.Constraint"),
        ({"constraints": {"a": Constraint(placements="disk")}}, ValueError, "the topology lacks"),
        ({"constraints": {"a": Constraint(types="grid")}}, te.PlanError, "table 'a' cannot be placed"),
        ({"topology": 4}, TypeError, "topology must be a te.Topology, got 4"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be one of te.optim, got 'adam'"),
        ({"previous": 4}, TypeError, "previous must be a plan, got 4"),
        ({"copies": 3}, ValueError, "copies must divide the 4 ranks"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, error, text):
    arguments = {"tables": [te.TableConfig("a", 1_000, 8)], "topology": te.Topology(4), "batch_size": 16} | change
    with pytest.raises(error, match=text):
        te.plan(arguments.pop("tables"), arguments.pop("topology"), **arguments)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"inter_bandwidth": -1.0}, ValueError, "inter_bandwidth must be more than 0"),
        ({"hbm": float("nan")}, ValueError, "hbm must be at least 0 and finite"),
        ({"hbm": "80GB"}, TypeError, "hbm must be a number"),
        ({"local_world_size": 3}, ValueError, "local_world_size must divide world_size"),
        ({"servers": 2}, ValueError, "server_memory"),
        ({"rank_memory": (1, 0.5)}, ValueError, "rank_memory must be 4 numbers in"),
        ({"rank_speed": (1, 1, 0, 1)}, ValueError, "rank_speed must be 4 numbers in"),
    ],
)
def test_wrong_topologies_are_refused_by_name(change, error, text):
    with pytest.raises(error, match=text):
        te.Topology(4, **change)


def test_topologies_are_kept_in_files_and_know_their_machine(tmp_path):
    topology = te.Topology.preset("dgx-h100", machine="another one")
    topology.save(tmp_path / "topology.json")
    assert te.Topology.from_json((tmp_path / "topology.json").read_text()) == topology
    with pytest.raises(ValueError, match="calibrated on 'another one'"):
        te.Topology.load(tmp_path / "topology.json")
    topology.but(machine=machine()).save(tmp_path / "here.json")
    assert te.Topology.load(tmp_path / "here.json").machine == machine()
    with pytest.raises(ValueError, match="did you mean 'dgx-h100'"):
        te.Topology.preset("dgx-h10")
    (tmp_path / "other.json").write_text('{"format": 1, "world_size": 2, "hmb": 3}')
    with pytest.raises(ValueError, match="no field 'hmb'; did you mean 'hbm'"):
        te.Topology.load(tmp_path / "other.json")


def test_a_cache_misses_rows_of_all_ranks():
    """One group of all rows is what no hotness means."""
    tables, placements = [te.TableConfig("a", 100_000, 16)], {"a": TablePlacement("host", 20_000)}
    plan = ShardingPlan({"a": RowWise()}, 4, placements=placements)
    plain, grouped = (
        CostModel(tables, te.Topology(4), 4_096, stats={"a": TableStats(2.0, hotness=hotness)}).predict(plan).seconds
        for hotness in ((), ((100_000, 1.0),))
    )
    assert (grouped[:, STAGES.index("misses")] > 0).all()
    np.testing.assert_allclose(grouped, plain, rtol=1e-6)


def test_a_plan_for_another_world_is_refused():
    tables = [te.TableConfig("a", 1_000, 8)]
    plan = te.plan(tables, te.Topology(4), batch_size=16)
    with pytest.raises(ValueError, match="the plan is for 4 ranks"):
        CostModel(tables, te.Topology(2), 16).predict(plan)


def test_a_model_is_planned_with_its_other_layers():
    tables = [te.TableConfig("a", 1_000, 8)]
    optimizer = te.optim.Adam(lr=0.1)
    model = torch.nn.Sequential(te.nn.EmbeddingBagCollection(tables, optimizer=optimizer), torch.nn.Linear(8, 100))
    plan = te.plan(model, te.Topology(2), batch_size=16)
    assert plan.report.model.dense_parameters == 900
    assert plan.report.model.optimizer == optimizer
    assert plan.report.prediction.dense > 0
    more = te.plan(model, te.Topology(2), batch_size=16, activation_bytes=1e9)
    assert (more.report.prediction.hbm - plan.report.prediction.hbm).tolist() == [1e9, 1e9]
    with pytest.raises(ValueError, match="activation_bytes must be at least 0"):
        te.plan(model, te.Topology(2), batch_size=16, activation_bytes=-1)


def test_tiers_and_caches_of_a_plan_are_applied():
    tables = [te.TableConfig("a", 1_000, 8), te.TableConfig("b", 500, 8)]

    def hybrid(**placements):
        plan = ShardingPlan({"a": TableWise(0), "b": TableWise(0)}, 1, placements=placements)
        return te.HybridParallel(te.nn.EmbeddingBagCollection(tables, optimizer=te.optim.SGD(lr=0.1)), plan)

    first, second = hybrid(a=TablePlacement("host", 64), b=TablePlacement("device")).collections[0].configs
    assert (first.placement, first.cache.rows, second.placement) == ("host", 64, "device")
    with pytest.raises(ValueError, match="'a' on embedding servers"):
        hybrid(a=TablePlacement("server"))


def test_fallback_rows_take_memory():
    def predicted(**options):
        table = te.TableConfig("a", None, 16, capacity=100_000, **options)
        model = CostModel([table], te.Topology(2, servers=1, server_memory=1e12), 64)
        plans = [
            ShardingPlan({"a": RowWise()}, 2, placements={"a": TablePlacement(tier)}) for tier in ("device", "server")
        ]
        on_devices, on_servers = map(model.predict, plans)
        return float(on_devices.hbm.sum()), on_servers.server, float(model.sizes[0])

    record = 16 * 4 + 4
    plain, fallback = predicted(), predicted(fallback_rows=20_000)
    assert fallback[0] - plain[0] == pytest.approx(20_000 * (record + 26), rel=1e-3)
    assert fallback[1] - plain[1] == 20_000 * (record + 26)
    assert fallback[2] - plain[2] == 20_000 * record
    table = te.TableConfig("a", None, 16, capacity=100_000, fallback_rows=20_000)
    plan = te.plan([table], te.Topology(2), batch_size=64)
    assert (
        ShardingPlan.from_json(plan.to_json()).report.tables[0].size == plan.report.tables[0].size == 120_000 * record
    )


def test_an_epoch_has_a_duration_and_a_price():
    tables = [te.TableConfig("a", 1_000_000, 64), te.TableConfig("b", 1_000, 16)]
    prices = {"node_price": 98.0, "server_price": 6.0, "reader_price": 1.5}
    topology = te.Topology(16, 8, servers=3, server_memory=1e12, readers=2, **prices)
    options = {"batch_size": 512, "epoch_samples": 10**9}
    for constraints, price in ((None, 2 * 98 + 2 * 1.5), ({"a": Constraint("server")}, 2 * 98 + 3 * 6 + 2 * 1.5)):
        report = te.plan(tables, topology, constraints=constraints, **options).report
        hours = 10**9 / (512 * 16 / report.prediction.step) / 3600
        assert report.epoch_hours == pytest.approx(hours)
        assert report.epoch_price == pytest.approx(hours * price)
        assert f"; price {hours * price:,.2f}." in str(report)
    assert "Epoch" not in str(te.plan(tables, topology, batch_size=512))
    with pytest.raises(ValueError, match="epoch_samples must be at least 0"):
        te.plan(tables, topology, batch_size=512, epoch_samples=-1)


def test_manifests_have_the_machines_of_the_plan():
    tables = [te.TableConfig("a", 100_000_000, 64), te.TableConfig("b", 1_000, 16)]
    topology = te.Topology(16, 8, servers=3, server_memory=1e12, readers=2)
    plan = te.plan(tables, topology, batch_size=512, constraints={"a": Constraint("server"), "b": Constraint("device")})
    files = plan.to_manifests(image="here:1", train="--epochs 2", reader_cpus=3)
    size = int(re.search(r"--memory=(\d+)", files["kubernetes/rows.yaml"])[1])
    assert 1.05 <= size / (plan.report.prediction.server / 3) <= 1.05 + 3e9 / plan.report.prediction.server
    memory, disk = (int(number) * 2**30 for number in re.findall(r'"(\d+)Gi"', files["kubernetes/rows.yaml"])[1:])
    assert 1.25 * size <= memory <= 1.25 * size + 2**30
    assert 3 * size <= disk <= 3 * size + 2**30
    assert "replicas: 3\n" in files["kubernetes/rows.yaml"]
    assert 'cpu: "3"' in files["kubernetes/readers.yaml"]
    for line in (
        "completions: 2",
        "- --nproc-per-node=8",
        '- "--epochs"',
        '- "--plan=/plan/plan.json"',
        'image: "here:1"',
    ):
        assert f"{line}\n" in files["kubernetes/trainers.yaml"]
    for path, text in files.items():
        assert not re.search(r"\$\{|\$item|#for|#end", text), path
    without = te.plan(tables, te.Topology(2), batch_size=512).to_manifests()
    assert without.keys() == {"kubernetes/trainers.yaml", "kuberay/rayjob.yaml"}
    for settings, error, text in (
        ({"prefix": "A"}, ValueError, "prefix must be"), ({"zone": 1}, TypeError, "zone must be a str"),
        ({"server_cpus": 0}, ValueError, "server_cpus must be more than 0"),
        ({"zones": "a"}, TypeError, "unexpected keyword argument 'zones'"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            plan.to_manifests(**settings)


def test_shares_of_uneven_shards_are_predicted():
    tables = [te.TableConfig("a", 1_000, 8), te.TableConfig("b", None, 8, capacity=100_000)]
    shardings = {"a": RowWise([1, 0], [800, 200]), "b": RowWise([0, 1], [4, 12])}
    shares = TablePlacement("disk", cache_share=0.25, host_share=0.5)
    model = CostModel(tables, te.Topology(2), 16)
    at, rank = model.shards(ShardingPlan(shardings, 2, placements={"a": shares, "b": shares}))
    assert rank.tolist() == [1, 0, 0, 1]
    assert at.cached_rows.tolist() == [200, 50, 6_250, 18_750]
    assert at.host_rows.tolist() == [400, 100, 12_500, 37_500]
    whole = TablePlacement("disk", cache_share=0.75, host_share=1)
    at, _ = model.shards(
        ShardingPlan(shardings, 2, placements={"a": whole, "b": TablePlacement("disk", 20_000, 10_000)})
    )
    assert at.cached_rows.tolist() == [600, 150, 20_000, 20_000]
    assert at.host_rows.tolist() == [200, 50, 5_000, 10_000]


TABLES = """
[[table]]
name = "user"
num_embeddings = 1_000_000
embedding_dim = 64
dtype = "bfloat16"
pooling_factor = 3.0
hotness = [[1000, 0.5], [100000, 0.5]]

[[table]]
name = "item"
num_embeddings = 5_000
embedding_dim = 32
types = ["row_wise"]
"""


def test_the_command_reads_tables_and_writes_a_plan(tmp_path, capsys):
    (tmp_path / "tables.toml").write_text(TABLES)
    arguments = ["plan", "--tables", str(tmp_path / "tables.toml"), "--topology", "dgx-h100", "--batch-size", "256"]
    files = ["--out", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html"), "--explain", "user"]
    assert cli.main(arguments + files) == 0
    assert "\nuser:\n  use" in capsys.readouterr().out
    plan = ShardingPlan.load(tmp_path / "plan.json")
    assert plan.world_size == 8
    assert isinstance(plan.tables["item"], RowWise)
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    assert cli.main([*arguments, "--previous", str(tmp_path / "plan.json")]) == 0
    assert "0 B of" in capsys.readouterr().out
    (tmp_path / "tables.toml").write_text(TABLES + '[topology]\nnode_price = 9\n[manifests]\nimage = "here:1"')
    files = ["--manifests", str(tmp_path / "manifests"), "--epoch-samples", "1000000"]
    assert cli.main(arguments + files) == 0
    assert "; price 0.00." in capsys.readouterr().out
    assert 'image: "here:1"\n' in (tmp_path / "manifests" / "kubernetes" / "trainers.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1", r"expected one \[\[table\]\]"),
        ("table = [1, 2]", r"tables.toml: expected one \[\[table\]\] per table"),
        (TABLES + "[topology]\nserver = 2", "tables.toml: .* unexpected keyword argument 'server'"),
        (TABLES + '[topology]\nservers = "2"', "tables.toml: a topology's servers must be an int"),
        (TABLES + "[manifests]\nimages = 2", "tables.toml: .* unexpected keyword argument 'images'"),
        ('[[table]]\nname = "a"', "table 1 .'a'.: num_embeddings is missing"),
        (TABLES.replace("dtype", "dtyp"), "unknown field 'dtyp'; did you mean 'dtype'"),
        (TABLES.replace("bfloat16", "bfloat17"), "table 1 .'user'.: dtype must be the name of a torch dtype"),
        (TABLES.replace("row_wise", "rows"), "types must be some of"),
        (TABLES.replace("3.0", "-1.0"), "pooling_factor"),
    ],
)
def test_the_command_refuses_files_by_table(tmp_path, capsys, text, error):
    path = tmp_path / "tables.toml"
    path.write_text(text)
    assert cli.main(["plan", "--tables", str(path), "--batch-size", "256"]) == 2
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 1
    assert re.search(error, shown), shown


@pytest.mark.parametrize("cached", [{"cache_rows": 64, "host_share": 0.5}, {"host_rows": 64}], ids=str)
def test_a_plan_is_json_that_can_be_written_by_hand(cached):
    table = {"type": "row_wise", "placement": "disk", **cached}
    text = json.dumps({"world_size": 2, "copies": 2, "tables": {"a": table}})
    plan = ShardingPlan.from_json(text)
    assert (plan.copies, plan.placements["a"]) == (2, TablePlacement("disk", **cached))
    assert json.loads(plan.to_json())["tables"]["a"] == table
    with pytest.raises(ValueError, match=f"{next(iter(cached))} must be an int of at least 1"):
        ShardingPlan.from_json(text.replace('"disk"', '"device"'))


@pytest.mark.more
@pytest.mark.parametrize("seed", range(3))
def test_torchrecs_plan_is_no_better(seed):
    pytest.importorskip("torchrec")
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
    from torchrec.distributed.planner import Topology as TheirTopology
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    tables, stats = zipf_tables(50, seed)
    configs = [
        EmbeddingBagConfig(
            name=t.name, num_embeddings=t.num_embeddings, embedding_dim=t.embedding_dim, feature_names=[t.name]
        )
        for t in tables
    ]
    constraints = {
        t.name: ParameterConstraints(pooling_factors=[stats[t.name].pooling_factor], compute_kernels=["fused"])
        for t in tables
    }
    topology = TheirTopology(world_size=8, local_world_size=8, compute_device="cuda", hbm_cap=int(80e9))
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=512, constraints=constraints)
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    torchrec_plan = planner.plan(module, [EmbeddingBagCollectionSharder()])

    def sharding(parameter):
        shards = parameter.sharding_spec.shards
        ranks = [shard.placement.rank() for shard in shards]
        match parameter.sharding_type:
            case "table_wise":
                return TableWise(ranks[0])
            case "row_wise" | "table_row_wise":  # one node
                return RowWise(ranks)
            case "column_wise" | "table_column_wise":
                return ColumnWise(ranks, [shard.shard_sizes[1] for shard in shards])
        assert parameter.sharding_type == "data_parallel"
        return DataParallel()

    torchrec_shardings = {name: sharding(entry) for plan in torchrec_plan.plan.values() for name, entry in plan.items()}
    model = CostModel(tables, te.Topology(8), 512, stats=stats)
    plan_ = te.plan(tables, te.Topology(8), batch_size=512, stats=stats)
    assert torchrec_shardings.keys() == plan_.tables.keys()
    assert model.predict(plan_).step <= model.predict(ShardingPlan(torchrec_shardings, 8)).step
