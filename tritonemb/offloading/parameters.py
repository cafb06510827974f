"""Offloaded parameters: in host memory or on disk, and copied to a device arena while they are used.

The arena is a cache: a parameter is fetched on a miss, and the least recently used ones are evicted. Prefetch learns
the order of use: after two parameters it predicts the one that followed them the last time, and reads as far ahead as
the arena has space. A misprediction waits for its parameter, and is counted in the report.
"""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tritonemb.offloading.shards import Piece, StoredElements, flat_like, is_dense, local_shape, overlaps, padded_shape
from tritonemb.offloading.tiers import Arena, Tier, empty_host, round_to_pages
from tritonemb.storage.store import IoFuture, wait_all

_DATA: Any = torch.Tensor.data
PREFETCH_PARAMETERS = 16  # parameters: a few layers, whose reads overlap


def add_gradient_hook(parameter: Any, hook: Callable[[Any], None]) -> None:
    """Call a method after each gradient of a parameter, also of one that is frozen for now.

    The hook refers to the method's object weakly, as Python's garbage collector does not see cycles through hooks.
    """
    requires_grad, method = parameter.requires_grad, weakref.WeakMethod(hook)

    def call(hooked: Any) -> None:
        if (bound_method := method()) is not None:
            bound_method(hooked)

    if requires_grad or parameter.is_floating_point() or parameter.is_complex():
        parameter.requires_grad_(True).register_post_accumulate_grad_hook(call)
        parameter.requires_grad_(requires_grad)


class OffloadedParam(StoredElements):
    """Offloaded parameter: its spans in the tier, and its block while it is in the arena."""

    def __init__(self, name: str, parameter: Any, tier: Tier, device: torch.device, piece_elements: int) -> None:
        # `parameter` of the model has no values.
        self.name, self.parameter, self.dtype, self._device = name, parameter, parameter.dtype, device
        # Under FSDP2 it is this rank's shard, of `shard_shape`, padded to `shape`, the same on all ranks. The copy has
        # its strides, unless they leave gaps.
        self.sharded, self.shard_shape = isinstance(parameter, DTensor), local_shape(parameter)
        self.shape = padded_shape(parameter)
        is_strided = not (self.sharded or parameter.is_contiguous()) and is_dense(parameter)
        self.strides = parameter.stride() if is_strided else None
        self.leaf_strides = self.strides or torch.empty(self.shape, device="meta").stride()
        self.num_bytes = self.shape.numel() * self.dtype.itemsize
        self.version = 0  # number of writes, by which the backward detects a parameter that changed after the forward
        self.num_users = 0  # uses in progress, which pin the copy
        # Copy in the arena; NaN while evicted. Its memory, `block`, changes, but not the tensor, `leaf`, so autograd
        # sums the gradients of all uses.
        self.block: Tensor | None = None
        self._reads: list[IoFuture] = []
        self._no_values = torch.full((), torch.nan, device=device).to(self.dtype).expand(self.shape)
        self.leaf = nn.Parameter(self._no_values, requires_grad=parameter.requires_grad)
        add_gradient_hook(self.leaf, self._accumulate_gradient)
        # Values in the tier.
        self.pieces = Piece.split(self.shard_shape.numel(), piece_elements)
        for piece in self.pieces:
            piece.span = tier.reserve(piece.numel * self.dtype.itemsize)
        self.on_write: Callable[[], object] = lambda: None  # after a `write`, which bypasses the optimizer
        self.on_gradient: Callable[[Tensor], object] = self._add_to_grad

    # Copy in the arena.

    def begin_read(self, block: Tensor) -> None:
        self.block = block
        spans = [(piece.begin * self.dtype.itemsize, piece.span) for piece in self.pieces]
        self._reads = [span.read(block[begin:][: round_to_pages(span.num_bytes)]) for begin, span in spans]

    def is_read(self) -> bool:
        return all(read.done() for read in self._reads)

    def finish_read(self) -> None:
        """Wait for the reads, and point the leaf to the block."""
        if self.leaf.data_ptr() != (self.block.data_ptr() if self.block is not None else 0):
            wait_all(self._reads)
            self._reads = []
            with torch.inference_mode(False):
                self.leaf.data = self.memory().view(self.dtype).as_strided(self.shape, self.leaf_strides)
        if self.leaf.requires_grad != self.parameter.requires_grad:
            self.leaf.requires_grad_(self.parameter.requires_grad)

    def memory(self) -> Tensor:
        """Return the memory of the copy, uint8."""
        assert self.block is not None
        return self.block[: self.num_bytes]

    def drop_block(self) -> None:
        self.block, self.leaf.data = None, self._no_values

    def _accumulate_gradient(self, leaf: Tensor) -> None:
        """Pass on the leaf's gradient, and call the parameter's hooks."""
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        self.on_gradient(gradient)
        for hook in (self.parameter._post_accumulate_grad_hooks or {}).values():
            hook(self.parameter)

    def _add_to_grad(self, gradient: Tensor) -> None:
        """Add a gradient to the parameter's `.grad`, in host memory."""
        gradient, previous = gradient.to("cpu"), self.parameter.grad
        self.parameter.grad = gradient if previous is None else previous.add_(gradient)

    # Values in the tier.

    def load_elements(self, begin: int, end: int) -> Tensor:
        result = torch.empty(end - begin, dtype=self.dtype)
        for piece, in_piece, in_range in overlaps(self.pieces, begin, end):
            result[in_range] = self.read_piece(piece)[in_piece]
        return result

    def store_elements(self, begin: int, values: Tensor) -> None:
        for piece, in_piece, in_range in overlaps(self.pieces, begin, begin + values.numel()):
            new_values = values[in_range]
            if new_values.numel() < piece.numel:
                new_values = self.read_piece(piece)
                new_values[in_piece] = values[in_range]
            # Update the copy in the arena, and write the piece to its tier.
            self.update_piece(piece, new_values)
            buffer = empty_host(piece.span.num_bytes, self._device)
            buffer[: piece.span.num_bytes].view(self.dtype).copy_(new_values)
            piece.span.write(buffer).wait()

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Replace the values by a tensor of the shard's shape."""
        if values.shape != self.shard_shape:
            raise ValueError(
                f"parameter {self.name!r} has shape {tuple(self.shard_shape)}, got values of {tuple(values.shape)}"
            )
        values = values.detach().reshape(-1) if self.strides is None else flat_like(values, self.parameter)
        self.store_elements(0, values)
        self.on_write()

    def read_piece(self, piece: Piece) -> Tensor:
        buffer = empty_host(piece.span.num_bytes, self._device)
        piece.span.read(buffer).wait()
        return buffer[: piece.span.num_bytes].view(self.dtype)

    def update_piece(self, piece: Piece, values: Tensor) -> None:
        """Update a piece of the copy in the arena, if it is cached."""
        if self.block is not None:
            self.finish_read()
            self.memory().view(self.dtype)[piece.begin : piece.end].copy_(values)
        self.version += 1


class WatchedParameter(nn.Parameter):
    """Parameter on the device whose master weights follow writes through `.data`, which has its own version counter."""

    alias: Any = None  # shares the version counter of what `.data` returned or was set to
    num_sets = 0  # of `.data`

    @property
    def data(self) -> Tensor:
        if torch.compiler.is_compiling():
            return self.detach()
        if self.alias is None or not self.alias.is_set_to(self):
            self.alias = _DATA.__get__(self)
        return self.alias.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.is_inference():  # such tensors have no version counter
            with torch.inference_mode(False):
                values = values.clone()
        _DATA.__set__(self, values)
        self.alias, self.num_sets = values.detach(), self.num_sets + 1


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


class ParameterCache:
    """Copies of offloaded parameters in the arena: fetched for a use, prefetched, and evicted."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.uses = self.waits = self.unexpected = 0  # counters of the report
        # Parameters in the arena: by their storage, and by use, least recent first.
        self._by_storage: dict[int, OffloadedParam] = {}
        self._lru: OrderedDict[OffloadedParam, None] = OrderedDict()
        # Prefetch: the last two parameters used, and the successor of such a pair in a forward, or in a backward.
        self._last_two: tuple[OffloadedParam | None, OffloadedParam | None] = (None, None)
        self._successors: dict[tuple[OffloadedParam | None, OffloadedParam | None, bool], OffloadedParam] = {}

    def __reduce__(self) -> Any:
        raise TypeError("an offloaded model cannot be copied or pickled; load its state_dict() into another model")

    def owner(self, tensor: Tensor) -> OffloadedParam | None:
        """Return the parameter of whose copy the tensor is a view."""
        return self._by_storage.get(tensor.untyped_storage()._cdata) if torch._C._has_storage(tensor) else None

    @contextmanager
    def use(self, params: Iterable[OffloadedParam]) -> Iterator[None]:
        """Fetch parameters, pin them during the block, and prefetch their successors.

        RuntimeError if an operator of the block changes one in place, as the copy is not written back.
        """
        pinned: list[OffloadedParam] = []
        try:
            for param in dict.fromkeys(params):
                self._record_use(param)
                param.num_users += 1
                pinned.append(param)
                self._fetch(param)
            self._prefetch()
            for param in pinned:
                param.finish_read()
            # Every operator whose schema writes to an argument raises the argument's version.
            versions = [param.leaf._version for param in pinned]
            yield
            for param, version in zip(pinned, versions, strict=True):
                if param.leaf._version != version:
                    self._evict(param)
                    raise RuntimeError(
                        f"parameter {param.name!r} is offloaded, so a forward or backward pass cannot change it in "
                        "place; do so within `with te.gather_parameters(module, modify=True):`"
                    )
        finally:
            for param in pinned:
                param.num_users -= 1

    def _record_use(self, param: OffloadedParam) -> None:
        """Learn that `param` follows the last two parameters."""
        self.uses += 1
        key = *self._last_two, in_backward()
        expected = self._successors.get(key)
        if expected is not param:
            self.unexpected += expected is not None
            self._successors[key] = param
        self._last_two = self._last_two[1], param

    def _fetch(self, param: OffloadedParam) -> None:
        if param.block is None:
            self.waits += 1
            block = self._allocate(param.num_bytes, (), wait=True)
            if block is None:
                gc.collect()  # frees blocks that only reference cycles keep alive
                block = self.arena.allocate(param.num_bytes)
            if block is None:
                in_use = [*(p for p in self._lru if p.num_users), param]
                names = ", ".join(f"{p.name} {p.num_bytes:,}" for p in in_use)
                raise ValueError(
                    f"budget: {self.arena.num_bytes:,} bytes of device memory cannot hold the parameters that are used "
                    f"at once ({names}; {self.arena.used:,} bytes are in use); raise the budget, or split the layer "
                    "with te.nn.TiledLinear"
                )
            self._begin_read(param, block)
        self._lru.move_to_end(param)

    def _allocate(self, size: int, protected: Collection[OffloadedParam | None], wait: bool = False) -> Tensor | None:
        """Allocate a block, evicting least recently used parameters; with `wait` also those with pending reads."""
        block = self.arena.allocate(size)
        candidates = [param for param in self._lru if not param.num_users and param not in protected]
        loaded = [param for param in candidates if param.is_read()]
        for param in loaded + [param for param in candidates if wait and not param.is_read()]:
            if block is None:
                param.finish_read()
                self._evict(param)
                block = self.arena.allocate(size)
        return block

    def _begin_read(self, param: OffloadedParam, block: Tensor) -> None:
        param.begin_read(block)
        self._by_storage[block.untyped_storage()._cdata] = param
        self._lru[param] = None

    def _evict(self, param: OffloadedParam) -> None:
        assert param.block is not None
        del self._by_storage[param.block.untyped_storage()._cdata]
        del self._lru[param]
        param.drop_block()

    def _prefetch(self) -> None:
        """Start to read the predicted parameters, as far as the arena has space."""
        last_two, protected, phase = self._last_two, {self._last_two[1]}, in_backward()
        for _ in range(PREFETCH_PARAMETERS):
            param = self._successors.get((*last_two, phase)) or self._successors.get((*last_two, not phase))
            if param is None or param in protected:
                return
            last_two = last_two[1], param
            protected.add(param)
            if param.block is None:
                block = self._allocate(param.num_bytes, protected)
                if block is None:
                    return
                self._begin_read(param, block)
