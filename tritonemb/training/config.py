"""Every option of a training run, once: what `Trainer`, the TOML file and the command line take derives from here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tritonemb.data import LogOptions, kind_of
from tritonemb.training.callbacks.profiler import ProfileOptions
from tritonemb.training.checkpoint import CheckpointOptions
from tritonemb.training.schedule import Decay, Schedule
from tritonemb.types import CacheConfig, TableConfig

Codec = Literal["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"]
Precision = Literal["fp32", "bf16", "fp16"]
Monitor = Literal["auc", "log_loss", "normalized_entropy"]
EmbeddingOptimizer = Literal[
    "sgd", "row_wise_adagrad", "adagrad", "adam", "partial_row_wise_adam", "lamb", "partial_row_wise_lamb", "lars_sgd",
    "ftrl",
]  # fmt: skip


def number(default: Any, *, least: int) -> Any:
    """A field whose value is None or at least `least`."""
    return field(default=default, metadata={"least": least})


@dataclass(frozen=True)
class Options:
    """Checks the numbers of the fields that derived classes add."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            least = each.metadata.get("least")
            value = None if least is None else getattr(self, each.name)
            if value is not None and value < least:
                bound = "not be negative" if least == 0 else f"be at least {least}"
                raise ValueError(f"{each.name} must {bound}, got {value}")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """What is trained, for how long, and how a step is computed.

    Args:
        batch_size: samples a batch, of each rank; the last ones of an epoch may have fewer.
        epochs: passes over the training rows.
        max_steps: stop after so many steps.
        accumulate: batches a step: their gradients are applied together, as one batch's.
        dense_lr: learning rate of the dense optimizer, for all parameters that are in no fused table.
        precision: of the dense part: fp32, or autocast to bf16 or fp16 (with a loss scale).
        seed: of the order of the rows; `tritonemb train` seeds initial weights and synthetic data with it too.
        compile: run the model through torch.compile.
    """

    batch_size: int = number(1024, least=1)
    epochs: int = number(1, least=1)
    max_steps: int | None = number(None, least=1)
    accumulate: int = number(1, least=1)
    dense_lr: float = 1e-3
    precision: Precision = "fp32"
    seed: int = 0
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Learning rates over the steps, of the dense part and of the tables separately.

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
    def dense_schedule(self) -> Schedule:
        return self._schedule("dense")

    @property
    def table_schedule(self) -> Schedule:
        return self._schedule("table")

    def _schedule(self, part: str) -> Schedule:
        warmup, decay, steps, final = (
            getattr(self, f"{part}_{name}") for name in ("warmup_steps", "decay", "decay_steps", "final_factor")
        )
        return Schedule(warmup, decay, steps, self.decay_power, final)

    def __post_init__(self) -> None:
        assert self.dense_schedule is not self.table_schedule  # both are made once, which checks their numbers


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Options):
    """When the validation rows are evaluated, and what follows from it.

    They are evaluated where the data set has them and someone looks: a folder, callbacks, `verbose` or `patience`.

    Args:
        evaluate_every: steps between two evaluations; the end of each epoch if not given.
        monitor: the metric by which the best checkpoint is chosen.
        patience: stop after so many evaluations in a row without gain; never if not given.
    """

    evaluate_every: int | None = number(None, least=1)
    monitor: Monitor = "auc"
    patience: int | None = number(None, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.monitor not in get_args(Monitor):
            raise ValueError(f"monitor must be one of {get_args(Monitor)}, got {self.monitor!r}")


@dataclass(frozen=True, kw_only=True)
class LoggingOptions(Options):
    """How often a run is logged.

    Args:
        log_every: steps between two lines of the log.
    """

    log_every: int = number(100, least=1)


@dataclass(frozen=True, kw_only=True)
class OutputOptions(LoggingOptions):
    """What is kept of a run, and where.

    Args:
        out: the run's folder: checkpoints, log.jsonl, report.html, config.toml; runs/<data>-<time> if not given.
        tensorboard: write TensorBoard's files too.
    """

    out: Path | None = None
    tensorboard: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Options):
    """The processes of a job, beside and around those that train.

    Args:
        num_workers: data loader workers of each rank; none if 0.
        timeout: seconds to wait for a rank that does not answer. The model's own exchanges have a time-out of their
            own: that of `HybridParallel` or `torch.distributed.init_process_group`.
    """

    num_workers: int = number(0, least=0)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.timeout > 0:
            raise ValueError(f"timeout must be positive, got {self.timeout}")


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(WorkerOptions):
    """How a job of several processes shares the work; torchrun starts them.

    Args:
        plan: a sharding plan (JSON), which says where each table goes; chosen by the tables' sizes if not given.
        dense_layers: all layers but the tables: a copy on every rank (ddp), or sharded over the ranks (fsdp).
        exchange: in how many bits embeddings cross between ranks: fp32, fp16, bf16, fp8_e4m3, fp8_e5m2, int8.
        exchange_gradients: likewise their gradients.
    """

    plan: Path | None = None
    dense_layers: Literal["ddp", "fsdp"] = "ddp"
    exchange: Codec = "fp16"
    exchange_gradients: Codec = "bf16"


@dataclass(frozen=True, kw_only=True)
class PrefetchOptions(Options):
    """How far rows in host memory or on disk are prefetched.

    Args:
        prefetch_depth: steps whose rows are prefetched to the device before they compute. Chosen while training if not
            given: more, up to 8, while training waits for rows. It affects speed and cache statistics only.
    """

    prefetch_depth: int | None = number(None, least=0)


@dataclass(frozen=True, kw_only=True)
class TableOptions(PrefetchOptions):
    """Where the tables are, and how many of their rows are cached on the device.

    Args:
        placement: of large tables: on the device, in host memory or on disk, with rows cached on the device.
        placed_rows: tables with fewer rows stay on the device.
        cache_share: fraction of a placed table's rows that the device has room for.
        cache_rows: as many rows instead.
        cache_host_rows: rows of each table on disk that are cached in host memory too; none if not given.
        cache_policy: the row to evict: the least recently used (lru) or the least frequently used (lfu).
        cache_folder: where tables on disk have their files while they are in use; that of temporary files if not given.

    Raises:
        ValueError: for numbers out of range.
    """

    placement: Literal["device", "host", "disk"] = "device"
    placed_rows: int = number(10_000, least=0)
    cache_share: float = 0.1
    cache_rows: int | None = None
    cache_host_rows: int | None = None
    cache_policy: Literal["lru", "lfu"] = "lru"
    cache_folder: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_host_rows is not None and self.placement != "disk":
            raise ValueError(f"cache_host_rows is for tables on disk, but placement is {self.placement!r}")
        assert self.cache is not None  # made once, which checks its numbers

    @property
    def cache(self) -> CacheConfig:
        return CacheConfig(
            self.cache_rows, self.cache_share, self.cache_policy, self.cache_folder, self.cache_host_rows
        )

    def place(self, tables: Sequence[TableConfig]) -> list[TableConfig]:
        """These tables with placement and cache."""
        return [
            replace(table, placement=self.placement, cache=self.cache)
            if table.num_embeddings >= self.placed_rows
            else table
            for table in tables
        ]


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(PrefetchOptions, WorkerOptions, LoggingOptions, EvaluationOptions, RunOptions):
    """The options that a `Trainer` takes as keyword arguments.

    Args:
        dense_schedule: of the learning rate of the dense part.
        table_schedule: of the learning rates of the fused tables.
        checkpoints: when checkpoints are written.
    """

    dense_schedule: Schedule | None = None
    table_schedule: Schedule | None = None
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """The data set, and the model that is made for it.

    Args:
        data: movielens-100k, synthetic, adult, criteo-kaggle, criteo-terabyte, or the path of a log.
        path: the file or folder of criteo-kaggle, criteo-terabyte and adult.
        model: dlrm (Naumov et al., 2019) or dcnv2 (Wang et al., 2021).
        embedding_dim: columns of every table.
        bottom_mlp: hidden widths of the dense part of dlrm; the embedding dim follows.
        top_mlp: hidden widths before the logit.
        embedding_optimizer: fused into the backward pass of the tables.
        embedding_lr: its learning rate.
        embedding_weight_decay: its weight decay, on the rows of each batch.
        threads: CPU threads; torch's choice if not given.
        device: where to train.
    """

    data: str = "movielens-100k"
    path: Path | None = None
    model: Literal["dlrm", "dcnv2"] = "dlrm"
    embedding_dim: int = 16
    bottom_mlp: tuple[int, ...] = (64,)
    top_mlp: tuple[int, ...] = (128, 64)
    embedding_optimizer: EmbeddingOptimizer = "row_wise_adagrad"
    embedding_lr: float = 0.05
    embedding_weight_decay: float = 0.0
    threads: int | None = number(None, least=1)
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunOptions, ModelOptions):
    """Train a click model and report its quality on the test rows.

    Args:
        tables: where they are.
        read: how a log is read.
        schedule: learning rates over the steps.
        evaluation: of the validation rows.
        checkpoint: when checkpoints are written.
        output: what is kept of the run.
        profile: a window of steps under the profiler.
        parallel: how several processes share the work.
    """

    batch_size: int = number(512, least=1)
    epochs: int = number(4, least=1)
    tables: TableOptions = field(default_factory=TableOptions)
    read: LogOptions = field(default_factory=LogOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    profile: ProfileOptions = field(default_factory=ProfileOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)

    def trainer_options(self) -> dict[str, Any]:
        """The keyword arguments of a `Trainer`, each from the section that has it."""
        sections = (self, self.tables, self.schedule, self.evaluation, self.output, self.parallel)
        names = {each.name for each in dataclasses.fields(TrainerOptions)} - {"checkpoints"}
        found = {name: getattr(part, name) for part in sections for name in names if hasattr(part, name)}
        return found | {"checkpoints": self.checkpoint}


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
