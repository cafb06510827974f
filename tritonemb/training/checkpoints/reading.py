"""What a checkpoint says of itself, and its tensors back into memory."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tritonemb.comm.group import RankGroup
from tritonemb.storage import DiskRows
from tritonemb.tables.cached_table import CachedTable
from tritonemb.training.checkpoints.files import checksum
from tritonemb.training.checkpoints.manifest import read_text
from tritonemb.training.checkpoints.tables_in import (
    FileRows,
    TensorRows,
    entries_of,
    fill,
    from_files,
    from_rows,
    same_part,
    saved_tables,
)
from tritonemb.training.checkpoints.tables_out import tables_of
from tritonemb.training.checkpoints.tensors import describe
from tritonemb.training.checkpoints.together import together
from tritonemb.training.checkpoints.writing import as_one_process

MOST_LISTED = 20


def read_manifest(path: str | Path, group: RankGroup | None = None) -> dict[str, Any]:
    """What `trainer.json` of a checkpoint says, after a check that the checkpoint is whole.

    Args:
        group: ranks that read it together, and share the files to be checked among them.

    Raises:
        FileNotFoundError, ValueError: there is none, it is damaged, or it is of a format that this version cannot read;
            on every rank.
    """
    path = Path(path)
    manifest: dict[str, Any] = {}

    def read() -> int:
        nonlocal manifest
        text, manifest = read_text(path)
        return zlib.crc32(text.encode())

    if len(set(together(group, read))) > 1:
        raise ValueError(f"the ranks find different checkpoints at {path}; it must be on a file system that they share")
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    largest_first = sorted(manifest["files"].items(), key=lambda entry: -entry[1][0]) if size > 1 else None
    own = manifest["files"].items() if largest_first is None else largest_first[rank::size]
    together(group, lambda: _check_files(path, dict(own)))
    return manifest


def stored_tensors(path: str | Path, group: RankGroup | None = None) -> dict[str, TensorStorageMetadata]:
    """Names, shapes and dtypes of a checkpoint's tensors, those of tables that are files among them; each rank of a
    group reads them itself.
    """
    found: dict[str, Any] = {}

    def read() -> None:
        nonlocal found
        found = FileSystemReader(path).read_metadata().state_dict_metadata | entries_of(saved_tables(Path(path)))

    together(group, read)
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def load_tensors(
    path: str | Path, tensors: dict[str, Tensor], ignore: tuple[str, ...] = (), group: RankGroup | None = None
) -> None:
    """Read a checkpoint into `tensors`, in place.

    Args:
        tensors: this rank's, whole ones or parts (`TableShards`, DTensors), however they were saved. The table that an
            `DiskTensor` stands for takes other rows for its own, when all else has been read.
        ignore: beginnings of names that may be in the checkpoint alone.
        group: ranks that load it together; a tensor of the checkpoint need not be on all of them.

    Raises:
        ValueError: names, shapes or dtypes differ, on any rank; all differences are listed, and nothing has been read
            then. Every rank raises it.
        StorageError: a file of a table is missing, damaged, or of another table, or there is no room for its rows;
            no table on disk has been changed then, and nothing else if there are only such tables in the checkpoint.
    """
    path = Path(path)
    stored = stored_tensors(path, group)
    own = {name: describe(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    problems = _differences(stored, together(group, lambda: own), ignore)
    if problems:
        more = len(problems) - MOST_LISTED
        listed = "\n  ".join(problems[:MOST_LISTED] + [f"and {more} more"] * (more > 0))
        raise ValueError(f"checkpoint {path} is of another model or optimizer:\n  {listed}")

    fresh: list[tuple[CachedTable, DiskRows]] = []
    try:
        together(group, lambda: _load(path, tensors, stored, fresh))
    except BaseException:
        for _, store in fresh:
            store.close()
        raise
    for table, store in fresh:
        table.replace_store(store)


def _load(
    path: Path,
    tensors: dict[str, Tensor],
    stored: Mapping[str, TensorStorageMetadata],
    fresh: list[tuple[CachedTable, DiskRows]],
) -> None:
    """Read into memory, and add rows that tables on disk are to adopt once nothing can go wrong any more, anywhere."""
    files = saved_tables(path)
    in_memory, on_disk = tables_of(tensors)
    by_part = {id(part): (part, prefix) for prefix, table in on_disk.items() for part in table.parts}
    for part, prefix in by_part.values():
        same = None if prefix not in files else same_part(files[prefix], part)
        if same is not None:
            fresh.append((part, from_files(path, same, part)))
        elif prefix in files:
            with FileRows(path, files[prefix]) as rows:
                fresh.append((part, from_rows(rows, part)))
        else:
            entries = {field.name: stored[f"{prefix}.{field.name}"] for field in part.record.fields}
            fresh.append((part, from_rows(TensorRows(path, prefix, entries), part)))
    plain = {name: tensor for name, tensor in in_memory.items() if name.rpartition(".")[0] not in files}
    if plain:
        with as_one_process():
            load(plain, checkpoint_id=path, no_dist=True)  # nobody needs to agree on what he reads
    for prefix, said in files.items():
        targets = {name: in_memory[f"{prefix}.{name}"] for name in said["fields"] if f"{prefix}.{name}" in in_memory}
        if targets:
            with FileRows(path, said) as rows:
                fill(rows, targets, rows.row_bytes)


def _check_files(path: Path, files: Mapping[str, Any]) -> None:
    for name, (size, crc) in files.items():
        there = (path / name).stat().st_size if (path / name).is_file() else None
        if there != size:
            raise ValueError(
                f"{path} is damaged: {name} has {'vanished' if there is None else f'{there:,} bytes'} "
                f"instead of {size:,} bytes; use another checkpoint"
            )
        if checksum(path / name) != crc:
            raise ValueError(f"{path} is damaged: {name} does not have the checksum that was written; use another one")


def _differences(
    stored: Mapping[str, TensorStorageMetadata], every: list[dict[str, str]], ignore: tuple[str, ...]
) -> list[str]:
    """Between a checkpoint and what the ranks have, each named by its shape and dtype."""
    problems = []
    wanted: dict[str, dict[str, int]] = {}  # name: what it is: the first rank that says so
    for rank, own in enumerate(every):
        for name, here in own.items():
            wanted.setdefault(name, {}).setdefault(here, rank)
    for name in sorted(wanted.keys() | stored.keys()):
        if name not in stored:
            problems.append(f"{name} is not in the checkpoint")
        elif name not in wanted:
            if not name.startswith(ignore):
                problems.append(f"{name} is in the checkpoint only")
        else:
            there = describe(stored[name].size, stored[name].properties.dtype)
            for here, rank in wanted[name].items():
                if here != there:
                    where = "here" if len(wanted[name]) == 1 else f"on rank {rank}"
                    problems.append(f"{name} is {there} in the checkpoint, {here} {where}")
    return problems
