"""Put one lookup in place of a group of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tritonemb.compiler.batch import Batch, make_batch, make_member
from tritonemb.compiler.groups import Group, divides_later, result_dtype
from tritonemb.compiler.lookups import Lookup, kind_of
from tritonemb.compiler.order import ancestors, dependencies
from tritonemb.compiler.report import Fused
from tritonemb.compiler.results import find_runs, in_order, use_columns, use_rows, use_runs
from tritonemb.compiler.values import Writer, value_of
from tritonemb.layout import MEAN, SUM, Layout, TableRow, lines_of
from tritonemb.ops.accumulate import NOT_ACCUMULATING
from tritonemb.types import seed_of


def merge(gm: GraphModule, group: Group) -> Fused:
    """Replace a group's lookups by one; the graph computes the same."""
    first = _bring_inputs_before(group)
    write = Writer(gm, first)
    runs = find_runs(gm, group) if group.pooled else []
    lookups = in_order(group, runs)
    members = [make_member(lookup, write) for lookup in lookups]
    batch = make_batch(group, members, write)
    tables = list({lookup.weight: None for lookup in lookups})
    layout = _write_layout(lookups, tables, group.pooled, write)
    out = _look_up(group, lookups, tables, batch, layout, write)
    if group.pooled:
        use_runs(runs, lookups, out, write)
        use_columns(members, out, write)
    else:
        use_rows(gm, members, out, write)
    for lookup in lookups:
        for node in lookup.results:
            if node is not lookup.node:
                gm.graph.erase_node(node)
        gm.graph.erase_node(lookup.node)
    return Fused(_in_words(lookups, len(tables), group), tuple(lookup.feature for lookup in group.lookups))


def _bring_inputs_before(group: Group) -> Node:
    """Move what the group's lookups need before the first of them, which is returned."""
    nodes = group.stretch.nodes
    place = {node: index for index, node in enumerate(nodes)}
    first = min((lookup.node for lookup in group.lookups), key=place.__getitem__)
    needed = ancestors([lookup.node for lookup in group.lookups], dependencies(nodes))
    for node in nodes[place[first] + 1 :]:
        if node in needed:
            first.prepend(node)
    for node in [node for node in first.graph.nodes if node.op == "get_attr" and first < node]:
        first.prepend(node)
    return first


def _write_layout(lookups: Sequence[Lookup], tables: list[Node], pooled: bool, write: Writer) -> Layout:
    """Every lookup is a key of its own; a table's rows are trained once, whoever looks them up."""
    device = value_of(tables[0]).device
    name_of = {lookup.weight: lookup.table for lookup in lookups}
    shapes = [[int(size) for size in value_of(table).shape] for table in tables]
    first_rows = [0, *accumulate(rows for rows, _ in shapes)]
    # The bits of a fused update's stochastic rounding do not depend on what was merged.
    seed_name = {lookup.weight: lookup.optimizer.seed_name if lookup.optimizer else "" for lookup in lookups}
    seeds = [seed_of(seed_name[table]) for table in tables]
    columns = [0, *accumulate(lookup.dim for lookup in lookups)] if pooled else [0] * len(lookups)
    place = {table: index for index, table in enumerate(tables)}
    uses = [
        [place[lookup.weight], column, lookup.dim, MEAN if lookup.mean and not divides_later(lookup) else SUM]
        for lookup, column in zip(lookups, columns, strict=False)
    ]
    rows = [
        TableRow(first, num_rows, dim, seed)
        for first, (num_rows, dim), seed in zip(first_rows, shapes, seeds, strict=False)
    ]
    layout = Layout(
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(uses, dtype=torch.int64, device=device),
        torch.arange(len(lookups) + 1, dtype=torch.int64, device=device),
        lines_of(name_of[table] for table in tables),
        lines_of(lookup.feature for lookup in lookups),
        1,
        first_rows[-1],
        columns[-1] if pooled else lookups[0].dim,
        pooled,
    )
    tensors: dict[str, Any] = {
        name: write.constant(getattr(layout, name), name) for name in ("tables", "lookups", "key_starts")
    }
    return layout._replace(**tensors)


def _look_up(
    group: Group, lookups: Sequence[Lookup], tables: list[Node], batch: Batch, layout: Layout, write: Writer
) -> Node:
    """The one lookup, `[B, width]` or `[N, dim]`."""
    lookup = lookups[0]
    dtype = result_dtype(lookup)
    if lookup.optimizer is None:
        return write.call(
            torch.ops.tritonemb.embedding_bag.default, tables, batch.values, batch.offsets, batch.sample_weights,
            batch.trained, group.checked, dtype, *layout,
        )  # fmt: skip
    optimizer_of = {one.weight: one.optimizer for one in lookups}
    optimizers: list[Any] = [optimizer_of[table] for table in tables]
    states = [state for states in zip(*(one.states for one in optimizers), strict=True) for state in states]
    device = value_of(batch.values).device
    pending = write.constant(torch.zeros((), dtype=torch.int64, device=device), "pending")
    groups = write.call(torch.ops.tritonemb.row_groups.default, batch.trained or batch.values, batch.offsets, *layout)
    return write.call(
        torch.ops.tritonemb.embedding_bag_fused.default, tables, states, [one.step for one in optimizers],
        [one.skipped for one in optimizers], lookup.optimizer.learning_rate, pending, lookup.optimizer.name,
        list(lookup.optimizer.hyperparameters), NOT_ACCUMULATING, batch.values, batch.offsets, batch.sample_weights,
        group.checked, dtype, *(write.item(groups, index) for index in range(4)), *layout,
    )  # fmt: skip


def _in_words(lookups: Sequence[Lookup], num_tables: int, group: Group) -> str:
    kinds = sorted({kind_of(lookup.node) for lookup in lookups})
    what = "lookup with a fused optimizer" if lookups[0].optimizer else "lookup"
    tables = "table" if num_tables == 1 else "tables"
    form = "pooled, columns side by side" if group.pooled else "a row for each id"
    return f"{len(lookups)} {' and '.join(kinds)} of {num_tables} {tables} became one {what} ({form})"
