"""Modules with one fused optimizer, whose tables are updated together, once, when a backward pass ends.

A model calls its modules one by one, each with a lookup of its own. When all gradients of a backward pass are known,
there is one grouping of all ids and one update for all tables, and a table that was looked up several times is updated
once, by the sum of its gradients, as PyTorch's optimizers do it.
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
from tritonemb.ops.bag import Bags, BagTable, layout_of, whole
from tritonemb.optimizers import Hyperparameters, NonFinite, Optimizer
from tritonemb.tables.optimizer import OptimizedTables


class _PassGradients(list[ops.BagGradient]):
    """A list that can be referred to weakly."""


class FusedGroup(OptimizedTables):
    """The optimizer of some modules' tables, and gradients that are not applied yet, each with its table."""

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer, by_step: bool = False) -> None:
        super().__init__(optimizer, by_step)
        self._rates: dict[torch.device, Tensor] = {}
        self._begin()

    def _begin(self) -> None:
        # By backward pass. One that fails forgets its callback, and with it its gradients.
        self._open: WeakValueDictionary[int, _PassGradients] = WeakValueDictionary()
        self._lock = threading.Lock()

    def rates(self) -> Iterable[Tensor]:
        return self._rates.values()

    def rate_on(self, device: torch.device) -> Tensor:
        """The learning rate as float32 `[]`, always the same tensor, made before a lookup is traced."""
        if (found := self._rates.get(device)) is None:
            assert not torch.compiler.is_compiling(), "a traced graph would keep the learning rate of its first call"
            with torch.inference_mode(False):
                found = torch.tensor(self.current_learning_rate, dtype=torch.float32, device=device)
            self._rates[device] = found
        return found

    def add(self, gradient: ops.BagGradient) -> None:
        """Keep a gradient until this backward pass ends, and update the table then."""
        self._of_this_pass().append(gradient)

    @property
    def receiver(self) -> Callable[[ops.BagGradient], None]:
        """To which a lookup gives its gradient.

        A lookup within a backward pass, as by a reentrant checkpoint, has its own backward within it, too: its gradient
        belongs to the outer pass, at whose end tables are updated once.
        """
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:
            return self.add
        return self._of_this_pass().append

    def _of_this_pass(self) -> _PassGradients:
        task = torch._C._current_graph_task_id()
        with self._lock:
            if (gradients := self._open.get(task)) is None:
                gradients = self._open[task] = _PassGradients()
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(self._finish, gradients))
        return gradients

    def _finish(self, gradients: _PassGradients) -> None:
        if self.accumulator.is_open:
            self.accumulator.kept += [_copied(gradient) for gradient in gradients]
        else:
            update(gradients)

    def apply(self) -> None:
        """Update the tables by all accumulated gradients, as one step on all samples."""
        update(self.accumulator.take())

    def accumulate(self) -> AbstractContextManager[None]:
        """Not for compiled modules: calling one in the block raises RuntimeError, as does a second block."""
        if self.by_step:
            raise RuntimeError('with update="step" gradients are accumulated until step(); leave out accumulate()')
        return self.accumulator.open(update, self._rates.values())

    def __getstate__(self) -> dict[str, Any]:
        """Gradients that are not applied yet are not copied."""
        return {name: value for name, value in super().__getstate__().items() if name not in ("_open", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rates = {rate.device: rate for rate in self._rates.values()}  # perhaps loaded onto another device
        self._begin()


def _copied(gradient: ops.BagGradient) -> ops.BagGradient:
    """A copy: the batch's buffers may be reused, and the gradient may be a parameter's `grad` too."""
    weights, bags = gradient.sample_weights, gradient.bags
    return gradient._replace(
        values=gradient.values.clone(),
        sample_weights=None if weights is None else weights.detach().clone(),
        bags=bags._replace(offsets=bags.offsets.clone()),
        grad=gradient.grad.clone(),
    )


@torch.no_grad()
def update(gradients: list[ops.BagGradient]) -> None:
    """Update every table once: in one call those whose lookups have the same number of bags, or of columns."""
    by_table: dict[int, list[ops.BagGradient]] = {}
    for gradient in gradients:
        by_table.setdefault(id(gradient.table.weights[0]), []).append(gradient)
    together: dict[tuple[Any, ...], list[ops.BagGradient]] = {}
    for found in by_table.values():
        gradient = _joined(found)
        size = gradient.grad.shape[0] if gradient.bags.pooled else gradient.grad.shape[1]
        key = gradient.grad.device, gradient.bags.pooled, size, gradient.table.learning_rate.data_ptr()
        together.setdefault(key, []).append(gradient)
    if len(together) > 1:
        _check_finite([gradient for found in together.values() for gradient in found])
    for found in together.values():
        _update(found)


def _check_finite(gradients: list[ops.BagGradient]) -> None:
    """For `on_nonfinite="raise"`, before the first of several calls changes anything; on a GPU each checks its own."""
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
    first = gradients[0]
    pooled, device = first.bags.pooled, first.grad.device
    described = tuple(BagTable.of(g.table.weights[0], g.bags.mean, g.name) for g in gradients)
    layout = layout_of(described, pooled, device)
    values, offsets = _one_batch(gradients)
    grads = [gradient.grad for gradient in gradients]
    tables = [gradient.table for gradient in gradients]
    joined = first.table._replace(
        weights=[table.weights[0] for table in tables],
        states=[table.states[index] for index in range(len(first.table.states)) for table in tables],
        steps=[table.steps[0] for table in tables],
        skipped=[table.skipped[0] for table in tables],
    )
    grad = grads[0] if len(grads) == 1 else grads
    ops.row_update_(joined, grad, offsets, _all_sample_weights(gradients), values, layout)


def _one_batch(gradients: list[ops.BagGradient]) -> tuple[Tensor, Tensor]:
    """Ids of K lookups, and offsets `[K * B + 1]`: each lookup begins where the one before ends."""
    if len(gradients) == 1:
        return gradients[0].values, gradients[0].bags.offsets
    values, offsets = [g.values for g in gradients], [g.bags.offsets for g in gradients]
    if len({ids.dtype for ids in values}) > 1:
        values = [ids.to(torch.int64) for ids in values]
    ends = [*accumulate(ids.shape[0] for ids in values)]
    if not gradients[0].bags.pooled:
        return torch.cat(values), torch.tensor([0, *ends], device=values[0].device)
    if len({each.shape[0] for each in offsets}) > 1:
        moved = [each[1:] + begin for each, begin in zip(offsets, [0, *ends], strict=False)]
        return torch.cat(values), torch.cat([offsets[0][:1], *moved])
    joined = offsets[0].new_zeros(len(values) * (offsets[0].shape[0] - 1) + 1)
    begins = torch.tensor([0, *ends[:-1]], device=joined.device).unsqueeze(1)
    torch.add(torch.stack(offsets)[:, 1:], begins, out=joined[1:].view(len(values), -1))
    return torch.cat(values), joined


def _all_sample_weights(gradients: list[ops.BagGradient]) -> Tensor | None:
    given = [gradient.sample_weights for gradient in gradients]
    if all(weights is None for weights in given):
        return None
    filled = [
        torch.ones(g.values.shape[0], device=g.grad.device) if w is None else w.detach().to(torch.float32)
        for g, w in zip(gradients, given, strict=True)
    ]
    return filled[0] if len(filled) == 1 else torch.cat(filled)


def _joined(gradients: list[ops.BagGradient]) -> ops.BagGradient:
    """The gradients of one table's lookups as those of one lookup."""
    first = gradients[0]
    if len(gradients) == 1:
        return first
    if any(gradient.table.steps[0] is not first.table.steps[0] for gradient in gradients):
        raise RuntimeError(
            f"the weight of {first.name!r} is also that of another module, which was fused separately; "
            "te.unfuse the model, and fuse it anew"
        )
    if len({(gradient.bags.pooled, gradient.bags.mean) for gradient in gradients}) > 1:
        gradients = [_as_sums(gradient) for gradient in gradients]
    values, offsets = _one_batch(gradients)
    if not gradients[0].bags.pooled:
        offsets = whole(values.shape[0], values.device)
    return ops.BagGradient(
        first.table, first.name, values, _all_sample_weights(gradients), gradients[0].bags._replace(offsets=offsets),
        torch.cat([gradient.grad for gradient in gradients]),
    )  # fmt: skip


def _as_sums(gradient: ops.BagGradient) -> ops.BagGradient:
    """The same of bags that are summed, of one id each if they were not pooled."""
    offsets, count = gradient.bags.offsets, gradient.values.shape[0]
    if not gradient.bags.pooled:
        one_each = torch.arange(count + 1, dtype=offsets.dtype, device=offsets.device)
        return gradient._replace(bags=Bags(one_each, True))
    grad = gradient.grad / offsets.diff().unsqueeze(1).to(gradient.grad.dtype) if gradient.bags.mean else gradient.grad
    return gradient._replace(bags=Bags(offsets, True), grad=grad)
