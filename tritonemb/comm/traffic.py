"""How many bytes a rank has sent to others, by kind."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple


class Sent(NamedTuple):
    """Bytes sent to other ranks, and how many of them to ranks on other nodes."""

    total: int = 0
    across_nodes: int = 0


class Traffic:
    """Counts what a rank sends; several threads may count at once."""

    def __init__(self) -> None:
        self._sent: dict[str, Sent] = {}
        self._lock = threading.Lock()

    def add(self, kind: str, sizes: Sequence[int], nodes: Sequence[int], rank: int) -> None:
        """`sizes[r]` bytes go to rank `r` of a group, which is on node `nodes[r]`; `rank` is one's own."""
        total = sum(sizes) - sizes[rank]
        across = sum(size for size, node in zip(sizes, nodes, strict=True) if node != nodes[rank])
        with self._lock:
            before = self._sent.get(kind, Sent())
            self._sent[kind] = Sent(before.total + total, before.across_nodes + across)

    def by_kind(self) -> dict[str, Sent]:
        """What has been sent so far, by kind."""
        with self._lock:
            return dict(self._sent)

    def reset(self) -> None:
        with self._lock:
            self._sent.clear()
