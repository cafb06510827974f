"""Tables of a collection on one embedding server: pulls and pushes, executed as `ordering.py` says.

The gradients of a row are summed in the order of trainers, and the optimizer is applied to it once per step. A server
and its trainers use the same codecs of pulled rows and pushed gradients, so results do not depend on the number of
servers.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb.comm.gradient_exchange import exponent_of
from tritonemb.comm.output_exchange import ExchangePrecision, MessageCodec
from tritonemb.layout import nonzero
from tritonemb.optimizers import SGD
from tritonemb.server.ordering import Ordering
from tritonemb.server.partitions import NO_ROWS, Lease, Partitions, cat
from tritonemb.server.spec import CollectionSpec, TableSpec, describe_optimizer
from tritonemb.server.transport import Message, Values
from tritonemb.types import AdmissionConfig, CacheConfig, TableConfig

Respond = Callable[[Message | Exception], None]


class PullReply(NamedTuple):
    """Rows of a batch's ids that a trainer has pulled from one server, table by table."""

    steps: int  # number of applied steps
    rows: list[Tensor]  # a matrix per block, of all ids, or of those whose versions differ from the trainer's
    versions: Tensor | None = None  # int64 per id, `NO_ROW` without a row; None: the trainer has no cache
    refused: Tensor | None = None  # int64, positions of ids that were not admitted and take no gradient, if any may be


def checked_rate(lr: float) -> float:
    """Return the learning rate of a message; ValueError if tables cannot have it."""
    if not 0.0 <= lr < float("inf"):
        raise ValueError(f"the learning rate must lie in [0, inf), got {lr}")
    return float(lr)


class BlockCodec:
    """Encoder and decoder of rows: a matrix `[n, dim]` per block, see `CollectionSpec.blocks`."""

    def __init__(self, dims: Sequence[int], dtypes: Sequence[torch.dtype], codec: str) -> None:
        self._dtypes, self._num_blocks = dtypes, len(dims)
        self._codecs = None if codec == "fp32" else [MessageCodec([[(0, dim)]], dim, codec) for dim in dims]

    def pack(self, matrices: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
        if self._codecs is None:
            return list(matrices)
        return [codec.pack(matrix, scale) for codec, matrix in zip(self._codecs, matrices, strict=True)]

    def unpack(self, messages: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
        """Decode matrices of `pack` into the tables' dtypes."""
        if self._codecs is None:
            return list(messages)
        blocks = zip(self._codecs, self._dtypes, messages, strict=True)
        return [c.unpack(m, m.numel() // c.sizes([1], m.device)[0], dtype, scale) for c, dtype, m in blocks]

    def pack_reply(self, reply: PullReply) -> Message:
        columns = {name: column for name in ("versions", "refused") if (column := getattr(reply, name)) is not None}
        return {"steps": reply.steps, "fields": list(columns)}, [*self.pack(reply.rows), *columns.values()]

    def unpack_reply(self, message: Message) -> PullReply:
        values, tensors = message
        columns = dict(zip(values["fields"], tensors[self._num_blocks :], strict=True))
        return PullReply(values["steps"], self.unpack(tensors[: self._num_blocks]), **columns)


class RowCodecs:
    """Codecs of a collection's `rows`, of their float32 `gradients`, and of `exact_rows`, which are for evaluation."""

    def __init__(self, spec: CollectionSpec) -> None:
        tables = [spec.tables[block.start] for block in spec.blocks]
        dims, dtypes = [table.embedding_dim for table in tables], [getattr(torch, table.dtype) for table in tables]
        self._precision = ExchangePrecision(spec.row_codec, spec.gradient_codec)
        self.rows, self.exact_rows = BlockCodec(dims, dtypes, spec.row_codec), BlockCodec(dims, dtypes, "fp32")
        self.gradients = BlockCodec(dims, [torch.float32] * len(dims), spec.gradient_codec)

    def scale(self, sums: Sequence[Tensor]) -> float:
        """Return the scale of gradients `sums`: no finite one overflows the codec, and few underflow."""
        exponent = int(exponent_of(sums)) if self._precision.scales_by_size else 0
        return self._precision.scale_below(exponent)


class PullRequest(NamedTuple):
    """Pull of a trainer's batch; int64 `[n]`, table by table."""

    sizes: list[int]  # number of ids per table
    ids: Tensor  # distinct per table
    occurrences: Tensor  # of the ids in the batch
    versions: Tensor | None  # of rows in the trainer's cache, if it has one
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
        # Insert the ids of all trainers at once.
        sizes = [pull.sizes for pull in pulls]
        by_table = [sum(counts) for counts in zip(*sizes, strict=True)]
        ids, occurrences = (_interleave(columns, sizes) for columns in zip(*(pull[1:3] for pull in pulls), strict=True))
        try:
            shards = self.partitions.insert(ids, by_table, occurrences).split([*chain(*zip(*sizes, strict=True))])
            rows = [cat(shards[rank :: len(pulls)]) for rank in range(len(pulls))]
            replies = [self._pulled(*pair) for pair in zip(pulls, rows, strict=True)]
        except Exception as error:  # the table is full; it is unchanged
            for pull in pulls:
                pull.respond(error)
            return
        for pull, reply in zip(pulls, replies, strict=True):
            pull.respond(self.codecs.rows.pack_reply(reply))

    def _pulled(self, pull: PullRequest, rows: Tensor) -> PullReply:
        ids, sizes, versions = pull.ids, pull.sizes, None
        refused = nonzero(rows < 0) if self._has_admission else None
        if pull.versions is not None:
            versions = cat([*map(self.partitions.changes.versions_of, self.partitions.numbers, rows.split(sizes))])
            changed_mask = versions != pull.versions
            ids, rows = ids[changed_mask], rows[changed_mask]
            sizes = [int(mask.sum()) for mask in changed_mask.split(sizes)]
        return PullReply(self.ordering.next_push, self.partitions.read(ids, sizes, rows), versions, refused)

    def _apply(self, pushes: Sequence[PushRequest]) -> None:
        if self.partitions.tables is None:
            return
        trained = [push for push in pushes if push.tables]
        ids, grads = list[Tensor](), list[Tensor]()
        for number, table in self.partitions.by_number.items():
            pairs = [push.tables[number] for push in trained] or [(NO_ROWS, torch.empty(0, table.config.embedding_dim))]
            for target, column in zip((ids, grads), zip(*pairs, strict=True), strict=True):
                target.append(cat(column))
            if self.spec.trainers > 1:
                grads[-1] = grads[-1] * (1.0 / self.spec.trainers)
        lr = max(push.lr for push in pushes) if trained else None
        self.partitions.update(torch.cat(ids), [*map(len, ids)], grads, lr)


def _interleave(columns: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> Tensor:
    """Concatenate columns, each of which has all tables, table by table."""
    if len(columns) == 1:
        return columns[0]
    shards = [column.split(counts) for column, counts in zip(columns, sizes, strict=True)]
    return cat([shard for table in zip(*shards, strict=True) for shard in table])


@functools.cache
@torch.no_grad()
def warm_up() -> None:
    """Load torch modules and compile kernels, so that the first batch does not wait for them."""
    table, optimizer, one = TableConfig("table", 1, 1), SGD(lr=0.1), torch.ones(1, dtype=torch.int64)
    specs, optimizer_spec = (TableSpec.from_config(table, 0, optimizer),), describe_optimizer(optimizer)
    served = ServedTables(CollectionSpec(specs, optimizer_spec, 1, None, True, 1, ((0,),), (None,), "fp32", "fp32"), 0)
    served.ordering.pull(0, 0, PullRequest([1], one - 1, one, None, lambda reply: None))
    served.advance()
    served.ordering.push(0, 0, PushRequest({0: (one - 1, torch.ones(1, 1))}, 0.1))
    served.advance()
