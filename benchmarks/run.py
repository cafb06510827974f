"""Run all benchmarks, keep the figures, rewrite pictures and tables of README and docs.

    python benchmarks/run.py                       on the CPU: benchmarks/results/cpu-<date>.json
    python benchmarks/run.py -k step               what matches, as pytest's; some selections have a file of their own
    python benchmarks/run.py --quick               in 10 minutes, with few rounds: build/cpu-quick-<date>.json
    python benchmarks/run.py --device cuda         on one GPU: benchmarks/results/<device>-<date>.json
    python benchmarks/run.py --device cuda --list                the cases
    python benchmarks/run.py --device cuda --op forward,codec    with one of these in their op; kept in build/gpu-bench
    python benchmarks/run.py --device cuda --op step --shape "B8192 T26" "B512 T32"    ... and one of these in the shape
    python benchmarks/run.py --tiny                tries a GPU's cases out on the CPU, in small

On the CPU each file is a run of pytest-benchmark. On a GPU the cases of a workload, a family of ops or a tier share a
process; if it dies or hangs, the contender that ran is left out of its case, and another process goes on. The most
important cases of all workloads come first. A run there ends by itself within `--seconds` and says what it has not
measured, which the same command with `--left` does. Cases are measured eager and, where the host only launches kernels,
as a CUDA graph. FBGEMM takes part if `fbgemm_gpu` can be imported, e.g. through PYTHONPATH=.peers.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # called as a file, Python puts only this folder there

from benchmarks.gpu import targets, tiers
from benchmarks.measuring import cases as micro
from benchmarks.measuring import report, result_files
from benchmarks.measuring.cases import CEILINGS, GRAPH, OURS
from benchmarks.measuring.clock import Clock, DeviceLost, Outcome, describe, recover
from benchmarks.measuring.result_files import by_case, environment, lines, target_lines, timing_rows
from tests.gpu import processes
from tests.gpu.processes import NOT_RUN, PASSED, STARTED, TIMED_OUT, Job

QUIET_PERCENT = 5.0
QUICK_ROUNDS = 10
SELECTIONS = "dynamic", "servers", "offload"  # with a file of results of their own
# glibc keeps freed memory, for every contender alike: otherwise an output that the system takes back and must map and
# clear again costs, now and then, ten times the operation itself.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
SECONDS = 540.0
PARTS = result_files.ROOT / "build" / "gpu-bench"  # what is not the whole
SILENT_SECONDS = 150.0  # of one contender: more than it takes to compile, or to draw and load what a case needs
MOST_DEATHS = 4  # of a group's processes; its other cases are given up then
MARGIN = 0.03  # of all the time: for a case to notice that it is over
ALL, BY = "all", " | "  # contenders of a case; in the record, between the case and one of them


def families(*names: str) -> list[ModuleType]:
    """Microbenchmarks of families of ops."""
    return [importlib.import_module(f"benchmarks.bench_{name}") for name in names]


ON_TABLES = families("embedding_bag", "row_groups", "row_update", "step")
FAMILIES = [*ON_TABLES, *families("row_cache", "jagged", "codecs", "interaction")]


class Case(NamedTuple):
    """One op over one shape; those of one `group` share a process."""

    group: str
    op: str
    shape: str
    measure: Callable[[Clock, int], Outcome]

    def __str__(self) -> str:
        return f"{self.op}, {self.shape}"


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    """All cases, those of a process next to each other; what matters most comes first, what takes long last."""
    groups: dict[tuple[int, str], list[micro.Case]] = {}
    for family in FAMILIES:
        for case in family.cases(device, tiny):
            groups.setdefault((case.rank, case.group or family.__name__), []).append(case)
    for rank, group in sorted(groups, key=lambda key: (key[0], key[1].startswith("mlperf"))):
        for case in groups[rank, group]:
            for graph in (False, True)[: 1 + case.capturable]:
                measure = functools.partial(_measure, case, graph)
                yield Case(f"{group}, {rank}", case.op + GRAPH * graph, case.shape, measure)
    for tier in tiers.CASES:
        t = tier.tiny() if tiny else tier
        yield Case(str(t), t.op, str(t), functools.partial(tiers.measure, t))


def _measure(case: micro.Case, graph: bool, clock: Clock, rounds: int) -> Outcome:
    samples, warmup_samples = (max(2, rounds // 6), 1) if case.repeats else (rounds, 3)
    return clock.measure(case.make(clock), samples, warmup_samples, case.repeats, graph)


def serve(device: torch.device, tiny: bool, rounds: int) -> None:
    """Measure the cases that are NOT_RUN in a record, without the contenders that failed there.

    Standard input has the columns that all rows share, the deadline, of `time.time()`, and the record. A case's state
    there is then its rows and failures. Contenders are items of the record, too.
    """
    with contextlib.suppress(Exception):  # its contenders say what is wrong
        importlib.import_module("fbgemm_gpu")
    by_name = {str(case): case for case in cases(device, tiny)}
    conditions, deadline, path = json.loads(sys.stdin.readline())
    clock, record = Clock(device, deadline), Path(path)
    states = processes.read_record(record)

    def begin(case: str, contender: str) -> None:
        processes.append_record(record, {f"{case}{BY}{contender}": STARTED})
        faulthandler.dump_traceback_later(SILENT_SECONDS, exit=True)

    for name in [item for item, state in states.items() if state == NOT_RUN]:
        if time.time() > deadline:
            return
        case, failed = by_name[name], [item for item in states if BY in item and isinstance(states[item], dict)]
        clock.without = [item.removeprefix(f"{name}{BY}") for item in failed if item.startswith(f"{name}{BY}")]
        clock.begin = functools.partial(begin, name)
        clock.begin(ALL)
        try:
            outcome = case.measure(clock, rounds)
        except DeviceLost:
            raise  # only another process can go on
        except Exception as error:
            recover(error)
            part = {"rows": [], "failures": [_failure(case, ALL, describe(error))]}
        else:
            rows = timing_rows(case.op, case.shape, outcome.timings, outcome.num_bytes)
            failures = [_failure(case, *item) for item in outcome.errors.items()]
            part = {"rows": [row | conditions for row in rows], "failures": failures}
        processes.append_record(record, {name: part})


def measure_groups(
    chosen: list[Case],
    conditions: dict[str, Any],
    folder: Path,
    seconds: float,
    keep: Callable[[dict[str, Any]], None],
    command: Sequence[str],
    left: bool = False,
) -> None:
    """Measure cases in processes, a group at a time; `keep` gets the rows and failures of each.

    Args:
        conditions: columns that all rows share.
        command: what does as `serve`.
        left: keep what is in the folder's records, and measure the cases that have no rows there.
    """
    by_name, jobs, deadline = {str(case): case for case in chosen}, list[Job](), time.time() + (1 - MARGIN) * seconds

    def done(item: str, state: Any) -> bool:
        return left and isinstance(state, dict) and (BY in item or bool(state["rows"]))

    def lose(record: Path, name: str, contender: str, why: str) -> None:
        part = {"rows": [], "failures": [_failure(by_name[name], contender, why)]}
        processes.append_record(record, {name if contender == ALL else f"{name}{BY}{contender}": part})
        keep(part)

    for group, members in itertools.groupby(chosen, lambda case: slug(case.group)):
        record = folder / f"{group}.jsonl"
        parts = processes.renew_record(record, done)
        for part in parts.values():
            keep(part)
        if todo := [str(case) for case in members if str(case) not in parts]:
            processes.append_record(record, dict.fromkeys(todo, NOT_RUN))
            jobs.append(Job(group, command, task=json.dumps([conditions, deadline, str(record)]), record=record))
    with contextlib.closing(processes.run(jobs, folder, 1, seconds)) as ended:
        for outcome in ended:
            print(outcome.log, end="\n" * bool(outcome.log), flush=True)
            record = outcome.job.record
            for part in [state for state in outcome.items.values() if isinstance(state, dict)]:
                keep(part)
            why = f"its process {outcome.status}: {(outcome.tail.splitlines() or [''])[-1]}"
            if outcome.died:
                lose(record, *outcome.last.split(BY), why)
                why = f"not measured: {MOST_DEATHS} processes of its group died"
            elif outcome.status in (PASSED, TIMED_OUT, NOT_RUN):
                why = f"not measured: {seconds:.0f} s were over"
            if not outcome.died or outcome.job.number == MOST_DEATHS:
                states = processes.read_record(record)
                for name in [name for name in by_name if states.get(name) == NOT_RUN]:
                    lose(record, name, ALL, why)


def _failure(case: Case, implementation: str, error: str) -> dict[str, Any]:
    return {"op": case.op, "shape": case.shape, "implementation": implementation, "error": error}


def run_pytest(
    shared: dict[str, Any], rounds: int, select: str, quick: bool = False, left: bool = False
) -> list[dict[str, Any]]:
    """Run each file; return the reports of pytest-benchmark, with the columns `shared` in their rows.

    Each file is a process of its own, so that none finds the memory that another one has kept. Reports stay in
    a folder of the selection and rounds in `build/cpu-bench`; with `left`, files that have one there do not run again.
    Exits after the last file if one failed.
    """
    folder, failures, reports = (
        PARTS.with_name("cpu-bench") / slug(f"{select or ALL} {rounds}{' quick' * quick}"),
        [],
        [],
    )
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted((result_files.ROOT / "benchmarks").glob("bench_*.py")):
        raw = folder / f"{file.stem}.json"
        if not (left and raw.exists()):
            raw.unlink(missing_ok=True)
            partial_report = raw.with_suffix(".unfinished")
            command = [sys.executable, "-m", "pytest", "-c", "benchmarks/pytest.ini", str(file), f"--rounds={rounds}"]
            command += [f"--benchmark-json={partial_report}", "-k", select, *["--quick"] * quick]
            code = subprocess.run(command, cwd=result_files.ROOT, env=os.environ | KEEP_MEMORY).returncode
            if code == 0:
                benchmarks = result_files.read(partial_report)["benchmarks"]
                for extra in (benchmark["extra_info"] for benchmark in benchmarks):
                    extra |= {kind: [row | shared for row in extra.get(kind, [])] for kind in ("rows", "memory")}
                result_files.write_json(raw, {"benchmarks": benchmarks})
            elif code != pytest.ExitCode.NO_TESTS_COLLECTED:
                failures.append(file.name)
        reports += result_files.read(raw)["benchmarks"] if raw.exists() else []
    if failures:
        sys.exit(f"failed: {', '.join(failures)}; --left runs them again, and goes on with the figures of the others")
    if not reports:
        sys.exit(f"no benchmark matches {select!r}")
    return reports


def condense(benchmarks: list[dict[str, Any]], shared: dict[str, Any], rows: str = "rows") -> dict[str, Any]:
    """One table of long-format rows, each complete by itself, and one of targets, beside where they were measured."""
    extras = [benchmark["extra_info"] for benchmark in benchmarks]
    table = [shared | row for extra in extras for row in extra.get(rows, [])]
    targets = [target for extra in extras for target in extra.get("targets", [])]
    return {"date": shared["date"], "environment": shared, "rows": table, "targets": targets}


def measure_on_cpu(rounds: int, select: str, quick: bool, left: bool) -> None:
    shared = environment()  # before the run: afterwards the results themselves are a change to the checkout
    benchmarks = run_pytest(shared, rounds, select, quick, left)
    results, memory = condense(benchmarks, shared), condense(benchmarks, shared, "memory")
    print(*lines(results["rows"]), *target_lines(results["targets"]), sep="\n")
    load = max((row["other_load_percent"] or 0.0 for row in results["rows"]), default=0.0)
    if load > QUIET_PERCENT:
        print(f"Other processes took up to {load:.0f} % of the processor meanwhile: repeat this on an idle machine.")
    if quick:
        print(f"wrote {result_files.write('cpu-quick', results, result_files.ROOT / 'build')}")
        return
    if select in ("", *SELECTIONS):
        print(f"wrote {result_files.write(select or 'cpu', results)}")
    if memory["rows"] and select in ("", "memory"):
        print(f"wrote {result_files.write('memory', memory)}")
        report.report("memory")
    if not select:
        report.main()


def select(everything: Iterator[Case], ops: str = "", shapes: Sequence[str] = ()) -> list[Case]:
    """Cases with one of the comma-separated parts in their op, and one of `shapes` in their shape."""

    def has(text: str, parts: Sequence[str]) -> bool:
        return not parts or any(part.strip().lower() in text.lower() for part in parts)

    return [case for case in everything if has(case.op, ops.split(",")) and has(case.shape, shapes)]


def slug(device_name: str) -> str:
    """ "NVIDIA H200" as part of a file's name: "nvidia-h200"."""
    return "-".join("".join(c if c.isalnum() else " " for c in device_name.lower()).split())


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each op and shape: our median, peers' as multiples, and the share of a copy's and a gather's rate."""
    for (op, shape), case in by_case(rows).items():
        medians = {name: row["p50_ms"] for name, row in case.items()}
        if OURS not in medians:
            continue
        fused = medians.pop(OURS)
        ratios = [f"{medians[name] / fused:.0%} of a {name}" for name in CEILINGS if name in medians]
        ratios += [f"{ms / fused:.2f} x {name}" for name, ms in medians.items() if name not in CEILINGS]
        yield f"{fused:8.3f} ms  {op:32} {', '.join(reversed(ratios))}  {shape}"


def measure_on_gpu(options: argparse.Namespace, begin: float) -> dict[str, Any]:
    """The GPU's cases, on the device of the options."""
    device, rounds = torch.device(options.device), 2 if options.tiny else options.rounds
    chosen = select(cases(device, options.tiny), options.op, options.shape)
    if not chosen:
        sys.exit(f"no case has {options.op!r} in its op and one of {options.shape} in its shape; --list shows them")
    if options.list:
        print("\n".join(map(str, chosen)))
        return {}
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --tiny tries the code out")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    shared = environment() | {"device": name, "cuda": torch.version.cuda}
    shared |= {"commit": options.commit} if options.commit else {}
    results: dict[str, Any] = {"kind": "gpu", "date": shared["date"], "rows": [], "targets": [], "failures": []}
    whole = device.type == "cuda" and not (options.tiny or options.op or options.shape or options.out)
    folder = result_files.RESULTS if whole else options.out or PARTS

    def keep(part: dict[str, Any]) -> None:
        failed = (f"FAILED {' '.join(failure.values())}" for failure in part["failures"])
        print(*lines(part["rows"]), *failed, sep="\n", flush=True)
        results["rows"] += part["rows"]
        results["failures"] += part["failures"]
        results["targets"] = targets.verdicts(results["rows"])
        result_files.write(slug(name), results, folder)  # so that an interrupted run leaves what it has

    seconds = max(0.0, options.seconds - (time.monotonic() - begin))
    command = [sys.executable, __file__, "--serve", "--device", options.device, "--rounds", str(rounds)]
    command += ["--tiny"] * options.tiny
    records = (PARTS if whole else folder) / slug(name)  # of one device, which another call goes on with
    measure_groups(chosen, shared, records, seconds, keep, command, options.left)
    path = result_files.write(slug(name), results, folder)
    if results["rows"]:
        report.draw_if_possible(report.draw_roofline, results, path.with_suffix(".png"), report.DRAWS)
    if whole and results["rows"]:
        report.report_gpu()
    print(f"wrote {path}")
    print("\n".join([*target_lines(results["targets"]), *summary(results["rows"])]))
    return results


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="timed rounds of every case; 40 on the CPU, 30 on a GPU")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--quick", action="store_true", help="on the CPU, in 10 minutes: few rounds, no slow case, no page rewritten"
    )
    parser.add_argument("-k", default="", help=f"run only what matches; kept are memory, {', '.join(SELECTIONS)}")
    parser.add_argument("--left", action="store_true", help="go on with what the same command has not measured")
    gpu = parser.add_argument_group("with --device cuda, or --tiny")
    gpu.add_argument("--op", default="", help="comma-separated parts of ops; others are left out")
    gpu.add_argument("--shape", nargs="+", default=[], help="parts of shapes; others are left out")
    gpu.add_argument("--list", action="store_true", help="print the cases and stop")
    gpu.add_argument("--seconds", type=float, default=SECONDS, help="the run ends by itself within so many")
    gpu.add_argument("--tiny", action="store_true", help="small shapes and few rounds, to try the code out")
    gpu.add_argument("--out", type=Path, help="folder for the results, instead of benchmarks/results and the page")
    gpu.add_argument("--commit", help="where there is no checkout: the commit to name in the results")
    gpu.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    begin, options = time.monotonic(), parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        rounds = options.rounds or (QUICK_ROUNDS if options.quick else 40)
        measure_on_cpu(rounds, options.k, options.quick, options.left)
        return {}
    options.rounds = options.rounds or 30
    if options.serve:
        serve(torch.device(options.device), options.tiny, options.rounds)
        return {}
    return measure_on_gpu(options, begin)


if __name__ == "__main__":
    main()
