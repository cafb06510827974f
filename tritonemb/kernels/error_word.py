"""What a kernel on a GPU found wrong, told to the host without making it wait.

The first finding takes a lock on the device and writes one record into pinned host memory; later ones are dropped until
it has been raised. The host looks at that memory, which costs nothing, at every lookup and update: a finding is raised
at the next of them, or by `check_errors`, which waits for the device first.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb import errors
from tritonemb.kernels.triton_utils import jit, on_device, tl
from tritonemb.layout import Layout, names_in

_ID, _OFFSETS, _GRADIENT, _FIRST, _LAST = range(1, 6)
BAD_ID, BAD_OFFSETS, BAD_GRADIENT, BAD_FIRST_OFFSET, BAD_LAST_OFFSET = (
    tl.constexpr(kind) for kind in (_ID, _OFFSETS, _GRADIENT, _FIRST, _LAST)
)
FIELDS = 8  # kind, names, position or row, value, table or last offset, key, sample, valid rows


class ErrorWord(NamedTuple):
    """A device's lock, int32 `[1]`, and its record, int64 `[8]` in pinned host memory."""

    lock: Tensor
    record: Tensor


@jit
def report(lock, record, kind, names, where, value, table, key, sample, rows):
    """Write a finding, if it is the first. `names` points to the number of the layout's names."""
    if tl.atomic_cas(lock, 0, 1) == 0:
        tl.store(record + 1, tl.load(names))
        tl.store(record + 2, where)
        tl.store(record + 3, value)
        tl.store(record + 4, table)
        tl.store(record + 5, key)
        tl.store(record + 6, sample)
        tl.store(record + 7, rows)
        tl.store(record, kind)


_names: list[tuple[str, str]] = []


@functools.cache
def _number(table_names: str, feature_names: str) -> int:
    _names.append((table_names, feature_names))
    return len(_names) - 1


def names_of(layout: Layout, device: torch.device) -> Tensor:
    """int64 `[1]` on `device`: by which the host finds the names of this layout's tables and features again."""
    return on_device([_number(layout.table_names, layout.feature_names)], device)


@functools.cache
def error_word(device: torch.device) -> ErrorWord:
    """The one error word of a device."""
    with torch.inference_mode(False):  # it outlives whatever mode it is first asked for in
        lock = torch.zeros(1, dtype=torch.int32, device=device)
        return ErrorWord(lock, torch.zeros(FIELDS, dtype=torch.int64, pin_memory=device.type == "cuda"))


def poll(device: torch.device) -> None:
    """Raise what kernels have reported so far, without waiting for those that still run."""
    word = error_word(device)
    if int(word.record[0]) == 0:
        return
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _, names, where, value, table, key, sample, rows = word.record.tolist()
    kind = int(word.record[0])
    word.record.zero_()
    word.lock.zero_()
    table_names, feature_names = map(names_in, _names[names])
    if kind == _ID:
        raise errors.id_out_of_range(table_names[table], feature_names[key], sample, where, value, rows)
    if kind == _FIRST:
        raise errors.offsets_do_not_start_at_zero(where)
    if kind == _LAST:
        raise errors.offsets_do_not_end_with_values(value, rows)
    if kind == _OFFSETS:
        raise errors.offsets_do_not_ascend(feature_names[key], sample, where, value, rows)
    raise errors.gradient_not_finite(table_names[table], where)
