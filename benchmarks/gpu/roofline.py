"""The picture of a GPU run: how near each op comes to a copy, and a forward to a gather, of as many bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import CEILINGS, GRAPH

COLORS = {"tritonemb": "#1f77b4", "tritonemb, grouped ahead": "#17becf", "fbgemm": "#8c8c8c", "torch": "#d8b878"}
COLORS |= {"torch, compiled": "#c08040"}
MARKERS = {"forward": "o", "group + update": "s", "step": "D", "codec": "^", "interaction": "v"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Bytes that a case must move against the rate reached; lines are ceilings, measured in the same run."""
    from matplotlib import pyplot

    rows = [row for row in results["rows"] if row["bytes"] > 0 and not row["op"].endswith(GRAPH)]
    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    for ceiling, style in zip(CEILINGS, ("-", ":"), strict=True):
        points = sorted((row["bytes"] / 1e6, row["gb_per_s"]) for row in rows if row["implementation"] == ceiling)
        if points:
            label = f"{ceiling} of as many bytes"
            axes.plot(*zip(*points, strict=True), color="black", linewidth=1, linestyle=style, marker=".", label=label)
    for name, color in COLORS.items():
        for op, marker in MARKERS.items():
            mine = [row for row in rows if row["implementation"] == name and row["op"].startswith(op)]
            if mine:
                sizes, rates = [row["bytes"] / 1e6 for row in mine], [row["gb_per_s"] for row in mine]
                axes.scatter(sizes, rates, color=color, marker=marker, label=f"{op}, {name}", s=28)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("megabytes that the op must move")
    axes.set_ylabel("GB/s, median; higher is better")
    axes.set_title(rows[0]["device"] if rows else "")
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
