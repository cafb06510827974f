"""Devices by name."""

from __future__ import annotations

import torch


def check_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: it is not there, or torch cannot use it.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device
