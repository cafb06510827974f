"""CPU twin of `kernels/bag_gradient.py`: one thread owns a row and writes the sum of its gradients, in order."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tritonemb.kernels.cpu import pool
from tritonemb.kernels.cpu.arrays import as_float32, as_int64
from tritonemb.kernels.cpu.jagged import bags_of, one_value_a_bag
from tritonemb.kernels.cpu.jit import called, compiled
from tritonemb.kernels.cpu.memory import prefetch
from tritonemb.kernels.cpu.parallel import run_tasks
from tritonemb.kernels.cpu.simd import sum_float32_rows
from tritonemb.kernels.layout import MEAN, POOLING, Layout

AHEAD = 12  # positions between asking for a gradient and adding it
TASKS_PER_THREAD = 4
FEW_ELEMENTS = 16_384  # that one thread adds before another has begun


@called
def _write_sums(
    task, num_tasks, num_groups, rows, starts, order, compact, bags, mean, offsets, sample_weights, grad, dim, out
):
    """Groups of task `task`, a range with about as many positions as the others'; `grad` and `out` are addresses."""
    first = np.searchsorted(starts[: num_groups + 1], starts[num_groups] * task // num_tasks)
    last = np.searchsorted(starts[: num_groups + 1], starts[num_groups] * (task + 1) // num_tasks)
    begin, end = np.int64(starts[first]), np.int64(starts[last])
    scaled = mean or sample_weights.size > 0
    gradients = np.empty(end - begin, dtype=np.int64)
    scales = np.empty(end - begin if scaled else 0, dtype=np.float32)
    for entry in range(end - begin):
        position = np.int64(order[begin + entry])
        source = np.int64(bags[position]) if bags.size else position
        gradients[entry] = grad + source * dim * 4
        if scaled:
            scale = np.float32(1) / np.float32(offsets[source + 1] - offsets[source]) if mean else np.float32(1)
            scales[entry] = scale * sample_weights[position] if sample_weights.size else scale
    for group in range(first, last):
        start, stop = np.int64(starts[group] - begin), np.int64(starts[group + 1] - begin)
        for entry in range(start + AHEAD, min(stop + AHEAD, end - begin)):
            prefetch(gradients[entry], 4 * dim)
        factors = scales.ctypes.data + start * 4 if scaled else 0
        place = group if compact else rows[group]
        sum_float32_rows(out + place * dim * 4, gradients.ctypes.data + start * 8, factors, stop - start, dim)


@compiled
def _write_all(team, num_threads, num_tasks, num_groups, offsets, pooled, rows, starts, order, *args):
    bags = np.empty(0, dtype=np.int32)
    if pooled and not one_value_a_bag(offsets):
        bags = bags_of(team, num_threads, num_tasks, offsets)
    compact, mean, sample_weights, grad, dim, out = args
    run_tasks(
        team, num_threads, num_tasks, _write_sums,
        (
            num_tasks, num_groups, rows, starts, order, compact, bags, mean and bags.size > 0, offsets, sample_weights,
            grad, dim, out,
        ),
    )  # fmt: skip


def bag_gradient_(
    out: Tensor,
    grad: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    groups: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: Layout,
    compact: bool,
) -> None:
    """See `kernels/bag_gradient.py`; `out` is float32."""
    rows, starts, order, num_groups = (group.numpy() for group in groups)
    if out.numel() == 0 or num_groups == 0:
        return
    gradient, dim = as_float32(grad), out.shape[1]
    alone = int(starts[num_groups]) * dim < FEW_ELEMENTS
    _write_all(
        0 if alone else pool.team(), 1 if alone else pool.num_threads(),
        1 if alone else TASKS_PER_THREAD * pool.num_threads(), int(num_groups), as_int64(offsets), layout.pooled, rows,
        starts, order, compact, layout.pooled and bool(layout.lookups[0, POOLING] == MEAN), as_float32(sample_weights),
        gradient.ctypes.data, dim, out.data_ptr(),
    )  # fmt: skip
