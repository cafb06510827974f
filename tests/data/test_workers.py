"""Data loader workers: the same batches as without them, and no process, thread or file that outlives its use."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("pyarrow")

from tests.data.logs import same
from tests.data.threads import running
from tritonemb.data import DataLoaderWorkers, make_synthetic
from tritonemb.data.loader import open_shards

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


def read(workers, split, batch_size, rank=0, world=1, shards=None, **how):
    return open_shards(None, split, batch_size, rank, world, shards, workers=workers, **how)


def test_loose_batches_with_several_ids_arrive_whole(bundle, workers):
    with read(workers[1], "endless/loose", 5) as there, bundle.open("endless/loose", 5) as here:
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
def test_errors_of_a_worker_come_with_their_type(bundle, workers, split, kind, message):
    batches = []
    with read(workers[3], split, 8) as stream, pytest.raises((kind, RuntimeError), match=message) as caught:
        batches.extend(stream)
    assert bool(batches) == split.startswith("failing")  # the bad row is in the first window
    assert type(caught.value) is (RuntimeError if kind is UnicodeDecodeError else kind)
    assert "In data loader worker " in caught.value.__notes__[0]
    if split == "strict/train":
        with pytest.raises(kind, match=message) as plain:
            list(bundle.open(split, 8))
        assert str(plain.value) == str(caught.value)
    assert not running()


def test_errors_of_opening_come_at_once(workers):
    with pytest.raises(ValueError, match="has no 'test' rows, only train"):
        read(workers[1], "tsv-60/test", 4)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        read(workers[3], "tsv-60/train", 0, 1, 3)
    position = read(workers[1], "memory-60/train", 4).position
    with pytest.raises(ValueError, match="other data or other settings"):
        read(workers[1], "memory-60/train", 5, positions=position)


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def test_a_worker_does_not_run_away_from_a_slow_trainer(bundle, workers):
    made = bundle.folder / "made slow trainer"
    with read(workers[1], "endless/slow trainer", 20_000) as stream:
        next(stream)
        ahead, deadline = 0, time.monotonic() + WAIT
        while ahead != size_of(made):
            assert time.monotonic() < deadline
            ahead = size_of(made)
            time.sleep(0.5)
        assert ahead <= 14  # five wait in the worker, two here, and some are on their way
        for _ in range(10):
            next(stream)
        wait_until(lambda: size_of(made) >= ahead + 10)


@pytest.mark.parametrize("split", ["endless", "slow"])
@pytest.mark.parametrize("way", ["close", "drop"])
def test_a_stream_that_is_left_ends_in_the_worker_too(bundle, workers, split, way):
    mark = f"{split} {way}"
    stream = read(workers[1], f"{split}/{mark}", 8)
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


def test_a_stream_is_closed_while_another_thread_waits_for_its_batch(workers):
    stream = read(workers[1], "slow/waited", 8)
    next(stream)
    found = []
    waiting = threading.Thread(target=lambda: found.extend(stream))
    waiting.start()
    time.sleep(0.2)
    stream.close()
    waiting.join(1.5)
    assert not waiting.is_alive()
    assert found == []
    assert not running()


def threads_of(workers):
    return max(len(os.listdir(f"/proc/{pid}/task")) for pid in workers.pids)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
def test_workers_keep_few_threads_and_none_of_streams_that_are_gone(workers):
    for _ in range(3):
        with read(workers[3], "gz-60/train", 1, shards=6) as stream:
            next(stream)
        wait_until(lambda: threads_of(workers[3]) <= 7)


def test_shards_are_dealt_to_the_workers(workers):
    with read(workers[3], "memory-60/train", 4, shards=7) as stream:
        names = [shard.stream.worker.name for shard in stream._shards]
        assert len(set(names)) == 3
        assert names == (names[:3] * 3)[:7]
        assert sum(map(len, stream)) == 60


@pytest.mark.more
def test_a_worker_that_is_killed_is_named(bundle, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with DataLoaderWorkers(bundle, 2) as workers:
        with read(workers, "memory-60/train", 8, 1, 2, shuffle=True) as there:
            assert same(there, bundle.open("memory-60/train", 8, shard=(1, 2), shuffle=True))
        other = read(workers, "memory-60/train", 4, 1, 2)
        first = read(workers, "slow/killed", 4)
        next(first)
        pids = workers.pids
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=rf"data loader worker 1 \(pid {pids[1]}\) has ended"):
            next(first)
        assert time.monotonic() - start < 1.8  # it does not wait for a batch
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
    assert not any(map(alive, pids))
    assert not running()


@pytest.mark.more
def test_the_collector_may_close_workers_inside_a_functional_transform(bundle):
    workers = DataLoaderWorkers(bundle, 1)
    assert sum(map(len, read(workers, "memory-60/train", 4, shards=1))) == 60

    def loss(x):
        workers.close()
        return x.sum()

    assert torch.func.grad(loss)(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.more
def test_a_stream_may_be_opened_in_inference_mode(bundle):
    with DataLoaderWorkers(bundle, 1) as workers:
        with torch.inference_mode():
            assert sum(map(len, read(workers, "memory-60/train", 4, shards=1))) == 60
        assert sum(map(len, read(workers, "memory-60/train", 4, shards=1))) == 60
        assert len(workers.pids) == 1


STARTER = """
import os, sys, threading, time
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
        time.sleep(60)  # with the pipes to the workers open
        os._exit(0)
    print(child, *workers.pids, flush=True)
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
        time.sleep(0.2)
        assert all(map(alive, pids))
        killed.kill()
        killed.wait()
        wait_until(lambda: not any(map(alive, pids)))
        assert os.listdir(tmp_path / "k") == []
    finally:
        os.kill(child, signal.SIGKILL)
        killed.communicate()
    out, errors = ended.communicate(timeout=WAIT)
    assert (ended.returncode, errors) == (0, "")
    assert not any(map(alive, map(int, out.split()[1:])))
    assert os.listdir(tmp_path / "e") == []
    _, errors = unguarded.communicate(timeout=WAIT)
    assert unguarded.returncode == 1
    assert "Fatal" not in errors
    assert "if __name__ == '__main__':" in errors
    assert os.listdir(tmp_path / "u") == []


def test_tensors_of_a_data_set_are_in_memory_once():
    data = make_synthetic(20_000, 1000)
    expected = list(data.open("train", 512, shuffle=True))
    stream = open_shards(data, "train", 512, workers=DataLoaderWorkers(data, 2), shuffle=True)
    (pid,) = stream.workers.pids
    with stream:  # which keeps its workers
        assert same(stream, expected)
    for rows in (data.train, data.test):
        tensors = [rows.dense, rows.labels, *(column.values for column in rows.columns)]
        assert all(tensor.is_shared() for tensor in tensors)
    del stream
    wait_until(lambda: not alive(pid))
    assert same(data.open("train", 512, shuffle=True), expected)


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
