"""The implementations that are measured: ours and its peers, behind one small interface.

All hold the same tables with the same weights (`copy_weights`), all sum-pool, and all return `[B, T * D]`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import tritonemb as te
from benchmarks.workload import EPS, LR, Batch, Shape
from tritonemb.ops import RowGroups

FBGEMM_MISSING = (
    "FBGEMM is not installed, so there is nothing to compare with; beside torch 2.13.0: "
    "pip install fbgemm-gpu-cpu==1.8.0"
)


def has_fbgemm() -> bool:
    return importlib.util.find_spec("fbgemm_gpu") is not None


class Implementation(Protocol):
    """Embedding tables that look a batch up, and that can take a training step."""

    name: str

    def weights(self) -> Sequence[Tensor]:
        """Each table's weights, [rows, D], as views that may be written."""

    def forward(self, batch: Batch) -> Tensor:
        """Pooled rows, [B, T * D]; with gradients enabled it also prepares the backward."""

    def backward(self, pooled: Tensor, gradient: Tensor) -> None:
        """From the output's gradient to updated tables."""


def step(implementation: Implementation, batch: Batch, gradient: Tensor) -> None:
    """One training step of the embeddings: forward, backward, update."""
    implementation.backward(implementation.forward(batch), gradient)


def copy_weights(source: Implementation, target: Implementation) -> None:
    with torch.no_grad():
        for ours, theirs in zip(source.weights(), target.weights(), strict=True):
            theirs.copy_(ours)


class OurBags:
    """`te.nn.EmbeddingBagCollection` with a fused optimizer."""

    name = "tritonemb"

    def __init__(self, shape: Shape, optimizer: te.optim.Optimizer | None = None) -> None:
        tables = [te.TableConfig(name, shape.num_rows, shape.dim) for name in shape.table_names]
        self.module = te.nn.EmbeddingBagCollection(tables, optimizer=optimizer or te.optim.RowWiseAdagrad(LR, eps=EPS))
        self.table_names = shape.table_names

    def weights(self) -> list[Tensor]:
        state = self.module.state_dict()
        return [state[f"{name}.weight"] for name in self.table_names]

    def group(self, batch: Batch) -> RowGroups:
        """The grouping that a forward does once for its backward, alone."""
        return self.module.group(batch.keyed)

    def forward(self, batch: Batch) -> Tensor:
        pooled: Tensor = self.module(batch.keyed)
        return pooled

    def backward(self, pooled: Tensor, gradient: Tensor) -> None:
        pooled.backward(gradient)


class FbgemmBags:
    """FBGEMM's table-batched embedding on the CPU; its backward applies row-wise Adagrad."""

    name = "fbgemm"

    def __init__(self, shape: Shape) -> None:
        ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        table = (shape.num_rows, shape.dim, common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
        self.module: Any = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [table] * shape.num_tables,
            optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            pooling_mode=common.PoolingMode.SUM,
            learning_rate=LR,
            eps=EPS,
        )

    def weights(self) -> list[Tensor]:
        return list(self.module.split_embedding_weights())

    def forward(self, batch: Batch) -> Tensor:
        pooled: Tensor = self.module(batch.values, batch.offsets)
        return pooled

    def backward(self, pooled: Tensor, gradient: Tensor) -> None:
        pooled.backward(gradient)


class TorchBags:
    """One `torch.nn.EmbeddingBag(sparse=True)` a table and, for training, one `torch.optim.Adagrad`."""

    name = "torch"

    def __init__(self, shape: Shape) -> None:
        self.bags = torch.nn.ModuleList(
            # Allocated, not initialised: the weights are copied in, and ten million normal deviates take a while.
            torch.nn.EmbeddingBag(
                shape.num_rows, shape.dim, mode="sum", sparse=True, _weight=torch.empty(shape.num_rows, shape.dim)
            )
            for _ in range(shape.num_tables)
        )
        self._optimizer: torch.optim.Adagrad | None = None

    @property
    def optimizer(self) -> torch.optim.Adagrad:
        """Made at the first step: its state is as large as the tables, and forwards do not need it."""
        if self._optimizer is None:
            self._optimizer = torch.optim.Adagrad(self.bags.parameters(), lr=LR, eps=EPS)
        return self._optimizer

    def weights(self) -> list[Tensor]:
        return [parameter.data for parameter in self.bags.parameters()]

    def forward(self, batch: Batch) -> Tensor:
        pairs = zip(self.bags, batch.bags, strict=True)
        return torch.cat([bag(values, offsets) for bag, (values, offsets) in pairs], dim=1)

    def backward(self, pooled: Tensor, gradient: Tensor) -> None:
        pooled.backward(gradient)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
