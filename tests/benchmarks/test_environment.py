"""What is recorded about a machine says what matters and nothing that names it."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import pytest
import torch

from benchmarks.measuring import clock as environment_module
from benchmarks.measuring.clock import OtherLoad
from benchmarks.measuring.result_files import ROOT, environment

pytestmark = pytest.mark.more


def test_versions_and_no_names() -> None:
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["cpu"].endswith("cores")
    assert platform.node() not in found.values()
    assert str(ROOT) not in json.dumps(found)


def test_load_of_other_processes_is_their_share_of_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as busy seconds of all processors, seconds of this process, seconds that have passed."""
    readings = iter([(10.0, 1.0, 100.0), (14.0, 2.0, 102.0), None, None])
    monkeypatch.setattr(environment_module, "_processor_seconds", lambda: next(readings))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    for percent in (50.0, None):
        with OtherLoad() as load:
            pass
        assert load.percent == percent


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell how busy its processors are")
def test_busy_seconds_of_all_processors_are_read() -> None:
    before = environment_module._processor_seconds()
    while time.process_time() < before[1] + 0.05:
        pass
    busy, own, wall = (now - then for now, then in zip(environment_module._processor_seconds(), before, strict=True))
    assert busy > 0
    assert own >= 0.05
    assert wall > 0
