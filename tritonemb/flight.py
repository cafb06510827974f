"""Arrow Flight between machines: JSON messages with bytes beside them, a token for every call, and TLS where asked for.

Nothing that comes through a socket is unpickled. Exceptions of the server are raised again in the client.
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
TOKEN, ROOTS = "TRITONEMB_TOKEN", "TRITONEMB_TLS_ROOTS"  # variables of the environment
TIMEOUT = 5.0  # seconds to connect, for a server to accept a stream, and for the streams of a server to end
Message = tuple[dict[str, Any], Any]
"""JSON-able values, and the bytes that go with them: anything with a buffer; in the client a NumPy array of uint8."""
RequestHandler = Callable[[dict[str, Any]], Iterator[Message]]
"""The messages that answer a request, as the client takes them; closed when it takes no more. May raise anything."""


class MessageStream:
    """One end of a stream of messages in both directions. Any thread may send; one thread receives."""

    def __init__(self, reader: Any, writer: Any, peer: str) -> None:
        self._reader, self._writer, self._peer, self._lock = reader, writer, peer, threading.Lock()

    def send(self, messages: Iterable[Message]) -> None:
        """Send messages one behind the other; wait while the other end does not receive.

        Raises:
            ConnectionError: the stream has ended.
        """
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
        """The messages of the other end, their bytes as Arrow arrays or None; raises as `Client.stream` does."""
        return _read(self._reader, self._peer)

    def fail(self, error: Exception) -> None:
        """Raise `error` at the other end, if that is still there."""
        with suppress(ConnectionError):
            self.send([({"error": encode_error(error)}, b"")])

    def cancel(self) -> None:
        """In a client: let whoever sends or receives fail. What has just been sent may be lost."""
        self._reader.cancel()

    def end(self) -> None:
        """Send no more; nobody may receive any more."""
        with self._lock, suppress(Exception):  # of a stream that broke
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()


def reject_stream(_: Any) -> Any:
    """What a server does where it is asked for nothing."""
    raise ValueError("the server at this address does not do this")


def start_server(
    answer: RequestHandler, address: str, token: str, certificate: str | Path | None = None,
    key: str | Path | None = None, exchange: Callable[[MessageStream], None] = reject_stream,
) -> Any:  # fmt: skip
    """A running `pyarrow.flight.FlightServerBase`, with a method `stop`.

    Args:
        answer: what the server does with a request.
        address: `grpc://HOST:PORT`, or `grpc+tls://HOST:PORT` with a certificate; port 0 takes a free one.
        token: that every call has to have.
        certificate, key: PEM files for TLS.
        exchange: what the server does with a stream in both directions, which ends when it returns or raises.

    Raises:
        ValueError: the address does not fit to the files, or other machines could reach it without TLS.
        OSError: the address is in use, or a file is missing.
    """
    _check_address(address)
    if address.startswith("grpc+tls://") != (certificate is not None and key is not None):
        raise ValueError(f"{address}: TLS needs a grpc+tls:// address, a certificate and its key")
    check_exposure(address)
    pairs = [(Path(certificate).read_bytes(), Path(key).read_bytes())] if certificate and key else None
    expected = f"Bearer {token}".encode()
    streams: set[MessageStream] = set()
    stopping, closed = threading.Event(), ConnectionError("the server has been closed")

    class Authentication(pa_flight.ServerMiddlewareFactory):  # type: ignore[name-defined]
        def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
            given = (headers.get("authorization") or [""])[0]
            if not hmac.compare_digest(given.encode(), expected):
                raise pa_flight.FlightUnauthenticatedError("the token is missing or wrong")

    class Server(pa_flight.FlightServerBase):  # type: ignore[name-defined]
        def do_get(self, context: Any, ticket: Any) -> Any:
            return pa_flight.GeneratorStream(_schema(), _record_batches(answer, ticket.ticket))

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
                    while True:  # a client that sends to a stream that has ended would not read the error
                        reader.read_chunk()
            finally:
                streams.discard(stream)
                stream.end()

        def stop(self) -> None:
            """End the server; streams that are still open fail. Waits up to `TIMEOUT` for clients that do not read."""
            stopping.set()
            for work in (*(partial(stream.fail, closed) for stream in list(streams)), self.shutdown):
                thread = threading.Thread(target=work, name="tritonemb-shutdown", daemon=True)
                thread.start()
            thread.join(TIMEOUT)

    try:
        return Server(address, tls_certificates=pairs, middleware={"authentication": Authentication()})
    except pa.ArrowException as error:
        raise OSError(f"cannot serve at {address}: {error}; is the port in use? 0 takes a free one") from error


@cache
def _schema() -> Any:
    return pa.schema([("bytes", pa.uint8())])


def _record_batch(data: Any) -> Any:
    """The bytes of a message travel as the column of a record batch."""
    buffer = pa.py_buffer(data)
    return pa.record_batch([pa.Array.from_buffers(pa.uint8(), buffer.size, [None, buffer])], schema=_schema())


def _metadata(values: dict[str, Any], data: Any) -> bytes:
    """The values of a message travel as the metadata of its record batch.

    Blanks behind them let many bytes begin at a multiple of 8 in what gRPC receives.
    """
    metadata = json.dumps(values).encode()
    sizes = (size for size in count(len(metadata)) if not (6 + _varint(size) + size + _varint(len(data))) % 8)
    return metadata.ljust(next(sizes))


def _varint(number: int) -> int:
    """Bytes of a number in Protocol Buffers."""
    return (number.bit_length() + 6) // 7


def _record_batches(answer: RequestHandler, ticket: bytes) -> Iterator[tuple[Any, bytes]]:
    try:
        for values, data in answer(json.loads(ticket)):
            yield _record_batch(data), _metadata(values, data)
            del data  # or it would stay until the next one is there
    except Exception as error:
        yield _record_batch(b""), _metadata({"error": encode_error(error)}, b"")


def _read(reader: Any, peer: str) -> Iterator[Message]:
    """The messages of a stream, their bytes as Arrow arrays, or None if it came without a record batch."""
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
        del chunk  # or it would stay until the next one is there


class Client:
    """The calls to one server.

    Args:
        address: of the server.
        token: that the server expects.
        roots: a PEM file with the certificates to trust with TLS; the system's if not given.
    """

    def __init__(self, address: str, token: str, roots: str | Path | None = None) -> None:
        _check_address(address)
        self.address = address
        trusted = Path(roots).read_bytes() if roots and address.startswith("grpc+tls://") else None
        options = [
            ("grpc.min_reconnect_backoff_ms", int(TIMEOUT * 1000)),  # an attempt to connect may take that long
            # Servers allow a ping in 300 seconds. With these, what is not acknowledged for 20 seconds is an error too.
            ("grpc.keepalive_time_ms", 310_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.max_frame_size", 1 << 20),
        ]
        with _readable_errors(address):
            self._client = pa_flight.FlightClient(address, tls_root_certs=trusted, generic_options=options)
        self._options = pa_flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])

    def call(self, name: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """The values of the only message that answers a request; raises as `stream` does."""
        messages, _ = self.stream({"action": name} | (request or {}))
        with closing(messages):
            return next(messages)[0]

    def stream(self, request: dict[str, Any]) -> tuple[Generator[Message, None, None], Callable[[], None]]:
        """The messages that answer a request, and what lets whoever waits for one fail; the server then closes its
        stream. `next` raises the server's exceptions.

        Raises:
            PermissionError: the server expects another token: here or out of `next`.
            ConnectionError: it does not answer.
        """
        with _readable_errors(self.address):
            reader = self._client.do_get(pa_flight.Ticket(json.dumps(request).encode()), self._options)
        return self._messages(reader), reader.cancel

    def _messages(self, reader: Any) -> Generator[Message, None, None]:
        try:
            for values, array in _read(reader, self.address):
                yield values, array.to_numpy()
                del array  # or it would stay until the next one is there
        finally:
            reader.cancel()

    def exchange(self) -> MessageStream:
        """A stream of messages in both directions, once the server has accepted it; raises as `stream` does."""
        with _readable_errors(self.address):
            descriptor = pa_flight.FlightDescriptor.for_command(b"")
            writer, reader = self._client.do_exchange(descriptor, self._options)
            stream = MessageStream(reader, writer, self.address)
            patience = threading.Timer(TIMEOUT, stream.cancel)
            patience.start()
            try:
                with on_error(stream.end):
                    with suppress(OSError):  # the reader knows why
                        writer.begin(_schema())
                    _ = reader.schema  # a server sends it first
            finally:
                patience.cancel()
        return stream


@contextmanager
def _readable_errors(peer: str) -> Iterator[None]:
    """Raises built-in exceptions for those of Arrow."""
    try:
        yield
    except pa_flight.FlightUnauthenticatedError as error:
        raise PermissionError(f"{peer}: the token is missing or wrong") from error
    except (pa_flight.FlightError, pa.ArrowException, OSError) as error:
        reason = str(error).partition(". gRPC client debug context")[0]
        raise ConnectionError(f"{peer} does not answer: {reason}") from error


def encode_error(error: Exception) -> dict[str, Any]:
    """An error as JSON: its nearest built-in type, its arguments, its message and its traceback."""
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
    """The error again, with the same message, and a note of where it was raised."""
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
    """ValueError if other machines can reach a server at this address without TLS, or a token that was chosen."""
    if address.startswith("grpc://" if has_token else SCHEMES) and not _is_loopback(address):
        raise ValueError(
            f"other machines can reach {address}: set {TOKEN}, and serve at grpc+tls://HOST:PORT with a certificate "
            "and its key; or serve at grpc://127.0.0.1:PORT"
        )


def complete_address(address: str) -> str:
    """An address of which HOST:PORT may be all that is given: of this machine, or else with TLS."""
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
        raise ValueError(f"{address!r} is not an address: expected grpc://HOST:PORT or grpc+tls://HOST:PORT")
