"""Run a selection of the tests: `python tools/run_tests.py test|more|all [arguments of pytest]`.

A selection has queues of passes. The queues run at once, since a pass alone leaves a core idle at its begin and end;
the passes of a queue run one after the other. The output of the first queue is shown as it comes, that of the others
when a pass ends. tests/README.md says what each pass is for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS = 5  # pytest's exit status where nothing was selected
# OpenMP threads that spin while they wait make steps many times slower where other processes use the cores too. Byte
# code is written, also where the environment forbids it: every process that a test starts would compile it again.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": ""}
PUBLIC = ("--quick", "-m", "public and not (triton or slow)", "-k", "not compiled and not one_graph")


@dataclass(frozen=True)
class Pass:
    """One run of pytest.

    Args:
        name: for its line of output.
        arguments: of pytest.
        files: to collect, unless the arguments of the call name others.
        examples: Hypothesis' profile (tests/conftest.py), unless the environment names another.
        workers: processes of pytest-xdist beside its own, which imports the package too; 0: one process in all; None:
            as many as `JOBS` says.
        interpreted: by Triton's interpreter, which a process chooses once.
    """

    name: str
    arguments: tuple[str, ...]
    files: tuple[str, ...] = ()
    examples: str = "fast"
    workers: int | None = None
    interpreted: bool = False

    def command(self, arguments: Sequence[str], jobs: int) -> list[str]:
        workers = jobs if self.workers is None else min(jobs, self.workers)
        groups = ["-n", str(workers), "--dist", "loadgroup", "--no-loadscope-reorder"] if workers else []
        names_files = any(Path(ROOT, argument.partition("::")[0]).exists() for argument in arguments)
        files = () if names_files else self.files
        return [sys.executable, "-m", "pytest", *groups, *self.arguments, *files, *arguments]

    def environment(self) -> dict[str, str]:
        examples = {"HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", self.examples)}
        return os.environ | ENVIRONMENT | examples | ({"TRITON_INTERPRET": "1"} if self.interpreted else {})


def files_marked(mark: str) -> tuple[str, ...]:
    """Test files with a mark: collecting the others takes longer than the tests of these."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(str(path.relative_to(ROOT)) for path in paths if f"mark.{mark}" in path.read_text())


def selections() -> dict[str, list[list[Pass]]]:
    """Queues of passes by the selection's name."""
    triton, public = files_marked("triton"), files_marked("public")
    # A graph has the same ops whichever kernels serve them, and tests/ops/test_opcheck.py compiles each op by each:
    # tests of compiled modules are left out by the names of files, and in files of others by their own (`PUBLIC`).
    # Merged lookups alone are batches of a form that uncompiled modules do not make.
    eager = tuple(name for name in public if "compile" not in name)
    interpreted = (*eager, "tests/compiler/test_lookups.py")
    return {
        "test": [
            [Pass("by CPU kernels", ("--quick",), examples="quick")],
            [Pass("interpreted", ("--quick", "-m", "triton"), triton, "fewest", workers=0, interpreted=True)],
        ],
        "more": [
            [Pass("by CPU kernels", ("--rest",), examples="several")],
            [
                Pass("interpreted", ("--rest", "-m", "triton and not slow"), triton, "few", 0, interpreted=True),
                Pass("interpreted, public", PUBLIC, interpreted, "few", 0, interpreted=True),
                Pass("by references", (*PUBLIC, "--kernels", "reference"), eager, "quick", 0),
            ],
        ],
        "all": [
            [Pass("by CPU kernels", ("-m", ""))],
            [
                Pass("by references", ("-m", "public", "--kernels", "reference"), eager, workers=1),
                Pass("interpreted", ("-m", "triton or public"), triton + public, workers=1, interpreted=True),
            ],
        ],
    }


@dataclass
class Queue:
    """Passes one after the other, and the exit status of those that have ended."""

    passes: list[Pass]
    arguments: list[str]
    jobs: int
    shown: bool
    statuses: list[int] = field(default_factory=list)

    def run(self) -> None:
        for step in self.passes:
            begin = time.monotonic()
            process = subprocess.run(
                step.command(self.arguments, self.jobs), cwd=ROOT, env=step.environment(), check=False,
                stdout=None if self.shown else subprocess.PIPE, stderr=None if self.shown else subprocess.STDOUT,
            )  # fmt: skip
            output = process.stdout.decode(errors="replace") if process.stdout else ""
            print(f"{output}-- {step.name}: {time.monotonic() - begin:.0f} s", flush=True)
            self.statuses.append(process.returncode)


def main() -> None:
    name, *arguments = sys.argv[1:]
    jobs = int(os.environ.get("JOBS", "3"))
    queues = [Queue(passes, arguments, jobs, shown=not at) for at, passes in enumerate(selections()[name])]
    if name == "test":  # with an empty cache each worker, and the server of rank processes, would compile these
        compile_kernels = [sys.executable, "-c", "import tests.preloaded"]
        subprocess.run(compile_kernels, cwd=ROOT, env=os.environ | ENVIRONMENT, check=False)
    threads = [threading.Thread(target=queue.run) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = [status for queue in queues for status in queue.statuses]
    ended_early = len(statuses) < sum(len(queue.passes) for queue in queues)
    failed = [status for status in statuses if status not in (0, NO_TESTS)]
    sys.exit(failed[0] if failed else 1 if ended_early else min(statuses))


if __name__ == "__main__":
    main()
