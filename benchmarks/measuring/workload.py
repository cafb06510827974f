"""What is measured: tables, batches of ids, and how many bytes each op has to move.

Ids of "reuse" recur within a batch as often as they do in production.
The numbers come from the statistics that Meta publishes beside its embedding traces (facebookresearch/dlrm_datasets,
MIT licence, `embedding_bag/2022`): 788 tables, a batch of 131,072 samples, 1.78 million lookups a table. For every
range of run lengths (how often one distinct id recurs within the batch) they give the share of the distinct ids and
the share of the lookups. The first of its 16 batches is used; the others differ by at most 0.001.

How it is scaled to a smaller batch: the distribution of run lengths stays as published, up to the longest run that
the published batch itself can hold relative to its size (`HOTTEST_SHARE`); longer runs are cut to that length. So a
small batch keeps the published mixture of rare and hot ids without being filled by a single id.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import tritonemb as te

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


Ids = Literal["uniform", "zipf", "reuse"]
IDS: tuple[Ids, ...] = ("uniform", "zipf", "reuse")


@dataclass(frozen=True)
class Workload:
    """Tables of `num_rows[t]` rows of `dim` elements of `dtype`, looked up by `batch_size` bags of `bag_sizes[t]` ids.

    Ids are "uniform"; "zipf": the k-th most frequent row of a table in proportion to k^-zipf_exponent; or "reuse": each
    row as often as in Meta's published traces.
    """

    name: str
    batch_size: int
    num_rows: tuple[int, ...]
    bag_sizes: tuple[int, ...]
    dim: int = 128
    dtype: torch.dtype = torch.float32
    ids: Ids = "uniform"
    zipf_exponent: float = ZIPF_EXPONENT

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
        """Return a small workload for tests without a GPU: at most 3 tables of 1,000 rows."""
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
# As click logs have them.
SMALL_ROWS = tuple(
    same(*sizes)
    for sizes in (
        (128, 26, 1, 16), (2048, 26, 1, 8), (1024, 26, 5, 32), (512, 26, 20, 128), (8192, 8, 50, 32),
        (65_536, 26, 1, 16), (65_536, 8, 1, 8), (16_384, 26, 1, 32), (2048, 4, 10, 256), (8192, 26, 1, 64),
    )
)  # fmt: skip
# Each by ids of three distributions, as whether rows recur decides what a step costs: 1.05 as in click logs.
BY_IDS = tuple(
    replace(same(*sizes), ids=ids, zipf_exponent=1.05)
    for sizes in ((8192, 1, 4, 16), (1024, 4, 2, 32), (2048, 8, 2, 32), (2048, 26, 1, 64), (512, 26, 20, 128))
    for ids in IDS
)
# 4.3 GB for each contender. FBGEMM 1.8.0 on the CPU keeps 26 bits of a row in its update, and so trains other rows of a
# table with more than 2^26 of them.
HUGE = replace(same(8192, 1, 4, 16, 67_000_000), ids="uniform")
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
    """Return the workloads of a device; `tiny`: small ones of a GPU, on any device."""
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
    """Make a batch from the ids of each table, int64 `[B * L]`."""
    values = torch.cat(list(parts))
    lengths = torch.tensor(workload.bag_sizes, device=values.device).repeat_interleave(workload.batch_size)
    offsets = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])
    return Batch(workload, values, offsets, sum(ids.unique().numel() for ids in parts))


def draw_batches(workload: Workload, count: int, device: torch.device = CPU, seed: int = 0) -> list[Batch]:
    """Draw `count` batches; equal on all devices, except for "uniform" and "zipf" ids, which the device draws."""
    generator = torch.Generator(device).manual_seed(seed)
    rng = np.random.default_rng(seed)
    sizes = [(rows, workload.batch_size * bag) for rows, bag in zip(workload.num_rows, workload.bag_sizes, strict=True)]
    return [make_batch(workload, [_draw(workload, *size, generator, rng) for size in sizes]) for _ in range(count)]


def _draw(w: Workload, num_rows: int, count: int, generator: torch.Generator, rng: np.random.Generator) -> Tensor:
    device = generator.device
    if w.ids == "reuse":
        return torch.from_numpy(draw_ids(num_rows, count, rng)).to(device)
    if w.ids == "uniform":
        return torch.randint(0, num_rows, (count,), device=device, generator=generator)
    cumulative, row_of_rank = _zipf(num_rows, w.zipf_exponent, device)
    uniform = torch.rand(count, device=device, dtype=torch.float64, generator=generator)
    return row_of_rank[torch.searchsorted(cumulative, uniform).clamp(max=num_rows - 1)]


@functools.lru_cache(maxsize=8)
def _zipf(num_rows: int, exponent: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cumulative probability of ranks, and the row of each rank: hot rows lie anywhere in the table."""
    rank = torch.arange(1, num_rows + 1, device=device, dtype=torch.float64)
    cumulative = torch.cumsum(rank**-exponent, 0)
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).to(device)
    return cumulative / cumulative[-1], rows


def linear_rows(batch: Batch) -> Tensor:
    """Return the row of each id among the rows of all tables, int64 `[N]`."""
    w = batch.workload
    rows = torch.tensor(w.num_rows, device=batch.values.device)
    per_table = torch.tensor(w.bag_sizes, device=batch.values.device) * w.batch_size
    return batch.values + (torch.cumsum(rows, 0) - rows).repeat_interleave(per_table)


def draw_gradient(workload: Workload, device: torch.device = CPU, seed: int = 0) -> Tensor:
    """Draw a gradient of the pooled output, float32 `[B, T * D]`."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(workload.batch_size, workload.width, device=device, generator=generator)


def forward_bytes(batch: Batch) -> int:
    """Bytes to read per id (the id and its row), and to write per bag (a float32 row): FBGEMM's formula, plus ids."""
    w = batch.workload
    return INT64 * w.num_ids + w.dtype.itemsize * w.dim * w.num_ids + FP32 * w.batch_size * w.width


def group_bytes(batch: Batch) -> int:
    """Bytes to read (ids) and to write: distinct rows (int64), their starts, and positions sorted by row (int32)."""
    return (INT64 + INT32) * batch.workload.num_ids + (INT64 + INT32) * batch.num_distinct


def sort_bytes(batch: Batch) -> int:
    """Bytes to read (int32 keys) and to write (sorted keys, int32 positions) in a single pass: a lower bound."""
    return 3 * INT32 * batch.workload.num_ids


def update_bytes(batch: Batch, state_per_row: int = 1) -> int:
    """Bytes to read per id (position, float32 gradient row), and to read and write per distinct row (row and state).

    `state_per_row` counts float32 elements: 1 for row-wise Adagrad, D for Adagrad.
    """
    w = batch.workload
    gradients = (INT32 + FP32 * w.dim) * w.num_ids
    return gradients + 2 * batch.num_distinct * (w.dtype.itemsize * w.dim + FP32 * state_per_row)


def step_bytes(batch: Batch, state_per_row: int = 1) -> int:
    """Forward, grouping and update."""
    return forward_bytes(batch) + group_bytes(batch) + update_bytes(batch, state_per_row)


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Run lengths in (BIN_EDGES[i], BIN_EDGES[i + 1]]. The last published range is open; one octave stands for it here.
BIN_EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SHARE_OF_DISTINCT = (
    0.342, 0.144, 0.149, 0.138, 0.112, 0.068, 0.029, 0.010, 0.004, 0.002, 0.001, 0.001, 0.0, 0.0, 0.0, 0.0, 0.0,
)  # fmt: skip
SHARE_OF_LOOKUPS = (
    0.027, 0.023, 0.040, 0.068, 0.105, 0.120, 0.099, 0.070, 0.059, 0.054, 0.040, 0.072, 0.064, 0.047, 0.021, 0.017,
    0.076,
)  # fmt: skip
MEAN_RUN_LENGTH = 12.7

# All ids of the open range together hold this share of the lookups, so no single id can hold more.
HOTTEST_SHARE = SHARE_OF_LOOKUPS[-1]


@functools.cache
def run_length_probabilities() -> Floats:
    """Probability that a distinct id recurs k times, for k = 1, 2, ... (index k - 1).

    Built from the shares of lookups, whose three decimals still say something about the hot ids; within a range every
    run length holds the same share of the lookups. The shares of distinct ids follow from it (the tests compare them).
    """
    lengths = np.arange(1, BIN_EDGES[-1] + 1)
    widths = np.diff(BIN_EDGES)
    lookups = np.repeat(np.array(SHARE_OF_LOOKUPS) / widths, widths)
    distinct: Floats = lookups / lengths
    return distinct / distinct.sum()


def longest_run(num_ids: int) -> int:
    """Return the longest run in a batch of `num_ids` ids."""
    return max(1, min(BIN_EDGES[-1], int(HOTTEST_SHARE * num_ids)))


def draw_run_lengths(num_ids: int, rng: np.random.Generator) -> Ints:
    """Run lengths of the distinct ids of one batch; they add up to `num_ids`."""
    cumulative = np.cumsum(run_length_probabilities())
    drawn: list[Ints] = []
    missing = num_ids
    while missing > 0:
        # At least one id a run, so `missing` draws always suffice; the mean says that far fewer usually do.
        picks = np.searchsorted(cumulative, rng.random(missing // 4 + 1) * cumulative[-1], side="right")
        runs = np.minimum(picks + 1, longest_run(num_ids)).astype(np.int64)
        fits = int(np.searchsorted(np.cumsum(runs), missing))
        runs = runs[: fits + 1]
        drawn.append(runs)
        missing -= int(runs.sum())
    lengths = np.concatenate(drawn) if drawn else np.empty(0, dtype=np.int64)
    if missing < 0:
        lengths[-1] += missing
    return lengths


def draw_ids(num_rows: int, num_ids: int, rng: np.random.Generator) -> Ints:
    """`num_ids` ids in [0, num_rows) with the published reuse, spread uniformly over the rows, in random order."""
    lengths = draw_run_lengths(num_ids, rng)
    if len(lengths) > num_rows:
        raise ValueError(
            f"draw_ids: {num_ids} ids with this reuse are {len(lengths)} distinct ones, but the table has only "
            f"{num_rows} rows; use a larger table or fewer ids"
        )
    distinct = rng.choice(num_rows, size=len(lengths), replace=False)
    ids: Ints = np.repeat(distinct, lengths)
    rng.shuffle(ids)
    return ids


class Population:
    """Rows of a table with popularities that last over batches, unlike those of `draw_ids`.

    The published statistics are of single batches. Here a row's popularity is a run length, drawn from their
    distribution. A batch draws its distinct rows without replacement, with probabilities proportional to popularity,
    and assigns its longer runs to the more popular rows. So batches have the published reuse, and rows recur in later
    batches.
    """

    def __init__(self, num_rows: int, rng: np.random.Generator) -> None:
        probabilities = run_length_probabilities()
        self.popularity: Floats = 1.0 + rng.choice(len(probabilities), size=num_rows, p=probabilities)
        self._rng = rng

    def draw_ids(self, num_ids: int) -> Ints:
        """`num_ids` ids in random order."""
        lengths = np.sort(draw_run_lengths(num_ids, self._rng))[::-1]
        # The largest keys of u^(1/w) are a weighted sample without replacement (Efraimidis and Spirakis, IPL 2006).
        keys = np.log(self._rng.random(len(self.popularity))) / self.popularity
        distinct = np.argpartition(keys, -len(lengths))[-len(lengths) :]
        distinct = distinct[np.argsort(self.popularity[distinct], kind="stable")[::-1]]
        ids: Ints = np.repeat(distinct.astype(np.int64), lengths)
        self._rng.shuffle(ids)
        return ids
