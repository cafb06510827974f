"""What autograd saves for the backward, in host memory or on disk until then."""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb.offloading.tiers import Span, Tier, empty_on, pages
from tritonemb.storage.store import IoFuture

LEAST_BYTES = 16 << 10  # smaller tensors stay
MOST_OF_A_VIEW = 4  # a view stays if the memory that it is a view of is larger than that many times it
AHEAD = 4  # tensors that are read before the backward needs them


class SavedStorage:
    """The memory of tensors that autograd has saved. Its span is free for another when it drops them."""

    def __init__(self, store: "ActivationStore", storage: torch.UntypedStorage, before: "SavedStorage | None") -> None:
        self.num_bytes, self._device = storage.nbytes(), store.device
        self.span = store.take(self.num_bytes)
        self.before = None if before is None else weakref.ref(before)
        self._block: Tensor | None = empty_on(self._device, self.num_bytes)
        self._block[: self.num_bytes].copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))
        self.writing: IoFuture | None = self.span.write(self._block)
        self._reading: IoFuture | None = None
        # Not a method: that would keep the store, and it this, alive for ever.
        weakref.finalize(self, store.free[pages(self.num_bytes)].append, self.span).atexit = False

    def written(self, wait: bool = False) -> bool:
        """Whether it is written, and its memory dropped."""
        if self.writing is not None and (wait or self.writing.done()):
            self.writing.wait()
            self.writing = self._block = None
        return self.writing is None

    def start(self) -> None:
        """Read it, unless it is in memory."""
        if self._block is None:
            self._block = empty_on(self._device, self.num_bytes)
            self._reading = self.span.read(self._block)

    def block(self) -> Tensor:
        """Its memory; what was saved before it is read meanwhile."""
        self.start()
        each: SavedStorage | None = self
        for _ in range(AHEAD):
            each = each.before() if each is not None and each.before is not None else None
            if each is not None:
                each.start()
        if self._reading is not None:
            self._reading.wait()
        assert self._block is not None
        self.writing = None  # the memory stays until autograd drops it
        return self._block


class SavedView(NamedTuple):
    storage: SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationStore:
    """Packs what autograd saves into spans of a tier, in the order of saving, and reads it back in reverse.

    Memory that several operations save, or views of, is stored once. `keep` says what lives on anyway, as parameters
    do. At most `pending_bytes` wait to be written.
    """

    def __init__(self, tier: Tier, device: torch.device, pending_bytes: int, keep: Iterable[Tensor]) -> None:
        self.device, self._tier, self._most = device, tier, pending_bytes
        self.free: defaultdict[int, list[Span]] = defaultdict(list)
        self._last: weakref.ref[SavedStorage] | None = None
        self._pending: list[SavedStorage] = []
        self._known: dict[tuple[int, int], weakref.ref[SavedStorage]] = {}  # by storage and version
        self._kept = {each.untyped_storage()._cdata for each in keep if torch._C._has_storage(each)}

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self.device:
            return tensor
        storage = tensor.untyped_storage()
        size = tensor.numel() * tensor.element_size()
        small = size < LEAST_BYTES or storage.nbytes() > MOST_OF_A_VIEW * size
        if small or storage._cdata in self._kept:
            return tensor
        key = storage._cdata, tensor._version
        known = self._known.get(key)
        saved = None if known is None else known()
        if saved is None:
            saved = SavedStorage(self, storage, None if self._last is None else self._last())
            self._known[key] = self._last = weakref.ref(saved)
            weakref.finalize(storage, self._known.pop, key, None).atexit = False  # its address may be another's then
            self._pending = [each for each in [*self._pending, saved] if not each.written()]
            while sum(each.num_bytes for each in self._pending) > self._most:
                self._pending.pop(0).written(wait=True)
        return SavedView(saved, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Tensor | SavedView) -> Tensor:
        if not isinstance(packed, SavedView):
            return packed
        whole = packed.storage.block().view(packed.dtype)
        return whole.as_strided(packed.size, packed.stride, packed.offset)

    def take(self, num_bytes: int) -> Span:
        spans = self.free[pages(num_bytes)]
        return spans.pop() if spans else self._tier.reserve(pages(num_bytes))
