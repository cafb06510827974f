"""Training in a process that is killed at a moment that a test chooses, or that kills itself:
`python -m tests.training.kills <operations> train ...`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from tests.programs import Program
from tritonemb.cli import main
from tritonemb.training.checkpoint import CheckpointFolder


def write_log(path: Path, num_rows: int) -> Path:
    """Random rows in Criteo's format."""
    chance = Random(0)
    with path.open("w") as file:
        for _ in range(num_rows):
            categories = [f"{chance.randrange(300):x}" if chance.random() < 0.9 else "" for _ in range(26)]
            integers = [str(chance.randrange(1000)) for _ in range(13)]
            file.write("\t".join([str(chance.randrange(2)), *integers, *categories]) + "\n")
    return path


def finish(program: Program) -> None:
    status, text = program.finish()
    assert status == 0, text


def kill(program: Program, folder: Path, chance: Random, during_a_save: bool) -> bool:
    """Wait for a new checkpoint, then for one that is being written, or a moment, and kill; whether it still ran."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    initial = checkpoints.steps()
    while program.process.is_alive() and checkpoints.steps() == initial:
        time.sleep(0.002)
    while during_a_save and program.process.is_alive() and not any(checkpoints.folder.glob(".writing-*")):
        time.sleep(0.0005)
    if not during_a_save:
        time.sleep(chance.uniform(0.0, 0.2))
    program.process.kill()
    return program.finish()[0] == -signal.SIGKILL


def kill_after(operations: int) -> None:
    """Kill this process after so many operations on files of checkpoints."""
    left = operations

    def count(event: str, args: Any) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir") and "checkpoints" in str(args[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


if __name__ == "__main__":
    kill_after(int(sys.argv.pop(1)))
    sys.exit(main())
