"""The ids of several lookups as one batch: plain PyTorch nodes, which Inductor fuses."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from tritonemb.compiler.groups import Group, divides_later, drops_padding
from tritonemb.compiler.lookups import Lookup
from tritonemb.compiler.values import Size, Writer, expression, value_of


@dataclass(frozen=True)
class Member:
    """One lookup's part of the batch.

    Attributes:
        values: ids `[N]`; -1 for padding that is left out.
        size: N.
        trained: ids `[N]` that the gradient goes to.
        sample_weights: `[N]`, or None.
        counts: `[B, 1]`, what a sum is divided by, or None.
    """

    lookup: Lookup
    values: Node
    size: Size
    trained: Node
    sample_weights: Node | None
    counts: Node | None


@dataclass(frozen=True)
class Batch:
    """As the ops take it: values `[N]`, offsets `[K * B + 1]`, sample weights and trained ids `[N]` or None."""

    values: Node
    offsets: Node
    sample_weights: Node | None
    trained: Node | None


def make_member(lookup: Lookup, write: Writer) -> Member:
    """Flatten a lookup's ids; leave padding out."""
    values = _flat(lookup.ids, write)
    size = write.size(values, 0)
    trained, counts = lookup.trained or values, None
    if lookup.padding_idx is not None and lookup.single:
        is_padding = write.call(operator.eq, values, lookup.padding_idx)
        trained = write.call(torch.masked_fill, values, is_padding, -1)
    if drops_padding(lookup):
        offsets = _own_offsets(lookup, size, write)
        values = write.call(
            torch.ops.tritonemb.drop_padding.default, values, offsets, lookup.padding_idx, lookup.num_rows
        )
        trained = values
        counts = _counts(values, offsets, size, write) if divides_later(lookup) else None
    weights = None if lookup.sample_weights is None else _flat(lookup.sample_weights, write)
    return Member(lookup, values, size, trained, weights, counts)


def make_batch(group: Group, members: list[Member], write: Writer) -> Batch:
    """All members' ids, one after the other."""
    dtypes = {value_of(member.values).dtype for member in members}
    values = _joined([member.values for member in members], dtypes, write)
    trained = None
    if any(member.trained is not member.values for member in members):
        trained = _joined([member.trained for member in members], dtypes, write)
    offsets = _pooled_offsets(members, write) if group.pooled else _unpooled_offsets(members, write)
    return Batch(values, offsets, _sample_weights(members, write), trained)


def _flat(node: Node, write: Writer) -> Node:
    return node if value_of(node).dim() == 1 else write.method("reshape", node, -1)


def _as_int64(node: Node, write: Writer) -> Node:
    return node if value_of(node).dtype == torch.int64 else write.method("to", node, torch.int64)


def _joined(nodes: list[Node], dtypes: set[torch.dtype], write: Writer) -> Node:
    """Ids of two dtypes become int64."""
    if len(dtypes) > 1:
        nodes = [_as_int64(node, write) for node in nodes]
    return nodes[0] if len(nodes) == 1 else write.call(torch.cat, nodes)


def _sample_weights(members: list[Member], write: Writer) -> Node | None:
    """Ones for members that have none."""
    given = [member.sample_weights for member in members if member.sample_weights is not None]
    if not given:
        return None
    dtype, device = value_of(given[0]).dtype, value_of(given[0]).device
    return write.call(
        torch.cat,
        [
            member.sample_weights or write.call(torch.ones, (member.size,), dtype=dtype, device=device)
            for member in members
        ],
    )


def _range(end: Size, step: Size, member: Member, write: Writer) -> Node:
    """0, step, 2 step, .. below `end`."""
    return write.call(torch.arange, 0, end, step, dtype=torch.int64, device=value_of(member.values).device)


def _full(number: Size, like: Node, write: Writer) -> Node:
    return write.call(torch.full, (1,), number, dtype=torch.int64, device=value_of(like).device)


def _unpooled_offsets(members: list[Member], write: Writer) -> Node:
    """`[K + 1]`: where each member's ids begin."""
    place: Size = 0
    places: list[Size] = [0]
    for member in members:
        place = write.add(place, member.size)
        places.append(place)
    if all(isinstance(place, int) for place in places):
        return write.constant(torch.tensor(places, device=value_of(members[0].values).device), "offsets")
    return write.call(torch.cat, [_full(place, members[0].values, write) for place in places])


def _bag_length(lookup: Lookup, write: Writer) -> Size:
    """Ids of each bag where that is one number."""
    return 1 if lookup.single else write.size(lookup.ids, 1)


def _own_offsets(lookup: Lookup, size: Size, write: Writer) -> Node:
    """`[B + 1]` of one lookup by itself."""
    device = value_of(lookup.ids).device
    if lookup.offsets is None:
        length = _bag_length(lookup, write)
        return write.call(torch.arange, 0, write.add(size, 1), length, dtype=torch.int64, device=device)
    offsets = _as_int64(lookup.offsets, write)
    return offsets if lookup.has_last_offset else write.call(torch.cat, [offsets, _full(size, lookup.ids, write)])


def _counts(kept: Node, offsets: Node, size: Size, write: Writer) -> Node:
    """`[B, 1]`: how many of a bag's ids are not padding, at least 1."""
    taken = write.call(torch.cumsum, write.call(operator.ge, kept, 0), 0)
    before = write.call(torch.nn.functional.pad, taken, (1, 0))
    ends = write.call(torch.clamp, offsets, 0, size)
    last, first = (write.item(before, write.item(ends, part)) for part in (slice(1, None), slice(None, -1)))
    return write.method("unsqueeze", write.call(torch.clamp, write.call(operator.sub, last, first), 1), 1)


def _pooled_offsets(members: list[Member], write: Writer) -> Node:
    """`[K * B + 1]`: where each member's bags begin, and the end.

    A first offset that is not 0, or a last one that is not the number of ids, would give ids to a neighbour's bag; it
    becomes -1, which the kernels report, as they do any offset that does not ascend.
    """
    regular = [member.lookup.offsets is None for member in members]
    if all(regular):
        lengths = {expression(_length_value(member.lookup)) for member in members}
        if len(lengths) == 1:
            length, end = _bag_length(members[0].lookup, write), 1
            return _range(write.add(_total(members, write), end), length, members[0], write)
    base: Size = 0
    parts = []
    for member in members:
        starts = _starts(member, base, write)
        parts.extend(starts)
        base = write.add(base, member.size)
    return write.call(torch.cat, [*parts, _full(base, members[0].values, write)])


def _length_value(lookup: Lookup) -> int:
    return 1 if lookup.single else value_of(lookup.ids).shape[1]


def _total(members: list[Member], write: Writer) -> Size:
    total: Size = 0
    for member in members:
        total = write.add(total, member.size)
    return total


def _starts(member: Member, base: Size, write: Writer) -> list[Node]:
    """`[B]`, in pieces, from `base` on."""
    lookup = member.lookup
    if lookup.offsets is None:
        starts = _range(member.size, _bag_length(lookup, write), member, write)
        return [starts if base == 0 else write.call(operator.add, starts, base)]
    offsets = _as_int64(lookup.offsets, write)
    first = write.item(offsets, slice(None, 1))
    fits = write.call(operator.eq, first, 0)
    if lookup.has_last_offset:
        ends = write.call(operator.eq, write.item(offsets, slice(-1, None)), member.size)
        fits = write.call(operator.and_, fits, ends)
    moved = offsets if base == 0 else write.call(operator.add, offsets, base)
    head = write.call(torch.where, fits, write.item(moved, slice(None, 1)), -1)
    return [head, write.item(moved, slice(1, -1 if lookup.has_last_offset else None))]
