"""The batches of a log, cut out of its windows, and where each of them ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tritonemb.data.columns import cut
from tritonemb.data.logs.problems import KEPT
from tritonemb.data.logs.windows import Block, Place, Window, windows
from tritonemb.data.protocol import Position, PositionedBatch, ReadReport, Split

if TYPE_CHECKING:
    from tritonemb.data.logs.click_log import ClickLog

Array = np.ndarray[Any, Any]

FIELDS = ("part", "offset", "line", "skip", "skipped", "window", "batch", "rows")  # of a position


class Cutter:
    """The steps of one stream."""

    def __init__(
        self,
        log: ClickLog,
        split: Split,
        batch_size: int,
        window_rows: int,
        order: tuple[int, ...] | None,
        pin_memory: bool,
        needs_rows: bool,
    ) -> None:
        self._log, self._split, self._batch_size, self._window_rows = log, split, batch_size, window_rows
        self._order, self._pin_memory, self._needs_rows = order, pin_memory, needs_rows
        self._keys = tuple(feature.name for feature in log.features)
        self._skipped = 0
        self._first: list[str] = []
        self._reasons: Counter[str] = Counter()

    def steps(self, position: Position) -> Iterator[PositionedBatch | ReadReport]:
        start = Place(*(position[field] for field in FIELDS[:5]))
        self._skipped = position["skipped"]
        batch, rows = position["batch"], position["rows"]
        with closing(self._log.encoded(self._split, start)) as blocks:
            for window in windows(
                self._counted(blocks), self._window_rows, self._permutation, start, position["window"]
            ):
                for step in self._cut(window, batch, rows, position["of"]):
                    rows = step.report.rows
                    yield step
                batch = 0
        if rows == 0 and self._needs_rows:
            skipped = f" ({self._skipped} bad ones were skipped)" if self._skipped else ""
            raise ValueError(f"data set {self._log.name!r}: there are no {self._split} rows{skipped}")
        yield self._report(rows)  # after the last batch, bad rows may have come

    def _cut(self, window: Window, first: int, rows: int, belongs_to: int) -> Iterator[PositionedBatch]:
        num_rows, size = len(window.rows), self._batch_size
        if first * size >= num_rows:
            raise ValueError(f"data set {self._log.name!r}: there are fewer rows than the position says")
        report = self._report(rows)
        for number in range(first, -(-num_rows // size)):
            run = slice(number * size, min((number + 1) * size, num_rows))
            batch = cut(window.rows, self._keys, run, self._pin_memory)
            rows += len(batch)
            if (number + 1) * size < num_rows:
                place, at = window.start, (window.number, number + 1, rows)
            else:
                place, at = window.stop, (window.number + 1, 0, rows)
            values = (place.part, place.offset, place.line, place.skip, place.skipped, *at)
            position = {"of": belongs_to, **dict(zip(FIELDS, values, strict=True))}
            yield PositionedBatch(batch, position, replace(report, rows=rows))

    def _report(self, rows: int) -> ReadReport:
        return ReadReport(rows, self._skipped, tuple(self._first), tuple(sorted(self._reasons.items())))

    def _counted(self, blocks: Iterator[Block]) -> Iterator[Block]:
        for block in blocks:
            self._skipped += block.problems.total
            self._reasons.update(block.problems.counts)
            self._first += [problem.message for problem in block.problems.first[: KEPT - len(self._first)]]
            yield block

    def _permutation(self, num_rows: int, window: int) -> Array | None:
        if self._order is None:
            return None
        state = np.random.SeedSequence([*self._order, window]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(state))
        order: Array = torch.randperm(num_rows, generator=generator).numpy()
        return order
