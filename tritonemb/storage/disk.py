"""Rows in a file on disk."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tritonemb.storage import header as headers
from tritonemb.storage.blocks import Blocks
from tritonemb.storage.changes import ChangedBlocks
from tritonemb.storage.file import PageFile, aside, create, give_name, write_page
from tritonemb.storage.header import Identity
from tritonemb.storage.layout import Layout
from tritonemb.storage.places import Places
from tritonemb.storage.record import Record
from tritonemb.storage.scan import scan
from tritonemb.storage.snapshots import new_name, write_changes, write_whole
from tritonemb.storage.store import Initial, Pending, StorageError, check_request
from tritonemb.storage.threads import IoThreads, Operations, refuse_fork


class DiskRows:
    """A `RowStore` in one file: rows that were never written take no room, and read as their initial values.

    Made by `create` or `open`. Pages have checksums. A write that has ended has reached the file; `flush` and
    `snapshot` bring it to the disk. A failed write leaves some of its rows written, so it is the last operation that
    the table takes; a failed read harms nothing but itself. A program's end waits for what was asked for.

    Attributes:
        path: of the file.
        direct: whether the file is read and written past the system's page cache.
    """

    def __init__(
        self, path: Path, file: PageFile, identity: Identity, initial: Initial, places: Places, threads: int | None
    ) -> None:
        self.path, self.direct = path, file.direct
        self.identity, self._initial = identity, initial
        self._layout = Layout(identity.num_rows, identity.record.num_bytes)
        self._threads = None if threads is None else IoThreads(threads)
        self._blocks = Blocks(identity.table, file, self._layout, places, self._threads)
        self._file = file
        self._operations = Operations(f"tritonemb-rows-{identity.table}")
        self._changes, self._changes_lock = ChangedBlocks(self._layout.num_blocks), threading.Lock()
        self._snapshot: str | None = None  # that which `_changes` are relative to
        self._described = False  # whether the file says how much it holds, and which snapshot it is
        self._failure: StorageError | None = None
        self._closed, self._lock, self._process = False, threading.Lock(), os.getpid()
        _OPEN.add(self)
        # Nothing is asked for any more when nobody has the table, so nothing needs to be waited for.
        self._dropped = weakref.finalize(self, _let_go, self._operations, file, self._threads)
        self._dropped.atexit = False

    @classmethod
    def create(
        cls,
        path: str | Path,
        table_name: str,
        num_rows: int,
        record: Record,
        seed: int,
        initial: Initial,
        *,
        row_origin: int = 0,
        column_origin: int = 0,
        threads: int | None = None,
    ) -> DiskRows:
        """A new table, none of whose rows is written yet: takes milliseconds and no room, whatever its size.

        Args:
            path: of the file; there must be none of that name. The folder must be there.
            table_name, num_rows, record, seed, row_origin, column_origin: see `Identity`; stored in the file.
            initial: gives never-written rows their values, from `seed`.
            threads: read and write in so many threads of this table's own; if not given, Linux's asynchronous I/O
                does it without threads, where the file is open for direct I/O, else threads that all tables share.

        Raises:
            ValueError: `num_rows` or `threads` is below 1, or the name too long.
            StorageError: the file cannot be made.
        """
        identity, path = _identity(table_name, num_rows, record, seed, row_origin, column_origin), Path(path)
        if threads is not None and threads < 1:
            raise ValueError(f"table {table_name!r}: threads must be at least 1, got {threads}")
        page = headers.encode(headers.ROWS, identity.as_json() | headers.UNKNOWN)
        layout = Layout(num_rows, record.num_bytes)
        try:
            if path.exists():
                raise StorageError(
                    f"table {table_name!r}: there is a file {path} already; open it, remove it, or choose another name"
                )
            try:
                Places(layout.num_blocks)  # or there would be a file that cannot be opened
                file = create(aside(path), layout.file_bytes(0))
                write_page(file, page)
                file.sync()
                file.close()
                give_name(path, replace=False)
            except BaseException:
                aside(path).unlink(missing_ok=True)
                raise
        except StorageError:
            raise
        except (OSError, OverflowError) as error:
            raise StorageError(
                f"table {table_name!r}: file {path} for {num_rows:,} rows cannot be made: {error}; choose another "
                "folder, or cut the table into smaller parts"
            ) from error
        return cls.open(
            path, table_name, num_rows, record, seed, initial, row_origin=row_origin, column_origin=column_origin,
            threads=threads,
        )  # fmt: skip

    @classmethod
    def open(
        cls,
        path: str | Path,
        table_name: str,
        num_rows: int,
        record: Record,
        seed: int,
        initial: Initial,
        *,
        row_origin: int = 0,
        column_origin: int = 0,
        threads: int | None = None,
    ) -> DiskRows:
        """The table in a file that `create`, `snapshot` or `restore` has written. Arguments as of `create`.

        Raises:
            ValueError: as `create`.
            StorageError: there is no such file, it is damaged, in use, of another format, or of another table, and how
                it differs.
        """
        identity, path = _identity(table_name, num_rows, record, seed, row_origin, column_origin), Path(path)
        what = f"table {table_name!r}: file {path}"
        file = headers.open_file(what, path, writable=True)
        try:
            header = headers.read(what, file, headers.ROWS)
            headers.refuse_other(header, identity, path)
            layout = Layout(num_rows, record.num_bytes)
            headers.refuse_size(header, file.size(), layout, what)
            if not file.lock():
                raise StorageError(f"{what} is open for another table or process; close it there first")
            store = cls(path, file, identity, initial, scan(table_name, file, layout), threads)
        except BaseException as error:
            file.close()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise StorageError(f"{what} cannot be opened: {error}") from error
            raise
        store._snapshot, store._described = header["snapshot"], header["places"] is not None
        return store

    @property
    def num_rows(self) -> int:
        return self.identity.num_rows

    @property
    def record(self) -> Record:
        return self.identity.record

    @property
    def table_name(self) -> str:
        return self.identity.table

    def read(self, rows: Tensor, records: Tensor) -> Pending:
        check_request(self.table_name, self.num_rows, self.record, rows, records)
        return self._ask(lambda: self._read(rows, records))

    def write(self, rows: Tensor, records: Tensor) -> Pending:
        check_request(self.table_name, self.num_rows, self.record, rows, records)
        return self._ask(lambda: self._write(rows, records))

    def flush(self) -> Pending:
        """Bring what was written before to the disk."""
        return self._ask(self._sync)

    def snapshot(self, path: str | Path, changes_only: bool = False) -> Pending:
        """A file of the table as it is behind what was asked for before; later writes leave it alone.

        It is a copy-on-write clone where the file system makes such, else a sparse copy. It is on the disk when this
        has ended, and has its name only when it is whole; what stood there is replaced. A failed snapshot harms
        nothing but itself.

        Args:
            path: of the file; on the same file system, for a clone.
            changes_only: write only what has changed since the last snapshot, of either kind; `restore` puts it onto
                that. A table that was opened from a file that `snapshot` or `restore` has written, and not written to
                by anybody since, has that file for its last snapshot.

        Raises:
            ValueError: `path` is the table's own file.
            StorageError: the table is closed, or has failed. From the `Pending`: the file cannot be written, or there
                is no last snapshot.
        """
        path = Path(path)
        if path.exists() and self.path.exists() and path.samefile(self.path):
            raise ValueError(
                f"table {self.table_name!r}: {path} is the table's own file; name another for its snapshot"
            )
        return self._ask(lambda: self._take_snapshot(path, changes_only))

    @property
    def last_snapshot(self) -> str | None:
        """The name of the snapshot that changes are relative to; None where changes only cannot be saved."""
        return self._snapshot

    def bytes_on_disk(self) -> int:
        """The room that the file takes."""
        return self._file.allocated()

    def changed_pages(self) -> Tensor:
        """int64, ascending: pages of the file written since the last snapshot, or since the table was opened."""
        with self._changes_lock:
            places = np.sort(self._blocks.places.find(self._changes.blocks()))
        pages = 1 + places[:, None] * self._layout.pages_per_block + np.arange(self._layout.pages_per_block)
        return torch.from_numpy(pages.reshape(-1))

    def close(self) -> None:
        """Wait for what has been asked for, bring it to the disk and close the file. A second call does nothing.

        Raises:
            StorageError: a write has failed that nobody has waited for, or the disk has not taken it all.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ending = self._operations.ask(self._describe) if self._failure is None else None
            thread = self._operations.end()
        _OPEN.discard(self)
        if thread is not None:
            thread.join()
        self._dropped()
        if self._failure is not None:
            if not self._failure.told:
                self._failure.told = True
                raise self._failure
        elif ending is not None:
            ending.wait()

    def __enter__(self) -> DiskRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, work: Callable[[], None]) -> Pending:
        refuse_fork(self._process, self.table_name)

        def unless_failed() -> None:
            self._refuse_failed()
            work()

        with self._lock:
            if self._closed:
                raise StorageError(f"table {self.table_name!r}: file {self.path} is closed; open it again")
            self._refuse_failed()
            return self._operations.ask(unless_failed)

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            self._failure.told = True
            raise StorageError(
                f"table {self.table_name!r}: file {self.path} takes nothing more, because a write has failed: "
                f"{self._failure}"
            ) from self._failure

    def _read(self, rows: Tensor, records: Tensor) -> None:
        written = self._blocks.read(rows.numpy(), records.data_ptr())
        never = torch.from_numpy(np.flatnonzero(written == 0))
        if never.numel() == rows.numel() and never.numel():
            self._initial(rows, records)
        elif never.numel():
            initial = torch.empty(never.numel(), self.record.num_bytes, dtype=torch.uint8)
            self._initial(rows[never], initial)
            records[never] = initial

    def _write(self, rows: Tensor, records: Tensor) -> None:
        if rows.numel() == 0:
            return
        request = self._layout.request(rows.numpy())
        try:
            if self._described:
                self._write_header(headers.UNKNOWN)
                self._described = False
            with self._changes_lock:
                placed = self._blocks.place(request.blocks)
                self._changes.add(request.blocks)
            self._blocks.write(rows.numpy(), request, placed, records.data_ptr())
        except StorageError as failure:
            self._failure = failure
            raise
        except BaseException as error:
            self._failure = self._error("a write has failed", error)
            raise self._failure from error

    def _write_header(self, state: headers.State) -> None:
        try:
            write_page(self._file, headers.encode(headers.ROWS, self.identity.as_json() | state))
            self._file.sync()
        except OSError as error:
            raise self._error("the header could not be written", error) from error

    def _describe(self) -> None:
        """At its end: what is in the file is on the disk, and the header says so."""
        self._sync()
        if not self._described:
            count = self._blocks.places.count
            self._file.resize(self._layout.file_bytes(count))
            self._write_header({"snapshot": None, "places": count})

    def _sync(self) -> None:
        try:
            self._file.sync()
        except OSError as error:  # the system tells it once, and may have dropped what it could not write
            self._failure = self._error("what was written could not be brought to the disk", error)
            raise self._failure from error

    def _take_snapshot(self, path: Path, changes_only: bool) -> None:
        if changes_only and self._snapshot is None:
            raise StorageError(
                f"table {self.table_name!r}: file {self.path} has changed since its last snapshot, in another session "
                "or before there was any; take a whole one before one of changes only"
            )
        self._sync()
        with self._changes_lock:
            changed = self._changes.blocks()
        name = new_name()
        if changes_only:
            write_changes(path, self._blocks, self.identity, changed, str(self._snapshot), name)
        else:
            write_whole(path, self._blocks, self.identity, name)
        self._snapshot = name
        with self._changes_lock:
            self._changes.clear()

    def _error(self, what: str, error: BaseException) -> StorageError:
        return StorageError(
            f"table {self.table_name!r}, file {self.path}: {what}: {error}; check the disk, then restore the table "
            "from a snapshot"
        )


def _identity(
    table: str, num_rows: int, record: Record, seed: int, row_origin: int, column_origin: int
) -> Identity:  # fmt: skip
    if num_rows < 1:
        raise ValueError(f"table {table!r}: num_rows must be at least 1, got {num_rows}")
    return Identity(table, num_rows, record, seed, row_origin, column_origin)


def _let_go(operations: Operations, file: PageFile, threads: IoThreads | None) -> None:
    operations.end()
    file.close()
    if threads is not None:
        threads.close()


_OPEN: weakref.WeakSet[DiskRows] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The process ends: what was asked for is done first, and a failure that nobody has asked for is told."""
    for store in list(_OPEN):
        try:
            store.close()
        except Exception as error:
            print(f"error: {error}", file=sys.stderr)
