"""Groups of ranks, the few collectives that tritonemb uses, the consensus before a step, and counts of bytes sent."""

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tritonemb.utils import end_with_torchrun

T = TypeVar("T")
# torch 2.13 has given it another name, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@functools.cache
def _wait_for_threads_at_exit() -> None:
    """Let gloo's threads have the interpreter once more before it ends.

    They free a collective's tensors when those who waited for it have gone on already. Where the interpreter is ending
    by then, the process aborts: "terminate called without an active exception".
    """
    atexit.register(time.sleep, 0.1)


class BytesSent(NamedTuple):
    """Bytes sent to other ranks, and how many of them to ranks on other nodes."""

    total: int = 0
    across_nodes: int = 0


class Traffic:
    """Counts what a rank sends; several threads may count at once."""

    def __init__(self) -> None:
        self._sent: dict[str, BytesSent] = {}
        self._lock = threading.Lock()

    def add(self, kind: str, total: int, across_nodes: int) -> None:
        """Count bytes that go to other ranks, and how many of them go to other nodes."""
        with self._lock:
            before = self._sent.get(kind, BytesSent())
            self._sent[kind] = BytesSent(before.total + total, before.across_nodes + across_nodes)

    def by_kind(self) -> dict[str, BytesSent]:
        """What has been sent so far, by kind."""
        with self._lock:
            return dict(self._sent)

    def reset(self) -> None:
        with self._lock:
            self._sent.clear()


class RankGroup:
    """Some of the processes of a job; made by all processes of the job together, in the same order.

    With one rank, or without `torch.distributed`, every collective is what it would be for one rank alone.

    Args:
        process_group: of `torch.distributed`; None for one process.
        local_world_size: ranks of the whole job on each node; those of this group on the same node are neighbours.
            By default what torchrun says (`LOCAL_WORLD_SIZE`), else all of them.
        traffic: where bytes are counted; one counter may serve several groups.
        timeout: of collectives of groups that are made from this one; torch's default if not given.

    Attributes:
        rank, size: of this process in the group, and how many there are.
        ranks: the group's members as ranks of the whole job.
        nodes: the node of each member.
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
        # What torchrun says, else the number of the job's processes: all of them are on one node.
        ranks_per_node = os.environ.get("LOCAL_WORLD_SIZE") or (dist.get_world_size() if dist.is_initialized() else 1)
        self.local_world_size = local_world_size or int(ranks_per_node)
        self.nodes = [rank // self.local_world_size for rank in self.ranks]
        self.traffic = Traffic() if traffic is None else traffic
        self.timeout = timeout

    @classmethod
    def world(cls, local_world_size: int | None = None, timeout: timedelta | None = None) -> Self:
        """All processes of the job, or this process alone where `torch.distributed` is not in use."""
        return cls(dist.group.WORLD if dist.is_initialized() else None, local_world_size, timeout=timeout)

    def subgroup(
        self, members: Sequence[Sequence[int]], backend: str | None = None, timeout: timedelta | None = None
    ) -> Self:
        """The one of several disjoint sets of ranks that this process is in; every process of the job calls it alike.

        Its bytes are counted with this group's. `backend`, `timeout`: of its collectives; this group's if not given.
        """
        found, timeout = None, self.timeout if timeout is None else timeout
        for ranks in members:
            if len(ranks) > 1:  # one alone needs no connections
                made = dist.new_group([self.ranks[rank] for rank in ranks], timeout=timeout, backend=backend)
                found = made if self.rank in ranks else found
        assert any(self.rank in ranks for ranks in members), "this process is in none of the sets"
        return type(self)(found, self.local_world_size, self.traffic, timeout)

    def duplicate(self, backend: str | None = None, timeout: timedelta | None = None) -> Self:
        """The same ranks with connections of their own, for another thread: collectives of a group have one order."""
        return self.subgroup([range(self.size)], backend, timeout)

    def all_to_all(self, message: Tensor, send: Sequence[int], receive: Sequence[int], kind: str) -> Tensor:
        """`send[r]` elements of a 1-D message go to rank `r`; returns `receive[r]` elements of each rank, in order.

        `kind` is what the bytes are counted as.
        """
        return self.start_all_to_all(message, send, receive, kind)()

    def start_all_to_all(
        self, message: Tensor, send: Sequence[int], receive: Sequence[int], kind: str
    ) -> Callable[[], Tensor]:
        """As `all_to_all`; waits when the result is called."""
        assert message.shape == (sum(send),), (message.shape, send)
        self._count(kind, [n * message.element_size() for n in send])
        if self.size == 1:
            return lambda: message
        received, sizes = message.new_empty(sum(receive)), (list(receive), list(send))
        work = dist.all_to_all_single(received, message, *sizes, group=self.process_group, async_op=True)
        return functools.partial(wait_for, work, received)

    def all_gather(self, message: Tensor, kind: str) -> Tensor:
        """Every rank's tensor, all of one shape: `[size, *shape]`."""
        self._count(kind, [message.nbytes] * self.size)
        if self.size == 1:
            return message.unsqueeze(0)
        gathered = message.new_empty(self.size * message.numel())
        _all_gather(gathered, message.contiguous().view(-1), group=self.process_group)
        return gathered.view(self.size, *message.shape)

    def all_gather_object(self, item: Any) -> list[Any]:
        """Every rank's object, by pickle: for what is small and rare."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.process_group)
        return items

    def broadcast(self, tensor: Tensor, source: int = 0, kind: str = "broadcast") -> None:
        """Give every rank the values of rank `source`, in place."""
        if self.size == 1:
            return
        if self.rank == source:
            self._count(kind, [tensor.nbytes] * self.size)
        dist.broadcast(tensor, self.ranks[source], group=self.process_group)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            dist.barrier(group=self.process_group)

    def _count(self, kind: str, sizes: Sequence[int]) -> None:
        here = self.nodes[self.rank]
        across = sum(size for size, node in zip(sizes, self.nodes, strict=True) if node != here)
        self.traffic.add(kind, sum(sizes) - sizes[self.rank], across)


def wait_for(work: Any, result: Tensor) -> Tensor:
    """The result of a collective, when it has ended."""
    work.wait()
    return result


class RankFailed(RuntimeError):
    """The `ranks` of the job have failed or do not answer, so this one cannot continue."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[Self], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


@dataclass(frozen=True)
class Round:
    """What the ranks have agreed on."""

    rows: tuple[int, ...]  # samples of each rank's batches, in the order of ranks
    batches: int = 1  # the most batches that a rank has; 0: no rank has more data
    signal: int = 0  # the largest number of a signal that a rank got, 0 for none
    clock: int = 0  # that of rank 0


class Consensus:
    """Rounds in which the ranks tell each other what they are about to do, before any does it.

    A round is one small message on the CPU, over connections of its own, so that a thread may run it. All ranks of
    `group` make this object together. `timeout`: how long to wait for a rank; torch's default if not given.
    """

    def __init__(self, group: RankGroup, timeout: timedelta | None = None) -> None:
        self._group = group.duplicate("gloo", timeout)

    def next(
        self, rows: int, batches: int = 1, *, failure: str | None = None, signal: int = 0, clock: int = 0
    ) -> Round:
        """Run a round.

        Args:
            rows: samples of this rank's batches.
            batches: how many there are; 0 if it has run out of data.
            failure: why this rank cannot continue.
            signal: number of a signal that asks it to stop.
            clock: any number; all ranks get that of rank 0.

        Raises:
            RankFailed: some rank has failed; on all ranks, with their reasons.
            RuntimeError: a rank has not answered in time, or is gone.
        """
        words = torch.tensor([rows, batches, failure is not None, signal, clock], dtype=torch.int64)
        all_rows, all_batches, has_failed, signals, clocks = self._group.all_gather(words, "consensus").T.tolist()
        if any(has_failed):
            reasons = self._group.all_gather_object(failure)  # all ranks get here, for the last time
            failed = tuple(rank for rank, reason in enumerate(reasons) if reason is not None)
            raise RankFailed("; ".join(f"rank {rank} has failed: {reasons[rank]}" for rank in failed), failed)
        return Round(tuple(all_rows), max(all_batches), max(signals), clocks[0])


def control_device(group: RankGroup) -> torch.device:
    """Where tensors of the group's small messages are: the CPU if one of its backends serves it."""
    if group.process_group is None:
        return torch.device("cpu")
    return torch.device("cpu" if any(each.type == "cpu" for each in group.process_group._device_types) else "cuda")


class PerDevice(Generic[T]):
    """Tensors made once for each device, outside of inference mode; called with a device."""

    def __init__(self, make: Callable[[torch.device], T]) -> None:
        self._make = make
        self.made: dict[torch.device, T] = {}

    def __call__(self, device: torch.device) -> T:
        if device not in self.made:
            with torch.inference_mode(False):
                self.made[device] = self._make(device)
        return self.made[device]
