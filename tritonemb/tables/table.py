"""A table of a collection: its weight and its optimizer states, under their names in `state_dict`; its lock."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from tritonemb.memory import advise_huge_pages
from tritonemb.ops.registry import kernel
from tritonemb.ops.row_update import fill_initial_
from tritonemb.optimizers import StateSpec
from tritonemb.types import TRAINABLE_DTYPES, Device, TableConfig


def draw_seed() -> int:
    """Draw a table's seed, 63 bits, from torch's generator."""
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64))


def new_weight(num_rows: int, embedding_dim: int, device: Device, dtype: torch.dtype | None) -> Tensor:
    """Return an uninitialized weight, in huge pages where the system has them."""
    return advise_huge_pages(torch.empty(num_rows, embedding_dim, dtype=dtype, device=device))


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
    """Restore the dtypes of buffers after a module's `_apply`, which casts the weight only; zero buffers from meta."""
    for name, buffer in buffers.items():
        original = originals[name]
        if buffer is None or original is None:
            continue
        if original.is_meta and not buffer.is_meta:
            buffers[name] = torch.zeros_like(original, device=buffer.device)
        elif buffer.dtype != original.dtype:
            buffers[name] = original.to(buffer.device)


def load_named_tensors(
    names: Iterable[str], load: Callable[[dict[str, Tensor]], None], state_dict: Any, prefix: str, *args: Any
) -> None:
    """Implement `_load_from_state_dict` by one call of `load` with all named tensors; report its ValueError."""
    _, strict, missing_keys, unexpected_keys, error_msgs = args
    keys = {prefix + name: name for name in names}
    missing = [key for key in keys if key not in state_dict]
    missing_keys += missing
    if strict:
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in keys]
    if not missing:
        try:
            load({name: state_dict[key] for key, name in keys.items()})
        except ValueError as error:
            error_msgs.append(str(error))


def initialize(tables: Sequence[Any], states: Sequence[str], ids: Tensor, rows: Tensor, numbers: Tensor) -> None:
    """Write initial values and zero states to rows of the tables with these numbers; negative rows are skipped."""
    kernel("initialize_rows_", rows.device)(
        [table.weight.detach() for table in tables],
        [table.get_buffer(name) for name in states for table in tables],
        [(table.seed, table.config.bound) for table in tables], ids, rows, numbers,
    )  # fmt: skip


class Table(nn.Module):
    """Table with a weight `[num_rows, embedding_dim]` and float32 states, `[num_rows]` or of the weight's shape.

    `num_rows` are on the device, `num_embeddings` by default.
    """

    seed: int  # of the initial values of a dynamic table
    zeroes_states = True  # at construction; a dynamic table zeroes a row's states when it assigns the row

    def __init__(
        self, config: TableConfig, states: tuple[StateSpec, ...], device: Device = None, num_rows: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self._allocate(self.row_config.num_embeddings if num_rows is None else num_rows, states, device)
        self.reset_parameters()

    def _allocate(self, num_rows: int, states: tuple[StateSpec, ...], device: Device) -> None:
        config = self.config
        weight = new_weight(num_rows, config.embedding_dim, device, config.dtype)
        self.weight = nn.Parameter(weight, requires_grad=weight.dtype in TRAINABLE_DTYPES)
        for name, state in new_states(weight, states, self.zeroes_states).items():
            self.register_buffer(name, state)

    @property
    def row_config(self) -> TableConfig:
        """Config of the memory that lookups and updates address; of a dynamic table, its rows instead of its ids."""
        return self.config

    def row_ids(self) -> Tensor | None:
        """Return the id of each row of `weight`, int64 `[num_rows]`, or None where ids are row numbers."""
        return None

    def initial_values(self, ids: Tensor) -> Tensor:
        """Return the initial values of ids of a dynamic table, `[N, embedding_dim]`."""
        values = torch.empty(ids.numel(), self.config.embedding_dim, dtype=self.config.dtype, device=ids.device)
        fill_initial_(values, self.seed, self.config.bound, rows=ids)
        return values

    def tensors(self) -> dict[str, Tensor]:
        """Return weight and states by name."""
        states = {name: state for name, state in self._buffers.items() if state is not None}
        return {"weight": self.weight.detach(), **states}

    def update_records(self, function: Callable[[dict[str, Tensor]], None]) -> None:
        """Call a function that changes weight and states in place."""
        function(self.tensors())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the weight according to the config, and states to zero."""
        if self.weight.device.type == "meta" or isinstance(self.weight, FakeTensor):
            return
        if self.config.init is None:
            fill_initial_(self.weight, draw_seed(), self.config.bound)
        elif self.weight.dtype in TRAINABLE_DTYPES:
            self.config.init(self.weight)
        else:
            weight = torch.empty_like(self.weight, dtype=torch.float32)
            self.config.init(weight)
            self.weight.copy_(weight)
        for state in self.buffers(recurse=False):
            state.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        originals = dict(self._buffers)
        super()._apply(fn, recurse)
        keep_dtypes(self._buffers, originals)
        return self

    def extra_repr(self) -> str:
        c = self.config
        return f"{c.num_embeddings}, {c.embedding_dim}, pooling={c.pooling!r}, dtype={self.weight.dtype}"

    def forward(self, *args: Any) -> Any:
        raise TypeError(f"table {self.config.name!r} is part of a collection; call the collection")


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
