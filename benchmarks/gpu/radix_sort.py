"""A stable radix sort over exactly the bits that keys have: a contender of torch's sort, which grouping uses.

Least significant digit first. A pass counts each block's digits, scans the counts digit by digit over all blocks, and
moves every key behind those with a smaller digit, and behind those with its digit that stand before it. Within a block
that rank comes from sorting (digit, place) pairs, which are distinct, so nothing depends on how they are sorted.

Bytes a pass and key: the key read twice and written once, its place read and written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonemb.kernels.triton_utils import cdiv, interpreting, jit, launch, tl

BLOCK_SIZE = 128 if interpreting() else 1024  # keys of a program; the interpreter sorts slowly
DIGIT_BITS = 8


@jit(varying=["num_keys", "num_blocks", "shift"])
def _count_digits_kernel(keys, counts, num_keys, num_blocks, shift, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """`counts[digit, block]`."""
    block = tl.program_id(0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + place, mask=place < num_keys, other=0)
    digit = tl.where(place < num_keys, (key >> shift) & (BINS - 1), BINS - 1).to(tl.int32)
    digits = tl.arange(0, BINS)
    beyond = tl.sum((place >= num_keys).to(tl.int32))
    count = tl.histogram(digit, BINS) - tl.where(digits == BINS - 1, beyond, 0)
    tl.store(counts + digits.to(tl.int64) * num_blocks + block, count)


@jit(varying=["num_keys", "num_blocks", "shift"])
def _move_kernel(
    keys, places, ends, new_keys, new_places, num_keys, num_blocks, shift, FIRST: tl.constexpr, BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys and the places they came from (their own, in the first pass) to where this pass puts them."""
    block = tl.program_id(0)
    start = block.to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    key = tl.load(keys + start + index, mask=start + index < num_keys, other=0)
    digit = tl.where(start + index < num_keys, (key >> shift) & (BINS - 1), BINS).to(tl.int32)
    pair = tl.sort(digit * BLOCK + index)
    digit, place = pair // BLOCK, start + pair % BLOCK
    live = digit < BINS
    before = tl.load(ends + digit.to(tl.int64) * num_blocks + block - 1, mask=live & (digit + block > 0), other=0)
    count = tl.histogram(digit, 2 * BINS)
    begin = tl.gather(tl.cumsum(count, 0) - count, digit, 0)  # keys of the block with a smaller digit
    target = before.to(tl.int64) + index - begin
    tl.store(new_keys + target, tl.load(keys + place, mask=live, other=0), mask=live)
    came_from = place.to(tl.int32) if FIRST else tl.load(places + place, mask=live, other=0)
    tl.store(new_places + target, came_from, mask=live)


def radix_sort(keys: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Sort keys `[N]`, int32 or int64, in [0, 2^bits), stably; sorted keys and int32 places they came from.

    N is below 2^31.
    """
    num_keys, num_blocks = keys.numel(), cdiv(keys.numel(), BLOCK_SIZE)
    places = torch.empty(num_keys, dtype=torch.int32, device=keys.device)
    passes = max(1, cdiv(bits, DIGIT_BITS))
    digit_bits = max(1, cdiv(bits, passes))
    for turn in range(passes):
        counts = torch.empty(num_blocks << digit_bits, dtype=torch.int32, device=keys.device)
        shift, options = turn * digit_bits, {"BINS": 1 << digit_bits, "BLOCK": BLOCK_SIZE}
        launch(_count_digits_kernel, (num_blocks,), keys, counts, num_keys, num_blocks, shift, **options)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        moved, new_places = torch.empty_like(keys), torch.empty_like(places)
        launch(
            _move_kernel, (num_blocks,), keys, places, ends, moved, new_places, num_keys, num_blocks, shift,
            FIRST=turn == 0, **options,
        )  # fmt: skip
        keys, places = moved, new_places
    return keys, places
