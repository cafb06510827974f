"""`torch.compile(model, backend="tritonemb")`: the pass, then Inductor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from tritonemb.compiler.fuse import fuse_graph

_log = logging.getLogger(__name__)


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
    from torch._inductor.compile_fx import compile_fx

    report = fuse_graph(gm)
    if report.fused or report.left_alone:
        _log.info("%s", report)
    compiled: Any = compile_fx(gm, example_inputs, config_patches=_patches(mode, options) or None)
    return compiled


def _patches(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """Inductor's settings for a mode and options."""
    from torch._inductor import config, list_mode_options

    patches = dict(list_mode_options(mode)) if mode and mode != "default" else {}
    known = config.get_config_copy()
    for key, value in (options or {}).items():
        name = key.replace("-", "_")
        if name not in known:
            raise RuntimeError(f"Inductor has no option {key!r}; torch._inductor.list_options() lists them")
        patches[name] = value
    return patches


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
