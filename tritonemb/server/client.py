"""Trainer's side of embedding servers: the rows of a collection's tables."""

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritonemb.layout import partitions_of
from tritonemb.server.codec import PulledTable, RowCodecs
from tritonemb.server.connection import TICK, Connection
from tritonemb.server.partitions import cat
from tritonemb.server.row_cache import CachedPull, WorkerCache
from tritonemb.server.snapshot import merge_table
from tritonemb.server.spec import CollectionSpec
from tritonemb.server.transport import Message, Values
from tritonemb.tables.server_table import Pull, RowService, TableService
from tritonemb.types import CacheConfig


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
        self.tables_on = [spec.tables_on(server) for server in servers]
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
            pending = list[Future[Message]]()
            for server in range(len(self._connections)):
                shards = [self._select(column, routes, server) for column in columns]
                sizes = [table_ids.numel() for table_ids in shards[0]]
                pending.append(self._submit(server, op, {**values, "sizes": sizes}, list(map(cat, shards))))
        return PulledRows(self, batch, ids, routes, pending, cached, training)

    def check_complete(self) -> None:
        """ValueError if an earlier run has pulled batches that it did not push, or has not returned leased rows."""
        if not self._complete:
            raise ValueError(
                f"the embedding servers have tables of {self._name!r} from a run that ended within a step or without a "
                "flush; resume it from a checkpoint, or start other servers"
            )

    def _select(self, tensors: Sequence[Tensor], routes: Sequence[Sequence[Any]], server: int) -> list[Tensor]:
        """Select the entries of a server, for each table that it has."""
        return [tensors[n][routes[n][server]] for n in self.tables_on[server]]

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
            for server, tables in enumerate(self.tables_on):
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

    def rows(self, table: int, routes: Sequence[Any], servers: Sequence[Mapping[int, PulledTable]]) -> Tensor:
        """Assemble a table's rows from those of each server."""
        if self._partition_starts[table] is None:
            return servers[0][table].rows
        spec = self.spec.tables[table]
        rows = torch.empty(sum(map(len, routes)), spec.embedding_dim, dtype=getattr(torch, spec.dtype))
        for tables, route in zip(servers, routes, strict=True):
            if table in tables:
                rows[route] = tables[table].rows
        return rows

    def finish_cached(
        self, table: int, pull: CachedPull, routes: Sequence[Any],
        servers: Sequence[Mapping[int, PulledTable]], applied_steps: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """Assemble a table's rows from its cache, and from the changed rows of each server, with its applied steps."""
        versions, steps = torch.empty_like(pull.versions), torch.empty_like(pull.versions)
        for tables, route, server_steps in zip(servers, routes, applied_steps, strict=True):
            if (pulled := tables.get(table)) is not None and pulled.versions is not None:
                changed = pulled.versions != pull.versions[route]
                pull.rows[pull.positions[route][changed]] = pulled.rows
                versions[route], steps[route] = pulled.versions, server_steps
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
        pending: list[Future[Message]], cached: list[CachedPull], training: bool,
    ) -> None:  # fmt: skip
        self._client, self.batch, self._ids, self._routes = client, batch, ids, routes
        self.num_restores = client.num_restores
        self._futures, self._cached = pending, cached
        self._codecs = client.codecs.rows if training else client.codecs.exact_rows
        self._refused: list[tuple[int, Tensor]] = []  # tables, with positions of ids that were not admitted

    def rows(self) -> list[Tensor]:
        client, routes = self._client, self._routes
        client.push_dropped()
        while futures.wait(self._futures, TICK).not_done:
            client.push_dropped()
        replies = wait(self._futures)
        by_server = zip(client.tables_on, replies, strict=True)
        servers = [self._codecs.unpack_reply(numbers, reply) for numbers, reply in by_server]
        # Note refused ids, whose gradients are not pushed.
        for server, tables in enumerate(servers):
            for table, pulled in tables.items():
                if pulled.refused is not None and pulled.refused.numel():
                    ids = self._ids[table]
                    positions = self._cached[table].positions if self._cached else torch.arange(ids.numel())
                    self._refused.append((table, positions[routes[table][server]][pulled.refused]))
        # Assemble the rows of all servers, with those of the caches.
        if not self._cached:
            return [client.rows(table, table_routes, servers) for table, table_routes in enumerate(routes)]
        steps = [values["steps"] for values, _ in replies]
        pulls = zip(self._cached, routes, strict=True)
        return [client.finish_cached(table, *pull, servers, steps) for table, pull in enumerate(pulls)]

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
