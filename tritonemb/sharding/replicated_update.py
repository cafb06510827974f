"""Optimizer updates of rows that several ranks have: exact, and bitwise identical on every rank.

Each rank sums the gradients of its distinct rows. *Replicas* all-gather these sums, and each applies the optimizer to
the sum over ranks, added in the order of ranks.

Column-wise sharded tables, if the optimizer reads whole rows: for a mean of squares, ranks exchange sums of squares of
their columns; for more (a norm), they exchange their columns of the batch's rows, and each updates whole rows and
stores its own columns. Both are bitwise identical to the unsharded update.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.gradient_exchange import ColumnBlock, RowSums, SumsExchange, all_gather_rows, exchange_columns
from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.errors import gradient_not_finite, warn_of_skipped_rows
from tritonemb.kernels.optimizers import row_sum_by_torch, step_by_torch
from tritonemb.layout import COLUMN_ORIGIN, ROW_ORIGIN, SEED, Layout, make_layout, pack_names, set_row_ids
from tritonemb.ops.row_update import record_update
from tritonemb.optimizers import SGD, Optimizer
from tritonemb.sharding.placement import PlacedShard, ShardGroups
from tritonemb.sharding.plan import Shard
from tritonemb.tables.batch import RowBatch, row_sums
from tritonemb.tables.cache import Pins
from tritonemb.tables.lookup_tables import FindReplicaRows, LocalUpdate, LookupTables
from tritonemb.types import TableConfig
from tritonemb.utils import on_error

NO_GRAPH_TASK = -1  # autograd's id of the graph task outside of a backward pass


def needs_whole_rows(optimizer: Optimizer) -> bool:
    """Return whether the update of an element depends on other elements of its row."""
    limits_norms = optimizer.max_norm is not None or optimizer.cow_clip is not None
    return optimizer.reads_whole_rows or limits_norms or optimizer.on_nonfinite != "ignore"


class ShardUpdate(LocalUpdate):
    """Update of rows that only this rank has: tables cannot diverge, however dense layers are averaged."""

    def check(self, tables: LookupTables) -> None:
        pass


@dataclass(frozen=True)
class ReplicatedUpdate(ShardUpdate):
    """Update of rows that other ranks have, too."""

    is_shared = True

    exchange: SumsExchange  # between ranks with the same rows and columns
    # the same ranks, in a separate CPU group for prefetches, if some tables are cached: replicas exchange the rows of
    # their batches before they train
    prefetch_group: RankGroup | None = None
    whole_row_update: "WholeRowUpdate | None" = None  # if the optimizer needs columns of other ranks
    blocks: tuple[ColumnBlock, ...] = ()  # column block of each table, for `whole_row_update`

    @property
    def num_replicas(self) -> int:
        """Number of replicas, which divides sums of gradients."""
        return self.exchange.group.size

    def replica_rows(self, tables: LookupTables) -> FindReplicaRows | None:
        group, cache = self.prefetch_group, tables.cache
        if group is None or cache is None:
            return None
        row_ends = torch.tensor([config.num_embeddings for config in tables.configs], device=cache.device).cumsum(0)
        is_cached = torch.tensor([*(cached is not None for cached in cache.rows), False], device=cache.device)

        def find(rows: Tensor, problem: ValueError | None) -> Tensor:
            """Return rows of cached tables in the batches of all replicas; a collective."""
            cached_rows = rows[is_cached[torch.searchsorted(row_ends, rows, right=True)]]
            return all_gather_rows(group, cached_rows.cpu(), problem).to(rows.device)

        return find

    @torch.no_grad()
    def step(
        self, tables: LookupTables, grad: Tensor | list[Tensor], batch: RowBatch, pins: Sequence[Pins] = ()
    ) -> None:
        """Update the rows of all replicas' batches in place, and unpin them; a collective."""
        pinned, configs, optimizer = PinnedRows(tables, pins), tables.configs, tables.optimizer
        assert optimizer is not None
        with on_error(pinned.release):
            # `max_gradient` bounds the mean over replicas.
            bound = None if optimizer.max_gradient is None else optimizer.max_gradient * self.num_replicas
            sums = self._gather_gradients(configs, pinned.by_row(RowSums(*row_sums(grad, batch, bound))))
            if self.whole_row_update is not None:
                gradients = zip(self.blocks, configs, sums.rows, sums.sums, strict=True)
                updates = [_BlockUpdate(b, n, t, pinned, *fields) for n, (b, t, *fields) in enumerate(gradients)]
                self.whole_row_update.add(updates)
                return
            slots = RowSums([pinned.slots(table, rows) for table, rows in enumerate(sums.rows)], sums.sums)
            with tables.memory():
                spec = replace(optimizer, max_gradient=None)
                _apply(configs, spec, tables.fused_tables(), slots, pinned.row_ids())
        pinned.release()

    def _gather_gradients(self, tables: Sequence[TableConfig], sums: RowSums) -> RowSums:
        """Gather the mean gradients of the rows of all replicas' batches; a collective."""
        if self.num_replicas == 1:
            return sums
        sums = self.exchange(sums)
        for table_sums in sums.sums:
            table_sums.mul_(1.0 / self.num_replicas)
        if self.whole_row_update is None:
            return sums
        values, offsets, layout = _to_batch(tables, sums)  # merges rows that several ranks have
        batch = RowBatch(values, offsets, None, ops.row_groups(values, offsets, layout), layout)
        return RowSums(*row_sums(sums.sums, batch))


class ShardUpdates:
    """Updates of a rank's shards. All ranks create the groups of all of them.

    Args:
        configs, shards: tables as the plan places them, and the shards of all ranks.
        sync_replicas: whether replicas of the tables gather gradients in every step.

    Raises:
        ValueError: on all ranks, for shards whose updates lack the counts of `cow_clip`.

    Attributes:
        of_whole_rows: updates of shards that need whole rows, by scheme; on all ranks, with or without such shards.
        exchanges: of sums of gradients.
    """

    def __init__(
        self, configs: Sequence[TableConfig], optimizer: Optimizer, groups: ShardGroups, shards: Sequence[PlacedShard],
        precision: ExchangePrecision, sync_replicas: bool,
    ) -> None:  # fmt: skip
        self._precision, self.exchanges = precision, list[SumsExchange]()
        # Ranks with replicas of a shard, by whether its table is data-parallel; where such tables are cached, separate
        # groups of the same ranks for prefetches.
        self._groups = {True: groups.world, False: groups.replicas if sync_replicas else RankGroup()}
        for placed in shards if optimizer.cow_clip is not None else ():
            if placed.needs_whole_rows or self._groups[placed.scheme == "replicated"].size > 1:
                raise ValueError(
                    f"table {configs[placed.table].name!r}: cow_clip counts a row's occurrences over all ranks, which "
                    "updates of data-parallel, column-wise sharded and replicated shards do not exchange; shard the "
                    "table row-wise or table-wise without replicas, or omit cow_clip"
                )
        schemes = {placed.scheme == "replicated" for placed in shards if configs[placed.table].placement != "device"}
        shared = [key for key, group in self._groups.items() if key in schemes and group.size > 1]
        self._prefetch_groups = {key: groups.for_prefetch(key) for key in shared}
        # Column blocks of shards that need whole rows: ranks, and blocks of rows, are numbered.
        self._blocks: dict[tuple[int, Shard], ColumnBlock] = {}
        self.of_whole_rows: dict[str, WholeRowUpdate] = {}
        for scheme in ("direct", "hierarchical"):
            needing = (placed for placed in shards if placed.needs_whole_rows)
            if keys := [(placed.table, placed.shard) for placed in needing if placed.scheme == scheme]:
                ranks = sorted({shard.rank for _, shard in keys})
                rows = sorted({(table, shard.first_row) for table, shard in keys})
                for table, shard in keys:
                    numbers = rows.index((table, shard.first_row)), ranks.index(shard.rank)
                    self._blocks[table, shard] = ColumnBlock(*numbers, shard.first_column, shard.num_columns)
                blocks = tuple(self._blocks[key] for key in keys)
                self.of_whole_rows[scheme] = WholeRowUpdate(groups.subset(ranks), blocks, optimizer)

    def make(self, shards: Sequence[PlacedShard]) -> ShardUpdate:
        """Make the update of local shards with one scheme, all of which need whole rows, or none."""
        is_replicated, needs_whole_rows = shards[0].scheme == "replicated", shards[0].needs_whole_rows
        group = self._groups[is_replicated]
        if group.size == 1 and not needs_whole_rows:
            return ShardUpdate()
        blocks = tuple(self._blocks[placed.table, placed.shard] for placed in shards if needs_whole_rows)
        shapes = [(placed.shard.num_rows, placed.shard.num_columns) for placed in shards]
        self.exchanges.append(SumsExchange(group, self._precision, shapes))
        whole_row_update = self.of_whole_rows[shards[0].scheme] if needs_whole_rows else None
        return ReplicatedUpdate(self.exchanges[-1], self._prefetch_groups.get(is_replicated), whole_row_update, blocks)


class PinnedRows:
    """Rows of a table set for one update; rows of cached tables are in cache slots that batches have pinned.

    Row numbers are the same on every rank, slots are not. No method is a collective. `pins`: those of the batches to
    update, which are marked dirty, and unpinned by `release`.
    """

    def __init__(self, tables: LookupTables, pins: Sequence[Pins] = ()) -> None:
        self.tables, self.configs, self._pins = tables, tables.configs, pins
        for pinned in pins:
            pinned.is_dirty = True
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}  # by cached table: rows, ascending, and their slots
        for table, cached_table in enumerate([] if tables.cache is None else tables.cache.rows):
            if cached_table is not None:
                pairs = [pinned.rows_of(table) for pinned in pins]
                rows, inverse = torch.cat([rows for rows, _ in pairs]).unique(return_inverse=True)
                slots = torch.empty_like(rows)
                # A row has one slot, however many batches pin it.
                slots[inverse] = torch.cat([slots for _, slots in pairs])
                self._slots[table] = rows, slots

    def slots(self, table: int, rows: Tensor) -> Tensor:
        """Return the slots of a table's rows, or the rows if it is not cached; RuntimeError if one is not pinned."""
        if table not in self._slots or not rows.numel():
            return rows
        pinned_rows, slots = self._slots[table]
        index = torch.searchsorted(pinned_rows, rows).clamp_(max=max(0, pinned_rows.numel() - 1))
        if not pinned_rows.numel() or not torch.equal(pinned_rows[index], rows):
            raise RuntimeError(
                f"other ranks train rows of table {self.configs[table].name!r} that are not pinned on this one's "
                "device; all ranks must prefetch, look up and train their batches in the same order"
            )
        return slots[index]

    def by_row(self, sums: RowSums) -> RowSums:
        """Convert sums by slot to sums by row, ascending."""
        result = RowSums(list(sums.rows), list(sums.sums))
        for table, (rows, slots) in self._slots.items():
            ascending, order = slots.sort()
            index = torch.searchsorted(ascending, sums.rows[table])
            result.rows[table], row_order = rows[order[index]].sort()
            result.sums[table] = sums.sums[table][row_order]
        return result

    def row_ids(self) -> list[Tensor | None]:
        """Return int64 rows by slot for each table, None if it is not cached; for use within `LookupTables.memory`."""
        cache, tables = self.tables.cache, range(len(self.configs))
        return [cache.row_ids(table) if cache is not None and table in self._slots else None for table in tables]

    def release(self) -> None:
        """Unpin the rows, once this thread has launched the update."""
        for pinned in self._pins:
            pinned.release(self.tables.counters["step"])


def _to_batch(
    tables: Sequence[TableConfig], sums: RowSums, row_ids: Sequence[Tensor | None] = ()
) -> tuple[Tensor, Tensor, Layout]:
    """Convert rows to an unpooled batch of one sample: values, offsets, layout.

    `row_ids`: for tables whose `sums.rows` are slots, the row in each slot.
    """
    slot_rows = row_ids or [None] * len(tables)
    configs = [
        TableConfig(str(n), t.num_embeddings if i is None else i.numel(), t.embedding_dim, dtype=t.row_dtype)
        for n, (t, i) in enumerate(zip(tables, slot_rows, strict=True))
    ]
    values = torch.cat(sums.rows)
    layout = make_layout(configs, [table.name for table in configs], False, values.device)
    origins = [[table.seed, table.row_origin, table.column_origin] for table in tables]
    layout.tables[:, [SEED, ROW_ORIGIN, COLUMN_ORIGIN]] = torch.tensor(origins, device=values.device)
    for table, rows_of_slots in enumerate(slot_rows):
        if rows_of_slots is not None:
            set_row_ids(layout, table, rows_of_slots, tables[table].row_origin)
    layout = layout._replace(table_names=pack_names(table.name for table in tables))
    offsets = torch.tensor([0, *[rows.shape[0] for rows in sums.rows]], device=values.device).cumsum(0)
    return values, offsets, layout


def _apply(
    tables: Sequence[TableConfig], optimizer: Optimizer, fused: ops.FusedTables, sums: RowSums,
    row_ids: Sequence[Tensor | None] = (),
) -> None:  # fmt: skip
    """Apply an optimizer step to rows; several gradients of a row are added in their order."""
    values, offsets, layout = _to_batch(tables, sums, row_ids)
    fused = fused._replace(optimizer=optimizer.name, hyperparameters=list(optimizer.hyperparameters))
    ops.row_update_(fused, ops.BatchGradient(sums.sums, offsets, None, values, layout))


class _BlockUpdate(NamedTuple):
    """Pending update of a table's column block: the gradients of its rows."""

    block: ColumnBlock
    position: int  # of the block in its table set
    table: TableConfig  # config of the block as a table
    pinned: PinnedRows
    rows: Tensor  # distinct rows `[U]`, ascending, and their gradients `[U, num_columns]`
    sums: Tensor

    def read(self) -> tuple[Tensor, list[Tensor]]:
        """Read the rows' weights, in float32, and states."""
        slots, tables = self.pinned.slots(self.position, self.rows), self.pinned.tables
        with tables.memory():
            fused, n = tables.fused_tables(), self.position
            return fused.weights[n][slots].float(), [state[slots] for state in fused.states_of(n)]

    def write(self, rows: Tensor, weight: Tensor, states: Sequence[Tensor], step: int, optimizer: Optimizer) -> None:
        """Write float32 weights, and states, to the rows of a mask, bool `[U]`."""
        slots, tables = self.pinned.slots(self.position, self.rows)[rows], self.pinned.tables
        new_weight = _round_rows(self.table, weight, self.rows[rows], step, optimizer)
        with tables.memory():
            fused = tables.fused_tables()
            fused.weights[self.position][slots] = new_weight
            for state, new_state in zip(fused.states_of(self.position), states, strict=True):
                state[slots] = new_state


class WholeRowUpdate:
    """Updates column blocks that need whole rows, or their means of squares, when a backward pass ends.

    It exchanges columns only then: before, other ranks may wait for gradients that this rank has yet to send.

    Args:
        group: ranks with columns of the tables.
        blocks: column blocks of all ranks. `ColumnBlock.table` numbers tables, or blocks of their rows, the same on
            every rank.
        optimizer: without regard to `max_gradient`, which has been applied.
    """

    def __init__(self, group: RankGroup, blocks: tuple[ColumnBlock, ...], optimizer: Optimizer) -> None:
        self._group, self._blocks = group, blocks
        self._optimizer = replace(optimizer, max_gradient=None)
        self._per_element = [state.per_element for state in optimizer.states]
        # Squares are added in a binary tree. Sum width: columns of a subtree that no block of the table splits.
        # An optimizer that reads whole rows only to skip nonfinite ones uses just the sign of the sums.
        squares_suffice = optimizer.reads_squares or not optimizer.reads_whole_rows
        self._exchanges_squares = optimizer.max_norm is None and squares_suffice
        self._sum_width = defaultdict[int, int](lambda: 1 << 62)
        for block in blocks:
            self._sum_width[block.table] = math.gcd(self._sum_width[block.table], block.first_column)
        self._pending: list[list[_BlockUpdate]] = []  # by lookup
        self._graph_task = NO_GRAPH_TASK  # at its end, pending updates are applied

    def add(self, updates: list[_BlockUpdate]) -> None:
        """Queue updates until the backward pass ends; outside of a pass, until `flush`."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._graph_task:  # discard the updates of a failed pass
            self._pending, self._graph_task = [], graph_task
        if not self._pending and graph_task != NO_GRAPH_TASK:
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)
        self._pending.append(updates)

    def discard(self) -> None:
        self._pending = []

    @torch.no_grad()
    def flush(self) -> None:
        """Apply all queued updates; a collective. A table is updated once per lookup, in order."""
        pending, self._pending = self._pending, []
        lookups = defaultdict[ColumnBlock, list[list[_BlockUpdate]]](list)  # by table set
        for updates in pending:
            lookups[updates[0].block].append(updates)
        try:
            for lookups_per_set in itertools.zip_longest(*lookups.values()):
                self._apply([updates for updates in lookups_per_set if updates is not None])
        finally:
            for updates in pending:
                updates[0].pinned.release()

    def _apply(self, lookups: list[list[_BlockUpdate]]) -> None:
        """Exchange columns or squares, apply the optimizer in float32, and store the local columns."""
        # Exchange what the optimizer reads of other ranks' columns.
        optimizer, block_updates = self._optimizer, [update for lookup_updates in lookups for update in lookup_updates]
        current, counters = [update.read() for update in block_updates], block_updates[0].pinned.tables.counters
        messages = [self._message(update, *read) for update, read in zip(block_updates, current, strict=True)]
        blocks = [self._message_block(block) for block in self._blocks]
        local_blocks = [self._message_block(update.block) for update in block_updates]
        kind = "row squares" if self._exchanges_squares else "row columns"
        received = exchange_columns(self._group, blocks, local_blocks, messages, kind)
        pairs = [(u, read) for u, read in zip(block_updates, current, strict=True) if len(u.rows)]
        updated, inputs = [u for u, _ in pairs], [self._inputs(u, *read, received[u.block.table]) for u, read in pairs]
        # Raise for nonfinite gradients before any row is changed.
        step = int(counters["step"]) + 1
        for update, (finite, *_) in zip(updated, inputs, strict=True):
            if optimizer.on_nonfinite == "raise" and not bool(finite.all()):
                raise gradient_not_finite(update.table.name, int(update.rows[~finite][0]))
        record_update(counters["learning_rate"])
        # Compute all steps, then write: several blocks of a table may be on this rank.
        changes = []
        for update, (finite, gradient, weight, states, columns, mean) in zip(updated, inputs, strict=True):
            mask = finite if optimizer.on_nonfinite == "skip" else torch.ones_like(finite)
            weight, states = step_by_torch(
                optimizer.name, weight[mask], [state.view(len(mask), -1)[mask] for state in states], gradient[mask],
                counters["learning_rate"], step, optimizer.hyperparameters, None if mean is None else mean[mask],
                update.table.name,
            )  # fmt: skip
            per_element = zip(self._per_element, states, strict=True)
            new_states = [state[:, columns] if wide else state.flatten() for wide, state in per_element]
            changes.append((update, mask, weight[:, columns], new_states))
        for update, mask, weight, new_states in changes:
            update.write(mask, weight, new_states, step, optimizer)
            if num_skipped := int((~mask).sum()):
                update.pinned.tables.counters["skipped"][update.position] += num_skipped
                warn_of_skipped_rows(update.table.name)
        for lookup_updates in lookups:
            lookup_updates[0].pinned.tables.counters["step"] += 1

    def _message(self, update: _BlockUpdate, weight: Tensor, states: list[Tensor]) -> Tensor:
        """Message of a block: gradient, weight and per-element states, stacked; or sums of squares of gradients."""
        optimizer, gradient = self._optimizer, update.sums
        if not self._exchanges_squares:
            return torch.cat([gradient, weight, *itertools.compress(states, self._per_element)])
        if optimizer.weight_decay and optimizer.weight_decay_mode == "l2":
            gradient = gradient + optimizer.weight_decay * weight
        width = self._sum_width[update.block.table]
        padded = torch.nn.functional.pad(gradient, (0, -gradient.shape[1] % width))
        squares = row_sum_by_torch(padded.square().unflatten(1, (-1, width))).squeeze(2)
        if optimizer.on_nonfinite != "ignore":  # negative: the row is not finite
            squares[~update.sums.isfinite().all(1)] = -1.0
        return squares

    def _message_block(self, block: ColumnBlock) -> ColumnBlock:
        """Column block of the message: the columns, or their sums of squares."""
        width = self._sum_width[block.table] if self._exchanges_squares else 1
        return ColumnBlock(*block[:2], block.first_column // width, -(-block.num_columns // width))

    def _inputs(
        self, update: _BlockUpdate, weight: Tensor, states: list[Tensor], columns: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor], slice, Tensor | None]:
        """Inputs of a column block's optimizer step: whole rows, or its columns with the mean of squares of whole rows.

        They are: whether a whole row's gradient is finite, bool `[U]`; gradient, weight and states; the block's columns
        in these; the mean of squares.
        """
        if self._exchanges_squares:
            dim = columns.new_tensor(sum(b.num_columns for b in self._blocks if b.table == update.block.table))
            finite, mean = ~(columns < 0).any(1), row_sum_by_torch(columns) / dim
            return finite, update.sums, weight, states, slice(None), mean
        gradient, weight, *wide_states = columns.chunk(2 + sum(self._per_element))
        states = [wide_states.pop(0) if wide else state for state, wide in zip(states, self._per_element, strict=True)]
        first, width = update.block[2:]
        return gradient.isfinite().all(1), gradient, weight, states, slice(first, first + width), None


def _round_rows(table: TableConfig, values: Tensor, rows: Tensor, step: int, optimizer: Optimizer) -> Tensor:
    """Round float32 rows to the table's dtype, bitwise identical to the update of the unsharded table."""
    if table.dtype == torch.float32 or not rows.numel():
        return values.to(table.dtype)
    # A step of SGD from zero with learning rate -1 yields the values, rounded.
    device, rounding = values.device, SGD(stochastic_rounding=optimizer.stochastic_rounding, on_nonfinite="ignore")
    result = torch.zeros(values.shape, dtype=table.dtype, device=device)
    previous_step, skipped = torch.full((), step - 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    rate = torch.full((), -1.0, dtype=torch.float32, device=device)
    fused = ops.FusedTables([result], [], [previous_step], [skipped], rate, "", [])
    _apply([table], rounding, fused, RowSums([torch.arange(rows.numel(), device=device)], [values]), [rows])
    return result
