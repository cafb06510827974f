"""Many data sets as one, since reader processes take seconds to start: a split is named "<data set>/<split>"."""

from __future__ import annotations

import itertools
import os
import select
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.helpers import DEADLINE
from tritonemb.data import Batch, Data, Feature, Stream
from tritonemb.data.protocol import PositionedBatch, ReadReport
from tritonemb.jagged import KeyedJaggedTensor

SIZES = (1, 2, 7, 60)  # rows of the data sets "<kind>-<size>"
KINDS = ("memory", "tsv", "gz", "parquet", "files")


class OddError(Exception):
    """Of no built-in type."""


class Marks:
    """A named pipe into which any process writes a byte when something has happened."""

    def __init__(self, path: Path) -> None:
        with suppress(FileExistsError):
            os.mkfifo(path)
        self._pipe, self._count = os.open(path, os.O_RDWR | os.O_NONBLOCK), 0

    def add(self) -> None:
        os.write(self._pipe, b".")

    def count(self) -> int:
        """How many there have been."""
        with suppress(BlockingIOError):
            while True:
                self._count += len(os.read(self._pipe, 1 << 16))
        return self._count

    def wait_for(self, number: int) -> None:
        while self.count() < number:
            assert select.select([self._pipe], [], [], DEADLINE)[0], f"{self._count} marks of {number}"


@dataclass
class Bundle:
    """Besides those given, data sets that behave badly; `folder` has the pipes for what they do."""

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
        name, _, local = split.partition("/")
        if name in self.data:
            return self.data[name].open(local, batch_size, **how)  # type: ignore[arg-type]
        steps = getattr(self, f"_{name}")(local, batch_size)
        return Stream(steps, {"of": 0, "number": 0})

    def marks(self, name: str) -> Marks:
        return Marks(self.folder / name)

    def _endless(self, mark: str, batch_size: int) -> Iterator[PositionedBatch]:
        """Mark every batch that it makes, and its end."""
        created, ended = self.marks(f"made {mark}"), self.marks(f"ended {mark}")
        try:
            for number in itertools.count(1):
                created.add()
                yield self._step(number, batch_size)
        finally:
            ended.add()

    def _slow(self, mark: str, batch_size: int) -> Iterator[PositionedBatch]:
        """Make one batch, and another one when the mark "go" is there; mark its end."""
        ended = self.marks(f"ended {mark}")
        try:
            yield self._step(1, batch_size)
            self.marks(f"go {mark}").wait_for(1)
            yield self._step(2, batch_size)
        finally:
            ended.add()

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
