"""Training jobs on several ranks, for `ranks(n).run`, and their results."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tritonemb as te
from tritonemb.comm.group import RankGroup
from tritonemb.data import Dataset, make_synthetic
from tritonemb.sharding.sharded_tensor import TableShards
from tritonemb.training import Callback

ROW_WISE_ADAGRAD = te.optim.RowWiseAdagrad(lr=0.05)


def planted(num_train: int = 1_000, validation: bool = True) -> Dataset:
    dataset = make_synthetic(num_train=num_train, num_test=400, seed=0)
    rows = dataset.test.slice(0, 150) if validation else None
    return Dataset("planted", dataset.features, dataset.train, dataset.test.slice(150, 400), validation=rows)


class Record(Callback):
    """Records the events of a rank, without times except those in `caches`."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []
        self.samples: list[int] = []
        self.sent: list[dict[str, int]] = []
        self.caches: list[dict[str, float]] = []
        self.dynamic: list[dict[str, dict[str, float]]] = []
        self.evaluations: list[tuple[int, float, float, bool]] = []
        self.messages: list[str] = []
        self.saved: list[int] = []

    def on_step(self, step):
        self.samples.append(step.samples)

    def on_log(self, log):
        self.losses.append((log.step, log.loss))
        self.sent.append(dict(log.sent))
        self.caches.append(dict(log.cache))
        self.dynamic.append({name: dict(values) for name, values in log.dynamic.items()})

    def on_evaluation(self, evaluation):
        metrics = evaluation.metrics
        self.evaluations.append((evaluation.step, metrics.auc, metrics.log_loss, evaluation.best))

    def on_checkpoint(self, saved):
        self.saved.append(saved.step)

    def on_message(self, text):
        self.messages.append(text)


def make_trainer(
    data: Any,
    folder: Path | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    dropout: float = 0.0,
    dense: str = "ddp",
    table_lr: float = 0.05,
    optimizer: te.optim.Optimizer | None = ROW_WISE_ADAGRAD,
    **options: Any,
) -> te.Trainer:
    torch.manual_seed(0)
    model = Noisy(data, dropout, replace(ROW_WISE_ADAGRAD, lr=table_lr) if optimizer is ROW_WISE_ADAGRAD else optimizer)
    wrapped = model
    if dist.is_initialized():
        timeout = timedelta(seconds=options["timeout"]) if "timeout" in options else None
        exchange = te.sharding.ExchangePrecision("fp32", "fp32")
        plan = plan_for(dist.get_world_size())
        wrapped = te.HybridParallel(model, plan, exchange=exchange, dense=dense, timeout=timeout)
    settings = {"batch_size": 50, "epochs": 2, "dense_lr": 3e-3, "log_every": 4, "verbose": False} | options
    return te.Trainer(wrapped, data, folder=folder, callbacks=list(callbacks), **settings)


def plan_for(size: int) -> te.sharding.ShardingPlan:
    """Plan with a table of every kind of sharding."""
    kinds = te.sharding
    return kinds.ShardingPlan(
        {
            "user": kinds.RowWise(),
            "item": kinds.TableWise(size - 1),
            "advertiser": kinds.ColumnWise(),
            "site": kinds.DataParallel(),
            "device": kinds.TableWise(0),
            "tags": kinds.RowWise(),
        },
        size,
    )


class Noisy(te.nn.DLRM):
    """A model that may draw random numbers while it trains."""

    def __init__(self, data: Any, dropout: float, optimizer: te.optim.Optimizer | None) -> None:
        super().__init__(data.tables(8), data.num_dense, bottom_mlp=(8,), top_mlp=(8,), optimizer=optimizer)
        self.dropout = dropout

    def forward(self, dense, sparse):
        return super().forward(nn.functional.dropout(dense, self.dropout, self.training), sparse)


def fit(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train; what this rank was told, and the model."""
    record = Record()
    folder, resume = options.pop("folder", None), options.pop("resume", False)
    crash_at, num_train = options.pop("crash_at", None), options.pop("num_train", 1_000)
    callbacks = [record, CrashAt(crash_at)] if crash_at else [record]
    trainer = make_trainer(planted(num_train), folder, callbacks=callbacks, **options)
    path = trainer.resume() if resume else None
    result = None
    with suppress(Crash):
        result = trainer.fit(test=True)
    return {
        **{name: value for name, value in vars(record).items() if name not in ("caches", "dynamic", "model")},
        "reason": None if result is None else result.reason,
        "steps": trainer.progress.step,
        "epoch_losses": None if result is None else result.losses,
        "test": None if result is None else (result.test.auc, result.test.log_loss, result.test.num_samples),
        "tensors": {name: whole(tensor) for name, tensor in trainer.model.state_dict().items()},
        "resumed": None if path is None else path.name,
        "random": torch.rand(1).item(),
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, of all ranks' shards where it is sharded."""
    return tensor.gather(RankGroup.world()) if isinstance(tensor, TableShards) else tensor.clone()


class Crash(Exception):
    pass


class CrashAt(Callback):
    """Every rank fails after this step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def on_step(self, step):
        if step.step == self.at:
            raise Crash


class SignalAt(Callback):
    """A signal to this process after this step."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.at, self.number = step, number

    def on_step(self, step):
        if step.step == self.at:
            os.kill(os.getpid(), self.number)
