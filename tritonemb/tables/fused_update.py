"""Tables with one fused optimizer that are updated together, once, when a backward pass ends.

A model calls its modules one by one, so their lookups are calls of their own; but when all gradients of a backward pass
are known, there is one grouping of all ids and one update for all tables, and a table that was looked up several times
is updated once, by the sum of its gradients, as PyTorch's optimizers do it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.errors import gradient_not_finite
from tritonemb.ops.accumulate import gathering
from tritonemb.ops.bag import Bags, BagTable, layout_of
from tritonemb.optimizers import Constants, Hyperparameters, NonFinite, Optimizer
from tritonemb.tables.optimizer import FusedOptimizer

NONFINITE_MODES = get_args(NonFinite)


class FusedGroup:
    """The optimizer of some tables: what is computed, its learning rate, and the gradients that wait for it.

    It does not know its tables: a lookup brings its own.

    Attributes:
        spec: the optimizer.
        constants: its hyperparameters.
        by_step: gradients wait for `apply`, instead of being applied when their backward pass ends.
    """

    def __init__(self, spec: Optimizer, by_step: bool = False) -> None:
        self.spec, self.by_step = spec, by_step
        self.constants = Constants(spec.hyperparameters)
        self._learning_rate = spec.lr
        self._rates: dict[torch.device, Tensor] = {}
        self._begin()

    def _begin(self) -> None:
        self._kept: list[ops.BagGradient] = []
        self._in_block = False
        # By backward pass. One that fails forgets its callback, and with it what was gathered.
        self._open: WeakValueDictionary[int, _Gathered] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._views: WeakSet[FusedOptimizer] = WeakSet()

    @property
    def learning_rate(self) -> float:
        """What was last set; updates read the tensor of `rate_on`."""
        return self._learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Raises ValueError for a negative or non-finite rate."""
        if not 0.0 <= lr < float("inf"):
            raise ValueError(f"the learning rate must lie in [0, inf), got {lr}")
        self._learning_rate = float(lr)
        for rate in self._rates.values():
            rate.fill_(lr)
        for view in self._views:
            view.show_learning_rate()

    def watch(self, view: FusedOptimizer) -> None:
        """Tell `view` of every new learning rate, as long as it lives."""
        self._views.add(view)

    def rate_on(self, device: torch.device) -> Tensor:
        """The learning rate as float32 `[]`, always the same tensor, made before a lookup is traced."""
        found = self._rates.get(device)
        if found is None:
            assert not torch.compiler.is_compiling(), "a traced graph would keep the learning rate of its first call"
            with torch.inference_mode(False):
                found = torch.tensor(self._learning_rate, dtype=torch.float32, device=device)
            self._rates[device] = found
        return found

    def gather(self, gradient: ops.BagGradient) -> None:
        """Keep a gradient until this backward pass ends, and update the table then."""
        self._of_this_pass().append(gradient)

    @property
    def receiver(self) -> Callable[[ops.BagGradient], None]:
        """Where a lookup hands its gradient.

        One that is made within a backward pass, as by a reentrant checkpoint, has its own backward within it, too: its
        gradient belongs to the outer pass, at whose end tables are updated once.
        """
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:
            return self.gather
        return self._of_this_pass().append

    def _of_this_pass(self) -> _Gathered:
        task = torch._C._current_graph_task_id()
        with self._lock:
            gathered = self._open.get(task)
            if gathered is None:
                gathered = self._open[task] = _Gathered()
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(self._finish, gathered))
        return gathered

    def _finish(self, gathered: _Gathered) -> None:
        if self.by_step or self._in_block:
            self._kept += [_copied(gradient) for gradient in gathered]
        else:
            update(gathered)

    def apply(self) -> None:
        """Update the tables by all gradients that wait, as one step on all samples."""
        kept, self._kept = self._kept, []
        update(kept)

    def discard(self) -> None:
        """Forget the gradients that wait."""
        self._kept = []

    @property
    def accumulating(self) -> bool:
        """Whether gradients wait for the end of a block of `accumulate`."""
        return self._in_block

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Gather the gradients of several backward passes and apply them once, when the block ends.

        The tables then have the bits of one step on all samples as one batch. Leaving the block with an exception
        discards what was gathered. Not for compiled modules: calling one in the block raises RuntimeError.

        Raises:
            RuntimeError: if it is active already, or if gradients wait for `step` anyway.
        """
        if self.by_step:
            raise RuntimeError('with update="step" gradients are gathered until step(); leave out accumulate()')
        if self._in_block:
            raise RuntimeError("accumulate() is already active")
        self._in_block = True
        try:
            with gathering(list(self._rates.values())):
                yield
            self.apply()
        finally:
            self._in_block = False
            self.discard()

    def __getstate__(self) -> dict[str, Any]:
        """Gradients that wait stay behind."""
        names = ("spec", "by_step", "constants", "_learning_rate", "_rates")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rates = {rate.device: rate for rate in self._rates.values()}  # perhaps loaded onto another device
        self._begin()


def _copied(gradient: ops.BagGradient) -> ops.BagGradient:
    """What nobody else can change: the batch's buffers may be used again, the gradient be a parameter's `grad` too."""
    weights, bags = gradient.sample_weights, gradient.bags
    return gradient._replace(
        values=gradient.values.clone(),
        sample_weights=None if weights is None else weights.detach().clone(),
        bags=bags._replace(offsets=bags.offsets.clone()),
        grad=gradient.grad.clone(),
    )


class _Gathered(list[ops.BagGradient]):
    """A list that can be referred to weakly."""


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
        _refuse_bad([gradient for found in together.values() for gradient in found])
    for found in together.values():
        _update(found)


def _refuse_bad(gradients: list[ops.BagGradient]) -> None:
    """For `nonfinite="raise"`, before the first of several calls changes anything.

    On a GPU, where nobody may wait, each call refuses for itself.
    """
    for table, name, values, _, bags, grad in gradients:
        raises = NONFINITE_MODES[int(Hyperparameters(*table.hyperparameters).nonfinite)] == "raise"
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
    pooled, device, dim = first.bags.pooled, first.grad.device, 1 if first.bags.pooled else 0
    described = tuple(BagTable.of(g.table.weights[0], g.bags.mean, g.name) for g in gradients)
    layout = layout_of(described, pooled, device)
    values, offsets = _one_batch(gradients)
    grads = [gradient.grad for gradient in gradients]
    groups = ops.row_groups(values, offsets, layout)
    tables = [gradient.table for gradient in gradients]
    joined = first.table._replace(
        weights=[table.weights[0] for table in tables],
        states=[table.states[index] for index in range(len(first.table.states)) for table in tables],
        steps=[table.steps[0] for table in tables],
        skipped=[table.skipped[0] for table in tables],
    )
    grad = grads[0] if len(grads) == 1 else torch.cat(grads, dim)
    ops.row_update_(joined, grad, offsets, _all_sample_weights(gradients), groups, layout)


def _one_batch(gradients: list[ops.BagGradient]) -> tuple[Tensor, Tensor]:
    """Ids and offsets of all lookups, one key after the other."""
    if len(gradients) == 1:
        return gradients[0].values, gradients[0].bags.offsets
    dtypes = {gradient.values.dtype for gradient in gradients}
    values = [g.values if len(dtypes) == 1 else g.values.to(torch.int64) for g in gradients]
    return torch.cat(values), _stacked_offsets(gradients)


def _stacked_offsets(gradients: list[ops.BagGradient]) -> Tensor:
    """`[K * B + 1]` of K lookups with offsets `[B + 1]`, each of which begins where the one before ends."""
    parts, total = [], 0
    for gradient in gradients:
        parts.append(gradient.bags.offsets[:-1] + total)
        total += gradient.values.shape[0]
    return torch.cat([*parts, parts[0].new_full((1,), total)])


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
            f"the weight of {first.name!r} is also that of another module, which was fused apart from it; "
            "te.unfuse the model, and fuse it anew"
        )
    if len({(gradient.bags.pooled, gradient.bags.mean) for gradient in gradients}) > 1:
        gradients = [_by_position(gradient) for gradient in gradients]
    pooled = gradients[0].bags.pooled
    values, total = torch.cat([g.values.to(torch.int64) for g in gradients]), sum(g.values.shape[0] for g in gradients)
    offsets = _stacked_offsets(gradients) if pooled else _ends(total, values.device)
    return ops.BagGradient(
        first.table, first.name, values, _all_sample_weights(gradients), gradients[0].bags._replace(offsets=offsets),
        torch.cat([gradient.grad for gradient in gradients]),
    )  # fmt: skip


def _by_position(gradient: ops.BagGradient) -> ops.BagGradient:
    """The same, not pooled: a row of the gradient for each id."""
    if not gradient.bags.pooled:
        return gradient
    offsets, count = gradient.bags.offsets, gradient.values.shape[0]
    lengths = offsets.diff()
    bags = torch.repeat_interleave(lengths, output_size=count)
    grad = gradient.grad[bags]
    if gradient.bags.mean:
        grad = grad / lengths[bags].to(grad.dtype).unsqueeze(1)
    return gradient._replace(bags=Bags(_ends(count, offsets.device), False), grad=grad)


def _ends(count: int, device: torch.device) -> Tensor:
    return torch.arange(2, device=device) * count
