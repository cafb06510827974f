"""Everything that decides a training run, and good values for each data set."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tritonemb.data import LogOptions, kind_of
from tritonemb.training.callbacks.profiler import ProfileOptions
from tritonemb.training.checkpoint import CheckpointOptions
from tritonemb.training.precision import Precision
from tritonemb.training.schedule import Decay, Schedule
from tritonemb.training.table_options import TableOptions

Codec = Literal["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"]
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
class ScheduleOptions:
    """Learning rates over the steps, of the dense part and of the tables apart.

    Args:
        dense_warmup_steps: steps in which the dense rate rises to its full value.
        dense_decay: how it falls afterwards.
        dense_decay_steps: over how many steps; to the end of the run if not given.
        dense_final_factor: what it is multiplied by in the end.
        table_warmup_steps: as for the dense part.
        table_decay: as for the dense part.
        table_decay_steps: as for the dense part.
        table_final_factor: as for the dense part.
        decay_power: of polynomial decays.
    """

    dense_warmup_steps: int = 0
    dense_decay: Decay = "constant"
    dense_decay_steps: int | None = None
    dense_final_factor: float = 0.0
    table_warmup_steps: int = 0
    table_decay: Decay = "constant"
    table_decay_steps: int | None = None
    table_final_factor: float = 0.0
    decay_power: float = 2.0

    @property
    def dense(self) -> Schedule:
        return Schedule(
            self.dense_warmup_steps,
            self.dense_decay,
            self.dense_decay_steps,
            self.decay_power,
            self.dense_final_factor,
        )

    @property
    def tables(self) -> Schedule:
        return Schedule(
            self.table_warmup_steps,
            self.table_decay,
            self.table_decay_steps,
            self.decay_power,
            self.table_final_factor,
        )

    def __post_init__(self) -> None:
        assert self.dense is not self.tables  # both are made once, which checks their numbers


@dataclass(frozen=True)
class EvaluationOptions:
    """When the validation rows are evaluated, and what follows from it.

    Args:
        evaluate_every: steps between two evaluations; the end of each epoch if not given.
        monitor: the metric by which the best checkpoint is chosen.
        patience: stop after so many evaluations in a row without gain; never if not given.
    """

    evaluate_every: int | None = None
    monitor: Literal["auc", "log_loss", "normalized_entropy"] = "auc"
    patience: int | None = None


@dataclass(frozen=True)
class OutputOptions:
    """What is kept of a run, and where.

    Args:
        out: the run's folder: checkpoints, log.jsonl, report.html, config.toml; runs/<data>-<time> if not given.
        log_every: steps between two lines of the log.
        tensorboard: write TensorBoard's files too.
    """

    out: Path | None = None
    log_every: int = 100
    tensorboard: bool = False


@dataclass(frozen=True)
class ParallelOptions:
    """How a job of several processes shares the work; torchrun starts them.

    Args:
        plan: a sharding plan (JSON), which says where each table goes; chosen by the tables' sizes if not given.
        dense_layers: all that is no table: a copy on every rank (ddp), or cut over the ranks (fsdp).
        exchange: in how many bits embeddings cross between ranks: fp32, fp16, bf16, fp8_e4m3, fp8_e5m2, int8.
        exchange_gradients: likewise their gradients.
        readers: processes a host that read the data, apart from those that train.
        timeout: seconds to wait for a rank that does not answer.
    """

    plan: Path | None = None
    dense_layers: Literal["ddp", "fsdp"] = "ddp"
    exchange: Codec = "fp16"
    exchange_gradients: Codec = "bf16"
    readers: int = 0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.readers < 0:
            raise ValueError(f"readers must not be negative, got {self.readers}")
        if not self.timeout > 0:
            raise ValueError(f"timeout must be positive, got {self.timeout}")


@dataclass(frozen=True)
class TrainConfig:
    """Train a click model and report its quality on the test rows.

    Args:
        data: movielens-100k, synthetic, adult, criteo-kaggle, criteo-terabyte, or the path of a log.
        path: the file or folder of criteo-kaggle, criteo-terabyte and adult.
        model: dlrm (Naumov et al., 2019) or dcnv2 (Wang et al., 2021).
        embedding_dim: columns of every table.
        bottom_mlp: hidden widths of the dense part of dlrm; the embedding dim follows.
        top_mlp: hidden widths before the logit.
        batch_size: samples a batch, of each rank.
        epochs: passes over the training rows.
        max_steps: stop after so many steps.
        accumulate: batches a step.
        embedding_optimizer: fused into the backward pass of the tables.
        embedding_lr: its learning rate.
        embedding_weight_decay: its weight decay, on the rows of each batch.
        dense_lr: learning rate of Adam, for all other parameters.
        precision: of the dense part: fp32, or autocast to bf16 or fp16.
        seed: of the initial weights, of the order of the rows and of synthetic data.
        compile: run the model through torch.compile.
        threads: CPU threads; torch's choice if not given.
        device: where to train.
        tables: where they live.
        read: how a log is read.
        schedule: learning rates over the steps.
        evaluation: of the validation rows.
        checkpoint: when checkpoints are written.
        output: what is kept of the run.
        profile: a window of steps under the profiler.
        parallel: how several processes share the work.
    """

    data: str = "movielens-100k"
    path: Path | None = None
    model: Literal["dlrm", "dcnv2"] = "dlrm"
    embedding_dim: int = 16
    bottom_mlp: tuple[int, ...] = (64,)
    top_mlp: tuple[int, ...] = (128, 64)
    batch_size: int = 512
    epochs: int = 4
    max_steps: int | None = None
    accumulate: int = 1
    embedding_optimizer: EmbeddingOptimizer = "row_wise_adagrad"
    embedding_lr: float = 0.05
    embedding_weight_decay: float = 0.0
    dense_lr: float = 1e-3
    precision: Precision = "fp32"
    seed: int = 0
    compile: bool = False
    threads: int | None = None
    device: str = "cpu"
    tables: TableOptions = field(default_factory=TableOptions)
    read: LogOptions = field(default_factory=LogOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    profile: ProfileOptions = field(default_factory=ProfileOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)


PRESETS = {
    # Chosen by the log loss on the validation rows.
    "movielens-100k": TrainConfig(data="movielens-100k", batch_size=256, epochs=2, dense_lr=3e-3),
    "synthetic": TrainConfig(data="synthetic", batch_size=1024, epochs=2, dense_lr=2e-3),
    "adult": TrainConfig(data="adult", top_mlp=(64, 32), batch_size=256, epochs=4, embedding_lr=0.02),
    # The widths of the DLRM paper's own Criteo Kaggle run.
    "criteo-kaggle": TrainConfig(
        data="criteo-kaggle",
        bottom_mlp=(512, 256, 64),
        top_mlp=(512, 256),
        batch_size=2048,
        epochs=1,
        embedding_lr=0.02,
    ),
    # The widths of MLPerf's DLRM, with its polynomial decay; rates of our own.
    "criteo-terabyte": TrainConfig(
        data="criteo-terabyte",
        embedding_dim=128,
        bottom_mlp=(512, 256),
        top_mlp=(1024, 1024, 512, 256),
        batch_size=16_384,
        epochs=1,
        embedding_lr=0.02,
        schedule=ScheduleOptions(dense_warmup_steps=2_000, table_warmup_steps=2_000),
        output=OutputOptions(log_every=500),
    ),
}


def preset(data: str, name: str | None = None) -> TrainConfig:
    """The starting point for a data set, or the preset of that name for it; a log gets that of Criteo's Kaggle set.

    Raises:
        ValueError: there is no preset of that name.
    """
    kind = kind_of(data)
    if name is None:
        return dataclasses.replace(PRESETS[kind], data=data)
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[name], data=data)
