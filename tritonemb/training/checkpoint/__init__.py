"""Checkpoints of a run: written aside and renamed, checked and read, by one process or by several ranks."""

from tritonemb.training.checkpoint.async_save import AsyncSave, WrittenCheckpoint
from tritonemb.training.checkpoint.dcp import load_tensors, read_manifest, stored_tensors
from tritonemb.training.checkpoint.files import FORMAT, MANIFEST, CheckpointError
from tritonemb.training.checkpoint.folder import CheckpointFolder, CheckpointOptions, RunFolder

__all__ = [
    "FORMAT",
    "MANIFEST",
    "AsyncSave",
    "CheckpointError",
    "CheckpointFolder",
    "CheckpointOptions",
    "RunFolder",
    "WrittenCheckpoint",
    "load_tensors",
    "read_manifest",
    "stored_tensors",
]
