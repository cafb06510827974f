"""Plans: what they say of tables, as text too, and what they refuse."""

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonemb as te
from tritonemb.sharding import (
    ColumnWise,
    DataParallel,
    Grid,
    RowWise,
    ShardingPlan,
    TableColumnWise,
    TablePlacement,
    TableRowWise,
    TableWise,
    uniform_plan,
)
from tritonemb.sharding.plan import SMALL_TABLE

WORLDS = [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (6, 3), (8, 2), (12, 4)]


@st.composite
def jobs(draw):
    """A table, the size of a job, and a sharding that fits both."""
    world, local = draw(st.sampled_from(WORLDS))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    table = te.TableConfig("table", draw(st.integers(1, 40)), draw(st.integers(1, 70)), dtype=dtype)
    unit = 1 if dtype == torch.float32 else 8
    most = max(1, table.embedding_dim // unit)
    rank, node = st.integers(0, world - 1), st.integers(0, world // local - 1)

    def widths(blocks: int):
        cuts = draw(st.sets(st.integers(1, max(1, most - 1)), min_size=blocks - 1, max_size=blocks - 1))
        edges = [0, *sorted(cut * unit for cut in cuts), table.embedding_dim]
        return [stop - start for start, stop in pairwise(edges)]

    blocks = draw(st.integers(1, min(5, max(1, most - 1))))
    given_widths = draw(st.booleans()) and blocks > 1
    columns = widths(blocks) if given_widths else None
    owners = draw(st.lists(rank, min_size=1, max_size=table.num_embeddings, unique=True))
    cuts = draw(st.permutations(range(1, table.num_embeddings)))[: len(owners) - 1]
    rows = [stop - start for start, stop in pairwise([0, *sorted(cuts), table.num_embeddings])]
    sharding = draw(
        st.one_of(
            st.builds(TableWise, rank),
            st.just(RowWise()),
            st.builds(RowWise, st.lists(rank, min_size=1, unique=True)),
            st.builds(RowWise, st.just(owners), st.just(rows)),
            st.just(ColumnWise()),
            st.builds(ColumnWise, st.lists(rank, min_size=blocks, max_size=blocks), st.just(columns)),
            st.builds(TableRowWise, node),
            st.builds(TableColumnWise, node, st.just(columns)),
            st.just(Grid()),
            st.builds(Grid, st.lists(node, min_size=blocks, max_size=blocks), st.just(columns)),
            st.just(DataParallel()),
        )
    )
    return table, world, local, sharding


@given(jobs())
def test_shards_cover_the_table_once(job):
    table, world, local, sharding = job
    shards = ShardingPlan({"table": sharding}, world, local).shards(table)
    times = torch.zeros(table.num_embeddings, table.embedding_dim, dtype=torch.int64)
    for shard in shards:
        assert shard.num_rows > 0
        assert shard.num_columns > 0
        assert 0 <= shard.rank < world
        rows, columns = shard.first_row + shard.num_rows, shard.first_column + shard.num_columns
        assert rows <= table.num_embeddings
        assert columns <= table.embedding_dim
        times[shard.first_row : rows, shard.first_column : columns] += 1
        if table.dtype != torch.float32:
            assert shard.first_column % 8 == 0
    expected = world if isinstance(sharding, DataParallel) else 1
    assert torch.equal(times, torch.full_like(times, expected))
    if isinstance(sharding, RowWise) and sharding.rows:
        assert [(shard.rank, shard.num_rows) for shard in shards] == [*zip(sharding.ranks, sharding.rows, strict=True)]
    if isinstance(sharding, TableRowWise | TableColumnWise):
        assert {shard.rank // local for shard in shards} == {sharding.node}
    if isinstance(sharding, ColumnWise | TableColumnWise) and sharding.columns is None and table.embedding_dim >= 8:
        widths = [shard.num_columns for shard in shards]
        assert max(widths) - min(widths) < 16  # as equal as multiples of 8 can be, and a rest


@given(st.lists(jobs(), min_size=1, max_size=5), st.integers(1, 3))
def test_plans_are_the_same_after_json(drawn_jobs, copies):
    world, local = 12, 4
    shardings = {f'table {n} "quoted" é': job[3] for n, job in enumerate(drawn_jobs)}
    plan = ShardingPlan(shardings, world, local)
    text = plan.to_json()
    assert ShardingPlan.from_json(text) == plan
    assert ShardingPlan.from_json(text).to_json() == text
    assert json.loads(text)["world_size"] == world
    assert hash(next(iter(plan.tables.values()))) == hash(next(iter(ShardingPlan.from_json(text).tables.values())))


def test_a_plan_in_a_file(tmp_path):
    plan = ShardingPlan({"user": RowWise(), "item": ColumnWise([1, 0], [8, 24])}, 2)
    plan.save(tmp_path / "plan.json")
    assert ShardingPlan.load(tmp_path / "plan.json") == plan
    text = (tmp_path / "plan.json").read_text()
    assert set(json.loads(text)) == {"format", "world_size", "local_world_size", "tables", "sha256"}
    (tmp_path / "plan.json").write_text(text.replace("8", "9"))
    with pytest.raises(ValueError, match=r"plan\.json is damaged: its content .* SHA-256 digest.* edited by hand"):
        ShardingPlan.load(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert ShardingPlan.load(tmp_path / "plan.json") == plan
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json: a sharding plan must be JSON"):
        ShardingPlan.load(tmp_path / "bad.json")


def test_a_plan_written_by_hand():
    text = '{"world_size": 4, "tables": {"user": {"type": "row_wise"}, "item": {"type": "table_wise", "rank": 3}}}'
    assert ShardingPlan.from_json(text) == ShardingPlan({"user": RowWise(), "item": TableWise(3)}, 4, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[]", r"an object with the fields \['copies', 'format', 'local_world_size', 'report', 'tables', "),
        ('{"world_size": 1}', "an object with the fields"),
        ('{"world_size": 1, "tables": []}', "a sharding plan's tables must be an object, got"),
        ('{"world_size": 1, "tables": {}, "more": 1}', "an object with the fields"),
        ('{"format": 2, "world_size": 1, "tables": {}}', "reads format 1 of a sharding plan, got 2"),
        ('{"tables": {}}', "needs a world_size"),
        ('{"world_size": "4", "tables": {}}', "world_size must be an int, got '4'"),
        ('{"world_size": true, "tables": {}}', "world_size must be an int, got True"),
        ('{"world_size": 0, "tables": {}}', "world_size must be at least 1, got 0"),
        ('{"world_size": 4, "local_world_size": 3, "tables": {}}', "local_world_size must divide world_size"),
        ('{"world_size": 4, "local_world_size": -4, "tables": {}}', "local_world_size must divide world_size"),
        ('{"world_size": 1, "tables": {"user": "row_wise"}}', "table 'user': expected"),
        ('{"world_size": 1, "tables": {"user": {"rank": 0}}}', "table 'user': expected"),
        ('{"world_size": 1, "tables": {"user": {"type": "rows"}}}', r"table 'user': expected .*'table_wise'"),
        ('{"world_size": 1, "tables": {"user": {"type": ["row_wise"]}}}', "table 'user': expected"),
        (
            '{"world_size": 1, "tables": {"user": {"type": "row_wise", "rank": 0}}}',
            r"knows \['ranks', 'rows'\], got \['rank'\]",
        ),
        ('{"world_size": 1, "tables": {"user": {"type": "table_wise"}}}', r"'user': table_wise needs \['rank'\]"),
        (
            '{"world_size": 1, "tables": {"user": {"type": "row_wise", "ranks": 0}}}',
            r"'user': row_wise needs \['ranks', 'rows'\]",
        ),
        ('{"world_size": 1, "tables": {"user": {"type": "row_wise", "rows": 3}}}', "'user': row_wise needs"),
    ],
)
def test_text_that_is_no_plan(text, message):
    with pytest.raises(ValueError, match=message):
        ShardingPlan.from_json(text)


USER = te.TableConfig("user", 10, 16)
HALF = te.TableConfig("user", 10, 20, dtype=torch.float16)
MANY = te.TableConfig("user", None, 16, capacity=100_000)


@pytest.mark.parametrize(
    ("sharding", "table", "message"),
    [
        (TableWise(4), USER, r"'user': rank 4 of TableWise\(rank=4\) is not one of the plan's 4"),
        (TableWise(-1), USER, "'user': rank -1"),
        (RowWise([]), USER, "'user': .* needs at least one rank"),
        (RowWise([0, 4]), USER, "'user': rank 4"),
        (RowWise([1, 1]), USER, "'user': .* names a rank twice"),
        (RowWise([0, 1], [5, 6]), USER, r"'user': the rows of .* must be 2 positive sizes that add up to 10 rows"),
        (RowWise([0, 1], [10]), USER, "must be 2 positive sizes"),
        (RowWise(rows=[4, 6]), USER, "must be 4 positive sizes"),
        (RowWise([0, 1], [10, 0]), USER, "must be 2 positive sizes"),
        (RowWise([0, 1], [5.0, 5.0]), USER, "must be 2 positive sizes"),
        (RowWise([0, 1], [50, 50]), MANY, "'user': the rows .* add up to 16 partitions"),
        (ColumnWise([]), USER, "needs at least one rank"),
        (ColumnWise([0, 1, 2, 3] * 5), USER, "'user': .* splits 16 columns of torch.float32 into 20 blocks"),
        (ColumnWise([0, 1, 2]), HALF, "'user': .* splits 20 columns of torch.float16 into 3 blocks"),
        (ColumnWise([0, 1], [8, 9]), USER, "must be 2 positive widths that add up to 16"),
        (ColumnWise([0, 1], [16]), USER, "must be 2 positive widths"),
        (ColumnWise([0, 1], [16, 0]), USER, "must be 2 positive widths"),
        (ColumnWise([0, 1], [4, 16]), HALF, r"begin at columns \[0, 4\]; .* must begin at multiples of 8"),
        (TableRowWise(2), USER, "'user': node 2 .* is not one of the plan's 2"),
        (TableColumnWise(-1), USER, "'user': node -1"),
        (TableColumnWise(0, [8, 9]), USER, "positive widths"),
        (Grid([0, 2]), USER, "'user': node 2"),
        (Grid([]), USER, "needs at least one node"),
        (Grid([0, 1], [15]), USER, "must be 2 positive widths"),
    ],
)
def test_shardings_that_do_not_fit(sharding, table, message):
    plan = ShardingPlan({"user": sharding}, 4, 2)
    with pytest.raises(ValueError, match=message):
        plan.shards(table)


@pytest.mark.parametrize("rank", [True, 1.0, "1", None])
def test_ranks_are_ints(rank):
    with pytest.raises(TypeError, match="table 'user': a rank must be an int, got"):
        ShardingPlan({"user": TableWise(rank)}, 4).shards(USER)


def test_plans_that_are_none():
    with pytest.raises(TypeError, match=r"table 'user': expected a sharding such as te\.sharding\.RowWise\(\), got"):
        ShardingPlan({"user": RowWise}, 4)
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        ShardingPlan({}, 0)
    with pytest.raises(ValueError, match=r"lacks the tables \['user'\]; it has \['item'\]"):
        ShardingPlan({"item": RowWise()}, 4).shards(USER)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "tape"}, r"a placement must be one of \('device', .*, got 'tape'"),
        *(
            ({"placement": placement, f"{name}_{unit}": value}, f"{name}_{unit} must be .* placement in .*{where}")
            for name, where, other_tier in (("cache", "'host', 'disk', 'server'", "device"), ("host", "'disk'", "host"))
            for unit, good, bad in (("rows", 8, (0, -1, 0.5, "8")), ("share", 0.5, (0, -0.5, 1.5, "1", True)))
            for placement, value in ((other_tier, good), *(("disk", value_) for value_ in bad))
        ),
        ({"placement": "disk", "cache_rows": 8, "cache_share": 0.5}, "cache_rows or cache_share, got 8 and 0.5"),
        ({"placement": "disk", "host_rows": 8, "host_share": 0.5}, "host_rows or host_share, got 8 and 0.5"),
    ],
)
def test_placements_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        TablePlacement(**options)


def test_a_placement_of_another_table():
    with pytest.raises(ValueError, match=r"lacks the tables \['usr'\]; it has \['user'\]"):
        ShardingPlan({"user": RowWise()}, 2, placements={"usr": TablePlacement("host")})


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (TablePlacement("disk"), te.CacheConfig(rows=7, folder="x")),
        (TablePlacement("disk", 8, 16), te.CacheConfig(rows=8, folder="x", host_rows=16)),
        (TablePlacement("disk", cache_share=0.5), te.CacheConfig(share=0.5, folder="x")),
        (TablePlacement("disk", 8, host_share=0.25), te.CacheConfig(rows=8, folder="x", host_share=0.25)),
        (TablePlacement("server", cache_share=1), te.CacheConfig(share=1, folder="x")),
    ],
)
def test_a_cache_is_as_the_plan_says_first(where, expected):
    plan = ShardingPlan({"user": RowWise()}, 2, placements={"user": where})
    for options in ({}, {"host_rows": 3}, {"host_share": 1.0}):
        table = te.TableConfig("user", 10, 16, placement="disk", cache=te.CacheConfig(7, folder="x", **options))
        assert plan.apply(table).cache == expected
        assert plan.apply(table).placement == where.placement


@st.composite
def table_lists(draw):
    rows = st.sampled_from((1, 3, 100, 5000, 20_000, 100_000))
    return [
        te.TableConfig(f"table{n}", draw(rows), draw(st.sampled_from((4, 16, 64))))
        for n in range(draw(st.integers(1, 12)))
    ]


@given(table_lists(), st.sampled_from(WORLDS))
def test_uniform_plans_spread_the_bytes(tables, job):
    world, local = job
    plan = uniform_plan(tables, world, local)
    assert plan == uniform_plan(list(tables), world, local)
    assert list(plan.tables) == [table.name for table in tables]
    rank_bytes, whole = [0] * world, [0]
    for table in tables:
        size = table.num_embeddings * table.embedding_dim * 4
        sharding = plan.tables[table.name]
        if isinstance(sharding, DataParallel):
            assert size <= SMALL_TABLE
            continue
        if isinstance(sharding, TableWise):
            whole.append(size)
        for shard in plan.shards(table):
            rank_bytes[shard.rank] += shard.num_rows * shard.num_columns * 4
    # Greedy: the fullest was the emptiest before its last table came. Blocks of rows may differ by a row a rank.
    slack = sum(64 * 4 * world for table in tables)
    assert max(rank_bytes) <= sum(rank_bytes) / world + max(whole) + slack


def test_one_rank_holds_all():
    tables = [te.TableConfig("small", 3, 4), te.TableConfig("large", 100_000, 64)]
    assert set(uniform_plan(tables, 1).tables.values()) == {TableWise(0)}


def test_a_table_beyond_a_share_is_cut_by_rows():
    tables = [te.TableConfig("huge", 1_000_000, 16), te.TableConfig("b", 10_000, 16), te.TableConfig("c", 3, 16)]
    assert uniform_plan(tables, 4).tables == {"huge": RowWise(), "b": TableWise(0), "c": DataParallel()}


def test_a_small_dynamic_table_is_not_replicated():
    """Ranks would give one id several rows."""
    tables = [te.TableConfig("ids", None, 4, capacity=20), te.TableConfig("small", 20, 4)]
    assert uniform_plan(tables, 2).tables == {"ids": TableWise(0), "small": DataParallel()}
    whole = te.plan(tables, te.Topology(2), batch_size=16).tables["ids"]
    assert isinstance(whole, TableWise | RowWise)
