"""One training run from a `TrainConfig`: data set, model, fit, test; in one process, or in all that torchrun starts."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tritonemb.comm.control import init_from_env
from tritonemb.comm.group import RankGroup
from tritonemb.data import open_dataset
from tritonemb.data.protocol import Data, Feature, tables_of
from tritonemb.nn import DLRM, DCNv2
from tritonemb.optimizers import OPTIMIZERS, Optimizer
from tritonemb.sharding import ExchangePrecision, HybridParallel, ShardingPlan
from tritonemb.training.callbacks import Callback, FitStart
from tritonemb.training.callbacks.profiler import Profiler
from tritonemb.training.callbacks.tensorboard import TensorBoard
from tritonemb.training.checkpoint import RunFolder
from tritonemb.training.checkpoint.all_ranks import on_all_ranks, on_rank_zero
from tritonemb.training.config import TrainConfig
from tritonemb.training.config_io import plain, to_plain, to_toml
from tritonemb.training.loop import FitResult
from tritonemb.training.trainer import Trainer
from tritonemb.training.utils import Interrupted, check_device
from tritonemb.utils import write_whole

RUNS = Path("runs")


def train(
    config: TrainConfig, resume: str | None = None, callbacks: Sequence[Callback] = (), verbose: bool = True
) -> FitResult:
    """Open the data set, build the model, train it and evaluate it on the test rows.

    Args:
        resume: "auto" for the newest checkpoint of the run's folder (of the newest folder of this data set, if `out` is
            not given), a new run if there is none; or the path of a checkpoint.
        callbacks: told of all that happens.

    Raises:
        ValueError, FileNotFoundError, ConnectionError: as the data set, the model and the trainer say.
        Interrupted: a signal asked to stop.
        RankFailed: another rank of the job has failed, or does not answer.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with joined(config) as (group, device):
        data = _open(config, group, verbose)
        folder = RunFolder(on_rank_zero(group, lambda: run_path(config, data, resume)), config.checkpoint.keep)
        first = group.rank == 0
        torch.manual_seed(config.seed)
        trainer = Trainer(
            _model(config, data, group, device),
            data,
            folder=folder.path,
            callbacks=[*(_watchers(config, folder) if first else []), *callbacks],
            config=to_plain(config) | {"features": plain(data.features), "num_dense": data.num_dense},
            verbose=verbose,
            **config.trainer_options(),
        )
        if resume is not None:
            trainer.resume(resume if resume == "auto" else newest(Path(resume)))
        return trainer.fit(test="test" in data.splits())


@contextmanager
def joined(config: TrainConfig) -> Iterator[tuple[RankGroup, torch.device]]:
    """The ranks that torchrun has started, and this one's device; this process alone without it.

    Raises:
        ValueError: the environment of torchrun is incomplete.
    """
    if "WORLD_SIZE" not in os.environ:
        yield RankGroup(), check_device(config.device)
        return
    rank_of_node = os.environ.get("LOCAL_RANK", "0")
    device = check_device(f"cuda:{rank_of_node}" if config.device == "cuda" else config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    init_from_env(backend, timedelta(seconds=config.parallel.timeout))
    try:
        yield RankGroup.world(), device
    except Interrupted:
        dist.destroy_process_group()
        raise
    # After any other exception ranks may be gone, and to destroy the group would be to wait for them.
    dist.destroy_process_group()


def _open(config: TrainConfig, group: RankGroup, verbose: bool) -> Data:
    """The data set; one process a node downloads or counts what has to be, before the others open it."""
    opened: list[Data] = []

    def open_once(mine: bool) -> None:
        if mine and not opened:
            say = _say if verbose and group.rank == 0 else None
            opened.append(open_dataset(config.data, config.path, log=config.read, seed=config.seed, say=say))

    on_all_ranks(group, lambda: open_once(group.nodes.index(group.nodes[group.rank]) == group.rank))
    on_all_ranks(group, lambda: open_once(True))
    return opened[0]


def _model(config: TrainConfig, data: Data, group: RankGroup, device: torch.device) -> nn.Module:
    """On several ranks, made without memory, and initialized shard by shard."""
    if group.process_group is None:
        return build_model(config, data.features, data.num_dense)
    options = config.parallel
    return HybridParallel(
        build_model(replace(config, device="meta"), data.features, data.num_dense),
        None if options.plan is None else ShardingPlan.load(options.plan),
        dense=options.dense_layers,
        exchange=ExchangePrecision(options.exchange, options.exchange_gradients),
        device=device,
        timeout=timedelta(seconds=options.timeout),
    )


def build_model(config: TrainConfig, features: Sequence[Feature], num_dense: int) -> nn.Module:
    """The model of a config, with one table for each feature."""
    tables = config.tables.place(tables_of(tuple(features), config.embedding_dim))
    optimizer = build_optimizer(config)
    if config.model == "dcnv2":
        return DCNv2(tables, num_dense, top_mlp=config.top_mlp, optimizer=optimizer, device=config.device)
    return DLRM(
        tables,
        num_dense,
        bottom_mlp=config.bottom_mlp,
        top_mlp=config.top_mlp,
        optimizer=optimizer,
        device=config.device,
    )


def build_optimizer(config: TrainConfig) -> Optimizer:
    """The tables' fused optimizer."""
    return OPTIMIZERS[config.embedding_optimizer](lr=config.embedding_lr, weight_decay=config.embedding_weight_decay)


def run_path(config: TrainConfig, data: Data, resume: str | None) -> Path:
    """The folder of a run: the one that is named, the newest one of the data set to resume, or a new one."""
    if config.output.out is not None:
        return config.output.out
    name = Path(data.name).name
    if resume == "auto":
        started = re.compile(re.escape(name) + r"-\d{8}-\d{6}")
        folders = [path for path in RUNS.iterdir() if started.fullmatch(path.name)] if RUNS.is_dir() else []
        runs = [path for path in folders if RunFolder(path).checkpoints.latest() is not None]
        if runs:
            return max(runs, key=lambda path: path.stat().st_mtime)
    elif resume is not None:
        return newest(Path(resume)).resolve().parents[1]
    return RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def newest(path: Path) -> Path:
    """The newest checkpoint of a run's folder, or the path itself."""
    return RunFolder(path).checkpoints.latest() or path


class SavedConfig(Callback):
    """Writes the effective configuration, once the folder is this run's."""

    def __init__(self, path: Path, config: TrainConfig) -> None:
        self._path, self._config = path, config

    def on_start(self, start: FitStart) -> None:
        write_whole(self._path, to_toml(self._config))


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def _watchers(config: TrainConfig, folder: RunFolder) -> list[Callback]:
    watchers: list[Callback] = [SavedConfig(folder.config, config)]
    if config.output.tensorboard:
        watchers.append(TensorBoard(folder.tensorboard))
    if config.profile.profile_steps:
        watchers.append(Profiler(folder.trace, config.profile))
    return watchers
