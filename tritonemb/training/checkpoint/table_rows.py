"""Rows of saved tables, a piece at a time: out of a table's files or tensors, into a table on disk or into memory."""

from __future__ import annotations

import heapq
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tritonemb.sharding.sharded_tensor import LocalShard, Rectangle, TableShards, refuse_gaps
from tritonemb.storage import DiskRows, SnapshotReader, StorageError, restore, snapshot_header
from tritonemb.tables.cached_table import CHUNK_BYTES, FirstValues, TieredTable
from tritonemb.training.checkpoint.all_ranks import ignore_single_process_warning
from tritonemb.training.checkpoint.files import MANIFEST, ROWS


def write_rows(reader: FileReader | TensorReader, table: TieredTable) -> DiskRows:
    """Rows of a whole table as ones that a table on disk, or a part of one, can adopt.

    Raises:
        StorageError: they cannot be read, or there is no room.
    """
    seed = reader.seed(table.config.bound)
    store = table.empty() if seed is None else table.empty(seed)
    row, column = table.config.row_origin, table.config.column_origin
    try:
        step = max(1, CHUNK_BYTES // table.record.num_bytes)
        for chunk in reader.chunks(row, row + store.num_rows, step):
            records = torch.zeros(chunk.numel(), table.record.num_bytes, dtype=torch.uint8)
            found = reader.read(chunk)
            for name, view in table.record.views(records).items():
                view.copy_(_columns(found[name], column, view))
            store.write(chunk - row, records).wait()
    except BaseException:
        store.close()
        raise
    return store


@torch.no_grad()
def fill_tensors(reader: FileReader | TensorReader, targets: Mapping[str, Tensor], row_bytes: int) -> None:
    """Fill whole tensors, or this rank's shards, of some of a table's fields.

    Args:
        row_bytes: of all fields of a row.
    """
    shards = [
        (name, shard, shard.first_row, shard.first_row + shard.tensor.shape[0])
        for name, target in targets.items()
        for shard in (target.shards if isinstance(target, TableShards) else (LocalShard(target),))
    ]
    for chunk in dense_chunks(0, max((end for *_, end in shards), default=0), max(1, CHUNK_BYTES // row_bytes)):
        first, last = int(chunk[0]), int(chunk[-1]) + 1
        wanted = [
            (name, shard, max(first, begin), min(last, end)) for name, shard, begin, end in shards
            if begin < last and first < end
        ]  # fmt: skip
        found = reader.read(chunk) if wanted else {}
        for name, shard, begin, end in wanted:
            target = shard.tensor[begin - shard.first_row : end - shard.first_row]
            target.copy_(_columns(found[name][begin - first : end - first], shard.first_column, target))


def dense_chunks(first: int, last: int, step: int) -> Iterator[Tensor]:
    """All rows from `first` to `last` - 1, at most `step` at a time."""
    for begin in range(first, last, step):
        yield torch.arange(begin, min(begin + step, last))


def _columns(values: Tensor, first: int, like: Tensor) -> Tensor:
    """As many columns as another tensor has, from one on; a state of one value a row has none."""
    return values if like.dim() == 1 else values[:, first : first + like.shape[1]]


class FileReader:
    """Rows of a whole table out of the files of its parts, which are opened when they are first needed.

    Where there are changes to be put onto a snapshot, a file of that is made first, among the system's temporary ones.

    Args:
        path: the checkpoint.
        entry: what its manifest says of the table.

    Raises:
        ValueError: the parts do not make up the table.
        StorageError: from `read`: a file is missing, damaged, or of another table, or there is no room.
    """

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        self._fields = {
            name: (getattr(torch, dtype), torch.Size(size)) for name, (dtype, size) in entry["fields"].items()
        }
        self.row_bytes = sum(dtype.itemsize * size[1:].numel() for dtype, size in self._fields.values())
        self._parts = [_TablePart(path, part) for part in entry["parts"]]
        self._sparse = False
        try:
            refuse_gaps(self._fields["weight"][1], [part.rectangle for part in self._parts])
        except ValueError as error:
            raise ValueError(f"{path / MANIFEST} is damaged ({error}); use another checkpoint") from None

    def seed(self, bound: float) -> int | None:
        """That of the initial values in ± `bound` of rows that `chunks` leaves out; None if it leaves out none."""
        seeds = {part.seed() for part in self._parts}
        self._sparse = len(seeds) == 1 and {part.bound for part in self._parts} == {bound}
        return seeds.pop() if self._sparse else None

    def chunks(self, first: int, last: int, step: int) -> Iterator[Tensor]:
        """int64, ascending, at most `step` at a time: those of the rows `first` to `last` - 1 that are to be read.

        Where the last call of `seed` gave one, rows that were never written are left out.
        """
        if not self._sparse:
            yield from dense_chunks(first, last, step)
            return
        edges = {edge for part in self._parts for edge in (part.first, part.last) if first < edge < last}
        for begin, end in pairwise(sorted({first, last, *edges})):
            there = [part for part in self._parts if part.first < end and begin < part.last]
            yield from _rows_of(heapq.merge(*(part.written(begin, end) for part in there)), step)
            for part in there:
                if part.last <= end:
                    part.close()

    def read(self, rows: Tensor) -> Mapping[str, Tensor]:
        """Each field of rows of a chunk."""
        found = {
            name: torch.empty((rows.numel(), *size[1:]), dtype=dtype) for name, (dtype, size) in self._fields.items()
        }
        for part in self._parts:
            begin, end = torch.searchsorted(rows, torch.tensor([part.first, part.last])).tolist()
            if begin < end:
                for name, values in part.read(rows[begin:end] - part.first).items():
                    _columns(found[name][begin:end], part.rectangle.first_column, values).copy_(values)
            if not self._sparse and part.last <= int(rows[-1]) + 1:
                part.close()
        return found

    def close(self) -> None:
        for part in self._parts:
            part.close()


class _TablePart:
    """The rows of a part of a table, counted from its own first one."""

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        self._table, self._files = entry["table"], [path / name for name in entry["files"]]
        self.rectangle, self.bound = Rectangle(*entry["rows"], *entry["columns"]), entry["bound"]
        self.first, self.last = self.rectangle.first_row, self.rectangle.first_row + self.rectangle.num_rows
        self._open: tuple[SnapshotReader, FirstValues] | None = None
        self._stack = ExitStack()

    def seed(self) -> int:
        """Of the initial values of rows that were never written."""
        return int(snapshot_header(self._files[0])["seed"])

    def written(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Bounds of rows from `first` to `last` of the whole table, beside which none was ever written."""
        for begin, end in self._opened()[0].written():
            bounds = max(first, self.first + begin), min(last, self.first + end)
            if bounds[0] < bounds[1]:
                yield bounds

    def read(self, rows: Tensor) -> Mapping[str, Tensor]:
        saved, initial = self._opened()
        records = torch.empty(rows.numel(), saved.record.num_bytes, dtype=torch.uint8)
        saved.read(rows, records, initial)
        return saved.record.views(records)

    def close(self) -> None:
        self._open = None
        self._stack.close()

    def _opened(self) -> tuple[SnapshotReader, FirstValues]:
        if self._open is not None:
            return self._open
        base, *changes = self._files
        path = base
        if changes:
            folder = tempfile.TemporaryDirectory(prefix="tritonemb-", ignore_cleanup_errors=True)
            path = Path(self._stack.enter_context(folder)) / f"table{ROWS}"
            restore(path, base, changes)
        rows = self._stack.enter_context(SnapshotReader(path))
        header, (row, num_rows, column, _) = rows.header, self.rectangle
        found = (header["table"], header["row_origin"], header["num_rows"], header["column_origin"])
        if found != (self._table, row, num_rows, column):
            raise StorageError(
                f"{base} is a snapshot of table {header['table']!r}, not of the part of table {self._table!r} that "
                "should be there; use another checkpoint"
            )
        self._open = rows, FirstValues(rows.record, header["seed"], self.bound, row, column)
        return self._open


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


class TensorReader:
    """Rows out of a checkpoint's tensors, of which a piece at a time is in memory, as they were written.

    Args:
        path: the checkpoint.
        prefix: of their names.
        entries: by field.
    """

    def __init__(self, path: Path, prefix: str, entries: Mapping[str, TensorStorageMetadata]) -> None:
        self._fields = {name: _Pieces(path, f"{prefix}.{name}", entry) for name, entry in entries.items()}

    def seed(self, bound: float) -> int | None:
        return None

    def chunks(self, first: int, last: int, step: int) -> Iterator[Tensor]:
        return dense_chunks(first, last, step)

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
        # The columns in the most pieces have the smallest ones, so the least of the others is read in vain.
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
        self._first, last = self._edges[number - 1], self._edges[number]
        self._piece = torch.empty((last - self._first, *self._size[1:]), dtype=self._dtype)
        shards = TableShards(self._size, self._dtype, [LocalShard(self._piece, self._first)])
        ignore_single_process_warning()
        load({self._name: shards}, checkpoint_id=self._path, no_dist=True)
