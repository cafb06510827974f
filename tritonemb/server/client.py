"""Trainer's side of embedding servers: exactly-once requests, and the rows of a collection's tables."""

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
from tritonemb.server.inbox import TRAINER_TIMEOUT
from tritonemb.server.row_cache import CachedPull, WorkerCache
from tritonemb.server.snapshot import merge_table
from tritonemb.server.tables import CollectionSpec, cat
from tritonemb.server.transport import Channel, Message, Transport, Values
from tritonemb.tables.server_table import Pull, RowService, TableService
from tritonemb.types import CacheConfig
from tritonemb.utils import Closeable

TICK, RESEND_AFTER = 0.2, 1.0  # seconds between checks of a connection, and before requests are sent again
HEARTBEAT = 2.0  # seconds between messages of an idle client, so that the server knows that it is alive


class Connection(Closeable):
    """Client of one server, over channels that may be lost, and may lose, duplicate and reorder messages.

    Requests are numbered. One without a reply is sent again after a while, over a new channel if the last one is lost;
    the server executes it once, in the order of numbers. A request stays in the replay buffer until the server has it
    in its snapshot or log, so that it can be sent again to a restarted server.

    Args:
        patience: seconds without any message from the server after which all requests fail: ConnectionError.
        max_replay_bytes: bytes of answered requests in the replay buffer above which the server is asked to save a
            snapshot, which later requests wait for.

    Attributes:
        is_starting: whether the server is being restarted, which suspends `patience`.
    """

    def __init__(self, transport: Transport, patience: float = 20.0, max_replay_bytes: int = 1 << 28) -> None:
        self._transport, self._patience = transport, patience
        self._client, self._lock = uuid.uuid4().hex, threading.RLock()

        # Requests and queries, by number, ascending.
        self._next_sequence, self._query_ids = 0, itertools.count()
        self._pending_requests: dict[int, Future[Message]] = {}
        self._pending_queries: dict[int, Future[Message]] = {}
        self._replay_buffer: dict[int, Message] = {}  # pending ones, and answered ones that are not durable
        self._replay_bytes, self._max_replay_bytes = 0, max_replay_bytes  # of answered requests

        # Liveness.
        self._last_received = self._last_sent = time.monotonic()
        self._failure: Exception | None = None
        self.is_starting: Callable[[], bool] = lambda: False

        self._closed, self._saving, self._opening = threading.Event(), threading.Lock(), threading.Lock()
        self._channel: Channel | None = None
        self._channel_id: object = None
        self._open()
        threading.Thread(target=self._watch, daemon=True, name="tritonemb-connection").start()

    @property
    def address(self) -> str:
        """Address of the server; changes if the server moves."""
        return self._transport.address

    def submit(self, op: str, values: Values, tensors: Sequence[Tensor] = ()) -> Future[Message]:
        """Send a request; requests are executed in the order of these calls."""
        if self._replay_bytes > self._max_replay_bytes:
            with self._saving:
                if self._replay_bytes > self._max_replay_bytes:
                    self._submit("save", {}, ()).result()
        return self._submit(op, values, tensors)

    def _submit(self, op: str, values: Values, tensors: Sequence[Tensor]) -> Future[Message]:
        future: Future[Message] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            number, self._next_sequence = self._next_sequence, self._next_sequence + 1
            if not self._pending_requests:
                self._last_received = self._last_sent = time.monotonic()
            received = next(iter(self._pending_requests), number)  # all replies before this one
            values = {**values, "op": op, "client": self._client, "number": number, "received": received}
            self._replay_buffer[number], self._pending_requests[number] = (values, list(tensors)), future
            self._send(self._replay_buffer[number])
        return future

    def query(self, op: str, timeout: float = 10.0, **values: Any) -> Values:
        """Send a query, which changes no row; ConnectionError if there is no reply within `timeout` seconds."""
        return self.query_tensors(op, values, [], timeout)[0]

    def statistics(self) -> Values:
        """Read the server's statistics; waits while it is busy or restarting. ConnectionError if it is gone."""
        return self._retry_query("stats")["stats"]

    def register(self, collection: str, rank: int) -> None:
        """Register as the trainer of a rank; ConnectionRefusedError if another one stays alive."""
        deadline = time.monotonic() + TRAINER_TIMEOUT + HEARTBEAT
        while (reason := self._retry_query("register", collection=collection, rank=rank)["refused"]) is not None:
            if time.monotonic() > deadline:
                raise ConnectionRefusedError(reason)
            time.sleep(TICK)

    def _retry_query(self, op: str, **values: Any) -> Values:
        """Repeat a query while the server answers pings."""
        while True:
            with suppress(ConnectionError):
                return self.query(op, **values)
            self.query("ping", self._patience)

    def query_tensors(self, op: str, values: Values, tensors: Sequence[Tensor], timeout: float = 10.0) -> Message:
        """Send a query with tensors, and return the complete reply; see `query`."""
        number, future, deadline = next(self._query_ids), Future[Message](), time.monotonic() + timeout
        self._pending_queries[number] = future
        try:
            while (remaining := deadline - time.monotonic()) > 0:
                deadline += timeout if self.is_starting() and remaining < timeout / 2 else 0.0
                with self._opening, suppress(ConnectionError):  # the server may not answer yet
                    if self._channel is None:
                        self._open()
                with self._lock:
                    if self._failure is not None:
                        raise self._failure
                    self._send(({**values, "op": op, "query": number, "client": self._client}, list(tensors)))
                with suppress(TimeoutError):
                    return future.result(min(remaining, RESEND_AFTER))
            raise self._timeout_error()
        finally:
            self._pending_queries.pop(number, None)

    def _open(self) -> None:
        channel_id = object()
        channel = self._transport.open(self._receive, partial(self._channel_lost, channel_id))
        with self._lock:
            self._channel, self._channel_id = channel, channel_id

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._send(({"op": "disconnect", "query": next(self._query_ids), "client": self._client}, []))
            channel, self._channel = self._channel, None
            self._fail(ConnectionError(f"the connection to embedding server {self.address} was closed"))
        if channel is not None:
            channel.close()

    def _timeout_error(self) -> ConnectionError:
        return ConnectionError(
            f"embedding server {self.address} has not answered for {self._patience:.0f} seconds; restart it, and "
            "resume from a checkpoint"
        )

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            try:
                self._channel.send(message)
            except ConnectionError:
                self._channel = None

    def _channel_lost(self, channel_id: object, error: Exception) -> None:
        with self._lock:
            if channel_id is self._channel_id:
                self._channel = None

    def _receive(self, message: Message) -> None:
        values = message[0]
        with self._lock:
            self._last_received = time.monotonic()
            if "query" in values:
                future = self._pending_queries.get(values["query"])
            else:
                if (future := self._pending_requests.pop(values["number"], None)) is not None:
                    self._replay_bytes += _num_bytes(self._replay_buffer[values["number"]])
                self._discard_durable(values.get("durable_sequence", 0))
        if future is None or future.done():
            return
        if "error" in values:
            future.set_exception(decode_error(values["error"], f"embedding server {self.address}"))
        else:
            future.set_result(message)

    def _discard_durable(self, durable_sequence: int) -> None:
        """Remove answered requests with smaller numbers from the replay buffer."""
        for number in list(itertools.takewhile(lambda number: number < durable_sequence, self._replay_buffer)):
            if number not in self._pending_requests:
                self._replay_bytes -= _num_bytes(self._replay_buffer.pop(number))

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        pending = [*self._pending_requests.values(), *self._pending_queries.values()]
        self._pending_requests.clear()
        for future in pending:
            if not future.done():
                future.set_exception(error)

    def tick(self) -> None:
        """Send pending requests again if the server seems to have lost them; send a heartbeat if there are none."""
        now = time.monotonic()
        with self._lock:
            is_idle = not self._pending_requests
            if self._failure is not None or (is_idle and now - self._last_sent < HEARTBEAT):
                return
            if self.is_starting():
                self._last_received = now
            if not is_idle and now - self._last_received > self._patience:
                self._fail(self._timeout_error())
                return
            is_recent = now - max(self._last_sent, self._last_received) < RESEND_AFTER
            if not is_idle and is_recent and self._channel is not None:
                return
            self._last_sent, min_sequence = now, next(iter(self._replay_buffer), 0)
        try:
            self.query("ping", RESEND_AFTER)
            if is_idle:
                return
            next_sequence = self.query("connect", RESEND_AFTER)["next_sequence"]
        except ConnectionError:  # the server is gone, or busy
            return
        with self._lock:
            # Requests before the replay buffer were durable, so a server that expects one of them has lost its state.
            if next_sequence < min_sequence:
                self._fail(ConnectionError(
                    f"embedding server {self.address} was restarted without its snapshot or log, and lost requests; "
                    "resume from a checkpoint"
                ))  # fmt: skip
                return
            for number, message in list(self._replay_buffer.items()):
                if number >= next_sequence:
                    self._send(message)
                elif number in self._pending_requests:  # the reply was lost, or is still to come
                    self._send(({**message[0], "op": "resend"}, []))

    def _watch(self) -> None:
        while not self._closed.wait(TICK):
            try:
                self.tick()
            except Exception as error:  # such as a token or a certificate that has changed
                with self._lock:
                    self._fail(error)


def _num_bytes(message: Message) -> int:
    return sum(tensor.nbytes for tensor in message[1])


class TableClient(TableService):
    """Tables of a collection, which servers have under one name, or as shards under a name per trainer.

    Args:
        shards: these names, with the spec of each.
    """

    def __init__(self, connections: Sequence[Connection], shards: Sequence[tuple[str, CollectionSpec]]) -> None:
        self._connections, self.spec = list(connections), shards[0][1]
        self._targets = [(server, *shard) for shard in shards for server in range(len(self._connections))]

    @property
    def steps(self) -> int:
        """Number of trained steps."""
        raise NotImplementedError

    def _submit_all(
        self, op: str, values: Values, tensors: Sequence[Tensor] = (), table: int | None = None, rank: int = 0
    ) -> list[Message]:
        """Send a request to all servers, under all names, and return the replies.

        With `table`, only to the servers that have partitions of it, in the order of partitions.
        """
        targets = self._targets
        if table is not None:
            targets = [target for target in targets if target[2].partitions(table, target[0])[1]]
            targets.sort(key=lambda target: target[2].partitions(table, target[0])[0])
        common = {"rank": rank, **values}
        return wait(
            [self._connections[n].submit(op, {"collection": name, **common}, tensors) for n, name, _ in targets]
        )

    def end(self) -> None:
        """End training: send what is still to be sent to servers."""

    def return_leases(self) -> None:
        """Return leased rows; there are none."""

    discard_leases = return_leases

    def snapshot(self, path: Path, changes_only: bool = False, chain: str = "checkpoints") -> list[Values]:
        """See `TableService.snapshot`; `changes_only`: since the last snapshot of this chain."""
        common, pending = {"steps": self.steps, "changes_only": changes_only, "chain": chain}, list[Future[Message]]()
        for number, (server, name, _) in enumerate(self._targets):
            values = {**common, "collection": name, "path": f"{path.absolute()}{number}.server"}
            pending.append(self._connections[server].submit("snapshot", values))
        return [names for names, _ in wait(pending)]

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        if chains:
            self._submit_all("restore", {"chains": [[str(path.absolute()) for path in chain] for chain in chains]})

    def tensors(self, table: str) -> dict[str, Tensor]:
        number = self.spec.number(table)
        replies = self._submit_all("read", {"table": table}, table=number)
        shards = [dict(zip(values["names"], tensors, strict=True)) for values, tensors in replies]
        return merge_table(self.spec.tables[number], shards)

    def load(self, table: str, tensors: Mapping[str, Tensor]) -> None:
        number = self.spec.number(table)
        spec, saved = self.spec.tables[number], dict(tensors)
        if spec.num_embeddings is not None:  # servers have a dynamic table, whose ids are the row numbers
            ids = torch.arange(spec.num_embeddings)
            saved |= {"ids": ids, "step": torch.zeros_like(ids), "count": torch.ones_like(ids)}
            saved |= {"clock": torch.tensor(self.steps), "seed": torch.tensor(spec.seed)}
        names = list(saved)
        values = [saved[name].detach().cpu().contiguous() for name in names]
        self._submit_all("load", {"table": table, "names": names}, values, number)


class CollectionClient(TableClient, RowService):
    """Rows of a collection's tables, for one trainer, which pulls rows and pushes gradients."""

    applies_updates = True

    def __init__(
        self, connections: Sequence[Connection], name: str, spec: CollectionSpec, rank: int,
        caches: Sequence[CacheConfig | None],
    ) -> None:  # fmt: skip
        super().__init__(connections, [(name, spec)])
        self.rank, self._name, self._lock = rank, name, threading.RLock()
        self.codecs = RowCodecs(spec)
        # Pulled batches that are not trained; garbage collection adds them at any moment. Servers need a push for each
        # before this trainer sends anything else, and while it waits.
        self.dropped: queue.SimpleQueue[PulledRows] = queue.SimpleQueue()
        self.num_restores = 0  # batches that were pulled before the last one are not pushed
        servers = range(len(self._connections))
        self._partition_starts = [None if len(servers) == 1 else torch.tensor(first) for first in spec.partition_starts]
        self._tables_on = [spec.tables_on(server) for server in servers]
        self._register()
        configs = zip(spec.tables, caches, strict=True)
        self.caches = [WorkerCache(table, cache) for table, cache in configs] if any(caches) else []

    def _register(self) -> None:
        """Register as a trainer of the collection, which servers create if they do not have it."""
        for connection in self._connections:
            connection.register(self._name, self.rank)
        spec, servers = asdict(self.spec), range(len(self._connections))
        replies, _ = zip(*wait([self._submit(n, "create", {"spec": spec, "server": n}) for n in servers]), strict=True)
        self._complete = all(reply["complete"] for reply in replies) and len({reply["pulls"] for reply in replies}) == 1
        self._batch = self._pushed = replies[0]["pulls"]  # continues an earlier run

    def _submit(self, server: int, op: str, values: Values, tensors: Sequence[Tensor] = ()) -> Future[Message]:
        return self._connections[server].submit(op, {"collection": self._name, "rank": self.rank, **values}, tensors)

    def pull(self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool) -> "PulledRows":
        if training:
            self.check_complete()
        with self._lock:
            self.push_dropped()
            batch, self._batch, cached = self._batch, self._batch + training, list[CachedPull]()
            requested, columns = ids, [ids, occurrences] if training else [ids]
            # Request only ids whose cached rows may be stale.
            if training and self.caches:
                spec = self.spec
                min_steps = None if spec.exact or spec.staleness is None else batch // spec.batches - spec.staleness
                cached = [cache.begin(table_ids, min_steps) for cache, table_ids in zip(self.caches, ids, strict=True)]
                requested = [pull.ids[pull.positions] for pull in cached]
                counts = [of[pull.positions] for of, pull in zip(occurrences, cached, strict=True)]
                columns = [requested, counts, [pull.versions for pull in cached]]
            # Send each server the ids of its partitions.
            routes = self.route(requested)
            op, values = ("pull", {"batch": batch}) if training else ("look_up", {"after": self.steps})
            sizes, pending = list[list[int]](), list[Future[Message]]()
            for server in range(len(self._connections)):
                shards = [self._select(column, routes, server) for column in columns]
                sizes.append([table_ids.numel() for table_ids in shards[0]])
                pending.append(self._submit(server, op, {**values, "sizes": sizes[-1]}, list(map(cat, shards))))
        return PulledRows(self, batch, ids, routes, sizes, pending, cached, training)

    def check_complete(self) -> None:
        """ValueError if an earlier run has pulled batches that it did not push, or has not returned leased rows."""
        if not self._complete:
            raise ValueError(
                f"the embedding servers have tables of {self._name!r} from a run that ended within a step or without a "
                "flush; resume it from a checkpoint, or start other servers"
            )

    def _select(self, tensors: Sequence[Tensor], routes: Sequence[Sequence[Any]], server: int) -> list[Tensor]:
        """Select the entries of a server, for each table that it has."""
        return [tensors[n][routes[n][server]] for n in self._tables_on[server]]

    @property
    def steps(self) -> int:
        """Number of steps that this trainer has pushed."""
        return self._pushed // self.spec.batches

    def route(self, ids: Sequence[Tensor]) -> list[list[Any]]:
        """Return, per table and server, an index of the ids that belong to the server."""
        return [self._route(table, table_ids) for table, table_ids in enumerate(ids)]

    def _route(self, table: int, ids: Tensor) -> list[Any]:
        if (starts := self._partition_starts[table]) is None:
            return [slice(None)]
        partitions = partitions_of(ids, self.spec.tables[table].num_partitions)
        server = torch.searchsorted(starts, partitions, right=True) - 1
        return [(server == number).nonzero()[:, 0] for number in range(len(self._connections))]

    def send(self, batch: int, ids: Sequence[Tensor], routes: Sequence[Any], sums: Sequence[Tensor], lr: float) -> None:
        """Push the gradients of a batch."""
        with self._lock:
            self.push_dropped()
            scale = self.codecs.scale(sums)
            for server, tables in enumerate(self._tables_on):
                server_ids = self._select(ids, routes, server)
                sizes = [table_ids.numel() for table_ids in server_ids]
                values = {"batch": batch, "lr": lr, "sizes": sizes, "scale": scale}
                packed = self.codecs.gradients.pack(tables, self._select(sums, routes, server), scale)
                self._submit(server, "push", values, [cat(server_ids), *packed])
            self._pushed += 1

    def push_dropped(self) -> None:
        """Push an empty batch for each pulled batch that was dropped."""
        with self._lock:
            while not self.dropped.empty():
                if (pulled := self.dropped.get()).num_restores == self.num_restores:
                    values = {"batch": pulled.batch, "lr": 0.0, "sizes": None}
                    for server in range(len(self._connections)):
                        self._submit(server, "push", values)
                    self._pushed += 1

    end = push_dropped

    def rows(self, table: int, routes: Sequence[Any], server_rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """Assemble a table's rows from those of each server."""
        if self._partition_starts[table] is None:
            return server_rows[0][table]
        spec = self.spec.tables[table]
        rows = torch.empty(sum(map(len, routes)), spec.embedding_dim, dtype=getattr(torch, spec.dtype))
        for server, tables in enumerate(self._tables_on):
            if table in tables:
                rows[routes[server]] = server_rows[server][tables.index(table)]
        return rows

    def finish_cached(
        self, table: int, pull: CachedPull, routes: Sequence[Any], replies: Sequence[tuple[int, dict[int, Any]]]
    ) -> Tensor:
        """Assemble a table's rows from its cache, and from each server's steps, versions and changed rows."""
        versions, steps = torch.empty_like(pull.versions), torch.empty_like(pull.versions)
        for (applied_steps, by_table), route in zip(replies, routes, strict=True):
            if table in by_table:
                new_versions, rows = by_table[table]
                changed = new_versions != pull.versions[route]
                pull.rows[pull.positions[route][changed]] = rows
                versions[route], steps[route] = new_versions, applied_steps
        with self._lock:
            return self.caches[table].finish(pull, versions, steps)

    def snapshot(self, path: Path, changes_only: bool = False, chain: str = "checkpoints") -> list[Values]:
        self.push_dropped()
        return super().snapshot(path, changes_only, chain)

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        self.num_restores += 1
        super().restore(chains, steps)
        self._batch = self._pushed = steps * self.spec.batches
        self._complete = True

    def flush(self) -> None:
        self.push_dropped()
        self._submit_all("flush", {"steps": self.steps}, rank=self.rank)


class ReadOnlyClient(CollectionClient):
    """Rows of a collection's tables in their present state, for a process that does not train."""

    def _register(self) -> None:
        self._batch = self._pushed = 0

    def check_complete(self) -> None:
        """ValueError: this client cannot train."""
        raise ValueError(f"tables of {self._name!r} are read-only here: they are read from embedding servers")

    def _submit(self, server: int, op: str, values: Values, tensors: Sequence[Tensor] = ()) -> Future[Message]:
        # A query: servers do not log it, and it needs no registered trainer.
        future: Future[Message] = Future()
        future.set_result(self._connections[server].query_tensors(op, {"collection": self._name, **values}, tensors))
        return future


class PulledRows(Pull):
    """Rows of a batch, which arrive asynchronously."""

    def __init__(
        self, client: CollectionClient, batch: int, ids: Sequence[Tensor], routes: list[list[Any]],
        sizes: list[list[int]], pending: list[Future[Message]], cached: list[CachedPull], training: bool,
    ) -> None:  # fmt: skip
        self._client, self.batch, self._ids, self._routes = client, batch, ids, routes
        self.num_restores = client.num_restores
        self._sizes, self._futures, self._cached, self._training = sizes, pending, cached, training
        self._refused: list[tuple[int, Tensor]] = []  # tables, with positions of ids that were not admitted

    def rows(self) -> list[Tensor]:
        client = self._client
        client.push_dropped()
        while futures.wait(self._futures, TICK).not_done:
            client.push_dropped()
        replies = wait(self._futures)
        # Note refused ids, whose gradients are not pushed.
        if self._training and client.spec.has_admission:
            positions = [pull.positions for pull in self._cached]
            positions = positions or [torch.arange(table_ids.numel()) for table_ids in self._ids]
            for server, (tables, (_, tensors)) in enumerate(zip(client._tables_on, replies, strict=True)):
                for table, refused in zip(tables, tensors[-1].split(tensors[-2].tolist()), strict=True):
                    if refused.numel():
                        self._refused.append((table, positions[table][self._routes[table][server]][refused]))
            replies = [(values, tensors[:-2]) for values, tensors in replies]
        # Decode and assemble the rows of all servers, with those of the caches.
        if not self._cached:
            server_rows = [tensors for _, tensors in replies]
            if self._training:
                encoded = zip(client._tables_on, server_rows, strict=True)
                server_rows = [client.codecs.rows.unpack(tables, rows) for tables, rows in encoded]
            return [client.rows(table, routes, server_rows) for table, routes in enumerate(self._routes)]
        by_server = []
        for tables, sizes, (values, (versions, *rows)) in zip(client._tables_on, self._sizes, replies, strict=True):
            changed = zip(versions.split(sizes), client.codecs.rows.unpack(tables, rows), strict=True)
            by_server.append((values["steps"], dict(zip(tables, changed, strict=True))))
        pulls = zip(range(len(self._cached)), self._cached, self._routes, strict=True)
        return [client.finish_cached(table, pull, routes, by_server) for table, pull, routes in pulls]

    def push(self, sums: Sequence[Tensor] | None, lr: float) -> None:
        if sums is None:
            self._client.dropped.put(self)
            return
        if self.num_restores != self._client.num_restores:
            raise RuntimeError("these rows were pulled before the tables were restored; look the batch up again")
        ids, sums, routes = list(self._ids), list(sums), self._routes
        if self._refused or self._cached:  # the routes are not those of the ids to push
            admitted = [torch.ones_like(table_ids, dtype=torch.bool) for table_ids in ids]
            for table, positions in self._refused:
                admitted[table][positions] = False
            ids = [table_ids[mask] for table_ids, mask in zip(ids, admitted, strict=True)]
            sums = [table_sums[mask] for table_sums, mask in zip(sums, admitted, strict=True)]
            routes = self._client.route(ids)
        self._client.send(self.batch, ids, routes, sums, lr)


def wait(futures: Sequence[Future[Message]]) -> list[Message]:
    """Wait for all futures, and return their results, or raise the first failure."""
    if errors := [error for future in futures if (error := future.exception()) is not None]:
        raise errors[0]
    return [future.result() for future in futures]
