"""Inductor pass that overlaps exchanges with computation: start them as early, and finish them as late, as possible.

Inductor runs nodes in the order of the graph: an exchange would start and finish before the layers that follow it. In
the backward, the layers that were called last come first.
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
    """Value of Inductor's `post_grad_custom_post_pass`; set `reorder_for_peak_memory=False`, lest Inductor re-sort."""

    def uuid(self) -> object:
        return get_hash_for_files((__file__,))

    def __call__(self, graph: Graph) -> None:
        ops = torch.ops.tritonemb
        nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        starts = [node for node in nodes if node.target is ops.start_exchange.default]
        finishes = [node for node in nodes if node.target is ops.finish_exchange.default]
        if not finishes:
            return
        # Priorities: exchanges in their order, each with its inputs; then other nodes; then the waits.
        priorities = dict(zip(starts, range(len(starts)), strict=True))
        for node in reversed(nodes):
            user_priorities = (priorities[user] for user in node.users if user in priorities)
            priorities[node] = min([priorities.get(node, len(starts)), *user_priorities])
        priorities |= dict.fromkeys(finishes, len(starts) + 1)
        previous = next((node for node in reversed(graph.nodes) if node.op == "placeholder"), graph._root)
        for node in _sorted(nodes, priorities):
            previous.append(node)
            previous = node


def _sorted(nodes: list[Node], priorities: dict[Node, int]) -> list[Node]:
    """Sort nodes topologically; of the nodes that are ready, by priority, then by their previous order."""
    ranks = {node: (priorities[node], index) for index, node in enumerate(nodes)}
    sorter, ready, ordered = TopologicalSorter(_predecessors(nodes)), list[tuple[int, int]](), list[Node]()
    sorter.prepare()
    while sorter.is_active():
        for node in sorter.get_ready():
            heappush(ready, ranks[node])
        ordered.append(nodes[heappop(ready)[1]])
        sorter.done(ordered[-1])
    return ordered


def _predecessors(nodes: list[Node]) -> dict[Node, set[Node]]:
    """Nodes that must precede each node: its inputs, and earlier reads and writes that conflict with it."""
    predecessors = dict[Node, set[Node]]()
    # Buffers (nodes that allocate memory) of each node's result; last writer of each buffer, and its readers since.
    buffers, last_writer, readers = dict[Node, set[Node]](), dict[Node, Node](), defaultdict[Node, list[Node]](list)
    for node in nodes:
        target = node.args[1] if node.target is with_effects else node.target
        schema, inputs = getattr(target, "_schema", None), node.all_input_nodes
        accessed = set[Node]().union(*(buffers.get(value, {value}) for value in inputs))
        required = {*inputs, *(last_writer[buffer] for buffer in accessed if buffer in last_writer)}
        if isinstance(target, HigherOrderOperator) or (schema is not None and schema.is_mutable):
            for buffer in accessed:
                required |= {*readers.pop(buffer, [])}
                last_writer[buffer] = node
        for buffer in accessed:
            readers[buffer].append(node)
        is_view = schema is None or any(value.alias_info is not None for value in schema.returns)
        buffers[node] = accessed if is_view else {node}
        predecessors[node] = {required_node for required_node in required if required_node in predecessors}
    return predecessors
