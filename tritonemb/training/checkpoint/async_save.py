"""Checkpoints that are written while training goes on, by `torch.distributed.checkpoint.async_save`."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from tritonemb.comm.group import RankGroup
from tritonemb.sharding.sharded_tensor import TableShards
from tritonemb.training.checkpoint.all_ranks import ignore_single_process_warning, is_alone, on_all_ranks
from tritonemb.training.checkpoint.dcp import CheckpointWriter
from tritonemb.training.checkpoint.folder import CheckpointFolder


class WrittenCheckpoint(NamedTuple):
    """A checkpoint that has been written.

    Args:
        step: of which.
        size: in bytes, of all ranks.
        stopped: seconds that training waited for it.
        seconds: until it was on the disk.
    """

    step: int
    size: int
    stopped: float
    seconds: float


class AsyncSave:
    """Writes one checkpoint at a time in a thread: training stops only while the tensors are copied to host memory.

    Tables on disk are not copied there: snapshots of them are submitted, for which what training reads and writes of
    them afterwards has to wait, and which take no time where the file system makes reflink copies.

    The thread has a process group of its own. The end of the process waits for it; a process that is killed leaves the
    last checkpoint whole, as `CheckpointFolder` does.

    All ranks make it, start it and wait for it together, in the same order. Whether it is `done` is of one rank alone:
    ranks that are to do something about a failure together must `wait` together, where all get the same answer.

    Args:
        folder: where checkpoints go.
        group: ranks that write them together; None for this process alone.
        timeout: how long a rank waits for the slowest one to have written; torch's default if not given.
    """

    def __init__(
        self, folder: CheckpointFolder, group: RankGroup | None = None, timeout: timedelta | None = None
    ) -> None:
        self.folder = folder
        self._group = None if group is None or is_alone(group) else group.duplicate(backend="gloo", timeout=timeout)
        self._process_group = None if self._group is None else self._group.process_group
        if self._group is None and dist.is_available() and dist.is_initialized():
            # torch does not use it, and wants one that serves the CPU.
            self._process_group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        self._stager = HostStager(self._group)
        self._running: tuple[CheckpointWriter, Future[Metadata], float] | None = None
        self._written: WrittenCheckpoint | None = None
        atexit.register(_finish, weakref.ref(self))

    def start(
        self, step: int, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], best: bool = False
    ) -> WrittenCheckpoint | None:
        """Begin to write the checkpoint of this moment; waits for the one before.

        Args:
            best: mark it as the best one when it is written.

        Returns:
            the one before, if nobody has asked for it yet.

        Raises:
            CheckpointError, ValueError: the one before could not be written, or there is no memory for this one on some
                rank, or its folder cannot be made; nothing is left of this one then. Where the ranks could not be
                reached, the error is that of the exchange.
            StorageError: what was trained could not be written to a table on disk.
        """
        before = self.wait()
        begin = time.perf_counter()
        writer = self.folder.begin(step, tensors, manifest, self._group, best)
        writer.per_thread_copy_ahead = 0  # the copies are in host memory
        with self.folder.reporting(writer):
            ignore_single_process_warning()
            future = async_save(
                dict(writer.tensors),
                storage_writer=writer,
                process_group=self._process_group,
                async_stager=self._stager,
                no_dist=self._group is None,
            )
        assert isinstance(future, Future)  # not of an asynchronous stager
        self._running = writer, future, time.perf_counter() - begin
        return before

    def done(self) -> bool:
        """Whether nothing is being written on this rank.

        Raises:
            as `start`, once.
        """
        if self._running is not None and not self._running[1].done():
            return False
        self._collect()
        return True

    def wait(self) -> WrittenCheckpoint | None:
        """Wait until it is written; what was written since the last call.

        Raises:
            as `start`, once.
        """
        self._collect()
        written, self._written = self._written, None
        return written

    def _collect(self) -> None:
        if self._running is None:
            return
        writer, future, stopped = self._running
        try:
            with self.folder.reporting(writer):
                size, seconds = writer.result(future.result())
            self._written = WrittenCheckpoint(writer.step, size, stopped, seconds)
        finally:
            if future.done():
                self._running = None


class HostStager(BlockingAsyncStager):
    """Copies tensors to host memory; its buffers are made at the first copy and used again for the next ones.

    Their memory is pinned for what comes from a CUDA device. Unlike torch's stagers it knows `TableShards`, copies only
    the part of a storage that a tensor has, and fails on all ranks if it fails on one.
    """

    def __init__(self, group: RankGroup | None = None) -> None:
        super().__init__()
        self._group = group
        self._buffers: dict[str, Tensor] = {}
        self._shells: dict[str, DTensor] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies for torch; overwrites what the last call returned.

        Raises:
            OSError: on all ranks, if there is no memory on one.
        """
        copies: dict[str, Any] = {}

        def copy() -> None:
            try:
                copies.update(self.copy(state_dict))
            except (MemoryError, RuntimeError) as error:
                raise OSError(f"the tensors cannot be copied to host memory: {error}") from error

        on_all_ranks(self._group, copy, OSError)
        return copies

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank is to save of `tensors`: of `TableShards` and DTensors, such ones on the CPU."""
        before, self._buffers = self._buffers, {}  # buffers that are not wanted any more are freed
        devices: set[torch.device] = set()

        def fill(name: str, tensor: Tensor) -> Tensor:
            buffer = before.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
            devices.update([tensor.device] if tensor.is_cuda else [])
            return buffer.copy_(tensor, non_blocking=tensor.is_cuda)

        def copy(name: str, tensor: Tensor) -> Tensor:
            if isinstance(tensor, TableShards):
                numbers = count()
                return tensor.map(lambda part: fill(f"{name} {next(numbers)}", part), only_mine=True)
            if isinstance(tensor, DTensor):
                shell = self._shells.get(name)
                if shell is None or _layout(shell) != _layout(tensor):
                    shell = self._shells[name] = cast(DTensor, tensor.to("cpu", copy=True))
                shell._local_tensor = fill(name, tensor.to_local())
                return shell
            return fill(name, tensor)

        copies = {name: copy(name, tensor) for name, tensor in tensors.items()}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies


def _layout(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device_mesh, tensor.placements


def _finish(save: weakref.ref[AsyncSave]) -> None:
    """The process ends: what is being written is written first, and a failure that nobody has asked for is printed."""
    found = save()
    try:
        if found is not None:
            found.wait()
    except Exception as error:
        print(f"error: {error}", file=sys.stderr)
