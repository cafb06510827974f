"""What the trainer adds to a bare loop over the same ready batches, and what a reader adds to the trainer.

The floor is the loop: forward, loss, backward, the optimizer's step. Target: the trainer takes at most 1.05 times as
long with log, display and progress. The floor of a trainer that reads a file is the same trainer on ready batches, plus
pyarrow alone (`bench_reader`) where reader and steps share all cores. Targets: 1.15 times as long for text, 1.1 for
Parquet.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tritonemb as te
from benchmarks.bench_reader import WHOLE, write_parquet, write_text
from benchmarks.measuring.clock import Contender
from benchmarks.measuring.result_files import Goal
from tritonemb.data import Batch, ClickLog, Dataset, LogOptions, make_synthetic, open_dataset
from tritonemb.data.protocol import PositionedBatch, ReadReport, Stream
from tritonemb.training.callbacks.console import make_display
from tritonemb.training.config import PRESETS
from tritonemb.training.model import build_model, dense_parameters


class Ready:
    """A data set whose batches have been cut before."""

    def __init__(self, data: Any, batch_size: int, num_batches: int) -> None:
        self.data = data
        with data.open("train", batch_size, shuffle=True) as stream:
            self.batches: list[Batch] = [batch for batch, _ in zip(stream, range(num_batches), strict=False)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def splits(self) -> tuple[str, ...]:
        return ("train",)  # nothing to be evaluated in between

    def num_rows(self, split: str) -> int:
        return sum(len(batch) for batch in self.batches)

    def open(self, split: str, batch_size: int, **options: Any) -> Stream:
        def steps() -> Iterator[PositionedBatch]:
            return (PositionedBatch(batch, {}, ReadReport()) for batch in self.batches)

        return Stream(steps(), {})


def make_model(name: str, data: Dataset) -> tuple[torch.nn.Module, int]:
    """With the batch size of its preset."""
    torch.manual_seed(0)
    return build_model(PRESETS[name], data.features, data.num_dense), PRESETS[name].batch_size


def open_or_make(name: str) -> Dataset:
    try:
        return make_synthetic() if name == "synthetic" else open_dataset(name)
    except ConnectionError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["movielens-100k", "synthetic"])
def bench_overhead(name: str, race: Any) -> None:
    data = open_or_make(name)
    model, batch_size = make_model(name, data)
    ready = Ready(data, batch_size, num_batches=150)
    trainer = te.Trainer(model, ready, batch_size=batch_size, verbose=False, callbacks=[make_display(io.StringIO())])
    bare_model, _ = make_model(name, data)
    optimizer = torch.optim.Adam(dense_parameters(bare_model), lr=1e-3)

    def bare(_: int) -> None:
        for batch in ready.batches:
            loss = F.binary_cross_entropy_with_logits(bare_model(batch.dense, batch.sparse), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    parts = [part for batch in ready.batches for part in (batch.dense, batch.labels, batch.sparse.values())]
    num_bytes = sum(part.nbytes for part in parts)
    contenders = [
        Contender("trainer", lambda number: number, lambda _: trainer.fit(), num_bytes),
        Contender("bare loop", lambda number: number, bare, num_bytes),
    ]
    shape = f"{name}, {len(ready.batches)} steps of {batch_size}"
    race("training loop", shape, contenders, Goal(0, 1, most=1.05))


@pytest.mark.parametrize("kind", ["text", "strings", "integers"])
def bench_files(kind: str, tmp_path: Path, race: Any) -> None:
    """A small model, whose steps take little more CPU time than the reader."""
    text = write_text(tmp_path / "day_0", 20_000_000)
    file = text if kind == "text" else write_parquet(text, kind)
    log = ClickLog(file.path, LogOptions(split=WHOLE))
    options = replace(PRESETS["criteo-kaggle"], bottom_mlp=(64, 16), top_mlp=(64,))
    ready, fits = Ready(log, options.batch_size, num_batches=1000), dict[str, Any]()
    for name, data in {"file": log, "ready batches": ready}.items():
        torch.manual_seed(0)
        model = build_model(options, log.features, log.num_dense)
        fits[name] = te.Trainer(model, data, batch_size=options.batch_size, verbose=False).fit
    num_bytes = sum(batch.layout.num_bytes for batch in ready.batches)
    contenders = [Contender(name, lambda _: None, lambda _, fit=fit: fit(), num_bytes) for name, fit in fits.items()]
    shape = f"{kind}, {len(ready.batches)} steps of {options.batch_size}"
    race("train on a file", shape, contenders, Goal(0, 1, most=1.15 if kind == "text" else 1.1), most_rounds=10)
