"""A data set in memory, and the batches cut from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tritonemb.data.columns import Rows, cut
from tritonemb.data.pipeline import permutation
from tritonemb.data.protocol import (
    SPLITS,
    Feature,
    OpenOptions,
    PositionedBatch,
    ReadReport,
    Split,
    Stream,
    Tables,
    check_position,
    digest,
    fingerprint,
)


@dataclass(frozen=True)
class Dataset(Tables):
    """Train, test and (where the data set has them) validation rows of a binary classification problem.

    Args:
        name: for messages.
        features: in the order of each `Rows.columns`; their names are the keys of the batches.
        best_auc: the AUC on the test rows that no model can be expected to beat, where it is known.

    Raises:
        ValueError: where rows and features do not fit together, an id has no embedding, or a label is neither 0 nor 1.
    """

    name: str
    features: tuple[Feature, ...]
    train: Rows
    test: Rows
    validation: Rows | None = None
    best_auc: float | None = None

    def __post_init__(self) -> None:
        for split in self.splits():
            self._check(self.rows(split), f"data set {self.name!r}, {split} rows")

    def _check(self, rows: Rows, where: str) -> None:
        if len(rows) == 0:
            raise ValueError(f"{where}: there are none")
        if len(rows.columns) != len(self.features):
            raise ValueError(f"{where}: {len(rows.columns)} columns for {len(self.features)} features")
        if rows.dense.shape[1] != self.num_dense:
            raise ValueError(f"{where}: {rows.dense.shape[1]} dense values a row, the train rows have {self.num_dense}")
        wrong = torch.nonzero((rows.labels != 0) & (rows.labels != 1))
        if len(wrong):
            row = int(wrong[0, 0])
            raise ValueError(f"{where}: the label of row {row} is {rows.labels[row].item()}, expected 0 or 1")
        for feature, column in zip(self.features, rows.columns, strict=True):
            low, high = map(int, column.values.aminmax()) if len(column.values) else (0, 0)
            if low < 0 or high >= feature.num_embeddings:
                raise ValueError(
                    f"{where}: feature {feature.name!r} has ids from {low} to {high}, "
                    f"they must lie in [0, {feature.num_embeddings})"
                )

    @property
    def num_dense(self) -> int:
        return self.train.dense.shape[1]

    @property
    def encoding(self) -> str:
        """See `tritonemb.data.protocol.Data.encoding`: by the features' names and sizes."""
        return digest("in memory", self.num_dense, self.features)

    def splits(self) -> tuple[Split, ...]:
        """The splits that it has."""
        return tuple(split for split in SPLITS if split != "validation" or self.validation is not None)

    def num_rows(self, split: Split) -> int:
        """ValueError if the data set has no such split."""
        return len(self.rows(split))

    def rows(self, split: Split) -> Rows:
        """ValueError if the data set has no such split."""
        rows = {"train": self.train, "validation": self.validation, "test": self.test}.get(split)
        if rows is None:
            raise ValueError(f"data set {self.name!r} has no {split!r} rows")
        return rows

    estimated_rows = num_rows

    def open(self, split: Split, batch_size: int, **how: Any) -> Stream:
        """See `tritonemb.data.protocol.Data.open`. A shard has every `count`-th row of the epoch's order."""
        options = OpenOptions(split, batch_size, **how)
        (index, count), rows = options.shard, self.rows(split)
        order_of = ((options.seed, options.epoch) if options.shuffle else ()) + (options.shard if count > 1 else ())
        belongs_to = fingerprint(self.name, len(rows), split, batch_size, *order_of)
        num_rows, first = len(range(index, len(rows), count)), 0
        if options.position is not None:
            check_position(options.position, ("row",), belongs_to, self.name)
            first = options.position["row"]
            if first > num_rows or (first % batch_size and first != num_rows):
                raise ValueError(
                    f"data set {self.name!r}: no batch of {batch_size} begins at row {first} of {num_rows}"
                )
        order = permutation(len(rows), options.seed, options.epoch) if options.shuffle else np.arange(len(rows))
        order = order[index::count].copy() if count > 1 else order  # a view would keep all of it in memory
        keys = tuple(feature.name for feature in self.features)

        def batches() -> Iterator[PositionedBatch]:
            for start in range(first, num_rows, batch_size):
                stop = min(start + batch_size, num_rows)
                batch = cut(rows, keys, order[start:stop], options.pin_memory)
                yield PositionedBatch(batch, {"of": belongs_to, "row": stop}, ReadReport(rows=stop))

        return Stream(batches(), {"of": belongs_to, "row": first}, ReadReport(rows=first))
