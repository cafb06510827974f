"""Reader hosts: the same batches as the data set they serve, for those who know the token, over TLS too."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("pyarrow.flight")

from tests.data.logs import same
from tests.data.test_workers import WAIT, size_of, wait_until
from tests.data.threads import running
from tritonemb.data import Dataset, ReaderHost, RemoteData, Rows, make_synthetic, open_dataset
from tritonemb.data.loader import open_shards
from tritonemb.flight import Client, decode_error, encode_error

ROWS = Rows(torch.zeros(4, 1), (), torch.zeros(4))


@pytest.fixture(scope="module")
def served():
    data = make_synthetic(500, 100)
    with ReaderHost(data, token="secret") as host:
        yield data, host


def test_remote_data_describe_themselves_as_the_data_do(served):
    data, host = served
    remote = RemoteData(host.address, token="secret")
    for found in (remote, pickle.loads(pickle.dumps(remote))):
        assert found.features == data.features
        assert (found.name, found.num_dense, found.encoding) == (data.name, data.num_dense, data.encoding)
        assert (found.best_auc, found.splits()) == (data.best_auc, data.splits())
        assert found.tables(8) == data.tables(8)
        assert (found.num_rows("train"), found.estimated_rows("test")) == (500, 100)
    with pytest.raises(ValueError, match="has no 'validation' rows"):
        remote.num_rows("validation")


@pytest.mark.parametrize("split", ["tsv-60/train", "gz-60/train", "parquet-60/train", "memory-60/train"])
def test_remote_batches_are_those_of_the_data(bundle, remote, split):
    how = {"shuffle": True, "seed": 2, "epoch": 1}
    for shard in ((0, 1), (1, 3)):
        with remote.open(split, 8, shard=shard, **how) as there, bundle.open(split, 8, shard=shard, **how) as here:
            assert same([next(there), next(there)], [next(here), next(here)])
            assert there.position == here.position
            position = there.position
            assert same(there, here)
            assert there.report == here.report
        how_resumed = {**how, "shard": shard, "position": position}
        with remote.open(split, 8, **how_resumed) as there, bundle.open(split, 8, **how_resumed) as here:
            assert same(there, here)
    with (
        open_shards(remote, split, 8, 0, 2, 5, **how) as there,
        open_shards(bundle, split, 8, 0, 2, 5, **how) as here,
    ):
        assert same(there, here)
        assert there.position == here.position
    assert not running()


def test_remote_loose_batches_with_several_ids_arrive_whole(bundle, remote):
    with remote.open("endless/loose", 5) as there, bundle.open("endless/loose", 5) as here:
        for _ in range(3):
            a, b = next(there), next(here)
            assert a.sparse.to_lists() == b.sparse.to_lists()
            assert a.sparse.values().dtype == torch.int64
            assert torch.equal(a.dense, b.dense)
            assert (there.position, there.report) == (here.position, here.report)


@pytest.mark.parametrize(
    ("split", "kind", "message"),
    [
        ("strict/train", ValueError, "bad.txt, line 41: expected 40 tab-separated fields, found 1"),
        ("failing/missing", FileNotFoundError, "No such file or directory: "),
        ("failing/unicode", RuntimeError, "can't decode byte 0xff"),
        ("failing/odd", RuntimeError, "OddError: odd things happen"),
        ("tsv-60/test", ValueError, "has no 'test' rows, only train"),
    ],
)
def test_errors_of_a_host_come_with_their_type(remote, split, kind, message):
    with pytest.raises(kind, match=message) as caught:
        list(remote.open(split, 8, shard=(1, 2)) if split == "strict/train" else remote.open(split, 8))
    assert type(caught.value) is kind
    assert "In grpc://127.0.0.1:" in caught.value.__notes__[0]
    assert not running()


def test_only_exceptions_are_made_of_what_a_host_sends():
    values = encode_error(ValueError("no"))
    assert type(decode_error(values, "here")) is ValueError
    for name in ("eval", "print", "SystemExit", "KeyboardInterrupt", "nothing"):
        assert type(decode_error(values | {"type": name, "args": ["1"]}, "here")) is RuntimeError


def test_a_host_serves_nobody_without_the_token(served, monkeypatch):
    _, host = served
    for token in ("", "wrong", "secret "):
        with pytest.raises(PermissionError, match="the token is missing or wrong"):
            RemoteData(host.address, token=token)
        with pytest.raises(PermissionError, match="the token is missing or wrong"):
            next(Client(host.address, token).stream({"action": "open", "split": "train"})[0])
    monkeypatch.setenv("TRITONEMB_TOKEN", "secret")
    assert open_dataset(f"{host.address},{host.address}").num_rows("train") == 500
    monkeypatch.setenv("TRITONEMB_TOKEN", "wrong")
    with pytest.raises(PermissionError, match="the token is missing or wrong"):
        open_dataset(host.address)


def test_hosts_need_the_same_data(served):
    _, host = served
    with (
        ReaderHost(Dataset("other", (), ROWS, ROWS), token="secret") as other,
        pytest.raises(ValueError, match="have different data"),
    ):
        RemoteData([host.address, other.address], token="secret")
    with pytest.raises(ConnectionError, match=f"{other.address} does not answer"):
        RemoteData(other.address, token="secret")
    with pytest.raises(ValueError, match="'localhost' is not an address: expected grpc://HOST:PORT"):
        RemoteData("localhost")
    with pytest.raises(ValueError, match="TLS needs a grpc"):
        ReaderHost(make_synthetic(10, 50), "grpc+tls://127.0.0.1:0")
    with pytest.raises(OSError, match="cannot serve at"):
        ReaderHost(make_synthetic(10, 50), host.address)


def test_tls(certificate):
    data, pem = make_synthetic(100, 50), certificate / "pem"
    with ReaderHost(data, "grpc+tls://localhost:0", certificate=pem, key=certificate / "key") as host:
        remote = RemoteData(host.address, token=host.token, roots=pem)
        assert same(remote.open("train", 16), data.open("train", 16))
        with pytest.raises(ConnectionError, match="does not answer"):
            RemoteData(host.address, token=host.token)
        with pytest.raises(ConnectionError, match="does not answer"):
            RemoteData(host.address.replace("grpc+tls", "grpc"), token=host.token)


def test_a_host_does_not_run_away_from_a_slow_trainer(bundle, remote):
    made = bundle.folder / "made slow remote"
    with remote.open("endless/slow remote", 20_000) as stream:
        next(stream)
        ahead, deadline = 0, time.monotonic() + 4 * WAIT  # a busy machine makes them slowly
        while ahead != size_of(made):
            assert time.monotonic() < deadline
            ahead = size_of(made)
            time.sleep(0.5)
        assert ahead <= 20  # five wait on each side, and some are on their way
        for _ in range(30):  # the network opens its window again when a part of it is empty
            next(stream)
        wait_until(lambda: size_of(made) >= ahead + 10)


@pytest.mark.parametrize("split", ["endless", "slow"])
@pytest.mark.parametrize("way", ["close", "drop"])
def test_a_stream_that_is_left_ends_in_the_host_too(bundle, remote, split, way):
    mark = f"{split} remote {way}"
    stream = remote.open(f"{split}/{mark}", 8)
    next(stream)
    if way == "close":
        start = time.monotonic()
        stream.close()
        assert time.monotonic() - start < 1.8  # it does not wait for a batch
    else:
        del stream
    wait_until((bundle.folder / f"ended {mark}").exists)
    wait_until(lambda: not running())


HOST = """
from tritonemb.data import ReaderHost, make_synthetic
with ReaderHost(make_synthetic(50_000, 100), token="secret") as host:
    print(host.address, flush=True)
    host.wait()
print("ended", flush=True)
"""


@pytest.mark.more
def test_a_host_that_is_killed_is_named(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    hosts = [
        subprocess.Popen([sys.executable, "-c", HOST], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        addresses = [host.stdout.readline().strip() for host in hosts]
        remote = RemoteData(addresses, token="secret")
        first, second = (remote.open("train", 4, shard=(index, 2)) for index in range(2))
        next(first)
        next(second)
        hosts[0].kill()
        with pytest.raises(ConnectionError, match=f"{addresses[0]} does not answer"):
            list(first)
        with pytest.raises(ConnectionError, match=f"{addresses[0]} does not answer"):
            remote.open("train", 4)
        assert len(next(second)) == 4
        second.close()
        hosts[1].send_signal(signal.SIGTERM)
        assert hosts[1].communicate(timeout=WAIT)[0] == "ended\n"
        assert hosts[1].returncode == 0
    finally:
        for host in hosts:
            host.kill()
            host.communicate()
    assert not running()


def test_closing_a_host_ends_its_streams():
    host = ReaderHost(make_synthetic(50_000, 100))
    remote = RemoteData(host.address, token=host.token)
    with remote.open("train", 4) as stream:
        next(stream)
        start = time.monotonic()
        host.close()
        assert time.monotonic() - start < 10
        with pytest.raises(ConnectionError, match=r"does not answer|has been closed"):
            list(stream)
    with pytest.raises(ConnectionError, match="does not answer"):
        remote.open("train", 4)
