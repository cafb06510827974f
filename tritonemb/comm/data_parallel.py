"""What `DistributedDataParallel` does for layers that every rank has, inside a graph.

Autograd has no gradient of a graph before it has them all, so DDP would begin when nothing is left to compute. Here a
bucket of gradients is sent as soon as the graph has computed it, behind the exchanges of its backward.
"""

import itertools
from collections.abc import Callable
from math import prod
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import graph_order
from tritonemb.ops.registry import define

BUCKET_BYTES = 1 << 20  # a bucket ends when it has as many
_handles = itertools.count()


class GraphDataParallel:
    """Averages gradients of `module` over the ranks of `group`, which all make it with the same module."""

    made: ClassVar[WeakValueDictionary[int, "GraphDataParallel"]] = WeakValueDictionary()

    def __init__(self, group: RankGroup, module: nn.Module) -> None:
        self.group, self.handle, self.buckets = group, next(_handles), list[dict[str, Tensor]]()
        self.made[self.handle] = self
        size, dtype = BUCKET_BYTES, None
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            if size >= BUCKET_BYTES or parameter.dtype != dtype:
                self.buckets.append({})
                size, dtype = 0, parameter.dtype
            self.buckets[-1][name] = parameter
            size += parameter.nbytes

    def parameters(self, buffers: list[Tensor]) -> dict[str, Tensor]:
        """In a trace, by name, tensors with the parameters' values, whose gradients are averaged.

        `buffers` get the values of rank 0.
        """
        found: dict[str, Tensor] = {}
        if buffers:
            torch.ops.tritonemb.broadcast_buffers(buffers, self.handle)
        for number, bucket in enumerate(self.buckets):
            graph_order[1], *tensors = _Averaged.apply(graph_order[1], self.handle, number, *bucket.values())
            found.update(zip(bucket, tensors, strict=True))
        return found

    def start(self, grads: list[Tensor], bucket: int) -> Callable[[], Tensor]:
        """Send this pass's gradients and those that passes in `no_sync` have left, which are taken away."""
        parts = []
        for parameter, grad in zip(self.buckets[bucket].values(), grads, strict=True):
            parts.append((grad if parameter.grad is None else parameter.grad + grad).reshape(-1))
            parameter.grad = None
        flat = torch.cat(parts).div_(self.group.size)
        work = dist.all_reduce(flat, group=self.group.process_group, async_op=True)

        def wait() -> Tensor:
            assert work is not None
            work.wait()
            return flat

        return wait


def _broadcast(buffers: list[Tensor], handle: int) -> None:
    group = GraphDataParallel.made[handle].group
    for buffer in buffers:
        dist.broadcast(buffer, group.ranks[0], group.process_group)


define("broadcast_buffers", "(Tensor(a!)[] buffers, int handle) -> ()", _broadcast, lambda *_: None)

_started: dict[int, Callable[[], Tensor]] = {}  # by address of what was returned; a graph that failed has left some


def _start(grads: list[Tensor], after: Tensor, handle: int, bucket: int) -> tuple[Tensor, Tensor]:
    started = grads[0].new_empty(1)
    _started[started.data_ptr()] = GraphDataParallel.made[handle].start(grads, bucket)
    return started, after.new_empty(1)


define(
    "start_average", "(Tensor[] grads, Tensor after, int handle, int bucket) -> (Tensor, Tensor)", _start,
    lambda grads, after, *_: (grads[0].new_empty(1), after.new_empty(1)),
)  # fmt: skip
define(
    "finish_average", "(Tensor started, SymInt size) -> Tensor",
    lambda started, size: _started.pop(started.data_ptr())(), lambda started, size: started.new_empty(size),
)  # fmt: skip


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, order: Tensor, handle: int, bucket: int, *parameters: Tensor) -> Any:
        ctx.place, ctx.shapes = (handle, bucket), [parameter.shape for parameter in parameters]
        return order.clone(), *(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, after: Tensor, *grads: Tensor) -> Any:
        started, sent = torch.ops.tritonemb.start_average(grads, after, *ctx.place)
        sizes = [prod(shape) for shape in ctx.shapes]
        parts = torch.ops.tritonemb.finish_average(started, sum(sizes)).split(sizes)
        return sent, None, None, *(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))
