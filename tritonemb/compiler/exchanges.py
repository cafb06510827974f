"""Hides exchanges in graphs of Inductor's: sent as soon as they can be, waited for when nothing else can be computed.

Inductor computes in the order of the graph, in which an exchange is begun and ended before the layers that come after
it; backward, layers that were called last come first.
"""

from collections import defaultdict
from graphlib import TopologicalSorter
from heapq import heappop, heappush

import torch
from torch._higher_order_ops.effects import with_effects
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

import tritonemb.comm.output_exchange  # noqa: F401  declares the ops


class HideExchanges(CustomGraphPass):
    """Inductor's `post_grad_custom_post_pass`; give it `reorder_for_peak_memory=False` too, or it sorts anew."""

    def uuid(self) -> object:
        return get_hash_for_files((__file__,))

    def __call__(self, graph: Graph) -> None:
        ops = torch.ops.tritonemb
        nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        starts = [node for node in nodes if node.target is ops.start_exchange.default]
        late = [node for node in nodes if node.target is ops.finish_exchange.default]
        if not late:
            return
        # What is sent first comes first, with what it is computed from; ordinary nodes follow, and what waits is last.
        kinds = dict(zip(starts, range(len(starts)), strict=True))
        for node in reversed(nodes):
            kinds[node] = min([kinds.get(node, len(starts)), *(kinds[user] for user in node.users if user in kinds)])
        kinds |= dict.fromkeys(late, len(starts) + 1)
        before = next((node for node in reversed(graph.nodes) if node.op == "placeholder"), graph._root)
        for node in _sorted(nodes, kinds):
            before.append(node)
            before = node


def _sorted(nodes: list[Node], kinds: dict[Node, int]) -> list[Node]:
    """In an order in which each comes after what it needs; else by kind, and then as they were."""
    places = {node: (kinds[node], place) for place, node in enumerate(nodes)}
    sorter, ready, ordered = TopologicalSorter(_needed(nodes)), list[tuple[int, int]](), list[Node]()
    sorter.prepare()
    while sorter.is_active():
        for node in sorter.get_ready():
            heappush(ready, places[node])
        ordered.append(nodes[heappop(ready)[1]])
        sorter.done(ordered[-1])
    return ordered


def _needed(nodes: list[Node]) -> dict[Node, set[Node]]:
    """What has to come before each: its inputs, and who reads or changes memory of theirs that one of them changes."""
    found = dict[Node, set[Node]]()
    memory, changed_by, read_by = dict[Node, set[Node]](), dict[Node, Node](), defaultdict[Node, list[Node]](list)
    for node in nodes:
        target = node.args[1] if node.target is with_effects else node.target
        schema, inputs = getattr(target, "_schema", None), node.all_input_nodes
        own = set[Node]().union(*(memory.get(each, {each}) for each in inputs))
        needed = {*inputs, *(changed_by[each] for each in own if each in changed_by)}
        if isinstance(target, HigherOrderOperator) or (schema is not None and schema.is_mutable):
            for each in own:
                needed |= {*read_by.pop(each, [])}
                changed_by[each] = node
        for each in own:
            read_by[each].append(node)
        is_view = schema is None or any(each.alias_info is not None for each in schema.returns)
        memory[node] = own if is_view else {node}
        found[node] = {each for each in needed if each in found}
    return found
