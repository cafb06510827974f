"""Rows of a table in a file on disk, optionally with a host cache."""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tritonemb.storage import store
from tritonemb.storage.aio import NUM_CONTEXTS, PAGE_BYTES
from tritonemb.storage.io import ROWS, TableIdentity, allocated, check_identity, new_file, open_file, write_page
from tritonemb.storage.memory import HostCache, Policy
from tritonemb.storage.page_table import RESTORE, BlockFile, BlockRequest, FileLayout, PageTable, move_blocks
from tritonemb.storage.snapshot import take_snapshot
from tritonemb.storage.store import Counts, Initializer, IoFuture, OperationQueue, StorageError, storage_errors
from tritonemb.storage.threads import shielded
from tritonemb.utils import Closeable, on_error, print_error

# Of tables that move together, in one thread. Threads submit requests of the disk side by side: 1,850 rows of 26 tables
# took 40 ms by 8, 160 ms by one; but each costs the CPU as much as 100 rows.
ROWS_PER_OPERATION = 128


class RowFile:
    """The opened, checked and locked file of a `DiskRows`, for one thread at a time; unusable after a `failure`."""

    def __init__(self, path: Path, identity: TableIdentity, initializer: Initializer) -> None:
        self.subject = f"table {identity.table!r}: file {path}"
        self.file, header = open_file(self.subject, path, ROWS, writable=True)
        with storage_errors(f"{self.subject} cannot be opened", "check the disk"), on_error(self.file.close):
            check_identity(header, identity, path)
            if not self.file.lock():
                raise StorageError(f"{self.subject} is open for another table or process; close it there first")
            self.blocks = BlockFile(self.file, header)
        self.identity, self._initializer = identity, initializer
        self.last_snapshot, self._is_final = header["snapshot"], header["places"] is not None
        self.failure: StorageError | None = None

    @staticmethod
    def move(files: "Sequence[tuple[RowFile, Tensor, Tensor]]", write: bool) -> None:
        """Read or write records of rows of files at once; an error of a write makes all of their tables fail."""
        requests = list[BlockRequest]()
        with ExitStack() as stack:
            for file, *_ in files if write else ():
                stack.enter_context(file.fail_on_error("a write has failed"))
            for file, *_ in files:
                file.raise_if_failed()
            for file, rows, records in files:
                if write and file._is_final and rows.numel():
                    file._write_header(None)
                requests.append(BlockRequest(file.blocks, rows.numpy(), records.data_ptr(), write))
            move_blocks(requests)
        for (file, rows, records), request in zip(() if write else files, requests, strict=False):
            store.fill_unwritten(request.flags, rows, records, file._initializer)

    def sync(self) -> None:
        # The system reports a failed flush once, and may have dropped the pages.
        with self.fail_on_error("writes could not be flushed to disk"):
            self.file.sync()

    def finalize(self) -> None:
        """Flush the file, then write and flush its header with the number of blocks."""
        self.sync()
        if not self._is_final:
            count = self.blocks.page_table.count
            with self.fail_on_error("the end of the file could not be written"):
                self.file.resize(self.blocks.layout.file_bytes(count))
                self._write_header(count)

    def changed_pages(self) -> Tensor:
        """Return the pages of the file written since the last snapshot, int64, ascending."""
        layout, positions = self.blocks.layout, self.blocks.page_table.find(self.blocks.changed.blocks())
        first_pages = layout.offset(np.sort(positions)) // layout.page_bytes
        return torch.from_numpy((first_pages[:, None] + np.arange(layout.pages_per_block)).reshape(-1))

    @contextmanager
    def fail_on_error(self, problem: str) -> Iterator[None]:
        """Make an error in the block the table's failure."""
        try:
            yield
        except StorageError as failure:
            self.failure = self.failure or failure
            raise
        except BaseException as error:
            subject = f"table {self.identity.table!r}, file {self.file.path}"
            self.failure = StorageError(f"{subject}: {problem}: {error}; {RESTORE}")
            raise self.failure from error

    def raise_if_failed(self) -> None:
        if (failure := self.failure) is not None:
            failure.raised = True
            raise StorageError(f"{self.subject} is unusable because a write failed: {failure}") from failure

    def _write_header(self, num_blocks: int | None) -> None:
        with self.fail_on_error("the header could not be written"):
            holes = None if num_blocks is None else self.blocks.holes
            write_page(self.file, self.identity.header(self.blocks.layout.page_bytes, None, num_blocks, holes))
            self.file.sync()
        self._is_final = num_blocks is not None


class DiskRows(Closeable):
    """Records of rows 0 to `num_rows` - 1 in one file; rows never written take no space, and read as initial values.

    Operations take effect in the order of their submission, from any thread: a read after a write of the same row
    returns the written record. Rows are int64 `[n]` on the CPU, ascending and distinct; records are uint8
    `[n, num_bytes]`, contiguous, on the CPU. Neither may be changed until the operation is done. Methods raise a
    ValueError or TypeError at once for other arguments, and a StorageError if the table is closed, has failed, or was
    opened by another process.

    Construct it by `create` or `open`. Pages have checksums. A write that is done has reached the file; `flush` and
    `snapshot` flush it to the disk. A failed write may have written some of its rows, so the table fails with it; a
    failed read has no other effect. The process waits for pending operations when it exits.

    With `host_rows` some rows are cached in host memory. Dirty rows are written back when they are evicted, and before
    `flush`, `snapshot` and `close` flush the file. An unlinked file ends with the table; `close` does not write to it.
    `direct` says whether the file is read and written past the system's page cache.
    """

    order: threading.Lock  # locked to submit an operation of any table
    joint_operations: list[OperationQueue]  # of tables without host caches, which access the disk at once

    def __init__(self, file: RowFile, cache: HostCache | None) -> None:
        self.path, self.direct, self.identity = file.file.path, file.file.direct, file.identity
        self.table_name, self.num_rows, self.record = self.identity.table, self.identity.num_rows, self.identity.record
        self.page_bytes = file.blocks.layout.page_bytes
        self._file, self._cache = file, cache
        self._operations = OperationQueue(f"tritonemb-rows-{self.table_name}")
        self._last: tuple[OperationQueue, IoFuture] | None = None  # the last operation that was submitted
        self._closing: IoFuture | None = None
        self._process = os.getpid()
        _OPEN.add(self)
        # After garbage collection no operation can be submitted or waited for.
        self._dropped = weakref.finalize(self, _close_dropped, self._process, self._operations, file, cache)
        self._dropped.atexit = False

    @classmethod
    def create(cls, path: str | Path, identity: TableIdentity, initializer: Initializer, **options: Any) -> Self:
        """Create the file of a new table without written rows, in milliseconds and without disk space at any size.

        The folder must exist, the file must not. For other arguments see `open`. Raise ValueError if the table's name
        is too long; raise StorageError if the file cannot be created, or the memory cannot be allocated.
        """
        path, subject = Path(path), f"table {identity.table!r}: file {path}"
        identity.header(PAGE_BYTES)  # raises for a long name
        if path.exists():
            raise StorageError(f"{subject} exists already; open it, remove it, or choose another name")
        remedy = "choose another folder, or split the table into smaller shards"
        problem = f"{subject} for {identity.num_rows:,} rows cannot be created"
        with storage_errors(problem, remedy), new_file(path) as file:
            layout = FileLayout.smallest(identity.num_rows, identity.record.num_bytes, file.alignment)
            PageTable(layout.num_blocks)  # `open` needs its memory
            write_page(file, identity.header(layout.page_bytes))
        return cls.open(path, identity, initializer, **options)

    @classmethod
    def open(
        cls, path: str | Path, identity: TableIdentity, initializer: Initializer, *, host_rows: int | None = None,
        policy: Policy = "lru",
    ) -> Self:  # fmt: skip
        """Open a file that `create`, `snapshot` or `restore` has written.

        Args:
            initializer: writes the initial values of rows that were never written, from `identity.seed`.
            host_rows: number of rows cached in host memory, see `HostCache`; none by default.
            policy: eviction policy of the host cache.

        Raises:
            StorageError: if the file does not exist, is damaged, is in use, or has another format or table; the text
                lists the differences.
        """

        def opened() -> tuple[RowFile, HostCache | None]:
            file = RowFile(Path(path), identity, initializer)
            with on_error(file.file.close):
                return file, None if host_rows is None else HostCache(file, host_rows, policy)

        return cls(*shielded(opened))

    def read(self, rows: Tensor, records: Tensor) -> IoFuture:
        """Fill `records` with the records of the rows."""
        return self.transfer([(self, rows, records)], write=False)[0]

    def write(self, rows: Tensor, records: Tensor) -> IoFuture:
        return self.transfer([(self, rows, records)], write=True)[0]

    @staticmethod
    def transfer(requests: Sequence[tuple["DiskRows", Tensor, Tensor]], write: bool) -> list[IoFuture]:
        """Read or write records of rows of tables; for those without a host cache, by few operations."""
        store.check_requests([(t.table_name, t.num_rows, t.record, rows, records) for t, rows, records in requests])
        name, joint = "write" if write else "read", [request for request in requests if request[0]._cache is None]
        futures = [t._submit(partial(getattr(t._cache, name), *pair)) for t, *pair in requests if t._cache is not None]
        count = min(NUM_CONTEXTS, len(joint), 1 + sum(rows.numel() for _, rows, _ in joint) // ROWS_PER_OPERATION)
        for number in range(count):
            tables, files = zip(*[(t, (t._file, *request)) for t, *request in joint[number::count]], strict=True)
            operations = tables[0]._operations if len(joint) == 1 else DiskRows.joint_operations[number]
            futures.append(_submit(tables, operations, partial(RowFile.move, files, write)))
        return futures

    def flush(self) -> IoFuture:
        """Flush earlier writes to the disk."""
        return self._submit(self._flush)

    def snapshot(self, path: str | Path, changes_only: bool = False) -> IoFuture:
        """Copy the table's file, with all earlier operations.

        The copy is a reflink where the file system supports it and is the table's, else a sparse copy. It is flushed to
        the disk, then renamed to `path`, and replaces a file of that name. A failed snapshot does not harm the table.

        With `changes_only` the snapshot is incremental: the blocks written since the last snapshot, whole or
        incremental; `restore` applies it to that. A table opened from a file that `snapshot` or `restore` has written
        has that file as its last snapshot until it is written to.

        Raise ValueError if `path` is the table's file; raise StorageError, from the future, if the file cannot be
        written, or if an incremental snapshot has no predecessor.
        """
        path = Path(path)
        if path.exists() and self.path.exists() and path.samefile(self.path):
            subject = f"table {self.table_name!r}: {path}"
            raise ValueError(f"{subject} is the table's own file; choose another name for its snapshot")
        return self._submit(lambda: self._take_snapshot(path, changes_only))

    @property
    def last_snapshot(self) -> str | None:
        """Name of the snapshot that an incremental one would follow, or None."""
        return self._file.last_snapshot

    def bytes_on_disk(self) -> int:
        """Return the bytes that the file takes on the disk, after writing back dirty rows."""
        return self._query(lambda: allocated(self._file.file.handle))

    def changed_pages(self) -> Tensor:
        """Return pages written since the last snapshot or `open`, int64, ascending; writes back dirty rows first.

        A page has `page_bytes`, and page 0 is at the start of the file.
        """
        return self._query(self._file.changed_pages)

    def counts(self) -> Counts:
        """Return the counters of the host cache, after waiting for earlier operations."""
        if self._cache is None:
            return Counts()
        if os.getpid() == self._process and self._last is not None:
            self._last[1].join()
        return self._cache.counts

    def close(self) -> None:
        """Wait for pending operations, flush and close the file. Raise StorageError if that fails, or for a failed
        write that no caller has seen. A second call only waits for an interrupted first one."""
        if os.getpid() != self._process:
            return
        with self.order:
            if self._closing is None:
                self._closing = self._operations.close(partial(_close, self._file, self._cache, self._last))
                self._dropped.detach()
        if self in _OPEN:
            try:
                self._closing.wait()
            finally:
                if self._closing.done():
                    _OPEN.discard(self)

    def _submit(self, operation: Callable[[], None]) -> IoFuture:
        return _submit([self], self._operations, operation)

    def _query(self, query: Callable[[], Any]) -> Any:
        """Return the result of `query` after earlier operations and a write-back."""
        results: list[Any] = []

        def run_query() -> None:
            self._write_back()
            results.append(query())

        self._submit(run_query).wait()
        return results[0]

    def _write_back(self) -> None:
        if self._cache is not None:
            self._cache.write_back()

    def _flush(self) -> None:
        self._write_back()
        self._file.sync()

    def _take_snapshot(self, path: Path, changes_only: bool) -> None:
        if changes_only and self.last_snapshot is None:
            reason = "none was taken, or the file was written to after it and opened again; take a whole snapshot first"
            raise StorageError(f"{self._file.subject} has no last snapshot: {reason}")
        self._flush()
        file, parent = self._file, self.last_snapshot if changes_only else None
        file.last_snapshot = take_snapshot(file.blocks, file.identity, path, parent)
        file.blocks.changed.clear()


def _share() -> None:
    DiskRows.order = threading.Lock()
    DiskRows.joint_operations = [OperationQueue(f"tritonemb-rows-{number}") for number in range(NUM_CONTEXTS)]


_share()
os.register_at_fork(after_in_child=_share)


def _submit(tables: Sequence[DiskRows], operations: OperationQueue, operation: Callable[[], None]) -> IoFuture:
    """Submit an operation on tables, which runs after the earlier ones of each of them."""
    with DiskRows.order:
        for table in tables:
            if os.getpid() != table._process:
                remedy = "and its threads are not in this process; use it in the process that opened it"
                raise StorageError(f"table {table.table_name!r} was opened before this process was forked, {remedy}")
            if table._closing is not None:
                raise StorageError(f"{table._file.subject} is closed; open it again")
            table._file.raise_if_failed()
        predecessors = {t._last[1] for t in tables if t._last is not None and t._last[0] is not operations}

        def ordered_operation() -> None:
            for future in predecessors:  # they wait for still earlier ones only
                future.join()
            if len(tables) == 1:
                tables[0]._file.raise_if_failed()
            operation()

        future: IoFuture | None = None
        try:
            for table in tables:
                if table._last is None:
                    table._operations.submit(lambda: None)  # starts the thread, which closes the table
            future = operations.submit(ordered_operation)
        finally:
            # If a signal handler raises here, later operations wait for the one that may have been submitted.
            last = operations, operations.submit(lambda: None) if future is None else future
            for table in tables:
                table._last = last
    return last[1]


def _close(file: RowFile, cache: HostCache | None, last: tuple[OperationQueue, IoFuture] | None = None) -> None:
    """Write back, flush and close after the last operation; raise the table's failure if no caller has seen it."""
    if last is not None:
        last[1].join()
    with closing(file.file):
        if file.failure is None:
            if cache is not None and cache.needs_write_back():
                cache.write_back()
            file.finalize()
        elif not file.failure.raised:
            raise file.failure


def _close_dropped(process: int, operations: OperationQueue, file: RowFile, cache: HostCache | None) -> None:
    """Close the file of a garbage-collected table; its dirty rows are written back without waiting."""
    if os.getpid() != process:  # forked without the thread; the file belongs to the parent
        return
    if cache is not None and cache.needs_write_back():
        operations.close(partial(print_error, partial(_close, file, cache)))
    else:
        file.file.close()
        operations.close(lambda: None)


_OPEN: weakref.WeakSet[DiskRows] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Wait for pending operations at exit, and print failures that no caller has seen."""
    for rows in list(_OPEN):
        print_error(rows.close)
