"""One training run from a `TrainConfig`: data set, model, fit, test."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tritonemb.data import Dataset, open_dataset
from tritonemb.nn import DLRM, DCNv2
from tritonemb.optim import OPTIMIZERS, Optimizer
from tritonemb.training.config import TrainConfig
from tritonemb.training.metrics import Metrics
from tritonemb.training.trainer import FitResult, Trainer


@dataclass(frozen=True)
class TrainResult:
    """What a run reached; `best_auc` is the best that can be expected, where the data set knows it."""

    fit: FitResult
    test: Metrics
    best_auc: float | None


def train(config: TrainConfig, verbose: bool = True) -> TrainResult:
    """Open the data set, build the model, train it and evaluate it on the test rows.

    Raises:
        ValueError, FileNotFoundError, ConnectionError: as the data set, the model and the trainer say.
    """
    if config.threads is not None:
        if config.threads < 1:
            raise ValueError(f"threads must be at least 1, got {config.threads}")
        torch.set_num_threads(config.threads)
    data = open_dataset(config.data, config.path, criteo=config.criteo, seed=config.seed)
    torch.manual_seed(config.seed)
    trainer = Trainer(
        build_model(config, data),
        data,
        batch_size=config.batch_size,
        epochs=config.epochs,
        dense_lr=config.dense_lr,
        seed=config.seed,
        compile=config.compile,
        verbose=verbose,
    )
    return TrainResult(trainer.fit(), trainer.evaluate("test"), data.best_auc)


def build_model(config: TrainConfig, data: Dataset) -> nn.Module:
    """The model of a config, with one table for each feature of the data set."""
    tables, optimizer = data.tables(config.embedding_dim), build_optimizer(config)
    if config.model == "dcnv2":
        return DCNv2(tables, data.num_dense, top_mlp=config.top_mlp, optimizer=optimizer, device=config.device)
    return DLRM(
        tables,
        data.num_dense,
        bottom_mlp=config.bottom_mlp,
        top_mlp=config.top_mlp,
        optimizer=optimizer,
        device=config.device,
    )


def build_optimizer(config: TrainConfig) -> Optimizer:
    """The tables' fused optimizer."""
    return OPTIMIZERS[config.embedding_optimizer](lr=config.embedding_lr, weight_decay=config.embedding_weight_decay)
