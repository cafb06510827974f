"""Tables on disk into a checkpoint's folder: snapshots of their files, never through memory.

A table's rows are a chain of files: a whole snapshot, and where checkpoints are incremental the changes since, in their
order. The files of earlier checkpoints are hard links, so every checkpoint has all it needs, and any may be removed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tritonemb.nn.stand_in import OnDisk
from tritonemb.nn.tiered_table import TieredTable
from tritonemb.storage import DiskRows, Pending, snapshot_header
from tritonemb.storage.layout import PAGE_BYTES
from tritonemb.training.checkpoints.files import CHANGES, ROWS, allocated, checksum

MOST_FILES = 64  # of a chain: each is opened, read and checked when a run is resumed

Before = Sequence[tuple[Path, Mapping[str, Any]]]


@dataclass(frozen=True)
class Chain:
    """Files that a snapshot of changes follows.

    Args:
        folder: where they are.
        files: their names, the whole snapshot first, with size and checksum.
        snapshot: the name of the last one's snapshot.
    """

    folder: Path
    files: Mapping[str, list[int]]
    snapshot: str


@dataclass(frozen=True)
class TableSnapshot:
    """A table's rows on their way into a folder.

    Args:
        prefix: of the names of weight and states in the checkpoint.
        table: its config's name.
        fields: shape and dtype by field.
        bound: of its first values.
        chain: files that are in the folder already; None before a whole snapshot.
        path: of the file that is being written.
        pending: ends when it is on the disk.
    """

    prefix: str
    table: str
    fields: Mapping[str, Any]
    bound: float
    chain: Chain | None
    path: Path
    pending: Pending


def tables_of(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, TieredTable]]:
    """What is a tensor, and by the beginning of their names the tables on disk."""
    on_disk = {name.rpartition(".")[0]: value.table for name, value in tensors.items() if isinstance(value, OnDisk)}
    return {name: value for name, value in tensors.items() if not isinstance(value, OnDisk)}, on_disk


def ask(folder: Path, tables: Mapping[str, TieredTable], before: Before) -> list[TableSnapshot]:
    """Ask the tables for snapshots of this moment; what was trained has been written back.

    Args:
        before: earlier checkpoints and their manifests, newest first, which changes may follow; none for whole ones.

    Raises:
        OSError: a table takes nothing more, or its earlier files cannot be linked.
    """
    asked: list[TableSnapshot] = []
    try:
        for prefix, table in tables.items():
            store, stem = _store(table), stem_of(prefix)
            chain = _link(folder, _chain(prefix, store, before))
            name = f"{stem}{ROWS}" if chain is None else f"{stem}.{len(chain.files)}{CHANGES}"
            fields = {
                f.name: [str(f.dtype).removeprefix("torch."), [store.num_rows, *([] if f.one_a_row else [f.size])]]
                for f in table.record.fields
            }
            pending = store.snapshot(folder / name, changes_only=chain is not None)
            asked.append(
                TableSnapshot(prefix, table.config.name, fields, table.config.bound, chain, folder / name, pending)
            )
    except BaseException:
        settle(asked)
        raise
    return asked


def finish(asked: Sequence[TableSnapshot]) -> tuple[dict[str, list[int]], dict[str, Any], int]:
    """Wait until the snapshots are on the disk.

    Returns:
        size and checksum of each file; what the manifest says of each table, by its names' beginning; bytes written.

    Raises:
        OSError: one could not be written, or does not follow those before.
    """
    files: dict[str, list[int]] = {}
    said, num_bytes = {}, 0
    for each in asked:
        each.pending.wait()
    for each in asked:
        header, own = snapshot_header(each.path), {} if each.chain is None else dict(each.chain.files)
        if each.chain is not None and header["after"] != each.chain.snapshot:
            raise OSError(
                f"a snapshot of table {each.table!r} was taken by others while a checkpoint was begun, so its changes "
                "do not follow the last checkpoint; the next one will be whole"
            )
        own[each.path.name] = [each.path.stat().st_size, checksum(each.path)]
        num_bytes += allocated(each.path)
        files |= own
        said[each.prefix] = {
            "table": each.table,
            "fields": dict(each.fields),
            "bound": each.bound,
            "files": list(own),
            "snapshot": header["snapshot"],
        }
    return files, said, num_bytes


def settle(asked: Iterable[TableSnapshot]) -> None:
    """Wait until nothing is written any more; the checkpoint has failed, whatever becomes of them."""
    for each in asked:
        with suppress(OSError):
            each.pending.wait()


def bytes_of(tables: Iterable[TieredTable]) -> int:
    """At most so many bytes are needed for them."""
    return sum(_store(table).bytes_on_disk() for table in tables)


def stem_of(prefix: str) -> str:
    """The beginning of a table's file names, which another table has not."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", prefix.removeprefix("model."))[:80]
    return f"{readable}-{zlib.crc32(prefix.encode()):08x}"


def _store(table: TieredTable) -> DiskRows:
    assert isinstance(table.store, DiskRows)
    return table.store


def _chain(prefix: str, store: DiskRows, before: Before) -> Chain | None:
    """The files to follow, of the checkpoint that has the table's last snapshot; None if a whole one is better."""
    for folder, manifest in before:
        said = manifest.get("tables", {}).get(prefix)
        if said is None or said["snapshot"] != store.last_snapshot:
            continue
        chain = Chain(folder, {name: manifest["files"][name] for name in said["files"]}, said["snapshot"])
        whole, *changes = [folder / name for name in chain.files]
        if len(chain.files) >= MOST_FILES or any(
            not (folder / name).is_file() or (folder / name).stat().st_size != size
            for name, (size, _) in chain.files.items()
        ):
            return None
        new = store.changed_pages().numel() * PAGE_BYTES
        return chain if sum(map(allocated, changes)) + new < allocated(whole) else None
    return None


def _link(folder: Path, chain: Chain | None) -> Chain | None:
    """Put the files of a chain into a folder; None where the file system has no hard links."""
    if chain is None:
        return None
    try:
        for name in chain.files:
            (folder / name).hardlink_to(chain.folder / name)
    except OSError:
        for name in chain.files:
            (folder / name).unlink(missing_ok=True)
        return None
    return chain
