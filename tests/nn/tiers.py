"""Collections whose tables live in host memory or on disk, beside their twins on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import tritonemb as te
from tests.helpers import CACHED, INTERPRETED, Step, fewer, living, output_of, width_of
from tests.strategies import random_batch, rows_of
from tritonemb.kernels.row_cache import set_of
from tritonemb.layout import NO_ROW
from tritonemb.nn.collections import TableCollection
from tritonemb.storage.memory import HostRows
from tritonemb.tables.lookup_tables import Groups
from tritonemb.types import CacheConfig, Placement

# Triton's interpreter serves one thread at a time, and a table on disk has one of its own.
ELSEWHERE: tuple[Placement, ...] = fewer(("host", "disk"), ("host",))
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="slow there, and says nothing of kernels")
SMALLEST = CacheConfig(rows=1)


def placed(configs: Sequence[te.TableConfig], placements: Sequence[str], cache: CacheConfig) -> list[te.TableConfig]:
    """The tables in these places, taken in turn."""
    return [
        living(config, "host" if INTERPRETED and placement in ("disk", CACHED) else placement, cache)
        for config, placement in zip(configs, cycle(placements), strict=False)
    ]


def seeded(
    configs: Sequence[te.TableConfig],
    optimizer: te.optim.Optimizer | None,
    pooled: bool = True,
    placements: Sequence[str] = ("device",),
    cache: CacheConfig = SMALLEST,
    **options: Any,
) -> TableCollection:
    """A collection whose first values are the same wherever its tables are placed."""
    torch.manual_seed(3)
    kind = te.nn.EmbeddingBagCollection if pooled else te.nn.EmbeddingCollection
    return kind(placed(configs, placements, cache), optimizer=optimizer, **options)


def varied_steps(
    collection: TableCollection,
    num_steps: int,
    sizes: Sequence[int] = (33, 1, 0, 40),
    weighted: bool = False,
    seed: int = 0,
) -> list[Step]:
    """Batches of several sizes, with keys that nobody uses, some without any ids; gradients in the output's dtype."""
    rows = rows_of(collection.configs)
    keys = ["unused", *reversed(rows)]
    generator = torch.Generator().manual_seed(seed)
    dtypes = {table.weight.dtype for table in collection.tables}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    steps = []
    for index in range(num_steps):
        longest = 0 if index % 7 == 5 else 5
        batch = random_batch(
            rows, keys, sizes[index % len(sizes)], longest, weighted, (torch.int64, torch.int32)[index % 2],
            seed=1000 * seed + index,
        )  # fmt: skip
        steps.append((batch, torch.randn(width_of(collection, batch), generator=generator).to(dtype)))
    return steps


def ahead_of(collection: TableCollection, steps: Iterable[Step], depth: int) -> Iterator[tuple[Step, Groups]]:
    """Each step with its groups, made in another thread while up to `depth` steps before it are computed."""
    depth = fewer(depth, 0)
    with ThreadPoolExecutor(1) as other:
        waiting: list[tuple[Step, Any]] = []
        for step in steps:
            waiting.append((step, other.submit(collection.group, step[0])))
            if len(waiting) > depth:
                first, groups = waiting.pop(0)
                yield first, groups.result()
        for first, groups in waiting:
            yield first, groups.result()


def train_ahead(collection: TableCollection, steps: Iterable[Step], depth: int) -> list[torch.Tensor]:
    """Train, with look-ahead; the outputs."""
    outputs = []
    for (batch, grad), groups in ahead_of(collection, steps, depth):
        out = output_of(partial(collection, groups=groups), batch)
        out.backward(grad)
        outputs.append(out.detach())
    return outputs


def outputs_of(collection: TableCollection, steps: Iterable[Step]) -> list[torch.Tensor]:
    """Train; the outputs."""
    outputs = []
    for batch, grad in steps:
        out = output_of(collection, batch)
        out.backward(grad)
        outputs.append(out.detach())
    return outputs


def same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Equal outputs, step by step."""
    assert len(actual) == len(expected)
    for step, (value, reference) in enumerate(zip(actual, expected, strict=True)):
        assert value.dtype == reference.dtype, step
        assert torch.equal(value, reference), f"step {step}"


def stored(collection: TableCollection) -> dict[str, torch.Tensor]:
    """Copies of what the stores of tables elsewhere hold, whatever is in slots."""
    result = {}
    for index, cached in enumerate(collection.cache.rows):
        if cached is not None and isinstance(cached.store, HostRows):
            result |= {f"{index}.{name}": tensor.clone() for name, tensor in cached.store.fields.items()}
        elif cached is not None:
            num_rows = cached.config.num_embeddings
            result[f"{index}"] = torch.zeros(num_rows, cached.record.num_bytes, dtype=torch.uint8)
            cached.store.read(torch.arange(num_rows), result[f"{index}"]).wait()
    return result


def directory_of(collection: TableCollection) -> dict[str, torch.Tensor]:
    """Copies of all that a collection's cache knows of its slots, and of the rows that are in them."""
    cache = collection.cache
    parts = {name: getattr(cache._directory, name).clone() for name in ("tags", "used", "pins", "dirty", "clock")}
    for index, table in enumerate(collection.tables):
        for name, tensor in (table.device_tensors() if table.rows.is_cached else {}).items():
            parts[f"{index}.{name}"] = tensor.detach()[cache.row_ids(index) != NO_ROW]
    return parts


def ids_of_one_set(num_rows: int, num_sets: int) -> torch.Tensor:
    rows = torch.arange(num_rows)
    return rows[set_of(rows, num_sets) == 0]


@st.composite
def streams(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Rows of a cache, and a list of ids for each step: at random, or meant to hurt."""
    rows = draw(st.sampled_from((1, 64, 128)))
    kind = draw(st.sampled_from(("any", "one set", "more than fit", "always new", "always the same")))
    num_steps, size = draw(st.integers(1, 6)), draw(st.integers(1, 90))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    pool = {
        "any": torch.arange(1000),
        "one set": ids_of_one_set(1000, -(-rows // 32)),
        "more than fit": torch.arange(1000),
        "always new": torch.randperm(1000, generator=generator),
        "always the same": torch.randperm(1000, generator=generator)[:size],
    }[kind]
    steps = []
    for step in range(num_steps):
        ids = {
            "always new": pool[step * size : (step + 1) * size],
            "always the same": pool,
            "more than fit": pool[torch.randperm(pool.numel(), generator=generator)[: 2 * rows + size]],
        }.get(kind, pool[torch.randint(pool.numel(), (size,), generator=generator)])
        steps.append(ids.tolist())
    return rows, steps


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for values, if they are on a GPU; by name, in `found`. Not within custom ops."""

    WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "equal", "masked_select", "bincount")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        # Batches are checked on the CPU only.
        monkeypatch.setattr("tritonemb.jagged.is_host_readable", lambda _: False)
        for name in ("tolist", "cpu"):  # a CPU tensor's are no op
            monkeypatch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))

    def _counting(self, name: str, method: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch._C._len_torch_dispatch_stack():
                self.found.append(name)
            return method(tensor, *args, **kwargs)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = [index for index in args[1] if index is not None] if name in ("index", "index_put_") else []
        self.found += [name] * (name in self.WAITS) + ["mask"] * any(index.dtype == torch.bool for index in indices)
        return func(*args, **(kwargs or {}))
