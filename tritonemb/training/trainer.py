"""Trains, evaluates, saves and resumes a model, in one process or on several ranks together."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tritonemb.comm.output_exchange import EXACT, ExchangePrecision
from tritonemb.data.batch import Batch
from tritonemb.data.protocol import Data, Split
from tritonemb.offloading import close
from tritonemb.ops.registry import check_errors
from tritonemb.server.attach import AtMost, Servers, attach, staleness_bound
from tritonemb.training.callbacks import Callback, CallbackList, CheckpointSaved
from tritonemb.training.callbacks.console import make_display
from tritonemb.training.callbacks.jsonl import RunLog
from tritonemb.training.callbacks.report import HtmlReport
from tritonemb.training.checkpoint import RunFolder
from tritonemb.training.checkpoint.manager import CheckpointManager
from tritonemb.training.config import OffloadOptions, TrainerOptions
from tritonemb.training.loop import FitResult, Loop
from tritonemb.training.metrics import Metrics, evaluate, probabilities, score
from tritonemb.training.ranks import Ranks, StopRequest, group_of, on_rank_zero, stop_requests
from tritonemb.training.schedule import Schedule
from tritonemb.training.step import TrainStep
from tritonemb.training.train_state import DEPTH, Progress, TrainState, seed_rank


@dataclass(frozen=True, eq=False, repr=False)
class Trainer(TrainerOptions):
    """Trains `model(dense, sparse) -> logits [B]` on binary labels with the cross-entropy loss.

    Embedding collections with a fused optimizer update their tables themselves; every other parameter belongs to
    `dense_optimizer`. Batches are shuffled by (seed, epoch). The initial weights are the caller's; call
    `torch.manual_seed` before the model is made.

    With a `folder` a run outlives its process: checkpoints, a log and a report are kept there, SIGINT and SIGTERM end
    it after the running step, and `resume` continues, bitwise identical to a run that never stopped.

    On several ranks the model is a `tritonemb.HybridParallel`, and every rank makes a trainer with the same arguments.
    A step trains the ranks' batches as one, in the order of ranks; each rank reads its own shard of the data. Rank 0
    shows progress, and writes log and report. A signal to any rank ends all after the same step; a checkpoint is
    written by all, to a folder that all share, and read by any number of them.

    Args:
        model: on the device where it is to be trained, unless `device` is given.
        data: a `tritonemb.data.Dataset` or `ClickLog`, or anything with the methods of `tritonemb.data.protocol.Data`.
        dense_optimizer: called with the parameters and `lr=dense_lr`; a class of `torch.optim`, for example.
        device: where to train; the model is moved there.
        folder: where checkpoints, `log.jsonl` and `report.html` go.
        callbacks: see `Callback`.
        config: shown in the report, kept in the log.
        verbose: show progress.
        servers: embedding servers (`tritonemb.server`) for the tables whose placement is "server".
        staleness: of those tables: how many steps' updates a batch misses, exactly; `te.AtMost` so many; or None, and
            it is `prefetch_depth` that bounds them.
        server_exchange: in how many bits rows and gradients go to servers and back; all of them by default.
        offload: dense layers and the dense optimizer's states in host memory or on disk; the model is changed then.
        pipeline: prepare the next steps while one computes; False for a model that changes features before its lookups.

    All other options are those of `tritonemb.training.config.TrainerOptions` and of the classes that it joins.

    Attributes:
        dense_optimizer: the optimizer that was made; None where every parameter is in a fused table.
        state: what changes in a run, shared with its loop and its checkpoints.

    Raises:
        ValueError: options are out of range; `patience` or `evaluate_every` without validation rows; several ranks, and
            the model is no `tritonemb.HybridParallel`.
    """

    model: nn.Module
    data: Data
    _: KW_ONLY
    dense_optimizer: Any = torch.optim.Adam
    device: Any = None
    folder: str | Path | None = None
    callbacks: Sequence[Callback] = ()
    config: Mapping[str, Any] | None = None
    verbose: bool = True
    pipeline: bool = True
    servers: Servers | None = None
    staleness: int | AtMost | None = 0
    server_exchange: ExchangePrecision = EXACT
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    state: TrainState = field(init=False)
    run_folder: RunFolder | None = field(init=False)
    saving: CheckpointManager = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("evaluate_every", "patience"):
            if getattr(self, name) is not None and "validation" not in self.data.splits():
                raise ValueError(f"{name} needs validation rows, and data set {self.data.name!r} has none")
        ranks = Ranks(group_of(self.model), self.timeout)
        self.offload.check(ranks.size, isinstance(getattr(self.model, "module", None), FSDPModule), self.compile)
        model = self.model if self.device is None else self.model.to(self.device)
        sample_tensor = next(model.parameters(), None) if self.device is None else torch.empty(0, device=self.device)
        device = torch.device("cpu") if sample_tensor is None else sample_tensor.device  # with its index
        if self.servers is not None:
            attach(
                model, self.servers, self.staleness, accumulate=self.accumulate, group=ranks.control,
                exchange=self.server_exchange,
            )  # fmt: skip
        step = TrainStep(
            model, device, ranks, self.dense_optimizer, self.dense_lr, self.precision, self.compile, self.offload
        )
        config = dict(self.config or {})
        state = TrainState(model, device, self.data, self, config, step, Progress(), ranks, self.pipeline)
        bound = staleness_bound(self.staleness)
        if bound is None:
            bound = DEPTH if self.prefetch_depth is None else self.prefetch_depth
        state.servers, state.staleness = self.servers, bound
        # What is learned of the data's size later on does not change them, or a resumed run would have other rates.
        schedules = (self.dense_schedule or Schedule(), self.table_schedule or Schedule())
        step.schedule(*(schedule.within(state.total_steps) for schedule in schedules))
        options, path = self.checkpoints, self.folder
        folder = None if path is None else RunFolder(path, options.keep, options.checkpoint_incremental)
        saving = CheckpointManager(state, folder, options.checkpoint_async)
        # The options are frozen; what is made of them is set once.
        vars(self).update(
            device=device, dense_optimizer=step.dense_optimizer, state=state, run_folder=folder, saving=saving
        )

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self.state.progress

    def fit(self, test: bool = False) -> FitResult:
        """Train to the end of the run, and with `test` evaluate the test rows; again for as many epochs, or steps.

        Raises:
            ValueError: the loss is not finite; the data says so; or the folder holds another run.
            Interrupted: a signal asked to stop; what was done is saved. With a folder only.
            CheckpointError: the last one could not be written; or another one, and `on_checkpoint_error` is "stop".
            RankFailed: another rank has failed, is gone, or has not answered in time; says which.
        """
        state = self.state
        if state.fitted:
            state.last_epoch = state.progress.epoch + self.epochs
            state.last_step = None if self.max_steps is None else state.progress.step + self.max_steps
            state.progress.ended = ""
        with ExitStack() as stack:
            stack.enter_context(state.ranks.watched())
            if not state.begun and state.ranks.rank > 0:
                seed_rank(self.seed, state.ranks.rank)  # ranks that start alike draw random numbers of their own
            state.begun = True
            request, folder = StopRequest(), self.run_folder
            if folder is not None:
                on_rank_zero(state.ranks.control, lambda: self._lock(folder, stack))
                json.dumps(self.saving.manifest())  # what cannot be saved is an error before training
                self.saving.tensors()
                request = stack.enter_context(stop_requests())
            display_callbacks: list[Callback] = [make_display()] if self.verbose and state.ranks.is_first else []
            if folder is not None and state.ranks.is_first:
                display_callbacks += [RunLog(folder.log, resume=True), HtmlReport(folder.report, folder.log)]
            path = None if folder is None else folder.path
            result = Loop(state, self.saving, path, CallbackList([*display_callbacks, *self.callbacks]), request).run(
                test
            )
        state.fitted = True
        return result

    def step(self, batches: Sequence[Batch]) -> int:
        """One step on the samples of the batches of all ranks together, as many on each; returns their number."""
        ranks = self.state.ranks
        total = int(ranks.sum(torch.tensor(sum(len(batch) for batch in batches))))
        self.state.step(self.progress.step, batches, [len(batch) * ranks.size / total for batch in batches])
        return total

    def evaluate(self, split: Split = "test") -> Metrics:
        """Metrics on the test rows, or on another split; ValueError if there are none, or a logit is NaN."""
        return evaluate(self.state, split)

    def predict(self, split: Split = "test") -> Tensor:
        """Click probabilities float32 `[N]` of a split's rows in their order; on several ranks those of all shards, on
        the first rank. ValueError if there are none, or a logit is NaN."""
        with self.state.ranks.watched():
            logits = score(self.state, split)[0]
        if wrong := int(logits.isnan().sum()):
            raise ValueError(f"{wrong:,} logits of the {split} rows are NaN: training has diverged")
        return probabilities(logits)

    def save(self) -> CheckpointSaved:
        """Write a checkpoint; ValueError if there is no folder, CheckpointError if it cannot be written."""
        if self.run_folder is None:
            raise ValueError("there is nowhere to save to: give the trainer a folder")
        check_errors(self.state.device)
        with self.state.ranks.watched():
            return self.saving.save()

    def resume(self, checkpoint: str | Path = "auto") -> Path | None:
        """Resume from a checkpoint: model, optimizers, schedules, position in the data and generators. ValueError or
        FileNotFoundError if it is damaged, or of another model, optimizer, data set or batch size; it lists all
        differences, and nothing has been changed then.

        Args:
            checkpoint: a checkpoint's folder, or "auto" for the newest one in the trainer's folder, if there is one.
                Later checkpoints than this are removed when the next one is written.
        """
        with self.state.ranks.watched():
            path = self.saving.restore(checkpoint)
        if path is not None:
            self.state.begun = True
            if self.patience is None or self.progress.evaluations_since_best < self.patience:
                self.progress.ended = ""  # a run that was finished may have more to do now
        return path

    def close(self) -> None:
        """Remove the swap file of what was offloaded to disk; an offloaded model cannot be used after."""
        if self.offload.moved:
            close(self.model)

    def _lock(self, folder: RunFolder, stack: ExitStack) -> None:
        stack.enter_context(folder.lock())
        newest = folder.checkpoints.latest()
        if self.progress.step == 0 and newest is not None:
            raise ValueError(
                f"{folder.path} holds a run with {newest.name}; resume it (--resume auto) or choose another folder"
            )
        self.saving.mark_best_again()
