"""Reads checkpoints: the manifest, tensors in the format of `torch.distributed.checkpoint`, rows of tables on disk.

Rows of saved tables are read a piece at a time: out of a table's files or tensors, into a table on disk or into memory.
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
from tritonemb.storage.checkpoint import MANIFEST, ROWS, CheckpointPlanner, CheckpointReader, read_manifest_text
from tritonemb.tables.cached_table import CHUNK_BYTES, CachedTable
from tritonemb.training.checkpoint.writer import describe_part, split_tables
from tritonemb.training.ranks import on_all_ranks, on_each_rank
from tritonemb.types import TableConfig
from tritonemb.utils import on_error

MAX_LISTED = 20
Stored = Mapping[str, TensorStorageMetadata]  # a checkpoint's tensors by name
# Some rows of a whole table, ascending; their first column; and each field's values, of which some have no columns.
_Block = tuple[Tensor, int, Mapping[str, Tensor]]


def read_manifest(path: str | Path, group: RankGroup | None = None) -> dict[str, Any]:
    """What `trainer.json` of a checkpoint says, after a check, which the ranks of a group share, that it is whole.

    Raises:
        FileNotFoundError, ValueError: there is none, it is damaged, or it is of a format that this version cannot read;
            on every rank. One without a digest is a warning.
    """
    path, group = Path(path), RankGroup() if group is None else group
    text, manifest = on_each_rank(group, lambda: read_manifest_text(path))
    if len(set(on_all_ranks(group, lambda: zlib.crc32(text)))) > 1:
        raise ValueError(f"the ranks find different checkpoints at {path}; it must be on a file system that they share")
    if group.rank == 0 and "sha256" not in manifest:
        warnings.warn(f"{path / MANIFEST} has no digest, as of old versions: not all damage is found", stacklevel=2)
    on_all_ranks(group, lambda: files.check_files(path, manifest["files"], group.rank, group.size))
    return manifest


def stored_tensors(path: str | Path, group: RankGroup | None = None) -> dict[str, TensorStorageMetadata]:
    """Names, shapes and dtypes of a checkpoint's tensors, also of tables that are files; each rank reads them."""
    entries, tables = on_each_rank(
        group, lambda: (CheckpointReader(path).read_metadata().state_dict_metadata, saved_tables(Path(path)))
    )
    result = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    for prefix, table in tables.items():
        for field, (dtype, size) in table["fields"].items():
            properties = TensorProperties(getattr(torch, dtype))
            result[f"{prefix}.{field}"] = TensorStorageMetadata(properties, torch.Size(size), [])
    return result


def saved_on_servers(path: Path) -> dict[str, list[list[Path]]]:
    """Files of embedding servers, a chain of each, by collection."""
    servers = read_manifest_text(path)[1].get("servers", {}) if (path / MANIFEST).is_file() else {}
    return {name: [[path / file for file in chain["files"]] for chain in chains] for name, chains in servers.items()}


def saved_tables(path: Path) -> dict[str, dict[str, Any]]:
    """What a checkpoint's manifest, if it has one, says of the tables that are files, by the prefix of their names."""
    return read_manifest_text(path)[1].get("tables", {}) if (path / MANIFEST).is_file() else {}


def load_tensors(
    path: str | Path, tensors: dict[str, Tensor], ignore: tuple[str, ...] = (), group: RankGroup | None = None
) -> None:
    """Read a checkpoint into `tensors`, in place.

    Args:
        tensors: this rank's, whole ones or parts (`TableShards`, DTensors), however they were saved. The table that an
            `DiskTensor` refers to adopts other rows, when all else has been read.
        ignore: beginnings of names that may be in the checkpoint alone.
        group: ranks that load it together; a tensor of the checkpoint need not be on all of them.

    Raises:
        ValueError: on every rank, if names, shapes or dtypes differ on one; lists them all, and nothing has been read.
        StorageError: a file of a table is missing, damaged, or of another table, or there is no room for its rows;
            no table on disk has been changed then, and nothing else if there are only such tables in the checkpoint.
    """
    path = Path(path)
    files.ignore_single_process_warning()
    stored = stored_tensors(path, group)
    local = {name: dtype_and_shape(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    if problems := _differences(stored, on_all_ranks(group, lambda: local), ignore):
        more = len(problems) - MAX_LISTED
        listed = "\n  ".join(problems[:MAX_LISTED] + [f"and {more} more"] * (more > 0))
        raise ValueError(f"checkpoint {path} is of another model or optimizer:\n  {listed}")

    fresh: dict[CachedTable, DiskRows] = {}
    with on_error(lambda: [*map(DiskRows.close, fresh.values())]):
        on_all_ranks(group, lambda: _load(path, tensors, stored, fresh))
    for table, store in fresh.items():
        table.replace_store(store)


@files.checkpoint_errors("the checkpoint cannot be loaded")
def _load(path: Path, tensors: dict[str, Tensor], stored: Stored, fresh: dict[CachedTable, DiskRows]) -> None:
    """Read into memory, and add rows that tables on disk are to adopt once nothing can go wrong any more, anywhere."""
    saved = saved_tables(path)
    in_memory, on_disk = split_tables(tensors)
    reader = CheckpointReader(path)
    for part, prefix in {part: prefix for prefix, table in on_disk.items() for part in table.parts}.items():
        if prefix in saved:
            fresh[part] = read_files(path, saved[prefix], part)
        else:
            entries = {field.name: stored[f"{prefix}.{field.name}"] for field in part.record.fields}
            fresh[part] = _write_rows(part, _tensor_blocks(reader, prefix, entries, part.config))
    if plain := {name: tensor for name, tensor in in_memory.items() if name.rpartition(".")[0] not in saved}:
        load(plain, storage_reader=reader, planner=CheckpointPlanner(), no_dist=True)  # each rank reads for itself
    for prefix, entry in saved.items():
        targets = {name: in_memory[f"{prefix}.{name}"] for name in entry["fields"] if f"{prefix}.{name}" in in_memory}
        if targets:
            _fill_tensors(path, _parts_of(path, entry), targets)


def _differences(stored: Stored, entries_by_rank: list[dict[str, str]], ignore: tuple[str, ...]) -> list[str]:
    problems = []
    expected: dict[str, dict[str, int]] = {}  # name: what it is: the first rank that says so
    for rank, local_entries in enumerate(entries_by_rank):
        for name, description in local_entries.items():
            expected.setdefault(name, {}).setdefault(description, rank)
    for name in sorted(expected.keys() | stored.keys()):
        if name not in stored:
            problems.append(f"{name} is not in the checkpoint")
        elif name in expected:
            stored_description = dtype_and_shape(stored[name].properties.dtype, stored[name].size)
            for description, rank in expected[name].items():
                where = "here" if len(expected[name]) == 1 else f"on rank {rank}"
                problems += (
                    [f"{name} is {stored_description} in the checkpoint, {description} {where}"]
                    if description != stored_description
                    else []
                )
        elif not name.startswith(ignore):
            problems.append(f"{name} is in the checkpoint only")
    return problems


def same_part(entry: Mapping[str, Any], table: CachedTable) -> Mapping[str, Any] | None:
    """The very part that a table on disk is, in the manifest's `entry` of the whole table; None if it is not there."""
    description = describe_part(table.row_config)
    return next((part for part in entry["parts"] if part | description == part), None)


def read_files(path: Path, entry: Mapping[str, Any], table: CachedTable) -> DiskRows:
    """Rows that a table on disk, or a part of one, can adopt: its own files, where the same part was saved.

    `entry` is the manifest's of the whole table. Else rows never written are left out if all initial values are alike.
    """
    if (part := same_part(entry, table)) is not None:
        base, *changes = [path / name for name in part["files"]]
        return table.restore_store(base, changes)
    config, parts = table.config, _parts_of(path, entry)
    seeds = {int(snapshot_header(path / part["files"][0])["seed"]) for part in entry["parts"]}
    sparse = len(seeds) == 1 and {part["bound"] for part in parts} == {config.bound}
    first, last = config.row_origin, config.row_origin + config.num_embeddings
    blocks = chain.from_iterable(_blocks_of(path, part, first, last, sparse) for part in parts)
    return _write_rows(table, blocks, seeds.pop() if sparse else 0)


def _write_rows(table: CachedTable, blocks: Iterable[_Block], seed: int = 0) -> DiskRows:
    """A store with the rows of blocks, and the initial values of a seed where there are none."""
    store = table.empty_store(seed)
    row, column = table.config.row_origin, table.config.column_origin
    with on_error(store.close):
        for rows, first_column, values in blocks:
            records = torch.zeros(rows.numel(), table.record.num_bytes, dtype=torch.uint8)
            end = first_column + values["weight"].shape[1]
            if first_column > column or end < column + table.config.embedding_dim:
                store.read(rows - row, records).wait()  # other blocks have the other columns
            for name, view in table.record.views(records).items():
                _copy_columns(view, column, values[name], first_column)
            store.write(rows - row, records).wait()
    return store


@torch.no_grad()
def _fill_tensors(path: Path, parts: Sequence[Mapping[str, Any]], targets: Mapping[str, Tensor]) -> None:
    shards = [
        (name, shard, shard.first_row, shard.first_row + shard.tensor.shape[0])
        for name, target in targets.items()
        for shard in (target.shards if isinstance(target, TableShards) else (LocalShard(target),))
    ]
    first, last = min((entry[2] for entry in shards), default=0), max((entry[3] for entry in shards), default=0)
    for rows, first_column, values in chain.from_iterable(_blocks_of(path, part, first, last) for part in parts):
        row, end = int(rows[0]), int(rows[-1]) + 1
        for name, shard, begin, stop in shards:
            begin, stop = max(row, begin), min(end, stop)
            if begin < stop:
                target = shard.tensor[begin - shard.first_row : stop - shard.first_row]
                _copy_columns(target, shard.first_column, values[name][begin - row : stop - row], first_column)


def _copy_columns(target: Tensor, first: int, values: Tensor, first_value: int) -> None:
    if target.dim() == 1:
        target.copy_(values)
        return
    begin = max(first, first_value)
    end = max(begin, min(first + target.shape[1], first_value + values.shape[1]))
    target[:, begin - first : end - first] = values[:, begin - first_value : end - first_value]


def _parts_of(path: Path, entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The manifest's parts of a table, which make up the whole of it."""
    try:
        rectangles = [Rectangle(*part["rows"], *part["columns"]) for part in entry["parts"]]
        check_coverage(torch.Size(entry["fields"]["weight"][1]), rectangles)
    except ValueError as error:
        raise ValueError(f"{path / MANIFEST} is damaged ({error}); use another checkpoint") from None
    return entry["parts"]


def _blocks_of(
    path: Path, part: Mapping[str, Any], first: int, last: int, only_written: bool = False
) -> Iterator[_Block]:
    """The rows [first, last) of a table, as far as they are in a part of it."""
    (row, num_rows), (column, _) = part["rows"], part["columns"]
    first, last = max(0, first - row), min(num_rows, last - row)
    if first >= last:
        return
    base, *changes = [path / name for name in part["files"]]
    with ExitStack() as stack:
        snapshot_path = base
        if changes:  # they are put onto a copy, among the system's temporary files
            folder = tempfile.TemporaryDirectory(prefix="tritonemb-", ignore_cleanup_errors=True)
            snapshot_path = Path(stack.enter_context(folder)) / f"table{ROWS}"
            restore(snapshot_path, base, changes)
        saved = stack.enter_context(SnapshotReader(snapshot_path))
        header = saved.header
        actual = (header["table"], header["row_origin"], header["num_rows"], header["column_origin"])
        if actual != (part["table"], row, num_rows, column):
            raise StorageError(
                f"{base} is a snapshot of table {header['table']!r}, not of the part of table {part['table']!r} that "
                "should be there; use another checkpoint"
            )
        initial = InitialValues(saved.record, header["seed"], part["bound"], row, column)
        ranges = saved.written() if only_written else iter([(first, last)])
        inside = ((max(first, begin), min(last, end)) for begin, end in ranges)
        for rows in _chunks(inside, max(1, CHUNK_BYTES // saved.record.num_bytes)):
            records = torch.empty(rows.numel(), saved.record.num_bytes, dtype=torch.uint8)
            saved.read(rows, records, initial)
            yield rows + row, column, saved.record.views(records)


def _chunks(ranges: Iterable[tuple[int, int]], step: int) -> Iterator[Tensor]:
    parts: list[Tensor] = []
    room = step
    for begin, end in ranges:
        while begin < end:
            parts.append(torch.arange(begin, min(end, begin + room)))
            room, begin = room - parts[-1].numel(), begin + parts[-1].numel()
            if not room:
                yield torch.cat(parts)
                parts, room = [], step
    if parts:
        yield torch.cat(parts)


def _tensor_blocks(reader: CheckpointReader, prefix: str, entries: Stored, config: TableConfig) -> Iterator[_Block]:
    """The rows of a table, or of a part of one, out of tensors, as many at a time as were written at once."""
    pieces: dict[tuple[str, int], set[int]] = defaultdict(set)
    for name, entry in entries.items():
        for chunk in entry.chunks:
            row, column = (*chunk.offsets, 0)[:2]
            pieces[name, column].add(row)
    # The columns in the most pieces have the smallest ones, so the least of the others is read in vain.
    first, last = config.row_origin, config.row_origin + config.num_embeddings
    edges = {first, last, *(row for row in max(pieces.values(), key=len) if first < row < last)}
    for begin, end in pairwise(sorted(edges)):
        size = end - begin
        buffers = {n: torch.empty((size, *e.size[1:]), dtype=e.properties.dtype) for n, e in entries.items()}
        shards = {n: TableShards(entries[n].size, t.dtype, [LocalShard(t, begin)]) for n, t in buffers.items()}
        parts: dict[str, Any] = {f"{prefix}.{name}": part for name, part in shards.items()}
        load(parts, storage_reader=reader, planner=CheckpointPlanner(), no_dist=True)
        for rows in _chunks([(0, size)], max(1, CHUNK_BYTES // sum(t[0].nbytes for t in buffers.values()))):
            yield rows + begin, 0, {name: tensor[rows[0] : rows[-1] + 1] for name, tensor in buffers.items()}
