"""Where readers are found: at Unix-domain sockets in a folder of their user's, or at ports where there are none."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

LONGEST_PATH = 100  # bytes; the kernel's structure has room for 104 to 108


@dataclass(frozen=True)
class Place:
    """Where one reader listens: at the path of a socket, or at a port of the loopback device if that is empty."""

    pid: int
    path: str
    port: int

    def connect(self) -> socket.socket:
        """Raises OSError if nobody listens."""
        family = socket.AF_UNIX if self.path else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.connect(self.path or ("127.0.0.1", self.port))
        except OSError:
            connection.close()
            raise
        _tuned(connection)
        return connection


@dataclass(frozen=True)
class Address:
    """The readers of a host. `token` tells their trainers from strangers, who may connect to a port too."""

    token: str
    places: tuple[Place, ...]

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Address:
        values = json.loads(text)
        return cls(values["token"], tuple(Place(**place) for place in values["places"]))

    def name(self, reader: int) -> str:
        """For messages."""
        return f"reader process {reader} (pid {self.places[reader].pid})"


def listen(folder: Path, name: str) -> tuple[socket.socket, Place]:
    """Listen at a socket in the folder, or at a free port of the loopback device."""
    path = str(folder / name)
    if hasattr(socket, "AF_UNIX") and len(os.fsencode(path)) <= LONGEST_PATH:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        place = Place(os.getpid(), path, 0)
    else:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        place = Place(os.getpid(), "", listener.getsockname()[1])
    listener.listen(128)
    return listener, place


def accept(listener: socket.socket) -> socket.socket:
    connection, _ = listener.accept()
    _tuned(connection)
    return connection


def _tuned(connection: socket.socket) -> None:
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
