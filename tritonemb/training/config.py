"""Options of a training run: frozen dataclasses shared by `Trainer`, TOML files and the command line."""

import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from tritonemb.data import LogOptions, Schema, kind_of
from tritonemb.offloading.setup import parse_bytes
from tritonemb.offloading.tiers import TierName
from tritonemb.optimizers import OPTIMIZERS
from tritonemb.server import AtMost
from tritonemb.sharding import ExchangePrecision
from tritonemb.training.schedule import Schedule, ScheduleOptions
from tritonemb.types import CODECS, AdmissionConfig, CacheConfig, EvictionConfig, TableConfig
from tritonemb.utils import Options, did_you_mean, join_names, number, require

Config = TypeVar("Config")
CodecName: TypeAlias = Literal[tuple(CODECS)]  # type: ignore[valid-type]
Precision = Literal["fp32", "bf16", "fp16"]
EmbeddingOptimizer: TypeAlias = Literal[tuple(OPTIMIZERS)]  # type: ignore[valid-type]

_MISMATCH = object()  # result of `_convert` for a value of another type
# Types of TOML values that are converted to the type of a field.
_CONVERSIBLE = {Path: (str,), float: (int,), str: (int, date, datetime)}


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Length of training, and computation of a step.

    Args:
        batch_size: samples per batch and rank; the last batches of an epoch may have fewer.
        epochs: passes over the training rows.
        max_steps: number of steps after which training ends.
        accumulate: batches per step; their gradients are accumulated.
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
    dense_lr: float = 1e-3
    precision: Precision = "fp32"
    seed: int = 0
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
    """

    evaluate_every: int | None = number(None, least=1)
    monitor: Literal["auc", "log_loss", "normalized_entropy"] = "auc"
    patience: int | None = number(None, least=1)


@dataclass(frozen=True)
class OutputOptions:
    """Files of a run.

    Args:
        out: the run's folder: checkpoints, log.jsonl, report.html, config.toml; runs/<data>-<time> if not given.
        tensorboard: write TensorBoard event files too.
    """

    out: Path | None = None
    tensorboard: bool = False


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


@dataclass(frozen=True, kw_only=True)
class ServersOptions(Options):
    """Tables on embedding servers.

    Args:
        servers: number of servers to start on this machine for this run; ray:4 to start 4 on a Ray cluster; or
            addresses of running servers, HOST:PORT, grpc://HOST:PORT or grpc+tls://HOST:PORT, separated by commas.
        server_tables: names of the tables on servers; all if not given.
        staleness: steps whose updates a batch may miss.
        staleness_mode: whether a batch misses exactly these steps (reproducible), at most these, or any number
            (unbounded).
        server_log: write-ahead log of the servers that the run starts, for recovery: in the memory of trainers
            (memory), or a file in the run's folder that survives the process (disk) or a power loss (fsync).
        server_restart_timeout: seconds without an answer after which training fails, without the time to restart a
            process on this machine; 20 if not given, 60 on Ray.
        server_exchange: codec of rows pulled from servers, with a staleness of 1 or more.
        server_exchange_gradients: codec of gradients pushed to servers, with a staleness of 1 or more.
        server_certificate: TLS certificate of servers on Ray: a PEM file on their machines.
        server_key: TLS private key of servers on Ray: a PEM file on their machines.
    """

    servers: str | None = None
    server_tables: tuple[str, ...] = ()
    staleness: int = number(0, least=0)
    staleness_mode: Literal["exact", "at-most", "unbounded"] = "exact"
    server_log: Literal["memory", "disk", "fsync"] | None = None
    server_restart_timeout: float | None = number(None, least=1)
    server_exchange: CodecName = "fp32"
    server_exchange_gradients: CodecName = "fp32"
    server_certificate: Path | None = None
    server_key: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.servers is None and (unused := [f.name for f in fields(self) if getattr(self, f.name) != f.default]):
            raise ValueError(f"{join_names(unused)}: no effect without servers; set servers, too")
        if self.on_ray and self.num_started is None:
            raise ValueError(f"servers={self.servers}: expected the number of servers to start, for example ray:4")
        if self.servers is not None and self.num_started is None and self.server_log is not None:
            raise ValueError("server_log is for servers that the run starts; for addresses, set it on those servers")
        if not self.on_ray and (self.server_certificate or self.server_key) is not None:
            raise ValueError("server_certificate and server_key are for servers on Ray: set servers, too, as ray:4")

    @property
    def on_ray(self) -> bool:
        """Return whether Ray starts the servers."""
        return (self.servers or "").partition(":")[0] == "ray"

    @property
    def num_started(self) -> int | None:
        """Number of servers that the run starts; None for running servers."""
        text = (self.servers or "").removeprefix("ray:")
        return int(text) if text.isdecimal() else None

    def trainer_options(self) -> dict[str, Any]:
        """Keyword arguments of `Trainer`."""
        staleness = {"exact": self.staleness, "at-most": AtMost(self.staleness), "unbounded": None}[self.staleness_mode]
        exchange = ExchangePrecision(self.server_exchange, self.server_exchange_gradients)
        return {"staleness": staleness, "server_exchange": exchange}

    def place(self, tables: Sequence[TableConfig]) -> list[TableConfig]:
        """Set the placement of tables to "server" if there are servers: of `server_tables`, by default of all."""
        if self.servers is None:
            return list(tables)
        names = [table.name for table in tables]
        for name in self.server_tables:
            if name not in names:
                known = did_you_mean(name, names, f", only {join_names(names)}")
                raise ValueError(f"server_tables: unknown table {name!r}{known}")
        # Batches whose rows stay on the servers; 8 per step is enough for accumulated batches and several trainers.
        protect = (self.staleness + 1) * 8
        placed = list(tables)
        for index, table in enumerate(tables):
            if table.name in (self.server_tables or names):
                eviction = replace(table.eviction, protect=protect) if table.is_dynamic else table.eviction
                cache = CacheConfig(table.cache.rows, policy=table.cache.policy)
                placed[index] = replace(table, placement="server", cache=cache, eviction=eviction)
        return placed


@dataclass(frozen=True, kw_only=True)
class TableOptions(Options):
    """Placement of the tables, and caches of their rows on the device.

    Args:
        placement: placement of large tables: device, or host memory (host) or disk with rows cached on the device.
        placed_rows: least number of rows of a table with this placement; smaller tables stay on the device.
        cache_share: fraction of a table's rows that its device cache holds.
        cache_rows: number of rows that a device cache holds, in place of cache_share.
        cache_host_rows: rows of each table on disk that are also cached in host memory; none if not given.
        cache_policy: eviction policy of caches: least recently used (lru) or least frequently used (lfu).
        cache_folder: folder of the files of tables on disk during the run; the system's temporary folder if not given.
        evict: eviction policy of full dynamic tables: lru or lfu.
        admit_after: occurrences of an id after which it gets a row of a dynamic table.
    """

    placement: Literal["device", "host", "disk"] = "device"
    placed_rows: int = number(10_000, least=0)
    cache_share: float = 0.1
    cache_rows: int | None = None
    cache_host_rows: int | None = None
    cache_policy: Literal["lru", "lfu"] = "lru"
    cache_folder: Path | None = None
    evict: Literal["lru", "lfu"] = "lru"
    admit_after: int = number(1, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_host_rows is not None and self.placement != "disk":
            raise ValueError(f"cache_host_rows is for tables on disk, but placement is {self.placement!r}")
        self.place([])  # checks the cache options

    def place(self, tables: Sequence[TableConfig]) -> list[TableConfig]:
        """Set placement, cache, eviction and admission of tables."""
        cache = CacheConfig(
            self.cache_rows, self.cache_share, self.cache_policy, self.cache_folder, self.cache_host_rows
        )
        eviction, admission = EvictionConfig(self.evict), AdmissionConfig(appearances=self.admit_after)
        placed = list(tables)
        for index, table in enumerate(tables):
            if table.is_dynamic:
                placed[index] = replace(table, eviction=eviction, admission=admission)
            if (table.num_embeddings or table.capacity or 0) >= self.placed_rows:
                placed[index] = replace(placed[index], placement=self.placement, cache=cache)
        return placed


@dataclass(frozen=True)
class CheckpointOptions(Options):
    """Interval, number and kind of checkpoints, and handling of failures.

    Args:
        checkpoint_steps: steps between two checkpoints.
        checkpoint_minutes: minutes between two checkpoints; 0 for no limit.
        keep: number of latest checkpoints to keep; the best one is kept too.
        on_checkpoint_error: if a checkpoint cannot be written, continue with the earlier checkpoints, or stop.
        on_changed_data: if the data have changed at resume, stop, or continue from the start of the epoch.
        checkpoint_incremental: for tables on disk, write only the rows changed since the last checkpoint, while these
            changes together are smaller than the table.
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
class ProfileOptions(Options):
    """Window of steps to profile.

    Args:
        profile_steps: steps to profile, 0 for none; writes `trace.json` to the run's folder (ui.perfetto.dev opens it).
        profile_start: steps of this process before the profiled ones.
    """

    profile_steps: int = number(0, least=0)
    profile_start: int = number(10, least=0)


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(Options):
    """Offload of the layers outside tables to host memory or disk, see `te.offload`.

    Args:
        offload_states: tier of the dense optimizer's states.
        offload_params: tier of parameters while they are not in use.
        offload_activations: tier of activations that autograd saves for the backward pass.
        offload_path: folder of the swap file, for disk; on a local disk, and not shared with other runs.
        offload_budget: device memory for parameters in use, and host memory for states read from disk, as 8GiB or in
            bytes; a quarter of the free memory if not given.
    """

    offload_states: TierName = "device"
    offload_params: TierName = "device"
    offload_activations: TierName = "device"
    offload_path: Path | None = None
    offload_budget: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        on_disk = [option.name for option in fields(self) if getattr(self, option.name) == "disk"]
        if on_disk and self.offload_path is None:
            raise ValueError(f"{join_names(on_disk)}=disk needs a folder for the swap file: set offload_path, too")
        for name, used in (("offload_path", on_disk), ("offload_budget", self.moved)):
            if getattr(self, name) is not None and not used:
                raise ValueError(f"{name}: nothing is offloaded{' to disk' * (name == 'offload_path')}")
        parse_bytes(1 if self.offload_budget is None else self.offload_budget, "offload_budget")

    @property
    def moved(self) -> list[str]:
        """Names of the options that offload something."""
        return [option.name for option in fields(self) if getattr(self, option.name) in ("host", "disk")]

    def check(self, num_ranks: int, sharded: bool, compile: bool) -> None:
        """Raise ValueError, which names an option, if a run with these options cannot offload."""
        if self.moved and num_ranks > 1 and not sharded:
            raise ValueError(
                f'{self.moved[0]} needs dense_layers="fsdp" (of te.HybridParallel: dense="fsdp"), or one process: with '
                f'"ddp" each of {num_ranks} ranks has a copy of the dense layers'
            )
        if self.moved and compile:
            raise ValueError(f"{self.moved[0]} cannot be used with compile: a compiled model needs all its weights")


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
        model: dlrm (Naumov et al., 2019) or dcnv2 (Wang et al., 2021).
        embedding_dim: columns of every table.
        bottom_mlp: hidden widths of dlrm's bottom MLP; a layer of width embedding_dim follows.
        top_mlp: hidden widths of the top MLP; the logit follows.
        embedding_optimizer: optimizer of the tables, fused into their backward pass.
        embedding_lr: learning rate of the tables.
        embedding_weight_decay: weight decay of the tables, applied to the rows of each batch.
        threads: CPU threads; torch's default if not given.
        device: device to train on.
        tables: placement and caches of tables.
        read: reading of a log.
        schedule: learning rate schedules.
        evaluation: evaluation on the validation rows.
        checkpoint: checkpoints.
        output: files of the run.
        profile: profiling.
        parallel: hybrid parallelism.
        server: tables on embedding servers.
        offload: offload of dense layers.
    """

    data: str = "movielens-100k"
    path: str | None = None
    model: Literal["dlrm", "dcnv2"] = "dlrm"
    embedding_dim: int = 16
    bottom_mlp: tuple[int, ...] = (64,)
    top_mlp: tuple[int, ...] = (128, 64)
    embedding_optimizer: EmbeddingOptimizer = "row_wise_adagrad"
    embedding_lr: float = 0.05
    embedding_weight_decay: float = 0.0
    threads: int | None = number(None, least=1)
    device: str = "cpu"
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
    server: ServersOptions = field(default_factory=ServersOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)

    def trainer_options(self) -> dict[str, Any]:
        """Keyword arguments of `Trainer`, collected from the sections."""
        sections = (self, self.schedule, self.evaluation)
        names = [option.name for option in fields(TrainerOptions)]
        options = {name: getattr(section, name) for section in sections for name in names if hasattr(section, name)}
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


def plain(value: Any) -> Any:
    """Convert a value to nested dicts, lists and scalars for TOML and JSON; fields that are None are omitted."""
    if is_dataclass(value):
        value = {name: item for name, item in vars(value).items() if item is not None}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def to_toml(config: Any) -> str:
    """Encode a dataclass as TOML; keys whose value is None are omitted."""
    return str(require("tomli_w").dumps(plain(config)))


def read_toml(path: str | Path, base: Config) -> Config:
    """Replace values of `base` by those of a TOML file. Raise FileNotFoundError; ValueError for invalid TOML, an
    unknown key, or a value of a wrong type or range."""
    return from_plain(load_toml(path), base, str(path))


def load_toml(path: str | Path) -> dict[str, Any]:
    """Parse a TOML file; raises as `read_toml`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a configuration in TOML")
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested plain values to pairs of path and value, with paths such as `read.schema.label`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def from_plain(values: dict[str, Any], base: Config, where: str, section: str = "") -> Config:
    """Replace values of `base`, converted to the types of its fields; errors name the source, `where` and `section`."""
    # Checkpoints of versions without clamp_negative: it was implied by log_transform.
    if isinstance(base, Schema) and {"log_transform", "sizes", "dynamic", "integers"} <= values.keys():
        values = {"clamp_negative": bool(values["log_transform"])} | values
    if isinstance(base, LogOptions):  # renamed; checkpoints and config files have the old key
        values = {{"workers": "parser_threads"}.get(key, key): value for key, value in values.items()}
    hints, changes = get_type_hints(type(base)), {}
    known = sorted(option.name for option in fields(base))  # type: ignore[arg-type]
    for key, value in values.items():
        name = f"{section}.{key}" if section else key
        if key not in known:
            hint = did_you_mean(key, known, f"; known keys are {', '.join(known)}")
            hint = "; move it above the sections" if section and hasattr(TrainConfig, key) else hint
            raise ValueError(f"{where}: unknown key {name!r}{hint}")
        if is_dataclass(hints[key]) and isinstance(value, dict):
            changes[key] = from_plain(value, getattr(base, key), where, name)
        elif (converted := _convert(value, hints[key])) is _MISMATCH:
            raise ValueError(f"{where}: {name} is {value!r}, expected {_describe_type(hints[key])}")
        else:
            changes[key] = converted
    try:
        return replace(base, **changes)  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}{f', [{section}]' if section else ''}: {error}") from error


def _convert(value: Any, hint: Any) -> Any:
    """Convert a TOML value to the type of a field; `_MISMATCH` if it has another type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return next((converted for part in args if (converted := _convert(value, part)) is not _MISMATCH), _MISMATCH)
    if origin is Literal:
        return value if value in args else _MISMATCH
    if origin is tuple and isinstance(value, list):
        item_types = args[:1] * len(value) if args[-1] is Ellipsis else args
        converted = tuple(map(_convert, value, item_types)) if len(item_types) == len(value) else (_MISMATCH,)
        return _MISMATCH if _MISMATCH in converted else converted
    if type(value) in _CONVERSIBLE.get(hint, ()):
        return hint(value)
    return value if type(value) is hint else _MISMATCH


def _describe_type(hint: Any) -> str:
    """Describe the type of a field for errors."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe_type(part) for part in args if part is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin is tuple:
        return "a list of " + _describe_type(args[0])
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", Path: "a path"}
    return names.get(hint, "a section" if is_dataclass(hint) else str(hint))
