"""`tritonemb plan`, which plans the sharding of tables, and `tritonemb calibrate`, which measures a machine for it."""

import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from tritonemb.comm.group import RankGroup
from tritonemb.optimizers import OPTIMIZERS
from tritonemb.sharding import Constraint, ShardingPlan, TableStats
from tritonemb.sharding.planner import Topology, collect_stats, plan
from tritonemb.sharding.planner.calibrate import calibrate, describe
from tritonemb.sharding.planner.statistics import tables_in
from tritonemb.training.checkpoint import RunFolder
from tritonemb.training.config import TrainConfig
from tritonemb.training.job import open_data, rendezvous
from tritonemb.training.run import build_model
from tritonemb.training.toml import load_toml, read_toml
from tritonemb.types import TableConfig
from tritonemb.utils import Options, atomic_write, did_you_mean, number

_STATS_BATCHES = 200  # batches of a run's data from which statistics are collected
_CODE_ONLY_FIELDS = {"init", "cache", "eviction", "admission"}  # fields of a TableConfig that TOML cannot express
_FIELDS = {kind: {f.name for f in fields(kind) if f.init} for kind in (TableConfig, TableStats, Constraint)}
PlanInputs = tuple[list[TableConfig], dict[str, TableStats], dict[str, Constraint], int | None]  # last: the batch size


@dataclass(frozen=True)
class PlanOptions(Options):
    """Plan the sharding of tables over the ranks of a cluster; print the plan, its reasons and the predicted step time.

    Example: tritonemb plan --tables tables.toml --topology zionex-16x8 --batch-size 512

    Args:
        tables: TOML file with one [[table]] per table: name, num_embeddings, embedding_dim and other fields of
            TableConfig; statistics (pooling_factor, hotness, row_share); constraints (placements, types).
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
    """

    tables: Path | None = None
    from_run: Path | None = None
    topology: str = "cpu"
    ranks: int | None = None
    batch_size: int | None = number(None, least=1)
    global_batch_size: int | None = number(None, least=1)
    optimizer: str = "row_wise_adagrad"
    copies: int = number(1, least=1)
    previous: Path | None = None
    explain: str | None = None
    out: Path | None = None
    html: Path | None = None


def make_plan(options: PlanOptions) -> str:
    """Plan, write the requested files, and return the text to print. Raise ValueError or OSError if a file cannot be
    read or has invalid tables; raise PlanError if the tables do not fit."""
    if (options.tables is None) == (options.from_run is None):
        raise ValueError("expected either --tables, a TOML file, or --from-run, the folder of a run")
    if options.optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {options.optimizer!r}{did_you_mean(options.optimizer, OPTIMIZERS)}")
    # Tables, statistics, constraints, topology and previous plan.
    inputs = _read_tables(options.tables) if options.tables is not None else _read_run(Path(options.from_run or ""))
    tables, stats, constraints, run_batch_size = inputs
    batch_size = options.batch_size or (None if options.global_batch_size else run_batch_size)
    name, ranks = options.topology, options.ranks
    topology = Topology.load(name) if name not in Topology.PRESETS and Path(name).exists() else Topology.preset(name)
    if ranks is not None:
        topology = topology.but(world_size=ranks, local_world_size=min(topology.local_world_size, ranks))
    previous = None if options.previous is None else ShardingPlan.load(options.previous)
    sharding_plan = plan(
        tables, topology, batch_size=batch_size, global_batch_size=options.global_batch_size,
        optimizer=OPTIMIZERS[options.optimizer](), stats=stats, constraints=constraints, previous=previous,
        copies=options.copies,
    )  # fmt: skip
    # Text and files.
    lines = [str(sharding_plan)]
    if options.explain is not None:
        lines.append(sharding_plan.explain(options.explain))
    if previous is not None:
        lines.append(str(sharding_plan.diff(previous)))
    if options.out is not None:
        sharding_plan.save(options.out)
        lines.append(f"{options.out}: the plan, for tritonemb train --plan")
    if options.html is not None:
        atomic_write(options.html, sharding_plan.to_html())
        lines.append(f"{options.html}: charts")
    return "\n\n".join(lines)


def _read_tables(path: Path) -> PlanInputs:
    """Read `PlanOptions.tables`."""
    values = load_toml(path)
    entries, known = values.get("table"), set().union(*_FIELDS.values()) - _CODE_ONLY_FIELDS
    if set(values) - {"table"} or not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: expected only one [[table]] per table, got {sorted(values)}")
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
    return tables, stats, constraints, None


def _table_config(values: dict[str, Any]) -> TableConfig:
    name = values.get("dtype", "float32")
    dtype = getattr(torch, str(name), None)
    if "num_embeddings" not in values and ("capacity" in values or "capacity_bytes" in values):
        values["num_embeddings"] = None  # TOML has no null
    if missing := [name for name in ("name", "num_embeddings", "embedding_dim") if name not in values]:
        raise ValueError(f"{missing[0]} is missing")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be the name of a torch dtype, such as bfloat16, got {name!r}")
    return TableConfig(**values | {"dtype": dtype})


def _read_run(folder: Path) -> PlanInputs:
    """Read `PlanOptions.from_run`."""
    run_folder = RunFolder(folder)
    if not run_folder.config.exists():
        raise ValueError(f"{folder} is not the folder of a run: it has no {run_folder.config.name}")
    config = read_toml(run_folder.config, TrainConfig())
    data = open_data(config, RankGroup())
    _, tables = tables_in(build_model(replace(config, device="meta"), data.features, data.num_dense))
    return tables, collect_stats(data, tables, num_batches=_STATS_BATCHES), {}, config.batch_size


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
