"""`calibrate`: the rates of a `Topology` as this machine has them, from what a training step runs, and its command.

Each rate is the slope of a line through times of several sizes, each time the median of some rounds on the slowest
rank; all ranks measure together. Lookups and updates are of 8 tables that no cache holds, of 16, 64 and 128 columns.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from shutil import disk_usage
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tritonemb.comm.async_tensor import wait
from tritonemb.comm.control import init_from_env
from tritonemb.comm.group import RankGroup
from tritonemb.comm.id_exchange import IdExchange, IdRoute
from tritonemb.comm.output_exchange import ExchangePrecision, PooledExchange
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.optimizers import RowWiseAdagrad
from tritonemb.sharding.planner.topology import Topology, machine
from tritonemb.sharding.replicated_update import ShardUpdate
from tritonemb.tables.lookup import Lookup
from tritonemb.tables.table_set import TableSet
from tritonemb.types import CacheConfig, TableConfig
from tritonemb.utils import Options

SIZES = (64, 128, 256, 512, 1024, 2048)  # samples of a rank
NUM_TABLES, NUM_ROWS, BAG_SIZE, DIMS, CACHED_DIM = 8, 200_000, 4, (16, 64, 128), 64
LAYER, WIDTH = 1024, 512  # of the layer that is measured, and columns that a rank exchanges
CACHED_BATCHES, TABLE_BATCHES = 2, 6  # of the largest size: rows in a cache, and rows that take turns in it
ROWS_A_PAGE = 16  # between two of these rows, so that each is read by itself, as from a large table
WARMUPS = 2
MOST_VARIATION = 0.3  # of the times of a loop, on a machine that does nothing else
LEAST_COST = 1e-15  # seconds a byte or an id, where none was found: rates are finite
STATE_BYTES = 4  # of row-wise Adagrad, a row
S = TypeVar("S")
_KEYS = [f"t{number}" for number in range(NUM_TABLES)]
Point = list[float]  # seconds, and the amounts that they are a sum of costs of
Prepared = tuple[Any, tuple[float, ...]]  # what is measured, and its amounts


class Ruler:
    """Times what all ranks of a group do at once."""

    def __init__(self, group: RankGroup, device: torch.device, rounds: int) -> None:
        self.group, self.device, self.rounds = group, device, rounds

    def measure(
        self, sizes: Iterable[S], prepare: Callable[[S], Prepared], run: Callable[[Any], object]
    ) -> list[Point]:
        """For each size, the slowest rank's median time of `run`, and mean amounts; `prepare` is called before each.

        Sizes take turns, so that what disturbs the machine for a while disturbs them all.
        """
        sizes = list(sizes)
        taken: list[list[tuple[float, ...]]] = [[] for _ in sizes]
        for number in range(WARMUPS + self.rounds):
            for size, of_size in zip(sizes, taken, strict=True):
                given, amounts = prepare(size)
                self.group.barrier()
                seconds = self._time(run, given)
                if number >= WARMUPS:
                    of_size.append((seconds, *amounts))
        own = [
            [float(np.median(column[0])), *np.mean(column[1:], axis=1).tolist()] for column in map(np.transpose, taken)
        ]
        return [max(points) for points in zip(*self.group.all_gather_object(own), strict=True)]

    def _time(self, run: Callable[[Any], object], given: Any) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            run(given)
            return time.perf_counter() - begin
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        start.record()
        run(given)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


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
    *, device: str = "cpu", group: RankGroup | None = None, sizes: Sequence[int] = SIZES,
    disk_folder: str | Path | None = None, allow_busy: bool = False, rounds: int = 7,
) -> Topology:  # fmt: skip
    """Measure this machine, on all ranks of `group` together; the same on all of them. It takes about a minute.

    Rates of links that one rank, or one node, does not use stay assumed ones.

    Args:
        device: "cpu", or "cuda" for this rank's current one.
        group: all ranks of the job if not given.
        sizes: samples of a rank's batches, at least 5, the largest at least 30 times the smallest.
        disk_folder: where a table on disk is measured; the system's temporary folder if not given.
        allow_busy: measure although other processes use the machine, and say so in the topology.
        rounds: of which each time is the median.

    Raises:
        ValueError: for arguments that do not fit, or a machine that is busy.
        OSError: the folder cannot be used.
    """
    sizes = sorted(set(sizes))
    if len(sizes) < 5 or not 30 * sizes[0] <= sizes[-1] or sizes[0] < 1:
        raise ValueError(f"sizes must be at least 5, positive, the largest 30 times the smallest, got {sizes}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device must be 'cpu', or 'cuda' where torch sees a GPU, got {device!r}")
    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    group = RankGroup.world() if group is None else group
    local = min(group.local_world_size, group.size)
    assumed = Topology.here(group.size, local, device)
    ids = group if device == "cpu" else group.duplicate("gloo")
    busy = next(filter(None, group.all_gather_object(_busy(ids, local))), "")
    if busy and not allow_busy:
        raise ValueError(f"the machine is busy: {busy}; end what else runs on it, or allow a busy machine")
    ruler, rates, spread = Ruler(ids, where, rounds), dict[str, float](), dict[str, float]()

    def keep(link: str, points: Sequence[Point], *names: str) -> list[float]:
        """Fit a line, and keep its rates; its costs."""
        costs, spread[link] = fit(points)
        rates.update({name: 1 / max(cost, LEAST_COST) for name, cost in zip(names, costs[1:], strict=True)})
        rates[f"{link}_latency"] = costs[0]
        return costs

    by_dim = [_tables(ruler, sizes, dim) for dim in DIMS]
    lookups, updates, groupings = (list(itertools.chain(*points)) for points in zip(*by_dim, strict=True))
    keep("lookup", lookups, "lookup_rate", "lookup_bandwidth")
    of_update = keep("update", updates, "id_rate", "update_bandwidth")
    grouping = keep("id", groupings, "id_rate")
    # An update finds the gradients of ids, beside what it moves; and a batch is grouped for every lookup.
    rates["id_rate"] = 1 / max(grouping[1] + of_update[1], LEAST_COST)
    rates["lookup_latency"] += rates.pop("id_latency")
    for link in ("host", "disk"):
        misses = _misses(ruler, sizes, link, disk_folder)
        keep(link, _without(misses, grouping), f"{link}_bandwidth")
    rates["disk_bandwidth"] *= local  # all ranks of a node have used its disk
    keep("flops", _layer(ruler, sizes), "flops")
    message, nodes = [0.0, 0.0], sorted(set(group.nodes))
    if group.size > 1:
        message[1] = keep("control", _messages(ruler, sizes), "control_bandwidth")[1]
        rates["control_bandwidth"] *= local if len(nodes) > 1 else 1  # and its network
        members = [[rank for rank in range(group.size) if group.nodes[rank] == node] for node in nodes]
        if local > 1:
            keep("intra", _outputs(ruler, sizes, group.subgroup(members)), "intra_bandwidth")
        if len(nodes) > 1:
            across = group.subgroup(list(zip(*members, strict=True)))
            keep("inter", _outputs(ruler, sizes, across), "inter_bandwidth")
        else:
            rates |= {f"inter_{what}": rates[f"intra_{what}"] for what in ("bandwidth", "latency")}
            spread["inter"] = spread["intra"]
    routing = keep("routing", _without(_id_exchanges(ruler, sizes), message), "routing_rate")
    rates["control_latency"] = routing[0]
    found = assumed.but(
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


def _batch(ids: Tensor, samples: int, device: torch.device) -> KeyedJaggedTensor:
    """As ID exchanges make it of ids by table and sample."""
    lengths = torch.full((NUM_TABLES * samples,), len(ids) // (NUM_TABLES * samples), dtype=torch.int32)
    return KeyedJaggedTensor(_KEYS, ids.int(), lengths=lengths).to(device)


def _table_set(device: torch.device, dim: int, rows: int, **where: Any) -> TableSet:
    configs = [TableConfig(key, rows, dim, **where) for key in _KEYS]
    return TableSet(configs, RowWiseAdagrad(), device, "ignore", torch.float32, pooled=True, update=ShardUpdate())


def _tables(ruler: Ruler, sizes: Sequence[int], dim: int) -> tuple[list[Point], list[Point], list[Point]]:
    """Of tables with `dim` columns, lookups and updates: ids, bytes; and grouping: ids."""
    tables = _table_set(ruler.device, dim, NUM_ROWS)

    def prepare(size: int) -> tuple[KeyedJaggedTensor, int]:
        count = NUM_TABLES * size * BAG_SIZE
        return _batch(torch.randint(NUM_ROWS, (count,)), size, ruler.device), count

    def to_group(size: int) -> Prepared:
        batch, count = prepare(size)
        return batch, (count,)

    def to_look_up(size: int) -> Prepared:
        batch, count = prepare(size)
        return (batch, tables.group(batch)), (count, (count + NUM_TABLES * size) * dim * 4)

    def to_update(size: int) -> Prepared:
        batch, count = prepare(size)
        groups: Any = tables.group(batch)
        found = tables.look_up(batch, groups)
        moved = count * dim * 4 + int(groups.num_groups) * 2 * (dim * 4 + STATE_BYTES)
        return (found, torch.ones_like(found)), (count, moved)

    return (
        ruler.measure(sizes, to_look_up, lambda given: tables.look_up(*given)),
        ruler.measure(sizes, to_update, lambda given: given[0].backward(given[1])),
        ruler.measure(sizes, to_group, tables.group),
    )


def _misses(ruler: Ruler, sizes: Sequence[int], placement: str, folder: str | Path | None) -> list[Point]:
    """Prefetches of rows that are in no slot, each of which evicts one that was updated: bytes, ids."""
    rows, place, held = TABLE_BATCHES * sizes[-1], 0, list[Lookup]()
    cache = CacheConfig(rows=CACHED_BATCHES * sizes[-1], folder=folder)
    tables = _table_set(ruler.device, CACHED_DIM, rows * ROWS_A_PAGE, placement=placement, cache=cache)
    order = torch.randperm(rows) * ROWS_A_PAGE

    def prepare(size: int) -> Prepared:
        nonlocal place
        while held:
            lookup = held.pop()
            lookup.dirty = True
            lookup.release()
        ids, place = order[(torch.arange(size) + place) % rows].repeat(NUM_TABLES), place + size
        return _batch(ids, size, ruler.device), (2 * (CACHED_DIM * 4 + STATE_BYTES) * len(ids), len(ids))

    def run(batch: KeyedJaggedTensor) -> None:
        found: Any = tables.group(batch)
        held.append(found)

    for _ in range(TABLE_BATCHES):  # every row has been updated once, and written
        run(prepare(sizes[-1])[0])
    return ruler.measure(sizes, prepare, run)


def _layer(ruler: Ruler, sizes: Sequence[int]) -> list[Point]:
    """A layer's forward and backward: floating-point operations."""
    layer = torch.nn.Linear(LAYER, LAYER, device=ruler.device)

    def prepare(size: int) -> Prepared:
        given = torch.rand(size, LAYER, device=ruler.device, requires_grad=True)
        return (given, torch.ones_like(given)), (6 * LAYER * LAYER * size,)

    return ruler.measure(sizes, prepare, lambda given: layer(given[0]).backward(given[1]))


def _messages(ruler: Ruler, sizes: Sequence[int]) -> list[Point]:
    """Messages on the network of ID exchanges: bytes received."""
    ranks = ruler.group.size

    def prepare(size: int) -> Prepared:
        counts = [1024 * size] * ranks
        return (torch.zeros(sum(counts), dtype=torch.uint8), counts, counts, "calibration"), (sum(counts),)

    return ruler.measure(sizes, prepare, lambda given: ruler.group.all_to_all(*given))


def _id_exchanges(ruler: Ruler, sizes: Sequence[int]) -> list[Point]:
    """ID exchanges for 8 tables on each rank, with short and long bags: ids sent and received, bytes received."""
    keys = [f"{rank} {key}" for rank in range(ruler.group.size) for key in _KEYS]
    routes = [IdRoute(key, key, NUM_ROWS, NUM_ROWS, (n // NUM_TABLES,)) for n, key in enumerate(keys)]
    exchange = IdExchange(ruler.group, routes)

    def prepare(size: tuple[int, int]) -> Prepared:
        lengths = torch.full((size[0] * len(keys),), size[1])
        batch = KeyedJaggedTensor(keys, torch.randint(NUM_ROWS, (int(lengths.sum()),)), lengths=lengths)
        ids = len(batch.values())
        return batch, (2 * ids, 4 * ids + 4 * len(lengths))

    of_bags = list(itertools.product(sizes, (1, BAG_SIZE)))
    return ruler.measure(of_bags, prepare, lambda batch: exchange(batch)[0].to(ruler.device))


def _outputs(ruler: Ruler, sizes: Sequence[int], group: RankGroup) -> list[Point]:
    """Output exchanges among some ranks, forward and backward: bytes sent to others."""
    ranks = group.size
    columns = [[(rank * WIDTH, WIDTH)] for rank in range(ranks)]
    exchange = PooledExchange(group, columns, WIDTH * ranks, ExchangePrecision(), ranks)

    def vectors(size: int) -> Prepared:
        made = torch.rand(size * ranks, WIDTH, device=ruler.device, requires_grad=True)
        return (made, [size] * ranks), (size * (ranks - 1) * WIDTH * 2,)  # in 16 bits

    def gradients(size: int) -> Prepared:
        given, amounts = vectors(size)
        return (exchange(*given), torch.ones(size, WIDTH * ranks, device=ruler.device)), amounts

    return [
        *ruler.measure(sizes, vectors, lambda given: wait(exchange(*given))),
        *ruler.measure(sizes, gradients, lambda given: given[0].backward(given[1])),
    ]


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
    """Calibrate and write the topology, on rank 0; returns a table of its rates there, None on others.

    ValueError, OSError: as of `calibrate`, or the file cannot be written.
    """
    for folder in (options.out.absolute().parent, options.disk):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; make it, or name another one")
    with _joined(options.device) as group:
        begin = time.monotonic()
        found = calibrate(
            device=options.device, group=group, disk_folder=options.disk, allow_busy=options.allow_busy
        )  # fmt: skip
        if group.rank:
            return None
        found.save(options.out)
        return f"{describe(found)}\n\n{options.out} was written after {time.monotonic() - begin:.0f} s"


def describe(topology: Topology) -> str:
    """Rates, latencies and spreads of a calibration, a line each link."""
    lines = [f"{topology.machine}: {topology.world_size} ranks" + (", BUSY" if topology.busy else "")]
    lines.append(f"{'':18}{'a second':>14}{'latency':>13}{'spread':>9}")
    for title, name, unit, link in (
        ("lookup, bytes", "lookup_bandwidth", "GB", "lookup"), ("lookup, ids", "lookup_rate", "M ids", "lookup"),
        ("update", "update_bandwidth", "GB", "update"), ("grouping", "id_rate", "M ids", "id"),
        ("host memory", "host_bandwidth", "GB", "host"), ("disk", "disk_bandwidth", "GB", "disk"),
        ("ID exchange, bytes", "control_bandwidth", "GB", "control"),
        ("ID exchange, ids", "routing_rate", "M ids", "routing"), ("inside a node", "intra_bandwidth", "GB", "intra"),
        ("between nodes", "inter_bandwidth", "GB", "inter"), ("layers", "flops", "GFlop", "flops"),
    ):  # fmt: skip
        rate = getattr(topology, name) / (1e6 if unit == "M ids" else 1e9)
        latency = getattr(topology, f"{'control' if link == 'routing' else link}_latency", None)
        spread = f"{topology.spread[link]:.0%}" if link in topology.spread else "assumed"
        shown = "" if latency is None else f"{latency * 1e6:,.0f} us"
        lines.append(f"{title:18}{f'{rate:,.3g} {unit}':>14}{shown:>13}{spread:>9}")
    return "\n".join(lines)


@contextmanager
def _joined(device: str) -> Iterator[RankGroup]:
    """The ranks that torchrun has started; this process alone without it."""
    if "WORLD_SIZE" not in os.environ:
        yield RankGroup()
        return
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    init_from_env("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timedelta(minutes=10))
    yield RankGroup.world()
    dist.destroy_process_group()
