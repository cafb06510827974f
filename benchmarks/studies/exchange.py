"""Train one network over 4 ranks, with embeddings and gradients that cross in several precisions; compare their AUC.

All runs of a seed start from the same weights and see the same batches; only the exchanges' codecs tell them apart.
Tables are cut by rows, cut by columns, and whole on one rank, in turn. Against float32, the mean over the seeds must
agree within 0.001 for 16 bits, and within 0.003 for 8 bits. The ranks are processes of this machine, over gloo. Usage:

    python -m benchmarks.studies.exchange --criteo train.txt
    python -m benchmarks.studies.exchange --bytes

`--bytes` instead counts what each kind of exchange sends in a step of a small example, beside its formula and the least
that would do.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import pickle
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tritonemb as te
from benchmarks.measuring import report
from benchmarks.studies.accuracy import data_sets, paired, seen_share
from tritonemb.data import Dataset
from tritonemb.sharding import ColumnWise, DataParallel, ExchangePrecision, RowWise, Sharding, ShardingPlan, TableWise
from tritonemb.training.config import TrainConfig, preset
from tritonemb.training.model import build_model

WORLD = 4
EXACT = ExchangePrecision("fp32", "fp32")
TOLERANCES = {
    ExchangePrecision(): 0.001,
    ExchangePrecision("int8", "int8"): 0.003,
    ExchangePrecision("fp8_e4m3", "fp8_e5m2"): 0.003,
}
KINDS = ("pooled", "pooled gradients")
Begin = Callable[[int], object] | None


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
    trainer = te.Trainer(
        parallel, data, batch_size=config.batch_size // world, epochs=config.epochs, dense_lr=config.dense_lr,
        seed=config.seed, verbose=False,
    )  # fmt: skip
    steps, sent = trainer.fit().steps, parallel.group.traffic.by_kind()
    return {
        "auc": trainer.evaluate("test").auc,
        "steps": steps,
        "bytes_a_step": {kind: sent[kind].total / steps for kind in KINDS},
        "saturated": sum(parallel.group.all_gather_object(parallel.saturated())),
    }


def on_ranks(world: int, work: Callable[..., Any], *args: Any, begin: Begin = None) -> list[Any]:
    """Return values of `work(rank, world, *args)` by rank; each is a process of this machine, with one thread.

    `begin(rank)` is called before the processes connect.
    """
    # What the ranks inherit: threads that spin while they wait take the cores from the other ranks.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (world, folder, begin, work, *args), nprocs=world)
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, begin: Begin, work: Callable[..., Any], *args: Any) -> None:
    if begin is not None:
        begin(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(work(rank, world, *args)))
    dist.destroy_process_group()


def runs_of(rank: int, world: int, config: TrainConfig, data: Dataset, seeds: Sequence[int]) -> dict[str, list[Any]]:
    """By precision, of each seed."""
    result: dict[str, list[Any]] = {}
    for seed in seeds:
        for exchange in (EXACT, *TOLERANCES):
            run = auc_of(dataclasses.replace(config, seed=seed), data, exchange, rank, world)
            result.setdefault(name_of(exchange), []).append(run)
            if rank == 0:
                print(f"{data.name}, seed {seed}, {name_of(exchange)}: {run['auc']:.5f}", flush=True)
    return result


def name_of(exchange: ExchangePrecision) -> str:
    """Of the vectors, and of their gradients where it is another one."""
    names = (exchange.forward, exchange.backward)
    return names[0] if names[0] == names[1] else " / ".join(names)


def compare(config: TrainConfig, data: Dataset, seeds: Sequence[int], world: int = WORLD) -> list[dict[str, Any]]:
    """A row for every precision: mean AUC over the seeds, beside that of float32, and what a rank sends in a step."""
    data = even(data, world)
    result = on_ranks(world, runs_of, config, data, seeds)[0]
    exact = [run["auc"] for run in result["fp32"]]
    rows = []
    for exchange, tolerance in ((EXACT, 0.0), *TOLERANCES.items()):
        runs = result[name_of(exchange)]
        row = paired([run["auc"] for run in runs], exact)
        rows.append(row | {
            "data": data.name, "optimizer": config.embedding_optimizer, "exchange": name_of(exchange),
            "world_size": world, "batch_size": config.batch_size, "steps": runs[0]["steps"], "seeds": len(seeds),
            "test_rows": len(data.test), "test_rows_seen_in_training": seen_share(data),
            "fp32_auc": statistics.fmean(exact), "tolerance": tolerance,
            "within_tolerance": abs(row["difference"]) <= tolerance, "bytes_a_step": runs[0]["bytes_a_step"],
            "saturated": sum(run["saturated"] for run in runs),
        })  # fmt: skip
    return rows


ROWS, DIM, SAMPLES, LENGTH = 2_000, 64, 256, 4  # of the example: a table, and on each rank samples with so many ids
CODE, CODE_BACK = 2, 2  # bytes of the default codecs


def one_step(rank: int, world: int, pooled: bool, sharding: Sharding, optimizer: Any) -> dict[str, int]:
    """Bytes that a rank sends in a step of the example, by kind."""
    kind, pooling = (te.nn.EmbeddingBagCollection, "sum") if pooled else (te.nn.EmbeddingCollection, "none")
    tables = kind([te.TableConfig("t", ROWS, DIM, pooling=pooling)], optimizer)  # type: ignore[arg-type]
    parallel = te.HybridParallel(tables, ShardingPlan({"t": sharding}, world))
    ids = ids_of(rank)
    batch = te.KeyedJaggedTensor(["t"], ids.flatten(), offsets=torch.arange(0, ids.numel() + 1, LENGTH))
    parallel.group.traffic.reset()
    result = parallel(batch)
    (result if pooled else result["t"].values()).sum().backward()
    return {kind: sent.total for kind, sent in parallel.group.traffic.by_kind().items()}


def ids_of(rank: int) -> torch.Tensor:
    """A few are much more frequent than others, as in most logs."""
    uniform = torch.rand(SAMPLES, LENGTH, generator=torch.Generator().manual_seed(rank))
    return (uniform**3 * ROWS).long()


def sent_in_a_step(world: int, *args: Any) -> dict[str, float]:
    """Bytes by kind that a rank sends on average."""
    result = on_ranks(world, one_step, *args)
    return {kind: statistics.fmean(item[kind] for item in result) for kind in result[0]}


def expected_bytes(world: int) -> dict[str, tuple[float, float]]:
    """By kind, what its formula says that a rank of the example sends, and the least; see `FORMULAS`."""
    distinct = [ids_of(rank).unique() for rank in range(world)]
    share, peers = ROWS // world, world - 1
    ids = statistics.fmean(int((ids_of(rank) // share != rank).sum()) for rank in range(world))
    other = statistics.fmean(int((rows // share != rank).sum()) for rank, rows in enumerate(distinct))
    rows, ranks_of_row = torch.cat(distinct).unique(return_counts=True)
    union, most = len(rows), max(map(len, distinct))
    pooled, of_columns = SAMPLES * DIM * peers, union * (DIM // world) * peers
    reduced = int((ranks_of_row + world - 2).sum()) / world * DIM * CODE_BACK
    gathered = -(-most * (4 + CODE_BACK * DIM) // 8) * 8 * peers
    return {
        "sizes": (40 * peers, 0),
        "ids": (4 * SAMPLES * peers + 4 * ids, ids * math.log2(share) / 8),
        "pooled": (pooled * CODE, pooled * CODE),
        "pooled gradients": (pooled * CODE_BACK, pooled * CODE_BACK),
        "rows": (other * DIM * CODE, other * DIM * CODE),
        "rows gradients": (other * DIM * CODE_BACK, other * DIM * CODE_BACK),
        "row gradients": (gathered, min(gathered, reduced)),
        "row squares": (4 * union * peers, 4 * union * peers),
        "row columns": (4 * 4 * of_columns, 8 * union * peers),
    }


FORMULAS = {  # by kind: an example of its sharding, what is sent, the least
    "sizes": ("any", "40 (R - 1)", "none, if buffers had fixed sizes"),
    "ids": ("row-wise", "4 B (R - 1) + 4 I", "log2(rows of a shard) bits an id"),
    "pooled": ("row-wise", "B D c (R - 1)", "the same: a reduce-scatter"),
    "pooled gradients": ("row-wise", "B D c (R - 1)", "the same: an all-gather"),
    "rows": ("row-wise, sequence", "V D c", "the same"),
    "rows gradients": ("row-wise, sequence", "V D c", "the same"),
    "row gradients": ("data-parallel", "M (4 + D c) (R - 1)", "each row to be added once, and its sum sent to all"),
    "row squares": ("column-wise, RowWiseAdagrad", "4 U s (R - 1)", "one number a row"),
    "row columns": ("column-wise, LAMB", "16 U D / R (R - 1)", "two norms a row"),
}


def report_bytes() -> None:
    """Measure the example on 2 and 4 ranks, compare with the formulas, and write the table into the page."""
    adagrad, lamb = te.optim.RowWiseAdagrad(), te.optim.LAMB()
    runs: tuple[Any, ...] = (
        (True, RowWise(), adagrad), (False, RowWise(), adagrad), (True, DataParallel(), adagrad),
        (True, ColumnWise(), adagrad), (True, ColumnWise(), lamb),
    )  # fmt: skip
    places = {"rows": 1, "rows gradients": 1, "row gradients": 2, "row squares": 3, "row columns": 4}
    columns: list[list[str]] = [[] for _ in FORMULAS]
    for world in (2, 4):
        actual, expected = [sent_in_a_step(world, *run) for run in runs], expected_bytes(world)
        for column, kind in zip(columns, FORMULAS, strict=True):
            sent = actual[places.get(kind, 0)][kind]
            if sent != expected[kind][0]:
                sys.exit(f"{kind}: {sent} bytes a step and rank, the formula says {expected[kind][0]}")
            column += [f"{sent:,.0f}", f"{expected[kind][1]:,.0f}"]
    header = ["kind", "sharding", "sent by a rank", "least", "2 ranks", "least", "4 ranks", "least"]
    lines = [[f"`{kind}`", *FORMULAS[kind], *column] for kind, column in zip(FORMULAS, columns, strict=True)]
    report.update("docs/parallel.md", "bytes", report.markdown_table(header, lines, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--criteo", metavar="FILE", help="a file in Criteo's format; its last sixth is held out")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--bytes", action="store_true", help="count the bytes of a small example instead")
    arguments = parser.parse_args()
    if arguments.bytes:
        report_bytes()
        return
    rows = []
    for data in data_sets(arguments, ("criteo", "movielens-100k")):
        rows += compare(preset(data.name), data, range(arguments.seeds))
        for row in rows[-1 - len(TOLERANCES) :]:
            print("{data}, {exchange}: AUC {auc:.4f}, difference {difference:+.5f}".format(**row))
    wrong = not all(row["within_tolerance"] for row in rows)
    report.publish("exchange-accuracy", rows, ["a difference is larger than its tolerance"] * wrong)


if __name__ == "__main__":
    main()
