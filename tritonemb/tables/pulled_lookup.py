"""Lookup in tables on embedding servers: a batch pulls the rows that it needs, and pushes their gradients.

A batch is deduplicated first: each distinct id of a table crosses the network once, and so does the sum of its
gradients.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tritonemb import ops
from tritonemb.errors import gradient_not_finite, warn_of_skipped_rows
from tritonemb.jagged import Features, KeyedJaggedTensor
from tritonemb.layout import FIRST_ROW, NUM_ROWS, Layout
from tritonemb.ops.row_update import MicroBatch
from tritonemb.tables.batch import RowBatch, checked_batch, find_invalid, find_positions, row_sums
from tritonemb.tables.cache import PinState
from tritonemb.tables.lookup import look_up_prepared
from tritonemb.tables.lookup_tables import DeviceLookup, Groups, LookupTables, PreparedBatch, split_lookups
from tritonemb.tables.server_table import Pull, RowService, ServerTable

Deduplicated = tuple[RowBatch, Sequence[Tensor]]  # values index the ids: per table, int64 `[n]`, distinct and ascending


class PulledBatch(PreparedBatch):
    """A batch whose values index the rows that it has pulled, per table. For `ids` see `Deduplicated`."""

    def __init__(self, keys: Sequence[str], rows: RowBatch, training: bool, ids: Sequence[Tensor], pull: Pull) -> None:
        super().__init__(keys, rows, training)
        self.ids, self.pull = ids, pull
        self.state = PinState.PINNED

    @property
    def is_released(self) -> bool:
        return self.state is PinState.RELEASED

    def acquire(self) -> bool:
        """Use the batch; return False if it was used before."""
        if self.state is not PinState.PINNED:
            return False
        self.state = PinState.ACQUIRED
        return True

    def read(self, tables: LookupTables) -> Tensor:
        rows, device = self.rows, self.rows.values.device
        weights = [table_rows.to(device, non_blocking=True) for table_rows in self.pull.rows()]
        batch = rows.values, rows.offsets, rows.sample_weights, rows.layout
        return ops.embedding_bag(weights, *batch, False, tables.dtype_of(weights))

    def apply(self, tables: LookupTables, grad: Tensor) -> None:
        self.push(tables, grad)
        tables.counters["step"] += 1

    @torch.no_grad()
    def push(self, tables: LookupTables, grad: Tensor) -> None:
        """Push the sums of a batch's gradients.

        With `on_nonfinite="raise"` a sum that is not finite raises ValueError and nothing is pushed; with "skip" such
        rows are counted, and the servers do not update them.
        """
        optimizer = tables.optimizer
        assert optimizer is not None
        _, sums = row_sums(grad, self.rows, optimizer.max_gradient)
        for number, table_sums in enumerate(sums if optimizer.on_nonfinite != "ignore" else ()):
            if bool(table_sums.sum().isfinite()):  # a cheap test; a finite sum that overflows is checked per row
                continue
            config, invalid = tables.configs[number], ~table_sums.isfinite().all(1).cpu()
            if optimizer.on_nonfinite == "raise" and invalid.any():
                raise gradient_not_finite(config.name, int(self.ids[number][invalid][0]))
            if num_skipped := int(invalid.sum()):
                tables.counters["skipped"][number] += num_skipped
                warn_of_skipped_rows(config.name)
        self.state = PinState.RELEASED
        self.pull.push([table_sums.cpu() for table_sums in sums], tables.current_learning_rate)

    def release(self) -> None:
        """Push no gradients for a batch that was pulled for training but not trained: the servers wait for its push."""
        was_released, self.state = self.is_released, PinState.RELEASED
        if self.training and not was_released:
            self.pull.push(None, 0.0)

    def __del__(self) -> None:
        self.release()


class PulledLookup(DeviceLookup):
    """Lookup in tables on servers that apply the optimizer."""

    moves_rows = True

    @_disable_dynamo
    def prepare(self, tables: LookupTables, features: Features, occurrences: Tensor | None) -> PulledBatch:
        """Request the rows of a batch from the servers. ValueError for ids out of range, before a request is sent."""
        batch, service = checked_batch(features), cast(ServerTable, tables.tables[0]).require_service()
        if tables.bounds_check == "raise" and (problem := find_invalid(tables.configs, batch)):
            raise problem
        batch, layout = split_lookups(tables, batch)
        training = tables.trains()
        with torch.no_grad(), torch.inference_mode(False):
            any_dynamic = any(config.is_dynamic for config in tables.configs)
            rows, all_ids = (_deduplicate if any_dynamic else _deduplicate_rows)(tables, batch, layout)
            occurrences = rows.groups.starts[: rows.layout.num_rows + 1].diff().cpu()
            counts = occurrences.split([ids.numel() for ids in all_ids])
            pull = cast(RowService, service).pull(all_ids, counts, training)
            return PulledBatch(batch.keys(), rows, training, all_ids, pull)

    @_disable_dynamo
    def look_up(
        self, tables: LookupTables, features: Features, groups: Groups | None, occurrences: Tensor | None
    ) -> Tensor:
        assert groups is None or isinstance(groups, PulledBatch)
        # Wait for the pull, or start one now.
        if groups is None or not groups.acquire():
            groups = self.prepare(tables, features, occurrences)
            groups.acquire()
        if tables.trains():
            return look_up_prepared(tables, groups)
        result = groups.read(tables)  # differentiable by per-sample weights
        groups.release()
        return result

    @torch.no_grad()
    def apply_accumulated(self, tables: LookupTables, gradients: list[MicroBatch]) -> None:
        """Push the gradients of the micro-batches, which servers apply one by one."""
        for batch, pulled in zip(gradients, tables.accumulated.trained, strict=True):
            cast(PulledBatch, pulled).push(tables, batch.grad)
        tables.counters["step"] += 1


def _deduplicate_rows(_: LookupTables, batch: KeyedJaggedTensor, layout: Layout) -> Deduplicated:
    """Replace ids by indices of the batch's distinct rows, for static tables. Waits for the device."""
    groups = ops.row_groups(batch.values(), batch.offsets(), layout)
    first_rows, num_rows = layout.tables[:, FIRST_ROW].contiguous(), int(groups.num_groups)
    rows, positions = groups.rows[:num_rows], torch.arange(groups.rows.numel(), device=first_rows.device)
    starts = torch.searchsorted(rows, first_rows)
    sizes = starts.diff(append=starts.new_tensor([num_rows]))
    by_group = torch.full_like(positions, -1)
    by_group[:num_rows] = positions[:num_rows] - starts.repeat_interleave(sizes, output_size=num_rows)
    ids = (rows - first_rows.repeat_interleave(sizes, output_size=num_rows)).cpu().split(sizes.tolist())
    values = ops.row_cache_translate(by_group, groups.starts, groups.order, groups.num_groups)
    pulled_layout = _pulled_layout(layout, sizes, num_rows)
    groups = groups._replace(rows=positions)
    return RowBatch(values, batch.offsets(), batch.weights_or_none(), groups, pulled_layout), ids


def _deduplicate(tables: LookupTables, batch: KeyedJaggedTensor, layout: Layout) -> Deduplicated:
    """Replace ids by indices of the batch's distinct ids, for tables some of which are dynamic."""
    positions = find_positions(batch, tables.table_keys[tuple(batch.keys())])
    values, all_ids = torch.full_like(batch.values(), -1, dtype=torch.int64), list[Tensor]()
    for number, config in enumerate(tables.configs):
        ids = batch.values()[positions[number]].long()
        indices = torch.full_like(ids, -1)
        valid: Any = slice(None) if config.is_dynamic else (ids >= 0) & (ids < config.num_embeddings)
        distinct, indices[valid] = ids[valid].unique(return_inverse=True)
        values[positions[number]] = indices
        all_ids.append(distinct.cpu())
    sizes = layout.tables.new_tensor([ids.numel() for ids in all_ids])
    layout = _pulled_layout(layout, sizes, int(sizes.sum()))
    groups = ops.row_groups(values, batch.offsets(), layout)
    return RowBatch(values, batch.offsets(), batch.weights_or_none(), groups, layout), all_ids


def _pulled_layout(layout: Layout, sizes: Tensor, num_rows: int) -> Layout:
    """Return a layout whose tables have the rows that a batch pulls."""
    table_rows = layout.tables.clone()
    table_rows[:, NUM_ROWS], table_rows[:, FIRST_ROW] = sizes, sizes.cumsum(0) - sizes
    return layout._replace(tables=table_rows, num_rows=num_rows)
