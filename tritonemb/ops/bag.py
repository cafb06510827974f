"""Lookup in one table as a function of ordinary tensors, differentiable any number of times.

`F(W, s, g) = Σ_p c_p s_p ⟨W[values_p], g_p⟩` is linear in the table `W`, the per-sample weights `s` and the output's
gradient `g`; `c_p` is 1, or 1 / (length of the bag) for means, and `g_p` is the row of `g` to which position `p`
contributed. The lookup, the gradient of the table and that of the per-sample weights are the derivatives of `F` by `g`,
`W` and `s`: the derivatives of each are the two others. As ops, used under tracing, they are differentiable once.

Without bounds checks, a position with a negative id is ignored (`drop_padding` sets such ids).
"""

import functools
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tritonemb.errors import offsets_do_not_ascend
from tritonemb.layout import MEAN, SUM, Layout, TableRow, build_layout
from tritonemb.memory import empty_result
from tritonemb.ops.registry import CPU, choose_cached, define, kernel
from tritonemb.ops.row_groups import ID_DTYPES, RowGroups, check_ids, plain_eager
from tritonemb.ops.row_update import row_gradients_
from tritonemb.types import seed_of


class Bags(NamedTuple):
    """Segmentation of a batch's ids into bags, and their pooling.

    Attributes:
        offsets: int `[B + 1]`, from 0 to the number of values `N`; `[0, N]` if not pooled.
        pooled: whether the output has a row per bag, or else a row per value.
        mean: whether bags are averaged, or else summed.
        checked: whether an id out of range raises; else it reads as zero and has no gradient.
    """

    offsets: Tensor
    pooled: bool
    mean: bool = False
    checked: bool = True


def bag(
    weight: Tensor, values: Tensor, sample_weights: Tensor | None, bags: Bags, trained_ids: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Look up `values`; differentiable in `weight` and `sample_weights`.

    Args:
        weight: `[rows, dim]`, contiguous; float32, float16, bfloat16 or float64.
        values: int32 or int64 `[N]`.
        sample_weights: floating point `[N]`, or None for ones.
        trained_ids: ids `[N]` of the rows that get the gradient, if different from `values`; -1 for none.
        dtype: dtype of the result; the weight's by default.

    Returns `[B, dim]`, or `[N, dim]` if not pooled. Sums are float32, or float64 for a float64 table.

    Raise RuntimeError for an id out of range or invalid offsets, and IndexError if not pooled; on a GPU a ValueError
    at the next lookup, or in `te.check_errors`.
    """
    trained_ids = None if trained_ids is values else trained_ids
    dtypes = weight.dtype, None if sample_weights is None else sample_weights.dtype, dtype or weight.dtype
    options = *bags[1:], weight.shape[0], *dtypes
    return _differentiable(_GRAD, weight, sample_weights, None, values, trained_ids, bags.offsets, *options)


def weight_gradient(grad: Tensor, values: Tensor, bags: Bags, num_rows: int) -> Tensor:
    """Gradient of the table, from that of the result of a lookup of `values` `[N]`; differentiable in `grad`."""
    options = bags.pooled, bags.mean, False, num_rows, grad.dtype, None, grad.dtype
    return _differentiable(_WEIGHT, None, None, grad, values, None, bags.offsets, *options)


def single_bag_offsets(num_values: int, device: torch.device) -> Tensor:
    """Offsets `[0, N]`: all values as one bag."""
    if not plain_eager():  # not cached: the tensor belongs to a trace or a transform
        if isinstance(num_values, int) and num_values:
            return torch.arange(0, num_values + 1, num_values, device=device)
        return torch.arange(2, device=device) * num_values
    return _cached_offsets(num_values, device)


@functools.lru_cache(maxsize=64)
def _cached_offsets(num_values: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor([0, num_values], device=device)


def are_ascending(offsets: Tensor) -> bool:
    """Return whether all offsets ascend, so that PyTorch's CPU kernel, which checks the ends only, stays in bounds."""
    if type(offsets) is not Tensor or offsets.device.type != "cpu" or torch._C._functorch.maybe_current_level():
        return False
    if offsets.dim() != 1 or not len(offsets) or offsets.dtype not in ID_DTYPES:
        return False
    from tritonemb.kernels.cpu.row_groups import GOOD_OFFSETS, first_bad_bag  # loads the compiler

    return first_bad_bag(offsets.numpy(), -1) in (GOOD_OFFSETS, len(offsets) - 1)


def check_ascending(offsets: Tensor, num_values: int) -> None:
    """Raise ValueError for a bag that ends before it begins, which some of PyTorch's kernels do not check."""
    if plain_eager(offsets) and offsets.device.type == "cpu" and not are_ascending(offsets):
        for bag in (offsets.diff() < 0).nonzero()[:1].flatten().tolist():
            raise offsets_do_not_ascend("weight", bag, int(offsets[bag]), int(offsets[bag + 1]), num_values)


def drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    """Replace `padding_idx` in `values` `[N]` by -1; offsets as in `Bags`. Raise RuntimeError for an id out of
    range."""
    if plain_eager(values, offsets) and not values.is_meta:
        return _drop_padding(values, offsets, padding_idx, num_rows)
    return torch.ops.tritonemb.drop_padding(values, offsets, padding_idx, num_rows)


def count_unpadded(ids: Tensor, offsets: Tensor) -> Tensor:
    """Ids per bag without padding, at least 1, `[B, 1]`; `ids` are from `drop_padding`."""
    cumulative = torch.nn.functional.pad(torch.cumsum(ids >= 0, 0), (1, 0))
    bounds = offsets.clamp(0, ids.shape[0])
    return (cumulative[bounds[1:]] - cumulative[bounds[:-1]]).clamp(min=1).unsqueeze(1)


_WEIGHT, _SAMPLE_WEIGHTS, _GRAD = range(3)  # the factors of F


def _differentiable(*args: Any) -> Tensor:
    """Derivative of F by one factor, which is differentiable in turn."""
    if torch.compiler.is_compiling():
        return torch.ops.tritonemb.bag(*args)
    transformed = torch._C._functorch.maybe_current_level()
    if not torch.is_grad_enabled() and not transformed:
        return _derivative(*args)
    return (_Derivative if transformed else _EagerDerivative).apply(*args)


def _derivative(*args: Any) -> Tensor:
    """Derivative of F by one factor, without autograd; in plain eager mode without the dispatcher."""
    return (_derive if plain_eager(*args[1:7]) and not args[4].is_meta else torch.ops.tritonemb.bag)(*args)


def _derive(
    by: int, weight: Any, sample_weights: Tensor | None, grad: Any, values: Tensor, trained_ids: Tensor | None,
    offsets: Tensor, pooled: bool, mean: bool, checked: bool, num_rows: int, weight_dtype: torch.dtype,
    sample_dtype: torch.dtype | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute the derivative of F by the factor `by`, which is None; the last three arguments are dtypes of factors.

    `trained_ids`: ids for the derivatives of the result, if different from `values`.
    """
    if by == _GRAD:
        return look_up(weight.contiguous(), values, offsets, sample_weights, pooled, mean, checked, dtype)
    layout = layout_of((BagTable(num_rows, grad.shape[1], mean),), pooled, values.device)
    if by == _SAMPLE_WEIGHTS:
        derive = kernel("sample_weight_gradient", grad.device, (weight.dtype,))
        return derive([weight.contiguous()], values, offsets, grad, layout).to(sample_dtype)
    check_ids(values)
    groups = RowGroups(*kernel("row_groups", values.device)(values, offsets, layout))
    sum_dtype = torch.promote_types(grad.dtype, torch.float32)
    sums = empty_result((num_rows, grad.shape[1]), sum_dtype, grad.device).zero_()
    row_gradients_([sums], grad, offsets, sample_weights, groups, layout)
    return sums.to(weight_dtype)


def _shape(
    by: int, weight: Any, _s: Any, grad: Any, values: Tensor, _t: Any, offsets: Tensor, pooled: bool, _m: bool,
    _c: bool, num_rows: int, weight_dtype: torch.dtype, sample_dtype: torch.dtype, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if by == _SAMPLE_WEIGHTS:
        return values.new_empty(values.shape[0], dtype=sample_dtype)
    if by == _WEIGHT:
        return grad.new_empty(num_rows, grad.shape[1], dtype=weight_dtype)
    return empty_bags(weight, values, offsets, pooled, dtype)


def empty_bags(weight: Tensor, values: Tensor, offsets: Tensor, pooled: bool, dtype: torch.dtype) -> Tensor:
    """Allocate the result of a lookup, for tracing."""
    return weight.new_empty(offsets.shape[0] - 1 if pooled else values.shape[0], weight.shape[1], dtype=dtype)


def sample_weight_gradient(grad: Tensor, weight: Tensor, values: Tensor, bags: Bags, sample_weights: Tensor) -> Tensor:
    """Gradient of the per-sample weights, `[N]`."""
    options = bags.pooled, bags.mean, False, weight.shape[0], weight.dtype, sample_weights.dtype, weight.dtype
    return _derivative(_SAMPLE_WEIGHTS, weight, None, grad, values, None, bags.offsets, *options)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.by, *factors, values, trained_ids, offsets = inputs[:7]
    ctx.options, needs = inputs[7:], ctx.needs_input_grad[1:4]
    # Save a factor only if the derivative by another one reads it: else it may be changed in between.
    saved = [factor if any(needs[:i]) or any(needs[i + 1 :]) else None for i, factor in enumerate(factors)]
    ctx.save_for_backward(*saved, values if trained_ids is None else trained_ids, offsets)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    *factors, values, offsets = ctx.saved_tensors
    pooled, mean, _, *num_rows_and_dtypes = ctx.options
    factors[ctx.by] = grad_output
    options = pooled, mean, False, *num_rows_and_dtypes
    gradients: list[Tensor | None] = []
    for by, needed in enumerate(ctx.needs_input_grad[1:4]):
        operands = [None if factor == by else value for factor, value in enumerate(factors)]
        gradients.append(_differentiable(by, *operands, values, None, offsets, *options) if needed else None)
    return None, *gradients, *[None] * 10


class _Derivative(torch.autograd.Function):
    """Derivative of F by one factor; the derivatives of the result are those by the other factors."""

    forward, setup_context, backward = staticmethod(_derivative), staticmethod(_save), staticmethod(_backward)


class _EagerDerivative(torch.autograd.Function):
    """`_Derivative` for calls that are neither transformed nor traced: half the overhead."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _derivative(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


define(
    "bag",
    "(int by, Tensor? weight, Tensor? sample_weights, Tensor? grad, Tensor values, Tensor? trained, Tensor offsets, "
    "bool pooled, bool mean, bool checked, SymInt num_rows, ScalarType weight_dtype, "
    "ScalarType? sample_dtype, ScalarType dtype) -> Tensor",
    _derive, _shape, _backward, _save,
)  # fmt: skip


class BagTable(NamedTuple):
    """Shape and pooling of a table; its name is for error messages, and seeds its stochastic rounding."""

    num_rows: int
    dim: int
    mean: bool = False
    name: str = "weight"

    @classmethod
    def from_weight(cls, weight: Tensor, mean: bool = False, name: str = "weight") -> Self:
        """Describe the table `weight` `[rows, dim]`."""
        num_rows, dim = weight.shape
        return cls(num_rows, dim, mean, name)


@functools.lru_cache(maxsize=1024)
def layout_of(tables: tuple[BagTable, ...], pooled: bool, device: torch.device) -> Layout:
    """Layout with one key per table; cached, to avoid another copy to the device."""
    rows = [TableRow(0, table.num_rows, table.dim, seed_of(table.name)) for table in tables]
    columns = [0, *accumulate(table.dim for table in tables)] if pooled else [0] * len(tables)
    key_lookups = [
        [(index, column, table.dim, MEAN if table.mean else SUM)]
        for index, (column, table) in enumerate(zip(columns, tables, strict=False))
    ]
    names = [table.name for table in tables]
    with torch.inference_mode(False):
        return build_layout(rows, key_lookups, names, names, pooled, device)


def look_up(
    weight: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, pooled: bool, mean: bool,
    checked: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Run `bag` by the kernel of the tensors' device, without autograd and dispatcher."""
    layout = layout_of((BagTable.from_weight(weight, mean),), pooled, values.device)
    name = choose_cached("embedding_bag", values.device, (weight.dtype,))
    try:
        if name == CPU and not pooled and checked and sample_weights is None and dtype == weight.dtype:
            out = empty_result((values.shape[0], weight.shape[1]), dtype)
            return torch.index_select(weight.detach(), 0, values, out=out)  # as fast as a kernel of our own
        return kernel("embedding_bag", values.device, (weight.dtype,))(
            [weight], values, offsets, sample_weights, layout, checked, dtype
        )
    except (ValueError, IndexError) as error:
        raise as_torch_error(
            error, values if checked else values[:0], weight.shape[0], pooled
        ) from None  # [:0]: padding


def as_torch_error(
    error: Exception, ids: Tensor, num_rows: int, pooled: bool, offsets: Tensor | None = None, name: str = ""
) -> Exception:
    """Convert the error of a CPU kernel to the exception that PyTorch's module raises for such a batch.

    On a GPU the error may be another module's, and is returned unchanged. With the `name` of a table, the message names
    the sample, too: for `ids` without offsets, the first index.
    """
    if ids.device.type != "cpu":
        return error
    kind = RuntimeError if pooled else IndexError
    if pooled and ids.dim() == 2 and not ids.shape[1]:
        return kind(f"input of shape {[*ids.shape]} has no ids, which PyTorch rejects; pass ids [0], and offsets")
    values = ids.reshape(-1)
    invalid = ((values < 0) | (values >= num_rows)).nonzero()
    if not invalid.numel():
        return kind(str(error))
    position, value = int(invalid[0]), int(values[invalid[0]])
    length = ids[:1].numel() if ids.dim() else 1
    sample = position // length if offsets is None else int((offsets <= position).sum()) - 1
    prefix = f"table {name!r}, sample {sample}: " if name else ""
    return kind(f"{prefix}input[{position}] is {value}, which is out of range; valid ids are 0 to {num_rows - 1}")


def _drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    layout = layout_of((BagTable(num_rows, 1),), True, values.device)
    try:
        return kernel("drop_padding", values.device)(values, offsets, padding_idx, layout)
    except ValueError as error:
        raise as_torch_error(error, values, num_rows, True) from None


def _close_bags(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put ids beyond the last offset, which the host cannot read, into an extra bag, to be cut off from the result.

    Returns ids `[N]`; ids to train `[N]`, -1 beyond the last offset; and offsets `[B + 2]`.
    """
    inside = torch.arange(values.shape[0], device=values.device) < offsets[-1:]
    unused = torch.where(offsets[-1:] > 0, values[:1], 0)  # a valid id
    closed_offsets = torch.cat([offsets, offsets.new_full((1,), values.shape[0])])
    return values.where(inside, unused), values.where(inside, -1), closed_offsets


define("close_bags", "(Tensor values, Tensor offsets) -> (Tensor, Tensor, Tensor)", _close_bags, _close_bags)
BAGS = "Tensor? trained, bool pooled, bool mean, bool checked, ScalarType dtype"
define(
    "drop_padding",
    "(Tensor values, Tensor offsets, int padding_idx, SymInt num_rows) -> Tensor",
    _drop_padding,
    lambda values, *_: torch.empty_like(values),
)
