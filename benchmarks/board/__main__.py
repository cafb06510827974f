"""Run cells of the board, or write its page: `python -m benchmarks.board CELL --data FOLDER`, `--page`, `--list`."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.board import MODULES, RESULTS, Cell
from benchmarks.measuring.report import markdown_table, update
from benchmarks.measuring.result_files import environment, write_json

PAGE = "docs/board.md"


def cells() -> dict[str, Cell]:
    """Return all cells by name, in the order of the page."""
    modules = (import_module(f"benchmarks.board.{name}") for name in MODULES)
    return {cell.name: cell for module in modules for cell in module.CELLS}


def run(cell: Cell, data: Path, scratch: Path, seed: int) -> dict[str, Any]:
    """Run a cell unless its file of results exists; write the file. The wall time adds up over resumed runs."""
    path, folder = RESULTS / f"{cell.name}-{seed}.json", scratch / f"{cell.name}-{seed}"
    if path.exists():
        result: dict[str, Any] = json.loads(path.read_text())
        return result
    folder.mkdir(parents=True, exist_ok=True)
    clock, start = folder / "seconds", time.monotonic()
    earlier = float(clock.read_text()) if clock.exists() else 0.0
    try:
        outcome = dict(cell.run(data, folder, seed))
    finally:
        clock.write_text(str(earlier + time.monotonic() - start))
    result = {"cell": cell.name, "seed": seed, "seconds": round(float(clock.read_text())), **environment()}
    result |= {"threads": torch.get_num_threads(), "published": dict(cell.published), **outcome}
    write_json(path, result)
    return result


def results_of(cell: Cell) -> list[dict[str, Any]]:
    """Return the results of a cell, in the order of its seeds."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{cell.name}-[0-9]*.json"))]


def format_mean(values: list[float], sign: str = "") -> str:
    """Format the mean and, of several values, its standard error."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.4f}{error}"


def is_as_good(differences: list[float]) -> bool:
    """Whether the mean difference of AUC is at least -0.001, or two standard errors below 0 if these are more."""
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return statistics.mean(differences) >= -max(0.001, 2 * error)


def ratio(results: list[dict[str, Any]], name: str) -> str:
    """Return the median over turns of the CPU seconds of a loop of a peer relative to ours, if it was timed."""
    times = [result["cpu_seconds"] for result in results if name in result["cpu_seconds"]]
    ratios = [peer / model for entry in times for peer, model in zip(entry[name], entry["tritonemb"], strict=True)]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def peer_table() -> str:
    """Return the table of models beside those of other libraries: a row per cell and library, means over its seeds.

    Samples per second are ours relative to the peer's, by the median of all turns."""
    rows = []
    for cell in (cell for cell in cells().values() if cell.peers):
        for library, notes in cell.peers.items():
            results = [result for result in results_of(cell) if library in result["peers"]]
            figures, reached, ratios = ["not run", "-", "-"], "-", ["-", "-"]
            if results:
                pairs = [(result["metrics"]["AUC"], result["peers"][library]["metrics"]["AUC"]) for result in results]
                figures = [f"{statistics.mean(values):.4f}" for values in zip(*pairs, strict=True)]
                differences = [auc - peer_auc for auc, peer_auc in pairs]
                figures.append(format_mean(differences, "+"))
                reached = "yes" if is_as_good(differences) else "no"
                ratios = [ratio(results, f"{library} {loop}") for loop in ("steps", "loop")]
            commits = ", ".join(sorted({result["commit"][:8] for result in results})) or "-"
            seeds = f"{len(results)} of {cell.seeds}"
            rows.append([cell.data, cell.model, library, *figures, reached, *ratios, seeds, commits, notes or "-"])
    names = "AUC of te.models", "AUC of the peer", "difference", "reached", "samples/s: plain steps", "its own loop"
    header = ["data", "model", "peer", *names, "seeds", "commit", "differs"]
    return markdown_table(header, rows, len(header))


def write_page() -> None:
    """Write both tables into the page."""
    update(PAGE, "board", table())
    update(PAGE, "peers", peer_table())


def table() -> str:
    """Return the table of the page: a row per cell, means over its seeds, and differences from published figures."""
    rows = []
    for cell in cells().values():
        if cell.peers:
            continue
        results = results_of(cell)
        names = list(cell.published) or sorted({name for result in results for name in result["metrics"]})
        figures, published, reached = [], [], []
        for name in names:
            values = [result["metrics"][name] for result in results]
            figures.append(f"{name} {format_mean(values)}" if values else "not run")
            published.append(f"{cell.published[name]:.4f}" if name in cell.published else "-")
            if values and name in cell.published:
                reached.append(f"{statistics.mean(values) / cell.published[name] - 1:+.1%}")
            paired = [
                (result, RESULTS / f"{cell.baseline}-{result['seed']}.json") for result in results if cell.baseline
            ]
            if gaps := [
                r["metrics"][name] - json.loads(p.read_text())["metrics"][name] for r, p in paired if p.exists()
            ]:
                reached.append(format_mean(gaps, "+"))
        seconds = statistics.mean(result["seconds"] for result in results) if results else 0
        commits = ", ".join(sorted({result["commit"][:8] for result in results})) or "-"
        targets = f"{' / '.join(published)} ({cell.source})" if cell.published else "-"
        rows.append([
            cell.data, cell.model, " / ".join(dict.fromkeys(figures)),
            f"as {cell.baseline}" if cell.baseline else targets,
            " / ".join(reached) or "-", f"{len(results)} of {cell.seeds}", f"{seconds / 60:.0f}" if results else "-",
            commits, cell.notes,
        ])  # fmt: skip
    header = ["data", "model", "here", "published", "difference", "seeds", "minutes", "commit", "notes"]
    return markdown_table(header, rows, len(header))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cell", nargs="?", help="name of a cell")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--scratch", type=Path, default=Path("runs/board"), help="folder of runs that can be resumed")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--page", action="store_true", help=f"only write {PAGE} from the results")
    options, known = parser.parse_args(), cells()
    if options.page:
        return write_page()
    if options.cell not in known or options.data is None:
        parser.error(f"expected a cell, {', '.join(known)}, and --data FOLDER; got {options.cell}")
    torch.set_num_threads(options.threads)
    cell = known[options.cell]
    for seed in range(cell.seeds) if options.seed is None else [options.seed]:
        result = run(cell, options.data, options.scratch, seed)
        print(cell.name, "seed", seed, json.dumps(result["metrics"]), "published", json.dumps(result["published"]))
    return write_page()


if __name__ == "__main__":
    main()
