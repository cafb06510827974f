"""Snapshots of the tables of a collection on one server, whole and incremental, and the way back to any servers.

A snapshot is a file of records (see `records.py`): a header; of each table the rows, or, in an incremental one, the ids
that have lost their rows and the rows that were read or written since the snapshot that it follows; the pushes that
have not been applied yet; and an end. The files of all servers at one step are one snapshot of the collection: any
number of servers, each with its own partitions, can read them.
"""

import functools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.server.records import read_records
from tritonemb.server.tables import Chain, CollectionSpec, SentBatch, ServedTables, TableSpec
from tritonemb.server.transport import Message
from tritonemb.storage import StorageError
from tritonemb.tables.dynamic_table import DynamicTable

PIECE_BYTES = 1 << 26  # of rows in a record
BY_ROW = ("ids", "step", "count", "row")  # and weight and states

Values = dict[str, Any]


def take_snapshot(served: ServedTables, chain: str, changes_only: bool = False) -> Iterator[Message]:
    """The records of a snapshot; of the changes since the last one of this chain, if there was one, and that is asked.

    When all are written, it is the chain's last one.
    """
    name, names = uuid.uuid4().hex, ("weight", *(spec.name for spec in served.optimizer.states))
    if any(table.removed is None for table in served.dynamic):
        served.chains = {}  # a table was loaded
    last = served.chains.get(chain) if changes_only else None
    counters = {} if served.tables is None else served.tables.counters
    yield {
        "snapshot": name, "after": None if last is None else last.snapshot, "server": served.server,
        "spec": asdict(served.spec), "pulls": served.next_pull, "steps": served.next_push, "counters": list(counters),
        "time": time.time(), "held": served.held,
    }, list(counters.values())  # fmt: skip
    for place, (number, table) in enumerate(zip(served.numbers, served.dynamic, strict=True)):
        for each in served.chains.values():
            each.removed[place] += table.removed or []
        table.removed = []
        found = table.saved() if last is None else _changed_rows(table, last.changed[place])
        if served.spec.held_by_trainer:  # which knows the rows' numbers, also when the server is started again
            found["row"] = table.find(found["ids"]) + table.row_config.row_origin
        if last is not None:
            removed = torch.cat([table.index.ids[:0], *last.removed[place]]).unique()
            yield {"table": number, "kind": "removed", "names": ["ids"]}, [removed]
        of_rows = {name: value for name, value in found.items() if name in (*BY_ROW, *names)}
        others = {name: value for name, value in found.items() if name not in of_rows}
        yield {"table": number, "kind": "others", "names": list(others)}, list(others.values())
        row_bytes = sum(value[:1].nbytes for value in of_rows.values())
        step, rows = max(1, PIECE_BYTES // max(1, row_bytes)), found["ids"].numel()
        for first in range(0, max(1, rows), step):
            pieces = [value[first : first + step] for value in of_rows.values()]
            yield {"table": number, "kind": "rows", "names": list(of_rows)}, pieces
    for batch, there in sorted(served.pushes.items()):
        for rank in sorted(there.ids):
            values = {"push": batch, "rank": rank, "lr": there.lr, "ids": len(there.ids[rank])}
            yield values, [*there.ids[rank], *there.others[rank]]
    yield {"end": name}, []
    served.chains[chain] = Chain(
        name, [torch.zeros(len(table.index.ids), dtype=torch.bool) for table in served.dynamic],
        [[] for _ in served.dynamic],
    )  # fmt: skip


def _changed_rows(table: DynamicTable, changed: Tensor) -> dict[str, Tensor]:
    """As `saved`, of the rows that were read or written since they were last asked for."""
    rows = changed.nonzero()[:, 0]
    ids = table.index.ids[rows]
    ids = ids[table.find(ids) == rows].sort().values
    rows = table.find(ids)
    found = {"ids": ids, **table.read_rows(rows)}
    found |= {"step": table.index.used[rows].long(), "count": table.index.counts[rows].long()}
    found |= {"clock": torch.tensor(table.clock), "seed": torch.tensor(table.seed)}
    return found | ({} if table.sketch is None else table.sketch.tensors())


def read_snapshot(path: Path) -> Iterator[Message]:
    """The header of a snapshot, and its records. StorageError if it is damaged, or something else."""
    records = read_records(path)
    header = next(records, ({}, []))
    if "snapshot" not in header[0]:
        raise StorageError(f"file {path} is not a snapshot of an embedding server")
    yield header
    for record in records:
        if "end" in record[0]:
            return
        yield record
    raise StorageError(f"snapshot {path} has no end; use another one")


class Restored:
    """What a server's files have of a collection: a snapshot, and those of changes that follow it.

    Attributes:
        header: of the last one.
        rows, others: of each table by number, what has a row an id, ids among it, and what has not.
        pushes: that had not been applied.
    """

    def __init__(self) -> None:
        self.header: Values = {}
        self.rows: dict[int, dict[str, Tensor]] = {}
        self.others: dict[int, dict[str, Tensor]] = {}
        self.pushes: dict[int, SentBatch] = {}

    @property
    def spec(self) -> CollectionSpec:
        """Of the collection."""
        return CollectionSpec.from_json(self.header["spec"])

    def saved(self, table: int) -> dict[str, Tensor]:
        """As of `DynamicTable`."""
        return self.rows[table] | self.others[table]

    def read(self, path: Path) -> "Restored":
        """Take a file on top of those before. StorageError if it is damaged, or does not follow."""
        records = read_snapshot(path)
        values, counters = next(records)
        if values["after"] not in (None, self.header.get("snapshot")):
            raise StorageError(f"snapshot {path} does not follow the one before it; give all of them, in their order")
        self.header = {**values, "counters": dict(zip(values["counters"], counters, strict=True))}
        if values["after"] is None:
            self.rows, self.others = {}, {}
        self.pushes, pieces = {}, dict[int, list[dict[str, Tensor]]]()
        for values, tensors in records:
            if "push" in values:
                there = self.pushes.setdefault(values["push"], SentBatch(lr=values["lr"]))
                there.ids[values["rank"]], there.others[values["rank"]] = (
                    tensors[: values["ids"]],
                    tensors[values["ids"] :],
                )
                continue
            table, found = values["table"], dict(zip(values["names"], tensors, strict=True))
            if values["kind"] == "others":
                self.others[table] = found
            elif values["kind"] == "removed":
                self.rows[table] = _without(self.rows[table], found["ids"])
            else:
                pieces.setdefault(table, []).append(found)
        for table, parts in pieces.items():
            new = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            if table in self.rows:
                old = _without(self.rows[table], new["ids"])
                new = {name: torch.cat([old[name], value]) for name, value in new.items()}
            self.rows[table] = new
        return self


def _without(rows: Mapping[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    stay = torch.from_numpy(~np.isin(rows["ids"].numpy(), ids.numpy()))
    return {name: value[stay] for name, value in rows.items()}


def restore(served: ServedTables, parts: Sequence[Restored], numbers: bool = False) -> None:
    """Become what all servers' snapshots of one step were, as far as it is in this server's partitions.

    `numbers`: rows keep theirs. StorageError if they are not of one step, or of other tables; nothing has changed then.
    """
    spec, parts = served.spec, sorted(parts, key=lambda part: part.header["server"])
    if len(steps := {(part.header["pulls"], part.header["steps"]) for part in parts}) > 1:
        raise StorageError(f"these snapshots are of several steps: {sorted(steps)}")
    if any(_kind(part.spec) != _kind(spec) for part in parts):
        raise StorageError("these snapshots are of other tables, or of another optimizer")
    for number, table in zip(served.numbers, served.dynamic, strict=True):
        saved = _joined([part.saved(number) for part in parts if number in part.rows])
        if not numbers:
            saved.pop("row", None)
        table.adopt(saved)
    served.take_back()
    served.held = numbers and any(part.header["held"] for part in parts)
    served.next_pull, served.next_push = steps.pop()
    counters: Values = next((part.header["counters"] for part in parts if part.header["counters"]), {})
    if served.tables is not None:
        served.tables.counters["step"].copy_(counters["step"])
        served.tables.set_learning_rate(float(counters["learning_rate"]))
    for batch in sorted({batch for part in parts for batch in part.pushes}):
        there = served.pushes[batch] = SentBatch(lr=max(part.pushes[batch].lr for part in parts))
        for rank in sorted({rank for part in parts for rank in part.pushes[batch].ids}):
            there.ids[rank], there.others[rank] = _own_part(served, parts, batch, rank)


def _kind(spec: CollectionSpec) -> tuple[Any, ...]:
    """What snapshots and servers must have in common."""
    return spec.optimizer, *(replace(table, seed=0) for table in spec.tables)


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The `saved()` of a whole dynamic table, from those of its parts in order."""
    return {
        name: value if value.dim() == 0 else torch.cat([part[name] for part in parts], int(name == "sketch"))
        for name, value in parts[0].items()
    }


def whole_table(spec: TableSpec, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What `state_dict` has of a table, from what its servers, in order, have of it."""
    saved = _joined(parts)
    saved.pop("row", None)
    ids, order = saved["ids"].sort()
    by_row = {name for name, value in parts[0].items() if value.dim() and value.shape[0] == parts[0]["ids"].shape[0]}
    saved |= {name: saved[name][order] for name in by_row - {"sketch", "added", "row"}} | {"ids": ids}
    if spec.num_embeddings is None:
        return saved
    whole = {"weight": spec.initial_values(torch.arange(spec.num_embeddings), int(saved["seed"]))}
    for name in saved.keys() - {"ids", "step", "count", "clock", "seed"}:
        value = saved[name]
        whole.setdefault(name, value.new_zeros(spec.num_embeddings, *value.shape[1:]))[ids] = value
    return whole


def read_tables(chains: Sequence[Sequence[Path]]) -> dict[str, dict[str, Tensor]]:
    """What `state_dict` has of all tables of a collection, from the snapshots of all its servers."""
    parts = [functools.reduce(Restored.read, chain, Restored()) for chain in chains]
    parts.sort(key=lambda part: part.header["server"])
    tables = enumerate(parts[0].spec.tables)
    return {spec.name: whole_table(spec, [p.saved(n) for p in parts if n in p.rows]) for n, spec in tables}


def steps_of_snapshot(path: Path) -> int:
    """How many steps had been trained."""
    values, _ = next(read_records(path))
    return int(values["pulls"] // values["spec"]["batches"])


def _own_part(
    served: ServedTables, parts: Sequence[Restored], batch: int, rank: int
) -> tuple[list[Tensor], list[Tensor]]:
    """What this server would have been sent of a push."""
    ids, sums = list[Tensor](), list[Tensor]()
    if not any(part.pushes[batch].ids[rank] for part in parts):
        return ids, sums
    for number, table in zip(served.numbers, served.dynamic, strict=True):
        own_ids, own_sums = list[Tensor](), list[Tensor]()
        for part in parts:
            there = part.spec
            has = [n for n in range(len(there.tables)) if there.partitions(n, part.header["server"])[1]]
            push = part.pushes[batch]
            if number in has and push.ids[rank]:
                given = push.ids[rank][has.index(number)]
                mine = table.owns(given)
                own_ids.append(given[mine])
                own_sums.append(push.others[rank][has.index(number)][mine])
        ids.append(torch.cat(own_ids))
        sums.append(torch.cat(own_sums))
    return ids, sums
