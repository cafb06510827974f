"""What `DistributedDataParallel` does for layers that every rank has, inside a graph.

Autograd has no gradient of a graph before it has them all, so DDP would begin when nothing is left to compute. Here a
bucket of gradients is sent as soon as the graph has computed it, behind the exchanges of its backward.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tritonemb.comm.group import RankGroup, wait_for
from tritonemb.comm.output_exchange import Receive, exchanges, graph_order, register
from tritonemb.ops.registry import define

BUCKET_BYTES = 1 << 20  # a bucket ends when it has as many


class GraphDataParallel:
    """Averages gradients of `module` over the ranks of `group`, which all make it with the same module."""

    def __init__(self, group: RankGroup, module: nn.Module) -> None:
        self.group, self.handle, self.buckets = group, register(self), list[dict[str, Tensor]]()
        size, dtype = BUCKET_BYTES, None
        trained = [each for each in module.named_parameters() if each[1].requires_grad]
        for name, parameter in reversed(trained):  # about as their gradients become known
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
        for number, bucket in reversed([*enumerate(self.buckets)]):
            graph_order[1], *tensors = _Averaged.apply(graph_order[1], self.handle, number, *bucket.values())
            found.update(zip(bucket, tensors, strict=True))
        return found

    def shape(self, bucket: Sequence[int], back: bool) -> tuple[int]:
        return (sum(parameter.numel() for parameter in self.buckets[bucket[0]].values()),)

    def start(self, grads: Sequence[Tensor], bucket: Sequence[int], back: bool) -> Receive:
        """Average this pass's gradients and those that passes in `no_sync` have left, which are taken away."""
        parts = []
        for parameter, grad in zip(self.buckets[bucket[0]].values(), grads, strict=True):
            parts.append((grad if parameter.grad is None else parameter.grad + grad).reshape(-1))
            parameter.grad = None
        sums = torch.cat(parts).mul_(1 / self.group.size)
        work = dist.all_reduce(sums, group=self.group.process_group, async_op=True)
        return partial(wait_for, work, sums)


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, order: Tensor, handle: int, bucket: int, *parameters: Tensor) -> Any:
        ctx.batch, ctx.shapes = (handle, True, [bucket]), [parameter.shape for parameter in parameters]
        return order.clone(), *(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, after: Tensor, *grads: Tensor) -> Any:
        started, sent = torch.ops.tritonemb.start_exchange(grads, after, *ctx.batch)
        averages, _ = torch.ops.tritonemb.finish_exchange(started, None, *ctx.batch)
        parts = averages.split([shape.numel() for shape in ctx.shapes])
        return sent, None, None, *(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


def _broadcast(buffers: list[Tensor], handle: int) -> None:
    group = exchanges[handle].group
    for buffer in buffers:
        dist.broadcast(buffer, group.ranks[0], group.process_group)


define("broadcast_buffers", "(Tensor(a!)[] buffers, int handle) -> ()", _broadcast, lambda *_: None)
