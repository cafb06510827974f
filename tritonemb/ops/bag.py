"""Lookup in one table as a function of ordinary tensors, differentiable any number of times.

`F(W, s, g) = Σ_p c_p s_p ⟨W[values_p], g_p⟩` is linear in the table `W`, the per-sample weights `s` and the output's
gradient `g`; `c_p` is 1, or 1 / (length of the bag) for means, and `g_p` is the row of `g` to which position `p`
contributed. The lookup, the gradient of the table and that of the per-sample weights are the derivatives of `F` by `g`,
`W` and `s`: the derivatives of each are the two others. As ops, used under tracing, they are differentiable once.

Without bounds checks, a position with a negative id is ignored (`drop_padding` sets such ids).
"""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb.errors import offsets_do_not_ascend
from tritonemb.layout import MEAN, SUM, BatchGradient, Layout, TableRow, build_layout
from tritonemb.memory import empty_result
from tritonemb.ops.registry import CPU, SHARED_ARGUMENTS, choose_cached, define, kernel, plain_eager, unflatten
from tritonemb.ops.row_groups import ID_DTYPES, row_groups
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
    sample_dtype = None if sample_weights is None else sample_weights.dtype
    form = _Form(weight.shape[0], weight.dtype, sample_dtype, dtype or weight.dtype)
    return _differentiable(_GRAD, _Factors(weight, sample_weights, None), values, trained_ids, bags, form)


def weight_gradient(grad: Tensor, values: Tensor, bags: Bags, num_rows: int) -> Tensor:
    """Gradient of the table, from that of the result of a lookup of `values` `[N]`; differentiable in `grad`."""
    form = _Form(num_rows, grad.dtype, None, grad.dtype)
    return _differentiable(_WEIGHT, _Factors(None, None, grad), values, None, bags, form)


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


def count_unpadded(ids: Tensor, offsets: Tensor) -> Tensor:
    """Ids per bag without padding, at least 1, `[B, 1]`; `ids` are from `drop_padding`."""
    cumulative = torch.nn.functional.pad(torch.cumsum(ids >= 0, 0), (1, 0))
    bounds = offsets.clamp(0, ids.shape[0])
    return (cumulative[bounds[1:]] - cumulative[bounds[:-1]]).clamp(min=1).unsqueeze(1)


_WEIGHT, _SAMPLE_WEIGHTS, _GRAD = range(3)  # the factors of F


class _Factors(NamedTuple):
    """Factors of F; a derivative has None for the factor that it is by."""

    weight: Any
    sample_weights: Any
    grad: Any


class _Form(NamedTuple):
    """Rows of the table, and dtypes of the factors."""

    num_rows: int
    weight_dtype: torch.dtype
    sample_dtype: torch.dtype | None
    dtype: torch.dtype


def _differentiable(
    by: int, factors: _Factors, values: Tensor, trained_ids: Tensor | None, bags: Bags, form: _Form
) -> Any:
    """Derivative of F by one factor, which is differentiable in turn."""
    transformed = not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level()
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or transformed):
        return _derivative(by, factors, values, trained_ids, bags, form)
    function = _Derivative if transformed else _EagerDerivative
    return function.apply(by, *factors, values, trained_ids, *bags, *form)


def _derive(by: int, factors: _Factors, values: Tensor, trained_ids: Tensor | None, bags: Bags, form: _Form) -> Tensor:
    """Compute the derivative of F by the factor `by`.

    `trained_ids`: ids for the derivatives of the result, if different from `values`.
    """
    weight, sample_weights, grad = factors
    if by == _GRAD:
        return look_up(weight.contiguous(), values, sample_weights, bags, form.dtype)
    layout = layout_of((BagTable("weight", bags.mean, form.num_rows, grad.shape[1]),), bags.pooled, values.device)
    if by == _SAMPLE_WEIGHTS:
        derive = kernel("sample_weight_gradient", grad.device, (weight.dtype,))
        return derive([weight.contiguous()], values, bags.offsets, grad, layout).to(form.sample_dtype)
    groups = row_groups(values, bags.offsets, layout)
    sum_dtype = torch.promote_types(grad.dtype, torch.float32)
    sums = empty_result((form.num_rows, grad.shape[1]), sum_dtype, grad.device).zero_()
    row_gradients_([sums], BatchGradient(grad, bags.offsets, sample_weights, groups, layout))
    return sums.to(form.weight_dtype)


def _shape(by: int, factors: _Factors, values: Tensor, _: Any, bags: Bags, form: _Form) -> Tensor:
    if by == _SAMPLE_WEIGHTS:
        return values.new_empty(values.shape[0], dtype=form.sample_dtype)
    if by == _WEIGHT:
        return factors.grad.new_empty(form.num_rows, factors.grad.shape[1], dtype=form.weight_dtype)
    return empty_bags(factors.weight, values, bags, form.dtype)


def empty_bags(weight: Tensor, values: Tensor, bags: Bags, dtype: torch.dtype) -> Tensor:
    num_rows = bags.offsets.shape[0] - 1 if bags.pooled else values.shape[0]
    return weight.new_empty(num_rows, weight.shape[1], dtype=dtype)


def sample_weight_gradient(grad: Tensor, weight: Tensor, values: Tensor, bags: Bags, sample_weights: Tensor) -> Any:
    """Gradient of the per-sample weights, `[N]`."""
    form = _Form(weight.shape[0], weight.dtype, sample_weights.dtype, weight.dtype)
    return _derivative(_SAMPLE_WEIGHTS, _Factors(weight, None, grad), values, None, bags, form)


def _save(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.by, factors, values, trained_ids, bags, ctx.form = inputs
    ctx.bags, needs = bags._replace(offsets=None), ctx.needs_input_grad[1:4]
    # Save a factor only if the derivative by another one reads it: else it may be changed in between.
    saved = [factor if any(needs[:i]) or any(needs[i + 1 :]) else None for i, factor in enumerate(factors)]
    ctx.save_for_backward(*saved, values if trained_ids is None else trained_ids, bags.offsets)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    *factors, values, offsets = ctx.saved_tensors
    factors[ctx.by] = grad_output
    bags = ctx.bags._replace(offsets=offsets, checked=False)
    gradients: list[Tensor | None] = []
    for by, needed in enumerate(ctx.needs_input_grad[1:4]):
        operands = _Factors(*[None if factor == by else value for factor, value in enumerate(factors)])
        gradients.append(_differentiable(by, operands, values, None, bags, ctx.form) if needed else None)
    return None, *gradients, *[None] * 10


SHARED_ARGUMENTS["*Bags"] = Bags, "Tensor offsets, bool pooled, bool mean, bool checked"
SHARED_ARGUMENTS["*Factors"] = _Factors, "Tensor? weight, Tensor? sample_weights, Tensor? grad"
SHARED_ARGUMENTS["*Form"] = (
    _Form,
    "SymInt num_rows, ScalarType weight_dtype, ScalarType? sample_dtype, ScalarType dtype",
)
_KINDS = (None, _Factors, None, None, Bags, _Form)
_derivative = define(
    "bag", "(int by, *Factors, Tensor values, Tensor? trained, *Bags, *Form) -> Tensor", _shape, _derive, _backward,
    _save,
)  # fmt: skip


class _Derivative(torch.autograd.Function):
    """Derivative of F by one factor; the derivatives of the result are those by the other factors."""

    backward = staticmethod(_backward)

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return _derivative(*unflatten(inputs, *_KINDS))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, unflatten(inputs, *_KINDS), output)


class _EagerDerivative(torch.autograd.Function):
    """`_Derivative` for calls that are neither transformed nor traced: half the overhead."""

    backward = staticmethod(_backward)

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        arguments = unflatten(inputs, *_KINDS)
        output = _derivative(*arguments)
        _save(ctx, arguments, output)
        return output


class BagTable(NamedTuple):
    """Shape and pooling of a table; its name is for error messages, and seeds its stochastic rounding."""

    name: str
    mean: bool
    num_rows: int
    dim: int


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


def look_up(weight: Tensor, values: Tensor, sample_weights: Tensor | None, bags: Bags, dtype: torch.dtype) -> Any:
    """Run `bag` by the kernel of the tensors' device, without autograd and dispatcher."""
    offsets, pooled, mean, checked = bags
    try:
        copies = not pooled and checked and sample_weights is None and dtype == weight.dtype
        if copies and choose_cached("embedding_bag", values.device, (dtype,)) == CPU:
            out = empty_result((values.shape[0], weight.shape[1]), dtype)
            return torch.index_select(weight.detach(), 0, values, out=out)  # as fast as a kernel of our own
        layout = layout_of((BagTable("weight", mean, *weight.shape),), pooled, values.device)
        read = kernel("embedding_bag", values.device, (weight.dtype,))
        return read([weight], values, offsets, sample_weights, layout, checked, dtype)
    except (ValueError, IndexError) as error:
        ids = values if checked else values[:0]  # padding
        raise as_torch_error(error, ids, weight.shape[0], pooled) from None


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
    layout = layout_of((BagTable("weight", False, num_rows, 1),), True, values.device)
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


def _save_counts(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    _, counts, ctx.limit = inputs
    ctx.save_for_backward(counts)


# Divide the sums of bags `[B, dim]` by `counts` `[B, 1]`; the gradient of the means is clamped to ±`limit` first.
divide_sums = define(
    "divide_sums", "(Tensor sums, Tensor counts, float limit) -> Tensor", lambda sums, *_: torch.empty_like(sums),
    lambda sums, counts, _: sums / counts,
    lambda ctx, grad: {"sums": grad.clamp(-ctx.limit, ctx.limit) / ctx.saved_tensors[0]}, _save_counts,
)  # fmt: skip
# Replace `padding_idx` in `values` `[N]` by -1; offsets as in `Bags`. Raise RuntimeError for an id out of range.
drop_padding = define(
    "drop_padding",
    "(Tensor values, Tensor offsets, int padding_idx, SymInt num_rows) -> Tensor",
    lambda values, *_: torch.empty_like(values),
    _drop_padding,
)
