"""`torch.compile(model, backend="tritonemb")`: merge separate embedding lookups, then compile the graph with Inductor.

tritonemb      the backend; `torch.compile` finds it by this name
explain        report what would be merged in a model, what not, and why
fuse_graph     the graph pass, for other backends
dynamic_batch  context in which a compiled model's first graph serves all batch sizes
HideExchanges  Inductor pass that overlaps the exchanges of a sharded model with computation
"""

import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental import _config as shape_config
from torch.utils._pytree import tree_leaves

from tritonemb.compiler.graph import HideExchanges, is_transformed
from tritonemb.compiler.interaction import fuse_interactions
from tritonemb.compiler.lookups import NO_INT, LeftAlone, LookupGroup, check_fused_tables, left_alone, next_group
from tritonemb.compiler.merge import cacheable_functions, call_lookups, merge
from tritonemb.tables.lookup_tables import PreparedBatch
from tritonemb.utils import join_names

__all__ = ["Fused", "HideExchanges", "LeftAlone", "Report", "dynamic_batch", "explain", "fuse_graph", "tritonemb"]

_log = logging.getLogger(__name__)


class Fused(NamedTuple):
    """Operations that were merged."""

    what: str  # description of the new operation
    members: tuple[str, ...]  # names of the replaced operations: weights without `.weight`, or nodes of the graph

    def __str__(self) -> str:
        return f"{self.what}: {join_names(self.members, 12)}"


@dataclass
class Report:
    """Report of the lookups and interactions of a model; `str()` formats it.

    Attributes:
        fused: merged operations.
        left_alone: unchanged operations, with the reason.
        refused: errors that `torch.compile` raises; such a graph has no other entries.
        graph_breaks: file, line and reason of each graph break; lookups before and after it are not merged.
        num_graphs: number of graphs of the model.
    """

    fused: list[Fused] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    num_graphs: int = 1

    def __str__(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for name, function, reason in self.left_alone:
            by_reason.setdefault(reason, []).append(f"{name} ({function})")
        sections = {
            "Fused": [str(item) for item in self.fused] or "nothing",
            "Left alone": [f"{', '.join(names)}: {cause}" for cause, names in by_reason.items()] or "nothing",
            **({"Refused": self.refused} if self.refused else {}),
            "Graph breaks": self.graph_breaks or "none",
        }
        fill = textwrap.TextWrapper(88, "  - ", "    ", break_long_words=False).fill
        lines = [f"{self.num_graphs} graph{'' if self.num_graphs == 1 else 's'}"]
        for title, items in sections.items():
            lines += [f"{title}: {items}"] if isinstance(items, str) else [f"{title}:", *map(fill, items)]
        return "\n".join(lines)


def tritonemb(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Merge the graph's embedding lookups, then compile it with Inductor, and overlap its exchanges.

    Args:
        gm, example_inputs: from Dynamo.
        mode: as in `torch.compile`: "reduce-overhead", "max-autotune", ...
        options: options of Inductor, by name.

    Raises:
        ValueError: see `fuse_graph`.
        RuntimeError: for an unknown mode or option of Inductor.
    """
    has_defaults = mode is None and not options
    options = {"size_asserts": False, **(options or {})}  # an assertion per table; guards check the sizes already
    if gm.graph.find_nodes(op="call_function", target=torch.ops.tritonemb.finish_exchange):
        options = {"reorder_for_peak_memory": False, "post_grad_custom_post_pass": HideExchanges(), **options}
    inductor: Any = torch._TorchCompileInductorWrapper(mode, options, None)  # raises before the graph is changed
    report = fuse_graph(gm)
    if report.fused or report.left_alone:
        _log.info("%s", report)
    if has_defaults and not report.fused and call_lookups(gm, example_inputs):
        return gm.forward
    functions = torch._inductor.config.unsafe_marked_cacheable_functions | cacheable_functions()
    with torch._inductor.config.patch(unsafe_marked_cacheable_functions=functions):
        return inductor(gm, example_inputs)


def _reset() -> None:
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


tritonemb.reset = _reset  # type: ignore[attr-defined]


def register() -> None:
    """Register the backend with `torch.compile`, if the package's entry point is not installed."""
    if "tritonemb" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(tritonemb, name="tritonemb")


def fuse_graph(gm: GraphModule) -> Report:
    """Merge a graph's independent lookups and replace its interactions, in place; return a report.

    `gm` is a graph that Dynamo passes to a backend: torch functions, before autograd. Without matches it is unchanged.

    Raises:
        ValueError: for a table with a fused optimizer that is looked up in two places that cannot be merged.
    """
    report, groups = Report(), list[LookupGroup]()
    transformed = is_transformed(gm)
    interactions, unfused_interactions = ({}, []) if transformed else fuse_interactions(gm)
    while not transformed and (group := next_group(gm)) is not None:
        report.fused.append(Fused(merge(gm, group), tuple(lookup.feature for lookup in group.lookups)))
        groups.append(group)
    check_fused_tables(gm, groups)
    report.fused += [Fused(text, (name,)) for name, text in interactions.items()]
    report.left_alone += [*left_alone(gm, groups), *unfused_interactions]
    if report.fused:
        gm.graph.lint()
        gm.recompile()
    return report


@contextmanager
def dynamic_batch(*inputs: Any) -> Iterator[None]:
    """Let the graphs that are compiled in the block, for these inputs, serve all batch sizes, 1 and 2 included.

    Call a compiled model in the block. The first dimension of each tensor in `inputs`, pytrees, becomes dynamic, unless
    the model needs its value. Merged lookups do not support a batch of 0 samples then; call the uncompiled model.
    """
    for leaf in tree_leaves(inputs):
        # A prefetched batch is a leaf: mark its values, offsets and per-sample weights.
        for tensor in leaf.rows[:3] if isinstance(leaf, PreparedBatch) else (leaf,):
            if isinstance(tensor, Tensor) and tensor.dim():
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
    # Without that option, which is experimental, sizes of 0 and 1 have their own graphs.
    has_option = hasattr(shape_config, "backed_size_oblivious")
    with shape_config.patch(backed_size_oblivious=True) if has_option else nullcontext():  # type: ignore[attr-defined]
        yield


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run `model(*args, **kwargs)` once under Dynamo, and report what the backend would do with its graphs.

    The model is not changed, except that dynamic tables assign rows to new ids: no backward pass runs, and buffers,
    weights with `max_norm`, and random generators are restored. Compiled code is discarded (`torch._dynamo.reset`).
    """
    with _unchanged(model):
        explanation = torch._dynamo.explain(model)(*args, **kwargs)
    report = Report(num_graphs=len(explanation.graphs))
    for graph in explanation.graphs:
        try:
            graph_report = fuse_graph(graph)
        except ValueError as error:
            graph_report = Report(refused=[str(error)])
        for name in ("fused", "left_alone", "refused"):
            getattr(report, name).extend(getattr(graph_report, name))
    # Dynamo does not report these graph breaks.
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    numpy_padded = {
        path for path, module in modules if type(getattr(module, "padding_idx", None)).__module__ == "numpy"
    }
    numpy_padded -= {item.name for item in report.left_alone}
    report.left_alone += [LeftAlone(path, "lookup", NO_INT) for path in sorted(numpy_padded)]
    for reason in explanation.break_reasons:
        frame = reason.user_stack[-1] if reason.user_stack else None
        location = "unknown place" if frame is None else f"{frame.filename}:{frame.lineno}"
        # Keep the explanation, drop Dynamo's hints.
        lines = [line.strip().removeprefix("Explanation: ") for line in str(reason.reason).splitlines()[:2]]
        report.graph_breaks.append(f"{location}: {'. '.join(line.rstrip('.') for line in lines if line)}")
    return report


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    root = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    modules = list(root.modules()) if isinstance(root, nn.Module) else []
    state_tensors: list[Any] = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    state_tensors += [module.weight for module in modules if getattr(module, "max_norm", None) is not None]
    copies = [tensor.detach().clone() for tensor in state_tensors]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for tensor, original in zip(state_tensors, copies, strict=True):
                if not torch.equal(tensor, original):
                    tensor.detach().copy_(original)


register()
