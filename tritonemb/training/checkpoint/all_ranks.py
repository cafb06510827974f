"""Call a function on all ranks, or on rank zero: it succeeds on all of them, or every rank raises."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from tritonemb.comm.group import RankGroup
from tritonemb.training.checkpoint.files import CheckpointError

Value = TypeVar("Value")
MAX_LISTED = 8
# Every rank raises the first of these that a rank's exception is. The exception itself may not be picklable.
_KINDS = (CheckpointError, FileNotFoundError, OSError, ValueError, TypeError, RuntimeError)


class Failure(NamedTuple):
    """A rank's exception, as the other ranks receive it."""

    kind: int
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        for number, kind in enumerate(_KINDS):
            if isinstance(error, kind):
                return cls(number, str(error))
        return cls(_KINDS.index(RuntimeError), f"{type(error).__name__}: {error}")


def ignore_single_process_warning() -> None:
    """Silence torch's warning that a checkpoint is of a single process, which may come from a thread of its own."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def on_all_ranks(
    group: RankGroup | None, function: Callable[[], Value], error: type[Exception] | None = None
) -> list[Value]:
    """Call `function()`, which must use no collective, on every rank; returns all results, sent by pickle.

    Args:
        error: the type to raise on several ranks, instead of the one below.

    Raises:
        on every rank, if it raised on one: an exception of the same kind if that is a common one, else a RuntimeError.
            Its message names the ranks. A rank whose own was no `Exception`, e.g. a KeyboardInterrupt, raises that.
    """
    if group is None or group.size == 1:
        return [function()]
    own: BaseException | None = None
    outcome: Any
    try:
        outcome = function()
    except BaseException as raised:
        own, outcome = raised, Failure.of(raised)
    outcomes = group.all_gather_object(outcome)
    raise_failures(outcomes, own, error)
    return outcomes


def on_rank_zero(group: RankGroup | None, function: Callable[[], Value], error: type[Exception] | None = None) -> Value:
    """What `function()` returns on rank 0, on every rank; raises as `on_all_ranks` does."""
    is_zero = group is None or group.rank == 0
    return on_all_ranks(group, lambda: function() if is_zero else None, error)[0]  # type: ignore[return-value]


def raise_failures(outcomes: Sequence[Any], own: BaseException | None, error: type[Exception] | None = None) -> None:
    """Raise for the `Failure`s among all ranks' outcomes, if there are any; `own` is this rank's exception."""
    failures = {rank: found for rank, found in enumerate(outcomes) if isinstance(found, Failure)}
    if not failures:
        return
    if own is not None and not isinstance(own, Exception):
        raise own
    first = next(iter(failures.values()))
    same = [rank for rank, failure in failures.items() if failure == first]
    others = [rank for rank in failures if rank not in same]
    where = "" if len(same) == len(outcomes) else f"{_ranks(same)}: "
    besides = f" ({_ranks(others)} failed, too)" if others else ""
    raise (error or _KINDS[first.kind])(f"{where}{first.message}{besides}") from own


def _ranks(ranks: list[int]) -> str:
    few = ", ".join(map(str, ranks[:MAX_LISTED])) + ", …" * (len(ranks) > MAX_LISTED)
    return f"rank {few}" if len(ranks) == 1 else f"ranks {few}"
