"""Training on tables that live in host memory or on disk, with a share of their rows on the device.

The contenders of a case have the same first weights and the same batches, whose ids are on the device; they differ in
where rows live and in what is done ahead. The batches have production's reuse, within a batch and from batch to batch
(`workload.Population`), and each is used once.

The bytes of a case are those that crossed between host or disk and device in a step; where all rows are on the device,
those that the step has to move; 0 for FBGEMM's cache, which would be slower if it counted them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

import tritonemb as te
from benchmarks.gpu.training import LOOK_AHEAD, Feed, Makers, Prefetched, SentAhead, num_batches, race
from benchmarks.measuring.cases import OURS
from benchmarks.measuring.clock import Clock, Outcome, recover
from benchmarks.measuring.peers import FbgemmTables, OurTables, copy_weights
from benchmarks.measuring.workload import Batch, Population, Workload, make_batch, step_bytes

IN_HBM, NONE_AHEAD = "tritonemb, in HBM", "tritonemb, none ahead"
FBGEMM_IN_HBM, FBGEMM_CACHED = "fbgemm, in HBM", "fbgemm, cached"
FOLDER = os.environ.get("TRITONEMB_STORAGE_FOLDER")


@dataclass(frozen=True)
class Tier:
    """Where the rows of a workload's tables live, and the share of them that is on the device."""

    placement: Literal["host", "disk"]
    share: float
    workload: Workload

    @property
    def op(self) -> str:
        return f"training from {'host memory' if self.placement == 'host' else 'disk'}"

    def __str__(self) -> str:
        return f"{self.workload}, {self.share:.0%} on the device"

    def tiny(self) -> Tier:
        return replace(self, workload=self.workload.tiny())

    def num_samples(self, rounds: int) -> int:
        """Of as many timed rounds as other cases have: a sample is long, and longer from a disk."""
        return max(2, rounds // (3 if self.placement == "host" else 10))


# Tables of 4 GB, a batch of as many ids a table and sample as the published mean. A disk does some 10^5 requests a
# second, so what is on one is smaller, and so are its batches.
HOST = Workload("tiers", 8192, (1_000_000,) * 8, (14,) * 8, ids="reuse")
DISK = Workload("tiers", 1024, (250_000,) * 8, (14,) * 8, ids="reuse")
CASES = (Tier("host", 0.1, HOST), Tier("host", 0.2, HOST), Tier("disk", 0.1, DISK))


@functools.lru_cache(maxsize=1)
def draw(workload: Workload, count: int, device: torch.device) -> tuple[Batch, ...]:
    """So many batches, the same on every device; the last ones drawn are kept for the next case. A thread a table."""

    def of_table(table: int) -> list[Tensor]:
        population = Population(workload.num_rows[table], np.random.default_rng(table))
        num_ids = workload.batch_size * workload.bag_sizes[table]
        return [torch.from_numpy(population.draw_ids(num_ids)) for _ in range(count)]

    with ThreadPoolExecutor(min(workload.num_tables, os.cpu_count() or 1)) as pool:
        by_table = list(pool.map(of_table, range(workload.num_tables)))
    batches = [make_batch(workload, [ids.to(device) for ids in parts]) for parts in zip(*by_table, strict=True)]
    for batch in batches:
        _ = batch.keyed  # made now, or the first contender would make it for all
    return tuple(batches)


def makers(tier: Tier, batches: tuple[Batch, ...], device: torch.device) -> Makers:
    """What makes each contender; the first is the one that the others are compared with."""

    def ours(placement: Literal["device", "host", "disk"]) -> OurTables:
        torch.manual_seed(0)
        return OurTables(tier.workload, device, placement, te.CacheConfig(share=tier.share, folder=FOLDER))

    def fbgemm(cache_share: float | None = None) -> FbgemmTables:
        tables = FbgemmTables(tier.workload, device, cache_share)
        copy_weights(ours("device"), tables)
        return tables

    found: dict[str, Callable[[], Feed]] = {
        IN_HBM: lambda: Feed(ours("device"), batches),
        OURS: lambda: SentAhead(ours(tier.placement), batches, device),
        NONE_AHEAD: lambda: Feed(ours(tier.placement), batches),
    }
    if tier.placement == "host":
        found[FBGEMM_IN_HBM] = lambda: Feed(fbgemm(), batches)
        if device.type == "cuda":  # FBGEMM has no cache in front of a CPU: MANAGED_CACHING is refused there
            found[FBGEMM_CACHED] = lambda: Prefetched(fbgemm(tier.share), batches, device)
    return found


def measure(tier: Tier, clock: Clock, rounds: int) -> Outcome:
    """Milliseconds of a step. Contenders that cannot be made, train differently or fail are among the errors."""
    samples, device = tier.num_samples(rounds), clock.device
    batches = draw(tier.workload, num_batches(samples) + LOOK_AHEAD, device)
    num_bytes = dict.fromkeys((IN_HBM, FBGEMM_IN_HBM), step_bytes(batches[-1]))
    try:
        return race(makers(tier, batches, device), tier.workload, clock, samples, num_bytes)
    finally:
        recover()
