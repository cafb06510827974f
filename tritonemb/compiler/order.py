"""What may change places in a graph: stretches without side effects, and what depends on what within one."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

_STATE_SETTERS = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode",
                  "_exit_inference_mode", "manual_seed", "_saved_tensors_hooks_disable",
                  "_saved_tensors_hooks_enable"}  # fmt: skip
_WITH_RUNNING_STATISTICS = {"batch_norm", "instance_norm"}
_RANDOM = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
           "feature_alpha_dropout", "native_dropout", "rrelu", "rand", "randn", "randint", "randperm", "rand_like",
           "randn_like", "randint_like", "bernoulli", "multinomial", "normal", "poisson", "binomial",
           "gumbel_softmax", "scaled_dot_product_attention", "multi_head_attention_forward", "fractional_max_pool2d",
           "fractional_max_pool3d"}  # fmt: skip
_IN_PLACE_OPERATORS = {
    operator.setitem, operator.delitem, operator.iadd, operator.iand, operator.iconcat, operator.ifloordiv,
    operator.ilshift, operator.imod, operator.imul, operator.imatmul, operator.ior, operator.ipow, operator.irshift,
    operator.isub, operator.itruediv, operator.ixor,
}  # fmt: skip

_IN_PLACE_METHODS = {f"__{function.__name__}__" for function in _IN_PLACE_OPERATORS}


@dataclass(frozen=True)
class Stretch:
    """Nodes between two side effects, in order.

    Attributes:
        nodes: none of them has a side effect.
        grad_enabled: whether autograd records them.
    """

    nodes: list[Node]
    grad_enabled: bool


def stretches(gm: GraphModule, grad_enabled: bool) -> list[Stretch]:
    """Cut a graph at its side effects; `grad_enabled` is the state that it is entered with."""
    found: list[Stretch] = []
    nodes: list[Node] = []
    recording = grad_states(gm, grad_enabled)
    for node in gm.graph.nodes:
        if not _runs(node):
            continue
        if not has_side_effect(node, gm):
            nodes.append(node)
        elif nodes:
            found.append(Stretch(nodes, recording[nodes[0]]))
            nodes = []
    return [*found, Stretch(nodes, recording[nodes[0]])] if nodes else found


def grad_states(gm: GraphModule, grad_enabled: bool) -> dict[Node, bool]:
    """For each node, whether autograd records it."""
    found, outside = {}, list[bool]()
    for node in gm.graph.nodes:
        found[node] = grad_enabled
        if node.target is torch._C._set_grad_enabled:
            grad_enabled = bool(node.args[0])
        elif _name(node) == "_enter_inference_mode":
            outside.append(grad_enabled)
            grad_enabled = grad_enabled and not (node.args and node.args[0])
        elif _name(node) == "_exit_inference_mode" and outside:
            grad_enabled = outside.pop()
    return found


def has_side_effect(node: Node, gm: GraphModule) -> bool:
    """Whether a node changes a tensor or a state, so that nothing may be moved across it. In doubt, it does."""
    name = _name(node)
    if node.op == "call_module":
        return True
    if node.kwargs.get("out") is not None:
        return True
    if name.endswith("_") and not name.endswith("__"):  # PyTorch's convention for what works in place
        return True
    if node.op == "call_method":
        if name in _IN_PLACE_METHODS:
            return True
        return name in ("backward", "register_hook", "__setitem__", "set_", "retain_grad")
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        found = bodies(node, gm)
        inner = [(part, body) for body in found for part in body.graph.nodes if _runs(part)]
        return not found or any(has_side_effect(part, body) for part, body in inner)
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _is_mutable(target)
    if target in _IN_PLACE_OPERATORS or target in (setattr, delattr) or name in _STATE_SETTERS:
        return True
    return _works_in_place(node)


def sets_state(node: Node) -> bool:
    """Whether a side effect is on a state (gradients, autocast), not on a tensor."""
    return _name(node) in _STATE_SETTERS


def is_transformed(gm: GraphModule) -> bool:
    """Whether some of a graph runs under `torch.func` (`vmap`, `grad`, ..), which the merged ops do not know."""
    return any(_name(node).endswith("_increment_nesting") for node in gm.graph.nodes)


def live_nodes(gm: GraphModule) -> set[Node]:
    """What a graph's results and side effects are computed from."""
    waiting = [node for node in gm.graph.nodes if node.op == "output" or (_runs(node) and has_side_effect(node, gm))]
    found = set(waiting)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found


def learning_nodes(gm: GraphModule) -> set[Node]:
    """What a backward pass can reach from a graph's results and side effects."""
    waiting = [node for node in gm.graph.nodes if node.op == "output" or (_runs(node) and has_side_effect(node, gm))]
    found = set(waiting)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in found and _may_require_grad(node):
                found.add(node)
                waiting.append(node)
    return found


def _may_require_grad(node: Node) -> bool:
    value = node.meta.get("example_value")
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return not tensors or any(tensor.requires_grad for tensor in tensors)


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers: two of them keep their order."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags
    return _name(node).removesuffix(".default") in _RANDOM


def dependencies(nodes: Iterable[Node]) -> dict[Node, set[Node]]:
    """For each node of a stretch, those of the same stretch that must come before it, directly."""
    found: dict[Node, set[Node]] = {}
    last_random = None
    for node in nodes:
        found[node] = {other for other in node.all_input_nodes if other in found}
        if is_random(node):
            if last_random is not None:
                found[node].add(last_random)
            last_random = node
    return found


def ancestors(nodes: Iterable[Node], before: dict[Node, set[Node]]) -> set[Node]:
    """All nodes that `nodes` depend on, by `dependencies`."""
    found: set[Node] = set()
    waiting = [other for node in nodes for other in before[node]]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(before[node])
    return found


def depths(before: dict[Node, set[Node]], counts: Callable[[Node], bool]) -> dict[Node, int]:
    """How many nodes that count lie at most on a way to each node; equal depths, so neither depends on the other."""
    found: dict[Node, int] = {}
    for node, others in before.items():
        found[node] = max((found[other] + counts(other) for other in others), default=0)
    return found


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _runs(node: Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def bodies(node: Node, gm: GraphModule) -> list[GraphModule]:
    """The graphs that a higher-order operator runs."""
    bodies = []
    for other in node.all_input_nodes:
        if other.op == "get_attr":
            body = functools.reduce(getattr, str(other.target).split("."), gm)
            if isinstance(body, GraphModule):
                bodies.append(body)
    return bodies


def _is_mutable(op: Any) -> bool:
    """Whether an op writes to its arguments, or returns nothing, so that it must do something else."""
    if isinstance(op, torch._ops.OpOverload):
        schemas = [op._schema]
    else:  # a packet is called without `out`
        schemas = [getattr(op, name)._schema for name in op.overloads() if "out" not in name]
    if any("_assert" in schema.name for schema in schemas):
        return False
    return any(schema.is_mutable or not schema.returns for schema in schemas)


def _works_in_place(node: Node) -> bool:
    """Whether a Python function is told to: `inplace=True`, a `max_norm` that scales rows, running statistics."""
    names = _parameters(node.target)
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if _name(node) in _WITH_RUNNING_STATISTICS:
        training = given.get("training", given.get("use_input_stats", True))
        return not names or (training is not False and given.get("running_mean") is not None)
    return given.get("inplace") is True or given.get("max_norm") is not None


@functools.cache
def _parameters(function: Any) -> tuple[str, ...]:
    """Names of a function's parameters; none for one that is written in C."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()
