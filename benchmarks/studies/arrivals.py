"""Latency of `tritonemb serve --follow` while changed rows arrive, beside that without, in pairs of windows.

A DLRM of 26 tables of 64 columns serves MLPerf's requests, a user with 270 candidates on average, at half of its peak
and at random times. In the second window of a pair two publications of 1 % of the rows arrive. They were written
before, so that the publisher takes no time of this machine. Usage:

    python -m benchmarks.studies.arrivals [--rows 10000000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tritonemb as te
from benchmarks.bench_serving import CONNECTIONS, NUM_TABLES, P99_GOAL_MS, make_requests, measure, server, train_run
from benchmarks.measuring.report import publish
from tritonemb.serving.publisher import PUBLISHED

SHAPE, SHARE, PAIRS, ARRIVALS = "user, 270 candidates", 0.01, 5, 2
MAX_RATIO, MAX_AGE_S = 1.25, 2.0  # of the p99 with arrivals to that without, by pair; from the manifest to the scores


def write_updates(run: te.serving.Run, folder: Path, count: int) -> list[bytes]:
    """Publish the rows, then so many changes of a share of them; return the manifest after each."""
    publisher, generator, manifests = te.serving.Publisher(folder, most=count + 1), torch.Generator(), list[bytes]()
    for step in range(count + 1):
        for table in run.tables.values() if step else ():
            weight = table.collection[table.config.name].weight.detach()
            ids = torch.randperm(len(weight), generator=generator)[: int(SHARE * len(weight))]
            weight[ids] += 1e-3
        publisher.publish(run.model, step)
        manifests.append((folder / PUBLISHED).read_bytes())
    return manifests


def arrive(port: int, folder: Path, manifest: bytes, step: int, ages: list[float]) -> None:
    """Replace the manifest, and append the seconds until its step is served."""
    (folder / "next").write_bytes(manifest)
    (folder / "next").replace(folder / PUBLISHED)
    begin = time.monotonic()
    while time.monotonic() < begin + 60:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            if json.load(answer)["step"] == step:
                return ages.append(time.monotonic() - begin)
        time.sleep(0.05)
    raise TimeoutError(f"step {step} is not served after a minute")


@contextmanager
def arrivals(port: int, folder: Path, updates: list[tuple[int, bytes]], seconds: float) -> Iterator[list[float]]:
    """Let updates arrive, spread over so many seconds; the ages when each is served."""
    ages, threads = list[float](), list[threading.Timer]()
    for index, (step, manifest) in enumerate(updates):
        begin = seconds * (index + 0.5) / len(updates)
        threads.append(threading.Timer(begin, arrive, (port, folder, manifest, step, ages)))
        threads[-1].start()
    yield ages
    for thread in threads:
        thread.join()
    if len(ages) < len(updates):
        raise RuntimeError("an update is not served")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000, help="of all tables")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a window")
    options, requests, rows = parser.parse_args(), make_requests()[SHAPE], list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "published"
        run_folder = train_run(Path(name), options.rows // NUM_TABLES)
        manifests = write_updates(te.load_run(run_folder), folder, PAIRS * ARRIVALS)
        (folder / PUBLISHED).write_bytes(manifests[0])
        words = ["serve", str(run_folder), "--address", "http://127.0.0.1:{port}", "--follow", str(folder)]
        with server([sys.executable, "-m", "tritonemb", *words]) as (process, port):
            peak = max(
                measure(port, process, requests, CONNECTIONS[SHAPE], 3.0)["requests_per_s"] for _ in range(PAIRS)
            )
            updates = list(enumerate(manifests))[1:]
            for pair in range(PAIRS):
                for window_updates in ([], updates[pair * ARRIVALS : (pair + 1) * ARRIVALS]):
                    with arrivals(port, folder, window_updates, options.seconds) as ages:
                        result = measure(port, process, requests, 64, options.seconds, peak / 2)
                    rows.append({"pair": pair, "arrivals": len(window_updates), "rows": options.rows, **result})
                    rows[-1]["max_age_s"] = max(ages, default=None)
                    print({key: round(value, 2) for key, value in rows[-1].items() if value is not None}, flush=True)
    ratios = [second["p99_ms"] / first["p99_ms"] for first, second in zip(rows[::2], rows[1::2], strict=True)]
    p99, age = statistics.median(row["p99_ms"] for row in rows[1::2]), max(row["max_age_s"] for row in rows[1::2])
    print(f"p99 with arrivals {p99:.1f} ms, {statistics.median(ratios):.2f} times that without; ages up to {age:.2f} s")
    problems = [f"p99 of {p99:.1f} ms"] * (p99 > P99_GOAL_MS) + [f"ages up to {age:.2f} s"] * (age > MAX_AGE_S)
    publish("serving-arrivals", rows, problems + ["ratios of p99"] * (statistics.median(ratios) > MAX_RATIO))


if __name__ == "__main__":
    main()
