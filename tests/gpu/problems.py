"""Collections and batches on a GPU, steps and their capture."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

import tritonemb as te
from benchmarks.gpu.tiers import Side
from tests.helpers import Step, make_collection, random_steps
from tritonemb.nn.collections import TableCollection
from tritonemb.ops.registry import TRITON, kernels_of, load, ops

TABLES = [
    te.TableConfig("aligned", 4000, 128),
    te.TableConfig("odd", 300, 7, features=["odd", "shared"], pooling="mean"),
    te.TableConfig("narrow", 50, 64, features=["shared"]),
]


def on_gpu(steps: Iterable[Step], dtype: torch.dtype = torch.float32) -> list[Step]:
    """The same batches and gradients on the GPU."""
    return [(batch.to("cuda"), grad.to("cuda", dtype)) for batch, grad in steps]


def make_gpu_collection(
    optimizer: te.optim.Optimizer | None, configs: Sequence[te.TableConfig] = TABLES, **options: object
) -> TableCollection:
    """As `make_collection`, so that the same tables can be had on the CPU."""
    return make_collection(configs, optimizer, device="cuda", **options)


def hot_steps(
    collection: TableCollection, num_steps: int, batch_size: int = 256, seed: int = 0, weighted: bool = True
) -> list[Step]:
    """Long bags in which half of the ids are among three: their rows are used thousands of times a batch."""
    return random_steps(collection, num_steps, batch_size=batch_size, max_length=40, weighted=weighted, seed=seed)


def run_step(collection: TableCollection, batch: te.KeyedJaggedTensor, grad: Tensor) -> Tensor:
    """Forward, backward and update; the output."""
    pooled = collection(batch)
    pooled.backward(grad)
    return pooled.detach()


def warm_up(step: Callable[[], object]) -> None:
    """Run what is about to be captured on a stream of its own, as CUDA graphs want it."""
    side = Side(torch.device("cuda"))
    with side.on():
        step()
    side.join()


def hash_kernels() -> None:
    """Have the keys of all kernels alike in every process: Triton's depend on which were hashed before."""
    from triton.runtime import JITFunction

    for op in (item for item in ops() if TRITON in kernels_of(item)):
        for value in list(vars(sys.modules[load(op, TRITON).__module__]).values()):
            if isinstance(value, JITFunction):
                _ = value.cache_key


@contextmanager
def counted_compilations() -> Iterator[Counter[bool]]:
    """How many kernels are taken from Triton's cache (True), and how many compiled."""
    from triton import knobs

    hash_kernels()
    counts: Counter[bool] = Counter()
    knobs.compilation.listener = lambda *, cache_hit, **_: counts.update([cache_hit])
    try:
        yield counts
    finally:
        knobs.compilation.listener = None
