"""Steps of a dynamic table beside TorchRec's managed collisions, on the same ids: forward, backward, optimizer."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonemb as te
from benchmarks.bench_dynamic_table import BATCH, DIM, OPTIMIZER, Stream
from benchmarks.cases import OURS
from benchmarks.clock import Contender
from benchmarks.paired import measure
from benchmarks.record import at_least, timing_rows
from benchmarks.workload import CPU

STEPS = 10  # of a sample: the peer evicts in one of them, or in each
TORCHREC_MISSING = "TorchRec is not installed, so there is nothing to compare with; `make bench` installs it"


class ManagedCollisions:
    """TorchRec's way to train ids of 64 bits: `MCHManagedCollisionModule` before FBGEMM's fused row-wise Adagrad.

    That is `ManagedCollisionEmbeddingBagCollection` by its parts, as it takes no fused tables. A new id gets a row when
    ids are evicted, every `interval` steps, and has the last row until then. Rows keep what evicted ids have trained.
    TorchRec's other module, MPZCH, trains on GPUs alone.
    """

    def __init__(self, capacity: int, ids: Tensor, policy: str, interval: int) -> None:
        modules, configs, fused, optimizers, self._jagged = (
            importlib.import_module(f"torchrec.{name}")
            for name in (
                "modules.mc_modules", "modules.embedding_configs", "modules.fused_embedding_modules", "optim",
                "sparse.jagged_tensor",
            )
        )  # fmt: skip
        table = configs.EmbeddingBagConfig(name="t", feature_names=["t"], num_embeddings=capacity, embedding_dim=DIM)
        evict = getattr(modules, f"{policy}_EvictionPolicy")()
        module = modules.MCHManagedCollisionModule(capacity, CPU, evict, interval)
        self._collisions = modules.ManagedCollisionCollection({"t": module}, [table])
        options = {"lr": OPTIMIZER.lr, "eps": OPTIMIZER.eps}
        self._tables = fused.FusedEmbeddingBagCollection([table], optimizers.RowWiseAdagrad, options, device=CPU)
        for each in self._tables.state_dict().values():
            each.zero_()
        for part in ids.chunk(interval):
            self._collisions(self.batch(part))

    def batch(self, ids: Tensor) -> Any:
        return self._jagged.KeyedJaggedTensor(["t"], ids, lengths=torch.ones(ids.numel(), dtype=torch.int32))

    def __call__(self, features: Any) -> Tensor:
        rows = self._collisions(features)
        self._collisions.evict()
        pooled: Tensor = self._tables(rows).values()
        return pooled


def managed_collisions(capacity: int, batch: int, interval: int) -> list[Contender]:
    """Steps with 1 % new ids, in tables that begin with zeros in three quarters of their rows; ours evicts by LRU."""
    stream = Stream(capacity, batch, 0.01, capacity * 3 // 4)
    grad, met, current = torch.randn(batch, DIM), stream.dynamic["t"].ids(), dict[int, list[Tensor]]()

    def keyed(ids: Tensor) -> te.KeyedJaggedTensor:
        return te.KeyedJaggedTensor(["t"], ids, lengths=torch.ones_like(ids))

    def prepare(make: Callable[[Tensor], Any], number: int) -> list[Any]:
        if number not in current:
            current.clear()
            current[number] = [stream(number * STEPS + each)[0].values() for each in range(STEPS)]
        return [make(ids) for ids in current[number]]

    def run(model: Any, batches: list[Any]) -> None:
        for features in batches:
            model(features).backward(grad)

    num_bytes = STEPS * batch * (8 + 4 * 4 * DIM)
    found = [Contender(OURS, partial(prepare, keyed), partial(run, stream.dynamic), num_bytes)]
    run(stream.dynamic, [keyed(met[:batch])])
    for policy in ("LRU", "LFU"):
        peer = ManagedCollisions(capacity, met, policy, interval)
        run(peer, [peer.batch(met[:batch])])
        theirs, ours = peer(peer.batch(met[:batch])), stream.dynamic(keyed(met[:batch]))
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6)
        found.append(Contender(f"torchrec, {policy}", partial(prepare, peer.batch), partial(run, peer), num_bytes))
    return found


@pytest.mark.parametrize("interval", [1, STEPS])
def bench_managed_collisions(interval: int, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    """Beside TorchRec, which evicts in every step, so that a new id has a row from the next one on, or in every tenth,
    until when new ids share a row."""
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip(TORCHREC_MISSING)
    op, capacity = "dynamic table steps", 1 << 20
    shape = f"{STEPS} steps of {BATCH:,} ids, capacity {capacity:,}, D{DIM}, 1% new, theirs evicts every {interval}"
    found = managed_collisions(capacity, BATCH, interval)
    timings = measure(benchmark, found, max(5, rounds // 4))
    targets = [at_least(op, shape, timings[0], timings[1:], 5)]
    record(timing_rows(op, shape, timings, {each.name: each.num_bytes for each in found}), targets)
