"""Where a run's tables live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tritonemb.types import CacheConfig, TableConfig


@dataclass(frozen=True)
class TableOptions:
    """Where the tables live, and how many of their rows are on the device.

    Args:
        placement: of large tables: on the device, in the host's memory or on its disk, with rows cached on the device.
        placed_rows: tables with fewer rows stay on the device.
        cache_share: of a placed table's rows that the device has room for.
        cache_rows: as many rows instead.
        cache_host_rows: rows of each placed table that the host's memory has room for besides, where they are placed on
            disk; none if not given.
        cache_policy: the row to make room: the one used longest ago (lru) or least often (lfu).
        cache_folder: where tables on disk have their files while they are in use; that of temporary files if not given.
        look_ahead: steps for which rows are brought to the device before they compute; chosen while training if not
            given.

    Raises:
        ValueError: for numbers out of range.
    """

    placement: Literal["device", "host", "disk"] = "device"
    placed_rows: int = 10_000
    cache_share: float = 0.1
    cache_rows: int | None = None
    cache_host_rows: int | None = None
    cache_policy: Literal["lru", "lfu"] = "lru"
    cache_folder: Path | None = None
    look_ahead: int | None = None

    def __post_init__(self) -> None:
        if self.placed_rows < 0:
            raise ValueError(f"placed_rows must not be negative, got {self.placed_rows}")
        if self.look_ahead is not None and self.look_ahead < 0:
            raise ValueError(f"look_ahead must not be negative, got {self.look_ahead}")
        if self.cache_host_rows is not None and self.placement != "disk":
            raise ValueError(f"cache_host_rows is for tables on disk, but placement is {self.placement!r}")
        assert self.cache is not None  # made once, which checks its numbers

    @property
    def cache(self) -> CacheConfig:
        return CacheConfig(
            self.cache_rows, self.cache_share, self.cache_policy, self.cache_folder, self.cache_host_rows
        )

    def place(self, tables: Sequence[TableConfig]) -> list[TableConfig]:
        """These tables, where they are to live."""
        return [
            replace(table, placement=self.placement, cache=self.cache)
            if table.num_embeddings >= self.placed_rows
            else table
            for table in tables
        ]
