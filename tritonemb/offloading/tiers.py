"""Memory of offloaded tensors: a device arena, host memory, and swap files on disk."""

import contextlib
import gc
import os
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count, cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tritonemb.comm.group import RankGroup
from tritonemb.memory import empty_pinned
from tritonemb.storage.aio import PAGE_BYTES, ExtentError, Extents, IoBuffer, IoContext, PageFile
from tritonemb.storage.memory import StreamCopy
from tritonemb.storage.store import IoFuture, OperationQueue, StorageError, storage_errors, wait_all
from tritonemb.utils import on_error

TierName = Literal["device", "host", "disk"]
REQUEST_BYTES = 4 << 20  # bytes per read or write request: large enough for an NVMe drive's full rate
SEGMENT_BYTES = 8 << 20  # bytes per checksum step, which overlaps with the I/O of the next segment


def round_to_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def empty_host(num_bytes: int, gpu: torch.device) -> Tensor:
    """Allocate uint8 `[round_to_pages(num_bytes)]` in host memory, page-aligned; pinned if `gpu` is a GPU."""
    size = round_to_pages(num_bytes)
    return torch.from_numpy(IoBuffer(size).array) if gpu.type == "cpu" else empty_pinned(size, gpu)


def empty_on(device: torch.device, num_bytes: int) -> Tensor:
    """Allocate uint8 `[round_to_pages(num_bytes)]` on a device, page-aligned on the CPU."""
    if device.type == "cpu":
        return empty_host(num_bytes, device)
    return torch.empty(round_to_pages(num_bytes), dtype=torch.uint8, device=device)


class Arena:
    """Allocator of at most `num_bytes` of device memory, for parameters in use.

    A block is freed when no tensor refers to its storage, so a weight that activation checkpointing still reads is not
    overwritten. On the CPU the arena is one mapping, whose pages the system allocates on first use; on a GPU blocks
    come from PyTorch's allocator.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.device = num_bytes // PAGE_BYTES * PAGE_BYTES, device
        self.used = self.peak = 0
        self._memory = IoBuffer(self.num_bytes) if device.type == "cpu" and self.num_bytes else None
        # Bytes of blocks in use, by offset in the mapping, or on a GPU by number; keys of those freed by finalizers,
        # which may run at any time.
        self._blocks: dict[int, int] = {}
        self._freed: deque[int] = deque()
        self._numbers = count()

    @torch.inference_mode(False)  # autograd saves views of it
    def allocate(self, num_bytes: int) -> Tensor | None:
        """Allocate uint8 `[round_to_pages(num_bytes)]`, page-aligned; None if no gap between blocks is large enough."""
        size = round_to_pages(num_bytes)
        while self._freed:
            self.used -= self._blocks.pop(self._freed.popleft())
        if self._memory is None:
            if self.used + size > self.num_bytes:
                return None
            block, key = torch.empty(size, dtype=torch.uint8, device=self.device), next(self._numbers)
            owner: object = block.untyped_storage()
        else:
            edges = [0, *chain(*((at, at + length) for at, length in sorted(self._blocks.items()))), self.num_bytes]
            gaps = [(end - at, at) for at, end in zip(edges[::2], edges[1::2], strict=True) if end - at >= size]
            if not gaps:
                return None
            # Small blocks come from the other end, against fragmentation: the last fit; large ones the best fit.
            is_small = size <= self.num_bytes >> 6
            length, key = gaps[-1] if is_small else min(gaps)
            key += length - size if is_small else 0
            owner = array = self._memory.array[key : key + size]
            block = torch.from_numpy(array)
        weakref.finalize(owner, self._freed.append, key).atexit = False
        self._blocks[key] = size
        self.used += size
        self.peak = max(self.peak, self.used)
        return block


class Span:
    """Extent of a tier, for one tensor or several."""

    def __init__(self, tier: "HostTier | DiskTier", num_bytes: int, offset: int = 0) -> None:
        self.num_bytes, self._tier = num_bytes, tier
        # uint8 in host memory; None on disk.
        self.memory = empty_host(num_bytes, tier.device) if isinstance(tier, HostTier) else None
        # In the swap file.
        self.offset = offset
        self.checksum: int | None = None  # of the last write
        self.last_write: IoFuture | None = None
        self.reads: list[IoFuture] = []  # in progress since then

    def read(self, out: Tensor, dependencies: Sequence[IoFuture] = ()) -> IoFuture:
        """Copy into uint8 `[round_to_pages(num_bytes)]`, page-aligned on the CPU, which must not be used until then.

        `dependencies`: operations on `out` that end before it is written.
        """
        return self._tier.transfer(self, out, False, dependencies)

    def write(self, values: Tensor) -> IoFuture:
        """Copy from such a tensor. A later `read` waits for it."""
        return self._tier.transfer(self, values, True)


class BufferedPages:
    """Span for a chunk of a sub-group: in host memory, or on disk, and while in use in the sub-group's buffer."""

    def __init__(self, span: Span, dtype: torch.dtype) -> None:
        self.span, self._dtype = span, dtype
        # Of pages on disk: the offset in the buffer, and the write whose values the buffer has.
        self.offset: int | None = None
        self.buffered: IoFuture | None = None

    def pages(self, buffer: Tensor | None) -> Tensor:
        """Pages, uint8 `[round_to_pages(num_bytes)]`."""
        if self.offset is None:
            assert self.span.memory is not None
            return self.span.memory
        assert buffer is not None
        return buffer[self.offset :][: round_to_pages(self.span.num_bytes)]

    def view(self, buffer: Tensor | None) -> Tensor:
        """View of the values `[numel]`."""
        return self.pages(buffer)[: self.span.num_bytes].view(self._dtype)

    def begin_read(self, buffer: Tensor, dependencies: Sequence[IoFuture]) -> list[IoFuture]:
        """Start to read what was written since the last read."""
        if self.offset is None or self.buffered is self.span.last_write:
            return []
        self.buffered = self.span.last_write
        return [self.span.read(self.pages(buffer), dependencies)]

    def write(self, buffer: Tensor | None) -> list[IoFuture]:
        """Start to write pages of the buffer; nothing to do in host memory."""
        if self.offset is None:
            return []
        self.buffered = self.span.write(self.pages(buffer))
        return [self.buffered]


class GradientPages(BufferedPages):
    """Gradient of a chunk, from a backward until `is_set` becomes False.

    It is copied from and to the disk in memory that is not pinned: pinning it would take longer than a slower copy.
    """

    def __init__(self, span: Span, dtype: torch.dtype) -> None:
        super().__init__(span, dtype)
        self.is_set = False
        # Write in progress, and the factors of a gradient on disk, by which it is multiplied when it is read.
        self.pending: IoFuture | None = None
        self._factors: list[Tensor | float] = []
        self._unwritten: Tensor | None = None  # pages in the buffer, which the disk lacks

    def store(self, gradient: Tensor, buffer: Tensor | None = None) -> None:
        """Start to store a gradient `[numel]` on any device; one on disk in the `buffer` alone, if there is one."""
        memory = gradient.view(torch.uint8)
        if self.span.memory is None:
            pages = empty_host(self.span.num_bytes, torch.device("cpu")) if buffer is None else self.pages(buffer)
            pages[: self.span.num_bytes].copy_(memory)
            memory = pages
        self.is_set, self._factors, self.buffered = True, [], self.span.last_write
        self._unwritten = None if buffer is None else memory
        self.pending = self.span.write(memory) if buffer is None else None

    def write_back(self) -> list[IoFuture]:
        """Start to write a gradient that is in the buffer alone."""
        if self._unwritten is None or not self.is_set:
            return []
        self.pending, self._unwritten = self.span.write(self._unwritten), None
        return [self.pending]

    def add(self, gradient: Tensor, buffer: Tensor | None = None) -> None:
        """Add to the stored gradient, if there is one."""
        if not self.is_set:
            self.store(gradient, buffer)
        else:
            self._change(lambda stored: stored.add_(gradient.to("cpu")), buffer)

    def zero(self) -> None:
        self._change(Tensor.zero_)

    def _change(self, change: Callable[[Tensor], Tensor], buffer: Tensor | None = None) -> None:
        """Change the stored gradient in place, in its tier."""
        values = change(self.load())
        if self.span.memory is None:
            self.store(values, buffer)

    def load(self) -> Tensor:
        """Read the gradient, in host memory: of the host tier the stored one, otherwise a copy."""
        if self.pending is not None:
            self.pending.wait()
        if self.span.memory is not None:
            return self.span.memory[: self.span.num_bytes].view(self._dtype)
        if self._unwritten is None:
            pages = empty_host(self.span.num_bytes, torch.device("cpu"))
            self.span.read(pages).wait()
        else:
            pages = self._unwritten.clone()
        return self.scaled(pages[: self.span.num_bytes].view(self._dtype), in_place=True)

    def scale(self, factor: Tensor | float) -> None:
        if self.span.memory is None:
            self._factors.append(factor)
        else:
            self.load().mul_(factor)

    def scaled(self, values: Tensor, in_place: bool = False) -> Tensor:
        """Multiply the gradient by the factors; a copy, unless there are none or `in_place`."""
        for factor in self._factors:
            values = values.mul_(factor) if in_place else values.mul(factor)
            in_place = True
        return values


class HostTier:
    """Host memory tier, pinned for a GPU. A thread copies, so that copies overlap with computation."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes_moved = device, [0, 0]  # read, written
        self._copies = OperationQueue("tritonemb-offload-copy")
        self._closed = weakref.finalize(self, _stop, [self._copies])
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def reserve(self, num_bytes: int) -> Span:
        return Span(self, num_bytes)

    def transfer(self, span: Span, values: Tensor, write: bool, dependencies: Sequence[IoFuture] = ()) -> IoFuture:
        """Copy in the background."""
        wait_all(dependencies)
        assert span.memory is not None
        self.bytes_moved[write] += values.nbytes
        memory = span.memory[: values.numel()]
        target, source = (memory, values) if write else (values, memory)
        if self.device.type == "cpu":
            return self._copies.submit(lambda: (target.copy_(source), None)[1])
        return StreamCopy(self._stream, source, target)

    def close(self) -> None:
        """Wait for pending copies, and end the thread."""
        if self._closed.alive:
            self._copies.submit(lambda: None).wait()
            self._closed()


class DiskTier:
    """Disk tier: a rank's swap file in a folder, with direct I/O by the engine of `storage`.

    The file is locked, removed when the tier is closed or the process ends, and reclaimed by the next process if this
    one was killed. Reads are verified by the checksums of the writes, which detects damaged or truncated files. Reads
    and writes have two threads each: one computes checksums while the disk works for the other.

    Raises:
        StorageError: the folder is not writable, another process uses the file, or the disk is full.
    """

    def __init__(self, folder: Path, rank: int = 0, world_size: int = 1) -> None:
        self.path, self.bytes_moved = folder / f"swap-{rank}.bin", [0, 0]
        self._size = 0
        with storage_errors(f"offload folder {folder}: cannot create {self.path.name}", "name a writable folder"):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
            if rank == 0:
                _remove_stale(folder, world_size)
        names = "tritonemb-offload-read", "tritonemb-offload-write"
        self._queues = [[OperationQueue(name), OperationQueue(name)] for name in names]
        self._closed = weakref.finalize(self, _stop, chain(*self._queues), self._file, os.getpid())

    def _open(self) -> PageFile:
        has_collected, folder, name = False, self.path.parent, self.path.name
        problem = f"offload folder {folder}: another process uses {name}; give each run its own folder"
        while True:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            file = PageFile(self.path)
            with on_error(file.close):
                if file.lock():
                    if file.is_linked():  # else its owner has just removed it
                        file.resize(0)
                        return file
                elif has_collected:
                    raise StorageError(problem)
                else:  # perhaps locked by a dead model of this process: collect it, and retry
                    has_collected = gc.collect() >= 0
            file.close()

    def reserve(self, num_bytes: int) -> Span:
        """Allocate a span in the file; StorageError if the disk is full."""
        offset, size = self._size, round_to_pages(num_bytes)
        problem = f"{self.path}: cannot reserve {offset + size:,} bytes"
        with storage_errors(problem, "name a folder on another disk"):
            os.posix_fallocate(self._file.handle, offset, size)
        self._size += size
        return Span(self, num_bytes, offset)

    def transfer(self, span: Span, values: Tensor, write: bool, dependencies: Sequence[IoFuture] = ()) -> IoFuture:
        """Read or write in one of the two threads for it, after the last write and `dependencies`."""
        if not self._closed.alive:
            raise StorageError(f"{self.path} is closed")
        self.bytes_moved[write] += values.nbytes
        previous_write, reads = span.last_write, span.reads if write else []

        def move() -> None:
            wait_all(dependencies)
            for read in reads:
                with contextlib.suppress(StorageError):
                    read.wait()
            if previous_write is not None:
                with contextlib.suppress(*[StorageError] * write):  # a new write repairs a failed one
                    previous_write.wait()
            self._move(span, values, write)

        self._queues[write].reverse()
        future = self._queues[write][0].submit(move)
        if write:
            span.last_write, span.reads = future, []
        else:
            span.reads = [*(read for read in span.reads if not read.done()), future]
        return future

    def _move(self, span: Span, values: Tensor, write: bool) -> None:
        """Read or write a span, segment by segment, and verify or store its checksum."""
        # Transfer in host memory; checksum a segment while others are in flight.
        host_values = values if values.device.type == "cpu" else torch.from_numpy(IoBuffer(values.numel()).array)
        if write and host_values is not values:
            host_values.copy_(values)
        array, size = host_values.numpy(), round_to_pages(span.num_bytes)
        assert write or span.checksum is not None, "read of a span that was never written"
        checksum, action = 0, "write to" if write else "read from"
        segments = [slice(begin, min(begin + SEGMENT_BYTES, size)) for begin in range(0, size, SEGMENT_BYTES)]
        span.checksum, expected = None if write else span.checksum, span.checksum
        text, advice = f"{self.path}: cannot {action} the swap file", "check the disk, and resume from a checkpoint"
        with storage_errors(text, advice), contextlib.closing(IoContext.free.get()) as context:
            try:
                transfers = [context.submit(self._file, _extents(span, segment), write, array) for segment in segments]
                for segment, transfer in zip(segments, transfers, strict=True):
                    if not write:
                        context.wait(transfer)
                    checksum = _checksum(array[segment], checksum)
                    if write:
                        context.wait(transfer)
            except ExtentError as error:
                raise error.reason from error
        # Store the checksum of a write; verify that of a read.
        if write:
            span.checksum = checksum
        elif checksum != expected:
            raise StorageError(
                f"{self.path}: bytes {span.offset:,} to {span.offset + size:,} have another checksum than written: the "
                "file was changed, or the disk is damaged; resume from a checkpoint"
            )
        elif host_values is not values:
            values.copy_(host_values)

    def close(self) -> None:
        if self._closed.alive:
            for queue in chain(*self._queues):
                queue.submit(lambda: None).wait()
            self._closed()


def _extents(span: Span, segment: slice) -> Extents:
    """I/O requests of a segment, at most `REQUEST_BYTES` each."""
    begins = np.arange(segment.start, segment.stop, REQUEST_BYTES)
    return Extents(begins, np.minimum(REQUEST_BYTES, segment.stop - begins), span.offset + begins)


def _checksum(array: np.ndarray, seed: int) -> int:
    """Checksum of whole pages, at memory speed: CRC of the sum of each page, and of the sum over pages of each word, so
    that exchanged words and exchanged pages change it."""
    words = array.view(np.uint64).reshape(-1, PAGE_BYTES // 8)
    return zlib.crc32(words.sum(0).tobytes(), zlib.crc32(words.sum(1).tobytes(), seed))


def _stop(queues: Iterable[OperationQueue], file: PageFile | None = None, process: int | None = None) -> None:
    """End the threads and remove the file, unless this is a process that was forked from `process`."""
    if process in (None, os.getpid()):
        for queue in queues:
            queue.close(lambda: None)
        if file is not None:
            file.path.unlink(missing_ok=True)
    if file is not None:
        file.close()


def _remove_stale(folder: Path, world_size: int) -> None:
    """Remove files of killed processes, of ranks beyond this job's world size."""
    for path in folder.glob("swap-*.bin"):
        if int(path.stem.removeprefix("swap-")) >= world_size:
            file = PageFile(path)
            if file.lock():
                os.unlink(path)
            file.close()


class StripedTier:
    """Swap files on several disks, with spans assigned round-robin, so that all disks work in parallel."""

    def __init__(self, tiers: list[DiskTier]) -> None:
        self._tiers, self._next_tier = tiers, cycle(tiers)

    @property
    def bytes_moved(self) -> list[int]:
        return [sum(counts) for counts in zip(*(tier.bytes_moved for tier in self._tiers), strict=True)]

    def reserve(self, num_bytes: int) -> Span:
        return next(self._next_tier).reserve(num_bytes)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()


Tier = HostTier | DiskTier | StripedTier


def make_tier(name: TierName, device: torch.device, folders: list[Path]) -> Tier:
    """Create the tier "host" or "disk"."""
    if name == "host":
        return HostTier(device)
    group, tiers = RankGroup.world(), list[DiskTier]()
    with on_error(lambda: StripedTier(tiers).close()):
        tiers.extend(DiskTier(folder, group.rank, group.size) for folder in folders)
    return StripedTier(tiers)
