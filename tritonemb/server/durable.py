"""Durable state of a server, in a folder: a snapshot, and a write-ahead log of the requests since then.

The snapshot is a chain of snapshots of the tables, and the inboxes of clients; a manifest names its files.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from tritonemb.server.inbox import Clients
from tritonemb.server.snapshot import SavedShard, read_records, take_snapshot, write_record, write_snapshot
from tritonemb.server.spec import with_current_names
from tritonemb.server.tables import ServedTables
from tritonemb.server.transport import Message, Values
from tritonemb.storage.io import create_file
from tritonemb.storage.store import StorageError, storage_errors
from tritonemb.utils import Closeable, atomic_write, on_error, read_sealed, seal, sync

LogMode = Literal["memory", "disk", "fsync"]
MANIFEST = "state.json"
CHAIN = "state"  # name of the tables' chain of snapshots
MAX_CHAIN_FILES = 16  # per collection; a full snapshot follows
MAX_LOG_BYTES = 1 << 28  # of the log, after which a snapshot is saved
_SERVER_FILE = re.compile(r"(clients|log)-\d+|.*-\d+\.rows")


def read_log(path: Path) -> Iterator[Message]:
    """Yield the messages of a `MessageLog`; a last append that was written partially is skipped."""
    for values, tensors in read_records(path, torn=True):
        start = 0
        for message, num_tensors in zip(values.get("messages", ()), values.get("sizes", ()), strict=True):
            yield with_current_names(message), tensors[start : start + num_tensors]
            start += num_tensors


class MessageLog(Closeable):
    """Write-ahead log: requests since the last snapshot, appended to a file, and synced to the disk if `durable`.

    Messages that are appended together are one record, so a power failure loses all of them or none. An empty record
    follows as an end mark: a damaged record that has one behind it was acknowledged, and is not torn.
    """

    def __init__(self, path: Path, durable: bool) -> None:
        self._durable, self.path = durable, path
        self._problem = f"log {path} could not be written"
        with storage_errors(self._problem, "check the disk"):
            self._file: Any = path.open("ab")

    def append(self, messages: Sequence[Message]) -> int:
        """Append all messages or none, and return their size in bytes; StorageError if the log cannot be written."""
        values = {"messages": [values for values, _ in messages], "sizes": [len(tensors) for _, tensors in messages]}
        with storage_errors(self._problem, "check the disk"):
            if self._file.closed:
                raise OSError("it could not be reopened after an error")
            start = self._file.tell()
            try:
                size = write_record(self._file, (values, [tensor for _, tensors in messages for tensor in tensors]))
                self._file.flush()
                if self._durable:
                    os.fdatasync(self._file.fileno())
                size += write_record(self._file, ({}, []))
                self._file.flush()
            except OSError:
                with suppress(OSError):
                    self._file.close()  # drops its write buffer
                os.truncate(self.path, start)
                self._file = self.path.open("ab")
                raise
            return size

    def close(self) -> None:
        self._file.close()


class DurableState(Closeable):
    """Snapshot and log of the server that has a folder for itself; StorageError if another server uses the folder."""

    def __init__(self, folder: Path, mode: LogMode | None) -> None:
        self._folder, self._mode, self._has_log = folder, mode, mode in ("disk", "fsync")
        self.version, self.log_bytes, self._max_log_bytes = 0, 0, MAX_LOG_BYTES  # version of the snapshot
        self._files: list[str] = []  # of the tables' snapshots
        self.routes: dict[str, Values] = {}  # of tablets that have moved
        self.log: MessageLog | None = None  # requests since the snapshot, unless clients resend them
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = create_file(folder / ".lock")
        if not self._lock.lock():
            raise StorageError(f"another embedding server uses {folder}; choose another folder")

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        self._lock.close()

    # Recovery.

    def load_manifest(self, clients: Clients) -> dict[str, SavedShard]:
        """Load the inboxes of clients; return the snapshot of each collection."""
        if not (self._folder / MANIFEST).exists():
            return {}
        manifest = json.loads(read_sealed(self._folder / MANIFEST))
        self.version, self._files = manifest["version"], manifest["files"]
        self.routes.update(manifest.get("routes", {}))
        for values, tensors in read_records(self._folder / manifest["clients"]):
            values = with_current_names(values)
            inbox = clients.inbox(values["client"])
            if "next_sequence" in values:
                inbox.next_sequence = inbox.durable_sequence = values["next_sequence"]
            elif "replied" in values:
                inbox.unacked_replies[values["replied"]] = values["values"], tensors
            else:
                message = with_current_names(values["values"]), tensors
                inbox.in_progress[values["in_progress"]] = message, discard_reply
        chains: dict[str, list[Path]] = {}
        for file in self._files:
            chains.setdefault(file.rpartition("-")[0], []).append(self._folder / file)
        return {name: SavedShard.from_chain(chain) for name, chain in chains.items()}

    def read_log(self) -> Iterator[Message]:
        if self._has_log and (path := self._folder / f"log-{self.version}").exists():
            yield from read_log(path)

    def open_log(self) -> bool:
        """Open the log for appending; return whether a snapshot must be saved first."""
        self.log = self._create_log(self.version)
        return self.log is not None and self.log.path.stat().st_size > 0  # never append behind a torn record

    def _create_log(self, version: int) -> MessageLog | None:
        return MessageLog(self._folder / f"log-{version}", self._mode == "fsync") if self._has_log else None

    # Requests and snapshots.

    def append(self, messages: Sequence[Message]) -> None:
        if self.log is not None and messages:
            self.log_bytes += self.log.append(messages)

    def save_if_due(self, clients: Clients, collections: Mapping[str, ServedTables]) -> None:
        """Save a snapshot if the log is large; warn if it cannot be written, as the log is complete."""
        if self.log_bytes > self._max_log_bytes:
            try:
                self.save(clients, collections)
            except StorageError as error:
                print(f"warning: {error}", file=sys.stderr)
                self._max_log_bytes += MAX_LOG_BYTES

    def save(self, clients: Clients, collections: Mapping[str, ServedTables]) -> None:
        """Save a snapshot, and truncate the log. StorageError if it cannot be written; the last one stays."""
        try:
            with storage_errors(f"an embedding server could not save its state in {self._folder}", "check the disk"):
                self._save(clients, collections)
        except BaseException:
            for served in collections.values():
                served.partitions.changes.chains.pop(CHAIN, None)  # the next one is full: this one is in no manifest
            self._files = []
            raise

    def _save(self, clients: Clients, collections: Mapping[str, ServedTables]) -> None:
        folder, version = self._folder, self.version + 1
        files = [file for file in self._files if file.rpartition("-")[0] in collections]  # others have moved
        # Inboxes of clients.
        clients_name = f"clients-{version}"
        with (folder / clients_name).open("wb") as file:
            for name, inbox in clients.inboxes.items():
                write_record(file, ({"client": name, "next_sequence": inbox.next_sequence}, []))
                in_progress = {number: message for number, (message, _) in inbox.in_progress.items()}
                for kind, messages in (("replied", inbox.unacked_replies), ("in_progress", in_progress)):
                    for number, (values, tensors) in messages.items():
                        write_record(file, ({"client": name, kind: number, "values": values}, tensors))
        sync(folder / clients_name)
        # Tables: a full snapshot replaces the collection's earlier files.
        changes_only = len(files) < MAX_CHAIN_FILES * len(collections)
        for name, served in collections.items():
            rows, records = f"{name}-{version}.rows", take_snapshot(served, CHAIN, changes_only)
            is_incremental = write_snapshot(folder / rows, records)["after"] is not None
            files = [*(file for file in files if is_incremental or file.rpartition("-")[0] != name), rows]
        # An empty log, and the manifest, which replaces the last snapshot atomically.
        log = self._create_log(version)

        def settle() -> None:
            if log is not None:
                log.close()
            path = folder / MANIFEST
            if path.exists() and json.loads(read_sealed(path))["version"] == version:  # and a restart reads it
                self.version = version  # later files have other names
                if self.log is not None:
                    self.log.close()  # a restart would not read requests that it gets

        with on_error(settle):
            manifest = {"version": version, "clients": clients_name, "files": files, "routes": self.routes}
            atomic_write(folder / MANIFEST, seal(json.dumps(manifest)))
        if self.log is not None:
            self.log.close()
        self.log, self.version, self._files = log, version, files
        self.log_bytes, self._max_log_bytes = 0, MAX_LOG_BYTES
        for inbox in clients.inboxes.values():
            inbox.mark_durable()
        for path in folder.iterdir():
            if _SERVER_FILE.fullmatch(path.name) and path.name not in (clients_name, f"log-{version}", *files):
                path.unlink()


def discard_reply(message: Message) -> None:
    """Drop the reply to a replayed request: its client sends it again."""
