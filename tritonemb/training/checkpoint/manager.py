"""A run's state to a checkpoint and back: model, optimizers, progress, position in the data, generators."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritonemb.training import train_state
from tritonemb.training.callbacks import CheckpointSaved
from tritonemb.training.checkpoint.async_save import AsyncSave, WrittenCheckpoint
from tritonemb.training.checkpoint.dcp import load_tensors, read_manifest, stored_tensors
from tritonemb.training.checkpoint.folder import RunFolder
from tritonemb.training.config import plain
from tritonemb.training.doctor import versions
from tritonemb.training.metrics import caches_of


class CheckpointManager:
    """Checkpoints of a run in its folder; all ranks call each method together.

    Args:
        state: of the run, which a checkpoint holds and restores.
        folder: None to read only.
        asynchronous: write in a thread, while training goes on.
    """

    def __init__(self, state: train_state.TrainState, folder: RunFolder | None, asynchronous: bool) -> None:
        self._state, self._folder = state, folder
        self._control = state.ranks.control
        self._async = AsyncSave(folder.checkpoints, self._control) if folder is not None and asynchronous else None

    def save(self, best: bool = False) -> CheckpointSaved:
        """Write a checkpoint of this moment, and mark it if it is the best."""
        assert self._folder is not None
        self.finish()
        start, step = time.perf_counter(), self._state.progress.step
        size = self._folder.checkpoints.save(step, self.tensors(), self.manifest(), self._control, best)
        return self._saved(WrittenCheckpoint(step, size, 0.0, time.perf_counter() - start))

    def start(self, best: bool) -> CheckpointSaved | None:
        """Write a checkpoint of this moment, in a thread if asynchronous; what has been written since the last call.

        Raises:
            CheckpointError: this one could not be written, or the one that was being written.
        """
        if self._async is None:
            return self.save(best)
        written = self._async.start(self._state.progress.step, self.tensors(), self.manifest(), best)
        return None if written is None else self._saved(written)

    def finish(self) -> CheckpointSaved | None:
        """Wait for what is being written.

        Raises:
            CheckpointError: it could not be written.
        """
        written = None if self._async is None else self._async.wait()
        return None if written is None else self._saved(written)

    def tensors(self) -> dict[str, Tensor]:
        """All that is saved as tensors. Collective."""
        state, ranks = self._state, self._state.ranks
        if caches_of(state.model):
            state.settle()  # prefetched rows are written back, or not, whenever this is done
        return {
            **train_state.model_tensors(state.model),
            **train_state.optimizer_tensors(state.model, state.step.dense_optimizer),
            **train_state.rng_tensors(state.device, ranks.rank if ranks.size > 1 else None),
            "trainer.loss_sums": state.step.all_loss_sums(),
        }

    def manifest(self) -> dict[str, Any]:
        """All else, for JSON. Collective."""
        state = self._state
        position = state.merged_position()
        return {
            "versions": versions(state.device),
            "run": self._run(),
            "progress": state.progress.to_json() | {"position": position},
            **state.step.to_json(),
            "optimizer": train_state.optimizer_plain(state.model, state.step.dense_optimizer),
            **train_state.rng_manifest(state.ranks.gather(train_state.rng_plain())),
            "config": plain(state.config),
        }

    def restore(self, checkpoint: str | Path) -> Path | None:
        """See `Trainer.resume`. Collective."""
        state, step = self._state, self._state.step
        self.finish()
        newest = None if self._folder is None else self._folder.checkpoints.latest(self._control)
        if checkpoint == "auto" and self._folder is None:
            raise ValueError('resume("auto") looks into the trainer\'s folder: give it one')
        if checkpoint == "auto" and newest is None:
            return None
        path = newest if checkpoint == "auto" and newest is not None else Path(checkpoint)
        manifest = read_manifest(path, self._control)
        self._check_same_run(path, manifest["run"])
        try:
            progress = train_state.Progress.from_json(manifest["progress"])
            options = {name: manifest[name] for name in (*step.to_json(), "optimizer", "rng")}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path / 'trainer.json'} is damaged ({error!r}); use another checkpoint") from error
        if self._folder is not None and newest is not None and path.resolve().parent != newest.resolve().parent:
            raise ValueError(f"{self._folder.path} holds another run than {path}; choose another folder")
        stored = stored_tensors(path, self._control)
        random = train_state.rng_templates(stored, state.ranks.rank, state.device)
        tensors = train_state.model_tensors(state.model) | random
        tensors |= train_state.optimizer_templates(state.model, state.step.dense_optimizer, stored)
        entry = stored.get("trainer.loss_sums")
        sums = torch.zeros(2 if entry is None else entry.size, dtype=torch.float64)
        load_tensors(path, tensors | {"trainer.loss_sums": sums}, ignore=("rng.",), group=self._control)
        train_state.read_again(state.model)
        if state.step.dense_optimizer is not None:
            train_state.load_optimizer_state(state.model, state.step.dense_optimizer, tensors, options["optimizer"])
        step.load_loss_sums(sums)
        step.load_json(options)
        train_state.set_rng(random, manifest, state.options.seed, state.ranks.rank, state.device)
        state.progress = replace(progress, position=state.own_position(progress.position))
        return path

    def mark_best_again(self) -> None:
        """Mark the best checkpoint, where a process was killed after it had written it and before it was marked.

        For rank 0 alone.
        """
        assert self._folder is not None
        progress, checkpoints = self._state.progress, self._folder.checkpoints
        best = checkpoints.best()
        marked = best is not None and best.name == f"best-{progress.best_step}"
        if progress.best is not None and not marked and checkpoints.path(progress.best_step).is_dir():
            checkpoints.mark_best(progress.best_step)

    def _saved(self, written: WrittenCheckpoint) -> CheckpointSaved:
        assert self._folder is not None
        return CheckpointSaved(
            written.step, self._folder.checkpoints.path(written.step), written.size, written.seconds
        )  # fmt: skip

    def _run(self) -> dict[str, Any]:
        """What must be the same for a bitwise identical run."""
        state, optimizer = self._state, self._state.step.dense_optimizer
        return {
            "data": state.data.name,
            "encoding": state.data.encoding,
            "batch_size": state.options.batch_size,
            "accumulate": state.options.accumulate,
            "seed": state.options.seed,
            "dense_optimizer": None if optimizer is None else type(optimizer).__name__,
            "table_optimizers": [c.optimizer.name for c in state.step.collections if c.optimizer],
        }

    def _check_same_run(self, path: Path, run: dict[str, Any]) -> None:
        here = self._run()
        different = [f"{name} was {run.get(name)!r}, is {here[name]!r}" for name in here if run.get(name) != here[name]]
        if different:
            raise ValueError(f"checkpoint {path} is of another run: {'; '.join(different)}")
