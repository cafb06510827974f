"""Which tests `make test` runs, in which order, and what each of them costs.

`--quick` leaves out tests marked `more`. Of a test with parameters it keeps as few cases as show every value of every
parameter once (six optimizers on three placements are six cases, not eighteen), and of a test marked `few(n)` no more
than `n` of these. Hypothesis makes few examples. `--rest` leaves out what `--quick` has run, but for tests of
Hypothesis, which make more examples then; of what is left, it keeps as few cases as show every value once again, in
another combination. Tests marked `slow`, and all other combinations, run without either option.

pytest-xdist hands out groups of tests in their order, so the dearest comes first. `costs.json` beside this file has the
CPU seconds that a case of a test takes; `--measure FILE` writes such a file.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

RANKS, RANKS_EXAMPLES = "ranks", 3
COSTS = Path(__file__).with_name("costs.json")
CHEAP = 0.1  # CPU seconds a case: more than the median, less than what is worth a line in costs.json
CPU_SECONDS = "cpu_seconds"
DEFERRED_FILE = re.compile(r"""^pytestmark = [^#"']*\bmark\.(more|slow)\b""", re.MULTILINE)


def select(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that `--quick` runs, in their order, and the others."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not (item.get_closest_marker("more") or item.get_closest_marker("slow")):
            functions[function_of(item.nodeid)].append(item)
    chosen = {item.nodeid for cases in functions.values() for item in cover(cases)[: most_cases(cases[0])]}
    return [item for item in items if item.nodeid in chosen], [item for item in items if item.nodeid not in chosen]


def skips_file(path: Path) -> bool:
    """Whether `--quick` runs no test of a file, which a line of its marks says; importing it may take longer than many
    tests."""
    return path.match("test_*.py") and bool(DEFERRED_FILE.search(path.read_text()))


def rest(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that `--rest` runs, in their order, and the others."""
    quick = {item.nodeid for item in select(items)[0]}
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.nodeid not in quick and not item.get_closest_marker("slow"):
            functions[function_of(item.nodeid)].append(item)
    chosen = {item.nodeid for cases in functions.values() for item in cover(cases)}
    chosen |= {item.nodeid for item in items if item.nodeid in quick and is_hypothesis_test(item)}
    return [item for item in items if item.nodeid in chosen], [item for item in items if item.nodeid not in chosen]


def is_hypothesis_test(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def most_cases(item: pytest.Item) -> int | None:
    marker = item.get_closest_marker("few")
    return marker.args[0] if marker else None


def cover(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Few cases of one test that have every value of every parameter: each adds as many new ones as it can, and repeats
    those that came least often."""
    values = {case: list(enumerate(case.callspec._idlist)) if hasattr(case, "callspec") else [] for case in cases}
    missing = {value for of_case in values.values() for value in of_case}
    times: Counter[tuple[int, object]] = Counter()
    chosen: list[pytest.Item] = []

    def worth(case: pytest.Item) -> tuple[int, int]:
        return sum(value in missing for value in values[case]), -sum(times[value] for value in values[case])

    while missing or not chosen:
        chosen.append(max(cases, key=worth))
        missing.difference_update(values[chosen[-1]])
        times.update(values[chosen[-1]])
    return chosen


def limit_examples(item: pytest.Item) -> None:
    """No more examples than Hypothesis' profile has, or, where several ranks make them, `RANKS_EXAMPLES`."""
    function = getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))
    requests = getattr(function, "_hypothesis_internal_use_settings", None)
    most = min(settings().max_examples, RANKS_EXAMPLES if group_of(item) == RANKS else settings().max_examples)
    if requests is not None and requests.max_examples > most:
        function._hypothesis_internal_use_settings = settings(requests, max_examples=most)


def function_of(nodeid: str) -> str:
    """The id of a test without its parameters and group."""
    return nodeid.partition("[")[0].partition("@")[0]


def group_of(item: pytest.Item) -> str:
    """Tests of one group run in one process: those that share ranks, else those of one file, which share fixtures."""
    return RANKS if "ranks" in getattr(item, "fixturenames", ()) else item.nodeid.split("::")[0]


def schedule(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests by group, the group that takes longest first: what is long must not begin last."""
    costs = json.loads(COSTS.read_text()) if COSTS.exists() else {}
    totals: Counter[str] = Counter()
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
        totals[group_of(item)] += costs.get(function_of(item.nodeid), CHEAP / 2)
    return sorted(items, key=lambda item: (-totals[group_of(item)], group_of(item)))


class Meter:
    """Writes what a case of each test costs, on average: `{test: CPU seconds}`, but for cheap ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._begin = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._begin = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((CPU_SECONDS, cpu_seconds() - self._begin))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._seconds[function_of(report.nodeid)].append(dict(report.user_properties)[CPU_SECONDS])

    def pytest_sessionfinish(self) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            old = json.loads(self._path.read_text()) if self._path.exists() else {}
            new = {name: round(sum(seconds) / len(seconds), 2) for name, seconds in self._seconds.items()}
            costs = {name: seconds for name, seconds in (old | new).items() if seconds > CHEAP}
            self._path.write_text(json.dumps(costs, indent=0, sort_keys=True) + "\n")


def cpu_seconds() -> float:
    """Of this process and all that it has started, ended or not."""
    ticks, processes = 0, [str(os.getpid())]
    while processes:
        folder = Path("/proc", processes.pop())
        with suppress(OSError):  # it has ended
            ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15]))
            for task in (folder / "task").iterdir():
                processes += (task / "children").read_text().split()
    return ticks / os.sysconf("SC_CLK_TCK")
