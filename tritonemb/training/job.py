"""Implementation of `tritonemb train`, `plan` and `calibrate`; the ranks of torchrun train and calibrate together."""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tritonemb.comm.control import init_from_env
from tritonemb.comm.group import RankGroup
from tritonemb.data import ClickLog, Data, cached_as_parquet, open_dataset
from tritonemb.optimizers import OPTIMIZERS
from tritonemb.server import Servers, connect, start, start_on_ray
from tritonemb.server.launch import START_TIMEOUT
from tritonemb.server.on_ray import PATIENCE
from tritonemb.sharding import Constraint, ExchangePrecision, HybridParallel, ShardingPlan, TableStats
from tritonemb.sharding.planner import Topology, collect_stats, plan
from tritonemb.sharding.planner.calibrate import calibrate, describe
from tritonemb.sharding.planner.manifests import Deployment
from tritonemb.sharding.planner.statistics import tables_in
from tritonemb.storage.checkpoint import read_manifest_text
from tritonemb.training.callbacks import Callback, Evaluation, FitStart
from tritonemb.training.callbacks.console import Lines
from tritonemb.training.callbacks.jsonl import add_evaluation
from tritonemb.training.callbacks.report import write_report
from tritonemb.training.callbacks.trackers import Profiler, Prometheus, TensorBoard
from tritonemb.training.checkpoint import RunFolder
from tritonemb.training.checkpoint.manager import data_changes
from tritonemb.training.config import EmbeddingOptimizer, TrainConfig
from tritonemb.training.doctor import check_device
from tritonemb.training.loop import FitResult
from tritonemb.training.metrics import check_rows
from tritonemb.training.model import build_model, import_factory
from tritonemb.training.ranks import Interrupted, on_each_rank, on_rank_zero
from tritonemb.training.toml import load_toml, plain, read_toml, to_toml
from tritonemb.training.trainer import Trainer
from tritonemb.types import TableConfig
from tritonemb.utils import Options, atomic_write, did_you_mean, number, require

RUNS = Path("runs")
_STATS_BATCHES = 200  # batches of a run's data from which statistics are collected
_CODE_ONLY_FIELDS = {"init", "cache", "eviction", "admission"}  # fields of a TableConfig that TOML cannot express
_FIELDS = {kind: {f.name for f in fields(kind) if f.init} for kind in (TableConfig, TableStats, Constraint)}
# Tables, statistics, constraints, batch size; settings of the topology and of manifests.
PlanInputs = tuple[list[TableConfig], dict[str, TableStats], dict[str, Constraint], int | None, dict[str, Any]]


def train(
    config: TrainConfig, resume: str | None = None, callbacks: Sequence[Callback] = (), verbose: bool = True
) -> FitResult:
    """Open the data set, build the model, train it and evaluate it on the test rows.

    A text log is first converted to Parquet in the run's folder if the run has more than one epoch. A resumed run
    keeps the format, text or Parquet, that its checkpoint records.

    Args:
        resume: path of a checkpoint to resume from. "auto" selects the newest checkpoint of the run's folder (of the
            newest folder of this data set, if `out` is not given), and starts a new run if there is none.
        callbacks: callbacks in addition to those of the configuration.

    Raises:
        ValueError, FileNotFoundError, ConnectionError: raised by the data set, the model or the trainer.
        Interrupted: a signal stopped training.
        RankFailed: another rank of the job has failed, or does not answer.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with rendezvous(config.device, config.timeout) as (group, device), ExitStack() as stack:
        # Open the data, find and lock the run's folder, and check that the data of a resumed run have not changed.
        config.offload.check(group.size, config.parallel.dense_layers == "fsdp", config.compile)
        if config.parallel.plan is not None and group.process_group is None:
            raise ValueError("plan is for several ranks: run torchrun -m tritonemb train ..., or omit plan")
        data = open_data(config, group)
        path, checkpoint = on_rank_zero(group, lambda: _locate_run(config, data, resume))
        folder = RunFolder(path, config.checkpoint.keep, config.checkpoint.checkpoint_incremental)

        def lock_folder() -> None:
            if path.is_dir() or config.server.server_log is not None:  # a refused command leaves no new folder
                stack.enter_context(folder.lock())

        on_rank_zero(group, lock_folder)
        checkpoint, converted = on_rank_zero(group, lambda: _start_of_run(config, data, folder, checkpoint, resume))
        if (resumed_path := checkpoint) is not None:  # before a conversion
            manifest = on_each_rank(group, lambda: read_manifest_text(resumed_path)[1])
            on_each_rank(group, lambda: data_changes(resumed_path, manifest, data, config.checkpoint))
        if converted and isinstance(data, ClickLog):
            on_each_rank(group, lambda: check_rows(data, *(split in data.splits() for split in ("validation", "test"))))
            # The first rank converts; the others wait for its lock, not in a collective, which could time out.
            with _progress(f"converting {data.name} to Parquet, once for all epochs", verbose) as show:
                data = on_each_rank(group, partial(cached_as_parquet, data, folder.path / "cache", show))

        # Build servers, model and trainer.
        torch.manual_seed(config.seed)
        servers = stack.enter_context(_servers(config, folder.path, group))
        trainer = Trainer(
            _model(config if checkpoint is None else config.without_pretrained(), data, group, device, verbose), data,
            folder=folder,
            config=plain(config) | {"converted": converted}, verbose=verbose,
            callbacks=[*_callbacks(config, folder, group), *callbacks], servers=servers,
            **config.trainer_options(),
        )  # fmt: skip
        stack.callback(trainer.close)
        if checkpoint is not None:
            trainer.resume(checkpoint)

        # Train; then test the best checkpoint too, if it is not that of the last step.
        result, best = trainer.fit(test="test" in data.splits()), on_rank_zero(group, folder.checkpoints.best)
        if best is not None and result.test is not None and trainer.progress.best_step != result.steps:
            trainer.resume(best)
            progress = trainer.progress
            evaluation = Evaluation(progress.step, progress.epoch, "test", trainer.evaluate("test"), best=True)
            result = replace(result, best=evaluation.metrics)
            if group.rank == 0:
                if verbose:
                    Lines(sys.stdout).on_evaluation(evaluation)
                add_evaluation(folder.log, evaluation)
                write_report(folder.report, folder.log)
        return result


@contextmanager
def rendezvous(name: str, timeout: float = 600) -> Iterator[tuple[RankGroup, torch.device]]:
    """Join the ranks of torchrun; without torchrun create a group of this process only. Yield the group and this rank's
    device. Raise ValueError if torchrun's environment variables are incomplete."""
    if "WORLD_SIZE" not in os.environ:
        yield RankGroup(), check_device(name)
        return
    device = check_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" else name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_from_env("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout))
    try:
        yield RankGroup.world(), device
    except Interrupted:
        dist.destroy_process_group()
        raise
    # Not after other exceptions: destroying the group would wait for ranks that may have failed.
    dist.destroy_process_group()


@contextmanager
def _servers(config: TrainConfig, folder: Path, group: RankGroup) -> Iterator[Servers | None]:
    """Connect to embedding servers. If the options require it, rank 0 starts them first, and stops them at the end."""
    options, started_servers = config.server, list[Servers]()
    if options.servers is None:
        yield None
        return
    count, log_folder = options.num_started, None if options.server_log is None else folder / "servers"
    patience = options.server_restart_timeout or (PATIENCE if options.on_ray else 20.0)
    arguments: dict[str, Any] = {"folder": log_folder, "patience": patience}

    def start_servers() -> tuple[list[str], str]:
        assert count is not None
        if log_folder is not None:
            shutil.rmtree(log_folder, ignore_errors=True)  # logs of an earlier process
        on_ray = partial(start_on_ray, certificate=options.server_certificate, key=options.server_key)
        launch = on_ray if options.on_ray else partial(start, processes=True)
        started_servers.append(launch(count, log=options.server_log, **arguments))
        return started_servers[0].addresses, started_servers[0].token

    if count is not None and not options.on_ray and len(set(group.nodes)) > 1:
        raise ValueError(
            f"servers={options.servers} starts servers on one machine, but the ranks are on several; start "
            "servers with tritonemb embedding-server, and set servers to their addresses"
        )
    addresses, token = (options.servers.split(","), "") if count is None else on_rank_zero(group, start_servers)
    arguments |= {} if options.tablets is None else {"tablets": options.tablets}
    if count is not None and not options.on_ray and log_folder is not None:
        arguments["patience"] += START_TIMEOUT  # other ranks do not know that rank 0 is restarting a server
    with started_servers[0] if started_servers else connect(addresses, token=token, **arguments) as servers:
        yield servers


def open_data(config: TrainConfig, group: RankGroup) -> Data:
    """Open the data set on all ranks; one process per node opens it first, to download the files or count the rows."""
    open_once = cache(lambda: open_dataset(config.data, config.path, log=config.read, seed=config.seed))
    is_first_of_node = group.nodes.index(group.nodes[group.rank]) == group.rank
    on_each_rank(group, open_once if is_first_of_node else lambda: None)
    return on_each_rank(group, open_once)


def _locate_run(config: TrainConfig, data: Data, resume: str | None) -> tuple[Path, Path | None]:
    """Return the run's folder, and the checkpoint of which `resume` is the path."""
    if resume is None or resume == "auto":
        return config.output.out or _run_path(data, resume), None
    requested = RunFolder(resume).checkpoints.latest() or Path(resume)
    read_manifest_text(requested)  # raises if it is not a checkpoint, so that its parents are not those of a run
    folder = requested.resolve().parent
    if config.output.out is None and folder.name != "checkpoints":
        raise ValueError(f"{requested} is not in the folder of a run; name the folder of the new run with --out")
    return config.output.out or folder.parent, requested


def _start_of_run(
    config: TrainConfig, data: Data, folder: RunFolder, checkpoint: Path | None, resume: str | None
) -> tuple[Path | None, bool]:
    """Return the checkpoint to resume from, and whether the run reads Parquet in place of text."""
    newest = folder.checkpoints.latest()
    checkpoint = newest if resume == "auto" else checkpoint
    if checkpoint is not None:
        # Positions in text and in Parquet differ, so a resumed run keeps its format.
        return checkpoint, bool(read_manifest_text(checkpoint)[1].get("config", {}).get("converted"))
    is_text = isinstance(data, ClickLog) and data.text_schema() is not None
    return None, is_text and config.epochs > 1 and newest is None  # otherwise the trainer rejects the folder


@contextmanager
def _progress(text: str, verbose: bool) -> Iterator[Callable[[int, int | None], None] | None]:
    """Yield a function that shows progress in rows on stderr: a line at its first call, and a bar on a terminal."""
    if not verbose:
        yield None
        return
    console = require("rich.console").Console(stderr=True)
    with require("rich.progress").Progress(console=console, transient=True, disable=not console.is_terminal) as bar:

        def show(rows: int, total: int | None) -> None:
            if not bar.task_ids:
                print(f"note: {text}", file=sys.stderr, flush=True)
                bar.add_task("converting")
            bar.update(bar.task_ids[0], completed=rows, total=total)

        yield show


def _model(config: TrainConfig, data: Data, group: RankGroup, device: torch.device, verbose: bool) -> nn.Module:
    """Build the model. On several ranks it is built on the meta device, sharded, and initialized shard by shard."""
    factory = import_factory(config.model) if ":" in config.model else None
    inputs = data.features, data.num_dense, factory, len(getattr(data, "labels", ()))
    if group.process_group is None:
        return build_model(config, *inputs)
    options = config.parallel
    model = HybridParallel(
        build_model(replace(config, device="meta"), *inputs),
        None if options.plan is None else ShardingPlan.load(options.plan), dense=options.dense_layers, device=device,
        exchange=ExchangePrecision(options.exchange, options.exchange_gradients),
        timeout=timedelta(seconds=config.timeout), batch_size=config.batch_size,
    )  # fmt: skip
    if verbose and model.plan.report is not None:
        for line in model.plan.report.summary().splitlines():
            print(f"note: {line}", file=sys.stderr, flush=True)
    return model


def _run_path(data: Data, resume: str | None) -> Path:
    """Return the newest folder of this data set with a checkpoint, for resume="auto", or a new folder."""
    name = Path(data.name).name
    if resume == "auto" and RUNS.is_dir():
        pattern = re.compile(re.escape(name) + r"-\d{8}-\d{6}")
        runs = [run for run in RUNS.iterdir() if pattern.fullmatch(run.name) and RunFolder(run).checkpoints.latest()]
        if runs:
            return max(runs, key=lambda path: path.stat().st_mtime)
    return RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


class SavedConfig(Callback):
    """Callback that writes the effective configuration at the start, when the run's folder is locked."""

    def __init__(self, path: Path, config: TrainConfig) -> None:
        self._path, self._config = path, config

    def on_start(self, start: FitStart) -> None:
        atomic_write(self._path, to_toml(self._config))


def _callbacks(config: TrainConfig, folder: RunFolder, group: RankGroup) -> list[Callback]:
    port, local_rank = config.output.metrics_port, group.rank % group.local_world_size
    metrics: list[Callback] = [] if port is None else [Prometheus(port + local_rank, group.rank)]
    if group.rank > 0:
        return metrics
    tensorboard = [TensorBoard(folder.tensorboard)] if config.output.tensorboard else []
    profiler = [Profiler(folder.trace, config.profile)] if config.profile.profile_steps else []
    return [SavedConfig(folder.config, config), *tensorboard, *profiler, *metrics]


@dataclass(frozen=True)
class PlanOptions(Options):
    """Plan the sharding of tables over the ranks of a cluster; print the plan, its reasons and the predicted step time.

    Example: tritonemb plan --tables tables.toml --topology zionex-16x8 --batch-size 512

    Args:
        tables: TOML file with one [[table]] per table: name, num_embeddings, embedding_dim and other fields of
            TableConfig; statistics (pooling_factor, hotness, row_share); constraints (placements, types). [topology]
            has changes to the topology (servers, prices), [manifests] settings of the manifests.
        from_run: folder of a run whose tables to plan, with statistics of its data; in place of tables.
        topology: name of a cluster, or a file of tritonemb calibrate.
        ranks: number of ranks of a cluster of such nodes; that of the topology if not given.
        batch_size: samples per rank; the run's if not given.
        global_batch_size: samples of all ranks, in place of batch_size.
        optimizer: optimizer of the tables.
        copies: replicas of the tables, each sharded over a part of the nodes.
        previous: current plan (JSON), from which the new plan moves as little as possible.
        explain: name of a table whose placement to explain in detail.
        out: file for the plan (JSON), for tritonemb train --plan.
        html: file for an HTML page with charts of the plan.
        manifests: folder for Kubernetes manifests that run the plan.
        epoch_samples: samples per epoch, for the duration and price of an epoch.
    """

    tables: Path | None = None
    from_run: Path | None = None
    topology: str = "cpu"
    ranks: int | None = None
    batch_size: int | None = number(None, least=1)
    global_batch_size: int | None = number(None, least=1)
    optimizer: EmbeddingOptimizer = "row_wise_adagrad"
    copies: int = number(1, least=1)
    previous: Path | None = None
    explain: str | None = None
    out: Path | None = None
    html: Path | None = None
    manifests: Path | None = None
    epoch_samples: int = number(0, least=0)


def make_plan(options: PlanOptions) -> str:
    """Plan, write the requested files, and return the text to print. Raise ValueError or OSError if a file cannot be
    read or has invalid tables; raise PlanError if the tables do not fit."""
    if (options.tables is None) == (options.from_run is None):
        raise ValueError("expected either --tables, a TOML file, or --from-run, the folder of a run")
    # Tables, statistics, constraints, topology and previous plan.
    inputs = _read_tables(options.tables) if options.tables is not None else _read_run(Path(options.from_run or ""))
    tables, stats, constraints, run_batch_size, settings = inputs
    batch_size = options.batch_size or (None if options.global_batch_size else run_batch_size)
    name, ranks = options.topology, options.ranks
    topology = Topology.load(name) if name not in Topology.PRESETS and Path(name).exists() else Topology.preset(name)
    if ranks is not None:
        topology = topology.but(world_size=ranks, local_world_size=min(topology.local_world_size, ranks))
    try:
        topology, deployment = topology.but(**settings.get("topology", {})), Deployment(**settings.get("manifests", {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{options.tables}: {error}") from error
    previous = None if options.previous is None else ShardingPlan.load(options.previous)
    sharding_plan = plan(
        tables, topology, batch_size=batch_size, global_batch_size=options.global_batch_size,
        optimizer=OPTIMIZERS[options.optimizer](), stats=stats, constraints=constraints, previous=previous,
        copies=options.copies, epoch_samples=options.epoch_samples,
    )  # fmt: skip
    # Text and files.
    lines = [str(sharding_plan)]
    lines += [] if options.explain is None else [sharding_plan.explain(options.explain)]
    lines += [] if previous is None else [str(sharding_plan.diff(previous))]
    if options.out is not None:
        sharding_plan.save(options.out)
        lines.append(f"{options.out}: the plan, for tritonemb train --plan")
    if options.html is not None:
        atomic_write(options.html, sharding_plan.to_html())
        lines.append(f"{options.html}: charts")
    if options.manifests is not None:
        for path, text in deployment.manifests(sharding_plan).items():
            (options.manifests / path).parent.mkdir(parents=True, exist_ok=True)
            atomic_write(options.manifests / path, text)
        lines.append(f"{options.manifests}: manifests")
    return "\n\n".join(lines)


def _read_tables(path: Path) -> PlanInputs:
    values = load_toml(path)
    entries, known = values.get("table"), set().union(*_FIELDS.values()) - _CODE_ONLY_FIELDS
    is_list = isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)
    if entries is None or set(values) - {"table", "topology", "manifests"} or not is_list:
        raise ValueError(f"{path}: expected one [[table]] per table, [topology] and [manifests], got {sorted(values)}")
    tables, stats, constraints = [], {}, {}
    for position, entry in enumerate(entries, 1):
        where = f"{path}, table {position}" + (f" ({entry['name']!r})" if "name" in entry else "")
        if unknown := [key for key in entry if key not in known]:
            raise ValueError(f"{where}: unknown field {unknown[0]!r}{did_you_mean(unknown[0], known)}")
        table, statistics, rules = ({key: entry[key] for key in entry if key in names} for names in _FIELDS.values())
        try:
            tables.append(_table_config(table))
            if statistics:
                stats[tables[-1].name] = TableStats(**{"pooling_factor": len(tables[-1].feature_names)} | statistics)
            if rules:
                constraints[tables[-1].name] = Constraint(**rules)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
    return tables, stats, constraints, None, values


def _table_config(values: dict[str, Any]) -> TableConfig:
    dtype = getattr(torch, str(values.get("dtype", "float32")), None)
    if "capacity" in values or "capacity_bytes" in values:
        values.setdefault("num_embeddings", None)  # TOML has no null
    if missing := [name for name in ("name", "num_embeddings", "embedding_dim") if name not in values]:
        raise ValueError(f"{missing[0]} is missing")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be the name of a torch dtype, such as bfloat16, got {values['dtype']!r}")
    return TableConfig(**values | {"dtype": dtype})


def _read_run(folder: Path) -> PlanInputs:
    run_folder = RunFolder(folder)
    if not run_folder.config.exists():
        raise ValueError(f"{folder} is not the folder of a run: it has no {run_folder.config.name}")
    config = read_toml(run_folder.config, TrainConfig())
    if config.read.transforms or ":" in config.model:
        code = "transforms" if config.read.transforms else f"the model {config.model}"
        raise ValueError(f"{folder} was trained with {code}, which plan does not run; pass --tables instead")
    data = open_data(config, RankGroup())
    num_labels = len(getattr(data, "labels", ()))
    model = build_model(replace(config, device="meta"), data.features, data.num_dense, num_labels=num_labels)
    _, tables = tables_in(model)
    return tables, collect_stats(data, tables, num_batches=_STATS_BATCHES), {}, config.batch_size, {}


@dataclass(frozen=True)
class CalibrateOptions(Options):
    """Measure bandwidths and latencies of this machine, or of all ranks of torchrun, for the planner, in a minute.

    Example: torchrun --nproc-per-node 2 -m tritonemb calibrate --out topology.json

    Args:
        out: file to write.
        device: device of the tables: cpu or cuda.
        allow_busy: measure even if other processes use the machine.
        disk: folder on the disk to measure; the system's temporary folder if not given.
    """

    out: Path = Path("topology.json")
    device: str = "cpu"
    allow_busy: bool = False
    disk: Path | None = None


def run_calibration(options: CalibrateOptions) -> str | None:
    """Calibrate, and on rank 0 write the topology and return a table of its rates; None on other ranks. ValueError and
    OSError as of `calibrate`, or if the file cannot be written."""
    for folder in (options.out.absolute().parent, options.disk):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"no such folder: {folder}; create it, or choose another one")
    with rendezvous(options.device) as (group, device):
        begin = time.monotonic()
        topology = calibrate(device=device.type, group=group, disk_folder=options.disk, allow_busy=options.allow_busy)
        if group.rank:
            return None
        topology.save(options.out)
        return f"{describe(topology)}\n\n{options.out} was written after {time.monotonic() - begin:.0f} s"
