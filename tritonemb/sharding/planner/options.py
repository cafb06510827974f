"""The options of tables: each sharding type and tier, with what its shards cost; and the search's problem."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np

from tritonemb.layout import rows_to_shard
from tritonemb.sharding.plan import COLUMNS_ROUNDED_TOGETHER, SHARDINGS, RowWise, Sharding, ShardingPlan
from tritonemb.sharding.planner.cost_model import (
    DIRECT,
    DISK,
    HIERARCHICAL,
    HOST,
    PLACEMENTS,
    REPLICAS,
    SERVER,
    CostModel,
    Pieces,
)
from tritonemb.sharding.planner.shard_packing import FINE, Problem
from tritonemb.sharding.table_stats import Array, TableStats
from tritonemb.types import Placement, TableConfig
from tritonemb.utils import format_bytes

CACHE_SHARES = (0.0, 0.03, 0.1, 0.3)  # of a shard's rows that are cached; at least those of prefetched batches
HOST_SHARES = (0.0, 0.1, 0.4, 0.7)  # of a shard on disk that is cached in host memory
LARGE = 0.01  # of all device or host memory: tables of more may cache shares between these, too
FINE_CACHE_SHARES = (0.05, 0.15, 0.2, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8)
FINE_HOST_SHARES = (0.05, 0.15, 0.2, 0.25, 0.3, 0.35, 0.45, 0.5, 0.55, 0.6, 0.65, 0.75, 0.8, 0.85)
CACHE_MARGIN, CACHE_PARTS = 64, 64  # rows more, of each of up to so many shards
WIDE_IDS = 2.0**31 - 1  # rows: ids of a shard that has more are sent as 8 bytes
ROUNDING = 1e-6  # of every budget, which is not used
ROW_RANGES = (1, 2, 4, 8)  # of a table whose ids are not spread evenly over its rows; others are one range


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
    """A sharding type, the tier, and the share of each shard's rows that is cached on the device and in host memory.

    Its units are ranges of rows, from one of `edges` (shares of all rows) to the next, or all columns. Each is cut into
    shards when it is placed; `parts` are all of them then, or for "grid" the blocks of columns.
    """

    kind: str
    placement: Placement
    cached: float = 0.0
    on_host: float = 0.0
    edges: tuple[float, ...] = (0.0, 1.0)
    parts: int = 1

    def __str__(self) -> str:
        return self.kind.replace("_", "-") + (f" ({self.parts} parts)" if self.parts > 1 else "")


class TierOption(NamedTuple):
    """Where tables of at least so many bytes may be, and shares of their rows that are cached."""

    placement: Placement
    cached: float = 0.0
    on_host: float = 0.0
    least: float = 0.0


class Variant(NamedTuple):
    """Options of all tables that differ in their tables only: of each its units, `[tables, units]`; see `Problem`."""

    tables: Array
    options: list[Option]
    on_node: bool
    everywhere: Array  # [tables, 5]
    common: Array  # [tables]
    unit_common: Array
    steps: Array
    most: Array
    fixed: Array  # [tables, units, 4]; no units where the table is on all ranks
    slope: Array
    mutual: Array


def make_problem(
    model: CostModel,
    bound: list[Constraint],
    previous: ShardingPlan | None = None,
    reserve: Sequence[float] = (0.0, 0.0, 0.0),
) -> tuple[list[list[Option]], Problem]:
    """The options of each table that no other is better than in everything, and the problem to solve.

    `reserve` are shares of the budgets of device and host memory and disk that are left alone.
    """
    topology = model.topology
    if (short := model.memory_of_rank - topology.hbm) >= 0:
        raise PlanError(
            f"no device memory is left for tables, {model.memory_in_words()}: short by {format_bytes(short)}"
        )
    large = LARGE * topology.hbm * model.ranks, LARGE * topology.host * model.nodes
    tiers = [TierOption("device")]
    if topology.host:
        tiers += [TierOption("host", share) for share in CACHE_SHARES]
        tiers += [TierOption("host", share, least=large[0]) for share in FINE_CACHE_SHARES]
    if topology.disk:
        of_host = HOST_SHARES if topology.host else HOST_SHARES[:1]
        tiers += [TierOption("disk", share, on_host) for share in CACHE_SHARES[::2] for on_host in of_host]
        tiers += [TierOption("disk", 0.0, on_host, large[1]) for on_host in FINE_HOST_SHARES if topology.host]
    may = {name: np.array([each.types is None or name in each.types for each in bound]) for name in SHARDINGS}
    may |= {
        name: np.array([each.placements is None or name in each.placements for each in bound]) for name in PLACEMENTS
    }
    # Of table-column-wise sharding column-wise sharding is the better half, unless somebody asks for it.
    may["table_column_wise"] &= np.array([each.types is not None for each in bound])
    if model.ranks == 1:
        may["table_wise"][:] = True  # which every other type is, too
    kinds = [("row_wise", units) for units in ROW_RANGES]
    if model.ranks > 1:
        kinds += [("column_wise", 1), ("data_parallel", 0)]
    if model.nodes > 1 and model.local > 1:
        kinds += [("table_row_wise", 1), ("grid", 1), ("table_column_wise", 1)]
    found = [_variant(model, may, kind, units, tier, reserve) for kind, units in kinds for tier in tiers]
    if topology.servers:
        found.append(_variant(model, may, "server", 0, TierOption("server"), reserve))
    return _assemble(model, [each for each in found if each is not None], bound, previous)


def _variant(
    model: CostModel, may: Mapping[str, Array], kind: str, units: int, tier: TierOption, reserve: Sequence[float]
) -> Variant | None:
    """Costs of every table that may be sharded so, on a tier with shares of rows cached; None if none may."""
    placement, share, host_share, least_bytes = tier
    tables, top, ranks, local = model.tables, model.topology, model.ranks, model.local
    skewed = np.array([bool(model.stats[t.name].row_share) and not t.is_dynamic for t in tables])
    rows_of = np.array([rows_to_shard(table) for table in tables])
    columns = np.array([table.embedding_dim // column_step(table) for table in tables])
    whole = may["table_wise"] | may["row_wise"] | may["column_wise"]
    steps = most = one = np.ones(len(tables), dtype=np.int64)
    if kind == "row_wise":
        allowed, steps = whole, np.where(may[kind] & (skewed <= (units > 1)), rows_of, 1)
        allowed = allowed & ((units == 1) | (skewed & may[kind] & (rows_of >= ranks) & (units <= ranks)))
        most = np.minimum(steps, ranks // units)  # a rank has one shard of a table
    elif kind == "column_wise":
        allowed, steps = may[kind] & ~model.dynamic & (columns > 1), columns
        most = np.minimum(steps, ranks)
    elif kind == "grid":
        allowed, steps = may[kind] & ~(model.dynamic | model.unpooled) & (rows_of >= local) & (columns > 1), columns
        most = np.minimum(steps, model.nodes)
    elif kind == "table_row_wise":
        allowed = (may[kind] | may["grid"] & ~model.dynamic) & ~model.unpooled & (rows_of >= local)
    else:
        allowed = one > 0 if kind == "server" else may[kind] & ~model.dynamic
    if kind == "table_column_wise":
        allowed &= columns >= local
    number = np.flatnonzero(allowed & may[placement] & (model.sizes >= least_bytes))
    if not len(number):
        return None
    rows, dims = model.rows[number][:, None], model.dims[number][:, None]
    # What units have of a table's ids and of its rows.
    edges = np.linspace(0, 1, max(units, 1) + 1) * np.ones((len(number), 1))
    ids = np.diff(edges)
    for at, n in enumerate(number.tolist() if units > 1 else ()):
        edges[at], ids[at] = _row_ranges(model.stats[tables[n].name], tables[n], units)
    of_rows = np.diff(edges)
    by_node = kind in ("table_row_wise", "grid")
    if by_node:
        ids, of_rows = ids / local, of_rows / local
    cached = on_host = np.zeros(of_rows.shape)
    if placement in ("host", "disk"):  # all shards of a table have the same share of their rows
        least = model.least_cached(np.broadcast_to(number[:, None], ids.shape), ids, of_rows * rows)
        least = (least + CACHE_MARGIN * np.minimum(ranks, CACHE_PARTS)) / np.maximum(of_rows * rows, 1)
        cached = np.minimum(np.maximum(share, least), 1).max(1, keepdims=True) * np.ones(ids.shape)
    if placement == "disk":
        on_host = np.minimum(host_share, 1 - cached)
    scheme = HIERARCHICAL if by_node else REPLICAS if kind in ("data_parallel", "server") else DIRECT
    by_columns, on_node = kind in ("column_wise", "grid"), by_node or kind == "table_column_wise"
    blocks = local if kind == "table_column_wise" else 2 if by_columns else 1  # at least
    budgets = np.array([top.hbm - model.memory_of_rank, top.host, top.disk, top.servers * top.server_memory])
    budgets *= 1 - np.append(reserve, 0) - ROUNDING

    def costs(part: Array | float, blocks: Any) -> Array:
        """`[tables, units, 5]`: load, and shares of budgets, of shards with this part of a unit."""
        width: Any = dims * (part if by_columns else 1)
        if kind == "table_column_wise":
            width = np.ceil(dims / local)
        down: Any = 1.0 if by_columns else part
        values = ids * down, of_rows * rows * down, width, blocks, scheme, PLACEMENTS.index(placement)
        held = cached * of_rows * rows * down, on_host * of_rows * rows * down
        flat = [np.broadcast_to(each, ids.shape).ravel() for each in (number[:, None], *values, *held)]
        found = model.costs(Pieces(*flat))
        uses = found.memory / np.maximum(budgets, 1.0)
        uses[:, [HOST, DISK]] *= local if on_node else 1
        return np.concatenate([found.seconds.sum(1)[:, None], uses], 1).reshape(*ids.shape, 5)

    everywhere, mutual = np.zeros((len(number), 5)), np.zeros((len(number), units))
    if units == 0:
        everywhere = costs(1.0, 1)[:, 0]
        everywhere[:, 1 + HOST : 1 + SERVER] *= local
        everywhere[:, 1 + SERVER] *= ranks
        fixed = slope = np.zeros((len(number), 0, 4))
    else:
        part = np.minimum(1.0, WIDE_IDS / rows) / 2  # shards that have 2^31 rows are rare
        one_part, two_parts = costs(part, blocks)[..., :4], costs(2 * part, blocks)[..., :4]
        slope = np.maximum((two_parts - one_part) / part[..., None], 0)
        fixed = np.maximum(one_part - slope * part[..., None], 0)
        if by_columns:  # sums of whole rows go to the ranks with other columns
            mutual = costs(part, 3)[..., 0] - costs(part, 2)[..., 0]
            fixed[..., 0] -= mutual
        if kind == "row_wise":  # parts of rows are rounded
            fixed[..., 1:] += slope[..., 1:] * np.where(steps > FINE, 1 / steps, 0)[number][:, None, None]
    same = [np.full(len(number), each) for each in (1, scheme, PLACEMENTS.index(placement))]
    common = model.shared(number, *same)
    if kind == "table_column_wise":
        common = common * local
    options = [
        Option(kind, placement, c, h, tuple(e) if kind == "row_wise" else (0.0, 1.0))
        for c, h, e in zip(cached[:, 0].tolist(), on_host[:, 0].tolist(), edges.tolist(), strict=True)
    ]
    shape = fixed.shape[:2]
    return Variant(
        number, options, on_node, everywhere, common * (not by_columns),  # ids are sent to each block of columns
        np.broadcast_to((common * by_columns)[:, None], shape), np.broadcast_to(steps[number][:, None], shape),
        np.broadcast_to(most[number][:, None], shape), fixed, slope, mutual,
    )  # fmt: skip


def _along(stats: TableStats, table: TableConfig) -> tuple[Array, Array]:
    """Shares of a table's first rows, and of these and their ids together, half and half."""
    if table.is_dynamic or not stats.row_share:
        return np.array([0.0, 1.0]), np.array([0.0, 1.0])
    rows, ids = np.linspace(0, 1, len(stats.row_share) + 1), np.append(0.0, np.cumsum(stats.row_share))
    return rows, (rows + ids / ids[-1]) / 2


def _row_ranges(stats: TableStats, table: TableConfig, number: int) -> tuple[Array, Array]:
    """Edges of ranges of rows, in each of which are as many ids and rows together; and the ids in each."""
    rows, both = _along(stats, table)
    edges = np.interp(np.linspace(0, 1, number + 1), both, rows)
    return edges, np.diff(2 * np.linspace(0, 1, number + 1) - edges)


def _assemble(
    model: CostModel, variants: list[Variant], bound: list[Constraint], previous: ShardingPlan | None
) -> tuple[list[list[Option]], Problem]:
    tables = len(model.tables)
    row_of = np.full((tables, len(variants)), -1)
    for number, each in enumerate(variants):
        fits = (each.everywhere[:, 1:] <= 1).all(1) & (each.fixed[..., 1:] <= 1).all((1, 2))
        fits &= (each.fixed[..., 1:] + each.slope[..., 1:] / each.most[..., None] <= 1 + 1e-9).all((1, 2))
        row_of[each.tables[fits], number] = np.flatnonzero(fits)
    if len(empty := np.flatnonzero((row_of < 0).all(1))):
        raise PlanError(_no_option(model, variants, bound[empty[0]], int(empty[0])))
    kept = _undominated(variants, row_of)
    options: list[list[Option]] = []
    offsets, picked = [0], list[tuple[int, int]]()
    for number, table in enumerate(model.tables):
        rows = row_of[number]
        if previous is not None:  # what a plan in use makes of the table, with whatever rows cached
            kept[number] |= [
                rows[n] >= 0 and _is_of(previous, table, each.options[rows[n]]) for n, each in enumerate(variants)
            ]
        able = np.flatnonzero(kept[number])
        options.append([variants[n].options[rows[n]] for n in able])
        picked += [(int(n), int(rows[n])) for n in able]
        offsets.append(len(picked))
    count = [variants[n].fixed.shape[1] for n, _ in picked]

    def values(name: str, join: Callable[[list[Array]], Array] = np.concatenate) -> Array:
        return join([getattr(variants[n], name)[row] for n, row in picked])

    return options, Problem(
        model.ranks, model.local, np.array(offsets), np.concatenate([[0], np.cumsum(count)]),
        values("everywhere", np.stack), values("common", np.stack), values("unit_common"),
        np.repeat([variants[n].on_node for n, _ in picked], count), values("steps").astype(np.int64),
        values("most").astype(np.int64), values("fixed"), values("slope"), values("mutual"),
    )  # fmt: skip


def _undominated(variants: list[Variant], row_of: Array) -> Array:
    """`[tables, variants]`: which no other variant of the table and its kind is at least as good as in everything."""
    kept = row_of >= 0
    kinds = [(each.options[0].kind, each.fixed.shape[1]) for each in variants]
    for kind in dict.fromkeys(kinds):
        at = [n for n, each in enumerate(kinds) if each == kind]
        size = 5 + 8 * kind[1]
        values = np.full((len(row_of), len(at), size), np.inf)
        for place, n in enumerate(at):
            each, able = variants[n], np.flatnonzero(row_of[:, n] >= 0)
            rows = row_of[able, n]
            parts = each.everywhere[rows], each.fixed[rows], each.slope[rows]
            values[able, place] = np.concatenate(
                [part.reshape(len(rows), np.prod(part.shape[1:], dtype=int)) for part in parts], 1
            )
        no_worse = (values[:, :, None] <= values[:, None] * (1 + 1e-12) + 1e-15).all(3)  # [table, a, b]
        better = (values[:, :, None] < values[:, None] * (1 - 1e-12) - 1e-15).any(3)
        earlier = np.tri(len(at), k=-1, dtype=bool).T
        kept[:, at] &= ~(no_worse & (better | earlier) & kept[:, at][:, :, None]).any(1)
    return kept


def column_step(table: TableConfig) -> int:
    """Columns whose multiples blocks have; where they do not divide all, the last block has the rest, too."""
    if table.dtype.itemsize < 4:
        return min(COLUMNS_ROUNDED_TOGETHER, table.embedding_dim)
    dim = table.embedding_dim
    return next((step for step in (4, 2) if dim % step == 0 and dim >= 8 * step), 1)


_WHOLE = ("table_wise", "row_wise", "column_wise")
_ONE_BLOCK = dict.fromkeys(_WHOLE, _WHOLE) | dict.fromkeys(("table_row_wise", "grid"), ("table_row_wise", "grid"))


def named(option: Option, parts: int, may: Constraint) -> Option:
    """The option as it is called with so many shards, or blocks of columns."""
    names = _ONE_BLOCK.get(option.kind, ()) if parts == 1 else ()
    kind = next((name for name in names if may.types is None or name in may.types), option.kind)
    return option._replace(kind=kind, parts=parts)


def sharding(
    table: TableConfig, stats: TableStats, option: Option, may: Constraint, units: Array, places: Array, shares: Array
) -> tuple[Sharding, Option]:
    """A table's shards as a plan has them, those of a unit in the order of their places; and the option by its name."""
    kinds: dict[str, Any] = {**SHARDINGS, "server": SHARDINGS["data_parallel"]}
    if len(places) <= 1:
        found, place = named(option, 1, may), places.tolist()
        by_places = found.kind in ("row_wise", "column_wise", "grid")
        return kinds[found.kind](place) if by_places else kinds[found.kind](*place), found
    order = np.lexsort((places, units))
    at, shares, units = places[order].tolist(), shares[order], units[order]
    if option.kind == "row_wise":
        rows = rows_to_shard(table)
        first, last = np.searchsorted(units, units), np.append(units[1:] != units[:-1], True)
        inside = np.cumsum(shares) - np.append(0.0, np.cumsum(shares))[first]  # its unit, up to a shard's end
        ends = (units + np.where(last, 1.0, np.minimum(inside, 1.0))) / (len(option.edges) - 1)
        ends = np.round(np.interp(ends, *_along(stats, table)[::-1]) * rows).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        kept = np.flatnonzero(counts)
        at, counts = [at[n] for n in kept], counts[kept].tolist()
        even = -(-rows // len(at))
        named_rows = None if counts == [min(even, rows - even * n) for n in range(len(at))] else counts
        return RowWise(at, named_rows), option._replace(parts=len(at))
    step = column_step(table)
    widths = (np.round(shares * (table.embedding_dim // step)).astype(np.int64) * step).tolist()
    widths[-1] += table.embedding_dim - sum(widths)
    return kinds[option.kind](at, widths), option._replace(parts=len(at))


_KINDS = {"table_wise": ("row_wise", "column_wise"), "table_row_wise": ("table_row_wise", "grid")}  # what becomes these


def _is_of(plan: ShardingPlan, table: TableConfig, option: Option) -> bool:
    """Whether a plan does with a table what the option says, with any shards and rows cached."""
    if (sharding := plan.tables.get(table.name)) is None:
        return False
    kind = next(name for name, each in SHARDINGS.items() if each is type(sharding))
    return option.kind in _KINDS.get(kind, (kind,)) and plan.placement(table.name).placement == option.placement


def shards_in(
    plan: ShardingPlan, table: TableConfig, stats: TableStats, option: Option, most: int, local: int
) -> list[tuple[int, int, float]] | None:
    """The unit, place and share of each shard that a plan has of a table; None if they are no shards of the option."""
    by_node = option.kind in ("table_row_wise", "table_column_wise", "grid")
    if not _is_of(plan, table, option) or (by_node and plan.local_world_size != local):
        return None
    if option.kind == "data_parallel":
        return []
    found, given = list[tuple[int, int, float]](), plan.tables[table.name]
    if option.kind == "row_wise":
        ranges = len(option.edges) - 1
        if isinstance(given, RowWise) and given.rows is not None:  # maybe of fewer rows than the table has by now
            ranks, counts = list(given.targets or range(plan.world_size)), np.array(given.rows, dtype=np.float64)
        else:
            shards = plan.shards(table)
            ranks = [each.rank for each in shards]
            counts = np.array([each.num_rows for each in shards], dtype=np.float64)
        ends = np.interp(np.cumsum(counts) / counts.sum(), *_along(stats, table)) * ranges
        share = np.diff(ends, prepend=0.0)
        unit = np.minimum(ends - share / 2, ranges - 0.5).astype(np.int64)
        share /= np.maximum(np.bincount(unit, share, ranges), 1e-12)[unit]
        found = list(zip(unit.tolist(), ranks, share.tolist(), strict=True))
        whole = len(set(unit.tolist())) == ranges
    else:
        steps, per_node = table.embedding_dim // column_step(table), 1 if option.kind == "column_wise" else local
        blocks = {(each.rank // per_node, each.first_column): each.num_columns for each in plan.shards(table)}
        count = {at: max(1, columns // column_step(table)) for at, columns in blocks.items()}
        if option.kind in ("table_column_wise", "table_row_wise"):
            count = {next(iter(count)): steps}
        found = [(0, place, number / steps) for (place, _), number in count.items()]
        whole = sum(count.values()) == steps
    places = [place for _, place, _ in found]
    return found if whole and len(found) <= most and len(set(places)) == len(places) else None


def _no_option(model: CostModel, variants: list[Variant], constraint: Constraint, number: int) -> str:
    top, table = model.topology, model.tables[number]
    budgets = np.array([top.hbm - model.memory_of_rank, top.host, top.disk])
    # Shares of the budgets that the smallest shard of each option takes, with its part of the batches.
    takes = [
        np.vstack([each.everywhere[row, 1:4], (each.fixed + each.slope / each.most[..., None])[row, :, 1:]]).max(0)
        for each in variants
        for row in np.flatnonzero(each.tables == number)
    ]
    why = ""
    if takes:
        least = min(takes, key=max)
        tier, room = ("device memory", "host memory", "disk")[least.argmax()], budgets[least.argmax()]
        size, short = format_bytes(least.max() * room), format_bytes(least.max() * room - room)
        why = f": its smallest shard, and its part of a batch, take {size} of {tier}, short by {short}"
    given = "" if constraint == Constraint() else f" under {constraint}"
    return (
        f"table {table.name!r} cannot be placed{given}: {format_bytes(float(model.sizes[number]))} with its states, "
        f"{table.embedding_dim} columns; for tables there is {model.memory_in_words()}; a node has "
        f"{format_bytes(top.host)} of host memory and {format_bytes(top.disk)} of disk{why}"
    )
