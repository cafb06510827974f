"""`te.estimate_offload`: bytes by tier, time of a step, and which setting fits this machine."""

import math
import os
import shutil
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from tritonemb.offloading.setup import available_bytes, parse_bytes
from tritonemb.offloading.tiers import TierName

ADAM_STATES = 8  # bytes of two fp32 states of an element


@dataclass(frozen=True)
class Machine:
    """What a rank has: bytes, and bytes and operations a second.

    Rates are those of one H200, PCIe 5 and one NVMe drive unless they are given; `here` measures memory, not rates.
    """

    device: float
    host: float
    disk: float = 0.0
    flops: float = 400e12
    link: float = 40e9  # between device and host
    host_rate: float = 40e9  # at which the CPU steps: bytes of states, parameters and gradients read and written
    disk_read: float = 5e9
    disk_write: float = 3e9
    rated_writes: float = 3.5e15  # of the drive, in bytes

    @classmethod
    def here(cls, path: str | os.PathLike[str] | None = None, ranks: int = 1) -> "Machine":
        """This machine, of which so many ranks have equal parts; without a GPU device and host are the same memory."""
        gpu = torch.device("cuda") if torch.cuda.is_available() else None
        host = available_bytes(torch.device("cpu"))
        folders = [] if path is None else [Path(path).absolute(), *Path(path).absolute().parents]
        free = next((shutil.disk_usage(folder).free for folder in folders if folder.exists()), 0)
        return cls(available_bytes(gpu) if gpu is not None else host, host / ranks, free / ranks)


@dataclass(frozen=True)
class OffloadEstimate:
    """What a setting needs on each rank: bytes by tier, seconds of a step, bytes written to the disk a step.

    `days` is how long a drive lasts at its rated writes if it steps without a pause; infinite if nothing is written.
    """

    params: TierName
    states: TierName
    activations: TierName
    device: float
    host: float
    disk: float
    step: float
    written: float
    days: float
    fits: bool

    def __str__(self) -> str:
        last = f", {self.written / 1e9:.1f} GB written, {self.days:,.0f} days" if self.written else ""
        return (
            f"params={self.params} states={self.states} activations={self.activations}: device "
            f"{self.device / 1e9:.2f} GB, host {self.host / 1e9:.2f} GB, disk {self.disk / 1e9:.2f} GB, "
            f"{self.step:.2f} s a step{last}{'' if self.fits else ' (does not fit)'}"
        )


@dataclass(frozen=True)
class OffloadEstimates:
    """All settings, those that fit and are fast first; `best` is the first, None if none fits."""

    parameters: int
    settings: tuple[OffloadEstimate, ...] = field(repr=False)

    @property
    def best(self) -> OffloadEstimate | None:
        return self.settings[0] if self.settings and self.settings[0].fits else None

    def __str__(self) -> str:
        return "\n".join([f"{self.parameters:,} parameters", *map(str, self.settings)])


def estimate_offload(
    model: nn.Module | int, world_size: int = 1, *, batch_tokens: int = 1, state_bytes: int = ADAM_STATES,
    dtype: torch.dtype | None = None, activation_bytes: float = 0.0, working_bytes: float | None = None,
    budget: int | str | None = None, machine: Machine | None = None, path: str | os.PathLike[str] | None = None,
) -> OffloadEstimates:  # fmt: skip
    """What each setting of `te.offload` needs on one of `world_size` ranks, and how long a step takes.

    With P parameters of b bytes on a rank (ZeRO-Infinity, section 3): parameters P·b, gradients P·b, states P·s and 4·P
    more for fp32 master weights if b is 2. A step reads and writes the states once, and reads the parameters for the
    forward and the backward, and once more for the step if they are fp32 and on disk; 6 operations a parameter and
    token are computed meanwhile, 8 with checkpointing.

    Args:
        model: a model, which may be on "meta", or a number of parameters.
        batch_tokens: samples, or tokens, of a rank and step, that each parameter is used for.
        state_bytes: of the optimizer's states of a parameter; 8 for Adam, 4 for SGD with momentum.
        dtype: of the parameters; that of the model, or bfloat16.
        activation_bytes: that autograd saves on a rank in a step.
        working_bytes: device memory for parameters in use, where they are offloaded; twice the largest layer's if not
            given.
        budget: device memory of a rank, instead of the machine's.
        machine: this machine if not given.
        path: folder on the disk that this machine would use.
    """
    if isinstance(model, int):
        total, item, largest = model, (dtype or torch.bfloat16).itemsize, model // 100
    else:
        parameters = list(model.parameters())
        total = sum(p.numel() for p in parameters)
        item = (dtype or max((p.dtype for p in parameters), key=lambda d: d.itemsize, default=torch.float32)).itemsize
        largest = max((p.numel() for p in parameters), default=0)
    if total < 1 or world_size < 1:
        raise ValueError(f"there must be parameters and ranks, got {total:,} and {world_size}")
    has = machine or Machine.here(path, world_size)
    most = has.device if budget is None else float(parse_bytes(budget))
    own = total / world_size
    values = own * item
    working = working_bytes if working_bytes is not None else 2.0 * largest * item
    compute = (8 if activation_bytes else 6) * total * batch_tokens / has.flops
    found = []
    for tiers in product(*[get_args(TierName)] * 3):
        params, of_states, of_activations = tiers
        if of_activations != "device" and not activation_bytes:
            continue
        states = own * (state_bytes + 4 * (item == 2))
        room = dict.fromkeys(get_args(TierName), 0.0)
        room[params] += values
        room["device" if params == of_states == "device" else "host"] += values  # gradients
        room[of_states] += states
        room[of_activations] += activation_bytes
        room["device"] += working if params != "device" else 0.0
        buffers = 3 * min(states, (16 << 20) * (state_bytes + 4))
        room["host"] += buffers if of_states == "disk" else 0.0
        fetched = 2 * values if params != "device" else 0.0
        written = states * (of_states == "disk") + values * (params == "disk")
        read = written - values * (params == "disk" and item == 2)  # in the step
        link = fetched + (2 * values if of_states != "device" else 0.0)
        link += 2 * activation_bytes * (of_activations != "device")
        update = (2 * states + 3 * values) / has.host_rate if of_states != "device" else 0.0
        step = max(compute, link / has.link, fetched / has.disk_read * (params == "disk"))
        step += max(update, read / has.disk_read + written / has.disk_write)
        written += activation_bytes * (of_activations == "disk")
        days = has.rated_writes / written * step / 86_400 if written else math.inf
        same = has.device == has.host  # without a GPU
        fits = room["device"] + same * room["host"] <= most and room["host"] <= has.host and room["disk"] <= has.disk
        needs: Any = {**room, "step": step, "written": written, "days": days, "fits": fits}
        found.append(OffloadEstimate(*tiers, **needs))
    found.sort(key=lambda each: (not each.fits, each.step, each.disk, each.host))
    return OffloadEstimates(total, tuple(found))
