"""A trainer that goes on from a checkpoint, in one process: whatever it was told to do, the bits are the same."""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("psutil")

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.training.jobs import ROW_WISE_ADAGRAD, Crash, CrashAt, Noisy, Record, make_trainer, planted
from tritonemb.data import ClickLog, Dataset, LogOptions, Schema, SplitRule, from_dataframe
from tritonemb.storage import checkpoint as storage_checkpoint
from tritonemb.storage.checkpoint import write_manifest
from tritonemb.training import Callback, CheckpointError, CheckpointOptions, Schedule
from tritonemb.training.callbacks.jsonl import read_run_log
from tritonemb.training.checkpoint import CheckpointFolder, read_manifest, writer
from tritonemb.training.checkpoint.manager import CheckpointManager, data_changes
from tritonemb.training.loop import Evaluations

RUN = CheckpointManager._run


@pytest.fixture(scope="module")
def data() -> Dataset:
    """Data of six steps per epoch."""
    return planted(300)


def state_of(trainer: te.Trainer) -> dict[str, torch.Tensor]:
    actual = dict(trainer.model.state_dict())
    if trainer.dense_optimizer is not None:
        for number, state in trainer.dense_optimizer.state_dict()["state"].items():
            actual |= {f"{number}.{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
    actual["random"] = torch.get_rng_state()
    return actual


SCHEDULES = {
    "dense_schedule": Schedule(warmup_steps=5, decay="cosine"),
    "table_schedule": Schedule(warmup_steps=3, decay="polynomial", final=0.1),
}


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.2},
        {"evaluate_every": 5, "log_every": 3, **SCHEDULES},
        {"accumulate": 3, "precision": "bf16"},
        *(
            pytest.param(options, marks=pytest.mark.more)
            for options in (
                {"optimizer": None},
                {"optimizer": te.optim.Adam(lr=0.01)},
                {"optimizer": te.optim.FTRL(lr=0.1)},
                {"accumulate": 3},
                {"precision": "fp16"},
                {"dense_optimizer": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)},
                {"dense_optimizer": lambda p, lr: torch.optim.Adam(p, lr=torch.tensor(lr), foreach=False)},
            )
        ),
    ],
    ids=lambda options: " ".join(options),
)
def test_a_crash_changes_nothing(data, tmp_path, options):
    expected, options = Record(), {"dropout": 0.2, **options}
    undisturbed = make_trainer(data, tmp_path / "a", callbacks=[expected], **options)
    undisturbed.fit()
    expected_state, random_number, random_array = state_of(undisturbed), random.random(), np.random.rand()  # noqa: NPY002

    losses: dict[int, float] = {}
    every = CheckpointOptions(checkpoint_steps=2)
    for crash in (3, 8, 10_000):
        record = Record()
        trainer = make_trainer(
            data, tmp_path / "b", callbacks=[record, CrashAt(crash)], checkpoints=every, **options
        )  # fmt: skip
        resumed = trainer.resume()
        assert (resumed is None) == (crash == 3)
        with suppress(Crash):
            result = trainer.fit()
        losses |= dict(record.losses)
    assert_same_bits(state_of(trainer), expected_state)
    assert losses == dict(expected.losses)
    assert result.reason == "finished"
    assert result.losses == tuple(undisturbed.progress.losses)
    assert (random.random(), np.random.rand()) != (random_number, random_array)  # noqa: NPY002


def test_a_learning_rate_that_is_a_tensor_remains_one(data):
    """A step by a number would have other bits."""
    trainer = make_trainer(data, None, dense_optimizer=lambda p, lr: torch.optim.Adam(p, lr=torch.tensor(lr)))
    (group,) = trainer.dense_optimizer.param_groups
    saved = json.loads(json.dumps(trainer.state.step.to_json()))
    group["lr"].mul_(0.1)
    trainer.state.step.load_json(saved)
    assert torch.equal(group["lr"], torch.tensor(saved["rates"][0]))


def test_a_finished_run_has_nothing_more_to_do_and_more_epochs_go_on(data, tmp_path):
    make_trainer(data, tmp_path / "run", epochs=2).fit()
    again = make_trainer(data, tmp_path / "run", epochs=2)
    assert again.resume() == tmp_path / "run" / "checkpoints" / "step-12"
    initial = state_of(again)
    result = again.fit()
    assert (result.steps, result.num_samples, len(result.losses)) == (12, 0, 2)
    assert_same_bits(state_of(again), initial)
    longer = make_trainer(data, tmp_path / "run", epochs=3)
    longer.resume()
    assert longer.fit().steps == 18
    at_once = make_trainer(data, epochs=3)
    at_once.fit()
    assert_same_bits(state_of(longer), state_of(at_once))


def test_a_folder_that_holds_a_run_is_not_overwritten(data, tmp_path):
    make_trainer(data, tmp_path / "run", epochs=1).fit()
    with pytest.raises(ValueError, match=r"run holds a run with step-6; resume it \(--resume auto\) or choose another"):
        make_trainer(data, tmp_path / "run", epochs=1).fit()


def test_two_processes_do_not_train_in_one_folder(data, tmp_path):
    class Second(Callback):
        def on_start(self, start):
            with pytest.raises(ValueError, match="another process trains in"):
                make_trainer(data, tmp_path / "run").fit()
            self.tried = True

    second = Second()
    make_trainer(data, tmp_path / "run", epochs=1, callbacks=[second]).fit()
    assert second.tried


def test_another_run_is_refused_with_what_differs(data, tmp_path):
    make_trainer(data, tmp_path / "run", epochs=1).fit()
    other = make_trainer(
        data, tmp_path / "run", batch_size=64, seed=3, optimizer=te.optim.SGD(lr=0.1), dense_optimizer=torch.optim.AdamW
    )
    message = (
        "is of another run: batch_size was 50, is 64; seed was 0, is 3; dense_optimizer was 'Adam', is 'AdamW'; "
        r"table_optimizers was \['row_wise_adagrad'\], is \['sgd'\]"
    )
    with pytest.raises(ValueError, match=message):
        other.resume()


def frame_trainer(items: object, folder: Path, epochs: int = 1, num_workers: int = 0, **how: Any) -> te.Trainer:
    """On a data frame whose label is whether its item is odd, and whose number may be negative."""
    pa = pytest.importorskip("pyarrow")
    columns = {"click": [row % 2 for row in range(90)], "x": [row % 7 - 3.0 for row in range(90)], "item": items}
    options = LogOptions(Schema("click", ("x",), ("item",), num_embeddings=1000, **how))
    data = from_dataframe(pa.table(columns), options)
    torch.manual_seed(0)
    model = te.nn.DLRM(data.tables(4), 1, bottom_mlp=[], top_mlp=[4], optimizer=ROW_WISE_ADAGRAD)
    how = {"batch_size": 30, "epochs": epochs, "num_workers": num_workers}
    return te.Trainer(model, data, folder=folder, verbose=False, **how)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.more)])
def test_strings_are_evaluated_as_the_integers_that_were_trained(tmp_path, num_workers):
    items = [row % 10 for row in range(90)]
    trained = frame_trainer(items, tmp_path)
    trained.fit()
    resumed = frame_trainer(list(map(str, items)), tmp_path, epochs=2, num_workers=num_workers)
    resumed.resume()
    assert resumed.evaluate("test").log_loss == trained.evaluate("test").log_loss
    resumed.fit()
    assert read_manifest(tmp_path / "checkpoints" / "step-6")["run"]["kinds"] == {"item": "integers"}
    unlike = frame_trainer([f"item {item}" for item in items], tmp_path)
    unlike.resume()
    with pytest.raises(ValueError, match=r"feature 'item' was trained with integers, has string 'item 5'"):
        unlike.evaluate("test")


def test_a_checkpoint_of_another_kind_of_data_is_refused(tmp_path):
    trained = frame_trainer([row % 10 for row in range(90)], tmp_path)
    trained.fit()
    other = frame_trainer(["a"] * 90, tmp_path)
    features = other.data.features
    other.state.data = SimpleNamespace(name="data frame", features=features, encoding=trained.data.encoding)
    with pytest.raises(ValueError, match=r"kinds was \{'item': 'integers'\}, is \{'item': 'strings'\}"):
        other.resume()


def test_an_older_checkpoint_has_no_kinds_and_the_logarithms_of_then(tmp_path, monkeypatch):
    items = [row % 10 for row in range(90)]
    old = frame_trainer(items, tmp_path, log_transform=True, clamp_negative=True)
    monkeypatch.setattr(CheckpointManager, "_run", lambda self, data: without_kinds(manager_run(self, data)))
    old.fit()
    monkeypatch.undo()
    resumed = frame_trainer(items, tmp_path)
    resumed.resume()
    assert resumed.evaluate("test").log_loss == old.evaluate("test").log_loss
    strings = frame_trainer(list(map(str, items)), tmp_path)
    strings.resume()
    assert strings.state.data.features[0].kind == "strings"
    strict = frame_trainer(items, tmp_path, log_transform=True)
    with pytest.raises(ValueError, match=r"row 78: field 2 \(x\) is '-3.0', expected 0 or more under log_transform"):
        strict.evaluate("test")
    with pytest.raises(ValueError, match="is of another run: encoding was"):
        frame_trainer(items, tmp_path, log_transform=False).resume()


def manager_run(manager: CheckpointManager, data: Any) -> dict[str, Any]:
    return RUN(manager, data)


def without_kinds(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name != "kinds"}


def csv_log(folder, **files) -> ClickLog:
    """A file for each name, of rows from a number on to another."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, (first, last, user) in files.items():
        rows = [f"{row % 2},{row / 100},{user}{row % 9}" for row in range(first, last)]
        (folder / f"{name}.csv").write_text("\n".join(["y,x,u", *rows, ""]))
    options = LogOptions(Schema("y", dense=("x",), sparse=("u",), num_embeddings=50), parser_threads=1)
    return ClickLog(folder, options)


def log_trainer(log: ClickLog, folder: Path, **options: Any) -> te.Trainer:
    model = te.nn.DLRM(log.tables(4), 1, bottom_mlp=(4,), top_mlp=(4,), optimizer=ROW_WISE_ADAGRAD)
    return te.Trainer(model, log, batch_size=20, folder=folder, verbose=False, **options)


FIRST = {"a": (0, 100, "u"), "b": (100, 150, "u")}
CHANGES = [
    (FIRST | {"c": (150, 300, "u")}, r"c.csv was absent, is [\d,]+ bytes, CRC-32 "),
    ({"a": FIRST["a"]}, r"b.csv was [\d,]+ bytes, CRC-32 .*, is absent"),
    (FIRST | {"a": (0, 100, "v")}, r"a.csv was ([\d,]+) bytes, CRC-32 .*, is \1 bytes, CRC-32"),
]


@pytest.mark.parametrize(
    ("max_steps", "changes"), [(None, CHANGES[:1]), (2, CHANGES)], ids=["end of epoch", "mid-epoch"]
)
def test_a_run_resumes_with_changed_data_only_if_it_is_told_to(tmp_path, max_steps, changes):
    log = csv_log(tmp_path / "log", **FIRST)
    trainer = functools.partial(log_trainer, log, tmp_path / "run")
    first = trainer(max_steps=max_steps)
    first.fit()
    results = trainer(epochs=2, checkpoints=CheckpointOptions(on_changed_data="continue"))
    results.resume()
    assert (results.progress.position is None) == (max_steps is None)
    first.state.data = ClickLog(log.files, replace(log.options, split=SplitRule(test_share=0.5)), name="log")
    with pytest.raises(ValueError, match=r"split was end 0.0 0.1\d*, is end 0.0 0.5"):
        first.resume()
    for files, message in changes:
        first.state.data = results.state.data = csv_log(tmp_path / "log", **files)
        with pytest.raises(ValueError, match=rf"the data have changed since .*: {message}"):
            first.resume()
        with pytest.warns(UserWarning, match="The epoch restarts; rows that are held out now may have been trained on"):
            results.resume()
        assert (results.progress.position, results.progress.epoch_samples) == (None, 0)
    assert results.fit().steps > (max_steps or 7)


def test_a_run_resumes_with_other_columns_only_if_it_is_told_to(tmp_path):
    path = tmp_path / "log.csv"
    rows = (f"{n % 2},{n % 3 % 2},{n},u{n % 9},1,2,{n},{n}" for n in range(99))
    path.write_text("\n".join(["y,z,x,u,v,w,s,t", *rows]))

    def trainer(label: str = "y", weight: str = "w", time: str = "t", **options: Any) -> te.Trainer:
        schema = Schema(label, dense=("x",), sparse=("u",), weight=weight, num_embeddings=50)
        rule = SplitRule(time_column=time, test_from="80")
        return log_trainer(ClickLog(path, LogOptions(schema, rule)), tmp_path / "run", **options)

    trainer(max_steps=2).fit()
    for changes, message in (
        ({"weight": "v"}, "weight column was w, is v"),
        ({"weight": ""}, "weight column was w, is absent"),
        ({"time": "s"}, "time column was t, is s"),
    ):
        with pytest.raises(ValueError, match=f"the data have changed since .*: {message}. Restore them"):
            trainer(**changes).resume()
    manifest = read_manifest(tmp_path / "run" / "checkpoints" / "step-2")
    with pytest.raises(ValueError, match="label column was y, is z"):
        data_changes(tmp_path, manifest, trainer("z").data, CheckpointOptions())
    other = trainer(weight="v", checkpoints=CheckpointOptions(on_changed_data="continue"))
    with pytest.warns(UserWarning, match="weight column was w, is v. The epoch restarts"):
        other.resume()
    trainer().resume()


def test_a_run_that_did_not_record_its_data_resumes_with_its_split(tmp_path):
    log = csv_log(tmp_path / "log", **FIRST)
    random = replace(log.options, split=SplitRule("random"))

    def trainer(**options) -> te.Trainer:
        return log_trainer(ClickLog(log.files, random, name="log"), tmp_path / "run", **options)

    def held_out(data: ClickLog) -> list[float]:
        return [value for batch in data.open("test", 50) for value in batch.dense[:, 0].tolist()]

    first = trainer()
    first.data.number_by_line()
    first.checkpointer.manifest, full = (
        lambda: {k: v for k, v in full().items() if k != "data"},
        first.checkpointer.manifest,
    )
    first.fit()
    again = trainer(epochs=2)
    assert held_out(again.data) != held_out(first.data)
    again.resume()
    assert held_out(again.data) == held_out(first.data)


def test_another_model_is_refused_and_nothing_is_changed(data, tmp_path):
    make_trainer(data, tmp_path / "run", epochs=1).fit()
    torch.manual_seed(1)
    model = te.nn.DLRM(data.tables(8), data.num_dense, bottom_mlp=(8, 8), top_mlp=(8,), optimizer=ROW_WISE_ADAGRAD)
    trainer = te.Trainer(model, data, batch_size=50, folder=tmp_path / "run", verbose=False)
    initial = {name: tensor.clone() for name, tensor in state_of(trainer).items()}
    with pytest.raises(ValueError, match=r"model\.bottom\.\S+ is not in the checkpoint"):
        trainer.resume()
    assert_same_bits(state_of(trainer), initial)


class Refuse(Callback):
    def on_start(self, start) -> None:
        raise OSError("refused")


def test_later_checkpoints_stay_if_nothing_is_trained(data, tmp_path):
    checkpoints, options = CheckpointFolder(tmp_path / "run" / "checkpoints"), {"epochs": 2, "log_every": 1}
    options |= {"checkpoints": CheckpointOptions(checkpoint_steps=4, keep=9)}

    def resume(**others) -> te.Trainer:
        trainer = make_trainer(data, tmp_path / "run", **options | others)
        trainer.resume(checkpoints.path(4))
        return trainer

    make_trainer(data, tmp_path / "run", **options).fit()
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names[-1] == "step-8"
    assert "step-12" in names
    with pytest.raises(OSError, match="refused"):
        resume(callbacks=[Refuse()]).fit()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == names
    resume(max_steps=4).fit()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == names
    log = tmp_path / "run" / "log.jsonl"
    content = log.read_bytes()
    log.write_bytes(content.replace(b'"step": 2', b'"step": 3', 1))
    with pytest.raises(ValueError, match="damaged"):
        resume().fit()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == names
    # A process that was killed while it replaced a later checkpoint has left one under another name.
    log.write_bytes(content)
    shutil.copytree(checkpoints.path(8), checkpoints.folder / ".replaced-step-8")
    with pytest.raises(Crash):
        resume(callbacks=[CrashAt(5)]).fit()
    assert checkpoints.steps() == [4]


def test_a_folder_with_the_best_checkpoint_alone_holds_a_run(data, tmp_path):
    checkpoints, options = CheckpointFolder(tmp_path / "run" / "checkpoints"), {"epochs": 1}
    options |= {"checkpoints": CheckpointOptions(checkpoint_steps=4, keep=9)}
    make_trainer(data, tmp_path / "run", **options).fit()
    best = checkpoints.best()
    shutil.copytree(checkpoints.path(4), tmp_path / "elsewhere" / "step-4")
    for step in checkpoints.steps():
        shutil.rmtree(checkpoints.path(step))
    trainer = make_trainer(data, tmp_path / "run", **options)
    assert trainer.resume() is None
    with pytest.raises(ValueError, match=re.escape(f"holds a run with {best.name}; resume it (--resume {best})")):
        trainer.fit()
    with pytest.raises(ValueError, match="holds another run than"):
        trainer.resume(tmp_path / "elsewhere" / "step-4")
    assert trainer.resume(best) == best


class Views(torch.nn.Module):
    """Dense parameters in other orders than that of their rows."""

    def __init__(self, data: Dataset) -> None:
        super().__init__()
        self.base, generator = Noisy(data, 0.0, ROW_WISE_ADAGRAD), torch.Generator().manual_seed(0)
        self.transposed = torch.nn.Parameter(torch.randn(data.num_dense, 16, generator=generator).t())
        self.column = torch.nn.Parameter(torch.randn(16, 3, generator=generator)[:, 1])

    def forward(self, dense, sparse):
        return self.base(dense, sparse) + torch.nn.functional.linear(dense, self.transposed) @ self.column


@pytest.mark.parametrize("dense_optimizer", [None, functools.partial(torch.optim.AdamW, fused=True)])
def test_states_of_any_layout_are_resumed(data, tmp_path, dense_optimizer):
    """Fused optimizers update elements in the order of the memory, of a parameter and its states alike."""
    options = {"checkpoints": CheckpointOptions(checkpoint_steps=4, keep=9)}

    def trainer(folder: str, epochs: int) -> te.Trainer:
        torch.manual_seed(0)
        model = Views(data)
        if dense_optimizer is not None:  # which does not read columns of a matrix right itself
            options["dense_optimizer"], model.column = (
                dense_optimizer,
                torch.nn.Parameter(model.column.detach().clone()),
            )
        settings = {"batch_size": 50, "epochs": epochs, "dense_lr": 3e-3, "verbose": False} | options
        return te.Trainer(model, data, folder=tmp_path / folder, **settings)

    whole = trainer("whole", 2)
    memory = whole.model.column.detach()._base
    before = None if memory is None else memory[:, [0, 2]].clone()
    whole.fit()
    trainer("run", 1).fit()
    resumed = trainer("run", 2)
    resumed.resume()
    resumed.fit()
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())
    assert before is None or torch.equal(memory[:, [0, 2]], before)


def test_early_stop_ends_the_run_and_keeps_the_best(data, tmp_path):
    """Learning rates of nought: the first evaluation is the best, the next two are not better."""
    options = {"optimizer": te.optim.SGD(lr=0.0), "dense_lr": 0.0, "evaluate_every": 3, "patience": 2, "epochs": 9}
    trainer = make_trainer(data, tmp_path / "run", **options)
    result = trainer.fit()
    assert (result.reason, result.steps) == ("early stop", 9)
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints")
    assert checkpoints.best() == checkpoints.folder / "best-3"
    again = make_trainer(data, tmp_path / "run", **options)
    again.resume()
    assert (again.fit().steps, again.progress.ended) == (9, "early stop")


def test_another_monitor_has_a_best_of_its_own(data, tmp_path):
    """A log loss of 0.69 would be better than any AUC below."""

    def trainer(epochs: int, monitor: str) -> te.Trainer:
        return make_trainer(data, tmp_path / "run", epochs=epochs, monitor=monitor, patience=9, callbacks=[record])

    record = Record()
    trainer(1, "log_loss").fit()
    again = trainer(2, "auc")
    with pytest.warns(UserWarning, match="has the best log_loss; with monitor='auc' the best is chosen anew"):
        again.resume()
    assert (again.progress.best, again.progress.best_step, again.progress.evaluations_since_best) == (None, 0, 0)
    again.fit()
    assert (again.progress.best, again.progress.best_step) == (record.evaluations[-1][1], 12)
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").best().name == "best-12"
    path = tmp_path / "run" / "checkpoints" / "step-12"
    manifest, resumed = read_manifest(path), trainer(2, "auc")
    for progress in (manifest["progress"], {k: v for k, v in manifest["progress"].items() if k != "monitor"}):  # older
        write_manifest(path, manifest | {"progress": progress})
        resumed.resume()
        assert (resumed.progress.best, resumed.progress.best_step) == (again.progress.best, 12)


def test_a_run_that_resumed_from_an_older_checkpoint_goes_on_from_there(data, tmp_path):
    """Also if it is killed before it has written a checkpoint."""
    checkpoints, options = CheckpointFolder(tmp_path / "run" / "checkpoints"), {"epochs": 2, "log_every": 1}
    options |= {"checkpoints": CheckpointOptions(checkpoint_steps=4, keep=9)}
    make_trainer(data, tmp_path / "run", **options).fit()
    assert (checkpoints.steps()[-2:], len(checkpoints.steps("best"))) == ([8, 12], 1)
    killed = make_trainer(data, tmp_path / "run", callbacks=[CrashAt(5)], **options)
    killed.resume(checkpoints.path(4))
    assert checkpoints.steps()[-1] == 12
    with pytest.raises(Crash):
        killed.fit()
    assert (checkpoints.steps(), checkpoints.steps("best")) == ([4], [])
    again = make_trainer(data, tmp_path / "run", **options)
    assert again.resume() == checkpoints.path(4)
    again.fit()
    events = read_run_log(tmp_path / "run" / "log.jsonl")
    assert [event["step"] for event in events if event["event"] == "log"] == list(range(1, 13))
    assert checkpoints.best().name == f"best-{again.progress.best_step}"


def test_a_failed_checkpoint_is_told_and_training_goes_on_or_stops(data, tmp_path, monkeypatch):
    record, every = Record(), CheckpointOptions(checkpoint_steps=2)
    trainer = make_trainer(data, tmp_path / "a", epochs=1, checkpoints=every, callbacks=[record])
    real = CheckpointFolder.save

    def fail_once(self, step, **contents):
        if step == 4:
            raise self._failure(step, 123_456, OSError("disk full"), contents["group"])
        return real(self, step, **contents)

    monkeypatch.setattr(CheckpointFolder, "save", fail_once)
    assert trainer.fit().steps == 6
    (message,) = record.messages
    assert "the checkpoint of step 4 could not be written" in message
    assert "disk full. It needs 123,456 bytes" in message
    assert message.endswith("The latest complete checkpoint is step-2. Training continues")
    assert CheckpointFolder(tmp_path / "a" / "checkpoints").steps() == [2, 6]
    stop = CheckpointOptions(checkpoint_steps=2, on_checkpoint_error="stop")
    trainer = make_trainer(data, tmp_path / "b", epochs=1, checkpoints=stop)
    with pytest.raises(CheckpointError, match="The latest complete checkpoint is step-2"):
        trainer.fit()


class Metric(Callback):
    """Records evaluations, whose AUC are these numbers."""

    def __init__(self, monkeypatch: Any, *values: float) -> None:
        self.best, numbers = list[bool](), iter(values)
        real = Evaluations.metrics
        monkeypatch.setattr(Evaluations, "metrics", lambda *args: replace(real(*args), auc=next(numbers)))

    def on_evaluation(self, evaluation):
        self.best.append(evaluation.best)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("first", "better"), [(0.5, True), (0.75, False)])
def test_a_best_checkpoint_that_was_not_written_gives_way_to_the_next_best(
    data, tmp_path, monkeypatch, asynchronous, first, better
):
    """That of step 4 is lost; an asynchronous failure is known when the next checkpoint begins."""
    metric, real = Metric(monkeypatch, first, 0.8, 0.6, 0.7), writer.size_and_checksum

    def fail(path: Path) -> list[int]:
        if path.parent.name.endswith("step-4"):
            raise OSError("disk full")
        return real(path)

    for module in (writer, storage_checkpoint):
        monkeypatch.setattr(module, "size_and_checksum", fail)
    checkpoints = CheckpointOptions(checkpoint_steps=2, checkpoint_async=asynchronous)
    options = {"evaluate_every": 2, "max_steps": 8, "checkpoints": checkpoints}
    trainer = make_trainer(data, tmp_path / "run", callbacks=[metric], **options)
    trainer.fit()
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    best = 8 if better else 2
    assert metric.best == [True, True, better and not asynchronous, better]
    assert (folder.best(), folder.steps()) == (folder.path(best, "best"), [2, 6, 8])
    saved = read_manifest(folder.path(8))["progress"]
    for value, step in ((trainer.progress.best, trainer.progress.best_step), (saved["best"], saved["best_step"])):
        assert (value, step) == (0.7 if better else first, best)


def test_saving_and_resuming_need_a_folder(data):
    trainer = make_trainer(data)
    with pytest.raises(ValueError, match="pass folder= to the trainer"):
        trainer.save()
    with pytest.raises(ValueError, match="needs a folder: pass folder="):
        trainer.resume()
