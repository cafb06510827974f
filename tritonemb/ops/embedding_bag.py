"""`tritonemb::embedding_bag`: lookup in `T` tables, differentiable in weights and per-sample weights; and
`tritonemb::embedding_bag_fused`, whose backward is the optimizer's step. `bag_fused` is the latter for one table.

The kernels are in `kernels/embedding_bag.py`. The autograd context keeps the tensors of fused ops without a version
check: a collection that is looked up twice in one graph is updated twice, each time with the gradients of that lookup.
In plain eager mode `fused_lookup`, an autograd function, calls the same kernels without the dispatcher; other lookups
with a backward in Python use it, too. There `bag_fused` passes its gradient to a callback, so that all tables of a
model are updated together at the end of the backward pass.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tritonemb.jagged import batch_size_of
from tritonemb.layout import BatchGradient, FusedTables, Layout, cached_fact, dtypes_of, kinds_of, unpack_names
from tritonemb.ops import row_update
from tritonemb.ops.bag import Bags, BagTable, empty_bags, layout_of, look_up, sample_weight_gradient
from tritonemb.ops.registry import SHARED_ARGUMENTS, check_no_tangents, define, kernel, plain_eager, unflatten
from tritonemb.ops.row_groups import RowGroups, UngroupedIds, check_ids, row_groups, ungrouped
from tritonemb.ops.row_update import NOT_ACCUMULATING, accumulate_, row_update_, shared_update, update_after_backward


def embedding_bag(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, sample_weights: Tensor | None, layout: Layout,
    check_bounds: bool = True, output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Look up `values` `[N]` in `weights` `[T]`; returns `[B, width]`, or `[N, width]` if the layout is not pooled.

    Raise TypeError for ids other than int32 or int64; raise ValueError for tables on another device than the batch and,
    on the CPU, for an id out of range or offsets that do not ascend.
    """
    check_ids(values)
    check_no_tangents(weights, sample_weights)
    if not torch.is_grad_enabled() and plain_eager(values, offsets, sample_weights, tables=weights):
        return _read(weights, values, offsets, sample_weights, layout, check_bounds, output_dtype)
    check_devices(weights, values, layout)
    return torch.ops.tritonemb.embedding_bag(
        list(weights), values, offsets, sample_weights, None, check_bounds, output_dtype, *layout
    )


def _read(weights: Sequence[Tensor], values: Tensor, *args: Any) -> Tensor:
    """Check the devices, and run the kernel of the batch's device, without autograd and dispatcher."""
    devices, dtypes = cached_fact(weights, kinds_of)
    if devices != {values.device}:
        check_devices(weights, values, args[2])
    return kernel("embedding_bag", values.device, dtypes)(weights, values, *args)


def check_devices(weights: Sequence[Tensor], values: Tensor, layout: Layout) -> None:
    """Raise unless every table is on the device of the batch or, for a batch on a GPU, in pinned host memory."""
    for index, weight in enumerate(weights):
        if weight.device == values.device or (values.is_cuda and weight.device.type == "cpu" and weight.is_pinned()):
            continue
        raise ValueError(
            f"table {unpack_names(layout.table_names)[index]!r} is on {weight.device} but the batch is on "
            f"{values.device}; move one of them with .to()"
        )


def empty_output(values: Tensor, offsets: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    num_rows = batch_size_of(offsets, layout.key_starts) if layout.pooled else values.shape[0]
    return values.new_empty(num_rows, layout.width, dtype=dtype)


_sample_weight_gradient = define(
    "sample_weight_gradient",
    "(Tensor grad, Tensor[] weights, *Batch, *Layout) -> Tensor",
    lambda _g, _w, _v, _o, sample_weights, _: torch.empty_like(sample_weights),
    lambda grad, weights, values, offsets, sample_weights, layout: kernel(
        "sample_weight_gradient", grad.device, cached_fact(weights, dtypes_of)
    )(weights, values, offsets, grad, layout).to(sample_weights.dtype),
)


def _save(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.weights, values, offsets, sample_weights, trained_ids, _, _, ctx.layout = inputs
    # Only the gradient of per-sample weights reads the tables: else they may be changed in between.
    read_weights = ctx.weights if sample_weights is not None and sample_weights.requires_grad else ()
    ctx.save_for_backward(*read_weights, values, offsets, sample_weights, trained_ids, *ctx.layout[:3])


def _backward(ctx: Any, grad: Tensor) -> dict[str, Any]:
    *read_weights, values, offsets, sample_weights, trained_ids, tables, lookups, key_starts = ctx.saved_tensors
    layout = ctx.layout._replace(tables=tables, lookups=lookups, key_starts=key_starts)
    trained_ids = values if trained_ids is None else trained_ids
    ops, gradients = torch.ops.tritonemb, dict[str, Any]()
    if any(ctx.needs_input_grad[0]):
        groups = ops.row_groups(trained_ids, offsets, *layout)
        sums = ops.row_gradients(grad, ctx.weights, offsets, sample_weights, *groups, *layout)
        needed = zip(sums, ctx.needs_input_grad[0], strict=True)
        gradients["weights"] = [weight_grad if is_needed else None for weight_grad, is_needed in needed]
    if ctx.needs_input_grad[3]:
        derivative = ops.sample_weight_gradient(grad, read_weights, trained_ids, offsets, sample_weights, *layout)
        gradients["sample_weights"] = derivative
    return gradients


define(
    "embedding_bag",
    "(Tensor[] weights, *Batch, Tensor? trained, bool check_bounds, ScalarType output_dtype, *Layout) -> Tensor",
    lambda weights, values, offsets, _s, _t, _c, dtype, layout: empty_output(values, offsets, layout, dtype),
    lambda weights, values, offsets, sample_weights, _, check_bounds, dtype, layout: _read(
        weights, values, offsets, sample_weights, layout, check_bounds, dtype
    ),
    _backward,
    _save,
)


Read = Callable[[], Tensor]
TakeGradient = Callable[..., Tensor | None]


def fused_lookup(
    weight: Tensor,
    sample_weights: Tensor | None,
    read: Read,
    take_gradient: TakeGradient,
    tables: Callable[[], Iterable[str]] = tuple,
    *inputs: Tensor | None,
    learning_rate: Tensor | None = None,
) -> Tensor:
    """Look up rows with a backward in Python, which may update rows, accumulate the gradient or exchange it.

    RuntimeError in the backward if `inputs` were changed in place after the lookup.

    Args:
        weight: represents all tables in the autograd graph; it gets no gradient.
        read: returns the result, `[B, width]` if pooled, else `[N, width]`.
        take_gradient: called with the gradient of the result, and whether the per-sample weights require a gradient,
            which it returns; where activation checkpoints may repeat the lookup, also with `outer_pass`.
        tables: returns the names of the tables.
        inputs: ids, offsets, per-sample weights, then the tables' weights if the gradient of the former reads them.
        learning_rate: that of tables which `take_gradient` updates.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if learning_rate is not None and (hooks is not None or torch._C._current_graph_task_id() >= 0):
        take_gradient = partial(take_gradient, outer_pass=row_update.outer_pass_of(learning_rate))
    versions = versions_of(*inputs)

    def take_checked(grad: Tensor, needs_sample_weight_grad: bool) -> Tensor | None:
        check_versions(versions, tables, *inputs)
        return take_gradient(grad, needs_sample_weight_grad)

    return _FusedLookup.apply(weight, sample_weights, read, take_checked)


def versions_of(*tensors: Tensor | None) -> list[int]:
    """Return the versions of tensors, for `check_versions`."""
    return [0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def check_versions(versions: list[int], tables: Callable[[], Iterable[str]], *inputs: Tensor | None) -> None:
    """Raise RuntimeError if a batch was changed in place since a lookup; for the arguments see `fused_lookup`."""
    if versions != (current := versions_of(*inputs)):
        names = [*tables()]
        titles = ["ids", "offsets", "per-sample weights", *[f"rows of {name!r}" for name in names]]
        changes = [title for title, *pair in zip(titles, versions, current, strict=False) if pair[0] != pair[1]]
        raise RuntimeError(
            f"table {names[0]!r}: {', '.join(changes)} were changed in place between a lookup and its backward; "
            "change a copy, or run the backward first"
        )


class _FusedLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, sample_weights: Tensor | None, read: Read, take_gradient: TakeGradient
    ) -> Tensor:
        ctx.take_gradient = take_gradient
        return read()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, ctx.take_gradient(grad, ctx.needs_input_grad[1]), None, None


def _update_pinned(grad: Tensor, sample_weights: Tensor | None, ticket: Tensor, handle: int) -> Tensor:
    sample_weight_grad = row_update.table_set_of(handle).update_pinned(int(ticket), grad, sample_weights)
    return grad.new_zeros(1) if sample_weight_grad is None else sample_weight_grad


_pinned_update = define(
    "pinned_update",
    "(Tensor grad, Tensor? sample_weights, Tensor ticket, int handle) -> Tensor",
    lambda grad, sample_weights, *_: grad.new_empty(1) if sample_weights is None else torch.empty_like(sample_weights),
    _update_pinned,
)


def _backward_pinned(ctx: Any, grad: Tensor) -> dict[str, Any]:
    _, sample_weights, ticket, handle, *_ = ctx.inputs
    result = _pinned_update(grad, sample_weights, ticket, handle)
    return {} if sample_weights is None else {"sample_weights": result}


# Lookup `[num_rows, width]` of a prefetched batch, for compiled graphs: it calls `read_pinned` and, in the backward,
# `update_pinned` of a table set, which check that the batch is current, and use the current slots of a cache. `weight`
# represents all tables in the autograd graph and gets no gradient; `sample_weights` are those of the batch if they get
# one; `ticket`, int64 `[]` on the CPU, is the number of the batch; `handle` is that of the table set's accumulator;
# `trained`: whether the backward updates the tables.
pinned_lookup = define(
    "pinned_lookup",
    "(Tensor weight, Tensor? sample_weights, Tensor ticket, int handle, bool trained, SymInt num_rows, SymInt width, "
    "ScalarType dtype) -> Tensor",
    lambda weight, _s, _n, _h, _t, num_rows, width, dtype: weight.new_empty(num_rows, width, dtype=dtype),
    lambda weight, sample_weights, ticket, handle, trained, *shape: row_update.table_set_of(handle).read_pinned(
        int(ticket), trained, sample_weights is not None
    ),
    _backward_pinned,
)


# By the address of a learning rate: an object that all lookups share whose backward will read rows of its tables, for
# the gradient of per-sample weights.
_pending_reads: WeakValueDictionary[int, "partial[list[str]]"] = WeakValueDictionary()


class FusedBatch(NamedTuple):
    """Lookup like `embedding_bag`, whose backward updates weights, states and counters in place, or accumulates.

    Attributes:
        pending: int64 `[]`, number of micro-batches in the accumulator.
        shared: whether the gradients are applied immediately, together with other ranks; see `shared_update`.
        accumulator: handle of the accumulator of the gradients, or NOT_ACCUMULATING to apply them.
        groups: groups of the ids; if None, the backward groups the ids, which must not change until then.
    """

    tables: FusedTables
    values: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    pending: Tensor | None
    shared: bool
    accumulator: int
    check_bounds: bool
    output_dtype: torch.dtype
    groups: RowGroups | UngroupedIds | None
    layout: Layout

    def look_up(self) -> Tensor:
        """Return the result, `[B, width]`, or `[N, width]` if the layout is not pooled."""
        tables, values, offsets, sample_weights, *options, groups, layout = self
        check_ids(values, layout.multiplicity)
        if plain_eager(values, offsets, sample_weights, tables=tables.weights):
            if isinstance(groups, RowGroups) and len(groups.rows) != values.numel() * layout.multiplicity:
                raise ValueError(f"groups= are those of another batch than this one of {values.numel():,} ids")
            batch = self if groups is not None else FusedBatch(*self[:-2], UngroupedIds.record(values), layout)
            inputs, names = [values, offsets, sample_weights], partial(unpack_names, layout.table_names)
            if sample_weights is not None and sample_weights.requires_grad:
                inputs += tables.weights
                names = _pending_reads.setdefault(tables.learning_rate.data_ptr(), names)
            functions, rate = (batch.read, batch.take_gradient), tables.learning_rate
            return fused_lookup(tables.weights[0], sample_weights, *functions, names, *inputs, learning_rate=rate)
        check_devices(tables.weights, values, layout)
        if groups is None:
            groups = row_groups(values, offsets, layout) if self.shared else ungrouped(values)
        arguments = values, offsets, sample_weights, *options, *groups, *layout
        return torch.ops.tritonemb.embedding_bag_fused(*tables, *arguments)

    def read(self) -> Tensor:
        batch = self.values, self.offsets, self.sample_weights, self.layout
        return _read(self.tables.weights, *batch, self.check_bounds, self.output_dtype)

    def take_gradient(
        self, grad: Tensor, needs_sample_weight_grad: bool, in_graph: bool = False, outer_pass: Any = None
    ) -> Tensor | None:
        """Update or accumulate; return the gradient of the per-sample weights, computed before the update."""
        # Group the ids, unless the forward did.
        sample_weight_grad, batch = None, (self.values, self.offsets, self.sample_weights)
        groups: Any = self.values
        if isinstance(self.groups, RowGroups):
            groups = self.groups
        elif self.groups is not None and (self.shared or self.groups.fork_point is not None):
            groups = self.groups.group(self.values, self.offsets, self.layout)
        if needs_sample_weight_grad:
            sample_weight_grad = _sample_weight_gradient(grad, self.tables.weights, *batch, self.layout)
        if self.accumulator != NOT_ACCUMULATING and not self.shared:
            accumulate_(self.pending, self.accumulator, grad, *batch)
            return sample_weight_grad
        update = partial(row_update_, self.tables, BatchGradient(grad, *batch[1:], groups, self.layout))
        if self.shared:
            update = partial(shared_update, self.accumulator, grad, *batch, groups, self.layout)
        # Other lookups of this pass may read the rows, for that gradient, or again in an activation checkpoint; in a
        # graph these are not known here.
        is_read = in_graph and not self.shared
        if not in_graph:
            address = self.tables.learning_rate.data_ptr()
            is_read = address in _pending_reads or address in row_update.recomputed_rates
        if is_read:
            update_after_backward(self.accumulator, update, outer_pass)
        else:
            update()
        return sample_weight_grad


def _look_up_fused(*args: Any) -> Tensor:
    inputs = FusedBatch(*args)
    row_update.check_not_accumulating(inputs.tables.learning_rate)
    return inputs.read()


def _shape(*args: Any) -> Tensor:
    inputs = FusedBatch(*args)
    return empty_output(inputs.values, inputs.offsets, inputs.layout, inputs.output_dtype)


def _backward_fused(ctx: Any, grad: Tensor) -> dict[str, Any]:
    return {"sample_weights": FusedBatch(*ctx.inputs).take_gradient(grad, ctx.needs_input_grad[_SAMPLE_WEIGHTS], True)}


_SAMPLE_WEIGHTS = len(FusedTables._fields) + 2  # number of the argument of fused lookups
define(
    "embedding_bag_fused",
    "(*FusedTables, *Batch, Tensor? pending, bool shared, int accumulator, bool check_bounds, "
    "ScalarType output_dtype, *IdsOrGroups, *Layout) -> Tensor",
    _shape, _look_up_fused, _backward_fused,
)  # fmt: skip


_BATCH_KINDS = (FusedTables, *[None] * 8, SHARED_ARGUMENTS["*IdsOrGroups"][0], Layout)


def look_up_tables_eagerly(*args: Any) -> Tensor:
    """Run `tritonemb::embedding_bag_fused` without the dispatcher, in plain eager mode."""
    batch = FusedBatch(*unflatten(args, *_BATCH_KINDS))
    row_update.check_not_accumulating(batch.tables.learning_rate)
    groups: Any = batch.groups
    return (batch if groups.starts is not None else batch._replace(groups=None)).look_up()


class BagGradient(NamedTuple):
    """Gradient of the result of a lookup of `values` `[N]` in one table: `[B, dim]`, or `[N, dim]` if not pooled.

    `table` has lists of one tensor; `name` is that of `BagTable`.
    """

    table: FusedTables
    name: str
    values: Tensor
    sample_weights: Tensor | None
    bags: Bags
    grad: Tensor


def bag_fused(
    table: FusedTables, name: str, values: Tensor, sample_weights: Tensor | None, bags: Bags,
    trained_ids: Tensor | None, dtype: torch.dtype, collect: Callable[[BagGradient], None],
) -> Tensor:  # fmt: skip
    """Look up like `bag`, in a table with a fused optimizer, which gets no `.grad`.

    The backward calls `collect` with the gradient of the result; under tracing, it updates the table in place.
    """
    check_ids(values)
    trained_ids = None if trained_ids is values else trained_ids
    if not plain_eager(table.weights[0], values, bags.offsets, sample_weights):
        return torch.ops.tritonemb.bag_fused(*table, name, values, sample_weights, trained_ids, *bags, dtype)
    read = partial(look_up, table.weights[0], values, sample_weights, bags, dtype)
    ids = values if trained_ids is None else trained_ids
    return _look_up_checked(partial(BagGradient, table, name, ids, sample_weights, bags), read, collect)


def _look_up_checked(lookup: "partial[BagGradient]", read: Read, collect: Callable[[BagGradient], None]) -> Tensor:
    """Look up one table in plain eager mode; the backward raises if the versions of the batch have changed."""
    table, name, ids, sample_weights, bags = lookup.args
    weight = table.weights[0]

    def take_gradient(grad: Tensor, needs_sample_weight_grad: bool) -> Tensor | None:
        sample_weight_grad = None
        if needs_sample_weight_grad:
            sample_weight_grad = sample_weight_gradient(grad, weight, ids, bags, sample_weights)
        collect(lookup(grad))
        return sample_weight_grad

    # Versions are compared in the backward, since the table may be updated between it and the callback's update.
    read_weights = table.weights if sample_weights is not None and sample_weights.requires_grad else ()
    inputs = ids, bags.offsets, sample_weights, *read_weights
    return fused_lookup(weight, sample_weights, read, take_gradient, lambda: [name], *inputs)


_BAG_KINDS = (FusedTables, None, None, None, None, Bags, None)


def _look_up_bag(
    table: FusedTables, name: str, values: Tensor, sample_weights: Tensor | None, _: Any, bags: Bags, dtype: torch.dtype
) -> Tensor:
    row_update.check_not_accumulating(table.learning_rate)
    return _read(table.weights, values, bags.offsets, sample_weights, _layout(table, name, bags), bags.checked, dtype)


def _layout(table: FusedTables, name: str, bags: Bags) -> Layout:
    weight = table.weights[0]
    return layout_of((BagTable(name, bags.mean, *weight.shape),), bags.pooled, weight.device)


def _backward_bag(ctx: Any, grad: Tensor) -> dict[str, Any]:
    table, name, values, sample_weights, trained_ids, bags, _ = ctx.inputs
    ids, gradients = values if trained_ids is None else trained_ids, {}
    if ctx.needs_input_grad[_SAMPLE_WEIGHTS]:
        derivative = sample_weight_gradient(grad, table.weights[0], ids, bags, sample_weights)
        gradients["sample_weights"] = derivative
    # Other lookups of the table in this graph may read its rows for the gradient of their per-sample weights.
    update_after_backward(NOT_ACCUMULATING, partial(_bag_update_, table, name, ids, sample_weights, bags, grad))
    return gradients


define(
    "bag_fused",
    "(*FusedTables, str name, Tensor values, Tensor? sample_weights, Tensor? trained, *Bags, ScalarType dtype) "
    "-> Tensor",
    lambda table, _n, values, _s, _t, bags, dtype: empty_bags(table.weights[0], values, bags, dtype),
    _look_up_bag, _backward_bag,
)  # fmt: skip


def look_up_eagerly(*args: Any) -> Tensor:
    """Run `tritonemb::bag_fused` without the dispatcher, in plain eager mode."""
    arguments = unflatten(args, *_BAG_KINDS)
    table, name, values, sample_weights, trained_ids, bags, _ = arguments
    lookup = partial(BagGradient, table, name, values if trained_ids is None else trained_ids, sample_weights, bags)
    return _look_up_checked(lookup, partial(_look_up_bag, *arguments), lambda gradient: _bag_update_(*gradient))


_bag_update_ = define(
    "bag_update_",
    "(*MutableTables, str name, Tensor values, Tensor? sample_weights, *Bags, Tensor grad) -> ()",
    lambda *_: None,
    lambda table, name, ids, sample_weights, bags, grad: row_update.update_rows(
        table, BatchGradient(grad, bags.offsets, sample_weights, ungrouped(ids), _layout(table, name, bags))
    ),
)
