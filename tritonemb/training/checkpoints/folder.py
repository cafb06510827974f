"""Checkpoints of a run: written aside and renamed, so that whatever stands in the folder is whole.

A checkpoint is a folder: the tensors in the format of `torch.distributed.checkpoint` (`model.<key of state_dict>`,
`optimizer.<parameter>.<state>`, `rng.<device>`), the files of tables on disk, and `trainer.json`, which holds all else,
and sizes and checksums of the files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from tritonemb.comm.group import RankGroup
from tritonemb.tables.cached_table import write_back
from tritonemb.training.checkpoints.files import allocated, free_bytes, link_or_copy, sync, write
from tritonemb.training.checkpoints.manifest import FORMAT, MANIFEST, read_text
from tritonemb.training.checkpoints.options import CheckpointError
from tritonemb.training.checkpoints.tables_out import (
    Fields,
    TableOnDisk,
    TableSnapshot,
    ask,
    bytes_of,
    finish,
    said_of,
    saved_by,
    settle,
    tables_of,
)
from tritonemb.training.checkpoints.tensors import bytes_to_write, refuse_missing_parts
from tritonemb.training.checkpoints.together import is_first, of_first, together
from tritonemb.training.checkpoints.writing import write_tensors

# What begins with these is half-written; whole, of which a new one was to take the name; half-removed.
WRITING, REPLACED, DROPPED = ".writing-", ".replaced-", ".dropped-"


@dataclass(frozen=True)
class Begun:
    """A checkpoint whose folder is there, and whose tables on disk are being written.

    Args:
        step: of which.
        tables: of this rank.
        asked: its parts of them, on their way.
        has_tables: whether some rank has such tables.
        needed: bytes, at most.
    """

    step: int
    tables: Mapping[str, TableOnDisk]
    asked: Sequence[TableSnapshot]
    has_tables: bool
    needed: int

    def fields(self) -> dict[str, Fields]:
        """What weight and states of this rank's tables on disk are, by the beginning of their names."""
        return {prefix: table.fields for prefix, table in self.tables.items()}


class CheckpointFolder:
    """The checkpoints of one run: `step-<n>`, the newest `keep` of them, and `best-<n>`.

    What a killed process left half-written begins with a dot, and is removed when the next checkpoint is written. So
    does a whole checkpoint, `.replaced-step-<n>`, of which a new one was about to take the name: it stands for that one
    wherever checkpoints are looked for, and gets its name back when the next one is written.

    With a `group` of several ranks all of them call a method together. Each writes its own tensors into one folder,
    which must be on a file system that all of them share; rank 0 does all else. What fails on one fails on all.

    Args:
        keep: how many of the newest stay.
        incremental: write what has changed in tables on disk since the last checkpoint, where that is less.
    """

    def __init__(self, folder: str | Path, keep: int = 3, incremental: bool = False) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.incremental = incremental

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, ascending."""
        return self._numbers("step")

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self._place(f"step-{step}")

    def latest(self, group: RankGroup | None = None) -> Path | None:
        """The newest checkpoint, if there is one; with several ranks, what rank 0 finds."""

        def found() -> str | None:
            steps = self.steps()
            return self.path(steps[-1]).name if steps else None

        name = of_first(group, found)
        return None if name is None else self.folder / name

    def best(self) -> Path | None:
        """The checkpoint of the best evaluation, if there is one."""
        steps = self._numbers("best")
        return self._place(f"best-{steps[-1]}") if steps else None

    def save(
        self, step: int, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], group: RankGroup | None = None
    ) -> int:
        """Write the checkpoint of a step; returns its size in bytes.

        Args:
            tensors: this rank's; what has the same name and is no `TableShards` or DTensor is the same on all ranks.
                An `DiskTensor` stands for a table on disk, whose file is copied.
            manifest: what `trainer.json` is to hold, for JSON; rank 0's is taken.
            group: ranks that write it together, over a backend that serves the CPU; None for this process alone.

        Raises:
            CheckpointError: it could not be written; says why, on which rank, and how many bytes were needed. Every
                rank raises it.
            ValueError: on every rank, if the ranks' parts do not make up a sharded table.
            StorageError: what was trained could not be written to a table on disk.
        """
        return self.finish(self.begin(step, tensors, group), tables_of(tensors)[0], manifest, group)

    def begin(self, step: int, tensors: Mapping[str, Tensor], group: RankGroup | None = None) -> Begun:
        """Make the folder of a checkpoint, and ask tables on disk for snapshots of this moment; `finish` does the rest.

        Raises:
            as `save`.
        """
        plain, tables = tables_of(tensors)
        refuse_missing_parts(tensors, group)
        needed = bytes_to_write(plain, group)
        aside = self.folder / f"{WRITING}step-{step}"

        def bring_back() -> tuple[bool, int]:
            write_back(saved_by(tables))
            return bool(tables), bytes_of(tables)

        def begin() -> None:
            self._remove_leftovers()
            aside.mkdir(parents=True)

        def refuse_other_folder() -> None:
            if not aside.is_dir():
                raise OSError(f"{aside} is not there: all ranks must write to one folder, on a file system they share")

        of_ranks = together(group, bring_back)  # what fails here is lost to training, too
        has_tables, needed = any(has for has, _ in of_ranks), needed + sum(num_bytes for _, num_bytes in of_ranks)
        asked: list[TableSnapshot] = []
        try:
            of_first(group, begin, OSError)
            together(group, refuse_other_folder, OSError)
            if has_tables:
                together(group, lambda: asked.extend(ask(aside, tables, self._before(step))), OSError)
            return Begun(step, tables, asked, has_tables, needed)
        except OSError as error:
            settle(asked)
            raise self._failure(step, needed, error, group) from error

    def finish(
        self, begun: Begun, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], group: RankGroup | None = None
    ) -> int:
        """Write what `begin` has begun; arguments and what is returned and raised as of `save`.

        Args:
            tensors: without those of tables on disk.
        """
        step = begun.step
        aside = self.folder / f"{WRITING}step-{step}"

        def put() -> None:
            _refuse_missing(aside, files)
            write(aside / MANIFEST, json.dumps({"format": FORMAT, **manifest, **more, "files": files}, indent=1))
            self._put(aside, self.folder / f"step-{step}", self._outlived(step))

        try:
            files = write_tensors(aside, tensors, group)
            written, more = sum(size for size, _ in files.values()), {}
            if begun.has_tables:
                every = together(group, lambda: (begun.fields(), finish(begun.asked)), OSError)
                files |= {name: entry for _, of_rank in every for name, entry in of_rank.files.items()}
                written += sum(of_rank.num_bytes for _, of_rank in every)
                more["tables"] = said_of(every)
            of_first(group, put, OSError)
        except (OSError, CheckpointException) as error:
            settle(begun.asked)
            raise self._failure(step, begun.needed, error, group) from error
        return written

    def mark_best(self, step: int, group: RankGroup | None = None) -> None:
        """Keep the checkpoint of this step as the best one, whatever becomes of the newest ones.

        Raises:
            CheckpointError: as `save` does.
        """
        source, aside = self.folder / f"step-{step}", self.folder / f"{WRITING}best-{step}"

        def mark() -> None:
            self._remove_leftovers()
            aside.mkdir()
            for entry in source.iterdir():
                link_or_copy(entry, aside / entry.name)
            others = [self.folder / f"best-{old}" for old in self._numbers("best") if old != step]
            self._put(aside, self.folder / f"best-{step}", others)

        try:
            of_first(group, mark, OSError)
        except OSError as error:
            needed = sum(allocated(entry) for entry in source.iterdir()) if source.is_dir() else 0
            raise self._failure(step, needed, error, group) from error

    def _before(self, step: int) -> list[tuple[Path, Mapping[str, Any]]]:
        """Earlier checkpoints and their manifests, newest first, if changes of tables on disk may follow them."""
        found: list[tuple[Path, Mapping[str, Any]]] = []
        for number in reversed(self.steps() if self.incremental else []):
            with suppress(ValueError):  # nothing follows a damaged one
                if number < step:
                    found.append((self.path(number), read_text(self.path(number))[1]))
        return found

    def _outlived(self, step: int) -> list[Path]:
        """What goes when this step has its checkpoint: the later ones, as the run has gone back behind them and now
        goes another way, and those that are not among the newest `keep` any more.
        """
        later = [(kind, number) for kind in ("step", "best") for number in self._numbers(kind) if number > step]
        earlier = [("step", number) for number in self.steps() if number < step]
        old = earlier[: max(0, len(earlier) + 1 - self.keep)]
        return [self.folder / f"{kind}-{number}" for kind, number in later + old]

    def _numbers(self, kind: str) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = {entry.name.removeprefix(REPLACED) for entry in self.folder.iterdir()}
        parts = [name.partition("-") for name in names if (self._place(name) / MANIFEST).is_file()]
        return sorted(int(number) for name, _, number in parts if name == kind and number.isdecimal())

    def _place(self, name: str) -> Path:
        """Where the checkpoint of this name is, or would be. Whoever reads it changes nothing here."""
        final, replaced = self.folder / name, self.folder / f"{REPLACED}{name}"
        return replaced if replaced.exists() and not final.exists() else final

    def _put(self, aside: Path, final: Path, others: Sequence[Path]) -> None:
        """Give a whole folder its name; others go then, as does one of the same name, of a run that was taken back."""
        sync(aside)
        replaced = self.folder / f"{REPLACED}{final.name}"
        if final.exists():
            os.rename(final, replaced)
        os.rename(aside, final)
        sync(self.folder)
        self._drop([*others, replaced] if replaced.exists() else others)

    def _drop(self, paths: Sequence[Path]) -> None:
        """Take all their names away first: a half-removed checkpoint is none, and removing one may take long."""
        asides = [self.folder / f"{DROPPED}{path.name}" for path in paths]
        for path, aside in zip(paths, asides, strict=True):
            os.rename(path, aside)
        for aside in asides:
            shutil.rmtree(aside)

    def _remove_leftovers(self) -> None:
        """Of a process that was killed; only for who writes checkpoints here."""
        if self.folder.is_dir():
            self._put_back()
            for entry in self.folder.iterdir():
                if entry.name.startswith(REPLACED):
                    self._drop([entry])
                elif entry.name.startswith((WRITING, DROPPED)):
                    shutil.rmtree(entry)

    def _put_back(self) -> None:
        """Where a checkpoint has lost its name and the new one has not got it, the old one has it again."""
        for replaced in self.folder.glob(f"{REPLACED}*"):
            final = self.folder / replaced.name.removeprefix(REPLACED)
            if not final.exists():
                os.rename(replaced, final)

    def _failure(self, step: int, needed: int, error: BaseException, group: RankGroup | None) -> CheckpointError:
        cause = error
        if isinstance(error, CheckpointException):
            cause = next((failure[0] for failure in error.failures.values()), error)
            if not isinstance(cause, Exception):  # somebody wants the process to end
                raise cause
        if is_first(group):  # all ranks have stopped writing
            for kind in ("step", "best"):
                shutil.rmtree(self.folder / f"{WRITING}{kind}-{step}", ignore_errors=True)
            with suppress(OSError):  # it is found where it is, too
                self._put_back()
        free, kept = free_bytes(self.folder), self.latest()
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {cause}. It needs {needed:,} bytes, "
            f"{'an unknown number' if free is None else format(free, ',')} are free there. "
            f"{f'The checkpoint {kept.name} is whole' if kept else 'There is no earlier checkpoint'}"
        )


def _refuse_missing(folder: Path, files: Mapping[str, list[int]]) -> None:
    """Raise unless rank 0, too, sees what the ranks say they have written."""
    for name, (size, _) in files.items():
        there = (folder / name).stat().st_size if (folder / name).is_file() else None
        if there != size:
            raise OSError(f"{folder / name} should have {size:,} bytes, rank 0 finds {there}: do all ranks share it?")
