"""Snapshots of a table's file: whole ones, those of changes only, and the way back.

A file of changes has a header page, which names the snapshot it follows, then groups: a page of up to `_GROUP` block
numbers, then those blocks as they stand in the table's file. Every page has a checksum.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tritonemb.storage import header as headers
from tritonemb.storage.apart import apart
from tritonemb.storage.blocks import BUFFER_BYTES, Blocks
from tritonemb.storage.clone import clone_or_copy
from tritonemb.storage.file import PageFile, aside, create, give_name, write_page
from tritonemb.storage.header import Identity
from tritonemb.storage.lanes import borrow
from tritonemb.storage.layout import PAGE_BYTES, PAYLOAD_BYTES, Layout
from tritonemb.storage.scan import scan
from tritonemb.storage.store import StorageError, advice

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
