"""Rows and targets of a run, and the files in `benchmarks/results/` that store them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.cases import CEILINGS, COPY, OURS, copy_contender
from benchmarks.measuring.clock import Clock, Timing

RESULTS = Path(__file__).resolve().parents[1] / "results"


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


LIMIT = "limit"  # no peer: the program that says what the machine can do


def copy_bandwidth(clock: Clock, num_bytes: int = 1 << 29, rounds: int = 7) -> float:
    """GB/s of a plain copy (bytes read + bytes written) between two arrays far larger than the caches."""
    (timing,) = clock.measure([copy_contender(num_bytes, clock.device)], rounds, 0).timings
    return num_bytes / timing.percentile(50) / 1e6


def timing_rows(
    op: str, shape: object, timings: Sequence[Timing], num_bytes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """A row per implementation; `num_bytes` says what each has to move."""
    return [
        {
            "op": op,
            "shape": str(shape),
            "implementation": timing.name,
            "p20_ms": timing.percentile(20),
            "p50_ms": timing.percentile(50),
            "p80_ms": timing.percentile(80),
            "rounds": len(timing.samples),
            "other_load_percent": timing.other_load_percent,
            "bytes": num_bytes[timing.name],
            "gb_per_s": num_bytes[timing.name] / timing.percentile(50) / 1e6,
        }
        for timing in timings
    ]


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each row: time, rate, share of the copy's rate, times as fast as the fastest peer in the same case."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["op"], row["shape"]), []).append(row)
    for case in cases.values():
        peers = [row for row in case if row["implementation"] not in (*CEILINGS, LIMIT) and not is_ours(row)]
        fastest = min(peers, key=lambda row: float(row["p50_ms"]), default=None)
        copy = next((row["gb_per_s"] for row in case if row["implementation"] == COPY), None)
        for row in case:
            rate = copy or row.get("copy_gb_per_s")
            share = f"{100 * row['gb_per_s'] / rate:4.0f} % of a copy" if rate and row["bytes"] else ""
            ratio = f"{fastest['p50_ms'] / row['p50_ms']:.2f} x {fastest['implementation']}" if fastest else ""
            yield (
                f"{row['op']:38} {row['implementation']:24} p20 {row['p20_ms']:8.3f}  p50 {row['p50_ms']:8.3f}  "
                f"p80 {row['p80_ms']:8.3f} ms {row['gb_per_s']:7.1f} GB/s {share:16} "
                f"{ratio if is_ours(row) else '':20} {row['shape']}"
            )


def target_lines(targets: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each target: whether it is met, if that is known."""
    for target in targets:
        verdict = {True: "met    ", False: "NOT MET", None: "unknown"}[target["met"]]
        ratio = "not measured" if target["ratio"] is None else f"{target['ratio']:.2f}"
        yield f"{verdict} {target['op']}, {target['shape']}: {target['measured']} = {ratio} ({target['target']})"


def is_ours(row: Mapping[str, Any]) -> bool:
    return str(row["implementation"]).startswith(OURS)


def at_least(op: str, shape: object, ours: Timing, peers: Sequence[Timing], factor: float) -> dict[str, Any]:
    """The target that ours be `factor` times as fast as the fastest of the peers, by the medians."""
    peer = min(peers, key=lambda timing: timing.percentile(50))
    target = at_most(op, shape, peer, ours, factor)
    return target | {"target": f"at least {factor:g}", "met": target["ratio"] >= factor}


def at_most(op: str, shape: object, slow: Timing, fast: Timing, factor: float) -> dict[str, Any]:
    """The target that `slow` take at most `factor` times as long as `fast`, by the medians."""
    ratio = slow.percentile(50) / fast.percentile(50)
    return {
        "op": op,
        "shape": str(shape),
        "measured": f"{slow.name} / {fast.name}",
        "ratio": ratio,
        "target": f"at most {factor:g}",
        "met": ratio <= factor,
    }
