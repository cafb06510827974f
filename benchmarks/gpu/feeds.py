"""How training gets from one batch to the next: in turn, or with the rows of coming batches on their way already.

A feed gives the batches to its tables, and does what is to be done ahead of them. Each unit of training that is timed
ends with `settle`: what has been begun for later batches is paid for by the unit that began it, and disturbs no other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

import tritonemb as te
from benchmarks.peers import FbgemmTables, OurTables, Tables
from benchmarks.workload import Batch
from tritonemb.data.prefetch import Prefetcher
from tritonemb.tables.lookup import PrefetchedFeatures, released_before

LOOK_AHEAD = 4  # batches that ours are told of before they are trained


class Feed:
    """The batches one after the other, each looked up when it is there."""

    def __init__(self, tables: Tables, batches: Iterable[Batch]) -> None:
        self.tables, self._batches = tables, iter(batches)

    def take(self) -> Any:
        """The next batch, as `look_up` takes it."""
        return next(self._batches)

    def look_up(self, batch: Any) -> Tensor:
        """Pooled rows, [B, T * D]."""
        return self.tables.forward(batch)

    def after_forward(self) -> None:
        """Called between a step's forward and its backward."""

    def settle(self) -> None:
        """Wait for what is under way; the current stream waits for what is so on others."""

    def close(self) -> None:
        """End what runs beside."""


class SentAhead(Feed):
    """Ours: another thread, on its own stream, tells the tables of the batches to come, as the trainer does."""

    def __init__(self, tables: OurTables, batches: Iterable[Batch], device: torch.device) -> None:
        super().__init__(tables, batches)
        self._collection, self._side = tables.module, Side(device)
        self._ahead = Prefetcher(
            self._sent(), LOOK_AHEAD, "rows", permit=lambda: released_before(te.nn.sequence_number())
        )

    def take(self) -> PrefetchedFeatures:
        return next(self._ahead)

    def look_up(self, batch: PrefetchedFeatures) -> Tensor:
        return self._collection(batch)

    def settle(self) -> None:
        self._ahead.settle()
        self._side.join()

    def close(self) -> None:
        self._ahead.close(failed=True)  # without waiting for batches that nobody takes

    def _sent(self) -> Generator[PrefetchedFeatures, None, None]:
        for batch in self._batches:
            with self._side.on():
                sent = te.nn.prefetch(self._collection, batch.keyed)
            yield sent
            del sent  # or its rows would be held until the next ones are there


class Prefetched(Feed):
    """FBGEMM's cache: the next batch is prefetched on its own stream, asked for between a step's forward and backward.

    That is the order in which TorchRec's `PrefetchTrainPipelineSparseDist` does it. FBGEMM itself lets the backward
    wait for the prefetch, and a prefetch for the backward of the batch before the one that is trained meanwhile.
    """

    def __init__(self, tables: FbgemmTables, batches: Iterable[Batch], device: torch.device) -> None:
        super().__init__(tables, batches)
        self._module, self._side = tables.module, Side(device)
        self._coming: Batch | None = None
        self.after_forward()

    def take(self) -> Batch:
        self._side.join()
        if self._coming is None:
            raise StopIteration
        return self._coming

    def after_forward(self) -> None:
        self._coming = next(self._batches, None)
        if self._coming is not None:
            values, offsets = self._coming.values, self._coming.offsets
            forward_stream = torch.cuda.current_stream(values.device) if values.is_cuda else None
            with self._side.on():
                self._module.prefetch(values, offsets, forward_stream)

    def settle(self) -> None:
        self._side.join()


class Side:
    """A CUDA stream of its own, behind what has been asked of the current one by now; on the CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def on(self) -> AbstractContextManager[object]:
        """What this thread asks for in this context goes to the stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """The current stream waits for this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
