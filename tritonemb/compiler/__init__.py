"""`torch.compile(model, backend="tritonemb")`: separate embedding lookups become one, then Inductor compiles the rest.

tritonemb   the backend; `torch.compile` finds it by this name
explain     says in words what would be merged in a model, what not, and why
fuse_graph  the pass alone, for other backends
"""

from tritonemb.compiler.backend import register, tritonemb
from tritonemb.compiler.explain import Explanation, GraphBreak, explain
from tritonemb.compiler.fuse import fuse_graph
from tritonemb.compiler.report import Fused, LeftAlone, Report

__all__ = ["Explanation", "Fused", "GraphBreak", "LeftAlone", "Report", "explain", "fuse_graph", "tritonemb"]

register()
