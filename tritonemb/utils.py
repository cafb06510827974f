"""Optional packages, cache folders, checks of options, whole files, digests of JSON, the nearest word, and torchrun."""

import atexit
import ctypes
import difflib
import functools
import hashlib
import importlib
import json
import logging
import os
import platform
import re
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, Self, cast, get_args, get_origin, get_type_hints


class MissingExtraError(ImportError):
    """A package of one of tritonemb's extras is not installed."""


def require(module: str, extra: str = "train") -> ModuleType:
    """Import `module`, a part of tritonemb's optional dependencies; MissingExtraError names the extra that has it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, something that it needs is not
        raise MissingExtraError(
            f"{package} is needed here and not installed: pip install 'tritonemb[{extra}]', or in a clone "
            f"pip install '.[{extra}]'",
            name=package,
        ) from error


class LazyModule:
    """A module of the optional dependencies, which `require` imports when an attribute is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(require(self._name), attribute)
        setattr(self, attribute, found)
        return found


@contextmanager
def on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises anything."""
    try:
        yield
    except BaseException:
        undo()
        raise


def print_error(work: Callable[[], object]) -> None:
    """Do what the end of the process, or of an object, asks for; its exception, which nobody catches, is printed."""
    try:
        work()
    except Exception as error:
        print(f"error: {error}", file=sys.stderr)


class Closeable:
    """Closed at the end of a `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a message about an unknown word: the nearest known one, if one is near."""
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else otherwise


def join_names(names: Iterable[str], most: int = 60, between: str = ", ", last: str = " ") -> str:
    """Names with commas or something else `between` them; the rest, behind `last`, counted."""
    names = list(names)
    return between.join(names[:most]) + (f"{last}and {len(names) - most} more" if len(names) > most else "")


def align_columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of rows of cells: columns are as wide as their cells, and two blanks apart."""
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in zip(*rows, strict=True)]
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def split_evenly(size: int, parts: int) -> list[int]:
    """Sizes of parts, which differ by one at most, the larger ones first."""
    return [(size + parts - 1 - part) // parts for part in range(parts)]


def format_bytes(size: float) -> str:
    """Bytes, with a unit of 1000."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(size) >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    digits = ".0f" if units[0] == "B" else ".3g" if abs(size) < 1e4 else ",.0f"
    return f"{size:{digits}} {units[0]}"


def end_with_torchrun() -> None:
    """Let this rank get SIGTERM when the torchrun that started it ends: one that is killed ends no ranks. On Linux."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@functools.cache
def cpu_model() -> str:
    """The name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", flags=re.MULTILINE)
    return platform.machine() if found is None else found[1]


def cache_dir() -> Path:
    """The user's cache folder for tritonemb."""
    given, of_all = (os.environ.get(name) for name in ("TRITONEMB_CACHE_DIR", "XDG_CACHE_HOME"))
    return Path(given or Path(of_all or Path.home() / ".cache") / "tritonemb")


@functools.cache
def kernel_folder() -> Path:
    """Where compiled kernels are kept: in the cache folder, else with the temporary files.

    Kernels are machine code in pickles, so a user who can write them runs code here. The folder must be this user's, or
    root's, and not open to all; one among the temporary files this user's, and closed to others; else this process gets
    one of its own.
    """
    try:
        folder = cache_dir() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if (status := folder.stat()).st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
            raise PermissionError(f"other users may write to {folder}")
        return folder
    except (OSError, RuntimeError) as error:  # read-only, or a user without a home
        logging.getLogger(__name__).warning("compiled kernels are kept with the temporary files: %s", error)
    folder = Path(tempfile.gettempdir()) / f"tritonemb-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        folder = Path(tempfile.mkdtemp(prefix="tritonemb-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it replaces `path` at the end, or is removed if there is an error.
    FileNotFoundError if the folder is not there."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder to write {path.name} to")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def atomic_write(path: Path, text: str) -> None:
    """Write `text` in UTF-8, on the disk before it takes the place of `path`; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part, part.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


_SEAL = ',\n "sha256": "%s"\n}\n'


def seal(text: str) -> str:
    """A JSON object's text with one more member at its end, `sha256`: the digest of the bytes before it."""
    body = text.rstrip().removesuffix("}").rstrip()
    return body + _SEAL % hashlib.sha256(body.encode()).hexdigest()


def read_sealed(path: Path) -> bytes:
    """The content of a file of `sealed` text, or of one without a digest; ValueError if it is not what was written."""
    content = path.read_bytes()
    size = len(_SEAL % ("0" * 64))
    digest, end = hashlib.sha256(content[:-size]).hexdigest(), content[-size:]
    if (b'\n "sha256": "' in content or digest.encode() in end) and end != (_SEAL % digest).encode():
        raise ValueError(
            f"{path} is damaged: it does not have the digest that it ends with; use another one or, if it was edited "
            'by hand, remove its member "sha256"'
        )
    return content


class JsonFile:
    """What is kept as a JSON object of one format, in a file with a digest.

    A derived class says what it is, which members its object has, and those that it needs. Where these are not the
    fields of a dataclass, it has a method `to_json`, and `from_json`, which begins with `_members`.
    """

    FORMAT: ClassVar[int] = 1
    TITLE: ClassVar[str]
    MEMBERS: ClassVar[Iterable[str]]
    REQUIRED: ClassVar[Iterable[str]]

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        return json.dumps({"format": self.FORMAT} | asdict(cast(Any, self)), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """From its text; ValueError or TypeError says what is wrong with it."""
        return cls(**cls._members(text))

    def save(self, path: str | Path) -> None:
        """Write it as JSON, with a digest."""
        atomic_write(Path(path), seal(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read it from JSON; ValueError names the file."""
        content = read_sealed(Path(path))
        try:
            return cls.from_json(content.decode())
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _members(cls, text: str) -> dict[str, Any]:
        """The members of an object, without its format and digest."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{cls.TITLE} must be JSON: {error}") from error
        shape = f"{cls.TITLE} is an object with the fields {sorted({*cls.MEMBERS, 'format'})}"
        if not isinstance(values, dict):
            raise ValueError(shape)
        found = {name: value for name, value in values.items() if name not in ("format", "sha256")}
        if values.get("format", cls.FORMAT) != cls.FORMAT:
            raise ValueError(f"this version reads format {cls.FORMAT} of {cls.TITLE}, got {values['format']!r}")
        if unknown := [name for name in found if name not in cls.MEMBERS]:
            hint = did_you_mean(unknown[0], cls.MEMBERS)
            raise ValueError(f"{cls.TITLE} has no field {unknown[0]!r}{hint or f'; {shape}'}")
        if missing := [name for name in cls.REQUIRED if name not in found]:
            raise ValueError(f"{cls.TITLE} needs a {missing[0]}; {shape}")
        return found


def number(default: Any, *, least: int | None = None, positive: bool = False) -> Any:
    """A field whose value is None or at least `least`, or positive, which `Options` checks."""
    return field(default=default, metadata={"least": least, "positive": positive})


@dataclass(frozen=True)
class Options:
    """Checks the numbers and the words of the fields that derived classes add."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for each in fields(self):
            least, words = each.metadata.get("least"), get_args(hints[each.name])
            value: Any = getattr(self, each.name, None)
            if least is not None and value is not None and value < least:
                bound = "not be negative" if least == 0 else f"be at least {least}"
                raise ValueError(f"{each.name} must {bound}, got {value}")
            if each.metadata.get("positive") and not value > 0:
                raise ValueError(f"{each.name} must be positive, got {value}")
            if get_origin(hints[each.name]) is Literal and value not in words:
                raise ValueError(f"{each.name} must be one of {words}, got {value!r}")
