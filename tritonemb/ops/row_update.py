"""`tritonemb::row_update_`: one optimizer step on the rows of a batch, in place; `row_gradients`: the sum of each row's
gradients; `accumulate_`: gradient accumulation over micro-batches; and initial values.

See `kernels/row_update.py`. Accumulation does not add gradients: the micro-batches are applied as one batch, so that
the result is bitwise identical to that of a step on all samples at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tritonemb.layout import (
    BatchGradient,
    FusedTables,
    Layout,
    TensorList,
    cached_fact,
    dtypes_of,
    unpack_names,
    without_stale_facts,
)
from tritonemb.memory import empty_result
from tritonemb.ops import registry
from tritonemb.ops.registry import CPU, SHARED_ARGUMENTS, TRITON, choose_cached, define, kernel, plain_eager
from tritonemb.ops.row_groups import check_ids, row_groups, ungrouped, wait_for_groups
from tritonemb.optimizers import Hyperparameters, NonFinite, customs

SKIP = get_args(NonFinite).index("skip")
NOT_ACCUMULATING = -1
ELEMENTS_AT_ONCE = 1 << 19  # per call of a user's function on the CPU, so that they stay in its caches
_MAX_DRAWN = 1 << 24  # float32 elements of a buffer for other dtypes
_TOO_COARSE = "tables of {} cannot be trained; use float32, float16 or bfloat16"
_accumulated_rates: set[int] = set()  # addresses of learning rates of tables that accumulate
# By the address of a learning rate: number of backward passes that updated its tables, and the id of the last one.
passes: dict[int, tuple[int, int]] = {}
update_locks: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by the same address; a lock records updates
recomputed_rates = WeakValueDictionary[int, Tensor]()  # learning rates of tables that activation checkpoints look up


def join_tables(tables: Sequence[FusedTables]) -> FusedTables:
    """Join sets of one table, with the same optimizer and learning rate, to one set."""
    weights, states, steps, skipped, *_ = zip(*tables, strict=True)
    lists: Any = weights, zip(*states, strict=True), steps, skipped  # states by name, then by table
    return FusedTables(*([*chain.from_iterable(tensors)] for tensors in lists), *tables[0][4:])  # type: ignore[call-arg, arg-type]


_TABLES = (
    "Tensor{a}[] weights, Tensor{b}[] states, Tensor{c}[] steps, Tensor{d}[] skipped, Tensor learning_rate, "
    "str optimizer, float[] hyperparameters"
)
SHARED_ARGUMENTS["*FusedTables"] = FusedTables, _TABLES.format(a="", b="", c="", d="")
SHARED_ARGUMENTS["*MutableTables"] = FusedTables, _TABLES.format(a="(a!)", b="(b!)", c="(c!)", d="(d!)")


def row_update_(tables: FusedTables, batch: BatchGradient) -> None:
    """Sum each row's gradients in order and apply the optimizer once per row.

    Raise ValueError for a gradient that is not finite with `on_nonfinite="raise"`, before any table is changed.

    In plain eager mode `batch.grad` may also be a list of the gradients of each lookup, `[B, dim]` or `[n, dim]`;
    `batch.groups` may be the ids `[N]`, which are grouped first.
    """
    if isinstance(batch.groups, Tensor):
        batch = BatchGradient(*batch[:3], ungrouped(batch.groups), batch.layout)
    *arguments, groups, layout = batch
    if isinstance(batch.grad, Tensor) and not plain_eager(batch.grad, tables=tables.weights):
        torch.ops.tritonemb.row_update_(*tables, *arguments, *groups, *layout)
        return
    update_rows(tables, batch)
    torch.autograd.graph.increment_version([*tables.weights, *tables.states, *tables.steps, *tables.skipped])


def update_rows(tables: FusedTables, batch: BatchGradient) -> None:
    """Run `row_update_` in plain eager mode; the caller increments the versions of the tensors."""
    # Choose the kernel.
    weights, states, steps, skipped, learning_rate, optimizer, hyperparameters = tables
    (grad, offsets, _, groups, layout), device = batch, batch.offsets.device
    if isinstance(weights, TensorList) and isinstance(states, TensorList):
        weights, states = without_stale_facts(weights, states)
    _check_states(weights, states, layout)
    dtypes = cached_fact(weights, dtypes_of)
    if (coarsest := min(dtypes, key=attrgetter("itemsize"))).itemsize < 2:
        raise TypeError(_TOO_COARSE.format(coarsest))
    name, update = choose_cached("row_update_", device, dtypes), kernel("row_update_", device, dtypes)
    is_custom = optimizer in customs
    by_cpu = name == CPU and not is_custom  # that kernel groups ids and reads counters per table
    # Stack the counters of tables to one tensor for other kernels, and group the ids.
    stacks_counters = not by_cpu and len(steps) > 1
    step: Any = torch.stack(steps) if stacks_counters else steps if len(steps) > 1 else steps[0]
    count: Any = skipped if len(skipped) > 1 else skipped[0]
    count = torch.zeros(len(skipped), dtype=torch.int64, device=device) if stacks_counters else count
    grad = grad if by_cpu else _concat_gradients(grad, layout)
    if groups.starts is not None:
        wait_for_groups(device)
    else:
        check_ids(groups.rows, layout.multiplicity)
        groups = groups.rows if by_cpu else row_groups(groups.rows, offsets, layout)
    # Update the rows, then the counters.
    if is_custom and name in (CPU, TRITON):
        from tritonemb.kernels.optimizers import update_by_user_  # loads the compiler

        max_elements = ELEMENTS_AT_ONCE if name == CPU else None
        update = partial(update_by_user_, update, kernel("embedding_bag", device, dtypes), max_elements)
    fused = FusedTables(weights, states, step, count, *tables[4:])
    update(fused, BatchGradient(grad, *batch[1:3], groups, layout))
    if stacks_counters:
        torch._foreach_copy_(steps, list(step.unbind()))
    skips = stacks_counters and Hyperparameters(*hyperparameters).on_nonfinite == SKIP
    if skips and (device.type != "cpu" or bool(count.any())):  # on a GPU without reading the count, which synchronizes
        torch._foreach_add_(skipped, list(count.split(1)))
    record_update(learning_rate)


def _check_states(weights: Sequence[Tensor], states: Sequence[Tensor], layout: Layout) -> None:
    """Raise ValueError for a state that no kernel can read: it must be contiguous float32, on the tables' device."""
    is_valid = all(map(Tensor.is_contiguous, states)) and {*map(attrgetter("dtype"), states)} <= {torch.float32}
    if is_valid and {*map(attrgetter("device"), states)} <= {weights[0].device}:
        return
    for index, state in enumerate(states):
        name, device = unpack_names(layout.table_names)[index % len(weights)], weights[index % len(weights)].device
        if state.dtype != torch.float32 or state.device != device or not state.is_contiguous():
            raise ValueError(
                f"table {name!r}: a state of its optimizer is {state.dtype} on {state.device} with strides "
                f"{state.stride()}, and must be contiguous float32 on {device}; move the module as a whole, and load "
                "its states by load_state_dict"
            )


def _concat_gradients(grad: Tensor | Sequence[Tensor], layout: Layout) -> Tensor:
    if isinstance(grad, Tensor):
        return grad
    if layout.pooled:
        return torch.cat([*grad], 1)
    return torch.cat([torch.nn.functional.pad(part, (0, layout.width - part.shape[1])) for part in grad])


def record_update(learning_rate: Tensor) -> None:
    """Record an update with the lock of the tables, and in `passes` if a backward pass is running."""
    if (lock := update_locks.get(learning_rate.data_ptr())) is not None:
        lock.record()
    if (task := torch._C._current_graph_task_id()) >= 0:  # eager or compiled
        number, last = passes.get(learning_rate.data_ptr(), (0, -1))
        passes[learning_rate.data_ptr()] = number + (task != last), task


define(
    "row_update_",
    "(*MutableTables, Tensor grad, Tensor offsets, Tensor? sample_weights, *IdsOrGroups, *Layout) -> ()",
    lambda *_: None,
    lambda tables, *batch: update_rows(tables, BatchGradient(*batch)),
)


def row_gradients_(
    sums: Sequence[Tensor], batch: BatchGradient, compact: bool = False, max_gradient: float = torch.inf
) -> None:
    """Write the sum of each distinct row's gradients, without autograd.

    `sums`: `T` tensors of zeros `[rows, dim]`; if `compact`, `[distinct rows, dim]`, or more rows for a single table.
    Each element of `batch.grad`, a tensor or a sequence as in `row_update_`, is clamped to ±`max_gradient` first.
    """
    choice = "row_gradients_", batch.offsets.device, dtypes_of(sums)
    if choose_cached(*choice) != CPU:
        batch = batch._replace(grad=_concat_gradients(batch.grad, batch.layout))
    kernel(*choice)(sums, batch, compact, max_gradient)


def _dense_gradients(grad: Tensor, weights: Sequence[Tensor], *batch: Any) -> list[Tensor]:
    for weight in weights:
        if weight.dtype.itemsize < 2:
            raise TypeError(_TOO_COARSE.format(weight.dtype))
        if weight.device != grad.device:
            raise ValueError(
                f"a table on {weight.device} cannot get a dense gradient on {grad.device}; use a fused optimizer"
            )
    sums = [empty_result(weight.shape, weight.dtype, weight.device).zero_() for weight in weights]
    row_gradients_(sums, BatchGradient(grad, *batch))
    return sums


define(
    "row_gradients",
    "(Tensor grad, Tensor[] weights, Tensor offsets, Tensor? sample_weights, *RowGroups, *Layout) -> Tensor[]",
    lambda grad, weights, *_: [torch.empty_like(w, memory_format=torch.contiguous_format) for w in weights],
    _dense_gradients,
)


class MicroBatch(NamedTuple):
    """Ids of a micro-batch, and the gradient of its output, `[B, width]` or `[N, width]`."""

    values: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    grad: Tensor


def fill_weights(batches: list[MicroBatch]) -> None:
    """Set sample weights of 1 where micro-batches have none, if others have some."""
    if any(batch.sample_weights is not None for batch in batches):
        for index, batch in enumerate(batches):
            if batch.sample_weights is None:
                ones = torch.ones_like(batch.values, dtype=torch.float32)
                batches[index] = batch._replace(sample_weights=ones)


class Accumulator:
    """Accumulator of gradients, active in an `open` block, or always. A copy is a new, empty accumulator.

    Attributes:
        handle: number that represents the accumulator in graphs.
        is_open: whether gradients are accumulated.
        gradients: the accumulated gradients, in order.
        tables: weak reference to the table set of the gradients, for ops in graphs.
    """

    def __init__(self, always_open: bool = False) -> None:
        self.handle = registry.register(self)
        self._always_open = self.is_open = always_open
        self.gradients: list[Any] = []
        self.tables: Callable[[], Any] | None = None

    def pop_all(self) -> list[Any]:
        gradients, self.gradients = self.gradients, []
        return gradients

    @contextmanager
    def open(self, apply: Callable[[list[Any]], None], learning_rates: Iterable[Tensor] = ()) -> Iterator[None]:
        """Accumulate gradients in the block, then apply them; an exception discards them. Raise RuntimeError if open
        already.

        `learning_rates`: those of tables that compiled graphs must not update in the block; `check_not_accumulating`.
        """
        if self.is_open:
            raise RuntimeError("accumulate() is already active")
        rates = {rate.data_ptr() for rate in learning_rates}
        self.is_open = True
        _accumulated_rates.update(rates)
        try:
            yield
            self.is_open = False
            if gradients := self.pop_all():
                apply(gradients)
        finally:
            self.is_open = False
            self.pop_all()
            _accumulated_rates.difference_update(rates)

    def check_closed(self, call: str) -> None:
        """Raise RuntimeError for a call in an `open` block, whose gradients would be those of other rows."""
        if self.is_open and not self._always_open:
            raise RuntimeError(f"{call} in a block of accumulate() would lose its gradients; call it after the block")

    def __reduce__(self) -> tuple[type["Accumulator"], tuple[bool]]:
        return Accumulator, (self._always_open,)


def _accumulate(
    pending: Tensor, handle: int, grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None
) -> None:
    """Append a micro-batch's gradient to the accumulator `handle`; count it in `pending`. Raise RuntimeError if
    closed."""
    accumulator = registry.objects.get(handle)
    if accumulator is None or not accumulator.is_open:
        raise RuntimeError(
            "the backward of a lookup inside accumulate() ran after the end of the block, so its gradient is lost; "
            "call backward inside the block"
        )
    weights = None if sample_weights is None else sample_weights.clone()
    accumulator.gradients.append(MicroBatch(values.clone(), offsets.clone(), weights, grad.clone()))
    pending += 1


accumulate_ = define(
    "accumulate_", "(Tensor(a!) pending, int handle, Tensor grad, *Batch) -> ()", lambda *_: None, _accumulate
)


def shared_update(handle: int, grad: Tensor, *batch: Any) -> None:
    """Update tables together with other ranks, by `update_shared` of the table set `handle`.

    `batch`: ids, offsets, sample weights, groups and layout.

    Updates of a compiled graph run at the end of the backward pass: an earlier wait for another rank could deadlock, as
    graphs of ranks may differ in order.
    """
    if plain_eager(grad, batch[0]):
        wait_for_groups(grad.device)
        table_set_of(handle).update_shared(grad, *batch)
    else:
        _shared_update(handle, grad, *batch)


def table_set_of(handle: int) -> Any:
    reference = registry.objects[handle].tables
    tables = None if reference is None else reference()
    assert tables is not None, "the tables of this graph have been deleted"
    return tables


class PassItems(list[Any]):
    """Items of one backward pass; unlike a list it can be weakly referenced."""


# By the id of the pass. A failed pass drops its callback, and with it its items.
OpenPasses = WeakValueDictionary[int, PassItems]
_queued_updates: OpenPasses = WeakValueDictionary()  # handles and updates


def items_of_pass(passes: OpenPasses, finish: Callable[[PassItems], None]) -> PassItems:
    """Return the items of the running backward pass, for which `finish` is called when it ends."""
    task = torch._C._current_graph_task_id()
    if (items := passes.get(task)) is None:
        items = passes[task] = PassItems()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(finish, items))
    return items


def update_after_backward(handle: int, update: Callable[[], None], outer_pass: PassItems | None = None) -> None:
    """Run an update of the table set `handle` when the backward pass ends, after those of smaller handles."""
    if torch._C._current_graph_task_id() < 0:
        update()
    else:
        (items_of_pass(_queued_updates, _run_queued) if outer_pass is None else outer_pass).append((handle, update))


def outer_pass_of(learning_rate: Tensor) -> PassItems | None:
    """Return the updates of the backward pass that a trained lookup is made in, for `update_after_backward`, or None.

    An activation checkpoint repeats its lookups in the backward pass, so the pass must not update their tables before
    it ends: `recomputed_rates`. RuntimeError if it has, since the lookup would read other rows than the first one.
    """
    address, task = learning_rate.data_ptr(), torch._C._current_graph_task_id()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if task >= 0 or (hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.")):
        recomputed_rates[address] = learning_rate
    if task < 0:
        return None
    if passes.get(address, (0, -1))[1] >= task:
        raise RuntimeError(
            "an activation checkpoint repeats a lookup whose tables this backward pass has updated already, so it "
            "would read other rows than the forward; use checkpoint(..., use_reentrant=False), without other hooks of "
            "saved tensors in it, or look the tables up outside of checkpoints"
        )
    return items_of_pass(_queued_updates, _run_queued)


def _run_queued(updates: PassItems) -> None:
    """Run updates in the order of handles, since the order in graphs may differ between ranks."""
    for _, update in sorted(updates, key=lambda entry: entry[0]):
        update()


def _queue_shared(handle: int, grad: Tensor, *batch: Any) -> Tensor:
    update_after_backward(handle, partial(table_set_of(handle).update_shared, grad.clone(), *batch))
    return grad.new_zeros(1)


_shared_update = define(
    "shared_update",
    "(int handle, Tensor grad, *Batch, *RowGroups, *Layout) -> Tensor",
    lambda _, grad, *args: grad.new_empty(1),
    _queue_shared,
)


def check_not_accumulating(learning_rate: Tensor) -> None:
    """Raise RuntimeError if a compiled graph updates tables inside `accumulate()`."""
    if _accumulated_rates and learning_rate.data_ptr() in _accumulated_rates:
        raise RuntimeError(
            "accumulate() does not support a compiled model with a fused optimizer; call the uncompiled model"
        )


@torch.no_grad()
def fill_initial_(
    weight: Tensor, seed: int, bound: float, first_row: int = 0, first_column: int = 0, rows: Tensor | None = None
) -> None:
    """Fill rows of a table, uniform in ±`bound`; a value is a function of the seed, its row and its column.

    Args:
        weight: `[R, D]`, any floating dtype; float32 values are rounded to nearest.
        seed: seed of the table, in [0, 2^63).
        first_row, first_column: row and column of the first element in the unsharded table.
        rows: int64 `[R]`: rows of the unsharded table; consecutive from `first_row` on by default.
    """
    assert rows is None or rows.numel() == weight.shape[0]
    draw, initial = kernel("initialize_rows_", weight.device), [(seed, bound)]
    if not weight.numel():
        return
    if weight.dtype == torch.float32 and weight.is_contiguous():
        draw([weight.detach()], [], initial, rows, None, None, (first_row, first_column))
        return
    # Draw chunks of float32, and round them.
    chunk_rows = max(1, _MAX_DRAWN // weight.shape[1])
    for begin in range(0, weight.shape[0], chunk_rows):
        chunk = weight[begin : begin + chunk_rows]
        drawn = torch.empty(chunk.shape, dtype=torch.float32, device=weight.device)
        row_ids = None if rows is None else rows[begin : begin + chunk_rows]
        draw([drawn], [], initial, row_ids, None, None, (first_row + begin, first_column))
        chunk.copy_(drawn)
