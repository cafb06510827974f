"""The ranks that train together, as a trainer sees them, and the signals that stop them."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tritonemb.comm.control import FailureReports, lost_contact
from tritonemb.comm.group import Consensus, RankGroup
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.training.checkpoint.all_ranks import on_rank_zero

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ranks:
    """The ranks of a job: their consensus, small messages, and reports of failures, which name this rank's `step`."""

    def __init__(self, group: RankGroup, timeout: float) -> None:
        wait = timedelta(seconds=timeout)
        self.group, self.rank, self.size = group, group.rank, group.size
        self.control = group.duplicate("gloo", wait)
        self.agreement = Consensus(group, wait)
        self.reports: FailureReports | None = None
        self.step = 0
        self._sent, self._sent_across = self._bytes_sent()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that shows and writes what one rank has to."""
        return self.rank == 0

    def on_first(self, function: Callable[[], T]) -> T:
        """What rank 0's call returns, on all ranks; raises as `on_rank_zero`. Collective."""
        return on_rank_zero(self.control, function)

    def max(self, number: int) -> int:
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

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A rank that is lost in the block becomes a `RankFailed` that names it; an error of this one is reported."""
        if self.size == 1 or self.reports is not None:
            yield
            return
        self.reports = FailureReports(self.group)
        try:
            yield
        except Interrupted:  # all ranks are
            raise
        except Exception as error:
            if lost_contact(error):
                raise self.reports.explain(error, self.step) from error
            self.reports.report(error, self.step)
            raise
        finally:
            self.reports = None

    def report_lost(self, error: BaseException) -> None:
        """Say at once, in any thread, that this rank is alive, if an error means that contact to another is lost."""
        if self.reports is not None and lost_contact(error):
            self.reports.report()

    @contextmanager
    def unmetered(self) -> Iterator[None]:
        """Do not count what is sent in the block as training's."""
        sent, across = self._bytes_sent()
        try:
            yield
        finally:
            sent_now, across_now = self._bytes_sent()
            self._sent.update(sent_now - sent)
            self._sent_across += across_now - across

    def sent(self) -> tuple[dict[str, int], int]:
        """Bytes that all ranks have sent each other since this was last asked, by kind; how many left a node."""
        if self.size == 1:
            return {}, 0
        sent, across = self._bytes_sent()
        of_ranks = self.gather((sent - self._sent, across - self._sent_across))
        self._sent, self._sent_across = sent, across
        return dict(sum((kinds for kinds, _ in of_ranks), Counter())), sum(across for _, across in of_ranks)

    def _bytes_sent(self) -> tuple[Counter[str], int]:
        kinds = self.group.traffic.by_kind()
        return Counter({kind: sent.total for kind, sent in kinds.items()}), sum(s.across_nodes for s in kinds.values())

    def _gather(self, values: Tensor) -> Tensor:
        return self.control.all_gather(values, "control")


def group_of(model: nn.Module) -> RankGroup:
    """The ranks that train a model; ValueError if it trains on one of several."""
    if isinstance(model, HybridParallel):
        return model.group
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"the job has {dist.get_world_size()} ranks, and a {type(model).__name__} trains on one of them: give the "
            "trainer tritonemb.HybridParallel(model), which shards its tables and copies the rest to all ranks"
        )
    return RankGroup()


class Interrupted(Exception):
    """Training ended at a signal's request; `exit_status` is what a process reports for it: 130 or 143."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"training was interrupted by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_status(self) -> int:
        return 128 + self.signum


class StopRequest:
    """The signal that has arrived, if one has."""

    signum: int | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Note the first SIGINT or SIGTERM in the block, in the main thread only; a second one acts as usual, at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # Whoever started this process may have it ignore a signal: it keeps ignoring it.
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

    def note(signum: int, frame: FrameType | None) -> None:
        request.signum = signum
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
