"""Followers of whole models: dense layers and tables that a publisher writes, applied in place while a model serves.

A thread reads and checks files, and prepares an update in memory, with the last row of each id in the format of the
model's table. The thread that scores applies it between two batches, so each batch sees one step. Rows of a full
snapshot that the model has already are left out, so a full one is applied as fast as the changes that it has.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonemb.kernels.quantized_bag import dequantize_rows, quantize_rows
from tritonemb.layout import INDEXED, partitions_of
from tritonemb.nn.collections import FusedModule
from tritonemb.server.attach import collections_on_servers
from tritonemb.server.snapshot import read_snapshot, successors
from tritonemb.server.spec import CollectionSpec
from tritonemb.serving.follower import PollingFollower
from tritonemb.serving.publisher import PUBLISHED, contents_of
from tritonemb.serving.quantized_tables import QuantizedTable
from tritonemb.sharding.sharded_tensor import dtype_and_shape
from tritonemb.storage.store import StorageError
from tritonemb.tables.dynamic_table import FALLBACK, DynamicTable
from tritonemb.tables.table import Table
from tritonemb.utils import read_sealed

Change = tuple[Tensor, Tensor | None, int]
"""Distinct ids, their rows or None for removed ones, and the first column."""


class FollowedTable:
    """Table whose rows are compared with published ones, and replaced. ValueError for rows that do not fit."""

    def __init__(self, name: str, table: Any) -> None:
        self.name, self.table, self.dynamic = name, table, table if isinstance(table, DynamicTable) else None
        self.bits = table.bits if isinstance(table, QuantizedTable) else 32
        if self.bits == INDEXED:
            raise ValueError(f"table {name!r} is dynamic or quantized by frequency; quantize a new model instead")
        config = getattr(table, "config", table)  # a single table has none
        self.num_rows, self.dim = config.num_embeddings, config.embedding_dim
        self.is_cached = isinstance(table, Table) and table.rows.is_cached

    def encode(self, ids: Tensor, rows: Tensor, bits: int, column: int) -> Tensor:
        """Convert rows, quantized to `bits` unless 32, to the format of the table."""
        width, dtype = (rows.shape[1], rows.dtype) if bits == 32 else (rows.shape[1] - 4, self.table.weight.dtype)
        is_whole = width == self.dim or (bits == self.bits == 32 and column + width <= self.dim)
        if not is_whole or (self.bits == 32 and dtype != self.table.weight.dtype):
            text = f"columns {column}:{column + width} of {dtype} were published"
            raise ValueError(f"table {self.name!r} has {self.dim} columns of {self.table.weight.dtype}; {text}")
        if self.num_rows is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_rows:
            raise ValueError(f"table {self.name!r} has {self.num_rows:,} rows; row {int(ids.max())} was published")
        if bits == self.bits:
            return rows
        rows = rows if bits == 32 else dequantize_rows(rows, bits, self.dim).to(dtype)
        return rows if self.bits == 32 else quantize_rows(rows, self.bits, search=self.bits < 8)

    def differ(self, ids: Tensor, rows: Tensor, column: int) -> Tensor:
        """Return which ids have no row, or another one, bool `[N]`."""
        is_new = torch.zeros_like(ids, dtype=torch.bool)
        if self.dynamic is not None:
            is_new, current = self.dynamic.index.find(ids.to(self.dynamic.index.ids)) < 0, self.dynamic.lookup(ids)
        elif self.is_cached:
            current = self.table.rows.read(self.table, ids)["weight"][:, column : column + rows.shape[1]]
        else:
            weight = self.table.weight.detach()
            current = weight.index_select(0, ids.to(weight.device))[:, column : column + rows.shape[1]]
        current, rows = (values.cpu().contiguous().view(torch.uint8) for values in (current, rows))
        return is_new.cpu() | (current != rows).any(1)

    def check(self, changes: Sequence[Change], metadata: Iterable[Mapping[str, Tensor]]) -> None:
        """Check that a dynamic table has room for new rows."""
        if (table := self.dynamic) is None:
            return
        index, num_rows = table.index, table.index.tensors.num_rows.cpu().clone()
        for ids, rows, _ in changes:
            ids = ids[(index.find(ids.to(index.ids)) < 0).cpu() != (rows is None)]
            counts = partitions_of(ids, index.shard[0]).bincount(minlength=index.shard[0])
            num_rows += counts if rows is not None else -counts
        if int(num_rows.max()) > index.capacity // index.num_partitions:
            raise ValueError(f"table {self.name!r} has no room for the published rows; raise its capacity")
        num_fallback_rows = sum(len(part.get(f"{FALLBACK}weight", ())) for part in metadata)
        if num_fallback_rows not in (0, len(index.fallback_rows)):
            raise ValueError(f"table {self.name!r} was published with {num_fallback_rows} fallback rows")

    def write(self, changes: Sequence[Change], metadata: Sequence[Mapping[str, Tensor]]) -> None:
        """Remove and write rows; set the seed and the fallback rows of a dynamic table."""
        for ids, rows, column in changes:
            if rows is None or self.dynamic is not None:
                self._write_dynamic(ids, rows)
            elif self.is_cached:
                values = self.table.rows.read(self.table, ids)
                values["weight"][:, column : column + rows.shape[1]] = rows
                self.table.rows.write(self.table, ids, values)
            else:
                weight = self.table.weight.detach()
                weight[:, column : column + rows.shape[1]].index_copy_(0, ids.to(weight.device), rows.to(weight.device))
        if (table := self.dynamic) is not None and metadata:
            table.seed = max(int(part["seed"]) for part in metadata)
            if len(fallback := [part[f"{FALLBACK}weight"] for part in metadata if f"{FALLBACK}weight" in part]):
                values = table.rows.read(table, table.index.fallback_rows) | {"weight": torch.cat(fallback)}
                table.rows.write(table, table.index.fallback_rows, values)

    def _write_dynamic(self, ids: Tensor, rows: Tensor | None) -> None:
        table, ids = self.table, ids.to(self.table.index.ids)
        with table.index.lock:
            if rows is None:
                table.index.discard(ids)
                return
            state = {"ids": ids, "step": ids * 0, "count": ids * 0, "weight": rows}
            if self.is_cached:  # a record has the states, too
                state |= {name: table.templates(len(ids))[name].zero_() for name in table.state_names}
            table.load_row_state(state)


class Update(NamedTuple):
    """Changes that lead from the served state to that of a step."""

    names: tuple[str, ...]  # of the last snapshot of each chain
    step: int
    time: float
    dense: Mapping[str, Tensor]
    changes: Mapping[str, list[Change]]  # by table
    metadata: Mapping[str, dict[int, Mapping[str, Tensor]]]  # seed and fallback rows by table and part


class ModelFollower(PollingFollower):
    """Follower that keeps a model up to date while it serves.

    A thread prepares updates, and the thread that scores calls `apply` between batches. If a file is missing or
    damaged, nothing is changed, and `problem` says so until there is a complete update, at the latest a full one.

    Args:
        model: model, or `Run`, with tables in this process, which may be quantized; the newest state is applied at
            once, if there is one.
        folder: folder of a `Publisher`.
        poll: seconds between checks of the folder, by a thread; None: only `refresh` checks it.

    Attributes:
        step: step of the served state.
        problem: reason why the newest state could not be loaded; None if it was.

    Raises:
        ValueError: the model has tables on embedding servers.
    """

    def __init__(self, model: Any, folder: str | Path, poll: float | None = 0.2) -> None:
        self.model: nn.Module = model if isinstance(model, nn.Module) else model.model
        if collections_on_servers(self.model):
            raise ValueError("the tables of this model are on embedding servers; build it with tables on the device")
        self._folder, self.step, self._time, self._lock = Path(folder), 0, time.time(), threading.Lock()
        self._names, self._pending = (), None  # type: tuple[str, ...], Update | None
        tables = ((p, m) for p, m in self.model.named_modules() if "weight" in {**m._parameters, **m._buffers})
        kinds = Table, QuantizedTable, FusedModule
        self._tables = {path: FollowedTable(path, module) for path, module in tables if isinstance(module, kinds)}
        prefixes, tensors = tuple(f"{path}." for path in self._tables), contents_of(self.model)[0]
        self._dense = {name: value for name, value in tensors.items() if not name.startswith(prefixes)}
        self.refresh()
        self.apply()
        super().__init__(poll)

    @property
    def age(self) -> float:
        """Seconds since the served state was that of the trainer."""
        return max(0.0, time.time() - self._time)

    def pending(self) -> bool:
        """Return whether `apply` would change the model."""
        return self._pending is not None

    @torch.no_grad()
    def apply(self) -> None:
        """Apply the prepared update, if there is one, in place; to be called between batches."""
        if (update := self._pending) is None:
            return
        for name, value in update.dense.items():
            self._dense[name].copy_(value)
        for name, table in self._tables.items():
            table.write(update.changes[name], [part for _, part in sorted(update.metadata[name].items())])
        self._names, self.step, self._time = update[:3]
        self._pending = None

    @torch.no_grad()
    def refresh(self) -> bool:
        """Prepare the newest state, unless another one is pending, and return whether one is; errors are stored."""
        with self._lock:
            try:
                if self._pending is None:  # else the thread that scores may be applying it
                    self._pending = self._prepare()
                self.problem = None
            except Exception as error:
                self.problem = str(error) if isinstance(error, OSError | ValueError) else repr(error)
            return self.pending()

    def _prepare(self) -> Update | None:
        """Read and check the changes from the served state to the newest one; None if it is served."""
        manifest = json.loads(read_sealed(self._folder / PUBLISHED))
        entries = [("", entry) for entry in manifest.get("model", [])]
        for name, servers in manifest["servers"].items():
            is_path = any(table.startswith(f"{name}.") for table in self._tables)  # else the model is the collection
            entries += [(f"{name}." if is_path else "", entry) for entry in servers]
        if self._names == (names := tuple(entry["snapshot"] for _, entry in entries)):
            return None
        paths = [[self._folder / name for name in entry["files"]] for _, entry in entries]
        chains = [[(path, next(read_snapshot(path))[0]) for path in chain] for chain in paths]
        ends = [chain[-1][1] for chain in chains]
        if {end["step"] for end in ends if "step" in end} != {manifest.get("step")}:
            raise StorageError(f"the files in {self._folder} do not belong to one step of a model")
        # Read the successors of the served state, else full snapshots and their successors; the newest file first.
        new_files = [*map(successors, chains, self._names)] if len(self._names) == len(chains) else [None]
        is_full = None in new_files
        files = [successors(chain) for chain in chains] if is_full else new_files
        reader = UpdateReader(self._tables, is_full)
        for end, (prefix, _), chain in zip(ends, entries, files, strict=True):
            specs = CollectionSpec.from_json(end["spec"]).tables if "spec" in end else ()
            for path, _ in reversed(chain or []):
                reader.read(path, [f"{prefix}{spec.name}" for spec in specs], end["server"])
            reader.specs |= {f"{prefix}{spec.name}": spec for spec in specs}
        reader.finish()
        # Check dense layers.
        kinds = [
            {name: dtype_and_shape(t.dtype, t.shape) for name, t in d.items()} for d in (self._dense, reader.dense)
        ]
        if differences := sorted({name for name, _ in kinds[0].items() ^ kinds[1].items()}):
            model, published = (kind.get(differences[0], "absent") for kind in kinds)
            raise ValueError(f"{differences[0]} is {published} as published, and {model} in this model")
        oldest_time = min(end["time"] for end in ends)
        return Update(names, manifest["step"], oldest_time, reader.dense, reader.changes, reader.metadata)


class UpdateReader:
    """Reader of the files of an update, the newest first: the newest change of an id counts.

    With `is_full`, rows are compared with those of the model, and ids without a row are removed.
    """

    def __init__(self, tables: Mapping[str, FollowedTable], is_full: bool) -> None:
        self._tables, self._is_full, self.specs, self.dense = tables, is_full, dict[str, Any](), dict[str, Tensor]()
        self.changes, self.metadata = defaultdict[str, list[Change]](list), defaultdict[str, dict[int, Any]](dict)
        self._decided = defaultdict[tuple[str, int], list[Tensor]](list)  # ids by table and column
        self._newer = dict[tuple[str, int], Tensor]()  # those of newer files

    def read(self, path: Path, names: Sequence[str], server: int) -> None:
        """Read a file; `names` are those of the tables of a server, by number."""
        removed = list[tuple[str, Tensor]]()
        for values, tensors in read_snapshot(path):
            fields = dict(zip(values.get("names", ()), tensors, strict=False))
            if values.get("kind") == "dense":
                self.dense = self.dense or fields
            if "table" not in values:
                continue
            name = names[values["table"]] if names else values["table"]
            if name not in self._tables:
                raise ValueError(f"table {name!r} was published, and is not in the model")
            if "seed" in fields:
                self.metadata[name].setdefault(values.get("part", server), fields)
            elif values["kind"] == "removed":
                removed += [(name, fields["ids"])] if self._tables[name].dynamic is not None else []
            else:
                bits, column = values.get("bits", 32), values.get("column", 0)
                rows = self._tables[name].encode(fields["ids"], fields["weight"], bits, column)
                self._add(name, fields["ids"], rows, column)
        self._newer = {key: torch.cat(ids) for key, ids in self._decided.items()}
        for name, ids in removed:
            self._add(name, ids, None, 0)
        self._newer = {key: torch.cat(ids) for key, ids in self._decided.items()}

    def finish(self) -> None:
        """Add rows that no file has, and check that there is room for all."""
        names = {name for name, _ in self._decided} | self.metadata.keys()
        if self._is_full and (missing := sorted(self._tables.keys() - names)):
            raise ValueError(f"table {missing[0]!r} of the model was not published")
        for name, spec in self.specs.items():
            if self._is_full and spec.num_embeddings is not None:  # servers have only rows that were used
                ids, seed = torch.arange(spec.num_embeddings), max(int(p["seed"]) for p in self.metadata[name].values())
                self._add(name, ids, spec.initial_values(ids, seed), 0)
        for name, table in self._tables.items():
            if self._is_full and table.dynamic is not None:
                ids = table.dynamic.ids().cpu()
                published = self._newer.get((name, 0), ids[:0])
                self.changes[name].append((ids[~torch.isin(ids, published)], None, 0))
            self.changes[name].sort(key=lambda change: change[1] is not None)  # removals make room
            table.check(self.changes[name], self.metadata[name].values())

    def _add(self, name: str, ids: Tensor, rows: Tensor | None, column: int) -> None:
        key = name, column
        mask = ~torch.isin(ids, self._newer[key]) if key in self._newer else torch.ones_like(ids, dtype=torch.bool)
        self._decided[key].append(ids)
        if self._is_full and rows is not None:
            mask &= self._tables[name].differ(ids, rows, column)
        self.changes[name].append((ids[mask], None if rows is None else rows[mask], column))
