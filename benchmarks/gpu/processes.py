"""Groups of cases, each in a process of its own, so that a crash or a hang costs what was running and nothing else.

A process says which contender of which case is about to run, and sends each case's result as soon as it has it. If it
dies or falls silent, that contender is left out of that case, and another process measures this case and those behind
it. While one process measures, the next one is started and imports what it needs. This file imports no torch.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

SILENT_SECONDS = 150.0  # more than it takes to compile, or to draw and load what a case needs
MOST_DEATHS = 4  # of one group; its other cases are given up then
LEAVING_SECONDS = 10.0  # for a process to end by itself
MARGIN = 0.03  # of all the time: for a case to notice that it is over


@dataclass
class Task:
    """Cases, by name, for a process to measure; `without` are (case, contender) to leave out."""

    cases: list[str]
    deadline: float  # of `time.time()`
    without: set[tuple[str, str]] = field(default_factory=set)


Work = Callable[[Task, Callable[[str, str], None], Callable[[str, Any], None]], None]
"""`work(task, begin, done)` measures the task's cases in turn: it calls `begin(case, contender)` before each contender
runs and `done(case, result)` after each case, and returns early where the deadline has passed."""


def run(
    work: Work,
    groups: Sequence[Sequence[str]],
    done: Callable[[str, Any], None],
    lost: Callable[[str, str, str], None],
    seconds: float,
    preload: Sequence[str] = (),
    silent_seconds: float = SILENT_SECONDS,
) -> None:
    """Measure all groups within so many seconds.

    Args:
        work: importable by its name, as it runs in other processes.
        done: gets each case's result, at once.
        lost: gets (case, contender, why) for each that has no result; contender "all" for a whole case.
        preload: modules to import in each process before its task is there.
    """
    end = time.time() + seconds
    spare = _Process(work, preload)
    try:
        for group in groups:
            task, deaths = Task(list(group), end - MARGIN * seconds), 0
            while task.cases and time.time() < task.deadline:
                process, spare = spare, _Process(work, preload)
                why = process.measure(task, done, end, silent_seconds)
                if why is None:
                    break
                deaths += 1
                case, contender = process.running
                lost(case, contender, why)
                if (case, contender) in task.without or contender == "all":
                    task.cases.remove(case)
                task.without.add((case, contender))
                if deaths == MOST_DEATHS:
                    for case in task.cases:
                        lost(case, "all", f"not measured: {deaths} processes of its group died")
                    task.cases.clear()
            for case in task.cases:
                lost(case, "all", f"not measured: {seconds:.0f} s were over")
    finally:
        spare.end()


class _Process:
    """A process that waits for a task, once."""

    def __init__(self, work: Work, preload: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork could not use CUDA after its parent has
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(work, tuple(preload), other))
        self._process.start()
        other.close()  # or its end would not be noticed
        self.running = ("", "all")

    def measure(self, task: Task, done: Callable[[str, Any], None], end: float, silent_seconds: float) -> str | None:
        """Why the process ended before it was through, or None; cases that are done are taken out of the task."""
        self.running, why = (task.cases[0], "all"), None
        try:
            self._connection.send(task)
            while True:
                left = end - time.time()
                if not self._connection.poll(max(0.0, min(left, silent_seconds))):
                    if left <= silent_seconds:
                        return None  # time is over, which the cases left say
                    return f"not measured: said nothing for {silent_seconds:g} s"
                match self._connection.recv():
                    case "begin", name, contender:
                        self.running = name, contender
                    case "done", name, result:
                        task.cases.remove(name)
                        done(name, result)
                    case "error", text:
                        why = text
                    case ("end",):
                        self._process.join(LEAVING_SECONDS)
                        return None
        except (EOFError, ConnectionError):
            self._process.join(LEAVING_SECONDS)
            return f"its process died (exit code {self._process.exitcode}){': ' if why else ''}{why or ''}"
        finally:
            self.end()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(work: Work, preload: Sequence[str], connection: Any) -> None:
    for module in preload:
        importlib.import_module(module)
    with suppress(EOFError):  # not needed any more
        task = connection.recv()
        try:
            work(
                task, lambda *which: connection.send(("begin", *which)), lambda *what: connection.send(("done", *what))
            )
        except Exception as error:
            connection.send(("error", f"{type(error).__name__}: {error}"))
            raise SystemExit(1) from error
        connection.send(("end",))
