"""What `tritonemb doctor` prints: versions, devices, kernels and why, and whether a training step is right."""

from __future__ import annotations

import torch

from tritonemb.nn.doctor import TOLERANCE, check_step, serving
from tritonemb.training.utils import check_device, versions


def examine(device: str | None = None) -> tuple[str, bool]:
    """The text, and whether all is well.

    Args:
        device: look at this one only; the CPU and every GPU if not given.

    Raises:
        ValueError: there is no such device.
    """
    devices = [check_device(device)] if device is not None else _devices()
    lines = ["versions", *_columns(list(versions().items()))]
    healthy = True
    for each in devices:
        details = versions(each)
        lines += ["", f"{each}: {details['device']}, {details['threads']} threads on the CPU"]
        lines += _columns([(op, name, reason) for op, name, reason in serving(each)])
        verdict, good = _verdict(each)
        lines.append(f"  {verdict}")
        healthy &= good
    if not torch.cuda.is_available():
        lines += ["", f"no GPU: torch {torch.__version__} sees no CUDA device"]
    lines += ["", "all is well" if healthy else "something is wrong: see above"]
    return "\n".join(lines), healthy


def _verdict(device: torch.device) -> tuple[str, bool]:
    try:
        difference = check_step(device)
    except Exception as error:  # whatever is broken: to say so is what this is for
        return f"a training step FAILS: {type(error).__name__}: {error}", False
    if difference <= TOLERANCE:
        return f"a training step agrees with the reference (largest difference {difference:.1e})", True
    return f"a training step is WRONG: it differs from the reference by {difference:.1e}", False


def _devices() -> list[torch.device]:
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *gpus]


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
