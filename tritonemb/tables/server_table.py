"""Tables whose rows are on embedding servers: a batch pulls the rows that it needs, and pushes their gradients.

`RowService` is what a collection asks of its servers; `tritonemb.server` has it. A batch is deduplicated first: each
distinct id of a table crosses the network once, and so does the sum of its gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tritonemb import ops
from tritonemb.errors import find_invalid_id, gradient_not_finite, warn_of_skipped_rows
from tritonemb.jagged import Features, KeyedJaggedTensor, unpack_features
from tritonemb.layout import FIRST_ROW, NUM_ROWS, Layout
from tritonemb.ops.row_update import NOT_ACCUMULATING, accumulate_
from tritonemb.optimizers import StateSpec
from tritonemb.tables.cached_table import is_metadata_only
from tritonemb.tables.lookup import Lookup, Tables, check_gradients, find_positions, id_ranges, row_sums, split_lookups
from tritonemb.tables.table import Table, draw_seed, load_named_tensors
from tritonemb.types import Device, TableConfig


class Pull(Protocol):
    """A pull in flight. A pull for training gets exactly one `push`."""

    def rows(self) -> list[Tensor]:
        """Wait for the rows: per table `[n, embedding_dim]` in its dtype, on the CPU. Raises errors of the servers."""

    def push(self, sums: Sequence[Tensor] | None, lr: float) -> None:
        """Send per table the sums of the rows' gradients, float32 `[n, embedding_dim]`; None without gradients."""


class TableService(Protocol):
    """Embedding servers of a collection's tables."""

    applies_updates: (
        bool  # whether servers apply the optimizer (`RowService`), or trainers, to leased rows (`RowStore`)
    )

    def tensors(self, table: str) -> dict[str, Tensor]:
        """Return the tensors of a table in `state_dict`, after the pushes applied so far; copies."""

    def load(self, table: str, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of a table from `state_dict`. ValueError if they do not fit; nothing is changed then."""

    def flush(self) -> None:
        """Wait until servers have applied all training steps of all trainers. A collective, after the same step."""

    def return_leases(self) -> None:
        """Write leased rows back to the servers; a collective of the trainers, before one calls `snapshot`."""

    def discard_leases(self) -> None:
        """Drop leased rows without writing them back, after another trainer has loaded other rows."""

    def snapshot(self, path: Path, changes_only: bool = False) -> list[dict[str, Any]]:
        """Write each server's tables to a file once all trainers have reached this step; one trainer calls this.

        The files are named `path`, a number and ".server". Return per file the snapshot's name, and its parent's, or
        None if it is whole. StorageError if a file cannot be written.
        """

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        """Restore the servers from snapshots taken after `steps` steps, one chain of files per saved server.

        The number of servers may differ. One trainer calls this; then the others do, without chains.
        """


class RowService(TableService, Protocol):
    """Servers that apply the optimizer. Any thread may pull; pulls for training follow the order of batches."""

    def pull(self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool) -> Pull:
        """Request the rows of distinct ids, int64 `[n]` per table, with their occurrences in the batch."""


class ServerTable(Table):
    """Table whose rows are on embedding servers, which `state_dict` requests; `weight` is `[0, embedding_dim]`."""

    weight: Any  # for dtype, device and tracing only; not a parameter, so that no optimizer gets it
    service: TableService | None = None

    def _allocate(self, num_rows: int, states: tuple[StateSpec, ...], device: Device) -> None:
        config = self.config
        if config.init is not None:
            raise ValueError(
                f"table {config.name!r}: an init fills a whole table in memory, and this table is on embedding "
                "servers; leave init out, or load values with load_state_dict"
            )
        self.weight = torch.empty(0, config.embedding_dim, dtype=config.dtype, device=device, requires_grad=True)
        self.state_specs = states
        self.seed = -1

    @property
    def row_config(self) -> TableConfig:
        return self.config.storage_config(1) if self.config.is_dynamic else self.config

    def _require_service(self) -> TableService:
        if self.service is None:
            raise ValueError(
                f"table {self.config.name!r} is on embedding servers, and none are attached: call "
                "te.server.attach(model, te.server.start(2)), or pass Trainer(servers=...)"
            )
        return self.service

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of weight and states, sorted by id if dynamic. ValueError if no servers are attached."""
        tensors = self._require_service().tensors(self.config.name)
        return {name: tensors[name] for name in ("weight", *(spec.name for spec in self.state_specs))}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the seed of the initial values from torch's generator; servers get it when they are attached."""
        if self.service is not None:
            raise RuntimeError(
                f"table {self.config.name!r} is on embedding servers and cannot be reset; attach a new module"
            )
        if not self.weight.is_meta:
            self.seed = draw_seed()

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train or freeze the table. `requires_grad_` of an enclosing module does not reach its weight."""
        self.weight.requires_grad_(requires_grad)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not is_metadata_only():
            tensors = self._require_service().tensors(self.config.name)
            destination.update({prefix + name: tensor for name, tensor in tensors.items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        service, name = self._require_service(), self.config.name
        load_named_tensors(service.tensors(name), partial(service.load, name), state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.weight = fn(self.weight.detach()).requires_grad_(self.weight.requires_grad)
        return self


@dataclass(eq=False)
class PulledBatch(Lookup):
    """A batch whose `values` index the rows that it has pulled, per table."""

    ids: list[Tensor] = field(default_factory=list)  # per table, int64 `[n]`, distinct and ascending
    pull: Any = None  # the `Pull` that returns the rows


@_disable_dynamo
def pull_batch(tables: Tables, features: Features) -> PulledBatch:
    """Request the rows of a batch from the servers. ValueError for ids out of range, before a request is sent."""
    keys, values, offsets, weights = unpack_features(features)
    batch, service = KeyedJaggedTensor(keys, values, weights, offsets=offsets), tables.tables[0]._require_service()
    if tables.bounds_check == "raise" and (problem := find_invalid_id(batch, id_ranges(tables, keys))):
        raise problem
    batch = split_lookups(tables, batch, tables.layout(keys, values.device))
    layout = tables.layout(batch.keys(), values.device)
    training = tables.trains()
    with torch.no_grad(), torch.inference_mode(False):
        any_dynamic = any(config.is_dynamic for config in tables.configs)
        lookup = (_deduplicate if any_dynamic else _deduplicate_rows)(tables, batch, layout)
        lookup.training, occurrences = training, lookup.groups.starts[: lookup.layout.num_rows + 1].diff().cpu()
        sizes = [ids.numel() for ids in lookup.ids]
        lookup.pull = service.pull(lookup.ids, occurrences.split(sizes), training)
        lookup.on_release = _push_nothing if training else None
        return lookup


def _deduplicate_rows(tables: Tables, batch: KeyedJaggedTensor, layout: Layout) -> PulledBatch:
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
    return PulledBatch(values, batch.offsets(), batch.weights_or_none(), groups, pulled_layout, ids=[*ids])


def _deduplicate(tables: Tables, batch: KeyedJaggedTensor, layout: Layout) -> PulledBatch:
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
    return PulledBatch(values, batch.offsets(), batch.weights_or_none(), groups, layout, ids=all_ids)


def _pulled_layout(layout: Layout, sizes: Tensor, num_rows: int) -> Layout:
    """Return a layout whose tables have the rows that a batch pulls."""
    table_rows = layout.tables.clone()
    table_rows[:, NUM_ROWS], table_rows[:, FIRST_ROW] = sizes, sizes.cumsum(0) - sizes
    return layout._replace(tables=table_rows, num_rows=num_rows)


def _push_nothing(lookup: Lookup) -> None:
    """Push no gradients for a batch that was pulled for training but not trained: the servers wait for its push."""
    assert isinstance(lookup, PulledBatch)
    lookup.pull.push(None, 0.0)


@_disable_dynamo
def look_up_pulled(tables: Tables, features: Features, lookup: PulledBatch | None) -> Tensor:
    """Look up a batch in the rows that servers send; the backward pushes the sums of their gradients."""
    # Wait for the pull, or start one now.
    if lookup is None or lookup.acquired:
        lookup = pull_batch(tables, features)
    lookup.acquired = True
    read = partial(_read, tables, lookup)
    if not tables.trains():
        pooled: Tensor = read()
        lookup.release()
        return pooled
    # Training: the backward pushes gradients, or accumulates them.
    check_gradients(tables, lookup.sample_weights, lookup.training)
    tables.remember_keys(unpack_features(features)[0])
    handle, pulled = tables.accumulator.current_handle, lookup

    def take_gradient(grad: Tensor, needs_sample_weight_grad: bool) -> None:
        if pulled.on_release is None:
            raise RuntimeError("a backward pass has updated these rows already; look the batch up again")
        if handle == NOT_ACCUMULATING:
            push_gradients(tables, grad, pulled)
            tables.counters["step"] += 1
        else:
            batch = pulled.values, pulled.offsets, pulled.sample_weights
            accumulate_(tables.counters["pending"], handle, grad, *batch)
            tables.pins.append(pulled)

    return ops.fused_lookup(tables.tables[0].weight, None, read, take_gradient)


def _read(tables: Tables, lookup: PulledBatch) -> Tensor:
    device = lookup.values.device
    weights = [rows.to(device, non_blocking=True) for rows in lookup.pull.rows()]
    batch = lookup.values, lookup.offsets, lookup.sample_weights, lookup.layout
    return ops.embedding_bag(weights, *batch, False, tables.dtype_of(weights))


@torch.no_grad()
def push_gradients(tables: Tables, grad: Tensor, lookup: PulledBatch) -> None:
    """Push the sums of a batch's gradients. With `on_nonfinite="raise"` a sum that is not finite raises ValueError and
    nothing is pushed; with "skip" such rows are counted, and the servers do not update them.
    """
    optimizer = tables.optimizer
    _, sums = row_sums(grad, lookup, optimizer.max_gradient)
    for number, table_sums in enumerate(sums if optimizer.on_nonfinite != "ignore" else ()):
        if bool(table_sums.sum().isfinite()):  # a cheap test; a finite sum that overflows is checked per row
            continue
        config, invalid = tables.configs[number], ~table_sums.isfinite().all(1).cpu()
        if optimizer.on_nonfinite == "raise" and invalid.any():
            raise gradient_not_finite(config.name, int(lookup.ids[number][invalid][0]))
        if num_skipped := int(invalid.sum()):
            tables.counters["skipped"][number] += num_skipped
            warn_of_skipped_rows(config.name)
    lookup.on_release = None
    lookup.pull.push([table_sums.cpu() for table_sums in sums], tables.current_learning_rate)
