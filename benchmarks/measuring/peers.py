"""Implementations that are measured, tritonemb and its peers, with one interface.

All have the same tables with the same weights, sum-pool, and return float32 `[B, T * D]`; all check the bounds of ids
as by default.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import tritonemb as te
from benchmarks.measuring.cases import OURS
from benchmarks.measuring.clock import Clock, Contender, describe, recover
from benchmarks.measuring.workload import CPU, EPS, LR, Batch, Workload, draw_batches, draw_gradient
from tritonemb.ops import RowGroups

GPU_BATCHES, CPU_BATCHES = 3, 40  # a GPU's cache is flushed before each sample, a CPU's is full of other batches


def has_fbgemm() -> bool:
    return importlib.util.find_spec("fbgemm_gpu") is not None


class Tables:
    """Embedding tables with a forward, and with a backward that is a training step."""

    name: str

    def weights(self) -> list[Tensor]:
        """Return the weights `[rows, D]` per table, as writable views."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tensor:
        """Return pooled rows `[B, T * D]`; with gradients enabled, prepare the backward as well."""
        raise NotImplementedError

    def backward(self, pooled: Tensor, gradient: Tensor) -> None:
        """Update the tables by the gradient of the output."""
        pooled.backward(gradient)


class OurTables(Tables):
    """`te.nn.EmbeddingBagCollection` with a fused optimizer, by default row-wise Adagrad.

    Args:
        placement, cache: of all tables.
    """

    name = OURS

    def __init__(
        self,
        workload: Workload,
        device: torch.device = CPU,
        placement: Literal["device", "host", "disk"] = "device",
        cache: te.CacheConfig | None = None,
        optimizer: te.optim.Optimizer | None = None,
    ) -> None:
        options: Any = {"dtype": workload.dtype, "placement": placement, "cache": cache or te.CacheConfig()}
        sizes = zip(workload.table_names, workload.num_rows, strict=True)
        configs = [te.TableConfig(name, rows, workload.dim, **options) for name, rows in sizes]
        self.module = te.nn.EmbeddingBagCollection(
            configs, optimizer or te.optim.RowWiseAdagrad(LR, eps=EPS), device, output_dtype=torch.float32
        )

    def weights(self) -> list[Tensor]:
        """Return the weights of tables on the device, or of the cache of other tables."""
        return [table.weight.data for table in self.module.tables]

    def group(self, batch: Batch) -> RowGroups:
        return self.module.group(batch.keyed)

    def forward(self, batch: Batch, groups: RowGroups | None = None) -> Tensor:
        pooled: Tensor = self.module(batch.keyed, groups)
        return pooled


class FbgemmTables(Tables):
    """FBGEMM's table-batched embedding; its backward groups the ids and applies row-wise Adagrad.

    Args:
        cache_share: share of the rows that fit into a cache on the device, filled by `module.prefetch`; the table is
            in host memory. None: the table is on the device.
    """

    name = "fbgemm"

    def __init__(self, workload: Workload, device: torch.device = CPU, cache_share: float | None = None) -> None:
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

    def weights(self) -> list[Tensor]:
        return list(self.module.split_embedding_weights())

    def forward(self, batch: Batch) -> Tensor:
        pooled: Tensor = self.module(batch.values, batch.offsets)
        return pooled


class TorchTables(Tables):
    """One `torch.nn.EmbeddingBag(sparse=True)` per table, and `torch.optim.Adagrad`, which is not row-wise."""

    name = "torch"

    def __init__(self, workload: Workload, device: torch.device = CPU) -> None:
        dim, options = workload.dim, {"dtype": workload.dtype, "device": device}
        self.bags = torch.nn.ModuleList(
            # Allocated, not initialized: weights are copied later.
            torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=torch.empty(rows, dim, **options))
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


def step(tables: Tables, batch: Batch, gradient: Tensor) -> None:
    """Run a training step of the tables: forward, backward, update."""
    tables.backward(tables.forward(batch), gradient)


def copy_weights(source: Tables, target: Tables) -> None:
    with torch.no_grad():
        for fused, reference in zip(source.weights(), target.weights(), strict=True):
            reference.copy_(fused)


def check_forward(ours: Tables, peer: Tables, batch: Batch) -> None:
    """Assert that both forwards return the same values, within tolerances."""
    # Float32 sums of up to 100 small numbers in another order; torch rounds sums of 16-bit rows to 16 bits.
    dtype = batch.workload.dtype
    atol = 1e-5 if dtype == torch.float32 else 1e-4
    rtol = max(1e-3, torch.finfo(dtype).eps)
    with torch.no_grad():
        torch.testing.assert_close(peer.forward(batch), ours.forward(batch), rtol=rtol, atol=atol)


def check_step(ours: Tables, peer: Tables, batch: Batch, gradient: Tensor) -> None:
    """Run a step of both from the same weights; assert that it changed the weights, and in the same way."""
    for table in {0, batch.workload.num_tables - 1}:
        rows = batch.bags[table][0][:1000]
        initial = ours.weights()[table][rows]
        if table == 0:
            for tables in (ours, peer):
                step(tables, batch, gradient)
            assert not torch.equal(ours.weights()[table][rows], initial), "the step changed nothing"
        # Float32 sums of up to hundreds of thousands of gradients in another order; a step is about the rate, 0.02.
        torch.testing.assert_close(peer.weights()[table][rows], ours.weights()[table][rows], rtol=1e-3, atol=2e-4)


class Bench:
    """Tables of tritonemb and of the available peers, batches and a gradient of a workload, on the clock's device.

    The optimizer is "row-wise Adagrad", as in FBGEMM, or "Adagrad", as in PyTorch, which is then the only peer.
    """

    def __init__(self, workload: Workload, clock: Clock, optimizer: str) -> None:
        self.key = workload, clock.device, optimizer
        self.workload, self.device = workload, clock.device
        clock.begin(OURS)
        self.batches = draw_batches(workload, GPU_BATCHES if clock.on_gpu else CPU_BATCHES, self.device)
        self.gradient = draw_gradient(workload, self.device)
        self._fresh = self.gradient.clone()
        whole_rows = optimizer == "Adagrad"
        self.ours = OurTables(workload, self.device, optimizer=te.optim.Adagrad(LR, eps=EPS) if whole_rows else None)
        self.state_per_row = workload.dim if whole_rows else 1
        self.peers: dict[str, Tables] = {}
        self._errors: dict[str, str] = {}
        trained_alike = "torch" if whole_rows else "fbgemm"
        for name in PEERS:
            if name in clock.without or (name == "fbgemm" and (whole_rows or not has_fbgemm())):
                continue
            clock.begin(name)
            try:
                peer = PEERS[name](workload, self.device)
                copy_weights(self.ours, peer)
                check_forward(self.ours, peer, self.batches[0])
                if name == trained_alike and workload.dtype == torch.float32:
                    check_step(self.ours, peer, self.batches[0], self.gradient)
                self.peers[name] = peer
            except Exception as error:
                recover(error)
                self._errors[name] = describe(error)

    def batch(self, number: int) -> Batch:
        return self.batches[number % len(self.batches)]

    def fresh_gradient(self) -> Tensor:
        """Return the gradient, written again, so that it is in a CPU's caches as after a dense network's backward."""
        return self._fresh.copy_(self.gradient)

    def contenders(self, make: Callable[[Tables], Contender], names: Sequence[str] = tuple(PEERS)) -> list[Contender]:
        """Return contenders of tritonemb and of peers by name; a peer that is not available raises its error at run."""

        def broken(name: str, error: str) -> Contender:
            def fail(_: object) -> None:
                raise RuntimeError(error)

            return Contender(name, lambda number: None, fail)

        results = [make(tables) for tables in (self.ours, *(self.peers[name] for name in names if name in self.peers))]
        return results + [broken(name, self._errors[name]) for name in names if name in self._errors]


_last: Bench | None = None


def make_bench(workload: Workload, clock: Clock, optimizer: str = "row-wise Adagrad") -> Bench:
    """Return the tables of a workload, reused from the previous case if it is the same; memory is for one bench."""
    global _last
    if _last is None or _last.key != (workload, clock.device, optimizer):
        _last = None
        recover()
        _last = Bench(workload, clock, optimizer)
    return _last
