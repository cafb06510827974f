"""Exactly-once execution, without threads and network: each request once, in order, and answered until received."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonemb.server.inbox import MAX_REORDERED, TRAINER_TIMEOUT, Clients, Inbox
from tritonemb.server.transport import Message

NUM_REQUESTS = 12
EVENTS = ["deliver", "resend", "fail to log", "complete", "receive reply", "make durable"]
NUMBERS = st.integers(0, NUM_REQUESTS - 1)


class Client:
    """A client and its inbox; replies are in flight until they are received."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.executed: list[int] = []
        self.in_flight: list[Message] = []
        self.replies: dict[int, Message] = {}

    def deliver(self, number: int, op: str = "push", fails: bool = False) -> None:
        received = min(set(range(NUM_REQUESTS + 1)) - self.replies.keys())
        message = {"op": op, "number": number, "received": received}, []
        requests, stored_reply = self.inbox.receive(message, self.in_flight.append)
        numbers = [values["number"] for values, _ in requests]
        if fails:
            for accepted in reversed(numbers):
                self.inbox.revoke(accepted)
        else:
            self.executed += numbers
        if stored_reply is not None:
            self.in_flight.append(stored_reply)
        assert not any(acked < received for acked in self.inbox.unacked_replies)

    def complete(self, number: int) -> None:
        was_in_progress = number in self.inbox.in_progress
        completed = self.inbox.complete(number, ({"result": number}, []))
        assert (completed is not None) == was_in_progress
        if completed is not None:
            message, reply = completed
            reply(message)

    def receive_reply(self, position: int) -> None:
        if self.in_flight:
            message = self.in_flight.pop(position % len(self.in_flight))
            number = message[0]["number"]
            assert message[0]["result"] == number
            assert message[0]["durable_sequence"] <= self.inbox.next_sequence
            assert self.replies.setdefault(number, message) is message  # the stored reply, not another one

    def apply(self, event: str, number: int) -> None:
        if event in ("deliver", "resend", "fail to log"):
            self.deliver(number, "resend" if event == "resend" else "push", event == "fail to log")
        elif event == "complete":
            self.complete(number)
        elif event == "receive reply":
            self.receive_reply(number)
        else:
            self.inbox.mark_durable()


@given(st.lists(st.tuples(st.sampled_from(EVENTS), NUMBERS), max_size=120))
def test_each_request_is_executed_once_and_in_order_and_answered_until_its_reply_is_received(events):
    """Requests arrive in any order, any number of times, or not at all; replies are lost, or arrive late."""
    client = Client()
    for event, number in events:
        client.apply(event, number)
        assert client.executed == list(range(client.inbox.next_sequence))
    client.in_flight.clear()  # all are lost
    for number in range(NUM_REQUESTS):
        if number not in client.replies:
            client.deliver(number)
            client.complete(number)
            client.deliver(number, "resend")
    assert client.executed == list(range(NUM_REQUESTS))
    while client.in_flight:
        client.receive_reply(0)
    assert client.replies.keys() == set(range(NUM_REQUESTS))
    client.deliver(NUM_REQUESTS - 1, "resend")
    assert not client.inbox.unacked_replies


@given(st.permutations(range(NUM_REQUESTS)))
def test_requests_wait_for_their_predecessors(order):
    client = Client()
    for position, number in enumerate(order):
        client.deliver(number)
        arrived = set(order[: position + 1])
        assert len(client.executed) == min(set(range(NUM_REQUESTS + 1)) - arrived)
    assert client.executed == list(range(NUM_REQUESTS))


def test_the_reorder_buffer_is_bounded():
    client = Client()
    client.deliver(MAX_REORDERED)
    assert not client.inbox.reorder_buffer
    client.deliver(MAX_REORDERED - 1)
    assert list(client.inbox.reorder_buffer) == [MAX_REORDERED - 1]


def test_a_reply_has_the_sequence_number_that_was_durable():
    client = Client()
    for number in range(2):
        client.deliver(number)
        client.complete(number)
        client.inbox.mark_durable()
    assert [message[0]["durable_sequence"] for message in client.in_flight] == [0, 1]


def test_a_trainer_is_replaced_when_it_has_been_silent():
    clients, first, second = Clients(), {"collection": "c", "rank": 0}, {"collection": "c", "rank": 0}
    first["client"], second["client"] = "first", "second"
    clients.last_seen["first"] = 5.0
    assert clients.register(first, "s", 5.0) is None
    assert clients.register(first, "s", 5.0) is None
    assert "another trainer of rank 0 of 'c' in the last" in clients.register(second, "s", 5.0 + TRAINER_TIMEOUT / 2)
    clients.check_trainer(first)
    assert clients.next_sequence("first") == 0
    clients.check_trainer(second)
    with pytest.raises(PermissionError, match="this client is not the trainer of rank 0 of 'c'"):
        clients.next_sequence("second")
    assert clients.register({**second, "client": "third"}, "s", 5.0 + TRAINER_TIMEOUT) is None
    with pytest.raises(PermissionError, match="another trainer of rank 0 of 'c' has replaced this one"):
        clients.next_sequence("first")
    clients.disconnect("first")
    assert clients.next_sequence("first") == 0
