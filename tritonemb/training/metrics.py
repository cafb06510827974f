"""What training measures: the quality of click probabilities, its speed and memory, and what caches of rows do."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tritonemb.sharding.collection import ShardedCollection
from tritonemb.tables.cache import RowCache
from tritonemb.tables.table_set import TableSet
from tritonemb.utils import require

MIN_STALL = 1e-3  # seconds that count
RECENT_STEPS, MANY_STALLS = 10, 3  # so many stalls in so many steps ask for a deeper prefetch
MAX_WIDENED = 6
HOST = ("host_hits", "disk_read", "disk_written")  # of tables on disk with a host cache


class UndefinedMetricsError(ValueError):
    """The rows have labels of one kind only, so that neither AUC nor normalized entropy is defined."""


@dataclass(frozen=True)
class Metrics:
    """Quality on some rows.

    Args:
        auc: area under the ROC curve, exact.
        log_loss: mean binary cross-entropy in nats.
        normalized_entropy: log loss over that of always predicting the rows' base rate; below 1 is better than that
            (He et al., ADKDD 2014).
        num_samples: rows evaluated.
        samples_per_second: speed of the evaluation, metrics not included; 0 where nothing was timed.
        num_skipped: bad rows that were left out.
    """

    auc: float
    log_loss: float
    normalized_entropy: float
    num_samples: int
    samples_per_second: float = 0.0
    num_skipped: int = 0


def binary_metrics(logits: Tensor, labels: Tensor, seconds: float | None = None) -> Metrics:
    """Metrics of `logits` `[N]` against `labels` `[N]` in {0, 1}.

    Raises:
        ValueError: where the shapes differ, a logit is NaN, or all labels are the same (no metric is defined then).
    """
    if logits.shape != labels.shape or logits.dim() != 1:
        raise ValueError(f"logits and labels must be [N], got {tuple(logits.shape)} and {tuple(labels.shape)}")
    logits, labels = logits.detach().double(), labels.double()
    if bool(logits.isnan().any()):
        raise ValueError(f"{int(logits.isnan().sum())} of {logits.numel()} logits are NaN: training has diverged")
    base_rate = labels.mean()
    if not 0 < float(base_rate) < 1:
        raise UndefinedMetricsError(
            f"all {labels.numel()} labels are the same, so neither AUC nor normalized entropy is defined"
        )
    binary_auroc = require("torchmetrics.functional.classification").binary_auroc
    auc = float(binary_auroc(logits.sigmoid(), labels.int()))
    log_loss = float(F.binary_cross_entropy_with_logits(logits, labels))
    base_loss = float(F.binary_cross_entropy(base_rate, base_rate))
    speed = labels.numel() / seconds if seconds else 0.0
    return Metrics(auc, log_loss, log_loss / base_loss, labels.numel(), speed)


class Clock:
    """Seconds of training since the run began, `seconds` of them in earlier processes, without what `pause` covers."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._earlier, self._started, self._paused = seconds, time.perf_counter(), 0.0
        self._warm: tuple[float, int] | None = None  # when the first step was done, and its samples
        self._samples, self.waited = 0, 0.0
        self._lap = (0.0, 0, 0.0)

    @property
    def here(self) -> float:
        """Seconds trained by this process."""
        return time.perf_counter() - self._started - self._paused

    @property
    def seconds(self) -> float:
        return self._earlier + self.here

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens in the block is not training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start

    def step(self, num_samples: int) -> None:
        """A step is done; the first one of a process, which compiles and warms up, does not count for speeds."""
        self._samples += num_samples
        if self._warm is None:
            self._warm = (self.here, num_samples)
            self._lap = (*self._warm, self.waited)

    def lap(self) -> tuple[float, float]:
        """Samples a second and the share of waiting since the last lap."""
        now, samples, waited = self.here, self._samples, self.waited
        before, samples_before, waited_before = self._lap
        self._lap = (now, samples, waited)
        if samples == samples_before:  # the first step alone
            return self.samples_per_second, 0.0
        return (samples - samples_before) / (now - before), min((waited - waited_before) / (now - before), 1.0)

    @property
    def samples_per_second(self) -> float:
        """Mean of this process; that of the first step where there is no other."""
        seconds, samples = self._warm or (0.0, 0)
        if self._samples == samples:
            return samples / seconds if seconds else 0.0
        return (self._samples - samples) / (self.here - seconds)


def memory_bytes(device: torch.device) -> int:
    """Memory allocated on a GPU, or the resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(require("psutil").Process().memory_info().rss)


def caches_of(model: nn.Module) -> list[RowCache]:
    """The caches of a model's cached tables, this rank's shards among them."""
    found = [module for module in model.modules() if isinstance(module, TableSet)]
    for module in model.modules():
        if isinstance(module, ShardedCollection):
            found += module.locals
    return [collection.cache for collection in found if collection.cache is not None]


def count(caches: Iterable[RowCache]) -> Counter[str]:
    """What the caches have counted, of all tables: the fields of `CacheStatistics`."""
    found: Counter[str] = Counter()
    for cache in caches:
        for statistics in cache.statistics().values():
            found.update(vars(statistics))
    return found


class CacheMeter:
    """Means per step of what the caches of a model's tables on this rank count."""

    def __init__(self, model: nn.Module) -> None:
        self._caches = caches_of(model)
        tables = [table for cache in self._caches for table in cache.tables if table is not None]
        self._in_host_memory = any(table.config.cache.host_rows is not None for table in tables)
        self._stall = self._stall_before = 0.0
        self._trained: Counter[str] | None = None
        self._recent: deque[bool] = deque(maxlen=RECENT_STEPS)
        self._widened = 0
        self._before = self._now()

    def stalled(self, begin: float, end: float, moved: tuple[float, float] | None) -> None:
        """Training has waited from `begin` to `end` for a step whose rows were transferred in the time `moved`."""
        if self._caches and moved is not None:
            self._stall += max(0.0, min(end, moved[1]) - max(begin, moved[0]))

    def trained(self, counted: Counter[str] | None) -> None:
        """A step has been trained; `counted` when its rows, and no later step's, had been prefetched; None without."""
        self._trained = counted

    def wants_deeper_prefetch(self) -> bool:
        """Whether training has waited for rows in several of the last steps; asked after each step."""
        self._recent.append(self._stall - self._stall_before > MIN_STALL)
        self._stall_before = self._stall
        if sum(self._recent) < MANY_STALLS or self._widened == MAX_WIDENED:
            return False
        self._recent.clear()
        self._widened += 1
        return True

    def lap(self, steps: int) -> dict[str, float]:
        """Means per step since the last call, see `Log.cache`; empty without cached tables."""
        if not self._caches:
            return {}
        now = self._now()
        since: Counter[Any] = Counter(now)
        since.subtract(self._before)
        self._before = now
        rows, names = since["lookups"], ("read", "written", "stall", *(HOST if self._in_host_memory else ()))
        means = {name: since[name] / steps for name in names}
        return {"rows": rows / steps, "hit_rate": since["hits"] / rows if rows else 1.0, **means}

    def _now(self) -> dict[str, float]:
        stall = self._stall + sum(cache.stall for cache in self._caches)
        return {**(count(self._caches) if self._trained is None else self._trained), "stall": stall}
