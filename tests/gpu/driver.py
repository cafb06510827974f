"""Triton's CUDA driver over `driver_stub.c`, where there is no GPU.

Kernels are compiled for sm_90 and launched by Triton's own C launchers, on CPU tensors, and nothing is computed. The
tools for a GPU do so where the variable `REHEARSE` is 1.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path

import torch

REHEARSE = "TRITONEMB_REHEARSE"
FOLDER = Path("build/driver-stub")


def rehearsing() -> bool:
    """Whether this process launches into the stub."""
    return os.environ.get(REHEARSE, "0") == "1"


@functools.cache
def activate() -> ctypes.CDLL:
    """Let Triton launch into the stub from now on; its library, which counts `launches`.

    RuntimeError without a C compiler, which Triton's launchers need too.
    """
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    library, source = FOLDER.absolute() / "libcuda.so.1", Path(__file__).with_suffix(".c").with_stem("driver_stub")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler, which builds Triton's launchers and the driver stub: install gcc, or set CC")
    library.parent.mkdir(parents=True, exist_ok=True)
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        part = library.with_name(f"{os.getpid()}.part")
        include = Path(next(iter(nvidia.__path__))) / "include"
        command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{include}", "-o", part, source]
        subprocess.run(command, check=True)
        part.replace(library)
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    class Driver(CudaDriver):
        """As on an H100, but for tensors, which are the CPU's."""

        def __init__(self) -> None:
            super().__init__()
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: 0
            self.set_current_device = lambda device: None
            self.get_device_capability = lambda device: (9, 0)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Driver())
    return loaded


def num_launches() -> int:
    """Launches into the stub so far."""
    return ctypes.c_long.in_dll(activate(), "launches").value
