"""The first train step on a machine: seconds and CPU seconds with an empty cache of kernels, and with a full one.

Each step is in a process of its own. Its time is that from the imports on: of tables, forward, backward and update.
CPU seconds include those of the process that compiles beside it. Run alone: `make bench ARGS="-k first_step"`.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tritonemb as te
from benchmarks.measuring.result_files import ROOT, target_row

MAX_SECONDS = {"empty": 8.0, "full": 1.5}  # of the first step, by the cache of kernels
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one table": (1, {"num_embeddings": 1_000}),
    "five tables": (5, {"num_embeddings": 1_000}),
    "cached": (2, {"num_embeddings": 1_000, "placement": "host", "cache": te.CacheConfig(rows=600)}),
    "dynamic": (2, {"num_embeddings": None, "capacity": 2_000}),
}


def first_step(kind: str) -> dict[str, float]:
    num_tables, config = KINDS[kind]
    start = time.perf_counter()
    tables = [te.TableConfig(f"table{number}", embedding_dim=16, **config) for number in range(num_tables)]
    model = te.nn.EmbeddingBagCollection(tables, optimizer=te.optim.RowWiseAdagrad(lr=0.02))
    ids, lengths = torch.arange(256 * num_tables) % 500, torch.ones(256 * num_tables, dtype=torch.int64)
    model(te.KeyedJaggedTensor([table.name for table in tables], ids, lengths=lengths)).sum().backward()
    return {"seconds": time.perf_counter() - start}


def in_own_process(kind: str, cache: Path) -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    command, env = [sys.executable, "-m", "benchmarks.bench_first_step", kind], {"TRITONEMB_CACHE_DIR": str(cache)}
    process = subprocess.run(command, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, text=True, check=True)
    new_usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = new_usage.ru_utime + new_usage.ru_stime - usage.ru_utime - usage.ru_stime  # with those of imports
    return json.loads(process.stdout.splitlines()[-1]) | {"cpu_seconds": cpu}


@pytest.mark.parametrize("kind", KINDS)
def bench_first_step(kind: str, race: Any, tmp_path: Path) -> None:
    rows = {cache: in_own_process(kind, tmp_path) for cache in MAX_SECONDS}
    race.benchmark.extra_info["first_step"] = rows
    for cache, limit in MAX_SECONDS.items():
        summary = f"{rows[cache]['seconds']:.1f} s, {rows[cache]['cpu_seconds']:.1f} s of CPU, of {limit:g} s"
        share = rows[cache]["seconds"] / limit
        race.targets.append(target_row(f"first step, {cache} cache", kind, summary, share, most=1))


if __name__ == "__main__":
    print(json.dumps(first_step(sys.argv[1])))
