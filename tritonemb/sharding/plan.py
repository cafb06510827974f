"""Sharding plans: plain data, which assigns the rows and columns of each table to ranks; may be written by hand."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self, get_args

from tritonemb.layout import rows_to_shard
from tritonemb.optimizers import Custom
from tritonemb.types import Placement, TableConfig, checked_size
from tritonemb.utils import JsonFile, format_bytes

Ranks = Sequence[int]
SMALL_TABLE = 64 * 1024  # bytes of weights, up to which a replicated update costs less than the output exchange
COLUMNS_ROUNDED_TOGETHER = 8  # in a 16-bit row: stochastic rounding uses one random counter for them
MAX_TABLES_SHOWN = 40  # in a report or diff: the tables that cost or move most


@dataclass(frozen=True)
class Shard:
    """Rows and columns of a table, and the rank that owns them."""

    rank: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int


@dataclass(frozen=True)
class Sharding:
    """Sharding of a table: base of the classes below. Ranks are numbered from 0 to the plan's world size."""

    kind: ClassVar[str]
    on_nodes: ClassVar[bool] = False  # `targets` are nodes
    reduces_in_node: ClassVar[bool] = False  # each column block is sharded by rows over the ranks of a node
    is_replicated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # lists become tuples, so that equal shardings compare equal
            if name in ("ranks", "nodes", "columns", "rows") and value is not None:
                object.__setattr__(self, name, tuple(value))

    @property
    def targets(self) -> Sequence[int] | None:
        """Ranks or nodes of the sharding; None for all."""
        single = [vars(self)[name] for name in ("rank", "node") if name in vars(self)]
        return single or vars(self).get("ranks", vars(self).get("nodes"))

    def shards(self, table: TableConfig, world_size: int, local_world_size: int) -> list[Shard]:
        """Return the shards of a table, by column block, then by row; they cover the table exactly once.

        Raises:
            ValueError: naming the table, for ranks, nodes, columns or rows out of range.
        """
        title, rows = f"table {table.name!r}", rows_to_shard(table)
        if self.is_replicated:
            if table.is_dynamic:
                raise ValueError(f"{title} is dynamic, so it must be row-wise sharded, not replicated")
            return [Shard(rank, 0, rows, 0, table.embedding_dim) for rank in range(world_size)]
        owners, shards = _owners(self, table, title, world_size, local_world_size), []
        if table.is_dynamic and (len(owners) > 1 or table.capacity is None):
            raise ValueError(f"{title} is dynamic, so it must be row-wise sharded, with a capacity in rows")
        for ranks, (first_column, width) in zip(owners, _column_blocks(self, table, title, len(owners)), strict=True):
            for rank, (first, size) in zip(ranks, _row_blocks(self, table, title, rows, len(ranks)), strict=False):
                shards.append(Shard(rank, first, size, first_column, width))
        return shards


@dataclass(frozen=True)
class TableWise(Sharding):
    """Table-wise sharding: the full table on one rank."""

    kind = "table_wise"

    rank: int


@dataclass(frozen=True)
class RowWise(Sharding):
    """Row-wise sharding: a block of rows on each of `ranks`, or of all ranks.

    `rows` are the numbers of rows per rank (of a dynamic table: partitions), in the order of `ranks`; by default
    ceil(rows / ranks), and fewer on the last ranks.
    """

    kind = "row_wise"

    ranks: Ranks | None = None
    rows: Sequence[int] | None = None


@dataclass(frozen=True)
class ColumnWise(Sharding):
    """Column-wise sharding: a block of columns on each of `ranks`, or of all ranks; a rank may have several blocks.

    `columns` are the widths of the blocks; by default as equal as multiples of 8 allow (any widths if columns are few).
    """

    kind = "column_wise"

    ranks: Ranks | None = None
    columns: Sequence[int] | None = None


@dataclass(frozen=True)
class TableRowWise(Sharding):
    """Table-row-wise sharding: rows over the ranks of one node, which reduces partial sums before it sends them."""

    kind = "table_row_wise"
    on_nodes, reduces_in_node = True, True

    node: int


@dataclass(frozen=True)
class TableColumnWise(Sharding):
    """Table-column-wise sharding: columns over the ranks of one node; `columns` as in `ColumnWise`."""

    kind = "table_column_wise"
    on_nodes = True

    node: int
    columns: Sequence[int] | None = None


@dataclass(frozen=True)
class Grid(Sharding):
    """Grid sharding: columns over nodes, and each block by rows over its node's ranks; `columns` as in `ColumnWise`."""

    kind = "grid"
    on_nodes, reduces_in_node = True, True

    nodes: Ranks | None = None
    columns: Sequence[int] | None = None


@dataclass(frozen=True)
class DataParallel(Sharding):
    """Replicated table: every rank has all rows, gathers the gradients of all ranks, and applies the same update."""

    kind = "data_parallel"
    is_replicated = True


SHARDINGS: dict[str, type[Sharding]] = {sharding.kind: sharding for sharding in Sharding.__subclasses__()}


def _owners(sharding: Sharding, table: TableConfig, title: str, ranks: int, local: int) -> Sequence[Sequence[int]]:
    """Ranks of each column block, over which its rows are sharded."""
    by_node, row_wise = sharding.on_nodes, isinstance(sharding, RowWise)
    unit, limit = ("node", ranks // local) if by_node else ("rank", ranks)
    targets = sharding.targets
    if targets is None:
        targets = range(limit if row_wise else min(limit, max_column_blocks(table)))
    if not targets:
        raise ValueError(f"{title}: {sharding} needs at least one {unit}")
    for value in targets:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{title}: a {unit} must be an int, got {value!r} in {sharding}")
        if not 0 <= value < limit:
            raise ValueError(f"{title}: {unit} {value} of {sharding} is not one of the plan's {limit}")
    if row_wise and len(set(targets)) != len(targets):
        raise ValueError(f"{title}: {sharding} names a rank twice")
    owners = [range(target * local, (target + 1) * local) if by_node else [target] for target in targets]
    if isinstance(sharding, TableColumnWise):
        blocks = min(local, max_column_blocks(table)) if sharding.columns is None else len(sharding.columns)
        return [[owners[0][block % local]] for block in range(blocks)]
    return [targets] if row_wise else owners


def _column_blocks(sharding: Sharding, table: TableConfig, title: str, blocks: int) -> list[tuple[int, int]]:
    """First column and width of each block."""
    dim, widths = table.embedding_dim, getattr(sharding, "columns", None)
    if widths is None:
        if blocks > max_column_blocks(table):
            raise ValueError(f"{title}: {sharding} splits {dim} columns of {table.dtype} into {blocks} blocks")
        step = 8 if dim >= 8 * blocks else 1
        edges = [dim // step * block // blocks * step for block in range(blocks)] + [dim]
        return [(first, stop - first) for first, stop in pairwise(edges)]
    if not _is_partition(widths, blocks, dim):
        raise ValueError(f"{title}: the columns of {sharding} must be {blocks} positive widths that add up to {dim}")
    firsts = [sum(widths[:block]) for block in range(blocks)]
    if any(first % column_step(table) for first in firsts):
        raise ValueError(
            f"{title}: blocks of {sharding} begin at columns {firsts}; those of a {table.dtype} table must begin at "
            f"multiples of {column_step(table)}"
        )
    return list(zip(firsts, widths, strict=True))


def _row_blocks(sharding: Sharding, table: TableConfig, title: str, rows: int, blocks: int) -> list[tuple[int, int]]:
    """First row and number of rows of each block; fewer blocks if rows do not suffice."""
    sizes = getattr(sharding, "rows", None)
    if sizes is None:
        size = -(-rows // blocks)
        return [(first, min(size, rows - first)) for first in range(0, rows, size)]
    if not _is_partition(sizes, blocks, rows):
        unit = "partitions" if table.is_dynamic else "rows"
        raise ValueError(
            f"{title}: the rows of {sharding} must be {blocks} positive sizes that add up to {rows} {unit}"
        )
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def _is_partition(sizes: Sequence[int], blocks: int, total: int) -> bool:
    return len(sizes) == blocks and all(isinstance(n, int) and n > 0 for n in sizes) and sum(sizes) == total


def column_step(table: TableConfig) -> int:  # multiple at which a column block may begin; a row of int8 has one scale
    step = table.embedding_dim if table.row_dtype != table.dtype else COLUMNS_ROUNDED_TOGETHER
    return 1 if table.dtype.itemsize == 4 else step


def max_column_blocks(table: TableConfig) -> int:
    """Largest number of column blocks of a table."""
    return max(1, table.embedding_dim // column_step(table))


@dataclass(frozen=True)
class TablePlacement:
    """Memory tier of a table, and the rows that each rank caches of a table that is not on the device.

    Args:
        placement: "device", "host", "disk" or "server".
        cache_rows: rows cached on the device by each rank with a shard.
        host_rows: rows of a table on disk that are cached in host memory, too.
        cache_share: share of each shard's rows, in (0, 1], in place of `cache_rows`; the table's `CacheConfig` applies
            if neither is set.
        host_share: share of each shard's rows, in (0, 1], in place of `host_rows`.

    Raises:
        ValueError: for an unknown placement, or cached rows on a tier without such a cache.
    """

    placement: Placement = "device"
    cache_rows: int | None = None
    host_rows: int | None = None
    cache_share: float | None = None
    host_share: float | None = None

    def __post_init__(self) -> None:
        if self.placement not in get_args(Placement):
            raise ValueError(f"a placement must be one of {get_args(Placement)}, got {self.placement!r}")
        for name, tiers in (("cache", ("host", "disk", "server")), ("host", ("disk",))):
            rows, share, is_cached = vars(self)[f"{name}_rows"], vars(self)[f"{name}_share"], self.placement in tiers
            if rows is not None and (not isinstance(rows, int) or rows < 1 or not is_cached):
                raise ValueError(
                    f"{name}_rows must be an int of at least 1, for a placement in {tiers}, got {rows!r} and "
                    f"{self.placement!r}"
                )
            is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if share is not None and not (is_number and 0 < share <= 1 and is_cached):
                raise ValueError(
                    f"{name}_share must be a number in (0, 1], for a placement in {tiers}, got {share!r} and "
                    f"{self.placement!r}"
                )
            if rows is not None and share is not None:
                raise ValueError(f"a table has {name}_rows or {name}_share, got {rows} and {share}")


@dataclass(frozen=True)
class PlanDiff:
    """Difference of two plans: moved bytes of rows and states by table, and tables whose tier changes.

    `fraction`: moved bytes over the bytes of all tables.
    """

    moved: Mapping[str, float]
    tiers: Mapping[str, tuple[str, str]]
    total: float

    @property
    def bytes(self) -> float:
        return sum(self.moved.values())

    @property
    def fraction(self) -> float:
        return self.bytes / self.total if self.total else 0.0

    def __str__(self) -> str:
        moved_bytes = f"{format_bytes(self.bytes)} of {format_bytes(self.total)}"
        lines = [f"{moved_bytes} move between ranks ({100 * self.fraction:.1f} %)"]
        moved = sorted(self.moved.items(), key=lambda entry: (-entry[1], entry[0]))
        lines += [f"  {name}: {format_bytes(size)}" for name, size in moved[:MAX_TABLES_SHOWN] if size]
        lines += [f"  {name}: from {old} to {new}" for name, (old, new) in sorted(self.tiers.items())]
        return "\n".join(lines)


@dataclass(frozen=True)
class ShardingPlan(JsonFile):
    """Shardings of all tables, for a job of a certain size.

    Args:
        tables: sharding by table name.
        world_size: ranks of the job, or of one replica of the tables.
        local_world_size: ranks per node; node `n` has the ranks from `n * local_world_size` on. By default all ranks.
        placements: memory tiers by table name; tables without an entry keep the tier of their `TableConfig`.
        copies: replicas of the tables; the job has `copies * world_size` ranks.
        report: `te.sharding.PlanReport` of a plan made by `te.plan`; not in JSON if its optimizer is a `Custom` one.

    Raises:
        TypeError, ValueError: for sizes that do not fit, or a value that is not a sharding.
    """

    tables: Mapping[str, Sharding]
    world_size: int
    local_world_size: int = 0
    placements: Mapping[str, TablePlacement] = field(default_factory=dict)
    copies: int = 1
    report: Any = field(default=None, compare=False, repr=False)

    TITLE, REQUIRED = "a sharding plan", ("world_size", "tables")
    MEMBERS: ClassVar[Iterable[str]] = ("world_size", "local_world_size", "copies", "tables", "report")
    REPORT: ClassVar[Any]  # class of reports; its module imports this one, and sets it

    def __post_init__(self) -> None:
        vars(self).update(tables=dict(self.tables), placements=dict(self.placements))
        vars(self).update(local_world_size=self.local_world_size or self.world_size)
        for size in ("copies", "world_size"):
            checked_size(f"a sharding plan's {size}", getattr(self, size))
        if self.local_world_size < 1 or self.world_size % self.local_world_size:
            sizes = f"{self.local_world_size} and {self.world_size}"
            raise ValueError(f"local_world_size must divide world_size, got {sizes}")
        self.require_tables([*self.placements])
        for name, placement in self.placements.items():
            if not isinstance(placement, TablePlacement):
                raise TypeError(f"table {name!r}: expected a te.sharding.TablePlacement, got {placement!r}")
        for name, sharding in self.tables.items():
            if type(sharding) not in SHARDINGS.values():
                raise TypeError(f"table {name!r}: expected a sharding such as te.sharding.RowWise(), got {sharding!r}")

    def shards(self, table: TableConfig) -> list[Shard]:
        """Return the shards of a table; ValueError if the plan lacks the table, or its sharding does not fit."""
        self.require_tables([table.name])
        return self.tables[table.name].shards(table, self.world_size, self.local_world_size)

    def placement(self, name: str) -> TablePlacement:
        """Return the memory tier of a table in the plan; the device by default."""
        return self.placements.get(name, TablePlacement())

    def __str__(self) -> str:
        return repr(self) if self.report is None else str(self.report)

    def explain(self, table: str) -> str:
        """Explain the placement of a table, with the cost of the next best one; for plans made by `te.plan`."""
        return self._known().explain(table)

    def to_html(self) -> str:
        """Return an HTML page without scripts: charts of time and memory per rank, and a list of tables."""
        return self._known().to_html()

    def to_manifests(self, **settings: Any) -> dict[str, str]:
        """Return Kubernetes manifests that run this plan, by file; `settings` are those of `te.sharding.Deployment`."""
        return self._known().to_manifests(self, **settings)

    def diff(self, other: "ShardingPlan") -> PlanDiff:
        """Return what moves from `other` to this plan; `te.plan` must have made one of them, for the tables' sizes."""
        return (self.report or other._known()).diff(other, self)

    def check(self, stats: Mapping[str, Any]) -> list[str]:
        """Return reasons to replan, one line each: tables whose new `TableStats` unbalance the plan."""
        return self._known().check(self, stats)

    def _known(self) -> Any:
        if self.report is None:
            raise ValueError("this plan has no report, as it was written by hand; make one with te.plan(...)")
        return self.report

    def apply(self, table: TableConfig) -> TableConfig:
        """Return the table's config with the placement and cache of the plan."""
        placement = self.placements.get(table.name)
        if placement is None or (placement.placement == table.placement == "device"):
            return table
        cache = replace(table.cache, host_rows=placement.host_rows, host_share=placement.host_share)
        if placement.cache_rows or placement.cache_share:
            cache = replace(cache, rows=placement.cache_rows, share=placement.cache_share or cache.share)
        return replace(table, placement=placement.placement, cache=cache)

    def require_tables(self, names: Sequence[str]) -> None:
        """Raise ValueError unless the plan has all of these tables."""
        if missing := [name for name in names if name not in self.tables]:
            raise ValueError(f"the sharding plan lacks the tables {missing}; it has {sorted(self.tables)}")

    def to_json(self) -> str:
        """Return text for `from_json`, one line per table and for the report."""
        sizes = {"format": self.FORMAT, "world_size": self.world_size, "local_world_size": self.local_world_size}
        sizes |= {"copies": self.copies} if self.copies > 1 else {}
        if self.report is not None and not isinstance(self.report.model.optimizer, Custom):
            sizes["report"] = self.report.to_json()
        tables = []
        for name, sharding in self.tables.items():
            fields = vars(sharding) | (vars(self.placements[name]) if name in self.placements else {})
            values = {key: value for key, value in fields.items() if value is not None}
            tables.append(f"    {json.dumps(name)}: {json.dumps({'type': sharding.kind} | values)}")
        head, body = "".join(f'  "{name}": {value},\n' for name, value in sizes.items()), ",\n".join(tables)
        return f'{{\n{head}  "tables": {{\n{body}\n  }}\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a plan; ValueError with the table and the problem."""
        values = cls._members(text)
        tables, report = values.pop("tables"), values.pop("report", None)
        if not isinstance(tables, dict):
            raise ValueError(f"a sharding plan's tables must be an object, got {tables!r}")
        entries = {name: _parse_table(name, value) for name, value in tables.items()}
        placements = {name: placement for name, (_, placement) in entries.items() if placement}
        try:
            plan = cls({name: sharding for name, (sharding, _) in entries.items()}, placements=placements, **values)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return plan if report is None else replace(plan, report=cls.REPORT.from_values(plan, report))


def uniform_plan(tables: Sequence[TableConfig], world_size: int, local_world_size: int = 0) -> ShardingPlan:
    """Plan by sizes alone: replicate small tables, shard those above a rank's share by rows, others table-wise.

    Table-wise tables go, largest first, to the rank with the fewest bytes. Deterministic.
    """
    sizes = {t.name: t.max_rows * t.embedding_dim * t.dtype.itemsize for t in tables}
    shardings: dict[str, Sharding] = {}
    limit, bytes_on = sum(sizes.values()) / world_size, [0.0] * world_size
    for table in sorted(tables, key=lambda table: -sizes[table.name]):
        size = sizes[table.name]
        if world_size > 1 and size <= SMALL_TABLE and not table.is_dynamic:
            shardings[table.name] = DataParallel()
        elif world_size > 1 and size > limit and rows_to_shard(table) >= world_size:
            shardings[table.name] = RowWise()
            bytes_on = [load + size / world_size for load in bytes_on]
        else:
            rank = bytes_on.index(min(bytes_on))
            shardings[table.name] = TableWise(rank)
            bytes_on[rank] += size
    return ShardingPlan({table.name: shardings[table.name] for table in tables}, world_size, local_world_size)


def _parse_table(table: str, values: Any) -> tuple[Sharding, TablePlacement | None]:
    if not isinstance(values, dict) or not isinstance(values.get("type"), str) or values["type"] not in SHARDINGS:
        raise ValueError(f'table {table!r}: expected {{"type": …}} with a type of {sorted(SHARDINGS)}, got {values!r}')
    kind = SHARDINGS[values["type"]]
    tier = {option.name: values[option.name] for option in fields(TablePlacement) if option.name in values}
    options = {name: value for name, value in values.items() if name != "type" and name not in tier}
    known = {option.name for option in fields(kind)}
    if not set(options) <= known:
        raise ValueError(f"table {table!r}: {values['type']} knows {sorted(known)}, got {sorted(set(options) - known)}")
    try:
        return kind(**options), TablePlacement(**tier) if tier else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"table {table!r}: {values['type']} needs {sorted(known)}: {error}") from error
