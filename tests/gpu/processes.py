"""Run commands side by side, each in a process of its own with a log and a time limit.

One that aborts, hangs or loses the GPU's context costs the others nothing. None outlives the process that runs them,
however that ends: on Linux the kernel kills them with it. A process that goes through items in turn keeps a record of
them, and another one goes on behind the item that it died in; so does, from that record, another call of a tool.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PASSED, FAILED, CRASHED, TIMED_OUT, NOT_RUN = "passed", "failed", "crashed", "timed out", "not run"
STARTED, LOST = "started", "lost the GPU's context"  # of an item alone, as those before
# Python ends by itself on the first, and so shows where it was; a process that waits for the driver does not. Its stack
# is shown by Python's fault handler on the second.
ENDINGS = ((signal.SIGINT, 5.0), (signal.SIGABRT, 2.0), (signal.SIGKILL, 10.0))
LINES = 15  # of a log that are shown
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """A command, in which `{title}` is the job's, how many seconds it may take, and environment variables.

    With a `task` the process is started while the job before it runs, imports what it needs, and reads the task, a line
    of its standard input, when its turn comes.

    With a `record` the process runs the items that are NOT_RUN there, and notes each when it is STARTED and what became
    of it. If the process dies in one, by itself or as it has lost the GPU, process `number` + 1 runs those left.
    """

    name: str
    command: Sequence[str]
    seconds: float = math.inf
    variables: Mapping[str, str] = field(default_factory=dict)
    task: str | None = None
    record: Path | None = None
    number: int = 1

    @property
    def title(self) -> str:
        return self.name if self.number == 1 else f"{self.name}-{self.number}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended: "passed" is exit status 0, "failed" another one, "crashed" a signal; `items` are new states."""

    job: Job
    status: str
    seconds: float = 0.0
    log: str = ""
    items: Mapping[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> str:
        """The item that the process came to."""
        return next(reversed(self.items), "")

    @property
    def died(self) -> bool:
        """Whether it died in that item."""
        return self.items.get(self.last) in (CRASHED, TIMED_OUT, LOST)

    @property
    def tail(self) -> str:
        """Where a process died, if its log says so; else the end of the log."""
        lines = self.log.splitlines()
        deaths = [number for number, line in enumerate(lines) if "Fatal Python error: " in line or "Timeout (" in line]
        first = deaths[-1] if deaths else max(0, len(lines) - LINES)
        return "\n".join(lines[first : first + LINES])


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log: Path
    began: float = math.inf
    noted: int = 0  # bytes of the record that were there before

    def begin(self) -> _Running:
        self.began = time.monotonic()
        if self.job.record is not None:
            self.noted = self.job.record.stat().st_size
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has died, which its outcome says
                self.process.stdin.write(f"{self.job.task}\n".encode())
                self.process.stdin.close()
        return self


def run(todo: Iterable[Job], folder: Path, at_once: int, seconds: float = math.inf) -> Iterator[Outcome]:
    """The outcome of each process as it ends. After `seconds` none runs any longer.

    Logs go to `folder`/TITLE.log. Close the iterator (`contextlib.closing`) to stop what still runs.
    """
    jobs = deque(todo)
    folder.mkdir(parents=True, exist_ok=True)
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    end, running, ahead = time.monotonic() + seconds, list[_Running](), list[_Running]()
    try:
        while running or ((ahead or jobs) and time.monotonic() < end):
            while (ahead or jobs) and len(running) < at_once and time.monotonic() < end:
                running.append((ahead.pop() if ahead else _start(jobs.popleft(), folder)).begin())
            if not ahead and jobs and jobs[0].task is not None:
                ahead.append(_start(jobs.popleft(), folder))
            now = time.monotonic()
            going = [one for one in running if one.process.poll() is None]
            late = [one for one in going if now > min(one.began + one.job.seconds, end)]
            _stop(late)
            for one in [one for one in running if one not in going or one in late]:
                running.remove(one)
                outcome = _outcome(one, one in late)
                yield outcome
                if outcome.died and NOT_RUN in read_record(one.job.record).values():
                    jobs.append(replace(one.job, number=one.job.number + 1))
            time.sleep(0.02)
        jobs.extendleft(one.job for one in ahead)
        while jobs:
            yield Outcome(jobs.popleft(), NOT_RUN)
    finally:
        _stop([*running, *ahead], first=-1)
        signal.signal(signal.SIGTERM, handler)


def _start(job: Job, folder: Path) -> _Running:
    log = folder / f"{job.title}.log"
    environment = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"} | job.variables
    source = subprocess.DEVNULL if job.task is None else subprocess.PIPE
    with log.open("wb") as file:
        process = subprocess.Popen(
            [part.replace("{title}", job.title) for part in job.command], stdin=source, stdout=file,
            stderr=subprocess.STDOUT, env=environment, process_group=0, preexec_fn=_prepare,
        )  # fmt: skip
    return _Running(job, process, log)


def _prepare() -> None:
    """Die with the parent; leave no core file, which takes long where a process has mapped a GPU."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop(late: Sequence[_Running], first: int = 0) -> None:
    """End these and all that they have started."""
    for ending, patience in ENDINGS[first:]:
        alive = [one.process for one in late if one.process.poll() is None]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.killpg(process.pid, ending)
        until = time.monotonic() + patience
        while any(process.poll() is None for process in alive) and time.monotonic() < until:
            time.sleep(0.02)


def _outcome(one: _Running, late: bool) -> Outcome:
    code, record = one.process.returncode, one.job.record
    status = TIMED_OUT if late else PASSED if code == 0 else CRASHED if code < 0 else FAILED
    seconds, log = round(time.monotonic() - one.began, 1), one.log.read_text(errors="replace").strip()
    outcome = Outcome(one.job, status, seconds, log, read_record(record, one.noted) if record else {})
    if outcome.items.get(outcome.last) == STARTED:  # a process ends by itself where one item takes too long
        state = NOT_RUN if late else TIMED_OUT if "Timeout (" in log else CRASHED
        append_record(record, {outcome.last: state})
        outcome.items[outcome.last] = state
    return outcome


def read_record(record: Path, begin: int = 0) -> dict[str, Any]:
    """The last state of each item in a record from byte `begin` on, in the order of these lines.

    A line that was cut off is left out.
    """
    items: dict[str, Any] = {}
    for line in record.read_bytes()[begin:].splitlines() if record.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            item, state = json.loads(line)
            items.pop(item, None)
            items[item] = state
    return items


def append_record(record: Path, states: Mapping[str, Any]) -> None:
    """A line for each item: what becomes of it."""
    with record.open("a") as file:
        file.writelines(json.dumps(pair) + "\n" for pair in states.items())


def renew_record(record: Path, done: Callable[[str, Any], bool]) -> dict[str, Any]:
    """Keep of a record items that are `done` by their states, which are returned; make one where there is none."""
    items = {item: state for item, state in read_record(record).items() if done(item, state)}
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("")
    append_record(record, items)
    return items
