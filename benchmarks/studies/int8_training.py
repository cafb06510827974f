"""AUC and log loss on held-out rows of a DLRM that is trained with int8 tables, beside one with float32 tables.

Both start from the same seed and see the same batches. The rows are in host memory, 5 % of them in the cache; bytes are
those of the rows with their optimizer states. Differences are paired by seed. Usage:

    python -m benchmarks.studies.int8_training FOLDER

FOLDER may have a file in Criteo's format, `criteo*.tsv`, and UCI's `adult.data` and `adult.test`; MovieLens-100K is
downloaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import tritonemb as te
from benchmarks.measuring.report import publish
from benchmarks.studies.accuracy import standard_error
from benchmarks.studies.quantized import parse_jobs
from tritonemb.data import Dataset
from tritonemb.training.config import TrainConfig
from tritonemb.training.metrics import Metrics
from tritonemb.training.model import build_model
from tritonemb.types import TableOptions

DIM = 64
PLACED = TableOptions(placement="host", placed_rows=0, cache_share=0.05)
VARIANTS = {"fp32": PLACED, "int8": replace(PLACED, placed_dtype="int8")}
LIMIT = 0.0005  # of the loss of AUC
MAX_SHARE = 1 / 3  # of the bytes


def train(config: TrainConfig, data: Dataset) -> tuple[Metrics, int]:
    """Metrics of the test rows, and bytes of the tables."""
    torch.manual_seed(config.seed)
    model: Any = build_model(config, data.features, data.num_dense)
    options = {name: getattr(config, name) for name in ("batch_size", "epochs", "dense_lr", "seed")}
    trainer = te.Trainer(model, data, verbose=False, **options)
    trainer.fit()
    tables = model.embeddings.table_set.tables
    return trainer.evaluate("test"), sum(t.config.num_embeddings * t.rows.record.num_bytes for t in tables)


def compare(config: TrainConfig, data: Dataset, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row per variant: means over the seeds, and those of the differences from fp32."""
    runs: dict[str, list[tuple[Metrics, int]]] = {name: [] for name in VARIANTS}
    for seed in seeds:
        for name, tables in VARIANTS.items():
            runs[name].append(train(replace(config, seed=seed, tables=tables), data))
            print(f"{data.name}, {name}, seed {seed}: AUC {runs[name][-1][0].auc:.5f}", flush=True)
    rows = []
    for name, pairs in runs.items():
        differences = [m.auc - exact.auc for (m, _), (exact, _) in zip(pairs, runs["fp32"], strict=True)]
        losses = [m.log_loss - exact.log_loss for (m, _), (exact, _) in zip(pairs, runs["fp32"], strict=True)]
        rows.append({
            "data": data.name, "rows": name, "seeds": len(seeds), "embedding_dim": config.embedding_dim,
            "test_rows": len(data.test), "auc": statistics.fmean(m.auc for m, _ in pairs),
            "log_loss": statistics.fmean(m.log_loss for m, _ in pairs),
            "auc_difference": statistics.fmean(differences), "standard_error": standard_error(differences),
            "log_loss_difference": statistics.fmean(losses), "bytes_share": pairs[0][1] / runs["fp32"][0][1],
            "auc_of_each_seed": [m.auc for m, _ in pairs],
        })  # fmt: skip
    return rows


def main() -> None:
    (jobs, seeds), rows = parse_jobs(__doc__), []
    for data, config in jobs:
        rows += compare(config, data, seeds)
    problems = [
        f"{row['data']}, {row['rows']}: AUC {row['auc_difference']:+.5f}, {row['bytes_share']:.1%} of the bytes"
        for row in rows
        if row["auc_difference"] < -LIMIT or (row["rows"] == "int8" and row["bytes_share"] > MAX_SHARE)
    ]
    publish("int8-training", rows, problems)


if __name__ == "__main__":
    main()
