"""Trains, evaluates, saves and resumes a model in one process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tritonemb.data.batch import Batch
from tritonemb.data.dataset import Split
from tritonemb.data.source import Data
from tritonemb.nn import EmbeddingBagCollection, EmbeddingCollection
from tritonemb.nn.errors import check_errors
from tritonemb.training import state
from tritonemb.training.callbacks import Callback, CheckpointSaved
from tritonemb.training.checkpoint import CheckpointOptions, load_tensors, read_manifest, stored_tensors
from tritonemb.training.inference import logits_of, predict
from tritonemb.training.loop import FitResult, Loop
from tritonemb.training.metrics import Metrics, binary_metrics
from tritonemb.training.precision import LossScale, Precision, autocast
from tritonemb.training.run_folder import RunFolder
from tritonemb.training.schedule import Schedule
from tritonemb.training.signals import StopRequest, stop_requests
from tritonemb.training.toml import plain
from tritonemb.training.versions import versions
from tritonemb.training.watch.display import make_display
from tritonemb.training.watch.report import Report
from tritonemb.training.watch.run_log import RunLog
from tritonemb.training.watchers import Watchers

Monitor = Literal["auc", "log_loss", "normalized_entropy"]


class Trainer:
    """Trains `model(dense, sparse) -> logits [B]` on binary labels with the cross-entropy loss.

    Embedding collections with a fused optimizer update their tables themselves; every other parameter belongs to
    `dense_optimizer`. Batches are shuffled by (seed, epoch): the same seed gives the same batches. The initial weights
    are the caller's; seed them with `torch.manual_seed` before the model is made.

    With a `folder` a run outlives its process: checkpoints, a log and a report are kept there, SIGINT and SIGTERM end
    it after the step that is running, and `resume` goes on from a checkpoint with the bits of a run that never stopped.

    Args:
        model: on the device where it is to be trained, unless `device` is given.
        data: a `tritonemb.data.Dataset` or `ClickLog`, or anything with the methods of `tritonemb.data.source.Data`.
        batch_size: samples a batch; the last one of an epoch may have fewer.
        epochs: passes over the training rows.
        max_steps: end after so many steps, if the epochs have not ended before.
        accumulate: batches a step: their gradients are applied together, as one batch's.
        dense_optimizer: called with the parameters and `lr=dense_lr`; a class of `torch.optim`, for example.
        dense_schedule, table_schedule: of the learning rates of the dense part and of the fused tables.
        precision: of the dense part: "fp32", or autocast to "bf16" or "fp16" (with a loss scale).
        seed: of the order of the rows.
        device: where to train; the model is moved there.
        compile: run the model through `torch.compile`.
        log_every: steps between two logs.
        evaluate_every: steps between two evaluations of the validation rows; None for the end of each epoch. They are
            evaluated where the data set has them and someone looks: a folder, callbacks, `verbose` or `patience`.
        monitor: the metric that decides which evaluation is the best.
        patience: stop after so many evaluations in a row that were not better than the best.
        folder: where checkpoints, `log.jsonl` and `report.html` go.
        checkpoints: when they are written.
        callbacks: told of all that happens, see `Callback`.
        config: shown in the report, kept in the log.
        verbose: show progress.

    Raises:
        ValueError: for options out of range, or for `patience` without validation rows.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        *,
        batch_size: int = 1024,
        epochs: int = 1,
        max_steps: int | None = None,
        accumulate: int = 1,
        dense_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        dense_lr: float = 1e-3,
        dense_schedule: Schedule | None = None,
        table_schedule: Schedule | None = None,
        precision: Precision = "fp32",
        seed: int = 0,
        device: torch.device | str | None = None,
        compile: bool = False,
        log_every: int = 100,
        evaluate_every: int | None = None,
        monitor: Monitor = "auc",
        patience: int | None = None,
        folder: str | Path | None = None,
        checkpoints: CheckpointOptions | None = None,
        callbacks: Sequence[Callback] = (),
        config: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        counts = {"batch_size": batch_size, "epochs": epochs, "accumulate": accumulate, "log_every": log_every}
        optional = {"max_steps": max_steps, "evaluate_every": evaluate_every, "patience": patience}
        for name, value in (counts | optional).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if monitor not in get_args(Monitor):
            raise ValueError(f"monitor must be one of {get_args(Monitor)}, got {monitor!r}")
        for name, given in (("evaluate_every", evaluate_every), ("patience", patience)):
            if given is not None and "validation" not in data.splits():
                raise ValueError(f"{name} needs validation rows, and data set {data.name!r} has none")
        self.model = model if device is None else model.to(device)
        self.data = data
        self.batch_size = batch_size
        self.epochs = epochs
        self.max_steps = max_steps
        self.accumulate = accumulate
        self.precision: Precision = precision
        self.seed = seed
        self.device = torch.device(device) if device is not None else _device_of(model)
        self.log_every = log_every
        self.evaluate_every = evaluate_every
        self.monitor: Monitor = monitor
        self.patience = patience
        self.checkpoints = checkpoints or CheckpointOptions()
        self.folder = None if folder is None else RunFolder(folder, self.checkpoints.keep)
        self.callbacks = list(callbacks)
        self.config = dict(config or {})
        self.verbose = verbose
        self.progress = state.Progress()
        autocast(precision, self.device)  # refuse a name before training
        dense = dense_parameters(model)
        self.dense_optimizer = dense_optimizer(dense, lr=dense_lr) if dense else None
        self._collections = fused_collections(model)
        self.last_epoch, self.last_step = epochs, max_steps
        # What is learned of the data's size later on does not change them, or a resumed run would have other rates.
        schedules = (dense_schedule or Schedule(), table_schedule or Schedule())
        self._schedules = tuple(schedule.within(self.total_steps) for schedule in schedules)
        self._base_rates = [float(group["lr"]) for group, _ in self._rates()]
        self._base_options = state.group_options(self.dense_optimizer)
        self._loss_scale = LossScale()
        self._fitted = False
        self._forward: Callable[..., Any] = torch.compile(self.model) if compile else self.model
        # Sums of the loss over samples: since the last log, and in this epoch.
        self.loss_sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    @property
    def steps_per_epoch(self) -> int | None:
        """None where the data set does not know its number of rows."""
        rows = self.data.num_rows("train") if "train" in self.data.splits() else None
        if rows is None:
            return None
        batches = -(-rows // self.batch_size)
        return -(-batches // self.accumulate)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, as far as they are known."""
        each = self.steps_per_epoch
        by_epochs = None if each is None else each * self.last_epoch
        return min((steps for steps in (by_epochs, self.last_step) if steps is not None), default=None)

    def fit(self, test: bool = False) -> FitResult:
        """Train to the end of the run; a second call trains for as many epochs, or steps, again.

        Args:
            test: evaluate the test rows at the end.

        Raises:
            ValueError: the loss is not finite; the data says so; or the folder holds another run.
            Interrupted: a signal asked to stop; what was done is saved. With a folder only.
            CheckpointError: one could not be written, and `on_checkpoint_error` is "stop".
        """
        if self._fitted:
            self.last_epoch = self.progress.epoch + self.epochs
            self.last_step = None if self.max_steps is None else self.progress.step + self.max_steps
            self.progress.ended = ""
        with ExitStack() as stack:
            request = StopRequest()
            if self.folder is not None:
                stack.enter_context(self.folder.lock())
                self._refuse_another_run(self.folder)
                self._mark_best_again(self.folder)
                json.dumps(self._manifest())  # what cannot be saved is refused before training
                self._tensors()
                request = stack.enter_context(stop_requests())
            result = Loop(self, Watchers(self._watchers()), request).run(test)
        self._fitted = True
        return result

    def step(self, batches: Sequence[Batch]) -> int:
        """One step on the batches' samples together; returns their number."""
        self._set_learning_rates()
        total = sum(len(batch) for batch in batches)
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad()
        if self.precision == "fp16":
            self._scaled_step(batches, total)
        else:
            with self._accumulating(len(batches) > 1):
                for batch in batches:
                    self._backward(batch, len(batch) / total)
            if self.dense_optimizer is not None:
                self.dense_optimizer.step()
        return total

    def evaluate(self, split: Split = "test") -> Metrics:
        """Metrics on the test rows, or on another split.

        Raises:
            ValueError: the data set has no such split, or a logit is NaN.
        """
        start = time.perf_counter()
        with self.data.open(split, self.batch_size, pin_memory=self.device.type == "cuda") as stream:
            logits, labels = predict(self.model, stream, self.device, self.precision, self._forward)
            skipped = stream.report.skipped
        metrics = binary_metrics(logits, labels, time.perf_counter() - start)
        return replace(metrics, num_skipped=skipped)

    def save(self) -> CheckpointSaved:
        """Write a checkpoint of this moment into the folder.

        Raises:
            ValueError: there is no folder.
            CheckpointError: it could not be written; the earlier ones are as they were.
        """
        if self.folder is None:
            raise ValueError("there is nowhere to save to: give the trainer a folder")
        check_errors(self.device)
        start = time.perf_counter()
        size = self.folder.checkpoints.save(self.progress.step, self._tensors(), self._manifest())
        path = self.folder.checkpoints.path(self.progress.step)
        return CheckpointSaved(self.progress.step, path, size, time.perf_counter() - start)

    def resume(self, checkpoint: str | Path = "auto") -> Path | None:
        """Go on from a checkpoint: model, optimizers, schedules, position in the data and generators.

        Args:
            checkpoint: a checkpoint's folder, or "auto" for the newest one in the trainer's folder. Later checkpoints
                than the one that is named go away when the next one is written.

        Returns:
            the checkpoint, or None if "auto" found none.

        Raises:
            ValueError, FileNotFoundError: it is damaged, or of another model, optimizer, data set or batch size; all
                differences are listed, and nothing has been changed then.
        """
        path = Path(checkpoint)
        if checkpoint == "auto":
            if self.folder is None:
                raise ValueError('resume("auto") looks into the trainer\'s folder: give it one')
            found = self.folder.checkpoints.latest()
            if found is None:
                return None
            path = found
        manifest = read_manifest(path)
        self._check_same_run(path, manifest["run"])
        try:
            progress = state.Progress.from_json(manifest["progress"])
            plain, options = manifest["optimizer"], manifest["options"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path / 'trainer.json'} is damaged ({error!r}); use another checkpoint") from error
        if self.folder is not None and self.folder.checkpoints.latest() is not None:
            own = self.folder.checkpoints.folder.resolve()
            if path.resolve().parent != own:
                raise ValueError(f"{self.folder.path} holds another run than {path}; choose another folder")
        tensors = self._tensors(optimizer=False)
        tensors |= state.optimizer_templates(self.model, self.dense_optimizer, stored_tensors(path))
        random = {name: tensors[name] for name in tensors if name.startswith("rng.")}
        load_tensors(path, tensors, ignore=("rng.cuda",))
        if self.dense_optimizer is not None:
            state.load_optimizer_state(self.model, self.dense_optimizer, tensors, plain)
        state.set_rng_tensors(random, self.device)
        state.set_rng_plain(manifest["rng"])
        self.progress = progress
        if not self._has_lost_patience():  # a run that was finished may have more to do now
            self.progress.ended = ""
        self._loss_scale.load_state_dict(manifest["loss_scale"])
        # What was changed while training is taken over; what the user has changed since is not taken back.
        if manifest["base_options"] == self._base_options:
            for group, saved in zip(_groups(self.dense_optimizer), options, strict=True):
                group.update(saved)
        if manifest["base_rates"] == self._base_rates:
            for (group, _), rate in zip(self._rates(), manifest["rates"], strict=True):
                group["lr"] = rate
        return path

    def current_rates(self) -> tuple[float | None, float | None]:
        """Learning rates of the dense part and of the fused tables; None where there are none."""
        dense = None if self.dense_optimizer is None else float(self.dense_optimizer.param_groups[0]["lr"])
        return dense, self._collections[0].current_learning_rate if self._collections else None

    def take_loss(self, index: int) -> float:
        """The sum of losses over samples since it was last taken: 0 for that of the logs, 1 for that of epochs."""
        value = float(self.loss_sums[index])
        self.loss_sums[index] = 0.0
        return value

    def _backward(self, batch: Batch, share: float, factor: float = 1.0) -> None:
        """`share` of a step's samples are in this batch; `factor` is the loss scale."""
        batch = batch.to(self.device, non_blocking=True)
        loss = F.binary_cross_entropy_with_logits(
            logits_of(self._forward, batch, self.precision, self.device), batch.labels
        )
        (loss if share * factor == 1.0 else loss * (share * factor)).backward()
        self.loss_sums.add_(loss.detach(), alpha=len(batch))

    def _scaled_step(self, batches: Sequence[Batch], total: int) -> None:
        """A step whose gradients are scaled, judged and only then applied, to all parameters or to none."""
        scale = self._loss_scale.factor
        try:
            with self._accumulating(True):
                for batch in batches:
                    self._backward(batch, len(batch) / total, scale)
                finite = [collection.scale_accumulated(1 / scale) for collection in self._collections]
                for gradient in self._dense_gradients():
                    finite.append(bool(gradient.mul_(1 / scale).isfinite().all()))  # noqa: PERF401 (for its effect)
                if not all(finite):
                    raise _Overflow
        except _Overflow:
            self._loss_scale.update(overflowed=True)
            return
        if self.dense_optimizer is not None:
            self.dense_optimizer.step()
        self._loss_scale.update(overflowed=False)

    def _dense_gradients(self) -> list[Tensor]:
        parameters = [parameter for group in _groups(self.dense_optimizer) for parameter in group["params"]]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    @contextmanager
    def _accumulating(self, several: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for collection in self._collections if several else ():
                stack.enter_context(collection.accumulate())
            yield

    def _rates(self) -> list[tuple[dict[str, Any], Schedule]]:
        """Every parameter group and its schedule; not kept, since loading an optimizer's state makes new groups."""
        dense, tables = self._schedules
        fused = [c.fused_optimizer for c in self._collections if c.fused_optimizer is not None]
        rates = [(group, dense) for group in _groups(self.dense_optimizer)]
        return rates + [(group, tables) for optimizer in fused for group in optimizer.param_groups]

    def _set_learning_rates(self) -> None:
        for base, (group, schedule) in zip(self._base_rates, self._rates(), strict=True):
            if not schedule.is_constant:
                group["lr"] = base * schedule.factor(self.progress.step)

    def _watchers(self) -> list[Callback]:
        watchers: list[Callback] = [make_display()] if self.verbose else []
        if self.folder is not None:
            watchers.append(RunLog(self.folder.log, resume_at_step=self.progress.step))
            watchers.append(Report(self.folder.report, self.folder.log))
        return watchers + self.callbacks

    def _has_lost_patience(self) -> bool:
        return self.patience is not None and self.progress.evaluations_since_best >= self.patience

    def _refuse_another_run(self, folder: RunFolder) -> None:
        newest = folder.checkpoints.latest()
        if self.progress.step == 0 and newest is not None:
            raise ValueError(
                f"{folder.path} holds a run with {newest.name}; resume it (--resume auto) or choose another folder"
            )

    def _mark_best_again(self, folder: RunFolder) -> None:
        """A process may have been killed after it had written its best checkpoint, before that was marked."""
        step = self.progress.best_step
        best = folder.checkpoints.best()
        marked = best is not None and best.name == f"best-{step}"
        if self.progress.best is not None and not marked and folder.checkpoints.path(step).is_dir():
            folder.checkpoints.mark_best(step)

    def _tensors(self, optimizer: bool = True) -> dict[str, Tensor]:
        own = state.optimizer_tensors(self.model, self.dense_optimizer) if optimizer else {}
        return {
            **state.model_tensors(self.model),
            **own,
            **state.rng_tensors(self.device),
            "trainer.loss_sums": self.loss_sums,
        }

    def _manifest(self) -> dict[str, Any]:
        return {
            "versions": versions(self.device),
            "run": self._run(),
            "progress": self.progress.to_json(),
            "base_rates": self._base_rates,
            "rates": [float(group["lr"]) for group, _ in self._rates()],
            "base_options": self._base_options,
            "options": state.group_options(self.dense_optimizer),
            "optimizer": state.optimizer_plain(self.model, self.dense_optimizer),
            "loss_scale": self._loss_scale.state_dict(),
            "rng": state.rng_plain(),
            "config": plain(self.config),
        }

    def _run(self) -> dict[str, Any]:
        """What must be the same for the bits of a run that never stopped."""
        optimizer = self.dense_optimizer
        return {
            "data": self.data.name,
            "encoding": self.data.encoding,
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "seed": self.seed,
            "dense_optimizer": None if optimizer is None else type(optimizer).__name__,
            "table_optimizers": [collection.optimizer.name for collection in self._collections if collection.optimizer],
        }

    def _check_same_run(self, path: Path, run: dict[str, Any]) -> None:
        here = self._run()
        different = [f"{name} was {run.get(name)!r}, is {here[name]!r}" for name in here if run.get(name) != here[name]]
        if different:
            raise ValueError(f"checkpoint {path} is of another run: {'; '.join(different)}")


class _Overflow(Exception):
    """A gradient was not finite under the present loss scale."""


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    return [] if optimizer is None else optimizer.param_groups


def fused_collections(model: nn.Module) -> list[EmbeddingBagCollection | EmbeddingCollection]:
    """The collections of a model that update their tables by themselves."""
    return [
        module
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection) and module.fused_optimizer is not None
    ]


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that no fused embedding collection updates by itself."""
    owned = {id(parameter) for module in fused_collections(model) for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in owned and parameter.requires_grad]


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
