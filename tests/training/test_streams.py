"""Training on a stream that is interrupted and resumed ends with the bits of training that was not."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("tyro")
pytest.importorskip("tomli_w")

import tritonemb as te
from tests.data.test_streams import FOLLOW, SCHEMA, end, move_in
from tests.helpers import assert_same_bits
from tests.programs import Program
from tests.training.disk_job import in_memory
from tests.training.jobs import SignalAt
from tests.training.kills import finish, kill
from tritonemb.data import ClickLog
from tritonemb.training.checkpoint import CheckpointFolder
from tritonemb.training.config import CheckpointOptions
from tritonemb.types import TableOptions


def trainer_on(logs, folder, placement="device", **options) -> te.Trainer:
    torch.manual_seed(0)
    log = ClickLog(logs, FOLLOW)
    tables = TableOptions(placement=placement, placed_rows=0, cache_rows=64).place(log.tables(4))
    model = te.nn.DLRM(tables, 1, bottom_mlp=(4,), top_mlp=(4,), optimizer=te.optim.RowWiseAdagrad(lr=0.1))
    model = te.HybridParallel(model) if torch.distributed.is_initialized() else model
    return te.Trainer(model, log, batch_size=16, folder=folder, verbose=False, **options)


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    move_in(folder, 1, 2, 3, 4, 5)
    return folder


def test_a_run_resumes_at_the_offsets_of_its_checkpoint(logs, tmp_path):
    make = partial(trainer_on, logs, checkpoints=CheckpointOptions(checkpoint_steps=2))
    assert make(tmp_path / "first", max_steps=6).fit().reason == "finished"
    end(logs)
    whole = make(tmp_path / "whole")
    assert whole.fit().steps == -(-250 // 16)
    (logs / "part-1.parquet").unlink()
    resumed = make(tmp_path / "first")
    resumed.resume()
    assert resumed.fit().steps == -(-250 // 16)
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize(("placement", "accumulate"), [("device", 1), ("host", 2)])
@pytest.mark.few(1)
def test_a_wait_for_rows_ends_at_the_first_signal(logs, tmp_path, placement, accumulate):
    make = partial(trainer_on, logs, placement=placement, accumulate=accumulate)
    num_steps = 250 // (16 * accumulate)  # some rows of the next step have come
    stopped = make(tmp_path / "stopped", callbacks=[SignalAt(num_steps)])
    with pytest.raises(te.training.Interrupted) as interrupted:
        stopped.fit()
    assert interrupted.value.exit_status == 143
    assert stopped.run_folder.checkpoints.steps() == [num_steps]
    move_in(logs, 6)
    end(logs)
    resumed, whole = make(tmp_path / "stopped"), make(tmp_path / "whole")
    resumed.resume()
    assert resumed.fit().steps == whole.fit().steps == -(-300 // (16 * accumulate))
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize("placement", ["device", "host"])
def test_the_last_step_waits_for_no_further_rows(logs, tmp_path, placement):
    trainer = trainer_on(logs, tmp_path / "run", placement, max_steps=250 // 16)
    assert trainer.fit().reason == "finished"
    assert trainer.run_folder.checkpoints.steps() == [250 // 16]


def waiting(rank, logs, folder, signalled, max_steps):
    num_steps = 5 * (50 // 2) // 16
    callbacks = [SignalAt(num_steps)] if rank == signalled else []
    trainer = trainer_on(logs, folder, callbacks=callbacks, max_steps=max_steps)
    try:
        return trainer.fit().reason, trainer.run_folder.checkpoints.steps() == [num_steps]
    except te.training.Interrupted as interrupted:
        return interrupted.exit_status, trainer.run_folder.checkpoints.steps() == [num_steps]


@pytest.mark.parametrize(("signalled", "max_steps"), [(1, None), (None, 7)])
def test_ranks_that_wait_for_rows_end_together(ranks, logs, tmp_path, signalled, max_steps):
    expected = (143 if max_steps is None else "finished", True)
    assert ranks(2).run(waiting, logs, tmp_path / "run", signalled, max_steps) == [expected] * 2


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ranks")
def test_a_run_that_is_killed_trains_on_every_row_once(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    options = [
        "--data", str(logs), "--follow", "--label", SCHEMA.label, "--dense", *SCHEMA.dense, "--sparse", *SCHEMA.sparse,
        "--num-embeddings", "100", "--embedding-dim", "4", "--bottom-mlp", "4", "--top-mlp", "4", "--batch-size", "64",
        "--epochs", "1", "--checkpoint-steps", "1", "--threads", "1", "--resume", "auto",
    ]  # fmt: skip

    def run(name):
        return Program("tritonemb", "train", *options, "--out", str(tmp_path / name))

    def tensors(name):
        path = CheckpointFolder(tmp_path / name / "checkpoints").latest()
        return path.name, in_memory(path)

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
