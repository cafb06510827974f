"""The planner: where tables go, what that costs, and why; statistics and rates that it reads, measured."""

from tritonemb.sharding.plan import PlanDiff
from tritonemb.sharding.planner.cost_model import CostModel, Prediction
from tritonemb.sharding.planner.options import Constraint, PlanError
from tritonemb.sharding.planner.planner import plan, plan_job
from tritonemb.sharding.planner.report import PlanReport
from tritonemb.sharding.planner.statistics import collect_stats
from tritonemb.sharding.planner.topology import Topology
from tritonemb.sharding.table_stats import TableStats

__all__ = [
    "Constraint",
    "CostModel",
    "PlanDiff",
    "PlanError",
    "PlanReport",
    "Prediction",
    "TableStats",
    "Topology",
    "collect_stats",
    "plan",
    "plan_job",
]
