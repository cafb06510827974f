"""`calibrate`: the rates of a `Topology` as this machine has them, from what a training step runs.

Each rate is the slope of a line through times of several sizes, each time the median of some rounds on the slowest
rank; all ranks measure together. Lookups and updates are of 8 tables that no cache holds, of 16, 64 and 128 columns.

An operation is a function of a size. It prepares what is measured, and returns that as a function without arguments,
and the amounts that its time is a sum of costs of.
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

SIZES = (64, 128, 256, 512, 1024, 2048)  # samples of a rank
NUM_TABLES, NUM_ROWS, BAG_SIZE, DIMS, CACHED_DIM = 8, 200_000, 4, (16, 64, 128), 64
LAYER, WIDTH = 1024, 512  # of the layer that is measured, and columns that a rank exchanges
CACHED_BATCHES, TABLE_BATCHES = 2, 6  # of the largest size: rows in a cache, and rows that take turns in it
ROWS_A_PAGE = 16  # between two of these rows, so that each is read by itself, as from a large table
WARMUPS, ROUNDS = 2, 7
MOST_VARIATION = 0.3  # of the times of a loop, on a machine that does nothing else
LEAST_COST = 1e-15  # seconds a byte or an id, where none was found: rates are finite
STATE_BYTES = 4  # of row-wise Adagrad, a row
Point = list[float]  # seconds, and the amounts that they are a sum of costs of
Operation = Callable[[int], tuple[Any, ...]]  # of a size: what is measured, and its amounts
_KEYS = [f"t{number}" for number in range(NUM_TABLES)]


def measure(group: RankGroup, device: torch.device, *operations: Operation) -> list[Point]:
    """For each operation and size, the slowest rank's median time of some rounds, and mean amounts.

    They take turns, so that what disturbs the machine for a while disturbs them all.
    """
    wait_for_device = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    cases = list(itertools.product(operations, SIZES))
    taken: list[list[tuple[float, ...]]] = [[] for _ in cases]
    for _ in range(WARMUPS + ROUNDS):
        for (operation, size), of_case in zip(cases, taken, strict=True):
            run, *amounts = operation(size)
            group.barrier()
            wait_for_device()
            begin = time.perf_counter()
            run()
            wait_for_device()
            of_case.append((time.perf_counter() - begin, *amounts))
    counted = [np.transpose(of_case[WARMUPS:]) for of_case in taken]
    own = [[float(np.median(each[0])), *np.mean(each[1:], axis=1).tolist()] for each in counted]
    return [max(points) for points in zip(*group.all_gather_object(own), strict=True)]


def fit(points: Sequence[Point]) -> tuple[list[float], float]:
    """Latency and costs, none negative, of the least squared relative error, and the largest relative distance."""
    values = np.array(points)
    columns = np.column_stack([np.ones(len(values)), values[:, 1:]]) / values[:, :1]
    best, costs = np.inf, np.zeros(columns.shape[1])
    for number in range(1, len(costs) + 1):
        for chosen in itertools.combinations(range(len(costs)), number):  # the best of those without negative ones
            part = columns[:, chosen]
            scale = part.max(0)
            found = np.linalg.lstsq(part / scale, np.ones(len(part)), rcond=None)[0] / scale
            error = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best:
                best, costs = error, np.zeros(len(costs))
                costs[list(chosen)] = found
    return costs.tolist(), float(np.abs(1 - 1 / (columns @ costs)).max())


def calibrate(
    *, device: str = "cpu", group: RankGroup | None = None, disk_folder: str | Path | None = None,
    allow_busy: bool = False,
) -> Topology:  # fmt: skip
    """Measure this machine, on all ranks of `group` together; the same on all of them. It takes about a minute.

    Rates of links that one rank, or one node, does not use stay assumed ones.

    Args:
        device: "cpu", or "cuda" for this rank's current one.
        group: all ranks of the job if not given.
        disk_folder: where a table on disk is measured; the system's temporary folder if not given.
        allow_busy: measure although other processes use the machine, and say so in the topology.

    Raises:
        ValueError: for another device, or a machine that is busy.
        OSError: the folder cannot be used.
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device must be 'cpu', or 'cuda' where torch sees a GPU, got {device!r}")
    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    group = RankGroup.world() if group is None else group
    local, nodes = min(group.local_world_size, group.size), sorted(set(group.nodes))
    ids = group if device == "cpu" else group.duplicate("gloo")
    busy = next(filter(None, group.all_gather_object(_busy(ids, local))), "")
    if busy and not allow_busy:
        raise ValueError(f"the machine is busy: {busy}; end what else runs on it, or allow a busy machine")
    rates, spread, timed = dict[str, float](), dict[str, float](), partial(measure, ids, where)

    def keep(link: str, points: Sequence[Point], *names: str) -> list[float]:
        """Fit a line, and keep its rates; its costs."""
        costs, spread[link] = fit(points)
        rates.update({name: 1 / max(cost, LEAST_COST) for name, cost in zip(names, costs[1:], strict=True)})
        rates[f"{link}_latency"] = costs[0]
        return costs

    by_dim = [[timed(each) for each in _tables(where, dim)] for dim in DIMS]
    lookups, updates, groupings = (list(itertools.chain(*points)) for points in zip(*by_dim, strict=True))
    keep("lookup", lookups, "lookup_rate", "lookup_bandwidth")
    of_update = keep("update", updates, "id_rate", "update_bandwidth")
    grouping = keep("id", groupings, "id_rate")
    # An update finds the gradients of ids, beside what it moves; and a batch is grouped for every lookup.
    rates["id_rate"] = 1 / max(grouping[1] + of_update[1], LEAST_COST)
    rates["lookup_latency"] += rates.pop("id_latency")
    for link in ("host", "disk"):
        keep(link, _without(timed(_misses(where, link, disk_folder)), grouping), f"{link}_bandwidth")
    rates["disk_bandwidth"] *= local  # all ranks of a node have used its disk
    keep("flops", timed(_layer(where)), "flops")
    message = [0.0, 0.0]
    if group.size > 1:
        message[1] = keep("control", timed(_messages(ids)), "control_bandwidth")[1]
        rates["control_bandwidth"] *= local if len(nodes) > 1 else 1  # and its network
        members = [[rank for rank in range(group.size) if group.nodes[rank] == node] for node in nodes]
        for link, ranks in (("intra", members), ("inter", list(zip(*members, strict=True)))):
            if len(ranks[0]) > 1:
                keep(link, timed(*_outputs(where, group.subgroup(ranks))), f"{link}_bandwidth")
        if len(nodes) == 1:
            rates |= {f"inter_{what}": rates[f"intra_{what}"] for what in ("bandwidth", "latency")}
            spread["inter"] = spread["intra"]
    routing = keep("routing", _without(timed(*_id_exchanges(where, ids)), message), "routing_rate")
    rates["control_latency"] = routing[0]
    found = Topology.here(group.size, local, device).but(
        **{name: rate for name, rate in rates.items() if name not in ("flops_latency", "routing_latency")},
        disk=float(disk_usage(disk_folder or tempfile.gettempdir()).free), machine=machine(device), spread=spread,
        busy=bool(busy),
    )  # fmt: skip
    return group.all_gather_object(found)[0]  # with the memory of rank 0


def _without(points: Sequence[Point], line: Sequence[float]) -> list[Point]:
    """Without a part of the time that is known: a line through the last amount."""
    return [[max(p[0] - line[0] - line[1] * p[-1], p[0] / 10), *p[1:-1]] for p in points]


def _busy(group: RankGroup, local: int) -> str:
    """What says that other processes use the machine."""
    load, seconds = os.getloadavg()[0], list[float]()
    group.barrier()
    for _ in range(20):
        begin = time.perf_counter()
        sum(range(200_000))
        seconds.append(time.perf_counter() - begin)
    low, high = np.percentile(seconds, [10, 90])
    if load > local + 0.5:
        return f"its load is {load:.1f}, and {local} ranks measure"
    return f"the time of a loop varies by {high / low - 1:.0%}" if high > (1 + MOST_VARIATION) * low else ""


def _batch(keys: Sequence[str], ids: Tensor, samples: int) -> KeyedJaggedTensor:
    """Ids by table and sample, of which all have as many."""
    lengths = torch.full((len(keys) * samples,), len(ids) // (len(keys) * samples), dtype=torch.int32)
    return KeyedJaggedTensor(keys, ids.int(), lengths=lengths)


def _table_set(device: torch.device, dim: int, rows: int, **where: Any) -> TableSet:
    configs = [TableConfig(key, rows, dim, **where) for key in _KEYS]
    return TableSet(configs, RowWiseAdagrad(), device, "ignore", torch.float32, pooled=True, update=ShardUpdate())


def _tables(device: torch.device, dim: int) -> Sequence[Operation]:
    """Of tables with `dim` columns: lookups and updates, of ids and bytes; and grouping, of ids."""
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
        found, rows = lookup(), int(lookup.args[1].num_groups)
        moved = count * dim * 4 + rows * 2 * (dim * 4 + STATE_BYTES)
        return partial(found.backward, torch.ones_like(found)), count, moved

    return look_up, update, group


def _misses(device: torch.device, placement: str, folder: str | Path | None) -> Operation:
    """Prefetches of rows that are in no slot, each of which evicts one that was updated: bytes, ids."""
    rows, place, held = TABLE_BATCHES * SIZES[-1], 0, list[Any]()
    cache = CacheConfig(rows=CACHED_BATCHES * SIZES[-1], folder=folder)
    tables = _table_set(device, CACHED_DIM, rows * ROWS_A_PAGE, placement=placement, cache=cache)
    order = torch.randperm(rows) * ROWS_A_PAGE

    def prefetch(size: int) -> tuple[Any, ...]:
        nonlocal place
        while held:
            lookup = held.pop()
            lookup.dirty = True
            lookup.release()
        ids, place = order[(torch.arange(size) + place) % rows].repeat(NUM_TABLES), place + size
        batch = _batch(_KEYS, ids, size).to(device)
        return lambda: held.append(tables.group(batch)), 2 * (CACHED_DIM * 4 + STATE_BYTES) * len(ids), len(ids)

    for _ in range(TABLE_BATCHES):  # every row has been updated once, and written
        prefetch(SIZES[-1])[0]()
    return prefetch


def _layer(device: torch.device) -> Operation:
    """A layer's forward and backward: floating-point operations."""
    layer = torch.nn.Linear(LAYER, LAYER, device=device)

    def both(size: int) -> tuple[Any, ...]:
        given = torch.rand(size, LAYER, device=device, requires_grad=True)
        gradient = torch.ones_like(given)
        return lambda: layer(given).backward(gradient), 6 * LAYER * LAYER * size

    return both


def _messages(group: RankGroup) -> Operation:
    """Messages on the network of ID exchanges: bytes received."""

    def message(size: int) -> tuple[Any, ...]:
        counts = [1024 * size] * group.size
        sent = torch.zeros(sum(counts), dtype=torch.uint8)
        return partial(group.all_to_all, sent, counts, counts, "calibration"), sum(counts)

    return message


def _id_exchanges(device: torch.device, group: RankGroup) -> list[Operation]:
    """ID exchanges for 8 tables on each rank, with short and long bags: ids sent and received, bytes received."""
    keys = [f"{rank} {key}" for rank in range(group.size) for key in _KEYS]
    exchange = IdExchange(group, [IdRoute(key, key, NUM_ROWS, (0,), (n // NUM_TABLES,)) for n, key in enumerate(keys)])

    def exchanged(bag: int, size: int) -> tuple[Any, ...]:
        ids = len(keys) * size * bag
        batch = _batch(keys, torch.randint(NUM_ROWS, (ids,)), size)
        return lambda: exchange(batch)[0].to(device), 2 * ids, 4 * ids + 4 * len(keys) * size

    return [partial(exchanged, bag) for bag in (1, BAG_SIZE)]


def _outputs(device: torch.device, group: RankGroup) -> Sequence[Operation]:
    """Output exchanges among some ranks, forward and backward: bytes sent to others."""
    ranks, bytes_ = group.size, (group.size - 1) * WIDTH * 2  # of a sample, in 16 bits
    columns = [[(rank * WIDTH, WIDTH)] for rank in range(ranks)]
    exchange = PooledExchange(group, columns, WIDTH * ranks, ExchangePrecision(), ranks)

    def send(size: int) -> Callable[[], Tensor]:
        return partial(exchange, torch.rand(size * ranks, WIDTH, device=device, requires_grad=True), [size] * ranks)

    def vectors(size: int) -> tuple[Any, ...]:
        run = send(size)
        return lambda: wait(run()), size * bytes_

    def gradients(size: int) -> tuple[Any, ...]:
        return partial(send(size)().backward, torch.ones(size, WIDTH * ranks, device=device)), size * bytes_

    return vectors, gradients


def describe(topology: Topology) -> str:
    """A line for each rate and latency of a calibration, with the spread of its link."""
    lines = [f"{topology.machine}: {topology.world_size} ranks" + (", BUSY" if topology.busy else "")]
    links = {name: name.partition("_")[0] for name in vars(topology)} | {"control_latency": "routing"}
    for name, link in links.items():
        value = getattr(topology, name)
        if link != "server" and (name == "flops" or name.endswith(("_rate", "_bandwidth", "_latency"))):
            shown = f"{value * 1e6:,.0f} us" if name.endswith("_latency") else f"{value / 1e6:,.1f} M a second"
            spread = f"spread {topology.spread[link]:.0%}" if link in topology.spread else "assumed"
            lines.append(f"{name:18}{shown:>22}  {spread}")
    return "\n".join(lines)
