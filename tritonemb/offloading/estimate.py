"""`te.estimate_offload`: bytes by tier and time per step of each setting, and which one fits the machine."""

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

ADAM_STATES = 8  # bytes per element: two fp32 states


@dataclass(frozen=True)
class Machine:
    """Resources of a rank: memory in bytes, rates in bytes and operations per second.

    Default rates are those of one H200, PCIe 5 and one NVMe drive; `detect` measures memory, not rates.
    """

    device: float
    host: float
    disk: float = 0.0
    flops: float = 400e12
    link: float = 40e9  # between device and host
    host_rate: float = 40e9  # of optimizer steps on the CPU: bytes of states, parameters and gradients read and written
    disk_read: float = 5e9
    disk_write: float = 3e9
    rated_writes: float = 3.5e15  # endurance of the drive, in bytes

    @classmethod
    def detect(cls, path: str | os.PathLike[str] | None = None, ranks: int = 1) -> "Machine":
        """Measure this machine, shared equally by `ranks`; without a GPU, device and host are the same memory."""
        gpu = torch.device("cuda") if torch.cuda.is_available() else None
        host = available_bytes(torch.device("cpu"))
        folders = [] if path is None else [Path(path).absolute(), *Path(path).absolute().parents]
        free = next((shutil.disk_usage(folder).free for folder in folders if folder.exists()), 0)
        return cls(available_bytes(gpu) if gpu is not None else host, host / ranks, free / ranks)


@dataclass(frozen=True)
class OffloadEstimate:
    """Cost of a setting per rank: bytes by tier, seconds per step, bytes written to disk per step.

    `days`: lifetime of a drive at its rated writes under continuous steps; infinite if nothing is written.
    """

    params: TierName
    states: TierName
    grads: TierName
    activations: TierName
    device: float
    host: float
    disk: float
    step: float
    written: float
    days: float
    fits: bool

    def __str__(self) -> str:
        wear = f", {self.written / 1e9:.1f} GB written, {self.days:,.0f} days" if self.written else ""
        return (
            f"params={self.params} states={self.states} grads={self.grads} activations={self.activations}: device "
            f"{self.device / 1e9:.2f} GB, host {self.host / 1e9:.2f} GB, disk {self.disk / 1e9:.2f} GB, "
            f"{self.step:.2f} s per step{wear}{'' if self.fits else ' (does not fit)'}"
        )


@dataclass(frozen=True)
class OffloadEstimates:
    """Estimates of all settings; those that fit come first, then the fastest. `best`: the first; None if none fits."""

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
    """Estimate memory per tier and time per step, on one of `world_size` ranks, for each setting of `te.offload`.

    With P parameters of b bytes per rank (ZeRO-Infinity, section 3): parameters P·b, gradients P·b, states P·s, plus
    4·P for fp32 master weights if b is 2. A step reads and writes the states once. It reads the parameters for the
    forward and the backward, and once more for the update if they are fp32 and on disk. Gradients on disk are written
    during the backward, and read for the update. Computation, which overlaps with transfers, takes 6 operations per
    parameter and token, 8 with activation checkpointing. Collectives of several ranks are not included.

    Args:
        model: a model, which may be on "meta", or a number of parameters.
        batch_tokens: samples, or tokens, per rank and step.
        state_bytes: bytes of optimizer states per parameter; 8 for Adam, 4 for SGD with momentum.
        dtype: of the parameters; by default that of the model, or bfloat16.
        activation_bytes: bytes that autograd saves per rank and step.
        working_bytes: device memory for offloaded parameters in use; by default twice the largest parameter's, or half
            of the device memory if that is less, as `te.offload` splits larger linear layers.
        budget: device memory per rank, in place of the machine's.
        machine: this machine by default.
        path: folder on the disk of this machine to measure.
    """
    if isinstance(model, int):
        total, itemsize, largest, largest_unsplit = model, (dtype or torch.bfloat16).itemsize, model // 100, 0
    else:
        parameters = list(model.parameters())
        total = sum(p.numel() for p in parameters)
        itemsize = dtype.itemsize if dtype else max((p.dtype.itemsize for p in parameters), default=4)
        largest = max((p.numel() for p in parameters), default=0)
        weights = {module.weight for module in model.modules() if type(module) is nn.Linear}
        largest_unsplit = max((p.numel() for p in parameters if p not in weights), default=0)
    if total < 1 or world_size < 1:
        raise ValueError(f"needs at least one parameter and one rank, got {total:,} and {world_size}")
    machine = machine or Machine.detect(path, world_size)
    device_limit = machine.device if budget is None else float(parse_bytes(budget))
    rank_parameters = total / world_size
    parameter_bytes = rank_parameters * itemsize
    working = max(min(2.0 * largest * itemsize, device_limit / 2), 2.0 * largest_unsplit * itemsize)
    working = working if working_bytes is None else working_bytes
    compute = (8 if activation_bytes else 6) * total * batch_tokens / machine.flops
    estimates = []
    for params, states_tier, grads, activations_tier in product(*[get_args(TierName)] * 4):
        on_device = params == states_tier == "device"  # otherwise a GPU's gradients are in host memory
        if (activations_tier != "device" and not activation_bytes) or (grads == "device" and not on_device):
            continue
        # Bytes by tier: parameters, gradients, states, activations, arena and buffers.
        is_moved = machine.device != machine.host and (params == "device") != (states_tier == "device")
        states = rank_parameters * (state_bytes + 4 * (itemsize == 2 or is_moved))  # with master weights
        tier_bytes = dict.fromkeys(get_args(TierName), 0.0)
        tier_bytes[params] += parameter_bytes
        tier_bytes[grads] += parameter_bytes
        tier_bytes[states_tier] += states
        tier_bytes[activations_tier] += activation_bytes
        tier_bytes["device"] += working if params != "device" else 0.0
        buffers = 3 * min(states, (16 << 20) * (state_bytes + 4))
        tier_bytes["host"] += buffers if "disk" in (params, states_tier, grads) else 0.0
        # Traffic of forward and backward: over the link to the device, and to and from the disk.
        fetched = 2 * parameter_bytes if params != "device" else 0.0
        link = fetched + (2 * parameter_bytes if states_tier != "device" or grads != "device" else 0.0)
        link += 2 * activation_bytes * (activations_tier != "device")
        written = parameter_bytes * (grads == "disk") + activation_bytes * (activations_tier == "disk")
        read = fetched * (params == "disk") + activation_bytes * (activations_tier == "disk")
        transfer = read / machine.disk_read + written / machine.disk_write
        # Of the update, on the CPU if states are off the device.
        update = (2 * states + 3 * parameter_bytes) / machine.host_rate if states_tier != "device" else 0.0
        disk_written = states * (states_tier == "disk") + parameter_bytes * (params == "disk")
        disk_read = disk_written - parameter_bytes * (params == "disk" and itemsize == 2)
        disk_read += parameter_bytes * (grads == "disk")
        # Time: forward and backward overlap with their transfers, the update with its I/O.
        step = max(compute, link / machine.link, transfer)
        step += max(update, disk_read / machine.disk_read + disk_written / machine.disk_write)
        disk_written += written
        days = machine.rated_writes / disk_written * step / 86_400 if disk_written else math.inf
        shared_memory = machine.device == machine.host  # without a GPU
        fits = tier_bytes["device"] + shared_memory * tier_bytes["host"] <= device_limit
        fits = fits and tier_bytes["host"] <= machine.host and tier_bytes["disk"] <= machine.disk
        fields: Any = {**tier_bytes, "step": step, "written": disk_written, "days": days, "fits": fits}
        estimates.append(OffloadEstimate(params, states_tier, grads, activations_tier, **fields))
    estimates.sort(key=lambda estimate: (not estimate.fits, estimate.step, estimate.disk, estimate.host))
    return OffloadEstimates(total, tuple(estimates))
