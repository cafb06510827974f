"""What is recorded about a machine says what matters and nothing that names it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.environment import ROOT, OtherLoad, environment


def test_versions_and_no_names() -> None:
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["cpu"].endswith("cores")
    assert platform.node() not in found.values()
    assert str(ROOT) not in json.dumps(found)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell how busy its processors are")
def test_load_of_other_processes_is_seen() -> None:
    with OtherLoad() as load:
        subprocess.run([sys.executable, "-c", "import time; end = time.time() + 1\nwhile time.time() < end: pass"])
    assert load.percent is not None
    assert load.percent > 100 / (2 * (torch.get_num_threads() + 1))
