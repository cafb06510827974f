"""One step on two ranks, as a Chrome trace and a picture: what is computed while messages cross and data moves.

`python -m benchmarks.studies.trace` writes `docs/overlap.trace.json.gz` (open it in https://ui.perfetto.dev) and
`docs/overlap.png`: a step of a DLRM, whose messages are held back as in `bench_overlap`. `offload` as its argument
writes `docs/offload.trace.json.gz` and `docs/offload.png`: a step of transformer layers that `fully_shard` has sharded,
with parameters in host memory, and states and activations on disk. The ranks are processes of this machine. The trace
is torch's profiler's, less what is nested or lasts less than 50 µs, with the messages of each rank, or the copies and
transfers of its tiers, beside it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

import tritonemb as te
from benchmarks import bench_overlap
from benchmarks.bench_overlap import BATCH_SIZE, WIDTH, Steps, run_ranks
from benchmarks.measuring.report import ROOT, draw_if_possible, save
from tritonemb.comm.group import RankGroup
from tritonemb.offloading.tiers import DiskTier
from tritonemb.storage.store import OperationQueue

SHORTEST = 50.0  # microseconds
MESSAGE, WAIT, AUTOGRAD = "message: ", "wait for ", "autograd::engine::evaluate_function: "
WHOLE = ("step", "DistributedDataParallel.forward", "FSDP::", "Optimizer.", "record_param_comms", "c10d::")
COLLECTIVE, COPY, READ, WRITE = "gloo:", "host copy", "disk read", "disk write"
COLORS = {
    MESSAGE: "#1f77b4", WAIT: "#d62728", COLLECTIVE: "#1f77b4", COPY: "#2ca02c", READ: "#9467bd", WRITE: "#ff7f0e",
    "": "#c8c8c8",
}  # fmt: skip
LABELS = {MESSAGE: "message on its way", WAIT: "waiting for one", COLLECTIVE: "collective", "": "computing"}


def record_step(rank: int, world: int) -> list[dict[str, Any]]:
    """The events of a step, microseconds from its beginning on."""
    step = Steps(world, BATCH_SIZE, (WIDTH, WIDTH))
    held_back = list[float]()
    with bench_overlap.network(held_back):
        for _ in range(3):
            step()
        start = RankGroup.all_to_all  # the slow one

        def recorded(group: Any, message: Any, send: Any, receive: Any, kind: str) -> Any:
            if not kind.startswith("pooled"):
                return start(group, message, send, receive, kind)
            with record_function(f"{MESSAGE}{kind}"):
                arrive = start(group, message, send, receive, kind)

            def wait() -> Any:
                with record_function(f"{WAIT}{kind}"):
                    return arrive()

            return wait

        held_back.clear()
        with mock.patch.object(RankGroup, "all_to_all", recorded):
            result, _ = profiled(step)
    return [event for event in events_of(result, rank, held_back) if event["tid"] != COLLECTIVE]


def profiled(step: Callable[[], object]) -> tuple[list[dict[str, Any]], float]:
    """The events of torch's profiler, and when the step began by this process's clock."""
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step"):
            began = time.perf_counter()
            step()
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"], began


def record_offloaded_step(rank: int, world: int) -> list[dict[str, Any]]:
    """Likewise, of a step whose parameters come from host memory and whose states and activations from the disk."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True) for _ in range(6)]
    model: Any = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    x, moved = torch.randn(2, 128, 512), list[tuple[str, float, float]]()
    move, submit = DiskTier._move, OperationQueue.submit

    def noted(name: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        work()
        moved.append((name, begin, time.perf_counter()))

    def on_disk(tier: Any, span: Any, values: Any, write: bool) -> None:
        noted(WRITE if write else READ, lambda: move(tier, span, values, write))

    def in_memory(operations: Any, work: Callable[[], None]) -> Any:
        copies = operations._name == "tritonemb-offload-copy"
        return submit(operations, (lambda: noted(COPY, work)) if copies else work)

    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = te.offload(
            model, optimizer, params="host", states="disk", activations="disk", path=folder, budget="40MiB"
        )

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        with mock.patch.object(DiskTier, "_move", on_disk), mock.patch.object(OperationQueue, "submit", in_memory):
            result, began = profiled(step)
        te.offloading.close(model)
    events = [
        _event(name, rank, name, 1e6 * (begin - began), 1e6 * (end - begin))
        for name, begin, end in moved
        if begin >= began
    ]
    return [*events_of(result, rank, []), *events]


def _event(name: str, rank: int, line: str, at: float, lasts: float) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": f"rank {rank}", "tid": line, "ts": round(at, 1), "dur": round(lasts, 1)}


def events_of(found: list[dict[str, Any]], rank: int, held_back: list[float]) -> Iterator[dict[str, Any]]:
    """Those that are kept: what the rank computes, its messages, and the transfers that gloo's threads make."""
    spans = [event for event in found if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")]
    (step,) = (event for event in spans if event["name"] == "step")
    seconds, end = iter(held_back), 0.0
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        name, at, lasts = event["name"].removeprefix(AUTOGRAD), event["ts"] - step["ts"], event["dur"]
        line = COLLECTIVE if name.startswith(COLLECTIVE) else "computes"
        if name.startswith(MESSAGE):
            line, lasts = "messages", 1e6 * next(seconds)
        elif name.startswith(WHOLE) or not 0 <= at <= step["dur"] or lasts < SHORTEST:
            continue
        elif line == "computes" and not name.startswith(WAIT):
            if at < end:  # nested
                continue
            end = at + lasts
        yield _event(name, rank, line, at, lasts)


def draw(events: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import patches, pyplot

    order = ["computes", "messages", COLLECTIVE, COPY, READ, WRITE]
    lines = sorted({(event["pid"], event["tid"]) for event in events}, key=lambda line: (line[0], order.index(line[1])))
    lines.reverse()
    figure, axes = pyplot.subplots(figsize=(12, 1.2 + 0.5 * len(lines)), layout="constrained")
    kinds = dict[str, None]()
    for event in sorted(events, key=lambda event: event["name"].startswith(WAIT)):  # which are drawn above others
        kind = next(prefix for prefix in COLORS if event["name"].startswith(prefix))
        kinds[kind] = None
        place, begin, lasts = lines.index((event["pid"], event["tid"])), event["ts"] / 1000, event["dur"] / 1000
        axes.barh(place, lasts, left=begin, height=0.7, color=COLORS[kind])
        if kind == MESSAGE:
            name = event["name"].removeprefix(MESSAGE)
            axes.text(begin + lasts / 2, place, name, ha="center", va="center", fontsize=8, color="white")
    axes.set_yticks(range(len(lines)), [f"{rank} {LABELS.get(line, line)}" for rank, line in lines], fontsize=9)
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    shown = [kind for kind in COLORS if kind in kinds]
    handles = [patches.Rectangle((0, 0), 1, 1, color=COLORS[kind]) for kind in shown]
    names = [LABELS.get(kind, kind) for kind in shown]
    figure.legend(handles, names, loc="outside upper center", ncols=len(shown), frameon=False)
    save(figure, path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("overlap", "offload"), default="overlap", help="which step")
    arguments = parser.parse_args()
    record = record_offloaded_step if arguments.what == "offload" else record_step
    out = ROOT / "docs" / arguments.what
    events = [event for of_rank in run_ranks(2, record, 2) for event in of_rank]
    versions = {"torch": torch.__version__}
    with gzip.GzipFile(out.with_suffix(".trace.json.gz"), "wb", mtime=0) as file:
        file.write(json.dumps({"traceEvents": events, "otherData": versions}, indent=0).encode())
    draw_if_possible(draw, events, out.with_suffix(".png"), f"python -m benchmarks.studies.trace {arguments.what}")


if __name__ == "__main__":
    main()
