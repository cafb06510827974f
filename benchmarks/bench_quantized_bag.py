"""Lookups in quantized tables: ours, and on the CPU FBGEMM's `IntNBitTableBatchedEmbeddingBagsCodegen` on its rows.

The first shape is the default of FBGEMM's own benchmark of that module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import tritonemb as te
from benchmarks.measuring.cases import OURS, Case, close, contenders
from benchmarks.measuring.clock import Clock, Contender
from benchmarks.measuring.peers import has_fbgemm
from tritonemb.layout import TensorList, make_layout
from tritonemb.ops import quantized_bag

Shape = tuple[int, int, int, int, int, int]  # batch size, tables, rows, dim, ids per bag, bits
SHAPES: tuple[Shape, ...] = (
    (512, 32, 100_000, 128, 20, 4), (512, 32, 100_000, 128, 20, 8), (2048, 26, 100_000, 64, 1, 8),
    (64, 26, 100_000, 64, 10, 4), (512, 32, 100_000, 128, 20, 2),
)  # fmt: skip


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    for shape in SHAPES:
        batch_size, num_tables, num_rows, dim, length, bits = (5, 3, 50, *shape[3:]) if tiny else shape
        name = f"B{batch_size} T{num_tables} L{length} D{dim} rows {num_rows:,} int{bits}"
        sizes = batch_size, num_tables, num_rows, dim, length, bits
        yield Case("quantized forward", name, partial(make, sizes), name, target=1.0)


def make(shape: Shape, clock: Clock) -> list[Contender]:
    batch_size, num_tables, num_rows, dim, length, bits = shape
    torch.manual_seed(0)
    # Random codes between -1 and 1.
    header = torch.tensor([2 / (2**bits - 1), -1], dtype=torch.float16, device=clock.device).view(torch.uint8)
    size = (num_rows, dim * bits // 8)
    codes = [torch.randint(256, size, dtype=torch.uint8, device=clock.device) for _ in range(num_tables)]
    tables = TensorList(torch.cat([header.expand(num_rows, 4), table], 1) for table in codes)
    ids = torch.randint(num_rows, (batch_size * num_tables * length,), device=clock.device)
    offsets = torch.arange(0, ids.numel() + 1, length, device=clock.device)
    configs = [te.TableConfig(f"table_{number}", num_rows, dim) for number in range(num_tables)]
    layout = make_layout(configs, [config.name for config in configs], True, clock.device)
    batch, counts = (ids, offsets, None), [bits] * num_tables
    runs = {OURS: lambda: quantized_bag(tables, counts, batch, layout, True, torch.float32)}
    if has_fbgemm() and clock.device.type == "cpu":
        runs["fbgemm"] = fbgemm_lookup(tables, shape, ids, offsets)
    num_bytes = ids.numel() * (8 + tables[0].shape[1]) + batch_size * num_tables * dim * 4
    return contenders(runs, num_bytes, clock.device, close(runs[OURS](), rtol=1e-5, atol=1e-5))


def fbgemm_lookup(tables: TensorList, shape: Shape, ids: Tensor, offsets: Tensor) -> Callable[[], Tensor]:
    """Return FBGEMM's lookup of int32 ids in copies of the tables."""
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

    _, _, num_rows, dim, _, bits = shape
    kind = SparseType(f"int{bits}")
    specs = [(f"table_{i}", num_rows, dim, kind, EmbeddingLocation.HOST) for i in range(len(tables))]
    module = IntNBitTableBatchedEmbeddingBagsCodegen(specs, device="cpu", output_dtype=SparseType.FP32)
    module.fill_random_weights()  # allocates
    for (rows, _), table in zip(module.split_embedding_weights(split_scale_shifts=False), tables, strict=True):
        rows.copy_(table)
    return partial(module, ids.int(), offsets.int())


def bench_quantized_forward(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
