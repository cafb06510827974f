"""Leases of rows from embedding servers at staleness 0: the trainer has rows with their states while it uses them.

Reads and writes of rows are collected until one of them is waited for, and then sent together: one request per server,
preceded by another one where ids of dynamic tables are inserted.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritonemb.layout import segment_offsets
from tritonemb.server.client import CollectionClient, TableClient, wait
from tritonemb.server.connection import Connection
from tritonemb.server.metrics import totals
from tritonemb.server.partitions import cat
from tritonemb.server.spec import CollectionSpec
from tritonemb.server.transport import Message, Values
from tritonemb.storage.store import IoFuture
from tritonemb.tables.server_table import RowStore
from tritonemb.tables.table_set import TableSet


class LeaseClient(CollectionClient, RowStore):
    """Rows of a collection's tables, leased by one trainer, which applies the optimizer."""

    applies_updates = False

    def __init__(self, connections: Sequence[Connection], name: str, spec: CollectionSpec) -> None:
        super().__init__(connections, name, spec)
        self._lessee: Callable[[], TableSet | None] = lambda: None  # a weak reference, once registered
        self._has_lease = False
        self._pending_transfers: list[Transfer] = []
        self._sending = threading.RLock()
        self._allocation_error: Exception | None = None

        # Dynamic tables: each server numbers its rows from 0; the trainer's row numbers are offset by server.
        self._row_offsets = dict[int, Tensor]()
        for number, table in enumerate(self.spec.tables):
            counts = [self.spec.partitions(number, server)[1] for server in range(len(self._connections))]
            if table.num_embeddings is None and any(counts):
                self._row_offsets[number] = torch.tensor([0, *counts]).cumsum(0) * table.rows_per_partition
        self._descriptions = self._submit_all("describe", {})

    def num_rows(self, table: str) -> int:
        offsets = self._row_offsets.get(self.spec.numbers[table])
        return 0 if offsets is None else int(offsets[-1])

    def seed_and_clock(self, table: str) -> tuple[int, int]:
        tables = [description for values, _ in self._descriptions for description in values["tables"]]
        by_number = {number: (seed, clock) for number, seed, clock in tables}
        return by_number[self.spec.numbers[table]]

    def statistics(self, table: str) -> dict[str, int]:
        statistics = [connection.statistics() for connection in self._connections]
        tables: dict[str, dict[str, int]] = totals(statistics)[self._name]["tables"]
        return tables.get(table, {})

    @property
    def updates(self) -> int:
        return max(values["updates"] for values, _ in self._descriptions)

    def register_lessee(self, lessee: TableSet) -> None:
        self._lessee = weakref.ref(lessee)

    def begin_training(self) -> None:
        self.check_complete()
        if not self._has_lease:
            self._has_lease = True
            self._submit_all("lease", {})

    def allocate_rows(
        self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool
    ) -> list[tuple[Tensor, Tensor]]:
        if self._allocation_error is not None:
            raise RuntimeError(
                f"a batch was inserted on some servers, and another server was full ({self._allocation_error}); load "
                "a checkpoint"
            ) from self._allocation_error
        self.send_transfers()  # an evicted row is written back before its slot is reused
        numbers, batch_ids, sizes = list(self._row_offsets), cat(ids), [*map(len, ids)]
        routes = self.route(batch_ids, sizes, numbers)
        pending = self._scatter(
            "allocate", {"training": training}, [batch_ids, cat(occurrences)], routes, None, numbers
        )
        try:
            replies = wait(pending)
        except ValueError as error:
            has_tables = [not set(numbers).isdisjoint(tables) for tables in self.tables_on]
            if any(future.exception() is None and has for future, has in zip(pending, has_tables, strict=True)):
                self._allocation_error = error
            raise
        # Merge the replies: rows get the offset of their server.
        rows, new_mask = torch.empty_like(batch_ids), torch.empty_like(batch_ids, dtype=torch.bool)
        for server, (positions, shard, (_, tensors)) in enumerate(zip(*routes, replies, strict=True)):
            first_rows = torch.stack([offsets[server] for offsets in self._row_offsets.values()])
            index: Any = slice(None) if positions is None else positions
            rows[index], new_mask[index] = tensors
            rows[index] += first_rows.repeat_interleave(torch.tensor(shard)).where(rows[index] >= 0, 0)
        return list(zip(rows.split(sizes), new_mask.split(sizes), strict=True))

    def read_records(self, table: str, rows: Tensor, records: Tensor) -> "Transfer":
        return self._collect(Transfer(self, self.spec.numbers[table], rows, records, False))

    def write_records(self, table: str, rows: Tensor, records: Tensor) -> "Transfer":
        return self._collect(Transfer(self, self.spec.numbers[table], rows, records, True))

    def _collect(self, transfer: "Transfer") -> "Transfer":
        with self._sending:
            key = transfer.table, transfer.is_write
            if any((pending.table, pending.is_write) == key for pending in self._pending_transfers):
                self.send_transfers()  # a request reads and writes each table at most once
            self._pending_transfers.append(transfer)
        return transfer

    def send_transfers(self) -> None:
        """Send the collected transfers, writes before reads."""
        with self._sending:
            pending, self._pending_transfers = self._pending_transfers, []
            writes, reads = ([transfer for transfer in pending if transfer.is_write == w] for w in (True, False))
            transfers, keys = [*writes, *reads], [*self._keys(writes), *self._keys(reads)]
            for server in range(len(self._connections)):
                requested = [(t, *shards[server]) for t, shards in zip(transfers, keys, strict=True)]
                requested = [shard for shard in requested if shard[1].numel()]
                if not requested:
                    continue
                records = [transfer.records[positions] for transfer, _, positions in requested if transfer.is_write]
                sizes = [[transfer.table, table_keys.numel()] for transfer, table_keys, _ in requested]
                tensors = [cat([table_keys for _, table_keys, _ in requested]), *records]
                future = self._submit(server, "transfer", {"sizes": sizes}, tensors)
                for index, (transfer, _, positions) in enumerate(requested):
                    transfer.replies.append((future, index - len(records), positions))
            for transfer in transfers:
                transfer.sent = True

    def _keys(self, transfers: Sequence["Transfer"]) -> list[list[tuple[Tensor, Any]]]:
        """Return, per transfer of a table and per server, the keys of its rows and their positions in the transfer.

        Keys are ids of a static table, and the server's row numbers of a dynamic one.
        """
        keys, static = list[list[tuple[Tensor, Any]]](), [t for t in transfers if t.table not in self._row_offsets]
        ids = [transfer.rows + (self.spec.shards[transfer.table] or (0,))[0] for transfer in static]
        starts, all_ids = segment_offsets(torch.tensor([*map(len, ids)]))[:-1], cat(ids)
        shards = (
            (all_ids[at].split(sizes), (at - starts.repeat_interleave(torch.tensor(sizes).long())).split(sizes))
            for at, sizes in zip(*self.spec.route(all_ids, [*map(len, ids)], [t.table for t in static]), strict=True)
        )
        static_keys = map(list, zip(*(zip(*shard, strict=True) for shard in shards), strict=True))
        for transfer in transfers:
            if (offsets := self._row_offsets.get(transfer.table)) is None:
                keys.append(next(static_keys))
            else:
                slices = [slice(*bounds) for bounds in pairwise(torch.searchsorted(transfer.rows, offsets).tolist())]
                keys.append([(transfer.rows[s] - offset, s) for s, offset in zip(slices, offsets, strict=False)])
        return keys

    def _write_back(self) -> None:
        if (lessee := self._lessee()) is not None and lessee.cache is not None:
            lessee.cache.write_back()
            self.send_transfers()

    def flush(self) -> None:
        self._write_back()
        values, lessee = Values(steps=self.steps), self._lessee()
        if lessee is not None:
            step, self._has_lease = int(lessee.counters["step"]), False
            self._batch = self._pushed = step * self.spec.batches
            values = {"steps": step, "returned": {"steps": step, "lr": float(lessee.counters["learning_rate"])}}
        self._submit_all("flush", values)

    return_leases = flush

    def discard_leases(self) -> None:
        with self._replacing():
            pass

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        """Drop cached rows, and describe the tables again, around a replacement of the servers' rows."""
        lessee = self._lessee()
        with nullcontext() if lessee is None else lessee.replacing_rows():
            yield
            self._allocation_error, self._has_lease = None, False
            self._descriptions = self._submit_all("describe", {})

    def snapshot(self, path: Path, changes_only: bool = False, chain: str = "checkpoints") -> list[Values]:
        self.return_leases()
        return super().snapshot(path, changes_only, chain)

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        with self._replacing():
            super().restore(chains, steps)
        if (lessee := self._lessee()) is not None:
            lessee.counters["step"].fill_(self.updates)

    def tensors(self, table: str) -> dict[str, Tensor]:
        self._write_back()
        return super().tensors(table)

    def load(self, table: str, tensors: Mapping[str, Tensor]) -> None:
        with self._replacing():
            super().load(table, tensors)


class ShardedLeases(TableClient):
    """Tables that are sharded over trainers, each of which leases the rows of its shards by its `local_clients`."""

    applies_updates = False

    def __init__(
        self, connections: Sequence[Connection], shards: Sequence[tuple[str, CollectionSpec]],
        local_clients: Sequence[LeaseClient], group: Any,
    ) -> None:  # fmt: skip
        super().__init__(connections, shards)
        self._local_clients, self._group = list(local_clients), group

    @property
    def steps(self) -> int:
        """Number of steps that had been trained when leases were last returned."""
        return max((client.steps for client in self._local_clients), default=0)

    def return_leases(self) -> None:
        for client in self._local_clients:
            client.return_leases()
        self._group.all_gather_object(None)  # wait for all trainers

    flush = return_leases

    def discard_leases(self) -> None:
        for client in self._local_clients:
            client.discard_leases()

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        super().restore(chains, steps)
        for client in self._local_clients if not chains else ():
            client.restore([], steps)

    def tensors(self, table: str) -> dict[str, Tensor]:
        """Return a table's `state_dict`; all trainers call this."""
        self.return_leases()
        result = super().tensors(table)
        self._group.all_gather_object(None)  # no trainer continues before all have read
        return result


@dataclass(eq=False)
class Transfer(IoFuture):
    """Asynchronous read or write of a table's records."""

    client: LeaseClient
    table: int
    rows: Tensor
    records: Tensor
    is_write: bool
    sent: bool = False
    # Future, index of the tensor, positions of its rows.
    replies: list[tuple[Future[Message], int, Any]] = field(default_factory=list)

    def done(self) -> bool:
        return self.sent and all(future.done() for future, *_ in self.replies)

    def wait(self) -> None:
        if not self.sent:
            self.client.send_transfers()
        for future, index, positions in self.replies:
            _, tensors = future.result()
            if not self.is_write:
                self.records[positions] = tensors[index]
        self.replies = []
