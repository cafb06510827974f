"""What the passes know of a graph of Dynamo's: its values, its side effects, its order; and how they add to it."""

import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node, map_arg
from torch.fx.operator_schemas import normalize_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

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


class NotServed(Exception):
    """Says why an operation is left alone."""


def require(condition: bool, reason: str) -> None:
    """Raise `NotServed` unless `condition` holds."""
    if not condition:
        raise NotServed(reason)


def value_of(node: Any) -> Any:
    """The fake tensor or symbolic number of a node; None if that is not known."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def expression(size: Any) -> Any:
    """A hashable form of a size: equal for two that are always equal."""
    return size if isinstance(size, int) else size.node.expr


def arguments(node: Node) -> dict[str, Any]:
    """What a function is called with, by name, defaults included; empty where the call fits no known signature."""
    target: Any = node.target
    try:
        found = normalize_function(target, node.args, dict(node.kwargs), normalize_to_only_use_kwargs=True)
    except (TypeError, ValueError):
        return {}
    return {} if found is None else found.kwargs


def is_joined(node: Any) -> bool:
    """Whether a node is a concatenation along dimension 1."""
    return isinstance(node, Node) and node.target in CONCATENATIONS and joined_dim(node) == 1


def joined_dim(node: Node) -> int:
    """The dimension of a concatenation or a stack."""
    dim: Any = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else 0))
    return int(dim) % int(value_of(node).dim())


def joined_parts(node: Node) -> list[Any]:
    """The parts of a concatenation or a stack."""
    parts: Any = node.args[0] if node.args else node.kwargs["tensors"]
    return list(parts)


def source_path(node: Node) -> str:
    """Where an input comes from, as users write it: `towers.user.weight`; the node's name if nobody knows."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return str(node.target) if node.op == "get_attr" else node.name
    name = source.name if isinstance(source.name, str) else source.name()
    # The variable that leads to the value, then attributes and keys on the way.
    words = [key or word for key, word in re.findall(r"\['?([^'\]]+)'?\]|(\w+)", name)]
    words = [word for word in words if word not in ("_modules", "_parameters", "_buffers")]
    root, *words = words[1:] if words[:1] in (["L"], ["G"]) else ["", *words]
    return ".".join(words) or root or node.name


def regions(gm: GraphModule) -> list[list[Node]]:
    """The nodes between any two side effects, in order; those that change known memory alone are among them."""
    found: list[list[Node]] = [[]]
    for node in gm.graph.nodes:
        if has_side_effect(node, gm) and not _changed_memory(node):
            found.append([])
        elif _runs(node):
            found[-1].append(node)
    return found


def has_side_effect(node: Node, gm: GraphModule) -> bool:
    """Whether a node changes a tensor or a state, so that nothing may be moved across it. In doubt, it does."""
    name, target = name_of(node), node.target
    if not _runs(node):
        return False
    in_place = name.endswith("_") and not name.endswith("__")  # PyTorch's convention
    if in_place or node.op == "call_module" or node.kwargs.get("out") is not None:
        return True
    if node.op == "call_method":
        return name.strip("_") in _MUTATING
    if isinstance(target, torch._ops.HigherOrderOperator):
        found = bodies(node, gm)
        return not found or any(has_side_effect(part, body) for body in found for part in body.graph.nodes)
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _is_mutable(target)
    return name.strip("_") in _MUTATING or name.startswith(_STATE_SETTERS) or _works_in_place(node)


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers: two of them keep their order."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    name = name_of(node).removesuffix(".default")
    return name in _RANDOM or "dropout" in name or name.startswith("rand")


def is_transformed(gm: GraphModule) -> bool:
    """Whether some of a graph runs under `torch.func` (`vmap`, `grad`, ..), which the merged ops do not know."""
    return any(name_of(node).endswith("_increment_nesting") for node in gm.graph.nodes)


def live_nodes(gm: GraphModule, learning: bool = False) -> set[Node]:
    """What results and side effects of a graph are computed from; if `learning`, what a backward from them reaches."""
    ends = [node for node in gm.graph.nodes if node.op == "output" or has_side_effect(node, gm)]
    counts = _may_require_grad if learning else None  # None: every node does
    return {*ends, *reached(ends, lambda node: filter(counts, node.all_input_nodes))}


def dependencies(nodes: Iterable[Node]) -> dict[Node, set[Node]]:
    """For each node of a region, those of the same region that must come before it, directly."""
    found: dict[Node, set[Node]] = {}
    memory, changed = dict[Node, set[Any]](), dict[Node, set[Any]]()
    for node in nodes:
        found[node] = {other for other in node.all_input_nodes if other in found}
        states = _changed_memory(node) | ({"random numbers"} if is_random(node) else set())
        memory[node] = states.union(_memory(node), *map(_memory, node.all_input_nodes))
        found[node] |= {other for other, tensors in changed.items() if tensors & memory[node]}
        if states:
            found[node] |= {other for other, tensors in memory.items() if tensors & states} - {node}
            changed[node] = states
    return found


def _memory(node: Any) -> set[Any]:
    """The storages of a node's tensors; None for a tensor that is not an ordinary one."""
    tensors = [leaf for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
    plain = [tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor) for tensor in tensors]
    return {t.untyped_storage()._cdata if known else None for t, known in zip(tensors, plain, strict=True)}


def _changed_memory(node: Node) -> set[Any]:
    """The storages that a node changes, if it does nothing else: only what reads them has to come before or after.

    Not those of the graph's inputs, which may share memory in another call: nothing is moved across that.
    """
    if not node.args or "out" in node.kwargs or not {name_of(node), name_of(node).strip("_")} & _CHANGING:
        return set()
    own, inputs = _memory(node.args[0]), [other for other in node.graph.nodes if not _runs(other)]
    odd = any(None in _memory(other) for other in node.graph.nodes)
    return own and own | _memory(node) if not odd and own.isdisjoint(set().union(*map(_memory, inputs))) else set()


def reached(nodes: Iterable[Node], before: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """All nodes that `nodes` depend on, directly by `before`, or by others."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        new = {*before(waiting.pop())} - found
        found |= new
        waiting += new
    return found


def depths(before: dict[Node, set[Node]], counted: set[Node]) -> dict[Node, int]:
    """The most `counted` nodes on a way to each node; of two with equal depths, neither needs the other."""
    found: dict[Node, int] = {}
    for node, others in before.items():
        found[node] = max((found[other] + (other in counted) for other in others), default=0)
    return found


def bodies(node: Node, gm: GraphModule) -> list[GraphModule]:
    """The graphs that a node runs, if it is a higher-order operator."""
    names = [str(other.target) for other in node.all_input_nodes if other.op == "get_attr"]
    found = [functools.reduce(getattr, name.split("."), gm) for name in names]
    return [body for body in found if isinstance(body, GraphModule)]


def name_of(node: Node) -> str:
    """Of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _runs(node: Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def _may_require_grad(node: Node) -> bool:
    tensors = [leaf for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
    return not tensors or any(tensor.requires_grad for tensor in tensors)


def _is_mutable(op: Any) -> bool:
    """Whether an op writes to its arguments, or returns nothing, so that it must do something else."""
    if isinstance(op, torch._ops.OpOverload):
        schemas = [op._schema]
    else:  # a packet is called without `out`
        schemas = [getattr(op, name)._schema for name in op.overloads() if "out" not in name]
    asserts = any("_assert" in schema.name for schema in schemas)
    return not asserts and any(schema.is_mutable or not schema.returns for schema in schemas)


def _works_in_place(node: Node) -> bool:
    """Whether the arguments of a Python function say so: `inplace=True`, `max_norm`, running statistics."""
    given = arguments(node) if inspect.isfunction(node.target) else {}
    if name_of(node) in _WITH_RUNNING_STATISTICS:
        training = given.get("training", given.get("use_input_stats", True))
        return not given or (training is not False and given["running_mean"] is not None)
    return given.get("inplace") is True or given.get("max_norm") is not None


def only_read(node: Node) -> bool:
    """Whether all users of a node make something new of it, whatever its strides."""
    return all(
        (user.target in _READERS and user.kwargs.get("out") is None) or (user.target in _SELECTIONS and only_read(user))
        for user in node.users
    )


def erase_unused(gm: GraphModule) -> None:
    """Erase what neither a result nor a side effect needs; random numbers are drawn as before."""
    gm.graph.eliminate_dead_code(
        lambda node: not _runs(node) or has_side_effect(node, gm) or is_random(node) or value_of(node) is None
    )


class Writer:
    """Adds nodes before one node of a graph. Each knows its fake value, so that later passes can go on."""

    def __init__(self, gm: GraphModule, before: Node) -> None:
        self.gm, self._before = gm, before
        fakes = (value_of(node) for node in gm.graph.nodes)
        self._fake_mode: Any = next(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))

    def __call__(self, function: Callable[..., Any], *args: Any) -> Node:
        """A node that calls `function`, which AOTAutograd traces, with nodes, numbers and named tuples of them."""
        with self._fake_mode, torch.no_grad(), torch.autocast("cpu", enabled=False):
            value = function(*map_arg(args, value_of))
        with self.gm.graph.inserting_before(self._before):
            return self._known(self.gm.graph.call_function(function, args), value)

    def item(self, node: Node, index: Any) -> Node:
        """`node[index]`."""
        return self(operator.getitem, node, index)

    def constant(self, value: Tensor, name: str) -> Node:
        """A node that reads a new buffer of the module, never written to."""
        index = sum(1 for other, _ in self.gm.named_buffers() if other.startswith("_tritonemb_"))
        name = f"_tritonemb_{index}_{name}"
        with torch.inference_mode(False):  # compiled in inference mode, the graph may be saved for a later backward
            self.gm.register_buffer(name, value.clone(), persistent=False)
        sources = getattr(self.gm, "_param_name_to_source", None)
        if sources is not None:  # AOTAutograd asks where each buffer of a graph of Dynamo's comes from
            sources[name] = ConstantSource(source_name=name)
        with self.gm.graph.inserting_before(self._before):
            return self._known(self.gm.graph.get_attr(name), self._fake_mode.from_tensor(value, static_shapes=True))

    def _known(self, node: Node, value: Any) -> Node:
        node.meta["example_value"] = value
        if "stack_trace" in self._before.meta:
            node.meta["stack_trace"] = self._before.meta["stack_trace"]
        return node
