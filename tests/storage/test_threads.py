"""The threads that wait for a disk, and the one that keeps operations in order."""

import threading
import time
import weakref

import pytest

from tests.storage.stores import Stop, no_thread
from tritonemb.storage.store import Completion, OperationQueue
from tritonemb.storage.threads import IoThreads


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 40])
def test_every_task_runs_once(num_tasks, num_threads):
    pool, runs = IoThreads(num_threads), [0] * num_tasks

    def work(task: int) -> None:
        runs[task] += 1

    pool.run(work, num_tasks)
    assert runs == [1] * num_tasks


def test_as_many_run_side_by_side_as_it_has_threads():
    pool, everyone = IoThreads(4), threading.Barrier(4, timeout=30)
    pool.run(lambda _: everyone.wait(), 4)  # fewer would never get past it


def test_the_first_failure_is_raised_when_all_have_ended():
    pool, begun, ended = IoThreads(3), [], []
    combined = threading.Barrier(3, timeout=30)

    def work(task: int) -> None:
        begun.append(task)
        if task < 3:
            combined.wait()
        if task in (1, 2):
            raise KeyError(task)
        threading.Event().wait(0.05)
        ended.append(task)

    with pytest.raises(KeyError, match="1"):
        pool.run(work, 100)
    assert set(begun) - set(ended) == {1, 2}
    assert len(begun) < 10  # what had not begun was left out
    pool.run(ended.append, 2)  # it goes on


def test_jobs_have_their_tasks_in_turn():
    """A short one does not wait until a long one is over."""
    pool, order, begun = IoThreads(1), [], threading.Event()

    def long(task: int) -> None:
        begun.set()
        order.append("long")
        threading.Event().wait(0.01)

    other = threading.Thread(target=lambda: pool.run(long, 100))
    other.start()
    assert begun.wait(30)
    pool.run(lambda _: order.append("short"), 3)
    other.join()
    assert order.count("long") == 100
    assert "".join(order).endswith("long" * 50)


def test_operations_run_in_order_and_a_failure_stays_its_own():
    operations, order, gate = OperationQueue("test"), [], threading.Event()

    def fail() -> None:
        raise KeyError("second")

    first = operations.submit(lambda: order.append(gate.wait(30)))
    second, third = operations.submit(fail), operations.submit(lambda: order.append("third"))
    assert not first.done()
    gate.set()
    third.wait()
    assert order == [True, "third"]
    for _ in range(2):
        with pytest.raises(KeyError, match="second"):
            second.wait()
    thread = operations._thread
    operations.close(lambda: order.append("last")).wait()
    assert order[2:] == ["last"]
    thread.join(30)
    assert not thread.is_alive()


def test_the_last_operation_of_a_thread_that_was_never_needed_needs_none():
    results = []
    assert OperationQueue("test").close(lambda: results.append(threading.current_thread())).done()
    assert results == [threading.current_thread()]


def test_a_run_that_is_interrupted_waits_for_what_has_begun_and_begins_nothing_more(interrupt):
    pool, begun, ended, combined = IoThreads(2), [], [], threading.Barrier(2, timeout=30)

    def work(task: int) -> None:
        begun.append(task)
        if task < 2:
            combined.wait()
        if task == 1:
            interrupt()
        threading.Event().wait(0.2)  # by then nothing that is not waited for would have ended
        ended.append(task)

    with pytest.raises(Stop):
        pool.run(work, 64)
    assert sorted(begun) == sorted(ended)
    assert len(begun) < 64
    pool.run(ended.append, 2)  # it goes on


@pytest.mark.parametrize("num_started", [0, 2])
def test_a_pool_makes_do_with_the_threads_that_there_can_be(monkeypatch, num_started):
    """When the interpreter ends no more are started."""
    pool, runs = IoThreads(4), []
    pool.run(runs.append, num_started)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    pool.run(runs.append, 10)
    assert sorted(runs[num_started:]) == list(range(10))


class Late(Completion):
    """Whoever sets it goes on late, when those that wait have long gone on."""

    def set(self) -> None:
        super().set()
        time.sleep(0.3)


class Memory:
    def __init__(self, go_on: threading.Event) -> None:
        self.go_on = go_on

    def use(self, *_: int) -> None:
        assert self.go_on.wait(10)


@pytest.mark.parametrize("kind", ["operation", "tasks"])
def test_what_is_done_holds_no_memory(kind):
    """The arena of offloaded parameters gives it to the next one at once."""
    go_on = threading.Event()
    memory = Memory(go_on)
    alive = weakref.ref(memory)
    if kind == "operation":
        submitted = OperationQueue("one").submit(memory.use)
        submitted._done = Late()
    else:
        submitted = IoThreads(2).submit(memory.use, 3)
    del memory
    go_on.set()
    submitted.wait()
    assert alive() is None
