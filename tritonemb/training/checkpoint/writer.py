"""Writing of checkpoints: tensors by `torch.distributed.checkpoint`, snapshots of tables on disk and on servers.

The shard of a table on disk is saved by its rank, or by the first one of several replicas, without a copy in memory. It
is a chain of files: a full snapshot, followed in incremental checkpoints by the changes since, in order. Files of
earlier checkpoints are hard links, so each checkpoint is self-contained, and any may be removed.
"""

import itertools
import json
import re
import time
import zlib
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from tritonemb.comm.group import RankGroup
from tritonemb.sharding import sharded_tensor
from tritonemb.sharding.sharded_tensor import LocalShard, Rectangle, TableShards, check_coverage, dtype_and_shape
from tritonemb.storage import DiskRows, IoFuture, snapshot_header
from tritonemb.storage.checkpoint import CHANGES_SUFFIX, ROWS_SUFFIX, ChecksumWriter, Files, size_and_checksum, size_of
from tritonemb.storage.io import allocated
from tritonemb.tables.cached_rows import CachedRows, DiskTensor
from tritonemb.tables.server_table import TableService
from tritonemb.training.callbacks import CheckpointSaved
from tritonemb.training.ranks import Failure, on_all_ranks, on_each_rank, raise_failures
from tritonemb.types import TableConfig

MAX_FILES = 64  # per chain: limits the time to open, check and read them on resume

# Shape, dtype, and rectangles that a rank saves, of each sharded table or state.
Shards = Mapping[str, tuple[torch.Size, torch.dtype, list[Rectangle]]]
Tensors = Mapping[str, Tensor]
Manifest = Mapping[str, Any]
Earlier = Sequence[tuple[Path, Manifest]]  # earlier checkpoints and their manifests, newest first


class CheckpointWriter(ChecksumWriter):
    """Storage writer of a checkpoint for `torch.distributed.checkpoint`: all ranks write shards, rank 0 publishes.

    Construction is collective. Arguments and errors as of `CheckpointFolder.save`. `publish` is called on rank 0 when
    the files of all ranks are on disk; only rank 0's `services` are used.

    Exceptions are sent as a `Failure`: if one could not be pickled, the other ranks would wait forever.
    """

    def __init__(
        self, folder: Path, step: int, tensors: Tensors, manifest: Manifest, group: RankGroup,
        publish: Callable[["RankFiles"], None], services: Mapping[str, TableService] | None = None,
    ) -> None:  # fmt: skip
        self._start_time = time.perf_counter()

        # Check manifest and shards on all ranks, and write back rows of tables on disk.
        in_memory, tables = split_tables(tensors)
        snapshots = TableSnapshots(tables, services or {} if group.rank == 0 else {})

        def check() -> tuple[Shards, int, int, int]:
            self.manifest = json.dumps(manifest)
            on_disk = snapshots.write_back()  # a failure loses these rows, so it ends training
            shards = {n: (t.shape, t.dtype, t.rectangles()) for n, t in tensors.items() if isinstance(t, TableShards)}
            return shards, *local_bytes(in_memory), on_disk

        shards, sharded, replicated, on_disk = zip(*on_all_ranks(group, check), strict=True)
        check_shards(shards)
        self.tensors = split_large_tensors(in_memory) if group.size == 1 else in_memory

        # Copying ahead from a device, torch's default of 10 MB, costs time without tensors on a device.
        copy_ahead = 10_000_000 if any(tensor.is_cuda for tensor in self.tensors.values()) else 0
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=copy_ahead)
        self.needed = sum(sharded) + max(replicated) + sum(on_disk)  # upper bound of bytes
        self.step, self.snapshots, self.group = step, snapshots, group
        self._folder, self._publish = folder, publish
        self._error: BaseException | None = None

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        """Write this rank's tensors, and finish its snapshots; called by torch. The last result is a `RankFiles`."""
        try:
            *results, files = super().write_data(plan, planner).value()
            results.append(self.snapshots.finish(files))
        except BaseException as error:
            self.snapshots.settle()
            self._error = error
            results = [Failure.of(error)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Publish the checkpoint on rank 0, unless a rank has failed; called by torch with the results of all ranks."""
        outcomes: list[Any] = [rank_results.pop() for rank_results in results]
        if not any(isinstance(outcome, Failure) for outcome in outcomes):
            try:
                rank_files = merge_files(outcomes, self.finish_files(metadata, results))
                self._publish(rank_files)
                outcomes = [rank_files.num_bytes, time.perf_counter() - self._start_time]
            except BaseException as error:
                self._error, outcomes[0] = error, Failure.of(error)
        metadata.storage_data = outcomes  # torch sends it to all ranks; the file has been written

    def result(self, metadata: Metadata) -> CheckpointSaved:
        """Return the saved checkpoint from torch's metadata, on every rank; raise OSError if a rank failed."""
        raise_failures(metadata.storage_data, self._error, OSError)
        return CheckpointSaved(self.step, self._folder.with_name(f"step-{self.step}"), *metadata.storage_data)


def check_shards(ranks: Sequence[Shards]) -> None:
    for name in dict.fromkeys(name for shards in ranks for name in shards):
        entries = [shards[name] for shards in ranks if name in shards]
        if len(kinds := sorted({dtype_and_shape(dtype, shape) for shape, dtype, _ in entries})) > 1:
            raise ValueError(f"{name} is not the same on all ranks: {', '.join(kinds)}")
        try:
            check_coverage(entries[0][0], [rectangle for *_, rectangles in entries for rectangle in rectangles])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def local_bytes(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return this rank's bytes of sharded tensors, and of replicated tensors."""
    shards = sum(tensor.bytes_to_save() for tensor in tensors.values() if isinstance(tensor, TableShards))
    dtensors = sum(tensor.to_local().nbytes for tensor in tensors.values() if isinstance(tensor, DTensor))
    replicated = sum(tensor.nbytes for tensor in tensors.values() if not isinstance(tensor, TableShards | DTensor))
    return shards + dtensors, replicated


def split_large_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Wrap large tensors of a single process as `TableShards`, to write and read them in pieces with little memory."""
    plain = {name: t for name, t in tensors.items() if not isinstance(t, TableShards | DTensor) and t.dim() in (1, 2)}
    large = {name: t for name, t in plain.items() if t.nbytes > sharded_tensor.PIECE_BYTES}
    return {**tensors, **{name: TableShards(t.shape, t.dtype, [LocalShard(t)]) for name, t in large.items()}}


class DiskTable(NamedTuple):
    """Table on disk and its shards on this rank; an unsharded table is one shard."""

    fields: dict[str, tuple[str, list[int]]]  # dtype and shape of the unsharded weight and states
    shards: dict[CachedRows, bool]  # whether this rank saves the shard


class RankFiles(NamedTuple):
    """Files that a rank has written, with entries of the manifest."""

    files: Files
    tables: dict[str, dict[str, Any]]  # entries of tables on disk with this rank's shards, by prefix of tensor names
    num_bytes: int  # without hard links
    servers: dict[str, list[dict[str, Any]]]  # chains of embedding servers, with their last snapshots, by collection


def split_tables(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, DiskTable]]:
    """Split tensors into those in memory, and this rank's tables on disk by the prefix of tensor names."""
    in_memory, tables = dict[str, Tensor](), dict[str, DiskTable]()
    for name, value in tensors.items():
        local_shards = value.shards if isinstance(value, TableShards) else [LocalShard(value)]
        on_disk = [(s.tensor.rows, s.is_primary) for s in local_shards if isinstance(s.tensor, DiskTensor)]
        if not on_disk:
            in_memory[name] = value
            continue
        prefix, _, field = name.rpartition(".")
        table = tables.setdefault(prefix, DiskTable({}, {}))
        table.fields[field] = (str(value.dtype).removeprefix("torch."), list(value.shape))
        for table_shard, is_owned in on_disk:
            table.shards[table_shard] = is_owned or table.shards.get(table_shard, False)
    return in_memory, tables


class TableSnapshots:
    """Snapshots of this rank's shards of tables on disk, written during training, and of the collections on embedding
    servers of `services`, by path, which are complete after `begin`."""

    def __init__(self, tables: Mapping[str, DiskTable], services: Mapping[str, TableService]) -> None:
        self.tables, self._services, self._folder = tables, services, Path()
        self._servers = dict[str, list[dict[str, Any]]]()
        self._shards = defaultdict[CachedRows, list[str]](list)  # all prefixes of each shard
        for prefix, table in tables.items():
            for shard in (shard for shard, owned in table.shards.items() if owned):
                self._shards[shard].append(prefix)
        # Submitted ones: shard, hard links of an earlier checkpoint that the changes follow, snapshot before, new file.
        self._snapshots = list[tuple[CachedRows, Files, str | None, Path, IoFuture]]()

    def write_back(self) -> int:
        """Write back dirty rows; return an upper bound of the bytes of the snapshots."""
        for shard in self._shards:
            shard.write_back()
        return sum(shard.store.bytes_on_disk() for shard in self._shards)

    def begin(self, folder: Path, earlier: Earlier) -> None:
        """Submit snapshots of the current rows, as changes since an earlier checkpoint where that takes fewer bytes."""
        self._folder = folder
        for name, service in self._services.items():
            self._servers[name] = snapshot_servers(folder, name, service, earlier)
        for shard, prefixes in self._shards.items():
            store, stem = shard.store, _stem(prefixes[0], shard.config)
            previous = store.last_snapshot
            linked_files = _link_chain(folder, prefixes[0], store, previous, earlier)
            path = folder / (f"{stem}.{len(linked_files)}{CHANGES_SUFFIX}" if linked_files else f"{stem}{ROWS_SUFFIX}")
            future = store.snapshot(path, changes_only=bool(linked_files))
            self._snapshots.append((shard, linked_files, previous, path, future))

    def finish(self, files: Files) -> RankFiles:
        """Wait for the snapshots; return all files that this rank has written, including `files`. Raise OSError if a
        snapshot could not be written, or does not follow the previous one."""
        tables: dict[str, Any] = {prefix: {"fields": t.fields, "parts": []} for prefix, t in self.tables.items()}
        num_bytes = sum(size for size, _ in files.values())
        for shard, linked_files, previous, path, future in self._snapshots:
            future.wait()
            header = snapshot_header(path)
            if linked_files and header["after"] != previous:
                raise OSError(
                    f"another snapshot of table {shard.config.name!r} was taken during this checkpoint, so its "
                    "changes do not follow the previous checkpoint; the next checkpoint will have a full snapshot"
                )
            snapshot_files = linked_files | {path.name: size_and_checksum(path)}
            num_bytes, files = num_bytes + allocated(path), files | snapshot_files
            entry = describe_shard(shard.config) | {"files": [*snapshot_files], "snapshot": header["snapshot"]}
            for prefix in self._shards[shard]:
                tables[prefix]["parts"].append(entry)
        for chain in itertools.chain.from_iterable(self._servers.values()):
            files |= {name: size_and_checksum(self._folder / name) for name in chain["files"]}
            num_bytes += files[chain["files"][-1]][0]
        return RankFiles(files, tables, num_bytes, self._servers)

    def settle(self) -> None:
        for *_, future in self._snapshots:
            with suppress(OSError):
                future.wait()


def snapshot_servers(folder: Path, name: str, service: TableService, earlier: Earlier) -> list[dict[str, Any]]:
    """Write snapshots of all servers of a collection, as changes since an earlier checkpoint if possible. Return per
    server the chain of files, and its last snapshot. StorageError as of `TableService.snapshot`."""
    stem = _stem(name)
    source, manifest = next((entry for entry in earlier if name in entry[1].get("servers", {})), (folder, {}))
    previous_chains = manifest.get("servers", {}).get(name, [])
    number = max((len(entry["files"]) for entry in previous_chains), default=0)
    for previous in (previous_chains if number < MAX_FILES else [], []):
        prefix = folder / f"{stem}.{number if previous else 0}."
        written = service.snapshot(prefix, changes_only=bool(previous))
        new = [Path(f"{prefix}{server}.server") for server in range(len(written))]
        follows = [entry["after"] for entry in written] == [entry["snapshot"] for entry in previous]
        chains = [entry["files"] for entry in previous] if follows else [[] for _ in written]
        if not previous or (follows and _link(source, folder, [name for chain in chains for name in chain])):
            entries = zip(chains, new, written, strict=True)
            return [{"files": [*c, path.name], "snapshot": entry["snapshot"]} for c, path, entry in entries]
        for path in new:
            path.unlink()
    raise AssertionError


def merge_files(ranks: Sequence[RankFiles], metadata: Files) -> RankFiles:
    """Merge the files of all ranks, and torch's `metadata`."""
    files, tables = sorted(ChainMap(*(rank.files for rank in ranks), metadata).items()), dict[str, dict[str, Any]]()
    for prefix, entry in (entry for rank in ranks for entry in rank.tables.items()):
        tables.setdefault(prefix, entry | {"parts": []})["parts"].extend(entry["parts"])
    num_bytes = sum(rank.num_bytes for rank in ranks) + sum(size for size, _ in metadata.values())
    return RankFiles(dict(files), tables, num_bytes, ranks[0].servers)


def describe_shard(config: TableConfig) -> dict[str, Any]:
    rows, columns = [config.row_origin, config.num_embeddings], [config.column_origin, config.embedding_dim]
    return {"table": config.name, "rows": rows, "columns": columns, "bound": config.bound}


def _stem(prefix: str, shard: TableConfig | None = None) -> str:
    """Return a unique prefix of file names, of a collection or of a shard of a table."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", prefix.removeprefix("model."))[:80]
    origin = f"-{shard.row_origin}-{shard.column_origin}" if shard and (shard.row_origin or shard.column_origin) else ""
    return f"{readable}-{zlib.crc32(prefix.encode()):08x}{origin}"


def _link_chain(folder: Path, prefix: str, store: DiskRows, snapshot: str | None, earlier: Earlier) -> Files:
    """Link the chain that ends with `snapshot` into a new checkpoint's folder; {} for a full snapshot instead."""
    for source, manifest in earlier:
        for shard in manifest.get("tables", {}).get(prefix, {"parts": []})["parts"]:
            if shard["snapshot"] == snapshot:
                files = {name: manifest["files"][name] for name in shard["files"]}
                return files if _can_extend(source, files, store) and _link(source, folder, files) else {}
    return {}


def _can_extend(source: Path, files: Mapping[str, list[int]], store: DiskRows) -> bool:
    """Return whether a chain is intact and short enough, and all changes together are smaller than its base."""
    if len(files) >= MAX_FILES or any(size_of(source / name) != size for name, (size, _) in files.items()):
        return False
    base, *changes = [allocated(source / name) for name in files]
    return sum(changes) + store.changed_pages().numel() * store.page_bytes < base


def _link(source: Path, folder: Path, names: Iterable[str]) -> bool:
    """Hard-link files into a folder; return False, without links, if that fails."""
    try:
        for name in names:
            (folder / name).hardlink_to(source / name)
        return True
    except OSError:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        return False


class HostStager(BlockingAsyncStager):
    """Stages tensors in host memory, in buffers that are reused; pinned for tensors on a CUDA device.

    Unlike torch's stagers, it supports `TableShards`, copies no more than a view, and raises on all ranks.
    """

    def __init__(self, group: RankGroup | None = None) -> None:
        super().__init__()
        self._group = group
        self._buffers: dict[str, Tensor] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the tensors of a state dict, over those of the last call. OSError on all ranks if one lacks memory."""

        def copy() -> dict[str, Any]:
            try:
                return self.copy(state_dict)
            except (MemoryError, RuntimeError) as error:
                raise OSError(f"cannot copy tensors to host memory: {error}") from error

        return on_each_rank(self._group, copy, OSError)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy to host memory what this rank saves of `tensors`; `TableShards` and DTensors keep their types."""
        previous_buffers, self._buffers = self._buffers, {}  # frees buffers of tensors that no longer exist

        def fill(name: str, tensor: Tensor) -> Tensor:
            buffer = previous_buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
            return buffer.copy_(tensor, non_blocking=tensor.is_cuda)

        def copy(name: str, tensor: Tensor) -> Tensor:
            if isinstance(tensor, TableShards):
                numbers = itertools.count()
                return tensor.map(lambda shard: fill(f"{name} {next(numbers)}", shard), only_primary=True)
            if isinstance(tensor, DTensor):
                return DTensor(fill(name, tensor.to_local()), tensor._spec, requires_grad=False)
            return fill(name, tensor)

        copies = {name: copy(name, tensor) for name, tensor in tensors.items()}
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies
