"""The rows in a table's file, read and written by one thread at a time, which waits for the disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tritonemb.storage import format as headers
from tritonemb.storage.block_file import Blocks
from tritonemb.storage.format import Identity, Layout
from tritonemb.storage.io import PageFile, write_page
from tritonemb.storage.page_table import ChangedBlocks, Places
from tritonemb.storage.snapshot import new_name, write_changes, write_whole
from tritonemb.storage.store import Initial, StorageError, fill_never_written
from tritonemb.storage.threads import IoThreads


class FileRows:
    """What `DiskRows` does with its file, when its turn has come.

    Args:
        path: of the file.
        file: opened.
        identity: of the table.
        initial: gives never-written rows their values.
        places: where the blocks stand, see `scan`.
        state: what the file's header says of it.
        threads: see `Lane.begin`.

    Attributes:
        failure: what has made the file useless; None while it is good.
        last_snapshot: the name of that which changes are relative to, if there is one.
    """

    def __init__(
        self,
        path: Path,
        file: PageFile,
        identity: Identity,
        initial: Initial,
        places: Places,
        state: headers.State,
        threads: IoThreads | None,
    ) -> None:
        self.path, self.identity, self._initial, self._file, self._threads = path, identity, initial, file, threads
        self._layout = Layout(identity.num_rows, identity.record.num_bytes)
        self._blocks = Blocks(identity.table, file, self._layout, places, threads)
        self._changes, self._changes_lock = ChangedBlocks(self._layout.num_blocks), threading.Lock()
        self.last_snapshot, self._described = state["snapshot"], state["places"] is not None
        self.failure: StorageError | None = None

    @property
    def direct(self) -> bool:
        return self._file.direct

    def read(self, rows: Tensor, records: Tensor) -> None:
        """Fill `records` with those of the rows, as in `RowStore`."""
        written = self._blocks.read(rows.numpy(), records.data_ptr())
        fill_never_written(written, rows, records, self._initial)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Make `records` those of the rows; what goes wrong is the table's failure."""
        if rows.numel() == 0:
            return
        request = self._layout.request(rows.numpy())
        with self.vital("a write has failed"):
            if self._described:
                self._write_header(headers.UNKNOWN)
                self._described = False
            with self._changes_lock:
                placed = self._blocks.place(request.blocks)
                self._changes.add(request.blocks)
            self._blocks.write(rows.numpy(), request, placed, records.data_ptr())

    def sync(self) -> None:
        """Bring what was written to the disk."""
        # The system tells a failure once, and may have dropped what it could not write.
        with self.vital("what was written could not be brought to the disk"):
            self._file.sync()

    def describe(self) -> None:
        """At its end: what is in the file is on the disk, and the header says so."""
        self.sync()
        if not self._described:
            count = self._blocks.places.count
            with self.vital("the end of the file could not be written"):
                self._file.resize(self._layout.file_bytes(count))
                self._write_header({"snapshot": None, "places": count})

    def take_snapshot(self, path: Path, changes_only: bool) -> None:
        """See `DiskRows.snapshot`."""
        self.sync()
        with self._changes_lock:
            changed = self._changes.blocks()
        name = new_name()
        if changes_only:
            write_changes(path, self._blocks, self.identity, changed, str(self.last_snapshot), name)
        else:
            write_whole(path, self._blocks, self.identity, name)
        self.last_snapshot = name
        with self._changes_lock:
            self._changes.clear()

    def changed_pages(self) -> Tensor:
        """int64, ascending: pages of the file written since the last snapshot; for any thread."""
        with self._changes_lock:
            places = np.sort(self._blocks.places.find(self._changes.blocks()))
        pages = 1 + places[:, None] * self._layout.pages_per_block + np.arange(self._layout.pages_per_block)
        return torch.from_numpy(pages.reshape(-1))

    def allocated(self) -> int:
        """Bytes that the file takes; for any thread."""
        return self._file.allocated()

    def has_name(self) -> bool:
        """Whether anybody could open the file again."""
        return self._file.has_name()

    @contextmanager
    def vital(self, what: str) -> Iterator[None]:
        """What goes wrong meanwhile is the table's failure."""
        try:
            yield
        except StorageError as failure:
            self.failure = failure
            raise
        except BaseException as error:
            self.failure = self._error(what, error)
            raise self.failure from error

    def close(self) -> None:
        self._file.close()
        if self._threads is not None:
            self._threads.close()

    def _write_header(self, state: headers.State) -> None:
        try:
            write_page(self._file, headers.encode(headers.ROWS, self.identity.as_json() | state))
            self._file.sync()
        except OSError as error:
            raise self._error("the header could not be written", error) from error

    def _error(self, what: str, error: BaseException) -> StorageError:
        return StorageError(
            f"table {self.identity.table!r}, file {self.path}: {what}: {error}; check the disk, then restore the table "
            "from a snapshot"
        )
