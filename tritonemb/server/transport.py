"""How trainers and embedding servers reach one another: channels for messages, in one process or over Arrow Flight.

A channel may lose messages and repeat them, and bring them in another order: `client.py` and `node.py` see to it that
each one counts once, in the order in which it was sent.
"""

import math
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tritonemb import flight
from tritonemb.utils import Closeable

Values = dict[str, Any]
Message = tuple[Values, list[Tensor]]
"""Values for JSON, and contiguous tensors on the CPU. Whoever has sent or received a message changes it no more."""
Reply = Callable[[Message], None]

ALIGNMENT = 64  # bytes
PIECE = 16 << 20  # bytes of a record batch; gRPC receives a few of these several times faster than a large one
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
        torch.bool,
    )
}  # fmt: skip


class Service(Protocol):
    """What answers messages."""

    def receive(self, message: Message, reply: Reply) -> None:
        """Take a message, and return at once. `reply` may be called by any thread, later, or never."""


class Channel(Protocol):
    """A connection of one client to one server."""

    def send(self, message: Message) -> None:
        """Send a message; ConnectionError if the channel is lost or closed. Any thread may call this.

        It waits while the server takes no messages, which may be until the client has taken replies: hold no lock that
        `receive` needs.
        """

    def close(self) -> None:
        """Send nothing more, and receive nothing. What has just been sent may be lost."""


class Transport(Protocol):
    """Opens channels to one server."""

    address: str

    def open(self, receive: Reply, lost: Callable[[Exception], None]) -> Channel:
        """A new channel; ConnectionError if the server does not answer, PermissionError if it expects another token.

        Args:
            receive: is called with each answer, by a thread of the channel.
            lost: is called once if the channel is lost, with a ConnectionError; not after `close`.
        """


class LocalTransport:
    """A server in this process; messages are passed by reference."""

    def __init__(self, service: Service, address: str = "local") -> None:
        self.address, self._service = address, service

    def open(self, receive: Reply, lost: Callable[[Exception], None]) -> Channel:
        """A channel, which is never lost; `receive` is called by the threads of the service."""
        return _LocalChannel(self._service, receive)


class _LocalChannel:
    def __init__(self, service: Service, receive: Reply) -> None:
        self._service, self._receive, self._closed = service, receive, False

    def send(self, message: Message) -> None:
        if self._closed:
            raise ConnectionError("the channel has been closed")
        self._service.receive(message, self._reply)

    def _reply(self, message: Message) -> None:
        if not self._closed:
            self._receive(message)

    def close(self) -> None:
        self._closed = True


class FlightTransport:
    """A `FlightServer` at `address`: `grpc://HOST:PORT`, or `grpc+tls://HOST:PORT`. Each channel has a connection.

    Args:
        token: that the server expects.
        roots: a PEM file with the certificates to trust with TLS; the system's if not given.
        moved: a file that has the server's address, which is tried next where it does not answer.
    """

    def __init__(self, address: str, token: str, roots: str | Path | None = None, moved: Path | None = None) -> None:
        self.address, self._token, self._roots, self._moved = address, token, roots, moved

    def open(self, receive: Reply, lost: Callable[[Exception], None]) -> Channel:
        """See `Transport.open`. A server that is gone is noticed at once, one whose machine or network is gone when
        nothing that was sent has been acknowledged for 20 seconds, or after minutes if nothing was sent."""
        try:
            stream = flight.Client(self.address, self._token, self._roots).exchange()
        except ConnectionError:
            if self._moved is not None:
                with suppress(OSError):
                    self.address = self._moved.read_text()
            raise
        return _FlightChannel(stream, receive, lost)


class _FlightChannel:
    def __init__(self, stream: flight.MessageStream, receive: Reply, lost: Callable[[Exception], None]) -> None:
        self._stream, self._closed = stream, False
        threading.Thread(target=self._read, args=(receive, lost), name="tritonemb-channel", daemon=True).start()

    def send(self, message: Message) -> None:
        self._stream.send(_encode(message))

    def close(self) -> None:
        self._closed = True
        self._stream.cancel()

    def _read(self, receive: Reply, lost: Callable[[Exception], None]) -> None:
        error = ConnectionError("the server has ended the stream")
        try:
            for message in _decode(self._stream.receive()):
                if self._closed:
                    break
                receive(message)
                del message  # or it would stay until the next one is there
        except ConnectionError as caught:
            error = caught
        except Exception as caught:
            error = ConnectionError(f"{type(caught).__name__}: {caught}")
            error.__cause__ = caught
        self._stream.cancel()
        self._stream.end()
        if not self._closed:
            lost(error)


class FlightServer(Closeable):
    """Brings messages to `service`, and its replies to the clients, of which each must have the token.

    Args:
        service: is called by one thread for each channel.
        address: `grpc://HOST:PORT`, or `grpc+tls://HOST:PORT`; port 0 takes a free one.
        token: that clients must have; that of the environment (TRITONEMB_TOKEN) or a random one if not given.
        certificate, key: PEM files for TLS.
        answer: of calls by `tritonemb.flight.Client.call`.

    Attributes `address` (with the port) and `token` are what clients need.

    Raises:
        ValueError, OSError: it cannot serve at this address, or other machines could reach it without TLS and a token.
    """

    def __init__(
        self, service: Service, address: str = "grpc://127.0.0.1:0", token: str | None = None,
        certificate: str | Path | None = None, key: str | Path | None = None,
        answer: flight.RequestHandler = flight.reject_stream,
    ) -> None:  # fmt: skip
        token = token or os.environ.get(flight.TOKEN)
        flight.check_exposure(address, bool(token))
        self.token = token or secrets.token_hex(32)
        exchange = partial(_serve, service)
        server = flight.start_server(answer, address, self.token, certificate, key, exchange)
        self.address = f"{address.rpartition(':')[0]}:{server.port}"
        self._stop = weakref.finalize(self, server.stop)  # at exit too: Arrow would wait for the clients

    def close(self) -> None:
        """End the server; channels that are open are lost."""
        self._stop()


def _serve(service: Service, stream: flight.MessageStream) -> None:
    def reply(message: Message) -> None:
        with suppress(ConnectionError):  # nobody waits for it
            stream.send(_encode(message))

    for message in _decode(stream.receive()):
        service.receive(message, reply)
        del message  # or it would stay until the next one is there


def _encode(message: Message) -> list[flight.Message]:
    """A message's header, and the bytes of its tensors, each aligned, in pieces. One tensor alone is not copied."""
    values, tensors = message
    header = {"values": values, "tensors": [[str(each.dtype)[len("torch.") :], list(each.shape)] for each in tensors]}
    parts = [each.detach().reshape(-1).view(torch.uint8).numpy() for each in tensors]
    if len(parts) == 1:
        data = parts[0]
    else:
        gap, size, spaced = np.zeros(ALIGNMENT, np.uint8), 0, []
        for part in parts:
            spaced += [gap[: -size % ALIGNMENT], part]
            size += -size % ALIGNMENT + part.size
        data = np.concatenate(spaced) if spaced else gap[:0]
    return [({} if start else header, data[start : start + PIECE]) for start in range(0, data.size or 1, PIECE)]


def _decode(pieces: Iterator[flight.Message]) -> Iterator[Message]:
    """The messages of `_encode`. Tensors are views of what was received if that came in one piece: read them only."""
    for header, array in pieces:
        layout, total = [], 0
        for name, shape in header["tensors"]:
            start = total + -total % ALIGNMENT
            total = start + math.prod(shape) * _DTYPES[name].itemsize
            layout.append((slice(start, total), _DTYPES[name], shape))
        data = torch.empty(0, dtype=torch.uint8) if array is None else from_dlpack(array)
        if data.numel() != total or data.data_ptr() % 8:
            data, filled = torch.empty(total, dtype=torch.uint8), 0
            for _, piece in chain([({}, array)], pieces):
                data[filled : filled + len(piece)] = from_dlpack(piece)
                filled += len(piece)
                if filled >= total:
                    break
            else:
                return  # the stream has ended
            del piece
        yield header["values"], [data[part].view(dtype).reshape(shape) for part, dtype, shape in layout]
        del array, data  # or they would stay until the next ones are there
