"""The ranks that train together, as a trainer sees them; one rank alone is a case of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tritonemb.comm.control import Consensus, Heartbeat, lost_contact
from tritonemb.comm.group import BytesSent, RankGroup
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.training.checkpoints.together import of_first
from tritonemb.training.signals import Interrupted

T = TypeVar("T")


class Parallel:
    """A model's ranks: their agreement, their small messages, and their signs of life.

    Args:
        model: all ranks of the job make this object for it together.
        timeout: seconds to wait for a rank.

    Raises:
        ValueError: the job has several ranks, and the model trains on one.
    """

    def __init__(self, model: nn.Module, timeout: float) -> None:
        group, wait = group_of(model), timedelta(seconds=timeout)
        self.group, self.rank, self.size = group, group.rank, group.size
        self.control = group.duplicate("gloo", wait)
        self.agreement = Consensus(group, wait)
        self.heartbeat: Heartbeat | None = None
        self._traffic = group.traffic.by_kind()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that shows and writes what one rank has to."""
        return self.rank == 0

    def on_first(self, function: Callable[[], T]) -> T:
        """What rank 0's call returns, on all ranks; what it raises becomes an exception of the same builtin kind.
        Collective."""
        return of_first(self.control, function)

    def all(self, good: bool) -> bool:
        """Whether it is true on every rank. Collective."""
        return bool(self._gather(torch.tensor([good], dtype=torch.int64)).all())

    def any(self, true: bool) -> bool:
        """Whether it is true on some rank. Collective."""
        return not self.all(not true)

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers. Collective."""
        return int(self._gather(torch.tensor([number], dtype=torch.int64)).max())

    def sum(self, number: Tensor) -> float:
        """The sum of the ranks' numbers, in the order of ranks. Collective."""
        return float(self._gather(number.detach().reshape(1).cpu()).sum())

    def gather(self, item: T) -> list[T]:
        """Every rank's object. Collective."""
        return self.control.all_gather_object(item)

    def to_first(self, values: Tensor) -> Tensor:
        """The 1-D CPU tensors of all ranks, one after the other, on rank 0; none of them on the others. Collective."""
        sizes = self._gather(torch.tensor([values.shape[0]], dtype=torch.int64)).flatten().tolist()
        send = [values.shape[0]] + [0] * (self.size - 1)
        return self.control.all_to_all(values, send, sizes if self.is_first else [0] * self.size, "evaluation")

    def note(self, phase: Any, step: int) -> None:
        """Say what this rank is doing, for those that may wait for it."""
        if self.heartbeat is not None:
            self.heartbeat.note(phase, step)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A rank that is lost in the block becomes an error that names it; an error of this one is told the others.

        Raises:
            RankFailed: a rank is gone or has not answered in time; says which, and what it did last.
        """
        if self.size == 1 or self.heartbeat is not None:
            yield
            return
        with Heartbeat(self.group) as self.heartbeat:
            try:
                yield
            except Interrupted:  # all ranks are
                raise
            except Exception as error:
                told = self.heartbeat.explain(error) if lost_contact(error) else error
                self.heartbeat.fail(told)
                if told is error:
                    raise
                raise told from error
            finally:
                self.heartbeat = None

    @contextmanager
    def unmetered(self) -> Iterator[None]:
        """What is sent in the block is none of training's."""
        before = self.group.traffic.by_kind()
        try:
            yield
        finally:
            self._traffic = _plus(self._traffic, _minus(self.group.traffic.by_kind(), before))

    def sent(self) -> tuple[dict[str, int], int]:
        """Bytes that all ranks have sent each other since this was last asked, by kind; how many left a node."""
        if self.size == 1:
            return {}, 0
        now = self.group.traffic.by_kind()
        found: dict[str, BytesSent] = {}
        for one in self.gather(_minus(now, self._traffic)):
            found = _plus(found, one)
        self._traffic = now
        return {kind: sent.total for kind, sent in found.items() if sent.total}, sum(
            sent.across_nodes for sent in found.values()
        )

    def _gather(self, values: Tensor) -> Tensor:
        return self.control.all_gather(values, "control")


def group_of(model: nn.Module) -> RankGroup:
    """The ranks that train a model.

    Raises:
        ValueError: the job has several ranks, and the model trains on one.
    """
    if isinstance(model, HybridParallel):
        return model.group
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"the job has {dist.get_world_size()} ranks, and a {type(model).__name__} trains on one of them: give the "
            "trainer tritonemb.HybridParallel(model), which shards its tables and copies the rest to all ranks"
        )
    return RankGroup()


def _plus(a: Mapping[str, BytesSent], b: Mapping[str, BytesSent]) -> dict[str, BytesSent]:
    none = BytesSent()
    pairs = {kind: (a.get(kind, none), b.get(kind, none)) for kind in [*a, *(kind for kind in b if kind not in a)]}
    return {kind: BytesSent(x.total + y.total, x.across_nodes + y.across_nodes) for kind, (x, y) in pairs.items()}


def _minus(a: Mapping[str, BytesSent], b: Mapping[str, BytesSent]) -> dict[str, BytesSent]:
    return _plus(a, {kind: BytesSent(-sent.total, -sent.across_nodes) for kind, sent in b.items()})
