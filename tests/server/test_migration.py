"""Tablets that move between servers during training: results are bitwise those of a run without moves or failures."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch

import tritonemb as te
from tests.helpers import DEADLINE
from tests.server import jobs
from tests.server.jobs import local_servers, make, same, train, train_all, train_on
from tritonemb import cli
from tritonemb.server import Servers, connect, flush, launch, migration, transport
from tritonemb.server.attach import attach_for_reading
from tritonemb.server.connection import Connection
from tritonemb.server.metrics import totals
from tritonemb.server.migration import move_tablet, next_move, rebalance
from tritonemb.server.node import EmbeddingServer
from tritonemb.server.transport import LocalTransport

NEVER = 10**9  # messages
DYNAMIC = {"capacity": 110, "eviction": te.EvictionConfig(protect=4)}
LFU = {"capacity": 90, "eviction": te.EvictionConfig("lfu", protect=4, ttl=6, half_life=3)}
FIRST = "tables#0-of-4"


@contextmanager
def tablet_servers(transports, nodes, number=4):
    """Two servers with tablets, and a third one that may join."""
    with jobs.quick_resending(), Servers(transports[:2], nodes, DEADLINE, tablets=number) as servers:
        third = Connection(transports[2], DEADLINE)
        servers.directory._by_address[transports[2].address] = third
        servers.connections.append(third)
        yield servers


@contextmanager
def three(tmp_path=None, log=None, faults=None):
    """Transports of three servers, these servers, and the connections of a trainer."""
    if tmp_path is not None:
        local = transports = [KilledAt(tmp_path / f"server-{index}", log, NEVER) for index in range(3)]
    else:
        local = [EmbeddingServer(f"server-{index}") for index in range(3)]
        transports = [
            LocalTransport(server, server.name) if faults is None else jobs.FaultyTransport(server, faults, index)
            for index, server in enumerate(local)
        ]
    with tablet_servers(transports, local) as servers:
        yield transports, local, servers


class KilledAt(jobs.Restarted):
    """A server that is killed by one message, before or after it has executed it, and started again."""

    killer: str | None = None  # operation
    executed = False

    def receive(self, message, reply) -> None:
        if message[0]["op"] != self.killer:
            super().receive(message, reply)
            return
        self.killer, lost, self.server = None, self.server, None
        if self.executed:
            lost.receive(message, lambda answer: None)
        self._restarting = threading.Thread(target=self.restart, args=(lost,))
        self._restarting.start()


def tablet_counts(nodes) -> list[int]:
    """Return the number of tablets on each server; fail if a tablet has two owners."""
    servers = [getattr(server, "server", server) for server in nodes]
    keys = [key for server in servers for key in server.collections if "~" not in key]
    assert len(keys) == len(set(keys)), "two owners"
    return [sum("~" not in key for key in server.collections) for server in servers]


def at_steps(actions):
    """Callback that calls each action once, before the batch of its number."""
    count, lock = 0, threading.Lock()

    def on_step() -> None:
        nonlocal count
        with lock:
            count += 1
            action = actions.pop(count, None)
            if action is not None:
                action()

    return on_step


CASES = {
    "two trainers": {"trainers": 2, "dynamic": DYNAMIC},
    "staleness": {"trainers": 2, "staleness": 3, "ahead": 2, "dynamic": DYNAMIC},
    "leased rows": {"ahead": 1, "cache": 1, "dynamic": LFU},
    "worker cache": {"staleness": 2, "ahead": 1, "cache": 200, "dynamic": DYNAMIC},
    "bound": {"staleness": te.AtMost(2), "dynamic": DYNAMIC},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.few(2)
def test_servers_that_join_and_leave_change_no_bit(case):
    expected = train_on(2, 14, **case)
    with three() as (transports, local, servers):
        counts = []

        def move(leaving=()):
            rebalance(transports, leaving)
            counts.append(tablet_counts(local))

        trainers = case.get("trainers", 1)
        moves = {
            4 * trainers: move,
            8 * trainers: lambda: move(["server-0"]),
            12 * trainers: lambda: move(["server-1", "server-2"]),
        }
        same(train_all(servers, 14, on_step=at_steps(moves), **case), expected)
        assert [sorted(count) for count in counts] == [[1, 1, 2], [0, 2, 2], [0, 0, 4]]
        assert [count[0] for count in counts][1:] == [0, 4]


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(6))
def test_tablets_that_move_all_the_time_over_a_bad_network(seed):
    """While batches are pulled and pushed by two trainers."""
    options = {"trainers": 2, "staleness": 2, "ahead": 1, "dynamic": DYNAMIC}
    expected = train_on(2, 20, **options)
    with three(faults=jobs.Faults(lost=0.02, twice=0.05, late=0.1, cut=0.01)) as (transports, _, servers):
        stopped, problems, num_moves = threading.Event(), [], 0

        def move() -> None:
            nonlocal num_moves
            try:
                while not stopped.is_set():
                    for leaving in ([], ["server-0"], ["server-1"]):
                        num_moves += rebalance(transports, leaving)
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=move)
        on_step = at_steps({2: thread.start})
        try:
            actual = train_all(servers, 20, on_step=on_step, **options)
        finally:
            stopped.set()
            thread.join()
        same(actual, expected)
        assert not problems
        assert num_moves > 2


MOMENTS = [(op, executed) for op in ("fetch_tablet", "stage_tablet", "commit_move", "spec") for executed in (0, 1)]


@pytest.mark.few(1)
@pytest.mark.parametrize("log", ["disk", "fsync"])
@pytest.mark.parametrize("case", ["staleness", "leased rows"])
@pytest.mark.parametrize(("op", "executed"), MOMENTS)
def test_a_source_or_a_target_that_is_killed_changes_no_bit(tmp_path, log, case, op, executed):
    case = CASES[case]
    expected = train_on(2, 12, **case)
    with three(tmp_path, log) as (transports, local, servers):
        victims = local[:2] if op in ("fetch_tablet", "commit_move") else local[2:]

        def move() -> None:
            for victim in victims:
                victim.killer, victim.executed = op, bool(executed)
            for _ in range(4):
                with suppress(ValueError):  # undone
                    rebalance(transports)
                    break
            assert max(victim.times for victim in victims) == 1
            assert sorted(tablet_counts(local)) == [1, 1, 2]
            assert not any("~" in key for server in local for key in server.server.collections)
            for server in local:
                server.restart()
            assert sorted(tablet_counts(local)) == [1, 1, 2]

        same(train_all(servers, 12, on_step=at_steps({5: move}), **case), expected)


class Killed(BaseException):
    """End of a coordinator."""


class MortalConnection:
    """Connection of a coordinator that is killed by the reply to its first message of an operation."""

    def __init__(self, connection, op):
        self.connection, self._op = connection, op

    def query_tensors(self, op, values, tensors, timeout):
        reply = self.connection.query_tensors(op, values, tensors, timeout)
        if op == self._op:
            raise Killed
        return reply

    def query(self, op, timeout=10.0, **values):
        return self.query_tensors(op, values, [], timeout)[0]


@pytest.mark.parametrize("op", ["fetch_tablet", "stage_tablet", "commit_move"])
@pytest.mark.parametrize("case", ["staleness", "leased rows"])
@pytest.mark.few(1)
def test_a_coordinator_that_is_killed_changes_no_bit(op, case, monkeypatch):
    """Training continues without it; another one completes the move or starts again."""
    monkeypatch.setattr(migration, "MAX_SUSPENSION", 0.5)
    case = CASES[case]
    expected = train_on(2, 12, **case)
    with three() as (transports, local, servers):

        def move() -> None:
            source, target = (Connection(transports[n], DEADLINE) for n in (0, 2))
            with source, target, pytest.raises(Killed):
                move_tablet(*(MortalConnection(item, op) for item in (source, target)), FIRST)
            assert tablet_counts(local)[:2] == ([1, 2] if op == "commit_move" else [2, 2])

        def move_again() -> None:
            if op != "commit_move":
                assert tablet_counts(local) == [2, 2, 0]
                assert not local[0].departures
            assert tablet_counts(local)[2] == (op == "commit_move")  # a request of the trainer has activated it
            rebalance(transports)
            assert sorted(tablet_counts(local)) == [1, 1, 2]

        trainers = case.get("trainers", 1)
        moves = {4 * trainers: move, 9 * trainers: move_again}
        same(train_all(servers, 12, on_step=at_steps(moves), **case), expected)


def test_a_move_that_was_undone_cannot_be_committed(monkeypatch):
    """Neither by a coordinator that was silent for too long, nor by messages that arrive late."""
    with three() as (_, local, servers):
        model = make(servers, 1)
        train(model, 2)
        source, target = (jobs.RawClient(local[n]) for n in (0, 2))
        ticket = {"collection": FIRST, "ticket": "11" * 16}
        assert "undone" in source.query("commit_move", address="server-2", **ticket)["error"]["message"]
        monkeypatch.setattr(migration, "MAX_SUSPENSION", -1.0)
        assert "error" not in source.query("fetch_tablet", record=0, **ticket)
        monkeypatch.undo()
        train(model, 1)
        for op in ({"op": "commit_move", "address": "server-2"}, {"op": "fetch_tablet", "record": 1}):
            assert "undone" in source.query(**op, **ticket)["error"]["message"]
        assert "error" not in source.query("fetch_tablet", record=0, **ticket)  # late
        assert "undone" in source.query("commit_move", address="server-2", **ticket)["error"]["message"]
        other = {**ticket, "ticket": "22" * 16}
        assert "moves it already" in source.query("fetch_tablet", record=0, **other)["error"]["message"]
        assert source.query("release_tablet", **ticket) == {"query": 0, "is_committed": False}
        for changes in ({"collection": "../x"}, {"ticket": "../x"}, {"offset": "x"}, {"offset": -1}, {"values": 3}):
            values = {**ticket, "offset": 0, "values": {}, **changes}
            assert "error" in target.query("stage_tablet", **values), changes
        assert "error" in target.query("stage_tablet", **ticket, offset=50, values={"end": ""})  # no header
        assert tablet_counts(local) == [2, 2, 0]
        assert not local[2].collections
        train(model, 1)


def test_a_client_that_was_away_finds_its_tablets():
    """Those that have come back, those that have moved twice; also if it knows the first servers alone."""
    with local_servers(2) as servers:
        model = make(servers, 2, dynamic=DYNAMIC)
        expected = train(model, 3), train(model, 3), train(model, 3)
        flush(model)
        expected_state = model.state_dict()
    with three() as (transports, _, servers):
        model = make(servers, 2, dynamic=DYNAMIC)
        results = [train(model, 3)]
        for leaving in ([], ["server-0"], ["server-2"], ["server-1"]):
            rebalance(transports, leaving)
        results.append(train(model, 3))
        rebalance(transports, ["server-0", "server-1"])
        with Servers(transports) as peers, torch.no_grad():  # the number of tablets is known to the servers
            reader = make(peers, dynamic=DYNAMIC, attached=False)
            attach_for_reading(reader, peers)
            rebalance(transports, ["server-2"])
            initial = reader(next(jobs.batches(1)))
            rebalance(transports, ["server-1"])
            assert torch.equal(reader(next(jobs.batches(1))), initial)
            with pytest.raises(ValueError, match=r"is read by id from embedding servers; load its checkpoint"):
                te.quantize(reader)
        results.append(train(model, 3))
        flush(model)
        same((results, model.state_dict()), (list(expected), expected_state))
        statistics = totals(servers.statistics())["tables"]
        assert (statistics["steps"], list(statistics["tables"])) == (9, ["a", "b", "d"])


@pytest.mark.parametrize("into_tablets", [False, True])
def test_a_checkpoint_of_tablets_is_one_of_servers(tmp_path, into_tablets):
    """Full, then incremental behind a move; also of servers without tablets, which are loaded into tablets."""
    with local_servers(2) as servers:
        model = make(servers, 1, dynamic=DYNAMIC)
        train(model, 5)
        train(model, 2)
        expected = [train(model, 3)]
        flush(model)
        state = model.state_dict()
    with three() as (transports, _, tablets), local_servers(2) as plain:
        model = make(plain if into_tablets else tablets, 1, dynamic=DYNAMIC)
        train(model, 5)
        model.table_set.service.snapshot(tmp_path / "first-")
        if not into_tablets:
            rebalance(transports, ["server-0"])
        train(model, 2)
        names = model.table_set.service.snapshot(tmp_path / "second-", changes_only=True)
        is_full = [name["after"] is None for name in names]  # as a tablet that has moved is
        assert is_full == [False] * 2 if into_tablets else sorted(is_full) == [False] * 2 + [True] * 2
        chains = [
            [tmp_path / f"{name}-{n}.server" for name in ("first", "second")[is_full[n] :]] for n in range(len(names))
        ]
        model = make(tablets if into_tablets else plain, 1, dynamic=DYNAMIC)
        model.table_set.service.restore(chains, 7)
        model.step.fill_(7)
        same(([train(model, 3)], flush(model) or model.state_dict()), (expected, state))


def test_servers_of_other_tablets_are_refused():
    with three() as (transports, _, servers):
        make(servers, 1)
        with (
            Servers(transports, tablets=2) as peers,
            pytest.raises(ValueError, match="have 4 tablets, got tablets=2; pass"),
        ):
            make(peers, 1)
    with local_servers(1) as servers:
        make(servers, 1)
        transports = [connection.transport for connection in servers.connections]
        with Servers(transports, tablets=2) as peers, pytest.raises(ValueError, match="have None tablets"):
            make(peers, 1)

    class Others(jobs.Trainers):
        def all_gather_object(self, value):
            return [value, value[::-1] if value and isinstance(value[0], str) else value]

    with three() as (_, _, servers), pytest.raises(ValueError, match="pass all trainers the same addresses"):
        make(servers, 1, group=Others())


def test_the_next_move_makes_each_collection_even():
    a, b = ([f"{name}#{n}-of-5" for n in range(5)] for name in "ab")
    keys = [[*a[:3], "c"], [*a[3:], *b], ["c"]]
    sizes = []
    for leaving in ([0, 0, 0], [0, 1, 0]):
        while (move := next_move(keys, leaving)) is not None:
            source, target, key = move
            keys[source].remove(key)
            keys[target].append(key)
        sizes.append([[sum(key.startswith(name) for key in item) for item in keys] for name in "abc"])
    assert sizes[0] == [[2, 2, 1], [2, 1, 2], [1, 0, 1]] or sorted(map(sorted, sizes[0])) == [
        [0, 1, 1],
        [1, 2, 2],
        [1, 2, 2],
    ]
    assert [sorted(size) for size in sizes[1]] == [[0, 2, 3], [0, 2, 3], [0, 1, 1]]
    assert [size[1] for size in sizes[1]] == [0, 0, 0]


def test_servers_that_trainers_cannot_reach_get_no_tablets():
    with three() as (transports, local, servers):
        make(servers, 1)
        for name in ("grpc+tls://0.0.0.0:9000", local[0].name):  # also two with one address
            local[2].name = name
            with pytest.raises(ValueError, match="start each with --advertise"):
                rebalance(transports)
        assert tablet_counts(local) == [2, 2, 0]


def test_a_request_of_an_earlier_stay_is_not_executed():
    """It may have been sent before one that was answered with a route; the client sends both again, in order."""
    with three() as (transports, local, servers):
        model = make(servers, 1)
        train(model, 2)
        rebalance(transports, ["server-0"])
        rebalance(transports, ["server-1", "server-2"])
        assert tablet_counts(local) == [4, 0, 0]
        raw = jobs.RawClient(local[0])
        route = raw.send("read", collection=FIRST, ticket=None, table="a")["moved"]
        assert route["address"] == "server-0"
        assert "names" in raw.send("read", collection=FIRST, ticket=route["ticket"], table="a")
        train(model, 2)


def test_clients_that_keep_the_log_keep_the_tablets(tmp_path):
    """A server that was started again lacks what they have yet to send again."""
    with three(tmp_path, "memory") as (transports, local, servers):
        model = make(servers, 1)
        train(model, 2)
        with pytest.raises(ValueError, match=r'tablets cannot leave .* which has log="memory"; use "disk"'):
            rebalance(transports)
        assert tablet_counts(local) == [2, 2, 0]


def test_a_target_without_memory_leaves_the_tablet_where_it_is():
    with three() as (transports, local, servers):
        model = make(servers, 1)
        train(model, 2)
        local[2].quota.__dict__["memory"] = 100.0
        with pytest.raises(ValueError, match="bytes left for tables"):
            rebalance(transports)
        assert tablet_counts(local) == [2, 2, 0]
        assert not local[0].departures
        train(model, 2)


@pytest.mark.more
def test_a_process_joins_and_leaves(monkeypatch, capsys):
    """By the commands; trainers learn of it by themselves."""
    pytest.importorskip("pyarrow.flight")
    monkeypatch.setenv("TRITONEMB_TOKEN", "11" * 16)
    kwargs = {"trainers": 2, "staleness": 2, "ahead": 1, "dynamic": DYNAMIC}
    expected = train_on(2, 12, **kwargs)
    with ExitStack() as stack:
        local = [stack.enter_context(EmbeddingServer()) for _ in range(2)]
        for server in local:
            server.name = stack.enter_context(transport.FlightServer(server)).address
        addresses = [server.name for server in local]
        servers = stack.enter_context(connect(addresses, tablets=4))
        lines = []

        def join() -> None:
            options = ["-m", "tritonemb", "embedding-server", "--join", *addresses]
            process = launch.start_python(options, {launch.STARTED_BY: str(os.getpid())})
            stack.callback(lambda: process.kill() or process.communicate())
            lines.extend(process.stdout.readline() for _ in range(2))

        def leave() -> None:
            address = lines[0].split()[-1]
            assert cli.main(["embedding-server", "--leave", address, "--join", *addresses]) == 0
            assert [len(server.collections) for server in local] == [2, 2]

        actual = train_all(servers, 12, on_step=at_steps({6: join, 14: leave}), **kwargs)
        assert lines[1] == capsys.readouterr().out == "1 tablets have moved\n"
        assert len(servers) == 3
        same(actual, expected)
