"""Trainers whose tables are on embedding servers: their bits, their checkpoints, and what other tiers make of these."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("psutil")

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.server.jobs import local_servers
from tests.training import jobs
from tritonemb.server import AtMost, connect
from tritonemb.server.metrics import totals
from tritonemb.serving import Follower
from tritonemb.training import Callback
from tritonemb.training.config import CheckpointOptions

DYNAMIC: dict[str, Any] = {
    "user": {"capacity": 2_000, "eviction": te.EvictionConfig(ttl=12)},
    "item": {"capacity": 220, "eviction": te.EvictionConfig("lfu", protect=6, half_life=5)},
    "site": {"capacity": 100, "admission": te.AdmissionConfig(appearances=3), "fallback_rows": 10},
}
EVERY = CheckpointOptions(checkpoint_steps=6, keep=9)
CHANGES = replace(EVERY, checkpoint_incremental=True)


def trainer_of(servers, folder: Path | None = None, *callbacks: Any, staleness=0, names=None, **options: Any):
    """All tables are on servers, if there are any, and some are dynamic; with names, static ones of these names are."""
    data = jobs.planted()
    torch.manual_seed(0)
    tables = []
    for table in data.tables(8):
        is_placed = servers is not None and (names is None or table.name in names)
        changes: dict[str, Any] = {"placement": "server"} if is_placed else {}
        if names is None and table.name in DYNAMIC:
            changes |= {"num_embeddings": None, **DYNAMIC[table.name]}
        tables.append(replace(table, **changes))
    optimizer = te.optim.RowWiseAdagrad(lr=0.05)
    model = te.nn.DLRM(tables, data.num_dense, bottom_mlp=(8,), top_mlp=(8,), optimizer=optimizer)
    settings = {"batch_size": 50, "epochs": 2, "log_every": 4, "verbose": False, "evaluate_every": 7} | options
    on_servers = {} if servers is None else {"servers": servers, "staleness": staleness}
    return te.Trainer(model, data, folder=folder, callbacks=list(callbacks), **on_servers, **settings)


def trained(servers, folder: Path | None = None, **options: Any):
    record = jobs.Record()
    trainer = trainer_of(servers, folder, record, **options)
    trainer.fit()
    return record, {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"checkpoints": EVERY}], ids=["plain", "accumulate", "saved"]
)
@pytest.mark.few(1)
def test_without_staleness_a_run_has_the_bits_of_one_process(options, tmp_path):
    accumulate = options.get("accumulate", 1)
    expected, rows = trained(None, accumulate=accumulate)
    with local_servers(2) as servers:
        actual, same_rows = trained(servers, tmp_path / "run", **options)
    if accumulate == 1:
        assert_same_bits(same_rows, rows)
        assert (actual.losses, actual.evaluations) == (expected.losses, expected.evaluations)
    else:  # a row's gradients are summed by micro-batches
        for name, value in rows.items():
            torch.testing.assert_close(same_rows[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("staleness", [4, 0])
@pytest.mark.parametrize("checkpoints", [CHANGES, EVERY], ids=["changes", "whole"])
@pytest.mark.parametrize("names", [("user", "site"), None], ids=["some tables", "all"])
@pytest.mark.few(1)
def test_a_resumed_run_has_the_bits_of_one_that_went_on(staleness, checkpoints, names, tmp_path):
    options = {"staleness": staleness, "checkpoints": checkpoints, "names": names}
    with local_servers(2) as servers:
        expected, rows = trained(servers, tmp_path / "whole", **options)
    with local_servers(1) as servers:
        trainer_of(servers, tmp_path / "run", **options, max_steps=21).fit()
    files = [path.name for path in (tmp_path / "run/checkpoints/step-18").iterdir()]
    assert any(".2." in name for name in files) == (checkpoints is CHANGES)
    record = jobs.Record()
    with local_servers(3) as servers:
        trainer = trainer_of(servers, tmp_path / "other", record, **options)
        assert names is None or {*trainer.model.embeddings.on_servers.feature_names} == {*names}
        trainer.resume(tmp_path / "run/checkpoints/step-18")
        trainer.fit()
        assert_same_bits(trainer.model.state_dict(), rows)
    assert record.losses == [loss for loss in expected.losses if loss[0] > 18]


@pytest.mark.more
def test_how_far_a_run_is_prefetched_changes_no_bit(tmp_path):
    runs = []
    for number, options in enumerate(({"pipeline": False}, {"prefetch_depth": 1}, {"prefetch_depth": 5})):
        with local_servers(2) as servers:
            runs.append(trained(servers, tmp_path / str(number), staleness=3, checkpoints=EVERY, **options))
    for result, rows in runs[1:]:
        assert_same_bits(rows, runs[0][1])
        assert (result.losses, result.evaluations) == (runs[0][0].losses, runs[0][0].evaluations)


@pytest.mark.more
def test_a_checkpoint_goes_to_other_tiers_and_back(tmp_path):
    _, rows = trained(None)
    with local_servers(2) as servers:
        trainer_of(servers, tmp_path / "servers", epochs=1, checkpoints=EVERY).fit()
    single = trainer_of(None, tmp_path / "alone", checkpoints=EVERY)
    single.resume(tmp_path / "servers/checkpoints/step-18")
    single.fit()
    assert_same_bits(single.model.state_dict(), rows)
    with local_servers(2) as servers:
        back = trainer_of(servers)
        back.resume(tmp_path / "alone/checkpoints/step-24")
        back.fit()
        assert_same_bits(back.model.state_dict(), rows)


@pytest.mark.parametrize("checkpoints", [EVERY, CHANGES], ids=["whole", "changes"])
@pytest.mark.few(1)
def test_a_follower_serves_the_newest_checkpoint(checkpoints, tmp_path):
    followers = []

    class Follow(Callback):
        def on_checkpoint(self, saved):
            if not followers:
                followers.append(Follower(tmp_path / "checkpoints", poll=None))
            followers[0].refresh()

    with local_servers(2) as servers:
        trainer = trainer_of(servers, tmp_path, Follow(), checkpoints=checkpoints)
        trainer.fit()
        rows = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    (follower,) = followers
    assert follower.problem is None
    assert follower.step == 40
    assert (follower.bases == 1) == (checkpoints is CHANGES)
    assert follower.bases + follower.increments > 5
    for name, table in follower.tables.items():
        ids = rows.get(f"embeddings.{name}.ids", torch.arange(len(rows[f"embeddings.{name}.weight"])))
        assert torch.equal(follower.look_up({name: ids})[name], rows[f"embeddings.{name}.weight"])
        assert f"embeddings.{name}.ids" not in rows or torch.equal(ids, table.ids())
    follower.close()


def test_the_log_and_the_report_say_what_servers_do(tmp_path):
    with local_servers(2) as servers:
        trained(servers, tmp_path, staleness=2)
        now = totals(servers.statistics())["embeddings"]
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    messages = [event["servers"]["embeddings"] for event in events if event["event"] == "log"]
    assert len(messages) == 10
    assert messages[-1]["staleness"]["2"] > messages[0]["staleness"]["2"] > 0
    assert set(messages[-1]["staleness"]) == {"0", "1", "2"}
    page = " ".join((tmp_path / "report.html").read_text().split())
    pulls = sum(messages[-1]["staleness"].values())
    for steps, count in messages[-1]["staleness"].items():
        assert f"{steps}: {100 * count / pulls:.1f} %" in page
    row = page.split("<td>embeddings</td><td>item</td>")[1].split("</tr>")[0]
    assert f">{messages[-1]['tables']['item']['rows']:,}<" in row
    assert messages[-1]["tables"]["item"]["rows"] <= now["tables"]["item"]["rows"]


@pytest.mark.more
def test_at_most_is_never_more(tmp_path):
    with local_servers(2) as servers:
        trained(servers, staleness=AtMost(2))
        for statistics in servers.statistics():
            histogram = statistics["collections"]["embeddings"]["staleness"]
            assert max(map(int, histogram)) <= 2


def on_a_rank(rank: int, addresses: list[str], token: str, folder: Path, checkpoint: Path | None, **options: Any):
    """What one of several trainers was told, and rank 0's tables."""
    record, placed = jobs.Record(), {"placement": "server"}
    with connect(addresses, token=token) as servers:
        data = jobs.planted()
        torch.manual_seed(0)
        names = options.pop("names", None)
        plan = None if names is None else jobs.plan_for(2)
        tables = [replace(t, **placed) if names is None or t.name in names else t for t in data.tables(8)]
        optimizer = te.optim.RowWiseAdagrad(lr=0.05)
        model = te.nn.DLRM(tables, data.num_dense, bottom_mlp=(8,), top_mlp=(8,), optimizer=optimizer)
        trainer = te.Trainer(
            te.HybridParallel(model, plan), data, folder=folder, callbacks=[record], servers=servers, staleness=2,
            **{"batch_size": 25, "log_every": 4, "verbose": False, "checkpoints": EVERY} | options,
        )  # fmt: skip
        if checkpoint is not None:
            trainer.resume(checkpoint)
        trainer.fit()
        state = trainer.model.state_dict() if rank == 0 else {}
        return record.losses, {name: v.clone() for name, v in state.items() if not isinstance(v, jobs.TableShards)}


@pytest.mark.more
def test_trainers_on_ranks_resume_together(ranks, tmp_path):
    pytest.importorskip("pyarrow.flight")
    from tritonemb.server.transport import FlightServer

    def run(number: int, folder: str, checkpoint: Path | None = None, **options: Any):
        with ExitStack() as stack:
            servers = [stack.enter_context(te.server.EmbeddingServer(f"server-{index}")) for index in range(number)]
            addresses = [stack.enter_context(FlightServer(server, token="secret")).address for server in servers]
            return ranks(2).run(partial(on_a_rank, **options), addresses, "secret", tmp_path / folder, checkpoint)

    (losses, rows), (peers, _) = run(1, "whole", epochs=2)
    assert losses == peers
    run(2, "first", epochs=1)
    (again, same_rows), _ = run(3, "second", tmp_path / "first/checkpoints/step-18", epochs=2)
    assert_same_bits(same_rows, rows)
    assert again == [loss for loss in losses if loss[0] > 18]


@pytest.mark.more
def test_ranks_have_tables_on_servers_beside_sharded_ones(ranks, tmp_path):
    """Before a checkpoint no rows are pulled from servers, but the ids of sharded tables are exchanged."""
    pytest.importorskip("pyarrow.flight")
    from tritonemb.server.transport import FlightServer

    run, often = partial(on_a_rank, names=("user", "item"), epochs=1), CheckpointOptions(checkpoint_minutes=1e-9)
    results = []
    for number, checkpoints in enumerate((EVERY, often)):
        with te.server.EmbeddingServer("server") as server, FlightServer(server, token="secret") as flight:
            arguments = [flight.address], "secret", tmp_path / str(number), None
            results.append(ranks(2).run(partial(run, checkpoints=checkpoints), *arguments))
    assert results[0][0][0] == results[1][0][0] == results[1][1][0]


def test_columns_stand_in_the_order_of_tables():
    data = jobs.planted()
    with local_servers(2) as servers:
        results = []
        for names in ((), ("user", "site")):
            torch.manual_seed(0)
            tables = [replace(t, placement="server") if t.name in names else t for t in data.tables(8)]
            model = te.nn.DCNv2(tables, data.num_dense, top_mlp=(8,), optimizer=te.optim.SGD(lr=0.1))
            if names:
                te.server.attach(model, servers)
                split = model.embeddings
                values = {
                    f"{table.config.name}.weight": results[0][0][table.config.name] for table in split.here.tables
                }
                split.here.load_state_dict(values | {"step": torch.tensor(0)})
                values = {f"{name}.weight": results[0][0][name] for name in names}
                split.on_servers.load_state_dict(values | {"step": torch.tensor(0)})
            else:
                weights = {table.config.name: table.weight.detach().clone() for table in model.embeddings.tables}
            batch = next(iter(data.open("train", 16))).sparse
            results.append((weights, model.embeddings(batch).detach()))
    assert torch.equal(results[0][1], results[1][1])
