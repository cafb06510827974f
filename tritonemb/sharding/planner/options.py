"""Sharding options of tables: each sharding type on each tier, with the costs of its shards; the problem to solve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast, get_args

import numpy as np
import torch

from tritonemb.layout import rows_to_shard
from tritonemb.sharding.plan import SHARDINGS, RowWise, Sharding, ShardingPlan, TableWise, column_step
from tritonemb.sharding.planner import cost_model
from tritonemb.sharding.planner.cost_model import PLACEMENTS, CostModel, Shards
from tritonemb.sharding.planner.settings import SETTINGS
from tritonemb.sharding.planner.shard_packing import Problem
from tritonemb.sharding.planner.statistics import Array, TableStats
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
Tier = tuple[Placement, float, float, float]  # with an option's two cached shares, and the least bytes of its tables


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
                vars(self)[name] = values = (values,) if isinstance(values, str) else tuple(values)
                if not values or not set(values) <= set(known):
                    raise ValueError(f"a constraint's {name} must be some of {known}, got {list(values)}")


class Option(NamedTuple):
    """A sharding option: sharding type, tier, and shares of each shard's rows cached on the device and in host memory.

    Its units are `num_units` ranges of rows, or all columns. Packing splits a unit into shards; `num_blocks` is the
    number of blocks of rows or columns that this makes.
    """

    kind: str
    placement: Placement
    cache_share: float = 0.0
    host_share: float = 0.0
    num_units: int = 1
    num_blocks: int = 1

    def __str__(self) -> str:
        return self.kind.replace("_", "-") + (f" ({self.num_blocks} blocks)" if self.num_blocks > 1 else "")

    @classmethod
    def of(cls, plan: ShardingPlan, table: TableConfig) -> Self:
        """Return the option that a plan has chosen for a table."""
        sharding, tier = plan.tables[table.name], plan.placement(table.name)
        blocks = {(shard.first_column, shard.first_row * (not sharding.on_nodes)) for shard in plan.shards(table)}
        kind, caches = sharding.kind, (tier.cache_share or 0.0, tier.host_share or 0.0)
        if tier.placement == "server":
            kind, blocks = "server", set()
        return cls(kind, tier.placement, *caches, num_blocks=max(1, len(blocks)))


class Kind(NamedTuple):
    """A sharding type, as the search splits tables: into units, and these into shards in bins, i.e. ranks or nodes."""

    name: str
    units: int = 1  # ranges of rows; 0: every rank has the table
    by_columns: bool = False  # a unit is split into blocks of columns, else of rows
    on_node: bool = False  # bins are nodes
    scheme: int = cost_model.DIRECT

    def splits(self, model: CostModel, allowed: Mapping[str, Array]) -> tuple[Array, Array, Array]:
        """Return which tables can have this type, the steps in which a unit is split, and its most shards: `[T]`."""
        tables, one = model.tables, np.ones(len(model.tables), dtype=np.int64)
        columns = np.array([table.embedding_dim // block_step(table) for table in tables])
        rows = np.array([rows_to_shard(table) for table in tables])
        skewed = np.array([bool(model.stats[table.name].row_share) and not table.is_dynamic for table in tables])
        mask, steps, max_shards = allowed.get(self.name, one > 0) & ~model.dynamic, one, one
        if self.name == "row_wise":  # one shard may also be called table-wise or column-wise
            mask = allowed["table_wise"] | allowed["row_wise"] | allowed["column_wise"]
            splittable = allowed["row_wise"] & (~skewed if self.units == 1 else skewed)
            if self.units > 1:
                mask = mask & splittable & (rows >= model.ranks) & (self.units <= model.ranks)
            steps = np.where(splittable, rows, 1)
            max_shards = np.minimum(steps, model.ranks // self.units)  # a rank has one shard of a table
        elif self.by_columns:
            mask, steps = mask & (columns > 1), columns
            max_shards = np.minimum(columns, model.nodes if self.on_node else model.ranks)
        elif self.name == "table_row_wise":  # grid sharding with one shard
            mask = allowed[self.name] | allowed["grid"] & ~model.dynamic
        elif self.name == "table_column_wise":
            mask = mask & (columns >= model.local)
        elif self.name == "server":
            mask = one > 0
        if self.scheme == cost_model.HIERARCHICAL:
            mask = mask & ~model.unpooled & (rows >= model.local)
        return mask, steps, max_shards


# Records of options and their units, with the names of an `Option` and of `Problem`.
OPTION: Any = np.dtype([
    ("table", int), ("kind", "U20"), ("placement", int), ("cache_share", float), ("host_share", float),
    ("num_units", int), ("scheme", int), ("option_replicated", float, 5), ("option_common", float),
])  # fmt: skip
UNIT: Any = np.dtype([
    ("unit_table", int), ("unit_common", float), ("unit_on_node", bool), ("unit_steps", int),
    ("unit_max_shards", int), ("fixed", float, 4), ("slope", float, 4), ("pairwise_load", float),
])  # fmt: skip


class KindOptions(NamedTuple):
    """Options of a sharding type: all tables that allow it, on their tiers; and the units of each."""

    options: Array  # [O] of OPTION
    units: Array  # [O, units] of UNIT

    @property
    def smallest(self) -> Any:
        """Shares of the three budgets that the smallest shard needs, `[O, 3]`."""
        fixed, slope = self.units["fixed"], self.units["slope"]
        shards = fixed + slope / self.units["unit_max_shards"][..., None]
        replicated = self.options["option_replicated"][:, None, 1:4]
        return np.concatenate([replicated, fixed[..., 1:], shards[..., 1:] - 1e-9], 1).max(1)

    def subset(self, selected: Array) -> Self:
        return type(self)(self.options[selected], self.units[selected])


def make_problem(
    model: CostModel, constraints: list[Constraint], reserve: Sequence[float] = (0.0, 0.0, 0.0)
) -> tuple[list[Option], Problem]:
    """Return the Pareto-optimal options of all tables, and the problem, with `reserve`d shares of the three budgets."""
    topology = model.topology
    if (short := model.reserved_bytes - model.rank_hbm.min()) >= 0:
        raise PlanError(
            f"no device memory is left for tables, {model.describe_memory()}: short by {format_bytes(short)}"
        )
    # Tiers, with coarse cache shares for all tables and finer ones for large tables.
    large = LARGE * topology.hbm * model.ranks, LARGE * topology.host * model.nodes
    tiers: list[Tier] = [("device", 0, 0, 0)]
    if topology.host:
        tiers += [("host", share, 0, 0) for share in CACHE_SHARES]
        tiers += [("host", share, 0, large[0]) for share in FINE_CACHE_SHARES]
    if topology.disk:
        host_shares = HOST_SHARES if topology.host else HOST_SHARES[:1]
        tiers += [("disk", share, host_share, 0) for share in CACHE_SHARES[::2] for host_share in host_shares]
        tiers += [("disk", 0, host_share, large[1]) for host_share in FINE_HOST_SHARES if topology.host]
    # Allowed sharding types and tiers: bool [tables] by name.
    types, placements = [rule.types for rule in constraints], [rule.placements for rule in constraints]
    allowed = {name: np.array([names is None or name in names for names in types]) for name in SHARDINGS}
    allowed |= {name: np.array([names is None or name in names for names in placements]) for name in PLACEMENTS}
    for name in ("device", "server"):
        allowed[name] &= [table.dtype != torch.int8 for table in model.tables]
    # Column-wise sharding is never worse than table-column-wise, which is an option only on request.
    allowed["table_column_wise"] &= np.array([names is not None for names in types])
    if model.ranks == 1:
        allowed["table_wise"][:] = True  # on one rank every type is table-wise
    kinds = [Kind("row_wise", units) for units in ROW_RANGES]
    if model.ranks > 1:
        kinds += [Kind("column_wise", by_columns=True), Kind("data_parallel", 0, scheme=cost_model.REPLICAS)]
    if model.nodes > 1 and model.local > 1:
        kinds += [
            Kind("table_row_wise", on_node=True, scheme=cost_model.HIERARCHICAL),
            Kind("grid", by_columns=True, on_node=True, scheme=cost_model.HIERARCHICAL),
            Kind("table_column_wise", on_node=True),
        ]
    budgets = model.budgets * (1 - np.append(reserve, 0) - ROUNDING)
    options = [_options_of_kind(model, kind, allowed, tiers, budgets) for kind in kinds]
    if topology.servers:
        kind = Kind("server", 0, scheme=cost_model.SERVERS)
        options.append(_options_of_kind(model, kind, allowed, [("server", 0, 0, 0)], budgets))
    return _assemble(model, options, constraints, (model.rank_hbm.max() - model.rank_hbm) / budgets[0])


def _options_of_kind(
    model: CostModel, kind: Kind, allowed: Mapping[str, Array], tiers: Sequence[Tier], budgets: Array
) -> KindOptions:
    """Return the options of all tables with a sharding type: a line through the costs of two sizes of a shard."""
    mask, steps, max_shards = kind.splits(model, allowed)
    on_tiers = np.stack([allowed[name] & (model.sizes >= min_bytes) for name, _, _, min_bytes in tiers], 1)
    table, tier_index = np.nonzero(mask[:, None] & on_tiers)
    tier = np.array([(PLACEMENTS.index(name), *shares[:2]) for name, *shares in tiers], dtype=np.float64)[tier_index]
    placement, ranks, local = tier[:, 0].astype(np.int64), model.ranks, model.local
    # Shares of a table's ids and rows in each unit; of one rank, if the ranks of a node share the rows.
    weights = np.linspace(0, 1, max(kind.units, 1) + 1)
    edges = np.tile(weights, (len(model.tables), 1))
    for number in np.flatnonzero(mask).tolist() if kind.units > 1 else ():
        rows, weight = _cumulative_weight(model.stats[model.tables[number].name], model.tables[number])
        edges[number] = np.interp(weights, weight, rows)
    # Ranges have equal weights, which are the means of their shares of rows and ids.
    share_factor = 1 / local if kind.scheme == cost_model.HIERARCHICAL else 1.0
    row_share, id_share = (np.diff(shares)[table] * share_factor for shares in (edges, 2 * weights - edges))
    rows, dims = row_share * model.rows[table][:, None], model.dims[table][:, None]
    # Cached shares, the same for all shards of a table; at least those that the batches in flight need.
    least = model.min_cached_rows(np.broadcast_to(table[:, None], rows.shape), id_share, rows)
    least = (least + CACHE_MARGIN * min(ranks, MAX_MARGIN_SHARDS)) / np.maximum(rows, 1)
    is_cached, on_disk = (placement == cost_model.HOST) | (placement == cost_model.DISK), placement == cost_model.DISK
    cached = np.where(is_cached, np.minimum(np.maximum(tier[:, 1:2], least), 1).max(1), 0)
    on_host = np.where(on_disk, np.minimum(tier[:, 2], 1 - cached), 0)
    table_column_wise = kind.name == "table_column_wise"
    blocks = local if table_column_wise else 2 if kind.by_columns else 1  # at least

    def costs(part: Array | float, blocks: int) -> Array:
        """Return load and shares of the budgets, `[O, units, 5]`, of shards with a part of a unit."""
        width: Any = dims * part if kind.by_columns else np.ceil(dims / local) if table_column_wise else dims
        row_part: Any = 1.0 if kind.by_columns else part
        shard_rows = rows * row_part
        shards = (
            table[:, None], id_share * row_part, shard_rows, width, blocks, kind.scheme, placement[:, None],
            cached[:, None] * shard_rows, on_host[:, None] * shard_rows,
        )  # fmt: skip
        seconds, memory = model.costs(Shards(*(np.broadcast_to(values, rows.shape).ravel() for values in shards)))
        uses = memory / np.maximum(budgets, 1.0)
        uses[:, [cost_model.HOST, cost_model.DISK]] *= local if kind.on_node else 1
        return np.concatenate([seconds.sum(1)[:, None], uses], 1).reshape(*rows.shape, 5)

    options, units = np.zeros(len(table), OPTION), np.zeros((len(table), kind.units), UNIT)
    options["table"], options["kind"], options["num_units"] = table, kind.name, kind.units
    options["placement"], options["scheme"] = placement, kind.scheme
    options["cache_share"], options["host_share"] = cached, on_host
    units["unit_table"], units["unit_on_node"] = table[:, None], kind.on_node
    units["unit_steps"], units["unit_max_shards"] = steps[table][:, None], max_shards[table][:, None]
    if kind.units == 0:
        options["option_replicated"] = costs(1.0, 1)[:, 0] * [1, 1, local, local, ranks]
    else:
        part = np.minimum(1.0, MAX_ROWS_INT32 / model.rows[table])[:, None] / 2  # shards with 2^31 rows are rare
        one_part, two_parts = costs(part, blocks)[..., :4], costs(2 * part, blocks)[..., :4]
        units["slope"] = np.maximum((two_parts - one_part) / part[..., None], 0)
        units["fixed"] = np.maximum(one_part - units["slope"] * part[..., None], 0)
        if kind.by_columns:  # sums over whole rows are exchanged between the ranks with their columns
            units["pairwise_load"] = costs(part, 3)[..., 0] - costs(part, 2)[..., 0]
            units["fixed"][..., 0] -= units["pairwise_load"]
        if kind.name == "row_wise":  # continuous shares are rounded to rows
            rounding = np.where(steps > SETTINGS.continuous_steps, 1 / steps, 0)[table]
            units["fixed"][..., 1:] += units["slope"][..., 1:] * rounding[:, None, None]
    common = model.common_seconds(table, 1, kind.scheme) * (local if table_column_wise else 1)
    unit_common = common * kind.by_columns  # ids are sent to each block of columns
    options["option_common"], units["unit_common"] = common - unit_common, unit_common[:, None]
    return KindOptions(options, units)


def _cumulative_weight(stats: TableStats, table: TableConfig) -> tuple[Array, Array]:
    """Return shares of a table's first rows, and their cumulative weight: the mean of their shares of rows and ids."""
    if table.is_dynamic or not stats.row_share:
        return np.array([0.0, 1.0]), np.array([0.0, 1.0])
    rows, ids = np.linspace(0, 1, len(stats.row_share) + 1), np.append(0.0, np.cumsum(stats.row_share))
    return rows, (rows + ids / ids[-1]) / 2


def _assemble(
    model: CostModel, kinds: list[KindOptions], constraints: list[Constraint], less_memory: Array
) -> tuple[list[Option], Problem]:
    """Sort the feasible, Pareto-optimal options of all tables by table, and concatenate them to a problem."""
    feasible = (kind.subset((kind.smallest <= 1).all(1)) for kind in kinds)
    optimal = [kind.subset(_pareto_optimal(kind)) for kind in feasible]
    options, units = (np.concatenate(records) for records in zip(*((o, u.ravel()) for o, u in optimal), strict=True))
    options = options[np.argsort(options["table"], kind="stable")]
    units = units[np.argsort(units["unit_table"], kind="stable")]
    offsets = np.searchsorted(options["table"], np.arange(len(model.tables) + 1))
    if len(empty := np.flatnonzero(np.diff(offsets) == 0)):
        raise PlanError(_no_option(model, kinds, constraints[empty[0]], int(empty[0])))
    members = options[["kind", "placement", "cache_share", "host_share", "num_units"]].tolist()
    choices = [Option(kind, PLACEMENTS[tier], *values) for kind, tier, *values in members]
    arrays = {name: options[name] for name in OPTION.names} | {name: units[name] for name in UNIT.names}
    waits = model.waits(options["scheme"], options["placement"])
    problem = Problem(
        model.ranks, model.local, model.rank_speed, np.stack([np.zeros(model.ranks), less_memory]), offsets,
        np.append(0, np.cumsum(options["num_units"])), option_waits=waits, latencies=model.latencies,
        waits=np.ones(waits.shape[1], dtype=bool),
        **{name: np.ascontiguousarray(values) for name, values in arrays.items() if name in Problem._fields},
    )  # fmt: skip
    return choices, problem


def _pareto_optimal(kind: KindOptions) -> Array:
    """Return which options `[O]` no other of the same table dominates in all costs."""
    _, first, position = np.unique(kind.options["table"], return_index=True, return_inverse=True)
    number = np.arange(len(position)) - first[position]  # of the option in its table
    units = [kind.units[name].reshape(len(position), 4 * kind.units.shape[1]) for name in ("fixed", "slope")]
    costs = np.concatenate([kind.options["option_replicated"], *units], 1)
    values = np.full((len(first), number.max(initial=-1) + 1, costs.shape[1]), np.inf)
    values[position, number] = costs
    no_worse = (values[:, :, None] <= values[:, None] * (1 + 1e-12) + 1e-15).all(3)  # [table, a, b]
    better = (values[:, :, None] < values[:, None] * (1 - 1e-12) - 1e-15).any(3)
    earlier = np.tri(values.shape[1], k=-1, dtype=bool).T  # the first of equal ones is optimal
    optimal: Any = ~(no_worse & (better | earlier)).any(1)
    return optimal[position, number]


def block_step(table: TableConfig) -> int:
    """Return the granularity of column blocks; the last block also has the remainder."""
    dim, step = table.embedding_dim, column_step(table)
    return min(step, dim) if step > 1 else next((n for n in (4, 2) if dim % n == 0 and dim >= 8 * n), 1)


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
) -> Sharding:
    """Convert a table's shards, `[ranks]` by bin, to a plan's `Sharding`."""
    if option.kind == "server":  # ranks lease the rows of their shards
        return RowWise() if rows_to_shard(table) >= len(units) > 1 else TableWise(0)
    bins, kinds = np.flatnonzero(units >= 0), cast(Any, SHARDINGS)
    units, shares = units[bins], shares[bins]
    if len(bins) <= 1:
        kind, targets = with_blocks(option, 1, rule).kind, bins.tolist()
        return kinds[kind](targets) if kind in ("row_wise", "column_wise", "grid") else kinds[kind](*targets)
    order = np.lexsort((bins, units))
    targets, shares, units = bins[order].tolist(), shares[order], units[order]
    if option.kind == "row_wise":
        # Rows by cumulative weight: ranges of rows are units, in which shares are of equal weight.
        rows = rows_to_shard(table)
        first, last = np.searchsorted(units, units), np.append(units[1:] != units[:-1], True)
        end_in_unit = np.cumsum(shares) - np.append(0.0, np.cumsum(shares))[first]
        ends = (units + np.where(last, 1.0, np.minimum(end_in_unit, 1.0))) / option.num_units
        ends = np.round(np.interp(ends, *_cumulative_weight(stats, table)[::-1]) * rows).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        nonempty = np.flatnonzero(counts)
        targets, counts = [targets[n] for n in nonempty], counts[nonempty].tolist()
        even = -(-rows // len(targets))
        is_even = counts == [min(even, rows - even * n) for n in range(len(targets))]
        return RowWise(targets, None if is_even else counts)
    step = block_step(table)
    widths = (np.round(shares * (table.embedding_dim // step)).astype(np.int64) * step).tolist()
    widths[-1] += table.embedding_dim - sum(widths)
    return kinds[option.kind](targets, widths)


def _no_option(model: CostModel, kinds: list[KindOptions], constraint: Constraint, number: int) -> str:
    """Describe why no option of a table fits: what the smallest shard of each needs, with its part of the batches."""
    top, table, budgets, reason = model.topology, model.tables[number], model.budgets, ""
    uses = np.concatenate([kind.smallest[kind.options["table"] == number] for kind in kinds])
    if len(uses):
        least = uses[uses.max(1).argmin()]
        tier, budget = ("device memory", "host memory", "disk")[least.argmax()], budgets[least.argmax()]
        size, short = format_bytes(least.max() * budget), format_bytes(least.max() * budget - budget)
        reason = f": its smallest shard, with its part of a batch, needs {size} of {tier}, short by {short}"
    under = "" if constraint == Constraint() else f" under {constraint}"
    return (
        f"table {table.name!r} cannot be placed{under}: {format_bytes(float(model.sizes[number]))} with optimizer "
        f"states, {table.embedding_dim} columns; memory for tables is {model.describe_memory()}; a node has "
        f"{format_bytes(top.host)} of host memory and {format_bytes(top.disk)} of disk{reason}"
    )
