"""The options of tables: each sharding type, number of parts and tier, with what it costs; and the search's problem."""

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
    most_blocks,
)
from tritonemb.sharding.planner.cost_model import DIRECT, HIERARCHICAL, PLACEMENTS, REPLICAS, CostModel, Pieces
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
            if given is not None:
                given = (given,) if isinstance(given, str) else tuple(given)
                object.__setattr__(self, name, given)
                if not given or not set(given) <= set(known):
                    raise ValueError(f"a constraint's {name} must be some of {known}, got {list(given)}")


class Option(NamedTuple):
    """A sharding type, the blocks of columns and of rows, the tier, and the rows that each shard caches."""

    kind: str
    blocks: int
    owners: int
    placement: Placement
    cached: int
    host_rows: int

    def __str__(self) -> str:
        parts = [f"{n} {what}" for n, what in ((self.blocks, "columns"), (self.owners, "rows")) if n > 1]
        return self.kind.replace("_", "-") + (f" ({' x '.join(parts)})" if parts else "")

    def sharding(self, places: Sequence[int]) -> Sharding:
        """With its units on these ranks or nodes."""
        kind: Any = SHARDINGS[self.kind]
        if kind is DataParallel or (kind is RowWise and len(places) < self.owners):  # on all ranks
            return kind()
        return kind(places if kind in (RowWise, ColumnWise, Grid) else places[0])


class Variant(NamedTuple):
    """Options of all tables that differ in their tables only: what each distinct item costs, `[tables, items]`.

    `uses` are the load, and shares of the budgets of device and host memory and disk.
    """

    unit_kind: int
    units: int
    tables: Array
    options: list[Option]
    uses: tuple[Array, Array, Array, Array]
    shared: Array
    server: Array


def _kinds(model: CostModel) -> list[tuple[str, int, int, int, int]]:
    """Sharding types: name, column blocks, row blocks, how a unit is placed, and units."""
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
    tiers: list[tuple[Placement, float, float]] = [("device", 0.0, 0.0)]
    if topology.host:
        tiers += [("host", share, 0.0) for share in CACHE_SHARES]
    if topology.disk:
        of_host = HOST_SHARES if topology.host else HOST_SHARES[:1]
        tiers += [("disk", share, on_host) for share in CACHE_SHARES[::2] for on_host in of_host]
    may = {name: np.array([each.types is None or name in each.types for each in bound]) for name in SHARDINGS}
    may |= {
        name: np.array([each.placements is None or name in each.placements for each in bound]) for name in PLACEMENTS
    }
    # Of table-column-wise sharding column-wise sharding is the better half, unless somebody asks for it.
    may["table_column_wise"] &= np.array([each.types is not None for each in bound])
    if model.ranks == 1:
        may["table_wise"][:] = True  # which every other type is, too
    found = [_variant(model, may, *kind, *tier) for kind in _kinds(model) for tier in tiers]
    if topology.servers:
        found.append(_variant(model, may, "server", 1, 1, ALL, 1, "server", 0.0, 0.0))
    return _assemble(model, [each for each in found if each is not None], bound, previous)


def _variant(
    model: CostModel, may: Mapping[str, Array], kind: str, blocks: int, owners: int, unit_kind: int, units: int,
    placement: Placement, share: float, host_share: float,
) -> Variant | None:  # fmt: skip
    """Costs of every table that may be sharded so; None if none may."""
    tables, top = model.tables, model.topology
    parts = np.array([rows_to_shard(table) for table in tables])
    most = np.array([min(most_blocks(table), max(1, table.embedding_dim // LEAST_WIDTH)) for table in tables])
    allowed = may[placement] & (blocks <= most) & (owners <= parts)
    allowed &= may.get(kind, True)
    if kind in ("column_wise", "table_column_wise", "grid", "data_parallel"):
        allowed &= ~model.dynamic
    if kind in ("table_row_wise", "grid"):
        allowed &= ~model.unpooled
    number = np.flatnonzero(allowed)
    if not len(number):
        return None
    dims, rows, parts = model.dims[number][:, None], model.rows[number][:, None], parts[number][:, None]
    # Distinct items: blocks of ceil(rows / owners), of which the last may be smaller; or blocks of columns.
    items = blocks if owners == 1 else owners
    size = np.ceil(parts / owners)
    first = np.minimum(np.arange(owners) * size, parts)
    of_rows = rows if owners == 1 else (np.minimum(first + size, parts) - first) * (rows / parts)
    shares = of_rows / rows
    for at, n in enumerate(number.tolist() if owners > 1 else ()):
        stats = model.stats[tables[n].name]
        if stats.row_share and not tables[n].is_dynamic:
            shares[at] = stats.share(first[at], of_rows[at], rows[at, 0])
    step = np.where(dims >= 8 * blocks, 8, 1)
    cuts = dims // step * np.arange(blocks + 1) // blocks * step
    cuts[:, -1:] = dims
    width = np.diff(cuts, axis=1)
    if owners > 1:
        width = width.max(1, keepdims=True)
    of_rows, shares, width = (np.broadcast_to(each, (len(number), items)) for each in (of_rows, shares, width))
    numbers = np.broadcast_to(number[:, None], (len(number), items))
    cached = on_host = np.zeros((len(number), items))
    if placement in ("host", "disk"):  # all of a table's items have as much as the largest
        least = np.maximum(share * of_rows, model.least_cached(numbers, shares, of_rows))
        cached = np.minimum((np.ceil(least / 32) * 32).max(1, keepdims=True), of_rows)
    if placement == "disk":
        on_host = np.minimum(np.ceil(host_share * of_rows).max(1, keepdims=True), of_rows - cached)
    scheme = DIRECT
    if kind in ("data_parallel", "server"):
        scheme = REPLICAS
    elif kind in ("table_row_wise", "grid") and model.nodes > 1:
        scheme = HIERARCHICAL
    same = [np.full(numbers.size, each) for each in (blocks, scheme, PLACEMENTS.index(placement))]
    varied = [each.ravel() for each in (numbers, shares, of_rows, width.astype(np.float64), cached, on_host)]
    costs = model.costs(Pieces(*varied[:4], *same, *varied[4:]))
    budgets = np.array([top.hbm - model.memory_of_rank, top.host, top.disk, top.servers * top.server_memory])
    parts_used = (costs.memory / np.maximum(budgets, 1.0)).T
    load, hbm, host, disk, server = np.vstack([costs.seconds.sum(1), parts_used]).reshape(5, len(number), items)
    kept = np.flatnonzero((hbm.max(1) <= 1) & (host.max(1) <= 1) & (disk.max(1) <= 1))
    if not len(kept):
        return None
    shared = model.shared(number[kept], *(each[: len(kept)] for each in same))
    per_shard = zip(cached.max(1)[kept].tolist(), on_host.max(1)[kept].tolist(), strict=True)
    options = [Option(kind, blocks, owners, placement, int(c), int(h)) for c, h in per_shard]
    uses = load[kept], hbm[kept], host[kept], disk[kept]
    return Variant(unit_kind, units, number[kept], options, uses, shared, server[kept, 0] * model.ranks)


def _assemble(
    model: CostModel, variants: list[Variant], bound: list[Constraint], previous: ShardingPlan | None
) -> tuple[list[list[Option]], Problem]:
    tables, ranks = len(model.tables), model.ranks
    # Totals `[tables, variants]`, infinite where a table may not be sharded so.
    features = np.full((8, tables, len(variants)), np.inf)
    row_of = np.full((tables, len(variants)), -1)
    for number, each in enumerate(variants):
        load, hbm, host, disk = each.uses
        shards = {RANK: 1, NODE: model.local, ALL: ranks}[each.unit_kind] * each.units
        sums = [values.sum(1) * (shards / load.shape[1]) for values in each.uses]
        features[:, each.tables, number] = [
            sums[0] + ranks * each.shared, *sums[1:], each.server, load.max(1) + each.shared, hbm.max(1),
            np.maximum(host, disk).max(1) * model.local,
        ]  # fmt: skip
        row_of[each.tables, number] = np.arange(len(each.tables))
    if len(empty := np.flatnonzero((row_of < 0).all(1))):
        raise PlanError(_no_option(model, bound[empty[0]], int(empty[0])))
    features[5] = np.maximum(features[5], FINEST * (features[0].min(1).sum() / ranks))
    features[6:] = np.maximum(features[6:], FINEST)
    kept = _undominated(features)
    options: list[list[Option]] = []
    units, kinds, items, shared, server = [0], list[int](), [0], list[float](), list[float]()
    uses: list[list[Array]] = [[], [], [], []]
    for number, table in enumerate(model.tables):
        rows, of_table = row_of[number], list[Option]()
        if previous is not None:  # what a plan in use makes of the table, with whatever rows cached
            kept[number] |= [
                rows[n] >= 0 and places_in(previous, table, each.options[rows[n]], each.units, model) is not None
                for n, each in enumerate(variants)
            ]
        able = np.flatnonzero(kept[number] & (rows >= 0))
        for variant in able[np.argsort(features[0, number, able], kind="stable")]:  # the search tries cheap ones first
            each, row = variants[variant], rows[variant]
            of_table.append(each.options[row])
            of_rank = each.unit_kind == RANK  # then distinct items are units; else all units have all of them
            units.append(each.units)
            kinds += [each.unit_kind] * each.units
            items += [each.uses[0].shape[1] // (each.units if of_rank else 1)] * each.units
            for values, own in zip(uses, each.uses, strict=True):
                values += [own[row]] * (1 if of_rank else each.units)
            shared.append(each.shared[row])
            server.append(each.server[row])
        options.append(of_table)
    offsets = [np.cumsum(each, dtype=np.int64) for each in ([0, *map(len, options)], units, items)]
    load, hbm, host, disk = (np.concatenate(each).astype(float) for each in uses)
    return options, Problem(
        ranks, model.local, offsets[0], offsets[1], np.array(kinds, dtype=np.int64), offsets[2], load, hbm, host, disk,
        np.array(shared), np.array(server),
    )  # fmt: skip


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


def places_in(
    plan: ShardingPlan, table: TableConfig, option: Option, units: int, model: CostModel
) -> Sequence[int] | None:
    """The ranks or nodes of an option's units in a plan; None if the plan does something else with the table."""
    sharding = plan.tables.get(table.name)
    if sharding is None or type(sharding) is not SHARDINGS.get(option.kind):
        return None
    if plan.placement(table.name).placement != option.placement:
        return None
    places = sharding.places
    if option.kind == "data_parallel" or (option.kind == "row_wise" and units == 1):  # on all ranks
        return [0] if places in (None, tuple(range(model.ranks))) else None
    if places is None:
        places = range(model.nodes if option.kind == "grid" else model.ranks)
    return places if len(places) == len(set(places)) == units else None


def _no_option(model: CostModel, constraint: Constraint, number: int) -> str:
    top, table, size = model.topology, model.tables[number], float(model.sizes[number])
    rooms = {"device": top.hbm * model.ranks, "host": top.host * model.nodes, "disk": top.disk * model.nodes}
    short = size - max((rooms[name] for name in constraint.placements or rooms if name in rooms), default=0.0)
    given = "" if constraint == Constraint() else f" under {constraint}"
    return (
        f"table {table.name!r} cannot be placed{given}: {amount(size)} with its states, {table.embedding_dim} columns; "
        f"a rank has {amount(top.hbm)}, a node {amount(top.host)} of host memory and {amount(top.disk)} of disk"
        + (f": short by {amount(short)}" if short > 0 else "")
    )
