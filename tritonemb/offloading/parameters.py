"""Parameters in host memory or on disk, copied to the device while they are used.

An offloaded parameter is an `OffloadedTensor`: shape, dtype and gradient, but no values. Whatever uses it within a
forward or backward pass gets the copy in the arena instead, which is fetched if it is not there; `torch.compile`d
modules have the copies for the time of their call. What autograd saves of a parameter is only a note of which part, so
the arena may evict it until the backward needs it.

The order of use is learned: after two parameters the one that followed them the last time is expected, and fetched
ahead as far as the arena has room. A use that was not expected waits for its parameter and counts in the report.
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

from tritonemb.offloading.tiers import Arena, Span, Tier, aligned, pages
from tritonemb.storage.store import IoFuture

AHEAD = 16  # parameters that are fetched before they are used
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


def local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor; a tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def like(shard: Tensor, other: Any) -> Tensor:
    """This rank's shard as a DTensor like another, if that is one."""
    if not isinstance(other, DTensor):
        return shard
    form: Any = {"shape": other.shape, "stride": other.stride()}
    return DTensor.from_local(shard, other.device_mesh, other.placements, run_check=False, **form)


def local_part(tensor: Any) -> tuple[torch.Size, tuple[int, ...]]:
    """Shape of this rank's shard of a DTensor, and where it begins in the whole; a tensor is all of itself."""
    if not isinstance(tensor, DTensor):
        return torch.Size(tensor.shape), (0,) * tensor.dim()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return torch.Size(shape), offset


def local_shape(tensor: Any) -> torch.Size:
    """Of this rank's shard of a DTensor; a tensor's own."""
    return local_part(tensor)[0]


def rectangle(shape: torch.Size, offset: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of a part of a tensor."""
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def padded_shape(tensor: Any) -> torch.Size:
    """Of a shard as FSDP2 gathers it: the largest of all ranks."""
    shape = list(tensor.shape)
    for dim, placement in enumerate(tensor.placements if isinstance(tensor, DTensor) else ()):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // tensor.device_mesh.size(dim))
    return torch.Size(shape)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill its memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(each for each in zip(tensor.stride(), tensor.shape, strict=True) if each[1] != 1):
        if stride != expected and tensor.numel():
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """`[numel]`, its elements in the order of memory; a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The elements of a tensor in the order of another's memory; a view if that is its own."""
    if tensor.stride() != other.stride():
        tensor = torch.empty_strided(other.shape, other.stride(), dtype=tensor.dtype).copy_(tensor)
    return flat(tensor)


def replaced(whole: Tensor, begin: int, values: Tensor) -> Tensor:
    """A tensor, whose elements from `begin` on, which count row by row, become these values."""
    rows = whole.reshape(-1)
    rows[begin : begin + values.numel()] = values
    return whole if rows.data_ptr() == whole.data_ptr() else whole.copy_(rows.view(whole.shape))


def after_gradients(parameter: Any, hook: Callable[[Any], None]) -> None:
    """Call a method after each gradient of a parameter, also of one that is frozen now.

    The parameter does not keep the method's object alive: Python's collector does not see such hooks.
    """
    wanted, method = parameter.requires_grad, weakref.WeakMethod(hook)

    def call(each: Any) -> None:
        if (found := method()) is not None:
            found(each)

    if wanted or parameter.is_floating_point() or parameter.is_complex():
        parameter.requires_grad_(True)
        parameter.register_post_accumulate_grad_hook(call)
        parameter.requires_grad_(wanted)


class OffloadedTensor(torch.Tensor):
    """A tensor whose values are elsewhere: `source` has its name, and reads and writes them."""

    source: "Slot"
    __slots__ = ("source",)

    @staticmethod
    def __new__(cls, source: "Slot", device: torch.device | str = "cpu") -> "OffloadedTensor":
        make: Any = torch.Tensor._make_wrapper_subclass
        found: OffloadedTensor = make(cls, source.shape, source.stride, dtype=source.dtype, device=device)
        found.source = source
        return found

    def view(self, *size: Any) -> Any:
        # FSDP2 keeps a flat view of a shard, of which it only asks for the all-gather's input below.
        return self if self.source.sharded and size == (-1,) else super().view(*size)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """FSDP2's extension: this rank's shard, as input of the all-gather."""
        slot = self.source
        with slot.engine.in_use([slot]):
            return (slot.leaf.detach().to(mp_policy.param_dtype or slot.dtype),), (outer_size, outer_stride)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *,
        out: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """FSDP2's extension: the whole parameter from what was gathered."""
        if out is not None:
            return None
        size, stride = metadata
        return torch.as_strided(all_gather_outputs[0], size, stride, 0), all_gather_outputs

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OffloadedTensor({self.source.name!r}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    @_disable_dynamo  # the graph breaks where a parameter is fetched
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        copies = func in (_tensor.copy_, torch.ops.aten.copy_.default)
        if copies and isinstance(args[0], OffloadedTensor):  # load_state_dict
            args[0].source.write(args[1])
            return args[0]
        if func == _tensor.data.__set__ and args[0] is args[1]:  # module.to
            return None
        if func in _MOVES and args[0].source.is_there(func, *args[1:], **kwargs):
            return args[0]
        name = getattr(func, "__name__", "")
        if func in (_tensor.data.__get__, _tensor.data.__set__, _tensor.register_hook) or (
            name.endswith("_") and not name.endswith("__") and isinstance(args[0], OffloadedTensor)
        ):
            raise args[0].source.refused(name)
        used: list[OffloadedTensor] = []
        tree_map_only(OffloadedTensor, used.append, (args, kwargs))
        slots = [each.source for each in used]
        if not slots[0].engine.computing or slots[0].sharded:
            raise slots[0].refused(name)
        with slots[0].engine.in_use(slots):
            args, kwargs = tree_map_only(OffloadedTensor, lambda each: each.source.leaf, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return OffloadedTensor(args[0].source, args[0].device)
        # An autograd function, say, was given it itself.
        return cls.__torch_function__(func, types, args, kwargs)


def is_offloaded(parameter: Any) -> bool:
    """False for None, as a module may have in place of a parameter."""
    return isinstance(local(parameter), OffloadedTensor)


def source_of(parameter: Any) -> "Slot":
    """Where an offloaded parameter's values are."""
    shard: Any = local(parameter)
    return shard.source


@dataclass(eq=False)
class Piece:
    """Elements `begin` to `end` of a parameter, and where they are."""

    begin: int
    end: int
    span: Span


class Saved(NamedTuple):
    """What autograd keeps of a parameter in place of a view of it."""

    slot: "Slot"
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Slot:
    """An offloaded parameter of an engine: its spans, and, while it is in the arena, its block.

    `leaf` is the copy that the model computes with. Its memory changes, the tensor does not, so autograd sums the
    gradients of all its uses as it does of an ordinary parameter. It has the parameter's strides, unless these leave
    gaps. Of a parameter that FSDP2 shards it is this rank's shard, of `own_shape`, padded to the `shape` that all ranks
    have.
    """

    def __init__(self, engine: "Engine", name: str, parameter: Any, piece_elements: int) -> None:
        self.engine, self.name, self.dtype = engine, name, parameter.dtype
        self.sharded, self.own_shape = isinstance(parameter, DTensor), local_shape(parameter)
        self.shape = padded_shape(parameter)
        self.is_strided = not (self.sharded or parameter.is_contiguous()) and is_dense(parameter)
        self.stride = parameter.stride() if self.is_strided else torch.empty(self.shape, device="meta").stride()
        self.num_bytes, self.version, self.users = self.shape.numel() * self.dtype.itemsize, 0, 0
        self.block: Tensor | None = None
        self.loading: list[IoFuture] = []
        self._nowhere = torch.full((), torch.nan, device=engine.device).to(self.dtype).expand(self.shape)
        self.leaf = nn.Parameter(self._nowhere, requires_grad=parameter.requires_grad)
        after_gradients(self.leaf, self._gradient)
        item, numel = self.dtype.itemsize, self.own_shape.numel()
        ends = [(begin, min(begin + piece_elements, numel)) for begin in range(0, numel, piece_elements)]
        assert engine.tier is not None
        self.pieces = [Piece(begin, end, engine.tier.reserve((end - begin) * item)) for begin, end in ends]
        self.changed: list[Callable[[], None]] = []  # called after values were written from outside
        self.parameter: Any = parameter
        if not self.sharded:
            self.parameter = nn.Parameter(OffloadedTensor(self), requires_grad=parameter.requires_grad)

    def hide_shard(self) -> None:
        """Let FSDP2 ask for the shard where it would read its memory."""
        shard = self.parameter._local_tensor
        shard.untyped_storage().resize_(0)
        self.parameter._local_tensor = OffloadedTensor(self, shard.device)

    def refused(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"parameter {self.name!r} is offloaded, so {what!r} cannot use it outside of the model's forward and "
            "backward, nor change it; do so within `with te.gather_parameters(module, modify=True):`"
        )

    def is_there(self, move: Any, *args: Any, **kwargs: Any) -> bool:
        """Whether `to`, `cpu` or `cuda` is to do nothing, as frameworks move a model to the device it computes on."""
        if self.engine.computing:
            return False
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs) if move is _tensor.to else (None, None)
        if move is _tensor.cuda:
            device = torch.device("cuda" if not args or args[0] is None else args[0])
        here = self.engine.device
        same = (
            device is None or device.type == "cpu" or (device.type == here.type and device.index in (None, here.index))
        )
        return same and dtype in (None, self.dtype)

    def start(self, block: Tensor) -> None:
        """Read the parameter into a block of the arena."""
        self.block = block
        item = self.dtype.itemsize
        parts = [(each.begin * item, each.span) for each in self.pieces]
        self.loading = [span.read(block[begin : begin + pages(span.num_bytes)]) for begin, span in parts]
        self.engine.resident[block.untyped_storage()._cdata] = self

    def done(self) -> bool:
        return all(each.done() for each in self.loading)

    def finish(self) -> None:
        """Wait until it is read, and let the leaf have it."""
        if self.leaf.data_ptr() != (self.block.data_ptr() if self.block is not None else 0):
            assert self.block is not None
            for each in self.loading:
                each.wait()
            self.loading = []
            self.leaf.data = self.block[: self.num_bytes].view(self.dtype).as_strided(self.shape, self.stride)
        if self.leaf.requires_grad != self.parameter.requires_grad:
            self.leaf.requires_grad_(self.parameter.requires_grad)

    def evict(self) -> None:
        assert self.block is not None
        del self.engine.resident[self.block.untyped_storage()._cdata]
        self.block, self.leaf.data = None, self._nowhere

    def read(self) -> Tensor:
        """The values, in memory of their own on the CPU."""
        values = self._read_in_memory_order(0, self.own_shape.numel())
        return values.as_strided(self.shape, self.stride) if self.is_strided else values.view(self.own_shape)

    def read_range(self, begin: int, end: int) -> Tensor:
        """Elements `begin` to `end`, row by row, in memory of their own on the CPU."""
        return self.read().reshape(-1)[begin:end] if self.is_strided else self._read_in_memory_order(begin, end)

    def _read_in_memory_order(self, begin: int, end: int) -> Tensor:
        found = torch.empty(end - begin, dtype=self.dtype)
        for each in self.pieces:
            first, last = max(begin, each.begin), min(end, each.end)
            if first < last:
                found[first - begin : last - begin] = self.read_piece(each)[first - each.begin : last - each.begin]
        return found

    def write_range(self, begin: int, values: Tensor) -> None:
        """Replace elements from `begin` on, row by row."""
        if self.is_strided:
            begin, values = 0, flat(replaced(self.read(), begin, values))
        end = begin + values.numel()
        for each in self.pieces:
            first, last = max(begin, each.begin), min(end, each.end)
            if first < last:
                piece = values[first - begin : last - begin]
                if last - first < each.end - each.begin:
                    piece, part = self.read_piece(each), piece
                    piece[first - each.begin : last - each.begin] = part
                self.write_piece(each, piece).wait()

    def read_piece(self, piece: Piece) -> Tensor:
        buffer = aligned(piece.span.num_bytes, self.engine.device)
        piece.span.read(buffer).wait()
        return buffer[: piece.span.num_bytes].view(self.dtype)

    @torch.no_grad()
    def write(self, values: Tensor, from_outside: bool = True) -> None:
        """Replace the values by those of a tensor of this shape."""
        if values.shape != self.own_shape:
            raise ValueError(
                f"parameter {self.name!r} has shape {tuple(self.own_shape)}, got values of {tuple(values.shape)}"
            )
        elements = flat_like(values, self.parameter) if self.is_strided else values.detach().reshape(-1)
        for piece in self.pieces:
            self.write_piece(piece, elements[piece.begin : piece.end]).wait()
        if from_outside:
            for each in self.changed:
                each()

    def write_piece(self, piece: Piece, values: Tensor) -> IoFuture:
        """Write a piece to its tier, and to the copy on the device if there is one."""
        self.changed_piece(piece, values)
        buffer = aligned(piece.span.num_bytes, self.engine.device)
        buffer[: piece.span.num_bytes].view(self.dtype).copy_(values)
        return piece.span.write(buffer)

    def changed_piece(self, piece: Piece, values: Tensor) -> None:
        """Let the copy on the device, if there is one, have new values of a piece."""
        if self.block is not None:
            self.finish()
            self.block[: self.num_bytes].view(self.dtype)[piece.begin : piece.end].copy_(values)
        self.version += 1

    def _gradient(self, leaf: Tensor) -> None:
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
    return torch._C._current_graph_task_id() != -1


class Engine:
    """Moves the offloaded parameters of a model, if there are some, between their tier and the arena."""

    def __init__(self, arena: Arena, tier: Tier | None, device: torch.device) -> None:
        self.arena, self.tier, self.device = arena, tier, device
        self.resident: dict[int, Slot] = {}  # by storage
        self._recent: OrderedDict[Slot, None] = OrderedDict()  # those in the arena, least recently used first
        self._follows: dict[tuple[Slot | None, Slot | None, bool], Slot] = {}  # in a backward, or not
        self._before: tuple[Slot | None, Slot | None] = (None, None)
        self._depth = 0
        self._hooks: saved_tensors_hooks | None = None
        self.uses = self.waits = self.unexpected = 0
        self.pack: Callable[[Tensor], Any] = lambda tensor: tensor
        self.unpack: Callable[[Any], Tensor] = lambda packed: packed

    @property
    def computing(self) -> bool:
        """Whether this is within a forward or a backward pass."""
        return self._depth > 0 or in_backward()

    @contextmanager
    def in_use(self, slots: Iterable[Slot]) -> Iterator[None]:
        held: list[Slot] = []
        try:
            for slot in dict.fromkeys(slots):
                self._expect(slot)
                slot.users += 1
                held.append(slot)
                self._fetch(slot)
            self._fetch_ahead()
            for slot in held:
                slot.finish()
            yield
        finally:
            for slot in held:
                slot.users -= 1

    def _expect(self, slot: Slot) -> None:
        self.uses += 1
        before = *self._before, in_backward()
        expected = self._follows.get(before)
        if expected is not slot:
            self.unexpected += expected is not None
            self._follows[before] = slot
        self._before = self._before[1], slot

    def _fetch(self, slot: Slot) -> None:
        if slot.block is None:
            self.waits += 1
            block = self._make_room(slot.num_bytes, (), wait=True)
            if block is None:
                gc.collect()  # blocks that only cycles refer to are free, too
                block = self.arena.take(slot.num_bytes)
            if block is None:
                held = {each.name: each.num_bytes for each in self._recent if each.users} | {slot.name: slot.num_bytes}
                listed = ", ".join(f"{name} {size:,}" for name, size in held.items())
                raise ValueError(
                    f"budget: {self.arena.num_bytes:,} bytes of device memory do not hold the parameters that are used "
                    f"at once ({listed}; {self.arena.used:,} bytes are in use); raise the budget, or split the layer "
                    "with te.nn.TiledLinear"
                )
            slot.start(block)
        self._recent[slot] = None
        self._recent.move_to_end(slot)

    def _make_room(self, num_bytes: int, protected: Collection[Slot | None], wait: bool = False) -> Tensor | None:
        """A block of the arena, for which others are evicted; with `wait` also those that are being read."""
        block = self.arena.take(num_bytes)
        able = [each for each in self._recent if not each.users and each not in protected]
        for each in [each for each in able if each.done()] + [each for each in able if wait and not each.done()]:
            if block is None:
                each.finish()
                each.evict()
                del self._recent[each]
                block = self.arena.take(num_bytes)
        return block

    def _fetch_ahead(self) -> None:
        before, protected, phase = self._before, {self._before[1]}, in_backward()
        for _ in range(AHEAD):
            slot = self._follows.get((*before, phase)) or self._follows.get((*before, not phase))
            if slot is None or slot in protected:
                return
            before = before[1], slot
            protected.add(slot)
            if slot.block is None:
                block = self._make_room(slot.num_bytes, protected)
                if block is None:
                    return
                slot.start(block)
                self._recent[slot] = None

    @_disable_dynamo
    def enter(self, *_: Any) -> None:
        # Within a checkpoint that computes again its own hooks must stay the innermost.
        if self._depth == 0 and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            self._hooks = saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        self._depth += 1

    @_disable_dynamo
    def leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, OffloadedTensor):
            return tensor
        slot = self.resident.get(tensor.untyped_storage()._cdata) if torch._C._has_storage(tensor) else None
        if slot is None:
            return self.pack(tensor)
        return Saved(slot, slot.version, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Saved):
            return self.unpack(packed)
        slot = packed.slot
        if slot.version != packed.version:
            raise RuntimeError(
                f"parameter {slot.name!r} was changed between this forward and its backward; step the optimizer after "
                "the backward"
            )
        with self.in_use([slot]):
            assert slot.block is not None
            whole = slot.block[: slot.num_bytes].view(packed.dtype)
            return whole.as_strided(packed.size, packed.stride, packed.offset)

    def watch(self, model: nn.Module, slots: Mapping[Tensor, Slot]) -> None:
        """Know when the model computes; compiled modules have the copies of their parameters during a call."""
        inside: set[nn.Module] = set()
        for module in model.modules():
            if module in inside:
                continue
            compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
            if compiled:
                inside.update(module.modules())
                self._watch_compiled(module, slots)
            else:
                module.register_forward_pre_hook(self.enter, prepend=True)
                module.register_forward_hook(self.leave, always_call=True)

    def _watch_compiled(self, module: Any, slots: Mapping[Tensor, Slot]) -> None:
        places = [(each, name) for each in module.modules() for name, p in each._parameters.items() if p in slots]
        used = [slots[each._parameters[name]] for each, name in places]
        attribute = "forward" if hasattr(module, "_orig_mod") else "_compiled_call_impl"
        call = getattr(module, attribute)

        def with_copies(*args: Any, **kwargs: Any) -> Any:
            self.enter()
            try:
                with self.in_use(used):
                    for (each, name), slot in zip(places, used, strict=True):
                        each._parameters[name] = slot.leaf
                    return call(*args, **kwargs)
            finally:
                for (each, name), slot in zip(places, used, strict=True):
                    each._parameters[name] = slot.parameter
                self.leave()

        setattr(module, attribute, with_copies)
