"""What kernels do differently for some shapes makes no difference to results: threads, streamed outputs, single ids."""

from __future__ import annotations

import copy
import ctypes

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits, contents, make_collection, train
from tests.strategies import TABLE_DTYPES, random_batch, random_weights
from tritonemb.kernels.cpu import embedding_bag as kernel
from tritonemb.kernels.cpu import jit
from tritonemb.kernels.cpu.embedding_bag import embedding_bag
from tritonemb.layout import make_layout
from tritonemb.ops.registry import use_kernels

THREADS = (1, 2, 4)


def configs_of(dims: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[te.TableConfig]:
    """One table a dim; the second is fed by three keys, one of which also feeds the third, which averages."""
    features = [["a"], ["b", "c", "d"], ["c"], ["e"]]
    return [
        te.TableConfig(f"table{i}", 90 + i, dim, features=features[i], pooling="mean" if i == 2 else "sum", dtype=dtype)
        for i, dim in enumerate(dims)
    ]


def batch_of(kind: str, weighted: bool, batch_size: int = 256) -> te.KeyedJaggedTensor:
    """Bags of one id each, of several, or of none and several."""
    keys, generator = ["a", "b", "c", "d", "e"], torch.Generator().manual_seed(1)
    if kind == "ragged":
        return random_batch(dict.fromkeys(keys, 90), keys, batch_size, 5, weighted, seed=3)
    lengths = torch.full((len(keys) * batch_size,), 1 if kind == "single" else 4)
    values = torch.randint(0, 90, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(values.shape, generator=generator) if weighted else None
    return te.KeyedJaggedTensor(keys, values, weights, lengths=lengths)


@pytest.mark.parametrize("dims", [(64, 128, 16, 192), (1, 7, 130, 61)], ids=str)
@pytest.mark.parametrize("dtype", TABLE_DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["single", "equal", "ragged"])
@pytest.mark.usefixtures("poisoned")
def test_a_streamed_output_has_the_same_bits(kind, weighted, dtype, dims, monkeypatch):
    """Where every row of it lies at an aligned address, where some do, and where none does."""
    configs, batch = configs_of(dims, dtype), batch_of(kind, weighted)
    layout, weights = make_layout(configs, batch.keys(), True), random_weights(configs)
    args = (weights, batch.values(), batch.offsets(), batch.weights_or_none(), layout, True)
    torch.set_num_threads(1)
    monkeypatch.setattr(kernel, "STREAMED_BYTES", 1 << 62)
    expected = embedding_bag(*args)
    for streamed_bytes in (0, 1 << 62):
        monkeypatch.setattr(kernel, "STREAMED_BYTES", streamed_bytes)
        for num_threads in THREADS:
            torch.set_num_threads(num_threads)
            assert torch.equal(embedding_bag(*args), expected)


@pytest.mark.parametrize("dims", [(64, 128, 16, 192), (1, 7, 130, 61)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["single", "equal", "ragged"])
def test_updates_have_the_same_bits_on_any_threads_and_follow_the_reference(kind, weighted, dims, monkeypatch):
    collection = make_collection(configs_of(dims), te.optim.RowWiseAdagrad(lr=0.1))
    twins = [copy.deepcopy(collection) for _ in range(len(THREADS) + 1)]
    batch = batch_of(kind, weighted)
    width = sum(config.embedding_dim * len(config.feature_names) for config in collection.configs)
    grad = torch.randn(batch.stride(), width, generator=torch.Generator().manual_seed(2))
    with use_kernels("reference"):
        train(collection, [(batch, grad)] * 3)
    for twin, num_threads in zip(twins, THREADS, strict=False):
        torch.set_num_threads(num_threads)
        train(twin, [(batch, grad)] * 3)
        assert_same_bits(contents(twin), contents(twins[0]), f"{num_threads} threads")
    monkeypatch.setattr(jit._team, "value", ctypes.cast(jit._python_team, ctypes.c_void_p).value)
    train(twins[-1], [(batch, grad)] * 3)
    assert_same_bits(contents(twins[-1]), contents(twins[0]), "threads of our own")
    for name, tensor in contents(collection).items():
        torch.testing.assert_close(contents(twins[0])[name], tensor, rtol=1e-5, atol=1e-5)
