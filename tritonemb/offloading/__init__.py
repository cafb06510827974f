"""Offload of dense layers: parameters, gradients, activations and optimizer states in host memory or on disk (NVMe)."""

from tritonemb.offloading.checkpoint import load_checkpoint, save_checkpoint
from tritonemb.offloading.estimate import Machine, OffloadEstimate, OffloadEstimates, estimate_offload
from tritonemb.offloading.hugging_face import trainer_optimizers
from tritonemb.offloading.optimizer import OffloadedOptimizer
from tritonemb.offloading.safetensors import load_safetensors
from tritonemb.offloading.setup import OffloadReport, close, gather_parameters, offload, report

__all__ = [
    "Machine", "OffloadEstimate", "OffloadEstimates", "OffloadReport", "OffloadedOptimizer", "close",
    "estimate_offload", "gather_parameters", "load_checkpoint", "load_safetensors", "offload", "report",
    "save_checkpoint", "trainer_optimizers",
]  # fmt: skip
