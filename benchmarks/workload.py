"""What is measured: the shapes, the batches, and how many bytes each op has to move."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import tritonemb as te
from benchmarks.reuse import draw_ids

FP32 = 4
INT64 = 8
LR = 0.02
EPS = 1e-8


@dataclass(frozen=True)
class Shape:
    """`num_tables` tables of `num_rows` rows of `dim` floats; `batch_size` bags of `bag_size` ids on each."""

    batch_size: int
    num_tables: int
    bag_size: int
    dim: int
    num_rows: int = 100_000

    def __str__(self) -> str:
        return f"B{self.batch_size} T{self.num_tables} L{self.bag_size} D{self.dim} rows {self.num_rows:,}"

    @property
    def ids_per_table(self) -> int:
        return self.batch_size * self.bag_size

    @property
    def table_names(self) -> list[str]:
        return [f"table_{index}" for index in range(self.num_tables)]


SHAPES = (
    Shape(2048, 26, 1, 64),
    Shape(2048, 26, 1, 128),
    Shape(512, 26, 20, 128),
    Shape(2048, 1, 26, 64, num_rows=10_000_000),
)


@dataclass(frozen=True)
class Batch:
    """Ids of all tables, table by table; every bag has `bag_size` of them."""

    shape: Shape
    values: Tensor  # int64 [T * B * L]
    lengths: Tensor  # int64 [T * B]
    offsets: Tensor  # int64 [T * B + 1]
    num_distinct: int  # rows that the batch touches, over all tables

    @functools.cached_property
    def keyed(self) -> te.KeyedJaggedTensor:
        return te.KeyedJaggedTensor.from_offsets(self.shape.table_names, self.values, self.offsets)

    @functools.cached_property
    def bags(self) -> list[tuple[Tensor, Tensor]]:
        """Values and first offsets per table, as `torch.nn.EmbeddingBag` takes them."""
        size = self.shape.ids_per_table
        starts = torch.arange(0, size, self.shape.bag_size)
        return [(self.values[first : first + size], starts) for first in range(0, len(self.values), size)]


def make_batch(shape: Shape, values: np.ndarray) -> Batch:
    """A batch of the ids in `values` [T, B * L]."""
    num_bags = shape.num_tables * shape.batch_size
    return Batch(
        shape=shape,
        values=torch.from_numpy(values.reshape(-1)),
        lengths=torch.full((num_bags,), shape.bag_size),
        offsets=torch.arange(num_bags + 1) * shape.bag_size,
        num_distinct=sum(len(np.unique(row)) for row in values),
    )


def draw_batches(shape: Shape, count: int, seed: int = 0) -> list[Batch]:
    """`count` different batches with production's reuse of ids."""
    rng = np.random.default_rng(seed)
    tables = range(shape.num_tables)
    return [
        make_batch(shape, np.stack([draw_ids(shape.num_rows, shape.ids_per_table, rng) for _ in tables]))
        for _ in range(count)
    ]


def draw_gradient(shape: Shape, seed: int = 0) -> Tensor:
    """A gradient of the pooled output, [B, T * D]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape.batch_size, shape.num_tables * shape.dim, generator=generator)


def grouping_bytes(batch: Batch) -> int:
    """Read the ids; write the distinct rows (int64), where each starts and the positions sorted by row (int32)."""
    num_ids = len(batch.values)
    return INT64 * num_ids + (INT64 + 4) * batch.num_distinct + 4 * num_ids


def forward_bytes(batch: Batch) -> int:
    """Read every id and one row for it; write one output row a bag. FBGEMM's formula, plus the ids."""
    num_ids, num_bags = len(batch.values), len(batch.lengths)
    return INT64 * num_ids + FP32 * batch.shape.dim * (num_ids + num_bags)


def update_bytes(batch: Batch, state_per_row: int = 1) -> int:
    """Read every id and one gradient row for it; read and write each distinct row's weights and state once."""
    num_ids = len(batch.values)
    gradients = INT64 * num_ids + FP32 * batch.shape.dim * num_ids
    return gradients + 2 * FP32 * batch.num_distinct * (batch.shape.dim + state_per_row)


def step_bytes(batch: Batch, state_per_row: int = 1) -> int:
    """Forward and update."""
    return forward_bytes(batch) + update_bytes(batch, state_per_row)
