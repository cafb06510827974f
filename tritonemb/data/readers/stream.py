"""A stream whose batches come from a reader process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from tritonemb.data.batch import Batch, Layout
from tritonemb.data.readers.address import Address
from tritonemb.data.readers.wire import (
    BATCH,
    END,
    ERROR,
    OPENED,
    REQUEST,
    ClosedError,
    rebuilt,
    receive,
    receive_into,
    send,
)
from tritonemb.data.source import WHOLE, Position, ReadReport, Share, Split, Step, Stream, check_share

_VALUES = {4: torch.int32, 8: torch.int64}


class RemoteStream(Stream):
    """What `Data.open` gives, opened in one of the host's reader processes: the same batches, positions and errors.

    Share i of any number is read by reader i modulo the number of readers.

    Args:
        address: of `ReaderProcesses` on this host.
        split, batch_size, seed, epoch, shuffle, position, share: see `tritonemb.data.source.Data.open`.
        pin_memory: receive the batches into page-locked memory.

    Raises:
        RuntimeError: the reader has ended, here or out of `next`. Errors of the reader keep their type if it is a
            built-in one; else they come as the nearest built-in type.
    """

    def __init__(
        self,
        address: str,
        split: Split,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = False,
        position: Position | None = None,
        share: Share = WHOLE,
        pin_memory: bool = False,
    ) -> None:
        check_share(share)
        readers = Address.from_text(address)
        number = share[0] % len(readers.places)
        request = {
            "token": readers.token,
            "split": split,
            "batch_size": batch_size,
            "seed": seed,
            "epoch": epoch,
            "shuffle": shuffle,
            "position": position,
            "share": share,
        }
        source = _Receiver(readers, number, pin_memory)
        try:
            values = source.open(request)
        except BaseException:
            source.close()
            raise
        super().__init__(source.steps(), values["position"], _report(values), on_stop=source.interrupt)


class _Receiver:
    """The trainer's end of a connection to a reader."""

    def __init__(self, readers: Address, number: int, pin_memory: bool) -> None:
        self._name, self._pin_memory = readers.name(number), pin_memory
        try:
            self._connection = readers.places[number].connect()
        except OSError as error:
            raise self._ended(error) from error

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            send(self._connection, REQUEST, request)
            kind, values, _ = receive(self._connection)
        except ClosedError as error:
            raise self._ended(error) from error
        if kind == ERROR:
            raise rebuilt(values, self._name)
        assert kind == OPENED
        return values

    def steps(self) -> Iterator[Step | ReadReport]:
        keys: tuple[str, ...] = ()
        with self._connection:
            while True:
                try:
                    kind, values, size = receive(self._connection)
                    if kind == BATCH:
                        keys = tuple(values.get("keys", keys))
                        step = Step(self._batch(keys, values["layout"], size), values["position"], _report(values))
                except ClosedError as error:
                    raise self._ended(error) from error
                if kind == ERROR:
                    raise rebuilt(values, self._name)
                if kind == END:
                    yield _report(values)
                    return
                yield step
                del step  # or it would stay until the next one is there

    def interrupt(self) -> None:
        """Let whoever waits for a message give up."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _batch(self, keys: tuple[str, ...], sizes: list[int], num_bytes: int) -> Batch:
        """Straight into its buffer; offsets do not travel."""
        batch_size, num_dense, num_values, itemsize = sizes
        layout = Layout(keys, batch_size, num_dense, num_values, _VALUES[itemsize])
        assert num_bytes == layout.bytes_before_offsets
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
        receive_into(self._connection, memoryview(buffer.numpy())[:num_bytes])
        lengths, offsets = (view.numpy() for view in layout.views(buffer)[3:])
        offsets[0] = 0
        np.cumsum(lengths, out=offsets[1:])
        return layout.batch(buffer)

    def _ended(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"{self._name} has ended, so there is nobody who reads ({error}); if it was killed for want of memory, use "
            "fewer readers, or smaller chunks and shuffle windows"
        )


def _report(values: dict[str, Any]) -> ReadReport:
    rows, skipped, problems, reasons = values["report"]
    return ReadReport(rows, skipped, tuple(problems), tuple((reason, count) for reason, count in reasons))
