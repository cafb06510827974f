"""`plan`: which rank has which part of which table, on which tier, so that a step is fast and everything fits."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
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
from tritonemb.optimizers import Optimizer, RowWiseAdagrad
from tritonemb.sharding.plan import RowWise, Sharding, ShardingPlan, TablePlacement, TableWise, uniform_plan
from tritonemb.sharding.planner.cost_model import CostModel
from tritonemb.sharding.planner.options import Constraint, Option, PlanError, make_problem, places_in
from tritonemb.sharding.planner.report import PlanReport, TableReport
from tritonemb.sharding.planner.search import Solution, relax, solve, totals
from tritonemb.sharding.planner.statistics import TableStats, tables_in
from tritonemb.sharding.planner.topology import Topology, amount
from tritonemb.types import TableConfig, checked_number, checked_size
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
    dense_parameters: int | None = None, activation_bytes: float = 0.0,
) -> ShardingPlan:  # fmt: skip
    """Place tables on the ranks of a cluster: sharding, tier, rows to cache. The same arguments give the same plan.

    Args:
        tables: or a model, whose embedding collections have them, and the optimizer; then its other layers count.
        topology: what the job runs on.
        batch_size: samples of a rank; or `global_batch_size`, of all.
        optimizer: of the tables, for its states; row-wise Adagrad if not given.
        stats: how tables are used, from `te.collect_stats`; without them one id a sample and feature, all as often.
        constraints: by table, or by a pattern such as "user_*"; a table's own `placement` does not bind.
        previous: a plan in use: shards stay where they are unless that costs more than 2 % of the time.
        exchange: codecs of the output exchange.
        copies: of the tables, each on a part of the nodes; None tries all numbers.
        dense_parameters: of the other layers, where no model is given.
        activation_bytes: of the other layers, at their peak, on each rank.

    Returns:
        a plan with a `report`; print it.

    Raises:
        PlanError: the tables do not fit.
        TypeError, ValueError: naming the argument, and the table.
    """
    collections, configs = tables_in(tables)
    if (batch_size is None) == (global_batch_size is None):
        raise ValueError("give batch_size, the samples of a rank, or global_batch_size, those of all ranks")
    if batch_size is None:
        batch_size = -(-checked_size("global_batch_size", global_batch_size) // topology.world_size)
    if dense_parameters is None:
        parameters = {id(each): each.numel() for each in tables.parameters()} if isinstance(tables, nn.Module) else {}
        own = {id(each) for collection in collections for each in collection.parameters()}
        dense_parameters = sum(size for each, size in parameters.items() if each not in own)
    optimizer = optimizer or next((each.optimizer for each in collections if each.optimizer), RowWiseAdagrad())
    bound = _bound_constraints(configs, constraints or {}, topology)
    size, exchange = checked_size("batch_size", batch_size), exchange or ExchangePrecision()
    if checked_number("activation_bytes", activation_bytes) < 0:
        raise ValueError(f"activation_bytes must be at least 0, got {activation_bytes}")
    model = CostModel(
        configs, topology, size, optimizer, stats or {}, exchange, dense_parameters=dense_parameters,
        activation_bytes=activation_bytes,
    )  # fmt: skip
    found, failures = list[tuple[ShardingPlan, PlanReport]](), list[PlanError]()
    for number in _numbers_of_copies(copies, topology, configs, previous):
        try:
            found.append(_plan(replace(model, copies=number), bound, previous))
        except PlanError as error:
            failures.append(error)
    if not found:
        raise failures[0]
    return min(found, key=lambda each: each[1].prediction.step)[0]


def _plan(model: CostModel, bound: list[Constraint], previous: ShardingPlan | None) -> tuple[ShardingPlan, PlanReport]:
    previous = previous if previous is not None and previous.copies == model.copies else None
    try:
        options, problem = make_problem(model, bound, previous)
        solution = solve(problem)
        if solution is None or solution.violation > 0:
            raise PlanError(_why_not(model, options, problem, solution))
    except PlanError as error:
        raise PlanError(f"{error}; {_remedies(model, bound)}") from None
    if previous is not None:
        solution = _stay(model, options, problem, solution, previous)
    shardings: dict[str, Sharding] = {}
    placements: dict[str, TablePlacement] = {}
    picked: list[tuple[Option, Option | None, float]] = []
    firsts = problem.table_options[:-1].tolist()
    for table, of_table, first, at in zip(model.tables, options, firsts, solution.chosen.tolist(), strict=True):
        option, cost = of_table[at - first], solution.cost[first : first + len(of_table)]
        if option.kind == "server":
            shardings[table.name] = RowWise() if rows_to_shard(table) >= model.ranks > 1 else TableWise(0)
        else:
            shardings[table.name] = option.sharding(solution.where[slice(*problem.option_units[at : at + 2])].tolist())
        placements[table.name] = TablePlacement(option.placement, option.cached or None, option.host_rows or None)
        mine = option.kind, option.blocks, option.placement
        others = [n for n, each in enumerate(of_table) if (each.kind, each.blocks, each.placement) != mine]
        best = min(others, key=cost.__getitem__, default=None)
        runner_up = (None, 0.0) if best is None else (of_table[best], float(cost[best] - cost[at - first]))
        picked.append((option, *runner_up))
    made = ShardingPlan(shardings, model.ranks, model.local, placements, model.copies)
    prediction = model.predict(made)
    found = zip(model.tables, picked, prediction.by_table.tolist(), model.sizes.tolist(), strict=True)
    tables = tuple(TableReport(table, option, *numbers, *others) for table, (option, *others), *numbers in found)
    report = PlanReport(model, tables, prediction, solution.bound, max(solution.greedy, prediction.load))
    return replace(made, report=report), report


def _bound_constraints(
    tables: Sequence[TableConfig], constraints: Mapping[str, Constraint], topology: Topology
) -> list[Constraint]:
    """The constraint of each table. ValueError for a pattern that fits no table, and a table that two fit."""
    found: dict[str, str] = {}
    names = [table.name for table in tables]
    lacking = {"host": topology.host, "disk": topology.disk, "server": topology.servers}
    for pattern, constraint in constraints.items():
        title = f"constraints[{pattern!r}]"
        if not isinstance(constraint, Constraint):
            raise TypeError(f"{title} must be a te.sharding.Constraint, got {constraint!r}")
        fitting = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(f"{title} fits no table{did_you_mean(pattern, names)}")
        if twice := [name for name in fitting if name in found]:
            raise ValueError(
                f"table {twice[0]!r} has two constraints, {found[twice[0]]!r} and {pattern!r}; give it one"
            )
        found |= dict.fromkeys(fitting, pattern)
        if constraint.placements and all(not lacking.get(each, 1) for each in constraint.placements):
            raise ValueError(
                f"{title} asks for {list(constraint.placements)}, which the topology lacks: it has "
                f"{amount(topology.host)} of host memory and {amount(topology.disk)} of disk a node, and "
                f"{topology.servers} servers"
            )
    return [constraints[found[name]] if name in found else Constraint() for name in names]


def _numbers_of_copies(
    copies: int | None, topology: Topology, tables: Sequence[TableConfig], previous: ShardingPlan | None
) -> list[int]:
    dynamic = any(table.is_dynamic for table in tables)
    if copies is None:
        fixed = 1 if dynamic else previous.copies if previous is not None else None
        return [fixed] if fixed else [number for number in (1, 2, 4, 8, 16, 32) if topology.nodes % number == 0]
    if not isinstance(copies, int) or copies < 1 or topology.world_size % copies:
        raise ValueError(f"copies must divide the {topology.world_size} ranks, got {copies!r}")
    ranks = topology.world_size // copies
    if ranks % min(topology.local_world_size, ranks):
        raise ValueError(
            f"{copies} copies of the tables on {topology.world_size} ranks share nodes of {topology.local_world_size}"
        )
    if copies > 1 and dynamic:
        raise ValueError("dynamic tables have no copies; plan with copies=1")
    return [copies]


def _stay(
    model: CostModel, options: list[list[Option]], problem: Problem, fresh: Solution, previous: ShardingPlan
) -> Solution:
    """The plan in use with as few moves as keep it within `STAYS` of the new one; the new one if that cannot be."""
    chosen, where = fresh.chosen.copy(), np.full(len(problem.unit_kind), -1)
    for number, table in enumerate(model.tables):
        cache, first, same = previous.apply(table).cache, int(problem.table_options[number]), []
        for at, option in enumerate(options[number], first):
            units = slice(*problem.option_units[at : at + 2])
            places = places_in(previous, table, option, units.stop - units.start, model)
            if places is not None:
                rows = math.ceil(model.rows[number] / option.owners)
                on_host = cache.host_rows_of(rows) or 0
                distance = abs(option.cached - cache.rows_of(rows)) + abs(option.host_rows - on_host)
                same.append((distance, at, units, places))
        if same:
            _, chosen[number], units, places = min(same, key=lambda each: each[:2])
            where[units] = places
    unit = max(fresh.bound, 1e-12)
    scaled = problem._replace(load=problem.load / unit, option_shared=problem.option_shared / unit)
    where = np.asarray(place_greedily(scaled, chosen, where))
    stayed = solve(problem, fresh._replace(chosen=chosen, where=where), STAYS * fresh.load / unit)
    kept = stayed is not None and stayed.violation == 0 and stayed.load <= STAYS * fresh.load * (1 + 1e-9)
    return stayed if stayed is not None and kept else fresh


def _why_not(model: CostModel, options: list[list[Option]], problem: Problem, solution: Solution | None) -> str:
    """Which budget is exceeded, and by how much."""
    if solution is not None:
        return (
            "the tables fit in sum, but no packing was found that keeps every budget, by "
            f"{100 * solution.violation:.2f} % of one"
        )
    top, found = model.topology, totals(problem)
    usable, servers = {option.placement for each in options for option in each}, problem.option_server * top.servers
    # Of each tier that may be used: shares of it that options take, its size, how many there are, and words for it.
    budgets = [
        (values, float(size), count, f"{amount(size * count)} of {name} ({amount(size)} a {of})", name)
        for tier, name, values, size, count, of in (
            ("device", "device memory", found.hbm, top.hbm - model.memory_of_rank, model.ranks, "rank"),
            ("host", "host memory", found.host, top.host, model.nodes, "node"),
            ("disk", "disk", found.disk, top.disk, model.nodes, "node"),
            ("server", "memory of servers", servers, top.server_memory, top.servers, "server"),
        ) if tier in usable
    ]  # fmt: skip
    # The fewest bytes that the tables take, each where it takes fewest, beyond what all tiers have.
    taken = sum(values * size for values, size, *_ in budgets)
    least = float(np.minimum.reduceat(taken, problem.table_options[:-1]).sum())
    short = max(least - sum(size * count for _, size, count, *_ in budgets), 0.0)
    by = f"short by {amount(short)}" if short else "short of one of them: not every table may be on every tier"
    return (
        f"{len(model.tables)} tables need {amount(model.sizes.sum() * model.copies)} with their states, "
        f"{amount(least)} with caches and buffers; there is {', '.join(has for *_, has, _ in budgets)}: {by} of "
        f"{budgets[0][-1] if len(budgets) == 1 else 'memory in all'}"
    )


def _remedies(model: CostModel, bound: list[Constraint]) -> str:
    """What would make the tables fit: of each remedy the least that does, found by solving again."""
    top, tables, sizes = model.topology, model.tables, [2**n * 1e9 for n in range(3, 19)]

    def fits(rules: list[Constraint] = bound, **changes: Any) -> bool:
        try:
            return relax(make_problem(replace(model, copies=1, **changes), rules)[1], 0.01) is not None
        except PlanError:
            return False

    def smaller(table: TableConfig, part: float) -> TableConfig:
        return replace(table, capacity=max(1, int(table.capacity * part))) if table.capacity else table

    def remedies() -> Iterator[list[tuple[str, dict[str, Any]]]]:
        ranks = [top.world_size * times for times in (2, 4, 8, 16)]
        yield [(f"{number} ranks", {"topology": top.but(world_size=number)}) for number in ranks]
        if any(table.dtype == torch.float32 for table in tables):
            halves = [replace(t, dtype=torch.bfloat16) if t.dtype == torch.float32 else t for t in tables]
            yield [("16-bit tables (dtype=torch.bfloat16)", {"tables": halves})]
        for name, words in (("host", "host memory"), ("disk", "disk")):
            more = [(size, top.but(**{name: size})) for size in sizes if size > getattr(top, name)]
            yield [(f"{amount(size)} of {words} a node", {"topology": larger}) for size, larger in more]
        if any(each.placements is not None for each in bound):
            free = [Constraint(None, each.types) for each in bound]
            yield [("a lower tier: constraints that allow more placements", {"rules": free})]
        if any(table.capacity for table in tables):
            parts = {part: [smaller(table, part) for table in tables] for part in (0.75, 0.5, 0.25, 0.1)}
            yield [(f"dynamic tables of {part:g} of their capacity", {"tables": each}) for part, each in parts.items()]

    found = [next((words for words, changes in each if fits(**changes)), None) for each in remedies()]
    return (
        "it fits with " + ", or ".join(filter(None, found))
        if any(found)
        else "nothing tried makes it fit: more ranks, 16 bits, lower tiers"
    )


def plan_job(
    tables: Sequence[TableConfig], optimizer: Optimizer | None, group: RankGroup, ranks: int, local: int,
    device: torch.device, batch_size: int | None = None,
) -> ShardingPlan:  # fmt: skip
    """The plan of a running job that was given none. A collective: rank 0 makes it, and logs two lines of it.

    Tables keep their tiers: the plan has no placements, and takes tiers below the device to have room, as the tables
    exist already. Of those on embedding servers, `uniform_plan` says which rank holds the rows that it uses. Rates are
    assumed, device memory is this machine's. `SAMPLES` a rank if no `batch_size` is given.
    """
    tables = list({table.name: table for table in tables}.values())  # collections may share a name
    here = [table for table in tables if table.placement != "server"]
    if ranks == 1 or not here:
        return uniform_plan(tables, ranks, local)

    def make() -> ShardingPlan:
        topology = Topology.here(ranks, local, device.type)
        if any(table.placement != "device" for table in here):
            topology = topology.but(host=topology.host or 2e12, disk=topology.disk or 1e15)
        tiers = {table.name: Constraint((table.placement,)) for table in here}
        made = plan(here, topology, batch_size=batch_size or SAMPLES, optimizer=optimizer, constraints=tiers)
        assert made.report is not None
        _log.info("%s", made.report.summary())
        there = uniform_plan([table for table in tables if table.placement == "server"], ranks, local)
        return replace(made, tables={**made.tables, **there.tables}, placements={})

    own: ShardingPlan | Exception | None = None
    try:
        own = make() if group.rank == 0 else None
    except Exception as error:  # raised on every rank, below
        own = error
    # Its report stays with rank 0: an `init` of a table's need not be picklable.
    chosen = group.all_gather_object(replace(own, report=None) if isinstance(own, ShardingPlan) else own)[0]
    if isinstance(chosen, Exception):
        raise chosen
    return own if isinstance(own, ShardingPlan) else chosen
