"""What the trainer adds to a bare loop over the same ready batches.

The floor is the loop: forward, loss, backward, the optimizer's step. Target: the trainer takes at most 1.05 times as
long with log, display and progress.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tritonemb as te
from benchmarks.measuring.clock import Contender
from benchmarks.measuring.result_files import Goal
from tritonemb.data import Batch, Dataset, make_synthetic, open_dataset
from tritonemb.data.protocol import PositionedBatch, ReadReport, Stream
from tritonemb.training.callbacks.console import make_display
from tritonemb.training.config import PRESETS
from tritonemb.training.run import build_model
from tritonemb.training.step import dense_parameters


class Ready:
    """A data set whose batches have been cut before."""

    def __init__(self, data: Dataset, batch_size: int, num_batches: int) -> None:
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
