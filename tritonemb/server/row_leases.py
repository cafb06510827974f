"""A trainer's side of embedding servers at staleness 0: it has rows with their states while it uses them.

What is to be read and written is collected until somebody waits for some of it, and then sent together: a message to
each server, and one more before it where ids of dynamic tables get rows.
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
from tritonemb.server.client import CollectionClient, Connection, TableClient, wait
from tritonemb.server.tables import CollectionSpec, cat
from tritonemb.server.transport import Message, Values
from tritonemb.storage.store import IoFuture
from tritonemb.tables.cached_server_table import RowStore
from tritonemb.tables.table_set import TableSet


class LeaseClient(CollectionClient, RowStore):
    """The rows of a collection's tables, for the one trainer that they belong to."""

    applies_updates = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._holder: Callable[[], TableSet | None] = lambda: None  # a weak reference, once there is one
        self._to_send: list[Transfer] = []
        self._sending = threading.RLock()
        self._refusal: Exception | None = None
        self._told = False  # that rows are held here
        has = {number for of_server in self._has for number in of_server}
        self._dynamic = [number for number in sorted(has) if self.spec.tables[number].num_embeddings is None]
        servers = range(len(self._connections))
        # Of each table and server, the number of its first row, if ids get rows.
        self._first_rows = []
        for number, table in enumerate(self.spec.tables):
            sizes = [self.spec.partitions(number, n)[1] * partition_sizes(table.capacity)[2] for n in servers]
            self._first_rows.append(torch.tensor([0, *sizes]).cumsum(0))
        self._facts = self._ask_facts()

    def num_rows(self, table: str) -> int:
        number = self.spec.number(table)
        if number in self._dynamic:
            return int(self._first_rows[number][-1])
        part = self.spec.parts[number]
        return part[1] if part is not None else self.spec.tables[number].num_embeddings or 0

    def seed_and_clock(self, table: str) -> tuple[int, int]:
        facts = {number: (seed, clock) for of_server in self._facts for number, seed, clock in of_server["tables"]}
        return facts[self.spec.number(table)]

    def statistics(self, table: str) -> dict[str, int]:
        found = Counter[str]()
        for connection in self._connections:
            found.update(connection.statistics()["collections"][self._name]["tables"].get(table, {}))
        return dict(found)

    @property
    def updates(self) -> int:
        return max(facts["updates"] for facts in self._facts)

    def _ask_facts(self) -> list[Values]:
        return [values for values, _ in wait([self._submit(n, "facts", {}) for n in range(len(self._connections))])]

    def register_lessee(self, holder: TableSet) -> None:
        self._holder = weakref.ref(holder)

    def begin_training(self) -> None:
        self.check_complete()
        if not self._told:
            self._told = True
            wait([self._submit(server, "hold", {}) for server in range(len(self._connections))])

    def allocate_rows(
        self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool
    ) -> list[tuple[Tensor, Tensor]]:
        if self._refusal is not None:
            raise RuntimeError(
                f"a batch found no room on one of the servers ({self._refusal}), and got rows on others; load a "
                "checkpoint"
            ) from self._refusal
        self.send_rows()  # a row that is about to be another id's is written before
        routes = [self._route(number, of_table) for number, of_table in zip(self._dynamic, ids, strict=True)]
        pending, own = list[Future[Message]](), list[list[int]]()
        for server, has in enumerate(self._has):
            own.append([place for place, number in enumerate(self._dynamic) if number in has])
            parts = [[of[place][routes[place][server]] for place in own[-1]] for of in (ids, occurrences)]
            values = {"training": training, "sizes": [part.numel() for part in parts[0]]}
            pending.append(self._submit(server, "assign", values, [cat(part) for part in parts]))
        rows = [(torch.empty_like(of_table), torch.empty_like(of_table, dtype=torch.bool)) for of_table in ids]
        try:
            answers = wait(pending)
        except ValueError as error:
            if any(future.exception() is None and of for future, of in zip(pending, own, strict=True)):
                self._refusal = error
            raise
        for server, (_, found) in enumerate(answers):
            sizes = [len(ids[place][routes[place][server]]) for place in own[server]]
            for place, places, new in zip(own[server], *(each.split(sizes) for each in found), strict=True):
                mine = routes[place][server]
                first = self._first_rows[self._dynamic[place]][server]
                rows[place][0][mine] = torch.where(places < 0, places, places + first)
                rows[place][1][mine] = new
        return rows

    def read_records(self, table: str, rows: Tensor, records: Tensor) -> "Transfer":
        return self._collect(Transfer(self, self.spec.number(table), rows, records, False))

    def write_records(self, table: str, rows: Tensor, records: Tensor) -> "Transfer":
        return self._collect(Transfer(self, self.spec.number(table), rows, records, True))

    def _collect(self, transfer: "Transfer") -> "Transfer":
        with self._sending:
            if any((each.table, each.writes) == (transfer.table, transfer.writes) for each in self._to_send):
                self.send_rows()  # a message has a table once
            self._to_send.append(transfer)
        return transfer

    def send_rows(self) -> None:
        """Send what has been collected; what is written before what is read."""
        with self._sending:
            transfers, self._to_send = self._to_send, []
            writes, reads = ([each for each in transfers if each.writes == kind] for kind in (True, False))
            if not transfers:
                return
            parts = {each: self._parts(each) for each in transfers}
            for server in range(len(self._connections)):
                sizes, keys, records, asked = list[list[int]](), list[Tensor](), list[Tensor](), list[Transfer]()
                for each in (*writes, *reads):
                    key, mine = parts[each][server]
                    if not key.numel():
                        continue
                    sizes.append([each.table, key.numel()])
                    keys.append(key)
                    if each.writes:
                        records.append(each.records[mine])
                    asked.append(each)
                if not asked:
                    continue
                values = {"sizes": sizes, "written": len(records)}
                future = self._submit(server, "move", values, [cat(keys), *records])
                for place, each in enumerate(asked):
                    each.pieces.append((future, place - len(records), parts[each][server][1]))
            for each in transfers:
                each.sent = True

    def _parts(self, transfer: "Transfer") -> list[tuple[Tensor, Any]]:
        """Of each server the keys of its rows, ids or, where ids get rows, numbers there; and which they are."""
        table, rows = transfer.table, transfer.rows
        if table not in self._dynamic:
            part = self.spec.parts[table]
            ids = rows if part is None else rows + part[0]
            return [(ids[mine], mine) for mine in self._route(table, ids)]
        bounds = torch.searchsorted(rows, self._first_rows[table]).tolist()
        slices = [slice(begin, end) for begin, end in pairwise(bounds)]
        return [(rows[mine] - first, mine) for mine, first in zip(slices, self._first_rows[table], strict=False)]

    def _write_back(self) -> None:
        if (holder := self._holder()) is not None:
            holder.write_back()
            self.send_rows()

    def flush(self) -> None:
        self._write_back()
        values, holder = Values(steps=self.steps), self._holder()
        if holder is not None:
            step, self._told = int(holder.counters["step"]), False
            self._batch = self._pushed = step * self.spec.batches
            values = {"steps": step, "returned": {"steps": step, "lr": float(holder.counters["learning_rate"])}}
        self._ask_all("flush", values)

    return_leases = flush

    def discard_leases(self) -> None:
        with self._replacing():
            pass

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        """While servers get other rows."""
        holder = self._holder()
        with nullcontext() if holder is None else holder.replacing_rows():
            yield
            self._facts, self._refusal, self._told = self._ask_facts(), None, False

    def snapshot(self, path: Path, changes_only: bool = False, chain: str = "checkpoints") -> list[Values]:
        self.return_leases()
        return super().snapshot(path, changes_only, chain)

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        with self._replacing():
            super().restore(chains, steps)
        if (holder := self._holder()) is not None:
            holder.counters["step"].fill_(self.updates)

    def tensors(self, table: str) -> dict[str, Tensor]:
        self._write_back()
        return super().tensors(table)

    def load(self, table: str, tensors: Mapping[str, Tensor]) -> None:
        with self._replacing():
            super().load(table, tensors)


class ShardedLeases(TableClient):
    """Tables of which each trainer holds rows of its own.

    Args:
        own: this trainer's.
        parts: those of all trainers, by the names of their collections.
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
        """How many have been trained, when rows were last returned."""
        return max((client.steps for client in self._local_clients), default=0)

    def return_leases(self) -> None:
        for client in self._local_clients:
            client.return_leases()
        self._group.all_gather_object(None)  # when all have done so

    flush = return_leases

    def discard_leases(self) -> None:
        for client in self._local_clients:
            client.discard_leases()

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        super().restore(chains, steps)
        for client in self._local_clients if not chains else ():
            client.restore([], steps)

    def tensors(self, table: str) -> dict[str, Tensor]:
        """What `state_dict` has of a table; all trainers call this."""
        self.return_leases()
        found = super().tensors(table)
        self._group.all_gather_object(None)  # before anybody goes on
        return found


class Transfer(IoFuture):
    """Rows of a table that are read or written."""

    def __init__(self, client: LeaseClient, table: int, rows: Tensor, records: Tensor, writes: bool) -> None:
        super().__init__()
        self._client, self.table, self.rows, self.records, self.writes = client, table, rows, records, writes
        self.sent = False
        self.pieces: list[tuple[Future[Message], int, Any]] = []  # an answer, the tensor there, and which rows it has

    def done(self) -> bool:
        return self.sent and all(future.done() for future, *_ in self.pieces)

    def wait(self) -> None:
        if not self.sent:
            self._client.send_rows()
        for future, number, mine in self.pieces:
            _, tensors = future.result()
            if not self.writes:
                self.records[mine] = tensors[number]
        self.pieces = []
