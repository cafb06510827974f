"""The options of tables: each sharding type, number of parts and tier, with what it costs; and the search's problem."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from tritonemb.kernels.cpu.plan_search import ALL, NODE, RANK, Problem
from tritonemb.layout import rows_to_shard
from tritonemb.sharding.plan import (
    SHARDINGS,
    ColumnWise,
    DataParallel,
    Grid,
    RowWise,
    Sharding,
    ShardingPlan,
    TableColumnWise,
    TablePlacement,
    TableRowWise,
    TableWise,
    most_blocks,
)
from tritonemb.sharding.planner.cost_model import DIRECT, HIERARCHICAL, PLACEMENTS, REPLICAS, CostModel, Pieces, size_of
from tritonemb.sharding.planner.topology import amount
from tritonemb.types import Placement, TableConfig

Array = NDArray[Any]
CACHE_SHARES = (0.0, 0.03, 0.1, 0.3)  # of a shard's rows that are cached; at least those of prefetched batches
HOST_SHARES = (0.0, 0.1, 0.4)  # of a shard on disk that is cached in host memory
LEAST_WIDTH = 4  # columns of a block
FINEST = 0.02  # units that fill less of a budget are all alike to the packing


class PlanError(ValueError):
    """The tables do not fit. The text says which budget is exceeded, by how much, and what would make them fit."""


@dataclass(frozen=True)
class Constraint:
    """What a table may become; everything if not given.

    Args:
        placements: "device", "host", "disk", "server".
        types: "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid", "data_parallel".

    Raises:
        ValueError: for a name that there is not, or an empty list.
    """

    placements: Sequence[Placement] | None = None
    types: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, known in (("placements", get_args(Placement)), ("types", tuple(SHARDINGS))):
            given = getattr(self, name)
            if given is None:
                continue
            given = (given,) if isinstance(given, str) else tuple(given)
            object.__setattr__(self, name, given)
            wrong = [each for each in given if each not in known]
            if wrong or not given:
                raise ValueError(f"a constraint's {name} must be some of {known}, got {list(given)}")


class Option(NamedTuple):
    """A sharding type, the blocks of columns and of rows, the tier, and the rows that each shard caches."""

    kind: str
    blocks: int
    owners: int
    placement: str
    cached: int
    host_rows: int

    def sharding(self, places: Sequence[int]) -> Sharding:
        """With its units on these ranks or nodes."""
        match self.kind:
            case "table_wise":
                return TableWise(places[0])
            case "column_wise":
                return ColumnWise(places)
            case "row_wise":
                return RowWise(places if len(places) == self.owners else None)
            case "table_row_wise":
                return TableRowWise(places[0])
            case "table_column_wise":
                return TableColumnWise(places[0])
            case "grid":
                return Grid(places)
        return DataParallel()

    @property
    def tier(self) -> TablePlacement:
        on_device = self.placement in ("device", "server")
        placement: Any = self.placement
        return TablePlacement(placement, None if on_device else self.cached, self.host_rows or None)


class _Variant(NamedTuple):
    """Options of all tables that differ in their tables only: costs of each distinct item `[tables, items]`."""

    kind: str
    unit_kind: int
    units: int
    tables: Array
    options: list[Option]
    load: Array
    hbm: Array
    host: Array
    disk: Array
    shared: Array
    server: Array


def _kinds(model: CostModel) -> list[tuple[str, int, int, int, int]]:
    """Sharding types: name, column blocks, row blocks, how a unit is placed, and units; of rows 0 for all."""
    ranks, local, nodes = model.ranks, model.local, model.nodes
    powers = [2, 3] + [1 << n for n in range(2, 11)]
    found = [("table_wise", 1, 1, RANK, 1)]
    found += [("column_wise", k, 1, RANK, k) for k in powers if k <= ranks]
    found += [("row_wise", 1, k, RANK, k) for k in powers if k < ranks]
    if ranks > 1:
        found += [("row_wise", 1, ranks, ALL, 1), ("data_parallel", 1, 1, ALL, 1)]
    if nodes > 1 and local > 1:
        found += [("table_row_wise", 1, local, NODE, 1), ("table_column_wise", local, 1, NODE, 1)]
        found += [("grid", k, local, NODE, k) for k in [*powers, nodes] if k <= nodes]
    return list(dict.fromkeys(found))


def make_problem(
    model: CostModel, bound: list[Constraint], previous: ShardingPlan | None = None
) -> tuple[list[list[Option]], Problem]:
    """The options of each table that no other is better than in everything, and the problem to solve."""
    topology = model.topology
    tiers = [("device", 0.0, 0.0)]
    if topology.host:
        tiers += [("host", share, 0.0) for share in CACHE_SHARES]
    if topology.disk:
        tiers += [
            ("disk", share, on_host)
            for share in CACHE_SHARES[::2]
            for on_host in HOST_SHARES[: 3 if topology.host else 1]
        ]
    allowed = {name: np.array([each.types is None or name in each.types for each in bound]) for name in SHARDINGS} | {
        name: np.array([each.placements is None or name in each.placements for each in bound]) for name in PLACEMENTS
    }
    # Of table-column-wise sharding column-wise sharding is the better half, unless somebody asks for it.
    allowed["table_column_wise"] &= np.array([each.types is not None for each in bound])
    if model.ranks == 1:
        allowed["table_wise"][:] = True  # which every other type is, too
    variants = [
        found
        for kind in _kinds(model)
        for tier in tiers
        if (found := _variant(model, allowed, *kind, *tier)) is not None
    ]
    if topology.servers and (found := _variant(model, allowed, "server", 1, 1, ALL, 1, "server", 0.0, 0.0)) is not None:
        variants.append(found)
    return _assemble(model, variants, bound, previous)


def _variant(
    model: CostModel, may: Mapping[str, Array], kind: str, blocks: int, owners: int, unit_kind: int, units: int,
    placement: str, share: float, host_share: float,
) -> _Variant | None:  # fmt: skip
    """Costs of every table that may be sharded so; None if none may."""
    tables, top = model.tables, model.topology
    parts = np.array([rows_to_shard(table) for table in tables])
    most = np.array([min(most_blocks(table), max(1, table.embedding_dim // LEAST_WIDTH)) for table in tables])
    allowed = may[placement] if kind == "server" else may[placement] & may[kind]
    allowed = allowed & (blocks <= most) & (owners <= parts)
    if kind in ("column_wise", "table_column_wise", "grid", "data_parallel"):
        allowed &= ~model.dynamic
    if kind in ("table_row_wise", "grid"):
        allowed &= ~model.unpooled
    number = np.flatnonzero(allowed)
    if not len(number):
        return None
    dims, rows = model.dims[number], model.rows[number]
    items = blocks if owners == 1 else owners
    if kind == "grid":
        items = owners
    if owners > 1:  # blocks of ceil(rows / owners), of which the last may be smaller
        size = np.ceil(parts[number] / owners)
        first = np.minimum(np.arange(owners) * size[:, None], parts[number][:, None])
        held = np.minimum(first + size[:, None], parts[number][:, None]) - first
        scale = (rows / parts[number])[:, None]
        of_rows = held * scale
        shares = of_rows / rows[:, None]
        for at, n in enumerate(number):
            if model.stats[n].row_share and not tables[n].is_dynamic:
                shares[at] = [model.stats[n].share(f, h, rows[at]) for f, h in zip(first[at], of_rows[at], strict=True)]
    else:
        of_rows, shares = np.repeat(rows[:, None], items, 1), np.ones((len(number), items))
    step = np.where(dims >= 8 * blocks, 8, 1)[:, None]
    cuts = dims[:, None] // step * np.arange(blocks + 1) // blocks * step
    cuts[:, -1] = dims
    width = np.diff(cuts, axis=1)
    if owners > 1 or blocks == 1:
        width = width.max(1)[:, None].repeat(items, 1)
    table = np.repeat(number, items)
    of_rows, shares = of_rows.ravel(), shares.ravel()
    away = placement in ("host", "disk")
    cached = np.zeros(len(table))
    if away:
        cached = np.ceil(np.maximum(share * of_rows, model.least_cached(table, shares, of_rows)) / 32) * 32
        cached = np.minimum(_as_largest(cached, items), of_rows)
    on_host = np.zeros(len(table))
    if placement == "disk":
        on_host = np.minimum(_as_largest(np.ceil(host_share * of_rows), items), of_rows - cached)
    full = functools.partial(np.full, len(table))
    scheme = DIRECT
    if kind in ("data_parallel", "server"):
        scheme = REPLICAS
    elif kind in ("table_row_wise", "grid") and model.nodes > 1:
        scheme = HIERARCHICAL
    pieces = Pieces(
        table, shares, of_rows, width.ravel().astype(np.float64), full(blocks), full(scheme),
        full(PLACEMENTS.index(placement)), cached, on_host,
    )  # fmt: skip
    costs, shape = model.costs(pieces), (len(number), items)
    hbm_budget = max(top.hbm - model.memory_of_rank, 1.0)
    load = costs.seconds.sum(1).reshape(shape)
    hbm = costs.hbm.reshape(shape) / hbm_budget
    host = costs.host.reshape(shape) / max(top.host, 1.0)
    disk = costs.disk.reshape(shape) / max(top.disk, 1.0)
    one = np.arange(len(number)) * items
    shared = model.shared(number, pieces.blocks[one], pieces.scheme[one], pieces.placement[one]).sum(1)
    server = costs.server.reshape(shape)[:, 0] * model.ranks / max(top.servers * top.server_memory, 1.0)
    fits = (hbm.max(1) <= 1) & (host.max(1) <= 1) & (disk.max(1) <= 1)
    per_shard = cached.reshape(shape).max(1), on_host.reshape(shape).max(1)
    options = [Option(kind, blocks, owners, placement, int(c), int(h)) for c, h in zip(*per_shard, strict=True)]
    kept = np.flatnonzero(fits)
    if not len(kept):
        return None
    return _Variant(
        kind, unit_kind, units, number[kept], [options[each] for each in kept], load[kept], hbm[kept], host[kept],
        disk[kept], shared[kept], server[kept],
    )  # fmt: skip


def _as_largest(values: Array, items: int) -> Array:
    """What all of a table's items have: as much as the largest."""
    return np.repeat(values.reshape(-1, items).max(1), items)


def _assemble(
    model: CostModel, variants: list[_Variant], bound: list[Constraint], previous: ShardingPlan | None
) -> tuple[list[list[Option]], Problem]:
    tables, ranks = len(model.tables), model.ranks
    # Totals `[tables, variants]`, infinite where a table may not be sharded so.
    features = np.full((8, tables, len(variants)), np.inf)
    row_of = np.full((tables, len(variants)), -1)
    for number, each in enumerate(variants):
        items = each.load.shape[1]
        width = {RANK: 1, NODE: model.local, ALL: ranks}[each.unit_kind] * each.units
        sums = [values.sum(1) * (width / items) for values in (each.load, each.hbm, each.host, each.disk)]
        features[0, each.tables, number] = sums[0] + ranks * each.shared
        features[1:4, each.tables, number] = sums[1:]
        features[4, each.tables, number] = each.server
        features[5, each.tables, number] = each.load.max(1) + each.shared
        features[6, each.tables, number] = each.hbm.max(1)
        features[7, each.tables, number] = np.maximum(each.host, each.disk).max(1) * model.local
        row_of[each.tables, number] = np.arange(len(each.tables))
    empty = np.flatnonzero((row_of < 0).all(1))
    if len(empty):
        raise PlanError(_no_option(model, bound[empty[0]], model.tables[empty[0]]))
    mean = features[0].min(1).sum() / ranks
    features[5] = np.maximum(features[5], FINEST * mean)
    features[6:] = np.maximum(features[6:], FINEST)
    kept = _undominated(features)
    if previous is not None:
        for number, table in enumerate(model.tables):
            kept[number] |= _same_as_before(variants, row_of[number], previous, table)
    options: list[list[Option]] = []
    lists: dict[str, list[Any]] = {
        name: [] for name in ("units", "kind", "items", "load", "hbm", "host", "disk", "shared", "server")
    }
    for number in range(tables):
        options.append([])
        able = np.flatnonzero(kept[number] & (row_of[number] >= 0))
        for variant in able[np.argsort(features[0, number, able], kind="stable")]:  # the search tries cheap ones first
            each, row = variants[variant], row_of[number, variant]
            options[-1].append(each.options[row])
            per_unit = each.load.shape[1] // each.units if each.unit_kind == RANK else each.load.shape[1]
            repeat = 1 if each.unit_kind == RANK else each.units
            lists["units"].append(each.units)
            lists["kind"] += [each.unit_kind] * each.units
            lists["items"] += [per_unit] * each.units
            for name in ("load", "hbm", "host", "disk"):
                lists[name] += [getattr(each, name)[row]] * repeat
            lists["shared"].append(each.shared[row])
            lists["server"].append(each.server[row])
    offsets = [
        np.concatenate([[0], np.cumsum(values)]).astype(np.int64)
        for values in ([len(each) for each in options], lists["units"], lists["items"])
    ]
    load, hbm, host, disk = (np.concatenate(lists[name]).astype(float) for name in ("load", "hbm", "host", "disk"))
    problem = Problem(
        ranks, model.local, offsets[0], offsets[1], np.array(lists["kind"], dtype=np.int64), offsets[2], load,
        hbm, host, disk,
        np.array(lists["shared"]), np.array(lists["server"]),
    )  # fmt: skip
    return options, problem


def _undominated(features: Array) -> Array:
    """`[tables, variants]`: which no other variant of the table is at least as good as in everything."""
    _, tables, number = features.shape
    kept = np.isfinite(features[0])
    for first in range(0, tables, 64):
        some = features[:, first : first + 64]
        no_worse = np.ones((some.shape[1], number, number), dtype=bool)  # [table, a, b]: a is no worse than b
        better = np.zeros_like(no_worse)
        for values in some:
            no_worse &= values[:, :, None] <= values[:, None, :] * (1 + 1e-12)
            better |= values[:, :, None] < values[:, None, :] * (1 - 1e-12)
        earlier = np.tri(number, k=-1, dtype=bool).T
        kept[first : first + 64] &= ~(no_worse & (better | earlier)).any(1)
    return kept


def _same_as_before(variants: list[_Variant], rows: Array, previous: ShardingPlan, table: TableConfig) -> Array:
    """Which variants are what a plan in use makes of a table, with whatever rows cached."""
    kind = next((name for name, each in SHARDINGS.items() if type(previous.tables.get(table.name)) is each), None)
    found = np.zeros(len(variants), dtype=bool)
    if kind is None:
        return found
    where = previous.placements.get(table.name, TablePlacement())
    shards = previous.shards(table)
    blocks = len({shard.first_column for shard in shards})
    owners = -(-len(shards) // blocks) if kind != "data_parallel" else 1
    for number, each in enumerate(variants):
        if rows[number] >= 0:
            option = each.options[rows[number]]
            same = (option.kind, option.placement, option.blocks) == (kind, where.placement, blocks)
            found[number] = same and option.owners in (
                owners,
                1 if kind in ("column_wise", "table_column_wise") else owners,
            )
    return found


def _no_option(model: CostModel, constraint: Constraint, table: TableConfig) -> str:
    top, size = model.topology, size_of(model, table)
    rooms = {"device": top.hbm * model.ranks, "host": top.host * model.nodes, "disk": top.disk * model.nodes}
    names = [name for name in constraint.placements or rooms if name in rooms]
    short = size - max((rooms[name] for name in names), default=0.0)
    given = "" if constraint == Constraint() else f" under {constraint}"
    return (
        f"table {table.name!r} cannot be placed{given}: {amount(size)} with its states, {table.embedding_dim} columns; "
        f"a rank has {amount(top.hbm)}, a node {amount(top.host)} of host memory and {amount(top.disk)} of disk"
        + (f": short by {amount(short)}" if short > 0 else "")
    )
