"""Checkpoints of a run: written aside and renamed, so that whatever stands in the folder is whole.

A checkpoint is a folder: the tensors in the format of `torch.distributed.checkpoint` (`model.<key of state_dict>`,
`optimizer.<parameter>.<state>`, `rng.<device>`), and `trainer.json`, which holds all else, and sizes and
checksums of the files.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

FORMAT = 1
MANIFEST = "trainer.json"
MOST_LISTED = 20


@dataclass(frozen=True)
class CheckpointOptions:
    """When checkpoints are written, how many are kept, and what happens if one cannot be written.

    Args:
        checkpoint_steps: write one every so many steps.
        checkpoint_minutes: write one when so many minutes have passed since the last; 0 for never.
        keep: how many of the last checkpoints stay; the best one stays besides.
        on_checkpoint_error: go on training with the earlier checkpoints, or stop.

    Raises:
        ValueError: for numbers out of range.
    """

    checkpoint_steps: int | None = None
    checkpoint_minutes: float = 10.0
    keep: int = 3
    on_checkpoint_error: Literal["continue", "stop"] = "continue"

    def __post_init__(self) -> None:
        if self.checkpoint_steps is not None and self.checkpoint_steps < 1:
            raise ValueError(f"checkpoint_steps must be at least 1, got {self.checkpoint_steps}")
        if self.checkpoint_minutes < 0:
            raise ValueError(f"checkpoint_minutes must not be negative, got {self.checkpoint_minutes}")
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")
        if self.on_checkpoint_error not in ("continue", "stop"):
            raise ValueError(f"on_checkpoint_error must be 'continue' or 'stop', got {self.on_checkpoint_error!r}")


class CheckpointError(OSError):
    """A checkpoint could not be written; the earlier ones are as they were."""


class CheckpointFolder:
    """The checkpoints of one run: `step-<n>`, the newest `keep` of them, and `best-<n>`.

    What a killed process left half-written begins with a dot, and is removed when the next checkpoint is written.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.folder = Path(folder)
        self.keep = keep

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, ascending."""
        return self._numbers("step")

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def latest(self) -> Path | None:
        """The newest checkpoint, if there is one."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best(self) -> Path | None:
        """The checkpoint of the best evaluation, if there is one."""
        steps = self._numbers("best")
        return self.folder / f"best-{steps[-1]}" if steps else None

    def save(self, step: int, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> int:
        """Write the checkpoint of a step; returns its size in bytes.

        Raises:
            CheckpointError: it could not be written; says why and how many bytes were needed.
        """
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        aside = self.folder / f".writing-step-{step}"
        try:
            self._remove_leftovers()
            aside.mkdir(parents=True)
            with _as_one_process():
                save(dict(tensors), storage_writer=FileSystemWriter(aside, sync_files=True), no_dist=True)
            files = {entry.name: [entry.stat().st_size, _checksum(entry)] for entry in sorted(aside.iterdir())}
            _write(aside / MANIFEST, json.dumps({"format": FORMAT, **manifest, "files": files}, indent=1))
            self._put(aside, self.path(step))
            self._drop_after(step)
            for old in self.steps()[: -self.keep]:
                self._drop(self.path(old))
        except (OSError, CheckpointException) as error:
            raise self._failure(step, needed, error) from error
        return sum(size for size, _ in files.values())

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint of this step as the best one, whatever becomes of the newest ones.

        Raises:
            CheckpointError: as `save` does.
        """
        source, aside = self.path(step), self.folder / f".writing-best-{step}"
        try:
            self._remove_leftovers()
            aside.mkdir()
            for entry in source.iterdir():
                try:
                    os.link(entry, aside / entry.name)
                except OSError:  # a file system without hard links
                    shutil.copy2(entry, aside / entry.name)
            self._put(aside, self.folder / f"best-{step}")
            for old in self._numbers("best"):
                if old != step:
                    self._drop(self.folder / f"best-{old}")
        except OSError as error:
            needed = sum(entry.stat().st_size for entry in source.iterdir()) if source.is_dir() else 0
            raise self._failure(step, needed, error) from error

    def _drop_after(self, step: int) -> None:
        """Remove later checkpoints: the run has gone back behind them, and now goes another way."""
        for kind in ("step", "best"):
            for later in self._numbers(kind):
                if later > step:
                    self._drop(self.folder / f"{kind}-{later}")

    def _numbers(self, kind: str) -> list[int]:
        if not self.folder.is_dir():
            return []
        parts = [entry.name.partition("-") for entry in self.folder.iterdir() if (entry / MANIFEST).is_file()]
        return sorted(int(number) for name, _, number in parts if name == kind and number.isdecimal())

    def _put(self, aside: Path, final: Path) -> None:
        """Give a whole folder its name; a checkpoint of the same name, of a run that has been taken back, goes."""
        _sync(aside)
        if final.exists():
            self._drop(final)
        os.rename(aside, final)
        _sync(self.folder)

    def _drop(self, path: Path) -> None:
        """Take its name away first: a half-removed checkpoint is none."""
        aside = self.folder / f".dropped-{path.name}"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
        shutil.rmtree(aside)

    def _remove_leftovers(self) -> None:
        if self.folder.is_dir():
            for entry in self.folder.iterdir():
                if entry.name.startswith((".writing-", ".dropped-")):
                    shutil.rmtree(entry)

    def _failure(self, step: int, needed: int, error: BaseException) -> CheckpointError:
        cause = error
        if isinstance(error, CheckpointException):
            cause = next((failure[0] for failure in error.failures.values()), error)
            if not isinstance(cause, Exception):  # somebody wants the process to end
                raise cause
            if not isinstance(cause, OSError | RuntimeError):
                raise error
        free = _free_bytes(self.folder)
        for entry in (self.folder / f".writing-step-{step}", self.folder / f".writing-best-{step}"):
            shutil.rmtree(entry, ignore_errors=True)
        kept = self.latest()
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {cause}. It needs {needed:,} bytes, "
            f"{'an unknown number' if free is None else format(free, ',')} are free there. "
            f"{f'The checkpoint {kept.name} is whole' if kept else 'There is no earlier checkpoint'}"
        )


def read_manifest(path: str | Path) -> dict[str, Any]:
    """What `trainer.json` of a checkpoint says, after a check that the checkpoint is whole.

    Raises:
        FileNotFoundError, ValueError: there is none, it is damaged, or it is of a format that this version cannot read.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(f"{path} is no checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, found = dict(manifest["files"]), manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged ({error!r}); use another checkpoint") from error
    if found != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {found}, this version of tritonemb reads format {FORMAT}; it was written by "
            f"tritonemb {manifest.get('versions', {}).get('tritonemb', 'of an unknown version')}"
        )
    for name, (size, checksum) in files.items():
        there = (path / name).stat().st_size if (path / name).is_file() else None
        if there != size:
            raise ValueError(
                f"{path} is damaged: {name} has {'vanished' if there is None else f'{there:,} bytes'} "
                f"instead of {size:,} bytes; use another checkpoint"
            )
        if _checksum(path / name) != checksum:
            raise ValueError(f"{path} is damaged: {name} does not have the checksum that was written; use another one")
    assert isinstance(manifest, dict)
    return manifest


def stored_tensors(path: str | Path) -> dict[str, TensorStorageMetadata]:
    """Names, shapes and dtypes of a checkpoint's tensors."""
    found = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def load_tensors(path: str | Path, tensors: dict[str, Tensor], ignore: tuple[str, ...] = ()) -> None:
    """Read a checkpoint into `tensors`, in place.

    Args:
        ignore: beginnings of names that may be in the checkpoint alone.

    Raises:
        ValueError: names, shapes or dtypes differ; all differences are listed, and nothing has been read then.
    """
    stored = stored_tensors(path)
    problems = []
    for name in sorted(tensors.keys() | stored.keys()):
        if name not in stored:
            problems.append(f"{name} is not in the checkpoint")
        elif name not in tensors:
            if not name.startswith(ignore):
                problems.append(f"{name} is in the checkpoint only")
        else:
            there, here = _describe(stored[name].size, stored[name].properties.dtype), tensors[name]
            if there != _describe(here.shape, here.dtype):
                problems.append(f"{name} is {there} in the checkpoint, {_describe(here.shape, here.dtype)} here")
    if problems:
        more = len(problems) - MOST_LISTED
        listed = "\n  ".join(problems[:MOST_LISTED] + [f"and {more} more"] * (more > 0))
        raise ValueError(f"checkpoint {path} is of another model or optimizer:\n  {listed}")
    with _as_one_process():
        load(tensors, checkpoint_id=path, no_dist=True)


def _describe(shape: Any, dtype: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


@contextmanager
def _as_one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _checksum(path: Path) -> int:
    """CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found = zlib.crc32(block, found)
    return found


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Bring a folder's entries to the disk, where folders can be opened."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free_bytes(folder: Path) -> int | None:
    there = next((path for path in (folder, *folder.parents) if path.is_dir()), None)
    return None if there is None else shutil.disk_usage(there).free
