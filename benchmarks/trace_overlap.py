"""One step of a DLRM on two ranks, as a Chrome trace and a picture: what is computed while messages cross.

`python -m benchmarks.trace_overlap` writes `docs/overlap.trace.json.gz` (open it in https://ui.perfetto.dev) and
`docs/overlap.png`. The ranks are processes of this machine, and messages are held back as in `bench_overlap`. The trace
is torch's profiler's, less what is nested or lasts less than 50 µs, and has the messages of each rank beside it, from
their sending until a network would have brought them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import bench_overlap
from benchmarks.bench_overlap import BATCH_SIZE, WIDTH, Steps
from tests.ranks import Ranks
from tritonemb.comm.group import RankGroup

SHORTEST = 50.0  # microseconds
MESSAGE, WAIT, AUTOGRAD = "message: ", "wait for ", "autograd::engine::evaluate_function: "
WHOLE = ("step", "DistributedDataParallel.forward")
COLORS = {MESSAGE: "#1f77b4", WAIT: "#d62728", "": "#c8c8c8"}
LABELS = {MESSAGE: "message on its way", WAIT: "waiting for one", "": "computing"}


def record_step(rank: int, world: int) -> list[dict[str, Any]]:
    """The events of a step, microseconds from its beginning on."""
    step = Steps(world, BATCH_SIZE, (WIDTH, WIDTH))
    held_back = list[float]()
    with bench_overlap.network(held_back):
        for _ in range(3):
            step()
        start = RankGroup.start_all_to_all  # the slow one

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
        with mock.patch.object(RankGroup, "start_all_to_all", recorded), tempfile.TemporaryDirectory() as folder:
            with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step"):
                step()
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            found = json.loads(path.read_text())["traceEvents"]
    return list(events_of(found, rank, held_back))


def events_of(found: list[dict[str, Any]], rank: int, held_back: list[float]) -> Iterator[dict[str, Any]]:
    """Those that are kept: what the rank computes, its messages, and the transfers that gloo's threads make."""
    spans = [event for event in found if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")]
    (step,) = (event for event in spans if event["name"] == "step")
    seconds, end = iter(held_back), 0.0
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        name, at, lasts = event["name"].removeprefix(AUTOGRAD), event["ts"] - step["ts"], event["dur"]
        line = "gloo" if name.startswith("gloo:") else "computes"
        if name.startswith(MESSAGE):
            line, lasts = "messages", 1e6 * next(seconds)
        elif name in WHOLE or not 0 <= at <= step["dur"] or lasts < SHORTEST:
            continue
        elif line == "computes" and not name.startswith(WAIT):
            if at < end:  # nested
                continue
            end = at + lasts
        yield {"name": name, "ph": "X", "pid": f"rank {rank}", "tid": line, "ts": round(at, 1), "dur": round(lasts, 1)}


def draw(events: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    events = [event for event in events if event["tid"] != "gloo"]
    lines = sorted({(event["pid"], event["tid"]) for event in events}, reverse=True)
    figure, axes = pyplot.subplots(figsize=(12, 3.2), layout="constrained")
    for event in sorted(events, key=lambda event: event["name"].startswith(WAIT)):  # which are drawn above others
        kind = next(prefix for prefix in COLORS if event["name"].startswith(prefix))
        place, begin, lasts = lines.index((event["pid"], event["tid"])), event["ts"] / 1000, event["dur"] / 1000
        axes.barh(place, lasts, left=begin, height=0.7, color=COLORS[kind])
        if kind == MESSAGE:
            name = event["name"].removeprefix(MESSAGE)
            axes.text(begin + lasts / 2, place, name, ha="center", va="center", fontsize=8, color="white")
    axes.set_yticks(range(len(lines)), [f"{rank} {line}" for rank, line in lines], fontsize=9)
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [patches.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, list(LABELS.values()), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/overlap"), help="the files' path without endings")
    out = parser.parse_args().out
    ranks = Ranks(2)
    try:
        events = [event for of_rank in ranks.run(record_step, 2) for event in of_rank]
    finally:
        ranks.close()
    versions = {"torch": torch.__version__}
    with gzip.GzipFile(out.with_suffix(".trace.json.gz"), "wb", mtime=0) as file:
        file.write(json.dumps({"traceEvents": events, "otherData": versions}, indent=0).encode())
    draw(events, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
