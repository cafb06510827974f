"""Reader processes: the same batches as without them, and no process, thread or file that outlives its use."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from tests.data.logs import same
from tests.data.threads import running
from tritonemb.data import make_synthetic
from tritonemb.data.readers import ReaderProcesses, RemoteStream, packing, wire
from tritonemb.data.readers.address import Address
from tritonemb.data.shares import open_shares

WAIT = 20.0


def wait_until(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_loose_batches_with_several_ids_arrive_whole(bundle, addresses):
    with RemoteStream(addresses[1], "endless/loose", 5) as there, bundle.open("endless/loose", 5) as here:
        for _ in range(3):
            a, b = next(there), next(here)
            assert a.sparse.keys() == b.sparse.keys()
            assert a.sparse.to_lists() == b.sparse.to_lists()
            assert a.sparse.values().dtype == torch.int64
            assert torch.equal(a.dense, b.dense)
            assert torch.equal(a.labels, b.labels)
            assert there.position == here.position
            assert there.report == here.report


@pytest.mark.parametrize(
    ("split", "kind", "message"),
    [
        ("strict/train", ValueError, "bad.txt, line 41: expected 40 tab-separated fields, found 1"),
        ("failing/missing", FileNotFoundError, "No such file or directory: "),
        ("failing/key", KeyError, "a key"),
        ("failing/unicode", UnicodeDecodeError, "can't decode byte 0xff"),
        ("failing/odd", RuntimeError, "OddError: odd things happen"),
    ],
)
def test_errors_of_a_reader_come_with_their_type(bundle, addresses, split, kind, message):
    batches = []
    with RemoteStream(addresses[3], split, 8) as stream, pytest.raises((kind, RuntimeError), match=message) as caught:
        batches.extend(stream)
    assert bool(batches) == split.startswith("failing")  # the bad row is in the first window
    assert type(caught.value) is (RuntimeError if kind is UnicodeDecodeError else kind)
    assert "In reader process 0 (pid " in caught.value.__notes__[0]
    if split == "strict/train":
        with pytest.raises(kind, match=message) as plain:
            list(bundle.open(split, 8))
        assert str(plain.value) == str(caught.value)
    assert not running()


def test_errors_of_opening_come_at_once(addresses):
    with pytest.raises(ValueError, match="has no 'test' rows, only train"):
        RemoteStream(addresses[1], "tsv-60/test", 4)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        open_shares(None, "tsv-60/train", 0, 1, 3, readers=addresses[3])
    position = RemoteStream(addresses[1], "memory-60/train", 4).position
    with pytest.raises(ValueError, match="other data or other settings"):
        RemoteStream(addresses[1], "memory-60/train", 5, position=position)


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def test_a_reader_does_not_run_away_from_a_slow_trainer(bundle, addresses):
    made = bundle.folder / "made slow trainer"
    with RemoteStream(addresses[1], "endless/slow trainer", 20_000) as stream:
        next(stream)
        ahead, deadline = 0, time.monotonic() + WAIT
        while ahead != size_of(made):
            assert time.monotonic() < deadline
            ahead = size_of(made)
            time.sleep(0.5)
        assert ahead <= 14  # four wait on each side, and on each two more are on their way
        for _ in range(10):
            next(stream)
        wait_until(lambda: size_of(made) >= ahead + 10)


@pytest.mark.parametrize("split", ["endless", "slow"])
@pytest.mark.parametrize("way", ["close", "drop"])
def test_a_stream_that_is_left_ends_in_the_reader_too(bundle, addresses, split, way):
    mark = f"{split} {way}"
    stream = RemoteStream(addresses[1], f"{split}/{mark}", 8)
    next(stream)
    if way == "close":
        start = time.monotonic()
        stream.close()
        assert time.monotonic() - start < 1.8  # it does not wait for a batch
        assert not running()
    else:
        del stream
        wait_until(lambda: not running())
    wait_until((bundle.folder / f"ended {mark}").exists)


def threads_of(address):
    return [len(os.listdir(f"/proc/{place.pid}/task")) for place in Address.from_text(address).places]


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
def test_readers_keep_few_threads_and_none_of_streams_that_are_gone(addresses):
    wait_until(lambda: max(threads_of(addresses[3])) <= 5)
    streams = [RemoteStream(addresses[3], "gz-60/train", 1, share=(index, 6)) for index in range(6)]
    for stream in streams:
        next(stream, None)
        stream.close()
    wait_until(lambda: max(threads_of(addresses[3])) <= 5)


def test_shares_go_to_their_readers(bundle, addresses):
    """The marks of the bundle can not tell; the notes of errors do."""
    for index in range(4):
        stream = RemoteStream(addresses[3], "failing/odd", 4, share=(index, 7))
        with pytest.raises(RuntimeError, match="odd things") as caught:
            list(stream)
        assert f"In reader process {index % 3} (pid" in caught.value.__notes__[0]


def test_a_reader_that_is_killed_is_named(bundle, monkeypatch, tmp_path):
    """Also over TCP, where paths are too long for sockets."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with ReaderProcesses(bundle, 2) as readers:
        address = Address.from_text(readers.address)
        assert all(place.port and not place.path for place in address.places)
        for token in ("", "wrong", None):
            with address.places[0].connect() as stranger:
                request = {"token": token, "split": "tsv-60/train", "batch_size": 4, "share": (0, 1)}
                wire.send(stranger, wire.REQUEST, request)
                assert stranger.recv(1) == b""
        with socket.create_connection(("127.0.0.1", address.places[0].port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        with RemoteStream(readers.address, "memory-60/train", 8, share=(1, 2), shuffle=True) as there:
            assert same(there, bundle.open("memory-60/train", 8, share=(1, 2), shuffle=True))
        first = RemoteStream(readers.address, "slow/killed", 4)
        other = RemoteStream(readers.address, "memory-60/train", 4, share=(1, 2))
        next(first)
        os.kill(readers.pids[0], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=rf"reader process 0 \(pid {readers.pids[0]}\) has ended"):
            next(first)
        assert time.monotonic() - start < 1.8  # it does not wait for a batch
        with pytest.raises(RuntimeError, match=r"reader process 0 \(pid \d+\) has ended"):
            RemoteStream(readers.address, "memory-60/train", 4)
        assert sum(map(len, other)) == 30
        left = RemoteStream(readers.address, "endless/left", 4, share=(1, 2))
    with pytest.raises(RuntimeError, match="reader process 1"):
        list(left)
    assert not any(map(alive, readers.pids))
    assert not running()
    assert os.listdir(folder) == []


STARTER = """
import os, sys, time
from dataclasses import dataclass
import torch
from tritonemb.data import Column, Dataset, Feature, Rows
from tritonemb.data.readers import ReaderProcesses, RemoteStream

@dataclass
class Own:  # of the main program
    data: object
    def open(self, split, batch_size, **how):
        return self.data.open(split, batch_size, **how)

if GUARD:
    rows = Rows(torch.zeros(100, 1), (Column(torch.arange(100)),), torch.zeros(100))
    readers = ReaderProcesses(Own(Dataset("own", (Feature("id", 100),), rows, rows)), 1)
    left = RemoteStream(readers.address, "train", 10)
    next(left)
    child = os.fork() if END == "wait" else -1
    if child == 0:
        time.sleep(60)  # with the pipes to the readers open
        os._exit(0)
    print(child, readers.address, flush=True)
    time.sleep(60 if END == "wait" else 0)
"""


def started(tmp_path, name, guard, end):
    script = tmp_path / f"{name}.py"
    script.write_text(STARTER.replace("GUARD", guard).replace("END", repr(end)))
    (tmp_path / name).mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / name), "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
@pytest.mark.more
def test_readers_end_with_the_process_that_started_them(tmp_path):
    """Killed, with a process forked off it that holds all its pipes; or ended with readers and streams left open."""
    killed = started(tmp_path, "k", '__name__ == "__main__"', "wait")
    ended = started(tmp_path, "e", '__name__ == "__main__"', "")
    unguarded = started(tmp_path, "u", "True", "")
    child, _, text = killed.stdout.readline().partition(" ")
    pids = [place.pid for place in Address.from_text(text).places]
    try:
        with RemoteStream(text, "train", 10, share=(1, 2)) as stream:  # from another process of the host
            assert sum(map(len, stream)) == 50
        assert all(map(alive, pids))
        for pid in pids:
            os.kill(pid, signal.SIGTERM)  # as a job's processes get it, all of them
        killed.kill()
        killed.wait()
        wait_until(lambda: not any(map(alive, pids)))
        assert os.listdir(tmp_path / "k") == []
    finally:
        os.kill(int(child), signal.SIGKILL)
        killed.communicate()
    out, errors = ended.communicate(timeout=WAIT)
    assert (ended.returncode, errors) == (0, "")
    pids = [place.pid for place in Address.from_text(out.partition(" ")[2]).places]
    assert not any(map(alive, pids))
    assert os.listdir(tmp_path / "e") == []
    _, errors = unguarded.communicate(timeout=WAIT)
    assert unguarded.returncode == 1
    assert "Fatal" not in errors
    assert 'put what the program does behind `if __name__ == "__main__":`' in errors
    assert os.listdir(tmp_path / "u") == []


def test_arrays_go_through_one_file_and_come_out_the_same(tmp_path):
    wide = torch.arange(24, dtype=torch.float64).view(4, 6)
    half = torch.arange(5, dtype=torch.bfloat16)
    given = {
        "tensors": [wide, wide.T, wide[1:, ::2], torch.zeros(0, 3), torch.tensor(7), half, torch.ones(3, dtype=bool)],
        "arrays": [np.arange(100), np.array(["a", None]), np.zeros((3, 0))],
        "own": Counter("abca"),
    }
    packed = packing.pack(given, tmp_path / "arrays")
    assert len(packed["pickle"]) < 2500
    found = packing.unpack(packed)
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(given["tensors"], found["tensors"], strict=True)
    )
    assert all(np.array_equal(a, b) for a, b in zip(given["arrays"], found["arrays"], strict=True))
    assert found["own"] == given["own"]
    found["tensors"][0][0, 0] = 99.0
    assert packing.unpack(packed)["tensors"][0][0, 0] == 0.0
    data = make_synthetic(20_000, 1000)
    packed = packing.pack(data, tmp_path / "arrays")
    parts = [tensor for rows in (data.train, data.test) for tensor in (rows.dense, rows.labels)]
    parts += [
        tensor
        for rows in (data.train, data.test)
        for column in rows.columns
        for tensor in (column.values, column.offsets)
        if tensor is not None
    ]
    assert len(packed["pickle"]) < 20_000
    assert size_of(tmp_path / "arrays") < sum(part.nbytes for part in parts) + 64 * len(parts)
    assert same(packing.unpack(packed).train_batches(512), data.train_batches(512))


class Unpicklable:
    def __init__(self):
        self.function = lambda: None


def test_what_can_not_be_read_by_readers_is_refused(bundle):
    with pytest.raises(ValueError, match="the number of readers must be at least 1, got 0"):
        ReaderProcesses(bundle, 0)
    with pytest.raises(TypeError, match="need a data set that can be pickled; Unpicklable can not"):
        ReaderProcesses(Unpicklable(), 1)
