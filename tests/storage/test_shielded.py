"""Signals whose handlers raise, as Ctrl-C's does, while the main thread waits for a disk."""

import itertools
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.storage.stores import Model, Stop, disk_rows, identity, initial, no_thread, read, some_records, write
from tritonemb.storage import DiskRows, SnapshotReader, aio, page_table, restore
from tritonemb.storage.io import copy_rows, digest
from tritonemb.storage.store import OperationQueue, is_cancelled
from tritonemb.storage.threads import IoThreads, shielded

NUM_ROWS, NUM_BYTES = 4000, 4000  # a block each
pytestmark = pytest.mark.timeout(120)  # where one is not seen through, somebody waits for ever


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with a whole snapshot, and one of changes."""
    folder = tmp_path_factory.mktemp("saved")
    with disk_rows(folder / "live", NUM_ROWS, NUM_BYTES) as store:
        write(store, range(NUM_ROWS), 1)
        store.snapshot(folder / "whole").wait()
        write(store, [5], 2)
        store.snapshot(folder / "changes", changes_only=True).wait()
    return folder


@pytest.fixture(autouse=True)
def new_contexts(monkeypatch):
    monkeypatch.setattr(aio.IoContext, "free", aio._make_contexts())


def check(rows: SnapshotReader) -> None:
    """Read all, and compare."""
    records = torch.empty(NUM_ROWS, NUM_BYTES, dtype=torch.uint8)
    rows.read(torch.arange(NUM_ROWS), records, initial)
    assert records.equal(some_records(NUM_ROWS, NUM_BYTES, 1))


def open_table(path: Path) -> DiskRows:
    return DiskRows.open(path, identity(NUM_ROWS, NUM_BYTES), initial)


def free_contexts() -> list[aio.IoContext]:
    """Those that nobody has."""
    pool = aio.IoContext.free
    results = [pool.get() for _ in range(pool.qsize())]
    for context in results:
        pool.put(context)
    return results


def all_are_free(context: aio.IoContext) -> bool:
    """Whether nobody has a context, and nothing of this one is in flight."""
    return len(free_contexts()) == aio.NUM_CONTEXTS and context._in_flight == []


def until(happened) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class TestShielded:
    def test_the_main_thread_has_it_done_by_another_one(self):
        assert shielded(threading.current_thread) is not threading.current_thread()
        with pytest.raises(KeyError, match="no"):
            shielded(lambda: {}["no"])

    def test_another_thread_does_it_itself(self):
        def work() -> None:
            results.append((shielded(threading.current_thread), threading.current_thread()))

        results = []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert results == [(thread, thread)]

    def test_when_no_thread_can_be_started_it_is_done_all_the_same(self, monkeypatch):
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        assert shielded(threading.current_thread) is threading.current_thread()

    def test_work_that_has_not_begun_never_does(self, monkeypatch, interrupt):
        real, threads, runs = threading.Thread.start, [], []

        def start_late(thread: threading.Thread) -> None:
            threads.append(thread)
            interrupt()

        monkeypatch.setattr(threading.Thread, "start", start_late)
        with pytest.raises(Stop):
            shielded(lambda: runs.append(1))
        real(threads[0])
        threads[0].join()
        assert runs == []

    def test_an_interrupt_while_the_thread_is_started_is_raised(self, monkeypatch):
        """Python's `Thread.start` waits on a condition variable, whose lock is then unlocked twice."""
        real, runs = threading.Thread.start, []

        def start(thread: threading.Thread) -> None:
            real(thread)
            try:
                raise Stop
            finally:
                raise RuntimeError("release unlocked lock")

        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(Stop):
            shielded(lambda: runs.append(threading.current_thread()))
        assert threading.current_thread() not in runs

    @pytest.mark.parametrize("waiting", ["call", "operation", "tasks"])
    def test_an_interrupt_is_raised_and_leaves_nothing_locked_wherever_it_comes(self, waiting):
        """Signals are handled where a function begins, and behind each call of a built-in one."""
        pool, operations, movers = IoThreads(2), OperationQueue("test"), set()
        wait_for = {
            "call": shielded,
            "operation": lambda work: operations.submit(work).wait(),
            "tasks": lambda work: pool.run(lambda _: work(), 1),
        }[waiting]

        def work() -> None:
            movers.add(threading.current_thread())
            time.sleep(0.01)  # the main thread does wait

        def is_interrupted(number: int) -> bool:
            """Whether there are so many places."""
            places = itertools.count(1)

            def stop(frame: object, event: str, _: object) -> None:
                if event in ("call", "c_return") and next(places) == number:
                    raise Stop

            try:
                sys.setprofile(stop)
                wait_for(work)
            except Stop:
                return True
            finally:
                sys.setprofile(None)
            assert next(places) <= number, "it is swallowed"
            return False

        wait_for(work)  # which starts threads
        number = 1
        while is_interrupted(number):
            wait_for(work)
            number += 1
        assert number > 8
        assert threading.main_thread() not in movers

    def test_an_interrupt_waits_for_the_end_and_a_second_one_does_not(self, interrupt):
        ended, go_on = threading.Event(), threading.Event()

        def once() -> None:
            interrupt()
            time.sleep(0.1)
            ended.set()

        def twice() -> None:
            interrupt()
            interrupt()
            assert go_on.wait(60)

        with pytest.raises(Stop):
            shielded(once)
        assert ended.is_set()
        with pytest.raises(Stop):
            shielded(twice)
        go_on.set()


CALLS = {
    "open": lambda folder, to: open_table(folder / "live").close(),
    "saved": lambda folder, to: SnapshotReader(folder / "whole").close(),
    "read": lambda folder, to: check(SnapshotReader(folder / "whole")),
    "restore": lambda folder, to: restore(to, folder / "whole", [folder / "changes"]),
    "copy": lambda folder, to: copy_rows(folder / "whole", to),
    "digest": lambda folder, to: digest(folder / "whole"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_the_main_thread_moves_nothing_itself(saved, tmp_path, monkeypatch, call):
    movers = set()
    for owner, name in ((aio.IoContext, "submit"), (aio.IoContext, "wait"), (IoThreads, "run")):
        real = getattr(owner, name)

        def note(*arguments, real=real):
            movers.add(threading.current_thread())
            return real(*arguments)

        monkeypatch.setattr(owner, name, note)
    monkeypatch.setattr("tritonemb.storage.io._FICLONE", 0)  # no request, so it copies
    call(saved, tmp_path / "to")
    assert movers
    assert threading.main_thread() not in movers


def test_an_interrupt_when_the_kernel_has_told_what_has_ended(saved, monkeypatch, interrupt):
    """Once lost, it is never told again, and whoever waits for it waits for ever."""
    messages, armed, real = [], [], aio._call

    def call(index: int, *arguments: int) -> int:
        result = real(index, *arguments)
        if index == aio._GET_EVENTS:
            messages.append(result)
            if armed and len(messages) == 1:
                interrupt()
        return result

    with SnapshotReader(saved / "whole") as rows:
        monkeypatch.setattr(aio, "_call", call)
        check(rows)
        if not messages:
            pytest.skip("no asynchronous I/O here")
        messages.clear()
        armed.append(True)
        with pytest.raises(Stop):
            check(rows)
        assert len(free_contexts()) == aio.NUM_CONTEXTS
        assert {context._queue._in_flight for context in free_contexts()} == {0}
        check(rows)


@pytest.mark.parametrize("interrupts", [1, 2])
def test_a_context_is_not_reused_before_what_is_in_flight_is_done(saved, monkeypatch, interrupt, interrupts):
    """Else what the disk still brings goes into the midst of another table's rows."""
    real, go_on, in_use = aio.IoContext.wait, threading.Event(), []

    def wait(context: aio.IoContext, transfer: aio.Transfer) -> None:
        if not in_use:
            in_use.append(context)
            for _ in range(interrupts):
                interrupt()
            if interrupts == 2:
                assert go_on.wait(60)
        real(context, transfer)

    rows = SnapshotReader(saved / "whole")
    monkeypatch.setattr(aio.IoContext, "wait", wait)
    with pytest.raises(Stop):
        check(rows)
    if interrupts == 2:  # nobody has waited
        assert in_use[0] not in free_contexts()
        with SnapshotReader(saved / "whole") as other:
            check(other)
        go_on.set()
        until(lambda: all_are_free(in_use[0]))  # its thread may go on with another one for a moment
    else:
        assert all_are_free(in_use[0])
    check(rows)
    rows.close()


def test_a_file_is_closed_when_a_cancelled_read_is_done(saved, monkeypatch, interrupt):
    real, handles = aio.IoContext.wait, []

    def wait(context: aio.IoContext, transfer: aio.Transfer) -> None:
        if not handles:
            handles.append(0)
            interrupt()
            interrupt()
            until(lambda: closing)
            time.sleep(0.05)
            handles.append(rows._blocks.file.handle)
        real(context, transfer)

    closing = []
    rows = SnapshotReader(saved / "whole")
    handle = rows._blocks.file.handle
    monkeypatch.setattr(aio.IoContext, "wait", wait)
    with pytest.raises(Stop):
        check(rows)
    closing.append(True)
    rows.close()
    assert handles == [0, handle]


def test_a_table_whose_opening_is_interrupted_is_not_read_to_its_end(saved, monkeypatch, interrupt):
    """And it can be opened again at once."""
    real, begun = aio.IoContext.submit, []

    def submit(*arguments):
        begun.append(arguments)
        if len(begun) == 1:
            interrupt()
            until(is_cancelled)
        return real(*arguments)

    monkeypatch.setattr(page_table, "BUFFER_BYTES", 8192)
    monkeypatch.setattr(aio.IoContext, "submit", submit)
    with pytest.raises(Stop) as caught:  # which keeps all that is in its frames
        open_table(saved / "live")
    assert len(begun) == 1
    monkeypatch.setattr(page_table, "BUFFER_BYTES", 1 << 20)  # which is faster
    with open_table(saved / "live") as store:
        model = Model(NUM_BYTES)
        model.write(range(NUM_ROWS), 1)
        model.write([5], 2)
        assert read(store, range(NUM_ROWS)).equal(model.read(range(NUM_ROWS)))
    assert caught.value is not None


def test_a_table_that_was_opened_when_nobody_wanted_it_any_more_is_closed(saved, monkeypatch, interrupt):
    real = page_table.PageTable

    def interrupted(*arguments):
        interrupt()
        until(is_cancelled)
        monkeypatch.setattr(page_table, "PageTable", real)
        return real(*arguments)

    monkeypatch.setattr(page_table, "PageTable", interrupted)
    monkeypatch.setattr(page_table, "raise_if_cancelled", lambda: None)
    with pytest.raises(Stop) as caught:
        open_table(saved / "live")
    open_table(saved / "live").close()
    assert caught.value is not None


def test_a_restore_that_is_interrupted_leaves_nothing(saved, tmp_path, monkeypatch, interrupt):
    real = aio.IoContext.submit

    def submit(*arguments):
        interrupt()
        until(is_cancelled)
        return real(*arguments)

    monkeypatch.setattr(aio.IoContext, "submit", submit)
    with pytest.raises(Stop):
        restore(tmp_path / "to", saved / "whole", [saved / "changes"])
    assert list(tmp_path.iterdir()) == []


def test_a_close_that_is_interrupted_is_seen_through(tmp_path, interrupt):
    store, go_on = disk_rows(tmp_path / "rows", 100, 516), threading.Event()
    write(store, range(100), 1).wait()

    def hold() -> None:
        until(lambda: store._closing is not None)
        interrupt()
        assert go_on.wait(60)

    store._operations.submit(hold)
    with pytest.raises(Stop):
        store.close()
    go_on.set()
    store.close()
    with disk_rows(tmp_path / "rows", 100, 516) as store:
        assert read(store, range(100)).equal(some_records(100, 516, 1))
