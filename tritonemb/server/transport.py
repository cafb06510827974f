"""How trainers and embedding servers reach one another: channels for messages, in one process or over Arrow Flight.

A channel may lose messages and repeat them, and bring them in another order: `client.py` and `node.py` see to it that
each one counts once, in the order in which it was sent.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

Message = tuple[dict[str, Any], list[Tensor]]
"""Values for JSON, and contiguous tensors on the CPU. Whoever has sent a message changes it no more."""
Reply = Callable[[Message], None]


class Service(Protocol):
    """What answers messages."""

    def receive(self, message: Message, reply: Reply) -> None:
        """Take a message, and return at once. `reply` may be called by any thread, later, or never."""


class Channel(Protocol):
    """A connection of one client to one server."""

    def send(self, message: Message) -> None:
        """Send a message; ConnectionError if the channel is lost. Any thread may call this."""

    def close(self) -> None:
        """Send nothing more, and receive nothing."""


class Transport(Protocol):
    """Opens channels to one server."""

    address: str

    def open(self, receive: Reply, lost: Callable[[Exception], None]) -> Channel:
        """A new channel; ConnectionError if the server does not answer, PermissionError if it expects another token.

        Args:
            receive: is called with each answer, by a thread of the channel.
            lost: is called once if the channel is lost.
        """


class LocalTransport:
    """A server in this process; messages are passed by reference."""

    def __init__(self, service: Service, address: str = "local") -> None:
        self.address, self._service = address, service

    def open(self, receive: Reply, lost: Callable[[Exception], None]) -> Channel:
        return _LocalChannel(self._service, receive)


class _LocalChannel:
    def __init__(self, service: Service, receive: Reply) -> None:
        self._service, self._receive, self._closed = service, receive, False

    def send(self, message: Message) -> None:
        self._service.receive(message, self._answer)

    def _answer(self, message: Message) -> None:
        if not self._closed:
            self._receive(message)

    def close(self) -> None:
        self._closed = True
