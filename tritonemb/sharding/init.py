"""First values of shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tritonemb.comm.group import RankGroup
from tritonemb.ops.initial import fill_initial_
from tritonemb.sharding.plan import Shard
from tritonemb.tables.cached_table import TieredTable
from tritonemb.tables.table import Table
from tritonemb.types import TRAINABLE_DTYPES, TableConfig


def copy_shard(own: Tensor, whole: Tensor, shard: Shard) -> None:
    """Fill a shard from a whole table, or from a state of one value a row."""
    rows = whole[shard.first_row : shard.first_row + shard.num_rows]
    if whole.dim() == 2:
        rows = rows[:, shard.first_column : shard.first_column + shard.num_columns]
    own.copy_(rows)


def tensors_of(table: Table) -> dict[str, Tensor]:
    """Weight and states of all rows that a table has."""
    if isinstance(table, TieredTable):
        return table.tensors()
    return {"weight": table.weight.detach(), **dict(table.named_buffers(recurse=False))}


def begin_elsewhere(own: TieredTable, table: TableConfig, shard: Shard, source: Table | None, same: RankGroup) -> None:
    """Give a shard that does not live on the device the values of a whole table, or those that are drawn for it.

    Args:
        same: the ranks with this shard, of which the first one's values count; a collective.
    """
    if source is None and table.init is None:
        seed = torch.tensor(_seed_of(table), device=own.weight.device)
        same.broadcast(seed, 0, "initial values")
        own.reset_parameters(int(seed))
        return
    if source is None:
        given: dict[str, Tensor] = {"weight": _initialised(table)}
    else:
        given = tensors_of(source)
    tensors = own.tensors()
    for name, tensor in tensors.items():
        if name in given:
            copy_shard(tensor, given[name], shard)
    own.assign(tensors)
    if same.size > 1:
        own.change(lambda fields: _take_over(fields, own.weight.device, same))


def _take_over(fields: Mapping[str, Tensor], device: torch.device, same: RankGroup) -> None:
    """The first rank's values; they cross between devices of this kind."""
    for values in fields.values():
        moved = values.to(device).contiguous()
        same.broadcast(moved, 0, "initial values")
        values.copy_(moved)


def _seed_of(table: TableConfig) -> int:
    return (table.seed ^ torch.initial_seed()) & (2**63 - 1)


def _initialised(table: TableConfig) -> Tensor:
    """A whole table as its `init` makes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed_of(table))
        dtype = table.dtype if table.dtype in TRAINABLE_DTYPES else torch.float32
        whole = torch.empty(table.num_embeddings, table.embedding_dim, dtype=dtype)
        assert table.init is not None
        table.init(whole)
    return whole


def fill_shard(own: Tensor, table: TableConfig, shard: Shard) -> None:
    """Draw a shard's first values: those that the whole table has there, however it is cut.

    A table's values depend on its name and on torch's seed (`torch.initial_seed`, which `torch.manual_seed` sets), each
    on its place, so nobody draws the whole; a table with an `init` of its own is made whole on the CPU, and cut.
    """
    if table.init is not None:
        copy_shard(own, _initialised(table), shard)
        return
    fill_initial_(own, _seed_of(table), table.bound, shard.first_row, shard.first_column)
