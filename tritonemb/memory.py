"""Memory of large CPU tensors: huge pages, pinned memory, and results that reuse the memory of earlier ones.

glibc maps every allocation of 32 MiB and more anew. Each of its pages is then a fault and is cleared first, which takes
longer than looking rows up. So the memory of a large result is kept when nothing uses it any longer, for the next one.
What is kept and what is in use are together never more than was in use at once before.
"""

import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes, on x86-64 and on arm64 with 4 KiB pages
MIN_REUSED_BYTES = 32 << 20  # of a result whose memory is kept
PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister: for all GPUs, which read and write it by themselves
_idle: dict[int, Tensor] = {}  # by address, kept the longest first
_used: dict[int, Tensor] = {}
_most_used = 0  # bytes


def advise_huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages behind a new CPU tensor that has not been written to yet; returns it.

    With pages of 4 KiB, a random row also misses the address translation. Linux only; the kernel may grant none.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE") or tensor.device.type != "cpu" or tensor.nbytes < 2 * HUGE_PAGE:
        return tensor
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_HUGEPAGE))
    return tensor


def empty_pinned(num_bytes: int, gpu: torch.device) -> Tensor:
    """uint8 `[num_bytes]`, pinned for GPUs; the memory is freed when nothing refers to it and `gpu` has done its work.

    PyTorch's own allocator rounds a size up to a power of two. OSError or RuntimeError if it cannot be had.
    """
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # whole pages
    block.madvise(mmap.MADV_DONTFORK)  # a fork would copy pages that are pinned
    array = np.frombuffer(block, np.uint8)
    tensor = advise_huge_pages(torch.from_numpy(array))
    _register("cudaHostRegister", gpu, tensor.data_ptr(), num_bytes, PORTABLE_AND_MAPPED)
    weakref.finalize(array, _register, "cudaHostUnregister", gpu, tensor.data_ptr()).atexit = False
    return tensor


def _register(call: str, gpu: torch.device, *args: int) -> None:
    with torch.cuda.device(gpu):
        torch.cuda.synchronize(gpu)  # it may still use what is to be freed
        cudart = torch.cuda.cudart()
        failure = getattr(cudart, call)(*args)
    if int(failure) != 0:
        raise RuntimeError(f"{call}: {cudart.cudaGetErrorString(failure)}")


def empty_result(size: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """`torch.empty` for a result, in the memory of an earlier one if it is large, on the CPU and of about its size."""
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes < MIN_REUSED_BYTES or (device is not None and device.type != "cpu"):
        return torch.empty(size, dtype=dtype, device=device)
    most = num_bytes * 5 // 4
    fitting = [address for address, block in reversed([*_idle.items()]) if num_bytes <= block.nbytes <= most]
    found = (_idle.pop(address, None) for address in fitting)  # another thread may have been faster
    block = next((block for block in found if block is not None), None)
    if block is None:
        block = advise_huge_pages(torch.empty(-(-num_bytes // HUGE_PAGE) * HUGE_PAGE, dtype=torch.uint8))
    _keep(block, _used, _idle)
    array = block.numpy()[:num_bytes]  # lives as long as the result's storage
    weakref.finalize(array, _keep, block, _idle, _used).atexit = False
    return torch.empty(0, dtype=dtype).set_(torch.from_numpy(array).untyped_storage(), 0, size)  # type: ignore[call-overload]


def _keep(block: Tensor, here: dict[int, Tensor], not_there: dict[int, Tensor]) -> None:
    """Without a lock: the collector may call this anywhere."""
    global _most_used
    not_there.pop(block.data_ptr(), None)
    here[block.data_ptr()] = block
    used = sum(block.nbytes for block in [*_used.values()])
    _most_used = max(_most_used, used)
    idle = sum(block.nbytes for block in [*_idle.values()])
    for address, block in [*_idle.items()]:
        if idle + used <= _most_used:
            break
        _idle.pop(address, None)
        idle -= block.nbytes
