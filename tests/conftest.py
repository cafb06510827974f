"""Settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

_COMMON = {
    "deadline": None,  # the first example compiles kernels
    "database": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
}
settings.register_profile("fast", max_examples=40, **_COMMON)
settings.register_profile("thorough", max_examples=100, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test starts from one seed and leaves the number of threads as it found it."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """`torch.empty` and its kin come filled with NaN or the largest integer, so that an unwritten output shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def dynamo() -> Iterator[None]:
    """A test of `torch.compile` starts with nothing compiled and leaves nothing behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
