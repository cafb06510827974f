"""Several trainers without staleness: each holds the rows of its shards, and all have the bits of other tiers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("psutil")

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.sharding.models import whole_state
from tests.training import jobs
from tritonemb.server import EmbeddingServer, connect
from tritonemb.server.migration import rebalance
from tritonemb.server.transport import FlightServer, FlightTransport
from tritonemb.training.config import CheckpointOptions

DYNAMIC: dict[str, Any] = {
    "user": {"num_embeddings": None, "capacity": 20_000, "eviction": te.EvictionConfig(ttl=12)},
    "item": {
        "num_embeddings": None,
        "capacity": 260,
        "eviction": te.EvictionConfig("lfu", protect=6, half_life=5),
    },
}
EVERY = CheckpointOptions(checkpoint_steps=6, keep=9)
CHANGES = replace(EVERY, checkpoint_incremental=True)


def on_a_rank(
    rank: int, placement: str, where: tuple[list[str], int | None] | None, folder: Path | None, checkpoint: Path | None,
    **options: Any,
) -> Any:  # fmt: skip
    """What a rank was told, and all tables: small ones that are replicated, one by rows, dynamic ones by table."""
    record, data = jobs.Record(), jobs.planted()
    with ExitStack() as stack:
        on_servers = {}
        if where is not None:
            on_servers["servers"] = stack.enter_context(connect(where[0], token="secret", tablets=where[1]))
        torch.manual_seed(0)
        placed = {"placement": placement, "cache": te.CacheConfig(rows=40)}
        tables = [replace(table, **placed, **DYNAMIC.get(table.name, {})) for table in data.tables(8)]
        tables[-1] = replace(tables[-1], num_embeddings=30_000)  # too large to be replicated
        optimizer = te.optim.Adam(lr=0.01)
        model = te.nn.DLRM(tables, data.num_dense, bottom_mlp=(8,), top_mlp=(8,), optimizer=optimizer)
        # Every kind of sharding, and the same one in every tier.
        number, kinds = dist.get_world_size(), te.sharding
        by_name = {table.name: kinds.DataParallel() for table in tables} | {tables[-1].name: kinds.RowWise()}
        by_name |= {name: kinds.TableWise(index % number) for index, name in enumerate(DYNAMIC)}
        sharded = te.HybridParallel(model, kinds.ShardingPlan(by_name, number, number))
        trainer = te.Trainer(
            sharded, data, folder=folder, callbacks=[record], batch_size=25, log_every=4,
            verbose=False, evaluate_every=9, **on_servers, **options,
        )  # fmt: skip
        if checkpoint is not None:
            trainer.resume(checkpoint)
        trainer.fit()
        return record.losses, record.evaluations, whole_state(trainer.model)


def run(
    ranks, number: int, servers: int, folder: Path | None = None, checkpoint: Path | None = None,
    tablets: int | None = None, **options: Any,
):  # fmt: skip
    placement = "server" if servers else "host"
    with ExitStack() as stack:
        started = [stack.enter_context(EmbeddingServer(f"server-{index}")) for index in range(servers)]
        served = [stack.enter_context(FlightServer(server, token="secret")) for server in started]
        addresses = [server.address for server in served]
        if tablets is not None:
            stack.enter_context(moving(started, addresses))
        where = (addresses, tablets) if servers else None
        result = ranks(number).run(partial(on_a_rank, **options), placement, where, folder, checkpoint)
    for losses, evaluations, state in result[1:]:
        assert (losses, evaluations) == result[0][:2]
        assert_same_bits(state, result[0][2])
    return result[0]


@contextmanager
def moving(servers: list[EmbeddingServer], addresses: list[str]) -> Iterator[None]:
    """Move tablets to and fro all the time."""
    for server, address in zip(servers, addresses, strict=True):
        server.name = address
    transports = [FlightTransport(address, "secret") for address in addresses]
    stopped, num_moves, problems = threading.Event(), 0, list[BaseException]()

    def move() -> None:
        nonlocal num_moves
        try:
            while not stopped.wait(0.05):
                for leaving in addresses:
                    num_moves += rebalance(transports, [leaving])
        except BaseException as error:
            problems.append(error)

    (thread := threading.Thread(target=move)).start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
    assert problems == []
    assert num_moves > 2


def by_id(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of dynamic tables, whose rows stand by rank elsewhere, with rows by id."""
    result = dict(state)
    for key in [key for key in state if key.endswith(".ids")]:
        of_table = key.removesuffix("ids")
        order = state[key].argsort()
        result |= {n: v[order] for n, v in state.items() if n.startswith(of_table) and v.dim() and len(v) == len(order)}
    return result


@pytest.mark.parametrize(
    ("servers", "max_steps", "tablets"),
    [
        (2, 10, (3,)),
        pytest.param(1, 20, (None,), marks=pytest.mark.more),
        pytest.param(2, 20, (None, 3), marks=pytest.mark.more),
    ],
)
def test_ranks_have_the_bits_of_ranks_with_tables_in_host_memory(ranks, servers, max_steps, tablets):
    expected = run(ranks, 2, 0, max_steps=max_steps)
    for number in tablets:
        actual = run(ranks, 2, servers, max_steps=max_steps, tablets=number)
        assert actual[:2] == expected[:2]
        assert_same_bits(actual[2], by_id(expected[2]))


@pytest.mark.parametrize(
    "checkpoints",
    [pytest.param(EVERY, marks=pytest.mark.more), pytest.param(CHANGES, marks=pytest.mark.slow)],
    ids=["whole", "changes"],
)
def test_a_run_is_resumed_on_other_servers(ranks, tmp_path, checkpoints):
    expected = run(ranks, 2, 2, tmp_path / "whole", epochs=2, checkpoints=checkpoints)
    run(ranks, 2, 1, tmp_path / "first", epochs=1, checkpoints=checkpoints)
    actual = run(ranks, 2, 3, tmp_path / "second", tmp_path / "first/checkpoints/step-18", epochs=2)
    assert_same_bits(actual[2], expected[2])
    assert actual[0] == [loss for loss in expected[0] if loss[0] > 18]


@pytest.mark.slow
def test_a_checkpoint_goes_to_other_tiers_and_numbers_of_ranks(ranks, tmp_path):
    run(ranks, 2, 2, tmp_path / "servers", epochs=1, checkpoints=EVERY)
    checkpoint = tmp_path / "servers/checkpoints/step-18"
    expected = run(ranks, 2, 0, None, checkpoint, epochs=2)
    assert_same_bits(run(ranks, 2, 1, None, checkpoint, epochs=2)[2], by_id(expected[2]))
    run(ranks, 2, 0, tmp_path / "host", checkpoint, epochs=2, max_steps=24, checkpoints=EVERY)
    back = run(ranks, 2, 2, None, tmp_path / "host/checkpoints/step-24", epochs=2)
    assert_same_bits(back[2], by_id(expected[2]))
    one = run(ranks, 1, 2, None, checkpoint, epochs=2)
    other = run(ranks, 1, 0, None, checkpoint, epochs=2)
    assert_same_bits(one[2], by_id(other[2]))
