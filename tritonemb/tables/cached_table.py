"""A table in host memory or on disk, of which a cache on the device has some rows."""

import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tritonemb.layout import WAYS
from tritonemb.optimizers import StateSpec
from tritonemb.storage.disk import DiskRows
from tritonemb.storage.io import TableIdentity
from tritonemb.storage.memory import HostRows
from tritonemb.storage.snapshot import restore, snapshot_header
from tritonemb.storage.store import Counts, Field, InitialValues, Record, StorageError, record_of
from tritonemb.tables.table import Table, draw_seed
from tritonemb.types import TRAINABLE_DTYPES, Device, TableConfig

CHUNK_BYTES = 1 << 26  # of records that pass through memory at once


class CachedTable(Table):
    """Weight `[num_slots, embedding_dim]` with states, and a `store` of all rows with theirs.

    The slots are a cache: `state_dict` has whole tables, read from the store. A table on disk is made in no time and
    takes the space of the rows that were trained. ValueError if one has an `init`, which would need all of it in
    memory; StorageError if there is not enough memory, or no space on the disk.
    """

    store: HostRows | DiskRows
    num_sets: int

    def __init__(self, config: TableConfig, states: tuple[StateSpec, ...], device: Device = None) -> None:
        if config.placement == "disk" and config.init is not None:
            raise ValueError(
                f"table {config.name!r}: an init fills a whole table in memory, and this table is on disk; leave init "
                "out, or load values with load_state_dict"
            )
        self.config = config
        self.num_sets = -(-self._rows_to_cache() // WAYS)
        self.record: Record = record_of(config.embedding_dim, config.dtype, states, config.is_dynamic)
        self._cache: Callable[[], Any] | None = None
        self.counted = Counts()  # by the host caches of stores that were replaced
        super().__init__(config, states, device, self.num_sets * WAYS)

    def _rows_to_cache(self) -> int:
        return self.config.cache.num_device_rows(self.row_config.num_embeddings)

    def _allocate(self, num_rows: int, states: tuple[StateSpec, ...], device: Device) -> None:
        try:
            super()._allocate(num_rows, states, device)
        except (RuntimeError, MemoryError) as error:
            raise StorageError(
                f"table {self.config.name!r}: cannot allocate {num_rows * self.record.num_bytes:,} bytes of device "
                f"memory for {num_rows:,} cached rows ({error}); reduce CacheConfig(rows=...)"
            ) from error

    @property
    def has_store(self) -> bool:
        """Not of a table on the meta device, or a fake one."""
        return "store" in self.__dict__

    @property
    def cache(self) -> Any:
        """The `RowCache` of the table's collection, None before there is one; RuntimeError if that was deleted."""
        if self._cache is None:
            return None
        if (found := self._cache()) is None:
            raise RuntimeError(
                f"the collection of table {self.config.name!r} was deleted, and with it rows that were on the device; "
                "keep the collection as long as its tables"
            )
        return found

    @cache.setter
    def cache(self, cache: Any) -> None:
        self._cache = weakref.ref(cache)  # or who drops a collection would wait for its memory

    def _reloading(self, write_back: bool = True, unpinned: bool = False) -> AbstractContextManager[Any]:
        """While the store changes; then cached rows are read again."""
        if write_back and self.cache is not None:
            self.cache.write_back()
        return nullcontext() if self.cache is None else self.cache.reloading(self, unpinned)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Make a store of initial values anew; their seed is drawn from torch's generator if not given.

        RuntimeError if a batch that is being trained has pinned some of the rows.
        """
        if self.weight.device.type == "meta" or isinstance(self.weight, FakeTensor):
            return
        with self._reloading(write_back=False, unpinned=True):
            if self.has_store and not isinstance(self.store, HostRows):
                self.counted = self.counted.plus(*self.store.counts())
                self.store.close()
            if seed is None:
                seed = draw_seed() if self.config.init is None else 0
            with torch.device("cpu"):  # not on a device that a `with` of the user's chooses
                self.store = self.empty_store(seed) if self.config.placement == "disk" else self._host_rows(seed)

    def _host_rows(self, seed: int) -> HostRows:
        config, gpu = self.row_config, self.weight.device if self.weight.is_cuda else None
        rows = HostRows(config.num_embeddings, self.record, self._initial_values(seed), gpu, table_name=config.name)
        if config.init is not None:
            dtype = config.dtype if config.dtype in TRAINABLE_DTYPES else torch.float32
            whole = torch.empty(config.num_embeddings, config.embedding_dim, dtype=dtype)
            config.init(whole)
            rows.fields()["weight"].copy_(whole)
        return rows

    def _initial_values(self, seed: int) -> InitialValues:
        config = self.config
        return InitialValues(self.record, seed, config.bound, config.row_origin, config.column_origin)

    def read_records(self, rows: Tensor) -> dict[str, Tensor]:
        """Fields of some rows of the store, ascending and distinct."""
        if isinstance(self.store, HostRows):
            return {name: field[rows] for name, field in self.store.fields().items()}
        records = torch.zeros(rows.numel(), self.record.num_bytes, dtype=torch.uint8, device="cpu")
        self.store.read(rows, records).wait()
        return self.record.views(records)

    def write_records(self, rows: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Write all fields of some rows, ascending and distinct, to the store."""
        if isinstance(self.store, HostRows):
            for name, field in self.store.fields().items():
                field[rows] = fields[name].to(field)
            return
        records = torch.zeros(rows.numel(), self.record.num_bytes, dtype=torch.uint8, device="cpu")
        for name, field in self.record.views(records).items():
            field.copy_(fields[name])
        self.store.write(rows, records).wait()

    def _pieces(self, read: bool = True, write: bool = False) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """All rows of the store, in order: the first of a piece, and its fields, which are written back if asked."""
        if isinstance(self.store, HostRows):
            yield 0, self.store.fields()
            return
        step = max(1, CHUNK_BYTES // self.record.num_bytes)
        for first in range(0, self.row_config.num_embeddings, step):
            rows = torch.arange(first, min(first + step, self.row_config.num_embeddings), device="cpu")
            records = torch.zeros(rows.numel(), self.record.num_bytes, dtype=torch.uint8, device="cpu")
            if read:
                self.store.read(rows, records).wait()
            yield first, self.record.views(records)
            if write:
                self.store.write(rows, records).wait()

    def tensors(self) -> dict[str, Tensor]:
        """Weight and states of the whole table; of one in host memory, those that training writes to.

        Within `metadata_only`, a `DiskTensor` for each tensor of a table on disk.
        """
        if (references := self.disk_tensors()) is not None:
            return references
        if not self.has_store:
            size = self.config.num_embeddings, self.record.num_bytes
            return self.record.views(torch.empty(size, dtype=torch.uint8, device=self.weight.device))
        if self.cache is not None:
            self.cache.write_back()
        if isinstance(self.store, HostRows):
            found = self.store.fields()
            return {field.name: _as_own_storage(found[field.name], field) for field in self.record.fields}
        whole: dict[str, Tensor] = {}
        for first, fields in self._pieces():
            for name, part in fields.items():
                if name not in whole:
                    whole[name] = part.new_empty((self.config.num_embeddings, *part.shape[1:]))
                whole[name][first : first + part.shape[0]] = part
        return whole

    def disk_tensors(self) -> dict[str, Tensor] | None:
        """References to the fields of a table on disk, within `metadata_only`."""
        if not _metadata_only.get() or self.config.placement != "disk":
            return None
        sizes = {f.name: [f.size] * (not f.is_scalar) for f in self.record.fields}
        return {
            f.name: DiskTensor(self, f.name, (self.row_config.num_embeddings, *sizes[f.name]), f.dtype)
            for f in self.record.fields
        }

    @torch.no_grad()
    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Write weight or states of the whole table; what is not given, or is `tensors()` itself, stays as it is."""
        given = [field.name for field in self.record.fields if field.name in tensors]
        with self._reloading():
            for first, fields in self._pieces(read=len(given) < len(self.record.fields), write=True):
                for name in given:
                    fields[name].copy_(tensors[name][first : first + fields[name].shape[0]])

    @torch.no_grad()
    def update_records(self, function: Callable[[dict[str, Tensor]], None]) -> None:
        """Let a function change weight and states of all rows in place, by pieces that depend on shape alone."""
        with self._reloading():
            for _, fields in self._pieces(write=True):
                function(fields)

    def restore_store(self, base: str | Path, increments: Sequence[str | Path] = ()) -> DiskRows:
        """Rows of snapshots of this table, for `replace_store`; errors as of `restore`."""
        seed = int(snapshot_header(base)["seed"])
        with _temporary_path(self.config) as path:
            restore(path, base, increments)
            return DiskRows.open(path, **self._store_options(seed))

    def empty_store(self, seed: int = 0) -> DiskRows:
        """Rows none of which was ever written, for `replace_store`: they have the initial values of a seed."""
        with _temporary_path(self.config) as path:
            return DiskRows.create(path, **self._store_options(seed))

    def _store_options(self, seed: int) -> dict[str, Any]:
        c, cache = self.row_config, self.config.cache
        identity = TableIdentity(c.name, c.num_embeddings, self.record, seed, c.row_origin, c.column_origin)
        values, host_rows = self._initial_values(seed), cache.num_host_rows(c.num_embeddings)
        return {"identity": identity, "initializer": values, "host_rows": host_rows, "policy": cache.policy}

    def replace_store(self, store: DiskRows) -> None:
        """Replace the store; cached rows are read again from the new one."""
        with self._reloading(write_back=False):
            before, self.store = self.store, store
            assert isinstance(before, DiskRows)
            self.counted = self.counted.plus(*before.counts())
            with suppress(StorageError):  # that something could not be written matters no more
                before.close()

    def reload_cached_rows(self) -> None:
        """Read cached rows again, as somebody else has written to `tensors()`."""
        with self._reloading(write_back=False):
            pass

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: tensor for name, tensor in self.tensors().items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        _, strict, missing_keys, unexpected_keys, error_msgs = args
        rows, given, problems = self.config.num_embeddings, dict[str, Tensor](), list[str]()
        known = {prefix + field.name: field for field in self.record.fields}
        for key, field in known.items():
            shape, value = (rows,) if field.is_scalar else (rows, field.size), state_dict.get(key)
            if key not in state_dict:
                missing_keys.append(key)
            elif not isinstance(value, Tensor):
                problems.append(f"{key}: expected a torch.Tensor, got {type(value).__name__}")
            elif tuple(value.shape) != shape:
                problems.append(f"size mismatch for {key}: expected {shape}, got {tuple(value.shape)}")
            else:
                given[field.name] = value
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
        error_msgs += problems
        if given and not problems:
            self.assign(given)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        probe = fn(torch.empty(0, dtype=self.weight.dtype, device=self.weight.device))
        if (probe.device, probe.dtype) != (self.weight.device, self.weight.dtype):
            raise RuntimeError(
                f"table {self.config.name!r} is placed on {self.config.placement!r} and cached on {self.weight.device} "
                f"as {self.weight.dtype}; it cannot become {probe.dtype} on {probe.device}: make the module there, and "
                "load the state_dict of this one"
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"table {self.config.name!r} is placed on {self.config.placement!r} and cannot be copied as an object; "
            "make another module, and load this one's state_dict"
        )


def write_back(tables: Iterable[CachedTable]) -> None:
    """Write dirty rows of these tables' caches to their stores; StorageError if some could not be, and are lost."""
    for cache in {id(table.cache): table.cache for table in tables}.values():
        if cache is not None:
            cache.write_back()


def _as_own_storage(values: Tensor, field: Field) -> Tensor:
    """The same memory, as `torch.save` takes it: it refuses a storage of several dtypes."""
    if field.offset == 0:
        return values
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(values.untyped_storage())
    rest = torch.from_numpy(whole.numpy()[field.offset :]).view(field.dtype)
    return rest.as_strided(values.shape, values.stride())


@contextmanager
def _temporary_path(config: TableConfig) -> Iterator[Path]:
    """A path for a table's file, which is unlinked once it is open: nothing is left of it, however the process ends."""
    folder = Path(tempfile.gettempdir() if config.cache.folder is None else config.cache.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="tritonemb-", dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        raise StorageError(
            f"table {config.name!r} cannot make its file in folder {folder}: {error}; give "
            "CacheConfig(folder=...) one that can be written to"
        ) from error
    with temporary as own:
        yield Path(own) / f"{config.name.replace('/', '-')[:100]}.rows"


_metadata_only: ContextVar[str] = ContextVar("metadata_only", default="")


@contextmanager
def metadata_only(parameters: bool = False) -> Iterator[None]:
    """Within, a `state_dict` has a `DiskTensor` for weight and states of a table on disk, and does not read them; it
    has nothing of tables on embedding servers.

    With `parameters` it is asked for parameters alone: it has nothing of dynamic tables, which would be copied.
    """
    token = _metadata_only.set("parameters" if parameters else "disk")
    try:
        yield
    finally:
        _metadata_only.reset(token)


def is_metadata_only() -> bool:
    """Whether a `state_dict` is asked for what is in memory alone."""
    return bool(_metadata_only.get())


def only_parameters() -> bool:
    """Whether a `state_dict` is asked for parameters alone."""
    return _metadata_only.get() == "parameters"


class DiskTensor(Tensor):
    """A reference to the weight or a state, `field`, of a table on disk: shape and dtype, no values."""

    table: CachedTable
    field: str

    @staticmethod
    def __new__(cls, table: CachedTable, field: str, size: tuple[int, ...], dtype: torch.dtype) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=torch.device("cpu"))
        made.table, made.field = table, field
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            own = args[0]
            return DiskTensor(own.table, own.field, tuple(own.shape), own.dtype)
        raise NotImplementedError(f"{func} cannot read a table on disk; read it with CachedTable.tensors()")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DiskTensor({self.table.config.name!r}, {self.field!r}, {list(self.shape)}, {self.dtype})"
