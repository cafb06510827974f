"""Put one lookup in place of a group of them: one batch of their ids, one op, and parts of its result.

The batch and the parts are made by functions of this file, which stand in the graph as one node each.

Parts of a wider matrix are not contiguous, and they share its memory. Who only reads them gets them as they are; anyone
else, a `view`, a function that works in place, the caller of the graph, gets a copy, which is what the lookup returned.
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

from tritonemb.compiler.graph import (
    CONCATENATIONS,
    Writer,
    dependencies,
    erase_unused,
    expression,
    is_joined,
    joined_parts,
    only_read,
    reached,
    value_of,
)
from tritonemb.compiler.lookups import FUSED_BAGS, LookupGroup, LookupIds, TableLookup
from tritonemb.layout import MEAN, SUM, Layout, TableRow, build_layout
from tritonemb.ops.bag import count_unpadded
from tritonemb.ops.embedding_bag import look_up_eagerly
from tritonemb.ops.row_update import NOT_ACCUMULATING
from tritonemb.types import seed_of

_SHAPE_FUNCTIONS = {getitem, add, mul, torch.arange, *CONCATENATIONS, "numel", "new_full", "view", "reshape", "flatten"}


def one_batch(members: Sequence[LookupIds], pooled: bool) -> tuple[Any, ...]:
    """The ids of all, `[N]`; those that gradients go to; offsets; sample weights; and what each mean is divided by."""
    kept, trained, counts = [], [], []
    for bags in members:
        values = bags.ids.reshape(-1)
        own = values if bags.trained is None else bags.trained
        if bags.drops_padding:
            offsets = _own_offsets(bags)
            own = values = torch.ops.tritonemb.drop_padding(values, offsets, bags.padding_idx, bags.num_rows)
            if bags.divides_later:
                counts.append(count_unpadded(values, offsets))
        elif bags.padding_idx is not None:
            own = values.masked_fill(values == bags.padding_idx, -1)
        kept.append(values)
        trained.append(own)
    same = all(own is values for own, values in zip(trained, kept, strict=True))
    offsets = _all_offsets(members, pooled)
    return torch.cat(kept), None if same else torch.cat(trained), offsets, _sample_weights(members), *counts


def _sample_weights(members: Sequence[LookupIds]) -> Tensor | None:
    given = next((bags.sample_weights for bags in members if bags.sample_weights is not None), None)
    if given is None:
        return None
    own = ((bags.sample_weights, bags.ids.numel()) for bags in members)
    return torch.cat([given.new_ones(size) if weights is None else weights.reshape(-1) for weights, size in own])


def _all_offsets(members: Sequence[LookupIds], pooled: bool) -> Tensor:
    """`[K * B + 1]`: where each member's bags begin, and the end; `[K + 1]` if not pooled: where its ids do."""
    sizes, device = [bags.ids.numel() for bags in members], members[0].ids.device
    *bases, end = accumulate(sizes, initial=0)
    steps = [_bag_length(bags) for bags in members] if pooled else sizes
    alike = all(bags.offsets is None for bags in members) and len({expression(step) for step in steps}) == 1
    if alike and expression(steps[0]) != 0:
        return torch.arange(0, end + 1, steps[0], device=device)
    parts = [_full(base, device) for base in bases]
    if pooled:
        parts = [part for bags, base in zip(members, bases, strict=True) for part in _starts(bags, base)]
    return torch.cat([*parts, _full(end, device)])


def _bag_length(bags: LookupIds) -> Any:
    return 1 if bags.single else bags.ids.shape[-1]


def _full(number: int, device: torch.device) -> Tensor:
    return torch.full((1,), number, dtype=torch.int64, device=device)


def _own_offsets(bags: LookupIds) -> Tensor:
    """`[B + 1]` of one lookup by itself."""
    size, device = bags.ids.numel(), bags.ids.device
    if bags.offsets is None:
        return torch.arange(0, size + 1, _bag_length(bags), device=device)
    offsets: Tensor = bags.offsets.to(torch.int64)
    if not bags.has_last_offset:
        return torch.cat([offsets, _full(size, device)])
    # With padding, PyTorch's last bag has all that is left.
    return torch.cat([offsets[:-1], offsets[-1:].clamp(min=size)]) if bags.drops_padding else offsets


def _starts(bags: LookupIds, base: int) -> list[Tensor]:
    """`[B]`, in pieces: where the bags begin, from `base` on.

    A first offset that is not 0, or a last one that is not the number of ids, would give ids to a neighbour's bag; it
    becomes -1, which the kernels report, as they do any offset that does not ascend. Ids behind an open end go to
    another key, `[2 * B]`, which no table has.
    """
    own = _own_offsets(bags)
    moved = own + base
    if bags.offsets is None:
        return [moved[:-1]]
    fits = own[:1] == 0
    if bags.has_last_offset and not bags.open_end:
        fits = fits & (own[-1:] == bags.ids.numel())
    first = torch.where(fits, moved[:1], -1)
    if not bags.open_end:
        return [first, moved[1:-1]]
    size = bags.ids.numel()
    last = torch.where(own[-1:] <= size, moved[-1:], -1)
    return [first, moved[1:-1], last, moved.new_full((own.shape[0] - 2,), base + size)]


def parts_of(out: Tensor, members: Sequence[LookupIds], dims: Sequence[int], pooled: bool) -> tuple[Tensor, ...]:
    """Each member's columns of the merged result; its rows, if not pooled."""
    return out.split(list(dims), 1) if pooled else out.split([bags.ids.numel() for bags in members])


def as_result(part: Tensor, ids: Tensor | None, counts: Tensor | None, dtype: torch.dtype, copied: bool) -> Tensor:
    """A part of the merged result in the shape of the lookup's own: a row for each of `ids`, or one a bag."""
    if counts is not None:
        part = (part / counts).to(dtype)
    elif copied:
        part = part.clone()
    return part if ids is None else part.reshape(*ids.shape, part.shape[1])


def cacheable() -> dict[str, str]:
    """The functions that stand in graphs, and what changes with them, for the cache of AOTAutograd."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return {f"{__name__}.{function.__name__}": version for function in (one_batch, parts_of, as_result)}


def merge(gm: GraphModule, group: LookupGroup) -> str:
    """Replace a group's lookups by one; the graph computes the same. Says in words what came of it."""
    write, pooled = Writer(gm, _move_inputs_before(group)), group.pooled
    users = Counter(user for lookup in group.lookups for user in lookup.node.users)
    concatenations = [node for node, count in users.items() if pooled and count > 1 and is_joined(node)]
    owner = {lookup.node: lookup for lookup in group.lookups}
    wanted = [owner[part] for node in concatenations for part in joined_parts(node) if part in owner]
    # Columns as concatenations want them, then all others.
    lookups = list({lookup.node: lookup for lookup in (*wanted, *group.lookups)}.values())
    tables = list({lookup.weight: None for lookup in lookups})
    batch = write(one_batch, tuple(lookup.bags for lookup in lookups), pooled)
    out = _look_up(lookups, tables, batch, _write_layout(lookups, tables, pooled, write), write)
    columns = _use_parts(lookups, batch, out, pooled, write)
    for node in concatenations:
        _join_columns(node, columns, out, write)
    erase_unused(gm)
    update = " with a fused optimizer" if lookups[0].update else ""
    form = "pooled, columns side by side" if pooled else "a row for each id"
    return f"{len(lookups)} lookups of {len(tables)} tables became one{update} ({form})"


def _move_inputs_before(group: LookupGroup) -> Node:
    """Move what the group's lookups need before the first of them, which is returned."""
    place = {node: index for index, node in enumerate(group.region)}
    first = min((lookup.node for lookup in group.lookups), key=place.__getitem__)
    needed = reached([lookup.node for lookup in group.lookups], dependencies(group.region).__getitem__)
    later = [node for node in group.region[place[first] + 1 :] if node in needed]
    for node in [*later, *(node for node in first.graph.nodes if node.op == "get_attr" and first < node)]:
        first.prepend(node)
    return first


def _write_layout(lookups: Sequence[TableLookup], tables: list[Node], pooled: bool, write: Writer) -> Layout:
    """Every lookup is a key of its own; a table's rows are trained once, whoever looks them up."""
    users = list({lookup.weight: lookup for lookup in lookups}.values())
    # The bits of a fused update's stochastic rounding do not depend on what was merged.
    rows = [TableRow(0, use.bags.num_rows, use.dim, seed_of(use.update.name if use.update else "")) for use in users]
    columns = [0, *accumulate(lookup.dim for lookup in lookups)] if pooled else [0] * len(lookups)
    uses = [
        [(tables.index(use.weight), column, use.dim, MEAN if use.bags.mean and not use.bags.divides_later else SUM)]
        for use, column in zip(lookups, columns, strict=False)
    ]
    keys = [lookup for lookup in lookups for _ in range(1 + lookup.bags.open_end)]
    uses = [use for lookup, own in zip(lookups, uses, strict=True) for use in [own, []][: 1 + lookup.bags.open_end]]
    names = [lookup.table for lookup in users], [lookup.feature for lookup in keys]
    layout = build_layout(rows, uses, *names, pooled, value_of(tables[0]).device)
    constants: Any = {name: write.constant(getattr(layout, name), name) for name in Layout._fields[:3]}
    return layout._replace(**constants)


def _look_up(lookups: Sequence[TableLookup], tables: list[Node], batch: Node, layout: Layout, write: Writer) -> Node:
    first, ops = lookups[0], torch.ops.tritonemb
    parts = [None if part is None else write.item(batch, index) for index, part in enumerate(value_of(batch)[:4])]
    values, trained, offsets, sample_weights = parts
    sizes = [value_of(lookup.bags.ids).numel() for lookup in lookups]
    if not layout.pooled and all(isinstance(size, int) for size in sizes):
        starts = torch.tensor([0, *accumulate(sizes)], device=value_of(tables[0]).device)
        offsets = write.constant(starts, "offsets")
    options = first.op_checks, first.op_dtype
    if first.update is None:
        return write(ops.embedding_bag.default, tables, values, offsets, sample_weights, trained, *options, *layout)
    updates: list[Any] = list({lookup.weight: lookup.update for lookup in lookups}.values())
    states = [state for states in zip(*(update.states for update in updates), strict=True) for state in states]
    return write(
        ops.embedding_bag_fused.default, tables, states, [update.step for update in updates],
        [update.skipped for update in updates], first.update.learning_rate, first.update.optimizer,
        list(first.update.hyperparameters), values, offsets, sample_weights, None, False, NOT_ACCUMULATING, *options,
        values if trained is None else trained, None, None, None, *layout,
    )  # fmt: skip


def _use_parts(
    lookups: Sequence[TableLookup], batch: Node, out: Node, pooled: bool, write: Writer
) -> dict[Node, tuple[int, int]]:
    """Who uses a lookup's result takes its columns, or its rows; returns where columns that are no copies lie."""
    parts = write(parts_of, out, tuple(lookup.bags for lookup in lookups), [lookup.dim for lookup in lookups], pooled)
    columns, end, means = {}, 0, iter(range(4, len(value_of(batch))))
    for index, lookup in enumerate(lookups):
        part = result = write.item(parts, index)
        counts = write.item(batch, next(means)) if lookup.bags.divides_later else None
        copied = not only_read(lookup.node)
        ids = lookup.bags.ids if lookup.bags.single and value_of(lookup.bags.ids).dim() != 1 else None
        if copied or counts is not None or ids is not None:
            result = write(as_result, part, ids, counts, lookup.dtype, copied)
        lookup.node.replace_all_uses_with(result)
        columns[part] = end, end + lookup.dim
        end += lookup.dim
    return columns


def _join_columns(node: Node, columns: dict[Node, tuple[int, int]], out: Node, write: Writer) -> None:
    """A concatenation takes neighbouring columns of the merged result as one."""
    runs: list[list[Any]] = []
    for part in joined_parts(node):
        before = columns.get(runs[-1][-1]) if runs else None
        if before and part in columns and before[1] == columns[part][0]:
            runs[-1].append(part)
        else:
            runs.append([part])
    alone = len(runs[0]) == len(columns) and all(set(part.users) == {node} for part in columns)
    if len(runs) == 1 and not alone and not only_read(node):
        return  # what changes the concatenation must not change the columns
    parts = [run[0] if len(run) == 1 else _columns(out, columns[run[0]][0], columns[run[-1]][1], write) for run in runs]
    if len(parts) > 1:
        node.args, node.kwargs = (parts, *node.args[1:]), {k: v for k, v in node.kwargs.items() if k != "tensors"}
    else:
        node.replace_all_uses_with(parts[0])


def _columns(out: Node, first: int, end: int, write: Writer) -> Node:
    return out if (first, end) == (0, value_of(out).shape[1]) else write.item(out, (slice(None), slice(first, end)))


def call_lookups(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    """Let a graph call lookups without the dispatcher, if it only looks up in fused tables on the CPU; says so.
    There is nothing to compile, and what a compiled graph does around an op takes longer than a small lookup."""
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    lookups = [node for node in calls if node.target in FUSED_BAGS]
    on_cpu = all(value.device.type == "cpu" for value in inputs if isinstance(value, Tensor))
    if not lookups or not on_cpu or not all(node in lookups or node.target in _SHAPE_FUNCTIONS for node in calls):
        return False
    for node in lookups:
        node.target = look_up_eagerly
    gm.recompile()
    return True
