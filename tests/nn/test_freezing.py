"""Frozen tables: a lookup trains its table if, and only if, the weight requires a gradient when it is made."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits
from tritonemb.optim import OPTIMIZERS

KEYS, IDS, LENGTHS = ["a"], torch.tensor([1, 2, 3]), torch.tensor([2, 1])
KINDS = {"static": {}, "dynamic": {"capacity": 100}, "host": {"placement": "host"}, "disk": {"placement": "disk"}}
ADMITTED = {"capacity": 100, "admission": te.AdmissionConfig(appearances=2)}


def batch(ids: torch.Tensor = IDS, weights: torch.Tensor | None = None) -> te.KeyedJaggedTensor:
    return te.KeyedJaggedTensor(KEYS, ids, weights, lengths=LENGTHS)


def make(kind: str = "static", optimizer: te.optim.Optimizer | None = None, pooled: bool = True, **options):
    cache = {"cache": te.CacheConfig(rows=32)} if kind in ("host", "disk") else {}
    collection = te.nn.EmbeddingBagCollection if pooled else te.nn.EmbeddingCollection
    rows = None if "capacity" in KINDS[kind] | options else 20
    pooling = "sum" if pooled else "none"
    table = te.TableConfig("t", rows, 8, KEYS, pooling=pooling, **KINDS[kind], **cache, **options)
    return collection([table], optimizer=optimizer or te.optim.RowWiseAdagrad(lr=0.1))


def values_of(output) -> torch.Tensor:
    return output if torch.is_tensor(output) else output.values()


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.few(2)
def test_sample_weights_are_trained_and_frozen_tables_are_not(optimizer, kind, pooled):
    collection = make(kind, optimizer(lr=0.1), pooled)
    values_of(collection(batch())).sum().backward()
    collection.requires_grad_(False)
    initial, weights = copy.deepcopy(collection.state_dict()), torch.rand(3, requires_grad=True)
    rows = values_of(make_rows(collection))
    values_of(collection(batch(weights=weights))).sum().backward()
    assert_same_bits(collection.state_dict(), initial)
    torch.testing.assert_close(weights.grad, rows.sum(1))  # eight summands
    collection.requires_grad_(True)
    values_of(collection(batch())).sum().backward()
    assert not torch.equal(collection.state_dict()["t.weight"], initial["t.weight"])


def make_rows(collection, ids: torch.Tensor = IDS) -> torch.Tensor:
    """The row of each id, by lookups that train nothing."""
    with torch.no_grad():
        return torch.cat([values_of(collection(te.KeyedJaggedTensor.from_lists({"a": [[int(i)]]}))) for i in ids])


@pytest.mark.parametrize("unknown", [[1, 2, 99], [97, 98, 99], [1, 99, 1]])
def test_sample_weights_get_gradients_of_ids_that_frozen_dynamic_tables_do_not_have(unknown):
    collection, ids = make("dynamic"), torch.tensor(unknown)
    collection(batch()).sum().backward()
    collection.requires_grad_(False)
    initial, weights = copy.deepcopy(collection.state_dict()), torch.rand(3, requires_grad=True)
    (collection(batch(ids, weights)) * 2.0).sum().backward()
    torch.testing.assert_close(weights.grad, 2.0 * make_rows(collection, ids).sum(1))
    assert_same_bits(collection.state_dict(), initial)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.few(1)
def test_compiled_lookups_train_no_frozen_tables(kind):
    collection = make(kind)
    compiled = torch.compile(collection, backend="aot_eager")
    compiled(batch()).sum().backward()
    collection.requires_grad_(False)
    initial, ids = copy.deepcopy(collection.state_dict()), torch.tensor([1, 2, 99 if kind == "dynamic" else 4])
    weights = torch.rand(3, requires_grad=True)
    compiled(batch(ids, weights)).sum().backward()
    assert_same_bits(collection.state_dict(), initial)
    torch.testing.assert_close(weights.grad, make_rows(collection, ids).sum(1))


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_frozen_cached_tables_say_where_sample_weights_get_gradients(kind):
    collection = make(kind)
    collection.requires_grad_(False)
    with pytest.raises(ValueError, match=f"table 't' is placed on '{kind}'; detach them, or place the tables on the"):
        collection(batch(weights=torch.ones(3, requires_grad=True)))
    scale, initial = torch.ones((), requires_grad=True), copy.deepcopy(collection.state_dict())
    (collection(batch()) * scale).sum().backward()
    assert_same_bits(collection.state_dict(), initial)


def test_the_message_of_refused_ids_blames_admission_where_it_is_to_blame():
    collection = make("static", **ADMITTED)
    with pytest.raises(ValueError, match=r"'t' is dynamic and admits some ids only; .* remove its AdmissionConfig"):
        collection(batch(weights=torch.ones(3, requires_grad=True)))


def test_accumulated_gradients_are_none_of_frozen_tables():
    collection = make()
    collection.requires_grad_(False)
    initial, weights = copy.deepcopy(collection.state_dict()), torch.rand(3, requires_grad=True)
    with collection.accumulate():
        collection(batch(weights=weights)).sum().backward()
    assert_same_bits(collection.state_dict(), initial)
    assert weights.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_loaded_state_leave_tables_frozen(kind):
    collection = make(kind)
    collection.requires_grad_(False)
    copied = kind in ("static", "dynamic")  # others cannot be copied as objects
    copies = [copy.deepcopy(collection), pickle.loads(pickle.dumps(collection))] if copied else []
    collection.load_state_dict(collection.state_dict())
    for item in (collection, *copies):
        assert [table.weight.requires_grad for table in item.tables] == [False]
