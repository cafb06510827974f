"""A trainer on several ranks: what it does is what one process does, however the ranks fare."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import tritonemb as te

pytest.importorskip("psutil")

from tests.helpers import assert_same_bits, breadth
from tests.training import jobs
from tritonemb.comm.group import RankGroup
from tritonemb.data import ClickLog, LogOptions, Schema
from tritonemb.data.schema import ALL_ROWS
from tritonemb.training import CheckpointOptions

SAMPLES_A_STEP = 200


def run(ranks, size, **options):
    """Every rank's account of one job."""
    return ranks(size).run(jobs.fit, {"batch_size": SAMPLES_A_STEP // size, **options})


@pytest.fixture(scope="module")
def alone():
    """Metrics of a single process without a job."""
    return jobs.fit(0, {"batch_size": SAMPLES_A_STEP})


def close(found, expected):
    """Sums of gradients over ranks have another order of additions: some units in the last place of float32 a step."""
    assert [step for step, *_ in found] == [step for step, *_ in expected]
    for actual_value, other in zip(found, expected, strict=True):
        assert actual_value == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("size", breadth([1, 2, 4], [2]))
def test_ranks_together_train_as_one_process(ranks, alone, size):
    results = run(ranks, size)
    for result in results:
        assert (result["reason"], result["steps"]) == ("finished", 10)
        assert result["samples"] == alone["samples"]
        close(result["losses"], alone["losses"])
        close(result["evaluations"], alone["evaluations"])
        assert result["test"] == pytest.approx(alone["test"], rel=1e-4)
        assert result["epoch_losses"] == pytest.approx(alone["epoch_losses"], rel=1e-4)
    assert all(result["losses"] == results[0]["losses"] for result in results)
    assert all(result["test"] == results[0]["test"] for result in results)


@pytest.mark.parametrize(("size", "rows"), [(2, 997), (4, 601), (4, 3), (2, 1)], ids=str)
@pytest.mark.few(1)
def test_uneven_shares_change_nothing(ranks, size, rows):
    """601 rows: the last step has one sample; 3 rows: one rank has none at all."""
    options = {"num_train": rows, "log_every": 1, "epochs": 3}
    expected = jobs.fit(0, {"batch_size": SAMPLES_A_STEP, **options})
    for result in run(ranks, size, **options):
        assert result["samples"] == expected["samples"]
        close(result["losses"], expected["losses"])


def steps_of_a_log(rank, path):
    """Steps and samples, planned and trained, of two epochs of a Parquet file."""
    log = ClickLog(path, LogOptions(Schema("click", ("x",), ("u",), num_embeddings=50), ALL_ROWS))
    model = te.nn.DLRM(log.tables(4), 1, bottom_mlp=(4,), top_mlp=(4,), optimizer=jobs.ROW_WISE_ADAGRAD)
    plan = te.sharding.ShardingPlan({"u": te.sharding.RowWise()}, 2)
    trainer = te.Trainer(te.HybridParallel(model, plan), log, batch_size=19, epochs=2, verbose=False)
    planned = trainer.state.total_steps, trainer.state.total_samples(110)
    result = trainer.fit()
    return planned, (result.steps, result.num_samples)


def test_the_steps_of_uneven_row_groups_are_planned(ranks, tmp_path):
    """Row groups of 58 and 52 rows: the first rank has four batches per epoch, the second three."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"click": [n % 2 for n in range(110)], "x": [n / 10 for n in range(110)], "u": list(range(110))}
    with parquet.ParquetWriter(tmp_path / "log.parquet", pa.table(columns).schema) as writer:
        writer.write_table(pa.table(columns), row_group_size=58)
    assert ranks(2).run(steps_of_a_log, tmp_path / "log.parquet") == [((8, 220), (8, 220))] * 2


@pytest.mark.parametrize("options", [{"accumulate": 3}, {"precision": "fp16"}, {"precision": "bf16"}], ids=str)
@pytest.mark.more
def test_other_ways_to_step_agree_too(ranks, options):
    """997 rows in steps of 600: in the last one, ranks have different numbers of batches."""
    options = {"num_train": 997, "log_every": 1, "epochs": 1, **options}
    expected = jobs.fit(0, {"batch_size": SAMPLES_A_STEP, **options})
    for result in run(ranks, 4, **options):
        assert result["samples"] == expected["samples"]
        for (_, loss), (_, other) in zip(result["losses"], expected["losses"], strict=True):
            assert loss == pytest.approx(other, rel=2e-2 if "precision" in options else 1e-4)


def test_two_runs_have_the_same_bits(ranks):
    first, second = (run(ranks, 2, dropout=0.2) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one["losses"] == other["losses"]
        assert one["random"] == other["random"]
        assert_same_bits(one["tensors"], other["tensors"])
    assert first[0]["random"] != first[1]["random"]  # ranks drop out other inputs


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.more
def test_a_crash_changes_nothing(ranks, tmp_path, asynchronous):
    """On as many ranks the bits are those of a run that never stopped, generators included."""
    options = {"dropout": 0.2, "log_every": 3}
    expected = run(ranks, 2, folder=tmp_path / "a", **options)
    every = CheckpointOptions(checkpoint_steps=2, checkpoint_async=asynchronous)
    actual = {}
    for crash, resumed in ((3, None), (9, "step-2"), (None, "step-8")):
        results = run(ranks, 2, folder=tmp_path / "b", resume=True, crash_at=crash, checkpoints=every, **options)
        assert [result["resumed"] for result in results] == [resumed] * 2
        actual |= dict(results[0]["losses"])
    assert actual == dict(expected[0]["losses"])
    for one, other in zip(results, expected, strict=True):
        assert_same_bits(one["tensors"], other["tensors"])
        assert one["random"] == other["random"]
        assert one["test"] == other["test"]


def seen(rank, folder, options):
    """The dense values that a rank trains on, before a crash or after it, and samples and losses of all ranks."""
    data, actual = jobs.planted(600), []
    crash_at = options.pop("crash_at", None)
    callbacks = [jobs.CrashAt(crash_at)] if crash_at else []
    trainer = jobs.make_trainer(data, folder, callbacks=callbacks, epochs=1, **options)
    trainer.resume()
    step = trainer.state.step
    real = step._backward

    def backward(batches, *options):
        actual.append([batch.dense.clone() for batch in batches])
        real(batches, *options)

    step._backward = backward
    with suppress(jobs.Crash):
        trainer.fit()
    return actual, (trainer.progress.samples, trainer.progress.losses)


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 2), (4, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 1), (2, 4), (1, 4)))],
)
@pytest.mark.few(1)
def test_every_row_is_seen_once_across_a_change_of_ranks(ranks, tmp_path, before, after):
    """In mid-epoch, whose shares keep to the ranks that it began with."""
    options = {"batch_size": 32, "checkpoints": CheckpointOptions(checkpoint_steps=2)}
    first = ranks(before).run(seen, tmp_path, {**options, "crash_at": 3})
    second = ranks(after).run(seen, tmp_path, options)
    assert all(progress == (600, second[0][1][1]) for _, progress in second)
    # What came after the checkpoint is undone.
    rows = [batch for steps, _ in first for step in steps[:2] for batch in step]
    rows += [batch for steps, _ in second for step in steps for batch in step]
    actual, expected = torch.cat(rows), jobs.planted(600).train.dense
    assert torch.equal(actual[actual[:, 0].argsort()], expected[expected[:, 0].argsort()])


def test_what_is_sent_is_in_the_log(ranks):
    results = run(ranks, 2)
    first = results[0]["sent"][0]
    assert {"consensus", "sizes", "ids", "control"} <= first.keys()
    assert all(num_bytes > 0 for num_bytes in first.values())
    assert results[0]["sent"] == results[1]["sent"]


@pytest.mark.more
def test_data_loader_workers_change_nothing(ranks):
    """Processes that read bring the same batches as the ranks themselves."""
    expected = run(ranks, 2, epochs=1)
    results = run(ranks, 2, epochs=1, num_workers=2)
    assert results[0]["losses"] == expected[0]["losses"]
    assert results[0]["test"] == expected[0]["test"]
    assert_same_bits(results[1]["tensors"], expected[1]["tensors"])


def sharded_dense(rank, folder, resume):
    """FSDP2 cuts the dense part; a checkpoint has it whole."""
    trainer = jobs.make_trainer(jobs.planted(), folder, epochs=2 if resume else 1, dense="fsdp", batch_size=100)
    path = trainer.resume()
    assert (path is not None) == resume
    return trainer.fit(test=True).losses


@pytest.mark.more
def test_a_dense_part_that_is_cut_is_saved_whole(ranks, alone, tmp_path):
    first = ranks(2).run(sharded_dense, tmp_path, False)
    second = ranks(2).run(sharded_dense, tmp_path, True)
    assert second[0] == second[1]
    assert second[0][:1] == first[0]
    assert second[0] == pytest.approx(alone["epoch_losses"], rel=1e-4)
    copies = ranks(4).run(jobs.fit, {"folder": tmp_path, "resume": True, "batch_size": 100, "epochs": 3})
    assert copies[0]["resumed"] == "step-10"
    assert copies[0]["reason"] == "finished"


def trained_apart(rank, folder, steps, resume):
    """Tables of two replicas that are averaged every 4 steps, and saved every 6."""
    data = jobs.planted(1_000, validation=False)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = jobs.Noisy(data, 0.0, te.optim.SGD(lr=0.5))
    plan = te.sharding.ShardingPlan({name: te.sharding.TableWise(0) for name in jobs.plan_for(2).tables}, 1)
    parallel = te.HybridParallel(model, plan, mesh, average_every=4)
    checkpoints = te.training.CheckpointOptions(checkpoint_steps=6)
    options = {"batch_size": 50, "epochs": 9, "max_steps": steps, "checkpoints": checkpoints, "verbose": False}
    trainer = te.Trainer(parallel, data, folder=folder, **options)
    assert (trainer.resume() is not None) == resume
    trainer.fit()
    return {name: table.shards[0].tensor.clone() for name, table in parallel.table_weights().items()}


def test_a_checkpoint_has_the_updates_of_all_replicas(ranks, tmp_path):
    """A resumed run is bitwise identical to an uninterrupted one, and has all replicas' rows."""
    expected = ranks(2).run(trained_apart, tmp_path / "whole", 11, False)
    ranks(2).run(trained_apart, tmp_path / "parts", 6, False)
    for actual, values in zip(ranks(2).run(trained_apart, tmp_path / "parts", 11, True), expected, strict=True):
        assert_same_bits(actual, values)


def predicting(rank):
    return jobs.make_trainer(jobs.planted(50)).predict("test")


def test_predictions_of_ranks_are_in_the_order_of_the_rows(ranks):
    expected = predicting(0)
    first, second = ranks(2).run(predicting)
    torch.testing.assert_close(first, expected)
    assert len(second) == 0


def overflowing(rank, who):
    """A step in fp16 whose gradients are not finite on one rank."""
    data = jobs.planted(200, validation=False)
    trainer = jobs.make_trainer(data, precision="fp16", epochs=1, max_steps=1)
    initial = {name: jobs.whole(tensor) for name, tensor in trainer.model.state_dict().items()}
    factor = trainer.state.step.loss_scale.factor
    if rank == who:
        collection = trainer.state.step.fused_modules[0]
        collection.scale_accumulated = lambda factor: False
    trainer.fit()
    scale = trainer.state.step.loss_scale
    assert (scale.factor, scale.overflows) == (factor / 2, 1)
    assert_same_bits({name: jobs.whole(tensor) for name, tensor in trainer.model.state_dict().items()}, initial)


def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(ranks):
    ranks(2).run(overflowing, 1)


def saturating(rank, codec):
    """Whether gradients saturate on this rank, and whether the step is skipped, for each step in fp16."""
    data = jobs.planted(800, validation=False)
    torch.manual_seed(0)
    model, exchange = jobs.Noisy(data, 0.0, te.optim.SGD(lr=0.05)), te.sharding.ExchangePrecision("fp32", codec)
    parallel = te.HybridParallel(model, jobs.plan_for(2), exchange=exchange)
    trainer, steps = te.Trainer(parallel, data, precision="fp16", verbose=False), []
    with data.open("train", 20, shard=(rank, 2)) as batches:
        for batch in batches:
            saturated, overflows = parallel.saturated(only_gradients=True), trainer.state.step.loss_scale.overflows
            trainer.step([batch])
            saturates = parallel.saturated(only_gradients=True) > saturated
            steps.append((saturates, trainer.state.step.loss_scale.overflows > overflows))
    return steps


def test_gradients_that_saturate_in_an_exchange_leave_the_step_out(ranks):
    first, second = ranks(2).run(saturating, "fp8_e4m3")
    for (saturates, skipped), (also_saturates, also_skipped) in zip(first, second, strict=True):
        assert skipped == also_skipped == (saturates or also_saturates)
    assert first[0][1]
    assert not first[-1][1]


def diverging(rank, folder):
    """Return the error of a run that reads a row with NaN on one rank, and its checkpoints."""
    data = jobs.planted(400, validation=False)
    data.train.dense[333, 1] = float("nan")
    options = te.training.CheckpointOptions(checkpoint_steps=1, keep=1)
    trainer = jobs.make_trainer(data, folder, log_every=1000, checkpoints=options)
    with pytest.raises(ValueError, match="the training loss is nan") as caught:
        trainer.fit()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    return str(caught.value), checkpoint.name, trainer.progress.step


def test_a_run_that_diverges_on_one_rank_ends_on_all(ranks, tmp_path):
    first, second = ranks(2).run(diverging, tmp_path)
    assert first == second
    message, checkpoint, step = first
    assert message.startswith("the training loss is nan in epoch 1: dense column 1 of train row 333 is nan; correct")
    assert checkpoint == f"step-{step - 1}"


def impatient(rank, folder):
    """Learning rates of nought: the first evaluation is the best, the next two are not better."""
    trainer = jobs.make_trainer(
        jobs.planted(), folder, dense_lr=0.0, table_lr=0.0, evaluate_every=3, patience=2, epochs=9, batch_size=100
    )
    result = trainer.fit()
    return result.reason, result.steps, trainer.progress.best_step, trainer.run_folder.checkpoints.best().name


@pytest.mark.more
def test_an_early_stop_is_the_same_for_all(ranks, tmp_path):
    assert ranks(2).run(impatient, tmp_path) == [("early stop", 9, 3, "best-3")] * 2


def exchanging(rank, backend):
    """Results of a trainer, and the threads that sent ids, and words of consensus."""
    threads, all_to_all, all_gather = set(), RankGroup.all_to_all, RankGroup.all_gather

    def send(group, message, to, receive, kind):
        threads.add((kind, threading.current_thread().name)) if kind in ("sizes", "ids") else None
        return all_to_all(group, message, to, receive, kind)

    def gather(group, message, kind):
        threads.add((kind, threading.current_thread().name)) if kind == "consensus" else None
        return all_gather(group, message, kind)

    patches = [("all_to_all", send), ("all_gather", gather)]
    patches += [("backend_of", lambda *_: backend)] if backend else []
    with ExitStack() as stack:
        for name, function in patches:
            stack.enter_context(mock.patch.object(RankGroup, name, function))
        return jobs.fit(rank, {"accumulate": 2, "epochs": 1}), threads


def test_ids_over_nccl_are_exchanged_by_the_training_thread(ranks):
    pipeline = "tritonemb-pipeline"
    for backend, thread in ((None, pipeline), ("nccl", "MainThread")):
        results = ranks(2).run(exchanging, backend)
        for _, threads in results:
            assert threads == {("sizes", thread), ("ids", thread), ("consensus", pipeline)}
        if backend is None:
            expected = results
    for (result, _), (other, _) in zip(results, expected, strict=True):
        assert_same_bits(result["tensors"], other["tensors"])
        assert (result["losses"], result["evaluations"]) == (other["losses"], other["evaluations"])


def interrupted(rank, folder, who):
    callbacks = [jobs.SignalAt(4)] if rank == who else []
    trainer = jobs.make_trainer(jobs.planted(), folder, callbacks=callbacks, epochs=9)
    with pytest.raises(te.training.Interrupted) as caught:
        trainer.fit()
    return trainer.progress.step, caught.value.exit_status, trainer.run_folder.checkpoints.steps()


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_rank_ends_all_after_the_same_step(ranks, tmp_path, who):
    results = ranks(2).run(interrupted, tmp_path, who)
    step, status, saved = results[0]
    assert results[1] == results[0]
    assert 4 <= step <= 4 + 3  # steps that were agreed upon already
    assert status == 143
    assert saved == [step]


def at_exchange(kind, number, do):
    """Patches this rank: before it sends its `number`th message of a kind."""
    start, numbers = RankGroup.all_to_all, itertools.count(1)

    def send(group, message, to, receive, kind_of_this):
        if kind_of_this == kind and next(numbers) == number:
            do()
        return start(group, message, to, receive, kind_of_this)

    return mock.patch.object(RankGroup, "all_to_all", send)


def stopped(rank, who, kind):
    """Rank `who` is stopped by a signal that no process can handle, until the other rank has raised."""
    pids = RankGroup.world().all_gather_object(os.getpid())
    trainer = jobs.make_trainer(jobs.planted(), epochs=9, timeout=8.0)
    stop = partial(os.kill, os.getpid(), signal.SIGSTOP)
    exchanges = at_exchange(kind, 4, stop) if rank == who else nullcontext()
    with exchanges, pytest.raises(te.training.RankFailed) as caught:
        trainer.fit()
    if rank != who:
        os.kill(pids[who], signal.SIGCONT)
    return str(caught.value), caught.value.ranks


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a platform without SIGSTOP")
@pytest.mark.timeout(120)
@pytest.mark.more
@pytest.mark.parametrize("kind", ["pooled", "pooled gradients", "ids"])
def test_a_rank_that_is_stopped_is_named_in_time(ranks, kind):
    """The others have sent their part of an exchange, and compute beside it until they wait for that rank's."""
    (text, blamed), _ = ranks(2).run(stopped, 1, kind)
    ranks(2).close()  # its groups are broken
    assert text.startswith("rank 1 has exited, or has not answered at step ")
    assert "imed out" in text
    assert blamed == (1,)


def crash():
    raise jobs.Crash


def crashing(rank, who, path, kind):
    """A callback or an exchange fails on one rank, whose process ends; what the other one raises is left in a file."""
    callbacks = [jobs.CrashAt(4)] if rank == who and kind is None else []
    trainer = jobs.make_trainer(jobs.planted(), callbacks=callbacks, epochs=9)
    try:
        with at_exchange(kind, 4, crash) if rank == who else nullcontext():
            trainer.fit()
    except jobs.Crash:
        os._exit(1)
    except te.training.RankFailed as error:
        path.write_text(f"{error.ranks} {error}")


@pytest.mark.more
@pytest.mark.parametrize("kind", [None, "pooled", "pooled gradients"])
def test_a_rank_that_fails_is_named_with_its_error(ranks, tmp_path, kind):
    with pytest.raises(AssertionError, match="rank 1: the process has ended"):
        ranks(2).run(crashing, 1, tmp_path / "told", kind)
    assert (tmp_path / "told").read_text().startswith("(1,) rank 1 failed at step 4: Crash:  (")


def unwrapped(rank):
    data = jobs.planted()
    model = te.nn.DLRM(data.tables(4), data.num_dense, bottom_mlp=(4,), top_mlp=(4,))
    with pytest.raises(ValueError, match=r"the job has 2 ranks, but a DLRM trains on one: .*HybridParallel"):
        te.Trainer(model, data)


def test_a_model_that_trains_on_one_rank_is_refused(ranks):
    ranks(2).run(unwrapped)
