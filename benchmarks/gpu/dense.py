"""What stands around the tables: codecs, the dot interaction, and a whole DLRM step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import tritonemb as te
from benchmarks.gpu.clock import Clock, Contender, Outcome
from benchmarks.gpu.embeddings import OURS, Bench, copy_contender
from benchmarks.gpu.workload import Batch
from tritonemb.kernels.packing import make_packing
from tritonemb.nn.models import MLP
from tritonemb.ops.quantize import quantize_pack, quantize_unpack

NUM_DENSE = 13
BOTTOM_MLP, TOP_MLP = (512, 256), (1024, 1024, 512, 256)
STEP_REPEATS = 5
COMPILED = "torch, compiled"


def codec(name: str, direction: str, num_rows: int, num_tables: int, dim: int, device: torch.device) -> list[Contender]:
    """Pack or unpack a float32 matrix `[num_rows, num_tables * dim]` for 8 ranks, tables in turn; and a copy."""
    width = num_tables * dim
    parts = [[(t * dim, dim) for t in range(rank, num_tables, 8)] for rank in range(min(8, num_tables))]
    packing = make_packing(parts, width, name, device)
    matrix = torch.randn(num_rows, width, device=device)
    saturated = torch.zeros((), dtype=torch.int64, device=device)
    message = quantize_pack(matrix, packing, saturated)
    # Each element is read once and written once, in the two formats; "int8" adds a scale and an offset a row and piece.
    num_bytes = matrix.numel() * 4 + message.numel()

    def run(_: Any) -> object:
        if direction == "pack":
            return quantize_pack(matrix, packing, saturated)
        return quantize_unpack(message, packing, torch.float32, saturated)

    return [Contender(OURS, lambda number: None, run, num_bytes), copy_contender(num_bytes, device)]


def plain_interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """DLRM's formulation in PyTorch: dense vector, then products below the diagonal."""
    batch_size, dim = dense.shape
    vectors = torch.cat([dense.unsqueeze(1), sparse.view(batch_size, -1, dim)], dim=1)
    num_vectors = vectors.shape[1]
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1, device=dense.device)
    return torch.cat([dense, products[:, row, column]], dim=1)


def interaction(
    batch_size: int, num_features: int, dim: int, dtype: torch.dtype, device: torch.device
) -> list[Contender]:
    """Forward and backward, ours, PyTorch's compiled and eager formulation, and a copy."""
    dense = torch.randn(batch_size, dim, device=device, dtype=dtype, requires_grad=True)
    sparse = torch.randn(batch_size, num_features * dim, device=device, dtype=dtype, requires_grad=True)
    out_width = dim + num_features * (num_features + 1) // 2
    gradient = torch.randn(batch_size, out_width, device=device, dtype=dtype)
    # Forward: read the vectors, write the output; backward: read vectors and gradient, write the vectors' gradients.
    num_bytes = batch_size * (3 * (num_features + 1) * dim + 2 * out_width) * dtype.itemsize

    def contender(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Contender:
        def run(_: Any) -> object:
            return torch.autograd.grad(function(dense, sparse), (dense, sparse), gradient)

        return Contender(name, lambda number: None, run, num_bytes)

    ours = te.nn.DotInteraction(num_features)
    # Sums of 128 products of normal numbers, rounded to 8 bits where they are bfloat16.
    torch.testing.assert_close(ours(dense, sparse), plain_interaction(dense, sparse), rtol=2e-2, atol=0.2)
    contenders = [
        contender(OURS, ours),
        contender(COMPILED, torch.compile(plain_interaction, dynamic=False)),
        contender("torch, eager", plain_interaction),
    ]
    return [*contenders, copy_contender(num_bytes, device)]


class DLRMOn(nn.Module):
    """The network of `te.nn.DLRM` over any tables: what one builds on FBGEMM today, with a compiled interaction."""

    def __init__(self, lookup: Callable[[Batch], Tensor], num_tables: int, dim: int, device: torch.device) -> None:
        super().__init__()
        self.lookup = lookup
        self.bottom = MLP(NUM_DENSE, [*BOTTOM_MLP, dim], device=device)
        self.top = MLP(dim + num_tables * (num_tables + 1) // 2, [*TOP_MLP, 1], last_activation=False, device=device)
        self.interaction = torch.compile(plain_interaction, dynamic=False)

    def forward(self, dense: Tensor, batch: Batch) -> Tensor:
        return self.top(self.interaction(self.bottom(dense), self.lookup(batch))).squeeze(1)


def dlrm_step(bench: Bench) -> list[Contender]:
    """A training step: forward, loss, backward with the tables' update, and SGD on the dense part.

    Ours is the same network over our tables with our interaction; MLPs, loss and optimizer are the same code.
    """
    w, device = bench.workload, bench.device
    dense = torch.randn(w.batch_size, NUM_DENSE, device=device)
    labels = (torch.rand(w.batch_size, device=device) < 0.5).float()

    def contender(name: str, lookup: Callable[[Batch], Tensor]) -> Contender:
        torch.manual_seed(0)
        model = DLRMOn(lookup, w.num_tables, w.dim, device)
        if name == OURS:
            model.interaction = te.nn.DotInteraction(w.num_tables)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)

        def run(batch: Batch) -> None:
            optimizer.zero_grad(set_to_none=True)
            functional.binary_cross_entropy_with_logits(model(dense, batch), labels).backward()
            optimizer.step()

        return Contender(name, bench.batch, run, 0)

    contenders = [contender(OURS, bench.ours.forward)]
    if "fbgemm" in bench.peers:
        contenders.append(contender("fbgemm", bench.peers["fbgemm"].forward))
    return contenders


def measure_dlrm(bench: Bench, clock: Clock, rounds: int) -> Outcome:
    outcome = clock.measure(dlrm_step(bench), max(2, rounds // 6), 2, STEP_REPEATS)
    outcome.errors = {name: text for name, text in bench.errors.items() if name == "fbgemm"} | outcome.errors
    return outcome
