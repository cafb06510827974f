"""Rows, targets and conditions of a run, and the files in `benchmarks/results/` that store them.

Nothing in them names a machine or a person: no host, no path, no user.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tritonemb as te
from benchmarks.measuring.cases import CEILINGS, COPY, OURS, copy_contender
from benchmarks.measuring.clock import Clock, Timing

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DISTRIBUTIONS = {
    "torch": ("torch",),
    "numba": ("numba",),
    "triton": ("triton",),
    "fbgemm": ("fbgemm-gpu-cpu", "fbgemm-gpu"),
    "torchrec": ("torchrec",),
}


def version_of(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def processor() -> str:
    """The processor's model as the system names it, and how many cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {cores} cores"


def commit() -> str:
    """The commit that is checked out, marked "+changes" where the package or the benchmarks differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + "+changes" * bool(git("status", "--porcelain", "--", "tritonemb", "benchmarks/*.py"))
    except (OSError, subprocess.CalledProcessError):
        return "uncommitted"


def environment() -> dict[str, Any]:
    """The columns that all rows of one run share."""
    versions = {name: version_of(*distributions) for name, distributions in DISTRIBUTIONS.items()}
    versions |= {"tritonemb": te.__version__, "python": platform.python_version()}
    return {"date": datetime.date.today().isoformat(), "commit": commit(), "cpu": processor(), **versions}


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
            "cpu_ms": timing.cpu_ms,
            "rounds": len(timing.samples),
            "other_load_percent": timing.other_load_percent,
            "bytes": num_bytes[timing.name],
            "gb_per_s": num_bytes[timing.name] / timing.percentile(50) / 1e6,
        }
        for timing in timings
    ]


def by_case(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """The rows of each op and shape, by implementation."""
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["op"], row["shape"]), {})[row["implementation"]] = row
    return cases


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each row: time, rate, share of the copy's rate, times as fast as the fastest peer in the same case."""
    for case in by_case(rows).values():
        peers = [row for name, row in case.items() if name not in CEILINGS and not is_ours(row)]
        fastest = min(peers, key=lambda row: float(row["p50_ms"]), default=None)
        for row in case.values():
            rate = case[COPY]["gb_per_s"] if COPY in case else row.get("copy_gb_per_s")
            share = f"{100 * row['gb_per_s'] / rate:4.0f} % of a copy" if rate and row["bytes"] else ""
            ratio = f"{fastest['p50_ms'] / row['p50_ms']:.2f} x {fastest['implementation']}" if fastest else ""
            yield (
                f"{row['op']:38} {row['implementation']:24} p20 {row['p20_ms']:8.3f}  p50 {row['p50_ms']:8.3f}  "
                f"p80 {row['p80_ms']:8.3f} ms{cpu_text(row)} {row['gb_per_s']:7.1f} GB/s {share:16} "
                f"{ratio if is_ours(row) else '':20} {row['shape']}"
            )


def cpu_text(row: Mapping[str, Any]) -> str:
    return f", CPU {row['cpu_ms']:8.3f} ms" if row.get("cpu_ms") is not None else ""


def target_lines(targets: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each target: whether it is met, if that is known."""
    for target in targets:
        verdict = {True: "met    ", False: "NOT MET", None: "unknown"}[target["met"]]
        ratio = "not measured" if target["ratio"] is None else f"{target['ratio']:.2f}"
        yield f"{verdict} {target['op']}, {target['shape']}: {target['measured']} = {ratio} ({target['target']})"


def is_ours(row: Mapping[str, Any]) -> bool:
    return str(row["implementation"]).startswith(OURS)


class Goal(NamedTuple):
    """What the median of one contender, over that of another, is to be; contenders by their place in the race."""

    slow: int
    fast: int
    most: float | None = None
    least: float | None = None

    def row(self, op: str, shape: object, timings: Sequence[Timing]) -> dict[str, Any]:
        slow, fast = timings[self.slow], timings[self.fast]
        ratio = slow.percentile(50) / fast.percentile(50)
        return target_row(op, shape, f"{slow.name} / {fast.name}", ratio, self.most, self.least)


def at_least(op: str, shape: object, ours: Timing, peers: Sequence[Timing], factor: float) -> dict[str, Any]:
    """The target that ours be `factor` times as fast as the fastest of the peers."""
    return Goal(1, 0, least=factor).row(op, shape, [ours, min(peers, key=lambda timing: timing.percentile(50))])


def target_row(
    op: str, shape: object, measured: str, ratio: float, most: float | None = None, least: float | None = None
) -> dict[str, Any]:
    """A target that a ratio be at most, or at least, so much."""
    met = ratio <= most if most is not None else ratio >= (least or 0.0)
    target = f"at most {most:g}" if most is not None else f"at least {least:g}"
    return {"op": op, "shape": str(shape), "measured": measured, "ratio": ratio, "target": target, "met": met}
