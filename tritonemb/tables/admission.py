"""Admission of new ids into dynamic tables."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tritonemb.layout import DynamicIndex, mix64, partitions_of
from tritonemb.types import AdmissionConfig

NUM_HASHES = 4  # cells per id
HALVED_AFTER = 8  # occurrences per cell after which a partition's counts are halved


class Sketch:
    """Count-min sketch (Cormode and Muthukrishnan, 2005) of occurrences of ids without rows, with conservative update.

    Each partition has its own cells, which are halved after `HALVED_AFTER` occurrences per cell.
    """

    def __init__(self, index: DynamicIndex, appearances: int) -> None:
        self._num_partitions = index.num_sets.numel()
        self._global_partitions, self._first_partition = index.shard.tolist()
        limit = torch.iinfo(torch.int16).max
        if appearances > limit:
            raise ValueError(f"AdmissionConfig(appearances=...) must be at most {limit}, got {appearances}")
        self._width = 1 << (len(index.ids) // self._num_partitions).bit_length()
        device = index.ids.device
        self._cells = torch.zeros(NUM_HASHES, self._num_partitions * self._width, dtype=torch.int16, device=device)
        self._added = torch.zeros(self._num_partitions, dtype=torch.int64, device=device)

    def move(self, device: torch.device) -> None:
        self._cells, self._added = self._cells.to(device), self._added.to(device)

    def tensors(self) -> dict[str, Tensor]:
        return {"sketch": self._cells.int(), "added": self._added.clone()}

    def templates(self) -> dict[str, Tensor]:
        """Return empty tensors of the counts of the unsharded table."""
        cells = torch.empty(NUM_HASHES, self._global_partitions * self._width, dtype=torch.int32)  # gloo sends no int16
        return {"sketch": cells, "added": torch.empty(self._global_partitions, dtype=torch.int64)}

    def shard_spec(self, name: str) -> tuple[list[int], tuple[int, int]]:
        """Return the shape of the unsharded table's `sketch` or `added`, and this shard's offset in it."""
        num_partitions, first = self._global_partitions, self._first_partition
        if name == "added":
            return [num_partitions], (first, 0)
        return [NUM_HASHES, num_partitions * self._width], (0, first * self._width)

    def clear(self) -> None:
        self._cells.zero_()
        self._added.zero_()

    def check(self, saved: Mapping[str, Tensor], title: str) -> None:
        if saved["sketch"].shape != (shape := (NUM_HASHES, self._global_partitions * self._width)):
            actual = tuple(saved["sketch"].shape)
            raise ValueError(f"{title}: sketch must have shape {shape}, got {actual}: that of another capacity")

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Copy this shard's counts from those of the unsharded table."""
        self._cells.copy_(saved["sketch"][:, self._first_partition * self._width :][:, : self._cells.shape[1]])
        self._added.copy_(saved["added"][self._first_partition :][: self._num_partitions])

    def counts(self, ids: Tensor) -> Tensor:
        """Return upper bounds of the ids' occurrences since the last halving, int64 `[N]`."""
        return self._cells.gather(1, self._cells_of(ids)[1]).amin(0).long()

    def add(self, ids: Tensor, occurrences: Tensor) -> None:
        """Add the occurrences of distinct ids."""
        partitions, cells = self._cells_of(ids)
        counts = (self._cells.gather(1, cells).amin(0) + occurrences).clamp(max=torch.iinfo(torch.int16).max)
        self._cells.scatter_reduce_(1, cells, counts.short().expand_as(cells), "amax")
        self._added.index_add_(0, partitions, occurrences)
        full = self._added >= HALVED_AFTER * self._width
        if full.any():
            self._cells.view(NUM_HASHES, self._num_partitions, self._width)[:, full] >>= 1
            self._added[full] = 0

    def _cells_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        mixed, partitions = mix64(ids), partitions_of(ids, self._global_partitions) - self._first_partition
        cells = [mix64(mixed + n) & self._width - 1 for n in range(1, NUM_HASHES + 1)]  # the width is a power of two
        return partitions, partitions * self._width + torch.stack(cells)


def admits(admission: AdmissionConfig, ids: Tensor, occurrences: Tensor, seed: int, sketch: Sketch | None) -> Tensor:
    """Return which distinct new ids of a batch are admitted, bool `[N]`."""
    admitted = torch.ones_like(ids, dtype=torch.bool)
    if admission.probability < 1.0:
        drawn = mix64(mix64(ids) ^ seed) >> 11 & 2**53 - 1
        admitted &= drawn < int(admission.probability * 2.0**53)
    if sketch is not None:
        admitted &= sketch.counts(ids) + occurrences >= admission.appearances
    return admitted
