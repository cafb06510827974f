"""Tables that are initialized anew in each epoch: by the epoch's seed, whatever interrupted the run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

pytest.importorskip("psutil")

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.sharding.models import whole_state
from tests.training import jobs
from tests.training.test_dynamic_tiers import trainer_of
from tritonemb.ops.row_update import fill_initial_
from tritonemb.training import CheckpointOptions
from tritonemb.types import seed_of

FRESH = {"fresh_tables": True, "seed": 4}
SEED = 4 * 1_000_003 + 2  # of the third epoch


def test_later_epochs_begin_with_initial_values():
    trainer = jobs.make_trainer(jobs.planted(300), table_lr=0.0, epochs=3, **FRESH)
    first = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    twin = jobs.make_trainer(jobs.planted(300)).model.embeddings
    torch.manual_seed(SEED)
    twin.reset_parameters()
    expected = {name: value for name, value in twin.state_dict().items() if "weight" in name}
    trainer.fit()
    collection = trainer.model.embeddings
    state = collection.state_dict()
    assert_same_bits({name: state[name] for name in expected}, expected)
    assert state["step"] == 6  # of the third epoch alone
    assert all(not torch.equal(value, first[f"embeddings.{name}"]) for name, value in expected.items())
    assert not torch.equal(trainer.model.state_dict()["top.0.weight"], first["top.0.weight"])
    # The learning rate stays, in the first epoch the tables do.
    assert collection.current_learning_rate == 0.0
    once = jobs.make_trainer(jobs.planted(300), table_lr=0.0, epochs=1, **FRESH)
    once.fit()
    state = once.model.embeddings.state_dict()
    assert_same_bits({name: state[name] for name in expected}, {name: first[f"embeddings.{name}"] for name in expected})


@pytest.mark.few(1)
@pytest.mark.parametrize("tier", ["disk", "host", "device"])
def test_an_interrupted_run_has_the_same_bits(tmp_path, tier):
    """It is interrupted at the end of an epoch of 20 steps, then within one."""
    expected = trainer_of("device", epochs=3, **FRESH)
    expected.fit()
    plain = trainer_of("device", epochs=3, seed=4)
    assert expected.progress.losses[1] > plain.fit().losses[1]
    for crash in (21, 33, 1_000):
        options = {"checkpoints": CheckpointOptions(checkpoint_steps=5, checkpoint_incremental=True), **FRESH}
        trainer = trainer_of(tier, tmp_path, jobs.CrashAt(crash), epochs=3, **options)
        trainer.resume()
        with suppress(jobs.Crash):
            trainer.fit()
    assert trainer.progress.step == 60
    assert trainer.progress.losses == expected.progress.losses
    assert_same_bits(dict(trainer.model.state_dict()), dict(expected.model.state_dict()))


def test_shards_begin_anew_on_all_ranks(ranks):
    results = ranks(2).run(jobs.fit, {"epochs": 3, "table_lr": 0.0, "num_train": 200, "batch_size": 25, **FRESH})
    tables = {table.name: table for table in jobs.planted(200).tables(8)}
    for result in results:
        for name, table in tables.items():
            weight = torch.empty(table.num_embeddings, 8)
            fill_initial_(weight, seed_of(name) ^ SEED, table.bound, 0, 0)
            (actual,) = (value for key, value in result["tensors"].items() if key.endswith(f".{name}.weight"))
            assert torch.equal(actual, weight), name


def test_states_begin_anew_and_frozen_tables_stay():
    """Also those of tables that a function draws, alone or sharded."""
    data = jobs.planted(200)
    tables = [replace(table, init=torch.nn.init.normal_) for table in data.tables(8)]
    for wrap in (lambda model: model, lambda model: te.HybridParallel(model, device="cpu")):
        for frozen in (False, True):
            model = wrap(te.nn.DLRM(tables, data.num_dense, (8,), (8,), te.optim.Adam(lr=0.1)))
            trainer = te.Trainer(model, data, epochs=1, verbose=False, **FRESH)
            trainer.fit()
            collection = (model.module if hasattr(model, "module") else model).embeddings
            collection.requires_grad_(not frozen)
            initial = {name: value.clone() for name, value in whole_state(model).items() if "embeddings" in name}
            trainer.state.begin_epoch()
            state = whole_state(model)
            moments = [name for name in initial if name.endswith("exp_avg")]
            assert len(moments) == len(tables)
            for name, value in initial.items():
                if name in moments and not frozen:
                    assert value.any()
                    assert not state[name].any(), name
                elif frozen or name.endswith("weight"):
                    assert torch.equal(state[name], value) == frozen, name


def test_tables_on_servers_cannot_begin_anew():
    data = jobs.planted(100)
    tables = [replace(table, placement="server") for table in data.tables(8)]
    model = te.nn.DLRM(tables, data.num_dense, (8,), (8,), te.optim.SGD(lr=0.1))
    with pytest.raises(ValueError, match="tables on embedding servers keep their rows"):
        te.Trainer(model, data, fresh_tables=True)


def test_tables_without_a_fused_optimizer_are_refused():
    data = jobs.planted(100)
    with pytest.raises(ValueError, match="'embeddings' has no fused optimizer, and stays as it is"):
        jobs.make_trainer(data, optimizer=None, fresh_tables=True)
    with pytest.raises(ValueError, match="initializes tables anew, but the model has no fused optimizer"):
        te.Trainer(torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4)), data, fresh_tables=True, verbose=False)
    model = te.nn.DLRM(data.tables(8), data.num_dense, (8,), (8,), te.optim.SGD(lr=0.1))
    model.frozen = te.nn.EmbeddingBag(9, 4).requires_grad_(False)
    te.Trainer(model, data, fresh_tables=True, verbose=False)
