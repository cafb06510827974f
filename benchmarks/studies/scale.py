"""Scale: one job on 1, 2 and 4 ranks behind links of 1 and 10 Gbit/s, measured, simulated, and extrapolated.

    python -m benchmarks.studies.scale           # as root: measure the cells that today's results lack; write the page
    python -m benchmarks.studies.scale --again   # measure all cells
    python -m benchmarks.studies.scale --page    # write the page's sections from the newest results

Ranks, and a process with embedding servers, are in network namespaces of this machine, which a bridge joins. `tc`'s
token bucket filter (tbf) limits both directions of a rank's link; the servers' link is as fast as those of all ranks
together. Delay is not set, but measured. The simulator gets compute rates of one rank without a limit, and bandwidth
and delay of the links. `benchmarks.studies.published` simulates published systems.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import datetime
import functools
import heapq
import itertools
import math
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import tritonemb as te
from benchmarks.measuring import report, result_files
from benchmarks.measuring.clock import OtherLoad
from benchmarks.studies.exchange import on_ranks
from benchmarks.studies.staleness import Curve, Study, dlrm, fit, hot_ids
from tritonemb import flight
from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.server.node import EmbeddingServer
from tritonemb.server.transport import FlightServer
from tritonemb.sharding.plan import ShardingPlan, TableWise
from tritonemb.sharding.planner import Topology, calibrate, collect_stats, cost_model, plan
from tritonemb.sharding.planner.cost_model import CostModel
from tritonemb.training.callbacks import Evaluation, StepEnd
from tritonemb.training.model import build_optimizer, dense_parameters

Array = np.ndarray[Any, Any]
Rows = list[dict[str, Any]]
PAGE, KIND = "docs/scale.md", "scaling"
EXACT, HALF, STALE = "all-to-all, fp32", "all-to-all, fp16, gradients bf16", "servers, staleness 4"
SERVERS = {f"servers, staleness {steps}": steps for steps in (0, 4)}
METHODS = {
    EXACT: ExchangePrecision("fp32", "fp32"), HALF: ExchangePrecision("fp16", "bf16"),
    "all-to-all, bf16": ExchangePrecision("bf16", "bf16"),
    **dict.fromkeys(SERVERS, ExchangePrecision("fp32", "fp32")),
}  # fmt: skip
TARGET, WITHIN = 0.835, 0.15  # AUC; error of the simulator
BATCHES = 10  # simulated steps
LOCAL, NODES = 8, (16, 64)  # ranks per node and nodes that are extrapolated to
WARM = 50  # steps that are not measured: many rows are new
LEASED = 1024  # rows of a table that ranks keep without staleness: fewer than those of a batch and the prefetched ones
SEED, CORES, RUNS = 0, os.cpu_count() or 1, 16  # RUNS: at most, on servers, of one number of ranks
PREFIX, LINK, ADDRESS, PORT, TOKEN = "tritonemb", "eth0", "10.0.1.{}", 9000, "x" * 32


def of(rows: Rows, study: str, **values: Any) -> Rows:
    """The rows of a study that have these values."""
    values["study"] = study
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


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
                left[batch, number, -1] = sum(1 if part else ranks for part in parts)
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
                    for item in range(ranks) if rank < 0 and local else [rank if local else -1]:
                        left[batch + back, other, item] -= 1
                        if not left[batch + back, other, item]:
                            ready(batch + back, other, item)


def period(spans: Sequence[Span]) -> float:
    """Seconds from step to step, without the first ones."""
    batches = max(span.batch for span in spans) + 1
    ends = [max(span.end for span in spans if span.batch == batch) for batch in (batches // 2 - 1, batches - 1)]
    return (ends[1] - ends[0]) / (batches - batches // 2)


class How(NamedTuple):
    """A step whose IDs and misses are sent so many steps ahead; `device_ids`: by devices, not by hosts."""

    ahead: int = cost_model.PREFETCHED
    device_ids: bool = False


def stages_of(model: CostModel, seconds: Array, how: How) -> list[Stage]:
    """A step: stages with their latencies. IDs and misses of the next steps are sent ahead."""
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
    return [
        Stage("ids", networks if how.device_ids else ("control",), ids,
              (("update", 1 + how.ahead), ("layers' gradients", 1 + how.ahead)), True),
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
        top, bandwidth = model.topology, model.topology.inter_bandwidth * model.topology.local_world_size
        model = with_rates(model, routing_rate=top.id_rate, control_bandwidth=bandwidth)
    return simulate(stages_of(model, model.predict(made).seconds, how), BATCHES)


def with_rates(model: CostModel, **changes: float) -> CostModel:
    """A cost model with other rates."""
    model = copy.copy(model)
    model.topology = model.topology.but(**changes)
    return model


class Grid(NamedTuple):
    """Cells to measure: numbers of ranks, rates of links in Gbit/s, and none, methods; batch of all ranks, rows."""

    ranks: Sequence[int] = (1, 2, 4)
    gbits: Sequence[float] = (1, 10)
    methods: Sequence[str] = tuple(METHODS)
    batch_size: int = 2048
    num_train: int = 512 * 1024
    num_test: int = 32 * 1024

    def study(self) -> Study:
        """Synthetic data, and a DLRM with 8 tables of 50,000 rows and 64 columns."""
        study = hot_ids("adagrad", 0.1, {}, self.num_train, self.num_test, num_features=8, num_ids=50_000)
        config = dataclasses.replace(study.config, embedding_dim=64, top_mlp=(256, 128), batch_size=self.batch_size)
        return dataclasses.replace(study, config=config, network=dlrm(config))

    def tasks(self, ranks: int) -> Rows:
        """Measurements of so many ranks; one rank has its stages timed, too, and needs no network without servers."""
        rows: Rows = [{"study": "stages", "gbit": 0}] if ranks == 1 else []
        for gbit in (0, *self.gbits):
            methods = [
                method for method in self.methods if ranks > 1 or method in SERVERS or (method == EXACT and not gbit)
            ]
            rows += [{"study": "link", "gbit": gbit}]
            rows += [{"study": "cell", "gbit": gbit, "method": method} for method in methods]
        return [row | {"ranks": ranks} for row in rows]


def plan_of(study: Study, ranks: int) -> ShardingPlan:
    """Whole tables on ranks in turn; each rank is a node."""
    names = enumerate(feature.name for feature in study.data.features)
    return ShardingPlan({name: TableWise(number % ranks) for number, name in names}, ranks, local_world_size=1)


def run(*commands: str, check: bool = True) -> None:
    """Run commands of iproute2. OSError with what one says, if `check`."""
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode and check:
            raise OSError(f"{command}: {done.stderr.strip() or done.returncode}")


class Network(NamedTuple):
    """Network namespaces of the ranks and, last, of the servers; and that of the bridge."""

    names: list[str]
    bridge: str

    def limit(self, gbit: float) -> None:
        """Limit both directions of the links to this rate; 0: to one that no link reaches."""
        for number, name in enumerate(self.names):
            rate = (gbit or 100) * (len(self.names) - 1 if number == len(self.names) - 1 else 1)
            # A burst of a millisecond: more than a segment of 64 KiB, less than the messages that are measured.
            tbf = f"root tbf rate {rate}gbit burst {rate * 1.25e5:.0f} latency 5ms"
            run(f"tc -n {name} qdisc replace dev {LINK} {tbf}",
                f"tc -n {self.bridge} qdisc replace dev port{number} {tbf}")  # fmt: skip


@contextmanager
def network(ranks: int) -> Iterator[Network]:
    """Make a network, and remove it at the end, and those of killed processes. OSError where it is not permitted."""
    for path in Path("/run/netns").glob(f"{PREFIX}-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            run(f"ip netns del {path.name}", check=False)
    bridge, *names = (f"{PREFIX}-{os.getpid()}-{number}" for number in range(ranks + 2))
    created = Network(names, bridge)
    try:
        run(f"ip netns add {bridge}", f"ip -n {bridge} link add bridge type bridge",
            f"ip -n {bridge} link set bridge up")  # fmt: skip
        for number, name in enumerate(names):
            run(
                f"ip netns add {name}", f"ip -n {name} link set lo up",
                f"ip -n {bridge} link add port{number} type veth peer name {LINK} netns {name}",
                f"ip -n {bridge} link set port{number} master bridge up",
                f"ip -n {name} addr add {ADDRESS.format(number)}/16 dev {LINK}", f"ip -n {name} link set {LINK} up",
            )  # fmt: skip
        created.limit(1)
        yield created
    finally:
        run(*(f"ip netns del {name}" for name in (*names, bridge)), check=False)


def server_address(ranks: int, run: int) -> str:
    return f"grpc://{ADDRESS.format(ranks)}:{PORT + 1 + run}"


def enter(names: Sequence[str], number: int) -> None:
    """Move this process into a namespace, before it has threads; let it end with its parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with open(f"/run/netns/{names[number]}") as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {names[number]}")
    os.environ["GLOO_SOCKET_IFNAME"] = LINK


def serve(names: Sequence[str], pipe: Any) -> None:
    """Serve embedding servers, one per run, and a port that counts bytes, until the process is killed."""
    ranks = len(names) - 1
    enter(names, ranks)
    torch.set_num_threads(1)
    listener = socket.create_server((ADDRESS.format(ranks), PORT))
    # The namespace cannot be reached from other machines; TLS would be a cost that the all-to-all does not have.
    with mock.patch.object(flight, "check_exposure"):
        endpoints = [FlightServer(EmbeddingServer(), server_address(ranks, n), TOKEN) for n in range(RUNS)]
    pipe.send(os.getpid())
    while endpoints:
        with listener.accept()[0] as connection:
            total = 0
            while part := connection.recv(1 << 20):
                total += len(part)
            connection.sendall(total.to_bytes(8, "little"))


def plain_socket(ranks: int, seconds: float = 0.5) -> dict[str, float]:
    """Bytes per second of a plain socket to the servers' namespace, and seconds of a message: half of a handshake."""
    delays, data = list[float](), bytes(1 << 20)
    for _ in range(20):
        begin = time.perf_counter()
        with socket.create_connection((ADDRESS.format(ranks), PORT)) as connection:
            delays.append((time.perf_counter() - begin) / 2)
    with socket.create_connection((ADDRESS.format(ranks), PORT)) as connection:
        begin = time.perf_counter()
        while time.perf_counter() < begin + seconds:
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        total = int.from_bytes(connection.recv(8), "little")
        return {"stream": total / (time.perf_counter() - begin), "delay": statistics.median(delays)}


class Meter(Curve):
    """A curve, and what steps use after the first ones: seconds, seconds of the processor of this process and of the
    servers', bytes sent and received."""

    def __init__(self, server: int) -> None:
        super().__init__()
        self._server, self._used = Path(f"/proc/{server}/stat"), list[Array]()
        self._last: Any = None

    def on_step(self, event: StepEnd) -> None:
        last, self._last = self._last, self.reading()
        if last is not None and event.step > WARM:
            self._used.append(self._last - last)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        super().on_evaluation(evaluation)
        self._last = None

    def reading(self) -> Any:
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        received, *_, sent = next(line for line in lines if LINK in line).split(":")[1].split()[:9]
        ticks = sum(map(int, self._server.read_text().rpartition(")")[2].split()[11:13]))
        cpu = time.process_time(), ticks / os.sysconf("SC_CLK_TCK")
        return np.array([time.perf_counter(), *cpu, int(sent), int(received)])

    def per_step(self) -> dict[str, float]:
        used = np.mean(self._used, 0).tolist()
        return dict(zip(("step_s", "cpu_s", "server_cpu_s", "sent", "received"), used, strict=True))


class Rank:
    """Measurements on a rank; each returns a row. All ranks take part."""

    def __init__(self, rank: int, grid: Grid, server: int) -> None:
        self.rank, self.grid, self.study, self.server, self.group = rank, grid, grid.study(), server, RankGroup.world()
        self.ranks, self._addresses = self.group.size, (server_address(self.group.size, n) for n in range(RUNS))

    def cell(self, gbit: float, method: str, max_steps: int | None = None) -> dict[str, Any]:
        """Train; what a step uses on average, and the curve."""
        staleness, meter, samples = SERVERS.get(method), Meter(self.server), self.grid.batch_size // self.ranks
        with ExitStack() as stack:
            options: dict[str, Any] = {"max_steps": max_steps}
            if staleness is not None:
                servers = stack.enter_context(te.server.connect([next(self._addresses)], token=TOKEN))
                options |= {"servers": servers, "staleness": staleness}
            cache = te.CacheConfig(rows=LEASED) if staleness == 0 else te.CacheConfig()
            model = self.study.model(SEED, placement="device" if staleness is None else "server", cache=cache)
            if self.ranks > 1:
                model = te.HybridParallel(model, plan_of(self.study, self.ranks), exchange=METHODS[method])
            initial = meter.reading()
            with OtherLoad() as load:
                fit(self.study, model, SEED, meter, samples, **options)
            wall, cpu, server_cpu, *_ = (meter.reading() - initial).tolist()
        by_rank = self.group.all_gather_object((meter.per_step(), cpu))
        used = {name: statistics.fmean(steps[name] for steps, _ in by_rank) for name in by_rank[0][0]}
        known = sum(seconds for _, seconds in by_rank[1:]) + server_cpu  # of our other processes
        other = max(0.0, (load.percent or 0.0) - 100 * known / wall / CORES)
        return used | {"curve": meter.found, "auc": meter.found[-1][2], "other_load_percent": other}

    def stages(self, gbit: float) -> dict[str, Any]:
        """Median seconds of preparing a batch of the size that two ranks have, of its lookup, and of the update."""
        model: Any = te.HybridParallel(self.study.model(SEED, placement="device"), plan_of(self.study, 1))
        samples, stages = self.grid.batch_size // 2, list[Array]()
        data = iter(self.study.data.open("train", samples, seed=SEED, epoch=0, shuffle=True))
        for _ in range(WARM):
            times = [time.perf_counter()]
            features = model.prefetch(next(data).sparse)
            times.append(time.perf_counter())
            outputs = model.collections[0](features)
            times.append(time.perf_counter())
            outputs.backward(torch.ones_like(outputs))
            stages.append(np.diff([*times, time.perf_counter()]))
        return dict(zip(("prepare_s", "lookup_s", "update_s"), np.median(stages, 0).tolist(), strict=True))

    def link(self, gbit: float) -> dict[str, Any]:
        """Bandwidth and delay of a plain socket; bandwidth of all-to-alls as large as outputs in 16 and in 32 bits."""

        def exchange(kib: int) -> Any:
            counts = [kib << 10] * self.ranks
            payload = torch.zeros(sum(counts), dtype=torch.uint8)
            return lambda: self.group.all_to_all(payload, counts, counts, "link")(), sum(counts)

        row: dict[str, Any] = plain_socket(self.ranks) if self.rank == 0 else {}
        points = calibrate.measure(self.group, torch.device("cpu"), exchange) if self.ranks > 1 else []
        for width in (2, 4) if self.ranks > 1 else ():
            kib = max(64, self.grid.batch_size * 8 * 64 * width // self.ranks**2 >> 10)  # to each rank
            row[f"exchange_{width}"] = (self.ranks - 1) * (kib << 10) / points[calibrate.SIZES.index(kib)][0]
        return row


def work(rank: int, ranks: int, grid: Grid, path: Path, tasks: Rows, made: Network, server: int) -> None:
    """Measure tasks on a rank; the first one stores each row."""
    measured, results = Rank(rank, grid, server), result_files.read(path)
    for method in grid.methods:
        measured.cell(0, method, WARM + 2)  # loads kernels
    for task in tasks:
        if rank == 0:
            made.limit(task.get("gbit", 0))
        measured.group.barrier()
        arguments = {name: value for name, value in task.items() if name not in ("study", "ranks")}
        row = task | getattr(measured, task["study"])(**arguments)
        if rank == 0:
            results["rows"].append(row)
            result_files.write_json(path, results)
            print({name: value for name, value in row.items() if name != "curve"}, flush=True)


def measure(grid: Grid, path: Path) -> None:
    """Measure what the file lacks."""
    if not path.exists():
        shared = result_files.environment()
        results = {"date": shared["date"], "environment": shared, "grid": grid._asdict(), "rows": []}
        result_files.write_json(path, results)
    for ranks in grid.ranks:
        rows = result_files.read(path)["rows"]
        if tasks := [task for task in grid.tasks(ranks) if not of(rows, **task)]:
            with network(ranks) as created:
                pipe, child = multiprocessing.Pipe()
                context = multiprocessing.get_context("spawn")
                server = context.Process(target=serve, args=(created.names, child), daemon=True)
                server.start()
                child.close()  # so that the end of the server ends the wait for it
                try:
                    begin = functools.partial(enter, created.names)
                    on_ranks(ranks, work, grid, path, tasks, created, pipe.recv(), begin=begin)
                finally:
                    server.kill()
                    server.join()


class Simulation:
    """Steps of the simulator with the rates of a results file.

    What a rank computes in a step is calibrated by the step of as many ranks without a limit, less the time of its
    messages; stages of the tables by one rank. Bandwidth and delay are those of the all-to-all, or of a plain socket.
    """

    def __init__(self, results: dict[str, Any]) -> None:
        self.rows, self.grid = results["rows"], Grid(**results["grid"])
        self.study = self.grid.study()
        self.tables = self.study.data.tables(self.study.config.embedding_dim)
        dense = dense_parameters(self.study.model(SEED, placement="device"))
        self.options: dict[str, Any] = {
            "stats": collect_stats(self.study.data, self.tables, num_batches=20),
            "optimizer": build_optimizer(self.study.config), "dense_parameters": sum(p.numel() for p in dense),
        }  # fmt: skip
        # A topology with rates of tables: what the stages do, over their seconds.
        rates = dict.fromkeys(("lookup_bandwidth", "update_bandwidth", "id_rate"), 1.0)
        unit = Topology(1, lookup_rate=1e30, lookup_latency=0.0, update_latency=0.0, **rates)
        done = CostModel(self.tables, unit, self.grid.batch_size // 2, **self.options).predict(plan_of(self.study, 1))
        ids, by_lookup, by_update = done.seconds[0, [cost_model.GROUPING, cost_model.LOOKUP, cost_model.UPDATE]]
        (stages,) = of(self.rows, "stages")
        self.top = unit.but(
            id_rate=ids / stages["prepare_s"], lookup_bandwidth=by_lookup / stages["lookup_s"],
            update_bandwidth=by_update / stages["update_s"], routing_rate=1e15,
        )  # fmt: skip

    def step(self, base: dict[str, Any], gbit: float, ranks: int = 0, local: int = 1) -> float:
        """Seconds of a step with the work per rank of `base`, a cell without a limit, behind links of a rate. Tables
        are planned for other `ranks` than those of the cell, `local` per node."""
        layers = base["step_s"] - self._period(base, 0, 1e-9, base["ranks"], 1)
        return self._period(base, gbit, layers, ranks or base["ranks"], local)

    def _period(self, base: dict[str, Any], gbit: float, layers: float, ranks: int, local: int) -> float:
        method, size, samples = base["method"], base["ranks"], self.grid.batch_size // base["ranks"]
        steps, (link,) = SERVERS.get(method), of(self.rows, "link", ranks=size, gbit=gbit)
        width = 4 if METHODS[method] == METHODS[EXACT] else 2
        bandwidth, delay = link["stream" if size == 1 or steps else f"exchange_{width}"], link["delay"]
        top = self.top.but(
            world_size=ranks, local_world_size=local, host_latency=delay, intra_latency=delay, inter_latency=delay,
            intra_bandwidth=bandwidth, inter_bandwidth=bandwidth, control_bandwidth=bandwidth * local,
            flops=6.0 * self.options["dense_parameters"] * samples / layers,
        )  # fmt: skip
        options = self.options | {"exchange": METHODS[method], "batch_size": samples}
        planned = plan(self.tables, top, **options) if ranks != size and steps is None else plan_of(self.study, ranks)
        model, kwargs = CostModel(self.tables, top, **options), How(device_ids=True)
        seconds = model.predict(planned).seconds.copy()
        if steps is not None:
            # Pulls are ahead. With staleness a step sends its gradients itself; without, outputs are exchanged as well.
            outputs, kwargs = (
                seconds[:, cost_model.OUTPUTS] * (steps == 0),
                kwargs._replace(ahead=steps or kwargs.ahead),
            )
            reduced = 8 * self.options["dense_parameters"] * (1 - 1 / size)  # bytes of the gradients of layers
            seconds[:] = 0
            seconds[:, cost_model.OUTPUTS] = outputs
            seconds[:, cost_model.REPLICATED] = max(0, base["sent"] - reduced) / bandwidth * (steps > 0)
            seconds[:, cost_model.MISSES] = np.maximum(0, (base["received"] - reduced) / bandwidth - outputs)
        return period(simulate(stages_of(model, seconds, kwargs), 2 * BATCHES))

    def predict(self, cell: dict[str, Any]) -> float:
        """Seconds of a step of a cell, from that without a limit."""
        (base,) = of(self.rows, "cell", ranks=cell["ranks"], gbit=0, method=cell["method"])
        return self.step(base, cell["gbit"])

    def error(self, cell: dict[str, Any]) -> float:
        """Predicted over measured samples per second, less 1."""
        return float(cell["step_s"] / self.predict(cell) - 1)

    def off(self) -> Rows:
        """Cells with at most as many ranks as cores whose prediction is off."""
        return [c for c in of(self.rows, "cell") if c["ranks"] <= CORES and abs(self.error(c)) > WITHIN]


def seconds_to(curve: Sequence[Sequence[float]], auc: float) -> float:
    """Seconds of training until a curve reaches an AUC, between its points; infinite if it does not."""
    for (_, begin, low), (_, end, high) in itertools.pairwise([(0, 0.0, 0.5), *curve]):
        if low < auc <= high:
            return begin + (end - begin) * (auc - low) / (high - low)
    return math.inf


def cells(sim: Simulation) -> str:
    """Links, and a line per cell with what the simulator predicts."""
    rates = {"stream": "plain socket", "exchange_2": "all-to-all in 16 bits", "exchange_4": "in 32 bits"}
    columns: Any = {"ranks": "{ranks}", "Gbit/s, set": lambda row: f"{row['gbit'] or '-'}"}
    columns["delay, us"] = lambda row: f"{row['delay'] * 1e6:.0f}"
    for key, words in rates.items():
        columns[f"{words}, Gbit/s"] = lambda row, key=key: f"{row[key] * 8e-9:.2f}" if key in row else "-"
    lines = []
    for cell in of(sim.rows, "cell"):
        batch, seconds = sim.grid.batch_size, seconds_to(cell["curve"], TARGET)
        busy = (cell["ranks"] * cell["cpu_s"] + cell["server_cpu_s"]) / cell["step_s"] / CORES
        simulated = [f"{batch / sim.predict(cell):,.0f}", f"{100 * sim.error(cell):+.0f} %"]
        lines.append([
            f"{cell['ranks']}", f"{cell['gbit'] or '-'}", cell["method"], f"{batch / cell['step_s']:,.0f}",
            f"{seconds:.1f}", f"{cell['auc']:.4f}", f"{cell['sent'] / 1e6:.2f}", f"{cell['received'] / 1e6:.2f}",
            f"{100 * busy:.0f} %", *(simulated if cell["gbit"] else ("calibration", "")),
            f"{cell['other_load_percent']:.0f} %",
        ])  # fmt: skip
    header = ["ranks", "Gbit/s", "method", "samples/s", f"s to AUC {TARGET}", "AUC", "MB sent", "received", "CPU share",
              "simulated samples/s", "error", "other load"]  # fmt: skip
    return f"{report.table_of(of(sim.rows, 'link'), columns, 2)}\n\n{report.markdown_table(header, lines, 3)}"


def extrapolated(sim: Simulation) -> str:
    """Samples per second on many nodes, of as many samples per rank as two ranks have, and relative to these."""
    if wrong := sim.off():
        return f"Not extrapolated, as the simulation is off by more than {100 * WITHIN:.0f} % in {len(wrong)} cells."
    lines = list[list[str]]()
    for gbit, method in itertools.product(sim.grid.gbits, (EXACT, HALF, STALE)):
        (base,), figures = of(sim.rows, "cell", ranks=2, gbit=0, method=method), list[str]()
        for nodes in NODES:
            step, samples = sim.step(base, gbit, nodes * LOCAL, LOCAL), sim.grid.batch_size // 2
            figures += [f"{step * 1e3:.0f}", f"{nodes * LOCAL * samples / step:,.0f}"]
            figures += [f"{100 * sim.step(base, gbit) / step:.0f} %"]
        lines.append([method, f"{gbit:g}", *figures])
    header = [f"{nodes} x {LOCAL}: {name}" for nodes in NODES for name in ("ms a step", "samples/s", "of linear")]
    return report.markdown_table(["method", "Gbit/s", *header], lines, 2)


def compared(sim: Simulation) -> str:
    """Figures of papers beside ours, measured with two ranks, and simulated."""

    def times(fast: str, slow: str) -> list[str]:
        measured, simulated = list[str](), list[str]()
        for gbit in sim.grid.gbits:
            pair = [of(sim.rows, "cell", ranks=2, gbit=gbit, method=method)[0] for method in (slow, fast)]
            slower, faster = (seconds_to(cell["curve"], TARGET) for cell in pair)
            measured.append(f"{slower / faster:.2f} at {gbit:g} Gbit/s")
            slower, faster = map(sim.predict, pair)
            simulated.append(f"{slower / faster:.2f} at {gbit:g} Gbit/s")
        return [", ".join(measured), ", ".join(simulated) + ", per sample"]

    fresh, stale = (of(sim.rows, "cell", ranks=2, gbit=0, method=method)[0]["auc"] for method in (EXACT, STALE))
    lines = [
        ["16 bits against fp32: times as fast to the AUC", "no factor (Neo, recalled)", *times(HALF, EXACT)],
        ["all-to-all in 16 bits against servers with staleness 4: times as fast to the AUC",
         "up to 40 against the system before (Neo, abstract)", *times(HALF, STALE)],
        ["AUC with staleness 4 less that without", "less than 0.1 % lost (Persia, recalled)",
         f"{stale - fresh:+.4f}", "not simulated"],
        ["more ranks", "128 GPUs (Neo), 64 GPUs (Persia)", f"not shown: more than {CORES} ranks share cores", "below"],
    ]  # fmt: skip
    return report.markdown_table(["figure", "paper", "measured", "simulated"], lines, 4)


def filled(page: str, sim: Simulation, environment: dict[str, Any]) -> str:
    """The page with the figures of a results file."""
    text = "{cpu}; torch {torch}, tritonemb {tritonemb} at {commit}, {date}; {num_train:,} samples."
    page = report.replace_section(page, "conditions", text.format(**environment, **sim.grid._asdict()), PAGE)
    for name, section in {"cells": cells, "extrapolated": extrapolated, "compared": compared}.items():
        page = report.replace_section(page, name, section(sim), PAGE)
    return page


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds, so that the network is removed
    path = result_files.RESULTS / f"{KIND}-{datetime.date.today()}.json"
    if "--again" in sys.argv:
        path.unlink(missing_ok=True)
    if "--page" not in sys.argv:
        measure(Grid(), path)
    results, page = result_files.read(result_files.newest(KIND)), report.ROOT / PAGE
    sim = Simulation(results)
    page.write_text(filled(page.read_text(), sim, results["environment"]))
    if wrong := sim.off():
        sys.exit(
            f"the simulation is off by more than {100 * WITHIN:.0f} % in {len(wrong)} cells of at most {CORES} ranks"
        )


if __name__ == "__main__":
    main()
