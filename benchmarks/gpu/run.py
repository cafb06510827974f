"""Measure the embedding path on one GPU beside FBGEMM, torch and a copy, and keep the figures.

    python benchmarks/gpu/run.py                       all; benchmarks/results/<device>-<date>.json, picture, README
    python benchmarks/gpu/run.py --list                the cases
    python benchmarks/gpu/run.py -k update,codec       only cases that have one of these in their name; keeps nothing
    python benchmarks/gpu/run.py -k sort --out DIR     ... and writes its results and picture into DIR
    python benchmarks/gpu/run.py --device cpu --tiny   tries the code out without a GPU; keeps nothing

FBGEMM takes part if `fbgemm_gpu` can be imported, e.g. through PYTHONPATH=.peers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # called as a file, Python puts only this folder on the path

from benchmarks import report, results_file  # noqa: E402
from benchmarks.environment import environment  # noqa: E402
from benchmarks.gpu import dense, embeddings, roofline, targets, tiers  # noqa: E402
from benchmarks.gpu.clock import Clock, Contender, Outcome, describe, recover  # noqa: E402
from benchmarks.gpu.workload import WORKLOADS, Workload  # noqa: E402
from tritonemb.kernels.packing import CODECS  # noqa: E402

SECONDS = 540.0


class Case(NamedTuple):
    """One op over one shape. Cases with one `workload` share its tables."""

    op: str
    shape: str
    workload: Workload | None
    measure: Callable[[Any, Clock, int], Outcome]  # of the workload's `Bench`, or of None

    def __str__(self) -> str:
        return f"{self.op}, {self.shape}"


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    """All cases, those that share tables next to each other."""
    for workload in WORKLOADS:
        w = workload.tiny() if tiny else workload
        for op in embeddings.OPS:
            yield Case(op, str(w), w, lambda bench, clock, rounds, op=op: embeddings.measure(op, bench, clock, rounds))
        if w.name == "mlperf":
            yield Case("DLRM step", str(w), w, dense.measure_dlrm)
    num_rows = 8 if tiny else 16384
    for name, direction in itertools.product(CODECS, ("pack", "unpack")):
        make = functools.partial(dense.codec, name, direction, num_rows, 26, 128, device)
        yield Case(f"codec {name} {direction}", f"rows {num_rows:,} T26 D128", None, functools.partial(_alone, make))
    batch_size = 8 if tiny else 8192
    for dtype in (torch.float32, torch.bfloat16):
        make = functools.partial(dense.interaction, batch_size, 26, 128, dtype, device)
        shape = f"B{batch_size} F26 D128 {str(dtype).removeprefix('torch.')}"
        yield Case("interaction", shape, None, functools.partial(_alone, make))
    for tier in tiers.CASES:
        t = tier.tiny() if tiny else tier
        yield Case(t.op, str(t), None, lambda _, clock, rounds, t=t: tiers.measure(t, device, clock, rounds))


def _alone(make: Callable[[], list[Contender]], _: None, clock: Clock, rounds: int) -> Outcome:
    return clock.measure(make(), rounds)


def run(chosen: list[Case], device: torch.device, rounds: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure the cases in turn; `keep` gets each case's rows and failures as soon as it is done."""
    clock, begin = Clock(device), time.monotonic()
    bench: embeddings.Bench | None = None
    for case in chosen:
        if time.monotonic() - begin > SECONDS:
            keep({"failures": [_failure(case, "all", f"not measured: {SECONDS:.0f} s were over")]})
            continue
        try:
            if case.workload != (bench and bench.workload):
                bench = None
                recover()
                bench = case.workload and embeddings.Bench(case.workload, device)
            outcome = case.measure(bench, clock, rounds)
        except Exception as error:
            keep({"failures": [_failure(case, "all", describe(error))]})
            recover()
            continue
        rows = [_row(case, timing, outcome.num_bytes[timing.name]) for timing in outcome.timings]
        keep({"rows": rows, "failures": [_failure(case, *item) for item in outcome.errors.items()]})


def _row(case: Case, timing: Any, num_bytes: int) -> dict[str, Any]:
    return {
        "op": case.op,
        "shape": case.shape,
        "implementation": timing.name,
        "p20_ms": timing.percentile(20),
        "p50_ms": timing.percentile(50),
        "p80_ms": timing.percentile(80),
        "rounds": len(timing.samples),
        "bytes": num_bytes,
        "gb_per_s": num_bytes / timing.percentile(50) / 1e6,
    }


def _failure(case: Case, implementation: str, error: str) -> dict[str, Any]:
    return {"op": case.op, "shape": case.shape, "implementation": implementation, "error": error}


def select(everything: Iterator[Case], wanted: str) -> list[Case]:
    """Cases that have one of the comma-separated parts in their name."""
    parts = [part.strip().lower() for part in wanted.split(",") if part.strip()]
    return [case for case in everything if not parts or any(part in str(case).lower() for part in parts)]


def conditions(device: torch.device) -> dict[str, Any]:
    """The columns that all rows of one run share."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = environment() | {"device": name, "cuda": torch.version.cuda}
    if found["fbgemm"] is None and importlib.util.find_spec("fbgemm_gpu"):  # a copy on the path, not installed
        with contextlib.suppress(Exception):
            found["fbgemm"] = importlib.import_module("fbgemm_gpu").__version__
    return found


def slug(device_name: str) -> str:
    """ "NVIDIA H200" as part of a file's name: "nvidia-h200"."""
    return "-".join("".join(c if c.isalnum() else " " for c in device_name.lower()).split())


def print_case(part: dict[str, Any]) -> None:
    for row in part.get("rows", []):
        print(
            f"{row['op']:24} {row['implementation']:26} p20 {row['p20_ms']:8.3f}  p50 {row['p50_ms']:8.3f}  "
            f"p80 {row['p80_ms']:8.3f} ms  {row['gb_per_s']:7.0f} GB/s  {row['shape']}",
            flush=True,
        )
    for failure in part.get("failures", []):
        print("FAILED", *(str(failure[name]) for name in ("op", "shape", "implementation", "error")), flush=True)


def print_targets(verdicts: list[dict[str, Any]]) -> None:
    for verdict in verdicts:
        word = {True: "met    ", False: "NOT MET", None: "unknown"}[verdict["met"]]
        ratio = "not measured" if verdict["ratio"] is None else f"{verdict['ratio']:.2f}"
        print(f"{word} {verdict['op']}, {verdict['shape']}: {verdict['measured']} = {ratio} ({verdict['target']})")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds of every case")
    parser.add_argument("-k", dest="select", default="", help="comma-separated parts of names; others are left out")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few rounds, to try the code out")
    parser.add_argument("--out", type=Path, help="folder for the results, instead of benchmarks/results and README.md")
    parser.add_argument("--commit", help="where there is no checkout: the commit to name in the results")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    chosen = select(cases(device, options.tiny), options.select)
    if options.list:
        print("\n".join(map(str, chosen)))
        return {}
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --device cpu --tiny tries the code out")
    shared = conditions(device) | ({"commit": options.commit} if options.commit else {})
    results: dict[str, Any] = {"kind": "gpu", "date": shared["date"], "rows": [], "targets": [], "failures": []}
    whole = device.type == "cuda" and not options.tiny and not options.select
    folder = options.out or (results_file.RESULTS if whole else None)

    def keep(part: dict[str, Any]) -> None:
        print_case(part)
        results["rows"] += [row | shared for row in part.get("rows", [])]
        results["failures"] += part.get("failures", [])
        results["targets"] = targets.verdicts(results["rows"])
        if folder is not None:  # after every case, so that an interrupted run leaves what it has
            results_file.write(slug(shared["device"]), results, folder)

    run(chosen, device, 2 if options.tiny else options.rounds, keep)
    print_targets(results["targets"])
    if folder is not None and results["rows"]:
        path = results_file.write(slug(shared["device"]), results, folder)
        roofline.draw_if_possible(results, path.with_suffix(".png"))
        print(f"wrote {path}")
        if options.out is None:
            report.report_gpu()
    return results


if __name__ == "__main__":
    main()
