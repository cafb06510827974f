"""Publishers: snapshots of a model's tables, written more often than a run saves checkpoints, for followers."""

import json
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from torch import nn

from tritonemb.server.attach import collections_on_servers
from tritonemb.server.client import CollectionClient
from tritonemb.utils import atomic_write, read_sealed, seal

PUBLISHED = "servers.json"  # manifest
CHAIN = "published"  # name of the publisher's chain of snapshots; checkpoints have another one


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
