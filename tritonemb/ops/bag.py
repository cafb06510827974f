"""One table as an ordinary tensor: looked up, and differentiated as often as one likes.

`F(W, s, g) = Σ_p c_p s_p ⟨W[values_p], g_p⟩` is linear in the table `W`, the per-sample weights `s` and the output's
gradient `g`; `c_p` is 1, or for means one over the bag's length, and `g_p` is the row of `g` that position `p` went to.
The lookup, the gradient of the table and that of the per-sample weights are the derivatives of `F` by `g`, `W` and `s`:
each one's own derivatives are the two others. As ops they are differentiable once, and serve what is traced.

`bag_fused` is the lookup whose backward is the optimizer's step on that one table. Where nothing is traced, its
gradient goes to whoever gathers it, so that the tables of a model are updated together when the backward pass ends.

An id below zero is a position that takes no part, where ids are not checked (`drop_padding` makes such ids).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb.layout import SEED, Layout, lines_of, make_layout
from tritonemb.ops.accumulate import check_not_gathering
from tritonemb.ops.embedding_bag import fused_lookup
from tritonemb.ops.registry import BATCH, CPU, REFERENCE, choose, define, kernel, plain_eager, unflatten
from tritonemb.ops.row_groups import RowGroups, check_ids, row_groups
from tritonemb.ops.row_update import MUTATED, SCHEMA, TABLES, FusedTables, row_gradients_, row_update_
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
        return torch.ops.tritonemb.bag(weight, values, bags.offsets, sample_weights, trained, *bags[1:], dtype)
    transformed = torch._C._functorch.maybe_current_level()
    if not torch.is_grad_enabled() and not transformed:
        return _run("bag", look_up, weight, values, bags.offsets, sample_weights, None, *bags[1:], dtype)
    apply = _Lookup.apply if transformed else _EagerLookup.apply
    return apply(weight, sample_weights, values, trained, *bags, sparse, dtype)


def serves_sparse(*tensors: Tensor | None) -> bool:
    """Whether `bag` of these can have a sparse gradient: not where it is traced, nor under `torch.func`."""
    return plain_eager(*tensors) and all(tensor is None or not tensor.is_meta for tensor in tensors)


def drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    """`values` `[N]` with -1 for those that equal `padding_idx`; offsets as in `Bags`.

    Raises:
        RuntimeError: for an id out of range, as `bag` does.
    """
    return _run("drop_padding", _drop_padding, values, offsets, padding_idx, num_rows)


def _run(op: str, run: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call kernels without the dispatcher where that may be; the first arguments, up to four, are tensors."""
    tensors = args[: 2 if op == "drop_padding" else 4]
    return run(*args) if serves_sparse(*tensors) else getattr(torch.ops.tritonemb, op)(*args)


class _Lookup(torch.autograd.Function):
    """∂F/∂g."""

    @staticmethod
    def forward(
        weight: Tensor, sample_weights: Tensor | None, values: Tensor, trained: Tensor | None, offsets: Tensor,
        pooled: bool, mean: bool, checked: bool, sparse: bool, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        return _run("bag", look_up, weight, values, offsets, sample_weights, None, pooled, mean, checked, dtype)

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
        weight, sample_weights, values, _, offsets, pooled, mean, checked, _, dtype = inputs
        output = _run("bag", look_up, weight, values, offsets, sample_weights, None, pooled, mean, checked, dtype)
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
        rest = num_rows, pooled, mean, dtype
        return _run("bag_gradient", derive_weight, grad, values, offsets, sample_weights, *rest)

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
        return derive_weight(grad, values, offsets, sample_weights, num_rows, pooled, mean, dtype, sparse=True)

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
        rest = pooled, mean, dtype
        return _run("bag_sample_weight_gradient", derive_sample_weights, grad, weight, values, offsets, *rest)

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


class BagTable(NamedTuple):
    """A table as its lookups see it, and a name for error messages, which also seeds its stochastic rounding."""

    num_rows: int
    dim: int
    mean: bool = False
    name: str = "weight"

    @classmethod
    def of(cls, weight: Tensor, mean: bool = False, name: str = "weight") -> BagTable:
        """The table that holds `weight` `[rows, dim]`."""
        num_rows, dim = weight.shape
        return cls(num_rows, dim, mean, name)


@functools.lru_cache(maxsize=1024)
def layout_of(tables: tuple[BagTable, ...], pooled: bool, device: torch.device) -> Layout:
    """Of one key for each table; kept, so that nothing is sent to the device again."""
    configs = [
        TableConfig(f"{place}", table.num_rows, table.dim, pooling="mean" if table.mean else "sum")
        for place, table in enumerate(tables)
    ]
    names = lines_of(table.name for table in tables)
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


def look_up(
    weight: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, trained: Tensor | None,
    pooled: bool, mean: bool, checked: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`bag` by the kernels of the tensors' device: no autograd, no dispatcher."""
    layout = layout_of((BagTable.of(weight, mean),), pooled, values.device)
    look_up = kernel("embedding_bag", values.device, [weight])
    serving = choose("embedding_bag", values.device, [weight])
    if serving == REFERENCE:
        _check_offsets(values, offsets)
    try:
        if serving == CPU and not pooled and checked and sample_weights is None and dtype == weight.dtype:
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


def _drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    layout = layout_of((BagTable(num_rows, 1),), True, values.device)
    try:
        return kernel("drop_padding", values.device)(values, offsets, padding_idx, layout)
    except ValueError as error:
        raise explained(error, values, num_rows, True) from None


def derive_weight(
    grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, num_rows: int, pooled: bool,
    mean: bool, dtype: torch.dtype, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """The gradient of a table, `[num_rows, dim]`; or as a sparse COO tensor, rows ascending.

    On the CPU the latter is coalesced: one entry for each distinct row. On a GPU nobody may wait for the number of
    distinct rows, so there are as many entries as values; those behind the last distinct row repeat it, with zeros.
    """
    if values.shape[0] >= 2**31:
        raise ValueError(f"one call may look up at most {2**31 - 1} ids, got {values.shape[0]}")
    layout = layout_of((BagTable(num_rows, grad.shape[1], mean),), pooled, values.device)
    groups = RowGroups(*kernel("row_groups", values.device)(values, offsets, layout))
    exact = grad.device.type == "cpu"
    count = num_rows if not sparse else int(groups.num_groups) if exact else values.shape[0]
    sum_dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    sums = grad.new_zeros(count, grad.shape[1], dtype=sum_dtype)
    row_gradients_([sums], grad, offsets, sample_weights, groups, layout, compact=sparse)
    if not sparse:
        return sums.to(dtype)
    rows = groups.rows[:count].clone() if exact else places_of(groups)
    shape = (num_rows, grad.shape[1])
    return torch.sparse_coo_tensor(rows.unsqueeze(0), sums.to(dtype), shape, check_invariants=False, is_coalesced=exact)


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
    """The gradient of the per-sample weights, `[N]`."""
    layout = layout_of((BagTable.of(weight, mean),), pooled, values.device)
    dots = kernel("sample_weight_gradient", grad.device, [weight])
    return dots([weight.contiguous()], values, offsets, grad, layout).to(dtype)


def _empty(weight: Tensor, values: Tensor, offsets: Tensor, _s: Any, _t: Any, pooled: bool, *rest: Any) -> Tensor:
    return weight.new_empty(offsets.shape[0] - 1 if pooled else values.shape[0], weight.shape[1], dtype=rest[-1])


_BAGS = "Tensor? trained, bool pooled, bool mean, bool checked, ScalarType dtype"
_bag = define("bag", f"(Tensor weight, {BATCH}, {_BAGS}) -> Tensor", look_up, _empty)
define(
    "drop_padding",
    "(Tensor values, Tensor offsets, int padding_idx, SymInt num_rows) -> Tensor",
    _drop_padding,
    lambda values, *_: torch.empty_like(values),
)
define(
    "bag_gradient",
    f"(Tensor grad, {BATCH}, SymInt num_rows, bool pooled, bool mean, ScalarType dtype) -> Tensor",
    derive_weight,
    lambda grad, _v, _o, _s, num_rows, _p, _m, dtype: grad.new_empty(num_rows, grad.shape[1], dtype=dtype),
)
define(
    "bag_sample_weight_gradient",
    "(Tensor grad, Tensor weight, Tensor values, Tensor offsets, bool pooled, bool mean, ScalarType dtype) -> Tensor",
    derive_sample_weights,
    lambda _g, _w, values, _o, _p, _m, dtype: values.new_empty(values.shape[0], dtype=dtype),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, values, offsets, sample_weights, trained, ctx.pooled, ctx.mean, _, _ = inputs
    ctx.num_rows, ctx.dtype = weight.shape[0], weight.dtype
    needed = weight if sample_weights is not None and ctx.needs_input_grad[3] else None
    ctx.save_for_backward(needed, values if trained is None else trained, offsets, sample_weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """As of `_Lookup`, but differentiable once."""
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


class BagGradient(NamedTuple):
    """The gradient of one lookup's result: `[B, dim]`, or `[N, dim]` if not pooled, for the ids `values` `[N]`.

    Attributes:
        table: one, in lists of one.
        name: as in `BagTable`.
    """

    table: FusedTables
    name: str
    values: Tensor
    sample_weights: Tensor | None
    bags: Bags
    grad: Tensor


def bag_fused(
    table: FusedTables,
    name: str,
    values: Tensor,
    sample_weights: Tensor | None,
    bags: Bags,
    trained: Tensor | None,
    dtype: torch.dtype,
    gather: Callable[[BagGradient], None],
) -> Tensor:
    """As `bag`, for a table without a gradient of its own.

    Its backward gives what there is to be added up to `gather`; traced, it updates the table in place.
    """
    check_ids(values)
    trained, weight = None if trained is values else trained, table.weights[0]
    if plain_eager(weight, values, bags.offsets, sample_weights):
        update = _GatheredUpdate(table, name, values, sample_weights, bags, trained, dtype, gather)
        return fused_lookup(weight, sample_weights, update)
    return torch.ops.tritonemb.bag_fused(*table, name, values, bags.offsets, sample_weights, trained, *bags[1:], dtype)


class _GatheredUpdate:
    """Checks the batch's versions itself, as the table may be updated before this backward runs."""

    def __init__(
        self, table: FusedTables, name: str, values: Tensor, sample_weights: Tensor | None, bags: Bags,
        trained: Tensor | None, dtype: torch.dtype, gather: Callable[[BagGradient], None],
    ) -> None:  # fmt: skip
        self._table, self._name, self._values, self._bags, self._dtype = table, name, values, bags, dtype
        self._ids, self._sample_weights, self._gather = values if trained is None else trained, sample_weights, gather
        self._versions = self._current_versions(sample_weights is not None and sample_weights.requires_grad)

    def _current_versions(self, reads_table: bool) -> list[int]:
        tensors = self._ids, self._bags.offsets, self._sample_weights, self._table.weights[0] if reads_table else None
        return [0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]

    def read(self) -> Tensor:
        offsets, pooled, mean, checked = self._bags
        return look_up(
            self._table.weights[0], self._values, offsets, self._sample_weights, None, pooled, mean, checked,
            self._dtype,
        )  # fmt: skip

    def take_gradient(self, grad: Tensor, needs_sample_weight_grad: bool) -> Tensor | None:
        offsets, pooled, mean, _ = self._bags
        if self._versions != self._current_versions(needs_sample_weight_grad):
            raise RuntimeError(
                f"ids, offsets, per_sample_weights or, where those have a gradient, rows of table {self._name!r} were "
                "changed in place between the lookup and its backward; change a copy"
            )
        by_sample_weight = None
        if needs_sample_weight_grad:
            assert self._sample_weights is not None
            by_sample_weight = derive_sample_weights(
                grad, self._table.weights[0], self._ids, offsets, pooled, mean, self._sample_weights.dtype
            )
        self._gather(BagGradient(self._table, self._name, self._ids, self._sample_weights, self._bags, grad))
        return by_sample_weight


def _look_up_fused(*args: Any) -> Tensor:
    table, name, *batch = unflatten(args, FusedTables, *[None] * 9)
    check_not_gathering(table.learning_rate)
    values, offsets, sample_weights, _, pooled, mean, checked, dtype = batch
    layout = layout_of((BagTable.of(table.weights[0], mean, name),), pooled, values.device)
    look_up = kernel("embedding_bag", values.device, table.weights)
    return look_up(table.weights, values, offsets, sample_weights, layout, checked, dtype)


_bag_fused = define(
    "bag_fused",
    f"({TABLES}, str name, {BATCH}, {_BAGS}) -> Tensor",
    _look_up_fused,
    lambda *args: _empty(args[0][0], *args[len(FusedTables._fields) + 1 :]),
)


def _save_fused(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """The tensors as they are, without a version check, as in `embedding_bag_fused`."""
    ctx.inputs = inputs


def _backward_fused(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    table, name, values, offsets, sample_weights, trained, pooled, mean, _, _ = unflatten(
        ctx.inputs, FusedTables, *[None] * 9
    )
    ids, by_sample_weight, place = values if trained is None else trained, None, len(FusedTables._fields) + 3
    if sample_weights is not None and ctx.needs_input_grad[place]:
        by_sample_weight = torch.ops.tritonemb.bag_sample_weight_gradient(
            grad, table.weights[0], ids, offsets, pooled, mean, sample_weights.dtype
        )
    torch.ops.tritonemb.bag_update_(*table, grad, ids, offsets, sample_weights, name, pooled, mean)
    lists = [[None] * len(tensors) for tensors in table[:4]]
    return *lists, *[None] * (place - 4), by_sample_weight, *[None] * 5


_bag_fused.register_autograd(_backward_fused, setup_context=_save_fused)


def _update(*args: Any) -> None:
    table, grad, values, offsets, sample_weights, name, pooled, mean = unflatten(args, FusedTables, *[None] * 7)
    layout = layout_of((BagTable.of(table.weights[0], mean, name),), pooled, values.device)
    row_update_(table, grad, offsets, sample_weights, row_groups(values, offsets, layout), layout)


define(
    "bag_update_",
    f"({SCHEMA.format(a='(a!)', b='(b!)', c='(c!)', d='(d!)')}, Tensor grad, {BATCH}, str name, bool pooled, "
    "bool mean) -> ()",
    _update,
    lambda *args: None,
    mutates=MUTATED,
)
