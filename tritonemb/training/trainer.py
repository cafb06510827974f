"""`Trainer`: training, evaluation, checkpoints and resume, in one process or on several ranks."""

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
from tritonemb.data import Batch, Data, Split
from tritonemb.offloading import close
from tritonemb.offloading.options import OffloadOptions
from tritonemb.ops.registry import check_errors
from tritonemb.server.attach import AtMost, Servers, attach, staleness_bound
from tritonemb.training.callbacks import Callback, CallbackList, CheckpointSaved
from tritonemb.training.callbacks.console import make_display
from tritonemb.training.callbacks.jsonl import RunLog
from tritonemb.training.callbacks.report import HtmlReport
from tritonemb.training.checkpoint import RunFolder
from tritonemb.training.checkpoint.manager import CheckpointManager
from tritonemb.training.config import TrainerOptions
from tritonemb.training.loop import FitResult, Loop
from tritonemb.training.metrics import Metrics, check_group_by, evaluate, probabilities, score
from tritonemb.training.model import fused_modules, unfused_tables
from tritonemb.training.ranks import Ranks, StopRequest, group_of, on_rank_zero
from tritonemb.training.schedule import Schedule, label_scales, label_totals
from tritonemb.training.step import TrainStep
from tritonemb.training.train_state import DEPTH, Progress, TrainState, seed_rank


def adam(parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Adam:
    """Create the default dense optimizer. One kernel updates all parameters, in the order of their memory."""
    fused = all(parameter.is_contiguous() and parameter.is_floating_point() for parameter in parameters)
    return torch.optim.Adam(parameters, lr, fused=True if fused else None)


def _check(model: object, data: Any, options: TrainerOptions) -> None:
    """Raise TypeError for other objects than a model and data, ValueError for options that need more than data have."""
    if not isinstance(model, nn.Module) or not hasattr(data, "splits"):
        kinds = f"{type(model).__name__} and {type(data).__name__}"
        raise TypeError(f"Trainer(model, data) takes a torch.nn.Module and a data set as of te.data, got {kinds}")
    check_group_by(options.group_by, data.features)
    if options.fresh_tables and ((paths := unfused_tables(model)) or not fused_modules(model)):
        text = "has no fused optimizer, and stays as it is; construct it with optimizer=, or freeze it"
        raise ValueError(f"fresh_tables initializes tables anew, but {[*map(repr, paths), 'the model'][0]} {text}")
    for name in ("evaluate_every", "patience", "monitor"):
        if getattr(options, name) != getattr(TrainerOptions, name) and "validation" not in data.splits():
            remedy = f"hold some out, as by validation_share, or omit {name}"
            raise ValueError(f"{name} needs validation rows, and data set {data.name!r} has none; {remedy}")


@dataclass(frozen=True, eq=False, repr=False)
class Trainer(TrainerOptions):
    """Trains `model(dense, sparse) -> logits [B]`, or `[B, L]` of L labels, with the binary cross-entropy loss.

    Embedding collections with a fused optimizer update their tables themselves; `dense_optimizer` has every other
    parameter. Batches are shuffled by (seed, epoch). Initial weights are the caller's: seed before building.

    With a `folder` a run survives its process: checkpoints, a log and a report are written to it, SIGINT and SIGTERM
    end training after the current step, and `resume` continues, bitwise identical to an uninterrupted run.

    On several ranks the model is a `tritonemb.HybridParallel`, and every rank creates a trainer with equal arguments.
    A step trains on the batches of all ranks as one batch, in rank order; each rank reads its shard of the data. Rank 0
    displays progress, and writes log and report. A signal to any rank stops all ranks after the same step. All ranks
    write a checkpoint, to a folder on a shared file system; any number of ranks can read it.

    Args:
        model: model on its training device, or on any device with `device`.
        data: `tritonemb.data.Dataset` or `ClickLog`, or an object with the methods of `tritonemb.data.protocol.Data`.
        dense_optimizer: class or function called with the parameters and `lr=dense_lr`, such as `torch.optim.AdamW`; by
            default `torch.optim.Adam`, with `fused=True` if all parameters are contiguous and not complex.
        device: device to train on; the model is moved to it.
        folder: folder of checkpoints, `log.jsonl` and `report.html`; a `RunFolder` may be locked already.
        callbacks: see `Callback`.
        config: options to show in log and report.
        verbose: display progress.
        servers: embedding servers (`tritonemb.server`) for the tables with placement "server".
        staleness: number of steps whose updates a batch misses on these tables: exactly, or at most with `te.AtMost`;
            None for no bound but `prefetch_depth`.
        server_exchange: codecs of pulled rows and pushed gradients; fp32 by default.
        offload: offload of dense layers and of the dense optimizer's states; modifies the model.
        pipeline: prepare the next steps during a step; False for a model that changes features before its lookups.

    For all other options see `tritonemb.training.config.TrainerOptions` and its base classes.

    Attributes:
        dense_optimizer: the created optimizer; None if every parameter is in a fused table.
        state: state of the run, shared with its loop and its checkpoints.

    Raises:
        ValueError: an option is out of range; `patience`, `evaluate_every` or `monitor` without validation rows;
            several ranks and a model other than `tritonemb.HybridParallel`.
    """

    model: nn.Module
    data: Data
    _: KW_ONLY
    dense_optimizer: Any = adam
    device: Any = None
    folder: str | Path | RunFolder | None = None
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
    checkpointer: CheckpointManager = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.model, self.data, self)

        # Ranks, model, device, servers.
        ranks = Ranks(group_of(self.model), self.timeout)
        self.offload.check(ranks.size, isinstance(getattr(self.model, "module", None), FSDPModule), self.compile)
        model = self.model if self.device is None else self.model.to(self.device)
        parameter = next(model.parameters(), torch.empty(0))
        device = (parameter if self.device is None else torch.empty(0, device=self.device)).device  # with its index
        if self.servers is not None:
            attach(
                model, self.servers, self.staleness, accumulate=self.accumulate, group=ranks.control,
                exchange=self.server_exchange,
            )  # fmt: skip

        # Train step and state.
        step = TrainStep(model, device, ranks, self, self.dense_optimizer, self.offload)
        config = dict(self.config or {})
        state = TrainState(model, device, self.data, self, config, step, Progress(), ranks, self.pipeline)
        if (bound := staleness_bound(self.staleness)) is None:
            bound = DEPTH if self.prefetch_depth is None else self.prefetch_depth
        state.servers, state.staleness = self.servers, bound

        # Schedules use the data's size as known now: if it changed them later, a resumed run would have other rates.
        schedules = (self.dense_schedule or Schedule(), self.table_schedule or Schedule())
        step.schedule(*(schedule.within(state.total_steps) for schedule in schedules))
        path, opts = self.folder, self.checkpoints
        folder = path if isinstance(path, RunFolder | None) else RunFolder(path, opts.keep, opts.checkpoint_incremental)
        checkpointer = CheckpointManager(state, folder, opts.checkpoint_async)
        # The dataclass is frozen: set derived attributes directly.
        derived = {"dense_optimizer": step.dense_optimizer, "run_folder": folder, "checkpointer": checkpointer}
        vars(self).update(device=device, state=state, **derived)

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def fit(self, test: bool = False) -> FitResult:
        """Train to the end of the run, in later calls for `epochs` or `max_steps` more; with `test` evaluate test rows.

        Raises:
            ValueError: the loss is not finite; the data raised it; the folder holds another run; or a schedule has
                decayed to 0 in an earlier call.
            Interrupted: a signal stopped training, after a checkpoint; with a folder only.
            CheckpointError: the last checkpoint could not be written; with `on_checkpoint_error="stop"` any checkpoint.
            RankFailed: another rank has failed, or has not answered in time; the message names it.
        """
        # Extend a finished run.
        state = self.state
        if state.fitted:
            state.step.check_rates(state.progress.step)
            state.last_epoch = state.progress.epoch + self.epochs
            state.last_step = None if self.max_steps is None else state.progress.step + self.max_steps
            state.progress.ended = ""
        with ExitStack() as stack:
            stack.enter_context(state.ranks.monitor_failures())
            if not state.seeded and state.ranks.rank > 0:
                seed_rank(self.seed, state.ranks.rank)  # different random numbers on each rank
            state.seeded = True

            # Lock the folder, and raise before training if the state cannot be saved.
            request, folder = StopRequest(), self.run_folder
            if folder is not None:
                on_rank_zero(state.ranks.control, lambda: self._lock(folder, stack))
                json.dumps(self.checkpointer.manifest())
                self.checkpointer.tensors()
                stack.enter_context(request)

            # Display, log and report come before the user's callbacks.
            callbacks: list[Callback] = [make_display()] if self.verbose and state.ranks.is_first else []
            if folder is not None and state.ranks.is_first:
                callbacks += [RunLog(folder.log, resume=True), HtmlReport(folder.report, folder.log)]
            for callback in self.callbacks:
                callback.model, callback.data = state.model, state.data
            loop = Loop(state, self.checkpointer, folder, CallbackList([*callbacks, *self.callbacks]), request)
            result = loop.run(test)
        state.fitted = True
        return result

    def step(self, batches: Sequence[Batch]) -> int:
        """Train the next step on the batches of all ranks, equally many on each; return the samples. Collective."""
        ranks, numbers = self.state.ranks, (sum(map(len, batches)), *label_totals(batches, self.state.num_totals))
        total, *totals = (ranks.sum(torch.tensor(number, dtype=torch.float64)) for number in numbers)
        weights = [len(batch) * ranks.size / max(total, 1.0) for batch in batches]
        self.state.step(self.progress.step, batches, weights, label_scales(totals, total, self.device))
        self.progress.advance(int(total), self.progress.position)
        return int(total)

    def evaluate(self, split: Split = "test") -> Metrics:
        """Evaluate the test rows or another split; raise ValueError if the split is missing, or a logit is NaN."""
        return evaluate(self.state, split)

    def predict(self, split: Split = "test") -> Tensor:
        """Predict click probabilities float32 `[N]`, or `[N, L]`, of a split in row order; on several ranks, rank
        zero reads all rows and returns them. Raise ValueError if the split is missing, or a logit is NaN."""
        with self.state.ranks.monitor_failures():
            logits = score(self.state, split, shards=1)[0]
            if num_nan := self.state.ranks.max(int(logits.isnan().sum())):
                raise ValueError(f"{num_nan:,} logits of the {split} rows are NaN: training has diverged")
        return probabilities(logits)

    def save(self) -> CheckpointSaved:
        """Write a checkpoint; ValueError without a folder, CheckpointError if it cannot be written."""
        if self.run_folder is None:
            raise ValueError("save() needs a folder: pass folder= to the trainer")
        check_errors(self.state.device)
        with self.state.ranks.monitor_failures():
            return self.checkpointer.save()

    def resume(self, checkpoint: str | Path = "auto") -> Path | None:
        """Resume from a checkpoint: model, optimizers, schedules, position in the data, generators. Return its path.

        Raise ValueError or FileNotFoundError if it is missing or damaged, or of another model, optimizer, data set or
        batch size; the message lists all differences, and nothing was changed.

        Args:
            checkpoint: folder of a checkpoint, or "auto" for the newest one in the trainer's folder (returns None if
                there is none). Later checkpoints are removed before the first step.
        """
        with self.state.ranks.monitor_failures():
            path = self.checkpointer.restore(checkpoint)
        if path is not None:
            self.state.seeded = True
            if self.patience is None or self.progress.evaluations_since_best < self.patience:
                self.progress.ended = ""  # a finished run continues if epochs or max_steps have been raised
        return path

    def close(self) -> None:
        """Remove the swap file of offload to disk; an offloaded model cannot be used afterwards."""
        if self.offload.moved:
            close(self.model)

    def _lock(self, folder: RunFolder, stack: ExitStack) -> None:
        stack.enter_context(folder.lock())
        newest, best = folder.checkpoints.latest(), folder.checkpoints.best()
        if self.progress.step == 0 and (checkpoint := newest or best) is not None:
            option = "auto" if newest is not None else checkpoint
            text = f"{folder.path} holds a run with {checkpoint.name}; resume it (--resume {option})"
            raise ValueError(f"{text} or choose another folder")
