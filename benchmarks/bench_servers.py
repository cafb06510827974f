"""Embedding servers: pulls, a slow network, a trainer's cache, snapshots, large tables, and whole steps.

There is one server: a process of this machine, or a thread of this process. A run of steps begins with nothing
prefetched. Large tables have 10^7 rows, or TRITONEMB_SERVER_ROWS; snapshots are in a temporary folder, or
TRITONEMB_STORAGE_FOLDER.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import tritonemb as te
from benchmarks.measuring.cases import OURS, equal
from benchmarks.measuring.clock import Contender, Timing, measure
from benchmarks.measuring.result_files import at_least, at_most, timing_rows
from tritonemb import flight
from tritonemb.server import AtMost, EmbeddingServer, Servers
from tritonemb.server.launch import ServerProcess
from tritonemb.server.transport import FlightServer, FlightTransport, LocalTransport, Message, Transport

NUM_ROWS = int(os.environ.get("TRITONEMB_SERVER_ROWS", 10**7))
FOLDER = os.environ.get("TRITONEMB_STORAGE_FOLDER")
PULLED, PULL_DIM, CAPACITY = 50_000, 64, 1 << 20
STALENESS, CACHE_STEPS, MOST_ROUNDS, FEW_ROUNDS = 4, 100, 10, 3


def figure(op: str, shape: str, measured: str, ratio: float, target: str, met: bool) -> dict[str, Any]:
    print(f"{op}: {measured} = {ratio:.4f}")
    return {"op": op, "shape": shape, "measured": measured, "ratio": ratio, "target": target, "met": met}


def rows_of(op: str, shape: str, timings: Sequence[Timing], unit: str, number: int, num_bytes: int = 0) -> Any:
    """With rates: of so many rows, bytes or samples in each round."""
    found = timing_rows(op, shape, timings, {timing.name: num_bytes for timing in timings})
    for row in found:
        row[f"{unit}_per_s"] = number / row["p50_ms"] * 1e3
        print(f"{op}, {row['implementation']}: {row['p50_ms']:.2f} ms, {row[f'{unit}_per_s']:,.0f} {unit}/s")
    return found


def serve_bytes(num_bytes: int, pipe: Any) -> None:
    """Of a process: send so many bytes to whoever asks."""
    data = np.ones(num_bytes, np.uint8)
    with FlightServer(None, answer=lambda _: iter([({}, data)])) as server:  # type: ignore[arg-type]
        pipe.send((server.address, server.token))
        pipe.recv()


def bench_pull(benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    """From a process, against find and gather here, and a plain stream (DoGet) of as many bytes, each alone."""
    num_bytes, op, shape = PULLED * PULL_DIM * 4, "server pull", f"{PULLED:,} ids, capacity {CAPACITY:,}, D{PULL_DIM}"
    here, there = (
        te.nn.EmbeddingBagCollection(
            [te.TableConfig("t", None, PULL_DIM, capacity=CAPACITY, placement=place)], OPTIMIZER
        )
        for place in ("device", "server")
    )
    table: Any = here["t"]
    ids, coming = torch.randint(-(2**63), 2**63 - 1, (CAPACITY * 7 // 8,)).unique(), list[Any]()
    pipe, other = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=serve_bytes, args=(num_bytes, other), daemon=True).start()
    client = flight.Client(*pipe.recv())
    with te.server.start(1, processes=True) as servers:
        te.server.attach(there, servers, 1)
        service: Any = there.table_set.service
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
            return F.embedding(table.find(chosen), table.weight.detach())

        check = equal(find_and_gather(draw(0)))
        contenders = [
            Contender(OURS, draw, train, check=check),
            Contender(f"{OURS}, evaluation", draw, lambda ids: service.pull([ids], [], False).rows()[0], check=check),
            Contender("find and gather", draw, find_and_gather, check=check),
            Contender("stream", lambda _: None, lambda _: list(client.stream({})[0])),
        ]
        timings = measure(benchmark, contenders, rounds)
    pipe.send(None)
    ours, _, alone, sent = (timing.percentile(50) for timing in timings)
    ratio = ours / (alone + sent)
    target = figure(op, shape, f"{OURS} / (find and gather + stream)", ratio, "at most 1.25", ratio <= 1.25)
    record(rows_of(op, shape, timings, "rows", PULLED, num_bytes), [target])


def bench_tier(benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    """Steps with rows that the trainer holds, and prefetches from a server, against tables in the host's memory.

    Trainer and server have a thread each, and the trainer one that prefetches. A cache of few rows lets most be read
    and written back in each step.
    """
    op, sizes, cache, token = "server tier", [60_000] * 8, te.CacheConfig(rows=4_000), "x" * 32
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        process = ServerProcess(token, threads=1)
        with Servers([FlightTransport(process.address, token)], [process], 60.0, token) as servers:
            how = {"cache": cache, "prefetch": 2, "layers": (512, 256)}
            places = {OURS: Training(sizes, servers, **how), "host memory": Training(sizes, place="host", **how)}
            contenders = [training.contender(name) for name, training in places.items()]
            timings = measure(benchmark, contenders, min(rounds, MOST_ROUNDS))
            statistics, steps = (
                getattr(places["host memory"].embeddings, name) for name in ("cache_statistics", "step")
            )
    finally:
        torch.set_num_threads(before)
    moved = sum(each.read + each.written for each in statistics().values()) / int(steps)
    shape = f"{STEPS} steps, 8 tables of 60,000 rows, D{DIM}, batch 2048, {moved / 1e6:.1f} MB moved a step"
    record(rows_of(op, shape, timings, "steps", STEPS), [at_most(op, shape, *timings, 1 / 0.9)])


def bench_delay(benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    """Steps over a slow network: pulled ahead; each waiting for its pull; and with rows that the trainer holds."""
    op, batch_size, steps, contenders = "server delay", 512, 5 * STEPS, []
    few = te.CacheConfig(rows=1)  # or most rows would not be sent
    with ExitStack() as stack:
        for staleness, name, cache in (
            (STALENESS, f"{OURS}, {STALENESS} ahead", None), (AtMost(0), "synchronous", None),
            (0, f"{OURS}, rows held", few),
        ):  # fmt: skip
            server = EmbeddingServer()
            servers = stack.enter_context(Servers([DelayedTransport(LocalTransport(server))], [server]))
            training = Training([100_000], servers, staleness, batch_size, cache=cache)
            contenders.append(training.contender(name, steps=steps))
        timings = measure(benchmark, contenders, min(rounds, MOST_ROUNDS))
    shape = f"{steps} steps of {batch_size} ids, {DELAY * 1e3:.0f} ms each way, 100,000 rows, D{DIM}"
    record(rows_of(op, shape, timings, "steps", steps), [at_least(op, shape, timings[0], timings[1:2], 3.0)])


def bench_cache(benchmark: Any, record: Callable[..., None]) -> None:
    """Bytes of rows that do not cross the network to a trainer with a cache; it prefetches none."""
    num_rows, bag = 10**6, 8
    with te.server.start(1) as servers:
        training = Training(
            [num_rows], servers, AtMost(STALENESS), bag=bag, cache=te.CacheConfig(rows=num_rows), warm=False
        )
        batches = [training.draw(number) for number in range(CACHE_STEPS)]
        benchmark.pedantic(training.run, args=(batches,), rounds=1)
        (cache,) = training.service.caches
    ratio = cache.rows_saved / saved_by_oracle([batch.values() for batch in batches], num_rows, STALENESS)
    shape = f"{CACHE_STEPS} steps of 2048 x {bag} ids, Zipf {ZIPF_EXPONENT}, {num_rows:,} rows, AtMost({STALENESS})"
    share = figure(
        "server cache", shape, "bytes saved, of all", cache.rows_saved / cache.rows_read, "above 0", ratio > 0
    )
    record(
        [], [figure("server cache", shape, "bytes saved, of an oracle's", ratio, "at least 0.9", ratio >= 0.9), share]
    )


def read_plainly(path: Path) -> None:
    buffer = bytearray(16 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def bench_snapshots(benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    """Bytes of an incremental snapshot; and a server that is started on a whole one, against a plain read of the file.

    Before each of both the system's page cache forgets the file.
    """
    op, shape, started = "server snapshot", f"{NUM_ROWS:,} rows, D{DIM}", list[EmbeddingServer]()
    with tempfile.TemporaryDirectory(dir=FOLDER) as parent:
        folder, (whole, changes) = Path(parent, "server"), (Path(parent, name) for name in ("whole-", "changes-"))
        server = EmbeddingServer(folder=folder)
        with Servers([LocalTransport(server)], [server], patience=300.0) as servers:
            service = Training([NUM_ROWS], servers, 1).service
            service.snapshot(whole)
            pull(service, [torch.randperm(NUM_ROWS)[: NUM_ROWS // 100].sort().values])
            service.snapshot(changes, changes_only=True)
            small, large = (Path(f"{path}0.server").stat().st_size for path in (changes, whole))
            service.restore([[Path(f"{whole}0.server")]], service.steps)  # so that the state has a whole one, too
            servers.connections[0].submit("save", {}).result()
        path = max(folder.glob("*.rows"), key=lambda path: path.stat().st_size)

        def prepare(_: int) -> None:
            while started:
                started.pop().close()
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        contenders = [
            Contender(OURS, prepare, lambda _: started.append(EmbeddingServer(folder=folder))),
            Contender("read", prepare, lambda _: read_plainly(path)),
        ]
        timings = measure(benchmark, contenders, min(rounds, FEW_ROUNDS), 1)
        rows = rows_of("server restore", shape, timings, "bytes", path.stat().st_size, path.stat().st_size)
        prepare(0)
    share = figure(op, shape, "bytes of 1 % of the rows, of all", small / large, "at most 1/70", small * 70 <= large)
    record(rows, [share, at_most("server restore", shape, timings[0], timings[1], 1 / 0.7)])


def bench_follower(benchmark: Any, record: Callable[..., None]) -> None:
    """The age of what a follower serves, while a few steps are trained and published once a second."""
    num_rows, seconds, ages = NUM_ROWS // 10, 30, list[float]()
    with te.server.start(1, processes=True) as servers, tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        training, publisher = Training([num_rows], servers, 1, bag=8), te.server.Publisher(folder)
        publisher.publish(training.embeddings)
        ended = threading.Event()

        def publish() -> None:
            number, begin = 0, time.monotonic()
            while not ended.wait(max(0.0, begin + number - time.monotonic())):
                training.run([training.draw(2 * number), training.draw(2 * number + 1)])
                publisher.publish(training.embeddings)
                number += 1

        with te.server.Follower(folder) as follower:
            thread = threading.Thread(target=publish)
            thread.start()

            def watch() -> None:
                for _ in range(seconds * 100):
                    time.sleep(0.01)
                    ages.append(follower.age or 0.0)

            benchmark.pedantic(watch, rounds=1)
            ended.set()
            thread.join()
            assert follower.problem is None
            assert follower.increments > seconds // 2
    age = float(np.percentile(ages[200:], 99))
    shape = f"{num_rows:,} rows, D{DIM}, 2 steps of 2048 x 8 ids and a snapshot each second"
    record([], [figure("server follower", shape, "age in seconds, p99", age, "at most 2", age <= 2)])


def bench_large_table(benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    """Steps on a large table of a process, against those on a small one of another."""
    op, bag, contenders = "server large table", 8, []
    with ExitStack() as stack:
        for num_rows in (NUM_ROWS, NUM_ROWS // 10):
            training = Training([num_rows], stack.enter_context(te.server.start(1, processes=True)), STALENESS, bag=bag)
            contenders.append(training.contender(f"{num_rows:,} rows", uniform=True))
        timings = measure(benchmark, contenders, min(rounds, MOST_ROUNDS))
    shape = f"{STEPS} steps of 2048 x {bag} ids, D{DIM}, staleness {STALENESS}"
    record(rows_of(op, shape, timings, "samples", STEPS * 2048), [at_most(op, shape, *timings, 1 / 0.7)])


def bench_step(benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    """Steps through a server in a thread, and in a process, against those on the device."""
    op, sizes = "server step", [100_000] * 26
    with te.server.start(1) as threads, te.server.start(1, processes=True) as processes:
        places = {f"{OURS}, thread": threads, f"{OURS}, process": processes, "device": None}
        contenders = [Training(sizes, each, STALENESS if each else 0).contender(name) for name, each in places.items()]
        timings = measure(benchmark, contenders, min(rounds, MOST_ROUNDS))
    shape = f"{STEPS} steps, 26 tables of 100,000 rows, D{DIM}, batch 2048, staleness {STALENESS}"
    record(rows_of(op, shape, timings, "steps", STEPS))


DIM, STEPS, ZIPF_EXPONENT, OPTIMIZER = 16, 20, 1.05, te.optim.RowWiseAdagrad(lr=0.02)
DELAY = 0.005  # seconds


class Training:
    """Tables of so many rows, of each a bag of `bag` ids a sample, and a small dense network.

    `warm`: all rows are trained at least once. `prefetch`: so many steps are prefetched by a thread; else, with some
    staleness, as many are pulled ahead.
    """

    def __init__(
        self, sizes: Sequence[int], servers: Servers | None = None, staleness: Any = 0, batch_size: int = 2048,
        bag: int = 1, cache: te.CacheConfig | None = None, warm: bool = True, place: str = "device",
        layers: Sequence[int] = (64,), prefetch: int = 0,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        names, place = [f"t{n}" for n in range(len(sizes))], place if servers is None else "server"
        made = zip(names, sizes, strict=True)
        tables = [te.TableConfig(*of, DIM, placement=place, cache=cache or te.CacheConfig()) for of in made]
        self.embeddings = te.nn.EmbeddingBagCollection(tables, OPTIMIZER)
        self.dense = te.nn.MLP(DIM * len(sizes), [*layers, 1], last_activation=False)
        self.optimizer, self.labels = torch.optim.SGD(self.dense.parameters(), lr=0.01), torch.ones(batch_size, 1)
        self.sizes, self.num_ids = sizes, len(sizes) * batch_size * bag
        self.ahead = prefetch or (staleness if isinstance(staleness, int) else 0)
        self._thread = ThreadPoolExecutor(1) if prefetch else None
        self._names, self._lengths = names, torch.full((len(sizes) * batch_size,), bag)
        if servers is not None:
            te.server.attach(self.embeddings, servers, staleness)
            self.service: Any = self.embeddings.table_set.service
            at_once = (
                (1 << 20) // len(sizes) if self.service.applies_updates else batch_size
            )  # no more than a batch has
            for ids in torch.arange(sizes[0] if warm else 0).split(at_once):
                if self.service.applies_updates:
                    pull(self.service, [ids] * len(sizes))
                else:
                    lengths = torch.full((len(sizes),), ids.numel())
                    batch = te.KeyedJaggedTensor(names, ids.repeat(len(sizes)), lengths=lengths)
                    self.embeddings(batch).sum().backward()
            te.server.flush(self.embeddings)  # they all have rows there now

    def draw(self, number: int, uniform: bool = False) -> te.KeyedJaggedTensor:
        """A batch."""
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(self.sizes[0], (self.num_ids,), generator=generator)
        if not uniform:
            cumulative, rows = zipf(self.sizes[0])
            drawn = torch.rand(self.num_ids, generator=generator, dtype=torch.float64)
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

    def contender(self, name: str, uniform: bool = False, steps: int = STEPS) -> Contender:
        return Contender(name, lambda n: [self.draw(n * steps + each, uniform) for each in range(steps)], self.run)


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


class Line:
    """Brings messages to `deliver` in their order, each after `DELAY`; a channel."""

    def __init__(self, deliver: Callable[[Message], None]) -> None:
        self._deliver, self._queue = deliver, SimpleQueue[tuple[float, Message] | None]()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, message: Message) -> None:
        self._queue.put((time.monotonic() + DELAY, message))

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            time.sleep(max(0.0, item[0] - time.monotonic()))
            self._deliver(item[1])


class DelayedTransport:
    """Another transport, whose messages take `DELAY` each way."""

    def __init__(self, transport: Transport) -> None:
        self.address, self._transport = transport.address, transport

    def open(self, receive: Callable[[Message], None], lost: Callable[[Exception], None]) -> Line:
        return Line(self._transport.open(Line(receive).send, lost).send)


def saved_by_oracle(batches: Sequence[Tensor], num_rows: int, window: int) -> int:
    """Rows that need not be read again, as they were read at most so many steps ago."""
    saved, last = 0, torch.full((num_rows,), -window - 1)
    for step, ids in enumerate(batches):
        distinct = ids.unique()
        due = distinct[step - last[distinct] > window]
        saved, last[due] = saved + distinct.numel() - due.numel(), step
    return saved
