"""Memory of CPU tensors: their bytes in files and messages, huge pages, pinned memory, and a pool for results.

glibc maps a new region for every allocation of 32 MiB and more. Each of its pages then faults and is zeroed, which
takes longer than looking rows up. So the block of a large result returns to a pool when the result is freed, for the
next one. Idle and used blocks together never exceed the peak of the used ones.
"""

import ctypes
import math
import mmap
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes, on x86-64 and on arm64 with 4 KiB pages
MIN_REUSED_BYTES = 32 << 20  # size from which glibc maps each allocation anew
PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister: pinned for all GPUs, and mapped into their address spaces
DTYPES: dict[str, torch.dtype] = {  # of tensors in files and messages
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TensorSpan = tuple[slice, torch.dtype, Sequence[int]]  # bytes, dtype and shape of a tensor among others
_idle: dict[int, Tensor] = {}  # blocks by address, the longest idle first
_used: dict[int, Tensor] = {}
_peak_used = 0  # bytes


def bytes_of(tensor: Tensor) -> np.ndarray:
    """View the bytes of a contiguous CPU tensor, or copy those of another one, uint8 `[num_bytes]`."""
    flat = tensor.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy()  # a single element may have any stride


def describe_tensors(tensors: Iterable[Tensor]) -> list[tuple[str, list[int]]]:
    """Return names of dtypes, and shapes, for JSON."""
    return [(_NAMES[tensor.dtype], list(tensor.shape)) for tensor in tensors]


def tensor_spans(dtypes_and_shapes: Iterable[tuple[str, Sequence[int]]], alignment: int = 1) -> list[TensorSpan]:
    """Return the spans of described tensors whose bytes follow each other, each at a multiple of `alignment`."""
    spans, end = list[TensorSpan](), 0
    for name, shape in dtypes_and_shapes:
        begin, dtype = -(-end // alignment) * alignment, DTYPES[name]
        end = begin + math.prod(shape) * dtype.itemsize
        spans.append((slice(begin, end), dtype, shape))
    return spans


def view_tensors(data: Tensor, spans: Iterable[TensorSpan]) -> list[Tensor]:
    """View tensors in their bytes, uint8 and aligned to 8; copy those whose span is not aligned to their dtype."""
    views = []
    for span, dtype, shape in spans:
        part = data[span]
        views.append((part.clone() if part.storage_offset() % dtype.itemsize else part).view(dtype).view(shape))
    return views


def concat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate rows of tensors; parts of one tensor that follow each other are viewed, not copied."""
    parts = [tensor for tensor in tensors if tensor.numel()] or [*tensors[:1]]
    first, num_rows, end = parts[0], 0, parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return torch.cat(parts)
        num_rows, end = num_rows + part.shape[0], end + part.nbytes
    if first.untyped_storage().data_ptr() != parts[-1].untyped_storage().data_ptr():
        return torch.cat(parts)
    return first.as_strided((num_rows, *first.shape[1:]), first.stride())


def advise_huge_pages(tensor: Tensor) -> Tensor:
    """Request huge pages for a new CPU tensor that has not been written to yet; return the tensor.

    With 4 KiB pages, a random row also misses the TLB. Linux only; the kernel may grant none.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE") or tensor.device.type != "cpu" or tensor.nbytes < 2 * HUGE_PAGE:
        return tensor
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_HUGEPAGE))
    return tensor


def empty_pinned(num_bytes: int, gpu: torch.device) -> Tensor:
    """Allocate uint8 `[num_bytes]`, pinned for GPUs; freed after its last reference and the work queued on `gpu`.

    PyTorch's own allocator rounds a size up to a power of two. Raise OSError or RuntimeError if allocation fails.
    """
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # page-aligned
    block.madvise(mmap.MADV_DONTFORK)  # a forked child would copy pinned pages
    array = np.frombuffer(block, np.uint8)
    tensor = advise_huge_pages(torch.from_numpy(array))
    _register("cudaHostRegister", gpu, tensor.data_ptr(), num_bytes, PORTABLE_AND_MAPPED)
    weakref.finalize(array, _register, "cudaHostUnregister", gpu, tensor.data_ptr()).atexit = False
    return tensor


def _register(call: str, gpu: torch.device, *args: int) -> None:
    with torch.cuda.device(gpu):
        torch.cuda.synchronize(gpu)  # queued kernels may still use the memory
        cudart = torch.cuda.cudart()
        failure = getattr(cudart, call)(*args)
    if int(failure) != 0:
        raise RuntimeError(f"{call}: {cudart.cudaGetErrorString(failure)}")


def empty_result(size: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Allocate a result like `torch.empty`; a large one on the CPU reuses an idle block of up to 5/4 of its size."""
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes < MIN_REUSED_BYTES or torch.device(device).type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    # Take the most recently used idle block that fits, or allocate one.
    max_bytes = num_bytes * 5 // 4
    fitting = [address for address, block in reversed([*_idle.items()]) if num_bytes <= block.nbytes <= max_bytes]
    blocks = (_idle.pop(address, None) for address in fitting)  # None: another thread took it first
    block = next((block for block in blocks if block is not None), None)
    if block is None:
        block = advise_huge_pages(torch.empty(-(-num_bytes // HUGE_PAGE) * HUGE_PAGE, dtype=torch.uint8, device="cpu"))
    _move(block, _idle, _used)
    # The array lives as long as the result's storage; the block then returns to the pool.
    array = block.numpy()[:num_bytes]
    weakref.finalize(array, _move, block, _used, _idle).atexit = False
    result = torch.empty(0, dtype=dtype, device="cpu")
    return result.set_(torch.from_numpy(array).untyped_storage(), 0, size)  # type: ignore[call-overload]


def _move(block: Tensor, source: dict[int, Tensor], target: dict[int, Tensor]) -> None:
    """Move a block to `target`, and free idle blocks beyond the peak. Takes no lock: a finalizer may run anywhere."""
    global _peak_used
    source.pop(block.data_ptr(), None)
    target[block.data_ptr()] = block
    used = sum(block.nbytes for block in [*_used.values()])
    _peak_used = max(_peak_used, used)
    idle = sum(block.nbytes for block in [*_idle.values()])
    for address, block in [*_idle.items()]:
        if idle + used <= _peak_used:
            break
        _idle.pop(address, None)
        idle -= block.nbytes
