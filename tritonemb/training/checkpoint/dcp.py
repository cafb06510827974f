"""Tensors in the format of `torch.distributed.checkpoint`: written by all ranks into one folder, checked and read."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from tritonemb.comm.group import RankGroup
from tritonemb.sharding.sharded_tensor import PIECE_BYTES, LocalShard, Rectangle, TableShards, refuse_gaps
from tritonemb.storage import DiskRows
from tritonemb.tables.cached_table import TieredTable
from tritonemb.training.checkpoint.all_ranks import (
    Failure,
    ignore_single_process_warning,
    on_all_ranks,
    raise_failures,
)
from tritonemb.training.checkpoint.disk_tables import (
    RankFiles,
    TableSnapshots,
    describe_part,
    merge_files,
    split_tables,
)
from tritonemb.training.checkpoint.files import MANIFEST, checksum, read_manifest_text, size_and_checksum, size_of, sync
from tritonemb.training.checkpoint.table_rows import FileReader, TensorReader, fill_tensors, write_rows

MAX_LISTED = 20


class CheckpointWriter(FileSystemWriter):
    """Writes one checkpoint for `torch.distributed.checkpoint`: each rank its part, then rank 0 publishes it.

    What goes wrong on a rank reaches the others as a `Failure`: an exception, which torch would send by pickle, may not
    be picklable, and the others would wait in vain.

    Args:
        folder: where the files go; there already.
        step: of the checkpoint.
        needed: bytes that it takes at most.
        tensors: this rank's.
        snapshots: of this rank's tables on disk, which have begun.
        group: ranks that write together; None for this process alone.
        publish: called on rank 0 with all ranks' files, when all of them are on the disk.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        needed: int,
        tensors: Mapping[str, Tensor],
        snapshots: TableSnapshots,
        group: RankGroup | None,
        publish: Callable[[RankFiles], None],
    ) -> None:
        # Copying ahead from a device sorts tensors and waits for its stream, for nothing if all are in host memory.
        copy_ahead = 10_000_000 if any(tensor.is_cuda for tensor in tensors.values()) else 0
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=copy_ahead)
        self.step, self.needed, self.tensors, self.snapshots, self.group = step, needed, tensors, snapshots, group
        self._folder, self._publish = folder, publish
        self._error: BaseException | None = None
        self._began = time.perf_counter()

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        results: list[Any] = []
        try:
            results += super().write_data(plan, planner).value()
            paths = self._folder.glob(f"__{0 if self.group is None else self.group.rank}_*")
            results.append(self.snapshots.finish({path.name: size_and_checksum(path) for path in paths}))
        except BaseException as error:
            self.snapshots.settle()
            self._error = error
            results = [Failure.of(error)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        outcomes: list[Any] = [of_rank.pop() for of_rank in results]
        if not any(isinstance(outcome, Failure) for outcome in outcomes):
            try:
                super().finish(metadata, results)
                sync(self._folder / ".metadata")  # torch does so before all of it is written
                outcomes[0].files[".metadata"] = size_and_checksum(self._folder / ".metadata")
                written = merge_files(outcomes)
                self._publish(written)
                outcomes = [written.num_bytes + written.files[".metadata"][0], time.perf_counter() - self._began]
            except BaseException as error:
                self._error, outcomes[0] = error, Failure.of(error)
        metadata.storage_data = outcomes  # the file has it all; torch sends this to all ranks

    def result(self, metadata: Metadata) -> tuple[int, float]:
        """Bytes of the checkpoint, and seconds until it was published, from what torch returns on every rank.

        Raises:
            OSError: it could not be written; says on which rank.
        """
        raise_failures(metadata.storage_data, self._error, OSError)
        num_bytes, seconds = metadata.storage_data
        return num_bytes, seconds


Shards = Mapping[str, tuple[torch.Size, torch.dtype, list[Rectangle]]]


def shards_of(tensors: Mapping[str, Tensor]) -> Shards:
    """Shape and dtype of each sharded table or state, and the parts that this rank saves."""
    return {n: (t.shape, t.dtype, t.rectangles()) for n, t in tensors.items() if isinstance(t, TableShards)}


def refuse_missing_shards(ranks: Sequence[Shards]) -> None:
    """Raise ValueError unless the ranks' shards make up each sharded table."""
    for name in dict.fromkeys(name for shards in ranks for name in shards):
        found = [shards[name] for shards in ranks if name in shards]
        kinds = {describe(shape, dtype) for shape, dtype, _ in found}
        if len(kinds) > 1:
            raise ValueError(f"{name} is not the same on all ranks: {', '.join(sorted(kinds))}")
        try:
            refuse_gaps(found[0][0], [rectangle for *_, rectangles in found for rectangle in rectangles])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def local_bytes(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """What this rank holds and may have to write: of tensors of which each rank has a part, and of all others."""
    sharded = replicated = 0
    for tensor in tensors.values():
        if isinstance(tensor, TableShards):
            sharded += tensor.bytes_to_save()
        elif isinstance(tensor, DTensor):
            sharded += tensor.to_local().nbytes
        else:
            replicated += tensor.nbytes
    return sharded, replicated


def in_pieces(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of one process: large tensors as ones that are written, and so read again, piece by piece.

    A writer copies a whole piece of a table in host memory, whose rows are not contiguous, and a reader holds one.
    """
    return {
        name: TableShards(tensor.shape, tensor.dtype, [LocalShard(tensor)])
        if not isinstance(tensor, TableShards | DTensor) and tensor.dim() in (1, 2) and tensor.nbytes > PIECE_BYTES
        else tensor
        for name, tensor in tensors.items()
    }


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
        text, manifest = read_manifest_text(path)
        return zlib.crc32(text.encode())

    if len(set(on_all_ranks(group, read))) > 1:
        raise ValueError(f"the ranks find different checkpoints at {path}; it must be on a file system that they share")
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    files = list(manifest["files"].items())
    if size > 1:
        files.sort(key=lambda entry: -entry[1][0])  # each rank gets large and small ones
    on_all_ranks(group, lambda: _check_files(path, dict(files[rank::size])))
    return manifest


def stored_tensors(path: str | Path, group: RankGroup | None = None) -> dict[str, TensorStorageMetadata]:
    """Names, shapes and dtypes of a checkpoint's tensors, those of tables that are files among them; each rank of a
    group reads them itself.
    """
    found: dict[str, Any] = {}

    def read() -> None:
        found.update(FileSystemReader(path).read_metadata().state_dict_metadata)
        for prefix, table in saved_tables(Path(path)).items():
            for field, (dtype, size) in table["fields"].items():
                properties = TensorProperties(getattr(torch, dtype))
                found[f"{prefix}.{field}"] = TensorStorageMetadata(properties, torch.Size(size), [])

    on_all_ranks(group, read)
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def saved_tables(path: Path) -> dict[str, dict[str, Any]]:
    """What a checkpoint's manifest says of the tables that are files, by the prefix of their names.

    Raises:
        ValueError: it is damaged.
    """
    tables: dict[str, dict[str, Any]] = {}
    if (path / MANIFEST).is_file():
        tables = read_manifest_text(path)[1].get("tables", {})
    return tables


def load_tensors(
    path: str | Path, tensors: dict[str, Tensor], ignore: tuple[str, ...] = (), group: RankGroup | None = None
) -> None:
    """Read a checkpoint into `tensors`, in place.

    Args:
        tensors: this rank's, whole ones or parts (`TableShards`, DTensors), however they were saved. The table that an
            `OnDisk` refers to adopts other rows, when all else has been read.
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
    problems = _differences(stored, on_all_ranks(group, lambda: own), ignore)
    if problems:
        more = len(problems) - MAX_LISTED
        listed = "\n  ".join(problems[:MAX_LISTED] + [f"and {more} more"] * (more > 0))
        raise ValueError(f"checkpoint {path} is of another model or optimizer:\n  {listed}")

    fresh: list[tuple[TieredTable, DiskRows]] = []
    try:
        on_all_ranks(group, lambda: _load(path, tensors, stored, fresh))
    except BaseException:
        for _, store in fresh:
            store.close()
        raise
    for table, store in fresh:
        table.adopt(store)


def _load(
    path: Path,
    tensors: dict[str, Tensor],
    stored: Mapping[str, TensorStorageMetadata],
    fresh: list[tuple[TieredTable, DiskRows]],
) -> None:
    """Read into memory, and add rows that tables on disk are to adopt once nothing can go wrong any more, anywhere."""
    saved = saved_tables(path)
    in_memory, on_disk = split_tables(tensors)
    parts = {id(part): (part, prefix) for prefix, table in on_disk.items() for part in table.parts}
    fresh.extend((part, _restored(path, part, prefix, saved, stored)) for part, prefix in parts.values())
    plain = {name: tensor for name, tensor in in_memory.items() if name.rpartition(".")[0] not in saved}
    if plain:
        ignore_single_process_warning()
        load(plain, checkpoint_id=path, no_dist=True)  # each rank reads for itself
    for prefix, entry in saved.items():
        targets = {name: in_memory[f"{prefix}.{name}"] for name in entry["fields"] if f"{prefix}.{name}" in in_memory}
        if targets:
            with closing(FileReader(path, entry)) as reader:
                fill_tensors(reader, targets, reader.row_bytes)


def _restored(
    path: Path,
    table: TieredTable,
    prefix: str,
    saved: Mapping[str, Mapping[str, Any]],
    stored: Mapping[str, TensorStorageMetadata],
) -> DiskRows:
    """The rows of a table on disk, or of a part of one: its own files, where the same part was saved."""
    if prefix not in saved:
        entries = {field.name: stored[f"{prefix}.{field.name}"] for field in table.record.fields}
        return write_rows(TensorReader(path, prefix, entries), table)
    own = describe_part(table.config)
    for part in saved[prefix]["parts"]:
        if all(part[name] == value for name, value in own.items()):
            base, *changes = [path / name for name in part["files"]]
            return table.restored(base, changes)
    with closing(FileReader(path, saved[prefix])) as reader:
        return write_rows(reader, table)


def _check_files(path: Path, files: Mapping[str, Any]) -> None:
    for name, (size, crc) in files.items():
        if (there := size_of(path / name)) != size:
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


def describe(shape: Any, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
