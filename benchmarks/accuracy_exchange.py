"""Train one network over 4 ranks, with embeddings and gradients that cross in several precisions; compare their AUC.

All runs of a seed start from the same weights and see the same batches; only the exchanges' codecs tell them apart.
Tables are cut by rows, cut by columns, and whole on one rank, in turn. Against float32, the mean over the seeds must
agree within 0.001 for 16 bits, and within 0.003 for 8 bits. The ranks are processes of this machine, over gloo. Usage:

    python -m benchmarks.accuracy_exchange --criteo train.txt
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import tritonemb as te
from benchmarks import report, results_file
from benchmarks.accuracy import criteo, in_memory, seen_share
from benchmarks.environment import environment
from tritonemb.data import Dataset, Split
from tritonemb.sharding import ColumnWise, ExchangePrecision, RowWise, Sharding, ShardingPlan, TableWise
from tritonemb.training.config import TrainConfig, preset
from tritonemb.training.job import build_model
from tritonemb.training.metrics import binary_metrics

WORLD = 4
EXACT = ExchangePrecision("fp32", "fp32")
TOLERANCES = {
    ExchangePrecision(): 0.001,
    ExchangePrecision("int8", "int8"): 0.003,
    ExchangePrecision("fp8_e4m3", "fp8_e5m2"): 0.003,
}
KINDS = ("pooled", "pooled gradients")


def plan_of(tables: Sequence[te.TableConfig], world: int) -> ShardingPlan:
    """Tables by falling size: by rows over all ranks, by columns over two, whole on one; and so on in turn."""
    shardings: dict[str, Sharding] = {}
    for place, table in enumerate(sorted(tables, key=lambda table: -table.num_embeddings)):
        ways = (RowWise(), ColumnWise((place % world, (place + 1) % world)), TableWise(place % world))
        shardings[table.name] = ways[place % 3]
    return ShardingPlan(shardings, world)


def even(data: Dataset, world: int) -> Dataset:
    """Without the last rows that ranks cannot share equally."""
    cut = {split: data.rows(split) for split in ("train", "test")}
    return dataclasses.replace(
        data, validation=None, **{name: rows.slice(0, len(rows) // world * world) for name, rows in cut.items()}
    )


def auc_of(config: TrainConfig, data: Dataset, exchange: ExchangePrecision, rank: int, world: int) -> dict[str, Any]:
    """Train and test with the other ranks; the config's batch is that of all ranks. The same on every rank."""
    torch.manual_seed(config.seed)
    model = build_model(config, data.features, data.num_dense)
    parallel = te.HybridParallel(model, plan_of(data.tables(config.embedding_dim), world), exchange=exchange)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=config.dense_lr)

    def batches(split: Split, epoch: int = 0) -> Any:
        size, shuffle = config.batch_size // world, split == "train"
        return data.open(split, size, seed=config.seed, epoch=epoch, shuffle=shuffle, shard=(rank, world))

    steps = 0
    for epoch in range(config.epochs):
        for batch in batches("train", epoch):
            loss = F.binary_cross_entropy_with_logits(parallel(batch.dense, batch.sparse), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    sent = parallel.group.traffic.by_kind()
    with torch.no_grad():
        mine = [(parallel(batch.dense, batch.sparse), batch.labels) for batch in batches("test")]
    told = parallel.group.all_gather_object(mine)
    logits, labels = (torch.cat([batch[part] for rank in told for batch in rank]) for part in (0, 1))
    return {
        "auc": binary_metrics(logits, labels).auc,
        "steps": steps,
        "bytes_a_step": {kind: sent[kind].total / steps for kind in KINDS},
        "saturated": sum(parallel.group.all_gather_object(parallel.saturated())),
    }


def _rank(rank: int, world: int, folder: str, config: TrainConfig, data: Dataset, seeds: Sequence[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    found: dict[ExchangePrecision, list[dict[str, Any]]] = {}
    for seed in seeds:
        for exchange in (EXACT, *TOLERANCES):
            run = auc_of(dataclasses.replace(config, seed=seed), data, exchange, rank, world)
            found.setdefault(exchange, []).append(run)
            if rank == 0:
                print(f"{data.name}, seed {seed}, {name_of(exchange)}: {run['auc']:.5f}", flush=True)
    if rank == 0:
        torch.save({(e.forward, e.backward): runs for e, runs in found.items()}, Path(folder) / "found.pt")
    dist.destroy_process_group()


def name_of(exchange: ExchangePrecision) -> str:
    """Of the vectors, and of their gradients where it is another one."""
    names = (exchange.forward, exchange.backward)
    return names[0] if names[0] == names[1] else " / ".join(names)


def compare(config: TrainConfig, data: Dataset, seeds: Sequence[int], world: int = WORLD) -> list[dict[str, Any]]:
    """A row for every precision: mean AUC over the seeds, beside that of float32, and what a rank sends in a step."""
    data = even(data, world)
    # What the ranks inherit: threads that spin while they wait take the cores from the other ranks.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (world, folder, config, data, seeds), nprocs=world)
        found = torch.load(Path(folder) / "found.pt")
    exact = [run["auc"] for run in found["fp32", "fp32"]]
    rows = []
    for exchange, tolerance in ((EXACT, 0.0), *TOLERANCES.items()):
        runs = found[exchange.forward, exchange.backward]
        aucs = [run["auc"] for run in runs]
        difference = statistics.fmean(aucs) - statistics.fmean(exact)
        rows.append(
            {
                "data": data.name,
                "optimizer": config.embedding_optimizer,
                "exchange": name_of(exchange),
                "world_size": world,
                "batch_size": config.batch_size,
                "steps": runs[0]["steps"],
                "seeds": len(seeds),
                "test_rows": len(data.test),
                "test_rows_seen_in_training": seen_share(data),
                "auc": statistics.fmean(aucs),
                "fp32_auc": statistics.fmean(exact),
                "difference": difference,
                "difference_of_each_seed": [a - b for a, b in zip(aucs, exact, strict=True)],
                "tolerance": tolerance,
                "within_tolerance": abs(difference) <= tolerance,
                "bytes_a_step": {kind: runs[0]["bytes_a_step"][kind] for kind in KINDS},
                "saturated": sum(run["saturated"] for run in runs),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--criteo", metavar="FILE", help="a file in Criteo's format; its last sixth is held out")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    arguments = parser.parse_args()
    shared, rows = environment(), []
    for name, path in (("criteo", arguments.criteo), ("movielens-100k", None)):
        if path is None and name == "criteo":
            print(f"{name}: skipped, no --{name} given")
            continue
        # A file's name is not ours to publish, so the data set goes by the name of its kind.
        data = dataclasses.replace(criteo(path) if name == "criteo" else in_memory(name, path), name=name)
        found = compare(preset(name), data, range(arguments.seeds))
        for row in found:
            print(f"{name}, {row['exchange']}: AUC {row['auc']:.4f}, difference {row['difference']:+.5f}")
        rows += [row | shared for row in found]
    path = results_file.write("exchange-accuracy", {"date": shared["date"], "rows": rows})
    print(f"wrote {path.name}")
    report.report_exchange()
    if not all(row["within_tolerance"] for row in rows):
        sys.exit("a difference is larger than its tolerance")


if __name__ == "__main__":
    main()
