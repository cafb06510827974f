"""One table as an ordinary tensor: looked up, and differentiated as often as one likes.

`F(W, s, g) = Σ_p c_p s_p ⟨W[values_p], g_p⟩` is linear in the table `W`, the per-sample weights `s` and the output's
gradient `g`; `c_p` is 1, or for means one over the bag's length, and `g_p` is the row of `g` that position `p` went to.
The lookup, the gradient of the table and that of the per-sample weights are the derivatives of `F` by `g`, `W` and `s`:
each one's own derivatives are the two others.

An id below zero is a position that takes no part, where ids are not checked (`drop_padding` makes such ids).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tritonemb.ops.bag_ops  # noqa: F401  it registers what is called where something is traced
from tritonemb.ops import bag_kernels
from tritonemb.ops.registry import plain_eager


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
    now = _at_once(values, offsets)
    run: Callable[..., Tensor] = bag_kernels.drop_padding if now else torch.ops.tritonemb.drop_padding
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
        return bag_kernels.derive_weight_sparsely(grad, values, offsets, sample_weights, num_rows, pooled, mean, dtype)

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
        return bag_kernels.look_up(weight, values, offsets, sample_weights, pooled, mean, checked, dtype)
    return torch.ops.tritonemb.bag(weight, values, offsets, sample_weights, None, pooled, mean, checked, dtype)


def _gradient(
    grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, num_rows: int, pooled: bool,
    mean: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    now = _at_once(grad, values, offsets, sample_weights)
    run: Callable[..., Tensor] = bag_kernels.derive_weight if now else torch.ops.tritonemb.bag_gradient
    return run(grad, values, offsets, sample_weights, num_rows, pooled, mean, dtype)


def _sample_weight_gradient(
    grad: Tensor, weight: Tensor, values: Tensor, offsets: Tensor, pooled: bool, mean: bool, dtype: torch.dtype
) -> Tensor:
    now = _at_once(grad, weight, values, offsets)
    run: Callable[..., Tensor] = (
        bag_kernels.derive_sample_weights if now else torch.ops.tritonemb.bag_sample_weight_gradient
    )
    return run(grad, weight, values, offsets, pooled, mean, dtype)
