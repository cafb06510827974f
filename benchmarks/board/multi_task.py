"""Two labels of UCI Adult, income and whether a person never married, by MMoE, PLE and single-task models.

A single-task model is the MMoE of one label, so each label has as many experts, gates and layers for itself as both
labels share; it has the same features, without marital status. Learning rate and number of epochs of each model are
chosen by the mean AUC of the last sixth of the training rows; then the model is trained anew on all training rows, and
the test rows are evaluated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tritonemb as te
from benchmarks.board import Cell
from tritonemb.data import Dataset, load_adult
from tritonemb.models import PLE, MMoE

LABELS = ("income", "marital_status")
RATES, MAX_EPOCHS, BATCH_SIZE = (1e-3, 3e-3), 8, 512
MODELS = {"mmoe": partial(MMoE, top_mlp=(64, 32)), "ple": partial(PLE, top_mlp=(64, 64, 32), num_experts=2)}


def one_label(data: Dataset, index: int) -> Dataset:
    """Return the data with one of the labels."""
    splits = {name: getattr(data, name) for name in ("train", "validation", "test")}
    splits = {name: rows and replace(rows, labels=rows.labels[:, index].contiguous()) for name, rows in splits.items()}
    return replace(data, labels=(), **splits)


def trainer(model: str, data: Dataset, rate: float, epochs: int, seed: int) -> te.Trainer:
    torch.manual_seed(seed)
    optimizer = te.optim.RowWiseAdagrad(lr=0.02)
    module = MODELS[model](data.tables(16), data.num_dense, len(data.labels) or 1, optimizer=optimizer)
    return te.Trainer(module, data, dense_lr=rate, epochs=epochs, batch_size=BATCH_SIZE, seed=seed, verbose=False)


def aucs(metrics: te.training.Metrics, names: Sequence[str]) -> list[float]:
    return [metrics.labels[name].auc for name in names] if metrics.labels else [metrics.auc]


def choose(model: str, data: Dataset, seed: int) -> tuple[float, int]:
    """Return the learning rate and the number of epochs with the largest mean AUC of the validation rows."""
    num_rows = len(data.train) - len(data.train) // 6
    data = replace(data, train=data.train.slice(0, num_rows), validation=data.train.slice(num_rows, len(data.train)))
    results = dict[tuple[float, int], float]()
    for rate in RATES:
        run = trainer(model, data, rate, 1, seed)
        for epoch in range(1, MAX_EPOCHS + 1):
            run.fit()
            results[rate, epoch] = run.evaluate("validation").auc
    return max(results, key=lambda options: results[options])


def run(model: str, data: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Return the AUC of each label on the test rows, of a model of both, or of a single-task model of each."""
    rows = load_adult(data, LABELS)
    parts = [one_label(rows, index) for index in range(len(LABELS))] if model == "single" else [rows]
    name, values, options = "mmoe" if model == "single" else model, list[float](), list[Any]()
    for part in parts:
        rate, epochs = choose(name, part, seed)
        final = trainer(name, part, rate, epochs, seed)
        final.fit()
        values += aucs(final.evaluate("test"), LABELS)
        options.append({"dense_lr": rate, "epochs": epochs})
    return {"metrics": {f"AUC {label}": value for label, value in zip(LABELS, values, strict=True)}, "options": options}


NOTES = {
    "single": "a model of each label; the other cells must reach it",
    "mmoe": "4 experts of 64, towers of 32",
    "ple": "2 levels of 2 experts of 64 per label and 2 shared ones; towers of 32",
}
CELLS = [
    Cell(
        f"adult-{model}", "Adult, two labels", {"single": "single-task", "mmoe": "MMoE", "ple": "PLE"}[model],
        partial(run, model), seeds=5, baseline="" if model == "single" else "adult-single", notes=notes,
    )
    for model, notes in NOTES.items()
]  # fmt: skip
