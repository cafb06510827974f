"""Reads checkpoints: the manifest, tensors in the format of `torch.distributed.checkpoint`, rows of tables on disk.

Rows of saved tables are read a piece at a time: out of a table's files or tensors, into a table on disk or into memory.
"""

from __future__ import annotations

import heapq
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tritonemb.comm.group import RankGroup
from tritonemb.sharding.sharded_tensor import LocalShard, Rectangle, TableShards, refuse_gaps
from tritonemb.storage import DiskRows, InitialValues, SnapshotReader, StorageError, restore, snapshot_header
from tritonemb.tables.cached_table import CHUNK_BYTES, CachedTable
from tritonemb.training.checkpoint.all_ranks import ignore_single_process_warning, on_all_ranks
from tritonemb.training.checkpoint.files import MANIFEST, ROWS, checksum, describe, read_manifest_text, size_of
from tritonemb.training.checkpoint.writer import describe_part, split_tables

MAX_LISTED = 20


def read_manifest(path: str | Path, group: RankGroup | None = None) -> dict[str, Any]:
    """What `trainer.json` of a checkpoint says, after a check, which the ranks of a group share, that it is whole.

    Raises:
        FileNotFoundError, ValueError: there is none, it is damaged, or it is of a format that this version cannot read;
            on every rank.
    """
    path, group = Path(path), RankGroup() if group is None else group
    found: dict[str, Any] = {}

    def read() -> int:
        found["text"], found["manifest"] = read_manifest_text(path)
        return zlib.crc32(found["text"].encode())

    if len(set(on_all_ranks(group, read))) > 1:
        raise ValueError(f"the ranks find different checkpoints at {path}; it must be on a file system that they share")
    manifest: dict[str, Any] = found["manifest"]
    files = sorted(manifest["files"].items(), key=lambda entry: -entry[1][0])  # large and small ones for each rank
    on_all_ranks(group, lambda: _check_files(path, dict(files[group.rank :: group.size])))
    return manifest


def stored_tensors(path: str | Path, group: RankGroup | None = None) -> dict[str, TensorStorageMetadata]:
    """Names, shapes and dtypes of a checkpoint's tensors, those of tables that are files among them; each rank of a
    group reads them itself.
    """
    found: dict[str, Any] = {}

    def read() -> None:
        found.update(FileSystemReader(path).read_metadata().state_dict_metadata)
        for prefix, table in saved_tables(Path(path)).items():
            for field, (dtype, size) in table["fields"].items():
                properties = TensorProperties(getattr(torch, dtype))
                found[f"{prefix}.{field}"] = TensorStorageMetadata(properties, torch.Size(size), [])

    on_all_ranks(group, read)
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def saved_tables(path: Path) -> dict[str, dict[str, Any]]:
    """What a checkpoint's manifest, if it has one, says of the tables that are files, by the prefix of their names."""
    there = (path / MANIFEST).is_file()
    return read_manifest_text(path)[1].get("tables", {}) if there else {}


def load_tensors(
    path: str | Path, tensors: dict[str, Tensor], ignore: tuple[str, ...] = (), group: RankGroup | None = None
) -> None:
    """Read a checkpoint into `tensors`, in place.

    Args:
        tensors: this rank's, whole ones or parts (`TableShards`, DTensors), however they were saved. The table that an
            `DiskTensor` refers to adopts other rows, when all else has been read.
        ignore: beginnings of names that may be in the checkpoint alone.
        group: ranks that load it together; a tensor of the checkpoint need not be on all of them.

    Raises:
        ValueError: names, shapes or dtypes differ, on any rank; all differences are listed, and nothing has been read
            then. Every rank raises it.
        StorageError: a file of a table is missing, damaged, or of another table, or there is no room for its rows;
            no table on disk has been changed then, and nothing else if there are only such tables in the checkpoint.
    """
    path = Path(path)
    stored = stored_tensors(path, group)
    own = {name: describe(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    problems = _differences(stored, on_all_ranks(group, lambda: own), ignore)
    if problems:
        more = len(problems) - MAX_LISTED
        listed = "\n  ".join(problems[:MAX_LISTED] + [f"and {more} more"] * (more > 0))
        raise ValueError(f"checkpoint {path} is of another model or optimizer:\n  {listed}")

    fresh: dict[CachedTable, DiskRows] = {}
    try:
        on_all_ranks(group, lambda: _load(path, tensors, stored, fresh))
    except BaseException:
        for store in fresh.values():
            store.close()
        raise
    for table, store in fresh.items():
        table.replace_store(store)


def _load(
    path: Path,
    tensors: dict[str, Tensor],
    stored: Mapping[str, TensorStorageMetadata],
    fresh: dict[CachedTable, DiskRows],
) -> None:
    """Read into memory, and add rows that tables on disk are to adopt once nothing can go wrong any more, anywhere."""
    saved = saved_tables(path)
    in_memory, on_disk = split_tables(tensors)
    for part, prefix in {part: prefix for prefix, table in on_disk.items() for part in table.parts}.items():
        fresh[part] = _restored(path, part, prefix, saved, stored)
    plain = {name: tensor for name, tensor in in_memory.items() if name.rpartition(".")[0] not in saved}
    if plain:
        ignore_single_process_warning()
        load(plain, checkpoint_id=path, no_dist=True)  # each rank reads for itself
    for prefix, entry in saved.items():
        targets = {name: in_memory[f"{prefix}.{name}"] for name in entry["fields"] if f"{prefix}.{name}" in in_memory}
        if targets:
            with closing(FileReader(path, entry)) as reader:
                fill_tensors(reader, targets)


def _restored(
    path: Path,
    table: CachedTable,
    prefix: str,
    saved: Mapping[str, Mapping[str, Any]],
    stored: Mapping[str, TensorStorageMetadata],
) -> DiskRows:
    """The rows of a table on disk, or of a part of one: its own files, where the same part was saved."""
    if prefix not in saved:
        entries = {field.name: stored[f"{prefix}.{field.name}"] for field in table.record.fields}
        return write_rows(TensorReader(path, prefix, entries), table)
    own = describe_part(table.config)
    for part in saved[prefix]["parts"]:
        if all(part[name] == value for name, value in own.items()):
            base, *changes = [path / name for name in part["files"]]
            return table.restore_store(base, changes)
    with closing(FileReader(path, saved[prefix])) as reader:
        return write_rows(reader, table)


def _check_files(path: Path, files: Mapping[str, Any]) -> None:
    for name, (size, crc) in files.items():
        if (there := size_of(path / name)) != size:
            raise ValueError(
                f"{path} is damaged: {name} has {'vanished' if there is None else f'{there:,} bytes'} "
                f"instead of {size:,} bytes; use another checkpoint"
            )
        if checksum(path / name) != crc:
            raise ValueError(f"{path} is damaged: {name} does not have the checksum that was written; use another one")


def _differences(
    stored: Mapping[str, TensorStorageMetadata], every: list[dict[str, str]], ignore: tuple[str, ...]
) -> list[str]:
    """Between a checkpoint and what the ranks have, each named by its shape and dtype."""
    problems = []
    wanted: dict[str, dict[str, int]] = {}  # name: what it is: the first rank that says so
    for rank, own in enumerate(every):
        for name, here in own.items():
            wanted.setdefault(name, {}).setdefault(here, rank)
    for name in sorted(wanted.keys() | stored.keys()):
        if name not in stored:
            problems.append(f"{name} is not in the checkpoint")
        elif name in wanted:
            there = describe(stored[name].size, stored[name].properties.dtype)
            for here, rank in wanted[name].items():
                where = "here" if len(wanted[name]) == 1 else f"on rank {rank}"
                problems += [f"{name} is {there} in the checkpoint, {here} {where}"] if here != there else []
        elif not name.startswith(ignore):
            problems.append(f"{name} is in the checkpoint only")
    return problems


def write_rows(reader: FileReader | TensorReader, table: CachedTable) -> DiskRows:
    """Rows of a whole table as ones that a table on disk, or a part of one, can adopt."""
    store = table.empty_store(reader.seed(table.config.bound))
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
def fill_tensors(reader: FileReader, targets: Mapping[str, Tensor]) -> None:
    """Fill whole tensors, or this rank's shards, of some of a table's fields."""
    shards = [
        (name, shard, shard.first_row, shard.first_row + shard.tensor.shape[0])
        for name, target in targets.items()
        for shard in (target.shards if isinstance(target, TableShards) else (LocalShard(target),))
    ]
    for chunk in dense_chunks(0, max((end for *_, end in shards), default=0), max(1, CHUNK_BYTES // reader.row_bytes)):
        first, last = int(chunk[0]), int(chunk[-1]) + 1
        wanted = [entry for entry in shards if entry[2] < last and first < entry[3]]
        found = reader.read(chunk) if wanted else {}
        for name, shard, begin, end in wanted:
            begin, end = max(first, begin), min(last, end)
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
    """Rows of a whole table, of this entry of a checkpoint's manifest, out of the files of its parts.

    These are opened when they are first needed. Where there are changes to be put onto a snapshot, a file of that is
    made first, among the system's temporary ones. ValueError if the parts do not make up the table.
    """

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        fields = entry["fields"].items()
        self._fields = {name: (getattr(torch, dtype), torch.Size(size)) for name, (dtype, size) in fields}
        self.row_bytes = sum(dtype.itemsize * size[1:].numel() for dtype, size in self._fields.values())
        self._parts = [_TablePart(path, part) for part in entry["parts"]]
        self._sparse = False
        try:
            refuse_gaps(self._fields["weight"][1], [part.rectangle for part in self._parts])
        except ValueError as error:
            raise ValueError(f"{path / MANIFEST} is damaged ({error}); use another checkpoint") from None

    def seed(self, bound: float) -> int:
        """That of the initial values in ± `bound` of rows that `chunks` leaves out; 0 if it leaves out none."""
        seeds = {part.seed() for part in self._parts}
        self._sparse = len(seeds) == 1 and {part.bound for part in self._parts} == {bound}
        return seeds.pop() if self._sparse else 0

    def chunks(self, first: int, last: int, step: int) -> Iterator[Tensor]:
        """int64, ascending, at most `step` at a time: those of the rows `first` to `last` - 1 that are to be read.

        After a call of `seed` that found one for all parts, rows that were never written are left out.
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
        found = {n: torch.empty((rows.numel(), *size[1:]), dtype=dtype) for n, (dtype, size) in self._fields.items()}
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
        self._stack = ExitStack()

    def seed(self) -> int:
        """Of the initial values of rows that were never written."""
        return int(snapshot_header(self._files[0])["seed"])

    def written(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Bounds of rows from `first` to `last` of the whole table, beside which none was ever written."""
        for begin, end in self._rows.written():
            bounds = max(first, self.first + begin), min(last, self.first + end)
            if bounds[0] < bounds[1]:
                yield bounds

    def read(self, rows: Tensor) -> Mapping[str, Tensor]:
        saved, (row, _, column, _) = self._rows, self.rectangle
        records = torch.empty(rows.numel(), saved.record.num_bytes, dtype=torch.uint8)
        saved.read(rows, records, InitialValues(saved.record, saved.header["seed"], self.bound, row, column))
        return saved.record.views(records)

    def close(self) -> None:
        vars(self).pop("_rows", None)
        self._stack.close()

    @cached_property
    def _rows(self) -> SnapshotReader:
        path = base = self._files[0]
        if len(self._files) > 1:
            folder = tempfile.TemporaryDirectory(prefix="tritonemb-", ignore_cleanup_errors=True)
            path = Path(self._stack.enter_context(folder)) / f"table{ROWS}"
            restore(path, base, self._files[1:])
        rows = self._stack.enter_context(SnapshotReader(path))
        header, (row, num_rows, column, _) = rows.header, self.rectangle
        found = (header["table"], header["row_origin"], header["num_rows"], header["column_origin"])
        if found != (self._table, row, num_rows, column):
            raise StorageError(
                f"{base} is a snapshot of table {header['table']!r}, not of the part of table {self._table!r} that "
                "should be there; use another checkpoint"
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


class TensorReader:
    """Rows out of a checkpoint's tensors, by field, of which a piece at a time is in memory, as they were written."""

    def __init__(self, path: Path, prefix: str, entries: Mapping[str, TensorStorageMetadata]) -> None:
        self._fields = {name: _Pieces(path, f"{prefix}.{name}", entry) for name, entry in entries.items()}

    def seed(self, bound: float) -> int:
        return 0

    def chunks(self, first: int, last: int, step: int) -> Iterator[Tensor]:
        return dense_chunks(first, last, step)

    def read(self, rows: Tensor) -> Mapping[str, Tensor]:
        return {name: field.read(int(rows[0]), int(rows[-1]) + 1) for name, field in self._fields.items()}


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
