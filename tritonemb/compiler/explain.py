"""What the backend would do with a model, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tritonemb.compiler.fuse import fuse_graph
from tritonemb.compiler.report import Fused, LeftAlone

WIDTH = 88


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo gave up and Python went on: lookups before and after are never merged.

    Attributes:
        reason: Dynamo's words.
        place: file and line.
    """

    reason: str
    place: str


@dataclass(frozen=True)
class Explanation:
    """What `torch.compile(model, backend="tritonemb")` does with a model; `str()` says it.

    Attributes:
        fused: what became one, graph by graph.
        left_alone: what stays, and why.
        graph_breaks: where the model falls into several graphs.
        num_graphs: how many there are.
    """

    fused: list[Fused]
    left_alone: list[LeftAlone]
    graph_breaks: list[GraphBreak]
    num_graphs: int

    def __str__(self) -> str:
        lines = [f"{self.num_graphs} graph{'' if self.num_graphs == 1 else 's'}"]
        lines += _section("Fused", [str(item) for item in self.fused], "nothing")
        lines += _section("Left alone", _by_reason(self.left_alone), "nothing")
        lines += _section("Graph breaks", [f"{item.place}: {item.reason}" for item in self.graph_breaks], "none")
        return "\n".join(lines)


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run `model(*args, **kwargs)` once under Dynamo and say what the backend would do with its graphs.

    Nothing is trained: there is no backward pass, and buffers, weights that a `max_norm` scales, and random number
    generators are put back as they were. Whatever was compiled before is forgotten (`torch._dynamo.reset`).

    Raises:
        ValueError: see `fuse_graph`.
    """
    with _unchanged(model):
        found = torch._dynamo.explain(model)(*args, **kwargs)
    fused: list[Fused] = []
    left_alone: list[LeftAlone] = []
    for graph in found.graphs:
        report = fuse_graph(graph)
        fused += report.fused
        left_alone += report.left_alone
    breaks = [GraphBreak(_first_words(str(reason.reason)), _place(reason)) for reason in found.break_reasons]
    return Explanation(fused, left_alone, breaks, len(found.graphs))


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Put back what a forward pass changes."""
    root = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    modules = list(root.modules()) if isinstance(root, nn.Module) else []
    kept: list[Tensor] = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    scaled: list[Any] = [module for module in modules if getattr(module, "max_norm", None) is not None]
    kept += [module.weight for module in scaled]
    copies = [tensor.detach().clone() for tensor in kept]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(kept, copies, strict=True):
                    if not torch.equal(tensor, before):
                        tensor.copy_(before)


def _section(title: str, items: list[str], otherwise: str) -> list[str]:
    if not items:
        return [f"{title}: {otherwise}"]
    wrapped = [
        textwrap.fill(item, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_long_words=False)
        for item in items
    ]
    return [f"{title}:", *wrapped]


def _by_reason(items: list[LeftAlone]) -> list[str]:
    """One entry a reason."""
    names: dict[str, list[str]] = {}
    for item in items:
        names.setdefault(item.reason, []).append(f"{item.name} ({item.what})")
    return [f"{', '.join(found)}: {reason}" for reason, found in names.items()]


def _first_words(reason: str) -> str:
    """Dynamo's reason without its advice, on one line."""
    lines = [line.strip().removeprefix("Explanation: ") for line in reason.splitlines()[:2]]
    return ". ".join(line.rstrip(".") for line in lines if line)


def _place(reason: Any) -> str:
    frame = reason.user_stack[-1] if reason.user_stack else None
    return "unknown place" if frame is None else f"{frame.filename}:{frame.lineno}"
