"""Rows of a table on disk that are in host memory: as a dict, whatever is there, and nothing is lost silently."""

import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.storage import stores
from tests.storage.stores import Model, disk_rows, failing, read, some_records, start_read, write
from tritonemb.storage import DiskRows, StorageError
from tritonemb.storage.disk import RowFile
from tritonemb.storage.store import Counts

PAGE = 4096


@contextmanager
def paused(store: DiskRows) -> Iterator[None]:
    """The store does nothing of what it is asked for until all has been asked for."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(30)

    future = store._operations.submit(wait)
    assert begun.wait(30)
    try:
        yield
    finally:
        go_on.set()
        future.wait()


def test_what_is_in_memory_is_neither_read_nor_written(tmp_path):
    """One set of 32: rows come and go, and those that were written go to the file once, when they must."""
    with disk_rows(tmp_path / "rows", 1000, 516, host_rows=32) as store:
        read(store, range(20))
        assert store.counts() == Counts(0, 20 * 516, 0)
        read(store, range(10, 20))
        write(store, range(10), 1)
        write(store, range(10), 2)
        assert store.counts() == Counts(10, 20 * 516, 0)
        assert store._file.changed_pages().tolist() == []  # nothing has been written yet
        read(store, range(5, 25))  # 10 to 19 and 0 to 9 were used before
        assert store.counts() == Counts(25, 25 * 516, 0)
        write(store, range(100, 107), 3)  # there are 25 rows
        assert store.counts().written == 0
        read(store, range(200, 205))  # the first five were used longest ago
        assert store.counts() == Counts(25, 30 * 516, 5 * 516)
        read(store, [0, 1, 2, 3, 4])
        # They take the places of 5 to 9, the first ways of those that were used longest ago.
        assert store.counts() == Counts(25, 35 * 516, 10 * 516)
        assert store.changed_pages().tolist() == [1, 2, 3, 4]
        assert store.counts().written == 17 * 516
        store.flush().wait()
        assert store.counts().written == 17 * 516


def test_the_policies_choose(tmp_path):
    for policy, gone in (("lru", [0]), ("lfu", [1])):
        with disk_rows(tmp_path / policy, 1000, 5, host_rows=32, policy=policy) as store:
            for rows in ([0], [0], [0], range(1, 32), range(2, 32), [40]):
                read(store, rows)
            initial = store.counts()
            read(store, [0, 1])
            assert store.counts().cache_hits - initial.cache_hits == 1
            read(store, sorted({0, 1} - set(gone)))
            assert store.counts().read - initial.read == len(gone) * 5


def test_rows_without_a_place_go_straight_through(tmp_path):
    rows = stores.rows_of_one_set(3000, 2)[:50]
    with disk_rows(tmp_path / "rows", 3000, 5, host_rows=64) as store:
        write(store, rows, 1)
        assert store.counts() == Counts(0, 0, 18 * 5)
        assert read(store, rows).equal(some_records(50, 5, 1))
        assert store.counts() == Counts(32, 18 * 5, 18 * 5)  # as those that are there are of the same call
        write(store, range(200), 2)
        assert read(store, range(200)).equal(some_records(200, 5, 2))


def test_a_small_table_is_all_in_memory(tmp_path):
    with disk_rows(tmp_path / "rows", 20, 516, host_rows=10**15) as store:
        write(store, range(20), 1)
        assert read(store, range(20)).equal(some_records(20, 516, 1))
        assert store.counts() == Counts(20, 0, 0)


def test_a_read_sees_the_writes_before_it_and_none_behind(tmp_path):
    with disk_rows(tmp_path / "rows", 1000, 516, host_rows=32) as store:
        with paused(store):
            requests = []
            for seed in range(4):
                requests.append((start_read(store, range(100)), seed - 1))
                write(store, range(100), seed)
        for (future, records), seed in requests:
            future.wait()
            assert records.equal(Model(516).read(range(100)) if seed < 0 else some_records(100, 516, seed))


def test_a_read_that_fails_harms_nothing_else(filled, monkeypatch):
    """Neither what is in memory, nor the places of rows that are not there."""
    store, model = disk_rows(filled, 100, 516, host_rows=32), Model(516)
    model.write(range(100), 1)
    write(store, range(30), 2).wait()
    model.write(range(30), 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(os.preadv, errno.EIO))
        stores.break_queues(patch, errno.EIO, writes=False)
        for rows in ([3, 50], range(100)):
            with pytest.raises(StorageError, match=r"could not be read: \[Errno 5\] Input/output error"):
                read(store, rows)
        assert read(store, range(30)).equal(model.read(range(30)))
        assert store.counts() == Counts(30, 0, 0)
    assert read(store, range(100)).equal(model.read(range(100)))
    store.close()
    with disk_rows(filled, 100, 516) as plain:
        assert read(plain, range(100)).equal(model.read(range(100)))


def break_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "pwritev", failing(os.pwritev, errno.EIO))
    stores.break_queues(patch, errno.EIO)


@pytest.mark.parametrize("operation", ["read", "write", "write through", "flush", "snapshot", "pages", "bytes"])
def test_rows_that_cannot_be_written_back_are_the_last_operation(filled, monkeypatch, operation):
    """Be it that others need their places, or that they are to be in the file."""
    store = disk_rows(filled, 100, 516, host_rows=32)
    write(store, range(32), 2).wait()
    break_writes(monkeypatch)
    ask: dict[str, Callable[[], object]] = {
        "read": lambda: read(store, [50]),
        "write": lambda: write(store, [50], 3).wait(),
        "write through": lambda: write(store, range(40), 3).wait(),
        "flush": lambda: store.flush().wait(),
        "snapshot": lambda: store.snapshot(filled.with_name("saved")).wait(),
        "pages": store.changed_pages,
        "bytes": store.bytes_on_disk,
    }
    with pytest.raises(StorageError, match=r"could not be written: \[Errno 5\] Input/output error; check the disk"):
        ask[operation]()
    monkeypatch.undo()
    for later in (lambda: read(store, [1]), lambda: write(store, [1], 0), store.flush, store.changed_pages):
        with pytest.raises(StorageError, match=r"is unusable because a write failed: table 'user'.*Errno 5"):
            later()
    assert not filled.with_name("saved").exists()
    store.counts()  # can be asked for even so
    store.close()  # everybody knows by now


def test_what_was_asked_for_behind_a_failure_is_refused(filled, monkeypatch):
    store = disk_rows(filled, 100, 516, host_rows=32)
    write(store, range(32), 2).wait()
    break_writes(monkeypatch)
    with paused(store):
        (first, _), (second, _) = start_read(store, [50]), start_read(store, [5])  # row 5 is in memory
        third = write(store, [5], 3)
    with pytest.raises(StorageError, match="could not be written"):
        first.wait()
    for later in (second, third):
        with pytest.raises(StorageError, match="is unusable"):
            later.wait()
    store.close()


@pytest.mark.parametrize("behind", [False, True])
def test_a_failure_that_nobody_has_waited_for_comes_out_of_close(filled, monkeypatch, behind):
    """Also if it is only then that rows are written back."""
    store = disk_rows(filled, 100, 516, host_rows=32)
    write(store, range(32), 2).wait()
    break_writes(monkeypatch)
    if behind:
        start_read(store, [50])
    with pytest.raises(StorageError, match=r"could not be written: \[Errno 5\]"):
        store.close()
    store.close()


def test_what_fails_in_memory_is_told_too(filled, monkeypatch):
    """Rows that had a place and did not get to the file are lost, whatever the reason."""
    store = disk_rows(filled, 100, 516, host_rows=32)
    write(store, range(32), 2).wait()

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(store._cache, "_empty_records", fail)
    with pytest.raises(StorageError, match="rows could not be written back: no room"):
        write(store, [50], 3).wait()
    with pytest.raises(StorageError, match="is unusable"):
        read(store, [1])


def test_pages_and_bytes_are_those_of_all_that_was_written(tmp_path):
    store, plain = disk_rows(tmp_path / "rows", 5000, 516, host_rows=5000), disk_rows(tmp_path / "plain", 5000, 516)
    for item in (store, plain):
        write(item, range(0, 5000, 3), 1).wait()
        item.snapshot(tmp_path / "saved").wait()
        write(item, [7, 4000], 2).wait()
    assert store.last_snapshot
    assert store.changed_pages().equal(plain.changed_pages())
    assert store.bytes_on_disk() > 5000 * 516
    store.snapshot(tmp_path / "changes", changes_only=True).wait()
    assert (tmp_path / "changes").stat().st_size == PAGE * 4
    store.close()
    plain.close()


@pytest.mark.parametrize(
    ("host_rows", "ending"),
    [(None, "dropped"), *((1000, ending) for ending in ("dropped", "in a circle", "while operators are traced"))],
)
def test_a_table_that_nobody_has_any_more_is_written_back_and_closed(tmp_path, host_rows, ending):
    initial, shapes = set(threading.enumerate()), ShapeEnv()
    store = disk_rows(tmp_path / "rows", 1000, 516, host_rows=host_rows)
    write(store, range(1000), 5).wait()
    if ending != "dropped":
        store.itself = store
    local = {thread for thread in set(threading.enumerate()) - initial if not thread.name.startswith("tritonemb-disk")}
    assert local
    traced = ending == "while operators are traced"
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes) if traced else nullcontext():
        del store
        deadline = time.monotonic() + 60
        while any(thread.is_alive() for thread in local) and time.monotonic() < deadline:
            gc.collect()  # the thread may still hold what it has just done
            time.sleep(0.01)
    assert not [thread.name for thread in local if thread.is_alive()]
    assert not shapes.pending_fresh_unbacked_symbols
    with disk_rows(tmp_path / "rows", 1000, 516) as store:
        assert read(store, range(1000)).equal(some_records(1000, 516, 5))


def test_a_file_that_nobody_can_open_again_is_not_written_to_in_the_end(tmp_path, monkeypatch):
    store = disk_rows(tmp_path / "rows", 1000, 516, host_rows=1000)
    write(store, range(1000), 5).wait()
    (tmp_path / "rows").unlink()
    written: list[int] = []
    real = RowFile.move
    monkeypatch.setattr(RowFile, "move", staticmethod(lambda *inputs: written.append(1) or real(*inputs)))
    store.close()
    assert written == []


@pytest.mark.parametrize("host_rows", [None, 32])
def test_tables_and_rows_of_inference_mode(tmp_path, host_rows):
    """Its tensors cannot be changed without it."""

    @torch.inference_mode()
    def first() -> tuple[DiskRows, torch.Tensor]:
        store = disk_rows(tmp_path / "rows", 100, 516, host_rows=host_rows)
        write(store, range(0, 100, 3), 1).wait()
        return store, read(store, range(100))

    model = Model(516)
    model.write(range(0, 100, 3), 1)
    with ThreadPoolExecutor(1) as pool:
        store, result = pool.submit(first).result()
    assert result.equal(model.read(range(100)))
    write(store, [5, 6], 2).wait()
    model.write([5, 6], 2)
    assert read(store, range(100)).equal(model.read(range(100)))
    store.close()
    with disk_rows(tmp_path / "rows", 100, 516) as store:
        assert read(store, range(100)).equal(model.read(range(100)))


def test_more_rows_than_there_is_memory_for(tmp_path):
    with pytest.raises(
        StorageError,
        match=r"table 'user': cannot allocate .* cached rows .*; reduce CacheConfig",
    ):
        disk_rows(tmp_path / "rows", 10**10, 100_000, host_rows=10**10)
    disk_rows(tmp_path / "rows", 10**10, 100_000).close()  # it was closed
