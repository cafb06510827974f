"""A whole DLRM step: the tables, the dense part around them, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import tritonemb as te
from benchmarks.bench_interaction import plain_interaction
from benchmarks.cases import OURS
from benchmarks.clock import Clock, Contender, Outcome
from benchmarks.gpu.embeddings import Bench
from benchmarks.gpu.workload import Batch
from tritonemb.nn.models import MLP

NUM_DENSE = 13
BOTTOM_MLP, TOP_MLP = (512, 256), (1024, 1024, 512, 256)
STEP_REPEATS = 5


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


def measure_dlrm(bench: Bench, clock: Clock, rounds: int, graph: bool) -> Outcome:
    return clock.measure(dlrm_step(bench), max(2, rounds // 6), 2, STEP_REPEATS, graph)
