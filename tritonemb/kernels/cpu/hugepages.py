"""Tables in huge pages: rows are read at random, and with 4 KiB pages each read also misses the address translation.

Linux only, and only advice: where the kernel does not grant huge pages, memory is as it was.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes, on x86-64 and on arm64 with 4 KiB pages


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages behind a new CPU tensor that has not been written to yet."""
    size = tensor.numel() * tensor.element_size()
    madvise = _madvise()
    if madvise is None or tensor.device.type != "cpu" or size < 2 * HUGE_PAGE:
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + size) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(begin, end - begin, mmap.MADV_HUGEPAGE)
