"""Analysis of Dynamo's graphs: values, effects and dependencies of nodes; insertion of nodes; and Inductor's order."""

import inspect
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._higher_order_ops.effects import with_effects
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.operator_schemas import normalize_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

import tritonemb.comm.output_exchange  # noqa: F401  declares the ops

CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
_STATE_SETTERS = ("_set_grad_enabled", "_enter_", "_exit_", "_saved_tensors_hooks_", "manual_seed")  # prefixes
_WITH_RUNNING_STATISTICS = {"batch_norm", "instance_norm"}
_RANDOM = {"rrelu", "bernoulli", "multinomial", "normal", "poisson", "binomial", "gumbel_softmax",
           "scaled_dot_product_attention", "multi_head_attention_forward", "fractional_max_pool2d",
           "fractional_max_pool3d"}  # fmt: skip
_IN_PLACE = {name[2:-2] for name in dir(operator) if name.startswith("__i") and f"__{name[3:]}" in dir(operator)}
_MUTATING = {"setattr", "delattr", "setitem", "delitem", "backward", "register_hook", "retain_grad", *_IN_PLACE}
_CHANGING = {"add_", "sub_", "mul_", "div_", "neg_", "clamp_", "relu_", "masked_fill_", "fill_", "zero_", "copy_",
             "setitem", *_IN_PLACE}  # fmt: skip
_READERS = {
    *CONCATENATIONS, torch.stack, torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.mm, torch.bmm,
    torch.addmm, torch.sum, torch.mean, torch.relu, torch.sigmoid, torch.tanh, torch.index_select, F.linear, F.gelu,
    F.layer_norm, F.normalize, F.scaled_dot_product_attention, operator.add, operator.sub, operator.mul,
    operator.truediv, operator.neg, operator.matmul, "add", "sub", "mul", "div", "matmul", "sum", "mean", "relu",
    "sigmoid", "tanh", "clone",
}  # fmt: skip
_SELECTIONS = {operator.getitem, torch.unsqueeze, torch.transpose, "unsqueeze", "transpose", "t"}


class NotSupported(Exception):
    """Reason not to merge an operation."""


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise NotSupported(reason)


def value_of(node: Any) -> Any:
    """Return the fake tensor or symbolic number of a node; None if it is unknown."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def expression(size: Any) -> Any:
    """Return a hashable form of a size: equal for two sizes that are always equal."""
    return size if isinstance(size, int) else size.node.expr


def arguments(node: Node) -> dict[str, Any]:
    """Arguments of a call by name, with defaults; empty if the call does not match a known signature."""
    target: Any = node.target
    try:
        normalized = normalize_function(target, node.args, dict(node.kwargs), normalize_to_only_use_kwargs=True)
    except (TypeError, ValueError):
        return {}
    return {} if normalized is None else normalized.kwargs


def is_concatenation(node: Any) -> bool:
    """Return whether a node is a concatenation along dimension 1."""
    return isinstance(node, Node) and node.target in CONCATENATIONS and concat_dim(node) == 1


def concat_dim(node: Node) -> int:
    dim: Any = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else 0))
    return int(dim) % int(value_of(node).dim())


def concat_operands(node: Node) -> list[Any]:
    tensors: Any = node.args[0] if node.args else node.kwargs["tensors"]
    return list(tensors)


def source_path(node: Node) -> str:
    """Return the path of an input in the user's code, such as `towers.user.weight`; the node's name if unknown."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return str(node.target) if node.op == "get_attr" else node.name
    name = source.name if isinstance(source.name, str) else source.name()
    # A local or global variable, then the attributes and keys that lead to the value.
    words = [key or word for key, word in re.findall(r"\['?([^'\]]+)'?\]|(\w+)", name)]
    words = [word for word in words if word not in ("_modules", "_parameters", "_buffers")]
    root, *words = words[1:] if words[:1] in (["L"], ["G"]) else ["", *words]
    return ".".join(words) or root or node.name


def regions(gm: GraphModule) -> list[list[Node]]:
    """Nodes between any two side effects, in order, including those that only change memory of the graph."""
    node_runs: list[list[Node]] = [[]]
    for node in gm.graph.nodes:
        if has_side_effect(node, gm) and not _changed_memory(node):
            node_runs.append([])
        elif _runs(node):
            node_runs[-1].append(node)
    return node_runs


def has_side_effect(node: Node, gm: GraphModule) -> bool:
    """Return whether a node changes a tensor or a state, so that no node may be moved across it. In doubt, True."""
    name, target = name_of(node), node.target
    if not _runs(node):
        return False
    in_place = name.endswith("_") and not name.endswith("__")  # PyTorch's convention
    if in_place or node.op == "call_module" or node.kwargs.get("out") is not None:
        return True
    if node.op == "call_method":
        return name.strip("_") in _MUTATING
    if isinstance(target, HigherOrderOperator):
        graphs = bodies(node, gm)
        return not graphs or any(has_side_effect(inner, body) for body in graphs for inner in body.graph.nodes)
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return _is_mutable(target)
    return name.strip("_") in _MUTATING or name.startswith(_STATE_SETTERS) or _works_in_place(node)


def is_random(node: Node) -> bool:
    """Return whether a node draws random numbers; such nodes must not be reordered."""
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    name = name_of(node).removesuffix(".default")
    return name in _RANDOM or "dropout" in name or name.startswith("rand")


def is_transformed(gm: GraphModule) -> bool:
    """Return whether a graph uses transforms of `torch.func` (`vmap`, `grad`, ...), which merged ops do not support."""
    return any(name_of(node).endswith("_increment_nesting") for node in gm.graph.nodes)


def live_nodes(gm: GraphModule, trainable: bool = False) -> set[Node]:
    """Nodes that results and side effects depend on; if `trainable`, only those that a backward pass reaches.

    A change of the graph's own memory is live if a live node has that memory, too.
    """
    sinks = [node for node in gm.graph.nodes if node.op == "output" or has_side_effect(node, gm)]
    # Tensors of a transform have no storage.
    changes = {} if is_transformed(gm) else {node: _changed_memory(node) for node in sinks}
    changed_memory = {node: memory for node, memory in changes.items() if memory}
    predicate = _may_require_grad if trainable else None  # None: every node does
    live = set[Node]()
    added = [node for node in sinks if node not in changed_memory]
    while added:
        live |= {*added, *reachable(added, lambda node: filter(predicate, node.all_input_nodes))}
        accessed_memory = set().union(*map(_memory, live)) if changed_memory else set[Any]()
        added = [node for node, memory in changed_memory.items() if node not in live and memory & accessed_memory]
    return live


def dependencies(nodes: Iterable[Node]) -> dict[Node, set[Node]]:
    """Direct predecessors of each node of a region, within the region: by data, memory, or random numbers."""
    predecessors: dict[Node, set[Node]] = {}
    accessed_memory, changed_memory = dict[Node, set[Any]](), dict[Node, set[Any]]()
    for node in nodes:
        predecessors[node] = {earlier for earlier in node.all_input_nodes if earlier in predecessors}
        states = _changed_memory(node) | ({"random numbers"} if is_random(node) else set())
        accessed_memory[node] = states.union(_memory(node), *map(_memory, node.all_input_nodes))
        predecessors[node] |= {earlier for earlier, states in changed_memory.items() if states & accessed_memory[node]}
        if states:
            predecessors[node] |= {earlier for earlier, tensors in accessed_memory.items() if tensors & states} - {node}
            changed_memory[node] = states
    return predecessors


def _memory(node: Any) -> set[Any]:
    """Storages of a node's tensors; None for a tensor that is not strided or is a subclass."""
    tensors = [leaf for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
    is_plain = [tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor) for tensor in tensors]
    return {t.untyped_storage()._cdata if is_known else None for t, is_known in zip(tensors, is_plain, strict=True)}


def _changed_memory(node: Node) -> set[Any]:
    """Storages that a node changes, if this is its only side effect, so that only accesses of them are ordered by it.

    Empty if it may change inputs of the graph, which may alias in another call: no node is moved across that.
    """
    if not node.args or "out" in node.kwargs or not {name_of(node), name_of(node).strip("_")} & _CHANGING:
        return set()
    storages, inputs = _memory(node.args[0]), [value for value in node.graph.nodes if not _runs(value)]
    is_known = not any(None in _memory(value) for value in node.graph.nodes)
    is_local = is_known and storages.isdisjoint(set().union(*map(_memory, inputs)))
    return storages | _memory(node) if storages and is_local else set()


def reachable(nodes: Iterable[Node], predecessors: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """All nodes that `nodes` depend on, by the transitive closure of `predecessors`."""
    visited: set[Node] = set()
    stack = list(nodes)
    while stack:
        new = {*predecessors(stack.pop())} - visited
        visited |= new
        stack += new
    return visited


def depths(predecessors: dict[Node, set[Node]], counted: set[Node]) -> dict[Node, int]:
    """Maximal number of `counted` nodes on a path to each node; counted nodes of one depth are independent."""
    longest: dict[Node, int] = {}
    for node, needed in predecessors.items():
        longest[node] = max((longest[previous] + (previous in counted) for previous in needed), default=0)
    return longest


def bodies(node: Node, gm: GraphModule) -> list[GraphModule]:
    """Subgraphs of a higher-order operator."""
    attributes = [operator.attrgetter(str(i.target))(gm) for i in node.all_input_nodes if i.op == "get_attr"]
    return [body for body in attributes if isinstance(body, GraphModule)]


def name_of(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _runs(node: Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def _may_require_grad(node: Node) -> bool:
    tensors = [leaf for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
    return not tensors or any(tensor.requires_grad for tensor in tensors)


def _is_mutable(op: Any) -> bool:
    """Return whether an op mutates its arguments, or has no results and so must have side effects."""
    if isinstance(op, OpOverload):
        schemas = [op._schema]
    else:  # a packet is called without `out`
        schemas = [getattr(op, name)._schema for name in op.overloads() if "out" not in name]
    asserts = any("_assert" in schema.name for schema in schemas)
    return not asserts and any(schema.is_mutable or not schema.returns for schema in schemas)


def _works_in_place(node: Node) -> bool:
    """Return whether a Python function mutates its arguments: `inplace=True`, `max_norm`, running statistics."""
    kwargs = arguments(node) if inspect.isfunction(node.target) else {}
    if name_of(node) in _WITH_RUNNING_STATISTICS:
        training = kwargs.get("training", kwargs.get("use_input_stats", True))
        return not kwargs or (training is not False and kwargs["running_mean"] is not None)
    return kwargs.get("inplace") is True or kwargs.get("max_norm") is not None


def is_only_read(node: Node) -> bool:
    """Return whether all users of a node only read it, and accept any strides."""
    return all(
        (user.target in _READERS and user.kwargs.get("out") is None)
        or (user.target in _SELECTIONS and is_only_read(user))
        for user in node.users
    )


def erase_unused(gm: GraphModule) -> None:
    """Erase nodes that no result or side effect needs, except those that draw random numbers."""
    gm.graph.eliminate_dead_code(
        lambda node: not _runs(node) or has_side_effect(node, gm) or is_random(node) or value_of(node) is None
    )


class Writer:
    """Inserts nodes before a node of a graph, with their fake values, which later passes read."""

    def __init__(self, gm: GraphModule, anchor: Node) -> None:
        self.gm, self._anchor = gm, anchor
        fakes = (value_of(node) for node in gm.graph.nodes)
        self._fake_mode: Any = next(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))

    def __call__(self, function: Callable[..., Any], *args: Any) -> Node:
        """Insert a call of `function`, which AOTAutograd traces, with nodes, numbers and named tuples of them."""
        with self._fake_mode, torch.no_grad(), torch.autocast("cpu", enabled=False):
            value = function(*map_arg(args, value_of))
        with self.gm.graph.inserting_before(self._anchor):
            return self._known(self.gm.graph.call_function(function, args), value)

    def item(self, node: Node, index: Any) -> Node:
        return self(operator.getitem, node, index)

    def constant(self, value: Tensor, name: str) -> Node:
        """Insert a read of a new, constant buffer of the module."""
        index = sum(1 for other, _ in self.gm.named_buffers() if other.startswith("_tritonemb_"))
        name = f"_tritonemb_{index}_{name}"
        with torch.inference_mode(False):  # compiled in inference mode, the graph may be saved for a later backward
            # Not `persistent=False`: those names are in a set, whose order gives each process another cache key.
            self.gm.register_buffer(name, value.clone())
        sources = getattr(self.gm, "_param_name_to_source", None)
        if sources is not None:  # AOTAutograd requires the source of each buffer
            sources[name] = ConstantSource(source_name=name)
        with self.gm.graph.inserting_before(self._anchor):
            return self._known(self.gm.graph.get_attr(name), self._fake_mode.from_tensor(value, static_shapes=True))

    def _known(self, node: Node, value: Any) -> Node:
        node.meta["example_value"] = value
        if "stack_trace" in self._anchor.meta:
            node.meta["stack_trace"] = self._anchor.meta["stack_trace"]
        return node


class HideExchanges(CustomGraphPass):
    """Inductor pass that overlaps exchanges with computation: starts them early, and finishes them late.

    Inductor runs nodes in the order of the graph: an exchange would start and finish before the layers that follow it.
    In the backward, the layers that were called last come first. It is a value of `post_grad_custom_post_pass`; set
    `reorder_for_peak_memory=False`, lest Inductor re-sort.
    """

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
