"""Trainer's side of tablets: requests go to the server that owns the tablet, also after it has moved.

A server that a tablet has left answers each request with the route to the next owner, in place of executing it; see
`migration.py`. When none is in flight any longer, the client sends them, and then later ones, to the next owner.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor

from tritonemb.server.connection import Connection
from tritonemb.server.transport import Message, Values


@dataclass(eq=False)
class Request:
    """Request to a tablet without an answer, or with a route as the answer."""

    arguments: tuple[str, Values, Sequence[Tensor]]
    in_flight: bool
    future: Future[Message] = field(default_factory=Future)


class Tablet:
    """Connection of one client to one tablet; for the methods see `Connection`."""

    def __init__(self, key: str, connection: Connection, connect: Callable[[str], Connection]) -> None:
        self._key, self._connection, self._connect = key, connection, connect
        self._rank: int | None = None  # of the registered trainer
        self._ticket: str | None = None  # of the last move
        self._sending = threading.RLock()  # held while requests are sent, in order
        self._lock = threading.Lock()  # of the fields below; nothing is sent and no future is set while it is held
        self._requests: list[Request] = []  # in order
        self._next_route: Values | None = None

    def submit(self, op: str, values: Values, tensors: Sequence[Tensor] = ()) -> Future[Message]:
        with self._sending:
            with self._lock:
                request = Request((op, values, tensors), self._next_route is None)
                self._requests.append(request)
            if request.in_flight:
                self._send(request)
        return request.future

    def _send(self, request: Request) -> None:
        op, values, tensors = request.arguments
        future = self._connection.submit(op, {**values, "collection": self._key, "ticket": self._ticket}, tensors)
        future.add_done_callback(partial(self._receive, request))

    def _receive(self, request: Request, future: Future[Message]) -> None:
        error = future.exception()
        route = None if error is not None else future.result()[0].get("moved")
        with self._lock:
            if request not in self._requests:  # `_follow` has failed
                return
            if route is None:
                self._requests.remove(request)
            else:
                request.in_flight, self._next_route = False, route
            next_route = None if any(pending.in_flight for pending in self._requests) else self._next_route
        if next_route is not None:
            threading.Thread(target=self._follow, args=[next_route], daemon=True, name="tritonemb-route").start()
        if error is not None:
            request.future.set_exception(error)
        elif route is None:
            request.future.set_result(future.result())

    def _follow(self, route: Values) -> None:
        """Send the requests to the next owner."""
        try:
            connection = self._connect(route["address"])
            if self._rank is not None:
                connection.register(self._key, self._rank)
            with self._sending:
                with self._lock:
                    self._connection, self._ticket, self._next_route = connection, route["ticket"], None
                    for request in (requests := list(self._requests)):
                        request.in_flight = True
                for request in requests:
                    self._send(request)
        except Exception as error:
            with self._lock:
                requests, self._requests, self._next_route = self._requests, [], None
            for request in requests:
                request.future.set_exception(error)

    def query_tensors(self, op: str, values: Values, tensors: Sequence[Tensor], timeout: float = 10.0) -> Message:
        assert not self._requests  # a client that trains sends no query, so that the route can be followed at once
        while True:
            routed = {**values, "collection": self._key, "ticket": self._ticket}
            reply = self._connection.query_tensors(op, routed, tensors, timeout)
            if (route := reply[0].get("moved")) is None:
                return reply
            self._follow(route)

    def register(self, collection: str, rank: int) -> None:
        self._rank = rank
        self._connection.register(self._key, rank)

    def statistics(self) -> Values:
        return {
            "collections": {k: v for k, v in self._connection.statistics()["collections"].items() if k == self._key}
        }


class TabletDirectory:
    """Tablets on servers, which have `number` of them; None: as many as present ones. ValueError if they differ."""

    def __init__(self, connections: list[Connection], number: int | None, patience: float) -> None:
        self._connections, self._patience, self._lock = connections, patience, threading.RLock()
        # Servers by address; and by tablet its owner, or a server that knows the next owner.
        self._servers, self._by_address, self._owners = list(connections), dict[str, Connection](), dict[str, Any]()
        for connection in connections:
            reply = connection.query("tablets", patience)
            self._by_address |= {connection.transport.address: connection, reply["address"]: connection}
            self._owners = dict.fromkeys(reply["moved"], connection) | self._owners
            self._owners |= dict.fromkeys(reply["owned"], connection)
        counts = {int(key.rpartition("-of-")[2]) if "#" in key else None for key in self._owners}
        if len(counts | ({number} if number else set())) > 1:
            raise ValueError(
                f"the collections have {str(counts)[1:-1]} tablets, got tablets={number}; pass that number"
            )
        self._number = number or next(iter(counts), None) or 0
        self.num_parts = self._number or len(connections)
        self.addresses = [connection.transport.address for connection in connections] * (self._number > 0)

    def parts(self, *collections: str) -> list[Connection]:
        """Connections to the tablets of each collection; without tablets, to all servers, which have a part each."""
        parts, servers = list[Any](), self._servers
        for collection, number in product(collections, range(self._number)):
            key, new_owner = f"{collection}#{number}-of-{self._number}", number * len(servers) // self._number
            parts.append(Tablet(key, self._owners.get(key, servers[new_owner]), self.connect))
        return parts or servers

    def connect(self, address: str) -> Connection:
        with self._lock:
            if address not in self._by_address:
                transport: Any = self._servers[0].transport  # over Flight, with the same token
                transport = replace(transport, address=address, address_path=None)
                self._by_address[address] = Connection(transport, self._patience, wait=True)
                self._connections.append(self._by_address[address])
            return self._by_address[address]
