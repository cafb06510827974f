"""Visits to the library's files by one batch stay below their ceilings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.more
def test_visits_of_a_batch() -> None:
    command = [sys.executable, "tools/batch_trace.py", "--check"]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "servers: " in result.stdout
