"""Tables out of a checkpoint, in pieces: from a table's files or from tensors, to the disk or to memory."""

from __future__ import annotations

import heapq
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tritonemb.sharding.sharded_tensor import LocalShard, Rectangle, TableShards, refuse_gaps
from tritonemb.storage import DiskRows, SnapshotReader, StorageError, restore, snapshot_header
from tritonemb.tables.cached_table import CHUNK_BYTES, CachedTable, InitialValues
from tritonemb.training.checkpoints.files import ROWS
from tritonemb.training.checkpoints.manifest import MANIFEST, read_text
from tritonemb.training.checkpoints.writing import as_one_process


class Rows(Protocol):
    """Where a whole table's rows come from."""

    def seed(self, bound: float) -> int | None:
        """That of the first values in ± `bound` of rows that `chunks` leaves out; None if it leaves out none."""
        ...

    def chunks(self, first: int, last: int, step: int) -> Iterator[Tensor]:
        """int64, ascending, at most `step` at a time: those of the rows `first` to `last` - 1 that are to be read.

        Where the last call of `seed` gave one, rows that were never written are left out.
        """
        ...

    def read(self, rows: Tensor) -> Mapping[str, Tensor]:
        """Each field of rows of a chunk."""
        ...


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


def same_part(said: Mapping[str, Any], table: CachedTable) -> Mapping[str, Any] | None:
    """What is said of a saved table's part, if there is one, whose files a table on disk can take as they are."""
    config = table.config
    here = {
        "table": config.name,
        "rows": [config.row_origin, config.num_embeddings],
        "columns": [config.column_origin, config.embedding_dim],
        "bound": config.bound,
    }
    return next((part for part in said["parts"] if all(part[name] == value for name, value in here.items())), None)


def from_files(path: Path, said: Mapping[str, Any], table: CachedTable) -> DiskRows:
    """The files of a part as rows that a table can adopt.

    Raises:
        StorageError: a file is missing, damaged, or of another table, or there is no room.
    """
    base, *increments = [path / name for name in said["files"]]
    return table.restore_store(base, increments)


def from_rows(rows: Rows, table: CachedTable) -> DiskRows:
    """Rows of a whole table as ones that a table on disk, or a part of one, can adopt.

    Raises:
        StorageError: they cannot be read, or there is no room.
    """
    seed = rows.seed(table.config.bound)
    store = table.empty_store() if seed is None else table.empty_store(seed)
    row, column = table.config.row_origin, table.config.column_origin
    try:
        step = max(1, CHUNK_BYTES // table.record.num_bytes)
        for chunk in rows.chunks(row, row + store.num_rows, step):
            records = torch.zeros(chunk.numel(), table.record.num_bytes, dtype=torch.uint8)
            found = rows.read(chunk)
            for name, view in table.record.views(records).items():
                view.copy_(found[name] if view.dim() == 1 else found[name][:, column : column + view.shape[1]])
            store.write(chunk - row, records).wait()
    except BaseException:
        store.close()
        raise
    return store


def dense(first: int, last: int, step: int) -> Iterator[Tensor]:
    """All rows from `first` to `last` - 1, so many at a time."""
    for begin in range(first, last, step):
        yield torch.arange(begin, min(begin + step, last))


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
        found = rows.read(torch.arange(first, last))
        for name, target in targets.items():
            _fill(target, found[name], first)


class FileRows:
    """Rows of a whole table out of the files of its parts, which are opened when they are first needed.

    Where there are changes to be put onto a snapshot, a file of that is made first, among the system's temporary ones.

    Raises:
        ValueError: the parts do not make up the table.
        StorageError: from `read`: a file is missing, damaged, or of another table, or there is no room.
    """

    def __init__(self, path: Path, said: Mapping[str, Any]) -> None:
        self._fields = {
            name: (getattr(torch, dtype), torch.Size(size)) for name, (dtype, size) in said["fields"].items()
        }
        self.row_bytes = sum(dtype.itemsize * size[1:].numel() for dtype, size in self._fields.values())
        rectangles = [Rectangle(*part["rows"], *part["columns"]) for part in said["parts"]]
        try:
            refuse_gaps(self._fields["weight"][1], rectangles)
        except ValueError as error:
            raise ValueError(f"{path / MANIFEST} is damaged ({error}); use another checkpoint") from None
        self._sparse = False
        self._parts = [_Part(path, part, where) for part, where in zip(said["parts"], rectangles, strict=True)]

    def seed(self, bound: float) -> int | None:
        seeds = {part.seed() for part in self._parts}
        bounds = {part.bound for part in self._parts}
        self._sparse = len(seeds) == 1 and bounds == {bound}
        return seeds.pop() if self._sparse else None

    def chunks(self, first: int, last: int, step: int) -> Iterator[Tensor]:
        if not self._sparse:
            yield from dense(first, last, step)
            return
        edges = {edge for part in self._parts for edge in (part.first, part.last)}
        for begin, end in pairwise(sorted({first, last, *(edge for edge in edges if first < edge < last)})):
            there = [part for part in self._parts if part.first < end and begin < part.last]
            yield from _rows_of(heapq.merge(*(part.written(begin, end) for part in there)), step)
            for part in there:
                if part.last <= end:
                    part.close()

    def read(self, rows: Tensor) -> Mapping[str, Tensor]:
        found = {
            name: torch.empty((rows.numel(), *size[1:]), dtype=dtype) for name, (dtype, size) in self._fields.items()
        }
        for part in self._parts:
            begin, end = torch.searchsorted(rows, torch.tensor([part.first, part.last])).tolist()
            if begin < end:
                for name, tensor in part.read(rows[begin:end] - part.first).items():
                    target = found[name][begin:end]
                    column = part.where.first_column
                    target = target if tensor.dim() == 1 else target[:, column : column + tensor.shape[1]]
                    target.copy_(tensor)
            if not self._sparse and part.last <= int(rows[-1]) + 1:
                part.close()
        return found

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __enter__(self) -> FileRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Part:
    """The rows of a part of a table, counted from its own first one."""

    def __init__(self, path: Path, said: Mapping[str, Any], where: Rectangle) -> None:
        self._path, self._said, self.where = path, said, where
        self.first, self.last, self.bound = where.first_row, where.first_row + where.num_rows, said["bound"]
        self._rows: SnapshotReader | None = None
        self._stack = ExitStack()

    def seed(self) -> int:
        """Of the first values of rows that were never written."""
        return int(snapshot_header(self._path / self._said["files"][0])["seed"])

    def written(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Bounds of rows from `first` to `last` of the whole table, beside which none was ever written."""
        for begin, end in self._opened().written():
            bounds = max(first, self.first + begin), min(last, self.first + end)
            if bounds[0] < bounds[1]:
                yield bounds

    def read(self, rows: Tensor) -> Mapping[str, Tensor]:
        saved = self._opened()
        records = torch.empty(rows.numel(), saved.record.num_bytes, dtype=torch.uint8)
        saved.read(rows, records, self._initial)
        return saved.record.views(records)

    def _opened(self) -> SnapshotReader:
        if self._rows is None:
            self._rows = self._open()
        return self._rows

    def close(self) -> None:
        self._rows = None
        self._stack.close()

    def _open(self) -> SnapshotReader:
        base, *increments = [self._path / name for name in self._said["files"]]
        if increments:
            folder = tempfile.TemporaryDirectory(prefix="tritonemb-", ignore_cleanup_errors=True)
            whole = Path(self._stack.enter_context(folder)) / f"table{ROWS}"
            restore(whole, base, increments)
        rows = self._stack.enter_context(SnapshotReader(whole if increments else base))
        header, where = rows.header, self.where
        found = (header["table"], header["row_origin"], header["num_rows"], header["column_origin"])
        if found != (self._said["table"], where.first_row, where.num_rows, where.first_column):
            raise StorageError(
                f"{base} is a snapshot of table {header['table']!r}, not of the part of table {self._said['table']!r} "
                "that should be there; use another checkpoint"
            )
        self._initial = InitialValues(
            rows.record, header["seed"], self._said["bound"], where.first_row, where.first_column
        )
        return rows


def _rows_of(ranges: Iterator[tuple[int, int]], step: int) -> Iterator[Tensor]:
    """The rows of ranges that begin in ascending order and may overlap, each once, at most `step` at a time."""
    parts: list[Tensor] = []
    count = following = 0
    for begin, end in ranges:
        begin = max(begin, following)
        following = max(following, end)
        while begin < end:
            stop = min(end, begin + step - count)
            parts.append(torch.arange(begin, stop))
            count, begin = count + stop - begin, stop
            if count == step:
                yield torch.cat(parts)
                parts, count = [], 0
    if parts:
        yield torch.cat(parts)


class TensorRows:
    """Rows out of a checkpoint's tensors, of which a piece at a time is held, as they were written.

    Args:
        prefix: of their names.
        entries: by field.
    """

    def __init__(self, path: Path, prefix: str, entries: Mapping[str, TensorStorageMetadata]) -> None:
        self._fields = {name: _Pieces(path, f"{prefix}.{name}", entry) for name, entry in entries.items()}

    def seed(self, bound: float) -> int | None:
        return None

    def chunks(self, first: int, last: int, step: int) -> Iterator[Tensor]:
        return dense(first, last, step)

    def read(self, rows: Tensor) -> Mapping[str, Tensor]:
        first, last = int(rows[0]), int(rows[-1]) + 1
        assert last - first == rows.numel()
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
        self._first, self._piece = 0, torch.empty((0, *entry.size[1:]), dtype=self._dtype)

    def read(self, first: int, last: int) -> Tensor:
        parts = []
        while first < last:
            if not self._first <= first < self._first + self._piece.shape[0]:
                self._fetch(first)
            part = self._piece[first - self._first : last - self._first]
            parts.append(part)
            first += part.shape[0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _fetch(self, row: int) -> None:
        """The piece that a row is in."""
        number = bisect_right(self._edges, row)
        first, last = self._edges[number - 1], self._edges[number]
        self._first = first
        self._piece = torch.empty((last - first, *self._size[1:]), dtype=self._dtype)
        shards = TableShards(self._size, self._dtype, [LocalShard(self._piece, first)])
        with as_one_process():
            load({self._name: shards}, checkpoint_id=self._path, no_dist=True)


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
