"""`torch.compile(model, backend="tritonemb")`: separate embedding lookups become one, then Inductor compiles the rest.

tritonemb      the backend; `torch.compile` finds it by this name
explain        says in words what would be merged in a model, what not, and why
fuse_graph     the pass alone, for other backends
HideExchanges  Inductor's pass that computes beside the exchanges of a sharded model
"""

import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule

from tritonemb.compiler.exchanges import HideExchanges
from tritonemb.compiler.graph import is_transformed
from tritonemb.compiler.interaction import fuse_interactions
from tritonemb.compiler.lookups import NO_INT, LeftAlone, LookupGroup, check_fused_tables, left_alone, next_group
from tritonemb.compiler.merge import cacheable, call_lookups, merge
from tritonemb.utils import join_names

__all__ = ["Fused", "HideExchanges", "LeftAlone", "Report", "explain", "fuse_graph", "tritonemb"]

_log = logging.getLogger(__name__)


class Fused(NamedTuple):
    """Operations that became one."""

    what: str  # the new operation, in words
    members: tuple[str, ...]  # names of what it replaces: of weights, without `.weight`, or names in the graph

    def __str__(self) -> str:
        return f"{self.what}: {join_names(self.members, 12)}"


@dataclass
class Report:
    """What becomes of a model's lookups and interactions; `str()` says it.

    Attributes:
        fused: what is merged.
        left_alone: what stays, with the reason.
        refused: why `torch.compile` raises; nothing else is said of such a graph.
        graph_breaks: file and line where Dynamo splits a model, and why; lookups before and after are never merged.
        num_graphs: how many graphs the model falls into.
    """

    fused: list[Fused] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    num_graphs: int = 1

    def __str__(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for name, what, reason in self.left_alone:
            by_reason.setdefault(reason, []).append(f"{name} ({what})")
        parts = {
            "Fused": [str(item) for item in self.fused] or "nothing",
            "Left alone": [f"{', '.join(names)}: {why}" for why, names in by_reason.items()] or "nothing",
            **({"Refused": self.refused} if self.refused else {}),
            "Graph breaks": self.graph_breaks or "none",
        }
        fill = textwrap.TextWrapper(88, "  - ", "    ", break_long_words=False).fill
        lines = [f"{self.num_graphs} graph{'' if self.num_graphs == 1 else 's'}"]
        for title, items in parts.items():
            lines += [f"{title}: {items}"] if isinstance(items, str) else [f"{title}:", *map(fill, items)]
        return "\n".join(lines)


def tritonemb(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Merge the graph's embedding lookups, then compile it with Inductor, and hide its exchanges.

    Args:
        gm, example_inputs: from Dynamo.
        mode: as in `torch.compile`: "reduce-overhead", "max-autotune", ..
        options: Inductor's, by name.

    Raises:
        ValueError: see `fuse_graph`.
        RuntimeError: for a mode or an option that Inductor does not know.
    """
    has_defaults = mode is None and not options
    options = {"size_asserts": False, **(options or {})}  # one for each table; guards know the sizes already
    if gm.graph.find_nodes(op="call_function", target=torch.ops.tritonemb.finish_exchange):
        options = {"reorder_for_peak_memory": False, "post_grad_custom_post_pass": HideExchanges(), **options}
    inductor: Any = torch._TorchCompileInductorWrapper(mode, options, None)  # raises before the graph is changed
    report = fuse_graph(gm)
    if report.fused or report.left_alone:
        _log.info("%s", report)
    if has_defaults and not report.fused and call_lookups(gm, example_inputs):
        return gm.forward
    known = torch._inductor.config.unsafe_marked_cacheable_functions | cacheable()
    with torch._inductor.config.patch(unsafe_marked_cacheable_functions=known):
        return inductor(gm, example_inputs)


def _reset() -> None:
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


tritonemb.reset = _reset  # type: ignore[attr-defined]


def register() -> None:
    """Let `torch.compile` find the backend by name where the package's entry point is not installed."""
    if "tritonemb" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(tritonemb, name="tritonemb")


def fuse_graph(gm: GraphModule) -> Report:
    """Merge a graph's independent lookups and map its interactions, in place; say what was done.

    `gm` is a graph as Dynamo hands it to a backend: torch functions, before autograd. With nothing to do it stays so.

    Raises:
        ValueError: for a table with a fused optimizer that is looked up in two places that cannot be merged.
    """
    report, groups = Report(), list[LookupGroup]()
    transformed = is_transformed(gm)
    interactions, alone = ({}, []) if transformed else fuse_interactions(gm)
    while not transformed and (group := next_group(gm)) is not None:
        report.fused.append(Fused(merge(gm, group), tuple(lookup.feature for lookup in group.lookups)))
        groups.append(group)
    check_fused_tables(gm, groups)
    report.fused += [Fused(what, (name,)) for name, what in interactions.items()]
    report.left_alone += [*left_alone(gm, groups), *alone]
    if report.fused:
        gm.graph.lint()
        gm.recompile()
    return report


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run `model(*args, **kwargs)` once under Dynamo and say what the backend would do with its graphs.

    Nothing is trained: there is no backward pass, and buffers, weights that a `max_norm` scales, and random number
    generators are put back as they were. Whatever was compiled before is forgotten (`torch._dynamo.reset`).
    """
    with _unchanged(model):
        found = torch._dynamo.explain(model)(*args, **kwargs)
    report = Report(num_graphs=len(found.graphs))
    for graph in found.graphs:
        try:
            part = fuse_graph(graph)
        except ValueError as error:
            part = Report(refused=[str(error)])
        for name in ("fused", "left_alone", "refused"):
            getattr(report, name).extend(getattr(part, name))
    # Dynamo says nothing of what such a number breaks.
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    odd = {path for path, module in modules if type(getattr(module, "padding_idx", None)).__module__ == "numpy"}
    odd -= {each.name for each in report.left_alone}
    report.left_alone += [LeftAlone(path, "lookup", NO_INT) for path in sorted(odd)]
    for reason in found.break_reasons:
        frame = reason.user_stack[-1] if reason.user_stack else None
        place = "unknown place" if frame is None else f"{frame.filename}:{frame.lineno}"
        # Without Dynamo's advice.
        lines = [line.strip().removeprefix("Explanation: ") for line in str(reason.reason).splitlines()[:2]]
        report.graph_breaks.append(f"{place}: {'. '.join(line.rstrip('.') for line in lines if line)}")
    return report


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
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


register()
