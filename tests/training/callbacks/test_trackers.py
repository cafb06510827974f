"""Runs at Weights & Biases (offline), MLflow (in a file) and Optuna."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import torch

import tritonemb as te
from tritonemb.data import Dataset, make_synthetic
from tritonemb.training.callbacks import Callback
from tritonemb.training.callbacks.trackers import MLflow, OptunaPruning, WandB
from tritonemb.utils import MissingExtraError

CONFIG = {"model": "dlrm", "read": {"schema": {"label": "click"}}, "top_mlp": [16, 8]}


def make_trainer(folder: Path, *callbacks: Callback, **options: object) -> te.Trainer:
    drawn = make_synthetic(num_train=800, num_test=200)
    data = Dataset("clicks", drawn.features, drawn.train.slice(0, 600), drawn.test, drawn.train.slice(600, 800))
    torch.manual_seed(0)
    model = te.nn.DLRM(data.tables(4), data.num_dense, (8,), (8,), optimizer=te.optim.RowWiseAdagrad(lr=0.05))
    options = {"batch_size": 100, "log_every": 2, "evaluate_every": 3, "verbose": False, **options}
    return te.Trainer(model, data, folder=folder, config=CONFIG, callbacks=list(callbacks), **options)


@pytest.mark.more  # its service takes seconds to start
def test_a_run_is_recorded_at_wandb_and_goes_on_there(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker, records = WandB(project="clicks", mode="offline"), []
    log = wandb.Run.log

    def record(run, values, step):
        records.append((run.id, step, values))
        log(run, values, step=step)

    monkeypatch.setattr(wandb.Run, "log", record)
    result = make_trainer(tmp_path / "first", tracker).fit(test=True)
    steps = [step for _, step, values in records if "train/loss" in values]
    assert steps == [2, 4, 6]
    assert [step for _, step, values in records if "validation/auc" in values] == [3, 6]
    (number,) = {number for number, _, _ in records}
    assert (tmp_path / "first" / "wandb-run").read_text() == number
    assert records[-1] == (number, 6, {
        f"test/{name}": getattr(result.test, name) for name in ("auc", "log_loss", "normalized_entropy")
    })  # fmt: skip
    assert list((tmp_path / "first" / "wandb").glob(f"offline-run-*-{number}/run-{number}.wandb"))
    # A resumed run goes on under its id.
    resumed = make_trainer(tmp_path / "first", WandB(project="clicks", mode="offline"), epochs=2)
    resumed.resume("auto")
    resumed.fit()
    assert {number for number, _, _ in records} == {number}
    assert records[-1][1] == 12


@pytest.mark.more  # a database is made in some seconds
def test_a_run_is_recorded_at_mlflow_and_goes_on_there(tmp_path, capsys, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("alembic")
    address = f"sqlite:///{tmp_path}/mlflow.db"
    result = make_trainer(tmp_path / "first", MLflow("clicks", address)).fit(test=True)
    client = mlflow.MlflowClient(address)
    place = client.get_experiment_by_name("clicks").experiment_id
    (run,) = client.search_runs([place])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {"model": "dlrm", "read.schema.label": "click", "top_mlp": "[16, 8]"}
    assert run.data.metrics["test/auc"] == result.test.auc
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [metric.step for metric in history] == [2, 4, 6]
    # A resumed run goes on there; one that fails says so.
    resumed = make_trainer(tmp_path / "first", MLflow("clicks", address), epochs=2)
    resumed.resume("auto")
    resumed.fit()

    class Fails(Callback):
        def on_log(self, log: object) -> None:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        make_trainer(tmp_path / "second", MLflow("clicks", address), Fails()).fit()
    runs = {run.info.run_name: run for run in client.search_runs([place])}
    assert {name: run.info.status for name, run in runs.items()} == {"first": "FINISHED", "second": "FAILED"}
    assert len(client.get_metric_history(runs["first"].info.run_id, "train/loss")) == 6
    # One that cannot be reached costs nothing but its records.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert make_trainer(tmp_path / "third", MLflow("clicks", f"http://127.0.0.1:{port}")).fit().steps == 6
    assert capsys.readouterr().err.count("MLflow cannot write: MLflow: ") == 1


def test_a_trial_that_is_pruned_ends_its_run(tmp_path):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial):
        trainer = make_trainer(tmp_path / f"trial-{trial.number}", OptunaPruning(trial, "log_loss"), max_steps=6)
        trainer.fit()
        return trainer.evaluate("validation").log_loss

    above = optuna.pruners.ThresholdPruner(upper=1e-6, n_warmup_steps=4)  # from step 4 on all are worse
    study = optuna.create_study(pruner=above)
    study.optimize(objective, n_trials=1)
    (trial,) = study.trials
    assert trial.state == optuna.trial.TrialState.PRUNED
    assert list(trial.intermediate_values) == [3, 6]
    assert trial.user_attrs == {"run": str(tmp_path / "trial-0")}


def test_a_tracker_that_is_not_installed_is_named(monkeypatch):
    for name, make in (("wandb", WandB), ("mlflow", MLflow), ("optuna", lambda: OptunaPruning(None))):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingExtraError, match=rf"{name} is required.*tritonemb\[{name}\]"):
            make()
