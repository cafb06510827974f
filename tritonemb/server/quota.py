"""Memory quota of a server: which collections fit, and which are put on disk."""

from pathlib import Path
from typing import Literal, get_args

from tritonemb.server.spec import CollectionSpec
from tritonemb.types import CacheConfig

OverMemory = Literal["refuse", "spill"]
MIN_CACHED_SHARE = 0.001  # of a collection's rows; with fewer in memory it would only wait for the disk


class MemoryQuota:
    """Bytes of full tables, reserved by collection; see `EmbeddingServer` for `memory` and `over_memory`.

    Args:
        folder: folder of the rows on disk; None: a temporary one.
    """

    def __init__(self, memory: float | None, over_memory: OverMemory, folder: Path | None) -> None:
        if over_memory not in get_args(OverMemory):
            raise ValueError(f"over_memory must be one of {get_args(OverMemory)}, got {over_memory!r}")
        self._memory, self._over_memory, self._folder = memory, over_memory, folder
        self._reserved_bytes: dict[str, float] = {}

    def reserve(self, server_name: str, collection: str, spec: CollectionSpec, server: int) -> CacheConfig | None:
        """Reserve memory for a collection; return None if it fits, else the cache of its tables on disk.

        ValueError if it is refused.
        """
        needed_bytes = spec.num_bytes(server)
        free_bytes = needed_bytes if self._memory is None else self._memory - sum(self._reserved_bytes.values())
        if needed_bytes > free_bytes and (
            self._over_memory == "refuse" or free_bytes < needed_bytes * MIN_CACHED_SHARE
        ):
            raise ValueError(
                f"embedding server {server_name} has {free_bytes:,.0f} bytes left for tables, and those of "
                f'{collection!r} need {needed_bytes:,} when full: set more memory or over_memory="spill", start more '
                "servers, or reduce the tables"
            )
        self._reserved_bytes[collection] = min(needed_bytes, free_bytes)
        if needed_bytes <= free_bytes:
            return None
        return CacheConfig(share=free_bytes / needed_bytes, folder=self._folder)
