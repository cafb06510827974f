"""Worker-side embedding cache: rows that a trainer has pulled, so that unchanged rows do not cross the network again.

With exact staleness a pull sends the versions of cached rows, and servers return rows whose versions differ: results
are bitwise identical. With `AtMost(s)` a pull of step k omits cached rows that have the updates of steps < k - s.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tritonemb.layout import NO_ROW
from tritonemb.server.spec import TableSpec
from tritonemb.tables.dynamic_table import DynamicTable, concat_ids, insert_batch
from tritonemb.types import CacheConfig, EvictionConfig, TableConfig

NOT_CACHED = NO_ROW - 1  # differs from each version of a row


@dataclass
class CachedPull:
    """Rows of a table's distinct ids in one batch, of which some are cached.

    Attributes:
        ids: int64 `[n]`.
        rows: `[n, embedding_dim]`; valid where the cache has the row.
        positions: int64 `[m]`, positions among `ids` that are requested from servers.
        versions: int64 `[m]`, versions of the requested rows in the cache; `NOT_CACHED` where the cache lacks the row.
    """

    ids: Tensor
    rows: Tensor
    positions: Tensor
    versions: Tensor


class WorkerCache:
    """Cache of one table: rows, their versions, and the number of steps whose updates they have.

    Args:
        cache: `None` disables caching.

    Attributes:
        rows_read: rows that batches have read.
        rows_saved: of these, rows that did not cross the network.
    """

    def __init__(self, spec: TableSpec, cache: CacheConfig | None) -> None:
        self._table: DynamicTable | None = None
        self._empty = torch.empty(0, spec.embedding_dim, dtype=getattr(torch, spec.dtype))
        self.rows_read = self.rows_saved = 0
        if cache is not None:
            config = TableConfig(
                spec.name, None, spec.embedding_dim, dtype=self._empty.dtype, capacity=cache.rows,
                eviction=EvictionConfig(cache.policy, protect=1),
            )  # fmt: skip
            self._table = DynamicTable(config, ())
            self._versions = torch.full_like(self._table.index.ids, NOT_CACHED)
            self._steps = torch.zeros_like(self._versions)

    @torch.no_grad()
    def begin(self, ids: Tensor, min_steps: int | None) -> CachedPull:
        """Choose the distinct ids to request: all, or those without a row that has the updates of `min_steps` steps."""
        if self._table is None:
            rows = self._empty.new_empty(ids.numel(), self._empty.shape[1])
            return CachedPull(ids, rows, torch.arange(ids.numel()), torch.full_like(ids, NOT_CACHED))
        slots = self._table.find(ids)
        valid_slots, versions = slots.clamp(min=0), torch.full_like(ids, NOT_CACHED)
        versions[slots >= 0] = self._versions[slots[slots >= 0]]
        rows = self._table.weight.detach().index_select(0, valid_slots)
        positions = torch.arange(ids.numel())
        if min_steps is not None:
            positions = ((slots < 0) | (self._steps[valid_slots] < min_steps)).nonzero()[:, 0]
        return CachedPull(ids, rows, positions, versions[positions])

    @torch.no_grad()
    def finish(self, pull: CachedPull, versions: Tensor, steps: Tensor) -> Tensor:
        """Return all rows of the batch, and cache the requested ones, which are in `pull.rows` by now.

        Args:
            versions: int64 `[m]`, versions of the requested rows on the servers.
            steps: int64 `[m]`, number of steps whose updates these rows have.
        """
        self.rows_read += pull.ids.numel()
        self.rows_saved += pull.ids.numel() - int((versions != pull.versions).sum())
        if self._table is not None:
            positions = pull.positions[: len(self._versions) // 2]  # a batch may be larger than the cache
            slots = insert_batch([self._table], *concat_ids([pull.ids[positions]]))[0]
            self._table.weight.data[slots] = pull.rows[positions]
            self._versions[slots], self._steps[slots] = versions[: positions.numel()], steps[: positions.numel()]
        return pull.rows
