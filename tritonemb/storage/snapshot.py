"""Snapshots of a table's file: whole ones, those of changes only, and the way back.

A file of changes has a header page, which names the snapshot it follows, then groups: a page of up to `_GROUP` block
numbers, then those blocks as they stand in the table's file. Every page has a checksum.

Rows out of a snapshot's file, which is left as it is and may be read by many.

Copies of files with holes: copy-on-write clones where the file system makes such, else their written parts.

What tells a file of rows from a damaged or another one, holes or no holes.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.storage import format as headers
from tritonemb.storage.block_file import BUFFER_BYTES, Blocks
from tritonemb.storage.format import PAYLOAD_BYTES, Identity, Layout, runs
from tritonemb.storage.io import PAGE_BYTES, PageFile, aside, borrow, buffer_of, create, give_name, write_page
from tritonemb.storage.page_table import scan
from tritonemb.storage.store import Field, Initial, Record, StorageError, advice, check_request, fill_never_written
from tritonemb.storage.threads import apart, shared_threads

_NUMBERS = PAYLOAD_BYTES // 8 - 1  # that a group's first page has room for, behind their count
_INDEX_SEED = 1 << 62  # of that page's checksum, to which its place is added: no page of rows has such a number


def new_name() -> str:
    """Of a snapshot; no other has it."""
    return uuid.uuid4().hex


def write_whole(path: Path, blocks: Blocks, identity: Identity, name: str) -> None:
    """Write a snapshot of a table's file, which says its own name.

    Raises:
        StorageError: it cannot be written; nothing is left of it.
    """

    def write() -> PageFile:
        file = create(aside(path), 0)
        try:
            count = blocks.places.count
            clone_or_copy(blocks.file, file)
            file.resize(blocks.layout.file_bytes(count))
            state = headers.State(snapshot=name, places=count)
            write_page(file, headers.encode(headers.ROWS, identity.as_json() | state))
        except BaseException:
            file.close()
            raise
        return file

    _finish(path, f"table {identity.table!r}: snapshot {path}", write)


def write_changes(path: Path, blocks: Blocks, identity: Identity, changed: np.ndarray, after: str, name: str) -> None:
    """Write the changed blocks of a table's file, int64, ascending.

    Raises:
        StorageError: they cannot be read or written; nothing is left of the file.
    """
    from tritonemb.kernels.cpu.pages import seal

    layout = blocks.layout
    size = _group_size(layout)

    def write() -> PageFile:
        file = create(aside(path), _changes_bytes(layout, changed.size))

        try:
            with borrow() as lane:
                for group in range(-(-changed.size // size)):
                    numbers = changed[group * size : (group + 1) * size]
                    end = PAGE_BYTES + numbers.size * layout.block_bytes
                    buffer = lane.make_room(end)
                    blocks.load(lane, numbers, PAGE_BYTES)
                    index = buffer.array[:PAGE_BYTES].view(np.int64)
                    index[:] = 0
                    index[0] = numbers.size
                    index[1 : 1 + numbers.size] = numbers
                    seal(buffer.address, np.array([_INDEX_SEED + group]), 1)
                    file.write(buffer.view[:end], _group_offset(layout, group))
            more = {"after": after, "snapshot": name, "changed": int(changed.size), "places": blocks.places.count}
            write_page(file, headers.encode(headers.CHANGES, identity.as_json() | more))
        except BaseException:
            file.close()
            raise
        return file

    _finish(path, f"table {identity.table!r}: snapshot {path} of changes", write)


def restore(path: str | Path, base: str | Path, increments: Sequence[str | Path] = ()) -> None:
    """Make a table's file out of a snapshot and the snapshots of changes that follow it, in their order.

    The table can go on from there: what it was restored from is its last snapshot. The file has its name only when it
    is whole and on the disk.

    Args:
        path: of the file; there must be none of that name.
        base: a whole snapshot, of which a copy-on-write clone is made where the file system makes such.
        increments: what `snapshot(changes_only=True)` has written since.

    Raises:
        StorageError: a file is missing, damaged or of another table, one does not follow the one before, or the file
            cannot be written. Nothing is left of it then.
    """
    path, base = Path(path), Path(base)
    if path.exists():
        raise StorageError(f"there is a file {path} already; remove it, or restore to another name")

    def write() -> PageFile:
        source = headers.open_file(f"snapshot {base}", base)
        try:
            header = headers.read(f"snapshot {base}", source, headers.ROWS)
            layout = Layout(header["num_rows"], header["record_bytes"])
            headers.refuse_size(header, source.size(), layout, f"snapshot {base}")
            if header["snapshot"] is None and increments:
                raise StorageError(f"{base} is no snapshot, or was written to since; changes cannot be put onto it")
            file = create(aside(path), 0)
            try:
                clone_or_copy(source, file)
                if increments:
                    blocks = Blocks(header["table"], file, layout, scan(header["table"], file, layout))
                    for increment in increments:
                        header = _apply(Path(increment), blocks, header)
                    assert blocks.places.count == header["places"]
                    file.resize(layout.file_bytes(header["places"]))
                identity = {key: value for key, value in header.items() if key not in ("after", "changed")}
                write_page(file, headers.encode(headers.ROWS, identity))
            except BaseException:
                file.close()
                raise
            return file
        finally:
            source.close()

    apart(lambda: _finish(path, f"file {path}", write))


def _apply(path: Path, blocks: Blocks, before: dict[str, Any]) -> dict[str, Any]:
    """Put a file of changes onto the file of `blocks`, which is as the snapshot `before` says; the changes' header."""
    layout, file = blocks.layout, headers.open_file(f"snapshot {path}", path)
    try:
        header = headers.read(f"snapshot {path}", file, headers.CHANGES)
        identities = [{key: value for key, value in h.items() if key not in _OWN} for h in (before, header)]
        if identities[0] != identities[1]:
            raise StorageError(f"the changes {path} are of another table than their base, or of another optimizer")
        if header["after"] != before["snapshot"]:
            raise StorageError(
                f"the changes {path} do not follow the snapshot before them; give all of them, in their order"
            )
        _refuse_size(file, _changes_bytes(layout, header["changed"]))
        size = _group_size(layout)

        with borrow() as lane:
            for group in range(-(-header["changed"] // size)):
                count = min(size, header["changed"] - group * size)
                end = PAGE_BYTES + count * layout.block_bytes
                buffer = lane.make_room(end)
                try:
                    file.read(buffer.view[:end], _group_offset(layout, group))
                except (OSError, EOFError) as error:
                    raise StorageError(f"the changes {path} cannot be read: {error}; use others") from error
                numbers = buffer.array[:PAGE_BYTES].view(np.int64)[1 : 1 + count].copy()
                _check_group(path, buffer.address, group, numbers, layout)
                blocks.put(lane, numbers, PAGE_BYTES)
        return header
    finally:
        file.close()


def _check_group(path: Path, address: int, group: int, numbers: np.ndarray, layout: Layout) -> None:
    from tritonemb.kernels.cpu.pages import check

    index_is_whole = check(address, np.array([_INDEX_SEED + group]), 1) == 1
    if not index_is_whole or check(
        address + PAGE_BYTES, numbers, layout.pages_per_block
    ) < numbers.size:  # fmt: skip
        raise StorageError(f"the changes {path} are damaged: a checksum is not that of its page; use others")


_OWN = ("snapshot", "after", "changed", "places")  # what a header says of its file, beside whose rows they are


def _group_size(layout: Layout) -> int:
    """Blocks in a group, which with its first page fits a buffer."""
    return max(1, min(_NUMBERS, (BUFFER_BYTES - PAGE_BYTES) // layout.block_bytes))


def _group_offset(layout: Layout, group: int) -> int:
    return PAGE_BYTES + group * (PAGE_BYTES + _group_size(layout) * layout.block_bytes)


def _changes_bytes(layout: Layout, changed: int) -> int:
    groups = -(-changed // _group_size(layout))
    return PAGE_BYTES * (1 + groups) + changed * layout.block_bytes


def _finish(path: Path, what: str, write: Callable[[], PageFile]) -> None:
    """Write a file beside its place, bring it to the disk, and give it its name."""
    try:
        try:
            file = write()
            try:
                file.sync()
            finally:
                file.close()
            give_name(path, replace=True)
        except BaseException:
            aside(path).unlink(missing_ok=True)
            raise
    except StorageError:
        raise
    except (OSError, EOFError, OverflowError) as error:
        raise StorageError(f"{what} could not be written: {error}; {advice(error, 'check the disk')}") from error


def _refuse_size(file: PageFile, expected: int) -> None:
    if file.size() != expected:
        raise StorageError(f"snapshot {file.path} has {file.size():,} bytes instead of {expected:,}; use another one")


def snapshot_header(path: str | Path) -> dict[str, Any]:
    """What the header of a snapshot says, be it of a whole table or of changes: see `Identity.as_json`, `snapshot`
    its own name, `after` that of the snapshot that changes follow.

    Raises:
        StorageError: the file cannot be read, or has no such header.
    """
    what = f"snapshot {path}"
    file = headers.open_file(what, Path(path))
    try:
        return headers.read(what, file, headers.ROWS, headers.CHANGES)
    finally:
        file.close()


class SavedRows:
    """The rows of a whole snapshot.

    Args:
        path: of its file.

    Attributes:
        header: what the file says of itself, see `snapshot_header`.
        record: the layout of a row.

    Raises:
        StorageError: there is no such file, it is damaged, of another format, or holds changes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header, self._blocks = apart(lambda: _open(self.path))
        self.num_rows: int = self.header["num_rows"]
        fields = [
            Field(name, getattr(torch, dtype), size, offset, one_a_row)
            for name, dtype, size, offset, one_a_row in self.header["fields"]
        ]
        self.record = Record(tuple(fields), self.header["record_bytes"])
        self._in_use = threading.Lock()  # what was given up may read still when the file is to be closed

    def read(self, rows: Tensor, records: Tensor, initial: Initial) -> None:
        """Fill `records` with those of the rows, as `RowStore.read` does, and wait for it.

        Args:
            initial: gives never-written rows the values that they have.

        Raises:
            StorageError: a part of the file cannot be read, or is damaged.
        """
        check_request(self.header["table"], self.num_rows, self.record, rows, records)

        def read() -> np.ndarray:
            with self._in_use:
                return self._blocks.read(rows.numpy(), records.data_ptr())

        fill_never_written(apart(read), rows, records, initial)

    def written(self) -> Iterator[tuple[int, int]]:
        """Bounds of rows, ascending, beside which none was ever written; among them are such, too."""
        size = self._blocks.layout.rows_per_block
        for blocks in self._blocks.places.blocks():
            firsts, lasts = runs(blocks)
            for first, last in zip(blocks[firsts].tolist(), blocks[lasts - 1].tolist(), strict=True):
                yield first * size, min((last + 1) * size, self.num_rows)

    def close(self) -> None:
        with self._in_use:
            self._blocks.file.close()

    def __enter__(self) -> SavedRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path) -> tuple[dict[str, Any], Blocks]:
    """A snapshot's header, and its blocks."""
    what = f"snapshot {path}"
    file = headers.open_file(what, path)
    try:
        header = headers.read(what, file, headers.ROWS)
        layout = Layout(header["num_rows"], header["record_bytes"])
        headers.refuse_size(header, file.size(), layout, what)
        return header, Blocks(header["table"], file, layout, scan(header["table"], file, layout))
    except BaseException:
        file.close()
        raise


fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

COPY_BYTES = 1 << 20  # that each thread copies at once
BATCH = 512  # pieces handed out at once
_FICLONE = 0x40049409  # of Linux: make a file a clone of another one
# No clones on this file system, across two of them, or of such files; or no such call, as the system is not Linux.
_NO_CLONE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM)


def clone_or_copy(source: PageFile, target: PageFile) -> None:
    """Make an empty file as another one is, whose size is a multiple of a page's; holes stay holes.

    Raises:
        OSError, EOFError: what could not be read or written; the target is of no use then.
    """
    if _clone(source, target):
        return
    size = source.size()
    target.resize(size)
    pieces = _parts_to_copy(written_parts(source, size))
    while batch := list(itertools.islice(pieces, BATCH)):
        _copy_all(source, target, batch)


def copy_rows(source: Path, target: Path) -> None:
    """Copy a file of rows, or of changes, as `clone_or_copy` does, and bring the copy to the disk.

    Raises:
        OSError, EOFError: what could not be read or written.
    """

    def copy() -> None:
        with closing(PageFile(source, writable=False)) as old, closing(create(target, 0)) as new:
            clone_or_copy(old, new)
            new.sync()

    apart(copy)


def _clone(source: PageFile, target: PageFile) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.ioctl(target.handle, _FICLONE, source.handle)
    except OSError as error:
        if error.errno not in _NO_CLONE:
            raise
        return False
    return True


def written_parts(file: PageFile, size: int) -> Iterator[tuple[int, int]]:
    """Bounds of what is no hole, in whole pages, ascending; all of the file where the system does not tell."""
    if not hasattr(os, "SEEK_DATA"):
        yield 0, size
        return
    end = 0
    while end < size:
        try:
            begin = os.lseek(file.handle, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
                return
            if error.errno != errno.EINVAL:
                raise
            yield end, size
            return
        begin = begin // PAGE_BYTES * PAGE_BYTES  # blocks of a file system may be smaller
        end = -(-os.lseek(file.handle, begin, os.SEEK_HOLE) // PAGE_BYTES) * PAGE_BYTES
        yield begin, end


def _parts_to_copy(parts: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Pieces of at most `COPY_BYTES`: long parts are cut, near ones read at one go, as to read a hole costs little."""
    first = last = -1
    for begin, end in parts:
        if first >= 0 and end - first <= COPY_BYTES:
            last = end
            continue
        if first >= 0:
            yield first, last
        first, last = begin, end
        while last - first > COPY_BYTES:
            yield first, first + COPY_BYTES
            first += COPY_BYTES
    if first >= 0:
        yield first, last


def _copy_all(source: PageFile, target: PageFile, pieces: list[tuple[int, int]]) -> None:
    shared_threads().run(lambda number: _copy(source, target, *pieces[number]), len(pieces))


def _copy(source: PageFile, target: PageFile, begin: int, end: int) -> None:
    """Copy those pages that are not zero."""
    buffer = buffer_of(end - begin)
    source.read(buffer.view[: end - begin], begin)
    pages = buffer.array[: end - begin].reshape(-1, PAGE_BYTES).view(np.int64)
    written = np.flatnonzero(pages.any(axis=1))
    firsts, lasts = runs(written)
    starts, stops = (written[firsts] * PAGE_BYTES).tolist(), ((written[lasts - 1] + 1) * PAGE_BYTES).tolist()
    for start, stop in zip(starts, stops, strict=True):
        target.write(buffer.view[start:stop], begin + start)


DIGEST_BYTES = 1 << 18  # that are checked at once; a part of the digest's definition
_MASK = (1 << 64) - 1


def digest(path: Path) -> int:
    """64 bits of a file's content, from the CRC-32 of each piece that is not all zeros, and its place.

    Holes are not read, and how a file system stores zeros does not matter. The file's size, a multiple of a page's, is
    no part of it.

    Raises:
        StorageError: the file cannot be read.
    """
    try:
        return apart(lambda: _digest(path))
    except (OSError, EOFError) as error:
        otherwise = "check the disk, or use another copy"
        raise StorageError(f"file {path} cannot be read: {error}; {advice(error, otherwise)}") from error


def _digest(path: Path) -> int:
    file, total = PageFile(path, writable=False), 0
    try:
        size = file.size()

        def of_piece(piece: int) -> int:
            begin = piece * DIGEST_BYTES
            count = min(DIGEST_BYTES, size - begin)
            buffer = buffer_of(DIGEST_BYTES)
            file.read(buffer.view[:count], begin)
            if not buffer.array[:count].any():
                return 0
            return _mix((piece << 32) ^ zlib.crc32(buffer.view[:count]))

        pieces = _digest_pieces(written_parts(file, size))
        while batch := list(itertools.islice(pieces, BATCH)):
            found = [0] * len(batch)

            def work(number: int, batch: list[int] = batch, found: list[int] = found) -> None:
                found[number] = of_piece(batch[number])

            shared_threads().run(work, len(batch))
            total += sum(found)
    finally:
        file.close()
    return total & _MASK


def _digest_pieces(parts: Iterator[tuple[int, int]]) -> Iterator[int]:
    """The pieces that ascending parts of a file lie in, each once."""
    following = 0
    for begin, end in parts:
        first = max(following, begin // DIGEST_BYTES)
        following = max(following, -(-end // DIGEST_BYTES))
        yield from range(first, following)


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014), so that pieces that have changed places do not cancel."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
