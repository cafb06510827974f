"""Fused optimizer of several modules: their tables are updated in one call at the end of each backward pass.

Each module of a model has its own lookup. Once a backward pass has computed all gradients, all ids are grouped and all
tables updated in one launch. A table that was looked up several times is updated once, by the sum of its gradients, as
by PyTorch's optimizers.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import Any, get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.errors import gradient_not_finite
from tritonemb.ops.bag import Bags, BagTable, layout_of, single_bag_offsets
from tritonemb.ops.row_update import join_tables
from tritonemb.optimizers import Hyperparameters, NonFinite, Optimizer
from tritonemb.tables.optimizer import OptimizedTables


class _PassGradients(list[ops.BagGradient]):
    """Gradients of one backward pass; unlike a list it can be weakly referenced."""


class FusedGroup(OptimizedTables):
    """Optimizer of the tables of several modules, with gradients that are not applied yet."""

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer, by_step: bool = False) -> None:
        super().__init__(optimizer, by_step)
        self._rates: dict[torch.device, Tensor] = {}
        self._reset_passes()

    def _reset_passes(self) -> None:
        # By autograd graph task. A failed pass drops its callback, and with it its gradients.
        self._open_passes: WeakValueDictionary[int, _PassGradients] = WeakValueDictionary()
        self._lock = threading.Lock()

    def rates(self) -> Iterable[Tensor]:
        return self._rates.values()

    def rate_on(self, device: torch.device) -> Tensor:
        """Return the learning rate on a device, float32 `[]`: one tensor, created before a lookup is traced."""
        if (rate := self._rates.get(device)) is None:
            assert not torch.compiler.is_compiling(), "a traced graph would keep the learning rate of its first call"
            with torch.inference_mode(False):
                rate = torch.tensor(self.current_learning_rate, dtype=torch.float32, device=device)
            self._rates[device] = rate
        return rate

    def add(self, gradient: ops.BagGradient) -> None:
        """Queue a gradient; the table is updated when this backward pass ends."""
        self._current_pass().append(gradient)

    @property
    def receiver(self) -> Callable[[ops.BagGradient], None]:
        """Callback that takes the gradient of a lookup made now.

        A lookup within a backward pass, as of a reentrant checkpoint, has a nested backward. Its gradient belongs to
        the outer pass, so that tables are updated once, at the end of that.
        """
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:
            return self.add
        return self._current_pass().append

    def _current_pass(self) -> _PassGradients:
        task = torch._C._current_graph_task_id()
        with self._lock:
            if (gradients := self._open_passes.get(task)) is None:
                gradients = self._open_passes[task] = _PassGradients()
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(self._finish, gradients))
        return gradients

    def _finish(self, gradients: _PassGradients) -> None:
        if self.accumulator.is_open:
            self.accumulator.gradients += [_clone(gradient) for gradient in gradients]
        else:
            update(gradients)

    def apply(self) -> None:
        """Update the tables by all accumulated gradients in one step."""
        update(self.accumulator.pop_all())

    def accumulate(self) -> AbstractContextManager[None]:
        """Accumulate gradients in the block. A compiled module or a nested block in it raises RuntimeError."""
        if self.by_step:
            raise RuntimeError('with update="step" gradients are accumulated until step(); leave out accumulate()')
        return self.accumulator.open(update, self._rates.values())

    def __getstate__(self) -> dict[str, Any]:
        """Exclude gradients that are not applied yet."""
        return {name: value for name, value in super().__getstate__().items() if name not in ("_open_passes", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rates = {rate.device: rate for rate in self._rates.values()}  # it may be loaded onto another device
        self._reset_passes()


def _clone(gradient: ops.BagGradient) -> ops.BagGradient:
    """Copy a gradient: the batch's buffers may be reused, and it may be the `grad` of a parameter."""
    weights, bags = gradient.sample_weights, gradient.bags
    return gradient._replace(
        values=gradient.values.clone(),
        sample_weights=None if weights is None else weights.detach().clone(),
        bags=bags._replace(offsets=bags.offsets.clone()),
        grad=gradient.grad.clone(),
    )


@torch.no_grad()
def update(gradients: list[ops.BagGradient]) -> None:
    """Update each table once; tables with the same number of bags, or of columns if not pooled, share a call."""
    # Sum the gradients of several lookups of a table.
    by_table: dict[int, list[ops.BagGradient]] = {}
    for gradient in gradients:
        by_table.setdefault(id(gradient.table.weights[0]), []).append(gradient)
    batches: dict[tuple[Any, ...], list[ops.BagGradient]] = {}
    for table_gradients in by_table.values():
        gradient = _merge(table_gradients)
        size = gradient.grad.shape[0] if gradient.bags.pooled else gradient.grad.shape[1]
        key = gradient.grad.device, gradient.bags.pooled, size, gradient.table.learning_rate.data_ptr()
        batches.setdefault(key, []).append(gradient)
    # Check all batches before the first update changes a table.
    if len(batches) > 1:
        _check_finite([gradient for batch in batches.values() for gradient in batch])
    for batch in batches.values():
        _update(batch)


def _check_finite(gradients: list[ops.BagGradient]) -> None:
    """Raise for `on_nonfinite="raise"` and a non-finite gradient on the CPU; on a GPU each update checks its own."""
    for table, name, values, _, bags, grad in gradients:
        raises = get_args(NonFinite)[int(Hyperparameters(*table.hyperparameters).on_nonfinite)] == "raise"
        if not raises or grad.device.type != "cpu" or bool(grad.isfinite().all()):
            continue
        by_position = ~grad.isfinite().all(1)
        if bags.pooled:
            by_position = by_position[torch.repeat_interleave(bags.offsets.diff(), output_size=values.shape[0])]
        rows = values[by_position & (values >= 0)]
        if rows.numel():
            raise gradient_not_finite(name, int(rows.min()))


def _update(gradients: list[ops.BagGradient]) -> None:
    """Update tables, one gradient each, in one call of `ops.row_update_`."""
    first = gradients[0]
    pooled, device = first.bags.pooled, first.grad.device
    bag_tables = tuple(BagTable(g.name, g.bags.mean, *g.table.weights[0].shape) for g in gradients)
    layout = layout_of(bag_tables, pooled, device)
    values, offsets = _concat_ids(gradients)
    grads = [gradient.grad for gradient in gradients]
    tables = first.table if len(gradients) == 1 else join_tables([gradient.table for gradient in gradients])
    grad = grads[0] if len(grads) == 1 else grads
    ops.row_update_(tables, ops.BatchGradient(grad, offsets, _concat_sample_weights(gradients), values, layout))


def _concat_ids(gradients: list[ops.BagGradient]) -> tuple[Tensor, Tensor]:
    """Concatenate the ids of K lookups; return them with offsets `[K * B + 1]`."""
    if len(gradients) == 1:
        return gradients[0].values, gradients[0].bags.offsets
    values, offsets = [g.values for g in gradients], [g.bags.offsets for g in gradients]
    if len({ids.dtype for ids in values}) > 1:
        values = [ids.to(torch.int64) for ids in values]
    ends = [*accumulate(ids.shape[0] for ids in values)]
    if not gradients[0].bags.pooled:
        return torch.cat(values), torch.tensor([0, *ends], device=values[0].device)
    # Shift the offsets of each lookup by the ids before it.
    if len({tensor.shape[0] for tensor in offsets}) > 1:
        shifted = [tensor[1:] + begin for tensor, begin in zip(offsets, [0, *ends], strict=False)]
        return torch.cat(values), torch.cat([offsets[0][:1], *shifted])
    joined = offsets[0].new_zeros(len(values) * (offsets[0].shape[0] - 1) + 1)
    begins = torch.tensor([0, *ends[:-1]], device=joined.device).unsqueeze(1)
    torch.add(torch.stack(offsets)[:, 1:], begins, out=joined[1:].view(len(values), -1))
    return torch.cat(values), joined


def _concat_sample_weights(gradients: list[ops.BagGradient]) -> Tensor | None:
    """Concatenate the lookups' sample weights, 1 where a lookup has none; None if no lookup has any."""
    sample_weights = [gradient.sample_weights for gradient in gradients]
    if all(weights is None for weights in sample_weights):
        return None
    filled = [
        torch.ones(g.values.shape[0], device=g.grad.device) if w is None else w.detach().to(torch.float32)
        for g, w in zip(gradients, sample_weights, strict=True)
    ]
    return filled[0] if len(filled) == 1 else torch.cat(filled)


def _merge(gradients: list[ops.BagGradient]) -> ops.BagGradient:
    """Merge the gradients of several lookups of one table into those of one lookup."""
    first = gradients[0]
    if len(gradients) == 1:
        return first
    if any(gradient.table.steps[0] is not first.table.steps[0] for gradient in gradients):
        raise RuntimeError(
            f"the weight of {first.name!r} is shared with another module, which was fused separately; te.unfuse the "
            "model, and fuse it again"
        )
    if len({(gradient.bags.pooled, gradient.bags.mean) for gradient in gradients}) > 1:
        gradients = [_to_sum_pooling(gradient) for gradient in gradients]
    values, offsets = _concat_ids(gradients)
    if not gradients[0].bags.pooled:
        offsets = single_bag_offsets(values.shape[0], values.device)
    return ops.BagGradient(
        first.table, first.name, values, _concat_sample_weights(gradients), gradients[0].bags._replace(offsets=offsets),
        torch.cat([gradient.grad for gradient in gradients]),
    )  # fmt: skip


def _to_sum_pooling(gradient: ops.BagGradient) -> ops.BagGradient:
    """Convert a gradient of mean pooling, or of rows that are not pooled, to one of sum pooling."""
    offsets, count = gradient.bags.offsets, gradient.values.shape[0]
    if not gradient.bags.pooled:
        unit_offsets = torch.arange(count + 1, dtype=offsets.dtype, device=offsets.device)  # bags of one id
        return gradient._replace(bags=Bags(unit_offsets, True))
    grad = gradient.grad / offsets.diff().unsqueeze(1).to(gradient.grad.dtype) if gradient.bags.mean else gradient.grad
    return gradient._replace(bags=Bags(offsets, True), grad=grad)
