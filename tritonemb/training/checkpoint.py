"""Checkpoints of a run, by the names that the rest of the package uses."""

from tritonemb.training.checkpoints.background import AsyncSave, Saved
from tritonemb.training.checkpoints.folder import CheckpointFolder
from tritonemb.training.checkpoints.manifest import FORMAT, MANIFEST
from tritonemb.training.checkpoints.options import CheckpointError, CheckpointOptions
from tritonemb.training.checkpoints.reading import load_tensors, read_manifest, stored_tensors

__all__ = [
    "FORMAT",
    "MANIFEST",
    "AsyncSave",
    "CheckpointError",
    "CheckpointFolder",
    "CheckpointOptions",
    "Saved",
    "load_tensors",
    "read_manifest",
    "stored_tensors",
]
