"""The GPU suite, a process per test file: `python -m tests.gpu.suite [arguments of pytest]`, or `make gpu`.

These processes load this file as their plugin, too. It records each test as it starts and ends, so that a crash names
its test, and another process runs those that are left of that file: after a crash, a hang, or an error that cost the
process the GPU's context. `--out` gets a log and a junit file of each process, a record of each file, and results.json.
`--left` goes on with the tests that have not passed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measuring import result_files
from tests.gpu import processes
from tests.gpu.driver import activate, rehearsing
from tests.gpu.processes import FAILED, LOST, NOT_RUN, PASSED, STARTED, TIMED_OUT, Job, Outcome

FOLDERS = ("tests/gpu", "tests/kernels", "tests/ops", "tests/nn", "tests/compiler", "tests")  # in this order
SKIPPED, KERNELS = "skipped", "kernels: "
RECORD, LIMIT = "TRITONEMB_TEST_RECORD", "TRITONEMB_TEST_SECONDS"
_STDERR = os.dup(2)  # before pytest captures it


class Recorder:
    """Runs what is not in the record yet, and records it; says how many kernels were compiled."""

    def __init__(self, record: Path, seconds: float, counts: Counter[bool]) -> None:
        self.record, self.seconds, self.counts = record, seconds, counts

    @pytest.hookimpl(trylast=True)  # after -m and -k
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = processes.read_record(self.record)
        items[:] = [item for item in items if known.get(item.nodeid, NOT_RUN) == NOT_RUN]
        processes.append_record(self.record, {item.nodeid: NOT_RUN for item in items})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        processes.append_record(self.record, {nodeid: STARTED})
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=_STDERR)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lost = context_is_lost()
            processes.append_record(self.record, {report.nodeid: LOST if lost else FAILED})
            if lost:
                pytest.exit("the GPU's context is lost: another process runs the tests that are left", 1)
        elif report.when == "call" or report.skipped:
            processes.append_record(self.record, {report.nodeid: SKIPPED if report.skipped else PASSED})

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"{KERNELS}{self.counts[False]} compiled, {self.counts[True]} from the cache")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK


def context_is_lost() -> bool:
    """After an illegal access every call of this process fails."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    counts = Counter[bool]()
    if os.environ.get("TRITON_INTERPRET", "0") != "1":
        from tests.gpu.problems import counted_compilations

        if rehearsing():
            activate()
        stack = contextlib.ExitStack()
        counts = stack.enter_context(counted_compilations())
        config.add_cleanup(stack.close)
    config.pluginmanager.register(Recorder(Path(os.environ[RECORD]), float(os.environ[LIMIT]), counts))


def find_files() -> list[Path]:
    """Test files that have tests for a GPU, folder by folder, large ones first."""
    files: dict[Path, None] = {}
    for folder in FOLDERS:
        paths = [p for p in Path(folder).rglob("test_*.py") if re.search(r"mark\.(gpu|triton)\b", p.read_text())]
        files |= dict.fromkeys(sorted(paths, key=lambda path: -path.stat().st_size))
    return list(files)


class Suite:
    """One run: the processes of each file, and what is known of it."""

    def __init__(self, files: list[Path], options: argparse.Namespace, arguments: list[str]) -> None:
        self.out, self.options, self.arguments = options.out, options, arguments
        path = self.out / "results.json"
        known = result_files.read(path) if options.left and path.exists() else {}
        self.results: dict[str, dict[str, Any]] = {f: known[f] for f in known if known[f]["status"] == PASSED}
        self.files = {self.record_of(str(file)): str(file) for file in files}
        self.outcomes: list[Outcome] = []

    def record_of(self, file: str) -> Path:
        return self.out / f"{file.removesuffix('.py').replace('/', '.').strip('.')}.jsonl"

    def job(self, file: str) -> Job:
        """What runs the tests of a file that are not in its record."""
        record, done = self.record_of(file), (PASSED, SKIPPED) if self.options.left else ()
        processes.renew_record(record, lambda _, outcome: outcome in done)
        plugins = ["-p", "tests.gpu.suite", "-p", "no:cacheprovider"]
        command = [*self.options.under, sys.executable, "-m", "pytest", *plugins, "-v", "--tb=short"]
        command += ["-o", "addopts=-ra --import-mode=importlib", "-m", "(triton or gpu) and not slow"]
        command += [f"--junitxml={self.out}/{{title}}.xml", *self.arguments, file]
        limits = {LIMIT: str(self.options.test_seconds), "HYPOTHESIS_PROFILE": self.options.examples}
        return Job(record.stem, command, variables=limits | {RECORD: str(record)}, record=record)

    def run(self) -> None:
        jobs = [self.job(file) for file in self.files.values() if file not in self.results]
        with contextlib.closing(processes.run(jobs, self.out, self.options.jobs, self.options.seconds)) as ended:
            for outcome in ended:
                self.outcomes.append(outcome)
                self.ended(self.files[outcome.job.record], outcome)
                result_files.write_json(self.out / "results.json", self.results)

    def ended(self, file: str, outcome: Outcome) -> None:
        """Note and print what became of the tests of a file."""
        tests, initial = processes.read_record(outcome.job.record), self.results.get(file, {"seconds": 0.0, "log": ""})
        counts = Counter(tests.values())
        wrong = {test: became for test, became in tests.items() if became not in (PASSED, SKIPPED, NOT_RUN)}
        status = FAILED if wrong and outcome.status == PASSED else outcome.status  # an earlier process may have failed
        log = initial["log"] if outcome.status == PASSED else outcome.tail
        seconds = initial["seconds"] + outcome.seconds
        self.results[file] = {
            "status": status, "seconds": seconds, "counts": counts, "wrong": wrong, "log": log,
            "skipped": [test.rpartition("::")[2] for test, became in tests.items() if became == SKIPPED],
        }  # fmt: skip
        lines = outcome.log.splitlines()
        kernels = "".join(f"; {line}" for line in lines if line.startswith(KERNELS))
        print(f"{status:9} {outcome.seconds:6.1f} s  {outcome.job.title:42} {as_text(counts)}{kernels}", flush=True)
        failures = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        print("".join(f"    {line}\n" for line in failures), end="", flush=True)
        if outcome.died or (outcome.status not in (PASSED, NOT_RUN) and not failures):
            print(f"    {outcome.last}:\n{log}", flush=True)

    def summary(self) -> str:
        files = Counter(result["status"] for result in self.results.values())
        tests = sum((Counter(result["counts"]) for result in self.results.values()), Counter[str]())
        left = [file for file, result in self.results.items() if result["status"] in (NOT_RUN, TIMED_OUT)]
        lines = [f"test files: {as_text(files)}; tests: {as_text(tests)} ({self.out}/results.json)"]
        skipped = {test for result in self.results.values() for test in result["skipped"]}
        lines += [f"not rehearsed, without a GPU: {' '.join(sorted(skipped))}"] if skipped and rehearsing() else []
        lines += [f"deadline reached; go on with --left: {' '.join(left)}"] if left else []
        return "\n".join(lines)


def as_text(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items()) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--left", action="store_true", help="only tests that have not passed in the run that --out has")
    parser.add_argument("--jobs", type=int, default=8, help="files at once; they share the GPU")
    parser.add_argument("--seconds", type=float, default=540, help="for all of it")
    parser.add_argument("--test-seconds", type=float, default=180, help="for one test, until its process is ended")
    parser.add_argument("--examples", default="fewest", help="Hypothesis' profile, see tests/conftest.py")
    parser.add_argument("--files", nargs="+", type=Path, help="test files; all that have tests for a GPU by default")
    options, arguments = parser.parse_known_args()
    options.under = []  # a command that runs each process
    import torch

    from tritonemb.kernels.triton_utils import interpreting

    if not (torch.cuda.is_available() or interpreting() or rehearsing()):
        sys.exit("make gpu needs a CUDA device, and a torch that sees it; TRITON_INTERPRET=1 rehearses it without one")
    suite = Suite(options.files or find_files(), options, arguments)
    suite.run()
    print(suite.summary())
    sys.exit({result["status"] for result in suite.results.values()} != {PASSED})


if __name__ == "__main__":
    main()
