"""`calibrate`: measure the rates of a `Topology` with the operations of a training step.

A rate is the slope of a line fitted to times of several sizes. A time is the median over rounds on the slowest rank;
all ranks measure at once. Lookups and updates use 8 tables larger than the CPU caches, of 16, 64 and 128 columns.

An operation is a function of a size: it prepares a measurement, and returns a function to time and the amounts (ids,
bytes) that its time is linear in.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.comm.async_tensor import wait
from tritonemb.comm.group import RankGroup
from tritonemb.comm.id_exchange import IdExchange, IdRoute
from tritonemb.comm.output_exchange import ExchangePrecision, PooledExchange
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.optimizers import RowWiseAdagrad
from tritonemb.sharding.planner.topology import Topology, machine
from tritonemb.sharding.replicated_update import ShardUpdate
from tritonemb.tables.table_set import TableSet
from tritonemb.types import CacheConfig, TableConfig
from tritonemb.utils import LazyModule

optimize: Any = LazyModule("scipy.optimize", "plan")

SIZES = (64, 128, 256, 512, 1024, 2048)  # samples per rank
NUM_TABLES, NUM_ROWS, BAG_SIZE, DIMS, CACHED_DIM = 8, 200_000, 4, (16, 64, 128), 64
LAYER, WIDTH = 1024, 512  # of the dense layer; columns of a rank in the output exchange
CACHED_BATCHES, TABLE_BATCHES = 2, 6  # batches of the largest size: in a cache, and in its table
ROW_STRIDE = 16  # of the rows in use, so that each is read by itself, as from a large table
WARMUPS, ROUNDS = 2, 7
MAX_VARIATION = 0.3  # of the times of a loop on an idle machine
MIN_COST = 1e-15  # seconds per byte or id, if the fit has none: rates are finite
STATE_BYTES = 4  # per row, of row-wise Adagrad
Point = list[float]  # seconds, and amounts
Operation = Callable[[int], tuple[Any, ...]]  # size -> function to time, amounts
_KEYS = [f"t{number}" for number in range(NUM_TABLES)]


def measure(group: RankGroup, device: torch.device, *operations: Operation) -> list[Point]:
    """Return the slowest rank's median time, and mean amounts, of each operation and size.

    Operations are interleaved, so that a disturbance of the machine affects all of them.
    """
    wait_for_device = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    cases = list(itertools.product(operations, SIZES))
    rounds: list[list[tuple[float, ...]]] = [[] for _ in cases]
    for _ in range(WARMUPS + ROUNDS):
        for (operation, size), case_rounds in zip(cases, rounds, strict=True):
            run, *amounts = operation(size)
            group.barrier()
            wait_for_device()
            begin = time.perf_counter()
            run()
            wait_for_device()
            case_rounds.append((time.perf_counter() - begin, *amounts))
    measured = [np.transpose(case_rounds[WARMUPS:]) for case_rounds in rounds]
    local_points = [[float(np.median(values[0])), *np.mean(values[1:], axis=1).tolist()] for values in measured]
    return [max(points) for points in zip(*group.all_gather_object(local_points), strict=True)]


def fit(points: Sequence[Point]) -> tuple[list[float], float]:
    """Fit a nonnegative latency and costs by least squares of relative errors. Return these, and the largest error."""
    values = np.array(points)
    columns = np.column_stack([np.ones(len(values)), values[:, 1:]]) / values[:, :1]
    scale = columns.max(0)
    costs = optimize.nnls(columns / scale, np.ones(len(columns)))[0] / scale
    return costs.tolist(), float(np.abs(1 - 1 / (columns @ costs)).max())


def calibrate(
    *, device: str = "cpu", group: RankGroup | None = None, disk_folder: str | Path | None = None,
    allow_busy: bool = False,
) -> Topology:  # fmt: skip
    """Measure this machine on all ranks of `group`, in about a minute. A collective with the same result on all ranks.

    Links that are not in use, with one rank or one node, keep assumed rates.

    Args:
        device: "cpu", or "cuda" for this rank's current device.
        group: all ranks of the job by default.
        disk_folder: folder for a table on disk; the system's temporary folder by default.
        allow_busy: measure while other processes use the machine, and record that in the topology.

    Raises:
        ValueError: an unknown device, or a busy machine.
        OSError: the folder cannot be used.
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device must be 'cpu', or 'cuda' where torch sees a GPU, got {device!r}")
    torch_device = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    group = RankGroup.world() if group is None else group
    local, nodes = min(group.local_world_size, group.size), sorted(set(group.nodes))
    ids = group if device == "cpu" else group.duplicate("gloo")
    busy = next(filter(None, group.all_gather_object(_busy(ids, local))), "")
    if busy and not allow_busy:
        raise ValueError(f"the machine is busy: {busy}; stop other processes, or pass --allow-busy (allow_busy=True)")
    rates, spread, timed = dict[str, float](), dict[str, float](), partial(measure, ids, torch_device)

    def fit_link(link: str, points: Sequence[Point], *names: str) -> list[float]:
        """Fit a line, and store its rates. Return latency and costs."""
        costs, spread[link] = fit(points)
        rates.update({name: 1 / max(cost, MIN_COST) for name, cost in zip(names, costs[1:], strict=True)})
        rates[f"{link}_latency"] = costs[0]
        return costs

    # Tables on the device.
    by_dim = [[timed(operation) for operation in _tables(torch_device, dim)] for dim in DIMS]
    lookups, updates, groupings = (list(itertools.chain(*points)) for points in zip(*by_dim, strict=True))
    fit_link("lookup", lookups, "lookup_rate", "lookup_bandwidth")
    update = fit_link("update", updates, "id_rate", "update_bandwidth")
    grouping = fit_link("id", groupings, "id_rate")
    # An update gathers the gradients of ids; and each lookup groups its batch first.
    rates["id_rate"] = 1 / max(grouping[1] + update[1], MIN_COST)
    rates["lookup_latency"] += rates.pop("id_latency")
    # Tables in host memory and on disk, and a dense layer.
    for link in ("host", "disk"):
        fit_link(link, _subtract(timed(_misses(torch_device, link, disk_folder)), grouping), f"{link}_bandwidth")
    rates["disk_bandwidth"] *= local  # all ranks of a node share its disk
    fit_link("flops", timed(_layer(torch_device)), "flops")
    # Networks: the ID exchange's, then output exchanges in nodes and between them.
    message = [0.0, 0.0]
    if group.size > 1:
        message[1] = fit_link("control", timed(_messages(ids)), "control_bandwidth")[1]
        rates["control_bandwidth"] *= local if len(nodes) > 1 else 1  # all ranks of a node share its network
        members = [[rank for rank in range(group.size) if group.nodes[rank] == node] for node in nodes]
        for link, ranks in (("intra", members), ("inter", list(zip(*members, strict=True)))):
            if len(ranks[0]) > 1:
                fit_link(link, timed(*_outputs(torch_device, group.subgroup(ranks))), f"{link}_bandwidth")
        if len(nodes) == 1:
            rates |= {f"inter_{rate}": rates[f"intra_{rate}"] for rate in ("bandwidth", "latency")}
            spread["inter"] = spread["intra"]
    routing = fit_link("routing", _subtract(timed(*_id_exchanges(torch_device, ids)), message), "routing_rate")
    rates["control_latency"] = routing[0]
    topology = Topology.detect(group.size, local, device).but(
        **{name: rate for name, rate in rates.items() if name not in ("flops_latency", "routing_latency")},
        disk=float(disk_usage(disk_folder or tempfile.gettempdir()).free), machine=machine(device), spread=spread,
        busy=bool(busy),
    )  # fmt: skip
    return group.all_gather_object(topology)[0]  # with the memory of rank 0


def _subtract(points: Sequence[Point], line: Sequence[float]) -> list[Point]:
    """Subtract a known line in the last amount from the times, and drop that amount."""
    return [[max(p[0] - line[0] - line[1] * p[-1], p[0] / 10), *p[1:-1]] for p in points]


def _busy(group: RankGroup, local: int) -> str:
    """Describe signs of other processes on the machine; empty without any."""
    load, seconds = os.getloadavg()[0], list[float]()
    group.barrier()
    for _ in range(20):
        begin = time.perf_counter()
        sum(range(200_000))
        seconds.append(time.perf_counter() - begin)
    low, high = np.percentile(seconds, [10, 90])
    if load > local + 0.5:
        return f"its load average is {load:.1f} with {local} ranks"
    return f"the time of a loop varies by {high / low - 1:.0%}" if high > (1 + MAX_VARIATION) * low else ""


def _batch(keys: Sequence[str], ids: Tensor, samples: int) -> KeyedJaggedTensor:
    """Return a batch of `ids` in bags of equal lengths."""
    lengths = torch.full((len(keys) * samples,), len(ids) // (len(keys) * samples), dtype=torch.int32)
    return KeyedJaggedTensor(keys, ids.int(), lengths=lengths)


def _table_set(device: torch.device, dim: int, rows: int, **options: Any) -> TableSet:
    configs = [TableConfig(key, rows, dim, **options) for key in _KEYS]
    return TableSet(configs, RowWiseAdagrad(), device, "ignore", torch.float32, pooled=True, update=ShardUpdate())


def _tables(device: torch.device, dim: int) -> Sequence[Operation]:
    """Return lookup and update, linear in ids and bytes, and grouping, linear in ids, of tables with `dim` columns."""
    tables = _table_set(device, dim, NUM_ROWS)

    def group(size: int) -> tuple[Any, ...]:
        count = NUM_TABLES * size * BAG_SIZE
        return partial(tables.group, _batch(_KEYS, torch.randint(NUM_ROWS, (count,)), size).to(device)), count

    def look_up(size: int) -> tuple[Any, ...]:
        grouping, count = group(size)
        groups: Any = grouping()
        return partial(tables.look_up, grouping.args[0], groups), count, (count + NUM_TABLES * size) * dim * 4

    def update(size: int) -> tuple[Any, ...]:
        lookup, count, _ = look_up(size)
        outputs, rows = lookup(), int(lookup.args[1].num_groups)
        num_bytes = count * dim * 4 + rows * 2 * (dim * 4 + STATE_BYTES)
        return partial(outputs.backward, torch.ones_like(outputs)), count, num_bytes

    return look_up, update, group


def _misses(device: torch.device, placement: str, folder: str | Path | None) -> Operation:
    """Return prefetches of rows that all miss, and each evict a dirty row; linear in bytes and ids."""
    rows, position, pinned = TABLE_BATCHES * SIZES[-1], 0, list[Any]()
    cache = CacheConfig(rows=CACHED_BATCHES * SIZES[-1], folder=folder)
    tables = _table_set(device, CACHED_DIM, rows * ROW_STRIDE, placement=placement, cache=cache)
    order = torch.randperm(rows) * ROW_STRIDE

    def prefetch(size: int) -> tuple[Any, ...]:
        nonlocal position
        while pinned:
            pins = pinned.pop().pins
            pins.is_dirty = True
            pins.release()
        ids, position = order[(torch.arange(size) + position) % rows].repeat(NUM_TABLES), position + size
        batch = _batch(_KEYS, ids, size).to(device)
        return lambda: pinned.append(tables.group(batch)), 2 * (CACHED_DIM * 4 + STATE_BYTES) * len(ids), len(ids)

    for _ in range(TABLE_BATCHES):  # update and write every row once
        prefetch(SIZES[-1])[0]()
    return prefetch


def _layer(device: torch.device) -> Operation:
    """Return forward and backward of a dense layer, linear in floating-point operations."""
    layer = torch.nn.Linear(LAYER, LAYER, device=device)

    def forward_backward(size: int) -> tuple[Any, ...]:
        inputs = torch.rand(size, LAYER, device=device, requires_grad=True)
        gradient = torch.ones_like(inputs)
        return lambda: layer(inputs).backward(gradient), 6 * LAYER * LAYER * size

    return forward_backward


def _messages(group: RankGroup) -> Operation:
    """Return an all-to-all on the network of ID exchanges, linear in bytes received."""

    def message(size: int) -> tuple[Any, ...]:
        counts = [1024 * size] * group.size
        payload = torch.zeros(sum(counts), dtype=torch.uint8)
        return lambda: group.all_to_all(payload, counts, counts, "calibration")(), sum(counts)

    return message


def _id_exchanges(device: torch.device, group: RankGroup) -> list[Operation]:
    """Return ID exchanges of 8 tables per rank, with short and long bags; linear in ids and bytes received."""
    keys = [f"{rank} {key}" for rank in range(group.size) for key in _KEYS]
    exchange = IdExchange(group, [IdRoute(key, key, NUM_ROWS, (0,), (n // NUM_TABLES,)) for n, key in enumerate(keys)])

    def exchange_ids(bag: int, size: int) -> tuple[Any, ...]:
        ids = len(keys) * size * bag
        batch = _batch(keys, torch.randint(NUM_ROWS, (ids,)), size)
        return lambda: exchange(batch)[0].to(device), 2 * ids, 4 * ids + 4 * len(keys) * size

    return [partial(exchange_ids, bag) for bag in (1, BAG_SIZE)]


def _outputs(device: torch.device, group: RankGroup) -> Sequence[Operation]:
    """Return forward and backward of an output exchange, linear in bytes sent to other ranks."""
    ranks, sample_bytes = group.size, (group.size - 1) * WIDTH * 2  # in 16 bits
    columns = [[(rank * WIDTH, WIDTH)] for rank in range(ranks)]
    exchange = PooledExchange(group, columns, WIDTH * ranks, ExchangePrecision(), ranks)

    def send(size: int) -> Callable[[], Tensor]:
        return partial(exchange, torch.rand(size * ranks, WIDTH, device=device, requires_grad=True), [size] * ranks)

    def vectors(size: int) -> tuple[Any, ...]:
        run = send(size)
        return lambda: wait(run()), size * sample_bytes

    def gradients(size: int) -> tuple[Any, ...]:
        return partial(send(size)().backward, torch.ones(size, WIDTH * ranks, device=device)), size * sample_bytes

    return vectors, gradients


def describe(topology: Topology) -> str:
    """Return a line for each rate and latency of a calibration, with the spread of its link."""
    lines = [f"{topology.machine}: {topology.world_size} ranks" + (", BUSY" if topology.busy else "")]
    links = {name: name.partition("_")[0] for name in vars(topology)} | {"control_latency": "routing"}
    for name, link in links.items():
        value = getattr(topology, name)
        if link != "server" and (name == "flops" or name.endswith(("_rate", "_bandwidth", "_latency"))):
            rate = f"{value * 1e6:,.0f} us" if name.endswith("_latency") else f"{value / 1e6:,.1f} M per second"
            spread = f"spread {topology.spread[link]:.0%}" if link in topology.spread else "assumed"
            lines.append(f"{name:18}{rate:>22}  {spread}")
    return "\n".join(lines)
