"""A trainer's side of embedding servers: messages that each arrive once, and the rows of a collection's tables."""

import itertools
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritonemb.flight import decode_error
from tritonemb.layout import partitions_of
from tritonemb.server.codec import RowCodecs
from tritonemb.server.node import TRAINER_SECONDS
from tritonemb.server.row_cache import CachedPull, WorkerCache
from tritonemb.server.snapshot import whole_table
from tritonemb.server.tables import CollectionSpec, cat
from tritonemb.server.transport import Channel, Message, Transport, Values
from tritonemb.tables.server_table import Pull, RowService, TableService
from tritonemb.types import CacheConfig
from tritonemb.utils import Closeable

TICK, RESEND_AFTER, BEAT = 0.2, 1.0, 2.0  # seconds; a server hears of an idle client after each beat


class Connection(Closeable):
    """A client of one server, over channels that may be lost, and may lose, repeat and reorder messages.

    Each message has a number. What has not been answered after a while is sent again, over a new channel if the one
    before is lost; the server does it once, in the order of numbers. A message is kept until the server has it in its
    state or its log, so that a server that is started again can be told it again.

    Args:
        patience: after so many seconds without a sign of life every message fails: ConnectionError.
        keep_bytes: of messages that were answered, and would be lost with the server; when there are more, it is told
            to save its state, which is waited for.
    """

    def __init__(self, transport: Transport, patience: float = 20.0, keep_bytes: int = 1 << 28) -> None:
        self._transport, self._patience = transport, patience
        self._client, self._lock = uuid.uuid4().hex, threading.RLock()
        self._next, self._asked = 0, itertools.count()
        self._unanswered: dict[int, Future[Message]] = {}  # ascending
        self._kept: dict[int, Message] = {}  # ascending, and these among them
        self._bytes, self._keep_bytes = 0, keep_bytes
        self._questions: dict[int, Future[Message]] = {}
        self._heard = self._sent = time.monotonic()
        self._failure: Exception | None = None
        self.is_starting: Callable[[], bool] = lambda: False  # whether the server is, which takes no patience
        self._closed, self._saving, self._opening = threading.Event(), threading.Lock(), threading.Lock()
        self._channel: Channel | None = None
        self._token: object = None  # of the channel
        self._open()
        threading.Thread(target=self._watch, daemon=True, name="tritonemb-connection").start()

    @property
    def address(self) -> str:
        """Of the server, which may move."""
        return self._transport.address

    def submit(self, op: str, values: Values, tensors: Sequence[Tensor] = ()) -> Future[Message]:
        """Send what is to be done; messages are done in the order of these calls."""
        if self._bytes > self._keep_bytes:
            with self._saving:
                if self._bytes > self._keep_bytes:
                    self._submit("save", {}, ()).result()
        return self._submit(op, values, tensors)

    def _submit(self, op: str, values: Values, tensors: Sequence[Tensor]) -> Future[Message]:
        future: Future[Message] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            number, self._next = self._next, self._next + 1
            if not self._unanswered:
                self._heard = self._sent = time.monotonic()
            received = next(iter(self._unanswered), number)
            values = {**values, "op": op, "client": self._client, "number": number, "received": received}
            self._kept[number], self._unanswered[number] = (values, list(tensors)), future
            self._send(self._kept[number])
        return future

    def ask(self, op: str, timeout: float = 10.0, **values: Any) -> Values:
        """Ask for what changes no row; ConnectionError if there is no answer in so many seconds."""
        return self.question(op, values, [], timeout)[0]

    def statistics(self) -> Values:
        """What the server counts; waits while it is busy, or is started again. ConnectionError if it is gone."""
        return self._persist("stats")["stats"]

    def register(self, collection: str, rank: int) -> None:
        """Become the trainer of that rank, as soon as none is heard of; ConnectionRefusedError if there is another."""
        end = time.monotonic() + TRAINER_SECONDS + BEAT
        while (reason := self._persist("register", collection=collection, rank=rank)["refused"]) is not None:
            if time.monotonic() > end:
                raise ConnectionRefusedError(reason)
            time.sleep(TICK)

    def _persist(self, op: str, **values: Any) -> Values:
        while True:
            with suppress(ConnectionError):
                return self.ask(op, **values)
            self.ask("alive", self._patience)

    def question(self, op: str, values: Values, tensors: Sequence[Tensor], timeout: float = 10.0) -> Message:
        """As `ask`, with more to say, and the whole answer."""
        number, future, end = next(self._asked), Future[Message](), time.monotonic() + timeout
        self._questions[number] = future
        try:
            while (left := end - time.monotonic()) > 0:
                end += timeout if self.is_starting() and left < timeout / 2 else 0.0
                with self._opening, suppress(ConnectionError):  # the server may not answer yet
                    if self._channel is None:
                        self._open()
                with self._lock:
                    if self._failure is not None:
                        raise self._failure
                    self._send(({**values, "op": op, "ask": number, "client": self._client}, list(tensors)))
                with suppress(TimeoutError):
                    return future.result(min(left, RESEND_AFTER))
            raise self._silent()
        finally:
            self._questions.pop(number, None)

    def _open(self) -> None:
        token = object()
        opened = self._transport.open(self._receive, partial(self._channel_lost, token))
        with self._lock:
            self._channel, self._token = opened, token

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._send(({"op": "bye", "ask": next(self._asked), "client": self._client}, []))
            channel, self._channel = self._channel, None
            self._fail(ConnectionError(f"the connection to embedding server {self.address} was closed"))
        if channel is not None:
            channel.close()

    def _silent(self) -> ConnectionError:
        return ConnectionError(
            f"embedding server {self.address} has not answered for {self._patience:.0f} seconds; start it again, and "
            "resume from a checkpoint"
        )

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            try:
                self._channel.send(message)
            except ConnectionError:
                self._channel = None

    def _channel_lost(self, token: object, error: Exception) -> None:
        with self._lock:
            if token is self._token:
                self._channel = None

    def _receive(self, message: Message) -> None:
        values = message[0]
        with self._lock:
            self._heard = time.monotonic()
            if "ask" in values:
                found = self._questions.get(values["ask"])
            else:
                if (found := self._unanswered.pop(values["number"], None)) is not None:
                    self._bytes += _size(self._kept[values["number"]])
                self._forget(values.get("saved", 0))
        if found is None or found.done():
            return
        if "error" in values:
            found.set_exception(decode_error(values["error"], f"embedding server {self.address}"))
        else:
            found.set_result(message)

    def _forget(self, saved: int) -> None:
        """Keep no messages with smaller numbers, as far as they have been answered."""
        for number in list(itertools.takewhile(lambda number: number < saved, self._kept)):
            if number not in self._unanswered:
                self._bytes -= _size(self._kept.pop(number))

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        waiting = [*self._unanswered.values(), *self._questions.values()]
        self._unanswered.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def tick(self) -> None:
        """Send again what may have been lost; or, if nothing is waited for, let the server hear of this client."""
        now = time.monotonic()
        with self._lock:
            is_idle = not self._unanswered
            if self._failure is not None or (is_idle and now - self._sent < BEAT):
                return
            if self.is_starting():
                self._heard = now
            if not is_idle and now - self._heard > self._patience:
                self._fail(self._silent())
                return
            if not is_idle and now - max(self._sent, self._heard) < RESEND_AFTER and self._channel is not None:
                return
            self._sent, first = now, next(iter(self._kept), 0)  # which the server knows, if it has lost nothing
        try:
            self.ask("alive", RESEND_AFTER)
            if is_idle:
                return
            expected = self.ask("hello", RESEND_AFTER)["expected"]
        except ConnectionError:  # it is gone, or busy
            return
        with self._lock:
            if expected < first:
                self._fail(ConnectionError(
                    f"embedding server {self.address} was started anew, without what it had been told; resume from a "
                    "checkpoint"
                ))  # fmt: skip
                return
            for number, message in list(self._kept.items()):
                if number >= expected:
                    self._send(message)
                elif number in self._unanswered:  # the answer was lost, or is still to come
                    self._send(({**message[0], "op": "again"}, []))

    def _watch(self) -> None:
        while not self._closed.wait(TICK):
            try:
                self.tick()
            except Exception as error:  # a token or a certificate that has changed, say
                with self._lock:
                    self._fail(error)


def _size(message: Message) -> int:
    return sum(tensor.nbytes for tensor in message[1])


class TableClient(TableService):
    """The tables of a collection, which servers have under one name, or a part under a name for each trainer.

    Args:
        parts: these names, and what stands there.
    """

    def __init__(self, connections: Sequence[Connection], parts: Sequence[tuple[str, CollectionSpec]]) -> None:
        self._connections, self.spec = list(connections), parts[0][1]
        self._places = [(server, *part) for part in parts for server in range(len(self._connections))]

    @property
    def steps(self) -> int:
        """How many have been trained."""
        raise NotImplementedError

    def _ask_all(
        self, op: str, values: Values, tensors: Sequence[Tensor] = (), table: int | None = None, rank: int = 0
    ) -> list[Message]:
        """What all servers answer, under all names; or those that have something of a table, in the order of that."""
        places = self._places
        if table is not None:
            places = [place for place in places if place[2].partitions(table, place[0])[1]]
            places.sort(key=lambda place: place[2].partitions(table, place[0])[0])
        common = {"rank": rank, **values}
        return wait([self._connections[n].submit(op, {"collection": name, **common}, tensors) for n, name, _ in places])

    def end(self) -> None:
        """Nothing more is trained: tell servers what they have not been told."""

    def return_leases(self) -> None:
        """Trainers hold none."""

    discard_leases = return_leases

    def snapshot(self, path: Path, changes_only: bool = False, chain: str = "checkpoints") -> list[Values]:
        """See `TableService.snapshot`; the changes since the last snapshot of this chain."""
        values, pending = {"steps": self.steps, "changes_only": changes_only, "chain": chain}, list[Future[Message]]()
        for number, (server, name, _) in enumerate(self._places):
            own = {"collection": name, "path": f"{path.absolute()}{number}.server"}
            pending.append(self._connections[server].submit("snapshot", {**values, **own}))
        return [written for written, _ in wait(pending)]

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        if chains:
            self._ask_all("restore", {"chains": [[str(path.absolute()) for path in chain] for chain in chains]})

    def tensors(self, table: str) -> dict[str, Tensor]:
        number = self.spec.number(table)
        answers = self._ask_all("read", {"table": table}, table=number)
        parts = [dict(zip(values["names"], tensors, strict=True)) for values, tensors in answers]
        return whole_table(self.spec.tables[number], parts)

    def load(self, table: str, tensors: Mapping[str, Tensor]) -> None:
        number = self.spec.number(table)
        spec, saved = self.spec.tables[number], dict(tensors)
        if spec.num_embeddings is not None:
            ids = torch.arange(spec.num_embeddings)
            saved |= {"ids": ids, "step": torch.zeros_like(ids), "count": torch.ones_like(ids)}
            saved |= {"clock": torch.tensor(self.steps), "seed": torch.tensor(spec.seed)}
        names = list(saved)
        everything = [saved[name].detach().cpu().contiguous() for name in names]
        self._ask_all("load", {"table": table, "names": names}, everything, number)


class CollectionClient(TableClient, RowService):
    """The rows of a collection's tables, for one trainer."""

    applies_updates = True

    def __init__(
        self, connections: Sequence[Connection], name: str, spec: CollectionSpec, rank: int,
        caches: Sequence[CacheConfig | None],
    ) -> None:  # fmt: skip
        super().__init__(connections, [(name, spec)])
        self.rank, self._name, self._lock = rank, name, threading.RLock()
        self.codecs = RowCodecs(spec)
        # Batches that are not trained, put there by garbage collection at any moment: the servers are told before
        # anything else, and while this trainer waits.
        self.dropped: queue.SimpleQueue[PulledRows] = queue.SimpleQueue()
        self.restored = 0  # how often; what was pulled before is not pushed any more
        servers = range(len(self._connections))
        self._owners = [None if len(servers) == 1 else torch.tensor(of_table) for of_table in spec.owners]
        self._has = [spec.numbers_on(server) for server in servers]
        self._register()
        self.caches = [WorkerCache(*each) for each in zip(spec.tables, caches, strict=True)] if any(caches) else []

    def _register(self) -> None:
        """Become a trainer of the collection, which servers create if they do not have it."""
        for connection in self._connections:
            connection.register(self._name, self.rank)
        spec, servers = asdict(self.spec), range(len(self._connections))
        answers, _ = zip(*wait([self._submit(n, "create", {"spec": spec, "server": n}) for n in servers]), strict=True)
        self._complete = all(of["complete"] for of in answers) and len({of["pulls"] for of in answers}) == 1
        self._batch = self._pushed = answers[0]["pulls"]  # of an earlier run

    def _submit(self, server: int, op: str, values: Values, tensors: Sequence[Tensor] = ()) -> Future[Message]:
        return self._connections[server].submit(op, {"collection": self._name, "rank": self.rank, **values}, tensors)

    def pull(self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool) -> "PulledRows":
        if training:
            self.check_complete()
        with self._lock:
            self.push_dropped()
            batch, self._batch, cached = self._batch, self._batch + training, list[CachedPull]()
            asked, columns = ids, [ids, occurrences] if training else [ids]
            if training and self.caches:
                spec = self.spec
                least = None if spec.exact or spec.staleness is None else batch // spec.batches - spec.staleness
                cached = [cache.begin(of_table, least) for cache, of_table in zip(self.caches, ids, strict=True)]
                asked = [pull.ids[pull.asked] for pull in cached]
                counts = [of[pull.asked] for of, pull in zip(occurrences, cached, strict=True)]
                columns = [asked, counts, [pull.versions for pull in cached]]
            routes = self.route(asked)
            op, values = ("pull", {"batch": batch}) if training else ("look_up", {"after": self.steps})
            sizes, pending = list[list[int]](), list[Future[Message]]()
            for server in range(len(self._connections)):
                parts = [self._of_server(column, routes, server) for column in columns]
                sizes.append([part.numel() for part in parts[0]])
                pending.append(self._submit(server, op, {**values, "sizes": sizes[-1]}, list(map(cat, parts))))
        return PulledRows(self, batch, ids, routes, sizes, pending, cached, training)

    def check_complete(self) -> None:
        """ValueError if servers lack what an earlier run has not pushed, or written back."""
        if not self._complete:
            raise ValueError(
                f"the embedding servers have tables of {self._name!r} that a run has left in the middle of a step, or "
                "has not flushed; resume it from a checkpoint, or start other servers"
            )

    def _of_server(self, tensors: Sequence[Tensor], routes: Sequence[Sequence[Any]], server: int) -> list[Tensor]:
        """Of each table that a server has, its part."""
        return [tensors[n][routes[n][server]] for n in self._has[server]]

    @property
    def steps(self) -> int:
        """How many this trainer has pushed."""
        return self._pushed // self.spec.batches

    def route(self, ids: Sequence[Tensor]) -> list[list[Any]]:
        """Of each table and server, which of the table's ids that has."""
        return [self._route(table, of_table) for table, of_table in enumerate(ids)]

    def _route(self, table: int, ids: Tensor) -> list[Any]:
        if (owners := self._owners[table]) is None:
            return [slice(None)]
        partitions = partitions_of(ids, self.spec.tables[table].num_partitions)
        server = torch.searchsorted(owners, partitions, right=True) - 1
        return [(server == number).nonzero()[:, 0] for number in range(len(self._connections))]

    def send(self, batch: int, ids: Sequence[Tensor], routes: Sequence[Any], sums: Sequence[Tensor], lr: float) -> None:
        """The gradients of a batch."""
        with self._lock:
            self.push_dropped()
            scale = self.codecs.scale(sums)
            for server, has in enumerate(self._has):
                parts = self._of_server(ids, routes, server)
                values = {"batch": batch, "lr": lr, "sizes": [part.numel() for part in parts], "scale": scale}
                packed = self.codecs.gradients.pack(has, self._of_server(sums, routes, server), scale)
                self._submit(server, "push", values, [cat(parts), *packed])
            self._pushed += 1

    def push_dropped(self) -> None:
        """Push nothing for each batch that was dropped."""
        with self._lock:
            while not self.dropped.empty():
                if (pulled := self.dropped.get()).restored == self.restored:
                    values = {"batch": pulled.batch, "lr": 0.0, "sizes": None}
                    for server in range(len(self._connections)):
                        self._submit(server, "push", values)
                    self._pushed += 1

    end = push_dropped

    def rows(self, table: int, routes: Sequence[Any], found: Sequence[Sequence[Tensor]]) -> Tensor:
        """A table's rows, from those of each server."""
        if self._owners[table] is None:
            return found[0][table]
        spec = self.spec.tables[table]
        rows = torch.empty(sum(map(len, routes)), spec.embedding_dim, dtype=getattr(torch, spec.dtype))
        for server, has in enumerate(self._has):
            if table in has:
                rows[routes[server]] = found[server][has.index(table)]
        return rows

    def finish_cached(
        self, table: int, pull: CachedPull, routes: Sequence[Any], answers: Sequence[tuple[int, dict[int, Any]]]
    ) -> Tensor:
        """Likewise, from each server's steps, and of its tables versions and those rows that are not cached."""
        versions, steps = torch.empty_like(pull.versions), torch.empty_like(pull.versions)
        for (applied, of_tables), mine in zip(answers, routes, strict=True):
            if table in of_tables:
                now, rows = of_tables[table]
                changed = now != pull.versions[mine]
                pull.rows[pull.asked[mine][changed]] = rows
                versions[mine], steps[mine] = now, applied
        with self._lock:
            return self.caches[table].finish(pull, versions, steps)

    def snapshot(self, path: Path, changes_only: bool = False, chain: str = "checkpoints") -> list[Values]:
        self.push_dropped()
        return super().snapshot(path, changes_only, chain)

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        self.restored += 1
        super().restore(chains, steps)
        self._batch = self._pushed = steps * self.spec.batches
        self._complete = True

    def flush(self) -> None:
        self.push_dropped()
        self._ask_all("flush", {"steps": self.steps}, rank=self.rank)


class ReadOnlyClient(CollectionClient):
    """The rows of a collection's tables as they are on servers now, for a process that does not train."""

    def _register(self) -> None:
        self._batch = self._pushed = 0

    def check_complete(self) -> None:
        """ValueError: rows are read only."""
        raise ValueError(f"tables of {self._name!r} are read from embedding servers, and cannot be trained here")

    def _submit(self, server: int, op: str, values: Values, tensors: Sequence[Tensor] = ()) -> Future[Message]:
        # A question, which servers do not log, and which needs no trainer's rank.
        future: Future[Message] = Future()
        future.set_result(self._connections[server].question(op, {"collection": self._name, **values}, tensors))
        return future


class PulledRows(Pull):
    """A batch's rows that are on their way."""

    def __init__(
        self, client: CollectionClient, batch: int, ids: Sequence[Tensor], routes: list[list[Any]],
        sizes: list[list[int]], pending: list[Future[Message]], cached: list[CachedPull], training: bool,
    ) -> None:  # fmt: skip
        self._client, self.batch, self._ids, self._routes = client, batch, ids, routes
        self.restored = client.restored
        self._sizes, self._futures, self._cached, self._training = sizes, pending, cached, training
        self._refused: list[tuple[int, Tensor]] = []  # tables, and positions among the batch's ids

    def rows(self) -> list[Tensor]:
        client = self._client
        client.push_dropped()
        while futures.wait(self._futures, TICK).not_done:
            client.push_dropped()
        answers = wait(self._futures)
        if self._training and client.spec.refuses:
            asked = [pull.asked for pull in self._cached] or [torch.arange(of_table.numel()) for of_table in self._ids]
            for server, (has, (_, tensors)) in enumerate(zip(client._has, answers, strict=True)):
                for table, part in zip(has, tensors[-1].split(tensors[-2].tolist()), strict=True):
                    if part.numel():
                        self._refused.append((table, asked[table][self._routes[table][server]][part]))
            answers = [(values, tensors[:-2]) for values, tensors in answers]
        if not self._cached:
            found = [tensors for _, tensors in answers]
            if self._training:
                found = [client.codecs.rows.unpack(*each) for each in zip(client._has, found, strict=True)]
            return [client.rows(table, routes, found) for table, routes in enumerate(self._routes)]
        of_servers = []
        for has, sizes, (values, (versions, *rows)) in zip(client._has, self._sizes, answers, strict=True):
            of_tables = zip(versions.split(sizes), client.codecs.rows.unpack(has, rows), strict=True)
            of_servers.append((values["steps"], dict(zip(has, of_tables, strict=True))))
        tables = zip(range(len(self._cached)), self._cached, self._routes, strict=True)
        return [client.finish_cached(table, pull, routes, of_servers) for table, pull, routes in tables]

    def push(self, sums: Sequence[Tensor] | None, lr: float) -> None:
        if sums is None:
            self._client.dropped.put(self)
            return
        if self.restored != self._client.restored:
            raise RuntimeError("these rows were pulled before the tables were restored; look the batch up again")
        ids, sums, routes = list(self._ids), list(sums), self._routes
        if self._refused or self._cached:  # some take no gradient, some were not asked for
            admitted = [torch.ones_like(of_table, dtype=torch.bool) for of_table in ids]
            for table, positions in self._refused:
                admitted[table][positions] = False
            ids = [of_table[mine] for of_table, mine in zip(ids, admitted, strict=True)]
            sums = [of_table[mine] for of_table, mine in zip(sums, admitted, strict=True)]
            routes = self._client.route(ids)
        self._client.send(self.batch, ids, routes, sums, lr)


def wait(futures: Sequence[Future[Message]]) -> list[Message]:
    """All results; raises the first failure, when all have ended."""
    if errors := [error for future in futures if (error := future.exception()) is not None]:
        raise errors[0]
    return [future.result() for future in futures]
