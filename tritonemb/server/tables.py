"""Tables of a collection on one embedding server: pulls and pushes, executed as `ordering.py` says.

The gradients of a row are summed in the order of trainers, and the optimizer is applied to it once per step. A server
and its trainers use the same codecs of pulled rows and pushed gradients, so results do not depend on the number of
servers.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb.comm.output_exchange import ExchangePrecision, MessageCodec
from tritonemb.optimizers import SGD
from tritonemb.server.ordering import Ordering
from tritonemb.server.partitions import NO_ROWS, Lease, Partitions, cat
from tritonemb.server.spec import CollectionSpec, TableSpec, describe_optimizer
from tritonemb.server.transport import Message, Values
from tritonemb.types import AdmissionConfig, CacheConfig, TableConfig

Respond = Callable[[Message | Exception], None]


class PulledTable(NamedTuple):
    """Rows of a table's ids that a trainer has pulled from one server."""

    rows: Tensor  # `[n, embedding_dim]`, of all ids, or of those whose versions differ from the trainer's
    versions: Tensor | None = None  # int64 per id, `NO_ROW` without a row; None: the trainer has no cache
    refused: Tensor | None = None  # int64, positions of ids that were not admitted and take no gradient, if any may be


class TableCodecs:
    """Encoder and decoder of rows `[n, dim]` of tables, which are given by their numbers in the collection."""

    def __init__(self, dims: Sequence[int], dtypes: Sequence[torch.dtype], codec: str) -> None:
        self._dtypes = dtypes
        self._codecs = None if codec == "fp32" else [MessageCodec([[(0, dim)]], dim, codec) for dim in dims]

    def pack(self, numbers: Sequence[int], rows: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
        if self._codecs is None:
            return list(rows)
        return [self._codecs[number].pack(values, scale) for number, values in zip(numbers, rows, strict=True)]

    def unpack(self, numbers: Sequence[int], messages: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
        """Decode rows of `pack` into the tables' dtypes."""
        if self._codecs is None:
            return list(messages)
        rows = []
        for number, message in zip(numbers, messages, strict=True):
            codec, dtype = self._codecs[number], self._dtypes[number]
            (row_bytes,) = codec.sizes([1], message.device)
            rows.append(codec.unpack(message, message.numel() // row_bytes, dtype, scale))
        return rows

    def pack_reply(self, numbers: Sequence[int], tables: Sequence[PulledTable], steps: int) -> Message:
        """Encode a reply to a pull, with the number of applied steps."""
        names = [name for name in PulledTable._fields if tables and getattr(tables[0], name) is not None]
        columns = {name: [getattr(table, name).contiguous() for table in tables] for name in names}
        if tables:
            columns["rows"] = self.pack(numbers, columns["rows"])
        return {"steps": steps, "fields": names}, [tensor for column in columns.values() for tensor in column]

    def unpack_reply(self, numbers: Sequence[int], message: Message) -> dict[int, PulledTable]:
        (values, tensors), size = message, len(numbers)
        columns = {name: tensors[n * size : (n + 1) * size] for n, name in enumerate(values["fields"])}
        if numbers:
            columns["rows"] = self.unpack(numbers, columns["rows"])
        rows = zip(*columns.values(), strict=True)
        return {n: PulledTable(**dict(zip(columns, row, strict=True))) for n, row in zip(numbers, rows, strict=True)}


class RowCodecs:
    """Codecs of a collection's `rows`, of their float32 `gradients`, and of `exact_rows`, which are for evaluation."""

    def __init__(self, spec: CollectionSpec) -> None:
        dims = [table.embedding_dim for table in spec.tables]
        self._precision = ExchangePrecision(spec.row_codec, spec.gradient_codec)
        self.rows = TableCodecs(dims, [getattr(torch, table.dtype) for table in spec.tables], spec.row_codec)
        self.exact_rows = TableCodecs(dims, [], "fp32")
        self.gradients = TableCodecs(dims, [torch.float32] * len(dims), spec.gradient_codec)

    def scale(self, sums: Sequence[Tensor]) -> float:
        """Return the scale of gradients `sums`: none of them overflows the codec, and few underflow."""
        if self._precision.backward == "fp32":
            return 1.0
        largest = max((float(table_sums.abs().max()) for table_sums in sums if table_sums.numel()), default=0.0)
        return self._precision.scale_below(math.frexp(largest)[1] if math.isfinite(largest) else 128)


class PullRequest(NamedTuple):
    """Pull of a trainer's batch; per table int64 `[n]`."""

    ids: list[Tensor]  # distinct
    occurrences: list[Tensor]  # of the ids in the batch
    versions: list[Tensor] | None  # of rows in the trainer's cache, if it has one
    respond: Respond  # called with the reply, or with the error of the batch


class PushRequest(NamedTuple):
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
        self._has_admission = any(AdmissionConfig(**table.admission) != AdmissionConfig() for table in spec.tables)
        self._deferred: list[tuple[Callable[[], bool], Respond, Callable[[], Message]]] = []
        self.is_broken = False  # whether an operation was interrupted, so that the tables may be inconsistent

    def respond_when(
        self, condition: Callable[[], bool], respond: Respond, reply: Callable[[], Message] = lambda: ({}, [])
    ) -> None:
        """Respond with `reply()`, or its error, when a condition on the order of events holds."""
        self._deferred.append((condition, respond, reply))
        self.advance()

    def advance(self) -> None:
        """Apply pushes, read pulls, then respond to deferred requests, as far as the order of events allows."""
        self.is_broken = True
        while (pushes := self.ordering.take_pushes()) or (pulls := self.ordering.take_pulls()):
            if pushes:
                self._apply(pushes)
            else:
                self._read(pulls)
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
        if self._has_admission:
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
    served.ordering.pull(0, 0, PullRequest([one - 1], [one], None, lambda reply: None))
    served.advance()
    served.ordering.push(0, 0, PushRequest({0: (one - 1, torch.ones(1, 1))}, 0.1))
    served.advance()
