"""Sharding plans: plain data, which can be written by hand, that says which rank has which rows and columns."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args

from tritonemb.layout import rows_to_shard
from tritonemb.types import Placement, TableConfig
from tritonemb.utils import read_sealed, sealed

if TYPE_CHECKING:
    from tritonemb.sharding.planner.report import PlanDiff, PlanReport
    from tritonemb.sharding.planner.statistics import TableStats

Ranks = Sequence[int]
COLUMNS_ROUNDED_TOGETHER = 8  # of a 16-bit row: one random counter rounds them


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
        for each in fields(self):  # lists become tuples, so that shardings compare and hash by what they say
            value = getattr(self, each.name)
            if each.name in ("ranks", "nodes", "columns") and value is not None:
                object.__setattr__(self, each.name, tuple(value))

    def shards(self, table: TableConfig, world_size: int, local_world_size: int) -> list[Shard]:
        """The rectangles, column block by column block, then by row; together they cover the table once.

        Raises:
            ValueError: naming the table, for ranks, nodes or columns that there are not.
        """
        owners, found, rows = self._owners(table, world_size, local_world_size), [], rows_to_shard(table)
        if table.is_dynamic and (len(owners) > 1 or table.capacity is None):
            raise ValueError(
                f"table {table.name!r} is dynamic: it is sharded by rows, and has a capacity in rows, not in bytes"
            )
        for ranks, (first_column, width) in zip(owners, self._column_blocks(table, len(owners)), strict=True):
            size = -(-rows // len(ranks))  # the last blocks may have fewer rows, or none
            for rank, first in zip(ranks, range(0, rows, size), strict=False):
                found.append(Shard(rank, first, min(size, rows - first), first_column, width))
        return found

    def _owners(self, table: TableConfig, world_size: int, local_world_size: int) -> list[Sequence[int]]:
        raise NotImplementedError

    def _column_blocks(self, table: TableConfig, blocks: int) -> list[tuple[int, int]]:
        dim, widths, cut_at = table.embedding_dim, getattr(self, "columns", None), _cut_at(table)
        if widths is None:
            if blocks > most_blocks(table):
                raise ValueError(
                    f"table {table.name!r}: {self} cuts {dim} columns of {table.dtype} into {blocks} blocks"
                )
            step = 8 if dim >= 8 * blocks else 1
            cuts = [dim // step * block // blocks * step for block in range(blocks)] + [dim]
            return [(first, stop - first) for first, stop in pairwise(cuts)]
        if len(widths) != blocks or any(not isinstance(w, int) or w < 1 for w in widths) or sum(widths) != dim:
            raise ValueError(
                f"table {table.name!r}: the columns of {self} must be {blocks} positive widths that add up to {dim}"
            )
        firsts = [sum(widths[:block]) for block in range(blocks)]
        if any(first % cut_at for first in firsts):
            raise ValueError(
                f"table {table.name!r}: blocks of {self} begin at columns {firsts}; those of a {table.dtype} table "
                f"must begin at multiples of {COLUMNS_ROUNDED_TOGETHER}"
            )
        return list(zip(firsts, widths, strict=True))


@dataclass(frozen=True)
class TableWise(Sharding):
    """The whole table on one rank."""

    rank: int

    def _owners(self, table: TableConfig, world_size: int, local_world_size: int) -> list[Sequence[int]]:
        return [_checked(table, self, "rank", [self.rank], world_size)]


@dataclass(frozen=True)
class RowWise(Sharding):
    """Blocks of rows on several ranks, all of ceil(rows / ranks) but the last ones.

    Args:
        ranks: with a block each, in order; all if not given.
    """

    ranks: Ranks | None = None

    def _owners(self, table: TableConfig, world_size: int, local_world_size: int) -> list[Sequence[int]]:
        ranks = range(world_size) if self.ranks is None else self.ranks
        if len(set(_checked(table, self, "rank", ranks, world_size))) != len(ranks):
            raise ValueError(f"table {table.name!r}: {self} names a rank twice")
        return [ranks]


@dataclass(frozen=True)
class ColumnWise(Sharding):
    """Blocks of columns, each on a rank; a rank may have several.

    Args:
        ranks: of the blocks, in order; all if not given.
        columns: widths of the blocks; if not given, as equal as multiples of 8 (or, of few columns, any widths) can be.
    """

    ranks: Ranks | None = None
    columns: Sequence[int] | None = None

    def _owners(self, table: TableConfig, world_size: int, local_world_size: int) -> list[Sequence[int]]:
        ranks = range(world_size)[: most_blocks(table)] if self.ranks is None else self.ranks
        return [[rank] for rank in _checked(table, self, "rank", ranks, world_size)]


@dataclass(frozen=True)
class TableRowWise(Sharding):
    """Blocks of rows on the ranks of one node: partial sums of a bag meet inside the node, and leave it as one."""

    node: int

    def _owners(self, table: TableConfig, world_size: int, local_world_size: int) -> list[Sequence[int]]:
        return _nodes(table, self, [self.node], world_size, local_world_size)


@dataclass(frozen=True)
class TableColumnWise(Sharding):
    """Blocks of columns on the ranks of one node; `columns` as in `ColumnWise`."""

    node: int
    columns: Sequence[int] | None = None

    def _owners(self, table: TableConfig, world_size: int, local_world_size: int) -> list[Sequence[int]]:
        (ranks,) = _nodes(table, self, [self.node], world_size, local_world_size)
        blocks = min(len(ranks), most_blocks(table)) if self.columns is None else len(self.columns)
        return [[ranks[block % len(ranks)]] for block in range(blocks)]


@dataclass(frozen=True)
class Grid(Sharding):
    """Blocks of columns on several nodes, and each of them by rows over its node's ranks.

    Args:
        nodes: of the column blocks, in order; all if not given.
        columns: as in `ColumnWise`.
    """

    nodes: Ranks | None = None
    columns: Sequence[int] | None = None

    def _owners(self, table: TableConfig, world_size: int, local_world_size: int) -> list[Sequence[int]]:
        nodes = range(world_size // local_world_size)[: most_blocks(table)] if self.nodes is None else self.nodes
        return _nodes(table, self, nodes, world_size, local_world_size)


@dataclass(frozen=True)
class DataParallel(Sharding):
    """The whole table on every rank; the gradients of its rows are gathered, and every rank does the same update."""

    def shards(self, table: TableConfig, world_size: int, local_world_size: int) -> list[Shard]:
        if table.is_dynamic:
            raise ValueError(f"table {table.name!r} is dynamic: it is sharded by rows, not replicated")
        return [Shard(rank, 0, table.num_embeddings, 0, table.embedding_dim) for rank in range(world_size)]


SHARDINGS: dict[str, type[Sharding]] = {
    "table_wise": TableWise,
    "row_wise": RowWise,
    "column_wise": ColumnWise,
    "table_row_wise": TableRowWise,
    "table_column_wise": TableColumnWise,
    "grid": Grid,
    "data_parallel": DataParallel,
}


def _checked(table: TableConfig, sharding: Sharding, what: str, given: Sequence[int], number: int) -> Sequence[int]:
    if not given:
        raise ValueError(f"table {table.name!r}: {sharding} needs at least one {what}")
    for value in given:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"table {table.name!r}: a {what} must be an int, got {value!r} in {sharding}")
        if not 0 <= value < number:
            raise ValueError(f"table {table.name!r}: {what} {value} of {sharding} is not one of the plan's {number}")
    return given


def _nodes(
    table: TableConfig, sharding: Sharding, nodes: Sequence[int], world_size: int, local_world_size: int
) -> list[Sequence[int]]:
    checked = _checked(table, sharding, "node", nodes, world_size // local_world_size)
    return [range(node * local_world_size, (node + 1) * local_world_size) for node in checked]


def _cut_at(table: TableConfig) -> int:
    return 1 if table.dtype.itemsize == 4 else COLUMNS_ROUNDED_TOGETHER


def most_blocks(table: TableConfig) -> int:
    return max(1, table.embedding_dim // _cut_at(table))


@dataclass(frozen=True)
class TablePlacement:
    """The tier of a table, and of one that is not on the device, how many rows each rank caches.

    Args:
        placement: "device", "host", "disk" or "server".
        cache_rows: cached on the device by each rank with a shard; as the table's `CacheConfig` says if not given.
        host_rows: of a table on disk, cached in host memory too.

    Raises:
        ValueError: for a placement that there is not, or rows that it does not cache.
    """

    placement: Placement = "device"
    cache_rows: int | None = None
    host_rows: int | None = None

    def __post_init__(self) -> None:
        if self.placement not in get_args(Placement):
            raise ValueError(f"a placement must be one of {get_args(Placement)}, got {self.placement!r}")
        for name, where in (("cache_rows", ("host", "disk", "server")), ("host_rows", ("disk",))):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1 or self.placement not in where):
                raise ValueError(
                    f"{name} must be an int of at least 1, of a table in {where}, got {value!r} and {self.placement!r}"
                )


FORMAT = 1
SMALL_TABLE = 64 * 1024  # bytes of weights: such a table costs less to update replicated than to exchange
_NAMES = {kind: name for name, kind in SHARDINGS.items()}
_TIER = {field.name for field in fields(TablePlacement)}


@dataclass(frozen=True)
class ShardingPlan:
    """How each table is sharded, for a job of a certain size.

    Args:
        tables: a sharding for each table's name.
        world_size: ranks of the job, or of one replica of the tables.
        local_world_size: ranks of a node; node `n` has the ranks from `n * local_world_size` on. All if not given.
        placements: the tiers of some tables; others are where their `TableConfig` says.
        copies: of the tables; `world_size` are the ranks of one, so the job has `copies` times as many.
        report: what `te.plan` knows of it.

    Raises:
        TypeError, ValueError: for sizes that do not fit, or what is no sharding.
    """

    tables: Mapping[str, Sharding]
    world_size: int
    local_world_size: int = 0
    placements: Mapping[str, TablePlacement] = field(default_factory=dict)
    copies: int = 1
    report: "PlanReport | None" = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.copies < 1:
            raise ValueError(f"copies must be at least 1, got {self.copies}")
        object.__setattr__(self, "placements", dict(self.placements))
        for name, where in self.placements.items():
            if not isinstance(where, TablePlacement):
                raise TypeError(f"table {name!r}: expected a te.sharding.TablePlacement, got {where!r}")
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if self.local_world_size == 0:
            object.__setattr__(self, "local_world_size", self.world_size)
        if self.local_world_size < 1 or self.world_size % self.local_world_size:
            raise ValueError(
                f"local_world_size must divide world_size, got {self.local_world_size} and {self.world_size}"
            )
        object.__setattr__(self, "tables", dict(self.tables))
        for name, sharding in self.tables.items():
            if type(sharding) not in _NAMES:
                raise TypeError(f"table {name!r}: expected a sharding such as te.sharding.RowWise(), got {sharding!r}")

    def shards(self, table: TableConfig) -> list[Shard]:
        """The rectangles of a table; ValueError if the plan does not have it, or its sharding does not fit."""
        self.require([table.name])
        return self.tables[table.name].shards(table, self.world_size, self.local_world_size)

    def __str__(self) -> str:
        return repr(self) if self.report is None else str(self.report)

    def explain(self, table: str) -> str:
        """Why a table is where it is, and what the next best place costs; of a plan that `te.plan` has made."""
        return self._known().explain(table)

    def to_html(self) -> str:
        """A page without scripts: pictures of each rank's time and memory, and the tables."""
        return self._known().to_html()

    def diff(self, other: "ShardingPlan") -> "PlanDiff":
        """What moves from `other` to this plan; at least one of them was made by `te.plan`, and knows the sizes."""
        report = self.report or other._known()
        return report.diff(other, self)

    def check(self, stats: "Mapping[str, TableStats]") -> list[str]:
        """Reasons to plan anew, a line each: what these statistics change so far that the plan is out of balance."""
        return self._known().check(self, stats)

    def _known(self) -> "PlanReport":
        if self.report is None:
            raise ValueError("this plan was read or written by hand; te.plan(...) makes plans that explain themselves")
        return self.report

    def apply(self, table: TableConfig) -> TableConfig:
        """The table with the placement and the cache that the plan gives it."""
        where = self.placements.get(table.name)
        if where is None or (where.placement == table.placement == "device"):
            return table
        on_disk = where.placement == "disk"
        rows = table.cache.rows if where.cache_rows is None else where.cache_rows
        cache = replace(table.cache, rows=rows, host_rows=where.host_rows if on_disk else None)
        return replace(table, placement=where.placement, cache=cache)

    def require(self, names: Sequence[str]) -> None:
        """Raise ValueError unless every one of these tables is in the plan."""
        missing = [name for name in names if name not in self.tables]
        if missing:
            raise ValueError(f"the sharding plan lacks the tables {missing}; it has {sorted(self.tables)}")

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        given = {
            name: {"type": _NAMES[type(each)]} | {key: value for key, value in vars(each).items() if value is not None}
            for name, each in self.tables.items()
        }
        for name, where in self.placements.items():
            if name in given:
                given[name] |= {key: value for key, value in asdict(where).items() if value is not None}
        tables = ",\n".join(f"    {json.dumps(name)}: {json.dumps(values)}" for name, values in given.items())
        copies = "" if self.copies == 1 else f'  "copies": {self.copies},\n'
        return (
            f'{{\n  "format": {FORMAT},\n  "world_size": {self.world_size},\n'
            f'  "local_world_size": {self.local_world_size},\n{copies}  "tables": {{\n{tables}\n  }}\n}}\n'
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A plan from its text.

        Raises:
            ValueError: saying what is wrong, and in which table.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"a sharding plan must be JSON: {error}") from error
        expected = {"format", "world_size", "local_world_size", "copies", "tables", "sha256"}
        if not isinstance(values, dict) or not isinstance(values.get("tables"), dict) or not set(values) <= expected:
            raise ValueError(f"a sharding plan is an object with the fields {sorted(expected - {'sha256'})}")
        if values.get("format", FORMAT) != FORMAT:
            raise ValueError(f"this version reads sharding plans of format {FORMAT}, got {values['format']!r}")
        sizes = {name: values[name] for name in ("world_size", "local_world_size", "copies") if name in values}
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"a sharding plan's {name} must be an int, got {value!r}")
        if "world_size" not in sizes:
            raise ValueError("a sharding plan needs a world_size")
        found = {name: _sharding(name, value) for name, value in values["tables"].items()}
        shardings = {name: sharding for name, (sharding, _) in found.items()}
        return cls(shardings, **sizes, placements={name: where for name, (_, where) in found.items() if where})

    def save(self, path: str | Path) -> None:
        """Write it as JSON, with a digest."""
        Path(path).write_text(sealed(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read it from JSON; errors name the file."""
        content = read_sealed(Path(path))
        try:
            return cls.from_json(content.decode())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def uniform_plan(tables: Sequence[TableConfig], world_size: int, local_world_size: int = 0) -> ShardingPlan:
    """A plan from sizes alone: small tables replicated, those larger than a rank's share by rows, others whole.

    Whole tables go, largest first, to the rank that has the fewest bytes. Same tables, same plan.
    """
    shardings: dict[str, Sharding] = {}
    rows = {table.name: table.num_embeddings or table.capacity or 0 for table in tables}
    sizes = {table.name: rows[table.name] * table.embedding_dim * table.dtype.itemsize for table in tables}
    share = sum(sizes.values()) / world_size
    bytes_on = [0.0] * world_size
    whole = []
    for table in tables:
        if world_size > 1 and sizes[table.name] <= SMALL_TABLE and not table.is_dynamic:
            shardings[table.name] = DataParallel()
        elif world_size > 1 and sizes[table.name] > share and rows_to_shard(table) >= world_size:
            shardings[table.name] = RowWise()
            bytes_on = [size + sizes[table.name] / world_size for size in bytes_on]
        else:
            whole.append(table)
    for table in sorted(whole, key=lambda table: -sizes[table.name]):
        rank = bytes_on.index(min(bytes_on))
        shardings[table.name] = TableWise(rank)
        bytes_on[rank] += sizes[table.name]
    return ShardingPlan({table.name: shardings[table.name] for table in tables}, world_size, local_world_size)


def _sharding(table: str, values: Any) -> tuple[Sharding, TablePlacement | None]:
    if not isinstance(values, dict) or not isinstance(values.get("type"), str) or values["type"] not in SHARDINGS:
        raise ValueError(f'table {table!r}: expected {{"type": …}} with a type of {sorted(SHARDINGS)}, got {values!r}')
    kind = SHARDINGS[values["type"]]
    tier = {name: value for name, value in values.items() if name in _TIER}
    rest = {name: value for name, value in values.items() if name != "type" and name not in _TIER}
    known = {field.name for field in fields(kind)}
    if not set(rest) <= known:
        raise ValueError(f"table {table!r}: {values['type']} knows {sorted(known)}, got {sorted(set(rest) - known)}")
    try:
        return kind(**rest), TablePlacement(**tier) if tier else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"table {table!r}: {values['type']} needs {sorted(known)}: {error}") from error
