"""Where offloaded tensors are: an arena of device memory, spans of host memory, and a swap file on disk."""

import contextlib
import gc
import os
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tritonemb.memory import empty_pinned
from tritonemb.storage.aio import PAGE_BYTES, ExtentError, Extents, IoBuffer, Memory, PageFile, io_context
from tritonemb.storage.store import IoFuture, OperationQueue, StorageError, storage_errors
from tritonemb.utils import on_error

TierName = Literal["device", "host", "disk"]
CHUNK_BYTES = 4 << 20  # of one read or write
SEGMENT_BYTES = 8 << 20  # checked at once


def pages(num_bytes: int) -> int:
    """Rounded up to whole pages, which direct I/O needs."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def aligned(num_bytes: int, gpu: torch.device) -> Tensor:
    """uint8 `[pages(num_bytes)]` in host memory, page-aligned, pinned if `gpu` is one."""
    size = pages(num_bytes)
    return torch.from_numpy(IoBuffer(size).array) if gpu.type == "cpu" else empty_pinned(size, gpu)


def empty_on(device: torch.device, num_bytes: int) -> Tensor:
    """uint8 `[pages(num_bytes)]` in memory of a device, page-aligned on a CPU."""
    if device.type == "cpu":
        return aligned(num_bytes, device)
    return torch.empty(pages(num_bytes), dtype=torch.uint8, device=device)


class Arena:
    """At most `num_bytes` of device memory, for parameters while they are used.

    A block is free again when no tensor refers to its storage any more, so that nothing overwrites what somebody still
    reads, such as a weight that a checkpointed block saved when it was computed again. On a CPU it is one mapping,
    whose pages the system gives when they are first used; on a GPU blocks come from PyTorch's allocator.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.device = num_bytes // PAGE_BYTES * PAGE_BYTES, device
        self.used = self.peak = 0
        self._memory = IoBuffer(self.num_bytes) if device.type == "cpu" and self.num_bytes else None
        self._free = [(0, self.num_bytes)]  # ascending; on a GPU only their sum counts
        self._returned: deque[tuple[int, int]] = deque()  # by the collector, which may call at any time

    def take(self, num_bytes: int) -> Tensor | None:
        """uint8 `[pages(num_bytes)]`, page-aligned; None if no free block is large enough."""
        size = pages(num_bytes)
        self._collect()
        if self._memory is None:
            if self.used + size > self.num_bytes:
                return None
            block, begin = torch.empty(size, dtype=torch.uint8, device=self.device), 0
            owner: object = block.untyped_storage()
        else:
            small = size <= self.num_bytes >> 6  # from the other end, not to be in the way of large ones
            fitting = [(-at if small else length, at, length) for at, length in self._free if length >= size]
            if not fitting:
                return None
            _, at, length = min(fitting)
            place, begin = self._free.index((at, length)), at + length - size if small else at
            rest = (at if small else at + size, length - size)
            self._free[place : place + 1] = [rest] if length > size else []
            owner = array = self._memory.array[begin : begin + size]
            block = torch.from_numpy(array)
        weakref.finalize(owner, self._returned.append, (begin, size)).atexit = False
        self.used += size
        self.peak = max(self.peak, self.used)
        return block

    def _collect(self) -> None:
        while self._returned:
            begin, size = self._returned.popleft()
            self.used -= size
            if self._memory is not None:
                self._free.append((begin, size))
        merged: list[tuple[int, int]] = []
        for begin, size in sorted(self._free):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = merged[-1][0], merged[-1][1] + size
            else:
                merged.append((begin, size))
        self._free = merged


class HostSpan:
    """Bytes of a tier, which hold one tensor or several. `memory`: uint8 in host memory; None on disk."""

    def __init__(self, tier: "HostTier", num_bytes: int) -> None:
        self.num_bytes, self._tier = num_bytes, tier
        self.memory: Tensor = aligned(num_bytes, tier.device)

    def read(self, out: Tensor) -> IoFuture:
        """Copy them into uint8 `[pages(num_bytes)]`, page-aligned on a CPU, which must be left alone meanwhile."""
        return self._tier.copy(self.memory, out, 0)

    def write(self, values: Tensor) -> IoFuture:
        """Copy them from such a tensor. A later `read` waits for it."""
        return self._tier.copy(values, self.memory, 1)


class HostTier:
    """Host memory, pinned for a GPU. A thread copies, so that copies and computation overlap."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.moved = device, [0, 0]  # bytes read and written so far
        self._copies = OperationQueue("tritonemb-offload-copy")
        self._closed = weakref.finalize(self, _end, [self._copies])
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def reserve(self, num_bytes: int) -> HostSpan:
        """A new span; StorageError if there is no room."""
        return HostSpan(self, num_bytes)

    def copy(self, source: Tensor, target: Tensor, way: int) -> IoFuture:
        self.moved[way] += source.nbytes
        if self.device.type == "cpu":
            return self._copies.submit(lambda: (target.copy_(source), None)[1])
        return StreamCopy(self._stream, source, target)

    def close(self) -> None:
        """Wait for what was submitted, and give the memory or the file back."""
        if self._closed.alive:
            self._copies.submit(lambda: None).wait()
            self._closed()


class StreamCopy(IoFuture):
    """A copy between pinned memory and a GPU on a stream of its own; `wait` makes the current stream wait for it."""

    def __init__(self, stream: Any, source: Tensor, target: Tensor) -> None:
        super().__init__()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            self._event = stream.record_event()
        self._to_host = target.device.type == "cpu"
        self._done.set()

    def wait(self) -> None:
        if self._to_host:
            self._event.synchronize()
        torch.cuda.current_stream().wait_event(self._event)


class DiskSpan:
    """As `HostSpan`, in a swap file."""

    memory: None = None

    def __init__(self, tier: "DiskTier", offset: int, num_bytes: int) -> None:
        self.num_bytes, self.offset, self._tier = num_bytes, offset, tier
        self.checksum: int | None = None  # of what was written last
        self.written: IoFuture | None = None

    def read(self, out: Tensor) -> IoFuture:
        return self._transfer(out, False)

    def write(self, values: Tensor) -> IoFuture:
        self.written = self._transfer(values, True)
        return self.written

    def _transfer(self, values: Tensor, write: bool) -> IoFuture:
        written = self.written

        def transfer() -> None:
            if written is not None:
                with contextlib.suppress(*[StorageError] * write):  # a failed write may be made good
                    written.wait()
            self._tier.transfer(self, values, write)

        return self._tier.submit(write, transfer)


class DiskTier:
    """A rank's swap file in a folder, read and written past the page cache by the engine of `storage`.

    The file is locked, removed when the tier is closed or the process ends, and reclaimed by the next process if this
    one was killed. What is read is checked against the checksum of what was written, so a file that was damaged or cut
    is noticed. Reads and writes have two threads each: one checks while the disk works for the other.

    Raises:
        StorageError: the folder cannot be written to, another process uses the file, or the disk is full.
    """

    def __init__(self, folder: Path, rank: int = 0, world_size: int = 1) -> None:
        self.path, self.moved = folder / f"swap-{rank}.bin", [0, 0]
        self._size, self._lock = 0, threading.Lock()
        with storage_errors(f"offload folder {folder}: cannot make {self.path.name}", "name a folder you can write to"):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
            if rank == 0:
                _remove_stale(folder, world_size)
        names = "tritonemb-offload-read", "tritonemb-offload-write"
        self._queues = [OperationQueue(name) for name in names for _ in range(2)]
        self._turn = [0, 0]
        self._closed = weakref.finalize(self, _remove, self._file, self._queues, os.getpid())

    def _open(self) -> PageFile:
        collected = False
        while True:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            file = PageFile(self.path)
            with on_error(file.close):
                locked = file.lock()
                if not locked and collected:
                    raise StorageError(
                        f"offload folder {self.path.parent}: another process uses {self.path.name}; give each run a "
                        "folder of its own"
                    )
                if locked and file.is_linked():  # else its owner has removed it meanwhile
                    file.resize(0)
                    return file
                if not locked:  # perhaps by a model of this process that nobody uses any longer
                    collected = gc.collect() >= 0
            file.close()

    def reserve(self, num_bytes: int) -> DiskSpan:
        offset, size = self._size, pages(num_bytes)
        what = f"{self.path}: cannot reserve {offset + size:,} bytes"
        with storage_errors(what, "name a folder on another disk"):
            os.posix_fallocate(self._file.handle, offset, size)
        self._size += size
        return DiskSpan(self, offset, num_bytes)

    def submit(self, write: bool, work: Callable[[], None]) -> IoFuture:
        if not self._closed.alive:
            raise StorageError(f"{self.path} is closed")
        self._turn[write] ^= 1
        return self._queues[2 * write + self._turn[write]].submit(work)

    def transfer(self, span: DiskSpan, values: Tensor, write: bool) -> None:
        """Read or write a span."""
        on_cpu = values if values.device.type == "cpu" else torch.from_numpy(IoBuffer(values.numel()).array)
        if write and on_cpu is not values:
            on_cpu.copy_(values)
        array, size = on_cpu.numpy(), pages(span.num_bytes)
        assert write or span.checksum is not None, "a span is read that was never written"
        memory, checksum = Memory(on_cpu.data_ptr(), memoryview(array)), 0
        doing = "write to" if write else "read from"
        segments = [slice(begin, min(begin + SEGMENT_BYTES, size)) for begin in range(0, size, SEGMENT_BYTES)]
        span.checksum, before = None if write else span.checksum, span.checksum
        advice = "check the disk, and resume from a checkpoint"
        with storage_errors(f"{self.path}: cannot {doing} the swap file", advice), io_context() as context:
            try:
                transfers = [context.submit(self._file, _extents(span, part), write, memory) for part in segments]
                for part, transfer in zip(segments, transfers, strict=True):
                    if not write:
                        context.wait(transfer)
                    checksum = _checksum(array[part], checksum)
                    if write:
                        context.wait(transfer)
            except ExtentError as error:
                raise error.reason from error
        with self._lock:
            self.moved[write] += size
        if write:
            span.checksum = checksum
        elif checksum != before:
            raise StorageError(
                f"{self.path}: bytes {span.offset:,} to {span.offset + size:,} are not what was written: the file was "
                "changed, or the disk is damaged; resume from a checkpoint"
            )
        elif on_cpu is not values:
            values.copy_(on_cpu)

    def close(self) -> None:
        if self._closed.alive:
            for each in self._queues:
                each.submit(lambda: None).wait()
            self._closed()


def _extents(span: DiskSpan, part: slice) -> Extents:
    begins = np.arange(part.start, part.stop, CHUNK_BYTES)
    return Extents(begins, np.minimum(CHUNK_BYTES, part.stop - begins), span.offset + begins)


def _checksum(array: np.ndarray, before: int) -> int:
    """Of whole pages, at the speed of memory: the CRC of each page's sum, and of each word's over the pages, so that it
    sees words and pages that were exchanged."""
    words = array.view(np.uint64).reshape(-1, PAGE_BYTES // 8)
    return zlib.crc32(words.sum(0).tobytes(), zlib.crc32(words.sum(1).tobytes(), before))


def _remove(file: PageFile, queues: Iterable[OperationQueue], process: int) -> None:
    """End the threads; remove the file, unless this is a process that was forked off."""
    if os.getpid() == process:
        _end(queues)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path)
    file.close()


def _end(queues: Iterable[OperationQueue]) -> None:
    for each in queues:
        each.close(lambda: None)


def _remove_stale(folder: Path, world_size: int) -> None:
    """Remove files that processes which were killed have left, of ranks that this job has not."""
    for path in folder.glob("swap-*.bin"):
        if int(path.stem.removeprefix("swap-")) >= world_size:
            file = PageFile(path)
            if file.lock():
                os.unlink(path)
            file.close()


class StripedTier:
    """Swap files on several disks, which have spans in turn, so that they work at once."""

    def __init__(self, tiers: list[DiskTier]) -> None:
        self._tiers, self._turn = tiers, 0

    @property
    def moved(self) -> list[int]:
        return [sum(each) for each in zip(*(tier.moved for tier in self._tiers), strict=True)]

    def reserve(self, num_bytes: int) -> DiskSpan:
        self._turn = (self._turn + 1) % len(self._tiers)
        return self._tiers[self._turn].reserve(num_bytes)

    def close(self) -> None:
        for each in self._tiers:
            each.close()


Span = HostSpan | DiskSpan
Tier = HostTier | DiskTier | StripedTier


def make_tier(name: TierName, device: torch.device, folders: list[Path]) -> Tier:
    """The tier of this name, "host" or "disk"."""
    if name == "host":
        return HostTier(device)
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    made: list[DiskTier] = []
    with on_error(lambda: StripedTier(made).close()):
        made.extend(DiskTier(folder, *ranks) for folder in folders)
    return made[0] if len(made) == 1 else StripedTier(made)
