"""The implementations that are measured on a GPU: ours and its peers, behind one small interface.

All hold the same tables with the same weights, sum-pool, and return float32 `[B, T * D]`; all check bounds of ids as
they do by default. On the CPU they serve to try the benchmarks out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

import tritonemb as te
from benchmarks.gpu.workload import Batch, Workload, draw_gradient
from benchmarks.peers import FbgemmBags
from benchmarks.workload import EPS, LR
from tritonemb.ops import RowGroups


class Tables(Protocol):
    """Embedding tables that look a batch up, and whose backward is a training step."""

    def weights(self) -> Sequence[Tensor]:
        """Each table's weights, [rows, D], as views that may be written."""

    def forward(self, batch: Batch) -> Tensor:
        """Pooled rows, [B, T * D]; with gradients enabled it also prepares the backward."""

    def backward(self, pooled: Tensor, gradient: Tensor) -> None:
        """From the output's gradient to updated tables."""


class OurTables:
    """`te.nn.EmbeddingBagCollection` with fused row-wise Adagrad.

    Args:
        placement, cache: where the rows live, and which of them are on the device.
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        placement: Literal["device", "host", "disk"] = "device",
        cache: te.CacheConfig | None = None,
    ) -> None:
        configs = [
            te.TableConfig(
                name, rows, workload.dim, dtype=workload.dtype, placement=placement, cache=cache or te.CacheConfig()
            )
            for name, rows in zip(workload.table_names, workload.num_rows, strict=True)
        ]
        self.module = te.nn.EmbeddingBagCollection(
            configs, te.optim.RowWiseAdagrad(LR, eps=EPS), device, output_dtype=torch.float32
        )

    def weights(self) -> list[Tensor]:
        """Of tables that live on the device; of others this is what the cache holds."""
        return [table.weight.data for table in self.module.tables]

    def group(self, batch: Batch) -> RowGroups:
        return self.module.group(batch.keyed)

    def forward(self, batch: Batch, groups: RowGroups | None = None) -> Tensor:
        pooled: Tensor = self.module(batch.keyed, groups)
        return pooled

    def backward(self, pooled: Tensor, gradient: Tensor) -> None:
        pooled.backward(gradient)


class FbgemmTables(FbgemmBags):
    """FBGEMM's table-batched embedding; its backward groups the ids and applies row-wise Adagrad.

    Args:
        cache_share: rows live in host memory, and this share of them fits into a cache on the device, into which
            `module.prefetch` brings them. All are on the device if not given.
    """

    def __init__(self, workload: Workload, device: torch.device, cache_share: float | None = None) -> None:
        ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        on_gpu = device.type == "cuda"
        if cache_share is not None and not on_gpu:
            raise ValueError(f"FBGEMM has a cache only in front of a GPU, and this is {device}; leave cache_share out")
        location = common.EmbeddingLocation.DEVICE if on_gpu else common.EmbeddingLocation.HOST
        options: dict[str, Any] = {"device": torch.device("cuda", torch.cuda.current_device())} if on_gpu else {}
        if cache_share is not None:
            location = common.EmbeddingLocation.MANAGED_CACHING
            options |= {"cache_load_factor": cache_share, "prefetch_pipeline": True}
        compute = ops.ComputeDevice.CUDA if on_gpu else ops.ComputeDevice.CPU
        kinds = configs.SparseType
        precisions = {torch.float32: kinds.FP32, torch.float16: kinds.FP16, torch.bfloat16: kinds.BF16}
        self.module: Any = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, workload.dim, location, compute) for rows in workload.num_rows],
            optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            pooling_mode=common.PoolingMode.SUM,
            weights_precision=precisions[workload.dtype],
            output_dtype=configs.SparseType.FP32,
            learning_rate=LR,
            eps=EPS,
            **options,
        )


class TorchTables:
    """One `torch.nn.EmbeddingBag(sparse=True)` a table and one `torch.optim.Adagrad` (which is not row-wise)."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.bags = torch.nn.ModuleList(
            # Allocated, not initialised: the weights are copied in.
            torch.nn.EmbeddingBag(
                rows,
                workload.dim,
                mode="sum",
                sparse=True,
                _weight=torch.empty(rows, workload.dim, dtype=workload.dtype, device=device),
            )
            for rows in workload.num_rows
        )
        self._optimizer: torch.optim.Adagrad | None = None

    def weights(self) -> list[Tensor]:
        return [parameter.data for parameter in self.bags.parameters()]

    def forward(self, batch: Batch) -> Tensor:
        pairs = zip(self.bags, batch.bags, strict=True)
        return torch.cat([bag(values, offsets) for bag, (values, offsets) in pairs], dim=1).float()

    def backward(self, pooled: Tensor, gradient: Tensor) -> None:
        if self._optimizer is None:  # its state is as large as the tables, and forwards do not need it
            self._optimizer = torch.optim.Adagrad(self.bags.parameters(), lr=LR, eps=EPS)
        pooled.backward(gradient)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


PEERS: dict[str, Callable[[Workload, torch.device], Tables]] = {"fbgemm": FbgemmTables, "torch": TorchTables}


def make_peer(name: str, ours: OurTables, batch: Batch, device: torch.device) -> Tables:
    """A peer with our weights; raises unless it looks the batch up as ours do, and FBGEMM unless it updates alike."""
    peer = PEERS[name](batch.workload, device)
    with torch.no_grad():
        for weight, theirs in zip(ours.weights(), peer.weights(), strict=True):
            theirs.copy_(weight)
        # Float32 sums of up to 100 small numbers in another order; torch rounds sums of 16-bit rows to 16 bits.
        dtype = batch.workload.dtype
        atol = 1e-5 if dtype == torch.float32 else 1e-4
        rtol = max(1e-3, torch.finfo(dtype).eps)
        torch.testing.assert_close(peer.forward(batch), ours.forward(batch), rtol=rtol, atol=atol)
    if name == "fbgemm" and batch.workload.dtype == torch.float32:
        _check_update(ours, peer, batch, device)
    return peer


def _check_update(ours: OurTables, peer: Tables, batch: Batch, device: torch.device) -> None:
    """Both take one step, from the same weights to the same rows."""
    gradient = draw_gradient(batch.workload, device, seed=1)
    for tables in (ours, peer):
        tables.backward(tables.forward(batch), gradient)
    for table in (0, -1):
        rows = batch.bags[table][0][:1000]
        # Float32 sums of up to hundreds of thousands of gradients in another order; a step is about the rate, 0.02.
        torch.testing.assert_close(peer.weights()[table][rows], ours.weights()[table][rows], rtol=1e-3, atol=2e-4)
