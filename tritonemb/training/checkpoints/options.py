"""When checkpoints are written, and what it means that one was not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckpointOptions:
    """When checkpoints are written, how many are kept, and what happens if one cannot be written.

    Args:
        checkpoint_steps: write one every so many steps.
        checkpoint_minutes: write one when so many minutes have passed since the last; 0 for never.
        keep: how many of the last checkpoints stay; the best one stays besides.
        on_checkpoint_error: go on training with the earlier checkpoints, or stop.
        checkpoint_incremental: of tables on disk, write the rows that have changed since the last checkpoint only, as
            long as such changes together are smaller than the table.
        checkpoint_async: write checkpoints in a thread while training goes on; copies of the tensors stay in memory.

    Raises:
        ValueError: for numbers out of range.
    """

    checkpoint_steps: int | None = None
    checkpoint_minutes: float = 10.0
    keep: int = 3
    on_checkpoint_error: Literal["continue", "stop"] = "continue"
    checkpoint_incremental: bool = False
    checkpoint_async: bool = False

    def __post_init__(self) -> None:
        if self.checkpoint_steps is not None and self.checkpoint_steps < 1:
            raise ValueError(f"checkpoint_steps must be at least 1, got {self.checkpoint_steps}")
        if self.checkpoint_minutes < 0:
            raise ValueError(f"checkpoint_minutes must not be negative, got {self.checkpoint_minutes}")
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")
        if self.on_checkpoint_error not in ("continue", "stop"):
            raise ValueError(f"on_checkpoint_error must be 'continue' or 'stop', got {self.on_checkpoint_error!r}")


class CheckpointError(OSError):
    """A checkpoint could not be written; the earlier ones are as they were."""
