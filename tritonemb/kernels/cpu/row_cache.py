"""CPU twin of `kernels/row_cache.py`: look-ups parallel over rows, allocation over sets, copies over moves.

Each set belongs to one task, which serves its misses in ascending order: results do not depend on the number of tasks.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.cpu.jit import FEW_ELEMENTS, called, compiled, inlined, parallel, run_tasks
from tritonemb.kernels.cpu.simd import copy_bytes, int32_row, int64_row, mix, prefetch
from tritonemb.kernels.row_cache import Tensors, pair_fields
from tritonemb.layout import FIRST_ROW, NO_ROW, NUM_ROWS, WAYS, DirectoryTensors

CHUNK = 32  # rows whose sets are prefetched together
FEW_ROWS = 4_096  # fewer take less time on one thread
TAGS, USED, PINS = range(3)  # rows of `directory`, addresses
PREFETCH_DISTANCE = 8  # moves between the prefetch of a row and its copy
PREFETCHED_BYTES = 512  # per row; the hardware prefetcher fetches what follows
TASKS_PER_THREAD = 4  # parts of all moves, as rows of tables differ in length
TO, TO_PITCH, TO_ROWS, FROM, FROM_PITCH, FROM_ROWS, ROW_BYTES, TABLE = range(8)  # columns of `pairs`


@inlined
def _set_of(row, num_sets):
    return np.int64(np.uint64(mix(row)) % np.uint64(num_sets))


@inlined
def _table_of(linear, table, tables):
    while table + 1 < tables.shape[0] and linear >= tables[table, FIRST_ROW] + tables[table, NUM_ROWS]:
        table += 1
    return table


@parallel
def _look_up(task, num_tasks, caches, rows, use, slots):
    """Look up the task's rows, in chunks: each loop over a chunk prefetches what the next one reads."""
    (directory, tables, num_sets), (now, lfu) = caches, use
    begin, end = rows.size * task // num_tasks, rows.size * (task + 1) // num_tasks
    table_of = np.empty(CHUNK, dtype=np.int64)
    table = 0
    for start in range(begin, end, CHUNK):
        stop = min(start + CHUNK, end)
        # Sets; prefetch tags.
        for group in range(start, stop):
            table = _table_of(rows[group], table, tables)
            table_of[group - start] = table
            slots[group] = rows[group] - tables[table, FIRST_ROW]
            if num_sets[table] > 0:
                slots[group] = _set_of(slots[group], num_sets[table]) * WAYS
                prefetch(directory[TAGS, table] + slots[group] * 8, WAYS * 8)
        # Slots of hits; prefetch uses and pins.
        for group in range(start, stop):
            table = table_of[group - start]
            if num_sets[table] == 0:
                continue
            first, hit_slot = slots[group], -1
            row, tags = rows[group] - tables[table, FIRST_ROW], int64_row(directory[TAGS, table] + first * 8, WAYS)
            for way in range(WAYS):
                hit_slot = first + way if tags[way] == row else hit_slot
            slots[group] = hit_slot
            if hit_slot >= 0:
                prefetch(directory[USED, table] + hit_slot * 8, 8)
                prefetch(directory[PINS, table] + hit_slot * 4, 4)
        # Update uses and pins.
        for group in range(start, stop):
            table, slot = table_of[group - start], slots[group]
            if num_sets[table] == 0 or slot < 0:
                continue
            used = int64_row(directory[USED, table] + slot * 8, 1)
            used[0] = used[0] + 1 if lfu else now
            int32_row(directory[PINS, table] + slot * 4, 1)[0] += 1


@called
def _find_misses(task, num_tasks, caches, first_sets, rows, slots, misses):
    """Write for each miss its set, numbered over all tables, and the task that serves it; task -1 for other rows."""
    (_, tables, num_sets), (sets, task_of), table = caches, misses, 0
    for group in range(rows.size * task // num_tasks, rows.size * (task + 1) // num_tasks):
        task_of[group] = -1
        if slots[group] != -1:
            continue
        table = _table_of(rows[group], table, tables)
        if num_sets[table] > 0:
            sets[group] = first_sets[table] + _set_of(rows[group] - tables[table, FIRST_ROW], num_sets[table])
            task_of[group] = sets[group] % num_tasks


@inlined
def _choose_way(tags, used, pins):
    """Return the first empty way, else the first unpinned way with the least use, else -1."""
    for way in range(WAYS):
        if tags[way] == NO_ROW:
            return way
    victim = -1
    for way in range(WAYS):
        if pins[way] == 0 and (victim < 0 or used[way] < used[victim]):
            victim = way
    return victim


@called
def _allocate(task, caches, first_sets, rows, all_misses, use, results):
    """Serve the task's misses, in chunks: prefetch their sets, then assign slots."""
    (directory, tables, _), (sets, task_of), (now, lfu), (slots, evicted) = caches, all_misses, use, results
    misses, table_of = np.empty(CHUNK, dtype=np.int64), np.empty(CHUNK, dtype=np.int64)
    table = num_misses = 0
    for group in range(task_of.size):
        # Collect a chunk of misses; prefetch their sets.
        if task_of[group] == task:
            table = _table_of(rows[group], table, tables)
            misses[num_misses], table_of[num_misses] = group, table
            num_misses += 1
            first = (sets[group] - first_sets[table]) * WAYS
            prefetch(directory[TAGS, table] + first * 8, WAYS * 8)
            prefetch(directory[USED, table] + first * 8, WAYS * 8)
            prefetch(directory[PINS, table] + first * 4, WAYS * 4)
        if num_misses < CHUNK and group < task_of.size - 1:
            continue
        # Choose a way for each, and write it.
        for i in range(num_misses):
            miss, table = misses[i], table_of[i]
            first = (sets[miss] - first_sets[table]) * WAYS
            tags = int64_row(directory[TAGS, table] + first * 8, WAYS)
            used = int64_row(directory[USED, table] + first * 8, WAYS)
            pins = int32_row(directory[PINS, table] + first * 4, WAYS)
            way = _choose_way(tags, used, pins)
            if way >= 0:
                slots[miss], evicted[miss] = first + way, tags[way]
                tags[way] = rows[miss] - tables[table, FIRST_ROW]
                used[way] = 1 if lfu else now
                pins[way] = 1
        num_misses = 0


@compiled
def _allocate_all(num_threads, num_tasks, caches, rows, use, slots, evicted):
    """Number the sets of all tables, assign misses to tasks, serve them."""
    num_sets = caches[2]
    first_sets = np.zeros(num_sets.size + 1, dtype=np.int64)
    for table in range(num_sets.size):
        first_sets[table + 1] = first_sets[table] + num_sets[table]
    misses = np.empty(rows.size, dtype=np.int64), np.empty(rows.size, dtype=np.int32)  # sets, and numbers of tasks
    run_tasks(num_threads, num_tasks, _find_misses, (num_tasks, caches, first_sets, rows, slots, misses))
    run_tasks(num_threads, num_tasks, _allocate, (caches, first_sets, rows, misses, use, (slots, evicted)))


@parallel
def _translate(task, num_tasks, slots, starts, order, num_groups, values):
    """Write the slots of the task's entries to their positions."""
    total = np.int64(starts[num_groups])
    begin, end = total * task // num_tasks, total * (task + 1) // num_tasks
    group = np.searchsorted(starts[: num_groups + 1], begin, side="right") - 1
    for entry in range(begin, end):
        while starts[group + 1] <= entry:
            group += 1
        values[order[entry]] = slots[group]


def _arrays(directory: DirectoryTensors, rows: Tensor, now: Tensor, policy: str) -> tuple[Any, np.ndarray, Any]:
    """Return `caches`, `rows` and `use` of kernels."""
    *parts, first_slots, tables, num_sets = directory
    starts = first_slots.numpy()
    addresses = np.stack([part.data_ptr() + starts * part.element_size() for part in parts])
    return (addresses, tables.numpy(), num_sets.numpy()), rows.numpy(), (int(now), policy == "lfu")


def tasks_for(num_rows: int) -> int:
    return 1 if num_rows < FEW_ROWS else torch.get_num_threads()


def row_cache_look_up_(directory: DirectoryTensors, rows: Tensor, now: Tensor, policy: str) -> Tensor:
    slots, num_tasks = torch.empty_like(rows), tasks_for(rows.numel())
    _look_up(num_tasks, num_tasks, num_tasks, *_arrays(directory, rows, now, policy), slots.numpy())
    return slots


def row_cache_allocate_(directory: DirectoryTensors, rows: Tensor, slots: Tensor, now: Tensor, policy: str) -> Tensor:
    evicted, num_tasks = torch.full_like(rows, -1), tasks_for(rows.numel())
    arrays = _arrays(directory, rows, now, policy)
    _allocate_all(num_tasks, num_tasks, *arrays, slots.numpy(), evicted.numpy())
    return evicted


def row_cache_translate(slots: Tensor, starts: Tensor, order: Tensor, num_groups: Tensor) -> Tensor:
    values, num_tasks = slots.new_full((order.numel(),), -1, dtype=torch.int64), tasks_for(order.numel())
    arrays = slots.numpy(), starts.numpy(), order.numpy(), int(num_groups), values.numpy()
    _translate(num_tasks, num_tasks, num_tasks, *arrays)
    return values


@inlined
def _partition_of(id, num_partitions):
    return np.int64(((np.uint64(mix(id)) >> np.uint64(32)) * np.uint64(num_partitions)) >> np.uint64(32))


@compiled
def _find_servers(ids, sizes, tables, first_partitions, keys):
    """Write `server · T + table` of each id, `S · T` if no server has it."""
    position, num_servers = 0, first_partitions.shape[1] - 1
    for table in range(sizes.size):
        for id in ids[position : position + sizes[table]]:
            server, partition = num_servers, _partition_of(id, tables[table, 0])
            while server >= 0 and partition < first_partitions[table, server]:
                server -= 1
            is_valid = 0 <= server < num_servers and tables[table, 1] <= id <= tables[table, 2]
            keys[position] = server * sizes.size + table if is_valid else num_servers * sizes.size
            position += 1


def route_ids(ids: Tensor, sizes: Any, tables: Tensor, first_partitions: Tensor) -> tuple[Tensor, Tensor]:
    """Route ids, `sizes` per table, to servers: return positions by server, table and position, and counts `[S, T]`.

    `tables`, `[T, 3]`: partitions, first and last valid id; `first_partitions`, `[T, S + 1]`: of servers, and the end.
    """
    shape, arrays = (first_partitions.shape[1] - 1, len(tables)), (tables.numpy(), first_partitions.numpy())
    num_keys = shape[0] * shape[1]
    keys = np.empty(ids.numel(), np.uint16 if num_keys < 1 << 16 else np.int64)  # 16 bits: a radix sort
    _find_servers(ids.contiguous().numpy(), np.array(sizes, dtype=np.int64), *arrays, keys)
    counts = torch.from_numpy(np.bincount(keys, minlength=num_keys + 1)[:num_keys]).reshape(shape)
    return torch.from_numpy(np.argsort(keys, kind="stable"))[: int(counts.sum())], counts


@compiled
def _owns_all(ids, sizes, tables, first_partitions, server):
    position = 0
    for table in range(sizes.size):
        first, end = first_partitions[table, server], first_partitions[table, server + 1]
        for id in ids[position : position + sizes[table]]:
            if not (first <= _partition_of(id, tables[table, 0]) < end and tables[table, 1] <= id <= tables[table, 2]):
                return False
        position += sizes[table]
    return True


def owns_ids(ids: Tensor, sizes: Any, tables: Tensor, first_partitions: Tensor, server: int) -> bool:
    """Return whether `route_ids` routes all ids to a server."""
    args = np.array(sizes, dtype=np.int64), tables.numpy(), first_partitions.numpy()
    return bool(_owns_all(ids.contiguous().numpy(), *args, server))


@called
def _move(task, num_tasks, pairs, starts, to_rows, from_rows):
    """Copy the task's moves, pair by pair, and prefetch rows PREFETCH_DISTANCE moves ahead."""
    first, last = to_rows.size * task // num_tasks, to_rows.size * (task + 1) // num_tasks
    for p in range(pairs.shape[0]):
        pair = pairs[p]
        target, target_pitch, source, source_pitch = pair[TO], pair[TO_PITCH], pair[FROM], pair[FROM_PITCH]
        size, begin, end = pair[ROW_BYTES], max(first, starts[pair[TABLE]]), min(last, starts[pair[TABLE] + 1])
        prefetched = min(size, PREFETCHED_BYTES)
        for move in range(begin - PREFETCH_DISTANCE, end):
            next_move = move + PREFETCH_DISTANCE
            if next_move < end and to_rows[next_move] >= 0 and from_rows[next_move] >= 0:
                prefetch(source + from_rows[next_move] * source_pitch, prefetched)
                prefetch(target + to_rows[next_move] * target_pitch, prefetched)
            if move >= begin and to_rows[move] >= 0 and from_rows[move] >= 0:
                copy_bytes(target + to_rows[move] * target_pitch, source + from_rows[move] * source_pitch, size)


@compiled
def _move_all(num_threads, pairs, starts, to_rows, from_rows):
    """Copy all rows and return -1, -1; or none, and return the first pair and move with a row out of range."""
    num_bytes = 0
    for p in range(pairs.shape[0]):
        for move in range(starts[pairs[p, TABLE]], starts[pairs[p, TABLE] + 1]):
            to_row, from_row = to_rows[move], from_rows[move]
            if to_row >= 0 and from_row >= 0 and (to_row >= pairs[p, TO_ROWS] or from_row >= pairs[p, FROM_ROWS]):
                return p, move
            num_bytes += pairs[p, ROW_BYTES]
    num_tasks = min(to_rows.size, TASKS_PER_THREAD * num_threads) if num_bytes >= 4 * FEW_ELEMENTS else 1
    run_tasks(num_threads, num_tasks, _move, (num_tasks, pairs, starts, to_rows, from_rows))
    return -1, -1


def move_rows_(
    destinations: Tensors, sources: Tensors, to_rows: Tensor, from_rows: Tensor, starts: Any = None, tables: Any = ()
) -> None:
    """See `kernels/row_cache.py`. ValueError for a row out of range, before any copy."""
    pairs = np.array(pair_fields(destinations, sources, tables), dtype=np.int64).reshape(-1, TABLE + 1)
    bounds = np.array([0, to_rows.numel()]) if starts is None else starts.numpy()
    pair, move = _move_all(torch.get_num_threads(), pairs, bounds, to_rows.numpy(), from_rows.numpy())
    if pair >= 0:
        raise ValueError(
            f"move {move} goes from row {int(from_rows[move])} to row {int(to_rows[move])}, but sources[{pair}] has "
            f"{len(sources[pair])} rows and destinations[{pair}] {len(destinations[pair])}; rows to skip are negative"
        )
