"""Training through embedding servers, in small; a network that is slow; and what a trainer's cache can save."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tritonemb as te
from benchmarks.clock import Contender
from tritonemb.server import Servers
from tritonemb.server.transport import Message, Transport

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
