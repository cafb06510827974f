"""Jagged ops of the ID exchange between ranks: permute keys, bucketize ids by the ranks that own their rows.

`values` `[N]` are the ids of `K` keys and `B` samples; bag `k * B + b` holds `values[offsets[bag] : offsets[bag + 1]]`,
`offsets` `[K * B + 1]`, int32 or int64, ascending from 0. Values beyond the last offset belong to no bag.

**permute**: `out[k'] = in[order[k']]`, key by key. A key's values are contiguous, so each output index finds its key by
a binary search among `K'` starts, and from it its source.
Bytes: `2 · (id size + weight size) · N'`, and `2 · offset size · K' · B`.

**bucketize**: owner = id // block size of its key, local id = id % block size. One pass of a stable counting sort by
owner: each program sorts its tile of ids by owner and counts them; the cumulative sum of the counts, by owner, then
tile, is where each tile's ids go. Positions ascend by key, then sample: the result is by owner, key, sample, position.
Bytes: `(3 · id size + 2 · weight size + 16) · N`, lengths `offset size · W · K · B` twice (zeroed, then incremented).

**drop padding**: replace a table's padding id by -1, for lookups and gradients that do not check ids and ignore
negative ones. Ids out of range are reported here, before -1 would hide them.
Bytes: `8 · N` of ids read and written.
"""

import torch
from torch import Tensor

from tritonemb import errors
from tritonemb.kernels.triton_utils import (
    BAD_ID,
    INTEGERS,
    cdiv,
    error_args,
    interpreting,
    jit,
    last_at_most,
    launch,
    next_power_of_2,
    poll,
    report,
    tl,
)
from tritonemb.layout import Layout, segment_offsets

_TILE_VALUES = 64 if interpreting() else 1024  # per program; the interpreter sorts slowly


@jit(varying=["batch_size", "num_bags", "num_values", "num_out"])
def _permute_kernel(batch, order, starts, out, batch_size, num_keys, num_bags, num_values, num_out, TILE):
    """Permute values, weights and offsets. `starts` int64 `[K' + 1]`: index of each key's first value in the result."""
    values, weights, offsets = batch
    out_values, out_weights, out_offsets = out
    # Index of a value: copy it from its source.
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.load(starts + num_keys)
    in_range = index < total
    key = last_at_most(starts, num_keys, index)
    first = tl.load(offsets + tl.load(order + key, mask=in_range, other=0) * batch_size, mask=in_range, other=0)
    source = first.to(tl.int64) + index - tl.load(starts + key, mask=in_range, other=0)
    in_range = in_range & (source >= 0) & (source < num_values)
    tl.store(out_values + index, tl.load(values + source, mask=in_range, other=0), mask=index < num_out)
    if weights is not None:
        tl.store(out_weights + index, tl.load(weights + source, mask=in_range, other=0), mask=index < num_out)

    # Index of a bag: shift its offset by the difference of the key's starts.
    is_bag = index < num_bags
    bag = index.to(tl.int32)
    key = bag // batch_size
    first_bag = tl.load(order + key, mask=is_bag, other=0) * batch_size
    begin = tl.load(offsets + first_bag + (bag - key * batch_size), mask=is_bag, other=0)
    first = tl.load(offsets + first_bag, mask=is_bag, other=0)
    offset = tl.where(is_bag, tl.load(starts + key, mask=is_bag, other=0) + begin - first, total)
    tl.store(out_offsets + index, offset.to(out_offsets.dtype.element_ty), mask=index <= num_bags)


@jit(varying=["num_values", "num_bags", "batch_size", "num_tiles"])
def _count_kernel(
    values, offsets, block_sizes, out, num_values, num_bags, num_keys, batch_size, num_owners, num_tiles, TILE, BINS
):
    """Write for each value `owner * num_keys + key`; for each tile and owner the number of values, and the cumulative
    number over owners. Values in no bag go to an extra last owner. Also count the lengths of the result's bags."""
    owner_keys, counts, sums, lengths = out
    # Bag, key and id of each value.
    tile = tl.program_id(0)
    position = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = position < num_values
    bag = last_at_most(offsets, num_bags, position)
    in_bag = valid & (position < tl.load(offsets + num_bags))
    key = bag // batch_size
    ids = tl.load(values + position, mask=valid, other=0)
    # Owner of each id; ids out of range go to the first or last one, which reports them.
    block = tl.load(block_sizes + key, mask=in_bag, other=1)
    block = tl.minimum(tl.maximum(block, 1), 0x7FFFFFFF if ids.dtype == tl.int32 else 0x7FFFFFFFFFFFFFFF).to(ids.dtype)
    owner = tl.minimum(tl.maximum(ids, 0) // block, num_owners - 1).to(tl.int32)
    tl.atomic_add(lengths + owner.to(tl.int64) * num_bags + bag, 1, mask=in_bag, sem="relaxed")
    owner = tl.where(in_bag, owner, num_owners)
    tl.store(owner_keys + position, owner * num_keys + tl.where(in_bag, key, 0), mask=valid)
    # Histogram of the tile's owners.
    bins = tl.arange(0, BINS)
    count = tl.histogram(owner, BINS, mask=valid)
    cell = bins.to(tl.int64) * num_tiles + tile
    tl.store(counts + cell, count, mask=bins <= num_owners)
    tl.store(sums + cell, tl.cumsum(count, 0), mask=bins <= num_owners)


@jit(varying=["num_values", "num_tiles"])
def _scatter_kernel(batch, block_sizes, owner_keys, ends, sums, out, num_values, num_keys, num_owners, num_tiles, TILE):
    """Move values and weights to their owners' buckets. `ends` int32: end of each owner's and tile's values."""
    values, weights = batch
    out_values, out_weights, destinations = out
    # Sort the tile by owner, stably: the offset is part of the key.
    tile = tl.program_id(0)
    offset = tl.arange(0, TILE)
    start = tile.to(tl.int64) * TILE
    valid = start + offset < num_values
    owner_key = tl.load(owner_keys + start + offset, mask=valid, other=0)
    by_owner = tl.sort(tl.where(valid, owner_key // num_keys, num_owners + 1) * TILE + offset)
    owner, position = by_owner // TILE, start + by_owner % TILE
    valid = position < num_values
    cell = owner.to(tl.int64) * num_tiles + tile
    destination = tl.load(ends + cell, mask=valid, other=0) - tl.load(sums + cell, mask=valid, other=0) + offset
    # Local ids; those out of range are kept as they are.
    ids = tl.load(values + position, mask=valid, other=0)
    key = tl.load(owner_keys + position, mask=valid, other=0) - owner * num_keys
    block = tl.maximum(tl.load(block_sizes + key, mask=valid & (owner < num_owners), other=0), 1)
    local = ids - owner * block
    local = tl.where((ids >= 0) & (local < block) & (owner < num_owners), local, ids)
    tl.store(out_values + destination, local.to(ids.dtype), mask=valid)
    if weights is not None:
        tl.store(out_weights + destination, tl.load(weights + position, mask=valid, other=0), mask=valid)
    tl.store(destinations + position, destination, mask=valid)


def jagged_permute(
    values: Tensor, offsets: Tensor, order: Tensor, weights: Tensor | None, num_keys: int, num_values: int
) -> tuple[Tensor, Tensor, Tensor]:
    values, offsets, order = values.contiguous(), offsets.contiguous(), order.contiguous()
    batch_size = _batch_size(offsets, num_keys)
    key_offsets = offsets[::batch_size] if batch_size else offsets.new_zeros(num_keys + 1)
    starts = segment_offsets(torch.diff(key_offsets)[order])
    num_bags = order.numel() * batch_size
    out_values, out_offsets = values.new_empty(num_values), offsets.new_empty(num_bags + 1)
    out_weights = values.new_empty(0) if weights is None else weights.new_empty(num_values)
    batch, out = (values, _as_integers(weights), offsets), (out_values, _as_integers(out_weights), out_offsets)
    sizes = max(1, batch_size), order.numel(), num_bags, values.numel(), num_values
    grid = (cdiv(max(num_values, num_bags + 1), _TILE_VALUES),)
    launch(_permute_kernel, grid, batch, order, starts, out, *sizes, TILE=_TILE_VALUES)
    return out_values, out_offsets, out_weights


def block_bucketize(
    values: Tensor, offsets: Tensor, block_sizes: Tensor, weights: Tensor | None, num_owners: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, offsets, block_sizes = values.contiguous(), offsets.contiguous(), block_sizes.contiguous()
    num_values, num_bags, num_keys = values.numel(), offsets.numel() - 1, max(1, block_sizes.numel())
    num_tiles = cdiv(num_values, _TILE_VALUES)
    assert num_values < 2**31
    assert (num_owners + 1) * max(num_keys, 2 * _TILE_VALUES) < 2**31
    owner_keys, destinations = (torch.empty(num_values, dtype=torch.int32, device=values.device) for _ in range(2))
    counts, sums = (owner_keys.new_empty((num_owners + 1) * num_tiles) for _ in range(2))
    lengths = offsets.new_zeros(num_owners * num_bags)
    out_values = torch.empty_like(values)
    out_weights = values.new_empty(0) if weights is None else torch.empty_like(weights.contiguous())
    inputs, out = (values, offsets, block_sizes), (owner_keys, counts, sums, lengths)
    sizes = num_values, num_bags, num_keys, max(1, _batch_size(offsets, num_keys)), num_owners, num_tiles
    launch(_count_kernel, (num_tiles,), *inputs, out, *sizes, TILE=_TILE_VALUES, BINS=next_power_of_2(num_owners + 1))
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    batch, moved = (values, _as_integers(weights)), (out_values, _as_integers(out_weights), destinations)
    args = batch, block_sizes, owner_keys, ends, sums, moved, num_values, num_keys, num_owners
    launch(_scatter_kernel, (num_tiles,), *args, num_tiles, TILE=_TILE_VALUES)
    return out_values, lengths, destinations, out_weights


def _batch_size(offsets: Tensor, num_keys: int) -> int:
    return (offsets.numel() - 1) // num_keys if num_keys else 0


def _as_integers(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.contiguous().view(INTEGERS[weights.itemsize])


BLOCK = 1024  # ids per program
NO_POSITION = tl.constexpr(2**62)


@jit(varying=["padding", "num_rows", "num_values", "num_bags"])
def _drop_padding_kernel(values, offsets, out, errors, padding, num_rows, num_values, num_bags, BLOCK):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = position < num_values
    value = tl.load(values + position, mask=valid, other=0)
    tl.store(out + position, tl.where(value == padding, -1, value).to(out.dtype.element_ty), mask=valid)
    bad_position = tl.min(tl.where(valid & ((value < 0) | (value >= num_rows)), position, NO_POSITION))
    if bad_position != NO_POSITION:
        bag = last_at_most(offsets, num_bags, bad_position)
        report(errors, BAD_ID, (bad_position, tl.load(values + bad_position), 0, 0, bag, num_rows))


def drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, layout: Layout) -> Tensor:
    """Launch once, as the reference. On a GPU the next lookup or update, or `check_errors`, raises for a bad id."""
    device = values.device
    poll(device)
    values, offsets = values.contiguous(), offsets.contiguous()
    out = torch.empty_like(values)
    args = values, offsets, out, error_args(layout, device), padding_idx, layout.num_rows, values.numel()
    launch(_drop_padding_kernel, (cdiv(values.numel(), BLOCK),), *args, offsets.numel() - 1, BLOCK=BLOCK)
    if device.type != "cuda":
        poll(device)
    return out


def jagged_permute_reference(
    values: Tensor, offsets: Tensor, order: Tensor, weights: Tensor | None, num_keys: int, num_values: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.jagged.jagged_permute`; weights `[0]` if none."""
    batch_size = (offsets.numel() - 1) // max(1, num_keys)
    ranges = [(int(offsets[key * batch_size]), int(offsets[(key + 1) * batch_size])) for key in order.tolist()]
    lengths = torch.diff(offsets).reshape(num_keys, batch_size)[order].flatten()

    def permute(tensor: Tensor) -> Tensor:
        return torch.cat([*[tensor[begin:end] for begin, end in ranges], tensor.new_zeros(num_values)])[:num_values]

    out_weights = values.new_empty(0) if weights is None else permute(weights)
    return permute(values), segment_offsets(lengths).to(offsets.dtype), out_weights


def block_bucketize_reference(
    values: Tensor, offsets: Tensor, block_sizes: Tensor, weights: Tensor | None, num_owners: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `ops.jagged.block_bucketize`; weights `[0]` if none."""
    num_bags, num_values = offsets.numel() - 1, values.numel()
    position = torch.arange(num_values, device=values.device)
    bag = torch.searchsorted(offsets.to(torch.int64), position, right=True) - 1
    in_bag = bag < num_bags
    bag = bag.clamp(0, max(0, num_bags - 1))
    ids = values.to(torch.int64)
    block_size = torch.ones_like(ids)
    if num_bags:
        block_size = block_sizes[bag // (num_bags // block_sizes.numel())].clamp(min=1)
    owner = torch.div(ids, block_size, rounding_mode="floor")
    local = torch.where(in_bag & (owner >= 0) & (owner < num_owners), ids - owner * block_size, ids).to(values.dtype)
    owner = torch.where(in_bag, owner.clamp(0, num_owners - 1), num_owners)
    lengths = torch.bincount((owner * num_bags + bag)[in_bag], minlength=num_owners * num_bags).to(offsets.dtype)
    order = torch.argsort(owner, stable=True)
    destinations = torch.empty_like(position, dtype=torch.int32)
    destinations[order] = position.to(torch.int32)
    return local[order], lengths, destinations, values.new_empty(0) if weights is None else weights[order]


def drop_padding_reference(values: Tensor, offsets: Tensor, padding_idx: int, layout: Layout) -> Tensor:
    """Replace `padding_idx` by -1 in `values` `[N]` of one table. ValueError for an id out of range."""
    if values.numel():
        min_id, max_id = values.aminmax()
        if min_id < 0 or max_id >= layout.num_rows:
            is_bad = (values < 0) | (values >= layout.num_rows)
            raise errors.invalid_id_error(int(is_bad.nonzero()[0]), values, offsets, layout)
    return values.masked_fill(values == padding_idx, -1)
