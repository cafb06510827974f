"""Put one lookup in place of a group of them: one batch of their ids, one op, and parts of its result.

Parts of a wider matrix are not contiguous, and they share its memory. Who only reads them gets them as they are; anyone
else, a `view`, a function that works in place, the caller of the graph, gets a copy, which is what the lookup returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from tritonemb.compiler.graph import (
    Fused,
    Size,
    Traced,
    Writer,
    ancestors,
    dependencies,
    erase_unused,
    expression,
    is_joined,
    joined_parts,
    only_read,
    value_of,
)
from tritonemb.compiler.lookups import LookupGroup, TableLookup
from tritonemb.layout import MEAN, SUM, Layout, TableRow, lines_of
from tritonemb.ops.row_update import NOT_ACCUMULATING
from tritonemb.types import seed_of


class Member(NamedTuple):
    """One lookup's part of the batch."""

    lookup: TableLookup
    values: Traced  # ids [N]; -1 for padding that is left out
    size: Size  # N
    trained: Traced  # ids [N] that the gradient goes to
    sample_weights: Traced | None  # [N]
    counts: Traced | None  # [B, 1], what a sum is divided by


def merge(gm: GraphModule, group: LookupGroup) -> Fused:
    """Replace a group's lookups by one; the graph computes the same."""
    write = Writer(gm, _move_inputs_before(group))
    concatenations = _concatenations(group) if group.pooled else []
    lookups = _in_order(group, concatenations)
    members = [_member(lookup, write) for lookup in lookups]
    tables = list({lookup.weight: None for lookup in lookups})
    layout = _write_layout(lookups, tables, group.pooled, write)
    out = _look_up(members, tables, layout, write)
    columns = _use_parts(group.pooled, members, out, write)
    for node in concatenations:
        _join_columns(node, columns, out)
    erase_unused(gm)
    return Fused(_in_words(lookups, len(tables), group), tuple(lookup.feature for lookup in group.lookups))


def _move_inputs_before(group: LookupGroup) -> Node:
    """Move what the group's lookups need before the first of them, which is returned."""
    nodes = group.region
    place = {node: index for index, node in enumerate(nodes)}
    first = min((lookup.node for lookup in group.lookups), key=place.__getitem__)
    needed = ancestors([lookup.node for lookup in group.lookups], dependencies(nodes))
    later = [node for node in nodes[place[first] + 1 :] if node in needed]
    for node in [*later, *(node for node in first.graph.nodes if node.op == "get_attr" and first < node)]:
        first.prepend(node)
    return first


def _member(lookup: TableLookup, write: Writer) -> Member:
    """Flatten a lookup's ids; leave padding out."""
    values = _flat(lookup.ids, write)
    size, counts = write.size(values, 0), None
    trained = values if lookup.trained is None else write.proxy(lookup.trained)
    if lookup.padding_idx is not None and lookup.single:
        trained = values.masked_fill(values == lookup.padding_idx, -1)
    if lookup.drops_padding:
        offsets = _own_offsets(lookup, size, write)
        drop = torch.ops.tritonemb.drop_padding.default
        trained = values = write(drop, values, offsets, lookup.padding_idx, lookup.shape[0])
        counts = _counts(values, offsets, size, write) if lookup.divides_later else None
    weights = None if lookup.sample_weights is None else _flat(lookup.sample_weights, write)
    return Member(lookup, values, size, trained, weights, counts)


def _flat(node: Node, write: Writer) -> Traced:
    tensor = write.proxy(node)
    return tensor if value_of(node).dim() == 1 else tensor.reshape(-1)


def _joined(ids: list[Traced], write: Writer) -> Traced:
    """Ids of two dtypes become int64."""
    same = len({value_of(one).dtype for one in ids}) == 1
    return write(torch.cat, ids if same else [one.to(torch.int64) for one in ids])


def _all_sample_weights(members: list[Member], write: Writer) -> Traced | None:
    """Ones for members that have none."""
    given = [value_of(member.sample_weights) for member in members if member.sample_weights is not None]
    if not given:
        return None
    parts = []
    for member in members:
        own = member.sample_weights
        if own is None:
            own = write(torch.ones, (member.size,), dtype=given[0].dtype, device=given[0].device)
        parts.append(own)
    return write(torch.cat, parts)


def _range(end: Size, step: Size, member: TableLookup, write: Writer) -> Traced:
    """0, step, 2 step, .. below `end`."""
    return write(torch.arange, 0, end, step, dtype=torch.int64, device=value_of(member.ids).device)


def _full(number: Size, lookup: TableLookup, write: Writer) -> Traced:
    return write(torch.full, (1,), number, dtype=torch.int64, device=value_of(lookup.ids).device)


def _bag_length(lookup: TableLookup, write: Writer) -> Size:
    """Ids of each bag where that is one number."""
    return 1 if lookup.single else write.size(write.proxy(lookup.ids), 1)


def _own_offsets(lookup: TableLookup, size: Size, write: Writer) -> Traced:
    """`[B + 1]` of one lookup by itself."""
    if lookup.offsets is None:
        return _range(size + 1, _bag_length(lookup, write), lookup, write)
    offsets: Traced = write.proxy(lookup.offsets).to(torch.int64)
    return offsets if lookup.has_last_offset else write(torch.cat, [offsets, _full(size, lookup, write)])


def _counts(kept: Traced, offsets: Traced, size: Size, write: Writer) -> Traced:
    """`[B, 1]`: how many of a bag's ids are not padding, at least 1."""
    before = write(F.pad, write(torch.cumsum, kept >= 0, 0), (1, 0))
    ends = write(torch.clamp, offsets, 0, size)
    return write(torch.clamp, before[ends[1:]] - before[ends[:-1]], 1).unsqueeze(1)


def _unpooled_offsets(members: list[Member], write: Writer) -> Traced:
    """`[K + 1]`: where each member's ids begin."""
    first = members[0].lookup
    places = list(accumulate((member.size for member in members), initial=0))
    if all(isinstance(place, int) for place in places):
        return write.constant(torch.tensor(places, device=value_of(first.ids).device), "offsets")
    return write(torch.cat, [_full(place, first, write) for place in places])


def _pooled_offsets(members: list[Member], write: Writer) -> Traced:
    """`[K * B + 1]`: where each member's bags begin, and the end.

    A first offset that is not 0, or a last one that is not the number of ids, would give ids to a neighbour's bag; it
    becomes -1, which the kernels report, as they do any offset that does not ascend.
    """
    first = members[0].lookup
    *bases, end = accumulate((member.size for member in members), initial=0)
    if all(member.lookup.offsets is None for member in members):
        lengths = [_bag_length(member.lookup, write) for member in members]
        if len({expression(value_of(length)) for length in lengths}) == 1:
            return _range(end + 1, lengths[0], first, write)
    parts = [part for member, base in zip(members, bases, strict=True) for part in _starts(member, base, write)]
    return write(torch.cat, [*parts, _full(end, first, write)])


def _starts(member: Member, base: Size, write: Writer) -> list[Traced]:
    """`[B]`, in pieces, from `base` on."""
    own = _own_offsets(member.lookup, member.size, write)
    moved = own + base
    if member.lookup.offsets is None:
        return [moved[:-1]]
    fits = own[:1] == 0
    if member.lookup.has_last_offset:
        fits = fits & (own[-1:] == member.size)
    return [write(torch.where, fits, moved[:1], -1), moved[1:-1]]


def _write_layout(lookups: Sequence[TableLookup], tables: list[Node], pooled: bool, write: Writer) -> Layout:
    """Every lookup is a key of its own; a table's rows are trained once, whoever looks them up."""
    lookup_of = {lookup.weight: lookup for lookup in lookups}
    users = [lookup_of[table] for table in tables]
    first_rows = [0, *accumulate(lookup.shape[0] for lookup in users)]
    # The bits of a fused update's stochastic rounding do not depend on what was merged.
    rows = [
        TableRow(first_row, lookup.shape[0], lookup.dim, seed_of(lookup.update.name if lookup.update else ""))
        for first_row, lookup in zip(first_rows, users, strict=False)
    ]
    columns = [0, *accumulate(lookup.dim for lookup in lookups)] if pooled else [0] * len(lookups)
    place = {table: index for index, table in enumerate(tables)}
    uses = [
        [place[lookup.weight], column, lookup.dim, MEAN if lookup.mean and not lookup.divides_later else SUM]
        for lookup, column in zip(lookups, columns, strict=False)
    ]
    arrays = {"tables": rows, "lookups": uses, "key_starts": range(len(lookups) + 1)}
    device = value_of(tables[0]).device
    constants: Any = {
        name: write.constant(torch.tensor(array, dtype=torch.int64, device=device), name)
        for name, array in arrays.items()
    }
    return Layout(
        **constants,
        table_names=lines_of(lookup.table for lookup in users),
        feature_names=lines_of(lookup.feature for lookup in lookups),
        multiplicity=1,
        num_rows=first_rows[-1],
        width=columns[-1] if pooled else lookups[0].dim,
        pooled=pooled,
    )


def _look_up(members: list[Member], tables: list[Node], layout: Layout, write: Writer) -> Traced:
    """The one lookup, `[B, width]` or `[N, dim]`."""
    first, ops = members[0].lookup, torch.ops.tritonemb
    values, trained = _joined([member.values for member in members], write), None
    if any(member.trained is not member.values for member in members):
        trained = _joined([member.trained for member in members], write)
    offsets = _pooled_offsets(members, write) if layout.pooled else _unpooled_offsets(members, write)
    batch = values, offsets, _all_sample_weights(members, write)
    options = first.op_checks, first.op_dtype
    if first.update is None:
        return write(ops.embedding_bag.default, tables, *batch, trained, *options, *layout)
    update_of: Any = {member.lookup.weight: member.lookup.update for member in members}
    updates = [update_of[table] for table in tables]
    states = [state for states in zip(*(update.states for update in updates), strict=True) for state in states]
    groups = write(ops.row_groups.default, values if trained is None else trained, offsets, *layout)
    return write(
        ops.embedding_bag_fused.default, tables, states, [update.step for update in updates],
        [update.skipped for update in updates], first.update.learning_rate, first.update.optimizer,
        list(first.update.hyperparameters), *batch, None, NOT_ACCUMULATING, *options,
        *(groups[index] for index in range(4)), *layout,
    )  # fmt: skip


def _in_words(lookups: Sequence[TableLookup], num_tables: int, group: LookupGroup) -> str:
    kinds = sorted({lookup.kind for lookup in lookups})
    what = "lookup with a fused optimizer" if lookups[0].update else "lookup"
    tables = "table" if num_tables == 1 else "tables"
    form = "pooled, columns side by side" if group.pooled else "a row for each id"
    return f"{len(lookups)} {' and '.join(kinds)} of {num_tables} {tables} became one {what} ({form})"


def _concatenations(group: LookupGroup) -> list[Node]:
    """Those that have several of a group's results side by side."""
    users = Counter(user for lookup in group.lookups for node in lookup.results for user in node.users)
    return [node for node, count in users.items() if count > 1 and is_joined(node)]


def _in_order(group: LookupGroup, concatenations: list[Node]) -> list[TableLookup]:
    """Columns as concatenations want them, then all others."""
    owner = {node: lookup for lookup in group.lookups for node in lookup.results}
    wanted = [owner[part] for node in concatenations for part in joined_parts(node) if part in owner]
    return list({lookup.node: lookup for lookup in (*wanted, *group.lookups)}.values())


def _join_columns(node: Node, columns: dict[Node, tuple[int, int]], out: Traced) -> None:
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
    parts = [run[0] if len(run) == 1 else _columns(out, columns[run[0]][0], columns[run[-1]][1]) for run in runs]
    if len(parts) > 1:
        node.args, node.kwargs = (parts, *node.args[1:]), {k: v for k, v in node.kwargs.items() if k != "tensors"}
    else:
        node.replace_all_uses_with(parts[0])


def _columns(out: Traced, first: int, end: int) -> Node:
    found: Node = (out if (first, end) == (0, value_of(out).shape[1]) else out[:, first:end]).node
    return found


def _use_parts(pooled: bool, members: list[Member], out: Traced, write: Writer) -> dict[Node, tuple[int, int]]:
    """Who uses a lookup's result takes its columns, or its rows; returns where columns that are no copies lie."""
    parts = write(torch.split, out, [member.lookup.dim if pooled else member.size for member in members], int(pooled))
    columns, end = {}, 0
    for index, member in enumerate(members):
        column = parts[index]
        part = _as_result(member, column, pooled, write)
        for node in member.lookup.results:
            node.replace_all_uses_with(part.node)
        columns[column.node] = end, end + member.lookup.dim
        end += member.lookup.dim
    return columns


def _as_result(member: Member, part: Traced, pooled: bool, write: Writer) -> Traced:
    """A part of the merged result in the shape of the lookup's own."""
    lookup, shape = member.lookup, value_of(member.lookup.ids).shape
    if member.counts is not None:
        part = (part / member.counts).to(lookup.dtype)
    elif not all(only_read(node) for node in lookup.results):
        part = part.clone()
    if pooled:
        return part.unsqueeze(1) if lookup.single and len(shape) == 2 else part  # ids [B, 1]
    if len(shape) == 1:
        return part
    ids = write.proxy(lookup.ids)
    return part.reshape(*(write.size(ids, dim) for dim in range(len(shape))), lookup.dim)
