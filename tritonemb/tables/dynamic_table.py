"""Dynamic tables: hash tables from int64 ids to rows, which are assigned to ids on first use in training."""

import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tritonemb.layout import SET_BYTES, dynamic_rows, nonzero, partitions_of
from tritonemb.tables.cached_table import CachedTable, metadata_kind
from tritonemb.tables.dynamic_rows import DynamicRows, concat_ids, find_batch
from tritonemb.tables.table import draw_seed, load_named_tensors
from tritonemb.utils import require

R = TypeVar("R")
FALLBACK = "fallback_"  # prefix of the names of fallback rows in `state_dict`


@dataclass(frozen=True)
class DynamicStatistics:
    """Cumulative counters of a dynamic table, and its size.

    Args:
        lookups: occurrences of ids in batches that were trained.
        hits: lookups of ids that had a row.
        inserts: rows assigned to new ids.
        refused: occurrences of ids that were not admitted, or with fallback rows found no room.
        evictions: rows evicted for new ids, or expired after `EvictionConfig.ttl` steps.
        rows, capacity: rows in use, and their maximum, without fallback rows.
        num_bytes: bytes of memory or disk that weights, states and the index of allocated rows take.
    """

    lookups: int = 0
    hits: int = 0
    inserts: int = 0
    refused: int = 0
    evictions: int = 0
    rows: int = 0
    capacity: int = 0
    num_bytes: int = 0

    @property
    def load(self) -> float:
        """Load factor: rows in use per row of capacity."""
        return self.rows / self.capacity if self.capacity else 0.0

    @property
    def hit_rate(self) -> float:
        """Hits per lookup; 1 without lookups."""
        return self.hits / self.lookups if self.lookups else 1.0

    @property
    def bytes_per_row(self) -> float:
        """Bytes per row in use; 0 without rows."""
        return self.num_bytes / self.rows if self.rows else 0.0


def row_fields(names: Iterable[str]) -> list[str]:
    """Return the names of tensors of `state_dict` with a value per row."""
    others = "sketch", "added", "clock", "seed"
    return [name for name in names if name not in others and not name.startswith(FALLBACK)]


def _locked(method: Callable[..., R]) -> Callable[..., R]:
    @functools.wraps(method)
    def call(table: "DynamicTable", *args: Any, **kwargs: Any) -> R:
        with table.lock, torch.no_grad():
            return method(table, *args, **kwargs)

    return call


class DynamicTable(DynamicRows):
    """Table with a weight `[capacity, embedding_dim]`, states, and an index from ids to rows.

    `state_dict` has, sorted by id: `ids` int64 `[rows]`, their `weight` and states, `step` int64, the last step that
    used each, and `count` int64, its uses; also `clock`, the number of steps, `seed` of the initial values, and with
    `AdmissionConfig.appearances` `sketch` and `added`.

    A step is a batch that was trained, or prefetched for training. Memory is allocated as rows are, not for the
    capacity. Methods are thread-safe; the tables of a collection share one `lock`.
    """

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of weight and states of all rows, sorted by id."""
        return {name: value for name, value in self.get_state().items() if name in ("weight", *self.state_names)}

    def statistics(self) -> DynamicStatistics:
        """Return counters and size."""
        num_allocated = int(self.index.num_allocated.sum()) + len(self.fallback_rows)
        num_bytes = num_allocated * (self._bytes_per_row + 16) + int(self.index.num_sets.sum()) * SET_BYTES
        return DynamicStatistics(**self._counters, rows=self.num_rows, capacity=self.capacity, num_bytes=num_bytes)

    def extra_repr(self) -> str:
        c = self.config
        return f"{self.num_rows} of {self.capacity}, {c.embedding_dim}, pooling={c.pooling!r}, dtype={c.dtype}"

    def _to_ids(self, ids: Tensor | Sequence[int]) -> Tensor:
        tensor = torch.as_tensor(ids, dtype=torch.int64, device=self.index.ids.device)
        if tensor.dim() != 1:
            raise ValueError(f"ids must have one dimension, got shape {tuple(tensor.shape)}")
        return tensor.contiguous()

    @_locked
    def ids(self) -> Tensor:
        """Return all ids that have a row, int64, ascending."""
        return dynamic_rows(self.index)[0]

    @_locked
    def lookup(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Look up rows of ids, `[N, embedding_dim]`; others read as their fallback rows, or as initial values."""
        ids = self._to_ids(ids)
        rows, values = find_batch([self], *concat_ids([ids])), self.initial_values(ids)
        known_mask = rows >= 0
        distinct, inverse = rows[known_mask].unique(return_inverse=True)
        values[known_mask] = self.read_rows(distinct)["weight"].to(values)[inverse]
        return values

    @_locked
    def insert(self, ids: Tensor | Sequence[int], rows: Tensor, **states: Tensor) -> None:
        """Insert or overwrite rows `[N, embedding_dim]` of distinct ids, and states, which are zero by default if new.

        Rows count as used in the step of the last batch. A full table evicts rows for new ids. ValueError for duplicate
        ids, wrong shapes, or a table without room; nothing is changed then.
        """
        ids = self._to_ids(ids)
        ids, order = ids.sort()
        self._check_rows(ids, {"weight": rows, **states})
        assigned_rows, new_mask = self._insert(ids, self.rule(self.clock))
        known_mask = ~new_mask
        values = {name: value[order.to(value.device)] for name, value in {"weight": rows, **states}.items()}
        if missing := [name for name in self.state_names if name not in states]:
            stored = self.read_rows(assigned_rows[known_mask])
            for name in missing:
                state = stored[name]
                values[name] = state.new_zeros(ids.numel(), *state.shape[1:])
                values[name][known_mask.to(state.device)] = state
        self._write(assigned_rows, values)

    @_locked
    def remove(self, ids: Tensor | Sequence[int]) -> int:
        """Remove ids with their rows and states; return how many had a row.

        Rows of prefetched batches, or of batches whose backward has not run, must not be removed.
        """
        distinct = self._to_ids(ids).unique()
        self.record_removed(distinct)
        return int((self.discard(distinct) >= 0).sum())

    def export(self, path: str | Path | None = None) -> dict[str, Tensor]:
        """Return `ids`, `weight`, states, `step` and `count`, sorted by id; with a path also write them to a file.

        Fallback rows are `fallback_weight` and so on; in a .parquet file they are rows without an id, at its end.
        ValueError unless the file is .parquet or .npz.
        """
        state, names = self.get_state(), ("ids", "weight", *self.state_names, "step", "count")
        tensors = {name: value for name, value in state.items() if name in names or name.startswith(FALLBACK)}
        if path is None:
            return tensors
        suffix = Path(path).suffix
        if suffix not in (".parquet", ".npz"):
            raise ValueError(f"an export must be a .parquet or .npz file, got {str(path)!r}")
        # NumPy has no bfloat16.
        arrays = {n: (t.float() if n.endswith("weight") else t).cpu().numpy() for n, t in tensors.items()}
        if suffix == ".npz":
            np.savez(path, **arrays)  # type: ignore[arg-type]
        else:
            pyarrow, parquet = require("pyarrow"), require("pyarrow.parquet")
            columns = {
                name: pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(array.reshape(-1)), array.shape[1])
                if array.ndim == 2
                else pyarrow.array(array)
                for name, array in arrays.items()
            }
            fallback = {n.removeprefix(FALLBACK): columns.pop(n) for n in arrays if n.startswith(FALLBACK)}
            parts = [pyarrow.table(table) for table in (columns, fallback) if table]
            parquet.write_table(pyarrow.concat_tables(parts, promote_options="default"), path)
        return tensors

    def _check_rows(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        title = f"table {self.config.name!r}"
        if (duplicates := ids[1:][ids[1:] == ids[:-1]]).numel():
            raise ValueError(f"{title}: duplicate id {int(duplicates[0])}; ids must be distinct")
        for name, value in values.items():
            if name not in ("weight", *self.state_names):
                raise ValueError(f"{title} has no state {name!r}, only {list(self.state_names)}")
            shape = (ids.numel(), *self._memory(name).shape[1:])
            if tuple(value.shape) != shape:
                raise ValueError(f"{title}: {name} must have shape {shape}, got {tuple(value.shape)}")

    # For modules.

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Remove all ids, and draw a new seed, from torch's generator by default."""
        self.clear()
        if not self.weight.is_meta:  # a meta table leaves torch's generator unchanged
            self.clock, self.seed = 0, draw_seed() if seed is None else seed
            self._load_fallback_rows({})

    @_locked
    def get_state(self) -> dict[str, Tensor]:
        """Return copies of all tensors of `state_dict`."""
        return self.get_row_state(*dynamic_rows(self.index)) | self.get_table_state()

    def get_row_state(self, ids: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Return the tensors of `state_dict` of ids, with these rows."""
        uses = {"step": self.index.last_used[rows].long(), "count": self.index.counts[rows].long()}
        return {"ids": ids, **self._get_stored_rows(rows), **uses}

    def get_table_state(self) -> dict[str, Tensor]:
        """Return the tensors of `state_dict` that are not per row."""
        state, rows = {"clock": torch.tensor(self.clock), "seed": torch.tensor(self.seed)}, self.fallback_rows
        if len(rows):
            values = self.templates(len(rows)) if self.weight.is_meta else self.read_rows(rows)
            state |= {FALLBACK + name: values[name] for name in ("weight", *self.state_names)}
        return state | ({} if self.sketch is None else self.sketch.tensors())

    def _get_stored_rows(self, rows: Tensor) -> dict[str, Tensor]:
        return self.read_rows(rows)

    def templates(self, num_rows: int, saved: Container[str] | None = None, prefix: str = "") -> dict[str, Tensor]:
        """Return empty tensors of `state_dict` for `num_rows` rows; no fallback rows if the names `saved` lack them."""
        row_tensors = {"ids": self.index.ids, **{name: self._memory(name) for name in ("weight", *self.state_names)}}
        row_tensors |= dict.fromkeys(("step", "count"), self.index.ids)
        empty = {name: torch.empty(num_rows, *t.shape[1:], dtype=t.dtype) for name, t in row_tensors.items()}
        empty |= {name: torch.empty((), dtype=torch.int64) for name in ("clock", "seed")}
        if len(self.fallback_rows) and (saved is None or f"{prefix}{FALLBACK}weight" in saved):
            size = len(self.fallback_rows) // self.index.num_sets.numel() * self._shard[0]
            values = {name: empty[name] for name in ("weight", *self.state_names)}
            empty |= {FALLBACK + name: value.new_empty(size, *value.shape[1:]) for name, value in values.items()}
        return empty | ({} if self.sketch is None else self.sketch.templates())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if metadata_kind.get() != "parameters":
            destination.update({prefix + name: tensor for name, tensor in self.get_state().items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        load_named_tensors(self.templates(0, state_dict, prefix), self.load_state, state_dict, prefix, *args)

    @_locked
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state_dict`; a shard loads its own ids.

        `row`, int64 `[rows]`, gives row numbers; then weight and states may be omitted if the store of a table on disk
        has them already. ValueError, before anything changes, if the state does not fit.
        """
        title = f"table {self.config.name!r}"
        values = {name: state[name] for name in ("weight", *self.state_names) if name in state}
        ids, order = state["ids"].to(self.index.ids).sort()
        self._check_rows(ids, values)
        if self.sketch is not None:
            self.sketch.check(state, title)
        for name, template in self.templates(0, state).items():
            if name.startswith(FALLBACK) and state[name].shape != template.shape:
                raise ValueError(f"{title}: {name} must have shape {[*template.shape]}, got {[*state[name].shape]}")
        owned_mask = self.owns(ids)
        ids, order, capacity = ids[owned_mask], order[owned_mask], self.capacity // self.index.num_sets.numel()
        if (max_rows := int(partitions_of(ids, self._shard[0]).bincount(minlength=1).max())) > capacity:
            raise ValueError(
                f"{title} has {ids.numel():,} rows in the state_dict, {max_rows:,} of them in a partition that has "
                f"room for {capacity:,}; raise its capacity"
            )
        self.clear()
        self.reserve(ids.numel() // self.index.num_sets.numel())
        self.load_row_state(state, order)
        self.apply_row_numbers()
        self.load_table_state(state)

    def load_table_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state_dict` that are not per row."""
        self.clock, self.seed = int(state["clock"]), int(state["seed"])
        self._load_fallback_rows(state)
        if self.sketch is not None:
            self.sketch.load(state)

    def _load_fallback_rows(self, state: Mapping[str, Tensor]) -> None:
        """Load this shard's fallback rows from a `state_dict`, or initialize them if it has none."""
        if not len(rows := self.fallback_rows):
            return
        values = {name: self.templates(len(rows))[name].zero_() for name in self.state_names}
        values["weight"] = self.initial_values(self.index.ids[rows])
        if f"{FALLBACK}weight" in state:
            first = len(rows) // self.index.num_sets.numel() * self._shard[1]
            values = {name: state[FALLBACK + name][first : first + len(rows)] for name in values}
        self._write(rows, values)


class CachedDynamicTable(DynamicTable, CachedTable):
    """Dynamic table in host memory or on disk, with a device cache and its index on the device."""

    zeroes_states = True
    row_ids = CachedTable.row_ids

    def _get_stored_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Return weight and states of rows; or row numbers and references to the store, if that is saved as a file."""
        if (references := self.disk_tensors()) is None:
            return self.read_rows(rows)
        fields = {f"rows.{name}": reference for name, reference in references.items()}
        return {"row": rows + self.row_config.row_origin, **fields}

    @_locked
    def remove(self, ids: Tensor | Sequence[int]) -> int:
        """Remove ids like `DynamicTable.remove`, and overwrite their rows in the store with zeros."""
        rows = self.find(self._to_ids(ids).unique())
        rows = rows[rows >= 0]
        if rows.numel():
            empty = self.templates(rows.numel())
            self._write(rows, {name: empty[name].zero_() for name in ("weight", *self.state_names)})
        return super().remove(ids)

    def _initial_values(self, seed: int) -> Any:
        return lambda rows, records: None  # a row is initialized when it is assigned to an id

    def reset_parameters(self, seed: int | None = None) -> None:
        CachedTable.reset_parameters(self, 0)
        DynamicTable.reset_parameters(self, seed)

    def record_inserted(self, ids: Tensor, rows: Tensor, begins: Tensor) -> None:
        super().record_inserted(ids, rows, begins)
        inserted = nonzero(rows >= 0)
        self.new_rows = rows[inserted], ids[inserted]
        rows.fill_(-1)  # their slots are initialized instead

    def read_rows(self, rows: Tensor) -> dict[str, Tensor]:
        if self.cache is not None:
            self.cache.write_back()
        tensors, (rows, order) = self.templates(rows.numel()), rows.cpu().sort()
        for chunk, fields in self._chunks(rows):
            for name in ("weight", *self.state_names):
                tensors[name][order[chunk]] = fields[name]
        return {name: tensors[name] for name in ("weight", *self.state_names)}

    def _write(
        self, rows: Tensor, values: Mapping[str, Tensor], order: Tensor | None = None, ids: Tensor | None = None
    ) -> None:
        if order is not None:
            values = {name: value[order.to(value.device)] for name, value in values.items()}
        tensors = {**values, "id": self.index.ids[rows] if ids is None else ids}
        rows, order = rows.sort()
        with self._reloading():
            for chunk, fields in self._chunks(rows.cpu(), read=False, write=True):
                for name, field in fields.items():
                    field.copy_(tensors[name][order[chunk].to(tensors[name].device)])
