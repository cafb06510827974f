"""Rows in host memory or on disk, which are cached on the device."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tritonemb.layout import WAYS, nonzero
from tritonemb.optimizers import StateSpec
from tritonemb.storage.disk import DiskRows
from tritonemb.storage.io import TableIdentity
from tritonemb.storage.memory import CHUNK_BYTES, HostRows
from tritonemb.storage.snapshot import restore, snapshot_header
from tritonemb.storage.store import (
    SCALE,
    Counts,
    Field,
    InitialValues,
    Record,
    StorageError,
    decode_rows,
    record_of,
    wait_all,
    write_rows,
)
from tritonemb.tables.table import (
    DeviceRows,
    Index,
    Table,
    Tensors,
    codes_error,
    draw_seed,
    draw_weight,
    initialize,
    load_named_tensors,
)
from tritonemb.types import Device, TableConfig

MAX_CACHED_ROWS = 1 << 18  # cached per table on servers by default, without `CacheConfig(rows=...)`


class CachedRows(DeviceRows):
    """Rows in a store in host memory or on disk, some of them cached in slots: weight `[num_slots, embedding_dim]`.

    `state_dict` has the whole table, read from the store. A table on disk is created without writing its rows, and
    takes space for trained rows only. A record of a dynamic table has the row's id as well: the random numbers of
    stochastic rounding depend on it. ValueError if a table on disk has a function `init`, which would need the whole
    table in memory; StorageError if there is not enough memory or disk space.
    """

    is_cached = True
    store: Any = None  # of all rows with their states, `HostRows` or `DiskRows`; None on the meta device, or if fake
    device: torch.device  # of the slots
    cache_ref: Any = None  # weak, as a cycle would keep the memory of a dropped collection until it is collected
    # New rows of a dynamic table, and their ids, of a batch that is not pinned yet. They are initialized in their slots
    # instead of being read from the store.
    new_rows: tuple[Tensor, Tensor] | None = None

    def __init__(self, config: TableConfig, states: Sequence[StateSpec], is_dynamic: bool = False) -> None:
        if config.placement == "disk" and config.init_function is not None:
            raise ValueError(
                f"table {config.name!r}: an init fills a whole table in memory, and this table is on disk; leave init "
                "out, give a file of rows, or load values with load_state_dict"
            )
        super().__init__(config, states, is_dynamic)
        num_cached_rows = config.cache.num_device_rows(config.num_embeddings)
        if config.placement == "server" and config.cache.rows is None:
            num_cached_rows = min(num_cached_rows, MAX_CACHED_ROWS)
        self.num_sets = -(-num_cached_rows // WAYS)  # of the cache, of `WAYS` slots
        self.record: Record = record_of(config.embedding_dim, config.dtype, states, is_dynamic)
        self.closed_counts = Counts()  # of stores that were replaced

    def allocate(self, table: Table, device: Device) -> None:
        num_rows = self.num_sets * WAYS
        try:
            table.allocate(num_rows, device)
            if self.is_dynamic:
                table.register_buffer("id", torch.zeros(num_rows, dtype=torch.int64, device=table.weight.device))
        except (RuntimeError, MemoryError) as error:
            raise StorageError(
                f"table {self.config.name!r}: cannot allocate {num_rows * self.record.num_bytes:,} bytes of device "
                f"memory for {num_rows:,} cached rows ({error}); reduce CacheConfig(rows=...)"
            ) from error
        self.device = table.weight.device

    def initialize_slots(self, table: Table, rows: Tensor, slots: Tensor) -> Tensor:
        """Write initial values to the slots of a pinned batch's new rows, and return these; `rows` ascend."""
        assert self.new_rows is not None
        (new_rows, ids), self.new_rows = self.new_rows, None
        new_slots = slots[torch.searchsorted(rows, new_rows)]
        initialize([table], ids, new_slots, torch.zeros_like(new_slots, dtype=torch.int32))
        table.get_buffer("id").index_copy_(0, new_slots, ids)
        return new_slots

    @property
    def cache(self) -> Any:
        """`RowCache` of the table's collection, None before it is created; RuntimeError if it was deleted."""
        if self.cache_ref is None:
            return None
        if (row_cache := self.cache_ref()) is None:
            raise RuntimeError(
                f"the collection of table {self.config.name!r} was deleted, and with it rows that were on the device; "
                "keep the collection as long as its tables"
            )
        return row_cache

    def write_back(self) -> None:
        """Write dirty rows of the cache to their stores. StorageError if a write fails; its rows are lost."""
        if self.cache is not None:
            self.cache.write_back()

    def reloading(self, write_back: bool = True, unpinned: bool = False) -> AbstractContextManager[Any]:
        """Change the store inside the block; cached rows are reloaded afterwards."""
        if write_back:
            self.write_back()
        return nullcontext() if self.cache is None else self.cache.reloading(self, unpinned)

    def reset(self, table: Table, seed: int | None = None) -> None:
        """Replace the store by one of initial values. The seed is drawn from torch's generator by default.

        RuntimeError if a batch that is being trained has pinned rows.
        """
        if self.device.type == "meta" or isinstance(table.weight, FakeTensor):
            return
        with self.reloading(write_back=False, unpinned=True):
            if isinstance(self.store, DiskRows):
                self.closed_counts = self.closed_counts.plus(*self.store.counts())
                self.store.close()
            if seed is None:
                seed = draw_seed() if self.config.init_function is None else 0
            with torch.device("cpu"):  # overrides the user's default device
                self.store = self.new_store(seed) if self.config.placement == "disk" else self._host_rows(seed)

    def _host_rows(self, seed: int) -> HostRows:
        config, gpu = self.config, self.device if self.device.type == "cuda" else None
        rows = HostRows(config.num_embeddings, self.record, self._initial_values(seed), gpu, table_name=config.name)
        if config.init_function is not None:
            write_rows(rows.fields, draw_weight(config))
        return rows

    def _initial_values(self, seed: int) -> Any:
        config = self.config
        if self.is_dynamic:
            return lambda rows, records: None  # a row is initialized when it is assigned to an id
        return InitialValues(self.record, seed, config.bound, config.row_origin, config.column_origin)

    def _chunks(
        self, rows: Tensor | None = None, read: bool = True, write: bool = False
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Read and write rows as `_records` does, with float32 values in place of codes."""
        for at, fields in self._records(rows, read, write):
            weight = fields["weight"]
            values = decode_rows(weight, fields[SCALE]) if weight.dtype == torch.int8 else weight
            yield at, {**fields, "weight": values}
            if write and values is not weight:
                write_rows(fields, values)

    def _records(
        self, rows: Tensor | None = None, read: bool = True, write: bool = False
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Read and write rows of the store, ascending, all by default, in chunks; yield their positions and fields."""
        size, step = self.config.num_embeddings, max(1, CHUNK_BYTES // self.record.num_bytes)
        size = size if rows is None else rows.numel()
        for first in range(0, size, step):
            last = min(first + step, size)
            if rows is None and isinstance(self.store, HostRows):
                yield slice(first, last), {name: field[first:last] for name, field in self.store.fields.items()}
                continue
            chunk = torch.arange(first, last, device="cpu") if rows is None else rows[first:last]
            records = torch.zeros(last - first, self.record.num_bytes, dtype=torch.uint8, device="cpu")
            if read:
                wait_all(self.store.transfer([(self.store, chunk, records)], write=False))
            yield slice(first, last), self.record.views(records)
            if write:
                wait_all(self.store.transfer([(self.store, chunk, records)], write=True))

    def tensors(self, table: Table) -> dict[str, Tensor]:
        """Return the fields of the whole table: views of host memory, or copies from disk.

        Within `metadata_only`, a table on disk returns a `DiskTensor` for each.
        """
        if (references := self._disk_tensors()) is not None:
            return references
        if self.store is None:
            return self._fields(self.config.num_embeddings, self.device)
        self.write_back()
        if not isinstance(self.store, HostRows):
            fields = self._fields(self.config.num_embeddings)
            tensors = {name: torch.empty_like(field, device="cpu") for name, field in fields.items()}
            for at, records in self._records():
                for name, tensor in tensors.items():
                    tensor[at] = records[name]
            return tensors
        return {field.name: _with_own_storage(self.store.fields[field.name], field) for field in self.record.fields}

    def _disk_tensors(self) -> dict[str, Tensor] | None:
        """Return references to the fields of a table on disk within `metadata_only`, else None."""
        if not metadata_kind.get() or self.config.placement != "disk":
            return None
        fields = self._fields(self.config.num_embeddings)
        return {name: DiskTensor(self, name, tuple(field.shape), field.dtype) for name, field in fields.items()}

    def _fields(self, num_rows: int, device: Device = "meta") -> dict[str, Tensor]:
        """Return the fields of empty records by name."""
        return self.record.views(torch.empty(num_rows, self.record.num_bytes, dtype=torch.uint8, device=device))

    def assign(self, table: Table, tensors: Tensors) -> None:
        names = [field.name for field in self.record.fields if field.name in tensors]
        chunks = self._records if _has_codes(self.config, names, tensors) else self._chunks
        with self.reloading():
            for chunk, fields in chunks(read=len(names) < len(self.record.fields), write=True):
                for name in names:
                    fields[name].copy_(tensors[name][chunk])

    def update(self, table: Table, function: Callable[[dict[str, Tensor]], None]) -> None:
        with self.reloading():
            for _, fields in self._chunks(write=True):
                function(fields)

    def blocks(self, table: Table, rows: Index = None) -> Iterator[tuple[slice, Tensor]]:
        if rows is not None:
            yield from super().blocks(table, rows)
            return
        self.write_back()
        for at, fields in self._chunks():
            yield at, fields["weight"]

    def read(self, table: Table, rows: Index = None, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Read all rows by default; see `DeviceRows.read`."""
        self.write_back()
        rows, order = (None, None) if rows is None else rows.cpu().sort()
        tensors = self._empty(self.config.num_embeddings if rows is None else rows.numel())
        tensors = {name: tensors[name] for name in names or tensors}
        for chunk, fields in self._chunks(rows):
            for name, tensor in tensors.items():
                tensor[chunk if order is None else order[chunk]] = fields[name]
        return tensors

    def write(self, table: Table, rows: Tensor, values: Tensors, order: Index = None, ids: Index = None) -> None:
        if order is not None:
            values = {name: value[order.to(value.device)] for name, value in values.items()}
        tensors = values if table.index.ids is None else {**values, "id": table.index.ids[rows] if ids is None else ids}
        names = [name for name in self._fields(0) if name in tensors]
        rows, order = rows.sort()
        with self.reloading():
            for chunk, fields in self._chunks(rows.cpu(), read=len(names) < len(self._fields(0)), write=True):
                for name in names:
                    fields[name].copy_(tensors[name][order[chunk].to(tensors[name].device)])

    def erase(self, table: Table, ids: Tensor) -> None:
        rows = table.index.find(ids)
        if (rows := rows[rows >= 0]).numel():
            self.write(table, rows, {name: tensor.zero_() for name, tensor in self._empty(rows.numel()).items()})

    def _empty(self, num_rows: int) -> dict[str, Tensor]:
        """Return empty tensors for weight and states of rows, on the CPU."""
        fields = {name: field for name, field in self._fields(num_rows).items() if name not in ("id", SCALE)}
        dtypes = {"weight": self.config.row_dtype}  # all others are float32
        return {n: torch.empty(f.shape, dtype=dtypes.get(n, f.dtype), device="cpu") for n, f in fields.items()}

    def row_state(self, table: Table, rows: Tensor) -> dict[str, Tensor]:
        """Return weight and states of rows; or row numbers and references to the store, if that is saved as a file."""
        if (references := self._disk_tensors()) is None:
            return self.read(table, rows)
        return {"row": rows + self.config.row_origin, **{f"rows.{name}": field for name, field in references.items()}}

    def record_inserted(self, ids: Tensor, rows: Tensor) -> None:
        inserted = nonzero(rows >= 0)
        self.new_rows = rows[inserted], ids[inserted]
        rows.fill_(-1)  # their slots are initialized instead

    def new_store(self, seed: int = 0, snapshots: Sequence[str | Path] = ()) -> DiskRows:
        """Create a store for `replace_store`, of the initial values of a seed, or of snapshots of this table.

        For errors of snapshots, a base and its increments, see `restore`.
        """
        c, cache = self.config, self.config.cache
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
        with self.reloading(write_back=False):
            old_store, self.store = self.store, store
            assert isinstance(old_store, DiskRows)
            self.closed_counts = self.closed_counts.plus(*old_store.counts())
            with suppress(StorageError):  # a failed write of the old store no longer matters
                old_store.close()

    def reload(self) -> None:
        if isinstance(self.store, HostRows):  # others return copies
            with self.reloading(write_back=False):
                pass

    def save(self, table: Table, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: tensor for name, tensor in self.tensors(table).items()})

    def load(self, table: Table, *args: Any) -> None:
        fields, weight = self._fields(self.config.num_embeddings), args[0].get(f"{args[1]}weight")
        if isinstance(weight, Tensor) and weight.is_floating_point() and f"{args[1]}{SCALE}" not in args[0]:
            fields.pop(SCALE, None)  # `assign` rounds such a weight

        def assign(values: dict[str, Any]) -> None:
            problems = []
            for name, value in values.items():
                key, shape = f"{args[1]}{name}", tuple(fields[name].shape)
                if not isinstance(value, Tensor):
                    problems.append(f"{key}: expected a torch.Tensor, got {type(value).__name__}")
                elif tuple(value.shape) != shape:
                    problems.append(f"size mismatch for {key}: expected {shape}, got {tuple(value.shape)}")
            if problems:
                raise ValueError("\n\t".join(problems))
            table.assign(values)

        load_named_tensors(fields, assign, *args, partial=True)

    def convert(self, table: Table, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
        """Raise RuntimeError if the weight would be moved or cast."""
        dtype = table.weight.dtype
        probe = fn(torch.empty(0, dtype=dtype, device=self.device))
        if (probe.device, probe.dtype) != (self.device, dtype):
            raise RuntimeError(
                f"table {self.config.name!r} is placed on {self.config.placement!r} and cached on {self.device} "
                f"as {dtype}; it cannot become {probe.dtype} on {probe.device}: build the module there, "
                "and load the state_dict of this one"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"table {self.config.name!r} is placed on {self.config.placement!r} and cannot be copied or pickled; "
            "build another module, and load this one's state_dict"
        )


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

    rows: CachedRows
    field: str

    @staticmethod
    def __new__(cls, rows: CachedRows, field: str, size: tuple[int, ...], dtype: torch.dtype) -> Self:
        tensor: Self = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=torch.device("cpu"))
        tensor.rows, tensor.field = rows, field
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            source = args[0]
            return DiskTensor(source.rows, source.field, tuple(source.shape), source.dtype)
        raise NotImplementedError(f"{func} cannot read a table on disk; read it with Table.tensors()")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DiskTensor({self.rows.config.name!r}, {self.field!r}, {list(self.shape)}, {self.dtype})"


def _has_codes(config: TableConfig, names: Sequence[str], tensors: Tensors) -> bool:
    """Return whether the tensors to assign to a table have codes and scales; ValueError if the table has none."""
    if SCALE not in names and ("weight" not in names or tensors["weight"].dtype != torch.int8):
        return False
    if config.dtype != torch.int8:
        raise ValueError(codes_error(config))
    if not {SCALE, "weight"} <= {*names}:
        text = f"needs both weight and {SCALE}, or a float32 weight alone, which is rounded"
        raise ValueError(f"table {config.name!r} of int8 {text}")
    return True
