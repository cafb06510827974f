"""Leases of rows from embedding servers at staleness 0: the trainer has rows with their states while it uses them.

Reads and writes of rows are collected until one of them is waited for, and then sent together: one request per server,
preceded by another one where ids of dynamic tables are inserted.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritonemb.layout import partition_sizes
from tritonemb.server.client import CollectionClient, TableClient, wait
from tritonemb.server.connection import Connection
from tritonemb.server.partitions import cat
from tritonemb.server.spec import CollectionSpec
from tritonemb.server.transport import Message, Values
from tritonemb.storage.store import IoFuture
from tritonemb.tables.server_table import RowStore
from tritonemb.tables.table_set import TableSet


class LeaseClient(CollectionClient, RowStore):
    """Rows of a collection's tables, leased by one trainer, which applies the optimizer."""

    applies_updates = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lessee: Callable[[], TableSet | None] = lambda: None  # a weak reference, once registered
        self._has_lease = False
        self._pending_transfers: list[Transfer] = []
        self._sending = threading.RLock()
        self._allocation_error: Exception | None = None

        # Dynamic tables: each server numbers its rows from 0; the trainer's row numbers are offset by server.
        local_tables = {number for tables in self.tables_on for number in tables}
        self._dynamic = [number for number in sorted(local_tables) if self.spec.tables[number].num_embeddings is None]
        servers = range(len(self._connections))
        self._row_offsets = []
        for number, table in enumerate(self.spec.tables):
            sizes = [self.spec.partitions(number, n)[1] * partition_sizes(table.capacity)[2] for n in servers]
            self._row_offsets.append(torch.tensor([0, *sizes]).cumsum(0))
        self._descriptions = self._describe()

    def num_rows(self, table: str) -> int:
        number = self.spec.number(table)
        if number in self._dynamic:
            return int(self._row_offsets[number][-1])
        shard = self.spec.shards[number]
        return shard[1] if shard is not None else self.spec.tables[number].num_embeddings or 0

    def seed_and_clock(self, table: str) -> tuple[int, int]:
        by_number = {number: (seed, clock) for server in self._descriptions for number, seed, clock in server["tables"]}
        return by_number[self.spec.number(table)]

    def statistics(self, table: str) -> dict[str, int]:
        totals = Counter[str]()
        for connection in self._connections:
            totals.update(connection.statistics()["collections"][self._name]["tables"].get(table, {}))
        return dict(totals)

    @property
    def updates(self) -> int:
        return max(description["updates"] for description in self._descriptions)

    def _describe(self) -> list[Values]:
        """Ask each server for the number, seed and clock of its tables, and for the number of updates."""
        replies = wait([self._submit(server, "describe", {}) for server in range(len(self._connections))])
        return [values for values, _ in replies]

    def register_lessee(self, lessee: TableSet) -> None:
        self._lessee = weakref.ref(lessee)

    def begin_training(self) -> None:
        self.check_complete()
        if not self._has_lease:
            self._has_lease = True
            wait([self._submit(server, "lease", {}) for server in range(len(self._connections))])

    def allocate_rows(
        self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool
    ) -> list[tuple[Tensor, Tensor]]:
        if self._allocation_error is not None:
            raise RuntimeError(
                f"a batch was inserted on some servers, and another server was full ({self._allocation_error}); load "
                "a checkpoint"
            ) from self._allocation_error
        self.send_transfers()  # an evicted row is written back before its slot is reused
        # Send each server the ids of its partitions.
        routes = [self._route(number, table_ids) for number, table_ids in zip(self._dynamic, ids, strict=True)]
        pending, indices_by_server = list[Future[Message]](), list[list[int]]()
        for server, tables in enumerate(self.tables_on):
            indices = [index for index, number in enumerate(self._dynamic) if number in tables]
            indices_by_server.append(indices)
            columns = [[column[index][routes[index][server]] for index in indices] for column in (ids, occurrences)]
            values = {"training": training, "sizes": [table_ids.numel() for table_ids in columns[0]]}
            pending.append(self._submit(server, "allocate", values, [cat(column) for column in columns]))
        result = [(torch.empty_like(table_ids), torch.empty_like(table_ids, dtype=torch.bool)) for table_ids in ids]
        try:
            replies = wait(pending)
        except ValueError as error:
            requests = zip(pending, indices_by_server, strict=True)
            if any(future.exception() is None and indices for future, indices in requests):
                self._allocation_error = error
            raise
        # Merge the replies: rows get the offset of their server.
        for server, (_, tensors) in enumerate(replies):
            indices = indices_by_server[server]
            sizes = [len(ids[index][routes[index][server]]) for index in indices]
            for index, rows, new_mask in zip(indices, *(tensor.split(sizes) for tensor in tensors), strict=True):
                route = routes[index][server]
                offset = self._row_offsets[self._dynamic[index]][server]
                result[index][0][route] = torch.where(rows < 0, rows, rows + offset)
                result[index][1][route] = new_mask
        return result

    def read_records(self, table: str, rows: Tensor, records: Tensor) -> "Transfer":
        return self._collect(Transfer(self, self.spec.number(table), rows, records, False))

    def write_records(self, table: str, rows: Tensor, records: Tensor) -> "Transfer":
        return self._collect(Transfer(self, self.spec.number(table), rows, records, True))

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
            transfers, self._pending_transfers = self._pending_transfers, []
            writes, reads = ([transfer for transfer in transfers if transfer.is_write == w] for w in (True, False))
            if not transfers:
                return
            shards = {transfer: self._split(transfer) for transfer in transfers}
            for server in range(len(self._connections)):
                sizes, keys, records, requested = list[list[int]](), list[Tensor](), list[Tensor](), list[Transfer]()
                for transfer in (*writes, *reads):
                    table_keys, positions = shards[transfer][server]
                    if not table_keys.numel():
                        continue
                    sizes.append([transfer.table, table_keys.numel()])
                    keys.append(table_keys)
                    if transfer.is_write:
                        records.append(transfer.records[positions])
                    requested.append(transfer)
                if not requested:
                    continue
                values = {"sizes": sizes, "written": len(records)}
                future = self._submit(server, "transfer", values, [cat(keys), *records])
                for index, transfer in enumerate(requested):
                    transfer.replies.append((future, index - len(records), shards[transfer][server][1]))
            for transfer in transfers:
                transfer.sent = True

    def _split(self, transfer: "Transfer") -> list[tuple[Tensor, Any]]:
        """Return, per server, the keys of its rows and their positions in the transfer.

        Keys are ids of a static table, and the server's row numbers of a dynamic one.
        """
        table, rows = transfer.table, transfer.rows
        if table not in self._dynamic:
            shard = self.spec.shards[table]
            ids = rows if shard is None else rows + shard[0]
            return [(ids[positions], positions) for positions in self._route(table, ids)]
        offsets = self._row_offsets[table]
        bounds = torch.searchsorted(rows, offsets).tolist()
        slices = [slice(start, end) for start, end in pairwise(bounds)]
        return [(rows[positions] - offset, positions) for positions, offset in zip(slices, offsets, strict=False)]

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
            self._descriptions, self._allocation_error, self._has_lease = self._describe(), None, False

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
    """Tables that are sharded over trainers, each of which leases the rows of its shards.

    Args:
        shards: shards of all trainers: name and spec of their collections.
        local_clients: clients of this trainer's shards.
    """

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


class Transfer(IoFuture):
    """Asynchronous read or write of a table's records."""

    def __init__(self, client: LeaseClient, table: int, rows: Tensor, records: Tensor, is_write: bool) -> None:
        super().__init__()
        self._client, self.table, self.rows, self.records, self.is_write = client, table, rows, records, is_write
        self.sent = False
        self.replies: list[tuple[Future[Message], int, Any]] = []  # future, index of the tensor, positions of its rows

    def done(self) -> bool:
        return self.sent and all(future.done() for future, *_ in self.replies)

    def wait(self) -> None:
        if not self.sent:
            self._client.send_transfers()
        for future, index, positions in self.replies:
            _, tensors = future.result()
            if not self.is_write:
                self.records[positions] = tensors[index]
        self.replies = []
