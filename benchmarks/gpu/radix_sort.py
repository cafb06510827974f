"""A stable radix sort over exactly the bits that keys have: a contender of torch's sort, which grouping uses.

Least significant digit first, in two launches a pass. One counts each block's digits; the other adds the counts of all
blocks, so that no program waits for another's sum, and moves every key behind those with a smaller digit, and behind
those with its digit that stand before it. A block is moved tile by tile: within a tile keys are compared in pairs.

Bytes a pass and key: the key read twice and written once, its place read and written. Beside that every program reads
`4 · 2^digit bits` for each block, of which there are at most 128, so that it stays in the L2 cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonemb.kernels.triton_utils import cdiv, interpreting, jit, launch, next_power_of_2, tl

MOST_DIGIT_BITS = 11
MOST_BLOCKS = 128
LEAST_BLOCK = 256 if interpreting() else 1024  # keys
TILE = tl.constexpr(64)
TILE_OF_COUNTS = 1 << 13  # elements
NUM_WARPS = 8


@jit(varying=["num_keys", "block_size", "shift"])
def _count_digits_kernel(keys, counts, num_keys, block_size, shift, BINS: tl.constexpr, TILE: tl.constexpr):
    """`counts[block, digit]`."""
    count = tl.zeros((BINS,), tl.int32)
    begin = tl.program_id(0).to(tl.int64) * block_size
    for start in range(0, block_size, TILE):
        place = begin + start + tl.arange(0, TILE)
        key = tl.load(keys + place, mask=place < num_keys, other=0)
        count += tl.histogram(((key >> shift) & (BINS - 1)).to(tl.int32), BINS, mask=place < num_keys)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), count)


@jit(varying=["num_keys", "num_blocks", "block_size", "shift"])
def _move_kernel(
    keys, places, counts, new_keys, new_places, num_keys, num_blocks, block_size, shift, FIRST: tl.constexpr,
    BINS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Keys and the places they came from (their own, in the first pass) to where this pass puts them."""
    total, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for start in range(0, num_blocks, BLOCKS):
        block = (start + tl.arange(0, BLOCKS))[:, None]
        count = tl.load(counts + block * BINS + tl.arange(0, BINS)[None, :], mask=block < num_blocks, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(block < tl.program_id(0), count, 0), 0)
    next_place = tl.cumsum(total, 0) - total + before  # by digit
    begin, index = tl.program_id(0).to(tl.int64) * block_size, tl.arange(0, TILE)
    for start in range(0, block_size, TILE):
        place = begin + start + index
        live = place < num_keys
        key = tl.load(keys + place, mask=live, other=0)
        digit = ((key >> shift) & (BINS - 1)).to(tl.int32)
        earlier = (digit[:, None] == digit[None, :]) & (index[:, None] > index[None, :])
        target = tl.gather(next_place, digit, 0) + tl.sum(earlier.to(tl.int32), 1)
        came_from = place.to(tl.int32) if FIRST else tl.load(places + place, mask=live, other=0)
        tl.store(new_keys + target, key, mask=live)
        tl.store(new_places + target, came_from, mask=live)
        next_place += tl.histogram(digit, BINS, mask=live)


def radix_sort(keys: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Sort keys `[N]`, int32 or int64, in [0, 2^bits), stably; sorted keys and int32 places they came from.

    N is below 2^31.
    """
    num_keys = keys.numel()
    block_size = max(LEAST_BLOCK, next_power_of_2(cdiv(num_keys, MOST_BLOCKS) or 1))
    num_blocks, passes = cdiv(num_keys, block_size), max(1, cdiv(bits, MOST_DIGIT_BITS))
    digit_bits = max(5, cdiv(bits, passes))
    counts = torch.empty(num_blocks << digit_bits, dtype=torch.int32, device=keys.device)
    places = torch.empty(num_keys, dtype=torch.int32, device=keys.device)
    bins, blocks = 1 << digit_bits, min(next_power_of_2(num_blocks or 1), TILE_OF_COUNTS >> digit_bits)
    for turn in range(passes):
        shift = turn * digit_bits
        launch(
            _count_digits_kernel, (num_blocks,), keys, counts, num_keys, block_size, shift, BINS=bins, TILE=LEAST_BLOCK,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        moved, new_places = torch.empty_like(keys), torch.empty_like(places)
        launch(
            _move_kernel, (num_blocks,), keys, places, counts, moved, new_places, num_keys, num_blocks, block_size,
            shift, FIRST=turn == 0, BINS=bins, BLOCKS=blocks, num_warps=NUM_WARPS,
        )  # fmt: skip
        keys, places = moved, new_places
    return keys, places
