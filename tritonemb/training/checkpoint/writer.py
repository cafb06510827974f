"""Writes the tensors of a checkpoint by `torch.distributed.checkpoint`, and snapshots of tables on disk beside them.

Each part of a table on disk is saved by the rank that holds it, by the first one if several do; its rows never pass
through memory. They are a chain of files: a whole snapshot, and where checkpoints are incremental the changes since, in
their order. The files of earlier checkpoints are hard links: each has all it needs, and any may be removed.
"""

import json
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from tritonemb.comm.group import RankGroup
from tritonemb.sharding.sharded_tensor import (
    PIECE_BYTES,
    LocalShard,
    Rectangle,
    TableShards,
    check_coverage,
    dtype_and_shape,
)
from tritonemb.storage import DiskRows, IoFuture, snapshot_header
from tritonemb.storage.aio import PAGE_BYTES
from tritonemb.storage.checkpoint import CHANGES, ROWS, Files, size_and_checksum, size_of
from tritonemb.storage.io import allocated, sync
from tritonemb.tables.cached_table import CachedTable, DiskTensor, write_back
from tritonemb.tables.server_table import TableService
from tritonemb.training.callbacks import CheckpointSaved
from tritonemb.training.ranks import Failure, on_all_ranks, on_each_rank, raise_failures
from tritonemb.types import TableConfig

MAX_FILES = 64  # of a chain: each is opened, read and checked when a run is resumed

# Shape and dtype of each sharded table or state, and the parts that a rank saves.
Shards = Mapping[str, tuple[torch.Size, torch.dtype, list[Rectangle]]]
Tensors = Mapping[str, Tensor]
Manifest = Mapping[str, Any]
Earlier = Sequence[tuple[Path, Manifest]]  # checkpoints and their manifests, newest first


class CheckpointWriter(FileSystemWriter):
    """Writes one checkpoint for `torch.distributed.checkpoint`: each rank its part, then rank 0 publishes it.

    The ranks of the group make it together. Arguments and errors as of `CheckpointFolder.save`.

    What goes wrong on a rank reaches the others as a `Failure`: an exception, which torch would send by pickle, may not
    be picklable, and the others would wait in vain.
    """

    def __init__(
        self, folder: Path, step: int, tensors: Tensors, manifest: Manifest, group: RankGroup,
        publish: Callable[["RankFiles"], None],  # for rank 0, when all ranks' files are on the disk
        services: Mapping[str, TableService] | None = None,  # of collections on embedding servers; rank 0's are asked
    ) -> None:  # fmt: skip
        self._began = time.perf_counter()
        in_memory, tables = split_tables(tensors)
        snapshots = TableSnapshots(tables, services or {} if group.rank == 0 else {})

        def check() -> tuple[Shards, int, int, int]:
            self.manifest = json.dumps(manifest)
            on_disk = snapshots.write_back()  # if it fails, those rows are lost, and training ends
            shards = {n: (t.shape, t.dtype, t.rectangles()) for n, t in tensors.items() if isinstance(t, TableShards)}
            return shards, *local_bytes(in_memory), on_disk

        shards, sharded, replicated, on_disk = zip(*on_all_ranks(group, check), strict=True)
        refuse_missing_shards(shards)
        self.tensors = in_pieces(in_memory) if group.size == 1 else in_memory
        # Copying ahead from a device sorts tensors and waits for its stream, for nothing if all are in host memory.
        copy_ahead = 10_000_000 if any(tensor.is_cuda for tensor in self.tensors.values()) else 0
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=copy_ahead)
        self.needed = sum(sharded) + max(replicated) + sum(on_disk)  # bytes, at most
        self.step, self.snapshots, self.group = step, snapshots, group
        self._folder, self._publish = folder, publish
        self._error: BaseException | None = None

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        try:
            results: list[Any] = [*super().write_data(plan, planner).value()]
            paths = self._folder.glob(f"__{self.group.rank}_*")
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

    def result(self, metadata: Metadata) -> CheckpointSaved:
        """From what torch returns on every rank; OSError if it could not be written, which says on which rank."""
        raise_failures(metadata.storage_data, self._error, OSError)
        return CheckpointSaved(self.step, self._folder.with_name(f"step-{self.step}"), *metadata.storage_data)


def refuse_missing_shards(ranks: Sequence[Shards]) -> None:
    """Raise ValueError unless the ranks' shards make up each sharded table."""
    for name in dict.fromkeys(name for shards in ranks for name in shards):
        copies = [shards[name] for shards in ranks if name in shards]
        if len(kinds := sorted({dtype_and_shape(dtype, shape) for shape, dtype, _ in copies})) > 1:
            raise ValueError(f"{name} is not the same on all ranks: {', '.join(kinds)}")
        try:
            check_coverage(copies[0][0], [rectangle for *_, rectangles in copies for rectangle in rectangles])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def local_bytes(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """What this rank holds and may have to write: of tensors of which each rank has a part, and of all others."""
    shards = sum(tensor.bytes_to_save() for tensor in tensors.values() if isinstance(tensor, TableShards))
    parts = sum(tensor.to_local().nbytes for tensor in tensors.values() if isinstance(tensor, DTensor))
    whole = sum(tensor.nbytes for tensor in tensors.values() if not isinstance(tensor, TableShards | DTensor))
    return shards + parts, whole


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


class DiskTable(NamedTuple):
    """A table on disk, of which a rank holds some parts; one, where the table is not sharded."""

    fields: dict[str, tuple[str, list[int]]]  # dtype and shape of the whole weight and states
    parts: dict[CachedTable, bool]  # whether this rank saves them


class RankFiles(NamedTuple):
    """What a rank has written."""

    files: Files
    tables: dict[str, dict[str, Any]]  # of the manifest, as far as this rank knows them, by the prefix of their names
    num_bytes: int  # that are new
    servers: dict[str, list[dict[str, Any]]]  # files of embedding servers, and their last snapshots, by collection


def split_tables(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, DiskTable]]:
    """The values that are in memory, and this rank's tables on disk by the prefix of their names."""
    in_memory: dict[str, Tensor] = {}
    tables: dict[str, DiskTable] = {}
    for name, value in tensors.items():
        shards = value.shards if isinstance(value, TableShards) else [LocalShard(value)]
        on_disk = [(shard.tensor.table, shard.is_primary) for shard in shards if isinstance(shard.tensor, DiskTensor)]
        if not on_disk:
            in_memory[name] = value
            continue
        prefix, _, field = name.rpartition(".")
        table = tables.setdefault(prefix, DiskTable({}, {}))
        table.fields[field] = (str(value.dtype).removeprefix("torch."), list(value.shape))
        for part, owned in on_disk:
            table.parts[part] = owned or table.parts.get(part, False)
    return in_memory, tables


class _Snapshot(NamedTuple):
    prefixes: list[str]  # of the names of weight and states, one for each path to the table in the model
    config: TableConfig
    linked: Files  # the files that changes follow, which are in the folder already
    follows: str | None  # the name of the last one's snapshot
    path: Path
    future: IoFuture


class TableSnapshots:
    """Writes this rank's parts of tables on disk into a checkpoint's folder, while training goes on.

    And lets embedding servers write theirs, before it does; `services` are those of collections by path.
    """

    def __init__(self, tables: Mapping[str, DiskTable], services: Mapping[str, TableService]) -> None:
        self.tables, self._services = tables, services
        self._servers: dict[str, list[dict[str, Any]]] = {}
        self._folder = Path()
        self._parts: dict[CachedTable, list[str]] = {}  # each once, with all its prefixes
        for prefix, table in tables.items():
            for part in (part for part, owned in table.parts.items() if owned):
                self._parts.setdefault(part, []).append(prefix)
        self._snapshots: list[_Snapshot] = []

    def write_back(self) -> int:
        """Write back what was trained on the device; returns the bytes that snapshots take at most."""
        write_back(self._parts)
        return sum(_store(part).bytes_on_disk() for part in self._parts)

    def begin(self, folder: Path, earlier: Earlier) -> None:
        """Submit the snapshots: they hold the rows of this moment. Changes may follow some earlier checkpoint."""
        self._folder = folder
        for name, service in self._services.items():
            self._servers[name] = let_servers_write(folder, name, service, earlier)
        for part, prefixes in self._parts.items():
            store, stem = _store(part), _stem(prefixes[0], part.row_config)
            follows = store.last_snapshot
            linked = _link_chain(folder, prefixes[0], store, follows, earlier)
            path = folder / (f"{stem}.{len(linked)}{CHANGES}" if linked else f"{stem}{ROWS}")
            future = store.snapshot(path, changes_only=bool(linked))
            self._snapshots.append(_Snapshot(prefixes, part.row_config, linked, follows, path, future))

    def finish(self, files: Files) -> RankFiles:
        """Wait until the snapshots are on the disk; returns all that this rank has written, with these other files.

        OSError if one could not be written, or does not follow those before.
        """
        tables: dict[str, Any] = {prefix: {"fields": t.fields, "parts": []} for prefix, t in self.tables.items()}
        num_bytes = sum(size for size, _ in files.values())
        for prefixes, config, linked, follows, path, future in self._snapshots:
            future.wait()
            header = snapshot_header(path)
            if linked and header["after"] != follows:
                raise OSError(
                    f"another snapshot of table {config.name!r} was taken while a checkpoint was begun, so its changes "
                    "do not follow the last checkpoint; the next one will be whole"
                )
            snapshot_files = linked | {path.name: size_and_checksum(path)}
            num_bytes += allocated(path)
            files |= snapshot_files
            part = describe_part(config) | {"files": list(snapshot_files), "snapshot": header["snapshot"]}
            for prefix in prefixes:
                tables[prefix]["parts"].append(part)
        for chain in (chain for chains in self._servers.values() for chain in chains):
            files |= {name: size_and_checksum(self._folder / name) for name in chain["files"]}
            num_bytes += files[chain["files"][-1]][0]
        return RankFiles(files, tables, num_bytes, self._servers)

    def settle(self) -> None:
        """Wait until nothing is being written, whether it fails or not."""
        for snapshot in self._snapshots:
            with suppress(OSError):
                snapshot.future.wait()


def let_servers_write(folder: Path, name: str, service: TableService, earlier: Earlier) -> list[dict[str, Any]]:
    """Snapshots of all servers of a collection, which follow those of an earlier checkpoint if they can: of each server
    the chain of files, and its last snapshot. StorageError as of `TableService.snapshot`.
    """
    stem = _stem(name)
    source, manifest = next((each for each in earlier if name in each[1].get("servers", {})), (folder, {}))
    last = manifest.get("servers", {}).get(name, [])
    number = max((len(each["files"]) for each in last), default=0)
    for previous in (last if number < MAX_FILES else [], []):
        prefix = folder / f"{stem}.{number if previous else 0}."
        written = service.snapshot(prefix, changes_only=bool(previous))
        new = [Path(f"{prefix}{server}.server") for server in range(len(written))]
        follows = [each["after"] for each in written] == [each["snapshot"] for each in previous]
        chains = [each["files"] for each in previous] if follows else [[] for _ in written]
        if not previous or (follows and _link(source, folder, [name for chain in chains for name in chain])):
            return [
                {"files": [*chain, path.name], "snapshot": each["snapshot"]}
                for chain, path, each in zip(chains, new, written, strict=True)
            ]
        for path in new:
            path.unlink()
    raise AssertionError


def merge_files(ranks: Sequence[RankFiles]) -> RankFiles:
    """What all ranks have written."""
    files = sorted(entry for rank in ranks for entry in rank.files.items())
    tables: dict[str, dict[str, Any]] = {}
    for prefix, entry in (entry for rank in ranks for entry in rank.tables.items()):
        tables.setdefault(prefix, entry | {"parts": []})["parts"].extend(entry["parts"])
    return RankFiles(dict(files), tables, sum(rank.num_bytes for rank in ranks), ranks[0].servers)


def describe_part(config: TableConfig) -> dict[str, Any]:
    """What the manifest says of a part of a table, beside its files."""
    return {
        "table": config.name,
        "rows": [config.row_origin, config.num_embeddings],
        "columns": [config.column_origin, config.embedding_dim],
        "bound": config.bound,
    }


def _stem(prefix: str, part: TableConfig | None = None) -> str:
    """The beginning of file names, of a collection or of a part of a table, which no other one has."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", prefix.removeprefix("model."))[:80]
    origin = f"-{part.row_origin}-{part.column_origin}" if part and (part.row_origin or part.column_origin) else ""
    return f"{readable}-{zlib.crc32(prefix.encode()):08x}{origin}"


def _store(table: CachedTable) -> DiskRows:
    assert isinstance(table.store, DiskRows)
    return table.store


def _link_chain(folder: Path, prefix: str, store: DiskRows, snapshot: str | None, earlier: Earlier) -> Files:
    for source, manifest in earlier:
        for part in manifest.get("tables", {}).get(prefix, {"parts": []})["parts"]:
            if part["snapshot"] == snapshot:
                files = {name: manifest["files"][name] for name in part["files"]}
                return files if _pays(source, files, store) and _link(source, folder, files) else {}
    return {}


def _pays(source: Path, files: Mapping[str, list[int]], store: DiskRows) -> bool:
    """Whether a chain is intact, short enough, and its changes take less than the whole snapshot."""
    if len(files) >= MAX_FILES or any(size_of(source / name) != size for name, (size, _) in files.items()):
        return False
    base, *changes = [allocated(source / name) for name in files]
    return sum(changes) + store.changed_pages().numel() * PAGE_BYTES < base


def _link(source: Path, folder: Path, names: Iterable[str]) -> bool:
    try:
        for name in names:
            (folder / name).hardlink_to(source / name)
    except OSError:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        return False
    return True


class HostStager(BlockingAsyncStager):
    """Copies tensors to host memory; its buffers are made at the first copy and used again for the next ones.

    Their memory is pinned for what comes from a CUDA device. Unlike torch's stagers it knows `TableShards`, copies only
    the part of a storage that a tensor has, and fails on all ranks if it fails on one.
    """

    def __init__(self, group: RankGroup | None = None) -> None:
        super().__init__()
        self._group = group
        self._buffers: dict[str, Tensor] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies for torch; overwrites what the last call returned. OSError on all ranks if one has no memory."""

        def copy() -> dict[str, Any]:
            try:
                return self.copy(state_dict)
            except (MemoryError, RuntimeError) as error:
                raise OSError(f"the tensors cannot be copied to host memory: {error}") from error

        return on_each_rank(self._group, copy, OSError)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank is to save of `tensors`: of `TableShards` and DTensors, such ones on the CPU."""
        previous_buffers, self._buffers = self._buffers, {}  # buffers that are not wanted any more are freed

        def fill(name: str, tensor: Tensor) -> Tensor:
            buffer = previous_buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
            return buffer.copy_(tensor, non_blocking=tensor.is_cuda)

        def copy(name: str, tensor: Tensor) -> Tensor:
            if isinstance(tensor, TableShards):
                numbers = count()
                return tensor.map(lambda part: fill(f"{name} {next(numbers)}", part), only_primary=True)
            if isinstance(tensor, DTensor):
                return DTensor(fill(name, tensor.to_local()), tensor._spec, requires_grad=False)
            return fill(name, tensor)

        copies = {name: copy(name, tensor) for name, tensor in tensors.items()}
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies
