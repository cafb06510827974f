"""What is wanted on one H200, by medians of one run, as data; and whether it was met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.cases import GRAPH


class Target(NamedTuple):
    """`ours` is to be at least `factor` times as fast as `peer` in every row of the ops that start with `op`."""

    op: str
    peer: str
    factor: float
    ours: str = "tritonemb"


TARGETS = (
    Target("forward", "fbgemm", 1.1),
    Target("forward", "copy", 0.8),
    Target("group + update", "fbgemm", 1.5),
    Target("group + update", "fbgemm", 2.5, "tritonemb, grouped ahead"),
    Target("codec", "copy", 0.9),
    Target("interaction", "torch, compiled", 1.3),
    Target("DLRM step", "fbgemm", 1.3),
    Target("training from host memory", "tritonemb, in HBM", 0.8),
    Target("training from host memory", "fbgemm, cached", 1.5),
)


def verdicts(rows: Sequence[dict[str, Any]], targets: Sequence[Target] = TARGETS) -> list[dict[str, Any]]:
    """A line for every target and case in which both were measured; with another line for a case that lacks one."""
    cases: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        cases.setdefault((row["op"], row["shape"]), {})[row["implementation"]] = row["p50_ms"]
    found = []
    for target in targets:
        for (op, shape), medians in cases.items():
            if not op.startswith(target.op) or op.endswith(GRAPH):
                continue
            measured = target.peer in medians and target.ours in medians
            ratio = medians[target.peer] / medians[target.ours] if measured else None
            found.append(
                {
                    "op": op,
                    "shape": shape,
                    "measured": f"{target.peer} / {target.ours}",
                    "ratio": ratio,
                    "target": f"at least {target.factor:g}",
                    "met": None if ratio is None else ratio >= target.factor,
                }
            )
    return found
