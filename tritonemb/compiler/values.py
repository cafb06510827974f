"""What Dynamo knows about a graph's values before it runs, and new nodes that know it too."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node, map_arg

Size = int | Node  # a number, or the node that computes it


def value_of(node: Any) -> Any:
    """The fake tensor or symbolic number that a node stands for; None if that is not known."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value_of(node), Tensor)


def expression(size: Any) -> Any:
    """A hashable form of a size: equal for two that are always equal."""
    return size if isinstance(size, int) else size.node.expr


def source_path(node: Node) -> str:
    """Where an input comes from, as users write it: `towers.user.weight`; the node's name if nobody knows."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return str(node.target) if node.op == "get_attr" else node.name
    name = source.name if isinstance(source.name, str) else source.name()
    parts = re.findall(r"\['?([^'\]]+)'?\]|\.(\w+)", name)
    words = [first or second for first, second in parts]
    words = [word for word in words if word not in ("_modules", "_parameters", "_buffers")]
    return ".".join(words[1:] or words) or node.name


def module_path(node: Node) -> tuple[str, type | None]:
    """The path and the class of the innermost module whose forward has this node; ("", None) outside modules."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "", None
    name, kind = list(stack.values())[-1]
    path = re.sub(r"^[LG]\['([^']*)'\]", "", name).lstrip(".")
    path = re.sub(r"\._(modules|parameters|buffers)\b", "", path)
    return re.sub(r"\['?([^'\]]+)'?\]", r".\1", path).lstrip("."), kind


class Writer:
    """Adds nodes to a graph at one place. Each knows its value, so that later passes can go on from there."""

    def __init__(self, gm: GraphModule, before: Node) -> None:
        self.gm = gm
        self._before = before
        fakes = (value_of(node) for node in gm.graph.nodes)
        self._fake_mode: Any = next(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A node that calls `function`."""
        return self._add("call_function", function, args, kwargs)

    def method(self, name: str, *args: Any) -> Node:
        """A node that calls a method of its first argument."""
        return self._add("call_method", name, args, {})

    def constant(self, value: Tensor, name: str) -> Node:
        """A node that reads a new buffer of the module, never written to."""
        index = sum(1 for other, _ in self.gm.named_buffers() if other.startswith("_tritonemb_"))
        name = f"_tritonemb_{index}_{name}"
        with torch.inference_mode(False):  # compiled in inference mode, the graph may be saved for a backward elsewhere
            self.gm.register_buffer(name, value.clone(), persistent=False)
        sources = getattr(self.gm, "_param_name_to_source", None)
        if sources is not None:  # AOTAutograd asks where each buffer of a graph of Dynamo's comes from
            from torch._dynamo.source import ConstantSource

            sources[name] = ConstantSource(source_name=name)
        with self.gm.graph.inserting_before(self._before):
            node = self.gm.graph.get_attr(name)
        node.meta["example_value"] = self._fake_mode.from_tensor(self.gm.get_buffer(name), static_shapes=True)
        return node

    def size(self, node: Node, dim: int) -> Size:
        """A size of a tensor: a number if it is fixed."""
        size = value_of(node).shape[dim]
        return size if isinstance(size, int) else self.method("size", node, dim)

    def add(self, left: Size, right: Size) -> Size:
        """A sum; of two numbers, a number."""
        if isinstance(left, int) and isinstance(right, int):
            return left + right
        return right if left == 0 else left if right == 0 else self.call(operator.add, left, right)

    def multiply(self, left: Size, right: Size) -> Size:
        """A product; of two numbers, a number."""
        if isinstance(left, int) and isinstance(right, int):
            return left * right
        return right if left == 1 else left if right == 1 else self.call(operator.mul, left, right)

    def item(self, node: Node, index: Any) -> Node:
        """`node[index]`"""
        return self.call(operator.getitem, node, index)

    def _add(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        with self.gm.graph.inserting_before(self._before):
            node = self.gm.graph.create_node(op, target, args, kwargs)
        node.meta["example_value"] = self._evaluate(node)
        if "stack_trace" in self._before.meta:
            node.meta["stack_trace"] = self._before.meta["stack_trace"]
        return node

    def _evaluate(self, node: Node) -> Any:
        args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
        with self._fake_mode, torch.no_grad(), torch.autocast("cpu", enabled=False):
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]
