"""The format of a file of rows: a header page, then blocks of pages that hold the rows' records; and its page table.

The header says of which table the rows are and what a record looks like. Each page ends with a checksum. The page table
says at which position of the file a block stands.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tritonemb.storage.io import PAGE_BYTES, PageFile, read_page, reserve
from tritonemb.storage.store import Record, StorageError, storage_errors

FORMAT = 2
ROWS, CHANGES = b"tritonemb rows\n\0", b"tritonemb diff\n\0"
PAYLOAD_BYTES = PAGE_BYTES - 16  # the number of its block, and a checksum, end each page
_HEAD = struct.Struct("<16sII")  # the kind of file, its format, the length of the JSON
_CHECKSUM_BYTES = 8

LEAF = 32  # neighbouring blocks whose entries stand side by side
CHUNK_BITS = mmap.PAGESIZE * 8  # blocks whose bits share a page of memory
MAX_POSITIONS = (1 << 32) - 2
_BITS = LEAF.bit_length() - 1
_MIN_LEAVES = 256
_CHUNK = 1 << 16  # leaves looked through at once


@dataclass(frozen=True)
class TableIdentity:
    """The table, or the shard of one, whose rows a file holds."""

    table: str
    num_rows: int
    record: Record
    seed: int  # of the initial values of rows that were never written
    row_origin: int = 0  # its first row and column in the whole table
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
        """The header page of a file of rows, or of its snapshot of this name; None blocks while it is written to."""
        return encode_header(ROWS, self.as_json() | {"snapshot": snapshot, "places": num_blocks})


def encode_header(kind: bytes, header: Mapping[str, Any]) -> bytes:
    """A header page for `open_file`; ValueError if the table's name is so long that it does not fit."""
    text = json.dumps(header).encode()
    if _HEAD.size + len(text) + _CHECKSUM_BYTES > PAGE_BYTES:
        raise ValueError(f"table {header['table'][:40]!r}...: its name is too long for the header of a file")
    body = (_HEAD.pack(kind, FORMAT, len(text)) + text).ljust(PAGE_BYTES - _CHECKSUM_BYTES, b"\0")
    return body + _checksum(body)


def open_file(what: str, path: Path, *kinds: bytes, writable: bool = False) -> tuple[PageFile, dict[str, Any]]:
    """Open a file of one of some kinds, called `what` in messages; the file, and its header.

    Raises:
        StorageError: the file cannot be opened or read, has no such header, another size than that says, or a format
            that this version cannot read.
    """
    with storage_errors(f"{what} cannot be opened", "name a file that is there, and that you may use"):
        file = PageFile(path, writable)
    try:
        try:
            page = read_page(file)
        except EOFError:
            raise StorageError(f"{what} is too short to have a header; restore it, or use another one") from None
        except OSError as error:
            raise StorageError(f"{what}: its header cannot be read: {error}") from error
        header = _decode_header(page, path, kinds)
        if header.get("places") is not None and page.startswith(ROWS):  # else it was not closed
            found, expected = file.size(), FileLayout.of(header).offset(header["places"])
            if found != expected:
                raise StorageError(
                    f"{what} has {found:,} bytes instead of {expected:,}, it was cut or appended to; restore it from "
                    "a snapshot, or use another one"
                )
    except BaseException:
        file.close()
        raise
    return file, header


def _decode_header(page: bytes, path: Path, kinds: Sequence[bytes]) -> dict[str, Any]:
    body, checksum = page[:-_CHECKSUM_BYTES], page[-_CHECKSUM_BYTES:]
    found, format_number, length = _HEAD.unpack_from(page)
    if found not in (ROWS, CHANGES) or _checksum(body) != checksum:
        what = "rows" if kinds[0] == ROWS else "changes"
        raise StorageError(
            f"file {path} has no header of {what} of a table, or it is damaged: restore the file from a snapshot, or "
            "name another one"
        )
    if format_number != FORMAT:
        raise StorageError(
            f"file {path} has format {format_number}, this version of tritonemb reads format {FORMAT}: read it with "
            "the version that wrote it"
        )
    if found not in kinds:
        holds = "changes, restore them onto their snapshot" if found == CHANGES else "whole rows, no changes"
        raise StorageError(f"file {path} holds {holds}")
    header: dict[str, Any] = json.loads(body[_HEAD.size : _HEAD.size + length])
    return header


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
        title = "the weight of a row" if name == "weight" else f"optimizer state {name!r}"
        found[title] = f"{'one' if one_a_row else size} {dtype} at byte {offset}"
    return found


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]


@dataclass(frozen=True)
class FileLayout:
    """A header page, then blocks: pages of as many records as fit, or for each record as many pages as it needs.

    Blocks are in the order in which they were first written. A byte before each record says whether its row was.
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

    def offset(self, position: Any) -> Any:
        """Of one position, or of an array of them, in bytes: the size of a file with that number of blocks."""
        return PAGE_BYTES + position * self.block_bytes

    def describe_rows(self, first: int, last: int) -> str:
        """In words: the rows of the blocks from `first` to `last`."""
        begin, end = first * self.rows_per_block, min((last + 1) * self.rows_per_block, self.num_rows)
        return f"row {begin}" if end - begin == 1 else f"rows {begin} to {end - 1}"

    def request(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The blocks int64 `[b]` of rows int64 `[n]`, ascending; int64 `[b + 1]`: where the rows of each begin."""
        of_rows = rows // self.rows_per_block
        starts = np.flatnonzero(np.diff(of_rows, prepend=-1))
        return of_rows[starts], np.append(starts, rows.size)

    def is_whole(self, blocks: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """bool `[b]`: whether a block's rows are all in a request."""
        return np.diff(starts) == np.minimum(self.num_rows - blocks * self.rows_per_block, self.rows_per_block)


def runs(*numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of consecutive numbers, in all of some int64 `[n]`: the index where each begins, and where it ends."""
    if numbers[0].size == 0:
        return numbers[0], numbers[0]
    cuts = np.flatnonzero(np.any([np.diff(each) != 1 for each in numbers], axis=0)) + 1
    return np.append(0, cuts), np.append(cuts, numbers[0].size)


class PageTable:
    """The position of each block in the file, in two levels; they are in the order in which they were first written.

    So a file grows at its end alone, whatever rows are written: it has no holes, however large the table is, and blocks
    that were first written together stand together. A block takes 4 bytes of memory, as does every group of `LEAF`
    blocks of the table; where single blocks are far apart, each takes 4 `LEAF` bytes. Positions 0 to `count` - 1 are
    allocated.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.count = num_blocks, 0
        self._leaf_of = _zeros(-(-num_blocks // LEAF))  # by block // LEAF; 0: none of them is allocated
        self._leaves = _zeros(_MIN_LEAVES * LEAF).reshape(-1, LEAF)  # position + 1, 0: none; the first leaf stays empty
        self._num_leaves = 1

    def find(self, blocks: np.ndarray) -> np.ndarray:
        """int64 `[b]`: the positions of blocks int64 `[b]`, -1 where none is allocated."""
        return self._leaves[self._leaf_of[blocks >> _BITS], blocks & (LEAF - 1)].astype(np.int64) - 1

    def allocate(self, blocks: np.ndarray) -> np.ndarray:
        """Allocate positions to those of blocks int64 `[b]`, ascending, that have none; the positions of all."""
        positions = self.find(blocks)
        new = positions < 0
        positions[new] = self.count + np.arange(np.count_nonzero(new))
        self.insert(blocks[new], positions[new])
        return positions

    def insert(self, blocks: np.ndarray, positions: np.ndarray) -> None:
        """Note the positions of blocks, ascending or not, that have none."""
        if blocks.size == 0:
            return
        above = blocks >> _BITS
        new = np.unique(above[self._leaf_of[above] == 0])
        self._grow(self._num_leaves + new.size)
        self._leaf_of[new] = self._num_leaves + np.arange(new.size)
        self._num_leaves += new.size
        self._leaves[self._leaf_of[above], blocks & (LEAF - 1)] = positions + 1
        self.count = max(self.count, int(positions.max()) + 1)

    def blocks(self) -> Iterator[np.ndarray]:
        """int64, ascending, in pieces: the blocks that have positions."""
        for first in range(0, self._leaf_of.size, _CHUNK):
            above = np.flatnonzero(self._leaf_of[first : first + _CHUNK]) + first
            within, blocks = np.nonzero(self._leaves[self._leaf_of[above]])
            if within.size:
                yield above[within] * LEAF + blocks

    def _grow(self, num_leaves: int) -> None:
        if num_leaves > self._leaves.shape[0]:
            larger = _zeros(max(num_leaves, 2 * self._leaves.shape[0]) * LEAF).reshape(-1, LEAF)
            larger[: self._num_leaves] = self._leaves[: self._num_leaves]
            self._leaves = larger


def _zeros(count: int) -> np.ndarray:
    return np.frombuffer(reserve(4 * max(count, 1)), dtype=np.uint32)


class ChangedBlocks:
    """A bitmap of the blocks that were written since the last snapshot; its memory is allocated as bits are set."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        num_chunks = -(-self._num_blocks // CHUNK_BITS)
        self._bits = np.frombuffer(reserve(num_chunks * CHUNK_BITS // 8), dtype=np.uint8)
        self._touched = np.zeros(num_chunks, dtype=bool)

    def add(self, blocks: np.ndarray) -> None:
        """Set the bits of blocks int64 `[b]`, ascending."""
        if blocks.size == 0:
            return
        self._touched[blocks // CHUNK_BITS] = True
        octets = blocks >> 3
        starts = np.flatnonzero(np.diff(octets, prepend=-1))
        bits = np.left_shift(np.uint8(1), (blocks & 7).astype(np.uint8))
        self._bits[octets[starts]] |= np.bitwise_or.reduceat(bits, starts)

    def blocks(self) -> np.ndarray:
        """int64, ascending: those that have changed."""
        found = [np.empty(0, dtype=np.int64)]
        for chunk in np.flatnonzero(self._touched).tolist():
            begin = chunk * CHUNK_BITS // 8
            bits = np.unpackbits(self._bits[begin : begin + CHUNK_BITS // 8], bitorder="little")
            found.append(np.flatnonzero(bits) + chunk * CHUNK_BITS)
        return np.concatenate(found)
