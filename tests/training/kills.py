"""Training in a process that is killed at a moment that a test chooses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from tritonemb.training.checkpoint import CheckpointFolder


def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    command, quiet = [sys.executable, "-m", module, *arguments], os.environ | {"OMP_WAIT_POLICY": "passive"}
    # A shell's background jobs, and so this test perhaps, ignore an interrupt; their children would do so, too.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=quiet)
    finally:
        signal.signal(signal.SIGINT, handler)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors.decode()


def kill(process: subprocess.Popen[bytes], folder: Path, chance: Random, during_a_save: bool) -> bool:
    """Wait for a new checkpoint, then for one that is being written, or a moment, and kill; whether it still ran."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    initial = checkpoints.steps()
    while process.poll() is None and checkpoints.steps() == initial:
        time.sleep(0.002)
    while during_a_save and process.poll() is None and not any(checkpoints.folder.glob(".writing-*")):
        time.sleep(0.0005)
    if not during_a_save:
        time.sleep(chance.uniform(0.0, 0.2))
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL
