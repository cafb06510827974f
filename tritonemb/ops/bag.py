"""One table as an ordinary tensor: looked up, and differentiated as often as one likes.

`F(W, s, g) = Σ_p c_p s_p ⟨W[values_p], g_p⟩` is linear in the table `W`, the per-sample weights `s` and the output's
gradient `g`; `c_p` is 1, or for means one over the bag's length, and `g_p` is the row of `g` that position `p` went to.
The lookup, the gradient of the table and that of the per-sample weights are the derivatives of `F` by `g`, `W` and `s`:
each one's own derivatives are the two others. As ops they are differentiable once, and serve what is traced.

An id below zero is a position that takes no part, where ids are not checked (`drop_padding` makes such ids).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb.layout import MEAN, SUM, Layout, TableRow, lay_out
from tritonemb.ops.registry import BATCH, CPU, REFERENCE, chosen, define, kernel
from tritonemb.ops.row_groups import RowGroups, plain_eager
from tritonemb.ops.row_update import row_gradients_
from tritonemb.types import seed_of


class Bags(NamedTuple):
    """The ids of a batch, but for the ids themselves.

    Attributes:
        offsets: int `[B + 1]`, from 0 to the number of values `N`; `[0, N]` if not pooled.
        pooled: a row of output for each bag, or for each value.
        mean: of a bag, instead of its sum.
        checked: an id out of range raises; else it reads as zero and has no gradient.
    """

    offsets: Tensor
    pooled: bool
    mean: bool = False
    checked: bool = True


def bag(
    weight: Tensor, values: Tensor, sample_weights: Tensor | None, bags: Bags, trained: Tensor | None = None,
    sparse: bool = False, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Look `values` up; differentiable in `weight` and `sample_weights`.

    Args:
        weight: `[rows, dim]`, contiguous; float32, float16, bfloat16 or float64.
        values: int32 or int64 `[N]`.
        sample_weights: floating point `[N]`, or None for ones.
        trained: ids `[N]` that the gradient goes to, if others than `values`; -1 for none.
        sparse: the gradient of `weight` is a sparse COO tensor, coalesced on the CPU; it cannot be differentiated
            again. Only where `serves_sparse`.
        dtype: of the result; the weight's if None.

    Returns:
        `[B, dim]`, or `[N, dim]` if not pooled. Sums are float32, or float64 for a float64 table.

    Raises:
        RuntimeError: for an id out of range or offsets that do not fit; IndexError if not pooled. On the CPU at once;
            on a GPU as a ValueError by the next lookup, or by `te.check_errors`.
    """
    dtype, trained = dtype or weight.dtype, None if trained is values else trained
    if torch.compiler.is_compiling():
        return torch.ops.tritonemb.bag(weight, values, bags.offsets, sample_weights, trained, *bags[1:], dtype)
    transformed = torch._C._functorch.maybe_current_level()
    if not torch.is_grad_enabled() and not transformed:
        return _run("bag", look_up, weight, values, bags.offsets, sample_weights, None, *bags[1:], dtype)
    sample_dtype = None if sample_weights is None else sample_weights.dtype
    form = _Form(bags.pooled, bags.mean, bags.checked, sparse, weight.shape[0], (weight.dtype, sample_dtype, dtype))
    apply = _Derivative.apply if transformed else _EagerDerivative.apply
    return apply(_GRAD, form, weight, sample_weights, None, values, trained, bags.offsets)


def serves_sparse(*tensors: Tensor | None) -> bool:
    """Whether `bag` of these can have a sparse gradient: not where it is traced, nor under `torch.func`."""
    return plain_eager(*tensors) and all(tensor is None or not tensor.is_meta for tensor in tensors)


def drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    """`values` `[N]` with -1 for those that equal `padding_idx`; offsets as in `Bags`.

    Raises:
        RuntimeError: for an id out of range, as `bag` does.
    """
    return _run("drop_padding", _drop_padding, values, offsets, padding_idx, num_rows)


def kept_counts(kept: Tensor, offsets: Tensor) -> Tensor:
    """`[B, 1]`: how many of a bag's ids, from `drop_padding`, are not padding, at least 1."""
    before = torch.nn.functional.pad(torch.cumsum(kept >= 0, 0), (1, 0))
    ends = offsets.clamp(0, kept.shape[0])
    return (before[ends[1:]] - before[ends[:-1]]).clamp(min=1).unsqueeze(1)


def _run(op: str, run: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call kernels without the dispatcher where that may be; the first arguments, up to four, are tensors."""
    tensors = args[: 2 if op == "drop_padding" else 4]
    return run(*args) if serves_sparse(*tensors) else getattr(torch.ops.tritonemb, op)(*args)


_WEIGHT, _SAMPLE_WEIGHTS, _GRAD = range(3)  # the factors of F


class _Form(NamedTuple):
    """All of F but its factors, ids and offsets; `checked` of the lookup, `sparse` of its gradient."""

    pooled: bool
    mean: bool
    checked: bool
    sparse: bool
    num_rows: int
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype]  # of the factors

    def derive(
        self, by: int, weight: Any, sample_weights: Tensor | None, grad: Any, values: Tensor, offsets: Tensor
    ) -> Tensor:
        """The derivative by one factor, of which there is none."""
        pooled, mean, dtype = self.pooled, self.mean, self.dtypes[by]
        args: Any
        if by == _GRAD:
            args = weight.contiguous(), values, offsets, sample_weights, None, pooled, mean, self.checked, dtype
            return _run("bag", look_up, *args)
        if by == _SAMPLE_WEIGHTS:
            args = grad, weight, values, offsets, pooled, mean, dtype
            return _run("bag_sample_weight_gradient", derive_sample_weights, *args)
        batch = values, offsets, sample_weights
        if self.sparse:
            return derive_weight(grad, *batch, self.num_rows, pooled, mean, self.dtypes[0], sparse=True)
        return _run("bag_gradient", derive_weight, grad, *batch, self.num_rows, pooled, mean, dtype)


class _Derivative(torch.autograd.Function):
    """The derivative of F by one factor; its own derivatives are those by the others."""

    @staticmethod
    def forward(
        by: int, form: _Form, weight: Tensor | None, sample_weights: Tensor | None, grad: Tensor | None,
        values: Tensor, trained: Tensor | None, offsets: Tensor,
    ) -> Tensor:  # fmt: skip
        return form.derive(by, weight, sample_weights, grad, values, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.by, ctx.form, *factors, values, trained, offsets = inputs
        needs = ctx.needs_input_grad[2:5]
        # A factor only where it is read again: if it is not, it may be changed in between.
        read_again = [any(needs[:own]) or any(needs[own + 1 :]) for own in range(3)]
        kept = [factor if again else None for factor, again in zip(factors, read_again, strict=True)]
        ctx.save_for_backward(*kept, values if trained is None else trained, offsets)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Any, ...]:
        *factors, values, offsets = ctx.saved_tensors
        if ctx.by == _WEIGHT and ctx.form.sparse:
            raise RuntimeError("a sparse gradient cannot be differentiated again; make the embedding with sparse=False")
        factors[ctx.by] = given
        found: list[Tensor | None] = []
        form = ctx.form._replace(checked=False, sparse=ctx.form.sparse and ctx.by == _GRAD)
        for by, needed in enumerate(ctx.needs_input_grad[2:5]):
            others = [None if factor == by else value for factor, value in enumerate(factors)]
            if not needed:
                found.append(None)
            elif torch.is_grad_enabled() or torch._C._functorch.maybe_current_level():
                found.append(_Derivative.apply(by, form, *others, values, None, offsets))
            else:
                found.append(form.derive(by, *others, values, offsets))
        return None, None, *found, None, None, None


class _EagerDerivative(torch.autograd.Function):
    """The same, for calls that nothing transforms or traces: half as long to call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _Derivative.forward(*inputs)
        _Derivative.setup_context(ctx, inputs, output)
        return output

    backward = _Derivative.backward


class BagTable(NamedTuple):
    """A table as its lookups see it, and a name for error messages, which also seeds its stochastic rounding."""

    num_rows: int
    dim: int
    mean: bool = False
    name: str = "weight"

    @classmethod
    def of(cls, weight: Tensor, mean: bool = False, name: str = "weight") -> BagTable:
        """The table that holds `weight` `[rows, dim]`."""
        num_rows, dim = weight.shape
        return cls(num_rows, dim, mean, name)


@functools.lru_cache(maxsize=1024)
def layout_of(tables: tuple[BagTable, ...], pooled: bool, device: torch.device) -> Layout:
    """Of one key for each table; kept, so that nothing is sent to the device again."""
    rows = [TableRow(0, table.num_rows, table.dim, seed_of(table.name)) for table in tables]
    columns = [0, *accumulate(table.dim for table in tables)] if pooled else [0] * len(tables)
    uses = [
        [(place, column, table.dim, MEAN if table.mean else SUM)]
        for place, (column, table) in enumerate(zip(columns, tables, strict=False))
    ]
    names = [table.name for table in tables]
    with torch.inference_mode(False):
        return lay_out(rows, uses, names, names, pooled, device)


def look_up(
    weight: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, trained: Tensor | None,
    pooled: bool, mean: bool, checked: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`bag` by the kernels of the tensors' device: no autograd, no dispatcher."""
    layout = layout_of((BagTable.of(weight, mean),), pooled, values.device)
    look_up = kernel("embedding_bag", values.device, (weight.dtype,))
    serving = chosen("embedding_bag", values.device, (weight.dtype,))
    if serving == REFERENCE:
        _check_offsets(values, offsets)
    try:
        if serving == CPU and not pooled and checked and sample_weights is None and dtype == weight.dtype:
            return weight.index_select(0, values)  # rows as they are: PyTorch copies them as well as anyone
        return look_up([weight], values, offsets, sample_weights, layout, checked, dtype)
    except (ValueError, IndexError) as error:
        raise explained(error, values, weight.shape[0], pooled) from None


def _check_offsets(values: Tensor, offsets: Tensor) -> None:
    """What a reference takes for granted, and kernels find out by themselves."""
    first, last, num_values = int(offsets[0]), int(offsets[-1]), values.shape[0]
    if first != 0 or last != num_values or bool((offsets.diff() < 0).any()):
        raise RuntimeError(f"offsets must ascend from 0 to {num_values}, the number of ids; got {first} to {last}")


def explained(error: Exception, values: Tensor, num_rows: int, pooled: bool) -> Exception:
    """What a CPU kernel found wrong with a batch, as the exception that PyTorch's module raises for it.

    On a GPU the finding may be another module's, and stays as it is.
    """
    if values.device.type != "cpu":
        return error
    kind = RuntimeError if pooled else IndexError
    bad = ((values < 0) | (values >= num_rows)).nonzero()
    if not bad.numel():
        return kind(str(error))
    place = int(bad[0])
    return kind(f"input[{place}] is {int(values[place])}, which is out of range; valid ids are 0 to {num_rows - 1}")


def _drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    layout = layout_of((BagTable(num_rows, 1),), True, values.device)
    try:
        return kernel("drop_padding", values.device)(values, offsets, padding_idx, layout)
    except ValueError as error:
        raise explained(error, values, num_rows, True) from None


def derive_weight(
    grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, num_rows: int, pooled: bool,
    mean: bool, dtype: torch.dtype, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """The gradient of a table, `[num_rows, dim]`; or as a sparse COO tensor, rows ascending.

    On the CPU the latter is coalesced: one entry for each distinct row. On a GPU nobody may wait for the number of
    distinct rows, so there are as many entries as values; those behind the last distinct row repeat it, with zeros.
    """
    if values.shape[0] >= 2**31:
        raise ValueError(f"one call may look up at most {2**31 - 1} ids, got {values.shape[0]}")
    layout = layout_of((BagTable(num_rows, grad.shape[1], mean),), pooled, values.device)
    groups = RowGroups(*kernel("row_groups", values.device)(values, offsets, layout))
    exact = grad.device.type == "cpu"
    count = num_rows if not sparse else int(groups.num_groups) if exact else values.shape[0]
    sum_dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    sums = grad.new_zeros(count, grad.shape[1], dtype=sum_dtype)
    row_gradients_([sums], grad, offsets, sample_weights, groups, layout, compact=sparse)
    if not sparse:
        return sums.to(dtype)
    rows = groups.rows[:count].clone() if exact else places_of(groups)
    shape = (num_rows, grad.shape[1])
    return torch.sparse_coo_tensor(rows.unsqueeze(0), sums.to(dtype), shape, check_invariants=False, is_coalesced=exact)


def places_of(groups: RowGroups) -> Tensor:
    """int64 `[N]`: the distinct rows, then the last of them again and again; row 0 if there is none."""
    rows = groups.rows
    if rows.numel() == 0:
        return rows
    behind = torch.arange(rows.numel(), device=rows.device) >= groups.num_groups
    return rows.minimum(rows.masked_fill(behind, 0).amax())


def derive_sample_weights(
    grad: Tensor, weight: Tensor, values: Tensor, offsets: Tensor, pooled: bool, mean: bool, dtype: torch.dtype
) -> Tensor:
    """The gradient of the per-sample weights, `[N]`."""
    layout = layout_of((BagTable.of(weight, mean),), pooled, values.device)
    dots = kernel("sample_weight_gradient", grad.device, (weight.dtype,))
    return dots([weight.contiguous()], values, offsets, grad, layout).to(dtype)


def empty_bags(weight: Tensor, values: Tensor, offsets: Tensor, _s: Any, _t: Any, pooled: bool, *rest: Any) -> Tensor:
    return weight.new_empty(offsets.shape[0] - 1 if pooled else values.shape[0], weight.shape[1], dtype=rest[-1])


BAGS = "Tensor? trained, bool pooled, bool mean, bool checked, ScalarType dtype"
_bag = define("bag", f"(Tensor weight, {BATCH}, {BAGS}) -> Tensor", look_up, empty_bags)
define(
    "drop_padding",
    "(Tensor values, Tensor offsets, int padding_idx, SymInt num_rows) -> Tensor",
    _drop_padding,
    lambda values, *_: torch.empty_like(values),
)
define(
    "bag_gradient",
    f"(Tensor grad, {BATCH}, SymInt num_rows, bool pooled, bool mean, ScalarType dtype) -> Tensor",
    derive_weight,
    lambda grad, _v, _o, _s, num_rows, _p, _m, dtype: grad.new_empty(num_rows, grad.shape[1], dtype=dtype),
)
define(
    "bag_sample_weight_gradient",
    "(Tensor grad, Tensor weight, Tensor values, Tensor offsets, bool pooled, bool mean, ScalarType dtype) -> Tensor",
    derive_sample_weights,
    lambda _g, _w, values, _o, _p, _m, dtype: values.new_empty(values.shape[0], dtype=dtype),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, values, offsets, sample_weights, trained, ctx.pooled, ctx.mean, _, _ = inputs
    ctx.num_rows, ctx.dtype = weight.shape[0], weight.dtype
    needed = weight if sample_weights is not None and ctx.needs_input_grad[3] else None
    ctx.save_for_backward(needed, values if trained is None else trained, offsets, sample_weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """As of `_Derivative`, but differentiable once."""
    weight, values, offsets, sample_weights = ctx.saved_tensors
    ops, by_weight, by_sample_weight = torch.ops.tritonemb, None, None
    if ctx.needs_input_grad[0]:
        by_weight = ops.bag_gradient(
            grad, values, offsets, sample_weights, ctx.num_rows, ctx.pooled, ctx.mean, ctx.dtype
        )
    if weight is not None:
        by_sample_weight = ops.bag_sample_weight_gradient(
            grad, weight, values, offsets, ctx.pooled, ctx.mean, sample_weights.dtype
        )
    return by_weight, None, None, by_sample_weight, *[None] * 5


_bag.register_autograd(_backward, setup_context=_save)
