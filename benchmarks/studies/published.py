"""Simulated scale of published systems: plans of their models, and the steps that `scale` simulates.

    python -m benchmarks.studies.published           # plan, simulate, and write these sections of docs/scale.md
    python -m benchmarks.studies.published --page    # write the sections from the newest results

Nothing here was measured on the machines that it is about.
"""

from __future__ import annotations

import functools
import sys
import textwrap
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measuring import result_files
from benchmarks.measuring.report import ROOT, publish, replace_section, table_of
from benchmarks.studies.scale import PAGE, How, Rows, of, period, timeline, with_rates
from tritonemb.sharding.plan import ShardingPlan
from tritonemb.sharding.planner import PlanError, Topology, plan
from tritonemb.sharding.planner.options import Constraint
from tritonemb.sharding.planner.statistics import TableStats
from tritonemb.types import TableConfig

BATCH, NODES = 512, (16, 64)  # samples of a GPU; nodes of 8 GPUs
EXPONENT = 1.05  # of Zipf's law, by which rows are used
SIZES = (6.25, 12.5, 25, 50, 100)  # trillions of parameters on servers
PERSIA_TABLES, PERSIA_DIM, PERSIA_BATCH, PERSIA_FLOP = 26, 64, 1024, 1e14


class Shape(NamedTuple):
    """A model: parameters, tables, dims (least, mean, most), ids per bag, MFLOP per sample of the forward pass; samples
    per second on 128 GPUs that the paper is said to have."""

    parameters: float
    tables: int
    dims: tuple[int, int, int]
    pooling: int
    mflop: float
    recalled: float


# Mudigere et al., ISCA 2022, recalled; "hundreds", "thousands" and "tens" of tables are 300, 1000 and 30 here.
MODELS = {
    "A1": Shape(95e9, 300, (4, 68, 192), 27, 89, 1.047e6),
    "A2": Shape(793e9, 1000, (4, 93, 384), 15, 638, 0.622e6),
    "A3": Shape(845e9, 1000, (4, 231, 960), 17, 784, 0.360e6),
    "F1": Shape(12e12, 30, (256, 256, 256), 20, 5, 0.970e6),
}


def zipf(rows: int) -> tuple[tuple[float, float], ...]:
    """Groups of rows that are used by Zipf's law."""
    edges = np.unique(np.geomspace(1, rows + 1, 24).round())
    share = np.diff(edges ** (1 - EXPONENT) / (1 - EXPONENT))
    return tuple(zip(np.diff(edges).tolist(), (share / share.sum()).tolist(), strict=True))


@functools.cache
def tables_of(name: str) -> tuple[list[TableConfig], dict[str, TableStats]]:
    """Tables of a shape, always the same: 16 bits, log-normal rows, log-normal dims between its limits."""
    shape, draw = MODELS[name], np.random.RandomState(0)
    least, mean, most = shape.dims
    noise, low, high = draw.normal(0, 0.8, shape.tables), 0.0, 10.0
    for _ in range(40):
        dims = np.clip(np.exp(noise + (low + high) / 2) // 4 * 4, least, most).astype(int)
        low, high = ((low + high) / 2, high) if dims.mean() < mean else (low, (low + high) / 2)
    rows = np.exp(draw.normal(0, 1.5, shape.tables))
    rows = np.maximum(10, rows * shape.parameters / (rows @ dims)).astype(int).tolist()
    tables = [TableConfig(f"t{n}", rows[n], dim, dtype=torch.float16) for n, dim in enumerate(dims.tolist())]
    return tables, {t.name: TableStats(float(shape.pooling), zipf(r)) for t, r in zip(tables, rows, strict=True)}


def planned(name: str, gpus: int, host: float = 1.5e12) -> ShardingPlan:
    """Plan of a model on the ZionEX cluster without its disks."""
    tables, stats = tables_of(name)
    top = Topology.preset("zionex-16x8", world_size=gpus, disk=0, host=host)
    dense = int(MODELS[name].mflop * 1e6 / 2)  # two operations of the forward pass per parameter
    return plan(tables, top, batch_size=BATCH, stats=stats, dense_parameters=dense)


def neo(name: str, gpus: int, host: float = 1.5e12) -> dict[str, Any]:
    """Seconds of a step with IDs exchanged by hosts, and by devices; what does not fit as the planner's text."""
    row = {"study": "plan", "model": name, "gpus": gpus, "host": host}
    try:
        created = planned(name, gpus, host)
    except PlanError as error:
        return row | {"error": str(error)}
    report, model = created.report, created.report.model
    print(f"{name} on {gpus} GPUs: {report.summary()}", flush=True)
    return row | {
        "step_s": period(timeline(model, created, How())),
        "device_ids_s": period(timeline(model, created, How(device_ids=True))),
        "summary": report.summary().split("\n")[0].partition(": ")[2], "load_s": report.load, "bound_s": report.bound,
    }  # fmt: skip


def persia(trillions: float, dtype: torch.dtype = torch.bfloat16, measured: float = 2.5e6) -> dict[str, Any]:
    """Dynamic tables, an id per sample each, on the embedding servers of Persia's cluster, with the preset's rate of
    servers, and with the rate measured of a process; what does not fit as the planner's text."""
    top, rows = Topology.preset("persia-64"), int(trillions * 1e12 / PERSIA_DIM / PERSIA_TABLES)
    options: dict[str, Any] = {"capacity": rows, "placement": "server", "dtype": dtype}
    tables = [TableConfig(f"t{n}", None, PERSIA_DIM, **options) for n in range(PERSIA_TABLES)]
    row = {"study": "servers", "trillions": trillions, "measured_rows_per_s": measured}
    try:
        created = plan(
            tables, top, batch_size=PERSIA_BATCH, stats={table.name: TableStats(1.0, zipf(rows)) for table in tables},
            constraints={"*": Constraint(placements="server")},
            dense_parameters=int(PERSIA_FLOP / 6 / PERSIA_BATCH / top.world_size),
        )  # fmt: skip
    except PlanError as error:
        return row | {"error": str(error)}
    model, occupied = created.report.model, created.report.prediction.server
    seconds = period(timeline(model, created, How()))
    return row | {
        "bytes_a_server": occupied / top.servers, "row_bytes": occupied / rows / PERSIA_TABLES,
        "rows_a_rank": float(model.distinct_of_rank.sum()),
        "step_s": seconds, "waited_s": period(timeline(model, created, How(ahead=0))),
        "slow_s": period(timeline(with_rates(model, server_rows=measured), created, How())),
        "samples_per_s": top.world_size * PERSIA_BATCH / seconds,
    }  # fmt: skip


def study() -> Rows:
    """All rows."""
    pulls = result_files.read(result_files.newest("servers"))["rows"]
    measured = next(r for r in pulls if (r["op"], r["implementation"]) == ("server pull", "tritonemb"))["rows_per_s"]
    rows = [neo(name, 8 * nodes) for nodes in NODES for name in MODELS] + [neo("F1", 128, 1e12)]
    return rows + [persia(size, measured=measured) for size in SIZES] + [persia(100, torch.float32, measured)]


wrapped = functools.partial(textwrap.fill, width=116, initial_indent="    ", subsequent_indent="    ")


def plans(rows: Rows) -> str:
    columns = {
        "model": "{model}", "GPUs": "{gpus}", "plan": "{summary}",
        "ms a step, IDs by hosts": lambda row: f"{row['step_s'] * 1e3:.1f}",
        "ms, by devices": lambda row: f"{row['device_ids_s'] * 1e3:.1f}",
        "10⁶ samples/s, by hosts": lambda row: f"{row['gpus'] * BATCH / row['step_s'] / 1e6:.2f}",
        "10⁶ samples/s, by devices": lambda row: f"{row['gpus'] * BATCH / row['device_ids_s'] / 1e6:.2f}",
        "paper, recalled": lambda row: f"{MODELS[row['model']].recalled / 1e6:.2f}" if row["gpus"] == 128 else "",
    }  # fmt: skip
    (refused,) = [row for row in of(rows, "plan") if "error" in row]
    table = table_of([row for row in of(rows, "plan") if "error" not in row], columns, 3)
    host = "Torch {torch}, tritonemb {tritonemb} at {commit}, {date}. F1 with 1 TB of host memory a node:".format(
        **rows[0]
    )
    return "\n\n".join([table, host, wrapped(refused["error"])])


def servers(rows: Rows) -> str:
    columns = {
        "10¹² parameters": "{trillions:g}", "TB a server": lambda row: f"{row['bytes_a_server'] / 1e12:.2f}",
        "rows a GPU and step": "{rows_a_rank:,.0f}", "10⁶ samples/s": lambda row: f"{row['samples_per_s'] / 1e6:.2f}",
        "ms a step": lambda row: f"{row['step_s'] * 1e3:.1f}",
        "without pipeline": lambda row: f"{row['waited_s'] * 1e3:.1f}",
        "a process a server": lambda row: f"{row['slow_s'] * 1e3:.1f}",
    }  # fmt: skip
    result, (fails,) = ([row for row in of(rows, "servers") if ("error" in row) == failed] for failed in (False, True))
    process = f"A process was measured at {fails['measured_rows_per_s'] / 1e6:.2f} million rows/s with two threads."
    size = f"In 16 bits, {result[-1]['row_bytes']:.0f} bytes per row with states and index; in float32:"
    return "\n\n".join([table_of(result, columns), f"{process} {size}", wrapped(fails["error"])])


def filled(page: str, rows: Rows) -> str:
    """The page with the figures of these rows."""
    for name, section in {"plans": plans, "servers": servers}.items():
        page = replace_section(page, name, section(rows), PAGE)
    return page


def main() -> None:
    if "--page" not in sys.argv:
        publish("scale", study(), [])
    page = ROOT / PAGE
    page.write_text(filled(page.read_text(), result_files.read(result_files.newest("scale"))["rows"]))


if __name__ == "__main__":
    main()
