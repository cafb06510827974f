"""Where rows live that do not fit the device: in host memory, or in a file on disk."""

from __future__ import annotations

from tritonemb.storage.disk import DiskRows
from tritonemb.storage.host_cache import Counts
from tritonemb.storage.memory import HostRows
from tritonemb.storage.snapshot import SavedRows, copy_rows, digest, restore, snapshot_header
from tritonemb.storage.store import Field, Initial, Pending, Record, RowStore, StorageError, record_of

__all__ = [
    "Counts",
    "DiskRows",
    "Field",
    "HostRows",
    "Initial",
    "Pending",
    "Record",
    "RowStore",
    "SavedRows",
    "StorageError",
    "copy_rows",
    "digest",
    "record_of",
    "restore",
    "snapshot_header",
]
