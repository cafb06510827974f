"""Where rows live that do not fit the device: in host memory, or in a file on disk."""

from __future__ import annotations

from tritonemb.storage.cached import Counts
from tritonemb.storage.clone import copy_rows
from tritonemb.storage.digest import digest
from tritonemb.storage.disk import DiskRows
from tritonemb.storage.host import HostRows
from tritonemb.storage.record import Field, Record, record_of
from tritonemb.storage.saved import SavedRows, snapshot_header
from tritonemb.storage.snapshots import restore
from tritonemb.storage.store import Initial, Pending, RowStore, StorageError

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
