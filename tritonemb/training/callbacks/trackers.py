"""Trackers: TensorBoard, Weights & Biases, MLflow, Prometheus; pruning of Optuna trials; traces of `torch.profiler`."""

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tritonemb.server.metrics import METRICS as TABLE_METRICS
from tritonemb.server.metrics import MetricsServer, format_metrics
from tritonemb.training.callbacks import Callback, Evaluation, FitEnd, FitStart, Log, StepEnd
from tritonemb.training.config import ProfileOptions
from tritonemb.training.loop import LEVELS
from tritonemb.training.toml import flat
from tritonemb.utils import require

METRICS = ("auc", "log_loss", "normalized_entropy")
LOGGED = ("loss", "samples_per_second", "data_wait", "memory_bytes")
FLUSH_SECONDS = 10
TRAIN_METRICS = {
    "train_steps": "train_steps_total counter Steps of the run.",
    "train_samples": "train_samples_total counter Samples of all ranks.",
    "loss": "train_loss gauge Mean training loss since the last log.",
    "samples_per_second": "train_samples_per_second gauge Samples of all ranks per second since the last log.",
    "ids_per_second": "train_ids_per_second gauge Ids of this rank's batches per second since the last log.",
    "data_wait": "train_wait_ratio gauge Fraction of time since the last log that training waited for a step.",
    "stage_wait": "train_stage_wait_ratio gauge That fraction by stage of the preparation of a step.",
    "memory_bytes": "train_memory_bytes gauge Resident memory, or memory allocated on the GPU.",
    "train_staleness": "train_staleness_steps histogram Steps whose updates a pull from a server has missed.",
    "cache_rows": "cache_rows_total counter Distinct rows of batches, of this rank's cached tables.",
    "cache_hits": "cache_hits_total counter Those that were in device memory.",
    "cache_read": "cache_read_bytes_total counter Bytes read to the device.",
    "cache_written": "cache_written_bytes_total counter Bytes written back from the device.",
    **{key: metric for key, metric in TABLE_METRICS.items() if metric.startswith("table_")},
}
MAX_PARAMS, MAX_PARAM_LENGTH = 100, 500  # MLflow's limits: parameters per request, characters that all stores accept


class Scalars(Callback):
    """Base class of trackers, which passes scalars to `write`: train/loss, train/samples_per_second, train/data_wait,
    train/memory_bytes; lr/dense, lr/tables; <split>/auc, <split>/log_loss, <split>/normalized_entropy;
    cache/<name of Log.cache>; dynamic/<table>/<name of Log.dynamic>."""

    essential = False

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Record values by name at a step."""
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
        values = evaluation.metrics.values(METRICS).items()
        self.write({f"{evaluation.split}/{name}": value for name, value in values}, evaluation.step)

    def on_end(self, end: FitEnd | None) -> None:
        if end is not None and end.test is not None:
            Scalars.on_evaluation(self, Evaluation(end.step, 0, "test", end.test, best=False))


class TensorBoard(Scalars):
    """Callback that writes the values of `Scalars` for TensorBoard. Raise MissingExtraError without tensorboard.

    On resume, TensorBoard hides values of later steps that an earlier process wrote.

    Args:
        folder: folder of the event files; every run needs a separate one.
    """

    def __init__(self, folder: Path | str) -> None:
        require("tensorboard", "tensorboard")
        self._folder = str(folder)

    def on_start(self, start: FitStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides earlier values from purge_step on; values of first_step remain.
        self._writer = SummaryWriter(self._folder, purge_step=start.first_step + 1, flush_secs=FLUSH_SECONDS)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def on_end(self, end: FitEnd | None) -> None:
        super().on_end(end)
        self._writer.close()


class Tracker(Scalars):
    """Tracker with run ids. The id is stored in the run's folder, so that a resumed run continues the tracker's run."""

    def start(self, run_id: str | None, start: FitStart) -> str:
        """Begin a run, or continue the run `run_id`; return its id."""
        raise NotImplementedError

    def on_start(self, start: FitStart) -> None:
        path = None if start.folder is None else Path(start.folder) / f"{type(self).__name__.lower()}-run"
        run_id = self.start(path.read_text() if path and start.first_step and path.exists() else None, start)
        if path is not None:
            path.write_text(run_id)


class WandB(Tracker):
    """Callback that records a run in Weights & Biases; raise MissingExtraError without wandb.

    Args:
        options: arguments of `wandb.init`, such as project and mode; by default `name` and `dir` of the run's folder.
    """

    def __init__(self, **options: Any) -> None:
        self._wandb, self._options = require("wandb", "wandb"), options

    def start(self, run_id: str | None, start: FitStart) -> str:
        defaults = {} if start.folder is None else {"name": start.folder.name, "dir": str(start.folder)}
        options = {**defaults, "id": run_id, "resume": "allow", "config": dict(start.config), **self._options}
        try:
            self._run = self._wandb.init(**options)
        except self._wandb.Error as error:  # OSError: reported, and training continues
            raise OSError(f"Weights & Biases: {error}") from error
        return str(self._run.id)

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def on_end(self, end: FitEnd | None) -> None:
        super().on_end(end)
        self._run.finish(exit_code=int(end is None))


class MLflow(Tracker):
    """Callback that records a run in MLflow; raise MissingExtraError without mlflow or mlflow-skinny.

    Args:
        experiment: name of the experiment, created if it does not exist.
        tracking_uri: URI of a server, or sqlite:///FILE; MLflow's default if None.
    """

    def __init__(self, experiment: str = "tritonemb", tracking_uri: str | None = None) -> None:
        self._mlflow, self._entities = require("mlflow", "mlflow"), require("mlflow.entities", "mlflow")
        self._experiment, self._tracking_uri = experiment, tracking_uri

    def start(self, run_id: str | None, start: FitStart) -> str:
        self._client = self._mlflow.MlflowClient(self._tracking_uri)
        if run_id is None:
            experiment = self._call("get_experiment_by_name", self._experiment)
            experiment_id = experiment and experiment.experiment_id
            experiment_id = experiment_id or self._call("create_experiment", self._experiment)
            run_id = self._call("create_run", experiment_id, run_name=start.folder and start.folder.name).info.run_id
            params = [self._entities.Param(key, str(value)[:MAX_PARAM_LENGTH]) for key, value in flat(start.config)]
            for start_index in range(0, len(params), MAX_PARAMS):
                self._call("log_batch", run_id, params=params[start_index : start_index + MAX_PARAMS])
        self._run_id = str(run_id)
        return self._run_id

    def write(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        names = ((re.sub(r"[^\w\-. :/]", "_", name), float(value)) for name, value in values.items())
        self._call("log_batch", self._run_id, [self._entities.Metric(*pair, now, step) for pair in names])

    def on_end(self, end: FitEnd | None) -> None:
        super().on_end(end)
        status = "FAILED" if end is None else "KILLED" if end.reason.startswith("SIG") else "FINISHED"
        self._call("set_terminated", self._run_id, status)

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        try:
            return getattr(self._client, method)(*args, **options)
        except self._mlflow.MlflowException as error:  # OSError: reported, and training continues
            raise OSError(f"MLflow: {error}") from error


class OptunaPruning(Callback):
    """Callback that reports evaluations to an Optuna trial; raise `optuna.TrialPruned` when the study prunes it.

    Sets the trial's user attribute "run" to the run's folder. Supports training in one process only.

    Args:
        trial: argument of the objective function.
        monitor: field of `Metrics` to report after every evaluation on the validation rows.
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


class Prometheus(Callback):
    """Callback that serves the metrics of a rank at http://127.0.0.1:PORT/metrics while it trains; raise OSError if the
    port is in use. Steps and samples are current, all others those of the last log, so no scrape waits for the device.
    All have the label `rank`. Port 0 selects a free port, see `address`."""

    def __init__(self, port: int, rank: int = 0) -> None:
        self._port, self._labels = port, {"rank": str(rank)}
        self._totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # by dynamic table, or ""
        self._groups = list[tuple[dict[str, Any], dict[str, str]]]()

    def on_start(self, start: FitStart) -> None:
        self._step, self._logged_step = StepEnd(start.first_step, 0, start.samples_done), start.first_step
        self._server = MetricsServer(self._port, self._text)
        self.address = self._server.address

    def on_step(self, step: StepEnd) -> None:
        self._step = step

    def on_log(self, log: Log) -> None:
        steps, self._logged_step = log.step - self._logged_step, log.step
        cache = log.cache and {"hits": log.cache["rows"] * log.cache["hit_rate"], **log.cache}
        means = {"": {f"cache_{name}": mean for name, mean in cache.items()}, **log.dynamic}
        for table, values in means.items():
            total = self._totals[table]
            for name, mean in values.items():
                total[name] = mean if name in LEVELS else total[name] + mean * steps
        groups: list[tuple[dict[str, Any], dict[str, str]]] = [(vars(log) | self._totals[""], {})]
        groups += [(dict(total), {"table": table}) for table, total in self._totals.items() if table]
        groups += [({"stage_wait": share}, {"stage": stage}) for stage, share in log.waits.items()]
        collections = log.servers.items()
        staleness = [({"train_staleness": entry["staleness"]}, {"collection": name}) for name, entry in collections]
        self._groups = groups + staleness  # a new list, as threads of the server read the old one

    def on_end(self, end: FitEnd | None) -> None:
        self._server.close()

    def _text(self) -> str:
        step = self._step
        groups = [({"train_steps": step.step, "train_samples": step.samples}, {}), *self._groups]
        return format_metrics(TRAIN_METRICS, [(values, self._labels | labels) for values, labels in groups])


class Profiler(Callback):
    """Profiles a window of at least one step with `torch.profiler`; writes the trace when it or training ends."""

    def __init__(self, path: Path, options: ProfileOptions) -> None:
        self.path, self.options = path, options

    def on_start(self, start: FitStart) -> None:
        warmup = min(1, self.options.profile_start)
        wait, active = self.options.profile_start - warmup, self.options.profile_steps
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self.path)),
            record_shapes=True,
        )
        self._profiler.start()

    def on_step(self, step: StepEnd) -> None:
        self._profiler.step()

    def on_end(self, end: FitEnd | None) -> None:
        self._profiler.stop()
