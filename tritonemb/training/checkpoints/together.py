"""Doing a thing on every rank, so that it has been done by all or has failed for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from tritonemb.comm.group import RankGroup
from tritonemb.training.checkpoints.options import CheckpointError

Value = TypeVar("Value")
MOST_NAMED = 8
# What every rank raises of what one did: the first of these that it is. No exception travels; many cannot be pickled.
_KINDS = (CheckpointError, FileNotFoundError, OSError, ValueError, TypeError, RuntimeError)


class _Failure(NamedTuple):
    kind: int
    message: str


def alone(group: RankGroup | None) -> bool:
    """Whether there is nobody to agree with."""
    return group is None or group.size == 1


def is_first(group: RankGroup | None) -> bool:
    """Whether this rank does what one rank is to do."""
    return group is None or group.rank == 0


def together(
    group: RankGroup | None, function: Callable[[], Value], error: type[Exception] | None = None
) -> list[Value]:
    """What `function()`, which must use no collective, returns on every rank; by pickle, so let it be small.

    Args:
        error: what to raise of several ranks instead of what is said below.

    Raises:
        on every rank, if it raised on one: an exception of the same kind, if that is a common one, else a RuntimeError,
            whose message names the ranks; on a rank whose own was no `Exception`, e.g. a KeyboardInterrupt, that.
    """
    if group is None or group.size == 1:
        return [function()]
    own: BaseException | None = None
    outcome: Any = None
    try:
        outcome = function()
    except BaseException as raised:
        own, outcome = raised, _failure(raised)
    outcomes = group.all_gather_object(outcome)
    failures = {rank: found for rank, found in enumerate(outcomes) if isinstance(found, _Failure)}
    if failures:
        if own is not None and not isinstance(own, Exception):
            raise own
        raise _for_all(failures, group.size, error) from own
    return outcomes


def of_first(group: RankGroup | None, function: Callable[[], Value], error: type[Exception] | None = None) -> Value:
    """What `function()` returns on rank 0, told to every rank; raises as `together` does."""
    return together(group, lambda: function() if is_first(group) else None, error)[0]  # type: ignore[return-value]


def _failure(error: BaseException) -> _Failure:
    found = next((number for number, kind in enumerate(_KINDS) if isinstance(error, kind)), None)
    if found is None:
        return _Failure(_KINDS.index(RuntimeError), f"{type(error).__name__}: {error}")
    return _Failure(found, str(error))


def _for_all(failures: dict[int, _Failure], size: int, error: type[Exception] | None) -> Exception:
    first = next(iter(failures.values()))
    kind = error or _KINDS[first.kind]
    if len(failures) == size and len(set(failures.values())) == 1:
        return kind(first.message)
    same = [rank for rank, failure in failures.items() if failure == first]
    others = [rank for rank, failure in failures.items() if failure != first]
    besides = f" ({_ranks(others)} failed, too)" if others else ""
    return kind(f"{_ranks(same)}: {first.message}{besides}")


def _ranks(ranks: list[int]) -> str:
    few = ", ".join(map(str, ranks[:MOST_NAMED])) + ", …" * (len(ranks) > MOST_NAMED)
    return f"rank {few}" if len(ranks) == 1 else f"ranks {few}"
