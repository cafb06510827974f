"""Files of blocks of rows: the page table, which maps blocks to positions, and pipelined reads and writes.

Each page ends with a checksum: blocks are sealed when they are written, and checked when they are read.
"""

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any, Self

import numpy as np

from tritonemb.storage.aio import HALF_BYTES, PAGE_BYTES, ExtentError, Extents, IoContext, PageFile, reserve
from tritonemb.storage.store import StorageError, advice, cpu_kernels, raise_if_cancelled

TRAILER_BYTES = 16  # each page ends with the number of its block and a checksum
LEAF = 32  # consecutive blocks whose entries are contiguous
CHUNK_BITS = mmap.PAGESIZE * 8  # blocks whose bits share a page of memory
MAX_POSITIONS = (1 << 32) - 2  # entries are uint32, position + 1
BUFFER_BYTES = HALF_BYTES  # size of a request chunk
MAX_GROWTH = 1 << 30  # bytes by which a file grows ahead of its writes, at most
SCAN_BYTES = 1 << 18  # extent size of a recovery scan
RESTORE = "check the disk, then restore the table from a snapshot"
_LOG = "check the disk and the system's log"
_BITS = LEAF.bit_length() - 1
_MIN_LEAVES = 256
_LEAVES_PER_CHUNK = 1 << 16  # bounds temporary memory


@dataclass(frozen=True)
class FileLayout:
    """Layout of a file: a header of `PAGE_BYTES`, then blocks, each a page of several records, or several of one.

    Blocks are in the order of their first write. A byte before each record says whether its row was written.
    """

    num_rows: int
    record_bytes: int
    page_bytes: int = PAGE_BYTES

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Self:
        """Return the layout of the file with this header."""
        return cls(header["num_rows"], header["record_bytes"], header["page_bytes"])

    @classmethod
    def smallest(cls, num_rows: int, record_bytes: int, alignment: int) -> Self:
        """Return the layout of a new file: of the smallest pages of at least `alignment` bytes that can be numbered.

        A row is read with its block, and a block of one row is written without being read.
        """
        while (layout := cls(num_rows, record_bytes, alignment)).num_blocks > MAX_POSITIONS and alignment < PAGE_BYTES:
            alignment *= 2
        return layout

    @cached_property
    def rows_per_block(self) -> int:
        return max(1, (self.page_bytes - TRAILER_BYTES) // (self.record_bytes + 1))

    @cached_property
    def pages_per_block(self) -> int:
        return -(-(self.record_bytes + 1) // (self.page_bytes - TRAILER_BYTES))

    @property
    def pages(self) -> tuple[int, int]:
        """Number of the pages of a block, and their size."""
        return self.pages_per_block, self.page_bytes

    @cached_property
    def block_bytes(self) -> int:
        return self.pages_per_block * self.page_bytes

    @property
    def num_blocks(self) -> int:
        return -(-self.num_rows // self.rows_per_block)

    def offset(self, position: Any) -> Any:
        """Return the byte offset of a position, or of an array of them."""
        return PAGE_BYTES + position * self.block_bytes

    def file_bytes(self, num_blocks: int) -> int:
        """Return the size of a file of `num_blocks` blocks, in whole `PAGE_BYTES`."""
        return -(-self.offset(num_blocks) // PAGE_BYTES) * PAGE_BYTES

    def describe_rows(self, first: int, last: int) -> str:
        """Describe the rows of the blocks from `first` to `last` in words."""
        begin, end = first * self.rows_per_block, min((last + 1) * self.rows_per_block, self.num_rows)
        return f"row {begin}" if end - begin == 1 else f"rows {begin} to {end - 1}"

    def request(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks, int64 `[b]`, of ascending rows, int64 `[n]`, and the offsets of their rows, `[b + 1]`."""
        row_blocks = rows // self.rows_per_block
        starts = np.flatnonzero(np.diff(row_blocks, prepend=-1))
        return row_blocks[starts], np.append(starts, rows.size)

    def is_complete(self, blocks: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return which blocks have all of their rows in a request, bool `[b]`."""
        return np.diff(starts) == np.minimum(self.num_rows - blocks * self.rows_per_block, self.rows_per_block)


def runs(*numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split int64 `[n]` arrays into runs in which all of them are consecutive; return the runs' starts and ends."""
    if numbers[0].size == 0:
        return numbers[0], numbers[0]
    cuts = np.flatnonzero(np.any([np.diff(array) != 1 for array in numbers], axis=0)) + 1
    return np.append(0, cuts), np.append(cuts, numbers[0].size)


class PageTable:
    """Two-level table of the position of each block in the file. Positions follow the order of first writes.

    So a file grows at its end only: it has no holes at any table size, and blocks that were first written together are
    adjacent. Memory is 4 bytes per block that was written and 4 per `LEAF` blocks of the table; a sparsely written leaf
    takes 4 `LEAF` bytes. Positions 0 to `count` - 1 are allocated.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.count = num_blocks, 0
        self._leaf_of = _zeros(-(-num_blocks // LEAF))  # by block // LEAF; 0: not allocated
        self._leaves = _zeros(_MIN_LEAVES * LEAF).reshape(-1, LEAF)  # position + 1, 0: none; leaf 0 stays empty
        self._num_leaves = 1

    def find(self, blocks: np.ndarray) -> np.ndarray:
        """Return the positions of blocks int64 `[b]`, -1 where none is allocated."""
        return self._leaves[self._leaf_of[blocks >> _BITS], blocks & (LEAF - 1)].astype(np.int64) - 1

    def allocate(self, blocks: np.ndarray) -> np.ndarray:
        """Allocate positions for blocks int64 `[b]`, ascending, that have none; return all positions."""
        positions = self.find(blocks)
        new_mask = positions < 0
        positions[new_mask] = self.count + np.arange(np.count_nonzero(new_mask))
        self.insert(blocks[new_mask], positions[new_mask])
        return positions

    def insert(self, blocks: np.ndarray, positions: np.ndarray) -> None:
        """Set the positions of blocks that have none, in any order."""
        if blocks.size == 0:
            return
        leaf_keys = blocks >> _BITS
        new_leaves = np.unique(leaf_keys[self._leaf_of[leaf_keys] == 0])
        if (num_leaves := self._num_leaves + new_leaves.size) > self._leaves.shape[0]:
            larger = _zeros(max(num_leaves, 2 * self._leaves.shape[0]) * LEAF).reshape(-1, LEAF)
            larger[: self._num_leaves] = self._leaves[: self._num_leaves]
            self._leaves = larger
        self._leaf_of[new_leaves] = np.arange(self._num_leaves, num_leaves)
        self._num_leaves = num_leaves
        self._leaves[self._leaf_of[leaf_keys], blocks & (LEAF - 1)] = positions + 1
        self.count = max(self.count, int(positions.max()) + 1)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the blocks that have positions, int64, ascending, in chunks."""
        for first in range(0, self._leaf_of.size, _LEAVES_PER_CHUNK):
            leaf_keys = np.flatnonzero(self._leaf_of[first:][:_LEAVES_PER_CHUNK]) + first
            within, blocks = np.nonzero(self._leaves[self._leaf_of[leaf_keys]])
            if within.size:
                yield leaf_keys[within] * LEAF + blocks


def _zeros(count: int) -> np.ndarray:
    return np.frombuffer(reserve(4 * max(count, 1)), dtype=np.uint32)


class ChangedBlocks:
    """Bitmap of the blocks written since the last snapshot; its memory is allocated as bits are set."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        num_chunks = -(-self._num_blocks // CHUNK_BITS)
        self._bits = np.frombuffer(reserve(num_chunks * CHUNK_BITS // 8), dtype=np.uint8)
        self._changed_chunks = np.zeros(num_chunks, dtype=bool)

    def add(self, blocks: np.ndarray) -> None:
        """Set the bits of blocks int64 `[b]`, ascending."""
        if blocks.size == 0:
            return
        self._changed_chunks[blocks // CHUNK_BITS] = True
        octets = blocks >> 3
        starts = np.flatnonzero(np.diff(octets, prepend=-1))
        bits = np.left_shift(np.uint8(1), (blocks & 7).astype(np.uint8))
        self._bits[octets[starts]] |= np.bitwise_or.reduceat(bits, starts)

    def blocks(self) -> np.ndarray:
        """Return the blocks whose bits are set, int64, ascending."""
        by_chunk = [np.empty(0, dtype=np.int64)]
        for chunk in np.flatnonzero(self._changed_chunks).tolist():
            begin = chunk * CHUNK_BITS // 8
            bits = np.unpackbits(self._bits[begin : begin + CHUNK_BITS // 8], bitorder="little")
            by_chunk.append(np.flatnonzero(bits) + chunk * CHUNK_BITS)
        return np.concatenate(by_chunk)


class _RequestChunk:
    """A chunk of a request that fits half of the I/O buffer."""

    blocks: np.ndarray  # int64 `[b]`
    positions: np.ndarray  # int64 `[b]`: of the blocks in the file, -1 for none
    slots: np.ndarray  # int64 `[b]`: of the blocks in the buffer, counted from `begin`, -1 for none
    wait: Callable[[], None] = staticmethod(lambda: None)  # waits for the submitted transfer; raises a StorageError

    def __init__(self, block_range: slice, begin: int, request: int = 0) -> None:
        self.block_range = block_range  # among the request's blocks
        self.begin = begin  # byte offset in the buffer
        self.request = request  # its number

    def sort(self, blocks: np.ndarray, positions: np.ndarray) -> None:
        """Take this chunk's blocks from a request's, and assign slots in the order of their positions."""
        self.blocks, self.positions = blocks[self.block_range], positions[self.block_range]
        order = np.argsort(self.positions)
        order = order[np.searchsorted(self.positions[order], 0) :]
        self.slots = np.full(self.blocks.size, -1)
        self.slots[order] = np.arange(order.size)


_ChunkStage = Callable[[_RequestChunk], None]


class BlockFile:
    """Blocks of a file, for one thread at a time; `changed` are those written since the last snapshot.

    Opening runs a recovery scan: it reads the whole file, checks each block, and rebuilds the page table.
    """

    def __init__(self, file: PageFile, header: Mapping[str, Any]) -> None:
        self.table, self.file, self.layout = header["table"], file, FileLayout.of(header)
        if self.layout.page_bytes % file.alignment:  # copied from a file system with a smaller alignment
            file.use_page_cache()
        num_blocks = self.layout.num_blocks
        self.page_table, self.changed = PageTable(num_blocks), ChangedBlocks(num_blocks)
        self._size, self._num_written = file.size(), 0
        with closing(IoContext.free.get()) as context:
            self._scan(context)
        self.check_holes(header)

    @property
    def holes(self) -> int:
        """Number of allocated positions without a block: a process was killed before it wrote them."""
        return self.page_table.count - self._num_written

    def check_holes(self, header: Mapping[str, Any]) -> None:
        """Raise StorageError unless the file has all blocks that its header counts; those of old versions do not."""
        if header.get("holes") is not None and (lost := header["places"] - header["holes"] - self._num_written):
            raise StorageError(f"table {self.table!r}, file {self.file.path}: {lost:,} blocks are missing; {RESTORE}")

    def load(self, context: IoContext, blocks: np.ndarray, begin: int) -> None:
        """Read blocks that have positions into consecutive slots from byte `begin` of the buffer on; check them."""
        self._move(context, blocks, self.page_table.find(blocks), begin, False)
        num_good = cpu_kernels("pages").check(context.buffer.address + begin, blocks, *self.layout.pages)
        self.raise_damaged(blocks, num_good)

    def store(self, context: IoContext, blocks: np.ndarray, begin: int) -> None:
        """Write sealed blocks, ascending, from consecutive slots from byte `begin` of the buffer on."""
        self._move(context, blocks, self.allocate(blocks)[0], begin, True)

    def allocate(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Allocate blocks int64 `[b]`, ascending, for a write; return their positions, and which are new."""
        new_mask = self.page_table.find(blocks) < 0
        if self.page_table.count + np.count_nonzero(new_mask) > MAX_POSITIONS:
            text = f"{MAX_POSITIONS:,} blocks of {self.layout.block_bytes:,} bytes; split the table into smaller shards"
            raise StorageError(f"table {self.table!r}, file {self.file.path}: a file has at most {text}")
        positions = self.page_table.allocate(blocks)
        self._num_written += int(np.count_nonzero(new_mask))
        count = self.page_table.count
        if self.layout.file_bytes(count) > self._size:  # grow ahead of writes: growing on each write is slow
            self._size = self.layout.file_bytes(count + min(count // 4, MAX_GROWTH // self.layout.block_bytes))
            self.file.resize(self._size)
        self.changed.add(blocks)
        return positions, new_mask

    def _scan(self, context: IoContext) -> None:
        layout, step = self.layout, self.layout.block_bytes
        subject = f"table {self.table!r}, file {self.file.path}: "

        def begin(chunk: _RequestChunk) -> None:
            starts = np.arange(chunk.block_range.start, chunk.block_range.stop, max(1, SCAN_BYTES // step))
            sizes = np.diff(starts, append=chunk.block_range.stop) * step
            extents = Extents(chunk.begin + (starts - chunk.block_range.start) * step, sizes, layout.offset(starts))
            chunk.wait = partial(context.wait, context.submit(self.file, extents, False))

        def finish(chunk: _RequestChunk) -> None:
            first = chunk.block_range.start
            try:
                chunk.wait()
            except ExtentError as error:
                raise StorageError(
                    f"{subject}the extent at byte {layout.offset(first):,} could not be read: {error.reason}; "
                    f"{_LOG}, then restore the table from a snapshot"
                ) from error.reason
            # Check each block, and read its number.
            kernels, blocks = cpu_kernels("pages"), np.empty(chunk.block_range.stop - first, dtype=np.int64)
            address = context.buffer.address + chunk.begin
            num_good = kernels.identify(address, blocks, *layout.pages, layout.num_blocks)
            if num_good < blocks.size:
                raise StorageError(
                    f"{subject}the extent at byte {layout.offset(first + num_good):,} is damaged: its checksum does "
                    f"not match its content; {RESTORE}"
                )
            # Insert written blocks into the page table; each occurs once.
            written = np.flatnonzero(blocks != kernels.NEVER_WRITTEN)
            unique_blocks, counts = np.unique(blocks[written], return_counts=True)
            if (duplicates := unique_blocks[(counts > 1) | (self.page_table.find(unique_blocks) >= 0)]).size:
                rows = layout.describe_rows(int(duplicates[0]), int(duplicates[0]))
                raise StorageError(f"{subject}it is damaged: the extent with {rows} occurs twice; {RESTORE}")
            self.page_table.insert(blocks[written], first + written)
            self._num_written += written.size

        _overlap(context, [((self._size - layout.offset(0)) // step, step)], begin, finish)

    def _move(self, context: IoContext, blocks: np.ndarray, positions: np.ndarray, begin: int, write: bool) -> None:
        """Read or write blocks from or to consecutive slots of the buffer, and wait."""
        raise_if_cancelled()
        chunk = _RequestChunk(slice(0, blocks.size), begin)
        chunk.blocks, chunk.positions, chunk.slots = blocks, positions, np.arange(blocks.size)
        self.submit(context, chunk, chunk.slots, write)
        chunk.wait()

    def submit(self, context: IoContext, chunk: _RequestChunk, indices: np.ndarray, write: bool) -> None:
        """Start to read or write a chunk's blocks at these indices, if any; adjacent blocks form one extent."""
        if indices.size == 0:
            return
        step, order = self.layout.block_bytes, indices[np.argsort(chunk.positions[indices])]
        positions, slots = chunk.positions[order], chunk.slots[order]
        firsts, lasts = runs(positions, slots)
        addresses, sizes = chunk.begin + slots[firsts] * step, (lasts - firsts) * step
        extents = Extents(addresses, sizes, self.layout.offset(positions[firsts]))
        transfer = context.submit(self.file, extents, write)

        def wait() -> None:
            try:
                context.wait(transfer)
            except ExtentError as error:
                reason, failed_blocks = error.reason, chunk.blocks[order[firsts[error.extent] : lasts[error.extent]]]
                remedy = f"{advice(reason, _LOG)}, then restore the table from a snapshot"
                if isinstance(reason, EOFError):
                    remedy = "another process has truncated the file; restore it from a snapshot"
                action = "written" if write else "read"
                raise StorageError(
                    f"{self._describe(failed_blocks)} could not be {action}: {reason}; {remedy}"
                ) from reason

        chunk.wait = wait

    def raise_damaged(self, blocks: np.ndarray, num_good: int) -> None:
        if num_good < blocks.size:
            subject = self._describe(blocks[num_good : num_good + 1])
            raise StorageError(f"{subject} is damaged: its checksum does not match its content; {RESTORE}")

    def _describe(self, blocks: np.ndarray) -> str:
        begin = int(self.layout.offset(self.page_table.find(blocks[:1])[0]))
        first, last = int(blocks.min()), int(blocks.max())
        description = self.layout.describe_rows(first, last)
        if last - first >= blocks.size:
            description = f"{blocks.size} blocks of {self.layout.rows_per_block} rows among {description}"
        return f"table {self.table!r}, file {self.file.path}: the extent with {description}, at byte {begin:,},"


class BlockRequest:
    """Rows of a file, int64 `[n]`, ascending, to be read into, or written from, `n` records at an address.

    Records of rows that were never written are left unchanged. Blocks are read and checked before some rows change."""

    def __init__(self, file: BlockFile, rows: np.ndarray, records: int, write: bool) -> None:
        self.file, self._rows, self._records, self.write = file, rows, records, write
        self.blocks, self._starts = file.layout.request(rows)
        # Flags as in the kernel: of a write, which blocks are not read first; of a read, which rows were ever written.
        if write:
            self._positions, new_mask = file.allocate(self.blocks)
            self.flags = (new_mask | file.layout.is_complete(self.blocks, self._starts)).view(np.uint8)
        else:
            self._positions, self.flags = file.page_table.find(self.blocks), np.empty(rows.size, dtype=np.uint8)

    def begin(self, context: IoContext, chunk: _RequestChunk) -> None:
        chunk.sort(self.blocks, self._positions)
        is_read = self.flags[chunk.block_range] == 0 if self.write else chunk.positions >= 0
        self.file.submit(context, chunk, np.flatnonzero(is_read), False)

    def finish(self, context: IoContext, chunk: _RequestChunk) -> None:
        chunk.wait()
        layout, block_range = self.file.layout, chunk.block_range
        row_range = slice(int(self._starts[block_range.start]), int(self._starts[block_range.stop]))
        num_good = cpu_kernels("pages").copy(
            context.buffer.address + chunk.begin, (chunk.blocks, chunk.slots), self._rows[row_range],
            (layout.rows_per_block, *layout.pages, layout.record_bytes),
            self._records + row_range.start * layout.record_bytes,
            self.flags[block_range if self.write else row_range], self.write,
        )  # fmt: skip
        self.file.raise_damaged(chunk.blocks, num_good)
        if self.write:
            self.file.submit(context, chunk, np.arange(chunk.blocks.size), True)


def move_blocks(requests: Sequence[BlockRequest]) -> Sequence[BlockRequest]:
    """Do requests of different files at once; return them. After a StorageError some blocks may have been written."""
    writing = deque[_RequestChunk]()

    def begin(chunk: _RequestChunk) -> None:
        while writing:
            writing.popleft().wait()  # its half of the buffer is reused
        requests[chunk.request].begin(context, chunk)

    def finish(chunk: _RequestChunk) -> None:
        requests[chunk.request].finish(context, chunk)
        if requests[chunk.request].write:
            writing.append(chunk)  # while the next chunks are read

    with closing(IoContext.free.get()) as context:
        sizes = [(request.blocks.size, request.file.layout.block_bytes) for request in requests]
        _overlap(context, sizes, begin, finish)
        for chunk in writing:
            chunk.wait()
    return requests


def _overlap(context: IoContext, sizes: Sequence[tuple[int, int]], begin: _ChunkStage, finish: _ChunkStage) -> None:
    """Begin the chunks in one half of the buffer before those in the other are finished; `sizes` as in `_groups`."""
    half = -(-max(BUFFER_BYTES, *(block_bytes for _, block_bytes in sizes)) // PAGE_BYTES) * PAGE_BYTES
    if half > HALF_BYTES:
        context.reserve(half)
    for previous, chunks in pairwise(chain(((),), _groups(sizes, half), ((),))):
        if previous and chunks:
            raise_if_cancelled()
        for chunk in chunks:
            begin(chunk)
        for chunk in previous:
            finish(chunk)


def _groups(sizes: Sequence[tuple[int, int]], half: int) -> Iterator[Sequence[_RequestChunk]]:
    """Yield chunks of requests, numbers of blocks and bytes per block, as many as fit a half of the buffer."""
    chunks, number, end = list[_RequestChunk](), 0, 0
    for request, (num_blocks, block_bytes) in enumerate(sizes):
        first = 0
        while first < num_blocks:
            if end + block_bytes > half:
                yield chunks
                chunks, number, end = [], number + 1, 0
            last = min(num_blocks, first + (half - end) // block_bytes)
            chunks.append(_RequestChunk(slice(first, last), number % 2 * half + end, request))
            first, end = last, -(-(end + (last - first) * block_bytes) // PAGE_BYTES) * PAGE_BYTES
    yield chunks
