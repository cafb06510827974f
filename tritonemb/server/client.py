"""Trainer's side of embedding servers: the rows of a collection's tables, which it pulls, caches, and pushes to.

The cache has pulled rows, so that unchanged rows do not cross the network again. With exact staleness a pull sends the
versions of cached rows, and servers return rows whose versions differ: results are bitwise identical. With `AtMost(s)`
a pull of step k omits cached rows that have the updates of steps < k - s.
"""

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from tritonemb.layout import NO_ROW, nonzero
from tritonemb.server.connection import TICK, Connection
from tritonemb.server.partitions import cat
from tritonemb.server.snapshot import merge_table
from tritonemb.server.spec import CollectionSpec, Routes, TableSpec
from tritonemb.server.tables import BlockCodec, RowCodecs
from tritonemb.server.transport import Message, Values, gather
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.index import concat_ids, insert_batch
from tritonemb.tables.server_table import Pull, RowService, TableService, make_table
from tritonemb.types import CacheConfig, EvictionConfig, TableConfig

NOT_CACHED = NO_ROW - 1  # differs from each version of a row


class TableClient(TableService):
    """Tables of a collection, which servers have under one name, or as shards under a name per trainer."""

    rank = 0  # of this trainer

    def __init__(self, connections: Sequence[Connection], shards: Sequence[tuple[str, CollectionSpec]]) -> None:
        self._connections, self.spec = list(connections), shards[0][1]
        # A part is a server, with one connection for all shards, or a tablet, with a connection per shard.
        self._targets = [(part, *shard) for shard in shards for part in range(len(self.spec.partition_starts[0]))]

    @property
    def steps(self) -> int:
        raise NotImplementedError

    def _submit(self, target: int, op: str, values: Values, tensors: Sequence[Tensor] = ()) -> Future[Message]:
        _, name, _ = self._targets[target]
        connection = self._connections[target % len(self._connections)]
        return connection.submit(op, {"collection": name, "rank": self.rank, **values}, tensors)

    def _submit_all(
        self, op: str, values: Values, tensors: Sequence[Tensor] = (), table: int | None = None
    ) -> list[Message]:
        """Send a request to all servers, under all names, and return the replies.

        With `table`, only to the servers that have partitions of it, in the order of partitions.
        """
        targets = list(range(len(self._targets)))
        if table is not None:
            ranges = [spec.partitions(table, server) for server, _, spec in self._targets]
            targets = sorted((n for n in targets if ranges[n][1]), key=lambda n: ranges[n][0])
        return wait([self._submit(target, op, values, tensors) for target in targets])

    def push_dropped(self) -> None:
        """Push an empty batch for each pulled batch that was dropped; there are none."""

    def return_leases(self) -> None:
        """Return leased rows; there are none."""

    discard_leases = return_leases

    def snapshot(self, path: Path, changes_only: bool = False, chain: str = "checkpoints") -> list[Values]:
        """See `TableService.snapshot`; `changes_only`: since the last snapshot of this chain."""
        self.push_dropped()
        common = {"steps": self.steps, "changes_only": changes_only, "chain": chain}
        paths = [f"{path.absolute()}{target}.server" for target in range(len(self._targets))]
        pending = [self._submit(n, "snapshot", {**common, "path": path}) for n, path in enumerate(paths)]
        return [names for names, _ in wait(pending)]

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        if chains:
            self._submit_all("restore", {"chains": [[str(path.absolute()) for path in chain] for chain in chains]})

    def tensors(self, table: str) -> dict[str, Tensor]:
        number = self.spec.numbers[table]
        replies = self._submit_all("read", {"table": table}, table=number)
        shards = [dict(zip(values["names"], tensors, strict=True)) for values, tensors in replies]
        return merge_table(self.spec.tables[number], shards)

    def load(self, table: str, tensors: Mapping[str, Tensor]) -> None:
        number = self.spec.numbers[table]
        spec, saved = self.spec.tables[number], dict(tensors)
        if spec.num_embeddings is not None:  # servers have a dynamic table, whose ids are the row numbers
            ids = torch.arange(spec.num_embeddings)
            saved |= {"ids": ids, "step": torch.zeros_like(ids), "count": torch.ones_like(ids)}
            saved |= {"clock": torch.tensor(self.steps), "seed": torch.tensor(spec.seed)}
        elif "clock" not in saved and "step" in saved:  # one for all servers
            saved["clock"] = torch.cat([saved["step"].cpu().flatten(), torch.zeros(1, dtype=torch.int64)]).max()
        values = [value.detach().cpu().contiguous() for value in saved.values()]
        self._submit_all("load", {"table": table, "names": list(saved), "steps": self.steps}, values, number)


class CollectionClient(TableClient, RowService):
    """Rows of a collection's tables, for one trainer, which pulls rows and pushes gradients."""

    applies_updates = True

    def __init__(
        self, connections: Sequence[Connection], name: str, spec: CollectionSpec, rank: int = 0,
        caches: Sequence[CacheConfig | None] = (),
    ) -> None:  # fmt: skip
        super().__init__(connections, [(name, spec)])
        self.rank, self.num_trainers, self._name, self.lock = rank, spec.trainers, name, threading.RLock()
        self.codecs = RowCodecs(spec)
        # Pulled batches that are not trained; garbage collection adds them at any moment. Servers need a push for each
        # before this trainer sends anything else, and while it waits.
        self.dropped: queue.SimpleQueue[PendingPull] = queue.SimpleQueue()
        self.num_restores = 0  # batches that were pulled before the last one are not pushed
        self.tables_on = [spec.tables_on(server) for server in range(len(self._connections))]
        self.caches = [WorkerCache(*pair) for pair in zip(spec.tables, caches, strict=True)] if any(caches) else []
        self._register()

    def _register(self) -> None:
        for connection in self._connections:
            connection.register(self._name, self.rank)
        spec, servers = asdict(self.spec), range(len(self._connections))
        replies, _ = zip(*wait([self._submit(n, "create", {"spec": spec, "server": n}) for n in servers]), strict=True)
        self._complete = all(reply["complete"] for reply in replies) and len({reply["pulls"] for reply in replies}) == 1
        self._batch = self._pushed = replies[0]["pulls"]  # continues an earlier run

    def pull(self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool) -> "PendingPull":
        if training:
            self.check_complete()
        with self.lock:
            self.push_dropped()
            batch, self._batch, cached = self._batch, self._batch + training, list[CachedPull]()
            all_ids, sizes = cat(ids), [*map(len, ids)]
            columns, num_requested = [all_ids, cat(occurrences)] if training else [all_ids], sizes
            # Request only ids whose cached rows may be stale.
            if training and self.caches:
                spec = self.spec
                min_steps = None if spec.exact or spec.staleness is None else batch // spec.batches - spec.staleness
                cached = [cache.begin(table_ids, min_steps) for cache, table_ids in zip(self.caches, ids, strict=True)]
                counts = [of[pull.positions] for of, pull in zip(occurrences, cached, strict=True)]
                table_ids = [pull.ids[pull.positions] for pull in cached]
                columns = [*map(cat, (table_ids, counts, [pull.versions for pull in cached]))]
                num_requested = [*map(len, counts)]
            routes = self.route(columns[0], num_requested)
            op, values = ("pull", {"batch": batch}) if training else ("look_up", {"after": self.steps})
            pending = self._scatter(op, values, columns, routes)
        codec = self.codecs.rows if training else self.codecs.exact_rows
        admitted = torch.ones_like(all_ids, dtype=torch.bool)
        return PendingPull(self, batch, self.num_restores, all_ids, sizes, routes, pending, codec, cached, admitted)

    def check_complete(self) -> None:
        """ValueError if an earlier run has pulled batches that it did not push, or has not returned leased rows."""
        if not self._complete:
            raise ValueError(
                f"the embedding servers have tables of {self._name!r} from a run that ended within a step or without a "
                "flush; resume it from a checkpoint, or start other servers"
            )

    def route(self, ids: Tensor, sizes: Sequence[int], numbers: Sequence[int] | None = None) -> Routes:
        """Route ids to servers; `sizes` are their numbers in each of the tables `numbers`, all by default."""
        if len(self._connections) == 1 and not self.caches:
            return [None], [list(sizes)]
        return self.spec.route(ids, sizes, numbers)

    def _scatter(
        self, op: str, values: Values, columns: Sequence[Tensor], routes: Routes, sums: Sequence[Tensor] = (),
        numbers: Sequence[int] | None = None,
    ) -> list[Future[Message]]:  # fmt: skip
        """Send each server its entries of columns `[n]`, and of gradients `sums`, a matrix per block, encoded."""
        pending, numbers = [], range(len(self.spec.tables)) if numbers is None else numbers
        for server, (positions, sizes) in enumerate(zip(*routes, strict=True)):
            tensors = [*columns, *sums]
            if positions is not None:
                tensors = gather(tensors, [*[positions] * len(columns), *self.by_block(positions, sums)])
            if sums:
                tensors[len(columns) :] = self.codecs.gradients.pack(tensors[len(columns) :], values["scale"])
            sizes = [size for number, size in zip(numbers, sizes, strict=True) if number in self.tables_on[server]]
            pending.append(self._submit(server, op, {**values, "sizes": sizes}, tensors))
        return pending

    def by_block(self, positions: Tensor, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Split positions in a batch, ascending, by block, and return those in the blocks."""
        if len(blocks) < 2:
            return [positions] * len(blocks)
        starts = [0, *accumulate(map(len, blocks))]
        bounds = torch.searchsorted(positions, torch.tensor(starts)).tolist()
        return [positions[slice(*bound)] - start for bound, start in zip(pairwise(bounds), starts, strict=False)]

    @property
    def steps(self) -> int:
        return self._pushed // self.spec.batches

    def push(self, batch: int, ids: Tensor, routes: Routes, sums: list[Tensor], lr: float) -> None:
        """Push gradients of ids, a matrix per block."""
        with self.lock:
            self.push_dropped()
            values = {"batch": batch, "lr": lr, "scale": self.codecs.scale(sums), "blocks": len(sums)}
            self._scatter("push", values, [ids], routes, sums)
            self._pushed += 1

    def push_dropped(self) -> None:
        with self.lock:
            while not self.dropped.empty():
                if (pulled := self.dropped.get()).num_restores == self.num_restores:
                    self._push_empty(pulled.batch)
                    self._complete_step()

    def _push_empty(self, batch: int) -> None:
        for server in range(len(self._connections)):
            self._submit(server, "push", {"batch": batch, "lr": 0.0, "sizes": None})
        self._pushed += 1

    def _complete_step(self) -> None:
        """Pull and push empty batches up to the end of a step of several batches, unless others are pending.

        After one that was dropped, the next batch begins a step.
        """
        nothing = torch.empty(0, dtype=torch.int64)
        while self._pushed == self._batch and self._batch % self.spec.batches:
            for server, tables in enumerate(self.tables_on):
                self._submit(server, "pull", {"batch": self._batch, "sizes": [0] * len(tables)}, [nothing, nothing])
            self._batch += 1
            self._push_empty(self._pushed)

    def load(self, table: str, tensors: Mapping[str, Tensor]) -> None:
        super().load(table, tensors)
        self._clear_caches()

    def _clear_caches(self) -> None:
        """Forget rows from before the servers got others: in other trainers they are old by `AtMost(s)` steps."""
        with self.lock:
            for cache in self.caches:
                cache.clear()

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        self.num_restores += 1
        super().restore(chains, steps)
        self._clear_caches()
        self._batch = self._pushed = steps * self.spec.batches
        self._complete = True

    def flush(self) -> None:
        self.push_dropped()
        with self.lock:
            self._complete_step()
        self._submit_all("flush", {"steps": self.steps})


class ReadOnlyClient(CollectionClient):
    """Rows of a collection's tables in their present state, for a process that does not train."""

    def _register(self) -> None:
        self._batch = self._pushed = 0

    def check_complete(self) -> None:
        """ValueError: this client cannot train."""
        raise ValueError(f"tables of {self._name!r} are read-only here: they are read from embedding servers")

    def tensors(self, table: str) -> dict[str, Tensor]:
        """ValueError: this client reads rows by id."""
        raise ValueError(f"table {table!r} is read by id from embedding servers; load its checkpoint without servers=")

    def _submit(self, target: int, op: str, values: Values, tensors: Sequence[Tensor] = ()) -> Future[Message]:
        # A query: servers do not log it, and it needs no registered trainer.
        future: Future[Message] = Future()
        future.set_result(self._connections[target].query_tensors(op, {"collection": self._name, **values}, tensors))
        return future


@dataclass(eq=False)
class PendingPull(Pull):
    """Rows of a batch, which arrive asynchronously."""

    client: CollectionClient
    batch: int
    num_restores: int  # of the client when the batch was pulled
    ids: Tensor  # of all tables
    sizes: list[int]  # per table
    routes: Routes  # of the requested ids
    futures: list[Future[Message]]
    codec: BlockCodec
    cached: list["CachedPull"]  # per table, if the trainer has a cache
    admitted: Tensor  # mask of `ids` that take a gradient

    def rows(self, accumulating: bool = False) -> list[Tensor]:
        client, blocks, spec = self.client, self.client.spec.blocks, self.client.spec
        client.push_dropped()
        if accumulating and spec.staleness is not None and client.steps < self.batch // spec.batches - spec.staleness:
            raise RuntimeError(
                f"more than {(spec.staleness + 1) * spec.batches} micro-batches in a block of accumulate(): this one "
                "waits for the gradients of an earlier one, which are pushed after the block; attach the servers with "
                "accumulate=, the number of micro-batches per step"
            )
        while futures.wait(self.futures, TICK).not_done:
            client.push_dropped()
        replies = [self.codec.unpack_reply(reply) for reply in wait(self.futures)]
        # Memory for all rows, with those of the cache.
        matrices = replies[0].rows
        if self.cached:
            starts = accumulate(self.sizes, initial=0)
            requested = cat([pull.positions + start for pull, start in zip(self.cached, starts, strict=False)])
            cached_versions = cat([pull.versions for pull in self.cached])
            matrices = [cat([pull.rows for pull in self.cached[block]]) for block in blocks]
            versions, steps = torch.empty(2, len(requested), dtype=torch.int64)
        elif self.routes[0][0] is not None:
            matrices = [m.new_empty(sum(self.sizes[b]), m.shape[1]) for m, b in zip(matrices, blocks, strict=True)]
        # Write the rows of the servers there, and mark ids that were not admitted.
        for positions, reply in zip(self.routes[0], replies, strict=True):
            targets = requested[positions] if self.cached else positions
            if reply.refused is not None:
                self.admitted[reply.refused if targets is None else targets[reply.refused]] = False
            if self.cached:
                versions[positions], steps[positions] = reply.versions, reply.steps
                targets = targets[reply.versions != cached_versions[positions]]
            if targets is not None:
                for matrix, rows, at in zip(matrices, reply.rows, client.by_block(targets, matrices), strict=True):
                    matrix.index_copy_(0, at, rows)
        tables = [rows for matrix, b in zip(matrices, blocks, strict=True) for rows in matrix.split(self.sizes[b])]
        if self.cached:
            counts = [len(pull.positions) for pull in self.cached]
            columns = self.cached, tables, versions.split(counts), steps.split(counts)
            with client.lock:
                for cache, *column in zip(client.caches, *columns, strict=True):
                    cache.finish(*column)
        return tables

    def push(self, sums: Sequence[Tensor] | None, lr: float) -> None:
        client = self.client
        if sums is None:
            client.dropped.put(self)
            return
        if self.num_restores != client.num_restores:
            raise RuntimeError("these rows were pulled before the tables were restored; look the batch up again")
        routes = self.routes
        if self.cached or not self.admitted.all():  # the routes are not those of the ids to push
            positions, sizes = nonzero(self.admitted), [int(mask.sum()) for mask in self.admitted.split(self.sizes)]
            by_server, sizes_on = client.route(self.ids[positions], sizes)
            routes = [positions if at is None else positions[at] for at in by_server], sizes_on
        client.push(self.batch, self.ids, routes, [cat(sums[block]) for block in client.spec.blocks], lr)


@dataclass
class CachedPull:
    """Rows of a table's distinct ids in one batch, of which some are cached."""

    ids: Tensor  # int64 `[n]`
    rows: Tensor  # `[n, embedding_dim]`; valid where the cache has the row
    positions: Tensor  # int64 `[m]`, positions among `ids` that are requested from servers
    versions: Tensor  # int64 `[m]`, versions of the requested rows in the cache, or `NOT_CACHED`
    num_clears: int  # of the cache when the batch was pulled


class WorkerCache:
    """Cache of one table: rows, their versions, and the number of steps whose updates they have.

    `rows_read` counts rows that batches have read, and `rows_saved` those of them that did not cross the network.
    """

    def __init__(self, spec: TableSpec, cache: CacheConfig | None) -> None:
        self._table: DynamicTable | None = None
        self._empty = torch.empty(0, spec.embedding_dim, dtype=getattr(torch, spec.dtype))
        self.rows_read = self.rows_saved = self._num_clears = 0
        if cache is not None:
            config = TableConfig(
                spec.name, None, spec.embedding_dim, dtype=self._empty.dtype, capacity=cache.rows,
                eviction=EvictionConfig(cache.policy, protect=1),
            )  # fmt: skip
            self._table = make_table(config, ())
            self._versions = torch.full_like(self._table.index.ids, NOT_CACHED)
            self._steps = torch.zeros_like(self._versions)

    @torch.no_grad()
    def begin(self, ids: Tensor, min_steps: int | None) -> CachedPull:
        """Choose the distinct ids to request: all, or those without a row that has the updates of `min_steps` steps."""
        if self._table is None:
            rows = self._empty.new_empty(ids.numel(), self._empty.shape[1])
            return CachedPull(ids, rows, torch.arange(ids.numel()), torch.full_like(ids, NOT_CACHED), 0)
        slots = self._table.index.find(ids)
        valid_slots = slots.clamp(min=0)
        versions = torch.where(slots < 0, NOT_CACHED, self._versions[valid_slots])
        rows = self._table.weight.detach().index_select(0, valid_slots)
        positions = torch.arange(ids.numel())
        if min_steps is not None:
            positions = ((slots < 0) | (self._steps[valid_slots] < min_steps)).nonzero()[:, 0]
        return CachedPull(ids, rows, positions, versions[positions], self._num_clears)

    @torch.no_grad()
    def finish(self, pull: CachedPull, rows: Tensor, versions: Tensor, steps: Tensor) -> None:
        """Cache the requested rows of a batch, which has `rows`.

        `versions`, int64 `[m]`, are those of the requested rows on the servers; `steps`: whose updates they have.
        """
        self.rows_read += pull.ids.numel()
        self.rows_saved += pull.ids.numel() - int((versions != pull.versions).sum())
        if self._table is not None and pull.num_clears == self._num_clears:
            positions = pull.positions[: len(self._versions) // 2]  # a batch may be larger than the cache
            slots = insert_batch([self._table], *concat_ids([pull.ids[positions]]))[0]
            self._table.weight.data[slots] = rows[positions]
            self._versions[slots], self._steps[slots] = versions[: positions.numel()], steps[: positions.numel()]

    def clear(self) -> None:
        """Forget all rows, and those of batches that are being pulled."""
        if self._table is not None:
            self._table.index.clear()
            self._num_clears += 1


def wait(futures: Sequence[Future[Message]]) -> list[Message]:
    """Wait for all futures, and return their results, or raise the first failure."""
    if errors := [error for future in futures if (error := future.exception()) is not None]:
        raise errors[0]
    return [future.result() for future in futures]
