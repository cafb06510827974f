"""Arrow Flight between machines: JSON messages with bytes beside them, a token for every call, and TLS where asked for.

Nothing that comes through a socket is unpickled. Exceptions of the server are raised again in the client.
"""

import builtins
import hmac
import json
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from tritonemb.utils import require

SCHEMES = ("grpc://", "grpc+tls://")
Message = tuple[dict[str, Any], Any]
"""JSON-able values, and the bytes that go with them: anything with a buffer; in the client a NumPy array of uint8."""
Answer = Callable[[dict[str, Any]], Iterator[Message]]
"""The messages that answer a request, as the client takes them; closed when it takes no more. May raise anything."""


def start_server(
    answer: Answer, address: str, token: str, certificate: str | Path | None = None, key: str | Path | None = None
) -> Any:
    """A running `pyarrow.flight.FlightServerBase`.

    Args:
        answer: what the server does.
        address: `grpc://HOST:PORT`, or `grpc+tls://HOST:PORT` with a certificate; port 0 takes a free one.
        token: that every call has to have.
        certificate, key: PEM files for TLS.

    Raises:
        ValueError: the address does not fit to the files.
        OSError: the address is in use, or a file is missing.
    """
    flight, pa = require("pyarrow.flight"), require("pyarrow")
    _check_address(address)
    if address.startswith("grpc+tls://") != (certificate is not None and key is not None):
        raise ValueError(f"{address}: TLS needs a grpc+tls:// address, a certificate and its key")
    pairs = [(Path(certificate).read_bytes(), Path(key).read_bytes())] if certificate and key else None
    schema = pa.schema([("bytes", pa.uint8())])
    expected = f"Bearer {token}".encode()

    class Authentication(flight.ServerMiddlewareFactory):  # type: ignore[name-defined]
        def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
            given = (headers.get("authorization") or [""])[0]
            if not hmac.compare_digest(given.encode(), expected):
                raise flight.FlightUnauthenticatedError("the token is missing or wrong")

    class Server(flight.FlightServerBase):  # type: ignore[name-defined]
        def do_get(self, context: Any, ticket: Any) -> Any:
            return flight.GeneratorStream(schema, _record_batches(answer, ticket.ticket, schema))

    try:
        return Server(address, tls_certificates=pairs, middleware={"authentication": Authentication()})
    except pa.ArrowException as error:
        raise OSError(f"cannot serve at {address}: {error}") from error


def _record_batches(answer: Answer, ticket: bytes, schema: Any) -> Iterator[tuple[Any, bytes]]:
    """A message's values travel as the metadata of a record batch, its bytes as the batch's column."""
    pa = require("pyarrow")

    def record_batch(data: Any) -> Any:
        buffer = pa.py_buffer(data)
        return pa.record_batch([pa.Array.from_buffers(pa.uint8(), buffer.size, [None, buffer])], schema=schema)

    try:
        for values, data in answer(json.loads(ticket)):
            yield record_batch(data), json.dumps(values).encode()
            del data  # or it would stay until the next one is there
    except Exception as error:
        yield record_batch(b""), json.dumps({"error": encode_error(error)}).encode()


class Client:
    """The calls to one server.

    Args:
        address: of the server.
        token: that the server expects.
        roots: a PEM file with the certificates to trust with TLS; the system's if not given.
    """

    def __init__(self, address: str, token: str, roots: str | Path | None = None) -> None:
        self._flight = require("pyarrow.flight")
        _check_address(address)
        self.address = address
        trusted = Path(roots).read_bytes() if roots and address.startswith("grpc+tls://") else None
        with self._readable_errors():
            self._client = self._flight.FlightClient(address, tls_root_certs=trusted)
        self._options = self._flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])

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
        with self._readable_errors():
            reader = self._client.do_get(self._flight.Ticket(json.dumps(request).encode()), self._options)
        return self._messages(reader), reader.cancel

    def _messages(self, reader: Any) -> Generator[Message, None, None]:
        try:
            while True:
                with self._readable_errors():
                    try:
                        chunk = reader.read_chunk()
                    except StopIteration:
                        return
                values = json.loads(chunk.app_metadata.to_pybytes())
                if "error" in values:
                    raise decode_error(values["error"], self.address)
                yield values, chunk.data.column(0).to_numpy()
                del chunk  # or it would stay until the next one is there
        finally:
            reader.cancel()

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except self._flight.FlightUnauthenticatedError as error:
            raise PermissionError(f"{self.address}: the token is missing or wrong") from error
        except self._flight.FlightError as error:
            reason = str(error).partition(". gRPC client debug context")[0]
            raise ConnectionError(f"{self.address} does not answer: {reason}") from error


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


def _check_address(address: str) -> None:
    if not address.startswith(SCHEMES):
        raise ValueError(f"{address!r} is not an address: expected grpc://HOST:PORT or grpc+tls://HOST:PORT")
