"""Offloaded activations: tensors that autograd saves for the backward, in host memory or on disk."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from tritonemb.offloading.tiers import Span, Tier, empty_on, round_to_pages
from tritonemb.storage.store import IoFuture

MIN_BYTES = 16 << 10  # smaller tensors stay on the device: a transfer costs more than their memory
MAX_BASE_RATIO = 4  # a view stays if its storage has more than this many times its bytes
PREFETCH_DEPTH = 4  # storages that are read before the backward needs them


class SavedStorage:
    """Offloaded storage of saved tensors. Its span is reused once autograd releases them."""

    def __init__(self, store: "ActivationStore", storage: torch.UntypedStorage, newest: "SavedStorage | None") -> None:
        self.num_bytes, self._device = storage.nbytes(), store.device
        self.span = store.acquire(self.num_bytes)
        self.previous = None if newest is None else weakref.ref(newest)
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
        for _ in range(PREFETCH_DEPTH):
            storage = storage.previous() if storage is not None and storage.previous is not None else None
            if storage is not None:
                storage.begin_read()
        if self._read_future is not None:
            self._read_future.wait()
        assert self._block is not None
        self.write_future = None  # keep the memory until autograd releases it
        return self._block


class SavedView(NamedTuple):
    """Tensor that autograd saved, as a view of memory that `fetch` returns, uint8."""

    fetch: Callable[[], Tensor]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, fetch: Callable[[], Tensor]) -> Self:
        """Return a tensor as a view of its storage, which `fetch` will return."""
        return cls(fetch, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def tensor(self) -> Tensor:
        """Return the tensor."""
        return self.fetch().view(self.dtype).as_strided(self.size, self.stride, self.offset)


class ActivationStore:
    """Hook of saved tensors: `pack` writes them to a tier. They are read back with prefetching in reverse order.

    A storage that several operations save is written once.

    Args:
        tier, device: to which, and from which tensors are moved.
        pending_bytes: limit of bytes that wait to be written.
        excluded: tensors that stay, as they outlive the backward: parameters and buffers.
    """

    def __init__(self, tier: Tier, device: torch.device, pending_bytes: int, excluded: Iterable[Tensor]) -> None:
        self.device, self._tier, self._max_pending_bytes = device, tier, pending_bytes
        self.free: defaultdict[int, list[Span]] = defaultdict(list)
        self._newest: weakref.ref[SavedStorage] | None = None
        self._pending: list[SavedStorage] = []
        self._storages: dict[tuple[int, int], weakref.ref[SavedStorage]] = {}  # by storage and version
        self._excluded = {tensor.untyped_storage()._cdata for tensor in excluded if torch._C._has_storage(tensor)}

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        """Offload a tensor, or return it if it is small, excluded or not a plain tensor of the device."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self.device:
            return tensor
        storage = tensor.untyped_storage()
        size = tensor.numel() * tensor.element_size()
        is_small = size < MIN_BYTES or storage.nbytes() > MAX_BASE_RATIO * size
        if is_small or storage._cdata in self._excluded:
            return tensor
        key = storage._cdata, tensor._version
        reference = self._storages.get(key)
        saved = None if reference is None else reference()
        if saved is None:
            saved = SavedStorage(self, storage, None if self._newest is None else self._newest())
            self._storages[key] = self._newest = weakref.ref(saved)
            weakref.finalize(storage, self._storages.pop, key, None).atexit = False  # its address may be reused
            self._pending = [pending for pending in [*self._pending, saved] if not pending.finish_write()]
            while sum(pending.num_bytes for pending in self._pending) > self._max_pending_bytes:
                self._pending.pop(0).finish_write(wait=True)
        return SavedView.of(tensor, saved.block)

    def acquire(self, num_bytes: int) -> Span:
        """Reuse a span of this size, or reserve one."""
        spans = self.free[round_to_pages(num_bytes)]
        return spans.pop() if spans else self._tier.reserve(round_to_pages(num_bytes))
