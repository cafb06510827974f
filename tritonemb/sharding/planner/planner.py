"""`plan`: which rank has which part of which table, on which tier, so that a step is fast and everything fits."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.kernels.cpu.plan_search import Problem, place_greedily
from tritonemb.layout import rows_to_shard
from tritonemb.optimizers import Optimizer
from tritonemb.sharding.plan import (
    SHARDINGS,
    ColumnWise,
    DataParallel,
    RowWise,
    Sharding,
    ShardingPlan,
    TablePlacement,
    TableWise,
    uniform_plan,
)
from tritonemb.sharding.planner.cost_model import CostModel, Dense, size_of
from tritonemb.sharding.planner.options import Constraint, Option, PlanError, make_problem
from tritonemb.sharding.planner.report import PlanReport
from tritonemb.sharding.planner.search import Solution, relax, solve, totals
from tritonemb.sharding.planner.statistics import TableStats
from tritonemb.sharding.planner.topology import Topology, amount
from tritonemb.types import TableConfig
from tritonemb.utils import did_you_mean

Array = NDArray[Any]
_log = logging.getLogger(__name__)
SAMPLES = 1_024  # of a rank, where nobody says how many
STAYS = 1.02  # of a new plan's load: a running plan's shards stay where they are up to this


def plan(
    tables: Sequence[TableConfig] | nn.Module, topology: Topology, *, batch_size: int | None = None,
    global_batch_size: int | None = None, optimizer: Optimizer | None = None,
    stats: Mapping[str, TableStats] | None = None, constraints: Mapping[str, Constraint] | None = None,
    previous: ShardingPlan | None = None, exchange: ExchangePrecision | None = None, copies: int | None = 1,
    activation_bytes: float = 0.0, dense_parameters: int | None = None,
) -> ShardingPlan:  # fmt: skip
    """Place tables on the ranks of a cluster: sharding, tier, rows to cache. The same arguments give the same plan.

    Args:
        tables: or a model, whose embedding collections have them; then the other layers are counted, too, and the
            optimizer is that of its collections.
        topology: what the job runs on.
        batch_size: samples of a rank; or `global_batch_size`, of all.
        optimizer: of the tables, for its states; row-wise Adagrad if not given.
        stats: how tables are used, from `te.collect_stats`; without them one id a sample and feature, all as often.
        constraints: by table, or by a pattern such as "user_*"; a table's own `placement` does not bind.
        previous: a plan in use: shards stay where they are unless that costs more than 2 % of the time.
        exchange: codecs of the output exchange.
        copies: of the tables, each on a part of the nodes; None tries all numbers.
        activation_bytes: of the other layers, at their peak, on each rank.
        dense_parameters: of the other layers, where no model is given.

    Returns:
        a plan with a `report`; print it.

    Raises:
        PlanError: the tables do not fit.
        TypeError, ValueError: naming the argument, and the table.
    """
    configs, found_optimizer, parameters = _tables_of(tables)
    size = _batch_size(batch_size, global_batch_size, topology)
    dense = Dense(parameters if dense_parameters is None else dense_parameters, activation_bytes)
    bound = _bound_constraints(configs, constraints or {}, topology)
    options: dict[str, Any] = {
        "optimizer": optimizer or found_optimizer,
        "stats": stats,
        "exchange": exchange,
        "dense": dense,
    }
    best: tuple[float, Any] | None = None
    failure: PlanError | None = None
    for number in _numbers_of_copies(copies, topology, configs, previous):
        model = CostModel(configs, topology, size, copies=number, **options)
        try:
            made, report = _plan(model, bound, previous if previous and previous.copies == number else None)
        except PlanError as error:
            failure = failure or error
            continue
        if best is None or report.prediction.step < best[0]:
            best = report.prediction.step, made
    if best is None:
        assert failure is not None
        raise failure
    chosen: ShardingPlan = best[1]
    return chosen


def _plan(model: CostModel, bound: list[Constraint], previous: ShardingPlan | None) -> tuple[ShardingPlan, PlanReport]:
    try:
        options, problem = make_problem(model, bound, previous)
    except PlanError as error:
        raise PlanError(f"{error}; {_remedies(model, bound)}") from None
    solution = solve(problem)
    if solution is None or solution.violation > 0:
        raise PlanError(_why_not(model, bound, options, problem, solution))
    if previous is not None:
        solution = _stay(model, options, problem, solution, previous)
    made = _as_plan(model, options, problem, solution)
    report = PlanReport.make(model, made, solution, _runners_up(problem, options, solution))
    return replace(made, report=report), report


def _tables_of(tables: Sequence[TableConfig] | nn.Module) -> tuple[list[TableConfig], Optimizer | None, int]:
    """Configs, the optimizer if a model says it, and the parameters of its other layers."""
    from tritonemb.nn.collections import TableCollection

    if not isinstance(tables, nn.Module):
        configs = list(tables)
        for each in configs:
            if not isinstance(each, TableConfig):
                raise TypeError(f"tables must be TableConfigs or a module, got {each!r}")
        found, optimizer, parameters = configs, None, 0
    else:
        collections = [module for module in tables.modules() if isinstance(module, TableCollection)]
        found = [config for collection in collections for config in collection.configs]
        optimizer = next((each.optimizer for each in collections if each.optimizer is not None), None)
        own = {id(parameter) for collection in collections for parameter in collection.parameters()}
        parameters = sum(each.numel() for each in tables.parameters() if id(each) not in own)
    if not found:
        raise ValueError("there are no tables to plan; give TableConfigs, or a model with an embedding collection")
    names = [config.name for config in found]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two tables are named {twice!r}; a plan knows tables by their names")
    return found, optimizer, parameters


def _batch_size(batch_size: int | None, global_batch_size: int | None, topology: Topology) -> int:
    if (batch_size is None) == (global_batch_size is None):
        raise ValueError("give batch_size, the samples of a rank, or global_batch_size, those of all ranks")
    name, value = ("batch_size", batch_size) if batch_size is not None else ("global_batch_size", global_batch_size)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value if name == "batch_size" else -(-value // topology.world_size)


def _bound_constraints(
    tables: Sequence[TableConfig], constraints: Mapping[str, Constraint], topology: Topology
) -> list[Constraint]:
    """The constraint of each table. ValueError for a pattern that fits no table, and a table that two fit."""
    found: list[str | None] = [None] * len(tables)
    names = [table.name for table in tables]
    for pattern, constraint in constraints.items():
        if not isinstance(constraint, Constraint):
            raise TypeError(f"constraints[{pattern!r}] must be a te.sharding.Constraint, got {constraint!r}")
        fitting = [number for number, name in enumerate(names) if name == pattern or fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(f"constraints[{pattern!r}] fits no table{did_you_mean(pattern, names)}")
        for number in fitting:
            if found[number] is not None:
                raise ValueError(
                    f"table {names[number]!r} has two constraints, {found[number]!r} and {pattern!r}; give it one"
                )
            found[number] = pattern
        lacking = {"host": topology.host, "disk": topology.disk, "server": topology.servers}
        if constraint.placements and all(not lacking.get(each, 1) for each in constraint.placements):
            raise ValueError(
                f"constraints[{pattern!r}] asks for {list(constraint.placements)}, which the topology lacks: it has "
                f"{amount(topology.host)} of host memory and {amount(topology.disk)} of disk a node, and "
                f"{topology.servers} servers"
            )
    return [Constraint() if pattern is None else constraints[pattern] for pattern in found]


def _numbers_of_copies(
    copies: int | None, topology: Topology, tables: Sequence[TableConfig], previous: ShardingPlan | None
) -> list[int]:
    if copies is not None:
        if not isinstance(copies, int) or copies < 1 or topology.world_size % copies:
            raise ValueError(f"copies must divide the {topology.world_size} ranks, got {copies!r}")
        ranks = topology.world_size // copies
        if ranks % min(topology.local_size, ranks):
            raise ValueError(
                f"{copies} copies of the tables on {topology.world_size} ranks share nodes of {topology.local_size}"
            )
        if copies > 1 and any(table.is_dynamic for table in tables):
            raise ValueError("dynamic tables have no copies; plan with copies=1")
        return [copies]
    if any(table.is_dynamic for table in tables):
        return [1]
    if previous is not None:
        return [previous.copies]
    return [number for number in (1, 2, 4, 8, 16, 32) if topology.nodes % number == 0]


def _stay(
    model: CostModel, options: list[list[Option]], problem: Problem, fresh: Solution, previous: ShardingPlan
) -> Solution:
    """The plan in use with as few moves as keep it within `STAYS` of the new one; the new one if that cannot be."""
    chosen, where = fresh.chosen.copy(), np.full(len(problem.unit_kind), -1)
    for number, table in enumerate(model.tables):
        sharding = previous.tables.get(table.name)
        tier = previous.placements.get(table.name, TablePlacement())
        if sharding is None:
            continue
        best = None
        for local, option in enumerate(options[number]):
            if type(sharding) is SHARDINGS.get(option.kind) and option.placement == tier.placement:
                at = int(problem.table_options[number]) + local
                places = _places(sharding, int(problem.option_units[at + 1] - problem.option_units[at]), model)
                if places is not None:
                    distance = abs(option.cached - (tier.cache_rows or 0)) + abs(
                        option.host_rows - (tier.host_rows or 0)
                    )
                    if best is None or distance < best[0]:
                        best = distance, at, places
        if best is not None:
            _, at, places = best
            chosen[number] = at
            where[problem.option_units[at] : problem.option_units[at + 1]] = places
    unit = max(fresh.bound, 1e-12)
    scaled = problem._replace(load=problem.load / unit, option_shared=problem.option_shared / unit)
    where = np.asarray(place_greedily(scaled, chosen, where))
    home = Solution(chosen, where, 0.0, 0.0, fresh.bound, fresh.greedy, fresh.cost)
    stayed = solve(problem, home, STAYS * fresh.load / unit)
    kept = stayed is not None and stayed.violation == 0 and stayed.load <= STAYS * fresh.load * (1 + 1e-9)
    return stayed._replace(greedy=fresh.greedy) if stayed is not None and kept else fresh


def _places(sharding: Sharding, units: int, model: CostModel) -> list[int] | None:
    """The ranks or nodes of a sharding's units; None if it has another number of them."""
    if isinstance(sharding, DataParallel) or (isinstance(sharding, RowWise) and units == 1):
        whole = isinstance(sharding, DataParallel) or sharding.ranks in (None, tuple(range(model.ranks)))
        return [0] if whole else None
    values = vars(sharding)
    places = values.get("ranks", values.get("nodes"))
    if "rank" in values or "node" in values:
        places = [values.get("rank", values.get("node"))]
    if places is None:
        places = range(model.ranks if isinstance(sharding, ColumnWise) else model.nodes)
    return list(places) if len(places) == units and len(set(places)) == units else None


def _as_plan(model: CostModel, options: list[list[Option]], problem: Problem, solution: Solution) -> ShardingPlan:
    shardings: dict[str, Sharding] = {}
    placements: dict[str, TablePlacement] = {}
    for number, table in enumerate(model.tables):
        at = int(solution.chosen[number])
        option = options[number][at - int(problem.table_options[number])]
        places = solution.where[problem.option_units[at] : problem.option_units[at + 1]].tolist()
        if option.kind == "server":
            shardings[table.name] = RowWise() if rows_to_shard(table) >= model.ranks > 1 else TableWise(0)
        else:
            shardings[table.name] = option.sharding(places)
        placements[table.name] = option.tier
    return ShardingPlan(shardings, model.ranks, model.local, placements, model.copies)


def _runners_up(
    problem: Problem, options: list[list[Option]], solution: Solution
) -> list[tuple[Option, Option | None, float]]:
    """Of each table its option, the best of another type or tier, and by how much that is worse: seconds of load."""
    found = []
    for number, of_table in enumerate(options):
        first = int(problem.table_options[number])
        cost = solution.cost[first : first + len(of_table)]
        own = int(solution.chosen[number]) - first
        mine = of_table[own]
        others = [
            at for at, each in enumerate(of_table)
            if (each.kind, each.blocks, each.placement) != (mine.kind, mine.blocks, mine.placement)
        ]  # fmt: skip
        best = min(others, key=lambda at: (cost[at], at), default=None)
        found.append(
            (mine, None if best is None else of_table[best], 0.0 if best is None else float(cost[best] - cost[own]))
        )
    return found


def _why_not(
    model: CostModel, bound: list[Constraint], options: list[list[Option]], problem: Problem, solution: Solution | None
) -> str:
    """Which budget is exceeded, by how much, and what would help, found by solving again."""
    top = model.topology
    needed = sum(size_of(model, table) for table in model.tables) * model.copies
    if solution is not None:
        return (
            f"the tables fit in sum, but no packing was found that keeps every budget, by "
            f"{100 * solution.violation:.2f} % of one; " + _remedies(model, bound)
        )
    found = totals(problem)
    starts = problem.table_options[:-1]
    usable, nodes, servers = {option.placement for each in options for option in each}, model.nodes, top.servers
    budgets = [
        (name, values, size, count, of)
        for tier, name, values, size, count, of in (
            ("device", "device memory", found.hbm, top.hbm - model.memory_of_rank, model.ranks, "rank"),
            ("host", "host memory", found.host, top.host, nodes, "node"),
            ("disk", "disk", found.disk, top.disk, nodes, "node"),
            ("server", "memory of servers", problem.option_server * servers, top.server_memory, servers, "server"),
        )
        if tier in usable
    ]
    # The fewest bytes that the tables take, each where it takes fewest, beyond what all tiers have.
    taken = sum(values * size for _, values, size, _, _ in budgets)
    least = float(np.minimum.reduceat(taken, starts).sum())
    room = sum(size * count for _, _, size, count, _ in budgets)
    short = max(least - room, 0.0)
    has = ", ".join(f"{amount(size * count)} of {name} ({amount(size)} a {of})" for name, _, size, count, of in budgets)
    by = f"short by {amount(short)}" if short else "short of one of them: not every table may be on every tier"
    return (
        f"{len(model.tables)} tables need {amount(needed)} with their states, {amount(least)} with caches and "
        f"buffers; there is {has}: {by} of {budgets[0][0] if len(budgets) == 1 else 'memory in all'}; "
        + _remedies(model, bound)
    )


def _remedies(model: CostModel, bound: list[Constraint]) -> str:
    """What would make the tables fit, by solving again."""
    top, found = model.topology, []

    def fits(
        tables: Sequence[TableConfig] = model.tables, topology: Topology = top, rules: list[Constraint] = bound
    ) -> bool:
        stats = {table.name: stats for table, stats in zip(model.tables, model.stats, strict=True)}
        again = CostModel(
            tables, topology, model.batch_size, model.optimizer, stats, model.exchange, 1, model.dense
        )  # fmt: skip
        try:
            return relax(make_problem(again, rules)[1], 0.01) is not None
        except PlanError:
            return False

    for times in (2, 4, 8, 16):
        if fits(topology=top.but(world_size=top.world_size * times, local_world_size=top.local_size)):
            found.append(f"{top.world_size * times} ranks")
            break
    if any(table.dtype == torch.float32 for table in model.tables):
        halves = [replace(t, dtype=torch.bfloat16) if t.dtype == torch.float32 else t for t in model.tables]
        if fits(tables=halves):
            found.append("16-bit tables (dtype=torch.bfloat16)")
    for name in ("host", "disk"):
        for size in [2**n * 1e9 for n in range(3, 19)]:
            if size > getattr(top, name) and fits(topology=top.but(**{name: size})):
                words = "host memory" if name == "host" else "disk"
                found.append(f"{amount(size)} of {words} a node")
                break
    if any(each.placements is not None for each in bound):
        free = [Constraint(None, each.types) for each in bound]
        if fits(rules=free):
            found.append("a lower tier: constraints that allow more placements")
    if any(table.is_dynamic and table.capacity for table in model.tables):
        for part in (0.75, 0.5, 0.25, 0.1):
            smaller = [replace(t, capacity=max(1, int(t.capacity * part))) if t.capacity else t for t in model.tables]
            if fits(tables=smaller):
                found.append(f"dynamic tables of {part:g} of their capacity")
                break
    return (
        "it fits with " + ", or ".join(found)
        if found
        else "nothing tried makes it fit: more ranks, 16 bits, lower tiers"
    )


def plan_job(
    tables: Sequence[TableConfig], optimizer: Optimizer | None, group: RankGroup, ranks: int, local: int,
    device: torch.device, batch_size: int | None = None,
) -> ShardingPlan:  # fmt: skip
    """The plan of a running job that was given none: tables stay on their tiers. A collective: rank 0 makes it.

    It logs two lines of what was chosen. Rates are assumed, device memory is this machine's; tiers that tables are on
    are taken to have room for them, as the tables exist already. `SAMPLES` a rank if no `batch_size` is given.
    """
    if ranks == 1 or not tables:  # all may be on embedding servers
        return uniform_plan(tables, ranks, local)

    tables = list({table.name: table for table in tables}.values())  # collections may share a name

    def make() -> ShardingPlan:
        topology = Topology.here(ranks, local, device.type)
        lower = any(table.placement in ("host", "disk") for table in tables)
        topology = topology.but(host=topology.host or 2e12, disk=topology.disk or 1e15) if lower else topology
        stay = {table.name: Constraint((table.placement,)) for table in tables if table.placement != "server"}
        made = plan(
            tables, topology, batch_size=batch_size or SAMPLES, optimizer=optimizer,
            constraints=stay | {table.name: Constraint(("device",)) for table in tables if table.placement == "server"},
        )  # fmt: skip
        assert made.report is not None
        _log.info("%s", made.report.summary())
        return replace(made, placements={})

    own: ShardingPlan | Exception | None = None
    if group.rank == 0:
        try:
            own = make()
        except Exception as error:  # raised on every rank, below
            own = error
    # Its report stays with rank 0: an `init` of a table's need not be picklable.
    chosen = group.all_gather_object(replace(own, report=None) if isinstance(own, ShardingPlan) else own)[0]
    if isinstance(chosen, Exception):
        raise chosen
    return own if isinstance(own, ShardingPlan) else chosen
