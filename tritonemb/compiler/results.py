"""Who used the results of several lookups uses columns or rows of the merged one.

Columns of a wider matrix are not contiguous, and they share its memory. Who only reads them gets them as they are;
anyone else, a `view`, a function that works in place, the caller of the graph, gets a copy of his own as before.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from tritonemb.compiler.batch import Member
from tritonemb.compiler.groups import Group, divides_later
from tritonemb.compiler.lookups import Lookup
from tritonemb.compiler.order import has_side_effect, sets_state
from tritonemb.compiler.values import Writer, value_of

CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
_READERS = {
    *CONCATENATIONS, torch.stack, torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.mm, torch.bmm,
    torch.addmm, torch.sum, torch.mean, torch.relu, torch.sigmoid, torch.tanh, torch.nn.functional.linear,
    torch.nn.functional.gelu, torch.nn.functional.layer_norm, torch.index_select, operator.add, operator.sub,
    operator.mul, operator.truediv, operator.neg, operator.matmul, "add", "sub", "mul", "div", "matmul", "sum", "mean",
    "relu", "sigmoid", "tanh", "clone",
}  # fmt: skip
_SELECTIONS = {operator.getitem, torch.unsqueeze, torch.transpose, "unsqueeze", "transpose", "t"}


@dataclass(frozen=True)
class Run:
    """Results side by side in a concatenation along dim 1.

    Attributes:
        node: the concatenation.
        begin: where among its parts they begin.
        lookups: whose results they are, in order.
    """

    node: Node
    begin: int
    lookups: tuple[Lookup, ...]


def only_read(node: Node) -> bool:
    """Whether all users of a node make something new of it, whatever its strides."""
    return all(
        (user.target in _READERS and user.kwargs.get("out") is None) or (user.target in _SELECTIONS and only_read(user))
        for user in node.users
    )


def find_runs(gm: GraphModule, group: Group) -> list[Run]:
    """Concatenations of several of a group's results, which can take the merged result or columns of it."""
    owner = {node: lookup for lookup in group.lookups if _is_matrix(lookup) for node in lookup.results}
    mutated = _memory_of_changes(gm)
    free = {lookup.node for lookup in group.lookups if not any(_memory(node) in mutated for node in lookup.results)}
    runs, seen = [], set[Node]()
    for node in [user for result in owner for user in result.users]:
        if node in seen or not _is_side_by_side(node):
            continue
        seen.add(node)
        begin, lookups = _longest_run(_parts(node), owner, free)
        if len(lookups) > 1 and (_memory(node) not in mutated or _has_only_users(lookups, node)):
            free -= {lookup.node for lookup in lookups}
            runs.append(Run(node, begin, tuple(lookups)))
    return runs


def in_order(group: Group, runs: list[Run]) -> list[Lookup]:
    """Columns as concatenations want them, then all others."""
    wanted = [lookup for run in runs for lookup in run.lookups]
    nodes = {lookup.node for lookup in wanted}
    return [*wanted, *(lookup for lookup in group.lookups if lookup.node not in nodes)]


def use_runs(runs: list[Run], lookups: list[Lookup], out: Node, write: Writer) -> None:
    """Concatenations take the merged result, or columns of it, instead of its parts."""
    column, width = 0, sum(lookup.dim for lookup in lookups)
    for run in runs:
        size = sum(lookup.dim for lookup in run.lookups)
        part = out if size == width else write.item(out, (slice(None), slice(column, column + size)))
        column += size
        parts = _parts(run.node)
        parts[run.begin : run.begin + len(run.lookups)] = [part]
        if len(parts) == 1:
            if part is not out and not only_read(run.node):
                part = write.method("clone", part)
            run.node.replace_all_uses_with(part)
            run.node.graph.erase_node(run.node)
        elif run.node.args:
            run.node.update_arg(0, parts)
        else:
            run.node.update_kwarg("tensors", parts)


def use_columns(members: list[Member], out: Node, write: Writer) -> None:
    """Who uses a lookup's result takes its columns."""
    used = [any(node.users for node in member.lookup.results) for member in members]
    if not any(used):
        return
    parts = write.call(torch.split, out, [member.lookup.dim for member in members], 1)
    for index, member in enumerate(members):
        if not used[index]:
            continue
        lookup, part = member.lookup, write.item(parts, index)
        if member.counts is not None:
            part = write.method("to", write.call(torch.div, part, member.counts), lookup.dtype)
        elif not all(only_read(node) for node in lookup.results):
            part = write.method("clone", part)
        if lookup.single and value_of(lookup.ids).dim() == 2:  # [B, 1]
            part = write.method("unsqueeze", part, 1)
        _replace(lookup, part)


def use_rows(gm: GraphModule, members: list[Member], out: Node, write: Writer) -> None:
    """Who uses a lookup's result takes its rows."""
    used = [any(node.users for node in member.lookup.results) for member in members]
    if not any(used):
        return
    shared = _memory_of_changes(gm) | _memory_of_outputs(gm)
    parts = write.call(torch.split, out, [member.size for member in members], 0)
    for index, member in enumerate(members):
        if not used[index]:
            continue
        lookup, part = member.lookup, write.item(parts, index)
        if any(_memory(node) in shared for node in lookup.results):
            part = write.method("clone", part)
        ids = value_of(lookup.ids)
        if ids.dim() != 1:
            part = write.method("reshape", part, *(write.size(lookup.ids, dim) for dim in range(ids.dim())), lookup.dim)
        _replace(lookup, part)


def _replace(lookup: Lookup, part: Node) -> None:
    for node in lookup.results:
        node.replace_all_uses_with(part)


def _is_matrix(lookup: Lookup) -> bool:
    """Whether a result is columns of the merged one as it is, `[B, dim]`."""
    return not divides_later(lookup) and not (lookup.single and value_of(lookup.ids).dim() != 1)


def _is_side_by_side(node: Node) -> bool:
    dim = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else 0))
    return node.op == "call_function" and node.target in CONCATENATIONS and dim in (1, -1)


def _parts(node: Node) -> list[Any]:
    parts: Any = node.args[0] if node.args else node.kwargs["tensors"]
    return list(parts)


def _longest_run(parts: list[Any], owner: dict[Node, Lookup], free: set[Node]) -> tuple[int, list[Lookup]]:
    """Where it begins, and whose results are in it: each once, none taken elsewhere."""
    best: tuple[int, list[Lookup]] = 0, []
    run: list[Lookup] = []
    for index, part in enumerate([*parts, None]):
        lookup = owner.get(part) if part is not None else None
        usable = lookup is not None and lookup.node in free
        if usable and all(lookup is not other for other in run):
            run.append(lookup)  # type: ignore[arg-type]
            continue
        if len(run) > len(best[1]):
            best = index - len(run), run
        run = [lookup] if lookup is not None and usable else []
    return best


def _has_only_users(lookups: list[Lookup], node: Node) -> bool:
    """Whether nobody but `node` uses these results."""
    return all(set(result.users) == {node} for lookup in lookups for result in lookup.results)


def _memory(node: Any) -> Any:
    """What tensors that share memory have in common."""
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _memory_of_changes(gm: GraphModule) -> set[Any]:
    """The memory of all tensors that something in the graph may write to."""
    changing = [node for node in gm.graph.nodes if node.op != "get_attr" and has_side_effect(node, gm)]
    return {_memory(other) for node in changing if not sets_state(node) for other in node.all_input_nodes} - {None}


def _memory_of_outputs(gm: GraphModule) -> set[Any]:
    """The memory of what a graph returns."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return {_memory(node) for node in tree_leaves(output.args) if isinstance(node, Node)} - {None}
