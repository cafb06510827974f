"""A file's blocks of pages that hold rows: where each block stands, and how many are read or written at once.

Blocks are checked when they are read, and sealed when they are written: each page ends with a checksum.
"""

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import numpy as np

from tritonemb.storage.aio import HALF_BYTES, PAGE_BYTES, ExtentError, Extents, IoContext, PageFile, io_context, reserve
from tritonemb.storage.store import StorageError, advice, cpu_kernels

PAYLOAD_BYTES = PAGE_BYTES - 16  # the number of its block, and a checksum, end each page
LEAF = 32  # neighbouring blocks whose entries stand side by side
CHUNK_BITS = mmap.PAGESIZE * 8  # blocks whose bits share a page of memory
MAX_POSITIONS = (1 << 32) - 2
BUFFER_BYTES = HALF_BYTES  # that a part of a request must fit
MAX_GROWTH = 1 << 30  # bytes by which a file grows at once
SCAN_BYTES = 1 << 18  # that a recovery scan reads at once
RESTORE = "check the disk, then restore the table from a snapshot"
_LOG = "check the disk and the system's log"
_BITS = LEAF.bit_length() - 1
_MIN_LEAVES = 256
_CHUNK = 1 << 16  # leaves looked through at once


@dataclass(frozen=True)
class FileLayout:
    """A header page, then blocks: pages of as many records as fit, or for each record as many pages as it needs.

    Blocks are in the order in which they were first written. A byte before each record says whether its row was.
    """

    num_rows: int
    record_bytes: int

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Self:
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

    So a file grows at its end alone: it has no holes, however large the table is, and blocks that were first written
    together stand together. A block takes 4 bytes of memory, as does every group of `LEAF` blocks of the table; where
    single blocks are far apart, each takes 4 `LEAF` bytes. Positions 0 to `count` - 1 are allocated.
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
        if (num_leaves := self._num_leaves + new.size) > self._leaves.shape[0]:
            larger = _zeros(max(num_leaves, 2 * self._leaves.shape[0]) * LEAF).reshape(-1, LEAF)
            larger[: self._num_leaves] = self._leaves[: self._num_leaves]
            self._leaves = larger
        self._leaf_of[new] = np.arange(self._num_leaves, num_leaves)
        self._num_leaves = num_leaves
        self._leaves[self._leaf_of[above], blocks & (LEAF - 1)] = positions + 1
        self.count = max(self.count, int(positions.max()) + 1)

    def blocks(self) -> Iterator[np.ndarray]:
        """int64, ascending, in pieces: the blocks that have positions."""
        for first in range(0, self._leaf_of.size, _CHUNK):
            above = np.flatnonzero(self._leaf_of[first : first + _CHUNK]) + first
            within, blocks = np.nonzero(self._leaves[self._leaf_of[above]])
            if within.size:
                yield above[within] * LEAF + blocks


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


class _RequestPart:
    """A part of a request that fits a half of the I/O buffer."""

    blocks: np.ndarray  # int64 `[b]`
    positions: np.ndarray  # int64 `[b]`: where they are in the file, -1 for nowhere
    slots: np.ndarray  # int64 `[b]`: where they are in the buffer, in blocks from `begin` on, -1 for nowhere
    wait: Callable[[], None]  # for what was submitted of it; raises a StorageError

    def __init__(self, which: slice, begin: int) -> None:
        self.which, self.begin = which, begin  # of the request's blocks; in bytes, where it is in the buffer

    def sort(self, blocks: np.ndarray, positions: np.ndarray) -> None:
        """Give its blocks, of a request's, slots in the order of their positions."""
        self.blocks, self.positions = blocks[self.which], positions[self.which]
        order = np.argsort(self.positions)
        order = order[np.searchsorted(self.positions[order], 0) :]
        self.slots = np.full(self.blocks.size, -1)
        self.slots[order] = np.arange(order.size)


_PartStage = Callable[[_RequestPart], None]


class BlockFile:
    """A file's blocks, for one thread at a time, and which have `changed` since the last snapshot.

    Opening it scans the whole file, to recover where each block stands and to check them all.
    """

    def __init__(self, table: str, file: PageFile, layout: FileLayout) -> None:
        self.table, self.file, self.layout = table, file, layout
        self.page_table, self.changed = PageTable(layout.num_blocks), ChangedBlocks(layout.num_blocks)
        self._size = file.size()
        with io_context() as context:
            self._scan(context)

    def read(self, rows: np.ndarray, records: int) -> np.ndarray:
        """Copy the records of rows, int64 `[n]`, ascending, out of the file to the address of `n` records.

        Those that were never written are left alone. Returns uint8 `[n]`: whether a row was ever written.
        """
        layout, written = self.layout, np.empty(rows.size, dtype=np.uint8)
        blocks, starts = layout.request(rows)
        positions = self.page_table.find(blocks)

        def begin(part: _RequestPart) -> None:
            part.sort(blocks, positions)
            self._submit(context, part, np.flatnonzero(part.positions >= 0), False)

        def finish(part: _RequestPart) -> None:
            part.wait()
            some = slice(int(starts[part.which.start]), int(starts[part.which.stop]))
            num_good = cpu_kernels("pages").copy_out(
                context.buffer.address + part.begin, part.blocks, part.slots, rows[some], layout.rows_per_block,
                layout.pages_per_block, layout.record_bytes, records + some.start * layout.record_bytes, written[some],
            )  # fmt: skip
            self._raise_damaged(part.blocks, num_good)

        with io_context() as context:
            self._overlap(context, blocks.size, begin, finish)
        return written

    def write(self, rows: np.ndarray, records: int) -> None:
        """Write records into their blocks. A block whose rows are not all written is read and checked first.

        After a StorageError some blocks may have been written.
        """
        layout, (blocks, starts) = self.layout, self.layout.request(rows)
        positions, new = self._allocate(blocks)
        clear = new | layout.is_whole(blocks, starts)
        writing: deque[_RequestPart] = deque()

        def begin(part: _RequestPart) -> None:
            if writing:
                writing.popleft().wait()  # its half of the buffer is reused
            part.sort(blocks, positions)
            self._submit(context, part, np.flatnonzero(~clear[part.which]), False)

        def finish(part: _RequestPart) -> None:
            part.wait()
            some = slice(int(starts[part.which.start]), int(starts[part.which.stop]))
            num_good = cpu_kernels("pages").copy_in(
                context.buffer.address + part.begin, part.blocks, part.slots, clear[part.which], rows[some],
                layout.rows_per_block, layout.pages_per_block, layout.record_bytes,
                records + some.start * layout.record_bytes,
            )  # fmt: skip
            self._raise_damaged(part.blocks, num_good)
            self._submit(context, part, np.arange(part.blocks.size), True)
            writing.append(part)

        with io_context() as context:
            self._overlap(context, blocks.size, begin, finish)
            for part in writing:
                part.wait()

    def load(self, context: IoContext, blocks: np.ndarray, begin: int) -> None:
        """Read blocks that have positions, one behind the other, from byte `begin` of the buffer on; check them."""
        self._move(context, blocks, self.page_table.find(blocks), begin, False)
        num_good = cpu_kernels("pages").check(context.buffer.address + begin, blocks, self.layout.pages_per_block)
        self._raise_damaged(blocks, num_good)

    def store(self, context: IoContext, blocks: np.ndarray, begin: int) -> None:
        """Write sealed blocks, ascending, that stand one behind the other from byte `begin` of the buffer on."""
        self._move(context, blocks, self._allocate(blocks)[0], begin, True)

    def _allocate(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of blocks int64 `[b]`, ascending, that are about to change: their positions, and which were never written."""
        new = self.page_table.find(blocks) < 0
        if self.page_table.count + np.count_nonzero(new) > MAX_POSITIONS:
            raise StorageError(
                f"table {self.table!r}, file {self.file.path}: a file has at most {MAX_POSITIONS:,} blocks of "
                f"{self.layout.block_bytes:,} bytes; cut the table into smaller shards"
            )
        positions = self.page_table.allocate(blocks)
        needed, step = self.layout.offset(self.page_table.count), self.layout.block_bytes
        if needed > self._size:  # ahead of what is written, which would wait for the file to grow each time
            size = needed + min(needed // 4, MAX_GROWTH) // step * step
            self.file.resize(size)
            self._size = size
        self.changed.add(blocks)
        return positions, new

    def _scan(self, context: IoContext) -> None:
        layout, step = self.layout, self.layout.block_bytes
        where = f"table {self.table!r}, file {self.file.path}: "

        def begin(part: _RequestPart) -> None:
            starts = np.arange(part.which.start, part.which.stop, max(1, SCAN_BYTES // step))
            sizes = np.diff(starts, append=part.which.stop) * step
            extents = Extents(part.begin + (starts - part.which.start) * step, sizes, layout.offset(starts))
            part.wait = partial(context.wait, context.submit(self.file, extents, False))

        def finish(part: _RequestPart) -> None:
            first = part.which.start
            try:
                part.wait()
            except ExtentError as error:
                raise StorageError(
                    f"{where}the part behind byte {layout.offset(first):,} could not be read: {error.reason}; "
                    f"{_LOG}, then restore the table from a snapshot"
                ) from error.reason
            kernels, blocks = cpu_kernels("pages"), np.empty(part.which.stop - first, dtype=np.int64)
            address = context.buffer.address + part.begin
            num_good = kernels.identify(address, blocks, layout.pages_per_block, layout.num_blocks)
            if num_good < blocks.size:
                raise StorageError(
                    f"{where}the part at byte {layout.offset(first + num_good):,} is damaged: its checksum is not "
                    f"that of its content; {RESTORE}"
                )
            written = np.flatnonzero(blocks != kernels.NEVER_WRITTEN)
            found, counts = np.unique(blocks[written], return_counts=True)
            if (twice := found[(counts > 1) | (self.page_table.find(found) >= 0)]).size:
                rows = layout.describe_rows(int(twice[0]), int(twice[0]))
                raise StorageError(f"{where}it is damaged: the part with {rows} is there twice; {RESTORE}")
            self.page_table.insert(blocks[written], first + written)

        self._overlap(context, (self._size - layout.offset(0)) // step, begin, finish)

    def _overlap(self, context: IoContext, num_blocks: int, begin: _PartStage, finish: _PartStage) -> None:
        """Cut blocks into parts, in turns in a half of the buffer; begin each before the one before it is finished."""
        half, before = max(BUFFER_BYTES, self.layout.block_bytes), None
        context.reserve(half)
        size = half // self.layout.block_bytes
        for number, first in enumerate(range(0, num_blocks, size)):
            part = _RequestPart(slice(first, min(first + size, num_blocks)), number % 2 * half)
            begin(part)
            if before is not None:
                finish(before)
            before = part
        if before is not None:
            finish(before)

    def _move(self, context: IoContext, blocks: np.ndarray, positions: np.ndarray, begin: int, write: bool) -> None:
        """Read or write blocks that stand one behind the other in the buffer, and wait for it."""
        part = _RequestPart(slice(0, blocks.size), begin)
        part.blocks, part.positions, part.slots = blocks, positions, np.arange(blocks.size)
        self._submit(context, part, part.slots, write)
        part.wait()

    def _submit(self, context: IoContext, part: _RequestPart, which: np.ndarray, write: bool) -> None:
        """Move some of a part's blocks, int64, to or from their slots; neighbours are one extent."""
        step, order = self.layout.block_bytes, which[np.argsort(part.positions[which])]
        positions, slots = part.positions[order], part.slots[order]
        firsts, lasts = runs(positions, slots)
        addresses, sizes = part.begin + slots[firsts] * step, (lasts - firsts) * step
        extents = Extents(addresses, sizes, self.layout.offset(positions[firsts]))
        transfer = context.submit(self.file, extents, write)

        def wait() -> None:
            try:
                context.wait(transfer)
            except ExtentError as error:
                reason, moved = error.reason, part.blocks[order[firsts[error.extent] : lasts[error.extent]]]
                then = f"{advice(reason, _LOG)}, then restore the table from a snapshot"
                if isinstance(reason, EOFError):
                    then = "somebody has cut the file short; restore it from a snapshot"
                what = "written" if write else "read"
                raise StorageError(f"{self._describe(moved)} could not be {what}: {reason}; {then}") from reason

        part.wait = wait

    def _raise_damaged(self, blocks: np.ndarray, num_good: int) -> None:
        if num_good < blocks.size:
            where = self._describe(blocks[num_good : num_good + 1])
            raise StorageError(f"{where} is damaged: its checksum is not that of its content; {RESTORE}")

    def _describe(self, blocks: np.ndarray) -> str:
        begin = int(self.layout.offset(self.page_table.find(blocks[:1])[0]))
        first, last = int(blocks.min()), int(blocks.max())
        rows = self.layout.describe_rows(first, last)
        if last - first >= blocks.size:
            rows = f"{blocks.size} blocks of {self.layout.rows_per_block} rows among {rows}"
        return f"table {self.table!r}, file {self.file.path}: the part with {rows}, at byte {begin:,},"
