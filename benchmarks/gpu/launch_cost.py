"""What a step of the embeddings costs the host with Triton's kernels: time, launches by kernel, values read and sent.

    python benchmarks/gpu/launch_cost.py [--tables 1 26 1000] [--rounds 200] [--ranks 2] [--about]

`--ranks` counts instead the launches of a hybrid-parallel step of a DLRM on so many ranks, from exchanged ids to the
loss and back: those of Triton's kernels, ours and Inductor's, and of PyTorch's operators that compute; of the model
itself and compiled as one graph.

`--about` prints versions, the GPU, and how fast it copies, and gathers rows of 512 bytes.

Without a GPU, Triton compiles for sm_90 and its launchers launch into a stub of the driver: results are garbage, but
launches and the host's time are those of a GPU, less what its driver would take.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # called as a file, Python puts only this folder there

from benchmarks.measuring.clock import Clock, Contender
from tests.gpu.driver import activate, rehearsing

BATCH_SIZE, DIM = 8, 64
READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal")  # the host waits for those
SENDS = ("aten::lift_fresh", "aten::pin_memory", "aten::_pin_memory")  # host memory, which no graph's pool has
ONE_LAUNCH = ("mm", "addmm", "cat")  # whatever it calls on a CPU
NO_LAUNCH = (
    "as_strided", "as_strided_", "detach", "detach_", "empty", "empty_like", "empty_strided", "expand", "flatten",
    "item", "lift_fresh", "linear", "matmul", "narrow", "new_empty", "permute", "reshape", "resize_",
    "resolve_conj", "resolve_neg", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "to",
    "transpose", "unsqueeze", "view", "view_as", "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias",
)  # fmt: skip
NO_GPU = "No GPU here: Triton launches into a stub of the driver; only launches and the host's time mean something."


@contextmanager
def counted_launches(launches: Counter[str], seconds: defaultdict[str, float]) -> Iterator[None]:
    """Count and time every launch by kernel."""
    from tritonemb.kernels import triton_utils

    launch = triton_utils.launch

    def timed(kernel: Any, *args: Any, **options: Any) -> None:
        begin = time.perf_counter()
        launch(kernel, *args, **options)
        seconds[kernel.__name__] += time.perf_counter() - begin
        launches[kernel.__name__] += 1

    with ExitStack() as stack:  # the modules of kernels import the launcher by name
        for name, module in list(sys.modules.items()):
            if name.startswith("tritonemb.kernels.") and getattr(module, "launch", None) is launch:
                stack.enter_context(mock.patch.object(module, "launch", timed))
        yield


def measure(num_tables: int, rounds: int) -> tuple[list[float], Counter[str], defaultdict[str, float], list[int]]:
    """Seconds of each step: forward, grouping, backward, update; launches and their seconds, by kernel.

    At last how many values of a device a step reads, and how many tensors it makes of the host's values: a step that
    does neither can be captured in a CUDA graph, as all its memory comes from the device's allocator.
    """
    import tritonemb as te
    from tritonemb.ops.registry import use_kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tables = [te.TableConfig(f"t{i}", num_embeddings=1000, embedding_dim=DIM) for i in range(num_tables)]
    collection = te.nn.EmbeddingBagCollection(tables, optimizer=te.optim.RowWiseAdagrad(lr=0.1), device=device)
    values = torch.randint(1000, (num_tables * BATCH_SIZE,), device=device)
    batch = te.KeyedJaggedTensor.from_lengths([table.name for table in tables], values, torch.ones_like(values))
    grad = torch.randn(BATCH_SIZE, num_tables * DIM, device=device)
    launches, seconds, steps = Counter[str](), defaultdict[str, float](float), []
    with use_kernels("triton"):
        collection(batch).backward(grad)  # compiles
        with counted_launches(launches, seconds):
            for _ in range(rounds):
                begin = time.perf_counter()
                collection(batch).backward(grad)
                steps.append(time.perf_counter() - begin)
                if device == "cuda":
                    torch.cuda.synchronize()  # off the clock, so that the host never waits for a full queue
        with torch.autograd.profiler.profile() as recorded:
            collection(batch).backward(grad)
    results = [sum(event.name in names for event in recorded.function_events) for names in (READS, SENDS)]
    return steps, launches, seconds, results


def launches_of_dlrm(rank: int, world: int) -> dict[bool, Counter[str]]:
    """By kernel or operator; of a step that is not compiled, and of one that is. Never on a GPU."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from benchmarks.bench_overlap import Steps
    from tritonemb.ops.registry import use_kernels

    activate()
    step, launches, result = Steps(world, 64, (64, 64)), Counter[str](), {}

    def count(kernel: Any, *_: Any, **__: Any) -> None:
        launches[kernel.fn.__name__] += 1

    with (
        torch._inductor.config.patch(cpu_backend="triton", compile_threads=1, force_disable_caches=True),
        mock.patch.object(CachingAutotuner, "precompile"),
        mock.patch.object(CachingAutotuner, "run", count),
        ExitStack() as stack,
    ):
        for number in range(3):  # the first two compile
            if number == 2:
                stack.enter_context(counted_launches(launches, defaultdict(float)))
            for compiled in (False, True):
                features = step.prefetch(compiled)  # whose sizes the host reads
                launches.clear()
                with use_kernels("triton"), torch.autograd.profiler.profile() as recorded:
                    step.compute(features, compiled)
                operators = [event for event in recorded.function_events if event.cpu_parent is None]
                result[compiled] = launches + Counter(name for event in operators for name in _computing(event))
    return result


def _computing(event: Any) -> list[str]:
    """The operators in a profiler's event, itself or within it, that launch a kernel on a GPU."""
    inside = [name for child in event.cpu_children for name in _computing(child)]
    library, _, name = event.name.partition("::")
    launches = library == "aten" and name not in NO_LAUNCH and (not inside or name in ONE_LAUNCH)
    return [event.name] if launches else inside


def print_device(num_bytes: int = 2 << 30) -> None:
    """Bytes, read and written, are many times any cache."""
    import triton

    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}")
    device = torch.device("cpu" if rehearsing() else "cuda")
    if rehearsing():
        num_bytes >>= 8
    elif not torch.cuda.is_available():
        sys.exit("there is no CUDA device, or torch does not see it")
    else:
        print(torch.cuda.get_device_properties(device))
        command = ["nvidia-smi", "--query-gpu=driver_version,memory.used,temperature.gpu", "--format=csv,noheader"]
        tool = shutil.which(command[0])
        print("driver", subprocess.run(command, capture_output=True, text=True).stdout if tool else "not known")
    source = torch.zeros(num_bytes // 1024, 128, device=device)
    target, rows = torch.empty_like(source), torch.randint(len(source), (len(source),), device=device)
    runs = {"copies": lambda: target.copy_(source), "gathers": lambda: torch.index_select(source, 0, rows, out=target)}
    contenders = [Contender(name, lambda _: None, lambda _, run=run: run(), num_bytes) for name, run in runs.items()]
    outcome = Clock(device).measure(contenders, 20)
    if outcome.errors:
        sys.exit(str(outcome.errors))
    rates = [f"{timing.name} {num_bytes / timing.percentile(50) / 1e6:.0f} GB/s" for timing in outcome.timings]
    print(f"{device}: {', '.join(rates)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time and launches of a step of the embeddings.")
    parser.add_argument("--tables", type=int, nargs="+", default=[26])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--about", action="store_true")
    args = parser.parse_args()
    if args.about:
        print_device()
        return
    if args.ranks:
        from benchmarks.bench_overlap import run_ranks

        for compiled, result in run_ranks(args.ranks, launches_of_dlrm, args.ranks)[0].items():
            print(f"{'compiled' if compiled else 'not compiled'}: {result.total()} launches, {dict(result)}")
        return
    if not torch.cuda.is_available():
        print(NO_GPU)
        activate()
    summary = []
    for num_tables in args.tables:
        steps, launches, seconds, (reads, sends) = measure(num_tables, args.rounds)
        kernels = [
            f"  {kernel:28}{number / args.rounds:6.1f} launches{seconds[kernel] / args.rounds * 1e6:9.1f} us"
            for kernel, number in launches.most_common()
        ]
        total = sum(launches.values()) / args.rounds
        print("\n".join([f"{num_tables} tables:", *kernels]))
        summary.append(
            f"{num_tables} tables: {median(steps) * 1e6:.0f} us per step on the host, least {min(steps) * 1e6:.0f}; "
            f"{total:.1f} launches and torch.sort's; values that the host reads: {reads}, sends: {sends}"
        )
    print("\n".join(summary))


if __name__ == "__main__":
    main()
