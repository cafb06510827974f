"""Measure on one GPU beside FBGEMM, torch and a copy, and keep the figures.

    python benchmarks/gpu/run.py                       all; benchmarks/results/<device>-<date>.json, picture, README
    python benchmarks/gpu/run.py --list                the cases
    python benchmarks/gpu/run.py -k update,codec       only cases that have one of these in their name; keeps nothing
    python benchmarks/gpu/run.py -k sort --out DIR     ... and writes its results and picture into DIR
    python benchmarks/gpu/run.py --device cpu --tiny   tries the code out without a GPU; keeps nothing

A workload, a family of ops and a tier are a process each (`benchmarks/gpu/processes.py`). A run ends by itself within
`--seconds` and says what it has not measured. Cases are measured eager and, where the host only launches kernels, as a
CUDA graph. FBGEMM takes part if `fbgemm_gpu` can be imported, e.g. through PYTHONPATH=.peers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # called as a file, Python puts only this folder on the path

from benchmarks import (  # noqa: E402
    bench_codecs,
    bench_cross,
    bench_dlrm,
    bench_embedding_bag,
    bench_interaction,
    bench_jagged,
    bench_row_cache,
    bench_row_groups,
    bench_row_moves,
    bench_row_update,
    bench_step,
    report,
    results_file,
)
from benchmarks import cases as micro  # noqa: E402
from benchmarks.cases import GRAPH  # noqa: E402
from benchmarks.clock import Clock, DeviceLost, Outcome, describe, recover  # noqa: E402
from benchmarks.environment import environment  # noqa: E402
from benchmarks.gpu import processes, roofline, targets, tiers  # noqa: E402
from benchmarks.record import lines, timing_rows  # noqa: E402

SECONDS = 540.0
ON_TABLES = (bench_embedding_bag, bench_row_groups, bench_row_update, bench_step, bench_dlrm)
FAMILIES = (*ON_TABLES, bench_row_cache, bench_row_moves, bench_jagged, bench_codecs, bench_interaction, bench_cross)


class Case(NamedTuple):
    """One op over one shape; those of one `group` share a process."""

    group: str
    op: str
    shape: str
    measure: Callable[[Clock, int], Outcome]

    def __str__(self) -> str:
        return f"{self.op}, {self.shape}"


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    """All cases, those of a process next to each other; what takes long comes last."""
    groups: dict[str, list[micro.Case]] = {}
    for family in FAMILIES:
        for case in family.cases(device, tiny):
            groups.setdefault(case.group or family.__name__, []).append(case)
    for group in sorted(groups, key=lambda name: name.startswith("mlperf")):
        for case in groups[group]:
            for graph in (False, True)[: 1 + case.capturable]:
                yield Case(group, case.op + GRAPH * graph, case.shape, functools.partial(_measure, case, graph))
    for tier in tiers.CASES:
        t = tier.tiny() if tiny else tier
        yield Case(str(t), t.op, str(t), functools.partial(tiers.measure, t))


def _measure(case: micro.Case, graph: bool, clock: Clock, rounds: int) -> Outcome:
    contenders = case.make(clock)
    if case.repeats:
        return clock.measure(contenders, max(2, rounds // 6), 1, case.repeats, graph)
    return clock.measure(contenders, rounds, graph=graph)


def measure_cases(
    device_name: str,
    tiny: bool,
    rounds: int,
    task: processes.Task,
    begin: Callable[..., None],
    done: Callable[..., None],
) -> None:
    """Measure a task's cases in this process, one after the other."""
    device = torch.device(device_name)
    by_name = {str(case): case for case in cases(device, tiny)}
    clock = Clock(device, task.deadline)
    for name in list(task.cases):
        if time.time() > task.deadline:
            return
        case = by_name[name]
        clock.begin = functools.partial(begin, name)
        clock.without = {contender for other, contender in task.without if other == name}
        try:
            outcome = case.measure(clock, rounds)
        except DeviceLost:
            raise  # only another process can go on
        except Exception as error:
            recover(error)
            done(name, {"failures": [_failure(case, "all", describe(error))]})
            continue
        failures = [_failure(case, *item) for item in outcome.errors.items()]
        done(name, {"rows": timing_rows(case.op, case.shape, outcome.timings, outcome.num_bytes), "failures": failures})


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
    for line in lines(part.get("rows", [])):
        print(line, flush=True)
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
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the run ends by itself within so many")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few rounds, to try the code out")
    parser.add_argument("--out", type=Path, help="folder for the results, instead of benchmarks/results and README.md")
    parser.add_argument("--commit", help="where there is no checkout: the commit to name in the results")
    options = parser.parse_args(arguments)
    begin, device = time.monotonic(), torch.device(options.device)
    chosen = select(cases(device, options.tiny), options.select)
    if not chosen:
        sys.exit(f"no case matches {options.select!r}; --list shows them")
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

    named, groups = {str(case): case for case in chosen}, {}
    for case in chosen:
        groups.setdefault(case.group, []).append(str(case))
    processes.run(
        functools.partial(measure_cases, options.device, options.tiny, 2 if options.tiny else options.rounds),
        list(groups.values()),
        lambda _, part: keep(part),
        lambda name, contender, why: keep({"failures": [_failure(named[name], contender, why)]}),
        max(0.0, options.seconds - (time.monotonic() - begin)),
        preload=["fbgemm_gpu"] if shared["fbgemm"] else [],
    )
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
