"""`tritonemb serve`: the scores of a run over HTTP, for raw rows and for tensors of the Open Inference Protocol; and
over Arrow Flight, for raw rows.

uvicorn serves HTTP in one thread, which parses requests; a framework would cost as much as the score of a row. Flight
has a thread per request. The requests of both are scored by one `Scorer`, in the same batches.
"""

import asyncio
import hmac
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tritonemb import __version__
from tritonemb.data.requests import ARROW_MARK, RawRows, RequestEncoder, read_arrow
from tritonemb.flight import TOKEN, check_exposure, listen, pa, pa_flight, read_certificates
from tritonemb.server.metrics import format_metrics
from tritonemb.serving.follower import ModelFollower
from tritonemb.serving.run import LoadOptions
from tritonemb.serving.scorer import OverloadedError, Scorer, warm_up
from tritonemb.utils import LazyModule, number, require

READ_TIMEOUT = 10.0  # seconds for the head of a request, and for its body
MAX_CALLS = 64  # requests over Flight at once, each in a thread, of which one scores anyway
MAX_STATUS = 500  # bytes of an error over Flight, which has them escaped, and several times, in a head of up to 8 KiB
MAX_HEAD = 1 << 16  # bytes of the head of a request, with its path; a token and a few headers need less than 2 KiB
MAX_BODIES = 8  # bodies of the maximum size that are read or scored at once; parsed, each may need 20 times its bytes
SWITCH_INTERVAL = 5e-4  # seconds until a computing thread yields the GIL; 5 ms, Python's default, would delay replies
METRICS = {  # by key of the scorer's statistics: name, type and help text
    "requests": "requests_total counter Requests that were scored or failed.",
    "scored_rows": "scored_rows_total counter Rows scored.",
    "batches": "batches_total counter Batches computed.",
    "rejected": "rejected_requests_total counter Requests that were not queued.",
    "errors": "errors_total counter Requests that failed.",
    "queued_rows": "queued_rows gauge Rows in the queue.",
    "milliseconds": "request_milliseconds histogram Time from the queue to the score.",
    "step": "model_step gauge Step of the served model.",
    "age": "model_age_seconds gauge Seconds since this step was published.",
    "failing": "model_failing gauge 1 if newer updates cannot be applied.",
}
DATA_TYPES = re.compile("BOOL|BYTES|U?INT(8|16|32|64)|FP(16|32|64)")
logger = logging.getLogger(__name__)
msgspec: Any = LazyModule("msgspec", "serve")


STATUS = {ValueError: 400, RecursionError: 400, OverloadedError: 503, TimeoutError: 504}  # by kind of an error


class RejectedError(Exception):
    """A request that is refused with a status before it is scored; its connection is closed, as its body is unread."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def parse_json(body: bytes) -> Any:
    """Parse JSON; ValueError for duplicate keys, NaN, infinite numbers, deep nesting and invalid Unicode."""
    with suppress(msgspec.MsgspecError, RecursionError):  # json takes three times as long, and says what is wrong
        if _num_keys(values := msgspec.json.decode(body)) == body.count(b":"):  # otherwise a key may be duplicate
            return values
    try:
        values = json.loads(body, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
        if b"\\u" in body:
            json.dumps(values, ensure_ascii=False).encode()
    except (RecursionError, UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(f"the body is not valid JSON in UTF-8, or nested too deep: {error}") from None
    return values


def _num_keys(values: Any) -> int:
    """Number of keys of the objects in the outer two or three levels, the only ones of most requests."""
    rows = [values, *(values.values() if isinstance(values, dict) else ())]
    rows += [row for value in rows if isinstance(value, list) for row in value]
    return sum(len(row) for row in rows if isinstance(row, dict))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(values := dict(pairs)) < len(pairs):
        raise ValueError(f"duplicate key {Counter(name for name, _ in pairs).most_common(1)[0][0]!r}")
    return values


def _finite(text: str) -> float:
    if not abs(value := float(text)) < float("inf"):
        raise ValueError(f"{text[:40]} is not a finite number; pass null for a missing value")
    return value


def parse_body(body: bytes, encoder: RequestEncoder, max_rows: int) -> RawRows:
    """Rows of JSON, or of an Arrow IPC stream whose metadata `user` are JSON of the values that its rows share."""
    if not body.startswith(ARROW_MARK):
        return parse_rows(parse_json(body), encoder)
    names = {*encoder.schema.dense, *(feature.name for feature in encoder.features)}
    columns, num_rows, user = read_arrow(body, names, max_rows)
    if not isinstance(shared := parse_json(user), dict):
        raise ValueError("the metadata 'user' of an Arrow IPC stream must be a JSON object, a value by column")
    return encoder.raw_columns(columns, shared)._replace(num_rows=num_rows)


def parse_rows(body: Any, encoder: RequestEncoder) -> RawRows:
    """Rows in one of the forms of /score; ValueError for another form."""
    shared: dict[str, Any] = {}
    if isinstance(body, dict) and body.keys() == {"user", "candidates"} and isinstance(body["user"], dict):
        shared, body = body["user"], body["candidates"]
        body = {"columns": body} if isinstance(body, dict) else body
    if isinstance(body, dict) and body.keys() == {"columns"} and isinstance(columns := body["columns"], dict):
        if scalars := [name for name, values in columns.items() if not isinstance(values, list)]:
            raise ValueError(f"column {scalars[0]!r} must be a list with a value per row")
        return encoder.raw_columns(columns, shared)
    rows = [body] if isinstance(body, dict) else body
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        forms = '{"column": value, ...}, a list of these, {"columns": {"column": [value, ...], ...}}'
        raise ValueError(f'expected a row {forms}, or {{"user": row, "candidates": list of rows, or columns}}')
    return encoder.raw_rows(rows, shared)


def parse_tensors(body: Any, encoder: RequestEncoder, max_rows: int) -> RawRows:
    """Rows of a request of the Open Inference Protocol: a tensor `[N]` or `[N, 1]` per column, `[N, L]` for lists; one
    of `[1]` beside others of `[N]` is shared by all rows. ValueError for another form, or more than `max_rows`."""
    tensors = body.get("inputs") if isinstance(body, dict) else None
    if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
        raise ValueError('expected {"inputs": [{"name": ..., "shape": ..., "datatype": ..., "data": ...}, ...]}')
    lists, columns = {feature.name for feature in encoder.features if feature.multi_hot}, dict[str, list[Any]]()
    for tensor in tensors:
        name, shape, kind, data = (tensor.get(key) for key in ("name", "shape", "datatype", "data"))
        sizes = shape if isinstance(shape, list) and all(type(size) is int for size in shape) else [-1]
        if not isinstance(name, str) or name in columns or not DATA_TYPES.fullmatch(str(kind)):
            raise ValueError(f"input {name!r}: the name must be new, and datatype {kind!r} one of {DATA_TYPES.pattern}")
        if len(sizes) not in (1, 2) or min(sizes) < 0 or (sizes[1:] not in ([], [1]) and name not in lists):
            raise ValueError(f"input {name!r}: shape must be [N] or [N, 1], or [N, L] for lists, got {shape!r}")
        if not isinstance(data, list):
            raise ValueError(f"input {name!r}: data must be a list; binary data is not supported")
        values = [value for item in data for value in (item if isinstance(item, list) else (item,))]
        if len(values) != prod(sizes):
            raise ValueError(f"input {name!r}: shape {shape} has {prod(sizes)} values, data has {len(values)}")
        if sizes[0] > max_rows:  # [N, 0] needs no data
            raise ValueError(f"input {name!r} has {sizes[0]:,} rows; send up to {max_rows:,} per request")
        width = prod(sizes[1:])
        rows = ([values[i * width : (i + 1) * width] for i in range(sizes[0])]) if name in lists else values
        columns[name] = rows
    num_rows = max(map(len, columns.values()), default=0)
    shared = {name: values[0] for name, values in columns.items() if len(values) == 1 < num_rows}
    return encoder.raw_columns({name: columns[name] for name in columns if name not in shared}, shared)


class App:
    """ASGI app of a scorer. If the token is not empty, all requests but those of /v2/health must present it. When the
    `server` is about to stop, it is not ready."""

    server: Any = None  # the uvicorn.Server

    def __init__(self, scorer: Scorer, token: str, max_body: int, timeout: float, name: str = "model") -> None:
        self._scorer, self._token, self._max_body, self._timeout, self._name = scorer, token, max_body, timeout, name
        self._num_bytes = 0  # of bodies that are read or scored
        self._routes: dict[tuple[str, str], Callable[[bytes], Any]] = {
            ("GET", "/health"): lambda _: self._health(),
            ("GET", "/metrics"): lambda _: format_metrics(METRICS, [(scorer.statistics(), {})]),
            ("GET", "/v2/health/live"): lambda _: self._check({"live": True}, scorer.failure),
            ("GET", "/v2/health/ready"): lambda _: self._check({"ready": True}, self._problem()),
            ("GET", "/v2"): lambda _: {"name": "tritonemb", "version": __version__, "extensions": []},
            ("GET", f"/v2/models/{name}"): lambda _: self._metadata(),
            ("GET", f"/v2/models/{name}/ready"): lambda _: self._check({"ready": True}, self._problem()),
            ("POST", "/score"): self._score,
            ("POST", f"/v2/models/{name}/infer"): self._infer,
        }

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        headers, extra, status = dict(scope["headers"]), [(b"content-type", b"application/json")], 200
        body = bytearray()
        try:
            handler = self._handler(scope["method"], scope["path"], headers)
            if scope["method"] == "POST":
                await self._read(headers, receive, body)
            result = handler(bytes(body))
            content = await result if asyncio.iscoroutine(result) else result
        except Exception as error:
            status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)
            status = error.status if isinstance(error, RejectedError) else status
            content = {"error": str(error)[:1000]}  # it may quote what was sent
            extra += [(b"retry-after", b"1")] * (status == 503) + [(b"www-authenticate", b"Bearer")] * (status == 401)
            extra += [(b"connection", b"close")] * isinstance(error, RejectedError)
            if status == 500:
                logger.error("a request failed", exc_info=error)
        finally:
            self._num_bytes -= len(body)
        if isinstance(content, str):
            extra = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        extra.append((b"content-length", b"%d" % len(data)))
        await send({"type": "http.response.start", "status": status, "headers": extra})
        await send({"type": "http.response.body", "body": data})

    def _handler(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> Callable[[bytes], Any]:
        expected = f"Bearer {self._token}".encode()
        is_authentic = hmac.compare_digest(headers.get(b"authorization", b""), expected)
        if self._token and not is_authentic and not path.startswith("/v2/health/"):
            raise RejectedError(401, f"the token is missing or wrong: send Authorization: Bearer and {TOKEN}")
        if (method, path) not in self._routes:
            raise RejectedError(404, f"unknown path: {method} {path[:80]}")
        return self._routes[method, path]

    async def _read(self, headers: Mapping[bytes, bytes], receive: Callable[[], Any], body: bytearray) -> None:
        """Append the body to `body`; RejectedError if it is too large or late."""
        size, message = int(headers.get(b"content-length", b"0")), {"more_body": True}
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                while message.get("more_body") and max(size, len(body)) <= self._max_body:
                    body += (data := (message := await receive()).get("body", b""))
                    self._num_bytes += len(data)
                    if self._num_bytes > MAX_BODIES * self._max_body:
                        raise RejectedError(503, "too many large requests at once; try again later")
        except TimeoutError:
            raise RejectedError(408, f"the body did not arrive within {READ_TIMEOUT:g} seconds") from None
        if max(size, len(body)) > self._max_body:
            raise RejectedError(413, f"the body has more than {self._max_body:,} bytes; send fewer rows per request")

    async def _score(self, body: bytes) -> dict[str, Any]:
        scores = await self._scores(parse_body(body, self._scorer.encoder, self._scorer.max_queue))
        labels = self._scorer.run.labels
        return {"scores": dict(zip(labels, scores, strict=True)) if labels else scores[0]}

    async def _infer(self, body: bytes) -> dict[str, Any]:
        scorer, request = self._scorer, parse_json(body)
        raw = parse_tensors(request, scorer.encoder, scorer.max_queue)
        if not isinstance(number := request.get("id", ""), str):
            raise ValueError(f"id must be a string, got a {type(number).__name__}")
        scores = await self._scores(raw)
        columns = zip(self._scorer.run.score_names, scores, strict=True)
        outputs = [{"name": name, "datatype": "FP32", "shape": [len(data)], "data": data} for name, data in columns]
        return {"model_name": self._name, "id": number, "outputs": outputs}

    async def _scores(self, raw: RawRows) -> list[list[float]]:
        """Scores of the rows, a list per label."""
        scores = await asyncio.wrap_future(self._scorer.submit(raw, self._timeout))
        return scores.reshape(len(scores), -1).T.tolist() if len(scores) else [[] for _ in self._scorer.run.score_names]

    def _problem(self) -> str:
        return self._scorer.failure or "the server is stopping" * bool(self.server and self.server.should_exit)

    def _check(self, state: dict[str, Any], problem: str) -> dict[str, Any]:
        if problem:
            raise OverloadedError(problem)
        return state

    def _health(self) -> dict[str, Any]:
        updates, problem, status = self._scorer.updates, self._problem(), "ok"
        values = {} if updates is None else {"step": updates.step, "age": updates.age}
        if problem:
            status = "failed" if self._scorer.failure else "stopping"
        elif updates is not None and (problem := updates.problem or ""):
            status = "degraded"
        return {"status": status, "problem": problem, "checkpoint": str(self._scorer.run.path), **values}

    def _metadata(self) -> dict[str, Any]:
        encoder = self._scorer.encoder
        inputs = [{"name": name, "datatype": "FP64", "shape": [-1]} for name in encoder.schema.dense]
        for feature in encoder.features:
            kind = "INT64" if feature.kind == "integers" else "BYTES"
            inputs.append({"name": feature.name, "datatype": kind, "shape": [-1] * (1 + feature.multi_hot)})
        names = self._scorer.run.score_names
        outputs = [{"name": name, "datatype": "FP32", "shape": [-1]} for name in names]
        return {"name": self._name, "platform": "tritonemb", "inputs": inputs, "outputs": outputs}


class FlightApp:
    """Requests of `/score` over Arrow Flight: tickets of `do_get`. The answer has a float32 column per score.

    Errors have the status of gRPC: INVALID_ARGUMENT, UNAUTHENTICATED, UNAVAILABLE, DEADLINE_EXCEEDED or INTERNAL.
    """

    def __init__(self, scorer: Scorer, max_body: int, timeout: float) -> None:
        self._scorer, self._max_body, self._timeout = scorer, max_body, timeout
        self._num_bytes, self._lock = 0, threading.Lock()

    def start(self, address: str, token: str, certificate: Path | None, key: Path | None) -> Any:
        """Start and return a server; raise the errors of `listen`."""

        class Server(pa_flight.FlightServerBase):  # type: ignore[name-defined]
            app = self

            def do_get(self, context: Any, ticket: Any) -> Any:
                return pa_flight.RecordBatchStream(self.app.answer(ticket.ticket))

        return listen(Server, address, token, certificate, key)

    def answer(self, body: bytes) -> Any:
        """Score the rows of a request; return a table, or raise an exception that Arrow converts to a status."""
        size, names = max(len(body), MAX_BODIES * self._max_body // MAX_CALLS), self._scorer.run.score_names
        with self._lock:
            self._num_bytes += size
        try:
            if len(body) > self._max_body:
                raise ValueError(f"the request has more than {self._max_body:,} bytes; send fewer rows per request")
            if self._num_bytes > MAX_BODIES * self._max_body:
                raise OverloadedError("too many requests at once; try again later")
            raw = parse_body(body, self._scorer.encoder, self._scorer.max_queue)
            scores = self._scorer.submit(raw, self._timeout).result().reshape(-1, len(names))
            return pa.table([*map(pa.array, scores.T)], names)
        except (ValueError, RecursionError) as error:
            raise pa.ArrowInvalid(_status_text(error)) from None
        except OverloadedError as error:
            raise pa_flight.FlightUnavailableError(str(error)) from None
        except TimeoutError as error:
            raise pa_flight.FlightTimedOutError(str(error)) from None
        except Exception as error:
            logger.error("a request failed", exc_info=error)
            raise pa_flight.FlightInternalError(_status_text(error)) from None
        finally:
            with self._lock:
                self._num_bytes -= size


def _status_text(error: Exception) -> str:
    return str(error).encode(errors="replace")[:MAX_STATUS].decode(errors="ignore")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(LoadOptions):
    """Serve the scores of a run over HTTP, and Arrow Flight: raw rows in, click probabilities out.

    Example: tritonemb serve runs/mine --address http://127.0.0.1:8080

    Clients must present the token of TRITONEMB_TOKEN if it is set, as it must be beyond this machine.

    Args:
        checkpoint: checkpoint, or folder of a run: its best checkpoint, or its newest if none is marked best.
        address: http://HOST:PORT on this machine only, or https://HOST:PORT; port 0 selects a free port.
        flight: grpc://HOST:PORT to serve Arrow Flight at, too; grpc+tls://HOST:PORT with a certificate.
        certificate: PEM file of the certificate, for TLS.
        key: PEM file of the private key, for TLS.
        follow: folder of a publisher, or of a run with checkpoints, whose newest state is applied between batches.
        name: name of the model in the paths of the Open Inference Protocol, /v2/models/NAME.
        warm_up: log whose rows are scored before the server is ready.
        batch_size: rows of a batch; a larger request is scored alone.
        max_wait_ms: milliseconds that a request waits for others while the model is idle.
        slow_ms: milliseconds beyond which a request is logged.
        max_queue: queued rows, beyond which requests are rejected with status 503; also of one request, with 400.
        max_body: bytes of a request, beyond which it is rejected with status 413.
        timeout_ms: milliseconds in the queue, beyond which a request fails with status 504.
        model: MODULE:FUNCTION that builds the model, for a run of te.Trainer.
        device: device of the model.
    """

    address: str = "http://127.0.0.1:8080"
    flight: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    follow: Path | None = None
    name: str = "model"
    warm_up: str | None = None
    batch_size: int = number(512, least=1)
    max_wait_ms: float = number(0.0, least=0)
    slow_ms: float = number(1_000.0, positive=True)
    max_queue: int = number(16_384, least=1)
    max_body: int = number(8 << 20, least=1)
    timeout_ms: float = number(2_000.0, positive=True)


def serve(options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM, then finish the running requests. Raise ValueError or OSError if the run cannot be
    loaded, or the address cannot be served."""
    address, token, has_files = urlsplit(options.address), os.environ.get(TOKEN, ""), options.certificate is not None
    if not address.hostname or address.port is None or address.scheme != ("https" if has_files else "http"):
        text = "expected http://HOST:PORT, or https://HOST:PORT with a certificate and its key"
        raise ValueError(f"invalid address {options.address!r}: {text}")
    if options.flight is not None:  # errors before the model is loaded
        read_certificates(options.flight, options.certificate, options.key)
    for name in filter(None, (options.address, options.flight)):
        check_exposure(name, bool(token))
    require("uvicorn", "serve")
    require("msgspec", "serve")
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
    family = socket.AF_INET6 if ":" in address.hostname else socket.AF_INET
    listener = socket.create_server((address.hostname, address.port), family=family, backlog=2048)
    with listener:
        run = options.load()
        warm_up(run, options.warm_up)
        sys.setswitchinterval(SWITCH_INTERVAL)
        updates = None if options.follow is None else ModelFollower(run, options.follow)
        bounds: dict[str, Any] = {"max_wait": options.max_wait_ms / 1e3, "slow": options.slow_ms / 1e3}
        bounds |= {"batch_size": options.batch_size, "max_queue": options.max_queue, "updates": updates}
        with Scorer(run, **bounds) as scorer, ExitStack() as stack:
            app = App(scorer, token, options.max_body, options.timeout_ms / 1e3, options.name)
            if options.flight is not None:
                flight_app = FlightApp(scorer, options.max_body, options.timeout_ms / 1e3)
                server = flight_app.start(options.flight, token, options.certificate, options.key)
                stack.callback(server.shutdown)  # it waits for the requests
                print(f"Arrow Flight at {options.flight.rpartition(':')[0]}:{server.port}", flush=True)
            print(f"serving {run.path} at {options.address.rpartition(':')[0]}:{listener.getsockname()[1]}", flush=True)
            run_server(app, listener, options.certificate, options.key)


def run_server(app: App, listener: socket.socket, certificate: Path | None = None, key: Path | None = None) -> None:
    """Serve HTTP at a listening socket until SIGINT or SIGTERM."""
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Protocol(HttpToolsProtocol):
        """Protocol that closes a connection if the head of a request does not arrive in time, or is too large."""

        num_bytes = 0  # received since the last head or part of a body

        def data_received(self, data: bytes) -> None:
            self.num_bytes += len(data)
            super().data_received(data)
            if self.num_bytes > MAX_HEAD and not self.transport.is_closing():
                self.send_400_response(f"The head of the request has more than {MAX_HEAD} bytes.")

        def on_body(self, body: bytes) -> None:
            self.num_bytes = 0
            super().on_body(body)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.timer = self.loop.call_later(READ_TIMEOUT, transport.close)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.timer.cancel()
            self.timer = self.loop.call_later(READ_TIMEOUT, self.transport.close)

        def on_headers_complete(self) -> None:
            self.timer.cancel()
            self.num_bytes = 0
            super().on_headers_complete()

    options = {"log_level": "warning", "access_log": False, "server_header": False, "proxy_headers": False}
    options |= {"ssl_certfile": certificate, "ssl_keyfile": key} if certificate else {}
    app.server = uvicorn.Server(
        uvicorn.Config(app, http=Protocol, ws="none", lifespan="off", timeout_graceful_shutdown=30, **options)
    )
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has stopped
        signal.signal(signal_number, lambda *_: None)
    app.server.run(sockets=[listener])
