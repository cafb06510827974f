"""Publishers: dense layers and changed rows of all tables of one step, in files that followers apply.

A folder has a manifest, which names a chain of snapshots per rank of the trainer and per embedding server: a full one,
then changes, each with the name of its predecessor. The manifest is written last, atomically, so it names files of one
step only. Servers write the files of their tables, and record which rows were used. For other tables a publisher keeps
a fingerprint of each published row, 8 bytes, and hashes all rows to find those that have changed, on every tier; it
misses a change with probability 2^-64. Training waits for that pass, and for a copy of the changed rows; a thread
writes them. Marking the rows of each update would save the pass, but would cost every training step, and would miss
rows that a program loads or writes in place.
"""

import json
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tritonemb.comm.group import RankGroup
from tritonemb.kernels.cpu import pages
from tritonemb.kernels.quantized_bag import quantize_rows
from tritonemb.layout import nonzero
from tritonemb.nn.collections import FusedModule
from tritonemb.server.attach import collections_on_servers
from tritonemb.server.client import CollectionClient
from tritonemb.server.snapshot import RECORD_BYTES, write_snapshot
from tritonemb.server.transport import Message
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.sharding.sharded_tensor import LocalShard, TableShards
from tritonemb.storage.store import SCALE, StorageError, decode_rows, storage_errors
from tritonemb.tables.cached_rows import DiskTensor, metadata_only
from tritonemb.tables.dynamic_table import FALLBACK, DynamicTable
from tritonemb.tables.table import WEIGHT
from tritonemb.training.callbacks import Callback, FitEnd, FitStart, StepEnd
from tritonemb.training.checkpoint.manager import dynamic_tables
from tritonemb.training.ranks import group_of, on_all_ranks, on_each_rank, on_rank_zero
from tritonemb.utils import atomic_write, on_error, read_sealed, seal

PUBLISHED = "servers.json"  # manifest
CHAIN = "published"  # name of the publisher's chain of snapshots; checkpoints have another one
Published = tuple[Tensor, Tensor, Tensor | None]
"""Fingerprints of rows that followers have, by slot, 0 without one; their ids, if the table is dynamic; and copies."""


class TableRows(NamedTuple):
    """Rows of a table, or of a shard of it, on this rank; those of a dynamic table are in some of the slots."""

    name: str  # of the table in `state_dict`
    num_slots: int
    read: Callable[[Tensor], Tensor]  # rows `[N, dim]` on the CPU, in slots int64 `[N]`, ascending
    first_row: int = 0
    first_column: int = 0
    dynamic: DynamicTable | None = None

    def used_slots(self) -> tuple[Tensor, Tensor]:
        """Return the slots with rows, ascending, and the ids of all slots."""
        if self.dynamic is None:
            slots = torch.arange(self.num_slots)
            return slots, slots + self.first_row
        index = self.dynamic.index.tensors
        used_mask = torch.zeros(self.num_slots, dtype=torch.bool, device=index.ids.device)
        used_mask[index.rows[nonzero(index.digests != 0)].long()] = True
        return nonzero(used_mask).cpu(), index.ids[: self.num_slots].cpu()

    def published(self, copies: bool) -> Published:
        """Return the fingerprints and ids before the first publication, and with `copies` those of the rows, zeros."""
        sizes = self.num_slots, 0 if self.dynamic is None else self.num_slots
        first = self.read(torch.zeros(1, dtype=torch.int64)) if copies and self.num_slots else None
        rows = None if first is None else first.new_zeros(self.num_slots, first.shape[1])
        return torch.zeros(sizes[0], dtype=torch.int64), torch.zeros(sizes[1], dtype=torch.int64), rows

    def changes(self, published: Published, limit: int | None = None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield removed ids with None, then ids with changed rows, and note that they are published.

        With a limit, only that many rows, those that differ most from their published copies by the Euclidean norm.
        """
        (slots, ids), (fingerprints, published_ids, copies) = self.used_slots(), published
        if self.dynamic is not None:
            free_mask = torch.ones(self.num_slots, dtype=torch.bool).index_fill_(0, slots, False)
            removed = nonzero((fingerprints != 0) & (free_mask | (published_ids != ids)))
            old_ids, index = published_ids[removed], self.dynamic.index
            new_slots = index.find(old_ids.to(index.ids)).cpu()
            yield old_ids[new_slots < 0], None
            # Published rows of ids in other slots move there: with a limit, followers may keep them for a while.
            moved, moved_slots = removed[new_slots >= 0], new_slots[new_slots >= 0]
            for tensor in (fingerprints, published_ids, *([] if copies is None else [copies])):
                moved_rows, tensor[removed] = tensor[moved], 0
                tensor[moved_slots] = moved_rows
        if not len(slots):
            return
        top: list[Tensor] = []  # of the rows of earlier chunks: norms, slots, fingerprints, rows
        for chunk in slots.split(max(1, RECORD_BYTES // self.read(slots[:1]).nbytes)):
            first, last = int(chunk[0]), int(chunk[-1]) + 1
            span = slice(first, last) if last - first == len(chunk) else chunk  # a slice is not copied
            rows = self.read(chunk)
            new_fingerprints = fingerprint_rows(rows, ids[span])
            changed = nonzero(new_fingerprints != fingerprints[span])
            new = [chunk[changed], new_fingerprints[changed], rows[changed]]
            if limit is not None and copies is not None:
                norms = (new[2].float() - copies[new[0]].float()).norm(dim=1)
                top = [torch.cat(pair) for pair in zip(top, [norms, *new], strict=True)] if top else [norms, *new]
                best = top[0].topk(min(limit, len(top[0]))).indices
                top = [values[best] for values in top]
                if last <= int(slots[-1]):
                    continue
                new = top[1:]
            at, fingerprints[new[0]] = new[0], new[1]
            if copies is not None:
                copies[at] = new[2]
            if self.dynamic is not None:
                published_ids[at] = ids[at]
            if len(at):
                yield ids[at], new[2]


def fingerprint_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """Return 64-bit hashes of rows `[N, dim]` on the CPU with ids int64 `[N]`, never 0."""
    data, results = rows.contiguous().view(torch.uint8), torch.empty_like(ids)
    if padding := -data.shape[1] % 16:
        data = torch.nn.functional.pad(data, (0, padding))
    sizes = torch.get_num_threads(), -(-len(ids) // pages.ROWS_PER_TASK)
    pages.fingerprint(*sizes, data.data_ptr(), data.shape[1] // 8, ids.contiguous().numpy(), results.numpy())
    return results


def contents_of(model: nn.Module, rank: int = 0) -> tuple[dict[str, Tensor], list[TableRows]]:
    """Return dense tensors by name in `state_dict`, and rows that this rank publishes; a collective with FSDP.

    Rows on embedding servers, and optimizer states, are not part of them.
    """
    with metadata_only(parameters=True):
        state = model.state_dict()
    root, kinds = model.module if isinstance(model, HybridParallel) else model, FusedModule | ShardedCollection
    modules = root.named_modules(remove_duplicate=False)
    prefixes = tuple(f"{path}.".lstrip(".") for path, module in modules if isinstance(module, kinds))
    dense = {name: value.detach() for name, value in state.items() if not name.startswith(prefixes)}
    dense = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in dense.items()}
    tables = list[TableRows]()
    for path, module in ((path, module) for path, module in root.named_modules() if isinstance(module, kinds)):
        configs = getattr(module, "configs", None)  # a single table has none
        for name in [path] if configs is None else [f"{path}.{config.name}".lstrip(".") for config in configs]:
            value, scale = state.get(f"{name}.weight".lstrip("."), torch.empty(0)), state.get(f"{name}.{SCALE}")
            shards = value.shards if isinstance(value, TableShards) else [LocalShard(value, is_primary=rank == 0)]
            for number, shard in enumerate(shards):
                if shard.is_primary and shard.tensor.dim() == 2:
                    part = scale.shards[number].tensor if isinstance(scale, TableShards) else scale
                    tables.append(TableRows(name, len(shard.tensor), _reader(shard.tensor, part), *shard[1:3]))
    for name, table in dynamic_tables(model):
        if table is not None and (rank == 0 or isinstance(model, HybridParallel)):
            tables.append(TableRows(name, table.index.capacity, _dynamic_reader(table), dynamic=table))
    return (dense if rank == 0 else {}), tables


def _reader(weight: Tensor, scale: Tensor | None) -> Callable[[Tensor], Tensor]:
    if isinstance(weight, DiskTensor):
        return lambda rows: weight.rows.read(cast(Any, None), rows, WEIGHT)["weight"]

    def read(rows: Tensor) -> Tensor:
        span = slice(int(rows[0]), int(rows[-1]) + 1)
        return weight.detach()[span].cpu() if scale is None else decode_rows(weight[span], scale[span])  # int8 codes

    return read


def _dynamic_reader(table: DynamicTable) -> Callable[[Tensor], Tensor]:
    return lambda rows: table.rows.read(table, rows, WEIGHT)["weight"].cpu()


def model_records(
    dense: dict[str, Tensor], tables: Iterable[tuple[TableRows, Published]], bits: int = 32, limit: int | None = None
) -> Generator[Message, None, None]:
    """Yield the records of a model after the header: dense tensors, then the changes of each table."""
    if dense:
        yield {"kind": "dense", "names": list(dense)}, [tensor.cpu().clone() for tensor in dense.values()]
    for table, published in tables:
        common = {"table": table.name, "column": table.first_column, "bits": bits}
        with nullcontext() if table.dynamic is None else table.dynamic.index.lock:
            if table.dynamic is not None:
                state = table.dynamic.get_table_state()
                names = [name for name in ("seed", f"{FALLBACK}weight") if name in state]
                part = {"kind": "others", "names": names, "part": table.dynamic.index.shard[1]}
                yield common | part, [state[name].cpu() for name in names]
            for ids, rows in table.changes(published, limit):
                kind: dict[str, Any] = {"kind": "removed", "names": ["ids"]}
                if rows is not None:
                    kind = {"kind": "rows", "names": ["ids", "weight"]}
                    rows = rows if bits == 32 else quantize_rows(rows, bits, search=False)
                yield common | kind, [ids] if rows is None else [ids, rows]


class Publisher(Callback):
    """Publisher of a model into a folder, for followers; a callback of `te.Trainer`, or called between steps.

    Files of changes are written by a thread. After a failure the next snapshot is a full one. A later publisher of the
    same folder, as of a run that is resumed, takes the place of this one, whose `publish` raises from then on.

    Args:
        folder: on a file system that all ranks, servers and followers share; created if missing.
        most: maximum number of files in a chain: a full snapshot and its changes; then a full snapshot follows.
        steps: as a callback, publish after this many steps, and after the last one. By default 1; None if there are
            `seconds`.
        rows: format of rows, as trained ("fp32") or "int8"; rows on servers are published as trained.
        seconds: as a callback, publish after about this many seconds, if they pass before `steps` steps.
        priority: maximum number of rows per table and rank in a file of changes: those that differ most from their
            published values. The others follow in later files, at the latest in the next full snapshot or after the
            last step. The publisher keeps a copy of all rows for that. Rows on servers are not limited.
    """

    essential = False

    def __init__(
        self,
        folder: str | Path,
        most: int = 16,
        *,
        steps: int | None = None,
        rows: Literal["fp32", "int8"] = "fp32",
        seconds: float | None = None,
        priority: int | None = None,
    ) -> None:
        numbers = [number for number in (most, steps, seconds, priority) if number is not None]
        if rows not in ("fp32", "int8") or not all(0 < number < float("inf") for number in numbers):
            text = f"got {rows=}, {most=}, {steps=}, {seconds=}, {priority=}"
            raise ValueError(f"expected rows='fp32' or 'int8', and positive numbers; {text}")
        self._seconds, self._limit, self._start, self._due = seconds, priority, (0, 0.0), 0
        self._folder, self._max_files = Path(folder).absolute(), most
        self._steps = 1 if steps is None and seconds is None else steps
        self._bits, self._step, self._group = 8 if rows == "int8" else 32, 0, cast(RankGroup, None)
        self._name, self._has_published = uuid.uuid4().hex, False
        self._chains: dict[str, list[dict[str, Any]]] = {}  # of servers, by collection
        self._model_chains: list[dict[str, Any]] = []  # by rank
        self._published: list[Published] = []
        self._source: dict[str, Any] = {}  # parts of a checkpoint's manifest that followers compare
        self._thread, self._running = ThreadPoolExecutor(1, "tritonemb-publisher"), cast(Future[None], None)

    def publish(self, model: nn.Module, step: int | None = None, wait: bool = True, all_rows: bool = False) -> None:
        """Publish the model between two steps; a collective of the ranks of a `HybridParallel`.

        `step` is the next number by default. With `wait`, and for full snapshots, return when the files are written.
        With `all_rows` publish all changed rows, whatever the `priority`. StorageError if a file could not be written,
        without `wait` at the next call; followers keep the previous snapshot. ValueError for non-finite int8 rows.
        """
        self.finish()
        self._step = self._step + 1 if step is None else step
        self._group = group_of(model).duplicate("gloo") if self._group is None else self._group
        group, servers = self._group, collections_on_servers(model)
        with on_error(self._model_chains.clear):
            for collection in servers.values():
                cast(CollectionClient, collection.service).return_leases()
            on_rank_zero(group, lambda: self._begin(servers), StorageError)
            # Begin a chain, or continue it.
            dense, tables = contents_of(model, group.rank)
            is_full = not self._model_chains or len(self._model_chains[0]["files"]) >= self._max_files
            if is_full:
                self._published = [table.published(self._limit is not None) for table in tables]
            last = None if is_full else self._model_chains[group.rank]["snapshot"]
            header = {"snapshot": uuid.uuid4().hex, "after": last, "server": group.rank, "step": self._step}
            limit = None if is_full or all_rows else self._limit
            contents = model_records(dense, zip(tables, self._published, strict=True), self._bits, limit)
            records: Iterable[Message] = chain([(header | {"time": time.time()}, [])], contents, [({"end": last}, [])])
            # Training waits for a full snapshot, which would need memory for a copy of the model.
            records = records if is_full else on_each_rank(group, lambda: list(records))
            self._running = self._thread.submit(self._write, records, contents, is_full)
            if wait or is_full:
                self.finish()

    def finish(self) -> None:
        """Wait for the files of the last `publish`; raise its StorageError."""
        running, self._running = self._running, cast(Future[None], None)
        with on_error(self._model_chains.clear):  # followers need a full snapshot after a failure
            if running is not None:
                running.result()

    def on_start(self, start: FitStart) -> None:
        """See `Callback`."""
        self._start, self._due, self._step = (0, 0.0), 0, 0
        if (data := self.data) is not None:
            kinds = {feature.name: feature.kind for feature in data.features}
            names = ("embedding_dim", "model", "model_options")
            config = {name: start.config[name] for name in names if name in start.config}
            reading = {"labels": [*getattr(data, "labels", ())]}
            self._source = {"run": {"encoding": data.encoding, "kinds": kinds}, "reading": reading, "config": config}

    def on_step(self, step: StepEnd) -> None:
        """See `Callback`."""
        is_due = self._seconds is not None and step.step >= self._due
        if is_due or (self._steps is not None and step.step % self._steps == 0):
            self.publish(self.model, step.step, wait=False)
            if self._seconds is not None:
                self._due = on_rank_zero(self._group, lambda: self._next_step(step.step))

    def _next_step(self, step: int) -> int:
        """Return the step that will end `seconds` later, by the steps per second since the first publication."""
        first, start = self._start = self._start if self._start[1] else (step, time.monotonic())
        assert self._seconds is not None
        return step + max(1, int(self._seconds * (step - first) / max(1e-9, time.monotonic() - start)))

    def on_end(self, end: FitEnd | None) -> None:
        """Publish the last step, unless training failed."""
        self.finish()
        if end is not None and (end.step != self._step or self._limit is not None):
            self.publish(self.model, end.step, all_rows=True)

    def _begin(self, servers: dict[str, Any]) -> None:
        """Create the folder, and let servers write their snapshots."""
        self._read_manifest()
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, tables in servers.items():
            self._chains[name] = self._snapshot(tables.service, self._chains.pop(name, []))

    def _snapshot(self, service: CollectionClient, previous: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Write incremental snapshots, or full ones if a chain is long or a server has lost it; return the chains."""
        previous = previous if previous and len(previous[0]["files"]) < self._max_files else []
        for changes_only in (True, False) if previous else (False,):
            stem = self._folder / f"{uuid.uuid4().hex}-"
            with storage_errors(f"rows of servers could not be published in {self._folder}", "check their disks"):
                headers = service.snapshot(stem, changes_only, CHAIN)
            if not changes_only or [h["after"] for h in headers] == [entry["snapshot"] for entry in previous]:
                break  # otherwise a restarted server has written a full snapshot
        files = [f"{stem.name}{server}.server" for server in range(len(headers))]
        return _extended(previous if changes_only else [], headers, files)

    def _write(self, records: Iterable[Message], contents: Generator[Message, None, None], is_full: bool) -> None:
        """Write this rank's file, then on rank 0 the manifest, and remove files that no follower needs."""
        group, path = self._group, self._folder / f"{uuid.uuid4().hex}-{self._group.rank}.update"
        with closing(contents):  # in this thread, which holds the lock of the table that is being written
            written = on_all_ranks(group, lambda: (write_snapshot(path, records), path.name), StorageError)
        self._model_chains[:] = _extended([] if is_full else self._model_chains, *zip(*written, strict=True))
        on_rank_zero(group, self._write_manifest, StorageError)

    def _read_manifest(self) -> dict[str, Any]:
        """Return the manifest, empty if it is missing or damaged; StorageError if another publisher has replaced it."""
        manifest = dict[str, Any]()
        with suppress(FileNotFoundError, ValueError):
            manifest = json.loads(read_sealed(self._folder / PUBLISHED))
        if self._has_published and manifest and manifest.get("publisher") != self._name:
            raise StorageError(f"another publisher writes to {self._folder}; give each run a separate folder")
        return manifest

    def _write_manifest(self) -> None:
        manifest, previous = self._folder / PUBLISHED, self._read_manifest()
        current: dict[str, Any] = {"servers": self._chains, "model": self._model_chains, "step": self._step}
        current |= self._source
        with storage_errors(f"{manifest} could not be written", "check the disk"):
            atomic_write(manifest, seal(json.dumps(current | {"publisher": self._name})))
        self._has_published = True
        # Followers may still read the files of the previous manifest.
        chains = ([m.get("model", []), *m["servers"].values()] for m in (previous, current) if m)
        used_files = {file for entry in chain(*chain(*chains)) for file in entry["files"]}
        for path in (*self._folder.glob("*.server"), *self._folder.glob("*.update")):
            if path.name not in used_files:
                path.unlink(missing_ok=True)


def _extended(chains: list[dict[str, Any]], headers: Iterable[Any], files: Iterable[str]) -> list[dict[str, Any]]:
    """Append a file to each chain, or begin chains; `headers` name the snapshots."""
    old_files = [entry["files"] for entry in chains] or [[] for _ in headers]
    entries = zip(old_files, files, headers, strict=True)
    return [{"files": [*old, file], "snapshot": header["snapshot"]} for old, file, header in entries]
