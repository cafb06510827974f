"""Updates of rows that several ranks hold, by gradients gathered from all of them: exact, and the same bits everywhere.

Each rank sums the gradients of its distinct rows. *Replicas* gather these sums, and each applies the optimizer to the
sum over ranks, in their order. Where a table's *columns* are spread over ranks and the optimizer looks at whole rows
(a mean of squares, a norm), the ranks exchange what they have of the batch's rows, and each updates the whole rows,
which gives the bits of the uncut table, and keeps its own columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.gradients import Block, RowSums, exchange_columns, gather_sums
from tritonemb.comm.group import Group
from tritonemb.kernels.layout import (
    COLUMN_ORIGIN,
    FIRST_ROW,
    NUM_ROWS,
    ROW_DIM,
    ROW_ORIGIN,
    SEED,
    Layout,
    make_layout,
)
from tritonemb.kernels.rounding import narrow_reference, narrow_stochastic_reference, random16_reference
from tritonemb.nn.lookup import Lookup
from tritonemb.optimizers import SGD, Optimizer
from tritonemb.types import TableConfig

NO_BACKWARD = -1  # what autograd calls it when it is not running


class Columns(NamedTuple):
    """The ranks among which columns are spread.

    Attributes:
        blocks: of all those tables on all ranks; what a block calls its table is a number for a table, or for a run of
            its rows, the same on every rank.
    """

    group: Group
    blocks: tuple[Block, ...]


class Gathering(NamedTuple):
    """With whom gradients are gathered.

    Attributes:
        replicas: ranks with the same rows and columns, or None.
        average: sums over replicas are divided by this.
        whole_rows: does the update where other ranks have other columns of the same rows, or None.
        blocks: for that, the block of columns that each of the tables is.
    """

    replicas: Group | None
    average: int
    whole_rows: WholeRowUpdate | None = None
    blocks: tuple[Block, ...] = ()


def needs_whole_rows(optimizer: Optimizer) -> bool:
    """Whether what becomes of an element depends on others of its row."""
    by_row = any(not state.per_element for state in optimizer.states) or optimizer.name in ("lamb", "lars_sgd")
    return by_row or optimizer.max_norm is not None or optimizer.nonfinite == "skip"


@torch.no_grad()
def gathered_update_(
    gathering: Gathering,
    tables: Sequence[TableConfig],
    optimizer: Optimizer,
    fused: ops.Fused,
    grad: Tensor,
    lookup: Lookup,
) -> None:
    """One step on the rows of the batches of all these ranks, in place; a collective.

    Args:
        fused: the tables that this rank holds, their states and counters.
        grad, lookup: this rank's batch, and the gradient of what was looked up.
    """
    # What the bound is of is the gradient of the mean over replicas.
    bound = None if optimizer.max_gradient is None else optimizer.max_gradient * gathering.average
    sums = row_sums(grad, lookup, bound)
    optimizer = replace(optimizer, max_gradient=None)
    if gathering.replicas is not None:
        sums = gather_sums(gathering.replicas, sums)
        if gathering.average != 1:
            for of_table in sums.sums:
                of_table.mul_(1.0 / gathering.average)
    if gathering.whole_rows is None:
        _apply(tables, optimizer, fused, sums)
    else:
        if gathering.replicas is not None:
            sums = _add_equal_rows(tables, sums)
        gathering.whole_rows.add(
            [
                _Cut(block, table, weight, fused.states[index :: len(tables)], rows, of_rows)
                for index, (block, table, weight, rows, of_rows) in enumerate(
                    zip(gathering.blocks, tables, fused.weights, sums.rows, sums.sums, strict=True)
                )
            ],
            fused,
        )


def row_sums(grad: Tensor, lookup: Lookup, max_gradient: float | None = None) -> RowSums:
    """The distinct rows of each table, ascending, and the sum of each one's gradients. Waits for the device.

    It is a step of plain gradient descent from zero with learning rate -1, on tables of just these rows.
    """
    device, layout, groups = grad.device, lookup.layout, lookup.groups
    first_rows = layout.tables[:, FIRST_ROW].contiguous()
    rows = groups.rows[: int(groups.num_groups)]
    starts = torch.searchsorted(rows, first_rows)
    counts = torch.diff(starts, append=starts.new_tensor([rows.shape[0]]))
    sizes = counts.tolist()
    compact = layout.tables.clone()
    compact[:, FIRST_ROW], compact[:, NUM_ROWS] = starts, counts
    sums = [torch.zeros(n, dim, device=device) for n, dim in zip(sizes, compact[:, ROW_DIM].tolist(), strict=True)]
    _plain_update(
        sums, grad, lookup.offsets, lookup.sample_weights, max_gradient,
        groups._replace(rows=torch.arange(groups.rows.shape[0], device=device)),
        layout._replace(tables=compact, num_rows=rows.shape[0]),
    )  # fmt: skip
    own = (rows - first_rows.repeat_interleave(counts, output_size=rows.shape[0])).split(sizes)
    return RowSums(list(own), sums)


def _plain_update(
    tables: list[Tensor],
    grad: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    max_gradient: float | None,
    groups: ops.RowGroups,
    layout: Layout,
) -> None:
    """Add to each row the sum of its gradients."""
    spec, device = SGD(max_gradient=max_gradient, stochastic_rounding=False), grad.device
    counters = torch.zeros(1 + len(tables), dtype=torch.int64, device=device)
    ops.row_update_(
        tables, [], [counters[0]], [counters[1:]], torch.full((), -1.0, device=device), grad, offsets, sample_weights,
        spec.name, list(spec.hyperparameters), groups, layout,
    )  # fmt: skip


def _as_batch(tables: Sequence[TableConfig], sums: RowSums) -> tuple[Tensor, Tensor, Tensor, Layout]:
    """Rows and their gradients as an unpooled batch of one sample: values, offsets, gradient, layout."""
    named = [TableConfig(str(n), t.num_embeddings, t.embedding_dim, dtype=t.dtype) for n, t in enumerate(tables)]
    values = torch.cat(sums.rows)
    layout = make_layout(named, [table.name for table in named], False, values.device)
    random = [[table.seed, table.row_origin, table.column_origin] for table in tables]
    layout.tables[:, [SEED, ROW_ORIGIN, COLUMN_ORIGIN]] = torch.tensor(random, device=values.device)
    layout = layout._replace(table_names="\n".join(table.name for table in tables))
    offsets = torch.tensor([0, *[rows.shape[0] for rows in sums.rows]], device=values.device).cumsum(0)
    widest = max(of_table.shape[1] for of_table in sums.sums)
    grad = torch.cat([torch.nn.functional.pad(s, (0, widest - s.shape[1])) for s in sums.sums])
    return values, offsets, grad, layout


def _apply(tables: Sequence[TableConfig], optimizer: Optimizer, fused: ops.Fused, sums: RowSums) -> None:
    """The optimizer's step by gradients of rows; a row's gradients are added in their order."""
    values, offsets, grad, layout = _as_batch(tables, sums)
    ops.row_update_(
        fused.weights, fused.states, fused.steps, fused.skipped, fused.learning_rate, grad, offsets, None,
        optimizer.name, list(optimizer.hyperparameters), ops.row_groups(values, offsets, layout), layout,
    )  # fmt: skip


def _add_equal_rows(tables: Sequence[TableConfig], sums: RowSums) -> RowSums:
    """Rows that came from several ranks, once."""
    values, offsets, grad, layout = _as_batch(tables, sums)
    return row_sums(grad, Lookup(values, offsets, None, ops.row_groups(values, offsets, layout), layout))


class _Cut(NamedTuple):
    """A block of a table's columns, and the gradients of its rows.

    Attributes:
        table: the block as a table.
        weight, states: of the block.
        rows, sums: distinct rows `[U]`, and their gradients `[U, num_columns]`.
    """

    block: Block
    table: TableConfig
    weight: Tensor
    states: list[Tensor]
    rows: Tensor
    sums: Tensor


class WholeRowUpdate:
    """Updates blocks of columns by whole rows, once all of a backward pass's gradients are there.

    Another rank may wait for gradients that this one has yet to send, so nothing is exchanged before the pass ends.
    """

    def __init__(self, columns: Columns, optimizer: Optimizer) -> None:
        self._columns = columns
        self._optimizer = replace(optimizer, max_gradient=None)
        self._waiting: list[tuple[list[_Cut], ops.Fused]] = []
        self._backward = NO_BACKWARD  # that they wait for the end of

    def add(self, cuts: list[_Cut], fused: ops.Fused) -> None:
        """Keep gradients until the backward pass ends; outside of one, until `flush`."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # what is left of a pass that has failed is void
            self._waiting, self._backward = [], backward
        if not self._waiting and backward != NO_BACKWARD:
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)
        self._waiting.append((cuts, fused))

    def discard(self) -> None:
        """Forget what waits."""
        self._waiting = []

    @torch.no_grad()
    def flush(self) -> None:
        """Apply what waits; a collective. Tables that were looked up several times are updated as often, in order."""
        waiting, self._waiting = self._waiting, []
        rounds: list[list[tuple[list[_Cut], ops.Fused]]] = []
        times: Counter[Block] = Counter()
        for part in waiting:
            block = part[0][0].block
            if times[block] == len(rounds):
                rounds.append([])
            rounds[times[block]].append(part)
            times[block] += 1
        for each in rounds:
            self._apply(each)

    def _apply(self, waiting: list[tuple[list[_Cut], ops.Fused]]) -> None:
        """Exchange columns, step on whole rows in float32, keep one's own columns."""
        cuts = [cut for part, _ in waiting for cut in part]
        per_element = [state.per_element for state in self._optimizer.states]
        # What belongs to single columns, one under the other: gradient, weight, states.
        own = [
            torch.cat(
                [
                    cut.sums,
                    cut.weight[cut.rows].float(),
                    *[state[cut.rows] for state, each in zip(cut.states, per_element, strict=True) if each],
                ]
            )
            for cut in cuts
        ]
        whole = exchange_columns(self._columns.group, self._columns.blocks, [cut.block for cut in cuts], own)
        by_table = {cut.block.table: cut for cut in cuts if cut.rows.numel()}
        fused, skipped = waiting[0][1], torch.zeros(len(by_table), dtype=torch.int64, device=own[0].device)
        if by_table:
            held = {table: whole[table].chunk(2 + sum(per_element)) for table in by_table}
            stepped = self._step(by_table, held, fused._replace(skipped=[skipped]))
            step = int(fused.steps[0]) if any(cut.table.dtype != torch.float32 for cut in cuts) else 0
            for cut in cuts:
                if cut.block.table in by_table:
                    _keep(cut, held[cut.block.table][0], stepped[cut.block.table], per_element, step, self._optimizer)
        else:
            fused.steps[0] += 1
        counts = dict(zip(by_table, skipped, strict=True))
        for part, of_part in waiting:
            if of_part is not fused:
                of_part.steps[0] += 1
            for place, cut in enumerate(part):
                of_part.skipped[0][place] += counts.get(cut.block.table, 0)

    def _step(
        self, cuts: dict[int, _Cut], held: dict[int, tuple[Tensor, ...]], fused: ops.Fused
    ) -> dict[int, tuple[Tensor, list[Tensor]]]:
        """The optimizer's step on the whole rows of each table: their weights and states after it."""
        tables = [TableConfig(cut.table.name, *held[table][0].shape) for table, cut in cuts.items()]
        gradients = [held[table][0].contiguous() for table in cuts]
        _refuse_nonfinite(self._optimizer, tables, [cut.rows for cut in cuts.values()], gradients)
        weights = [held[table][1].contiguous() for table in cuts]
        states: list[list[Tensor]] = []
        place = 2
        for index, state in enumerate(self._optimizer.states):
            if state.per_element:
                states.append([held[table][place].contiguous() for table in cuts])
                place += 1
            else:
                states.append([cut.states[index][cut.rows] for cut in cuts.values()])
        sums = RowSums([torch.arange(g.shape[0], device=g.device) for g in gradients], gradients)
        in_float32 = replace(self._optimizer, stochastic_rounding=False, nonfinite=self._nonfinite())
        flat = [tensor for of_state in states for tensor in of_state]
        _apply(tables, in_float32, fused._replace(weights=weights, states=flat), sums)
        return {table: (weights[index], [of_state[index] for of_state in states]) for index, table in enumerate(cuts)}

    def _nonfinite(self) -> Any:
        return "skip" if self._optimizer.nonfinite == "skip" else "propagate"  # "raise" has been looked after


def _keep(
    cut: _Cut,
    gradient: Tensor,
    stepped: tuple[Tensor, list[Tensor]],
    per_element: Sequence[bool],
    step: int,
    optimizer: Optimizer,
) -> None:
    """Write a block's own columns of whole rows."""
    weight, states = stepped
    columns = slice(cut.block.first_column, cut.block.first_column + cut.block.num_columns)
    changed = ~_untouched(optimizer, gradient)
    rows = cut.rows[changed]
    cut.weight[rows] = _narrow(cut.table, weight[changed][:, columns], rows, step, optimizer)
    for own, new, each in zip(cut.states, states, per_element, strict=True):
        own[cut.rows] = new[:, columns] if each else new


def _untouched(optimizer: Optimizer, gradient: Tensor) -> Tensor:
    """Rows that are left as they are because of their gradient."""
    if optimizer.nonfinite != "skip":
        return torch.zeros(gradient.shape[0], dtype=torch.bool, device=gradient.device)
    return ~gradient.isfinite().all(1)


def _refuse_nonfinite(
    optimizer: Optimizer, tables: Sequence[TableConfig], rows: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    if optimizer.nonfinite != "raise":
        return
    from tritonemb.kernels.errors import gradient_not_finite

    for table, own, gradient in zip(tables, rows, gradients, strict=True):
        bad = (~gradient.isfinite().all(1)).nonzero()
        if bad.numel():
            raise gradient_not_finite(table.name, int(own[bad[0]]))


def _narrow(table: TableConfig, values: Tensor, rows: Tensor, step: int, optimizer: Optimizer) -> Tensor:
    """float32 rows in the table's dtype, rounded as the update of the whole table rounds them."""
    if table.dtype == torch.float32:
        return values
    if not optimizer.stochastic_rounding:
        return narrow_reference(values, table.dtype)
    noise = random16_reference(table.seed, rows + table.row_origin, step, table.embedding_dim, table.column_origin)
    return narrow_stochastic_reference(values, table.dtype, noise)
