"""Tasks of compiled kernels, shared among threads."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tritonemb.kernels.cpu import jit
from tritonemb.kernels.cpu.jit import called, compiled, run_tasks


@called
def count(task, runs, weights, bonus):
    room = np.empty(task + 1, dtype=np.float64)
    room[:] = weights[task]
    runs[task] += room.sum() + bonus


@compiled
def count_all(num_threads, num_tasks, runs, weights):
    run_tasks(num_threads, num_tasks, count, (runs, weights, 1))


@called
def ask_for_too_much(task, size):
    np.empty(size)[0] = task


@compiled
def all_ask_for_too_much(num_threads, num_tasks, size):
    run_tasks(num_threads, num_tasks, ask_for_too_much, (size,))


def counted(num_tasks: int) -> list[float]:
    runs, weights = np.zeros(num_tasks), np.arange(num_tasks, dtype=np.float64)
    count_all(torch.get_num_threads(), num_tasks, runs, weights)
    return runs.tolist()


def expected(num_tasks: int) -> list[float]:
    return [(task + 1) * task + 1 for task in range(num_tasks)]


def use_own_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit._team, "value", ctypes.cast(jit._python_team, ctypes.c_void_p).value)


@pytest.fixture(params=["openmp", "own"])
def team(request, monkeypatch):
    """Both kinds of threads."""
    if request.param == "own":
        use_own_team(monkeypatch)
    return request.param


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 7, 200])
@pytest.mark.usefixtures("team")
def test_every_task_runs_once(num_tasks, num_threads):
    torch.set_num_threads(num_threads)
    for _ in range(10):
        assert counted(num_tasks) == expected(num_tasks)


@pytest.mark.usefixtures("team")
def test_several_threads_share_out_tasks_at_once():
    torch.set_num_threads(3)

    def caller(index: int) -> bool:
        torch.set_num_threads(2 + index % 3)  # a pool of our own grows under its users
        return all(counted(20) == expected(20) for _ in range(50))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(caller, range(4)))


def test_a_team_of_our_own_runs_side_by_side():
    torch.set_num_threads(3)
    everyone, names = threading.Barrier(3, timeout=30), set()

    @jit._Body
    def body(data: int) -> None:
        everyone.wait()
        names.add(threading.current_thread().name)

    jit._python_team(ctypes.cast(body, ctypes.c_void_p).value, None, 3, 0)
    assert len(names) == 3
    assert threading.current_thread().name in names


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.usefixtures("team")
def test_memory_that_is_not_there_raises(num_threads):
    torch.set_num_threads(num_threads)
    with pytest.raises(MemoryError):
        all_ask_for_too_much(torch.get_num_threads(), 5, 1 << 58)
    assert counted(5) == expected(5)


def test_tasks_run_although_no_thread_can_be_started(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    torch.set_num_threads(4)
    use_own_team(monkeypatch)
    monkeypatch.setattr(jit._pool, "submit", refuse)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    assert counted(9) == expected(9)


def _count_in_child(queue: multiprocessing.Queue[list[float]]) -> None:
    queue.put(counted(9))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.usefixtures("team")
def test_a_forked_child_has_threads_of_its_own():
    torch.set_num_threads(3)
    assert counted(9) == expected(9)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_count_in_child, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=60) == expected(9)
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
