"""One step of the nine optimizers on one row: float32 arrays, updated in place. Formulas: `tritonemb/optimizers.py`."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tritonemb.kernels.cpu.jit import address_of, addressed, called, inlined, inlined_uncounted
from tritonemb.kernels.cpu.random import BLOCK_WORDS, fill_philox, narrow_row, narrow_row_stochastic, widen_row
from tritonemb.kernels.cpu.simd import DOT_LANES, emitted, float32_row, float64_row, load, uint16_row, uint32_row
from tritonemb.optimizers import DECAY_MODES, KINDS, OPTIMIZERS, Hyperparameters

SGD, ROW_WISE_ADAGRAD, ADAGRAD, ADAM, PARTIAL_ROW_WISE_ADAM, LAMB, PARTIAL_ROW_WISE_LAMB, LARS_SGD, FTRL = (
    KINDS[name] for name in OPTIMIZERS
)
ASSIGN, PLACE = KINDS["assign"], KINDS["place"]
(WEIGHT_DECAY, WEIGHT_DECAY_MODE, MAX_GRADIENT, MAX_NORM, STOCHASTIC_ROUNDING, NONFINITE, EPS, BETA1, BETA2, MOMENTUM,
 ETA, BETA, L1, L2, COW_CLIP, COW_CLIP_FLOOR) = range(len(Hyperparameters._fields))  # fmt: skip
NO_DECAY, L2_DECAY, DECOUPLED_DECAY, RATIO_DECAY = range(len(DECAY_MODES))
ONE, ZERO = np.float32(1), np.float32(0)
SQUARES = 256  # columns per block whose squares are added in registers
_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)

# Each level merges two vectors of 16 sums into one, by the cheapest shuffles: (lanes of left summands, distance to the
# right summands, distances of neighbouring sums in the result by level of the remaining tree).
_FOURS = [first + lane for first in (0, 4, 8, 12) for lane in (0, 2, 16, 18)]
_MERGES = (
    (_FOURS, 1, (1, 4, 8, 2)),
    (_FOURS, 1, (4, 8, 1, 2)),
    ([first + lane for first in (0, 16, 8, 24) for lane in range(4)], 4, (8, 1, 2, 4)),
)


def _squares(builder: Any, address: Any, size: int) -> Any:
    """Sum `size` squares pairwise, a power of 2 up to SQUARES: neighbours, then neighbouring sums."""
    if size > 8 * DOT_LANES:  # more vectors would not stay in registers
        halves = (builder.add(address, _LONG(start * 4)) for start in (0, size // 2))
        return builder.fadd(*(_squares(builder, half, size // 2) for half in halves))
    lanes = min(size, DOT_LANES)

    def add(left: Any, right: Any, *masks: Sequence[int]) -> Any:
        kind = ir.VectorType(_INT, lanes)
        return builder.fadd(*(builder.shuffle_vector(left, right, ir.Constant(kind, [*mask])) for mask in masks))

    loaded = [load(builder, builder.add(address, _LONG(start * 4)), _FLOAT, lanes) for start in range(0, size, lanes)]
    sums, strides = [builder.fmul(values, values) for values in loaded], (1, 2, 4, 8)[: lanes.bit_length() - 1]
    for lefts, step, next_strides in _MERGES[: len(sums).bit_length() - 1]:
        rights, strides = [lane + step for lane in lefts], next_strides
        sums = [add(*pair, lefts, rights) for pair in zip(sums[::2], sums[1::2], strict=True)]
    (total,) = sums
    for step in strides:
        total = add(total, total, range(lanes), [lane ^ step for lane in range(lanes)])
    return builder.extract_element(total, _INT(0))


@emitted(types.float32, types.int64, types.int64)
def _sum_few_squares(builder: Any, row: Any, size: Any) -> Any:
    """Sum up to SQUARES squares: blocks by the binary digits of `size`, wide to narrow, added from the last on."""
    total = cgutils.alloca_once_value(builder, _FLOAT(0.0))

    def has(bits: int) -> Any:
        return builder.if_then(builder.icmp_signed("!=", builder.and_(size, _LONG(bits)), _LONG(0)))

    def add(widths: Sequence[int]) -> None:
        for width in widths:
            with has(width):
                first = builder.mul(builder.and_(size, _LONG(-2 * width)), _LONG(4))
                squares = _squares(builder, builder.add(row, first), width)
                builder.store(builder.fadd(builder.load(total), squares), total)

    with has(DOT_LANES - 1):  # skip all narrow blocks at once
        add((1, 2, 4, 8))
    add((16, 32, 64, 128, SQUARES))
    return builder.load(total)


@emitted(types.int64)
def _allocate_sums(builder: Any) -> Any:
    """Allocate 64 float32 on the stack; return their address."""
    return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(_FLOAT, 64)), _LONG)


@called
def sum_of_squares(row, size):
    """Sum row[j]² of the float32 row at an address, in the order of `triton_utils.row_sum`."""
    if size <= SQUARES:
        return _sum_few_squares(row, size)
    num_blocks = size // SQUARES
    total = _sum_few_squares(row + 4 * SQUARES * num_blocks, size - SQUARES * num_blocks)
    sums = float32_row(_allocate_sums(), 64)  # by level: of 2^level blocks, until their neighbours are summed
    for block in range(num_blocks):
        block_sum, level = _sum_few_squares(row + 4 * SQUARES * block, SQUARES), 0
        while (block >> level) & 1:
            block_sum += sums[level]
            level += 1
        sums[level] = block_sum
    for level in range(64):
        if (num_blocks >> level) & 1:
            total += sums[level]
    return total


@inlined_uncounted
def _sum_of_squares(row):
    return sum_of_squares(row.ctypes.data, row.size)


@inlined_uncounted
def _mean_of_squares(row):
    return _sum_of_squares(row) / np.float32(row.size)


@inlined_uncounted
def _subtract(w, scale, g):
    for j in range(w.size):
        w[j] -= scale * g[j]


@inlined_uncounted
def _cow_clip(w, g, count, h):
    ratio, floor = np.float32(h[COW_CLIP]), np.float32(h[COW_CLIP_FLOOR])
    norm, per_count = np.sqrt(_sum_of_squares(g)), ratio * np.sqrt(_sum_of_squares(w))
    bound = np.float32(count) * (per_count if per_count > floor else floor)
    if norm > bound:
        scale = bound / norm
        for j in range(g.size):
            g[j] *= scale


@inlined
def power(base, exponent):
    """Raise to an integer power by squaring, as on a GPU."""
    result = 1.0
    while exponent > 0:
        if exponent % 2 == 1:
            result *= base
        base *= base
        exponent //= 2
    return result


@inlined_uncounted
def _adam_direction(m, v, row_wise, g, h, step):
    """Update the moments `m` and `v`; `g` becomes Adam's direction. `row_wise`: `v` is one value."""
    beta1, beta2, eps = np.float32(h[BETA1]), np.float32(h[BETA2]), np.float32(h[EPS])
    one_minus_beta1, one_minus_beta2 = np.float32(1.0 - h[BETA1]), np.float32(1.0 - h[BETA2])
    correction1, correction2 = np.float32(1.0 - power(h[BETA1], step)), np.float32(1.0 - power(h[BETA2], step))
    if row_wise:
        v[0] = beta2 * v[0] + one_minus_beta2 * _mean_of_squares(g)
        root = np.sqrt(v[0] / correction2) + eps
        for j in range(g.size):
            m[j] = beta1 * m[j] + one_minus_beta1 * g[j]
            g[j] = m[j] / correction1 / root
    else:
        for j in range(g.size):
            m[j] = beta1 * m[j] + one_minus_beta1 * g[j]
            v[j] = beta2 * v[j] + one_minus_beta2 * (g[j] * g[j])
            g[j] = m[j] / correction1 / (np.sqrt(v[j] / correction2) + eps)


@inlined_uncounted
def _lamb(w, direction, lr, decay):
    for j in range(w.size):
        direction[j] += decay * w[j]
    weight_norm, norm = np.sqrt(_sum_of_squares(w)), np.sqrt(_sum_of_squares(direction))
    ratio = weight_norm / norm if weight_norm > ZERO and norm > ZERO else ONE
    _subtract(w, lr * ratio, direction)


@inlined_uncounted
def _lars(w, buffer, g, lr, h, decay):
    momentum, eta = np.float32(h[MOMENTUM]), np.float32(h[ETA])
    weight_norm, norm = np.sqrt(_sum_of_squares(w)), np.sqrt(_sum_of_squares(g))
    divisor = norm + decay * weight_norm
    rate = lr * eta * weight_norm / divisor if divisor > ZERO else ZERO
    for j in range(w.size):
        buffer[j] = momentum * buffer[j] + rate * (g[j] + decay * w[j])
        w[j] -= buffer[j]


@inlined_uncounted
def _ftrl(w, linear, total, g, lr, h):
    beta, l1, l2 = np.float32(h[BETA]), np.float32(h[L1]), np.float32(h[L2])
    for j in range(w.size):
        next_total = total[j] + g[j] * g[j]
        root = np.sqrt(next_total)
        z = linear[j] + (g[j] - (root - np.sqrt(total[j])) / lr * w[j])
        total[j], linear[j] = next_total, z
        shrunk_z = z - np.float32(np.copysign(l1, z))
        w[j] = ZERO if abs(z) <= l1 else -shrunk_z / ((beta + root) / lr + l2)


# Arguments of a step: addresses of the row, its gradient and its states; dim, learning rate, step; address of the
# hyperparameters; the row's occurrences; address of scratch memory (a row in float32, and random words); dtype; the
# row's random stream: seed, counter, row.
_STEP_TYPES = *[types.int64] * 5, types.float32, *[types.int64] * 8


@functools.cache
def step_address(kind: int, is_float32: bool, is_clipped: bool, decays: bool, is_bounded: bool) -> int:
    """Compile or load one step of an optimizer, for rows in float32 or in 16 bits; return its address, for `call`.

    The options say whether it uses `cow_clip`, `weight_decay` and `max_norm`. Numba drops the branches of other options
    and optimizers before it infers types.
    """

    def step_row(args):
        """Update a row and its states; overwrites its gradient."""
        w_at, g_at, first_at, second_at, dim, lr, step, h_at, count = args[:9]
        w, g, h = float32_row(w_at, dim), float32_row(g_at, dim), float64_row(h_at, COW_CLIP_FLOOR + 1)
        first, second = float32_row(first_at, dim), float32_row(second_at, dim)  # a state of one value is shorter
        if is_clipped:
            _cow_clip(w, g, count, h)
        # Weight decay that is not part of a trust ratio.
        decay, mode = np.float32(h[WEIGHT_DECAY]), int(h[WEIGHT_DECAY_MODE])
        if decays:
            if mode == L2_DECAY:
                for j in range(w.size):
                    g[j] += decay * w[j]
            if mode == DECOUPLED_DECAY:
                decay_factor = ONE - lr * decay
                for j in range(w.size):
                    w[j] *= decay_factor

        # The optimizer's step.
        if kind == SGD:
            _subtract(w, lr, g)
        elif kind == ASSIGN:
            for j in range(w.size):
                w[j] = g[j]
        elif kind == ROW_WISE_ADAGRAD:
            first[0] += _mean_of_squares(g)
            _subtract(w, lr / (np.sqrt(first[0]) + np.float32(h[EPS])), g)
        elif kind == ADAGRAD:
            eps = np.float32(h[EPS])
            for j in range(w.size):
                first[j] += g[j] * g[j]
                w[j] -= lr * g[j] / (np.sqrt(first[j]) + eps)
        elif kind == LARS_SGD:
            _lars(w, first, g, lr, h, decay if mode == RATIO_DECAY else ZERO)
        elif kind == FTRL:
            if lr != ZERO:  # the formula divides by lr
                _ftrl(w, first, second, g, lr, h)
        else:
            row_wise = kind == PARTIAL_ROW_WISE_ADAM or kind == PARTIAL_ROW_WISE_LAMB
            _adam_direction(first, second, row_wise, g, h, step)
            if kind == LAMB or kind == PARTIAL_ROW_WISE_LAMB:
                _lamb(w, g, lr, decay if mode == RATIO_DECAY else ZERO)
            else:
                _subtract(w, lr, g)
        # Scale the row down to max_norm.
        if is_bounded:
            norm = np.sqrt(_sum_of_squares(w))
            if norm > np.float32(h[MAX_NORM]):
                scale = np.float32(h[MAX_NORM]) / norm
                for j in range(w.size):
                    w[j] *= scale

    step_float32 = inlined_uncounted(step_row)

    def step_16bit(args):
        address, _, _, _, dim, _, step, h, _, scratch, dtype, seed, counter, row = args
        weight, bits = float32_row(scratch, dim), uint16_row(address, dim)
        widen_row(bits, dtype, weight)
        step_float32((scratch, *args[1:9]))
        if float64_row(h, COW_CLIP_FLOOR + 1)[STOCHASTIC_ROUNDING] != 0.0:
            words = uint32_row(scratch + 4 * dim, (dim + 2 * BLOCK_WORDS - 1) // (2 * BLOCK_WORDS) * BLOCK_WORDS)
            fill_philox(words, seed, counter, row, step)
            narrow_row_stochastic(weight, dtype, bits, words)
        else:
            narrow_row(weight, dtype, bits)

    function = step_row if is_float32 else step_16bit
    function.__qualname__ = f"{function.__name__}_{kind}_{is_clipped:d}{decays:d}{is_bounded:d}"
    return address_of(addressed(function, 2), _STEP_TYPES)
