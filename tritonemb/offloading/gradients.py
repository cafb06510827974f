"""Gradients from the backward to the step: in `.grad`, or stored in host memory or on disk.

A stored gradient leaves its parameter as soon as the backward has accumulated it. It is added to what earlier backward
passes have stored, and the step reads it with the states of its sub-group.

Sub-groups may be stepped inside the backward that completes their gradients (`BackwardStep`). A pass is suspended at
each one until its gradients are complete and its states are read; it never waits in the backward. The order is that in
which the previous backward completed them. As it stays, sub-groups visited first are written back, and those visited
last remain in memory.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tritonemb.offloading.parameters import OffloadedParam, add_gradient_hook
from tritonemb.offloading.shards import as_dtensor, flat_like, local_shape, to_local
from tritonemb.offloading.states import StateChunk, StatePlacement, StateStore, SubGroup
from tritonemb.offloading.tiers import GradientPages
from tritonemb.storage.store import IoFuture
from tritonemb.tables.server_table import ParallelModel

_REDUCE_OPS = {torch.inf: dist.ReduceOp.MAX, -torch.inf: dist.ReduceOp.MIN}  # of norms; for others sums of powers


class Gradients:
    """Gradients of the parameters whose states are in `store`."""

    def __init__(self, store: StateStore, offloaded: Mapping[Any, OffloadedParam], placement: StatePlacement) -> None:
        self._store, self._device = store, placement.device
        self.is_stored = placement.gradient_tier is not None
        # Writes in progress with their bytes; half of the buffers' memory at most, as sub-groups fill theirs later.
        self._pending: deque[tuple[IoFuture, int]] = deque()
        self._pending_bytes = 0
        self._max_pending_bytes = placement.buffer_bytes // 2
        for p in store.parameters if self.is_stored else ():
            if (source := offloaded.get(p)) is not None and not source.sharded:
                source.on_gradient = partial(self._add, p)
            else:
                add_gradient_hook(p, self._take)

    def has(self, parameter: Any) -> bool:
        return bool(self._pages(parameter)) or parameter.grad is not None

    def of_chunk(self, chunk: StateChunk) -> Tensor:
        """Return the gradient `[numel]` of a chunk whose sub-group is in memory with its gradients."""
        if chunk.gradient is not None and chunk.gradient.is_set:
            if chunk.gradient.pending is not None:
                chunk.gradient.pending.wait()
            return chunk.gradient.scaled(chunk.gradient.view(chunk.group.buffer))
        return flat_like(to_local(chunk.parameter.grad), to_local(chunk.parameter))[chunk.begin : chunk.end]

    def read(self, parameter: Any) -> Tensor | None:
        """Return the gradient of a parameter: `.grad`, or a stored one in host memory."""
        if not (pages := self._pages(parameter)):
            return parameter.grad
        values = torch.cat([chunk_pages.load() for chunk_pages in pages])
        return as_dtensor(values.as_strided(local_shape(parameter), to_local(parameter).stride()), parameter)

    def wait(self) -> None:
        """Wait until all gradients are stored; StorageError, now and until `clear`, if one could not be, and ValueError
        for a sparse one."""
        self._limit_pending(0)
        for p in self._store.parameters:
            check_dense(p, p.grad)

    def clear(self, set_to_none: bool) -> None:
        """Discard stored gradients, or set them to zero."""
        self._pending.clear()
        self._pending_bytes = 0
        for parameter in self._store.parameters:
            for pages in self._pages(parameter):
                if set_to_none:
                    pages.is_set = False
                else:
                    self._start(pages, pages.zero)

    def scale(self, parameters: Sequence[Any], factor: Tensor | float) -> None:
        factor = factor.clone() if isinstance(factor, Tensor) else factor  # gradients on disk keep it
        for p in parameters:
            for pages in self._pages(p):
                pages.scale(factor)
            if p.grad is not None:
                to_local(p.grad).mul_(factor)

    def total_norm(self, parameters: Sequence[Any], norm_type: float) -> Tensor:
        """Return the norm of all gradients over all ranks: `torch.nn.utils.get_total_norm`, bitwise for one dtype."""
        # Norms of this rank's shards, by dtype, mesh and placements.
        norms: dict[Any, list[Tensor]] = {}
        for p in parameters:
            if (gradient := self.read(p)) is not None:
                shard = to_local(gradient)
                norm = torch.linalg.vector_norm(shard, norm_type) if shard.numel() else shard.new_zeros(())
                key = (p.device_mesh, p.placements) if isinstance(p, DTensor) else (None, ())
                norms.setdefault((gradient.dtype, *key), []).append(norm.cpu())
        # All-reduce those of a mesh at once, then combine.
        totals = [self._all_reduce(torch.stack(local), norm_type, *key) for (_, *key), local in norms.items()]
        return torch.linalg.vector_norm(torch.cat(totals), norm_type) if totals else torch.zeros(())

    def _all_reduce(self, norms: Tensor, norm_type: float, mesh: Any, placements: Sequence[Any]) -> Tensor:
        """Combine the norms `[n]` of shards to those of `n` full gradients."""
        is_power = norm_type not in (0, *_REDUCE_OPS)
        for dim in [dim for dim, placement in enumerate(placements) if placement.is_shard()]:
            norms = (norms**norm_type if is_power else norms).to(self._device)
            dist.all_reduce(norms, _REDUCE_OPS.get(norm_type, dist.ReduceOp.SUM), mesh.get_group(dim))
            norms = (norms ** (1 / norm_type) if is_power else norms).cpu()
        return norms

    # Storing.

    def _take(self, parameter: Any) -> None:
        """Store the gradient that a backward has accumulated in `.grad`."""
        gradient, parameter.grad = parameter.grad, None
        self._add(parameter, gradient)

    def _add(self, parameter: Any, gradient: Any) -> None:
        """Add a gradient to the stored one, if any; ValueError for one that is sparse or has another dtype."""
        if parameter.grad is not None:  # of a backward before `te.offload`
            self._take(parameter)
        check_dense(parameter, gradient)
        if gradient.dtype != parameter.dtype:
            raise ValueError(
                f"a gradient of {gradient.dtype} of a {parameter.dtype} parameter of shape {tuple(parameter.shape)} "
                'cannot be stored; pass grads="device" to te.offload'
            )
        values = flat_like(to_local(gradient), to_local(parameter))
        for chunk in self._store.chunks(parameter):
            assert chunk.gradient is not None
            is_buffered = self._store.is_stepping and chunk.gradient.offset is not None and chunk.group.is_read()
            buffer = chunk.group.buffer if is_buffered else None
            self._start(chunk.gradient, partial(chunk.gradient.add, values[chunk.begin : chunk.end], buffer))

    def _start(self, pages: GradientPages, store: Callable[[], None]) -> None:
        """Call `store`, which starts to write pages, and limit the memory of writes in progress."""
        store()
        if pages.pending is not None:
            self._pending.append((pages.pending, pages.span.num_bytes))
            self._pending_bytes += pages.span.num_bytes
        self._limit_pending(self._max_pending_bytes)

    def _limit_pending(self, num_bytes: int) -> None:
        while self._pending_bytes > num_bytes:
            future, size = self._pending[0]
            future.wait()  # a failed one stays, so that later waits fail, too
            self._pending.popleft()
            self._pending_bytes -= size

    def _pages(self, parameter: Any) -> list[GradientPages]:
        """Pages of a stored gradient, [] if there is none."""
        pages = [chunk.gradient for chunk in self._store.chunks(parameter)]
        return [gradient for gradient in pages if gradient is not None and gradient.is_set]


def check_dense(parameter: Any, gradient: Any) -> None:
    """Raise ValueError for a sparse gradient, of which chunks cannot be stored nor stepped."""
    if gradient is not None and gradient.layout is not torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has a {gradient.layout} gradient, which an offloaded "
            "optimizer cannot step; construct its layer with sparse=False"
        )


def check_not_replicated(model: nn.Module, stays_on_device: bool) -> None:
    """Raise ValueError if `DistributedDataParallel` would not find gradients of its parameters, to average them."""
    for module in () if stays_on_device else model.modules():
        averages = isinstance(module, DistributedDataParallel) and module.process_group.size() > 1
        if averages or (isinstance(module, ParallelModel) and module.averages_gradients):
            raise ValueError(
                "gradients of a model in DistributedDataParallel would not be averaged; shard it by fully_shard (of "
                'te.HybridParallel: dense="fsdp"), or pass params="device" and grads="device"'
            )


def check_caller(module: nn.Module, inputs: object) -> None:
    """Forward hook of a model whose gradients leave the device: `check_not_replicated` of a module that calls it."""
    if not torch.compiler.is_compiling():
        caller = DistributedDataParallel._get_active_ddp_module()
        check_not_replicated(nn.ModuleList([] if caller is None else [caller]), False)


class BackwardStep:
    """Steps of an optimizer inside backwards."""

    def __init__(self, store: StateStore, gradients: Gradients) -> None:
        self._store, self._gradients = store, gradients
        self.stepped: set[SubGroup] = set()  # in the current step
        # Learned from earlier steps: sub-groups in the order of the last one, and those of parameters with several
        # gradients per backward, such as one used in several blocks with reentrant checkpointing.
        self._order: list[SubGroup] = []
        self._repeated: set[SubGroup] = set()
        # Gradients of this backward with their versions, and the numbers of those that sub-groups lack.
        self._received: dict[Any, tuple[Any, int]] = {}
        self._missing: dict[SubGroup, int] = {}
        # Sub-groups whose gradients are complete, and the pass, suspended at `_next`.
        self._completed: list[SubGroup] = []
        self._pass: Iterator[SubGroup] = iter(())
        self._next: SubGroup | None = None
        self._step_chunks: Callable[[list[StateChunk]], object] = len
        self._groups = {p: list(dict.fromkeys(chunk.group for chunk in store.chunks(p))) for p in store.parameters}
        for p in store.parameters:
            add_gradient_hook(p, self._receive)

    @contextmanager
    def run(self, step_chunks: Callable[[list[StateChunk]], object]) -> Iterator[None]:
        """Step sub-groups in the backward of the block by `step_chunks`, and those that are complete at its end."""
        # Begin the pass, which reads the first sub-groups during the forward.
        self.stepped.clear()
        self._received, self._completed, self._step_chunks = {}, [], step_chunks
        self._missing = dict.fromkeys(self._store.groups, 0)
        for p, groups in self._groups.items():
            self._missing.update({group: self._missing[group] + p.requires_grad for group in groups})
        self._pass = self._store.buffers.visit(self._order, gradients=True, cyclic=True)
        self._next = next(self._pass, None)
        self._store.is_stepping = True
        try:
            yield
            self._check_gradients()
            self._advance(wait=True)
            self._order = [group for group in self._completed if group not in self._repeated]
        finally:
            self._store.is_stepping = False

    def _receive(self, parameter: Any) -> None:
        """Count a gradient that a backward has accumulated, and step the sub-groups that are then complete."""
        if not self._store.is_stepping:
            return
        groups, is_repeated = self._groups[parameter], parameter in self._received
        self._received[parameter] = parameter.grad, _version(parameter.grad)
        if is_repeated:
            self._repeated.update(groups)
            if not self.stepped.isdisjoint(groups):
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} got another gradient after its step in the "
                    "backward; call step(in_backward=True) only if each backward uses its parameters in the same way"
                )
        else:
            for group in groups:
                self._missing[group] -= 1
            self._completed += [group for group in groups if not self._missing[group]]
        self._advance(wait=False)

    def _advance(self, wait: bool) -> None:
        """Step sub-groups in order, while their gradients are complete, and their states read, or else `wait`."""
        while self._next is not None and not self._missing[self._next]:
            group = self._next
            group.begin_read_pages(gradients=True)
            if not wait and not group.is_read():
                return
            group.wait(modify=True)
            self.stepped.add(group)
            chunks = [chunk for chunk in group.chunks if self._gradients.has(chunk.parameter)]
            self._step_chunks(chunks)
            for chunk in chunks:
                if chunk.gradient is not None:
                    chunk.gradient.is_set = False
            self._next = next(self._pass, None)

    def _check_gradients(self) -> None:
        """Raise RuntimeError if a gradient was changed after its step."""
        for p, (gradient, version) in self._received.items():
            is_same = p.grad is gradient and _version(gradient) == version
            if not (is_same or self.stepped.isdisjoint(self._groups[p])):
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} was changed after its step in the "
                    "backward, by clipping perhaps; call step() without in_backward"
                )


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else to_local(gradient)._version
