"""Training with tables on disk, in this process or in one that may be killed: `python -m tests.training.disk_job`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tritonemb as te
from tests.training.jobs import planted
from tritonemb.data import Dataset
from tritonemb.training import Callback, CheckpointOptions

LAST_STEP = 60
OPTIMIZER = te.optim.RowWiseAdagrad(lr=0.05)


def model_of(
    data: Dataset, placement: str, folder: Path | None = None, optimizer: te.optim.Optimizer = OPTIMIZER
) -> te.nn.DLRM:
    """Tables whose caches hold few rows; "mixed" places them in turn."""
    torch.manual_seed(0)
    cache = te.CacheConfig(rows=32, folder=folder)
    places = ["disk", "device", "host"] if placement == "mixed" else [placement]
    tables = [
        replace(table, placement=places[number % len(places)], cache=cache)
        for number, table in enumerate(data.tables(4))
    ]
    return te.nn.DLRM(tables, data.num_dense, bottom_mlp=(4,), top_mlp=(4,), optimizer=optimizer)


def make_trainer(
    data: Dataset, folder: Path | None, placement: str = "disk", *, callbacks: Sequence[Callback] = (), **options: Any
) -> te.Trainer:
    settings = {"batch_size": 50, "epochs": 2, "verbose": False, "log_every": 4} | options
    live = None if folder is None else folder.parent / "live"
    return te.Trainer(model_of(data, placement, live), data, folder=folder, callbacks=list(callbacks), **settings)


def main(folder: str, asynchronous: str) -> None:
    torch.set_num_threads(1)
    every = CheckpointOptions(
        checkpoint_steps=2, keep=2, checkpoint_incremental=True, checkpoint_async=asynchronous == "async"
    )
    trainer = make_trainer(planted(600, validation=False), Path(folder), epochs=5, checkpoints=every)
    trainer.resume("auto")
    assert trainer.fit().steps == LAST_STEP


if __name__ == "__main__":
    main(*sys.argv[1:])
