"""Training on a stream that is interrupted and resumed ends with the bits of training that was not."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("tyro")
pytest.importorskip("tomli_w")

import tritonemb as te
from tests.data.test_streams import FOLLOW, SCHEMA, end, move_in
from tests.helpers import assert_same_bits
from tests.training.kills import finish, kill, start
from tritonemb.data import ClickLog
from tritonemb.training.checkpoint import CheckpointFolder, load_tensors, stored_tensors
from tritonemb.training.config import CheckpointOptions


def test_a_run_resumes_at_the_offsets_of_its_checkpoint(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    move_in(logs, 1, 2, 3, 4)

    def trainer(folder, **options) -> te.Trainer:
        torch.manual_seed(0)
        log = ClickLog(logs, FOLLOW)
        model = te.nn.DLRM(log.tables(4), 1, bottom_mlp=(4,), top_mlp=(4,), optimizer=te.optim.RowWiseAdagrad(lr=0.1))
        checkpoints = CheckpointOptions(checkpoint_steps=2)
        return te.Trainer(model, log, batch_size=16, folder=folder, verbose=False, checkpoints=checkpoints, **options)

    assert trainer(tmp_path / "first", max_steps=6).fit().reason == "finished"
    move_in(logs, 5)
    end(logs)
    whole = trainer(tmp_path / "whole")
    assert whole.fit().steps == -(-250 // 16)
    (logs / "part-1.parquet").unlink()
    resumed = trainer(tmp_path / "first")
    resumed.resume()
    assert resumed.fit().steps == -(-250 // 16)
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())


@pytest.mark.more
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_trains_on_every_row_once(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    options = [
        "--data", str(logs), "--follow", "--label", SCHEMA.label, "--dense", *SCHEMA.dense, "--sparse", *SCHEMA.sparse,
        "--num-embeddings", "100", "--embedding-dim", "4", "--bottom-mlp", "4", "--top-mlp", "4", "--batch-size", "64",
        "--epochs", "1", "--checkpoint-steps", "1", "--threads", "1", "--resume", "auto",
    ]  # fmt: skip

    def run(name):
        return start("tritonemb", "train", *options, "--out", str(tmp_path / name))

    def tensors(name):
        path = CheckpointFolder(tmp_path / name / "checkpoints").latest()
        actual = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in stored_tensors(path).items()
        }
        load_tensors(path, actual)
        return path.name, actual

    # It is killed while it waits for rows, and while it trains.
    for numbers in ((1, 2, 3), (4, 5)):
        move_in(logs, *numbers, rows=500)
        assert kill(run("killed"), tmp_path / "killed", random.Random(0), during_a_save=False)
    move_in(logs, 6, rows=500)
    end(logs)
    for name in ("killed", "whole"):
        finish(run(name))
    assert tensors("killed")[0] == tensors("whole")[0] == f"step-{-(-6 * 500 // 64)}"
    assert_same_bits(tensors("killed")[1], tensors("whole")[1])
