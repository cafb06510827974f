"""The index of a dynamic table: which slot holds the row of an id, for any int64 id.

A `DynamicIndex` has `P` partitions: the largest power of two up to `capacity / WAYS`, from 1 to `MOST_PARTITIONS`. Each
has up to `M = ceil(capacity / (P · WAYS))` sets of `WAYS` slots, and begins with one. The bits of `mix64(id)`, see
`kernels/row_cache.py`, decide: the highest an id's partition, those from `DIGEST_SHIFT` on its digest, the lowest its
set. Of `n` sets, `2^L ≤ n < 2^(L + 1)`, that is `h = mix64(id) mod 2^(L + 1)`, or `h mod 2^L` if there is no set `h`
(linear hashing; Litwin, VLDB 1980). Set `s` of partition `p` is at place `s · P + p`, slot = place · WAYS + way. All
partitions together fill memory from its beginning on, and what they have not reached need not be there. Sets from
`M` on are the partition's overflow list, for rows of any of its sets.

**insert** serves each partition of which the batch has ids, in this order:

1. An id that is known is used: `used = step`, `count += occurrences`, up to 2^31 - 1.
2. Rows of the overflow list, by ascending id, move into their sets where these give a way (see 3).
3. A new id, by ascending id, gets the first empty way of its set. If there is none and the partition has all `M` sets,
   the row of the set with the least (used, id) ("lru") or (count, used, id) ("lfu") is evicted, of those with
   `used ≤ step - max(1, protect)`. Else it gets the first empty slot of the overflow list.
   Then, while the partition has more than `GROWN_ROWS` rows a set and less than `M` sets, set `n - 2^L` is split: rows
   that belong to set `n` from now on move there, in the order of their ways. Those in the overflow list stay there
   until the partition's next batch.

If an overflow list has too few slots, nothing is changed. A partition belongs to one task, so the result depends on the
sequence of calls alone. What is reported are differences between before the call and after it, so no slot is both one
that a row moved from and one that a row moved to: rows may be moved in any order, in place, after evicted ones are read
and before new ones are written.

**find**: 16 bytes an id; if it is known, 32 of digests and 8 of id. An insertion has these for each of its ids, and 24
to sort it by partition, 24 for each use, 21 for each new row and 42 for each move. An index: 21 a slot, 4 a set.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.row_cache import mix64
from tritonemb.layout import DIGEST_SHIFT, GROWN_ROWS, MOST_USES, WAYS, DynamicIndex
from tritonemb.types import Device

MOST_PARTITIONS = 1_024
ALIGNMENT = 64  # bytes, so that the digests of a set lie in one cache line


class DynamicInsertion(NamedTuple):
    """What an insertion did.

    Attributes:
        slots: int64 `[N]`, of the batch's ids; all -1 if the batch was refused.
        is_new: bool `[N]`: the id was inserted.
        evicted_ids, evicted_slots: int64 `[E]`, by ascending id; the slots are those before the call.
        from_slots, to_slots: int64 `[K]`, by ascending id: where rows were that are elsewhere now, and where these are.
        totals: int64 `[3]`: new rows that the batch needs, those of them that there is room for, and rows in overflow
            lists now. The batch was refused, and nothing changed, if fewer are available than needed.
    """

    slots: Tensor
    is_new: Tensor
    evicted_ids: Tensor
    evicted_slots: Tensor
    from_slots: Tensor
    to_slots: Tensor
    totals: Tensor


def make_index(
    capacity: int, overflow: int, device: Device = None, most_partitions: int = MOST_PARTITIONS
) -> DynamicIndex:
    """An empty index.

    Args:
        capacity: rows that the sets have room for, at least 1; rounded up to whole sets of each partition.
        overflow: rows that all overflow lists have room for; rounded up likewise.
        most_partitions: a power of two.
    """
    partitions = min(most_partitions, 1 << (max(1, capacity // WAYS).bit_length() - 1))
    sets, overflow_sets = (-(-rows // (WAYS * partitions)) for rows in (capacity, overflow))
    size = partitions * (sets + overflow_sets) * WAYS
    parts = ((size, torch.int64), (size, torch.int64), (size, torch.int32))
    ids, used, counts = (torch.empty(length, dtype=dtype, device=device) for length, dtype in parts)
    return DynamicIndex(
        ids, used, counts, _zeros(size, torch.uint8, device), _zeros(partitions * sets, torch.int32, device),
        torch.ones(partitions, dtype=torch.int32, device=device),
        *(torch.zeros(partitions, dtype=dtype, device=device) for dtype in (torch.int32, torch.int32, torch.bool)),
    )  # fmt: skip


def _zeros(size: int, dtype: torch.dtype, device: Device) -> Tensor:
    """On the CPU, of pages that the system provides when they are written: `torch.zeros` writes them all."""
    if torch.empty(0, device=device).device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = torch.from_numpy(np.zeros(size * dtype.itemsize + ALIGNMENT, dtype=np.uint8))
    first = -memory.data_ptr() % ALIGNMENT
    return memory[first : first + size * dtype.itemsize].view(dtype)


def dynamic_rows(index: DynamicIndex) -> tuple[Tensor, Tensor]:
    """All ids, ascending, and their slots; int64 `[rows]` both. On any device."""
    slots = index.digests.nonzero()[:, 0]
    ids, order = torch.sort(index.ids[slots])
    return ids, slots[order]


def dynamic_rows_reference(index: DynamicIndex) -> tuple[Tensor, Tensor]:
    """As `dynamic_rows`."""
    rows = torch.tensor(sorted(_Rows(index).slots().items()), dtype=torch.int64, device=index.ids.device)
    ids, slots = rows.reshape(-1, 2).T.contiguous()
    return ids, slots


def dynamic_find_reference(index: DynamicIndex, ids: Tensor) -> Tensor:
    """Slots int64 `[N]` of ids int64 `[N]` in any order, -1 of those that are unknown."""
    known = _Rows(index).slots()
    return torch.tensor([known.get(id, -1) for id in ids.tolist()], dtype=torch.int64, device=ids.device)


def dynamic_insert_reference_(
    index: DynamicIndex, ids: Tensor, occurrences: Tensor, step: int, protect: int, policy: str
) -> DynamicInsertion:
    """Find a batch's ids, mark them as used, and insert those that are unknown.

    Args:
        ids: int64 `[N]`, distinct and ascending.
        occurrences: int32 or int64 `[N]`, of each id in the batch.
        step: of the batch; greater than those before.
        protect: rows of so many last batches, this one included, are never evicted.
        policy: "lru" or "lfu".
    """
    rows, batch = _Rows(index), ids.tolist()
    before, uses = rows.slots(), dict(zip(batch, occurrences.tolist(), strict=True))
    unplaced = rows.insert(uses, step, step - max(1, protect), policy)
    if unplaced:
        rows = _Rows(index)
    rows.store(index)
    after, num_new = rows.slots(), sum(id not in before for id in batch)
    gone = [id for id in sorted(before) if id not in after]
    moved = [id for id in sorted(before) if after.get(id, before[id]) != before[id]]
    numbers = (
        [-1 if unplaced else after[id] for id in batch], [not unplaced and id not in before for id in batch],
        gone, [before[id] for id in gone], [before[id] for id in moved], [after[id] for id in moved],
        [num_new, num_new - unplaced, int(index.num_overflow.sum())],
    )  # fmt: skip
    tensors = [torch.tensor(each, dtype=torch.int64, device=ids.device) for each in numbers]
    return DynamicInsertion(tensors[0], tensors[1].bool(), *tensors[2:])


def dynamic_remove_reference_(index: DynamicIndex, ids: Tensor) -> Tensor:
    """Remove distinct ids int64 `[N]`. Slots int64 `[N]` that their rows had, -1 of those that are unknown."""
    slots, rows = dynamic_find_reference(index, ids), _Rows(index)
    for slot in slots[slots >= 0].tolist():
        del rows.held[slot]
    rows.store(index)
    return slots


class _Rows:
    """The rows of an index, (id, used, count) by slot; and how many sets each partition has."""

    def __init__(self, index: DynamicIndex) -> None:
        self.num_sets = index.num_sets.tolist()
        self.most_sets = index.overflowed.numel() // len(self.num_sets)
        self.all_sets = index.digests.numel() // len(self.num_sets) // WAYS
        slots = index.digests.nonzero()[:, 0]
        rows = zip(*(part[slots].tolist() for part in (index.ids, index.used, index.counts)), strict=True)
        self.held = dict(zip(slots.tolist(), rows, strict=True))

    def store(self, index: DynamicIndex) -> None:
        for part in index[3:]:
            part.zero_()
        index.num_sets.copy_(torch.tensor(self.num_sets))
        for slot, (id, used, count) in self.held.items():
            index.ids[slot], index.used[slot], index.counts[slot] = id, used, count
            index.digests[slot] = max(1, _mixed(id) >> DIGEST_SHIFT & 255)
            index.num_rows[self.partition(id)] += 1
            if slot in self.overflow(self.partition(id)):
                index.num_overflow[self.partition(id)] += 1
                index.overflowed[self.home(id)[0] // WAYS] += 1
                index.has_room[self.partition(id)] |= self.first_empty(self.home(id)) is not None

    def slots(self) -> dict[int, int]:
        return {id: slot for slot, (id, _, _) in self.held.items()}

    def partition(self, id: int) -> int:
        return _mixed(id) * len(self.num_sets) >> 64

    def ways(self, partition: int, number: int) -> range:
        """Slots of a set."""
        first = (number * len(self.num_sets) + partition) * WAYS
        return range(first, first + WAYS)

    def overflow(self, partition: int) -> list[int]:
        """Slots of an overflow list."""
        return [slot for number in range(self.most_sets, self.all_sets) for slot in self.ways(partition, number)]

    def home(self, id: int) -> range:
        """Slots of an id's set."""
        sets = self.num_sets[self.partition(id)]
        power = 1 << (sets.bit_length() - 1)
        number = _mixed(id) % (2 * power)
        return self.ways(self.partition(id), number if number < sets else number % power)

    def first_empty(self, slots: Iterable[int]) -> int | None:
        return next((slot for slot in slots if slot not in self.held), None)

    def way_to_take(self, id: int, last: int, policy: str) -> int | None:
        """The first empty way of an id's set, or its victim's."""
        slot = self.first_empty(self.home(id))
        if slot is not None or self.num_sets[self.partition(id)] < self.most_sets:
            return slot
        rows = [(*self.held[slot], slot) for slot in self.home(id)]
        keys = [(count * (policy == "lfu"), used, id, slot) for id, used, count, slot in rows if used <= last]
        return min(keys)[-1] if keys else None

    def insert(self, batch: dict[int, int], step: int, last: int, policy: str) -> int:
        """Steps 1 to 3 above, for the ids and their occurrences; how many found no room."""
        unplaced, known = 0, self.slots()
        for id in batch.keys() & known.keys():
            self.held[known[id]] = id, step, min(MOST_USES, self.held[known[id]][2] + batch[id])
        for partition in {self.partition(id) for id in batch}:
            waiting = {self.held[slot]: slot for slot in self.overflow(partition) if slot in self.held}
            for row in sorted(waiting):
                to = self.way_to_take(row[0], last, policy)
                if to is not None:
                    self.held[to] = self.held.pop(waiting[row])
        for id in sorted(batch.keys() - known.keys()):
            partition, to = self.partition(id), self.way_to_take(id, last, policy)
            to = self.first_empty(self.overflow(partition)) if to is None else to
            if to is None:
                unplaced += 1
                continue
            self.held[to] = id, step, min(MOST_USES, batch[id])
            while self.size(partition) > GROWN_ROWS * self.num_sets[partition] < GROWN_ROWS * self.most_sets:
                self.split(partition)
        return unplaced

    def size(self, partition: int) -> int:
        return sum(self.partition(id) == partition for id, _, _ in self.held.values())

    def split(self, partition: int) -> None:
        number = self.num_sets[partition]
        old = self.ways(partition, number - (1 << (number.bit_length() - 1)))
        self.num_sets[partition] += 1
        moving = [slot for slot in old if slot in self.held and slot not in self.home(self.held[slot][0])]
        for slot, to in zip(moving, self.ways(partition, number), strict=False):
            self.held[to] = self.held.pop(slot)


@functools.cache
def _mixed(id: int) -> int:
    return int(mix64(torch.tensor([id]))[0])
