"""Updates of rows that several ranks have, by the gradients of all of them: exact, and bitwise identical on every rank.

Each rank sums the gradients of its distinct rows. *Replicas* gather these sums, and each applies the optimizer to the
sum over ranks, in their order. Where a table's *columns* are spread over ranks and the optimizer needs a row's mean of
squares, the ranks exchange sums of squares of their columns. Where it needs more of whole rows (a norm), they exchange
what they have of the batch's rows, and each updates the whole rows and keeps its own columns. Both are bitwise
identical to the unsharded update.
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
from tritonemb.errors import gradient_not_finite, warn_of_skipped_rows
from tritonemb.kernels.optimizers import step_by_torch
from tritonemb.kernels.triton_utils import row_sum_by_torch
from tritonemb.layout import COLUMN_ORIGIN, ROW_ORIGIN, SEED, Layout, make_layout, pack_names, set_row_ids
from tritonemb.ops.row_update import count_pass
from tritonemb.optimizers import SGD, Optimizer
from tritonemb.tables.lookup import FindReplicaRows, Lookup, row_sums
from tritonemb.tables.table_set import LocalUpdate, TableSet
from tritonemb.types import TableConfig
from tritonemb.utils import on_error

NO_BACKWARD = -1  # what autograd calls it when it is not running


def needs_whole_rows(optimizer: Optimizer) -> bool:
    """Whether the update of an element depends on others of its row."""
    return optimizer.reads_whole_rows or optimizer.max_norm is not None or optimizer.on_nonfinite != "ignore"


class ShardUpdate(LocalUpdate):
    """Of rows that no other rank has: nothing diverges, whatever averages the dense network."""

    is_of_shards = True


@dataclass(frozen=True)
class ReplicatedUpdate(ShardUpdate):
    """Of rows that other ranks have, too."""

    is_shared = True

    replicas: SumsExchange  # of ranks with the same rows and columns
    # the replicas, on the CPU and with an order of collectives of its own, where some of the tables are cached:
    # they exchange the rows of their batches before these are trained
    for_prefetch: RankGroup | None = None
    whole_rows: "WholeRowUpdate | None" = None  # where other ranks have other columns of the same rows
    blocks: tuple[ColumnBlock, ...] = ()  # for that, the block of columns that each of the tables is

    @property
    def average(self) -> int:
        """Sums over replicas are divided by this."""
        return self.replicas.group.size

    def replica_rows(self, tables: TableSet) -> FindReplicaRows | None:
        group, cache = self.for_prefetch, tables.cache
        if group is None:
            return None
        assert cache is not None
        ends = torch.tensor([config.num_embeddings for config in tables.configs], device=cache.device).cumsum(0)
        cached = torch.tensor([*(table is not None for table in cache.tables), False], device=cache.device)

        def find(rows: Tensor, problem: ValueError | None) -> Tensor:
            """Rows of cached tables in the batches of all replicas, without those of no table; a collective."""
            own = rows[cached[torch.searchsorted(ends, rows, right=True)]]
            return all_gather_rows(group, own.cpu(), problem).to(rows.device)

        return find

    @torch.no_grad()
    def step(self, tables: TableSet, grad: Tensor | list[Tensor], lookup: Lookup, pins: Sequence[Lookup] = ()) -> None:
        """One step on the rows of the batches of all these ranks, in place, which are unpinned then; a collective."""
        pinned, configs, optimizer = PinnedRows(tables, pins), tables.configs, tables.optimizer
        assert optimizer is not None
        with on_error(pinned.release):
            # The bound is of the gradient of the mean over replicas.
            bound = None if optimizer.max_gradient is None else optimizer.max_gradient * self.average
            sums = self._with_replicas(configs, pinned.in_rows(RowSums(*row_sums(grad, lookup, bound))))
            if self.whole_rows is not None:
                of_tables = enumerate(zip(self.blocks, configs, sums.rows, sums.sums, strict=True))
                self.whole_rows.add([_Cut(block, n, table, pinned, *own) for n, (block, table, *own) in of_tables])
                return
            slots = RowSums([pinned.slots(table, rows) for table, rows in enumerate(sums.rows)], sums.sums)
            with tables.memory():
                spec = replace(optimizer, max_gradient=None)
                _apply(configs, spec, tables.fused_tables(), slots, pinned.row_ids())
        pinned.release()

    def _with_replicas(self, tables: Sequence[TableConfig], sums: RowSums) -> RowSums:
        """The gradients of the rows of all replicas' batches; a collective."""
        if self.average == 1:
            return sums
        sums = self.replicas(sums)
        for of_table in sums.sums:
            of_table.mul_(1.0 / self.average)
        if self.whole_rows is None:
            return sums
        values, offsets, layout = _as_batch(tables, sums)  # rows that came from several ranks, once
        lookup = Lookup(values, offsets, None, ops.row_groups(values, offsets, layout), layout)
        return RowSums(*row_sums(sums.sums, lookup))


class PinnedRows:
    """The rows of a table set of shards, for one update; those of cached tables are in slots that batches have pinned.

    Rows have the same numbers on every rank; their slots may differ from rank to rank. Nothing here waits for another
    rank. `pins`: of the batches whose rows are updated; this object releases them.
    """

    def __init__(self, tables: TableSet, pins: Sequence[Lookup] = ()) -> None:
        self.tables, self.configs, self._pins = tables, tables.configs, pins
        for pinned in pins:
            pinned.dirty = True
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}  # by cached table: rows, ascending, and slots
        for table, cached in enumerate([] if tables.cache is None else tables.cache.tables):
            if cached is not None:
                parts = [pinned.rows_of(table) for pinned in pins]
                rows, which = torch.cat([rows for rows, _ in parts]).unique(return_inverse=True)
                slots = torch.empty_like(rows)
                slots[which] = torch.cat([slots for _, slots in parts])  # a row that several have pinned is in one slot
                self._slots[table] = rows, slots

    def slots(self, table: int, rows: Tensor) -> Tensor:
        """The slots of a table's rows; the rows themselves if it is not cached. RuntimeError if one is not pinned."""
        if table not in self._slots or not rows.numel():
            return rows
        own, slots = self._slots[table]
        index = torch.searchsorted(own, rows).clamp_(max=max(0, own.numel() - 1))
        if not own.numel() or not torch.equal(own[index], rows):
            raise RuntimeError(
                f"other ranks train rows of table {self.configs[table].name!r} that are not pinned on this one's "
                "device; all ranks must prefetch, look up and train their batches in the same order"
            )
        return slots[index]

    def in_rows(self, sums: RowSums) -> RowSums:
        """Sums by slot as sums by row, ascending."""
        found = RowSums(list(sums.rows), list(sums.sums))
        for table, (rows, slots) in self._slots.items():
            ascending, order = slots.sort()
            index = torch.searchsorted(ascending, sums.rows[table])
            found.rows[table], back = rows[order[index]].sort()
            found.sums[table] = sums.sums[table][back]
        return found

    def row_ids(self) -> list[Tensor | None]:
        """For each table, int64, the row in each slot; None if it is not cached. For use within its `memory`."""
        cache, tables = self.tables.cache, range(len(self.configs))
        return [cache.row_ids(table) if cache is not None and table in self._slots else None for table in tables]

    def release(self) -> None:
        """Unpin the rows: this thread's stream has been given the update."""
        for pinned in self._pins:
            pinned.release()


def _as_batch(
    tables: Sequence[TableConfig], sums: RowSums, row_ids: Sequence[Tensor | None] = ()
) -> tuple[Tensor, Tensor, Layout]:
    """Rows as an unpooled batch of one sample: values, offsets, layout.

    `row_ids`: of tables whose "rows" are slots, the row in each.
    """
    ids = row_ids or [None] * len(tables)
    named = [
        TableConfig(str(n), t.num_embeddings if i is None else i.numel(), t.embedding_dim, dtype=t.dtype)
        for n, (t, i) in enumerate(zip(tables, ids, strict=True))
    ]
    values = torch.cat(sums.rows)
    layout = make_layout(named, [table.name for table in named], False, values.device)
    random = [[table.seed, table.row_origin, table.column_origin] for table in tables]
    layout.tables[:, [SEED, ROW_ORIGIN, COLUMN_ORIGIN]] = torch.tensor(random, device=values.device)
    for table, of_slots in enumerate(ids):
        if of_slots is not None:
            set_row_ids(layout, table, of_slots, tables[table].row_origin)
    layout = layout._replace(table_names=pack_names(table.name for table in tables))
    offsets = torch.tensor([0, *[rows.shape[0] for rows in sums.rows]], device=values.device).cumsum(0)
    return values, offsets, layout


def _apply(
    tables: Sequence[TableConfig], optimizer: Optimizer, fused: ops.FusedTables, sums: RowSums,
    row_ids: Sequence[Tensor | None] = (),
) -> None:  # fmt: skip
    """The optimizer's step by gradients of rows; a row's gradients are added in their order."""
    values, offsets, layout = _as_batch(tables, sums, row_ids)
    fused = fused._replace(optimizer=optimizer.name, hyperparameters=list(optimizer.hyperparameters))
    ops.row_update_(fused, sums.sums, offsets, None, values, layout)


class _Cut(NamedTuple):
    """A block of a table's columns, and the gradients of its rows."""

    block: ColumnBlock
    place: int  # of the block among the tables that are updated with it
    table: TableConfig  # the block as a table
    pinned: PinnedRows  # its rows
    rows: Tensor  # distinct rows `[U]`, ascending, and their gradients `[U, num_columns]`
    sums: Tensor

    def read(self) -> tuple[Tensor, list[Tensor]]:
        """Its rows' weights in float32, and states."""
        slots, tables = self.pinned.slots(self.place, self.rows), self.pinned.tables
        with tables.memory():
            fused = tables.fused_tables()
            return fused.weights[self.place][slots].float(), [state[slots] for state in fused.states_of(self.place)]

    def write(self, rows: Tensor, weight: Tensor, states: Sequence[Tensor], step: int, optimizer: Optimizer) -> None:
        """Change some of its rows, bool `[U]`, to these weights, in float32, and states."""
        slots, tables = self.pinned.slots(self.place, self.rows)[rows], self.pinned.tables
        rounded = _rounded(self.table, weight, self.rows[rows], step, optimizer)
        with tables.memory():
            fused = tables.fused_tables()
            fused.weights[self.place][slots] = rounded
            for own, new in zip(fused.states_of(self.place), states, strict=True):
                own[slots] = new


# What a cut's update needs: whether each row's gradient is finite; gradients, weights and states, of whole rows or of
# its own columns; where its own columns are in these; whole rows' mean of squares, unless they are whole.
_Known = tuple[Tensor, Tensor, Tensor, list[Tensor], slice, Tensor | None]


class WholeRowUpdate:
    """Updates blocks of columns by whole rows, or their means of squares, when a backward pass ends.

    Another rank may wait for gradients that this one has yet to send, so nothing is exchanged before the pass ends.
    `group` are the ranks with columns of the tables, `blocks` those of all of them; a block's table is a number for a
    table, or for a run of its rows, the same on every rank.
    """

    def __init__(self, group: RankGroup, blocks: tuple[ColumnBlock, ...], optimizer: Optimizer) -> None:
        self._group, self._blocks = group, blocks
        self._optimizer = replace(optimizer, max_gradient=None)
        self._per_element = [state.per_element for state in optimizer.states]
        # Squares are added in a tree, neighbours in pairs: so many of them are together in all of a table's blocks.
        # Where an element depends on its row only in that all of the row is skipped, they are negative or of no use.
        self._by_squares = optimizer.max_norm is None and (optimizer.reads_squares or not optimizer.reads_whole_rows)
        self._together = defaultdict[int, int](lambda: 1 << 62)
        for block in blocks:
            self._together[block.table] = math.gcd(self._together[block.table], block.first_column)
        self._pending: list[list[_Cut]] = []  # of each lookup
        self._backward = NO_BACKWARD  # at whose end they are applied

    def add(self, cuts: list[_Cut]) -> None:
        """Keep gradients until the backward pass ends; outside of one, until `flush`."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # what a failed pass has left is void
            self._pending, self._backward = [], backward
        if not self._pending and backward != NO_BACKWARD:
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)
        self._pending.append(cuts)

    def discard(self) -> None:
        """Discard all kept gradients."""
        self._pending = []

    @torch.no_grad()
    def flush(self) -> None:
        """Apply all kept gradients; a collective. A table is updated as often as it was looked up, in order."""
        pending, self._pending = self._pending, []
        lookups = defaultdict[ColumnBlock, list[list[_Cut]]](list)  # of each table set
        for cuts in pending:
            lookups[cuts[0].block].append(cuts)
        try:
            for each in itertools.zip_longest(*lookups.values()):
                self._apply([cuts for cuts in each if cuts is not None])
        finally:
            for cuts in pending:
                cuts[0].pinned.release()

    def _apply(self, lookups: list[list[_Cut]]) -> None:
        """Exchange what the optimizer needs of other columns, step in float32, keep the own columns."""
        optimizer, cuts = self._optimizer, [cut for part in lookups for cut in part]
        before, counters = [cut.read() for cut in cuts], cuts[0].pinned.tables.counters
        own = [self._to_send(cut, *read) for cut, read in zip(cuts, before, strict=True)]
        blocks, mine = ([self._as_sent(block) for block in each] for each in (self._blocks, [c.block for c in cuts]))
        kind = "row squares" if self._by_squares else "row columns"
        received = exchange_columns(self._group, blocks, mine, own, kind)
        known = [self._known(cut, *read, received) for cut, read in zip(cuts, before, strict=True) if len(cut.rows)]
        step, updated = int(counters["step"]) + 1, [cut for cut in cuts if len(cut.rows)]
        for cut, (finite, *_) in zip(updated, known, strict=True):
            if optimizer.on_nonfinite == "raise" and not bool(finite.all()):
                raise gradient_not_finite(cut.table.name, int(cut.rows[~finite][0]))
        count_pass(counters["learning_rate"])
        changes = []  # which are made when all steps have been
        for cut, (finite, gradient, weight, states, columns, mean) in zip(updated, known, strict=True):
            rows = finite if optimizer.on_nonfinite == "skip" else torch.ones_like(finite)
            weight, states = step_by_torch(
                optimizer.name, weight[rows], [state.view(len(rows), -1)[rows] for state in states], gradient[rows],
                counters["learning_rate"], step, optimizer.hyperparameters, None if mean is None else mean[rows],
                cut.table.name,
            )  # fmt: skip
            pairs = zip(optimizer.states, states, strict=True)
            new = [state[:, columns] if spec.per_element else state.flatten() for spec, state in pairs]
            changes.append((cut, rows, weight[:, columns], new))
        for cut, rows, weight, new in changes:
            cut.write(rows, weight, new, step, optimizer)
            if num_skipped := int((~rows).sum()):
                cut.pinned.tables.counters["skipped"][cut.place] += num_skipped
                warn_of_skipped_rows(cut.table.name)
        for part in lookups:
            part[0].pinned.tables.counters["step"] += 1

    def _to_send(self, cut: _Cut, weight: Tensor, states: list[Tensor]) -> Tensor:
        """What single columns have, one under the other: gradient, weight, states. Or sums of squares of gradients."""
        optimizer, gradient = self._optimizer, cut.sums
        if not self._by_squares:
            return torch.cat([gradient, weight, *itertools.compress(states, self._per_element)])
        if optimizer.weight_decay and optimizer.weight_decay_mode == "l2":
            gradient = gradient + optimizer.weight_decay * weight
        together = self._together[cut.block.table]
        padded = torch.nn.functional.pad(gradient, (0, -gradient.shape[1] % together))
        squares = row_sum_by_torch(padded.square().unflatten(1, (-1, together))).squeeze(2)
        if optimizer.on_nonfinite != "ignore":  # no sum of squares is negative
            squares[~cut.sums.isfinite().all(1)] = -1.0
        return squares

    def _as_sent(self, block: ColumnBlock) -> ColumnBlock:
        """A block of columns, or of sums of columns."""
        together = self._together[block.table] if self._by_squares else 1
        return ColumnBlock(*block[:2], block.first_column // together, -(-block.num_columns // together))

    def _known(self, cut: _Cut, weight: Tensor, states: list[Tensor], received: dict[int, Tensor]) -> _Known:
        of_table = received[cut.block.table]
        if self._by_squares:
            dim = of_table.new_tensor(sum(b.num_columns for b in self._blocks if b.table == cut.block.table))
            finite, mean = ~(of_table < 0).any(1), row_sum_by_torch(of_table) / dim
            return finite, cut.sums, weight, states, slice(None), mean
        gradient, weight, *others = of_table.chunk(2 + sum(self._per_element))
        states = [others.pop(0) if each else own for own, each in zip(states, self._per_element, strict=True)]
        columns = slice(cut.block.first_column, cut.block.first_column + cut.block.num_columns)
        return gradient.isfinite().all(1), gradient, weight, states, columns, None


def _rounded(table: TableConfig, values: Tensor, rows: Tensor, step: int, optimizer: Optimizer) -> Tensor:
    """float32 rows in the table's dtype, rounded as the update of the whole table rounds them."""
    if table.dtype == torch.float32 or not rows.numel():
        return values.to(table.dtype)
    # A step of gradient descent from zero with learning rate -1 leaves the values themselves, rounded.
    device, spec = values.device, SGD(stochastic_rounding=optimizer.stochastic_rounding, on_nonfinite="ignore")
    narrowed = torch.zeros(values.shape, dtype=table.dtype, device=device)
    before, skipped = torch.full((), step - 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    fused = ops.FusedTables([narrowed], [], [before], [skipped], torch.full((), -1.0, device=device), "", [])
    _apply([table], spec, fused, RowSums([torch.arange(rows.numel(), device=device)], [values]), [rows])
    return narrowed
