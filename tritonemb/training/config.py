"""Options of a training run: frozen dataclasses shared by `Trainer`, TOML files and the command line."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tritonemb.data import LogOptions, kind_of
from tritonemb.models import MODELS, ModelOptions
from tritonemb.offloading.options import OffloadOptions
from tritonemb.optimizers import OPTIMIZERS
from tritonemb.server.attach import ServersOptions
from tritonemb.training.schedule import Schedule, ScheduleOptions
from tritonemb.types import CodecName, TableOptions
from tritonemb.utils import Options, did_you_mean, number

Precision = Literal["fp32", "bf16", "fp16"]
EmbeddingOptimizer: TypeAlias = Literal[tuple(OPTIMIZERS)]  # type: ignore[valid-type]


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Length of training, and computation of a step.

    Args:
        batch_size: samples per batch and rank; the last batches of an epoch may have fewer.
        epochs: passes over the training rows.
        max_steps: number of steps after which training ends.
        accumulate: batches per step; their gradients are accumulated.
        fresh_tables: initialize tables again when a later epoch begins (MEDA: Fan et al., arXiv 2407.01607).
        dense_lr: learning rate of the dense optimizer, for all parameters outside fused tables.
        precision: precision of the dense part: fp32, or autocast to bf16 or fp16 (with a loss scale).
        seed: seed of the order of the rows; in `tritonemb train` also of initial weights and synthetic data.
        compile: run the model through torch.compile.
        log_every: steps between two lines of the log.
        prefetch_depth: steps whose host- or disk-resident rows are prefetched to the device. If not given, adapted
            during training: increased, up to 8, while training waits for rows. Results do not depend on it.
        num_workers: data loader workers per rank; 0 for none.
        timeout: seconds to wait for a rank that does not answer; collectives of the model use their group's timeout.
    """

    batch_size: int = number(1024, least=1)
    epochs: int = number(1, least=1)
    max_steps: int | None = number(None, least=1)
    accumulate: int = number(1, least=1)
    fresh_tables: bool = False
    dense_lr: float = 1e-3
    precision: Precision = "fp32"
    seed: int = number(0, least=0)
    compile: bool = False
    log_every: int = number(100, least=1)
    prefetch_depth: int | None = number(None, least=0)
    num_workers: int = number(0, least=0)
    timeout: float = number(600.0, positive=True)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Options):
    """Evaluation on the validation rows, choice of the best checkpoint, and early stopping.

    Skipped if the data set has no validation rows, or without a consumer: a folder, callbacks, `verbose` or `patience`.

    Args:
        evaluate_every: steps between two evaluations; the end of each epoch if not given.
        monitor: metric by which the best checkpoint is chosen.
        patience: consecutive evaluations without improvement after which training stops; never if not given.
        group_by: sparse column, such as the user, by whose values rows are grouped for GAUC.
    """

    evaluate_every: int | None = number(None, least=1)
    monitor: Literal["auc", "log_loss", "normalized_entropy", "gauc"] = "auc"
    patience: int | None = number(None, least=1)
    group_by: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.monitor == "gauc" and self.group_by is None:
            raise ValueError("monitor is 'gauc', which needs group_by, a sparse column such as the user")


@dataclass(frozen=True)
class OutputOptions(Options):
    """Files and metrics of a run.

    Args:
        out: the run's folder: checkpoints, log.jsonl, report.html, config.toml; runs/<data>-<time> if not given.
        tensorboard: write TensorBoard event files too.
        metrics_port: port on 127.0.0.1 of Prometheus metrics; local rank r of a machine has port metrics_port + r.
    """

    out: Path | None = None
    tensorboard: bool = False
    metrics_port: int | None = number(None, least=1)


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(Options):
    """Hybrid parallelism in a job of several processes, which torchrun starts.

    Args:
        plan: sharding plan (JSON) of `tritonemb plan`; computed at the start if not given.
        dense_layers: data parallelism of all layers but the tables: replicated (ddp) or sharded over the ranks (fsdp).
        exchange: codec of embeddings exchanged between ranks, see `ExchangePrecision`.
        exchange_gradients: codec of their gradients.
    """

    plan: Path | None = None
    dense_layers: Literal["ddp", "fsdp"] = "ddp"
    exchange: CodecName = "fp16"
    exchange_gradients: CodecName = "bf16"


@dataclass(frozen=True)
class CheckpointOptions(Options):
    """Interval, number and kind of checkpoints, and handling of failures.

    Args:
        checkpoint_steps: steps between two checkpoints.
        checkpoint_minutes: minutes between two checkpoints; 0 for no limit.
        keep: number of latest checkpoints to keep; the best one is kept too.
        on_checkpoint_error: if a checkpoint cannot be written, continue with the earlier checkpoints, or stop.
        on_changed_data: if the data have changed at resume, stop, or continue from the start of the epoch.
        checkpoint_incremental: write only changed rows of tables on disk, while all changes are smaller than the table.
        checkpoint_async: write checkpoints in a thread during training; needs host memory for a copy of the tensors.
    """

    checkpoint_steps: int | None = number(None, least=1)
    checkpoint_minutes: float = number(10.0, least=0)
    keep: int = number(3, least=1)
    on_checkpoint_error: Literal["continue", "stop"] = "continue"
    on_changed_data: Literal["continue", "stop"] = "stop"
    checkpoint_incremental: bool = False
    checkpoint_async: bool = False


@dataclass(frozen=True)
class PublishOptions(Options):
    """Publication of the model during training, for followers that serve it; see `te.serving.Publisher`.

    Args:
        publish: folder to publish to; not published if not given.
        publish_steps: steps between two publications; the last step is published, too.
        publish_rows: format of rows of tables that are not on servers.
        publish_seconds: publish after about this many seconds, if they pass before publish_steps steps.
        publish_priority: maximum number of rows per table in a publication: those that changed most; the others follow.
    """

    publish: Path | None = None
    publish_steps: int = number(1000, least=1)
    publish_rows: Literal["fp32", "int8"] = "fp32"
    publish_seconds: float | None = number(None, positive=True)
    publish_priority: int | None = number(None, least=1)


@dataclass(frozen=True)
class ProfileOptions(Options):
    """Window of steps to profile.

    Args:
        profile_steps: steps to profile, 0 for none; writes `trace.json` to the run's folder (ui.perfetto.dev opens it).
        profile_start: steps of this process before the profiled ones.
    """

    profile_steps: int = number(0, least=0)
    profile_start: int = number(10, least=0)


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(EvaluationOptions, RunOptions):
    """Options that `Trainer` takes as keyword arguments.

    Args:
        dense_schedule: schedule of the dense learning rate.
        table_schedule: schedule of the learning rates of the fused tables.
        checkpoints: options of checkpoints.
    """

    dense_schedule: Schedule | None = None
    table_schedule: Schedule | None = None
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunOptions):
    """Train a click model and report its quality on the test rows.

    Args:
        data: movielens-100k, synthetic, adult, criteo-kaggle, criteo-terabyte, or the path of a log.
        path: file or folder of criteo-kaggle, criteo-terabyte and adult.
        model: name of one of `tritonemb.models.MODELS`, or MODULE:FUNCTION that builds a model, called as they are.
        embedding_dim: columns of every table.
        bottom_mlp: hidden widths of dlrm's bottom MLP; a layer of width embedding_dim follows.
        top_mlp: hidden widths of the top MLP; two_tower: of each tower; mmoe, ple: of the experts, the last one of
            each label's tower.
        embedding_optimizer: optimizer of the tables, fused into their backward pass.
        embedding_lr: learning rate of the tables.
        embedding_weight_decay: weight decay of the tables, applied to the rows of each batch.
        cow_clip: ratio of CowClip, for large batches: bounds the gradient of a row by its norm and its occurrences.
        cow_clip_floor: minimum bound per occurrence with cow_clip.
        threads: CPU threads; torch's default if not given.
        device: device to train on.
        model_options: options of single models.
        tables: placement and caches of tables.
        read: reading of a log.
        schedule: learning rate schedules.
        evaluation: evaluation on the validation rows.
        checkpoint: checkpoints.
        output: files and metrics of the run.
        publish: publication of the model.
        profile: profiling.
        parallel: hybrid parallelism.
        server: tables on embedding servers.
        offload: offload of dense layers.
    """

    data: str = "movielens-100k"
    path: str | None = None
    model: str = "dlrm"
    embedding_dim: int = 16
    bottom_mlp: tuple[int, ...] = (64,)
    top_mlp: tuple[int, ...] = (128, 64)
    embedding_optimizer: EmbeddingOptimizer = "row_wise_adagrad"
    embedding_lr: float = 0.05
    embedding_weight_decay: float = 0.0
    cow_clip: float | None = None
    cow_clip_floor: float = 1e-5
    threads: int | None = number(None, least=1)
    device: str = "cpu"
    batch_size: int = number(512, least=1)
    epochs: int = number(4, least=1)
    model_options: ModelOptions = field(default_factory=ModelOptions)
    tables: TableOptions = field(default_factory=TableOptions)
    read: LogOptions = field(default_factory=LogOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    publish: PublishOptions = field(default_factory=PublishOptions)
    profile: ProfileOptions = field(default_factory=ProfileOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    server: ServersOptions = field(default_factory=ServersOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in MODELS and ":" not in self.model:
            hint = did_you_mean(self.model, MODELS)
            raise ValueError(f"model must be one of {', '.join(MODELS)}, or MODULE:FUNCTION, got {self.model!r}{hint}")

    def without_pretrained(self, device: str | None = None) -> "TrainConfig":
        """Return the configuration of a model whose tensors are loaded, so that no files of rows are read."""
        pretrained = self.tables.pretrained if self.fresh_tables and device is None else ()
        return replace(self, device=device or self.device, tables=replace(self.tables, pretrained=pretrained))

    def trainer_options(self) -> dict[str, Any]:
        sections = (self, self.schedule, self.evaluation)
        options = {f.name: getattr(s, f.name) for f in fields(TrainerOptions) for s in sections if hasattr(s, f.name)}
        return options | {"checkpoints": self.checkpoint, "offload": self.offload, **self.server.trainer_options()}


PRESETS = {
    # Chosen by the log loss on the validation rows.
    "movielens-100k": TrainConfig(data="movielens-100k", batch_size=256, epochs=2, dense_lr=3e-3),
    "synthetic": TrainConfig(data="synthetic", batch_size=1024, epochs=2, dense_lr=2e-3),
    "adult": TrainConfig(data="adult", top_mlp=(64, 32), batch_size=256, epochs=4, embedding_lr=0.02),
    # Widths of the DLRM paper's Criteo Kaggle run.
    "criteo-kaggle": TrainConfig(
        data="criteo-kaggle", bottom_mlp=(512, 256, 64), top_mlp=(512, 256), batch_size=2048, epochs=1,
        embedding_lr=0.02,
    ),
    # Widths of MLPerf's DLRM, with its polynomial decay; learning rates chosen here.
    "criteo-terabyte": TrainConfig(
        data="criteo-terabyte", embedding_dim=128, bottom_mlp=(512, 256), top_mlp=(1024, 1024, 512, 256),
        batch_size=16_384, epochs=1, embedding_lr=0.02, log_every=500,
        schedule=ScheduleOptions(dense_warmup_steps=2_000, table_warmup_steps=2_000),
    ),
}  # fmt: skip


def preset(data: str, name: str | None = None) -> TrainConfig:
    """Return the preset `name`, by default that of the data set, for this data; a log gets that of criteo-kaggle."""
    if name is not None and name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; expected one of {', '.join(PRESETS)}")
    return replace(PRESETS[name or kind_of(data)], data=data)
