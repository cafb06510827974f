"""Training from several Python threads at once, and in a forked child."""

from __future__ import annotations

import copy
import hashlib
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits, configurations, contents, make_collection, random_steps, train
from tests.strategies import TABLE_DTYPES

TABLES = [te.TableConfig(f"t{index}", 300, 64, dtype=dtype) for index, dtype in enumerate(TABLE_DTYPES)]
SHAPE = {"batch_size": 64, "max_length": 9, "weighted": True}


def make() -> te.nn.EmbeddingBagCollection:
    return make_collection(TABLES, te.optim.Adam(lr=0.1))


def test_several_threads_train_at_once():
    torch.set_num_threads(3)
    num_callers = 4
    collections = [make() for _ in range(num_callers)]
    steps = [random_steps(collection, 10, seed=100 * index, **SHAPE) for index, collection in enumerate(collections)]
    twins = copy.deepcopy(collections)
    with ThreadPoolExecutor(num_callers) as callers:
        list(callers.map(train, collections, steps))
    for collection, twin, local in zip(collections, twins, steps, strict=True):
        train(twin, local)
        assert_same_bits(contents(collection), contents(twin))


def test_several_threads_look_one_collection_up_at_once():
    torch.set_num_threads(2)
    collection = make()
    batches = [batch for batch, _ in random_steps(collection, 12, **SHAPE)]
    expected = [collection(batch).detach() for batch in batches]
    with ThreadPoolExecutor(4) as callers:
        actual = list(callers.map(lambda batch: collection(batch).detach(), batches))
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def _train_in_child(collection, steps, queue) -> None:
    train(collection, steps)
    queue.put({name: tensor.float().numpy() for name, tensor in contents(collection).items()})


def check_a_forked_child(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    collection = make()
    steps = random_steps(collection, 4, **SHAPE)
    train(collection, steps[:2])  # the parent's threads are up
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_train_in_child, args=(collection, steps[2:], queue))
    child.start()
    try:
        result = queue.get(timeout=100)
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
    initial = contents(collection)
    train(collection, steps[2:])
    final = contents(collection)
    for name, array in result.items():
        assert torch.equal(torch.from_numpy(array).to(final[name].dtype).reshape(final[name].shape), final[name])
    assert not torch.equal(initial["t0.weight"], final["t0.weight"])


def run_alone(command: str, **variables: str) -> str:
    """What a process of its own prints that knows this file's names."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = f"from tests.nn.test_processes import *; {command}"
    return subprocess.check_output([sys.executable, "-c", command], env=env, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.more
def test_a_forked_child_trains(num_threads):
    """PyTorch refuses it where an earlier test has started threads of autograd."""
    assert run_alone(f"check_a_forked_child({num_threads}); print('done')").strip() == "done"


def digest_of_training() -> str:
    """A hash of all that several optimizers made of some steps."""
    digest = hashlib.sha256()
    for pooled in (True, False):
        tables = [
            te.TableConfig(f"t{i}", 300, 60, pooling="sum" if pooled else "none", dtype=d)
            for i, d in enumerate(TABLE_DTYPES)
        ]
        for spec in configurations():
            collection = make_collection(tables, spec, pooled)
            train(collection, random_steps(collection, 3, **SHAPE))
            for name, tensor in contents(collection).items():
                digest.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's MALLOC_PERTURB_")
@pytest.mark.parametrize("byte", [pytest.param(85, marks=pytest.mark.slow), 255])
@pytest.mark.more
def test_fresh_memory_is_never_read(byte):
    """Memory that kernels allocate, in Python or compiled, comes filled with a byte: the same bits must come out."""
    assert run_alone("print(digest_of_training())", MALLOC_PERTURB_=str(byte)).strip() == digest_of_training()
