"""A whole DLRM step on a GPU: the tables, the dense part around them, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import tritonemb as te
from benchmarks.bench_interaction import plain_interaction
from benchmarks.cases import OURS, Case
from benchmarks.clock import Clock, Contender
from benchmarks.peers import Tables, make_bench
from benchmarks.workload import Batch, Workload, workloads
from tritonemb.nn.models import MLP

NUM_DENSE = 13
BOTTOM_MLP, TOP_MLP = (512, 256), (1024, 1024, 512, 256)
REPEATS = 5


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


class DLRMStep:
    """A training step of such a network: loss, backward with the tables' update, and SGD on the dense part.

    Dense features, labels and first weights are the same for all. `ours`: with our interaction.
    """

    def __init__(self, lookup: Callable[[Any], Tensor], w: Workload, device: torch.device, ours: bool) -> None:
        torch.manual_seed(0)
        self._model = DLRMOn(lookup, w.num_tables, w.dim, device)
        if ours:
            self._model.interaction = te.nn.DotInteraction(w.num_tables)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, foreach=True)
        self._dense = torch.randn(w.batch_size, NUM_DENSE, device=device)
        self._labels = (torch.rand(w.batch_size, device=device) < 0.5).float()

    def __call__(self, batch: Any, after_forward: Callable[[], None] = lambda: None) -> Tensor:
        """The loss."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = functional.binary_cross_entropy_with_logits(self._model(self._dense, batch), self._labels)
        after_forward()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    for workload in workloads(device, tiny):
        if workload.name == "mlperf":
            yield Case("DLRM step", str(workload), partial(make, workload), str(workload), repeats=REPEATS)


def make(workload: Workload, clock: Clock) -> list[Contender]:
    """Ours is the same network over our tables with our interaction; MLPs, loss and optimizer are the same code."""
    bench = make_bench(workload, clock)

    def contender(tables: Tables) -> Contender:
        step = DLRMStep(tables.forward, workload, clock.device, tables.name == OURS)
        return Contender(tables.name, bench.batch, step)

    return bench.contenders(contender, ["fbgemm"])


def bench_dlrm(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
