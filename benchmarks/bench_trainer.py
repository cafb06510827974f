"""What the trainer adds to a bare loop over the same ready batches, and how long it waits for data.

The floor is the loop: forward, loss, backward, the optimizer's step. Targets: the trainer takes at most 1.05 times as
long with log, display and progress; and waits for data at most 10 % of a step from the second epoch on, where the
batches are cut as it goes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tritonemb as te
from benchmarks.measuring.clock import Contender, measure
from benchmarks.measuring.result_files import at_most, timing_rows
from tritonemb.data import Batch, Dataset, make_synthetic, open_dataset
from tritonemb.data.protocol import PositionedBatch, ReadReport, Stream
from tritonemb.training.callbacks import Callback, Log
from tritonemb.training.callbacks.console import make_display
from tritonemb.training.config import PRESETS
from tritonemb.training.run import build_model
from tritonemb.training.step import dense_parameters

WARMUP_ROUNDS = 2
OVERHEAD = 1.05
WAIT = 0.10


class Ready:
    """A data set whose batches have been cut before."""

    def __init__(self, data: Dataset, batch_size: int, num_batches: int) -> None:
        self.data = data
        found = data.open("train", batch_size, shuffle=True)
        with found:
            self.batches: list[Batch] = [batch for batch, _ in zip(found, range(num_batches), strict=False)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def splits(self) -> tuple[str, ...]:
        return ("train",)  # nothing to be evaluated in between

    def num_rows(self, split: str) -> int:
        return sum(len(batch) for batch in self.batches)

    def open(self, split: str, batch_size: int, **options: Any) -> Stream:
        return Stream(self._steps(), {})

    def _steps(self) -> Iterator[PositionedBatch]:
        return (PositionedBatch(batch, {}, ReadReport()) for batch in self.batches)


def model_and_batch_size(name: str, data: Dataset) -> tuple[torch.nn.Module, int]:
    config = PRESETS[name]
    torch.manual_seed(0)
    return build_model(config, data.features, data.num_dense), config.batch_size


def open_or_make(name: str) -> Dataset:
    if name == "synthetic":
        return make_synthetic()
    try:
        return open_dataset(name)
    except ConnectionError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["movielens-100k", "synthetic"])
def bench_overhead(name: str, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    data = open_or_make(name)
    model, batch_size = model_and_batch_size(name, data)
    ready = Ready(data, batch_size, num_batches=150)
    trainer = te.Trainer(model, ready, batch_size=batch_size, verbose=False, callbacks=[make_display(io.StringIO())])
    bare_model, _ = model_and_batch_size(name, data)
    optimizer = torch.optim.Adam(dense_parameters(bare_model), lr=1e-3)

    def bare(_: int) -> None:
        for batch in ready.batches:
            loss = F.binary_cross_entropy_with_logits(bare_model(batch.dense, batch.sparse), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    contenders = [
        Contender("trainer", lambda number: number, lambda _: trainer.fit()),
        Contender("bare loop", lambda number: number, bare),
    ]
    timings = measure(benchmark, contenders, rounds, WARMUP_ROUNDS)
    shape = f"{name}, {len(ready.batches)} steps of {batch_size}"
    moved = dict.fromkeys(("trainer", "bare loop"), sum(_num_bytes(batch) for batch in ready.batches))
    rows = timing_rows("training loop", shape, timings, moved)
    record(rows, [at_most("training loop", shape, timings[0], timings[1], OVERHEAD)])


@pytest.mark.parametrize("name", ["movielens-100k", "synthetic"])
def bench_data_wait(name: str, benchmark: Any, record: Callable[..., None]) -> None:
    data = open_or_make(name)
    model, batch_size = model_and_batch_size(name, data)

    class Waits(Callback):
        def __init__(self) -> None:
            self.shares: list[float] = []

        def on_log(self, log: Log) -> None:
            if log.epoch > 0:
                self.shares.append(log.data_wait)

    waits = Waits()
    epochs = 3
    trainer = te.Trainer(
        model, data, batch_size=batch_size, epochs=epochs, verbose=False, log_every=20, callbacks=[waits]
    )
    benchmark.pedantic(trainer.fit, rounds=1)
    share = sum(waits.shares) / len(waits.shares)
    target = {
        "op": "data wait from the second epoch on",
        "shape": f"{name}, batches of {batch_size}",
        "measured": "wait / step",
        "ratio": share,
        "target": f"at most {WAIT:g}",
        "met": share <= WAIT,
    }
    record([], [target])


def _num_bytes(batch: Batch) -> int:
    return sum(tensor.nbytes for tensor in (batch.dense, batch.labels, batch.sparse.values()))
