"""What `tritonemb plan` and `tritonemb calibrate` do: tables of a file or a run are planned, a machine is measured."""

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
from tritonemb.training.config import TrainConfig, load_toml, read_toml
from tritonemb.training.job import joined, open_data
from tritonemb.training.run import build_model
from tritonemb.types import TableConfig
from tritonemb.utils import Options, atomic_write, did_you_mean, number

_MEASURED = 200  # batches of a run's data
_OF_CODE = {"init", "cache", "eviction", "admission"}  # fields of a table that a file does not have
_FIELDS = {kind: {each.name for each in fields(kind) if each.init} for kind in (TableConfig, TableStats, Constraint)}
Read = tuple[list[TableConfig], dict[str, TableStats], dict[str, Constraint], int | None]  # with the run's batch size


@dataclass(frozen=True)
class PlanOptions(Options):
    """Place tables on the ranks of a cluster, and say why, and what a step will take.

    Example: tritonemb plan --tables tables.toml --topology zionex-16x8 --batch-size 512

    Args:
        tables: a TOML file with a [[table]] for each: name, num_embeddings, embedding_dim, and what else a TableConfig
            has; its statistics (pooling_factor, hotness, row_share); and what binds it (placements, types).
        from_run: the folder of a run instead, whose tables are taken, with the statistics of its data.
        topology: a cluster by its name, or a file that tritonemb calibrate has written.
        ranks: of another cluster of such nodes; those of the topology if not given.
        batch_size: samples of a rank; the run's if not given.
        global_batch_size: of all ranks, instead.
        optimizer: of the tables.
        copies: of the tables, each on a part of the nodes.
        previous: a plan in use (JSON), of which as little as possible is moved.
        explain: a table, to say more of.
        out: the file for the plan (JSON), which tritonemb train --plan reads.
        html: a page with pictures.
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
    """Plan, write the files that were asked for, and return the text to print. ValueError or OSError if a file cannot
    be read, or says what is no table; PlanError if the tables do not fit."""
    if (options.tables is None) == (options.from_run is None):
        raise ValueError("give --tables, a TOML file, or --from-run, the folder of a run")
    if options.optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {options.optimizer!r}{did_you_mean(options.optimizer, OPTIMIZERS)}")
    read = _from_file(options.tables) if options.tables is not None else _from_run(Path(options.from_run or ""))
    tables, stats, constraints, run_batch_size = read
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
        lines.append(f"{options.html}: pictures")
    return "\n\n".join(lines)


def _from_file(path: Path) -> Read:
    values = load_toml(path)
    entries, known = values.get("table"), set().union(*_FIELDS.values()) - _OF_CODE
    if set(values) - {"table"} or not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: expected one [[table]] for each table, and nothing else, got {sorted(values)}")
    tables, stats, constraints = [], {}, {}
    for position, entry in enumerate(entries, 1):
        where = f"{path}, table {position}" + (f" ({entry['name']!r})" if "name" in entry else "")
        if unknown := [key for key in entry if key not in known]:
            raise ValueError(f"{where}: unknown field {unknown[0]!r}{did_you_mean(unknown[0], known)}")
        table, stats_values, constraint_values = (
            {key: entry[key] for key in entry if key in names} for names in _FIELDS.values()
        )
        try:
            tables.append(_config(table))
            if stats_values:
                stats[tables[-1].name] = TableStats(**{"pooling_factor": len(tables[-1].feature_names)} | stats_values)
            if constraint_values:
                constraints[tables[-1].name] = Constraint(**constraint_values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
    return tables, stats, constraints, None


def _config(values: dict[str, Any]) -> TableConfig:
    name = values.get("dtype", "float32")
    dtype = getattr(torch, str(name), None)
    if "num_embeddings" not in values and ("capacity" in values or "capacity_bytes" in values):
        values["num_embeddings"] = None  # TOML has no null
    if missing := [name for name in ("name", "num_embeddings", "embedding_dim") if name not in values]:
        raise ValueError(f"it needs a {missing[0]}")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be the name of one of torch's, such as bfloat16, got {name!r}")
    return TableConfig(**values | {"dtype": dtype})


def _from_run(folder: Path) -> Read:
    run_folder = RunFolder(folder)
    if not run_folder.config.exists():
        raise ValueError(f"{folder} is not the folder of a run: it has no {run_folder.config.name}")
    config = read_toml(run_folder.config, TrainConfig())
    data = open_data(config, RankGroup())
    _, tables = tables_in(build_model(replace(config, device="meta"), data.features, data.num_dense))
    return tables, collect_stats(data, tables, num_batches=_MEASURED), {}, config.batch_size


@dataclass(frozen=True)
class CalibrateOptions(Options):
    """Measure the rates of this machine for the planner, alone or on all ranks of torchrun, in about a minute.

    Example: torchrun --nproc-per-node 2 -m tritonemb calibrate --out topology.json

    Args:
        out: the file to write.
        device: what tables are on: cpu, or cuda.
        allow_busy: measure although other processes use the machine.
        disk: a folder on the disk to measure; the system's temporary folder if not given.
    """

    out: Path = Path("topology.json")
    device: str = "cpu"
    allow_busy: bool = False
    disk: Path | None = None


def run_calibration(options: CalibrateOptions) -> str | None:
    """Calibrate and write the topology, on rank 0; returns a table of its rates there, None on others. ValueError and
    OSError as of `calibrate`, or if the file cannot be written."""
    for folder in (options.out.absolute().parent, options.disk):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; make it, or name another one")
    with joined(options.device) as (group, device):
        begin = time.monotonic()
        topology = calibrate(device=device.type, group=group, disk_folder=options.disk, allow_busy=options.allow_busy)
        if group.rank:
            return None
        topology.save(options.out)
        return f"{describe(topology)}\n\n{options.out} was written after {time.monotonic() - begin:.0f} s"
