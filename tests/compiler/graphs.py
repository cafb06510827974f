"""Backends for tests: run a graph as it is after the pass, or record what AOTAutograd makes of it."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from tritonemb.compiler import Report, fuse_graph

# Float32 sums of some ten rows or gradients of size 1, added up in another order than PyTorch's.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


class Compiled:
    """A model compiled with the pass and nothing after it: its graphs run in eager mode.

    Attributes:
        reports: what the pass did, one a graph.
        graphs: after the pass.
    """

    def __init__(self, model: Callable[..., Any], **options: Any) -> None:
        self.reports: list[Report] = []
        self.graphs: list[GraphModule] = []
        self._run = torch.compile(model, backend=self._backend, **options)

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def _backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.reports.append(fuse_graph(gm))
        self.graphs.append(gm)
        return gm.forward

    @property
    def fused(self) -> list[tuple[str, ...]]:
        """The members of everything that became one."""
        return [item.members for report in self.reports for item in report.fused]

    @property
    def reasons(self) -> dict[str, str]:
        """Why each lookup that was left alone was."""
        return {item.name: item.reason for report in self.reports for item in report.left_alone}


class Recorded(Compiled):
    """The same by AOTAutograd.

    Attributes:
        forwards, backwards: the graphs of ATen's ops that it made.
    """

    def __init__(self, model: Callable[..., Any], **options: Any) -> None:
        self.forwards: list[GraphModule] = []
        self.backwards: list[GraphModule] = []
        super().__init__(model, **options)

    def _backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        super()._backend(gm, example_inputs)
        compile_graph = aot_autograd(fw_compiler=self._keep(self.forwards), bw_compiler=self._keep(self.backwards))
        return compile_graph(gm, example_inputs)

    @staticmethod
    def _keep(graphs: list[GraphModule]) -> Callable[..., Any]:
        def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            graphs.append(gm)
            return gm.forward

        return keep


def compile_pair(
    model: nn.Module, make: Callable[..., Compiled] = Compiled, **options: Any
) -> tuple[Compiled, nn.Module, nn.Module]:
    """A compiled model, the model, and its uncompiled twin."""
    twin = copy.deepcopy(model)
    return make(model, **{"fullgraph": True, **options}), model, twin


def count_ops(gm: GraphModule) -> Counter[str]:
    """How often each op is called; those of auto-functionalized ops by the op's own name."""
    result: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if node.op == "call_function":
            target = node.args[0] if "auto_functionalized" in str(node.target) else node.target
            result[str(target).removesuffix(".default")] += 1
    return result


def copies_of(gm: GraphModule, shape: tuple[int, ...]) -> list[str]:
    """Nodes that copy a tensor of this shape."""
    copying = ("clone", "copy", "_to_copy", "contiguous")
    return [
        node.name
        for node in gm.graph.nodes
        if any(f"aten.{name}" in str(node.target) for name in copying) and tuple(node.meta["val"].shape) == shape
    ]


def gradients_of(model: nn.Module, outputs: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> list[Tensor | None]:
    """Of all parameters and `inputs`, for gradients of the outputs that depend on nothing but their shapes."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = None
    grads = [torch.randn(output.shape, generator=generator).to(output.dtype) for output in outputs]
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return [tensor.grad for tensor in [*model.parameters(), *inputs]]


def assert_same(
    compiled: Compiled, model: nn.Module, twin: nn.Module, args: Sequence[Tensor], tolerance: dict[str, float] = CLOSE
) -> None:
    """The compiled model's outputs and gradients are those of its uncompiled twin. Float inputs take gradients."""
    argument = [[arg.clone().requires_grad_(arg.is_floating_point()) for arg in args] for _ in range(2)]
    results = []
    for run, owner, inputs in ((compiled, model, argument[0]), (twin, twin, argument[1])):
        outputs = run(*inputs)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        grads = gradients_of(owner, outputs, [arg for arg in inputs if arg.requires_grad])
        results.append([*outputs, *grads])
    for actual, expected in zip(*results, strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            assert actual.is_contiguous() == expected.is_contiguous()
            torch.testing.assert_close(actual, expected, **tolerance)
