"""Moves of tablets from one embedding server to another, while trainers use them.

A *tablet* has a range of the partitions of all tables of a collection, and is served as a collection of its own. Its
move: 1. the source suspends its requests and sends it (`_fetch`); 2. the target saves a copy (`_stage`); 3. the source
saves that it has left (`_commit`), which changes the owner; 4. the copy becomes the tablet (`find_tablet`).
"""

# Invariants: The source owns the tablet until the manifest of 3 is durable, the target from then on. The copy has all
# requests that the source has executed, as it executes none between 1 and 3: if the coordinator is silent for
# `MAX_SUSPENSION`, or the source is restarted, suspended requests are executed, and `_commit` is refused. Only the
# manifest of 3 gives the ticket, which is the copy's name, to others; so the copy of an attempt that was undone is not
# activated; nor is a copy activated twice, as it loses its name. A server executes the requests with the ticket of the
# last move to it, and answers others with the route, also if the tablet has come back; so a client, which sends those
# again, keeps their order. Queries can be repeated, lost and late.

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tritonemb.server.connection import Connection
from tritonemb.server.durable import CHAIN
from tritonemb.server.inbox import Inbox
from tritonemb.server.snapshot import SavedShard, restore, take_snapshot, write_record
from tritonemb.server.transport import Message, Transport, Values
from tritonemb.utils import on_error

EmbeddingServer = Any  # of `node.py`, which imports this module
MAX_SUSPENSION = 10.0  # seconds that requests wait for a coordinator; trainers wait as long for one that was killed
TIMEOUT = 60.0  # seconds of a query; a server may be executing a long request, or be restarted
COPY = "~"  # separates a tablet from the ticket, in the name of a copy


@dataclass
class Departure:
    """Tablet that is being copied to another server."""

    ticket: str
    records: Iterator[Message]
    number: int = -1  # of the last record
    record: Message = field(default_factory=lambda: ({}, []))
    deadline: float = 0.0
    requests: list[tuple[Inbox, Message]] = field(default_factory=list)  # that wait


def find_tablet(server: EmbeddingServer, values: Values) -> Values | None:
    """Return the route of a message's tablet if the message has another ticket; activate the copy with its ticket."""
    if "ticket" not in values:
        return None
    key, copy = values["collection"], _copy_name(values)
    if copy in server.collections and key not in server.collections:
        served = server.collections[key] = server.collections.pop(copy)
        served.partitions.changes.chains.pop(CHAIN, None)  # its files have the name of the copy
        server.quota.reserved_bytes[key] = server.quota.reserved_bytes.pop(copy)
        server.routes[key] = {"address": None, "ticket": values["ticket"]}
        server.save()
    if (route := server.routes.get(key)) is None or key not in server.collections:
        return route
    return None if route["ticket"] == values["ticket"] else {**route, "address": server.name}


def _copy_name(values: Values) -> str:
    return f"{values['collection']}{COPY}{values['ticket']}"


def release_late(server: EmbeddingServer) -> None:
    # Undo the moves of coordinators that have been silent.
    for key, departure in list(server.departures.items()):
        if time.monotonic() > departure.deadline:
            _release(server, {"collection": key, "ticket": departure.ticket}, [])


def _tablets(server: EmbeddingServer, query: Values, tensors: Sequence[Tensor]) -> Message:
    names = [name for name in server.collections if COPY not in name]
    return {"address": server.name, "owned": names, "moved": server.routes}, []


def _fetch(server: EmbeddingServer, query: Values, tensors: Sequence[Tensor]) -> Message:
    # Suspend the requests to the tablet, and return a record of its snapshot.
    key, number = query["collection"], query["record"]
    if server.log == "memory":  # after a restart, clients may have answered requests that the tablet lacks
        raise ValueError(f'tablets cannot leave embedding server {server.name}, which has log="memory"; use "disk"')
    if key in server.collections and key not in server.departures and number == 0:
        server.departures[key] = Departure(query["ticket"], take_snapshot(server.collections[key], "move"))
    departure = _departure(server, query)
    if number == departure.number + 1:  # not repeated
        departure.number, departure.record = number, next(departure.records)
    departure.deadline = time.monotonic() + (TIMEOUT if "end" in departure.record[0] else MAX_SUSPENSION)
    return {"values": departure.record[0]}, departure.record[1]


def _departure(server: EmbeddingServer, query: Values, is_complete: bool = False) -> Departure:
    key, departure = query["collection"], server.departures.get(query["collection"])
    if departure is None or departure.ticket != query["ticket"] or (is_complete and "end" not in departure.record[0]):
        raise ValueError(f"{server.name} does not have tablet {key!r}, or moves it already, or has undone this move")
    return departure


def _stage(server: EmbeddingServer, query: Values, tensors: Sequence[Tensor]) -> Message:
    # Write a record to its offset in a file; load and save the copy after the last one.
    name, offset = _copy_name(query), query["offset"]
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a tablet")
    if name in server.collections or query["collection"] in server.collections:  # a repeated message
        return {"offset": offset}, []
    path = server.staging / f"{name}.tablet"
    path.touch()
    with path.open("r+b") as file:
        file.seek(offset)
        offset += write_record(file, (query["values"], list(tensors)))
    if "end" in query["values"]:
        shard = SavedShard.from_chain([path])
        served = server.add_tables(name, shard.spec, shard.header["server"])
        with on_error(lambda: server.remove_tables(name)):
            restore(served, [shard], keep_row_numbers=True)
            server.save()
        path.unlink()
    return {"offset": offset}, []


def _commit(server: EmbeddingServer, query: Values, tensors: Sequence[Tensor]) -> Message:
    key, route = query["collection"], {name: query[name] for name in ("address", "ticket")}
    if server.routes.get(key) == route:  # a repeated message
        return {}, []
    _departure(server, query, is_complete=True)
    server.remove_tables(key)
    server.routes[key] = route
    # After an error the manifest may be durable: only a restart tells.
    with on_error(lambda: server.fail(RuntimeError(f"the move of {key} could not be saved"))):
        server.save()
    del server.departures[key]
    # Answer all requests that wait, for the move or in the order of events.
    for inbox in server.clients.inboxes.values():
        for message, _ in list(inbox.in_progress.values()):
            if message[0].get("collection") == key:
                server.execute(inbox, message)
    return {}, []


def _release(server: EmbeddingServer, query: Values, tensors: Sequence[Tensor]) -> Message:
    # Undo a move that was not committed, on the source or the target; return whether the source has committed it.
    key, ticket, name = query["collection"], query["ticket"], _copy_name(query)
    if key in server.departures and server.departures[key].ticket == ticket:
        for inbox, message in server.departures.pop(key).requests:
            server.execute(inbox, message)
    if name in server.collections:
        server.remove_tables(name)
        server.save()
    return {"is_committed": server.routes.get(key, {}).get("ticket") == ticket}, []


MIGRATION_QUERIES = {"tablets": _tablets, "fetch_tablet": _fetch, "stage_tablet": _stage, "commit_move": _commit}
MIGRATION_QUERIES["release_tablet"] = _release


def move_tablet(source: Connection, target: Connection, key: str) -> None:
    """Move a tablet; ValueError if that was undone, ConnectionError if a server does not answer."""
    common, values, number, offset = {"collection": key, "ticket": uuid.uuid4().hex}, Values(), 0, 0
    try:
        while "end" not in values:
            reply, tensors = source.query_tensors("fetch_tablet", {**common, "record": number}, [], TIMEOUT)
            values, number = reply["values"], number + 1
            record = {**common, "offset": offset, "values": values}
            offset = target.query_tensors("stage_tablet", record, tensors, TIMEOUT)[0]["offset"]
        source.query("commit_move", TIMEOUT, address=target.query("tablets", TIMEOUT)["address"], **common)
    except Exception:
        if not source.query("release_tablet", TIMEOUT, **common)["is_committed"]:
            target.query("release_tablet", TIMEOUT, **common)
            raise
    target.query("spec", TIMEOUT, **common)


def rebalance(transports: Sequence[Transport], leaving: Sequence[str] = ()) -> int:
    """Distribute the tablets of each collection evenly, none to addresses `leaving`; return the number of moves."""
    with ExitStack() as stack:
        servers = [stack.enter_context(Connection(transport)) for transport in transports]
        is_leaving, num_moves = [transport.address in leaving for transport in transports], 0
        while True:
            replies = [server.query("tablets", TIMEOUT) for server in servers]
            by_address = {reply["address"]: server for reply, server in zip(replies, servers, strict=True)}
            if len(by_address) < len(servers) or any("//0.0.0.0:" in address for address in by_address):
                raise ValueError(f"trainers cannot reach servers at {list(by_address)}; start each with --advertise")
            # Complete a move whose coordinator was lost.
            for key, route in [item for reply in replies for item in reply["moved"].items()]:
                if (owner := by_address.get(route["address"])) is not None:
                    owner.query("spec", TIMEOUT, collection=key, ticket=route["ticket"])
            owned = [server.query("tablets", TIMEOUT)["owned"] for server in servers]
            if (move := next_move(owned, is_leaving)) is None:
                return num_moves
            move_tablet(servers[move[0]], servers[move[1]], move[2])
            num_moves += 1


def next_move(owned: Sequence[Sequence[str]], is_leaving: Sequence[bool]) -> tuple[int, int, str] | None:
    """Choose source, target and tablet, given those that servers have; None if each collection is even."""
    staying = [server for server, leaves in enumerate(is_leaving) if not leaves]
    for name in dict.fromkeys(key.partition("#")[0] for keys in owned for key in keys):
        tablets = [[key for key in keys if key.startswith(f"{name}#")] for keys in owned]
        counts = list(map(len, tablets))
        target, source = min(staying, key=counts.__getitem__), max(staying, key=counts.__getitem__)
        source = next((n for n, leaves in enumerate(is_leaving) if leaves and counts[n]), source)
        if is_leaving[source] or counts[source] - counts[target] > 1:
            return source, target, tablets[source][-1]
    return None
