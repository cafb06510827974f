"""Shows that a change keeps every bit: trains many small models, and compares digests of their checkpoints.

    python tools/checkpoint_bits.py record FILE     train every case, write the digests of its checkpoint
    python tools/checkpoint_bits.py compare FILE    train again; print each case and tensor that differs; exit status 1

`tools/checkpoint_cases.py` has the cases. Only public names of tritonemb are used, so the same files run on trees
before and after a change: `PYTHONPATH=<tree> python tools/checkpoint_bits.py compare tools/checkpoint_bits.json`.
Another CPU, or another version of torch or Numba, may round differently: record anew on the older tree there.

All cases of one rank run in one process (in more with `--jobs`), those of two ranks in two processes beside it. A case
that raises counts as one that differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numba
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checkpoint_cases import Case, cases, differing

import tritonemb as te

STEPS = 50
TIMEOUT = 120.0  # seconds that a rank waits for another


def work(rank: int, ranks: int, names: Sequence[str], steps: int, threads: int, root: Path) -> None:
    """Run cases in this process, which is a rank; rank zero writes `result.json`, whoever fails an error."""
    torch.set_num_threads(threads)
    known = {case.name: case for case in cases(steps)}
    for name in names:
        place = root / folder_name(name)
        place.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        try:
            result = in_group(known[name], rank, place, len(names))
            if rank == 0:
                actual = result() if callable(result) else result
                write(place / "result.json", {"digests": actual})
        except Exception:
            write(place / f"error-{rank}.json", {"error": f"rank {rank} of {ranks}: {traceback.format_exc()}"})
            if ranks > 1:
                raise
        if rank == 0:
            print(f"{name}  {time.perf_counter() - start:.1f} s", flush=True)
        result = None
        gc.collect()


def in_group(case: Case, rank: int, place: Path, attempt: int) -> Any:
    """Run a case on this rank, in a process group of its own where there are several."""
    if case.ranks == 1:
        return case.run(place)
    dist.init_process_group(
        "gloo", f"file://{place}/rendezvous-{attempt}", timedelta(seconds=TIMEOUT), world_size=case.ranks, rank=rank
    )
    try:
        return case.run(place)
    finally:
        dist.destroy_process_group()


def folder_name(name: str) -> str:
    return name.replace("/", "-")


def write(path: Path, value: Any) -> None:
    """A reader finds all of it, or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


def run_unit(ranks: int, names: list[str], steps: int, threads: int, root: Path) -> None:
    """Run cases in processes that stay; those behind one that ends its processes run in new ones."""
    left = list(names)
    while left:
        context = mp.spawn(work, (ranks, left, steps, threads, root), ranks, join=False)
        try:
            while not context.join():
                pass
        except Exception as error:
            fallback = str(error)
        else:
            fallback = "its process has ended without a result"
        initial = left
        left = [name for name in left if not any((root / folder_name(name)).glob("*.json"))]
        if left == initial:
            write(root / folder_name(left[0]) / "error.json", {"error": fallback})
            left = left[1:]


def run_all(options: argparse.Namespace, steps: int) -> dict[str, dict[str, Any]]:
    """The answer of every case that is asked for, by name."""
    chosen = [case for case in cases(steps) if options.only in case.name]
    if not chosen:
        raise SystemExit(f"no case has {options.only!r} in its name")
    single = [case.name for case in chosen if case.ranks == 1]
    shares = max(1, options.jobs - 1)
    units = [(2, [case.name for case in chosen if case.ranks == 2])]
    units += [(1, single[share::shares]) for share in range(shares)]
    with tempfile.TemporaryDirectory(prefix="checkpoint-bits-") as root:
        with ThreadPoolExecutor(options.jobs) as pool:
            jobs = [
                pool.submit(run_unit, ranks, names, steps, options.threads, Path(root))
                for ranks, names in units
                if names
            ]
            for job in jobs:
                job.result()
        return {case.name: answer(Path(root) / folder_name(case.name)) for case in chosen}


def answer(place: Path) -> dict[str, Any]:
    errors = [json.loads(path.read_text())["error"] for path in sorted(place.glob("error*.json"))]
    if errors or not (place / "result.json").exists():
        return {"error": "\n".join(errors) or "no result"}
    return dict(json.loads((place / "result.json").read_text()))


def environment(threads: int) -> dict[str, Any]:
    """What bits may depend on besides the code, and which code it was."""
    package = Path(te.__file__).parent
    describe = ["git", "-C", package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False)
    cpus = Path("/proc/cpuinfo")
    models = [line for line in cpus.read_text().splitlines() if line.startswith("model name")] if cpus.exists() else []
    return {
        "commit": commit.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "numba": numba.__version__,
        "python": platform.python_version(),
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
    }


def save(path: Path, record: Mapping[str, Any]) -> None:
    """JSON with one line a case; of a case that equals an earlier one, that one's name."""
    head = json.dumps({name: value for name, value in record.items() if name != "cases"}, indent=1)[:-2]
    first: dict[str, str] = {}
    lines = []
    for name, digests in record["cases"].items():
        value = json.dumps(digests)
        same = first.setdefault(value, name)
        lines.append(f"{json.dumps(name)}: {value if same == name else json.dumps(same)}")
    body = ",\n".join(lines)
    path.write_text(f'{head},\n "cases": {{\n{body}\n}}\n}}\n')


def load(path: Path) -> dict[str, Any]:
    """What `save` has written."""
    record = dict(json.loads(path.read_text()))
    cases = record["cases"]
    record["cases"] = {name: cases[value] if isinstance(value, str) else value for name, value in cases.items()}
    return record


def record(options: argparse.Namespace) -> int:
    answers = run_all(options, options.steps)
    failed = {name: answer["error"] for name, answer in answers.items() if "error" in answer}
    for name, error in failed.items():
        print(f"{name}: {error}", file=sys.stderr)
    recorded = {name: answer["digests"] for name, answer in answers.items() if name not in failed}
    save(options.file, {"environment": environment(options.threads), "steps": options.steps, "cases": recorded})
    print(f"{len(recorded)} cases recorded, {len(failed)} failed")
    return int(bool(failed))


def compare(options: argparse.Namespace) -> int:
    known = load(options.file)
    local = environment(options.threads)
    for name, value in known["environment"].items():
        if local[name] != value:
            print(f"{name}: recorded with {value}, this is {local[name]}")
    answers = run_all(options, known["steps"])
    expected = {name: digests for name, digests in known["cases"].items() if options.only in name}
    bad = 0
    for name in sorted({*expected, *answers}):
        actual = answers.get(name, {"error": "no such case"})
        lines = [actual["error"]] if "error" in actual else differing(expected.get(name, {}), actual["digests"])
        bad += bool(lines)
        for line in lines:
            print(f"DIFFERS {name}: {line}")
    print(f"{len(answers) - bad} cases are bitwise equal, {bad} differ")
    return int(bool(bad))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="cases with this in their names")
    parser.add_argument("--jobs", type=int, default=2, help="cases that run at once; those of two ranks count as one")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process; 1 if not given")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a record; a comparison has those of the record")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return record(options) if options.command == "record" else compare(options)


if __name__ == "__main__":
    sys.exit(main())
