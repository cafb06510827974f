"""Rows in a file on disk, some of them cached in host memory."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tritonemb.ops.row_cache import POLICIES
from tritonemb.storage.io import allocated, new_file, shielded, write_page
from tritonemb.storage.memory import HostCache, Policy
from tritonemb.storage.page_table import FileLayout, PageTable, TableIdentity
from tritonemb.storage.row_file import RowFile
from tritonemb.storage.snapshot import take_snapshot
from tritonemb.storage.store import (
    Counts,
    Initializer,
    IoFuture,
    OperationQueue,
    StorageError,
    check_request,
    storage_errors,
)


class DiskRows(AbstractContextManager["DiskRows"]):
    """A `RowStore` in one file: rows that were never written take no room, and read as their initial values.

    Made by `create` or `open`. Pages have checksums. A write that is done has reached the file; `flush` and `snapshot`
    flush it to the disk. A failed write leaves some of its rows written, so it is the last operation that the table
    takes; a failed read harms nothing else. At its exit the process waits for what was submitted.

    With `host_rows` some rows are cached in host memory. Dirty rows are written back when they are evicted, and before
    `flush`, `snapshot` and `close` flush the file; a file that no folder lists, which ends with the table, is not
    written to at `close`. Whether the file is read and written past the system's page cache, says `direct`.
    """

    def __init__(self, file: RowFile, cache: HostCache | None) -> None:
        self.path, self.direct, self.identity = file.file.path, file.file.direct, file.identity
        self.table_name, self.num_rows, self.record = self.identity.table, self.identity.num_rows, self.identity.record
        self._file, self._cache = file, cache
        self._rows = file if cache is None else cache
        self._operations = OperationQueue(f"tritonemb-rows-{self.table_name}")
        self._closing: IoFuture | None = None
        self._lock, self._process = threading.Lock(), os.getpid()
        _OPEN.add(self)
        # Nobody can submit or wait for an operation of a table that is garbage.
        self._dropped = weakref.finalize(self, _close_dropped, self._process, self._operations, file, cache)
        self._dropped.atexit = False

    @classmethod
    def create(cls, path: str | Path, identity: TableIdentity, initializer: Initializer, **options: Any) -> DiskRows:
        """A new table, none of whose rows is written yet: takes milliseconds and no room, whatever its size.

        There must be no file of that name, and its folder. Other arguments as of `open`.

        Raises:
            ValueError: as `open`, or the table's name is too long.
            StorageError: the file cannot be made, or the memory cannot be allocated.
        """
        path, what = Path(path), f"table {identity.table!r}: file {path}"
        _check_options(identity.table, **options)
        page = identity.header()
        if path.exists():
            raise StorageError(
                f"table {identity.table!r}: there is a file {path} already; open it, remove it, or choose another name"
            )
        otherwise = "choose another folder, or cut the table into smaller shards"
        with storage_errors(f"{what} for {identity.num_rows:,} rows cannot be made", otherwise):
            PageTable(FileLayout(identity.num_rows, identity.record.num_bytes).num_blocks)  # or it could not be opened
            with new_file(path, replace=False) as file:
                write_page(file, page)
        return cls.open(path, identity, initializer, **options)

    @classmethod
    def open(
        cls,
        path: str | Path,
        identity: TableIdentity,
        initializer: Initializer,
        *,
        host_rows: int | None = None,
        policy: Policy = "lru",
    ) -> DiskRows:
        """The table in a file that `create`, `snapshot` or `restore` has written.

        Args:
            initializer: gives rows that were never written their values, from `identity.seed`.
            host_rows: cache this number of rows in host memory, see `HostCache`; none by default.
            policy: which of them is evicted.

        Raises:
            ValueError: `host_rows` is below 1, or there is no such policy.
            StorageError: the file does not exist, is damaged, in use, of another format, or of another table, and how
                it differs.
        """
        _check_options(identity.table, host_rows, policy)

        def opened() -> tuple[RowFile, HostCache | None]:
            file = RowFile(Path(path), identity, initializer)
            try:
                return file, None if host_rows is None else HostCache(file, host_rows, policy)
            except BaseException:
                file.file.close()
                raise

        return cls(*shielded(opened))

    def read(self, rows: Tensor, records: Tensor) -> IoFuture:
        check_request(self.table_name, self.num_rows, self.record, rows, records)
        return self._submit(lambda: self._rows.read(rows, records))

    def write(self, rows: Tensor, records: Tensor) -> IoFuture:
        check_request(self.table_name, self.num_rows, self.record, rows, records)
        return self._submit(lambda: self._rows.write(rows, records))

    def flush(self) -> IoFuture:
        """Flush what was written before to the disk."""
        return self._submit(self._flush)

    def snapshot(self, path: str | Path, changes_only: bool = False) -> IoFuture:
        """Copy the table's file as of the operations submitted before.

        The copy is a reflink where the file system, which must be the table's, supports it, else a sparse copy. When
        this is done the copy is on the disk. It gets its name when it is whole, and replaces a file of that name. A
        failed snapshot does not harm the table.

        With `changes_only` it is incremental: the blocks that were written since the last snapshot, of either kind;
        `restore` applies it to that. A table that was opened from a file that `snapshot` or `restore` has written, and
        not written to since, has that file for its last snapshot.

        Raises:
            ValueError: `path` is the table's own file.
            StorageError: from the future: the file cannot be written, or there is no last snapshot.
        """
        path = Path(path)
        if path.exists() and self.path.exists() and path.samefile(self.path):
            raise ValueError(
                f"table {self.table_name!r}: {path} is the table's own file; name another for its snapshot"
            )
        return self._submit(lambda: self._take_snapshot(path, changes_only))

    @property
    def last_snapshot(self) -> str | None:
        """The name of the snapshot that an incremental one would follow; None if there is none."""
        return self._file.last_snapshot

    def bytes_on_disk(self) -> int:
        """The bytes that the file takes on the disk. Dirty rows are written back first."""
        self._write_back_now()
        return allocated(self._file.file.handle)

    def changed_pages(self) -> Tensor:
        """int64, ascending: pages of the file written since the last snapshot, or since the table was opened. Dirty
        rows are written back first.
        """
        self._write_back_now()
        return self._file.changed_pages()

    def counts(self) -> Counts:
        """What the cache in host memory has saved; waits for the operations submitted before."""
        if self._cache is None:
            return Counts()
        if os.getpid() == self._process:
            with self._lock:
                last = None if self._closing else self._operations.submit(lambda: None)
            if last is not None:
                last.wait()
        return self._cache.counts

    def close(self) -> None:
        """Wait for what was submitted, flush it and close the file; StorageError if that or an earlier write has failed
        that nobody has waited for. A second call waits only for what an interrupted one has begun.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closing is None:
                file, cache = self._file, self._cache
                self._closing = self._operations.close(lambda: _close(file, cache))
                self._dropped.detach()
        if self in _OPEN:
            try:
                self._closing.wait()
            finally:
                if self._closing.done():
                    _OPEN.discard(self)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, work: Callable[[], None]) -> IoFuture:
        if os.getpid() != self._process:
            raise StorageError(
                f"table {self.table_name!r} was opened before this process was forked off, and its threads are not in "
                "this process; use it in the process that opened it"
            )

        def checked() -> None:
            self._check_failure()
            work()

        with self._lock:
            if self._closing is not None:
                raise StorageError(f"table {self.table_name!r}: file {self.path} is closed; open it again")
            self._check_failure()
            return self._operations.submit(checked)

    def _check_failure(self) -> None:
        failure = self._file.failure
        if failure is not None:
            failure.raised = True
            raise StorageError(
                f"table {self.table_name!r}: file {self.path} takes nothing more, because a write has failed: {failure}"
            ) from failure

    def _write_back_now(self) -> None:
        if self._cache is not None:
            self._submit(self._cache.write_back).wait()

    def _flush(self) -> None:
        if self._cache is not None:
            self._cache.write_back()
        self._file.sync()

    def _take_snapshot(self, path: Path, changes_only: bool) -> None:
        if changes_only and self.last_snapshot is None:
            raise StorageError(
                f"table {self.table_name!r}: file {self.path} has changed since its last snapshot, in another session "
                "or before there was any; take a whole one before one of changes only"
            )
        self._flush()
        take_snapshot(self._file, path, changes_only)


def _check_options(table: str, host_rows: int | None = None, policy: str = "lru") -> None:
    if host_rows is not None and host_rows < 1:
        raise ValueError(f"table {table!r}: rows in host memory must be at least 1, got {host_rows}")
    if policy not in POLICIES:
        raise ValueError(f"table {table!r}: no policy is called {policy!r}; there are {list(POLICIES)}")


def _needs_write_back(file: RowFile, cache: HostCache | None) -> bool:
    """Whether there are dirty rows, and a file that takes them and can be opened again."""
    return cache is not None and cache.is_dirty() and file.failure is None and file.file.is_linked()


def _close(file: RowFile, cache: HostCache | None) -> None:
    """Write back, flush and close; raise the table's failure, if no caller has seen it."""
    try:
        if file.failure is None:
            if cache is not None and _needs_write_back(file, cache):
                cache.write_back()
            file.finalize()
        elif not file.failure.raised:
            raise file.failure
    finally:
        file.file.close()


def _close_dropped(process: int, operations: OperationQueue, file: RowFile, cache: HostCache | None) -> None:
    """Close the file of a table that is garbage; dirty rows are written back without waiting."""
    if os.getpid() != process:  # without the thread; it must leave the file alone
        return

    if _needs_write_back(file, cache):
        operations.close(partial(_print_error, partial(_close, file, cache)))
    else:
        file.file.close()
        operations.close(lambda: None)


_OPEN: weakref.WeakSet[DiskRows] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """At exit: wait for what was submitted, and print failures that no caller has seen."""
    for store in list(_OPEN):
        _print_error(store.close)


def _print_error(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        print(f"error: {error}", file=sys.stderr)
