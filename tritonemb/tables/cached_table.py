"""A table that lives in host memory or on disk, with some of its rows on the device.

What stands in a `state_dict` for a table on disk where the table itself is not to be read into memory.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tritonemb.ops.initial import fill_initial_
from tritonemb.ops.row_cache import WAYS
from tritonemb.optimizers import StateSpec
from tritonemb.storage import (
    Counts,
    DiskRows,
    Field,
    HostRows,
    Record,
    StorageError,
    TableIdentity,
    record_of,
    restore,
    snapshot_header,
)
from tritonemb.tables import cached_table
from tritonemb.tables.table import Table, draw_seed
from tritonemb.types import TRAINABLE_DTYPES, TableConfig

if TYPE_CHECKING:
    pass

CHUNK_BYTES = 1 << 26  # of records that pass through memory at once


class Slots(Protocol):
    """What a table asks of the cache that its slots are in."""

    def write_back(self) -> None:
        """Bring what was trained on the device to where the rows live."""
        ...

    def replacing(self, table: TieredTable) -> AbstractContextManager[None]:
        """While the table's rows change where they live; then those that are on the device are read anew."""
        ...

    def emptying(self, table: TieredTable) -> AbstractContextManager[None]:
        """While the table gets a new place where its rows live; none is on the device any more."""
        ...


def write_back(tables: Iterable[TieredTable]) -> None:
    """Bring what was trained on the device to where the tables' rows live.

    Raises:
        StorageError: it could not be written; those rows are lost.
    """
    for slots in {id(table.slots): table.slots for table in tables}.values():
        if slots is not None:
            slots.write_back()


class TieredTable(Table):
    """Slots `[num_slots, embedding_dim]` with states, and a `store` of all rows with theirs.

    The slots are a cache: `state_dict` has whole tables, read from the store. A table on disk is made in no time and
    takes the room of the rows that were trained.

    Raises:
        ValueError: a table on disk has an `init`, which would need all of it in memory.
        StorageError: there is no room.
    """

    store: HostRows | DiskRows
    num_sets: int

    def __init__(
        self, config: TableConfig, states: tuple[StateSpec, ...], device: torch.device | str | None = None
    ) -> None:
        if config.placement == "disk" and config.init is not None:
            raise ValueError(
                f"table {config.name!r}: an init fills a whole table in memory, which one on disk is not to need; "
                "leave it out, or load values with load_state_dict"
            )
        self.num_sets = -(-config.cache.rows_of(config.num_embeddings) // WAYS)
        self.record: Record = record_of(config.embedding_dim, config.dtype, states)
        self._slots: Callable[[], Slots | None] | None = None
        self._counted = Counts()  # of stores that it has no more
        super().__init__(config, states, device, self.num_sets * WAYS)

    def _allocate(self, num_rows: int, states: tuple[StateSpec, ...], device: torch.device | str | None) -> None:
        try:
            super()._allocate(num_rows, states, device)
        except (RuntimeError, MemoryError) as error:
            raise StorageError(
                f"table {self.config.name!r} is to have a cache of {num_rows:,} rows, but the device has no room for "
                f"their {num_rows * self.record.num_bytes:,} bytes ({error}); ask for fewer with CacheConfig(rows=...)"
            ) from error

    @property
    def has_store(self) -> bool:
        """Not of a table on the meta device, or a fake one."""
        return "store" in self.__dict__

    @property
    def slots(self) -> Slots | None:
        """The cache, which belongs to the table's collection: None before there is one.

        Raises:
            RuntimeError: the collection has gone, and what was trained on the device with it.
        """
        if self._slots is None:
            return None
        found = self._slots()
        if found is None:
            raise RuntimeError(
                f"the collection of table {self.config.name!r} is no more, and with it went rows that were on the "
                "device; keep the collection as long as its tables"
            )
        return found

    @slots.setter
    def slots(self, slots: Slots) -> None:
        self._slots = weakref.ref(slots)  # or who drops a collection would wait for its memory

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Begin anew, with a store of first values; their seed is drawn from torch's generator if not given.

        Raises:
            RuntimeError: a batch that is being trained holds some of the rows.
        """
        if self.weight.device.type == "meta" or isinstance(self.weight, FakeTensor):
            return
        slots = self.slots
        with nullcontext() if slots is None else slots.emptying(self):
            self._begin_anew(seed)

    def _begin_anew(self, seed: int | None) -> None:
        if self.has_store:
            self._count_last()
            self.store.close()
        if seed is None:
            seed = draw_seed() if self.config.init is None else 0
        with torch.device("cpu"):  # not on a device that a `with` of the user's chooses
            self._make_store(seed)

    def _make_store(self, seed: int) -> None:
        if self.config.placement == "disk":
            self.store = _on_disk(self.config, self.record, seed)
        else:
            initial = _first_values(self.config, self.record, seed)
            pin = self.weight.device.type == "cuda"
            self.store = HostRows(
                self.config.num_embeddings, self.record, initial, pin, table_name=self.config.name
            )  # fmt: skip
            if self.config.init is not None:
                dtype = self.config.dtype if self.config.dtype in TRAINABLE_DTYPES else torch.float32
                whole = torch.empty(self.config.num_embeddings, self.config.embedding_dim, dtype=dtype)
                self.config.init(whole)
                self.store.fields()["weight"].copy_(whole)

    def tensors_on_device(self) -> dict[str, Tensor]:
        """Weight and states of the slots, by their names in a record."""
        states = {name: state for name, state in self._buffers.items() if state is not None}
        return {"weight": self.weight.detach(), **states}

    def pieces(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """All rows as they are now, in order: the first row of a piece, and its fields."""
        if self.slots is not None:
            self.slots.write_back()
        if isinstance(self.store, HostRows):
            yield 0, self.store.fields()
            return
        for rows, records in self._chunks():
            self.store.read(rows, records).wait()
            yield int(rows[0]), self.record.views(records)

    def tensors(self) -> dict[str, Tensor]:
        """Weight and states of the whole table; of one in host memory, those that training writes to.

        Within `stand_ins`, an `OnDisk` stands for each tensor of a table on disk.
        """
        if cached_table.are_wanted() and self.config.placement == "disk":
            sizes = {f.name: [f.size] * (not f.one_a_row) for f in self.record.fields}
            return {
                f.name: cached_table.OnDisk(self, f.name, (self.config.num_embeddings, *sizes[f.name]), f.dtype)
                for f in self.record.fields
            }
        if not self.has_store:
            size = self.config.num_embeddings, self.record.num_bytes
            return self.record.views(torch.empty(size, dtype=torch.uint8, device=self.weight.device))
        if isinstance(self.store, HostRows):
            ((_, found),) = self.pieces()
            return {field.name: _apart(found[field.name], field) for field in self.record.fields}
        whole: dict[str, Tensor] = {}
        for first, fields in self.pieces():
            for name, part in fields.items():
                if name not in whole:
                    whole[name] = part.new_empty((self.config.num_embeddings, *part.shape[1:]))
                whole[name][first : first + part.shape[0]] = part
        return whole

    @torch.no_grad()
    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Write weight or states of the whole table; what is not given, or is `tensors()` itself, stays as it is."""
        slots, given = self.slots, [field.name for field in self.record.fields if field.name in tensors]
        if slots is not None:
            slots.write_back()
        with nullcontext() if slots is None else slots.replacing(self):
            if isinstance(self.store, HostRows):
                for name in given:
                    self.store.fields()[name].copy_(tensors[name])
                return
            for rows, records in self._chunks():
                if len(given) < len(self.record.fields):
                    self.store.read(rows, records).wait()
                else:
                    records.zero_()
                fields, part = self.record.views(records), slice(int(rows[0]), int(rows[-1]) + 1)
                for name in given:
                    fields[name].copy_(tensors[name][part])
                self.store.write(rows, records).wait()

    @torch.no_grad()
    def change(self, function: Callable[[dict[str, Tensor]], None]) -> None:
        """Let a function change weight and states of all rows in place, a piece of rows at a time, in order.

        Pieces are the same for tables of the same shape that live in the same kind of place.
        """
        slots = self.slots
        if slots is not None:
            slots.write_back()
        with nullcontext() if slots is None else slots.replacing(self):
            if isinstance(self.store, HostRows):
                function(self.store.fields())
                return
            for rows, records in self._chunks():
                self.store.read(rows, records).wait()
                function(self.record.views(records))
                self.store.write(rows, records).wait()

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        step = max(1, CHUNK_BYTES // self.record.num_bytes)
        for first in range(0, self.config.num_embeddings, step):
            rows = torch.arange(first, min(first + step, self.config.num_embeddings), device="cpu")
            yield rows, torch.empty(rows.numel(), self.record.num_bytes, dtype=torch.uint8, device="cpu")

    def restored(self, base: str | Path, increments: Sequence[str | Path] = ()) -> DiskRows:
        """Rows as of snapshots of this table, for `adopt`; see `restore`.

        Raises:
            StorageError: the snapshots are damaged or of another table, or there is no room.
        """
        seed = int(snapshot_header(base)["seed"])
        with _place(self.config) as path:
            restore(path, base, increments)
            return DiskRows.open(path, **_identity(self.config, self.record, seed))

    def empty(self, seed: int = 0) -> DiskRows:
        """Rows none of which was ever written, for `adopt`: they have the first values of a seed."""
        return _on_disk(self.config, self.record, seed)

    def adopt(self, store: DiskRows) -> None:
        """Take other rows for this table's own, whose rows on the device are read anew."""
        slots = self.slots
        with nullcontext() if slots is None else slots.replacing(self):
            self._count_last()
            before, self.store = self.store, store
            with suppress(StorageError):  # that something could not be written matters no more
                before.close()

    def read_again(self) -> None:
        """Its rows on the device are read anew, as somebody else has written to `tensors()`."""
        if self.slots is not None:
            with self.slots.replacing(self):
                pass

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.tensors().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = [field.name for field in self.record.fields]
        missing = [prefix + name for name in names if prefix + name not in state_dict]
        missing_keys += missing
        if strict:
            known = {prefix + name for name in names}
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
        given = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        problems = list(self._problems(given, prefix))
        error_msgs += problems
        if given and not problems:
            self.assign(given)

    def _problems(self, given: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Why fields cannot be filled from these values."""
        rows = self.config.num_embeddings
        for field in self.record.fields:
            if field.name not in given:
                continue
            shape, value = (rows,) if field.one_a_row else (rows, field.size), given[field.name]
            if not isinstance(value, Tensor):
                yield f"{prefix}{field.name}: expected a torch.Tensor, got {type(value).__name__}"
            elif tuple(value.shape) != shape:
                yield f"size mismatch for {prefix}{field.name}: expected {shape}, got {tuple(value.shape)}"

    def _apply(self, fn: Any, recurse: bool = True) -> TieredTable:
        """It stays where it was made: what moves a module moves neither its store nor its slots."""
        probe = fn(torch.empty(0, dtype=self.weight.dtype, device=self.weight.device))
        if (probe.device, probe.dtype) != (self.weight.device, self.weight.dtype):
            raise RuntimeError(
                f"table {self.config.name!r} is placed on {self.config.placement!r} and cached on {self.weight.device} "
                f"as {self.weight.dtype}; it cannot become {probe.dtype} on {probe.device}: make the module there, and "
                "load the state_dict of this one"
            )
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise TypeError(
            f"table {self.config.name!r} is placed on {self.config.placement!r} and cannot be copied as an object; "
            "make another module, and load this one's state_dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__deepcopy__({})

    def counts(self) -> Counts:
        """What rows in host memory have been good for, of a table on disk that has some there."""
        now = self.store.counts() if self.has_store and isinstance(self.store, DiskRows) else Counts()
        return self._counted.plus(*now)

    def _count_last(self) -> None:
        """The store is about to go."""
        self._counted = self.counts()


def _apart(values: Tensor, field: Field) -> Tensor:
    """The same memory, as `torch.save` takes it: it refuses a storage of several dtypes."""
    if field.offset == 0:
        return values
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(values.untyped_storage())
    rest = torch.from_numpy(whole.numpy()[field.offset :]).view(field.dtype)
    return rest.as_strided(values.shape, values.stride())


class FirstValues:
    """First values of records: the weight by its place in the whole table, states of zero.

    Args:
        record: the layout of a row.
        seed: of the weight.
        bound: the weight is uniform in ± this.
        row_origin, column_origin: where the first row and column stand in the whole table.
    """

    def __init__(self, record: Record, seed: int, bound: float, row_origin: int = 0, column_origin: int = 0) -> None:
        self._record, self._seed, self._bound = record, seed, bound
        self._row_origin, self._column_origin = row_origin, column_origin

    def __call__(self, rows: Tensor, records: Tensor) -> None:
        records.zero_()
        weight = self._record.views(records)["weight"]
        own = rows + self._row_origin if self._row_origin else rows
        fill_initial_(weight, self._seed, self._bound, first_column=self._column_origin, rows=own)


def _first_values(config: TableConfig, record: Record, seed: int) -> FirstValues:
    return FirstValues(record, seed, config.bound, config.row_origin, config.column_origin)


@contextmanager
def _place(config: TableConfig) -> Iterator[Path]:
    """A path for a table's file, which is without a name as soon as it is open, so that nothing is left of it, however
    the process ends.
    """
    folder = Path(tempfile.gettempdir() if config.cache.folder is None else config.cache.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="tritonemb-", dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        raise StorageError(
            f"table {config.name!r} cannot have its file in folder {folder}: {error}; give "
            "CacheConfig(folder=...) one that can be written to"
        ) from error
    with temporary as own:
        yield Path(own) / f"{config.name.replace('/', '-')[:100]}.rows"


def _on_disk(config: TableConfig, record: Record, seed: int) -> DiskRows:
    with _place(config) as path:
        return DiskRows.create(path, **_identity(config, record, seed))


def _identity(config: TableConfig, record: Record, seed: int) -> dict[str, Any]:
    return {
        "identity": TableIdentity(
            config.name, config.num_embeddings, record, seed, config.row_origin, config.column_origin
        ),
        "initializer": _first_values(config, record, seed),
        "host_rows": config.cache.host_rows,
        "policy": config.cache.policy,
    }


_wanted: ContextVar[bool] = ContextVar("stand_ins_wanted", default=False)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Within, a `state_dict` has an `OnDisk` for weight and states of a table on disk, and does not read them."""
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def are_wanted() -> bool:
    return _wanted.get()


class OnDisk(Tensor):
    """Has the shape and dtype of a table's weight or of one of its states, and no values.

    Args:
        table: that it belongs to.
        field: "weight", or the state's name.
    """

    table: TieredTable
    field: str

    @staticmethod
    def __new__(cls, table: TieredTable, field: str, size: tuple[int, ...], dtype: torch.dtype) -> OnDisk:
        made: OnDisk = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=torch.device("cpu"))
        made.table, made.field = table, field
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            own = args[0]
            return OnDisk(own.table, own.field, tuple(own.shape), own.dtype)
        raise NotImplementedError(f"{func} cannot work on a table that is on disk; read it with TieredTable.pieces()")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(f"{self!r} has no values to copy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self!r} has no values to pickle")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OnDisk({self.table.config.name!r}, {self.field!r}, {list(self.shape)}, {self.dtype})"

    __str__ = __repr__
