"""`tritonemb::jagged_permute` and `block_bucketize`: reorder the ids of a batch for an exchange, without a host
synchronization; see `kernels/jagged.py`.

Both raise TypeError or ValueError for unsupported dtypes or shapes, and on the CPU ValueError for offsets that do not
ascend from 0 to at most `N`, and for keys in `order` that the batch lacks.
"""

import torch
from torch import Tensor

from tritonemb.jagged import OFFSET_DTYPES
from tritonemb.ops.registry import check_tensor, define
from tritonemb.ops.row_groups import check_ids


def jagged_permute(
    values: Tensor, offsets: Tensor, order: Tensor, num_keys: int, weights: Tensor | None = None,
    num_values: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Select the keys `order` of a batch, in that order.

    Args:
        values: `[N]` ids, int32 or int64.
        offsets: `[num_keys * B + 1]` int32 or int64, ascending from 0.
        order: int64 `[K']` on the same device; keys may be repeated or omitted.
        num_keys: keys of the batch, `K`.
        weights: `[N]`, any dtype; no gradient flows to them.
        num_values: size of the result, by default `N`. Values beyond it are dropped, but counted by the offsets.

    Returns `[num_values]` values, zeros beyond the last offset; `[K' * B + 1]` offsets, of the batch's offset dtype;
    and `[num_values]` weights, or None.
    """
    num_values = values.shape[0] if num_values is None else num_values
    if num_values < 0:
        raise ValueError(f"num_values must not be negative, got {num_values}")
    weights = _check(values, offsets, ("order", order), weights, num_keys)
    out = _permute(values, offsets, order, weights, num_keys, num_values)
    return out[0], out[1], None if weights is None else out[2]


def block_bucketize(
    values: Tensor, offsets: Tensor, block_sizes: Tensor, num_owners: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sort the ids of a batch by owner, rank `id // block_sizes[key]`, and make them local, `id % block_sizes[key]`.

    Args:
        values, offsets, weights: as in `jagged_permute`. Values beyond the last offset stay at the end, unchanged.
        block_sizes: int64 `[K]` on the same device: rows of the key's table per owner (the last one has the remainder).
        num_owners: number of ranks, `W`, at least 1.

    Returns:
        values: `[N]` local ids, relative to the owner's first row, sorted by owner, then key, sample and position. An
            id out of range is unchanged, and sent to the first owner if negative, else to the last, which reports it.
        lengths: `[W * K * B]` values per bag, for each owner, of the batch's offset dtype.
        unbucketize: int32 `[N]`: `values[unbucketize[i]]` came from position `i`, and so did its embedding.
        weights: `[N]`, or None.
    """
    if num_owners < 1:
        raise ValueError(f"num_owners must be at least 1, got {num_owners}")
    weights = _check(values, offsets, ("block_sizes", block_sizes), weights, block_sizes.numel())
    out = _bucketize(values, offsets, block_sizes, weights, num_owners)
    return out[0], out[1], out[2], None if weights is None else out[3]


def _check(
    values: Tensor, offsets: Tensor, by_key: tuple[str, Tensor], weights: Tensor | None, num_keys: int
) -> Tensor | None:
    """Raise unless the arguments fit each other; return the weights without gradient."""
    check_ids(values)
    check_tensor("offsets", offsets, OFFSET_DTYPES, (None,), values.device)
    check_tensor(*by_key, (torch.int64,), (None,), values.device)
    num_bags = offsets.shape[0] - 1
    if num_bags < 0 or (num_bags % num_keys if num_keys else num_bags):
        raise ValueError(f"offsets must have a multiple of {num_keys} (keys) plus 1 elements, got {num_bags + 1}")
    if weights is not None and weights.shape != values.shape:
        raise ValueError(f"weights must have the shape of values, {tuple(values.shape)}, got {tuple(weights.shape)}")
    return None if weights is None else weights.detach()


def _jagged_permute_fake(
    values: Tensor, offsets: Tensor, order: Tensor, weights: Tensor | None, num_keys: int, num_values: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch_size = (offsets.shape[0] - 1) // num_keys if num_keys else 0
    out_weights = values.new_empty(0) if weights is None else weights.new_empty(num_values)
    return values.new_empty(num_values), offsets.new_empty(order.shape[0] * batch_size + 1), out_weights


_permute = define(
    "jagged_permute",
    "(Tensor values, Tensor offsets, Tensor order, Tensor? weights, SymInt num_keys, SymInt num_values) "
    "-> (Tensor, Tensor, Tensor)",
    _jagged_permute_fake,
)
_bucketize = define(
    "block_bucketize",
    "(Tensor values, Tensor offsets, Tensor block_sizes, Tensor? weights, SymInt num_owners) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda values, offsets, block_sizes, weights, num_owners: (
        values.new_empty(values.shape[0]),
        offsets.new_empty(num_owners * (offsets.shape[0] - 1)),
        values.new_empty(values.shape[0], dtype=torch.int32),
        values.new_empty(0) if weights is None else weights.new_empty(weights.shape[0]),
    ),
)
