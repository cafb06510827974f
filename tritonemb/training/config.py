"""Every option of a training run, once: frozen dataclasses, for `Trainer`, the TOML file and the command line."""

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

_MISMATCH = object()
_CONVERSIBLE = {
    Path: (str,),
    float: (int,),
    str: (int, date, datetime),
}  # what TOML has for them besides; times are strings


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
        log_every: steps between two lines of the log.
        prefetch_depth: steps whose rows, in host memory or on disk, are prefetched to the device before they compute.
            Chosen while training if not given: more, up to 8, while it waits for rows. It changes speed, and no result.
        num_workers: data loader workers of each rank; none if 0.
        timeout: seconds to wait for a rank that does not answer; the model's own exchanges have that of their group.
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
    """When the validation rows are evaluated, and what follows from it.

    They are evaluated where the data set has them and someone looks: a folder, callbacks, `verbose` or `patience`.

    Args:
        evaluate_every: steps between two evaluations; the end of each epoch if not given.
        monitor: the metric by which the best checkpoint is chosen.
        patience: stop after so many evaluations in a row without gain; never if not given.
    """

    evaluate_every: int | None = number(None, least=1)
    monitor: Literal["auc", "log_loss", "normalized_entropy"] = "auc"
    patience: int | None = number(None, least=1)


@dataclass(frozen=True)
class OutputOptions:
    """What is kept of a run, and where.

    Args:
        out: the run's folder: checkpoints, log.jsonl, report.html, config.toml; runs/<data>-<time> if not given.
        tensorboard: write TensorBoard's files too.
    """

    out: Path | None = None
    tensorboard: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(Options):
    """How a job of several processes shares the work; torchrun starts them.

    Args:
        plan: a sharding plan (JSON): where each table goes (tritonemb plan makes one); made here if not given.
        dense_layers: all layers but the tables: a copy on every rank (ddp), or sharded over the ranks (fsdp).
        exchange: in how many bits embeddings cross between ranks, see `ExchangePrecision`.
        exchange_gradients: likewise their gradients.
    """

    plan: Path | None = None
    dense_layers: Literal["ddp", "fsdp"] = "ddp"
    exchange: CodecName = "fp16"
    exchange_gradients: CodecName = "bf16"


@dataclass(frozen=True, kw_only=True)
class ServersOptions(Options):
    """Tables on embedding servers.

    Args:
        servers: how many to start on this machine, for this run alone; or, as ray:4, on a Ray cluster; or addresses of
            servers that run already, HOST:PORT, grpc://HOST:PORT or grpc+tls://HOST:PORT, with commas between them.
        server_tables: names of the tables that go there; all if none is given.
        staleness: steps whose updates a batch may miss.
        staleness_mode: it misses exactly these, so a run can be repeated; at most these; or any number (unbounded).
        server_log: of servers that are started here, who keeps what they were told, so that they may be lost: trainers
            (memory), or a file that survives the process (disk) or a loss of power (fsync), in the run's folder.
        server_restart_timeout: seconds without an answer that end training, besides those to start a process of this
            machine again; 20 if not given, with Ray 60.
        server_exchange: in how many bits rows come from servers, where there is some staleness.
        server_exchange_gradients: likewise gradients to servers.
        server_certificate: of servers on Ray, a PEM file on their machines, for TLS.
        server_key: likewise.
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
            raise ValueError(f"without servers there is nothing for {join_names(unused)}: give servers, too")
        if self.on_ray and self.num_started is None:
            raise ValueError(f"servers={self.servers}: say how many servers Ray is to start, for example ray:4")
        if self.servers is not None and self.num_started is None and self.server_log is not None:
            raise ValueError("server_log is for servers that are started here; set it where those at addresses start")
        if not self.on_ray and (self.server_certificate or self.server_key) is not None:
            raise ValueError("server_certificate and server_key are for servers on Ray: give servers, too, as ray:4")

    @property
    def on_ray(self) -> bool:
        """Whether Ray starts the servers."""
        return (self.servers or "").partition(":")[0] == "ray"

    @property
    def num_started(self) -> int | None:
        """How many servers the run starts; None if they run already."""
        text = (self.servers or "").removeprefix("ray:")
        return int(text) if text.isdecimal() else None

    def trainer_options(self) -> dict[str, Any]:
        """The keyword arguments of a `Trainer`."""
        staleness = {"exact": self.staleness, "at-most": AtMost(self.staleness), "unbounded": None}[self.staleness_mode]
        exchange = ExchangePrecision(self.server_exchange, self.server_exchange_gradients)
        return {"staleness": staleness, "server_exchange": exchange}

    def place(self, tables: Sequence[TableConfig]) -> list[TableConfig]:
        """These tables, on servers if there are any."""
        if self.servers is None:
            return list(tables)
        names = [table.name for table in tables]
        for name in self.server_tables:
            if name not in names:
                known = did_you_mean(name, names, f", only {join_names(names)}")
                raise ValueError(f"server_tables: there is no table {name!r}{known}")
        protect = (self.staleness + 1) * 8  # batches, of accumulated ones and several trainers, too
        placed = list(tables)
        for index, table in enumerate(tables):
            if table.name in (self.server_tables or names):
                eviction = replace(table.eviction, protect=protect) if table.is_dynamic else table.eviction
                cache = CacheConfig(table.cache.rows, policy=table.cache.policy)
                placed[index] = replace(table, placement="server", cache=cache, eviction=eviction)
        return placed


@dataclass(frozen=True, kw_only=True)
class TableOptions(Options):
    """Where the tables are, and how many of their rows are cached on the device.

    Args:
        placement: of large tables: on the device, in host memory or on disk, with rows cached on the device.
        placed_rows: tables with fewer rows stay on the device.
        cache_share: fraction of a placed table's rows that the device has room for.
        cache_rows: as many rows instead.
        cache_host_rows: rows of each table on disk that are cached in host memory too; none if not given.
        cache_policy: the row to evict: the least recently used (lru) or the least frequently used (lfu).
        cache_folder: where tables on disk have their files while they are in use; that of temporary files if not given.
        evict: the row of a full dynamic table to evict, likewise.
        admit_after: how often an id must have occurred to get a row of a dynamic table.
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
        self.place([])  # checks the numbers of the cache

    def place(self, tables: Sequence[TableConfig]) -> list[TableConfig]:
        """These tables with placement and cache."""
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
    """When checkpoints are written, how many are kept, and what happens if one cannot be written.

    Args:
        checkpoint_steps: write one every so many steps.
        checkpoint_minutes: write one when so many minutes have passed since the last; 0 for never.
        keep: how many of the last checkpoints stay; the best one stays besides.
        on_checkpoint_error: continue training with the earlier checkpoints, or stop.
        on_changed_data: at a resumption with data that are not what they were, stop, or begin the epoch again.
        checkpoint_incremental: of tables on disk, write the rows that have changed since the last checkpoint only, as
            long as such changes together are smaller than the table.
        checkpoint_async: write checkpoints in a thread while training goes on; copies of the tensors stay in memory.
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
    """Which steps to profile.

    Args:
        profile_steps: how many, 0 for none; the trace is `trace.json` in the run's folder (ui.perfetto.dev opens it).
        profile_start: how many steps of this process go before.
    """

    profile_steps: int = number(0, least=0)
    profile_start: int = number(10, least=0)


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(Options):
    """What of the layers that are not tables is offloaded, see `te.offload`: to host memory, or to disk.

    Args:
        offload_states: states of the dense optimizer.
        offload_params: parameters, while nobody uses them.
        offload_activations: what autograd saves for the backward.
        offload_path: folder of the swap file, for disk; on a disk of this machine, and of this run alone.
        offload_budget: as 8GiB or in bytes, of device memory for parameters in use, and of host memory for states that
            are read from disk; a quarter of what is free if not given.
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
            raise ValueError(f"{join_names(on_disk)}=disk needs a folder for the swap file: give offload_path, too")
        for name, used in (("offload_path", on_disk), ("offload_budget", self.moved)):
            if getattr(self, name) is not None and not used:
                raise ValueError(f"{name}: nothing is offloaded{' to disk' * (name == 'offload_path')}")
        parse_bytes(1 if self.offload_budget is None else self.offload_budget, "offload_budget")

    @property
    def moved(self) -> list[str]:
        """The options that offload something."""
        return [option.name for option in fields(self) if getattr(self, option.name) in ("host", "disk")]

    def check(self, num_ranks: int, sharded: bool, compile: bool) -> None:
        """ValueError, which names an option, if a run of so many ranks cannot offload."""
        if self.moved and num_ranks > 1 and not sharded:
            raise ValueError(
                f'{self.moved[0]} needs dense_layers="fsdp" (of te.HybridParallel: dense="fsdp"), or one process: with '
                f'"ddp" each of {num_ranks} ranks has a copy of the dense layers'
            )
        if self.moved and compile:
            raise ValueError(f"{self.moved[0]} and compile exclude each other: a compiled model needs all its weights")


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(EvaluationOptions, RunOptions):
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
class TrainConfig(RunOptions):
    """Train a click model and report its quality on the test rows.

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
        tables: where they are.
        read: how a log is read.
        schedule: learning rates over the steps.
        evaluation: of the validation rows.
        checkpoint: when checkpoints are written.
        output: what is kept of the run.
        profile: a window of steps under the profiler.
        parallel: how several processes share the work.
        server: tables on embedding servers.
        offload: dense layers in host memory or on disk.
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
        """The keyword arguments of a `Trainer`, each from the section that has it."""
        sections = (self, self.schedule, self.evaluation)
        names = [option.name for option in fields(TrainerOptions)]
        options = {name: getattr(section, name) for section in sections for name in names if hasattr(section, name)}
        return options | {"checkpoints": self.checkpoint, "offload": self.offload, **self.server.trainer_options()}


PRESETS = {
    # Chosen by the log loss on the validation rows.
    "movielens-100k": TrainConfig(data="movielens-100k", batch_size=256, epochs=2, dense_lr=3e-3),
    "synthetic": TrainConfig(data="synthetic", batch_size=1024, epochs=2, dense_lr=2e-3),
    "adult": TrainConfig(data="adult", top_mlp=(64, 32), batch_size=256, epochs=4, embedding_lr=0.02),
    # The widths of the DLRM paper's own Criteo Kaggle run.
    "criteo-kaggle": TrainConfig(
        data="criteo-kaggle", bottom_mlp=(512, 256, 64), top_mlp=(512, 256), batch_size=2048, epochs=1,
        embedding_lr=0.02,
    ),
    # The widths of MLPerf's DLRM, with its polynomial decay; rates of our own.
    "criteo-terabyte": TrainConfig(
        data="criteo-terabyte", embedding_dim=128, bottom_mlp=(512, 256), top_mlp=(1024, 1024, 512, 256),
        batch_size=16_384, epochs=1, embedding_lr=0.02, log_every=500,
        schedule=ScheduleOptions(dense_warmup_steps=2_000, table_warmup_steps=2_000),
    ),
}  # fmt: skip


def preset(data: str, name: str | None = None) -> TrainConfig:
    """The starting point for a data set, or the preset of that name for it; a log gets that of Criteo's Kaggle set."""
    if name is not None and name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return replace(PRESETS[name or kind_of(data)], data=data)


def plain(value: Any) -> Any:
    """A value as nested lists and dicts of what TOML and JSON know, without fields that are None."""
    if is_dataclass(value):
        value = {name: item for name, item in vars(value).items() if item is not None}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def to_toml(config: Any) -> str:
    """A dataclass as TOML; None is the absence of a key."""
    return str(require("tomli_w").dumps(plain(config)))


def read_toml(path: str | Path, base: Config) -> Config:
    """`base` with the values of a TOML file in place of its own. FileNotFoundError, or ValueError for what is not valid
    TOML, an unknown key, or a value of a wrong type or range."""
    return from_plain(load_toml(path), base, str(path))


def load_toml(path: str | Path) -> dict[str, Any]:
    """The contents of a TOML file; raises as `read_toml`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a configuration in TOML")
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nested plain values by their path: `read.schema.label`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def from_plain(values: dict[str, Any], base: Config, where: str, section: str = "") -> Config:
    """`base` with these values in place of its own; `where` and `section` name their source in errors."""
    if isinstance(base, Schema) and {"log_transform", "sizes", "dynamic", "integers"} <= values.keys():
        values = {"clamp_negative": bool(values["log_transform"])} | values  # saved by a version without this option
    if isinstance(base, LogOptions):  # renamed; checkpoints and config files have the old key
        values = {{"workers": "parser_threads"}.get(key, key): value for key, value in values.items()}
    hints, changed = get_type_hints(type(base)), {}
    known = sorted(option.name for option in fields(base))  # type: ignore[arg-type]
    for key, value in values.items():
        name = f"{section}.{key}" if section else key
        if key not in known:
            hint = did_you_mean(key, known, f"; known are {', '.join(known)}")
            hint = "; it stands above the sections" if section and hasattr(TrainConfig, key) else hint
            raise ValueError(f"{where}: unknown key {name!r}{hint}")
        if is_dataclass(hints[key]) and isinstance(value, dict):
            changed[key] = from_plain(value, getattr(base, key), where, name)
        elif (converted := _convert(value, hints[key])) is _MISMATCH:
            raise ValueError(f"{where}: {name} is {value!r}, expected {_describe_type(hints[key])}")
        else:
            changed[key] = converted
    try:
        return replace(base, **changed)  # type: ignore[type-var]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}{f', [{section}]' if section else ''}: {error}") from error


def _convert(value: Any, hint: Any) -> Any:
    """The value as a field of this type has it; `_NO` where it is of another type."""
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
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe_type(part) for part in args if part is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin is tuple:
        return "a list of " + _describe_type(args[0])
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", Path: "a path"}
    return names.get(hint, "a section" if is_dataclass(hint) else str(hint))
