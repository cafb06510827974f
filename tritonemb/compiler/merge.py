"""Replace a group of lookups by one: a concatenated batch of ids, one op, and slices of its result.

The batch and the slices are computed by functions of this module, which are single nodes of the graph.

Slices of a wider matrix are not contiguous, and they share its memory. Nodes that only read them use them directly;
others, such as a `view`, an in-place function or the output of the graph, get a copy like the lookup's result.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from operator import add, getitem, mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tritonemb.compiler import graph
from tritonemb.compiler.graph import Writer, concat_operands, expression, is_concatenation, is_only_read, value_of
from tritonemb.compiler.lookups import FUSED_BAGS, LookupGroup, LookupIds, TableLookup
from tritonemb.layout import MEAN, SUM, Layout, TableRow, build_layout
from tritonemb.ops.bag import count_unpadded
from tritonemb.ops.embedding_bag import look_up_eagerly, look_up_tables_eagerly
from tritonemb.ops.row_update import NOT_ACCUMULATING, join_tables
from tritonemb.types import seed_of

_EAGER = dict.fromkeys(FUSED_BAGS, look_up_eagerly) | {torch.ops.tritonemb.embedding_bag_fused: look_up_tables_eagerly}
_SHAPE_FUNCTIONS = {getitem, add, mul, torch.arange, torch.cat, "numel", "new_full", "view", "reshape", "flatten"}


def concat_batches(members: Sequence[LookupIds], pooled: bool) -> tuple[Any, ...]:
    """Concatenate lookups: return ids `[N]`, ids of the rows that get gradients, offsets, sample weights; and counts.

    Counts `[B, 1]`, one tensor per lookup that divides later, are the divisors of its means.
    """
    all_values, all_trained, counts = [], [], []
    for bags in members:
        values = bags.ids.reshape(-1)
        trained_values = values if bags.trained is None else bags.trained
        if bags.drops_padding:
            offsets = _lookup_offsets(bags)
            trained_values = values = torch.ops.tritonemb.drop_padding(values, offsets, bags.padding_idx, bags.num_rows)
            if bags.divides_later:
                counts.append(count_unpadded(values, offsets))
        elif bags.padding_idx is not None:
            trained_values = values.masked_fill(values == bags.padding_idx, -1)
        all_values.append(values)
        all_trained.append(trained_values)
    all_equal = all(trained_values is values for trained_values, values in zip(all_trained, all_values, strict=True))
    offsets, ids = _all_offsets(members, pooled), torch.cat(all_values)
    return ids, None if all_equal else torch.cat(all_trained), offsets, _sample_weights(members), *counts


def _sample_weights(members: Sequence[LookupIds]) -> Tensor | None:
    example = next((bags.sample_weights for bags in members if bags.sample_weights is not None), None)
    if example is None:
        return None
    pairs = ((bags.sample_weights, bags.ids.numel()) for bags in members)
    return torch.cat([example.new_ones(size) if weights is None else weights.reshape(-1) for weights, size in pairs])


def _all_offsets(members: Sequence[LookupIds], pooled: bool) -> Tensor:
    """Offsets of all bags, `[K * B + 1]`; if not pooled, of the ids of each lookup, `[K + 1]`."""
    sizes, device = [bags.ids.numel() for bags in members], members[0].ids.device
    *bases, end = accumulate(sizes, initial=0)
    steps = [_bag_length(bags) for bags in members] if pooled else sizes
    have_equal_length = all(bags.offsets is None for bags in members) and len({expression(step) for step in steps}) == 1
    if have_equal_length and expression(steps[0]) != 0:
        return torch.arange(0, end + 1, steps[0], device=device)
    pieces = [_full(base, device) for base in bases]
    if pooled:
        pieces = [part for bags, base in zip(members, bases, strict=True) for part in _starts(bags, base)]
    return torch.cat([*pieces, _full(end, device)])


def _bag_length(bags: LookupIds) -> Any:
    return 1 if bags.single else bags.ids.shape[-1]


def _full(number: int, device: torch.device) -> Tensor:
    return torch.full((1,), number, dtype=torch.int64, device=device)


def _lookup_offsets(bags: LookupIds) -> Tensor:
    """Offsets of the bags of a lookup, `[B + 1]`."""
    size, device = bags.ids.numel(), bags.ids.device
    if bags.offsets is None:
        return torch.arange(0, size + 1, _bag_length(bags), device=device)
    offsets: Tensor = bags.offsets.to(torch.int64)
    if not bags.has_last_offset:
        return torch.cat([offsets, _full(size, device)])
    # With padding, PyTorch's last bag extends to the last id.
    return torch.cat([offsets[:-1], offsets[-1:].clamp(min=size)]) if bags.drops_padding else offsets


def _starts(bags: LookupIds, base: int) -> list[Tensor]:
    """Starts of the bags, relative to `base`, `[B]`, as a list of tensors to concatenate.

    A first offset other than 0, or a last one other than the number of ids, would move ids to the bag of another
    lookup; it becomes -1, which the kernels report, like any descending offset. Ids beyond an open end go to a second
    key, `[2 * B]`, without a table.
    """
    offsets = _lookup_offsets(bags)
    shifted = offsets + base
    if bags.offsets is None:
        return [shifted[:-1]]
    fits = offsets[:1] == 0
    if bags.has_last_offset and not bags.open_end:
        fits = fits & (offsets[-1:] == bags.ids.numel())
    first = torch.where(fits, shifted[:1], -1)
    if not bags.open_end:
        return [first, shifted[1:-1]]
    size = bags.ids.numel()
    last = torch.where(offsets[-1:] <= size, shifted[-1:], -1)
    return [first, shifted[1:-1], last, shifted.new_full((offsets.shape[0] - 2,), base + size)]


def split_result(out: Tensor, members: Sequence[LookupIds], dims: Sequence[int], pooled: bool) -> tuple[Tensor, ...]:
    """Split the merged result by lookups: its columns, or its rows if not pooled."""
    return out.split(list(dims), 1) if pooled else out.split([bags.ids.numel() for bags in members])


def reshape_result(result: Tensor, ids: Tensor | None, counts: Tensor | None, dtype: torch.dtype, copy: bool) -> Tensor:
    """Reshape a slice of the merged result to that of its lookup: divide means, copy, restore the shape of `ids`."""
    if counts is not None:
        result = (result / counts).to(dtype)
    elif copy:
        result = result.clone()
    return result if ids is None else result.reshape(*ids.shape, result.shape[1])


def cacheable_functions() -> dict[str, str]:
    """Functions of this module in graphs, with a version, for the cache of AOTAutograd."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return {f"{__name__}.{function.__name__}": version for function in (concat_batches, split_result, reshape_result)}


def merge(gm: GraphModule, group: LookupGroup) -> str:
    """Replace a group's lookups by one, with the same results; return a description."""
    write, pooled = Writer(gm, _move_inputs_before(group)), group.pooled
    users = Counter(user for lookup in group.lookups for user in lookup.node.users)
    concatenations = [node for node, count in users.items() if pooled and count > 1 and is_concatenation(node)]
    lookup_of = {lookup.node: lookup for lookup in group.lookups}
    concatenated = [lookup_of[part] for node in concatenations for part in concat_operands(node) if part in lookup_of]
    # Order the columns as concatenations do, then all others.
    lookups = list({lookup.node: lookup for lookup in (*concatenated, *group.lookups)}.values())
    tables = list({lookup.weight: None for lookup in lookups})
    batch = write(concat_batches, tuple(lookup.bags for lookup in lookups), pooled)
    out = _look_up(lookups, tables, batch, _write_layout(lookups, tables, pooled, write), write)
    columns = _replace_results(lookups, batch, out, pooled, write)
    for node in concatenations:
        _join_columns(node, columns, out, write)
    graph.erase_unused(gm)
    update = " with a fused optimizer" if lookups[0].update else ""
    shape = "pooled, columns side by side" if pooled else "a row for each id"
    return f"{len(lookups)} lookups of {len(tables)} tables became one{update} ({shape})"


def _move_inputs_before(group: LookupGroup) -> Node:
    """Move the inputs of the group's lookups before the first lookup; return that."""
    position = {node: index for index, node in enumerate(group.region)}
    first = min((lookup.node for lookup in group.lookups), key=position.__getitem__)
    inputs = graph.reachable([lookup.node for lookup in group.lookups], graph.dependencies(group.region).__getitem__)
    later_inputs = [node for node in group.region[position[first] + 1 :] if node in inputs]
    for node in [*later_inputs, *(node for node in first.graph.nodes if node.op == "get_attr" and first < node)]:
        first.prepend(node)
    return first


def _write_layout(lookups: Sequence[TableLookup], tables: list[Node], pooled: bool, write: Writer) -> Layout:
    """Build the layout, with a key per lookup, and one table for all lookups of a weight."""
    users = list({lookup.weight: lookup for lookup in lookups}.values())
    # Seeds do not depend on the merge, so that stochastic rounding is bitwise identical.
    rows = [TableRow(0, user.bags.num_rows, user.dim, seed_of(user.seed_name)) for user in users]
    columns = [0, *accumulate(lookup.dim for lookup in lookups)] if pooled else [0] * len(lookups)
    key_lookups: list[list[tuple[int, int, int, int]]] = []
    for lookup, column in zip(lookups, columns, strict=False):
        pooling = MEAN if lookup.bags.mean and not lookup.bags.divides_later else SUM
        key_lookups.append([(tables.index(lookup.weight), column, lookup.dim, pooling)])
        key_lookups += [[]] * lookup.bags.open_end  # the key of ids beyond the last offset
    keys = [lookup for lookup in lookups for _ in range(1 + lookup.bags.open_end)]
    names = [lookup.table for lookup in users], [lookup.feature for lookup in keys]
    layout = build_layout(rows, key_lookups, *names, pooled, value_of(tables[0]).device)
    constants: Any = {name: write.constant(getattr(layout, name), name) for name in Layout._fields[:3]}
    return layout._replace(**constants)


def _look_up(lookups: Sequence[TableLookup], tables: list[Node], batch: Node, layout: Layout, write: Writer) -> Node:
    first, ops = lookups[0], torch.ops.tritonemb
    items = [None if tensor is None else write.item(batch, i) for i, tensor in enumerate(value_of(batch)[:4])]
    values, trained_ids, offsets, sample_weights = items
    sizes = [value_of(lookup.bags.ids).numel() for lookup in lookups]
    if not layout.pooled and all(isinstance(size, int) for size in sizes):
        starts = torch.tensor([0, *accumulate(sizes)], device=value_of(tables[0]).device)
        offsets = write.constant(starts, "offsets")
    options = first.op_checks, first.op_dtype
    if first.update is None:
        return write(ops.embedding_bag.default, tables, values, offsets, sample_weights, trained_ids, *options, *layout)
    updates: list[Any] = list({lookup.weight: lookup.update for lookup in lookups}.values())
    groups = values if trained_ids is None else trained_ids, None, None, None
    return write(
        ops.embedding_bag_fused.default, *join_tables(updates), values, offsets, sample_weights, None, False,
        NOT_ACCUMULATING, *options, *groups, *layout,
    )  # fmt: skip


def _replace_results(
    lookups: Sequence[TableLookup], batch: Node, out: Node, pooled: bool, write: Writer
) -> dict[Node, tuple[int, int]]:
    """Replace the results of lookups by slices of the merged result; return the columns of each slice."""
    members, dims = tuple(lookup.bags for lookup in lookups), [lookup.dim for lookup in lookups]
    parts = write(split_result, out, members, dims, pooled)
    columns, end, means = {}, 0, iter(range(4, len(value_of(batch))))
    for index, lookup in enumerate(lookups):
        view = result = write.item(parts, index)
        counts = write.item(batch, next(means)) if lookup.bags.divides_later else None
        needs_copy = not is_only_read(lookup.node)
        ids = lookup.bags.ids if lookup.bags.single and value_of(lookup.bags.ids).dim() != 1 else None
        if needs_copy or counts is not None or ids is not None:
            result = write(reshape_result, view, ids, counts, lookup.dtype, needs_copy)
        lookup.node.replace_all_uses_with(result)
        columns[view] = end, end + lookup.dim
        end += lookup.dim
    return columns


def _join_columns(node: Node, columns: dict[Node, tuple[int, int]], out: Node, write: Writer) -> None:
    """Use one slice for operands of a concatenation that are consecutive columns of the merged result."""
    runs: list[list[Any]] = []
    for part in concat_operands(node):
        previous = columns.get(runs[-1][-1]) if runs else None
        if previous and part in columns and previous[1] == columns[part][0]:
            runs[-1].append(part)
        else:
            runs.append([part])
    uses_all = len(runs[0]) == len(columns) and all(set(part.users) == {node} for part in columns)
    if len(runs) == 1 and not uses_all and not is_only_read(node):
        return  # an in-place change of the concatenation must not change the columns
    spans = [None if len(run) == 1 else (columns[run[0]][0], columns[run[-1]][1]) for run in runs]
    operands = [_columns(out, *span, write) if span else run[0] for run, span in zip(runs, spans, strict=True)]
    if len(operands) > 1:
        node.args, node.kwargs = (operands, *node.args[1:]), {k: v for k, v in node.kwargs.items() if k != "tensors"}
    else:
        node.replace_all_uses_with(operands[0])


def _columns(out: Node, first: int, end: int, write: Writer) -> Node:
    return out if (first, end) == (0, value_of(out).shape[1]) else write.item(out, (slice(None), slice(first, end)))


def call_lookups(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    """Call lookups without the dispatcher, if a graph only looks up in fused tables on the CPU; return whether it does.

    Such a graph has nothing to compile, and the overhead of a compiled graph exceeds the time of a small lookup.
    """
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    lookups = [node for node in calls if node.target in _EAGER]
    on_cpu = all(value.device.type == "cpu" for value in inputs if isinstance(value, Tensor))
    if not lookups or not on_cpu or not all(node in lookups or node.target in _SHAPE_FUNCTIONS for node in calls):
        return False
    for node in lookups:
        node.target = _EAGER[node.target]
    gm.recompile()
    return True
