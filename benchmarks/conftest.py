"""Shared by all benchmarks: how many rounds and threads, which device, and where results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.measuring.cases import CEILINGS, OURS, Case
from benchmarks.measuring.clock import Clock, measure
from benchmarks.measuring.environment import wait_until_quiet
from benchmarks.measuring.result_files import at_least, copy_bandwidth, timing_rows

NUM_THREADS = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=40, help="timed rounds of every benchmark")
    parser.addoption(
        "--device", default="cpu", help="of the microbenchmarks, whose files have `cases`; others use the CPU"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        device = torch.device(metafunc.config.getoption("--device"))
        metafunc.parametrize("case", list(metafunc.module.cases(device, tiny=False)), ids=str)


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
def quiet() -> None:
    wait_until_quiet()


@pytest.fixture
def record(
    benchmark: Any, threads: int, clock: Clock
) -> Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]]], None]:
    """Attach rows and targets to the benchmark, with a copy's bandwidth measured right beside it."""

    def attach(rows: Sequence[dict[str, Any]], targets: Sequence[dict[str, Any]] = ()) -> None:
        shared = {"threads": threads, "copy_gb_per_s": copy_bandwidth(clock)}
        benchmark.extra_info["rows"] = [row | shared for row in rows]
        benchmark.extra_info["targets"] = list(targets)

    return attach


@pytest.fixture
def measure_case(benchmark: Any, record: Callable[..., None], rounds: int, clock: Clock) -> Callable[[Case], None]:
    """Measure a case of a microbenchmark and record it."""

    def measured(case: Case) -> None:
        contenders = case.make(clock)
        timings = measure(benchmark, contenders, rounds if case.target else max(5, rounds // 2), clock=clock)
        moved = {contender.name: contender.num_bytes for contender in contenders}
        peers = [timing for timing in timings if timing.name not in CEILINGS and not timing.name.startswith(OURS)]
        wanted = peers and case.target and not clock.on_gpu
        targets = [at_least(case.op, case.shape, timings[0], peers, case.target)] if wanted else []
        record(timing_rows(case.op, case.shape, timings, moved), targets)

    return measured
