"""Followers for serving: read-only replicas of a collection's tables that follow the snapshots in a folder.

A publisher makes servers write snapshots there more often than a run saves checkpoints. A replica is immutable, so any
thread may look up rows: a table is its ascending ids and their rows, without optimizer states and without an index. A
lookup sorts the requested ids and searches them: rows of 1,000 ids among 10^7 take a millisecond. The hash index of a
`DynamicTable` would be faster, but would have to be copied or rebuilt for each snapshot. The next replica is built
beside the current one, with one copy of unchanged rows.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.layout import partitions_of
from tritonemb.server.connection import Connection
from tritonemb.server.snapshot import Chain, read_snapshot, successors
from tritonemb.server.spec import CollectionSpec, TableSpec
from tritonemb.server.transport import Message, Reply, Values, answer
from tritonemb.serving.publisher import PUBLISHED
from tritonemb.storage.checkpoint import MANIFEST as CHECKPOINT
from tritonemb.storage.store import StorageError
from tritonemb.tables.dynamic_table import FALLBACK
from tritonemb.utils import Closeable, did_you_mean, join_names, read_sealed

ATTEMPTS = 3  # to load a manifest whose files may be deleted meanwhile
THREADS = 4  # that answer queries
Changes = list[tuple[Tensor, Tensor | None]]
"""Ids with their new rows, or with None for removed rows, oldest first."""


@dataclass(frozen=True)
class ReplicaTable:
    """Rows of one table; ids without a row have fallback rows or initial values."""

    spec: TableSpec
    ids: Tensor  # int64 `[n]`, distinct, ascending
    rows: Tensor  # `[n, embedding_dim]`
    fallback_rows: Tensor  # `[F, embedding_dim]`

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows `[N, embedding_dim]` of ids int64 `[N]`; ValueError for an id out of range."""
        spec = self.spec
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ValueError(f"table {spec.name!r}: ids must be int64 [N], got {ids.dtype} {list(ids.shape)}")
        if (size := spec.num_embeddings) is not None and (bad := ids[(ids < 0) | (ids >= size)]).numel():
            raise ValueError(f"table {spec.name!r}: id {int(bad[0])} is out of range; valid ids are 0 to {size - 1}")
        if not self.ids.numel():
            return self._rows_of_unknown(ids)
        sorted_ids, order = ids.sort()  # neighbouring ids share cache lines in the search and in the gather
        sorted_rows = torch.from_numpy(np.searchsorted(self.ids.numpy(), sorted_ids.numpy()))
        row_numbers = torch.empty_like(order).index_copy_(0, order, sorted_rows.clamp_(max=self.ids.numel() - 1))
        rows, missing_mask = self.rows.index_select(0, row_numbers), self.ids[row_numbers] != ids
        if missing_mask.any():
            rows[missing_mask] = self._rows_of_unknown(ids[missing_mask])
        return rows

    def _rows_of_unknown(self, ids: Tensor) -> Tensor:
        rows = self.fallback_rows
        return rows[partitions_of(ids, len(rows))] if len(rows) else self.spec.initial_values(ids)

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
        rows = self.rows.new_empty(ids.numel(), self.spec.embedding_dim)
        if num_rows:
            torch.index_select(self.rows, 0, order.where(order < num_rows, 0), out=rows)
        # Write changed rows; -1: superseded by a later change.
        row_numbers = torch.full_like(has_row, -1, dtype=torch.int64)
        row_numbers[order] = torch.arange(ids.numel())
        for targets in reversed(row_numbers.split([num_rows, *sizes])[1:]):
            _, values = changes.pop()  # frees its memory
            if values is not None:
                rows[targets[targets >= 0]] = values[targets >= 0]
        return ReplicaTable(self.spec, ids, rows, self.fallback_rows)


@dataclass(frozen=True)
class Replica:
    """Tables with the updates of the first `step` steps."""

    step: int
    time: float  # of the oldest snapshot, in seconds since 1970
    snapshots: tuple[str, ...]  # name of the last one of each server
    is_full: bool  # read from full snapshots, not from changes to an earlier replica
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
    if last is not None and last.snapshots == tuple(server["snapshot"] for server in chains):
        return last
    servers = [[(folder / name, next(read_snapshot(folder / name))[0]) for name in c["files"]] for c in chains]
    ends = [files[-1][1] for files in servers]
    if len(steps := {(end["pulls"], end["steps"]) for end in ends}) > 1:
        raise StorageError(f"the snapshots in {folder} belong to several steps: {sorted(steps)}")
    # Choose the files to read: the successors of the last replica, else full snapshots and their successors.
    new_files: list[Chain | None] = [None]
    if last is not None and len(last.snapshots) == len(servers):
        new_files = [successors(files, name) for files, name in zip(servers, last.snapshots, strict=True)]
    if None in new_files:
        new_files, last = [successors(files) for files in servers], None
    # Read the changes of each table, then apply them.
    changes, metadata = defaultdict[int, Changes](list), defaultdict[int, dict[int, Mapping[str, Tensor]]](dict)
    for path, header in chain.from_iterable(filter(None, new_files)):
        _read_changes(path, header, changes, metadata)
    tables, no_ids = {}, torch.empty(0, dtype=torch.int64)
    for number, spec in enumerate(CollectionSpec.from_json(ends[0]["spec"]).tables):
        shards = [fields for _, fields in sorted(metadata[number].items())]  # by server, that is by partition
        spec = replace(spec, seed=max((int(fields["seed"]) for fields in shards), default=spec.seed))
        empty = spec.initial_values(no_ids)
        table = ReplicaTable(spec, no_ids, empty, empty) if last is None else last.tables[spec.name]
        fallback_rows = [fields[f"{FALLBACK}weight"] for fields in shards if spec.fallback_rows]
        table = replace(table, fallback_rows=torch.cat([table.fallback_rows[:0], *fallback_rows]))
        tables[spec.name] = table.updated(changes.pop(number, []))
    snapshots, oldest_time = tuple(end["snapshot"] for end in ends), min(end["time"] for end in ends)
    return Replica(ends[0]["steps"], oldest_time, snapshots, last is None, tables)


def _read_changes(path: Path, header: Values, changes: Mapping[int, Changes], metadata: Mapping[int, Any]) -> None:
    """Append the changes of a snapshot file to those of each table, and note the table's other tensors by server."""
    records = read_snapshot(path)
    if next(records)[0] != header:
        raise StorageError(f"snapshot {path} was replaced while it was read")
    for values, tensors in records:
        fields = dict(zip(values.get("names", ()), tensors, strict=False))  # pushes have no names
        if "seed" in fields:
            metadata[values["table"]][header["server"]] = fields
        elif "ids" in fields:  # clone: tensors of a record share one buffer, which also has the optimizer states
            rows = fields.get("weight")
            changes[values["table"]].append((fields["ids"].clone(), None if rows is None else rows.clone()))


class PollingFollower(Closeable):
    """Base of followers: a thread that calls `refresh` every `poll` seconds, unless that is None."""

    problem: str | None = None

    def __init__(self, poll: float | None) -> None:
        self._closed = threading.Event()
        if poll is not None:
            threading.Thread(target=self._follow, args=(poll,), daemon=True, name="tritonemb-follower").start()

    def refresh(self) -> bool:
        """Check the folder, and return whether it has a new state; errors are stored as the `problem`."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop following."""
        self._closed.set()

    def _follow(self, poll: float) -> None:
        pause = poll
        while not self._closed.wait(pause):
            start = time.monotonic()
            self.refresh()
            # Back off after a failure: spend at most a tenth of the time on attempts.
            pause = poll if self.problem is None else max(poll, 10 * (time.monotonic() - start))


class Follower(PollingFollower):
    """Read-only replica of a collection's tables; thread-safe.

    It loads a full snapshot once, then incremental ones, and serves the previous state meanwhile. It is a `Service` for
    `look_up` by other processes, and for `Connection.query("stats")`.

    Args:
        folder: a run's `checkpoints`, of which it follows the newest one, or the folder of a `Publisher`.
        collection: path of the collection in the model; optional if the folder has one collection.
        poll: seconds between checks of the folder, by a thread; None: only `refresh` checks it.

    Attributes:
        replica: the served tables; None before the first snapshot.
        problem: reason why the newest snapshot could not be loaded; None if it was loaded. The follower tries again,
            and waits for a full snapshot if a predecessor of the newest one is missing.
        bases, increments: numbers of full and incremental snapshots that were loaded.
    """

    def __init__(self, folder: str | Path, collection: str | None = None, poll: float | None = 0.2) -> None:
        self._folder, self.collection = Path(folder), collection
        self.replica: Replica | None = None
        self.bases = self.increments = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "tritonemb-follower")
        self.refresh()
        super().__init__(poll)

    @property
    def step(self) -> int | None:
        """Number of steps whose updates the rows have."""
        return None if self.replica is None else self.replica.step

    @property
    def age(self) -> float | None:
        """Seconds since the served snapshot was taken."""
        return None if self.replica is None else max(0.0, time.time() - self.replica.time)

    def look_up(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Look up rows `[N, embedding_dim]` of ids int64 `[N]`, by table; all rows are of the same step.

        Ids without a row have initial values, as in evaluation.

        Raises:
            RuntimeError: there is no snapshot yet.
            ValueError: unknown table, or id out of range.
        """
        return self._require_replica().look_up(ids)

    def statistics(self) -> Values:
        """Step, age, last problem, numbers of loaded snapshots, and rows and bytes by table."""
        tables = {
            name: {"rows": table.ids.numel(), "num_bytes": table.ids.nbytes + table.rows.nbytes}
            for name, table in ({} if self.replica is None else self.replica.tables).items()
        }
        result = {"step": self.step, "age": self.age, "failing": self.problem is not None, "problem": self.problem}
        result |= {"bases": self.bases, "increments": self.increments}
        return result | {"collections": {self.collection: {"tables": tables}} if tables else {}}

    def refresh(self) -> bool:
        """Load the newest snapshot, and return whether it is a new one; errors are stored as the `problem`."""
        with self._lock:
            previous, attempted = self.replica, None
            for _ in range(ATTEMPTS):  # files may be deleted while they are read, when there is a newer manifest
                try:
                    if (newest := self._newest()) == attempted:
                        break
                    attempted = newest
                    if (replica := load_replica(self.replica, *newest)) is not self.replica:
                        self.bases += replica.is_full
                        self.increments += not replica.is_full
                    self.replica, self.problem = replica, None
                    break
                except Exception as error:
                    self.problem = str(error) if isinstance(error, OSError | ValueError) else repr(error)
            return self.replica is not previous

    def receive(self, message: Message, reply: Reply) -> None:
        """See `Service`."""
        with suppress(RuntimeError):  # the follower is closed
            self._pool.submit(answer, message, reply, self._answer)

    def close(self) -> None:
        """Stop following, and answer the pending queries."""
        super().close()
        self._pool.shutdown()

    def _require_replica(self) -> Replica:
        if self.replica is None:
            raise RuntimeError(f"there is no snapshot to serve yet: {self.problem}")
        return self.replica

    def _answer(self, values: Values, tensors: list[Tensor]) -> Message:
        if values["op"] == "stats":
            return {"stats": self.statistics()}, []
        if values["op"] != "look_up":
            raise ValueError(f"a follower answers look_up and stats, not {values['op']!r}")
        replica = self._require_replica()
        rows = replica.look_up(dict(zip(values["tables"], tensors, strict=True)))
        return {"step": replica.step}, list(rows.values())

    def _newest(self) -> tuple[Path, list[Values]]:
        """Return the folder of the newest manifest, and its chain of snapshots for each server."""
        paths = {path.parent.name.removeprefix("step-"): path for path in self._folder.glob(f"step-*/{CHECKPOINT}")}
        newest = max((name for name in paths if name.isdecimal()), key=int, default=None)
        path = self._folder / PUBLISHED if newest is None else paths[newest]
        if newest is None and not path.exists():
            raise FileNotFoundError(f"{self._folder} has no checkpoint, and no {PUBLISHED} of a publisher")
        collections = json.loads(read_sealed(path)).get("servers", {})
        if self.collection is None and len(collections) == 1:
            (self.collection,) = collections
        if self.collection not in collections:
            known = f"{path} has collections {join_names(collections) or 'none'} on embedding servers"
            raise ValueError(f"{known}, not {self.collection!r}")
        return path.parent, collections[self.collection]


def look_up(connection: Connection, ids: Mapping[str, Tensor], timeout: float = 10.0) -> dict[str, Tensor]:
    """Call `Follower.look_up` of a follower in another process; ConnectionError if it does not answer in time."""
    _, rows = connection.query_tensors("look_up", {"tables": list(ids)}, list(ids.values()), timeout)
    return dict(zip(ids, rows, strict=True))
