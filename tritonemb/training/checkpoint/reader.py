"""Reading of checkpoints: manifest, tensors in the format of `torch.distributed.checkpoint`, rows of tables on disk.

Rows of saved tables are read in blocks from a table's files or tensors, and written to a table on disk or to memory.
"""

import tempfile
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tritonemb.comm.group import RankGroup
from tritonemb.sharding.sharded_tensor import LocalShard, Rectangle, TableShards, check_coverage, dtype_and_shape
from tritonemb.storage import DiskRows, InitialValues, SnapshotReader, StorageError, restore, snapshot_header
from tritonemb.storage import checkpoint as files
from tritonemb.storage.checkpoint import MANIFEST, ROWS_SUFFIX, CheckpointPlanner, CheckpointReader, read_manifest_text
from tritonemb.storage.memory import CHUNK_BYTES
from tritonemb.tables.cached_rows import CachedRows
from tritonemb.training.checkpoint.writer import describe_shard, split_tables
from tritonemb.training.ranks import on_all_ranks, on_each_rank
from tritonemb.types import TableConfig
from tritonemb.utils import join_names, on_error

TensorMetadata = Mapping[str, TensorStorageMetadata]  # a checkpoint's tensors by name
# Blocks of rows: row numbers in the unsharded table, ascending; first column; values by field, some without columns.
Blocks = Iterator[tuple[Tensor, int, Mapping[str, Tensor]]]


def read_manifest(path: str | Path, group: RankGroup | None = None) -> dict[str, Any]:
    """Read the manifest of a checkpoint, `trainer.json`, and check all files; the ranks of a group divide the checks.
    Raise FileNotFoundError or ValueError on every rank if the checkpoint is missing, damaged, or of an unknown format;
    warn of a manifest without a digest."""
    path, group = Path(path), RankGroup() if group is None else group
    text, manifest = on_each_rank(group, lambda: read_manifest_text(path))
    if len(set(on_all_ranks(group, lambda: zlib.crc32(text)))) > 1:
        raise ValueError(f"the ranks read different checkpoints from {path}; put it on a shared file system")
    if group.rank == 0 and "sha256" not in manifest:
        warnings.warn(f"{path / MANIFEST} has no digest (old version), so damage may go undetected", stacklevel=2)
    on_all_ranks(group, lambda: files.check_files(path, manifest["files"], group.rank, group.size))
    return manifest


def stored_tensors(path: str | Path, group: RankGroup | None = None) -> dict[str, TensorStorageMetadata]:
    """Read names, shapes and dtypes of a checkpoint's tensors, including tables saved as files; on each rank."""
    metadata, tables = on_each_rank(group, lambda: (CheckpointReader(path).read_metadata(), saved_tables(Path(path))))
    entries = metadata.state_dict_metadata
    result = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    for prefix, table in tables.items():
        for field, (dtype, size) in table["fields"].items():
            properties = TensorProperties(getattr(torch, dtype))
            result[f"{prefix}.{field}"] = TensorStorageMetadata(properties, torch.Size(size), [])
    return result


def saved_on_servers(path: Path) -> dict[str, list[list[Path]]]:
    """Snapshot files of embedding servers, by collection: one chain of files per server."""
    servers = saved_tables(path, "servers")
    return {name: [[path / file for file in chain["files"]] for chain in chains] for name, chains in servers.items()}


def saved_tables(path: Path, member: str = "tables") -> dict[str, Any]:
    """Manifest entries of tables saved as files, by the prefix of their tensors' names; {} without a manifest."""
    return read_manifest_text(path)[1].get(member, {}) if (path / MANIFEST).is_file() else {}


def load_tensors(
    path: str | Path, tensors: dict[str, Tensor], ignore: tuple[str, ...] = (), group: RankGroup | None = None
) -> None:
    """Read a checkpoint into `tensors`, in place.

    Tensors may be shards (`TableShards`, DTensors), however they were saved. A table that a `DiskTensor` refers to gets
    a new store after everything else has been read. Names that begin with a prefix in `ignore` may be missing. The
    ranks of a `group` load together; not every rank needs every tensor.

    Raises:
        ValueError: on every rank, if names, shapes or dtypes differ; the message lists all, and nothing was read.
        StorageError: a file of a table is missing, damaged, or of another table, or the disk is full; no table on disk
            was changed then, and no tensor if the checkpoint has tables on disk only.
    """
    path = Path(path)
    files.ignore_single_process_warning()
    metadata = stored_tensors(path, group)
    local_types = {name: dtype_and_shape(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    if problems := _differences(metadata, on_all_ranks(group, lambda: local_types), ignore):
        lines = join_names(problems, limit=20, separator="\n  ", last="\n  ")
        raise ValueError(f"checkpoint {path} is of another model or optimizer:\n  {lines}")

    # Tables on disk adopt their new stores only when all ranks have read everything.
    stores: dict[CachedRows, DiskRows] = {}
    with on_error(lambda: [*map(DiskRows.close, stores.values())]):
        on_all_ranks(group, lambda: _load(path, tensors, metadata, stores))
    for shard, store in stores.items():
        shard.replace_store(store)


@files.checkpoint_errors("the checkpoint cannot be loaded")
def _load(path: Path, tensors: dict[str, Tensor], metadata: TensorMetadata, stores: dict[CachedRows, Any]) -> None:
    """Read tensors in memory, and add new stores of tables on disk to `stores`."""
    table_entries = saved_tables(path)
    (in_memory, on_disk), reader = split_tables(tensors), CheckpointReader(path)

    # Tables on disk: from files if they were on disk when saved, otherwise from tensors.
    for shard, prefix in {shard: prefix for prefix, table in on_disk.items() for shard in table.shards}.items():
        if prefix in table_entries:
            stores[shard] = load_store(path, table_entries[prefix], shard)
        else:
            entries = {field.name: metadata[f"{prefix}.{field.name}"] for field in shard.record.fields}
            stores[shard] = _write_rows(shard, _tensor_blocks(reader, prefix, entries, shard.config))

    # Tensors in memory: from tensors, on each rank independently; or from the files of tables that were on disk.
    if plain_tensors := {name: t for name, t in in_memory.items() if name.rpartition(".")[0] not in table_entries}:
        load(plain_tensors, storage_reader=reader, planner=CheckpointPlanner(), no_dist=True)
    for prefix, entry in table_entries.items():
        targets = {name: in_memory[f"{prefix}.{name}"] for name in entry["fields"] if f"{prefix}.{name}" in in_memory}
        if targets:
            _fill_tensors(path, _shards_of(path, entry), targets)


def _differences(metadata: TensorMetadata, types_by_rank: list[dict[str, str]], ignore: tuple[str, ...]) -> list[str]:
    """Describe differences of tensors between the checkpoint and the ranks; `types_by_rank` has dtypes with shapes."""
    problems, types_by_name = [], defaultdict[str, dict[str, int]](dict)  # name -> type -> first rank with this type
    for rank, types in enumerate(types_by_rank):
        for name, local_type in types.items():
            types_by_name[name].setdefault(local_type, rank)
    for name in sorted(types_by_name.keys() | metadata.keys()):
        if name not in metadata:
            problems.append(f"{name} is not in the checkpoint")
        elif name in types_by_name:
            stored_type = dtype_and_shape(metadata[name].properties.dtype, metadata[name].size)
            for local_type, rank in types_by_name[name].items():
                owner = "in the model" if len(types_by_name[name]) == 1 else f"on rank {rank}"
                if local_type != stored_type:
                    problems.append(f"{name} is {stored_type} in the checkpoint, {local_type} {owner}")
        elif not name.startswith(ignore):
            problems.append(f"{name} is in the checkpoint only")
    return problems


def find_shard(entry: Mapping[str, Any], local_shard: CachedRows) -> Mapping[str, Any] | None:
    """Find the shard that is exactly a table on disk in the manifest's entry of the table; None if it was not saved."""
    target = describe_shard(local_shard.config)
    return next((shard for shard in entry["parts"] if shard | target == shard), None)


def load_store(path: Path, entry: Mapping[str, Any], local_shard: CachedRows) -> DiskRows:
    """Create a store with the saved rows of a table or shard on disk; `entry` is the manifest entry of the table.

    Restore the files of the same shard if it was saved. Otherwise copy rows from the files of all shards; skip rows
    that were never written if all shards have the same initial values.
    """
    if (saved_shard := find_shard(entry, local_shard)) is not None:
        return local_shard.new_store(snapshots=[path / name for name in saved_shard["files"]])
    config, shards = local_shard.config, _shards_of(path, entry)
    seeds = {int(snapshot_header(path / shard["files"][0])["seed"]) for shard in shards}
    skip_unwritten = len(seeds) == 1 and {shard["bound"] for shard in shards} == {config.bound}
    first, last = config.row_origin, config.row_origin + config.num_embeddings
    blocks = chain.from_iterable(_blocks_of(path, shard, first, last, skip_unwritten) for shard in shards)
    return _write_rows(local_shard, blocks, seeds.pop() if skip_unwritten else 0)


def _write_rows(shard: CachedRows, blocks: Blocks, seed: int = 0) -> DiskRows:
    """Create a store with the rows of blocks; other rows have the initial values of `seed`."""
    store = shard.new_store(seed)
    row, column = shard.config.row_origin, shard.config.column_origin
    with on_error(store.close):
        for rows, first_column, values in blocks:
            records = torch.zeros(rows.numel(), shard.record.num_bytes, dtype=torch.uint8)
            end = first_column + values["weight"].shape[1]
            if first_column > column or end < column + shard.config.embedding_dim:
                store.read(rows - row, records).wait()  # keep columns of other blocks
            for name, view in shard.record.views(records).items():
                _copy_columns(view, column, values[name], first_column)
            store.write(rows - row, records).wait()
    return store


@torch.no_grad()
def _fill_tensors(path: Path, saved_shards: Sequence[Mapping[str, Any]], targets: Mapping[str, Tensor]) -> None:
    shards = [
        (name, shard, shard.first_row, shard.first_row + shard.tensor.shape[0])
        for name, target in targets.items()
        for shard in (target.shards if isinstance(target, TableShards) else (LocalShard(target),))
    ]
    first, last = min((entry[2] for entry in shards), default=0), max((entry[3] for entry in shards), default=0)
    for rows, first_column, values in chain.from_iterable(_blocks_of(path, s, first, last) for s in saved_shards):
        row, end = int(rows[0]), int(rows[-1]) + 1
        for name, shard, begin, stop in shards:
            begin, stop = max(row, begin), min(end, stop)
            if begin < stop:
                target = shard.tensor[begin - shard.first_row : stop - shard.first_row]
                _copy_columns(target, shard.first_column, values[name][begin - row : stop - row], first_column)


def _copy_columns(target: Tensor, target_column: int, values: Tensor, column: int) -> None:
    """Copy the columns that `values`, from `column` on, and `target` have in common; or copy a vector."""
    if target.dim() == 1:
        target.copy_(values)
        return
    begin = max(target_column, column)
    end = max(begin, min(target_column + target.shape[1], column + values.shape[1]))
    target[:, begin - target_column : end - target_column] = values[:, begin - column : end - column]


def _shards_of(path: Path, entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Shards of a table in its manifest entry; raise ValueError unless they cover the table."""
    try:
        rectangles = [Rectangle(*shard["rows"], *shard["columns"]) for shard in entry["parts"]]
        check_coverage(torch.Size(entry["fields"]["weight"][1]), rectangles)
    except ValueError as error:
        raise ValueError(f"{path / MANIFEST} is damaged ({error}); use another checkpoint") from None
    return entry["parts"]


def _blocks_of(path: Path, shard: Mapping[str, Any], first: int, last: int, only_written: bool = False) -> Blocks:
    """Read those rows of a shard that are in [first, last) of the table; with `only_written`, only written ones."""
    (row, num_rows), (column, _) = shard["rows"], shard["columns"]
    first, last = max(0, first - row), min(num_rows, last - row)
    if first >= last:
        return
    base, *changes = [path / name for name in shard["files"]]
    with ExitStack() as stack:
        snapshot_path = base
        if changes:  # apply them to a copy of the base, in the system's temporary folder
            folder = tempfile.TemporaryDirectory(prefix="tritonemb-", ignore_cleanup_errors=True)
            snapshot_path = Path(stack.enter_context(folder)) / f"table{ROWS_SUFFIX}"
            restore(snapshot_path, base, changes)
        reader = stack.enter_context(SnapshotReader(snapshot_path))
        header = reader.header
        identity = tuple(header[name] for name in ("table", "row_origin", "num_rows", "column_origin"))
        if identity != (shard["table"], row, num_rows, column):
            raise StorageError(
                f"{base} is a snapshot of table {header['table']!r}, expected the shard of table {shard['table']!r} of "
                "the manifest; use another checkpoint"
            )
        initial = InitialValues(reader.record, header["seed"], shard["bound"], row, column)
        ranges = reader.written() if only_written else [(first, last)]
        clipped_ranges = ((max(first, begin), min(last, end)) for begin, end in ranges)
        for rows in _chunks(clipped_ranges, max(1, CHUNK_BYTES // reader.record.num_bytes)):
            records = torch.empty(rows.numel(), reader.record.num_bytes, dtype=torch.uint8)
            reader.read(rows, records, initial)
            yield rows + row, column, reader.record.views(records)


def _chunks(ranges: Iterable[tuple[int, int]], step: int) -> Iterator[Tensor]:
    """Concatenate ranges of rows, and split them into chunks of `step` rows."""
    pieces: list[Tensor] = []
    remaining = step
    for begin, end in ranges:
        while begin < end:
            pieces.append(torch.arange(begin, min(end, begin + remaining)))
            remaining, begin = remaining - pieces[-1].numel(), begin + pieces[-1].numel()
            if not remaining:
                yield torch.cat(pieces)
                pieces, remaining = [], step
    if pieces:
        yield torch.cat(pieces)


def _tensor_blocks(reader: CheckpointReader, prefix: str, entries: TensorMetadata, config: TableConfig) -> Blocks:
    """Read the rows of a table or a shard from saved tensors, in ranges of rows that were written at once."""
    begins_by_column: dict[tuple[str, int], set[int]] = defaultdict(set)
    for name, chunk in ((name, chunk) for name, entry in entries.items() for chunk in entry.chunks):
        row, column = (*chunk.offsets, 0)[:2]
        begins_by_column[name, column].add(row)
    # Split at the rows where the most finely split tensor was split, so that few rows of the others are read twice.
    first, last = config.row_origin, config.row_origin + config.num_embeddings
    bounds = {first, last, *(row for row in max(begins_by_column.values(), key=len) if first < row < last)}
    for begin, end in pairwise(sorted(bounds)):
        size = end - begin
        buffers = {n: torch.empty((size, *e.size[1:]), dtype=e.properties.dtype) for n, e in entries.items()}
        shards = {n: TableShards(entries[n].size, t.dtype, [LocalShard(t, begin)]) for n, t in buffers.items()}
        tensors: dict[str, Any] = {f"{prefix}.{name}": shard for name, shard in shards.items()}
        load(tensors, storage_reader=reader, planner=CheckpointPlanner(), no_dist=True)
        for rows in _chunks([(0, size)], max(1, CHUNK_BYTES // sum(t[0].nbytes for t in buffers.values()))):
            yield rows + begin, 0, {name: tensor[rows[0] : rows[-1] + 1] for name, tensor in buffers.items()}
