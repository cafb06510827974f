"""What a result depends on besides the code: processor, versions, commit, and how busy the machine was.

Nothing that names a machine or a person: no host, no path, no user.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import tritonemb as te

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {
    "torch": ("torch",),
    "numba": ("numba",),
    "triton": ("triton",),
    "fbgemm": ("fbgemm-gpu-cpu", "fbgemm-gpu"),
    "torchrec": ("torchrec",),
}


def version_of(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def processor() -> str:
    """The processor's model as the system names it, and how many cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {cores} cores"


def commit() -> str:
    """The commit that is checked out, marked "+changes" where the package or the benchmarks differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "uncommitted"
    changed = _git("status", "--porcelain", "--", "tritonemb", "benchmarks/*.py")
    return f"{head}+changes" if changed else head


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def environment() -> dict[str, Any]:
    """The columns that all rows of one run share."""
    versions = {name: version_of(*distributions) for name, distributions in DISTRIBUTIONS.items()}
    versions |= {"tritonemb": te.__version__, "python": platform.python_version()}
    date = datetime.date.today().isoformat()
    return {"date": date, "commit": commit(), "cpu": processor(), **versions}


class OtherLoad:
    """How much of the machine's processor time went to other processes while this block ran.

    The spinning threads of an OpenMP runtime lose far more than their share when a core is taken from them, so figures
    taken beside other work flatter whoever does not spin.
    """

    percent: float | None = None

    def __enter__(self) -> OtherLoad:
        self._start = _processor_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        end = _processor_seconds()
        if self._start is None or end is None:
            return
        busy, own, wall = (after - before for before, after in zip(self._start, end, strict=True))
        self.percent = max(0.0, 100 * (busy - own) / (wall * (os.cpu_count() or 1)))


def wait_until_quiet(limit_percent: float = 5.0, patience_seconds: float = 15.0) -> None:
    """Return when other processes leave the machine alone, or when patience ends: the load is recorded either way."""
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        with OtherLoad() as load:
            time.sleep(0.5)
        if load.percent is None or load.percent <= limit_percent:
            return


def _processor_seconds() -> tuple[float, float, float] | None:
    """Busy seconds of all cores, this process's processor seconds, wall seconds; None where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _iowait, *rest = (int(part) for part in stat.read_text().splitlines()[0].split()[1:])
    # Of the rest, guest time is already part of user time; stolen time is another machine's and counts as other load.
    busy = (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")
    return busy, time.process_time(), time.perf_counter()
