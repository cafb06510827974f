"""The folder of a run and its checkpoints: written aside and renamed, so that whatever stands there is whole.

A checkpoint is a folder: the tensors in the format of `torch.distributed.checkpoint` (`model.<key of state_dict>`,
`optimizer.<parameter>.<state>`, `rng.<device>`), the files of tables on disk, and `trainer.json`, which holds all else,
and sizes and checksums of the files.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from tritonemb.comm.group import RankGroup
from tritonemb.storage import checkpoint as files
from tritonemb.storage.checkpoint import FORMAT, MANIFEST
from tritonemb.storage.io import allocated, sync
from tritonemb.tables.server_table import TableService
from tritonemb.training.callbacks import CheckpointSaved
from tritonemb.training.checkpoint.writer import CheckpointWriter, Manifest, RankFiles, Tensors
from tritonemb.training.ranks import CheckpointError, on_all_ranks, on_rank_zero
from tritonemb.utils import atomic_write, seal

# A half-written checkpoint; a whole one that a new one of the same name is to replace; a half-removed one.
WRITING, REPLACED, DROPPED = ".writing-", ".replaced-", ".dropped-"


class CheckpointFolder:
    """The checkpoints of one run: `step-<n>`, the newest `keep` of them, and `best-<n>`.

    What a killed process left half-written begins with a dot, and is removed when the next checkpoint is written. So
    does a whole checkpoint, `.replaced-step-<n>`, whose name a new one was about to take: it stands for that one, and
    gets its name back when the next one is written.

    With a `group` of several ranks all of them call a method together. Each writes its own tensors into one folder, on
    a file system that all share; rank 0 does all else. What fails on one fails on all.

    An `incremental` one has what has changed in tables on disk since the last checkpoint, where that is less.
    """

    def __init__(self, folder: str | Path, keep: int = 3, incremental: bool = False) -> None:
        self.folder, self.keep, self.incremental = Path(folder), keep, incremental

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, ascending."""
        return self._numbers("step")

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self._path(f"step-{step}")

    def latest(self, group: RankGroup | None = None) -> Path | None:
        """The newest checkpoint, if there is one; with several ranks, what rank 0 finds."""
        names = on_rank_zero(group, lambda: [self.path(step).name for step in self.steps()[-1:]])
        return self.folder / names[0] if names else None

    def best(self) -> Path | None:
        """The checkpoint of the best evaluation, if there is one."""
        steps = self._numbers("best")
        return self._path(f"best-{steps[-1]}") if steps else None

    def save(
        self, step: int, tensors: Tensors, manifest: Manifest, group: RankGroup | None = None, best: bool = False,
        services: Mapping[str, TableService] | None = None,
    ) -> CheckpointSaved:  # fmt: skip
        """Write the checkpoint of a step.

        Args:
            tensors: this rank's; what has the same name and is no `TableShards` or DTensor is the same on all ranks.
                A `DiskTensor` refers to a table on disk, whose file is copied.
            manifest: what `trainer.json` is to hold, for JSON; rank 0's is taken.
            group: ranks that write it together, over a backend that serves the CPU; None for this process alone.
            best: mark it as the best one when it is written.
            services: of collections on embedding servers, by path; the servers must be able to write to the folder.

        Raises:
            CheckpointError: on every rank, if it could not be written; says why, where, and how many bytes were needed.
            ValueError: on every rank, if the ranks' parts do not make up a sharded table.
            TypeError: the manifest is not for JSON.
            StorageError: what was trained could not be written to a table on disk.
        """
        writer = self.begin(step, tensors, manifest, group, best, services)
        with self.reporting(writer):
            return writer.result(save(
                dict(writer.tensors), storage_writer=writer, process_group=writer.group.process_group,
                no_dist=writer.group.size == 1,
            ))  # fmt: skip

    def begin(
        self, step: int, tensors: Tensors, manifest: Manifest, group: RankGroup | None = None, best: bool = False,
        services: Mapping[str, TableService] | None = None,
    ) -> CheckpointWriter:  # fmt: skip
        """Make the folder of a checkpoint, and submit snapshots of tables on disk; torch saves the writer's tensors.

        Arguments and errors as of `save`.
        """
        group = RankGroup() if group is None else group
        aside = self.folder / f"{WRITING}step-{step}"

        def make() -> None:
            self._remove_leftovers()
            aside.mkdir(parents=True)

        def begin() -> None:
            if not aside.is_dir():
                raise OSError(f"{aside} is not there: all ranks must write to one folder, on a file system they share")
            writer.snapshots.begin(aside, self._earlier(step) if writer.snapshots.tables or services else [])

        def publish(written: RankFiles) -> None:
            for path, (size, _) in ((aside / name, entry) for name, entry in written.files.items()):
                if (actual_size := files.size_of(path)) != size:
                    raise OSError(
                        f"{path} should have {size:,} bytes, rank 0 finds {actual_size}: do all ranks share it?"
                    )
            tables = {
                name: files_by_path for name in ("tables", "servers") if (files_by_path := getattr(written, name))
            }
            entries = {"format": FORMAT, **json.loads(writer.manifest), **tables, "files": written.files}
            atomic_write(aside / MANIFEST, seal(json.dumps(entries, indent=1)))
            self._publish(aside, self.folder / f"step-{step}", self._obsolete(step))
            if best:
                self._mark_best(step)

        files.ignore_single_process_warning()
        writer = CheckpointWriter(aside, step, tensors, manifest, group, publish, services)
        with self.reporting(writer):
            on_rank_zero(group, make, OSError)
            on_all_ranks(group, begin, OSError)
        return writer

    @contextmanager
    def reporting(self, pending: CheckpointWriter) -> Iterator[None]:
        """What goes wrong in the block becomes a `CheckpointError`, and nothing is left of the checkpoint."""
        try:
            yield
        except (OSError, CheckpointException) as error:
            pending.snapshots.settle()
            raise self._failure(pending.step, pending.needed, error, pending.group) from error

    def mark_best(self, step: int, group: RankGroup | None = None) -> None:
        """Keep the checkpoint of this step as the best one, whatever becomes of the newest ones. Raises as `save`."""
        try:
            on_rank_zero(group, lambda: self._mark_best(step), OSError)
        except OSError as error:
            source = self.folder / f"step-{step}"
            needed = sum(allocated(entry) for entry in source.iterdir()) if source.is_dir() else 0
            raise self._failure(step, needed, error, group) from error

    def _mark_best(self, step: int) -> None:
        source, aside = self.folder / f"step-{step}", self.folder / f"{WRITING}best-{step}"
        self._remove_leftovers()
        aside.mkdir()
        for entry in source.iterdir():
            files.link_or_copy(entry, aside / entry.name)
        previous_best = [self.folder / f"best-{old}" for old in self._numbers("best") if old != step]
        self._publish(aside, self.folder / f"best-{step}", previous_best)

    def _earlier(self, step: int) -> list[tuple[Path, Manifest]]:
        earlier: list[tuple[Path, Manifest]] = []
        for path in [self.path(number) for number in reversed(self.steps()) if number < step and self.incremental]:
            with suppress(ValueError):  # nothing follows a damaged one
                earlier.append((path, files.read_manifest_text(path)[1]))
        return earlier

    def _obsolete(self, step: int) -> list[Path]:
        """What goes when this step has its checkpoint: the later ones, as the run has gone back behind them and now
        goes another way, and those that are not among the newest `keep` any more."""
        later = [(kind, number) for kind in ("step", "best") for number in self._numbers(kind) if number > step]
        earlier = [("step", number) for number in self.steps() if number < step]
        old = earlier[: max(0, len(earlier) + 1 - self.keep)]
        return [self.folder / f"{kind}-{number}" for kind, number in later + old]

    def _numbers(self, kind: str) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = {entry.name.removeprefix(REPLACED).partition("-") for entry in self.folder.iterdir()}
        paths = {int(n): self._path(f"{name}-{n}") for name, _, n in names if name == kind and n.isdecimal()}
        complete = sorted(number for number, path in paths.items() if (path / MANIFEST).is_file())
        for path in (path for number, path in paths.items() if number not in complete and path.is_dir()):
            warnings.warn(f"{path} is passed over: a checkpoint without its {MANIFEST} cannot be read", stacklevel=2)
        return complete

    def _path(self, name: str) -> Path:
        """Where the checkpoint of this name is, or would be. Whoever reads it changes nothing here."""
        final, replaced = self.folder / name, self.folder / f"{REPLACED}{name}"
        return replaced if replaced.exists() and not final.exists() else final

    def _publish(self, aside: Path, final: Path, obsolete: Sequence[Path]) -> None:
        """Give a whole folder its name; others go then, as does one of the same name, of a run that was taken back."""
        sync(aside)
        replaced = self.folder / f"{REPLACED}{final.name}"
        if final.exists():
            os.rename(final, replaced)
        os.rename(aside, final)
        sync(self.folder)
        self._drop([*obsolete, replaced] if replaced.exists() else obsolete)

    def _drop(self, paths: Sequence[Path]) -> None:
        """Take all their names away first: a half-removed checkpoint is none, and removing one may take long."""
        for path in paths:
            os.rename(path, self.folder / f"{DROPPED}{path.name}")
        if paths:
            sync(self.folder)
        for path in paths:
            shutil.rmtree(self.folder / f"{DROPPED}{path.name}")

    def _remove_leftovers(self) -> None:
        self._restore_replaced()
        for entry in [*self.folder.glob(f"{WRITING}*"), *self.folder.glob(f"{DROPPED}*")]:
            shutil.rmtree(entry)
        self._drop(list(self.folder.glob(f"{REPLACED}*")))

    def _restore_replaced(self) -> None:
        """Where a checkpoint has lost its name and the new one has not got it, the old one has it again."""
        for replaced in self.folder.glob(f"{REPLACED}*"):
            if not (final := self.folder / replaced.name.removeprefix(REPLACED)).exists():
                os.rename(replaced, final)

    def _failure(self, step: int, needed: int, error: BaseException, group: RankGroup | None) -> CheckpointError:
        cause = error
        if isinstance(error, CheckpointException):
            cause = next((failure[0] for failure in error.failures.values()), error)
            if not isinstance(cause, Exception):  # somebody wants the process to end
                raise cause
        if group is None or group.rank == 0:  # all ranks have stopped writing
            for kind in ("step", "best"):
                shutil.rmtree(self.folder / f"{WRITING}{kind}-{step}", ignore_errors=True)
            with suppress(OSError):  # it is found where it is, too
                self._restore_replaced()
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.is_dir())
        newest = self.latest()
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {cause}. It needs {needed:,} bytes, "
            f"{shutil.disk_usage(existing).free:,} are free there. "
            f"{f'The checkpoint {newest.name} is whole' if newest else 'There is no earlier checkpoint'}"
        )


class RunFolder:
    """`checkpoints/`, `log.jsonl`, `report.html`, `config.toml`, `trace.json`, `tensorboard/` of one run."""

    def __init__(self, path: str | Path, keep: int = 3, incremental: bool = False) -> None:
        self.path = Path(path)
        self.checkpoints = CheckpointFolder(self.path / "checkpoints", keep, incremental)
        self.log, self.report, self.config = (self.path / n for n in ("log.jsonl", "report.html", "config.toml"))
        self.trace, self.tensorboard = self.path / "trace.json", self.path / "tensorboard"

    def lock(self) -> AbstractContextManager[object]:
        """Make the folder, and keep other processes out of it; a killed process keeps nobody out.

        ValueError if another process trains there, or nothing can be written there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return FileLock(self.path / ".lock").acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"another process trains in {self.path}; wait for it, or choose another folder") from error
        except OSError as error:
            raise ValueError(f"nothing can be written to {self.path}: {error}") from error
