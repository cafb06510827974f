"""What is looked at first on a GPU: each launcher against its reference, training steps against the references' bits.

Beside these, rows that are prefetched ahead against the CPU kernels' bits, captured and compiled steps against eager
ones. `test_smoke.py` runs them; `archives.py` compiles what they launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import tritonemb as te
from benchmarks.gpu.tiers import Side
from tests.gpu.problems import hot_steps, run_step, warm_up
from tests.helpers import contents, fewer, make_collection
from tests.kernels.ahead_of_time_cases import CASES, on
from tritonemb.ops.registry import CPU as CPU_KERNELS
from tritonemb.ops.registry import REFERENCE, TRITON, use_kernels
from tritonemb.optim import OPTIMIZERS
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.table_set import PrefetchedFeatures

CORE = (
    "forward-dim128", "forward-none", "sample_weights-mean", "group-int64", "update-row_wise_adagrad",
    "update-adam", "update-bfloat16-stochastic", "row_gradients-dim128", "padding-int64", "interaction-26x128-bfloat16",
    "cross-3456-float32", "exchange-fp8_e4m3", "exchange-int8", "jagged-int64", "row_cache-lru-several",
    "move_rows-tables", "initial-dim128-named", "dynamic_index-several",
)  # fmt: skip
CPU = torch.device("cpu")
SUMS = ("sample_weights", "interaction", "cross")  # sums of products, which no order is promised for
# Rows of 16-byte vectors, bags without weights, as in the benchmarks: the same variants of kernels.
TABLES = [te.TableConfig("sum", 4000, 128), te.TableConfig("mean", 304, 64, pooling="mean")]
TABLES_AHEAD = {
    "dynamic": te.TableConfig("t", None, 64, capacity=1500, eviction=te.EvictionConfig(protect=16)),
    "host": te.TableConfig("t", 4000, 128, placement="host", cache=te.CacheConfig(share=0.3)),
}  # of the ids in 60 steps, 2,600, they hold some
LOOK_AHEAD, STEPS_AHEAD = 8, 60

Results = Callable[[torch.device], list[Tensor | None]]


class Check(NamedTuple):
    """Results by Triton's kernels on a device, and what they are compared with, on that device or the CPU.

    `units`: in the last place of the largest element of a tensor, that results may be off by; 0: the same bits.
    """

    results: Results
    expected: Results
    units: int = 0


def case_check(name: str) -> Check:
    """A case of ahead_of_time_cases against the references."""
    (case,) = (case for case in CASES if case.name == name)

    def call(kernels: str, device: torch.device | str) -> list[Tensor | None]:
        with on(device, kernels):
            return list(case.call() or ())

    units = 4 if name.startswith(SUMS) else 0
    return Check(lambda device: call(TRITON, device), lambda _: call(REFERENCE, "cpu"), units)


def train_steps(kernels: str, spec: te.optim.Optimizer, device: torch.device) -> list[Tensor | None]:
    """Tables and states after three steps with hot rows."""
    collection = make_collection(TABLES, spec).to(device)  # initial values have a check of their own
    with use_kernels(kernels):
        for batch, grad in hot_steps(collection, 3, batch_size=fewer(256, 2), weighted=False):
            run_step(collection, batch.to(device), grad.to(device))
        return list(contents(collection).values())


def steps_check(name: str) -> Check:
    step = partial(train_steps, spec=OPTIMIZERS[name](lr=0.05))
    return Check(lambda device: step(TRITON, device=device), lambda _: step(REFERENCE, device=torch.device("cpu")))


def repeat_step(device: torch.device, capture: bool) -> list[Tensor | None]:
    """The same step three times, replayed from a CUDA graph or eager."""
    collection = make_collection(TABLES, te.optim.Adam(lr=0.05), device=device)
    ((batch, grad),) = hot_steps(collection, 1, weighted=False)
    step = partial(run_step, collection, batch.to(device), grad.to(device))
    warm_up(step)
    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    for _ in range(3):
        graph.replay() if capture else step()
    return list(contents(collection).values())


def train_ahead(config: te.TableConfig, kernels: str, device: torch.device) -> list[Tensor | None]:
    """The table after steps whose batches were prefetched ahead on another stream, and evicted others' rows."""
    torch.manual_seed(0)
    collection = te.nn.EmbeddingBagCollection([config], te.optim.RowWiseAdagrad(lr=0.05), device)
    generator, side, ahead = torch.Generator().manual_seed(0), Side(device), deque[PrefetchedFeatures]()
    lengths, grad = torch.full((64,), 3), torch.randn(64, config.embedding_dim, generator=generator).to(device)
    with use_kernels(kernels):
        for step in range(STEPS_AHEAD + LOOK_AHEAD):
            if step < STEPS_AHEAD:
                ids = torch.randint(40 * step, 40 * step + 240, (192,), generator=generator)
                with side.on():
                    batch = te.KeyedJaggedTensor.from_lengths(["t"], ids, lengths).to(device)
                    ahead.append(te.nn.prefetch(collection, batch))
            if step >= LOOK_AHEAD:
                run_step(collection, ahead.popleft(), grad)
        (table,) = collection.tables
        statistics = table.statistics() if isinstance(table, DynamicTable) else collection.cache_statistics()["t"]
        assert statistics.evictions > 200, statistics
        return list(contents(collection).values())


def train_dlrm(mode: str | None, device: torch.device) -> list[Tensor | None]:
    """Losses, dense layers and tables of a DLRM after 20 steps; compiled in a mode of `torch.compile`, or eager."""
    torch.manual_seed(0)
    tables = [te.TableConfig(f"t{number}", 1000, 64) for number in range(8)]
    model = te.nn.DLRM(tables, 13, (64,), (64,), te.optim.RowWiseAdagrad(lr=0.05), device=device)
    dense_parameters = [p for name, p in model.named_parameters() if not name.startswith("embeddings")]
    optimizer = torch.optim.SGD(dense_parameters, lr=0.05)
    called = torch.compile(model, backend="tritonemb", mode=mode, fullgraph=True) if mode else model
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(20):
        dense, labels = torch.randn(256, 13, generator=generator), torch.rand(256, generator=generator).round()
        ids = torch.randint(1000, (8 * 256 * 3,), generator=generator)
        batch = te.KeyedJaggedTensor.from_lengths([t.name for t in tables], ids, torch.full((8 * 256,), 3)).to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = functional.binary_cross_entropy_with_logits(called(dense.to(device), batch), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return [torch.stack(losses), *model.state_dict().values()]


LAUNCHES = {name: case_check(name) for name in CORE}
LAUNCHES |= {f"steps-{name}": steps_check(name) for name in ("row_wise_adagrad", "adam")}
AHEAD = {
    name: Check(partial(train_ahead, config, TRITON), lambda _, c=config: train_ahead(c, CPU_KERNELS, CPU))
    for name, config in TABLES_AHEAD.items()
}
GRAPH = Check(partial(repeat_step, capture=True), partial(repeat_step, capture=False))
# What feeds back into 20 steps are sums of dense layers, for which Inductor may choose another order.
COMPILED = {
    mode: Check(partial(train_dlrm, mode), partial(train_dlrm, None), 1024) for mode in ("default", "reduce-overhead")
}


def compare(check: Check, device: torch.device) -> None:
    """Raise where results differ."""
    results, expected = check.results(device), check.expected(device)
    assert results, "there is nothing to compare"
    for number, (actual, target) in enumerate(zip(results, expected, strict=True)):
        units = check.units if target is not None and target.is_floating_point() else 0
        torch.testing.assert_close(
            actual, target, rtol=0, atol=units and units * torch.finfo(target.dtype).eps * float(target.abs().max()),
            equal_nan=True, check_device=False, msg=lambda text, number=number: f"{number}: {text}",
        )  # fmt: skip
    te.check_errors()
