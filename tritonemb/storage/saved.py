"""Rows out of a snapshot's file, which is left as it is and may be read by many."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.storage import header as headers
from tritonemb.storage.apart import apart
from tritonemb.storage.blocks import Blocks
from tritonemb.storage.layout import Layout, runs
from tritonemb.storage.record import Field, Record
from tritonemb.storage.scan import scan
from tritonemb.storage.store import Initial, check_request, fill_never_written


def snapshot_header(path: str | Path) -> dict[str, Any]:
    """What the header of a snapshot says, be it of a whole table or of changes: see `Identity.as_json`, `snapshot`
    its own name, `after` that of the snapshot that changes follow.

    Raises:
        StorageError: the file cannot be read, or has no such header.
    """
    what = f"snapshot {path}"
    file = headers.open_file(what, Path(path))
    try:
        return headers.read(what, file, headers.ROWS, headers.CHANGES)
    finally:
        file.close()


class SavedRows:
    """The rows of a whole snapshot.

    Args:
        path: of its file.

    Attributes:
        header: what the file says of itself, see `snapshot_header`.
        record: the layout of a row.

    Raises:
        StorageError: there is no such file, it is damaged, of another format, or holds changes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header, self._blocks = apart(lambda: _open(self.path))
        self.num_rows: int = self.header["num_rows"]
        fields = [
            Field(name, getattr(torch, dtype), size, offset, one_a_row)
            for name, dtype, size, offset, one_a_row in self.header["fields"]
        ]
        self.record = Record(tuple(fields), self.header["record_bytes"])
        self._in_use = threading.Lock()  # what was given up may read still when the file is to be closed

    def read(self, rows: Tensor, records: Tensor, initial: Initial) -> None:
        """Fill `records` with those of the rows, as `RowStore.read` does, and wait for it.

        Args:
            initial: gives never-written rows the values that they have.

        Raises:
            StorageError: a part of the file cannot be read, or is damaged.
        """
        check_request(self.header["table"], self.num_rows, self.record, rows, records)

        def read() -> np.ndarray:
            with self._in_use:
                return self._blocks.read(rows.numpy(), records.data_ptr())

        fill_never_written(apart(read), rows, records, initial)

    def written(self) -> Iterator[tuple[int, int]]:
        """Bounds of rows, ascending, beside which none was ever written; among them are such, too."""
        size = self._blocks.layout.rows_per_block
        for blocks in self._blocks.places.blocks():
            firsts, lasts = runs(blocks)
            for first, last in zip(blocks[firsts].tolist(), blocks[lasts - 1].tolist(), strict=True):
                yield first * size, min((last + 1) * size, self.num_rows)

    def close(self) -> None:
        with self._in_use:
            self._blocks.file.close()

    def __enter__(self) -> SavedRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path) -> tuple[dict[str, Any], Blocks]:
    """A snapshot's header, and its blocks."""
    what = f"snapshot {path}"
    file = headers.open_file(what, path)
    try:
        header = headers.read(what, file, headers.ROWS)
        layout = Layout(header["num_rows"], header["record_bytes"])
        headers.refuse_size(header, file.size(), layout, what)
        return header, Blocks(header["table"], file, layout, scan(header["table"], file, layout))
    except BaseException:
        file.close()
        raise
