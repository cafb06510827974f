"""The pool of threads that CPU kernels run on."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tritonemb.kernels.cpu import threads


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 7, 200])
def test_every_task_runs_once(num_tasks, num_threads):
    torch.set_num_threads(num_threads)
    runs = [0] * num_tasks

    def work(task: int) -> None:
        runs[task] += 1

    threads.run(work, num_tasks)
    assert runs == [1] * num_tasks


def test_tasks_run_side_by_side():
    torch.set_num_threads(3)
    everyone = threading.Barrier(3, timeout=30)
    names = set()

    def work(task: int) -> None:
        everyone.wait()
        names.add(threading.current_thread().name)

    threads.run(work, 3)
    assert len(names) == 3
    assert threading.current_thread().name in names


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_an_exception_is_raised_after_all_tasks_ended(num_threads):
    torch.set_num_threads(num_threads)
    lock, running, finished = threading.Lock(), [0], []

    def work(task: int) -> None:
        with lock:
            running[0] += 1
        try:
            if task == 3:
                raise KeyError("task 3")
            threading.Event().wait(0.002)
            finished.append(task)
        finally:
            with lock:
                running[0] -= 1

    with pytest.raises(KeyError, match="task 3"):
        threads.run(work, 12)
    assert running == [0]
    count = len(finished)
    threading.Event().wait(0.02)
    assert len(finished) == count
    assert num_threads == 1 or sorted(finished) == [task for task in range(12) if task != 3]


def test_the_pool_serves_again_after_an_exception():
    torch.set_num_threads(2)

    def fail(task: int) -> None:
        raise ValueError(task)

    for _ in range(3):
        with pytest.raises(ValueError):  # noqa: PT011  whichever task failed first
            threads.run(fail, 5)
    done: list[int] = []
    threads.run(done.append, 5)
    assert sorted(done) == list(range(5))


def test_several_threads_use_the_pool_at_once():
    torch.set_num_threads(4)

    def caller(index: int) -> list[int]:
        torch.set_num_threads(2 + index % 3)  # the pool grows under its users
        done: list[int] = []
        for _ in range(50):
            threads.run(lambda task: done.append(index * 100 + task), 6)
        return sorted(done)

    with ThreadPoolExecutor(6) as callers:
        results = list(callers.map(caller, range(6)))
    assert results == [sorted([index * 100 + task for task in range(6)] * 50) for index in range(6)]


def _run_in_child(queue: multiprocessing.Queue[list[int]]) -> None:
    done: list[int] = []
    threads.run(done.append, 9)
    queue.put(sorted(done))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own():
    torch.set_num_threads(3)
    threads.run(lambda task: None, 9)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_run_in_child, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=60) == list(range(9))
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
