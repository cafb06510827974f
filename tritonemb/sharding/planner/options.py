"""Sharding options of tables: each sharding type on each tier, with the costs of its shards; the problem to solve."""

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
    Shards,
)
from tritonemb.sharding.planner.settings import SETTINGS
from tritonemb.sharding.planner.shard_packing import Problem
from tritonemb.sharding.table_stats import Array, TableStats
from tritonemb.types import Placement, TableConfig
from tritonemb.utils import format_bytes

CACHE_SHARES = (0.0, 0.03, 0.1, 0.3)  # cached on the device, of a shard's rows; at least the prefetched batches' rows
HOST_SHARES = (0.0, 0.1, 0.4, 0.7)  # cached in host memory, of a shard on disk
# A coarse cache of a table larger than this, of all device or host memory, would waste much: it gets finer shares, too.
LARGE = 0.01
FINE_CACHE_SHARES = (0.05, 0.15, 0.2, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8)
FINE_HOST_SHARES = (0.05, 0.15, 0.2, 0.25, 0.3, 0.35, 0.45, 0.5, 0.55, 0.6, 0.65, 0.75, 0.8, 0.85)
CACHE_MARGIN, MAX_MARGIN_SHARDS = 64, 64  # extra cached rows per shard; shards that are counted for them, at most
MAX_ROWS_INT32 = 2.0**31 - 1  # ids of a larger shard are sent as 8 bytes
ROUNDING = 1e-6  # unused share of every budget
ROW_RANGES = (1, 2, 4, 8)  # of a table whose row ranges differ in hotness; other tables are one range


class PlanError(ValueError):
    """The tables do not fit. The text names the budget that is exceeded, by how much, and remedies."""


@dataclass(frozen=True)
class Constraint:
    """Allowed placements and sharding types of a table; all by default.

    Args:
        placements: "device", "host", "disk", "server".
        types: "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid", "data_parallel".

    Raises:
        ValueError: an unknown name, or an empty list.
    """

    placements: Sequence[Placement] | None = None
    types: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, known in (("placements", get_args(Placement)), ("types", tuple(SHARDINGS))):
            values = getattr(self, name)
            if values is not None:
                values = (values,) if isinstance(values, str) else tuple(values)
                object.__setattr__(self, name, values)
                if not values or not set(values) <= set(known):
                    raise ValueError(f"a constraint's {name} must be some of {known}, got {list(values)}")


class Option(NamedTuple):
    """A sharding option: sharding type, tier, and shares of each shard's rows cached on the device and in host memory.

    Its units are ranges of rows between `edges` (shares of all rows), or all columns. Packing splits a unit into
    shards; `num_blocks` is the number of blocks of rows or columns that this makes.
    """

    kind: str
    placement: Placement
    cache_share: float = 0.0
    host_share: float = 0.0
    edges: tuple[float, ...] = (0.0, 1.0)
    num_blocks: int = 1

    def __str__(self) -> str:
        return self.kind.replace("_", "-") + (f" ({self.num_blocks} blocks)" if self.num_blocks > 1 else "")


class TierOption(NamedTuple):
    """A tier and cache shares, for tables of at least `min_bytes`."""

    placement: Placement
    cache_share: float = 0.0
    host_share: float = 0.0
    min_bytes: float = 0.0


class Variant(NamedTuple):
    """One sharding type, number of units and tier, with its costs for all tables that allow it; see `Problem`."""

    tables: Array
    options: list[Option]
    on_node: bool
    replicated: Array  # [tables, 5]
    common: Array  # [tables]
    unit_common: Array  # [tables, units], as those below; no units where the table is on all ranks
    steps: Array
    max_shards: Array
    fixed: Array  # [tables, units, 4]
    slope: Array  # [tables, units, 4]
    pairwise_load: Array


def make_problem(
    model: CostModel,
    constraints: list[Constraint],
    previous: ShardingPlan | None = None,
    reserve: Sequence[float] = (0.0, 0.0, 0.0),
) -> tuple[list[list[Option]], Problem]:
    """Return the Pareto-optimal options of each table, and the problem, with `reserve`d shares of the three budgets."""
    topology = model.topology
    if (short := model.reserved_bytes - topology.hbm) >= 0:
        raise PlanError(
            f"no device memory is left for tables, {model.describe_memory()}: short by {format_bytes(short)}"
        )
    # Tiers, with coarse cache shares for all tables and finer ones for large tables.
    large = LARGE * topology.hbm * model.ranks, LARGE * topology.host * model.nodes
    tiers = [TierOption("device")]
    if topology.host:
        tiers += [TierOption("host", share) for share in CACHE_SHARES]
        tiers += [TierOption("host", share, min_bytes=large[0]) for share in FINE_CACHE_SHARES]
    if topology.disk:
        host_shares = HOST_SHARES if topology.host else HOST_SHARES[:1]
        tiers += [TierOption("disk", share, host_share) for share in CACHE_SHARES[::2] for host_share in host_shares]
        tiers += [TierOption("disk", 0.0, host_share, large[1]) for host_share in FINE_HOST_SHARES if topology.host]
    # Allowed sharding types and tiers: bool [tables] by name.
    types, placements = [rule.types for rule in constraints], [rule.placements for rule in constraints]
    allowed = {name: np.array([names is None or name in names for names in types]) for name in SHARDINGS}
    allowed |= {name: np.array([names is None or name in names for names in placements]) for name in PLACEMENTS}
    # Column-wise sharding is never worse than table-column-wise, which is an option only on request.
    allowed["table_column_wise"] &= np.array([names is not None for names in types])
    if model.ranks == 1:
        allowed["table_wise"][:] = True  # on one rank every type is table-wise
    kinds = [("row_wise", units) for units in ROW_RANGES]
    if model.ranks > 1:
        kinds += [("column_wise", 1), ("data_parallel", 0)]
    if model.nodes > 1 and model.local > 1:
        kinds += [("table_row_wise", 1), ("grid", 1), ("table_column_wise", 1)]
    variants = [_variant(model, allowed, kind, units, tier, reserve) for kind, units in kinds for tier in tiers]
    if topology.servers:
        variants.append(_variant(model, allowed, "server", 0, TierOption("server"), reserve))
    return _assemble(model, [variant for variant in variants if variant is not None], constraints, previous)


def _variant(
    model: CostModel, allowed: Mapping[str, Array], kind: str, units: int, tier: TierOption, reserve: Sequence[float]
) -> Variant | None:
    """Return the costs of all tables with a sharding type on a tier; None if no table allows it."""
    placement, share, host_share, min_bytes = tier
    tables, ranks, local = model.tables, model.ranks, model.local
    skewed = np.array([bool(model.stats[t.name].row_share) and not t.is_dynamic for t in tables])
    num_rows = np.array([rows_to_shard(table) for table in tables])
    columns = np.array([table.embedding_dim // column_step(table) for table in tables])
    # Tables that can have this type, the steps in which a unit is split, and its most shards.
    one_shard = allowed["table_wise"] | allowed["row_wise"] | allowed["column_wise"]
    steps = max_shards = one = np.ones(len(tables), dtype=np.int64)
    if kind == "row_wise":
        mask, steps = one_shard, np.where(allowed[kind] & (skewed <= (units > 1)), num_rows, 1)
        mask = mask & ((units == 1) | (skewed & allowed[kind] & (num_rows >= ranks) & (units <= ranks)))
        max_shards = np.minimum(steps, ranks // units)  # a rank has one shard of a table
    elif kind == "column_wise":
        mask, steps = allowed[kind] & ~model.dynamic & (columns > 1), columns
        max_shards = np.minimum(steps, ranks)
    elif kind == "grid":
        mask = allowed[kind] & ~(model.dynamic | model.unpooled) & (num_rows >= local) & (columns > 1)
        steps, max_shards = columns, np.minimum(columns, model.nodes)
    elif kind == "table_row_wise":
        mask = (allowed[kind] | allowed["grid"] & ~model.dynamic) & ~model.unpooled & (num_rows >= local)
    else:
        mask = one > 0 if kind == "server" else allowed[kind] & ~model.dynamic
    if kind == "table_column_wise":
        mask &= columns >= local
    index = np.flatnonzero(mask & allowed[placement] & (model.sizes >= min_bytes))
    if not len(index):
        return None
    rows, dims = model.rows[index][:, None], model.dims[index][:, None]
    # Shares of a table's ids and rows in each unit; of one rank, if the ranks of a node share the rows.
    edges = np.linspace(0, 1, max(units, 1) + 1) * np.ones((len(index), 1))
    id_share = np.diff(edges)
    for position, table in enumerate(index.tolist() if units > 1 else ()):
        edges[position], id_share[position] = _row_ranges(model.stats[tables[table].name], tables[table], units)
    row_share = np.diff(edges)
    by_node = kind in ("table_row_wise", "grid")
    if by_node:
        id_share, row_share = id_share / local, row_share / local
    # Cached shares, the same for all shards of a table; at least those that the batches in flight need.
    cached = on_host = np.zeros(row_share.shape)
    if placement in ("host", "disk"):
        least = model.min_cached_rows(np.broadcast_to(index[:, None], id_share.shape), id_share, row_share * rows)
        least = (least + CACHE_MARGIN * np.minimum(ranks, MAX_MARGIN_SHARDS)) / np.maximum(row_share * rows, 1)
        cached = np.minimum(np.maximum(share, least), 1).max(1, keepdims=True) * np.ones(id_share.shape)
    if placement == "disk":
        on_host = np.minimum(host_share, 1 - cached)
    scheme = HIERARCHICAL if by_node else REPLICAS if kind in ("data_parallel", "server") else DIRECT
    by_columns, on_node = kind in ("column_wise", "grid"), by_node or kind == "table_column_wise"
    blocks = local if kind == "table_column_wise" else 2 if by_columns else 1  # at least
    budgets = model.budgets * (1 - np.append(reserve, 0) - ROUNDING)

    def costs(part: Array | float, blocks: Any) -> Array:
        """Return load and shares of the budgets, `[tables, units, 5]`, of shards with a part of a unit."""
        width: Any = dims * (part if by_columns else 1)
        if kind == "table_column_wise":
            width = np.ceil(dims / local)
        row_part: Any = 1.0 if by_columns else part
        shard = id_share * row_part, row_share * rows * row_part, width, blocks, scheme, PLACEMENTS.index(placement)
        cached_rows = cached * row_share * rows * row_part, on_host * row_share * rows * row_part
        flat = [np.broadcast_to(values, id_share.shape).ravel() for values in (index[:, None], *shard, *cached_rows)]
        result = model.costs(Shards(*flat))
        uses = result.memory / np.maximum(budgets, 1.0)
        uses[:, [HOST, DISK]] *= local if on_node else 1
        return np.concatenate([result.seconds.sum(1)[:, None], uses], 1).reshape(*id_share.shape, 5)

    # Fixed and proportional costs: a line through the costs of two sizes of a shard.
    replicated, pairwise_load = np.zeros((len(index), 5)), np.zeros((len(index), units))
    if units == 0:
        replicated = costs(1.0, 1)[:, 0]
        replicated[:, 1 + HOST : 1 + SERVER] *= local
        replicated[:, 1 + SERVER] *= ranks
        fixed = slope = np.zeros((len(index), 0, 4))
    else:
        part = np.minimum(1.0, MAX_ROWS_INT32 / rows) / 2  # shards with 2^31 rows are rare
        one_part, two_parts = costs(part, blocks)[..., :4], costs(2 * part, blocks)[..., :4]
        slope = np.maximum((two_parts - one_part) / part[..., None], 0)
        fixed = np.maximum(one_part - slope * part[..., None], 0)
        if by_columns:  # sums over whole rows are exchanged between the ranks with their columns
            pairwise_load = costs(part, 3)[..., 0] - costs(part, 2)[..., 0]
            fixed[..., 0] -= pairwise_load
        if kind == "row_wise":  # continuous shares are rounded to rows
            fixed[..., 1:] += (
                slope[..., 1:] * np.where(steps > SETTINGS.continuous_steps, 1 / steps, 0)[index][:, None, None]
            )
    one_block = [np.full(len(index), value) for value in (1, scheme, PLACEMENTS.index(placement))]
    common = model.common_seconds(index, *one_block)
    if kind == "table_column_wise":
        common = common * local
    options = [
        Option(kind, placement, c, h, tuple(e) if kind == "row_wise" else (0.0, 1.0))
        for c, h, e in zip(cached[:, 0].tolist(), on_host[:, 0].tolist(), edges.tolist(), strict=True)
    ]
    shape = fixed.shape[:2]
    return Variant(
        index, options, on_node, replicated, common * (not by_columns),  # ids are sent to each block of columns
        np.broadcast_to((common * by_columns)[:, None], shape), np.broadcast_to(steps[index][:, None], shape),
        np.broadcast_to(max_shards[index][:, None], shape), fixed, slope, pairwise_load,
    )  # fmt: skip


def _cumulative_weight(stats: TableStats, table: TableConfig) -> tuple[Array, Array]:
    """Return shares of a table's first rows, and their cumulative weight: the mean of their shares of rows and ids."""
    if table.is_dynamic or not stats.row_share:
        return np.array([0.0, 1.0]), np.array([0.0, 1.0])
    rows, ids = np.linspace(0, 1, len(stats.row_share) + 1), np.append(0.0, np.cumsum(stats.row_share))
    return rows, (rows + ids / ids[-1]) / 2


def _row_ranges(stats: TableStats, table: TableConfig, num_ranges: int) -> tuple[Array, Array]:
    """Return the edges of ranges of rows of equal weight, as shares of all rows; and the share of ids in each."""
    rows, weight = _cumulative_weight(stats, table)
    edges = np.interp(np.linspace(0, 1, num_ranges + 1), weight, rows)
    return edges, np.diff(2 * np.linspace(0, 1, num_ranges + 1) - edges)


def _assemble(
    model: CostModel, variants: list[Variant], constraints: list[Constraint], previous: ShardingPlan | None
) -> tuple[list[list[Option]], Problem]:
    """Concatenate the feasible, Pareto-optimal options of all tables to a problem."""
    num_tables = len(model.tables)
    # Each table's row in each variant; -1 if its smallest shard exceeds a budget.
    row_of = np.full((num_tables, len(variants)), -1)
    for number, variant in enumerate(variants):
        fits = (variant.replicated[:, 1:] <= 1).all(1) & (variant.fixed[..., 1:] <= 1).all((1, 2))
        smallest = variant.fixed[..., 1:] + variant.slope[..., 1:] / variant.max_shards[..., None]
        fits &= (smallest <= 1 + 1e-9).all((1, 2))
        row_of[variant.tables[fits], number] = np.flatnonzero(fits)
    if len(empty := np.flatnonzero((row_of < 0).all(1))):
        raise PlanError(_no_option(model, variants, constraints[empty[0]], int(empty[0])))
    selected = _pareto_optimal(variants, row_of)
    options: list[list[Option]] = []
    offsets, entries = [0], list[tuple[int, int]]()  # variant and row of each option
    for number, table in enumerate(model.tables):
        rows = row_of[number]
        if previous is not None:  # options of the running plan stay, with any cache shares
            selected[number] |= [
                rows[n] >= 0 and _matches(previous, table, variant.options[rows[n]])
                for n, variant in enumerate(variants)
            ]
        variants_of_table = np.flatnonzero(selected[number])
        options.append([variants[n].options[rows[n]] for n in variants_of_table])
        entries += [(int(n), int(rows[n])) for n in variants_of_table]
        offsets.append(len(entries))
    num_units = [variants[n].fixed.shape[1] for n, _ in entries]

    def values(name: str, join: Callable[[list[Array]], Array] = np.concatenate) -> Array:
        return join([getattr(variants[n], name)[row] for n, row in entries])

    return options, Problem(
        model.ranks, model.local, np.array(offsets), np.concatenate([[0], np.cumsum(num_units)]),
        values("replicated", np.stack), values("common", np.stack),
        np.repeat(np.repeat(np.arange(num_tables), np.diff(offsets)), num_units), values("unit_common"),
        np.repeat([variants[n].on_node for n, _ in entries], num_units), values("steps").astype(np.int64),
        values("max_shards").astype(np.int64), values("fixed"), values("slope"), values("pairwise_load"),
    )  # fmt: skip


def _pareto_optimal(variants: list[Variant], row_of: Array) -> Array:
    """Return `[tables, variants]`: variants that no other of the same sharding type dominates in all costs."""
    optimal = row_of >= 0
    kinds = [(variant.options[0].kind, variant.fixed.shape[1]) for variant in variants]
    for kind in dict.fromkeys(kinds):
        of_kind = [n for n, variant_kind in enumerate(kinds) if variant_kind == kind]
        size = 5 + 8 * kind[1]
        values = np.full((len(row_of), len(of_kind), size), np.inf)
        for position, n in enumerate(of_kind):
            variant, tables = variants[n], np.flatnonzero(row_of[:, n] >= 0)
            rows = row_of[tables, n]
            costs = variant.replicated[rows], variant.fixed[rows], variant.slope[rows]
            values[tables, position] = np.concatenate(
                [cost.reshape(len(rows), np.prod(cost.shape[1:], dtype=int)) for cost in costs], 1
            )
        no_worse = (values[:, :, None] <= values[:, None] * (1 + 1e-12) + 1e-15).all(3)  # [table, a, b]
        better = (values[:, :, None] < values[:, None] * (1 - 1e-12) - 1e-15).any(3)
        earlier = np.tri(len(of_kind), k=-1, dtype=bool).T  # the first of equal ones is optimal
        optimal[:, of_kind] &= ~(no_worse & (better | earlier) & optimal[:, of_kind][:, :, None]).any(1)
    return optimal


def column_step(table: TableConfig) -> int:
    """Return the granularity of column blocks; the last block also has the remainder."""
    if table.dtype.itemsize < 4:
        return min(COLUMNS_ROUNDED_TOGETHER, table.embedding_dim)
    dim = table.embedding_dim
    return next((step for step in (4, 2) if dim % step == 0 and dim >= 8 * step), 1)


# Types that are the same with one block.
_ON_RANKS, _ON_NODES = ("table_wise", "row_wise", "column_wise"), ("table_row_wise", "grid")
_EQUIVALENT = dict.fromkeys(_ON_RANKS, _ON_RANKS) | dict.fromkeys(_ON_NODES, _ON_NODES)


def with_blocks(option: Option, num_blocks: int, constraint: Constraint) -> Option:
    """Return the option with a number of blocks, and the simplest allowed type for it."""
    names = _EQUIVALENT.get(option.kind, ()) if num_blocks == 1 else ()
    kind = next((name for name in names if constraint.types is None or name in constraint.types), option.kind)
    return option._replace(kind=kind, num_blocks=num_blocks)


def decode(
    table: TableConfig, stats: TableStats, option: Option, rule: Constraint, units: Array, shares: Array
) -> tuple[Sharding, Option]:
    """Convert a table's shards, `[ranks]` by bin, to a plan's `Sharding`; and the option with their number."""
    bins = np.flatnonzero(units >= 0)
    units, shares = units[bins], shares[bins]
    kinds: dict[str, Any] = {**SHARDINGS, "server": SHARDINGS["data_parallel"]}
    if len(bins) <= 1:
        single, targets = with_blocks(option, 1, rule), bins.tolist()
        takes_list = single.kind in ("row_wise", "column_wise", "grid")
        return kinds[single.kind](targets) if takes_list else kinds[single.kind](*targets), single
    order = np.lexsort((bins, units))
    targets, shares, units = bins[order].tolist(), shares[order], units[order]
    if option.kind == "row_wise":
        # Rows by cumulative weight: ranges of rows are units, in which shares are of equal weight.
        rows = rows_to_shard(table)
        first, last = np.searchsorted(units, units), np.append(units[1:] != units[:-1], True)
        end_in_unit = np.cumsum(shares) - np.append(0.0, np.cumsum(shares))[first]
        ends = (units + np.where(last, 1.0, np.minimum(end_in_unit, 1.0))) / (len(option.edges) - 1)
        ends = np.round(np.interp(ends, *_cumulative_weight(stats, table)[::-1]) * rows).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        nonempty = np.flatnonzero(counts)
        targets, counts = [targets[n] for n in nonempty], counts[nonempty].tolist()
        even = -(-rows // len(targets))
        is_even = counts == [min(even, rows - even * n) for n in range(len(targets))]
        return RowWise(targets, None if is_even else counts), option._replace(num_blocks=len(targets))
    step = column_step(table)
    widths = (np.round(shares * (table.embedding_dim // step)).astype(np.int64) * step).tolist()
    widths[-1] += table.embedding_dim - sum(widths)
    return kinds[option.kind](targets, widths), option._replace(num_blocks=len(targets))


# Option types that become these types of a plan.
_SOURCE_KINDS = {"table_wise": ("row_wise", "column_wise"), "table_row_wise": ("table_row_wise", "grid")}


def _matches(plan: ShardingPlan, table: TableConfig, option: Option) -> bool:
    """Return whether a plan's sharding and tier of a table are those of an option, with any shards and cache."""
    if (sharding := plan.tables.get(table.name)) is None:
        return False
    kind = next(name for name, sharding_type in SHARDINGS.items() if sharding_type is type(sharding))
    return option.kind in _SOURCE_KINDS.get(kind, (kind,)) and plan.placement(table.name).placement == option.placement


def encode(
    plan: ShardingPlan, table: TableConfig, stats: TableStats, option: Option, max_shards: int, local: int
) -> list[tuple[int, int, float]] | None:
    """Convert a plan's shards of a table to units, bins and shares of an option; None if that has no such shards."""
    by_node = option.kind in ("table_row_wise", "table_column_wise", "grid")
    if not _matches(plan, table, option) or (by_node and plan.local_world_size != local):
        return None
    if option.kind == "data_parallel":
        return []
    shards, sharding = list[tuple[int, int, float]](), plan.tables[table.name]
    if option.kind == "row_wise":
        num_ranges = len(option.edges) - 1
        if isinstance(sharding, RowWise) and sharding.rows is not None:  # perhaps for fewer rows than the table has now
            ranks, counts = list(sharding.targets or range(plan.world_size)), np.array(sharding.rows, dtype=np.float64)
        else:
            plan_shards = plan.shards(table)
            ranks = [shard.rank for shard in plan_shards]
            counts = np.array([shard.num_rows for shard in plan_shards], dtype=np.float64)
        ends = np.interp(np.cumsum(counts) / counts.sum(), *_cumulative_weight(stats, table)) * num_ranges
        share = np.diff(ends, prepend=0.0)
        unit = np.minimum(ends - share / 2, num_ranges - 0.5).astype(np.int64)
        share /= np.maximum(np.bincount(unit, share, num_ranges), 1e-12)[unit]
        shards = list(zip(unit.tolist(), ranks, share.tolist(), strict=True))
        complete = len(set(unit.tolist())) == num_ranges
    else:
        steps, per_node = table.embedding_dim // column_step(table), 1 if option.kind == "column_wise" else local
        blocks = {(shard.rank // per_node, shard.first_column): shard.num_columns for shard in plan.shards(table)}
        count = {block: max(1, columns // column_step(table)) for block, columns in blocks.items()}
        if option.kind in ("table_column_wise", "table_row_wise"):
            count = {next(iter(count)): steps}
        shards = [(0, bin_index, number / steps) for (bin_index, _), number in count.items()]
        complete = sum(count.values()) == steps
    bins = [bin_index for _, bin_index, _ in shards]
    return shards if complete and len(shards) <= max_shards and len(set(bins)) == len(bins) else None


def _no_option(model: CostModel, variants: list[Variant], constraint: Constraint, number: int) -> str:
    """Describe why no option of a table fits."""
    top, table, budgets = model.topology, model.tables[number], model.budgets
    # Shares of the budgets that the smallest shard of each option uses, with its part of the batches.
    uses = [
        np.vstack([v.replicated[row, 1:4], (v.fixed + v.slope / v.max_shards[..., None])[row, :, 1:]]).max(0)
        for v in variants
        for row in np.flatnonzero(v.tables == number)
    ]
    reason = ""
    if uses:
        least = min(uses, key=max)
        tier, budget = ("device memory", "host memory", "disk")[least.argmax()], budgets[least.argmax()]
        size, short = format_bytes(least.max() * budget), format_bytes(least.max() * budget - budget)
        reason = f": its smallest shard, with its part of a batch, needs {size} of {tier}, short by {short}"
    under = "" if constraint == Constraint() else f" under {constraint}"
    return (
        f"table {table.name!r} cannot be placed{under}: {format_bytes(float(model.sizes[number]))} with optimizer "
        f"states, {table.embedding_dim} columns; memory for tables is {model.describe_memory()}; a node has "
        f"{format_bytes(top.host)} of host memory and {format_bytes(top.disk)} of disk{reason}"
    )
