"""Faults during training, and their consequences."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("psutil")
pytest.importorskip("rich")

from tests.helpers import assert_same_bits, process_ends
from tests.training import disk_job
from tests.training.jobs import Record, SignalAt, planted
from tritonemb.data import Dataset
from tritonemb.offloading.options import OffloadOptions
from tritonemb.training import Callback, CheckpointError, CheckpointOptions, Interrupted
from tritonemb.training.callbacks import CallbackList
from tritonemb.training.callbacks.console import make_display
from tritonemb.training.callbacks.jsonl import RunLog, read_run_log
from tritonemb.training.checkpoint import CheckpointFolder, read_manifest

make_trainer = partial(disk_job.make_trainer, placement="device")


@pytest.fixture(scope="module")
def data() -> Dataset:
    """Data of twelve steps per epoch."""
    return planted(600)


def checkpoints(folder) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.more
def test_a_compiled_model_is_evaluated_while_it_trains(data, tmp_path, monkeypatch, dynamo):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    trainer = make_trainer(data, tmp_path / "run", epochs=1, compile=True, evaluate_every=6)
    assert trainer.fit(test=True).test.num_samples == 250
    assert trainer.progress.best is not None


def test_a_checkpoint_of_another_folder_is_not_mixed_into_a_run(data, tmp_path):
    make_trainer(data, tmp_path / "a", epochs=1).fit()
    make_trainer(data, tmp_path / "b", epochs=1).fit()
    trainer = make_trainer(data, tmp_path / "b")
    with pytest.raises(ValueError, match=r"b holds another run than .*step-12; choose another folder"):
        trainer.resume(tmp_path / "a" / "checkpoints" / "step-12")
    fresh = make_trainer(data, tmp_path / "c")
    fresh.resume(tmp_path / "a" / "checkpoints" / "step-12")
    assert fresh.fit().steps == 24


def test_a_best_checkpoint_that_was_not_marked_any_more_is_marked_on_resume(data, tmp_path):
    make_trainer(data, tmp_path / "run", epochs=1, evaluate_every=12).fit()
    assert checkpoints(tmp_path / "run") == ["best-12", "step-12"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "best-12")  # as if killed right before
    trainer = make_trainer(data, tmp_path / "run", epochs=1, evaluate_every=12)
    trainer.resume()
    trainer.fit()
    assert checkpoints(tmp_path / "run") == ["best-12", "step-12"]


def test_a_damaged_manifest_changes_nothing(data, tmp_path):
    make_trainer(data, tmp_path / "run", epochs=1).fit()
    path = tmp_path / "run" / "checkpoints" / "step-12" / "trainer.json"
    manifest = json.loads(path.read_text())
    manifest["progress"]["unknown"] = 1
    path.write_text(json.dumps(manifest, indent=1))
    with pytest.raises(ValueError, match=r"trainer\.json is damaged: its content does not match its SHA-256 digest"):
        make_trainer(data, tmp_path / "run").resume()
    path.write_text(json.dumps({name: manifest[name] for name in manifest if name != "sha256"}))
    trainer = make_trainer(data, tmp_path / "run")
    initial = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with pytest.warns(match="has no digest"), pytest.raises(ValueError, match=r"trainer\.json is damaged .*unknown"):
        trainer.resume()
    assert_same_bits(dict(trainer.model.state_dict()), initial)


def with_number(data: Dataset, row: int, value: float, split: str = "train") -> Dataset:
    """The same data with another number in the second dense column of a row."""
    rows = getattr(data, split)
    dense = rows.dense.clone()
    dense[row, 1] = value
    return replace(data, **{split: replace(rows, dense=dense)})


def assert_finite(folder: Path, names: list[str]) -> None:
    assert checkpoints(folder) == names
    for name in names:
        actual = disk_job.in_memory(folder / "checkpoints" / name)
        assert all(value.isfinite().all() for value in actual.values())


@pytest.mark.parametrize(("value", "asynchronous"), [(math.nan, False), (math.inf, True)])
@pytest.mark.few(1)
def test_no_checkpoint_is_written_of_a_run_that_has_diverged(data, tmp_path, value, asynchronous):
    """And the last good one stays; the message names the input."""
    options = CheckpointOptions(checkpoint_steps=1, keep=1, checkpoint_async=asynchronous)
    wrong = with_number(data, 333, value)
    trainer = make_trainer(wrong, tmp_path / "run", checkpoints=options, log_every=1000, seed=1)
    batches = [bool(batch.dense.isfinite().all()) for batch in wrong.open("train", 50, seed=1, shuffle=True)]
    good = batches.index(False)
    assert 0 < good < 11
    kind = rf"dense column 1 of train row 333 is {value}; correct or remove such rows"
    with pytest.raises(ValueError, match=rf"^the training loss is nan in epoch 1: {kind}$"):
        trainer.fit()
    assert_finite(tmp_path / "run", [f"step-{good}"])
    with pytest.raises(ValueError, match="the training loss is nan in epoch 1: dense column 1"):
        trainer.save()
    assert_finite(tmp_path / "run", [f"step-{good}"])
    again = make_trainer(data, tmp_path / "run", seed=1, epochs=1)
    again.resume()
    assert again.fit().steps == 12


class Spoils(Callback):
    """After a number of steps, all gradients are NaN."""

    model: torch.nn.Module

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step):
        if step.step == self.step:
            self.model.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * math.nan,))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("offloads", [False, True])
def test_no_checkpoint_is_written_after_gradients_that_are_not_finite(data, tmp_path, offloads):
    """Although the loss is."""
    options = CheckpointOptions(checkpoint_steps=1, keep=1)
    disk = OffloadOptions(
        offload_states="disk", offload_params="disk", offload_path=tmp_path / "swap", offload_budget="1MiB"
    )
    trainer = make_trainer(
        data, tmp_path / "run", checkpoints=options, log_every=1000, callbacks=[spoils := Spoils(4)],
        **({"offload": disk} if offloads else {}),
    )  # fmt: skip
    spoils.model = trainer.model
    with pytest.raises(ValueError, match=r"parameter '.*' is not finite after step 5; lower the learning rates"):
        trainer.fit()
    assert_finite(tmp_path / "run", ["step-4"])
    trainer.close()


def test_an_evaluation_names_the_input_that_is_not_finite(data, tmp_path):
    trainer = make_trainer(with_number(data, 7, math.nan, "validation"), epochs=1, patience=1)
    kind = "1 logits of the validation rows are NaN: dense column 1 of validation row 7 is nan; correct or remove"
    with pytest.raises(ValueError, match=kind):
        trainer.fit()
    with pytest.raises(ValueError, match=kind):
        trainer.evaluate("validation")


def test_a_checkpoint_is_written_after_an_overflow_under_fp16(data, tmp_path):
    trainer = make_trainer(data, tmp_path / "run", precision="fp16", epochs=1, max_steps=2)
    trainer.state.step.loss_scale.factor = 2.0**40
    trainer.fit()
    assert trainer.state.step.loss_scale.overflows == 2
    assert_finite(tmp_path / "run", ["best-2", "step-2"])


class Counting(torch.optim.SGD):
    """Keeps a plain number for each parameter, and changes an option of its group."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["momentum"] = min(group["momentum"] + 0.01, 0.9)
            for parameter in group["params"]:
                count = self.state[parameter].get("count", 0) + 1
                self.state[parameter]["count"] = count
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + 1 / count)
        return super().step(closure)


def test_plain_numbers_of_an_optimizer_are_saved_too(data, tmp_path):
    options = {"dense_optimizer": Counting, "dense_lr": 0.01}
    full = make_trainer(data, tmp_path / "a", **options)
    full.fit()
    make_trainer(data, tmp_path / "b", **options, epochs=1).fit()
    resumed = make_trainer(data, tmp_path / "b", **options)
    resumed.resume()
    resumed.fit()
    assert_same_bits(dict(resumed.model.state_dict()), dict(full.model.state_dict()))
    assert resumed.dense_optimizer.param_groups[0]["momentum"] == full.dense_optimizer.param_groups[0]["momentum"]


def test_what_cannot_be_saved_is_refused_before_training(data, tmp_path):
    trainer = make_trainer(data, tmp_path / "run", config={"what": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        trainer.fit()
    assert trainer.progress.step == 0


def test_validation_rows_of_one_label_are_told_and_training_goes_on(data, tmp_path):
    ones = data.train.labels.nonzero().squeeze(1)[:20]
    rows = data.train.take(ones)
    record = Record()
    trainer = make_trainer(
        Dataset("ones", data.features, data.train, data.test, validation=rows),
        tmp_path / "run",
        epochs=1,
        callbacks=[record],
    )
    assert trainer.fit().reason == "finished"
    assert record.messages == [
        "the validation rows are not evaluated: all 20 labels are the same, so neither AUC nor normalized entropy is "
        "defined"
    ]


@pytest.mark.parametrize("when", ["last step", "evaluation"])
def test_a_late_signal_is_heard_and_nothing_is_lost(data, tmp_path, when):
    late = SignalAt(12)
    if when == "evaluation":
        late.on_step, late.on_evaluation = lambda step: None, late.on_step
    trainer = make_trainer(data, tmp_path / "run", epochs=1, callbacks=[late])
    with pytest.raises(Interrupted) as interrupted:
        trainer.fit(test=True)
    assert interrupted.value.exit_status == 143
    assert "step-12" in checkpoints(tmp_path / "run")


def test_a_signal_that_is_to_be_ignored_stays_ignored(data, tmp_path):
    initial = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert make_trainer(data, tmp_path / "run", epochs=1, callbacks=[SignalAt(1, signal.SIGINT)]).fit().steps == 12
    finally:
        signal.signal(signal.SIGINT, initial)


class Full(io.StringIO):
    """A stream without room, as a closed pipe or a full disk has none."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_display_that_cannot_write_does_not_end_training(data, capsys):
    trainer = make_trainer(data, epochs=1, callbacks=[make_display(Full())])
    assert trainer.fit().steps == 12
    notes = capsys.readouterr().err.splitlines()
    assert notes == ["note: Lines cannot write: [Errno 28] No space left on device. Training continues"]


@pytest.fixture
def disk_size():
    return "1m"


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_disk_that_fills_up(data, small_disk, on_error, capsys):
    class FillUp(Callback):
        def on_step(self, step):
            if step.step == 10:
                with (small_disk / "filler").open("wb", buffering=0) as file:
                    try:
                        while file.write(b"x" * 4096):
                            pass
                    except OSError:
                        pass
            if step.step == 20:
                (small_disk / "filler").unlink()

    options = CheckpointOptions(checkpoint_steps=4, keep=2, on_checkpoint_error=on_error)
    trainer = make_trainer(
        data, small_disk / "run", checkpoints=options, callbacks=[FillUp()], log_every=1, verbose=False
    )
    if on_error == "stop":
        with pytest.raises(CheckpointError, match=r"step 12 could not be written .* It needs [\d,]+ bytes"):
            trainer.fit()
        assert "step-8" in checkpoints(small_disk / "run")
        return
    assert trainer.fit().steps == 24
    steps = [event["step"] for event in read_run_log(small_disk / "run" / "log.jsonl") if event["event"] == "log"]
    assert steps == list(range(1, 25))  # what found no room was written later
    folder = CheckpointFolder(small_disk / "run" / "checkpoints")
    assert folder.steps()[-1] == 24
    assert read_manifest(folder.latest())["progress"]["step"] == 24
    assert "RunLog cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["start", "finish"])
def test_a_last_checkpoint_that_cannot_be_written_is_an_error(data, tmp_path, monkeypatch, method):
    """An earlier one may fail; `finish` is where one that is written in a thread fails."""
    for failing in ({4}, {4, 12}):
        every = CheckpointOptions(checkpoint_steps=4)
        trainer = make_trainer(data, tmp_path / str(len(failing)), epochs=1, checkpoints=every)
        call = getattr(trainer.checkpointer, method)

        def fails(*arguments, trainer=trainer, failing=failing, call=call):
            if trainer.progress.step in failing:
                raise CheckpointError(f"that of step {trainer.progress.step} could not be written")
            return call(*arguments)

        monkeypatch.setattr(trainer.checkpointer, method, fails)
        if 12 in failing:
            with pytest.raises(CheckpointError, match="that of step 12 could not be written"):
                trainer.fit()
        else:
            assert trainer.fit().steps == 12


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_rank_ends_with_a_torchrun_that_is_killed():
    rank = """
import os, time
from tritonemb.comm.group import RankGroup
from tritonemb.training.ranks import Ranks
Ranks(RankGroup(), 10)
print(os.getpid(), flush=True)
time.sleep(60)
"""
    torchrun = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "a"}
    command = [sys.executable, "-c", torchrun]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    assert process_ends(pid), "the rank lives on"


class TestCallbackList:
    def test_on_end_is_called_for_every_callback_that_was_started(self):
        heard = []

        class Named(Callback):
            def __init__(self, name, fails=()):
                self.name, self.fails = name, fails

            def on_start(self, start):
                heard.append(f"{self.name} start")
                if "start" in self.fails:
                    raise RuntimeError(f"{self.name} at the start")

            def on_end(self, end):
                heard.append(f"{self.name} end")
                if "end" in self.fails:
                    raise RuntimeError(f"{self.name} at the end")

        callbacks = CallbackList([Named("a", ["end"]), Named("b"), Named("c", ["start"]), Named("d")])

        def fit():
            try:
                callbacks.on_start(None)
            finally:
                callbacks.on_end(None)

        with pytest.raises(RuntimeError, match="c at the start") as caught:
            fit()
        assert heard == ["a start", "b start", "c start", "a end", "b end"]
        assert caught.value.__notes__ == ["Named.on_end failed too: RuntimeError('a at the end')"]

    def test_the_failure_of_an_end_is_raised_where_training_went_well(self):
        class Fails(Callback):
            def on_end(self, end):
                raise RuntimeError("at the end")

        callbacks = CallbackList([Fails()])
        callbacks.on_start(None)
        with pytest.raises(RuntimeError, match="at the end"):
            callbacks.on_end(None)

    def test_an_essential_callback_ends_training_with_its_error(self):
        class Writes(Callback):
            def on_step(self, step):
                raise OSError("no")

        callbacks = CallbackList([Writes()])
        callbacks.on_start(None)
        with pytest.raises(OSError, match="no"):
            callbacks.on_step(None)

    def test_the_log_is_not_essential(self):
        assert Callback.essential
        assert not RunLog.essential
