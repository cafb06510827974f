"""A dynamic table: any int64 is an id, and gets a row when it is first trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from tritonemb.layout import WAYS, DynamicIndex, dynamic_rows, make_index, mix64, partitions_of
from tritonemb.ops.registry import kernel
from tritonemb.ops.row_update import fill_initial_
from tritonemb.optimizers import StateSpec
from tritonemb.tables.table import Table, draw_seed
from tritonemb.types import AdmissionConfig, Device, EvictionConfig, TableConfig
from tritonemb.utils import require

INDEX_BYTES = 16 + 4 + WAYS * 5 // 25  # a row: id, step, count, free row, and slots
NUM_HASHES = 4  # of an id, in the count-min sketch
HALVED_AFTER = 8  # occurrences for each cell of a partition's part of a hash
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class DynamicStatistics:
    """What a dynamic table has done so far.

    Args:
        lookups: ids of batches that were trained, each as often as it occurs.
        hits: of those, ids that had rows before.
        inserts: rows that were given to new ids.
        refused: occurrences of ids that were not admitted.
        evictions: rows that were taken from ids, to make room or after `EvictionConfig.ttl` steps.
        rows, capacity: rows now, and at most.
    """

    lookups: int = 0
    hits: int = 0
    inserts: int = 0
    refused: int = 0
    evictions: int = 0
    rows: int = 0
    capacity: int = 0

    @property
    def load(self) -> float:
        """Rows of the capacity."""
        return self.rows / self.capacity if self.capacity else 0.0

    @property
    def hit_rate(self) -> float:
        """Hits a lookup; 1 if there were none."""
        return self.hits / self.lookups if self.lookups else 1.0


class NewIds(NamedTuple):
    """A batch of ids on its way into a table: what `DynamicTable.begin` found, for `finish` or `undo`.

    Attributes:
        rows: int64 `[N]`, -1 of unknown ids.
        before: int32 `[N]`, of rows, see `dynamic_use_`.
        unknown: int64 `[M]`: positions of unknown ids.
        ids: int64 `[U]`, these ids, distinct and ascending.
        inverse: int64 `[M]`, for each position the number of its id.
        occurrences: int64 `[U]`.
        admitted: bool `[U]`.
    """

    rows: Tensor
    before: Tensor
    unknown: Tensor
    ids: Tensor
    inverse: Tensor
    occurrences: Tensor
    admitted: Tensor


class DynamicTable(Table):
    """Weight `[capacity, embedding_dim]` and states, of which the index says which row an id has.

    `state_dict` has, sorted by id: `ids` int64 `[rows]`, `weight` and states of these, `step` int64, when each was last
    used, in steps of the table, and `count` int64, how often; and `clock`, the table's steps so far, and `seed`, which
    initial values follow from; with `AdmissionConfig.appearances`, `sketch` and `added` too.

    A step is a batch that was trained, or prefetched to be trained. Memory is taken as rows are, not for the capacity.
    """

    index: DynamicIndex

    def __init__(self, config: TableConfig, states: tuple[StateSpec, ...], device: Device = None) -> None:
        num_bytes = config.embedding_dim * config.dtype.itemsize + INDEX_BYTES
        num_bytes += sum(4 * (config.embedding_dim if spec.per_element else 1) for spec in states)
        super().__init__(config, states, device, config.capacity or max(1, (config.capacity_bytes or 0) // num_bytes))

    def _allocate(self, num_rows: int, states: tuple[StateSpec, ...], device: Device) -> None:
        config = self.config
        with _CPU:
            self.index = make_index(num_rows, part=config.partitions)
        num_rows = self.index.ids.numel()
        self._counted = dict.fromkeys(("lookups", "hits", "inserts", "refused", "evictions"), 0)
        if (there := torch.empty(0, device=device).device).type not in ("cpu", "meta"):
            raise ValueError(f"table {config.name!r}: a dynamic table is on the CPU, got device {str(there)!r}")
        # In huge pages, a batch that reaches a new one would wait for the system to clear it: 5 times the median.
        self.weight = nn.Parameter(torch.empty(num_rows, config.embedding_dim, dtype=config.dtype, device=device))
        for spec in states:
            shape = self.weight.shape if spec.per_element else self.weight.shape[:1]
            self.register_buffer(spec.name, torch.empty(shape, dtype=torch.float32, device=self.weight.device))
        self._state_names = tuple(spec.name for spec in states)
        self.clock, self.seed = 0, 0
        self.sketch = _Sketch(self.index, config.admission.appearances) if config.admission.appearances > 1 else None

    @property
    def row_config(self) -> TableConfig:
        """Of the memory that lookups and updates see, whose rows are numbers that ids get."""
        return replace(
            self.config, num_embeddings=self.weight.shape[0], capacity=None, capacity_bytes=None,
            eviction=EvictionConfig(), admission=AdmissionConfig(),
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """Ids that have a row."""
        return int(self.index.num_rows.sum())

    def tensors(self) -> dict[str, Tensor]:
        """Weight and states by name, of all rows by id; copies."""
        return {name: value for name, value in self.saved().items() if name in ("weight", *self._state_names)}

    def statistics(self) -> DynamicStatistics:
        """What the table has done so far."""
        return DynamicStatistics(**self._counted, rows=self.num_rows, capacity=self.index.ids.numel())

    def extra_repr(self) -> str:
        c = self.config
        return f"{self.num_rows} of {len(self.index.ids)}, {c.embedding_dim}, pooling={c.pooling!r}, dtype={c.dtype}"

    # For lookups.

    def find(self, ids: Tensor) -> Tensor:
        """Rows int64 `[N]` of ids, -1 of those that have none."""
        return _call("dynamic_find", self.index, ids)

    def begin(self, ids: Tensor) -> NewIds:
        """Mark a batch's ids int64 `[N]` as used in the next step. ValueError if new ones find no room; as before then.

        `finish` or `undo` follows.
        """
        step = self.clock + 1
        rows, before = _call("dynamic_use_", self.index, ids, step)
        unknown = (rows < 0).nonzero()[:, 0]
        new, inverse, occurrences = ids[unknown].unique(return_inverse=True, return_counts=True)
        batch = NewIds(rows, before, unknown, new, inverse, occurrences, self._admits(new, occurrences))
        wanted = new[batch.admitted]
        if wanted.numel() and (missing := _call("dynamic_missing", self.index, wanted, self._last(step))):
            self.undo(batch)
            eviction = self.config.eviction
            raise ValueError(
                f"table {self.config.name!r}: a batch has {wanted.numel():,} new ids, and {missing:,} of them find no "
                f"room among {len(self.index.ids):,} rows, of which {self.num_rows:,} are taken, as rows of the last "
                f"{eviction.protect} batches stay; give it more capacity, make batches smaller, or protect those of "
                "fewer batches: EvictionConfig(protect=...), at least 1"
            )
        return batch

    def undo(self, batch: NewIds) -> None:
        """Leave the table as it was before `begin`."""
        _call("dynamic_unuse_", self.index, batch.rows, batch.before)

    @torch.no_grad()
    def finish(self, batch: NewIds) -> Tensor:
        """Give rows to new ids, with initial values and states of zero; int64 `[N]`, -1 of ids that are refused."""
        self.clock += 1
        rows, new = batch.rows, batch.ids
        self._count(lookups=rows.numel(), hits=rows.numel() - batch.inverse.numel())
        if new.numel():
            if self.sketch is not None:
                self.sketch.add(new, batch.occurrences)
            found, admitted = torch.full_like(new, -1), batch.admitted
            found[admitted] = self._insert(new[admitted], batch.occurrences[admitted])
            rows[batch.unknown] = found[batch.inverse]
            self._count(refused=int(batch.occurrences[~admitted].sum()))
        (whole, first), ttl = self.index.whole.tolist(), self.config.eviction.ttl
        if ttl is not None and 0 <= (partition := self.clock % whole - first) < self.index.num_sets.numel():
            old = _call("dynamic_expired", self.index, partition, self.clock - ttl - 1)
            self._count(evictions=old.numel())
            _call("dynamic_remove_", self.index, old)
        return rows

    def initial_values(self, ids: Tensor) -> Tensor:
        """`[N, embedding_dim]`, of ids that have no row."""
        values = self.weight.new_empty(ids.numel(), self.config.embedding_dim).detach()
        fill_initial_(values, self.seed, self.config.bound, rows=ids)
        return values

    def _insert(self, ids: Tensor, occurrences: Tensor) -> Tensor:
        """Rows of distinct new ids, ascending, which there is room for."""
        eviction, step = self.config.eviction, self.clock
        half_life = eviction.half_life if eviction.policy == "lfu" else 0
        done = _call("dynamic_insert_", self.index, ids, occurrences, step, self._last(step), half_life)
        self.weight.data.index_copy_(0, done.rows, self.initial_values(ids))
        for name in self._state_names:
            self._memory(name).index_fill_(0, done.rows, 0.0)
        self._count(inserts=ids.numel(), evictions=done.evicted_ids.numel())
        return done.rows

    def _last(self, step: int) -> int:
        """Rows used after this step are not evicted for that one."""
        return step - 1 - self.config.eviction.protect

    def _admits(self, ids: Tensor, occurrences: Tensor) -> Tensor:
        admission = self.config.admission
        admitted = torch.ones(ids.numel(), dtype=torch.bool, device=_CPU)
        if admission.probability < 1.0:
            drawn = mix64(mix64(ids) ^ self.seed) >> 11 & 2**53 - 1
            admitted &= drawn < int(admission.probability * 2.0**53)
        if self.sketch is not None:
            admitted &= self.sketch.counts(ids) + occurrences >= admission.appearances
        return admitted

    def _count(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self._counted[name] += number

    # For users.

    def ids(self) -> Tensor:
        """All ids that have a row, int64, ascending."""
        return dynamic_rows(self.index)[0]

    @torch.no_grad()
    def lookup(self, ids: Tensor | Sequence[int]) -> Tensor:
        """`[N, embedding_dim]`: the rows of ids, initial values of those that have none."""
        ids = _as_ids(ids)
        rows = self.find(ids)
        found = self.weight.detach()[rows.clamp(min=0)]
        unknown = rows < 0
        if unknown.any():
            found[unknown] = self.initial_values(ids[unknown])
        return found

    @torch.no_grad()
    def insert(self, ids: Tensor | Sequence[int], rows: Tensor, **states: Tensor) -> None:
        """Write rows `[N, embedding_dim]` of distinct ids, known or new, and their states, of new ones zero by default.

        They count as used in the step of the last batch, and in a full table others are evicted for them.

        Raises:
            ValueError: for ids given twice, other shapes, and if new ids find no room; nothing has changed.
        """
        ids = _as_ids(ids)
        ids, order = ids.sort()
        self._check_rows(ids, {"weight": rows, **states})
        found, before = _call("dynamic_use_", self.index, ids, self.clock)  # so that they are not evicted for others
        new = ids[found < 0]
        if missing := _call("dynamic_missing", self.index, new, self._last(self.clock)):
            _call("dynamic_unuse_", self.index, found, before)
            raise ValueError(
                f"table {self.config.name!r} has no room for {missing:,} of {new.numel():,} new ids; give it more "
                "capacity"
            )
        found[found < 0] = self._insert(new, torch.ones_like(new))
        for name, values in {"weight": rows, **states}.items():
            self._memory(name)[found] = values[order].to(self._memory(name).dtype)

    def remove(self, ids: Tensor | Sequence[int]) -> int:
        """Forget ids, their rows and their states; how many of them had a row.

        Rows of batches that are prefetched or whose backward has not run must not be removed.
        """
        return int((_call("dynamic_remove_", self.index, _as_ids(ids).unique()) >= 0).sum())

    def export(self, path: str | Path | None = None) -> dict[str, Tensor]:
        """`ids`, `weight`, states, `step` and `count`, sorted by id; written to a .parquet or .npz file, too, if given.

        ValueError for another kind of file.
        """
        saved = self.saved()
        found = {name: saved[name] for name in ("ids", "weight", *self._state_names, "step", "count")}
        if path is None:
            return found
        suffix = Path(path).suffix
        if suffix not in (".parquet", ".npz"):
            raise ValueError(f"an export is a .parquet or .npz file, got {str(path)!r}")
        arrays = {name: value.numpy() for name, value in found.items() if name != "weight"}
        arrays["weight"] = found["weight"].float().numpy()  # NumPy has no bfloat16
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
            parquet.write_table(pyarrow.table(columns), path)
        return found

    def _memory(self, name: str) -> Tensor:
        memory = self.weight.data if name == "weight" else self._buffers[name]
        assert memory is not None
        return memory

    def _check_rows(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        title = f"table {self.config.name!r}"
        if (twice := ids[1:][ids[1:] == ids[:-1]]).numel():
            raise ValueError(f"{title}: id {int(twice[0])} is given twice")
        for name, value in values.items():
            if name not in ("weight", *self._state_names):
                raise ValueError(f"{title} has no state {name!r}, only {list(self._state_names)}")
            shape = (ids.numel(), *self._memory(name).shape[1:])
            if tuple(value.shape) != shape:
                raise ValueError(f"{title}: {name} must have shape {shape}, got {tuple(value.shape)}")

    # For modules.

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Forget all ids; draw another seed, from torch's generator if none is given."""
        self._clear()
        if not self.weight.is_meta:  # nor is torch's generator used then
            self.clock, self.seed = 0, draw_seed() if seed is None else seed

    def _clear(self) -> None:
        if self.sketch is not None:
            self.sketch.clear()
        if not self.index.num_made.any():
            return  # zeros would take memory
        index = self.index
        for part in (index.digests, index.overflowed, index.num_rows, index.num_made, index.num_overflow):
            part.zero_()
        index.num_sets.fill_(1)

    def saved(self) -> dict[str, Tensor]:
        """What `state_dict` has; copies."""
        ids, rows = dynamic_rows(self.index)
        found = {"ids": ids, "weight": self.weight.detach()[rows]}
        found |= {name: self._memory(name)[rows] for name in self._state_names}
        found |= {"step": self.index.used[rows].long(), "count": self.index.counts[rows].long()}
        found |= {"clock": torch.tensor(self.clock), "seed": torch.tensor(self.seed)}
        return found | ({} if self.sketch is None else self.sketch.tensors())

    def sketch_place(self, name: str) -> tuple[list[int], tuple[int, int]]:
        """The shape of the whole table's `sketch` or `added`, and where this part's begins."""
        assert self.sketch is not None
        return self.sketch.place(name)

    def templates(self, num_rows: int) -> dict[str, Tensor]:
        """Room for what `state_dict` has, of so many rows."""
        of_rows = {"ids": self.index.ids, **{name: self._memory(name) for name in ("weight", *self._state_names)}}
        of_rows |= dict.fromkeys(("step", "count"), self.index.ids)
        found = {name: torch.empty(num_rows, *each.shape[1:], dtype=each.dtype) for name, each in of_rows.items()}
        found |= {name: torch.empty((), dtype=torch.int64) for name in ("clock", "seed")}
        return found | ({} if self.sketch is None else self.sketch.templates())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.saved().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        names = tuple(self.templates(0))
        missing = [prefix + name for name in names if prefix + name not in state_dict]
        missing_keys += missing
        if strict:
            known = {prefix + name for name in names}
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
        if not missing:
            try:
                self.adopt({name: state_dict[prefix + name] for name in names})
            except ValueError as error:
                error_msgs.append(str(error))

    def owns(self, ids: Tensor) -> Tensor:
        """bool `[N]`: whether ids belong to this part of the table."""
        whole, first = self.index.whole.tolist()
        places = partitions_of(ids, whole) - first
        return (places >= 0) & (places < self.index.num_sets.numel())

    @torch.no_grad()
    def adopt(self, saved: Mapping[str, Tensor]) -> None:
        """Become what `state_dict` had saved; of a part of a table, its own part of that.

        ValueError, before anything changes, if it does not fit.
        """
        title, values = f"table {self.config.name!r}", {name: saved[name] for name in ("weight", *self._state_names)}
        ids, order = saved["ids"].to(_CPU).sort()
        self._check_rows(ids, values)
        if self.sketch is not None:
            self.sketch.check(saved, title)
        mine = self.owns(ids)
        ids, order, room = ids[mine], order[mine], len(self.index.ids) // self.index.num_sets.numel()
        if (most := int(partitions_of(ids, int(self.index.whole[0])).bincount(minlength=1).max())) > room:
            raise ValueError(
                f"{title} has {ids.numel():,} rows in the state_dict, {most:,} of them in a partition that has room "
                f"for {room:,}; give it more capacity"
            )
        self._clear()
        self.clock, self.seed = int(saved["clock"]), int(saved["seed"])
        rows = _call("dynamic_insert_", self.index, ids, saved["count"][order], 0, -1, 0).rows
        for name, value in values.items():
            self._memory(name)[rows] = value[order].to(self._memory(name))
        self.index.used[rows] = saved["step"][order].to(self.index.used)
        if self.sketch is not None:
            self.sketch.adopt(saved)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        probe = fn(torch.empty(0, dtype=self.weight.dtype, device=self.weight.device))
        if probe.device.type not in ("cpu", "meta"):
            raise RuntimeError(
                f"table {self.config.name!r} is dynamic: it is on the CPU, and cannot move to {probe.device}"
            )
        return super()._apply(fn, recurse)


class _Sketch:
    """Counts occurrences of ids without rows: count-min (Cormode and Muthukrishnan, 2005), conservative, in partitions.

    A partition's counts are halved when `HALVED_AFTER` occurrences have come for each of its cells.
    """

    def __init__(self, index: DynamicIndex, appearances: int) -> None:
        (self._whole, self._first), self._partitions = index.whole.tolist(), index.num_sets.numel()
        most = torch.iinfo(torch.int16).max
        if appearances > most:
            raise ValueError(f"an admission's appearances may be {most} at most, got {appearances}")
        self._width = 1 << (len(index.ids) // self._partitions).bit_length()
        with _CPU:
            self._cells = torch.zeros(NUM_HASHES, self._partitions * self._width, dtype=torch.int16)
            self._added = torch.zeros(self._partitions, dtype=torch.int64)

    def tensors(self) -> dict[str, Tensor]:
        return {"sketch": self._cells.int(), "added": self._added.clone()}

    def templates(self) -> dict[str, Tensor]:
        """Room for those of the whole table."""
        cells = torch.empty(NUM_HASHES, self._whole * self._width, dtype=torch.int32)  # gloo sends no int16
        return {"sketch": cells, "added": torch.empty(self._whole, dtype=torch.int64)}

    def place(self, name: str) -> tuple[list[int], tuple[int, int]]:
        whole, first = self._whole, self._first
        if name == "added":
            return [whole], (first, 0)
        return [NUM_HASHES, whole * self._width], (0, first * self._width)

    def clear(self) -> None:
        self._cells.zero_()
        self._added.zero_()

    def check(self, saved: Mapping[str, Tensor], title: str) -> None:
        if saved["sketch"].shape != (shape := (NUM_HASHES, self._whole * self._width)):
            found = tuple(saved["sketch"].shape)
            raise ValueError(f"{title}: sketch must have shape {shape}, got {found}; it is of another capacity")

    def adopt(self, saved: Mapping[str, Tensor]) -> None:
        self._cells.copy_(saved["sketch"][:, self._first * self._width :][:, : self._cells.shape[1]])
        self._added.copy_(saved["added"][self._first :][: self._partitions])

    def counts(self, ids: Tensor) -> Tensor:
        """int64 `[N]`, at least how often the ids were added since they were halved."""
        return self._cells.gather(1, self._places(ids)[1]).amin(0).long()

    def add(self, ids: Tensor, occurrences: Tensor) -> None:
        """Count distinct ids."""
        partitions, places = self._places(ids)
        counts = (self._cells.gather(1, places).amin(0) + occurrences).clamp(max=torch.iinfo(torch.int16).max)
        self._cells.scatter_reduce_(1, places, counts.short().expand_as(places), "amax")
        self._added.index_add_(0, partitions, occurrences)
        full = self._added >= HALVED_AFTER * self._width
        if full.any():
            self._cells.view(NUM_HASHES, self._partitions, self._width)[:, full] >>= 1
            self._added[full] = 0

    def _places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        mixed, partitions = mix64(ids), partitions_of(ids, self._whole) - self._first
        cells = [mix64(mixed + n) & self._width - 1 for n in range(1, NUM_HASHES + 1)]  # a power of two
        return partitions, partitions * self._width + torch.stack(cells)


def _call(op: str, *args: Any) -> Any:
    return kernel(op, _CPU)(*args)


def _as_ids(ids: Tensor | Sequence[int]) -> Tensor:
    found = torch.as_tensor(ids, dtype=torch.int64, device=_CPU)
    if found.dim() != 1:
        raise ValueError(f"ids must have one dimension, got shape {tuple(found.shape)}")
    return found.contiguous()
