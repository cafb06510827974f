"""`torch.compile(model, backend="tritonemb")`: separate embedding lookups become one, then Inductor compiles the rest.

tritonemb   the backend; `torch.compile` finds it by this name
explain     says in words what would be merged in a model, what not, and why
fuse_graph  the pass alone, for other backends
"""

from tritonemb.compiler.backend import Explanation, GraphBreak, Report, explain, fuse_graph, register, tritonemb
from tritonemb.compiler.graph import Fused, LeftAlone

__all__ = ["Explanation", "Fused", "GraphBreak", "LeftAlone", "Report", "explain", "fuse_graph", "tritonemb"]

register()
