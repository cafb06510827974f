"""Offloaded parameters: in host memory or on disk, and copied to a device arena while they are used.

An offloaded parameter is an `OffloadedTensor`: shape, dtype and gradient, without values. Operators of a forward or
backward pass get its copy in the arena, which is fetched on a miss; `torch.compile`d modules hold the copies during a
call. Autograd saves a reference in place of the copy, so the arena may evict it until the backward needs it.

Prefetch learns the order of use: after two parameters it predicts the one that followed them the last time, and reads
as far ahead as the arena has space. A misprediction waits for its parameter, and is counted in the report.
"""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map_only

from tritonemb.offloading.tiers import Arena, Span, Tier, empty_host, round_to_pages
from tritonemb.storage.store import IoFuture

PREFETCH_DEPTH = 16  # parameters: a few layers, whose reads overlap
_tensor: Any = torch.Tensor
# fmt: off
_METADATA = {
    getattr(_tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "grad", "is_leaf",
        "grad_fn", "output_nr", "retains_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested",
        "is_quantized", "is_mkldnn", "is_mps", "is_xpu", "is_xla", "_version", "_backward_hooks",
        "_post_accumulate_grad_hooks",
    )
} | {
    getattr(_tensor, name)
    for name in (
        "size", "numel", "nelement", "dim", "ndimension", "stride", "storage_offset", "is_contiguous", "dim_order",
        "element_size", "is_floating_point", "is_complex", "is_pinned", "get_device", "type", "is_same_size",
        "requires_grad_", "detach", "__hash__", "__len__", "register_post_accumulate_grad_hook",
    )
} | {
    _tensor.requires_grad.__set__, _tensor.grad.__set__, torch.is_floating_point, torch.is_complex, torch.numel,
    torch._has_compatible_shallow_copy_type,
}
_MOVES = {_tensor.to, _tensor.cpu, _tensor.cuda}
# fmt: on


def to_local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_dtensor(shard: Tensor, template: Any) -> Tensor:
    """Wrap this rank's shard like `template` if that is a DTensor."""
    if not isinstance(template, DTensor):
        return shard
    layout: Any = {"shape": template.shape, "stride": template.stride()}
    return DTensor.from_local(shard, template.device_mesh, template.placements, run_check=False, **layout)


def shard_bounds(tensor: Any) -> tuple[torch.Size, tuple[int, ...]]:
    """Return the shape of this rank's shard of a DTensor, and its offset; of a tensor its shape, and zeros."""
    if not isinstance(tensor, DTensor):
        return torch.Size(tensor.shape), (0,) * tensor.dim()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return torch.Size(shape), offset


def local_shape(tensor: Any) -> torch.Size:
    """Return the shape of this rank's shard of a DTensor, or of a tensor."""
    return shard_bounds(tensor)[0]


def slices_of(shape: torch.Size, offset: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the index of a block of a tensor."""
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def padded_shape(tensor: Any) -> torch.Size:
    """Return the shape of a shard in FSDP2's all-gather: that of the largest shard."""
    shape = list(tensor.shape)
    for dim, placement in enumerate(tensor.placements if isinstance(tensor, DTensor) else ()):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // tensor.device_mesh.size(dim))
    return torch.Size(shape)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(dim for dim in zip(tensor.stride(), tensor.shape, strict=True) if dim[1] != 1):
        if stride != expected and tensor.numel():
            return False
        expected *= size
    return True


def flat_view(tensor: Tensor) -> Tensor:
    """Return a view `[numel]` of the elements in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_like(tensor: Tensor, template: Tensor) -> Tensor:
    """Return the elements in the order of `template`'s memory; a view if the strides are the same."""
    if tensor.stride() != template.stride():
        tensor = torch.empty_strided(template.shape, template.stride(), dtype=tensor.dtype).copy_(tensor)
    return flat_view(tensor)


def replace_range(tensor: Tensor, begin: int, values: Tensor) -> Tensor:
    """Replace elements from `begin` on, in row-major order; return the tensor."""
    elements = tensor.reshape(-1)
    elements[begin : begin + values.numel()] = values
    return tensor if elements.data_ptr() == tensor.data_ptr() else tensor.copy_(elements.view(tensor.shape))


def add_gradient_hook(parameter: Any, hook: Callable[[Any], None]) -> None:
    """Call a method after each gradient of a parameter, also of one that is frozen for now.

    The hook refers to the method's object weakly, as Python's garbage collector does not see cycles through hooks.
    """
    requires_grad, method = parameter.requires_grad, weakref.WeakMethod(hook)

    def call(hooked: Any) -> None:
        if (bound_method := method()) is not None:
            bound_method(hooked)

    if requires_grad or parameter.is_floating_point() or parameter.is_complex():
        parameter.requires_grad_(True)
        parameter.register_post_accumulate_grad_hook(call)
        parameter.requires_grad_(requires_grad)


class OffloadedTensor(torch.Tensor):
    """Tensor without values, which `source` reads and writes."""

    source: "OffloadedParam"
    __slots__ = ("source",)

    @staticmethod
    def __new__(cls, source: "OffloadedParam", device: torch.device | str = "cpu") -> "OffloadedTensor":
        make_wrapper: Any = torch.Tensor._make_wrapper_subclass
        tensor: OffloadedTensor = make_wrapper(cls, source.shape, source.stride, dtype=source.dtype, device=device)
        tensor.source = source
        return tensor

    def view(self, *size: Any) -> Any:
        # FSDP2 keeps a flat view of a shard, and only passes it to the extensions below.
        return self if self.source.sharded and size == (-1,) else super().view(*size)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return this rank's shard, as input of the all-gather (extension of FSDP2)."""
        param = self.source
        with param.engine.use([param]):
            return (param.leaf.detach().to(mp_policy.param_dtype or param.dtype),), (outer_size, outer_stride)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *,
        out: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Return the parameter from the output of the all-gather (extension of FSDP2)."""
        if out is not None:
            return None
        size, stride = metadata
        return torch.as_strided(all_gather_outputs[0], size, stride, 0), all_gather_outputs

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OffloadedTensor({self.source.name!r}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    @_disable_dynamo  # graph break where a parameter is fetched
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Operators that need no values, and writes to the tier.
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        is_copy = func in (_tensor.copy_, torch.ops.aten.copy_.default)
        if is_copy and isinstance(args[0], OffloadedTensor):  # load_state_dict
            args[0].source.write(args[1])
            return args[0]
        if func == _tensor.data.__set__ and args[0] is args[1]:  # module.to
            return None
        if func in _MOVES and args[0].source.ignores_move(func, *args[1:], **kwargs):
            return args[0]
        # Operators on values: with the copies in the arena, in a forward or backward pass only.
        name = getattr(func, "__name__", "")
        if func in (_tensor.data.__get__, _tensor.data.__set__, _tensor.register_hook) or (
            name.endswith("_") and not name.endswith("__") and isinstance(args[0], OffloadedTensor)
        ):
            raise args[0].source.usage_error(name)
        offloaded: list[OffloadedTensor] = []
        tree_map_only(OffloadedTensor, offloaded.append, (args, kwargs))
        params = [tensor.source for tensor in offloaded]
        if not params[0].engine.computing or params[0].sharded:
            raise params[0].usage_error(name)
        with params[0].engine.use(params):
            args, kwargs = tree_map_only(OffloadedTensor, lambda tensor: tensor.source.leaf, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return OffloadedTensor(args[0].source, args[0].device)
        # Reached without `__torch_function__`, from an autograd function for example.
        return cls.__torch_function__(func, types, args, kwargs)


def is_offloaded(parameter: Any) -> bool:
    """Return whether a parameter is offloaded; False for None, an absent parameter of a module."""
    return isinstance(to_local(parameter), OffloadedTensor)


def source_of(parameter: Any) -> "OffloadedParam":
    """Return the `OffloadedParam` of a parameter."""
    shard: Any = to_local(parameter)
    return shard.source


@dataclass(eq=False)
class Piece:
    """Elements `begin` to `end` of a parameter, and their span."""

    begin: int
    end: int
    span: Span


class SavedParameter(NamedTuple):
    """Reference that autograd saves in place of a view of a parameter's copy."""

    param: "OffloadedParam"
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class OffloadedParam:
    """Offloaded parameter of an engine: its spans in the tier, and its block while it is in the arena.

    Attributes:
        parameter: parameter of the model, an `OffloadedTensor` or, under FSDP2, a DTensor of one.
        leaf: copy for computation. Its memory changes, but not the tensor, so autograd sums the gradients of all uses.
            It has the parameter's strides, unless they leave gaps. Under FSDP2 it is this rank's shard, of
            `shard_shape`, padded to `shape`, the same on all ranks.
        block: memory of the copy in the arena; None while evicted.
        version: number of writes, by which the backward detects a parameter that changed after the forward.
        num_users: uses in progress, which pin the copy.
    """

    def __init__(self, engine: "Engine", name: str, parameter: Any, piece_elements: int) -> None:
        # Shape and strides.
        self.engine, self.name, self.dtype = engine, name, parameter.dtype
        self.sharded, self.shard_shape = isinstance(parameter, DTensor), local_shape(parameter)
        self.shape = padded_shape(parameter)
        self.is_strided = not (self.sharded or parameter.is_contiguous()) and is_dense(parameter)
        self.stride = parameter.stride() if self.is_strided else torch.empty(self.shape, device="meta").stride()
        self.num_bytes, self.version, self.num_users = self.shape.numel() * self.dtype.itemsize, 0, 0
        # Copy in the arena; NaN while evicted.
        self.block: Tensor | None = None
        self.reads: list[IoFuture] = []
        self._no_values = torch.full((), torch.nan, device=engine.device).to(self.dtype).expand(self.shape)
        self.leaf = nn.Parameter(self._no_values, requires_grad=parameter.requires_grad)
        add_gradient_hook(self.leaf, self._accumulate_gradient)
        # Values in the tier.
        item, numel = self.dtype.itemsize, self.shard_shape.numel()
        ends = [(begin, min(begin + piece_elements, numel)) for begin in range(0, numel, piece_elements)]
        assert engine.tier is not None
        self.pieces = [Piece(begin, end, engine.tier.reserve((end - begin) * item)) for begin, end in ends]
        self.change_callbacks: list[Callable[[], None]] = []  # called after `write`, which bypasses the optimizer
        self.parameter: Any = parameter
        if not self.sharded:
            self.parameter = nn.Parameter(OffloadedTensor(self), requires_grad=parameter.requires_grad)

    def replace_shard(self) -> None:
        """Free the shard's memory, and let FSDP2 read an `OffloadedTensor`."""
        shard = self.parameter._local_tensor
        shard.untyped_storage().resize_(0)
        self.parameter._local_tensor = OffloadedTensor(self, shard.device)

    def usage_error(self, operation: str) -> RuntimeError:
        """Return the error of an operator that cannot use the parameter."""
        return RuntimeError(
            f"parameter {self.name!r} is offloaded, so {operation!r} cannot use it outside of the model's forward and "
            "backward, nor change it; do so within `with te.gather_parameters(module, modify=True):`"
        )

    def ignores_move(self, move: Any, *args: Any, **kwargs: Any) -> bool:
        """Return whether `to`, `cpu` or `cuda` is a no-op: frameworks move a model to its compute device."""
        if self.engine.computing:
            return False
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs) if move is _tensor.to else (None, None)
        if move is _tensor.cuda:
            device = torch.device("cuda" if not args or args[0] is None else args[0])
        target = self.engine.device
        if device is None or device.type == "cpu":
            return dtype in (None, self.dtype)
        is_target = device.type == target.type and device.index in (None, target.index)
        return is_target and dtype in (None, self.dtype)

    def begin_read(self, block: Tensor) -> None:
        """Start to read the parameter into a block of the arena."""
        self.block = block
        item = self.dtype.itemsize
        spans = [(piece.begin * item, piece.span) for piece in self.pieces]
        self.reads = [span.read(block[begin : begin + round_to_pages(span.num_bytes)]) for begin, span in spans]
        self.engine.by_storage[block.untyped_storage()._cdata] = self

    def is_read(self) -> bool:
        """Return whether all reads have ended."""
        return all(read.done() for read in self.reads)

    def finish_read(self) -> None:
        """Wait for the reads, and point the leaf to the block."""
        if self.leaf.data_ptr() != (self.block.data_ptr() if self.block is not None else 0):
            assert self.block is not None
            for read in self.reads:
                read.wait()
            self.reads = []
            self.leaf.data = self.block[: self.num_bytes].view(self.dtype).as_strided(self.shape, self.stride)
        if self.leaf.requires_grad != self.parameter.requires_grad:
            self.leaf.requires_grad_(self.parameter.requires_grad)

    def evict(self) -> None:
        """Drop the copy in the arena."""
        assert self.block is not None
        del self.engine.by_storage[self.block.untyped_storage()._cdata]
        self.block, self.leaf.data = None, self._no_values

    def read(self) -> Tensor:
        """Return a copy of the values on the CPU."""
        values = self._read_in_memory_order(0, self.shard_shape.numel())
        return values.as_strided(self.shape, self.stride) if self.is_strided else values.view(self.shard_shape)

    def read_range(self, begin: int, end: int) -> Tensor:
        """Return a copy of elements `begin` to `end`, in row-major order, on the CPU."""
        return self.read().reshape(-1)[begin:end] if self.is_strided else self._read_in_memory_order(begin, end)

    def _read_in_memory_order(self, begin: int, end: int) -> Tensor:
        result = torch.empty(end - begin, dtype=self.dtype)
        for piece in self.pieces:
            first, last = max(begin, piece.begin), min(end, piece.end)
            if first < last:
                result[first - begin : last - begin] = self.read_piece(piece)[first - piece.begin : last - piece.begin]
        return result

    def write_range(self, begin: int, values: Tensor) -> None:
        """Replace elements from `begin` on, in row-major order."""
        if self.is_strided:
            begin, values = 0, flat_view(replace_range(self.read(), begin, values))
        end = begin + values.numel()
        for piece in self.pieces:
            first, last = max(begin, piece.begin), min(end, piece.end)
            if first < last:
                new_values = values[first - begin : last - begin]
                if last - first < piece.end - piece.begin:
                    new_values, replacement = self.read_piece(piece), new_values
                    new_values[first - piece.begin : last - piece.begin] = replacement
                self.write_piece(piece, new_values).wait()

    def read_piece(self, piece: Piece) -> Tensor:
        """Return a copy of a piece in host memory."""
        buffer = empty_host(piece.span.num_bytes, self.engine.device)
        piece.span.read(buffer).wait()
        return buffer[: piece.span.num_bytes].view(self.dtype)

    @torch.no_grad()
    def write(self, values: Tensor, notify: bool = True) -> None:
        """Replace the values by a tensor of the shard's shape; `notify` calls `change_callbacks`."""
        if values.shape != self.shard_shape:
            raise ValueError(
                f"parameter {self.name!r} has shape {tuple(self.shard_shape)}, got values of {tuple(values.shape)}"
            )
        elements = flat_like(values, self.parameter) if self.is_strided else values.detach().reshape(-1)
        for piece in self.pieces:
            self.write_piece(piece, elements[piece.begin : piece.end]).wait()
        if notify:
            for callback in self.change_callbacks:
                callback()

    def write_piece(self, piece: Piece, values: Tensor) -> IoFuture:
        """Write a piece to its tier, and to the copy in the arena if it is cached."""
        self.update_piece(piece, values)
        buffer = empty_host(piece.span.num_bytes, self.engine.device)
        buffer[: piece.span.num_bytes].view(self.dtype).copy_(values)
        return piece.span.write(buffer)

    def update_piece(self, piece: Piece, values: Tensor) -> None:
        """Update a piece of the copy in the arena, if it is cached."""
        if self.block is not None:
            self.finish_read()
            self.block[: self.num_bytes].view(self.dtype)[piece.begin : piece.end].copy_(values)
        self.version += 1

    def _accumulate_gradient(self, leaf: Tensor) -> None:
        """Add the leaf's gradient to the parameter's, in host memory, and call the parameter's hooks."""
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        gradient = gradient.to("cpu")
        if self.parameter.grad is None:
            self.parameter.grad = gradient
        else:
            self.parameter.grad += gradient
        for hook in (self.parameter._post_accumulate_grad_hooks or {}).values():
            hook(self.parameter)


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


class Engine:
    """Fetches the offloaded parameters of a model from their tier into the arena, and evicts them."""

    def __init__(self, arena: Arena, tier: Tier | None, device: torch.device) -> None:
        self.arena, self.tier, self.device = arena, tier, device
        # Parameters in the arena: by their storage, and by use, least recent first.
        self.by_storage: dict[int, OffloadedParam] = {}
        self._lru: OrderedDict[OffloadedParam, None] = OrderedDict()
        # Prefetch: the last two parameters used, and the successor of such a pair in a forward, or in a backward.
        self._last_two: tuple[OffloadedParam | None, OffloadedParam | None] = (None, None)
        self._successors: dict[tuple[OffloadedParam | None, OffloadedParam | None, bool], OffloadedParam] = {}
        # Counters of the report.
        self.uses = self.waits = self.unexpected = 0
        # Depth of nested module calls, and hooks of saved tensors; `pack` and `unpack` offload activations.
        self._depth = 0
        self._hooks: saved_tensors_hooks | None = None
        self.pack: Callable[[Tensor], Any] = lambda tensor: tensor
        self.unpack: Callable[[Any], Tensor] = lambda packed: packed

    @property
    def computing(self) -> bool:
        """True during a forward or backward pass."""
        return self._depth > 0 or in_backward()

    @contextmanager
    def use(self, params: Iterable[OffloadedParam]) -> Iterator[None]:
        """Fetch parameters, pin them during the block, and prefetch their successors."""
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
            yield
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
                in_use = {**{p.name: p.num_bytes for p in self._lru if p.num_users}, param.name: param.num_bytes}
                names = ", ".join(f"{name} {size:,}" for name, size in in_use.items())
                raise ValueError(
                    f"budget: {self.arena.num_bytes:,} bytes of device memory cannot hold the parameters that are used "
                    f"at once ({names}; {self.arena.used:,} bytes are in use); raise the budget, or split the layer "
                    "with te.nn.TiledLinear"
                )
            param.begin_read(block)
        self._lru[param] = None
        self._lru.move_to_end(param)

    def _allocate(self, size: int, protected: Collection[OffloadedParam | None], wait: bool = False) -> Tensor | None:
        """Allocate a block, evicting least recently used parameters; with `wait` also those with pending reads."""
        block = self.arena.allocate(size)
        candidates = [param for param in self._lru if not param.num_users and param not in protected]
        loaded = [param for param in candidates if param.is_read()]
        for param in loaded + [param for param in candidates if wait and not param.is_read()]:
            if block is None:
                param.finish_read()
                param.evict()
                del self._lru[param]
                block = self.arena.allocate(size)
        return block

    def _prefetch(self) -> None:
        """Start to read the predicted parameters, as far as the arena has space."""
        last_two, protected, phase = self._last_two, {self._last_two[1]}, in_backward()
        for _ in range(PREFETCH_DEPTH):
            param = self._successors.get((*last_two, phase)) or self._successors.get((*last_two, not phase))
            if param is None or param in protected:
                return
            last_two = last_two[1], param
            protected.add(param)
            if param.block is None:
                block = self._allocate(param.num_bytes, protected)
                if block is None:
                    return
                param.begin_read(block)
                self._lru[param] = None

    @_disable_dynamo
    def enter_module(self, *_: Any) -> None:
        """Enter a module call; the outermost installs the hooks of saved tensors."""
        # While activation checkpointing recomputes, its hooks must stay the innermost.
        if self._depth == 0 and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            self._hooks = saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        self._depth += 1

    @_disable_dynamo
    def leave_module(self, *_: Any) -> None:
        """Leave a module call."""
        self._depth -= 1
        if self._depth == 0 and self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, OffloadedTensor):
            return tensor
        param = self.by_storage.get(tensor.untyped_storage()._cdata) if torch._C._has_storage(tensor) else None
        if param is None:
            return self.pack(tensor)
        offset = int(tensor.storage_offset())
        return SavedParameter(param, param.version, tensor.shape, tensor.stride(), offset, tensor.dtype)

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, SavedParameter):
            return self.unpack(packed)
        param = packed.param
        if param.version != packed.version:
            raise RuntimeError(
                f"parameter {param.name!r} was changed between this forward and its backward; step the optimizer after "
                "the backward"
            )
        with self.use([param]):
            assert param.block is not None
            values = param.block[: param.num_bytes].view(packed.dtype)
            return values.as_strided(packed.size, packed.stride, packed.offset)

    def register_hooks(self, model: nn.Module, params: Mapping[Tensor, OffloadedParam]) -> None:
        """Hook the calls of the model's modules; compiled modules get the copies of their parameters during a call."""
        compiled_modules: set[nn.Module] = set()
        for module in model.modules():
            if module in compiled_modules:
                continue
            compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
            if compiled:
                compiled_modules.update(module.modules())
                self._wrap_compiled(module, params)
            else:
                module.register_forward_pre_hook(self.enter_module, prepend=True)
                module.register_forward_hook(self.leave_module, always_call=True)

    def _wrap_compiled(self, module: Any, params: Mapping[Tensor, OffloadedParam]) -> None:
        locations = [(m, name) for m in module.modules() for name, p in m._parameters.items() if p in params]
        used_params = [params[owner._parameters[name]] for owner, name in locations]
        attribute = "forward" if hasattr(module, "_orig_mod") else "_compiled_call_impl"
        call = getattr(module, attribute)

        def call_with_copies(*args: Any, **kwargs: Any) -> Any:
            self.enter_module()
            try:
                with self.use(used_params):
                    for (owner, name), param in zip(locations, used_params, strict=True):
                        owner._parameters[name] = param.leaf
                    return call(*args, **kwargs)
            finally:
                for (owner, name), param in zip(locations, used_params, strict=True):
                    owner._parameters[name] = param.parameter
                self.leave_module()

        setattr(module, attribute, call_with_copies)
