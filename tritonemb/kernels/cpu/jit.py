"""How CPU kernels are compiled: Numba, without the GIL, cached on disk.

Numba's own cache looks at one source file only, so a kernel would stay stale when a helper in another file changes.
Here the cache's folder is named after a hash of all kernel sources, and of the files whose constants are compiled in.
`TRITONEMB_CACHE_DIR` moves it.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numba
from numba.core import caching, codegen

_log = logging.getLogger(__name__)
_finished: list[float] = []  # seconds that each kernel compiled by this process took
_tasks: set[str] = set()  # names of functions that are `called`
_Library = codegen.CPUCodeLibrary
_optimize = _Library._optimize_final_module
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def cache_dir() -> Path:
    """The user's cache folder for tritonemb."""
    if given := os.environ.get("TRITONEMB_CACHE_DIR"):
        return Path(given)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tritonemb"


@functools.cache
def _kernel_cache_dir() -> Path:
    digest = hashlib.sha256(f"{numba.__version__} {sys.version}".encode())
    here, kernels, package = Path(__file__).parents[:3]
    for source in (*sorted(here.glob("*.py")), kernels / "layout.py", package / "optimizers.py"):
        digest.update(source.read_bytes())
    folder = cache_dir() / "kernels" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:  # a read-only home: compiled kernels last as long as the machine's temporary files
        folder = Path(tempfile.gettempdir()) / f"tritonemb-{_user()}" / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


class _Locator(caching._CacheLocator):
    """Finds a kernel's cache by the content of the kernels, not by a file's time stamp."""

    def __init__(self, py_func: Callable[..., Any]) -> None:
        self._name = py_func.__qualname__

    def get_cache_path(self) -> str:
        return str(_kernel_cache_dir())

    def get_source_stamp(self) -> str:
        return self._name

    def get_disambiguator(self) -> str:
        return ""

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func)


class _CacheImpl(caching.CompileResultCacheImpl):
    _locator_classes: ClassVar = [_Locator]


class _KernelCache(caching.FunctionCache):
    _impl_class = _CacheImpl


@contextmanager
def _compiling(kernel: str, name: str) -> Iterator[None]:
    """Log that a kernel is compiled, and save time. Numba calls this with its lock held, for kernels not in the cache.

    Numba optimizes every function by itself and again inside each of its callers. Here only the kernel `name` and its
    tasks are, which hold all that they call. (The kernel alone, once, leaves loops over 16-bit rows unvectorized.)
    """
    done = f"{len(_finished)} done in {sum(_finished):.0f} s, kept in {cache_dir()}"
    _log.info("compiling the CPU kernel %s (first use on this machine; %s)", kernel, done)

    def optimize(library: Any) -> None:
        if library.name == name or library.name in _tasks:
            _optimize(library)

    before, start, collects = _Library._optimize_final_module, time.perf_counter(), gc.isenabled()
    gc.disable()  # the compiler makes many objects: every collection would go through all of torch's
    _Library._optimize_final_module = optimize
    try:
        yield
    finally:
        _Library._optimize_final_module = before
        if collects:
            gc.enable()
        _finished.append(time.perf_counter() - start)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a kernel, called from Python, at its first call."""
    dispatcher = numba.njit(**_OPTIONS)(function)
    dispatcher._cache = _KernelCache(dispatcher.py_func)
    kernel = f"{function.__module__.rpartition('.')[2]}.{function.__name__.lstrip('_')}"
    dispatcher._compiler.compile = _compiling(kernel, function.__qualname__)(dispatcher._compiler.compile)
    return dispatcher


def called(function: Callable[..., Any]) -> Any:
    """Compile a part of kernels that only kernels call: without what Python would need, which takes time to compile."""
    _tasks.add(function.__qualname__)
    return numba.njit(**_OPTIONS, no_cpython_wrapper=True)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Likewise, and always inline it: arrays are passed in pieces, so a call costs more than a short row."""
    return numba.njit(**_OPTIONS, no_cpython_wrapper=True, forceinline=True)(function)
