"""Rows in a file on disk."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from tritonemb.storage import format as headers
from tritonemb.storage.format import Identity, Layout, State
from tritonemb.storage.host_cache import CachedRows, Counts, Policy, check_cache
from tritonemb.storage.io import aside, create, give_name, write_page
from tritonemb.storage.page_table import Places, scan
from tritonemb.storage.row_file import FileRows
from tritonemb.storage.store import Initial, Pending, Record, StorageError, advice, check_request
from tritonemb.storage.threads import IoThreads, Operations, apart, refuse_fork


class DiskRows:
    """A `RowStore` in one file: rows that were never written take no room, and read as their initial values.

    Made by `create` or `open`. Pages have checksums. A write that has ended has reached the file; `flush` and
    `snapshot` bring it to the disk. A failed write leaves some of its rows written, so it is the last operation that
    the table takes; a failed read harms nothing but itself. A program's end waits for what was asked for.

    With `host_rows` some rows are in host memory, and what was written there reaches the file later: when others need
    the place, and before `flush`, `snapshot` and `close` bring the file to the disk; a file without a name, which ends
    with the table, gets nothing at `close`.

    Attributes:
        path: of the file.
        direct: whether the file is read and written past the system's page cache.
    """

    def __init__(self, file: FileRows, cached: CachedRows | None) -> None:
        self.path, self.direct, self.identity = file.path, file.direct, file.identity
        self._file, self._cached = file, cached
        self._rows = file if cached is None else cached
        self._operations = Operations(f"tritonemb-rows-{self.table_name}")
        self._ending: Pending | None = None
        self._lock, self._process = threading.Lock(), os.getpid()
        _OPEN.add(self)
        # Nothing is asked for any more when nobody has the table, so nothing needs to be waited for.
        self._dropped = weakref.finalize(self, _let_go, self._process, self._operations, file, cached)
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
        host_rows: int | None = None,
        policy: Policy = "lru",
    ) -> DiskRows:
        """A new table, none of whose rows is written yet: takes milliseconds and no room, whatever its size.

        Args:
            path: of the file; there must be none of that name. The folder must be there.
            table_name, num_rows, record, seed, row_origin, column_origin: see `Identity`; stored in the file.
            initial: gives never-written rows their values, from `seed`.
            threads: read and write in so many threads of this table's own; if not given, Linux's asynchronous I/O
                does it without threads, where the file is open for direct I/O, else threads that all tables share.
            host_rows: keep so many rows in host memory, see `CachedRows`; none if not given.
            policy: which of them makes room for another.

        Raises:
            ValueError: `num_rows`, `threads` or `host_rows` is below 1, there is no such policy, or the name is too
                long.
            StorageError: the file cannot be made, or there is not so much memory.
        """
        identity, path = _identity(table_name, num_rows, record, seed, row_origin, column_origin), Path(path)
        if threads is not None and threads < 1:
            raise ValueError(f"table {table_name!r}: threads must be at least 1, got {threads}")
        check_cache(table_name, host_rows, policy)
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
            otherwise = "choose another folder, or cut the table into smaller parts"
            raise StorageError(
                f"table {table_name!r}: file {path} for {num_rows:,} rows cannot be made: {error}; "
                f"{advice(error, otherwise)}"
            ) from error
        return cls.open(
            path, table_name, num_rows, record, seed, initial, row_origin=row_origin, column_origin=column_origin,
            threads=threads, host_rows=host_rows, policy=policy,
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
        host_rows: int | None = None,
        policy: Policy = "lru",
    ) -> DiskRows:
        """The table in a file that `create`, `snapshot` or `restore` has written. Arguments as of `create`.

        Raises:
            ValueError: as `create`.
            StorageError: there is no such file, it is damaged, in use, of another format, or of another table, and how
                it differs.
        """
        identity, path = _identity(table_name, num_rows, record, seed, row_origin, column_origin), Path(path)
        check_cache(table_name, host_rows, policy)

        def opened() -> tuple[FileRows, CachedRows | None]:
            rows = _open(path, identity, initial, threads)
            try:
                return rows, None if host_rows is None else CachedRows(rows, host_rows, policy)
            except BaseException:
                rows.close()
                raise

        return cls(*apart(opened))

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
        return self._ask(lambda: self._rows.read(rows, records))

    def write(self, rows: Tensor, records: Tensor) -> Pending:
        check_request(self.table_name, self.num_rows, self.record, rows, records)
        return self._ask(lambda: self._rows.write(rows, records))

    def flush(self) -> Pending:
        """Bring what was written before to the disk."""
        return self._ask(self._flush)

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
        return self._file.last_snapshot

    def bytes_on_disk(self) -> int:
        """The room that the file takes, with what is only in host memory yet, which goes there first.

        Raises:
            StorageError: it cannot be written.
        """
        self._write_back_now()
        return self._file.allocated()

    def changed_pages(self) -> Tensor:
        """int64, ascending: pages of the file written since the last snapshot, or since the table was opened. What is
        only in host memory yet goes there first.

        Raises:
            StorageError: it cannot be written.
        """
        self._write_back_now()
        return self._file.changed_pages()

    def counts(self) -> Counts:
        """What rows in host memory have been good for, by all that was asked for before; waits for that."""
        if self._cached is None:
            return Counts()
        if os.getpid() == self._process:
            with self._lock:
                last = None if self._ending else self._operations.ask(lambda: None)
            if last is not None:
                last.wait()
        return self._cached.counts

    def close(self) -> None:
        """Wait for what has been asked for, bring it to the disk and close the file. A second call does nothing; if
        the first one was interrupted, it waits for what that has begun.

        Raises:
            StorageError: a write has failed that nobody has waited for, or the disk has not taken it all.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._ending is None:
                file, cached = self._file, self._cached
                self._ending = self._operations.end(lambda: _end(file, cached))
                self._dropped.detach()
        if self in _OPEN:
            try:
                self._ending.wait()
            finally:
                if self._ending.done():
                    _OPEN.discard(self)

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
            if self._ending is not None:
                raise StorageError(f"table {self.table_name!r}: file {self.path} is closed; open it again")
            self._refuse_failed()
            return self._operations.ask(unless_failed)

    def _refuse_failed(self) -> None:
        failure = self._file.failure
        if failure is not None:
            failure.told = True
            raise StorageError(
                f"table {self.table_name!r}: file {self.path} takes nothing more, because a write has failed: {failure}"
            ) from failure

    def _write_back_now(self) -> None:
        if self._cached is not None:
            self._ask(self._cached.write_back).wait()

    def _flush(self) -> None:
        self._write_back()
        self._file.sync()

    def _take_snapshot(self, path: Path, changes_only: bool) -> None:
        if changes_only and self._file.last_snapshot is None:
            raise StorageError(
                f"table {self.table_name!r}: file {self.path} has changed since its last snapshot, in another session "
                "or before there was any; take a whole one before one of changes only"
            )
        self._write_back()
        self._file.take_snapshot(path, changes_only)

    def _write_back(self) -> None:
        if self._cached is not None:
            self._cached.write_back()


def _open(path: Path, identity: Identity, initial: Initial, threads: int | None) -> FileRows:
    """The rows in a table's file, which is checked, and locked."""
    what = f"table {identity.table!r}: file {path}"
    file = headers.open_file(what, path, writable=True)
    try:
        header = headers.read(what, file, headers.ROWS)
        headers.refuse_other(header, identity, path)
        layout = Layout(identity.num_rows, identity.record.num_bytes)
        headers.refuse_size(header, file.size(), layout, what)
        if not file.lock():
            raise StorageError(f"{what} is open for another table or process; close it there first")
        places, state = scan(identity.table, file, layout), State(snapshot=header["snapshot"], places=header["places"])
        return FileRows(path, file, identity, initial, places, state, None if threads is None else IoThreads(threads))
    except BaseException as error:
        file.close()
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(f"{what} cannot be opened: {error}") from error
        raise


def _identity(
    table: str, num_rows: int, record: Record, seed: int, row_origin: int, column_origin: int
) -> Identity:  # fmt: skip
    if num_rows < 1:
        raise ValueError(f"table {table!r}: num_rows must be at least 1, got {num_rows}")
    return Identity(table, num_rows, record, seed, row_origin, column_origin)


def _needs_writing_back(file: FileRows, cached: CachedRows | None) -> bool:
    """Whether there is something in memory alone, and a file that takes it and that anybody could open again."""
    return cached is not None and cached.has_changes() and file.failure is None and file.has_name()


def _end(file: FileRows, cached: CachedRows | None) -> None:
    """Close the file, when all that was written is in it, and its header says how much it holds.

    Raises:
        StorageError: the table's failure, if nobody was told yet.
    """
    try:
        if file.failure is None:
            if cached is not None and _needs_writing_back(file, cached):
                cached.write_back()
            file.describe()
        elif not file.failure.told:
            raise file.failure
    finally:
        file.close()


def _let_go(process: int, operations: Operations, file: FileRows, cached: CachedRows | None) -> None:
    """Close the file of a table that was dropped, behind what is in memory alone, for which nobody waits.

    A process forked off has neither the thread nor a say in what becomes of the file.
    """
    if os.getpid() != process:
        return

    def end() -> None:
        try:
            _end(file, cached)
        except Exception as error:
            print(f"error: {error}", file=sys.stderr)

    if _needs_writing_back(file, cached):
        operations.end(end)
    else:
        file.close()
        operations.end(lambda: None)


_OPEN: weakref.WeakSet[DiskRows] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The process ends: what was asked for is done first, and a failure that nobody has asked for is told."""
    for store in list(_OPEN):
        try:
            store.close()
        except Exception as error:
            print(f"error: {error}", file=sys.stderr)
