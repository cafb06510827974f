"""Options and fixtures of all benchmarks: rounds, threads, device, results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.measuring.cases import CEILINGS, NUM_THREADS, OURS, Case
from benchmarks.measuring.clock import Clock, Contender, Timing, measure, wait_until_quiet
from benchmarks.measuring.result_files import Goal, at_least, copy_bandwidth, target_row, timing_rows

SHORT_PATIENCE_SECONDS = 1.0  # with --quick, for a machine to become idle


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=40, help="timed rounds of every benchmark")
    parser.addoption("--quick", action="store_true", help="leave out benchmarks that are marked slow")
    parser.addoption(
        "--device", default="cpu", help="of the microbenchmarks, whose files have `cases`; others use the CPU"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        device = torch.device(metafunc.config.getoption("--device"))
        cases = metafunc.module.cases(device, tiny=False)
        marks = [pytest.param(case, id=str(case), marks=[pytest.mark.slow] * case.slow) for case in cases]
        metafunc.parametrize("case", marks)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: a quick run leaves it out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--rounds"))


@pytest.fixture(scope="session")
def clock(request: pytest.FixtureRequest) -> Clock:
    return Clock(torch.device(request.config.getoption("--device")))


@pytest.fixture(scope="session", autouse=True)
def threads() -> int:
    torch.set_num_threads(NUM_THREADS)
    return NUM_THREADS


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest) -> None:
    wait_until_quiet(**{"patience_seconds": SHORT_PATIENCE_SECONDS} if request.config.getoption("--quick") else {})


class Race:
    """Timing of contenders in turns, recorded as rows and targets in the file of pytest-benchmark."""

    def __init__(self, benchmark: Any, clock: Clock, rounds: int) -> None:
        self.benchmark, self.clock, self.rounds = benchmark, clock, rounds
        self.rows, self.targets = [], []  # type: list[dict[str, Any]], list[dict[str, Any]]
        benchmark.extra_info.update(rows=self.rows, targets=self.targets)

    def __call__(
        self, op: str, shape: object, contenders: Sequence[Contender], *goals: Goal, most_rounds: int = 1 << 20,
        warmup_rounds: int = 2, **columns: Any,
    ) -> list[Timing]:  # fmt: skip
        """Time contenders; record a row per contender, with `columns`, and a target per goal."""
        timings = measure(self.benchmark, contenders, min(self.rounds, most_rounds), warmup_rounds, self.clock)
        moved = {contender.name: contender.num_bytes for contender in contenders}
        self.keep(op, shape, timings, *goals, num_bytes=moved, **columns)
        return timings

    def keep(
        self, op: str, shape: object, timings: Sequence[Timing], *goals: Goal, num_bytes: Any = 0, **columns: Any
    ) -> None:
        """Record rows and targets of timings, with the bandwidth of a copy, measured now."""
        moved = (
            num_bytes if isinstance(num_bytes, dict) else dict.fromkeys((sizes.name for sizes in timings), num_bytes)
        )
        columns |= {"threads": torch.get_num_threads(), "copy_gb_per_s": copy_bandwidth(self.clock)}
        self.rows += [row | columns for row in timing_rows(op, shape, timings, moved)]
        self.targets += [goal.row(op, shape, timings) for goal in goals]

    def target(self, op: str, shape: object, measured: str, ratio: float, **wanted: float) -> None:
        self.targets.append(target_row(op, shape, measured, ratio, **wanted))


@pytest.fixture
def race(benchmark: Any, clock: Clock, rounds: int, threads: int) -> Any:
    yield Race(benchmark, clock, rounds)
    if benchmark.stats is None:  # timed by the benchmark itself: pytest-benchmark has rows and targets only
        benchmark.pedantic(lambda: None, rounds=1)


@pytest.fixture
def measure_case(race: Race) -> Callable[[Case], None]:
    """Measure a case of a microbenchmark and record it."""

    def measured(case: Case) -> None:
        torch.set_num_threads(case.threads)
        contenders = case.make(race.clock)
        rounds = race.rounds if case.target else max(5, race.rounds // 2)
        timings = race(case.op, case.shape, contenders, most_rounds=rounds)
        peers = [timing for timing in timings if timing.name not in CEILINGS and not timing.name.startswith(OURS)]
        if peers and case.target and not race.clock.on_gpu:
            race.targets.append(at_least(case.op, case.shape, timings[0], peers, case.target))
        torch.set_num_threads(NUM_THREADS)

    return measured
