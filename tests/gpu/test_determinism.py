"""Same inputs, same bits, whatever else the GPU does meanwhile."""

from __future__ import annotations

import copy

import pytest
import torch

import tritonemb as te
from tests.gpu.problems import TABLES, hot_steps, make_gpu_collection, on_gpu, run_step
from tests.helpers import assert_same_bits, configurations, contents

pytestmark = [pytest.mark.gpu, pytest.mark.more]

NUM_RUNS = 100


def disturb(stream: torch.cuda.Stream, size: int) -> None:
    """Keep some of the processors busy with other work, a different amount each time."""
    with torch.cuda.stream(stream):
        matrix = torch.ones(size, size, device="cuda")
        for _ in range(3):
            matrix = matrix @ matrix * 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", configurations(), ids=lambda spec: spec.name)
def test_a_hundred_runs_have_the_same_bits(spec, dtype):
    configs = [
        te.TableConfig(c.name, c.num_embeddings, c.embedding_dim, c.features, c.pooling, dtype=dtype) for c in TABLES
    ]
    start = make_gpu_collection(spec, configs)
    steps = on_gpu(hot_steps(start, 2), dtype)
    stream = torch.cuda.Stream()
    expected = None
    for run in range(NUM_RUNS):
        collection = copy.deepcopy(start)
        disturb(stream, 64 + 16 * run)
        outputs = [run_step(collection, *step) for step in steps]
        actual = contents(collection) | {f"output {index}": output for index, output in enumerate(outputs)}
        expected = expected or actual
        assert_same_bits(actual, expected, f"run {run}")
    moved = expected["aligned.weight"] != contents(start)["aligned.weight"]
    assert moved.any()


def test_grouping_ahead_on_another_stream_has_the_same_bits():
    spec = te.optim.RowWiseAdagrad(lr=0.1)
    collection, ahead = make_gpu_collection(spec), make_gpu_collection(spec)
    stream = torch.cuda.Stream()
    for batch, grad in on_gpu(hot_steps(collection, 5)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            groups = ahead.group(batch)
        torch.cuda.current_stream().wait_stream(stream)
        ahead(batch, groups).backward(grad)
        run_step(collection, batch, grad)
    assert_same_bits(contents(ahead), contents(collection))


@pytest.mark.usefixtures("dynamo")
def test_compiled_steps_have_the_bits_of_eager_ones():
    spec = te.optim.Adam(lr=0.1)
    collection, twin = make_gpu_collection(spec), make_gpu_collection(spec)
    compiled = torch.compile(twin, fullgraph=True, dynamic=True)
    for batch, grad in on_gpu(hot_steps(collection, 3)):
        expected = run_step(collection, batch, grad)
        actual = compiled(batch)
        actual.backward(grad)
        assert torch.equal(actual, expected)
    assert_same_bits(contents(twin), contents(collection))
