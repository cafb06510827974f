"""Lookup of a prepared batch: read, then updated in the backward."""

from functools import partial
from typing import NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tritonemb import ops
from tritonemb.ops.row_update import accumulate_
from tritonemb.tables.lookup_tables import LookupTables, PreparedBatch
from tritonemb.types import TableConfig


@_disable_dynamo  # a graph break; does not import the compiler
def look_up_prepared(tables: LookupTables, batch: PreparedBatch) -> Tensor:
    """Look up a batch; the backward updates and releases its rows, or accumulates their gradients.

    ValueError for per-sample weights that require gradients, and for a batch that was prefetched without gradients and
    is now trained. The backward of a result without an optimizer raises.
    """
    # Evaluation: read and release.
    if not torch.is_grad_enabled():
        result = batch.read(tables)
        batch.release()
        return result
    if not check_trainable(tables, batch):
        weights = [table.weight for table in tables.tables]
        weight = next((weight for weight in weights if weight.requires_grad), weights[0])
        result = ops.fused_lookup(weight, None, partial(batch.read, tables), partial(raise_no_optimizer, tables))
        batch.release()
        return result
    # Training: the backward updates the rows, or accumulates.
    accumulating = tables.accumulator.is_open
    if accumulating:
        tables.accumulated.add(batch)

    def take_gradient(grad: Tensor, needs_sample_weight_grad: bool) -> None:
        if batch.is_released:
            raise RuntimeError(
                "the rows of this batch are no longer pinned: each lookup has one backward, inside the accumulate() "
                "block of the lookup if there is one; look the batch up again"
            )
        if accumulating:
            rows, pending = batch.rows, tables.counters["pending"]
            accumulate_(pending, tables.accumulator.handle, grad, rows.values, rows.offsets, rows.sample_weights)
            tables.accumulated.trained.append(batch)
        else:
            batch.apply(tables, grad)

    return ops.fused_lookup(tables.tables[0].weight, None, partial(batch.read, tables), take_gradient)


def check_trainable(tables: LookupTables, batch: PreparedBatch) -> bool:
    """Return whether the backward of a lookup made now updates the tables; raise if it must not, or cannot."""
    training = tables.trains()
    check_gradients(tables, batch.rows.sample_weights, batch.training or not training)
    if training:
        batch.check_update(tables)
    return training


def check_gradients(tables: LookupTables, sample_weights: Tensor | None, trainable: bool) -> None:
    """Raise ValueError for per-sample weights that require gradients, and for a batch that cannot be trained."""
    if sample_weights is not None and sample_weights.requires_grad:
        config = _first_non_device(tables)
        is_dynamic = config.is_dynamic and config.placement == "device"  # ids without rows get no gradient
        raise ValueError(
            f"per-sample weights get no gradient where table {config.name!r} is "
            f"{'dynamic and admits some ids only' if is_dynamic else f'placed on {config.placement!r}'}; detach them, "
            f"or {'remove its AdmissionConfig' if is_dynamic else 'place the tables on the device'}"
        )
    if not trainable:
        raise ValueError(
            f"the rows of table {_first_non_device(tables).name!r} were prefetched under no_grad, but gradients are "
            "recorded now; call group() or prefetch() with gradients enabled"
        )


def raise_no_optimizer(tables: LookupTables, *_: object) -> NoReturn:
    """Raise ValueError for tables that only a fused optimizer can train."""
    config = _first_non_device(tables)
    kind = "dynamic" if config.is_dynamic else f"placed on {config.placement!r}"
    raise ValueError(
        f"table {config.name!r} is {kind}, where only a fused optimizer can train it; pass an optimizer to its "
        "collection, or freeze it with requires_grad_(False)"
    )


def _first_non_device(tables: LookupTables) -> TableConfig:
    return next(config for config in tables.configs if config.is_dynamic or config.placement != "device")
