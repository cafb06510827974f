"""The pass: from a graph of Dynamo's to one with merged lookups."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from tritonemb.compiler.groups import Group, check_fused_tables, left_alone, next_group
from tritonemb.compiler.interaction import fuse_interactions
from tritonemb.compiler.merge import merge
from tritonemb.compiler.order import is_transformed
from tritonemb.compiler.report import Report


def fuse_graph(gm: GraphModule) -> Report:
    """Merge a graph's independent lookups and map its interactions, in place; say what was done.

    `gm` is a graph as Dynamo hands it to a backend: torch functions, before autograd. Without anything to do it stays
    as it is.

    Raises:
        ValueError: for a table with a fused optimizer that is looked up in two places that cannot be merged.
    """
    report, groups = Report(), list[Group]()
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
