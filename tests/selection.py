"""Which tests `make test` runs, and what each of them costs.

`--quick` leaves out tests marked `more`. Of a test with parameters it keeps as few cases as show every value of every
parameter once (six optimizers on three placements are six cases, not eighteen), and of a test marked `few(n)` no more
than `n` of these. Hypothesis makes few examples. `--rest` leaves out what `--quick` has run, but for tests of
Hypothesis, which make more examples then.

`--measure FILE` appends one line of JSON a test: its id, and the seconds of CPU that it and its processes took.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

RANKS, RANKS_EXAMPLES = "ranks", 3


def select(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that `--quick` runs, in their order, and the others."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not (item.get_closest_marker("more") or item.get_closest_marker("slow")):
            functions[item.nodeid.split("[", 1)[0]].append(item)
    kept = {item.nodeid for cases in functions.values() for item in cover(cases)[: most_cases(cases[0])]}
    return [item for item in items if item.nodeid in kept], [item for item in items if item.nodeid not in kept]


def rest(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that `--rest` runs, in their order, and the others."""
    functions = [(item.nodeid, getattr(item, "obj", None)) for item in select(items)[0]]
    done = {name for name, function in functions if not getattr(function, "is_hypothesis_test", False)}
    return [item for item in items if item.nodeid not in done], [item for item in items if item.nodeid in done]


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
    asked = getattr(function, "_hypothesis_internal_use_settings", None)
    most = min(settings().max_examples, RANKS_EXAMPLES if group_of(item) == RANKS else settings().max_examples)
    if asked is not None and asked.max_examples > most:
        function._hypothesis_internal_use_settings = settings(asked, max_examples=most)


def group_of(item: pytest.Item) -> str:
    """Tests of one group run in one process: those that share ranks, else those of one file, which share fixtures."""
    return RANKS if "ranks" in getattr(item, "fixturenames", ()) else item.nodeid.split("::")[0]


class Meter:
    """Appends what each test cost to a file, one for each process of pytest-xdist."""

    def __init__(self, path: Path) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        self._path = path.with_suffix(f".{worker}{path.suffix}") if worker else path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = cpu_seconds()
        try:
            return (yield)
        finally:
            line = {"test": item.nodeid, "seconds": round(cpu_seconds() - before, 3)}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def cpu_seconds() -> float:
    """Of this process and all that it has started, ended or not."""
    import psutil  # not wherever the tests of kernels run

    used = os.times()
    total = used.user + used.system + used.children_user + used.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
