"""Followers: read-only replicas of a collection's tables that follow the snapshots in a folder, for serving; and the
publisher, which has servers write these more often than a run makes checkpoints."""

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
from tritonemb.server.client import CollectionClient, Connection
from tritonemb.server.replica import Replica, load_replica
from tritonemb.server.transport import Message, Reply, Values
from tritonemb.utils import Closeable, atomic_write, join_names, read_sealed, seal

CHECKPOINT, PUBLISHED = "trainer.json", "servers.json"  # manifests
ATTEMPTS, THREADS = 3, 4
CHAIN = "published"  # beside that of checkpoints


class Follower(Closeable):
    """A read-only replica of a collection's tables, which any threads may read.

    It loads a whole snapshot once, then only what has changed since; meanwhile it serves what it had. It is a `Service`
    for `look_up` of other processes, and for `Connection.ask("stats")`.

    Args:
        folder: a run's `checkpoints`, of which it follows the newest one, or the folder of a `Publisher`.
        collection: its path in the model; need not be given where there is one.
        poll: a thread looks into the folder again after so many seconds; None: only `refresh` does.

    Attributes:
        replica: what it serves; None before there is a snapshot.
        problem: why it could not load the newest snapshot; None if it could. It tries again, and waits for a whole one
            if one is missing that the newest one follows.
        bases, increments: how often it has loaded whole snapshots, and changes.
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
        """How many steps' updates the rows have."""
        return None if self.replica is None else self.replica.step

    @property
    def age(self) -> float | None:
        """Seconds since the snapshot was taken that it serves."""
        return None if self.replica is None else max(0.0, time.time() - self.replica.time)

    def look_up(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For ids int64 `[N]` of tables, their rows `[N, embedding_dim]`, all of one step.

        Ids without a row have initial values, as in evaluation.

        Raises:
            RuntimeError: there is no snapshot yet.
            ValueError: there is no such table, or an id is outside it.
        """
        return self._served().look_up(ids)

    def statistics(self) -> Values:
        """Step, age, rows and bytes by table, whether it is failing, and how often it has loaded what."""
        tables = {
            name: {"rows": table.ids.numel(), "num_bytes": table.ids.nbytes + table.rows.nbytes}
            for name, table in ({} if self.replica is None else self.replica.tables).items()
        }
        found = {"step": self.step, "age": self.age, "failing": self.problem is not None, "problem": self.problem}
        found |= {"bases": self.bases, "increments": self.increments}
        return found | {"collections": {self.collection: {"tables": tables}} if tables else {}}

    def refresh(self) -> bool:
        """Load the newest snapshot, and serve it; whether it is another one. What fails becomes the `problem`."""
        with self._lock:
            before, tried = self.replica, None
            for _ in range(ATTEMPTS):  # a newer manifest may be there when files have vanished
                try:
                    if (newest := self._newest()) == tried:
                        break
                    tried = newest
                    if (found := load_replica(self.replica, *newest)) is not self.replica:
                        self.bases, self.increments = self.bases + found.whole, self.increments + (not found.whole)
                    self.replica, self.problem = found, None
                    break
                except Exception as error:
                    self.problem = str(error) if isinstance(error, OSError | ValueError) else repr(error)
            return self.replica is not before

    def receive(self, message: Message, reply: Reply) -> None:
        """See `Service`."""
        with suppress(RuntimeError):  # it is closed, and nobody answers
            self._pool.submit(self._answer, message, reply)

    def close(self) -> None:
        """Follow no more, and answer what has been asked."""
        self._closed.set()
        self._pool.shutdown()

    def _follow(self, poll: float) -> None:
        pause = poll
        while not self._closed.wait(pause):
            began = time.monotonic()
            self.refresh()
            pause = poll if self.problem is None else max(poll, 10 * (time.monotonic() - began))

    def _served(self) -> Replica:
        if self.replica is None:
            raise RuntimeError(f"there is no snapshot to serve yet: {self.problem}")
        return self.replica

    def _answer(self, message: Message, reply: Reply) -> None:
        values, tensors = message
        kept: Values = {name: values[name] for name in ("ask", "number") if name in values}  # which it answers
        try:
            if values["op"] == "stats":
                reply(({**kept, "stats": self.statistics()}, []))
            elif values["op"] == "look_up":
                replica = self._served()
                rows = replica.look_up(dict(zip(values["tables"], tensors, strict=True)))
                reply(({**kept, "step": replica.step}, list(rows.values())))
            else:
                raise ValueError(f"a follower is asked for look_up and stats, not for {values['op']!r}")
        except Exception as error:
            reply(({**kept, "error": encode_error(error)}, []))

    def _newest(self) -> tuple[Path, list[Values]]:
        """The folder of the newest manifest, and what that has of each server."""
        paths = {path.parent.name.removeprefix("step-"): path for path in self._folder.glob(f"step-*/{CHECKPOINT}")}
        newest = max((name for name in paths if name.isdecimal()), key=int, default=None)
        path = self._folder / PUBLISHED if newest is None else paths[newest]
        if newest is None and not path.exists():
            raise FileNotFoundError(f"{self._folder} has no checkpoint, and no {PUBLISHED} of a publisher")
        found = json.loads(read_sealed(path)).get("servers", {})
        if self.collection is None and len(found) == 1:
            (self.collection,) = found
        if self.collection not in found:
            known = f"{path} has collections {join_names(found) or 'none'} on embedding servers"
            raise ValueError(f"{known}, not {self.collection!r}")
        return path.parent, found[self.collection]


def look_up(connection: Connection, ids: Mapping[str, Tensor], timeout: float = 10.0) -> dict[str, Tensor]:
    """`Follower.look_up` of a follower that another process serves; ConnectionError if there is no answer in time."""
    _, rows = connection.question("look_up", {"tables": list(ids)}, list(ids.values()), timeout)
    return dict(zip(ids, rows, strict=True))


class Publisher:
    """Lets embedding servers write snapshots of a model's tables into a folder, which followers read.

    Args:
        folder: on a file system that the servers, this process and followers share; it is made.
        most: files of a server, a whole snapshot and changes; then a whole one comes again.
    """

    def __init__(self, folder: str | Path, most: int = 16) -> None:
        self._folder, self._most = Path(folder).absolute(), most
        self._chains: dict[str, list[dict[str, Any]]] = {}

    def publish(self, model: nn.Module) -> None:
        """Publish the tables when all trainers have come to this one's step; one trainer calls this, between steps.

        StorageError if it fails; followers serve what they have then.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        manifest, before = self._folder / PUBLISHED, dict[str, Any]()
        with suppress(FileNotFoundError, ValueError):  # there is none, or it is damaged
            before = json.loads(read_sealed(manifest))["servers"]
        for name, tables in collections_on_servers(model).items():
            self._chains[name] = self._write(cast(CollectionClient, tables.service), self._chains.pop(name, []))
        atomic_write(manifest, seal(json.dumps({"servers": self._chains})))
        named = {
            file for found in (before, self._chains) for of in found.values() for each in of for file in each["files"]
        }
        for path in self._folder.glob("*.server"):
            if path.name not in named:  # those of the manifest before may be read still
                path.unlink(missing_ok=True)

    def _write(self, service: CollectionClient, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        before = before if before and len(before[0]["files"]) < self._most else []
        for changes_only in (True, False) if before else (False,):
            stem = self._folder / f"{uuid.uuid4().hex}-"
            written = service.snapshot(stem, changes_only, CHAIN)
            chains = [each["files"] for each in before] if changes_only else [[] for _ in written]
            if not changes_only or [each["after"] for each in written] == [each["snapshot"] for each in before]:
                break  # else a server was started again, and has written all
        return [
            {"files": [*chain, f"{stem.name}{server}.server"], "snapshot": each["snapshot"]}
            for server, (chain, each) in enumerate(zip(chains, written, strict=True))
        ]
