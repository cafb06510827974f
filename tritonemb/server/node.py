"""An embedding server: takes the messages of its clients, each once and in the order in which it was sent."""

import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonemb.flight import encode_error
from tritonemb.server.tables import CollectionSpec, ServedTables
from tritonemb.server.transport import Message, Reply
from tritonemb.utils import Closing

Values = dict[str, Any]


class Client:
    """What a server knows of one of its clients.

    Attributes:
        expected: the number of its next message.
        early: messages that came before those that go before them.
        waiting: where answers go that are not known yet, by number.
        answers: those that it may not have received.
    """

    def __init__(self) -> None:
        self.expected = 0
        self.early: dict[int, tuple[Message, Reply]] = {}
        self.waiting: dict[int, Reply] = {}
        self.answers: dict[int, Message] = {}


class EmbeddingServer(Closing):
    """Has some partitions of collections' tables, and one thread that reads and writes them.

    A message's values have `op`, what is to be done, and `number`: those of a `client` count from 0. One that comes
    again is answered again, and not done again; one that comes too early waits. Messages without a number only ask.
    """

    def __init__(self, name: str = "server") -> None:
        self.name, self.identity = name, uuid.uuid4().hex
        self.collections: dict[str, ServedTables] = {}
        self._clients: dict[str, Client] = {}
        self._queue: queue.SimpleQueue[tuple[Message, Reply] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tritonemb-{name}", daemon=True)
        self._thread.start()

    def receive(self, message: Message, reply: Reply) -> None:
        """Take a message; `reply` is called by the server's thread."""
        self._queue.put((message, reply))

    def close(self) -> None:
        """End the thread; what has been taken is done first."""
        self._queue.put(None)
        self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._take(*item)
            del item

    def _take(self, message: Message, reply: Reply) -> None:
        values, tensors = message
        if (number := values.get("number")) is None:
            self._answer(reply, lambda: getattr(self, f"_{values['op']}")(values, tensors))
            return
        client = self._clients.setdefault(values["client"], Client())
        for received in [n for n in client.answers if n < values["received"]]:
            del client.answers[received]
        if number in client.answers:
            reply(client.answers[number])
        elif number >= client.expected:
            client.early[number] = message, reply
        elif number in client.waiting:
            client.waiting[number] = reply
        while client.expected in client.early:
            early, client.waiting[client.expected] = client.early.pop(client.expected)
            client.expected += 1
            self._do(client, early)

    def _do(self, client: Client, message: Message) -> None:
        (values, tensors), number = message, message[0]["number"]

        def answer(result: Message | Exception) -> None:
            if isinstance(result, Exception):
                result = {"error": encode_error(result)}, []
            found = client.answers[number] = ({**result[0], "number": number}, result[1])
            client.waiting.pop(number)(found)

        try:
            getattr(self, f"_do_{values['op']}")(values, tensors, answer)
        except Exception as error:
            answer(error)

    @staticmethod
    def _answer(reply: Reply, work: Callable[[], Message]) -> None:
        try:
            values, tensors = work()
        except Exception as error:
            values, tensors = {"error": encode_error(error)}, []
        reply((values, tensors))

    # Questions.

    def _hello(self, values: Values, tensors: Sequence[Tensor]) -> Message:
        client = self._clients.get(values["client"])
        return {"server": self.identity, "expected": client.expected if client else 0, "ask": values["ask"]}, []

    def _stats(self, values: Values, tensors: Sequence[Tensor]) -> Message:
        return {"ask": values["ask"], "stats": self.statistics()}, []

    def statistics(self) -> Values:
        """By collection and table: rows, bytes, evictions; staleness; the length of the queue."""
        found: Values = {"queue": self._queue.qsize(), "collections": {}}
        for name, served in self.collections.items():
            tables = {table.config.name: vars(table.statistics()) for table in served.dynamic}
            found["collections"][name] = {
                "tables": tables, "pulls": served.next_pull, "steps": served.next_push,
                "staleness": {str(steps): count for steps, count in sorted(served.staleness.items())},
            }  # fmt: skip
        return found

    # What clients have done, in their order.

    def _do_create(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        spec, name = CollectionSpec.from_json(values["spec"]), values["collection"]
        if (there := self.collections.get(name)) is None:
            self.collections[name] = ServedTables(spec, values["server"])
        elif there.spec != spec:
            raise ValueError(
                f"embedding server {self.name} has a collection {name!r} with other tables, trainers or staleness; "
                "attach it with the same, or start other servers"
            )
        answer(({}, []))

    def _do_pull(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        served = self.collections[values["collection"]]
        ids, occurrences = (list(each.split(values["sizes"])) for each in tensors)
        served.pull(values["rank"], values["batch"], ids, occurrences, _rows(answer))

    def _do_look_up(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        served = self.collections[values["collection"]]
        served.look_up(values["after"], list(tensors[0].split(values["sizes"])), _rows(answer))

    def _do_push(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        served, ids = self.collections[values["collection"]], list[Tensor]()
        if values["sizes"] is not None:
            ids = list(tensors[0].split(values["sizes"]))
        served.push(values["rank"], values["batch"], ids, list(tensors[1:]), values["lr"])
        answer(({}, []))

    def _do_flush(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        served = self.collections[values["collection"]]
        served.flush(values["rank"], values["steps"], lambda: answer(({}, [])))

    def _do_read(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        found = self._table(values).saved()
        answer(({"names": list(found)}, [value.contiguous() for value in found.values()]))

    def _do_load(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        self._table(values).adopt(dict(zip(values["names"], tensors, strict=True)))
        answer(({}, []))

    def _table(self, values: Values) -> Any:
        served = self.collections[values["collection"]]
        return served.dynamic[[table.config.name for table in served.dynamic].index(values["table"])]


def _rows(answer: Any) -> Any:
    def send(rows: Sequence[Tensor] | Exception) -> None:
        answer(rows if isinstance(rows, Exception) else ({}, [of_table.contiguous() for of_table in rows]))

    return send
