"""Which updates a batch sees: exactly those that its staleness says, whatever the servers, trainers and time."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.server.jobs import (
    ALONE,
    KEYS,
    Faults,
    Trainers,
    batches,
    local_servers,
    make,
    restarted,
    same,
    train,
    train_all,
    train_on,
)
from tritonemb.data import make_synthetic
from tritonemb.server import AtMost, EmbeddingServer, Servers, attach, flush, node
from tritonemb.server.attach import ServersOptions
from tritonemb.server.transport import LocalTransport

OPTIMIZERS = [
    te.optim.SGD(lr=0.1), te.optim.RowWiseAdagrad(lr=0.1), te.optim.Adam(lr=0.01, weight_decay=0.1),
    te.optim.PartialRowWiseLAMB(lr=0.01), te.optim.LARSSGD(lr=0.1), te.optim.FTRL(lr=0.1, cow_clip=0.5),
]  # fmt: skip
DYNAMIC = {"capacity": 50, "eviction": te.EvictionConfig(protect=2)}
LFU = {"capacity": 90, "eviction": te.EvictionConfig("lfu", protect=4, ttl=6, half_life=3)}


@pytest.mark.few(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda item: item.name)
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_staleness_0_has_the_bits_of_one_process(servers, optimizer):
    single = make(None, optimizer=optimizer, dynamic=DYNAMIC)
    expected = [train(single, 9)], single.state_dict()
    same(train_on(servers, 9, optimizer=optimizer, dynamic=DYNAMIC), expected)
    assert single["d"].statistics().evictions > 0


@pytest.mark.parametrize("staleness", [1, AtMost(2), None])
def test_cow_clip_needs_staleness_0(staleness):
    with local_servers(1) as servers, pytest.raises(ValueError, match=r"cow_clip counts .* use staleness=0"):
        make(servers, staleness, te.optim.Adam(lr=0.1, cow_clip=1.0))


@pytest.mark.few(1)
@pytest.mark.parametrize("staleness", [1, 4, 9])
def test_bits_depend_on_the_staleness_alone(staleness):
    dynamic = {"capacity": 60 + 18 * staleness, "eviction": te.EvictionConfig(protect=staleness + 1)}
    expected = None
    for servers, ahead in ((1, 0), (2, 1), (4, staleness)):
        actual = train_on(servers, 12, trainers=2, staleness=staleness, ahead=ahead, dynamic=dynamic)
        expected = expected or actual
        same(actual, expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("trainers", [1, 3])
def test_a_batch_sees_exactly_the_updates_before_it(staleness, trainers):
    """Against dense Adagrad in float64, of which older weights are kept; only rows of a batch change."""
    steps, lr = 8, 0.1
    outputs, state = train_on(2, steps, trainers=trainers, staleness=staleness)
    first = make(None)
    weights = [table.weight.detach().double() for table in first.tables]
    sums = [torch.zeros_like(weight) for weight in weights]
    history = [weights]
    inputs = [list(batches(steps, trainer)) for trainer in range(trainers)]
    for step in range(steps):
        seen = history[max(0, step - staleness)]
        total = [torch.zeros_like(weight) for weight in weights]
        for trainer in range(trainers):
            read = [weight.clone().requires_grad_() for weight in seen]
            batch = inputs[trainer][step]
            parts = []
            for table, mode, feature in ((0, "sum", "a"), (0, "sum", "c"), (1, "mean", "b")):
                part = batch[feature]
                parts.append(F.embedding_bag(part.values(), read[table], part.offsets()[:-1], mode=mode))
            output = torch.cat(parts, 1)
            # float32 has 24 bits; a row has few summands
            torch.testing.assert_close(outputs[trainer][step].double(), output.detach(), rtol=1e-5, atol=1e-6)
            (output.square() + output).sum().backward()
            for number, weight in enumerate(read):
                total[number] += weight.grad / trainers
        weights = [weight.clone() for weight in weights]
        for weight, local, gradient in zip(weights, sums, total, strict=True):
            local += gradient.square()
            weight -= torch.where(gradient != 0, lr * gradient / (local.sqrt() + 1e-8), 0.0)
        history.append(weights)
    for name, weight in zip("ab", weights, strict=True):
        torch.testing.assert_close(state[f"{name}.weight"].double(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("trainers", [1, 2])
def test_elements_of_gradients_are_clamped_once_before_rows_are_summed(trainers):
    """Those of the mean over trainers; a row of three bags moves by three times the bound."""

    def models(servers, *ranks):
        for rank in ranks:
            place = {} if servers is None else {"placement": "server"}
            torch.manual_seed(3)
            optimizer = te.optim.SGD(lr=1.0, max_gradient=0.5)
            model = te.nn.EmbeddingBagCollection([te.TableConfig("a", 9, 2, **place)], optimizer)
            if servers is not None:
                attach(model, servers, 1, group=Trainers(rank, trainers))
            yield model

    def moved(*models):
        initial = models[0].state_dict()["a.weight"].clone()
        batch = te.KeyedJaggedTensor.from_lists({"a": [[7], [7], [7, 8], [8]]})
        for model, prefetched in [(model, te.nn.prefetch(model, batch)) for model in models]:
            model(prefetched).backward(torch.tensor([[4.0, -3.0], [0.25, 9.0], [-0.5, 2.0], [0.5, 0.5]]))
        with ThreadPoolExecutor() as threads:  # each waits for the others
            deque(threads.map(flush, models), maxlen=0)
        return models[0].state_dict()["a.weight"] - initial

    expected = moved(*models(None, 0))
    assert expected[7].tolist() == pytest.approx([-0.25, -0.5])
    with local_servers(2) as servers:
        actual = moved(*models(servers, *range(trainers)))
    if trainers == 2:  # of equal gradients the mean is clamped to the bound, those of the trainers to twice the bound
        expected[7:] = -torch.tensor([[1 + 0.25 - 0.5, -1 + 1 + 1], [-0.5 + 0.5, 1 + 0.5]])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "how",
    [
        {"trainers": 2, "staleness": 2, "ahead": 1},
        {"trainers": 2, "staleness": AtMost(2), "ahead": 1},
        {"staleness": 0, "ahead": 2, "cache": 1, "dynamic": LFU},
    ],
    ids=["exact", "at most", "leased rows"],
)
@pytest.mark.parametrize(
    "faults", [Faults(late=0.5, delay=0.02), Faults(twice=0.4, late=0.3), Faults(lost=0.05), Faults(cut=0.03)]
)
@pytest.mark.few(3)
def test_a_bad_network_changes_no_bit(faults, how):
    expected = train_on(2, 8, **how)
    with local_servers(2, faults) as servers:
        actual = train_all(servers, 8, **how)
        histograms = [s["collections"]["tables"]["staleness"] for s in servers.statistics()]
    if isinstance(how["staleness"], int):
        same(actual, expected)
    assert all(int(steps) <= 2 for histogram in histograms for steps in histogram)


def test_unbounded_staleness_waits_for_nobody():
    with local_servers(1) as servers:
        model = make(servers, None)
        waiting = [te.nn.prefetch(model, batch) for batch in batches(5)]
        for batch in waiting:
            model(batch).sum().backward()
        flush(model)
        assert servers.statistics()[0]["collections"]["tables"]["staleness"] == {str(s): 1 for s in range(5)}


def test_without_a_bound_a_trainer_pulls_as_far_ahead_as_it_prefetches():
    data = make_synthetic(num_train=1_000, num_test=10)
    tables = [replace(table, placement="server") for table in data.tables(4)]
    model = te.nn.DLRM(tables, data.num_dense, bottom_mlp=(4,), top_mlp=(4,), optimizer=te.optim.SGD(lr=0.1))
    options = {"batch_size": 25, "epochs": 1, "verbose": False, "prefetch_depth": 5}
    with local_servers(2) as servers:
        te.Trainer(model, data, servers=servers, staleness=None, **options).fit()
        for statistics in servers.statistics():
            histogram = statistics["collections"]["embeddings"]["staleness"]
            assert sum(histogram.values()) == 40
            assert 0 < max(map(int, histogram)) <= 5


def test_micro_batches_make_one_step():
    with local_servers(2) as servers:
        model = make(servers, 1, accumulate=2)
        for _ in range(3):
            with model.accumulate():
                for batch in batches(2):
                    model(batch).square().sum().backward()
        flush(model)
        result = servers.statistics()[0]["collections"]["tables"]
        assert (result["pulls"], result["steps"]) == (6, 3)


def test_a_refused_gradient_of_a_micro_batch_changes_no_row():
    def accumulate(*factors: float) -> None:
        with model.accumulate():
            for batch, factor in zip(batches(2), factors, strict=True):
                (factor * model(batch)).sum().backward()

    with local_servers(2) as servers:
        model = make(servers, 1, te.optim.SGD(lr=0.1, on_nonfinite="raise"), accumulate=2)
        accumulate(1.0, 1.0)
        flush(model)
        initial = model.state_dict()
        with pytest.raises(ValueError, match="is NaN or infinite"):
            accumulate(1.0, torch.nan)
        flush(model)
        assert_same_bits(model.state_dict(), initial)
        accumulate(1.0, 1.0)
        assert model.state_dict()["a.weight"].isfinite().all()


def test_more_micro_batches_than_a_step_has_are_refused():
    """Their rows would wait for gradients that are pushed after the block."""

    def accumulate(number: int) -> None:
        with model.accumulate():
            for batch in batches(number):
                model(batch).square().sum().backward()

    with local_servers(1) as servers:
        model = make(servers, 1)
        train(model, 2)
        with pytest.raises(RuntimeError, match="more than 2 micro-batches in a block of accumulate"):
            accumulate(3)
        train(model, 2)
        accumulate(2)
        assert model.state_dict()["a.weight"].isfinite().all()


def test_a_batch_that_is_not_trained_holds_nobody_up():
    with local_servers(1) as servers:
        model = make(servers)
        for batch in batches(3):
            del batch
            model(next(batches(1)))  # and no backward
        train(model, 2)
        assert model.state_dict()["a.weight"].isfinite().all()


def test_what_a_user_gets_wrong():
    with pytest.raises(ValueError, match=r"'x' is on embedding servers.*te\.server\.attach"):
        te.nn.EmbeddingBagCollection([te.TableConfig("x", 9, 4, placement="server")], te.optim.SGD())(
            te.KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1]))
        )
    with local_servers(2) as servers:
        model = make(servers)
        initial = model.state_dict()
        with pytest.raises(ValueError, match=r"table 'a': id 300 of feature 'a'"):
            model(te.KeyedJaggedTensor(KEYS, torch.tensor([300, 1, 2]), lengths=torch.ones(3, dtype=torch.int64)))
        assert_same_bits(model.state_dict(), initial)
        with pytest.raises(ValueError, match="other tables, trainers or staleness"):
            make(servers, 1)


def test_another_run_goes_on_with_tables_that_are_there():
    expected = train_on(2, 9)
    with local_servers(2) as servers:
        model = make(servers)
        train(model, 4)
        flush(model)
        model = make(servers)
        outputs = [model(batch) for batch in list(batches(5))[4:]]
        assert torch.equal(outputs[0], expected[0][0][4])


@pytest.mark.parametrize("staleness", [0, 1])
def test_tables_that_were_left_in_the_middle_of_a_step_are_not_trained(staleness):
    with local_servers(2) as servers:
        model = make(servers, staleness)
        waiting = te.nn.prefetch(model, next(batches(1)))
        if staleness == 0:
            train(model, 1)
        other = make(servers, staleness)
        with pytest.raises(ValueError, match="without a flush; resume it from a checkpoint"):
            train(other, 1)
        del waiting


@pytest.mark.parametrize(
    "how",
    [
        {"staleness": 2, "dynamic": {"capacity": 90, "eviction": te.EvictionConfig(protect=4)}},
        {"staleness": 0, "cache": 1, "dynamic": DYNAMIC},
    ],
    ids=["staleness", "leased rows"],
)
def test_tables_that_find_no_room_are_put_on_disk(how, tmp_path):
    expected = train_on(1, 10, **how)
    server = EmbeddingServer("small", tmp_path, memory=200_000, over_memory="spill")
    with Servers([LocalTransport(server, "small")], [server]) as servers:
        same(train_all(servers, 10, **how), expected)
        assert any(server.collections["tables"].partitions.tables.cache.statistics()["b"].__dict__.values())
    server = EmbeddingServer("small", memory=200_000)
    message = r"small has 200,000 bytes left for tables, and those of 'tables' need .* over_memory=\"spill\""
    with Servers([LocalTransport(server, "small")], [server]) as servers, pytest.raises(ValueError, match=message):
        make(servers)


def test_tables_that_cannot_be_created_reserve_no_memory(monkeypatch):
    server = EmbeddingServer("small", memory=10_000_000)
    with Servers([LocalTransport(server, "small")], [server]) as servers:
        with monkeypatch.context() as patch:
            patch.setattr(node, "ServedTables", Mock(side_effect=OSError("no memory")))
            with pytest.raises(OSError, match="no memory"):
                make(servers)
        assert server.quota.reserved_bytes == {}
        make(servers)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("dynamic", [None, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.few(4)
def test_frozen_tables_on_servers_are_not_trained(when, dynamic, staleness):
    with local_servers(2) as servers:
        collection = make(None if when == "before" else servers, staleness, dynamic=dynamic)
        if when == "before":
            configs = [replace(config, placement="server") for config in collection.configs]
            collection = te.nn.EmbeddingBagCollection(configs, te.optim.Adagrad(lr=0.1)).requires_grad_(False)
            attach(collection, servers, staleness, group=ALONE)
        else:
            train(collection, 2)
            flush(collection)
            collection.requires_grad_(False)
        initial = {name: value.clone() for name, value in collection.state_dict().items()}
        batch, scale = next(batches(1)), torch.ones((), requires_grad=True)
        size = batch.values().numel()
        weights = torch.ones(size, requires_grad=staleness > 0)

        def weighted(weights: torch.Tensor) -> torch.Tensor:
            return collection(te.KeyedJaggedTensor(KEYS, batch.values(), weights, offsets=batch.offsets()))

        (weighted(weights) * scale).sum().backward()
        flush(collection)
        assert_same_bits(collection.state_dict(), initial)
        if staleness:  # at 0 a cache has the rows, which are not pinned until the backward
            with torch.no_grad():
                of_each = torch.stack([weighted(weight).sum() for weight in torch.eye(size)])
            torch.testing.assert_close(weights.grad, of_each)  # sums of a few float32


@pytest.mark.more
@pytest.mark.parametrize("kind", ["plain", "prefetched", "cached", "twice", "dynamic"])
def test_a_checkpointed_lookup_reads_and_counts_its_batch_once(kind):
    """PyTorch repeats its forward in the backward, when servers may have updated rows."""
    size = {"num_embeddings": 120}
    if kind == "dynamic":
        size = {"num_embeddings": None, "capacity": 64, "admission": te.AdmissionConfig(appearances=2)}
    cache = te.CacheConfig(rows=16) if kind == "cached" else te.CacheConfig()
    table = te.TableConfig("u", embedding_dim=4, placement="server", cache=cache, **size)

    def run(checkpointed):
        torch.manual_seed(3)
        collection = te.nn.EmbeddingBagCollection([table], te.optim.SGD(lr=0.1))
        trace, scale = [], torch.ones(1, requires_grad=True)

        def forward(features, other):
            result = torch.tanh(collection(features) * scale)
            return result + torch.tanh(collection(other) * scale) if kind == "twice" else result

        with local_servers(1) as servers:
            attach(collection, servers, 1)
            for item in range(6):
                features, other = (te.KeyedJaggedTensor.from_lists({"u": [[item, n, 100]]}) for n in (2 * item, item))
                prefetched = te.nn.prefetch(collection, features) if kind == "prefetched" else features
                arguments = forward, prefetched, other
                result = checkpoint(*arguments, use_reentrant=False) if checkpointed else forward(*arguments[1:])
                result.sum().backward()
                trace += [result.detach(), scale.grad.clone()]
            flush(collection)
            return torch.stack([tensor.sum() for tensor in trace]), collection.state_dict()

    (actual, state), (expected, expected_state) = run(True), run(False)
    assert torch.equal(actual, expected)
    assert_same_bits(state, expected_state)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_state_of_another_optimizer_loads_its_rows(staleness):
    """Missing states are zero, as on other tiers."""
    for size in ({"num_embeddings": 50}, {"num_embeddings": None, "capacity": 20_000}):
        source = te.nn.EmbeddingBagCollection([te.TableConfig("u", embedding_dim=4, **size)], te.optim.SGD(lr=1.0))
        for item in range(10):
            batch = te.KeyedJaggedTensor.from_lists({"u": [[item]]})
            source(batch).sum().backward()
        state, placed = source.state_dict(), te.TableConfig("u", embedding_dim=4, placement="server", **size)
        with local_servers(2) as servers:
            loaded = te.nn.EmbeddingBagCollection([placed], te.optim.Adagrad(lr=1.0))
            attach(loaded, servers, staleness)
            loaded(batch).sum().backward()
            result = loaded.load_state_dict(state, strict=False)
            actual = loaded.state_dict()
            assert result.missing_keys == ["u.sum"]
            assert not actual["u.sum"].any()
            assert all(torch.equal(actual[name], value) for name, value in state.items() if name != "step")
            if "u.clock" in state:  # that of the newest row, also on servers that do not have it
                loaded.load_state_dict(
                    {name: value for name, value in state.items() if name not in ("u.clock", "u.seed")}, strict=False
                )
                loaded(te.KeyedJaggedTensor.from_lists({"u": [[*range(10)]]})).sum().backward()
                flush(loaded)
                assert {*loaded.state_dict()["u.step"][:10].tolist()} == {int(state["u.clock"]) + 1}
            result = loaded.load_state_dict({"step": state["step"]}, strict=False)
            assert {*result.missing_keys} == actual.keys() - {"step"}


@pytest.mark.parametrize("staleness", [0, 1, AtMost(1), None])
def test_a_step_of_several_batches_begins_anew_after_one_that_was_not_trained(staleness):
    """Else every later step would have batches of two blocks, and the last batch would not be applied."""

    def state_after(failure: str) -> dict[str, torch.Tensor]:
        with local_servers(2) as servers:
            model = make(servers, staleness, accumulate=3)
            features = [*batches(7)]
            if failure == "raised":
                with suppress(KeyError), model.accumulate():
                    model(features[6]).sum().backward()
                    raise KeyError
            elif failure == "dropped":
                model(features[6])
            for begin in (0, 3):
                with model.accumulate():
                    for batch in features[begin : begin + 3]:
                        model(batch).square().sum().backward()
            if failure == "last":
                model(features[6])
            flush(model)
            return dict(model.state_dict())

    expected = state_after("")
    for failure in ("raised", "dropped", "last"):
        assert_same_bits(state_after(failure), expected, failure)


@pytest.mark.parametrize("log", [None, "disk"])
def test_rows_that_are_loaded_get_no_gradient_of_a_step_before(tmp_path, log):
    """Neither when these are flushed, nor after a restart; later steps, and other tables, get theirs."""
    with restarted(tmp_path, log, 1, 10**9) as (servers, (local,)):
        model = make(servers, 3)
        train(model, 2)
        flush(model)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, 5)
        model.load_state_dict({name: value for name, value in saved.items() if name[0] == "a"}, strict=False)
        if log is not None:
            local.restart()
        flush(model)
        actual = model.state_dict()
        assert_same_bits(
            {n: v for n, v in actual.items() if n[0] == "a"}, {n: v for n, v in saved.items() if n[0] == "a"}
        )
        assert not torch.equal(actual["b.weight"], saved["b.weight"])
        train(model, 1)
        flush(model)
        assert not torch.equal(model.state_dict()["a.weight"], saved["a.weight"])


@pytest.mark.parametrize(("trainers", "cache", "least"), [(1, None, 3), (2, None, 8), (1, 64, 5), (2, 64, 10)])
def test_rows_are_protected_until_their_gradient_arrives(trainers, cache, least):
    """With `AtMost(2)`; another trainer may be two steps behind a pull, and a cached row two steps old."""
    for protect in (least - 1, least):
        dynamic = {"capacity": 90, "eviction": te.EvictionConfig(protect=protect)}
        refused = pytest.raises(ValueError, match=rf"use EvictionConfig\(protect={least}\)")
        with local_servers(1) as servers, refused if protect < least else nullcontext():
            make(servers, AtMost(2), dynamic=dynamic, cache=cache, group=Trainers(0, trainers))


@pytest.mark.parametrize(
    ("mode", "trainers", "accumulate", "expected"),
    [("exact", 9, 1, 24), ("exact", 9, 9, 27), ("at-most", 4, 1, 24), ("at-most", 5, 1, 25), ("at-most", 2, 4, 40)],
)
def test_options_protect_rows_until_their_gradient_arrives(mode, trainers, accumulate, expected, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: trainers)
    options = ServersOptions(servers="1", staleness=2, staleness_mode=mode)
    (table,) = options.place([te.TableConfig("a", None, 4, capacity=64)], accumulate)
    assert table.eviction.protect == expected
