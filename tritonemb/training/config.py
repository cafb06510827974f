"""Everything that decides a training run, and good values for each data set."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tritonemb.data import CriteoOptions, kind_of

EmbeddingOptimizer = Literal[
    "sgd",
    "row_wise_adagrad",
    "adagrad",
    "adam",
    "partial_row_wise_adam",
    "lamb",
    "partial_row_wise_lamb",
    "lars_sgd",
    "ftrl",
]


@dataclass(frozen=True)
class TrainConfig:
    """Train a click model and report its quality on the test rows.

    Args:
        data: movielens-100k, synthetic, criteo, adult, or the path of a file in Criteo's format.
        path: the file of criteo, the folder of adult.
        model: dlrm (Naumov et al., 2019) or dcnv2 (Wang et al., 2021).
        embedding_dim: columns of every table.
        bottom_mlp: hidden widths of the dense part of dlrm; the embedding dim follows.
        top_mlp: hidden widths before the logit.
        batch_size: samples a step.
        epochs: passes over the training rows.
        embedding_optimizer: fused into the backward pass of the tables.
        embedding_lr: its learning rate.
        embedding_weight_decay: its weight decay, on the rows of each batch.
        dense_lr: learning rate of Adam, for all other parameters.
        seed: of the initial weights, of the order of the rows and of synthetic data.
        compile: run the model through torch.compile.
        threads: CPU threads; torch's choice if not given.
        device: where to train.
        criteo: how a file in Criteo's format is split and numbered.
    """

    data: str = "movielens-100k"
    path: Path | None = None
    model: Literal["dlrm", "dcnv2"] = "dlrm"
    embedding_dim: int = 16
    bottom_mlp: tuple[int, ...] = (64,)
    top_mlp: tuple[int, ...] = (128, 64)
    batch_size: int = 512
    epochs: int = 4
    embedding_optimizer: EmbeddingOptimizer = "row_wise_adagrad"
    embedding_lr: float = 0.05
    embedding_weight_decay: float = 0.0
    dense_lr: float = 1e-3
    seed: int = 0
    compile: bool = False
    threads: int | None = None
    device: str = "cpu"
    criteo: CriteoOptions = field(default_factory=CriteoOptions)


PRESETS = {
    # Chosen by the log loss on the validation rows.
    "movielens-100k": TrainConfig(data="movielens-100k", batch_size=256, epochs=2, dense_lr=3e-3),
    "synthetic": TrainConfig(data="synthetic", batch_size=1024, epochs=2, dense_lr=2e-3),
    # The widths of the DLRM paper's own Criteo Kaggle run.
    "criteo": TrainConfig(
        data="criteo",
        bottom_mlp=(512, 256, 64),
        top_mlp=(512, 256),
        batch_size=2048,
        epochs=1,
        embedding_lr=0.02,
    ),
    "adult": TrainConfig(data="adult", top_mlp=(64, 32), batch_size=256, epochs=4, embedding_lr=0.02),
}


def preset(data: str) -> TrainConfig:
    """The starting point for a data set; a path gets that of Criteo."""
    return PRESETS[kind_of(data)]
