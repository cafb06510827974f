"""The picture of the README: a panel per op, a group of bars per shape, a bar per implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measuring.cases import CEILINGS, GRAPH

PANELS = {
    "forward": "Forward",
    "group + update": "Grouping + update\n(row-wise Adagrad)",
    "step, row-wise Adagrad": "Whole step\n(row-wise Adagrad)",
    "step, Adagrad": "Whole step\n(Adagrad)",
}
COLORS = {"tritonemb": "#1f77b4", "fbgemm": "#b0b0b0", "torch": "#d8c8a8"}
LABELS = {
    "tritonemb": "tritonemb",
    "fbgemm": "FBGEMM CPU",
    "torch": "torch.nn.EmbeddingBag (+ sparse torch.optim.Adagrad)",
}


def draw_if_possible(
    draw: Callable[[dict[str, Any], Path], None], results: dict[str, Any], path: Path, command: str
) -> bool:
    """Draw, or say why there is no picture, and which command draws it."""
    try:
        import matplotlib
    except ImportError:
        print(f"no picture: matplotlib is not installed; `{command}` draws it where it is")
        return False
    matplotlib.use("Agg")
    draw(results, path)
    return True


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture of one results file to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(15, 4.2), layout="constrained")
    for axes, (op, title) in zip(panels, PANELS.items(), strict=True):
        _draw_panel(axes, [row for row in results["rows"] if row["op"] == op])
        axes.set_title(title, fontsize=11)
    panels[0].set_ylabel("milliseconds, median; lower is better")
    handles = [patches.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in COLORS]
    figure.legend(handles, [LABELS[name] for name in COLORS], loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def _draw_panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    names = [name for name in COLORS if any(row["implementation"] == name for row in rows)]
    width = 0.8 / max(1, len(names))
    for row in rows:
        offset = (names.index(row["implementation"]) - (len(names) - 1) / 2) * width
        x, height = shapes.index(row["shape"]) + offset, row["p50_ms"]
        axes.bar(x, height, width * 0.94, color=COLORS[row["implementation"]])
        axes.text(x, height, f"{height:.3g}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(shapes)), [_tick(shape) for shape in shapes], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.1)


def _tick(shape: str) -> str:
    """ "B2048 T26 L1 D64 rows 100,000" on three short lines."""
    batch, tables, bag, dim, _, rows = shape.split()
    return f"{batch} {tables}\n{bag} {dim}\n{rows}"


ROOFLINE_COLORS = {
    "tritonemb": "#1f77b4",
    "tritonemb, grouped ahead": "#17becf",
    "fbgemm": "#8c8c8c",
    "torch": "#d8b878",
}
ROOFLINE_COLORS |= {"torch, compiled": "#c08040"}
MARKERS = {"forward": "o", "group + update": "s", "step": "D", "codec": "^", "interaction": "v"}


def draw_roofline(results: dict[str, Any], path: Path) -> None:
    """Bytes that a case must move against the rate reached; lines are ceilings, measured in the same run."""
    from matplotlib import pyplot

    rows = [row for row in results["rows"] if row["bytes"] > 0 and not row["op"].endswith(GRAPH)]
    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    for ceiling, style in zip(CEILINGS, ("-", ":"), strict=True):
        points = sorted((row["bytes"] / 1e6, row["gb_per_s"]) for row in rows if row["implementation"] == ceiling)
        if points:
            label = f"{ceiling} of as many bytes"
            axes.plot(*zip(*points, strict=True), color="black", linewidth=1, linestyle=style, marker=".", label=label)
    for name, color in ROOFLINE_COLORS.items():
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
