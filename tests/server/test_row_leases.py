"""Rows that a trainer has, with their states, while it uses them: staleness 0."""

from __future__ import annotations

import pytest
import torch

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.server.jobs import KEYS, batches, local_servers, make, same, train, train_on
from tritonemb.layout import partitions_of
from tritonemb.server import Servers, flush
from tritonemb.server.node import HANDLERS
from tritonemb.server.spec import CollectionSpec, TableSpec, describe_optimizer
from tritonemb.server.transport import LocalTransport

OF_IDS = {"capacity": 90, "eviction": te.EvictionConfig("lfu", protect=4, ttl=6, half_life=3)}
ADMITTED = OF_IDS | {"admission": te.AdmissionConfig(appearances=2)}
SHARING = ADMITTED | {"fallback_rows": 7}


def alone(steps: int, **how):
    model = make(None, **how)
    return [train(model, steps)], model.state_dict()


@pytest.mark.parametrize("cache", [1, 64, None])
@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("dynamic", [None, OF_IDS, ADMITTED, SHARING], ids=["static", "dynamic", "admitted", "sharing"])
@pytest.mark.few(4)
def test_bits_are_those_of_one_process(cache, ahead, dynamic):
    """Whatever the cache's size, and how far batches are prefetched."""
    expected = alone(16, dynamic=dynamic)
    same(train_on(3, 16, ahead=ahead, dynamic=dynamic, cache=cache), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.few(1)
def test_rows_of_16_bits_are_rounded_alike(dtype):
    def run(servers: Servers | None) -> dict[str, torch.Tensor]:
        place = {} if servers is None else {"placement": "server", "cache": te.CacheConfig(rows=32)}
        torch.manual_seed(1)
        tables = [
            te.TableConfig("a", 300, 5, features=["a", "c"], dtype=dtype, **place),
            te.TableConfig("d", None, 6, features=["b"], dtype=dtype, **OF_IDS, **place),
        ]
        model = te.nn.EmbeddingBagCollection(tables, te.optim.Adam(lr=0.1))
        if servers is not None:
            te.server.attach(model, servers)
        train(model, 12)
        return model.state_dict()

    with local_servers(2) as servers:
        assert_same_bits(run(servers), run(None))


def of_one_width(servers: Servers | None, number: int) -> te.nn.EmbeddingBagCollection:
    """Static tables that stand side by side, with dynamic ones between them, and a wider one."""
    place = {} if servers is None else {"placement": "server", "cache": te.CacheConfig(rows=4)}
    torch.manual_seed(1)
    sizes = [(300, 4), (None, 4), (None, 4), (200, 4), (300, 4), (300, 5), (300, 4)][:number]
    tables = [
        te.TableConfig(f"t{n}", rows, dim, features=["abc"[n % 3]], **(OF_IDS if rows is None else {}), **place)
        for n, (rows, dim) in enumerate(sizes)
    ]
    model = te.nn.EmbeddingBagCollection(tables, te.optim.RowWiseAdagrad(lr=0.1))
    if servers is not None:
        te.server.attach(model, servers)
    return model


@pytest.mark.parametrize("number", [1, 2, 3])
def test_tables_of_one_width_have_the_bits_of_one_process(number):
    def run(servers: Servers | None) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model = of_one_width(servers, 7)
        return train(model, 12, ahead=2, most=200), model.state_dict()

    outputs, state = run(None)
    with local_servers(number) as servers:
        result = run(servers)
        same(([result[0]], result[1]), ([outputs], state))


def test_records_in_a_log_of_an_earlier_version_have_a_tensor_per_table():
    keys, replies = torch.tensor([3, 5, 0, 1, 7, 9, 5, 0, 7, 9]), []
    with local_servers(2) as servers:
        for server, by_table in zip(servers._local_servers, (True, False), strict=True):
            with Servers([LocalTransport(server)]) as one:
                of_one_width(one, 5)
            served, sizes = server.collections["tables"], [[3, 2], [4, 4], [3, 1], [4, 3]]
            records = torch.arange(6 * 20).float().view(6, 20)[:, :5].contiguous().view(torch.uint8)
            written = {"sizes": sizes} if by_table else {"sizes": sizes, "writes": 2}
            tensors = [records[:2], records[2:]] if by_table else [records]
            replies += [HANDLERS["transfer"](served, written, [keys, *tensors], print)[1]]
            for wrong in ([[3, 3], [4, 4], [3, 3]], [[4, 2], [3, 4], [3, 1], [4, 3]], [[3, 1], [4, 5], [3, 1], [4, 3]]):
                with pytest.raises(ValueError, match=r"do not have these rows|records must be"):
                    HANDLERS["transfer"](served, {"sizes": wrong, "writes": 2}, [keys, records], print)
    assert all(torch.equal(*pair) for pair in zip(*replies, strict=True))
    assert torch.equal(replies[0][0][:1, :16].view(torch.float32), torch.tensor([[20.0, 21.0, 22.0, 23.0]]))


def test_micro_batches_have_the_bits_of_one_process():
    def run(model) -> dict[str, torch.Tensor]:
        for _ in range(3):
            with model.accumulate():
                for batch in batches(2):
                    model(batch).square().sum().backward()
        return model.state_dict()

    with local_servers(2) as servers:
        assert_same_bits(run(make(servers, accumulate=2, dynamic=OF_IDS)), run(make(None, dynamic=OF_IDS)))


def test_ids_without_rows_read_as_initial_values():
    with local_servers(2) as servers:
        models = [make(servers, dynamic=ADMITTED), make(None, dynamic=ADMITTED)]
        for model in models:
            train(model, 12)
        with torch.no_grad():
            actual, expected = (model(batch) for model, batch in zip(models, [*batches(1, 5)] * 2, strict=True))
        assert torch.equal(actual, expected)
        statistics = [model["d"].statistics() for model in models]
        assert statistics[0].refused == statistics[1].refused > 0
        assert statistics[0].evictions == statistics[1].evictions > 0
        assert_same_bits(models[0].state_dict(), models[1].state_dict())


def test_rows_are_sent_once_while_the_cache_has_them():
    with local_servers(1) as servers:
        model = make(servers, cache=10_000)
        assert not model.table_set.service.caches  # its rows would be a second copy
        (batch,) = batches(1)
        for _ in range(3):
            model(batch).sum().backward()
        read = model.cache_statistics()["b"].read
        model(batch).sum().backward()
        assert model.cache_statistics()["b"].read == read > 0
        assert servers.statistics()[0]["collections"]["tables"]["tables"]["b"]["rows"] == 0
        flush(model)
        assert servers.statistics()[0]["collections"]["tables"]["tables"]["b"]["rows"] > 0


@pytest.mark.parametrize("servers", [1, 2])
def test_a_batch_that_finds_no_room_changes_nothing(servers):
    """Or, where another server has given rows by then, nothing is trained after it."""
    many = torch.arange(40_000)
    one, other = (many[partitions_of(many, 2) == partition] for partition in range(2))
    too_many = te.KeyedJaggedTensor(KEYS, torch.cat([one[:6_000], other[:10]]), lengths=torch.tensor([6_010, 0, 0]))
    tables = [te.TableConfig("d", None, 4, features=["a"], capacity=8_192, placement="server")]
    with local_servers(servers) as subset:
        model = te.nn.EmbeddingBagCollection(tables, te.optim.SGD(lr=0.1))
        te.server.attach(model, subset)
        train(model, 2)
        initial = model.state_dict()
        with pytest.raises(ValueError, match=r"'d': cannot insert 1,\d\d\d of [56],\d\d\d new ids of a batch"):
            model(too_many)
        if servers == 1:
            assert_same_bits(model.state_dict(), initial)
            train(model, 1)
        else:
            with pytest.raises(RuntimeError, match="another server was full"):
                train(model, 1)
            model.load_state_dict(initial)
            train(model, 1)


def test_a_model_with_leased_rows_is_one_graph(dynamo):
    with local_servers(2) as servers:
        models = [make(servers), make(None)]
        compiled = [torch.compile(models[0], fullgraph=True, backend="aot_eager"), models[1]]
        for batch in batches(4):
            results = []
            for model, call in zip(models, compiled, strict=True):
                output = call(te.nn.prefetch(model, batch))
                output.square().sum().backward()
                results.append(output.detach())
            assert torch.equal(*results)
        assert_same_bits(models[0].state_dict(), models[1].state_dict())


def test_rows_of_a_batch_that_is_in_flight_are_not_replaced():
    with local_servers(1) as servers:
        model = make(servers)
        state = model.state_dict()
        output = model(next(batches(1)))
        with pytest.raises(RuntimeError, match="a batch has pinned rows of table 'a'"):
            model.load_state_dict(state)
        output.sum().backward()
        model.load_state_dict(state)
        assert_same_bits(model.state_dict(), state)


def test_a_server_owns_the_ids_that_are_routed_to_it():
    names, num_rows = "abc", 100_000
    configs = [
        te.TableConfig(n, None if n == "b" else num_rows, 4, capacity=num_rows if n == "b" else None) for n in names
    ]
    sgd = te.optim.SGD(lr=0.1)
    tables, optimizer = tuple(TableSpec.from_config(c, 0, sgd) for c in configs), describe_optimizer(sgd)
    starts = tuple((0, table.num_partitions // 2) for table in tables)
    shards = (None, None, (1_000, 3_000))  # rows 1,000 to 3,999
    spec = CollectionSpec(tables, optimizer, 1, 0, True, 1, starts, shards, "fp32", "fp32")
    sizes = [955, 600, 3_200]
    ids = torch.cat([torch.arange(-5, 950), torch.arange(-300, 300), torch.arange(900, 4_100)])
    for numbers in (None, [0, 1, 2], [0, 2, 1]):
        routes, counts = spec.route(ids, sizes, numbers)
        assert 0 < sum(map(len, routes)) < len(ids)
        for server, (positions, count) in enumerate(zip(routes, counts, strict=True)):
            assert spec.owns(server, ids[positions], count, numbers)
            assert not spec.owns(1 - server, ids[positions], count, numbers)
            outside = ids[positions].index_fill_(0, torch.tensor(count[0] - 1), -1)
            assert not spec.owns(server, outside, count, numbers)
