"""What the pass did to a graph, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fused:
    """Operations that became one.

    Attributes:
        what: the new operation, in words.
        members: names of what it replaces: module paths, or names in the graph.
    """

    what: str
    members: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what}: {listed(self.members)}"


@dataclass(frozen=True)
class LeftAlone:
    """An operation that stays as it was.

    Attributes:
        name: module path, or name in the graph.
        what: the function.
        reason: why, in words.
    """

    name: str
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.what}): {self.reason}"


@dataclass
class Report:
    """What became of one graph."""

    fused: list[Fused] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(
            [f"fused: {item}" for item in self.fused] + [f"left alone: {item}" for item in self.left_alone]
        )


def listed(names: Iterable[str], most: int = 12) -> str:
    """The first `most` names, and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
