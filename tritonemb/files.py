"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` at the end, or goes away if there is an error.

    Raises:
        FileNotFoundError: the folder is not there.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder to write {path.name} to")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write `text` in UTF-8, on the disk before it takes the place of `path`; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as part, part.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
