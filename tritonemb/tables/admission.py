"""Which new ids get a row of a dynamic table."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tritonemb.layout import DynamicIndex, mix64, partitions_of
from tritonemb.types import AdmissionConfig

NUM_HASHES = 4  # of an id
HALVED_AFTER = 8  # occurrences for each cell of a partition's part of a hash


class Sketch:
    """Counts occurrences of ids without rows: count-min (Cormode and Muthukrishnan, 2005), conservative, in partitions.

    A partition's counts are halved when `HALVED_AFTER` occurrences have come for each of its cells.
    """

    def __init__(self, index: DynamicIndex, appearances: int) -> None:
        (self._whole, self._first), self._partitions = index.shard.tolist(), index.num_sets.numel()
        most = torch.iinfo(torch.int16).max
        if appearances > most:
            raise ValueError(f"an admission's appearances may be {most} at most, got {appearances}")
        self._width = 1 << (len(index.ids) // self._partitions).bit_length()
        device = index.ids.device
        self._cells = torch.zeros(NUM_HASHES, self._partitions * self._width, dtype=torch.int16, device=device)
        self._added = torch.zeros(self._partitions, dtype=torch.int64, device=device)

    def move(self, device: torch.device) -> None:
        self._cells, self._added = self._cells.to(device), self._added.to(device)

    def tensors(self) -> dict[str, Tensor]:
        return {"sketch": self._cells.int(), "added": self._added.clone()}

    def templates(self) -> dict[str, Tensor]:
        """Room for those of the whole table."""
        cells = torch.empty(NUM_HASHES, self._whole * self._width, dtype=torch.int32)  # gloo sends no int16
        return {"sketch": cells, "added": torch.empty(self._whole, dtype=torch.int64)}

    def shard_spec(self, name: str) -> tuple[list[int], tuple[int, int]]:
        """The shape of the whole table's `sketch` or `added`, and where this part's begins."""
        whole, first = self._whole, self._first
        if name == "added":
            return [whole], (first, 0)
        return [NUM_HASHES, whole * self._width], (0, first * self._width)

    def clear(self) -> None:
        self._cells.zero_()
        self._added.zero_()

    def check(self, saved: Mapping[str, Tensor], title: str) -> None:
        if saved["sketch"].shape != (shape := (NUM_HASHES, self._whole * self._width)):
            found = tuple(saved["sketch"].shape)
            raise ValueError(f"{title}: sketch must have shape {shape}, got {found}; it is of another capacity")

    def load(self, saved: Mapping[str, Tensor]) -> None:
        self._cells.copy_(saved["sketch"][:, self._first * self._width :][:, : self._cells.shape[1]])
        self._added.copy_(saved["added"][self._first :][: self._partitions])

    def counts(self, ids: Tensor) -> Tensor:
        """int64 `[N]`, at least how often the ids were added since they were halved."""
        return self._cells.gather(1, self._places(ids)[1]).amin(0).long()

    def add(self, ids: Tensor, occurrences: Tensor) -> None:
        """Count distinct ids."""
        partitions, places = self._places(ids)
        counts = (self._cells.gather(1, places).amin(0) + occurrences).clamp(max=torch.iinfo(torch.int16).max)
        self._cells.scatter_reduce_(1, places, counts.short().expand_as(places), "amax")
        self._added.index_add_(0, partitions, occurrences)
        full = self._added >= HALVED_AFTER * self._width
        if full.any():
            self._cells.view(NUM_HASHES, self._partitions, self._width)[:, full] >>= 1
            self._added[full] = 0

    def _places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        mixed, partitions = mix64(ids), partitions_of(ids, self._whole) - self._first
        cells = [mix64(mixed + n) & self._width - 1 for n in range(1, NUM_HASHES + 1)]  # a power of two
        return partitions, partitions * self._width + torch.stack(cells)


def admits(admission: AdmissionConfig, ids: Tensor, occurrences: Tensor, seed: int, sketch: Sketch | None) -> Tensor:
    """bool `[N]`, of distinct new ids of a batch in which they occur so often."""
    admitted = torch.ones_like(ids, dtype=torch.bool)
    if admission.probability < 1.0:
        drawn = mix64(mix64(ids) ^ seed) >> 11 & 2**53 - 1
        admitted &= drawn < int(admission.probability * 2.0**53)
    if sketch is not None:
        admitted &= sketch.counts(ids) + occurrences >= admission.appearances
    return admitted
