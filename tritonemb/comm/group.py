"""Groups of ranks, the few collectives that tritonemb uses, and counts of the bytes that they send."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tritonemb.ops.quantize import Exchange, all_to_all

T = TypeVar("T")
# torch 2.13 has given it another name, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
        self,
        process_group: dist.ProcessGroup | None = None,
        local_world_size: int | None = None,
        traffic: Traffic | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.process_group = process_group
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        if process_group is None:
            self.ranks = [dist.get_rank() if _is_initialized() else 0]
        else:
            self.ranks = dist.get_process_group_ranks(process_group)
        self.local_world_size = local_world_size or ranks_per_node()
        self.nodes = [rank // self.local_world_size for rank in self.ranks]
        self.traffic = Traffic() if traffic is None else traffic
        self.timeout = timeout
        self._exchange = Exchange(self._all_to_all)

    @classmethod
    def world(cls, local_world_size: int | None = None, timeout: timedelta | None = None) -> RankGroup:
        """All processes of the job, or this process alone where `torch.distributed` is not in use."""
        return cls(dist.group.WORLD if _is_initialized() else None, local_world_size, timeout=timeout)

    def subgroup(
        self, members: Sequence[Sequence[int]], backend: str | None = None, timeout: timedelta | None = None
    ) -> RankGroup:
        """The one of several disjoint sets of ranks that this process is in; every process of the job calls it alike.

        Its bytes are counted with this group's. `backend`, `timeout`: of its collectives; this group's if not given.
        """
        found, timeout = None, self.timeout if timeout is None else timeout
        for ranks in members:
            if len(ranks) > 1:  # one alone needs no connections
                made = dist.new_group([self.ranks[rank] for rank in ranks], timeout=timeout, backend=backend)
                found = made if self.rank in ranks else found
        assert any(self.rank in ranks for ranks in members), "this process is in none of the sets"
        return RankGroup(found, self.local_world_size, self.traffic, timeout)

    def duplicate(self, backend: str | None = None, timeout: timedelta | None = None) -> RankGroup:
        """The same ranks with connections of their own, for another thread: collectives of a group have one order."""
        return self.subgroup([range(self.size)], backend, timeout)

    def all_to_all(self, message: Tensor, send: Sequence[int], receive: Sequence[int], kind: str) -> Tensor:
        """`send[r]` elements of a 1-D message go to rank `r`; returns `receive[r]` elements of each rank, in order.

        Args:
            kind: what the bytes are counted as.
        """
        if torch.compiler.is_compiling():
            return all_to_all(message, send, receive, self._exchange.number, kind)
        return self._all_to_all(message, send, receive, kind)

    def _all_to_all(self, message: Tensor, send: Sequence[int], receive: Sequence[int], kind: str) -> Tensor:
        assert message.shape == (sum(send),), (message.shape, send)
        self.traffic.add(kind, [n * message.element_size() for n in send], self.nodes, self.rank)
        if self.size == 1:
            return message
        received = message.new_empty(sum(receive))
        dist.all_to_all_single(received, message, list(receive), list(send), group=self.process_group)
        return received

    def all_gather(self, message: Tensor, kind: str) -> Tensor:
        """Every rank's tensor, all of one shape: `[size, *shape]`."""
        size = message.numel() * message.element_size()
        self.traffic.add(kind, [size] * self.size, self.nodes, self.rank)
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
            size = tensor.numel() * tensor.element_size()
            self.traffic.add(kind, [size] * self.size, self.nodes, self.rank)
        dist.broadcast(tensor, self.ranks[source], group=self.process_group)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            dist.barrier(group=self.process_group)


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def ranks_per_node() -> int:
    """What torchrun says, else the number of the job's processes: all of them are on one node."""
    size = os.environ.get("LOCAL_WORLD_SIZE")
    if size is not None:
        return int(size)
    return dist.get_world_size() if _is_initialized() else 1


def control_device(group: RankGroup) -> torch.device:
    """Where tensors of the group's small messages are: the CPU if one of its backends serves it."""
    if group.process_group is None:
        return torch.device("cpu")
    devices = [device.type for device in group.process_group._device_types]
    return torch.device("cpu" if "cpu" in devices else "cuda")


class BytesSent(NamedTuple):
    """Bytes sent to other ranks, and how many of them to ranks on other nodes."""

    total: int = 0
    across_nodes: int = 0


class Traffic:
    """Counts what a rank sends; several threads may count at once."""

    def __init__(self) -> None:
        self._sent: dict[str, BytesSent] = {}
        self._lock = threading.Lock()

    def add(self, kind: str, sizes: Sequence[int], nodes: Sequence[int], rank: int) -> None:
        """`sizes[r]` bytes go to rank `r` of a group, which is on node `nodes[r]`; `rank` is one's own."""
        total = sum(sizes) - sizes[rank]
        across = sum(size for size, node in zip(sizes, nodes, strict=True) if node != nodes[rank])
        with self._lock:
            before = self._sent.get(kind, BytesSent())
            self._sent[kind] = BytesSent(before.total + total, before.across_nodes + across)

    def by_kind(self) -> dict[str, BytesSent]:
        """What has been sent so far, by kind."""
        with self._lock:
            return dict(self._sent)

    def reset(self) -> None:
        with self._lock:
            self._sent.clear()


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
