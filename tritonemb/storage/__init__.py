"""Rows that do not fit the device: in host memory, or in checked files on disk."""

from tritonemb.storage.disk import DiskRows
from tritonemb.storage.io import TableIdentity
from tritonemb.storage.memory import HostRows
from tritonemb.storage.snapshot import SnapshotReader, restore, snapshot_header
from tritonemb.storage.sparse import copy_rows, digest
from tritonemb.storage.store import (
    CacheDirectory,
    Counts,
    Field,
    InitialValues,
    IoFuture,
    Record,
    StorageError,
    record_of,
)

__all__ = [
    "CacheDirectory",
    "Counts",
    "DiskRows",
    "Field",
    "HostRows",
    "InitialValues",
    "IoFuture",
    "Record",
    "SnapshotReader",
    "StorageError",
    "TableIdentity",
    "copy_rows",
    "digest",
    "record_of",
    "restore",
    "snapshot_header",
]
