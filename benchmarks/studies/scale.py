"""Simulated scale: plans of published models, and a simulation of their steps: `python -m benchmarks.studies.scale`.

A plan's cost model says how long each stage of a step takes on each rank; the simulation lets stages of several batches
run as soon as what they need is there. Nothing here was measured on the machines that it is about.
"""

from __future__ import annotations

import copy
import functools
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measuring import result_files
from benchmarks.measuring.report import publish
from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.offloading import Machine, estimate_offload
from tritonemb.optimizers import Adagrad, RowWiseAdagrad
from tritonemb.sharding.plan import DataParallel, ShardingPlan, TablePlacement, uniform_plan
from tritonemb.sharding.planner import PlanError, Topology, cost_model, plan
from tritonemb.sharding.planner.cost_model import CostModel
from tritonemb.sharding.planner.options import Constraint
from tritonemb.sharding.planner.statistics import TableStats
from tritonemb.types import TableConfig

Array = np.ndarray[Any, Any]
BATCH, BATCHES = 512, 10  # samples of a GPU; simulated steps
GPUS = (8, 32, 128, 512, 1024)
EXPONENT = 1.05  # of Zipf's law, by which rows are used
LAUNCH = 10e-6  # seconds of a kernel that does little
SPREAD = 0.2  # of each rate
TRAINERS, TRAINER_NETWORK, TRAINER_FLOPS = 50, 2.5e9, 1e12  # of the parameter-server baseline
SIZES = (6.25, 12.5, 25, 50, 100)  # trillions of parameters on servers
PERSIA_TABLES, PERSIA_DIM, PERSIA_BATCH, PERSIA_FLOP = 26, 64, 1024, 1e14


class Shape(NamedTuple):
    """A model: parameters, tables, dims (least, mean, most), ids a bag, and MFLOP of a sample's forward pass."""

    parameters: float
    tables: int
    dims: tuple[int, int, int]
    pooling: int
    mflop: float


# Mudigere et al., ISCA 2022, recalled; "hundreds", "thousands" and "tens" of tables are 300, 1000 and 30 here.
MODELS = {
    "A1": Shape(95e9, 300, (4, 68, 192), 27, 89),
    "A2": Shape(793e9, 1000, (4, 93, 384), 15, 638),
    "A3": Shape(845e9, 1000, (4, 231, 960), 17, 784),
    "F1": Shape(12e12, 30, (256, 256, 256), 20, 5),
}
COLUMNS, NODES = ("column_wise", "table_column_wise", "grid"), ("table_row_wise", "grid")
RATES = ("lookup_bandwidth", "update_bandwidth", "host_bandwidth", "intra_bandwidth", "inter_bandwidth",
         "control_bandwidth", "routing_rate", "flops")  # fmt: skip
TYPES = ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid", "data_parallel")


class Stage(NamedTuple):
    """Of a step: which resources it holds, seconds `[ranks]`, and the stages that it follows, so many batches before.

    `together`: an exchange, which starts when all ranks are ready and ends with the slowest.
    """

    name: str
    resources: tuple[str, ...]
    seconds: Array
    after: tuple[tuple[str, int], ...] = ()
    together: bool = False


class Span(NamedTuple):
    """That a stage ran, on a rank; -1: on all."""

    batch: int
    stage: str
    rank: int
    start: float
    end: float


def simulate(stages: Sequence[Stage], batches: int) -> list[Span]:
    """Runs the steps event by event. A resource does one thing at a time; of what waits, the oldest batch is first."""
    ranks, numbers = len(stages[0].seconds), {stage.name: number for number, stage in enumerate(stages)}
    shared = {name for stage in stages if stage.together for name in stage.resources}
    if wrong := [stage.name for stage in stages if not stage.together and shared & {*stage.resources}]:
        raise ValueError(f"stage {wrong[0]!r} has a resource of an exchange")
    follows: list[list[tuple[int, int]]] = [[] for _ in stages]
    left: dict[tuple[int, int, int], int] = {}  # what a task still waits for
    for number, stage in enumerate(stages):
        for name, back in stage.after:
            follows[numbers[name]].append((number, back))
        for batch in range(batches):
            parts = [stages[numbers[name]].together for name, back in stage.after if batch >= back]
            if stage.together:
                left[batch, number, -1] = sum(1 if each else ranks for each in parts)
            else:
                left.update({(batch, number, rank): len(parts) for rank in range(ranks)})
    waiting: dict[Any, list[tuple[int, int]]] = {}
    events: list[tuple[float, int, int, int]] = []
    busy, spans, touched, now = set[Any](), list[Span](), set[Any](), 0.0

    def ready(batch: int, number: int, rank: int) -> None:
        place = "together" if rank < 0 else (stages[number].resources[0], rank)
        heapq.heappush(waiting.setdefault(place, []), (batch, number))
        touched.add(place)

    def begin(batch: int, number: int, rank: int) -> None:
        stage = stages[number]
        busy.update(stage.resources if rank < 0 else [(stage.resources[0], rank)])
        end = now + float(stage.seconds.max() if rank < 0 else stage.seconds[rank])
        spans.append(Span(batch, stage.name, rank, now, end))
        heapq.heappush(events, (end, batch, number, rank))

    for task, count in left.items():
        if not count:
            ready(*task)
    while True:
        for place in sorted(touched, key=str):
            queue = waiting.get(place, [])
            if place == "together":
                for task in sorted(queue):
                    if not busy & {*stages[task[1]].resources}:
                        queue.remove(task)
                        begin(*task, -1)
                heapq.heapify(queue)
            elif queue and place not in busy:
                begin(*heapq.heappop(queue), place[1])
        touched.clear()
        if not events:
            return spans
        now = events[0][0]
        while events and events[0][0] == now:
            _, batch, number, rank = heapq.heappop(events)
            place = "together" if rank < 0 else (stages[number].resources[0], rank)
            busy.difference_update(stages[number].resources if rank < 0 else [place])
            touched.add(place)
            for other, back in follows[number]:
                if batch + back < batches:
                    local = not stages[other].together
                    for each in range(ranks) if rank < 0 and local else [rank if local else -1]:
                        left[batch + back, other, each] -= 1
                        if not left[batch + back, other, each]:
                            ready(batch + back, other, each)


def period(spans: Sequence[Span]) -> float:
    """Seconds from step to step, without the first ones."""
    batches = max(span.batch for span in spans) + 1
    ends = [max(span.end for span in spans if span.batch == batch) for batch in (batches // 2 - 1, batches - 1)]
    return (ends[1] - ends[0]) / (batches - batches // 2)


@dataclass(frozen=True)
class How:
    """What a step does: all of it, or without one technique; `device_ids`: devices exchange IDs, not hosts."""

    cache: bool = True
    hierarchy: bool = True
    fused: bool = True
    pipeline: bool = True
    device_ids: bool = False


def seconds_of(model: CostModel, made: ShardingPlan, how: How) -> Array:
    """Seconds `[ranks, stages of the cost model]`."""
    at, rank = model.shards(made)
    other = at if how.cache else at._replace(cached_rows=np.zeros_like(at.cached_rows))
    if not how.hierarchy:
        other = other._replace(scheme=np.where(at.scheme == cost_model.HIERARCHICAL, cost_model.DIRECT, at.scheme))
    seconds = model.predict(made).seconds.copy()
    if other is not at:
        np.add.at(seconds, rank, model.costs(other)[0] - model.costs(at)[0])
    if not how.fused:  # lookup, backward and optimizer: a kernel each a table; gradients of ids are written and read
        launches = LAUNCH * np.bincount(rank, minlength=model.ranks)
        ids = model.ids[at.table] * np.where(at.scheme == cost_model.REPLICAS, 1, model.ranks * at.id_share)
        seconds[:, cost_model.LOOKUP] += launches
        moved = np.bincount(rank, ids * at.width * 8, model.ranks)
        seconds[:, cost_model.UPDATE] += 2 * launches + moved / model.topology.update_bandwidth
    return seconds


def stages_of(model: CostModel, seconds: Array, how: How) -> list[Stage]:
    """A step: stages with their latencies. With the pipeline, IDs and misses of the next two steps are sent ahead."""
    top, all_ranks = model.topology, np.ones(model.ranks)
    networks = ("node", "network") if model.nodes > 1 else ("node",)
    latency = top.inter_latency if model.nodes > 1 else top.intra_latency
    ids, grouping, lookup, outputs, update, misses, replicated = (
        seconds[:, getattr(cost_model, stage)]
        for stage in ("IDS", "GROUPING", "LOOKUP", "OUTPUTS", "UPDATE", "MISSES", "REPLICATED")
    )
    exchanged = outputs / 2 + latency * bool(outputs.any())  # there, or back
    ids = ids + (latency if how.device_ids else top.control_latency) * bool(ids.any())
    misses = misses + top.host_latency * bool(misses.any())
    layers = 6.0 * model.dense_parameters * model.batch_size / top.flops
    ring = min(top.intra_bandwidth, top.inter_bandwidth * (top.local_world_size if top.nodes > 1 else math.inf))
    reduced = 8.0 * model.dense_parameters * (1 - 1 / top.world_size) / ring
    replicated = replicated + 2 * latency * bool(replicated.any())
    ahead = cost_model.PREFETCHED if how.pipeline else 0
    return [
        Stage("ids", networks if how.device_ids else ("control",), ids,
              (("update", 1 + ahead), ("layers' gradients", 1 + ahead)), True),
        Stage("grouping", ("device",), grouping, (("ids", 0),)),
        Stage("misses", ("link",), misses, (("grouping", 0),)),
        Stage("lookup", ("device",), lookup + top.lookup_latency, (("misses", 0), ("update", 1))),
        Stage("outputs", networks, exchanged, (("lookup", 0),), True),
        Stage("layers", ("device",), all_ranks * layers, (("outputs", 0), ("layers' gradients", 1))),
        Stage("output gradients", networks, exchanged, (("layers", 0),), True),
        Stage("row gradients", networks, replicated, (("output gradients", 0),), True),
        Stage("update", ("device",), update + top.update_latency, (("row gradients", 0),)),
        Stage("layers' gradients", networks, all_ranks * reduced, (("layers", 0),), True),
    ]  # fmt: skip


def timeline(model: CostModel, made: ShardingPlan, how: How) -> list[Span]:
    """Simulated steps of a plan."""
    if how.device_ids:
        top = model.topology
        model = with_rates(
            model, routing_rate=top.id_rate, control_bandwidth=top.inter_bandwidth * top.local_world_size
        )
    return simulate(stages_of(model, seconds_of(model, made, how), how), BATCHES)


def steps(model: CostModel, made: ShardingPlan, how: How = How()) -> dict[str, float]:
    """Seconds of a step, with IDs by hosts and by devices."""
    return {
        name: period(timeline(model, made, replace(how, device_ids=by_device)))
        for name, by_device in (("step_s", False), ("device_ids_s", True))
    }


def with_rates(model: CostModel, exchange: ExchangePrecision | None = None, **changes: float) -> CostModel:
    """A cost model with other rates, or another exchange."""
    model = copy.copy(model)
    model.exchange, model.topology = exchange or model.exchange, model.topology.but(**changes)
    return model


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
    tables = [
        TableConfig(f"t{n}", r, d, dtype=torch.float16)
        for n, (r, d) in enumerate(zip(rows, dims.tolist(), strict=True))
    ]
    return tables, {each.name: TableStats(float(shape.pooling), zipf(r)) for each, r in zip(tables, rows, strict=True)}


@functools.cache
def planned(name: str, gpus: int, types: tuple[str, ...] = (), host: float = 1.5e12) -> ShardingPlan:
    """Of a model on the ZionEX cluster without its disks."""
    tables, stats = tables_of(name)
    made = plan(
        tables, Topology.preset("zionex-16x8", world_size=gpus, disk=0, host=host), batch_size=BATCH, stats=stats,
        constraints={"*": Constraint(types=types)} if types else None, dense_parameters=dense_parameters(name),
    )  # fmt: skip
    print(f"{name} on {gpus} GPUs{' with ' + ', '.join(types) if types else ''}: {made.report.summary()}", flush=True)
    return made


def dense_parameters(name: str) -> int:
    """Two operations of the forward pass each."""
    return int(MODELS[name].mflop * 1e6 / 2)


def uniform(model: CostModel) -> tuple[ShardingPlan, float]:
    """What sizes alone give, in host memory with 3 % of the rows cached if devices are too small; largest part of a
    budget that it takes."""
    made = uniform_plan(model.tables, model.ranks, model.local)
    if model.predict(made).hbm.max() > model.topology.hbm:
        tiers = {}
        for table in model.tables:
            if not isinstance(made.tables[table.name], DataParallel):
                largest = max(shard.num_rows for shard in made.shards(table))
                tiers[table.name] = TablePlacement("host", math.ceil(0.03 * largest))
        made = replace(made, placements=tiers)
    seen = model.predict(made)
    return made, float(max(seen.hbm.max() / model.topology.hbm, seen.host.max() / max(1, model.topology.host)))


def techniques(name: str) -> Iterator[dict[str, Any]]:
    """Steps of a model on 128 GPUs with everything, and without each technique; what `uniform_plan` makes of it."""
    made = planned(name, 128)
    model, options = made.report.model, [each.option for each in made.report.tables]
    kinds, full = {each.kind for each in options}, {}
    cases: dict[str, Any] = {
        "none": (model, made, How()),
        "16-bit exchange": (with_rates(model, ExchangePrecision("fp32", "fp32")), made, How()),
        "fused kernels": (model, made, How(fused=False)),
        "pipeline": (model, made, How(pipeline=False)),
    }
    if any(each.placement == "host" for each in options):
        cases["cache"] = model, made, How(cache=False)
    if kinds & {*NODES}:
        cases["hierarchy, same plan"] = model, made, How(hierarchy=False)
    for technique, without in (("hierarchy", NODES), ("column blocks", COLUMNS)):
        if kinds & {*without}:
            try:
                other = planned(name, 128, tuple(each for each in TYPES if each not in without))
                cases[technique] = model, other, How()
            except PlanError as error:
                yield {"study": "technique", "model": name, "without": technique, "error": str(error)}
    by_size, full["planner"] = uniform(model)
    cases["planner"] = model, by_size, How()
    for technique, (cost, its_plan, how) in cases.items():
        load = cost.predict(its_plan).load
        row = {"study": "technique", "model": name, "without": technique, **steps(cost, its_plan, how), "load_s": load}
        yield row | {"of_budget": full.get(technique)}


def whole(name: str, gpus: int) -> dict[str, Any]:
    """A plan and its step; on 128 GPUs also by how much that depends on each rate."""
    row = {"study": "plan", "model": name, "gpus": gpus}
    try:
        made = planned(name, gpus)
    except PlanError as error:
        return row | {"error": str(error)}
    report, model = made.report, made.report.model
    found = steps(model, made)
    row |= found | {
        "predicted_s": report.prediction.step, "load_s": report.load, "bound_s": report.bound,
        "greedy_s": report.greedy, "summary": report.summary().split("\n")[0].partition(": ")[2],
        "hbm": float(report.prediction.hbm.max()), "host": float(report.prediction.host.max()),
        "stages_s": dict(zip(cost_model.STAGES, seconds_of(model, made, How()).max(0).tolist(), strict=True)),
    }  # fmt: skip
    if gpus != 128:
        return row
    row["change"] = {}
    for rate in RATES:
        value = getattr(model.topology, rate)
        ends = [steps(with_rates(model, **{rate: value * x}), made) for x in (1 - SPREAD, 1 + SPREAD)]
        row["change"][rate] = {mode: [end[mode] / found[mode] - 1 for end in ends] for mode in found}
    for mode in found:
        for side, sign in (("low", -1), ("high", 1)):
            ends = [max(0.0, sign * end) for change in row["change"].values() for end in change[mode]]
            row[f"{mode}_{side}"] = found[mode] * (1 + sign * math.hypot(*ends))
    return row | parameter_server(name, {mode: gpus * BATCH / seconds for mode, seconds in found.items()})


def parameter_server(name: str, samples_per_s: dict[str, float]) -> dict[str, Any]:
    """Trainers that get pooled float32 vectors from servers, which are never what is waited for."""
    tables, _ = tables_of(name)
    sent = sum(8 * table.embedding_dim + 4 * MODELS[name].pooling for table in tables)
    rate = min(TRAINER_NETWORK / sent, TRAINER_FLOPS / (6 * dense_parameters(name)))
    times = {f"{mode}_times": value / rate / TRAINERS for mode, value in samples_per_s.items()}
    waits = "network" if rate * sent >= 0.999 * TRAINER_NETWORK else "layers"
    return {"trainer_samples_per_s": rate, "trainer_waits_for": waits} | times


def memory_of_states() -> list[dict[str, Any]]:
    """Bytes of F1 with each dtype and optimizer."""
    tables, _ = tables_of("F1")
    found = []
    for words, dtype, optimizer in (
        ("float32, Adagrad", torch.float32, Adagrad()), ("float16, row-wise Adagrad", torch.float16, RowWiseAdagrad()),
    ):  # fmt: skip
        model = CostModel([replace(each, dtype=dtype) for each in tables], Topology(8), 1, optimizer)
        size = float(model.rows @ model.record_bytes(np.arange(len(tables)), model.dims))
        found.append({"study": "states", "states": words, "bytes": size})
    return found


def persia_tables(trillions: float, dtype: torch.dtype) -> tuple[list[TableConfig], dict[str, TableStats]]:
    """Dynamic tables on servers, an id a sample each."""
    rows = int(trillions * 1e12 / PERSIA_DIM / PERSIA_TABLES)
    tables = [
        TableConfig(f"t{n}", None, PERSIA_DIM, capacity=rows, placement="server", dtype=dtype)
        for n in range(PERSIA_TABLES)
    ]
    return tables, {table.name: TableStats(1.0, zipf(rows)) for table in tables}


def persia(trillions: float, dtype: torch.dtype = torch.bfloat16, measured: float = 2.5e6) -> dict[str, Any]:
    """Tables on the embedding servers of Persia's cluster; what does not fit as the planner's text."""
    top = Topology.preset("persia-64")
    tables, stats = persia_tables(trillions, dtype)
    row = {"study": "servers", "trillions": trillions, "dtype": str(dtype).removeprefix("torch.")}
    dense = int(PERSIA_FLOP / 6 / PERSIA_BATCH / top.world_size)
    try:
        made = plan(
            tables, top, batch_size=PERSIA_BATCH, stats=stats, constraints={"*": Constraint(placements="server")},
            dense_parameters=dense,
        )  # fmt: skip
    except PlanError as error:
        return row | {"error": str(error)}
    report, model = made.report, made.report.model
    pulled, seconds = float(model.distinct_of_rank.sum()), period(timeline(model, made, How()))
    waited = period(timeline(model, made, How(pipeline=False)))
    one = with_rates(model, server_rows=measured)
    slow = {name: period(timeline(one, made, How(pipeline=name == "slow_s"))) for name in ("slow_s", "slow_waited_s")}
    by_server = 2 * pulled * top.world_size / top.servers / seconds
    held, rows = report.prediction.server / top.servers, sum(float(table.capacity or 0) for table in tables)
    return row | {
        "plan": str(report).split("\n\n")[0], "dense_parameters": dense, "bytes_a_server": held,
        "rows_a_server": rows / top.servers, "row_bytes": held / rows * top.servers, "rows_a_rank": pulled,
        "step_s": seconds, "waited_s": waited,
        "samples_per_s": top.world_size * PERSIA_BATCH / seconds, "rows_a_server_per_s": by_server,
        "processes_a_server": by_server / measured,
        "bytes_a_worker_per_s": pulled * (8 + 8 * PERSIA_DIM) / seconds, "measured_rows_per_s": measured, **slow,
    }  # fmt: skip


class Offloaded(NamedTuple):
    """A transformer whose weights, gradients and states are offloaded (Rajbhandari et al., SC 2021); DGX-2 nodes."""

    name: str
    layers: int
    hidden: int
    nodes: int
    gpus: int


OFFLOADED = (Offloaded("1 T, one GPU", 128, 25_600, 1, 1), Offloaded("1 T, one DGX-2", 128, 25_600, 1, 16),
             Offloaded("32 T, 32 DGX-2", 100, 163_840, 32, 512))  # fmt: skip
SEQUENCE, SEQUENCES = 1024, 8  # tokens, and sequences a GPU


def dgx2(gpus: int) -> Machine:
    """The share of each of `gpus` GPUs in a node: 1.5 TB of memory, 28 TB of NVMe; rates are recalled or assumed."""
    host, link = {"host": 1.5e12 / gpus, "host_rate": 100e9 / gpus}, min(12e9, 48e9 / gpus)
    disk = {"disk": 28e12 / gpus, "disk_read": 25e9 / gpus, "disk_write": 25e9 / gpus}
    return Machine(device=32e9, flops=70e12, link=link, **host, **disk)


def offload(case: Offloaded) -> list[dict[str, Any]]:
    """The fastest setting that fits, and the same with gradients in host memory."""
    parameters, tokens = 12 * case.layers * case.hidden**2, SEQUENCE * SEQUENCES
    per_node, largest = case.gpus // case.nodes, 16 * case.hidden**2  # the latter: of a layer's weights and gradients
    activations = 2.0 * tokens * case.hidden * case.layers  # bytes of a GPU
    machine, rows = dgx2(per_node), []
    estimates = estimate_offload(
        parameters, case.gpus, batch_tokens=tokens, activation_bytes=activations, machine=machine
    )
    fitting = estimates.best
    assert fitting is not None
    tiers = fitting.params, fitting.states, fitting.activations
    for grads in ("host", fitting.grads):
        best = next(s for s in estimates.settings if (s.params, s.states, s.activations, s.grads) == (*tiers, grads))
        rows.append({
            "study": "offload", "case": case.name, "parameters": parameters, "grads": grads, "params": best.params,
            "states": best.states, "activations": best.activations, "fits": best.fits, "step_s": best.step,
            "device": best.device, "host_a_node": best.host * per_node, "disk_a_node": best.disk * per_node,
            "bytes": 16 * parameters, "gpus_without": math.ceil(16 * parameters / 32e9), "largest_layer": largest,
            "tiles": math.ceil(largest / (32e9 / 4)), "compute_s": 8 * parameters * tokens / 70e12,
        })  # fmt: skip
    return rows


def shown(name: str, pipeline: bool) -> dict[str, Any]:
    """Three steps of a rank, for a picture."""
    made = planned(name, 128)
    spans = timeline(made.report.model, made, How(pipeline=pipeline))
    some = [span for span in spans if span.rank in (0, -1) and 5 <= span.batch <= 7 and span.end > span.start]
    start = min(span.start for span in some)
    return {
        "study": "timeline", "model": name, "pipeline": pipeline,
        "spans": [(span.batch - 5, span.stage, span.start - start, span.end - start) for span in some],
    }  # fmt: skip


def study() -> list[dict[str, Any]]:
    """All rows."""
    rows: list[dict[str, Any]] = [whole(name, 128) for name in MODELS]
    for row in [*rows]:
        rows += techniques(row["model"]) if "error" not in row else []
    rows += [whole(name, gpus) for name in ("A1", "A2") for gpus in GPUS if gpus != 128]
    rows += [whole("F1", 64), *memory_of_states(), shown("A2", True), shown("A2", False)]
    try:
        planned("F1", 128, (), 1e12)
    except PlanError as error:
        rows.append({"study": "refused", "model": "F1", "host": 1e12, "error": str(error)})
    pulls = result_files.read(result_files.newest("servers"))["rows"]
    ours = [row for row in pulls if (row["op"], row["implementation"]) == ("server pull", "tritonemb")]
    measured = ours[0]["rows_per_s"]
    rows += [persia(size, measured=measured) for size in SIZES]
    rows.append(persia(100, torch.float32))
    return rows + [row for case in OFFLOADED for row in offload(case)]


def main() -> None:
    from benchmarks.studies import scale_page

    publish("scale", study(), [])
    scale_page.report()


if __name__ == "__main__":
    main()
