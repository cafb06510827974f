"""Tables in host memory or on disk, whose rows are cached on the device."""

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
from tritonemb.storage.memory import CHUNK_BYTES, HostRows
from tritonemb.storage.snapshot import restore, snapshot_header
from tritonemb.storage.store import Counts, Field, InitialValues, Record, StorageError, record_of
from tritonemb.tables.table import Table, draw_seed, initialize
from tritonemb.types import TRAINABLE_DTYPES, Device, TableConfig

MAX_CACHED_ROWS = 1 << 18  # cached per table on servers by default, without `CacheConfig(rows=...)`


class CachedTable(Table):
    """Table with a cache on the device, weight `[num_slots, embedding_dim]` and states, and a store of all rows.

    `state_dict` has the whole table, read from the store. A table on disk is created without writing its rows, and
    takes space for trained rows only. A record of a dynamic table has the row's id as well: the random numbers of
    stochastic rounding depend on it. ValueError if a table on disk has an `init`, which would need the whole table in
    memory; StorageError if there is not enough memory or disk space.
    """

    store: HostRows | DiskRows  # all rows with their states
    num_sets: int  # sets of the cache, of `WAYS` slots
    # New rows of a dynamic table, and their ids, of a batch that is not pinned yet. They are initialized in their slots
    # instead of being read from the store.
    new_rows: tuple[Tensor, Tensor] | None = None

    def __init__(self, config: TableConfig, states: tuple[StateSpec, ...], device: Device = None) -> None:
        if config.placement == "disk" and config.init is not None:
            raise ValueError(
                f"table {config.name!r}: an init fills a whole table in memory, and this table is on disk; leave init "
                "out, or load values with load_state_dict"
            )
        self.config = config
        num_cached_rows = config.cache.num_device_rows(self.row_config.num_embeddings)
        if config.placement == "server" and config.cache.rows is None:
            num_cached_rows = min(num_cached_rows, MAX_CACHED_ROWS)
        self.num_sets = -(-num_cached_rows // WAYS)
        self.record: Record = record_of(config.embedding_dim, config.dtype, states, config.is_dynamic)
        self._cache: Callable[[], Any] | None = None
        self.closed_counts = Counts()  # of stores that were replaced
        super().__init__(config, states, device, self.num_sets * WAYS)

    def _allocate(self, num_rows: int, states: tuple[StateSpec, ...], device: Device) -> None:
        try:
            super()._allocate(num_rows, states, device)
            if self.config.is_dynamic:
                self.register_buffer("id", torch.zeros(num_rows, dtype=torch.int64, device=self.weight.device))
        except (RuntimeError, MemoryError) as error:
            raise StorageError(
                f"table {self.config.name!r}: cannot allocate {num_rows * self.record.num_bytes:,} bytes of device "
                f"memory for {num_rows:,} cached rows ({error}); reduce CacheConfig(rows=...)"
            ) from error

    def row_ids(self) -> Tensor | None:
        return self._buffers.get("id")

    def initialize_slots(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Write initial values to the slots of a pinned batch's new rows, and return these; `rows` ascend."""
        assert self.new_rows is not None
        (new_rows, ids), self.new_rows = self.new_rows, None
        new_slots = slots[torch.searchsorted(rows, new_rows)]
        states = [field.name for field in self.record.fields if field.name not in ("weight", "id")]
        initialize([self], states, ids, new_slots, torch.zeros_like(new_slots, dtype=torch.int32))
        self.get_buffer("id").index_copy_(0, new_slots, ids)
        return new_slots

    @property
    def has_store(self) -> bool:
        """Return whether there is a store; a table on the meta device, or a fake one, has none."""
        return "store" in self.__dict__

    @property
    def cache(self) -> Any:
        """`RowCache` of the table's collection, None before it is created; RuntimeError if it was deleted."""
        if self._cache is None:
            return None
        if (row_cache := self._cache()) is None:
            raise RuntimeError(
                f"the collection of table {self.config.name!r} was deleted, and with it rows that were on the device; "
                "keep the collection as long as its tables"
            )
        return row_cache

    @cache.setter
    def cache(self, cache: Any) -> None:
        self._cache = weakref.ref(cache)  # a cycle would keep the memory of a dropped collection until it is collected

    def _reloading(self, write_back: bool = True, unpinned: bool = False) -> AbstractContextManager[Any]:
        """Change the store inside the block; cached rows are reloaded afterwards."""
        if write_back and self.cache is not None:
            self.cache.write_back()
        return nullcontext() if self.cache is None else self.cache.reloading(self, unpinned)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Replace the store by one of initial values. The seed is drawn from torch's generator by default.

        RuntimeError if a batch that is being trained has pinned rows.
        """
        if self.weight.device.type == "meta" or isinstance(self.weight, FakeTensor):
            return
        with self._reloading(write_back=False, unpinned=True):
            if self.has_store and not isinstance(self.store, HostRows):
                self.closed_counts = self.closed_counts.plus(*self.store.counts())
                self.store.close()
            if seed is None:
                seed = draw_seed() if self.config.init is None else 0
            with torch.device("cpu"):  # overrides the user's default device
                self.store = self.new_store(seed) if self.config.placement == "disk" else self._host_rows(seed)

    def _host_rows(self, seed: int) -> HostRows:
        config, gpu = self.row_config, self.weight.device if self.weight.is_cuda else None
        rows = HostRows(config.num_embeddings, self.record, self._initial_values(seed), gpu, table_name=config.name)
        if config.init is not None:
            dtype = config.dtype if config.dtype in TRAINABLE_DTYPES else torch.float32
            weight = torch.empty(config.num_embeddings, config.embedding_dim, dtype=dtype)
            config.init(weight)
            rows.fields["weight"].copy_(weight)
        return rows

    def _initial_values(self, seed: int) -> InitialValues:
        config = self.config
        return InitialValues(self.record, seed, config.bound, config.row_origin, config.column_origin)

    def _chunks(
        self, rows: Tensor | None = None, read: bool = True, write: bool = False
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Read and write rows of the store, ascending, all by default, in chunks; yield their positions and fields."""
        if rows is None and isinstance(self.store, HostRows):
            yield slice(None), self.store.fields
            return
        size, step = self.row_config.num_embeddings, max(1, CHUNK_BYTES // self.record.num_bytes)
        size = size if rows is None else rows.numel()
        for first in range(0, size, step):
            last = min(first + step, size)
            chunk = torch.arange(first, last, device="cpu") if rows is None else rows[first:last]
            records = torch.zeros(last - first, self.record.num_bytes, dtype=torch.uint8, device="cpu")
            if read:
                self.store.read(chunk, records).wait()
            yield slice(first, last), self.record.views(records)
            if write:
                self.store.write(chunk, records).wait()

    def tensors(self) -> dict[str, Tensor]:
        """Return weight and states of the whole table: views of host memory, or copies from disk.

        Within `metadata_only`, a table on disk returns a `DiskTensor` for each.
        """
        if (references := self.disk_tensors()) is not None:
            return references
        if not self.has_store:
            size = self.config.num_embeddings, self.record.num_bytes
            return self.record.views(torch.empty(size, dtype=torch.uint8, device=self.weight.device))
        if self.cache is not None:
            self.cache.write_back()
        if isinstance(self.store, HostRows):
            views = self.store.fields
            return {field.name: _with_own_storage(views[field.name], field) for field in self.record.fields}
        tensors: dict[str, Tensor] = {}
        for chunk, fields in self._chunks():
            for name, values in fields.items():
                if name not in tensors:
                    tensors[name] = values.new_empty((self.config.num_embeddings, *values.shape[1:]))
                tensors[name][chunk] = values
        return tensors

    def disk_tensors(self) -> dict[str, Tensor] | None:
        """Return references to the fields of a table on disk within `metadata_only`, else None."""
        if not metadata_kind.get() or self.config.placement != "disk":
            return None
        sizes = {f.name: [f.size] * (not f.is_scalar) for f in self.record.fields}
        return {
            f.name: DiskTensor(self, f.name, (self.row_config.num_embeddings, *sizes[f.name]), f.dtype)
            for f in self.record.fields
        }

    @torch.no_grad()
    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Write weight or states of the whole table; fields without a tensor are unchanged."""
        names = [field.name for field in self.record.fields if field.name in tensors]
        with self._reloading():
            for chunk, fields in self._chunks(read=len(names) < len(self.record.fields), write=True):
                for name in names:
                    fields[name].copy_(tensors[name][chunk])

    @torch.no_grad()
    def update_records(self, function: Callable[[dict[str, Tensor]], None]) -> None:
        """Call a function that changes weight and states of all rows in place, for chunks that depend on shape only."""
        with self._reloading():
            for _, fields in self._chunks(write=True):
                function(fields)

    def new_store(self, seed: int = 0, snapshots: Sequence[str | Path] = ()) -> DiskRows:
        """Create a store for `replace_store`, of the initial values of a seed, or of snapshots of this table.

        For errors of snapshots, a base and its increments, see `restore`.
        """
        c, cache = self.row_config, self.config.cache
        seed = int(snapshot_header(snapshots[0])["seed"]) if snapshots else seed
        identity = TableIdentity(c.name, c.num_embeddings, self.record, seed, c.row_origin, c.column_origin)
        values, host_rows = self._initial_values(seed), cache.num_host_rows(c.num_embeddings)
        with _temporary_path(self.config) as path:
            if snapshots:
                restore(path, snapshots[0], snapshots[1:])
            make = DiskRows.open if snapshots else DiskRows.create
            return make(path, identity=identity, initializer=values, host_rows=host_rows, policy=cache.policy)

    def replace_store(self, store: DiskRows) -> None:
        """Replace the store, and reload cached rows from the new one."""
        with self._reloading(write_back=False):
            old_store, self.store = self.store, store
            assert isinstance(old_store, DiskRows)
            self.closed_counts = self.closed_counts.plus(*old_store.counts())
            with suppress(StorageError):  # a failed write of the old store no longer matters
                old_store.close()

    def reload_cached_rows(self) -> None:
        """Reload cached rows after a write to `tensors()`."""
        with self._reloading(write_back=False):
            pass

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: tensor for name, tensor in self.tensors().items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        _, strict, missing_keys, unexpected_keys, error_msgs = args
        rows, values, problems = self.config.num_embeddings, dict[str, Tensor](), list[str]()
        fields = {prefix + field.name: field for field in self.record.fields}
        for key, field in fields.items():
            shape, value = (rows,) if field.is_scalar else (rows, field.size), state_dict.get(key)
            if key not in state_dict:
                missing_keys.append(key)
            elif not isinstance(value, Tensor):
                problems.append(f"{key}: expected a torch.Tensor, got {type(value).__name__}")
            elif tuple(value.shape) != shape:
                problems.append(f"size mismatch for {key}: expected {shape}, got {tuple(value.shape)}")
            else:
                values[field.name] = value
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in fields]
        error_msgs += problems
        if values and not problems:
            self.assign(values)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        probe = fn(torch.empty(0, dtype=self.weight.dtype, device=self.weight.device))
        if (probe.device, probe.dtype) != (self.weight.device, self.weight.dtype):
            raise RuntimeError(
                f"table {self.config.name!r} is placed on {self.config.placement!r} and cached on {self.weight.device} "
                f"as {self.weight.dtype}; it cannot become {probe.dtype} on {probe.device}: build the module there, "
                "and load the state_dict of this one"
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"table {self.config.name!r} is placed on {self.config.placement!r} and cannot be copied or pickled; "
            "build another module, and load this one's state_dict"
        )


def write_back(tables: Iterable[CachedTable]) -> None:
    """Write dirty rows of these tables' caches to their stores. StorageError if a write fails; its rows are lost."""
    for cache in {id(table.cache): table.cache for table in tables}.values():
        if cache is not None:
            cache.write_back()


def _with_own_storage(values: Tensor, field: Field) -> Tensor:
    """Return a view of the same memory with its own storage: `torch.save` rejects a storage of several dtypes."""
    if field.offset == 0:
        return values
    storage_bytes = torch.empty(0, dtype=torch.uint8, device="cpu").set_(values.untyped_storage())
    field_bytes = torch.from_numpy(storage_bytes.numpy()[field.offset :]).view(field.dtype)
    return field_bytes.as_strided(values.shape, values.stride())


@contextmanager
def _temporary_path(config: TableConfig) -> Iterator[Path]:
    """Yield a temporary path for a table's file, unlinked after the block, so that no file outlives the process."""
    folder = Path(tempfile.gettempdir() if config.cache.folder is None else config.cache.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="tritonemb-", dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        raise StorageError(
            f"table {config.name!r}: cannot create its file in folder {folder}: {error}; set CacheConfig(folder=...) "
            "to a writable folder"
        ) from error
    with temporary as path:
        yield Path(path) / f"{config.name.replace('/', '-')[:100]}.rows"


# "parameters" in a block of `metadata_only(parameters=True)`, "disk" in another one, else "".
metadata_kind: ContextVar[str] = ContextVar("metadata_kind", default="")


@contextmanager
def metadata_only(parameters: bool = False) -> Iterator[None]:
    """Make `state_dict` return a `DiskTensor` for the tensors of tables on disk, and omit tables on embedding servers.

    With `parameters` it also omits dynamic tables, whose tensors would be copied.
    """
    token = metadata_kind.set("parameters" if parameters else "disk")
    try:
        yield
    finally:
        metadata_kind.reset(token)


class DiskTensor(Tensor):
    """Reference to the weight or a state, `field`, of a table on disk: shape and dtype without values."""

    table: CachedTable
    field: str

    @staticmethod
    def __new__(cls, table: CachedTable, field: str, size: tuple[int, ...], dtype: torch.dtype) -> Self:
        tensor: Self = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=torch.device("cpu"))
        tensor.table, tensor.field = table, field
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            source = args[0]
            return DiskTensor(source.table, source.field, tuple(source.shape), source.dtype)
        raise NotImplementedError(f"{func} cannot read a table on disk; read it with CachedTable.tensors()")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DiskTensor({self.table.config.name!r}, {self.field!r}, {list(self.shape)}, {self.dtype})"
