"""Data parallelism of dense layers inside a compiled graph.

Autograd gets the gradients of a graph all at once, so `DistributedDataParallel` would start to reduce them after all
computation. Here a bucket of gradients is all-reduced as soon as it is computed, after the exchanges of the backward.
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

BUCKET_BYTES = 1 << 20  # a bucket of this size is full


class GraphDataParallel:
    """Averages gradients of `module` over the ranks of `group`; all ranks create it with the same module."""

    def __init__(self, group: RankGroup, module: nn.Module) -> None:
        self.group, self.handle, self.buckets = group, register(self), list[dict[str, Tensor]]()
        size, dtype = BUCKET_BYTES, None
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        for name, parameter in reversed(trained):  # about the order of their gradients
            if size >= BUCKET_BYTES or parameter.dtype != dtype:
                self.buckets.append({})
                size, dtype = 0, parameter.dtype
            self.buckets[-1][name] = parameter
            size += parameter.nbytes

    def parameters(self, buffers: list[Tensor]) -> dict[str, Tensor]:
        """Return in a trace the parameters by name, as tensors whose gradients are averaged. Broadcast `buffers`."""
        averaged: dict[str, Tensor] = {}
        if buffers:
            torch.ops.tritonemb.broadcast_buffers(buffers, self.handle)
        for number, bucket in reversed([*enumerate(self.buckets)]):
            graph_order[1], *tensors = _Averaged.apply(graph_order[1], self.handle, number, *bucket.values())
            averaged.update(zip(bucket, tensors, strict=True))
        return averaged

    def shape(self, bucket: Sequence[int], back: bool) -> tuple[int]:
        return (sum(parameter.numel() for parameter in self.buckets[bucket[0]].values()),)

    def start(self, grads: Sequence[Tensor], bucket: Sequence[int], back: bool) -> Receive:
        """Start to average the gradients, with those that `no_sync` has accumulated in `.grad`, which is cleared."""
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
    def backward(ctx: Any, order_grad: Tensor, *grads: Tensor) -> Any:
        started, sent = torch.ops.tritonemb.start_exchange(grads, order_grad, *ctx.batch)
        averages, _ = torch.ops.tritonemb.finish_exchange(started, None, *ctx.batch)
        parts = averages.split([shape.numel() for shape in ctx.shapes])
        return sent, None, None, *(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


def _broadcast(buffers: list[Tensor], handle: int) -> None:
    group = exchanges[handle].group
    for buffer in buffers:
        dist.broadcast(buffer, group.ranks[0], group.process_group)


define("broadcast_buffers", "(Tensor(a!)[] buffers, int handle) -> ()", _broadcast, lambda *_: None)
