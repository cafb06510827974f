"""The batches of the steps to come: agreed with the other ranks, on the device, their rows prefetched.

While a step computes, the next one is ready, and the one after it is being made. A rank that has run out of data has
batches without samples until all have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tritonemb.comm.control import Round, describe
from tritonemb.data.batch import Batch, BatchLayout
from tritonemb.data.prefetch import Prefetcher
from tritonemb.data.protocol import Batches, Data, ReadReport
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.tables.lookup import PrefetchedFeatures, needs_prefetch, prefetch, released_before, sequence_number
from tritonemb.training.metrics import CacheCounts, caches_of, count
from tritonemb.training.ranks import Ranks
from tritonemb.training.train_state import TrainState

DEPTH = 2  # steps beyond the one that is trained
Prefetch = Callable[[Any], Any]


@dataclass(frozen=True)
class PreparedStep:
    """What a step needs. One without batches is the last: the data is over, or a signal arrived.

    Args:
        batches: of this rank, on the device, their features prefetched.
        weights: of the batches' mean losses. The ranks' gradients are averaged, so they are such that the step's loss
            is the mean over the samples of all batches of all ranks.
        rows: samples of all ranks.
        labels: of the batches, on the CPU.
        position: of this rank's data after them.
        report: of this rank's data so far.
        signal: that some rank was sent, 0 for none.
        clock: rank 0's.
        copied: when the batches are on the device.
        moved: from when to when it took to move them, and the rows that they need, to the device.
        counted: what the caches of these rows had counted then.
    """

    batches: tuple[Batch, ...]
    weights: tuple[float, ...]
    rows: int
    labels: tuple[Tensor, ...]
    position: Any
    report: ReadReport
    signal: int = 0
    clock: int = 0
    copied: torch.cuda.Event | None = field(default=None, repr=False)
    moved: tuple[float, float] | None = None
    counted: CacheCounts | None = None

    def take(self) -> tuple[Batch, ...]:
        """The batches, for the stream of this thread."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.batches[0].labels.device)
            stream.wait_event(self.copied)
            for batch in self.batches:
                _record(batch, stream)
        return self.batches


@contextmanager
def open_epoch(
    state: TrainState, signal: Callable[[], int], clock: Callable[[], int]
) -> Iterator[Prefetcher[PreparedStep]]:
    """The steps that are left of the present epoch; see `prepare`."""
    progress = state.progress
    with (
        state.loader.open("train", True, progress.epoch, progress.position) as stream,
        prefetched(state, stream, training=True, signal=signal, clock=clock) as state.prefetched,
    ):
        try:
            yield state.prefetched
        finally:
            state.prefetched = None


def prefetched(
    state: TrainState, stream: Batches, training: bool = False, **signals: Callable[[], int]
) -> Prefetcher[PreparedStep]:
    """Steps on a stream's batches, made ahead where that takes exchanges or copies, or reads rows."""
    ranks, model = state.ranks, state.model
    prefetch = prefetch_for(model, training) if state.pipeline else None
    caches, mine = has_cached_tables(model), caches_of(model)
    ahead = state.pipeline and (ranks.size > 1 or state.device.type == "cuda" or caches)
    given = state.options.prefetch_depth
    depth = given if caches and given is not None else DEPTH
    steps = prepare(
        stream, ranks, state.device, lambda: empty_batch(state.data), prefetch=prefetch,
        accumulate=state.options.accumulate if training else 1,
        counted=(lambda: count(mine)) if mine and prefetch and training else None, **signals,
    )  # fmt: skip
    # Which rows are evicted is settled when a step may be made, not when the thread comes to it.
    permit = (lambda: released_before(sequence_number())) if mine else None
    return Prefetcher(steps, depth if ahead else 0, "tritonemb-pipeline", collective=ranks.size > 1, permit=permit)


def prepare(
    stream: Batches,
    ranks: Ranks,
    device: torch.device,
    empty: Callable[[], Batch],
    *,
    accumulate: int = 1,
    prefetch: Prefetch | None = None,
    counted: Callable[[], CacheCounts] | None = None,
    signal: Callable[[], int] = lambda: 0,
    clock: Callable[[], int] = lambda: 0,
) -> Generator[PreparedStep, None, None]:
    """The steps of an epoch, or of an evaluation; collectives where there are several ranks.

    Args:
        stream: of this rank.
        ranks: that make the same steps.
        device: where the batches go.
        empty: makes a batch without samples.
        accumulate: batches a step.
        prefetch: a batch's features for the model, whose ids are exchanged and whose rows are on the device.
        counted: what the caches of rows that `prefetch` moves have counted.
        signal: that asks this rank to stop, 0 for none.
        clock: of this rank.

    Raises:
        RankFailed: the data of another rank has failed.
        Exception: whatever the stream raised, on this rank.
    """
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None
    while True:
        before = stream.position
        batches, error = _draw(stream, accumulate)
        agreed = _agree(ranks, batches, error, signal(), clock())
        if agreed.over or agreed.signal:
            position = stream.position if agreed.over else before
            yield PreparedStep(
                (), (), 0, (), position, stream.report, 0 if agreed.over else agreed.signal, agreed.clock
            )
            return
        batches += [empty() for _ in range(agreed.batches - len(batches))]
        rows = sum(agreed.rows)
        weights = tuple(len(batch) * ranks.size / max(rows, 1) for batch in batches)
        began = time.perf_counter()
        there, copied = _move(batches, device, prefetch, copies)
        moved = began, time.perf_counter()
        labels = tuple(batch.labels for batch in batches)
        yield PreparedStep(
            there, weights, rows, labels, stream.position, stream.report, clock=agreed.clock, copied=copied,
            moved=moved, counted=None if counted is None else counted(),
        )  # fmt: skip
        del batches, there, labels  # or they would stay until the next ones are there


def prefetch_for(model: nn.Module, training: bool) -> Prefetch | None:
    """Prefetches a batch's rows for a model, with gradients to come or without; None if there is no need."""
    if not isinstance(model, HybridParallel) and not needs_prefetch(model):
        return None

    def prefetch_features(features: Any) -> PrefetchedFeatures:
        with torch.set_grad_enabled(training):
            return model.prefetch(features) if isinstance(model, HybridParallel) else prefetch(model, features)

    return prefetch_features


def has_cached_tables(model: nn.Module) -> bool:
    """Whether some table is in host memory or on disk: the same on all ranks, whoever has its shards."""
    sharded = [module for module in model.modules() if isinstance(module, ShardedCollection)]
    return needs_prefetch(model) or any(config.placement != "device" for each in sharded for config in each.configs)


def empty_batch(data: Data) -> Batch:
    """A batch without samples, with the keys of a data set's batches."""
    layout = BatchLayout(tuple(feature.name for feature in data.features), 0, data.num_dense, 0)
    return layout.batch(torch.zeros(layout.num_bytes, dtype=torch.uint8))


def _draw(stream: Batches, number: int) -> tuple[list[Batch], Exception | None]:
    """Up to so many batches, or the exception that comes instead."""
    batches: list[Batch] = []
    try:
        for batch in stream:
            batches.append(batch)
            if len(batches) == number:
                break
    except Exception as error:
        return [], error
    return batches, None


def _agree(ranks: Ranks, batches: list[Batch], error: Exception | None, signal: int, clock: int) -> Round:
    """What all ranks bring to a step.

    Raises:
        Exception: `error`, of this rank's data; or that the data of another rank have failed.
    """
    if error is not None and ranks.size == 1:
        raise error
    rows = sum(len(batch) for batch in batches)
    if ranks.size == 1:
        return Round((rows,), len(batches), not batches, signal, clock)
    state: Any = "failed" if error is not None else "ready" if batches else "over"
    note = "" if error is None else describe(error)
    try:
        return ranks.agreement.next(rows, state, note, batches=len(batches), signal=signal, clock=clock)
    except RuntimeError as failure:
        ranks.report_lost(failure)
        if error is not None:
            raise error from None
        raise


def _move(
    batches: Sequence[Batch], device: torch.device, prefetch: Prefetch | None, copies: torch.cuda.Stream | None
) -> tuple[tuple[Batch, ...], torch.cuda.Event | None]:
    """The batches on the device, copied on a CUDA stream of their own where the device has streams."""
    there = []
    with nullcontext() if copies is None else torch.cuda.stream(copies):
        for batch in batches:
            moved = batch.to(device, non_blocking=True)
            if prefetch is not None:
                moved = replace(moved, sparse=prefetch(moved.sparse), buffer=None, layout=None)
            there.append(moved)
        return tuple(there), None if copies is None else copies.record_event()


def _record(batch: Batch, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that the stream uses the batch's memory."""

    def record(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor

    tree_map_only(Tensor, record, (batch.dense, batch.labels, batch.sparse))
    sparse: Any = batch.sparse
    if isinstance(sparse, PrefetchedFeatures):
        sparse.map(record)
