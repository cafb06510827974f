"""Files of rows: atomic creation, and the header page, which identifies the table and the layout of its records."""

import errno
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonemb.storage.aio import PAGE_BYTES, IoBuffer, PageFile
from tritonemb.storage.page_table import FileLayout
from tritonemb.storage.store import Record, StorageError, storage_errors
from tritonemb.utils import on_error

FORMAT = 2
ROWS, CHANGES = b"tritonemb rows\n\0", b"tritonemb diff\n\0"
_HEAD = struct.Struct("<16sII")  # kind of file, format, length of the JSON
_CHECKSUM_BYTES = 8


@contextmanager
def new_file(path: Path, replace: bool = True) -> Iterator[PageFile]:
    """Create a file atomically: it is written under a temporary name, flushed, then renamed; removed after an error.

    Raise FileExistsError if the file exists and `replace` is false.
    """
    temporary = path.with_name(f".writing-{path.name}")
    with on_error(lambda: temporary.unlink(missing_ok=True)), closing(create_file(temporary)) as file:
        yield file
        file.sync()
        if not replace and path.exists():
            raise FileExistsError(errno.EEXIST, "file exists", str(path))
        os.replace(temporary, path)
        sync(path.parent)  # makes the rename durable


def sync(path: Path) -> None:
    """Fsync a file, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def allocated(file: Path | int) -> int:
    """Return the bytes that a file, given by path or handle, takes on the disk."""
    return 512 * os.stat(file).st_blocks


def create_file(path: Path) -> PageFile:
    """Create an empty file, or truncate an existing one."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
    return PageFile(path)


def write_page(file: PageFile, page: bytes) -> None:
    """Write the first page of a file."""
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

    def header(self, snapshot: str | None = None, num_blocks: int | None = None) -> bytes:
        """Return the header page of a file of rows, or of a snapshot of this name; `num_blocks` is None until close."""
        return encode_header(ROWS, self.as_json() | {"snapshot": snapshot, "places": num_blocks})


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
            actual_size, expected_size = file.size(), FileLayout.of(header).offset(header["places"])
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
    if format_number != FORMAT:
        raise StorageError(
            f"file {path} has format {format_number}, this version of tritonemb reads format {FORMAT}: read it with "
            "the version that wrote it"
        )
    if kind not in kinds:
        content = "changes, restore them onto their snapshot" if kind == CHANGES else "whole rows, no changes"
        raise StorageError(f"file {path} holds {content}")
    return json.loads(body[_HEAD.size : _HEAD.size + length])


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
