"""Tables spread over ranks: plans, sharded collections, and whole models trained in parallel."""

from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.sharding.embedding_bag_collection import ShardedEmbeddingBagCollection
from tritonemb.sharding.embedding_collection import ShardedEmbeddingCollection
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.sharding.interop import load_tables
from tritonemb.sharding.plan import (
    ColumnWise,
    DataParallel,
    Grid,
    RowWise,
    Shard,
    Sharding,
    ShardingPlan,
    TableColumnWise,
    TableRowWise,
    TableWise,
    uniform_plan,
)
from tritonemb.sharding.sharded_tensor import TableShards

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
