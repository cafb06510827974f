"""Streams that data loader workers and reader hosts read: loose batches, errors, their ends, and how far they run
ahead."""

import itertools

import pytest
import torch

pytest.importorskip("pyarrow.flight")

from tests.data.threads import running, threads_end
from tritonemb.data.loader import open_shards

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
def read(place, request):
    """Opens a stream of the bundle, which is read there."""
    if place == "host":
        return request.getfixturevalue("remote").open
    workers = request.getfixturevalue("workers")[1]
    return lambda split, batch_size: open_shards(None, split, batch_size, workers=workers)


def test_loose_batches_with_several_ids_arrive_whole(bundle, read):
    with read("endless/loose", 5) as remote, bundle.open("endless/loose", 5) as local:
        for _ in range(3):
            a, b = next(remote), next(local)
            assert a.sparse.keys() == b.sparse.keys()
            assert a.sparse.to_lists() == b.sparse.to_lists()
            assert a.sparse.values().dtype == torch.int64
            assert torch.equal(a.dense, b.dense)
            assert torch.equal(a.labels, b.labels)
            assert (remote.position, remote.report) == (local.position, local.report)


@pytest.mark.parametrize(("place", "error"), list(itertools.product(PLACES, ERRORS)))
def test_errors_come_with_their_type(bundle, place, read, error):
    split, kind, message = error
    batches = []
    with pytest.raises(kind, match=message) as caught:
        batches.extend(read(split, 8))
    assert bool(batches) == split.startswith("failing")  # the bad row is in the first window
    assert type(caught.value) is kind
    assert {"worker": "In data loader worker ", "host": "In grpc://127.0.0.1:"}[place] in caught.value.__notes__[0]
    if split == "strict/train":
        with pytest.raises(kind, match=message) as plain:
            list(bundle.open(split, 8))
        assert str(plain.value) == str(caught.value)
    assert not running()


def test_streams_do_not_run_away_from_a_slow_trainer(bundle, place, read):
    """While this process makes many batches of another stream, few are made of this one."""
    created = bundle.marks(f"made slow trainer {place}")
    with read(f"endless/slow trainer {place}", 20_000) as stream:
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
def test_a_stream_that_is_left_ends_there_too(bundle, place, read, split, way):
    mark = f"{split} {way} {place}"
    go, ended = bundle.marks(f"go {mark}"), bundle.marks(f"ended {mark}")
    stream = read(f"{split}/{mark}", 8)
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
