"""The files of a checkpoint: durable writes, checksums, and the manifest."""

import json
import os
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any

from tritonemb.storage import copy_rows, digest
from tritonemb.storage.io import sync
from tritonemb.utils import read_sealed

FORMAT = 1
MANIFEST = "trainer.json"
ROWS, CHANGES = ".rows", ".changes"  # of a table on disk: sparse files


def ignore_single_process_warning() -> None:
    """Silence torch's warning that a checkpoint is of a single process, which may come from a thread of its own."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def read_manifest_text(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A checkpoint's manifest, as text and parsed; FileNotFoundError or ValueError, see `read_manifest`."""
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(f"{path} is not a checkpoint: it has no {MANIFEST}")
    text = read_sealed(path / MANIFEST)
    try:
        manifest = json.loads(text)
        _, found = dict(manifest["files"]), manifest["format"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged ({error!r}); use another checkpoint") from error
    if found != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {found}, this version of tritonemb reads format {FORMAT}; it was written by "
            f"tritonemb {manifest.get('versions', {}).get('tritonemb', 'of an unknown version')}"
        )
    return text, manifest


def size_of(path: Path) -> int | None:
    """None if there is no such file."""
    return path.stat().st_size if path.is_file() else None


def size_and_checksum(path: Path) -> list[int]:
    """A file's entry in the manifest."""
    return [path.stat().st_size, checksum(path)]


def checksum(path: Path) -> int:
    """CRC-32 of a file; of a table's rows, whose file may be nearly all holes, their `digest`."""
    if path.suffix in (ROWS, CHANGES):
        return digest(path)
    found = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found = zlib.crc32(block, found)
    return found


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link; where the file system has none, a copy that has been fsynced."""
    try:
        os.link(source, target)
    except OSError:
        if source.suffix in (ROWS, CHANGES):
            copy_rows(source, target)
        else:
            shutil.copy2(source, target)
        sync(target)
