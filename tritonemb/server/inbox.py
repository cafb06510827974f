"""Exactly-once execution of clients' requests, over channels that lose, duplicate and reorder messages.

Pure state machines, without thread, clock, file or network: a server passes each request to `Inbox.receive`, executes
the requests that it returns, and passes each result to `Inbox.complete`.
"""

from dataclasses import dataclass, field

from tritonemb.server.transport import Message, Reply, Values

MAX_REORDERED = 4_096  # requests of a client that wait for earlier ones; others are dropped, and sent again
TRAINER_TIMEOUT = 10.0  # seconds without a message after which a trainer may be replaced


@dataclass
class Inbox:
    """Requests of one client, which numbers them from 0.

    A repeated request is answered again, and not executed again; one that arrives early waits for its predecessors.
    """

    # Error of all requests, if the client is not the registered trainer, or not any longer.
    failure: Exception | None = None
    next_sequence: int = 0
    durable_sequence: int = 0  # number of the first request that is neither in the snapshot nor in the log
    # By number: requests that arrived before an earlier one, and accepted requests without a reply, with their reply
    # channels; and replies that the client may not have received.
    reorder_buffer: dict[int, tuple[Message, Reply]] = field(default_factory=dict)
    in_progress: dict[int, tuple[Message, Reply]] = field(default_factory=dict)
    unacked_replies: dict[int, Message] = field(default_factory=dict)

    def receive(self, message: Message, reply: Reply) -> tuple[list[Message], Message | None]:
        """Return the requests to execute now, in order, and the reply to send again to a repeated request."""
        values, number = message[0], message[0]["number"]
        for acked in [n for n in self.unacked_replies if n < values["received"]]:
            del self.unacked_replies[acked]
        # Answer a repeated request, or buffer a new one.
        if number in self.in_progress:
            self.in_progress[number] = self.in_progress[number][0], reply
        elif self.next_sequence <= number < self.next_sequence + MAX_REORDERED and values["op"] != "resend":
            self.reorder_buffer[number] = message, reply
        # Accept the requests that are next in order.
        accepted = []
        while self.next_sequence in self.reorder_buffer:
            request = self.in_progress[self.next_sequence] = self.reorder_buffer.pop(self.next_sequence)
            accepted.append(request[0])
            self.next_sequence += 1
        return accepted, self.unacked_replies.get(number)

    def revoke(self, number: int) -> Reply:
        """Undo the acceptance of the last request, which is to be sent again; return its reply channel."""
        self.next_sequence = number
        return self.in_progress.pop(number)[1]

    def complete(self, number: int, result: Message) -> tuple[Message, Reply] | None:
        """Store the reply to a request until it is acknowledged, and return it with its channel; None if it has one."""
        if number not in self.in_progress:
            return None
        _, reply = self.in_progress.pop(number)
        values, tensors = result
        message = {**values, "number": number, "durable_sequence": self.durable_sequence}, tensors
        self.unacked_replies[number] = message
        return message, reply

    def mark_durable(self) -> None:
        """Record that all accepted requests are in the snapshot or in the log."""
        self.durable_sequence = self.next_sequence


@dataclass
class Clients:
    """Inboxes of a server's clients, and the client that is registered as each trainer."""

    inboxes: dict[str, Inbox] = field(default_factory=dict)  # by name of the client
    trainers: dict[str, str] = field(default_factory=dict)  # name of the registered client, by trainer
    last_seen: dict[str | None, float] = field(default_factory=dict)  # time of a client's last message, in seconds

    def inbox(self, client: str) -> Inbox:
        return self.inboxes.setdefault(client, Inbox())

    def check_trainer(self, values: Values) -> None:
        """Fail all requests of a client that is not the registered trainer; the first one is, after a restart."""
        trainer, client = _trainer_of(values), values["client"]
        inbox = self.inbox(client)
        if inbox.failure is None and self.trainers.setdefault(trainer, client) != client:
            inbox.failure = PermissionError(f"this client is not the {trainer}")

    def register(self, values: Values, server: str, now: float) -> str | None:
        """Register a client as a trainer, in place of one that is gone; return the reason if that one is alive."""
        trainer, client = _trainer_of(values), values["client"]
        self.last_seen = {name: seen for name, seen in list(self.last_seen.items()) if now - seen < TRAINER_TIMEOUT}
        if (registered := self.trainers.setdefault(trainer, client)) == client:
            return None
        if registered in self.last_seen:
            return (
                f"embedding server {server} has received a message from another {trainer} in the last "
                f"{TRAINER_TIMEOUT:.0f} seconds; end that run first, or start other servers for this one"
            )
        self.inboxes[registered] = Inbox(PermissionError(f"another {trainer} has replaced this one"))
        self.trainers[trainer] = client
        return None

    def next_sequence(self, client: str) -> int:
        """Number of a client's next request; raises its failure."""
        inbox = self.inboxes.get(client, Inbox())
        if inbox.failure is not None:
            raise inbox.failure
        return inbox.next_sequence

    def disconnect(self, client: str) -> None:
        self.inboxes.pop(client, None)
        self.last_seen.pop(client, None)


def _trainer_of(values: Values) -> str:
    return f"trainer of rank {values.get('rank')} of {values.get('collection')!r}"
