"""Control plane of the ranks of a job: consensus, calls that raise on all ranks or on none, and signals to stop."""

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
from tritonemb.data.protocol import ReadReport
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.utils import join_names

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class CheckpointError(OSError):
    """A checkpoint could not be written; earlier checkpoints are unchanged."""


class UndefinedMetricsError(ValueError):
    """All labels are the same, so neither AUC nor normalized entropy is defined."""


# Kinds of exceptions that all ranks raise: the first that matches. The exception itself may not be picklable.
_KINDS = (CheckpointError, FileNotFoundError, OSError, UndefinedMetricsError, ValueError, TypeError, RuntimeError)


class Ranks:
    """Control plane of a job: consensus, small collectives, and reports of failures, which name this rank's `step`."""

    def __init__(self, group: RankGroup, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        self.group, self.rank, self.size = group, group.rank, group.size
        self.is_first = group.rank == 0  # displays progress, and writes logs
        self.control = group.duplicate("gloo", limit)
        self.consensus = Consensus(group, limit)
        self.reports: FailureReports | None = None
        self.step = 0
        self._sent = self._bytes_sent()

    def max(self, number: int) -> int:
        """Return the largest of the ranks' numbers. Collective."""
        return int(self.control.all_gather(torch.tensor([number], dtype=torch.int64), "control").max())

    def sum(self, number: Tensor) -> float:
        """Return the sum of the ranks' numbers, added in rank order. Collective."""
        return float(self.control.all_gather(number.detach().reshape(1).cpu(), "control").sum())

    def gather_to_first(self, values: Tensor) -> Tensor:
        """Concatenate the 1-D CPU tensors of all ranks on rank 0; empty on other ranks. Collective."""
        sizes: list[int] = self.control.all_gather_object(values.shape[0])
        send_sizes = [values.shape[0]] + [0] * (self.size - 1)
        return self.control.all_to_all(values, send_sizes, sizes if self.is_first else [0] * self.size, "evaluation")()

    def skipped_rows(self, report: ReadReport) -> tuple[int, str]:
        """Return the number of bad rows that all ranks have skipped, and their reports. Collective."""
        reports = self.control.all_gather_object(report)
        texts = [f"rank {r}: " * (len(reports) > 1) + str(report) for r, report in enumerate(reports) if report.skipped]
        return sum(report.skipped for report in reports), "\n".join(texts)

    @contextmanager
    def monitor_failures(self) -> Iterator[None]:
        """Raise `RankFailed`, which names the rank, if one fails in the block; report errors of this rank to others."""
        if self.size == 1 or self.reports is not None:
            yield
            return
        self.reports = FailureReports(self.group)
        try:
            yield
        except Interrupted:  # raised on all ranks
            raise
        except Exception as error:
            if lost_contact(error):
                raise self.reports.explain(error, self.step) from error
            self.reports.report(error, self.step)
            raise
        finally:
            self.reports = None

    @contextmanager
    def without_metering(self) -> Iterator[None]:
        """Exclude bytes sent in the block from `take_bytes_sent`."""
        previous = self._bytes_sent()
        try:
            yield
        finally:
            self._sent.update(self._bytes_sent() - previous)

    def take_bytes_sent(self) -> dict[str, int]:
        """Return the bytes that all ranks have sent to each other since the last call, by kind. Collective."""
        previous, self._sent = self._sent, self._bytes_sent()
        return {} if self.size == 1 else sum(self.control.all_gather_object(self._sent - previous), Counter())

    def _bytes_sent(self) -> Counter[str]:
        return Counter({kind: traffic.total for kind, traffic in self.group.traffic.by_kind().items()})


def group_of(model: nn.Module) -> RankGroup:
    """Return the ranks that train a model; raise ValueError for a model of one process in a job of several."""
    if isinstance(model, HybridParallel):
        return model.group
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"the job has {dist.get_world_size()} ranks, but a {type(model).__name__} trains on one: pass "
            "tritonemb.HybridParallel(model) to the trainer, which shards its tables and replicates the rest"
        )
    return RankGroup()


class Interrupted(Exception):
    """A signal stopped training; `exit_status` is the process's exit status for it, 130 or 143."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"training was interrupted by {signal.Signals(signum).name}")
        self.signum, self.exit_status = signum, 128 + signum


class StopRequest:
    """Context that records the first SIGINT or SIGTERM, in the main thread only; a second one has its usual effect."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._handlers = dict[int, Any]()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Signals that the parent process has set to be ignored, as nohup does, remain ignored.
            self._handlers = {n: signal.getsignal(n) for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
        for number in self._handlers:
            signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self.__exit__()


class Failure(NamedTuple):
    """Exception of a rank, as sent to the other ranks: index of its kind in `_KINDS`, and message."""

    kind: int
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        kinds = (cls(number, str(error)) for number, kind in enumerate(_KINDS) if isinstance(error, kind))
        return next(kinds, cls(_KINDS.index(RuntimeError), f"{type(error).__name__}: {error}"))


def on_all_ranks(group: RankGroup | None, function: Callable[[], T], error: type[Exception] | None = None) -> list[T]:
    """Call `function()`, which must not use collectives, on every rank; return the results of all ranks, pickled.

    If it raises on any rank, every rank raises `error` if given, otherwise an exception of the same kind if that is a
    common one, otherwise RuntimeError; the message names the ranks. A KeyboardInterrupt is raised on its rank.
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
    """Call `function()` on every rank; return this rank's result, unsent. Raise the errors of `on_all_ranks`."""
    results = list[T]()
    on_all_ranks(group, lambda: results.append(function()), error)
    return results[0]


def on_rank_zero(group: RankGroup | None, function: Callable[[], T], error: type[Exception] | None = None) -> T:
    """Call `function()` on rank 0; return its result on every rank. Raise the errors of `on_all_ranks`."""
    is_zero = group is None or group.rank == 0
    return on_all_ranks(group, lambda: function() if is_zero else None, error)[0]  # type: ignore[return-value]


def raise_failures(outcomes: Sequence[Any], local: BaseException | None, error: type[Exception] | None = None) -> None:
    """Raise if there is a `Failure` among all ranks' outcomes; `local` is this rank's exception."""
    if not (failures := {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}):
        return
    if local is not None and not isinstance(local, Exception):
        raise local
    first = next(iter(failures.values()))
    ranks = [[r for r, failure in failures.items() if (failure == first) is same] for same in (True, False)]
    texts = [f"rank{'s' * (len(numbers) > 1)} {join_names(map(str, numbers), limit=8)}" for numbers in ranks]
    where = "" if len(ranks[0]) == len(outcomes) else f"{texts[0]}: "
    suffix = f" ({texts[1]} failed, too)" if ranks[1] else ""
    raise (error or _KINDS[first.kind])(f"{where}{first.message}{suffix}") from local
