"""Tables out of a checkpoint, in pieces: from a table's files or from tensors, to the disk or to memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tritonemb.nn.tiered_table import CHUNK_BYTES, FirstValues, TieredTable
from tritonemb.sharding.table_shards import LocalShard, TableShards
from tritonemb.storage import DiskRows, SavedRows, StorageError, restore
from tritonemb.training.checkpoints.files import ROWS
from tritonemb.training.checkpoints.manifest import MANIFEST, read_text
from tritonemb.training.checkpoints.writing import as_one_process


class Rows(Protocol):
    """Where a table's rows come from."""

    def read(self, first: int, last: int) -> Mapping[str, Tensor]:
        """Rows `first` to `last` - 1 of each field; asked for in ascending order."""


def saved_tables(path: Path) -> dict[str, dict[str, Any]]:
    """What a checkpoint's manifest says of the tables that are files, by the beginning of their names.

    Raises:
        ValueError: it is damaged.
    """
    found: dict[str, dict[str, Any]] = {}
    if (path / MANIFEST).is_file():
        found = read_text(path)[1].get("tables", {})
    return found


def entries_of(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of each tensor of tables that are files, as those of a checkpoint's tensors."""
    return {
        f"{prefix}.{field}": TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), torch.Size(size), [])
        for prefix, table in tables.items()
        for field, (dtype, size) in table["fields"].items()
    }


def from_files(path: Path, said: Mapping[str, Any], table: TieredTable) -> DiskRows:
    """A table's files as rows that it can adopt.

    Raises:
        StorageError: a file is missing, damaged, or of another table, or there is no room.
    """
    base, *increments = [path / name for name in said["files"]]
    return table.restored(base, increments)


def from_tensors(rows: Rows, table: TieredTable) -> DiskRows:
    """Other rows as ones that a table on disk can adopt.

    Raises:
        StorageError: they cannot be read, or there is no room.
    """
    store = table.empty()
    try:
        step = max(1, CHUNK_BYTES // table.record.num_bytes)
        for first in range(0, store.num_rows, step):
            last = min(first + step, store.num_rows)
            records = torch.zeros(last - first, table.record.num_bytes, dtype=torch.uint8)
            found = rows.read(first, last)
            for name, view in table.record.views(records).items():
                view.copy_(found[name])
            store.write(torch.arange(first, last), records).wait()
    except BaseException:
        store.close()
        raise
    return store


@torch.no_grad()
def fill(rows: Rows, targets: Mapping[str, Tensor], row_bytes: int) -> None:
    """Fill whole tensors, or this rank's shards, of some of a table's fields.

    Args:
        row_bytes: of all fields of a row.
    """
    ranges = [bounds for target in targets.values() for bounds in _ranges(target)]
    step = max(1, CHUNK_BYTES // row_bytes)
    last_of_all = max((last for _, last in ranges), default=0)
    for first in range(min((first for first, _ in ranges), default=0), last_of_all, step):
        last = min(first + step, last_of_all)
        if not any(begin < last and first < end for begin, end in ranges):
            continue
        found = rows.read(first, last)
        for name, target in targets.items():
            _fill(target, found[name], first)


class FileRows:
    """Rows out of a table's files; where there are changes to be put onto a snapshot, a file of that is made first,
    among the system's temporary ones.

    Raises:
        StorageError: a file is missing or damaged, or there is no room.
    """

    def __init__(self, path: Path, said: Mapping[str, Any]) -> None:
        base, *increments = [path / name for name in said["files"]]
        with ExitStack() as stack:
            if increments:
                folder = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="tritonemb-", ignore_cleanup_errors=True)
                )
                whole = Path(folder) / f"table{ROWS}"
                restore(whole, base, increments)
            self._rows = stack.enter_context(SavedRows(base if not increments else whole))
            header = self._rows.header
            refuse_another_table(base, header["table"], said["table"])
            self.row_bytes = self._rows.record.num_bytes
            self._initial = FirstValues(
                self._rows.record, header["seed"], said["bound"], header["row_origin"], header["column_origin"]
            )
            self._stack = stack.pop_all()

    def read(self, first: int, last: int) -> Mapping[str, Tensor]:
        records = torch.empty(last - first, self.row_bytes, dtype=torch.uint8)
        self._rows.read(torch.arange(first, last), records, self._initial)
        return self._rows.record.views(records)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> FileRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorRows:
    """Rows out of a checkpoint's tensors, of which a piece at a time is held, as they were written.

    Args:
        prefix: of their names.
        entries: by field.
    """

    def __init__(self, path: Path, prefix: str, entries: Mapping[str, TensorStorageMetadata]) -> None:
        self._fields = {name: _Pieces(path, f"{prefix}.{name}", entry) for name, entry in entries.items()}

    def read(self, first: int, last: int) -> Mapping[str, Tensor]:
        return {name: field.read(first, last) for name, field in self._fields.items()}


class _Pieces:
    """Rows out of one of a checkpoint's tensors."""

    def __init__(self, path: Path, name: str, entry: TensorStorageMetadata) -> None:
        self._path, self._name, self._size, self._dtype = path, name, entry.size, entry.properties.dtype
        by_column: dict[int, set[int]] = {}
        for chunk in entry.chunks:
            by_column.setdefault(0 if len(chunk.offsets) < 2 else chunk.offsets[1], set()).add(chunk.offsets[0])
        # The widest part of the columns has the smallest pieces of rows; what more is read of others is less.
        self._edges = sorted({0, *max(by_column.values(), key=len), entry.size[0]})
        self._next, self._first, self._piece = 0, 0, torch.empty((0, *entry.size[1:]), dtype=self._dtype)

    def read(self, first: int, last: int) -> Tensor:
        parts = []
        while first < last:
            while first >= self._first + self._piece.shape[0]:
                self._fetch()
            part = self._piece[first - self._first : last - self._first]
            parts.append(part)
            first += part.shape[0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _fetch(self) -> None:
        """The next piece."""
        first, last = self._edges[self._next], self._edges[self._next + 1]
        self._next, self._first = self._next + 1, first
        self._piece = torch.empty((last - first, *self._size[1:]), dtype=self._dtype)
        shards = TableShards(self._size, self._dtype, [LocalShard(self._piece, first)])
        with as_one_process():
            load({self._name: shards}, checkpoint_id=self._path, no_dist=True)


def refuse_another_table(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise StorageError(
            f"{path} is a snapshot of table {found!r}, not of table {expected!r}; use another checkpoint"
        )


def _ranges(target: Tensor) -> Iterator[tuple[int, int]]:
    """Bounds of the rows that a target has."""
    if isinstance(target, TableShards):
        for shard in target.shards:
            yield shard.first_row, shard.first_row + shard.tensor.shape[0]
    else:
        yield 0, target.shape[0]


def _fill(target: Tensor, part: Tensor, first: int) -> None:
    """Copy rows from `first` on to where a target has them."""
    shards = target.shards if isinstance(target, TableShards) else (LocalShard(target),)
    for shard in shards:
        own = shard.tensor
        begin = max(first, shard.first_row)
        end = min(first + part.shape[0], shard.first_row + own.shape[0])
        if begin < end:
            rows = part[begin - first : end - first]
            columns = rows if own.dim() == 1 else rows[:, shard.first_column : shard.first_column + own.shape[1]]
            own[begin - shard.first_row : end - shard.first_row].copy_(columns)
