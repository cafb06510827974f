"""What tests of storage share."""

from __future__ import annotations

import pytest


@pytest.fixture
def disk_size() -> str:
    return "1m"
