"""First values of shards."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonemb.sharding.types import Shard
from tritonemb.types import TRAINABLE_DTYPES, TableConfig

BLOCK = 1 << 16  # elements that one generator draws, as whole rows


def copy_shard(own: Tensor, whole: Tensor, shard: Shard) -> None:
    """Fill a shard from a whole table, or from a state of one value a row."""
    rows = whole[shard.first_row : shard.first_row + shard.num_rows]
    if whole.dim() == 2:
        rows = rows[:, shard.first_column : shard.first_column + shard.num_columns]
    own.copy_(rows)


def fill_shard(own: Tensor, table: TableConfig, shard: Shard) -> None:
    """Draw a shard's first values: those that the whole table has there, however it is cut.

    A table's values depend on its name and on torch's seed (`torch.initial_seed`, which `torch.manual_seed` sets). They
    are drawn block by block, so nobody draws the whole; a table with an `init` of its own is made whole on the CPU,
    and cut.
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
    bound = table.num_embeddings**-0.5
    rows = max(1, BLOCK // table.embedding_dim)
    stop = shard.first_row + shard.num_rows
    for block in range(shard.first_row // rows, -(-stop // rows)):
        generator = torch.Generator().manual_seed((seed + 0x9E3779B97F4A7C15 * (block + 1)) & (2**63 - 1))
        drawn = torch.empty(min(rows, table.num_embeddings - block * rows), table.embedding_dim)
        drawn.uniform_(-bound, bound, generator=generator)
        first, last = max(shard.first_row, block * rows), min(stop, (block + 1) * rows)
        own[first - shard.first_row : last - shard.first_row] = drawn[
            first - block * rows : last - block * rows, shard.first_column : shard.first_column + shard.num_columns
        ].to(own.dtype)
