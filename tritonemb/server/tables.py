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
from tritonemb.server.transport import Values
from tritonemb.types import CacheConfig, TableConfig

Completion = Callable[[Exception | None], None]
"""Called with None when its condition holds, or with an error if it was cancelled."""


@dataclass(frozen=True)
class PullRequest:
    """Pull of a trainer's batch.

    Args:
        ids: per table, int64 `[n]`, distinct.
        occurrences: per table, int64 `[n]`, occurrences of the ids in the batch.
        versions: per table, int64 `[n]`, versions of rows in the trainer's cache; None: it has no cache.
        callback: called with the rows of each table, or with the error of the batch.
    """

    ids: list[Tensor]
    occurrences: list[Tensor]
    versions: list[Tensor] | None
    callback: Callable[[list[PulledTable] | Exception], None]


@dataclass(frozen=True)
class PushRequest:
    """Gradients of a trainer's batch: per table ids, and sums `[n, embedding_dim]`; no tables: it was not trained."""

    ids: list[Tensor]
    sums: list[Tensor]
    lr: float


class ServedTables:
    """Partitions of a collection's tables on one server, used by one thread.

    Args:
        cache: config of the cache in memory of tables on disk; None: tables are in memory.

    Attributes:
        is_broken: whether an operation was interrupted, so that the tables may be inconsistent.
    """

    def __init__(self, spec: CollectionSpec, server: int, cache: CacheConfig | None = None) -> None:
        self.spec, self.server = spec, server
        self.partitions = Partitions(spec, server, cache)
        self.lease = Lease(self.partitions)
        self.codecs = RowCodecs(spec)
        self.ordering = Ordering[PullRequest, PushRequest](spec.trainers, spec.staleness, spec.exact, spec.batches)
        self._deferred: list[tuple[Callable[[], bool], Completion]] = []
        self.is_broken = False

    def check_same(self, server_name: str, collection: str, spec: CollectionSpec, server: int) -> None:
        """ValueError if the collection has another spec, or this was another one of its servers."""
        if self.spec != spec:
            raise ValueError(
                f"embedding server {server_name} has a collection {collection!r} with other tables, trainers or "
                "staleness; attach with the same ones, or start other servers"
            )
        if self.server != server:
            raise ValueError(
                f"server order changed for {collection!r}: {server_name} was server {self.server}, is now server "
                f"{server}; pass the addresses in the original order"
            )

    def pull(self, rank: int, batch: int, pull: PullRequest) -> None:
        """Pull a trainer's batch for training; ValueError if it was pulled before."""
        self.ordering.pull(rank, batch, pull)
        if pull.versions is not None:
            self.partitions.changes.track_versions()
        self.advance()

    def push(self, rank: int, batch: int, push: PushRequest) -> None:
        """Push the gradients of a trainer's batch."""
        self.ordering.push(rank, batch, push)
        self.advance()

    def flush(self, rank: int, steps: int, completion: Completion) -> None:
        """Apply the pushes of `steps` steps before the trainer's next pull, once all trainers have requested it."""
        self.ordering.flush(rank, steps)
        self.when_applied(steps, completion)

    def end_lease(self, steps: int, lr: float) -> None:
        """End the trainer's lease: it has written back all rows, after `steps` steps."""
        self.lease.end(steps, lr)
        self.ordering.next_pull, self.ordering.next_push = steps * self.spec.batches, steps

    def is_complete(self) -> bool:
        """Return whether all pulled batches have been pushed, all leases have ended, and no pull is pending."""
        return not self.lease.is_active and self.ordering.is_complete()

    def when_applied(self, steps: int, completion: Completion) -> None:
        """Run `completion` when the pushes of `steps` steps have been applied."""
        self._run_when(lambda: self.ordering.next_push >= steps, completion)

    def when_trained(self, steps: int, completion: Completion) -> None:
        """Run `completion` when all trainers have pulled and pushed `steps` steps."""
        self._run_when(lambda: self.ordering.is_trained(steps), completion)

    def _run_when(self, condition: Callable[[], bool], completion: Completion) -> None:
        self._deferred.append((condition, completion))
        self.advance()

    def advance(self) -> None:
        """Apply pushes, read pulls, then run completions, as far as the order of events allows."""
        self.is_broken = True
        while (due := self.ordering.next_due()) is not None:
            if isinstance(due, ApplyPushes):
                self._apply(due.pushes)
            else:
                self._read(due.pulls)
        completions = [item for item in self._deferred if item[0]()]
        self._deferred = [item for item in self._deferred if item not in completions]
        for _, completion in completions:
            completion(None)
        self.is_broken = False

    def reset(self, next_pull: int, next_push: int) -> None:
        """Continue at another batch and step, because a checkpoint is restored; cancel what is pending."""
        error = RuntimeError("cancelled: the tables were restored from a checkpoint")
        deferred, self._deferred = self._deferred, []
        self.partitions.changes.versions = None
        for pull in self.ordering.reset(next_pull, next_push):
            pull.callback(error)
        for _, completion in deferred:
            completion(error)

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
                pull.callback(error)
            return
        # Send each trainer its rows.
        sizes = [[tensor.numel() for tensor in tensors] for tensors in by_table]
        shards = [
            list(zip(table_rows.split(counts), table_numbers.split(counts), strict=True))
            for table_rows, table_numbers, counts in zip(rows, row_numbers, sizes, strict=True)
        ]
        for position, pull in enumerate(pulls):
            pull.callback([self._pulled(pull, index, *shard[position]) for index, shard in enumerate(shards)])

    def _pulled(self, pull: PullRequest, index: int, rows: Tensor, row_numbers: Tensor) -> PulledTable:
        versions, refused = None, None
        if pull.versions is not None:
            versions = self.partitions.changes.versions_of(index, row_numbers)
            rows = rows[versions != pull.versions[index]]
        if self.spec.has_admission:
            refused = (row_numbers < 0).nonzero()[:, 0]
        return PulledTable(rows, versions, refused)

    def _apply(self, pushes: Sequence[PushRequest]) -> None:
        """Apply one optimizer step to the sums of each row's gradients."""
        if self.partitions.tables is None:
            return
        trained = [push for push in pushes if push.ids]
        ids, grads = list[Tensor](), list[Tensor]()
        for index, table in enumerate(self.partitions.dynamic):
            ids.append(torch.cat([NO_ROWS, *(push.ids[index] for push in trained)]))
            sums = (push.sums[index] for push in trained)
            grads.append(torch.cat([torch.empty(0, table.config.embedding_dim), *sums]))
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
    served.pull(0, 0, PullRequest([one - 1], [one], None, lambda tables: None))
    served.push(0, 0, PushRequest([one - 1], [torch.ones(1, 1)], 0.1))
