"""Dynamic tables: bitwise a static table of the same rows, whatever the ids; what is evicted, admitted, saved."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import tritonemb as te
from tests.helpers import assert_same_bits, breadth, configurations
from tritonemb.kernels import dynamic_index, random, triton_utils
from tritonemb.layout import INDEX_BYTES, WAYS, make_index, partitions_of
from tritonemb.nn.collections import TableCollection
from tritonemb.ops.registry import use_kernels
from tritonemb.tables import index as index_module
from tritonemb.tables import table as table_module
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.lookup import assign_rows
from tritonemb.tables.server_table import make_table
from tritonemb.tables.table_set import prefetch

EXTREMES = [-(2**63), -(2**32) - 7, -1, 0, 1, 2**31, 2**32 + 1, 2**63 - 1]
IDS = torch.tensor(sorted({*EXTREMES, *(7**n % 2**61 * (-1) ** n for n in range(1, 60))}))
BATCH = 16
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"placement": "host", "cache": te.CacheConfig(rows=32)},
    "disk": {"placement": "disk", "cache": te.CacheConfig(rows=32, host_rows=64)},
}


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


def batches(number: int, keys: Sequence[str] = ("user", "item"), seed: int = 0) -> Iterator[tuple[Any, Any]]:
    """Bags of ids of any size; and the same with their numbers in `IDS`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        lengths = torch.randint(0, 5, (len(keys) * BATCH,), generator=generator)
        values = torch.randint(len(IDS), (int(lengths.sum()),), generator=generator)
        weights = torch.randn(values.numel(), generator=generator)
        yield (
            te.KeyedJaggedTensor(list(keys), IDS[values], weights, lengths=lengths),
            te.KeyedJaggedTensor(list(keys), values, weights, lengths=lengths),
        )


def step(model: Any, features: Any, *groups: Any) -> Tensor:
    result = model(features, *groups)
    out: Tensor = result if isinstance(result, Tensor) else result.values()
    (out * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum().backward()
    return out.detach()


def config(name: str = "user", capacity: int = 200, dim: int = 12, **options: Any) -> te.TableConfig:
    return te.TableConfig(name, None, dim, capacity=capacity, **options)


def single(optimizer: te.optim.Optimizer | None = None, **options: Any) -> te.nn.EmbeddingBagCollection:
    return te.nn.EmbeddingBagCollection([config(**options)], optimizer or te.optim.SGD(lr=0.1))


def table_of(collection: TableCollection, name: str = "user") -> DynamicTable:
    result = collection[name]
    assert isinstance(result, DynamicTable)
    return result


def static_twin(dynamic: TableCollection, tables: Sequence[te.TableConfig], optimizer: Any) -> TableCollection:
    """With a row for each of `IDS`, and the initial values of the dynamic tables."""
    static = [
        te.TableConfig(t.name, len(IDS), t.embedding_dim, t.features, t.pooling, t.dtype, init_bound=t.bound)
        for t in tables
    ]
    device = dynamic.tables[0].weight.device
    created = type(dynamic)(static, optimizer, device)
    for table in created.tables:
        table.weight.data.copy_(table_of(dynamic, table.config.name).initial_values(IDS.to(device)))
    return created


def same_rows(dynamic: TableCollection, static: TableCollection) -> None:
    for table in static.tables:
        local = table_of(dynamic, table.config.name)
        assert torch.equal(local.lookup(IDS), table.weight)
        saved, known = local.export(), torch.isin(IDS, local.ids().cpu())
        assert torch.equal(saved["ids"].cpu(), IDS[known])
        for name, state in table.tensors().items():
            assert torch.equal(saved[name], state[known.to(state.device)]), name


@pytest.mark.parametrize("optimizer", configurations(), ids=lambda item: item.name)
def test_it_is_bitwise_a_static_table_of_the_same_rows(optimizer, device):
    """Tables on the device, and the same in host memory and on disk."""
    tables = [config(pooling="mean"), config("item", dim=5, features=["item", "user"])]
    dynamic = te.nn.EmbeddingBagCollection(tables, optimizer, device)
    static = static_twin(dynamic, tables, optimizer)
    placed = [dataclasses.replace(t, **TIERS[tier]) for t, tier in zip(tables, ("host", "disk"), strict=True)]
    low = te.nn.EmbeddingBagCollection(placed, optimizer, device)
    for table in tables:
        table_of(low, table.name).seed = table_of(dynamic, table.name).seed
    for batch in batches(6):
        ids, numbers = (item.to(device) for item in batch)
        with torch.no_grad():
            assert torch.equal(dynamic(ids), static(numbers))  # unknown ids among them
        out = step(static, numbers)
        assert torch.equal(step(dynamic, ids), out)
        assert torch.equal(step(low, ids), out)
        with torch.no_grad():
            assert torch.equal(dynamic(ids), static(numbers))
            assert torch.equal(low(ids), static(numbers))
    same_rows(dynamic, static)
    same_rows(low, static)
    assert table_of(dynamic).statistics().evictions == 0


@pytest.mark.public
def test_rows_without_pooling_and_ids_of_32_bits():
    tables, optimizer = [config(pooling="none")], te.optim.Adam(lr=0.1)
    dynamic = te.nn.EmbeddingCollection(tables, optimizer)
    static = static_twin(dynamic, tables, optimizer)
    for ids, numbers in batches(4, ["user"]):
        assert torch.equal(step(dynamic, ids), step(static, numbers))
    same_rows(dynamic, static)
    small = te.KeyedJaggedTensor(["user"], torch.tensor([-5, 3], dtype=torch.int32), lengths=torch.tensor([2]))
    step(dynamic, small)
    assert torch.isin(torch.tensor([-5, 3]), table_of(dynamic).ids()).all()


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_samples_with_unknown_ids_are_read_apart(tier, pooling):
    kind = te.nn.EmbeddingCollection if pooling == "none" else te.nn.EmbeddingBagCollection
    tables, optimizer = [config(pooling=pooling, **TIERS[tier]), config("item", pooling=pooling)], te.optim.SGD(lr=0.1)
    dynamic = kind(tables, optimizer)
    static = static_twin(dynamic, tables, optimizer)
    known = torch.arange(2, len(IDS)).repeat(2)
    for model, values in ((dynamic, IDS[known]), (static, known)):
        step(model, te.KeyedJaggedTensor(["user", "item"], values, lengths=torch.full((2,), len(IDS) - 2)))
    for unknown in ([], [7], [7, 11, 44], [*range(0, 60, 3)]):
        numbers = known[:60].clone()
        lengths = torch.tensor([4, 0, 3, 5, 2, 1, 6, 4, 3, 2, 3, 0, 5, 4, 1, 7, 2, 1, 3, 4])
        numbers[unknown] = torch.tensor([0, 1] * 10)[: len(unknown)]
        weights, outputs = torch.randn(60), list[Tensor]()
        for model, values in ((dynamic, IDS[numbers]), (static, numbers)):
            features = te.KeyedJaggedTensor(["user", "item"], values, weights, lengths=lengths)
            with torch.no_grad():
                results = model(features), model(prefetch(model, features))
            outputs += [result if pooling == "mean" else result.values() for result in results]
        assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_few_rows_are_copied_for_an_unknown_id():
    collection = te.nn.EmbeddingBagCollection([config(), config("item")], te.optim.SGD())
    ids = IDS[:50]
    step(collection, te.KeyedJaggedTensor(["user", "item"], ids, lengths=torch.ones_like(ids)))
    features = te.KeyedJaggedTensor(["user", "item"], torch.where(ids == ids[3], 17, ids), lengths=torch.ones_like(ids))
    with torch.no_grad():
        unknown = assign_rows(collection.table_set, features).unknown_ids
    assert unknown is not None
    assert unknown.outputs.tolist() == [3]
    assert [*unknown.rows] == [0]
    assert unknown.features.values().tolist() == [0, int(table_of(collection, "item").index.find(ids[28:29]))]


def rows_by_number(table: DynamicTable, ids: Tensor) -> Tensor:
    """Their numbers in a table that has a row for each of `IDS`, then the fallback rows."""
    return len(IDS) + partitions_of(ids, len(table.index.fallback_rows))


@pytest.mark.parametrize("optimizer", configurations(), ids=lambda item: item.name)
@pytest.mark.few(4)
def test_ids_that_are_not_admitted_share_rows_that_are_trained(optimizer):
    """Bitwise rows of a static table, on all tiers, also after a resume on another one."""
    admission, saved = te.AdmissionConfig(probability=0.5), dict[str, Tensor]()
    for tier in ("device", "host", "disk"):
        tables = [config(admission=admission, fallback_rows=7, pooling="mean", **TIERS[tier])]
        torch.manual_seed(0)
        dynamic = te.nn.EmbeddingBagCollection(tables, optimizer)
        table = table_of(dynamic)
        table.reset_parameters(seed=3)
        fallback = table.get_state()["fallback_weight"]
        static = te.nn.EmbeddingBagCollection([te.TableConfig("user", len(IDS) + 7, 12, pooling="mean")], optimizer)
        static["user"].weight.data.copy_(torch.cat([table.initial_values(IDS), fallback]))
        assert fallback.unique(dim=0).shape == (7, 12)
        for number, (ids, numbers) in enumerate(batches(8, ["user"])):
            if number == 4:
                loaded = te.nn.EmbeddingBagCollection(tables, optimizer)
                loaded.load_state_dict(dynamic.state_dict())
                dynamic, table = loaded, table_of(loaded)
            out = step(dynamic, ids)
            is_known = torch.isin(ids.values(), table.ids())
            values = torch.where(is_known, numbers.values(), rows_by_number(table, ids.values()))
            numbers = te.KeyedJaggedTensor(["user"], values, numbers.weights(), lengths=numbers.lengths())
            assert torch.equal(out, step(static, numbers))
            with torch.no_grad():
                assert torch.equal(dynamic(ids), static(numbers))
        assert 0 < int(is_known.sum()) < len(is_known)
        state = {name.removeprefix("user."): value for name, value in dynamic.state_dict().items()}
        for name, value in static["user"].tensors().items():
            assert torch.equal(state[f"fallback_{name}"], value[len(IDS) :]), name
        everything = torch.where(torch.isin(IDS, table.ids()), torch.arange(len(IDS)), rows_by_number(table, IDS))
        assert torch.equal(table.lookup(IDS), static["user"].weight[everything])
        assert_same_bits(state, saved or state)
        saved = state


def test_ids_without_room_and_evicted_ones_share_rows(tier):
    few = {"capacity": 4, "fallback_rows": 2, "eviction": te.EvictionConfig(protect=1)}
    tables = [config(**few, **TIERS[tier]), config("item", capacity=9, features=["user"])]
    collection = te.nn.EmbeddingBagCollection(tables, te.optim.SGD(lr=0.5))
    table = table_of(collection)
    shared = table.get_state()["fallback_weight"].clone()
    for ids in ((1, 2), (3, 4, 5, 6), (5, 6), (7, 8)):  # 5 and 6 find no room, then they evict 1 and 2
        step(collection, bag(*ids))
    assert table.ids().tolist() == [5, 6, 7, 8]
    statistics = table.statistics()
    assert (statistics.refused, statistics.evictions, statistics.rows, statistics.capacity) == (2, 4, 4, 4)
    rows = table.get_state()["fallback_weight"]
    assert (rows != shared).any(1).tolist() == [n in partitions_of(torch.tensor([5, 6]), 2).tolist() for n in range(2)]
    gone = torch.tensor([1, 3, -9])
    assert torch.equal(table.lookup(gone), rows[partitions_of(gone, 2)])
    with torch.no_grad():
        assert torch.equal(collection(bag(3))[:, :12], rows[partitions_of(torch.tensor([3]), 2)])


def test_fallback_rows_are_saved_exported_and_absent_in_older_states(tmp_path):
    def make(**options: Any) -> te.nn.EmbeddingBagCollection:
        return te.nn.EmbeddingBagCollection([config(dim=3, **options)], te.optim.RowWiseAdagrad(lr=0.1))

    late = te.AdmissionConfig(appearances=2)
    whole, plain = make(fallback_rows=5, admission=late), make(admission=late)
    for model in (whole, plain):
        step(model, bag(1, 2, 3, 3))
    table = table_of(whole)
    for path in (tmp_path / "rows.npz", tmp_path / "rows.parquet"):
        exported = table.export(path)
    assert exported["fallback_weight"].shape == (5, 3)
    assert np.array_equal(np.load(tmp_path / "rows.npz")["fallback_sum"], exported["fallback_sum"])
    result = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "rows.parquet").to_pydict()
    assert result["ids"] == [3] + [None] * 5
    assert result["weight"] == torch.cat([exported["weight"], exported["fallback_weight"]]).tolist()
    older = make(fallback_rows=5)
    state = {key: value for key, value in whole.state_dict().items() if key.split(".")[-1] not in ("sketch", "added")}
    older.load_state_dict({name: value for name, value in state.items() if "fallback" not in name})
    assert table_of(older).ids().tolist() == [3]
    initial = table_of(older).initial_values(table.index.ids[-5:])
    assert torch.equal(table_of(older).lookup([1, 2]), initial[partitions_of(torch.tensor([1, 2]), 5)])
    with pytest.raises(RuntimeError, match=r"'user': fallback_weight must have shape \[4, 3\], got \[5, 3\]"):
        make(fallback_rows=4).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*fallback_weight"):
        plain.load_state_dict(whole.state_dict())
    with pytest.raises(ValueError, match="fallback_rows are for dynamic tables"):
        te.TableConfig("user", 9, 3, fallback_rows=1)
    with pytest.raises(ValueError, match="fallback_rows must be at least 0"):
        config(fallback_rows=-1)


@pytest.mark.parametrize("static", TIERS)
def test_beside_static_tables_whose_ids_are_checked(tier, static):
    tables = [config(**TIERS[tier]), te.TableConfig("item", 10, 12, **TIERS[static])]
    collection = te.nn.EmbeddingBagCollection(tables, te.optim.SGD(lr=0.1))
    bad = te.KeyedJaggedTensor(["item", "user"], torch.tensor([3, 10, -4, 7]), lengths=torch.tensor([1, 1, 1, 1]))
    with pytest.raises(ValueError, match=r"'item'.*10"):
        collection(bad)
    assert table_of(collection).ids().tolist() == []
    good = te.KeyedJaggedTensor(["item", "user"], torch.tensor([3, 9, -4, 7]), lengths=torch.tensor([1, 1, 1, 1]))
    initial = collection.state_dict()["item.weight"].clone()
    step(collection, good)
    final = collection.state_dict()["item.weight"]
    assert (final != initial).any(1).tolist() == [n in (3, 9) for n in range(10)]


def test_rows_of_16_bits_are_rounded_by_their_ids_on_every_tier(tier):
    """Beside a table on the device, too, whose collection has a cache."""
    options, optimizer = {"dtype": torch.bfloat16}, te.optim.RowWiseAdagrad(lr=0.3, stochastic_rounding=True)
    results = []
    for placed in ({}, TIERS[tier]):
        torch.manual_seed(0)
        tables = [config("user", **options, **placed), config("item", **options)]
        model = te.nn.EmbeddingBagCollection(tables, optimizer)
        for name in ("user", "item"):
            table_of(model, name).seed = 7
        for features, _ in batches(6):
            step(model, features)
        results.append([table_of(model, name).tensors() for name in ("user", "item")])
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.more), torch.bfloat16])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.few(1)
def test_a_resumed_table_is_the_same_to_the_bit(dtype, tier, device):
    """On each tier, from one to another, and where rows are evicted, admitted late, and expire."""

    def make(tier: str) -> te.nn.EmbeddingBagCollection:
        torch.manual_seed(1)
        late = te.AdmissionConfig(appearances=2)
        tables = [
            config(capacity=60, dtype=dtype, eviction=te.EvictionConfig("lfu", protect=1, half_life=3), **TIERS[tier]),
            config("item", dtype=dtype, admission=late, eviction=te.EvictionConfig(protect=1, ttl=4), **TIERS[tier]),
        ]
        return te.nn.EmbeddingBagCollection(tables, te.optim.RowWiseAdagrad(lr=0.1), device)

    whole, first = make("device"), make(tier)
    for ids, _ in batches(30):
        step(whole, ids.to(device))
    for ids, _ in batches(15):
        step(first, ids.to(device))
    saved = first.state_dict()
    retained = copy.deepcopy(saved)
    resumed = make("host" if tier == "disk" else "device")
    table_of(resumed).reset_parameters(seed=5)
    resumed.load_state_dict(saved)
    for number, (ids, _) in enumerate(batches(30)):
        if number >= 15:
            step(resumed, ids.to(device))
            step(first, ids.to(device))
    assert_same_bits(*({key: value for key, value in state.items() if key != "step"} for state in (saved, retained)))
    assert_same_bits(first.state_dict(), whole.state_dict())
    assert_same_bits(resumed.state_dict(), whole.state_dict())
    assert table_of(whole).statistics().evictions > 0
    assert table_of(whole, "item").statistics().refused > 0
    assert table_of(whole, "item").statistics().evictions > 0


@pytest.mark.parametrize("depth", [1, 3])
def test_every_prefetch_depth_gives_the_same_bits(depth, tier, device):
    """Also of ids that are refused: they are read beside rows that the batches before have changed."""

    def run(depth: int, tier: str) -> dict[str, Tensor]:
        torch.manual_seed(2)
        late = te.AdmissionConfig(appearances=2)
        tables = [
            config(capacity=30, eviction=te.EvictionConfig(protect=3), **TIERS[tier]),
            config("item", admission=late),
        ]
        collection = te.nn.EmbeddingBagCollection(tables, te.optim.Adagrad(lr=0.1), device)
        waiting = list[Any]()
        for ids in IDS[torch.randperm(64, generator=torch.Generator().manual_seed(4)).repeat(3)].split(8):
            features = te.KeyedJaggedTensor(["user", "item"], ids, lengths=torch.full((4,), 2)).to(device)
            waiting.append(prefetch(collection, features))
            if len(waiting) > depth:
                step(collection, waiting.pop(0))
        while waiting:
            step(collection, waiting.pop(0))
        assert table_of(collection).statistics().evictions > 0
        assert table_of(collection, "item").statistics().refused > 0
        return collection.state_dict()

    assert_same_bits(run(depth, tier), run(0, "device"))


@pytest.mark.parametrize("tier", breadth(TIERS, ["device", "host"]))
@pytest.mark.few(1)
def test_threads_may_prefetch_read_and_evaluate_at_once(tier):
    """What is found while another thread inserts is one of a row's values, or its initial ones; and nothing is lost."""

    def run(disturbed: bool) -> dict[str, Tensor]:
        torch.manual_seed(5)
        collection = single(te.optim.Adagrad(lr=0.1), capacity=3_000, dim=4, **TIERS[tier])
        table, over, reads = table_of(collection), threading.Event(), []

        def disturb() -> None:
            while disturbed:
                with torch.no_grad():
                    collection(bag(*range(64)))
                reads.append((len(table.ids()), table.lookup([1, -9]).isfinite().all(), table.statistics().load))
                if over.is_set():
                    break

        generator = torch.Generator().manual_seed(0)
        with ThreadPoolExecutor(1) as other:
            future = other.submit(disturb)
            try:
                for _ in range(40):
                    ids = torch.randint(-(10**4), 10**4, (200,), generator=generator)
                    step(collection, te.KeyedJaggedTensor(["user"], ids, lengths=torch.ones_like(ids)))
            finally:
                over.set()
            future.result()
        assert bool(reads) == disturbed
        assert all(finite for _, finite, _ in reads)
        return collection.state_dict()

    assert_same_bits(run(True), run(False))


def test_a_batch_that_was_prefetched_too_early_is_an_error(tier):
    collection = single(capacity=30, eviction=te.EvictionConfig(protect=2), **TIERS[tier])
    early, *peers = [prefetch(collection, bag(id)) for id in range(4)]
    with pytest.raises(ValueError, match=r"prefetched 3 batches ago.*protect"):
        step(collection, early)
    for later in peers:
        step(collection, later)


@pytest.mark.parametrize("offsets", [[0, 3, 1, 4], [0, 1, 2, 9], [1, 1, 2, 4], [0, 1, 2, 3]])
def test_offsets_that_nobody_looked_at_give_no_id_a_row(tier, offsets):
    collection = te.nn.EmbeddingBagCollection([config(**TIERS[tier])], te.optim.SGD())
    bad = te.KeyedJaggedTensor.unchecked(["user"], torch.arange(4), None, torch.tensor(offsets))
    for use in (collection, collection.group):
        with pytest.raises(ValueError, match="offsets"):
            use(bad)
    assert table_of(collection).ids().tolist() == []


def test_an_accumulated_step_is_that_of_the_whole_batch(tier):
    def run(parts: int) -> Tensor:
        torch.manual_seed(3)
        collection = te.nn.EmbeddingBagCollection([config(**TIERS[tier])], te.optim.Adagrad(lr=0.1))
        ids = IDS[torch.arange(24) % 9]
        with collection.accumulate():
            for part in ids.split(24 // parts):
                features = te.KeyedJaggedTensor(["user"], part, lengths=torch.ones_like(part))
                collection(features).square().sum().backward()
        return table_of(collection).lookup(IDS)

    assert torch.equal(run(1), run(3))


def test_accumulating_more_micro_batches_than_are_protected_is_an_error(tier):
    collection = single(capacity=4, eviction=te.EvictionConfig(protect=2), **TIERS[tier])
    with collection.accumulate():
        for id in range(3):
            collection(bag(id)).sum().backward()
        with pytest.raises(ValueError, match=r"first of the accumulated micro-batches.*protect"):
            collection(bag(3))
    assert table_of(collection).ids().tolist() == [0, 1, 2]


@pytest.mark.parametrize("backend", breadth(["aot_eager", "inductor"], ["aot_eager"]))
@pytest.mark.usefixtures("dynamo")
def test_a_compiled_model_takes_a_prefetched_batch(backend):
    def run(compiled: bool) -> dict[str, Tensor]:
        torch.manual_seed(4)
        admission = te.AdmissionConfig(appearances=2)
        tables = [config(), config("item", features=["item", "user"], admission=admission)]
        tables.append(config("user_2", features=["user"], admission=admission, fallback_rows=9))
        collection = te.nn.EmbeddingBagCollection(tables, te.optim.RowWiseAdagrad(lr=0.1))
        called = torch.compile(collection, fullgraph=True, dynamic=True, backend=backend) if compiled else collection
        for ids, _ in batches(4):
            step(called, prefetch(collection, ids))
        with torch.no_grad():
            ids, _ = next(batches(1, seed=9))
            called(prefetch(collection, ids))
        return collection.state_dict()

    assert_same_bits(run(True), run(False))


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_model_notices_that_its_batch_was_changed_in_place():
    collection = te.nn.EmbeddingBagCollection([config(), config("item", **TIERS["host"])], te.optim.SGD(lr=0.1))
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    ids, _ = next(batches(1))
    output, state = compiled(prefetch(collection, ids)), collection.state_dict()
    ids.weights().mul_(2)
    with pytest.raises(RuntimeError, match="table 'user': per-sample weights were changed in place"):
        output.sum().backward()
    assert_same_bits(collection.state_dict(), state)


CHANGES = {
    "reset": (lambda c: table_of(c).reset_parameters(), True, "its ids may have lost their rows"),
    "load": (lambda c: c.load_state_dict(c.state_dict()), True, "its ids may have lost their rows"),
    "evict": (
        lambda c: [prefetch(c, bag(*range(100 * n, 100 * n + 20))) for n in range(1, 7)],
        True,
        "a batch was prefetched 6 batches ago",
    ),
    "remove": (lambda c: table_of(c).remove(torch.arange(20)), False, "its ids may have lost their rows"),
}


@pytest.mark.parametrize(("change", "training", "message"), CHANGES.values(), ids=CHANGES)
@pytest.mark.usefixtures("dynamo")
def test_a_compiled_model_notices_that_rows_of_a_prefetched_batch_have_changed(change, training, message):
    collection = single(capacity=40, eviction=te.EvictionConfig(protect=1))
    compiled, batch = torch.compile(collection, fullgraph=True, backend="aot_eager"), bag(*range(20))
    with torch.set_grad_enabled(training):
        stale = prefetch(collection, batch)
        change(collection)
        with pytest.raises((RuntimeError, ValueError), match=f"table 'user'.*{message}"):
            compiled(stale)
    # Between the lookup and its backward.
    if not training:
        return
    output = compiled(prefetch(collection, batch))
    change(collection)
    state = collection.state_dict()
    with pytest.raises(ValueError, match=r"between a lookup and its backward|a batch was looked up 6 batches ago"):
        output.sum().backward()
    assert_same_bits(collection.state_dict(), state)


@pytest.mark.usefixtures("dynamo")
def test_per_sample_weights_of_a_prefetched_batch_get_a_gradient_in_a_graph():
    """Of two lookups in one graph; the table is updated after both have got the gradient of their weights."""
    torch.manual_seed(4)
    collection = te.nn.EmbeddingBagCollection([config()], te.optim.Adagrad(lr=0.1))
    twin, results = copy.deepcopy(collection), list[Tensor]()

    def looked_up_twice(module: Any, first: Any, second: Any) -> Tensor:
        return module(first) * module(second)

    compiled = torch.compile(looked_up_twice, fullgraph=True, backend="aot_eager")
    for module, call in ((collection, compiled), (twin, looked_up_twice)):
        for trained in (True, False):
            module.requires_grad_(trained)
            weights = [torch.linspace(n, 2, 4, requires_grad=True) for n in range(2)]
            ids, lengths = torch.tensor([1, 2, 3, 1]), torch.tensor([2, 2])
            bags = [te.KeyedJaggedTensor(["user"], ids + n, w, lengths=lengths) for n, w in enumerate(weights)]
            call(module, *[prefetch(module, features) for features in bags]).sum().backward()
            results += [weight.grad for weight in weights]
    assert all(map(torch.equal, results[:4], results[4:]))
    assert_same_bits(collection.state_dict(), twin.state_dict())


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_model_finds_rows_before_its_graph():
    torch.manual_seed(4)
    collection = te.nn.EmbeddingBagCollection([config(), config("item")], te.optim.RowWiseAdagrad(lr=0.1))
    twin = copy.deepcopy(collection)
    called = torch.compile(collection, backend="aot_eager")
    for ids, _ in batches(3):
        assert torch.equal(step(called, ids), step(twin, ids))
    assert_same_bits(collection.state_dict(), twin.state_dict())


def bag(*ids: int) -> te.KeyedJaggedTensor:
    return te.KeyedJaggedTensor(["user"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))


def evicting(tier: str, capacity: int = 2) -> te.nn.EmbeddingBagCollection:
    return single(te.optim.SGD(lr=1.0), capacity=capacity, eviction=te.EvictionConfig(protect=1), **TIERS[tier])


def test_a_batch_prefetched_for_evaluation_reads_the_rows_of_its_ids(tier):
    """Other ids have got the rows that it was assigned."""
    collection = evicting(tier, capacity=3)
    step(collection, bag(1, 2))
    with torch.no_grad():
        early = prefetch(collection, bag(1, 2))
    for id in range(3, 7):
        step(collection, bag(id))
    with torch.no_grad():
        assert torch.equal(collection(early), collection(bag(1, 2)))
    assert table_of(collection).ids().tolist() == [4, 5, 6]


def test_a_backward_whose_rows_were_evicted_is_an_error(tier):
    collection = evicting(tier)
    losses, initial = [collection(bag(id)).sum() for id in range(4)], collection.state_dict()
    with pytest.raises(ValueError, match=r"'user': a batch was looked up 3 batches ago.*protect"):
        losses[0].backward()
    assert_same_bits(collection.state_dict(), initial)
    losses[3].backward()
    # As many lookups as there are rows for have a backward.
    collection = evicting(tier, capacity=30)
    sum(collection(bag(id)).sum() for id in range(12)).backward()
    table, ids = table_of(collection), torch.arange(12)
    torch.testing.assert_close(table.lookup(ids), table.initial_values(ids) - 1)


def test_a_prefetched_batch_finds_the_rows_of_a_state_dict_that_was_loaded(tier):
    """It is trained as if it was prefetched afterwards; a lookup before cannot have its backward."""
    mine, twin, source = (evicting(tier, capacity=9) for _ in range(3))
    step(source, bag(-3, -2, 1, 2))
    early, late, waiting = prefetch(mine, bag(1, 2)), prefetch(mine, bag(4, 2)), mine(bag(1, 2)).sum()
    for collection in (mine, twin):
        collection.load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match=r"'user'.*was loaded or reset between a lookup and its backward"):
        waiting.backward()
    assert_same_bits(mine.state_dict(), twin.state_dict())
    for features, expected in ((early, bag(1, 2)), (late, bag(4, 2))):
        assert torch.equal(step(mine, features), step(twin, expected))
    assert_same_bits(mine.state_dict(), twin.state_dict())


def test_a_prefetched_batch_gets_rows_of_a_table_that_was_reset():
    collection = evicting("device", capacity=9)
    early = prefetch(collection, bag(1, 2))
    collection.reset_parameters()
    step(collection, bag(50, 60))
    initial = table_of(collection).initial_values(torch.tensor([1, 2])).sum(0)
    assert torch.equal(step(collection, early)[0], initial)
    assert table_of(collection).ids().tolist() == [1, 2, 50, 60]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_lookup_counts_its_batch_once(tier, reentrant):
    """PyTorch repeats its forward in the backward."""

    def run(checkpointed: bool) -> dict[str, Tensor]:
        torch.manual_seed(3)
        collection = single(capacity=30, admission=te.AdmissionConfig(appearances=2), **TIERS[tier])

        def forward(features: Any, zero: Tensor) -> Tensor:
            return torch.tanh(collection(features) + zero)

        for id in range(6):
            inputs = bag(id, 2 * id, 100), torch.zeros(1, requires_grad=True)
            result = checkpoint(forward, *inputs, use_reentrant=reentrant) if checkpointed else forward(*inputs)
            result.sum().backward()
        return collection.state_dict()

    assert_same_bits(run(True), run(False))


@pytest.mark.parametrize(("capacity", "loaded_capacity"), [(40, 500), (500, 40), (40, 40)])
def test_a_table_of_another_capacity_has_the_occurrences_of_ids_without_rows(tier, capacity, loaded_capacity):
    admission, ids = te.AdmissionConfig(appearances=3), torch.arange(30) * 7919
    source, loaded = (
        te.nn.EmbeddingBagCollection([config(capacity=rows, admission=admission, **TIERS[tier])], te.optim.SGD(lr=0.1))
        for rows in (capacity, loaded_capacity)
    )
    for batch_ids in (ids, ids[:10]):
        source(bag(*batch_ids.tolist())).sum().backward()
    loaded.load_state_dict(source.state_dict())
    counts, expected = (table_of(collection).index.sketch.counts(ids) for collection in (loaded, source))
    assert (counts >= expected).all()
    assert counts.sum() <= expected.sum() + 3  # upper bounds: few ids share all of their cells
    loaded(bag(*ids[5:15].tolist())).sum().backward()
    assert {*ids[5:10].tolist()} <= {*table_of(loaded).ids().tolist()}
    state = source.state_dict()
    for name, value in (("sketch", torch.zeros(4, 48)), ("sketch", torch.zeros(3, 64)), ("added", torch.zeros(2))):
        with pytest.raises(RuntimeError, match=r"the shape of sketch must be \(4, 1 times a power of two\)"):
            loaded.load_state_dict(state | {f"user.{name}": value.int()})


def test_a_batch_without_room_changes_nothing(tier):
    tables = [config(capacity=9, **TIERS[tier]), config("item", capacity=4, features=["user"], **TIERS[tier])]
    collection = te.nn.EmbeddingBagCollection(tables, te.optim.SGD(lr=0.1))
    step(collection, bag(1, 2))
    initial = collection.state_dict()
    with pytest.raises(ValueError, match=r"'item'.*cannot insert 1 of 3 new ids.*capacity.*protect"):
        collection(bag(2, 3, 4, 5))
    assert_same_bits(collection.state_dict(), initial)
    step(collection, bag(2, 3, 4))
    assert table_of(collection, "item").ids().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("all_new", [True, False])
def test_rows_of_a_snapshot_without_room_change_nothing(tier, all_new):
    collection = te.nn.EmbeddingBagCollection([config(capacity=9, **TIERS[tier])], te.optim.SGD(lr=0.1))
    step(collection, bag(*range(9)))
    initial, saved = collection.state_dict(), table_of(collection).get_state()
    saved = {name: saved[name][:2] for name in ("weight", "step", "count")}
    with pytest.raises(ValueError, match=f"has no room for {1 + all_new} of {1 + all_new} new ids"):
        table_of(collection).load_row_state({"ids": torch.tensor([20, 30] if all_new else [3, 30]), **saved})
    assert_same_bits(collection.state_dict(), initial)


@pytest.mark.public
def test_the_least_recently_used_row_goes_and_comes_back_new():
    collection = single(te.optim.Adagrad(lr=0.5), capacity=3, eviction=te.EvictionConfig(protect=1))
    fresh = table_of(collection).lookup([1])
    for ids in ((1,), (2,), (3,), (2,), (4,)):
        step(collection, bag(*ids))
    assert table_of(collection).ids().tolist() == [2, 3, 4]
    assert torch.equal(table_of(collection).lookup([1]), fresh)
    step(collection, bag(2))
    step(collection, bag(1, 1))
    saved = table_of(collection).export()
    assert saved["ids"].tolist() == [1, 2, 4]
    assert (saved["step"].tolist(), saved["count"].tolist()) == ([7, 6, 5], [2, 3, 1])
    assert table_of(collection).statistics() == te.nn.DynamicStatistics(
        8, 2, 5, 0, 2, 3, 3, 3 * (12 * 4 + 12 * 4 + 16) + 32 * 5 + 4
    )


def test_rows_of_as_many_batches_as_are_protected_stay():
    def third_batch(protect: int) -> te.nn.EmbeddingBagCollection:
        collection = single(te.optim.SGD(), capacity=2, eviction=te.EvictionConfig(protect=protect))
        for id in (1, 2, 3):
            step(collection, bag(id))
        return collection

    assert table_of(third_batch(protect=1)).ids().tolist() == [2, 3]
    with pytest.raises(ValueError, match="rows of the last 2 batches are protected"):
        third_batch(protect=2)


def test_a_row_expires():
    collection = single(te.optim.SGD(lr=0.5), capacity=30, eviction=te.EvictionConfig(protect=1, ttl=2))
    for ids, left in (((1, 2), [1, 2]), ((2,), [1, 2]), ((3,), [1, 2, 3]), ((3,), [2, 3]), ((), [3])):
        step(collection, bag(*ids))
        assert table_of(collection).ids().tolist() == left


@pytest.mark.parametrize("admission", [te.AdmissionConfig(appearances=3), te.AdmissionConfig(probability=0.5)])
def test_an_id_that_is_not_admitted_reads_initial_values_and_gets_no_gradient(admission):
    collection = te.nn.EmbeddingBagCollection([config(admission=admission)], te.optim.SGD(lr=0.5))
    table, seen = table_of(collection), torch.arange(40)
    initial = table.initial_values(seen)
    features = te.KeyedJaggedTensor(["user"], seen, lengths=torch.ones_like(seen))
    for times in range(1, 5):
        out = step(collection, features)
        known = torch.isin(seen, table.ids())
        assert torch.equal(table.lookup(seen[~known]), initial[~known])
        assert torch.equal(out[~known], initial[~known])
        with torch.no_grad():
            assert torch.equal(collection(features), table.lookup(seen))
        if admission.appearances > 1:
            assert bool(known.all()) == bool(known.any()) == (times >= 3)
        else:
            assert 10 < int(known.sum()) < 30
    assert not torch.equal(table.lookup(seen[known]), initial[known])


def test_counts_for_admission_are_halved():
    collection = single(te.optim.SGD(), capacity=2, admission=te.AdmissionConfig(appearances=3))
    step(collection, bag(7, 7))
    step(collection, bag(*range(100, 132)))  # 8 for each cell of a row of 4
    step(collection, bag(7))
    assert table_of(collection).ids().tolist() == []  # a count of 2 was worth 1 by then
    step(collection, bag(7))
    assert table_of(collection).ids().tolist() == [7]


def test_a_shard_has_no_ids_of_other_shards():
    """Indices of kernels are those of its own partitions."""
    whole, ids = te.TableConfig("t", None, 4, capacity=40_000), torch.arange(10_000)
    parts = [whole.shard(f"t{first}", (first, count), (0, 4), ["t"]) for first, count in ((0, 1), (1, 3), (4, 3))]
    for part in parts:
        table = make_table(part, ())
        owned = table.index.owns(ids)
        table.insert(ids[owned], torch.ones(int(owned.sum()), 4))
        rows = table.index.find(ids)
        assert torch.equal(rows >= 0, owned)
        assert table.remove(ids[~owned]) == 0
        assert torch.equal(table.index.find(ids), rows)
        assert table.remove(ids) == owned.sum()


@pytest.mark.parametrize(
    ("name", "writer"), [("rows.npz", "numpy.savez"), ("rows.parquet", "pyarrow.parquet.write_table")]
)
def test_an_export_that_fails_leaves_the_file_before(name, writer, tmp_path, monkeypatch):
    def write(*arguments, **_):
        (file,) = (argument for argument in arguments if hasattr(argument, "write"))
        file.write(b"half")
        raise OSError(28, "No space left on device")

    table = table_of(te.nn.EmbeddingBagCollection([config(dim=3)], te.optim.SGD(lr=0.1)))
    table.insert([8], torch.ones(1, 3))
    table.export(tmp_path / name)
    saved = (tmp_path / name).read_bytes()
    monkeypatch.setattr(writer, write)
    with pytest.raises(OSError, match="No space left"):
        table.export(tmp_path / name)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: saved}


def test_insert_lookup_remove_and_export(tmp_path, tier):
    collection = te.nn.EmbeddingBagCollection([config(dim=3, **TIERS[tier])], te.optim.RowWiseAdagrad(lr=0.1))
    table = table_of(collection)
    step(collection, bag(5, 8))
    rows = torch.arange(9.0).view(3, 3)
    table.insert([8, -3, 2**40], rows, sum=torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(table.lookup([-3, 8, 2**40]), rows[[1, 0, 2]])
    assert table.ids().tolist() == [-3, 5, 8, 2**40]
    for path in (tmp_path / "rows.npz", tmp_path / "rows.parquet"):
        exported = table.export(path)
        assert exported["sum"][[0, 2, 3]].tolist() == [2.0, 1.0, 3.0]
    read = np.load(tmp_path / "rows.npz")
    assert all(np.array_equal(read[name], exported[name]) for name in exported)
    result = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "rows.parquet").to_pydict()
    assert result == {name: value.tolist() for name, value in exported.items()}
    assert table.remove([5, 5, 99]) == 1
    assert torch.equal(table.lookup([5]), table.initial_values(torch.tensor([5])))
    for message, call in (
        ("duplicate id 1", lambda: table.insert([1, 1], torch.zeros(2, 3))),
        ("shape", lambda: table.insert([1], torch.zeros(2, 3))),
        ("no state 'moment'", lambda: table.insert([1], torch.zeros(1, 3), moment=torch.zeros(1))),
        ("no room for 102", lambda: table.insert(torch.arange(300), torch.zeros(300, 3))),
        ("parquet", lambda: table.export(tmp_path / "rows.csv")),
        ("one dimension", lambda: table.lookup(torch.zeros(2, 2, dtype=torch.int64))),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert table.ids().tolist() == [-3, 8, 2**40]


def test_rows_that_are_inserted_again_are_not_evicted_for_others():
    collection = single(te.optim.SGD(), capacity=3, dim=1, eviction=te.EvictionConfig(protect=1))
    table = table_of(collection)
    for id in (1, 2, 3, 2, 2):
        step(collection, bag(id))
    table.insert([1, 7], torch.tensor([[10.0], [70.0]]))  # 1 was used longest ago
    assert table.ids().tolist() == [1, 2, 7]
    assert table.lookup([1, 7]).tolist() == [[10.0], [70.0]]


def test_forgotten_ids_are_not_admitted_sooner():
    collection = te.nn.EmbeddingBagCollection([config(admission=te.AdmissionConfig(appearances=2))], te.optim.SGD())
    step(collection, bag(5))
    collection.reset_parameters()
    step(collection, bag(5))
    assert table_of(collection).ids().tolist() == []


def test_values_follow_from_seed_and_id_and_not_from_the_capacity():
    torch.manual_seed(0)
    small = te.nn.EmbeddingBagCollection([config(capacity=10)], te.optim.SGD())
    torch.manual_seed(0)
    large = te.nn.EmbeddingBagCollection([config(capacity=9_000, init_bound=0.5)], te.optim.SGD())
    subset = table_of(small).lookup(IDS)
    assert torch.allclose(subset * 12**0.5 * 0.5, table_of(large).lookup(IDS), rtol=1e-6)  # one is rounded twice
    assert float(subset.abs().max()) <= 12**-0.5
    assert len(subset.unique()) > 0.99 * subset.numel()
    assert float(subset.std()) == pytest.approx(12**-0.5 / 3**0.5, rel=0.1)


def test_capacity_in_bytes():
    collection = single(te.optim.Adam(lr=0.1), capacity=None, dim=16, capacity_bytes=1_000_000)
    table = table_of(collection)
    tensors = table.index.tensors
    index = sum(part.nbytes for part in tensors) - tensors.digests.nbytes // 2 * 5  # but overflow slots
    used = sum(tensor.nbytes for tensor in (table.weight, *table.buffers())) + index
    assert 0.97e6 < used < 1.01e6  # rounded up to whole partitions
    whole = make_index(1_000_000)
    overflow_slots = whole.rows.numel() - whole.overflowed.numel() * WAYS
    assert (sum(part.nbytes for part in whole) - 5 * overflow_slots) // len(whole.ids) == INDEX_BYTES


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (config, {"capacity": None}, "either capacity"),
        (config, {"capacity_bytes": 5}, "either capacity"),
        (config, {"capacity": 0}, "at least 1"),
        (config, {"init": torch.zero_}, "init"),
        (config, {"init_bound": -1.0}, "init_bound"),
        (config, {"dtype": torch.float8_e5m2}, "the dtype of a dynamic table"),
        (partial(te.TableConfig, "user", 10, 4), {"capacity": 5}, "num_embeddings=None"),
        (partial(te.TableConfig, "user", 10, 4), {"eviction": te.EvictionConfig(protect=2)}, "num_embeddings=None"),
        (partial(te.TableConfig, "user", 10, 4), {"admission": te.AdmissionConfig(0.5)}, "num_embeddings=None"),
        (te.EvictionConfig, {"policy": "fifo"}, "policy"),
        (te.EvictionConfig, {"protect": 0}, "protect"),
        (te.EvictionConfig, {"ttl": 8}, "more than protect"),
        (te.AdmissionConfig, {"probability": 0.0}, "probability"),
        (te.AdmissionConfig, {"appearances": 0}, "appearances"),
    ],
)
def test_options_that_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_what_dynamic_tables_cannot_do_is_said():
    dynamic = config()
    plain = te.nn.EmbeddingBagCollection([dynamic])
    with pytest.raises(ValueError, match="only a fused optimizer can train"):
        plain(bag(1))
    with torch.no_grad():
        assert torch.equal(plain(bag(1)), table_of(plain).lookup([1]))
    fused = te.nn.EmbeddingBagCollection([dynamic], te.optim.SGD())
    with torch.no_grad():
        groups = fused.group(bag(1))
    with pytest.raises(ValueError, match="prefetched under no_grad"):
        fused(bag(1), groups)


def test_a_state_dict_that_does_not_fit_changes_nothing():
    collection = te.nn.EmbeddingBagCollection([config(capacity=9)], te.optim.SGD(lr=0.1))
    step(collection, bag(1, 2))
    initial = collection.state_dict()
    large = te.nn.EmbeddingBagCollection([config(capacity=30)], te.optim.SGD(lr=0.1))
    step(large, bag(*range(20)))
    for change, message in (
        (large.state_dict(), "20 rows.*room for 9"),
        ({**initial, "user.weight": torch.zeros(2, 5)}, "weight must have shape"),
        ({**initial, "user.ids": torch.tensor([1, 1])}, "duplicate id 1"),
        ({key: value for key, value in initial.items() if key != "user.clock"}, "user.clock"),
    ):
        with pytest.raises(RuntimeError, match=message):
            collection.load_state_dict(change)
        assert_same_bits(collection.state_dict(), initial)


@pytest.mark.more
def test_a_large_stream_is_the_same_on_any_number_of_threads():
    def run(num_threads: int) -> dict[str, Tensor]:
        torch.manual_seed(5)
        torch.set_num_threads(num_threads)
        collection = te.nn.EmbeddingBagCollection([config(capacity=60_000, dim=4)], te.optim.RowWiseAdagrad(lr=0.1))
        generator = torch.Generator().manual_seed(6)
        for _ in range(40):
            ids = torch.randint(2**62, (4_000,), generator=generator) ** 2
            step(collection, te.KeyedJaggedTensor(["user"], ids, lengths=torch.full((100,), 40)))
        assert table_of(collection).statistics().evictions > 50_000
        return collection.state_dict()

    assert_same_bits(run(2), run(1))


@pytest.mark.parametrize("placement", ["device", "host", "disk"])
def test_the_state_of_a_table_on_the_meta_device_is_empty(placement):
    collection = te.nn.EmbeddingBagCollection([config(placement=placement)], te.optim.Adam(), device="meta")
    assert collection.state_dict()["user.weight"].shape == (0, 12)
    assert table_of(collection).ids().tolist() == []


def test_streams_wait_where_a_row_changes_its_id(monkeypatch):
    """Without a GPU: what each stream is given, and what it waits for, in that order."""

    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.given = name, 0

        def record_event(self) -> tuple[str, int]:
            self.given += 1
            done.append((self.name, "records", self.given))
            return self.name, self.given

        def wait_event(self, event: tuple[str, int]) -> None:
            done.append((self.name, "waits for", *event))

    done, training, prefetching = list[Any](), Stream("training"), Stream("prefetching")
    current = [training]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    collection = single(capacity=2, eviction=te.EvictionConfig(protect=1))
    collection.table_set.lock.device = torch.device("cuda")
    call = index_module.kernel
    for module in (index_module, table_module):
        monkeypatch.setattr(module, "kernel", lambda op, *on: (done.append((current[0].name, op)), call(op, *on))[1])
    batch, evicting = (prefetch(collection, bag(*ids)) for ids in ((1, 2), ()))
    done.clear()
    step(collection, batch)  # waits for the prefetches; records its update
    assert done == [("training", "waits for", "training", 2), ("training", "records", 3)]
    step(collection, evicting)
    done.clear()
    current[0] = prefetching
    batch = prefetch(collection, bag(3))  # which gets the row of 1
    behind = [("prefetching", "waits for", "training", number) for number in (2, 4)]  # prefetches, and the last update
    assert done[:2] == behind
    assert done[-2:] == [("prefetching", "initialize_rows_"), ("prefetching", "records", 1)]
    assert table_of(collection).ids().tolist() == [2, 3]
    done.clear()
    current[0] = training
    step(collection, batch)
    assert done[0] == ("training", "waits for", "prefetching", 2)  # behind `ids`
    assert done[-1] == ("training", "records", 5)
    table_of(collection).remove([2])  # its row is free, for whichever stream comes next
    assert done[-1] == ("training", "records", 6)
    done.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    table_of(collection).remove([3])
    assert done == [("training", "dynamic_remove_")]  # a graph must not wait for what is outside it


class Launches(TorchFunctionMode):
    """Counts what a GPU would launch, and what the host would wait for: PyTorch's functions, and kernels by name."""

    NO_LAUNCH = (
        "__get__ view narrow split unbind data_ptr numel stride size dim element_size is_contiguous contiguous long "
        "numpy empty empty_like new_empty __len__ is_inference detach _version _set_grad_enabled __getitem__ tensor"
    )
    WAITS = "tolist item __int__ __bool__ __index__ nonzero unique is_nonzero equal cpu masked_select"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.launched, self.waits, launch = list[str](), list[str](), triton_utils.launch

        def count(kernel: Any, *args: Any, **options: Any) -> None:
            self.launched.append(kernel.__name__)
            with torch._C.DisableTorchFunction():
                launch(kernel, *args, **options)

        for module in (dynamic_index, random):
            monkeypatch.setattr(module, "launch", count)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if name in self.WAITS.split():
            self.waits.append(name)
        elif name == "__getitem__" and any(isinstance(part, Tensor) for part in args[1:]):
            self.launched.append("index")
        elif name not in self.NO_LAUNCH.split():
            self.launched.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.triton
@pytest.mark.parametrize("num_tables", [1, 5])
@pytest.mark.parametrize("known", [True, False])
def test_any_number_of_tables_takes_as_many_launches_and_one_wait(monkeypatch, device, num_tables, known):
    """All of a batch's part in the index: ids found, new ones inserted and initialized, rows written over them."""
    tables = [config(f"t{number}", dim=4 * number + 4) for number in range(num_tables)]
    collection = te.nn.EmbeddingBagCollection(tables, te.optim.RowWiseAdagrad(lr=0.1), device)
    of_tables, ids = list(collection.table_set.dynamic.values()), torch.arange(8 * num_tables, device=device)
    bounds, keys = 8 * torch.arange(num_tables + 1, device=device), range(num_tables)
    with use_kernels("triton"):
        for _ in range(2):  # addresses are uploaded once
            index_module.insert_batch(of_tables, ids, bounds, keys)
        batch = ids if known else ids - 1000
        with Launches(monkeypatch) as counted:
            rows, _, _ = index_module.insert_batch(of_tables, batch, bounds, keys)
    assert counted.waits == ["tolist"]
    assert len(counted.launched) == (10 if known else 12), counted.launched
    assert torch.equal(rows, index_module.find_batch(of_tables, *index_module.concat_ids(batch.split(8))))
    assert bool((rows >= 0).all())


def test_a_partial_state_loads_its_rows(tier):
    """Missing states are zero, an id has one use, in the last step, and no id without a row has been seen."""

    def make(optimizer: te.optim.Optimizer, **options: Any) -> Any:
        return single(optimizer, capacity=400, dim=8, **options, **TIERS[tier])

    source = make(te.optim.SGD(lr=0.1))
    for features, _ in batches(3, ["user"]):
        step(source, features)
    state = source.state_dict()
    last = state["user.step"].max()
    admission = te.AdmissionConfig(appearances=2)
    for missing in (set(), {"count"}, {"step"}, {"step", "clock", "seed"}, {"clock"}):
        loaded = make(te.optim.Adam(), admission=admission, fallback_rows=4)
        absent = {f"user.{name}" for name in missing}
        partial_state = {name: value for name, value in state.items() if name not in absent}
        result = loaded.load_state_dict(partial_state, strict=False)
        absent |= {"user.exp_avg", "user.exp_avg_sq", "user.sketch", "user.added"}
        assert set(result.missing_keys) == absent
        actual = loaded.state_dict()
        assert all(torch.equal(actual[name], value) for name, value in partial_state.items())
        assert not any(actual[f"user.{name}"].any() for name in ("exp_avg", "exp_avg_sq", "sketch", "added"))
        assert (actual["user.count"] == (1 if "count" in missing else state["user.count"])).all()
        assert "step" not in missing or (actual["user.step"] == actual["user.clock"]).all()
        assert actual["user.clock"] == (0 if {"step", "clock"} <= missing else last)
        for features, _ in batches(1, ["user"], seed=3):
            step(loaded, features)
    # Without ids or weights there are no rows.
    for name in ("ids", "weight"):
        before = loaded.state_dict()
        result = loaded.load_state_dict({k: v for k, v in state.items() if k != f"user.{name}"}, strict=False)
        assert {key for key in before if key.startswith("user.") and "fallback" not in key} == {*result.missing_keys}
        assert_same_bits({**loaded.state_dict(), "step": before["step"]}, before)
    # A module.
    module = te.nn.Embedding(None, 8, capacity=400, optimizer=te.optim.Adam())
    result = module.load_state_dict({"ids": state["user.ids"], "weight": state["user.weight"]}, strict=False)
    assert {"exp_avg", "exp_avg_sq", "step", "count", "clock", "seed", "updates"} == {*result.missing_keys}
    assert torch.equal(module.table.ids(), state["user.ids"])


@pytest.mark.parametrize("ids", [[3.0, 1.7], torch.tensor([3.0, float("nan")]), torch.tensor([True, False])])
def test_ids_are_integers(ids):
    table = table_of(single())
    for call in (table.lookup, table.remove, lambda ids: table.insert(ids, torch.zeros(2, 12))):
        with pytest.raises(TypeError, match="ids must be integers, got torch"):
            call(ids)
    assert table.num_rows == 0
    assert table.lookup([]).shape == (0, 12)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("step", lambda values: values[:-1], r"step must be int64 of shape \[3\], got torch.int64 of shape \[2\]"),
        ("count", lambda values: values.repeat(2), r"count must be int64 of shape \[3\], .* shape \[6\]"),
        ("ids", lambda values: values.double() + 0.5, r"ids must be int64 of shape \[3\], got torch.float64"),
        ("step", lambda values: values - 5, r"step must lie in \[0, 2\^31\), got -4"),
        ("step", lambda values: values + 2**32, r"step must lie in \[0, 2\^31\), got 4294967297"),
        ("count", lambda values: -values, r"count must lie in \[0, 2\^63\), got -1"),
    ],
)
def test_a_state_of_other_ids_or_uses_is_refused_before_rows_are_lost(tier, name, change, message):
    collection = single(**TIERS[tier])
    step(collection, bag(5, 7, 9))
    state = {key: value.clone() for key, value in collection.state_dict().items()}
    with pytest.raises(RuntimeError, match=message):
        collection.load_state_dict({**state, f"user.{name}": change(state[f"user.{name}"])})
    assert_same_bits(collection.state_dict(), state)
