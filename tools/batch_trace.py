"""Files that a batch crosses: `python tools/batch_trace.py [--case CASE] [--list]`

Prints, for each case, the number of files of the library in which a Python function runs, in any thread, after the
loader has returned the batch of step 5 and before the dense optimizer's step 5 ends. The loader and its threads are
left out; other steps that are prefetched or trained meanwhile count. `te.nn.DLRM` is trained on synthetic data,
eager, on the CPU; a first training in the same process has compiled and loaded everything. The sharded cases are
row-wise on two gloo ranks, whose files are united. Timing decides about two or three files.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tritonemb"
CASES = ("device", "host", "disk", "sharded", "sharded_disk")
STEP, LAST_STEP = 5, 12


class Tracer:
    """A profiler of all threads that records the code that runs while a batch is between loader and optimizer."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.num_steps = self._num_batches = 0
        self._recording = False
        self._loader_threads: set[int | None] = set()

    def start(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def wrap_data(self, data: Any) -> None:
        """Change the class of a data set, so that recording starts when one of its iterators returns batch 5."""
        methods = {
            name: self._wrap_method(method)
            for base in reversed(type(data).__mro__)
            for name, method in vars(base).items()
            if isinstance(method, FunctionType) and not name.startswith("_")
        }
        object.__setattr__(data, "__class__", type(type(data).__name__, (type(data),), methods))

    def end_step(self, *_: object) -> None:
        """Count a step of the dense optimizer; a hook."""
        self.num_steps += 1
        self._recording &= self.num_steps < STEP

    def _wrap_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._loading():
                result = method(*args, **options)
            if hasattr(type(result), "__next__") and not hasattr(type(result), "is_traced"):
                methods = {"__next__": self._wrap_next(type(result).__next__), "is_traced": True}
                object.__setattr__(result, "__class__", type("Stream", (type(result),), methods))
            return result

        return call

    def _wrap_next(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(stream: Any) -> Any:
            with self._loading():
                batch = method(stream)
            self._num_batches += 1
            self._recording |= self._num_batches == STEP
            return batch

        return call

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Record nothing in this thread, nor in those that it starts."""
        running = {thread.ident for thread in threading.enumerate()}
        self._loader_threads.add(threading.get_ident())
        try:
            yield
        finally:
            self._loader_threads |= {thread.ident for thread in threading.enumerate()} - running
            self._loader_threads.discard(threading.get_ident())

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self._recording and threading.get_ident() not in self._loader_threads:
            self.codes.add(frame.f_code)
            if event == "call" and frame.f_back is not None:
                self.codes.add(frame.f_back.f_code)


def train(case: str, tracer: Tracer | None = None) -> None:
    import torch

    import tritonemb as te
    from tritonemb.data import make_synthetic

    torch.manual_seed(0)
    data = make_synthetic(num_train=4_000, num_test=400)
    tables = data.tables(16)
    if placement := {"host": "host", "disk": "disk", "sharded_disk": "disk"}.get(case):
        cache = te.CacheConfig(share=0.05)  # so few rows are cached that every step evicts some
        tables = [replace(table, placement=placement, cache=cache) for table in tables]
    model: Any = te.nn.DLRM(tables, data.num_dense, (32,), (32,), optimizer=te.optim.RowWiseAdagrad(lr=0.02))
    if case.startswith("sharded"):
        plan = te.sharding.ShardingPlan({table.name: te.sharding.RowWise() for table in tables}, 2, 2)
        model = te.HybridParallel(model, plan)

    def adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(parameters, lr=lr)
        if tracer:
            optimizer.register_step_post_hook(tracer.end_step)
        return optimizer

    if tracer:
        tracer.wrap_data(data)
        tracer.start()
    te.Trainer(model, data, dense_optimizer=adam, batch_size=32, max_steps=LAST_STEP, verbose=False).fit()
    sys.setprofile(None)


def trace(case: str) -> list[str]:
    """Train twice, the second time traced; in a process per rank."""
    import torch.distributed as dist

    if case.startswith("sharded"):
        dist.init_process_group("gloo")
    tracer = Tracer()
    train(case)
    train(case, tracer)
    if case.startswith("sharded"):
        dist.destroy_process_group()
    if not tracer.codes or tracer.num_steps != LAST_STEP:
        raise RuntimeError("the loader's batch of step 5 or its update was not traced")
    paths = {Path(code.co_filename) for code in tracer.codes if code.co_flags & 1}  # functions, not bodies of modules
    return sorted(str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE))


def trace_ranks(case: str) -> list[str]:
    """Trace a case in new processes, and return the files of all ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *(torchrun if case.startswith("sharded") else []), __file__]
        subprocess.run([*command, "--case", case, "--output", folder], cwd=ROOT, env=env, check=True)
        return sorted({line for path in Path(folder).iterdir() for line in path.read_text().splitlines()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="trace this case alone")
    parser.add_argument("--list", action="store_true", help="print the files, too")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output:
        (options.output / os.environ.get("RANK", "0")).write_text("\n".join(trace(options.case)))
        return
    for case in [options.case] if options.case else CASES:
        files = trace_ranks(case)
        print(f"{case}: {len(files)} files")
        if options.list:
            print(*(f"    {path}" for path in files), sep="\n")


if __name__ == "__main__":
    main()
