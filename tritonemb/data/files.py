"""The files of a log, local or remote: found, put in order and looked at before anything is read from them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tritonemb.data.schema import listed
from tritonemb.utils import require

Format = Literal["text", "parquet", "table"]
PARQUET = (".parquet", ".pq", ".parq")
CODECS = {".gz": "gzip", ".zst": "zstd"}
_PARQUET_MAGIC, _MAGICS = b"PAR1", {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"PK\3\4": "zip"}


@dataclass(frozen=True)
class LogFile:
    """A file of a log.

    Args:
        path: where it is; a URI if it is remote.
        codec: how it is compressed, None if it is not.
        size: bytes as they are stored; rows of a table.
        modified: when, in nanoseconds.
        remote: the `pyarrow` file system of a remote file, and its path there.
        table: the `pyarrow.Table` in place of a file.
    """

    path: Path | str
    format: Format
    codec: str | None
    size: int
    modified: int = 0
    remote: tuple[Any, str] | None = field(default=None, compare=False, repr=False)
    table: Any = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        return str(self.path).rpartition("/")[2] if isinstance(self.path, str) else self.path.name

    @property
    def stem(self) -> str:
        """The name without the endings that say how it is stored: `day_0` of `day_0.gz` and of `day_0.parquet`."""
        return stem_of(self.name)

    @property
    def location(self) -> str:
        """The same for all ways to write the path."""
        return self.path if isinstance(self.path, str) else str(self.path.resolve())

    def open(self) -> Any:
        """The stored bytes as a `pyarrow.NativeFile`.

        Raises:
            ValueError: the file has not the size that it had when it was found.
        """
        self.check_size()
        if self.remote is None:
            return require("pyarrow").OSFile(str(self.path))
        system, path = self.remote
        return system.open_input_file(path)

    def check_size(self) -> None:
        """ValueError if the file has not the size that it had when it was found."""
        if self.remote is None:
            size = os.stat(self.path).st_size
        else:
            system, path = self.remote
            size = system.get_file_info(path).size
        if size != self.size:
            raise ValueError(
                f"{self.path} has changed since it was opened first: it had {self.size} bytes and now has {size}; "
                "start again"
            )


def find(source: str | Path | Sequence[str | Path]) -> tuple[LogFile, ...]:
    """The files of a log: one, several in the order given, or those of a folder in natural order (day_2 before day_10).

    In a folder, files whose names begin with a dot or an underscore (`_SUCCESS`) and folders are left out.

    Args:
        source: paths, or URIs such as `s3://bucket/logs` that `pyarrow` or else `fsspec` has a file system for.

    Raises:
        FileNotFoundError, ValueError: naming the file that is missing, empty, unreadable, not a regular file or of
            another format than the others.
    """
    given = [source] if isinstance(source, str | Path) else list(source)
    if not given:
        raise ValueError("no files are given; name a file, several files or a folder")
    files: list[LogFile] = []
    for entry in given:
        if is_remote(entry):
            files += _remote(str(entry))
        else:
            path = Path(entry)
            files += [_local(found) for found in (_in_folder(path) if path.is_dir() else [path])]
    _check_alike(files)
    return tuple(files)


def is_remote(path: str | Path) -> bool:
    return isinstance(path, str) and "://" in path


def exists(path: str | Path) -> bool:
    """Whether there is a file or folder; what is remote is looked for when it is opened."""
    return is_remote(path) or Path(path).exists()


def stem_of(name: str) -> str:
    for suffix in (*CODECS, *PARQUET, ".tsv", ".txt", ".csv"):
        name = name.removesuffix(suffix)
    return name


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts names as people do: numbers in them by their value."""
    parts = re.split(r"([0-9]+)", name)
    return [(1, int(part), part) if part.isdecimal() else (0, 0, part) for part in parts]


def described(files: Sequence[LogFile]) -> str:
    """The files, for messages."""
    return listed((str(file.path) for file in files), most=5)


def _is_data(name: str) -> bool:
    return not name.startswith((".", "_"))


def _in_folder(folder: Path) -> list[Path]:
    paths = [path for path in folder.iterdir() if _is_data(path.name) and not path.is_dir()]
    if not paths:
        raise ValueError(f"{folder}: there are no data files in this folder")
    return sorted(paths, key=lambda path: natural(path.name))


def _local(path: Path) -> LogFile:
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
            beginning = file.read(4)
    except OSError as error:
        raise ValueError(f"{path} can not be read: {error.strerror}") from error
    return LogFile(path, *_recognised(path, path.suffix, beginning), status.st_size, status.st_mtime_ns)


def _remote(uri: str) -> list[LogFile]:
    shown = re.sub(r"(?<=://)[^/]*@", "", uri.partition("?")[0]).rstrip("/")  # without keys and options
    fs = require("pyarrow.fs")
    try:
        system, place = _file_system(uri, shown)
        info = system.get_file_info(place)
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(f"{shown}: no such file or folder")
        found = [(shown, info)]
        if info.type == fs.FileType.Directory:
            entries = system.get_file_info(fs.FileSelector(place))
            names = {e.base_name: e for e in entries if e.type == fs.FileType.File and _is_data(e.base_name)}
            found = [(f"{shown}/{name}", names[name]) for name in sorted(names, key=natural)]
            if not found:
                raise ValueError(f"{shown}: there are no data files in this folder")
        files = []
        for path, info in found:
            if not info.size:
                raise ValueError(f"{path} is empty")
            with system.open_input_file(info.path) as file:
                beginning = file.read(4)
            form, codec = _recognised(path, Path(path).suffix, beginning)
            files.append(LogFile(path, form, codec, info.size, info.mtime_ns, (system, info.path)))
        return files
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{shown} can not be read: {error}") from error


def _file_system(uri: str, shown: str) -> tuple[Any, str]:
    """A `pyarrow` file system and the path in it."""
    fs = require("pyarrow.fs")
    try:
        system, path = fs.FileSystem.from_uri(uri)
    except ValueError:  # a scheme that pyarrow does not know
        core = require("fsspec.core")
        try:
            system, path = core.url_to_fs(uri)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{shown}: no file system for this URI ({error})") from error
        system = fs.PyFileSystem(fs.FSSpecHandler(system))
    return system, path.rstrip("/")


def _recognised(path: Path | str, suffix: str, beginning: bytes) -> tuple[Format, str | None]:
    """Format and codec, by the name and the first bytes, which have to agree."""
    suffix = suffix.lower()
    if suffix in PARQUET:
        return "parquet", None
    codec = CODECS.get(suffix)
    if codec is None and beginning == _PARQUET_MAGIC:
        raise ValueError(f"{path} holds Parquet but is not named so; let its name end with .parquet")
    found = next((name for magic, name in _MAGICS.items() if beginning.startswith(magic)), None)
    if codec is None and found is not None:
        known = {codec: suffix for suffix, codec in CODECS.items()}
        advice = f"let its name end with {known[found]}" if found in known else "gzip and zstd can be read; unpack it"
        raise ValueError(f"{path} is compressed with {found}: {advice}")
    if codec is not None and found != codec:
        raise ValueError(f"{path} is not a {codec} file, as its name says; rename it or fetch it again")
    return "text", codec


def _check_alike(files: Sequence[LogFile]) -> None:
    by_format = {file.format: file.path for file in files}
    if len(by_format) > 1:
        raise ValueError(
            f"{by_format['parquet']} is Parquet and {by_format['text']} is text: a log has files of one format"
        )
    seen: dict[str, LogFile] = {}
    for file in files:
        folder = str(file.path).rpartition("/")[0] if isinstance(file.path, str) else os.path.abspath(file.path.parent)
        key = f"{folder}/{file.stem}"
        if key in seen:
            raise ValueError(f"{seen[key].path} and {file.path} look like the same data twice; keep one of them")
        seen[key] = file
