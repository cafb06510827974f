"""The planner: sharding plans of least cost, their reports; statistics of data and calibration of rates."""

from tritonemb.sharding.planner.options import PlanError
from tritonemb.sharding.planner.planner import plan, plan_job
from tritonemb.sharding.planner.statistics import collect_stats
from tritonemb.sharding.planner.topology import Topology

__all__ = ["PlanError", "Topology", "collect_stats", "plan", "plan_job"]
