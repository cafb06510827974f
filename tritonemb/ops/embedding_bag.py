"""`tritonemb::embedding_bag`: lookup in `T` tables, differentiable in weights and per-sample weights; and
`tritonemb::embedding_bag_fused`, whose backward is the optimizer's step. `bag_fused` is the latter for one table.

The kernels are in `kernels/embedding_bag.py`. The autograd context keeps the tensors of fused ops without a version
check: a collection that is looked up twice in one graph is updated twice, each time with the gradients of that lookup.
In plain eager mode `fused_lookup`, an autograd function, calls the same kernels without the dispatcher; other lookups
with a backward in Python use it, too. There `bag_fused` passes its gradient to a callback, so that all tables of a
model are updated together at the end of the backward pass.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb.jagged import batch_size_of
from tritonemb.layout import Layout, cached_fact, devices_of, dtypes_of, unpack_names
from tritonemb.ops import registry
from tritonemb.ops.bag import BAGS, Bags, BagTable, empty_bags, layout_of, look_up, sample_weight_gradient
from tritonemb.ops.registry import define, eager, kernel, unflatten
from tritonemb.ops.row_groups import RowGroups, UngroupedIds, check_ids, plain_eager, row_groups, ungrouped
from tritonemb.ops.row_update import (
    NOT_ACCUMULATING,
    SCHEMA,
    TABLES,
    FusedTables,
    accumulate_,
    check_not_accumulating,
    row_update_,
    shared_update,
    table_set_of,
    update_rows,
)


def embedding_bag(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, sample_weights: Tensor | None, layout: Layout,
    check_bounds: bool = True, output_dtype: torch.dtype = torch.float32, trained_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Look up `values` `[N]` in `weights` `[T]`; returns `[B, width]`, or `[N, width]` if the layout is not pooled.

    `trained_ids` `[N]`: ids of the rows that get gradients, if different from `values`; -1 for none. Raise TypeError
    for ids other than int32 or int64; raise ValueError for tables on another device than the batch and, on the CPU, for
    an id out of range or offsets that do not ascend.
    """
    check_ids(values)
    check_devices(weights, values, layout)
    if not torch.is_grad_enabled() and plain_eager(values, offsets, sample_weights, tables=weights):
        return _read(weights, values, offsets, sample_weights, layout, check_bounds, output_dtype)
    return torch.ops.tritonemb.embedding_bag(
        list(weights), values, offsets, sample_weights, trained_ids, check_bounds, output_dtype, *layout
    )


def _read(weights: Sequence[Tensor], values: Tensor, *args: Any) -> Tensor:
    """Run the kernel of the batch's device, without autograd and dispatcher."""
    return kernel("embedding_bag", values.device, cached_fact(weights, dtypes_of))(weights, values, *args)


def check_devices(weights: Sequence[Tensor], values: Tensor, layout: Layout) -> None:
    """Raise unless every table is on the device of the batch or, for a batch on a GPU, in pinned host memory."""
    if cached_fact(weights, devices_of) == {values.device}:
        return
    for index, weight in enumerate(weights):
        if weight.device == values.device or (values.is_cuda and weight.device.type == "cpu" and weight.is_pinned()):
            continue
        raise ValueError(
            f"table {unpack_names(layout.table_names)[index]!r} is on {weight.device} but the batch is on "
            f"{values.device}; move one of them with .to()"
        )


def empty_output(values: Tensor, offsets: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Allocate the result of a lookup, for tracing."""
    num_rows = batch_size_of(offsets, layout.key_starts) if layout.pooled else values.shape[0]
    return values.new_empty(num_rows, layout.width, dtype=dtype)


define(
    "sample_weight_gradient",
    "(Tensor grad, Tensor[] weights, Tensor values, Tensor offsets, Tensor sample_weights, "
    f"{registry.LAYOUT}) -> Tensor",
    lambda grad, weights, values, offsets, sample_weights, *layout: kernel(
        "sample_weight_gradient", grad.device, cached_fact(weights, dtypes_of)
    )(weights, values, offsets, grad, Layout(*layout)).to(sample_weights.dtype),
    lambda _g, _w, _v, _o, sample_weights, *_: torch.empty_like(sample_weights),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, values, offsets, sample_weights, trained_ids, _, _, *layout = inputs
    ctx.layout = Layout(*layout)
    ctx.save_for_backward(*weights, values, offsets, sample_weights, trained_ids, *ctx.layout[:3])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *weights, values, offsets, sample_weights, trained_ids, tables, lookups, key_starts = ctx.saved_tensors
    layout = ctx.layout._replace(tables=tables, lookups=lookups, key_starts=key_starts)
    weight_grads: list[Tensor | None] = [None] * len(weights)
    sample_weight_grad = None
    trained_ids = values if trained_ids is None else trained_ids
    ops = torch.ops.tritonemb
    if any(ctx.needs_input_grad[0]):
        groups = ops.row_groups(trained_ids, offsets, *layout)
        gradients = ops.row_gradients(grad, weights, offsets, sample_weights, *groups, *layout)
        weight_grads = [g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad[0], strict=True)]
    if sample_weights is not None and ctx.needs_input_grad[3]:
        sample_weight_grad = ops.sample_weight_gradient(grad, weights, trained_ids, offsets, sample_weights, *layout)
    return weight_grads, None, None, sample_weight_grad, None, None, None, *([None] * len(layout))


define(
    "embedding_bag",
    f"(Tensor[] weights, {registry.BATCH}, Tensor? trained, bool check_bounds, ScalarType output_dtype, "
    f"{registry.LAYOUT}) -> Tensor",
    lambda weights, *batch: _read(weights, *batch[:3], Layout(*batch[6:]), *batch[4:6]),
    lambda weights, values, offsets, _s, _t, _c, dtype, *layout: empty_output(values, offsets, Layout(*layout), dtype),
    _backward,
    _save,
)


Read = Callable[[], Tensor]
TakeGradient = Callable[[Tensor, bool], Tensor | None]


def fused_lookup(weight: Tensor, sample_weights: Tensor | None, read: Read, take_gradient: TakeGradient) -> Tensor:
    """Look up rows with a backward in Python, which may update rows, accumulate the gradient or exchange it.

    Args:
        weight: represents all tables in the autograd graph; it gets no gradient.
        read: returns the result, `[B, width]` if pooled, else `[N, width]`.
        take_gradient: called with the gradient of the result, and whether the per-sample weights require a gradient,
            which it returns.
    """
    return _FusedLookup.apply(weight, sample_weights, read, take_gradient)


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


def _update_pinned(grad: Tensor, ticket: Tensor, handle: int) -> Tensor:
    table_set_of(handle).update_pinned(int(ticket), grad)
    return grad.new_zeros(1)


registry.mark_effectful(
    define(
        "pinned_update", "(Tensor grad, Tensor ticket, int handle) -> Tensor", _update_pinned,
        lambda grad, ticket, handle: grad.new_empty(1),
    )
)  # fmt: skip


def _save_ticket(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.handle = inputs[2]
    ctx.save_for_backward(inputs[1])


def _backward_pinned(ctx: Any, grad: Tensor) -> tuple[None, ...]:
    torch.ops.tritonemb.pinned_update(grad, *ctx.saved_tensors, ctx.handle)
    return (None,) * 7


# Lookup `[num_rows, width]` of a batch with pinned cache slots, for compiled graphs: it calls `read_pinned` and, in the
# backward, `update_pinned` of a table set, which use the current slots of the cache. `weight` represents all tables in
# the autograd graph and gets no gradient; `ticket`, int64 `[]` on the CPU, is the number of the batch; `handle` is that
# of the table set's accumulator; `trained`: whether gradients are recorded.
pinned_lookup = define(
    "pinned_lookup",
    "(Tensor weight, Tensor ticket, int handle, bool trained, SymInt num_rows, SymInt width, ScalarType dtype)"
    " -> Tensor",
    lambda weight, ticket, handle, trained, *shape: table_set_of(handle).read_pinned(int(ticket), trained),
    lambda weight, ticket, handle, trained, num_rows, width, dtype: weight.new_empty(num_rows, width, dtype=dtype),
    _backward_pinned,
    _save_ticket,
)


def embedding_bag_fused(
    tables: FusedTables, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, groups: RowGroups | None,
    layout: Layout, check_bounds: bool = True, output_dtype: torch.dtype = torch.float32, pending: Tensor | None = None,
    accumulator: int = NOT_ACCUMULATING, shared: bool = False,
) -> Tensor:  # fmt: skip
    """Look up like `embedding_bag`; the backward updates weights, states and counters in place, or accumulates.

    Args:
        groups: groups of the ids; if None, the backward groups the ids, which must not change until then.
        pending: int64 `[]`, number of micro-batches in the accumulator.
        accumulator: handle of the accumulator of the gradients, or NOT_ACCUMULATING to apply them.
        shared: whether the gradients are applied immediately, together with other ranks; see `shared_update`.
    """
    check_ids(values, layout.multiplicity)
    check_devices(tables.weights, values, layout)
    batch = values, offsets, sample_weights, pending, shared, accumulator, check_bounds, output_dtype
    if plain_eager(values, offsets, sample_weights, tables=tables.weights):
        inputs = _Inputs(tables, *batch, UngroupedIds.record(values) if groups is None else groups, layout)
        return fused_lookup(tables.weights[0], sample_weights, inputs.read, inputs.take_gradient)
    if groups is None:
        groups = row_groups(values, offsets, layout) if shared else ungrouped(values)
    return torch.ops.tritonemb.embedding_bag_fused(*tables, *batch, *groups, *layout)


def _versions(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


class _Inputs(NamedTuple):
    tables: FusedTables
    values: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    pending: Tensor | None
    shared: bool
    accumulator: int
    check_bounds: bool
    output_dtype: torch.dtype
    groups: RowGroups | UngroupedIds
    layout: Layout

    def read(self) -> Tensor:
        return _read(
            self.tables.weights, self.values, self.offsets, self.sample_weights, self.layout, self.check_bounds,
            self.output_dtype,
        )  # fmt: skip

    def take_gradient(self, grad: Tensor, needs_sample_weight_grad: bool) -> Tensor | None:
        """Update or accumulate; return the gradient of the per-sample weights, computed before the update."""
        # Group the ids, unless the forward did.
        sample_weight_grad, batch = None, (self.values, self.offsets, self.sample_weights)
        groups: RowGroups | Tensor = self.values
        if isinstance(self.groups, RowGroups):
            groups = self.groups
        elif [self.groups.version] != _versions(self.values):
            raise RuntimeError("the ids were changed in place between their lookup and its backward; change a copy")
        elif self.shared or self.groups.fork_point is not None:
            groups = self.groups.group(self.values, self.offsets, self.layout)
        if needs_sample_weight_grad:
            derive = torch.ops.tritonemb.sample_weight_gradient
            sample_weight_grad = derive(grad, self.tables.weights, *batch, *self.layout)
        if self.accumulator == NOT_ACCUMULATING:
            row_update_(self.tables, grad, self.offsets, self.sample_weights, groups, self.layout)
        elif self.shared:
            assert isinstance(groups, RowGroups)
            shared_update(self.accumulator, grad, *batch, groups, self.layout)
        else:
            assert self.pending is not None
            accumulate_(self.pending, self.accumulator, grad, *batch)
        return sample_weight_grad


_KINDS = (FusedTables, *[None] * 8, RowGroups, Layout)


def _look_up_fused(*args: Any) -> Tensor:
    inputs = _Inputs(*unflatten(args, *_KINDS))
    check_not_accumulating(inputs.tables.learning_rate)
    return inputs.read()


def _shape(*args: Any) -> Tensor:
    inputs = _Inputs(*unflatten(args, *_KINDS))
    return empty_output(inputs.values, inputs.offsets, inputs.layout, inputs.output_dtype)


def _save_fused(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.inputs = inputs


def _backward_fused(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    inputs, index = _Inputs(*unflatten(ctx.inputs, *_KINDS)), len(FusedTables._fields) + 2  # of sample_weights
    sample_weight_grad = inputs.take_gradient(grad, ctx.needs_input_grad[index])
    lists = [[None] * len(tensors) for tensors in inputs.tables[:4]]
    num_following = 5 + len(RowGroups._fields) + len(Layout._fields)
    return *lists, *([None] * (index - 4)), sample_weight_grad, *([None] * num_following)


define(
    "embedding_bag_fused",
    f"({TABLES}, {registry.BATCH}, Tensor? pending, bool shared, int accumulator, bool check_bounds, "
    f"ScalarType output_dtype, {registry.IDS_OR_GROUPS}, {registry.LAYOUT}) -> Tensor",
    _look_up_fused, _shape, _backward_fused, _save_fused,
)  # fmt: skip


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
    trained_ids, weight = None if trained_ids is values else trained_ids, table.weights[0]
    offsets, pooled, mean, checked = bags
    if not plain_eager(weight, values, offsets, sample_weights):
        batch = values, offsets, sample_weights, trained_ids, pooled, mean, checked, dtype
        return torch.ops.tritonemb.bag_fused(*table, name, *batch)
    read = partial(look_up, weight, values, offsets, sample_weights, pooled, mean, checked, dtype)
    ids = values if trained_ids is None else trained_ids
    return _look_up_with_versions(table, name, ids, sample_weights, bags, read, collect)


def _look_up_with_versions(
    table: FusedTables, name: str, ids: Tensor, sample_weights: Tensor | None, bags: Bags, read: Read,
    collect: Callable[[BagGradient], None],
) -> Tensor:  # fmt: skip
    """Look up one table in plain eager mode; the backward raises if the versions of the batch have changed."""
    weight = table.weights[0]
    reads_table = sample_weights is not None and sample_weights.requires_grad
    inputs = ids, bags.offsets, sample_weights, weight if reads_table else None
    versions = _versions(*inputs)

    def take_gradient(grad: Tensor, needs_sample_weight_grad: bool) -> Tensor | None:
        # Versions are compared here, since the table may be updated between this backward and the callback's update.
        if versions != _versions(*inputs):
            raise changed_in_place(name)
        sample_weight_grad = None
        if needs_sample_weight_grad:
            assert sample_weights is not None
            sample_weight_grad = sample_weight_gradient(grad, weight, ids, bags, sample_weights)
        collect(BagGradient(table, name, ids, sample_weights, bags, grad))
        return sample_weight_grad

    return fused_lookup(weight, sample_weights, read, take_gradient)


def changed_in_place(name: str) -> RuntimeError:
    """Return the error for a batch, or rows of table `name`, that changed between lookup and backward."""
    return RuntimeError(
        f"ids, offsets, per_sample_weights or, where those have a gradient, rows of table {name!r} were changed in "
        "place between the lookup and its backward; change a copy"
    )


_BAG_KINDS = (FusedTables, *[None] * 9)


def _look_up_bag(*args: Any) -> Tensor:
    table, name, *batch = unflatten(args, *_BAG_KINDS)
    check_not_accumulating(table.learning_rate)
    values, offsets, sample_weights, _, pooled, mean, checked, dtype = batch
    layout = layout_of((BagTable.from_weight(table.weights[0], mean, name),), pooled, values.device)
    return _read(table.weights, values, offsets, sample_weights, layout, checked, dtype)


def _shape_of_bag(*args: Any) -> Tensor:
    table, _, values, offsets, _, _, pooled, _, _, dtype = unflatten(args, *_BAG_KINDS)
    return empty_bags(table.weights[0], values, offsets, pooled, dtype)


def _backward_bag(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    table, name, values, offsets, sample_weights, trained_ids, pooled, mean, *_ = unflatten(ctx.inputs, *_BAG_KINDS)
    index, ids, sample_weight_grad = len(FusedTables._fields) + 3, values if trained_ids is None else trained_ids, None
    if sample_weights is not None and ctx.needs_input_grad[index]:
        bags = Bags(offsets, pooled, mean)
        sample_weight_grad = sample_weight_gradient(grad, table.weights[0], ids, bags, sample_weights)
    torch.ops.tritonemb.bag_update_(*table, grad, ids, offsets, sample_weights, name, pooled, mean)
    lists = [[None] * len(tensors) for tensors in table[:4]]
    return *lists, *[None] * (index - 4), sample_weight_grad, *[None] * 5


define(
    "bag_fused", f"({TABLES}, str name, {registry.BATCH}, {BAGS}) -> Tensor", _look_up_bag, _shape_of_bag,
    _backward_bag, _save_fused,
)  # fmt: skip


def look_up_eagerly(*args: Any) -> Tensor:
    """Run `tritonemb::bag_fused` without the dispatcher, in plain eager mode."""
    table, name, values, offsets, sample_weights, trained_ids, pooled, mean, *_ = unflatten(args, *_BAG_KINDS)

    def update(gradient: BagGradient) -> None:
        eager["bag_update_"](*table, gradient.grad, ids, offsets, sample_weights, name, pooled, mean)

    ids, read = values if trained_ids is None else trained_ids, partial(_look_up_bag, *args)
    return _look_up_with_versions(table, name, ids, sample_weights, Bags(offsets, pooled, mean), read, update)


def _update_bag(*args: Any) -> None:
    table, grad, values, offsets, sample_weights, name, pooled, mean = unflatten(args, FusedTables, *[None] * 7)
    layout = layout_of((BagTable.from_weight(table.weights[0], mean, name),), pooled, values.device)
    update_rows(table, grad, offsets, sample_weights, ungrouped(values), layout)


define(
    "bag_update_",
    f"({SCHEMA.format(a='(a!)', b='(b!)', c='(c!)', d='(d!)')}, Tensor grad, {registry.BATCH}, str name, bool pooled, "
    "bool mean) -> ()",
    _update_bag,
    lambda *args: None,
)
