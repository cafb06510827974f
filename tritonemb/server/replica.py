"""Replicas of a collection's tables, for serving: they are looked up by any threads, and never change.

A table is its ids, ascending, and their rows: no states, and no index. A lookup sorts what it is asked for, and
searches: rows of 1,000 ids among 10^7 take a millisecond. The hash index of a `DynamicTable` would be faster, but would
have to be copied, or built again, for each snapshot. The next replica is made beside this one, with one copy of the
rows that stay.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tritonemb.server.snapshot import read_snapshot
from tritonemb.server.tables import CollectionSpec, TableSpec
from tritonemb.server.transport import Values
from tritonemb.storage.store import StorageError
from tritonemb.utils import did_you_mean, join_names

Files = list[tuple[Path, Values]]  # of a server, with their headers, in their order
Events = list[tuple[Tensor, Tensor | None]]
"""Ids with their rows, or ids that have lost theirs, in their order."""


@dataclass(frozen=True)
class ReplicaTable:
    """Distinct `ids`, int64 `[n]`, ascending, and their `rows`, `[n, embedding_dim]`; other ids have initial values."""

    spec: TableSpec
    ids: Tensor
    rows: Tensor

    @classmethod
    def empty(cls, spec: TableSpec) -> "ReplicaTable":
        """Without rows."""
        ids = torch.empty(0, dtype=torch.int64)
        return cls(spec, ids, spec.initial_values(ids))

    def look_up(self, ids: Tensor) -> Tensor:
        """`[N, embedding_dim]`, of ids int64 `[N]`; ValueError for one that the table cannot have."""
        spec = self.spec
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ValueError(f"table {spec.name!r}: ids must be int64 [N], got {ids.dtype} {list(ids.shape)}")
        if (size := spec.num_embeddings) is not None and (bad := ids[(ids < 0) | (ids >= size)]).numel():
            raise ValueError(f"table {spec.name!r}: id {int(bad[0])} is out of range; valid ids are 0 to {size - 1}")
        if not self.ids.numel():
            return spec.initial_values(ids)
        ascending, order = ids.sort()  # neighbours are searched, and read, one after the other
        found = torch.from_numpy(np.searchsorted(self.ids.numpy(), ascending.numpy())).clamp_(max=self.ids.numel() - 1)
        places = torch.empty_like(order).index_copy_(0, order, found)
        rows, unknown = self.rows.index_select(0, places), self.ids[places] != ids
        if unknown.any():
            rows[unknown] = spec.initial_values(ids[unknown])
        return rows

    def after(self, events: Events) -> "ReplicaTable":
        """The table when these have happened: the last one that has an id counts. The list is empty then."""
        if not any(ids.numel() for ids, _ in events):
            return self
        here, sizes = self.ids.numel(), [ids.numel() for ids, _ in events]
        has_rows = torch.tensor([True, *(rows is not None for _, rows in events)])
        has_rows = has_rows.repeat_interleave(torch.tensor([here, *sizes]))
        ids, order = torch.cat([self.ids, *(ids for ids, _ in events)]).sort(stable=True)
        counts = has_rows[order]
        counts[:-1] &= ids[1:] != ids[:-1]
        ids, order = ids[counts], order[counts]
        if here:
            rows = self.rows.index_select(0, order.where(order < here, 0))  # any rows where new ones follow
        else:
            rows = self.rows.new_empty(ids.numel(), self.spec.embedding_dim)
        places = torch.full_like(has_rows, -1, dtype=torch.int64)
        places[order] = torch.arange(ids.numel())
        for of_event in reversed(places.split([here, *sizes])[1:]):
            _, values = events.pop()  # which frees memory
            if values is not None:
                rows[of_event[of_event >= 0]] = values[of_event >= 0]
        return ReplicaTable(self.spec, ids, rows)


@dataclass(frozen=True)
class Replica:
    """Tables with the updates of the first `step` steps.

    Args:
        time: when the snapshots were taken, in seconds since 1970.
        snapshots: of each server, its name.
        whole: it was read from whole snapshots, not from changes to another replica.
    """

    step: int
    time: float
    snapshots: tuple[str, ...]
    whole: bool
    tables: Mapping[str, ReplicaTable]

    def look_up(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For ids int64 `[N]` of tables, their rows `[N, embedding_dim]`; see `Follower.look_up`."""
        for name in ids.keys() - self.tables.keys():
            known = did_you_mean(name, self.tables, f"; there are {join_names(self.tables)}")
            raise ValueError(f"there is no table {name!r}{known}")
        return {name: self.tables[name].look_up(of_table) for name, of_table in ids.items()}


def load_replica(last: Replica | None, folder: Path, chains: list[Values]) -> Replica:
    """What a manifest's chains of files, one a server, say; of these only those are read that follow the last replica.

    StorageError if a file is missing, damaged, or follows one that is not there.
    """
    if last is not None and last.snapshots == tuple(chain["snapshot"] for chain in chains):
        return last
    servers = [[(folder / name, next(read_snapshot(folder / name))[0]) for name in c["files"]] for c in chains]
    ends = [files[-1][1] for files in servers]
    if len(steps := {(end["pulls"], end["steps"]) for end in ends}) > 1:
        raise StorageError(f"the snapshots in {folder} are of several steps: {sorted(steps)}")
    new: list[Files | None] = [None]
    if last is not None and len(last.snapshots) == len(servers):
        new = [_after(files, name) for files, name in zip(servers, last.snapshots, strict=True)]
    if None in new:
        new, last = [_after(files, None) for files in servers], None
    events, seeds = defaultdict[int, Events](list), dict[int, int]()
    for files, found in zip(servers, new, strict=True):
        if found is None:
            raise _missing(*files[0])
        for path, header in found:
            _read(path, header, events, seeds)
    tables = {}
    for number, spec in enumerate(CollectionSpec.from_json(ends[0]["spec"]).tables):
        spec = replace(spec, seed=seeds.get(number, spec.seed))
        table = ReplicaTable.empty(spec) if last is None else last.tables[spec.name]
        tables[spec.name] = table.after(events.pop(number, []))
    snapshots, taken = tuple(end["snapshot"] for end in ends), min(end["time"] for end in ends)
    return Replica(ends[0]["steps"], taken, snapshots, last is None, tables)


def _after(files: Files, last: str | None) -> Files | None:
    """Those that follow a snapshot, or a whole one and those that follow it; None if there are none."""
    names, follow = ([header[key] for _, header in files] for key in ("snapshot", "after"))
    if last not in (*names, *follow):
        return None
    found = files[names.index(last) + 1 if last in names else follow.index(last) :]
    for path, header in found:
        if header["after"] != last:
            raise _missing(path, header)
        last = header["snapshot"]
    return found


def _missing(path: Path, header: Values) -> StorageError:
    return StorageError(f"snapshot {header['after']} is missing, which {path} follows; a whole one is waited for")


def _read(path: Path, header: Values, events: Mapping[int, Events], seeds: dict[int, int]) -> None:
    """Add what a file says has happened to each table, by number."""
    records = read_snapshot(path)
    if next(records)[0] != header:
        raise StorageError(f"snapshot {path} was replaced while it was read")
    for values, tensors in records:
        found = dict(zip(values.get("names", ()), tensors, strict=False))  # pushes have no names
        if "seed" in found:
            seeds[values["table"]] = int(found["seed"])
        elif "ids" in found:  # copies: the tensors of a record share memory, of states too
            rows = found.get("weight")
            events[values["table"]].append((found["ids"].clone(), None if rows is None else rows.clone()))
