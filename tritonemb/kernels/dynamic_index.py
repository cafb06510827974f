"""The index of a dynamic table: which row an id has, for any int64 id, and which row a new one gets.

**insert** of distinct new ids, ascending, in each partition: if it has `C` rows, the victim is freed: of the id's set,
the row with the least (used, id) ("lru") or (aged count, used, id) ("lfu") among those with `used ≤ last`; if there is
none, of the next set that has one. The id gets the row that was freed last, or one that was never used. Then, while the
partition has more than `MAX_ROWS_PER_SET` rows per set and less than `M` sets, set `n - 2^L` is split. A partition
belongs to one task, so the result depends on the sequence of calls alone.

**Aged count**: `counts >> (step - used) / half_life`, at most by 31: a row that is not used loses half.

Partitions and sets: see `dynamic_slots.py`. Several tables are served together: kernels read all indexes' addresses.

**find**: 16 bytes an id; if it is known, 32 of digests, 4 of the row's number, and 8 of the id; **use**: 16 more,
beside the id. **insert**: 69 an id, 32 of digests, and the sort by partition; for a victim 700 more, for a split 450.
**remove**: as find, and 60 for a row. **missing**: the sort, and 8 for each row that is counted. GPUs move 32 at least.
A row takes 16 bytes beside its values, and at most 6.25 of slots where all sets are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonemb.kernels.dynamic_slots import FIELDS, IndexRows, Parts, add, free, index_at, look_up, victim_of
from tritonemb.kernels.triton_utils import cdiv, jit, last_at_most, launch, mix, on_device, pointers_to, tl
from tritonemb.layout import MAX_USES, NO_KEY, DynamicIndex, PendingInsert, Rule, nonzero, partitions_of

FIND_IDS = tl.constexpr(32)  # of a program of a warp: a lane waits for two loads of 16 bytes of digests at once
BLOCK = tl.constexpr(256)  # rows that are counted at once
POSITIONS = 1024  # of a program that only moves numbers
_NO_KEY, _MAX_USES, _FIRST = map(tl.constexpr, (NO_KEY, MAX_USES, len(Parts._fields) - 2))
_STEP, _LAST, _HALF_LIFE, _RULES = (tl.constexpr(n) for n in range(4))


@jit
def _rule(rules, table, step, RULE: tl.constexpr):
    return (tl.load(rules + table * _RULES + RULE) + (0 if RULE == _HALF_LIFE else step)).to(tl.int32)


@jit(varying=["num_keys", "step", "num_ids"])
def _find_kernel(indexes, bounds, tables, num_keys, ids, rules, step, rows, before, keys, num_ids, USE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * FIND_IDS + tl.arange(0, FIND_IDS)
    valid, key = at < num_ids, last_at_most(bounds, num_keys, at)
    inside = valid & (at >= tl.load(bounds + key)) & (at < tl.load(bounds + key + 1))
    table, id = tl.load(tables + key, mask=inside, other=-1), tl.load(ids + at, mask=valid, other=0)
    inside &= table >= 0
    table = tl.maximum(table, 0).to(tl.int32)
    index = index_at(indexes, table)
    _, row, partition = look_up(index, id, inside)
    tl.store(rows + at, tl.where(inside, row, id), mask=valid)
    if USE:
        known, used = inside & (row >= 0), index.uses + 4 * row.to(tl.int64)
        tl.store(keys + at, tl.where(inside & (row < 0), index.first + partition, _NO_KEY), mask=valid)
        tl.store(before + at, tl.load(used, mask=known, other=0), mask=valid)
        tl.store(used, _rule(rules, table, step, _STEP), mask=known)
        counts, most = (used + 1).to(tl.pointer_type(tl.uint32)), tl.full((FIND_IDS,), _MAX_USES, tl.uint32)
        count = tl.atomic_add(counts, tl.full((FIND_IDS,), 1, tl.uint32), mask=known, sem="relaxed")
        tl.atomic_min(counts, most, mask=known & (count >= most), sem="relaxed")  # as often as it is too large


@jit
def _in_order(keys, by_id, by_key, values, at, valid):
    position = tl.load(by_id + tl.load(by_key + at, mask=valid, other=0), mask=valid, other=0)
    return tl.load(keys + at, mask=valid, other=_NO_KEY), position, tl.load(values + position, mask=valid, other=0)


@jit(varying=["num_ids"])
def _head_kernel(keys, by_id, by_key, values, order, ids, heads, num_ids, POSITIONS: tl.constexpr):
    """Positions and ids in the order of two sorts, and 1 for the first position of each id."""
    at = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    valid, behind = at < num_ids, (at < num_ids) & (at > 0)
    key, position, id = _in_order(keys, by_id, by_key, values, at, valid)
    key_before, _, id_before = _in_order(keys, by_id, by_key, values, at - 1, behind)
    tl.store(order + at, position, mask=valid)
    tl.store(ids + at, id, mask=valid)
    head = (key != _NO_KEY) & ((key != key_before) | (id != id_before))
    tl.store(heads + at, head.to(tl.int32), mask=valid)


@jit(varying=["num_ids"])
def _distinct_kernel(
    indexes, num_tables, keys, numbers, sorted_ids, ids, begins, tables, admitted, num_ids, POSITIONS: tl.constexpr
):
    at = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    valid, behind = at < num_ids, (at <= num_ids) & (at > 0)
    key, number = tl.load(keys + at, mask=valid, other=_NO_KEY), tl.load(numbers + at, mask=valid, other=0)
    number_before = tl.load(numbers + at - 1, mask=behind, other=0)
    head = valid & (number != number_before)
    tl.store(admitted + at, valid, mask=valid)
    tl.store(ids + number - 1, tl.load(sorted_ids + at, mask=head, other=0), mask=head)
    tl.store(begins + number - 1, at.to(tl.int64), mask=head)
    tl.store(tables + number - 1, last_at_most(indexes + _FIRST, num_tables, key.to(tl.int64), FIELDS), mask=head)
    end = (at <= num_ids) & (key == _NO_KEY)
    end &= (at == 0) | (tl.load(keys + at - 1, mask=behind, other=_NO_KEY) != _NO_KEY)
    tl.store(begins + number_before, at.to(tl.int64), mask=end)


@jit(varying=["step", "num_ids"])
def _room_kernel(indexes, num_tables, keys, numbers, admitted, rules, step, counts, starts, num_ids):
    """Where a partition's new ids are, and how many find no row; rows are looked at until there is one for each."""
    program = tl.program_id(0)
    table = last_at_most(indexes + _FIRST, num_tables, program, FIELDS)
    index, counts, last = index_at(indexes, table), counts + table * 5, _rule(rules, table, step, _LAST)
    partition = program - index.first
    key, two = program - 1 + tl.arange(0, 2), tl.arange(0, 2)
    last_key = last_at_most(keys, num_ids, key)
    ends = tl.where(tl.load(keys + last_key) <= key, last_key + 1, 0)  # of this partition's keys and those before
    end_ids = tl.load(numbers + ends - 1, mask=ends > 0, other=0)
    tl.store(starts + 2 * program + two, end_ids)
    first, end, first_id, end_id = tl.min(ends, 0), tl.max(ends, 0), tl.min(end_ids, 0), tl.max(end_ids, 0)
    if end > first:
        needed = first_id * 0
        for at in range(first_id, end_id, BLOCK):
            id = at + tl.arange(0, BLOCK)
            needed += tl.sum(tl.load(admitted + id, mask=id < end_id, other=0).to(tl.int32), 0)
        tl.atomic_add(counts, (end - first).to(tl.int64), sem="relaxed")
        tl.atomic_add(counts + 1, (end_id - first_id).to(tl.int64), sem="relaxed")
        tl.atomic_add(counts + 2, needed.to(tl.int64), sem="relaxed")
        left = needed - (index.most_rows - tl.load(index.num_rows + partition))
        tl.atomic_add(counts + 4, tl.maximum(left, 0).to(tl.int64), sem="relaxed")
        made, first_row = tl.load(index.num_allocated + partition), 0
        while (left > 0) & (first_row < made):
            number = first_row + tl.arange(0, BLOCK)
            row = number * index.partitions + partition
            used = tl.load(index.uses + 4 * row.to(tl.int64), mask=number < made, other=_MAX_USES)
            left -= tl.sum((used <= last).to(tl.int32), 0)
            first_row += BLOCK
        tl.atomic_add(counts + 3, tl.maximum(left, 0).to(tl.int64), sem="relaxed")


@jit(varying=["step"])
def _insert_kernel(indexes, num_tables, starts, ids, begins, admitted, rules, step, rows, evicted, order, batch_rows):
    program = tl.program_id(0)
    table = last_at_most(indexes + _FIRST, num_tables, program, FIELDS)
    index, half_life = index_at(indexes, table), _rule(rules, table, step, _HALF_LIFE)
    last, step, partition = _rule(rules, table, step, _LAST), _rule(rules, table, step, _STEP), program - index.first
    for at in range(tl.load(starts + 2 * program), tl.load(starts + 2 * program + 1)):
        row, evicted_row = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
        if tl.load(admitted + at):
            id = tl.load(ids + at)
            mixed, sets = mix(id), tl.load(index.num_sets + partition)
            if tl.load(index.num_rows + partition) == index.most_rows:
                victim = victim_of(index, partition, mixed, sets, step, last, half_life)
                evicted_row = tl.load(index.rows + victim)
                tl.store(evicted + 2 * at, tl.load(index.ids + 2 * evicted_row.to(tl.int64)))
                free(index, partition, victim)
            held, made = tl.load(index.num_rows + partition), tl.load(index.num_allocated + partition)
            row = made * index.partitions + partition
            if held < made:
                row = tl.load(index.free + (made - held - 1) * index.partitions + partition)
            else:
                tl.store(index.num_allocated + partition, made + 1)
            tl.store(index.num_rows + partition, held + 1)
            entry = 2 * row.to(tl.int64)
            tl.store(index.ids + entry, id)
            tl.store(index.uses + 2 * entry, step)
            first_use, last_use = tl.load(begins + at), tl.load(begins + at + 1)
            tl.store(index.uses + 2 * entry + 1, tl.minimum(last_use - first_use, _MAX_USES).to(tl.int32))
            for use in range(first_use, last_use, BLOCK):
                uses = use + tl.arange(0, BLOCK)
                positions = tl.load(order + uses, mask=uses < last_use, other=0)
                tl.store(batch_rows + positions, row + 0 * uses, mask=uses < last_use)
            add(index, partition, mixed, sets, row, held + 1)
        tl.store(rows + at, row)
        tl.store(evicted + 2 * at + 1, evicted_row)


@jit
def _remove_kernel(index, starts, order, ids, rows):
    partition, one = tl.program_id(0), tl.arange(0, 1)
    for i in range(tl.load(starts + partition), tl.load(starts + partition + 1)):
        at = tl.load(order + i) + one
        slot, row, _ = look_up(index, tl.load(ids + at), one == 0)
        tl.store(rows + at, row)
        if tl.max(slot, 0) >= 0:
            free(index, partition, tl.max(slot, 0))


def _addresses(indexes: Sequence[DynamicIndex]) -> Tensor:
    """int64 `[T, 14]`, a `Parts` each: addresses, sizes, and its first partition among those of all."""
    numbers, first = list[int](), 0
    for index in indexes:
        partitions = index.num_sets.numel()
        numbers += (*pointers_to(index), partitions, len(index.ids) // partitions, index.overflowed.numel(), first)
        first += partitions
    return on_device(numbers, indexes[0].ids.device)


def _rules_on(device: torch.device, rules: Sequence[Rule]) -> tuple[Tensor, int]:
    """int64 `[T, 3]`, steps as differences from the first one, so that they recur; and that one."""
    first = rules[0][0]
    return on_device([n for step, last, life in rules for n in (step - first, last - first, life)], device), first


def dynamic_find_(
    indexes: Sequence[DynamicIndex], values: Tensor, bounds: Tensor, tables: Sequence[int],
    steps: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One launch. As the reference."""
    num_ids, device = values.numel(), values.device
    rows, (before, keys) = torch.empty_like(values), values.new_empty(2, num_ids if steps else 0, dtype=torch.int32)
    rules, step = _rules_on(device, [(step, step, 0) for step in steps or [0]])
    launch(
        _find_kernel, (cdiv(num_ids, FIND_IDS.value),), _addresses(indexes), bounds, on_device(tables, device),
        len(tables), values.contiguous(), rules, step, rows, before, keys, num_ids, USE=bool(steps), num_warps=1,
    )  # fmt: skip
    return rows, before, keys


def dynamic_begin_insert(indexes: Sequence[DynamicIndex], values: Tensor, keys: Tensor) -> PendingInsert:
    """Two launches behind two sorts and a cumulated sum, over all positions. As the reference."""
    values, num_ids, grid = values.contiguous(), values.numel(), (cdiv(values.numel() + 1, POSITIONS),)
    by_id = values.sort(stable=True)[1]
    keys, by_key = keys[by_id].sort(stable=True)
    order, sorted_ids, ids = (torch.empty_like(values) for _ in range(3))
    begins, heads, tables = values.new_empty(num_ids + 1), torch.empty_like(keys), torch.empty_like(keys)
    admitted = torch.empty_like(keys, dtype=torch.bool)
    launch(_head_kernel, grid, keys, by_id, by_key, values, order, sorted_ids, heads, num_ids, POSITIONS=POSITIONS)
    numbers = heads.cumsum(0, dtype=torch.int32)
    launch(
        _distinct_kernel, grid, _addresses(indexes), len(indexes), keys, numbers, sorted_ids, ids, begins, tables,
        admitted, num_ids, POSITIONS=POSITIONS,
    )  # fmt: skip
    return PendingInsert(order, keys, numbers, ids, begins, tables, admitted)


def dynamic_room(indexes: Sequence[DynamicIndex], new: PendingInsert, rules: Sequence[Rule], counts: Tensor) -> Tensor:
    """One launch. As the reference."""
    num_programs, (by_table, step) = sum(index.num_sets.numel() for index in indexes), _rules_on(counts.device, rules)
    starts = torch.empty(num_programs, 2, dtype=torch.int32, device=counts.device)
    launch(
        _room_kernel, (num_programs,), _addresses(indexes), len(indexes), new.keys, new.numbers, new.admitted, by_table,
        step, counts, starts, new.keys.numel(), num_warps=1,
    )  # fmt: skip
    return starts


def dynamic_commit_insert_(
    indexes: Sequence[DynamicIndex], new: PendingInsert, starts: Tensor, rules: Sequence[Rule], batch_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """One launch. As the reference."""
    rows, evicted = torch.empty_like(new.ids), new.ids.new_empty(new.ids.numel(), 2)
    by_table, step = _rules_on(rows.device, rules)
    launch(
        _insert_kernel, starts.shape[:1], _addresses(indexes), len(indexes), starts, new.ids, new.begins, new.admitted,
        by_table, step, rows, evicted, new.order, batch_rows, num_warps=1,
    )  # fmt: skip
    return rows, evicted


def dynamic_remove_(index: DynamicIndex, ids: Tensor) -> Tensor:
    """A launch behind a sort. As the reference."""
    keys, order = torch.sort((partitions_of(ids, index.shard[0]) - index.shard[1]).int(), stable=True)
    edges = torch.arange(index.num_sets.numel() + 1, dtype=torch.int32, device=ids.device)
    starts, rows = torch.searchsorted(keys, edges), torch.empty_like(ids)
    sizes = index.num_sets.numel(), 0, index.overflowed.numel(), 0
    parts = Parts._make((index.ids, index.uses, *index[1:], *sizes))
    launch(_remove_kernel, index.num_sets.shape, parts, starts, order, ids.contiguous(), rows, num_warps=1)
    return rows


def dynamic_find_reference_(
    indexes: Sequence[DynamicIndex], values: Tensor, bounds: Tensor, tables: Sequence[int],
    steps: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Find a batch's ids; with `steps`, note that they are used in these, of each table, once an occurrence.

    Args:
        values: int64 `[N]`.
        bounds: `[K + 1]`: the values of key `k` are `bounds[k] … bounds[k + 1] - 1`.
        tables: for each key, which of the indexes it looks up, or -1.

    Returns:
        int64 `[N]`: rows, -1 of unknown ids, and values of no dynamic table as they are. With `steps`, int32 `[N]` for
        `undo_use`: of one occurrence of each id the step in which it was used before, of the others that one or
        its table's; and int32 `[N]`: keys, see `PendingInsert`.
    """
    rows, ends = values.clone(), bounds.tolist()
    before, keys = torch.zeros_like(values, dtype=torch.int32), torch.full_like(values, NO_KEY, dtype=torch.int32)
    known = [IndexRows(index).by_id for index in indexes]
    for begin, end, table in zip(ends, ends[1:], tables, strict=False):
        for position in range(begin, end) if table >= 0 else ():
            index, row = indexes[table], known[table].get(int(values[position]), -1)
            rows[position] = row
            if row < 0:
                keys[position] = table
            elif steps:
                before[position], index.used[row] = index.used[row], steps[table]
                index.counts[row] = min(MAX_USES, int(index.counts[row]) + 1)
    return rows, before, keys


def dynamic_begin_insert_reference(indexes: Sequence[DynamicIndex], values: Tensor, keys: Tensor) -> PendingInsert:
    """The distinct ones of ids int64 `[N]` whose keys int32 `[N]` are not `NO_KEY`; there is nothing behind them."""
    return begin_insert_by_torch(values, keys)


def begin_insert_by_torch(values: Tensor, keys: Tensor) -> PendingInsert:
    """`dynamic_begin_insert` by PyTorch, whose sizes the host waits for."""
    order = nonzero(keys != NO_KEY)
    ids, keys = values[order], keys[order]
    ascend = (keys[1:] > keys[:-1]) | ((keys[1:] == keys[:-1]) & (ids[1:] >= ids[:-1]))
    if not ascend.all():  # those of a checkpoint do
        by_id = ids.sort(stable=True).indices
        keys, by_key = keys[by_id].sort(stable=True)
        order, ids = order[by_id[by_key]], ids[by_id[by_key]]
    heads = torch.ones_like(keys, dtype=torch.bool)
    heads[1:] = (ids[1:] != ids[:-1]) | (keys[1:] != keys[:-1])
    firsts, numbers = nonzero(heads), heads.cumsum(0, dtype=torch.int32)
    begins = torch.cat([firsts, firsts.new_tensor([ids.numel()])])
    return PendingInsert(order, keys, numbers, ids[firsts], begins, keys[firsts], torch.ones_like(heads[firsts]))


def dynamic_room_reference(
    indexes: Sequence[DynamicIndex], new: PendingInsert, rules: Sequence[Rule], counts: Tensor
) -> Tensor:
    """Count what the new ids of a batch that are admitted need; `dynamic_commit_insert_` takes the result.

    `counts`, int64 `[T, 5]` of zeros: for each table the positions of new ids, the distinct ones, those of these that
    need a row, those for which there is none, and the rows that are evicted for the others.
    """
    for table, (index, (_, last, _)) in enumerate(zip(indexes, rules, strict=True)):
        of_table, content = new.tables == table, IndexRows(index)
        wanted = new.ids[of_table & new.admitted].tolist()
        missing, evicted = content.missing(wanted, last), content.missing(wanted, -(2**63))
        positions, distinct = int(new.begins.diff()[of_table].sum()), int(of_table.sum())
        counts[table] = torch.tensor([positions, distinct, len(wanted), missing, evicted])
    return new.begins


def dynamic_commit_insert_reference_(
    indexes: Sequence[DynamicIndex], new: PendingInsert, starts: Tensor, rules: Sequence[Rule], batch_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Give rows to new ids that are admitted, for which there is room.

    Args:
        starts: of `dynamic_room`.
        batch_rows: int64 `[N]`, where the new rows are written, too, at all positions of these ids.

    Returns:
        int64 `[U]`: rows, -1 of ids that are not admitted; and `[U, 2]`: the id and the row that was evicted for each,
        the latter -1 without one.
    """
    rows, evicted = torch.full_like(new.ids, -1), new.ids.new_full((new.ids.numel(), 2), -1)
    pairs = zip(new.ids.tolist(), new.begins.diff().tolist(), new.tables.tolist(), strict=True)
    contents = [*map(IndexRows, indexes)]
    for number, (id, count, table) in enumerate(pairs):
        if new.admitted[number]:
            for pair in contents[table].insert(id, count, *rules[table]):
                evicted[number] = torch.tensor(pair)
            rows[number] = contents[table].by_id[id]
    for index, content in zip(indexes, contents, strict=True):
        content.store(index)
    batch_rows.index_copy_(0, new.order, rows[new.numbers - 1])
    return rows, evicted


def dynamic_remove_reference_(index: DynamicIndex, ids: Tensor) -> Tensor:
    """Remove distinct ids int64 `[N]`. Rows int64 `[N]` that they had, -1 of those that are unknown."""
    rows = IndexRows(index)
    removed = [rows.remove(id) if id in rows.by_id else -1 for id in ids.tolist()]
    rows.store(index)
    return torch.tensor(removed, dtype=torch.int64, device=ids.device)
