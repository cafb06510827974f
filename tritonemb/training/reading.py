"""A data set as one rank of a job reads it: its shards, by data loader workers where they are asked for."""

from __future__ import annotations

from typing import Any

from tritonemb.data.loader import merge_positions, open_shards, rank_position
from tritonemb.data.protocol import Batches, Data, Split
from tritonemb.data.workers import DataLoaderWorkers
from tritonemb.training.parallel import Parallel


class Reading:
    """Opens this rank's part of a data set.

    Args:
        data: the same on all ranks.
        parallel: the ranks.
        batch_size: samples a batch.
        seed: of the order of the rows.
        pin_memory: make the batches in page-locked memory.
        readers: data loader workers of this rank; none if 0.
    """

    def __init__(
        self, data: Data, parallel: Parallel, batch_size: int, seed: int, pin_memory: bool, readers: int = 0
    ) -> None:
        self._data, self._parallel = data, parallel
        self._batch_size, self._seed, self._pin_memory = batch_size, seed, pin_memory
        self._workers = DataLoaderWorkers(data, readers) if readers else None

    def open(self, split: Split, shuffle: bool = False, epoch: int = 0, position: Any = None) -> Batches:
        """This rank's batches of a split: shuffled by epoch, from a position on."""
        return open_shards(
            self._data, split, self._batch_size, self._parallel.rank, self._parallel.size, positions=position,
            seed=self._seed if shuffle else 0, epoch=epoch, shuffle=shuffle, pin_memory=self._pin_memory,
            workers=self._workers,
        )  # fmt: skip

    def merged(self, position: Any) -> Any:
        """Where the epoch stands, from where each rank does; None at its beginning. Collective."""
        positions = self._parallel.gather(position)
        return None if position is None else merge_positions(positions)

    def own(self, position: Any) -> Any:
        """This rank's part of where an epoch stands."""
        return None if position is None else rank_position(position, self._parallel.rank, self._parallel.size)
