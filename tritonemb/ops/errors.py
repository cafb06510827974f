"""When what a GPU's kernels found wrong is told."""

from __future__ import annotations

import torch


def check_errors(device: torch.device | str | None = None) -> None:
    """Wait for `device` (default: the current CUDA device) and raise what its kernels have found wrong since.

    Lookups and updates on a GPU raise such findings by themselves, but at the next lookup or update. On the CPU they
    are raised at once, and there is nothing to wait for.

    Raises:
        ValueError: naming table, feature, sample, position and value of an id out of range; the table and row of a
            gradient that is not finite; or the feature and sample where offsets do not ascend.
    """
    chosen = torch.device("cuda" if device is None else device)
    if chosen.type != "cuda" or not torch.cuda.is_available():
        return
    from tritonemb.kernels.triton_utils import poll  # loads the compiler

    torch.cuda.synchronize(chosen)
    poll(torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index))
