"""Tests of modules are of our kernels, although their calls are small."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.nn.tiers import ELSEWHERE
from tritonemb.nn import single_table


@pytest.fixture(autouse=True)
def no_call_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """`small_calls`, asked for beside it, undoes this."""
    monkeypatch.setattr(single_table, "FEW_ELEMENTS", 0)


@pytest.fixture
def small_calls(no_call_is_small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_table, "FEW_ELEMENTS", 1 << 18)


@pytest.fixture
def frozen_objects() -> Iterator[None]:
    """`gc.collect` looks at what the test has made, and at nothing older, which takes long."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=ELSEWHERE)
def placement(request: pytest.FixtureRequest) -> str:
    """Where a table lives that is not on the device."""
    return request.param
