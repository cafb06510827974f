"""Scores of a log by a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritonemb.data import open_for_scoring
from tritonemb.data.protocol import Feature
from tritonemb.training.checkpoint import CheckpointFolder, load_tensors, read_manifest
from tritonemb.training.config import TrainConfig, from_plain
from tritonemb.training.doctor import check_device
from tritonemb.training.job import build_model
from tritonemb.training.metrics import predict_logits
from tritonemb.training.train_state import model_tensors, read_again
from tritonemb.utils import require, written_aside

SUFFIXES = (".parquet", ".csv")
TRAINING_ONLY = ("optimizer.", "rng.", "trainer.")


@dataclass(frozen=True)
class PredictOptions:
    """Write the click probability of every row of a log.

    Example: tritonemb predict --checkpoint runs/mine --data day_23 --out scores.csv

    Args:
        checkpoint: a checkpoint, or the folder of a run: its best checkpoint, or its newest if none is marked best.
        data: the log to score: a file or a folder.
        out: the .parquet or .csv file to write: one row a row of the log, in its order.
        batch_size: rows at a time.
        device: where to compute.
    """

    checkpoint: Path
    data: str
    out: Path = Path("scores.parquet")
    batch_size: int = 8192
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.out.suffix not in SUFFIXES:
            raise ValueError(f"out must end with one of {SUFFIXES}, got {str(self.out)!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")


def predict(options: PredictOptions) -> str:
    """Score a log and write the file, aside and renamed; returns a line that says what was done.

    Raises ValueError, FileNotFoundError: the checkpoint or the log cannot be used, or the file cannot be written.
    """
    path = options.checkpoint
    for folder in (CheckpointFolder(path), CheckpointFolder(path / "checkpoints")):
        path = folder.best() or folder.latest() or path
    manifest = read_manifest(path)
    if "features" not in manifest["config"]:
        raise ValueError(f"{path} was not written by tritonemb train, so nobody knows how to build its model")
    check_device(options.device)
    values = {name: value for name, value in manifest["config"].items() if name != "converted"}
    values.get("parallel", {}).pop("readers", None)  # of older checkpoints
    features, num_dense = tuple(Feature(**each) for each in values.pop("features")), values.pop("num_dense")
    config = replace(from_plain(values, TrainConfig(), str(path)), device=options.device)
    # A row that is left out would give all later ones another row's score.
    data = open_for_scoring(options.data, replace(config.read, on_bad_row="raise"), features)
    if data.encoding != manifest["run"]["encoding"]:
        raise ValueError(
            f"{options.data} would be numbered otherwise than in training, so its ids would mean something else: the "
            "vocabulary file has changed since, or the columns are others"
        )
    model = build_model(config, features, num_dense)
    load_tensors(path, model_tensors(model), ignore=TRAINING_ONLY)
    read_again(model)
    with data.open("test", options.batch_size) as stream:
        logits = (predict_logits(model, [batch], torch.device(config.device), config.precision)[0] for batch in stream)
        num_rows = _write(options.out, logits)
    return f"{options.out}: {num_rows:,} scores by {path}"


def _write(out: Path, logits: Iterator[Tensor]) -> int:
    """Write probabilities batch by batch, so that a log of any size fits; returns the number of rows."""
    pa, num_rows = require("pyarrow"), 0
    schema = pa.schema([("score", pa.float32())])
    kind: Any = require("pyarrow.csv").CSVWriter if out.suffix == ".csv" else require("pyarrow.parquet").ParquetWriter
    out.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(out) as part, kind(part, schema) as writer:
        for chunk in logits:
            writer.write_table(pa.table([pa.array(torch.sigmoid(chunk).numpy())], schema=schema))
            num_rows += len(chunk)
    return num_rows
