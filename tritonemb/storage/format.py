"""The format of a file of rows: a header page, then blocks of pages that hold the rows' records.

The header says of which table the rows are and what a record looks like. Each page ends with a checksum.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tritonemb.storage.io import PAGE_BYTES, PageFile, read_page
from tritonemb.storage.store import WEIGHT, Record, StorageError, storage_errors

FORMAT = 2
ROWS, CHANGES = b"tritonemb rows\n\0", b"tritonemb diff\n\0"
PAYLOAD_BYTES = PAGE_BYTES - 16  # the number of its block, and a checksum, end each page
_HEAD = struct.Struct("<16sII")  # the kind of file, its format, the length of the JSON
_CHECKSUM_BYTES = 8


@dataclass(frozen=True)
class TableIdentity:
    """The table whose rows a file holds.

    Args:
        table: its name.
        num_rows: at least 1.
        record: the layout of a row.
        seed: of the initial values of rows that were never written.
        row_origin, column_origin: where the first row and column stand in the whole table, for a shard of it.
    """

    table: str
    num_rows: int
    record: Record
    seed: int
    row_origin: int = 0
    column_origin: int = 0

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"table {self.table!r}: num_rows must be at least 1, got {self.num_rows}")

    def as_json(self) -> dict[str, Any]:
        fields = self.record.fields
        return {
            "table": self.table,
            "num_rows": self.num_rows,
            "record_bytes": self.record.num_bytes,
            "fields": [[f.name, str(f.dtype).removeprefix("torch."), f.size, f.offset, f.one_a_row] for f in fields],
            "seed": self.seed,
            "row_origin": self.row_origin,
            "column_origin": self.column_origin,
        }

    def header(self, snapshot: str | None = None, num_blocks: int | None = None) -> bytes:
        """The header page of a file of rows.

        Args:
            snapshot: the name of the snapshot that the file is, if it is one.
            num_blocks: how many blocks the file has; None while it is written to.
        """
        return encode_header(ROWS, self.as_json() | {"snapshot": snapshot, "places": num_blocks})


def encode_header(kind: bytes, header: Mapping[str, Any]) -> bytes:
    """A header page for `decode_header`: what `TableIdentity.as_json` returns, and more.

    Raises:
        ValueError: the table's name is so long that it does not fit.
    """
    text = json.dumps(header).encode()
    if _HEAD.size + len(text) + _CHECKSUM_BYTES > PAGE_BYTES:
        raise ValueError(f"table {header['table'][:40]!r}...: its name is too long for the header of a file")
    body = (_HEAD.pack(kind, FORMAT, len(text)) + text).ljust(PAGE_BYTES - _CHECKSUM_BYTES, b"\0")
    return body + _checksum(body)


def decode_header(kind: bytes, page: bytes, path: Path) -> dict[str, Any]:
    """The JSON of a header page.

    Raises:
        StorageError: it is not such a page, is damaged, or has a format that this version cannot read.
    """
    what = "rows of a table" if kind == ROWS else "changes of a table"
    body, checksum = page[:-_CHECKSUM_BYTES], page[-_CHECKSUM_BYTES:]
    found, format_number, length = _HEAD.unpack_from(page)
    other = CHANGES if kind == ROWS else ROWS
    if found not in (kind, other) or _checksum(body) != checksum:
        raise StorageError(
            f"file {path} has no header of {what}, or it is damaged: restore the file from a snapshot, or name "
            "another one"
        )
    if format_number != FORMAT:
        raise StorageError(
            f"file {path} has format {format_number}, this version of tritonemb reads format {FORMAT}: read it with "
            "the version that wrote it"
        )
    if found != kind:
        holds = "changes, restore them onto their snapshot" if found == CHANGES else "whole rows, no changes"
        raise StorageError(f"file {path} holds {holds}")
    header: dict[str, Any] = json.loads(body[_HEAD.size : _HEAD.size + length])
    return header


def open_file(what: str, path: Path, *kinds: bytes, writable: bool = False) -> tuple[PageFile, dict[str, Any]]:
    """Open a file of one of some kinds; the file, and its header.

    Args:
        what: the file, for messages.

    Raises:
        StorageError: the file cannot be opened or read, or as `decode_header`.
    """
    with storage_errors(f"{what} cannot be opened", "name a file that is there, and that you may use"):
        file = PageFile(path, writable)
    try:
        page = read_page(file)
        kind = next((kind for kind in kinds if page.startswith(kind)), kinds[0])
        return file, decode_header(kind, page, path)
    except BaseException as error:
        file.close()
        if isinstance(error, EOFError):
            raise StorageError(f"{what} is too short to have a header; restore it, or use another one") from None
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(f"{what}: its header cannot be read: {error}") from error
        raise


def check_identity(header: Mapping[str, Any], identity: TableIdentity, path: Path) -> None:
    """Raise a StorageError that lists each difference between a file's table and the expected one."""
    there, here = _describe(header), _describe(identity.as_json())
    problems = [
        f"{name}: {there.get(name, 'none')} in the file, {here.get(name, 'none')} here"
        for name in there | here
        if there.get(name) != here.get(name)
    ]
    if problems:
        listed = "\n  ".join(problems)
        raise StorageError(f"table {identity.table!r}: file {path} is of another table or optimizer:\n  {listed}")


def check_size(what: str, file: PageFile, header: Mapping[str, Any]) -> None:
    """Raise a StorageError unless a file has the size that its header says.

    Args:
        what: the file, for the message.
    """
    if header["places"] is None:  # it was not closed
        return
    found, expected = file.size(), FileLayout.of(header).file_bytes(header["places"])
    if found != expected:
        raise StorageError(
            f"{what} has {found:,} bytes instead of {expected:,}, it was cut or appended to; restore it from a "
            "snapshot, or use another one"
        )


def _describe(header: Mapping[str, Any]) -> dict[str, str]:
    found = {
        "the table's name": repr(header["table"]),
        "the number of rows": f"{header['num_rows']:,}",
        "the seed": str(header["seed"]),
        "the first row in the whole table": str(header["row_origin"]),
        "the first column in the whole table": str(header["column_origin"]),
        "the size of a record": f"{header['record_bytes']} bytes",
    }
    for name, dtype, size, offset, one_a_row in header["fields"]:
        title = "the weight of a row" if name == WEIGHT else f"optimizer state {name!r}"
        found[title] = f"{'one' if one_a_row else size} {dtype} at byte {offset}"
    return found


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]


class BlockRequest(NamedTuple):
    """Rows by the blocks that hold them.

    Args:
        blocks: int64 `[b]`, ascending and distinct.
        starts: int64 `[b + 1]`: the rows of block i begin with the one at `starts[i]`.
    """

    blocks: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class FileLayout:
    """A header page, then blocks: pages of as many records as fit, or for each record as many pages as it needs.

    Blocks stand in the file in the order in which they were first written, see `PageTable`. A byte before each record
    says whether the row was ever written.
    """

    num_rows: int
    record_bytes: int

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> FileLayout:
        """The layout of the file that has this header."""
        return cls(header["num_rows"], header["record_bytes"])

    @cached_property
    def rows_per_block(self) -> int:
        return max(1, PAYLOAD_BYTES // (self.record_bytes + 1))

    @cached_property
    def pages_per_block(self) -> int:
        return -(-(self.record_bytes + 1) // PAYLOAD_BYTES)

    @cached_property
    def block_bytes(self) -> int:
        return self.pages_per_block * PAGE_BYTES

    @property
    def num_blocks(self) -> int:
        return -(-self.num_rows // self.rows_per_block)

    def file_bytes(self, num_blocks: int) -> int:
        """The size of a file with this number of blocks; the offset of the next one."""
        return PAGE_BYTES + num_blocks * self.block_bytes

    def offsets(self, positions: np.ndarray) -> np.ndarray:
        """The offset of each position, in bytes from the file's start."""
        return PAGE_BYTES + positions * self.block_bytes

    def describe_rows(self, first: int, last: int) -> str:
        """In words: the rows of the blocks from `first` to `last`."""
        begin, end = first * self.rows_per_block, min((last + 1) * self.rows_per_block, self.num_rows)
        return f"row {begin}" if end - begin == 1 else f"rows {begin} to {end - 1}"

    def request(self, rows: np.ndarray) -> BlockRequest:
        """The blocks of rows int64 `[n]`, ascending."""
        of_rows = rows // self.rows_per_block
        starts = np.flatnonzero(of_rows[1:] != of_rows[:-1]) + 1
        starts = np.concatenate([[0], starts, [rows.size]]) if rows.size else np.zeros(1, dtype=np.int64)
        return BlockRequest(of_rows[starts[:-1]], starts)

    def is_whole(self, request: BlockRequest) -> np.ndarray:
        """bool `[b]`: whether a block's rows are all requested."""
        counts = np.minimum(self.num_rows - request.blocks * self.rows_per_block, self.rows_per_block)
        return np.diff(request.starts) == counts


def runs(*numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of consecutive numbers, in all of some int64 `[n]`: the index where each begins, and where it ends."""
    size = numbers[0].size
    cuts = np.flatnonzero(np.any([np.diff(each) != 1 for each in numbers], axis=0)) + 1
    edge = min(size, 1)
    return np.concatenate([np.zeros(edge, dtype=np.int64), cuts]), np.concatenate([cuts, np.full(edge, size)])
