"""A small job: a collection on embedding servers, its batches, and trainers that are threads."""

from __future__ import annotations

import queue
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import tritonemb as te
from tests.helpers import DEADLINE, assert_same_bits
from tritonemb.comm.output_exchange import EXACT
from tritonemb.server import Servers, attach, connection, flush
from tritonemb.server.node import EmbeddingServer
from tritonemb.server.transport import LocalTransport, Message

KEYS = ("a", "b", "c")
Outputs = list[Tensor]


class Trainers(NamedTuple):
    """As of a `RankGroup`."""

    rank: int = 0
    size: int = 1

    def all_gather_object(self, value):
        return [value] * self.size


ALONE = Trainers()


def make(
    servers: Servers | None,
    staleness=0,
    optimizer=None,
    dynamic: dict | None = None,
    group=ALONE,
    accumulate=1,
    cache: int | None = None,
    exchange=EXACT,
    attached: bool = True,
) -> te.nn.EmbeddingBagCollection:
    """Two static tables and perhaps a dynamic one, with initial values of a fixed seed."""
    place = {} if servers is None else {"placement": "server", "cache": te.CacheConfig(rows=cache)}
    tables = [
        te.TableConfig("a", 300, 6, features=["a", "c"], **place),
        te.TableConfig("b", 9_000, 4, pooling="mean", **place),
    ]
    if dynamic is not None:
        tables.append(te.TableConfig("d", None, 8, features=["a"], **dynamic, **place))
    torch.manual_seed(3)
    collection = te.nn.EmbeddingBagCollection(tables, optimizer or te.optim.Adagrad(lr=0.1))
    if servers is not None and attached:
        attach(collection, servers, staleness, accumulate=accumulate, group=group, exchange=exchange)
    return collection


def batches(number: int, trainer: int = 0, size: int = 6, most: int = 300) -> Iterator[te.KeyedJaggedTensor]:
    """Of a trainer, with ids that come again."""
    generator = torch.Generator().manual_seed(100 + trainer)
    for step in range(number):
        lengths = torch.randint(0, 4, (len(KEYS) * size,), generator=generator)
        ids = torch.randint(0, most, (int(lengths.sum()),), generator=generator)
        yield te.KeyedJaggedTensor(KEYS, (ids * 17 + step * 3) % most, lengths=lengths)


def train(
    collection: te.nn.EmbeddingBagCollection, steps: int, ahead: int = 0, trainer: int = 0, most: int = 300,
    on_step: Callable[[], object] = lambda: None,
) -> Outputs:  # fmt: skip
    """What each step has read; batches are pulled so many steps ahead. `on_step` is called before each batch."""
    outputs, waiting, coming = [], [], batches(steps, trainer, most=most)
    for batch in coming:
        on_step()
        waiting.append(te.nn.prefetch(collection, batch) if ahead else batch)
        if len(waiting) > ahead:
            outputs.append(_step(collection, waiting.pop(0)))
    return outputs + [_step(collection, batch) for batch in waiting]


def _step(collection: te.nn.EmbeddingBagCollection, batch) -> Tensor:
    output = collection(batch)
    (output.square() + output).sum().backward()
    return output.detach()


def train_all(
    servers: Servers, steps: int, trainers: int = 1, staleness=0, ahead: int = 0,
    on_step: Callable[[], object] = lambda: None, **how,
) -> tuple[list[Outputs], dict[str, Tensor]]:  # fmt: skip
    """What the trainers have read, and the tables after all their steps."""
    models = [make(servers, staleness, group=Trainers(rank, trainers), **how) for rank in range(trainers)]
    outputs: list[Outputs | BaseException] = [[] for _ in models]

    def run(rank: int) -> None:
        try:
            outputs[rank] = train(models[rank], steps, ahead, rank, on_step=on_step)
            flush(models[rank])
        except BaseException as error:
            outputs[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * DEADLINE)  # it may wait for several processes that start
        assert not thread.is_alive()
    for result in outputs:
        if isinstance(result, BaseException):
            raise result
    return outputs, {name: value.clone() for name, value in models[0].state_dict().items()}


def train_on(servers: int, steps: int, **how) -> tuple[list[Outputs], dict[str, Tensor]]:
    """`train_all` on so many undisturbed servers in this process."""
    with local_servers(servers) as connections:
        return train_all(connections, steps, **how)


def outputs_on(servers: int, staleness: int, *steps: int) -> Outputs:
    """What an undisturbed trainer reads that trains so many steps, and so many more, each time from the first batch."""
    with local_servers(servers) as connections:
        model = make(connections, staleness)
        return [output for number in steps for output in train(model, number)]


def same(found: tuple[list[Outputs], dict[str, Tensor]], expected: tuple[list[Outputs], dict[str, Tensor]]) -> None:
    """Check that two results of `train_all` have the same bits."""
    outputs, state = found
    assert all(
        torch.equal(*pair) for item in zip(outputs, expected[0], strict=True) for pair in zip(*item, strict=True)
    )
    assert_same_bits(state, expected[1])


class RawClient:
    """Sends a server what it is told, whatever that is, and has its answers."""

    def __init__(self, server: EmbeddingServer, name: str = "raw") -> None:
        self.server, self.name, self.number = server, name, 0
        self.answers: queue.Queue[Message] = queue.Queue()

    def receive(self, values: dict, tensors=()) -> tuple[dict, list[Tensor]]:
        self.server.receive(({"client": self.name, **values}, list(tensors)), self.answers.put)
        return self.answers.get(timeout=DEADLINE)

    def query(self, op: str, **values) -> dict:
        return self.receive({"op": op, "query": 0, **values})[0]

    def send(self, op: str, tensors=(), **values) -> dict:
        """The next message's answer."""
        self.number += 1
        return self.receive({"op": op, "number": self.number - 1, "received": 0, **values}, tensors)[0]


class Faults(NamedTuple):
    """Probabilities: of a message to be lost, to come twice, and to come late; and of the channel to be cut."""

    lost: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    cut: float = 0.0
    delay: float = 0.01


class FaultyTransport:
    """A server in this process, behind a network that is as bad as `faults` say."""

    def __init__(self, server: EmbeddingServer, faults: Faults, seed: int) -> None:
        self.address, self._server, self._faults = server.name, server, faults
        self._random, self._lock = random.Random(seed), threading.Lock()

    def open(self, receive: Callable[[Message], None], lost: Callable[[Exception], None]) -> _FaultyChannel:
        return _FaultyChannel(self, receive, lost)

    def carry(self, message: Message, deliver: Callable[[Message], None]) -> bool:
        """Deliver a message, or not; whether the channel is cut instead."""
        with self._lock:
            lost, twice, late, cut = (self._random.random() for _ in range(4))
        if cut < self._faults.cut:
            return True
        if lost < self._faults.lost:
            return False
        for number in range(2 if twice < self._faults.twice else 1):
            if late < self._faults.late or number:
                threading.Timer(self._faults.delay, deliver, (message,)).start()
            else:
                deliver(message)
        return False

    def send(self, message: Message, reply: Callable[[Message], None]) -> None:
        self._server.receive(message, reply)


class _FaultyChannel:
    def __init__(self, transport: FaultyTransport, receive, lost) -> None:
        self._transport, self._receive, self._lost, self._open = transport, receive, lost, True

    def send(self, message: Message) -> None:
        if not self._open:
            raise ConnectionError("cut")
        if self._transport.carry(message, lambda inputs: self._transport.send(inputs, self._back)):
            self.close()
            self._lost(ConnectionError("cut"))

    def _back(self, message: Message) -> None:
        if self._open and self._transport.carry(message, self._deliver):
            self.close()
            self._lost(ConnectionError("cut"))

    def _deliver(self, message: Message) -> None:
        if self._open:
            self._receive(message)

    def close(self) -> None:
        self._open = False


@contextmanager
def quick_resending() -> Iterator[None]:
    """What is lost is soon sent again."""
    initial = connection.TICK, connection.RESEND_AFTER
    connection.TICK, connection.RESEND_AFTER = 0.02, 0.1
    try:
        yield
    finally:
        connection.TICK, connection.RESEND_AFTER = initial


@contextmanager
def local_servers(
    number: int, faults: Faults | None = None, seed: int = 0, patience: float = DEADLINE
) -> Iterator[Servers]:
    """Servers in this process; over a bad network what is lost is soon sent again."""
    local = [EmbeddingServer(f"server-{index}") for index in range(number)]
    transports = [
        LocalTransport(server, server.name) if faults is None else FaultyTransport(server, faults, seed + index)
        for index, server in enumerate(local)
    ]
    with nullcontext() if faults is None else quick_resending(), Servers(transports, local, patience) as servers:
        yield servers


class Restarted:
    """A server with a folder that is lost, and started again, when it has taken so many messages, and later again."""

    def __init__(self, folder: Path, log: str, every: int, lose: bool = False) -> None:
        self.address, self._folder, self._log, self._every, self._lose = folder.name, folder, log, every, lose
        self.server = EmbeddingServer(self.address, folder, log)
        self.taken, self.times, self._lock = 0, 0, threading.Lock()
        self._restarting: threading.Thread | None = None

    def open(self, receive, lost):
        return _RestartedChannel(self, receive)

    def receive(self, message, reply) -> None:
        with self._lock:
            self.taken += 1
            lost, server = None, self.server
            if self.taken >= self._every and server is not None:  # and the next time when it has been told all again
                self._every = self.taken * 3 // 2 + 5
                lost, server, self.server = server, None, None
        if lost is not None:  # another thread may be answering a client that waits for this one
            self._restarting = threading.Thread(target=self.restart, args=(lost,))
            self._restarting.start()
        if server is not None:
            server.receive(message, lambda answer: reply(answer) if server is self.server else None)

    def restart(self, lost: EmbeddingServer | None = None) -> None:
        lost = self.server if lost is None else lost
        lost.close()  # between two messages; of what it has answered by now nothing arrives
        if self._lose:
            shutil.rmtree(self._folder)
        self.times += 1
        self.server = EmbeddingServer(self.address, self._folder, self._log)

    def close(self) -> None:
        if self._restarting is not None:
            self._restarting.join()
        self.server.close()


class _RestartedChannel:
    def __init__(self, server, receive) -> None:
        self._server, self._receive = server, receive

    def send(self, message) -> None:
        self._server.receive(message, self._receive)

    def close(self) -> None:
        self._receive = lambda message: None


@contextmanager
def restarted(
    folder: Path, log: str, number: int = 2, every: int = 7, lose: bool = False
) -> Iterator[tuple[Servers, list[Restarted]]]:
    """Servers in this process that are lost and started again when they have taken `every` messages."""
    local = [Restarted(folder / f"server-{index}", log, every + index, lose) for index in range(number)]
    with quick_resending(), Servers(local, local, DEADLINE) as servers:
        yield servers, local
