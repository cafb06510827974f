"""Immutable replicas of a collection's tables, for serving: any thread may look up rows.

A table is its ascending ids and their rows, without optimizer states and without an index. A lookup sorts the requested
ids and searches them: rows of 1,000 ids among 10^7 take a millisecond. The hash index of a `DynamicTable` would be
faster, but would have to be copied or rebuilt for each snapshot. The next replica is built beside the current one, with
one copy of unchanged rows.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tritonemb.server.snapshot import read_snapshot
from tritonemb.server.spec import CollectionSpec, TableSpec
from tritonemb.server.transport import Values
from tritonemb.storage.store import StorageError
from tritonemb.utils import did_you_mean, join_names

Files = list[tuple[Path, Values]]
"""Snapshot files of one server with their headers, in the order of the chain."""
Changes = list[tuple[Tensor, Tensor | None]]
"""Ids with their new rows, or with None for removed rows, oldest first."""


@dataclass(frozen=True)
class ReplicaTable:
    """Rows of one table; ids without a row have initial values.

    Attributes:
        ids: int64 `[n]`, distinct, ascending.
        rows: `[n, embedding_dim]`.
    """

    spec: TableSpec
    ids: Tensor
    rows: Tensor

    @classmethod
    def empty(cls, spec: TableSpec) -> "ReplicaTable":
        """Return a table without rows."""
        ids = torch.empty(0, dtype=torch.int64)
        return cls(spec, ids, spec.initial_values(ids))

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows `[N, embedding_dim]` of ids int64 `[N]`; ValueError for an id out of range."""
        spec = self.spec
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ValueError(f"table {spec.name!r}: ids must be int64 [N], got {ids.dtype} {list(ids.shape)}")
        if (size := spec.num_embeddings) is not None and (bad := ids[(ids < 0) | (ids >= size)]).numel():
            raise ValueError(f"table {spec.name!r}: id {int(bad[0])} is out of range; valid ids are 0 to {size - 1}")
        if not self.ids.numel():
            return spec.initial_values(ids)
        sorted_ids, order = ids.sort()  # neighbouring ids share cache lines in the search and in the gather
        sorted_rows = torch.from_numpy(np.searchsorted(self.ids.numpy(), sorted_ids.numpy()))
        row_numbers = torch.empty_like(order).index_copy_(0, order, sorted_rows.clamp_(max=self.ids.numel() - 1))
        rows, missing_mask = self.rows.index_select(0, row_numbers), self.ids[row_numbers] != ids
        if missing_mask.any():
            rows[missing_mask] = spec.initial_values(ids[missing_mask])
        return rows

    def updated(self, changes: Changes) -> "ReplicaTable":
        """Return the table with these changes applied; the last change of an id wins. Empties the list."""
        if not any(ids.numel() for ids, _ in changes):
            return self
        # Choose the last entry of each id, among the rows of this table and the changes; drop it if it is a removal.
        num_rows, sizes = self.ids.numel(), [ids.numel() for ids, _ in changes]
        has_row = torch.tensor([True, *(rows is not None for _, rows in changes)])
        has_row = has_row.repeat_interleave(torch.tensor([num_rows, *sizes]))
        ids, order = torch.cat([self.ids, *(ids for ids, _ in changes)]).sort(stable=True)
        valid_mask = has_row[order]
        valid_mask[:-1] &= ids[1:] != ids[:-1]
        ids, order = ids[valid_mask], order[valid_mask]
        # Copy unchanged rows; other rows are overwritten below.
        if num_rows:
            rows = self.rows.index_select(0, order.where(order < num_rows, 0))
        else:
            rows = self.rows.new_empty(ids.numel(), self.spec.embedding_dim)
        # Write changed rows; -1: superseded by a later change.
        row_numbers = torch.full_like(has_row, -1, dtype=torch.int64)
        row_numbers[order] = torch.arange(ids.numel())
        for targets in reversed(row_numbers.split([num_rows, *sizes])[1:]):
            _, values = changes.pop()  # frees its memory
            if values is not None:
                rows[targets[targets >= 0]] = values[targets >= 0]
        return ReplicaTable(self.spec, ids, rows)


@dataclass(frozen=True)
class Replica:
    """Tables with the updates of the first `step` steps.

    Args:
        time: time of the oldest snapshot, in seconds since 1970.
        snapshots: name of the last snapshot of each server.
        is_full: whether it was read from full snapshots, not from changes to an earlier replica.
    """

    step: int
    time: float
    snapshots: tuple[str, ...]
    is_full: bool
    tables: Mapping[str, ReplicaTable]

    def look_up(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows `[N, embedding_dim]` of ids int64 `[N]`, by table; see `Follower.look_up`."""
        for name in ids.keys() - self.tables.keys():
            known = did_you_mean(name, self.tables, f"; there are {join_names(self.tables)}")
            raise ValueError(f"unknown table {name!r}{known}")
        return {name: self.tables[name].look_up(table_ids) for name, table_ids in ids.items()}


def load_replica(last: Replica | None, folder: Path, chains: list[Values]) -> Replica:
    """Load the newest snapshots: `chains` has the files of each server, from a manifest.

    Reads only the files that follow the replica `last`, where the chains continue it. StorageError if a file is missing
    or damaged, or if its predecessor is missing.
    """
    if last is not None and last.snapshots == tuple(chain["snapshot"] for chain in chains):
        return last
    servers = [[(folder / name, next(read_snapshot(folder / name))[0]) for name in c["files"]] for c in chains]
    ends = [files[-1][1] for files in servers]
    if len(steps := {(end["pulls"], end["steps"]) for end in ends}) > 1:
        raise StorageError(f"the snapshots in {folder} belong to several steps: {sorted(steps)}")
    # Choose the files to read: the successors of the last replica, else full snapshots and their successors.
    new_files: list[Files | None] = [None]
    if last is not None and len(last.snapshots) == len(servers):
        new_files = [_successors(files, name) for files, name in zip(servers, last.snapshots, strict=True)]
    if None in new_files:
        new_files, last = [_successors(files, None) for files in servers], None
    # Read the changes of each table, then apply them.
    changes, seeds = defaultdict[int, Changes](list), dict[int, int]()
    for files, successors in zip(servers, new_files, strict=True):
        if successors is None:
            raise _predecessor_missing(*files[0])
        for path, header in successors:
            _read_changes(path, header, changes, seeds)
    tables = {}
    for number, spec in enumerate(CollectionSpec.from_json(ends[0]["spec"]).tables):
        spec = replace(spec, seed=seeds.get(number, spec.seed))
        table = ReplicaTable.empty(spec) if last is None else last.tables[spec.name]
        tables[spec.name] = table.updated(changes.pop(number, []))
    snapshots, oldest_time = tuple(end["snapshot"] for end in ends), min(end["time"] for end in ends)
    return Replica(ends[0]["steps"], oldest_time, snapshots, last is None, tables)


def _successors(files: Files, last: str | None) -> Files | None:
    """Files that follow snapshot `last`, or a full snapshot and its successors; None if the chain lacks it."""
    names, predecessors = ([header[key] for _, header in files] for key in ("snapshot", "after"))
    if last not in (*names, *predecessors):
        return None
    successors = files[names.index(last) + 1 if last in names else predecessors.index(last) :]
    for path, header in successors:
        if header["after"] != last:
            raise _predecessor_missing(path, header)
        last = header["snapshot"]
    return successors


def _predecessor_missing(path: Path, header: Values) -> StorageError:
    return StorageError(f"snapshot {header['after']} is missing, which {path} follows; waiting for a full snapshot")


def _read_changes(path: Path, header: Values, changes: Mapping[int, Changes], seeds: dict[int, int]) -> None:
    """Append the changes of a snapshot file to those of each table, and note the tables' seeds."""
    records = read_snapshot(path)
    if next(records)[0] != header:
        raise StorageError(f"snapshot {path} was replaced while it was read")
    for values, tensors in records:
        fields = dict(zip(values.get("names", ()), tensors, strict=False))  # pushes have no names
        if "seed" in fields:
            seeds[values["table"]] = int(fields["seed"])
        elif "ids" in fields:  # clone: tensors of a record share one buffer, which also has the optimizer states
            rows = fields.get("weight")
            changes[values["table"]].append((fields["ids"].clone(), None if rows is None else rows.clone()))
