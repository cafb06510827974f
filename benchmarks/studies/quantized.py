"""AUC and log loss on held-out rows of a DLRM with float32 tables, and of the same model with quantized ones.

A model is trained once per seed; differences are paired by seed. Dense layers stay float32. Usage:

    python -m benchmarks.studies.quantized FOLDER

FOLDER may have a file in Criteo's format, `criteo*.tsv`, and UCI's `adult.data` and `adult.test`; MovieLens-100K is
downloaded.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tritonemb as te
from benchmarks.measuring.report import publish
from benchmarks.studies.accuracy import data_sets, standard_error
from tritonemb.data import Dataset
from tritonemb.training.config import TrainConfig, preset
from tritonemb.training.metrics import binary_metrics
from tritonemb.training.model import build_model

DIM = 64
MIXED = te.serving.ByFrequency(int8=0.05, int4=0.2, int2=0.75)  # 10 % of float32
LIMITS = {"int8": 0.0002, "int4": 0.0005, "mixed": 0.0005}  # of the loss of AUC


def in_float16(model: nn.Module, counts: Any) -> nn.Module:
    result = copy.deepcopy(model).eval()
    with torch.no_grad():
        for table in result.embeddings.tables:  # type: ignore[union-attr]
            table.weight.copy_(table.weight.half())
    return result


def quantized(dtype: Any) -> Callable[[nn.Module, dict[str, Tensor]], nn.Module]:
    return lambda model, counts: te.quantize(model, dtype, counts=counts)


VARIANTS: dict[str, Callable[[nn.Module, dict[str, Tensor]], nn.Module]] = {
    "fp32": lambda model, counts: model, "fp16": in_float16, "int8": quantized("int8"), "int4": quantized("int4"),
    "int2": quantized("int2"), "mixed": quantized(MIXED),
}  # fmt: skip


def row_bytes(model: nn.Module, variant: str) -> int:
    """Bytes of the tables' rows."""
    tables = model.embeddings.tables if hasattr(model.embeddings, "tables") else model.embeddings.children()  # type: ignore
    return sum(t.weight.numel() * (2 if variant == "fp16" else t.weight.element_size()) for t in tables)


def train(config: TrainConfig, data: Dataset) -> tuple[Any, dict[str, Tensor]]:
    """A trained model, and the uses of its rows in the training data."""
    torch.manual_seed(config.seed)
    model: Any = build_model(config, data.features, data.num_dense)
    options = {name: getattr(config, name) for name in ("batch_size", "epochs", "dense_lr", "seed")}
    te.Trainer(model, data, verbose=False, **options).fit()
    counts = {c.name: torch.zeros(c.num_embeddings, dtype=torch.int64) for c in model.embeddings.configs}
    for batch in data.open("train", config.batch_size):
        for c in model.embeddings.configs:
            for feature in c.feature_names:
                counts[c.name] += batch.sparse[feature].values().bincount(minlength=c.num_embeddings)
    return model.eval(), counts


def compare(config: TrainConfig, data: Dataset, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row per variant: means over the seeds, and those of the differences from fp32."""
    aucs: dict[str, list[float]] = {name: [] for name in VARIANTS}
    losses, sizes = {name: list[float]() for name in VARIANTS}, dict[str, int]()
    for seed in seeds:
        model, counts = train(replace(config, seed=seed), data)
        for name, make in VARIANTS.items():
            variant = make(model, counts)
            with torch.no_grad():
                batches = data.open("test", config.batch_size)
                logits = torch.cat([variant(batch.dense, batch.sparse) for batch in batches])
            metrics = binary_metrics(logits, data.test.labels)
            aucs[name].append(metrics.auc)
            losses[name].append(metrics.log_loss)
            sizes[name] = row_bytes(variant, name)
    rows = []
    for name in VARIANTS:
        differences = [auc - exact for auc, exact in zip(aucs[name], aucs["fp32"], strict=True)]
        loss_differences = [loss - exact for loss, exact in zip(losses[name], losses["fp32"], strict=True)]
        rows.append({
            "data": data.name, "rows": name, "seeds": len(seeds), "embedding_dim": config.embedding_dim,
            "test_rows": len(data.test), "auc": statistics.fmean(aucs[name]),
            "log_loss": statistics.fmean(losses[name]),
            "auc_difference": statistics.fmean(differences), "standard_error": standard_error(differences),
            "log_loss_difference": statistics.fmean(loss_differences), "bytes_share": sizes[name] / sizes["fp32"],
            "auc_of_each_seed": aucs[name],
        })  # fmt: skip
    return rows


def parse_jobs(description: str | None) -> tuple[Iterator[tuple[Dataset, TrainConfig]], range]:
    """Parse the command line: return the data sets of a folder with their configurations, and the seeds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    arguments = parser.parse_args()
    folder = arguments.folder
    files = Namespace(criteo=next((str(path) for path in sorted(folder.glob("criteo*.tsv"))), None))
    files.adult = str(folder) if (folder / "adult.data").exists() else None
    data = data_sets(files, ("movielens-100k", "criteo", "adult"))
    return ((log, replace(preset(log.name), embedding_dim=DIM)) for log in data), range(arguments.seeds)


def main() -> None:
    (jobs, seeds), rows = parse_jobs(__doc__), []
    for data, config in jobs:
        for row in compare(config, data, seeds):
            print(
                "{data}, {rows}: AUC {auc:.4f} ({auc_difference:+.5f}), log loss {log_loss:.4f} "
                "({log_loss_difference:+.5f}), {bytes_share:.1%}".format(**row),
                flush=True,
            )
            rows.append(row)
    problems = [
        f"{row['data']}, {row['rows']}: AUC {row['auc_difference']:+.5f}, below -{LIMITS[row['rows']]}"
        for row in rows
        if row["auc_difference"] < -LIMITS.get(row["rows"], 1.0)
    ]
    publish("quantized-accuracy", rows, problems)


if __name__ == "__main__":
    main()
