"""Tables spread over ranks: plans, sharded collections, and whole models trained in parallel."""

from tritonemb.comm.precision import ExchangePrecision
from tritonemb.sharding.embedding_bag_collection import ShardedEmbeddingBagCollection
from tritonemb.sharding.embedding_collection import ShardedEmbeddingCollection
from tritonemb.sharding.foreign import load_tables
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.sharding.plan import ShardingPlan, uniform_plan
from tritonemb.sharding.table_shards import TableShards
from tritonemb.sharding.types import (
    ColumnWise,
    DataParallel,
    Grid,
    RowWise,
    Shard,
    Sharding,
    TableColumnWise,
    TableRowWise,
    TableWise,
)

__all__ = [
    "ColumnWise",
    "DataParallel",
    "ExchangePrecision",
    "Grid",
    "HybridParallel",
    "RowWise",
    "Shard",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "Sharding",
    "ShardingPlan",
    "TableColumnWise",
    "TableRowWise",
    "TableShards",
    "TableWise",
    "load_tables",
    "uniform_plan",
]
