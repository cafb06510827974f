"""Full and incremental snapshots of a collection's tables on one server, and their restoration on any servers.

A snapshot is a file of checksummed records, each of which has a message: a header; per table its rows, or, if it is
incremental, the ids that have lost their rows and the rows that were read or written since its predecessor; pushes that
have not been applied; and an end mark. The files of all servers at one step are one snapshot of the collection: any
number of servers, with other partitions, can read them.
"""

import json
import os
import struct
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tritonemb.layout import nonzero
from tritonemb.memory import bytes_of, describe_tensors, tensor_spans, view_tensors
from tritonemb.server.spec import CollectionSpec, TableSpec, with_current_names
from tritonemb.server.tables import PushRequest, ServedTables
from tritonemb.server.transport import Message, Values
from tritonemb.storage.store import StorageError, storage_errors
from tritonemb.tables.dynamic_table import row_fields
from tritonemb.utils import on_error, sync

Chain = list[tuple[Path, Values]]
"""Snapshot files of one server with their headers, in order."""
RECORD_BYTES = 1 << 24  # of rows, about: bounds the memory of a reader
_HEADER = struct.Struct("<IQI")  # bytes of JSON, bytes of tensors, CRC-32 of both
_HEADER_BYTES = _HEADER.size + 4  # with the CRC-32 of the header


def write_record(file: BinaryIO, message: Message) -> int:
    """Append a record, and return its size in bytes."""
    values, tensors = message
    arrays = [bytes_of(tensor) for tensor in tensors]
    text = json.dumps({"values": values, "tensors": describe_tensors(tensors)}).encode()
    checksum, size = zlib.crc32(text), sum(map(len, arrays))
    for array in arrays:
        checksum = zlib.crc32(array, checksum)
    header = _HEADER.pack(len(text), size, checksum)
    file.write(header + zlib.crc32(header).to_bytes(4, "little"))
    file.write(text)
    for array in arrays:
        file.write(array)
    return _HEADER_BYTES + len(text) + size


def read_records(path: Path, torn: bool = False) -> Iterator[Message]:
    """Yield the records of a file in order. StorageError if it is damaged.

    After the first record, which some callers read alone, a thread reads the next record while the caller uses one.

    Args:
        torn: skip a last record that was written partially, which was never acknowledged.
    """
    with (
        storage_errors(f"file {path} cannot be read", "check the disk"),
        path.open("rb") as file,
        ThreadPoolExecutor(1) as thread,
    ):
        read = partial(_read_record, file, path, torn)
        if (record := read()) is not None:
            yield record
            next_record = thread.submit(read)
            while (record := next_record.result()) is not None:
                next_record = thread.submit(read)
                yield record


def _read_record(file: BufferedReader, path: Path, torn: bool) -> Message | None:
    start, file_size = file.tell(), os.fstat(file.fileno()).st_size
    if start == file_size:
        return None
    header = file.read(_HEADER_BYTES)
    is_header_valid = len(header) == _HEADER_BYTES and zlib.crc32(header[:-4]) == int.from_bytes(header[-4:], "little")
    if is_header_valid:
        text_size, size, checksum = _HEADER.unpack(header[:-4])
        end = start + _HEADER_BYTES + text_size + size
        if end <= file_size:
            text, data = file.read(text_size), torch.empty(size, dtype=torch.uint8)
            file.readinto(data.numpy())
            if hasattr(os, "posix_fadvise"):  # read ahead while the checksum is computed
                os.posix_fadvise(file.fileno(), end, size, os.POSIX_FADV_WILLNEED)
            if zlib.crc32(data.numpy(), zlib.crc32(text)) == checksum:
                parsed = json.loads(text)
                return parsed["values"], view_tensors(data, tensor_spans(parsed["tensors"]))
    # A power failure may leave zeros where a write was in progress.
    if torn and (end >= file_size if is_header_valid else len(header) < _HEADER_BYTES or not any(header)):
        return None
    raise StorageError(f"file {path} is damaged at byte {start:,}; use another one")


def take_snapshot(served: ServedTables, chain_name: str, changes_only: bool = False) -> Iterator[Message]:
    """Yield the records of a snapshot, which is the last one of its chain when all have been written.

    With `changes_only` it is incremental, if the chain has a snapshot already.
    """
    name = uuid.uuid4().hex
    changes, ordering, table_set = served.partitions.changes, served.ordering, served.partitions.tables
    changes.note_removed()
    last = changes.chains.get(chain_name) if changes_only else None
    counters = {} if table_set is None else table_set.counters
    header = {
        "snapshot": name,
        "after": None if last is None else last.snapshot,
        "server": served.server,
        "spec": asdict(served.spec),
        "pulls": ordering.next_pull,
        "steps": ordering.next_push,
        "counters": list(counters),
        "time": time.time(),
        "is_leased": served.lease.is_active,
        "row_version": changes.version,
    }
    yield header, list(counters.values())
    for number, table in served.partitions.by_number.items():
        # In the order of rows, so that a reader inserts and writes them sequentially.
        if last is None:
            rows = table.index.tensors.rows[nonzero(table.index.tensors.digests != 0)].long().sort().values
        else:
            rows = nonzero(last.changed[number])
            rows = rows[table.index.find(table.index.ids[rows]) == rows]
        ids = table.index.ids[rows]
        if last is not None:
            removed = torch.cat([table.index.ids[:0], *last.removed[number]]).unique()
            yield {"table": number, "kind": "removed", "names": ["ids"]}, [removed]
        metadata = table.get_table_state()
        yield {"table": number, "kind": "others", "names": list(metadata), "rows": ids.numel()}, list(metadata.values())
        rows_per_record = max(1, RECORD_BYTES // served.spec.tables[number].row_bytes)
        for start in range(0, ids.numel(), rows_per_record):
            end = start + rows_per_record
            fields = table.get_row_state(ids[start:end], rows[start:end])
            if served.spec.leases_rows:  # the trainer addresses rows by number, also after a restart of the server
                fields["row"] = rows[start:end] + table.rows.config.row_origin
            yield {"table": number, "kind": "rows", "names": list(fields)}, list(fields.values())
    for batch, pushes in sorted(ordering.pushes.items()):
        for rank, push in sorted(pushes.items()):
            columns = chain.from_iterable(zip(*push.tables.values(), strict=True))
            yield {"push": batch, "rank": rank, "lr": push.lr, "ids": len(push.tables)}, list(columns)
    yield {"end": name}, []
    changes.begin_chain(chain_name, name)


def write_snapshot(path: Path, records: Iterable[Message]) -> Values:
    """Write records to a file, sync it to the disk, and return the names of the snapshot and of its predecessor.

    StorageError if it cannot be written; then the file is removed.
    """
    header: Values = {}
    errors = storage_errors(f"snapshot {path} could not be written", "check the disk")
    with errors, on_error(lambda: path.unlink(missing_ok=True)):
        with path.open("wb") as file:
            for message in records:
                header = header or message[0]
                write_record(file, message)
        sync(path)
    return {"snapshot": header["snapshot"], "after": header["after"]}


def read_snapshot(path: Path) -> Iterator[Message]:
    """Yield the header of a snapshot, then its records. StorageError if the file is damaged or is not a snapshot."""
    records = read_records(path)
    header, counters = next(records, ({}, []))
    if "snapshot" not in header:
        raise StorageError(f"file {path} is not a snapshot")
    yield with_current_names(header), counters
    for record in records:
        if "end" in record[0]:
            return
        yield record
    raise StorageError(f"snapshot {path} has no end; use another one")


def successors(files: Chain, last: str | None = None) -> Chain | None:
    """Files that follow snapshot `last`, or the last full one and its successors; None if the chain lacks `last`.

    StorageError if a file does not follow its predecessor.
    """
    names, predecessors = ([header[key] for _, header in files] for key in ("snapshot", "after"))
    if last not in (None, *names, *predecessors):
        return None
    if last in names:
        files = files[names.index(last) + 1 :]
    elif last in predecessors:
        files = files[len(files) - 1 - predecessors[::-1].index(last) :]
    for path, header in files:
        if header["after"] != last:
            reason = f"{path} does not follow the one before it; give all snapshots, in order, or a full one"
            raise StorageError(f"snapshot {header['after']} is missing: {reason}")
        last = header["snapshot"]
    return files


@dataclass
class SavedShard:
    """Snapshot of one server: a full one, and the incremental ones that follow it; rows stay in the files."""

    files: list[Path]  # from the full snapshot on
    header: Values  # of the last file
    # By table number, tensors without a row dimension: seed, clock, admission sketch.
    metadata: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    # Pushes that had not been applied, by batch and rank.
    pushes: dict[tuple[int, int], PushRequest] = field(default_factory=dict)

    @property
    def spec(self) -> CollectionSpec:
        return CollectionSpec.from_json(self.header["spec"])

    @classmethod
    def from_chain(cls, paths: Sequence[Path]) -> "SavedShard":
        """Read the headers of a chain; StorageError if a file is not a snapshot, or does not follow its predecessor."""
        chain = successors([(path, next(read_snapshot(path))[0]) for path in paths]) or []
        return cls([path for path, _ in chain], chain[-1][1])

    def read(self, served: ServedTables, keep_row_numbers: bool) -> None:
        """Load rows that belong to the partitions of `served`. StorageError if a file is damaged."""
        partitions, spec = served.partitions, self.spec
        for path in self.files:
            records = read_snapshot(path)
            values, counters = next(records)
            self.header = {**values, "counters": dict(zip(values["counters"], counters, strict=True))}
            self.pushes = {}
            for values, tensors in records:
                # A push that had not been applied.
                if "push" in values:
                    columns = zip(tensors[: values["ids"]], tensors[values["ids"] :], strict=True)
                    tables = dict(zip(spec.tables_on(self.header["server"]), columns, strict=False))
                    self.pushes[values["push"], values["rank"]] = PushRequest(tables, values["lr"])
                    continue
                # Metadata, removed ids, or rows of a table.
                number, fields = values["table"], dict(zip(values["names"], tensors, strict=True))
                if values["kind"] == "others":
                    self.metadata[number] = fields
                if (table := partitions.by_number.get(number)) is None:
                    continue
                saved_partitions = spec.partitions(number, self.header["server"])
                if values["kind"] == "others":
                    table.index.reserve(values["rows"] // saved_partitions[1])
                elif values["kind"] == "removed":
                    table.index.discard(fields["ids"])
                else:
                    current_partitions = served.spec.partitions(number, served.server)
                    if (saved_partitions, spec.shards) != (current_partitions, served.spec.shards):
                        owned = partitions.owned(fields["ids"], [len(fields["ids"])], [number])
                        fields = {name: value[owned] for name, value in fields.items()}
                    if not keep_row_numbers:
                        fields.pop("row", None)
                    table.load_row_state(fields)


def saved_shards(served: ServedTables, chains: Iterable[Sequence[Path]]) -> list[SavedShard]:
    """Open the snapshots of all servers. StorageError if they belong to several steps, or to other tables."""
    shards = sorted(map(SavedShard.from_chain, chains), key=lambda shard: shard.header["server"])
    if len(steps := {(shard.header["pulls"], shard.header["steps"]) for shard in shards}) != 1:
        raise StorageError(f"these snapshots belong to several steps, or are none: {sorted(steps)}")
    if any(_compatibility_key(shard.spec) != _compatibility_key(served.spec) for shard in shards):
        raise StorageError("these snapshots belong to other tables, or to another optimizer")
    return shards


def restore(served: ServedTables, shards: Sequence[SavedShard], keep_row_numbers: bool = False) -> None:
    """Restore this server's partitions from the snapshots of all servers at one step.

    StorageError if a file is damaged, which may leave the tables partially restored: read the files before, where this
    matters.
    """
    # Rows and metadata.
    partitions, table_set = served.partitions, served.partitions.tables
    for table in partitions.dynamic:
        table.index.clear()
    for shard in shards:
        shard.read(served, keep_row_numbers)
    for number, table in partitions.by_number.items():
        sources = [shard for shard in shards if number in shard.metadata]
        firsts = {id(shard): shard.spec.partitions(number, shard.header["server"])[0] for shard in sources}
        sources.sort(key=lambda shard: firsts[id(shard)])
        table.load_table_state(_concatenate([s.metadata[number] for s in sources]), min(firsts.values()))
        table.index.apply_row_numbers()
    # Position in the order of events, and counters.
    served.reset(shards[0].header["pulls"], shards[0].header["steps"])
    partitions.changes.version = max(shard.header.get("row_version", 0) for shard in shards)
    served.lease.is_active = keep_row_numbers and any(shard.header["is_leased"] for shard in shards)
    counters: Values = next((shard.header["counters"] for shard in shards if shard.header["counters"]), {})
    if table_set is not None:
        table_set.counters["step"].copy_(counters["step"])
        table_set.set_learning_rate(float(counters["learning_rate"]))
    # Pushes that had not been applied.
    for batch, rank in {key for shard in shards for key in shard.pushes}:
        pushes = [shard.pushes[batch, rank] for shard in shards]
        served.ordering.push(rank, batch, _owned_push(served, pushes))


def _compatibility_key(spec: CollectionSpec) -> tuple[Any, ...]:
    """Part of a spec that must be equal for snapshots and servers."""
    return spec.optimizer, *(replace(table, seed=0) for table in spec.tables)


def _concatenate(shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the `get_state()` of a dynamic table's shards, in the order of partitions."""
    return {
        name: value if value.dim() == 0 else torch.cat([shard[name] for shard in shards], int(name == "sketch"))
        for name, value in shards[0].items()
    }


def merge_table(spec: TableSpec, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Build a table's `state_dict` from its servers' shards, in the order of partitions."""
    saved = _concatenate(shards)
    saved.pop("row", None)
    ids, order = saved["ids"].sort()
    saved |= {name: saved[name][order] for name in row_fields(saved)}
    if spec.num_embeddings is None:
        return saved
    # A static table: scatter trained rows into initial values.
    table = {"weight": spec.initial_values(torch.arange(spec.num_embeddings), int(saved["seed"]))}
    for name in saved.keys() - {"ids", "step", "count", "clock", "seed"}:
        value = saved[name]
        table.setdefault(name, value.new_zeros(spec.num_embeddings, *value.shape[1:]))[ids] = value
    return table


def read_tables(chains: Sequence[Sequence[Path]]) -> dict[str, dict[str, Tensor]]:
    """Build the `state_dict` of all tables of a collection from the snapshots of all its servers.

    Pending updates are applied, as by a `flush`.
    """
    spec = SavedShard.from_chain(chains[0]).spec
    num_tables = len(spec.tables)
    served = ServedTables(replace(spec, partition_starts=((0,),) * num_tables, shards=(None,) * num_tables), 0)
    restore(served, saved_shards(served, chains))
    for rank in range(spec.trainers):
        served.ordering.flush(rank, served.ordering.next_pull // spec.batches)
    served.advance()
    tables = zip(spec.tables, served.partitions.dynamic, strict=True)
    return {table_spec.name: merge_table(table_spec, [table.get_state()]) for table_spec, table in tables}


def steps_of_snapshot(path: Path) -> int:
    values, _ = next(read_records(path))
    return int(values["pulls"] // values["spec"]["batches"])


def _owned_push(served: ServedTables, pushes: Sequence[PushRequest]) -> PushRequest:
    tables = {}
    for number in served.partitions.numbers:
        parts = [push.tables[number] for push in pushes if number in push.tables]
        owned = [served.partitions.owned(ids, [len(ids)], [number]) for ids, _ in parts]
        if parts:
            ids, sums = ([part[at] for part, at in zip(c, owned, strict=True)] for c in zip(*parts, strict=True))
            tables[number] = torch.cat(ids), torch.cat(sums)
    return PushRequest(tables, max(push.lr for push in pushes))
