"""Whole and incremental snapshots of a table's file, and their restoration.

An incremental snapshot is a file of changes: a header page, which names the snapshot it follows, then groups. A group
is an index page of up to `_INDEX_CAPACITY` block numbers, and copies of these blocks. Each page has a checksum.
"""

import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tritonemb.memory import DTYPES
from tritonemb.storage import io, page_table, store
from tritonemb.storage.aio import PAGE_BYTES, IoContext, PageFile
from tritonemb.storage.page_table import BUFFER_BYTES, TRAILER_BYTES, BlockFile, BlockRequest, FileLayout, runs
from tritonemb.storage.store import Field, Initializer, Record, StorageError, cpu_kernels, storage_errors
from tritonemb.storage.threads import shielded
from tritonemb.utils import Closeable, on_error

_INDEX_CAPACITY = (PAGE_BYTES - TRAILER_BYTES) // 8 - 1  # block numbers per index page, after their count
_INDEX_SEED = 1 << 62  # seed of an index page's checksum, plus the group's number; larger than any block's number
_FILE_KEYS = ("snapshot", "after", "changed", "places", "holes")  # keys of a header besides the table's identity


def take_snapshot(blocks: BlockFile, identity: io.TableIdentity, path: Path, parent: str | None) -> str:
    """Write a snapshot and flush it; return its name. With `parent`, write only the changes since that snapshot.

    Raise StorageError, and remove the file, if it cannot be written.
    """
    name, count = uuid.uuid4().hex, blocks.page_table.count
    subject = f"table {identity.table!r}: snapshot {path}{'' if parent is None else ' of changes'}"
    with storage_errors(f"{subject} could not be written", "check the disk"), io.new_file(path) as file:
        if parent is None:
            io.reflink_or_copy(blocks.file, file)
            file.resize(blocks.layout.file_bytes(count))
            io.write_page(file, identity.header(blocks.layout.page_bytes, name, count, blocks.holes))
        else:
            changed_blocks = _write_changes(file, blocks)
            file_fields = {"page_bytes": blocks.layout.page_bytes, "snapshot": name, "places": count}
            changes_fields = {"holes": blocks.holes, "after": parent, "changed": changed_blocks}
            io.write_page(file, io.encode_header(io.CHANGES, identity.as_json() | file_fields | changes_fields))
    return name


def _write_changes(file: PageFile, blocks: BlockFile) -> int:
    layout, changed_blocks = blocks.layout, blocks.changed.blocks()
    size = _group_size(layout)
    file.resize(_group_offset(layout, changed_blocks.size))
    with closing(IoContext.free.get()) as context:
        buffer = context.reserve(PAGE_BYTES + size * layout.block_bytes)
        for group, first in enumerate(range(0, changed_blocks.size, size)):
            block_numbers = changed_blocks[first : first + size]
            count = block_numbers.size
            end, stop = layout.offset(count), layout.file_bytes(count)
            blocks.load(context, block_numbers, PAGE_BYTES)
            buffer.array[end:stop] = 0
            index = buffer.array[:PAGE_BYTES].view(np.int64)
            index[:] = 0
            index[: 1 + count] = count, *block_numbers
            cpu_kernels("pages").seal(buffer.address, np.array([_INDEX_SEED + group]), 1, PAGE_BYTES)
            file.write(buffer.view[:stop], _group_offset(layout, first))
    return int(changed_blocks.size)


def restore(path: str | Path, base: str | Path, increments: Sequence[str | Path] = ()) -> None:
    """Create a table's file from a whole snapshot and the incremental snapshots that follow it, in order.

    The last of these becomes the table's last snapshot. The file is created atomically. Raise StorageError if a
    snapshot is missing, damaged or of another table, if one does not follow its predecessor, or if the file cannot be
    written.

    Args:
        path: new file; a reflink copy where the file system supports that.
        base: whole snapshot.
        increments: files that `snapshot(changes_only=True)` has written since.
    """
    path, base = Path(path), Path(base)
    if path.exists():
        raise StorageError(f"file {path} exists already; remove it, or restore to another name")
    shielded(lambda: _restore(path, base, [Path(increment) for increment in increments]))


def _restore(path: Path, base: Path, increments: Sequence[Path]) -> None:
    source, header = io.open_file(f"snapshot {base}", base, io.ROWS)
    with closing(source):
        if header["snapshot"] is None and increments:
            raise StorageError(f"{base} is not a snapshot, or was modified since; changes cannot be applied to it")
        with storage_errors(f"file {path} could not be written", "check the disk"), io.new_file(path) as file:
            io.reflink_or_copy(source, file)
            if increments:
                blocks = BlockFile(file, header)
                for increment in increments:
                    header = _apply(increment, blocks, header)
                assert blocks.page_table.count == header["places"]
                blocks.check_holes(header)
                file.resize(blocks.layout.file_bytes(header["places"]))
            full_header = {key: header[key] for key in header if key not in ("after", "changed")}
            io.write_page(file, io.encode_header(io.ROWS, full_header))


def _apply(path: Path, blocks: BlockFile, base_header: dict[str, Any]) -> dict[str, Any]:
    """Apply a file of changes to a copy of the snapshot with this header; return the header of the changes."""
    layout, (file, header) = blocks.layout, io.open_file(f"snapshot {path}", path, io.CHANGES)
    subject = f"the changes {path}"
    with closing(file):
        # Check that the changes follow the snapshot.
        identities = [{key: value for key, value in h.items() if key not in _FILE_KEYS} for h in (base_header, header)]
        if identities[0] != identities[1]:
            raise StorageError(f"{subject} belong to another table or optimizer than their base")
        if header["after"] != base_header["snapshot"]:
            raise StorageError(f"{subject} do not follow the previous snapshot; pass all increments, in order")
        changed_blocks, size, pages = header["changed"], _group_size(layout), cpu_kernels("pages")
        if file.size() != (expected := _group_offset(layout, changed_blocks)):
            raise StorageError(f"snapshot {path} has {file.size():,} bytes, expected {expected:,}; use another one")
        # Read and check each group, and write its blocks.
        with closing(IoContext.free.get()) as context:
            buffer = context.reserve(PAGE_BYTES + size * layout.block_bytes)
            for group, first in enumerate(range(0, changed_blocks, size)):
                count = min(size, changed_blocks - first)
                end = layout.file_bytes(count)
                with storage_errors(f"{subject} cannot be read", "use other files"):
                    file.read(buffer.view[:end], _group_offset(layout, first))
                block_numbers = buffer.array[:PAGE_BYTES].view(np.int64)[1 : 1 + count].copy()
                num_valid = pages.check(buffer.address, np.array([_INDEX_SEED + group]), 1, PAGE_BYTES)
                if num_valid:
                    num_valid += pages.check(buffer.address + PAGE_BYTES, block_numbers, *layout.pages)
                if num_valid <= count:
                    raise StorageError(f"{subject} are damaged: a page does not match its checksum; use other files")
                blocks.store(context, block_numbers, PAGE_BYTES)
        return header


def _group_size(layout: FileLayout) -> int:
    """Return the blocks per group, such that a group fits a buffer, and has a multiple of `PAGE_BYTES`."""
    multiple = PAGE_BYTES // layout.page_bytes
    return max(1, min(_INDEX_CAPACITY, (BUFFER_BYTES - PAGE_BYTES) // layout.block_bytes) // multiple) * multiple


def _group_offset(layout: FileLayout, first: int) -> int:
    """Return the offset of the group that begins with change `first`; for `n`, the size of a file of `n` changes."""
    return PAGE_BYTES * -(-first // _group_size(layout)) + layout.file_bytes(first)


def snapshot_header(path: str | Path) -> dict[str, Any]:
    """Return the header of a snapshot: `TableIdentity.as_json`, its name, and its parent's. Raise StorageError if
    invalid."""
    file, header = io.open_file(f"snapshot {path}", Path(path), io.ROWS, io.CHANGES)
    file.close()
    return header


class SnapshotReader(Closeable):
    """Reader of the rows of a whole snapshot, which other readers may share. Raise StorageError if it is missing or
    damaged."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

        def open_blocks() -> tuple[dict[str, Any], BlockFile]:
            file, header = io.open_file(f"snapshot {path}", self.path, io.ROWS)
            with on_error(file.close):
                return header, BlockFile(file, header)

        self.header, self._blocks = shielded(open_blocks)
        self.num_rows: int = self.header["num_rows"]
        fields = (Field(name, DTYPES[dtype], *layout) for name, dtype, *layout in self.header["fields"])
        self.record = Record(tuple(fields), self.header["record_bytes"])
        self._in_use = threading.Lock()  # a cancelled read may still run at `close`

    def read(self, rows: Tensor, records: Tensor, initializer: Initializer) -> None:
        """Fill `records` with the records of the rows, and wait; for arguments see `DiskRows.read`.

        Rows that were never written get values from `initializer`. Raise StorageError if the file is damaged.
        """
        store.check_requests([(self.header["table"], self.num_rows, self.record, rows, records)])

        def read() -> np.ndarray:
            with self._in_use:
                request = BlockRequest(self._blocks, rows.numpy(), records.data_ptr(), write=False)
                return page_table.move_blocks([request])[0].flags

        store.fill_unwritten(shielded(read), rows, records, initializer)

    def written(self) -> Iterator[tuple[int, int]]:
        """Yield bounds of ranges of rows, ascending, that include all rows ever written."""
        size = self._blocks.layout.rows_per_block
        for blocks in self._blocks.page_table.blocks():
            firsts, lasts = runs(blocks)
            for first, last in zip(blocks[firsts].tolist(), blocks[lasts - 1].tolist(), strict=True):
                yield first * size, min((last + 1) * size, self.num_rows)

    def close(self) -> None:
        with self._in_use:
            self._blocks.file.close()
