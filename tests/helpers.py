"""What several tests do with collections: train them, look at everything they hold, compare it."""

from __future__ import annotations

import functools
import json
import os
import select
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from torch import Tensor

import tritonemb as te
from tests.formulas import custom
from tests.strategies import random_batch, random_weights, rows_of
from tritonemb.kernels.triton_utils import interpreting
from tritonemb.nn.collections import TableCollection
from tritonemb.optim import OPTIMIZERS
from tritonemb.storage.checkpoint import MANIFEST, size_and_checksum
from tritonemb.utils import seal

Step = tuple[te.KeyedJaggedTensor, Tensor]
INTERPRETED = interpreting()
CACHED = "cached disk"  # a placement on disk with some rows in host memory
DEADLINE = 120.0  # seconds until a wait for another thread or process fails, however busy the machine is
_Size = TypeVar("_Size")


class Calls:
    """Unpickled, it calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def resealed(path: Path, *names: str) -> None:
    """Let the manifest have the checksums of files that were changed, as whoever changes them can."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"] |= {name: size_and_checksum(path / name) for name in names}
    (path / MANIFEST).write_text(seal(json.dumps({name: manifest[name] for name in manifest if name != "sha256"})))


def resident_growth(do: Callable[[], object], attempts: int = 3) -> int:
    """Bytes by which the resident set grows while `do` runs and what it returns lives: the least of a few attempts.

    Other threads and a fragmented heap may add to any one of them.
    """
    process, growths = psutil.Process(), []
    for _ in range(attempts):
        initial = process.memory_info().rss
        retained = do()
        growths.append(process.memory_info().rss - initial)
        del retained
    return min(growths)


def process_ends(pid: int) -> bool:
    """Wait for the end of a process, whoever started it; whether it comes in time. Its parent may not have noticed."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], DEADLINE)[0])
    finally:
        os.close(process)


def fewer(full: _Size, interpreted: _Size) -> _Size:
    """`full`, or `interpreted` where kernels are interpreted, which takes thousands of times as long."""
    return interpreted if INTERPRETED else full


def breadth(values: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """Values of a parameter, of which `make test` runs those that are `kept`."""
    chosen = list(kept)
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.more) for value in values]


def living(config: te.TableConfig, placement: str, cache: te.CacheConfig) -> te.TableConfig:
    """A table in this place, which may be `CACHED`."""
    if placement == CACHED:
        return replace(config, placement="disk", cache=replace(cache, host_rows=64))
    return replace(config, placement=placement, cache=cache)


def contents(collection: TableCollection) -> dict[str, Tensor]:
    """Copies of every table, every state and the step."""
    return {name: tensor.detach().clone() for name, tensor in collection.state_dict().items()}


def assert_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], title: str = "") -> None:
    """Equal names, dtypes and bits; NaN equals NaN."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, f"{title} {name}"
        bits = [inputs.contiguous().view(torch.uint8) for inputs in (actual[name], tensor)] if tensor.dim() else []
        same = torch.equal(*bits) if bits else True
        assert same, f"{title} {name}: {(actual[name] != tensor).sum()} of {tensor.numel()} elements differ"
        assert tensor.dim() or torch.equal(actual[name], tensor), f"{title} {name}"


def assert_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float, atol: float, title: str = ""
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name].double(),
            tensor.double(),
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{title} {name}: {text}",
        )


def make_collection(
    configs: Sequence[te.TableConfig], optimizer: te.optim.Optimizer | None, pooled: bool = True, **options: Any
) -> TableCollection:
    """A collection with normal weights that depend on nothing but the tables' shapes."""
    kind = te.nn.EmbeddingBagCollection if pooled else te.nn.EmbeddingCollection
    collection = kind(configs, optimizer=optimizer, **options)
    weights = random_weights([replace(config, dtype=config.row_dtype) for config in configs])
    with torch.no_grad():
        for table, weight in zip(collection.tables, weights, strict=True):
            table.assign({"weight": weight})
    return collection


def output_of(collection: Any, batch: te.KeyedJaggedTensor) -> Tensor:
    """The tensor that a collection returns, pooled or not."""
    result = collection(batch)
    return result if isinstance(result, Tensor) else result.values()


def train(collection: Any, steps: Iterable[Step]) -> None:
    """Give each batch's output its gradient."""
    for batch, grad in steps:
        output_of(collection, batch).backward(grad)


def width_of(collection: TableCollection, batch: te.KeyedJaggedTensor) -> tuple[int, int]:
    """The shape of a collection's output."""
    configs = collection.configs
    if collection.table_set.pooled:
        return batch.stride(), sum(c.embedding_dim * len(c.feature_names) for c in configs)
    return batch.values().numel(), configs[0].embedding_dim


def random_steps(
    collection: TableCollection,
    num_steps: int,
    batch_size: int = 16,
    max_length: int = 5,
    weighted: bool = False,
    seed: int = 0,
) -> list[Step]:
    """Batches with repeated ids, each with a normal gradient in the output's dtype."""
    rows = rows_of(collection.configs)
    generator = torch.Generator().manual_seed(seed)
    dtypes = {table.weight.dtype for table in collection.tables}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    steps = []
    for index in range(num_steps):
        batch = random_batch(rows, list(rows), batch_size, max_length, weighted, seed=seed + index)
        steps.append((batch, torch.randn(width_of(collection, batch), generator=generator).to(dtype)))
    return steps


@functools.cache
def configurations() -> list[te.optim.Optimizer]:
    """Each optimizer once, and two written by hand, with a decay, clipping or limit that differs from its neighbours'.

    Where kernels are interpreted, every third of them: tests of the kernels have them all.
    """
    decays = (
        {},
        {"weight_decay": 0.05, "weight_decay_mode": "l2"},
        {"weight_decay": 0.1, "weight_decay_mode": "decoupled"},
    )
    limits = ({}, {"max_gradient": 0.5}, {"max_norm": 1.5}, {"max_gradient": 0.5, "max_norm": 1.5})
    every = [kind(lr=0.05, **decays[index % 3], **limits[index % 4]) for index, kind in enumerate(OPTIMIZERS.values())]
    every += [
        custom("adam", lr=0.05, weight_decay=0.1),
        custom("row_wise_adagrad", lr=0.05, weight_decay=0.05, max_gradient=0.5, max_norm=1.5),
    ]
    return fewer(every, every[1::3])
