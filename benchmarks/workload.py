"""What is measured: tables, batches of ids, and how many bytes each op has to move."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

import tritonemb as te
from benchmarks.reuse import draw_ids

CPU = torch.device("cpu")
INT64, INT32, FP32 = 8, 4, 4
LR = 0.02
EPS = 1e-8
ZIPF_EXPONENT = 1.15

# MLPerf DLRM-DCNv2 (Criteo 1TB, multi-hot): rows of the 26 tables and ids of a bag on each.
MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
MLPERF_CAP = 4_000_000  # rows of a table at most, so that ours and two peers fit side by side


@dataclass(frozen=True)
class Workload:
    """Tables of `num_rows[t]` rows of `dim` elements of `dtype`, looked up by `batch_size` bags of `bag_sizes[t]` ids.

    Ids are "uniform"; "zipf": the k-th most frequent row of a table in proportion to k^-1.15; or "reuse": each row as
    often as in Meta's published traces (`benchmarks/reuse.py`).
    """

    name: str
    batch_size: int
    num_rows: tuple[int, ...]
    bag_sizes: tuple[int, ...]
    dim: int = 128
    dtype: torch.dtype = torch.float32
    ids: Literal["uniform", "zipf", "reuse"] = "uniform"

    def __str__(self) -> str:
        bags = (
            f"L{self.bag_sizes[0]}" if len(set(self.bag_sizes)) == 1 else f"L{np.mean(self.bag_sizes):.1f} on average"
        )
        sizes = f"B{self.batch_size} T{self.num_tables} {bags} D{self.dim}"
        if not self.name:
            return f"{sizes} rows {self.num_rows[0]:,}"
        return f"{self.name}: {sizes} {str(self.dtype).removeprefix('torch.')} {self.ids}"

    @property
    def table_names(self) -> list[str]:
        return [f"table_{index}" for index in range(len(self.num_rows))]

    @property
    def num_tables(self) -> int:
        return len(self.num_rows)

    @property
    def width(self) -> int:
        return self.num_tables * self.dim

    @property
    def num_ids(self) -> int:
        return self.batch_size * sum(self.bag_sizes)

    def tiny(self) -> Workload:
        """The same in small, to try the benchmarks out without a GPU: at most 3 tables of 1,000 rows."""
        rows = tuple(min(1000, rows) for rows in self.num_rows[:3])
        return replace(
            self, batch_size=8, num_rows=rows, bag_sizes=tuple(min(4, size) for size in self.bag_sizes[:3]), dim=16
        )


def _fbgemm(dtype: torch.dtype, ids: Literal["uniform", "zipf"]) -> Workload:
    return Workload("fbgemm", 512, (100_000,) * 32, (20,) * 32, 128, dtype, ids)


def _mlperf(batch_size: int) -> Workload:
    return Workload("mlperf", batch_size, tuple(min(rows, MLPERF_CAP) for rows in MLPERF_ROWS), MLPERF_BAGS, ids="zipf")


def _criteo(batch_size: int, dim: int, dtype: torch.dtype = torch.float32) -> Workload:
    return Workload("criteo", batch_size, (100_000,) * 26, (1,) * 26, dim, dtype, "reuse")


def same(batch_size: int, num_tables: int, bag_size: int, dim: int, num_rows: int = 100_000) -> Workload:
    """Equal tables of float32 rows, ids with production's reuse; it has no name but its sizes."""
    return Workload("", batch_size, (num_rows,) * num_tables, (bag_size,) * num_tables, dim, ids="reuse")


CPU_WORKLOADS = same(2048, 26, 1, 64), same(2048, 26, 1, 128), same(512, 26, 20, 128), same(2048, 1, 26, 64, 10_000_000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WORKLOADS = (
    *(_fbgemm(dtype, ids) for dtype in DTYPES for ids in ("uniform", "zipf")),
    *(_criteo(batch_size, dim) for dim in (128, 64, 256) for batch_size in (8192, 4096, 2048)),
    *(_criteo(8192, 128, dtype) for dtype in DTYPES[1:]),
    Workload("many small tables", 1024, (1000,) * 1000, (2,) * 1000, 64),
    # 13 GB of float16, and as much for each peer and for the state of torch's Adagrad: fits into 80 GB.
    Workload("one large table", 8192, (100_000_000,), (26,), 64, torch.float16),
    Workload("reuse", 4096, (1_000_000,) * 16, (26,) * 16, ids="reuse"),
    _mlperf(8192),
    _mlperf(65536),
)


def workloads(device: torch.device, tiny: bool) -> list[Workload]:
    """Those of a device; `tiny`: a GPU's in small, on any device."""
    if tiny:
        return list(dict.fromkeys(workload.tiny() for workload in WORKLOADS))
    return list(WORKLOADS if device.type == "cuda" else CPU_WORKLOADS)


@dataclass(frozen=True)
class Batch:
    """Ids of all tables, table by table, on the device."""

    workload: Workload
    values: Tensor  # int64 [N]
    offsets: Tensor  # int64 [T * B + 1]
    num_distinct: int  # rows that the batch touches, over all tables

    @functools.cached_property
    def keyed(self) -> te.KeyedJaggedTensor:
        return te.KeyedJaggedTensor.from_offsets(self.workload.table_names, self.values, self.offsets)

    @functools.cached_property
    def bags(self) -> list[tuple[Tensor, Tensor]]:
        """Values and first offsets per table, as `torch.nn.EmbeddingBag` takes them."""
        batch_size = self.workload.batch_size
        parts = self.values.split([batch_size * size for size in self.workload.bag_sizes])
        starts = [torch.arange(batch_size, device=self.values.device) * size for size in self.workload.bag_sizes]
        return list(zip(parts, starts, strict=True))


def make_batch(workload: Workload, parts: Sequence[Tensor]) -> Batch:
    """A batch of each table's ids, int64 [B * L]."""
    values = torch.cat(list(parts))
    lengths = torch.tensor(workload.bag_sizes, device=values.device).repeat_interleave(workload.batch_size)
    offsets = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])
    return Batch(workload, values, offsets, sum(ids.unique().numel() for ids in parts))


def draw_batches(workload: Workload, count: int, device: torch.device = CPU, seed: int = 0) -> list[Batch]:
    """`count` different batches; the same on every device but for "uniform" and "zipf" ids, which it draws itself."""
    generator = torch.Generator(device).manual_seed(seed)
    rng = np.random.default_rng(seed)
    sizes = [(rows, workload.batch_size * bag) for rows, bag in zip(workload.num_rows, workload.bag_sizes, strict=True)]
    return [make_batch(workload, [_draw(workload.ids, *size, generator, rng) for size in sizes]) for _ in range(count)]


def _draw(kind: str, num_rows: int, count: int, generator: torch.Generator, rng: np.random.Generator) -> Tensor:
    device = generator.device
    if kind == "reuse":
        return torch.from_numpy(draw_ids(num_rows, count, rng)).to(device)
    if kind == "uniform":
        return torch.randint(0, num_rows, (count,), device=device, generator=generator)
    cumulative, row_of_rank = _zipf(num_rows, device)
    uniform = torch.rand(count, device=device, dtype=torch.float64, generator=generator)
    return row_of_rank[torch.searchsorted(cumulative, uniform).clamp(max=num_rows - 1)]


@functools.lru_cache(maxsize=8)
def _zipf(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cumulative probability of ranks, and the row of each rank: hot rows lie anywhere in the table."""
    rank = torch.arange(1, num_rows + 1, device=device, dtype=torch.float64)
    cumulative = torch.cumsum(rank**-ZIPF_EXPONENT, 0)
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).to(device)
    return cumulative / cumulative[-1], rows


def linear_rows(batch: Batch) -> Tensor:
    """The row of each id among those of all tables, int64 [N]."""
    w = batch.workload
    rows = torch.tensor(w.num_rows, device=batch.values.device)
    per_table = torch.tensor(w.bag_sizes, device=batch.values.device) * w.batch_size
    return batch.values + (torch.cumsum(rows, 0) - rows).repeat_interleave(per_table)


def draw_gradient(workload: Workload, device: torch.device = CPU, seed: int = 0) -> Tensor:
    """A gradient of the pooled output, float32 [B, T * D]."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(workload.batch_size, workload.width, device=device, generator=generator)


def forward_bytes(batch: Batch) -> int:
    """Read every id and one row for it; write one float32 output row a bag: FBGEMM's formula, plus the ids."""
    w = batch.workload
    return INT64 * w.num_ids + w.dtype.itemsize * w.dim * w.num_ids + FP32 * w.batch_size * w.width


def group_bytes(batch: Batch) -> int:
    """Read the ids; write the distinct rows (int64), where each starts and the positions sorted by row (int32)."""
    return (INT64 + INT32) * batch.workload.num_ids + (INT64 + INT32) * batch.num_distinct


def sort_bytes(batch: Batch) -> int:
    """Read int32 keys; write them in order, and int32 places: one pass, which no sort achieves."""
    return 3 * INT32 * batch.workload.num_ids


def update_bytes(batch: Batch, state_per_row: int = 1) -> int:
    """Read every position (int32) and a float32 gradient row for it; read and write each distinct row and its state.

    The state is so many float32 a row: 1 of row-wise Adagrad, D of Adagrad.
    """
    w = batch.workload
    gradients = (INT32 + FP32 * w.dim) * w.num_ids
    return gradients + 2 * batch.num_distinct * (w.dtype.itemsize * w.dim + FP32 * state_per_row)


def step_bytes(batch: Batch, state_per_row: int = 1) -> int:
    """Forward, grouping and update."""
    return forward_bytes(batch) + group_bytes(batch) + update_bytes(batch, state_per_row)
