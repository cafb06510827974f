"""What a reader process does: opens streams of its data set for those who ask, and sends their batches."""

from __future__ import annotations

import hmac
import socket
import threading
from contextlib import suppress
from typing import Any

from tritonemb.data.batch import Batch
from tritonemb.data.readers.address import accept
from tritonemb.data.readers.wire import (
    BATCH,
    END,
    ERROR,
    OPENED,
    REQUEST,
    ClosedError,
    described,
    receive,
    send,
)
from tritonemb.data.source import WHOLE, Data, ReadReport, Stream

PATIENCE = 30.0  # seconds for a request to arrive


def serve(data: Data, listener: socket.socket, token: str) -> None:
    """Serve every connection in a thread of its own, for ever."""
    while True:
        connection = accept(listener)
        threading.Thread(target=_serve, args=(data, connection, token), name="tritonemb-serve", daemon=True).start()


def _serve(data: Data, connection: socket.socket, token: str) -> None:
    with connection, suppress(ClosedError):  # the trainer has gone
        request = _request(connection, token)
        if request is None:
            return
        try:
            stream = data.open(**request)
        except Exception as error:
            send(connection, ERROR, described(error))
            return
        with stream:
            _send_all(stream, connection)


def _request(connection: socket.socket, token: str) -> dict[str, Any] | None:
    """Arguments of `Data.open`; None of somebody who does not know the token."""
    connection.settimeout(PATIENCE)
    try:
        kind, values, _ = receive(connection)
        known = hmac.compare_digest(str(values.pop("token")).encode(), token.encode())
    except (ValueError, KeyError, AttributeError, TypeError):  # no message of ours
        return None
    if kind != REQUEST or not known:
        return None
    connection.settimeout(None)
    share = tuple(values.pop("share"))
    return values if share == WHOLE else values | {"share": share}


def _send_all(stream: Stream, connection: socket.socket) -> None:
    """The stream runs ahead by what its queue holds, and waits while nobody receives. If nobody will, sending fails."""
    send(connection, OPENED, _standing(stream))
    keys: tuple[str, ...] = ()
    while True:
        try:
            batch = next(stream, None)
            batch = None if batch is None else batch.packed()
        except Exception as error:
            send(connection, ERROR, described(error))
            return
        if batch is None:
            send(connection, END, _standing(stream))
            return
        _send_batch(batch, _standing(stream), keys, connection)
        keys = _keys(batch)
        del batch


def _send_batch(batch: Batch, values: dict[str, Any], keys: tuple[str, ...], connection: socket.socket) -> None:
    layout, buffer = batch.layout, batch.buffer
    assert layout is not None
    assert buffer is not None
    values["layout"] = [layout.batch_size, layout.num_dense, layout.num_values, layout.values_dtype.itemsize]
    if layout.keys != keys:
        values["keys"] = layout.keys
    send(connection, BATCH, values, memoryview(buffer.numpy())[: layout.bytes_before_offsets])


def _keys(batch: Batch) -> tuple[str, ...]:
    return () if batch.layout is None else batch.layout.keys


def _standing(stream: Stream) -> dict[str, Any]:
    report: ReadReport = stream.report
    return {
        "position": stream.position,
        "report": [report.rows, report.skipped, report.problems, report.reasons],
    }
