"""Fill tables of README and docs from the newest results: `python -m benchmarks.measuring.report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import chart, result_files
from benchmarks.measuring.cases import COPY, GATHER, GRAPH, OURS
from benchmarks.measuring.result_files import LIMIT

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = "docs/benchmarks.md"
SHOWN_OPS = "step, row-wise Adagrad", "step, Adagrad", "step of a plain DLRM, Adagrad"  # in README: at most 12 rows
DRAWS = "python -m benchmarks.measuring.report"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A table whose first columns are text and whose others are figures."""
    rule = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


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


def speed_section(results: dict[str, Any]) -> str:
    """The conditions, and the medians of every op and shape."""
    return "\n\n".join([_conditions(results), _peers_table(results["rows"]), _scaling_table(results["rows"])])


def shown_section(results: dict[str, Any], picture: str) -> str:
    """README's picture and table: whole training steps beside the fastest peer."""
    lines = []
    for (op, shape), case in _cases(results["rows"]).items():
        if op in SHOWN_OPS:
            ours = case.pop(OURS)
            peer = min((row for name, row in case.items() if name != COPY), key=lambda row: float(row["p50_ms"]))
            ratio = f"{peer['p50_ms'] / ours['p50_ms']:.1f}"
            figures = f"{peer['implementation']} {peer['p50_ms']:.1f}", f"{ours['p50_ms']:.1f}", ratio
            lines.append([op.removeprefix("step, "), shape, *figures])
    header = ["training step", "shape", "fastest peer, ms", "tritonemb, ms", "times as fast"]
    table = markdown_table(header, lines, text_columns=3)
    return "\n\n".join([f"![Time of one call, ours and its peers]({picture})", table, _conditions(results)])


def _cases(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """The rows of each op and shape, by implementation."""
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["op"], row["shape"]), {})[row["implementation"]] = row
    return cases


def _peers_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for (op, shape), case in _cases(rows).items():
        if OURS not in case:
            continue
        ours, copy = case.pop(OURS), case.pop(COPY, None)
        others = [row for name, row in case.items() if name != LIMIT] or [*case.values()]
        fastest = min((row["p50_ms"] for row in others), default=None)
        peers = ", ".join(f"{name} {row['p50_ms']:.2f}" for name, row in case.items()) or "-"
        share = ours["gb_per_s"] / (copy["gb_per_s"] if copy else ours["copy_gb_per_s"])
        ratio = f"{fastest / ours['p50_ms']:.2f}" if fastest else "-"
        figures = f"{ours['p50_ms']:.2f}", f"{ours['gb_per_s']:.1f}", f"{100 * share:.0f} %", ratio
        lines.append([op, shape, peers, *figures])
    header = [
        "op",
        "shape",
        "peers, ms",
        "tritonemb, ms",
        "GB/s",
        "of a copy's rate",
        "times as fast as the fastest peer",
    ]
    return markdown_table(header, lines, text_columns=3)


def headline(results: dict[str, Any]) -> str:
    """In one sentence: how a training step of the embeddings compares with what users have today."""
    parts = []
    for op, peer, name in (("step, row-wise Adagrad", "fbgemm", "FBGEMM's"), ("step, Adagrad", "torch", "torch.nn's")):
        cases = [case for (found, _), case in _cases(results["rows"]).items() if found == op and peer in case]
        ratios = [case[peer]["p50_ms"] / case["tritonemb"]["p50_ms"] for case in cases if "tritonemb" in case]
        if ratios:
            parts.append(
                f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as {name} ({op.removeprefix('step, ')})"
            )
    ids = "with ids that recur as in Meta's published traces"
    return f"On a CPU, {ids}, a training step of embedding tables is {', and '.join(parts)}." if parts else ""


def _scaling_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for (op, shape), case in _cases(rows).items():
        if OURS not in case:
            lines += [[op, shape, name, f"{row['p50_ms']:.2f}"] for name, row in case.items()]
    return markdown_table(["op", "shape", "case", "tritonemb, ms"], lines, text_columns=3)


def _conditions(results: dict[str, Any]) -> str:
    row = results["rows"][0]
    copies = sorted(row["copy_gb_per_s"] for row in results["rows"])
    versions = ", ".join(f"{name} {row[name]}" for name in ("torch", "numba", "fbgemm", "tritonemb"))
    copy = f"a plain copy moves {copies[len(copies) // 2]:.0f} GB/s (read + write)"
    return (
        f"{row['cpu']}; {row['threads']} threads; {copy}; "
        f"{versions} at {row['commit']}, {row['date']}. B samples, T tables, L ids per bag, D columns."
    )


def accuracy_section(results: dict[str, Any]) -> str:
    """A line for every data set and optimizer: mean AUC of both networks over the seeds and the difference."""
    lines = [
        [
            f"{row['data']}, {row['optimizer']}",
            f"{row['tritonemb_auc']:.4f}",
            f"{row['torch_auc']:.4f}",
            f"{row['difference']:+.4f}",
            str(row["seeds"]),
            f"{100 * row['test_rows_seen_in_training']:.0f} %",
        ]
        for row in results["rows"]
    ]
    header = ["data, optimizer", "tritonemb AUC", "torch.nn AUC", "difference", "seeds", "test rows seen in training"]
    return markdown_table(header, lines)


def dynamic_section(results: dict[str, Any]) -> str:
    """The conditions; for every data set and kind of table: mean AUC, and the paired difference to a vocabulary's."""
    row = results["rows"][0]
    lines = [
        [
            f"{row['data']}: {row['arm']}",
            f"{row['auc']:.4f}",
            "-" if row["arm"] == "vocabulary" else f"{row['difference']:+.4f} ± {row['standard_error']:.4f}",
            str(row["seeds"]),
        ]
        for row in results["rows"]
    ]
    conditions = (
        f"{row['cpu']}; torch {row['torch']}, numba {row['numba']}, tritonemb {row['tritonemb']} at {row['commit']}, "
        f"{row['date']}.\n±: standard error of the paired difference over the seeds."
    )
    return f"{conditions}\n\n{markdown_table(['data: tables', 'AUC', 'difference', 'seeds'], lines)}"


def exchange_section(results: dict[str, Any]) -> str:
    """The conditions; for every data set and precision: mean AUC, difference to float32, bytes that a rank sends."""
    rows = results["rows"]
    exact = {row["data"]: sum(row["bytes_a_step"].values()) for row in rows if row["exchange"] == "fp32"}
    lines = [
        [
            f"{row['data']}, {row['exchange']}",
            f"{row['auc']:.4f}",
            "-" if row["exchange"] == "fp32" else f"{row['difference']:+.4f}",
            f"{max(map(abs, row['difference_of_each_seed'])):.4f}",
            f"{sum(row['bytes_a_step'].values()) / 1000:,.0f}",
            f"{sum(row['bytes_a_step'].values()) / exact[row['data']]:.2f}",
        ]
        for row in rows
    ]
    header = ["data, codec", "AUC", "difference", "largest of a seed", "kB a step and rank", "of fp32's"]
    row = rows[0]
    conditions = (
        f"{row['world_size']} ranks on one CPU, over gloo; {row['seeds']} seeds; torch {row['torch']}, tritonemb "
        f"{row['tritonemb']} at {row['commit']}, {row['date']}."
    )
    return f"{conditions}\n\n{markdown_table(header, lines)}"


def memory_section(results: dict[str, Any]) -> str:
    """The conditions; for every shape the result's size, and what a step of each implementation adds at its peak."""
    row = results["rows"][0]
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for each in results["rows"]:
        cases.setdefault(each["shape"], {})[each["implementation"]] = each
    names = list(next(iter(cases.values())))
    lines = [
        [shape, _mib(case[names[0]]["result_bytes"]), *(_mib(case[name]["peak_bytes"]) for name in names)]
        for shape, case in cases.items()
    ]
    conditions = (
        f"MiB; {row['cpu']}, 2 threads; torch {row['torch']}, fbgemm {row['fbgemm']}, tritonemb {row['tritonemb']} at "
        f"{row['commit']}, {row['date']}."
    )
    return f"{conditions}\n\n{markdown_table(['shape', 'result', *names], lines)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"


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
            [*(found[0] if len(found) == 1 else (f"{len(found)} cases", f"first: {found[0][0]}, {found[0][1]}")), *why]
            for why, found in cases.items()
        ]
        parts.append(markdown_table(["op", "shape", "not measured", "why"], lines, text_columns=4))
    return "\n\n".join(parts)


def _gpu_table(rows: list[dict[str, Any]]) -> str:
    """A line for each of ours; in cases without any, for each that was measured."""
    lines = []
    for (op, shape), case in _cases(rows).items():
        copy, gather = case.pop(COPY, None), case.pop(GATHER, None)
        ceiling = gather or copy
        ours = {name: row for name, row in case.items() if name.startswith("tritonemb")}
        peers = {name: row for name, row in case.items() if name not in ours} if ours else {}
        fastest = min((row["p50_ms"] for row in peers.values()), default=None)
        others = ", ".join(f"{name} {row['p50_ms']:.3f}" for name, row in peers.items()) or "-"
        for name, row in (ours or case).items():
            share = f"{100 * row['gb_per_s'] / ceiling['gb_per_s']:.0f} %" if ceiling else "-"
            times = f"{fastest / row['p50_ms']:.2f}" if fastest else "-"
            lines.append([op, shape, others, name, f"{row['p50_ms']:.3f}", share, times])
    header = ["op", "shape", "peers, ms", "measured", "ms", "of the ceiling's rate", "times as fast as the best peer"]
    return markdown_table(header, lines, text_columns=4)


def _targets_table(targets: list[dict[str, Any]]) -> str:
    words = {True: "met", False: "not met", None: "not measured"}
    lines = [
        [
            t["op"],
            t["shape"],
            t["measured"],
            t["target"],
            "-" if t["ratio"] is None else f"{t['ratio']:.2f}",
            words[t["met"]],
        ]
        for t in targets
    ]
    return markdown_table(["op", "shape", "times as fast", "wanted", "measured", ""], lines, text_columns=4)


def with_section(text: str, name: str, title: str, content: str, after: str) -> str:
    """`text` with a section of its own: where its markers stand, else behind the end of section `after`."""
    if f"<!-- {name}:begin -->" not in text:
        end = f"<!-- {after}:end -->"
        text = text.replace(end, f"{end}\n\n## {title}\n\n<!-- {name}:begin -->\n<!-- {name}:end -->", 1)
    return replace_section(text, name, content, BENCHMARKS)


def report_speed() -> None:
    path = result_files.newest("cpu")
    results = result_files.read(path)
    chart.draw_if_possible(chart.draw, results, path.with_suffix(".png"), DRAWS)
    update(BENCHMARKS, "bench", speed_section(results))
    update("README.md", "speed", shown_section(results, path.with_suffix(".png").relative_to(ROOT).as_posix()))
    update("README.md", "headline", headline(results))


SECTIONS: dict[str, tuple[str, str, Callable[[dict[str, Any]], str]]] = {
    "accuracy": (BENCHMARKS, "accuracy", accuracy_section),
    "accuracy-dynamic": ("docs/dynamic-tables.md", "quality", dynamic_section),
    "exchange-accuracy": ("docs/parallel.md", "exchange", exchange_section),
    "memory": ("docs/kernels.md", "memory", memory_section),
}  # by kind of results: page, its section, and what writes that


def report(kind: str) -> None:
    """Rewrite the section of the newest results of a kind."""
    page, name, section = SECTIONS[kind]
    update(page, name, section(result_files.read(result_files.newest(kind))))


def report_gpu() -> None:
    """A section for every GPU that was measured; without one the page says nothing about GPUs."""
    page = ROOT / BENCHMARKS
    for path in result_files.newest_of_gpus():
        results = result_files.read(path)
        chart.draw_if_possible(chart.draw_roofline, results, path.with_suffix(".png"), DRAWS)
        name, title = f"gpu {results['rows'][0]['device']}", f"Speed on one {results['rows'][0]['device']}"
        content = f"`make gpu-bench` measures this and rewrites the section; the picture is beside `{path.name}`.\n\n"
        page.write_text(with_section(page.read_text(), name, title, content + gpu_section(results), "bench"))


def main() -> None:
    report_speed()
    report_gpu()
    for kind in SECTIONS:
        if list(result_files.RESULTS.glob(f"{kind}-????-??-??.json")):
            report(kind)


if __name__ == "__main__":
    main()
