"""A trainer's state to a checkpoint and back: model, optimizers, progress, position in the data, generators."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritonemb.training import state
from tritonemb.training.callbacks import CheckpointSaved
from tritonemb.training.checkpoint import AsyncSave, Saved, load_tensors, read_manifest, stored_tensors
from tritonemb.training.metrics import caches_of
from tritonemb.training.run_folder import RunFolder
from tritonemb.training.toml import plain
from tritonemb.training.versions import versions

if TYPE_CHECKING:
    from tritonemb.training.trainer import Trainer


class Saving:
    """Checkpoints of a trainer in its folder; all ranks call each method together.

    Args:
        folder: None to read only.
        asynchronous: write in a thread, while training goes on.
    """

    def __init__(self, trainer: Trainer, folder: RunFolder | None, asynchronous: bool) -> None:
        self._trainer, self._folder = trainer, folder
        self._control = trainer.parallel.control
        self._writer: AsyncSave | None = None
        if folder is not None and asynchronous:
            self._writer = AsyncSave(folder.checkpoints, self._control)

    def save(self) -> CheckpointSaved:
        """Write a checkpoint of this moment."""
        assert self._folder is not None
        self.finish()
        start, step = time.perf_counter(), self._trainer.progress.step
        size = self._folder.checkpoints.save(step, self.tensors(), self.manifest(), self._control)
        return self._saved(step, size, time.perf_counter() - start)

    def start(self, best: bool) -> CheckpointSaved | None:
        """Write a checkpoint of this moment and mark it if it is the best; what has been written since the last call.

        Raises:
            CheckpointError: this one could not be written, or the one that was being written.
        """
        assert self._folder is not None
        step = self._trainer.progress.step
        if self._writer is not None:
            return self._of(self._writer.start(step, self.tensors(), self.manifest(), best))
        saved = self.save()
        if best:
            self._folder.checkpoints.mark_best(step, self._control)
        return saved

    def finish(self) -> CheckpointSaved | None:
        """Wait for what is being written.

        Raises:
            CheckpointError: it could not be written.
        """
        return None if self._writer is None else self._of(self._writer.wait())

    def tensors(self) -> dict[str, Tensor]:
        """All that is saved as tensors. Collective."""
        trainer, parallel = self._trainer, self._trainer.parallel
        if caches_of(trainer.model):
            trainer.settle()  # rows that are on their way are written back, or not, whenever this is done
        return {
            **state.model_tensors(trainer.model),
            **state.optimizer_tensors(trainer.model, trainer.dense_optimizer),
            **state.rng_tensors(trainer.device, parallel.rank if parallel.size > 1 else None),
            "trainer.loss_sums": trainer.stepper.all_loss_sums(),
        }

    def manifest(self) -> dict[str, Any]:
        """All else, for JSON. Collective."""
        trainer = self._trainer
        position = trainer.reading.merged(trainer.progress.position)
        return {
            "versions": versions(trainer.device),
            "run": self._run(),
            "progress": trainer.progress.to_json() | {"position": position},
            **trainer.stepper.to_json(),
            "optimizer": state.optimizer_plain(trainer.model, trainer.dense_optimizer),
            **state.rng_manifest(trainer.parallel.gather(state.rng_plain())),
            "config": plain(trainer.config),
        }

    def restore(self, checkpoint: str | Path) -> Path | None:
        """See `Trainer.resume`. Collective."""
        trainer, stepper = self._trainer, self._trainer.stepper
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
            progress = state.Progress.from_json(manifest["progress"])
            options = {name: manifest[name] for name in (*stepper.to_json(), "optimizer", "rng")}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path / 'trainer.json'} is damaged ({error!r}); use another checkpoint") from error
        if self._folder is not None and newest is not None and path.resolve().parent != newest.resolve().parent:
            raise ValueError(f"{self._folder.path} holds another run than {path}; choose another folder")
        stored = stored_tensors(path, self._control)
        random = state.rng_templates(stored, trainer.parallel.rank, trainer.device)
        tensors = state.model_tensors(trainer.model) | random
        tensors |= state.optimizer_templates(trainer.model, trainer.dense_optimizer, stored)
        entry = stored.get("trainer.loss_sums")
        sums = torch.zeros(2 if entry is None else entry.size, dtype=torch.float64)
        load_tensors(path, tensors | {"trainer.loss_sums": sums}, ignore=("rng.",), group=self._control)
        state.read_again(trainer.model)
        if trainer.dense_optimizer is not None:
            state.load_optimizer_state(trainer.model, trainer.dense_optimizer, tensors, options["optimizer"])
        stepper.load_loss_sums(sums)
        stepper.load_json(options)
        state.set_rng(random, manifest, trainer.seed, trainer.parallel.rank, trainer.device)
        trainer.progress = replace(progress, position=trainer.reading.own(progress.position))
        return path

    def mark_best_again(self) -> None:
        """A process may have been killed after it had written its best checkpoint, before that was marked.

        For rank 0 alone.
        """
        assert self._folder is not None
        progress, checkpoints = self._trainer.progress, self._folder.checkpoints
        best = checkpoints.best()
        marked = best is not None and best.name == f"best-{progress.best_step}"
        if progress.best is not None and not marked and checkpoints.path(progress.best_step).is_dir():
            checkpoints.mark_best(progress.best_step)

    def _of(self, saved: Saved | None) -> CheckpointSaved | None:
        return None if saved is None else self._saved(saved.step, saved.size, saved.seconds)

    def _saved(self, step: int, size: int, seconds: float) -> CheckpointSaved:
        assert self._folder is not None
        return CheckpointSaved(step, self._folder.checkpoints.path(step), size, seconds)

    def _run(self) -> dict[str, Any]:
        """What must be the same for the bits of a run that never stopped."""
        trainer, optimizer = self._trainer, self._trainer.dense_optimizer
        collections = trainer.stepper.collections
        return {
            "data": trainer.data.name,
            "encoding": trainer.data.encoding,
            "batch_size": trainer.batch_size,
            "accumulate": trainer.accumulate,
            "seed": trainer.seed,
            "dense_optimizer": None if optimizer is None else type(optimizer).__name__,
            "table_optimizers": [collection.optimizer.name for collection in collections if collection.optimizer],
        }

    def _check_same_run(self, path: Path, run: dict[str, Any]) -> None:
        here = self._run()
        different = [f"{name} was {run.get(name)!r}, is {here[name]!r}" for name in here if run.get(name) != here[name]]
        if different:
            raise ValueError(f"checkpoint {path} is of another run: {'; '.join(different)}")
