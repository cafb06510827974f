"""A first look at the kernels on a GPU: `python -m tests.gpu.smoke [names of checks]`, or `make gpu-smoke`.

Every check is a process of its own: small problems of each launcher against its reference, training steps against the
references' bits, a captured step against eager ones; at last, alone, two shapes on the clock beside a copy. `--out`
gets a log of each check, and results.json with all of them. Under TRITON_INTERPRET=1, `--device cpu` rehearses this
without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import shutil
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

import tritonemb as te
from benchmarks.clock import Clock, Contender
from benchmarks.peers import OurTables
from benchmarks.workload import Workload, draw_batches, draw_gradient, forward_bytes, step_bytes
from tests.gpu import processes
from tests.gpu.problems import captured, counted_compilations, hot_steps, run_step, warm_up
from tests.gpu.processes import Job, Outcome
from tests.helpers import contents, fewer, make_collection
from tests.kernels.ahead_of_time_cases import CASES, on
from tritonemb.kernels.triton_utils import interpreting
from tritonemb.ops.registry import REFERENCE, TRITON, forced
from tritonemb.optim import OPTIMIZERS

CORE = (
    "forward-dim128", "forward-none", "sample_weights-mean", "group-int64", "update-row_wise_adagrad",
    "update-adam", "update-bfloat16-stochastic", "row_gradients-dim128", "padding-int64", "interaction-26x128-bfloat16",
    "cross-3456-float32", "exchange-fp8_e4m3", "exchange-int8", "jagged-int64", "row_cache-lru-several",
    "move_rows-mixed", "initial-dim128-named",
)  # fmt: skip
SUMS = ("sample_weights", "interaction", "cross")  # sums of products, which no order is promised for
SHAPES = (
    Workload("one id a bag", 8192, (100_000,) * 26, (1,) * 26),
    Workload("long bags", 512, (100_000,) * 32, (20,) * 32),
)
# Rows of 16-byte vectors, and bags without weights, as in SHAPES: the same variants of kernels. `make gpu` has others.
TABLES = [
    te.TableConfig("sum", 4000, 128),
    te.TableConfig("mean", 304, 64, pooling="mean"),
]
COPIED = 2 << 30
SECONDS = 75  # of one check


class Check(NamedTuple):
    """Results by Triton's kernels on a device, and what they are compared with, on that device or the CPU."""

    found: Callable[[torch.device], list[Tensor | None]]
    expected: Callable[[torch.device], list[Tensor | None]]
    exact: bool = True


def case_check(name: str) -> Check:
    """A case of ahead_of_time_cases against the references."""
    (case,) = (case for case in CASES if case.name == name)

    def call(kernels: str, device: torch.device | str) -> list[Tensor | None]:
        with on(device, kernels):
            return list(case.call() or ())

    exact = not name.startswith(SUMS)
    return Check(lambda device: call(TRITON, device), lambda _: call(REFERENCE, "cpu"), exact)


def train_steps(kernels: str, spec: te.optim.Optimizer, device: torch.device) -> list[Tensor | None]:
    """Tables and states after three steps with hot rows."""
    collection = make_collection(TABLES, spec).to(device)  # initial values have a check of their own
    with forced(kernels):
        for batch, grad in hot_steps(collection, 3, batch_size=fewer(256, 2), weighted=False):
            run_step(collection, batch.to(device), grad.to(device))
        return list(contents(collection).values())


def steps_check(name: str) -> Check:
    step = functools.partial(train_steps, spec=OPTIMIZERS[name](lr=0.05))
    return Check(lambda device: step(TRITON, device=device), lambda _: step(REFERENCE, device=torch.device("cpu")))


def repeat_step(device: torch.device, capture: bool) -> list[Tensor | None]:
    """The same step three times, replayed from a CUDA graph or eager."""
    collection = make_collection(TABLES, te.optim.Adam(lr=0.05), device=device)
    ((batch, grad),) = hot_steps(collection, 1, weighted=False)
    step = functools.partial(run_step, collection, batch.to(device), grad.to(device))
    warm_up(step)
    if capture:
        graph = torch.cuda.CUDAGraph()
        with captured(graph):
            step()
    for _ in range(3):
        graph.replay() if capture else step()
    return list(contents(collection).values())


CHECKS = {name: case_check(name) for name in CORE}
CHECKS |= {f"steps-{name}": steps_check(name) for name in ("row_wise_adagrad", "adam")}
GRAPH = "graph-adam"
CHECKS[GRAPH] = Check(lambda device: repeat_step(device, True), lambda device: repeat_step(device, False))


def compare(check: Check, device: torch.device) -> str:
    """Raise where results differ; say how many were alike."""
    found, expected = check.found(device), check.expected(device)
    assert [tensor is None for tensor in found] == [tensor is None for tensor in expected]
    pairs = [(one.cpu(), two.cpu()) for one, two in zip(found, expected, strict=True) if one is not None]
    for number, (actual, wanted) in enumerate(pairs):
        # Sums may be off by some units in the last place of the largest of them.
        loose = 0.0 if check.exact else 4 * torch.finfo(wanted.dtype).eps * float(wanted.abs().max())
        torch.testing.assert_close(
            actual, wanted, rtol=0, atol=loose, equal_nan=True, msg=lambda text, number=number: f"{number}: {text}"
        )
    te.check_errors()
    return f"{len(pairs)} tensors {'equal' if check.exact else 'close'}"


def describe_device(device: torch.device) -> str:
    """Versions, the device, and the speed of its memory."""
    import triton

    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}")
    if device.type == "cuda":
        print(torch.cuda.get_device_properties(device))
        command = ["nvidia-smi", "--query-gpu=driver_version,memory.used,temperature.gpu", "--format=csv,noheader"]
        found = shutil.which(command[0])
        print("driver", subprocess.run(command, capture_output=True, text=True).stdout if found else "not known")
    num_bytes = COPIED if device.type == "cuda" else COPIED >> 8
    source = torch.zeros(num_bytes // 2, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = Contender("copy", lambda _: None, lambda _: target.copy_(source), num_bytes)
    return f"{device}: copies {num_bytes / measure(Clock(device), [copy])[0] / 1e6:.0f} GB/s"


def measure(clock: Clock, contenders: list[Contender]) -> list[float]:
    """Median milliseconds of each."""
    outcome = clock.measure(contenders, rounds=20 if clock.on_gpu else 2)
    if outcome.errors:
        raise RuntimeError(str(outcome.errors))
    return [median(timing.samples) for timing in outcome.timings]


def run_shape(shape: Workload, device: torch.device) -> tuple[Callable[[], object], Callable[[], object], int, int]:
    """A forward, a whole step, and how many bytes each has to move."""
    (batch,), gradient = draw_batches(shape, 1, device), draw_gradient(shape, device)
    tables = OurTables(shape, device)
    forward = torch.no_grad()(lambda: tables.forward(batch))
    return (
        forward, lambda: tables.backward(tables.forward(batch), gradient), forward_bytes(batch), step_bytes(batch)
    )  # fmt: skip


def time_shapes(device: torch.device) -> str:
    clock, said = Clock(device), []
    for shape in SHAPES if clock.on_gpu else [shape.tiny() for shape in SHAPES]:
        forward, step, *sizes = run_shape(shape, device)
        for name, call, num_bytes in (("forward", forward, sizes[0]), ("step", step, sizes[1])):
            source = torch.zeros(num_bytes // 2, dtype=torch.int8, device=device)
            contenders = [("ours", call), ("copy", functools.partial(torch.empty_like(source).copy_, source))]
            ours, copy = measure(
                clock, [Contender(who, lambda _: None, lambda _, call=call: call(), 0) for who, call in contenders]
            )
            print(f"{name}, {shape}: {ours:.3f} ms; a copy of its {num_bytes:,} bytes: {copy:.3f} ms")
            said.append(f"{name} {ours / copy:.1f}")
    te.check_errors()
    return f"times as long as a copy: {', '.join(said)}"


def run_check(name: str, device: torch.device) -> None:
    begin = time.perf_counter()
    with counted_compilations() as counts:
        said = ALONE[name](device) if name in ALONE else compare(CHECKS[name], device)
    seconds = time.perf_counter() - begin
    print(f"{said}; {seconds:.1f} s; kernels compiled: {counts[False]}, from the cache: {counts[True]}")


ALONE = {"device": describe_device, "timing": time_shapes}  # the first, and the last


def run_checks(names: list[str], options: argparse.Namespace) -> list[Outcome]:
    """The checks in their processes; prints each as it ends."""
    command = [sys.executable, "-m", "tests.gpu.smoke", "--device", options.device, "--here"]
    outcomes = []
    alone = [name for name in names if name in ALONE]
    together = [name for name in names if name not in ALONE]
    for group in [alone[:1], together, alone[1:]] if len(alone) == 2 else [alone, together]:
        jobs = deque(Job(name, [*command, name], SECONDS) for name in group)
        with contextlib.closing(processes.run(jobs, options.out, options.jobs)) as ended:
            for outcome in ended:
                failed = outcome.status != processes.PASSED
                print(outcome.line + (f"\n{outcome.tail}" if failed else ""), flush=True)
                outcomes.append(outcome)
                results = [asdict(outcome) for outcome in outcomes]
                processes.write(options.out / "results.json", results)
        if outcomes and outcomes[0].job.name == "device" and outcomes[0].status != processes.PASSED:
            break  # nothing else would run either
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join([*ALONE, *CHECKS])}; all of them by default")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-smoke"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--jobs", type=int, default=8, help="checks at once")
    parser.add_argument("--here", action="store_true", help="run them in this process, and stop at the first failure")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("smoke needs a CUDA device, and a torch that sees it; TRITON_INTERPRET=1 and --device cpu rehearse it")
    if options.device == "cpu" and not interpreting():
        sys.exit("--device cpu needs TRITON_INTERPRET=1, as Triton compiles for GPUs alone")
    if unknown := set(options.names) - ALONE.keys() - CHECKS.keys():
        sys.exit(f"no checks are called {sorted(unknown)}; there are {[*ALONE, *CHECKS]}")
    names = options.names or [name for name in (*ALONE, *CHECKS) if options.device == "cuda" or name != GRAPH]
    if options.here:
        for name in names:
            run_check(name, torch.device(options.device))
        return
    outcomes = run_checks(names, options)
    counts = Counter(outcome.status for outcome in outcomes)
    print(", ".join(f"{number} {status}" for status, number in counts.items()), f"({options.out}/results.json)")
    sys.exit(set(counts) != {processes.PASSED})


if __name__ == "__main__":
    main()
