"""What `tritonemb plan` does: reads tables from a file or a run, and prints and writes the plan."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from tritonemb.comm.group import RankGroup
from tritonemb.optimizers import OPTIMIZERS
from tritonemb.sharding import Constraint, ShardingPlan, TableStats
from tritonemb.sharding.planner import Topology, collect_stats, plan
from tritonemb.training.checkpoint import RunFolder
from tritonemb.training.config import TrainConfig, read_toml
from tritonemb.training.job import build_model, open_data
from tritonemb.types import TableConfig
from tritonemb.utils import Options, did_you_mean, number, write_whole

_STATISTICS = {each.name for each in fields(TableStats)}
_CONSTRAINT = {"placements", "types"}
_CONFIG = {each.name for each in fields(TableConfig) if each.init} - {"init", "cache", "eviction", "admission"}
_MEASURED = 200  # batches of a run's data


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
    batch_size: int | None = None
    global_batch_size: int | None = None
    optimizer: str = "row_wise_adagrad"
    copies: int = number(1, least=1)
    previous: Path | None = None
    explain: str | None = None
    out: Path | None = None
    html: Path | None = None


def make_plan(options: PlanOptions) -> str:
    """Plan, write the files that were asked for, and return the text to print.

    ValueError, OSError: a file cannot be read, or says what is no table; PlanError: the tables do not fit.
    """
    if (options.tables is None) == (options.from_run is None):
        raise ValueError("give --tables, a TOML file, or --from-run, the folder of a run")
    if options.optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {options.optimizer!r}{did_you_mean(options.optimizer, OPTIMIZERS)}")
    read = _from_file(options.tables) if options.tables is not None else _from_run(Path(options.from_run or ""))
    tables, stats, constraints, batch_size = read
    topology = _topology(options)
    previous = None if options.previous is None else ShardingPlan.load(options.previous)
    given = options.global_batch_size if options.batch_size is None else options.batch_size
    made = plan(
        tables, topology, batch_size=batch_size if given is None else options.batch_size,
        global_batch_size=options.global_batch_size,
        optimizer=OPTIMIZERS[options.optimizer](), stats=stats, constraints=constraints, previous=previous,
        copies=options.copies,
    )  # fmt: skip
    lines = [str(made)]
    if options.explain is not None:
        lines += ["", made.explain(options.explain)]
    if previous is not None:
        lines += ["", str(made.diff(previous))]
    if options.out is not None:
        made.save(options.out)
        lines += ["", f"{options.out}: the plan, for tritonemb train --plan"]
    if options.html is not None:
        write_whole(options.html, made.to_html())
        lines += ["", f"{options.html}: pictures"]
    return "\n".join(lines)


def _topology(options: PlanOptions) -> Topology:
    name = options.topology
    found = Topology.load(name) if name not in Topology.PRESETS and Path(name).exists() else Topology.preset(name)
    return found if options.ranks is None else found.but(
        world_size=options.ranks, local_world_size=min(found.local_size, options.ranks)
    )  # fmt: skip


# Tables, their statistics and constraints, and the batch size where nobody gives one.
Read = tuple[list[TableConfig], dict[str, TableStats], dict[str, Constraint], int | None]


def _from_file(path: Path) -> Read:
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    entries = values.get("table")
    if set(values) - {"table"} or not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: expected one [[table]] for each table, and nothing else, got {sorted(values)}")
    tables, stats, constraints = [], {}, {}
    for at, entry in enumerate(entries, 1):
        where = f"{path}, table {at}" + (f" ({entry['name']!r})" if "name" in entry else "")
        known = _CONFIG | _STATISTICS | _CONSTRAINT
        if unknown := [key for key in entry if key not in known]:
            raise ValueError(f"{where}: unknown field {unknown[0]!r}{did_you_mean(unknown[0], known)}")
        try:
            tables.append(_config({key: value for key, value in entry.items() if key in _CONFIG}))
            name = tables[-1].name
            if measured := {key: value for key, value in entry.items() if key in _STATISTICS}:
                stats[name] = TableStats.from_dict({"pooling_factor": float(len(tables[-1].feature_names))} | measured)
            if binding := {key: value for key, value in entry.items() if key in _CONSTRAINT}:
                constraints[name] = Constraint(**binding)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
    return tables, stats, constraints, None


def _config(values: Mapping[str, Any]) -> TableConfig:
    given = dict(values)
    dtype = getattr(torch, str(given.pop("dtype", "float32")), None)
    if "num_embeddings" not in given and ("capacity" in given or "capacity_bytes" in given):
        given["num_embeddings"] = None  # TOML has no null
    if missing := [name for name in ("name", "num_embeddings", "embedding_dim") if name not in given]:
        raise ValueError(f"it needs a {missing[0]}")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be the name of one of torch's, such as bfloat16, got {values['dtype']!r}")
    return TableConfig(**given, dtype=dtype)


def _from_run(folder: Path) -> Read:
    found = RunFolder(folder)
    if not found.config.exists():
        raise ValueError(f"{folder} is not the folder of a run: it has no {found.config.name}")
    config = read_toml(found.config, TrainConfig())
    data = open_data(config, RankGroup())
    model = build_model(replace(config, device="meta"), data.features, data.num_dense)
    tables = [each for module in model.modules() for each in getattr(module, "configs", ())]
    return tables, collect_stats(data, tables, num_batches=_MEASURED), {}, config.batch_size
