"""Checkpoints of a run: atomic writing, checks and reading, by one process or by several ranks."""

from tritonemb.training.checkpoint.folder import CheckpointFolder, RunFolder
from tritonemb.training.checkpoint.reader import load_tensors, read_manifest, stored_tensors
from tritonemb.training.ranks import CheckpointError

__all__ = ["CheckpointError", "CheckpointFolder", "RunFolder", "load_tensors", "read_manifest", "stored_tensors"]
