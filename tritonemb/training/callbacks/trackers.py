"""Experiment trackers: scalars of a run over steps; Weights & Biases, MLflow; trials of Optuna."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritonemb.training.callbacks import Callback, Evaluation, FitEnd, FitStart, Log
from tritonemb.training.config import flat
from tritonemb.utils import require

METRICS = ("auc", "log_loss", "normalized_entropy")
LOGGED = ("loss", "samples_per_second", "data_wait", "memory_bytes")
MAX_PARAMS, MAX_PARAM = 100, 500  # of a request to MLflow; characters of one that every store takes


class Scalars(Callback):
    """Gives `write` the numbers of a run: train/loss, train/samples_per_second, train/data_wait, train/memory_bytes;
    lr/dense, lr/tables; auc, log_loss and normalized_entropy under the name of each split; cache/ and each name of
    `Log.cache`; dynamic/, the table and each name of `Log.dynamic`."""

    essential = False

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Record the values of a step."""
        raise NotImplementedError

    def on_log(self, log: Log) -> None:
        groups = {
            "train": {name: getattr(log, name) for name in LOGGED},
            "lr": {"dense": log.dense_lr, "tables": log.table_lr},
            "cache": log.cache,
            **{f"dynamic/{table}": counts for table, counts in log.dynamic.items()},
        }
        pairs = ((f"{group}/{name}", value) for group, values in groups.items() for name, value in values.items())
        self.write({name: value for name, value in pairs if value is not None}, log.step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        values = {f"{evaluation.split}/{name}": getattr(evaluation.metrics, name) for name in METRICS}
        self.write(values, evaluation.step)

    def on_end(self, end: FitEnd | None) -> None:
        if end is not None and end.test is not None:
            Scalars.on_evaluation(self, Evaluation(end.step, 0, "test", end.test, best=False))


class Tracker(Scalars):
    """A tracker that gives a run an id, kept in the run's folder, so that a run that is resumed goes on there."""

    def start(self, run_id: str | None, start: FitStart) -> str:
        """Begin a run, or continue that of an id; its id."""
        raise NotImplementedError

    def on_start(self, start: FitStart) -> None:
        path = None if start.folder is None else Path(start.folder) / f"{type(self).__name__.lower()}-run"
        run_id = self.start(path.read_text() if path and start.first_step and path.exists() else None, start)
        if path is not None:
            path.write_text(run_id)


class WandB(Tracker):
    """Records a run at Weights & Biases; MissingExtraError without wandb.

    Args:
        options: of `wandb.init`: project, name, mode="offline" and so on. The name is that of the run's folder, where
            wandb's files go, too, unless they say otherwise.
    """

    def __init__(self, **options: Any) -> None:
        self._wandb, self._options = require("wandb", "wandb"), options
        self._run: Any = None

    def start(self, run_id: str | None, start: FitStart) -> str:
        folder = {} if start.folder is None else {"name": start.folder.name, "dir": str(start.folder)}
        options = {**folder, "id": run_id, "resume": "allow", "config": dict(start.config), **self._options}
        try:
            self._run = self._wandb.init(**options)
        except self._wandb.Error as error:  # an OSError is reported, and training goes on
            raise OSError(f"Weights & Biases: {error}") from error
        return str(self._run.id)

    def write(self, values: Mapping[str, float], step: int) -> None:
        if self._run is not None:
            self._run.log(dict(values), step=step)

    def on_end(self, end: FitEnd | None) -> None:
        super().on_end(end)
        if self._run is not None:
            self._run.finish(exit_code=int(end is None))


class MLflow(Tracker):
    """Records a run at MLflow; MissingExtraError without mlflow or mlflow-skinny.

    Args:
        experiment: its name; it is made if it does not exist.
        tracking_uri: a server, or sqlite:///FILE; that of MLflow if not given.
    """

    def __init__(self, experiment: str = "tritonemb", tracking_uri: str | None = None) -> None:
        self._mlflow, self._entities = require("mlflow", "mlflow"), require("mlflow.entities", "mlflow")
        self._experiment, self._address, self._client, self._id = experiment, tracking_uri, None, ""

    def start(self, run_id: str | None, start: FitStart) -> str:
        self._client = self._mlflow.MlflowClient(self._address)
        if run_id is None:
            experiment = self._call("get_experiment_by_name", self._experiment)
            number = experiment.experiment_id if experiment else self._call("create_experiment", self._experiment)
            run_id = self._call("create_run", number, run_name=start.folder and start.folder.name).info.run_id
            params = [self._entities.Param(key, str(value)[:MAX_PARAM]) for key, value in flat(start.config)]
            for at in range(0, len(params), MAX_PARAMS):
                self._call("log_batch", run_id, params=params[at : at + MAX_PARAMS])
        self._id = str(run_id)
        return self._id

    def write(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        names = ((re.sub(r"[^\w\-. :/]", "_", name), float(value)) for name, value in values.items())
        if self._id:
            self._call("log_batch", self._id, [self._entities.Metric(*pair, now, step) for pair in names])

    def on_end(self, end: FitEnd | None) -> None:
        super().on_end(end)
        if self._id:
            status = "FAILED" if end is None else "KILLED" if end.reason.startswith("SIG") else "FINISHED"
            self._call("set_terminated", self._id, status)

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        try:
            return getattr(self._client, method)(*args, **options)
        except self._mlflow.MlflowException as error:  # as of Weights & Biases
            raise OSError(f"MLflow: {error}") from error


class OptunaPruning(Callback):
    """Reports evaluations to a trial of Optuna; where the study prunes it, `optuna.TrialPruned` ends training.

    The trial's user attribute "run" is the run's folder. For training in one process.

    Args:
        trial: of the objective function.
        monitor: a field of `Metrics`, of the rows that are evaluated while training.
    """

    def __init__(self, trial: Any, monitor: str = "auc") -> None:
        self._optuna, self._trial, self._monitor = require("optuna", "optuna"), trial, monitor

    def on_start(self, start: FitStart) -> None:
        self._trial.set_user_attr("run", str(start.folder))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        value = getattr(evaluation.metrics, self._monitor)
        self._trial.report(value, evaluation.step)
        if self._trial.should_prune():
            raise self._optuna.TrialPruned(f"pruned at step {evaluation.step}, {self._monitor} {value:.6g}")
