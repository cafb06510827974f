"""Message channels between trainers and embedding servers, in one process or over Arrow Flight.

A channel may lose, duplicate and reorder messages: `client.py` and `node.py` execute each request exactly once, in the
order in which it was sent.
"""

import os
import queue
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tritonemb import flight
from tritonemb.memory import describe_tensors, tensor_spans, view_tensors
from tritonemb.utils import Closeable

Values = dict[str, Any]
Message = tuple[Values, list[Tensor]]
"""JSON-serializable values, and contiguous tensors on the CPU. Senders and receivers must not modify a message."""
Reply = Callable[[Message], None]

ALIGNMENT = 64  # bytes
# Replies of a channel that may wait; more replies to queries are dropped, as a client sends a query again each second.
MAX_QUEUED_REPLIES = 64
RECORD_BATCH_BYTES = 16 << 20  # gRPC receives a few batches of this size several times faster than a large one


class Service(Protocol):
    """Receiver of messages, which it answers."""

    def receive(self, message: Message, reply: Reply) -> None:
        """Accept a message without blocking. `reply` may be called by any thread, later, or never."""


def answer(message: Message, reply: Reply, handle: Callable[[Values, list[Tensor]], Message]) -> None:
    """Reply to a message with the result of a handler, or with its error."""
    values = message[0]
    try:
        result, tensors = handle(*message)
    except Exception as error:
        result, tensors = {"error": flight.encode_error(error)}, []
    reply(({**result, **{name: values[name] for name in ("query", "number") if name in values}}, tensors))


class Channel(NamedTuple):
    """Connection of one client to one server."""

    # Send a message; ConnectionError if the channel is lost or closed. Thread-safe. Blocks while the server accepts no
    # messages, possibly until the client has received replies: hold no lock that `receive` needs.
    send: Callable[[Message], None]
    close: Callable[[], None]  # stop sending and receiving; messages in flight may be lost


class Transport(Protocol):
    """Factory of channels to one server."""

    address: str

    def open(self, receive: Reply, lost: Callable[[Exception], None]) -> Channel:
        """Open a channel; ConnectionError if the server does not answer, PermissionError if it rejects the token.

        A thread of the channel calls `receive` with each reply, and `lost` once if the channel is lost, with a
        ConnectionError; not after `close`.
        """


@dataclass
class LocalTransport:
    """Transport to a server in this process; messages are passed by reference, and no channel is lost."""

    service: Service
    address: str = "local"

    def open(self, receive: Reply, lost: Callable[[Exception], None]) -> Channel:
        closed = threading.Event()

        def send(message: Message) -> None:
            if closed.is_set():
                raise ConnectionError("the channel has been closed")
            self.service.receive(message, lambda reply: None if closed.is_set() else receive(reply))

        return Channel(send, closed.set)


@dataclass
class FlightTransport:
    """Transport to a `FlightServer` at `address`, `grpc://HOST:PORT` or `grpc+tls://HOST:PORT`.

    Args:
        token: authentication token of the server.
        roots: PEM file of trusted root certificates for TLS; default: those of the system.
        address_path: file with the server's current address, which is read when the server does not answer.
    """

    address: str
    token: str
    roots: str | Path | None = None
    address_path: Path | None = None

    def open(self, receive: Reply, lost: Callable[[Exception], None]) -> Channel:
        """Open a channel with a connection of its own.

        The end of a server's process is detected at once, the loss of its machine or network when sent data has not
        been acknowledged for 20 seconds, or after minutes if no data was sent.
        """
        try:
            stream = flight.Client(self.address, self.token, self.roots).exchange()
        except ConnectionError:
            if self.address_path is not None:
                with suppress(OSError):
                    self.address = self.address_path.read_text()
            raise
        closed = threading.Event()

        def close() -> None:
            closed.set()
            stream.cancel()

        def read() -> None:
            error: Exception = ConnectionError("the server has ended the stream")
            try:
                for message in _decode(stream.receive()):
                    if closed.is_set():
                        break
                    receive(message)
                    del message  # free it before waiting for the next one
            except Exception as cause:
                error = cause
                if not isinstance(cause, ConnectionError):
                    error = ConnectionError(f"{type(cause).__name__}: {cause}")
                    error.__cause__ = cause
            stream.cancel()
            stream.end()
            if not closed.is_set():
                lost(error)

        threading.Thread(target=read, name="tritonemb-channel", daemon=True).start()
        return Channel(lambda message: stream.send(_encode(message)), close)


class FlightServer(Closeable):
    """Server that passes messages to `service`, and its replies to authenticated clients.

    Args:
        service: receiver of messages; called by one thread per channel.
        address: `grpc://HOST:PORT`, or `grpc+tls://HOST:PORT`; port 0 selects a free port, which the attribute has.
        token: token that clients must present; default: TRITONEMB_TOKEN of the environment, else a random one.
        certificate, key: PEM files for TLS.

    Raises:
        ValueError, OSError: the address cannot be served, or is reachable from other machines without TLS and a token.
    """

    def __init__(
        self, service: Service, address: str = "grpc://127.0.0.1:0", token: str | None = None,
        certificate: str | Path | None = None, key: str | Path | None = None,
    ) -> None:  # fmt: skip
        token = token or os.environ.get(flight.TOKEN)
        flight.check_exposure(address, bool(token))
        self.token = token or secrets.token_hex(32)
        exchange = partial(_serve, service)
        server = flight.start_server(flight.reject_request, address, self.token, certificate, key, exchange)
        self.address = f"{address.rpartition(':')[0]}:{server.port}"
        self._stop = weakref.finalize(self, server.stop)  # also at exit, where Arrow would wait for the clients

    def close(self) -> None:
        """Stop the server; open channels are lost."""
        self._stop()


def _serve(service: Service, stream: flight.MessageStream) -> None:
    replies: queue.SimpleQueue[list[flight.Message] | None] = queue.SimpleQueue()

    def send() -> None:
        try:
            with suppress(ConnectionError):  # the client is gone
                while (batches := replies.get()) is not None:
                    stream.send(batches)
                    batches = None  # free them before waiting for the next ones
        except Exception as error:
            stream.fail(error)  # the client opens another channel
            raise

    def reply(message: Message) -> None:
        if "query" not in message[0] or replies.qsize() < MAX_QUEUED_REPLIES:
            replies.put(_encode(message))

    # A client that does not read its replies blocks this thread, and not that of the service.
    thread = threading.Thread(target=send, name="tritonemb-replies", daemon=True)
    thread.start()
    try:
        for message in _decode(stream.receive()):
            service.receive(message, reply)
            del message  # free it before waiting for the next one
    finally:
        replies.put(None)
        thread.join()


def empty_tensors(dtypes_and_shapes: Sequence[tuple[str, Sequence[int]]]) -> list[Tensor]:
    """Allocate described tensors as those of a message lie in memory: they are sent without a copy."""
    spans = tensor_spans(dtypes_and_shapes, ALIGNMENT)
    data = torch.empty(spans[-1][0].stop if spans else 0, dtype=torch.uint8)
    for (span, *_), (next_span, *_) in pairwise(spans):
        if span.stop < next_span.start:
            data[span.stop : next_span.start] = 0
    return view_tensors(data, spans)


def gather(columns: Sequence[Tensor], positions: Sequence[Tensor]) -> list[Tensor]:
    """Copy rows of columns, at positions int64 `[n]` each, into `empty_tensors`."""
    shapes = describe_tensors(columns)
    for (_, shape), at in zip(shapes, positions, strict=True):
        shape[0] = len(at)
    shards = empty_tensors(shapes)
    for shard, column, at in zip(shards, columns, positions, strict=True):
        torch.index_select(column, 0, at, out=shard)
    return shards


def _encode(message: Message) -> list[flight.Message]:
    """Encode a message as record batches: a header, and the aligned bytes of tensors, copied unless they lie so."""
    values, tensors = message
    descriptions, tensors = describe_tensors(tensors), [tensor.detach() for tensor in tensors]
    header, spans = {"values": values, "tensors": descriptions}, tensor_spans(descriptions, ALIGNMENT)
    begins = [tensor.storage_offset() * tensor.itemsize for tensor in tensors]
    in_place = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    for tensor, begin, (span, *_) in zip(tensors, begins, spans, strict=True):
        in_place &= begin - begins[0] == span.start and tensor.is_contiguous()
    if not in_place:
        copies = empty_tensors(descriptions)
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        tensors, begins = copies, [0]
    data = np.empty(0, np.uint8)
    if tensors:
        size = (spans[-1][0].stop,)
        data = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage(), begins[0], size, (1,)).numpy()
    starts = range(0, data.size or 1, RECORD_BATCH_BYTES)
    return [({} if start else header, data[start : start + RECORD_BATCH_BYTES]) for start in starts]


def _decode(record_batches: Iterator[flight.Message]) -> Iterator[Message]:
    """Decode messages of `_encode`. Tensors may be views of a received record batch: treat them as read-only."""
    for header, array in record_batches:
        spans = tensor_spans(header["tensors"], ALIGNMENT)
        total = spans[-1][0].stop if spans else 0
        data = torch.empty(0, dtype=torch.uint8) if array is None else from_dlpack(array)
        if data.numel() != total or data.data_ptr() % 8:
            # Several record batches, or an unaligned one: copy them into one buffer.
            data, num_filled = torch.empty(total, dtype=torch.uint8), 0
            for _, chunk in chain([({}, array)], record_batches):
                data[num_filled : num_filled + len(chunk)] = from_dlpack(chunk)
                num_filled += len(chunk)
                if num_filled >= total:
                    break
            else:
                return  # the stream has ended
            del chunk
        yield header["values"], view_tensors(data, spans)
        del array, data  # free them before waiting for the next ones
