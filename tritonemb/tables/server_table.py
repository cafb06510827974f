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
from tritonemb.tables.lookup import Lookup, Tables, check_gradients, one_key_a_lookup, positions_of, row_sums, uses
from tritonemb.tables.table import Table, draw_seed, load_all
from tritonemb.types import Device, TableConfig


class Pull(Protocol):
    """Rows that are on their way. One that is for training gets one `push`."""

    def rows(self) -> list[Tensor]:
        """For each table `[n, embedding_dim]` in its dtype, on the CPU. Waits; raises what the servers have raised."""

    def push(self, sums: Sequence[Tensor] | None, lr: float) -> None:
        """Send for each table the sums of the rows' gradients, float32 `[n, embedding_dim]`; None if there are none."""


class TableService(Protocol):
    """The servers of a collection's tables: what they have, as a whole.

    Attributes:
        applies_updates: whether they apply the optimizer, to what is pushed: a `RowService`. Else it is a `RowStore`.
    """

    applies_updates: bool

    def tensors(self, table: str) -> dict[str, Tensor]:
        """What `state_dict` has of a table, as far as pushes have been applied; copies."""

    def load(self, table: str, tensors: Mapping[str, Tensor]) -> None:
        """The reverse; ValueError if it does not fit, and nothing has changed."""

    def flush(self) -> None:
        """Wait until servers have all that was trained, on all trainers. They all call this, after the same step."""

    def return_leases(self) -> None:
        """Let servers have the rows that trainers hold; all trainers call this, before one calls `snapshot`."""

    def discard_leases(self) -> None:
        """Another trainer has let servers load others."""

    def snapshot(self, path: Path, changes_only: bool = False) -> list[dict[str, Any]]:
        """Let each server write its tables to a file, when all trainers have come to this step; one calls this.

        The files have a number and ".server" behind `path`. Of each one: the snapshot's name, and that of
        the one it follows, or None if it is whole. StorageError if one could not be written.
        """

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        """Let the servers become what snapshots of any servers after so many steps say, a chain of files each.

        One trainer calls this; the others give no chains, when it is done.
        """


class RowService(TableService, Protocol):
    """Servers that apply the optimizer. Any thread may pull; pulls for training are in the order of batches."""

    def pull(self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool) -> Pull:
        """Ask for the rows of each table's distinct ids, int64 `[n]`, each of which is so often in the batch."""


class ServerTable(Table):
    """A table without rows here: `weight` is `[0, embedding_dim]`, and no parameter.

    `state_dict` has what it would have with rows on the device; embedding servers send it.
    """

    weight: Any  # for tracing alone; no optimizer may have it
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

    def _attached(self) -> TableService:
        if self.service is None:
            raise ValueError(
                f"table {self.config.name!r} is on embedding servers, and none are attached: call "
                "te.server.attach(model, te.server.start(2)), or give Trainer(servers=...)"
            )
        return self.service

    def tensors(self) -> dict[str, Tensor]:
        """Weight and states, of a dynamic table sorted by id; copies. ValueError if no servers are attached."""
        found = self._attached().tensors(self.config.name)
        return {name: found[name] for name in ("weight", *(spec.name for spec in self.state_specs))}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the seed of the initial values, from torch's generator; servers are told it when they are attached."""
        if self.service is not None:
            raise RuntimeError(
                f"table {self.config.name!r} is on embedding servers; begin anew with a new module, attached to them"
            )
        if not self.weight.is_meta:
            self.seed = draw_seed()

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train the table, or freeze it. `requires_grad_` of a module around it does not reach its weight."""
        self.weight.requires_grad_(requires_grad)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not is_metadata_only():
            tensors = self._attached().tensors(self.config.name)
            destination.update({prefix + name: tensor for name, tensor in tensors.items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        service, name = self._attached(), self.config.name
        load_all(service.tensors(name), partial(service.load, name), state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.weight = fn(self.weight.detach()).requires_grad_(self.weight.requires_grad)
        return self


@dataclass(eq=False)
class PulledBatch(Lookup):
    """A batch whose `values` are numbers of the rows that it has pulled, of each table by itself.

    Attributes:
        ids: of each table, int64 `[n]`, distinct and ascending.
        pull: where the rows come from.
    """

    ids: list[Tensor] = field(default_factory=list)
    pull: Any = None


@_disable_dynamo
def pull_batch(tables: Tables, features: Features) -> PulledBatch:
    """Ask the servers for the rows of a batch. ValueError for ids out of range, before anything has been sent."""
    keys, values, offsets, weights = unpack_features(features)
    batch, service = KeyedJaggedTensor(keys, values, weights, offsets=offsets), tables.tables[0]._attached()
    if tables.bounds_check == "raise" and (problem := find_invalid_id(batch, uses(tables, keys))):
        raise problem
    batch = one_key_a_lookup(tables, batch, tables.layout(keys, values.device))
    layout = tables.layout(batch.keys(), values.device)
    training = tables.trains()
    with torch.no_grad(), torch.inference_mode(False):
        any_dynamic = any(config.is_dynamic for config in tables.configs)
        lookup = (_deduplicate if any_dynamic else _deduplicate_rows)(tables, batch, layout)
        lookup.training, occurrences = training, lookup.groups.starts[: lookup.layout.num_rows + 1].diff().cpu()
        sizes = [of_table.numel() for of_table in lookup.ids]
        lookup.pull = service.pull(lookup.ids, occurrences.split(sizes), training)
        lookup.on_release = _push_nothing if training else None
        return lookup


def _deduplicate_rows(tables: Tables, batch: KeyedJaggedTensor, layout: Layout) -> PulledBatch:
    """The batch with numbers of its distinct rows; of tables whose ids are row numbers. Waits for the device."""
    groups, first = ops.row_groups(batch.values(), batch.offsets(), layout), layout.tables[:, FIRST_ROW].contiguous()
    number = int(groups.num_groups)
    rows, every = groups.rows[:number], torch.arange(groups.rows.numel(), device=first.device)
    starts = torch.searchsorted(rows, first)
    sizes = starts.diff(append=starts.new_tensor([number]))
    by_group = torch.full_like(every, -1)
    by_group[:number] = every[:number] - starts.repeat_interleave(sizes, output_size=number)
    ids = (rows - first.repeat_interleave(sizes, output_size=number)).cpu().split(sizes.tolist())
    values = ops.row_cache_translate(by_group, groups.starts, groups.order, groups.num_groups)
    own = _layout_of(layout, sizes, number)
    return PulledBatch(values, batch.offsets(), batch.weights_or_none(), groups._replace(rows=every), own, ids=[*ids])


def _deduplicate(tables: Tables, batch: KeyedJaggedTensor, layout: Layout) -> PulledBatch:
    """Likewise, of tables of which some are dynamic."""
    positions = positions_of(batch, tables.table_keys[tuple(batch.keys())])
    values, all_ids = torch.full_like(batch.values(), -1, dtype=torch.int64), list[Tensor]()
    for number, config in enumerate(tables.configs):
        ids = batch.values()[positions[number]].long()
        of_table = torch.full_like(ids, -1)
        valid: Any = slice(None) if config.is_dynamic else (ids >= 0) & (ids < config.num_embeddings)
        distinct, of_table[valid] = ids[valid].unique(return_inverse=True)
        values[positions[number]] = of_table
        all_ids.append(distinct.cpu())
    sizes = layout.tables.new_tensor([ids.numel() for ids in all_ids])
    layout = _layout_of(layout, sizes, int(sizes.sum()))
    groups = ops.row_groups(values, batch.offsets(), layout)
    return PulledBatch(values, batch.offsets(), batch.weights_or_none(), groups, layout, ids=all_ids)


def _layout_of(layout: Layout, sizes: Tensor, num_rows: int) -> Layout:
    """Of tables of the rows that a batch pulls."""
    own = layout.tables.clone()
    own[:, NUM_ROWS], own[:, FIRST_ROW] = sizes, sizes.cumsum(0) - sizes
    return layout._replace(tables=own, num_rows=num_rows)


def _push_nothing(lookup: Lookup) -> None:
    """Of a batch that has been pulled to be trained, and was not: the servers wait for what it pushes."""
    assert isinstance(lookup, PulledBatch)
    lookup.pull.push(None, 0.0)


@_disable_dynamo
def look_up_pulled(tables: Tables, features: Features, lookup: PulledBatch | None) -> Tensor:
    """As `TableSet.look_up`: by rows that servers send; the backward pushes the sums of their gradients."""
    if lookup is None or lookup.acquired:
        lookup = pull_batch(tables, features)
    lookup.acquired = True
    read = partial(_read, tables, lookup)
    if not tables.trains():
        found: Tensor = read()
        lookup.release()
        return found
    check_gradients(tables, lookup.sample_weights, lookup.training)
    tables.remember_keys(unpack_features(features)[0])
    handle, pulled = tables.accumulator.current_handle, lookup

    def take_gradient(grad: Tensor, needs_sample_weight_grad: bool) -> None:
        if pulled.on_release is None:
            raise RuntimeError("these rows have been updated by a backward pass already; look the batch up again")
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
    """Send the sums of a batch's gradients; for `on_nonfinite="raise"`, ValueError if one is not finite, and none is.

    For "skip" such rows are counted here, and left as they are by the servers.
    """
    optimizer = tables.optimizer
    _, sums = row_sums(grad, lookup, optimizer.max_gradient)
    for number, of_table in enumerate(sums if optimizer.on_nonfinite != "ignore" else ()):
        if bool(of_table.sum().isfinite()):  # one pass; a sum that overflows is looked at again
            continue
        config, bad = tables.configs[number], ~of_table.isfinite().all(1).cpu()
        if optimizer.on_nonfinite == "raise" and bad.any():
            raise gradient_not_finite(config.name, int(lookup.ids[number][bad][0]))
        if num_skipped := int(bad.sum()):
            tables.counters["skipped"][number] += num_skipped
            warn_of_skipped_rows(config.name)
    lookup.on_release = None
    lookup.pull.push([of_table.cpu() for of_table in sums], tables.current_learning_rate)
