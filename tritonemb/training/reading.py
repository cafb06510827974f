"""A data set as one rank of a job reads it: its share, by readers of the host where they are asked for."""

from __future__ import annotations

from typing import Any

from tritonemb.data.readers import ReaderProcesses
from tritonemb.data.shares import merge_positions, open_shares, rank_position
from tritonemb.data.source import Batches, Data, Split
from tritonemb.training.checkpoint.all_ranks import on_all_ranks
from tritonemb.training.parallel import Parallel


class Reading:
    """Opens this rank's part of a data set.

    Args:
        data: the same on all ranks.
        parallel: the ranks.
        batch_size: samples a batch.
        seed: of the order of the rows.
        pin_memory: cut the batches into page-locked memory.
        readers: processes a host that read; none if 0.
    """

    def __init__(
        self, data: Data, parallel: Parallel, batch_size: int, seed: int, pin_memory: bool, readers: int = 0
    ) -> None:
        self._data, self._parallel = data, parallel
        self._batch_size, self._seed, self._pin_memory = batch_size, seed, pin_memory
        self._num_readers, self._readers = readers, None  # type: int, ReaderProcesses | None
        self._address: str | None = None

    def open(self, split: Split, shuffle: bool = False, epoch: int = 0, position: Any = None) -> Batches:
        """This rank's batches of a split: shuffled by epoch, from a position on. Collective where there are readers."""
        return open_shares(
            self._data, split, self._batch_size, self._parallel.rank, self._parallel.size, positions=position,
            seed=self._seed if shuffle else 0, epoch=epoch, shuffle=shuffle, pin_memory=self._pin_memory,
            readers=self._readers_address(),
        )  # fmt: skip

    def merged(self, position: Any) -> Any:
        """Where the epoch stands, from where each rank does; None at its beginning. Collective."""
        positions = self._parallel.gather(position)
        return None if position is None else merge_positions(positions)

    def own(self, position: Any) -> Any:
        """This rank's part of where an epoch stands."""
        return None if position is None else rank_position(position, self._parallel.rank, self._parallel.size)

    def _readers_address(self) -> str | None:
        """Of the readers of this host, which its first rank starts when they are first asked for."""
        if self._num_readers and self._address is None:
            nodes = self._parallel.group.nodes
            first = nodes.index(nodes[self._parallel.rank])

            def start() -> str | None:
                if first != self._parallel.rank:
                    return None
                self._readers = ReaderProcesses(self._data, self._num_readers)
                return self._readers.address

            self._address = on_all_ranks(self._parallel.control, start)[first]
        return self._address
