"""Embedding modules of `torch.nn`, and what `te.fuse` and `te.optim.fused` make of them: ours is never the slower one.

Each point is one shape and one measured part, in the same setting for all. `te.fuse` is met with the module that it
replaces, part by part: the forward, and the backward to dense and to sparse gradients. `te.optim.fused` is met with the
faster of torch's sparse and dense ways to take a whole step by the same optimizer; a compiled model also with eager
ones and with Inductor alone. A point holds where ours has at least 0.97 of torch's speed, or takes no more than 60 µs a
module and 150 µs a step longer: what Python and the dispatcher cost where there is little to compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonemb as te
from benchmarks.measuring.clock import Contender, Timing, measure
from benchmarks.measuring.workload import Workload, draw_batches, same

LR = 0.01
SPEED = 0.97
PER_MODULE_MS, PER_STEP_MS = 0.06, 0.15
SECONDS = 4.0  # of one point
NUM_BATCHES = 4
MOST_DENSE_BYTES = 1 << 29  # of the gradients of a dense step
PARTS = ("forward", "dense backward", "sparse backward")
OPTIMIZERS: dict[str, tuple[Any, Any, Any]] = {  # ours, torch's for sparse gradients, for dense ones
    "SGD": (te.optim.SGD, torch.optim.SGD, torch.optim.SGD),
    "Adagrad": (te.optim.Adagrad, torch.optim.Adagrad, torch.optim.Adagrad),
    "Adam": (te.optim.Adam, torch.optim.SparseAdam, torch.optim.Adam),
}
ROWS = (  # `nn.Embedding`
    same(1, 1, 1, 4, 100),
    same(1, 26, 1, 16, 10_000),
    same(256, 3, 1, 16, 100),
    same(256, 11, 1, 32, 20_000),
    same(2048, 26, 1, 64, 100_000),
    same(8192, 8, 1, 128, 100_000),
    same(16, 1, 50, 128, 30_000),
    same(65_536, 1, 1, 8, 10_000_000),
    same(65_536, 4, 1, 8, 10_000),
    same(128, 26, 1, 256, 10_000),
)
BAGS = (  # `nn.EmbeddingBag`, mode "sum"
    same(1, 1, 1, 4, 100),
    same(1, 11, 50, 16, 10_000),
    same(128, 26, 1, 16, 100_000),
    same(256, 11, 10, 32, 20_000),
    same(256, 3, 5, 64, 1_000),
    same(512, 26, 20, 128, 10_000),
    same(2048, 26, 1, 64, 100_000),
    same(8192, 8, 50, 32, 100_000),
    same(2048, 1, 26, 64, 1_000_000),
    same(65_536, 4, 1, 16, 1_000_000),
    same(65_536, 1, 10, 8, 100_000),
    same(1024, 4, 20, 256, 100_000),
)
COMPILED = (*ROWS[:4], ROWS[9], *BAGS[:5])


@dataclass(frozen=True)
class Point:
    """`part` is one of `PARTS`, or the optimizer of a whole step."""

    shape: Workload
    pooled: bool
    part: str
    compiled: bool = False

    def __str__(self) -> str:
        kind = "bag" if self.pooled else "row"
        return f"{'compiled ' if self.compiled else ''}{self.part}, {kind} {self.shape}"


def points() -> list[Point]:
    found = []
    optimizers = list(OPTIMIZERS)
    for pooled, shapes in ((False, ROWS), (True, BAGS)):
        for number, shape in enumerate(shapes):
            parts = [part for part in PARTS if part != "dense backward" or dense_bytes(shape) <= MOST_DENSE_BYTES]
            found += [Point(shape, pooled, part) for part in parts]
            found += [Point(shape, pooled, optimizers[(number + more) % 3]) for more in range(1 + (number < 4))]
            if shape in COMPILED:
                found.append(Point(shape, pooled, optimizers[number % 2], compiled=True))
    return found


def dense_bytes(shape: Workload) -> int:
    return 4 * sum(shape.num_rows) * shape.dim


class Embeddings(nn.Module):
    """A module for each table, side by side in the result `[B, T * L * D]`, or `[B, T * D]` if pooled."""

    def __init__(self, shape: Workload, pooled: bool, sparse: bool, weights: list[Tensor]) -> None:
        super().__init__()
        options = {"mode": "sum"} if pooled else {}
        make: Any = nn.EmbeddingBag if pooled else nn.Embedding
        sizes = shape.num_rows[0], shape.dim
        self.tables = nn.ModuleList(make(*sizes, sparse=sparse, _weight=weight, **options) for weight in weights)

    def forward(self, ids: list[Tensor]) -> Tensor:
        return torch.cat([table(each).flatten(1) for table, each in zip(self.tables, ids, strict=True)], 1)


class Trained:
    """A model and how it is stepped."""

    def __init__(self, name: str, forward: Any, optimizer: Any, gradient: Tensor) -> None:
        self.name, self.forward, self.optimizer, self.gradient = name, forward, optimizer, gradient

    def step(self, ids: list[Tensor]) -> None:
        self.optimizer.zero_grad()
        self.forward(ids).backward(self.gradient)
        self.optimizer.step()


def parts_of(point: Point, gradient: Tensor) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """What each contender prepares and runs, ours first; they share the weights, which do not change."""
    weights = new_weights(point.shape)
    sparse = point.part == "sparse backward"
    theirs, ours = (Embeddings(point.shape, point.pooled, sparse, weights) for _ in range(2))
    te.fuse(ours)
    if point.part == "forward":
        return {"te.fuse": (lambda ids: ids, ours), "torch": (lambda ids: ids, theirs)}

    def prepare(model: nn.Module, ids: list[Tensor]) -> Tensor:
        model.zero_grad()
        output: Tensor = model(ids)
        return output

    def backward(output: Tensor) -> None:
        output.backward(gradient)

    return {"te.fuse": (partial(prepare, ours), backward), "torch": (partial(prepare, theirs), backward)}


def steps_of(point: Point, gradient: Tensor) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """The same for whole steps."""
    fused, by_sparse, by_dense = OPTIMIZERS[point.part]
    weights = new_weights(point.shape)

    def model(sparse: bool) -> Embeddings:
        return Embeddings(point.shape, point.pooled, sparse, [weight.clone() for weight in weights])

    ours = model(sparse=True)
    optimizer = te.optim.fused(ours, fused(LR))
    forward: Any = torch.compile(ours, backend=te.compiler.tritonemb) if point.compiled else ours
    trained = [Trained("te.optim.fused", forward, optimizer, gradient)]
    sparse = model(sparse=True)
    trained.append(Trained("torch, sparse", sparse, by_sparse(sparse.parameters(), lr=LR), gradient))
    if dense_bytes(point.shape) <= MOST_DENSE_BYTES:
        dense = model(sparse=False)
        trained.append(Trained("torch, dense", dense, by_dense(dense.parameters(), lr=LR), gradient))
        if point.compiled:
            dense = model(sparse=False)
            optimizer = by_dense(dense.parameters(), lr=LR)
            trained.append(Trained("Inductor, dense", torch.compile(dense), optimizer, gradient))
    return {one.name: (lambda ids: ids, one.step) for one in trained}


def new_weights(shape: Workload) -> list[Tensor]:
    return [torch.empty(num_rows, shape.dim).uniform_(-1, 1) for num_rows in shape.num_rows]


def ids_of(point: Point) -> list[list[Tensor]]:
    """Of each batch and table, int64 `[B, L]`; `[B]` for rows with one id."""
    size = (-1, point.shape.bag_sizes[0]) if point.pooled or point.shape.bag_sizes[0] > 1 else (-1,)
    return [[ids.view(size) for ids, _ in batch.bags] for batch in draw_batches(point.shape, NUM_BATCHES)]


@pytest.mark.parametrize("point", points(), ids=str)
def bench_modules(point: Point, benchmark: Any, record: Callable[..., None]) -> None:
    torch._dynamo.reset()
    batches, shape = ids_of(point), point.shape
    width = shape.num_tables * shape.dim * (1 if point.pooled else shape.bag_sizes[0])
    gradient = torch.randn(shape.batch_size, width, generator=torch.Generator().manual_seed(0))
    found = (parts_of if point.part in PARTS else steps_of)(point, gradient)
    contenders = [
        Contender(name, lambda number, prepare=prepare: prepare(batches[number % NUM_BATCHES]), run)
        for name, (prepare, run) in found.items()
    ]
    for warm_up in range(2):  # compile
        begin = time.perf_counter()
        for contender in contenders:
            contender.run(contender.prepare(warm_up))
    rounds = min(max(int(SECONDS / (time.perf_counter() - begin)), 5), 300)
    ours, *peers = measure(benchmark, contenders, rounds)
    record([], [verdict(point, ours, min(peers, key=lambda timing: timing.percentile(50)))])


def verdict(point: Point, ours: Timing, peer: Timing) -> dict[str, Any]:
    mine, its = ours.percentile(50), peer.percentile(50)
    return {
        "op": f"{'compiled ' if point.compiled else ''}{point.part}",
        "shape": f"{'bag' if point.pooled else 'row'} {point.shape}",
        "measured": f"{peer.name} {its:.3f} ms / {ours.name} {mine:.3f} ms",
        "ratio": its / mine,
        "target": f"at least {SPEED}, or {1000 * PER_MODULE_MS:g} µs a module and {1000 * PER_STEP_MS:g} µs a step",
        "met": its >= SPEED * mine or mine - its <= PER_MODULE_MS * point.shape.num_tables + PER_STEP_MS,
    }
