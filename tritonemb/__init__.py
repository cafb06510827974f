"""Embedding tables of any size for recommendation models, with fused, exact and deterministic optimizers."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritonemb import compiler, data, interop, models, nn, offloading, optim, server, serving, sharding
    from tritonemb.jagged import KeyedJaggedTensor
    from tritonemb.nn.fuse import fuse, unfuse
    from tritonemb.offloading import estimate_offload, gather_parameters, offload
    from tritonemb.ops.registry import check_errors
    from tritonemb.server import AtMost
    from tritonemb.serving import load_run, quantize
    from tritonemb.serving.export import export
    from tritonemb.sharding import HybridParallel
    from tritonemb.sharding.planner import PlanError, Topology, collect_stats, plan
    from tritonemb.training import Trainer
    from tritonemb.types import AdmissionConfig, CacheConfig, EvictionConfig, TableConfig

__version__ = "0.1.0"
__all__ = [
    "AdmissionConfig", "AtMost", "CacheConfig", "EvictionConfig", "HybridParallel", "KeyedJaggedTensor", "PlanError",
    "TableConfig", "Topology", "Trainer", "check_errors", "collect_stats", "compiler", "data", "estimate_offload",
    "export", "fuse", "gather_parameters", "interop", "load_run", "models", "nn", "offload", "offloading", "optim",
    "plan", "quantize", "server", "serving", "sharding", "unfuse",
]  # fmt: skip
_MODULES = {
    "AdmissionConfig": "types", "AtMost": "server", "CacheConfig": "types", "EvictionConfig": "types",
    "HybridParallel": "sharding", "KeyedJaggedTensor": "jagged", "TableConfig": "types", "Trainer": "training",
    "load_run": "serving", "PlanError": "sharding.planner", "Topology": "sharding.planner", "plan": "sharding.planner",
    "collect_stats": "sharding.planner", "check_errors": "ops.registry", "fuse": "nn.fuse", "unfuse": "nn.fuse",
    "estimate_offload": "offloading", "gather_parameters": "offloading", "offload": "offloading",
    "export": "serving", "quantize": "serving",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a submodule at its first use, so that the command line can configure torch's threads first."""
    if name not in __all__:
        raise AttributeError(f"module 'tritonemb' has no attribute {name!r}")
    module = importlib.import_module(f"tritonemb.{_MODULES.get(name, name)}")
    value = globals()[name] = getattr(module, name) if name in _MODULES else module
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if "torch" in sys.modules:  # in a user's program, `import tritonemb` registers the ops
    importlib.import_module("tritonemb.nn")
