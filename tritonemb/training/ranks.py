"""The ranks that train together: calls that succeed on all of them or raise on all, and the signals that stop them."""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tritonemb.comm.control import FailureReports, lost_contact
from tritonemb.comm.group import Consensus, RankGroup
from tritonemb.sharding.hybrid import HybridParallel

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
MAX_LISTED = 8


class CheckpointError(OSError):
    """A checkpoint could not be written; the earlier ones are as they were."""


class UndefinedMetricsError(ValueError):
    """The rows have labels of one kind only, so that neither AUC nor normalized entropy is defined."""


# Every rank raises the first of these that a rank's exception is. The exception itself may not be picklable.
_KINDS = (CheckpointError, FileNotFoundError, OSError, UndefinedMetricsError, ValueError, TypeError, RuntimeError)


class Ranks:
    """The ranks of a job: their consensus, small messages, and reports of failures, which name this rank's `step`."""

    def __init__(self, group: RankGroup, timeout: float) -> None:
        wait = timedelta(seconds=timeout)
        self.group, self.rank, self.size = group, group.rank, group.size
        self.is_first = group.rank == 0  # the rank that shows and writes what one rank has to
        self.control = group.duplicate("gloo", wait)
        self.agreement = Consensus(group, wait)
        self.reports: FailureReports | None = None
        self.step = 0
        self._sent = self._bytes_sent()

    def max(self, number: int) -> int:
        """The largest of the ranks' numbers. Collective."""
        return int(self.control.all_gather(torch.tensor([number], dtype=torch.int64), "control").max())

    def sum(self, number: Tensor) -> float:
        """The sum of the ranks' numbers, in the order of ranks. Collective."""
        return float(self.control.all_gather(number.detach().reshape(1).cpu(), "control").sum())

    def to_first(self, values: Tensor) -> Tensor:
        """The 1-D CPU tensors of all ranks, one after the other, on rank 0; none of them on the others. Collective."""
        sizes: list[int] = self.control.all_gather_object(values.shape[0])
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

    @contextmanager
    def unmetered(self) -> Iterator[None]:
        """Do not count what is sent in the block as training's."""
        previous = self._bytes_sent()
        try:
            yield
        finally:
            self._sent.update(self._bytes_sent() - previous)

    def sent(self) -> dict[str, int]:
        """Bytes that all ranks have sent each other since this was last asked, by kind."""
        previous, self._sent = self._sent, self._bytes_sent()
        return {} if self.size == 1 else sum(self.control.all_gather_object(self._sent - previous), Counter())

    def _bytes_sent(self) -> Counter[str]:
        return Counter({kind: sent.total for kind, sent in self.group.traffic.by_kind().items()})


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
        self.signum, self.exit_status = signum, 128 + signum


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
    # Whoever started this process may have it ignore a signal: it keeps ignoring it.
    handlers = {
        number: signal.getsignal(number) for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    }

    def note(signum: int, frame: FrameType | None) -> None:
        request.signum = signum
        for number, handler in handlers.items():
            signal.signal(number, handler)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Failure(NamedTuple):
    """A rank's exception, as the other ranks receive it."""

    kind: int
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        for number, kind in enumerate(_KINDS):
            if isinstance(error, kind):
                return cls(number, str(error))
        return cls(_KINDS.index(RuntimeError), f"{type(error).__name__}: {error}")


def on_all_ranks(group: RankGroup | None, function: Callable[[], T], error: type[Exception] | None = None) -> list[T]:
    """Call `function()`, which must use no collective, on every rank; returns all results, sent by pickle.

    If it raised on one of several ranks, every rank raises: an `error` if given, else an exception of the same kind if
    that is a common one, else a RuntimeError. Its message names the ranks. A rank whose own was no `Exception`, e.g. a
    KeyboardInterrupt, raises that.
    """
    if group is None or group.size == 1:
        return [function()]
    local_error: BaseException | None = None
    try:
        outcome: Any = function()
    except BaseException as raised:
        local_error, outcome = raised, Failure.of(raised)
    outcomes = group.all_gather_object(outcome)
    raise_failures(outcomes, local_error, error)
    return outcomes


def on_each_rank(group: RankGroup | None, function: Callable[[], T], error: type[Exception] | None = None) -> T:
    """What `function()` returns on this rank, which is not sent to others; raises as `on_all_ranks` does."""
    results: list[T] = []
    on_all_ranks(group, lambda: results.append(function()), error)
    return results[0]


def on_rank_zero(group: RankGroup | None, function: Callable[[], T], error: type[Exception] | None = None) -> T:
    """What `function()` returns on rank 0, on every rank; raises as `on_all_ranks` does."""
    is_zero = group is None or group.rank == 0
    return on_all_ranks(group, lambda: function() if is_zero else None, error)[0]  # type: ignore[return-value]


def raise_failures(
    outcomes: Sequence[Any], local_error: BaseException | None, error: type[Exception] | None = None
) -> None:
    """Raise for the `Failure`s among all ranks' outcomes, if there are any; `own` is this rank's exception."""
    if not (failures := {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}):
        return
    if local_error is not None and not isinstance(local_error, Exception):
        raise local_error
    first = next(iter(failures.values()))
    failed_ranks = [rank for rank, failure in failures.items() if failure == first]
    other_failures = [rank for rank in failures if rank not in failed_ranks]
    where = "" if len(failed_ranks) == len(outcomes) else f"{_ranks(failed_ranks)}: "
    besides = f" ({_ranks(other_failures)} failed, too)" if other_failures else ""
    raise (error or _KINDS[first.kind])(f"{where}{first.message}{besides}") from local_error


def _ranks(ranks: list[int]) -> str:
    few = ", ".join(map(str, ranks[:MAX_LISTED])) + ", …" * (len(ranks) > MAX_LISTED)
    return f"rank {few}" if len(ranks) == 1 else f"ranks {few}"
