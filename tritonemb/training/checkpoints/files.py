"""Files that are on the disk when they are said to be, and their checksums."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found = zlib.crc32(block, found)
    return found


def write(path: Path, text: str) -> None:
    """A file that is on the disk when this returns."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Bring a folder's entries to the disk, where folders can be opened."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_bytes(folder: Path) -> int | None:
    """Room where this folder is or would be made."""
    there = next((path for path in (folder, *folder.parents) if path.is_dir()), None)
    return None if there is None else shutil.disk_usage(there).free
