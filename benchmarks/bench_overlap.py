"""How much of the exchanges of a DLRM is hidden behind its bottom MLP, on a network of given latency and bandwidth.

The ranks are processes of this machine, joined by gloo; every message between tables and samples is held back as long
as such a network would take for it. Three steps are timed in turn: without a network (compute), with it, and with it
where each exchange is waited for at once. The bottom MLP is made so wide that it takes at least as long as the
exchanges. Targets: 80 % of the exchanges hidden, and a step of at most 1.1 times what computes without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import tritonemb as te
from benchmarks.clock import Timing
from benchmarks.record import at_most, timing_rows
from tests.ranks import Ranks
from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import OutputExchange
from tritonemb.sharding import ShardingPlan, TableWise

NUM_TABLES, DIM, BATCH_SIZE, NUM_DENSE, WIDTH = 16, 64, 512, 64, 1536
LATENCY, BANDWIDTH = 5e-3, 25e6  # seconds, bytes a second
MOST = 1.1  # times the step without a network
LEAST_HIDDEN = 0.8
NAMES = ("network, overlapped", "network, waited for at once", "compute")


@contextmanager
def network(held_back: list[float]) -> Iterator[None]:
    """Hold messages of the output exchanges back as a network would; lists the seconds of each."""
    start = RankGroup.start_all_to_all

    def slowly(group: Any, message: Any, send: Any, receive: Any, kind: str) -> Callable[[], Any]:
        arrive = start(group, message, send, receive, kind)
        if not kind.startswith("pooled"):
            return arrive
        others = sum(send) - send[group.rank], sum(receive) - receive[group.rank]
        seconds = LATENCY + max(others) * message.element_size() / BANDWIDTH
        due = time.perf_counter() + seconds
        held_back.append(seconds)

        def wait() -> Any:
            time.sleep(max(0.0, due - time.perf_counter()))
            return arrive()

        return wait

    with mock.patch.object(RankGroup, "start_all_to_all", slowly):
        yield


def waited_for(self: Any, values: Any, batch: Any, back: bool) -> Any:
    return (self.send_back if back else self.send)(values, batch)()


def time_steps(rank: int, world: int, rounds: int) -> tuple[list[list[float]], float]:
    """Seconds of each step of each kind, and of the network in a step."""
    torch.manual_seed(0)
    tables = [te.TableConfig(f"t{n}", 10_000, DIM) for n in range(NUM_TABLES)]
    model = te.nn.DLRM(tables, NUM_DENSE, (WIDTH, WIDTH), (64,), te.optim.RowWiseAdagrad(lr=0.1))
    plan = ShardingPlan({table.name: TableWise(n % world) for n, table in enumerate(tables)}, world)
    parallel = te.HybridParallel(model, plan)
    ids = torch.randint(10_000, (NUM_TABLES * BATCH_SIZE,))
    sparse = te.KeyedJaggedTensor([table.name for table in tables], ids, lengths=torch.ones_like(ids))
    dense, labels = torch.randn(BATCH_SIZE, NUM_DENSE), torch.rand(BATCH_SIZE).round()
    held_back = list[float]()

    def step() -> float:
        features = parallel.prefetch(sparse)
        parallel.group.barrier()
        begin = time.perf_counter()
        F.binary_cross_entropy_with_logits(parallel(dense, features), labels).backward()
        return time.perf_counter() - begin

    found: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        held_back.clear()
        with network(held_back):
            found[0].append(step())
            with mock.patch.object(OutputExchange, "exchange", waited_for):
                found[1].append(step())
        found[2].append(step())
    return found, sum(held_back) / 2


@pytest.mark.parametrize("world", [2, 4])
def bench_overlap(world: int, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    ranks = Ranks(world)
    try:
        by_rank = ranks.run(time_steps, world, rounds + 2)
    finally:
        ranks.close()
    # All ranks wait for the slowest.
    steps = [[max(each) for each in zip(*(found[kind] for found, _ in by_rank), strict=True)][2:] for kind in range(3)]
    timings = [Timing(name, tuple(1000 * s for s in each)) for name, each in zip(NAMES, steps, strict=True)]
    benchmark.pedantic(lambda: None, rounds=1)
    on_network = max(seconds for _, seconds in by_rank)
    shape = f"DLRM, {world} ranks, B{BATCH_SIZE} T{NUM_TABLES} D{DIM}, MLP {WIDTH}, {1000 * on_network:.0f} ms sent"
    hidden = (median(steps[1]) - median(steps[0])) / on_network
    share = {"op": "overlap", "shape": shape, "measured": "share of the exchanges that is hidden", "ratio": hidden}
    targets = [
        at_most("overlap", shape, timings[0], timings[2], MOST),
        share | {"target": f"at least {LEAST_HIDDEN:g}", "met": hidden >= LEAST_HIDDEN},
    ]
    record(timing_rows("overlap", shape, timings, dict.fromkeys(NAMES, 0)), targets)
