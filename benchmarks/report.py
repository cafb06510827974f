"""Fill the README's tables from the newest files in `benchmarks/results/`: `python -m benchmarks.report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import chart, results_file

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A table whose first columns are text and whose others are figures."""
    rule = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


def replace_section(text: str, name: str, content: str) -> str:
    """`text` with what stands between `<!-- name:begin -->` and `<!-- name:end -->` replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"README.md needs one line {begin!r} and, after it, one line {end!r}; add both of them")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def speed_section(results: dict[str, Any], picture: Path) -> str:
    """The picture, the conditions, and the medians of every op and shape."""
    link = picture.relative_to(ROOT).as_posix()
    parts = [f"![Time of one call, ours and its peers]({link})", _conditions(results), _peers_table(results["rows"])]
    return "\n\n".join([*parts, _scaling_table(results["rows"])])


def _cases(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """The rows of each op and shape, by implementation."""
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["op"], row["shape"]), {})[row["implementation"]] = row
    return cases


def _peers_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for (op, shape), case in _cases(rows).items():
        if "tritonemb" not in case:
            continue
        ours = case.pop("tritonemb")
        fastest = min(case.values(), key=lambda row: float(row["p50_ms"]))
        peers = ", ".join(f"{name} {row['p50_ms']:.2f}" for name, row in case.items())
        ratio = fastest["p50_ms"] / ours["p50_ms"]
        lines.append([op, shape, peers, f"{ours['p50_ms']:.2f}", f"{ours['gb_per_s']:.1f}", f"{ratio:.2f}"])
    header = ["op", "shape", "peers, ms", "tritonemb, ms", "GB/s", "times as fast as the fastest peer"]
    return markdown_table(header, lines, text_columns=3)


def _scaling_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for (op, shape), case in _cases(rows).items():
        if "tritonemb" not in case:
            lines += [[op, shape, name, f"{row['p50_ms']:.2f}"] for name, row in case.items()]
    return markdown_table(["op", "shape", "case", "tritonemb, ms"], lines, text_columns=3)


def _conditions(results: dict[str, Any]) -> str:
    row = results["rows"][0]
    copies = sorted(row["copy_gb_per_s"] for row in results["rows"])
    versions = ", ".join(f"{name} {row[name]}" for name in ("torch", "numba", "fbgemm", "tritonemb"))
    copy = f"a plain copy moves {copies[len(copies) // 2]:.0f} GB/s (read + write)"
    return (
        f"{row['cpu']}; {row['threads']} threads; {copy}; "
        f"{versions} at {row['commit']}, {row['date']}. B samples, T tables, L ids a bag, D columns."
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


def update_readme(name: str, content: str) -> None:
    README.write_text(replace_section(README.read_text(), name, content))


def report_speed() -> None:
    path = results_file.newest("cpu")
    results = results_file.read(path)
    picture = path.with_suffix(".png")
    chart.draw(results, picture)
    update_readme("bench", speed_section(results, picture))


def report_accuracy() -> None:
    update_readme("accuracy", accuracy_section(results_file.read(results_file.newest("accuracy"))))


def main() -> None:
    report_speed()
    if list(results_file.RESULTS.glob("accuracy-*.json")):
        report_accuracy()


if __name__ == "__main__":
    main()
