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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.gradient_exchange import ColumnBlock, RowSums, SumsExchange, all_gather_rows, exchange_columns
from tritonemb.comm.group import RankGroup
from tritonemb.errors import gradient_not_finite
from tritonemb.kernels.optimizers import step_by_torch
from tritonemb.kernels.triton_utils import row_sum_by_torch
from tritonemb.layout import COLUMN_ORIGIN, FIRST_ROW, ROW_DIM, ROW_IDS, ROW_ORIGIN, SEED, Layout, lines_of, make_layout
from tritonemb.ops.row_update import count_pass
from tritonemb.optimizers import SGD, Optimizer
from tritonemb.tables.lookup import FindReplicaRows, Lookup
from tritonemb.tables.table_set import LocalUpdate, TableSet
from tritonemb.types import TableConfig

NO_BACKWARD = -1  # what autograd calls it when it is not running


def needs_whole_rows(optimizer: Optimizer) -> bool:
    """Whether the update of an element depends on others of its row."""
    return optimizer.reads_whole_rows or optimizer.max_norm is not None or optimizer.nonfinite == "skip"


def needs_squares(optimizer: Optimizer) -> bool:
    """Whether all that it needs of a row's other elements is the mean of squares of their gradients."""
    return optimizer.reads_squares and optimizer.max_norm is None and optimizer.nonfinite != "skip"


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

    def step(self, tables: TableSet, grad: Tensor, lookup: Lookup, pins: Sequence[Lookup] = ()) -> None:
        _update(self, PinnedRows(tables, pins), grad, lookup)


class PinnedRows:
    """The rows of a table set of shards, for one update; those of cached tables are in slots that batches have pinned.

    Rows have the same numbers on every rank; their slots may differ from rank to rank. Nothing here waits for another
    rank. `pins`: of the batches whose rows are updated; this object releases them.
    """

    def __init__(self, tables: TableSet, pins: Sequence[Lookup] = ()) -> None:
        assert tables.optimizer is not None
        self.tables, self.configs, self.optimizer, self._pins = tables, tables.configs, tables.optimizer, pins
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


@torch.no_grad()
def _update(replica_group: ReplicatedUpdate, pinned: PinnedRows, grad: Tensor, lookup: Lookup) -> None:
    """One step on the rows of the batches of all these ranks, in place, which are unpinned then; a collective."""
    tables, optimizer, whole_rows = pinned.configs, pinned.optimizer, replica_group.whole_rows
    try:
        # The bound is of the gradient of the mean over replicas.
        bound = None if optimizer.max_gradient is None else optimizer.max_gradient * replica_group.average
        sums = _with_replicas(replica_group, tables, pinned.in_rows(row_sums(grad, lookup, bound)))
        optimizer = replace(optimizer, max_gradient=None)
        if whole_rows is not None:
            of_tables = enumerate(zip(replica_group.blocks, tables, sums.rows, sums.sums, strict=True))
            whole_rows.add([_Cut(block, n, table, pinned, rows, own) for n, (block, table, rows, own) in of_tables])
            return
        slots = RowSums([pinned.slots(table, rows) for table, rows in enumerate(sums.rows)], sums.sums)
        with pinned.tables.memory():
            _apply(tables, optimizer, pinned.tables.fused_tables(), slots, pinned.row_ids())
    except BaseException:
        pinned.release()
        raise
    pinned.release()


def _with_replicas(replica_group: ReplicatedUpdate, tables: Sequence[TableConfig], sums: RowSums) -> RowSums:
    """The gradients of the rows of all replicas' batches; a collective."""
    if replica_group.average == 1:
        return sums
    sums = replica_group.replicas(sums)
    for of_table in sums.sums:
        of_table.mul_(1.0 / replica_group.average)
    if replica_group.whole_rows is None:
        return sums
    values, offsets, grad, layout = _as_batch(tables, sums)  # rows that came from several ranks, once
    return row_sums(grad, Lookup(values, offsets, None, ops.row_groups(values, offsets, layout), layout))


def row_sums(grad: Tensor, lookup: Lookup, max_gradient: float | None = None) -> RowSums:
    """The distinct rows of each table, ascending, and the sum of each one's gradients. Waits for the device."""
    layout, groups = lookup.layout, lookup.groups
    first_rows = layout.tables[:, FIRST_ROW].contiguous()
    rows = groups.rows[: int(groups.num_groups)]
    starts = torch.searchsorted(rows, first_rows)
    counts = torch.diff(starts, append=starts.new_tensor([rows.shape[0]]))
    sizes = counts.tolist()
    dims, bound = layout.tables[:, ROW_DIM].tolist(), torch.inf if max_gradient is None else max_gradient
    sums = [torch.zeros(n, dim, device=grad.device) for n, dim in zip(sizes, dims, strict=True)]
    ops.row_gradients_(
        sums, grad, lookup.offsets, lookup.sample_weights, groups, layout, compact=True, max_gradient=bound
    )
    own = (rows - first_rows.repeat_interleave(counts, output_size=rows.shape[0])).split(sizes)
    return RowSums(list(own), sums)


def _as_batch(
    tables: Sequence[TableConfig], sums: RowSums, row_ids: Sequence[Tensor | None] = ()
) -> tuple[Tensor, Tensor, Tensor, Layout]:
    """Rows and their gradients as an unpooled batch of one sample: values, offsets, gradient, layout.

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
            layout.tables[table, ROW_IDS] = of_slots.data_ptr()
    layout = layout._replace(table_names=lines_of(table.name for table in tables))
    offsets = torch.tensor([0, *[rows.shape[0] for rows in sums.rows]], device=values.device).cumsum(0)
    widest = max(of_table.shape[1] for of_table in sums.sums)
    grad = torch.cat([torch.nn.functional.pad(s, (0, widest - s.shape[1])) for s in sums.sums])
    return values, offsets, grad, layout


def _apply(
    tables: Sequence[TableConfig], optimizer: Optimizer, fused: ops.FusedTables, sums: RowSums,
    row_ids: Sequence[Tensor | None] = (),
) -> None:  # fmt: skip
    """The optimizer's step by gradients of rows; a row's gradients are added in their order."""
    values, offsets, grad, layout = _as_batch(tables, sums, row_ids)
    fused = fused._replace(optimizer=optimizer.name, hyperparameters=list(optimizer.hyperparameters))
    ops.row_update_(fused, grad, offsets, None, values, layout)


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

    def check_finite(self, finite: Tensor) -> None:
        """Raise ValueError unless the gradients of all of its rows are; `[U]`, bool."""
        bad = (~finite).nonzero()
        if bad.numel():
            raise gradient_not_finite(self.table.name, int(self.rows[bad[0]]))

    def write(self, whole: "_WholeRows", columns: slice, step: int, optimizer: Optimizer) -> None:
        """Keep some columns of the rows, but for the weights of those that were skipped for their gradient."""
        changed = torch.ones_like(self.rows, dtype=torch.bool)
        if optimizer.nonfinite == "skip":
            changed = whole.gradient.isfinite().all(1)
        weights = _rounded(self.table, whole.weight[changed][:, columns], self.rows[changed], step, optimizer)
        slots, tables = self.pinned.slots(self.place, self.rows), self.pinned.tables
        with tables.memory():
            fused = tables.fused_tables()
            fused.weights[self.place][slots[changed]] = weights
            for spec, own, new in zip(optimizer.states, fused.states_of(self.place), whole.states, strict=True):
                own[slots] = new[:, columns] if spec.per_element else new.flatten()


class _WholeRows(NamedTuple):
    """The rows of a cut with all of their columns, or with its own."""

    cut: _Cut
    gradient: Tensor
    weight: Tensor
    states: list[Tensor]


class WholeRowUpdate:
    """Updates blocks of columns by whole rows, or their means of squares, when a backward pass ends.

    Another rank may wait for gradients that this one has yet to send, so nothing is exchanged before the pass ends.

    Args:
        group: the ranks with columns of the tables.
        blocks: of all those tables on all ranks; a block's table is a number for a table, or for a run of its rows, the
            same on every rank.
    """

    def __init__(self, group: RankGroup, blocks: tuple[ColumnBlock, ...], optimizer: Optimizer) -> None:
        self._group, self._blocks = group, blocks
        self._optimizer = replace(optimizer, max_gradient=None)
        self._dims: defaultdict[int, int] = defaultdict(int)
        # Squares are added in a tree, neighbours in pairs. So many neighbours are together in all of a table's blocks.
        self._together: defaultdict[int, int] = defaultdict(lambda: 1 << 62)
        for table, _, first, width in blocks:
            self._dims[table] += width
            self._together[table] = math.gcd(self._together[table], first)
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
        """Step on rows in float32, and count steps and rows that were skipped."""
        cuts = [cut for part in lookups for cut in part]
        of_lookups = [part[0].pinned.tables.fused_tables() for part in lookups]
        step = self._step_by_squares if needs_squares(self._optimizer) else self._step_whole
        counts = step(cuts, [cut.read() for cut in cuts], of_lookups[0])
        for part, fused in zip(lookups, of_lookups, strict=True):
            fused.steps[0] += 1
            for cut in part:
                fused.skipped[0][cut.place] += counts.get(cut.block.table, 0)

    def _step_by_squares(
        self, cuts: list[_Cut], before: list[tuple[Tensor, list[Tensor]]], fused: ops.FusedTables
    ) -> dict[int, Tensor]:
        """Exchange sums of squares, step on the own columns."""
        optimizer, h = self._optimizer, self._optimizer.hyperparameters
        decay = h.weight_decay if optimizer.weight_decay_mode == "l2" else 0.0
        own = []
        for cut, (weight, _) in zip(cuts, before, strict=True):
            g, together = cut.sums + decay * weight if decay else cut.sums, self._together[cut.block.table]
            padded = torch.nn.functional.pad(g, (0, -g.shape[1] % together))
            own.append(row_sum_by_torch(padded.square().unflatten(1, (-1, together))).squeeze(2))
            if optimizer.nonfinite == "raise":  # no sum of squares is negative
                own[-1][~cut.sums.isfinite().all(1)] = -1.0
        mine = [self._in_sums(cut.block) for cut in cuts]
        squares = exchange_columns(self._group, [*map(self._in_sums, self._blocks)], mine, own, "row squares")
        for cut in cuts if optimizer.nonfinite == "raise" else ():
            cut.check_finite(~(squares[cut.block.table] < 0).any(1))
        count_pass(fused.learning_rate)
        step = int(fused.steps[0]) + 1
        for cut, (weight, states) in zip(cuts, before, strict=True):
            if cut.rows.numel():
                states = [state.view(cut.rows.numel(), -1) for state in states]
                dim = weight.new_tensor(self._dims[cut.block.table])
                mean = row_sum_by_torch(squares[cut.block.table]) / dim
                new = step_by_torch(optimizer.name, weight, states, cut.sums, fused.learning_rate, step, h, mean)
                cut.write(_WholeRows(cut, cut.sums, *new), slice(None), step, optimizer)
        return {}

    def _in_sums(self, block: ColumnBlock) -> ColumnBlock:
        """A block of columns as one of sums of columns."""
        together = self._together[block.table]
        return ColumnBlock(*block[:2], block.first_column // together, -(-block.num_columns // together))

    def _step_whole(
        self, cuts: list[_Cut], before: list[tuple[Tensor, list[Tensor]]], fused: ops.FusedTables
    ) -> dict[int, Tensor]:
        """Exchange columns, step on whole rows, keep the own columns; how many were skipped, by table."""
        per_element = [state.per_element for state in self._optimizer.states]
        # What single columns have, one under the other: gradient, weight, states.
        own = [
            torch.cat([cut.sums, weight, *itertools.compress(states, per_element)])
            for cut, (weight, states) in zip(cuts, before, strict=True)
        ]
        columns = exchange_columns(self._group, self._blocks, [cut.block for cut in cuts], own)
        whole: dict[int, _WholeRows] = {}
        for cut, (_, states) in zip(cuts, before, strict=True):
            if cut.rows.numel():
                gradient, weight, *others = columns[cut.block.table].chunk(2 + sum(per_element))
                of_rows = [others.pop(0) if each else own for own, each in zip(states, per_element, strict=True)]
                whole[cut.block.table] = _WholeRows(cut, gradient, weight, of_rows)
        skipped = torch.zeros(len(whole), dtype=torch.int64, device=own[0].device)
        if whole:
            steps = [fused.steps[0].clone()]
            self._step(list(whole.values()), fused._replace(skipped=[skipped], steps=steps))
            step = int(steps[0]) if any(cut.table.dtype != torch.float32 for cut in cuts) else 0
            for cut in cuts:
                if cut.block.table in whole:
                    own_columns = slice(cut.block.first_column, cut.block.first_column + cut.block.num_columns)
                    cut.write(whole[cut.block.table], own_columns, step, self._optimizer)
        return dict(zip(whole, skipped, strict=True))

    def _step(self, whole: list[_WholeRows], fused: ops.FusedTables) -> None:
        tables = [TableConfig(rows.cut.table.name, *rows.weight.shape) for rows in whole]
        if self._optimizer.nonfinite == "raise":
            for rows in whole:
                rows.cut.check_finite(rows.gradient.isfinite().all(1))
        nonfinite: Any = "skip" if self._optimizer.nonfinite == "skip" else "propagate"  # "raise" has been checked
        in_float32 = replace(self._optimizer, stochastic_rounding=False, nonfinite=nonfinite)
        gradients, weights = [rows.gradient for rows in whole], [rows.weight for rows in whole]
        states = [state for of_state in zip(*(rows.states for rows in whole), strict=True) for state in of_state]
        sums = RowSums([torch.arange(g.shape[0], device=g.device) for g in gradients], gradients)
        _apply(tables, in_float32, fused._replace(weights=weights, states=states), sums)


def _rounded(table: TableConfig, values: Tensor, rows: Tensor, step: int, optimizer: Optimizer) -> Tensor:
    """float32 rows in the table's dtype, rounded as the update of the whole table rounds them."""
    if table.dtype == torch.float32 or not rows.numel():
        return values.to(table.dtype)
    # A step of gradient descent from zero with learning rate -1 leaves the values themselves, rounded.
    device, spec = values.device, SGD(stochastic_rounding=optimizer.stochastic_rounding)
    narrowed = torch.zeros(values.shape, dtype=table.dtype, device=device)
    before, skipped = torch.full((), step - 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    fused = ops.FusedTables([narrowed], [], [before], [skipped], torch.full((), -1.0, device=device), "", [])
    _apply([table], spec, fused, RowSums([torch.arange(rows.numel(), device=device)], [values]), [rows])
    return narrowed
