"""Rank groups with counted collectives, and the consensus of all ranks before a step."""

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from tritonemb.utils import end_with_torchrun

# torch 2.13 renamed them, and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@functools.cache
def _wait_for_threads_at_exit() -> None:
    """Wait at exit until gloo's threads have released their tensors.

    They may do so after `wait` has returned. If the interpreter is shutting down by then, the process aborts with
    "terminate called without an active exception".
    """
    atexit.register(time.sleep, 0.1)


class BytesSent(NamedTuple):
    """Bytes sent to other ranks, and the part sent to other nodes."""

    total: int = 0
    across_nodes: int = 0


class Traffic:
    """Thread-safe counter of the bytes that a rank sends."""

    def __init__(self) -> None:
        self._sent: dict[str, BytesSent] = {}
        self._lock = threading.Lock()

    def add(self, kind: str, total: int, across_nodes: int) -> None:
        with self._lock:
            previous = self._sent.get(kind, BytesSent())
            self._sent[kind] = BytesSent(previous.total + total, previous.across_nodes + across_nodes)

    def by_kind(self) -> dict[str, BytesSent]:
        with self._lock:
            return dict(self._sent)

    def reset(self) -> None:
        with self._lock:
            self._sent.clear()


class RankGroup:
    """A subset of the job's processes. Creating one is a collective of all processes of the job.

    With one rank, or without `torch.distributed`, collectives return their input without communication.

    Args:
        process_group: process group of `torch.distributed`; None for one process.
        local_world_size: ranks of the job per node, by default torchrun's `LOCAL_WORLD_SIZE`, or else all ranks.
        traffic: counter of bytes; groups may share one.
        timeout: timeout of collectives of subgroups; by default PyTorch's.

    Attributes:
        rank, size: rank of this process in the group, number of ranks.
        ranks: the members' ranks in the job.
        nodes: the members' nodes.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, local_world_size: int | None = None,
        traffic: Traffic | None = None, timeout: timedelta | None = None,
    ) -> None:  # fmt: skip
        end_with_torchrun()
        self.process_group = process_group
        self.rank, self.size, self.ranks = 0, 1, [dist.get_rank() if dist.is_initialized() else 0]
        if process_group is not None:
            _wait_for_threads_at_exit()
            self.ranks = dist.get_process_group_ranks(process_group)
            self.rank, self.size = dist.get_rank(process_group), len(self.ranks)
        # Without torchrun, all processes of the job are on one node.
        ranks_per_node = os.environ.get("LOCAL_WORLD_SIZE") or (dist.get_world_size() if dist.is_initialized() else 1)
        self.local_world_size = local_world_size or int(ranks_per_node)
        self.nodes = [rank // self.local_world_size for rank in self.ranks]
        self.traffic = Traffic() if traffic is None else traffic
        self.timeout = timeout

    @classmethod
    def world(cls, local_world_size: int | None = None, timeout: timedelta | None = None) -> Self:
        """Return the group of all processes of the job; of this process without `torch.distributed`."""
        return cls(dist.group.WORLD if dist.is_initialized() else None, local_world_size, timeout=timeout)

    def backend_of(self, device: torch.device) -> str:
        """Name of the backend that sends tensors of a device: "gloo", "nccl" or another; "" if there is none."""
        if self.process_group is None:
            return ""
        entries = dist.get_backend_config(self.process_group).split(",")  # "cpu:gloo,cuda:nccl"
        return dict(entry.split(":") for entry in entries).get(device.type, "")

    def subgroup(
        self, members: Sequence[Sequence[int]], backend: str | None = None, timeout: timedelta | None = None
    ) -> Self:
        """Return this process's group of disjoint sets of ranks. A collective of all processes of the job.

        It shares this group's traffic counter, and by default its `backend` and `timeout`.
        """
        assert any(self.rank in ranks for ranks in members), "this process is in no set"
        timeout = self.timeout if timeout is None else timeout
        connected = [[self.ranks[rank] for rank in ranks] for ranks in members if len(ranks) > 1]
        process_group = dist.new_subgroups_by_enumeration(connected, timeout, backend)[0] if connected else None
        return type(self)(process_group, self.local_world_size, self.traffic, timeout)

    def duplicate(self, backend: str | None = None, timeout: timedelta | None = None) -> Self:
        """Return a group of the same ranks with separate connections, so that another thread can run collectives."""
        return self.subgroup([range(self.size)], backend, timeout)

    def all_to_all(
        self, message: Tensor, send: Sequence[int], receive: Sequence[int], kind: str
    ) -> Callable[[], Tensor]:
        """Start to send `send[r]` elements of a 1-D message to each rank `r`; bytes are counted as `kind`.

        Calling the result waits for `receive[r]` elements of each rank, in order, and returns them.
        """
        assert message.shape == (sum(send),), (message.shape, send)
        self._count(kind, [n * message.element_size() for n in send])
        if self.size == 1:
            return lambda: message
        received, sizes = message.new_empty(sum(receive)), (list(receive), list(send))
        work = dist.all_to_all_single(received, message, *sizes, group=self.process_group, async_op=True)
        return functools.partial(wait_for, work, received)

    def all_gather(self, message: Tensor, kind: str) -> Tensor:
        """Gather the tensors of all ranks, of equal shapes: `[size, *shape]`."""
        self._count(kind, [message.nbytes] * self.size)
        if self.size == 1:
            return message.unsqueeze(0)
        gathered = message.new_empty(self.size * message.numel())
        all_gather_single(gathered, message.contiguous().view(-1), group=self.process_group)
        return gathered.view(self.size, *message.shape)

    def all_gather_object(self, item: Any) -> list[Any]:
        """Gather the objects of all ranks by pickle, for small and rare messages."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.process_group)
        return items

    def broadcast(self, tensor: Tensor, source: int = 0, kind: str = "broadcast") -> None:
        """Broadcast the values of rank `source`, in place."""
        if self.size == 1:
            return
        if self.rank == source:
            self._count(kind, [tensor.nbytes] * self.size)
        dist.broadcast(tensor, self.ranks[source], group=self.process_group)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.process_group)

    def _count(self, kind: str, sizes: Sequence[int]) -> None:
        own_node = self.nodes[self.rank]
        across = sum(size for size, node in zip(sizes, self.nodes, strict=True) if node != own_node)
        self.traffic.add(kind, sum(sizes) - sizes[self.rank], across)


def wait_for(work: Any, result: Tensor) -> Tensor:
    work.wait()
    return result


class RankFailed(RuntimeError):
    """Other `ranks` of the job have failed or do not answer."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[Self], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


@dataclass(frozen=True)
class Round:
    """The result of a round of consensus."""

    rows: tuple[int, ...]  # samples in each rank's batches
    batches: int = 1  # maximum over ranks; 0: no rank has more data
    signal: int = 0  # largest number of a signal that a rank received; 0: none
    clock: int = 0  # of rank 0
    waiting: bool = False  # whether a rank waits for its batches
    totals: tuple[float, ...] = ()  # sums over the ranks, in their order


class Consensus:
    """Consensus of the ranks on the next step, before any rank runs it.

    A round is one small all-gather on the CPU, over separate connections, so that a thread can run it. Creating the
    object is a collective of `group`. `timeout` is that of a round, by default PyTorch's.
    """

    def __init__(self, group: RankGroup, timeout: timedelta | None = None) -> None:
        self._group = group.duplicate("gloo", timeout)

    def next(
        self, rows: int, batches: int = 1, *, failure: str | None = None, signal: int = 0, clock: int = 0,
        waiting: bool = False, totals: Sequence[float] = (),
    ) -> Round:  # fmt: skip
        """Run a round.

        Args:
            rows: samples in this rank's batches.
            batches: number of batches; 0 at the end of the data.
            failure: the reason that this rank cannot continue.
            signal: number of a received signal, which asks the job to stop.
            clock: any number; all ranks return that of rank 0.
            waiting: whether this rank still waits for batches.
            totals: numbers to sum over the ranks, equally many on each.

        Raises:
            RankFailed: a rank has failed; on all ranks, with the reasons.
            RuntimeError: a rank did not answer in time, or has exited.
        """
        words = torch.tensor([rows, batches, failure is not None, signal, clock, waiting], dtype=torch.int64)
        bits = torch.tensor(totals, dtype=torch.float64).view(torch.int64)
        gathered = self._group.all_gather(torch.cat([words, bits]), "consensus")
        all_rows, all_batches, has_failed, signals, clocks, are_waiting = gathered[:, : len(words)].T.tolist()
        if any(has_failed):
            reasons = self._group.all_gather_object(failure)  # on all ranks, as the last collective
            failed = tuple(rank for rank, reason in enumerate(reasons) if reason is not None)
            raise RankFailed("; ".join(f"rank {rank} has failed: {reasons[rank]}" for rank in failed), failed)
        sums = gathered[:, len(words) :].contiguous().view(torch.float64).sum(0)
        values = max(signals), clocks[0], any(are_waiting), tuple(sums.tolist())
        return Round(tuple(all_rows), max(all_batches), *values)


def control_device(group: RankGroup) -> torch.device:
    """Return the device of the group's small messages: the CPU if a backend supports it."""
    if group.process_group is None:
        return torch.device("cpu")
    return torch.device("cpu" if any(device.type == "cpu" for device in group.process_group._device_types) else "cuda")
