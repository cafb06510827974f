"""A batch as kernels see it, the slots of the cache that it pins, and `prefetch`, which pins them ahead.

Releases of pins have sequence numbers. A thread that prefetches comes to a batch sooner or later, so which pins have
been released by then, and which rows may be evicted, is a matter of luck; which had been released when the batch was
submitted is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from tritonemb import ops
from tritonemb.jagged import Features, KeyedJaggedTensor, parts_of
from tritonemb.layout import Layout
from tritonemb.tables.optimizer import OptimizedTables


class Lookup(NamedTuple):
    """A batch as kernels see it.

    Attributes:
        values: int32 or int64 `[N]`, rows of the tables' memory: slots where tables are cached.
        offsets: `[K * B + 1]`.
        sample_weights: float32 `[N]`, or None.
        groups: the distinct rows.
        layout: of the batch's keys.
    """

    values: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    groups: ops.RowGroups
    layout: Layout


class PinnedSlots:
    """The slots of a batch's rows, which are not evicted until it is released; at the latest, when it is deleted.

    Args:
        release: called with this object, by any thread, perhaps by Python's garbage collection.
        tables, rows, slots: int64 `[n]`: for each row its table, its number there, and its slot.

    Attributes:
        dirty: whether the rows have been updated; they are written back after release.
        stream: that reads the slots; whoever reuses them waits for it first.
        number: the release's sequence number.
        events: behind which nobody uses the slots for this batch.
    """

    def __init__(self, release: Callable[[PinnedSlots], None], tables: Tensor, rows: Tensor, slots: Tensor) -> None:
        self._release: Callable[[PinnedSlots], None] | None = release
        self.tables, self.rows, self.slots = tables, rows, slots
        self.dirty = self._acquired = False
        self.stream: torch.cuda.Stream | None = None
        self.number, self.events = 0, list[torch.cuda.Event]()

    def rows_of(self, table: int) -> tuple[Tensor, Tensor]:
        """The rows of a table, ascending, and their slots."""
        mine = self.tables == table
        return self.rows[mine], self.slots[mine]

    @property
    def released(self) -> bool:
        """Whether other rows may be in the slots by now."""
        return self._release is None

    def acquire(self, release: Callable[[PinnedSlots], None]) -> bool:
        """Let a lookup use the slots; False if another lookup has had them.

        Raises:
            ValueError: another collection's cache pinned them.
        """
        if self._acquired or self._release is None:
            return False
        if self._release != release:
            raise ValueError("another collection made these groups; use group() of the one that is called")
        self._acquired = True
        return True

    def release(self) -> None:
        """Unpin the slots. This thread's stream has been given all changes of the rows."""
        release, self._release = self._release, None
        if release is not None:
            release(self)

    def __del__(self) -> None:
        self.release()


class PrefetchedBatch(NamedTuple):
    """A batch whose rows are in pinned slots; a pytree.

    Attributes:
        lookup: reads slots.
        pinned: these slots.
        training: whether gradients were recorded when the batch was prefetched.
        replica_rows: rows of other ranks' batches that this rank updates, too; None without replicas.
        ready: recorded behind the transfers, on a GPU.
    """

    lookup: Lookup
    pinned: PinnedSlots
    training: bool
    replica_rows: Tensor | None = None
    ready: torch.cuda.Event | None = None


_clock = itertools.count(1)
_released_before: ContextVar[int | None] = ContextVar("released_before", default=None)


def sequence_number() -> int:
    """The next one. Pins that were released before have smaller numbers, those that are released later larger ones."""
    return next(_clock)


@contextmanager
def released_before(number: int) -> Iterator[None]:
    """For batches that this thread prefetches meanwhile, count only pins as released that were so before `number`."""
    token = _released_before.set(number)
    try:
        yield
    finally:
        _released_before.reset(token)


def release_limit() -> int | None:
    """The number of `released_before`, or None: all releases count."""
    return _released_before.get()


class PrefetchedFeatures:
    """The place of a batch's features for a model that has prefetched them.

    It has keys and batch size, and nothing else: the ids are where their rows are, so a model that changes them before
    it looks them up cannot be given this.

    Args:
        batch: the features.
        by_collection: for each collection, by `id`, what it has made of them: a pytree of tensors.
    """

    def __init__(self, batch: KeyedJaggedTensor, by_collection: Mapping[int, Any]) -> None:
        self._batch, self._by_collection = batch, dict(by_collection)

    def keys(self) -> list[str]:
        """Keys of the batch."""
        return self._batch.keys()

    def stride(self) -> int:
        """Batch size."""
        return self._batch.stride()

    def of(self, collection: Any) -> Any:
        """What a collection has prefetched.

        Raises:
            ValueError: nothing, as it belongs to another model.
        """
        if id(collection) not in self._by_collection:
            raise ValueError("another model has prefetched these features; use prefetch() of the one that is called")
        return self._by_collection[id(collection)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PrefetchedFeatures:
        """On another device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, function: Callable[[Tensor], Tensor]) -> PrefetchedFeatures:
        """The same with other tensors of the same values."""
        parts = self._batch, self._by_collection
        return PrefetchedFeatures(*tree_map_only(Tensor, function, parts, is_leaf=_is_layout))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"this batch has been prefetched: its ids are where their rows are, so it has no {name!r}; a model that "
            "changes its features before it looks them up cannot prefetch them: give it the features themselves "
            "(pipeline=False), or change them in the data set"
        )


def _is_layout(part: Any) -> bool:
    """A layout's tensors follow the slots that it describes; a copy would not."""
    return isinstance(part, Layout)


@_disable_dynamo  # a graph break, which loads no compiler before one is used
def features_and_groups(tables: object, features: PrefetchedFeatures) -> tuple[Features, Any]:
    """The features of a prefetched batch, and their groups if they are known."""
    found: tuple[Features, Any] = features.of(tables)
    return found


def prefetch(
    model: nn.Module, features: Features | PrefetchedFeatures, before: int | None = None
) -> PrefetchedFeatures:
    """Move the rows of a batch to the device, for those tables of a model that are in host memory or on disk.

    Another thread may do so for the next batches while one is computed, in the order in which the model is called with
    them. Give the result to the model in the features' place; where gradients are not going to be recorded, call this
    under `torch.no_grad` too. Rows stay on the device until the batch's backward has run, or until the result is
    dropped.

    Args:
        before: a sequence number, `te.nn.sequence_number()`: rows whose pins are released later are not evicted for
            this batch. By default all that have been released when this comes to it may be, which in another thread is
            a matter of time. Take the number in the thread that trains, when it submits a batch; then what caches count
            (hits, evictions, overflows, bytes) depends on that alone.

    Raises:
        ValueError: for ids out of range, and what else a lookup raises.
        StorageError: rows cannot be read or written.
    """
    if isinstance(features, PrefetchedFeatures):
        return features
    keys, values, offsets, weights = parts_of(features)
    batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    with nullcontext() if before is None else released_before(before):
        return PrefetchedFeatures(batch, {id(tables): tables.prefetch(batch) for tables in table_sets(model)})


def table_sets(model: nn.Module) -> list[Any]:
    """The `TableSet`s that modules of a model own; not those of shards."""
    found = (module.__dict__.get("table_set") for module in model.modules())
    return [tables for tables in found if isinstance(tables, OptimizedTables)]


def needs_prefetch(model: nn.Module) -> bool:
    """Whether some table of a model is in host memory or on disk, so that `prefetch` has something to do."""
    return any(tables.cache is not None for tables in table_sets(model))
