"""A trainer's side of embedding servers: messages that each arrive once, and the rows of a collection's tables."""

import itertools
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tritonemb.flight import decode_error
from tritonemb.layout import partitions_of
from tritonemb.server.tables import CollectionSpec
from tritonemb.server.transport import Channel, Message, Transport
from tritonemb.utils import Closing

Values = dict[str, Any]
TICK, RESEND_AFTER = 0.2, 1.0  # seconds


class Connection(Closing):
    """A client of one server, over channels that may be lost, and may lose, repeat and reorder messages.

    Each message has a number. What has not been answered after a while is sent again, over a new channel if the one
    before is lost; the server does it once, in the order of numbers. After `patience` seconds without an answer to
    anything every message fails: ConnectionError.
    """

    def __init__(self, transport: Transport, patience: float = 30.0) -> None:
        self._transport, self._patience, self.address = transport, patience, transport.address
        self._client, self._lock = uuid.uuid4().hex, threading.RLock()
        self._numbers, self._asked = itertools.count(), itertools.count()
        self._unanswered: dict[int, tuple[Message, Future[Message]]] = {}  # ascending
        self._questions: dict[int, Future[Message]] = {}
        self._channel: Channel | None = None
        self._heard = self._sent = time.monotonic()
        self._identity: str | None = None
        self._failure: Exception | None = None
        self._closed = threading.Event()
        self._open()
        watch = threading.Thread(target=_watch, args=(weakref.ref(self), self._closed), daemon=True)
        watch.name = "tritonemb-connection"
        watch.start()

    def submit(self, op: str, values: Values, tensors: Sequence[Tensor] = ()) -> Future[Message]:
        """Send what is to be done; messages are done in the order of these calls."""
        future: Future[Message] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            number = next(self._numbers)
            received = next(iter(self._unanswered), number)
            message = (
                {**values, "op": op, "client": self._client, "number": number, "received": received}, list(tensors),
            )  # fmt: skip
            if not self._unanswered:
                self._heard = self._sent = time.monotonic()
            self._unanswered[number] = message, future
            self._send(message)
        return future

    def ask(self, op: str, timeout: float = 10.0) -> Values:
        """Ask for what changes nothing; ConnectionError if there is no answer in so many seconds."""
        number, future = next(self._asked), Future[Message]()
        self._questions[number] = future
        try:
            with self._lock:
                self._send(({"op": op, "ask": number, "client": self._client}, []))
            return future.result(timeout)[0]
        except TimeoutError:
            raise self._lost() from None
        finally:
            self._questions.pop(number, None)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            channel, self._channel = self._channel, None
            self._fail(ConnectionError(f"the connection to embedding server {self.address} was closed"))
        if channel is not None:
            channel.close()

    def _lost(self) -> ConnectionError:
        return ConnectionError(
            f"embedding server {self.address} has not answered for {self._patience:.0f} seconds; start it again, and "
            "resume from a checkpoint"
        )

    def _open(self) -> None:
        self._channel = self._transport.open(self._receive, self._channel_lost)

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            try:
                self._channel.send(message)
            except ConnectionError:
                self._channel = None

    def _channel_lost(self, error: Exception) -> None:
        with self._lock:
            self._channel = None
            if isinstance(error, PermissionError):
                self._fail(error)

    def _receive(self, message: Message) -> None:
        values = message[0]
        with self._lock:
            self._heard = time.monotonic()
            found: Any = None
            if "ask" in values:
                found = self._questions.get(values["ask"])
            elif values["number"] in self._unanswered:
                found = self._unanswered.pop(values["number"])[1]
        if found is None or found.done():
            return
        if "error" in values:
            found.set_exception(decode_error(values["error"], f"embedding server {self.address}"))
        else:
            found.set_result(message)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        waiting = [future for _, future in self._unanswered.values()] + list(self._questions.values())
        self._unanswered.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def tick(self) -> None:
        """Send again what may have been lost."""
        now = time.monotonic()
        with self._lock:
            if self._failure is not None or not self._unanswered or now - max(self._sent, self._heard) < RESEND_AFTER:
                return
            if now - self._heard > self._patience:
                self._fail(self._lost())
                return
            opened = self._channel is not None
            if not opened:
                with suppress(ConnectionError):
                    self._open()
            self._sent = now
        if self._channel is None:
            return
        try:
            hello = self.ask("hello", timeout=min(2.0, self._patience))
        except ConnectionError:
            return
        with self._lock:
            if self._identity not in (None, hello["server"]):
                self._fail(ConnectionError(
                    f"embedding server {self.address} was started anew, and its tables are gone; resume from a checkpoint"
                ))
                return
            self._identity = hello["server"]
            for number, (message, _) in list(self._unanswered.items()):
                done = number < hello["expected"]  # the answer has been lost, or is still to come
                self._send(({**message[0], "op": "again"}, []) if done else message)


def _watch(connection: "weakref.ref[Connection]", closed: threading.Event) -> None:
    while not closed.wait(TICK):
        found = connection()
        if found is None:
            return
        found.tick()
        del found


class CollectionClient:
    """The rows of a collection's tables, for one trainer: a `RowService`."""

    def __init__(self, connections: Sequence[Connection], name: str, spec: CollectionSpec, rank: int) -> None:
        self.spec, self.rank = spec, rank
        self._connections, self._name, self._lock = list(connections), name, threading.Lock()
        self._batch = self._pushed = 0
        owners = [torch.tensor(of_table) for of_table in spec.owners]
        self._owners = [None if len(self._connections) == 1 else of_table for of_table in owners]
        self._has = [
            [n for n in range(len(spec.tables)) if spec.partitions(n, server)[1]]
            for server in range(len(connections))
        ]  # fmt: skip
        values = {"spec": _as_json(spec)}
        wait([self._submit(server, "create", {**values, "server": server}) for server in range(len(connections))])

    def _submit(self, server: int, op: str, values: Values, tensors: Sequence[Tensor] = ()) -> Future[Message]:
        return self._connections[server].submit(op, {"collection": self._name, "rank": self.rank, **values}, tensors)

    def pull(self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool) -> "PulledRows":
        """See `RowService`."""
        routes = [self._route(table, of_table) for table, of_table in enumerate(ids)]
        per_server = [
            ([ids[n][routes[n][server]] for n in has], [occurrences[n][routes[n][server]] for n in has])
            for server, has in enumerate(self._has)
        ]
        with self._lock:
            batch, self._batch = self._batch, self._batch + training
            op, values = ("pull", {"batch": batch}) if training else ("look_up", {"after": self.steps})
            futures = [
                self._submit(
                    server, op, {**values, "sizes": [each.numel() for each in of_server]},
                    [_cat(of_server)] + ([_cat(counts)] if training else []),
                )
                for server, (of_server, counts) in enumerate(per_server)
            ]  # fmt: skip
        return PulledRows(self, batch, [of_server for of_server, _ in per_server], routes, futures)

    @property
    def steps(self) -> int:
        """How many this trainer has pushed."""
        return self._pushed // self.spec.batches

    def _route(self, table: int, ids: Tensor) -> list[Any]:
        """Of each server, which of these ids it has."""
        owners = self._owners[table]
        if owners is None:
            return [slice(None)]
        partitions = partitions_of(ids, self.spec.tables[table].num_partitions)
        server = torch.searchsorted(owners, partitions, right=True) - 1
        return [(server == number).nonzero()[:, 0] for number in range(len(self._connections))]

    def send(self, batch: int, ids: Sequence[Sequence[Tensor]], sums: Sequence[Sequence[Tensor]], lr: float) -> None:
        """The gradients of a batch, by server and table; none for one that was not trained."""
        with self._lock:
            for server in range(len(self._connections)):
                values = {"batch": batch, "lr": lr, "sizes": [each.numel() for each in ids[server]] if sums else None}
                self._submit(server, "push", values, [_cat(ids[server]), *sums[server]] if sums else [])
            self._pushed += 1

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

    def by_server(self, sums: Sequence[Tensor], routes: Sequence[Sequence[Any]]) -> list[list[Tensor]]:
        """Of each server, what it has of each table's sums."""
        return [[sums[n][routes[n][server]] for n in has] for server, has in enumerate(self._has)]

    def flush(self) -> None:
        """Wait until all that has been pushed is applied, on all trainers. They all call this, after the same step."""
        wait([self._submit(server, "flush", {"steps": self.steps}) for server in range(len(self._connections))])

    def tensors(self, table: str) -> dict[str, Tensor]:
        """See `RowService`."""
        number = [spec.name for spec in self.spec.tables].index(table)
        servers = [server for server, has in enumerate(self._has) if number in has]
        answers = wait([self._submit(server, "read", {"table": table}) for server in servers])
        parts = [dict(zip(values["names"], tensors, strict=True)) for values, tensors in answers]
        spec, first = self.spec.tables[number], parts[0]
        ids = torch.cat([part["ids"] for part in parts])
        ids, order = ids.sort()
        found = {
            name: value if name in ("clock", "seed") else torch.cat([part[name] for part in parts])
            for name, value in first.items()
        }
        of_rows = {name: value[order] for name, value in found.items() if value.shape[:1] == ids.shape}
        if spec.num_embeddings is None:
            return {**found, **of_rows, "ids": ids}
        whole = {"weight": spec.initial_values(torch.arange(spec.num_embeddings))}
        for name, value in of_rows.items():
            if name not in ("ids", "step", "count"):
                whole.setdefault(name, value.new_zeros(spec.num_embeddings, *value.shape[1:]))[ids] = value
        return whole

    def load(self, table: str, tensors: Mapping[str, Tensor]) -> None:
        """See `RowService`."""
        number = [spec.name for spec in self.spec.tables].index(table)
        spec, saved = self.spec.tables[number], dict(tensors)
        if spec.num_embeddings is not None:
            ids = torch.arange(spec.num_embeddings)
            saved |= {"ids": ids, "step": torch.zeros_like(ids), "count": torch.ones_like(ids)}
            saved |= {"clock": torch.tensor(self._batch), "seed": torch.tensor(spec.seed)}
        names = list(saved)
        values = {"table": table, "names": names}
        everything = [saved[name].detach().cpu().contiguous() for name in names]
        servers = [server for server, has in enumerate(self._has) if number in has]
        wait([self._submit(server, "load", values, everything) for server in servers])


class PulledRows:
    """A batch's rows that are on their way: a `Pull`."""

    def __init__(
        self, client: CollectionClient, batch: int, ids: list[list[Tensor]], routes: list[list[Any]],
        futures: list[Future[Message]],
    ) -> None:  # fmt: skip
        self._client, self._batch, self._ids, self._routes = client, batch, ids, routes
        self._futures = futures

    def rows(self) -> list[Tensor]:
        """See `Pull`."""
        found = [tensors for _, tensors in wait(self._futures)]
        return [self._client.rows(table, routes, found) for table, routes in enumerate(self._routes)]

    def push(self, sums: Sequence[Tensor] | None, lr: float) -> None:
        """See `Pull`."""
        by_server = [] if sums is None else self._client.by_server(sums, self._routes)
        self._client.send(self._batch, self._ids, by_server, lr)


def wait(futures: Sequence[Future[Message]]) -> list[Message]:
    """All results; raises the first failure, when all have ended."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if tensors else torch.empty(0, dtype=torch.int64)


def _as_json(spec: CollectionSpec) -> Callable[..., Any] | Any:
    from dataclasses import asdict

    return asdict(spec)
