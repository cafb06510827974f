"""Which key of a batch looks up which table, and where its columns go: the plain arrays that every kernel reads.

A *lookup* is one use of a table by one feature. Lookups are sorted by the feature's position among the batch's keys. So
keys may be in any order, unused, or used by several tables, and nothing is moved: only these small arrays differ.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritonemb.memory import advise_huge_pages
from tritonemb.types import Device, TableConfig

TABLE, COLUMN, DIM, POOLING = range(4)  # columns of `lookups`
# Columns of `tables`, a `TableRow` each.
FIRST_ROW, NUM_ROWS, ROW_DIM, SEED, ROW_ORIGIN, COLUMN_ORIGIN, ROW_IDS, ROW_IDS_STRIDE = range(8)
SUM, MEAN = range(2)  # values of `lookups[:, POOLING]`
ELEMENTS_PER_COUNTER = 8  # neighbours in a row of 16 bits that one random counter rounds
PIECE = 32  # gradients of a row that are summed one after the other
SPAN = 32 * PIECE  # gradients of a row, in pieces, that are summed before they are added to the rest
WAYS = 32  # slots in a set of a row cache
NO_ROW = -1  # tag of an empty slot
POLICIES = ("lru", "lfu")  # the unpinned row to evict: the one used longest ago, or the fewest times
MAX_PARTITIONS = 1_024  # of a dynamic table
MIN_PARTITION_ROWS = (
    4_096  # of a partition, where there are several: one that is full refuses a batch while others have room
)
MAX_ROWS_PER_SET = 14  # of each set of a partition of a dynamic table; with more, the partition gets another set
MAX_USES = 2**31 - 1  # that are counted of a row of a dynamic table, and its last step
ALIGNMENT = 64  # bytes, of the digests of a dynamic table, so that those of a set lie in one cache line
SET_BYTES = 5 * WAYS + 4  # of a dynamic table's index: digest and row of each slot, and the number in overflow slots
# Of a full dynamic table's index, per row: id, step and count of uses, place in `free`, and sets of 5/4 slots. Overflow
# slots, 5 bytes more, are not counted: one row in a hundred gets one, and host memory is provided as it is written.
INDEX_BYTES = 8 + 2 * 4 + 4 + SET_BYTES * 5 // (4 * WAYS)
NO_KEY = 2**31 - 1  # of a position of a batch whose id has a row, or is of no dynamic table
POSITION, DISTINCT, NEEDED, MISSING, EVICTED = range(5)  # columns of what `dynamic_room` counts
Rule = tuple[int, int, int]  # of a table, for a batch: its step; rows that were used after a second step are not
# evicted; and of counts for "lfu" the half-life in steps, at least 1; 0 for "lru"
DIGEST_SHIFT = 46  # digests are bits 46 … 53 of a mixed id, below those of the largest number of partitions


class TableRow(NamedTuple):
    """A row of `Layout.tables`.

    Attributes:
        first_row: linear row of the table's first.
        num_rows, dim: its shape.
        seed: of its stochastic rounding.
        row_origin, column_origin: its first row and column in the whole table that it is a part of.
        row_ids: of a table of some rows of a larger one: address of int64 `[num_rows]`, the row that each one is; else
            0. The maker of the layout keeps that tensor alive.
        row_ids_stride: numbers from one row's to the next's.
    """

    first_row: int
    num_rows: int
    dim: int
    seed: int = 0
    row_origin: int = 0
    column_origin: int = 0
    row_ids: int = 0
    row_ids_stride: int = 1


TABLE_SIZE = len(TableRow._fields)


class DynamicIndex(NamedTuple):
    """The index of a dynamic table: `P` partitions of `C` rows, each with `M` sets, and `O` sets of overflow slots.

    Attributes:
        entries: int64 `[P · C, 2]`, by row: its id; `used`, the step in which it was last used, and `counts`, how often
            it was, int32 both. A lookup that counts uses moves one line of memory then, not two.
        digests: uint8 `[P · (M + O) · WAYS]`, by slot: 1 … 255, or 0 where it is empty.
        rows: int32, by slot: the row of its id.
        free: int32 `[P · C]`: number `k · P + p` is row `k` of those of partition `p` that were freed.
        overflowed: int32 `[P · M]`, by place of a set: how many of its rows have overflow slots.
        num_sets, num_rows: int32 `[P]`: sets and rows now.
        num_allocated, num_overflow: int32 `[P]`: rows so far, freed ones included, and rows in overflow slots.
        shard: int64 `[2]`: partitions of the unsharded table, and the index of the first one in this shard.
    """

    entries: Tensor
    digests: Tensor
    rows: Tensor
    free: Tensor
    overflowed: Tensor
    num_sets: Tensor
    num_rows: Tensor
    num_allocated: Tensor
    num_overflow: Tensor
    shard: Tensor

    @property
    def ids(self) -> Tensor:
        return self.entries[:, 0]

    @property
    def uses(self) -> Tensor:
        return self.entries.view(torch.int32)[:, 2:]

    @property
    def used(self) -> Tensor:
        return self.uses[:, 0]

    @property
    def counts(self) -> Tensor:
        return self.uses[:, 1]


class PendingInsert(NamedTuple):
    """The ids of a batch without rows, by table, then in the order in which they are inserted.

    `N` is at least the number of their `M` positions, and of the `U` distinct ones; what is behind these is undefined.

    Attributes:
        order: int64 `[N]`, positions of the batch, those of an id side by side.
        keys: int32 `[N]`, ascending: the table's number, or that of its partition among those of all tables; `NO_KEY`
            from `M` on.
        numbers: int32 `[N]`, distinct ids so far, this position's included.
        ids: int64 `[N]`, distinct ones.
        begins: int64 `[N + 1]`: id `u` occurs `begins[u + 1] - begins[u]` times, in `order` from `begins[u]` on.
        tables: int32 `[N]`, by distinct id.
        admitted: bool `[N]`, which distinct ids may have rows; all, until someone says otherwise.
    """

    order: Tensor
    keys: Tensor
    numbers: Tensor
    ids: Tensor
    begins: Tensor
    tables: Tensor
    admitted: Tensor


class TensorList(list[Tensor]):
    """Tensors by table, and facts about them that hold while none has moved: a thousand tables take long to ask.

    `memory` keeps the facts by `name` from step to step. Addresses are asked for with the first fact.
    """

    def __init__(self, tensors: Iterable[Tensor], memory: "dict[str, _Known] | None" = None, name: str = "") -> None:
        super().__init__(tensors)
        self._memory, self._name = {} if memory is None else memory, name

    @functools.cached_property
    def known(self) -> "_Known":
        """Addresses, and facts."""
        addresses, known = [*map(Tensor.data_ptr, self)], self._memory.get(self._name)
        if known is None or known[0] != addresses:
            known = self._memory[self._name] = addresses, {}
        return known

    def unmoved(self) -> list[Tensor]:
        """This list, or a plain one if a tensor has moved since its address was asked for."""
        is_asked = "known" in vars(self)
        return self if not is_asked or self.known[0] == [*map(Tensor.data_ptr, self)] else list(self)


_Known = tuple[list[int], dict[Any, Any]]


def cached_fact(tensors: Sequence[Tensor], find: Callable[..., Any], *args: Any) -> Any:
    """`find(tensors, *args)`, which a `TensorList` is asked once."""
    if not isinstance(tensors, TensorList):
        return find(tensors, *args)
    facts, key = tensors.known[1], (find, *args)
    if key not in facts:
        facts[key] = find(tensors, *args)
    return facts[key]


def partition_sizes(capacity: int, most_partitions: int | None = None) -> tuple[int, int, int]:
    """Partitions of a dynamic table, and of each the most sets, and rows; see `kernels/dynamic_slots.py`."""
    if most_partitions is None:
        most_partitions = min(MAX_PARTITIONS, max(1, capacity // MIN_PARTITION_ROWS))
    sets, most_sets = -(-capacity * 5 // (4 * WAYS)), 1
    while -(-sets // most_sets) > most_partitions:
        most_sets *= 2
    partitions = -(-sets // most_sets)
    return partitions, most_sets, -(-capacity // partitions)


def mix64(ids: Tensor) -> Tensor:
    """int64 `[N]` of int64 `[N]`, both as unsigned numbers: SplitMix64's finaliser (Steele et al., OOPSLA 2014)."""
    mixed: Any = ids.numpy() if ids.device.type == "cpu" else ids  # NumPy takes half the time
    mixed = (mixed ^ _shifted(mixed, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    mixed = (mixed ^ _shifted(mixed, 27)) * (0x94D049BB133111EB - 2**64)
    return torch.as_tensor(mixed ^ _shifted(mixed, 31))


def _shifted(numbers: Any, bits: int) -> Any:
    """int64, shifted down as unsigned numbers."""
    return numbers >> bits & 2 ** (64 - bits) - 1


def partitions_of(ids: Tensor, num_partitions: Tensor | int) -> Tensor:
    """int64 `[N]`: the partition of each id, of as many as there are in the whole table."""
    return torch.as_tensor(_shifted(mix64(ids), 32) * num_partitions >> 32)


def make_index(
    capacity: int, device: Device = None, most_partitions: int | None = None, part: tuple[int, int] | None = None
) -> DynamicIndex:
    """An empty index for at least `capacity` rows; or a part of it: the first partition, and how many."""
    whole, most_sets, num_rows = partition_sizes(capacity, most_partitions)
    first, partitions = (0, whole) if part is None else part
    slots = partitions * (most_sets + -(-num_rows // WAYS)) * WAYS
    entries = advise_huge_pages(torch.empty(num_rows * partitions, 2, dtype=torch.int64, device=device))
    rows, free = (torch.empty(size, dtype=torch.int32, device=device) for size in (slots, num_rows * partitions))
    num_sets, num_rows, num_allocated, num_overflow = torch.zeros(4, partitions, dtype=torch.int32, device=device)
    return DynamicIndex(
        entries, _zeros(slots, torch.uint8, device), rows, free, _zeros(partitions * most_sets, torch.int32, device),
        num_sets + 1, num_rows, num_allocated, num_overflow, torch.tensor([whole, first], device=device),
    )  # fmt: skip


def _zeros(size: int, dtype: torch.dtype, device: Device) -> Tensor:
    """On the CPU, of pages that the system provides when they are written: `torch.zeros` writes them all."""
    if torch.empty(0, device=device).device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = torch.from_numpy(np.zeros(size * dtype.itemsize + ALIGNMENT, dtype=np.uint8))
    first = -memory.data_ptr() % ALIGNMENT
    return memory[first : first + size * dtype.itemsize].view(dtype)


def renumber(index: DynamicIndex, before: Tensor, rows: Tensor) -> None:
    """Let ids whose rows are `before` have other rows of their partitions; what is between these is free."""
    partitions, numbers = index.num_sets.numel(), torch.zeros_like(index.free)
    numbers[before] = rows.int()
    slots = nonzero(index.digests != 0)
    index.rows[slots] = numbers[index.rows[slots].long()]
    index.entries[rows] = index.entries[before]
    index.num_allocated.zero_().scatter_reduce_(0, rows % partitions, (rows // partitions + 1).int(), "amax")
    held = torch.zeros(len(index.ids), dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
    for partition, made in enumerate(index.num_allocated.tolist()):
        freed = nonzero(~held[partition::partitions][:made])
        index.free[partition::partitions][: len(freed)] = (freed * partitions + partition).int()
        index.used[partition::partitions][freed] = MAX_USES


def nonzero(flags: Tensor) -> Tensor:
    """Where bool `[N]` is set, int64 `[n]`. On the CPU, PyTorch's own takes several times longer."""
    return flags.nonzero()[:, 0] if flags.device.type != "cpu" else torch.from_numpy(np.flatnonzero(flags.numpy()))


def dynamic_rows(index: DynamicIndex) -> tuple[Tensor, Tensor]:
    """All ids, ascending, and their rows; int64 `[num_rows]` both. On any device."""
    rows = index.rows[nonzero(index.digests != 0)].long()
    ids, order = torch.sort(index.ids[rows])
    return ids, rows[order]


def rows_to_shard(table: TableConfig) -> int:
    """Rows of a table, or partitions of a dynamic one, which ranks may have."""
    return partition_sizes(table.capacity or 1)[0] if table.is_dynamic else table.num_embeddings


def dtypes_of(tensors: Sequence[Tensor]) -> frozenset[torch.dtype]:
    return frozenset({tensor.dtype for tensor in tensors})


def devices_of(tensors: Sequence[Tensor]) -> frozenset[torch.device]:
    return frozenset({tensor.device for tensor in tensors})


class Layout(NamedTuple):
    """What a batch's keys mean to a collection of `T` tables with `L` lookups; `K` keys in the batch.

    Attributes:
        tables: int64 `[T, 7]`, a `TableRow` each.
        lookups: int64 `[L, 4]`, by key: table, first column of the output, dim, pooling.
        key_starts: int64 `[K + 1]`: the lookups of key `k` are `key_starts[k] … key_starts[k + 1] - 1`.
        table_names, feature_names: one a line (`unpack_names`); for error messages.
        multiplicity: most lookups of one key.
        num_rows: linear rows, those of all tables.
        width: columns of the output.
        pooled: an output row a sample, or (pooling "none") a row a value.
    """

    tables: Tensor
    lookups: Tensor
    key_starts: Tensor
    table_names: str
    feature_names: str
    multiplicity: int
    num_rows: int
    width: int
    pooled: bool


def make_layout(tables: Sequence[TableConfig], keys: Sequence[str], pooled: bool, device: Device = None) -> Layout:
    """Lay out `tables` over a batch with these `keys`; output columns follow the tables and their features in order.

    ValueError for a part of a 16-bit table that begins in the middle of eight columns that round together.
    """
    uses: dict[str, list[tuple[int, int, int, int]]] = {key: [] for key in keys}
    rows, column = [], 0
    for index, table in enumerate(tables):
        if table.dtype.itemsize == 2 and table.column_origin % ELEMENTS_PER_COUNTER:
            raise ValueError(
                f"table {table.name!r} begins with column {table.column_origin} of the whole table; tables of "
                f"{table.dtype} may be cut at multiples of {ELEMENTS_PER_COUNTER} columns, which are rounded together"
            )
        shape = table.num_embeddings, table.embedding_dim
        rows.append(TableRow(0, *shape, table.seed, table.row_origin, table.column_origin))
        for feature in table.feature_names:
            uses[feature].append((index, column, table.embedding_dim, MEAN if table.pooling == "mean" else SUM))
            column += table.embedding_dim if pooled else 0
    return build_layout(rows, list(uses.values()), [table.name for table in tables], keys, pooled, device)


def build_layout(
    tables: Sequence[TableRow], uses: Sequence[Sequence[tuple[int, int, int, int]]], table_names: Iterable[str],
    feature_names: Iterable[str], pooled: bool, device: Device = None,
) -> Layout:  # fmt: skip
    """The layout of `tables`, whose `first_row` is found here, and of each key's rows of `Layout.lookups`."""
    first_rows = [0, *accumulate(table.num_rows for table in tables)]
    rows = [TableRow(first, *table[1:]) for table, first in zip(tables, first_rows, strict=False)]
    lookups = [use for of_key in uses for use in of_key]
    ends = [use[COLUMN] + use[DIM] for use in lookups] if pooled else [table.dim for table in tables]
    return Layout(
        torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, TABLE_SIZE),
        torch.tensor(lookups, dtype=torch.int64, device=device).reshape(-1, 4),
        torch.tensor([0, *accumulate(map(len, uses))], dtype=torch.int64, device=device),
        pack_names(table_names), pack_names(feature_names), max([len(use) for use in uses], default=0), first_rows[-1],
        max(ends), pooled,
    )  # fmt: skip


def pack_names(names: Iterable[str]) -> str:
    """Names as one string, as custom ops take it. Unused keys of a batch may have line breaks."""
    return "\n".join(name.replace("\n", " ") for name in names)


def unpack_names(lines: str) -> list[str]:
    """The names of `pack_names`. Not `splitlines`, which also splits at characters that a name may have."""
    return lines.split("\n")


class _OnGPU(NamedTuple):
    """int64 numbers at an address of a GPU, for `torch.as_tensor`."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "<i8", "data": (self.address, False), "version": 3}


def set_row_ids(layout: Layout, table: int, row_ids: Tensor, origin: int = 0) -> None:
    """Let a table's rows be those that int64 `[num_rows]` says, behind an origin; the caller keeps it alive."""
    place = torch.tensor([origin, row_ids.data_ptr(), row_ids.stride(0)], device=layout.tables.device)
    layout.tables[table, [ROW_ORIGIN, ROW_IDS, ROW_IDS_STRIDE]] = place


def view_int64(address: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """A view of the int64 numbers `[count]` at an address, which does not keep them alive."""
    if torch.device(device).type == "cuda":
        return torch.as_tensor(_OnGPU(address, count), device=device)
    return torch.frombuffer((ctypes.c_int64 * count).from_address(address), dtype=torch.int64)


def segment_offsets(lengths: Tensor) -> Tensor:
    """Where each segment starts, and where the last one ends: int64 `[S + 1]` from integer lengths `[S]`."""
    return torch.nn.functional.pad(torch.cumsum(lengths, 0, dtype=torch.int64), (1, 0))
