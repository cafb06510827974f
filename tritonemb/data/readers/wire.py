"""Messages between a reader and a trainer: a small header, JSON, and for a batch the bytes that it consists of.

Nothing is unpickled that comes through a socket.
"""

from __future__ import annotations

import builtins
import json
import socket
import struct
import traceback
from typing import Any

REQUEST, OPENED, BATCH, END, ERROR = b"?", b"O", b"B", b"E", b"!"

_HEADER = struct.Struct("<cIQ")  # kind, bytes of JSON, bytes that follow
_MOST_TEXT = 1 << 26
_PLAIN = (str, int, float, bool, type(None))


class ClosedError(Exception):
    """The other side is gone."""


def send(connection: socket.socket, kind: bytes, values: dict[str, Any], data: memoryview | None = None) -> None:
    """Raises ClosedError."""
    text = json.dumps(values).encode()
    try:
        connection.sendall(_HEADER.pack(kind, len(text), 0 if data is None else len(data)) + text)
        if data is not None:
            connection.sendall(data)
    except OSError as error:
        raise ClosedError(str(error)) from error


def receive(connection: socket.socket) -> tuple[bytes, dict[str, Any], int]:
    """Kind and values of the next message, and how many bytes follow. Raises ClosedError."""
    header = bytearray(_HEADER.size)
    receive_into(connection, memoryview(header))
    kind, text_size, size = _HEADER.unpack(header)
    if text_size > _MOST_TEXT:
        raise ClosedError("that is no message of ours")
    text = bytearray(text_size)
    receive_into(connection, memoryview(text))
    return kind, json.loads(text), size


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill all of it. Raises ClosedError."""
    while len(view):
        try:
            size = connection.recv_into(view)
        except OSError as error:
            raise ClosedError(str(error)) from error
        if size == 0:
            raise ClosedError("the connection has ended")
        view = view[size:]


def described(error: Exception) -> dict[str, Any]:
    """An error as it travels: the nearest built-in type, its arguments, its message and its traceback."""
    builtin = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    message = str(error)
    if builtin is Exception:
        builtin, message = RuntimeError, f"{type(error).__name__}: {message}"
    return {
        "type": builtin.__name__,
        "args": [arg for arg in error.args if isinstance(arg, _PLAIN)],
        "message": message,
        "trace": "".join(traceback.format_exception(error)),
    }


def rebuilt(values: dict[str, Any], reader: str) -> Exception:
    """The error again, with the same message, and a note of where it was raised."""
    kind = getattr(builtins, values["type"])
    error: Exception = RuntimeError(f"{values['type']}: {values['message']}")
    for args in (values["args"], [values["message"]]):
        try:
            candidate = kind(*args)
        except TypeError:
            continue
        if str(candidate) == values["message"]:
            error = candidate
            break
    error.add_note(f"In {reader}:\n{values['trace']}")
    return error
