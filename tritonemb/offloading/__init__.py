"""Parameters, gradients, activations and optimizer states of dense layers in host memory and on disk (NVMe)."""

from tritonemb.offloading.checkpoint import load_checkpoint, save_checkpoint
from tritonemb.offloading.offload import gather_parameters, offload
from tritonemb.offloading.optimizer import OffloadedOptimizer

__all__ = ["OffloadedOptimizer", "gather_parameters", "load_checkpoint", "offload", "save_checkpoint"]
