"""Where every table goes: a plan, as plain data that can be written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tritonemb.sharding.types import SHARDINGS, DataParallel, RowWise, Shard, Sharding, TableWise
from tritonemb.types import TableConfig

FORMAT = 1
SMALL_TABLE = 64 * 1024  # bytes of weights: such a table costs less to update everywhere than to exchange
_NAMES = {kind: name for name, kind in SHARDINGS.items()}


@dataclass(frozen=True)
class ShardingPlan:
    """How each table is cut, for a job of a certain size.

    Args:
        tables: a sharding for each table's name.
        world_size: ranks of the job, or of one replica of the tables.
        local_world_size: ranks of a node; node `n` has the ranks from `n * local_world_size` on. All if not given.

    Raises:
        TypeError, ValueError: for sizes that do not fit, or what is no sharding.
    """

    tables: Mapping[str, Sharding]
    world_size: int
    local_world_size: int = 0

    def __post_init__(self) -> None:
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
        """The rectangles of a table.

        Raises:
            ValueError: the plan does not have the table, or its sharding does not fit.
        """
        self.check([table.name])
        return self.tables[table.name].shards(table, self.world_size, self.local_world_size)

    def check(self, names: Sequence[str]) -> None:
        """Raise ValueError unless every one of these tables is in the plan."""
        missing = [name for name in names if name not in self.tables]
        if missing:
            raise ValueError(f"the sharding plan lacks the tables {missing}; it has {sorted(self.tables)}")

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        tables = {name: {"type": _NAMES[type(s)], **_given(s)} for name, s in self.tables.items()}
        sizes = {"format": FORMAT, "world_size": self.world_size, "local_world_size": self.local_world_size}
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in tables.items())
        head = "".join(f"  {json.dumps(name)}: {value},\n" for name, value in sizes.items())
        return f'{{\n{head}  "tables": {{\n{lines}\n  }}\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> ShardingPlan:
        """A plan from its text.

        Raises:
            ValueError: saying what is wrong, and in which table.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"a sharding plan must be JSON: {error}") from error
        expected = {"format", "world_size", "local_world_size", "tables"}
        if not isinstance(values, dict) or not isinstance(values.get("tables"), dict) or not set(values) <= expected:
            raise ValueError(f"a sharding plan is an object with the fields {sorted(expected)}")
        if values.get("format", FORMAT) != FORMAT:
            raise ValueError(f"this version reads sharding plans of format {FORMAT}, got {values['format']!r}")
        sizes = {name: values[name] for name in ("world_size", "local_world_size") if name in values}
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"a sharding plan's {name} must be an int, got {value!r}")
        if "world_size" not in sizes:
            raise ValueError("a sharding plan needs a world_size")
        return cls({name: _sharding(name, value) for name, value in values["tables"].items()}, **sizes)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> ShardingPlan:
        """Read it from JSON; errors name the file."""
        try:
            return cls.from_json(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def uniform_plan(tables: Sequence[TableConfig], world_size: int, local_world_size: int = 0) -> ShardingPlan:
    """A plan from sizes alone: small tables everywhere, those larger than a rank's share by rows, others whole.

    Whole tables go, largest first, to the rank that holds the fewest bytes. Same tables, same plan.
    """
    shardings: dict[str, Sharding] = {}
    sizes = {table.name: table.num_embeddings * table.embedding_dim * table.dtype.itemsize for table in tables}
    share = sum(sizes.values()) / world_size
    held = [0.0] * world_size
    whole = []
    for table in tables:
        if world_size > 1 and sizes[table.name] <= SMALL_TABLE:
            shardings[table.name] = DataParallel()
        elif world_size > 1 and sizes[table.name] > share and table.num_embeddings >= world_size:
            shardings[table.name] = RowWise()
            held = [size + sizes[table.name] / world_size for size in held]
        else:
            whole.append(table)
    for table in sorted(whole, key=lambda table: -sizes[table.name]):
        rank = held.index(min(held))
        shardings[table.name] = TableWise(rank)
        held[rank] += sizes[table.name]
    return ShardingPlan({table.name: shardings[table.name] for table in tables}, world_size, local_world_size)


def _given(sharding: Sharding) -> dict[str, Any]:
    values = {field.name: getattr(sharding, field.name) for field in fields(sharding)}
    return {name: value for name, value in values.items() if value is not None}


def _sharding(table: str, values: Any) -> Sharding:
    if not isinstance(values, dict) or not isinstance(values.get("type"), str) or values["type"] not in SHARDINGS:
        raise ValueError(f'table {table!r}: expected {{"type": …}} with a type of {sorted(SHARDINGS)}, got {values!r}')
    kind = SHARDINGS[values["type"]]
    rest = {name: value for name, value in values.items() if name != "type"}
    known = {field.name for field in fields(kind)}
    if not set(rest) <= known:
        raise ValueError(f"table {table!r}: {values['type']} knows {sorted(known)}, got {sorted(set(rest) - known)}")
    try:
        return kind(**rest)
    except TypeError as error:
        raise ValueError(f"table {table!r}: {values['type']} needs {sorted(known)}: {error}") from error
