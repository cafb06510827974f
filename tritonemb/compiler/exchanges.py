"""Hides exchanges in graphs of Inductor's: sent as soon as they can be, waited for when nothing else can be computed.

Inductor computes in the order of the graph, in which an exchange is begun and ended before the layers that come after
it; backward, layers that were called last come first.
"""

from heapq import heapify, heappop, heappush

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

import tritonemb.comm.output_exchange  # noqa: F401  declares the ops

_URGENT, _ORDINARY, _LATE = range(3)


class HideExchanges(CustomGraphPass):
    """Inductor's `post_grad_custom_post_pass`; give it `reorder_for_peak_memory=False` too, or it sorts anew."""

    def uuid(self) -> object:
        return get_hash_for_files((__file__,))

    def __call__(self, graph: Graph) -> None:
        ops = torch.ops.tritonemb
        urgent = set[Node]()
        for node in reversed(graph.nodes):
            if node.target is ops.start_exchange.default or not urgent.isdisjoint(node.users):
                urgent.add(node)
        late = {*graph.find_nodes(op="call_function", target=ops.finish_exchange.default)}
        if not late:
            return
        parts: list[list[Node]] = [[]]  # nothing is moved across what changes a tensor
        for node in graph.nodes:
            schema = getattr(node.target, "_schema", None)
            fixed = node.op in ("placeholder", "output") or (schema is not None and schema.is_mutable)
            parts += [[node], []] if fixed else []
            if not fixed:
                parts[-1].append(node)
        before: Node = graph._root
        for part in parts:
            kinds = [_LATE if node in late else _URGENT if node in urgent else _ORDINARY for node in part]
            for node in _sorted(part, kinds):
                before.append(node)
                before = node


def _sorted(nodes: list[Node], kinds: list[int]) -> list[Node]:
    """In an order in which each comes after its inputs; else by kind, and then as they were."""
    places = {node: (kind, place) for place, (node, kind) in enumerate(zip(nodes, kinds, strict=True))}
    missing = {node: sum(each in places for each in node.all_input_nodes) for node in nodes}
    ready, found = [places[node] for node, number in missing.items() if not number], list[Node]()
    heapify(ready)
    while ready:
        node = nodes[heappop(ready)[1]]
        found.append(node)
        for user in node.users:
            if user in missing:
                missing[user] -= 1
                if not missing[user]:
                    heappush(ready, places[user])
    assert len(found) == len(nodes)
    return found
