"""`tritonemb::row_update_`: one optimizer step on the rows of a batch, in place; `row_gradients`: the sum of each row's
gradients; `accumulate_`, which keeps gradients of micro-batches until they are applied together; and initial values.

See `kernels/row_update.py`. Accumulating sums nothing: the micro-batches are applied as one batch, so that the result
is bitwise identical to that of a step on all samples at once.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple, get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tritonemb.layout import Layout, TensorList, cached_fact, dtypes_of
from tritonemb.memory import empty_result
from tritonemb.ops import registry
from tritonemb.ops.registry import BATCH, CPU, TRITON, chosen, define, kernel, unflatten
from tritonemb.ops.row_groups import RowGroups, check_ids, plain_eager, row_groups, ungrouped, wait_for_groups
from tritonemb.optimizers import Hyperparameters, NonFinite, customs

SKIP = get_args(NonFinite).index("skip")
NOT_ACCUMULATING = -1
ELEMENTS_AT_ONCE = 1 << 19  # that a user's function is given on the CPU: they stay in its caches
_DRAWN_AT_ONCE = 1 << 24  # elements of other dtypes, drawn as float32
_accumulated_rates: set[int] = set()  # addresses of learning rates
passes: dict[int, tuple[int, int]] = {}  # by such an address: backward passes that updated, and which was the last
update_locks: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by such an address: each records its updates


class FusedTables(NamedTuple):
    """`T` tables and what their update needs beside the batch.

    Attributes:
        weights: `[T]` of `[rows, dim]`.
        states: the first optimizer state of every table, then the second; float32 `[rows]` or `[rows, dim]`.
        steps: one int64 `[]` for all tables together, or one for each: updates so far.
        skipped: one int64 `[T]`, or a `[1]` for each table: rows left untouched for a gradient that is not finite.
        learning_rate: float32 `[]`.
        optimizer: its name.
        hyperparameters: values of `Hyperparameters`.
    """

    weights: list[Tensor]
    states: list[Tensor]
    steps: list[Tensor]
    skipped: list[Tensor]
    learning_rate: Tensor
    optimizer: str
    hyperparameters: list[float]

    def states_of(self, table: int) -> list[Tensor]:
        """The states of one table."""
        return self.states[table :: len(self.weights)]


SCHEMA = (
    "Tensor{a}[] weights, Tensor{b}[] states, Tensor{c}[] steps, Tensor{d}[] skipped, Tensor learning_rate, "
    "str optimizer, float[] hyperparameters"
)
TABLES = SCHEMA.format(a="", b="", c="", d="")


def row_update_(
    tables: FusedTables, grad: Tensor | list[Tensor], offsets: Tensor, sample_weights: Tensor | None,
    groups: RowGroups | Tensor, layout: Layout,
) -> None:  # fmt: skip
    """Sum each row's gradients in order and apply the optimizer once a row.

    What `on_nonfinite="raise"` refuses is a ValueError, before anything is changed.

    Args:
        grad: gradient of the output, `[B, width]` or `[N, width]`; or those of each lookup, `[B, dim]` or `[n, dim]`,
            where nothing is traced.
        offsets, sample_weights: of the batch.
        groups: its distinct rows, or its ids `[N]`, which are grouped first.
    """
    groups = ungrouped(groups) if isinstance(groups, Tensor) else groups
    if isinstance(grad, Tensor) and not plain_eager(grad, tables=tables.weights):
        torch.ops.tritonemb.row_update_(*tables, grad, offsets, sample_weights, *groups, *layout)
        return
    update_rows(tables, grad, offsets, sample_weights, groups, layout)
    torch.autograd.graph.increment_version([*tables.weights, *tables.states, *tables.steps, *tables.skipped])


def update_rows(
    tables: FusedTables, grad: Tensor | list[Tensor], offsets: Tensor, sample_weights: Tensor | None,
    groups: RowGroups, layout: Layout,
) -> None:  # fmt: skip
    """`row_update_` where nothing is traced, which leaves the tensors' versions to its caller."""
    weights, states, steps, skipped, learning_rate, optimizer, hyperparameters = tables
    device = offsets.device
    if isinstance(weights, TensorList) and isinstance(states, TensorList):
        weights, states = weights.unmoved(), states.unmoved()
    dtypes = cached_fact(weights, dtypes_of)
    name, update = chosen("row_update_", device, dtypes), kernel("row_update_", device, dtypes)
    by_cpu = name == CPU and optimizer not in customs  # whose kernel groups ids by itself, and finds tensors of tables
    # Counters that are kept table by table are one tensor to the other kernels.
    stacks_counters = not by_cpu and len(steps) > 1
    step: Any = torch.stack(steps) if stacks_counters else steps if len(steps) > 1 else steps[0]
    count: Any = skipped if len(skipped) > 1 else skipped[0]
    count = torch.zeros(len(skipped), dtype=torch.int64, device=device) if stacks_counters else count
    grad = grad if by_cpu else _together(grad, layout)
    batch: RowGroups | Tensor = groups
    if groups.is_complete:
        wait_for_groups(device)
    else:
        check_ids(groups.rows, layout.multiplicity)
        batch = groups.rows if by_cpu else row_groups(groups.rows, offsets, layout)
    if optimizer in customs and name in (CPU, TRITON):
        from tritonemb.kernels.optimizers import update_by_user_  # loads the compiler

        at_once = ELEMENTS_AT_ONCE if name == CPU else None
        update = partial(update_by_user_, update, kernel("embedding_bag", device, dtypes), at_once)
    update(
        weights, states, step, count, learning_rate, grad, offsets, sample_weights, optimizer, hyperparameters, batch,
        layout,
    )  # fmt: skip
    if stacks_counters:
        torch._foreach_copy_(steps, list(step.unbind()))
    skips = stacks_counters and Hyperparameters(*hyperparameters).on_nonfinite == SKIP
    if skips and (device.type != "cpu" or bool(count.any())):  # no wait for a GPU's count
        torch._foreach_add_(skipped, list(count.split(1)))
    count_pass(learning_rate)


def _together(grad: Tensor | Sequence[Tensor], layout: Layout) -> Tensor:
    """The gradients of lookups as that of the output."""
    if isinstance(grad, Tensor):
        return grad
    if layout.pooled:
        return torch.cat([*grad], 1)
    return torch.cat([torch.nn.functional.pad(each, (0, layout.width - each.shape[1])) for each in grad])


def count_pass(learning_rate: Tensor) -> None:
    """Count in `passes` that this backward pass, if there is one, updates tables; and let their lock record that."""
    if (lock := update_locks.get(learning_rate.data_ptr())) is not None:
        lock.record()
    if (task := torch._C._current_graph_task_id()) >= 0:  # eager or compiled
        number, last = passes.get(learning_rate.data_ptr(), (0, -1))
        passes[learning_rate.data_ptr()] = number + (task != last), task


define(
    "row_update_",
    f"({SCHEMA.format(a='(a!)', b='(b!)', c='(c!)', d='(d!)')}, Tensor grad, Tensor offsets, Tensor? sample_weights, "
    f"{registry.IDS_OR_GROUPS}, {registry.LAYOUT}) -> ()",
    lambda *args: update_rows(*unflatten(args, FusedTables, None, None, None, RowGroups, Layout)),
    lambda *args: None,
)


def row_gradients_(
    sums: Sequence[Tensor], grad: Tensor | Sequence[Tensor], offsets: Tensor, sample_weights: Tensor | None,
    groups: RowGroups, layout: Layout, compact: bool = False, max_gradient: float = torch.inf,
) -> None:  # fmt: skip
    """Write the sum of each distinct row's gradients; no autograd.

    `sums` are zeros `[T]`, `[rows, dim]` each; if `compact`, `[distinct rows, dim]` (of one table: at least as many).
    Each element of `grad` is clamped to ±`max_gradient` first. All else as in `row_update_`.
    """
    name, where = "row_gradients_", (offsets.device, dtypes_of(sums))
    grad = grad if chosen(name, *where) == CPU else _together(grad, layout)
    kernel(name, *where)(sums, grad, offsets, sample_weights, groups, layout, compact, max_gradient)


def _dense(*args: Any) -> list[Tensor]:
    grad, weights, offsets, sample_weights, groups, layout = unflatten(args, None, None, None, None, RowGroups, Layout)
    for weight in weights:
        if weight.dtype.itemsize < 2:
            raise TypeError(
                f"tables of {weight.dtype} take no gradients; use float32, float16 or bfloat16 to train them"
            )
        if weight.device != grad.device:
            raise ValueError(f"a table on {weight.device} takes no dense gradient on {grad.device}; fuse its optimizer")
    sums = [empty_result(weight.shape, weight.dtype, weight.device).zero_() for weight in weights]
    row_gradients_(sums, grad, offsets, sample_weights, groups, layout)
    return sums


define(
    "row_gradients",
    "(Tensor grad, Tensor[] weights, Tensor offsets, Tensor? sample_weights, "
    f"{registry.GROUPS}, {registry.LAYOUT}) -> Tensor[]",
    _dense,
    lambda grad, weights, *rest: [torch.empty_like(w, memory_format=torch.contiguous_format) for w in weights],
)


class MicroBatch(NamedTuple):
    """The ids of a micro-batch and the gradient of its output, `[B, width]` or `[N, width]`."""

    values: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    grad: Tensor


class Accumulator:
    """Gradients that are kept while it is open, or always. A copy of it is another one, and empty.

    Attributes:
        handle: its number in graphs.
        is_open: whether gradients are to be kept.
        kept: the gradients, in order.
        tables: refers to the table set whose gradients are kept, which ops in graphs call.
    """

    _made: ClassVar[WeakValueDictionary[int, "Accumulator"]] = WeakValueDictionary()
    _handles: ClassVar["itertools.count[int]"] = itertools.count()

    def __init__(self, always_open: bool = False) -> None:
        self.handle = next(self._handles)
        self._always_open = self.is_open = always_open
        self.kept: list[Any] = []
        self.tables: Callable[[], Any] | None = None
        self._made[self.handle] = self

    @property
    def current_handle(self) -> int:
        """The handle, or NOT_ACCUMULATING while it is closed."""
        return self.handle if self.is_open else NOT_ACCUMULATING

    def take(self) -> list[Any]:
        """What has been kept; it keeps none of it any longer."""
        kept, self.kept = self.kept, []
        return kept

    def open(
        self, apply: Callable[[list[Any]], None], learning_rates: Iterable[Tensor] = ()
    ) -> AbstractContextManager[None]:
        """Keep gradients in the block, then apply them; an exception discards them. RuntimeError if it is open already.

        `learning_rates`: of tables that a compiled graph must not update meanwhile; see `check_not_accumulating`.
        """
        if self.is_open:
            raise RuntimeError("accumulate() is already active")
        return self._block(apply, {rate.data_ptr() for rate in learning_rates})

    @contextmanager
    def _block(self, apply: Callable[[list[Any]], None], rates: set[int]) -> Iterator[None]:
        self.is_open = True
        _accumulated_rates.update(rates)
        try:
            yield
            self.is_open = False
            apply(self.take())
        finally:
            self.is_open = False
            self.take()
            _accumulated_rates.difference_update(rates)

    def __reduce__(self) -> tuple[type["Accumulator"], tuple[bool]]:
        return Accumulator, (self._always_open,)


def _accumulate(
    pending: Tensor, handle: int, grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None
) -> None:
    """Keep a micro-batch's gradient in the accumulator `handle`, counted in `pending`; RuntimeError if it is closed."""
    accumulator = Accumulator._made.get(handle)
    if accumulator is None or not accumulator.is_open:
        raise RuntimeError(
            "the backward of a lookup made inside accumulate() ran after the block had ended, so its gradient is lost; "
            "call backward inside the block"
        )
    weights = None if sample_weights is None else sample_weights.clone()
    accumulator.kept.append(MicroBatch(values.clone(), offsets.clone(), weights, grad.clone()))
    pending += 1


accumulate_ = define(
    "accumulate_", f"(Tensor(a!) pending, int handle, Tensor grad, {BATCH}) -> ()", _accumulate, lambda *args: None
)


def shared_update(
    handle: int, grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, groups: RowGroups,
    layout: Layout,
) -> None:  # fmt: skip
    """Update tables together with other ranks, as `update_shared` of the table set `handle` does.

    Those of a graph are done when the backward pass ends: one that waits for a rank would hold up what that waits for.
    """
    if plain_eager(grad, values):
        wait_for_groups(grad.device)
        tables_of(handle).update_shared(grad, values, offsets, sample_weights, groups, layout)
    else:
        torch.ops.tritonemb.shared_update(handle, grad, values, offsets, sample_weights, *groups, *layout)


def tables_of(handle: int) -> Any:
    """The table set whose accumulator has this handle."""
    find = Accumulator._made[handle].tables
    tables = None if find is None else find()
    assert tables is not None, "the tables of this graph are gone"
    return tables


_waiting: dict[int, list[tuple[int, Callable[[], None]]]] = {}  # by backward pass; one that failed has left some


def _update_when_the_pass_ends(handle: int, grad: Tensor, *rest: Any) -> Tensor:
    batch = unflatten(rest, None, None, None, RowGroups, Layout)
    update = partial(tables_of(handle).update_shared, grad.clone(), *batch)
    task = torch._C._current_graph_task_id()
    if task < 0:
        update()
    elif task in _waiting:
        _waiting[task].append((handle, update))
    else:
        _waiting.clear()
        _waiting[task] = [(handle, update)]
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(_run_waiting, task))
    return grad.new_zeros(1)


def _run_waiting(task: int) -> None:
    """In the order of handles: that of graphs may be another on each rank."""
    for _, update in sorted(_waiting.pop(task), key=lambda each: each[0]):
        update()


registry.keep(
    define(
        "shared_update",
        f"(int handle, Tensor grad, {BATCH}, {registry.GROUPS}, {registry.LAYOUT}) -> Tensor",
        _update_when_the_pass_ends,
        lambda _, grad, *rest: grad.new_empty(1),
    )
)


def check_not_accumulating(learning_rate: Tensor) -> None:
    """Raise RuntimeError if a compiled graph updates tables in a block that accumulates their gradients."""
    if _accumulated_rates and learning_rate.data_ptr() in _accumulated_rates:
        raise RuntimeError("accumulate() is not for a compiled model with a fused optimizer; call the model itself")


@torch.no_grad()
def fill_initial_(
    weight: Tensor, seed: int, bound: float, first_row: int = 0, first_column: int = 0, rows: Tensor | None = None
) -> None:
    """Fill rows of a table, uniform in ±`bound`; a value depends on the seed, its row and its column alone.

    Args:
        weight: `[R, D]`, any floating dtype; float32 values are rounded to it, to nearest.
        seed: of the table, in [0, 2^63).
        first_row, first_column: the place of the first element in the whole table.
        rows: int64 `[R]`: which rows of the whole table these are; neighbours from `first_row` on if not given.
    """
    assert rows is None or rows.numel() == weight.shape[0]
    draw, initial = kernel("initialize_rows_", weight.device), [(seed, bound)]
    if not weight.numel():
        return
    if weight.dtype == torch.float32 and weight.is_contiguous():
        draw([weight.detach()], [], initial, rows, None, None, (first_row, first_column))
        return
    step = max(1, _DRAWN_AT_ONCE // weight.shape[1])
    for begin in range(0, weight.shape[0], step):
        part = weight[begin : begin + step]
        drawn = torch.empty(part.shape, dtype=torch.float32, device=weight.device)
        ids = None if rows is None else rows[begin : begin + step]
        draw([drawn], [], initial, ids, None, None, (first_row + begin, first_column))
        part.copy_(drawn)
