"""What is wrong with a row of a log, and how it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

SHOWN_CHARACTERS = 40
KEPT = 10  # problems that a report tells in full


@dataclass(frozen=True)
class Problem:
    """A bad row.

    Args:
        row: its line or row in the chunk that it was met in, from 0.
        reason: what is wrong, for counting: the same words for the same mistake in other rows.
        message: what is wrong with this one.
    """

    row: int
    reason: str
    message: str


@dataclass
class Problems:
    """The bad rows of a chunk: the first few in full, all of them counted by reason."""

    first: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.counts.total()


def wrong_value(place: int, name: str, value: object, expected: str, hint: str = "") -> str:
    """`field 3 (int_2) is 'x', expected an integer or nothing`; `place` counts from 1."""
    return f"field {place} ({name}) is {shown(value)}, expected {expected}{hint}"


def shown(value: object) -> str:
    """A value in quotes, escaped, shortened."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "...")


def listed(names: Iterable[str], most: int = 60) -> str:
    """Names with commas between them, the rest counted."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
