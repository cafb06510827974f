"""Snapshots of tables on disk in a checkpoint's folder; the rows never pass through memory.

Each part of a table is saved by the rank that holds it, by the first one if several do. Its rows are a chain of files:
a whole snapshot, and where checkpoints are incremental the changes since, in their order. The files of earlier
checkpoints are hard links, so every checkpoint has all it needs, and any may be removed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tritonemb.sharding.sharded_tensor import LocalShard, TableShards
from tritonemb.storage import DiskRows, IoFuture, snapshot_header
from tritonemb.storage.io import PAGE_BYTES
from tritonemb.tables.cached_table import OnDisk, TieredTable, write_back
from tritonemb.training.checkpoint.files import CHANGES, ROWS, allocated, size_and_checksum, size_of
from tritonemb.types import TableConfig

MAX_FILES = 64  # of a chain: each is opened, read and checked when a run is resumed

Earlier = Sequence[tuple[Path, Mapping[str, Any]]]  # checkpoints and their manifests, newest first


class DiskTable(NamedTuple):
    """A table on disk, of which a rank holds some parts.

    Args:
        fields: dtype and shape of the whole weight and states, by their names.
        parts: this rank's; one, where the table is not sharded.
        saved: those that no other rank saves.
    """

    fields: dict[str, tuple[str, list[int]]]
    parts: list[TieredTable]
    saved: list[TieredTable]


class RankFiles(NamedTuple):
    """What a rank has written.

    Args:
        files: size and checksum of each file.
        tables: the manifest's entries of tables on disk, as far as this rank knows them, by the prefix of their names.
        num_bytes: that are new.
    """

    files: dict[str, list[int]]
    tables: dict[str, dict[str, Any]]
    num_bytes: int


class _Snapshot(NamedTuple):
    """A part of a table that is being written.

    Args:
        prefixes: of the names of weight and states, one for each path to the table in the model.
        config: of the part.
        linked: size and checksum of the files that changes follow, which are in the folder already.
        follows: the name of the last one's snapshot; None for a whole snapshot.
        path: of the file that is being written.
        pending: ends when it is on the disk.
    """

    prefixes: list[str]
    config: TableConfig
    linked: dict[str, list[int]]
    follows: str | None
    path: Path
    pending: IoFuture


def split_tables(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, DiskTable]]:
    """The values that are in memory, and this rank's tables on disk by the prefix of their names."""
    in_memory: dict[str, Tensor] = {}
    tables: dict[str, DiskTable] = {}
    for name, value in tensors.items():
        shards = value.shards if isinstance(value, TableShards) else [LocalShard(value)]
        on_disk = [(shard.tensor.table, shard.mine) for shard in shards if isinstance(shard.tensor, OnDisk)]
        if not on_disk:
            in_memory[name] = value
            continue
        prefix, _, field = name.rpartition(".")
        table = tables.setdefault(prefix, DiskTable({}, [], []))
        table.fields[field] = (str(value.dtype).removeprefix("torch."), list(value.shape))
        for part, mine in on_disk:
            for held in (table.parts, table.saved) if mine else (table.parts,):
                if all(part is not other for other in held):
                    held.append(part)
    return in_memory, tables


class TableSnapshots:
    """Writes this rank's parts of tables on disk into a checkpoint's folder, while training goes on."""

    def __init__(self, tables: Mapping[str, DiskTable]) -> None:
        self._tables = tables
        self._parts: dict[int, tuple[TieredTable, list[str]]] = {}  # each once, with all its prefixes
        for prefix, table in tables.items():
            for part in table.saved:
                self._parts.setdefault(id(part), (part, []))[1].append(prefix)
        self._snapshots: list[_Snapshot] = []

    def write_back(self) -> int:
        """Write back what was trained on the device; returns the bytes that snapshots take at most.

        Raises:
            StorageError: it could not be written.
        """
        write_back(part for part, _ in self._parts.values())
        return sum(_store(part).bytes_on_disk() for part, _ in self._parts.values())

    def begin(self, folder: Path, earlier: Earlier) -> None:
        """Submit the snapshots: they hold the rows of this moment.

        Args:
            earlier: checkpoints that changes may follow; none for whole snapshots.

        Raises:
            OSError: a table takes no more operations.
        """
        for part, prefixes in self._parts.values():
            store, stem = _store(part), stem_of(prefixes[0], part.config)
            linked, follows = _link_chain(folder, prefixes[0], store, earlier)
            path = folder / (f"{stem}.{len(linked)}{CHANGES}" if linked else f"{stem}{ROWS}")
            pending = store.snapshot(path, changes_only=bool(linked))
            self._snapshots.append(_Snapshot(prefixes, part.config, linked, follows, path, pending))

    def finish(self, files: dict[str, list[int]]) -> RankFiles:
        """Wait until the snapshots are on the disk; returns all that this rank has written.

        Args:
            files: size and checksum of the other files.

        Raises:
            OSError: one could not be written, or does not follow those before.
        """
        tables: dict[str, Any] = {prefix: {"fields": t.fields, "parts": []} for prefix, t in self._tables.items()}
        num_bytes = sum(size for size, _ in files.values())
        for snapshot in self._snapshots:
            snapshot.pending.wait()
        for snapshot in self._snapshots:
            header, config, path = snapshot_header(snapshot.path), snapshot.config, snapshot.path
            if snapshot.follows is not None and header["after"] != snapshot.follows:
                raise OSError(
                    f"another snapshot of table {config.name!r} was taken while a checkpoint was begun, so its changes "
                    "do not follow the last checkpoint; the next one will be whole"
                )
            own = snapshot.linked | {path.name: size_and_checksum(path)}
            part = describe_part(config) | {"files": list(own), "snapshot": header["snapshot"]}
            num_bytes += allocated(path)
            files |= own
            for prefix in snapshot.prefixes:
                tables[prefix]["parts"].append(part)
        return RankFiles(files, tables, num_bytes)

    def settle(self) -> None:
        """Wait until nothing is being written, whether it fails or not."""
        for snapshot in self._snapshots:
            with suppress(OSError):
                snapshot.pending.wait()


def merge_files(ranks: Sequence[RankFiles]) -> RankFiles:
    """What all ranks have written."""
    files: dict[str, list[int]] = {}
    tables: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        files |= rank.files
        for prefix, entry in rank.tables.items():
            merged = tables.setdefault(prefix, {"fields": {}, "parts": []})
            merged["fields"] |= entry["fields"]
            merged["parts"] += entry["parts"]
    return RankFiles(dict(sorted(files.items())), tables, sum(rank.num_bytes for rank in ranks))


def describe_part(config: TableConfig) -> dict[str, Any]:
    """What the manifest says of a part of a table, beside its files."""
    return {
        "table": config.name,
        "rows": [config.row_origin, config.num_embeddings],
        "columns": [config.column_origin, config.embedding_dim],
        "bound": config.bound,
    }


def stem_of(prefix: str, part: TableConfig) -> str:
    """The beginning of a part's file names, which no other one has."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", prefix.removeprefix("model."))[:80]
    origin = f"-{part.row_origin}-{part.column_origin}" if part.row_origin or part.column_origin else ""
    return f"{readable}-{zlib.crc32(prefix.encode()):08x}{origin}"


def _store(table: TieredTable) -> DiskRows:
    assert isinstance(table.store, DiskRows)
    return table.store


def _link_chain(
    folder: Path, prefix: str, store: DiskRows, earlier: Earlier
) -> tuple[dict[str, list[int]], str | None]:
    """Link the files of the table's last snapshot into a folder, and name that; nothing if a whole one is better."""
    for source, manifest in earlier:
        parts = manifest.get("tables", {}).get(prefix, {"parts": []})["parts"]
        part = next((part for part in parts if part["snapshot"] == store.last_snapshot), None)
        if part is not None:
            files = {name: manifest["files"][name] for name in part["files"]}
            if _pays(source, files, store) and _link(source, folder, files):
                return files, part["snapshot"]
            break
    return {}, None


def _pays(source: Path, files: Mapping[str, list[int]], store: DiskRows) -> bool:
    """Whether a chain is intact, short enough, and its changes take less than the whole snapshot."""
    base, *changes = [source / name for name in files]
    if len(files) >= MAX_FILES or any(size_of(source / name) != size for name, (size, _) in files.items()):
        return False
    new = store.changed_pages().numel() * PAGE_BYTES
    return sum(map(allocated, changes)) + new < allocated(base)


def _link(source: Path, folder: Path, names: Mapping[str, Any]) -> bool:
    """Whether the file system made hard links of all files; else none is left."""
    try:
        for name in names:
            (folder / name).hardlink_to(source / name)
    except OSError:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        return False
    return True
