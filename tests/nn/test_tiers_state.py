"""What tables elsewhere hold: `state_dict` from and into any placement, first values, pins that end."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tritonemb as te
from tests.helpers import CACHED, assert_same_bits, contents, output_of
from tests.nn.tiers import not_interpreted, outputs_of, placed, same, seeded, varied_steps
from tests.strategies import TABLE_DTYPES
from tritonemb.types import CacheConfig

pytestmark = [pytest.mark.public, not_interpreted]
TABLES = [te.TableConfig("user", 500, 12, features=["u", "shared"]), te.TableConfig("shared", 70, 5, pooling="mean")]
PLACEMENTS = [("device",), ("host",), ("disk",), (CACHED,)]
OPTIMIZER = te.optim.RowWiseAdagrad(lr=0.1)


@pytest.fixture(params=PLACEMENTS[1:], ids=str)
def placements(request):
    return request.param


def make(placements, seed_steps=0, **options):
    """A collection, trained for some steps."""
    collection = seeded(TABLES, options.pop("optimizer", OPTIMIZER), True, placements, **options)
    outputs_of(collection, varied_steps(collection, seed_steps, sizes=(20,), seed=seed_steps))
    return collection


def batch_of(*ids: int) -> te.KeyedJaggedTensor:
    return te.KeyedJaggedTensor.from_lists({"u": [list(ids)], "shared": [[0]]})


def pinned(collection) -> int:
    """Slots that batches hold."""
    collection.cache._unpin_released()
    return int((collection.cache._directory.pins > 0).sum())


def test_keys_shapes_and_dtypes_are_those_of_tables_on_the_device(placements):
    for optimizer in (OPTIMIZER, te.optim.Adam(), te.optim.SGD(), None):
        tiered, twin = make(placements, optimizer=optimizer), make(PLACEMENTS[0], optimizer=optimizer)
        assert list(tiered.state_dict()) == list(twin.state_dict())
        assert_same_bits(contents(tiered), contents(twin))


@pytest.mark.parametrize("to", PLACEMENTS, ids=str)
@pytest.mark.parametrize("source", PLACEMENTS, ids=str)
def test_a_state_dict_goes_from_any_placement_into_any(source, to):
    """Into one that was trained, whose cache is full of other values; then both train on alike."""
    first, second = make(source, 5), make(to, 3)
    second.load_state_dict(first.state_dict())
    assert_same_bits(contents(second), contents(first))
    steps = varied_steps(first, 4, sizes=(20,), seed=9)
    same(outputs_of(second, steps), outputs_of(first, steps))
    assert_same_bits(contents(second), contents(first))


def test_loading_while_batches_that_were_brought_ahead_wait(placements):
    """They read the rows that were loaded, not those that were there when they were brought."""
    loaded = contents(make(PLACEMENTS[0], 5))
    tiered, twin = make(placements, 3), make(PLACEMENTS[0])
    steps = varied_steps(twin, 3, sizes=(20,), seed=4)
    groups = [tiered.group(batch) for batch, _ in steps]
    for collection in (tiered, twin):
        collection.load_state_dict(loaded)
    for (batch, grad), created in zip(steps, groups, strict=True):
        out, expected = tiered(batch, created), twin(batch)
        assert torch.equal(out, expected)
        out.backward(grad)
        expected.backward(grad)
    assert_same_bits(contents(tiered), contents(twin))


def test_loading_and_saving_while_another_thread_brings_batches(placements):
    """Rows that leave their slots meanwhile do not come after those that are loaded."""
    tiered, loaded = make(placements, 3), contents(make(PLACEMENTS[0], 5))
    batches = cycle(batch for batch, _ in varied_steps(tiered, 40, sizes=(30,), seed=4))
    started, stop = threading.Event(), threading.Event()

    def bring() -> None:
        while not stop.is_set():
            tiered.group(next(batches))
            started.set()

    with ThreadPoolExecutor(1) as other:
        prefetches = other.submit(bring)
        try:
            assert started.wait(60)
            for _ in range(10):
                tiered.load_state_dict(loaded)
                assert_same_bits(contents(tiered), loaded)
        finally:
            stop.set()
        prefetches.result()


@pytest.mark.parametrize("placement", ["device", "host", "disk"])
def test_a_loaded_parameter_leaves_no_graph(placement):
    module = te.nn.EmbeddingBagCollection([te.TableConfig("table", 50, 8, placement=placement)])
    weight = torch.nn.Parameter(torch.randn(50, 8))
    (name,) = (name for name in module.state_dict() if name.endswith("weight"))
    module.load_state_dict({name: weight}, strict=False)
    loaded = module.state_dict()[name]
    assert loaded.grad_fn is None
    assert torch.equal(loaded.detach(), weight.detach())
    copy.deepcopy(module.state_dict())


def test_loading_a_part(placements):
    """Weights without states keep the states, also those that are only in slots."""
    inputs = {name: value for name, value in contents(make(PLACEMENTS[0], 5)).items() if name.endswith("weight")}
    tiered, twin = make(placements, 3), make(PLACEMENTS[0], 3)
    for collection in (tiered, twin):
        missing, unexpected = collection.load_state_dict(inputs | {"user.other": torch.zeros(1)}, strict=False)
        assert missing == ["step", "user.sum", "shared.sum"]
        assert unexpected == ["user.other"]
    assert_same_bits(contents(tiered), contents(twin))
    for collection in (tiered, twin):
        with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"user.sum".*Unexpected key.*"user.other"'):
            collection.load_state_dict(inputs | {"user.other": torch.zeros(1)})
        with pytest.raises(RuntimeError, match=r"size mismatch for user.weight"):
            collection.load_state_dict({**contents(collection), "user.weight": torch.zeros(3, 12)})
    assert_same_bits(contents(tiered), contents(twin))


@pytest.mark.parametrize("dtype", TABLE_DTYPES, ids=str)
def test_a_state_dict_can_be_written_to_a_file(placement, dtype):
    config = te.TableConfig("t", 50, 6, dtype=dtype)
    tiered = seeded([config], te.optim.PartialRowWiseAdam(), True, (placement,))
    outputs_of(tiered, varied_steps(tiered, 3))
    file = io.BytesIO()
    torch.save(tiered.state_dict(), file)
    file.seek(0)
    assert_same_bits(torch.load(file), contents(tiered))


@pytest.mark.parametrize("placements", [*PLACEMENTS[1:], ("host", "disk"), ("device", "disk")], ids=str)
def test_reset_parameters_begins_anew(placements):
    """Of one table first: what training changed in the slots of the other is not lost."""
    tiered, twin = make(placements, 3), make(PLACEMENTS[0], 3)
    for part in (lambda collection: collection.tables[1], lambda collection: collection):
        for collection in (tiered, twin):
            torch.manual_seed(11)
            part(collection).reset_parameters()
        assert_same_bits(contents(tiered), contents(twin))
    steps = varied_steps(twin, 3, sizes=(20,))
    same(outputs_of(tiered, steps), outputs_of(twin, steps))
    assert_same_bits(contents(tiered), contents(twin))


def test_a_table_whose_rows_a_batch_holds_is_not_reset(placements):
    tiered = make(placements, 2)
    initial, out = contents(tiered), tiered(batch_of(1, 2))
    with pytest.raises(RuntimeError, match="a batch has pinned rows of table 'user'; finish its backward"):
        tiered.reset_parameters()
    assert_same_bits(contents(tiered), initial)
    del out
    tiered.reset_parameters()


def test_first_values_by_an_init():
    config = te.TableConfig("t", 100, 3, init=lambda weight: torch.nn.init.normal_(weight, std=2.0))
    for dtype in TABLE_DTYPES:
        typed = [replace(config, dtype=dtype)]
        assert_same_bits(contents(seeded(typed, None, True, ("host",))), contents(seeded(typed, None)))


def test_rows_are_held_until_the_backward_has_been_or_cannot_come(placements):
    tiered = make(placements)
    batch = batch_of(1, 2, 3)
    out = output_of(tiered, batch)
    assert pinned(tiered) == 5  # users 1, 2, 3 and 0, by feature "shared", and a row of the other table
    out.sum().backward()
    assert pinned(tiered) == 0
    out = output_of(tiered, batch)
    del out  # nobody can call its backward
    assert pinned(tiered) == 0
    groups = tiered.group(batch)
    assert pinned(tiered) == 5
    del groups
    assert pinned(tiered) == 0
    with torch.no_grad():
        tiered(batch, tiered.group(batch))
    assert pinned(tiered) == 0


@pytest.mark.usefixtures("frozen_objects")
def test_rows_are_given_up_where_a_step_fails(placements):
    tiered = make(placements, optimizer=te.optim.SGD(on_nonfinite="raise"))
    initial = contents(tiered)
    with pytest.raises(ValueError, match="NaN or infinite"):
        (tiered(batch_of(1, 2)) * float("nan")).sum().backward()
    gc.collect()
    assert pinned(tiered) == 0
    assert_same_bits(contents(tiered), initial)

    def fail_in_the_block() -> None:
        with tiered.accumulate():
            tiered(batch_of(1, 2)).sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_block()
    assert pinned(tiered) == 0
    assert_same_bits(contents(tiered), initial)


def test_a_collection_goes_when_nobody_has_it(placements):
    """At once: its memory may be most of the machine's."""
    tiered = make(placements, 2)
    table, store = weakref.ref(tiered.tables[0]), weakref.ref(tiered.tables[0].rows.store)
    gc.disable()
    try:
        del tiered
        assert table() is None
        assert store() is None
    finally:
        gc.enable()


def test_a_table_without_its_collection_does_not_pretend_to_be_whole():
    table = make(("host",), 2).tables[0]
    with pytest.raises(RuntimeError, match="the collection of table 'user' was deleted"):
        table.state_dict()


def test_nothing_is_left_on_disk(tmp_path):
    tiered = make(("disk",), 2, cache=CacheConfig(rows=1, folder=tmp_path / "new" / "folder"))
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    tiered.reset_parameters()
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_another_default_device(placements):
    """What lives in host memory lives there, wherever a `with` of the user's makes tensors."""
    tiered, twin = make(placements, 3), make(PLACEMENTS[0], 3)
    with torch.device("meta"):
        tiered.load_state_dict(tiered.state_dict())
        assert_same_bits(contents(tiered), contents(twin))
        for table in tiered.tables:
            table.reset_parameters(seed=7)
    steps = varied_steps(twin, 3, sizes=(60,))
    twin.load_state_dict(tiered.state_dict())
    same(outputs_of(tiered, steps), outputs_of(twin, steps))


def test_fake_tables(placements):
    """Shapes without memory, for whoever plans."""
    with FakeTensorMode():
        tiered = te.nn.EmbeddingBagCollection(placed(TABLES, placements, CacheConfig(rows=5)), optimizer=OPTIMIZER)
        assert tiered.state_dict()["user.weight"].shape == (500, 12)
