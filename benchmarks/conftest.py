"""Shared by all benchmarks: how many rounds and threads, and where results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.environment import wait_until_quiet
from benchmarks.record import copy_bandwidth

NUM_THREADS = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=40, help="timed rounds of every benchmark")


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--rounds"))


@pytest.fixture(scope="session", autouse=True)
def threads() -> int:
    torch.set_num_threads(NUM_THREADS)
    return NUM_THREADS


@pytest.fixture(autouse=True)
def quiet() -> None:
    wait_until_quiet()


@pytest.fixture
def record(benchmark: Any, threads: int) -> Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]]], None]:
    """Attach rows and targets to the benchmark, with a copy's bandwidth measured right beside it."""

    def attach(rows: Sequence[dict[str, Any]], targets: Sequence[dict[str, Any]] = ()) -> None:
        shared = {"threads": threads, "copy_gb_per_s": copy_bandwidth()}
        benchmark.extra_info["rows"] = [row | shared for row in rows]
        benchmark.extra_info["targets"] = list(targets)

    return attach
