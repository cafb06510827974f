"""Dynamic tables on several ranks: the ids, steps, counts and rows of one process with all samples."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.sharding.cases import EXACT
from tests.sharding.models import whole_state
from tritonemb import layout
from tritonemb.sharding import RowWise, ShardingPlan, TableRowWise, TableWise
from tritonemb.training.checkpoint import CheckpointFolder, stored_tensors
from tritonemb.training.checkpoint.manager import load_model
from tritonemb.training.train_state import model_tensors

BATCH, STEPS = 12, 9  # samples of all ranks
CITY = torch.bfloat16  # rounded by random numbers that follow from ids


class Sequences(nn.Module):
    """A number for each sample, of the rows of all its ids."""

    def __init__(self, tables: list[te.TableConfig], optimizer: Any) -> None:
        super().__init__()
        self.embeddings = te.nn.EmbeddingCollection(tables, optimizer)

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        rows = self.embeddings(sparse).values()
        return (rows.view(4, len(dense), -1).square().sum(2) * dense.T).sum(0)


def model(pooled: bool = True, max_gradient: float | None = None, placed: bool = False) -> Any:
    """With two of its tables `placed` in host memory and on disk."""
    torch.manual_seed(3)
    tiers: list[dict[str, Any]] = [{}, {}]
    if placed:
        tiers = [{"placement": tier, "cache": te.CacheConfig(rows=32)} for tier in ("host", "disk")]
    evict, twice = te.EvictionConfig("lfu", protect=1, half_life=3), te.AdmissionConfig(appearances=2)
    of_item = ["user", "item"] if pooled else ["item"]
    subset = te.AdmissionConfig(probability=0.9)
    # In one process gradients of ids that share a row are added in another order.
    options: list[dict[str, Any]] = (
        [{"admission": subset, "fallback_rows": 5}, {"fallback_rows": 6}] if pooled else [{}, {}]
    )
    tables = [
        te.TableConfig("user", None, 8, capacity=48, eviction=evict, **options[0], **tiers[0]),
        te.TableConfig("item", None, 8, of_item, capacity=90, admission=twice, **options[1], **tiers[1]),
        te.TableConfig("city", None, 8, capacity=500, dtype=CITY, eviction=te.EvictionConfig(protect=1, ttl=3)),
        te.TableConfig("static", 40, 8),
    ]
    optimizer = te.optim.RowWiseAdagrad(lr=0.1, max_gradient=max_gradient)
    return te.nn.DLRM(tables, 4, (8,), (8,), optimizer) if pooled else Sequences(tables, optimizer)


def plan(world: int) -> ShardingPlan:
    city = {1: TableRowWise(0), 2: RowWise([1, 0], [3, 17]), 4: TableRowWise(1)}[world]  # of 20 partitions
    tables = {"user": RowWise(), "item": TableWise(world - 1), "city": city, "static": RowWise()}
    return ShardingPlan(tables, world, min(2, world))


def parallel(world: int, *args: Any) -> te.HybridParallel:
    return te.HybridParallel(model(*args), plan(world), exchange=EXACT, local_world_size=min(2, world))


def batch(step: int, rank: int = 0, world: int = 1, number: int = 1) -> tuple[Tensor, te.KeyedJaggedTensor]:
    """A feature's single ids are distinct in each half of the samples; of several, many are the same."""
    generator = torch.Generator().manual_seed(step)
    dense = torch.randn(BATCH, 4, generator=generator)
    ids = torch.rand(4, 2, 40, generator=generator).argsort(2)[:, :, : BATCH // 2].reshape(4, BATCH, 1)
    if number > 1:
        ids = torch.randint(12, (4, BATCH, number), generator=generator)
    ids[:3] = ids[:3] * 7**20 * (-1) ** step - 2**62 * (step % 2)
    samples = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    values, lengths = ids[:, samples].flatten(), torch.full((4 * len(dense[samples]),), number)
    return dense[samples], te.KeyedJaggedTensor(["user", "item", "city", "static"], values, lengths=lengths)


def train(model: Any, steps: range, rank: int = 0, world: int = 1, number: int = 1) -> None:
    for step in steps:
        dense, sparse = batch(step, rank, world, number)
        model(dense, sparse).mean().backward()


def contents(model: Any) -> dict[str, Tensor]:
    """Full states of tables by id, on each rank."""
    state = {name: value for name, value in whole_state(model).items() if name.startswith("embeddings.")}
    for table in ("user", "item", "city"):
        order = state[f"embeddings.{table}.ids"].argsort()
        for name in ("ids", "weight", "sum", "step", "count"):
            state[f"embeddings.{table}.{name}"] = state[f"embeddings.{table}.{name}"][order]
    return {name: value for name, value in state.items() if name != "embeddings.step"}


def small_partitions() -> Any:
    return mock.patch.object(layout, "MIN_PARTITION_ROWS", 16)


def rows_on_ranks(rank: int, world: int, folder: Path, placed: bool) -> None:
    options = True, None, placed
    with small_partitions():
        whole, sharded = model(), parallel(world, *options)
        begun = contents(whole)
        train(whole, range(STEPS))
        train(sharded, range(STEPS), rank, world)
        generator = torch.get_rng_state()
        actual, expected = contents(sharded), contents(whole)
        assert torch.equal(generator, torch.get_rng_state())
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            if name.endswith(("weight", "sum")):
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)  # of the dense layers' sums
            else:
                assert torch.equal(value, expected[name]), name
        assert begun["embeddings.user.seed"] == actual["embeddings.user.seed"]
        assert whole.embeddings["user"].statistics().evictions > 0
        assert whole.embeddings["city"].statistics().evictions > 0
        assert whole.embeddings["item"].statistics().refused > 0
        assert len(whole.embeddings["user"].index.fallback_rows) > 5  # in several partitions

        # What is saved is loaded on this number of ranks, and by one process.
        group = sharded.group
        CheckpointFolder(folder).save(1, model_tensors(sharded), {}, group)
        stored = stored_tensors(folder / "step-1", group)
        again = parallel(world, *options)
        load_model(folder / "step-1", again, {}, stored, (), group)
        assert_same_bits(contents(again), actual)
        unsharded = model(*options)
        load_model(folder / "step-1", unsharded, {}, stored, ())
        assert_same_bits(contents(unsharded), actual)
        assert any(path.suffix == ".rows" for path in (folder / "step-1").iterdir()) == placed
        # A state dict of its own, and one of whole tensors.
        train(again, range(STEPS, STEPS + 2), rank, world)
        later = contents(again)
        train(sharded, range(STEPS, STEPS + 2), rank, world)
        assert_same_bits(contents(sharded), later)
        sharded.load_state_dict(unsharded.state_dict())
        assert_same_bits(contents(sharded), actual)
        again.load_state_dict(sharded.state_dict())
        assert_same_bits(contents(again), actual)


def sequences_on_ranks(rank: int, world: int, folder: Path, max_gradient: float | None = None) -> None:
    with small_partitions():
        whole, sharded = model(False, max_gradient), parallel(world, False, max_gradient)
        train(whole, range(5))
        train(sharded, range(5), rank, world)
        assert_same_bits(contents(sharded), contents(whole))
        train(whole, range(5, STEPS), number=4)
        train(sharded, range(5, STEPS), rank, world, number=4)
        actual, expected = contents(sharded), contents(whole)
        for name, value in actual.items():
            if name.endswith((".weight", ".sum")) and ".item." not in name:
                torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)  # sums of ranks are added
            else:
                assert torch.equal(value, expected[name]), name
        for table in ("user", "item", "city"):
            assert expected[f"embeddings.{table}.count"].max() > 4
        assert whole.embeddings["user"].statistics().evictions > 0
        assert whole.embeddings["item"].statistics().refused > 0
        statistics = [
            table.statistics().lookups for of in sharded.collections for _, table in of.local_shards.dynamic_tables()
        ]
        lookups = sharded.group.all_gather(torch.tensor([sum(statistics)]), "test")
        assert sum(map(int, lookups)) == 3 * BATCH * (5 + 4 * (STEPS - 5))

        # Ids that nobody knows.
        whole.load_state_dict(whole_state(sharded))
        with torch.no_grad():
            batches = [batch(77, *of, number=4)[1] for of in ((), (rank, world))]
            rows, sharded_rows = whole.embeddings(batches[0]).values(), sharded.module.embeddings(batches[1]).values()
            sharded_rows = sharded_rows.wait() if world > 1 else sharded_rows
            rows = rows.view(4, world, -1, 8)[:, rank].flatten(0, 1)
            assert torch.equal(sharded_rows, rows)
        CheckpointFolder(folder).save(1, model_tensors(sharded), {}, sharded.group)
        torch.save(actual, folder / f"expected-{rank}")


def sequences_are_loaded(rank: int, world: int, folder: Path) -> None:
    with small_partitions():
        sharded, expected = parallel(world, False), torch.load(folder / "expected-0")
        load_model(folder / "step-1", sharded, {}, stored_tensors(folder / "step-1", sharded.group), (), sharded.group)
        assert_same_bits(contents(sharded), expected)
        sharded.load_state_dict(sharded.state_dict())
        assert_same_bits(contents(sharded), expected)


def one_graph(rank: int, world: int, pooled: bool) -> None:
    def trained(ahead: bool, compiled: bool) -> dict[str, Tensor]:
        torch._dynamo.reset()
        sharded, waiting = parallel(world, pooled), []
        called = torch.compile(sharded, fullgraph=True, backend="aot_eager") if compiled else sharded
        for step in range(5):
            dense, sparse = batch(step, rank, world)
            waiting.append((dense, sharded.prefetch(sparse) if ahead else sparse))
            if len(waiting) > ahead:
                called(*waiting.pop(0)).mean().backward()
        for of_step in waiting:
            called(*of_step).mean().backward()
        dense, sparse = batch(77, rank, world)
        with torch.no_grad():
            read = called(dense, sharded.prefetch(sparse))
        torch._dynamo.reset()
        return contents(sharded) | {"read": read}

    with small_partitions():
        expected = trained(False, False)
        for compiled in (False, True):
            assert_same_bits(trained(True, compiled), expected)


def one_table(world: int, sharding: Any, optimizer: Any = None) -> te.HybridParallel:
    optimizer = optimizer or te.optim.SGD(lr=0.1)
    collection = te.nn.EmbeddingBagCollection([te.TableConfig("user", None, 4, capacity=40)], optimizer)
    return te.HybridParallel(collection, ShardingPlan({"user": sharding}, world, world), exchange=EXACT)


def train_ids(parallel: te.HybridParallel, ids: Tensor) -> None:
    parallel(te.KeyedJaggedTensor(["user"], ids, lengths=torch.ones_like(ids))).sum().backward()


def rows_of_one_rank_alone(rank: int, world: int) -> None:
    with small_partitions():
        by_rows, other, whole = (one_table(world, kind) for kind in (RowWise(), RowWise(), TableWise(0)))
        train_ids(by_rows, torch.tensor([5]))  # one row, so other ranks have none
        other.load_state_dict(by_rows.state_dict())
        assert other.state_dict()["user.ids"].gather(other.group).tolist() == [5]
        train_ids(by_rows, torch.arange(30))
        with pytest.raises(RuntimeError, match="of another plan"):
            whole.load_state_dict(by_rows.state_dict())
        assert whole.state_dict()["user.ids"].numel() == 0


def partial_states(rank: int, world: int) -> None:
    """A state of another optimizer: missing states are zero."""
    with small_partitions():
        source, loaded = one_table(world, RowWise()), one_table(world, RowWise(), te.optim.Adagrad(lr=0.1))
        train_ids(source, torch.arange(20))
        result = loaded.load_state_dict(source.state_dict(), strict=False)
        assert result.missing_keys == ["user.sum"]
        expected, actual = whole_state(source), whole_state(loaded)
        assert not actual.pop("user.sum").any()
        assert_same_bits(actual, expected)


class Beside(nn.Module):
    """A small dynamic table beside small ones of fixed size, in two collections."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [te.TableConfig("user", None, 4, capacity=40), te.TableConfig("city", 40, 4)]
        self.pooled = te.nn.EmbeddingBagCollection(tables, te.optim.SGD(lr=0.1))
        self.rows = te.nn.EmbeddingCollection(
            [te.TableConfig("item", None, 4, capacity=40), te.TableConfig("static", 40, 4)], te.optim.SGD(lr=0.1)
        )

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        rows = self.rows(sparse).values()
        return self.pooled(sparse).square().sum(1) + rows.view(4, len(dense), -1).square().sum((0, 2))


def without_a_plan(rank: int, world: int) -> None:
    whole, sharded = Beside(), te.HybridParallel(Beside(), exchange=EXACT)
    shardings = sharded.plan.tables
    assert isinstance(shardings["user"], RowWise | TableWise)
    assert isinstance(shardings["item"], RowWise | TableWise)
    for step in range(3):
        for hybrid, *part in ((whole, 0, 1), (sharded, rank, world)):
            dense, sparse = batch(step, *part)
            values = sparse.values().clone()
            values[len(dense) : 2 * len(dense)] %= 40  # of city
            sparse = te.KeyedJaggedTensor(["user", "city", "item", "static"], values, offsets=sparse.offsets())
            hybrid(dense, sparse).mean().backward()
    actual, expected = whole_state(sharded), whole.state_dict()
    for name in ("pooled.user", "rows.item"):
        order, expected_order = actual[f"{name}.ids"].argsort(), expected[f"{name}.ids"].argsort()
        assert torch.equal(actual[f"{name}.ids"][order], expected[f"{name}.ids"][expected_order])
        torch.testing.assert_close(actual[f"{name}.weight"][order], expected[f"{name}.weight"][expected_order])
    for name in ("pooled.city.weight", "rows.static.weight"):
        torch.testing.assert_close(actual[name], expected[name])


def test_small_dynamic_tables_have_one_row_an_id_without_a_plan_too(ranks):
    ranks(2).run(without_a_plan, 2)


def test_a_rank_without_rows_and_shards_of_another_plan(ranks):
    ranks(2).run(rows_of_one_rank_alone, 2)
    ranks(2).run(partial_states, 2)


@pytest.mark.parametrize(
    ("world", "placed"),
    [
        (2, False),
        *(pytest.param(world, True, marks=pytest.mark.more) for world in (2, 4)),
        pytest.param(4, False, marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_one_process(ranks, world, placed, tmp_path):
    ranks(world).run(rows_on_ranks, world, tmp_path, placed)


@pytest.mark.parametrize(("world", "loaded"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.more)])
def test_rows_of_sequences_are_those_of_one_process(ranks, world, loaded, tmp_path):
    ranks(world).run(sequences_on_ranks, world, tmp_path)
    if loaded == 1:
        sequences_are_loaded(0, 1, tmp_path)
    else:
        ranks(loaded).run(sequences_are_loaded, loaded, tmp_path)


def test_gradients_of_sequences_are_clamped_one_by_one(ranks, tmp_path):
    ranks(2).run(sequences_on_ranks, 2, tmp_path, 0.01)


@pytest.mark.more  # in `make test` it is a row of the table in tests/compiler/test_one_graph.py
@pytest.mark.parametrize("pooled", [True, False])
def test_prefetched_batches_are_one_graph_and_have_the_same_bits(ranks, pooled):
    ranks(2).run(one_graph, 2, pooled)


@pytest.mark.parametrize("pooled", [True, False])
def test_one_rank_is_the_model_itself(pooled):
    with small_partitions():
        plain, hybrid = model(pooled), te.HybridParallel(model(pooled))
        train(plain, range(STEPS))
        train(hybrid, range(STEPS))
        assert_same_bits(contents(hybrid), contents(plain))


@pytest.mark.parametrize(
    ("sharding", "message"),
    [(te.sharding.ColumnWise(), "row-wise sharded"), (te.sharding.DataParallel(), "not replicated")],
)
def test_shardings_that_are_refused(sharding, message):
    table = te.TableConfig("user", None, 16, capacity=100)
    with pytest.raises(ValueError, match=message):
        sharding.shards(table, 2, 2)
    with pytest.raises(ValueError, match="must be 2 positive sizes that add up to 1 partitions"):
        RowWise(rows=[50, 50]).shards(table, 2, 2)
    with pytest.raises(ValueError, match="capacity in rows"):
        RowWise().shards(te.TableConfig("user", None, 16, capacity_bytes=100_000), 2, 2)
