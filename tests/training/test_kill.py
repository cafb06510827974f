"""Training killed with SIGKILL at any moment, then resumed, ends with the bits of training that never stopped."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("torchmetrics")
pytest.importorskip("tyro")
pytest.importorskip("tomli_w")
pytest.importorskip("psutil")

from tests.helpers import assert_same_bits
from tests.training import kills
from tests.training.disk_job import in_memory
from tritonemb.training.callbacks.jsonl import read_run_log
from tritonemb.training.checkpoint import CheckpointFolder

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="a platform without SIGKILL")
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
    chance = random.Random(0)
    path = tmp_path_factory.mktemp("data") / request.param
    with path.open("w") as file:
        for _ in range(NUM_ROWS):
            categories = [f"{chance.randrange(300):x}" if chance.random() < 0.9 else "" for _ in range(26)]
            integers = [str(chance.randrange(1000)) for _ in range(13)]
            file.write("\t".join([str(chance.randrange(2)), *integers, *categories]) + "\n")
    return str(path)


def start(data: str, folder: Path) -> subprocess.Popen[bytes]:
    evaluations = [] if data == "synthetic" else ["--evaluate-every", "20"]
    paths = ["--out", str(folder), "--resume", "auto"]
    return kills.start("tritonemb", "train", "--data", data, *OPTIONS, *evaluations, *paths)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return in_memory(CheckpointFolder(folder / "checkpoints").path(LAST_STEP))


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in read_run_log(folder / "log.jsonl") if event["event"] == "log"]


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    kills.finish(start(data, folder))
    return folder


@pytest.mark.parametrize("number", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (4, 20))])
@pytest.mark.timeout(900)
@pytest.mark.more
def test_killed_training_ends_with_the_same_bits(data, undisturbed, tmp_path, number):
    chance, killed = random.Random(number), 0
    for turn in range(number):
        process = start(data, tmp_path)
        killed += kills.kill(process, tmp_path, chance, during_a_save=turn % 2 == 1)
        if process.returncode == 0:  # it was faster: begin again, so that every kill counts
            assert_same_run(tmp_path, undisturbed)
            for path in sorted(tmp_path.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    kills.finish(start(data, tmp_path))
    assert killed >= number - 2
    assert_same_run(tmp_path, undisturbed)


def assert_same_run(found: Path, expected: Path) -> None:
    assert_same_bits(tensors(found), tensors(expected))
    assert losses(found) == losses(expected)
    assert len(losses(found)) == LAST_STEP // 5
    leftovers = [path.name for path in (found / "checkpoints").iterdir()]
    assert sorted(leftovers) == sorted(path.name for path in (expected / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
@pytest.mark.more
def test_a_signal_ends_training_after_the_step_and_saves(data, undisturbed, tmp_path, number, status):
    process = start(data, tmp_path)
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    while process.poll() is None and not checkpoints.steps():
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors.decode()
    assert f"training was interrupted by {number.name}; resume with --resume auto" in errors.decode()
    end = [event for event in read_run_log(tmp_path / "log.jsonl") if event["event"] == "end"][-1]
    assert (end["reason"], end["step"]) == (number.name, checkpoints.steps()[-1])
    kills.finish(start(data, tmp_path))
    assert_same_run(tmp_path, undisturbed)
