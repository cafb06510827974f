"""Rows that a trainer keeps of embedding servers, so that those that have not changed need not cross the network again.

With exact staleness a trainer says which versions of rows it has, and servers send the others: bits are the same. With
`AtMost(s)` it does not ask for rows whose updates up to step k - 1 - s it has seen, and reads what it has.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tritonemb.layout import NO_ROW
from tritonemb.server.tables import TableSpec
from tritonemb.tables.dynamic_table import DynamicTable, concat_ids, insert_batch
from tritonemb.types import CacheConfig, EvictionConfig, TableConfig

NOT_CACHED = NO_ROW - 1  # no version of a row


@dataclass
class CachedPull:
    """A batch of a table's distinct ids, of which some rows are cached.

    Attributes:
        ids: int64 `[n]`.
        rows: `[n, embedding_dim]`, as far as they are cached.
        asked: int64 `[m]`, the positions of ids that servers are asked for.
        versions: int64 `[m]`, of what is cached of these; `NOT_CACHED` of others.
    """

    ids: Tensor
    rows: Tensor
    asked: Tensor
    versions: Tensor


class WorkerCache:
    """The cache of one table: rows, their versions, and how many steps' updates they have. Without a config, none.

    Attributes:
        rows_read, rows_saved: rows that batches have read, and those of them that did not cross the network.
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
    def begin(self, ids: Tensor, least: int | None) -> CachedPull:
        """What to ask for of distinct ids: not for rows with the updates of `least` steps, if that is given."""
        if self._table is None:
            rows = self._empty.new_empty(ids.numel(), self._empty.shape[1])
            return CachedPull(ids, rows, torch.arange(ids.numel()), torch.full_like(ids, NOT_CACHED))
        places = self._table.find(ids)
        there, versions = places.clamp(min=0), torch.full_like(ids, NOT_CACHED)
        versions[places >= 0] = self._versions[places[places >= 0]]
        rows = self._table.weight.detach().index_select(0, there)
        asked = torch.arange(ids.numel())
        if least is not None:
            asked = ((places < 0) | (self._steps[there] < least)).nonzero()[:, 0]
        return CachedPull(ids, rows, asked, versions[asked])

    @torch.no_grad()
    def finish(self, pull: CachedPull, versions: Tensor, steps: Tensor) -> Tensor:
        """All rows of the batch, when those that were asked for are in `pull.rows`; keeps these.

        `versions`, `steps`: int64 `[m]`, of what they are now, and how many steps' updates they have.
        """
        self.rows_read += pull.ids.numel()
        self.rows_saved += pull.ids.numel() - int((versions != pull.versions).sum())
        if self._table is not None:
            kept = pull.asked[: len(self._versions) // 2]  # of a batch that is larger than the cache
            into = insert_batch([self._table], *concat_ids([pull.ids[kept]]))[0]
            self._table.weight.data[into] = pull.rows[kept]
            self._versions[into], self._steps[into] = versions[: kept.numel()], steps[: kept.numel()]
        return pull.rows
