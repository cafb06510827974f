"""Fill tables and pictures of README and docs from the newest results: `python -m benchmarks.measuring.report`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import result_files
from benchmarks.measuring.cases import CEILINGS, COPY, GATHER, GRAPH, OURS
from benchmarks.measuring.result_files import ROOT, by_case

BENCHMARKS = "docs/benchmarks.md"
SHOWN_OPS = "step, row-wise Adagrad", "step, Adagrad", "step of a plain DLRM, Adagrad"  # in README: at most 12 rows
BY_IDS = re.compile(r"step, \w+ ids, \d+ threads?")  # ops with a table of their own
DRAWS = "python -m benchmarks.measuring.report"

Row = dict[str, Any]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A table whose first columns are text and whose others are figures."""
    rule = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


def table_of(rows: Iterable[Row], columns: dict[str, Callable[[Row], str] | str], text_columns: int = 1) -> str:
    """A line for each row. A column is what makes its text of a row, or a format string over the row's fields."""
    lines = [
        [column.format(**row) if isinstance(column, str) else column(row) for column in columns.values()]
        for row in rows
    ]
    return markdown_table(list(columns), lines, text_columns)


def replace_section(text: str, name: str, content: str, page: str) -> str:
    """The text of a page with what stands between `<!-- name:begin -->` and `<!-- name:end -->` replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{page} needs one line {begin!r} and, after it, one line {end!r}; add both of them")
    head, _, tail = text.partition(begin)
    return f"{head}{begin}\n{content}\n{end}{tail.partition(end)[2]}"


def update(page: str, name: str, content: str) -> None:
    """Replace a section of a page, whose path is relative to the root of the repository."""
    path = ROOT / page
    path.write_text(replace_section(path.read_text(), name, content, page))


def speed_section(results: Row) -> str:
    """The conditions, and the medians of every op and shape."""
    peers, scaling = list[list[str]](), list[list[str]]()
    for (op, shape), case in by_case(results["rows"]).items():
        if BY_IDS.fullmatch(op):
            continue
        if OURS not in case:
            scaling += [[op, shape, name, f"{row['p50_ms']:.2f}"] for name, row in case.items()]
            continue
        fused, copy = case.pop(OURS), case.pop(COPY, None)
        fastest = min((row for name, row in case.items() if name != GATHER), key=_median, default=None)
        remainder = ", ".join(f"{name} {row['p50_ms']:.2f}" for name, row in case.items()) or "-"
        share = f"{100 * fused['gb_per_s'] / (copy['gb_per_s'] if copy else fused['copy_gb_per_s']):.0f} %"
        ratio = f"{fastest['p50_ms'] / fused['p50_ms']:.2f}" if fastest else "-"
        times = f"{fused['p50_ms']:.2f}", f"{fused['gb_per_s']:.1f}", share, ratio, _cpu_ratio(fastest, fused)
        peers.append([op, shape, remainder, *times])
    milliseconds = "tritonemb, ms"
    header = [
        "op", "shape", "peers, ms", milliseconds, "GB/s", "of a copy's rate", "times as fast as the fastest peer",
        "its CPU time, times ours",
    ]  # fmt: skip
    tables = markdown_table(header, peers, 3), markdown_table(["op", "shape", "case", milliseconds], scaling, 3)
    return "\n\n".join([_conditions(results), *tables, *ids_tables(results)])


def ids_tables(results: Row) -> list[str]:
    """A table of a step by the distribution of ids and the number of threads: times as fast as FBGEMM, and CPU time."""
    shapes: dict[str, dict[str, str]] = {}
    for (op, shape), case in by_case(results["rows"]).items():
        if BY_IDS.fullmatch(op) and "fbgemm" in case:
            fused, peer = case[OURS], case["fbgemm"]
            times = f"{peer['p50_ms'] / fused['p50_ms']:.2f} ({_cpu_ratio(peer, fused)})"
            shapes.setdefault(shape, {})[op.removeprefix("step, ")] = times
    columns = list(dict.fromkeys(column for row in shapes.values() for column in row))
    rows = [[shape, *(row.get(column, "-") for column in columns)] for shape, row in shapes.items()]
    header = "step, row-wise Adagrad: times as fast as FBGEMM (its CPU time, times ours)", *columns
    return [markdown_table(header, rows)] if rows else []


def _median(row: Row) -> float:
    return float(row["p50_ms"])


def _cpu_ratio(peer: Row | None, fused: Row) -> str:
    return f"{peer['cpu_ms'] / fused['cpu_ms']:.2f}" if peer and peer.get("cpu_ms") and fused.get("cpu_ms") else "-"


def shown_section(results: Row, picture: str) -> str:
    """README's picture and table: whole training steps beside the fastest peer."""
    lines = []
    for (op, shape), case in by_case(results["rows"]).items():
        if op in SHOWN_OPS:
            fused = case.pop(OURS)
            peer = min((row for name, row in case.items() if name != COPY), key=_median)
            ratio = f"{peer['p50_ms'] / fused['p50_ms']:.1f}"
            figures = f"{peer['implementation']} {peer['p50_ms']:.1f}", f"{fused['p50_ms']:.1f}", ratio
            lines.append([op.removeprefix("step, "), shape, *figures])
    header = ["training step", "shape", "fastest peer, ms", "tritonemb, ms", "times as fast"]
    table = markdown_table(header, lines, text_columns=3)
    return "\n\n".join([f"![Time of one call, ours and its peers]({picture})", table, _conditions(results)])


def headline(results: dict[str, Any]) -> str:
    """In one sentence: how a training step of the embeddings compares with what users have today."""
    parts = []
    for op, peer, name in (("step, row-wise Adagrad", "fbgemm", "FBGEMM's"), ("step, Adagrad", "torch", "torch.nn's")):
        cases = [case for (result, _), case in by_case(results["rows"]).items() if result == op and peer in case]
        ratios = [case[peer]["p50_ms"] / case["tritonemb"]["p50_ms"] for case in cases if "tritonemb" in case]
        if ratios:
            parts.append(
                f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as {name} ({op.removeprefix('step, ')})"
            )
    ids = "with ids that recur as in Meta's published traces"
    sentence = f"On a CPU, {ids}, a training step of embedding tables is {', and '.join(parts)}."
    uniform = [
        case["fbgemm"]["p50_ms"] / case[OURS]["p50_ms"]
        for (op, _), case in by_case(results["rows"]).items()
        if BY_IDS.fullmatch(op) and "uniform" in op and "fbgemm" in case
    ]
    if uniform:
        sentence += f" With uniform ids, nearly all distinct, it is {min(uniform):.1f} to {max(uniform):.1f} times as "
        sentence += "fast as FBGEMM's, on one thread and on two."
    return sentence if parts else ""


def _conditions(results: dict[str, Any]) -> str:
    row = results["rows"][0]
    copies = sorted(row["copy_gb_per_s"] for row in results["rows"])
    versions = ", ".join(f"{name} {row[name]}" for name in ("torch", "numba", "fbgemm", "tritonemb"))
    copy = f"a plain copy moves {copies[len(copies) // 2]:.0f} GB/s (read + write)"
    return (
        f"{row['cpu']}; {row['threads']} threads; {copy}; "
        f"{versions} at {row['commit']}, {row['date']}. B samples, T tables, L ids per bag, D columns."
    )


def accuracy_section(results: Row) -> str:
    """Of every data set and optimizer: mean AUC of both networks over the seeds and the difference."""
    columns = {
        "data, optimizer": "{data}, {optimizer}", "tritonemb AUC": "{tritonemb_auc:.4f}",
        "torch.nn AUC": "{torch_auc:.4f}", "difference": "{difference:+.4f}", "seeds": "{seeds}",
        "test rows seen in training": lambda row: f"{100 * row['test_rows_seen_in_training']:.0f} %",
    }  # fmt: skip
    return table_of(results["rows"], columns)


def dynamic_section(results: Row) -> str:
    """The conditions; for every data set and kind of table: mean AUC, and the paired difference to a vocabulary's."""
    conditions = (
        "{cpu}; torch {torch}, numba {numba}, tritonemb {tritonemb} at {commit}, {date}.\n"
        "±: standard error of the paired difference over the seeds.\n\n"
    ).format(**results["rows"][0])
    difference = "{difference:+.4f} ± {standard_error:.4f}"
    columns = {
        "data: tables": "{data}: {arm}", "AUC": "{auc:.4f}",
        "difference": lambda row: "-" if row["arm"] == "vocabulary" else difference.format(**row), "seeds": "{seeds}",
    }  # fmt: skip
    return conditions + table_of(results["rows"], columns)


def exchange_section(results: Row) -> str:
    """The conditions; for every data set and precision: mean AUC, difference to float32, bytes that a rank sends."""
    rows = [row | {"sent": sum(row["bytes_a_step"].values())} for row in results["rows"]]
    exact = {row["data"]: row["sent"] for row in rows if row["exchange"] == "fp32"}
    columns = {
        "data, codec": "{data}, {exchange}", "AUC": "{auc:.4f}",
        "difference": lambda row: "-" if row["exchange"] == "fp32" else f"{row['difference']:+.4f}",
        "largest of a seed": lambda row: f"{max(map(abs, row['difference_of_each_seed'])):.4f}",
        "kB a step and rank": lambda row: f"{row['sent'] / 1000:,.0f}",
        "of fp32's": lambda row: f"{row['sent'] / exact[row['data']]:.2f}",
    }  # fmt: skip
    conditions = (
        "{world_size} ranks on one CPU, over gloo; {seeds} seeds; torch {torch}, tritonemb {tritonemb} at {commit}, "
        "{date}.\n\n"
    ).format(**rows[0])
    return conditions + table_of(rows, columns)


def memory_section(results: Row) -> str:
    """The conditions; for every shape the result's size, and what a step of each implementation adds at its peak."""
    cases: dict[str, Row] = {}
    for row in results["rows"]:
        case = cases.setdefault(row["shape"], {"shape": row["shape"], "result": row["result_bytes"]})
        case[row["implementation"]] = row["peak_bytes"]
    names = list(dict.fromkeys(row["implementation"] for row in results["rows"]))
    mib = {name: lambda case, name=name: f"{case[name] / 2**20:.1f}" for name in ("result", *names)}
    conditions = (
        "MiB; {cpu}, 2 threads; torch {torch}, fbgemm {fbgemm}, tritonemb {tritonemb} at {commit}, {date}.\n\n"
    ).format(**results["rows"][0])
    return conditions + table_of(cases.values(), {"shape": "{shape}"} | mib)


def fully_shard_section(results: Row) -> str:
    """For every model: the best and the median step, beside those of the model in memory, and the peak of memory."""
    rows = results["rows"]
    columns = {
        "model": "{model}", "best step": "{best_ms:.0f} ms", "median": "{median_ms:.0f} ms",
        "of fully_shard's best": lambda row: f"{row['best_ms'] / rows[0]['best_ms']:.2f}",
        "peak memory of a rank": lambda row: f"{row['peak_bytes'] / 2**20:,.0f} MiB",
    }  # fmt: skip
    return table_of(rows, columns)


def quantized_section(results: Row) -> str:
    """For every data set and dtype of rows: AUC, log loss, and bytes."""
    columns = {
        "data": "{data}", "rows": "{rows}", "AUC": "{auc:.4f}", "difference": "{auc_difference:+.5f}",
        "± standard error": "{standard_error:.5f}", "log loss": "{log_loss:.4f}",
        "its difference": "{log_loss_difference:+.5f}", "bytes of rows": "{bytes_share:.1%}",
    }  # fmt: skip
    return table_of(results["rows"], columns)


def gpu_section(results: dict[str, Any]) -> str:
    """The conditions, medians beside peers and a copy, targets, and failures."""
    row = results["rows"][0]
    versions = ", ".join(f"{name} {row.get(name)}" for name in ("torch", "triton", "cuda", "fbgemm", "tritonemb"))
    parts = [
        f"{row['device']}; {versions} at {row['commit']}, {row['date']}. Medians; B samples, T tables, L ids a bag, D "
        "columns; the ceiling moves as many bytes, read and written, in the same run: a gather of rows by the same "
        "ids for forwards, a copy for all else. CUDA graphs are in the "
        "results file alone.",
        _gpu_table([row for row in results["rows"] if not row["op"].endswith(GRAPH)]),
        _targets_table(results["targets"]),
    ]
    if results["failures"]:
        cases: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for f in results["failures"]:
            cases.setdefault((f["implementation"], f["error"].replace("|", "/")), []).append((f["op"], f["shape"]))
        lines = [
            [*(case[0] if len(case) == 1 else (f"{len(case)} cases", f"first: {case[0][0]}, {case[0][1]}")), *why]
            for why, case in cases.items()
        ]
        parts.append(markdown_table(["op", "shape", "not measured", "why"], lines, text_columns=4))
    return "\n\n".join(parts)


def _gpu_table(rows: list[dict[str, Any]]) -> str:
    """A line for each of ours; in cases without any, for each that was measured."""
    lines = []
    for (op, shape), case in by_case(rows).items():
        copy, gather = case.pop(COPY, None), case.pop(GATHER, None)
        ceiling = gather or copy
        fused = {name: row for name, row in case.items() if name.startswith("tritonemb")}
        peers = {name: row for name, row in case.items() if name not in fused} if fused else {}
        fastest = min((row["p50_ms"] for row in peers.values()), default=None)
        remainder = ", ".join(f"{name} {row['p50_ms']:.3f}" for name, row in peers.items()) or "-"
        for name, row in (fused or case).items():
            share = f"{100 * row['gb_per_s'] / ceiling['gb_per_s']:.0f} %" if ceiling else "-"
            times = f"{fastest / row['p50_ms']:.2f}" if fastest else "-"
            lines.append([op, shape, remainder, name, f"{row['p50_ms']:.3f}", share, times])
    header = ["op", "shape", "peers, ms", "measured", "ms", "of the ceiling's rate", "times as fast as the best peer"]
    return markdown_table(header, lines, text_columns=4)


def _targets_table(targets: list[Row]) -> str:
    words = {True: "met", False: "not met", None: "not measured"}
    columns = {
        "op": "{op}", "shape": "{shape}", "times as fast": "{measured}", "wanted": "{target}",
        "measured": lambda row: "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
        "": lambda row: words[row["met"]],
    }  # fmt: skip
    return table_of(targets, columns, text_columns=4)


def with_section(text: str, name: str, title: str, content: str, after: str) -> str:
    """`text` with a section of its own: where its markers stand, else behind the end of section `after`."""
    if f"<!-- {name}:begin -->" not in text:
        end = f"<!-- {after}:end -->"
        text = text.replace(end, f"{end}\n\n## {title}\n\n<!-- {name}:begin -->\n<!-- {name}:end -->", 1)
    return replace_section(text, name, content, BENCHMARKS)


def report_speed() -> None:
    path = result_files.newest("cpu")
    results = result_files.read(path)
    draw_if_possible(draw, results, path.with_suffix(".png"), DRAWS)
    update(BENCHMARKS, "bench", speed_section(results))
    update("README.md", "speed", shown_section(results, path.with_suffix(".png").relative_to(ROOT).as_posix()))
    update("README.md", "headline", headline(results))


SECTIONS: dict[str, tuple[str, str, Callable[[dict[str, Any]], str]]] = {
    "accuracy": (BENCHMARKS, "accuracy", accuracy_section),
    "accuracy-dynamic": ("docs/dynamic-tables.md", "quality", dynamic_section),
    "exchange-accuracy": ("docs/parallel.md", "exchange", exchange_section),
    "memory": ("docs/kernels.md", "memory", memory_section),
    "fully-shard": ("docs/offload.md", "fully-shard", fully_shard_section),
    "quantized-accuracy": ("docs/quantize.md", "quantized-accuracy", quantized_section),
    "int8-training": ("docs/tiers.md", "int8-training", quantized_section),
}  # by kind of results: page, its section, and what writes that


def report(kind: str) -> None:
    """Rewrite the section of the newest results of a kind."""
    page, name, section = SECTIONS[kind]
    update(page, name, section(result_files.read(result_files.newest(kind))))


def publish(kind: str, rows: Sequence[Row], problems: Sequence[str]) -> Path:
    """Keep what a study has found, beside where, and show it; exit where something is wrong."""
    shared = result_files.environment() | {"threads": torch.get_num_threads()}
    path = result_files.write(kind, {"date": shared["date"], "rows": [row | shared for row in rows]})
    print(f"wrote {path.name}")
    if kind in SECTIONS:
        report(kind)
    if problems:
        sys.exit("; ".join(problems))
    return path


def report_gpu() -> None:
    """A section for every GPU that was measured; without one the page says nothing about GPUs."""
    page = ROOT / BENCHMARKS
    for path in result_files.newest_of_gpus():
        results = result_files.read(path)
        draw_if_possible(draw_roofline, results, path.with_suffix(".png"), DRAWS)
        name, title = f"gpu {results['rows'][0]['device']}", f"Speed on one {results['rows'][0]['device']}"
        content = f"`make gpu-bench` measures this and rewrites the section; the picture is beside `{path.name}`.\n\n"
        page.write_text(with_section(page.read_text(), name, title, content + gpu_section(results), "bench"))


def main() -> None:
    report_speed()
    report_gpu()
    for kind in SECTIONS:
        if list(result_files.RESULTS.glob(f"{kind}-????-??-??.json")):
            report(kind)


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


def draw_if_possible(draw: Callable[[Any, Path], None], results: Any, path: Path, command: str) -> None:
    """Draw, or say why there is no picture, and which command draws it."""
    try:
        import matplotlib
    except ImportError:
        print(f"no picture: matplotlib is not installed; `{command}` draws it where it is")
        return
    matplotlib.use("Agg")
    draw(results, path)


def save(figure: Any, path: Path, dpi: int = 120) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=dpi, metadata={"Software": None})
    pyplot.close(figure)


def draw(results: dict[str, Any], path: Path) -> None:
    """README's: a panel per op, a group of bars per shape, a bar per implementation."""
    from matplotlib import patches, pyplot

    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(15, 4.2), layout="constrained")
    for axes, (op, title) in zip(panels, PANELS.items(), strict=True):
        _draw_panel(axes, [row for row in results["rows"] if row["op"] == op and row["implementation"] in COLORS])
        axes.set_title(title, fontsize=11)
    panels[0].set_ylabel("milliseconds, median; lower is better")
    handles = [patches.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in COLORS]
    figure.legend(handles, [LABELS[name] for name in COLORS], loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


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
    "tritonemb": "#1f77b4", "tritonemb, grouped ahead": "#17becf", "fbgemm": "#8c8c8c", "torch": "#d8b878",
    "torch, compiled": "#c08040",
}  # fmt: skip
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
            local = [row for row in rows if row["implementation"] == name and row["op"].startswith(op)]
            if local:
                sizes, rates = [row["bytes"] / 1e6 for row in local], [row["gb_per_s"] for row in local]
                axes.scatter(sizes, rates, color=color, marker=marker, label=f"{op}, {name}", s=28)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("megabytes that the op must move")
    axes.set_ylabel("GB/s, median; higher is better")
    axes.set_title(rows[0]["device"] if rows else "")
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    save(figure, path)


if __name__ == "__main__":
    main()
