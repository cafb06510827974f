"""Embedding servers: pulls, steps through them, and steps with rows that the trainer holds.

There is one server: a process of this machine, or a thread of this process. A run of steps begins with nothing
prefetched.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import tritonemb as te
from benchmarks.measuring.cases import OURS, equal
from benchmarks.measuring.clock import Contender
from benchmarks.measuring.result_files import Goal
from tritonemb import flight
from tritonemb.server import Servers
from tritonemb.server.launch import ServerProcess
from tritonemb.server.transport import FlightTransport

PULLED, PULL_DIM, CAPACITY = 50_000, 64, 1 << 20
BATCH_SIZE, STALENESS, MOST_ROUNDS = 2048, 4, 10
DIM, STEPS, ZIPF_EXPONENT, OPTIMIZER = 16, 20, 1.05, te.optim.RowWiseAdagrad(lr=0.02)


def add_rates(race: Any, unit: str, number: int) -> None:
    """Rates of the last benchmark's rows: of so many rows, bytes or steps in each round."""
    for row in race.rows:
        row[f"{unit}_per_s"] = number / row["p50_ms"] * 1e3
        print(f"{row['op']}, {row['implementation']}: {row['p50_ms']:.2f} ms, {row[f'{unit}_per_s']:,.0f} {unit}/s")


def serve_bytes(num_bytes: int, pipe: Any) -> None:
    """Of a process: send so many bytes to whoever asks."""
    data, token = np.ones(num_bytes, np.uint8), "x" * 32
    server = flight.start_server(lambda _: iter([({}, data)]), "grpc://127.0.0.1:0", token)
    pipe.send((f"grpc://127.0.0.1:{server.port}", token))
    pipe.recv()
    server.stop()


def bench_pull(race: Any) -> None:
    """From a process, against find and gather here, and a plain stream (DoGet) of as many bytes, each alone."""
    num_bytes, op, shape = PULLED * PULL_DIM * 4, "server pull", f"{PULLED:,} ids, capacity {CAPACITY:,}, D{PULL_DIM}"
    local, remote = (
        te.nn.EmbeddingBagCollection(
            [te.TableConfig("t", None, PULL_DIM, capacity=CAPACITY, placement=place)], OPTIMIZER
        )
        for place in ("device", "server")
    )
    table: Any = local["t"]
    ids, coming = torch.randint(-(2**63), 2**63 - 1, (CAPACITY * 7 // 8,)).unique(), list[Any]()
    pipe, other = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=serve_bytes, args=(num_bytes, other), daemon=True).start()
    client = flight.Client(*pipe.recv())
    with te.server.start(1, processes=True) as servers:
        te.server.attach(remote, servers, 1)
        service: Any = remote.table_set.service
        for part in ids.split(1 << 16):
            table.insert(part, *pull(service, [part]))

        def draw(number: int) -> Tensor:
            while coming:
                coming.pop().push(None, 0.0)
                service.flush()
            chosen = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(number))[:PULLED]
            return ids[chosen].sort().values

        def train(chosen: Tensor) -> Tensor:
            coming.append(service.pull([chosen], [torch.ones_like(chosen)], True))
            return coming[0].rows()[0]  # type: ignore[no-any-return]

        def find_and_gather(chosen: Tensor) -> Tensor:
            return F.embedding(table.index.find(chosen), table.weight.detach())

        check = equal(find_and_gather(draw(0)))
        contenders = [
            Contender(OURS, draw, train, num_bytes, check),
            Contender(
                f"{OURS}, evaluation", draw, lambda ids: service.pull([ids], [], False).rows()[0], num_bytes, check
            ),
            Contender("find and gather", draw, find_and_gather, num_bytes, check),
            Contender("stream", lambda _: None, lambda _: list(client.stream({})[0]), num_bytes),
        ]
        timings = race(op, shape, contenders)
    pipe.send(None)
    add_rates(race, "rows", PULLED)
    fused, _, single, sent = (timing.percentile(50) for timing in timings)
    race.target(op, shape, f"{OURS} / (find and gather + stream)", fused / (single + sent), most=1.25)


def bench_tier(race: Any) -> None:
    """Steps with rows that the trainer holds, and prefetches from a server, against tables in the host's memory.

    Trainer and server have a thread each, and the trainer one that prefetches. A cache of few rows lets most be read
    and written back in each step.
    """
    op, sizes, cache, token = "server tier", [60_000] * 8, te.CacheConfig(rows=4_000), "x" * 32
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        process = ServerProcess(token, threads=1)
        with Servers([FlightTransport(process.address, token)], [process], 60.0, token) as servers:
            options = {"cache": cache, "prefetch": 2, "layers": (512, 256)}
            places = {
                OURS: Training(sizes, servers, **options),
                "host memory": Training(sizes, place="host", **options),
            }
            contenders = [training.contender(name) for name, training in places.items()]
            shape = f"{STEPS} steps, 8 tables of 60,000 rows, D{DIM}, batch 2048, cache of 4,000 rows"
            race(op, shape, contenders, Goal(0, 1, most=1 / 0.9), most_rounds=MOST_ROUNDS)
    finally:
        torch.set_num_threads(threads)
    add_rates(race, "steps", STEPS)


def bench_step(race: Any) -> None:
    """Steps through a server in a thread, and in a process, against those on the device."""
    op, sizes = "server step", [100_000] * 26
    shape = f"{STEPS} steps, 26 tables of 100,000 rows, D{DIM}, batch 2048, staleness {STALENESS}"
    with te.server.start(1) as threads, te.server.start(1, processes=True) as processes:
        places = {f"{OURS}, thread": threads, f"{OURS}, process": processes, "device": None}
        contenders = [
            Training(sizes, place, STALENESS if place else 0).contender(name) for name, place in places.items()
        ]
        race(op, shape, contenders, most_rounds=MOST_ROUNDS)
    add_rates(race, "steps", STEPS)


class Training:
    """Tables of so many rows, all of which have been trained at least once, and a small dense network.

    `prefetch`: so many steps are prefetched by a thread; else, with some staleness, as many are pulled ahead.
    """

    def __init__(
        self, sizes: Sequence[int], servers: Servers | None = None, staleness: int = 0,
        cache: te.CacheConfig | None = None, place: str = "device", layers: Sequence[int] = (64,), prefetch: int = 0,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        names, place = [f"t{n}" for n in range(len(sizes))], place if servers is None else "server"
        named_sizes = zip(names, sizes, strict=True)
        tables = [te.TableConfig(*of, DIM, placement=place, cache=cache or te.CacheConfig()) for of in named_sizes]
        self.embeddings = te.nn.EmbeddingBagCollection(tables, OPTIMIZER)
        self.dense = te.nn.MLP(DIM * len(sizes), [*layers, 1], last_activation=False)
        self.optimizer, self.labels = torch.optim.SGD(self.dense.parameters(), lr=0.01), torch.ones(BATCH_SIZE, 1)
        self.sizes, self.num_ids = sizes, len(sizes) * BATCH_SIZE
        self.ahead = prefetch or staleness
        self._thread = ThreadPoolExecutor(1) if prefetch else None
        self._names, self._lengths = names, torch.ones(self.num_ids, dtype=torch.int64)
        if servers is not None:
            te.server.attach(self.embeddings, servers, staleness)
            self.service: Any = self.embeddings.table_set.service
            # Where the trainer holds rows, no more than a batch has.
            at_once = (1 << 20) // len(sizes) if self.service.applies_updates else BATCH_SIZE
            for ids in torch.arange(sizes[0]).split(at_once):
                if self.service.applies_updates:
                    pull(self.service, [ids] * len(sizes))
                else:
                    lengths = torch.full((len(sizes),), ids.numel())
                    batch = te.KeyedJaggedTensor(names, ids.repeat(len(sizes)), lengths=lengths)
                    self.embeddings(batch).sum().backward()
            te.server.flush(self.embeddings)  # they all have rows there now

    def draw(self, number: int) -> te.KeyedJaggedTensor:
        """A batch."""
        cumulative, rows = zipf(self.sizes[0])
        drawn = torch.rand(self.num_ids, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        ids = rows[torch.searchsorted(cumulative, drawn)]
        return te.KeyedJaggedTensor.from_lengths(self._names, ids, self._lengths)

    def run(self, batches: Sequence[te.KeyedJaggedTensor]) -> None:
        waiting: deque[Any] = deque()
        for batch in batches:
            waiting.append(self._prefetched(batch) if self.ahead else batch)
            if len(waiting) > self.ahead:
                self._step(waiting.popleft())
        while waiting:
            self._step(waiting.popleft())

    def _prefetched(self, batch: te.KeyedJaggedTensor) -> Any:
        if self._thread is None:
            return te.nn.prefetch(self.embeddings, batch)
        return self._thread.submit(te.nn.prefetch, self.embeddings, batch, te.nn.sequence_number())

    def _step(self, batch: Any) -> None:
        batch = batch.result() if isinstance(batch, Future) else batch
        self.optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(self.dense(self.embeddings(batch)), self.labels).backward()
        self.optimizer.step()

    def contender(self, name: str) -> Contender:
        return Contender(name, lambda n: [self.draw(n * STEPS + item) for item in range(STEPS)], self.run)


@functools.cache
def zipf(num_rows: int) -> tuple[Tensor, Tensor]:
    """Cumulative probability of ranks, and the row of each rank."""
    cumulative = (torch.arange(1, num_rows + 1, dtype=torch.float64) ** -ZIPF_EXPONENT).cumsum(0)
    return cumulative / cumulative[-1], torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))


def pull(service: Any, ids: Sequence[Tensor]) -> list[Tensor]:
    """Rows of a batch that is not trained then; new ids get theirs."""
    coming = service.pull(ids, list(map(torch.ones_like, ids)), True)
    rows: list[Tensor] = coming.rows()
    coming.push(None, 0.0)
    return rows
