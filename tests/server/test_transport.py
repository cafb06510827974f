"""Messages between trainers and embedding servers: whole, in order, over Arrow Flight and within a process."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("pyarrow.flight")

import pyarrow.flight

from tests.helpers import DEADLINE
from tritonemb import flight
from tritonemb.flight import Client, start_server
from tritonemb.memory import DTYPES
from tritonemb.server import connect, transport
from tritonemb.server.metrics import MetricsServer
from tritonemb.server.transport import FlightServer, FlightTransport, LocalTransport

SHAPES = [(), (0,), (3,), (2, 0, 3), (5, 7), (1, 130)]


class Echo:
    """Replies at once; fails where a message says so."""

    def receive(self, message, reply):
        if "fail" in message[0]:
            raise KeyError(message[0]["fail"])
        reply(message)


class Later:
    """Keeps the replies."""

    def __init__(self):
        self.received = queue.Queue()

    def receive(self, message, reply):
        self.received.put((message, reply))


class Peer:
    """A channel and what comes out of it."""

    def __init__(self, transport):
        self.replies, self.lost = queue.Queue(), queue.Queue()
        self.channel = transport.open(self.replies.put, self.lost.put)

    def ask(self, values, tensors=()):
        self.channel.send((values, list(tensors)))
        return self.replies.get(timeout=DEADLINE)

    def ends(self):
        """The error; the channel is lost, and was once."""
        error = self.lost.get(timeout=DEADLINE)
        assert type(error) is ConnectionError
        with pytest.raises(ConnectionError):
            self.channel.send(({}, []))
        assert threads_end()
        assert self.lost.empty()
        return str(error)


def threads_end():
    channels = [thread for thread in threading.enumerate() if thread.name == "tritonemb-channel"]
    for thread in channels:
        thread.join(DEADLINE)
    return not any(thread.is_alive() for thread in channels)


@pytest.fixture(scope="module")
def server():
    with FlightServer(Echo(), token="secret") as server:
        yield server


@pytest.fixture(params=["local", "flight"])
def way(request, server):
    return LocalTransport(Echo()) if request.param == "local" else FlightTransport(server.address, "secret")


@pytest.fixture
def peer(way):
    peer = Peer(way)
    yield peer
    peer.channel.close()
    assert threads_end()
    assert peer.lost.empty()


def random_tensors():
    """Of each dtype and shape, with any bits."""
    for dtype in DTYPES.values():
        for shape in SHAPES:
            bits = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
            yield bits.view(dtype).squeeze(-1)


def same(actual, expected):
    (values, tensors), (expected_values, expected_tensors) = actual, expected
    assert values == expected_values
    for tensor, other in zip(tensors, expected_tensors, strict=True):
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        assert tensor.data_ptr() % min(8, tensor.element_size()) == 0
    return True


def test_messages_arrive_bitwise(peer):
    tensors = list(random_tensors())
    values = {"op": "pull", "table": 'ü " \n', "numbers": [1, -2.5, None, True], "more": {"a": []}}
    assert same(peer.ask(values, tensors), (values, tensors))
    for tensor in tensors[::5]:
        assert same(peer.ask({}, [tensor]), ({}, [tensor]))
    for few in ([], [torch.zeros(0)], [torch.zeros(0), torch.ones(3)], [torch.ones(1), torch.zeros(0, 2)]):
        assert same(peer.ask(values, few), (values, few))
    assert same(peer.ask({}, [torch.ones(2, 3).requires_grad_()]), ({}, [torch.ones(2, 3)]))


def test_messages_come_in_pieces_where_they_are_large(peer, monkeypatch):
    monkeypatch.setattr(transport, "RECORD_BATCH_BYTES", 1000)
    tensors = [torch.randn(size) for size in (1, 230, 1000, 3, 233)]
    for few in (tensors, tensors[2:3], [torch.ones(250)], [torch.ones(251)], tensors[:2]):
        assert same(peer.ask({"n": len(few)}, few), ({"n": len(few)}, few))


@pytest.mark.more
def test_large_messages(server):
    peer = Peer(FlightTransport(server.address, "secret"))
    tensors = [torch.arange(size) for size in (35_000_001, 10, 3_000_000)]
    assert same(peer.ask({}, tensors), ({}, tensors))
    peer.channel.close()


def test_tensors_that_lie_as_in_a_message_are_not_copied():
    columns = [torch.arange(90), torch.rand(90, 3), torch.rand(90, 5).half()]
    tensors = transport.gather(columns, [torch.tensor([7, 3]), torch.arange(11), torch.empty(0, dtype=torch.int64)])
    for several in (tensors, tensors[:2], tensors[1:2]):
        ((header, data),) = transport._encode(({}, several))
        assert data.ctypes.data == several[0].data_ptr()
        assert len(header["tensors"]) == len(several)
    assert not transport._encode(({}, tensors))[0][1][16:64].any()
    for several in ([tensors[1], tensors[0]], [tensors[0], tensors[1][1:]], [columns[1].T]):
        ((_, data),) = transport._encode(({}, several))
        assert data.ctypes.data != several[0].data_ptr()
        assert bytes(data[: several[0].nbytes]) == several[0].numpy().tobytes()


def test_within_a_process_tensors_are_not_copied():
    tensor = torch.ones(3)
    assert Peer(LocalTransport(Echo())).ask({}, [tensor])[1][0] is tensor


def test_messages_of_several_threads_stay_whole_and_in_order(peer, monkeypatch):
    monkeypatch.setattr(transport, "RECORD_BATCH_BYTES", 1000)
    sizes = [0, 3, 700, 5, 2000]

    def send(thread):
        for number in range(60):
            size = sizes[(thread + number) % len(sizes)]
            peer.channel.send(({"thread": thread, "number": number}, [torch.full((size,), number), torch.tensor(size)]))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    numbers = {thread: [] for thread in range(4)}
    for _ in range(240):
        values, (tensor, size) = peer.replies.get(timeout=DEADLINE)
        assert tensor.numel() == size
        assert (tensor == values["number"]).all()
        numbers[values["thread"]].append(values["number"])
    assert all(number == list(range(60)) for number in numbers.values())


@pytest.mark.parametrize("kind", ["local", "flight"])
def test_replies_come_from_any_thread_and_are_dropped_after_close(kind):
    service = Later()
    with FlightServer(service, token="secret") as server:
        way = LocalTransport(service) if kind == "local" else FlightTransport(server.address, "secret")
        peer, other = Peer(way), Peer(way)
        for number in range(3):
            peer.channel.send(({"number": number}, []))
        received = [service.received.get(timeout=DEADLINE) for _ in range(3)]
        for message, reply in reversed(received):
            threading.Thread(target=reply, args=(message,)).start()
        result = {peer.replies.get(timeout=DEADLINE)[0]["number"] for _ in received}
        assert result == {0, 1, 2}
        other.channel.send(({}, []))
        message, reply_other = service.received.get(timeout=DEADLINE)
        peer.channel.close()
        for _, reply in received:
            reply(message)
        reply_other(({"still": "here"}, []))
        assert other.replies.get(timeout=DEADLINE)[0] == {"still": "here"}
        with pytest.raises(ConnectionError):
            peer.channel.send(({}, []))
        other.channel.close()
        assert threads_end()
    reply_other(message)
    assert peer.replies.empty()
    assert peer.lost.empty()


def test_nobody_is_served_without_the_token(server):
    for token in ("", "wrong", "secret "):
        with pytest.raises(PermissionError, match="the token is missing or wrong"):
            Peer(FlightTransport(server.address, token))
    assert threads_end()


def test_tls(certificate):
    pem = certificate / "pem"
    with FlightServer(Echo(), "grpc+tls://localhost:0", certificate=pem, key=certificate / "key") as server:
        peer = Peer(FlightTransport(server.address, server.token, pem))
        assert same(peer.ask({}, [torch.arange(1000)]), ({}, [torch.arange(1000)]))
        peer.channel.close()
        for address, roots in ((server.address, None), (server.address.replace("+tls", ""), pem)):
            with pytest.raises(ConnectionError, match="does not answer"):
                Peer(FlightTransport(address, server.token, roots))
        with pytest.raises(PermissionError, match="the token is missing or wrong"):
            Peer(FlightTransport(server.address, "wrong", pem))


def test_other_machines_need_a_token_and_tls(certificate, monkeypatch):
    monkeypatch.delenv("TRITONEMB_TOKEN", raising=False)
    files = {"certificate": certificate / "pem", "key": certificate / "key"}
    for address in ("grpc://0.0.0.0:0", "grpc://[::]:0", "grpc://:0", "grpc://10.1.2.3:0", "grpc://some.host:0"):
        for token in (None, "", "secret"):
            with pytest.raises(
                ValueError, match=r"other machines can reach .* set TRITONEMB_TOKEN, and serve at grpc\+tls"
            ):
                FlightServer(Echo(), address, token)
        with pytest.raises(ValueError, match="other machines can reach"):
            FlightServer(Echo(), address.replace("grpc", "grpc+tls"), **files)
    with pytest.raises(ValueError, match="TLS needs a grpc"):
        FlightServer(Echo(), "grpc+tls://0.0.0.0:0", "secret")
    with pytest.raises(ValueError, match=r"invalid address '0\.0\.0\.0:0'"):
        FlightServer(Echo(), "0.0.0.0:0")
    monkeypatch.setenv("TRITONEMB_TOKEN", "secret")
    with FlightServer(Echo(), "grpc+tls://0.0.0.0:0", **files) as server:
        assert server.token == "secret"
    for address in ("grpc://127.0.0.2:0", "grpc://localhost:0"):
        with FlightServer(Echo(), address) as server:
            peer = Peer(FlightTransport(server.address, "secret"))
            assert peer.ask({"a": 1}) == ({"a": 1}, [])
            peer.channel.close()


def test_an_address_may_be_host_and_port_alone(server):
    full = {"rows-0:9000": "grpc+tls://rows-0:9000", "10.0.0.1:9000": "grpc+tls://10.0.0.1:9000",
            "localhost:9000": "grpc://localhost:9000", "127.0.0.1:9000": "grpc://127.0.0.1:9000",
            "[::1]:9000": "grpc://[::1]:9000"}  # fmt: skip
    assert {address: flight.complete_address(address) for address in full} == full
    for address in ("grpc://rows-0:9000", "rows-0", "rows-0:", ":9000", "9000", "http://rows-0:9000"):
        assert flight.complete_address(address) == address
    with connect([server.address.removeprefix("grpc://")], token="secret") as servers:
        assert servers.addresses == [server.address]
    with pytest.raises(ValueError, match="invalid address 'localhost': expected grpc://HOST:PORT"):
        connect(["localhost"])


def test_a_port_in_use_is_said(server):
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(OSError, match=rf"cannot serve at grpc://127\.0\.0\.1:{port}: .* is the port in use\?"):
        FlightServer(Echo(), server.address)
    with pytest.raises(OSError, match=rf"cannot serve metrics at 127\.0\.0\.1:{port}: Address already in use"):
        MetricsServer(port, str)


def test_an_error_of_the_service_ends_one_channel(server):
    first, second = (Peer(FlightTransport(server.address, "secret")) for _ in range(2))
    with suppress(ConnectionError):
        for _ in range(50):
            first.channel.send(({"fail": "no such table"}, []))
    assert "KeyError: 'no such table'" in str(first.lost.get(timeout=DEADLINE))
    assert second.ask({"a": 1}) == ({"a": 1}, [])
    second.channel.close()
    assert threads_end()
    assert first.lost.empty()


@pytest.mark.parametrize(
    "message",
    [
        ({}, b""),
        ({"values": {}, "tensors": [["complex64", [1]]]}, b"12345678"),
        ({"values": {}, "tensors": [["float32", [-1]]]}, b"1234"),
        ({"values": {}, "tensors": [["float32", [1]]]}, b"12345678"),
        ({"values": {}, "tensors": [["storage", [1]]]}, b"12345678"),
    ],
)
def test_what_is_no_message_ends_the_stream(server, message):
    stream = Client(server.address, "secret").exchange()
    stream.send([message])
    with pytest.raises(Exception, match=r".") as caught:
        next(stream.receive())
    assert not isinstance(caught.value, ConnectionError | StopIteration)
    stream.cancel()
    stream.end()


def test_a_client_that_does_not_read_blocks_no_other_client(server):
    """Not even if one thread answers all: the replies to the first client wait in a thread of its channel."""
    service, large, resume = Later(), torch.zeros(32 << 20, dtype=torch.uint8), threading.Event()
    with FlightServer(service, token=server.token) as other_server:
        way = FlightTransport(other_server.address, server.token)
        slow, peer = way.open(lambda message: resume.wait(DEADLINE), lambda error: None), Peer(way)
        for number in range(3):
            slow.send(({"number": number}, []))
        replies = [service.received.get(timeout=DEADLINE)[1] for _ in range(3)]
        peer.channel.send(({"number": 3}, []))
        replies.append(service.received.get(timeout=DEADLINE)[1])

        def answer() -> None:
            for reply, tensors in zip(replies, [*[[large]] * 3, []], strict=True):
                reply(({}, tensors))

        threading.Thread(target=answer, daemon=True).start()
        assert peer.replies.get(timeout=DEADLINE) == ({}, [])
        resume.set()
        slow.close()
        peer.channel.close()


def test_closing_a_server_ends_its_channels(monkeypatch):
    server = FlightServer(Echo())
    peers = [Peer(FlightTransport(server.address, server.token)) for _ in range(2)]
    blocked, gate, left = (threading.Event() for _ in range(3))
    channel = FlightTransport(server.address, server.token).open(
        lambda _: (blocked.set(), gate.wait(DEADLINE), left.set()), lambda _: None
    )
    channel.send(({}, []))
    assert blocked.wait(DEADLINE)
    assert peers[0].ask({}) == ({}, [])
    monkeypatch.setattr(flight, "TIMEOUT", 0.5)  # one client takes nothing
    server.close()
    server.close()
    assert not left.is_set()
    gate.set()
    for peer in peers:
        assert "the server has been closed" in peer.ends()
    with pytest.raises(ConnectionError, match="does not answer"):
        Peer(FlightTransport(server.address, server.token))


SERVER = """
from tritonemb.flight import start_server

def exchange(stream):
    for values, _ in stream.receive():
        stream.send([(values | {"tensors": []}, b"")])

server = start_server(None, "grpc://127.0.0.1:0", "secret", exchange=exchange)
print(server.port, flush=True)
server.serve()
"""


def test_a_server_that_is_killed_loses_its_channels():
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", SERVER], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        address = f"grpc://127.0.0.1:{int(process.stdout.readline())}"
        idle, busy = (Peer(FlightTransport(address, "secret")) for _ in range(2))
        failed = threading.Event()

        def send():
            try:
                while True:
                    busy.channel.send(({}, [torch.ones(100_000)]))
            except ConnectionError:
                failed.set()

        threading.Thread(target=send, daemon=True).start()
        for _ in range(3):
            busy.replies.get(timeout=DEADLINE)
        process.kill()
        assert failed.wait(DEADLINE)
        for peer in (idle, busy):
            assert f"{address} does not answer" in peer.ends()
        with pytest.raises(ConnectionError, match=f"{address} does not answer"):
            Peer(FlightTransport(address, "secret"))
    finally:
        process.kill()
        process.communicate()


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(flight, "TIMEOUT", 0.4)
    gate, left = threading.Event(), threading.Event()

    class Busy(pyarrow.flight.FlightServerBase):
        def do_exchange(self, *_):
            gate.wait(DEADLINE)
            left.set()

    with socket.create_server(("127.0.0.1", 0)) as silent, Busy("grpc://127.0.0.1:0") as busy:
        for port in (silent.getsockname()[1], busy.port):
            with pytest.raises(ConnectionError, match="does not answer"):
                Peer(FlightTransport(f"grpc://127.0.0.1:{port}", "secret"))
        assert not left.is_set()
        gate.set()
    assert threads_end()


def test_calls_beside_the_channels(server):
    def answer(request):
        yield {"asked": request["action"]}, b""

    with pytest.raises(ValueError, match="does not support this kind of request"):
        Client(server.address, "secret").call("health")
    calls = start_server(answer, "grpc://127.0.0.1:0", "secret")
    assert Client(f"grpc://127.0.0.1:{calls.port}", "secret").call("health") == {"asked": "health"}
    peer = Peer(FlightTransport(f"grpc://127.0.0.1:{calls.port}", "secret"))
    assert "does not support this kind of request" in peer.ends()
    calls.stop()
