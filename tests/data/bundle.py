"""Many data sets as one, since reader processes take seconds to start: a split is named "<data set>/<split>"."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tritonemb.data import Batch, Data, Feature, Stream
from tritonemb.data.protocol import PositionedBatch, ReadReport
from tritonemb.jagged import KeyedJaggedTensor

SIZES = (1, 2, 7, 60)  # rows of the data sets "<kind>-<size>"
KINDS = ("memory", "tsv", "gz", "parquet", "files")


class OddError(Exception):
    """Of no built-in type."""


@dataclass
class Bundle:
    """Besides those given, data sets that behave badly; `folder` is where they write what they do."""

    data: dict[str, Data]
    folder: Path
    name: str = field(default="bundle")
    features: tuple[Feature, ...] = ()
    num_dense: int = 0
    encoding: str = "of a bundle"
    best_auc: float | None = None

    def splits(self) -> tuple[str, ...]:
        return ()

    def open(self, split: str, batch_size: int, **how: Any) -> Stream:
        name, _, own = split.partition("/")
        if name in self.data:
            return self.data[name].open(own, batch_size, **how)  # type: ignore[arg-type]
        steps = getattr(self, f"_{name}")(own, batch_size)
        return Stream(steps, {"of": 0, "number": 0})

    def _endless(self, mark: str, batch_size: int) -> Iterator[PositionedBatch]:
        """Marks every batch that it makes, and its end."""
        try:
            for number in itertools.count(1):
                self._mark(f"made {mark}")
                yield self._step(number, batch_size)
        finally:
            self._mark(f"ended {mark}")

    def _slow(self, mark: str, batch_size: int) -> Iterator[PositionedBatch]:
        """One batch, and then one that takes a while."""
        try:
            yield self._step(1, batch_size)
            time.sleep(2.0)
            yield self._step(2, batch_size)
        finally:
            self._mark(f"ended {mark}")

    def _failing(self, kind: str, batch_size: int) -> Iterator[PositionedBatch]:
        yield self._step(1, batch_size)
        if kind == "odd":
            raise OddError("odd things happen")
        if kind == "missing":
            open(self.folder / "missing")  # noqa: SIM115
        if kind == "key":
            raise KeyError("a key")
        if kind == "unicode":
            b"\xff".decode()

    def _step(self, number: int, batch_size: int) -> PositionedBatch:
        """A batch of loose tensors, with ids of one to three a bag."""
        lengths = torch.arange(2 * batch_size) % 3 + 1
        values = torch.arange(int(lengths.sum())) + number
        sparse = KeyedJaggedTensor(["a", "b"], values, lengths=lengths)
        batch = Batch(torch.full((batch_size, 3), float(number)), sparse, torch.zeros(batch_size))
        return PositionedBatch(batch, {"of": 0, "number": number}, ReadReport(rows=number * batch_size))

    def _mark(self, name: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(".")
