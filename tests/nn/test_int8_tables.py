"""int8 tables that are trained: the slow reference over evictions, and the same bits however rows are cached."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tritonemb as te
from tests.helpers import CACHED, assert_same_bits, contents, fewer, output_of
from tests.nn.tiers import outputs_of, same, seeded, stored, train_ahead, varied_steps
from tests.storage.test_int8_rows import slow_round
from tritonemb.kernels.random import philox_by_torch
from tritonemb.layout import mix64
from tritonemb.types import CacheConfig

pytestmark = pytest.mark.public
SMALL = CacheConfig(rows=1)
CONFIGS = [
    te.TableConfig("user", 300, 12, features=["u", "shared"], dtype=torch.int8, placement="host"),
    te.TableConfig("genre", 70, 5, features=["shared", "g"], pooling="mean", dtype=torch.int8, placement="host"),
    te.TableConfig("country", 40, 8),
]
OPTIMIZER = te.optim.RowWiseAdagrad(lr=0.1)


def int8_collection(optimizer=OPTIMIZER, placement="host", cache=SMALL, configs=CONFIGS):
    return seeded(configs, optimizer, True, (placement, placement, "device"), cache)


def decoded(state, name):
    return state[f"{name}.weight"].float() * state[f"{name}.weight_scale"][:, None]


def slow_step(twin, config, rows, step):
    """Round rows of a float32 table as the reference does."""
    weight = twin[config.name].weight.detach()
    ids = rows ^ mix64(torch.tensor([step]))
    words = philox_by_torch(config.seed, 0, -(-config.embedding_dim // 4), ids, 0)[:, : config.embedding_dim]
    noise = (((words.to(torch.int32) >> 8) >> 8).double() + 2**15) / 2**16
    for row, draws in zip(rows.tolist(), noise.tolist(), strict=True):
        weight[row] = torch.tensor(slow_round(weight[row].tolist(), draws))


@pytest.mark.parametrize("optimizer", [OPTIMIZER, te.optim.Adam(lr=0.01), te.optim.SGD(lr=0.5)], ids=lambda o: o.name)
@pytest.mark.few(1)
def test_training_over_evictions_has_the_bits_of_the_slow_reference(optimizer):
    collection = int8_collection(optimizer)
    twin = seeded([replace(config, dtype=torch.float32) for config in CONFIGS], optimizer)
    for config in CONFIGS[:2]:
        twin[config.name].assign({"weight": decoded(collection.state_dict(), config.name)})
    for step, (batch, grad) in enumerate(varied_steps(twin, fewer(12, 6)), 1):
        for tables in (collection, twin):
            output_of(tables, batch).backward(grad)
        for config in CONFIGS[:2]:
            rows = torch.cat([batch[feature].values().long() for feature in config.features]).unique()
            slow_step(twin, config, rows, step)
    assert collection.cache_statistics()["user"].evictions > 0
    state, expected = contents(collection), contents(twin)
    for config in CONFIGS[:2]:
        state[f"{config.name}.weight"] = decoded(state, config.name)
        del state[f"{config.name}.weight_scale"]
    assert_same_bits(state, expected)


@pytest.mark.parametrize("placement", ["host", "disk", CACHED])
@pytest.mark.parametrize("cache", [CacheConfig(rows=33, policy="lfu"), CacheConfig(rows=300)], ids=str)
@pytest.mark.few(3)
def test_cache_tier_and_prefetch_do_not_show_in_the_bits(placement, cache):
    expected, collection = int8_collection(), int8_collection(placement=placement, cache=cache)
    assert_same_bits(contents(collection), contents(expected), "before")
    steps = varied_steps(expected, 8)
    same(train_ahead(collection, steps, 3), outputs_of(expected, steps))
    assert_same_bits(contents(collection), contents(expected), "after")


def test_evaluation_and_saving_change_nothing():
    expected, collection = int8_collection(), int8_collection()
    steps = varied_steps(expected, fewer(9, 4), sizes=fewer((33, 40), (9, 12)))
    outputs_of(expected, steps)
    for index, (batch, grad) in enumerate(steps):
        output_of(collection, batch).backward(grad)
        collection.state_dict()
        with torch.no_grad():
            collection(steps[index - 3][0])
    assert_same_bits(contents(collection), contents(expected))
    # Rows that are read, written back and evicted keep their bytes.
    stored_rows = stored(collection)
    with torch.no_grad():
        outputs = [collection(batch) for batch, _ in steps]
    assert_same_bits(stored(collection), stored_rows)
    # A frozen row, without gradient, does not change in a step either.
    collection.set_learning_rate(0.0)
    outputs_of(collection, steps)
    state = contents(collection)
    assert torch.equal(state["user.weight"], stored_rows["0.weight"])
    with torch.no_grad():
        same([collection(batch) for batch, _ in steps], outputs)


@pytest.mark.more
def test_accumulated_and_compiled_steps():
    expected, collection = int8_collection(), int8_collection(cache=CacheConfig(rows=300))
    steps = varied_steps(expected, 4, sizes=(33,))
    outputs_of(expected, steps)
    call = torch.compile(collection, fullgraph=True, backend="aot_eager")
    for batch, grad in steps:
        output_of(lambda features: call(te.nn.prefetch(collection, features)), batch).backward(grad)
    assert_same_bits(contents(collection), contents(expected), "compiled")
    for twin in (expected, collection):
        with twin.accumulate():
            outputs_of(twin, steps)
    assert_same_bits(contents(collection), contents(expected), "accumulated")


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_state_is_saved_as_codes_and_loaded_from_codes_or_floats(placement):
    collection = int8_collection(placement=placement)
    outputs_of(collection, varied_steps(collection, 3))
    state = contents(collection)
    assert (state["user.weight"].dtype, state["user.weight"].shape) == (torch.int8, (300, 12))
    assert (state["user.weight_scale"].dtype, state["user.sum"].shape) == (torch.float32, (300,))
    other = int8_collection(placement=placement)
    other.load_state_dict(state)
    assert_same_bits(contents(other), state)
    table = other["user"]
    rows, weight = torch.tensor([299, 0, 5]), decoded(state, "user")
    assert torch.equal(table.rows.read(table, rows)["weight"], weight[rows])
    assert torch.equal(torch.cat([block for _, block in table.rows.blocks(table)]), weight)
    # Floats are rounded to nearest.
    values = torch.rand(300, 12) - 0.5
    table.assign({"weight": values})
    state = contents(other)
    assert ((decoded(state, "user") - values).abs() <= state["user.weight_scale"][:, None] / 2).all()
    table.rows.write(table, rows, {"weight": weight[:3]})
    assert torch.equal(table.rows.read(table, rows)["weight"], weight[:3])
    floats = {name: value for name, value in state.items() if not name.endswith("_scale")}
    floats |= {f"{name}.weight": decoded(state, name) for name in ("user", "genre")}
    other.load_state_dict(floats)
    assert_same_bits(contents(other), state)
    # Codes are not the values of other tables.
    for kind in (placement, "device"):
        plain = [replace(config, dtype=torch.float32, placement=kind) for config in CONFIGS]
        with pytest.raises((ValueError, RuntimeError), match="cannot load the codes of an int8 table"):
            te.nn.EmbeddingBagCollection(plain, OPTIMIZER).load_state_dict(state, strict=False)
    for part in ({"weight": state["user.weight"]}, {"weight_scale": state["user.weight_scale"]}):
        with pytest.raises(ValueError, match="'user' of int8 needs both weight and weight_scale"):
            table.assign(part)


def test_rows_take_less_than_a_third_of_the_memory():
    """With a cache of 5 % of the rows, its directory included."""
    sizes = {}
    for dtype in (torch.int8, torch.float32):
        config = te.TableConfig("t", 4096, 64, dtype=dtype, placement="host", cache=CacheConfig(share=0.05))
        table = te.nn.EmbeddingBagCollection([config], OPTIMIZER)["t"]
        slots = sum(tensor.nbytes for tensor in table.device_tensors().values()) + 21 * len(table.weight)
        sizes[dtype] = slots + table.rows.store.fields["weight"].untyped_storage().nbytes()
    assert sizes[torch.int8] < sizes[torch.float32] / 3


def test_init_is_rounded_and_tables_are_exported_as_floats():
    values = torch.linspace(-1, 1, 40 * 8).view(40, 8)
    init = lambda weight: weight.copy_(values)  # noqa: E731
    config = te.TableConfig("t", 40, 8, dtype=torch.int8, placement="host", cache=SMALL, init=init)
    collection = te.nn.EmbeddingBagCollection([config], OPTIMIZER)
    assert (decoded(collection.state_dict(), "t") - values).abs().max() <= 2**-7
    batch = te.KeyedJaggedTensor.from_lists({"t": [[1, 7], [39]]})
    with torch.no_grad():
        served = te.quantize(collection, "int8")(batch)
        torch.testing.assert_close(served, collection(batch), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'t': int8 rows need placement host or disk, got 'device'"),
        ({"placement": "server"}, "'t': int8 rows need placement host or disk, got 'server'"),
        ({"num_embeddings": None, "capacity": 9, "placement": "host"}, "the dtype of a dynamic table must be one of"),
    ],
)
def test_unsupported_tables_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        te.TableConfig(**{"name": "t", "num_embeddings": 9, "embedding_dim": 4, "dtype": torch.int8} | options)
