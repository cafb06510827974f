"""`accumulate()`: several micro-batches, one step, the bits of one large batch."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits, configurations, contents, fewer, make_collection, random_steps, train
from tests.strategies import TABLE_DTYPES
from tritonemb.ops import row_update as accumulate_op

pytestmark = pytest.mark.public
NUM_STEPS = fewer(3, 1)
SGD = te.optim.SGD(lr=1.0)


def as_one_batch(steps, pooled=True):
    """The micro-batches' samples in one batch, and its gradient."""
    whole = te.KeyedJaggedTensor.stack([batch for batch, _ in steps])
    if pooled:
        return whole, torch.cat([grad for _, grad in steps])
    rows = [te.KeyedJaggedTensor(batch.keys(), grad, offsets=batch.offsets()) for batch, grad in steps]
    return whole, te.KeyedJaggedTensor.stack(rows).values()


@pytest.mark.parametrize("dtype", fewer(TABLE_DTYPES, TABLE_DTYPES[:2]))
@pytest.mark.parametrize("optimizer", configurations(), ids=lambda optimizer: optimizer.name)
def test_micro_batches_have_the_bits_of_one_batch(optimizer, dtype):
    for pooled in (True, False):
        poolings = ("sum", "mean") if pooled else ("none", "none")
        configs = [te.TableConfig(name, 20, 7, pooling=p, dtype=dtype) for name, p in zip("ab", poolings, strict=True)]
        collection, twin = (make_collection(configs, optimizer, pooled) for _ in range(2))
        for seed in range(NUM_STEPS):
            steps = random_steps(collection, 4, batch_size=fewer(16, 4), weighted=True, seed=10 * seed)
            initial = contents(collection)
            with collection.accumulate():
                train(collection, steps)
                assert_same_bits(contents(collection), initial)
                assert int(collection.pending) == 4
            train(twin, [as_one_batch(steps, pooled)])
            assert_same_bits(contents(collection), contents(twin), repr(optimizer))
        assert int(collection.step) == NUM_STEPS
        assert int(collection.pending) == 0


def test_micro_batches_of_different_sizes_and_keys_in_any_order():
    configs = [te.TableConfig("a", 20, 7), te.TableConfig("b", 20, 3, features=["a", "b"])]
    collection, twin = (make_collection(configs, te.optim.Adam()) for _ in range(2))
    steps = []
    for index, size in enumerate((1, 9, 0, 4)):
        (batch, grad), *_ = random_steps(collection, 1, batch_size=size, seed=index)
        steps.append((batch.permute([1, 0]), grad))
    with collection.accumulate():
        train(collection, steps)
    train(twin, [as_one_batch(steps)])
    assert_same_bits(contents(collection), contents(twin))


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("pooled", [True, False])
def test_some_micro_batches_may_have_no_weights(pooled, placement):
    configs = [te.TableConfig("a", 20, 7, pooling="mean" if pooled else "none", placement=placement)]
    collection, twin = (make_collection(configs, te.optim.Adam(), pooled) for _ in range(2))
    kinds = enumerate((False, True, False))
    steps = [step for seed, weighted in kinds for step in random_steps(collection, 1, weighted=weighted, seed=seed)]
    with collection.accumulate():
        train(collection, steps)
    for index, (batch, grad) in enumerate(steps):
        weights = torch.ones(len(batch.values())) if batch.weights_or_none() is None else batch.weights()
        steps[index] = te.KeyedJaggedTensor(batch.keys(), batch.values(), weights, offsets=batch.offsets()), grad
    train(twin, [as_one_batch(steps, pooled)])
    assert_same_bits(contents(collection), contents(twin))


def test_an_exception_discards_what_was_gathered():
    collection, twin = (make_collection([te.TableConfig("a", 20, 7)], te.optim.Adagrad()) for _ in range(2))
    initial = contents(collection)
    steps = random_steps(collection, 4)

    def fail_after_two() -> None:
        with collection.accumulate():
            train(collection, steps[:2])
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail_after_two()
    with collection.accumulate():
        pass  # nothing gathered is no step
    assert_same_bits(contents(collection), initial)
    assert int(collection.pending) == 0
    with collection.accumulate():
        train(collection, steps[2:])
    train(twin, [as_one_batch(steps[2:])])
    assert_same_bits(contents(collection), contents(twin))
    assert not accumulate_op._accumulated_rates
    assert not collection.table_set.accumulator.gradients


def test_a_backward_after_the_block_of_a_lookup_inside_is_refused():
    """What comes too late for its step is neither lost silently nor applied by the next one."""
    collection, twin = (make_collection([te.TableConfig("a", 20, 7)], te.optim.SGD()) for _ in range(2))
    (late, late_grad), step = random_steps(collection, 2)
    with collection.accumulate():
        out = collection(late)
    with pytest.raises(RuntimeError, match="call backward inside the block"):
        out.backward(late_grad)
    with collection.accumulate():
        train(collection, [step])
    train(twin, [step])
    assert_same_bits(contents(collection), contents(twin))


def test_collections_do_not_share_what_they_gather():
    first = make_collection([te.TableConfig("a", 20, 7)], te.optim.SGD())
    second = copy.deepcopy(first)
    plain = copy.deepcopy(first)
    step1, step2 = random_steps(first, 2)
    with first.accumulate(), second.accumulate():
        train(first, [step1])
        train(second, [step2])
    for collection, step in ((first, step1), (second, step2)):
        twin = copy.deepcopy(plain)
        train(twin, [step])
        assert_same_bits(contents(collection), contents(twin))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0) and torch.__version__ < "2.12",
    reason="torch 2.11 does not see there that an attribute has changed, and warns of its guards",
)
def test_accumulate_compiled():
    configs = [te.TableConfig("a", 20, 7), te.TableConfig("b", 9, 3)]
    collection, twin = (make_collection(configs, te.optim.Adam()) for _ in range(2))
    compiled = torch.compile(collection, fullgraph=True, dynamic=True, backend="aot_eager")
    steps = random_steps(collection, 3, weighted=True)
    for _ in range(2):
        with collection.accumulate():
            train(compiled, steps)
            assert int(collection.pending) == 3
        train(twin, [as_one_batch(steps)])
    train(compiled, steps)
    train(twin, steps)
    assert_same_bits(contents(collection), contents(twin))


@pytest.mark.parametrize("kind", ["device", "host", "dynamic", "embedding", "bag", "fused"])
def test_a_state_is_not_loaded_where_gradients_are_accumulated(kind):
    """They would be applied to rows that they are not gradients of."""
    size, optimizer = {"num_embeddings": None, "capacity": 8} if kind == "dynamic" else {"num_embeddings": 5}, SGD
    module: torch.nn.Module = torch.nn.EmbeddingBag(5, 4, mode="sum")
    if kind == "embedding":
        module = te.nn.Embedding(None, 4, capacity=8, optimizer=optimizer)
    elif kind == "bag":
        module = te.nn.EmbeddingBag(5, 4, optimizer=optimizer)
    elif kind == "fused":
        optimizer = te.optim.fused(module, SGD)
    else:
        placement = "host" if kind == "host" else "device"
        configs = [te.TableConfig("t", embedding_dim=4, placement=placement, **size)]
        module = te.nn.EmbeddingBagCollection(configs, SGD)
    ids = torch.tensor([[3], [1]])
    batch = te.KeyedJaggedTensor(["t"], ids.flatten(), offsets=torch.arange(3))
    inputs = batch if isinstance(module, te.nn.EmbeddingBagCollection) else ids
    with optimizer.accumulate() if kind == "fused" else module.accumulate():
        module(inputs).sum().backward()
        initial = contents(module)
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) in a block of accumulate\(\) would lose its grad"):
            module.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in initial.items()})
        assert_same_bits(contents(module), initial)
    assert not torch.equal(*(state[next(k for k in state if "weight" in k)] for state in (contents(module), initial)))
    module.load_state_dict(initial)
    assert_same_bits(contents(module), initial)


def test_misuse_has_a_name():
    with (
        pytest.raises(ValueError, match="fused optimizer"),
        make_collection([te.TableConfig("a", 2, 7)], None).accumulate(),
    ):
        pass
    collection = make_collection([te.TableConfig("a", 2, 7), te.TableConfig("b", 2, 7)], te.optim.SGD())
    with pytest.raises(RuntimeError, match="already active"), collection.accumulate(), collection.accumulate():
        pass
    (batch, grad), *_ = random_steps(collection, 1)
    initial = contents(collection)
    with pytest.raises(ValueError, match="same keys in every micro-batch"), collection.accumulate():
        train(collection, [(batch, grad), (batch.permute([1, 0]), grad)])
    assert_same_bits(contents(collection), initial)
    train(collection, [(batch, grad)])
    assert int(collection.step) == 1
