"""Freshness of a served model: bytes and seconds of a publication, and how long scoring waits for an update.

A table of `--rows` rows; before each publication a share of them changes. The floor of a publication is one read of the
rows, that of an update one write of the changed ones. The age counts from the trainer's step until its rows are served
by a follower that polls. `python -m benchmarks.bench_freshness [--quick]` prints a line of JSON per size and format.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from pathlib import Path

import torch

import tritonemb as te
from tritonemb.serving import ModelFollower, Publisher


def model_of(rows: int, dim: int) -> te.nn.EmbeddingBagCollection:
    return te.nn.EmbeddingBagCollection([te.TableConfig("t", rows, dim)])


def change(model: te.nn.EmbeddingBagCollection, share: float, generator: torch.Generator) -> None:
    """Rows at random places, by the norms of a heavy tail."""
    weight = model["t"].weight.detach()
    ids = torch.randint(len(weight), (int(share * len(weight)),), generator=generator).unique()
    weight[ids] += torch.randn(len(ids), weight.shape[1], generator=generator) * 1e-2


def measure(rows: int, dim: int, share: float, format: str, publications: int) -> dict[str, object]:
    generator, folder = torch.Generator().manual_seed(0), Path(tempfile.mkdtemp(prefix="freshness-", dir="."))
    model, served = model_of(rows, dim), model_of(rows, dim)
    publisher, published = Publisher(folder, rows=format), {}
    try:
        publisher.publish(model, 0)
        (full,) = folder.glob("*.update")
        full_bytes, sizes, waits, totals, applies = full.stat().st_size, [], [], [], []
        follower, ages, done = ModelFollower(served, folder, poll=0.2), [], threading.Event()

        def score() -> None:
            while not done.is_set() or follower.pending():
                if follower.pending():
                    start = time.perf_counter()
                    follower.apply()
                    applies.append(time.perf_counter() - start)
                    ages.append(time.time() - published[follower.step])
                time.sleep(0.002)

        thread = threading.Thread(target=score)
        thread.start()
        for step in range(1, publications + 1):
            change(model, share, generator)
            published[step], start = time.time(), time.perf_counter()
            publisher.publish(model, step, wait=False)
            waits.append(time.perf_counter() - start)
            publisher.finish()
            totals.append(time.perf_counter() - start)
            sizes.append(max(folder.glob("*.update"), key=lambda path: path.stat().st_mtime_ns).stat().st_size)
            while follower.step != step:
                assert follower.problem is None, follower.problem
                time.sleep(0.01)
        done.set()
        thread.join()
        follower.close()
        if format == "fp32":
            assert torch.equal(served["t"].weight, model["t"].weight)
        return {
            "rows": rows, "dim": dim, "changed": share, "format": format, "full_bytes": full_bytes,
            "delta_bytes_per_full": sorted(sizes)[len(sizes) // 2] / full_bytes, "training_waits_s": min(waits),
            "publish_s": min(totals), "apply_ms": 1e3 * min(applies), "apply_max_ms": 1e3 * max(applies),
            "age_p99_s": sorted(ages)[min(len(ages) - 1, int(0.99 * len(ages)))],
        }  # fmt: skip
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--publications", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="100,000 rows, three publications")
    options = parser.parse_args()
    sizes, publications = ([100_000], 3) if options.quick else (options.rows, options.publications)
    for rows in sizes:
        for format in ("fp32", "int8"):
            print(json.dumps(measure(rows, options.dim, options.changed, format, publications)), flush=True)


if __name__ == "__main__":
    main()
