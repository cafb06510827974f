"""Files of a log, local or remote, checked before anything is read; and the parts that a split or shard reads."""

import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from tritonemb.data.protocol import SPLITS, WHOLE, ReadReport, Shard, Split
from tritonemb.data.schema import SplitRule
from tritonemb.flight import SCHEMES
from tritonemb.utils import LazyModule, atomic_path, join_names, require

# The parts of pyarrow that read logs, each imported when it is first used.
pa: Any = LazyModule("pyarrow")
arrow_csv: Any = LazyModule("pyarrow.csv")
compute: Any = LazyModule("pyarrow.compute")
dataset: Any = LazyModule("pyarrow.dataset")
fs: Any = LazyModule("pyarrow.fs")
parquet: Any = LazyModule("pyarrow.parquet")

Format = Literal["text", "parquet", "table", "stream"]
SUFFIXES: dict[str, Format] = {".parquet": "parquet", ".pq": "parquet", ".parq": "parquet"}  # other files are text
CODECS = {".gz": "gzip", ".zst": "zstd"}
EDGE_BYTES = 1 << 16  # bytes at each end of a file that are checksummed for a run
NEAR = 1 / 16  # of a shard: how far its bounds may move to the end of a row group
CHECKSUMS, BLOCK_BYTES = b"tritonemb.crc32", 1 << 20  # metadata key and block size of the checksums in Parquet files
_MAGICS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"PK\3\4": "zip"}
_MAGICS |= {bytes([0x50 + number]) + b"*M\x18": "zstd" for number in range(16)}  # skippable frames, as pzstd writes
_SCHEMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfss": "abfs"}
_LOCAL = re.compile(r"(?:file|local)://(?:localhost(?=/))?", re.IGNORECASE)


@dataclass(frozen=True)
class LogFile:
    """File of a log, or a `pyarrow.Table` or a `RowStream` in place of one."""

    path: Path | str  # a URI if it is remote
    format: Format
    codec: str | None = None  # compression
    size: int = 0  # stored bytes; rows of a table
    modified: int = 0  # nanoseconds
    stored: tuple[Any, str] | None = field(default=None, compare=False, repr=False)  # file system and path in it
    table: Any = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2] if isinstance(self.path, str) else self.path.name

    @property
    def stem(self) -> str:
        """Name without suffixes of format and compression: `day_0` of `day_0.gz` and of `day_0.parquet`."""
        name = self.name
        for suffix in (*CODECS, *SUFFIXES, ".tsv", ".txt", ".csv"):
            name = name.removesuffix(suffix)
        return name

    @property
    def identity(self) -> tuple[Any, ...]:
        """Identity of the file, the same for every spelling of its path and for links."""
        if self.stored is None:
            return (self.path,)
        if isinstance(self.path, Path):
            status = self.path.stat()
            return status.st_dev, status.st_ino or self.path.resolve()
        scheme, _, address = self.path.partition("://")
        return _SCHEMES.get(scheme, scheme), unquote(address) if scheme.startswith("http") else self.stored[1]

    def digest(self) -> str:
        """Describe the contents: size, and CRC-32 of the first and last 64 KiB; number of rows of a table."""
        if self.stored is None:
            return self.format if self.format == "stream" else f"{self.size:,} rows"
        with self.open() as raw:
            edges = raw.read_at(EDGE_BYTES, 0) + raw.read_at(EDGE_BYTES, max(self.size - EDGE_BYTES, 0))
        return f"{self.size:,} bytes, CRC-32 {zlib.crc32(edges):08x} of its first and last 64 KiB"

    def open(self) -> Any:
        """Open the stored bytes as a `pyarrow.NativeFile`; raise ValueError if the size has changed."""
        system, path = self.check_size()
        return system.open_input_file(path)

    def check_size(self) -> tuple[Any, str]:
        """Return the file system and the path in it; raise ValueError if the size has changed."""
        assert self.stored is not None
        system, path = self.stored
        if (size := system.get_file_info(path).size) != self.size:
            raise self.changed_error(f"it had {self.size} bytes and now has {size}")
        return system, path

    def changed_error(self, reason: str) -> ValueError:
        return ValueError(f"{self.path} has changed since it was opened: {reason}; start again")


def find_files(source: str | Path | Sequence[str | Path | LogFile]) -> tuple[LogFile, ...]:
    """List the files of a log: one, several in this order, or those of a folder in natural order (day_2 before day_10).

    Names in a folder that begin with a dot or an underscore (`_SUCCESS`) are ignored. URIs such as `s3://bucket/logs`
    are opened by `pyarrow`, or else by `fsspec`. FileNotFoundError or ValueError names a file that cannot be read.
    """
    if not (sources := [source] if isinstance(source, str | Path) else list(source)):
        raise ValueError("no files given; pass a file, several files or a folder")
    files = [file for entry in sources for file in ([entry] if isinstance(entry, LogFile) else _list_files(entry))]
    if len(path_by_format := {file.format.replace("parquet", "Parquet"): file.path for file in files}) > 1:
        (form, path), (other_form, other_path), *_ = sorted(path_by_format.items())
        raise ValueError(f"{path} is {form} and {other_path} {other_form}: a log has one format")
    _check_distinct(files)
    return tuple(files)


def _check_distinct(files: Sequence[LogFile]) -> None:
    seen = dict[Any, LogFile]()
    for file in files:
        path = file.path if isinstance(file.path, str) else os.path.abspath(file.path)
        for key in (file.identity, (path.removesuffix(file.name), file.stem)):
            if (earlier_file := seen.setdefault(key, file)) is not file:
                raise ValueError(f"{earlier_file.path} and {file.path} look like the same data twice; keep one of them")


def is_remote(path: str | Path) -> bool:
    return isinstance(path, str) and "://" in path


def exists(path: str | Path) -> bool:
    """Return whether a file or folder exists; remote ones are checked when they are opened."""
    return is_remote(path) or Path(path).exists()


def natural_sort_key(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts names in natural order: numbers in them by value."""
    return [(1, int(part), part) if part.isdecimal() else (0, 0, part) for part in re.split(r"([0-9]+)", name)]


def _list_files(entry: str | Path) -> list[LogFile]:
    path = current = display_path(entry)
    files = []
    try:
        system, path_in_system = resolve_path(entry)
        # Data files at the path: one, or those of a folder.
        info = system.get_file_info(path_in_system)
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(f"{path}: no such file or folder")
        info_by_path = {path: info}
        if info.type == fs.FileType.Directory:
            entries = system.get_file_info(fs.FileSelector(path_in_system))
            entries = sorted(entries, key=lambda entry: natural_sort_key(entry.base_name))
            entries = [entry for entry in entries if not entry.base_name.startswith((".", "_"))]
            folders = [entry for entry in entries if entry.type == fs.FileType.Directory]
            folder = f"{path}/{{}}".format if isinstance(path, str) else path.joinpath
            info_by_path = {folder(entry.base_name): entry for entry in entries if entry not in folders}
            if names := [entry.base_name for entry in folders if system.get_file_info(fs.FileSelector(entry.path))]:
                raise ValueError(
                    f"{path} contains folders, whose files are not read: {join_names(names, limit=5)}; move the files "
                    "out of them, or begin the folders' names with an underscore"
                )
        if not info_by_path:
            raise ValueError(f"{path}: no data files in this folder")
        # Check each file, and detect its format by its first bytes.
        for current, info in info_by_path.items():
            if info.type != fs.FileType.File:
                raise ValueError(f"{current} is not a regular file; pipes and devices cannot be read twice")
            if not info.size:
                raise ValueError(f"{current} is empty")
            with system.open_input_file(info.path) as file:
                form, codec = _detect_format(current, file.read(4))
            files.append(LogFile(current, form, codec, info.size, info.mtime_ns, (system, info.path)))
    except UnicodeError as error:
        raise ValueError(f"{str(current)!r}: names of files must be UTF-8 ({error}); rename them") from error
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ValueError(f"{current} cannot be read: {reason}") from error
    return files


def display_path(source: str | Path) -> Path | str:
    """Return the path of a local path or file:// URI; other URIs without credentials and options."""
    if not is_remote(source):
        return Path(source)
    uri = re.sub(r"(?<=://)[^/]*@", "", str(source).partition("?")[0]).rstrip("/")
    return Path(unquote(uri[local.end() :])) if (local := _LOCAL.match(uri)) else uri


def resolve_path(source: str | Path) -> tuple[Any, str]:
    shown, uri = display_path(source), str(source)
    if isinstance(shown, Path):
        return fs.LocalFileSystem(), str(shown) if is_remote(source) else uri
    try:  # percent-encode blanks and the like if they are not yet
        legal = re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", quote(uri, safe="%/:?=&@+,;!$'()*~[]"))
        system, path = fs.FileSystem.from_uri(legal)
    except ValueError:  # a scheme unknown to pyarrow
        core = require("fsspec.core")
        try:
            system, path = core.url_to_fs(uri)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{shown}: no file system for this URI ({error})") from error
        system = fs.PyFileSystem(fs.FSSpecHandler(system))
    return system, path.rstrip("/")


def _detect_format(path: Path | str, beginning: bytes) -> tuple[Format, str | None]:
    suffix = Path(path).suffix.lower()
    if suffix in SUFFIXES:
        return SUFFIXES[suffix], None
    if suffix not in CODECS and beginning == b"PAR1":
        raise ValueError(f"{path} is a Parquet file by its contents; rename it to end with .parquet")
    codec = CODECS.get(suffix)
    detected = next((name for magic, name in _MAGICS.items() if beginning.startswith(magic)), None)
    if codec is None and detected is not None:
        names = [suffix for suffix, name in CODECS.items() if name == detected]
        advice = f"rename it to end with {names[0]}" if names else "decompress it, or use gzip or zstd"
        raise ValueError(f"{path} is compressed with {detected}: {advice}")
    if detected != codec:
        raise ValueError(f"{path} is not a {codec} file, as its name says; rename it or fetch it again")
    return "text", codec


@contextmanager
def write_parquet(path: Path, schema: Any, compression: str) -> Iterator[Any]:
    """Open a `pyarrow.parquet.ParquetWriter`; the file gets its name when it is complete.

    Pages have checksums. The metadata has checksums of all bytes: 16 hexadecimal digits for the offset of the footer, 8
    for the CRC-32 of the footer with zeros for these 8 digits, and 8 for that of each MiB before the footer."""
    with atomic_path(path) as part:
        with parquet.ParquetWriter(part, schema, compression=compression, write_page_checksum=True) as writer:
            yield writer
            end = part.stat().st_size
            with part.open("rb") as file:
                sums = b"%016x" % end + b"".join(map(_crc32, (b"", *iter(lambda: file.read(BLOCK_BYTES), b""))))
            writer.add_key_value_metadata({CHECKSUMS: sums})
        with part.open("r+b") as file:
            file.seek(end)
            footer = file.read()
            file.seek(end)
            file.write(footer.replace(sums, sums[:16] + _crc32(footer) + sums[24:]))


@contextmanager
def open_parquet(
    file: LogFile, columns: Sequence[str] | None = None, encoded: Callable[[Any], list[str]] = lambda metadata: []
) -> Iterator[tuple[Any, Callable[[int], None]]]:
    """Open a `pyarrow.parquet.ParquetFile`, with a function that verifies the checksums of a row group, or of some of
    its columns, before use. Others have page checksums verified, if any. Raise ValueError if damaged or changed.
    `encoded` returns the columns to read as dictionary arrays, given the file's metadata."""
    try:
        with file.open() as raw:
            metadata = parquet.read_metadata(raw)
            verify = None if isinstance(file.path, str) else _verifier(raw, metadata, columns)
            # Read page by page instead of whole row groups.
            paging: dict[str, Any] = {"buffer_size": 1 << 20, "pre_buffer": False}
            paging |= {"page_checksum_verification": verify is None, "read_dictionary": encoded(metadata)}
            with parquet.ParquetFile(raw, metadata=metadata, **paging) as source:
                yield source, verify or (lambda group: None)
    except ConnectionError:  # a reader host does not answer; the file may be complete
        raise
    except (pa.ArrowException, OSError, UnicodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file.path} is not a complete Parquet file ({reason}); write or fetch it again") from error


def _verifier(raw: Any, metadata: Any, columns: Sequence[str] | None) -> Callable[[int], None] | None:
    checksums, footer_start = (metadata.metadata or {}).get(CHECKSUMS, b""), raw.size() - metadata.serialized_size - 8
    if not checksums.startswith(b"%016x" % footer_start):  # not the file of this metadata: other writers copy metadata
        return None
    footer = raw.read_at(raw.size() - footer_start, footer_start)
    if checksums[16:24] != _crc32(footer.replace(checksums, checksums[:16] + _crc32(b"") + checksums[24:])):
        raise OSError("checksum mismatch in its footer")
    verified = set[int]()  # numbers of blocks

    def verify(group: int) -> None:
        # Blocks of the column chunks of the row group.
        blocks, prefixes = set[int](), ("",) if columns is None else tuple(f"{name}." for name in columns)
        for chunk in map(metadata.row_group(group).column, range(metadata.num_columns)):
            if f"{chunk.path_in_schema}.".startswith(prefixes):
                start = chunk.dictionary_page_offset or chunk.data_page_offset
                blocks |= {*range(start // BLOCK_BYTES, -(-(start + chunk.total_compressed_size) // BLOCK_BYTES))}
        for block in sorted(blocks - verified):
            start, digits = block * BLOCK_BYTES, checksums[8 * block + 24 : 8 * block + 32]
            if _crc32(raw.read_at(min(BLOCK_BYTES, footer_start - start), start)) != digits:
                raise OSError(f"checksum mismatch in the block at byte {start:,}")
            verified.add(block)

    return verify


def _crc32(content: bytes) -> bytes:
    return b"%08x" % zlib.crc32(content)


@dataclass(frozen=True)
class Part:
    """Part of a file: rows `[start, stop)` of Parquet, lines that begin in bytes `[start, stop)` of decompressed text.
    A shard of text that is not seekable has every count-th stripe; see `TextSource.chunks`."""

    file: int  # index among the log's files
    start: int = 0
    stop: int | None = None  # None for the end of the file
    stripes: Shard = WHOLE


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a part of a log. A job replaces `rows` by its result for valid ones, and adds a report."""

    part: int  # index
    offset: Any  # first byte of the decompressed text, or first row; or `Offsets` of a stream
    line: int  # lines of the part before it
    first_row: int  # row number in the file, without header and blank lines; for text only if the split is random
    rows: Any  # complete lines, a `bytearray`, or a `pyarrow.RecordBatch`
    report: ReadReport = field(default_factory=ReadReport)


def split_files(rule: SplitRule, files: tuple[LogFile, ...]) -> dict[Split, tuple[LogFile, ...]]:
    """Return the files of each split; the rule may name files outside the log."""
    remote: dict[str, Any] = {file.name: file for file in files if str(file.path).startswith(SCHEMES)}
    named = rule.validation_files, rule.test_files
    sources = ([remote.get(Path(path).name, path) for path in paths] for paths in named)
    validation, test = (find_files(paths) if paths else () for paths in sources)
    test = test if validation or test or files[0].format == "stream" else files[-1:]
    validation_at, test_at = ({file.identity for file in held_out} for held_out in (validation, test))
    if overlap := [file for file in test if file.identity in validation_at]:
        raise ValueError(f"split: {overlap[0].path} is both a validation and a test file")
    if not (train := tuple(file for file in files if file.identity not in validation_at | test_at)):
        names = join_names((str(file.path) for file in files), limit=5)
        raise ValueError(f"split: all files are held out, no train rows are left: {names}")
    if len({file.format.replace("stream", "parquet") for file in (*train, *validation, *test)}) > 1:
        raise ValueError("split: the held-out files have another format than the train files")
    _check_distinct((*train, *validation, *test))
    return {"train": train, "validation": validation, "test": test}


def parts_of_files(by_split: Mapping[Split, Sequence[Any]]) -> dict[Split, tuple[Part, ...]]:
    numbers = itertools.count()
    return {split: tuple(Part(next(numbers)) for _ in by_split.get(split, ())) for split in SPLITS}


def end_parts(rule: SplitRule, sizes: list[int]) -> dict[Split, tuple[Part, ...]]:
    """Divide the concatenated files into train, validation and test parts, by rows or bytes (`sizes` of the files)."""
    total = sum(sizes)
    test = total - round(total * rule.test_share)
    validation = test - round(total * rule.validation_share)
    bounds = ((0, validation), (validation, test), (test, total))
    files = [Part(file) for file in range(len(sizes))]
    return {split: tuple(ranges_between(files, sizes, *ends)) for split, ends in zip(SPLITS, bounds, strict=True)}


def ranges_between(parts: Sequence[Part], sizes: Sequence[int], start: int, stop: int) -> list[Part]:
    """Return the parts between two offsets into the concatenated parts, in the unit of their `sizes`."""
    pieces = []
    for part, size, first in zip(parts, sizes, itertools.accumulate(sizes, initial=0), strict=False):
        begin, end = max(start - first, 0), min(stop - first, size)
        if begin < end:
            pieces.append(Part(part.file, part.start + begin, part.stop if end == size else part.start + end))
    return pieces


def even_shard(parts: Sequence[Part], sizes: Sequence[int], shard: Shard, ends: Sequence[int] = ()) -> list[Part]:
    """Return the index-th of `count` equal shards of concatenated parts; bounds move to `ends` that are near."""
    index, count = shard
    total = sum(sizes)
    bounds = (_snap_to_ends(total * position // count, total / count, ends) for position in (index, index + 1))
    return ranges_between(parts, sizes, *bounds)


def _snap_to_ends(cut: int, length: float, ends: Sequence[int]) -> int:
    nearest = min(ends, key=lambda end: abs(end - cut), default=cut)
    return nearest if cut and abs(nearest - cut) <= NEAR * length else cut


def whole_file_shard(parts: Sequence[Part], sizes: Sequence[int], shard: Shard) -> list[Part]:
    """Assign whole parts to shards, the largest first, each to the shard with the least; return one shard, in order."""
    index, count = shard
    loads, shard_of = [0] * count, [0] * len(parts)
    for number in sorted(range(len(parts)), key=lambda number: -sizes[number]):
        shard_of[number] = loads.index(min(loads))
        loads[shard_of[number]] += sizes[number]
    return [part for part, number in zip(parts, shard_of, strict=True) if number == index]
