"""Dynamic tables: rows read through their ids, ids found, a whole step, batches while a table grows.

The peer of a pull, find and gather, is a gather of as many rows of a static table, in ascending order as a batch has
them. That of a find is the same find in an index half full, and PyTorch's binary search in sorted ids. That of a step
is a static table's on the numbers of the same ids, and that of TorchRec's managed collisions on the same ids.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median, quantiles
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonemb as te
from benchmarks.measuring.cases import OURS, Case, contenders, copy_contender, equal
from benchmarks.measuring.clock import Clock, Contender, Timing
from benchmarks.measuring.result_files import Goal
from benchmarks.measuring.workload import CPU
from tritonemb.kernels.cpu.dynamic_index import (
    dynamic_begin_insert,
    dynamic_commit_insert_,
    dynamic_find_,
    dynamic_room,
)
from tritonemb.layout import WAYS, DynamicIndex, dynamic_rows, make_index

DIM, BATCH = 64, 50_000
HALF_FULL = f"{OURS}, half full"
OPTIMIZER = te.optim.RowWiseAdagrad(lr=0.1)


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    for capacity in (2_000,) if tiny else (1 << 20, 1 << 23):
        batch = min(BATCH, capacity // 4)
        shape = f"{batch:,} ids, capacity {capacity:,}"
        yield Case("dynamic table pull", f"{shape}, D{DIM}", partial(pull, capacity, batch))
        yield Case("dynamic index find", shape, partial(find, capacity, batch))
        # Without evictions there is room for many steps in the larger table only.
        steps = [(0.0, False), (0.01, False), (1.0, True)] + [(1.0, False)] * (capacity > 64 * batch)
        for new, is_full in steps:
            text = f"{shape}, D{DIM}, {new:.0%} new" + (", evicting" if is_full else "")
            yield Case("dynamic table step", text, partial(step, capacity, batch, new, is_full))
        for prefetched in (False, True):
            text = f"{shape}, D{DIM}, one unknown" + (", prefetched" if prefetched else "")
            yield Case("dynamic table evaluation", text, partial(evaluate, capacity, batch, prefetched))
        yield Case("dynamic table restore", f"{capacity * 3 // 4:,} rows, D{DIM}", partial(restore, capacity))


def filled(capacity: int, rows: int) -> DynamicIndex:
    """Random ids inserted, a share at a time, until there are so many rows."""
    index, generator, number = make_index(capacity), torch.Generator().manual_seed(rows), 0
    while (missing := rows - int(index.num_rows.sum())) > 0:
        number += 1
        count = min(missing, max(1, capacity // 16))
        ids, rule = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator), [(number, number - 2, 0)]
        into, _, keys = dynamic_find_([index], ids, torch.tensor([0, count]), [0], [number])
        new = dynamic_begin_insert([index], ids, keys)
        starts = dynamic_room([index], new, rule, torch.zeros(1, 5, dtype=torch.int64))
        dynamic_commit_insert_([index], new, starts, rule, into)
    return index


def find_in(index: DynamicIndex, ids: Tensor) -> Tensor:
    return dynamic_find_([index], ids, torch.tensor([0, ids.numel()]), [0])[0]


def draw(index: DynamicIndex, count: int, seed: int) -> Tensor:
    """Some of the ids, ascending, as row groups give them."""
    ids = dynamic_rows(index)[0]
    return ids[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(seed))[:count]].sort().values


def pull(capacity: int, batch: int, clock: Clock) -> list[Contender]:
    index = filled(capacity, capacity)
    weight = torch.randn(index.ids.numel(), DIM)
    ids = draw(index, batch, 1)
    rows = find_in(index, ids)
    static_rows = torch.randperm(weight.shape[0], generator=torch.Generator().manual_seed(2))[:batch].sort().values
    static = torch.randn(weight.shape[0], DIM)
    static[static_rows] = weight[rows]

    embedding, num_bytes = torch.nn.functional.embedding, batch * (8 + 2 * 4 * DIM)
    runs = {
        OURS: lambda: embedding(find_in(index, ids), weight),
        "static table": lambda: embedding(static_rows, static),
    }
    return contenders(runs, num_bytes, clock.device, equal(weight[rows]))


def find(capacity: int, batch: int, clock: Clock) -> list[Contender]:
    full, half = (filled(capacity, capacity * eighths // 8) for eighths in (8, 4))
    ids, half_ids = draw(full, batch, 1), draw(half, batch, 1)
    known, rows = dynamic_rows(full)

    def by_search() -> Tensor:
        return rows[torch.searchsorted(known, ids)]

    def check(result: Tensor) -> None:
        assert int(result.min()) >= 0

    runs = {
        OURS: lambda: find_in(full, ids),
        HALF_FULL: lambda: find_in(half, half_ids),
        "torch, sorted ids": by_search,
    }
    assert torch.equal(by_search(), find_in(full, ids))
    return contenders(runs, batch * (16 + WAYS + 12), clock.device, check)


def ids_of(numbers: Tensor) -> Tensor:
    """Ids of 64 bits, another one for each number."""
    return numbers * 0x9E3779B97F4A7C1 + 12345


def keyed(ids: Tensor) -> te.KeyedJaggedTensor:
    return te.KeyedJaggedTensor(["t"], ids, lengths=torch.ones_like(ids))


class Stream:
    """Batches of ids, a bag an id, of which a share is new; and the numbers of the same ids in a static table."""

    def __init__(self, capacity: int, batch: int, new: float, rows: int) -> None:
        dynamic = te.TableConfig("t", None, DIM, capacity=capacity, eviction=te.EvictionConfig(protect=1))
        self.dynamic = te.nn.EmbeddingBagCollection([dynamic], OPTIMIZER)
        self.static = te.nn.EmbeddingBagCollection([te.TableConfig("t", capacity, DIM)], OPTIMIZER)
        self.capacity, self.batch, self.new = capacity, batch, new
        self.last = rows  # ids 0 ... last - 1, mixed, have been met
        self._table: Any = self.dynamic["t"]
        for part in torch.arange(rows).split(max(1, capacity // 16)):
            self._table.index.clock += 1  # so that the rows of earlier parts may be evicted
            self._table.insert(ids_of(part), torch.zeros(part.numel(), DIM))

    def __call__(self, number: int) -> tuple[te.KeyedJaggedTensor, te.KeyedJaggedTensor]:
        generator, fresh = torch.Generator().manual_seed(number), int(self.batch * self.new)
        span = min(self.capacity // 2, self.last)  # the last ones, which have not been evicted
        known = torch.randint(self.last - span, self.last, (self.batch - fresh,), generator=generator)
        numbers = torch.cat([known, torch.arange(self.last, self.last + fresh)])
        self.last += fresh
        return keyed(ids_of(numbers)), keyed(numbers % self.capacity)


def step(capacity: int, batch: int, new: float, is_full: bool, clock: Clock) -> list[Contender]:
    """A table that is full evicts a row for each new id; one that is half empty when all are new never does."""
    stream = Stream(capacity, batch, new, capacity * (9 if is_full else 2 if new == 1.0 else 6) // 8)
    grad, current = torch.randn(batch, DIM), dict[int, Any]()

    def prepare(which: int, number: int) -> te.KeyedJaggedTensor:
        if number not in current:
            current.clear()
            current[number] = stream(number)
        batch: te.KeyedJaggedTensor = current[number][which]
        return batch

    def run(model: Any, features: te.KeyedJaggedTensor) -> None:
        model(features).backward(grad)

    num_bytes = batch * (8 + 4 * 4 * DIM)
    models = {OURS: stream.dynamic, "static table": stream.static}
    results = [
        Contender(name, partial(prepare, index), partial(run, model), num_bytes, lambda _: None)
        for index, (name, model) in enumerate(models.items())
    ]
    return [*results, copy_contender(num_bytes, clock.device)]


def evaluate(capacity: int, batch: int, prefetched: bool, clock: Clock) -> list[Contender]:
    """A batch with one unknown id, beside the same batch without it."""
    stream = Stream(capacity, batch, 0.0, capacity * 3 // 4)
    known = stream(0)[0]
    ids = known.values().clone()
    ids[batch // 2] = ids_of(torch.tensor(capacity))

    @torch.no_grad()
    def run(features: te.KeyedJaggedTensor) -> Tensor:
        result: Tensor = stream.dynamic(te.nn.prefetch(stream.dynamic, features) if prefetched else features)
        return result

    all_known = run(known)
    expected = all_known.clone()
    expected[batch // 2] = stream.dynamic["t"].initial_values(ids[batch // 2 : batch // 2 + 1])
    num_bytes = batch * (8 + 2 * 4 * DIM)
    one_unknown = Contender(OURS, lambda _: keyed(ids), run, num_bytes, equal(expected))
    return [
        one_unknown,
        Contender(f"{OURS}, all known", lambda _: keyed(known.values()), run, num_bytes, equal(all_known)),
        copy_contender(num_bytes, clock.device),
    ]


def restore(capacity: int, clock: Clock) -> list[Contender]:
    """A `state_dict` in memory, loaded; it writes each byte once."""
    stream = Stream(capacity, 1, 0.0, capacity * 3 // 4)
    state = stream.dynamic.state_dict()
    num_bytes = 2 * sum(value.nbytes for value in state.values())

    def check(_: object) -> None:
        loaded = stream.dynamic.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in state.items())

    load = Contender(OURS, lambda _: None, lambda _: stream.dynamic.load_state_dict(state), num_bytes, check)
    return [load, copy_contender(num_bytes, clock.device)]


def resident(tensor: Tensor) -> int:
    """Bytes of a tensor's pages that are in memory: those that nobody has written to are not."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * mmap.PAGESIZE), flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


def bench_memory_of_rows(race: Any) -> None:
    """Bytes per row beside weight and states, of all pages of a table that are in memory, while it fills.

    Measured first in this process: memory that others have freed counts as resident.
    """
    capacity, last, row_bytes = 1 << 20, 0, 4 * DIM + 4
    collection = te.nn.EmbeddingBagCollection(
        [te.TableConfig("t", None, DIM, capacity=capacity)], te.optim.RowWiseAdagrad()
    )
    table: Any = collection["t"]
    for share in (0.1, 0.25, 0.5, 0.9, 1.3):
        table.index.clock += 10  # so that earlier ones may be evicted
        for part in torch.arange(last, int(share * capacity)).split(1 << 14):
            table.insert(ids_of(part), torch.zeros(part.numel(), DIM))
        last, rows = int(share * capacity), table.num_rows
        num_bytes = sum(resident(tensor) for tensor in (*table.index.tensors, table.weight, *table.buffers()))
        op, shape = "dynamic table memory", f"{rows:,} of {capacity:,} rows, D{DIM}"
        race.target(op, shape, "bytes, of weight and states", num_bytes / rows / row_bytes, most=1.35)
        if rows >= capacity:
            race.target(op, shape, "bytes a row beside them", num_bytes / rows - row_bytes, most=21)


def bench_dynamic_table(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)


def bench_growth(race: Any) -> None:
    """Batches of 2,000 ids, 10 % new, while a table grows to ten times its size.

    The median of three runs: p99.9 is that of five batches, and what else the machine does decides some of them.
    """
    number, batch, shape = 5_000, 2_000, f"5,000 batches of 2,000 ids, D{DIM}"
    grad, names, result = torch.randn(batch, DIM), (OURS, "static table"), []
    for _ in range(3):
        stream, seconds = Stream(1_200_000, batch, 0.1, 100_000), ([], [])  # type: Stream, tuple[list[float], list[float]]
        for item in range(number):
            for of_model, model, features in zip(seconds, (stream.dynamic, stream.static), stream(item), strict=True):
                begin = time.perf_counter()
                model(features).backward(grad)
                of_model.append(1000 * (time.perf_counter() - begin))
        fused, static = (quantiles(call, n=1000)[998] / median(call) for call in seconds)
        result.append((fused / static, [Timing(name, tuple(call)) for name, call in zip(names, seconds, strict=True)]))
    ratio, timings = sorted(result, key=lambda call: call[0])[1]
    race.keep("dynamic table growth", shape, timings)
    race.target("dynamic table growth", shape, "p99.9 over median, of a static table's", ratio, most=1.5)


STEPS = 10  # of a sample: the peer evicts in one of them, or in each


class ManagedCollisions:
    """TorchRec's way to train ids of 64 bits: `MCHManagedCollisionModule` before FBGEMM's fused row-wise Adagrad.

    That is `ManagedCollisionEmbeddingBagCollection` by its parts, as it takes no fused tables. A new id gets a row when
    ids are evicted, every `interval` steps, and has the last row until then. Rows keep what evicted ids have trained.
    TorchRec's other module, MPZCH, trains on GPUs alone.
    """

    def __init__(self, capacity: int, ids: Tensor, policy: str, interval: int) -> None:
        modules, configs, fused, optimizers, self._jagged = (
            importlib.import_module(f"torchrec.{name}")
            for name in (
                "modules.mc_modules", "modules.embedding_configs", "modules.fused_embedding_modules", "optim",
                "sparse.jagged_tensor",
            )
        )  # fmt: skip
        table = configs.EmbeddingBagConfig(name="t", feature_names=["t"], num_embeddings=capacity, embedding_dim=DIM)
        evict = getattr(modules, f"{policy}_EvictionPolicy")()
        module = modules.MCHManagedCollisionModule(capacity, CPU, evict, interval)
        self._collisions = modules.ManagedCollisionCollection({"t": module}, [table])
        options = {"lr": OPTIMIZER.lr, "eps": OPTIMIZER.eps}
        self._tables = fused.FusedEmbeddingBagCollection([table], optimizers.RowWiseAdagrad, options, device=CPU)
        for call in self._tables.state_dict().values():
            call.zero_()
        for part in ids.chunk(interval):
            self._collisions(self.batch(part))

    def batch(self, ids: Tensor) -> Any:
        return self._jagged.KeyedJaggedTensor(["t"], ids, lengths=torch.ones(ids.numel(), dtype=torch.int32))

    def __call__(self, features: Any) -> Tensor:
        rows = self._collisions(features)
        self._collisions.evict()
        pooled: Tensor = self._tables(rows).values()
        return pooled


def managed_collisions(capacity: int, batch: int, interval: int) -> list[Contender]:
    """Steps with 1 % new ids, in tables that begin with zeros in three quarters of their rows; ours evicts by LRU."""
    stream = Stream(capacity, batch, 0.01, capacity * 3 // 4)
    grad, met, current = torch.randn(batch, DIM), stream.dynamic["t"].ids(), dict[int, list[Tensor]]()

    def prepare(make: Callable[[Tensor], Any], number: int) -> list[Any]:
        if number not in current:
            current.clear()
            current[number] = [stream(number * STEPS + call)[0].values() for call in range(STEPS)]
        return [make(ids) for ids in current[number]]

    def run(model: Any, batches: list[Any]) -> None:
        for features in batches:
            model(features).backward(grad)

    num_bytes = STEPS * batch * (8 + 4 * 4 * DIM)
    results = [Contender(OURS, partial(prepare, keyed), partial(run, stream.dynamic), num_bytes)]
    run(stream.dynamic, [keyed(met[:batch])])
    for policy in ("LRU", "LFU"):
        peer = ManagedCollisions(capacity, met, policy, interval)
        run(peer, [peer.batch(met[:batch])])
        reference, fused = peer(peer.batch(met[:batch])), stream.dynamic(keyed(met[:batch]))
        torch.testing.assert_close(reference, fused, rtol=1e-4, atol=1e-6)
        results.append(Contender(f"torchrec, {policy}", partial(prepare, peer.batch), partial(run, peer), num_bytes))
    return results


@pytest.mark.parametrize("interval", [1, STEPS])
def bench_managed_collisions(interval: int, race: Any) -> None:
    """Beside TorchRec, which evicts in every step, so that a new id has a row from the next one on, or in every tenth,
    until when new ids share a row."""
    pytest.importorskip("torchrec", reason="TorchRec, which `make bench` installs, is the peer")
    op, capacity = "dynamic table steps", 1 << 20
    shape = f"{STEPS} steps of {BATCH:,} ids, capacity {capacity:,}, D{DIM}, 1% new, theirs evicts every {interval}"
    result = managed_collisions(capacity, BATCH, interval)
    goals = [Goal(peer, 0, least=5.0) for peer in range(1, len(result))]
    race(op, shape, result, *goals, most_rounds=max(5, race.rounds // 4))
