"""A table of a collection: its weight and its optimizer states, under their names in `state_dict`; its lock."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from tritonemb.memory import advise_huge_pages
from tritonemb.ops.registry import kernel
from tritonemb.ops.row_cache import move_rows_
from tritonemb.ops.row_update import fill_initial_
from tritonemb.optimizers import StateSpec
from tritonemb.types import TABLE_DTYPES, TRAINABLE_DTYPES, Device, TableConfig

Tensors = Mapping[str, Tensor]
Index = Tensor | None
BLOCK_ELEMENTS = 1 << 22  # of a weight that is read block by block: 16 MiB of float32
WEIGHT = ("weight",)  # to read and write rows without their states


def draw_seed() -> int:
    """Draw a table's seed, 63 bits, from torch's generator."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64))


def new_weight(num_rows: int, embedding_dim: int, device: Device, dtype: torch.dtype | None) -> Tensor:
    """Return an uninitialized weight, in huge pages where the system has them."""
    return advise_huge_pages(torch.empty(num_rows, embedding_dim, dtype=dtype, device=device))


def draw_weight(config: TableConfig, device: Device = None) -> Tensor:
    """Draw a table's weight by its `init`, in float32 if the dtype cannot be trained."""
    assert config.init_function is not None
    dtype = config.dtype if config.dtype in TRAINABLE_DTYPES else torch.float32
    weight = torch.empty(config.num_embeddings, config.embedding_dim, dtype=dtype, device=device)
    config.init_function(weight)
    return weight


def new_states(weight: Tensor, specs: Sequence[StateSpec], zeros: bool = True) -> dict[str, Tensor]:
    """Return the optimizer states of a table by name: float32 `[num_rows]` or of the weight's shape; zeros or empty."""
    states = {}
    for spec in specs:
        shape = weight.shape if spec.per_element else weight.shape[:1]
        state = torch.empty(shape, dtype=torch.float32, device=weight.device)
        # A batch that touches a new huge page waits 0.25 ms for the system to clear it; all others are a sixth faster.
        state = advise_huge_pages(state) if zeros or spec.per_element else state
        states[spec.name] = state.zero_() if zeros else state
    return states


def keep_dtypes(buffers: dict[str, Tensor | None], originals: Mapping[str, Tensor | None]) -> None:
    """Restore the dtypes of buffers, and the values of counters, after a module's `_apply`; zero buffers from meta."""
    for name, buffer in buffers.items():
        original = originals[name]
        if buffer is None or original is None:
            continue
        if original.is_meta and not buffer.is_meta:
            buffers[name] = torch.zeros_like(original, device=buffer.device)
        elif buffer.dtype != original.dtype or not original.is_floating_point():
            buffers[name] = original.to(buffer.device)


@torch.no_grad()
def convert_assigned(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
    """Convert tensors that `load_state_dict(assign=True)` assigns to a module, so that kernels can read them.

    Weight and states become contiguous; states get the module's dtypes and the weight's device. Tensors that need no
    conversion are assigned as they are. ValueError for dtypes that cannot be used.
    """
    if not metadata.get("assign_to_params_buffers"):
        return
    weight = state_dict.get(f"{prefix}weight", module.weight)
    dtypes = (*(TRAINABLE_DTYPES if module._buffers else TABLE_DTYPES), torch.float64)
    for name in ("weight", *module._buffers):
        key, state = prefix + name, module._buffers.get(name)
        if not isinstance(tensor := state_dict.get(key), Tensor):
            continue
        if tensor.is_complex() if state is not None else tensor.dtype not in dtypes:
            expected = dtypes if state is None else state.dtype
            raise ValueError(f"{key}: expected {expected}, got {tensor.dtype}; convert it before it is loaded")
        if state is not None:
            tensor = tensor.to(tensor.device if weight.is_meta else weight.device, state.dtype)
        state_dict[key] = tensor.contiguous()


def codes_error(config: TableConfig) -> str:
    return f"table {config.name!r} cannot load the codes of an int8 table; load weight * weight_scale[:, None]"


def load_named_tensors(
    names: Iterable[str], load: Callable[[dict[str, Any]], None], state_dict: Any, *args: Any, partial: bool = False
) -> None:
    """Implement `_load_from_state_dict` by one call of `load`; report its ValueError.

    `load` is called with the named tensors that are there, without `partial` only if ids and weight are among them.
    """
    prefix, _, strict, missing_keys, unexpected_keys, error_msgs = args
    keys = {prefix + name: name for name in names}
    tensors = {name: state_dict[key] for key, name in keys.items() if key in state_dict}
    has_rows = partial or all(name in tensors for name in ("ids", "weight") if name in keys.values())
    missing_keys += [key for key, name in keys.items() if name not in tensors or not has_rows]
    if strict:
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in keys]
    if tensors and has_rows:
        try:
            load(tensors)
        except ValueError as error:
            error_msgs.append(str(error))


def initialize(tables: Sequence[Any], ids: Tensor, rows: Tensor, numbers: Tensor) -> None:
    """Write initial values and zero states to rows of the tables with these numbers; negative rows are skipped."""
    kernel("initialize_rows_", rows.device)(
        [table.weight.detach() for table in tables],
        [table.get_buffer(name) for name in tables[0].state_names for table in tables],
        [(table.seed, table.config.bound) for table in tables], ids, rows, numbers,
    )  # fmt: skip


def initial_values(tables: Sequence[Any], ids: Tensor, numbers: Tensor) -> Tensor:
    """Return the initial values of ids, `[N, dim]`, in tables of one width and dtype with these numbers, int32."""
    config, initial = tables[0].config, [(table.seed, table.config.bound) for table in tables]
    values = torch.empty(ids.numel(), config.embedding_dim, dtype=config.dtype, device=ids.device)
    weights, rows = [values] * len(tables), torch.arange(ids.numel(), device=ids.device)
    kernel("initialize_rows_", ids.device)(weights, [], initial, ids, rows, numbers)
    return values


@dataclass(frozen=True)
class DynamicStatistics:
    """Cumulative counters of a dynamic table, and its size.

    Args:
        lookups: occurrences of ids in batches that were trained.
        hits: lookups of ids that had a row.
        inserts: rows assigned to new ids.
        refused: occurrences of ids that were not admitted, or, with fallback rows, for which there was no free row.
        evictions: rows evicted for new ids, or expired after `EvictionConfig.ttl` steps.
        rows, capacity: rows in use, and their maximum, without fallback rows.
        num_bytes: bytes of memory or disk that weights, states and the index of allocated rows take.
    """

    lookups: int = 0
    hits: int = 0
    inserts: int = 0
    refused: int = 0
    evictions: int = 0
    rows: int = 0
    capacity: int = 0
    num_bytes: int = 0

    @property
    def load(self) -> float:
        """Load factor: rows in use per row of capacity."""
        return self.rows / self.capacity if self.capacity else 0.0

    @property
    def hit_rate(self) -> float:
        """Hits per lookup; 1 without lookups."""
        return self.hits / self.lookups if self.lookups else 1.0

    @property
    def bytes_per_row(self) -> float:
        """Bytes per row in use; 0 without rows."""
        return self.num_bytes / self.rows if self.rows else 0.0


def check_not_fully_sharded(name: str, attribute: str, value: Any) -> None:
    """Raise RuntimeError if a fused table's weight becomes a shard, as by `fully_shard`: updates would be lost."""
    if attribute == "weight" and hasattr(value, "device_mesh"):  # a DTensor
        raise RuntimeError(
            f"table {name!r} has a fused optimizer, so its weight cannot be sharded by fully_shard (FSDP2) or become "
            "another DTensor: the backward would update a gathered copy, which is discarded; construct the model "
            "again, and shard its tables by te.HybridParallel, fuse without an optimizer, te.fuse(model), or keep the "
            "tables out of fully_shard by ignored_params"
        )


class Table(nn.Module):
    """Table of an index, which finds the rows of ids, and of rows with their optimizer states in any memory.

    On the device are a weight `[num_rows, embedding_dim]` and float32 states, `[num_rows]` or of the weight's shape.
    """

    index: Any
    rows: Any
    weight: Any
    seed = 0  # of the initial values of a dynamic table, or of one on servers
    is_fused = False  # whether backward passes update it

    def __init__(self, config: TableConfig, index: "DenseIndex", rows: "DeviceRows", device: Device = None) -> None:
        super().__init__()
        self.config, self.index, self.rows = config, index, rows
        self.state_names = tuple(spec.name for spec in rows.states)
        rows.allocate(self, device)
        self.reset_parameters()

    def allocate(self, num_rows: int, device: Device, zeros: bool = True) -> None:
        """Allocate weight and states of rows on the device."""
        weight = new_weight(num_rows, self.config.embedding_dim, device, self.config.row_dtype)
        self.weight = nn.Parameter(weight, requires_grad=weight.dtype in TRAINABLE_DTYPES)
        for name, state in new_states(weight, self.rows.states, zeros).items():
            self.register_buffer(name, state)

    def initial_values(self, ids: Tensor) -> Tensor:
        """Return the initial values of ids of a dynamic table, `[N, embedding_dim]`."""
        return initial_values([self], ids, torch.zeros_like(ids, dtype=torch.int32))

    def device_tensors(self) -> dict[str, Tensor]:
        """Return weight and states on the device by name."""
        states = {name: state for name, state in self._buffers.items() if state is not None}
        return {"weight": self.weight.detach(), **states}

    def tensors(self) -> dict[str, Tensor]:
        """Return weight and states of all rows by name; those of a dynamic table are copies, sorted by id."""
        return dict(self.rows.tensors(self))

    def statistics(self) -> DynamicStatistics:
        """Return counters and size of a dynamic table."""
        return DynamicStatistics(**self.index.statistics())

    @torch.no_grad()
    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Write weight or states of the whole table; those without a tensor are unchanged."""
        self.rows.assign(self, tensors)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize the weight according to the config, and states to zero; the seed is drawn by default."""
        self.rows.reset(self, seed)
        self.load_pretrained(self.config)

    def load_pretrained(self, config: TableConfig) -> None:
        """Write the rows in the file that is the `init` of this table's config, or of that of which it is a shard."""
        if config.init is None or callable(config.init) or self.weight.is_meta or isinstance(self.weight, FakeTensor):
            return
        from tritonemb.storage.checkpoint import open_pretrained  # imports torch.distributed.checkpoint

        with torch.device("cpu"), torch.no_grad():  # overrides the user's default device
            self.write_pretrained(open_pretrained(config))

    def write_pretrained(self, file: Any) -> None:
        """Write the rows of a `PretrainedRows` that this table has."""
        c = self.config
        columns = slice(c.column_origin, c.column_origin + c.embedding_dim)
        for ids, rows in file.blocks(lambda ids: (ids >= c.row_origin) & (ids < c.row_origin + c.num_embeddings)):
            self.rows.write(self, ids - c.row_origin, {"weight": rows[:, columns]})

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_fused:
            check_not_fully_sharded(self.config.name, name, value)
        super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train or freeze the table. `requires_grad_` of an enclosing module does not reach a weight on servers."""
        if self.rows.is_pulled:
            self.weight.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def _save_to_state_dict(self, *args: Any) -> None:
        self.rows.save(self, *args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.rows.load(self, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.rows.convert(self, fn, recurse)
        self.index.to(self.weight.device)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.rows.__reduce_ex__(protocol)  # raises unless rows can be copied
        return super().__reduce_ex__(protocol)

    def extra_repr(self) -> str:
        c = self.config
        return f"{c.num_embeddings}, {c.embedding_dim}, pooling={c.pooling!r}, dtype={self.weight.dtype}"

    def forward(self, *args: Any) -> Any:
        raise TypeError(f"table {self.config.name!r} is part of a collection; call the collection")


class DenseIndex:
    """Index of a table whose ids are row numbers, in this process; also the interface of indices."""

    assigns_rows = False  # whether ids get rows, which are looked up instead of them
    ids: Tensor | None = None  # int64 `[num_rows]`, id of each row; None if these are not known here
    clock = 0  # number of batches that were trained, or prefetched for training, if ids get rows
    generation = 0  # number of rows that were evicted or removed, or an upper bound
    epoch = 0  # number of times that all ids lost their rows
    counts: Tensor | None = None  # int `[num_rows]`, uses of each row, if these are counted

    def __init__(self, row_config: TableConfig) -> None:
        self.row_config = row_config  # of the memory that lookups and updates address, with rows instead of ids

    def sorted_rows(self) -> tuple[Tensor, Tensor] | None:
        """Return ids, ascending, and their rows, then fallback rows; None if ids are row numbers."""
        return None

    def to(self, device: torch.device) -> None:
        """Move to the device of the weight."""


class DeviceRows:
    """Rows of a table in its weight and states on the device; also the interface of rows in other memory.

    Methods get the table whose weight and states they allocate, read and write. `config` is the index's `row_config`.
    """

    is_cached = False  # whether the weight and states are slots of a cache
    is_pulled = False  # whether a batch pulls its rows from servers, which apply the optimizer
    store: Any = None  # of rows that the weight does not have

    def __init__(self, config: TableConfig, states: Sequence[StateSpec], is_dynamic: bool = False) -> None:
        self.config, self.states, self.is_dynamic = config, states, is_dynamic

    def allocate(self, table: Table, device: Device) -> None:
        """Allocate the weight and states; a dynamic table zeroes a row's states when it assigns the row."""
        table.allocate(self.config.num_embeddings, device, zeros=not self.is_dynamic)

    def reset(self, table: Table, seed: int | None = None) -> None:
        """See `Table.reset_parameters`; a dynamic table initializes a row when it assigns it."""
        config, weight = self.config, table.weight
        if self.is_dynamic or weight.device.type == "meta" or isinstance(weight, FakeTensor):
            return
        if config.init_function is None:
            seed = draw_seed() if seed is None else seed
            fill_initial_(weight, seed, config.bound, config.row_origin, config.column_origin)
        elif weight.dtype in TRAINABLE_DTYPES:
            config.init_function(weight)
        else:
            weight.copy_(draw_weight(config, weight.device))
        for state in table.buffers(recurse=False):
            state.zero_()

    def tensors(self, table: Table) -> dict[str, Tensor]:
        """See `Table.tensors`; of a dynamic table, the rows in their order."""
        return table.device_tensors()

    def assign(self, table: Table, tensors: Tensors) -> None:
        """See `Table.assign`."""
        for name, tensor in tensors.items():
            table.device_tensors()[name].copy_(tensor)

    def update(self, table: Table, function: Callable[[dict[str, Tensor]], None]) -> None:
        """Call a function that changes weight and states in place, for chunks of rows that depend on shapes only."""
        function(table.device_tensors())

    def fetch(self, table: Table) -> Table:
        """Return the table, or a copy without states of one whose rows are not in this process."""
        return table

    def blocks(self, table: Table, rows: Index = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield weights of distinct rows, all by default, in blocks, with their positions in `rows`."""
        weight, step = table.weight.detach(), max(1, BLOCK_ELEMENTS // self.config.embedding_dim)
        for first in range(0, len(weight) if rows is None else len(rows), step):
            at = slice(first, first + step)
            yield at, weight[at] if rows is None else self.read(table, rows[at], WEIGHT)["weight"]

    def read(self, table: Table, rows: Tensor, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Read weight and states of distinct rows, or those of these names; return copies by name."""
        tensors = table.device_tensors()
        return {name: tensors[name].index_select(0, rows.to(table.weight.device)) for name in names or tensors}

    def write(self, table: Table, rows: Tensor, values: Tensors, order: Index = None, ids: Index = None) -> None:
        """Write distinct rows from `values[order]`; tensors without values stay. `ids`: of the index by default."""
        rows = rows.to(table.weight.device)
        target = [table.weight.data if name == "weight" else table.get_buffer(name) for name in values]
        source = [value.to(memory).contiguous() for value, memory in zip(values.values(), target, strict=True)]
        move_rows_(target, source, rows, torch.arange(rows.numel(), device=rows.device) if order is None else order)

    def erase(self, table: Table, ids: Tensor) -> None:
        """Write zeros to the rows of distinct ids that are removed, if rows may be saved without their ids."""

    def row_state(self, table: Table, rows: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a dynamic table's `state_dict` that have the contents of rows."""
        return self.read(table, rows)

    def record_inserted(self, ids: Tensor, rows: Tensor) -> None:
        """Record the rows of new ids, -1 if refused; set to -1 those that are initialized later."""

    def reload(self) -> None:
        """Read rows again after a write to `tensors`."""

    def convert(self, table: Table, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
        """Implement `_apply`: states are moved only, not cast."""
        originals = dict(table._buffers)
        nn.Module._apply(table, fn, recurse)
        keep_dtypes(table._buffers, originals)

    def save(self, table: Table, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Implement `_save_to_state_dict`."""
        nn.Module._save_to_state_dict(table, destination, prefix, keep_vars)

    def load(self, table: Table, *args: Any) -> None:
        """Implement `_load_from_state_dict`."""
        weight = args[0].get(f"{args[1]}weight")
        if isinstance(weight, Tensor) and weight.dtype == torch.int8:
            args[-1].append(codes_error(table.config))
            return
        convert_assigned(table, *args)
        nn.Module._load_from_state_dict(table, *args)


class Lock:
    """A reentrant lock, which also orders streams. A copy of its owner gets a new lock.

    On a GPU a holder's stream waits for the streams of earlier holders and for recorded updates: a row that one holder
    frees may get initial values from the next one, on another stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.RLock()
        self.device = device
        self._events: dict[str, torch.cuda.Event] = {}

    def __enter__(self) -> None:
        self._lock.acquire()
        self.wait()

    def __exit__(self, *raised: object) -> None:
        try:
            self.record("holder")
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Make this thread's stream wait for earlier holders and updates."""
        if (stream := self._stream()) is not None:
            for event in tuple(self._events.values()):
                stream.wait_event(event)

    def record(self, kind: str = "update") -> None:
        """Make later holders wait for the work submitted to this thread's stream so far."""
        if (stream := self._stream()) is not None:
            self._events[kind] = stream.record_event()

    def _stream(self) -> torch.cuda.Stream | None:
        """Return this thread's stream; None on a CPU, or while the stream is being captured and runs nothing."""
        on_gpu = self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        return torch.cuda.current_stream(self.device) if on_gpu else None

    def __reduce__(self) -> Any:
        return Lock, (self.device,)
