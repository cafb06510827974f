"""The training loop of one process: fit, evaluate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tritonemb.data.batch import Batch
from tritonemb.data.dataset import Dataset, Split
from tritonemb.nn import EmbeddingBagCollection, EmbeddingCollection
from tritonemb.nn.errors import check_errors
from tritonemb.training.metrics import Metrics, binary_metrics
from tritonemb.training.progress import Progress, show_progress


@dataclass(frozen=True)
class FitResult:
    """What a fit did.

    Args:
        losses: mean training loss of each epoch.
        num_samples: samples trained on, all epochs together.
        seconds: wall time of the fit.
        samples_per_second: without the first step, which compiles and warms up.
    """

    losses: tuple[float, ...]
    num_samples: int
    seconds: float
    samples_per_second: float


class Trainer:
    """Trains `model(dense, sparse) -> logits [B]` on binary labels with the cross-entropy loss.

    Embedding collections with a fused optimizer update their tables themselves; every other parameter belongs to
    `dense_optimizer`. Batches are shuffled by (seed, epoch): the same seed gives the same batches. The initial weights
    are the caller's; seed them with `torch.manual_seed` before the model is made.

    Args:
        model: on the device where it is to be trained, unless `device` is given.
        data: a `tritonemb.data.Dataset`.
        batch_size: samples a step; the last step of an epoch may have fewer.
        dense_optimizer: called with the parameters and `lr=dense_lr`; a class of `torch.optim`, for example.
        device: where to train; the model is moved there.
        compile: run the model through `torch.compile`.
        verbose: show progress.

    Raises:
        ValueError: for a batch size or a number of epochs below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        *,
        batch_size: int = 1024,
        epochs: int = 1,
        dense_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        dense_lr: float = 1e-3,
        seed: int = 0,
        device: torch.device | str | None = None,
        compile: bool = False,
        verbose: bool = True,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("epochs", epochs)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.model = model if device is None else model.to(device)
        self.data = data
        self.batch_size = batch_size
        self.epochs = epochs
        self.seed = seed
        self.device = torch.device(device) if device is not None else _device_of(model)
        self.verbose = verbose
        self._epochs_done = 0
        dense = dense_parameters(model)
        self.dense_optimizer = dense_optimizer(dense, lr=dense_lr) if dense else None
        self._forward: Callable[..., Any] = torch.compile(self.model) if compile else self.model

    def fit(self) -> FitResult:
        """Train for the given number of epochs; a second call goes on from where the first one ended.

        Raises:
            ValueError: the loss of an epoch is not finite.
        """
        num_samples = len(self.data.train) * self.epochs
        losses, clock = [], _Clock()
        with show_progress(num_samples, self.verbose) as progress:
            for number in range(1, self.epochs + 1):
                loss = self._fit_epoch(self._epochs_done, clock, progress)
                check_errors(self.device)
                self._epochs_done += 1
                if not math.isfinite(loss):
                    raise ValueError(f"the training loss is {loss} in epoch {number}; lower the learning rates")
                losses.append(loss)
                progress.say(f"epoch {number}/{self.epochs}: training loss {loss:.4f}{self._validated()}")
        return FitResult(tuple(losses), num_samples, clock.seconds, clock.samples_per_second)

    def evaluate(self, split: Split = "test") -> Metrics:
        """Metrics on the test rows, or on another split.

        Raises:
            ValueError: the data set has no such split, or a logit is NaN.
        """
        was_training = self.model.training
        self.model.eval()
        logits, labels = [], []
        start = time.perf_counter()
        with torch.no_grad():
            for batch in self.data.batches(split, self.batch_size):
                logits.append(self._logits(batch.to(self.device)))
                labels.append(batch.labels)
        check_errors(self.device)
        all_logits = torch.cat(logits).cpu()
        seconds = time.perf_counter() - start
        self.model.train(was_training)
        return binary_metrics(all_logits, torch.cat(labels), seconds)

    def _fit_epoch(self, epoch: int, clock: _Clock, progress: Progress) -> float:
        self.model.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        clock.start()
        for batch in self.data.train_batches(self.batch_size, self.seed, epoch):
            loss = self._step(batch.to(self.device, non_blocking=True))
            total += loss.double() * len(batch)
            clock.step(len(batch))
            progress.advance(len(batch), loss)
        mean = float(total) / len(self.data.train)
        clock.stop()
        return mean

    def _step(self, batch: Batch) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(self._logits(batch), batch.labels)
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad()
        loss.backward()
        if self.dense_optimizer is not None:
            self.dense_optimizer.step()
        return loss.detach()

    def _logits(self, batch: Batch) -> Tensor:
        logits: Tensor = self._forward(batch.dense, batch.sparse)
        if logits.shape != batch.labels.shape:
            raise ValueError(f"the model must return logits [{len(batch)}], got shape {list(logits.shape)}")
        return logits

    def _validated(self) -> str:
        if self.data.validation is None or not self.verbose:
            return ""
        metrics = self.evaluate("validation")
        return f", validation AUC {metrics.auc:.4f}, log loss {metrics.log_loss:.4f}"


class _Clock:
    """Time of the training steps, validation left out; the very first step counts as warm-up."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._samples = 0
        self._warm_up: tuple[float, int] | None = None
        self._started = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def step(self, num_samples: int) -> None:
        self._samples += num_samples
        if self._warm_up is None:
            self._warm_up = (time.perf_counter() - self._started, num_samples)

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._started

    @property
    def samples_per_second(self) -> float:
        seconds, samples = self._warm_up or (0.0, 0)
        if self._samples == samples:  # a single step: nothing but warm-up was timed
            return samples / self.seconds
        return (self._samples - samples) / (self.seconds - seconds)


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that no fused embedding collection updates by itself."""
    owned = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection) and module.fused_optimizer is not None
        for parameter in module.parameters()
    }
    return [parameter for parameter in model.parameters() if id(parameter) not in owned and parameter.requires_grad]


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
