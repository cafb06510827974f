"""Requests and queries to a collection's tables: one handler per operation.

A handler gets the tables, the values and tensors of the message, and `respond`, which it calls once, now or later, with
the reply or the error; or it returns the reply.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import index
from pathlib import Path

import torch
from torch import Tensor

from tritonemb.server.snapshot import read_snapshot, restore, saved_shards, take_snapshot, write_snapshot
from tritonemb.server.tables import PulledTable, PullRequest, PushRequest, Respond, ServedTables
from tritonemb.server.transport import Message, Values

Handler = Callable[[ServedTables, Values, Sequence[Tensor], Respond], Message | None]


def _pull(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    ids, occurrences, *optional = served.partitions.split(values["sizes"], tensors)
    (versions,) = optional or (None,)
    if any((counts < 1).any() for counts in occurrences):
        raise ValueError("an id has no occurrences")
    pull = PullRequest(ids, occurrences, versions, respond)
    served.ordering.pull(_rank(served, values), index(values["batch"]), pull)
    if versions is not None:
        served.partitions.changes.track_versions()
    served.advance()


def _push(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    rank, batch, lr = _rank(served, values), index(values["batch"]), float(values["lr"])
    numbers, tables = served.partitions.numbers, {}
    if values["sizes"] is not None:
        (ids,) = served.partitions.split(values["sizes"], tensors[:1])
        sums = served.codecs.gradients.unpack(numbers, tensors[1:], float(values["scale"]))
        dims = (served.spec.tables[number].embedding_dim for number in numbers)
        expected = [(torch.float32, len(table_ids), dim) for table_ids, dim in zip(ids, dims, strict=True)]
        if [(gradient.dtype, *gradient.shape) for gradient in sums] != expected:
            raise ValueError(f"gradients must be {expected}")
        tables = dict(zip(numbers, zip(ids, sums, strict=True), strict=True))
    respond(({}, []))  # the push is in the log, and will be in each later snapshot
    served.ordering.push(rank, batch, PushRequest(tables, lr))
    served.advance()


def _look_up(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    """Read rows for evaluation, when the pushes of `after` steps less the staleness have been applied."""
    (ids,), staleness = served.partitions.split(values["sizes"], tensors), served.spec.staleness
    min_steps = 0 if staleness is None else index(values["after"]) - staleness
    served.respond_when(lambda: served.ordering.next_push >= min_steps, respond, partial(read_now, served, ids))


def read_now(served: ServedTables, ids: list[Tensor]) -> Message:
    tables = [PulledTable(rows) for rows in served.partitions.read(ids)]
    return served.codecs.exact_rows.pack_reply(served.partitions.numbers, tables, served.ordering.next_push)


def _describe(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> Message:
    """Return the number, seed and clock of each table, and the number of updates, for a trainer that leases rows."""
    tables = [[number, table.seed, table.clock] for number, table in served.partitions.by_number.items()]
    table_set = served.partitions.tables
    return {"tables": tables, "updates": 0 if table_set is None else int(table_set.counters["step"])}, []


def _lease(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> Message:
    served.lease.is_active = True
    return {}, []


def _allocate(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> Message:
    ids, occurrences = served.partitions.split(values["sizes"], tensors, served.lease.dynamic_numbers)
    rows, new_masks = served.lease.allocate(ids, occurrences, values["training"])
    return {}, [torch.cat([tensors[0][:0], *rows]), torch.cat([tensors[0][:0].bool(), *new_masks])]


def _transfer(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> Message:
    """Write the records of the first tables, then read those of the others."""
    ids, *records = tensors
    numbers, sizes = zip(*values["sizes"], strict=True)
    keys = list(zip(numbers, ids.split(sizes), strict=True))
    served.lease.check(keys, records)
    if records:
        served.lease.write(dict(keys[: len(records)]), records)
    return {}, served.lease.read(dict(keys[len(records) :]))


def _flush(served: ServedTables, values: Values, tensors: Sequence[Tensor], respond: Respond) -> None:
    """Apply the pushes of `steps` steps before the trainer's next pull, once all trainers have requested it."""
    rank, steps = _rank(served, values), index(values["steps"])
    if (returned := values.get("returned")) is not None:  # the trainer has written back all rows that it has leased
        trained_steps, lr = index(returned["steps"]), float(returned["lr"])
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
    mask = served.partitions.in_shard(number, state["ids"])
    if not mask.all():
        state |= {name: value[mask] for name, value in state.items() if value.dim() and len(value) == len(mask)}
    served.partitions.by_number[number].load_state(state)
    served.partitions.changes.versions = None
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
        raise ValueError(f"rank {rank} of {served.spec.trainers}")
    return rank


HANDLERS: dict[str, Handler] = {
    "pull": _pull, "push": _push, "look_up": _look_up, "flush": _flush,
    "describe": _describe, "lease": _lease, "allocate": _allocate, "transfer": _transfer,
    "read": _read, "load": _load, "snapshot": _snapshot, "restore": _restore,
}  # fmt: skip
TRAINER_OPERATIONS = {"pull", "push", "look_up", "flush", "lease", "allocate", "transfer"}  # of the registered client
