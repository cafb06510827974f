"""Logs on S3, as `moto` serves it in this process, and on a file system of `fsspec`."""

import logging

import pytest

moto = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")

from tests.data.logs import line, options, random_lines, resumes, rows_of, same, write  # noqa: E402
from tritonemb.data import ClickLog, ReaderHost, RemoteData, SplitRule, convert, open_dataset, open_for_scoring  # noqa: E402
from tritonemb.data.files import find_files  # noqa: E402
from tritonemb.data.loader import open_shards  # noqa: E402


@pytest.fixture(scope="module")
def bucket():
    """Puts files on a server, and gives the URI of a name."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys)
    client.create_bucket(Bucket="logs")
    query = f"?endpoint_override={host}:{port}&scheme=http&region=us-east-1"

    def put(path, key):
        client.upload_file(str(path), "logs", key)

    def uri(key):
        return f"s3://test:test@logs/{key}{query}"

    yield put, uri
    server.stop()


@pytest.mark.parametrize("name", ["log.txt.gz", "log.parquet", pytest.param("log.txt", marks=pytest.mark.more)])
@pytest.mark.few(1)
def test_a_remote_file_is_read_as_a_local_one(tmp_path, bucket, name):
    put, uri = bucket
    text = write(tmp_path, random_lines(200), name.replace("parquet", "txt"))
    if name.endswith("parquet"):
        convert(text, tmp_path / name, row_group_rows=60)
    put(tmp_path / name, f"one/{name}")
    kwargs = options(SplitRule(), chunk_bytes=3000, shuffle_rows=50)
    logs = [ClickLog(source, kwargs) for source in (uri(f"one/{name}"), tmp_path / name)]
    assert logs[0].name == name
    assert "test:test" not in str(logs[0].files)
    for split in ("train", "test"):
        assert same(*(log.open(split, 16, shuffle=True) for log in logs))
        assert same(*(log.open(split, 16, shard=(1, 3)) for log in logs))
    assert resumes(logs[0], batch_size=16, other=logs[1], shuffle=True)


def test_a_remote_folder_has_its_data_files_in_order(tmp_path, bucket):
    put, uri = bucket
    for day in (10, 2, 1):
        put(write(tmp_path, [line(integers={1: str(day)})] * 2, f"day_{day}"), f"days/day_{day}")
    put(write(tmp_path, ["x"], "_SUCCESS"), "days/_SUCCESS")
    assert [file.name for file in find_files(uri("days"))] == ["day_1", "day_2", "day_10"]
    log = open_dataset(uri("days/"), log=options(SplitRule(), log_transform=False))
    assert [row[1] for row in rows_of(log)] == [1, 1, 2, 2]
    assert [row[1] for row in rows_of(log, "test")] == [10, 10]
    assert len(rows_of(open_for_scoring(uri("days"), options(), log.features), "test")) == 6


def test_a_key_with_a_blank_has_one_identity(tmp_path, bucket):
    put, uri = bucket
    for day in (1, 2):
        put(write(tmp_path, [line(integers={1: str(day)})] * 2), f"blank/my day {day}.txt")
    for key in ("blank/my day 2.txt", "blank/my%20day%202.txt"):
        log = ClickLog(uri("blank"), options(SplitRule(test_files=(uri(key),)), log_transform=False))
        assert [[row[1] for row in rows_of(log, split)] for split in ("train", "test")] == [[1, 1], [2, 2]]
    convert(uri("blank/my day 1.txt"), tmp_path / "one.parquet")
    assert (tmp_path / "one.parquet").is_file()


def test_bad_rows_and_changed_files_are_named(tmp_path, bucket):
    put, uri = bucket
    put(write(tmp_path, [line(), line("x")]), "bad/train.txt")
    log = ClickLog(uri("bad/train.txt"), options())
    with pytest.raises(ValueError, match=r"logs/bad/train.txt, line 2: field 1 \(label\) is 'x'"):
        rows_of(log)
    put(write(tmp_path, [line()] * 3), "bad/train.txt")
    with pytest.raises(ValueError, match=r"logs/bad/train.txt has changed since it was opened: it had \d+ bytes"):
        rows_of(log)


def test_what_can_not_be_read_is_named_at_once(tmp_path, bucket):
    put, uri = bucket
    (tmp_path / "empty").write_bytes(b"")
    put(tmp_path / "empty", "odd/empty")
    with pytest.raises(FileNotFoundError, match="logs/nothing: no such file or folder"):
        ClickLog(uri("nothing"), options())
    with pytest.raises(ValueError, match="logs/odd/empty is empty"):
        ClickLog(uri("odd/empty"), options())
    with pytest.raises(ValueError, match="nosuch://x/y: no file system for this URI"):
        ClickLog("nosuch://x/y", options())


def test_file_systems_of_fsspec(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    path = write(tmp_path, random_lines(50))
    memory = fsspec.filesystem("memory")
    memory.pipe("/logs/train.txt", path.read_bytes())
    logs = [ClickLog(source, options()) for source in ("memory://logs/train.txt", path)]
    assert same(*(log.open("train", 16, shuffle=True) for log in logs))


def test_reader_hosts_need_no_copies_of_the_files(tmp_path):
    """Files of a file system; not fsspec's in memory, whose readers share the position in a file."""
    pytest.importorskip("pyarrow.flight")
    path = tmp_path / "train.txt"
    path.write_bytes(b"".join(line + b"\n" for line in random_lines(80)))
    log = ClickLog(path.as_uri(), options())
    with ReaderHost(log) as first, ReaderHost(ClickLog(log.files[0], options()), token=first.token) as second:
        remote = RemoteData([first.address, second.address], token=first.token)
        for rank in range(2):
            with open_shards(remote, "train", 8, rank, 2) as stream, open_shards(log, "train", 8, rank, 2) as local:
                assert same(stream, local)
