"""PyTorch's embedding modules and ours side by side: the same weights, the same calls, results compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonemb as te
from tests.helpers import fewer

# Sums of at most a few dozen normal numbers in float32, added in another order: their rounding errors are below
# 50 · 2^-24 of the sum of their magnitudes, which is below 100.
TOLERANCE = {"rtol": 1e-5, "atol": 3e-5}
IDS = torch.int64, torch.int32
BAG, ROW = (nn.EmbeddingBag, te.nn.EmbeddingBag), (nn.Embedding, te.nn.Embedding)


def twins(kinds: tuple[type, type], *args: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """PyTorch's module and ours, made alike, with the same normal weights."""
    torch.manual_seed(1)
    reference = kinds[0](*args, **options)
    fused = kinds[1](*args, **options)
    fused.load_state_dict(reference.state_dict())
    return reference, fused


def dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


def compare(theirs: nn.Module, ours: nn.Module, *args: Any, weights: Tensor | None = None) -> Tensor:
    """Call both on `args` with per-sample weights; outputs, gradients and weights must agree. Returns our output."""
    results = []
    for module in (theirs, ours):
        module.zero_grad()
        inputs = None if weights is None else weights.detach().clone().requires_grad_()
        options = {} if inputs is None else {"per_sample_weights": inputs}
        output = module(*args, **options)
        generator = torch.Generator().manual_seed(2)
        output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
        results.append((output, module.weight.grad, None if inputs is None else inputs.grad))
    (output, gradient, by_weights), (ours_output, ours_gradient, ours_by_weights) = results
    assert ours_output.dtype == output.dtype
    assert ours_gradient.layout == gradient.layout
    assert ours_gradient.dtype == gradient.dtype
    torch.testing.assert_close(ours_output, output, **TOLERANCE)
    torch.testing.assert_close(dense(ours_gradient), dense(gradient), **TOLERANCE)
    if weights is not None:
        torch.testing.assert_close(ours_by_weights, by_weights, **TOLERANCE)
    assert torch.equal(theirs.weight, ours.weight)  # max_norm is PyTorch's own
    return ours_output


def assert_same_error(*calls: Callable[[], object]) -> None:
    """All calls raise, and exceptions of the same type."""
    kinds = []
    for call in calls:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        kinds.append(caught.type)
        assert str(caught.value)
    assert len(set(kinds)) == 1, kinds


def random_ids(*shape: int, rows: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> Tensor:
    """Half of them among the first three rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, rows, shape, generator=generator)
    few = torch.randint(0, min(3, rows), shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, ids, few).to(dtype)


def random_bags(sizes: list[int], rows: int, dtype: torch.dtype, last: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids `[N]` and offsets `[B]`, or with `last` `[B + 1]`."""
    ends = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
    ids = random_ids(int(ends[-1]), rows=rows, dtype=dtype, seed=seed)
    return ids, (ends if last else ends[:-1]).to(dtype)


few_examples = fewer(60, 5)
