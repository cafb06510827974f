"""Layout of a batch over tables: small arrays that map keys to tables and output columns, read by every kernel.

A *lookup* is a pair of a feature and a table that it looks up. Lookups are sorted by the position of the feature among
the batch's keys. So keys may be in any order, unused, or used by several tables, without moving any ids. The index of
dynamic tables is defined here as well.
"""

import ctypes
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritonemb.memory import advise_huge_pages
from tritonemb.types import Device, TableConfig

TABLE, COLUMN, DIM, POOLING = range(4)  # columns of `lookups`
# Columns of `tables`, the fields of `TableRow`.
FIRST_ROW, NUM_ROWS, ROW_DIM, SEED, ROW_ORIGIN, COLUMN_ORIGIN, ROW_IDS, ROW_IDS_STRIDE = range(8)
SUM, MEAN = range(2)  # values of `lookups[:, POOLING]`
HEADER_BYTES = 4  # of a quantized row: its scale and bias, both float16
# In place of the bits per column of a quantized table: ids are replaced by addresses of rows, whose bits per column are
# in the bits of the address above ADDRESS_BITS, which no system uses.
INDEXED, ADDRESS_BITS = 1, 57
ELEMENTS_PER_COUNTER = 8  # consecutive 16-bit elements of a row that one random counter rounds
UNIFORMS_PER_COUNTER = 4  # consecutive initial values of a row that one random counter draws
UNIT = 2.0**-23  # initial values are 24-bit integers times this, times the bound
PIECE = 32  # gradients of a row that are summed sequentially
SPAN = 32 * PIECE  # gradients of a row whose pieces are summed pairwise, before spans are added in order
WAYS = 32  # slots in a set of a row cache
SLOT_ALIGNMENT = 4  # slots: 16 bytes of pins, which a lane of a GPU loads at once
NO_ROW = -1  # tag of an empty slot
POLICIES = ("lru", "lfu")  # unpinned row to evict: the least recently, or least frequently used one
MAX_PARTITIONS = 1_024  # per dynamic table
MIN_PARTITION_ROWS = 4_096  # smaller partitions differ more: a full one rejects a batch although others have free rows
MAX_ROWS_PER_SET = 14  # average in a partition of a dynamic table; with more, the partition gets another set
MAX_USES = 2**31 - 1  # largest use count of a row of a dynamic table, and largest step
ALIGNMENT = 64  # bytes; aligns digests of a dynamic table so that those of a set share a cache line
SET_BYTES = 5 * WAYS + 4  # of a dynamic table's index: digest and row of each slot, and the number of overflowed rows
# Bytes per row of a full dynamic table's index: id, last step and use count, entry of `free`, and 5/4 slots. Overflow
# slots, of 5 bytes, are not counted: one row in a hundred gets one, and host memory is committed when it is written.
INDEX_BYTES = 8 + 2 * 4 + 4 + SET_BYTES * 5 // (4 * WAYS)
NO_KEY = 2**31 - 1  # key of a position whose id has a row, or whose table is not dynamic
POSITION, DISTINCT, NEEDED, MISSING, EVICTED = range(5)  # columns of the counts of `dynamic_room`
# Eviction rule of a table for a batch: step of the batch; last step that may be evicted, rows used later are protected;
# half-life of counts in steps, at least 1, for "lfu", or 0 for "lru".
Rule = tuple[int, int, int]
Batch = tuple[Tensor, Tensor, Tensor | None]  # values, offsets, per-sample weights
DIGEST_SHIFT = 46  # digests are bits 46 … 53 of a mixed id, below the 10 bits that select one of MAX_PARTITIONS


class TableRow(NamedTuple):
    """Row of `Layout.tables`."""

    first_row: int  # linear row of row 0
    num_rows: int
    dim: int
    seed: int = 0  # of stochastic rounding
    # First row and column of a shard in the unsharded table.
    row_origin: int = 0
    column_origin: int = 0
    # For slots or replicas that store selected rows of a table: address of int64 `[num_rows]`, the row that each one
    # stores; else 0. The creator of the layout keeps that tensor alive.
    row_ids: int = 0
    row_ids_stride: int = 1  # in elements


TABLE_SIZE = len(TableRow._fields)


class _IndexTensors(NamedTuple):
    """Index of a dynamic table: `P` partitions of `C` rows, each with `M` sets, and `O` sets of overflow slots."""

    # int64 `[P · C + F, 2]`, per row: its id; and two int32, the step of its last use and its use count. In one tensor,
    # so that a lookup that counts uses reads one cache line per row, not two. The last `F` are fallback rows.
    entries: Tensor
    digests: Tensor  # uint8 `[P · (M + O) · WAYS]`, per slot: 1 … 255, or 0 if the slot is empty
    rows: Tensor  # int32, per slot: the row of its id
    free: Tensor  # int32 `[P · C]`: element `k · P + p` is entry `k` of the stack of freed rows of partition `p`
    overflowed: Tensor  # int32 `[P · M]`, per set: number of its rows in overflow slots
    num_sets: Tensor  # int32 `[P]`, like the next three
    num_rows: Tensor  # rows in use
    num_allocated: Tensor  # rows ever allocated, freed ones included
    num_overflow: Tensor  # rows in overflow slots
    shard: Tensor  # int64 `[2]`: partitions of the unsharded table, and the index of the first one in this shard


class DynamicIndex(_IndexTensors):
    """Tensors of an index, which are changed in place."""

    @functools.cached_property
    def addresses(self) -> np.ndarray:
        """Address and number of elements of each tensor and of the notes, int64 `[12, 2]`; to delete when one moves."""
        tensors = *self, self.old_ways, self.overflow_hashes
        return np.array([(t.data_ptr(), t.numel()) for t in tensors], dtype=np.int64)

    @functools.cached_property
    def old_ways(self) -> Tensor:
        """Notes about the rows of a set that are evicted next, int64 `[2]` per set; zeros say nothing.

        LRU: the complement of a last step, then up to 12 ways of the home bucket, in 5 bits each, above their number in
        4 bits. Of those whose rows were not used in this step or later, the last one has the least row, by step and id;
        the rows of all others were. LFU: a key, as compared to evict; then a step, in the upper 32 bits, and ways.
        Until that step all other ways have rows of at least this key. Copy the index if last steps decrease. For CPUs.
        Only of this process: where others change the index, too, victims may not be the least used rows.
        """
        return _zeros(2 * self.overflowed.numel(), torch.int64, "cpu")

    @functools.cached_property
    def overflow_hashes(self) -> Tensor:
        """Lower 31 bits of the hash of each overflow slot's id, and a sign, int32, or 0 if unknown; as `old_ways`."""
        return _zeros(self.digests.numel() - self.overflowed.numel() * WAYS, torch.int32, "cpu")

    def __reduce__(self) -> Any:
        return type(self), tuple(self)  # a copy has other addresses

    @property
    def ids(self) -> Tensor:
        return self.entries[:, 0]

    @property
    def uses(self) -> Tensor:
        return self.entries.view(torch.int32)[:, 2:]

    @property
    def last_used(self) -> Tensor:
        return self.uses[:, 0]

    @property
    def counts(self) -> Tensor:
        return self.uses[:, 1]


class PendingInsert(NamedTuple):
    """New ids of a batch, sorted by table, then by the order of insertion.

    `M` positions have new ids, `U` of them distinct, with `N ≥ M ≥ U`; elements beyond `M` or `U` are undefined.
    """

    order: Tensor  # int64 `[N]`, positions in the batch; those of an id are consecutive
    # int32 `[N]`, ascending: number of the table, or of the partition among those of all tables; `NO_KEY` from `M` on.
    keys: Tensor
    numbers: Tensor  # int32 `[N]`, number of distinct ids up to and including this position
    ids: Tensor  # int64 `[N]`, the distinct ids
    begins: Tensor  # int64 `[N + 1]`: positions `order[begins[u] : begins[u + 1]]` have id `u`
    tables: Tensor  # int32 `[N]`, table of each distinct id
    admitted: Tensor  # bool `[N]`, whether a distinct id may get a row; initially all
    occurrences: Tensor | None = None  # int64 `[N]`, of each distinct id in the batch; None: its number of positions

    def count_occurrences(self) -> Tensor:
        """Return the occurrences of each distinct id, int64 `[N]`."""
        return self.begins.diff() if self.occurrences is None else self.occurrences


class DirectoryTensors(NamedTuple):
    """Directory of a row cache of `T` tables; see `kernels/row_cache.py`."""

    # Of the slots of all tables, `[S]`.
    tags: Tensor
    used: Tensor
    pins: Tensor
    first_slots: Tensor  # int64 `[T]`: where each table's slots begin, multiples of `SLOT_ALIGNMENT`
    tables: Tensor  # of the layout
    num_sets: Tensor  # int64 `[T]`


class TensorList(list[Tensor]):
    """Tensors of many tables, with facts that are computed once and stay valid while no tensor moves or is converted.

    Querying a thousand tables in each step is slow. `memory` keeps the facts by `name` from step to step; the
    addresses and dtypes are read with the first fact.
    """

    def __init__(self, tensors: Iterable[Tensor], memory: "dict[str, _Facts] | None" = None, name: str = "") -> None:
        super().__init__(tensors)
        self._memory, self._name = {} if memory is None else memory, name

    @functools.cached_property
    def storage_and_facts(self) -> "_Facts":
        """Current addresses and dtypes, and the facts that hold for them."""
        storage, facts = _storage_of(self), self._memory.get(self._name)
        if facts is None or facts[0] != storage:
            facts = self._memory[self._name] = storage, {}
        return facts


def without_stale_facts(*lists: TensorList) -> list[list[Tensor]]:
    """Return these lists, plain ones where a tensor has moved or was converted since the facts were read."""
    facts = [(tensors, vars(tensors).get("storage_and_facts")) for tensors in lists]
    return [list(t) if pair and pair[0] != _storage_of(t) else t for t, pair in facts]


def _storage_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Return addresses and dtypes: memory that is freed by a conversion may be where its result is."""
    return [*map(Tensor.data_ptr, tensors), *map(operator.attrgetter("dtype"), tensors)]


_Facts = tuple[list[Any], dict[Any, Any]]


def cached_fact(tensors: Sequence[Tensor], find: Callable[..., Any], *args: Any) -> Any:
    """Return `find(tensors, *args)`, cached by a `TensorList`."""
    if not isinstance(tensors, TensorList):
        return find(tensors, *args)
    facts, key = tensors.storage_and_facts[1], (find, *args)
    if key not in facts:
        facts[key] = find(tensors, *args)
    return facts[key]


def partition_sizes(capacity: int, max_partitions: int | None = None) -> tuple[int, int, int]:
    """Return the partitions of a dynamic table, and the sets and rows per partition; see `kernels/dynamic_slots.py`."""
    if max_partitions is None:
        max_partitions = min(MAX_PARTITIONS, max(1, capacity // MIN_PARTITION_ROWS))
    num_sets, max_sets = -(-capacity * 5 // (4 * WAYS)), 1
    while -(-num_sets // max_sets) > max_partitions:
        max_sets *= 2
    partitions = -(-num_sets // max_sets)
    return partitions, max_sets, -(-capacity // partitions)


def mix64(ids: Tensor) -> Tensor:
    """Mix int64 `[N]`, as unsigned numbers, by the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    mixed: Any = ids.numpy() if ids.device.type == "cpu" else ids  # NumPy takes half the time
    mixed = (mixed ^ _shift_right(mixed, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    mixed = (mixed ^ _shift_right(mixed, 27)) * (0x94D049BB133111EB - 2**64)
    return torch.as_tensor(mixed ^ _shift_right(mixed, 31), device=ids.device)


def _shift_right(numbers: Any, bits: int) -> Any:
    """Shift int64 right as unsigned numbers."""
    return numbers >> bits & 2 ** (64 - bits) - 1


def partitions_of(ids: Tensor, num_partitions: Tensor | int) -> Tensor:
    """Partition of each id among those of the unsharded table, int64 `[N]`."""
    return torch.as_tensor(_shift_right(mix64(ids), 32) * num_partitions >> 32, device=ids.device)


def make_index(
    capacity: int, device: Device = None, max_partitions: int | None = None, shard: tuple[int, int] | None = None,
    fallback_rows: int = 0,
) -> DynamicIndex:  # fmt: skip
    """Create an empty index for `capacity` rows or more, or a shard of it: its first partition, and their number.

    All partitions get as many fallback rows, `fallback_rows` or more together. These have ids for random numbers.
    """
    total_partitions, max_sets, num_rows = partition_sizes(capacity, max_partitions)
    first, partitions = (0, total_partitions) if shard is None else shard
    slots = partitions * (max_sets + -(-num_rows // WAYS)) * WAYS
    bounds = [count * -(-fallback_rows // total_partitions) for count in (first, first + partitions)]
    num_entries = num_rows * partitions + bounds[1] - bounds[0]
    entries = advise_huge_pages(torch.empty(num_entries, 2, dtype=torch.int64, device=device))
    entries[num_rows * partitions :, 0] = mix64(~torch.arange(*bounds, device=device))
    rows, free = (torch.empty(size, dtype=torch.int32, device=device) for size in (slots, num_rows * partitions))
    num_sets, num_rows, num_allocated, num_overflow = torch.zeros(4, partitions, dtype=torch.int32, device=device)
    return DynamicIndex(
        entries, _zeros(slots, torch.uint8, device), rows, free, _zeros(partitions * max_sets, torch.int32, device),
        num_sets + 1, num_rows, num_allocated, num_overflow, torch.tensor([total_partitions, first], device=device),
    )  # fmt: skip


def _zeros(size: int, dtype: torch.dtype, device: Device) -> Tensor:
    """Allocate zeros; on the CPU as pages that are committed when they are written: `torch.zeros` writes them all."""
    if torch.empty(0, device=device).device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = torch.from_numpy(np.zeros(size * dtype.itemsize + ALIGNMENT, dtype=np.uint8))
    first = -memory.data_ptr() % ALIGNMENT
    return memory[first : first + size * dtype.itemsize].view(dtype)


def renumber(index: DynamicIndex, old_rows: Tensor, rows: Tensor) -> None:
    """Assign other rows of their partitions to the ids of `old_rows`; unassigned rows below the highest are freed."""
    # Renumber the rows in slots, and move their entries.
    partitions, new_rows = index.num_sets.numel(), torch.zeros_like(index.free)
    new_rows[old_rows] = rows.int()
    slots = nonzero(index.digests != 0)
    index.rows[slots] = new_rows[index.rows[slots].long()]
    index.entries[rows] = index.entries[old_rows]
    # Free the gaps of each partition.
    index.num_allocated.zero_().scatter_reduce_(0, rows % partitions, (rows // partitions + 1).int(), "amax")
    is_used = torch.zeros(len(index.ids), dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
    for partition, num_allocated in enumerate(index.num_allocated.tolist()):
        freed = nonzero(~is_used[partition::partitions][:num_allocated])
        index.free[partition::partitions][: len(freed)] = (freed * partitions + partition).int()
        index.last_used[partition::partitions][freed] = MAX_USES


def nonzero(flags: Tensor) -> Tensor:
    """Indices of true elements of bool `[N]`, int64 `[n]`. On the CPU, PyTorch's own takes several times longer."""
    return flags.nonzero()[:, 0] if flags.device.type != "cpu" else torch.from_numpy(np.flatnonzero(flags.numpy()))


def negative(values: Tensor) -> Tensor:
    """Return the indices of negative elements of int64 `[N]`, int64 `[n]`; without threads on the CPU."""
    return nonzero(values < 0) if values.device.type != "cpu" else torch.from_numpy(np.flatnonzero(values.numpy() < 0))


def dynamic_rows(index: DynamicIndex) -> tuple[Tensor, Tensor]:
    """All ids, ascending, and their rows, both int64 `[num_rows]`; on any device."""
    rows = index.rows[nonzero(index.digests != 0)].long()
    ids, order = torch.sort(index.ids[rows])
    return ids, rows[order]


def rows_to_shard(table: TableConfig) -> int:
    """Rows of a table, or partitions of a dynamic one: the units of row-wise sharding."""
    return partition_sizes(table.capacity or 1)[0] if table.is_dynamic else table.num_embeddings


def dtypes_of(tensors: Sequence[Tensor]) -> frozenset[torch.dtype]:
    return frozenset({tensor.dtype for tensor in tensors})


def kinds_of(tensors: Sequence[Tensor]) -> tuple[frozenset[torch.device], frozenset[torch.dtype]]:
    return frozenset({tensor.device for tensor in tensors}), dtypes_of(tensors)


class Layout(NamedTuple):
    """Layout of a batch with `K` keys over a collection of `T` tables with `L` lookups."""

    tables: Tensor  # int64 `[T, 8]`, rows of `TableRow`
    lookups: Tensor  # int64 `[L, 4]`, sorted by key: table, first column of the output, dim, pooling
    key_starts: Tensor  # int64 `[K + 1]`: lookups `key_starts[k] … key_starts[k + 1] - 1` are those of key `k`
    # One name per line (`unpack_names`), for error messages.
    table_names: str
    feature_names: str
    multiplicity: int  # maximal number of lookups of a key
    num_rows: int  # linear rows, the sum over all tables
    width: int  # columns of the output
    pooled: bool  # whether the output has a row per sample, or (pooling "none") a row per value

    @property
    def kernel_args(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Fields that kernels on a GPU read: `tables`, `lookups`, `key_starts`, `multiplicity` and `width`."""
        return *self[:3], self.multiplicity, self.width


class FusedTables(NamedTuple):
    """`T` tables with the state of their fused optimizer."""

    weights: list[Tensor]  # `[T]` of `[rows, dim]`
    states: list[Tensor]  # the first optimizer state of all tables, then the second; float32 `[rows]` or `[rows, dim]`
    steps: Any  # number of updates: one int64 `[]` for all tables, or one per table; for kernels `[]` or `[T]`
    # Rows skipped for a gradient that is not finite: one int64 `[T]`, or a `[1]` per table; for kernels `[T]`.
    skipped: Any
    learning_rate: Tensor  # float32 `[]`
    optimizer: str  # its name
    hyperparameters: Sequence[float]  # values of `Hyperparameters`

    def states_of(self, table: int) -> list[Tensor]:
        return self.states[table :: len(self.weights)]


class BatchGradient(NamedTuple):
    """Gradient of the output of a lookup, and the batch that was looked up."""

    grad: Any  # `[B, width]` or `[N, width]`; for the CPU kernel also a list of those of each lookup
    offsets: Tensor  # `[K * B + 1]`
    sample_weights: Tensor | None  # `[N]`
    groups: Any  # fields of `RowGroups`; for the CPU kernel also the ids, which it groups
    layout: Layout


def make_layout(tables: Sequence[TableConfig], keys: Sequence[str], pooled: bool, device: Device = None) -> Layout:
    """Lay out `tables` over a batch with these `keys`; output columns are in the order of tables and their features.

    Raise ValueError for a shard of a 16-bit table whose first column is not a multiple of the columns rounded together.
    """
    lookups: dict[str, list[tuple[int, int, int, int]]] = {key: [] for key in keys}
    rows, column = [], 0
    for index, table in enumerate(tables):
        if table.dtype.itemsize == 2 and table.column_origin % ELEMENTS_PER_COUNTER:
            raise ValueError(
                f"table {table.name!r} begins at column {table.column_origin} of the unsharded table; shards of "
                f"{table.dtype} must begin at multiples of {ELEMENTS_PER_COUNTER} columns, which are rounded together"
            )
        shape = table.num_embeddings, table.embedding_dim
        rows.append(TableRow(0, *shape, table.seed, table.row_origin, table.column_origin))
        for feature in table.feature_names:
            lookups[feature].append((index, column, table.embedding_dim, MEAN if table.pooling == "mean" else SUM))
            column += table.embedding_dim if pooled else 0
    return build_layout(rows, list(lookups.values()), [table.name for table in tables], keys, pooled, device)


def build_layout(
    tables: Sequence[TableRow], key_lookups: Sequence[Sequence[tuple[int, int, int, int]]], table_names: Iterable[str],
    feature_names: Iterable[str], pooled: bool, device: Device = None,
) -> Layout:  # fmt: skip
    """Build a layout from `tables`, ignoring their `first_row`, and the rows of `Layout.lookups` of each key."""
    first_rows = [0, *accumulate(table.num_rows for table in tables)]
    rows = [TableRow(first, *table[1:]) for table, first in zip(tables, first_rows, strict=False)]
    lookups = [lookup for lookups in key_lookups for lookup in lookups]
    ends = [lookup[COLUMN] + lookup[DIM] for lookup in lookups] if pooled else [table.dim for table in tables]
    return Layout(
        torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, TABLE_SIZE),
        torch.tensor(lookups, dtype=torch.int64, device=device).reshape(-1, 4),
        torch.tensor([0, *accumulate(map(len, key_lookups))], dtype=torch.int64, device=device),
        pack_names(table_names), pack_names(feature_names), max([len(lookups) for lookups in key_lookups], default=0),
        first_rows[-1], max(ends), pooled,
    )  # fmt: skip


def pack_names(names: Iterable[str]) -> str:
    """Join names to one string, an argument type of custom ops. Unused keys of a batch may have line breaks."""
    return "\n".join(name.replace("\n", " ") for name in names)


def unpack_names(lines: str) -> list[str]:
    """Invert `pack_names`. `splitlines` would also split at other characters, which a name may have."""
    return lines.split("\n")


class _OnGPU(NamedTuple):
    """int64 elements at an address of a GPU, for `torch.as_tensor`."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "<i8", "data": (self.address, False), "version": 3}


def set_row_ids(layout: Layout, table: int, row_ids: Tensor, origin: int = 0) -> None:
    """Set `row_origin` and `row_ids`, int64 `[num_rows]`, of a table; the caller keeps `row_ids` alive."""
    values = torch.tensor([origin, row_ids.data_ptr(), row_ids.stride(0)], device=layout.tables.device)
    layout.tables[table, [ROW_ORIGIN, ROW_IDS, ROW_IDS_STRIDE]] = values


def view_int64(address: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """View int64 `[count]` at an address; the view does not own the memory."""
    if torch.device(device).type == "cuda":
        return torch.as_tensor(_OnGPU(address, count), device=device)
    return torch.frombuffer((ctypes.c_int64 * count).from_address(address), dtype=torch.int64)


def segment_offsets(lengths: Tensor) -> Tensor:
    """Start of each segment, and the end of the last: int64 `[S + 1]` from integer lengths `[S]`."""
    return torch.nn.functional.pad(torch.cumsum(lengths, 0, dtype=torch.int64), (1, 0))
