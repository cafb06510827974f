"""Dynamic tables on several ranks: the ids, steps, counts and rows of one process with all samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tritonemb as te
from tests.helpers import assert_same_bits
from tritonemb import layout
from tritonemb.sharding import ExchangePrecision, RowWise, ShardingPlan, TableRowWise, TableWise
from tritonemb.sharding.sharded_tensor import TableShards
from tritonemb.training.checkpoint import CheckpointFolder, stored_tensors
from tritonemb.training.checkpoint.manager import load_model
from tritonemb.training.train_state import model_tensors

BATCH, STEPS = 12, 9  # samples of all ranks
EXACT = ExchangePrecision("fp32", "fp32")


def model() -> te.nn.DLRM:
    torch.manual_seed(3)
    evict = te.EvictionConfig("lfu", protect=1, half_life=3)
    tables = [
        te.TableConfig("user", None, 8, capacity=48, eviction=evict),
        te.TableConfig(
            "item", None, 8, features=["user", "item"], capacity=90, admission=te.AdmissionConfig(appearances=2)
        ),
        te.TableConfig("city", None, 8, capacity=500, eviction=te.EvictionConfig(protect=1, ttl=3)),
        te.TableConfig("static", 10, 8),
    ]
    return te.nn.DLRM(tables, 4, (8,), (8,), te.optim.RowWiseAdagrad(lr=0.1))


def plan(world: int) -> ShardingPlan:
    node = TableRowWise(0) if world < 4 else TableRowWise(1)
    tables = {"user": RowWise(), "item": TableWise(world - 1), "city": node, "static": TableWise(0)}
    return ShardingPlan(tables, world, min(2, world))


def batch(step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, te.KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(step)
    dense = torch.randn(BATCH, 4, generator=generator)
    ids = torch.randint(40, (4, BATCH), generator=generator) * 7**20 * (-1) ** step - 2**62 * (step % 2)
    ids[3] = torch.randint(10, (BATCH,), generator=generator)
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    values = ids[:, mine].flatten()
    return dense[mine], te.KeyedJaggedTensor(
        ["user", "item", "city", "static"], values, lengths=torch.ones_like(values)
    )


def train(model: Any, steps: range, rank: int = 0, world: int = 1) -> None:
    for step in steps:
        dense, sparse = batch(step, rank, world)
        model(dense, sparse).mean().backward()


def contents(model: Any) -> dict[str, Tensor]:
    """Of dynamic tables, by id: whole, on each rank."""
    state, found = model.state_dict(), {}
    group = getattr(model, "group", None)
    for name, value in state.items():
        if name.startswith("embeddings.") and not name.startswith("embeddings.static"):
            found[name] = value.gather(group) if isinstance(value, TableShards) else value
    for table in ("user", "item", "city"):
        order = found[f"embeddings.{table}.ids"].argsort()
        for name in ("ids", "weight", "sum", "step", "count"):
            found[f"embeddings.{table}.{name}"] = found[f"embeddings.{table}.{name}"][order]
    return {name: value for name, value in found.items() if name != "embeddings.step"}


def small_partitions() -> Any:
    return mock.patch.object(layout, "LEAST_ROWS", 16)


def rows_on_ranks(rank: int, world: int, folder: Path) -> None:
    with small_partitions():
        whole, sharded = (
            model(),
            te.HybridParallel(model(), plan(world), exchange=EXACT, local_world_size=min(2, world)),
        )
        begun = contents(whole)
        train(whole, range(STEPS))
        train(sharded, range(STEPS), rank, world)
        generator = torch.get_rng_state()
        found, expected = contents(sharded), contents(whole)
        assert torch.equal(generator, torch.get_rng_state())
        assert found.keys() == expected.keys()
        for name, value in found.items():
            if name.endswith((".weight", ".sum")):
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)  # of the dense layers' sums
            else:
                assert torch.equal(value, expected[name]), name
        assert begun["embeddings.user.seed"] == found["embeddings.user.seed"]
        assert whole.embeddings["user"].statistics().evictions > 0
        assert whole.embeddings["city"].statistics().evictions > 0
        assert whole.embeddings["item"].statistics().refused > 0

        # What is saved is loaded on this number of ranks, and by one process.
        group = sharded.group
        CheckpointFolder(folder).save(1, model_tensors(sharded), {}, group)
        stored = stored_tensors(folder / "step-1", group)
        again = te.HybridParallel(model(), plan(world), exchange=EXACT, local_world_size=min(2, world))
        load_model(folder / "step-1", again, {}, stored, (), group)
        assert_same_bits(contents(again), found)
        alone = model()
        load_model(folder / "step-1", alone, {}, stored, ())
        assert_same_bits(contents(alone), found)
        # A state dict of its own, and one of whole tensors.
        train(again, range(STEPS, STEPS + 2), rank, world)
        later = contents(again)
        train(sharded, range(STEPS, STEPS + 2), rank, world)
        assert_same_bits(contents(sharded), later)
        sharded.load_state_dict(alone.state_dict())
        assert_same_bits(contents(sharded), found)
        again.load_state_dict(sharded.state_dict())
        assert_same_bits(contents(again), found)


def rows_of_one_rank_alone(rank: int, world: int) -> None:
    def made(sharding: Any) -> te.HybridParallel:
        table = te.TableConfig("user", None, 4, capacity=40)
        collection = te.nn.EmbeddingBagCollection([table], te.optim.SGD(lr=0.1))
        return te.HybridParallel(collection, ShardingPlan({"user": sharding}, world, world), exchange=EXACT)

    with small_partitions():
        by_rows, other, whole = made(RowWise()), made(RowWise()), made(TableWise(0))
        ids = torch.tensor([5])  # one row, so other ranks have none
        by_rows(te.KeyedJaggedTensor(["user"], ids, lengths=torch.ones_like(ids))).sum().backward()
        other.load_state_dict(by_rows.state_dict())
        assert other.state_dict()["user.ids"].gather(other.group).tolist() == [5]
        ids = torch.arange(30)
        by_rows(te.KeyedJaggedTensor(["user"], ids, lengths=torch.ones_like(ids))).sum().backward()
        with pytest.raises(RuntimeError, match="of another plan"):
            whole.load_state_dict(by_rows.state_dict())
        assert whole.state_dict()["user.ids"].numel() == 0


def test_a_rank_without_rows_and_shards_of_another_plan(ranks):
    ranks(2).run(rows_of_one_rank_alone, 2)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.few(1)
def test_rows_are_those_of_one_process(ranks, world, tmp_path):
    ranks(world).run(rows_on_ranks, world, tmp_path)


def test_one_rank_is_the_model_itself():
    with small_partitions():
        alone, hybrid = model(), te.HybridParallel(model())
        train(alone, range(STEPS))
        train(hybrid, range(STEPS))
        assert_same_bits(contents(hybrid), contents(alone))


@pytest.mark.parametrize(
    ("sharding", "message"),
    [(te.sharding.ColumnWise(), "sharded by rows"), (te.sharding.DataParallel(), "not replicated")],
)
def test_shardings_that_are_refused(sharding, message):
    table = te.TableConfig("user", None, 16, capacity=100)
    with pytest.raises(ValueError, match=message):
        sharding.shards(table, 2, 2)
    with pytest.raises(ValueError, match="capacity in rows"):
        RowWise().shards(te.TableConfig("user", None, 16, capacity_bytes=100_000), 2, 2)
