"""The index of a dynamic table: look up the rows of int64 ids, insert new ids with eviction, remove ids.

**insert** of distinct new ids, ascending, in each partition: if it has `C` rows, evict a victim: the row of the id's
set and the next one with the least (used, id) ("lru") or (aged count, used, id) ("lfu") among those with
`used ≤ max_step`; if they have none, of the next set that has one. The id gets the row that was freed last, or one that
was never used. Then, while the partition has more than `MAX_ROWS_PER_SET` rows per set and less than `M` sets, set
`n - 2^L` is split. A partition belongs to one task, so the result depends only on the sequence of calls.

**Aged count**: `counts >> (step - used) / half_life`, at most by 31: it halves every `half_life` steps without a use.

Partitions and sets: see `dynamic_slots.py`. One launch serves several tables: kernels read addresses of all indexes.

Bytes. **find**: 16 per id; if it is known, 32 of digests, 4 of the row, and 8 of the id; with **use** 16 more, next to
the id. **insert**: 69 per id, 32 of digests, and the sort by partition; 1,350 more per eviction, 450 per split.
**remove**: as find, and 60 per row. **missing**: the sort, and 8 per counted row. A GPU transfers at least 32 each.
Memory: 16 bytes per row beside its values, and at most 6.25 of slots once a partition has all its sets.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.dynamic_slots import FIELDS, IndexRows, Pointers, find_victim, index_at, insert, look_up, remove
from tritonemb.kernels.triton_utils import cdiv, jit, last_at_most, launch, mix, on_device, tl
from tritonemb.layout import MAX_USES, NO_KEY, DynamicIndex, PendingInsert, Rule, partitions_of

FIND_IDS = tl.constexpr(32)  # per program of one warp: two loads of 16 bytes of digests in flight per lane
BLOCK_ROWS = tl.constexpr(256)  # rows or ids per iteration of a loop
POSITIONS = 1024  # per program of the kernels between the sorts
_NO_KEY, _MAX_USES, _PARTITION = map(tl.constexpr, (NO_KEY, MAX_USES, len(Pointers._fields) - 2))
_STEP, _MAX_STEP, _HALF_LIFE, _RULES = (tl.constexpr(n) for n in range(4))


@jit
def _rule(rules, table, step, RULE):
    # Steps are stored relative to `step`.
    return (tl.load(rules + table * _RULES + RULE) + (0 if RULE == _HALF_LIFE else step)).to(tl.int32)


@jit(varying=["num_keys", "step", "num_ids"])
def _find_kernel(
    indexes, bounds, tables, num_keys, ids, occurrences, rules, step, rows, previous_steps, keys, num_ids, USE
):
    """Look up FIND_IDS ids; with USE update the last step and the count of their rows."""
    # Table of each id, and its index.
    position = tl.program_id(0).to(tl.int64) * FIND_IDS + tl.arange(0, FIND_IDS)
    valid, key = position < num_ids, last_at_most(bounds, num_keys, position)
    in_key = valid & (position >= tl.load(bounds + key)) & (position < tl.load(bounds + key + 1))
    table, id = tl.load(tables + key, mask=in_key, other=-1), tl.load(ids + position, mask=valid, other=0)
    in_key &= table >= 0
    table = tl.maximum(table, 0).to(tl.int32)
    index = index_at(indexes, table)
    _, row, partition = look_up(index, id, in_key)
    tl.store(rows + position, tl.where(in_key, row, id), mask=valid)
    # An id that occurs several times is counted as often; counts saturate.
    if USE:
        is_known, last_steps = in_key & (row >= 0), index.uses + 4 * row.to(tl.int64)
        tl.store(keys + position, tl.where(in_key & (row < 0), index.first_partition + partition, _NO_KEY), mask=valid)
        tl.store(previous_steps + position, tl.load(last_steps, mask=is_known, other=0), mask=valid)
        tl.store(last_steps, _rule(rules, table, step, _STEP), mask=is_known)
        counts, max_count = (last_steps + 1).to(tl.pointer_type(tl.uint32)), tl.full((FIND_IDS,), _MAX_USES, tl.uint32)
        number = tl.full((FIND_IDS,), 1, tl.uint32)
        if occurrences is not None:
            number = tl.minimum(tl.load(occurrences + position, mask=is_known, other=1), _MAX_USES).to(tl.uint32)
        count, overflow = tl.atomic_add(counts, number, mask=is_known, sem="relaxed"), max_count - number
        tl.atomic_min(counts, max_count, mask=is_known & (count > overflow), sem="relaxed")  # each overflow is undone


@jit
def _load_sorted(keys, by_id, by_key, values, entry, valid):
    # Key, position and id of entries in the order of both sorts.
    position = tl.load(by_id + tl.load(by_key + entry, mask=valid, other=0), mask=valid, other=0)
    return tl.load(keys + entry, mask=valid, other=_NO_KEY), position, tl.load(values + position, mask=valid, other=0)


@jit(varying=["num_ids"])
def _head_kernel(keys, by_id, by_key, values, order, ids, heads, num_ids, POSITIONS):
    """Write positions and ids in the order of two sorts, and 1 for the first entry of each id."""
    entry = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    valid, has_previous = entry < num_ids, (entry < num_ids) & (entry > 0)
    key, position, id = _load_sorted(keys, by_id, by_key, values, entry, valid)
    previous_key, _, previous_id = _load_sorted(keys, by_id, by_key, values, entry - 1, has_previous)
    tl.store(order + entry, position, mask=valid)
    tl.store(ids + entry, id, mask=valid)
    head = (key != _NO_KEY) & ((key != previous_key) | (id != previous_id))
    tl.store(heads + entry, head.to(tl.int32), mask=valid)


@jit(varying=["num_ids"])
def _distinct_kernel(indexes, num_tables, keys, numbers, sorted_ids, ids, begins, tables, admitted, num_ids, POSITIONS):
    """Write each distinct id, its first entry and its table, at its number; and the end of the last one."""
    entry = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    valid, has_previous = entry < num_ids, (entry <= num_ids) & (entry > 0)
    key, number = tl.load(keys + entry, mask=valid, other=_NO_KEY), tl.load(numbers + entry, mask=valid, other=0)
    previous_number = tl.load(numbers + entry - 1, mask=has_previous, other=0)
    # The first entry of each id.
    head = valid & (number != previous_number)
    tl.store(admitted + entry, valid, mask=valid)
    tl.store(ids + number - 1, tl.load(sorted_ids + entry, mask=head, other=0), mask=head)
    tl.store(begins + number - 1, entry.to(tl.int64), mask=head)
    tl.store(tables + number - 1, last_at_most(indexes + _PARTITION, num_tables, key.to(tl.int64), FIELDS), mask=head)
    # The end of the last id: the first entry without a key.
    end = (entry <= num_ids) & (key == _NO_KEY)
    end &= (entry == 0) | (tl.load(keys + entry - 1, mask=has_previous, other=_NO_KEY) != _NO_KEY)
    tl.store(begins + previous_number, entry.to(tl.int64), mask=end)


@jit(varying=["step", "num_ids"])
def _room_kernel(indexes, num_tables, keys, numbers, admitted, occurrences, rules, step, counts, starts, num_ids):
    """Find a partition's range of new ids, and count the ids without a row; scan rows until each id has one."""
    # Range of entries and of distinct ids: ends of the keys before this partition's, and of its own.
    program = tl.program_id(0)
    table = last_at_most(indexes + _PARTITION, num_tables, program, FIELDS)
    index, counts, max_step = index_at(indexes, table), counts + table * 5, _rule(rules, table, step, _MAX_STEP)
    partition = program - index.first_partition
    key, pair = program - 1 + tl.arange(0, 2), tl.arange(0, 2)
    last_key = last_at_most(keys, num_ids, key)
    entry_ends = tl.where(tl.load(keys + last_key) <= key, last_key + 1, 0)
    end_ids = tl.load(numbers + entry_ends - 1, mask=entry_ends > 0, other=0)
    tl.store(starts + 2 * program + pair, end_ids)
    first, end, first_id, end_id = tl.min(entry_ends, 0), tl.max(entry_ends, 0), tl.min(end_ids, 0), tl.max(end_ids, 0)
    # Rows that admitted ids need beyond the free ones, then beyond the evictable ones.
    if end > first:
        needed, num_occurrences = first_id * 0, first_id.to(tl.int64) * 0
        for begin in range(first_id, end_id, BLOCK_ROWS):
            id = begin + tl.arange(0, BLOCK_ROWS)
            needed += tl.sum(tl.load(admitted + id, mask=id < end_id, other=0).to(tl.int32), 0)
            if occurrences is not None:
                num_occurrences += tl.sum(tl.load(occurrences + id, mask=id < end_id, other=0), 0)
        if occurrences is None:
            num_occurrences += end - first
        tl.atomic_add(counts, num_occurrences, sem="relaxed")
        tl.atomic_add(counts + 1, (end_id - first_id).to(tl.int64), sem="relaxed")
        tl.atomic_add(counts + 2, needed.to(tl.int64), sem="relaxed")
        missing = needed - (index.max_rows - tl.load(index.num_rows + partition))
        tl.atomic_add(counts + 4, tl.maximum(missing, 0).to(tl.int64), sem="relaxed")
        num_allocated, first_row = tl.load(index.num_allocated + partition), 0
        while (missing > 0) & (first_row < num_allocated):
            number = first_row + tl.arange(0, BLOCK_ROWS)
            row = number * index.partitions + partition
            last_step = tl.load(index.uses + 4 * row.to(tl.int64), mask=number < num_allocated, other=_MAX_USES)
            missing -= tl.sum((last_step <= max_step).to(tl.int32), 0)
            first_row += BLOCK_ROWS
        tl.atomic_add(counts + 3, tl.maximum(missing, 0).to(tl.int64), sem="relaxed")


@jit(varying=["step"])
def _insert_kernel(
    indexes, num_tables, starts, ids, begins, admitted, occurrences, rules, step, rows, evicted, order, batch_rows
):
    """Insert the new ids of a partition, in order."""
    program = tl.program_id(0)
    table = last_at_most(indexes + _PARTITION, num_tables, program, FIELDS)
    index, half_life = index_at(indexes, table), _rule(rules, table, step, _HALF_LIFE)
    max_step, step = _rule(rules, table, step, _MAX_STEP), _rule(rules, table, step, _STEP)
    partition = program - index.first_partition
    for number in range(tl.load(starts + 2 * program), tl.load(starts + 2 * program + 1)):
        row, evicted_row = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
        if tl.load(admitted + number):
            id = tl.load(ids + number)
            # Evict if the partition is full.
            hash64, sets = mix(id), tl.load(index.num_sets + partition)
            if tl.load(index.num_rows + partition) == index.max_rows:
                victim = find_victim(index, partition, hash64, sets, step, max_step, half_life)
                evicted_row = tl.load(index.rows + victim)
                tl.store(evicted + 2 * number, tl.load(index.ids + 2 * evicted_row.to(tl.int64)))
                remove(index, partition, victim)
            # Take the row freed last, or a new one.
            num_rows, num_allocated = tl.load(index.num_rows + partition), tl.load(index.num_allocated + partition)
            row = num_allocated * index.partitions + partition
            if num_rows < num_allocated:
                row = tl.load(index.free + (num_allocated - num_rows - 1) * index.partitions + partition)
            else:
                tl.store(index.num_allocated + partition, num_allocated + 1)
            tl.store(index.num_rows + partition, num_rows + 1)
            # Write id, last step and count, and the row at all positions of the id.
            entry = 2 * row.to(tl.int64)
            tl.store(index.ids + entry, id)
            tl.store(index.uses + 2 * entry, step)
            first_entry, end_entry = tl.load(begins + number), tl.load(begins + number + 1)
            count = end_entry - first_entry
            if occurrences is not None:
                count = tl.load(occurrences + number)
            tl.store(index.uses + 2 * entry + 1, tl.minimum(count, _MAX_USES).to(tl.int32))
            for begin in range(first_entry, end_entry, BLOCK_ROWS):
                entries = begin + tl.arange(0, BLOCK_ROWS)
                positions = tl.load(order + entries, mask=entries < end_entry, other=0)
                tl.store(batch_rows + positions, row + 0 * entries, mask=entries < end_entry)
            insert(index, partition, hash64, sets, row, num_rows + 1)
        tl.store(rows + number, row)
        tl.store(evicted + 2 * number + 1, evicted_row)


@jit
def _remove_kernel(index, starts, order, ids, rows):
    partition, zero = tl.program_id(0), tl.arange(0, 1)
    for i in range(tl.load(starts + partition), tl.load(starts + partition + 1)):
        number = tl.load(order + i) + zero
        slot, row, _ = look_up(index, tl.load(ids + number), zero == 0)
        tl.store(rows + number, row)
        if tl.max(slot, 0) >= 0:
            remove(index, partition, tl.max(slot, 0))


def _index_fields(indexes: Sequence[DynamicIndex]) -> Tensor:
    """Return int64 `[T, 14]`, an `Pointers` per table; first partitions are numbered over all tables."""
    fields, first_partition = list[int](), 0
    for index in indexes:
        partitions = index.num_sets.numel()
        sizes = partitions, len(index.free) // partitions, index.overflowed.numel(), first_partition
        fields += (*map(Tensor.data_ptr, index), *sizes)
        first_partition += partitions
    return on_device(fields, indexes[0].ids.device)


def _upload_rules(device: torch.device, rules: Sequence[Rule]) -> tuple[Tensor, int]:
    """Return int64 `[T, 3]`, with steps relative to the first one, so that the upload recurs; and the first step."""
    first = rules[0][0]
    fields = [(step - first, max_step - first, half_life) for step, max_step, half_life in rules]
    return on_device([field for rule in fields for field in rule], device), first


def dynamic_find_(
    indexes: Sequence[DynamicIndex], values: Tensor, bounds: Tensor, tables: Sequence[int],
    steps: Sequence[int] | None = None, occurrences: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Look up in one launch. Arguments and result as in the reference."""
    num_ids, device = values.numel(), values.device
    rows = torch.empty_like(values)
    previous_steps, keys = values.new_empty(2, num_ids if steps else 0, dtype=torch.int32)
    rules, step = _upload_rules(device, [(step, step, 0) for step in steps or [0]])
    batch = bounds, on_device(tables, device), len(tables), values.contiguous(), occurrences
    out, grid = (rows, previous_steps, keys), (cdiv(num_ids, FIND_IDS.value),)
    launch(_find_kernel, grid, _index_fields(indexes), *batch, rules, step, *out, num_ids, USE=bool(steps), num_warps=1)
    return out


def dynamic_begin_insert(
    indexes: Sequence[DynamicIndex], values: Tensor, keys: Tensor, _: bool = False, occurrences: Tensor | None = None
) -> PendingInsert:
    """Find new ids by two sorts, a cumulative sum and two launches. Arguments and result as in the reference."""
    # Sort by key, then id; give distinct ids consecutive numbers.
    values, num_ids, grid = values.contiguous(), values.numel(), (cdiv(values.numel() + 1, POSITIONS),)
    by_id = values.sort(stable=True)[1]
    keys, by_key = keys[by_id].sort(stable=True)
    order, sorted_ids, ids = (torch.empty_like(values) for _ in range(3))
    begins, heads, tables = values.new_empty(num_ids + 1), torch.empty_like(keys), torch.empty_like(keys)
    admitted = torch.empty_like(keys, dtype=torch.bool)
    launch(_head_kernel, grid, keys, by_id, by_key, values, order, sorted_ids, heads, num_ids, POSITIONS=POSITIONS)
    numbers = heads.cumsum(0, dtype=torch.int32)
    args = _index_fields(indexes), len(indexes), keys, numbers, sorted_ids, ids, begins, tables, admitted
    launch(_distinct_kernel, grid, *args, num_ids, POSITIONS=POSITIONS)
    if occurrences is None:
        return PendingInsert(order, keys, numbers, ids, begins, tables, admitted)
    # Sum the occurrences of each id; entries without a key add 0 to the last one.
    added = occurrences[order].masked_fill(keys == NO_KEY, 0)
    sums = torch.zeros_like(ids).index_add_(0, (numbers - 1).clamp(min=0), added)
    return PendingInsert(order, keys, numbers, ids, begins, tables, admitted, sums)


def dynamic_room(
    indexes: Sequence[DynamicIndex], pending: PendingInsert, rules: Sequence[Rule], counts: Tensor
) -> Tensor:
    """Count in one launch. Arguments and result as in the reference."""
    num_programs = sum(index.num_sets.numel() for index in indexes)
    by_table, step = _upload_rules(counts.device, rules)
    starts = torch.empty(num_programs, 2, dtype=torch.int32, device=counts.device)
    ids = pending.keys, pending.numbers, pending.admitted, pending.occurrences
    args = _index_fields(indexes), len(indexes), *ids, by_table, step
    launch(_room_kernel, (num_programs,), *args, counts, starts, pending.keys.numel(), num_warps=1)
    return starts


def dynamic_commit_insert_(
    indexes: Sequence[DynamicIndex], pending: PendingInsert, starts: Tensor, rules: Sequence[Rule], batch_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Insert in one launch. Arguments and result as in the reference."""
    rows, evicted = torch.empty_like(pending.ids), pending.ids.new_empty(pending.ids.numel(), 2)
    by_table, step = _upload_rules(rows.device, rules)
    ids = pending.ids, pending.begins, pending.admitted, pending.occurrences
    args = _index_fields(indexes), len(indexes), starts, *ids, by_table, step
    launch(_insert_kernel, starts.shape[:1], *args, rows, evicted, pending.order, batch_rows, num_warps=1)
    return rows, evicted


def dynamic_remove_(index: DynamicIndex, ids: Tensor) -> Tensor:
    """Remove by a sort and one launch. Arguments and result as in the reference."""
    keys, order = torch.sort((partitions_of(ids, index.shard[0]) - index.shard[1]).int(), stable=True)
    edges = torch.arange(index.num_sets.numel() + 1, dtype=torch.int32, device=ids.device)
    starts, rows = torch.searchsorted(keys, edges), torch.empty_like(ids)
    sizes = index.num_sets.numel(), 0, index.overflowed.numel(), 0
    pointers = Pointers._make((index.ids, index.uses, *index[1:], *sizes))
    launch(_remove_kernel, index.num_sets.shape, pointers, starts, order, ids.contiguous(), rows, num_warps=1)
    return rows


def dynamic_find_reference_(
    indexes: Sequence[DynamicIndex], values: Tensor, bounds: Tensor, tables: Sequence[int],
    steps: Sequence[int] | None = None, occurrences: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Look up a batch's ids; with `steps`, one per table, update the last step and count of their rows.

    Args:
        values: int64 `[N]`.
        bounds: `[K + 1]`: the values of key `k` are `bounds[k] … bounds[k + 1] - 1`.
        tables: index into `indexes` of each key, or -1 for keys of other tables.
        occurrences: int64 `[N]`, number of uses that each value counts; 1 by default.

    Returns:
        int64 `[N]`: rows, -1 for unknown ids, and unchanged values of other tables. With `steps`, int32 `[N]` for
        `undo_use`: the previous last step of an id's row, at one of its occurrences; at the others this or the current
        step; and int32 `[N]`: keys, see `PendingInsert`.
    """
    rows, ends = values.clone(), bounds.tolist()
    previous_steps = torch.zeros_like(values, dtype=torch.int32)
    keys = torch.full_like(values, NO_KEY, dtype=torch.int32)
    rows_by_id = [IndexRows(index).by_id for index in indexes]
    for begin, end, table in zip(ends, ends[1:], tables, strict=False):
        for position in range(begin, end) if table >= 0 else ():
            index, row = indexes[table], rows_by_id[table].get(int(values[position]), -1)
            rows[position] = row
            if row < 0:
                keys[position] = table
            elif steps:
                previous_steps[position], index.last_used[row] = index.last_used[row], steps[table]
                number = 1 if occurrences is None else int(occurrences[position])
                index.counts[row] = min(MAX_USES, int(index.counts[row]) + number)
    return rows, previous_steps, keys


def dynamic_begin_insert_reference(
    _: Sequence[DynamicIndex], values: Tensor, keys: Tensor, distinct: bool = False, occurrences: Tensor | None = None
) -> PendingInsert:
    """Return the distinct ids among int64 `[N]` whose keys int32 `[N]` are not `NO_KEY`; unsorted if `distinct`.

    `occurrences`: see `dynamic_find_`.
    """
    return begin_insert_by_numpy(values, keys, distinct, occurrences)


def begin_insert_by_numpy(
    values: Tensor, keys: Tensor, distinct: bool = False, occurrences: Tensor | None = None
) -> PendingInsert:
    """Compute `dynamic_begin_insert` by NumPy, which sorts several times faster than PyTorch.

    The order of an id's positions does not matter.
    """
    order = np.flatnonzero(keys.cpu().numpy() != NO_KEY)
    ids, tables = values.cpu().numpy()[order], keys.cpu().numpy()[order]
    heads = np.ones(ids.size, dtype=np.bool_)
    # Sort by key, then id, unless ids are distinct, or sorted already.
    if not distinct:
        if not ((tables[1:] > tables[:-1]) | ((tables[1:] == tables[:-1]) & (ids[1:] >= ids[:-1]))).all():
            by_id = ids.argsort()
            by_table = tables[by_id].astype(np.uint16 if tables.max() < 1 << 16 else np.int32)  # 16 bits: a radix sort
            by_id = by_id[by_table.argsort(kind="stable")]
            order, ids, tables = order[by_id], ids[by_id], tables[by_id]
        heads[1:] = (ids[1:] != ids[:-1]) | (tables[1:] != tables[:-1])
    firsts, numbers = np.flatnonzero(heads), heads.cumsum(dtype=np.int32)
    begins = np.append(firsts, ids.size)
    sums = np.diff(begins)
    if occurrences is not None and firsts.size:
        sums = np.add.reduceat(occurrences.cpu().numpy()[order], firsts)
    fields = order, tables, numbers, ids[firsts], begins, tables[firsts], heads[firsts], sums
    return PendingInsert(*(torch.from_numpy(field).to(values.device) for field in fields))


def dynamic_room_reference(
    indexes: Sequence[DynamicIndex], pending: PendingInsert, rules: Sequence[Rule], counts: Tensor
) -> Tensor:
    """Count the rows that the admitted new ids of a batch need. Returns `starts` for `dynamic_commit_insert_`.

    `counts`, int64 `[T, 5]` of zeros, receives for each table the number of: occurrences of new ids, distinct new ids,
    admitted ones, admitted ones without a free or evictable row, and admitted ones without a free row.
    """
    for table, (index, (_, max_step, _)) in enumerate(zip(indexes, rules, strict=True)):
        in_table, contents = pending.tables == table, IndexRows(index)
        admitted_ids = pending.ids[in_table & pending.admitted].tolist()
        num_missing, num_evicted = (contents.count_missing(admitted_ids, limit) for limit in (max_step, -(2**63)))
        occurrences, distinct = int(pending.count_occurrences()[in_table].sum()), int(in_table.sum())
        counts[table] = torch.tensor([occurrences, distinct, len(admitted_ids), num_missing, num_evicted])
    return pending.begins


def dynamic_commit_insert_reference_(
    indexes: Sequence[DynamicIndex], pending: PendingInsert, starts: Tensor, rules: Sequence[Rule], batch_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Insert admitted new ids; the caller has checked that each gets a row (`dynamic_room`).

    Args:
        starts: result of `dynamic_room`.
        batch_rows: int64 `[N]`, rows of the batch; those of the new ids are written to all their positions.

    Returns:
        int64 `[U]`: rows, -1 for ids that are not admitted; and `[U, 2]`: the id and the row evicted for each, row -1
        without an eviction.
    """
    rows, evicted = torch.full_like(pending.ids, -1), pending.ids.new_full((pending.ids.numel(), 2), -1)
    pairs = zip(pending.ids.tolist(), pending.count_occurrences().tolist(), pending.tables.tolist(), strict=True)
    contents = [*map(IndexRows, indexes)]
    for number, (id, count, table) in enumerate(pairs):
        if pending.admitted[number]:
            for pair in contents[table].insert(id, count, *rules[table]):
                evicted[number] = torch.tensor(pair)
            rows[number] = contents[table].by_id[id]
    for index, rows_of_index in zip(indexes, contents, strict=True):
        rows_of_index.store(index)
    batch_rows.index_copy_(0, pending.order, rows[pending.numbers - 1])
    return rows, evicted


def dynamic_remove_reference_(index: DynamicIndex, ids: Tensor) -> Tensor:
    """Remove distinct ids int64 `[N]`. Returns their former rows int64 `[N]`, -1 for unknown ids."""
    contents = IndexRows(index)
    removed = [contents.remove(id) if id in contents.by_id else -1 for id in ids.tolist()]
    contents.store(index)
    return torch.tensor(removed, dtype=torch.int64, device=ids.device)
