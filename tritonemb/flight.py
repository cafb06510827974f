"""Arrow Flight between machines: messages of JSON values and bytes, authenticated by a token, optionally over TLS.

Received data is never unpickled. Exceptions of the server are raised again in the client.
"""

import builtins
import hmac
import json
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tritonemb.utils import LazyModule, on_error

pa, pa_flight = LazyModule("pyarrow"), LazyModule("pyarrow.flight")

SCHEMES = ("grpc://", "grpc+tls://")
TOKEN, ROOTS = "TRITONEMB_TOKEN", "TRITONEMB_TLS_ROOTS"  # environment variables
TIMEOUT = 5.0  # seconds to connect, to open a stream, and for a server to end its streams
# JSON values and a payload of bytes: any object with a buffer; in the client a NumPy array of uint8.
Message = tuple[dict[str, Any], Any]
# Handler of a request: yields response messages; closed when the client stops reading. May raise any exception.
RequestHandler = Callable[[dict[str, Any]], Iterator[Message]]


class MessageStream:
    """Endpoint of a bidirectional stream of messages. Any thread may send; one thread receives."""

    def __init__(self, reader: Any, writer: Any, peer: str) -> None:
        self._reader, self._writer, self._peer, self._lock = reader, writer, peer, threading.Lock()

    def send(self, messages: Iterable[Message]) -> None:
        """Send messages in sequence; block while the peer does not read. ConnectionError if the stream has ended."""
        encoded = [(_record_batch(data) if len(data) else None, _metadata(values, data)) for values, data in messages]
        with self._lock, _readable_errors(self._peer):
            if self._writer is None:
                raise OSError("the stream has ended")
            for batch, metadata in encoded:
                if batch is None:
                    self._writer.write_metadata(metadata)
                else:
                    self._writer.write_with_metadata(batch, metadata)

    def receive(self) -> Iterator[Message]:
        """Messages of the peer, with payloads as Arrow arrays or None; raises as `Client.stream` does."""
        return _read(self._reader, self._peer)

    def fail(self, error: Exception) -> None:
        """Raise `error` at the peer, if it is still connected."""
        with suppress(ConnectionError):
            self.send([({"error": encode_error(error)}, b"")])

    def cancel(self) -> None:
        """Cancel a client's stream: blocked and later sends and receives fail, and recent messages may be lost."""
        self._reader.cancel()

    def end(self) -> None:
        """End the stream; no thread may be receiving."""
        with self._lock, suppress(Exception):  # the stream may be broken
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()


def reject_request(_: Any) -> Any:
    """Reject a request of a kind that the server does not serve: calls, or an exchange of messages."""
    raise ValueError("the server at this address does not support this kind of request; check the address")


def start_server(
    handler: RequestHandler, address: str, token: str, certificate: str | Path | None = None,
    key: str | Path | None = None, exchange: Callable[[MessageStream], None] = reject_request,
) -> Any:  # fmt: skip
    """Start a server of messages with a method `stop`; return it. For arguments and errors see `listen`.

    A bidirectional stream ends when `exchange` returns or raises.
    """
    streams: set[MessageStream] = set()
    stopping, closed = threading.Event(), ConnectionError("the server has been closed")

    class Server(pa_flight.FlightServerBase):  # type: ignore[name-defined]
        def do_get(self, context: Any, ticket: Any) -> Any:
            return pa_flight.GeneratorStream(_schema(), _record_batches(handler, ticket.ticket))

        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            writer.begin(_schema())
            stream = MessageStream(reader, writer, context.peer())
            streams.add(stream)
            try:
                if stopping.is_set():
                    raise closed
                exchange(stream)
            except Exception as error:
                stream.fail(error)
                with suppress(Exception):
                    while True:  # drain: a client that sends to an ended stream would not read the error
                        reader.read_chunk()
            finally:
                streams.discard(stream)
                stream.end()

        def stop(self) -> None:
            """Stop the server; open streams fail. Waits up to `TIMEOUT` for clients that do not read."""
            stopping.set()
            for work in (*(partial(stream.fail, closed) for stream in list(streams)), self.shutdown):
                thread = threading.Thread(target=work, name="tritonemb-shutdown", daemon=True)
                thread.start()
            thread.join(TIMEOUT)

    return listen(Server, address, token, certificate, key)


def listen(
    kind: Callable[..., Any], address: str, token: str, certificate: str | Path | None, key: str | Path | None
) -> Any:
    """Start a `pyarrow.flight.FlightServerBase` of this kind; return it. Every call must present the token, if any.

    The address is `grpc://HOST:PORT`, or `grpc+tls://HOST:PORT` with a certificate and its key, PEM files; port 0
    selects a free one. ValueError if there is no port, if the scheme contradicts the files, or if other machines could
    connect without TLS; OSError if the address is in use, or a file is missing.
    """
    pairs = read_certificates(address, certificate, key)
    check_exposure(address)
    expected = f"Bearer {token}".encode()

    class Authentication(pa_flight.ServerMiddlewareFactory):  # type: ignore[name-defined]
        def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
            authorization = (headers.get("authorization") or [""])[0]
            if token and not hmac.compare_digest(authorization.encode(), expected):
                raise pa_flight.FlightUnauthenticatedError("the token is missing or wrong")

    try:
        return kind(address, tls_certificates=pairs, middleware={"authentication": Authentication()})
    except pa.ArrowException as error:
        raise OSError(f"cannot serve at {address}: {error}; is the port in use? Port 0 selects a free one") from error


def read_certificates(
    address: str, certificate: str | Path | None, key: str | Path | None
) -> list[tuple[bytes, bytes]] | None:
    """Read the certificate and key of a server, None without TLS; for errors of its address and files see `listen`."""
    _check_address(address)
    if urlsplit(address).port is None:
        raise ValueError(f"invalid address {address!r}: a server needs a port, 0 for a free one")
    if address.startswith("grpc+tls://") != (certificate is not None and key is not None):
        raise ValueError(f"{address}: TLS needs a grpc+tls:// address, a certificate and its key")
    return [(Path(certificate).read_bytes(), Path(key).read_bytes())] if certificate and key else None


@cache
def _schema() -> Any:
    return pa.schema([("bytes", pa.uint8())])


def _record_batch(data: Any) -> Any:
    """Encode the payload of a message as the column of a record batch."""
    buffer = pa.py_buffer(data)
    return pa.record_batch([pa.Array.from_buffers(pa.uint8(), buffer.size, [None, buffer])], schema=_schema())


def _metadata(values: dict[str, Any], data: Any) -> bytes:
    """Encode the values of a message as the metadata of its record batch.

    Padding with blanks aligns the payload to 8 bytes in the gRPC message.
    """
    metadata = json.dumps(values).encode()
    sizes = (size for size in count(len(metadata)) if not (6 + _varint(size) + size + _varint(len(data))) % 8)
    return metadata.ljust(next(sizes))


def _varint(number: int) -> int:
    """Encoded size of a Protocol Buffers varint, in bytes."""
    return (number.bit_length() + 6) // 7


def _record_batches(handler: RequestHandler, ticket: bytes) -> Iterator[tuple[Any, bytes]]:
    try:
        for values, data in handler(json.loads(ticket)):
            yield _record_batch(data), _metadata(values, data)
            del data  # release it before waiting for the next one
    except Exception as error:
        yield _record_batch(b""), _metadata({"error": encode_error(error)}, b"")


def _read(reader: Any, peer: str) -> Iterator[Message]:
    """Messages of a stream, with payloads as Arrow arrays, or None for a message without a record batch."""
    while True:
        with _readable_errors(peer):
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
        values = json.loads(chunk.app_metadata.to_pybytes())
        if "error" in values:
            raise decode_error(values["error"], peer)
        yield values, None if chunk.data is None else chunk.data.column(0)
        del chunk  # release it before waiting for the next one


class Client:
    """Client of a server; `roots` is a PEM file with root certificates to trust, the system's by default."""

    def __init__(self, address: str, token: str, roots: str | Path | None = None) -> None:
        _check_address(address)
        self.address = address
        root_certificates = Path(roots).read_bytes() if roots and address.startswith("grpc+tls://") else None
        options = [
            ("grpc.min_reconnect_backoff_ms", int(TIMEOUT * 1000)),  # timeout of a connection attempt
            # Servers allow a ping per 300 seconds. A ping without an acknowledgement in 20 seconds fails.
            ("grpc.keepalive_time_ms", 310_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.max_frame_size", 1 << 20),
        ]
        with _readable_errors(address):
            self._client = pa_flight.FlightClient(address, tls_root_certs=root_certificates, generic_options=options)
        self._options = pa_flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])

    def call(self, name: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, and return the values of its only response message; raises as `stream` does."""
        messages, _ = self.stream({"action": name} | (request or {}))
        with closing(messages):
            return next(messages)[0]

    def stream(self, request: dict[str, Any]) -> tuple[Generator[Message, None, None], Callable[[], None]]:
        """Send a request; return an iterator of its response messages, and a function that cancels it.

        After a cancellation, a blocked `next` fails and the server closes its stream. `next` raises the server's
        exceptions, and PermissionError if the token is wrong; ConnectionError if the server does not answer.
        """
        with _readable_errors(self.address):
            reader = self._client.do_get(pa_flight.Ticket(json.dumps(request).encode()), self._options)
        return self._messages(reader), reader.cancel

    def _messages(self, reader: Any) -> Generator[Message, None, None]:
        try:
            for values, array in _read(reader, self.address):
                yield values, array.to_numpy()
                del array  # release it before waiting for the next one
        finally:
            reader.cancel()

    def exchange(self) -> MessageStream:
        """Open a bidirectional stream; return it once the server has accepted it. Raise the errors of `stream`."""
        with _readable_errors(self.address):
            descriptor = pa_flight.FlightDescriptor.for_command(b"")
            writer, reader = self._client.do_exchange(descriptor, self._options)
            stream = MessageStream(reader, writer, self.address)
            timer = threading.Timer(TIMEOUT, stream.cancel)
            timer.start()
            try:
                with on_error(stream.end):
                    with suppress(OSError):  # the reader raises the reason
                        writer.begin(_schema())
                    _ = reader.schema  # sent when the server accepts the stream
            finally:
                timer.cancel()
        return stream


@contextmanager
def _readable_errors(peer: str) -> Iterator[None]:
    """Convert exceptions of Arrow to built-in ones."""
    try:
        yield
    except pa_flight.FlightUnauthenticatedError as error:
        raise PermissionError(f"{peer}: the token is missing or wrong") from error
    except (pa_flight.FlightError, pa.ArrowException, OSError) as error:
        reason = str(error).partition(". gRPC client debug context")[0]
        raise ConnectionError(f"{peer} does not answer: {reason}") from error


def encode_error(error: Exception) -> dict[str, Any]:
    """Encode an error as JSON values: its nearest built-in type, arguments, message and traceback."""
    builtin = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    message = str(error)
    if builtin is Exception:
        builtin, message = RuntimeError, f"{type(error).__name__}: {message}"
    return {
        "type": builtin.__name__,
        "args": [arg for arg in error.args if isinstance(arg, str | int | float | None)],
        "message": message,
        "trace": "".join(traceback.format_exception(error)),
    }


def decode_error(values: dict[str, Any], origin: str) -> Exception:
    """Rebuild an error with the same message, and a note with its origin and traceback."""
    kind = getattr(builtins, values["type"], None)
    error: Exception = RuntimeError(f"{values['type']}: {values['message']}")
    if isinstance(kind, type) and issubclass(kind, Exception):
        for args in (values["args"], [values["message"]]):
            with suppress(TypeError):
                if str(candidate := kind(*args)) == values["message"]:
                    error = candidate
                    break
    error.add_note(f"In {origin}:\n{values['trace']}")
    return error


def check_exposure(address: str, has_token: bool = True) -> None:
    """Raise ValueError if other machines could reach a server without TLS, or without a token set by the user."""
    plain, secure = ("http://", "https://") if address.startswith("http") else SCHEMES
    refused = plain if has_token else (plain, secure)
    if address.startswith(refused) and not _is_loopback(address):
        raise ValueError(
            f"other machines can reach {address}: set {TOKEN}, and serve at {secure}HOST:PORT with a certificate "
            f"and its key; or serve at {plain}127.0.0.1:PORT"
        )


def complete_address(address: str) -> str:
    """Add a scheme to a HOST:PORT address: grpc for this machine, else grpc+tls."""
    host, _, port = address.rpartition(":")
    if "//" in host or not (host and port.isdecimal()):
        return address
    return f"{'grpc' if _is_loopback('//' + address) else 'grpc+tls'}://{address}"


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_address(address: str) -> None:
    if not address.startswith(SCHEMES):
        raise ValueError(f"invalid address {address!r}: expected grpc://HOST:PORT or grpc+tls://HOST:PORT")
