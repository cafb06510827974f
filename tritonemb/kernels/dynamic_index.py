"""The index of a dynamic table: which row an id has, for any int64 id, and which row a new one gets.

A `DynamicIndex` has `P` partitions of `C = ceil(capacity / P)` rows; row `k` of partition `p` is row `k · P + p` of the
table, so memory fills from its beginning. An id's row never moves. Bits of `mix64(id)` decide: the high word times `P`,
divided by 2^32, is the partition; from `DIGEST_SHIFT` on stands the digest; the lowest are the set's. Of a partition's
`n` sets, `2^L ≤ n < 2^(L + 1)`, that is set `h = mix64(id) mod 2^(L + 1)`, or `h mod 2^L` if there is no set `h`
(linear hashing; Litwin, VLDB 1980). A partition begins with one set, and has `M`, a power of two, in the end, so that
all sets are the same size then; `P` is what gives capacity between. `P` and `M` are the fewest sets for which a full
table has at most 4/5 of `WAYS` rows a set, `P` is at most `MOST_PARTITIONS`, and partitions have `LEAST_ROWS` rows.

Set `s` of partition `p` is at place `s · P + p`; slot = place · WAYS + way. A row whose set has no empty way is in an
overflow slot of its partition, at places from `M · P` on, until one is empty. Where a row's slot is has no effect on
anything but time.

**insert** of distinct new ids, ascending, in each partition: if it has `C` rows, the victim is freed: of the id's set,
the row with the least (used, id) ("lru") or (aged count, used, id) ("lfu") among those with `used ≤ last`; if there is
none, of the next set that has one. The id gets the row that was freed last, or one that was never used. Then, while the
partition has more than `GROWN_ROWS` rows a set and less than `M` sets, set `n - 2^L` is split. A partition belongs to
one task, so the result depends on the sequence of calls alone.

**Aged count**: `counts >> (step - used) / half_life`, at most by 31: a row that is not used loses half.

**find**: 16 bytes an id; if it is known, 32 of digests, 4 of the row's number, and 8 of the id; **use**: 16 more.
A row takes 16 bytes beside its values, and at most 6.25 of slots where all sets are.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritonemb.layout import DIGEST_SHIFT, GROWN_ROWS, MOST_USES, WAYS, DynamicIndex, partition_sizes
from tritonemb.types import Device

ALIGNMENT = 64  # bytes, so that the digests of a set lie in one cache line


class DynamicInsertion(NamedTuple):
    """What an insertion did.

    Attributes:
        rows: int64 `[N]`, of the ids.
        evicted_ids, evicted_rows: int64 `[E]`, by ascending id.
    """

    rows: Tensor
    evicted_ids: Tensor
    evicted_rows: Tensor


def mix64(rows: Tensor) -> np.ndarray:
    """uint64 `[N]` of int64 `[N]`: SplitMix64's finaliser (Steele et al., OOPSLA 2014)."""
    mixed = rows.cpu().numpy().astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def partitions_of(ids: Tensor, num_partitions: Tensor | int) -> Tensor:
    """int64 `[N]`: the partition of each id, of as many as there are in the whole table."""
    high = torch.from_numpy((mix64(ids) >> np.uint64(32)).astype(np.int64))
    return (high * num_partitions) >> 32


def make_index(
    capacity: int, device: Device = None, most_partitions: int | None = None, part: tuple[int, int] | None = None
) -> DynamicIndex:
    """An empty index for at least `capacity` rows; or a part of it: the first partition, and how many."""
    whole, most_sets, num_rows = partition_sizes(capacity, most_partitions)
    first, partitions = (0, whole) if part is None else part
    slots = partitions * (most_sets + -(-num_rows // WAYS)) * WAYS
    shapes = (
        ((num_rows * partitions,), torch.int64), ((num_rows * partitions, 2), torch.int32), ((slots,), torch.int32),
        ((num_rows * partitions,), torch.int32),
    )  # fmt: skip
    ids, uses, rows, free = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)
    num_sets, num_rows, num_made, num_overflow = torch.zeros(4, partitions, dtype=torch.int32, device=device)
    return DynamicIndex(
        ids, uses, _zeros(slots, torch.uint8, device), rows, free, _zeros(partitions * most_sets, torch.int32, device),
        num_sets + 1, num_rows, num_made, num_overflow, torch.tensor([whole, first], device=device),
    )  # fmt: skip


def _zeros(size: int, dtype: torch.dtype, device: Device) -> Tensor:
    """On the CPU, of pages that the system provides when they are written: `torch.zeros` writes them all."""
    if torch.empty(0, device=device).device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = torch.from_numpy(np.zeros(size * dtype.itemsize + ALIGNMENT, dtype=np.uint8))
    first = -memory.data_ptr() % ALIGNMENT
    return memory[first : first + size * dtype.itemsize].view(dtype)


def dynamic_rows(index: DynamicIndex) -> tuple[Tensor, Tensor]:
    """All ids, ascending, and their rows; int64 `[num_rows]` both. On any device."""
    rows = index.rows[index.digests.nonzero()[:, 0]].long()
    ids, order = torch.sort(index.ids[rows])
    return ids, rows[order]


def dynamic_find_reference(index: DynamicIndex, ids: Tensor) -> Tensor:
    """Rows int64 `[N]` of ids int64 `[N]` in any order, -1 of those that are unknown."""
    known = _Rows(index).by_id
    return torch.tensor([known.get(id, -1) for id in ids.tolist()], dtype=torch.int64, device=ids.device)


def dynamic_use_reference_(index: DynamicIndex, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Find a batch's ids, which may occur several times, and note that they are used in a step, once an occurrence.

    Returns:
        rows int64 `[N]`, as `dynamic_find`; and int32 `[N]`: the steps in which they were used before, for
        `dynamic_unuse_`.
    """
    rows, before = dynamic_find_reference(index, ids), torch.zeros(ids.numel(), dtype=torch.int32, device=ids.device)
    for position, row in enumerate(rows.tolist()):
        if row >= 0:
            before[position], index.used[row] = index.used[row], step
            index.counts[row] = min(MOST_USES, int(index.counts[row]) + 1)
    return rows, before


def dynamic_unuse_reference_(index: DynamicIndex, rows: Tensor, before: Tensor) -> None:
    """Undo `dynamic_use_`, of a batch that is refused. A count that had reached `MOST_USES` is less."""
    for row, step in zip(reversed(rows.tolist()), reversed(before.tolist()), strict=True):
        if row >= 0:
            index.used[row] = step
            index.counts[row] -= 1


def dynamic_missing_reference(index: DynamicIndex, ids: Tensor, last: int) -> int:
    """For how many of new ids there is no row, where those used after the step `last` are not evicted."""
    return sum(max(0, needed - room) for needed, room in _Rows(index).room_for(ids.tolist(), last))


def dynamic_insert_reference_(
    index: DynamicIndex, ids: Tensor, occurrences: Tensor, step: int, last: int, half_life: int
) -> DynamicInsertion:
    """Give rows to new ids, of which none is `dynamic_missing`.

    Args:
        ids: int64 `[N]`, distinct, ascending, and unknown.
        occurrences: int64 `[N]`, of each.
        step: of the batch.
        last: rows that were used after this step are not evicted.
        half_life: in steps, of counts for "lfu", at least 1; 0 for "lru".
    """
    rows, batch = _Rows(index), ids.tolist()
    pairs = zip(batch, occurrences.tolist(), strict=True)
    evicted = [victim for id, count in pairs for victim in rows.insert(id, count, step, last, half_life)]
    rows.store(index)
    numbers = [rows.by_id[id] for id in batch], sorted(id for id, _ in evicted), [row for _, row in sorted(evicted)]
    return DynamicInsertion(*(torch.tensor(each, dtype=torch.int64, device=ids.device) for each in numbers))


def dynamic_remove_reference_(index: DynamicIndex, ids: Tensor) -> Tensor:
    """Remove distinct ids int64 `[N]`. Rows int64 `[N]` that they had, -1 of those that are unknown."""
    rows = _Rows(index)
    found = [rows.remove(id) if id in rows.by_id else -1 for id in ids.tolist()]
    rows.store(index)
    return torch.tensor(found, dtype=torch.int64, device=ids.device)


def dynamic_expired_reference(index: DynamicIndex, partition: int, last: int) -> Tensor:
    """int64 `[n]`, ascending: ids of a partition whose rows were not used after the step `last`."""
    rows = _Rows(index)
    old = [id for id, row in rows.by_id.items() if rows.partition(id) == partition and index.used[row] <= last]
    return torch.tensor(sorted(old), dtype=torch.int64, device=index.ids.device)


class _Rows:
    """The rows of an index: by id; and each partition's sets, free rows, and rows so far."""

    def __init__(self, index: DynamicIndex) -> None:
        self.index, self.num_sets, self.num_made = index, index.num_sets.tolist(), index.num_made.tolist()
        self.partitions = len(self.num_sets)
        self.most_rows = index.ids.numel() // self.partitions
        self.most_sets = index.overflowed.numel() // self.partitions
        self.by_id = dict(zip(*(each.tolist() for each in dynamic_rows(index)), strict=True))
        held = index.num_rows.tolist()
        num_free = [made - rows for made, rows in zip(self.num_made, held, strict=True)]
        self.free = [index.free[p :: self.partitions][:number].tolist() for p, number in enumerate(num_free)]

    def store(self, index: DynamicIndex) -> None:
        for part in (index.digests, index.overflowed, index.num_rows, index.num_overflow):
            part.zero_()
        index.num_sets.copy_(torch.tensor(self.num_sets))
        index.num_made.copy_(torch.tensor(self.num_made))
        for partition, free in enumerate(self.free):
            index.free[partition :: self.partitions][: len(free)] = torch.tensor(free, dtype=torch.int32)
        for id, row in sorted(self.by_id.items()):
            partition, place = self.partition(id), self.place(id)
            overflow = range(index.overflowed.numel() + partition, index.digests.numel() // WAYS, self.partitions)
            ways = (slot for at in (place, *overflow) for slot in range(at * WAYS, at * WAYS + WAYS))
            slot = next(slot for slot in ways if index.digests[slot] == 0)
            index.digests[slot], index.rows[slot] = max(1, _mixed(id) >> DIGEST_SHIFT & 255), row
            index.num_rows[partition] += 1
            if slot // WAYS != place:
                index.overflowed[place] += 1
                index.num_overflow[partition] += 1

    def partition(self, id: int) -> int:
        whole, first = self.index.whole.tolist()
        found: int = ((_mixed(id) >> 32) * whole >> 32) - first
        return found

    def place(self, id: int) -> int:
        """Of an id's set."""
        sets = self.num_sets[self.partition(id)]
        power = 1 << (sets.bit_length() - 1)
        number = _mixed(id) % (2 * power)
        return (number if number < sets else number % power) * self.partitions + self.partition(id)

    def of(self, partition: int) -> list[int]:
        return [id for id in self.by_id if self.partition(id) == partition]

    def room_for(self, batch: list[int], last: int) -> list[tuple[int, int]]:
        """For each partition of some ids, how many these are, and how many rows are free or may be evicted."""
        wanted, found = [self.partition(id) for id in batch], []
        for partition in set(wanted):
            held = self.of(partition)
            victims = sum(int(self.index.used[self.by_id[id]]) <= last for id in held)
            found.append((wanted.count(partition), self.most_rows - len(held) + victims))
        return found

    def insert(self, id: int, count: int, step: int, last: int, half_life: int) -> list[tuple[int, int]]:
        """The victim and its row, if there is one."""
        partition, evicted = self.partition(id), []
        if len(self.of(partition)) == self.most_rows:
            victim = self.victim(id, step, last, half_life)
            evicted.append((victim, self.remove(victim)))
        if not self.free[partition]:
            self.free[partition].append(self.num_made[partition] * self.partitions + partition)
            self.num_made[partition] += 1
        row = self.by_id[id] = self.free[partition].pop()
        self.index.ids[row], self.index.used[row], self.index.counts[row] = id, step, min(MOST_USES, count)
        while self.num_sets[partition] < min(self.most_sets, -(-len(self.of(partition)) // GROWN_ROWS)):
            self.num_sets[partition] += 1
        return evicted

    def victim(self, id: int, step: int, last: int, half_life: int) -> int:
        partition, sets = self.partition(id), self.num_sets[self.partition(id)]

        def key(id: int) -> tuple[int, int, int, int]:
            row = self.by_id[id]
            used, count = int(self.index.used[row]), int(self.index.counts[row])
            distance = (self.place(id) - first) // self.partitions % sets
            return distance, count >> min(31, (step - used) // half_life) if half_life else 0, used, id

        first = self.place(id)
        return min((id for id in self.of(partition) if self.index.used[self.by_id[id]] <= last), key=key)

    def remove(self, id: int) -> int:
        row = self.by_id.pop(id)
        self.free[self.partition(id)].append(row)
        return row


@functools.cache
def _mixed(id: int) -> int:
    return int(mix64(torch.tensor([id]))[0])
