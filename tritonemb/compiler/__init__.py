"""`torch.compile(model, backend="tritonemb")`: separate embedding lookups become one, then Inductor compiles the rest.

tritonemb   the backend; `torch.compile` finds it by this name
explain     says in words what would be merged in a model, what not, and why
fuse_graph  the pass alone, for other backends
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from tritonemb.compiler.graph import Fused, LeftAlone, is_transformed
from tritonemb.compiler.interaction import fuse_interactions
from tritonemb.compiler.lookups import LookupGroup, check_fused_tables, left_alone, next_group
from tritonemb.compiler.merge import merge

__all__ = ["Explanation", "Fused", "GraphBreak", "LeftAlone", "Report", "explain", "fuse_graph", "tritonemb"]

WIDTH = 88
_log = logging.getLogger(__name__)


@dataclass
class Report:
    """What became of lookups and interactions, and what stays, with the reason."""

    fused: list[Fused] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([*(f"fused: {item}" for item in self.fused), *(f"left alone: {x}" for x in self.left_alone)])


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo splits a model into several graphs: lookups before and after are never merged.

    Attributes:
        reason: Dynamo's words.
        place: file and line.
    """

    reason: str
    place: str


@dataclass
class Explanation(Report):
    """What `torch.compile(model, backend="tritonemb")` does with a model, in all of its graphs; `str()` says it.

    Attributes:
        graph_breaks: where the model falls into several graphs.
        num_graphs: how many there are.
    """

    graph_breaks: list[GraphBreak] = field(default_factory=list)
    num_graphs: int = 0

    def __str__(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for item in self.left_alone:
            by_reason.setdefault(item.reason, []).append(f"{item.name} ({item.what})")
        lines = [f"{self.num_graphs} graph{'' if self.num_graphs == 1 else 's'}"]
        lines += _section("Fused", [str(item) for item in self.fused], "nothing")
        lines += _section("Left alone", [f"{', '.join(names)}: {why}" for why, names in by_reason.items()], "nothing")
        lines += _section("Graph breaks", [f"{item.place}: {item.reason}" for item in self.graph_breaks], "none")
        return "\n".join(lines)


def tritonemb(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Merge the graph's embedding lookups, then compile it with Inductor.

    Args:
        gm, example_inputs: from Dynamo.
        mode: as in `torch.compile`: "reduce-overhead", "max-autotune", ..
        options: Inductor's, by name.

    Raises:
        ValueError: see `fuse_graph`.
        RuntimeError: for a mode or an option that Inductor does not know.
    """
    inductor: Any = torch._TorchCompileInductorWrapper(mode, options, None)  # raises before the graph is changed
    report = fuse_graph(gm)
    if report.fused or report.left_alone:
        _log.info("%s", report)
    compiled: Callable[..., Any] = inductor(gm, example_inputs)
    return compiled


def _reset() -> None:
    """Forget CUDA graphs; `torch._dynamo.reset` calls it."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


tritonemb.reset = _reset  # type: ignore[attr-defined]


def register() -> None:
    """Let `torch.compile` find the backend by name where the package's entry point is not installed."""
    from torch._dynamo import list_backends, register_backend

    if "tritonemb" not in list_backends(exclude_tags=()):
        register_backend(tritonemb, name="tritonemb")


def fuse_graph(gm: GraphModule) -> Report:
    """Merge a graph's independent lookups and map its interactions, in place; say what was done.

    `gm` is a graph as Dynamo hands it to a backend: torch functions, before autograd. Without anything to do it stays
    as it is.

    Raises:
        ValueError: for a table with a fused optimizer that is looked up in two places that cannot be merged.
    """
    report, groups = Report(), list[LookupGroup]()
    grad_enabled = torch.is_grad_enabled()
    interactions, alone = ([], []) if is_transformed(gm) else fuse_interactions(gm)
    while (group := next_group(gm, grad_enabled)) is not None:
        report.fused.append(merge(gm, group))
        groups.append(group)
    check_fused_tables(gm, groups)
    report.fused += interactions
    report.left_alone += [*left_alone(gm, grad_enabled, groups), *alone]
    if report.fused:
        gm.graph.lint()
        gm.recompile()
    return report


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run `model(*args, **kwargs)` once under Dynamo and say what the backend would do with its graphs.

    Nothing is trained: there is no backward pass, and buffers, weights that a `max_norm` scales, and random number
    generators are put back as they were. Whatever was compiled before is forgotten (`torch._dynamo.reset`).

    Raises:
        ValueError: see `fuse_graph`.
    """
    with _unchanged(model):
        found = torch._dynamo.explain(model)(*args, **kwargs)
    explanation = Explanation(num_graphs=len(found.graphs))
    for graph in found.graphs:
        report = fuse_graph(graph)
        explanation.fused += report.fused
        explanation.left_alone += report.left_alone
    for reason in found.break_reasons:
        frame = reason.user_stack[-1] if reason.user_stack else None
        place = "unknown place" if frame is None else f"{frame.filename}:{frame.lineno}"
        explanation.graph_breaks.append(GraphBreak(_first_words(str(reason.reason)), place))
    return explanation


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Put back what a forward pass changes."""
    root = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    modules = list(root.modules()) if isinstance(root, nn.Module) else []
    kept: list[Any] = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    kept += [module.weight for module in modules if getattr(module, "max_norm", None) is not None]
    copies = [tensor.detach().clone() for tensor in kept]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for tensor, before in zip(kept, copies, strict=True):
                if not torch.equal(tensor, before):
                    tensor.detach().copy_(before)


def _section(title: str, items: list[str], otherwise: str) -> list[str]:
    if not items:
        return [f"{title}: {otherwise}"]
    lines = textwrap.TextWrapper(WIDTH, "  - ", "    ", break_long_words=False)
    return [f"{title}:", *map(lines.fill, items)]


def _first_words(reason: str) -> str:
    """Dynamo's reason without its advice, on one line."""
    lines = [line.strip().removeprefix("Explanation: ") for line in reason.splitlines()[:2]]
    return ". ".join(line.rstrip(".") for line in lines if line)


register()
