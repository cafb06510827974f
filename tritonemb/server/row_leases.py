"""Leases of rows from embedding servers at staleness 0: a trainer's exclusive right to rows and their states.

Reads and writes of rows are collected until one of them is waited for, and then sent together: one request per server,
preceded by another one where ids of dynamic tables are inserted.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritonemb.layout import nonzero, segment_offsets
from tritonemb.server.client import CollectionClient, TableClient, wait
from tritonemb.server.connection import Connection
from tritonemb.server.metrics import totals
from tritonemb.server.partitions import cat, move_rows
from tritonemb.server.spec import CollectionSpec
from tritonemb.server.transport import Message, Values, empty_tensors
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
        self._pending_transfers: dict[bool, Transfer] = {}  # by whether it reads
        self._sending, self.receiving = threading.RLock(), threading.Lock()
        self._allocation_error: Exception | None = None

        # Dynamic tables: each server numbers its rows from 0; the trainer's row numbers are offset by server.
        self._row_offsets = dict[int, Tensor]()
        for number, table in enumerate(self.spec.tables):
            counts = [self.spec.partitions(number, server)[1] for server in range(len(self._connections))]
            if table.num_embeddings is None and any(counts):
                self._row_offsets[number] = torch.tensor([0, *counts]).cumsum(0) * table.rows_per_partition
        # Int64 `[T, S]` by table and server: the trainer's row number of the server's key 0. Keys of static tables are
        # ids, and rows count from the first id of the trainer's shard, so the number is minus this id.
        self._first_rows = torch.tensor([[-(shard or (0,))[0]] * len(self._connections) for shard in self.spec.shards])
        for number, offsets in self._row_offsets.items():
            self._first_rows[number] = offsets[:-1]
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
                "new ids of a batch were inserted on some servers, and another server was full "
                f"({self._allocation_error}); load a checkpoint"
            ) from self._allocation_error
        self.send_transfers()  # an evicted row is written back before its slot is reused
        numbers, batch_ids, sizes = list(self._row_offsets), cat(ids), [*map(len, ids)]
        routes = self.route(batch_ids, sizes, numbers)
        pending = self._scatter("allocate", {"training": training}, [batch_ids, cat(occurrences)], routes, (), numbers)
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

    def transfer(self, requests: Sequence[tuple[Any, Tensor, Tensor]], write: bool) -> list[IoFuture]:
        transfer = Transfer(self, [(self.spec.numbers[s.table_name], rows, records) for s, rows, records in requests])
        with self._sending:
            if (reads := not write) in self._pending_transfers:
                self.send_transfers()  # a request reads and writes each table at most once
            self._pending_transfers[reads] = transfer
        return [transfer]

    def send_transfers(self) -> None:
        """Send the collected transfers, writes before reads, a request per server."""
        with self._sending:
            pending, self._pending_transfers = sorted(self._pending_transfers.items()), {}
            entries = [(reads, *entry) for reads, transfer in pending for entry in transfer.entries]
            replies: list[tuple[Future[Message], Any]] = []
            for server, (keys, sizes, rows) in enumerate(self._route_rows(entries)):
                parts = list(compress(entries, sizes))
                if not parts:
                    continue
                # Gather the records to write, a matrix per block of tables.
                is_read, numbers, _, tensors = zip(*parts, strict=True)
                num_writes, sizes, records = is_read.count(False), [*filter(None, sizes)], record_fields(tensors)
                written, read = slice(num_writes), slice(num_writes, None)
                blocks = [self.spec.record_blocks(numbers[half]) for half in (written, read)]
                shapes, first = self.spec.record_shapes(numbers, sizes, blocks[0]), sum(sizes[written])
                message = empty_tensors([("int64", [len(keys)]), *shapes])
                message[0].copy_(keys)
                fields = record_fields(message[1:])
                move_rows(fields, blocks[0], records[written], rows[:first], sizes[written], write=False)
                values = {"sizes": [*zip(numbers, sizes, strict=True)], "writes": num_writes}
                arguments = blocks[1], records[read], rows[first:], sizes[read], True
                replies.append((self._submit(server, "transfer", values, message), arguments))
            for _, transfer in pending:
                transfer.replies = replies

    def _route_rows(self, entries: Sequence[tuple[Any, ...]]) -> list[tuple[Tensor, list[int], Tensor]]:
        """Return, per server, the keys of its rows, their number per entry, and their positions in the entries."""
        if not entries:
            return []
        numbers, sizes = [number for _, number, *_ in entries], [len(rows) for _, _, rows, _ in entries]
        rows, counts = cat([rows for _, _, rows, _ in entries]), torch.tensor(sizes)
        # Static rows are routed by their ids, those of dynamic tables by the servers' offsets.
        first_rows, starts = self._first_rows[numbers].T.contiguous(), segment_offsets(counts)[:-1]
        positions, shard_sizes = self.route(rows - first_rows[0].repeat_interleave(counts), sizes, numbers)
        positions = [torch.arange(len(rows)) if at is None else at for at in positions]
        if self._row_offsets:
            entry_of, servers = torch.arange(len(sizes)).repeat_interleave(counts), torch.zeros_like(rows)
            for server, at in enumerate(positions):
                servers[at] = server
            is_dynamic = torch.tensor([number in self._row_offsets for number in numbers])[entry_of]
            servers = torch.where(is_dynamic, (rows >= first_rows[:, entry_of]).sum(0) - 1, servers)
            positions = [nonzero(servers == server) for server in range(len(positions))]
            shard_sizes = [entry_of[at].bincount(minlength=len(sizes)).tolist() for at in positions]
        shards = list[tuple[Tensor, list[int], Tensor]]()
        for origins, at, shard in zip(first_rows, positions, shard_sizes, strict=True):
            columns = (column.repeat_interleave(torch.tensor(shard)) for column in (origins, starts))
            shards.append((rows[at] - next(columns), shard, at - next(columns)))
        return shards

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
    """Tables sharded over trainers; each trainer leases the rows of its shards through its `local_clients`."""

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
    """Asynchronous read or write of tables' records."""

    client: LeaseClient
    entries: list[tuple[int, Tensor, Tensor]]  # number, rows and records of each table
    # Per server the reply to all transfers sent together, and arguments of `move_rows` for its records; None: not sent.
    replies: list[tuple[Future[Message], Any]] | None = None

    def done(self) -> bool:
        return self.replies is not None and all(future.done() for future, _ in self.replies)

    def wait(self) -> None:
        if self.replies is None:
            self.client.send_transfers()
        assert self.replies is not None
        with self.client.receiving:
            for future, arguments in self.replies:
                move_rows(record_fields(future.result()[1]), *arguments)
            self.replies.clear()


def record_fields(records: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    return [{"record": table_records} for table_records in records]
