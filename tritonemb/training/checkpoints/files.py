"""Files that are on the disk when they are said to be, and their checksums."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

from tritonemb.storage import copy_rows, digest

ROWS, CHANGES = ".rows", ".changes"  # of a table on disk: files with holes


def checksum(path: Path) -> int:
    """CRC-32 of a file; of a table's rows, whose file may be nearly all holes, their `digest`."""
    if path.suffix in (ROWS, CHANGES):
        return digest(path)
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


def allocated(path: Path) -> int:
    """Bytes that a file takes on the disk; its size where the system does not tell."""
    found = path.stat()
    return 512 * found.st_blocks if hasattr(found, "st_blocks") else found.st_size


def link_or_copy(source: Path, target: Path) -> None:
    """The same file under another name; a copy that is on the disk, where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        if source.suffix in (ROWS, CHANGES):
            copy_rows(source, target)
        else:
            shutil.copy2(source, target)
        sync(target)


def sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk, where folders can be opened."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_bytes(folder: Path) -> int | None:
    """Room where this folder is or would be made."""
    there = next((path for path in (folder, *folder.parents) if path.is_dir()), None)
    return None if there is None else shutil.disk_usage(there).free
