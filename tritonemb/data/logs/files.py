"""The files of a log: found, put in order and looked at before anything is read from them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tritonemb.data.logs.problems import listed

Format = Literal["tsv", "parquet"]
PARQUET = (".parquet", ".pq", ".parq")
CODECS = {".gz": "gzip", ".zst": "zstd"}
_PARQUET_MAGIC, _MAGICS = b"PAR1", {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"PK\3\4": "zip"}


@dataclass(frozen=True)
class LogFile:
    """A file of a log: `size` in bytes, as they lie on the disk; `codec` is how they are compressed, None if not."""

    path: Path
    format: Format
    codec: str | None
    size: int

    def check_size(self, size: int) -> None:
        """ValueError if the file, as it is opened again, has not the bytes that it had."""
        if size != self.size:
            raise ValueError(
                f"{self.path} has changed since it was opened first: it had {self.size} bytes and now has {size}; "
                "start again"
            )

    @property
    def stem(self) -> str:
        """The name without the endings that say how it is stored: `day_0` of `day_0.gz` and of `day_0.parquet`."""
        return stem_of(self.path)


def find(source: str | Path | Sequence[str | Path]) -> tuple[LogFile, ...]:
    """The files of a log: one, several in the order given, or those of a folder in natural order (day_2 before day_10).

    In a folder, files whose names begin with a dot or an underscore (`_SUCCESS`) and folders are left out.

    Raises:
        FileNotFoundError, ValueError: naming the file that is missing, empty, unreadable, not a regular file or of
            another format than the others.
    """
    given = [source] if isinstance(source, str | Path) else list(source)
    if not given:
        raise ValueError("no files are given; name a file, several files or a folder")
    paths: list[Path] = []
    for entry in map(Path, given):
        paths += _in_folder(entry) if entry.is_dir() else [entry]
    files = tuple(_looked_at(path) for path in paths)
    _check_alike(files)
    return files


def stem_of(path: Path) -> str:
    name = path.name
    for suffix in (*CODECS, *PARQUET, ".tsv", ".txt"):
        name = name.removesuffix(suffix)
    return name


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts names as people do: numbers in them by their value."""
    parts = re.split(r"([0-9]+)", name)
    return [(1, int(part), part) if part.isdecimal() else (0, 0, part) for part in parts]


def _in_folder(folder: Path) -> list[Path]:
    paths = [path for path in folder.iterdir() if not path.name.startswith((".", "_")) and not path.is_dir()]
    if not paths:
        raise ValueError(f"{folder}: there are no data files in this folder")
    return sorted(paths, key=lambda path: natural(path.name))


def _looked_at(path: Path) -> LogFile:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file or folder") from None
    except OSError as error:
        raise ValueError(f"{path} can not be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file; logs are read more than once, so pipes and devices are not")
    if status.st_size == 0:
        raise ValueError(f"{path} is empty")
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise ValueError(f"{path} can not be read: {error.strerror}") from error
    return _recognised(path, head, status.st_size)


def _recognised(path: Path, head: bytes, size: int) -> LogFile:
    suffix = path.suffix.lower()
    if suffix in PARQUET:
        return LogFile(path, "parquet", None, size)
    codec = CODECS.get(suffix)
    if codec is None and head == _PARQUET_MAGIC:
        raise ValueError(f"{path} holds Parquet but is not named so; let its name end with .parquet")
    found = next((name for magic, name in _MAGICS.items() if head.startswith(magic)), None)
    if codec is None and found is not None:
        known = {codec: suffix for suffix, codec in CODECS.items()}
        advice = f"let its name end with {known[found]}" if found in known else "gzip and zstd can be read; unpack it"
        raise ValueError(f"{path} is compressed with {found}: {advice}")
    if codec is not None and found != codec:
        raise ValueError(f"{path} is not a {codec} file, as its name says; rename it or fetch it again")
    return LogFile(path, "tsv", codec, size)


def _check_alike(files: tuple[LogFile, ...]) -> None:
    by_format = {file.format: file for file in files}
    if len(by_format) > 1:
        raise ValueError(
            f"{by_format['parquet'].path} is Parquet and {by_format['tsv'].path} is text: a log has files of one format"
        )
    seen: dict[str, LogFile] = {}
    for file in files:
        key = os.path.abspath(file.path.parent / file.stem)
        if key in seen:
            raise ValueError(f"{seen[key].path} and {file.path} look like the same data twice; keep one of them")
        seen[key] = file


def described(files: tuple[LogFile, ...]) -> str:
    """The files, for messages."""
    return listed((str(file.path) for file in files), most=5)
