"""Files that a batch crosses, and how often: `python tools/batch_trace.py [--case CASE] [--list | --check]`

Prints, for each case, the files of the library in which a Python function runs while `te.nn.DLRM` is trained with one
batch: forward, backward and update, eager, on the CPU, in any thread. A visit is a call of a function by one of another
file, the innermost caller of the library counting. Earlier batches have compiled and loaded everything, and have filled
the caches, of a twentieth of the rows. Tables on servers have staleness 0, and the server is a thread of the process.
The sharded cases are row-wise on two gloo ranks, whose files are united, and of whose visits the larger number counts.

`--check` fails if a case has more visits than its `MAX_VISITS`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = f"{ROOT / 'tritonemb'}{os.sep}"
PLACEMENTS = {"host": "host", "disk": "disk", "servers": "server", "sharded_disk": "disk"}
MAX_VISITS = {"device": 45, "host": 105, "disk": 200, "servers": 206, "sharded": 153, "sharded_disk": 266}
WARMUP_BATCHES, BATCH_SIZE = 5, 32


class Tracer:
    """A profiler of threads: the library's files that run, and the visits to them."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.num_visits = 0
        self._recording = False
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._recording = True
        yield
        self._recording = False

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if self._recording and event == "call" and path.startswith(LIBRARY):
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(LIBRARY):
                caller = caller.f_back
            self.files.add(path.removeprefix(LIBRARY))
            self.num_visits += caller is None or caller.f_code.co_filename != path


def trace(case: str) -> tuple[list[str], int]:
    """Files that the last batch of a training crosses on this rank, and the visits to them."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    import tritonemb as te
    from tritonemb.data import make_synthetic

    torch.manual_seed(0)
    data = make_synthetic(num_train=1_000, num_test=100)
    placement: Any = PLACEMENTS.get(case, "device")
    cache = te.CacheConfig(share=0.05)
    tables = [replace(table, placement=placement, cache=cache) for table in data.tables(16)]
    model: Any = te.nn.DLRM(tables, data.num_dense, (32,), (32,), optimizer=te.optim.RowWiseAdagrad(lr=0.02))
    tracer = Tracer()  # before threads are started
    with ExitStack() as stack:
        if case == "servers":
            te.server.attach(model, stack.enter_context(te.server.start(1)), 0)
        if case.startswith("sharded"):
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
            plan = te.sharding.ShardingPlan({table.name: te.sharding.RowWise() for table in tables}, 2, 2)
            model = te.HybridParallel(model, plan)
        with data.open("train", BATCH_SIZE) as stream:
            batches = list(itertools.islice(stream, WARMUP_BATCHES + 1))
        for number, batch in enumerate(batches):
            with tracer.recording() if number == WARMUP_BATCHES else ExitStack():
                logits = model(batch.dense, batch.sparse)
                functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
    return sorted(tracer.files), tracer.num_visits


def trace_ranks(case: str) -> tuple[list[str], int]:
    """Trace a case in new processes: the files of all ranks, and the most visits of a rank."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *(torchrun if case.startswith("sharded") else []), __file__]
        subprocess.run([*command, "--case", case, "--output", folder], cwd=ROOT, env=env, check=True)
        traces = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    return sorted({path for files, _ in traces for path in files}), max(visits for _, visits in traces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=MAX_VISITS, help="trace this case alone")
    parser.add_argument("--list", action="store_true", help="print the files, too")
    parser.add_argument("--check", action="store_true", help="fail if a case has more visits than it may")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output:
        (options.output / os.environ.get("RANK", "0")).write_text(json.dumps(trace(options.case)))
        return
    too_many = []
    for case in [options.case] if options.case else MAX_VISITS:
        files, num_visits = trace_ranks(case)
        print(f"{case}: {len(files)} files, {num_visits} visits", flush=True)
        if num_visits > MAX_VISITS[case]:
            too_many.append(f"{case} has {num_visits} visits, at most {MAX_VISITS[case]} are allowed")
        if options.list:
            print(*(f"    {path}" for path in files), sep="\n")
    if options.check and too_many:
        sys.exit("; ".join(too_many))


if __name__ == "__main__":
    main()
