"""Records fsyncs and renames, and what is renamed or removed too early for a power failure."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

LINUX = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux tells the path of an open file")
ASIDE = ".writing-"  # what is written under such a name must be on the disk before it has its own


class Durability:
    """From now on each call of `os.fsync`, `os.rename`, `os.replace` and `shutil.rmtree` is checked.

    Args:
        folder: where names matter; others, such as those of compiled kernels, may be lost.

    Attributes:
        named: what got its own name, a file or a folder, and the names of the files in it.
        problems: what was renamed before it was fsynced, and what was removed before names were.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder.resolve()
        self.named: list[tuple[Path, list[str]]] = []
        self.problems: list[str] = []
        self._synced: dict[Path, tuple[int, int]] = {}  # size and time of the last change, when it was fsynced
        self._renamed: dict[Path, Path] = {}  # folders that are not fsynced yet, and what was renamed there
        fsync, rmtree = os.fsync, shutil.rmtree

        def synced(handle: int) -> None:
            fsync(handle)
            path = Path(os.readlink(f"/proc/self/fd/{handle}"))
            self._synced[path] = _state(handle)
            self._renamed.pop(path, None)

        def removed(path: Any, *args: Any, **options: Any) -> None:
            self.check_names()
            rmtree(path, *args, **options)

        patch.setattr(os, "fsync", synced)
        patch.setattr(shutil, "rmtree", removed)
        for name in ("rename", "replace"):
            patch.setattr(os, name, self._renaming(getattr(os, name)))

    def check(self) -> list[str]:
        """All problems, when everything is said to be on the disk."""
        self.check_names()
        return self.problems

    def check_names(self) -> None:
        self.problems += [
            f"{folder} was not fsynced after {path} was renamed" for folder, path in self._renamed.items()
        ]

    def is_synced(self, path: Path) -> bool:
        """Whether a file or a folder has not changed since it was fsynced."""
        return self._synced.get(path.resolve()) == _state(path)

    def _renaming(self, rename: Any) -> Any:
        def renamed(source: Any, target: Any) -> None:
            source, target = (Path(path).parent.resolve() / Path(path).name for path in (source, target))
            if source.name.startswith(ASIDE):
                self._check_content(source, target)
            rename(source, target)
            if target.is_relative_to(self.folder):
                self._renamed[target.parent] = target
            if source in self._synced:
                self._synced[target] = self._synced.pop(source)

        return renamed

    def _check_content(self, source: Path, target: Path) -> None:
        files = sorted(source.iterdir()) if source.is_dir() else []
        self.named.append((target, [path.name for path in files]))
        if source in self._renamed:
            self.problems.append(f"{source} was not fsynced after {self._renamed.pop(source)} was renamed")
        for path in (source, *files):
            linked = path.is_file() and path.stat().st_nlink > 1  # it was fsynced under its first name
            if not linked and not self.is_synced(path):
                self.problems.append(f"{path} was not fsynced before it became {target}")


def _state(file: Path | int) -> tuple[int, int]:
    result = os.stat(file)
    return result.st_size, result.st_mtime_ns
