"""What `tritonemb train` and `predict` do: one run, in all processes of torchrun; and scores by a trained model."""

import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tritonemb.comm.control import init_from_env
from tritonemb.comm.group import RankGroup
from tritonemb.data import ClickLog, cached_as_parquet, open_dataset, open_for_scoring
from tritonemb.data.arrow import arrow_csv, pa, parquet
from tritonemb.data.batch import Rows, cut
from tritonemb.data.protocol import Data, Feature, tables_of
from tritonemb.nn import DLRM, DCNv2
from tritonemb.optimizers import OPTIMIZERS, Optimizer
from tritonemb.server import Servers, connect, start, start_on_ray
from tritonemb.server.launch import SECONDS_TO_START
from tritonemb.server.on_ray import PATIENCE
from tritonemb.sharding import ExchangePrecision, HybridParallel, ShardingPlan
from tritonemb.storage.checkpoint import read_manifest_text
from tritonemb.training.callbacks import Callback, Evaluation, FitStart
from tritonemb.training.callbacks.console import Lines
from tritonemb.training.callbacks.tensorboard import Profiler, TensorBoard
from tritonemb.training.checkpoint import CheckpointFolder, RunFolder, read_manifest, stored_tensors
from tritonemb.training.checkpoint.manager import data_changes, load_model
from tritonemb.training.config import TrainConfig, from_plain, plain, to_toml
from tritonemb.training.doctor import check_device
from tritonemb.training.loop import FitResult
from tritonemb.training.metrics import predict_logits
from tritonemb.training.ranks import Interrupted, on_each_rank, on_rank_zero
from tritonemb.training.trainer import Trainer
from tritonemb.utils import Options, number, require, write_whole, written_aside

RUNS = Path("runs")
SUFFIXES = (".parquet", ".csv")  # of scores
TRAINING_ONLY = ("optimizer.", "rng.", "trainer.")
TRAINING_SECTIONS = "schedule evaluation checkpoint output profile parallel server offload"
NOT_OF_A_MODEL = (*TRAINING_SECTIONS.split(), "converted")


def train(
    config: TrainConfig, resume: str | None = None, callbacks: Sequence[Callback] = (), verbose: bool = True
) -> FitResult:
    """Open the data set, build the model, train it and evaluate it on the test rows.

    A text log that is read for more than one epoch is first converted to Parquet, once, in the folder of the run. A
    resumed run reads what it has read before, text or Parquet, as its checkpoint says.

    Args:
        resume: "auto" for the newest checkpoint of the run's folder (of the newest folder of this data set, if `out` is
            not given), a new run if there is none; or the path of a checkpoint.
        callbacks: besides those of the configuration.

    Raises:
        ValueError, FileNotFoundError, ConnectionError: as the data set, the model and the trainer say.
        Interrupted: a signal asked to stop.
        RankFailed: another rank of the job has failed, or does not answer.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with joined(config.device, config.timeout) as (group, device), ExitStack() as stack:
        config.offload.check(group.size, config.parallel.dense_layers == "fsdp", config.compile)
        data = open_data(config, group)
        path, checkpoint, converted = on_rank_zero(group, lambda: _begin(config, data, resume))
        if (saved := checkpoint) is not None:  # before anything is converted
            on_each_rank(group, lambda: data_changes(saved, read_manifest_text(saved)[1], data, config.checkpoint))
        folder = RunFolder(path, config.checkpoint.keep)
        if converted and isinstance(data, ClickLog):
            # The first rank that comes writes; the others wait, in no collective that times out.
            with _progress(f"converting {data.name} to Parquet, once for all epochs", verbose) as show:
                data = on_each_rank(group, partial(cached_as_parquet, data, folder.path / "cache", show))
        kept = {"features": plain(data.features), "num_dense": data.num_dense, "converted": converted}
        torch.manual_seed(config.seed)
        servers = stack.enter_context(_servers(config, folder.path, group))
        trainer = Trainer(
            _model(config, data, group, device, verbose), data, folder=folder.path, config=plain(config) | kept,
            verbose=verbose, callbacks=[*(_callbacks(config, folder) if group.rank == 0 else []), *callbacks],
            servers=servers, staleness=config.server.bound, server_exchange=config.server.exchange,
            offload=config.offload, **config.trainer_options(),
        )  # fmt: skip
        stack.callback(trainer.close)
        if checkpoint is not None:
            trainer.resume(checkpoint)
        result, best = trainer.fit(test="test" in data.splits()), on_rank_zero(group, folder.checkpoints.best)
        if best is not None and result.test is not None and trainer.progress.best_step != result.steps:
            trainer.resume(best)
            progress = trainer.progress
            found = Evaluation(progress.step, progress.epoch, "test", trainer.evaluate("test"), best=True)
            result = replace(result, best=found.metrics)
            if verbose and group.rank == 0:
                Lines(sys.stdout).on_evaluation(found)
        return result


@contextmanager
def joined(name: str, timeout: float = 600) -> Iterator[tuple[RankGroup, torch.device]]:
    """The ranks that torchrun has started, and this one's device of that name; this process alone without it.
    ValueError if the environment of torchrun is incomplete."""
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
    # After any other exception ranks may be gone, and to destroy the group would be to wait for them.
    dist.destroy_process_group()


@contextmanager
def _servers(config: TrainConfig, folder: Path, group: RankGroup) -> Iterator[Servers | None]:
    """Connections to embedding servers; those that are started here are rank 0's, and end with it."""
    options, own = config.server, list[Servers]()
    if options.servers is None:
        yield None
        return
    count, kept = options.num_started, None if options.server_log is None else folder / "servers"
    patience = options.server_restart_timeout or (PATIENCE if options.on_ray else 20.0)
    how: dict[str, Any] = {"folder": kept, "patience": patience}

    def begin() -> tuple[list[str], str]:
        assert count is not None
        if kept is not None:
            shutil.rmtree(kept, ignore_errors=True)  # of an earlier process: the run has its checkpoints
        on_ray = partial(start_on_ray, certificate=options.server_certificate, key=options.server_key)
        launch = on_ray if options.on_ray else partial(start, processes=True)
        own.append(launch(count, log=options.server_log, **how))
        return own[0].addresses, own[0].token

    if count is not None and not options.on_ray and len(set(group.nodes)) > 1:
        raise ValueError(
            f"servers={options.servers} starts servers on one machine, and the ranks are on several; start them there "
            "(tritonemb server), and give their addresses"
        )
    addresses, token = (options.servers.split(","), "") if count is None else on_rank_zero(group, begin)
    if count is not None and not options.on_ray and kept is not None:
        how["patience"] += SECONDS_TO_START  # only rank 0 knows that it starts one again, or that it gives up
    with own[0] if own else connect(addresses, token=token, **how) as servers:
        yield servers


def open_data(config: TrainConfig, group: RankGroup) -> Data:
    """The data set; one process a node downloads or counts what has to be, before the others open it."""
    open_once = cache(lambda: open_dataset(config.data, config.path, log=config.read, seed=config.seed))
    first_of_node = group.nodes.index(group.nodes[group.rank]) == group.rank
    on_each_rank(group, open_once if first_of_node else lambda: None)
    return on_each_rank(group, open_once)


def _begin(config: TrainConfig, data: Data, resume: str | None) -> tuple[Path, Path | None, bool]:
    """The folder of the run, the checkpoint to resume from, and whether the run reads Parquet in place of text."""
    given = None if resume is None or resume == "auto" else RunFolder(resume).checkpoints.latest() or Path(resume)
    path = config.output.out or (_run_path(data, resume) if given is None else given.resolve().parents[1])
    newest = RunFolder(path).checkpoints.latest()
    checkpoint = newest if resume == "auto" else given
    if checkpoint is not None:
        # Positions in text and in Parquet differ, so a run keeps what it has begun with, however many epochs it has.
        return path, checkpoint, bool(read_manifest_text(checkpoint)[1].get("config", {}).get("converted"))
    is_text = isinstance(data, ClickLog) and data.text_schema() is not None
    return path, None, is_text and config.epochs > 1 and newest is None  # else the trainer refuses the folder


@contextmanager
def _progress(text: str, verbose: bool) -> Iterator[Callable[[int, int | None], None] | None]:
    """Shows how many rows are done, of how many, on stderr: a line at the first call, and a bar on a terminal."""
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
    """On several ranks, made without memory, and initialized shard by shard; then two lines say what was planned."""
    if group.process_group is None:
        return build_model(config, data.features, data.num_dense)
    options = config.parallel
    model = HybridParallel(
        build_model(replace(config, device="meta"), data.features, data.num_dense),
        None if options.plan is None else ShardingPlan.load(options.plan), dense=options.dense_layers, device=device,
        exchange=ExchangePrecision(options.exchange, options.exchange_gradients),
        timeout=timedelta(seconds=config.timeout), batch_size=config.batch_size,
    )  # fmt: skip
    if verbose and model.plan.report is not None:
        for line in model.plan.report.summary().splitlines():
            print(f"note: {line}", file=sys.stderr, flush=True)
    return model


def build_model(config: TrainConfig, features: Sequence[Feature], num_dense: int) -> nn.Module:
    """The model of a config, with one table for each feature."""
    tables = config.server.place(config.tables.place(tables_of(tuple(features), config.embedding_dim)))
    options: dict[str, Any] = {"top_mlp": config.top_mlp, "optimizer": build_optimizer(config), "device": config.device}
    if config.model == "dcnv2":
        return DCNv2(tables, num_dense, **options)
    return DLRM(tables, num_dense, bottom_mlp=config.bottom_mlp, **options)


def build_optimizer(config: TrainConfig) -> Optimizer:
    """The tables' fused optimizer."""
    return OPTIMIZERS[config.embedding_optimizer](lr=config.embedding_lr, weight_decay=config.embedding_weight_decay)


def _run_path(data: Data, resume: str | None) -> Path:
    """The newest folder with a checkpoint of the data set to resume, or a new one."""
    name = Path(data.name).name
    if resume == "auto" and RUNS.is_dir():
        started = re.compile(re.escape(name) + r"-\d{8}-\d{6}")
        runs = [run for run in RUNS.iterdir() if started.fullmatch(run.name) and RunFolder(run).checkpoints.latest()]
        if runs:
            return max(runs, key=lambda path: path.stat().st_mtime)
    return RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


class SavedConfig(Callback):
    """Writes the effective configuration, once the folder is this run's."""

    def __init__(self, path: Path, config: TrainConfig) -> None:
        self._path, self._config = path, config

    def on_start(self, start: FitStart) -> None:
        write_whole(self._path, to_toml(self._config))


def _callbacks(config: TrainConfig, folder: RunFolder) -> list[Callback]:
    found: list[Callback] = [SavedConfig(folder.config, config)]
    if config.output.tensorboard:
        found.append(TensorBoard(folder.tensorboard))
    if config.profile.profile_steps:
        found.append(Profiler(folder.trace, config.profile))
    return found


@dataclass(frozen=True)
class PredictOptions(Options):
    """Write the click probability of every row of a log.

    Example: tritonemb predict --checkpoint runs/mine --data day_23 --out scores.csv

    Args:
        checkpoint: a checkpoint, or the folder of a run: its best checkpoint, or its newest if none is marked best.
        data: the log to score: a file or a folder.
        out: the .parquet or .csv file to write: one row a row of the log, in its order.
        keep: columns of the log to write before the scores, as they are read.
        batch_size: rows at a time, at most.
        device: where to compute.
    """

    checkpoint: Path
    data: str
    out: Path = Path("scores.parquet")
    keep: tuple[str, ...] = ()
    batch_size: int = number(8192, least=1)
    device: str = "cpu"


def predict(options: PredictOptions) -> str:
    """Score a log and write the file, aside and renamed; returns a line that says what was done. ValueError or
    FileNotFoundError if the checkpoint or the log cannot be used, or the file cannot be written."""
    if options.out.suffix not in SUFFIXES:
        raise ValueError(f"out must end with one of {SUFFIXES}, got {str(options.out)!r}")
    if len({*options.keep, "score"}) <= len(options.keep):
        raise ValueError(f"keep must name each column once, and none 'score', got {list(options.keep)}")
    path = options.checkpoint
    for folder in (CheckpointFolder(path), CheckpointFolder(path / "checkpoints")):
        path = folder.best() or folder.latest() or path
    manifest = read_manifest(path)
    if "features" not in manifest["config"]:
        raise ValueError(f"{path} was not written by tritonemb train, so nobody knows how to build its model")
    check_device(options.device)
    values = {name: value for name, value in manifest["config"].items() if name not in NOT_OF_A_MODEL}
    values.get("tables", {}).pop("prefetch_depth", None)  # of older checkpoints
    kinds, num_dense = manifest["run"].get("kinds", {}), values.pop("num_dense")
    features = tuple(Feature(**each | {"kind": kinds.get(each["name"], "")}) for each in values.pop("features"))
    config = replace(from_plain(values, TrainConfig(), str(path)), device=options.device)
    # A row that is left out would give all later ones another row's score.
    data = open_for_scoring(options.data, replace(config.read, on_bad_row="raise"), features, options.keep)
    data = data.read_as(kinds, manifest["run"]["encoding"])
    if data.encoding != manifest["run"]["encoding"]:
        raise ValueError(
            f"{options.data} would be numbered otherwise than in training, so its ids would mean something else: the "
            "vocabulary file has changed since, or the columns are others"
        )
    model = build_model(config, features, num_dense)
    load_model(path, model, {}, stored_tensors(path), TRAINING_ONLY)
    keys, size = tuple(feature.name for feature in features), options.batch_size

    def scored(kept: list[Any], rows: Rows) -> Any:
        batches = (cut(rows, keys, slice(at, min(at + size, len(rows)))) for at in range(0, len(rows), size))
        logits, _ = predict_logits(model, batches, torch.device(config.device), config.precision)
        if wrong := int(logits.isnan().sum()):
            raise ValueError(f"{path} gives {wrong:,} rows no score but NaN: it had diverged; use another one")
        return pa.table([*kept, torch.sigmoid(logits).numpy()], [*options.keep, "score"])

    with closing(data.scan("test", lambda read: ([*map(read.column, options.keep)], data.encode(read)))) as blocks:
        num_rows = _write_tables(options.out, (scored(*block.rows) for block in blocks if block.report.rows))
    return f"{options.out}: {num_rows:,} scores by {path}"


def _write_tables(out: Path, tables: Iterator[Any]) -> int:
    """Write `pyarrow` tables one by one, so that a log of any size fits; returns the number of rows."""
    num_rows, first = 0, next(tables, None)
    if first is None:
        raise ValueError(f"{out} is not written: there are no rows to score")
    kind = arrow_csv.CSVWriter if out.suffix == ".csv" else parquet.ParquetWriter
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with written_aside(out) as part, kind(part, first.schema) as writer:
            for table in itertools.chain([first], tables):
                writer.write_table(table.cast(first.schema))
                num_rows += table.num_rows
    except pa.ArrowException as error:
        raise ValueError(f"{out}: these columns can not be kept in such a file ({error})") from error
    return num_rows
