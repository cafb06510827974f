"""Which lookups become one: independent ones of a region, with one batch size and one kind of result."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from tritonemb.compiler.graph import (
    LeftAlone,
    bodies,
    dependencies,
    depths,
    expression,
    grad_states,
    is_transformed,
    listed,
    live_nodes,
    regions,
    source_path,
    value_of,
)
from tritonemb.compiler.lookups import FUSED_BAGS, TableLookup, names_of, recognise

NOTHING_TO_MERGE = "nothing to merge with"


@dataclass(frozen=True)
class LookupGroup:
    """Lookups that become one.

    Attributes:
        lookups: none depends on another.
        pooled: rows are bags, side by side; else ids, one below the other.
        region: where they are.
        idle: no backward pass reaches them.
    """

    lookups: tuple[TableLookup, ...]
    pooled: bool
    region: list[Node]
    idle: bool = False


def next_group(gm: GraphModule, grad_enabled: bool) -> LookupGroup | None:
    """The first group that is found in a graph; pooled ones first."""
    if is_transformed(gm):
        return None
    found, learning = _recognised(gm, grad_enabled), live_nodes(gm, learning=True)
    for pooled in (True, False):
        for region in regions(gm):
            lookups = [lookup for node in region if isinstance(lookup := found.get(node), TableLookup)]
            for members in _sets(region, lookups, pooled, learning):
                if len(members) > 1:
                    return LookupGroup(tuple(members), pooled, region, members[0].node not in learning)
    return None


def left_alone(gm: GraphModule, grad_enabled: bool, merged: list[LookupGroup]) -> list[LeftAlone]:
    """The lookups that are still there, and why."""
    found = _recognised(gm, grad_enabled)
    region_of = {node: index for index, region in enumerate(regions(gm)) for node in region}
    lookups = [lookup for lookup in found.values() if isinstance(lookup, TableLookup)]
    alone = []
    for node, lookup in found.items():
        if lookup is not None:
            reason = lookup if isinstance(lookup, str) else _why_alone(lookup, lookups, region_of, merged)
            reason = "its graph uses transforms of torch.func" if is_transformed(gm) else reason
            alone.append(LeftAlone(*names_of(node), reason))
        for body in bodies(node, gm) if isinstance(node.target, torch._ops.HigherOrderOperator) else []:
            inside = [part for part in body.graph.nodes if recognise(part, True) is not None]
            reason = f"it is inside {node.target}, whose graph is left alone"
            alone += [LeftAlone(*names_of(part), reason) for part in inside]
    return alone


def check_fused_tables(gm: GraphModule, merged: list[LookupGroup]) -> None:
    """Raise if a table whose optimizer is fused is looked up in two places that did not become one.

    Raises:
        ValueError: its one step a backward would become two, of two gradients.
    """
    tables: list[tuple[Node, str]] = []  # one for each update
    for group in merged:
        updated = {} if group.idle else {lookup.weight: lookup.table for lookup in group.lookups if lookup.update}
        tables += updated.items()
    tables += [(weight, source_path(weight)) for weight in _fused_weights(gm)]
    names, uses = dict(tables), Counter(weight for weight, _ in tables)
    for weight, count in uses.items():
        if count > 1:
            raise ValueError(
                f"table {names[weight]!r} has a fused optimizer and is looked up in {count} places of one graph that "
                "cannot be merged, so that one step would become several. Look it up once, on the ids of all uses "
                "together, or leave out the module's optimizer and use one of torch.optim"
            )


def _fused_weights(gm: GraphModule) -> Iterator[Node]:
    """The table of each lookup, in a graph and in those that it runs, that an update in the backward may follow."""
    learning = live_nodes(gm, learning=True)
    for node in gm.graph.nodes:
        if node.op != "call_function" or node not in learning:
            continue
        if node.target in FUSED_BAGS:
            yield from node.args[0]
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            for body in bodies(node, gm):
                inner = [part for part in body.graph.nodes if part.op == "placeholder"]
                outer = [arg for arg in node.args if isinstance(arg, Node) and arg.op != "get_attr"]
                known = dict(zip(inner, outer, strict=False))
                yield from (known.get(weight, weight) for weight in _fused_weights(body))


def _recognised(gm: GraphModule, grad_enabled: bool) -> dict[Node, TableLookup | str | None]:
    """What `recognise` says of each node that is used: the weight of another lookup would get zeros instead of none."""
    recording, live = grad_states(gm, grad_enabled), live_nodes(gm)
    return {node: recognise(node, recording[node]) for node in gm.graph.nodes if node in live}


def _sets(
    region: list[Node], lookups: list[TableLookup], pooled: bool, learning: set[Node]
) -> Iterator[list[TableLookup]]:
    """Lookups that go together by what they are, then by what they depend on."""
    # One update needs one lookup: a fused table that also gives sequences of rows is not pooled.
    in_rows = {lookup.weight for lookup in lookups if lookup.update and not lookup.can_be_pooled}
    by_key: dict[Hashable, list[TableLookup]] = defaultdict(list)
    for lookup in lookups:
        if (lookup.can_be_pooled and not (lookup.single and lookup.weight in in_rows)) if pooled else lookup.single:
            # Merged with others that a backward pass reaches, an unreached table would get zeros.
            idle = value_of(lookup.weight).requires_grad and lookup.node not in learning
            by_key[idle, _key(lookup, pooled)].append(lookup)
    before = dependencies(region) if len(by_key) < len(lookups) else {}
    for members in by_key.values():
        if len(members) > 1:
            depth = depths(before, {lookup.node for lookup in members})
            by_depth: dict[int, list[TableLookup]] = defaultdict(list)
            for lookup in members:
                by_depth[depth[lookup.node]].append(lookup)
            yield from by_depth.values()


def _key(lookup: TableLookup, pooled: bool) -> tuple[Hashable, ...]:
    """What lookups that become one have in common, named as in `_difference`."""
    update = lookup.update
    return (
        None if pooled else lookup.single,
        expression(lookup.num_bags) if pooled else lookup.dim,
        value_of(lookup.weight).device,
        lookup.op_dtype,
        lookup.op_checks,
        update and (update.optimizer, update.hyperparameters, update.learning_rate),
    )


def _why_alone(
    lookup: TableLookup, lookups: list[TableLookup], region_of: dict[Node, int], merged: list[LookupGroup]
) -> str:
    """Why a lookup that could be merged is not."""
    others = [other for other in lookups if other.node is not lookup.node]
    pooled = lookup.can_be_pooled
    mine = _key(lookup, pooled)
    for group in merged:
        if group.pooled == pooled and mine == _key(group.lookups[0], pooled):
            return (
                f"it depends on {listed([one.feature for one in group.lookups], 3)}, or they on it, or between them a "
                "tensor or a state (gradients, autocast) is changed"
            )
    if not others:
        return NOTHING_TO_MERGE
    same = [other for other in others if _key(other, other.can_be_pooled) == mine]
    if not same:
        differences = dict.fromkeys(_difference(lookup, other) for other in others)
        return f"{NOTHING_TO_MERGE}: the other lookups differ in {listed(differences, 3)}"
    names = listed([other.feature for other in same], 3)
    if any(region_of.get(other.node) == region_of.get(lookup.node) for other in same):
        return f"it and {names} depend on each other"
    return f"between it and {names} a tensor or a state (gradients, autocast) is changed"


def _difference(lookup: TableLookup, other: TableLookup) -> str:
    """The first thing that keeps two lookups apart."""
    pooled = lookup.can_be_pooled
    if pooled != other.can_be_pooled:
        return "bags or rows"
    names = ("bags or rows", "batch size" if pooled else "dim", "device", "dtype", "padding", "optimizer")
    keys = zip(names, _key(lookup, pooled), _key(other, pooled), strict=True)
    return next((name for name, mine, theirs in keys if mine != theirs), "place")
