"""Dynamic tables: hash tables from int64 ids to rows, which are assigned to ids on first use; and sorted ones."""

import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tritonemb.layout import MAX_USES, NO_KEY, DynamicIndex, dynamic_rows, negative, nonzero, partitions_of
from tritonemb.tables.cached_rows import metadata_kind
from tritonemb.tables.index import HashIndex, concat_ids, find_batch, insert_batch
from tritonemb.tables.table import WEIGHT, DenseIndex, DeviceRows, Lock, Table, draw_seed, load_named_tensors
from tritonemb.types import TableConfig
from tritonemb.utils import atomic_path, require

R = TypeVar("R")
FALLBACK = "fallback_"  # prefix of the names of fallback rows in `state_dict`


def row_fields(names: Iterable[str]) -> list[str]:
    """Return the names of tensors of `state_dict` with a value per row."""
    table_fields = "sketch", "added", "clock", "seed"
    return [name for name in names if name not in table_fields and not name.startswith(FALLBACK)]


def is_integral(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def int64_ids(ids: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Convert ids to a tensor int64 `[N]`; TypeError if they are not integers, ValueError for other dimensions."""
    tensor = torch.as_tensor(ids, device=device)
    if len(tensor.shape) != 1:
        raise ValueError(f"ids must have one dimension, got shape {tuple(tensor.shape)}")
    if len(tensor) and not is_integral(tensor):
        raise TypeError(
            f"ids must be integers, got {tensor.dtype}; a cast would read other rows, or hide missing values"
        )
    return tensor.to(torch.int64).contiguous()


def check_integers(state: Mapping[str, Tensor], title: str) -> None:
    """Raise ValueError unless ids, steps and counts of a `state_dict` are integers of one shape that fit."""
    shape = (len(state["ids"]),)
    for name in ("ids", "step", "count"):
        if (values := state[name]).shape != shape or not is_integral(values):
            actual = f"{values.dtype} of shape {[*values.shape]}"
            raise ValueError(f"{title}: {name} must be int64 of shape {[*shape]}, got {actual}")
        limit = 31 if name == "step" else 63  # larger counts are saturated
        if name != "ids" and bool((unfit := (values < 0) | (values > (1 << limit) - 1)).any()):
            raise ValueError(f"{title}: {name} must lie in [0, 2^{limit}), got {int(values[unfit][0])}")


def _locked(method: Callable[..., R]) -> Callable[..., R]:
    @functools.wraps(method)
    def call(table: "DynamicTable", *args: Any, **kwargs: Any) -> R:
        with table.index.lock, torch.no_grad():
            return method(table, *args, **kwargs)

    return call


class DynamicTable(Table):
    """Table with a weight `[capacity, embedding_dim]`, states, and an index from ids to rows.

    `state_dict` has, sorted by id: `ids` int64 `[rows]`, their `weight` and states, `step` int64, the last step that
    used each, and `count` int64, its uses; also `clock`, the number of steps, `seed` of the initial values, and with
    `AdmissionConfig.appearances` `sketch` and `added`.

    A step is a batch that was trained, or prefetched for training. Memory is allocated as rows are, not for the
    capacity. Methods are thread-safe; the tables of a collection share one `lock`.
    """

    index: HashIndex

    @property
    def num_rows(self) -> int:
        """Number of ids that have a row."""
        return self.index.num_rows

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of weight and states of all rows, sorted by id."""
        return {name: value for name, value in self.get_state().items() if name in ("weight", *self.state_names)}

    def extra_repr(self) -> str:
        c = self.config
        return f"{self.num_rows} of {self.index.capacity}, {c.embedding_dim}, pooling={c.pooling!r}, dtype={c.dtype}"

    def _to_ids(self, ids: Tensor | Sequence[int]) -> Tensor:
        return int64_ids(ids, self.index.ids.device)

    @_locked
    def ids(self) -> Tensor:
        """Return all ids that have a row, int64, ascending."""
        return dynamic_rows(self.index.tensors)[0]

    @_locked
    def lookup(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Look up rows of ids, `[N, embedding_dim]`; others read as their fallback rows, or as initial values."""
        ids = self._to_ids(ids)
        rows = find_batch([self], *concat_ids([ids]))
        unknown = negative(rows)
        known = nonzero(rows >= 0) if len(unknown) else None
        rows, inverse = rows if known is None else rows[known], None
        if self.rows.is_cached:  # rows in files are read once
            rows, inverse = rows.unique(return_inverse=True)
        values = self.rows.read(self, rows, WEIGHT)["weight"].to(ids.device)
        values = values if inverse is None else values[inverse]
        if known is not None:
            values = values.new_empty(len(ids), values.shape[1]).index_copy_(0, known, values)
            values.index_copy_(0, unknown, self.initial_values(ids[unknown]).to(values.dtype))
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
        assigned_rows, keys, _ = insert_batch([self], *concat_ids([ids]), is_step=False)
        known_mask = keys == NO_KEY
        values = {name: value[order.to(value.device)] for name, value in {"weight": rows, **states}.items()}
        if missing := [name for name in self.state_names if name not in states]:
            stored = self.rows.read(self, assigned_rows[known_mask])
            for name in missing:
                state = stored[name]
                values[name] = state.new_zeros(ids.numel(), *state.shape[1:])
                values[name][known_mask.to(state.device)] = state
        self.rows.write(self, assigned_rows, values)

    @_locked
    def remove(self, ids: Tensor | Sequence[int]) -> int:
        """Remove ids with their rows and states; return how many had a row.

        Rows of prefetched batches, or of batches whose backward has not run, must not be removed.
        """
        distinct = self._to_ids(ids).unique()
        self.rows.erase(self, distinct)
        self.index.record_removed(distinct)
        return int((self.index.discard(distinct) >= 0).sum())

    def export(self, path: str | Path | None = None) -> dict[str, Tensor]:
        """Return `ids`, `weight`, states, `step` and `count`, sorted by id; with a path also replace a file by them.

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
        with atomic_path(Path(path)) as temporary, temporary.open("wb") as file:
            if suffix == ".npz":
                np.savez(file, **arrays)  # type: ignore[arg-type]
                return tensors
            pyarrow, parquet = require("pyarrow"), require("pyarrow.parquet")
            columns = {
                name: pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(array.reshape(-1)), array.shape[1])
                if array.ndim == 2
                else pyarrow.array(array)
                for name, array in arrays.items()
            }
            fallback = {n.removeprefix(FALLBACK): columns.pop(n) for n in arrays if n.startswith(FALLBACK)}
            parts = [pyarrow.table(table) for table in (columns, fallback) if table]
            parquet.write_table(pyarrow.concat_tables(parts, promote_options="default"), file)
        return tensors

    def _check_rows(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        title = f"table {self.config.name!r}"
        if (duplicates := ids[1:][ids[1:] == ids[:-1]]).numel():
            raise ValueError(f"{title}: duplicate id {int(duplicates[0])}; ids must be distinct")
        for name, value in values.items():
            if name not in ("weight", *self.state_names):
                raise ValueError(f"{title} has no state {name!r}, only {list(self.state_names)}")
            shape = (ids.numel(), *getattr(self, name).shape[1:])
            if tuple(value.shape) != shape:
                raise ValueError(f"{title}: {name} must have shape {shape}, got {tuple(value.shape)}")

    # For modules.

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Remove all ids, and draw a new seed, from torch's generator by default."""
        self.rows.reset(self, 0)
        self.index.clear()
        if not self.weight.is_meta:  # a meta table leaves torch's generator unchanged
            self.index.clock, self.seed = 0, draw_seed() if seed is None else seed
            self._load_fallback_rows({})
        self.load_pretrained(self.config)

    def write_pretrained(self, file: Any) -> None:
        self._check_capacity(file.ids[self.index.owns(file.ids)], "its init")
        for ids, rows in file.blocks(self.index.owns):
            self.insert(ids, rows)

    def _check_capacity(self, ids: Tensor, source: str) -> None:
        """Raise ValueError if a partition has no room for all of these ids of this table's."""
        capacity = self.index.capacity // self.index.num_partitions
        if (max_rows := int(partitions_of(ids, self.index.shard[0]).bincount(minlength=1).max())) > capacity:
            raise ValueError(
                f"table {self.config.name!r} has {ids.numel():,} rows in {source}, {max_rows:,} of them in a partition "
                f"that has room for {capacity:,}; raise its capacity"
            )

    @_locked
    def get_state(self) -> dict[str, Tensor]:
        """Return copies of all tensors of `state_dict`."""
        return self.get_row_state(*dynamic_rows(self.index.tensors)) | self.get_table_state()

    def get_row_state(self, ids: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Return the tensors of `state_dict` of ids, with these rows."""
        uses = {"step": self.index.tensors.last_used[rows].long(), "count": self.index.tensors.counts[rows].long()}
        return {"ids": ids, **self.rows.row_state(self, rows), **uses}

    def get_table_state(self) -> dict[str, Tensor]:
        """Return the tensors of `state_dict` that are not per row."""
        index, rows = self.index, self.index.fallback_rows
        state = {"clock": torch.tensor(index.clock), "seed": torch.tensor(self.seed)}
        if len(rows):
            values = self.templates(len(rows)) if self.weight.is_meta else self.rows.read(self, rows)
            state |= {FALLBACK + name: values[name] for name in ("weight", *self.state_names)}
        return state | ({} if index.sketch is None else index.sketch.tensors())

    def templates(self, num_rows: int, saved: Container[str] | None = None, prefix: str = "") -> dict[str, Tensor]:
        """Return empty tensors of `state_dict` for `num_rows` rows; no fallback rows if the names `saved` lack them."""
        rows = {name: getattr(self, name) for name in ("weight", *self.state_names)}
        tensors = {"ids": self.index.ids, **rows, "step": self.index.ids, "count": self.index.ids}
        empty = {name: torch.empty(num_rows, *t.shape[1:], dtype=t.dtype) for name, t in tensors.items()}
        empty |= {name: torch.empty((), dtype=torch.int64) for name in ("clock", "seed")}
        if len(self.index.fallback_rows) and (saved is None or f"{prefix}{FALLBACK}weight" in saved):
            size = len(self.index.fallback_rows) // self.index.num_partitions * self.index.shard[0]
            empty |= {FALLBACK + name: torch.empty(size, *t.shape[1:], dtype=t.dtype) for name, t in rows.items()}
        return empty | ({} if self.index.sketch is None else self.index.sketch.templates())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if metadata_kind.get() != "parameters":
            destination.update({prefix + name: tensor for name, tensor in self.get_state().items()})

    def _load_from_state_dict(self, *args: Any) -> None:
        load_named_tensors(self.templates(0, *args[:2]), self.load_state, *args)

    @_locked
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state_dict`; a shard loads its own ids.

        `row`, int64 `[rows]`, gives row numbers; then weight and states may be omitted if the store of a table on disk
        has them already. Other missing tensors get defaults: zero states, one use of each id in the last step, and no
        occurrences of ids without rows. ValueError, before anything changes, if the state does not fit.
        """
        title = f"table {self.config.name!r}"
        missing_names = self.templates(0, state).keys() - state.keys()
        if missing_names and "row" not in state:
            steps = state.get("step", state["ids"][:0])
            clock = int(state["clock"]) if "clock" in state else int(steps.max()) if len(steps) else 0
            empty = self.templates(len(state["ids"]), state)
            defaults = {"step": clock, "count": 1, "clock": clock, "seed": self.seed}
            state = {**state, **{name: torch.full_like(empty[name], defaults.get(name, 0)) for name in missing_names}}
        check_integers(state, title)
        values = {name: state[name] for name in ("weight", *self.state_names) if name in state}
        ids = state["ids"].to(self.index.ids)
        ids, order = (ids, torch.arange(len(ids)).to(ids)) if bool((ids[1:] >= ids[:-1]).all()) else ids.sort()
        self._check_rows(ids, values)
        if self.index.sketch is not None:
            self.index.sketch.check(state, title)
        for name, template in self.templates(0, state).items():
            if name.startswith(FALLBACK) and state[name].shape != template.shape:
                raise ValueError(f"{title}: {name} must have shape {[*template.shape]}, got {[*state[name].shape]}")
        owned_mask = self.index.owns(ids)
        ids, order = ids[owned_mask], order[owned_mask]
        self._check_capacity(ids, "the state_dict")
        self.index.clear()
        self.index.reserve(ids.numel() // self.index.num_partitions)
        self.load_row_state(state, order)
        self.index.apply_row_numbers()
        self.load_table_state(state)

    def load_row_state(self, state: Mapping[str, Tensor], order: Tensor | slice = slice(None)) -> None:
        """Load the tensors of `state_dict` of ids, those at `order`; there must be room for them.

        Row numbers in `row` take effect when `HashIndex.apply_row_numbers` is called.
        """
        ids, step, count = (state[name].to(self.index.ids)[order] for name in ("ids", "step", "count"))
        rule = MAX_USES, -1, 0  # the latest step, so that uses can be undone
        rows, keys, _ = insert_batch([self], *concat_ids([ids]), rules=[rule], is_step=False)
        self.index.counters.update(inserts=-int((keys != NO_KEY).sum()))  # do not count loaded rows as inserts
        # Last steps may decrease.
        self.index.tensors = DynamicIndex(*self.index.tensors)
        self.index.tensors.entries[rows, 1] = step + (count.clamp(max=MAX_USES) << 32)  # both int32 of `uses`
        if "row" in state:
            allocated_rows, rows = rows, state["row"].to(ids)[order] - self.rows.config.row_origin
            self.index.set_row_numbers(allocated_rows, rows)
        if values := {name: state[name] for name in ("weight", *self.state_names) if name in state}:
            self.rows.write(self, rows, values, None if isinstance(order, slice) else order, ids)

    def load_table_state(self, state: Mapping[str, Tensor], first_partition: int = 0) -> None:
        """Load the tensors of `state_dict` that are not per row, of the partitions from `first_partition` on."""
        self.index.clock, self.seed = int(state["clock"]), int(state["seed"])
        self._load_fallback_rows(state, first_partition)
        if self.index.sketch is not None:
            self.index.sketch.load(state, first_partition)

    def _load_fallback_rows(self, state: Mapping[str, Tensor], first_partition: int = 0) -> None:
        """Load this shard's fallback rows from a `state_dict`, or initialize them if it has none."""
        if not len(rows := self.index.fallback_rows):
            return
        values = {name: self.templates(len(rows))[name].zero_() for name in self.state_names}
        values["weight"] = self.initial_values(self.index.ids[rows])
        if f"{FALLBACK}weight" in state:
            first = len(rows) // self.index.num_partitions * (self.index.shard[1] - first_partition)
            values = {name: state[FALLBACK + name][first : first + len(rows)] for name in values}
        self.rows.write(self, rows, values)


class SortedIndex(DenseIndex):
    """Index of a dynamic table that is not trained any more: ids, int64 ascending, whose positions are their rows.

    Fallback rows follow the rows of ids.
    """

    assigns_rows = True

    def __init__(self, config: TableConfig, ids: Tensor, num_rows: int) -> None:
        super().__init__(config.storage_config(num_rows))
        self.sorted_ids, self.num_fallback_rows, self.lock = ids, num_rows - len(ids), Lock(ids.device)

    def find(self, ids: Tensor) -> Tensor:
        return find_sorted(self.sorted_ids, ids)

    @staticmethod
    def find_all(indexes: Sequence["SortedIndex"], values: Tensor, bounds: Tensor, keys: Sequence[int]) -> Tensor:
        rows = values.clone()
        for number, (begin, end) in zip(keys, pairwise(bounds.tolist()), strict=True):
            if number >= 0:
                rows[begin:end] = indexes[number].find(values[begin:end])
        return rows

    def sorted_rows(self) -> tuple[Tensor, Tensor]:
        return self.sorted_ids, torch.arange(self.row_config.num_embeddings, device=self.sorted_ids.device)

    def fall_back(self, ids: Tensor) -> Tensor:
        return len(self.sorted_ids) + partitions_of(ids, self.num_fallback_rows)

    def to(self, device: torch.device) -> None:
        if device.type != "meta":
            self.sorted_ids, self.lock.device = self.sorted_ids.to(device), device


def sorted_table(config: TableConfig, rows: Tensor, ids: Tensor | None, seed: int) -> Table:
    """Create a table in memory that is not trained any more: rows of ascending ids, then fallback rows."""
    index = DenseIndex(config) if ids is None else SortedIndex(config, ids, len(rows))
    table = Table(config, index, DeviceRows(index.row_config, (), config.is_dynamic), "meta")
    table.weight, table.seed = nn.Parameter(rows, requires_grad=False), seed
    return table


def find_sorted(known_ids: Tensor, ids: Tensor) -> Tensor:
    """Find the positions of ids, int64 `[N]`, among ascending ones, -1 for other ids."""
    if not len(known_ids):
        return torch.full_like(ids, -1)
    positions = torch.searchsorted(known_ids, ids).clamp_(max=len(known_ids) - 1)
    return torch.where(known_ids[positions] == ids, positions, -1)
