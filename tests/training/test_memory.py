"""A log far larger than memory trains within a bound that does not depend on its size."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

psutil = pytest.importorskip("psutil")
pytest.importorskip("pyarrow")
pytest.importorskip("tyro")
pytest.importorskip("tomli_w")

MOST_BYTES = 2_000_000_000
OPTIONS = [
    *("--epochs", "1", "--embedding-dim", "8", "--bottom-mlp", "16", "--top-mlp", "32"),
    *("--batch-size", "8192", "--log-every", "100", "--chunk-bytes", "1048576"),
]


def write_log(path: Path, num_bytes: int) -> None:
    """About `num_bytes` of rows in Criteo's format: one block of random ones again and again."""
    chance = random.Random(0)
    lines = []
    for _ in range(40_000):
        integers = [str(chance.randrange(1000)) for _ in range(13)]
        categories = [f"{chance.randrange(1 << 32):08x}" for _ in range(26)]
        lines.append("\t".join([str(chance.randrange(2)), *integers, *categories]) + "\n")
    block = "".join(lines).encode()
    with path.open("wb") as file:
        for _ in range(-(-num_bytes // len(block))):
            file.write(block)


def peak_bytes(data: Path, folder: Path) -> int:
    """The largest resident memory of `tritonemb train` over a log, reader included."""
    command = [sys.executable, "-m", "tritonemb", "train", "--data", str(data), "--out", str(folder), *OPTIONS]
    quiet = os.environ | {"OMP_WAIT_POLICY": "passive"}
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=quiet)
    process, peak = psutil.Process(training.pid), 0
    while training.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.05)
    _, errors = training.communicate()
    assert training.returncode == 0, errors.decode()
    return peak


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_memory_does_not_grow_with_the_log(tmp_path):
    """Four times the rows add less than their own size: what is kept of a row is a logit and a label, for the AUC."""
    peaks = []
    for number, num_bytes in enumerate((60_000_000, 240_000_000)):
        write_log(tmp_path / f"{number}.txt", num_bytes)
        peaks.append(peak_bytes(tmp_path / f"{number}.txt", tmp_path / f"run{number}"))
    assert peaks[1] < peaks[0] + 150_000_000
    assert peaks[1] < MOST_BYTES
