"""CPU twin and reference of `kernels/jagged.py`, by PyTorch's operators: copies of keys, and a stable sort by owner."""

import torch
from torch import Tensor

from tritonemb import errors
from tritonemb.layout import Layout, segment_offsets


def jagged_permute(
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


def block_bucketize(
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


def drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, layout: Layout) -> Tensor:
    """Replace `padding_idx` by -1 in `values` `[N]` of one table. ValueError for an id out of range."""
    if values.numel():
        min_id, max_id = values.aminmax()
        if min_id < 0 or max_id >= layout.num_rows:
            is_bad = (values < 0) | (values >= layout.num_rows)
            raise errors.invalid_id_error(int(is_bad.nonzero()[0]), values, offsets, layout)
    return values.masked_fill(values == padding_idx, -1)
