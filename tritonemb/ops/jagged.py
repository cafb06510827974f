"""`tritonemb::jagged_permute` and `block_bucketize`: a batch's ids in the order that an exchange needs, with no wait on
the host; see `kernels/jagged.py`."""

import torch
from torch import Tensor

from tritonemb.jagged import OFFSET_DTYPES
from tritonemb.ops.registry import define, eager, kernel
from tritonemb.ops.row_groups import check_ids, plain_eager


def jagged_permute(
    values: Tensor, offsets: Tensor, order: Tensor, num_keys: int, weights: Tensor | None = None,
    num_values: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Take the keys `order` of a batch, in that order. TypeError, ValueError for other dtypes and shapes than these.

    Args:
        values: `[N]` ids, int32 or int64.
        offsets: `[num_keys * B + 1]` int32 or int64, ascending from 0.
        order: int64 `[K']` on the same device; keys may be repeated or left out.
        num_keys: keys of the batch, `K`.
        weights: `[N]`, any dtype; no gradient flows to them.
        num_values: room in the result, by default `N`. Values that do not fit are left out; the offsets count them.

    Returns `[num_values]` values, zeros behind the last offset; `[K' * B + 1]` offsets, in the dtype of the batch's;
    and `[num_values]` weights, or None.
    """
    num_values = values.shape[0] if num_values is None else num_values
    if num_values < 0:
        raise ValueError(f"num_values must not be negative, got {num_values}")
    _check(values, offsets, order, "order", weights, num_keys)
    out = _call("jagged_permute", values, offsets, order, weights, num_keys, num_values)
    return out[0], out[1], None if weights is None else out[2]


def block_bucketize(
    values: Tensor, offsets: Tensor, block_sizes: Tensor, num_owners: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sort a batch's ids by the rank that owns their row: `id // block_sizes[key]`, its row `id % block_sizes[key]`.

    TypeError, ValueError for other dtypes and shapes than these, or no owners.

    Args:
        values: `[N]` ids, int32 or int64.
        offsets: `[K * B + 1]` int32 or int64, ascending from 0. Values behind the last one stay behind, as they are.
        block_sizes: int64 `[K]` on the same device: how many rows of the key's table each owner has (the last: up to).
        num_owners: `W`.
        weights: `[N]`, any dtype; no gradient flows to them.

    Returns:
        values: `[N]` ids as their owner counts its rows, by owner, then by key, sample and position; an id of no owner
            is as it was, and with the first owner if negative, else with the last, which will find it out of range.
        lengths: `[W * K * B]` values a bag, for each owner, in the dtype of the batch's offsets.
        unbucketize: int32 `[N]`: `values[unbucketize[i]]` came from position `i`, and so with anything computed for it.
        weights: `[N]`, or None.
    """
    if num_owners < 1:
        raise ValueError(f"num_owners must be at least 1, got {num_owners}")
    _check(values, offsets, block_sizes, "block_sizes", weights, block_sizes.numel())
    out = _call("block_bucketize", values, offsets, block_sizes, weights, num_owners)
    return out[0], out[1], out[2], None if weights is None else out[3]


def _call(
    op: str, values: Tensor, offsets: Tensor, by_key: Tensor, weights: Tensor | None, *sizes: int
) -> tuple[Tensor, ...]:
    weights = None if weights is None else weights.detach()
    call = eager[op] if plain_eager(values, offsets, by_key, weights) else getattr(torch.ops.tritonemb, op)
    return call(values, offsets, by_key, weights, *sizes)


def _check(
    values: Tensor, offsets: Tensor, by_key: Tensor, by_key_name: str, weights: Tensor | None, num_keys: int
) -> None:
    check_ids(values)
    if offsets.dtype not in OFFSET_DTYPES or offsets.dim() != 1:
        raise TypeError(f"offsets must be int32 or int64 and 1-D, got {offsets.dtype} {tuple(offsets.shape)}")
    if by_key.dtype != torch.int64 or by_key.dim() != 1:
        raise TypeError(f"{by_key_name} must be int64 and 1-D, got {by_key.dtype} {tuple(by_key.shape)}")
    num_bags = offsets.shape[0] - 1
    if num_bags < 0 or (num_bags % num_keys if num_keys else num_bags):
        raise ValueError(f"offsets must have a multiple of {num_keys} (keys) plus 1 elements, got {num_bags + 1}")
    if weights is not None and weights.shape != values.shape:
        raise ValueError(f"weights must be as many as values, {tuple(values.shape)}, got {tuple(weights.shape)}")


def _permuted(
    values: Tensor, offsets: Tensor, order: Tensor, weights: Tensor | None, num_keys: int, num_values: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch_size = (offsets.shape[0] - 1) // num_keys if num_keys else 0
    out_weights = values.new_empty(0) if weights is None else weights.new_empty(num_values)
    return values.new_empty(num_values), offsets.new_empty(order.shape[0] * batch_size + 1), out_weights


_BATCH = "Tensor values, Tensor offsets, Tensor {}, Tensor? weights"
define(
    "jagged_permute",
    f"({_BATCH.format('order')}, SymInt num_keys, SymInt num_values) -> (Tensor, Tensor, Tensor)",
    lambda values, *rest: kernel("jagged_permute", values.device)(values, *rest),
    _permuted,
)
define(
    "block_bucketize",
    f"({_BATCH.format('block_sizes')}, SymInt num_owners) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda values, *rest: kernel("block_bucketize", values.device)(values, *rest),
    lambda values, offsets, block_sizes, weights, num_owners: (
        values.new_empty(values.shape[0]),
        offsets.new_empty(num_owners * (offsets.shape[0] - 1)),
        values.new_empty(values.shape[0], dtype=torch.int32),
        values.new_empty(0) if weights is None else weights.new_empty(weights.shape[0]),
    ),
)
