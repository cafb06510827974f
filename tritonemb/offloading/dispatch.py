"""Offloaded parameters and activations as PyTorch sees them: operators, module calls and saved tensors.

An offloaded parameter is an `OffloadedTensor`: shape, dtype and gradient, without values. Operators of a forward or
backward pass get its copy in the arena; `torch.compile`d modules hold the copies during a call. Autograd saves a
reference in place of the copy, so the arena may evict it until the backward needs it. Offloaded activations are other
tensors that autograd saves for the backward, in host memory or on disk.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from tritonemb.offloading.parameters import OffloadedParam, ParameterCache, in_backward
from tritonemb.offloading.shards import to_local
from tritonemb.offloading.tiers import Span, Tier, empty_on, round_to_pages
from tritonemb.ops.registry import graph_break
from tritonemb.storage.store import IoFuture

Packed = Tensor | Callable[[], Tensor]  # saved tensor, or a function that returns it
MIN_BYTES = 16 << 10  # smaller tensors stay on the device: a transfer costs more than their memory
MAX_BASE_RATIO = 4  # a view stays if its storage has more than this many times its bytes
PREFETCH_STORAGES = 4  # storages that are read before the backward needs them
FETCHED_ON_USE = (
    "an offloaded parameter is fetched where it is used; for one graph call model.compile(fullgraph=True), or that of "
    "its blocks, before te.offload(model, optimizer): a compiled call fetches all parameters first"
)
_tensor: Any = torch.Tensor
_METADATA = {  # attributes and methods that need no values
    attribute if callable(attribute := getattr(_tensor, name)) else attribute.__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "grad", "is_leaf",
        "grad_fn", "output_nr", "retains_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested",
        "is_quantized", "is_mkldnn", "is_mps", "is_xpu", "is_xla", "_version", "_backward_hooks",
        "_post_accumulate_grad_hooks", "size", "numel", "nelement", "dim", "ndimension", "stride", "storage_offset",
        "is_contiguous", "dim_order", "element_size", "is_floating_point", "is_complex", "is_pinned", "get_device",
        "type", "is_same_size", "requires_grad_", "detach", "__hash__", "__len__",
        "register_post_accumulate_grad_hook",
    )
} | {
    _tensor.requires_grad.__set__, _tensor.grad.__set__, torch.is_floating_point, torch.is_complex, torch.numel,
    torch._has_compatible_shallow_copy_type,
}  # fmt: skip
_MOVES = {_tensor.to, _tensor.cpu, _tensor.cuda}
_UNSUPPORTED = {_tensor.data.__get__, _tensor.data.__set__, _tensor.register_hook}


class SavedStorage:
    """Offloaded storage of saved tensors. Its span is reused once autograd releases them."""

    def __init__(
        self, store: "ActivationStore", storage: torch.UntypedStorage, previous: Callable[[], "SavedStorage | None"]
    ) -> None:
        self.num_bytes, self._device = storage.nbytes(), store.device
        self.span = store.acquire(self.num_bytes)
        self.previous = previous
        self._block: Tensor | None = empty_on(self._device, self.num_bytes)
        self._block[: self.num_bytes].copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))
        self.write_future: IoFuture | None = self.span.write(self._block)
        self._read_future: IoFuture | None = None
        # A bound method would keep the store alive, which refers to this storage: a cycle.
        weakref.finalize(self, store.free[round_to_pages(self.num_bytes)].append, self.span).atexit = False

    def finish_write(self, wait: bool = False) -> bool:
        """Release the memory once it is written; return whether it is."""
        if self.write_future is not None and (wait or self.write_future.done()):
            self.write_future.wait()
            self.write_future = self._block = None
        return self.write_future is None

    def begin_read(self) -> None:
        """Start to read the storage, unless it is in memory."""
        if self._block is None:
            self._block = empty_on(self._device, self.num_bytes)
            self._read_future = self.span.read(self._block)

    def block(self) -> Tensor:
        """Return the memory, uint8; prefetch the storages saved before it, which the backward needs next."""
        self.begin_read()
        storage: SavedStorage | None = self
        for _ in range(PREFETCH_STORAGES):
            if storage is not None and (storage := storage.previous()) is not None:
                storage.begin_read()
        if self._read_future is not None:
            self._read_future.wait()
        assert self._block is not None
        self.write_future = None  # keep the memory until autograd releases it
        return self._block


def view_later(tensor: Tensor, fetch: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that returns the tensor as a view of its storage, uint8, which `fetch` will return."""
    dtype, layout = tensor.dtype, (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    pairs = (tensor.is_conj(), torch.conj), (tensor.is_neg(), torch._neg_view)  # bits of lazy views
    flips: list[Any] = [flip for is_set, flip in pairs if is_set]
    return lambda: reduce(lambda values, flip: flip(values), flips, fetch().view(dtype).as_strided(*layout))


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    """Return a saved tensor; RuntimeError if it was changed in place, which autograd checks only without hooks."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor {list(tensor.shape)} that the backward needs was modified by an inplace operation after the "
            f"forward saved it: it is at version {tensor._version}, expected {version}"
        )
    return tensor


class ActivationStore:
    """Hook of saved tensors: `pack` writes them to a tier. They are read back with prefetching in reverse order.

    A storage that several operations save is written once.
    """

    def __init__(self, tier: Tier, device: torch.device, max_pending_bytes: int, excluded: Iterable[Tensor]) -> None:
        self.device, self._tier, self._max_pending_bytes = device, tier, max_pending_bytes
        self.free: defaultdict[int, list[Span]] = defaultdict(list)
        self._newest: Callable[[], SavedStorage | None] = lambda: None
        self._pending: list[SavedStorage] = []
        self.storages = weakref.WeakValueDictionary[tuple[int, int], SavedStorage]()  # by storage and version
        # Parameters and buffers stay, as they outlive the backward.
        self._excluded = {tensor.untyped_storage()._cdata for tensor in excluded if torch._C._has_storage(tensor)}

    def pack(self, tensor: Tensor) -> Packed:
        """Offload a tensor, or return it if it is small, excluded or not a plain tensor of the device."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self.device:
            return tensor
        storage = tensor.untyped_storage()
        size = tensor.numel() * tensor.element_size()
        is_small = size < MIN_BYTES or storage.nbytes() > MAX_BASE_RATIO * size
        if is_small or storage._cdata in self._excluded:
            return tensor
        key = storage._cdata, tensor._version
        if (saved := self.storages.get(key)) is None:
            saved = self.storages[key] = SavedStorage(self, storage, self._newest)
            self._newest = weakref.ref(saved)
            weakref.finalize(storage, self.storages.pop, key, None).atexit = False  # its address may be reused
            self._pending = [pending for pending in [*self._pending, saved] if not pending.finish_write()]
            while sum(pending.num_bytes for pending in self._pending) > self._max_pending_bytes:
                self._pending.pop(0).finish_write(wait=True)
        return view_later(tensor, saved.block)

    def acquire(self, num_bytes: int) -> Span:
        spans = self.free[round_to_pages(num_bytes)]
        return spans.pop() if spans else self._tier.reserve(round_to_pages(num_bytes))


class OffloadedTensor(torch.Tensor):
    """Tensor without values: `source` has them, and `calls` its copies in the arena."""

    source: OffloadedParam
    calls: "ModuleCalls"
    __slots__ = ("calls", "source")

    @staticmethod
    def __new__(
        cls, source: OffloadedParam, calls: "ModuleCalls", device: torch.device | str = "cpu"
    ) -> "OffloadedTensor":
        make_wrapper: Any = torch.Tensor._make_wrapper_subclass
        layout = {"dtype": source.dtype, "device": device}
        tensor: OffloadedTensor = make_wrapper(cls, source.shape, source.leaf_strides, **layout)
        tensor.source, tensor.calls = source, calls
        return tensor

    def view(self, *size: Any) -> Any:
        # FSDP2 keeps a flat view of a shard, and only passes it to the extensions below.
        return self if self.source.sharded and size == (-1,) else super().view(*size)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return this rank's shard, as input of the all-gather (extension of FSDP2)."""
        param = self.source
        with self.calls.cache.use([param]):
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
    @graph_break(FETCHED_ON_USE)
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Operators that need no values, and copies to the tier.
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        is_copy = func in (_tensor.copy_, torch.ops.aten.copy_.default)
        if is_copy and isinstance(args[0], OffloadedTensor):  # load_state_dict
            args[0].source.write(args[1])
            return args[0]
        if func == _tensor.data.__set__ and args[0] is args[1]:  # module.to
            return None
        if func in _MOVES and args[0]._is_no_move(func, *args[1:], **kwargs):
            return args[0]
        # Operators on values: with the copies in the arena, in a forward or backward pass only.
        offloaded: list[OffloadedTensor] = []
        tree_map_only(OffloadedTensor, offloaded.append, (args, kwargs))
        source, calls = offloaded[0].source, offloaded[0].calls
        if func in _UNSUPPORTED or not calls.computing or source.sharded:
            raise RuntimeError(
                f"parameter {source.name!r} is offloaded, so {getattr(func, '__name__', '')!r} cannot use it outside "
                "of the model's forward and backward, nor change it; do so within `with "
                "te.gather_parameters(module, modify=True):`"
            )
        with calls.cache.use([tensor.source for tensor in offloaded]):
            args, kwargs = tree_map_only(OffloadedTensor, lambda tensor: tensor.source.leaf, (args, kwargs))
            return func(*args, **kwargs)

    def _is_no_move(self, move: Any, *args: Any, **kwargs: Any) -> bool:
        """Return whether `to`, `cpu` or `cuda` is a no-op: frameworks move a model to its compute device."""
        if self.calls.computing:
            return False
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs) if move is _tensor.to else (None, None)
        if move is _tensor.cuda:
            device = torch.device("cuda" if not args or args[0] is None else args[0])
        target = self.calls.device
        is_kept = device is None or device.type == "cpu"
        is_target = device is not None and device.type == target.type and device.index in (None, target.index)
        return (is_kept or is_target) and dtype in (None, self.source.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            with torch.inference_mode(False):
                return OffloadedTensor(args[0].source, args[0].calls, args[0].device)
        # Reached without `__torch_function__`, from an autograd function for example.
        return cls.__torch_function__(func, types, args, kwargs)


def is_offloaded(parameter: Any) -> bool:
    """Return whether a parameter is offloaded; False for None, an absent parameter of a module."""
    return isinstance(to_local(parameter), OffloadedTensor)


def source_of(parameter: Any) -> OffloadedParam:
    shard: Any = to_local(parameter)
    return shard.source


class ModuleCalls:
    """Calls of an offloaded model's modules: operators inside may use parameters, and autograd saves references."""

    def __init__(self, cache: ParameterCache, device: torch.device) -> None:
        self.cache, self.device = cache, device
        self.pack: Callable[[Tensor], Packed] = lambda tensor: tensor  # of other tensors that autograd saves
        self.on_enter: Callable[[], object] = lambda: None  # before the outermost call
        self._depth = 0  # of nested calls
        self._hooks: saved_tensors_hooks | None = None

    @property
    def computing(self) -> bool:
        """True during a forward or backward pass."""
        return self._depth > 0 or in_backward()

    @graph_break(FETCHED_ON_USE)
    def enter_module(self, *_: Any) -> None:
        """Enter a module call; the outermost installs the hooks of saved tensors."""
        # While activation checkpointing recomputes, its hooks must stay the innermost.
        if self._depth == 0 and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            self._hooks = saved_tensors_hooks(self._pack, lambda packed: packed() if callable(packed) else packed)
            self._hooks.__enter__()
            self.on_enter()
        self._depth += 1

    @graph_break(FETCHED_ON_USE)
    def leave_module(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _pack(self, tensor: Tensor) -> Packed:
        if isinstance(tensor, OffloadedTensor):
            return tensor
        param = self.cache.owner(tensor)
        if param is None:
            # Detached: a graph that saves its own output with its history would never be freed.
            packed = self.pack(tensor.detach())
            return packed if callable(packed) else partial(_unchanged, packed, packed._version)
        return view_later(tensor, partial(self._fetch_saved, param, param.version))

    def _fetch_saved(self, param: OffloadedParam, version: int) -> Tensor:
        if param.version != version:
            raise RuntimeError(
                f"parameter {param.name!r} was changed between this forward and its backward; step the optimizer after "
                "the backward"
            )
        with self.cache.use([param]):
            return param.memory()

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
        self._pack = torch.compiler.disable(self._pack)  # type: ignore[method-assign]  # called within its call
        attribute = "forward" if hasattr(module, "_orig_mod") else "_compiled_call_impl"
        call = getattr(module, attribute)

        def call_with_copies(*args: Any, **kwargs: Any) -> Any:
            self.enter_module()
            try:
                with self.cache.use(used_params):
                    for (owner, name), param in zip(locations, used_params, strict=True):
                        owner._parameters[name] = param.leaf
                    return call(*args, **kwargs)
            finally:
                for (owner, name), param in zip(locations, used_params, strict=True):
                    owner._parameters[name] = param.parameter
                self.leave_module()

        setattr(module, attribute, call_with_copies)
