"""Snapshots of the tables of a collection on one server, whole and incremental, and the way back to any servers.

A snapshot is a file of records (see `records.py`): a header; of each table the rows, or, in an incremental one, the ids
that have lost their rows and the rows that were read or written since the snapshot that it follows; the pushes that
have not been applied yet; and an end. The files of all servers at one step are one snapshot of the collection: any
number of servers, each with its own partitions, can read them.
"""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritonemb.layout import nonzero
from tritonemb.server.records import read_records
from tritonemb.server.tables import CollectionSpec, PendingBatch, ServedTables, TableSpec
from tritonemb.server.transport import Message, Values
from tritonemb.storage.store import StorageError

PIECE_BYTES = 1 << 24  # of rows in a record, about


def take_snapshot(served: ServedTables, chain: str, changes_only: bool = False) -> Iterator[Message]:
    """The records of a snapshot; of the changes since the last one of this chain, if there was one, and that is asked.

    When all are written, it is the chain's last one.
    """
    name = uuid.uuid4().hex
    served.note_removed()
    last = served.chains.get(chain) if changes_only else None
    counters = {} if served.tables is None else served.tables.counters
    yield {
        "snapshot": name, "after": None if last is None else last.snapshot, "server": served.server,
        "spec": asdict(served.spec), "pulls": served.next_pull, "steps": served.next_push, "counters": list(counters),
        "time": time.time(), "held": served.held,
    }, list(counters.values())  # fmt: skip
    for place, (number, table) in enumerate(zip(served.numbers, served.dynamic, strict=True)):
        # By row: they then get the same rows one after the other, and are written where they have been read.
        if last is None:
            rows = table.index.rows[nonzero(table.index.digests != 0)].long().sort().values
        else:
            rows = nonzero(last.changed[place])
            rows = rows[table.find(table.index.ids[rows]) == rows]
        ids = table.index.ids[rows]
        if last is not None:
            removed = torch.cat([table.index.ids[:0], *last.removed[place]]).unique()
            yield {"table": number, "kind": "removed", "names": ["ids"]}, [removed]
        others = table.get_table_state()
        yield {"table": number, "kind": "others", "names": list(others), "rows": ids.numel()}, list(others.values())
        step = max(1, PIECE_BYTES // served.spec.tables[number].row_bytes)
        for some in range(0, ids.numel(), step):
            found = table.get_row_state(ids[some : some + step], rows[some : some + step])
            if served.spec.leases_rows:  # which knows the rows' numbers, also when the server is started again
                found["row"] = rows[some : some + step] + table.row_config.row_origin
            yield {"table": number, "kind": "rows", "names": list(found)}, list(found.values())
    for batch, there in sorted(served.pushes.items()):
        for rank in sorted(there.ids):
            values = {"push": batch, "rank": rank, "lr": there.lr, "ids": len(there.ids[rank])}
            yield values, [*there.ids[rank], *there.others[rank]]
    yield {"end": name}, []
    served.begin_chain(chain, name)


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


@dataclass
class SavedShard:
    """What one server's files have of a collection, but for rows: a snapshot, and those of changes that follow it.

    Attributes:
        files: that are read, and `header` of the last one.
        others: of each table by number, what has not a row an id.
        pushes: that had not been applied.
    """

    files: list[Path]
    header: Values
    others: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    pushes: dict[int, PendingBatch] = field(default_factory=dict)

    @property
    def spec(self) -> CollectionSpec:
        """Of the collection."""
        return CollectionSpec.from_json(self.header["spec"])

    @classmethod
    def of(cls, chain: Sequence[Path]) -> "SavedShard":
        """StorageError if a file is no snapshot, or does not follow the one before it."""
        part = cls([], {})
        for path in chain:
            header = next(read_snapshot(path))[0]
            if header["after"] not in (None, part.header.get("snapshot")):
                raise StorageError(
                    f"snapshot {path} does not follow the one before it; give all of them, in their order"
                )
            part = cls([*(part.files if header["after"] else []), path], header)
        return part

    def check(self) -> None:
        """StorageError if a file is damaged."""
        for path in self.files:
            for _ in read_snapshot(path):
                pass

    def read(self, served: ServedTables, numbers: bool) -> None:
        """Bring its rows to these tables, as far as they are theirs. StorageError if a file is damaged."""
        tables, spec = dict(zip(served.numbers, served.dynamic, strict=True)), self.spec
        for path in self.files:
            records = read_snapshot(path)
            values, counters = next(records)
            self.header = {**values, "counters": dict(zip(values["counters"], counters, strict=True))}
            self.pushes = {}
            for values, tensors in records:
                if "push" in values:
                    there = self.pushes.setdefault(values["push"], PendingBatch(lr=values["lr"]))
                    rank, count = values["rank"], values["ids"]
                    there.ids[rank], there.others[rank] = tensors[:count], tensors[count:]
                    continue
                number, found = values["table"], dict(zip(values["names"], tensors, strict=True))
                if values["kind"] == "others":
                    self.others[number] = found
                if (table := tables.get(number)) is None:
                    continue
                there_has = spec.partitions(number, self.header["server"])
                if values["kind"] == "others":
                    table.reserve(values["rows"] // there_has[1])
                elif values["kind"] == "removed":
                    table.discard(found["ids"])
                else:
                    here = served.spec
                    if (there_has, spec.parts) != (here.partitions(number, served.server), here.parts):
                        mine = table.owns(found["ids"]) & here.in_part(number, found["ids"])
                        found = {name: value[mine] for name, value in found.items()}
                    if not numbers:
                        found.pop("row", None)
                    table.load_row_state(found)


def saved_shards(served: ServedTables, chains: Iterable[Sequence[Path]]) -> list[SavedShard]:
    """Of all servers' files. StorageError if they are not of one step, or of other tables."""
    parts = sorted(map(SavedShard.of, chains), key=lambda part: part.header["server"])
    if len(steps := {(part.header["pulls"], part.header["steps"]) for part in parts}) > 1:
        raise StorageError(f"these snapshots are of several steps: {sorted(steps)}")
    if any(_kind(part.spec) != _kind(served.spec) for part in parts):
        raise StorageError("these snapshots are of other tables, or of another optimizer")
    return parts


def restore(served: ServedTables, parts: Sequence[SavedShard], numbers: bool = False) -> None:
    """Become what all servers' snapshots of one step were, as far as it is in this server's partitions.

    `numbers`: rows keep theirs. StorageError if a file is damaged, perhaps when half is done: `SavedShard.check` comes
    first where that matters.
    """
    for table in served.dynamic:
        table.clear()
    for part in parts:
        part.read(served, numbers)
    for number, table in zip(served.numbers, served.dynamic, strict=True):
        having = [part for part in parts if number in part.others]
        having.sort(key=lambda part: part.spec.partitions(number, part.header["server"])[0])
        table.load_table_state(_joined([part.others[number] for part in having]))
        table.apply_row_numbers()
    served.cancel_pending()
    served.held = numbers and any(part.header["held"] for part in parts)
    served.next_pull, served.next_push = parts[0].header["pulls"], parts[0].header["steps"]
    counters: Values = next((part.header["counters"] for part in parts if part.header["counters"]), {})
    if served.tables is not None:
        served.tables.counters["step"].copy_(counters["step"])
        served.tables.set_learning_rate(float(counters["learning_rate"]))
    for batch in sorted({batch for part in parts for batch in part.pushes}):
        there = served.pushes[batch] = PendingBatch(lr=max(part.pushes[batch].lr for part in parts))
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
    """What `state_dict` has of all tables of a collection, from the snapshots of all its servers, with pending
    updates applied, as after a `flush`."""
    spec = SavedShard.of(chains[0]).spec
    number = len(spec.tables)
    served = ServedTables(replace(spec, owners=((0,),) * number, parts=(None,) * number), 0)
    restore(served, saved_shards(served, chains))
    for rank in range(spec.trainers):
        served.flush(rank, served.next_pull // spec.batches, lambda error: None)
    tables = zip(spec.tables, served.dynamic, strict=True)
    return {of.name: whole_table(of, [table.get_state()]) for of, table in tables}


def steps_of_snapshot(path: Path) -> int:
    """How many steps had been trained."""
    values, _ = next(read_records(path))
    return int(values["pulls"] // values["spec"]["batches"])


def _own_part(
    served: ServedTables, parts: Sequence[SavedShard], batch: int, rank: int
) -> tuple[list[Tensor], list[Tensor]]:
    """What this server would have been sent of a push."""
    ids, sums = list[Tensor](), list[Tensor]()
    if not any(part.pushes[batch].ids[rank] for part in parts):
        return ids, sums
    for number, table in zip(served.numbers, served.dynamic, strict=True):
        own_ids, own_sums = list[Tensor](), list[Tensor]()
        for part in parts:
            has, push = part.spec.numbers_on(part.header["server"]), part.pushes[batch]
            if number in has and push.ids[rank]:
                given = push.ids[rank][has.index(number)]
                mine = table.owns(given) & served.spec.in_part(number, given)
                own_ids.append(given[mine])
                own_sums.append(push.others[rank][has.index(number)][mine])
        ids.append(torch.cat(own_ids))
        sums.append(torch.cat(own_sums))
    return ids, sums
