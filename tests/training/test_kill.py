"""Training killed with SIGKILL at any moment, then resumed, ends with the bits of training that never stopped."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("tyro")
pytest.importorskip("tomli_w")
pytest.importorskip("psutil")

from tests.helpers import assert_same_bits
from tests.programs import Program
from tests.training import kills
from tests.training.disk_job import in_memory
from tritonemb.training.callbacks.jsonl import read_run_log
from tritonemb.training.checkpoint import CheckpointFolder

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="a platform without SIGKILL"),
    pytest.mark.usefixtures("ranks"),
]
LAST_STEP = 120
NUM_ROWS = 9_000  # so that there are several epochs, and several windows of shuffled rows in each
OPTIONS = (
    "--batch-size 256 --epochs 9 --shuffle-rows 2000 --num-embeddings 500 --validation-share 0.1 --embedding-dim 8 "
    "--bottom-mlp 8 --top-mlp 16 --threads 1 --log-every 5 --checkpoint-steps 3 --keep 2 --dense-warmup-steps 20 "
    f"--dense-decay cosine --table-decay polynomial --max-steps {LAST_STEP}"
).split()


@pytest.fixture(scope="module", params=["train.txt", pytest.param("synthetic", marks=pytest.mark.slow)])
def data(request, tmp_path_factory) -> str:
    """A log in Criteo's format, or the name of a data set in memory."""
    if request.param == "synthetic":
        return "synthetic"
    return str(kills.write_log(tmp_path_factory.mktemp("data") / request.param, NUM_ROWS))


def start(data: str, folder: Path, operations: int | None = None) -> Program:
    """Training that, after so many operations on files of checkpoints, kills itself."""
    words = ["tritonemb"] if operations is None else ["tests.training.kills", str(operations)]
    words += ["train", "--data", data, *OPTIONS, *([] if data == "synthetic" else ["--evaluate-every", "20"])]
    return Program(*words, "--out", str(folder), "--resume", "auto")


def finish(data: str, folder: Path) -> None:
    kills.finish(start(data, folder))


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in read_run_log(folder / "log.jsonl") if event["event"] == "log"]


def wait_for_checkpoint(program: Program) -> None:
    """Read what training prints until it has saved, or has ended."""
    next((line for line in program.output if line.startswith("checkpoint")), None)


def kill_at_random(program: Program, chance: random.Random) -> None:
    """Let a checkpoint come, since before it there is nothing to lose, then some lines more, and kill."""
    wait_for_checkpoint(program)
    for _ in range(chance.randrange(12)):
        program.output.readline()
    program.process.kill()


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(data, folder)
    return folder


@pytest.mark.parametrize("times", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (4, 20))])
@pytest.mark.timeout(900)
@pytest.mark.more
def test_killed_training_ends_with_the_same_bits(data, undisturbed, tmp_path, times):
    chance, killed = random.Random(times), 0
    for number in range(times):
        program = start(data, tmp_path, chance.randrange(5, 60) if number % 2 else None)
        if number % 2 == 0:
            kill_at_random(program, chance)
        status, _ = program.finish()
        killed += status == -signal.SIGKILL
        if status == 0:  # it was faster: begin again, so that every kill counts
            assert_same_run(tmp_path, undisturbed)
            for path in sorted(tmp_path.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    finish(data, tmp_path)
    assert killed >= times // 2
    assert_same_run(tmp_path, undisturbed)


def assert_same_run(found: Path, expected: Path, last_step: int = LAST_STEP) -> None:
    checkpoints = [CheckpointFolder(folder / "checkpoints") for folder in (found, expected)]
    assert_same_bits(*(in_memory(folder.path(last_step)) for folder in checkpoints))
    assert losses(found) == losses(expected)
    assert len(losses(found)) == last_step // 5
    names = [sorted(path.name for path in folder.folder.iterdir()) for folder in checkpoints]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
@pytest.mark.more
def test_a_signal_ends_training_after_the_step_and_saves(data, undisturbed, tmp_path, number, status):
    program = start(data, tmp_path)
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    wait_for_checkpoint(program)
    os.kill(program.process.pid, number)
    actual, text = program.finish()
    assert actual == status, text
    assert f"training was interrupted by {number.name}; resume with --resume auto" in text
    end = [event for event in read_run_log(tmp_path / "log.jsonl") if event["event"] == "end"][-1]
    assert (end["reason"], end["step"]) == (number.name, checkpoints.steps()[-1])
    finish(data, tmp_path)
    assert_same_run(tmp_path, undisturbed)
