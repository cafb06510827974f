"""Rows are written back if a batch that has ended changed them: no update is lost, and nothing else is written."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import tritonemb as te
from tests.helpers import CACHED, assert_same_bits, contents
from tests.nn.tiers import not_interpreted, outputs_of, seeded, varied_steps
from tritonemb import ops
from tritonemb.tables.cache import Pins
from tritonemb.tables.cache_storage import RowMoves, RowTransfer
from tritonemb.tables.server_table import make_table

pytestmark = [pytest.mark.public, not_interpreted]
TABLES = [te.TableConfig("user", 500, 4), te.TableConfig("genre", 70, 2)]
ROW_BYTES = {"user": 20, "genre": 12}


@pytest.fixture(params=["host", "disk", CACHED])
def placement(request):
    return request.param


def make(placement, seed_steps=0):
    collection = seeded(TABLES, te.optim.RowWiseAdagrad(lr=0.1), True, (placement,))
    outputs_of(collection, varied_steps(collection, seed_steps, sizes=(20,), seed=seed_steps))
    return collection


def batch_of(users, genres):
    return te.KeyedJaggedTensor.from_lists({"user": [list(users)], "genre": [list(genres)]})


def bring_others(collection):
    """Rows that no batch holds make room."""
    with torch.no_grad():
        for first in range(0, 500, 100):
            collection(batch_of(range(first, first + 100), range(70)))


def train(*collections, users, genres):
    for collection in collections:
        collection(batch_of(users, genres)).sum().backward()


def test_rows_that_were_brought_and_not_trained_are_not_written(placement):
    tiered = make(placement)
    for first in range(0, 300, 60):
        te.nn.prefetch(tiered, batch_of(range(first, first + 60), range(40)))  # dropped
        tiered(batch_of(range(first, first + 60), range(40)))  # with gradients recorded, and without a backward
        with tiered.accumulate():
            tiered(batch_of(range(first, first + 60), range(40)))
    occupied = tiered.group(batch_of([1, 2], [3]))
    tiered.state_dict()
    bring_others(tiered)
    del occupied
    tiered.state_dict()
    assert all(
        cache_statistic.written == 0 < cache_statistic.evictions
        for cache_statistic in tiered.cache_statistics().values()
    )
    train(tiered, users=[5, 7, 7], genres=[1, 1])
    tiered.state_dict()
    tiered.state_dict()
    assert {name: cache_statistic.written for name, cache_statistic in tiered.cache_statistics().items()} == {
        "user": 2 * ROW_BYTES["user"], "genre": ROW_BYTES["genre"],
    }  # fmt: skip


@pytest.mark.parametrize("part", [True, False])
def test_loading_in_place_while_a_batch_waits(placement, part):
    """As `torch.distributed.checkpoint` does it, which writes to the tensors of `state_dict`."""
    tiered, saved = make(placement, 2), contents(make("device", 3))
    ahead = tiered.group(batch_of(range(60), range(60)))
    live = tiered.state_dict()
    for name, tensor in live.items():
        tensor.copy_(saved[name])
    inputs = {name: tensor for name, tensor in live.items() if not part or name.endswith("weight")}
    tiered.load_state_dict(inputs, strict=not part)
    del ahead
    bring_others(tiered)
    result = contents(tiered)
    assert_same_bits({name: result[name] for name in inputs}, {name: saved[name] for name in inputs})


def test_a_state_dict_of_before_says_what_is_so_now():
    """It is the table's own memory, as on the device: to load it changes nothing."""
    tiered, twin = make("host", 2), make("device", 2)
    steps = varied_steps(twin, 3, sizes=(40,))
    for collection in (tiered, twin):
        initial = collection.state_dict()
        outputs_of(collection, steps)
        collection.load_state_dict(initial)
    expected = contents(twin)
    assert_same_bits(contents(tiered), expected)
    bring_others(tiered)
    assert_same_bits(contents(tiered), expected)


def held_by_two_batches(collection):
    """What the first changes is saved while the second holds it; what the second changes comes after that."""
    outs = [collection(batch_of([1, 2, 3], [4])).sum() for _ in range(2)]
    for out in outs:
        out.backward()
        yield contents(collection)


def between_forward_and_backward(collection):
    out = collection(batch_of(range(40), [3])).sum()
    yield contents(collection)
    out.backward()
    bring_others(collection)


def between_an_update_and_the_end_of_its_batch(collection):
    """As another thread may."""
    update = ops.row_update_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "row_update_", lambda *args: (update(*args), collection.state_dict()))
        train(collection, users=[1, 2], genres=[3])
    yield contents(collection)


def while_gradients_are_accumulated(collection):
    with collection.accumulate():
        for first in (0, 20):
            collection(batch_of(range(first, first + 40), [3])).sum().backward()
            yield contents(collection)


@pytest.mark.parametrize(
    "saves",
    [
        held_by_two_batches, between_forward_and_backward, between_an_update_and_the_end_of_its_batch,
        while_gradients_are_accumulated,
    ],
)  # fmt: skip
def test_saving_loses_no_update(saves, placement):
    tiered, twin = make(placement), make("device")
    for saved, expected in zip(saves(tiered), saves(twin), strict=True):
        assert_same_bits(saved, expected)
    bring_others(tiered)
    assert_same_bits(contents(tiered), contents(twin))


@pytest.mark.usefixtures("frozen_objects")
def test_an_update_whose_end_is_interrupted_is_not_lost(placement, monkeypatch):
    tiered, twin = make(placement), make("device")
    train(twin, users=[1, 2], genres=[3])

    def interrupt(pinned, step=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Pins, "release", interrupt)
        patch.setattr(Pins, "__del__", lambda pinned: Pins.release(pinned))
        out = tiered(batch_of([1, 2], [3])).sum()
        with pytest.raises(KeyboardInterrupt):
            out.backward()
    del out
    gc.collect()
    bring_others(tiered)
    assert_same_bits(contents(tiered), contents(twin))


def test_the_stream_that_read_slots_is_waited_for_whichever_thread_ends_their_batch(monkeypatch):
    class Stream:
        def __init__(self) -> None:
            self.waited = []

        def record_event(self):
            return self

        def wait_event(self, event):
            self.waited.append(event)

    reader, other = Stream(), Stream()
    main = threading.get_ident()
    tiered = make("host")
    sent = [tiered.group(batch_of([1, 2], [3]))]
    sent[0].pins.ready = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: reader if threading.get_ident() == main else other)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(tiered.cache, "device", torch.device("cuda"))
    sent[0].acquire(tiered.table_set)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(sent.clear).result()  # the last that refers to it
        thread.submit(tiered.cache._unpin_released).result()
    assert other.waited == [other, reader]


class Slow:
    """Writes that have ended when somebody waits for them, in a store that takes them all."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.waited: list[int] = []

    def transfer(self, requests, write):
        ((_, rows, _),), number = requests, len(self.asked)
        self.asked.append(rows.tolist())
        return [SimpleNamespace(wait=lambda: self.waited.append(number))]


@pytest.mark.parametrize("size", [1, 3, 20])
def test_writes_that_nobody_waits_for_take_little_memory(size):
    """As of a table whose rows only leave, while only others' are read."""
    store, tables = Slow(), [make_table(te.TableConfig(name, 20, 4, placement="host"), ()) for name in "ab"]
    tables[1].rows.store = store
    transfer = RowTransfer(tables, torch.tensor([0, 20]))
    rows = torch.randperm(20)[:size]
    moves = RowMoves([0, size], torch.tensor([0, 0, size]), torch.ones_like(rows), rows, rows)
    for number in range(50):
        transfer.write(moves)
        assert store.waited == list(range(number))  # the writes of one batch are pending
    transfer.finish_writes()
    assert store.waited == list(range(50))
    assert store.asked == [rows.sort()[0].tolist()] * 50
