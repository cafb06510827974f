"""Signals whose handlers raise, as Ctrl-C's does, while the main thread waits for a disk."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from tests.storage.stores import Model, Stop, disk_rows, initial, no_thread, plain_record, read, some_records, write
from tritonemb.storage import DiskRows, SavedRows, aio, copy_rows, digest, io, page_table, restore
from tritonemb.storage.threads import IoThreads, apart

NUM_ROWS, NUM_BYTES = 4000, 4000  # a block each
pytestmark = pytest.mark.timeout(30)  # where one is not seen through, somebody waits for ever


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
def new_lanes(monkeypatch):
    monkeypatch.setattr(io, "_lanes", io._Lanes())


def check(rows: SavedRows) -> None:
    """Read all, and compare."""
    records = torch.empty(NUM_ROWS, NUM_BYTES, dtype=torch.uint8)
    rows.read(torch.arange(NUM_ROWS), records, initial)
    assert records.equal(some_records(NUM_ROWS, NUM_BYTES, 1))


def open_table(path: Path) -> DiskRows:
    return DiskRows.open(path, "user", NUM_ROWS, plain_record(NUM_BYTES), 7, initial)


def free_lanes() -> list[io.Lane | None]:
    """Those that nobody has."""
    pool = io._lanes.free
    found = [pool.get() for _ in range(pool.qsize())]
    for lane in found:
        pool.put(lane)
    return found


def until(happened) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class TestApart:
    def test_the_main_thread_has_it_done_by_another_one(self):
        assert apart(threading.current_thread) is not threading.current_thread()
        with pytest.raises(KeyError, match="no"):
            apart(lambda: {}["no"])

    def test_another_thread_does_it_itself(self):
        def work() -> None:
            found.append((apart(threading.current_thread), threading.current_thread()))

        found = []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [(thread, thread)]

    def test_when_no_thread_can_be_started_it_is_done_all_the_same(self, monkeypatch):
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        assert apart(threading.current_thread) is threading.current_thread()

    def test_work_that_has_not_begun_never_does(self, monkeypatch, interrupt):
        real, threads, runs = threading.Thread.start, [], []

        def start_late(thread: threading.Thread) -> None:
            threads.append(thread)
            interrupt()

        monkeypatch.setattr(threading.Thread, "start", start_late)
        with pytest.raises(Stop):
            apart(lambda: runs.append(1))
        real(threads[0])
        threads[0].join()
        assert runs == []

    def test_an_interrupt_waits_for_the_end_and_a_second_one_does_not(self, interrupt):
        ended, go_on = threading.Event(), threading.Event()

        def once() -> None:
            interrupt()
            time.sleep(0.1)
            ended.set()

        def twice() -> None:
            interrupt()
            interrupt()
            assert go_on.wait(10)

        with pytest.raises(Stop):
            apart(once)
        assert ended.is_set()
        with pytest.raises(Stop):
            apart(twice)
        go_on.set()


CALLS = {
    "open": lambda folder, to: open_table(folder / "live").close(),
    "saved": lambda folder, to: SavedRows(folder / "whole").close(),
    "read": lambda folder, to: check(SavedRows(folder / "whole")),
    "restore": lambda folder, to: restore(to, folder / "whole", [folder / "changes"]),
    "copy": lambda folder, to: copy_rows(folder / "whole", to),
    "digest": lambda folder, to: digest(folder / "whole"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_the_main_thread_moves_nothing_itself(saved, tmp_path, monkeypatch, call):
    movers = set()
    for owner, name in ((io.Lane, "begin"), (io.Lane, "end"), (IoThreads, "run")):
        real = getattr(owner, name)

        def note(*arguments, real=real):
            movers.add(threading.current_thread())
            return real(*arguments)

        monkeypatch.setattr(owner, name, note)
    monkeypatch.setattr("tritonemb.storage.snapshot._clone", lambda *_: False)
    call(saved, tmp_path / "to")
    assert movers
    assert threading.main_thread() not in movers


def test_an_interrupt_when_the_kernel_has_told_what_has_ended(saved, monkeypatch, interrupt):
    """Once lost, it is never told again, and whoever waits for it waits for ever."""
    told, real = [], aio._call

    def call(which: int, *arguments: int) -> int:
        found = real(which, *arguments)
        if which == aio._GET_EVENTS:
            told.append(found)
            if len(told) == 1:
                interrupt()
        return found

    with SavedRows(saved / "whole") as rows:
        monkeypatch.setattr(aio, "_call", call)
        with pytest.raises(Stop):
            check(rows)
        if not told:
            pytest.skip("no asynchronous I/O here")
        assert len(free_lanes()) == io.NUM_LANES
        assert {lane._queue._on_their_way for lane in free_lanes() if lane is not None} == {0}
        check(rows)


@pytest.mark.parametrize("interrupts", [1, 2])
def test_a_lane_is_nobody_elses_before_what_is_on_its_way_has_ended(saved, monkeypatch, interrupt, interrupts):
    """Else what the disk still brings goes into the midst of another table's rows."""
    real, go_on, in_use = io.Lane.end, threading.Event(), []

    def end(lane: io.Lane, moving: io.Moving) -> None:
        if not in_use:
            in_use.append(lane)
            for _ in range(interrupts):
                interrupt()
            if interrupts == 2:
                assert go_on.wait(10)
        real(lane, moving)

    rows = SavedRows(saved / "whole")
    monkeypatch.setattr(io.Lane, "end", end)
    with pytest.raises(Stop):
        check(rows)
    if interrupts == 2:  # nobody has waited
        assert in_use[0] not in free_lanes()
        with SavedRows(saved / "whole") as other:
            check(other)
        go_on.set()
        until(lambda: in_use[0] in free_lanes())
    assert len(free_lanes()) == io.NUM_LANES
    assert in_use[0]._on_their_way == []
    check(rows)
    rows.close()


def test_a_file_is_closed_when_what_was_given_up_has_ended(saved, monkeypatch, interrupt):
    real, handles = io.Lane.end, []

    def end(lane: io.Lane, moving: io.Moving) -> None:
        if not handles:
            handles.append(0)
            interrupt()
            interrupt()
            until(lambda: closing)
            time.sleep(0.05)
            handles.append(rows._blocks.file.handle)
        real(lane, moving)

    closing = []
    rows = SavedRows(saved / "whole")
    handle = rows._blocks.file.handle
    monkeypatch.setattr(io.Lane, "end", end)
    with pytest.raises(Stop):
        check(rows)
    closing.append(True)
    rows.close()
    assert handles == [0, handle]


def test_a_table_whose_opening_is_interrupted_is_not_read_to_its_end(saved, monkeypatch, interrupt):
    """And it can be opened again at once."""
    real, begun = io.Lane.begin, []

    def begin(*arguments):
        begun.append(arguments)
        if len(begun) == 1:
            interrupt()
            until(lambda: threading.current_thread().given_up)
        return real(*arguments)

    monkeypatch.setattr(page_table, "HALF_BYTES", 8192)
    monkeypatch.setattr(io.Lane, "begin", begin)
    with pytest.raises(Stop) as caught:  # which keeps all that is in its frames
        open_table(saved / "live")
    assert len(begun) == 1
    with open_table(saved / "live") as store:
        model = Model(NUM_BYTES)
        model.write(range(NUM_ROWS), 1)
        model.write([5], 2)
        assert read(store, range(NUM_ROWS)).equal(model.read(range(NUM_ROWS)))
    assert caught.value is not None


def test_a_table_that_was_opened_when_nobody_wanted_it_any_more_is_closed(saved, monkeypatch, interrupt):
    real = page_table.Places

    def places(*arguments):
        interrupt()
        until(lambda: threading.current_thread().given_up)
        monkeypatch.setattr(page_table, "Places", real)
        return real(*arguments)

    monkeypatch.setattr(page_table, "Places", places)
    monkeypatch.setattr(io, "stop_if_given_up", lambda: None)
    with pytest.raises(Stop) as caught:
        open_table(saved / "live")
    open_table(saved / "live").close()
    assert caught.value is not None


def test_a_restore_that_is_interrupted_leaves_nothing(saved, tmp_path, monkeypatch, interrupt):
    real = io.Lane.begin

    def begin(*arguments):
        interrupt()
        until(lambda: threading.current_thread().given_up)
        return real(*arguments)

    monkeypatch.setattr(io.Lane, "begin", begin)
    with pytest.raises(Stop):
        restore(tmp_path / "to", saved / "whole", [saved / "changes"])
    assert list(tmp_path.iterdir()) == []


def test_a_close_that_is_interrupted_is_seen_through(tmp_path, interrupt):
    store, go_on = disk_rows(tmp_path / "rows", 100, 516), threading.Event()
    write(store, range(100), 1).wait()

    def hold() -> None:
        until(lambda: store._ending is not None)
        interrupt()
        assert go_on.wait(10)

    store._operations.ask(hold)
    with pytest.raises(Stop):
        store.close()
    go_on.set()
    store.close()
    with disk_rows(tmp_path / "rows", 100, 516) as store:
        assert read(store, range(100)).equal(some_records(100, 516, 1))
