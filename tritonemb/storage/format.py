"""The first page of a file of rows: whose rows they are, and what they look like.

Where a row's record stands in a file of pages.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from tritonemb.storage.io import PAGE_BYTES, PageFile, read_page
from tritonemb.storage.store import WEIGHT, Field, Record, StorageError, advice

FORMAT = 2
ROWS, CHANGES = b"tritonemb rows\n\0", b"tritonemb diff\n\0"
_HEAD = struct.Struct("<16sII")  # the kind of file, its format, the length of the JSON
_CHECKSUM_BYTES = 8


class State(TypedDict):
    """What a file of rows says of its content.

    Args:
        snapshot: the name of that which it is; None if it is none.
        places: how many blocks it has; None if it may be written to.
    """

    snapshot: str | None
    places: int | None


UNKNOWN = State(snapshot=None, places=None)


@dataclass(frozen=True)
class Identity:
    """Whose rows a file holds.

    Args:
        table: its name.
        num_rows: at least 1.
        record: the layout of a row.
        seed: of the initial values of rows that were never written.
        row_origin, column_origin: where the first row and column stand in the whole table, of a part.
    """

    table: str
    num_rows: int
    record: Record
    seed: int
    row_origin: int = 0
    column_origin: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "table": self.table,
            "num_rows": self.num_rows,
            "record_bytes": self.record.num_bytes,
            "fields": [[f.name, _name(f), f.size, f.offset, f.one_a_row] for f in self.record.fields],
            "seed": self.seed,
            "row_origin": self.row_origin,
            "column_origin": self.column_origin,
        }


def encode(kind: bytes, header: Mapping[str, Any]) -> bytes:
    """A header page that says what `decode` gives back: an `Identity.as_json()`, and more.

    Raises:
        ValueError: the table's name is so long that it does not fit.
    """
    text = json.dumps(header).encode()
    if _HEAD.size + len(text) + _CHECKSUM_BYTES > PAGE_BYTES:
        raise ValueError(f"table {header['table'][:40]!r}...: its name is too long for the header of a file")
    body = (_HEAD.pack(kind, FORMAT, len(text)) + text).ljust(PAGE_BYTES - _CHECKSUM_BYTES, b"\0")
    return body + _checksum(body)


def decode(kind: bytes, page: bytes, path: Path) -> dict[str, Any]:
    """What a header page says.

    Raises:
        StorageError: it is no such page, is damaged, or of a format that this version cannot read.
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


def open_file(what: str, path: Path, writable: bool = False) -> PageFile:
    """A file that is there.

    Args:
        what: the file, for messages.

    Raises:
        StorageError: it cannot be opened.
    """
    try:
        return PageFile(path, writable)
    except OSError as error:
        otherwise = "name a file that is there, and that you may use"
        raise StorageError(f"{what} cannot be opened: {error}; {advice(error, otherwise)}") from error


def read(what: str, file: PageFile, *kinds: bytes) -> dict[str, Any]:
    """What a file's header says, see `decode`; it is to be of one of some kinds.

    Args:
        what: the file, for messages.

    Raises:
        StorageError: as `decode`, or the file cannot be read.
    """
    try:
        page = read_page(file)
    except EOFError:
        raise StorageError(f"{what} is too short to have a header; restore it, or use another one") from None
    except OSError as error:
        raise StorageError(f"{what}: its header cannot be read: {error}") from error
    found = [kind for kind in kinds if page.startswith(kind)]
    return decode((found or kinds)[0], page, file.path)


def refuse_other(header: Mapping[str, Any], identity: Identity, path: Path) -> None:
    """Raise a StorageError that lists each difference between a file and what it should be."""
    there, here = _describe(header), _describe(identity.as_json())
    problems = [
        f"{name}: {there.get(name, 'none')} in the file, {here.get(name, 'none')} here"
        for name in there | here
        if there.get(name) != here.get(name)
    ]
    if problems:
        listed = "\n  ".join(problems)
        raise StorageError(f"table {identity.table!r}: file {path} is of another table or optimizer:\n  {listed}")


def refuse_size(header: Mapping[str, Any], found: int, layout: Layout, what: str) -> None:
    """Raise a StorageError unless a file's size, in bytes, is that of which its header speaks.

    Args:
        what: the file, for the message.
    """
    if header["places"] is None:  # whoever wrote to it has not come to the end
        return
    expected = layout.file_bytes(header["places"])
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


def _name(field: Field) -> str:
    return str(field.dtype).removeprefix("torch.")


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]


PAYLOAD_BYTES = PAGE_BYTES - 16  # the number of its block, and a checksum, end each page


class Request(NamedTuple):
    """Rows by the blocks they stand in.

    Args:
        blocks: int64 `[b]`, ascending and distinct.
        starts: int64 `[b + 1]`: the rows of block i are those from `starts[i]` on.
    """

    blocks: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Layout:
    """A header page, then blocks: pages of as many records as fit, or for each record as many pages as it needs.

    Blocks stand in the file in the order in which they were first written, see `Places`. A record has a byte before it
    that says whether the row was ever written.
    """

    num_rows: int
    record_bytes: int

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

    def file_bytes(self, num_places: int) -> int:
        """The size of a file of so many blocks."""
        return PAGE_BYTES + num_places * self.block_bytes

    def offsets(self, places: np.ndarray) -> np.ndarray:
        """Of each place, in bytes from the file's start."""
        return PAGE_BYTES + places * self.block_bytes

    def rows_of(self, first: int, last: int) -> str:
        """In words: the rows of the blocks from `first` to `last`."""
        begin, end = first * self.rows_per_block, min((last + 1) * self.rows_per_block, self.num_rows)
        return f"row {begin}" if end - begin == 1 else f"rows {begin} to {end - 1}"

    def request(self, rows: np.ndarray) -> Request:
        """The blocks of rows int64 `[n]`, ascending."""
        of_rows = rows // self.rows_per_block
        starts = np.flatnonzero(of_rows[1:] != of_rows[:-1]) + 1
        starts = np.concatenate([[0], starts, [rows.size]]) if rows.size else np.zeros(1, dtype=np.int64)
        return Request(of_rows[starts[:-1]], starts)

    def whole(self, request: Request) -> np.ndarray:
        """bool `[b]`: whether all rows of a block are asked for."""
        counts = np.minimum(self.num_rows - request.blocks * self.rows_per_block, self.rows_per_block)
        return np.diff(request.starts) == counts


def runs(*numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stretches in which each of some numbers is greater by 1 than that before: where each begins, and where it ends.

    Args:
        numbers: int64 `[n]`, one or several.
    """
    size = numbers[0].size
    cuts = np.flatnonzero(np.any([np.diff(each) != 1 for each in numbers], axis=0)) + 1
    edge = min(size, 1)
    return np.concatenate([np.zeros(edge, dtype=np.int64), cuts]), np.concatenate([cuts, np.full(edge, size)])
