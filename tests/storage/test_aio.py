"""Linux's asynchronous I/O, and what replaces it elsewhere."""

import errno
import os
import threading
from contextlib import closing

import numpy as np
import pytest

from tests.storage.stores import disk_rows, read, some_records, write
from tritonemb.storage import aio
from tritonemb.storage.aio import IoBuffer, PageFile

PAGE = 4096


@pytest.fixture
def queue():
    created = aio.make_queue()
    if created is None:
        pytest.skip("this system has no asynchronous I/O")
    return created


@pytest.fixture
def pages(tmp_path):
    """A file of 2000 pages, each filled with its number, open for direct I/O where it can be."""
    path = tmp_path / "pages"
    np.repeat(np.arange(2000, dtype=np.int64), PAGE // 8).tofile(path)
    file = PageFile(path)
    yield file.handle
    file.close()


def extents(buffer: IoBuffer, numbers: np.ndarray, first: int = 0) -> aio.Extents:
    """Pages of a file, one behind the other in a buffer."""
    addresses = buffer.address + PAGE * (first + np.arange(numbers.size))
    return aio.Extents(addresses, np.full(numbers.size, PAGE), numbers * PAGE)


def firsts(buffer: IoBuffer) -> np.ndarray:
    """The first number in each page of a buffer."""
    return buffer.array.view(np.int64)[:: PAGE // 8]


def test_more_extents_than_can_be_in_flight(queue, pages):
    numbers, buffer = np.random.default_rng(0).permutation(2000), IoBuffer(2000 * PAGE)
    transfer = queue.submit(pages, extents(buffer, numbers), False)
    assert (transfer.wait() == PAGE).all()
    assert (firsts(buffer) == numbers).all()


def test_transfers_that_run_at_once(queue, pages):
    """A second one is submitted, and waited for, before the first."""
    buffer, numbers = IoBuffer(900 * PAGE), np.random.default_rng(0).permutation(2000)[:900]
    first = queue.submit(pages, extents(buffer, numbers[:300]), False)
    second = queue.submit(pages, extents(buffer, numbers[300:], 300), False)
    assert (second.wait() == PAGE).all()
    assert (firsts(buffer)[300:] == numbers[300:]).all()
    assert (first.wait() == PAGE).all()
    assert (firsts(buffer)[:300] == numbers[:300]).all()


def test_numbers_of_transfers_begin_anew(queue, pages):
    """They share 63 bits with the number of an extent."""
    buffer, numbers = IoBuffer(2 * PAGE), np.array([7, 1999])
    queue._next = (1 << 31) - 1
    first = queue.submit(pages, extents(buffer, numbers[:1]), False)
    second = queue.submit(pages, extents(buffer, numbers[1:], 1), False)
    assert (second.wait() == PAGE).all()
    assert (first.wait() == PAGE).all()
    assert (firsts(buffer) == numbers).all()


def test_what_is_written_is_in_the_file(queue, pages):
    buffer, numbers = IoBuffer(100 * PAGE), np.arange(7, 1000, 10)
    buffer.array.view(np.int64)[:] = -5
    assert (queue.submit(pages, extents(buffer, numbers), True).wait() == PAGE).all()
    actual = IoBuffer(2000 * PAGE)
    queue.submit(pages, extents(actual, np.arange(2000)), False).wait()
    expected = np.arange(2000)
    expected[numbers] = -5
    assert (firsts(actual) == expected).all()


def test_each_extent_has_a_result_of_its_own(queue, pages):
    buffer = IoBuffer(4 * PAGE)
    requests = extents(buffer, np.array([1, 2000, 3, 5000]))
    requests.addresses[2] = 8 * PAGE  # no memory of this process
    assert queue.submit(pages, requests, False).wait().tolist() == [PAGE, 0, -errno.EFAULT, 0]
    handle = os.open(f"/proc/self/fd/{pages}", os.O_RDONLY)
    assert queue.submit(handle, extents(buffer, np.array([1, 2])), True).wait().tolist() == [-errno.EBADF] * 2
    os.close(handle)


@pytest.mark.more
def test_a_queue_is_given_back(queue, pages):
    """Linux has 65,536 requests for all processes, and each queue 512 of them."""
    for _ in range(150):
        other = aio.make_queue()
        assert other is not None
        buffer = IoBuffer(PAGE)
        assert other.submit(pages, extents(buffer, np.array([5])), False).wait() == PAGE


@pytest.mark.more
def test_a_system_that_has_no_queues_left(monkeypatch, tmp_path):
    def refuse(index: int, *_: int) -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(aio, "_call", refuse)
    monkeypatch.setattr(aio.IoContext, "free", aio._make_contexts())
    assert aio.make_queue() is None
    with disk_rows(tmp_path / "rows", 1000, 516) as store:
        write(store, range(1000), 1)
        assert read(store, range(1000)).equal(some_records(1000, 516, 1))


def test_other_machines_have_none(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    assert aio.make_queue() is None


def test_a_forked_process_may_use_and_drop_a_buffer():
    buffer = IoBuffer(aio.HUGE_PAGE)
    buffer.array[:] = 7
    child = os.fork()
    if child == 0:
        local, lost = IoBuffer(aio.HUGE_PAGE), buffer.array.any()
        del buffer
        local.array[:] = 8  # it lay where the other one had been, and was unmapped with it
        os._exit(int(lost))
    assert os.waitpid(child, 0)[1] == 0
    assert (buffer.array == 7).all()


def test_a_kernel_that_cannot_wipe_buffers_has_them(monkeypatch):
    monkeypatch.setattr(aio, "_WIPE_ON_FORK", 99)
    assert not IoBuffer(aio.HUGE_PAGE).array.any()


def test_there_is_a_fixed_number_of_contexts(monkeypatch):
    monkeypatch.setattr(aio, "NUM_CONTEXTS", 2)
    monkeypatch.setattr(aio.IoContext, "free", aio._make_contexts())
    got = threading.Event()

    def third() -> None:
        with closing(aio.IoContext.free.get()):
            got.set()

    thread = threading.Thread(target=third)
    with closing(aio.IoContext.free.get()) as first:
        with closing(aio.IoContext.free.get()) as second:
            assert first is not second
            thread.start()
            assert not got.wait(0.1)
        assert got.wait(30)
    thread.join()


def test_the_buffer_of_a_context_grows_for_large_blocks(monkeypatch):
    monkeypatch.setattr(aio.IoContext, "free", aio._make_contexts())
    with closing(aio.IoContext.free.get()) as context:
        assert context.reserve(PAGE) is context.buffer
        assert context.reserve(3 * aio.HALF_BYTES).array.size == 6 * aio.HALF_BYTES
