"""`tritonemb::row_cache_*` and `move_rows_`: device cache of host- or disk-resident rows, and its transfers.

See `kernels/row_cache.py`. All ops raise TypeError or ValueError for other dtypes, shapes, strides and devices than
documented, or an unknown policy.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonemb.layout import POLICIES, SLOT_ALIGNMENT, TABLE_SIZE, WAYS, DirectoryTensors
from tritonemb.ops.registry import SHARED_ARGUMENTS, check_tensor, define, kernel

Tensors = Sequence[Tensor]


def row_cache_look_up_(directory: DirectoryTensors, rows: Tensor, now: Tensor, policy: str) -> Tensor:
    """Look up the slots of a batch's distinct rows; pin each cached row once, and record its use.

    Args:
        directory: `tags`, `used` and `pins`, int64, int64 and int32 `[S]`, of all slots; `used` and `pins` change in
            place. `first_slots` int64 `[T]`: a table's slots, `num_sets · WAYS` or more (more are ignored), begin at a
            multiple of `SLOT_ALIGNMENT`. `tables` int64 `[T, 8]`, `Layout.tables`; `num_sets` int64 `[T]`, 0 for a
            table without cache. Slots and sets are not checked on a GPU.
        rows: int64 `[N]`, linear rows, ascending, distinct for cached tables.
        now: int64 `[]`, time of use for policy "lru"; it should ascend.
        policy: "lru" or "lfu".

    Returns int64 `[N]`: the slot of the row in its table; -1 if it is not cached; the row if the table has no cache.
    """
    _check(directory, rows, now, policy)
    return _look_up(directory, rows, now, policy)


def row_cache_allocate_(directory: DirectoryTensors, rows: Tensor, slots: Tensor, now: Tensor, policy: str) -> Tensor:
    """Allocate and pin a slot for each row that has none, in ascending order within a set.

    A row gets the first empty way of its set, else that of the unpinned row with the least (use, way), which is
    evicted. If all rows of the set are pinned, it gets no slot. New slots are pinned, so none is allocated twice.

    Arguments are those of `row_cache_look_up_`; `tags` change, too, and new slots are written to `slots`, int64 `[N]`,
    its result. Returns int64 `[N]`: the evicted row, relative to the first of its table; -1 if none was evicted.
    """
    _check(directory, rows, now, policy)
    _check_tensor("slots", slots, torch.int64, tuple(rows.shape), rows.device)
    return _allocate(directory, rows, slots, now, policy)


def row_cache_translate(slots: Tensor, starts: Tensor, order: Tensor, num_groups: Tensor) -> Tensor:
    """Translate the ids of a batch to slots: each position gets the slot of its group.

    `slots`, int64 `[N]`, has one per group; `starts`, int32 `[N + 1]`, `order`, int32 `[N]`, and `num_groups`, int64
    `[]`, are those of `RowGroups` of a batch in which each key looks up one table (`Layout.multiplicity` 1), so that a
    position has at most one group. Returns int64 `[N]`; -1 for a position without group, such as an id out of range.
    """
    num_entries, device = order.shape[0] if order.dim() else 0, slots.device
    _check_tensor("slots", slots, torch.int64, (num_entries,), device)
    _check_tensor("starts", starts, torch.int32, (num_entries + 1,), device)
    _check_tensor("order", order, torch.int32, (num_entries,), device)
    _check_tensor("num_groups", num_groups, torch.int64, (), device)
    return _translate(slots, starts, order, num_groups)


def move_rows_(
    destinations: Tensors, sources: Tensors, to_rows: Tensor, from_rows: Tensor, starts: Any = None, tables: Any = ()
) -> None:
    """Copy `destination[to_rows[i]] = source[from_rows[i]]` for each pair of tensors, bit for bit.

    Args:
        destinations, sources: pairs of tensors of one dtype, of 1, 2, 4 or 8 bytes, and one row width: `[rows]` or
            `[rows, width]`. Rows are contiguous, with any stride between them. A tensor may be a destination and a
            source, but a row may not. Tensors are on the device of the indices or, if that is a GPU, in pinned host
            memory, which must not be freed or changed before the GPU has completed the call. A row out of range is a
            ValueError on the CPU; on a GPU such moves are skipped, as that cannot be reported without synchronization.
        to_rows, from_rows: int64 `[n]` on one device. Moves with a negative index are skipped; other `to_rows` of a
            table are distinct.
        starts: int64 `[T + 1]` on that device, ascending from 0 to `n`, which a GPU does not check: the moves of table
            `t` are `starts[t]` to `starts[t + 1] - 1`. None for one table.
        tables: table of each pair, whose moves copy its rows, integers; 0 by default.
    """
    # Check the moves.
    device, num_tables = to_rows.device, 1 if starts is None else starts.numel() - 1
    _check_tensor("to_rows", to_rows, torch.int64, (to_rows.numel(),), device)
    _check_tensor("from_rows", from_rows, torch.int64, (to_rows.numel(),), device)
    if starts is not None:
        _check_tensor("starts", starts, torch.int64, (max(num_tables, 1) + 1,), device)
    if not len(destinations) == len(sources) == len(tables or sources) or not {*tables} <= {*range(num_tables)}:
        actual = f"{len(destinations)} and {len(sources)} of tables {list(tables)}"
        raise ValueError(f"destinations and sources must be pairs of {num_tables} tables, got {actual}")
    # Check the pairs.
    to, origin = ([(t.dtype, t.device, t.shape, t.stride()) for t in side] for side in (destinations, sources))
    for pair, ((to_dtype, _, to_shape, to_strides), (dtype, _, shape, _)) in enumerate(zip(to, origin, strict=True)):
        if to_dtype != dtype or dtype.itemsize > 8:
            raise TypeError(f"pair {pair} must have one dtype of 1, 2, 4 or 8 bytes, got {to_dtype} and {dtype}")
        if len(shape) not in (1, 2) or to_shape[1:] != shape[1:]:
            shapes = f"{tuple(to_shape)} and {tuple(shape)}"
            raise ValueError(f"pair {pair} must be 1-D, or 2-D with rows of one width, got shapes {shapes}")
        if to_shape[0] > 1 and to_strides[0] < math.prod(shape[1:]):
            raise ValueError(f"destinations[{pair}] has overlapping rows: strides {to_strides}")
    for name, tensors, facts in (("destinations", destinations, to), ("sources", sources, origin)):
        for pair, (_, place, shape, strides) in enumerate(facts):
            if len(shape) == 2 and shape[1] > 1 and strides[1] != 1:
                raise ValueError(f"{name}[{pair}] must have contiguous rows, got strides {strides}")
            if place != device and not (device.type == "cuda" and place.type == "cpu" and tensors[pair].is_pinned()):
                where = f"on {device} like the rows, or in pinned host memory"
                raise ValueError(f"{name}[{pair}] must be {where}, got {place}")
    _move(destinations, sources, to_rows, from_rows, starts, tables)


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
        check_tensor(name, tensor, (dtype,), shape, device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def _check(directory: DirectoryTensors, rows: Tensor, now: Tensor, policy: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; expected one of {list(POLICIES)}")
    size, num_tables = (directory.tags.numel(),), (directory.first_slots.numel(),)
    if num_tables == (0,):
        raise ValueError("a directory must have at least one table")
    shapes = {"tags": size, "used": size, "pins": size, "tables": (*num_tables, TABLE_SIZE)}
    for name, tensor in zip(directory._fields, directory, strict=True):
        dtype = torch.int32 if name == "pins" else torch.int64
        _check_tensor(name, tensor, dtype, shapes.get(name, num_tables), rows.device)
    _check_tensor("rows", rows, torch.int64, (rows.numel(),), rows.device)
    _check_tensor("now", now, torch.int64, (), rows.device)


def _run(op: str, directory: DirectoryTensors, *args: Any) -> Any:
    """Raise if a table is too small for its sets; not on a GPU, which would need a synchronization. Run the kernel."""
    num_sets, first_slots = directory.num_sets, directory.first_slots
    if num_sets.device.type == "cpu":
        sizes = first_slots.diff(append=first_slots.new_tensor([directory.tags.numel()]))
        is_bad = (num_sets < 0) | (num_sets * WAYS > sizes) | (first_slots % SLOT_ALIGNMENT != 0)
        for (table,) in is_bad.nonzero()[:1].tolist():
            sets, size, first = (int(values[table]) for values in (num_sets, sizes, first_slots))
            problem = f"num_sets[{table}] is {sets}, but the table has {size} slots from {first} on"
            raise ValueError(f"{problem}; it needs {WAYS} per set, from a multiple of {SLOT_ALIGNMENT} on")
    return kernel(op, num_sets.device)(directory, *args)


def _run_moves(destinations: Any, sources: Any, to_rows: Tensor, from_rows: Tensor, starts: Any, tables: Any) -> None:
    """Raise if moves are not in the order of tables; not on a GPU, as above. Run the kernel."""
    bounds = [0, to_rows.numel()] if starts is None or starts.device.type != "cpu" else starts.tolist()
    if bounds != sorted(bounds) or (bounds[0], bounds[-1]) != (0, to_rows.numel()):
        raise ValueError(f"starts must ascend from 0 to the number of moves, {to_rows.numel()}, got {bounds}")
    kernel("move_rows_", to_rows.device)(destinations, sources, to_rows, from_rows, starts, tables)


SHARED_ARGUMENTS["*DirectoryTensors"] = (
    DirectoryTensors,
    "Tensor(a!) tags, Tensor(b!) used, Tensor(c!) pins, Tensor first_slots, Tensor tables, Tensor num_sets",
)
_look_up = define(
    "row_cache_look_up_",
    "(*DirectoryTensors, Tensor rows, Tensor now, str policy) -> Tensor",
    lambda _, rows, *__: torch.empty_like(rows),
    functools.partial(_run, "row_cache_look_up_"),
)
_allocate = define(
    "row_cache_allocate_",
    "(*DirectoryTensors, Tensor rows, Tensor(d!) slots, Tensor now, str policy) -> Tensor",
    lambda _, rows, *__: torch.empty_like(rows),
    functools.partial(_run, "row_cache_allocate_"),
)
_translate = define(
    "row_cache_translate",
    "(Tensor slots, Tensor starts, Tensor order, Tensor num_groups) -> Tensor",
    lambda slots, _s, order, _n: slots.new_empty(order.shape[0]),
)
_move = define(
    "move_rows_",
    "(Tensor(a!)[] destinations, Tensor[] sources, Tensor to_rows, Tensor from_rows, Tensor? starts, int[] tables) "
    "-> ()",
    lambda *_: None,
    _run_moves,
)
