"""Followers for serving: read-only replicas of a collection's tables that follow the snapshots in a folder.

A publisher makes servers write snapshots there more often than a run saves checkpoints.
"""

import json
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from tritonemb.flight import encode_error
from tritonemb.server.attach import collections_on_servers
from tritonemb.server.client import CollectionClient
from tritonemb.server.connection import Connection
from tritonemb.server.replica import Replica, load_replica
from tritonemb.server.transport import Message, Reply, Values
from tritonemb.utils import Closeable, atomic_write, join_names, read_sealed, seal

CHECKPOINT, PUBLISHED = "trainer.json", "servers.json"  # manifests
ATTEMPTS = 3  # to load a manifest whose files may be deleted meanwhile
THREADS = 4  # that answer queries
CHAIN = "published"  # name of the publisher's chain of snapshots; checkpoints have another one


class Follower(Closeable):
    """Read-only replica of a collection's tables; thread-safe.

    It loads a full snapshot once, then incremental ones, and serves the previous state meanwhile. It is a `Service` for
    `look_up` by other processes, and for `Connection.query("stats")`.

    Args:
        folder: a run's `checkpoints`, of which it follows the newest one, or the folder of a `Publisher`.
        collection: path of the collection in the model; optional if the folder has one collection.
        poll: seconds between checks of the folder, by a thread; None: only `refresh` checks it.

    Attributes:
        replica: the served tables; None before the first snapshot.
        problem: reason why the newest snapshot could not be loaded; None if it was loaded. The follower tries again,
            and waits for a full snapshot if a predecessor of the newest one is missing.
        bases, increments: numbers of full and incremental snapshots that were loaded.
    """

    def __init__(self, folder: str | Path, collection: str | None = None, poll: float | None = 0.2) -> None:
        self._folder, self.collection = Path(folder), collection
        self.replica: Replica | None = None
        self.problem: str | None = None
        self.bases = self.increments = 0
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._pool = ThreadPoolExecutor(THREADS, "tritonemb-follower")
        self.refresh()
        if poll is not None:
            threading.Thread(target=self._follow, args=(poll,), daemon=True, name="tritonemb-follower").start()

    @property
    def step(self) -> int | None:
        """Number of steps whose updates the rows have."""
        return None if self.replica is None else self.replica.step

    @property
    def age(self) -> float | None:
        """Seconds since the served snapshot was taken."""
        return None if self.replica is None else max(0.0, time.time() - self.replica.time)

    def look_up(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Look up rows `[N, embedding_dim]` of ids int64 `[N]`, by table; all rows are of the same step.

        Ids without a row have initial values, as in evaluation.

        Raises:
            RuntimeError: there is no snapshot yet.
            ValueError: unknown table, or id out of range.
        """
        return self._require_replica().look_up(ids)

    def statistics(self) -> Values:
        """Step, age, last problem, numbers of loaded snapshots, and rows and bytes by table."""
        tables = {
            name: {"rows": table.ids.numel(), "num_bytes": table.ids.nbytes + table.rows.nbytes}
            for name, table in ({} if self.replica is None else self.replica.tables).items()
        }
        result = {"step": self.step, "age": self.age, "failing": self.problem is not None, "problem": self.problem}
        result |= {"bases": self.bases, "increments": self.increments}
        return result | {"collections": {self.collection: {"tables": tables}} if tables else {}}

    def refresh(self) -> bool:
        """Load the newest snapshot, and return whether it is a new one; errors are stored as the `problem`."""
        with self._lock:
            previous, attempted = self.replica, None
            for _ in range(ATTEMPTS):  # files may be deleted while they are read, when there is a newer manifest
                try:
                    if (newest := self._newest()) == attempted:
                        break
                    attempted = newest
                    if (replica := load_replica(self.replica, *newest)) is not self.replica:
                        self.bases += replica.is_full
                        self.increments += not replica.is_full
                    self.replica, self.problem = replica, None
                    break
                except Exception as error:
                    self.problem = str(error) if isinstance(error, OSError | ValueError) else repr(error)
            return self.replica is not previous

    def receive(self, message: Message, reply: Reply) -> None:
        """See `Service`."""
        with suppress(RuntimeError):  # the follower is closed
            self._pool.submit(self._answer, message, reply)

    def close(self) -> None:
        """Stop following, and answer the pending queries."""
        self._closed.set()
        self._pool.shutdown()

    def _follow(self, poll: float) -> None:
        pause = poll
        while not self._closed.wait(pause):
            start = time.monotonic()
            self.refresh()
            # Back off after a failure: spend at most a tenth of the time on attempts.
            pause = poll if self.problem is None else max(poll, 10 * (time.monotonic() - start))

    def _require_replica(self) -> Replica:
        if self.replica is None:
            raise RuntimeError(f"there is no snapshot to serve yet: {self.problem}")
        return self.replica

    def _answer(self, message: Message, reply: Reply) -> None:
        values, tensors = message
        reply_to: Values = {name: values[name] for name in ("query", "number") if name in values}
        try:
            if values["op"] == "stats":
                reply(({**reply_to, "stats": self.statistics()}, []))
            elif values["op"] == "look_up":
                replica = self._require_replica()
                rows = replica.look_up(dict(zip(values["tables"], tensors, strict=True)))
                reply(({**reply_to, "step": replica.step}, list(rows.values())))
            else:
                raise ValueError(f"a follower answers look_up and stats, not {values['op']!r}")
        except Exception as error:
            reply(({**reply_to, "error": encode_error(error)}, []))

    def _newest(self) -> tuple[Path, list[Values]]:
        """Return the folder of the newest manifest, and its chain of snapshots for each server."""
        paths = {path.parent.name.removeprefix("step-"): path for path in self._folder.glob(f"step-*/{CHECKPOINT}")}
        newest = max((name for name in paths if name.isdecimal()), key=int, default=None)
        path = self._folder / PUBLISHED if newest is None else paths[newest]
        if newest is None and not path.exists():
            raise FileNotFoundError(f"{self._folder} has no checkpoint, and no {PUBLISHED} of a publisher")
        collections = json.loads(read_sealed(path)).get("servers", {})
        if self.collection is None and len(collections) == 1:
            (self.collection,) = collections
        if self.collection not in collections:
            known = f"{path} has collections {join_names(collections) or 'none'} on embedding servers"
            raise ValueError(f"{known}, not {self.collection!r}")
        return path.parent, collections[self.collection]


def look_up(connection: Connection, ids: Mapping[str, Tensor], timeout: float = 10.0) -> dict[str, Tensor]:
    """Call `Follower.look_up` of a follower in another process; ConnectionError if it does not answer in time."""
    _, rows = connection.query_tensors("look_up", {"tables": list(ids)}, list(ids.values()), timeout)
    return dict(zip(ids, rows, strict=True))


class Publisher:
    """Publisher of a model's tables: embedding servers write snapshots into a folder, which followers read.

    Args:
        folder: on a file system that the servers, this process and followers share; created if missing.
        most: maximum number of files per server, a full snapshot and incremental ones; a full one follows.
    """

    def __init__(self, folder: str | Path, most: int = 16) -> None:
        self._folder, self._max_files = Path(folder).absolute(), most
        self._chains: dict[str, list[dict[str, Any]]] = {}

    def publish(self, model: nn.Module) -> None:
        """Publish the tables when all trainers have reached this trainer's step; one trainer calls this, between steps.

        StorageError if it fails; followers then serve the previous snapshot.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        manifest, previous = self._folder / PUBLISHED, dict[str, Any]()
        with suppress(FileNotFoundError, ValueError):  # missing, or damaged
            previous = json.loads(read_sealed(manifest))["servers"]
        for name, tables in collections_on_servers(model).items():
            self._chains[name] = self._write(cast(CollectionClient, tables.service), self._chains.pop(name, []))
        atomic_write(manifest, seal(json.dumps({"servers": self._chains})))
        # Followers may still read the files of the previous manifest.
        chains = [chain for servers in (*previous.values(), *self._chains.values()) for chain in servers]
        used_files = {file for chain in chains for file in chain["files"]}
        for path in self._folder.glob("*.server"):
            if path.name not in used_files:
                path.unlink(missing_ok=True)

    def _write(self, service: CollectionClient, previous: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Write incremental snapshots, or full ones if a chain is long or a server has lost it; return the chains."""
        previous = previous if previous and len(previous[0]["files"]) < self._max_files else []
        for changes_only in (True, False) if previous else (False,):
            stem = self._folder / f"{uuid.uuid4().hex}-"
            headers = service.snapshot(stem, changes_only, CHAIN)
            files = [chain["files"] for chain in previous] if changes_only else [[] for _ in headers]
            if not changes_only or [h["after"] for h in headers] == [chain["snapshot"] for chain in previous]:
                break  # otherwise a restarted server has written a full snapshot
        return [
            {"files": [*server_files, f"{stem.name}{server}.server"], "snapshot": header["snapshot"]}
            for server, (server_files, header) in enumerate(zip(files, headers, strict=True))
        ]
