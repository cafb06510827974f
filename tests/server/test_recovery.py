"""Servers that are lost and started again, snapshots, and other numbers of servers: the bits of an undisturbed run."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

import tritonemb as te
from tests.helpers import DEADLINE, assert_same_bits
from tests.server import jobs
from tests.server.jobs import RawClient, Trainers, batches, local_servers, make, restarted, same, train, train_all
from tritonemb.server import Servers, attach, connection, durable, flush
from tritonemb.server.connection import HEARTBEAT
from tritonemb.server.durable import MessageLog, read_log
from tritonemb.server.node import EmbeddingServer
from tritonemb.server.snapshot import read_records, write_record
from tritonemb.server.transport import LocalTransport
from tritonemb.serving import Follower, Publisher
from tritonemb.storage import StorageError
from tritonemb.utils import atomic_write

NEVER = 10**9  # messages
DYNAMIC = {"capacity": 110, "eviction": te.EvictionConfig(protect=4)}
OF_IDS = {"capacity": 90, "eviction": te.EvictionConfig("lfu", protect=4, ttl=6, half_life=3)}
SMALL = {"capacity": 50, "eviction": te.EvictionConfig(protect=3)}


@pytest.mark.few(1)
@pytest.mark.parametrize("log", ["memory", "disk", "fsync"])
@pytest.mark.parametrize(
    "how",
    [
        {"trainers": 2, "dynamic": DYNAMIC},
        {"trainers": 2, "staleness": 3, "ahead": 1, "dynamic": DYNAMIC},
        {"ahead": 1, "cache": 1, "dynamic": OF_IDS},
    ],
    ids=["two trainers", "staleness", "leased rows"],
)
def test_lost_servers_change_no_bit(tmp_path, log, how):
    expected = jobs.train_on(2, 12, **how)
    with restarted(tmp_path, log) as (servers, local):
        same(train_all(servers, 12, **how), expected)
    assert min(server.times for server in local) > 2


@pytest.mark.more
def test_the_state_is_saved_when_clients_keep_too_much(tmp_path):
    expected = jobs.train_on(1, 12, dynamic=DYNAMIC)
    with restarted(tmp_path, "memory", 1, NEVER) as (servers, _):
        connection = servers.connections[0]
        connection._max_replay_bytes = 4_000
        same(train_all(servers, 12, dynamic=DYNAMIC), expected)
        assert connection._replay_bytes < 12_000
        names = [path.name for path in (tmp_path / "server-0").iterdir()]
        assert len([name for name in names if name.endswith(".rows")]) > 1  # changes only


def test_a_server_that_has_lost_its_folder_ends_training(tmp_path):
    message = "was restarted without its snapshot or log, and lost requests; resume from a checkpoint"
    with (
        restarted(tmp_path, "disk", every=20, lose=True) as (servers, _),
        pytest.raises(ConnectionError, match=message),
    ):
        train_all(servers, 30)


def test_a_server_that_was_closed_is_gone():
    server = EmbeddingServer("s")
    with Servers([LocalTransport(server)], patience=0.5) as servers:
        server.close()
        with pytest.raises(ConnectionError, match="has not answered for"):
            servers.connections[0].submit("save", {}).result(DEADLINE)


def test_connections_are_closed_if_another_server_does_not_answer():
    server, channels = EmbeddingServer("s"), []

    class Recorded(LocalTransport):
        def open(self, receive, lost):
            if channels:
                raise ConnectionError("refused")
            channels.append(super().open(receive, lost))
            return channels[0]

    with pytest.raises(ConnectionError, match="refused"):
        Servers([Recorded(server), Recorded(server)], [server])
    with pytest.raises(ConnectionError, match="closed"):
        channels[0].send(({}, []))
    assert not server._thread.is_alive()


def test_a_connection_that_is_closed_while_it_opens():
    server, opened = EmbeddingServer("s"), []
    with Servers([LocalTransport(server)], [server]) as servers:
        (client,) = servers.connections
        transport = client.transport

        class ClosedMeanwhile:
            address = "s"

            def open(self, receive, lost):
                client.close()
                opened.append(transport.open(receive, lost))
                return opened[0]

        client.transport = ClosedMeanwhile()
        client._open()
    with pytest.raises(ConnectionError, match="closed"):
        opened[0].send(({}, []))


def test_a_torn_record_is_left_out_and_a_damaged_one_is_not(tmp_path):
    path = tmp_path / "log"
    messages = [({"n": n}, [torch.arange(n), torch.tensor(1.5, dtype=torch.bfloat16)]) for n in range(3)]
    with path.open("wb") as file:
        ends = []
        for message in messages:
            write_record(file, message)
            ends.append(file.tell())
    whole = path.read_bytes()
    for end in range(ends[1], ends[2]):
        path.write_bytes(whole[:end])
        assert [values["n"] for values, _ in read_records(path, torn=True)] == [0, 1]
        if end > ends[1]:
            with pytest.raises(StorageError, match="damaged at byte"):
                list(read_records(path))
    for at in range(ends[0], ends[1], 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        with pytest.raises(StorageError, match=f"damaged at byte {ends[0]}"):
            list(read_records(path, torn=True))
    path.write_bytes(whole)
    for (values, tensors), (inputs, peers) in zip(read_records(path), messages, strict=True):
        assert values == inputs
        assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(tensors, peers, strict=True))


def test_a_damaged_record_of_a_log_is_not_taken_for_a_torn_one(tmp_path):
    """Whichever bit is flipped, also of the last record: what was acknowledged is read, or is missed."""
    messages = [({"n": n}, [torch.arange(n), torch.tensor(1.5)]) for n in range(3)]
    with MessageLog(tmp_path / "log", durable=True) as log:
        for item in (messages[:2], messages[2:]):
            log.append(item)
    content = (tmp_path / "log").read_bytes()
    refused = 0
    for at in range(0, len(content), 3):
        (tmp_path / "log").write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        try:
            assert [values["n"] for values, _ in read_log(tmp_path / "log")] == [0, 1, 2]
        except StorageError:
            refused += 1
    assert refused > len(content) / 4
    (tmp_path / "log").write_bytes(content[:-60])  # a torn one
    assert [values["n"] for values, _ in read_log(tmp_path / "log")] == [0, 1]


RENAMED = """
    describe=facts lease=hold allocate=assign transfer=move next_sequence=expected replied=answered in_progress=undone
    is_leased=held partition_starts=owners shards=parts row_codec=rows_in gradient_codec=gradients_in
"""
EARLIER_NAMES = dict(pair.split("=") for pair in RENAMED.split())


def with_earlier_names(value):
    if isinstance(value, dict):
        items = {EARLIER_NAMES.get(key, key): with_earlier_names(item) for key, item in value.items()}
        return items | ({"op": EARLIER_NAMES.get(value["op"], value["op"])} if "op" in value else {})
    return [with_earlier_names(item) for item in value] if isinstance(value, list) else value


def test_files_of_earlier_versions_are_read(tmp_path):
    """Operations in the log, and keys of snapshots, clients' records and collections had other names."""
    with local_servers(1) as servers:
        model = make(servers, dynamic=OF_IDS, cache=1)
        expected = train(model, 3), train(model, 4), train(model, 5), flush(model) or model.state_dict()
    with restarted(tmp_path, "disk", 1, NEVER) as (servers, (local,)):
        model, raw = make(servers, dynamic=OF_IDS, cache=1), RawClient(local.server)
        results = [train(model, 3)]
        # A pull that waits for a second trainer is in progress when the snapshot is saved.
        spec = asdict(replace(local.server.collections["tables"].spec, trainers=2, staleness=2))
        values = {"client": "raw", "received": 0, "collection": "two", "rank": 0}
        raw.send("create", spec=spec, server=0, **values)
        local.server.receive(({"op": "pull", "number": 1, **PULL, "sizes": [3, 0, 0], **values}, [IDS, ONES]), print)
        servers.connections[0].submit("save", {}).result()
        results.append(train(model, 4))
        local.server.close()
        written = ""
        for path in (tmp_path / "server-0").iterdir():
            if path.name.startswith(("clients-", "log-")) or path.suffix == ".rows":
                content = [(with_earlier_names(values), tensors) for values, tensors in read_records(path)]
                with path.open("wb") as file:
                    for message in content:
                        write_record(file, message)
                written += repr([values for values, _ in content])
        assert {name for name in EARLIER_NAMES.values() if repr(name) not in written} <= {"facts", "hold", "answered"}
        local.server = EmbeddingServer("server-0", tmp_path / "server-0", "disk")
        assert list(local.server.clients.inboxes["raw"].in_progress) == [1]
        assert local.server.collections["tables"].lease.is_active
        results.append(train(model, 5))
        flush(model)
        same((results, model.state_dict()), (list(expected[:3]), expected[3]))


def test_a_server_that_is_lost_again_behind_a_torn_record_is_started_a_third_time(tmp_path):
    with restarted(tmp_path, "disk", 1, NEVER) as (servers, _):
        train(make(servers, 2), 4)
    (log,) = (tmp_path / "server-0").glob("log-*")
    log.write_bytes(log.read_bytes()[:-60])
    for _ in range(2):
        with restarted(tmp_path, "disk", 1, NEVER) as (servers, (local,)):
            make(servers, 2)  # something is logged
            assert local.server.collections["tables"].ordering.next_pull == 4


@pytest.mark.parametrize("log", ["memory", "disk"])
def test_an_answer_that_may_be_lost_stays_until_it_is_acknowledged(tmp_path, log):
    """Also over a restart."""
    with EmbeddingServer("server-0", tmp_path, log) as server:
        raw = RawClient(server)
        first, _ = raw.send("save"), raw.send("save")
        server.save()
    with EmbeddingServer("server-0", tmp_path, log) as server:
        raw.server, version = server, server.durable.version
        assert list(server.clients.inboxes["raw"].unacked_replies) == [0, 1]
        assert raw.receive({"op": "resend", "number": 0, "received": 0})[0] == first
        assert server.durable.version == version
        raw.receive({"op": "save", "number": 2, "received": 1})
        assert list(server.clients.inboxes["raw"].unacked_replies) == [1, 2]


def test_a_client_acknowledges_what_it_has_received_alone():
    with local_servers(1) as servers:
        connection, server, selection = servers.connections[0], servers._local_servers[0], {}
        receive, acknowledged = server.receive, []

        def keep(message, reply):
            if (number := message[0].get("number")) is not None and number not in selection:
                selection[number] = reply
                acknowledged.append(message[0]["received"])

        server.receive = keep
        for number in range(5):
            connection.submit("save", {})
            if number in (1, 3):  # later ones are answered first
                selection[number](({"number": number, "durable_sequence": 0}, []))
            if number == 3:
                selection[0](({"number": 0, "durable_sequence": 0}, []))
        assert acknowledged == [0, 0, 0, 0, 2]
        server.receive = receive


def test_a_chain_that_nobody_goes_on_with_is_bounded(tmp_path):
    """The server's own has one snapshot, as there is no log; those that are published stay right."""
    server = EmbeddingServer("server-0", tmp_path / "rows")
    with Servers([LocalTransport(server, "server-0")], [server]) as servers:
        dynamic = {"capacity": 50, "placement": "server", "eviction": te.EvictionConfig(protect=3)}
        tables = [te.TableConfig(name, None, 4, **dynamic) for name in "de"]
        model = te.nn.EmbeddingBagCollection(tables, te.optim.SGD(lr=0.1))
        attach(model, servers, 1)
        (served,) = server.collections.values()
        publisher, room = Publisher(tmp_path / "published"), len(served.partitions.dynamic[0].index.ids)
        for step in range(30):
            ids = torch.cat([torch.arange(10 * step, 10 * step + 10), torch.arange(2)])
            model(te.KeyedJaggedTensor(["d", "e"], ids, lengths=torch.tensor([10, 2]))).sum().backward()
            if step % 5 == 4:
                publisher.publish(model)
        assert list(served.partitions.changes.chains) == ["published"]
        assert sum(map(len, served.partitions.changes.chains["published"].removed[0])) <= room
        flush(model)
        publisher.publish(model)
        with Follower(tmp_path / "published", poll=None) as follower:
            for name in "de":
                saved = model.table_set.service.tensors(name)
                assert torch.equal(follower.tables[name].ids(), saved["ids"])
                assert torch.equal(follower.look_up({name: saved["ids"]})[name], saved["weight"])


@pytest.mark.few(1)
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (4, 1)])
def test_a_snapshot_goes_on_on_other_servers(tmp_path, before, after, staleness):
    """Whole, then changes only; rows were evicted between them."""
    with local_servers(2) as servers:
        model = make(servers, staleness, dynamic=SMALL)
        train(model, 6)
        train(model, 6)
        expected = [train(model, 5)]
        flush(model)
        state = model.state_dict()
    with local_servers(before) as servers:
        model = make(servers, staleness, dynamic=SMALL)
        train(model, 6)
        first = model.table_set.service.snapshot(tmp_path / "first-")
        train(model, 6)
        second = model.table_set.service.snapshot(tmp_path / "second-", changes_only=True)
        assert [item["after"] for item in second] == [item["snapshot"] for item in first]
        evictions = sum(
            s["collections"]["tables"]["tables"].get("d", {}).get("evictions", 0) for s in servers.statistics()
        )
        assert evictions > 0
    with local_servers(after) as servers:
        model = make(servers, staleness, dynamic=SMALL)
        chains = [[tmp_path / f"{name}-{n}.server" for name in ("first", "second")] for n in range(before)]
        model.table_set.service.restore(chains, 12)
        model.step.fill_(12)  # of the trainer's checkpoint
        same(([train(model, 5)], flush(model) or model.state_dict()), (expected, state))


def test_rows_evicted_from_other_partitions_stay_evicted_on_other_servers(tmp_path):
    """Each of the new servers reads the changes of all, with evicted ids of partitions that it does not have."""

    def steps(model, first, number):
        for step in range(first, first + number):
            ids = torch.arange(step * 4_000, (step + 1) * 4_000)
            output = model(te.KeyedJaggedTensor.from_lengths(["d"], ids, torch.ones(4_000, dtype=torch.int64)))
            output.square().sum().backward()

    def attached(servers):
        eviction = te.EvictionConfig(protect=1)
        table = te.TableConfig("d", None, 4, capacity=20_000, eviction=eviction, placement="server")
        collection = te.nn.EmbeddingBagCollection([table], te.optim.Adagrad(lr=0.1))
        attach(collection, servers)
        return collection

    with local_servers(2) as servers:
        model = attached(servers)
        steps(model, 0, 5)
        model.table_set.service.snapshot(tmp_path / "first-")
        steps(model, 5, 1)
        model.table_set.service.snapshot(tmp_path / "second-", changes_only=True)
        expected = model.state_dict()
    with local_servers(3) as servers:
        model = attached(servers)
        chains = [[tmp_path / f"{name}-{n}.server" for name in ("first", "second")] for n in range(2)]
        model.table_set.service.restore(chains, 6)
        restored = model.state_dict()
    assert len(expected["d.ids"]) < 24_000
    assert_same_bits(restored, expected)


@pytest.mark.parametrize("log", ["memory", "disk"])
@pytest.mark.few(1)
def test_servers_of_some_partitions_have_their_counts_and_fallback_rows_again(tmp_path, log):
    """Each server of a table with several partitions restores what it has saved, not the state of all."""
    policies = {"admission": te.AdmissionConfig(appearances=2), "fallback_rows": 64}

    def trained(servers, restart):
        torch.manual_seed(3)
        table = te.TableConfig("d", None, 4, capacity=20_000, placement="server", **policies)
        collection = te.nn.EmbeddingBagCollection([table], te.optim.Adagrad(lr=0.1))
        attach(collection, servers)
        outputs = []
        for step in range(4):
            if step == 2:
                flush(collection)
                restart()
            ids = torch.arange(500) * 7 + step // 3 * 1_500
            output = collection(te.KeyedJaggedTensor.from_lengths(["d"], ids, torch.ones_like(ids)))
            (output.square() + output).sum().backward()
            outputs.append(output.detach())
        flush(collection)
        return [outputs], {name: value.clone() for name, value in collection.state_dict().items()}

    with local_servers(2) as servers:
        expected = trained(servers, lambda: None)
    with restarted(tmp_path, log, 2, NEVER) as (servers, local):
        same(trained(servers, lambda: [server.restart() for server in local]), expected)


def test_snapshots_that_do_not_fit_are_refused(tmp_path):
    with local_servers(2) as servers:
        model = make(servers)
        train(model, 3)
        service = model.table_set.service
        service.snapshot(tmp_path / "a-")
        train(model, 1)
        service.snapshot(tmp_path / "b-", changes_only=True)
        train(model, 1)
        service.snapshot(tmp_path / "c-", changes_only=True)
        initial = model.state_dict()
        a, b, c = ([tmp_path / f"{name}-{n}.server" for n in range(2)] for name in "abc")
        for chains, message in (
            ([[a[0], c[0]], [a[1], c[1]]], "does not follow"),
            ([[b[0]], [b[1]]], "does not follow"),
            ([[a[0]], [a[1], b[1]]], "several steps"),
        ):
            with pytest.raises(OSError, match=message):
                service.restore(chains, 3)
        assert_same_bits(model.state_dict(), initial)
        other = make(servers, optimizer=te.optim.Adagrad(lr=0.1), group=Trainers()).table_set.service
        whole = a[0].read_bytes()
        a[0].write_bytes(whole[:-90])
        with pytest.raises(OSError, match=r"damaged|no end"):
            other.restore([[a[0]], [a[1]]], 3)
        assert_same_bits(model.state_dict(), initial)


@pytest.mark.parametrize("log", ["memory", "disk"])
def test_what_came_after_a_restored_checkpoint_is_not_lost(tmp_path, log):
    expected = jobs.outputs_on(1, 0, 5, 4, 1)[5:]
    with restarted(tmp_path, log, 1, NEVER) as (servers, (local,)):
        model = make(servers)
        train(model, 5)
        service = model.table_set.service
        service.snapshot(tmp_path / "a-")
        train(model, 3)
        service.restore([[tmp_path / "a-0.server"]], 5)
        actual = train(model, 4)
        flush(model)
        (tmp_path / "a-0.server").unlink()
        for _ in range(2):
            local.restart()
            assert local.server.collections["tables"].ordering.next_push == (9 if log == "disk" else 5)
        more = train(model, 1)
    same(([actual + more], {}), ([expected], {}))


def test_a_state_that_could_not_be_saved_costs_nothing(tmp_path, monkeypatch):
    """The next one is whole; what came before it is in the log."""
    with restarted(tmp_path, "disk", 1, NEVER) as (servers, (local,)):
        model = make(servers)
        train(model, 3)
        flush(model)  # its thread has nothing to do any more
        with monkeypatch.context() as patch:
            patch.setattr(durable, "atomic_write", raising(OSError(28, "No space left on device")))
            with pytest.raises(StorageError, match=r"could not save its state .* free disk space there"):
                local.server.save()
        train(model, 2)
        initial = model.state_dict()
        for _ in range(2):
            local.restart()
            assert_same_bits(model.state_dict(), initial)


def test_a_manifest_that_may_be_on_the_disk_ends_training_and_loses_nothing(tmp_path, monkeypatch):
    """A restart would read it, and not the log of the manifest before."""

    def write(*args):
        atomic_write(*args)
        raise OSError(5, "Input/output error")  # of the folder's fsync

    with restarted(tmp_path, "disk", 1, NEVER) as (servers, (local,)):
        model = make(servers)
        train(model, 3)
        flush(model)
        with monkeypatch.context() as patch:
            patch.setattr(durable, "atomic_write", write)
            with pytest.raises(StorageError, match="could not save its state"):
                local.server.save()
        with pytest.raises(OSError, match=r"log .* could not be written: it could not be reopened after an error"):
            train(model, 1)
        steps = local.server.collections["tables"].ordering.next_push
        local.restart()
        assert local.server.collections["tables"].ordering.next_push == steps == 3


def test_a_log_that_cannot_be_written_ends_training_and_loses_nothing(tmp_path, monkeypatch):
    with restarted(tmp_path, "disk", 1, NEVER) as (servers, (local,)):
        model = make(servers)
        train(model, 3)
        flush(model)  # the last push has been logged
        with monkeypatch.context() as patch:
            patch.setattr(durable.os, "fdatasync", raising(OSError(28, "No space left on device")))
            local.server.durable.log._durable = True
            with pytest.raises(OSError, match=r"log .* could not be written: .*; free disk space there"):
                train(model, 1)
        steps = local.server.collections["tables"].ordering.next_push
        local.restart()
        assert local.server.collections["tables"].ordering.next_push == steps == 3


def raising(error: Exception):
    def call(*args, **kwargs):
        raise error

    return call


def test_a_folder_has_one_server_and_keeps_files_of_others(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with EmbeddingServer("a", tmp_path, "disk") as server:
        with pytest.raises(StorageError, match="another embedding server uses"):
            EmbeddingServer("b", tmp_path, "disk")
        server.save()
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_what_was_pulled_before_a_checkpoint_was_restored_is_void(tmp_path):
    with local_servers(2) as servers:
        model = make(servers, 2)
        train(model, 4)
        service = model.table_set.service
        service.snapshot(tmp_path / "a-")
        occupied = [te.nn.prefetch(model, batch) for batch in batches(2)]
        output = model(occupied[0])
        service.restore([[tmp_path / f"a-{n}.server"] for n in range(2)], 4)
        with pytest.raises(RuntimeError, match="pulled before the tables were restored"):
            output.sum().backward()
        actual = train(model, 4)
        del occupied, output
        actual += train(model, 2)
    same(([actual], {}), ([jobs.outputs_on(2, 2, 4, 4, 2)[4:]], {}))


def test_statistics_wait_for_a_server_that_is_busy_or_comes_back(monkeypatch):
    monkeypatch.setattr(connection.Connection.query, "__defaults__", (0.2,))
    with local_servers(1) as servers:
        make(servers)
        initial, server = servers.statistics()[0]["collections"], servers._local_servers[0]
        receive, requests = server.receive, []

        def late(message, reply):
            requests.append(message[0]["op"])
            if message[0]["op"] == "ping" or requests.count("stats") > 2:
                receive(message, reply)

        monkeypatch.setattr(server, "receive", late)
        assert servers.statistics()[0]["collections"] == initial
        assert requests.count("stats") > 2
        monkeypatch.setattr(server, "receive", lambda message, reply: None)
        servers.connections[0]._patience = 0.5
        with pytest.raises(ConnectionError, match="has not answered"):
            servers.statistics()


def test_servers_in_another_order_are_refused():
    local = [EmbeddingServer(f"server-{index}") for index in range(2)]
    transports = [LocalTransport(server, server.name) for server in local]
    with local[0], local[1]:
        with Servers(transports) as servers:
            make(servers)
        with (
            Servers(transports[::-1]) as peers,
            pytest.raises(ValueError, match="pass the addresses in the original order"),
        ):
            make(peers)


def test_a_batch_that_is_dropped_while_another_waits_holds_nobody_up():
    with local_servers(1) as servers:
        model = make(servers)
        first, second = (te.nn.prefetch(model, batch) for batch in batches(2))
        del first
        model(second).sum().backward()


def test_a_server_that_expects_another_token_ends_training(monkeypatch):
    server = EmbeddingServer("server-0")
    transport = LocalTransport(server, "server-0")
    with Servers([transport], [server], patience=60) as servers:
        model = make(servers, 1)
        train(model, 1)
        connection = servers.connections[0]
        monkeypatch.setattr(transport, "open", raising(PermissionError("the token is missing or wrong")))
        connection._channel_lost(connection._channel_id, ConnectionError("cut"))
        with pytest.raises(PermissionError, match="the token is missing or wrong"):
            train(model, 1)


def test_a_server_that_fails_says_so(monkeypatch, capfd):
    with local_servers(1) as servers:
        model = make(servers, 1)
        train(model, 1)
        server = servers._local_servers[0]
        monkeypatch.setattr(server, "execute", raising(ZeroDivisionError("a mistake of ours")))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"server-0 has failed \(ZeroDivisionError: a mistake of ours\)"):
                train(model, 1)
        assert "ZeroDivisionError" in capfd.readouterr().err


def test_gradients_that_cannot_be_applied_are_not_lost_in_silence(monkeypatch, capfd):
    with local_servers(1) as servers:
        model = make(servers, 1)
        train(model, 1)
        flush(model)
        served = servers._local_servers[0].collections["tables"]
        monkeypatch.setattr(served, "_apply", raising(MemoryError("no memory")))
        with pytest.raises(RuntimeError, match=r"server-0 has failed \(MemoryError: no memory\)"):
            train(model, 4)
        assert "no memory" in capfd.readouterr().err


def test_a_second_trainer_of_a_rank_is_refused_while_the_first_is_heard_of(monkeypatch):
    """It waits a little, for one that was killed; the first trains on. One that was silent is told the reason."""
    monkeypatch.setattr(connection, "HEARTBEAT", 1e6)
    monkeypatch.setattr(connection, "TRAINER_TIMEOUT", -1e6)
    server = EmbeddingServer("server-0")
    transport = LocalTransport(server, "server-0")
    with Servers([transport], [server]) as first, Servers([transport]) as second:
        model = make(first, 2)
        result = train(model, 3)
        refusal = "from another trainer of rank 0 of 'tables' in the last 10 seconds; end that run first"
        with pytest.raises(ConnectionRefusedError, match=refusal):
            make(second, 2)
        result += train(model, 3)
        server.clients.last_seen.clear()  # as it is after these seconds
        train(make(second, 2), 1)
        with pytest.raises(PermissionError, match="another trainer of rank 0 of 'tables' has replaced this one"):
            train(model, 1)
        with pytest.raises(PermissionError, match="has replaced this one"):
            first.connections[0].query("connect")
    same(([result], {}), ([jobs.outputs_on(1, 2, 3, 3)], {}))


def test_a_server_hears_of_a_client_that_has_nothing_to_say(monkeypatch):
    with local_servers(1) as servers:
        connection, server = servers.connections[0], servers._local_servers[0]
        server.clients.last_seen.clear()
        connection._last_sent -= HEARTBEAT
        connection.tick()
        assert connection._client in server.clients.last_seen


def test_while_a_server_is_started_again_patience_is_not_counted():
    with local_servers(1) as servers:
        model, connection, server = make(servers, 1), servers.connections[0], servers._local_servers[0]
        receive, server.receive = server.receive, lambda message, reply: None
        waiting = te.nn.prefetch(model, next(batches(1)))
        connection.is_starting = lambda: True
        connection._last_received -= 10 * connection._patience
        connection.tick()
        assert connection._failure is None
        connection.is_starting = lambda: False
        connection._last_received -= 10 * connection._patience
        connection.tick()
        with pytest.raises(ConnectionError, match="has not answered for"):
            model(waiting)
        server.receive = receive


IDS, ONES = torch.arange(3), torch.ones(3, dtype=torch.int64)
SUMS = [torch.zeros(3, 6), torch.zeros(0, 4)]
PULL, PUSH = {"batch": 0, "sizes": [3, 0]}, {"batch": 0, "lr": 0.1, "scale": 1.0, "sizes": [3, 0]}
MOVE, RECORDS = {"sizes": [[0, 3]]}, torch.zeros(3, 48, dtype=torch.uint8)
MALFORMED = [
    ("pull", PULL, [IDS]),
    ("pull", PULL, [IDS, ONES, ONES, ONES]),
    ("pull", PULL, [IDS, 0 * ONES]),
    ("pull", PULL, [IDS.int(), ONES]),
    ("pull", PULL, [IDS[:, None], ONES]),
    ("pull", PULL, [IDS - 1, ONES]),
    ("pull", PULL, [IDS + 298, ONES]),
    ("pull", {"sizes": [3, 0]}, [IDS, ONES]),
    ("pull", {**PULL, "batch": "0"}, [IDS, ONES]),
    ("pull", {**PULL, "batch": -1}, [IDS, ONES]),
    ("pull", {**PULL, "sizes": None}, [IDS, ONES]),
    ("pull", {**PULL, "sizes": [3]}, [IDS, ONES]),
    ("pull", {**PULL, "sizes": [4, -1]}, [IDS, ONES]),
    ("pull", {**PULL, "rank": 1}, [IDS, ONES]),
    ("pull", {**PULL, "rank": None}, [IDS, ONES]),
    ("pull", {**PULL, "collection": "of nobody"}, [IDS, ONES]),
    ("pull", {**PULL, "collection": ["other"]}, [IDS, ONES]),
    ("look_up", {"after": "x", "sizes": [3, 0]}, [IDS]),
    ("look_up", {"after": 0, "sizes": [3, 0]}, [IDS + 2**40]),
    ("push", PUSH, [IDS]),
    ("push", PUSH, [IDS, *SUMS, SUMS[0]]),
    ("push", PUSH, [IDS, SUMS[0].double(), SUMS[1]]),
    ("push", PUSH, [IDS, SUMS[0][:2], SUMS[1]]),
    ("push", PUSH, [IDS + 298, *SUMS]),
    ("push", {**PUSH, "lr": "x"}, [IDS, *SUMS]),
    ("push", {**PUSH, "lr": -1.0}, [IDS, *SUMS]),
    ("push", {**PUSH, "lr": float("nan")}, [IDS, *SUMS]),
    ("push", {"batch": 0, "lr": 0.1, "sizes": [3, 0]}, [IDS, *SUMS]),
    ("flush", {"steps": "x"}, []),
    ("flush", {"steps": 1, "returned": {"lr": 0.1}}, []),
    ("flush", {"steps": 1, "returned": {"steps": 1, "lr": float("inf")}}, []),
    ("allocate", {"training": True, "sizes": [3]}, [IDS, ONES]),
    ("transfer", MOVE, []),
    ("transfer", MOVE, [IDS, RECORDS[:2]]),
    ("transfer", MOVE, [IDS, RECORDS.char()]),
    ("transfer", MOVE, [IDS.flip(0), RECORDS]),
    ("transfer", MOVE, [IDS + 298, RECORDS]),
    ("transfer", {"sizes": [[7, 3]]}, [IDS]),
    ("snapshot", {"steps": "1", "chain": "x", "changes_only": False, "path": "x"}, []),
    ("restore", {"chains": 3}, []),
    ("restore", {"chains": []}, []),
    ("read", {"table": "z"}, []),
    ("load", {"table": "a", "names": ["ids", "weight"]}, [IDS]),
    ("fail", {}, []),
]


@pytest.mark.parametrize("log", [None, "disk"])
def test_a_malformed_message_is_the_error_of_its_client_alone(tmp_path, log):
    """Of somebody without a name, of a stranger, and of a trainer of other tables; also when the log is read again."""
    with restarted(tmp_path, log, 1, NEVER) as (servers, (local,)):
        model = make(servers, 2)
        actual, server = train(model, 2), local.server
        raw, stranger = RawClient(server), RawClient(server, "stranger")
        for values in ({"op": "push", "number": 0}, {"op": "push", "number": 0, "received": 0}, {"op": "stats"},
                       {"op": "push", "number": "0", "received": 0, "client": "x"}, {"query": 0}, {},
                       {"op": ["push"], "number": 0, "received": 0, "client": "x"}):  # fmt: skip
            with pytest.raises((KeyError, TypeError)):
                server.receive((values, []), raw.answers.put)
        for _ in range(2):
            error = stranger.send("push", [IDS, *SUMS], collection="tables", rank=0, **PUSH)["error"]
            assert "this client is not the trainer of rank 0 of 'tables'" in error["message"]
        assert "unknown operation 'fail'" in raw.query("fail")["error"]["message"]
        spec = asdict(replace(server.collections["tables"].spec, staleness=0))
        assert raw.query("register", collection="other", rank=0)["refused"] is None
        wrong = [{"trainers": 0}, {"batches": 0}, {"staleness": -1}, {"staleness": "2"}, {"partition_starts": []}]
        for change in wrong:
            assert "error" in raw.send("create", collection="other", rank=0, spec=spec | change, server=0)
        assert "error" not in raw.send("create", collection="other", rank=0, spec=spec, server=0)
        for name in ("../other", "o\0", "o" * 300) if log is not None else ():
            error = raw.send("create", collection=name, rank=0, spec=spec, server=0)["error"]
            assert "cannot create a collection" in error["message"]
        for op, values, tensors in MALFORMED:
            assert "error" in raw.send(op, tensors, **{"collection": "other", "rank": 0, **values}), (op, values)
        assert server._failure is None
        rows = raw.send("pull", [IDS, ONES], collection="other", rank=0, **PULL)
        assert "error" not in rows
        if log is not None:
            local.restart()
            assert {*local.server.collections} == {"tables", "other"}  # what was refused is refused again
            assert [path.name for path in tmp_path.iterdir()] == ["server-0"]
        actual += train(model, 4)
        assert local.server._failure is None
    same(([actual], {}), ([jobs.outputs_on(1, 2, 2, 4)], {}))
