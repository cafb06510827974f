"""Requests to a collection's tables: one handler per operation.

A handler gets the tables, the values and tensors of the message, and `respond`, which it calls once, now or later, with
the reply or the error.
"""

from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path

import torch
from torch import Tensor

from tritonemb.server.codec import PulledTable
from tritonemb.server.snapshot import restore, saved_shards, take_snapshot, write_snapshot
from tritonemb.server.tables import PullRequest, PushRequest, ServedTables
from tritonemb.server.transport import Message, Values

Respond = Callable[[Message | Exception], None]
Handler = Callable[[ServedTables, Values, Sequence[Tensor], Respond], None]


def _pull(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    rank = _rank(served, values)
    ids, occurrences, *optional = served.partitions.split(values["sizes"], tensors)
    (versions,) = optional or (None,)
    if any((counts < 1).any() for counts in occurrences):
        raise ValueError("an id has no occurrences")

    def send(result: list[PulledTable] | Exception) -> None:
        if isinstance(result, Exception):
            respond(result)
        else:
            respond(served.codecs.rows.pack_reply(served.partitions.numbers, result, served.ordering.next_push))

    served.pull(rank, index(values["batch"]), PullRequest(ids, occurrences, versions, send))


def _push(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    rank, batch, lr = _rank(served, values), index(values["batch"]), float(values["lr"])
    ids, sums, numbers = list[Tensor](), list[Tensor](), served.partitions.numbers
    if values["sizes"] is not None:
        (ids,) = served.partitions.split(values["sizes"], tensors[:1])
        sums = served.codecs.gradients.unpack(numbers, tensors[1:], float(values["scale"]))
        dims = [served.spec.tables[number].embedding_dim for number in numbers]
        shapes = [(len(table_ids), dim) for table_ids, dim in zip(ids, dims, strict=True)]
        if [(gradient.dtype, *gradient.shape) for gradient in sums] != [(torch.float32, *shape) for shape in shapes]:
            raise ValueError(f"gradients must be float32 {shapes}")
    respond(({}, []))  # the push is in the log, and will be in each later snapshot
    served.push(rank, batch, PushRequest(ids, sums, lr))


def _look_up(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    """Read rows for evaluation, when the pushes of `after` steps less the staleness have been applied."""
    _rank(served, values)
    (ids,), staleness = served.partitions.split(values["sizes"], tensors), served.spec.staleness
    min_steps = 0 if staleness is None else index(values["after"]) - staleness
    served.when_applied(min_steps, lambda error: respond(error or read_now(served, ids)))


def read_now(served: ServedTables, ids: list[Tensor]) -> Message:
    """Read rows in their present state."""
    tables = [PulledTable(rows) for rows in served.partitions.read(ids)]
    return served.codecs.exact_rows.pack_reply(served.partitions.numbers, tables, served.ordering.next_push)


def _describe(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    """Send a trainer that leases rows the number, seed and clock of each table, and the number of updates."""
    tables = [[number, table.seed, table.clock] for number, table in served.partitions.by_number.items()]
    table_set = served.partitions.tables
    respond(({"tables": tables, "updates": 0 if table_set is None else int(table_set.counters["step"])}, []))


def _lease(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    served.lease.is_active = True
    respond(({}, []))


def _allocate(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    _rank(served, values)
    ids, occurrences = served.partitions.split(values["sizes"], tensors, served.lease.dynamic_numbers)
    if values["training"]:
        rows, new_masks = served.lease.allocate(ids, occurrences)
    else:
        rows, new_masks = served.lease.find(ids), [torch.zeros_like(table_ids, dtype=torch.bool) for table_ids in ids]
    respond(({}, [torch.cat([tensors[0][:0], *rows]), torch.cat([tensors[0][:0].bool(), *new_masks])]))


def _transfer(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    """Write the records of the first tables, then read those of the others."""
    ids, *records = tensors
    ids_by_table = ids.split([size for _, size in values["sizes"]])
    keys = [(number, table_ids) for (number, _), table_ids in zip(values["sizes"], ids_by_table, strict=True)]
    served.lease.check(keys, records)
    if records:
        served.lease.write(dict(keys[: len(records)]), records)
    respond(({}, served.lease.read(dict(keys[len(records) :]))))


def _flush(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    rank, steps = _rank(served, values), index(values["steps"])
    if (returned := values.get("returned")) is not None:
        served.end_lease(index(returned["steps"]), float(returned["lr"]))
    served.flush(rank, steps, lambda error: respond(error or ({}, [])))


def _read(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    state = served.partitions.table(values["table"]).get_state()
    respond(({"names": list(state)}, [value.contiguous() for value in state.values()]))


def _load(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    state = dict(zip(values["names"], tensors, strict=True))
    mask = served.spec.in_shard(served.spec.number(values["table"]), state["ids"])
    if not mask.all():
        state |= {name: value[mask] for name, value in state.items() if value.dim() and len(value) == len(mask)}
    served.partitions.table(values["table"]).load_state(state)
    served.partitions.changes.versions = None
    respond(({}, []))


def _snapshot(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    """Write a snapshot of a collection when all trainers have reached a step, for a checkpoint or for followers."""

    def write(error: Exception | None) -> None:
        try:
            if error is not None:
                raise error
            if served.lease.is_active:
                raise ValueError("a trainer has leased rows of these tables; all trainers flush them first")
            records = take_snapshot(served, values["chain"], values["changes_only"])
            respond((write_snapshot(Path(values["path"]), records), []))
        except Exception as failure:
            respond(failure)

    served.when_trained(index(values["steps"]), write)


def _restore(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    """Restore a collection from the snapshots of all servers at one step: a chain of files per server."""
    shards = saved_shards(served, [[*map(Path, chain)] for chain in values["chains"]])
    for shard in shards:
        shard.check()
    served.is_broken = True
    restore(served, shards)
    served.advance()
    respond(({}, []))


def _rank(served: ServedTables, values: Values) -> int:
    """Rank of the trainer; ValueError if there is none."""
    if not 0 <= (rank := index(values["rank"])) < served.spec.trainers:
        raise ValueError(f"rank {rank} of {served.spec.trainers}")
    return rank


HANDLERS: dict[str, Handler] = {
    "pull": _pull, "push": _push, "look_up": _look_up, "flush": _flush,
    "describe": _describe, "lease": _lease, "allocate": _allocate, "transfer": _transfer,
    "read": _read, "load": _load, "snapshot": _snapshot, "restore": _restore,
}  # fmt: skip
TRAINER_OPERATIONS = {"pull", "push", "look_up", "flush", "lease", "allocate", "transfer"}  # of the registered client
