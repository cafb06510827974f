"""Folders of runs and of their checkpoints. Checkpoints are written under a temporary name and renamed when complete.

A checkpoint is a folder: tensors in the format of `torch.distributed.checkpoint` (`model.<key of state_dict>`,
`optimizer.<parameter>.<state>`, `rng.<device>`), files of tables on disk, and `trainer.json`, the manifest, with all
other state, and with sizes and checksums of the files.
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
from tritonemb.storage.checkpoint import MANIFEST
from tritonemb.storage.io import allocated
from tritonemb.tables.server_table import TableService
from tritonemb.training.callbacks import CheckpointSaved
from tritonemb.training.checkpoint.writer import CheckpointWriter, Manifest, RankFiles, Tensors
from tritonemb.training.ranks import CheckpointError, on_all_ranks, on_rank_zero
from tritonemb.utils import WRITING, publish, sync

# Prefixes of the names of complete checkpoints that are being replaced, and of ones being removed.
REPLACED, DROPPED = ".replaced-", ".dropped-"


class CheckpointFolder:
    """Checkpoints of one run: the newest `keep` as `step-<n>`, and the best as `best-<n>`.

    Incomplete checkpoints of a killed process have hidden names, and are removed when the next checkpoint is written. A
    complete checkpoint `.replaced-step-<n>`, which a killed process was replacing by one of the same step, is read in
    place of `step-<n>`, and gets its name back when the next checkpoint is written.

    With a `group` of several ranks, methods are collective: every rank writes its tensors into one folder on a shared
    file system, and rank 0 does the rest. A failure on one rank is raised on all.

    With `incremental`, checkpoints of tables on disk have only the pages changed since the last one, if fewer.
    """

    def __init__(self, folder: str | Path, keep: int = 3, incremental: bool = False) -> None:
        self.folder, self.keep, self.incremental = Path(folder), keep, incremental

    def steps(self, kind: str = "step") -> list[int]:
        """Steps of complete checkpoints of a kind, "step" or "best", ascending; warn of folders without manifest."""
        if not self.folder.is_dir():
            return []
        names = {entry.name.removeprefix(REPLACED).partition("-") for entry in self.folder.iterdir()}
        paths = {int(n): self.path(int(n), kind) for name, _, n in names if name == kind and n.isdecimal()}
        complete = sorted(number for number, path in paths.items() if (path / MANIFEST).is_file())
        for path in (path for number, path in paths.items() if number not in complete and path.is_dir()):
            warnings.warn(f"{path} is skipped: it has no {MANIFEST}, so it cannot be read", stacklevel=2)
        return complete

    def path(self, step: int, kind: str = "step") -> Path:
        """Path of the checkpoint of a step, which need not exist."""
        final, replaced = (self.folder / f"{prefix}{kind}-{step}" for prefix in ("", REPLACED))
        return replaced if replaced.exists() and not final.exists() else final

    def latest(self, group: RankGroup | None = None) -> Path | None:
        """Path of the newest checkpoint, None if there is none; that of rank 0 on all ranks."""
        names = on_rank_zero(group, lambda: [self.path(step).name for step in self.steps()[-1:]])
        return self.folder / names[0] if names else None

    def best(self) -> Path | None:
        steps = self.steps("best")
        return self.path(steps[-1], "best") if steps else None

    def save(
        self, step: int, tensors: Tensors, manifest: Manifest, group: RankGroup | None = None, best: bool = False,
        services: Mapping[str, TableService] | None = None,
    ) -> CheckpointSaved:  # fmt: skip
        """Write the checkpoint of a step, and mark it if it is the `best` one.

        Args:
            tensors: tensors of this rank. Those that are neither `TableShards` nor DTensor are equal on all ranks that
                have them. A `DiskTensor` refers to a table on disk, of which a snapshot is written.
            manifest: contents of `trainer.json`, for JSON; rank 0's is written.
            group: ranks that write the checkpoint, with a CPU backend; None for this process alone.
            services: services of collections on embedding servers, by path; the servers must have access to the folder.

        Raises:
            CheckpointError: writing failed; the message has the cause, the path and the bytes needed.
            ValueError, TypeError: the ranks' shards do not cover a table; the manifest cannot be encoded as JSON.
            StorageError: rows could not be written back to a table on disk.
        """
        writer = self.begin(step, tensors, manifest, group, best, services)
        with self.convert_errors(writer):
            return writer.result(save(
                dict(writer.tensors), storage_writer=writer, process_group=writer.group.process_group,
                no_dist=writer.group.size == 1,
            ))  # fmt: skip

    def begin(
        self, step: int, tensors: Tensors, manifest: Manifest, group: RankGroup | None = None, best: bool = False,
        services: Mapping[str, TableService] | None = None,
    ) -> CheckpointWriter:  # fmt: skip
        """Create a checkpoint's folder, and submit snapshots; torch then saves the writer's tensors. See `save`."""
        group = RankGroup() if group is None else group
        temporary = self.folder / f"{WRITING}step-{step}"

        def create_folder() -> None:
            self._remove_leftovers()
            temporary.mkdir(parents=True)

        def begin_snapshots() -> None:
            if not temporary.is_dir():
                raise OSError(f"{temporary} does not exist: all ranks must write to one folder on a shared file system")
            has_snapshots = writer.snapshots.tables or services
            writer.snapshots.begin(temporary, self._earlier_checkpoints(step) if has_snapshots else [])

        def publish(rank_files: RankFiles) -> None:
            for path, (size, _) in ((temporary / name, entry) for name, entry in rank_files.files.items()):
                if (actual := files.size_of(path)) != size:
                    raise OSError(f"{path} has {actual} bytes on rank 0, expected {size:,}: is the file system shared?")
            tables = {name: table for name in ("tables", "servers") if (table := getattr(rank_files, name))}
            files.write_manifest(temporary, {**json.loads(writer.manifest), **tables, "files": rank_files.files})
            self._publish(temporary, self.folder / f"step-{step}", self._obsolete_paths(step))
            if best:
                self._mark_best(step)

        files.ignore_single_process_warning()
        writer = CheckpointWriter(temporary, step, tensors, manifest, group, publish, services)
        with self.convert_errors(writer):
            on_rank_zero(group, create_folder, OSError)
            on_all_ranks(group, begin_snapshots, OSError)
        return writer

    @contextmanager
    def convert_errors(self, writer: CheckpointWriter) -> Iterator[None]:
        """Raise errors of the block as `CheckpointError`, after removing the incomplete checkpoint."""
        try:
            yield
        except (OSError, CheckpointException) as error:
            writer.snapshots.settle()
            raise self._failure(writer.step, writer.needed, error, writer.group) from error

    def mark_best(self, step: int, group: RankGroup | None = None) -> None:
        """Keep the checkpoint of a step as the best one, by hard links or copies. Raise the errors of `save`."""
        try:
            on_rank_zero(group, lambda: self._mark_best(step), OSError)
        except OSError as error:
            source = self.folder / f"step-{step}"
            num_bytes = sum(allocated(entry) for entry in source.iterdir()) if source.is_dir() else 0
            raise self._failure(step, num_bytes, error, group) from error

    def _mark_best(self, step: int) -> None:
        source, temporary = self.folder / f"step-{step}", self.folder / f"{WRITING}best-{step}"
        self._remove_leftovers()
        temporary.mkdir()
        for entry in source.iterdir():
            files.link_or_copy(entry, temporary / entry.name)
        previous_best = [self.folder / f"best-{old}" for old in self.steps("best") if old != step]
        self._publish(temporary, self.folder / f"best-{step}", previous_best)

    def _earlier_checkpoints(self, step: int) -> list[tuple[Path, Manifest]]:
        checkpoints = list[tuple[Path, Manifest]]()
        for path in [self.path(number) for number in reversed(self.steps()) if number < step and self.incremental]:
            with suppress(ValueError):  # skip damaged ones
                checkpoints.append((path, files.read_manifest_text(path)[1]))
        return checkpoints

    def _obsolete_paths(self, step: int) -> list[Path]:
        """Paths of checkpoints to remove after that of `step`: later steps, and those beyond the newest `keep`."""
        earlier_steps = [number for number in self.steps() if number < step]
        surplus_steps = earlier_steps[: max(0, len(earlier_steps) + 1 - self.keep)]
        return [*self.later(step), *(self.folder / f"step-{number}" for number in surplus_steps)]

    def later(self, step: int) -> list[Path]:
        return [self.path(n, kind) for kind in ("step", "best") for n in self.steps(kind) if n > step]

    def remove_later(self, step: int) -> None:
        """Remove the checkpoints of later steps, for rank 0."""
        self._remove_leftovers()  # a replaced checkpoint would come back in place of a removed one
        self._remove(self.later(step))

    def _publish(self, temporary: Path, final: Path, obsolete: Sequence[Path]) -> None:
        """Rename a complete checkpoint to its final name, and remove obsolete ones, and an old one of this name."""
        replaced = self.folder / f"{REPLACED}{final.name}"
        if final.exists():
            os.rename(final, replaced)
        publish(temporary, final)
        self._remove([*obsolete, replaced] if replaced.exists() else obsolete)

    def _remove(self, paths: Sequence[Path]) -> None:
        """Remove checkpoints. Rename all of them first: a partially removed one must not be read."""
        dropped = [self.folder / f"{DROPPED}{path.name}" for path in paths]
        for path, target in zip(paths, dropped, strict=True):
            os.rename(path, target)
        if paths:
            sync(self.folder)
        for target in dropped:
            shutil.rmtree(target)

    def _remove_leftovers(self) -> None:
        self._restore_replaced()
        for entry in [*self.folder.glob(f"{WRITING}*"), *self.folder.glob(f"{DROPPED}*")]:
            shutil.rmtree(entry)
        self._remove(list(self.folder.glob(f"{REPLACED}*")))

    def _restore_replaced(self) -> None:
        """Give replaced checkpoints their names back if the new ones were not published."""
        for replaced in self.folder.glob(f"{REPLACED}*"):
            if not (final := self.folder / replaced.name.removeprefix(REPLACED)).exists():
                os.rename(replaced, final)

    def _failure(self, step: int, num_bytes: int, error: BaseException, group: RankGroup | None) -> CheckpointError:
        cause = error
        if isinstance(error, CheckpointException):
            cause = next((failure[0] for failure in error.failures.values()), error)
            if not isinstance(cause, Exception):  # KeyboardInterrupt, SystemExit
                raise cause
        if group is None or group.rank == 0:  # no rank is writing any more
            for kind in ("step", "best"):
                shutil.rmtree(self.folder / f"{WRITING}{kind}-{step}", ignore_errors=True)
            with suppress(OSError):  # readers find replaced checkpoints, too
                self._restore_replaced()
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.is_dir())
        newest = self.latest()
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {cause}. It needs "
            f"{num_bytes:,} bytes; {shutil.disk_usage(existing).free:,} are free. "
            f"{f'The latest complete checkpoint is {newest.name}' if newest else 'There is no earlier checkpoint'}"
        )


class RunFolder:
    """Paths of a run: `checkpoints/`, `log.jsonl`, `report.html`, `config.toml`, `trace.json`, `tensorboard/`."""

    def __init__(self, path: str | Path, keep: int = 3, incremental: bool = False) -> None:
        self.path = Path(path)
        self._lock = FileLock(self.path / ".lock")
        self.checkpoints = CheckpointFolder(self.path / "checkpoints", keep, incremental)
        self.log, self.report, self.config = (self.path / n for n in ("log.jsonl", "report.html", "config.toml"))
        self.trace, self.tensorboard = self.path / "trace.json", self.path / "tensorboard"

    def lock(self) -> AbstractContextManager[object]:
        """Create the folder, and lock it, also repeatedly; ValueError if another process has, or it is not writable."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"another process trains in {self.path}; wait for it, or choose another folder") from error
        except OSError as error:
            raise ValueError(f"cannot write to {self.path}: {error}") from error
