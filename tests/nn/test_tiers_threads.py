"""One thread brings batches while another trains: overflows grow, rows come and go, and no bit is another."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import ANY

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tritonemb as te
from tests.helpers import assert_same_bits, breadth, contents, fewer
from tests.nn.tiers import ELSEWHERE, not_interpreted, outputs_of, same, seeded, varied_steps
from tests.strategies import random_batch
from tritonemb import ops
from tritonemb.layout import FIRST_ROW, NUM_ROWS
from tritonemb.storage.store import CacheDirectory
from tritonemb.tables.cache_storage import CacheStorage
from tritonemb.types import CacheConfig

pytestmark = [pytest.mark.public, not_interpreted]
TABLES = [te.TableConfig("a", 5000, 8, features=["f", "g"]), te.TableConfig("b", 3000, 4, features=["g"])]
ROWS = {"f": 5000, "g": 3000}


@pytest.fixture(autouse=True)
def _often_another_thread():
    """Threads take turns a hundred times as often, so that they meet in more places."""
    initial = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(initial)


def growing_steps(num_steps, more_samples, max_length, key="unused"):
    """Batches that grow, under keys of which the first is nobody's."""
    generator = torch.Generator().manual_seed(0)
    for index in range(num_steps):
        keys = [key.format(index), "g", "f"]
        batch = random_batch(ROWS, keys, 10 + more_samples * index, max_length, seed=index)
        yield batch, torch.randn(batch.stride(), 20, generator=generator)


@pytest.mark.parametrize("optimizer", [te.optim.Adam(lr=0.1), te.optim.SGD(lr=0.1)], ids=lambda o: o.name)
def test_overflows_grow_while_batches_are_trained(placement, optimizer, monkeypatch):
    """Batches grow, so that slots move to larger memory again and again, all four batches that are held with them."""
    grown = []
    whole = CacheStorage._resize
    monkeypatch.setattr(CacheStorage, "_resize", lambda *args: (grown.append(threading.get_ident()), whole(*args)))
    twin, tiered = seeded(TABLES, optimizer), seeded(TABLES, optimizer, True, (placement,), CacheConfig(rows=64))
    steps = list(growing_steps(fewer(20, 4), 20, 4))
    expected = outputs_of(twin, steps)
    room = threading.Semaphore(4)

    def bring(batch):
        room.acquire()
        return te.nn.prefetch(tiered, batch)

    outputs = []
    with ThreadPoolExecutor(1) as other:
        messages = [other.submit(bring, batch) for batch, _ in steps]
        for (_, grad), created in zip(steps, messages, strict=True):
            out = tiered(created.result())
            out.backward(grad)
            outputs.append(out.detach())
            room.release()
    same(outputs, expected)
    assert_same_bits(contents(tiered), contents(twin))
    assert len(grown) >= 4
    assert threading.get_ident() not in grown


def test_overflows_of_many_tables_grow_at_once(monkeypatch):
    """Or the first batches would take a time that goes with the square of the number of tables."""
    tables = [te.TableConfig(f"t{number}", 60 + 20 * number, 4) for number in range(12)]
    twin, tiered = (seeded(tables, te.optim.SGD(lr=0.1), True, (where,)) for where in ("device", "host"))
    grown, grow = [], CacheDirectory.grow
    monkeypatch.setattr(CacheDirectory, "grow", lambda self, more: (grown.append(list(more)), grow(self, more)))
    batches = [
        te.KeyedJaggedTensor.from_lists({table.name: [list(range(size(n)))] for n, table in enumerate(tables)})
        for size in (lambda number: 20, lambda number: 60 if number % 2 else 1, lambda number: 60 + 20 * number)
    ]
    for collection in (tiered, twin):
        outs = [collection(batch).sum() for batch in batches]
        for out in outs:
            out.backward()
    growing = [*(number % 2 == 1 for number in range(12)), False]  # the last are rows of no table
    assert [[bool(number) for number in more] for more in grown] == [growing, ANY]
    assert_same_bits(contents(tiered), contents(twin))


@pytest.mark.few(1)
def test_new_orders_of_keys_while_overflows_grow(placement):
    """What keys mean is made by one thread while the other moves slots to other memory."""
    twin, tiered = (seeded(TABLES, te.optim.SGD(lr=0.1), True, (where,)) for where in ("device", placement))
    steps = list(growing_steps(fewer(40, 4), 10, 2, "unused {}"))
    expected, outputs = outputs_of(twin, steps), []
    with ThreadPoolExecutor(1) as other:
        evaluated = [other.submit(tiered.group, batch) for batch, _ in reversed(steps)]
        for batch, grad in steps:
            out = tiered(batch)
            out.backward(grad)
            outputs.append(out.detach())
        for created in evaluated:
            created.result()
    same(outputs, expected)
    assert_same_bits(contents(tiered), contents(twin))


@pytest.mark.parametrize("use", ["embedding_bag", "row_update_"])
def test_slots_do_not_move_while_they_are_used(use, monkeypatch):
    """Another thread needs more of them in the midst of a forward or a backward: it waits."""
    tiered = seeded(TABLES, te.optim.SGD(lr=0.1), True, ("host",))
    small, large = (random_batch(ROWS, ["g", "f"], size, 4, seed=size) for size in (40, 400))
    whole, requests = getattr(ops, use), []

    def meanwhile(*args, **kwargs):
        initial = [table.weight.data_ptr() for table in tiered.tables]
        requests.append(other.submit(tiered.group, large))
        with pytest.raises(TimeoutError):
            requests[0].result(0.3)
        assert [table.weight.data_ptr() for table in tiered.tables] == initial
        return whole(*args, **kwargs)

    with ThreadPoolExecutor(1) as other:
        groups = tiered.group(small)
        with monkeypatch.context() as patch:
            if use == "embedding_bag":
                patch.setattr(ops, use, meanwhile)
            out = tiered(small, groups)
            patch.setattr(ops, use, meanwhile if use == "row_update_" else whole)
            initial = [table.weight.data_ptr() for table in tiered.tables]
            out.sum().backward()
        requests[0].result(60)
        if use == "row_update_":
            assert [table.weight.data_ptr() for table in tiered.tables] != initial


def test_what_keys_mean_is_not_made_while_slots_move(monkeypatch):
    """Or it would say where slots were."""
    tiered = seeded(TABLES, te.optim.SGD(lr=0.1), True, ("host",))
    large = random_batch(ROWS, ["g", "f"], 400, 4, seed=1)
    with torch.no_grad():
        tiered(random_batch(ROWS, ["g", "f"], 1, 4))
    show, requests = CacheStorage._update_layouts, []

    def meanwhile(*args):
        show(*args)
        if not requests:
            requests.append(other.submit(tiered.group, large))
            with pytest.raises(TimeoutError):
                requests[0].result(0.3)

    monkeypatch.setattr(CacheStorage, "_update_layouts", meanwhile)
    with ThreadPoolExecutor(1) as other:
        tiered(random_batch(ROWS, ["f", "g"], 10, 4)).sum().backward()
        requests[0].result(60)
    assert len(tiered.cache.storage.layouts) == 2
    for local in tiered.cache.storage.layouts.values():
        assert local.tables[:, NUM_ROWS].tolist() == [table.weight.shape[0] for table in tiered.tables]
        assert local.tables[:, NUM_ROWS].min() > 64


def test_slots_of_one_table_are_not_numbered_like_those_of_another():
    """However many rows its overflow has had at once."""
    tiered = seeded([te.TableConfig("a", 40, 4), te.TableConfig("b", 300, 4)], te.optim.SGD(), True, ("host",))
    for ids in (range(40), range(39, -1, -1)):
        batch = te.KeyedJaggedTensor.from_lists({"a": [list(ids)], "b": [[*ids, *range(100, 300)]]})
        tiered(batch).sum().backward()
    local, *_ = tiered.cache.storage.layouts.values()
    numbers = [(int(table[FIRST_ROW]), int(table[FIRST_ROW] + table[NUM_ROWS])) for table in local.tables]
    assert numbers[0][1] <= numbers[1][0]
    assert numbers[1][1] <= local.num_rows


class Model(torch.nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings
        torch.manual_seed(1)
        self.dense = torch.nn.Linear(20, 3)

    def forward(self, batch):
        return self.dense(torch.relu(self.embeddings(batch) * 2)).sum(1)


def model(placement: str) -> Model:
    return Model(seeded(TABLES, te.optim.Adam(lr=0.1), True, (placement,)))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("placement", breadth(ELSEWHERE, ["host"]))
def test_compiled_surroundings(placement):
    """Graphs end before the lookup and begin behind it."""
    twin, tiered = model("device"), model(placement)
    compiled = torch.compile(tiered, backend="aot_eager")
    steps = varied_steps(twin.embeddings, 4, sizes=(20,))
    for batch, _ in steps:
        out, expected = compiled(batch), twin(batch)
        assert torch.equal(out, expected)
        out.sum().backward()
        expected.sum().backward()
    assert_same_bits(contents(tiered.embeddings), contents(twin.embeddings))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("placement", breadth(ELSEWHERE, ["disk"]))
def test_prefetched_rows_are_looked_up_and_updated_in_one_graph(placement):
    """Two batches ahead of the compiled model, of other sizes, so that overflows grow between forward and backward."""
    twin, tiered = model("device"), model(placement)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tiered, fullgraph=True, backend=counter)
    batches = [batch for batch, _ in varied_steps(twin.embeddings, 10, sizes=(20, 33, 4, 50))]
    ahead = [te.nn.prefetch(tiered, batch) for batch in batches[:2]]
    for index, batch in enumerate(batches):
        out, expected = compiled(ahead.pop(0)), twin(batch)
        assert torch.equal(out, expected)
        ahead += [te.nn.prefetch(tiered, batch) for batch in batches[index + 2 : index + 3]]
        out.sum().backward()
        expected.sum().backward()
        with torch.no_grad():
            assert torch.equal(compiled(te.nn.prefetch(tiered, batch)), twin(batch))
    assert_same_bits(contents(tiered.embeddings), contents(twin.embeddings))
    assert counter.frame_count == 4  # trained or not, of the first size and of any
    assert not (tiered.embeddings.cache._directory.pins > 0).any()


@pytest.mark.usefixtures("dynamo")
def test_a_graph_refuses_rows_that_are_no_longer_pinned():
    tiered = model("host")
    compiled = torch.compile(tiered, fullgraph=True, backend="aot_eager")
    batches = [te.nn.prefetch(tiered, batch) for batch, _ in varied_steps(tiered.embeddings, 3, sizes=(20,))]
    initial = contents(tiered.embeddings)
    first = compiled(batches[0])
    with pytest.raises(RuntimeError, match="prefetch a batch again for each call"):
        compiled(batches[0])
    compiled(batches[1])
    with pytest.raises(RuntimeError, match="called again before its backward pass"):
        first.sum().backward()
    with tiered.embeddings.accumulate():
        late = compiled(batches[2])
    with pytest.raises(RuntimeError, match="inside the accumulate"):
        late.sum().backward()
    assert_same_bits(contents(tiered.embeddings), initial)
