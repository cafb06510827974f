"""Embedding server: executes each request exactly once, the requests of a client in the order in which it sent them.

A server with a folder can be restarted. The folder has a *snapshot*, which is a chain of snapshots of tables and the
sessions of clients, and with `log="disk"` a write-ahead log of requests since then. A request is acknowledged only once
it is durable: it is in the log, or the client keeps it until it is in the snapshot.
"""

import json
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from operator import index
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tritonemb.flight import encode_error
from tritonemb.server.codec import RowCodecs
from tritonemb.server.inbox import TRAINER_TIMEOUT, Clients, Inbox
from tritonemb.server.records import MessageLog, read_log, read_records, with_current_names, write_record
from tritonemb.server.snapshot import SavedShard, restore, saved_shards, take_snapshot
from tritonemb.server.tables import CollectionSpec, ServedTables, warm_up
from tritonemb.server.transport import Message, Reply, Values
from tritonemb.storage.aio import PageFile
from tritonemb.storage.io import create_file, sync
from tritonemb.storage.store import StorageError, storage_errors
from tritonemb.types import CacheConfig
from tritonemb.utils import Closeable, atomic_write, on_error, read_sealed, seal

LogMode = Literal["memory", "disk", "fsync"]
OverMemory = Literal["refuse", "spill"]
Respond = Callable[[Message | Exception], None]
_SERVER_FILE = re.compile(r"(clients|log)-\d+|.*-\d+\.rows")
MANIFEST = "state.json"  # of a server's snapshot
RECOVERY_CHAIN = "state"  # name of the tables' chain in that snapshot
MAX_CHAIN_FILES = 16  # per collection; a full snapshot follows
LOG_BYTES = 1 << 28  # of the log, after which a snapshot is saved
_TRAINER_OPERATIONS = ("pull", "push", "look_up", "flush", "lease", "allocate", "transfer")  # of the registered client
MAX_REQUESTS_PER_APPEND = 64  # to the log


class EmbeddingServer(Closeable):
    """Partitions of collections' tables, and one thread that reads and writes them.

    A message's values have `op`, the operation. A *request* has a `number`, which counts the requests of a `client`
    from 0. A repeated request is answered again, and not executed again; one that arrives early waits for its
    predecessors. A *query* has no number, changes no row, and is not logged.

    Args:
        name: name in error messages.
        folder: folder of the snapshot, which is restored if it exists; None: the server cannot be restarted.
        log: keeper of requests since the snapshot: clients, which send them again ("memory"), a file ("disk"), or a
            file that survives a power failure ("fsync").
        memory: maximum bytes of full tables, with their optimizer states and indexes.
        over_memory: handling of a collection above that limit: it is refused ("refuse"), or put on disk ("spill") with
            as many rows in memory as fit; results are bitwise identical.

    Raises:
        StorageError: the folder cannot be read or written, or is damaged.
        ValueError: `log` without a folder.
    """

    def __init__(
        self, name: str = "server", folder: str | Path | None = None, log: LogMode | None = None,
        memory: float | None = None, over_memory: OverMemory = "refuse",
    ) -> None:  # fmt: skip
        if log not in (None, *get_args(LogMode)):
            raise ValueError(f"log must be one of {get_args(LogMode)}, got {log!r}")
        if log is not None and folder is None:
            raise ValueError(f"log={log!r} needs a folder for snapshots")
        if over_memory not in get_args(OverMemory):
            raise ValueError(f"over_memory must be one of {get_args(OverMemory)}, got {over_memory!r}")

        # Options.
        self.name, self.log, self._memory, self._over_memory = name, log, memory, over_memory
        self._folder = None if folder is None else Path(folder)

        self.clients = Clients()

        # Tables.
        self.collections: dict[str, ServedTables] = {}
        self._row_codecs: dict[str, RowCodecs] = {}
        self._reserved_bytes: dict[str, float] = {}  # by collection

        # Snapshot and log.
        self._version = 0  # of the snapshot
        self._files: list[str] = []  # of the tables' snapshots
        self._log: MessageLog | None = None
        self._log_bytes, self._max_log_bytes = 0, LOG_BYTES
        self._restoring, self._save_due = False, False
        self._folder_lock: PageFile | None = None

        self._start_time = time.monotonic()
        self._failure: RuntimeError | None = None
        if self._folder is not None:
            with torch.no_grad(), storage_errors(f"embedding server {name} cannot use {folder}", "check the disk"):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._folder_lock = create_file(self._folder / ".lock")
                if not self._folder_lock.lock():
                    raise StorageError(f"another embedding server uses {folder}; choose another folder")
                self._restore(self._folder)
        warm_up()
        self._queue: queue.SimpleQueue[tuple[Message, Reply] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tritonemb-{name}", daemon=True)
        self._thread.start()

    def receive(self, message: Message, reply: Reply) -> None:
        """Queue a message, or raise if it has no sender. `reply` is called by the server's thread.

        A ping is answered at once by the calling thread, as the server's thread may be busy for long.
        """
        values, is_request = message[0], "number" in message[0]
        for name in ("number", "received") if is_request else ("query",):
            index(values[name])
        self.clients.last_seen[values["client"] if is_request else values.get("client")] = time.monotonic()
        if values["op"] == "ping":
            reply(({"query": values["query"]}, []))
        else:
            self._queue.put((message, reply))

    def close(self) -> None:
        """Execute the queued messages, and end the thread."""
        self._queue.put(None)
        self._thread.join()
        if self._log is not None:
            self._log.close()
        if self._folder_lock is not None:
            self._folder_lock.close()

    @torch.no_grad()
    def _run(self) -> None:
        items: list[tuple[Message, Reply] | None] = []
        while not items or items[-1] is not None:
            items = [self._queue.get()]
            while len(items) < MAX_REQUESTS_PER_APPEND and not self._queue.empty() and items[-1] is not None:
                items.append(self._queue.get())
            try:
                self._process([item for item in items if item is not None])
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Fail all pending and later requests after an unexpected error: the state may be partially updated."""
        traceback.print_exception(error)
        failure = self._failure = RuntimeError(
            f"embedding server {self.name} has failed ({type(error).__name__}: {error}); restart it"
        )
        for inbox in self.clients:
            for number, (_, reply) in list(inbox.in_progress.items()):
                reply(({"number": number, "error": encode_error(failure)}, []))

    def _process(self, items: Iterable[tuple[Message, Reply]]) -> None:
        """Answer queries; accept requests in the order of their numbers, log them, then execute them."""
        accepted = []
        for message, reply in items:
            values = message[0]
            if (number := values.get("number")) is None:
                self._answer_query(reply, *message)
                continue
            inbox = self.clients.inbox(values["client"])
            if not self._restoring and values["op"] in _TRAINER_OPERATIONS:
                self.clients.check_trainer(values)
            if (failure := self._failure or inbox.failure) is not None:
                reply(({"number": number, "error": encode_error(failure)}, []))
                continue
            requests, stored_reply = inbox.receive(message, reply)
            if stored_reply is not None:
                reply(stored_reply)
            accepted += [(inbox, request) for request in requests]
        if self._log is not None and accepted:
            try:
                self._log_bytes += self._log.append([message for _, message in accepted])
            except StorageError as error:
                for inbox, (values, _) in reversed(accepted):
                    inbox.revoke(values["number"])(({"number": values["number"], "error": encode_error(error)}, []))
                return
        if self.log != "memory":
            for inbox, _ in accepted:
                inbox.mark_durable()
        for inbox, message in accepted:
            self._execute(inbox, message)
        if self._log is not None and self._log_bytes > self._max_log_bytes:
            try:
                self.save()
            except StorageError as error:  # the log is complete, only larger than it should be
                print(f"warning: {error}", file=sys.stderr)
                self._max_log_bytes += LOG_BYTES

    def _execute(self, inbox: Inbox, message: Message) -> None:
        (values, tensors), number = message, message[0]["number"]

        def respond(result: Message | Exception) -> None:
            if isinstance(result, Exception):
                result = {"error": encode_error(result)}, []
            if (completed := inbox.complete(number, result)) is not None:
                reply_message, reply = completed
                reply(reply_message)

        try:
            self._handler("do", values["op"])(values, tensors, respond)
        except Exception as error:
            if number not in inbox.in_progress or any(served.is_broken for served in self.collections.values()):
                raise  # the client has its reply, or the tables may be inconsistent
            respond(error)

    def _answer_query(self, reply: Reply, values: Values, tensors: Sequence[Tensor]) -> None:
        try:
            result = self._handler("query", values["op"])({**values, "tensors": tensors})
        except Exception as error:
            result = {"error": encode_error(error)}
        rows = result.pop("rows", [])
        reply(({**result, "query": values["query"]}, rows))

    def _handler(self, kind: str, op: str) -> Callable[..., Any]:
        if (handler := getattr(self, f"_{kind}_{op}", None)) is None:
            raise ValueError(f"unknown operation {op!r}; trainers and servers need the same version of tritonemb")
        return handler

    # Snapshot and recovery.

    def save(self) -> None:
        """Save a snapshot, and truncate the log. StorageError if it cannot be written; the last one stays."""
        self._save_due = True
        if self._folder is None or self._restoring:
            return
        try:
            self._write_snapshot(self._folder, self._version + 1)
        except BaseException:
            for served in self.collections.values():
                served.chains.pop(RECOVERY_CHAIN, None)  # the next snapshot is full: this one is in no manifest
            self._files = []
            raise
        self._save_due = False

    def _write_snapshot(self, folder: Path, version: int) -> None:
        changes_only = len(self._files) < MAX_CHAIN_FILES * len(self.collections)
        with storage_errors(f"embedding server {self.name} could not save its state in {folder}", "check the disk"):
            # Sessions of clients.
            clients, files = f"clients-{version}", self._files
            with (folder / clients).open("wb") as file:
                for name, inbox in self.clients.inboxes.items():
                    write_record(file, ({"client": name, "next_sequence": inbox.next_sequence}, []))
                    in_progress = {number: message for number, (message, _) in inbox.in_progress.items()}
                    for kind, messages in (("replied", inbox.unacked_replies), ("in_progress", in_progress)):
                        for number, (values, tensors) in messages.items():
                            write_record(file, ({"client": name, kind: number, "values": values}, tensors))
            sync(folder / clients)
            # Tables: a full snapshot replaces the collection's earlier files.
            for name, served in self.collections.items():
                rows, records = f"{name}-{version}.rows", take_snapshot(served, RECOVERY_CHAIN, changes_only)
                is_incremental = write_snapshot(folder / rows, records)["after"] is not None
                files = [*(file for file in files if is_incremental or file.rpartition("-")[0] != name), rows]
            # An empty log, and the manifest, which replaces the last snapshot atomically.
            log = MessageLog(folder / f"log-{version}", self.log == "fsync") if self.log in ("disk", "fsync") else None
            with on_error(log.close if log is not None else lambda: None):
                manifest = {"version": version, "clients": clients, "files": files}
                atomic_write(folder / MANIFEST, seal(json.dumps(manifest)))
                sync(folder)
        if self._log is not None:
            self._log.close()
        self._log, self._log_bytes, self._version, self._files = log, 0, version, files
        self._max_log_bytes = LOG_BYTES
        for inbox in self.clients:
            inbox.mark_durable()
        for path in folder.iterdir():
            if _SERVER_FILE.fullmatch(path.name) and path.name not in (clients, f"log-{version}", *files):
                path.unlink()

    def _restore(self, folder: Path) -> None:
        self._restoring = True
        if (folder / MANIFEST).exists():
            manifest = json.loads(read_sealed(folder / MANIFEST))
            self._version, self._files = manifest["version"], manifest["files"]
            # Tables.
            chains: dict[str, list[Path]] = {}
            for file in self._files:
                chains.setdefault(file.rpartition("-")[0], []).append(folder / file)
            for name, chain in chains.items():
                shard = SavedShard.from_chain(chain)
                served = self.collections[name] = self._make_tables(name, shard.spec, shard.header["server"])
                restore(served, [shard], keep_row_numbers=True)
                served.begin_chain(RECOVERY_CHAIN, shard.header["snapshot"])
            # Sessions of clients; requests in progress are executed again.
            for values, tensors in read_records(folder / manifest["clients"]):
                values = with_current_names(values)
                inbox = self.clients.inbox(values["client"])
                if "next_sequence" in values:
                    inbox.next_sequence = inbox.durable_sequence = values["next_sequence"]
                elif "replied" in values:
                    inbox.unacked_replies[values["replied"]] = values["values"], tensors
                else:
                    message = with_current_names(values["values"]), tensors
                    inbox.in_progress[values["in_progress"]] = message, _discard_reply
            for inbox in self.clients:
                for message, _ in list(inbox.in_progress.values()):
                    self._execute(inbox, message)
        # Replay the log.
        if self.log in ("disk", "fsync"):
            path = folder / f"log-{self._version}"
            if path.exists():
                self._process([(message, _discard_reply) for message in read_log(path)])
            self._log = MessageLog(path, self.log == "fsync")
            self._save_due |= path.stat().st_size > 0  # never append behind a torn record
        self._restoring = False
        if self._save_due:
            self.save()

    # Queries.

    def _query_connect(self, query: Values) -> Values:
        return {"next_sequence": self.clients.next_sequence(query["client"])}

    def _query_disconnect(self, query: Values) -> Values:
        self.clients.disconnect(query["client"])
        return {}

    def _query_register(self, query: Values) -> Values:
        """Register a client as a trainer, in place of one that is gone; `refused` has the reason if it is alive."""
        if (trainer := self.clients.register(query, time.monotonic())) is None:
            return {"refused": None}
        reason = (
            f"embedding server {self.name} has received a message from another {trainer} in the last "
            f"{TRAINER_TIMEOUT:.0f} seconds; end that run first, or start other servers for this one"
        )
        return {"refused": reason}

    def _query_spec(self, query: Values) -> Values:
        """Return the spec of a collection, and this server's index among its servers; empty if it is not served."""
        served = self.collections.get(query["collection"])
        return {} if served is None else {"spec": asdict(served.spec), "server": served.server}

    def _query_look_up(self, query: Values) -> Values:
        """Read rows in their present state, for a client that does not train."""
        served = self.collections[query["collection"]]
        (ids,) = served.columns(query["sizes"], query["tensors"])
        return {"steps": served.next_push, "rows": served.read(ids)}

    def _query_stats(self, query: Values) -> Values:
        return {"stats": self.statistics()}

    def statistics(self) -> Values:
        """Statistics of the server and, by collection, of its tables.

        Server: seconds since its start, length of its queue, version of its snapshot, bytes of the log. Collection:
        rows, bytes and evictions by table, pending pulls and pushes, histogram of staleness.
        """
        result: Values = {
            "seconds": time.monotonic() - self._start_time, "queue": self._queue.qsize(), "version": self._version,
            "log_bytes": self._log_bytes, "collections": {},
        }  # fmt: skip
        for name, served in self.collections.items():
            result["collections"][name] = {
                "tables": {table.config.name: vars(table.statistics()) for table in served.dynamic},
                "pulls": served.next_pull, "steps": served.next_push,
                "waiting_pulls": sum(len(batch.ids) for batch in served.pulls.values()),
                "waiting_pushes": sum(len(batch.ids) for batch in served.pushes.values()),
                "staleness": {str(steps): count for steps, count in sorted(served.staleness.items())},
            }  # fmt: skip
        return result

    # Requests.

    def _do_create(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        spec, name = CollectionSpec.from_json(values["spec"]), values["collection"]
        counts, is_file_name = (spec.trainers, spec.batches, 1 + (spec.staleness or 0)), self._folder is not None
        if min(counts) < 1 or (is_file_name and Path(name).name != name):
            raise ValueError(f"cannot create a collection {name!r} with {spec.trainers} trainers")
        if (existing := self.collections.get(name)) is None:
            self.collections[name] = self._make_tables(name, spec, values["server"])
        elif existing.spec != spec:
            raise ValueError(
                f"embedding server {self.name} has a collection {name!r} with other tables, trainers or staleness; "
                "attach with the same ones, or start other servers"
            )
        elif existing.server != values["server"]:
            raise ValueError(
                f"server order changed for {name!r}: {self.name} was server {existing.server}, is now server "
                f"{values['server']}; pass the addresses in the original order"
            )
        served = self.collections[name]
        respond(({"pulls": served.next_pull, "complete": served.is_complete()}, []))
        if existing is None:
            self.save()

    def _make_tables(self, name: str, spec: CollectionSpec, server: int) -> ServedTables:
        """Create tables in memory, or on disk if they exceed the memory limit; ValueError if that is refused."""
        needed_bytes, cache = spec.num_bytes(server), None
        free_bytes = needed_bytes if self._memory is None else self._memory - sum(self._reserved_bytes.values())
        if needed_bytes > free_bytes:
            if self._over_memory == "refuse" or free_bytes < needed_bytes / 1_000:
                raise ValueError(
                    f"embedding server {self.name} has {free_bytes:,.0f} bytes left for tables, and those of {name!r} "
                    f'need {needed_bytes:,} when full: set more memory or over_memory="spill", start more servers, '
                    "or reduce the tables"
                )
            folder = None if self._folder is None else self._folder / "rows"
            cache = CacheConfig(share=free_bytes / needed_bytes, folder=folder)
        tables, self._row_codecs[name] = ServedTables(spec, server, cache), RowCodecs(spec)
        self._reserved_bytes[name] = min(needed_bytes, free_bytes)
        return tables

    def _do_pull(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        served, rank, batch = *self._of_trainer(values), index(values["batch"])
        ids, occurrences, *optional = served.columns(values["sizes"], tensors)
        (versions,) = optional or (None,)
        if (served.spec.exact and batch < served.next_pull) or any((counts < 1).any() for counts in occurrences):
            raise ValueError(f"batch {batch} was pulled before, or has an id without occurrences")
        send = _row_sender(respond, self._row_codecs[values["collection"]], served, int(versions is not None))
        served.pull(rank, batch, ids, occurrences, send, versions)

    def _do_look_up(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        served, _ = self._of_trainer(values)
        (ids,) = served.columns(values["sizes"], tensors)
        served.look_up(index(values["after"]), ids, _row_sender(respond))

    def _do_push(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        served, rank, batch = *self._of_trainer(values), index(values["batch"])
        lr, ids, sums = float(values["lr"]), list[Tensor](), list[Tensor]()
        if values["sizes"] is not None:
            (ids,) = served.columns(values["sizes"], tensors[:1])
            codecs, scale = self._row_codecs[values["collection"]], float(values["scale"])
            sums = codecs.gradients.unpack(served.numbers, tensors[1:], scale)
            tables = zip(ids, served.dynamic, strict=True)
            shapes = [(len(table_ids), table.config.embedding_dim) for table_ids, table in tables]
            if [(gradient.dtype, *gradient.shape) for gradient in sums] != [(torch.float32, *s) for s in shapes]:
                raise ValueError(f"gradients must be float32 {shapes}")
        respond(({}, []))  # the push is in the log, and will be in each later snapshot
        served.push(rank, batch, ids, sums, lr)

    def _of_trainer(self, values: Values) -> tuple[ServedTables, int]:
        """Return the collection of a trainer's request, and the trainer's rank."""
        served, rank = self.collections[values["collection"]], index(values["rank"])
        if not 0 <= rank < served.spec.trainers:
            raise ValueError(f"rank {rank} of {served.spec.trainers}")
        return served, rank

    def _do_describe(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        """Send a trainer that leases rows the number, seed and clock of each table, and the number of updates."""
        served = self.collections[values["collection"]]
        tables = [[n, table.seed, table.clock] for n, table in zip(served.numbers, served.dynamic, strict=True)]
        updates = 0 if served.tables is None else int(served.tables.counters["step"])
        respond(({"tables": tables, "updates": updates}, []))

    def _do_lease(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        self.collections[values["collection"]].is_leased = True
        respond(({}, []))

    def _do_allocate(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        served, _ = self._of_trainer(values)
        ids, occurrences = served.columns(values["sizes"], tensors, of_ids=True)
        if values["training"]:
            rows, new_masks = served.allocate(ids, occurrences)
        else:
            rows, new_masks = served.find(ids), [torch.zeros_like(table_ids, dtype=torch.bool) for table_ids in ids]
        respond(({}, [torch.cat([tensors[0][:0], *rows]), torch.cat([tensors[0][:0].bool(), *new_masks])]))

    def _do_transfer(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        """Write the records of the first tables, then read those of the others."""
        served, (ids, *records) = self.collections[values["collection"]], tensors
        ids_by_table = ids.split([size for _, size in values["sizes"]])
        keys = [(number, table_ids) for (number, _), table_ids in zip(values["sizes"], ids_by_table, strict=True)]
        served.check_records(keys, records)
        if records:
            served.write_records(dict(keys[: len(records)]), records)
        respond(({}, served.read_records(dict(keys[len(records) :]))))

    def _do_flush(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        (served, rank), steps, returned = self._of_trainer(values), index(values["steps"]), values.get("returned")
        if returned is not None:
            served.end_lease(index(returned["steps"]), float(returned["lr"]))
        served.flush(rank, steps, lambda error: respond(({}, []) if error is None else error))

    def _do_read(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        saved = self._table(values).get_state()
        respond(({"names": list(saved)}, [value.contiguous() for value in saved.values()]))

    def _do_load(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        served, saved = self.collections[values["collection"]], dict(zip(values["names"], tensors, strict=True))
        mask = served.spec.in_shard(served.spec.number(values["table"]), saved["ids"])
        if not mask.all():
            saved |= {name: value[mask] for name, value in saved.items() if value.dim() and len(value) == len(mask)}
        self._table(values).load_state(saved)
        served.versions = None
        respond(({}, []))

    def _do_snapshot(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        """Write a snapshot of a collection when all trainers have reached a step, for a checkpoint or for followers."""
        served, steps = self.collections[values["collection"]], index(values["steps"])

        def write(error: Exception | None) -> None:
            try:
                if error is not None:
                    raise error
                if served.is_leased:
                    raise ValueError("a trainer has leased rows of these tables; all trainers flush them first")
                records = take_snapshot(served, values["chain"], values["changes_only"])
                respond((write_snapshot(Path(values["path"]), records), []))
            except Exception as failure:
                respond(failure)

        served.when_trained(steps, write)

    def _do_restore(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        """Restore a collection from the snapshots of all servers at one step: a chain of files per server."""
        served = self.collections[values["collection"]]
        shards = saved_shards(served, [[*map(Path, chain)] for chain in values["chains"]])
        for shard in shards:
            shard.check()
        served.is_broken = True
        restore(served, shards)
        served.advance()
        respond(({}, []))
        self.save()

    def _do_save(self, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
        self.save()
        respond(({}, []))

    def _table(self, values: Values) -> Any:
        served = self.collections[values["collection"]]
        return served.dynamic[[table.config.name for table in served.dynamic].index(values["table"])]


def write_snapshot(path: Path, records: Iterable[Message]) -> Values:
    """Write records to a file, sync it to the disk, and return the names of the snapshot and of its predecessor.

    StorageError if it cannot be written; then the file is removed.
    """
    header: Values = {}
    errors = storage_errors(f"snapshot {path} could not be written", "check the disk")
    with errors, on_error(lambda: path.unlink(missing_ok=True)), path.open("wb") as file:
        for message in records:
            header = header or message[0]
            write_record(file, message)
        file.flush()
        os.fsync(file.fileno())
    return {"snapshot": header["snapshot"], "after": header["after"]}


def _row_sender(
    respond: Respond, codecs: RowCodecs | None = None, served: ServedTables | None = None, first: int = 0
) -> Any:
    """Return a callback that encodes rows, which begin at tensor `first`, and sends them.

    With versions before the rows, for a trainer with a cache, it sends the number of steps applied to them as well.
    """

    def send(rows: Sequence[Tensor] | Exception) -> None:
        if isinstance(rows, Exception):
            respond(rows)
            return
        tensors, steps = [tensor.contiguous() for tensor in rows], {}
        if codecs is not None and served is not None:
            span = slice(first, first + len(served.numbers))
            tensors[span] = codecs.rows.pack(served.numbers, tensors[span])
            steps = {"steps": served.next_push} if first else {}
        respond((steps, tensors))

    return send


def _discard_reply(message: Message) -> None:
    """Drop the reply to a replayed request: its client sends it again."""
