"""First values of shards."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonemb.ops.initial import fill_initial_
from tritonemb.sharding.types import Shard
from tritonemb.types import TRAINABLE_DTYPES, TableConfig


def copy_shard(own: Tensor, whole: Tensor, shard: Shard) -> None:
    """Fill a shard from a whole table, or from a state of one value a row."""
    rows = whole[shard.first_row : shard.first_row + shard.num_rows]
    if whole.dim() == 2:
        rows = rows[:, shard.first_column : shard.first_column + shard.num_columns]
    own.copy_(rows)


def fill_shard(own: Tensor, table: TableConfig, shard: Shard) -> None:
    """Draw a shard's first values: those that the whole table has there, however it is cut.

    A table's values depend on its name and on torch's seed (`torch.initial_seed`, which `torch.manual_seed` sets), each
    on its place, so nobody draws the whole; a table with an `init` of its own is made whole on the CPU, and cut.
    """
    seed = (table.seed ^ torch.initial_seed()) & (2**63 - 1)
    if table.init is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            dtype = table.dtype if table.dtype in TRAINABLE_DTYPES else torch.float32
            whole = torch.empty(table.num_embeddings, table.embedding_dim, dtype=dtype)
            table.init(whole)
        copy_shard(own, whole, shard)
        return
    fill_initial_(own, seed, table.bound, shard.first_row, shard.first_column)
