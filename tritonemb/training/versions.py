"""What a run ran on: for its report, its checkpoints and `tritonemb doctor`."""

from __future__ import annotations

import functools
import platform
from importlib import metadata

import torch

import tritonemb

PACKAGES = ("torch", "triton", "numba", "numpy", "pyarrow", "torchmetrics")


def versions(device: torch.device | None = None) -> dict[str, str]:
    """Versions of Python and of the packages that decide results, the platform, and the device if one is given."""
    found = {"python": platform.python_version(), "tritonemb": tritonemb.__version__, **_packages()}
    found["platform"] = platform.platform()
    if device is not None:
        found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
        found["threads"] = str(torch.get_num_threads())
    return found


@functools.cache
def _packages() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


@functools.cache
def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
