"""The batches of the steps to come: agreed with the other ranks, on the device, their ids on the way.

While a step computes, the next one is ready, and the one after it is being made. A rank that has run out of data brings
batches without samples until all have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tritonemb.comm.control import Consensus, Heartbeat, describe
from tritonemb.data.batch import Batch, Layout
from tritonemb.data.source import Batches, Data, ReadReport
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.tables.prefetch import PrefetchedFeatures, needs_prefetch, prefetch
from tritonemb.training.cache_meter import Counted

DEPTH = 2  # steps beyond the one that is trained
Send = Callable[[Any], Any]


@dataclass(frozen=True)
class Prepared:
    """What a step needs. One without batches is the last: the data is over, or a signal arrived.

    Args:
        batches: of this rank, on the device; in place of ids what `send` made of them.
        weights: of the batches' mean losses. The ranks' gradients are averaged, so they are such that the step's loss
            is the mean over the samples of all batches of all ranks.
        rows: samples of all ranks.
        labels: of the batches, on the CPU.
        position: of this rank's data after them.
        report: of this rank's data so far.
        signal: that some rank was sent, 0 for none.
        clock: rank 0's.
        copied: when the batches are on the device.
        moved: from when to when it took to bring them there, and the rows that they need.
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
    counted: Counted | None = None

    def take(self) -> tuple[Batch, ...]:
        """The batches, for the stream of this thread."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.batches[0].labels.device)
            stream.wait_event(self.copied)
            for batch in self.batches:
                _record(batch, stream)
        return self.batches


@dataclass(frozen=True)
class Say:
    """What a rank has to say beside its rows, asked in each round."""

    signal: Callable[[], int] = lambda: 0
    clock: Callable[[], int] = lambda: 0


def prepare(
    stream: Batches,
    device: torch.device,
    agreement: Consensus,
    empty: Callable[[], Batch],
    *,
    world: int = 1,
    accumulate: int = 1,
    send: Send | None = None,
    heartbeat: Heartbeat | None = None,
    first_step: int = 0,
    say: Say | None = None,
    count: Callable[[], Counted] | None = None,
) -> Generator[Prepared, None, None]:
    """The steps of an epoch, or of an evaluation; collectives where there are several ranks.

    Args:
        stream: of this rank.
        device: where the batches go.
        agreement: with the other ranks.
        empty: makes a batch without samples.
        world: number of ranks.
        accumulate: batches a step.
        send: sends a batch's ids to the ranks that own their rows.
        heartbeat: is told what is done.
        first_step: steps done before.
        say: what else this rank tells the others.
        count: what the caches of rows that `send` brings have counted.

    Raises:
        RankFailed: the data of another rank has failed.
        Exception: whatever the stream raised, on this rank.
    """
    move, said, step = _Move(device), say or Say(), first_step
    while True:
        step, before = step + 1, stream.position
        _note(heartbeat, "reading", step)
        batches, error = _draw(stream, accumulate)
        _note(heartbeat, "exchanging", step)
        state = "failed" if error is not None else "ready" if batches else "over"
        rows = sum(len(batch) for batch in batches)
        try:
            agreed = agreement.next(
                rows, state, describe(error) if error is not None else "",  # type: ignore[arg-type]
                batches=len(batches), signal=said.signal(), clock=said.clock(),
            )  # fmt: skip
        except RuntimeError:
            if error is not None:
                raise error from None
            raise
        if agreed.over:
            yield Prepared((), (), 0, (), stream.position, stream.report, clock=agreed.clock)
            return
        if agreed.signal:
            yield Prepared((), (), 0, (), before, stream.report, agreed.signal, agreed.clock)
            return
        batches += [empty() for _ in range(agreed.batches - len(batches))]
        total = max(agreed.total, 1)
        weights = tuple(len(batch) * world / total for batch in batches)
        began = time.perf_counter()
        there, copied = move(batches, send)
        moved = began, time.perf_counter()
        labels = tuple(batch.labels for batch in batches)
        yield Prepared(
            there, weights, agreed.total, labels, stream.position, stream.report, clock=agreed.clock, copied=copied,
            moved=moved, counted=None if count is None else count(),
        )  # fmt: skip
        del batches, there, labels  # or they would stay until the next ones are there


def sender(model: nn.Module, training: bool) -> Send | None:
    """Tells a model's collections of batches ahead, with gradients to come or without; None if there is no need."""
    parallel = isinstance(model, HybridParallel)
    if not parallel and not needs_prefetch(model):
        return None

    def bring(features: Any) -> PrefetchedFeatures:
        with torch.set_grad_enabled(training):
            return model.prefetch(features) if isinstance(model, HybridParallel) else prefetch(model, features)

    return bring


def brings_rows(model: nn.Module) -> bool:
    """Whether some table lives elsewhere than on the device: the same on all ranks, whoever has its shards."""
    sharded = [module for module in model.modules() if isinstance(module, ShardedCollection)]
    return needs_prefetch(model) or any(config.placement != "device" for each in sharded for config in each.configs)


def empty_batch(data: Data) -> Batch:
    """A batch without samples, with the keys of a data set's batches."""
    layout = Layout(tuple(feature.name for feature in data.features), 0, data.num_dense, 0)
    return layout.batch(torch.zeros(layout.num_bytes, dtype=torch.uint8))


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


def _note(heartbeat: Heartbeat | None, phase: Any, step: int) -> None:
    if heartbeat is not None:
        heartbeat.note(phase, step, ahead=True)


class _Move:
    """Copies batches to the device, on a CUDA stream of its own where the device has streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(
        self, batches: Sequence[Batch], send: Send | None
    ) -> tuple[tuple[Batch, ...], torch.cuda.Event | None]:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            there = tuple(self._move(batch, send) for batch in batches)
            return there, None if self._stream is None else self._stream.record_event()

    def _move(self, batch: Batch, send: Send | None) -> Batch:
        there = batch.to(self._device, non_blocking=True)
        return there if send is None else replace(there, sparse=send(batch.sparse), buffer=None, layout=None)
