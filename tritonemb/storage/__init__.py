"""Rows that do not fit the device: in host memory, or in checked files on disk."""

from tritonemb.storage.disk import DiskRows
from tritonemb.storage.snapshot import SnapshotReader, restore, snapshot_header
from tritonemb.storage.store import InitialValues, IoFuture, StorageError

__all__ = ["DiskRows", "InitialValues", "IoFuture", "SnapshotReader", "StorageError", "restore", "snapshot_header"]
