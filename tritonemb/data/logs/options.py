"""How a log is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tritonemb.data.logs.schema import Schema
from tritonemb.data.logs.splits import SplitRule

LARGEST_CHUNK = 1 << 28


@dataclass(frozen=True)
class LogOptions:
    """How a log is read, cut up and numbered.

    Args:
        schema: which columns are what, and how categories become ids.
        split: which rows are held out.
        shuffle_rows: rows that are shuffled among each other at a time, in memory; 0 keeps the order of the files.
        on_bad_row: stop at a row that is not as it should be, or leave it out and count it.
        workers: threads that parse; one for each processor, at most 8, if not given.
        chunk_bytes: bytes that one of them works on at a time.
    """

    schema: Schema = field(default_factory=Schema)
    split: SplitRule = field(default_factory=SplitRule)
    shuffle_rows: int = 262_144
    on_bad_row: Literal["raise", "skip"] = "raise"
    workers: int | None = None
    chunk_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if self.shuffle_rows < 0:
            raise ValueError(f"shuffle_rows must not be negative, got {self.shuffle_rows}")
        if self.on_bad_row not in ("raise", "skip"):
            raise ValueError(f'on_bad_row must be "raise" or "skip", got {self.on_bad_row!r}')
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if not 1 <= self.chunk_bytes <= LARGEST_CHUNK:
            raise ValueError(f"chunk_bytes must be from 1 to {LARGEST_CHUNK}, got {self.chunk_bytes}")
