import gc
import itertools
import os
import threading
import time

import pytest

from tests.data.logs import options, random_lines, write
from tests.data.threads import running, threads_end
from tests.helpers import DEADLINE, process_ends
from tritonemb.data import ClickLog, make_synthetic
from tritonemb.data.protocol import Prefetcher, end_all, reader_seconds


def test_items_come_in_order_and_no_further_ahead_than_asked():
    created: list[int] = []

    def count():
        for number in range(20):
            created.append(number)
            yield number

    items = Prefetcher(count(), 4, "tritonemb-test")
    for selection in range(3):
        items.settle()
        assert len(created) == 4 + selection
        assert next(items) == selection
    assert list(items) == list(range(3, 20))
    assert list(items) == []
    assert not running()


def test_an_error_comes_in_its_place_with_its_type():
    class Odd(Exception):
        pass

    def broken():
        yield 1
        yield 2
        raise Odd("three")

    items = Prefetcher(broken(), 10, "tritonemb-test")
    items.settle()
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(Odd, match="three"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)


def test_closing_ends_the_thread_and_the_source():
    ended: list[bool] = []

    def endless():
        try:
            yield from itertools.count()
        finally:
            ended.append(True)

    items = Prefetcher(endless(), 2, "tritonemb-test")
    next(items)
    items.close()
    items.close()
    assert ended == [True]
    assert not running()
    with pytest.raises(StopIteration):
        next(items)


@pytest.mark.parametrize("leave", ["close", "drop"])
def test_a_source_that_waits_is_told_to_give_up(leave):
    messages = threading.Event()

    def waiting():
        yield 1
        messages.wait(DEADLINE)

    items = Prefetcher(waiting(), 2, "tritonemb-test", messages.set)
    next(items)
    if leave == "drop":
        del items
        gc.collect()
    else:
        items.close()
    assert messages.is_set()
    assert threads_end()


def test_collecting_an_iterator_ends_its_thread_and_does_not_wait_for_it():
    """The collector may run in a thread that this one waits for."""
    release = threading.Event()

    def slow():
        yield 1
        release.wait(DEADLINE)
        yield from itertools.count()

    items = Prefetcher(slow(), 2, "tritonemb-test")
    next(items)
    del items
    gc.collect()
    assert running()
    release.set()
    assert threads_end()


@pytest.mark.parametrize("threaded", [True, False])
def test_a_stream_that_is_left_ends_its_threads(threaded, monkeypatch):
    """A small batch is gathered without a thread."""
    monkeypatch.setattr("tritonemb.data.datasets.MAX_UNTHREADED", 0 if threaded else 8 * 100)
    with make_synthetic(1000, 100).open("train", 8) as stream:
        next(stream)
        assert bool(running()) == threaded
    assert not running()
    with pytest.raises(StopIteration):
        next(stream)


def test_a_log_that_is_left_ends_its_threads(tmp_path):
    log = ClickLog(write(tmp_path, random_lines(500)), options(chunk_bytes=2000, shuffle_rows=20))
    for selection in (0, 1, 30):
        stream = log.open("train", 4, shuffle=True)
        assert len(list(itertools.islice(stream, selection))) == selection
        stream.close()
        assert not running()
    stream = log.open("train", 4)
    next(stream)
    del stream
    gc.collect()
    assert threads_end()


def test_the_time_of_readers_is_that_of_all_their_threads(tmp_path):
    """Each chunk and each batch takes 10 ms of a thread's CPU time or more; the consumer's own does not count."""
    log = ClickLog(write(tmp_path, random_lines(100)), options(chunk_bytes=10_000))
    chunks, encode, before = log._reader.source.chunks, log.encode, reader_seconds()

    def burn(result):
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return result

    log._reader.source.chunks = lambda *args: map(burn, chunks(*args))
    log.encode = lambda batch: burn(encode(batch))
    num_chunks = len(list(log.scan("train", lambda batch: batch.num_rows)))
    with log.open("train", 100) as stream:
        list(stream)
    assert num_chunks > 1
    assert reader_seconds() - before >= 0.01 * 3 * num_chunks
    before = reader_seconds()
    burn(None)
    assert reader_seconds() == before


def test_errors_of_a_log_come_after_the_batches_before_them(tmp_path):
    lines = random_lines(40)
    first = sum(len(line) + 1 for line in lines[:37])
    log = ClickLog(write(tmp_path, [*lines, b"bad"]), options(chunk_bytes=first, shuffle_rows=8))
    stream = log.open("train", 8, shuffle=True)
    assert [len(next(stream)) for _ in range(4)] == [8, 8, 8, 8]  # the fifth batch shares a chunk with the bad line
    with pytest.raises(ValueError, match="line 41: expected 40 tab-separated fields, found 1"):
        next(stream)
    assert not running()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_off_ends_without_the_threads_of_its_streams():
    items = Prefetcher(iter(range(100)), 2, "tritonemb-test")
    assert next(items) == 0
    items.settle()  # its thread waits in a queue
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(RuntimeError, match="this stream was opened before the process was forked"):
                next(items)
            assert list(Prefetcher(iter(range(3)), 2, "tritonemb-test")) == [0, 1, 2]
            items.close()
            end_all()
            os._exit(7)
        finally:
            os._exit(1)
    ended = process_ends(child)
    if not ended:
        os.kill(child, 9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert next(items) == 1
    items.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_memory_does_not_grow_with_the_log(tmp_path):
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    path = write(tmp_path, random_lines(500) * 200, "log.txt")
    log = ClickLog(path, options(chunk_bytes=1 << 18, shuffle_rows=4000))
    peaks = []
    with log.open("train", 1000, shuffle=True) as stream:
        for number, _ in enumerate(stream):
            if number % 5 == 0:
                peaks.append(resident())
    assert max(peaks) - peaks[4] < 25_000_000  # all batches together have 47 MB
