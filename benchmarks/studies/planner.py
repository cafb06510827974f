"""Compare what the planner predicts with what it takes: 20 plans of one model on two ranks, and the memory of 1, 2, 4.

Each rank computes on one thread. The machine is calibrated first, by the same processes. Plans are timed in turns, the
slowest rank counts, and the median over rounds. Kendall's tau is over pairs of plans whose times differ by more than
10 %. Memory is the growth of each process's resident set from before the tables are made to after some steps. Usage:

    python -m benchmarks.studies.planner
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from typing import Any

import numpy as np
import psutil
import torch

import tritonemb as te
from benchmarks.measuring import result_files
from benchmarks.measuring.environment import environment
from tests.ranks import Ranks
from tritonemb.comm.group import RankGroup
from tritonemb.sharding import (
    ColumnWise,
    CostModel,
    DataParallel,
    RowWise,
    Sharding,
    ShardingPlan,
    TableStats,
    TableWise,
)
from tritonemb.sharding.planner.calibrate import calibrate

BATCH, RANKS, ROUNDS, STEPS = 2_048, 2, 9, 3
POOLING = (1, 1, 2, 4, 8, 16, 32, 1)
TABLES = [te.TableConfig(f"t{n}", 60_000, (16, 32, 64, 128)[n % 4]) for n in range(8)]
STATS = {table.name: TableStats(float(ids)) for table, ids in zip(TABLES, POOLING, strict=True)}


def large(ranks: int) -> list[te.TableConfig]:
    """1.54 GB of weights a rank."""
    return [te.TableConfig(f"m{n}", 600_000 * ranks * (n + 1), 64) for n in range(4)]


def plans(topology: te.Topology) -> dict[str, ShardingPlan]:
    """Good and bad ones."""
    kinds: dict[str, list[Sharding]] = {
        "all on rank 0": [TableWise(0)] * 8,
        "in turns": [TableWise(n % 2) for n in range(8)],
        "halves": [TableWise(n // 4) for n in range(8)],
        "row-wise": [RowWise()] * 8,
        "column-wise": [ColumnWise()] * 8,
        "column-wise on rank 0": [ColumnWise([0, 0])] * 8,
        "data-parallel": [DataParallel()] * 8,
        "long bags on rank 1": [TableWise(int(ids > 4)) for ids in POOLING],
        "long bags row-wise": [RowWise() if ids > 4 else TableWise(0) for ids in POOLING],
        "long bags column-wise": [ColumnWise() if ids > 4 else TableWise(n % 2) for n, ids in enumerate(POOLING)],
        "short bags data-parallel": [DataParallel() if ids == 1 else TableWise(n % 2) for n, ids in enumerate(POOLING)],
        "long bags data-parallel": [DataParallel() if ids > 4 else TableWise(n % 2) for n, ids in enumerate(POOLING)],
    }
    random = np.random.default_rng(0)
    choices: list[Sharding] = [TableWise(0), TableWise(1), RowWise(), ColumnWise(), DataParallel()]
    for n in range(7):
        kinds[f"random {n}"] = [choices[at] for at in random.integers(len(choices), size=8)]
    names = [table.name for table in TABLES]
    found = {name: ShardingPlan(dict(zip(names, kind, strict=True)), RANKS) for name, kind in kinds.items()}
    return found | {"te.plan": te.plan(TABLES, topology, batch_size=BATCH, stats=STATS)}


def batch(tables: list[te.TableConfig], pooling: tuple[int, ...], samples: int, seed: int) -> te.KeyedJaggedTensor:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(pooling).repeat_interleave(samples)
    values = [
        torch.randint(table.num_embeddings, (ids * samples,), generator=random)
        for table, ids in zip(tables, pooling, strict=True)
    ]
    return te.KeyedJaggedTensor.from_lengths([table.name for table in tables], torch.cat(values), lengths)


def made(tables: list[te.TableConfig], plan: ShardingPlan) -> te.HybridParallel:
    model = te.nn.EmbeddingBagCollection(tables, optimizer=te.optim.RowWiseAdagrad(lr=0.01), device="meta")
    return te.HybridParallel(model, plan, device="cpu")


def calibrated(rank: int) -> te.Topology:
    torch.set_num_threads(1)
    return calibrate(group=RankGroup.world(), allow_busy=True)


def timed(rank: int, chosen: dict[str, ShardingPlan]) -> dict[str, list[float]]:
    """Seconds a step of each plan, by round, on this rank."""
    torch.set_num_threads(1)
    world = RankGroup.world()
    batches = [batch(TABLES, POOLING, BATCH, 100 * rank + n) for n in range(STEPS)]
    found: dict[str, list[float]] = {name: [] for name in chosen}
    models = {name: made(TABLES, plan) for name, plan in chosen.items()}
    for each in range(ROUNDS + 1):
        for name, model in models.items():
            world.barrier()
            start = time.perf_counter()
            for features in batches:
                model(features).sum().backward()
            world.barrier()
            if each:  # the first warms up
                found[name].append((time.perf_counter() - start) / STEPS)
    return found


def grown(rank: int, plan: ShardingPlan) -> float:
    """Bytes by which this process grows."""
    torch.set_num_threads(1)
    before = psutil.Process().memory_info().rss
    tables = large(plan.world_size)
    model = made(tables, plan)
    for step in range(3):
        model(batch(tables, (4,) * len(tables), BATCH, 10 * rank + step)).sum().backward()
    return float(psutil.Process().memory_info().rss - before)


def tau(predicted: list[float], measured: list[float]) -> float:
    """Kendall's, over pairs that differ by more than 10 %."""
    signs = [
        math.copysign(1, (predicted[a] - predicted[b]) * (measured[a] - measured[b]))
        for a, b in itertools.combinations(range(len(measured)), 2)
        if abs(measured[a] - measured[b]) > 0.1 * min(measured[a], measured[b])
    ]
    return sum(signs) / len(signs)


def memory() -> list[dict[str, Any]]:
    found = []
    for size in (1, 2, 4):
        tables, topology = large(size), te.Topology(size, hbm=1.8e9)
        stats = {table.name: TableStats(4.0) for table in tables}
        plan = te.plan(tables, topology, batch_size=BATCH, stats=stats)
        seen = CostModel(tables, topology, BATCH, stats=stats).predict(plan)
        ranks = Ranks(size, "spawn")
        measured = ranks.run(grown, ShardingPlan(plan.tables, size))
        ranks.close()
        found += [
            {"ranks": size, "rank": rank, "predicted": float(guess), "measured": bytes_}
            for rank, (guess, bytes_) in enumerate(zip(seen.hbm, measured, strict=True))
        ]
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args(arguments)
    of_memory = memory()
    ranks = Ranks(RANKS, "spawn")
    topology = ranks.run(calibrated)[0]
    chosen = plans(topology)
    by_rank = ranks.run(timed, {name: ShardingPlan(plan.tables, RANKS) for name, plan in chosen.items()})
    ranks.close()
    model = CostModel(TABLES, topology, BATCH, stats=STATS)
    rows = []
    for name, plan in chosen.items():
        measured = statistics.median(max(times) for times in zip(*(each[name] for each in by_rank), strict=True))
        rows.append({"plan": name, "predicted": model.predict(plan).step, "measured": measured})
    guesses, times = [row["predicted"] for row in rows], [row["measured"] for row in rows]
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    results = environment() | {
        "plans": rows, "memory": of_memory, "tau": tau(guesses, times), "median_error": statistics.median(errors),
        "span": max(times) / min(times), "busy": topology.busy,
        "memory_error": max(abs(row["predicted"] / row["measured"] - 1) for row in of_memory),
    }  # fmt: skip
    for row in rows:
        print(f"{row['plan']:28} {1e3 * row['predicted']:8.2f} ms predicted {1e3 * row['measured']:8.2f} ms measured")
    for row in of_memory:
        print(
            f"{row['ranks']} ranks, rank {row['rank']}: {row['predicted'] / 1e9:.3f} GB predicted, "
            f"{row['measured'] / 1e9:.3f} measured"
        )
    print({key: results[key] for key in ("tau", "median_error", "span", "memory_error", "busy")})
    print(result_files.write("plan", results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
