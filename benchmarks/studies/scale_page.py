"""The page about scale, from the newest results: `python -m benchmarks.studies.scale_page`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import result_files
from benchmarks.measuring.report import ROOT, draw_if_possible, markdown_table, replace_section, save, table_of

PAGE = "docs/scale.md"
MODES = {"step_s": "by hosts", "device_ids_s": "by devices"}  # who exchanges IDs
COLORS = {"step_s": "#1f77b4", "device_ids_s": "#b0b0b0"}
WIDTH = 116
RECALLED = {"A1": 1.047e6, "A2": 0.622e6, "A3": 0.360e6, "F1": 0.970e6}  # samples/s that the paper is said to have
Rows = list[dict[str, Any]]


def of(rows: Rows, study: str, **values: Any) -> Rows:
    """The rows of a study that have these values."""
    return [
        row for row in rows if row["study"] == study and all(row.get(name) == each for name, each in values.items())
    ]


def wrapped(text: str) -> str:
    """An indented block of what a program says."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append("   ")
        for word in line.split(" "):
            if len(lines[-1]) + 1 + len(word) > WIDTH:
                lines.append("   ")
            lines[-1] += f" {word}"
    return "\n".join(lines)


def times(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def plans(rows: Rows) -> str:
    lines = []
    for row in of(rows, "plan", gpus=128):
        if "error" in row:
            lines.append([row["model"], f"refused: {row['error']}", "", "", "", "", ""])
            continue
        both = [
            f"{row[mode] * 1e3:.1f} ({row[mode + '_low'] * 1e3:.1f} to {row[mode + '_high'] * 1e3:.1f})"
            for mode in MODES
        ]
        rates = [f"{128 * 512 / row[mode] / 1e6:.2f}" for mode in MODES]
        packed = f"{row['greedy_s'] / row['load_s']:.2f}", f"{100 * (row['load_s'] / row['bound_s'] - 1):.1f} %"
        lines.append([row["model"], row["summary"], *both, " / ".join(rates), *packed])
    header = ["model", "plan", "ms a step, IDs by hosts", "by devices", "10⁶ samples/s", "greedy / ours", "above bound"]
    states = ", ".join(f"{row['bytes'] / 1e12:.3g} TB with {row['states']}" for row in of(rows, "states"))
    row = rows[0]
    made = f"torch {row['torch']}, tritonemb {row['tritonemb']} at {row['commit']}, {row['date']}."
    table = markdown_table(header, lines, 2)
    return f"128 GPUs; in brackets what rates of ± 20 % do; {made}\n\n{table}\n\nF1 has {states}."


def techniques(rows: Rows) -> str:
    models = [row["model"] for row in of(rows, "technique", without="none")]
    names = list(dict.fromkeys(row["without"] for row in of(rows, "technique") if row["without"] != "none"))
    lines = []
    for name in names:
        cells = []
        for model in models:
            base, found = (
                of(rows, "technique", model=model, without="none")[0],
                of(rows, "technique", model=model, without=name),
            )
            if not found:
                cells.append("not used")
            elif "error" in found[0]:
                cells.append("does not fit")
            else:
                cells.append(" / ".join(times(found[0][mode] / base[mode]) for mode in MODES))
                cells[-1] += "; too large" if (found[0].get("of_budget") or 0) > 1 else ""
        lines.append([name, *cells])
    return markdown_table(["without", *models], lines)


def stages(rows: Rows) -> str:
    found = [row for row in of(rows, "plan", gpus=128) if "stages_s" in row]
    lines = [[row["model"], *(f"{value * 1e3:.2f}" for value in row["stages_s"].values())] for row in found]
    rates = []
    for row in found:
        for mode, words in MODES.items():
            change = sorted(((ends[mode][0], rate) for rate, ends in row["change"].items()), reverse=True)[:2]
            parts = ", ".join(f"{rate} {100 * value:+.0f} %" for value, rate in change if value > 0.005)
            rates.append([row["model"], words, parts or "none"])
    slower = markdown_table(["model", "IDs", "a rate 20 % lower: longer by"], rates, 3)
    return f"{markdown_table(['model', *found[0]['stages_s']], lines)}\n\n{slower}"


def samples(row: dict[str, Any], mode: str) -> float:
    """Millions a second."""
    return row["gpus"] * 512 / row[mode] / 1e6


def gpus(rows: Rows) -> str:
    lines = []
    for row in sorted(of(rows, "plan"), key=lambda row: (row["model"], row["gpus"])):
        cells = ["does not fit", "", "", ""]
        if "error" not in row:
            cells = [f"{row[mode] * 1e3:.1f}" for mode in MODES] + [f"{samples(row, mode):.2f}" for mode in MODES]
        lines.append([row["model"], str(row["gpus"]), *cells])
    header = ["model", "GPUs", "ms, by hosts", "by devices", "10⁶ samples/s, by hosts", "by devices"]
    return markdown_table(header, lines)


def both(row: dict[str, Any], value: Callable[[str], float]) -> str:
    return " / ".join(times(value(mode)) for mode in MODES)


def baseline(rows: Rows) -> str:
    columns = {
        "model": "{model}", "samples/s of a trainer": "{trainer_samples_per_s:,.0f}",
        "it waits for": "{trainer_waits_for}",
        "128 GPUs / 50 trainers": lambda row: both(row, lambda mode: row[f"{mode}_times"]),
    }  # fmt: skip
    return table_of([row for row in of(rows, "plan", gpus=128) if "trainer_samples_per_s" in row], columns)


def refused(rows: Rows) -> str:
    (row,) = of(rows, "refused")
    return f"With {row['host'] / 1e12:g} TB of host memory a node:\n\n{wrapped(row['error'])}"


def servers(rows: Rows) -> str:
    found = [row for row in of(rows, "servers") if "error" not in row]
    (fails,) = [row for row in of(rows, "servers") if "error" in row]
    columns = {
        "10¹² parameters": "{trillions:g}",
        "10⁹ rows a server": lambda row: f"{row['rows_a_server'] / 1e9:.1f}",
        "TB a server": lambda row: f"{row['bytes_a_server'] / 1e12:.2f}",
        "rows a GPU and step": "{rows_a_rank:,.0f}",
        "ms a step": lambda row: f"{row['step_s'] * 1e3:.1f}",
        "without pipeline": lambda row: f"{row['waited_s'] * 1e3:.1f}",
        "a process a server: with / without": lambda row: (
            f"{row['slow_s'] * 1e3:.1f} / {row['slow_waited_s'] * 1e3:.1f}"
        ),
        "10⁶ samples/s": lambda row: f"{row['samples_per_s'] / 1e6:.2f}",
        "10⁶ rows/s a server": lambda row: f"{row['rows_a_server_per_s'] / 1e6:.2f}",
        "processes for that": "{processes_a_server:.1f}",
        "GB/s a GPU": lambda row: f"{row['bytes_a_worker_per_s'] / 1e9:.2f}",
    }
    first, last, rate = found[0], found[-1], found[-1]["measured_rows_per_s"]
    more = [100 * (last[name] / first[name] - 1) for name in ("rows_a_rank", "step_s")]
    return (
        f"{table_of(found, columns)}\n\nA process was measured at {rate / 1e6:.2f} million rows/s with two "
        f"threads (`benchmarks/results`, pull of 50,000 rows of 64\ncolumns). From the first line to the last, a GPU "
        f"pulls {more[0]:.1f} % more rows, and a step takes {max(0.0, more[1]):.1f} % longer.\n\n"
        f"In 16 bits, {last['row_bytes']:.0f} bytes per row with states and index:\n\n{wrapped(last['plan'])}\n\n"
        f"In float32:\n\n{wrapped(fails['error'])}"
    )


def offload(rows: Rows) -> str:
    columns = {
        "parameters, machine": "{case}",
        "TB": lambda row: f"{row['bytes'] / 1e12:,.1f}",
        "GPUs to hold it": "{gpus_without:,}",
        "parameters": "{params}",
        "states": "{states}",
        "gradients": "{grads}",
        "activations": "{activations}",
        "GB a GPU": lambda row: f"{row['device'] / 1e9:.1f}",
        "TB of memory a node": lambda row: f"{row['host_a_node'] / 1e12:.2f}",
        "TB of NVMe a node": lambda row: f"{row['disk_a_node'] / 1e12:.2f}",
        "fits": lambda row: "yes" if row["fits"] else "no",
        "tiles of the largest layer": "{tiles}",
        "s of compute a step": "{compute_s:,.0f}",
        "s a step": "{step_s:,.0f}",
    }
    return table_of(of(rows, "offload"), columns)


def paper(rows: Rows) -> str:
    columns = {
        "model": "{model}",
        "10⁶ samples/s, recalled": lambda row: f"{RECALLED[row['model']] / 1e6:.2f}",
        "ours / that, IDs by hosts / by devices": lambda row: both(
            row, lambda mode: samples(row, mode) * 1e6 / RECALLED[row["model"]]
        ),
    }
    return table_of([row for row in of(rows, "plan", gpus=128) if "error" not in row], columns)


SECTIONS = {
    "plans": plans, "techniques": techniques, "stages": stages, "gpus": gpus, "baseline": baseline, "refused": refused,
    "paper": paper, "servers": servers, "offload": offload,
}  # fmt: skip


def filled(page: str, rows: Rows) -> str:
    """The page with the figures of these rows."""
    for name, section in SECTIONS.items():
        page = replace_section(page, name, section(rows), PAGE)
    return page


def draw(rows: Rows, folder: Path) -> None:
    """The pictures of the page."""
    from matplotlib import pyplot

    def keep(figure: Any, name: str) -> None:
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        save(figure, folder / name, dpi=110)

    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.4), layout="constrained", width_ratios=(1, 1, 1))
    _draw_steps(panels[0], of(rows, "plan", gpus=128))
    for axes, model in zip(panels[1:], ("A1", "A2"), strict=True):
        _draw_scaling(axes, model, sorted(of(rows, "plan", model=model), key=lambda row: row["gpus"]))
    keep(figure, "scale-gpus.png")
    figure, panels = pyplot.subplots(2, 1, figsize=(12, 4.6), layout="constrained", sharex=True)
    for axes, row in zip(panels, of(rows, "timeline"), strict=True):
        _draw_timeline(axes, row)
    panels[1].set_xlabel("milliseconds")
    keep(figure, "scale-pipeline.png")
    figure, (memory, speed) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    found = [row for row in of(rows, "servers") if "error" not in row]
    sizes, top = [row["trillions"] for row in found], 1.2 * 64 * 1024 / found[0]["step_s"] / 1e6
    memory.plot(sizes, [row["bytes_a_server"] / 1e12 for row in found], marker="o")
    memory.axhline(12, color="#b0b0b0", linestyle="--")
    memory.set(xlabel="10¹² parameters", ylabel="TB a server, of 12", ylim=(0, 13))
    for name, words in (("step_s", "with the pipeline"), ("waited_s", "without")):
        speed.plot(sizes, [64 * 1024 / row[name] / 1e6 for row in found], marker="o", label=words)
    speed.set(xlabel="10¹² parameters", ylabel="10⁶ samples/s", ylim=(0, top))
    speed.legend(frameon=False, loc="lower left")
    keep(figure, "scale-servers.png")


def _draw_steps(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    rows = [row for row in rows if "error" not in row]
    for at, (mode, words) in enumerate(MODES.items()):
        values = [row[mode] * 1e3 for row in rows]
        errors = [[abs(row[f"{mode}_{side}"] - row[mode]) * 1e3 for row in rows] for side in ("low", "high")]
        places = [x + 0.4 * at for x in range(len(rows))]
        axes.bar(places, values, 0.38, yerr=errors, capsize=3, color=COLORS[mode], label=words)
    axes.set_xticks([x + 0.2 for x in range(len(rows))], [row["model"] for row in rows])
    axes.set(ylabel="milliseconds a step", title="128 GPUs; rates ± 20 %")
    axes.legend(frameon=False, title="IDs exchanged")


def _draw_scaling(axes: Any, model: str, rows: Sequence[dict[str, Any]]) -> None:
    rows = [row for row in rows if "error" not in row]
    numbers = [row["gpus"] for row in rows]
    for mode, words in MODES.items():
        axes.plot(numbers, [samples(row, mode) for row in rows], marker="o", color=COLORS[mode], label=words)
    first = rows[0]["device_ids_s"]
    axes.plot(numbers, [512 * n / first / 1e6 for n in numbers], ":", color="black", label="linear")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.set(title=f"{model}, 512 samples a GPU", xlabel="GPUs", ylabel="10⁶ samples/s")
    axes.legend(frameon=False)


def _draw_timeline(axes: Any, row: dict[str, Any]) -> None:
    places = {"ids": 0, "misses": 1, "grouping": 2, "lookup": 2, "layers": 2, "update": 2}
    colors = "#1f77b4", "#ff7f0e", "#2ca02c"
    look = {"height": 0.8, "alpha": 0.75, "edgecolor": "white"}
    for batch, stage, start, end in row["spans"]:
        axes.barh(places.get(stage, 3), (end - start) * 1e3, left=start * 1e3, color=colors[batch], **look)
    axes.set_yticks(range(4), ["control network", "device-host link", "device", "GPU network"])
    axes.set_title(f"{row['model']}, three steps, {'with' if row['pipeline'] else 'without'} the pipeline", fontsize=10)


def report() -> None:
    """Rewrite the page's figures, and its pictures where matplotlib is installed."""
    rows = result_files.read(result_files.newest("scale"))["rows"]
    page = ROOT / PAGE
    page.write_text(filled(page.read_text(), rows))
    draw_if_possible(draw, rows, page.parent, "python -m benchmarks.studies.scale_page")


if __name__ == "__main__":
    report()
