"""Data loader workers: the same batches as without them, and no process, thread or file that outlives its use. Streams
that they and reader hosts read: loose batches, errors, their ends, and how far they run ahead."""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.data.logs import same
from tests.data.threads import running, threads_end
from tests.helpers import DEADLINE, process_ends
from tritonemb.data import DataLoaderWorkers, make_synthetic
from tritonemb.data.loader import open_shards


def read(workers, split, batch_size, rank=0, world=1, shards=None, **how):
    return open_shards(None, split, batch_size, rank, world, shards, workers=workers, **how)


def test_errors_of_opening_come_at_once(workers):
    with pytest.raises(ValueError, match="has no 'test' rows, only train"):
        read(workers[1], "tsv-60/test", 4)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        read(workers[3], "tsv-60/train", 0, 1, 3)
    with read(workers[1], "memory-60/train", 4) as stream:
        position = stream.position
    with pytest.raises(ValueError, match="other data or with other settings"):
        read(workers[1], "memory-60/train", 5, positions=position)


def test_a_stream_is_closed_while_another_thread_waits_for_its_batch(bundle, workers):
    go, ended = bundle.marks("go waited"), bundle.marks("ended waited")
    stream = read(workers[1], "slow/waited", 8)
    next(stream)
    batches, begun = [], threading.Event()
    waiting = threading.Thread(target=lambda: (begun.set(), batches.extend(stream)))
    waiting.start()
    assert begun.wait(DEADLINE)
    stream.close()
    waiting.join(DEADLINE)
    assert not waiting.is_alive()
    assert batches == []
    assert not running()
    assert ended.count() == 0  # it has not waited for the batch
    go.add()
    ended.wait_for(1)


def threads_of(workers):
    return max(len(os.listdir(f"/proc/{pid}/task")) for pid in workers.pids)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
def test_workers_keep_few_threads_and_none_of_streams_that_are_gone(workers):
    for _ in range(3):
        with read(workers[1], "gz-60/train", 1, shards=6) as stream:
            next(stream)
    with read(workers[1], "memory-60/train", 60) as stream:  # once those before it have been closed
        next(stream)
        assert threads_of(workers[1]) <= 8


@pytest.mark.more
def test_a_worker_that_is_killed_is_named(bundle, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with DataLoaderWorkers(bundle, 2) as workers:
        with read(workers, "memory-60/train", 8, 1, 2, shuffle=True) as remote:
            assert same(remote, bundle.open("memory-60/train", 8, shard=(1, 2), shuffle=True))
        other = read(workers, "memory-60/train", 4, 1, 2)
        first = read(workers, "slow/killed", 4)  # without a second batch
        next(first)
        pids = workers.pids
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match=rf"data loader worker 1 \(pid {pids[1]}\) has ended"):
            next(first)
        assert sum(map(len, other)) == 30
        with read(workers, "memory-60/train", 4, shards=2) as again:  # by a new process too
            assert sum(map(len, again)) == 60
        assert (workers.pids[0], len(workers.pids)) == (pids[0], 2)
        assert workers.pids[1] != pids[1]
        left = read(workers, "endless/left", 4)
        pids = workers.pids
    with pytest.raises(RuntimeError, match=r"worker . \(pid \d+\) has ended: its DataLoaderWorkers have been"):
        list(left)
    with pytest.raises(RuntimeError, match="have been closed"):
        read(workers, "memory-60/train", 4)
    assert all(map(process_ends, pids))
    assert not running()


@pytest.mark.more
def test_streams_and_workers_know_no_mode_of_the_thread(bundle):
    """A stream may be opened in inference mode, and the collector may close workers inside a functional transform."""

    def rows():
        return sum(map(len, read(workers, "memory-60/train", 4, shards=1)))

    def loss(x):
        workers.close()
        return x.sum()

    with DataLoaderWorkers(bundle, 1) as workers:
        with torch.inference_mode():
            assert rows() == 60
        assert rows() == 60
        assert len(workers.pids) == 1
        assert torch.func.grad(loss)(torch.ones(2)).tolist() == [1, 1]


STARTER = """
import os, signal, threading
from dataclasses import dataclass
import torch
from tritonemb.data import Column, Dataset, DataLoaderWorkers, Feature, Rows, open_shards

@dataclass
class Own:  # of the main program
    data: object
    def open(self, split, batch_size, **how):
        threading.Thread(target=share_tensors, daemon=True).start()
        return self.data.open(split, batch_size, **how)

def share_tensors():  # as the loader does in a thread of the worker, which may be at it when the worker ends
    while True:
        torch.zeros(10).share_memory_()

if GUARD:
    rows = Rows(torch.zeros(100, 1), (Column(torch.arange(100)),), torch.zeros(100))
    workers = DataLoaderWorkers(Own(Dataset("own", (Feature("id", 100),), rows, rows)), 1)
    left = open_shards(None, "train", 10, workers=workers)
    next(left)
    child = os.fork() if END == "wait" else -1
    if child == 0:
        signal.pause()  # with the pipes to the workers open
    print(child, *workers.pids, flush=True)
    if END == "wait":
        signal.pause()
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
def test_workers_end_with_the_process_that_started_them(tmp_path):
    """Killed, with a process forked off it that holds all its pipes; or ended with workers and streams left open."""
    killed = started(tmp_path, "k", '__name__ == "__main__"', "wait")
    ended = started(tmp_path, "e", '__name__ == "__main__"', "")
    unguarded = started(tmp_path, "u", "True", "")
    child, *pids = map(int, killed.stdout.readline().split())
    try:
        assert len(pids) == 1
        for pid in pids:
            os.kill(pid, signal.SIGTERM)  # as a job's processes get it, all of them
            status = Path(f"/proc/{pid}/status").read_text()
            ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
            assert ignored >> (signal.SIGTERM - 1) & 1
        killed.kill()
        killed.wait()
        assert all(map(process_ends, pids))
        assert os.listdir(tmp_path / "k") == []
    finally:
        os.kill(child, signal.SIGKILL)
        killed.communicate()
    out, errors = ended.communicate(timeout=DEADLINE)
    assert (ended.returncode, errors) == (0, "")
    assert all(map(process_ends, map(int, out.split()[1:])))
    assert os.listdir(tmp_path / "e") == []
    _, errors = unguarded.communicate(timeout=DEADLINE)
    assert unguarded.returncode == 1
    assert "Fatal" not in errors
    assert "if __name__ == '__main__':" in errors
    assert os.listdir(tmp_path / "u") == []


def test_workers_that_nobody_else_has_end_with_their_stream():
    """Shards are dealt to them, and the tensors of a data set are in memory once."""
    data = make_synthetic(20_000, 1000)
    options = {"shards": 5, "shuffle": True}
    expected = list(open_shards(data, "train", 512, **options))
    stream = open_shards(data, "train", 512, workers=DataLoaderWorkers(data, 2), **options)
    streams = [shard.stream for shard in stream._shards]
    names = [stream.worker.name for stream in streams]
    assert len(set(names)) == 2
    assert names == (names[:2] * 3)[:5]
    pids = streams[0].workers.pids
    del streams
    with stream:  # which keeps its workers
        assert same(stream, expected)
    for rows in (data.train, data.test):
        tensors = [rows.dense, rows.labels, *(column.values for column in rows.columns)]
        assert all(tensor.is_shared() for tensor in tensors)
    del stream
    assert all(map(process_ends, pids))
    assert same(open_shards(data, "train", 512, **options), expected)


class Unpicklable:
    def __init__(self):
        self.function = lambda: None


def test_what_workers_cannot_read_is_refused(bundle):
    with pytest.raises(ValueError, match="the number of data loader workers must be at least 1, got 0"):
        DataLoaderWorkers(bundle, 0)
    with (
        DataLoaderWorkers(Unpicklable(), 1) as workers,
        pytest.raises(TypeError, match="need a data set that can be pickled; Unpicklable cannot"),
    ):
        read(workers, "train", 4)
    assert not running()


PLACES = ("worker", "host")
ERRORS = [
    ("strict/train", ValueError, "bad.txt, line 41: expected 40 tab-separated fields, found 1"),
    ("failing/missing", FileNotFoundError, "No such file or directory: "),
    ("failing/key", KeyError, "a key"),
    ("failing/unicode", RuntimeError, "can't decode byte 0xff"),
    ("failing/odd", RuntimeError, "OddError: odd things happen"),
    ("tsv-60/test", ValueError, "has no 'test' rows, only train"),
]


@pytest.fixture(params=PLACES)
def place(request):
    return request.param


@pytest.fixture
def open_remote(place, request):
    """Opens a stream of the bundle, which is read there."""
    if place == "host":
        pytest.importorskip("pyarrow.flight")
        return request.getfixturevalue("remote").open
    return partial(read, request.getfixturevalue("workers")[1])


def test_loose_batches_with_several_ids_arrive_whole(bundle, open_remote):
    with open_remote("endless/loose", 5) as remote, bundle.open("endless/loose", 5) as local:
        for _ in range(3):
            a, b = next(remote), next(local)
            assert a.sparse.keys() == b.sparse.keys()
            assert a.sparse.to_lists() == b.sparse.to_lists()
            assert a.sparse.values().dtype == torch.int64
            assert torch.equal(a.dense, b.dense)
            assert torch.equal(a.labels, b.labels)
            assert (remote.position, remote.report) == (local.position, local.report)


@pytest.mark.parametrize(("place", "error"), list(itertools.product(PLACES, ERRORS)))
def test_errors_come_with_their_type(bundle, place, open_remote, error):
    split, kind, message = error
    batches = []
    with pytest.raises(kind, match=message) as caught:
        batches.extend(open_remote(split, 8))
    assert bool(batches) == split.startswith("failing")  # the bad row is in the first window
    assert type(caught.value) is kind
    assert {"worker": "In data loader worker ", "host": "In grpc://127.0.0.1:"}[place] in caught.value.__notes__[0]
    if split == "strict/train":
        with pytest.raises(kind, match=message) as plain:
            list(bundle.open(split, 8))
        assert str(plain.value) == str(caught.value)
    assert not running()


def test_streams_do_not_run_away_from_a_slow_trainer(bundle, place, open_remote):
    """While this process makes many batches of another stream, few are made of this one."""
    created = bundle.marks(f"made slow trainer {place}")
    with open_remote(f"endless/slow trainer {place}", 20_000) as stream:
        next(stream)
        created.wait_for(6)
        with bundle.open(f"endless/fast trainer {place}", 20_000) as other:
            for _ in range(60):
                next(other)
        assert created.count() <= {"worker": 14, "host": 20}[place]  # those that wait, and some on their way
        for _ in range(30):  # the network opens its window again when a part of it is empty
            next(stream)
        created.wait_for(31 + 5)


@pytest.mark.parametrize(
    ("place", "split", "way"), list(itertools.product(PLACES, ("endless", "slow"), ("close", "drop")))
)
def test_a_stream_that_is_left_ends_there_too(bundle, place, open_remote, split, way):
    mark = f"{split} {way} {place}"
    go, ended = bundle.marks(f"go {mark}"), bundle.marks(f"ended {mark}")
    stream = open_remote(f"{split}/{mark}", 8)
    next(stream)
    if way == "close":
        stream.close()
    else:
        del stream
    assert place == "host" or threads_end()
    if split == "slow":
        assert ended.count() == 0  # nobody has waited for a batch
        go.add()
    ended.wait_for(1)
    assert threads_end()
