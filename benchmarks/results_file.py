"""The files in `benchmarks/results/`: written by a run, read by the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def write(kind: str, results: dict[str, Any], folder: Path | None = None) -> Path:
    """Store `results` as `<kind>-<date>.json`; a second run on one day replaces the first."""
    path = (folder or RESULTS) / f"{kind}-{results['date']}.json"
    write_json(path, results)
    return path


def write_json(path: Path, results: Any) -> None:
    """The file is whole at any time: who is killed leaves the results before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(path)


def newest(kind: str) -> Path:
    """The latest `<kind>-<date>.json`; dates sort as text."""
    paths = sorted(RESULTS.glob(f"{kind}-????-??-??.json"))
    if not paths:
        raise FileNotFoundError(f"benchmarks/results holds no {kind}-<date>.json; run the benchmark that writes it")
    return paths[-1]


def newest_of_gpus() -> list[Path]:
    """The latest `<device>-<date>.json` of every GPU, by device; none where none was measured."""
    latest: dict[str, Path] = {}
    for path in sorted(RESULTS.glob("*-????-??-??.json")):
        if read(path).get("kind") == "gpu":
            latest[path.stem[: -len("-yyyy-mm-dd")]] = path
    return list(latest.values())


def read(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text())
    return results
