"""`te.estimate_offload`: what offloading needs of each tier."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tritonemb as te
from tests.offloading.models import mlp


def test_what_offloading_needs_is_estimated(tmp_path: Path):
    machine = te.offloading.Machine(device=80e9, host=3e12, disk=28e12)
    options = {"activation_bytes": 1e9, "batch_tokens": 4_096}
    best = te.estimate_offload(10**12, machine=machine, **options).best
    assert (best.params, best.states, best.grads) == ("host", "disk", "disk"), "parameters are read twice"
    assert 2e12 <= best.host <= 3e12
    assert best.disk + best.host >= 16e12, "16 bytes a parameter are somewhere"
    assert te.estimate_offload(10**13, machine=machine).best is None
    # More and less host memory: for gradients, too, or not for parameters either.
    larger, smaller = (
        te.estimate_offload(10**12, machine=replace(machine, host=host), **options).best for host in (5e12, 1.5e12)
    )
    assert (larger.params, larger.grads, smaller.params, smaller.grads) == ("host", "host", "disk", "disk")
    assert best.written - larger.written == smaller.written - best.written == 2e12
    assert smaller.step > best.step > larger.step
    small = te.estimate_offload(mlp(), path=tmp_path)
    assert small.best.params == small.best.states == "device"
    assert f"{sum(p.numel() for p in mlp().parameters()):,} parameters" in str(small)
    disk = next(setting for setting in small.settings if (setting.params, setting.states) == ("device", "disk"))
    assert disk.disk == disk.written == 8 * small.parameters
    with pytest.raises(ValueError, match="at least one parameter and one rank"):
        te.estimate_offload(nn.ReLU())
    # One tier of two on the device: master weights of fp32 parameters, and buffers of parameters on disk.
    settings = te.estimate_offload(10**6, dtype=torch.float32, machine=machine).settings
    by_tier = {(s.params, s.states): s for s in settings if s.grads == s.params and s.activations == "device"}
    assert by_tier["host", "host"].host == (4 + 4 + 8) * 1e6
    states = next(s for s in settings if (s.params, s.states, s.grads) == ("device", "host", "host"))
    assert states.host == (4 + 8 + 4) * 1e6
    assert by_tier["disk", "device"].host == 3 * 12e6
    # Layers that do not fit: linear ones are split, and others are not.
    machine = te.offloading.Machine(device=1e6, host=1e9)
    with torch.device("meta"):
        linear, embedding = nn.Linear(1_000, 1_000), nn.Embedding(1_000, 1_000)
    assert te.estimate_offload(linear, machine=machine).best.device == 0.5e6
    assert te.estimate_offload(embedding, machine=machine).best is None


def test_the_models_of_the_paper_fit():
    """1 T parameters on one GPU, and 32 T on 512, of 32 GB, with 1.5 TB of memory and 28 TB of NVMe per 16 GPUs."""
    one = te.offloading.Machine(32e9, 1.5e12, 28e12)
    node = te.offloading.Machine(32e9, 1.5e12 / 16, 28e12 / 16)
    for machine, parameters, ranks, activations in ((one, 10**12, 1, 54e9), (node, 32 * 10**12, 512, 268e9)):
        estimates = te.estimate_offload(parameters, ranks, machine=machine, activation_bytes=activations)
        assert estimates.best.grads == estimates.best.states == "disk"
        assert not any(setting.fits for setting in estimates.settings if setting.grads == "host")
