"""Publishing tables on embedding servers for followers, more often than a run makes checkpoints."""

import json
import uuid
from pathlib import Path
from typing import Any, cast

from torch import nn

from tritonemb.server.attach import collections_on_servers
from tritonemb.server.client import CollectionClient
from tritonemb.server.follower import PUBLISHED
from tritonemb.utils import read_sealed, sealed, write_whole

CHAIN = "published"  # beside that of checkpoints


class Publisher:
    """Lets embedding servers write snapshots of a model's tables into a folder, which followers read.

    Args:
        folder: on a file system that the servers, this process and followers share; it is made.
        most: files of a server, a whole snapshot and changes; then a whole one comes again.
    """

    def __init__(self, folder: str | Path, most: int = 16) -> None:
        self._folder, self._most = Path(folder), most
        self._chains: dict[str, list[dict[str, Any]]] = {}

    def publish(self, model: nn.Module) -> None:
        """Publish the tables when all trainers have come to this one's step; one trainer calls this, between steps.

        StorageError if it fails; followers serve what they have then.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        manifest = self._folder / PUBLISHED
        before = json.loads(read_sealed(manifest))["servers"] if manifest.exists() else {}
        for name, tables in collections_on_servers(model).items():
            self._chains[name] = self._write(cast(CollectionClient, tables.service), self._chains.pop(name, []))
        write_whole(manifest, sealed(json.dumps({"servers": self._chains})))
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
