"""What a training step allocates: no gradient for each position, and none of the result's twice."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonemb as te
from benchmarks import bench_memory
from benchmarks.bench_memory import profiled_peak
from tests.helpers import make_collection
from tritonemb.ops.registry import CPU, use_kernels

BATCH, TABLES, BAG, DIM = 64, 4, 20, 64
IDS = BATCH * TABLES * BAG
AN_ID = 40  # bytes, of what torch allocates for it: ids and offsets that are joined, weights and scales
ALL = 4 * IDS * DIM  # a gradient of all positions; of the result, pooled:
RESULT = ALL // BAG

ADAGRAD = te.optim.Adagrad(lr=0.1)


def draw(jagged: bool, weighted: bool) -> te.KeyedJaggedTensor:
    lengths = torch.full((TABLES * BATCH,), BAG)
    if jagged:
        lengths[::2], lengths[1::2] = 2 * BAG, 0
    weights = torch.rand(IDS) if weighted else None
    keys = [f"table_{number}" for number in range(TABLES)]
    return te.KeyedJaggedTensor.from_lengths(keys, torch.randint(0, 500, (IDS,)), lengths, weights)


def collection(pooling: str) -> nn.Module:
    configs = [te.TableConfig(f"table_{t}", 500, DIM, pooling=pooling) for t in range(TABLES)]
    return make_collection(configs, ADAGRAD, pooled=pooling != "none")


def step(model: nn.Module, batch: te.KeyedJaggedTensor, gradient: Tensor) -> None:
    result = model(batch)
    (result if isinstance(result, Tensor) else result.values()).backward(gradient)


def peak_of(run: Any) -> int:
    """Of a step, the second: the first compiles kernels and makes states."""
    with use_kernels(CPU):
        run()
        return profiled_peak(run)


@pytest.mark.parametrize(
    ("pooling", "jagged", "weighted"),
    [("sum", False, False), ("sum", True, True), ("mean", True, False), ("mean", False, True)],
)
def test_a_pooled_step_allocates_its_result_and_little_for_each_id(pooling, jagged, weighted):
    batch, gradient = draw(jagged, weighted), torch.randn(BATCH, TABLES * DIM)
    peak = peak_of(partial(step, collection(pooling), batch, gradient))
    assert RESULT <= peak <= RESULT + AN_ID * IDS < ALL


def test_a_step_that_is_not_pooled_allocates_its_result_and_little_for_each_id():
    peak = peak_of(partial(step, collection("none"), draw(True, False), torch.randn(IDS, DIM)))
    assert ALL <= peak <= ALL + AN_ID * IDS < 2 * ALL


@pytest.mark.parametrize("pooled", [True, False])
def test_a_step_of_separate_modules_has_no_copy_of_a_gradient(pooled):
    make: Any = partial(nn.EmbeddingBag, mode="sum") if pooled else nn.Embedding
    model = nn.ModuleList(make(500, DIM, sparse=True) for _ in range(TABLES))
    te.optim.fused(model, ADAGRAD)
    ids, size = torch.randint(0, 500, (TABLES, BATCH, BAG)), RESULT if pooled else ALL
    gradient = torch.randn(BATCH, TABLES * DIM) if pooled else torch.randn(BATCH, BAG, TABLES * DIM)

    def run() -> None:
        results = [module(item) for module, item in zip(model, ids, strict=True)]
        torch.autograd.backward(results, gradient.split(DIM, -1))

    peak = peak_of(run)
    assert size <= peak <= size + AN_ID * IDS < size + ALL


def test_a_table_that_is_pooled_in_two_ways_has_the_gradients_of_its_bags_joined():
    model = nn.ModuleList(nn.EmbeddingBag(500, DIM, mode=mode, sparse=True) for mode in ("sum", "mean"))
    model[1].weight = model[0].weight
    te.optim.fused(model, ADAGRAD)
    ids, gradient, size = torch.randint(0, 500, (BATCH, 2 * BAG)), torch.randn(BATCH, DIM), 4 * BATCH * DIM

    def run() -> None:
        torch.autograd.backward([module(ids) for module in model], [gradient, gradient])

    assert peak_of(run) <= 6 * size + AN_ID * BATCH * 4 * BAG < 4 * BATCH * 2 * BAG * DIM


def test_accumulated_gradients_are_kept_and_joined_as_those_of_bags():
    model, batch, gradient = collection("sum"), draw(False, False), torch.randn(BATCH, TABLES * DIM)

    def run() -> None:
        with model.accumulate():
            for _ in range(2):
                step(model, batch, gradient)

    assert peak_of(run) <= 2 * 2 * RESULT + RESULT + 2 * 2 * AN_ID * IDS < ALL


@pytest.mark.more
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_compiled_kernels_need_little_for_each_id_too(monkeypatch):
    """All that a process allocates: sorted pairs, numbers of bags, and what two threads work with."""
    shape, threads = next(name for name in bench_memory.SHAPES if "T32" in name), 2
    monkeypatch.chdir(Path(bench_memory.ROOT))
    result = bench_memory.in_own_process("tritonemb, row-wise Adagrad", shape, "cpu", str(threads))
    ids, bags = result["ids"], result["ids"] // 20
    assert result["peak_bytes"] <= result["result_bytes"] + 8 * ids + 8 * bags + threads * (200_000 + 8 * ids // 32)
