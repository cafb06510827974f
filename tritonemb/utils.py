"""Optional packages, cache folders, atomic and checksummed files, option checks, text formatting, torchrun, and
padding of products."""

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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, Self, SupportsIndex, cast, get_args, get_origin, get_type_hints

# Matrix products round every row identically if they have at least LARGE_BATCH rows and a multiple of BATCH_MULTIPLE;
# other batch sizes may not (measured with MKL and oneDNN, layers up to 1,200 wide; narrow ones see `WideLinear`).
LARGE_BATCH, BATCH_MULTIPLE = 512, 16


def rows_to_pad(size: int, min_size: int = LARGE_BATCH) -> int:
    """Return how many rows a product of `size` rows lacks to have `min_size` and a multiple of `BATCH_MULTIPLE`."""
    return max(min_size, -(-size // BATCH_MULTIPLE) * BATCH_MULTIPLE) - size


class MissingExtraError(ImportError):
    """A package of one of tritonemb's extras is not installed."""


def require(module: str, extra: str = "train") -> ModuleType:
    """Import `module` of an optional dependency; MissingExtraError names the extra to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is installed, one of its own dependencies is not
        raise MissingExtraError(
            f"{package} is required and not installed: pip install 'tritonemb[{extra}]', or in a clone "
            f"pip install '.[{extra}]'",
            name=package,
        ) from error


class LazyModule:
    """Module of an optional dependency; `require` imports it at the first use of an attribute."""

    def __init__(self, name: str, extra: str = "train") -> None:
        self._name = name
        self._extra = extra

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(require(self._name, self._extra), attribute)
        setattr(self, attribute, value)
        return value


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Write to stderr what the process, in C code too, writes to stdout inside the block."""
    flush = ctypes.CDLL(None).fflush
    flush(None)
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


@contextmanager
def on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises an exception of any kind."""
    try:
        yield
    except BaseException:
        undo()
        raise


def print_error(work: Callable[[], object]) -> None:
    """Run a finalizer or exit handler; print its exception, which has no caller to catch it."""
    try:
        work()
    except Exception as error:
        print(f"error: {error}", file=sys.stderr)


class Closeable:
    """Context manager that calls `close` at the end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the suffix of an error about an unknown word: a suggestion, or `otherwise` if no known word is close."""
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else otherwise


def join_names(names: Iterable[str], limit: int = 60, separator: str = ", ", last: str = " ") -> str:
    """Join up to `limit` names; append `last` and the number of names that were omitted."""
    names = list(names)
    return separator.join(names[:limit]) + (f"{last}and {len(names) - limit} more" if len(names) > limit else "")


def pairs_by_name(
    option: str, entries: Iterable[str], expected: str = "number", pattern: str = "[0-9]+"
) -> dict[str, str]:
    """Parse the entries of an option, "name=value"; raise ValueError for others, and for duplicate names."""
    pairs = dict[str, str]()
    for entry in entries:
        name, separator, value = entry.rpartition("=")
        if not separator or not re.fullmatch(pattern, value):
            raise ValueError(f'{option} has {entry!r}, expected "name={expected}"')
        if name in pairs:
            raise ValueError(f"{option} names {name!r} twice")
        pairs[name] = value
    return pairs


def align_columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines of a table with left-aligned columns, two spaces apart."""
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in zip(*rows, strict=True)]
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def split_evenly(size: int, num_parts: int) -> list[int]:
    """Sizes of `num_parts` chunks that differ by at most one, the larger ones first."""
    return [(size + num_parts - 1 - index) // num_parts for index in range(num_parts)]


def format_bytes(size: float) -> str:
    """Format a number of bytes with three digits and a decimal unit (1 kB = 1,000 B)."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(size) >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    digits = ".0f" if units[0] == "B" else ".3g" if abs(size) < 1e4 else ",.0f"
    return f"{size:{digits}} {units[0]}"


def end_with_torchrun() -> None:
    """Make Linux send SIGTERM to this rank when its torchrun dies: a killed torchrun leaves its ranks running."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@functools.cache
def cpu_model() -> str:
    """Model name of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", flags=re.MULTILINE)
    return platform.machine() if match is None else match[1]


def cache_dir() -> Path:
    """User's cache folder: TRITONEMB_CACHE_DIR, else `tritonemb` in XDG_CACHE_HOME or ~/.cache."""
    folder, xdg_folder = (os.environ.get(name) for name in ("TRITONEMB_CACHE_DIR", "XDG_CACHE_HOME"))
    return Path(folder or Path(xdg_folder or Path.home() / ".cache") / "tritonemb")


@functools.cache
def kernel_folder() -> Path:
    """Folder of compiled kernels: in the cache folder, else in the temporary folder.

    Kernels are machine code in pickles, so write access to them is code execution as this user. A cache folder must
    belong to this user or root, and not be world-writable. A temporary one must belong to this user with mode 0700;
    otherwise the process creates a private one and removes it at exit.
    """
    try:
        folder = cache_dir() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if (status := folder.stat()).st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
            raise PermissionError(f"other users may write to {folder}")
        return folder
    except (OSError, RuntimeError) as error:  # read-only, or a user without a home
        logging.getLogger(__name__).warning("compiled kernels are cached in the temporary folder: %s", error)
    folder = Path(tempfile.gettempdir()) / f"tritonemb-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        folder = Path(tempfile.mkdtemp(prefix="tritonemb-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


WRITING = ".writing-"  # prefix of the name of an incomplete file or folder


def sync(path: Path) -> None:
    """Fsync a file, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(temporary: Path, path: Path) -> None:
    """Rename a complete file or folder to its name, after it is on the disk, and make the rename durable."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


@contextmanager
def new_folder(path: Path, errors: AbstractContextManager[object] | None = None) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, which becomes `path` at the end, or is removed after an error.

    Raise FileExistsError if `path` is not an empty folder, FileNotFoundError if its parent does not exist; `errors`
    is a context that converts errors of the block and of the sync to disk.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists; remove it, or choose another folder")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path.absolute().parent}: no such folder to write {path.name} to")
    temporary = path.absolute().with_name(f"{WRITING}{path.name}-{os.getpid()}")
    with errors or nullcontext(), on_error(lambda: shutil.rmtree(temporary, ignore_errors=True)):
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            sync(file)
        publish(temporary, path)


@contextmanager
def atomic_path(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which replaces `path` at the end, or is removed after an error.

    Raise FileNotFoundError if the folder does not exist.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder to write {path.name} to")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        (publish if durable else os.replace)(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: Path, text: str) -> None:
    """Replace `path` atomically and durably with `text` in UTF-8; create the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path, durable=True) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


_SEAL = ',\n "sha256": "%s"\n}\n'


def seal(text: str) -> str:
    """Append a member `sha256` to the text of a JSON object: the digest of the bytes before it."""
    body = text.rstrip().removesuffix("}").rstrip()
    return body + _SEAL % hashlib.sha256(body.encode()).hexdigest()


def read_sealed(path: Path) -> bytes:
    """Read a file of `seal`ed text, or of one without a digest; raise ValueError if the digest does not match."""
    content = path.read_bytes()
    size = len(_SEAL % ("0" * 64))
    digest, end = hashlib.sha256(content[:-size]).hexdigest(), content[-size:]
    if (b'\n "sha256": "' in content or digest.encode() in end) and end != (_SEAL % digest).encode():
        raise ValueError(
            f"{path} is damaged: its content does not match its SHA-256 digest; use another copy or, if it was edited "
            'by hand, remove its member "sha256"'
        )
    return content


class JsonFile:
    """Object stored as JSON of a numbered format, in a file with a digest.

    A subclass defines its title for error messages, the members of its object and the required ones. Unless they are
    the fields of a dataclass, it overrides `to_json`, and `from_json`, which starts with `_members`.
    """

    FORMAT: ClassVar[int] = 1
    TITLE: ClassVar[str]
    MEMBERS: ClassVar[Iterable[str]]
    REQUIRED: ClassVar[Iterable[str]]

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps({"format": self.FORMAT} | asdict(cast(Any, self)), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text of an object; raise ValueError or TypeError if it is invalid."""
        return cls(**cls._members(text))

    def save(self, path: str | Path) -> None:
        """Write a JSON file with a digest, atomically."""
        atomic_write(Path(path), seal(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote; ValueError names the file."""
        content = read_sealed(Path(path))
        try:
            return cls.from_json(content.decode())
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _members(cls, text: str) -> dict[str, Any]:
        """Parse and check the members of an object, without its format and digest."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{cls.TITLE} must be JSON: {error}") from error
        shape = f"{cls.TITLE} is an object with the fields {sorted({*cls.MEMBERS, 'format'})}"
        if not isinstance(values, dict):
            raise ValueError(shape)
        members = {name: value for name, value in values.items() if name not in ("format", "sha256")}
        if values.get("format", cls.FORMAT) != cls.FORMAT:
            raise ValueError(f"this version reads format {cls.FORMAT} of {cls.TITLE}, got {values['format']!r}")
        if unknown := [name for name in members if name not in cls.MEMBERS]:
            hint = did_you_mean(unknown[0], cls.MEMBERS)
            raise ValueError(f"{cls.TITLE} has no field {unknown[0]!r}{hint or f'; {shape}'}")
        if missing := [name for name in cls.REQUIRED if name not in members]:
            raise ValueError(f"{cls.TITLE} needs a {missing[0]}; {shape}")
        return members


def number(default: Any, *, least: int | None = None, positive: bool = False) -> Any:
    """Dataclass field that `Options` checks: at least `least` unless None, or positive."""
    return field(default=default, metadata={"least": least, "positive": positive})


@dataclass(frozen=True)
class Options:
    """Base of option dataclasses: checks ints, the bounds of `number` fields and the values of `Literal` fields."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for option in fields(self):
            least, choices = option.metadata.get("least"), get_args(hints[option.name])
            value: Any = getattr(self, option.name, None)
            if hints[option.name] in (int, int | None) and value is not None:
                if isinstance(value, bool) or not isinstance(value, SupportsIndex):
                    raise TypeError(f"{option.name} must be an int, got {value!r}")
                object.__setattr__(self, option.name, value := value.__index__())
            if least is not None and value is not None and not value >= least:
                bound = "not be negative" if least == 0 else f"be at least {least}"
                raise ValueError(f"{option.name} must {bound}, got {value}")
            if option.metadata.get("positive") and value is not None and not value > 0:
                raise ValueError(f"{option.name} must be positive, got {value}")
            if get_origin(hints[option.name]) is Literal and value not in choices:
                raise ValueError(f"{option.name} must be one of {choices}, got {value!r}")
