"""Signals, devices by name, and the versions that a run ran on."""

from __future__ import annotations

import functools
import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import FrameType

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PACKAGES = ("tritonemb", "torch", "triton", "numba", "numpy", "pyarrow", "torchmetrics")


class Interrupted(Exception):
    """Training ended at a signal's request; `exit_status` is what a process reports for it: 130 or 143."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"training was interrupted by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_status(self) -> int:
        return 128 + self.signum


class StopRequest:
    """The signal that has arrived, if one has."""

    signum: int | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Note the first SIGINT or SIGTERM while the block runs; a second one acts as usual, at once.

    Outside the main thread, where Python lets nobody handle signals, nothing is noted.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # Whoever started this process may have it ignore a signal: it keeps ignoring it.
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

    def note(signum: int, frame: FrameType | None) -> None:
        request.signum = signum
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: it does not exist, or torch cannot use it.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def versions(device: torch.device | None = None) -> dict[str, str]:
    """Versions of Python and of the packages that decide results, the platform, and the device if one is given."""
    found = {"python": platform.python_version(), **_packages()}
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
