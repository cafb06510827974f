"""Tables spread over ranks: plans, sharded collections, and whole models trained in parallel."""

from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.sharding.embedding_collections import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.sharding.interop import load_tables
from tritonemb.sharding.plan import (
    ColumnWise,
    DataParallel,
    Grid,
    PlanDiff,
    RowWise,
    Shard,
    Sharding,
    ShardingPlan,
    TableColumnWise,
    TablePlacement,
    TableRowWise,
    TableWise,
    uniform_plan,
)
from tritonemb.sharding.planner.cost_model import CostModel
from tritonemb.sharding.planner.manifests import Deployment
from tritonemb.sharding.planner.options import Constraint
from tritonemb.sharding.planner.report import PlanReport
from tritonemb.sharding.planner.statistics import TableStats
from tritonemb.sharding.sharded_tensor import TableShards

__all__ = [
    "ColumnWise", "Constraint", "CostModel", "DataParallel", "Deployment", "ExchangePrecision", "Grid",
    "HybridParallel", "PlanDiff", "PlanReport", "RowWise", "Shard", "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection", "Sharding", "ShardingPlan", "TableColumnWise", "TablePlacement", "TableRowWise",
    "TableShards", "TableStats", "TableWise", "load_tables", "uniform_plan",
]  # fmt: skip
