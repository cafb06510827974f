"""Options of tables, their caches and dynamic tables in a training run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tritonemb.types import AdmissionConfig, CacheConfig, EvictionConfig, TableConfig
from tritonemb.utils import Options, number


@dataclass(frozen=True, kw_only=True)
class TableOptions(Options):
    """Placement of the tables, and caches of their rows on the device.

    Args:
        placement: placement of large tables: device, or host memory (host) or disk with rows cached on the device.
        placed_rows: least number of rows of a table with this placement; smaller tables stay on the device.
        cache_share: fraction of a table's rows that its device cache holds.
        cache_rows: number of rows that a device cache holds, in place of cache_share.
        cache_host_rows: rows of each table on disk that are also cached in host memory; none if not given.
        cache_policy: eviction policy of caches: least recently used (lru) or least frequently used (lfu).
        cache_folder: folder of the files of tables on disk during the run; the system's temporary folder if not given.
        evict: eviction policy of full dynamic tables: lru or lfu.
        admit_after: occurrences of an id after which it gets a row of a dynamic table.
    """

    placement: Literal["device", "host", "disk"] = "device"
    placed_rows: int = number(10_000, least=0)
    cache_share: float = 0.1
    cache_rows: int | None = None
    cache_host_rows: int | None = None
    cache_policy: Literal["lru", "lfu"] = "lru"
    cache_folder: Path | None = None
    evict: Literal["lru", "lfu"] = "lru"
    admit_after: int = number(1, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_host_rows is not None and self.placement != "disk":
            raise ValueError(f"cache_host_rows is for tables on disk, but placement is {self.placement!r}")
        self.place([])  # checks the cache options

    def place(self, tables: Sequence[TableConfig]) -> list[TableConfig]:
        """Set placement, cache, eviction and admission of tables."""
        cache = CacheConfig(
            self.cache_rows, self.cache_share, self.cache_policy, self.cache_folder, self.cache_host_rows
        )
        eviction, admission = EvictionConfig(self.evict), AdmissionConfig(appearances=self.admit_after)
        placed = list(tables)
        for index, table in enumerate(tables):
            if table.is_dynamic:
                placed[index] = replace(table, eviction=eviction, admission=admission)
            if (table.num_embeddings or table.capacity or 0) >= self.placed_rows:
                placed[index] = replace(placed[index], placement=self.placement, cache=cache)
        return placed
