"""Reader hosts: the same batches as the data set they serve, for those who know the token, over TLS too."""

import pickle
from dataclasses import replace

import pytest
import torch

pytest.importorskip("pyarrow.flight")

from tests.data.logs import check_streams, same
from tests.data.threads import running
from tests.programs import Program
from tritonemb.data import Dataset, ReaderHost, RemoteData, Rows, make_synthetic, open_dataset
from tritonemb.data import open as open_
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
    for result in (remote, pickle.loads(pickle.dumps(remote))):
        assert result.features == data.features
        assert (result.name, result.num_dense, result.encoding) == (data.name, data.num_dense, data.encoding)
        assert (result.best_auc, result.splits()) == (data.best_auc, data.splits())
        assert result.contents == data.contents == {"train": "500 rows", "test": "100 rows"}
        assert result.tables(8) == data.tables(8)
        assert (result.num_rows("train"), result.estimated_rows("test")) == (500, 100)
        assert result.shard_rows("train", 2) is None  # equally many in each
    with pytest.raises(ValueError, match="has no 'validation' rows"):
        remote.num_rows("validation")


@pytest.mark.parametrize("split", ["tsv-60/train", "gz-60/train", "parquet-60/train", "memory-60/train"])
def test_remote_batches_are_those_of_the_data(bundle, remote, split):
    options = {"shuffle": True, "seed": 2, "epoch": 1}
    for shard in ((0, 1), (1, 3)):
        check_streams(remote, bundle, split, 8, shard=shard, **options)
    with (
        open_shards(remote, split, 8, 0, 2, 5, **options) as second,
        open_shards(bundle, split, 8, 0, 2, 5, **options) as local,
    ):
        assert same(second, local)
        assert second.position == local.position
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
    with pytest.raises(ValueError, match="invalid address 'localhost': expected grpc://HOST:PORT"):
        RemoteData("localhost")
    with pytest.raises(ValueError, match="TLS needs a grpc"):
        ReaderHost(make_synthetic(10, 50), "grpc+tls://127.0.0.1:0")
    with pytest.raises(OSError, match="cannot serve at"):
        ReaderHost(make_synthetic(10, 50), host.address)
    with pytest.raises(ValueError, match=r"other machines can reach grpc://0\.0\.0\.0:0: .* serve at grpc\+tls"):
        ReaderHost(make_synthetic(10, 50), "grpc://0.0.0.0:0")


def test_the_command_listens_on_this_machine_and_says_a_token_that_it_has_made(capsys, monkeypatch):
    monkeypatch.setattr(open_, "open_dataset", lambda *args, **options: make_synthetic(10, 50))
    monkeypatch.setattr(ReaderHost, "wait", lambda host: None)
    options = open_.ReaderOptions("synthetic")
    assert options.address == "grpc://127.0.0.1:8815"
    for token in ("", "secret"):
        monkeypatch.setenv("TRITONEMB_TOKEN", token)
        open_.run_reader(replace(options, address="grpc://127.0.0.1:0"))
        address, *more = capsys.readouterr().out.splitlines()
        assert address.startswith("serving synthetic at grpc://127.0.0.1:")
        assert [line[:16] for line in more] == ([] if token else ["TRITONEMB_TOKEN="])


def test_tls(certificate):
    data, pem = make_synthetic(100, 50), certificate / "pem"
    with ReaderHost(data, "grpc+tls://localhost:0", certificate=pem, key=certificate / "key") as host:
        remote = RemoteData(host.address, token=host.token, roots=pem)
        assert same(remote.open("train", 16), data.open("train", 16))
        with pytest.raises(ConnectionError, match="does not answer"):
            RemoteData(host.address, token=host.token)
        with pytest.raises(ConnectionError, match="does not answer"):
            RemoteData(host.address.replace("grpc+tls", "grpc"), token=host.token)


ROWS_OF_HOST = 200_000  # more than is on its way to a client
HOST = f"""
from tritonemb.data import ReaderHost, make_synthetic
with ReaderHost(make_synthetic({ROWS_OF_HOST}, 100), token="secret") as host:
    print(host.address, flush=True)
    host.wait()
print("ended", flush=True)
"""


@pytest.mark.more
@pytest.mark.usefixtures("ranks")
def test_another_host_continues_for_one_that_is_killed(tmp_path, caplog):
    (tmp_path / "host.py").write_text(HOST)
    hosts = [Program(str(tmp_path / "host.py")) for _ in range(2)]
    data, options = make_synthetic(ROWS_OF_HOST, 100), {"shuffle": True, "seed": 3}
    try:
        addresses = [host.output.readline().strip() for host in hosts]
        remote = RemoteData(addresses, token="secret")
        shard = {**options, "shard": (0, 2)}
        with remote.open("train", 64, **shard) as stream, data.open("train", 64, **shard) as local:
            read = [next(stream) for _ in range(20)]
            hosts[0].process.kill()
            hosts[0].process.join()
            read += stream
            assert same(read, local)
            assert (stream.position, stream.report) == (local.position, local.report)
        assert f"{addresses[0]} does not answer" in caplog.text
        assert "the next reader host continues shard 0" in caplog.text
        # Ranks open their shards while a host is down, and so does a new trainer.
        for late in (remote, RemoteData(addresses, token="secret")):
            for rank in range(2):
                with (
                    open_shards(late, "train", 4096, rank, 2, 4, **options) as stream,
                    open_shards(data, "train", 4096, rank, 2, 4, **options) as local,
                ):
                    assert same(stream, local)
                    assert stream.position == local.position
        hosts[1].process.terminate()
        assert hosts[1].finish() == (0, "ended\n")
        with pytest.raises(ConnectionError, match="does not answer"):
            remote.open("train", 4)
    finally:
        for host in hosts:
            host.process.kill()
    assert not running()


@pytest.mark.parametrize("split", ["tsv-60/train", "memory-60/train"])
@pytest.mark.parametrize("number", [0, 3])
def test_a_stream_continues_at_another_host(bundle, split, number):
    options = {"shuffle": True, "seed": 2}
    with ReaderHost(bundle) as first, ReaderHost(bundle, token=first.token) as second:
        remote = RemoteData([first.address, second.address], token=first.token)
        with (
            remote.open(split, 7, shard=(2, 3), **options) as stream,
            bundle.open(split, 7, shard=(2, 3), **options) as local,
        ):
            first.close()
            assert same(stream, local)
        with remote.open(split, 4, **options) as stream, bundle.open(split, 4, **options) as local:
            read = [next(stream) for _ in range(number)]
            assert same([*read, *stream], local)
            assert stream.report == local.report
    assert not running()


def test_a_host_that_comes_later_needs_the_same_data(served, caplog):
    data, host = served
    with ReaderHost(data, token="secret") as gone:
        pass
    remote = RemoteData([gone.address, host.address], token="secret")
    assert f"{gone.address} does not answer" in caplog.text
    assert same(remote.open("train", 64), data.open("train", 64))
    with (
        ReaderHost(Dataset("other", (), ROWS, ROWS), gone.address, token="secret"),
        pytest.raises(ValueError, match="have different data"),
    ):
        remote.open("train", 64)
    with ReaderHost(data, gone.address, token="secret"):
        assert same(remote.open("train", 64), data.open("train", 64))


def test_closing_a_host_ends_its_streams():
    host = ReaderHost(make_synthetic(50_000, 100))
    remote = RemoteData(host.address, token=host.token)
    with remote.open("train", 4) as stream:
        next(stream)
        host.close()
        with pytest.raises(ConnectionError, match=r"does not answer|has been closed"):
            list(stream)
    with pytest.raises(ConnectionError, match="does not answer"):
        remote.open("train", 4)
