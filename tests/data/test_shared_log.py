"""A log whose files are on several reader hosts: the batches of one host that has all of them."""

import shutil
from contextlib import ExitStack
from dataclasses import replace

import pytest

pytest.importorskip("pyarrow.flight")
pytest.importorskip("fsspec")

from tests.data.logs import check_streams, options, random_lines, same, write
from tests.data.threads import running
from tests.programs import Program
from tests.ranks import free_port
from tritonemb.data import ClickLog, OpenOptions, ReaderHost, RemoteData, SharedLog, SplitRule, convert
from tritonemb.data.open import ReaderOptions, run_reader
from tritonemb.flight import Client

ROWS = (90, 50, 80, 80)  # by file
ORDER = {"shuffle": True, "seed": 3}
OPTIONS = options(shuffle_rows=40, chunk_bytes=3000)
ENDS = options(SplitRule(), shuffle_rows=40, chunk_bytes=3000)  # the last rows are test rows


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("TRITONEMB_TOKEN", "secret")
    yield
    assert not running()


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """The folder of a log by the suffix of its files."""

    def make(suffix):
        folder, lines = tmp_path_factory.mktemp("logs") / "days", random_lines(sum(ROWS))
        folder.mkdir()
        for day, num_rows in enumerate(ROWS):
            day_lines, lines = lines[:num_rows], lines[num_rows:]
            if suffix == "parquet":
                convert(write(folder.parent, day_lines), folder / f"day_{day}.parquet", row_group_rows=17)
            else:
                write(folder, day_lines, f"day_{day}.{suffix}")
        return folder

    return {suffix: make(suffix) for suffix in ("txt", "txt.gz", "parquet")}


def divide(folder, target, numbers):
    """Copy files of a folder into one folder per host, by the numbers of its files."""
    files = sorted(folder.iterdir())
    for host, host_numbers in enumerate(numbers):
        (target / str(host) / "days").mkdir(parents=True)
        for number in host_numbers:
            shutil.copy(files[number], target / str(host) / "days")
    return [target / str(host) / "days" for host in range(len(numbers))]


def free_address():
    return f"grpc://127.0.0.1:{free_port()}"


@pytest.fixture
def serve(tmp_path):
    """Starts a host per tuple of file numbers; gives the hosts and a client."""
    with ExitStack() as stack:

        def start(folder, *numbers, options_of=lambda folder: OPTIONS):
            addresses = [free_address() for _ in numbers]
            folders = divide(folder, tmp_path, numbers)
            logs = [SharedLog(path, options_of(path), peers=addresses) for path in folders]
            hosts = [ReaderHost(log, address) for log, address in zip(logs, addresses, strict=True)]
            for host in hosts:
                stack.callback(host.close)
            return hosts, RemoteData(addresses)

        yield start


@pytest.mark.parametrize("suffix", ["txt", "txt.gz", "parquet"])
@pytest.mark.few(1)
def test_hosts_with_different_files_serve_the_batches_of_one_with_all(days, serve, suffix):
    log = ClickLog(days[suffix], ENDS)
    _, remote = serve(days[suffix], (0, 1), (2, 3), options_of=lambda folder: ENDS)
    assert remote.contents == log.contents
    for shard in ((0, 1), (0, 2), (1, 2), (1, 3)):
        check_streams(remote, log, "train", 16, **ORDER, shard=shard)
    assert same(remote.open("test", 16), log.open("test", 16))


def test_held_out_files_may_be_on_a_peer(days, serve):
    def held_out(folder):
        return replace(OPTIONS, split=SplitRule(test_files=(str(folder / "day_2.txt"),)))

    log = ClickLog(days["txt"], held_out(days["txt"]))
    hosts, remote = serve(days["txt"], (0, 1), (2, 3), options_of=held_out)
    for number, host in enumerate(hosts):
        for split in ("train", "test"):
            assert same(RemoteData(host.address).open(split, 16), log.open(split, 16)), (number, split)
    assert same(remote.open("test", 16), log.open("test", 16))


def test_the_host_with_most_of_a_shard_reads_it(days, serve, monkeypatch):
    hosts, remote = serve(days["txt"], (2, 3), (0, 1))
    second, first = (host.address for host in hosts)
    for shard, expected in (((0, 2), first), ((1, 2), second), ((0, 8), first), ((7, 8), second)):
        assert remote.hosts_of(OpenOptions("train", 16, shard=shard), [])[0] == expected
    assert remote.hosts_of(OpenOptions("train", 16, shard=(0, 8)), [first]) == [second, first]
    monkeypatch.setattr(SharedLog, "read", None)  # not called: the host has all rows
    log = ClickLog(days["txt"], OPTIONS)
    assert same(remote.open("train", 16, shard=(0, 8)), log.open("train", 16, shard=(0, 8)))


def test_another_peer_that_has_a_file_takes_the_place_of_one(days, serve, caplog):
    hosts, remote = serve(days["txt"], (0, 1, 2), (3,), (3,))
    assert remote.hosts_of(OpenOptions("train", 16), [])[0] == hosts[0].address
    hosts[1].close()
    assert same(remote.open("train", 16, **ORDER), ClickLog(days["txt"], OPTIONS).open("train", 16, **ORDER))
    assert "another reader host that has day_3.txt takes its place" in caplog.text


@pytest.mark.parametrize("suffix", ["txt.gz", "parquet"])
def test_a_shard_that_no_host_has_is_named(days, serve, suffix):
    hosts, remote = serve(days[suffix], (0, 1), (2, 3))
    first, second = (host.address for host in hosts)
    hosts[1].close()
    log, shard = ClickLog(days[suffix], OPTIONS), {"shard": (0, 4)}
    assert same(remote.open("train", 16, **shard), log.open("train", 16, **shard))
    message = rf"shard 2 of 4 needs day_[23]\.{suffix}.*, which no host that answers has: {first}, of "
    with pytest.raises(ConnectionError, match=message + f"({second}, {first}|{first}, {second})"):
        remote.open("train", 16, shard=(2, 4))
    # A host without its peer raises the same type, so that a client asks the next one.
    request = {"action": "open", "split": "train", "shard": (2, 4), "position": None, "batch_size": 16}
    with pytest.raises(ConnectionError, match=rf"no reader host that has day_[23]\.{suffix} answers: {second}"):
        list(Client(first, "secret").stream(request)[0])


def test_hosts_with_different_copies_or_without_peers_are_named(days, serve, tmp_path):
    copies = tmp_path / "copies"
    shutil.copytree(days["txt"], copies)
    write(copies, random_lines(3), "day_0.txt")
    hosts, _ = serve(days["txt"], (0, 1, 2, 3))
    log = SharedLog(copies, OPTIONS, peers=[hosts[0].address])
    with pytest.raises(ValueError, match=r"day_0\.txt and grpc://.*/day_0\.txt differ; give them different names"):
        log.log()
    with ReaderHost(ClickLog(copies, OPTIONS)) as plain:
        log = SharedLog(copies, OPTIONS, peers=[plain.address])
        with pytest.raises(ValueError, match="start it with peers"):
            log.log()
    with pytest.raises(ValueError, match="hosts cannot share the files of a stream"):
        SharedLog(copies, replace(OPTIONS, follow=True), peers=[])


def test_a_host_sends_peers_its_own_files_only(days, serve):
    hosts, _ = serve(days["txt"], (0,), (1, 2, 3))
    client, request = Client(hosts[0].address, "secret"), {"action": "read", "offset": 0, "num_bytes": 10}
    content = (days["txt"] / "day_0.txt").read_bytes()
    assert bytes(next(client.stream(request | {"name": "day_0.txt"})[0])[1]) == content[:10]
    for name in ("../../0/days/day_0.txt", str(days["txt"] / "day_0.txt"), ""):
        with pytest.raises(ConnectionError, match="no reader host that has"):
            next(client.stream(request | {"name": name})[0])
    with pytest.raises(PermissionError):
        next(Client(hosts[0].address, "wrong").stream(request | {"name": "day_0.txt"})[0])


def test_the_command_serves_a_shared_log(days, capsys, monkeypatch):
    monkeypatch.setattr(ReaderHost, "wait", lambda host: None)
    address = free_address()
    run_reader(ReaderOptions(str(days["txt"]), address=address, peers=(address,), read=OPTIONS))
    assert capsys.readouterr().out == f"serving days at {address}\n"


@pytest.mark.more
@pytest.mark.usefixtures("ranks")
def test_a_host_that_is_killed(tmp_path, caplog):
    """Of two hosts that have a file, the other continues; a file of the killed one is named."""
    folder, lines = tmp_path / "days", random_lines(100) * 300  # more than is on its way to a client
    folder.mkdir()
    for day in range(4):
        write(folder, lines, f"part_{day}.txt")
    log_options = options(SplitRule(test_share=0.0), num_embeddings=1000, shuffle_rows=5000)
    addresses = [free_address(), free_address()]
    paths = divide(folder, tmp_path, ((0, 1, 2), (2, 3)))
    command = ["tritonemb", "reader", "--data", str(paths[0]), "--address", addresses[0]]
    command += ["--peers", *addresses, "--test-share", "0", "--num-embeddings", "1000", "--shuffle-rows", "5000"]
    program = Program(*command)
    with ReaderHost(SharedLog(paths[1], log_options, peers=addresses), addresses[1]):
        try:
            assert program.output.readline() == f"serving days at {addresses[0]}\n"
            remote, log = RemoteData(addresses), ClickLog(folder, log_options)
            shard = {**ORDER, "shard": (2, 4)}  # the whole file that both have
            with (
                remote.open("train", 64, **shard) as stream,
                remote.open("train", 64, shard=(0, 4)) as lost,
                log.open("train", 64, **shard) as local,
            ):
                batches = [next(stream) for _ in range(20)]
                program.process.kill()
                program.process.join()
                batches += stream
                assert same(batches, local)
                assert (stream.position, stream.report) == (local.position, local.report)
                with pytest.raises(
                    ConnectionError, match=r"shard 0 of 4 needs part_0\.txt, which no host that answers"
                ):
                    list(lost)
            assert f"{addresses[0]} does not answer" in caplog.text
        finally:
            program.process.kill()
