"""The file of a table on disk: rows are read and written by one thread at a time, which waits for the disk."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tritonemb.storage.block_file import BlockFile
from tritonemb.storage.format import ROWS, FileLayout, TableIdentity, check_identity, check_size, open_file
from tritonemb.storage.io import write_page
from tritonemb.storage.page_table import ChangedBlocks
from tritonemb.storage.snapshot import write_changes, write_whole
from tritonemb.storage.store import Initializer, StorageError, fill_unwritten
from tritonemb.storage.threads import IoThreads


class RowFile:
    """The operations of a `DiskRows` on its file, which is opened, checked and locked.

    One thread at a time may call those that are not for any thread.

    Args:
        path: of the file.
        identity: of the table.
        initializer: gives rows that were never written their values.
        num_threads: of threads of the table's own, see `IoContext.submit`; none by default.

    Attributes:
        failure: the error after which the file cannot be used; None while there is none.
        last_snapshot: the name of the snapshot that changes are relative to, if there is one.

    Raises:
        StorageError: as `DiskRows.open`.
    """

    def __init__(
        self, path: Path, identity: TableIdentity, initializer: Initializer, num_threads: int | None = None
    ) -> None:
        what = f"table {identity.table!r}: file {path}"
        self.file, header = open_file(what, path, ROWS, writable=True)
        try:
            check_identity(header, identity, path)
            check_size(what, self.file, header)
            if not self.file.lock():
                raise StorageError(f"{what} is open for another table or process; close it there first")
            self._threads = None if num_threads is None else IoThreads(num_threads)
            self._blocks = BlockFile(identity.table, self.file, FileLayout.of(header), self._threads)
            self._changes = ChangedBlocks(self._blocks.layout.num_blocks)
        except BaseException as error:
            self.file.close()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise StorageError(f"{what} cannot be opened: {error}") from error
            raise
        self.identity, self._initializer, self._changes_lock = identity, initializer, threading.Lock()
        self.last_snapshot, self._is_final = header["snapshot"], header["places"] is not None
        self.failure: StorageError | None = None

    def read(self, rows: Tensor, records: Tensor) -> None:
        """Fill `records` with the records of the rows."""
        written = self._blocks.read(rows.numpy(), records.data_ptr())
        fill_unwritten(written, rows, records, self._initializer)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Write the records of the rows; an error is the table's failure."""
        if rows.numel() == 0:
            return
        request = self._blocks.layout.request(rows.numpy())
        with self.fail_on_error("a write has failed"):
            if self._is_final:
                self._write_header(None)
                self._is_final = False
            with self._changes_lock:
                allocation = self._blocks.allocate(request.blocks)
                self._changes.add(request.blocks)
            self._blocks.write(rows.numpy(), request, allocation, records.data_ptr())

    def sync(self) -> None:
        """Flush what was written to the disk."""
        # The system reports a failure once, and may have dropped what it could not write.
        with self.fail_on_error("what was written could not be brought to the disk"):
            self.file.sync()

    def finalize(self) -> None:
        """Flush the file, and then its header, which says how many blocks it has."""
        self.sync()
        if not self._is_final:
            count = self._blocks.page_table.count
            with self.fail_on_error("the end of the file could not be written"):
                self.file.resize(self._blocks.layout.file_bytes(count))
                self._write_header(count)

    def take_snapshot(self, path: Path, changes_only: bool) -> None:
        """See `DiskRows.snapshot`."""
        self.sync()
        with self._changes_lock:
            changed = self._changes.blocks()
        name = uuid.uuid4().hex
        if changes_only:
            write_changes(path, self._blocks, self.identity, changed, str(self.last_snapshot), name)
        else:
            write_whole(path, self._blocks, self.identity, name)
        self.last_snapshot = name
        with self._changes_lock:
            self._changes.clear()

    def changed_pages(self) -> Tensor:
        """int64, ascending: pages of the file written since the last snapshot; for any thread."""
        size = self._blocks.layout.pages_per_block
        with self._changes_lock:
            positions = np.sort(self._blocks.page_table.find(self._changes.blocks()))
        pages = 1 + positions[:, None] * size + np.arange(size)
        return torch.from_numpy(pages.reshape(-1))

    @contextmanager
    def fail_on_error(self, what: str) -> Iterator[None]:
        """An error in the block is the table's failure."""
        try:
            yield
        except StorageError as failure:
            self.failure = failure
            raise
        except BaseException as error:
            self.failure = StorageError(
                f"table {self.identity.table!r}, file {self.file.path}: {what}: {error}; check the disk, then restore "
                "the table from a snapshot"
            )
            raise self.failure from error

    def close(self) -> None:
        self.file.close()
        if self._threads is not None:
            self._threads.close()

    def _write_header(self, num_blocks: int | None) -> None:
        with self.fail_on_error("the header could not be written"):
            write_page(self.file, self.identity.header(num_blocks=num_blocks))
            self.file.sync()
