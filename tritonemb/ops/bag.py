"""One table as an ordinary tensor: looked up, and differentiated as often as one likes.

`F(W, s, g) = Σ_p c_p s_p ⟨W[values_p], g_p⟩` is linear in the table `W`, the per-sample weights `s` and the output's
gradient `g`; `c_p` is 1, or for means one over the bag's length, and `g_p` is the row of `g` that position `p` went to.
The lookup, the gradient of the table and that of the per-sample weights are the derivatives of `F` by `g`, `W` and `s`:
each one's own derivatives are the two others.

An id below zero is a position that takes no part, where ids are not checked (`drop_padding` makes such ids).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb.kernels.layout import SEED, Layout, make_layout
from tritonemb.ops.registry import REFERENCE, choose, kernel, plain_eager
from tritonemb.ops.row_groups import RowGroups
from tritonemb.types import TableConfig, seed_of


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
    weight: Tensor,
    values: Tensor,
    sample_weights: Tensor | None,
    bags: Bags,
    trained: Tensor | None = None,
    sparse: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
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
        return torch.ops.tritonemb.bag(
            weight, values, bags.offsets, sample_weights, trained, bags.pooled, bags.mean, bags.checked, dtype
        )
    transformed = torch._C._functorch.maybe_current_level()
    if not torch.is_grad_enabled() and not transformed:
        return _pool(weight, values, bags.offsets, sample_weights, bags.pooled, bags.mean, bags.checked, dtype)
    apply = _Lookup.apply if transformed else _EagerLookup.apply
    return apply(weight, sample_weights, values, trained, *bags, sparse, dtype)


def serves_sparse(*tensors: Tensor | None) -> bool:
    """Whether `bag` of these can have a sparse gradient: not where it is traced, nor under `torch.func`."""
    return _at_once(*tensors)


def drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    """`values` `[N]` with -1 for those that equal `padding_idx`; offsets as in `Bags`.

    Raises:
        RuntimeError: for an id out of range, as `bag` does.
    """
    run: Callable[..., Tensor] = _drop_padding_now if _at_once(values, offsets) else torch.ops.tritonemb.drop_padding
    return run(values, offsets, padding_idx, num_rows)


class _Lookup(torch.autograd.Function):
    """∂F/∂g."""

    @staticmethod
    def forward(
        weight: Tensor, sample_weights: Tensor | None, values: Tensor, trained: Tensor | None, offsets: Tensor,
        pooled: bool, mean: bool, checked: bool, sparse: bool, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        return _pool(weight, values, offsets, sample_weights, pooled, mean, checked, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, sample_weights, values, trained, offsets, ctx.pooled, ctx.mean, _, ctx.sparse, _ = inputs
        # The table itself only where it is read again: whoever needs it not may change it in between.
        needed = weight if sample_weights is not None and ctx.needs_input_grad[1] else None
        ctx.num_rows, ctx.dtype = weight.shape[0], weight.dtype
        ctx.save_for_backward(needed, sample_weights, values if trained is None else trained, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        weight, sample_weights, values, offsets = ctx.saved_tensors
        bags, by_weight, by_sample_weight = (offsets, ctx.pooled, ctx.mean), None, None
        if ctx.needs_input_grad[0]:
            derive: Any = _SparseGradient if ctx.sparse else _Gradient
            by_weight = derive.apply(grad, sample_weights, values, *bags, ctx.num_rows, ctx.dtype)
        if ctx.needs_input_grad[1]:
            by_sample_weight = _SampleWeightGradient.apply(grad, weight, values, *bags, sample_weights.dtype)
        return by_weight, by_sample_weight, *[None] * 8


class _EagerLookup(torch.autograd.Function):
    """The same, for calls that nothing transforms or traces: half as long to call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        weight, sample_weights, values, _, *rest = inputs
        offsets, pooled, mean, checked, _, dtype = rest
        output = _pool(weight, values, offsets, sample_weights, pooled, mean, checked, dtype)
        _Lookup.setup_context(ctx, inputs, output)
        return output

    backward = _Lookup.backward


class _Gradient(torch.autograd.Function):
    """∂F/∂W, dense."""

    @staticmethod
    def forward(
        grad: Tensor, sample_weights: Tensor | None, values: Tensor, offsets: Tensor, pooled: bool, mean: bool,
        num_rows: int, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        return _gradient(grad, values, offsets, sample_weights, num_rows, pooled, mean, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, sample_weights, values, offsets, ctx.pooled, ctx.mean, _, _ = inputs
        ctx.dtype = grad.dtype
        needed = grad if sample_weights is not None and ctx.needs_input_grad[1] else None
        ctx.save_for_backward(needed, sample_weights, values, offsets)

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:
        grad, sample_weights, values, offsets = ctx.saved_tensors
        bags, by_grad, by_sample_weight = (offsets, ctx.pooled, ctx.mean), None, None
        if ctx.needs_input_grad[0]:
            by_grad = _Lookup.apply(weight.contiguous(), sample_weights, values, None, *bags, False, False, ctx.dtype)
        if ctx.needs_input_grad[1]:
            by_sample_weight = _SampleWeightGradient.apply(grad, weight, values, *bags, sample_weights.dtype)
        return by_grad, by_sample_weight, *[None] * 6


class _SparseGradient(torch.autograd.Function):
    """∂F/∂W, sparse."""

    @staticmethod
    def forward(
        grad: Tensor, sample_weights: Tensor | None, values: Tensor, offsets: Tensor, pooled: bool, mean: bool,
        num_rows: int, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        return _sparse_gradient(grad, values, offsets, sample_weights, num_rows, pooled, mean, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:
        raise RuntimeError("a sparse gradient cannot be differentiated again; make the embedding with sparse=False")


class _SampleWeightGradient(torch.autograd.Function):
    """∂F/∂s."""

    @staticmethod
    def forward(
        grad: Tensor, weight: Tensor, values: Tensor, offsets: Tensor, pooled: bool, mean: bool, dtype: torch.dtype
    ) -> Tensor:
        return _sample_weight_gradient(grad, weight, values, offsets, pooled, mean, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, weight, values, offsets, ctx.pooled, ctx.mean, _ = inputs
        ctx.save_for_backward(grad, weight, values, offsets)

    @staticmethod
    def backward(ctx: Any, sample_weights: Tensor) -> tuple[Any, ...]:
        grad, weight, values, offsets = ctx.saved_tensors
        bags, by_grad, by_weight = (offsets, ctx.pooled, ctx.mean), None, None
        if ctx.needs_input_grad[0]:
            by_grad = _Lookup.apply(weight, sample_weights, values, None, *bags, False, False, grad.dtype)
        if ctx.needs_input_grad[1]:
            by_weight = _Gradient.apply(grad, sample_weights, values, *bags, weight.shape[0], weight.dtype)
        return by_grad, by_weight, *[None] * 5


def _at_once(*tensors: Tensor | None) -> bool:
    """Whether kernels may be called without the dispatcher."""
    return plain_eager(*tensors) and all(tensor is None or not tensor.is_meta for tensor in tensors)


def _pool(
    weight: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, pooled: bool, mean: bool,
    checked: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if _at_once(weight, values, offsets, sample_weights):
        return look_up(weight, values, offsets, sample_weights, pooled, mean, checked, dtype)
    return torch.ops.tritonemb.bag(weight, values, offsets, sample_weights, None, pooled, mean, checked, dtype)


def _gradient(
    grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, num_rows: int, pooled: bool,
    mean: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    now = _at_once(grad, values, offsets, sample_weights)
    run: Callable[..., Tensor] = _gradient_now if now else torch.ops.tritonemb.bag_gradient
    return run(grad, values, offsets, sample_weights, num_rows, pooled, mean, dtype)


def _sample_weight_gradient(
    grad: Tensor, weight: Tensor, values: Tensor, offsets: Tensor, pooled: bool, mean: bool, dtype: torch.dtype
) -> Tensor:
    now = _at_once(grad, weight, values, offsets)
    run: Callable[..., Tensor] = derive_sample_weights if now else torch.ops.tritonemb.bag_sample_weight_gradient
    return run(grad, weight, values, offsets, pooled, mean, dtype)


class BagTable(NamedTuple):
    """A table as its lookups see it, and a name for error messages, which also seeds its stochastic rounding."""

    num_rows: int
    dim: int
    mean: bool = False
    name: str = "weight"


@functools.lru_cache(maxsize=1024)
def layout_of(tables: tuple[BagTable, ...], pooled: bool, device: torch.device) -> Layout:
    """Of one key for each table; kept, so that nothing is sent to the device again."""
    configs = [
        TableConfig(f"{place}", table.num_rows, table.dim, pooling="mean" if table.mean else "sum")
        for place, table in enumerate(tables)
    ]
    names = "\n".join(table.name for table in tables)
    with torch.inference_mode(False):
        layout = make_layout(configs, [config.name for config in configs], pooled)
        layout.tables[:, SEED] = torch.tensor([seed_of(table.name) for table in tables])
        return layout._replace(
            tables=layout.tables.to(device),
            lookups=layout.lookups.to(device),
            key_starts=layout.key_starts.to(device),
            table_names=names,
            feature_names=names,
        )


def _layout(weight_shape: tuple[int, ...], pooled: bool, mean: bool, device: torch.device) -> Layout:
    num_rows, dim = weight_shape
    return layout_of((BagTable(num_rows, dim, mean),), pooled, device)


def look_up(
    weight: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, pooled: bool, mean: bool,
    checked: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    layout = _layout(weight.shape, pooled, mean, values.device)
    look_up, serving = (
        kernel("embedding_bag", values.device, [weight]),
        choose("embedding_bag", values.device, [weight]),
    )
    if serving == REFERENCE:
        _check_offsets(values, offsets)
    try:
        if serving == "cpu" and not pooled and checked and sample_weights is None and dtype == weight.dtype:
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


def _drop_padding_now(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    layout = _layout((num_rows, 1), True, False, values.device)
    try:
        return kernel("drop_padding", values.device)(values, offsets, padding_idx, layout)
    except ValueError as error:
        raise explained(error, values, num_rows, True) from None


def _grouped(
    grad: Tensor, values: Tensor, offsets: Tensor, num_rows: int, pooled: bool, mean: bool
) -> tuple[RowGroups, Layout]:
    if values.shape[0] >= 2**31:
        raise ValueError(f"one call may look up at most {2**31 - 1} ids, got {values.shape[0]}")
    layout = _layout((num_rows, grad.shape[1]), pooled, mean, values.device)
    return RowGroups(*kernel("row_groups", values.device)(values, offsets, layout)), layout


def _zeros(grad: Tensor, num_rows: int) -> Tensor:
    """What sums are written into."""
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return grad.new_zeros(num_rows, grad.shape[1], dtype=dtype)


def _gradient_now(
    grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, num_rows: int, pooled: bool,
    mean: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    groups, layout = _grouped(grad, values, offsets, num_rows, pooled, mean)
    out = _zeros(grad, num_rows)
    kernel("bag_gradient_", out.device, [out])(out, grad, offsets, sample_weights, groups, layout, False)
    return out.to(dtype)


def _sparse_gradient(
    grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, num_rows: int, pooled: bool,
    mean: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The gradient of a table as a sparse COO tensor `[num_rows, dim]`, rows ascending.

    On the CPU it is coalesced: one entry for each distinct row. On a GPU nobody may wait for the number of distinct
    rows, so there are as many entries as values; those behind the last distinct row repeat it, with zeros.
    """
    groups, layout = _grouped(grad, values, offsets, num_rows, pooled, mean)
    exact = grad.device.type == "cpu"
    count = int(groups.num_groups) if exact else values.shape[0]
    out = _zeros(grad, count)
    kernel("bag_gradient_", out.device, [out])(out, grad, offsets, sample_weights, groups, layout, True)
    rows = groups.rows[:count].clone() if exact else places_of(groups)
    shape = (num_rows, grad.shape[1])
    return torch.sparse_coo_tensor(rows.unsqueeze(0), out.to(dtype), shape, check_invariants=False, is_coalesced=exact)


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
    layout = _layout(weight.shape, pooled, mean, values.device)
    dots = kernel("sample_weight_gradient", grad.device, [weight])
    return dots([weight.contiguous()], values, offsets, grad, layout).to(dtype)


_BATCH = "Tensor values, Tensor offsets, Tensor? sample_weights"


@torch.library.custom_op(
    "tritonemb::bag",
    mutates_args=(),
    schema=f"(Tensor weight, {_BATCH}, Tensor? trained, bool pooled, bool mean, bool checked, ScalarType dtype) "
    "-> Tensor",
)
def _bag(
    weight: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, trained: Tensor | None,
    pooled: bool, mean: bool, checked: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return look_up(weight, values, offsets, sample_weights, pooled, mean, checked, dtype)


@_bag.register_fake
def _(
    weight: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, trained: Tensor | None,
    pooled: bool, mean: bool, checked: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return empty_output(weight, values, offsets, pooled, dtype)


def empty_output(weight: Tensor, values: Tensor, offsets: Tensor, pooled: bool, dtype: torch.dtype) -> Tensor:
    """The shape of a lookup's result."""
    num_rows = offsets.shape[0] - 1 if pooled else values.shape[0]
    return weight.new_empty(num_rows, weight.shape[1], dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, values, offsets, sample_weights, trained, ctx.pooled, ctx.mean, _, _ = inputs
    ctx.num_rows, ctx.dtype = weight.shape[0], weight.dtype
    needed = weight if sample_weights is not None and ctx.needs_input_grad[3] else None
    ctx.save_for_backward(needed, values if trained is None else trained, offsets, sample_weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """As that of `_Lookup`, for what is traced: once differentiable."""
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


@torch.library.custom_op("tritonemb::drop_padding", mutates_args=())
def _drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    return _drop_padding_now(values, offsets, padding_idx, num_rows)


@_drop_padding.register_fake
def _(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    return torch.empty_like(values)


@torch.library.custom_op(
    "tritonemb::bag_gradient",
    mutates_args=(),
    schema=f"(Tensor grad, {_BATCH}, SymInt num_rows, bool pooled, bool mean, ScalarType dtype) -> Tensor",
)
def _bag_gradient(
    grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, num_rows: int, pooled: bool,
    mean: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return _gradient_now(grad, values, offsets, sample_weights, num_rows, pooled, mean, dtype)


@_bag_gradient.register_fake
def _(
    grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, num_rows: int, pooled: bool,
    mean: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return grad.new_empty(num_rows, grad.shape[1], dtype=dtype)


@torch.library.custom_op(
    "tritonemb::bag_sample_weight_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor weight, Tensor values, Tensor offsets, bool pooled, bool mean, ScalarType dtype) "
    "-> Tensor",
)
def _bag_sample_weight_gradient(
    grad: Tensor, weight: Tensor, values: Tensor, offsets: Tensor, pooled: bool, mean: bool, dtype: torch.dtype
) -> Tensor:
    return derive_sample_weights(grad, weight, values, offsets, pooled, mean, dtype)


@_bag_sample_weight_gradient.register_fake
def _(
    grad: Tensor, weight: Tensor, values: Tensor, offsets: Tensor, pooled: bool, mean: bool, dtype: torch.dtype
) -> Tensor:
    return values.new_empty(values.shape[0], dtype=dtype)
