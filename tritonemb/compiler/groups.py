"""Which lookups become one: independent ones of a stretch, with one batch size and one kind of result."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from tritonemb.compiler.lookups import FUSED_BAGS, Lookup, feature_name, kind_of, num_bags, recognise
from tritonemb.compiler.order import (
    Stretch,
    bodies,
    dependencies,
    depths,
    grad_states,
    is_transformed,
    learning_nodes,
    live_nodes,
    stretches,
)
from tritonemb.compiler.report import LeftAlone, listed
from tritonemb.compiler.values import expression, source_path, value_of

NOTHING_TO_MERGE = "nothing to merge with"


@dataclass(frozen=True)
class Group:
    """Lookups that become one.

    Attributes:
        lookups: none depends on another.
        pooled: rows are bags, side by side; else ids, one below the other.
        stretch: where they are.
        idle: no backward pass reaches them.
    """

    lookups: tuple[Lookup, ...]
    pooled: bool
    stretch: Stretch
    idle: bool = False

    @property
    def checked(self) -> bool:
        """Whether the lookup checks ids; where padding is left out, that was done before."""
        return self.lookups[0].checked and not drops_padding(self.lookups[0])


def next_group(gm: GraphModule, grad_enabled: bool) -> Group | None:
    """The first group that is found in a graph; pooled ones first."""
    if is_transformed(gm):
        return None
    live, learning = live_nodes(gm), learning_nodes(gm)
    parts = [(stretch, _lookups_of(stretch, live)) for stretch in stretches(gm, grad_enabled)]
    for pooled in (True, False):
        for stretch, lookups in parts:
            for members in _sets(stretch, lookups, pooled, learning):
                if len(members) > 1:
                    return Group(tuple(members), pooled, stretch, members[0].node not in learning)
    return None


def left_alone(gm: GraphModule, grad_enabled: bool, merged: list[Group]) -> list[LeftAlone]:
    """The lookups that are still there, and why."""
    recording, live = grad_states(gm, grad_enabled), live_nodes(gm)
    found = {node: recognise(node, recording[node]) for node in gm.graph.nodes if node in live}
    places = {node: index for index, part in enumerate(stretches(gm, grad_enabled)) for node in part.nodes}
    lookups = [lookup for lookup in found.values() if isinstance(lookup, Lookup)]
    alone = []
    for node, lookup in found.items():
        if lookup is not None:
            reason = lookup if isinstance(lookup, str) else _why_alone(lookup, lookups, places, merged)
            reason = "its graph uses transforms of torch.func" if is_transformed(gm) else reason
            alone.append(LeftAlone(feature_name(node), kind_of(node), reason))
        for body in bodies(node, gm) if isinstance(node.target, torch._ops.HigherOrderOperator) else []:
            inside = f"it is inside {node.target}, whose graph is left alone"
            alone += [
                LeftAlone(feature_name(part), kind_of(part), inside)
                for part in body.graph.nodes
                if recognise(part, True) is not None
            ]
    return alone


def check_fused_tables(gm: GraphModule, merged: list[Group]) -> None:
    """Raise if a table whose optimizer is fused is looked up in two places that did not become one.

    Raises:
        ValueError: its one step a backward would become two, of two gradients.
    """
    uses: Counter[Node] = Counter()
    names: dict[Node, str] = {}
    for group in merged:
        updated = [lookup for lookup in group.lookups if lookup.optimizer is not None and not group.idle]
        tables = {lookup.weight: lookup.table for lookup in updated}
        uses.update(tables.keys())
        names |= tables
    for weight in _fused_weights(gm):
        uses[weight] += 1
        names[weight] = source_path(weight)
    for weight, count in uses.items():
        if count > 1:
            raise ValueError(
                f"table {names[weight]!r} has a fused optimizer and is looked up in {count} places of one graph that "
                "cannot be merged, so that one step would become several. Look it up once, on the ids of all uses "
                "together, or leave out the module's optimizer and use one of torch.optim"
            )


def _fused_weights(gm: GraphModule) -> Iterator[Node]:
    """The table of each lookup, in a graph and in those that it runs, that an update in the backward may follow."""
    learning = learning_nodes(gm)
    for node in gm.graph.nodes:
        if node.op != "call_function" or node not in learning:
            continue
        if node.target in FUSED_BAGS:
            yield node.args[0]
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            for body in bodies(node, gm):
                inner = [part for part in body.graph.nodes if part.op == "placeholder"]
                outer = [arg for arg in node.args if isinstance(arg, Node) and arg.op != "get_attr"]
                known = dict(zip(inner, outer, strict=False))
                yield from (known.get(weight, weight) for weight in _fused_weights(body))


def drops_padding(lookup: Lookup) -> bool:
    """Whether some ids of a bag have no part in it."""
    return lookup.padding_idx is not None and not lookup.single


def divides_later(lookup: Lookup) -> bool:
    """Whether a mean is a sum that is divided by the number of ids that are not padding."""
    return lookup.mean and drops_padding(lookup)


def result_dtype(lookup: Lookup) -> torch.dtype:
    """Of what the op returns: a mean without its padding is summed in float32, and then divided."""
    return torch.float32 if divides_later(lookup) else lookup.dtype


def _lookups_of(stretch: Stretch, live: set[Node]) -> list[Lookup]:
    """Those whose results are used: the weight of another one would get a gradient of zeros instead of none."""
    found = [recognise(node, stretch.grad_enabled) for node in stretch.nodes if node in live]
    return [lookup for lookup in found if isinstance(lookup, Lookup)]


def _sets(stretch: Stretch, lookups: list[Lookup], pooled: bool, learning: set[Node]) -> Iterator[list[Lookup]]:
    """Lookups that go together by what they are, then by what they depend on."""
    by_key: dict[Hashable, list[Lookup]] = defaultdict(list)
    rows = _tables_by_row(lookups)
    for lookup in lookups:
        if _can_be_pooled(lookup) and not (lookup.single and lookup.weight in rows) if pooled else lookup.single:
            idle = _may_learn(lookup) and lookup.node not in learning
            by_key[idle, _key(lookup, pooled)].append(lookup)
    before = dependencies(stretch.nodes) if len(by_key) < len(lookups) else {}
    for members in by_key.values():
        if len(members) == 1:
            continue
        nodes = {lookup.node for lookup in members}
        depth = depths(before, lambda node, nodes=nodes: node in nodes)  # type: ignore[misc]
        by_depth: dict[int, list[Lookup]] = defaultdict(list)
        for lookup in members:
            by_depth[depth[lookup.node]].append(lookup)
        yield from by_depth.values()


def _may_learn(lookup: Lookup) -> bool:
    """Whether its table gets a gradient if a backward pass reaches its result; merged, an unreached one gets zeros."""
    return bool(value_of(lookup.weight).requires_grad)


def _tables_by_row(lookups: list[Lookup]) -> set[Node]:
    """Tables with a fused optimizer that are also looked up for sequences of ids: one step needs one lookup of both."""
    return {lookup.weight for lookup in lookups if lookup.optimizer is not None and not _can_be_pooled(lookup)}


def _key(lookup: Lookup, pooled: bool) -> Hashable:
    optimizer = lookup.optimizer
    rows = expression(num_bags(lookup)) if pooled else lookup.dim
    return (
        lookup.single if not pooled else None,
        rows,
        value_of(lookup.weight).device,
        result_dtype(lookup),
        lookup.checked and not drops_padding(lookup),
        optimizer and (optimizer.name, optimizer.hyperparameters, optimizer.learning_rate),
    )


def _can_be_pooled(lookup: Lookup) -> bool:
    """Bags, and single rows that are also bags of one id: ids `[B]` or `[B, 1]`."""
    if not lookup.single:
        return True
    ids = lookup.ids
    if ids.op == "call_method" and ids.target in ("reshape", "view") and ids.args[1:] in ((-1,), ((-1,),)):
        ids = ids.args[0]  # type: ignore[assignment]
    shape = value_of(ids).shape
    return len(shape) == 1 or (len(shape) == 2 and isinstance(shape[1], int) and shape[1] == 1)


def _why_alone(lookup: Lookup, lookups: list[Lookup], places: dict[Node, int], merged: list[Group]) -> str:
    """Why a lookup that could be merged is not."""
    others = [other for other in lookups if other.node is not lookup.node]
    mine = _key(lookup, _can_be_pooled(lookup))
    for group in merged:
        if group.pooled == _can_be_pooled(lookup) and mine == _key(group.lookups[0], group.pooled):
            return (
                f"it depends on {listed([one.feature for one in group.lookups], 3)}, or they on it, or between them a "
                "tensor or a state (gradients, autocast) is changed"
            )
    if not others:
        return NOTHING_TO_MERGE
    same = [other for other in others if _key(other, _can_be_pooled(other)) == mine]
    if not same:
        differences = dict.fromkeys(_difference(lookup, other) for other in others)
        return f"{NOTHING_TO_MERGE}: the other lookups differ in {listed(differences, 3)}"
    names = listed([other.feature for other in same], 3)
    if any(places.get(other.node) == places.get(lookup.node) for other in same):
        return f"it and {names} depend on each other"
    return f"between it and {names} a tensor or a state (gradients, autocast) is changed"


def _difference(lookup: Lookup, other: Lookup) -> str:
    """The first thing that keeps two lookups apart."""
    pooled = [_can_be_pooled(one) for one in (lookup, other)]
    names = ("bags or rows", "batch size" if pooled[0] else "dim", "device", "dtype", "padding", "optimizer")
    if pooled[0] != pooled[1]:
        return "bags or rows"
    keys = zip(_key(lookup, pooled[0]), _key(other, pooled[1]), strict=True)  # type: ignore[call-overload]
    return next((name for name, (mine, theirs) in zip(names, keys, strict=True) if mine != theirs), "place")
