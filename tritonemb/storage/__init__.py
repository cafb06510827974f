"""Rows that do not fit the device: in host memory, or in checked files on disk."""

from __future__ import annotations

from tritonemb.storage.disk import DiskRows
from tritonemb.storage.memory import HostRows
from tritonemb.storage.page_table import TableIdentity
from tritonemb.storage.snapshot import SnapshotReader, restore, snapshot_header
from tritonemb.storage.sparse import copy_rows, digest
from tritonemb.storage.store import Counts, Field, Initializer, IoFuture, Record, RowStore, StorageError, record_of

__all__ = [
    "Counts",
    "DiskRows",
    "Field",
    "HostRows",
    "Initializer",
    "IoFuture",
    "Record",
    "RowStore",
    "SnapshotReader",
    "StorageError",
    "TableIdentity",
    "copy_rows",
    "digest",
    "record_of",
    "restore",
    "snapshot_header",
]
