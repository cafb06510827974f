"""Helpers shared by all Triton kernels.

- Import and launch of Triton kernels. Without a Triton wheel kernels import as plain functions and references serve.
- Small constant arrays on the device, such as table addresses: one launch reads any number of separate tables, in
  pinned host memory too (unified addressing).
- Floats by address: 8 and 16 bit floats are loaded as integers, then widened and narrowed by hand, exactly, and alike
  on every target (sm_80 has no e4m3, the interpreter no bfloat16). Sums in one fixed order. Fields of `Layout.tables`.
- The error word: asynchronous error reports of kernels, without a host synchronization. The first report takes a lock
  on the device and writes one record into pinned host memory; later ones are dropped until it has been raised. The host
  reads that memory at every lookup and update, and raises; `check_errors` synchronizes with the device first.
"""

import functools
import importlib
import inspect
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb import errors
from tritonemb.layout import TABLE_SIZE, Layout, unpack_names


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


triton: Any = _import("triton")
tl: Any = _import("triton.language") or SimpleNamespace(constexpr=int)  # all that modules of kernels evaluate at import


def jit(function: Any = None, *, varying: Sequence[str] = ()) -> Any:
    """Compile a kernel or a device function with Triton; parameters in capitals are constants of the compilation.

    Integers named in `varying` change from batch to batch. They are not specialised on, so that a new batch size
    triggers no compilation. Nor is the divisibility by 16 of the number of tables or keys. Integers in a tuple all are.
    """
    if function is None:
        return functools.partial(jit, varying=varying)
    if triton is None:
        return function
    constants = dict.fromkeys(filter(str.isupper, inspect.signature(function).parameters), tl.constexpr)
    function.__annotations__.update(constants)
    kernel = triton.jit(
        function, do_not_specialize=list(varying) or None, do_not_specialize_on_alignment=["num_tables", "num_keys"]
    )
    if interpreting():  # the interpreter has a function of its own, from the source
        kernel.rewrite().__annotations__.update(constants)
    return kernel


MAX_REGISTERS = 128  # per thread; without a limit ptxas keeps to few, and sinks loads down to their first use
RESIDENT_WARPS = 65_536 // (32 * MAX_REGISTERS)  # per multiprocessor, limited by its register file
launch_recorder: Callable[..., None] | None = None  # set by ahead-of-time compilation, which records launches
_lanes = 64 if torch.version.hip else 32
_compiled: dict[tuple[Any, ...], Any] = {}  # kernels by specialisation key: Triton's own look-up is slow


def interpreting() -> bool:
    """Return whether Triton kernels run in its interpreter, on CPU tensors (`TRITON_INTERPRET=1`, read at import)."""
    return triton is not None and os.environ.get("TRITON_INTERPRET", "0") == "1"


def launch(kernel: Any, grid: Sequence[int], *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """Run `kernel` over `grid` on its tensors' device; arguments may be tuples of tensors and numbers."""
    if launch_recorder is not None:
        launch_recorder(kernel, args, constants, num_warps)
        return
    if 0 in grid:
        return
    # The key has all that Triton specialises on: dtypes, alignment by 16, ones, and integers beyond 32 bits.
    values = [value for arg in args for value in (arg if isinstance(arg, tuple) else (arg,))]
    device = next(value.device for value in values if isinstance(value, Tensor))
    key: list[Any] = [kernel, num_warps, device.index, *constants.values()]
    for arg in values:
        if isinstance(arg, Tensor):
            key += arg.dtype, arg.data_ptr() % 16 == 0
        elif isinstance(arg, int):
            key += arg == 1, arg % 16 == 0, arg >= 2**31
        else:
            key.append(type(arg))
    with _current(device):
        compiled = _compiled.get(tuple(key))
        if compiled is not None:
            compiled[*grid, 1, 1](*args, *(constants[name] for name in kernel.arg_names[len(args) :]))
            return
        options = compiler_options(num_warps, not torch.version.hip)
        compiled = kernel[tuple(grid)](*args, **options, **constants)
        if compiled is not None:  # not interpreted
            _compiled[tuple(key)] = compiled


def compiler_options(num_warps: int, nvidia: bool) -> dict[str, Any]:
    """Options without fused multiply-adds, so that results are reproducible; a register limit for NVIDIA's only."""
    return {"num_warps": num_warps, "enable_fp_fusion": False} | ({"maxnreg": MAX_REGISTERS} if nvidia else {})


def _current(device: torch.device) -> AbstractContextManager[object]:
    is_current = device.type != "cuda" or torch.cuda.current_device() == device.index
    return nullcontext() if is_current else torch.cuda.device(device)


def lanes() -> int:
    """Threads per warp: 32, or 64 on AMD's processors."""
    return _lanes


def num_programs(device: torch.device, num_warps: int) -> int:
    """Number of programs of `num_warps` warps that are resident at once on a device, for persistent kernels."""
    if device.type != "cuda":
        return 3  # interpreted: few, but more than one
    programs_per_processor = max(1, RESIDENT_WARPS // num_warps)
    return torch.cuda.get_device_properties(device).multi_processor_count * programs_per_processor


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`, for value ≥ 1."""
    return 1 << (value - 1).bit_length()


MAX_UPLOADS = 1024
_Upload = tuple[Tensor, torch.cuda.Stream | None, torch.cuda.Event | None]  # tensor, upload stream, upload event
_uploads: OrderedDict[tuple[torch.device, torch.dtype, tuple[float, ...]], _Upload] = OrderedDict()
_captured_uploads: list[Tensor] = []  # never freed: captured graphs read them
_lock = threading.Lock()


def on_device(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return recurring numbers, such as addresses, as a tensor on `device`; cached, and uploaded asynchronously."""
    key = (device, dtype, tuple(numbers))
    with _lock, _current(device):
        stream = torch.cuda.current_stream() if device.type == "cuda" else None
        upload = _uploads.get(key)
        if stream is not None and torch.cuda.is_current_stream_capturing():
            if upload is None:
                # A graph must not copy from host memory that may be reused before a replay; fills are kernel arguments.
                return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
            _captured_uploads.append(upload[0])
            return upload[0]
        if upload is None:
            with torch.inference_mode(False):  # it outlives the mode of the first call
                tensor = torch.tensor(key[2], dtype=dtype)
                if stream is not None:
                    tensor = tensor.pin_memory().to(device, non_blocking=True)
            upload = _uploads[key] = tensor, stream, stream.record_event() if stream is not None else None
            if len(_uploads) > MAX_UPLOADS:
                _uploads.popitem(last=False)
        _uploads.move_to_end(key)

        tensor, upload_stream, upload_event = upload
        if stream is not None and upload_event is not None and upload_stream != stream:
            stream.wait_event(upload_event)
            tensor.record_stream(stream)
        return tensor


def alignment_of(tensors: Sequence[Tensor], dims: Iterable[int] = ()) -> int:
    """Return the largest power of two ≤ 16 that divides all row addresses and `dims`, in bytes."""
    item_size = tensors[0].element_size()
    sizes = [tensor.shape[-1] * item_size for tensor in tensors] + [dim * item_size for dim in dims]
    return math.gcd(16, *sizes, *(tensor.data_ptr() for tensor in tensors))


class TablesOfDtype(NamedTuple):
    """Tables of one dtype, which one launch serves."""

    dtype: torch.dtype
    addresses: tuple[int, ...]  # of all tables; 0 for those of other dtypes
    row_alignment: int  # of the rows of these tables, in bytes
    alignment: int  # the same, if the columns of an output of all tables are aligned to it as well
    max_dim: int

    bits: int = 0  # per column, of quantized tables

    @property
    def constants(self) -> dict[str, int]:
        """Constants of kernels: code of the dtype, alignment in bytes, and in elements."""
        if self.bits:
            return {"CODE": -self.bits, "ALIGN": self.row_alignment, "STEP": self.alignment}
        return {"CODE": CODES[self.dtype], "ALIGN": self.alignment, "STEP": self.alignment // self.dtype.itemsize}


def by_dtype(weights: Sequence[Tensor]) -> list[TablesOfDtype]:
    assert all(weight.is_contiguous() for weight in weights)
    dims, groups = [weight.shape[1] for weight in weights], []
    for dtype in dict.fromkeys(weight.dtype for weight in weights):
        tables = [weight for weight in weights if weight.dtype == dtype]
        addresses = tuple(weight.data_ptr() if weight.dtype == dtype else 0 for weight in weights)
        max_dim = max(weight.shape[1] for weight in tables)
        groups.append(TablesOfDtype(dtype, addresses, alignment_of(tables), alignment_of(tables, dims), max_dim))
    return groups


def dims_of(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple({weight.shape[1] for weight in weights})


FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 = (tl.constexpr(code) for code in range(5))
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
CODES = {dtype: code for code, dtype in enumerate(_FLOATS)}


@jit
def pointer_to(address, CODE, ALIGN):
    """Cast an integer address to a pointer to floats of kind CODE, or to the integers that hold their bits."""
    if CODE == FLOAT32:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif CODE == FLOAT16:
        pointer = address.to(tl.pointer_type(tl.float16))
    elif CODE == BFLOAT16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, ALIGN)


@jit
def widen(bits, CODE):
    """Convert elements loaded by `pointer_to` to float32, exactly."""
    if CODE == FLOAT32:
        return bits
    elif CODE == FLOAT16:
        return bits.to(tl.float32)
    elif CODE == BFLOAT16:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif CODE == FLOAT8_E5M2:
        return (bits.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        # As float16 bits the exponent is 8 too small; a multiplication mends it, for subnormal values too.
        magnitude = bits.to(tl.int16) & 0x7F
        value = (magnitude << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where(magnitude == 0x7F, float("nan"), value)
        return tl.where((bits & 0x80) != 0, -value, value)


@jit
def narrow(values, CODE):
    """Convert float32 to elements that `pointer_to` stores: to nearest, ties to even; finite values stay finite."""
    if CODE == FLOAT32:
        return values
    elif CODE == FLOAT16:
        finite = tl.abs(values) < float("inf")
        return tl.where(finite, tl.minimum(tl.maximum(values, -65504.0), 65504.0), values).to(tl.float16)
    elif CODE == FLOAT8_E4M3:
        return _narrow8(values, 3, 7, 0x7E, 0x7F)
    elif CODE == FLOAT8_E5M2:
        return _narrow8(values, 2, 15, 0x7B, 0x7C)
    else:
        bits = values.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        rounded = magnitude + 0x7FFF + ((magnitude >> 16) & 1)
        rounded = tl.where(magnitude < 0x7F800000, tl.minimum(rounded, 0x7F7FFFFF), rounded)
        rounded = tl.where(magnitude > 0x7F800000, 0x7FC00000, tl.where(magnitude == 0x7F800000, magnitude, rounded))
        # The sign is joined after the shift: before it, LLVM fails on gfx942 for freshly loaded vectors of floats.
        return ((rounded >> 16) | ((bits >> 16) & 0x8000)).to(tl.int16)


@jit
def _narrow8(values, MANTISSA, BIAS, LARGEST, INFINITE):
    """Convert float32 to 8-bit floats of MANTISSA bits and exponent bias BIAS, in integers; NaN is 0x7F."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    normal = (magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)) >> DROPPED
    normal -= (127 - BIAS) << MANTISSA
    # Subnormal results are multiples of the last place of 2^SHIFT: adding 2^SHIFT rounds to them.
    SHIFT: tl.constexpr = 24 - BIAS - MANTISSA
    subnormal = (tl.abs(values) + (1 << SHIFT)).to(tl.int32, bitcast=True) - ((127 + SHIFT) << 23)

    code = tl.minimum(tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal), LARGEST)
    code = tl.where(magnitude < 0x7F800000, code, tl.where(magnitude == 0x7F800000, INFINITE, 0x7F))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def row_sum(x):
    """Sum each row of `x` `[ROWS, SIZE]` pairwise: neighbours, then neighbouring sums, so that the order is fixed.

    `tl.sum` over two elements has only one order, and lanes exchange them; `tl.split` would send all to every lane.
    """
    if x.shape[1] == 1:
        return tl.reshape(x, (x.shape[0],))
    else:
        return row_sum(tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2))


@jit
def last_at_most(ascending, count, targets, stride=1):
    """Binary search: the index of the last of `count` ascending values, `stride` apart, that is ≤ each target, or 0."""
    low = (targets * 0).to(tl.int32)
    high = low + count
    size = tl.full((), 0, tl.int32) + count
    while size > 0:  # as many steps as `count` has bits
        middle = low + (high - low) // 2  # low + high may exceed 32 bits
        value = tl.load(ascending + middle * stride, mask=middle < high, other=0)
        go_right = (middle < high) & (value <= targets)
        low, high = tl.where(go_right, middle + 1, low), tl.where(go_right, high, middle)
        size = size // 2
    return tl.maximum(low - 1, 0)


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size, to copy bits


def computed(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, but float32 for bfloat16 in the interpreter, which treats bfloat16 as integers and truncates."""
    return torch.float32 if interpreting() and dtype == torch.bfloat16 else dtype


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor as contiguous, in its `computed` dtype."""
    return tensor.to(computed(tensor.dtype)).contiguous()


def bits_of(tensor: Tensor) -> Tensor:
    """Return the tensor as kernels take it: 8-bit floats and bfloat16 viewed as integers."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16)
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


_SIZE = tl.constexpr(TABLE_SIZE)
FIRST_ROW, NUM_ROWS, ROW_DIM, SEED, ROW_ORIGIN, COLUMN_ORIGIN, ROW_IDS, ROW_IDS_STRIDE = map(
    tl.constexpr, range(TABLE_SIZE)
)


@jit
def table_of(tables, num_tables, linear):
    """Return the table that each linear row belongs to."""
    return last_at_most(tables, num_tables, linear, _SIZE)


@jit
def field_at(tables, table, FIELD):
    """Return pointers to one field of the `TableRow` of each table."""
    return tables + table.to(tl.int32) * _SIZE + FIELD  # a 64-bit product would cost registers


@jit
def row_id(tables, table, row, mask):
    """Return the table row that each physical row holds: its entry in ROW_IDS, or itself without them."""
    row_ids = tl.load(field_at(tables, table, ROW_IDS), mask=mask, other=0)
    stride = tl.load(field_at(tables, table, ROW_IDS_STRIDE), mask=mask, other=0)
    ids = tl.load(row_ids.to(tl.pointer_type(tl.int64)) + row * stride, mask=row_ids != 0, other=0)
    return tl.where(row_ids != 0, ids, row)


@jit
def mix(ids):
    """Hash 64-bit ids; the same function as `layout.mix64`."""
    mixed = ids.to(tl.uint64)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return (mixed ^ (mixed >> 31)).to(tl.int64)


BAD_ID, BAD_OFFSETS, BAD_GRADIENT, BAD_FIRST_OFFSET, BAD_LAST_OFFSET = (tl.constexpr(kind) for kind in range(1, 6))
_FIELDS = 9  # kind, names, position or row, value, table or last offset, key, sample, valid rows; note of skipped rows
NOTE = tl.constexpr(8)  # field of the note: names << 32 | table + 1 if rows were skipped, else 0
_names: list[tuple[str, str]] = []
_polling = threading.Lock()


@jit
def report(errors, kind, fields):
    """Write an error record, if it is the first. `fields`: position, value, table, key, sample and number of rows."""
    lock, record, names = errors
    if tl.atomic_cas(lock, 0, 1) == 0:
        tl.store(record + 1, tl.load(names))
        for field in tl.static_range(6):
            tl.store(record + 2 + field, fields[field])
        tl.store(record, kind)


@jit
def note_skipped(errors, table, mask):
    """Note a table with skipped rows, of which the host warns when it polls; the last writer wins."""
    _, record, names = errors
    tl.store(record + NOTE + tl.zeros_like(table), (tl.load(names) << 32) + table + 1, mask=mask)


@functools.cache
def _number(table_names: str, feature_names: str) -> int:
    _names.append((table_names, feature_names))
    return len(_names) - 1


@functools.cache
def error_word(device: torch.device) -> tuple[Tensor, Tensor, Any]:
    """Return the error word of a device: a lock, int32 `[1]`, and a record, int64 `[9]` in pinned host memory.

    The third is the record as a NumPy array, whose elements the host reads faster.
    """
    with torch.inference_mode(False):  # it outlives the mode of the first call
        lock = torch.zeros(1, dtype=torch.int32, device=device)
        record = torch.zeros(_FIELDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        return lock, record, record.numpy()


def error_args(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return `errors` of `report`: lock, record, and int64 `[1]`, the number of the layout's names."""
    return *error_word(device)[:2], on_device([_number(layout.table_names, layout.feature_names)], device)


def poll(device: torch.device) -> None:
    """Raise the first error that kernels have reported, and warn of skipped rows, without waiting for running ones."""
    lock, record, fields = error_word(device)
    if not fields[0]:
        if note := int(fields[NOTE]):
            fields[NOTE] = 0
            errors.warn_of_skipped_rows(unpack_names(_names[note >> 32][0])[(note & 0xFFFFFFFF) - 1])
        return
    with _polling:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        kind, names, position, value, table, key, sample, rows, _ = record.tolist()
        if kind == 0:  # another thread has just raised it
            return
        record.zero_()
        lock.zero_()

    table_names, feature_names = map(unpack_names, _names[names])
    if kind == BAD_ID:
        raise errors.id_out_of_range(table_names[table], feature_names[key], sample, position, value, rows)
    if kind == BAD_FIRST_OFFSET:
        raise errors.offsets_do_not_start_at_zero(position)
    if kind == BAD_LAST_OFFSET:
        raise errors.offsets_do_not_end_with_values(value, rows)
    if kind == BAD_OFFSETS:
        raise errors.offsets_do_not_ascend(feature_names[key], sample, position, value, rows)
    raise errors.gradient_not_finite(table_names[table], position)
