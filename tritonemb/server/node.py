"""An embedding server: takes the messages of its clients, each once and in the order in which it was sent.

With a folder it can be started again. There it has its *state*, a chain of snapshots of its tables and what it knows of
its clients, and with `log="disk"` a log of what it was told since. What it was told it answers when that can no longer
be lost, and no sooner: it is in the log, or the client keeps it until it is in the state.
"""

import json
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from operator import index
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tritonemb.flight import encode_error
from tritonemb.server.codec import RowCodecs
from tritonemb.server.records import MessageLog, read_log, read_records, write_record
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
_OWN_FILE = re.compile(r"(clients|log)-\d+|.*-\d+\.rows")
STATE, OWN = "state.json", "state"  # the file, and the chain of snapshots
MOST_FILES = 16  # of a chain; a whole snapshot follows
LOG_BYTES = 1 << 28  # after which the state is saved
_OF_TRAINERS = ("pull", "push", "look_up", "flush", "hold", "assign", "move")  # come from who is registered as one
MOST_TAKEN = 64  # messages that are logged at once
MOST_EARLY = 4_096  # messages of a client that wait for earlier ones; more are dropped, and sent again
TRAINER_SECONDS = 10.0  # a trainer that was heard of since then is not replaced


class ClientSession:
    """What a server knows of one of its clients.

    Attributes:
        expected: the number of its next message, and `saved` that of the first that is not in the state, or logged.
        early: messages that came before those that go before them.
        undone: messages that have no answer yet, and `waiting` where that goes, by number.
        answers: those that it may not have received.
        failure: what all its messages are answered with, if it is not the trainer that it says, or not any more.
    """

    def __init__(self, failure: Exception | None = None) -> None:
        self.expected = self.saved = 0
        self.failure = failure
        self.early: dict[int, tuple[Message, Reply]] = {}
        self.undone: dict[int, Message] = {}
        self.waiting: dict[int, Reply] = {}
        self.answers: dict[int, Message] = {}


class EmbeddingServer(Closeable):
    """Has some partitions of collections' tables, and one thread that reads and writes them.

    A message's values have `op`, what is to be done, and `number`: those of a `client` count from 0. One that comes
    again is answered again, and not done again; one that comes too early waits. Messages without a number only ask.

    Args:
        name: in messages to users.
        folder: where the state is, which is restored if there is one; none if not given.
        log: who has what was told since the state was saved: clients ("memory"; they send it again), a file ("disk"),
            or a file that survives a loss of power ("fsync").
        memory: bytes that tables may take, at most, with their states and indexes, when they are full.
        over_memory: what becomes of a collection that needs more: it is refused, or is put on disk ("spill"), with as
            many rows in memory as there is room for; bits are the same.

    Raises:
        StorageError: the folder cannot be read or written, or is damaged.
        ValueError: a log without a folder.
    """

    def __init__(
        self, name: str = "server", folder: str | Path | None = None, log: LogMode | None = None,
        memory: float | None = None, over_memory: OverMemory = "refuse",
    ) -> None:  # fmt: skip
        if log not in (None, *get_args(LogMode)):
            raise ValueError(f"log must be one of {get_args(LogMode)}, got {log!r}")
        if log is not None and folder is None:
            raise ValueError(f"log={log!r} needs a folder, which the state is saved to")
        if over_memory not in get_args(OverMemory):
            raise ValueError(f"over_memory must be one of {get_args(OverMemory)}, got {over_memory!r}")
        self.name, self.log, self._memory, self._over_memory = name, log, memory, over_memory
        self._began = time.monotonic()
        self._taken: dict[str, float] = {}  # bytes, by collection
        self._trainers: dict[str, str] = {}  # their clients
        self._heard: dict[Any, float] = {}  # when each client was last heard of
        self.collections: dict[str, ServedTables] = {}
        self._row_codecs: dict[str, RowCodecs] = {}
        self._folder = None if folder is None else Path(folder)
        self._clients: dict[str, ClientSession] = {}
        self._log: MessageLog | None = None
        self._log_bytes = self._version = 0
        self._most_log_bytes = LOG_BYTES
        self._files: list[str] = []
        self._failure: RuntimeError | None = None
        self._restoring, self._save_due = False, False
        self._folder_lock: PageFile | None = None
        if self._folder is not None:
            with torch.no_grad(), storage_errors(f"embedding server {name} cannot use {folder}", "check the disk"):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._folder_lock = create_file(self._folder / ".lock")
                if not self._folder_lock.lock():
                    raise StorageError(f"another embedding server uses {folder}; give it another folder")
                self._restore(self._folder)
        warm_up()
        self._queue: queue.SimpleQueue[tuple[Message, Reply] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tritonemb-{name}", daemon=True)
        self._thread.start()

    def receive(self, message: Message, reply: Reply) -> None:
        """Take a message, or raise if it has no sender. `reply` is called by the server's thread, or, if all that is
        asked is whether it is alive, by this one, as that thread may be busy for long."""
        values, is_numbered = message[0], "number" in message[0]
        for name in ("number", "received") if is_numbered else ("ask",):
            index(values[name])
        self._heard[values["client"] if is_numbered else values.get("client")] = time.monotonic()
        if values["op"] == "alive":
            reply(({"ask": values["ask"]}, []))
        else:
            self._queue.put((message, reply))

    def close(self) -> None:
        """End the thread; what has been taken is done first."""
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
            while len(items) < MOST_TAKEN and not self._queue.empty() and items[-1] is not None:
                items.append(self._queue.get())
            try:
                self._take([each for each in items if each is not None])
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """What nobody expected: whoever waits is told, and whoever comes; what the server has may be half changed."""
        traceback.print_exception(error)
        failure = self._failure = RuntimeError(
            f"embedding server {self.name} has failed ({type(error).__name__}: {error}); start it again"
        )
        for client in self._clients.values():
            for number, reply in list(client.waiting.items()):
                reply(({"number": number, "error": encode_error(failure)}, []))

    def _take(self, items: Iterable[tuple[Message, Reply]]) -> None:
        accepted = []
        for message, reply in items:
            values = message[0]
            if (number := values.get("number")) is None:
                self._answer(reply, *message)
                continue
            client = self._clients.setdefault(values["client"], ClientSession())
            if not (self._restoring or client.failure) and values["op"] in _OF_TRAINERS:
                trainer = _trainer_of(values)
                if self._trainers.setdefault(trainer, values["client"]) != values["client"]:  # a restart forgets them
                    client.failure = PermissionError(f"this client is not the {trainer}")
            if (failure := self._failure or client.failure) is not None:
                reply(({"number": number, "error": encode_error(failure)}, []))
                continue
            for received in [n for n in client.answers if n < values["received"]]:
                del client.answers[received]
            if number in client.answers:
                reply(client.answers[number])
            elif number in client.undone:
                client.waiting[number] = reply
            elif client.expected <= number < client.expected + MOST_EARLY and values["op"] != "again":
                client.early[number] = message, reply
            while client.expected in client.early:
                number = client.expected
                client.undone[number], client.waiting[number] = client.early.pop(number)
                client.expected += 1
                accepted.append((client, client.undone[number]))
        if self._log is not None and accepted:
            try:
                self._log_bytes += self._log.append([message for _, message in accepted])
            except StorageError as error:
                for client, (values, _) in reversed(accepted):  # they have not come
                    number = client.expected = values["number"]
                    del client.undone[number]
                    client.waiting.pop(number)(({"number": number, "error": encode_error(error)}, []))
                return
            for client, _ in accepted:
                client.saved = client.expected
        for client, message in accepted:
            self._do(client, message)
        if self._log is not None and self._log_bytes > self._most_log_bytes:
            try:
                self.save()
            except StorageError as error:  # the log is longer than it should be, and whole
                print(f"warning: {error}", file=sys.stderr)
                self._most_log_bytes += LOG_BYTES

    def _do(self, client: ClientSession, message: Message) -> None:
        (values, tensors), number = message, message[0]["number"]

        def answer(result: Message | Exception) -> None:
            if number not in client.undone:
                return  # it has been answered
            if isinstance(result, Exception):
                result = {"error": encode_error(result)}, []
            saved = client.expected if self.log is None else client.saved
            found = client.answers[number] = {**result[0], "number": number, "saved": saved}, result[1]
            client.undone.pop(number)
            client.waiting.pop(number)(found)

        try:
            getattr(self, f"_do_{values['op']}")(values, tensors, answer)
        except Exception as error:
            if number not in client.undone or any(served.is_broken for served in self.collections.values()):
                raise  # nobody would be told, or something is half done
            answer(error)

    def _answer(self, reply: Reply, question: Values, tensors: Sequence[Tensor]) -> None:
        try:
            answer = getattr(self, f"_ask_{question['op']}")({**question, "tensors": tensors})
        except Exception as error:
            answer = {"error": encode_error(error)}
        rows = answer.pop("rows", [])
        reply(({**answer, "ask": question["ask"]}, rows))

    # The state.

    def save(self) -> None:
        """Save the state; the log begins anew. StorageError if it cannot be written; what was saved before stays."""
        self._save_due = True
        if self._folder is None or self._restoring:
            return
        try:
            self._write_state(self._folder, self._version + 1)
        except BaseException:
            for served in self.collections.values():
                served.chains.pop(OWN, None)  # nothing follows a snapshot that is in no state
            self._files = []
            raise
        self._save_due = False

    def _write_state(self, folder: Path, version: int) -> None:
        changes_only = len(self._files) < MOST_FILES * len(self.collections)
        with storage_errors(f"embedding server {self.name} could not save its state in {folder}", "check the disk"):
            clients, written = f"clients-{version}", self._files
            with (folder / clients).open("wb") as file:
                for name, client in self._clients.items():
                    write_record(file, ({"client": name, "expected": client.expected}, []))
                    for kind, messages in (("answered", client.answers), ("undone", client.undone)):
                        for number, (values, tensors) in messages.items():
                            write_record(file, ({"client": name, kind: number, "values": values}, tensors))
            sync(folder / clients)
            for name, served in self.collections.items():
                rows = f"{name}-{version}.rows"
                follows = write_snapshot(folder / rows, take_snapshot(served, OWN, changes_only))["after"] is not None
                written = [*(each for each in written if follows or each.rpartition("-")[0] != name), rows]
            log = MessageLog(folder / f"log-{version}", self.log == "fsync") if self.log in ("disk", "fsync") else None
            with on_error(log.close if log is not None else lambda: None):
                state = {"version": version, "clients": clients, "files": written}
                atomic_write(folder / STATE, seal(json.dumps(state)))
                sync(folder)
        if self._log is not None:
            self._log.close()
        self._log, self._log_bytes, self._version, self._files = log, 0, version, written
        self._most_log_bytes = LOG_BYTES
        for client in self._clients.values():
            client.saved = client.expected
        for path in folder.iterdir():
            if _OWN_FILE.fullmatch(path.name) and path.name not in (clients, f"log-{version}", *written):
                path.unlink()

    def _restore(self, folder: Path) -> None:
        self._restoring = True
        if (folder / STATE).exists():
            state = json.loads(read_sealed(folder / STATE))
            self._version, self._files = state["version"], state["files"]
            found: dict[str, list[Path]] = {}
            for file in self._files:
                found.setdefault(file.rpartition("-")[0], []).append(folder / file)
            for name, chain in found.items():
                part = SavedShard.of(chain)
                served = self.collections[name] = self._make(name, part.spec, part.header["server"])
                restore(served, [part], numbers=True)
                served.begin_chain(OWN, part.header["snapshot"])
            for values, tensors in read_records(folder / state["clients"]):
                client = self._clients.setdefault(values["client"], ClientSession())
                if "expected" in values:
                    client.expected = client.saved = values["expected"]
                elif "answered" in values:
                    client.answers[values["answered"]] = values["values"], tensors
                else:
                    client.undone[values["undone"]] = values["values"], tensors
            for client in self._clients.values():
                client.waiting = dict.fromkeys(client.undone, _nobody)
                for message in list(client.undone.values()):
                    self._do(client, message)
        if self.log in ("disk", "fsync"):
            path = folder / f"log-{self._version}"
            if path.exists():
                self._take([(message, _nobody) for message in read_log(path)])
                for client in self._clients.values():
                    client.saved = client.expected
            self._log = MessageLog(path, self.log == "fsync")
            self._save_due |= path.stat().st_size > 0  # or what follows would stand behind a torn record
        self._restoring = False
        if self._save_due:
            self.save()

    # Questions.

    def _ask_hello(self, question: Values) -> Values:
        client = self._clients.get(question["client"], ClientSession())
        if client.failure is not None:
            raise client.failure
        return {"expected": client.expected}

    def _ask_bye(self, question: Values) -> Values:
        self._clients.pop(question["client"], None)
        self._heard.pop(question["client"], None)
        return {}

    def _ask_register(self, question: Values) -> Values:
        """A client becomes a trainer, in the place of one that is gone; or `refused` says that one is not gone."""
        trainer, client, now = _trainer_of(question), question["client"], time.monotonic()
        self._heard = {name: at for name, at in list(self._heard.items()) if now - at < TRAINER_SECONDS}
        if (before := self._trainers.setdefault(trainer, client)) != client:
            if before in self._heard:
                reason = (
                    f"embedding server {self.name} has heard of another {trainer} in the last {TRAINER_SECONDS:.0f} "
                    "seconds; end that run first, or start other servers for this one"
                )
                return {"refused": reason}
            self._clients[before] = ClientSession(PermissionError(f"another {trainer} has taken the place of this one"))
            self._trainers[trainer] = client
        return {"refused": None}

    def _ask_spec(self, question: Values) -> Values:
        """The collection, and this server's number among its servers; neither if it is not here."""
        served = self.collections.get(question["collection"])
        return {} if served is None else {"spec": asdict(served.spec), "server": served.server}

    def _ask_look_up(self, question: Values) -> Values:
        """Rows as they are now, for a client that does not train."""
        served = self.collections[question["collection"]]
        (ids,) = served.columns(question["sizes"], question["tensors"])
        return {"steps": served.next_push, "rows": served.read(ids)}

    def _ask_stats(self, question: Values) -> Values:
        return {"stats": self.statistics()}

    def statistics(self) -> Values:
        """By collection and table: rows, bytes, evictions; pulls and pushes that wait; staleness. And of the server:
        seconds since it was started, the length of its queue, its state's version, and bytes of the log since then."""
        found: Values = {
            "seconds": time.monotonic() - self._began, "queue": self._queue.qsize(), "version": self._version,
            "log_bytes": self._log_bytes, "collections": {},
        }  # fmt: skip
        for name, served in self.collections.items():
            found["collections"][name] = {
                "tables": {table.config.name: vars(table.statistics()) for table in served.dynamic},
                "pulls": served.next_pull, "steps": served.next_push,
                "waiting_pulls": sum(len(batch.ids) for batch in served.pulls.values()),
                "waiting_pushes": sum(len(batch.ids) for batch in served.pushes.values()),
                "staleness": {str(steps): count for steps, count in sorted(served.staleness.items())},
            }  # fmt: skip
        return found

    # What clients have done, in their order.

    def _do_create(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        spec, name = CollectionSpec.from_json(values["spec"]), values["collection"]
        counts, is_of_file = (spec.trainers, spec.batches, 1 + (spec.staleness or 0)), self._folder is not None
        if min(counts) < 1 or (is_of_file and Path(name).name != name):
            raise ValueError(f"there cannot be a collection {name!r} with {spec.trainers} trainers")
        if (there := self.collections.get(name)) is None:
            self.collections[name] = self._make(name, spec, values["server"])
        elif there.spec != spec:
            raise ValueError(
                f"embedding server {self.name} has a collection {name!r} with other tables, trainers or staleness; "
                "attach it with the same, or start other servers"
            )
        elif there.server != values["server"]:
            raise ValueError(
                f"embedding server {self.name} is number {there.server} of those of {name!r}, and now it is number "
                f"{values['server']}; give the addresses in the order in which they were given first"
            )
        served = self.collections[name]
        answer(({"pulls": served.next_pull, "complete": served.is_complete()}, []))
        if there is None:
            self.save()

    def _make(self, name: str, spec: CollectionSpec, server: int) -> ServedTables:
        needed, cache = spec.num_bytes(server), None
        free = needed if self._memory is None else self._memory - sum(self._taken.values())
        if needed > free:
            if self._over_memory == "refuse" or free < needed / 1_000:
                raise ValueError(
                    f"embedding server {self.name} has {free:,.0f} bytes for tables left, and those of {name!r} need "
                    f'{needed:,} when they are full: give it more memory or over_memory="spill", start more servers, '
                    "or make the tables smaller"
                )
            folder = None if self._folder is None else self._folder / "rows"
            cache = CacheConfig(share=free / needed, folder=folder)
        made, self._row_codecs[name] = ServedTables(spec, server, cache), RowCodecs(spec)
        self._taken[name] = min(needed, free)
        return made

    def _do_pull(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        served, rank, batch = *self._of_trainer(values), index(values["batch"])
        ids, occurrences, *more = served.columns(values["sizes"], tensors)
        (versions,) = more or (None,)
        if (served.spec.exact and batch < served.next_pull) or any((each < 1).any() for each in occurrences):
            raise ValueError(f"batch {batch} was pulled before, or has an id that does not occur")
        send = _rows(answer, self._row_codecs[values["collection"]], served, int(versions is not None))
        served.pull(rank, batch, ids, occurrences, send, versions)

    def _do_look_up(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        served, _ = self._of_trainer(values)
        (ids,) = served.columns(values["sizes"], tensors)
        served.look_up(index(values["after"]), ids, _rows(answer))

    def _do_push(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        served, rank, batch = *self._of_trainer(values), index(values["batch"])
        lr, ids, sums = float(values["lr"]), list[Tensor](), list[Tensor]()
        if values["sizes"] is not None:
            (ids,) = served.columns(values["sizes"], tensors[:1])
            codecs, scale = self._row_codecs[values["collection"]], float(values["scale"])
            sums = codecs.gradients.unpack(served.numbers, tensors[1:], scale)
            shapes = [(len(own), table.config.embedding_dim) for own, table in zip(ids, served.dynamic, strict=True)]
            if [(each.dtype, *each.shape) for each in sums] != [(torch.float32, *shape) for shape in shapes]:
                raise ValueError(f"gradients must be float32 {shapes}")
        answer(({}, []))  # it has been logged, and is among the pushes of the state from here on
        served.push(rank, batch, ids, sums, lr)

    def _of_trainer(self, values: Values) -> tuple[ServedTables, int]:
        """The collection that a trainer's message is for, and the trainer's rank."""
        served, rank = self.collections[values["collection"]], index(values["rank"])
        if not 0 <= rank < served.spec.trainers:
            raise ValueError(f"rank {rank} of {served.spec.trainers}")
        return served, rank

    def _do_facts(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        """What a trainer that holds rows must know of the tables, by number."""
        served = self.collections[values["collection"]]
        tables = [[n, table.seed, table.clock] for n, table in zip(served.numbers, served.dynamic, strict=True)]
        updates = 0 if served.tables is None else int(served.tables.counters["step"])
        answer(({"tables": tables, "updates": updates}, []))

    def _do_hold(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        self.collections[values["collection"]].held = True
        answer(({}, []))

    def _do_assign(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        served, _ = self._of_trainer(values)
        ids, occurrences = served.columns(values["sizes"], tensors, of_ids=True)
        if values["training"]:
            rows, new = served.assign(ids, occurrences)
        else:
            rows, new = served.find(ids), [torch.zeros_like(of_table, dtype=torch.bool) for of_table in ids]
        answer(({}, [torch.cat([tensors[0][:0], *rows]), torch.cat([tensors[0][:0].bool(), *new])]))

    def _do_move(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        served, (ids, *records) = self.collections[values["collection"]], tensors
        parts = ids.split([size for _, size in values["sizes"]])
        keys = [(number, part) for (number, _), part in zip(values["sizes"], parts, strict=True)]
        served.check_records(keys, records)
        if records:
            served.write_records(dict(keys[: len(records)]), records)
        answer(({}, served.read_records(dict(keys[len(records) :]))))

    def _do_flush(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        (served, rank), steps, returned = self._of_trainer(values), index(values["steps"]), values.get("returned")
        if returned is not None:
            served.returned(index(returned["steps"]), float(returned["lr"]))
        served.flush(rank, steps, lambda error: answer(({}, []) if error is None else error))

    def _do_read(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        found = self._table(values).get_state()
        answer(({"names": list(found)}, [value.contiguous() for value in found.values()]))

    def _do_load(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        served, saved = self.collections[values["collection"]], dict(zip(values["names"], tensors, strict=True))
        mine = served.spec.in_part(served.spec.number(values["table"]), saved["ids"])
        if not mine.all():
            saved |= {n: each[mine] for n, each in saved.items() if each.dim() and len(each) == len(mine)}
        self._table(values).load_state(saved)
        served.versions = None
        answer(({}, []))

    def _do_snapshot(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        """Write a file of these tables when all trainers have come to a step, for a checkpoint or for followers."""
        served, steps = self.collections[values["collection"]], index(values["steps"])

        def write(error: Exception | None) -> None:
            try:
                if error is not None:
                    raise error
                if served.held:
                    raise ValueError("a trainer has rows of these tables; all trainers flush them first")
                records = take_snapshot(served, values["chain"], values["changes_only"])
                answer((write_snapshot(Path(values["path"]), records), []))
            except Exception as failure:
                answer(failure)

        served.when_trained(steps, write)

    def _do_restore(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        """Become what the files of all servers at a step say: of each server, a chain."""
        served = self.collections[values["collection"]]
        parts = saved_shards(served, [[*map(Path, chain)] for chain in values["chains"]])
        for part in parts:
            part.check()
        served.is_broken = True
        restore(served, parts)
        served.advance()
        answer(({}, []))
        self.save()

    def _do_save(self, values: Values, tensors: Sequence[Tensor], answer: Any) -> None:
        self.save()
        answer(({}, []))

    def _table(self, values: Values) -> Any:
        served = self.collections[values["collection"]]
        return served.dynamic[[table.config.name for table in served.dynamic].index(values["table"])]


def write_snapshot(path: Path, records: Iterable[Message]) -> Values:
    """Write a file of records, which is on the disk then; its snapshot's name, and which one it follows.

    StorageError if it cannot be written; nothing is left of it.
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


def _trainer_of(values: Values) -> str:
    return f"trainer of rank {values.get('rank')} of {values.get('collection')!r}"


def _rows(answer: Any, codecs: RowCodecs | None = None, served: ServedTables | None = None, first: int = 0) -> Any:
    """Sends rows, which begin with tensor `first`; where others come first, a trainer with a cache is told the number
    of steps that have been applied to them."""

    def send(found: Sequence[Tensor] | Exception) -> None:
        if isinstance(found, Exception):
            answer(found)
            return
        tensors, steps = [each.contiguous() for each in found], {}
        if codecs is not None and served is not None:
            rows = slice(first, first + len(served.numbers))
            tensors[rows] = codecs.rows.pack(served.numbers, tensors[rows])
            steps = {"steps": served.next_push} if first else {}
        answer((steps, tensors))

    return send


def _nobody(message: Message) -> None:
    """Of a server that was started again: the client asks again."""
