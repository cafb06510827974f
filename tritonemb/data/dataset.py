"""A data set in memory, column by column, and the batches cut from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tritonemb.data.batch import Batch
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.types import TableConfig

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Feature:
    """A categorical feature: ids in `[0, num_embeddings)`, exactly one a row unless `multi_hot`."""

    name: str
    num_embeddings: int
    multi_hot: bool = False


@dataclass(frozen=True)
class Column:
    """One feature's ids for all rows.

    Args:
        values: int32 or int64; `[num_rows]` with one id a row, else all rows' ids one after the other.
        offsets: `[num_rows + 1]` int64, where each row's ids start; None with one id a row.
    """

    values: Tensor
    offsets: Tensor | None = None

    def __len__(self) -> int:
        return self.values.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    def slice(self, start: int, stop: int) -> Column:
        if self.offsets is None:
            return Column(self.values[start:stop])
        offsets = self.offsets[start : stop + 1]
        return Column(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Values and int32 lengths of the given rows, in their order."""
        if self.offsets is None:
            return self.values[rows], torch.ones(rows.shape[0], dtype=torch.int32)
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        ends = lengths.cumsum(0)
        shift = (starts - ends + lengths).repeat_interleave(lengths)
        return self.values[torch.arange(shift.shape[0]) + shift], lengths.to(torch.int32)


@dataclass(frozen=True)
class Rows:
    """Rows of a data set: `dense` `[N, num_dense]` float32, one column a feature, `labels` `[N]` float32 in {0, 1}.

    Raises:
        ValueError: where the numbers of rows differ.
    """

    dense: Tensor
    columns: tuple[Column, ...]
    labels: Tensor

    def __post_init__(self) -> None:
        sizes = {"dense": self.dense.shape[0], "labels": self.labels.shape[0]}
        sizes |= {f"column {index}": len(column) for index, column in enumerate(self.columns)}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"dense, labels and all columns need the same number of rows, got {sizes}")

    def __len__(self) -> int:
        return self.labels.shape[0]

    def slice(self, start: int, stop: int) -> Rows:
        columns = tuple(column.slice(start, stop) for column in self.columns)
        return Rows(self.dense[start:stop], columns, self.labels[start:stop])


@dataclass(frozen=True)
class Dataset:
    """Train, test and (where the data set has them) validation rows of a binary classification problem.

    Args:
        name: for messages.
        features: in the order of each `Rows.columns`; their names are the keys of the batches.
        best_auc: the AUC on the test rows that no model can be expected to beat, where it is known.

    Raises:
        ValueError: where rows and features do not fit together, or an id has no embedding.
    """

    name: str
    features: tuple[Feature, ...]
    train: Rows
    test: Rows
    validation: Rows | None = None
    best_auc: float | None = None

    def __post_init__(self) -> None:
        for split, rows in (("train", self.train), ("test", self.test), ("validation", self.validation)):
            if rows is not None:
                self._check(split, rows)

    def _check(self, split: str, rows: Rows) -> None:
        where = f"data set {self.name!r}, {split} rows"
        if len(rows) == 0:
            raise ValueError(f"{where}: there are none")
        if len(rows.columns) != len(self.features):
            raise ValueError(f"{where}: {len(rows.columns)} columns for {len(self.features)} features")
        if rows.dense.shape[1] != self.num_dense:
            raise ValueError(f"{where}: {rows.dense.shape[1]} dense values a row, the train rows have {self.num_dense}")
        for feature, column in zip(self.features, rows.columns, strict=True):
            if column.values.numel() == 0:
                continue
            low, high = int(column.values.min()), int(column.values.max())
            if low < 0 or high >= feature.num_embeddings:
                raise ValueError(
                    f"{where}: feature {feature.name!r} has ids from {low} to {high}, "
                    f"they must lie in [0, {feature.num_embeddings})"
                )

    @property
    def num_dense(self) -> int:
        return self.train.dense.shape[1]

    def tables(self, embedding_dim: int) -> list[TableConfig]:
        """One table a feature, all of one dim; the bags of multi-hot features are averaged."""
        return [
            TableConfig(f.name, f.num_embeddings, embedding_dim, pooling="mean" if f.multi_hot else "sum")
            for f in self.features
        ]

    def rows(self, split: Split) -> Rows:
        """ValueError if the data set has no such split."""
        rows = {"train": self.train, "validation": self.validation, "test": self.test}.get(split)
        if rows is None:
            raise ValueError(f"data set {self.name!r} has no {split!r} rows")
        return rows

    def train_batches(self, batch_size: int, seed: int = 0, epoch: int = 0) -> Iterator[Batch]:
        """The train rows, shuffled by (seed, epoch); the last batch may be smaller."""
        state = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(state))
        return self._cut(self.train, torch.randperm(len(self.train), generator=generator), batch_size)

    def batches(self, split: Split, batch_size: int) -> Iterator[Batch]:
        """The rows of a split in their order; the last batch may be smaller."""
        rows = self.rows(split)
        return self._cut(rows, torch.arange(len(rows)), batch_size)

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        return self.batches("test", batch_size)

    def _cut(self, rows: Rows, order: Tensor, batch_size: int) -> Iterator[Batch]:
        keys = [feature.name for feature in self.features]
        for chosen in order.split(batch_size):
            values, lengths = zip(*(column.take(chosen) for column in rows.columns), strict=True)
            sparse = KeyedJaggedTensor.from_lengths(keys, torch.cat(values), torch.cat(lengths))
            yield Batch(rows.dense[chosen], sparse, rows.labels[chosen])
