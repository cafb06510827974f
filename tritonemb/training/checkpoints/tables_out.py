"""Tables on disk into a checkpoint's folder: snapshots of their files, never through memory.

Each part of a table is saved by the rank that holds it, by the first one if several do. Its rows are a chain of files:
a whole snapshot, and where checkpoints are incremental the changes since, in their order. The files of earlier
checkpoints are hard links, so every checkpoint has all it needs, and any may be removed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tritonemb.sharding.sharded_tensor import LocalShard, TableShards
from tritonemb.storage import DiskRows, IoFuture, snapshot_header
from tritonemb.storage.io import PAGE_BYTES
from tritonemb.tables.cached_table import CachedTable, DiskTensor
from tritonemb.training.checkpoints.files import CHANGES, ROWS, allocated, checksum
from tritonemb.types import TableConfig

MOST_FILES = 64  # of a chain: each is opened, read and checked when a run is resumed

Fields = Mapping[str, tuple[str, list[int]]]  # by name: dtype and shape
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
class TableOnDisk:
    """A table on disk, of which a rank holds some parts.

    Args:
        fields: dtype and shape of the whole weight and states, by their names.
        parts: this rank's; one, where the table is not cut.
        saved: those that no other rank saves.
    """

    fields: Fields
    parts: tuple[CachedTable, ...]
    saved: tuple[CachedTable, ...]


@dataclass(frozen=True)
class TableSnapshot:
    """A part of a table on its way into a folder.

    Args:
        prefixes: of the names of weight and states in the checkpoint, one for each path to the table in the model.
        config: of the part.
        chain: files that are in the folder already; None before a whole snapshot.
        path: of the file that is being written.
        pending: ends when it is on the disk.
    """

    prefixes: tuple[str, ...]
    config: TableConfig
    chain: Chain | None
    path: Path
    pending: IoFuture


def tables_of(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, TableOnDisk]]:
    """What is a tensor, and by the beginning of their names the tables on disk, as far as this rank holds them."""
    plain: dict[str, Tensor] = {}
    fields: dict[str, dict[str, tuple[str, list[int]]]] = {}
    parts: dict[str, dict[int, CachedTable]] = {}
    saved: dict[str, dict[int, CachedTable]] = {}
    for name, value in tensors.items():
        own = value.shards if isinstance(value, TableShards) else [LocalShard(value)]
        on_disk = [(shard.tensor.table, shard.mine) for shard in own if isinstance(shard.tensor, DiskTensor)]
        if on_disk:
            prefix, _, field = name.rpartition(".")
            fields.setdefault(prefix, {})[field] = (str(value.dtype).removeprefix("torch."), list(value.shape))
            parts.setdefault(prefix, {}).update({id(table): table for table, _ in on_disk})
            saved.setdefault(prefix, {}).update({id(table): table for table, mine in on_disk if mine})
        else:
            plain[name] = value
    return plain, {
        prefix: TableOnDisk(of, tuple(parts[prefix].values()), tuple(saved[prefix].values()))
        for prefix, of in fields.items()
    }


def ask(folder: Path, tables: Mapping[str, TableOnDisk], before: Before) -> list[TableSnapshot]:
    """Ask the tables for snapshots of this moment; what was trained has been written back.

    Args:
        before: earlier checkpoints and their manifests, newest first, which changes may follow; none for whole ones.

    Raises:
        OSError: a table takes nothing more.
    """
    prefixes: dict[int, tuple[str, ...]] = {}
    parts: dict[int, CachedTable] = {}
    for prefix, table in tables.items():
        for part in table.saved:
            parts[id(part)] = part
            prefixes[id(part)] = (*prefixes.get(id(part), ()), prefix)
    asked: list[TableSnapshot] = []
    try:
        for number, part in parts.items():
            prefix, store = prefixes[number][0], _store(part)
            chain = _link(folder, _chain(prefix, store, before))
            stem = stem_of(prefix, part.config)
            path = folder / (f"{stem}{ROWS}" if chain is None else f"{stem}.{len(chain.files)}{CHANGES}")
            pending = store.snapshot(path, changes_only=chain is not None)
            asked.append(TableSnapshot(prefixes[number], part.config, chain, path, pending))
    except BaseException:
        settle(asked)
        raise
    return asked


class Written(NamedTuple):
    """What a rank has written of its tables on disk.

    Args:
        files: size and checksum of each file.
        parts: what the manifest says of each part, by the beginning of the table's names.
        num_bytes: that are new.
    """

    files: dict[str, list[int]]
    parts: list[tuple[str, dict[str, Any]]]
    num_bytes: int


def finish(asked: Sequence[TableSnapshot]) -> Written:
    """Wait until the snapshots are on the disk.

    Raises:
        OSError: one could not be written, or does not follow those before.
    """
    files: dict[str, list[int]] = {}
    parts, num_bytes = [], 0
    for each in asked:
        each.pending.wait()
    for each in asked:
        header, own, config = snapshot_header(each.path), {}, each.config
        if each.chain is not None:
            own = dict(each.chain.files)
            if header["after"] != each.chain.snapshot:
                raise OSError(
                    f"a snapshot of table {config.name!r} was taken by others while a checkpoint was begun, so its "
                    "changes do not follow the last checkpoint; the next one will be whole"
                )
        own[each.path.name] = [each.path.stat().st_size, checksum(each.path)]
        num_bytes += allocated(each.path)
        files |= own
        part = {
            "table": config.name,
            "rows": [config.row_origin, config.num_embeddings],
            "columns": [config.column_origin, config.embedding_dim],
            "bound": config.bound,
            "files": list(own),
            "snapshot": header["snapshot"],
        }
        parts += [(prefix, part) for prefix in each.prefixes]
    return Written(files, parts, num_bytes)


def said_of(every: Iterable[tuple[dict[str, Fields], Written]]) -> dict[str, dict[str, Any]]:
    """What the manifest says of tables on disk, by the beginning of their names: of all ranks' fields and files."""
    said: dict[str, dict[str, Any]] = {}
    for tables, written in every:
        for prefix, fields in tables.items():
            said.setdefault(prefix, {"fields": {}, "parts": []})["fields"] |= fields
        for prefix, part in written.parts:
            said[prefix]["parts"].append(part)
    return said


def settle(asked: Iterable[TableSnapshot]) -> None:
    """Wait until nothing is written any more; the checkpoint has failed, whatever becomes of them."""
    for each in asked:
        with suppress(OSError):
            each.pending.wait()


def bytes_of(tables: Mapping[str, TableOnDisk]) -> int:
    """At most so many bytes are needed for the parts that this rank saves."""
    return sum(_store(part).bytes_on_disk() for part in saved_by(tables))


def saved_by(tables: Mapping[str, TableOnDisk]) -> list[CachedTable]:
    """The parts of all tables that this rank saves, each once."""
    return list({id(part): part for table in tables.values() for part in table.saved}.values())


def stem_of(prefix: str, part: TableConfig) -> str:
    """The beginning of a part's file names, which no other one has."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", prefix.removeprefix("model."))[:80]
    place = f"-{part.row_origin}-{part.column_origin}" if part.row_origin or part.column_origin else ""
    return f"{readable}-{zlib.crc32(prefix.encode()):08x}{place}"


def _store(table: CachedTable) -> DiskRows:
    assert isinstance(table.store, DiskRows)
    return table.store


def _chain(prefix: str, store: DiskRows, before: Before) -> Chain | None:
    """The files to follow, of the checkpoint that has the table's last snapshot; None if a whole one is better."""
    for folder, manifest in before:
        parts = manifest.get("tables", {}).get(prefix, {"parts": []})["parts"]
        part = next((part for part in parts if part["snapshot"] == store.last_snapshot), None)
        if part is None:
            continue
        chain = Chain(folder, {name: manifest["files"][name] for name in part["files"]}, part["snapshot"])
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
