"""Files of rows: creation, copies and digests of sparse files, and the header page.

The header identifies the table and the layout of its records.
"""

import errno
import fcntl
import hashlib
import itertools
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tritonemb.memory import HUGE_PAGE
from tritonemb.storage.aio import PAGE_BYTES, IoBuffer, PageFile
from tritonemb.storage.page_table import FileLayout, runs
from tritonemb.storage.store import Record, StorageError, cpu_kernels, storage_errors
from tritonemb.storage.threads import shared_threads, shielded
from tritonemb.utils import WRITING, on_error, publish

FORMAT = 3
OLDEST_FORMAT = 2  # that can be read: all pages have `PAGE_BYTES`
ROWS, CHANGES = b"tritonemb rows\n\0", b"tritonemb diff\n\0"
_HEAD = struct.Struct("<16sII")  # kind of file, format, length of the JSON
_CHECKSUM_BYTES = 8
COPY_BYTES = 1 << 20  # piece size of a copy
BATCH_TASKS = 512  # tasks per job
_FICLONE = 0x40049409  # Linux ioctl: make a file a reflink copy of another
# Reflinks are not supported by this file system, across file systems, or for such files.
_NO_REFLINK = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM)
DIGEST_BYTES = 1 << 18  # piece size; part of the digest's definition, so it must not change
_thread_local = threading.local()


@contextmanager
def new_file(path: Path) -> Iterator[PageFile]:
    """Create a file atomically: it is written under a temporary name, flushed, then renamed; removed after an error."""
    temporary = path.with_name(f"{WRITING}{path.name}")
    with on_error(lambda: temporary.unlink(missing_ok=True)), closing(create_file(temporary)) as file:
        yield file
        publish(temporary, path)


def allocated(file: Path | int) -> int:
    """Return the bytes that a file, given by path or handle, takes on the disk."""
    return 512 * os.stat(file).st_blocks


def create_file(path: Path) -> PageFile:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
    return PageFile(path)


def write_page(file: PageFile, page: bytes) -> None:
    buffer = IoBuffer(PAGE_BYTES)
    buffer.view[:] = page
    file.write(buffer.view, 0)


@dataclass(frozen=True)
class TableIdentity:
    """Identity of the table, or table shard, whose rows a file holds."""

    table: str
    num_rows: int
    record: Record
    seed: int  # of the initial values
    row_origin: int = 0  # first row and column of the shard in the unsharded table
    column_origin: int = 0

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"table {self.table!r}: num_rows must be at least 1, got {self.num_rows}")

    def as_json(self) -> dict[str, Any]:
        record = self.record
        identity = {name: getattr(self, name) for name in ("table", "num_rows", "seed", "row_origin", "column_origin")}
        fields = [[f.name, str(f.dtype).removeprefix("torch."), f.size, f.offset, f.is_scalar] for f in record.fields]
        return identity | {"record_bytes": record.num_bytes, "fields": fields}

    def header(
        self, page_bytes: int, snapshot: str | None = None, places: int | None = None, holes: int | None = None
    ) -> bytes:
        """Return the header page of a file of rows, or of a snapshot of this name.

        `places` are its positions and `holes` those without a block, None until close.
        """
        file_fields = {"page_bytes": page_bytes, "snapshot": snapshot, "places": places, "holes": holes}
        return encode_header(ROWS, self.as_json() | file_fields)


def encode_header(kind: bytes, header: Mapping[str, Any]) -> bytes:
    """Return a header page, as `open_file` reads it; raise ValueError if the table's name is too long to fit."""
    if _HEAD.size + len(text := json.dumps(header).encode()) + _CHECKSUM_BYTES > PAGE_BYTES:
        raise ValueError(f"table {header['table'][:40]!r}...: its name is too long for the header of a file")
    body = (_HEAD.pack(kind, FORMAT, len(text)) + text).ljust(PAGE_BYTES - _CHECKSUM_BYTES, b"\0")
    return body + _checksum(body)


def open_file(subject: str, path: Path, *kinds: bytes, writable: bool = False) -> tuple[PageFile, dict[str, Any]]:
    """Open a file of one of these kinds, called `subject` in messages; return the file and its header.

    Raise StorageError if it cannot be opened or read, or has another header, format or size.
    """
    with storage_errors(f"{subject} cannot be opened", "check that the file exists and that you may access it"):
        file = PageFile(path, writable)
    with on_error(file.close):
        buffer = IoBuffer(PAGE_BYTES)
        try:
            file.read(buffer.view, 0)
        except EOFError:
            raise StorageError(f"{subject} is too short to have a header; restore it, or use another one") from None
        except OSError as error:
            raise StorageError(f"{subject}: its header cannot be read: {error}") from error
        page = bytes(buffer.view)
        header = _decode_header(page, path, kinds)
        if header.get("places") is not None and page.startswith(ROWS):  # None: the file was not closed
            actual_size, expected_size = file.size(), FileLayout.of(header).file_bytes(header["places"])
            if actual_size != expected_size:
                raise StorageError(
                    f"{subject} has {actual_size:,} bytes, expected {expected_size:,}: it was truncated or appended "
                    "to; restore it from a snapshot, or use another one"
                )
    return file, header


def _decode_header(page: bytes, path: Path, kinds: Sequence[bytes]) -> dict[str, Any]:
    body, checksum = page[:-_CHECKSUM_BYTES], page[-_CHECKSUM_BYTES:]
    kind, format_number, length = _HEAD.unpack_from(page)
    if kind not in (ROWS, CHANGES) or _checksum(body) != checksum:
        content = "rows" if kinds[0] == ROWS else "changes"
        raise StorageError(
            f"file {path} has no header of {content} of a table, or it is damaged: restore the file from a snapshot, "
            "or use another one"
        )
    if not OLDEST_FORMAT <= format_number <= FORMAT:
        raise StorageError(
            f"file {path} has format {format_number}, this version of tritonemb reads format {FORMAT}: read it with "
            "the version that wrote it"
        )
    if kind not in kinds:
        content = "changes, restore them onto their snapshot" if kind == CHANGES else "whole rows, no changes"
        raise StorageError(f"file {path} holds {content}")
    return {"page_bytes": PAGE_BYTES, **json.loads(body[_HEAD.size : _HEAD.size + length])}


def check_identity(header: Mapping[str, Any], identity: TableIdentity, path: Path) -> None:
    """Raise a StorageError that lists the differences between a file's table and the expected one."""
    actual, expected = _describe(header), _describe(identity.as_json())
    pairs = ((name, actual.get(name, "none"), expected.get(name, "none")) for name in actual | expected)
    if problems := [f"{name}: {old} in the file, expected {new}" for name, old, new in pairs if old != new]:
        lines = "\n  ".join(problems)
        raise StorageError(f"table {identity.table!r}: file {path} belongs to another table or optimizer:\n  {lines}")


def _describe(header: Mapping[str, Any]) -> dict[str, str]:
    description = {
        "the table's name": repr(header["table"]),
        "the number of rows": f"{header['num_rows']:,}",
        "the seed": str(header["seed"]),
        "the first row in the whole table": str(header["row_origin"]),
        "the first column in the whole table": str(header["column_origin"]),
        "the size of a record": f"{header['record_bytes']} bytes",
    }
    for name, dtype, size, offset, is_scalar in header["fields"]:
        title = "the weight of a row" if name == "weight" else f"optimizer state {name!r}"
        description[title] = f"{'one' if is_scalar else size} {dtype} at byte {offset}"
    return description


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]


def reflink_or_copy(source: PageFile, target: PageFile) -> None:
    """Copy a file of whole pages into an empty one; holes stay holes. Discard the target after an OSError or
    EOFError."""
    try:
        fcntl.ioctl(target.handle, _FICLONE, source.handle)
        return
    except OSError as error:
        if error.errno not in _NO_REFLINK:
            raise
    target.resize(source.size())

    def write(begin: int, buffer: IoBuffer, count: int) -> None:
        written_pages = np.flatnonzero(buffer.array[:count].reshape(-1, PAGE_BYTES).view(np.int64).any(axis=1))
        for first, last in zip(*runs(written_pages), strict=True):
            start, stop = int(written_pages[first]) * PAGE_BYTES, int(written_pages[last - 1] + 1) * PAGE_BYTES
            target.write(buffer.view[start:stop], begin + start)

    _read_pieces(source, COPY_BYTES, write)


def copy_rows(source: Path, target: Path) -> None:
    """Copy a file of rows, or of changes, as `reflink_or_copy` does, and flush the copy to the disk."""

    def copy() -> None:
        with closing(PageFile(source, writable=False)) as source_file, closing(create_file(target)) as target_file:
            reflink_or_copy(source_file, target_file)
            target_file.sync()

    shielded(copy)


def written_ranges(file: PageFile, size: int) -> Iterator[tuple[int, int]]:
    """Yield bounds of the ranges that are not holes, in whole pages, ascending; the whole file if unsupported."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(file.handle, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            if error.errno != errno.EINVAL:
                raise
            yield end, size
            return
        begin = begin // PAGE_BYTES * PAGE_BYTES  # blocks of a file system may be smaller
        end = -(-os.lseek(file.handle, begin, os.SEEK_HOLE) // PAGE_BYTES) * PAGE_BYTES
        yield begin, end


def piece_numbers(ranges: Iterator[tuple[int, int]], piece_bytes: int) -> Iterator[int]:
    """Yield the numbers of the pieces of a file that have parts of ascending ranges."""
    next_piece = 0
    for begin, end in ranges:
        first_piece = max(next_piece, begin // piece_bytes)
        next_piece = max(next_piece, -(-end // piece_bytes))
        yield from range(first_piece, next_piece)


def _read_pieces(file: PageFile, piece_bytes: int, use: Callable[[int, IoBuffer, int], object]) -> None:
    """Call `use` with each piece of a file that is not a hole, in parallel: its begin, a buffer, and its size."""
    size = file.size()

    def read(number: int) -> None:
        buffer: IoBuffer | None = getattr(_thread_local, "buffer", None)
        if buffer is None or buffer.array.size < piece_bytes:
            buffer = _thread_local.buffer = IoBuffer(-(-piece_bytes // HUGE_PAGE) * HUGE_PAGE)
        begin = number * piece_bytes
        count = min(piece_bytes, size - begin)
        file.read(buffer.view[:count], begin)
        use(begin, buffer, count)

    numbers = piece_numbers(written_ranges(file, size), piece_bytes)
    while batch := list(itertools.islice(numbers, BATCH_TASKS)):
        shared_threads.run(lambda task, batch=batch: read(batch[task]), len(batch))  # type: ignore[misc]


def digest(path: Path) -> int:
    """Return a 64-bit digest of a file of whole pages, from the CRC-32 and the number of each nonzero piece.

    Holes are not read, and count as zeros, so it does not depend on how a file system stores zeros, nor on the file's
    size. Raise StorageError if the file cannot be read.
    """
    piece_digests: list[int] = []

    def add(begin: int, buffer: IoBuffer, count: int) -> None:
        if buffer.array[:count].any():
            mix = cpu_kernels("pages").splitmix64  # so that swapped pieces change the sum
            piece_digests.append(mix((begin // DIGEST_BYTES << 32) ^ zlib.crc32(buffer.view[:count])))

    def read() -> None:
        with closing(PageFile(path, writable=False)) as file:
            _read_pieces(file, DIGEST_BYTES, add)

    with storage_errors(f"file {path} cannot be read", "check the disk, or use another copy"):
        shielded(read)
    return sum(piece_digests) % (1 << 64)
