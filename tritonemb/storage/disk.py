"""Rows in a file on disk, some of them cached in host memory."""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from tritonemb.storage import store
from tritonemb.storage.io import ROWS, TableIdentity, allocated, check_identity, new_file, open_file, write_page
from tritonemb.storage.memory import HostCache, Policy
from tritonemb.storage.page_table import RESTORE, BlockFile, FileLayout, PageTable
from tritonemb.storage.snapshot import take_snapshot
from tritonemb.storage.store import Counts, Initializer, IoFuture, OperationQueue, StorageError, storage_errors
from tritonemb.storage.threads import shielded
from tritonemb.utils import Closeable, on_error, print_error

T = TypeVar("T")


class RowFile:
    """A `DiskRows`' file, which is opened, checked and locked, for one thread at a time; unusable after a `failure`."""

    def __init__(self, path: Path, identity: TableIdentity, initializer: Initializer) -> None:
        what = f"table {identity.table!r}: file {path}"
        self.file, header = open_file(what, path, ROWS, writable=True)
        try:
            check_identity(header, identity, path)
            if not self.file.lock():
                raise StorageError(f"{what} is open for another table or process; close it there first")
            self.blocks = BlockFile(identity.table, self.file, FileLayout.of(header))
        except BaseException as error:
            self.file.close()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise StorageError(f"{what} cannot be opened: {error}") from error
            raise
        self.identity, self._initializer = identity, initializer
        self.last_snapshot, self._is_final = header["snapshot"], header["places"] is not None
        self.failure: StorageError | None = None

    def read(self, rows: Tensor, records: Tensor) -> None:
        """Fill `records` with the records of the rows."""
        store.fill_unwritten(self.blocks.read(rows.numpy(), records.data_ptr()), rows, records, self._initializer)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Write the records of the rows; an error is the table's failure."""
        if rows.numel() == 0:
            return
        with self.fail_on_error("a write has failed"):
            if self._is_final:
                self._write_header(None)
                self._is_final = False
            self.blocks.write(rows.numpy(), records.data_ptr())

    def sync(self) -> None:
        """Flush what was written to the disk."""
        # The system reports a failure once, and may have dropped what it could not write.
        with self.fail_on_error("what was written could not be flushed to disk"):
            self.file.sync()

    def finalize(self) -> None:
        """Flush the file, and then its header, which says how many blocks it has."""
        self.sync()
        if not self._is_final:
            count = self.blocks.page_table.count
            with self.fail_on_error("the end of the file could not be written"):
                self.file.resize(self.blocks.layout.offset(count))
                self._write_header(count)

    def changed_pages(self) -> Tensor:
        """int64, ascending: pages of the file written since the last snapshot."""
        size, positions = self.blocks.layout.pages_per_block, self.blocks.page_table.find(self.blocks.changed.blocks())
        return torch.from_numpy((1 + np.sort(positions)[:, None] * size + np.arange(size)).reshape(-1))

    @contextmanager
    def fail_on_error(self, what: str) -> Iterator[None]:
        """An error in the block is the table's failure."""
        try:
            yield
        except StorageError as failure:
            self.failure = failure
            raise
        except BaseException as error:
            where = f"table {self.identity.table!r}, file {self.file.path}"
            self.failure = StorageError(f"{where}: {what}: {error}; {RESTORE}")
            raise self.failure from error

    def _write_header(self, num_blocks: int | None) -> None:
        with self.fail_on_error("the header could not be written"):
            write_page(self.file, self.identity.header(num_blocks=num_blocks))
            self.file.sync()


class DiskRows(Closeable):
    """Records of rows 0 to `num_rows` - 1 in one file; rows never written take no room, and read as initial values.

    Operations take effect in the order in which they are submitted, by any thread: a read after a write of the same row
    returns what was written. Rows are int64 `[n]` on the CPU, ascending and distinct, records uint8 `[n, num_bytes]`,
    contiguous, on the CPU; neither may be changed until the operation is done. Methods raise a ValueError or TypeError
    at once for others, and a StorageError if the table is closed, has failed, or is another process's.

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
    def create(cls, path: str | Path, identity: TableIdentity, initializer: Initializer, **options: Any) -> Self:
        """A new table, none of whose rows is written yet: takes milliseconds and no room, whatever its size.

        There must be no file of that name, and its folder. Other arguments as of `open`. ValueError if the table's name
        is too long; StorageError if the file cannot be made, or the memory cannot be allocated.
        """
        path, what = Path(path), f"table {identity.table!r}: file {path}"
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
        cls, path: str | Path, identity: TableIdentity, initializer: Initializer, *, host_rows: int | None = None,
        policy: Policy = "lru",
    ) -> Self:  # fmt: skip
        """The table in a file that `create`, `snapshot` or `restore` has written.

        Args:
            initializer: gives rows that were never written their values, from `identity.seed`.
            host_rows: cache this number of rows in host memory, see `HostCache`; none by default.
            policy: which of them is evicted.

        Raises:
            StorageError: the file does not exist, is damaged, in use, of another format, or of another table, and how
                it differs.
        """

        def opened() -> tuple[RowFile, HostCache | None]:
            file = RowFile(Path(path), identity, initializer)
            with on_error(file.file.close):
                return file, None if host_rows is None else HostCache(file, host_rows, policy)

        return cls(*shielded(opened))

    def read(self, rows: Tensor, records: Tensor) -> IoFuture:
        """Fill `records` with the records of the rows."""
        store.check_request(self.table_name, self.num_rows, self.record, rows, records)
        return self._submit(lambda: self._rows.read(rows, records))

    def write(self, rows: Tensor, records: Tensor) -> IoFuture:
        """Write the records of the rows."""
        store.check_request(self.table_name, self.num_rows, self.record, rows, records)
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

        ValueError if `path` is the table's own file; StorageError, from the future, if the file cannot be written or
        there is no last snapshot.
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
        return self._ask(lambda: allocated(self._file.file.handle))

    def changed_pages(self) -> Tensor:
        """int64, ascending: pages written since the last snapshot or the table's opening; writes dirty rows back."""
        return self._ask(self._file.changed_pages)

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
        that nobody has waited for. A second call waits only for what an interrupted one has begun."""
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
        if (failure := self._file.failure) is not None:
            failure.raised = True
            raise StorageError(
                f"table {self.table_name!r}: file {self.path} takes nothing more, because a write has failed: {failure}"
            ) from failure

    def _ask(self, question: Callable[[], T]) -> T:
        """What a question finds out of the file as of the operations submitted before."""
        found: list[T] = []

        def answer() -> None:
            self._write_back()
            found.append(question())

        self._submit(answer).wait()
        return found[0]

    def _write_back(self) -> None:
        if self._cache is not None:
            self._cache.write_back()

    def _flush(self) -> None:
        self._write_back()
        self._file.sync()

    def _take_snapshot(self, path: Path, changes_only: bool) -> None:
        if changes_only and self.last_snapshot is None:
            raise StorageError(
                f"table {self.table_name!r}: file {self.path} has changed since its last snapshot, in another session "
                "or before there was any; take a whole one before one of changes only"
            )
        self._flush()
        file, after = self._file, self.last_snapshot if changes_only else None
        file.last_snapshot = take_snapshot(file.blocks, file.identity, path, after)
        file.blocks.changed.clear()


def _close(file: RowFile, cache: HostCache | None) -> None:
    """Write back, flush and close; raise the table's failure, if no caller has seen it."""
    with closing(file.file):
        if file.failure is None:
            if cache is not None and cache.needs_write_back():
                cache.write_back()
            file.finalize()
        elif not file.failure.raised:
            raise file.failure


def _close_dropped(process: int, operations: OperationQueue, file: RowFile, cache: HostCache | None) -> None:
    """Close the file of a table that is garbage; dirty rows are written back without waiting."""
    if os.getpid() != process:  # without the thread; it must leave the file alone
        return
    if cache is not None and cache.needs_write_back():
        operations.close(partial(print_error, partial(_close, file, cache)))
    else:
        file.file.close()
        operations.close(lambda: None)


_OPEN: weakref.WeakSet[DiskRows] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """At exit: wait for what was submitted, and print failures that no caller has seen."""
    for rows in list(_OPEN):
        print_error(rows.close)
