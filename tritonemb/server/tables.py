"""Tables of a collection on one embedding server: pulls and pushes, executed as `ordering.py` says.

The gradients of a row are summed in the order of trainers, and the optimizer is applied to it once per step.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonemb.optimizers import SGD
from tritonemb.server.codec import PulledTable, RowCodecs
from tritonemb.server.lease import Lease
from tritonemb.server.ordering import ApplyPushes, Ordering
from tritonemb.server.partitions import NO_ROWS, Partitions, cat
from tritonemb.server.spec import CollectionSpec, TableSpec, describe_optimizer
from tritonemb.server.transport import Message, Values
from tritonemb.types import CacheConfig, TableConfig

Respond = Callable[[Message | Exception], None]


@dataclass(frozen=True)
class PullRequest:
    """Pull of a trainer's batch; per table int64 `[n]`."""

    ids: list[Tensor]  # distinct
    occurrences: list[Tensor]  # of the ids in the batch
    versions: list[Tensor] | None  # of rows in the trainer's cache, if it has one
    respond: Respond  # called with the reply, or with the error of the batch


@dataclass(frozen=True)
class PushRequest:
    """Gradients of a trainer's batch."""

    tables: dict[int, tuple[Tensor, Tensor]]  # by number, ids and sums `[n, embedding_dim]`; none: it was not trained
    lr: float


class ServedTables:
    """Partitions of a collection's tables on one server, used by one thread; on disk if there is a `cache`."""

    def __init__(self, spec: CollectionSpec, server: int, cache: CacheConfig | None = None) -> None:
        self.spec, self.server = spec, server
        self.partitions = Partitions(spec, server, cache)
        self.lease = Lease(self.partitions)
        self.codecs = RowCodecs(spec)
        self.ordering = Ordering[PullRequest, PushRequest](spec.trainers, spec.staleness, spec.exact, spec.batches)
        self._deferred: list[tuple[Callable[[], bool], Respond, Callable[[], Message]]] = []
        self.is_broken = False  # whether an operation was interrupted, so that the tables may be inconsistent

    def pull(self, rank: int, batch: int, pull: PullRequest) -> None:
        """Read rows of a trainer's batch in the order of events; ValueError if it was pulled before."""
        self.ordering.pull(rank, batch, pull)
        if pull.versions is not None:
            self.partitions.changes.track_versions()
        self.advance()

    def push(self, rank: int, batch: int, push: PushRequest) -> None:
        self.ordering.push(rank, batch, push)
        self.advance()

    def end_lease(self, steps: int, lr: float) -> None:
        """End the trainer's lease: it has written back all rows, after `steps` steps."""
        self.lease.is_active = False
        if (table_set := self.partitions.tables) is not None:
            table_set.counters["step"].fill_(steps)
            table_set.set_learning_rate(lr)
        self.ordering.next_pull, self.ordering.next_push = steps * self.spec.batches, steps

    def is_complete(self) -> bool:
        """Return whether all pulled batches have been pushed, all leases have ended, and no pull is pending."""
        return not self.lease.is_active and self.ordering.is_complete()

    def respond_when(
        self, condition: Callable[[], bool], respond: Respond, reply: Callable[[], Message] = lambda: ({}, [])
    ) -> None:
        """Respond with `reply()`, or its error, when a condition on the order of events holds."""
        self._deferred.append((condition, respond, reply))
        self.advance()

    def advance(self) -> None:
        """Apply pushes, read pulls, then respond to deferred requests, as far as the order of events allows."""
        self.is_broken = True
        while (due := self.ordering.next_due()) is not None:
            if isinstance(due, ApplyPushes):
                self._apply(due.pushes)
            else:
                self._read(due.pulls)
        self.is_broken = False
        due_replies = [item for item in self._deferred if item[0]()]
        self._deferred = [item for item in self._deferred if item not in due_replies]
        for _, respond, reply in due_replies:
            try:
                respond(reply())
            except Exception as error:
                respond(error)

    def reset(self, next_pull: int, next_push: int) -> None:
        """Continue at another batch and step, because a checkpoint is restored; cancel what is pending."""
        error = RuntimeError("cancelled: the tables were restored from a checkpoint")
        deferred, self._deferred = self._deferred, []
        self.partitions.changes.versions = None
        pulls = self.ordering.reset(next_pull, next_push)
        for respond in (*(pull.respond for pull in pulls), *(respond for _, respond, _ in deferred)):
            respond(error)

    def statistics(self) -> Values:
        """Statistics of each table, pending pulls and pushes, and the histogram of staleness."""
        ordering = self.ordering
        return {
            "tables": {table.config.name: vars(table.statistics()) for table in self.partitions.dynamic},
            "pulls": ordering.next_pull,
            "steps": ordering.next_push,
            "waiting_pulls": sum(map(len, ordering.pulls.values())),
            "waiting_pushes": sum(map(len, ordering.pushes.values())),
            "staleness": {str(steps): count for steps, count in sorted(ordering.missed_steps.items())},
        }

    def _read(self, pulls: Sequence[PullRequest]) -> None:
        # Read the rows of all trainers at once.
        by_table = list(zip(*(pull.ids for pull in pulls), strict=True))
        ids = [cat(tensors) for tensors in by_table]
        occurrences = [cat(tensors) for tensors in zip(*(pull.occurrences for pull in pulls), strict=True)]
        try:
            row_numbers = self.partitions.insert(ids, occurrences)
            rows = self.partitions.read(ids, row_numbers)
        except Exception as error:  # the table is full; it is unchanged
            for pull in pulls:
                pull.respond(error)
            return
        # Send each trainer its rows.
        sizes = [[tensor.numel() for tensor in tensors] for tensors in by_table]
        shards = [
            zip(table_rows.split(counts), table_numbers.split(counts), strict=True)
            for table_rows, table_numbers, counts in zip(rows, row_numbers, sizes, strict=True)
        ]
        for pull, *tables in zip(pulls, *shards, strict=True):
            pulled = [self._pulled(pull, index, *table) for index, table in enumerate(tables)]
            pull.respond(self.codecs.rows.pack_reply(self.partitions.numbers, pulled, self.ordering.next_push))

    def _pulled(self, pull: PullRequest, index: int, rows: Tensor, row_numbers: Tensor) -> PulledTable:
        versions, refused = None, None
        if pull.versions is not None:
            versions = self.partitions.changes.versions_of(self.partitions.numbers[index], row_numbers)
            rows = rows[versions != pull.versions[index]]
        if self.spec.has_admission:
            refused = (row_numbers < 0).nonzero()[:, 0]
        return PulledTable(rows, versions, refused)

    def _apply(self, pushes: Sequence[PushRequest]) -> None:
        if self.partitions.tables is None:
            return
        trained = [push for push in pushes if push.tables]
        ids, grads = list[Tensor](), list[Tensor]()
        for number, table in self.partitions.by_number.items():
            no_gradients = NO_ROWS, torch.empty(0, table.config.embedding_dim)
            columns = zip(no_gradients, *(push.tables[number] for push in trained), strict=True)
            for target, column in zip((ids, grads), columns, strict=True):
                target.append(torch.cat(column))
            if self.spec.trainers > 1:
                grads[-1].mul_(1.0 / self.spec.trainers)
        self.partitions.update(ids, grads, max(push.lr for push in pushes) if trained else None)


@functools.cache
@torch.no_grad()
def warm_up() -> None:
    """Load torch modules and compile kernels, so that the first batch does not wait for them."""
    table, optimizer, one = TableConfig("table", 1, 1), SGD(lr=0.1), torch.ones(1, dtype=torch.int64)
    specs, optimizer_spec = (TableSpec.from_config(table, 0, optimizer),), describe_optimizer(optimizer)
    served = ServedTables(CollectionSpec(specs, optimizer_spec, 1, None, True, 1, ((0,),), (None,), "fp32", "fp32"), 0)
    served.pull(0, 0, PullRequest([one - 1], [one], None, lambda reply: None))
    served.push(0, 0, PushRequest({0: (one - 1, torch.ones(1, 1))}, 0.1))
