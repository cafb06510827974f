"""What goes wrong with tables elsewhere has a name, and never a wrong value."""

from __future__ import annotations

import copy
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tritonemb as te
from tests.helpers import CACHED, assert_same_bits, contents
from tests.nn.tiers import not_interpreted, outputs_of, same, seeded, varied_steps
from tritonemb.storage import StorageError
from tritonemb.storage.disk import RowFile
from tritonemb.storage.memory import HostRows
from tritonemb.tables.cache_storage import RowTransfer
from tritonemb.types import CacheConfig

pytestmark = [pytest.mark.public, not_interpreted]
TABLES = [te.TableConfig("user", 500, 4, features=["u", "shared"]), te.TableConfig("genre", 70, 2, features=["shared"])]
ADAM = te.optim.Adam(lr=0.1)


def make(placement="host", optimizer=ADAM, **options):
    return seeded(TABLES, optimizer, True, (placement,), **options)


def batch_of(u, shared):
    return te.KeyedJaggedTensor.from_lists({"other": [[-5], [2**31 - 1]], "u": u, "shared": shared})


def trained_alike(mine, twin):
    """Both still train, to the same bits."""
    steps = varied_steps(twin, 3, sizes=(20,))
    same(outputs_of(mine, steps), outputs_of(twin, steps))
    assert_same_bits(contents(mine), contents(twin))


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_gradient_that_is_not_finite(placement, on_nonfinite):
    """The error names the row of the table: its slot has another number."""
    tiered, twin = (make(where, te.optim.SGD(on_nonfinite=on_nonfinite)) for where in (placement, "device"))
    initial = contents(tiered)
    grad = torch.ones(2, 10)
    grad[1, 8] = float("nan")  # the table of genres, whose rows 61 and 7 sample 1 has
    for collection in (tiered, twin):
        out = collection(batch_of([[400], [444]], [[3], [61, 7]]))
        if on_nonfinite == "raise":
            with pytest.raises(ValueError, match="table 'genre': the gradient of row 7 is NaN or infinite"):
                out.backward(grad)
            assert_same_bits(contents(collection), initial)
        else:
            out.backward(grad)
            assert collection.skipped_rows() == {"user": 0, "genre": 2}
    trained_alike(tiered, twin)


def test_placements_and_caches_that_do_not_go_together():
    several = [
        te.TableConfig(name, 9, 2, placement="host", cache=CacheConfig(policy=policy))
        for name, policy in (("a", "lru"), ("b", "lfu"))
    ]
    with pytest.raises(ValueError, match=r"tables \['a', 'b'\] have caches with different policies, \['lfu', 'lru'\]"):
        te.nn.EmbeddingBagCollection(several)
    with pytest.raises(ValueError, match="table 't': an init fills a whole table in memory"):
        te.nn.EmbeddingBagCollection([te.TableConfig("t", 9, 2, placement="disk", init=torch.nn.init.zeros_)])


def test_a_module_stays_where_it_was_made(placement):
    tiered, twin = make(placement), make("device")
    for move in (lambda: tiered.double(), lambda: tiered.to("meta"), lambda: tiered.bfloat16()):
        with pytest.raises(RuntimeError, match=f"table 'user' is placed on '{placement}' .* cannot become"):
            move()
    for copying in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=f"table 'user' is placed on '{placement}' and cannot be copied"):
            copying(tiered if copying is not copy.copy else tiered.tables[0])
    mixed = seeded(TABLES, ADAM, True, ("device", placement))
    with pytest.raises(RuntimeError, match=f"table 'genre' is placed on '{placement}'"):
        mixed.bfloat16()
    assert mixed.tables[0].weight.dtype == torch.float32
    assert tiered.to("cpu").float() is tiered
    trained_alike(tiered, twin)


def test_a_module_without_memory(placement):
    config = te.TableConfig("t", 10**12, 4, placement=placement, cache=CacheConfig(rows=5))
    tiered = te.nn.EmbeddingBagCollection([config], optimizer=te.optim.RowWiseAdagrad(), device="meta")
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in tiered.state_dict().items() if name != "step"}
    assert shapes == {"t.weight": ((10**12, 4), torch.float32), "t.sum": ((10**12,), torch.float32)}
    with pytest.raises(RuntimeError, match="build the module there"):
        tiered.to_empty(device="cpu")


def test_weights_of_samples_get_no_gradient():
    weights = torch.ones(2, requires_grad=True)
    batch = te.KeyedJaggedTensor(["u", "shared"], torch.tensor([1, 2]), weights, lengths=torch.tensor([1, 1]))
    for optimizer in (te.optim.SGD(), None):
        tiered = make(optimizer=optimizer)
        with pytest.raises(ValueError, match="weights get no gradient where table 'user' is placed on 'host'"):
            tiered(batch)
        with torch.no_grad():
            assert tiered(batch).shape == (1, 10)


def test_without_an_optimizer_rows_are_looked_up_and_not_trained(placement):
    """A gradient that nobody would apply does not get lost in silence."""
    tiered, twin = make(placement, None), make("device", None)
    batch = batch_of([[1], [2, 400]], [[0], [5]])
    with torch.no_grad():
        assert torch.equal(tiered(batch), twin(batch))
    out = tiered(batch)
    assert torch.equal(out, twin(batch))
    assert out.requires_grad
    with pytest.raises(ValueError, match=f"table 'user' is placed on '{placement}', where only a fused optimizer can"):
        out.sum().backward()
    tiered.requires_grad_(False)
    dense = torch.ones(10, requires_grad=True)
    (tiered(batch) * dense).sum().backward()
    assert torch.equal(dense.grad, twin(batch).sum(0).detach())
    assert_same_bits(contents(tiered), contents(twin))


def test_frozen_tables():
    tiered, twin = make(), make("device")
    for collection in (tiered, twin):
        collection.tables[0].weight.requires_grad_(False)
        with pytest.raises(ValueError, match=r"tables \['user'\] do not require gradients"):
            collection(batch_of([[1], []], [[1], []]))
        collection.requires_grad_(False)
        assert not collection(batch_of([[1], []], [[1], []])).requires_grad
    assert tiered.cache_statistics()["user"].written == 0
    assert_same_bits(contents(tiered), contents(twin))


def test_a_lookup_has_one_backward(placement):
    """After it, other rows may be in the slots."""
    tiered = make(placement)
    batch = batch_of([[1], [2]], [[0], [5]])
    out = tiered(batch).sum()
    out.backward(retain_graph=True)
    initial = contents(tiered)
    tiered(batch_of([list(range(10, 60)), []], [[], []]))
    with pytest.raises(RuntimeError, match="the rows of this batch are no longer pinned"):
        out.backward()
    with tiered.accumulate():
        late = tiered(batch).sum()
    with pytest.raises(RuntimeError, match=r"no longer pinned.*inside the accumulate\(\) block"):
        late.backward()
    assert_same_bits(contents(tiered), initial)


def test_groups_serve_one_lookup_and_are_made_again_for_others(placement):
    """As when a forward is computed again for its backward."""
    tiered, twin = make(placement), make("device")
    batch, other = batch_of([[1], [2]], [[0], [5]]), batch_of([list(range(100, 160)), []], [[], []])
    for collection in (tiered, twin):
        groups = collection.group(batch)
        first = collection(batch, groups)
        collection(other).sum().backward()
        second = collection(batch, groups)
        first.sum().backward()
        second.sum().backward()
        collection(batch, groups).sum().backward()
    assert_same_bits(contents(tiered), contents(twin))


def test_checkpointed_forwards():
    tiered, twin = make(), make("device")
    for collection in (tiered, twin):
        messages = te.nn.prefetch(collection, batch_of([[1], [2]], [[0], [5]]))
        out = torch.utils.checkpoint.checkpoint(collection, messages, use_reentrant=False)
        collection(batch_of([list(range(100, 160)), []], [[], []])).sum().backward()
        out.sum().backward()
    assert_same_bits(contents(tiered), contents(twin))


def test_groups_of_another_collection_or_another_mode():
    tiered, batch = make(), batch_of([[1], [2]], [[0], [5]])
    with pytest.raises(ValueError, match="another collection made these groups"):
        tiered(batch, make().group(batch))
    with pytest.raises(ValueError, match="another model has prefetched these features"):
        tiered(te.nn.prefetch(make(), batch))
    with torch.no_grad():
        groups = tiered.group(batch)
    with pytest.raises(ValueError, match="were prefetched under no_grad"):
        tiered(batch, groups)


def test_a_folder_that_cannot_have_a_file(tmp_path):
    selection = tmp_path / "taken"
    selection.write_text("a file")
    for folder in (selection, selection / "below", "/proc/none"):
        config = te.TableConfig("t", 9, 2, placement="disk", cache=CacheConfig(folder=folder))
        with pytest.raises(StorageError, match=re.escape(f"table 't': cannot create its file in folder {folder}")):
            te.nn.EmbeddingBagCollection([config])


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("placement", ["disk", CACHED])
def test_a_disk_that_fails_in_the_midst_of_training(monkeypatch, placement, operation, ahead):
    """Nothing is computed from rows that were lost, then or later."""
    tiered = make(placement)
    steps = varied_steps(tiered, 12, sizes=(40,))
    outputs_of(tiered, steps[:3])
    initial = contents(tiered)

    move = RowFile.move

    def fail(files, write):
        if write == (operation == "write"):
            raise OSError(5, "Input/output error")
        move(files, write)

    monkeypatch.setattr(RowFile, "move", staticmethod(fail))

    def go_on() -> None:
        for batch, grad in steps[3:]:
            if ahead:
                with ThreadPoolExecutor(1) as other:
                    tiered(batch, other.submit(tiered.group, batch).result()).backward(grad)
            else:
                tiered(batch).backward(grad)

    with pytest.raises(OSError, match="Input/output error"):
        go_on()
    monkeypatch.undo()
    for use in (
        lambda: tiered(steps[0][0]), lambda: tiered.group(steps[0][0]), tiered.state_dict, tiered.reset_parameters,
        lambda: tiered.load_state_dict(initial),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"(?s)an earlier cache transfer failed"):
            use()


def test_what_cannot_be_loaded_changes_nothing(placement):
    tiered, twin = make(placement), make("device")
    steps = varied_steps(twin, 2, sizes=(20,))
    same(outputs_of(tiered, steps), outputs_of(twin, steps))
    state = next(state.name for state in ADAM.states)
    bad = {"user.weight": torch.zeros(500, 4).numpy(), f"user.{state}": torch.zeros(3, 4)}
    result = rf"(?s)user.weight: expected a torch.Tensor, got ndarray.*mismatch for user.{state}"
    with pytest.raises(RuntimeError, match=result):
        tiered.load_state_dict(bad, strict=False)
    assert_same_bits(contents(tiered), contents(twin))
    trained_alike(tiered, twin)


def test_a_change_that_fails_leaves_the_cache_as_it_should_be(placement):
    """Whatever the user's code raises, and however far it came: rows on the device are those below."""
    tiered = make(placement)
    outputs_of(tiered, varied_steps(tiered, 2, sizes=(20,)))
    initial = contents(tiered)

    def fail(fields):
        fields["weight"].fill_(7.0)
        raise ZeroDivisionError

    table = tiered.tables[0]
    with pytest.raises(ZeroDivisionError):
        table.rows.update(table, fail)
    with pytest.raises(NotImplementedError):
        table.assign({"weight": torch.empty(500, 4, device="meta")})
    expected = initial if placement == "disk" else {**initial, "user.weight": torch.full((500, 4), 7.0)}
    assert_same_bits(contents(tiered), expected)
    twin = make("device")
    twin.load_state_dict(expected)
    trained_alike(tiered, twin)
    tiered.reset_parameters()


def test_an_interruption_while_rows_are_moved_is_named(monkeypatch):
    tiered, (batch, _) = make(), varied_steps(make(), 1)[0]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RowTransfer, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tiered(batch)
    with pytest.raises(RuntimeError, match=r"an earlier cache transfer failed \(KeyboardInterrupt\(\)\); the cache is"):
        tiered(batch)


def test_a_cache_that_is_too_large_for_the_device(placement):
    config = te.TableConfig("t", 10**15, 64, placement=placement)
    with pytest.raises(StorageError, match=r"table 't': cannot allocate .* 100,000,000,000,000 cached rows.*\(rows"):
        te.nn.EmbeddingBagCollection([config], optimizer=te.optim.SGD())


def test_a_host_that_has_no_memory(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise StorageError("table 't' needs 9 bytes of host memory")

    monkeypatch.setattr(HostRows, "__init__", fail)
    with pytest.raises(StorageError, match="needs 9 bytes"):
        make("host")
