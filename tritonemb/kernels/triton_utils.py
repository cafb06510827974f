"""What all Triton kernels share.

- Triton and the launch of every kernel. Where it has no wheel, kernels import as plain functions; references serve.
- Numbers that recur, such as tables' addresses, on the device: one launch reads any number of separate tables, in
  pinned host memory too (unified addressing).
- Floats by address: 8 and 16 bit floats travel as integers and are widened and narrowed by hand, exactly, and alike on
  every target (sm_80 has no e4m3, the interpreter no bfloat16). Sums with one order. Fields of `Layout.tables`.
- The error word: what a kernel on a GPU found wrong, without making the host wait. The first finding takes a lock on
  the device and writes one record into pinned host memory; later ones are dropped until it has been raised. The host
  reads that memory at every lookup and update, and raises; `check_errors` waits for the device first.
"""

import functools
import importlib
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
tl: Any = _import("triton.language") or SimpleNamespace(constexpr=int)  # what kernels name outside their bodies


def jit(function: Any = None, *, varying: Sequence[str] = ()) -> Any:
    """Mark a kernel, or a function of kernels.

    Integers named in `varying` change from batch to batch: they are not specialised on, so that a batch of another size
    compiles nothing. Nor does it matter whether 16 divides the number of tables or keys.
    """
    if triton is None:
        return function or (lambda kernel: kernel)
    return triton.jit(
        function, do_not_specialize=list(varying) or None, do_not_specialize_on_alignment=["num_tables", "num_keys"]
    )


MAX_REGISTERS = 128  # a thread; where none are given ptxas keeps to few, and moves loads down to where they are used
RESIDENT_WARPS = 65_536 // (32 * MAX_REGISTERS)  # of a processor, all of whose registers they have
instead_of_launching: Callable[..., None] | None = None  # compilation ahead of time only notes launches
_lanes = 64 if torch.version.hip else 32
_compiled: dict[tuple[Any, ...], Any] = {}  # kernels by all that Triton specialises a launch on, which it asks slowly


def interpreting() -> bool:
    """Whether Triton kernels run through its interpreter, on CPU tensors (`TRITON_INTERPRET=1`, read at import)."""
    return triton is not None and os.environ.get("TRITON_INTERPRET", "0") == "1"


def launch(kernel: Any, grid: Sequence[int], *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """Run `kernel` over `grid` on its tensors' device."""
    if instead_of_launching is not None:
        instead_of_launching(kernel, args, constants, num_warps)
        return
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    key: list[Any] = [kernel, num_warps, device.index, *constants.values()]
    for arg in (*args[0], *args[1:]) if isinstance(args[0], tuple) else args:  # several may come first, by name
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
    """No fused multiply-adds: bits depend on no compiler. Only NVIDIA's takes a number of registers."""
    return {"num_warps": num_warps, "enable_fp_fusion": False} | ({"maxnreg": MAX_REGISTERS} if nvidia else {})


def _current(device: torch.device) -> AbstractContextManager[object]:
    here = device.type != "cuda" or torch.cuda.current_device() == device.index
    return nullcontext() if here else torch.cuda.device(device)


def lanes() -> int:
    """Threads of a warp: 32, or 64 on AMD's processors."""
    return _lanes


def num_programs(device: torch.device, num_warps: int) -> int:
    """How many programs of so many warps a device holds at once: each takes its share of the work in a loop."""
    if device.type != "cuda":
        return 3  # interpreted: few, but more than one
    resident = max(1, RESIDENT_WARPS // num_warps)
    return torch.cuda.get_device_properties(device).multi_processor_count * resident


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`, for value ≥ 1."""
    return 1 << (value - 1).bit_length()


KEPT = 1024
_Upload = tuple[Tensor, torch.cuda.Stream | None, torch.cuda.Event | None]  # by a stream, which is then done
_kept: OrderedDict[tuple[torch.device, torch.dtype, tuple[float, ...]], _Upload] = OrderedDict()
_in_graphs: list[Tensor] = []  # a captured graph reads them as long as it lives
_lock = threading.Lock()


def on_device(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers that recur, such as addresses, as a tensor on `device`: uploaded once, without waiting for it."""
    key = (device, dtype, tuple(numbers))
    with _lock, _current(device):
        stream = torch.cuda.current_stream() if device.type == "cuda" else None
        upload = _kept.get(key)
        if stream is not None and torch.cuda.is_current_stream_capturing():
            if upload is None:
                # A graph must not copy from host memory that may be reused before a replay: its kernels hold them.
                return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
            _in_graphs.append(upload[0])
            return upload[0]
        if upload is None:
            with torch.inference_mode(False):  # it outlives the mode it is first asked for in
                tensor = torch.tensor(key[2], dtype=dtype)
                if stream is not None:
                    tensor = tensor.pin_memory().to(device, non_blocking=True)
            upload = _kept[key] = tensor, stream, stream.record_event() if stream is not None else None
            if len(_kept) > KEPT:
                _kept.popitem(last=False)
        _kept.move_to_end(key)
        tensor, uploader, done = upload
        if stream is not None and done is not None and uploader != stream:
            stream.wait_event(done)
            tensor.record_stream(stream)
        return tensor


def alignment_of(tensors: Sequence[Tensor], dims: Iterable[int] = ()) -> int:
    """The largest power of two, up to 16, that divides the addresses of all rows, and multiples of `dims`, in bytes."""
    item_size = tensors[0].element_size()
    sizes = [tensor.shape[-1] * item_size for tensor in tensors] + [dim * item_size for dim in dims]
    return math.gcd(16, *sizes, *(tensor.data_ptr() for tensor in tensors))


class TablesOfDtype(NamedTuple):
    """The tables of one dtype."""

    dtype: torch.dtype
    addresses: tuple[int, ...]  # by table; 0 for those of other dtypes
    row_alignment: int  # of all their rows, in bytes
    alignment: int  # of any columns of an output of all tables, too
    max_dim: int


def by_dtype(weights: Sequence[Tensor]) -> list[TablesOfDtype]:
    """The tables of each dtype."""
    assert all(weight.is_contiguous() for weight in weights)
    dims, found = [weight.shape[1] for weight in weights], []
    for dtype in dict.fromkeys(weight.dtype for weight in weights):
        mine = [weight for weight in weights if weight.dtype == dtype]
        addresses = tuple(weight.data_ptr() if weight.dtype == dtype else 0 for weight in weights)
        max_dim = max(weight.shape[1] for weight in mine)
        found.append(TablesOfDtype(dtype, addresses, alignment_of(mine), alignment_of(mine, dims), max_dim))
    return found


def dims_of(weights: Sequence[Tensor]) -> tuple[int, ...]:
    """The different dims of tables."""
    return tuple({weight.shape[1] for weight in weights})


def pointers_to(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The address of each."""
    return tuple(map(Tensor.data_ptr, tensors))


FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 = (tl.constexpr(code) for code in range(5))
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
CODES = {dtype: code for code, dtype in enumerate(_FLOATS)}


@jit
def pointer_to(address, CODE: tl.constexpr, ALIGN: tl.constexpr):
    """An integer address as a pointer to floats of kind CODE, or to the integers that hold their bits."""
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
def widen(bits, CODE: tl.constexpr):
    """What `pointer_to` loads, as float32: exact."""
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
def narrow(values, CODE: tl.constexpr):
    """float32 to what `pointer_to` stores: to nearest, ties to even; finite values stay finite."""
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
        # Joined before it is shifted, LLVM cannot compile it for gfx942 where vectors of floats were just loaded.
        return ((rounded >> 16) | ((bits >> 16) & 0x8000)).to(tl.int16)


@jit
def _narrow8(values, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, INFINITE: tl.constexpr):
    """float32 to 8 bits with MANTISSA bits of mantissa and that BIAS of exponent, in integers; NaN is 0x7F."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    normal = (magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)) >> DROPPED
    normal -= (127 - BIAS) << MANTISSA
    # Subnormal results are multiples of the last place of 2^SHIFT: adding it rounds to them.
    SHIFT: tl.constexpr = 24 - BIAS - MANTISSA
    subnormal = (tl.abs(values) + (1 << SHIFT)).to(tl.int32, bitcast=True) - ((127 + SHIFT) << 23)
    code = tl.minimum(tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal), LARGEST)
    code = tl.where(magnitude < 0x7F800000, code, tl.where(magnitude == 0x7F800000, INFINITE, 0x7F))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def row_sum(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Sum of each row of `x` `[ROWS, SIZE]`: neighbours in pairs, then pairs of sums, so that its order is fixed.

    Two at a time `tl.sum` has but one order, and lanes exchange them; `tl.split` would give all of them to every lane.
    """
    if SIZE == 1:
        return tl.reshape(x, (ROWS,))
    else:
        return row_sum(tl.sum(tl.reshape(x, (ROWS, SIZE // 2, 2)), 2), ROWS, SIZE // 2)


@jit
def last_at_most(ascending, count, wanted, stride=1):
    """For each of `wanted`, the last of `count` ascending values, `stride` apart, that is not above it; at least 0."""
    low = (wanted * 0).to(tl.int32)
    high = low + count
    size = tl.full((), 0, tl.int32) + count
    while size > 0:  # as many steps as `count` has bits
        middle = low + (high - low) // 2  # the sum of both may be too large for 32 bits
        value = tl.load(ascending + middle * stride, mask=middle < high, other=0)
        up = (middle < high) & (value <= wanted)
        low, high = tl.where(up, middle + 1, low), tl.where(up, high, middle)
        size = size // 2
    return tl.maximum(low - 1, 0)


def row_sum_by_torch(x: Tensor) -> Tensor:
    """Sum over the last dimension with the order of `row_sum`: `[..., D]` to `[..., 1]`."""
    x = torch.nn.functional.pad(x, (0, next_power_of_2(x.shape[-1]) - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: for what is only moved


def computed(dtype: torch.dtype) -> torch.dtype:
    """float32 instead of bfloat16 for the interpreter, which takes bfloat16 for integers and truncates."""
    return torch.float32 if interpreting() and dtype == torch.bfloat16 else dtype


def readable(tensor: Tensor) -> Tensor:
    """Contiguous, of the dtype that it is `computed` in."""
    return tensor.to(computed(tensor.dtype)).contiguous()


def bits_of(tensor: Tensor) -> Tensor:
    """The tensor as kernels take it: 8 and bfloat16 as the integers that hold their bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16)
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


_SIZE = tl.constexpr(TABLE_SIZE)
FIRST_ROW, NUM_ROWS, ROW_DIM, SEED, ROW_ORIGIN, COLUMN_ORIGIN, ROW_IDS, ROW_IDS_STRIDE = map(
    tl.constexpr, range(TABLE_SIZE)
)


@jit
def table_of(tables, num_tables, linear):
    """The table that each linear row belongs to."""
    return last_at_most(tables, num_tables, linear, _SIZE)


@jit
def field_at(tables, table, FIELD: tl.constexpr):
    """Pointers to one field of tables' `TableRow`s."""
    return tables + table.to(tl.int32) * _SIZE + FIELD  # a product of 64 bits would cost registers


@jit
def row_id(tables, table, row, mask):
    """The row of its table that each row of the memory holds."""
    row_ids = tl.load(field_at(tables, table, ROW_IDS), mask=mask, other=0)
    stride = tl.load(field_at(tables, table, ROW_IDS_STRIDE), mask=mask, other=0)
    found = tl.load(row_ids.to(tl.pointer_type(tl.int64)) + row * stride, mask=row_ids != 0, other=0)
    return tl.where(row_ids != 0, found, row)


@jit
def mix(ids):
    """`layout.mix64`."""
    mixed = ids.to(tl.uint64)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return (mixed ^ (mixed >> 31)).to(tl.int64)


BAD_ID, BAD_OFFSETS, BAD_GRADIENT, BAD_FIRST_OFFSET, BAD_LAST_OFFSET = (tl.constexpr(kind) for kind in range(1, 6))
_ID, _OFFSETS, _GRADIENT, _FIRST_OFFSET, _LAST_OFFSET = range(1, 6)
_FIELDS = 9  # kind, names, position or row, value, table or last offset, key, sample, valid rows; a note
_NOTE = 8  # its place: names << 32 | table + 1 where rows were skipped, else 0
SKIPPED_ROWS = tl.constexpr(_NOTE)
_names: list[tuple[str, str]] = []
_polling = threading.Lock()


@jit
def report(lock, record, kind, names, where, value, table, key, sample, rows):
    """Write a finding, if it is the first. `names` points to the number of the layout's names."""
    if tl.atomic_cas(lock, 0, 1) == 0:
        tl.store(record + 1, tl.load(names))
        tl.store(record + 2, where)
        tl.store(record + 3, value)
        tl.store(record + 4, table)
        tl.store(record + 5, key)
        tl.store(record + 6, sample)
        tl.store(record + 7, rows)
        tl.store(record, kind)


@jit
def note_skipped(record, names, table, mask):
    """Write that rows of a table were skipped, of the last program that says so: the host warns when it reads that."""
    note = (tl.load(names) << 32) + table + 1
    tl.store(record + SKIPPED_ROWS + tl.zeros_like(table), note, mask=mask)


@functools.cache
def _number(table_names: str, feature_names: str) -> int:
    _names.append((table_names, feature_names))
    return len(_names) - 1


@functools.cache
def error_word(device: torch.device) -> tuple[Tensor, Tensor, Any]:
    """The one error word of a device: a lock, int32 `[1]`, and a record, int64 `[9]` in pinned host memory.

    The record is also an array, whose elements take the host less time to read.
    """
    with torch.inference_mode(False):  # it outlives whatever mode it is first asked for in
        lock = torch.zeros(1, dtype=torch.int32, device=device)
        record = torch.zeros(_FIELDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        return lock, record, record.numpy()


def error_args(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What `report` takes: lock, record, and int64 `[1]` by which the host finds the layout's names again."""
    return *error_word(device)[:2], on_device([_number(layout.table_names, layout.feature_names)], device)


def poll(device: torch.device) -> None:
    """Raise what kernels have reported so far, and warn of skipped rows, without waiting for those that still run."""
    lock, record, fields = error_word(device)
    if not fields[0]:
        if note := int(fields[_NOTE]):
            fields[_NOTE] = 0
            errors.warn_of_skipped_rows(unpack_names(_names[note >> 32][0])[(note & 0xFFFFFFFF) - 1])
        return
    with _polling:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        kind, names, where, value, table, key, sample, rows, _ = record.tolist()
        if kind == 0:  # another thread has just raised it
            return
        record.zero_()
        lock.zero_()
    table_names, feature_names = map(unpack_names, _names[names])
    if kind == _ID:
        raise errors.id_out_of_range(table_names[table], feature_names[key], sample, where, value, rows)
    if kind == _FIRST_OFFSET:
        raise errors.offsets_do_not_start_at_zero(where)
    if kind == _LAST_OFFSET:
        raise errors.offsets_do_not_end_with_values(value, rows)
    if kind == _OFFSETS:
        raise errors.offsets_do_not_ascend(feature_names[key], sample, where, value, rows)
    raise errors.gradient_not_finite(table_names[table], where)
