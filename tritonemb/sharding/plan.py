"""Sharding plans: plain data, which can be written by hand, that says which rank has which rows and columns."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self, get_args

from tritonemb.layout import rows_to_shard
from tritonemb.sharding.table_stats import TableStats
from tritonemb.types import Placement, TableConfig, checked_size
from tritonemb.utils import JsonFile, format_bytes

Ranks = Sequence[int]
SMALL_TABLE = 64 * 1024  # bytes of weights: such a table costs less to update replicated than to exchange
COLUMNS_ROUNDED_TOGETHER = 8  # of a 16-bit row: one random counter rounds them
SHOWN = 40  # tables, those that cost or move most


@dataclass(frozen=True)
class Shard:
    """Rows and columns of a table, and the rank that has them."""

    rank: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int


@dataclass(frozen=True)
class Sharding:
    """How a table is sharded; one of the classes below. Ranks count from 0 to the plan's world size."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # lists become tuples, so that shardings compare by what they say
            if name in ("ranks", "nodes", "columns", "rows") and value is not None:
                object.__setattr__(self, name, tuple(value))

    @property
    def places(self) -> Sequence[int] | None:
        """The ranks or nodes that it names; None for all."""
        given = vars(self)
        one = [given[name] for name in ("rank", "node") if name in given]
        return one or given.get("ranks", given.get("nodes"))

    def shards(self, table: TableConfig, world_size: int, local_world_size: int) -> list[Shard]:
        """The rectangles, column block by column block, then by row; together they cover the table once.

        Raises:
            ValueError: naming the table, for ranks, nodes, columns or rows that there are not.
        """
        title, rows = f"table {table.name!r}", rows_to_shard(table)
        if isinstance(self, DataParallel):
            if table.is_dynamic:
                raise ValueError(f"{title} is dynamic: it is sharded by rows, not replicated")
            return [Shard(rank, 0, rows, 0, table.embedding_dim) for rank in range(world_size)]
        owners, found = _owners(self, table, title, world_size, local_world_size), []
        if table.is_dynamic and (len(owners) > 1 or table.capacity is None):
            raise ValueError(f"{title} is dynamic: it is sharded by rows, and has a capacity in rows, not in bytes")
        for ranks, (first_column, width) in zip(owners, _column_blocks(self, table, title, len(owners)), strict=True):
            for rank, (first, size) in zip(ranks, _row_blocks(self, table, title, rows, len(ranks)), strict=False):
                found.append(Shard(rank, first, size, first_column, width))
        return found


@dataclass(frozen=True)
class TableWise(Sharding):
    """The whole table on one rank."""

    rank: int


@dataclass(frozen=True)
class RowWise(Sharding):
    """A block of rows on each of several ranks, or of all.

    `rows` are their numbers of rows, of a dynamic table of partitions, in the order of `ranks`; if not given,
    ceil(rows / ranks) each but the last ones.
    """

    ranks: Ranks | None = None
    rows: Sequence[int] | None = None


@dataclass(frozen=True)
class ColumnWise(Sharding):
    """Blocks of columns, each on one of `ranks`, or of all; a rank may have several.

    `columns` are their widths; if not given, as equal as multiples of 8 (or, of few columns, any widths) can be.
    """

    ranks: Ranks | None = None
    columns: Sequence[int] | None = None


@dataclass(frozen=True)
class TableRowWise(Sharding):
    """Blocks of rows on the ranks of one node: partial sums of a bag meet inside the node, and leave it as one."""

    node: int


@dataclass(frozen=True)
class TableColumnWise(Sharding):
    """Blocks of columns on the ranks of one node; `columns` as in `ColumnWise`."""

    node: int
    columns: Sequence[int] | None = None


@dataclass(frozen=True)
class Grid(Sharding):
    """Blocks of columns on several nodes, or all, each by rows over its node's ranks; `columns` as in `ColumnWise`."""

    nodes: Ranks | None = None
    columns: Sequence[int] | None = None


@dataclass(frozen=True)
class DataParallel(Sharding):
    """The whole table on every rank; the gradients of its rows are gathered, and every rank does the same update."""


SHARDINGS: dict[str, type[Sharding]] = {
    "table_wise": TableWise, "row_wise": RowWise, "column_wise": ColumnWise, "table_row_wise": TableRowWise,
    "table_column_wise": TableColumnWise, "grid": Grid, "data_parallel": DataParallel,
}  # fmt: skip
_NAMES = {kind: name for name, kind in SHARDINGS.items()}


def _owners(sharding: Sharding, table: TableConfig, title: str, ranks: int, local: int) -> Sequence[Sequence[int]]:
    """Of each column block the ranks that share its rows."""
    by_node, by_row = isinstance(sharding, TableRowWise | TableColumnWise | Grid), isinstance(sharding, RowWise)
    what, number = ("node", ranks // local) if by_node else ("rank", ranks)
    places = sharding.places
    if places is None:
        places = range(number if by_row else min(number, most_blocks(table)))
    if not places:
        raise ValueError(f"{title}: {sharding} needs at least one {what}")
    for value in places:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{title}: a {what} must be an int, got {value!r} in {sharding}")
        if not 0 <= value < number:
            raise ValueError(f"{title}: {what} {value} of {sharding} is not one of the plan's {number}")
    if by_row and len(set(places)) != len(places):
        raise ValueError(f"{title}: {sharding} names a rank twice")
    owners = [range(place * local, (place + 1) * local) if by_node else [place] for place in places]
    if isinstance(sharding, TableColumnWise):
        blocks = min(local, most_blocks(table)) if sharding.columns is None else len(sharding.columns)
        return [[owners[0][block % local]] for block in range(blocks)]
    return [places] if by_row else owners


def _column_blocks(sharding: Sharding, table: TableConfig, title: str, blocks: int) -> list[tuple[int, int]]:
    """First column and width of each."""
    dim, widths = table.embedding_dim, getattr(sharding, "columns", None)
    if widths is None:
        if blocks > most_blocks(table):
            raise ValueError(f"{title}: {sharding} cuts {dim} columns of {table.dtype} into {blocks} blocks")
        step = 8 if dim >= 8 * blocks else 1
        cuts = [dim // step * block // blocks * step for block in range(blocks)] + [dim]
        return [(first, stop - first) for first, stop in pairwise(cuts)]
    if not _add_up(widths, blocks, dim):
        raise ValueError(f"{title}: the columns of {sharding} must be {blocks} positive widths that add up to {dim}")
    firsts = [sum(widths[:block]) for block in range(blocks)]
    if any(first % _cut_at(table) for first in firsts):
        raise ValueError(
            f"{title}: blocks of {sharding} begin at columns {firsts}; those of a {table.dtype} table must begin at "
            f"multiples of {COLUMNS_ROUNDED_TOGETHER}"
        )
    return list(zip(firsts, widths, strict=True))


def _row_blocks(sharding: Sharding, table: TableConfig, title: str, rows: int, blocks: int) -> list[tuple[int, int]]:
    """First row and number of rows of each; fewer blocks where there are not enough rows."""
    sizes = getattr(sharding, "rows", None)
    if sizes is None:
        size = -(-rows // blocks)
        return [(first, min(size, rows - first)) for first in range(0, rows, size)]
    if not _add_up(sizes, blocks, rows):
        what = "partitions" if table.is_dynamic else "rows"
        raise ValueError(
            f"{title}: the rows of {sharding} must be {blocks} positive sizes that add up to {rows} {what}"
        )
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def _add_up(sizes: Sequence[int], blocks: int, total: int) -> bool:
    """Whether these are positive sizes of so many blocks of a table."""
    return len(sizes) == blocks and all(isinstance(n, int) and n > 0 for n in sizes) and sum(sizes) == total


def _cut_at(table: TableConfig) -> int:
    return 1 if table.dtype.itemsize == 4 else COLUMNS_ROUNDED_TOGETHER


def most_blocks(table: TableConfig) -> int:
    """Column blocks that a table can be cut into."""
    return max(1, table.embedding_dim // _cut_at(table))


@dataclass(frozen=True)
class TablePlacement:
    """The tier of a table, and of one that is not on the device, how many rows each rank caches.

    Args:
        placement: "device", "host", "disk" or "server".
        cache_rows: cached on the device by each rank with a shard.
        host_rows: of a table on disk, cached in host memory too.
        cache_share: of each shard's rows, in (0, 1], in place of `cache_rows`; as the table's `CacheConfig` says if
            neither is given.
        host_share: of each shard's rows, in (0, 1], in place of `host_rows`.

    Raises:
        ValueError: for a placement that there is not, or rows that it does not cache.
    """

    placement: Placement = "device"
    cache_rows: int | None = None
    host_rows: int | None = None
    cache_share: float | None = None
    host_share: float | None = None

    def __post_init__(self) -> None:
        if self.placement not in get_args(Placement):
            raise ValueError(f"a placement must be one of {get_args(Placement)}, got {self.placement!r}")
        for name, where in (("cache", ("host", "disk", "server")), ("host", ("disk",))):
            rows, share, there = vars(self)[f"{name}_rows"], vars(self)[f"{name}_share"], self.placement in where
            if rows is not None and (not isinstance(rows, int) or rows < 1 or not there):
                raise ValueError(
                    f"{name}_rows must be an int of at least 1, of a table in {where}, got {rows!r} and "
                    f"{self.placement!r}"
                )
            number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if share is not None and not (number and 0 < share <= 1 and there):
                raise ValueError(
                    f"{name}_share must be a number in (0, 1], of a table in {where}, got {share!r} and "
                    f"{self.placement!r}"
                )
            if rows is not None and share is not None:
                raise ValueError(f"a table has {name}_rows or {name}_share, got {rows} and {share}")


@dataclass(frozen=True)
class PlanDiff:
    """What moves between two plans: bytes of rows and states by table, and tables whose tier changes.

    `fraction` is of all tables' bytes.
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
        lines = [
            f"{format_bytes(self.bytes)} of {format_bytes(self.total)} move between ranks ({100 * self.fraction:.1f} %)"
        ]
        moved = sorted(self.moved.items(), key=lambda each: (-each[1], each[0]))
        lines += [f"  {name}: {format_bytes(size)}" for name, size in moved[:SHOWN] if size]
        lines += [f"  {name}: from {before} to {after}" for name, (before, after) in sorted(self.tiers.items())]
        return "\n".join(lines)


@dataclass(frozen=True)
class ShardingPlan(JsonFile):
    """How each table is sharded, for a job of a certain size.

    Args:
        tables: a sharding for each table's name.
        world_size: ranks of the job, or of one replica of the tables.
        local_world_size: ranks of a node; node `n` has the ranks from `n * local_world_size` on. All if not given.
        placements: the tiers of some tables; others are where their `TableConfig` says.
        copies: of the tables; `world_size` are the ranks of one, so the job has `copies` times as many.
        report: what `te.plan` knows of it, a `te.sharding.PlanReport`; it is not in the plan's JSON.

    Raises:
        TypeError, ValueError: for sizes that do not fit, or what is no sharding.
    """

    tables: Mapping[str, Sharding]
    world_size: int
    local_world_size: int = 0
    placements: Mapping[str, TablePlacement] = field(default_factory=dict)
    copies: int = 1
    report: Any = field(default=None, compare=False, repr=False)  # of a module that imports this one

    TITLE, REQUIRED = "a sharding plan", ("world_size", "tables")
    MEMBERS: ClassVar[Iterable[str]] = ("world_size", "local_world_size", "copies", "tables")

    def __post_init__(self) -> None:
        vars(self).update(tables=dict(self.tables), placements=dict(self.placements))
        vars(self).update(local_world_size=self.local_world_size or self.world_size)
        for size in ("copies", "world_size"):
            checked_size(f"a sharding plan's {size}", getattr(self, size))
        if self.local_world_size < 1 or self.world_size % self.local_world_size:
            raise ValueError(
                f"local_world_size must divide world_size, got {self.local_world_size} and {self.world_size}"
            )
        for name, where in self.placements.items():
            if not isinstance(where, TablePlacement):
                raise TypeError(f"table {name!r}: expected a te.sharding.TablePlacement, got {where!r}")
        for name, sharding in self.tables.items():
            if type(sharding) not in _NAMES:
                raise TypeError(f"table {name!r}: expected a sharding such as te.sharding.RowWise(), got {sharding!r}")

    def shards(self, table: TableConfig) -> list[Shard]:
        """The rectangles of a table; ValueError if the plan does not have it, or its sharding does not fit."""
        self.require_tables([table.name])
        return self.tables[table.name].shards(table, self.world_size, self.local_world_size)

    def placement(self, name: str) -> TablePlacement:
        """The tier that the plan gives a table, the device if it gives none."""
        return self.placements.get(name, TablePlacement())

    def __str__(self) -> str:
        return repr(self) if self.report is None else str(self.report)

    def explain(self, table: str) -> str:
        """Why a table is where it is, and what the next best place costs; of a plan that `te.plan` has made."""
        return self._known().explain(table)

    def to_html(self) -> str:
        """A page without scripts: pictures of each rank's time and memory, and the tables."""
        return self._known().to_html()

    def diff(self, other: "ShardingPlan") -> PlanDiff:
        """What moves from `other` to this plan; at least one of them was made by `te.plan`, and knows the sizes."""
        return (self.report or other._known()).diff(other, self)

    def check(self, stats: Mapping[str, TableStats]) -> list[str]:
        """Reasons to plan anew, a line each: what these statistics change so far that the plan is out of balance."""
        return self._known().check(self, stats)

    def _known(self) -> Any:
        if self.report is None:
            raise ValueError("this plan was read or written by hand; te.plan(...) makes plans that explain themselves")
        return self.report

    def apply(self, table: TableConfig) -> TableConfig:
        """The table with the placement and the cache that the plan gives it."""
        where = self.placements.get(table.name)
        if where is None or (where.placement == table.placement == "device"):
            return table
        cache = replace(table.cache, host_rows=where.host_rows, host_share=where.host_share)
        if where.cache_rows or where.cache_share:
            cache = replace(cache, rows=where.cache_rows, share=where.cache_share or cache.share)
        return replace(table, placement=where.placement, cache=cache)

    def require_tables(self, names: Sequence[str]) -> None:
        """Raise ValueError unless every one of these tables is in the plan."""
        if missing := [name for name in names if name not in self.tables]:
            raise ValueError(f"the sharding plan lacks the tables {missing}; it has {sorted(self.tables)}")

    def to_json(self) -> str:
        """As text that `from_json` reads, a line a table, without the `report`."""
        sizes = {"format": self.FORMAT, "world_size": self.world_size, "local_world_size": self.local_world_size}
        sizes |= {"copies": self.copies} if self.copies > 1 else {}
        tables = []
        for name, each in self.tables.items():
            given = vars(each) | (vars(self.placements[name]) if name in self.placements else {})
            values = {"type": _NAMES[type(each)]} | {key: value for key, value in given.items() if value is not None}
            tables.append(f"    {json.dumps(name)}: {json.dumps(values)}")
        head, body = "".join(f'  "{name}": {value},\n' for name, value in sizes.items()), ",\n".join(tables)
        return f'{{\n{head}  "tables": {{\n{body}\n  }}\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A plan from its text; ValueError says what is wrong, and in which table."""
        values = cls._members(text)
        tables = values.pop("tables")
        if not isinstance(tables, dict):
            raise ValueError(f"a sharding plan's tables must be an object, got {tables!r}")
        found = {name: _sharding(name, value) for name, value in tables.items()}
        placements = {name: where for name, (_, where) in found.items() if where}
        try:
            return cls({name: sharding for name, (sharding, _) in found.items()}, placements=placements, **values)
        except TypeError as error:
            raise ValueError(str(error)) from error


def uniform_plan(tables: Sequence[TableConfig], world_size: int, local_world_size: int = 0) -> ShardingPlan:
    """A plan from sizes alone: small tables replicated, those larger than a rank's share by rows, others whole.

    Whole tables go, largest first, to the rank that has the fewest bytes. Same tables, same plan.
    """
    sizes = {t.name: (t.num_embeddings or t.capacity or 0) * t.embedding_dim * t.dtype.itemsize for t in tables}
    shardings: dict[str, Sharding] = {}
    share, bytes_on = sum(sizes.values()) / world_size, [0.0] * world_size
    for table in sorted(tables, key=lambda table: -sizes[table.name]):
        size = sizes[table.name]
        if world_size > 1 and size <= SMALL_TABLE and not table.is_dynamic:
            shardings[table.name] = DataParallel()
        elif world_size > 1 and size > share and rows_to_shard(table) >= world_size:
            shardings[table.name] = RowWise()
            bytes_on = [each + size / world_size for each in bytes_on]
        else:
            rank = bytes_on.index(min(bytes_on))
            shardings[table.name] = TableWise(rank)
            bytes_on[rank] += size
    return ShardingPlan({table.name: shardings[table.name] for table in tables}, world_size, local_world_size)


def _sharding(table: str, values: Any) -> tuple[Sharding, TablePlacement | None]:
    if not isinstance(values, dict) or not isinstance(values.get("type"), str) or values["type"] not in SHARDINGS:
        raise ValueError(f'table {table!r}: expected {{"type": …}} with a type of {sorted(SHARDINGS)}, got {values!r}')
    kind = SHARDINGS[values["type"]]
    tier = {each.name: values[each.name] for each in fields(TablePlacement) if each.name in values}
    rest = {name: value for name, value in values.items() if name != "type" and name not in tier}
    known = {each.name for each in fields(kind)}
    if not set(rest) <= known:
        raise ValueError(f"table {table!r}: {values['type']} knows {sorted(known)}, got {sorted(set(rest) - known)}")
    try:
        return kind(**rest), TablePlacement(**tier) if tier else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"table {table!r}: {values['type']} needs {sorted(known)}: {error}") from error
