"""Changes of rows on one server: since the last snapshots, and since trainers have cached them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonemb.layout import NO_ROW
from tritonemb.tables.dynamic_table import DynamicTable


@dataclass
class SnapshotChain:
    """Changes since the last snapshot of a chain.

    Attributes:
        snapshot: name of that snapshot.
        changed: per table, bool by row: written since then.
        removed: per table, ids that have lost their rows since then.
    """

    snapshot: str
    changed: list[Tensor]
    removed: list[list[Tensor]]


class RowChanges:
    """Changes of the rows of `tables`; `index` is a position among them.

    Attributes:
        chains: chains of snapshots, by name.
        versions: per table, int64 by row: a number that is unique to the row's present content. None until a trainer
            with a cache pulls.
    """

    def __init__(self, tables: Sequence[DynamicTable]) -> None:
        self._tables = tables
        self.chains: dict[str, SnapshotChain] = {}
        self.versions: list[Tensor] | None = None
        self._version = 0

    def mark_written(self, index: int, rows: Tensor) -> None:
        """Note that rows were written; -1: no row."""
        self._mark_changed(index, rows)
        self._set_version(index, rows)

    def mark_read(self, index: int, rows: Tensor, inserted_mask: Tensor | None = None) -> None:
        """Note that a training batch has read rows, of which those of the mask are new; -1: no row."""
        self._mark_changed(index, rows)
        table = self._tables[index]
        if table.removed_ids is not None and sum(ids.numel() for ids in table.removed_ids) > len(table.index.ids):
            table.removed_ids = None  # a full snapshot is smaller
        if inserted_mask is not None:
            self._set_version(index, rows[inserted_mask])

    def _mark_changed(self, index: int, rows: Tensor) -> None:
        for chain in self.chains.values():
            chain.changed[index][rows[rows >= 0]] = True

    def _set_version(self, index: int, rows: Tensor) -> None:
        if self.versions is not None:
            self._version += 1
            self.versions[index][rows[rows >= 0]] = self._version

    def track_versions(self) -> None:
        """Give rows versions, from now on."""
        if self.versions is None:
            self._version = time.time_ns()  # above all versions of an earlier process
            self.versions = [torch.full_like(table.index.ids, self._version) for table in self._tables]

    def versions_of(self, index: int, rows: Tensor) -> Tensor:
        """Return the versions of rows; `NO_ROW` for row -1."""
        assert self.versions is not None
        return torch.where(rows < 0, NO_ROW, self.versions[index][rows.clamp(min=0)])

    def begin_chain(self, name: str, snapshot: str) -> None:
        """Track changes since a snapshot, which is now the last one of a chain."""
        changed = [torch.zeros(len(table.index.ids), dtype=torch.bool) for table in self._tables]
        for table in self._tables:
            table.removed_ids = []
        self.chains[name] = SnapshotChain(snapshot, changed, [[] for _ in self._tables])

    def note_removed(self) -> None:
        """Add removed ids to all chains; drop chains for which a full snapshot is smaller."""
        for index, table in enumerate(self._tables):
            for name, chain in list(self.chains.items()):
                chain.removed[index] += table.removed_ids or []
                if table.removed_ids is None or sum(map(len, chain.removed[index])) > len(table.index.ids):
                    del self.chains[name]
            table.removed_ids = []
