"""The first minutes on a GPU machine, as one command: `python -m tests.gpu.first`, or `make gpu-first`.

Stages run in turn, each a process with a share of `--seconds`, so that a hang, a crash or an illegal access costs its
own stage. One that has too little time left is skipped; the suite takes what the others leave. After each, all logs and
results are packed into one `--archive`, and a table of at most 60 lines ends the output. `--left` goes on, in another
call, with what has not passed. `make gpu-archives` prepares, on another machine, what is unpacked here if it is there.

`--rehearse` runs all of this without a GPU: kernels are launched into a stub of the driver, benchmarks run in small on
the CPU, a part of the suite is interpreted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring import result_files
from tests.gpu import processes
from tests.gpu.driver import REHEARSE
from tests.gpu.processes import NOT_RUN, PASSED, Job, Outcome

CACHE, PEERS, ARCHIVES = Path("build/gpu-cache"), Path("build/peers"), Path("build/gpu-archives")
COMMIT = "commit"  # a file among the archives
SHAPES = ("B512 T32 L20 D128 float32 uniform", "B8192 T26 L1 D128 float32", "B2048 T26 L1 D64 float32")
TINY = ("fbgemm: B8 T3 L4 D16 float32 uniform",)
WIDTH, LINES = 150, 60  # of the table
MARGIN = 8.0  # seconds for a stage to end, and to pack the archive


@dataclass(frozen=True)
class Stage:
    """Arguments of Python; `{seconds}` in them are those that the stage has.

    Args:
        share: of all seconds; a stage that has less than half of them is skipped. The last one has what is left.
        lines: of its output that the table shows, the last ones of those that do not say "passed".
    """

    name: str
    share: float
    arguments: Sequence[str]
    lines: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)


def stages(out: Path, jobs: int, rehearse: bool, left: bool) -> list[Stage]:
    """The stages; what must be known first comes first."""
    commit, go_on = ARCHIVES / COMMIT, ["--left"] if left else []

    def suite(name: str, share: float, lines: int, *arguments: str, **variables: str) -> Stage:
        command = ["-m", "tests.gpu.suite", "--out", str(out / name), "--jobs", str(jobs), "--seconds", "{seconds}"]
        return Stage(name, share, [*command, *go_on, *arguments], lines, variables)

    smoke = ["--test-seconds", "60", "--files", "tests/gpu/test_smoke.py", "-k"]
    speed = ["benchmarks/run.py", "--seconds", "{seconds}", "--op", "forward,group + update,step"]
    speed += ["--out", str(out / "speed"), *go_on, *(["--tiny"] if rehearse else ["--device", "cuda"])]
    speed += ["--shape", *(TINY if rehearse else SHAPES)]
    speed += ["--commit", commit.read_text()] if commit.exists() else []
    host = ["benchmarks/gpu/launch_cost.py", "--tables", "1", "26", "1000", "--rounds", "3" if rehearse else "100"]
    path = os.pathsep.join(filter(None, (str(PEERS), os.environ.get("PYTHONPATH"))))
    remainder = ["--files", "tests/kernels/test_initial.py"] if rehearse else []
    return [
        Stage("device", 0.05, ["benchmarks/gpu/launch_cost.py", "--about"]),
        suite("smoke", 0.16, 10, *smoke, "launches or captured"),
        suite("ahead", 0.12, 3, *smoke, "ahead"),
        Stage("speed", 0.32, speed, 20, {"PYTHONPATH": path, "TORCH_COMPILE_DISABLE": "1"}),
        Stage("host", 0.06, host, 3),
        suite("compiled", 0.12, 3, *smoke, "compiled_dlrm_takes"),
        suite("suite", 0.15, 10, *remainder, TRITON_INTERPRET=str(int(rehearse))),
    ]


def run_stages(todo: Sequence[Stage], out: Path, archive: Path, seconds: float) -> dict[str, dict[str, Any]]:
    """Run stages that have not passed according to `out`/results.json, which all go into; it and logs are archived."""
    begin, path = time.monotonic(), out / "results.json"
    results = result_files.read(path) if path.exists() else {}
    for stage in todo:
        if results.get(stage.name, {}).get("status") == PASSED:
            continue
        left = seconds - MARGIN - (time.monotonic() - begin)
        budget = left if stage is todo[-1] else min(left, stage.share * seconds)
        outcome = Outcome(Job(stage.name, []), NOT_RUN, log=f"too little time is left: {max(left, 0):.0f} s")
        if budget >= 0.5 * stage.share * seconds:
            print(f"== {time.monotonic() - begin:.0f} s: {stage.name}, {budget:.0f} s", flush=True)
            # A tool that is told its seconds ends by itself, with its results, before it is ended.
            arguments = [argument.replace("{seconds}", f"{0.9 * budget:.0f}") for argument in stage.arguments]
            job = Job(stage.name, [sys.executable, *arguments], budget, stage.variables)
            (outcome,) = processes.run([job], out, 1)
        lines = [line for line in outcome.log.splitlines() if line and not line.startswith(PASSED)]
        results[stage.name] = {
            "status": outcome.status, "seconds": outcome.seconds, "budget": round(budget, 1),
            "lines": [line[:WIDTH] for line in lines[-stage.lines :]],
        }  # fmt: skip
        result_files.write_json(path, results)
        pack(out, archive)
        print("\n".join(describe(stage.name, results[stage.name])), flush=True)
        if stage.name == "device" and outcome.status != PASSED:
            break  # nothing else would run either
    return results


def describe(name: str, result: Mapping[str, Any]) -> list[str]:
    """A stage's lines of the table."""
    head = f"{result['status']:9} {result['seconds']:6.1f} of {result['budget']:.0f} s  {name}"
    return [head, *(f"    {line}" for line in result["lines"])]


def pack(folder: Path, archive: Path, mode: str = "w:gz", without: tuple[str, ...] = ()) -> None:
    """A folder under its name, but for files whose names end like that; the archive is whole at any time."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    part = archive.with_suffix(".part")
    with tarfile.open(part, mode) as tar:
        tar.add(folder, folder.name, filter=lambda info: None if info.name.endswith(without) else info)
    part.replace(archive)


def unpack() -> None:
    """Triton's cache and FBGEMM, to where the stages look for them."""
    for name, target in (("gpu-cache.tar.xz", CACHE.parent), ("fbgemm.tar.xz", PEERS)):
        if (ARCHIVES / name).exists():
            target.mkdir(parents=True, exist_ok=True)
            with tarfile.open(ARCHIVES / name) as tar:
                tar.extractall(target, filter="data")
        else:
            print(f"no {ARCHIVES / name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-first"), help="folder for logs and results")
    parser.add_argument("--archive", type=Path, default=Path("build/first.tgz"), help="all of that in one file")
    parser.add_argument("--seconds", type=float, default=560, help="for all of it")
    parser.add_argument("--jobs", type=int, default=8, help="checks and test files at once; they share the GPU")
    parser.add_argument("--left", action="store_true", help="only what has not passed in the run that --out has")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, behind a stub of the driver")
    options = parser.parse_args()
    if not options.left:
        (options.out / "results.json").unlink(missing_ok=True)
    begin = time.monotonic()
    if options.rehearse:
        os.environ |= {REHEARSE: "1", "CUDA_VISIBLE_DEVICES": ""}
    else:
        unpack()
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave their core to other checks
    todo = stages(options.out, options.jobs, options.rehearse, options.left)
    results = run_stages(todo, options.out, options.archive, options.seconds - (time.monotonic() - begin))
    table = [line for name, result in results.items() for line in describe(name, result)]
    print("\n".join(["", *table, f"{options.archive}: {options.archive.stat().st_size:,} bytes"]))
    sys.exit({result["status"] for result in results.values()} != {PASSED})


if __name__ == "__main__":
    main()
