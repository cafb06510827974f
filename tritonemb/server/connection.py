"""Connection of a trainer to one embedding server: requests that are executed exactly once, and queries."""

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from tritonemb.flight import decode_error
from tritonemb.server.inbox import TRAINER_TIMEOUT
from tritonemb.server.transport import Channel, Message, Transport, Values
from tritonemb.utils import Closeable

TICK, RESEND_AFTER = 0.2, 1.0  # seconds between checks of a connection, and before requests are sent again
HEARTBEAT = 2.0  # seconds between messages of an idle client, so that the server knows that it is alive

MAX_REPLAY_BYTES = 1 << 28  # of answered requests; then the server saves a snapshot, which later requests wait for


class Connection(Closeable):
    """Client of one server, over channels that may be lost, and may lose, duplicate and reorder messages.

    Requests are numbered. One without a reply is sent again after a while, over a new channel if the last one is lost;
    the server executes it once, in the order of numbers. A request stays in the replay buffer until the server has it
    in its snapshot or log, so that it can be sent again to a restarted server.

    Args:
        patience: seconds without any message from the server after which all requests fail: ConnectionError.
        wait: connect later, as the server may be restarting.

    Attributes:
        is_starting: whether the server is being restarted, which suspends `patience`.
    """

    def __init__(self, transport: Transport, patience: float = 20.0, wait: bool = False) -> None:
        self.transport, self._patience = transport, patience
        self._client, self._lock = uuid.uuid4().hex, threading.RLock()

        # Requests and queries, by number, ascending.
        self._next_sequence, self._query_ids = 0, itertools.count()
        self._pending_requests: dict[int, Future[Message]] = {}
        self._pending_queries: dict[int, Future[Message]] = {}
        self._replay_buffer: dict[int, Message] = {}  # pending ones, and answered ones that are not durable
        self._replay_bytes, self._max_replay_bytes = 0, MAX_REPLAY_BYTES  # of answered requests

        # Liveness.
        self._last_received = self._last_sent = time.monotonic()
        self._failure: Exception | None = None
        self.is_starting: Callable[[], bool] = lambda: False

        self._closed, self._saving, self._opening = threading.Event(), threading.Lock(), threading.Lock()
        self._channel: Channel | None = None
        self._channel_id: object = None
        if not wait:
            self._open()
        threading.Thread(target=self._watch, daemon=True, name="tritonemb-connection").start()

    def submit(self, op: str, values: Values, tensors: Sequence[Tensor] = ()) -> Future[Message]:
        """Send a request; requests are executed in the order of these calls."""
        if op != "save" and self._replay_bytes > self._max_replay_bytes:
            with self._saving:
                if self._replay_bytes > self._max_replay_bytes:
                    self.submit("save", {}).result()
        future: Future[Message] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            number, self._next_sequence = self._next_sequence, self._next_sequence + 1
            if not self._pending_requests:
                self._last_received = self._last_sent = time.monotonic()
            received = next(iter(self._pending_requests), number)  # all replies before this one
            values = {**values, "op": op, "client": self._client, "number": number, "received": received}
            self._replay_buffer[number], self._pending_requests[number] = (values, list(tensors)), future
            self._send(self._replay_buffer[number])
        return future

    def query(self, op: str, timeout: float = 10.0, **values: Any) -> Values:
        """Send a query, which changes no row; ConnectionError if there is no reply within `timeout` seconds."""
        return self.query_tensors(op, values, [], timeout)[0]

    def statistics(self) -> Values:
        """Read the server's statistics; waits while it is busy or restarting. ConnectionError if it is gone."""
        return self._retry_query("stats")["stats"]

    def register(self, collection: str, rank: int) -> None:
        """Register as the trainer of a rank; ConnectionRefusedError if another one stays alive."""
        deadline = time.monotonic() + TRAINER_TIMEOUT + HEARTBEAT
        while (reason := self._retry_query("register", collection=collection, rank=rank)["refused"]) is not None:
            if time.monotonic() > deadline:
                raise ConnectionRefusedError(reason)
            time.sleep(TICK)

    def _retry_query(self, op: str, **values: Any) -> Values:
        while True:
            with suppress(ConnectionError):
                return self.query(op, **values)
            self.query("ping", self._patience)

    def query_tensors(self, op: str, values: Values, tensors: Sequence[Tensor], timeout: float = 10.0) -> Message:
        """Send a query with tensors, and return the complete reply; see `query`."""
        number, future, deadline = next(self._query_ids), Future[Message](), time.monotonic() + timeout
        self._pending_queries[number] = future
        try:
            while (remaining := deadline - time.monotonic()) > 0:
                deadline += timeout if self.is_starting() and remaining < timeout / 2 else 0.0
                with self._opening, suppress(ConnectionError):  # the server may not answer yet
                    if self._channel is None:
                        self._open()
                with self._lock:
                    if self._failure is not None:
                        raise self._failure
                    self._send(({**values, "op": op, "query": number, "client": self._client}, list(tensors)))
                with suppress(TimeoutError):
                    return future.result(min(remaining, RESEND_AFTER))
            raise timeout_error(self.transport.address, self._patience)
        finally:
            self._pending_queries.pop(number, None)

    def _open(self) -> None:
        channel_id = object()
        channel = self.transport.open(self._receive, partial(self._channel_lost, channel_id))
        with self._lock:
            self._channel, self._channel_id = channel, channel_id
        if self._closed.is_set():  # meanwhile
            channel.close()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._send(({"op": "disconnect", "query": next(self._query_ids), "client": self._client}, []))
            channel, self._channel = self._channel, None
            self._fail(ConnectionError(f"the connection to embedding server {self.transport.address} was closed"))
        if channel is not None:
            channel.close()

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            try:
                self._channel.send(message)
            except ConnectionError:
                self._channel = None

    def _channel_lost(self, channel_id: object, error: Exception) -> None:
        with self._lock:
            if channel_id is self._channel_id:
                self._channel = None

    def _receive(self, message: Message) -> None:
        values = message[0]
        with self._lock:
            self._last_received = time.monotonic()
            if "query" in values:
                future = self._pending_queries.get(values["query"])
            else:
                if (future := self._pending_requests.pop(values["number"], None)) is not None:
                    self._replay_bytes += _num_bytes(self._replay_buffer[values["number"]])
                durable_sequence = values.get("durable_sequence", 0)
                for number in list(itertools.takewhile(lambda n: n < durable_sequence, self._replay_buffer)):
                    if number not in self._pending_requests:  # answered and durable
                        self._replay_bytes -= _num_bytes(self._replay_buffer.pop(number))
        if future is not None and not future.done():
            if "error" in values:
                future.set_exception(decode_error(values["error"], f"embedding server {self.transport.address}"))
            else:
                future.set_result(message)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        pending = [*self._pending_requests.values(), *self._pending_queries.values()]
        self._pending_requests.clear()
        for future in pending:
            if not future.done():
                future.set_exception(error)

    def tick(self) -> None:
        """Send pending requests again if the server seems to have lost them; send a heartbeat if there are none."""
        now = time.monotonic()
        with self._lock:
            is_idle = not self._pending_requests
            if self._failure is not None or (is_idle and now - self._last_sent < HEARTBEAT):
                return
            if self.is_starting():
                self._last_received = now
            if not is_idle and now - self._last_received > self._patience:
                self._fail(timeout_error(self.transport.address, self._patience))
                return
            is_recent = now - max(self._last_sent, self._last_received) < RESEND_AFTER
            if not is_idle and is_recent and self._channel is not None:
                return
            self._last_sent, min_sequence = now, next(iter(self._replay_buffer), 0)
        try:
            self.query("ping", RESEND_AFTER)
            if is_idle:
                return
            next_sequence = self.query("connect", RESEND_AFTER)["next_sequence"]
        except ConnectionError:  # the server is gone, or busy
            return
        with self._lock:
            # Requests before the replay buffer were durable, so a server that expects one of them has lost its state.
            if next_sequence < min_sequence:
                reason = (
                    f"embedding server {self.transport.address} was restarted without its snapshot or log, and lost "
                    "requests; resume from a checkpoint"
                )
                self._fail(ConnectionError(reason))
                return
            for number, message in list(self._replay_buffer.items()):
                if number >= next_sequence:
                    self._send(message)
                elif number in self._pending_requests:  # the reply was lost, or is still to come
                    self._send(({**message[0], "op": "resend"}, []))

    def _watch(self) -> None:
        while not self._closed.wait(TICK):
            try:
                self.tick()
            except Exception as error:  # such as a token or a certificate that has changed
                with self._lock:
                    self._fail(error)


def timeout_error(address: str, seconds: float) -> ConnectionError:
    return ConnectionError(
        f"embedding server {address} has not answered for {seconds:.0f} seconds; restart it, and resume from a "
        "checkpoint"
    )


def _num_bytes(message: Message) -> int:
    return sum(tensor.nbytes for tensor in message[1])
