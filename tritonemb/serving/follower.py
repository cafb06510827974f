"""Followers for serving: replicas that apply what a publisher, or a run with tables on embedding servers, writes.

A thread reads and checks files, and prepares an update in memory, with the last row of each id in the format of the
replica's table. An update is applied in place, between two batches of a model or two lookups of a replica of tables, so
each of these sees one step. Rows of a full snapshot that a model has already are left out, so a full one is applied as
fast as the changes that it has.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tritonemb.nn.collections import FusedModule
from tritonemb.server.attach import collections_on_servers
from tritonemb.server.connection import Connection
from tritonemb.server.snapshot import read_snapshot, successors
from tritonemb.server.spec import CollectionSpec, TableSpec
from tritonemb.server.transport import Message, Reply, Values, answer
from tritonemb.serving.publisher import PUBLISHED, contents_of
from tritonemb.serving.quantized_tables import QuantizedTable
from tritonemb.serving.updates import FollowedTable, Update, source_of
from tritonemb.sharding.sharded_tensor import dtype_and_shape
from tritonemb.storage.checkpoint import MANIFEST, read_manifest_text
from tritonemb.storage.store import StorageError
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.server_table import make_table
from tritonemb.tables.table import Table
from tritonemb.training.checkpoint import CheckpointFolder
from tritonemb.types import AdmissionConfig
from tritonemb.utils import Closeable, did_you_mean, join_names, on_error, read_sealed

ATTEMPTS = 3  # to load a manifest whose files may be deleted meanwhile
THREADS = 4  # that answer queries


class ModelFollower(Closeable):
    """Follower that keeps a model up to date while it serves.

    A thread prepares updates, and the thread that scores calls `apply` between batches. If a file is missing or
    damaged, nothing is changed, and `problem` says so until there is a complete update, at the latest a full one. The
    same holds for a state of a run whose rows are encoded differently, or whose model has other options, than those of
    the `Run` that is served.

    Args:
        model: model, or `Run`, with tables in this process, which may be quantized; the newest state is applied at
            once, if there is one.
        folder: folder of a `Publisher`, or of a run, or its `checkpoints`, of which the newest one is served.
        poll: seconds between checks of the folder, by a thread; None: only `refresh` checks it.

    Attributes:
        step: step of the served state; None before the first update.
        problem: reason why the newest state could not be loaded; None if it was.
        bases, increments: numbers of full and incremental updates that were applied.

    Raises:
        ValueError: the model has tables on embedding servers.
    """

    problem: str | None = None
    step: int | None = None
    bases = increments = 0
    _names: tuple[str, ...] = ()  # see `Update`
    _pending: Update | None = None
    _time = 0.0

    def __init__(self, model: Any, folder: str | Path, poll: float | None = 0.2) -> None:
        self.model: nn.Module = model if isinstance(model, nn.Module) else model.model
        if collections_on_servers(self.model):
            raise ValueError("the tables of this model are on embedding servers; build it with tables on the device")
        self._folder, self._lock, self._closed = Path(folder), threading.Lock(), threading.Event()
        tables = ((p, m) for p, m in self.model.named_modules() if "weight" in {**m._parameters, **m._buffers})
        kinds = Table, QuantizedTable, FusedModule
        self._tables: Mapping[str, FollowedTable]
        self._tables = {path: FollowedTable(path, module) for path, module in tables if isinstance(module, kinds)}
        modules = ((p, m) for p, m in self.model.named_modules(remove_duplicate=False) if isinstance(m, kinds))
        self._paths = [path for path, m in modules if "weight" in {**m._parameters, **m._buffers}]  # also second ones
        prefixes, tensors = tuple(f"{path}." for path in self._paths), contents_of(self.model)[0]
        self._dense = {name: value for name, value in tensors.items() if not name.startswith(prefixes)}
        self._source = {} if isinstance(model, nn.Module) else source_of(model.description)
        self.refresh()
        self.apply()
        if poll is not None:
            threading.Thread(target=self._follow, args=(poll,), daemon=True, name="tritonemb-follower").start()

    @property
    def age(self) -> float | None:
        """Seconds since the served state was that of the trainer; None before the first update."""
        return None if self.step is None else max(0.0, time.time() - self._time)

    def pending(self) -> bool:
        """Return whether `apply` would change the model."""
        return self._pending is not None

    def apply(self) -> None:
        """Apply the prepared update, if there is one, in place; to be called between batches."""
        if (update := self._pending) is not None:
            self._apply(update)
            self._pending = None

    @torch.no_grad()
    def refresh(self) -> bool:
        """Prepare the newest state, unless another one is pending, and return whether one is; errors are stored."""
        with self._lock:
            attempted = None
            for _ in range(ATTEMPTS):  # files may be deleted while they are read, when there is a newer manifest
                try:
                    if self._pending is None:  # else the thread that scores may be applying it
                        if (newest := newest_manifest(self._folder)) == attempted:
                            break
                        attempted = newest
                        self._pending = self._prepare(*newest)
                    self.problem = None
                    break
                except Exception as error:
                    self.problem = str(error) if isinstance(error, OSError | ValueError) else repr(error)
            return self.pending()

    def close(self) -> None:
        """Stop following."""
        self._closed.set()

    def _follow(self, poll: float) -> None:
        pause = poll
        while not self._closed.wait(pause):
            start = time.monotonic()
            self.refresh()
            # Back off after a failure: spend at most a tenth of the time on attempts.
            pause = poll if self.problem is None else max(poll, 10 * (time.monotonic() - start))

    @torch.no_grad()
    def _apply(self, update: Update) -> None:
        for name, value in update.dense.items():
            self._dense[name].copy_(value)
        update.write()
        self._serve(update)

    def _serve(self, update: Update) -> None:
        self._tables, self._names, self.step, self._time = update.tables, update.names, update.step, update.time
        self.bases, self.increments = self.bases + update.is_full, self.increments + (not update.is_full)

    def _prepare(self, path: Path, manifest: Values) -> Update | None:
        """Read and check the changes from the served state to that of a manifest; None if it is served."""
        prefixes, entries = zip(*self._chains(path, manifest), strict=True)  # the last one may be that of a checkpoint
        if self._names == (names := tuple(entry["snapshot"] for entry in entries)):
            return None
        self._check_source(path, manifest)
        paths = [[path / name for name in entry["files"]] for entry in entries]
        chains = [[(file, next(read_snapshot(file))[0]) for file in files] for files in paths]
        ends, is_checkpoint = [chain[-1][1] for chain in chains if chain], [] in chains
        times = [*(end["time"] for end in ends), *([(path / MANIFEST).stat().st_mtime] if is_checkpoint else [])]
        step = manifest["step"] if "step" in manifest else manifest["progress"]["step"]
        steps = defaultdict[str | None, set[Any]](set)
        for prefix, end in zip(prefixes, ends, strict=False):
            steps[prefix if "spec" in end else None].add((end["pulls"], end["steps"]) if "spec" in end else end["step"])
        if max(map(len, steps.values()), default=1) > 1 or steps.get(None, {step}) != {step}:
            raise StorageError(f"the files in {path} do not belong to one step of a model")
        # Read the successors of the served state, else full snapshots and their successors; the newest file first.
        files = [*map(successors, chains, self._names)] if len(self._names) == len(chains) else [None]
        if is_full := None in files:
            files = [successors(chain) for chain in chains]
        specs = [CollectionSpec.from_json(end["spec"]).tables if "spec" in end else () for end in ends]
        specs_by_name = [
            {f"{prefix}{spec.name}": spec for spec in s} for prefix, s in zip(prefixes, specs, strict=False)
        ]
        all_specs = {name: spec for specs in specs_by_name for name, spec in specs.items()}
        update = Update(self._targets(all_specs, is_full), all_specs, is_full)
        update.names, update.step, update.time = names, step, min(times)
        for names_of_tables, chain in zip(map(list, specs_by_name), files, strict=False):
            for file, header in reversed(chain or []):
                update.read(file, header, names_of_tables)
        if is_checkpoint:
            update.read_checkpoint(path, self._dense, self._paths)
        update.finish()
        # Check dense layers.
        kinds = [
            {name: dtype_and_shape(t.dtype, t.shape) for name, t in d.items()} for d in (self._dense, update.dense)
        ]
        if differences := sorted({name for name, _ in kinds[0].items() ^ kinds[1].items()}):
            model, published = (kind.get(differences[0], "absent") for kind in kinds)
            raise ValueError(f"{differences[0]} is {published} as published, and {model} in this model")
        return update

    def _check_source(self, path: Path, manifest: Values) -> None:
        """Raise ValueError for a model of rows that are encoded differently, or with other options."""
        source = source_of(manifest) if manifest.get("run") else {}
        if changed := [name for name, value in self._source.items() if name in source and source[name] != value]:
            text = f"{join_names(changed)} differ from the served run; serve the run that is trained"
            raise ValueError(f"{path} has a model of another run: {text}")

    def _chains(self, path: Path, manifest: Values) -> list[tuple[str, Values]]:
        """Return chains of files, each with the prefix of its tables' names."""
        chains = [("", chain) for chain in manifest.get("model", [])]
        for name, servers in manifest.get("servers", {}).items():
            is_path = any(table.startswith(f"{name}.") for table in self._tables)  # else the model is the collection
            chains += [(f"{name}." if is_path else "", chain) for chain in servers]
        if "progress" in manifest:  # a checkpoint
            chains.append(("", {"snapshot": manifest.get("sha256", path.name), "files": []}))
        return chains

    def _targets(self, specs: Mapping[str, TableSpec], is_full: bool) -> Mapping[str, FollowedTable]:
        """Return the tables that an update changes; `specs` are those of tables on servers."""
        return self._tables


def newest_manifest(folder: Path) -> tuple[Path, Values]:
    """Return folder and manifest of a run's newest checkpoint, or of what a publisher has written."""
    for checkpoints in (CheckpointFolder(folder), CheckpointFolder(folder / "checkpoints")):
        if (newest := checkpoints.latest()) is not None:
            return newest, read_manifest_text(newest)[1]
    if not (folder / PUBLISHED).exists():
        raise FileNotFoundError(f"{folder} has no checkpoint, and no {PUBLISHED} of a publisher")
    return folder, json.loads(read_sealed(folder / PUBLISHED))


class Follower(ModelFollower):
    """Read-only replica of a collection's tables on embedding servers; thread-safe.

    It loads a full snapshot once, then incremental ones; lookups wait while changed rows are written, but not while
    files are read. It is a `Service` for `look_up` by other processes, and for `Connection.query("stats")`.

    Args:
        folder: a run's `checkpoints`, of which it follows the newest one, or the folder of a `Publisher`.
        collection: path of the collection in the model; optional if the folder has one collection.
        poll: seconds between checks of the folder, by a thread; None: only `refresh` checks it.

    Attributes: see `ModelFollower`.
    """

    def __init__(self, folder: str | Path, collection: str | None = None, poll: float | None = 0.2) -> None:
        self.collection, self._serving = collection, threading.RLock()
        self._pool = ThreadPoolExecutor(THREADS, "tritonemb-follower")
        super().__init__(nn.Module(), folder, poll)

    @property
    def tables(self) -> dict[str, DynamicTable]:
        """Tables by name; those of ids that are row numbers are dynamic here, too."""
        return {name: table.table for name, table in self._tables.items()}

    def look_up(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Look up rows `[N, embedding_dim]` of ids int64 `[N]`, by table; all rows are of the same step.

        Ids without a row have initial values, as in evaluation.

        Raises:
            RuntimeError: there is no snapshot yet.
            ValueError: unknown table, or id out of range.
        """
        with self._serving:
            if self.step is None:
                raise RuntimeError(f"there is no snapshot to serve yet: {self.problem}")
            for name, values in ids.items():
                if name not in self._tables:
                    known = did_you_mean(name, self._tables, f"; there are {join_names(self._tables)}")
                    raise ValueError(f"unknown table {name!r}{known}")
                size = self._tables[name].num_rows
                if values.dtype != torch.int64 or values.dim() != 1:
                    text = f"ids must be int64 [N], got {values.dtype} {list(values.shape)}"
                    raise ValueError(f"table {name!r}: {text}")
                # A negative id, as an unsigned one, is out of range, too.
                if size is not None and (is_bad := values.cpu().numpy().view(np.uint64) >= size).any():
                    text = f"id {int(values[int(is_bad.argmax())])} is out of range; valid ids are 0 to {size - 1}"
                    raise ValueError(f"table {name!r}: {text}")
            return {name: self._tables[name].table.lookup(values) for name, values in ids.items()}

    def statistics(self) -> Values:
        """Step, age, last problem, numbers of loaded snapshots, and rows and bytes by table."""
        with self._serving:
            values: Values = {name: getattr(self, name) for name in ("step", "age", "problem", "bases", "increments")}
            tables = {name: table.index.statistics() for name, table in self.tables.items()}
        sizes = {name: {key: table[key] for key in ("rows", "num_bytes")} for name, table in tables.items()}
        collections = {self.collection: {"tables": sizes}} if sizes else {}
        return values | {"failing": self.problem is not None, "collections": collections}

    def refresh(self) -> bool:
        """Load the newest snapshot, and return whether it is a new one; errors are stored as the `problem`."""
        previous = self._names
        super().refresh()
        return self._names != previous

    def receive(self, message: Message, reply: Reply) -> None:
        """See `Service`."""
        with suppress(RuntimeError):  # the follower is closed
            self._pool.submit(answer, message, reply, self._answer)

    def close(self) -> None:
        """Stop following, and answer the pending queries."""
        super().close()
        self._pool.shutdown()

    def _answer(self, values: Values, tensors: list[Tensor]) -> Message:
        if values["op"] == "stats":
            return {"stats": self.statistics()}, []
        if values["op"] != "look_up":
            raise ValueError(f"a follower answers look_up and stats, not {values['op']!r}")
        with self._serving:
            rows = self.look_up(dict(zip(values["tables"], tensors, strict=True)))
            return {"step": self.step}, list(rows.values())

    def _chains(self, path: Path, manifest: Values) -> list[tuple[str, Values]]:
        collections = manifest.get("servers", {})
        if self.collection is None and len(collections) == 1:
            (self.collection,) = collections
        if self.collection not in collections:
            known = f"{path} has collections {join_names(collections) or 'none'} on embedding servers"
            raise ValueError(f"{known}, not {self.collection!r}")
        return [("", chain) for chain in collections[self.collection]]

    def _targets(self, specs: Mapping[str, TableSpec], is_full: bool) -> Mapping[str, FollowedTable]:
        """Return empty tables for a full snapshot; ids in them are hashed, as on servers."""
        if not is_full:
            return self._tables
        configs = {name: spec.config(0, spec.num_partitions, None) for name, spec in specs.items()}
        admit_all = {name: replace(config, admission=AdmissionConfig()) for name, config in configs.items()}
        tables = {name: make_table(config, (), "meta").to_empty(device="cpu") for name, config in admit_all.items()}
        return {name: FollowedTable(name, table, specs[name].num_embeddings) for name, table in tables.items()}

    def _prepare(self, path: Path, manifest: Values) -> Update | None:
        """Apply an update at once; lookups wait for that of a full snapshot only while the tables are exchanged."""
        update = super()._prepare(path, manifest)
        if update is not None and update.is_full:
            update.write()
            with self._serving:
                self._serve(update)
        elif update is not None:
            with self._serving, on_error(self._discard):
                self._apply(update)
        return None

    def _discard(self) -> None:
        """Serve nothing until a full snapshot is loaded, after an update that was applied in part."""
        self._tables, self._names, self.step = {}, (), None


def look_up(connection: Connection, ids: Mapping[str, Tensor], timeout: float = 10.0) -> dict[str, Tensor]:
    """Call `Follower.look_up` of a follower in another process; ConnectionError if it does not answer in time."""
    _, rows = connection.query_tensors("look_up", {"tables": list(ids)}, list(ids.values()), timeout)
    return dict(zip(ids, rows, strict=True))
