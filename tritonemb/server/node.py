"""Embedding server: a thread that executes each request exactly once, in the order in which its client sent it.

Pure rules of delivery are in `inbox.py`, those of pulls and pushes in `ordering.py`; rows are in `tables.py`, snapshots
and the log in `durable.py`. A request is acknowledged only once it is durable: it is in the log, or the client keeps it
until it is in the snapshot.
"""

import queue
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from operator import index
from pathlib import Path
from typing import TypeVar, get_args

import torch
from torch import Tensor

from tritonemb.flight import encode_error
from tritonemb.server.durable import CHAIN, DurableState, LogMode, discard_reply
from tritonemb.server.inbox import Clients, Inbox
from tritonemb.server.migration import COPY, MIGRATION_QUERIES, Departure, find_tablet, release_late
from tritonemb.server.partitions import Entries
from tritonemb.server.snapshot import read_snapshot, restore, saved_shards, take_snapshot, write_snapshot
from tritonemb.server.spec import CollectionSpec, MemoryQuota, OverMemory
from tritonemb.server.tables import PullReply, PullRequest, PushRequest, Respond, ServedTables, checked_rate, warm_up
from tritonemb.server.transport import Message, Reply, Values, answer
from tritonemb.storage.store import StorageError, storage_errors
from tritonemb.tables.dynamic_table import row_fields
from tritonemb.utils import Closeable, on_error

MAX_REQUESTS_PER_APPEND = 64  # in one append to the log, and so one fsync; more would delay the first reply
HandlerT = TypeVar("HandlerT")


class EmbeddingServer(Closeable):
    """Partitions of collections' tables, and one thread that reads and writes them.

    A message's values have `op`, the operation. A *request* has a `number`, see `Inbox`. A *query* has none, changes no
    row, and is not logged.

    Args:
        name: name in error messages.
        folder: folder of the snapshot, which is restored if it exists; None: the server cannot be restarted.
        log: keep requests since the snapshot in clients, which send them again ("memory"), in a write-ahead log
            ("disk"), or in one that survives a power failure ("fsync"); None: no log.
        memory: maximum bytes of all tables when full, with optimizer states and indexes; None: no limit.
        over_memory: above that limit raise ("refuse"), or put a collection on disk, with as many rows in memory as fit
            ("spill"); results are bitwise identical.

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
        self.name, self.log = name, log
        self.clients = Clients()
        self.collections: dict[str, ServedTables] = {}
        self.quota = MemoryQuota(memory, over_memory, None if folder is None else Path(folder) / "rows")
        self.staging = Path(tempfile.gettempdir() if folder is None else folder)  # of copies of tablets
        self.departures: dict[str, Departure] = {}  # tablets that are being moved, by name
        self.routes: dict[str, Values] = {}  # of tablets that have moved from or to here, by name
        self._start_time = time.monotonic()
        self._failure: RuntimeError | None = None
        self.durable: DurableState | None = None
        if folder is not None:
            with torch.no_grad(), storage_errors(f"embedding server {name} cannot use {folder}", "check the disk"):
                self._restore(DurableState(Path(folder), log))
        warm_up()
        self._queue: queue.SimpleQueue[tuple[Message, Reply] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tritonemb-{name}", daemon=True)
        self._thread.start()

    def receive(self, message: Message, reply: Reply) -> None:
        """Queue a message, for the server's thread, which calls `reply`; KeyError or TypeError for a malformed header.

        A ping is answered at once by the calling thread, as the server's thread may be busy for long.
        """
        values, is_request = message[0], "number" in message[0]
        hash(values["op"])
        for name in ("number", "received") if is_request else ("query",):
            index(values[name])
        self.clients.last_seen[values["client"] if is_request else values.get("client")] = time.monotonic()
        if values["op"] == "ping" and self._thread.is_alive():  # else the server is closed
            reply(({"query": values["query"]}, []))
        else:
            self._queue.put((message, reply))

    def close(self) -> None:
        """Execute the queued messages, and end the thread."""
        self._queue.put(None)
        self._thread.join()
        if self.durable is not None:
            self.durable.close()

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
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Fail all pending and later requests after an unexpected error: the state may be partially updated."""
        traceback.print_exception(error)
        problem = f"{type(error).__name__}: {error}"
        self._failure = RuntimeError(f"embedding server {self.name} has failed ({problem}); restart it")
        for inbox in self.clients.inboxes.values():
            for number, (_, reply) in list(inbox.in_progress.items()):
                _reject(number, reply, self._failure)

    def _process(self, items: Iterable[tuple[Message, Reply]]) -> None:
        """Answer queries; accept requests in the order of their numbers, log them, then execute them."""
        release_late(self)
        accepted = list[tuple[Inbox, Message]]()
        for message, reply in items:
            values = message[0]
            if "number" not in values:
                answer(message, reply, self._answer_query)
                continue
            inbox = self.clients.inbox(values["client"])
            if values["op"] in TRAINER_OPERATIONS and reply is not discard_reply:
                self.clients.check_trainer(values)
            if (failure := self._failure or inbox.failure) is not None:
                _reject(values["number"], reply, failure)
                continue
            requests, stored_reply = inbox.receive(message, reply)
            if stored_reply is not None:
                reply(stored_reply)
            accepted += [(inbox, request) for request in requests]
        if self.durable is not None:
            try:
                self.durable.append([message for _, message in accepted])
            except StorageError as error:
                for inbox, (values, _) in reversed(accepted):
                    _reject(values["number"], inbox.revoke(values["number"]), error)
                return
        for inbox, _ in accepted if self.log != "memory" else ():
            inbox.mark_durable()
        for inbox, message in accepted:
            self.execute(inbox, message)
        if self.durable is not None:
            self.durable.save_if_due(self.clients, self.collections)

    def _answer_query(self, query: Values, tensors: list[Tensor]) -> Message:
        if self._failure is not None and query["op"] in MIGRATION_QUERIES:
            raise self._failure
        route = None if query["op"] in MIGRATION_QUERIES else find_tablet(self, query)
        return _handler(QUERIES, query["op"])(self, query, tensors) if route is None else ({"moved": route}, [])

    def execute(self, inbox: Inbox, message: Message) -> None:
        (values, tensors), number = message, message[0]["number"]

        def respond(result: Message | Exception) -> None:
            if isinstance(result, Exception):
                result = {"error": encode_error(result)}, []
            if (completed := inbox.complete(number, result)) is not None:
                reply_message, reply = completed
                reply(reply_message)

        try:
            if (departure := self.departures.get(values.get("collection", ""))) is not None:
                departure.requests.append((inbox, message))  # a tablet that is being copied executes nothing
            elif (route := find_tablet(self, values)) is not None:
                respond(({"moved": route}, []))
            elif (op := values["op"]) == "save":
                self.save()
                respond(({}, []))
            elif op == "create":
                self._create(values, respond)
            else:
                result = _handler(HANDLERS, op)(self.collections[values["collection"]], values, tensors, respond)
                if result is not None:
                    respond(result)
                if op == "restore":
                    self.save()
        except Exception as error:
            if number not in inbox.in_progress or any(served.is_broken for served in self.collections.values()):
                raise  # the client has its reply, or the tables may be inconsistent
            respond(error)

    def _create(self, values: Values, respond: Respond) -> None:
        spec, name, server = CollectionSpec.from_json(values["spec"]), values["collection"], values["server"]
        if self.quota.folder is not None and (Path(name).name != name or "\0" in name or len(name.encode()) > 200):
            raise ValueError(f"cannot create a collection {name!r}: its name is part of a file's name")
        is_new = name not in self.collections
        served = self.add_tables(name, spec, server) if is_new else self.collections[name]
        if served.spec != spec:
            raise ValueError(
                f"embedding server {self.name} has a collection {name!r} with other tables, trainers or staleness; "
                "attach with the same ones, or start other servers"
            )
        if served.server != server:
            raise ValueError(
                f"server order changed for {name!r}: {self.name} was server {served.server}, is now server {server}; "
                "pass the addresses in the original order"
            )
        is_complete = not served.lease.is_active and served.ordering.is_complete()
        respond(({"pulls": served.ordering.next_pull, "complete": is_complete}, []))
        if is_new:
            self.save()

    def add_tables(self, name: str, spec: CollectionSpec, server: int) -> ServedTables:
        cache = self.quota.reserve(self.name, name, spec, server)
        with on_error(lambda: self.quota.reserved_bytes.pop(name)):
            served = self.collections[name] = ServedTables(spec, server, cache)
        return served

    def remove_tables(self, name: str) -> None:
        del self.collections[name], self.quota.reserved_bytes[name]

    def save(self) -> None:
        """Save a snapshot, and truncate the log. StorageError if it cannot be written; the last one stays."""
        if self.durable is not None:
            self.durable.save(self.clients, self.collections)

    def _restore(self, durable: DurableState) -> None:
        """Restore the snapshot; execute the requests that were in progress, and those of the log; then save."""
        durable.routes = self.routes
        for name, shard in durable.load_manifest(self.clients).items():
            served = self.add_tables(name, shard.spec, shard.header["server"])
            restore(served, [shard], keep_row_numbers=True)
            served.partitions.changes.begin_chain(CHAIN, shard.header["snapshot"])
        for inbox in self.clients.inboxes.values():
            for message, _ in list(inbox.in_progress.values()):
                self.execute(inbox, message)
        self._process((message, discard_reply) for message in durable.read_log())
        self.durable = durable  # nothing is saved before
        if durable.open_log():
            self.save()

    def statistics(self) -> Values:
        """Statistics of the server and, by collection, of its tables; see `metrics.METRICS`."""
        return {
            "seconds": time.monotonic() - self._start_time,
            "queue": self._queue.qsize(),
            "version": 0 if self.durable is None else self.durable.version,
            "log_bytes": 0 if self.durable is None else self.durable.log_bytes,
            "collections": {name: served.statistics() for name, served in self.collections.items() if COPY not in name},
        }


def _reject(number: int, reply: Reply, error: Exception) -> None:
    reply(({"number": number, "error": encode_error(error)}, []))


def _handler(handlers: Mapping[str, HandlerT], op: str) -> HandlerT:
    if op not in handlers:
        raise ValueError(f"unknown operation {op!r}; trainers and servers need the same version of tritonemb")
    return handlers[op]


def _pull(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    ids, occurrences, *optional = served.partitions.checked(values["sizes"], tensors)
    (versions,) = optional or (None,)
    if (occurrences < 1).any():
        raise ValueError("occurrences of pulled ids must be at least 1")
    pull = PullRequest(values["sizes"], ids, occurrences, versions, respond)
    served.ordering.pull(_rank(served, values), index(values["batch"]), pull)
    if versions is not None:
        served.partitions.changes.track_versions()
    served.advance()


def _push(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    rank, batch, lr = _rank(served, values), index(values["batch"]), checked_rate(values["lr"])
    tables = {} if values["sizes"] is None else _gradients(served, values, tensors)
    respond(({}, []))  # the push is in the log, and will be in each later snapshot
    served.ordering.push(rank, batch, PushRequest(tables, lr))
    served.advance()


def _gradients(served: ServedTables, values: Values, tensors: Sequence[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """Check and decode a push: ids and gradients by number of the table."""
    (ids, *messages), sizes, partitions, spec = tensors, values["sizes"], served.partitions, served.spec
    partitions.checked(sizes, [ids])
    counts = [sum(sizes[tables]) for tables in partitions.blocks]
    shapes = [(count, spec.tables[block.start].embedding_dim) for count, block in zip(counts, spec.blocks, strict=True)]
    if "blocks" not in values and len(messages) == len(sizes):  # in a log of an earlier version: a message per table
        by_block = zip(partitions.blocks, shapes, strict=True)
        messages = [torch.cat(messages[t]) if n else torch.empty(0, dim) for t, (n, dim) in by_block]
    sums = served.codecs.gradients.unpack(messages, float(values["scale"]))
    if [(tuple(matrix.shape), matrix.dtype) for matrix in sums] != [(shape, torch.float32) for shape in shapes]:
        raise ValueError(f"gradients must be float32 of shapes {shapes}")
    by_table = chain(*(matrix.split(sizes[t]) for matrix, t in zip(sums, partitions.blocks, strict=True)))
    return dict(zip(partitions.numbers, zip(ids.split(sizes), by_table, strict=True), strict=True))


def _look_up(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    """Read rows for evaluation, when the pushes of `after` steps less the staleness have been applied."""
    (ids,), staleness = served.partitions.checked(values["sizes"], tensors), served.spec.staleness
    min_steps = 0 if staleness is None else index(values["after"]) - staleness
    read = partial(_read_now, served, ids, values["sizes"])
    served.respond_when(lambda: served.ordering.next_push >= min_steps, respond, read)


def _read_now(served: ServedTables, ids: Tensor, sizes: Sequence[int]) -> Message:
    reply = PullReply(served.ordering.next_push, served.partitions.read(ids, sizes))
    return served.codecs.exact_rows.pack_reply(reply)


def _describe(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> Message:
    """Return the number, seed and clock of each table, and the number of updates, for a trainer that leases rows."""
    tables = [[number, table.seed, table.index.clock] for number, table in served.partitions.by_number.items()]
    table_set = served.partitions.tables
    return {"tables": tables, "updates": 0 if table_set is None else int(table_set.counters["step"])}, []


def _lease(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> Message:
    served.lease.is_active = True
    return {}, []


def _allocate(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> Message:
    ids, occurrences = served.partitions.checked(values["sizes"], tensors, served.lease.dynamic_numbers)
    return {}, served.lease.allocate(ids, values["sizes"], occurrences, values["training"])


def _transfer(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> Message:
    """Write the records of the first tables, then read those of the others."""
    (keys, *records), (numbers, sizes) = tensors, map(list, zip(*values["sizes"], strict=True))
    num_writes = values.get("writes", len(records))
    blocks = served.spec.record_blocks(numbers[:num_writes])
    if "writes" not in values:  # in a log of an earlier version: a tensor per table
        blocks = [slice(n, n + 1) for n in range(num_writes)]
    served.lease.check(Entries(numbers, sizes, keys), records, blocks)
    first_read = sum(sizes[:num_writes])
    if num_writes:
        served.lease.write(Entries(numbers[:num_writes], sizes[:num_writes], keys[:first_read]), records, blocks)
    return {}, served.lease.read(Entries(numbers[num_writes:], sizes[num_writes:], keys[first_read:]))


def _flush(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    """Apply the pushes of `steps` steps before the trainer's next pull, once all trainers have requested it."""
    rank, steps = _rank(served, values), index(values["steps"])
    if (returned := values.get("returned")) is not None:  # the trainer has written back all rows that it has leased
        trained_steps, lr = index(returned["steps"]), checked_rate(returned["lr"])
        served.lease.is_active = False
        if (table_set := served.partitions.tables) is not None:
            table_set.counters["step"].fill_(trained_steps)
            table_set.set_learning_rate(lr)
        served.ordering.next_pull, served.ordering.next_push = trained_steps * served.spec.batches, trained_steps
    served.ordering.flush(rank, steps)
    served.respond_when(lambda: served.ordering.next_push >= steps, respond)


def _read(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> Message:
    state = served.partitions.by_number[served.spec.numbers[values["table"]]].get_state()
    return {"names": list(state)}, [value.contiguous() for value in state.values()]


def _load(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> Message:
    number, state = served.spec.numbers[values["table"]], dict(zip(values["names"], tensors, strict=True))
    num_batches = index(values.get("steps", 0)) * served.spec.batches  # none in a log of an earlier version
    owned = served.partitions.owned(state["ids"].long(), [len(state["ids"])], [number])
    state |= {name: state[name][owned] for name in row_fields(state)}
    served.partitions.by_number[number].load_state(state)
    served.partitions.changes.versions = None
    # Gradients of the replaced rows are void.
    for push in chain(*(pushes.values() for batch, pushes in served.ordering.pushes.items() if batch < num_batches)):
        push.tables.update({n: (ids[:0], sums[:0]) for n, (ids, sums) in push.tables.items() if n == number})
    return {}, []


def _snapshot(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    """Write a snapshot of a collection when all trainers have reached a step, for a checkpoint or for followers."""
    steps = index(values["steps"])

    def write() -> Message:
        if served.lease.is_active:
            raise ValueError("a trainer has leased rows of these tables; all trainers flush them first")
        records = take_snapshot(served, values["chain"], values["changes_only"])
        return write_snapshot(Path(values["path"]), records), []

    served.respond_when(lambda: served.ordering.is_trained(steps), respond, write)


def _restore(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> Message:
    """Restore a collection from the snapshots of all servers at one step: a chain of files per server."""
    shards = saved_shards(served, [[*map(Path, files)] for files in values["chains"]])
    for path in chain.from_iterable(shard.files for shard in shards):
        deque(read_snapshot(path), maxlen=0)  # raises before the tables change, if the file is damaged
    served.is_broken = True
    restore(served, shards)
    served.advance()
    return {}, []


def _rank(served: ServedTables, values: Values) -> int:
    if not 0 <= (rank := index(values["rank"])) < served.spec.trainers:
        raise ValueError(f"rank must be in [0, {served.spec.trainers}), the number of trainers, got {rank}")
    return rank


def _disconnect(server: EmbeddingServer, query: Values, tensors: Sequence[Tensor]) -> Message:
    server.clients.disconnect(query["client"])
    return {}, []


def _spec(server: EmbeddingServer, query: Values, tensors: Sequence[Tensor]) -> Message:
    """Return the spec of a collection, and this server's index among its servers; empty if it is not served."""
    served = server.collections.get(query["collection"])
    return {} if served is None else {"spec": asdict(served.spec), "server": served.server}, []


def _look_up_now(server: EmbeddingServer, query: Values, tensors: Sequence[Tensor]) -> Message:
    served = server.collections[query["collection"]]
    (ids,) = served.partitions.checked(query["sizes"], tensors)
    return _read_now(served, ids, query["sizes"])


# A handler of a request gets the tables, the values and tensors of the message, and `respond`, which it calls once, now
# or later, with the reply or the error; or it returns the reply. A pull is answered once the staleness permits, a push
# at once: it is applied in the order of steps. `allocate` finds rows of ids in dynamic tables, and in training assigns
# rows to new ids. `read` returns the `state_dict` of this server's part of a table; `load` takes that of a full table.
HANDLERS: dict[str, Callable[[ServedTables, Values, Sequence[Tensor], Respond], Message | None]] = {
    "pull": _pull, "push": _push, "look_up": _look_up, "flush": _flush,
    "describe": _describe, "lease": _lease, "allocate": _allocate, "transfer": _transfer,
    "read": _read, "load": _load, "snapshot": _snapshot, "restore": _restore,
}  # fmt: skip
TRAINER_OPERATIONS = {"pull", "push", "look_up", "flush", "lease", "allocate", "transfer"}  # of the registered client
QUERIES: dict[str, Callable[[EmbeddingServer, Values, Sequence[Tensor]], Message]] = {
    "connect": lambda server, query, _: ({"next_sequence": server.clients.next_sequence(query["client"])}, []),
    "disconnect": _disconnect,
    "register": lambda node, query, _: ({"refused": node.clients.register(query, node.name, time.monotonic())}, []),
    "spec": _spec,
    "look_up": _look_up_now,
    "stats": lambda server, query, _: ({"stats": server.statistics()}, []),
    **MIGRATION_QUERIES,
}
