"""`plan`: which rank has which part of which table, on which tier, so that a step is fast and everything fits."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import nn

from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.layout import rows_to_shard
from tritonemb.optimizers import Optimizer, RowWiseAdagrad
from tritonemb.sharding.plan import SHARDINGS, RowWise, Sharding, ShardingPlan, TablePlacement, TableWise, uniform_plan
from tritonemb.sharding.planner.cost_model import CostModel, Prediction
from tritonemb.sharding.planner.options import Constraint, Option, PlanError, make_problem, named, sharding, shards_in
from tritonemb.sharding.planner.report import PlanReport, TableReport
from tritonemb.sharding.planner.search import Placed, Solution, fewest_shards, relax, solve, stay, tables_of, totals
from tritonemb.sharding.planner.shard_packing import Problem
from tritonemb.sharding.planner.statistics import tables_in
from tritonemb.sharding.planner.topology import Topology
from tritonemb.sharding.table_stats import Array, TableStats
from tritonemb.types import TableConfig, checked_number, checked_size
from tritonemb.utils import did_you_mean, format_bytes

_log = logging.getLogger(__name__)
SAMPLES = 1_024  # of a rank, where nobody says how many
MOST_RESERVED = 0.5  # of a budget, before nothing fits
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
    if previous is not None and previous.world_size * previous.copies != topology.world_size:
        raise ValueError(
            f"previous is a plan for {previous.world_size * previous.copies} ranks, the topology has "
            f"{topology.world_size}; plan without it, and load a checkpoint, which any plan can"
        )
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
    """The plan for so many copies, whose report is its own, too. PlanError if the tables do not fit."""
    previous = previous if previous is not None and previous.copies == model.copies else None
    reserve = np.zeros(3)
    while True:
        try:
            options, problem = make_problem(model, bound, previous, reserve.tolist())
            solution = solve(problem)
            if solution is None or solution.violation > 0 or (reserve > MOST_RESERVED).any():
                raise PlanError(_why_not(model, options, problem, solution))
        except PlanError as error:
            raise PlanError(f"{error}; {_remedies(model, bound)}") from None
        made = _made(model, bound, options, problem, solution, {})
        over = _over(model, made[1].prediction)
        if not over.any():
            break
        reserve += 1.1 * over  # blocks are rounded, and ids not spread evenly: the search does not know exactly
    if previous is None:
        return made
    stayed, kept = _stay(model, options, problem, solution, previous)
    every = {number: previous.tables.get(table.name) for number, table in enumerate(model.tables)}
    for some, keep in ((solution, every), (stayed, kept)):  # as it is, if it can stay so; or nearly
        try:
            found = _made(model, bound, options, problem, some, keep, previous)
        except ValueError:  # of tables that were not there, or had other rows
            continue
        slower = found[1].load > STAYS * made[1].load
        allowed = all(
            (may.types is None or each.option.kind in may.types)
            and (may.placements is None or each.option.placement in may.placements)
            for may, each in zip(bound, found[1].tables, strict=True)
        )
        if allowed and not slower and not _over(model, found[1].prediction).any():
            return found
    return made


def _over(model: CostModel, seen: Prediction) -> Array:
    """By which shares the budgets of device and host memory and disk are exceeded."""
    top, own = model.topology, model.memory_of_rank
    used = seen.hbm.max() - own, seen.host.max(initial=0), seen.disk.max(initial=0)
    over = np.array(used) / np.maximum([top.hbm - own, top.host, top.disk], 1.0) - 1
    return np.where(over > 1e-9, over, 0.0)


def _made(
    model: CostModel, bound: list[Constraint], options: list[list[Option]], problem: Problem, solution: Solution,
    keep: Mapping[int, Sharding | None], previous: ShardingPlan | None = None,
) -> tuple[ShardingPlan, PlanReport]:  # fmt: skip
    """A solution's plan and report; tables to `keep` are as in the `previous` plan. ValueError if that cannot be."""
    shardings: dict[str, Sharding] = {}
    placements: dict[str, TablePlacement] = {}
    picked: list[tuple[Option, Option | None, float]] = []
    units, places, shares = solution.placed[1:]
    for number, (table, of_table, may) in enumerate(zip(model.tables, options, bound, strict=True)):
        first, at = int(problem.table_options[number]), int(solution.placed.chosen[number])
        option, cost = of_table[at - first], solution.cost[first : first + len(of_table)]
        allowed = Constraint() if model.ranks == 1 else may
        unit, last = problem.option_units[at : at + 2]
        of_option = (units >= unit) & (units < last)
        shards = units[of_option] - unit, places[of_option], shares[of_option]
        shardings[table.name], found = sharding(table, model.stats[table.name], option, allowed, *shards)
        share, on_host = option.cached or None, option.on_host or None
        placements[table.name] = TablePlacement(option.placement, cache_share=share, host_share=on_host)
        if number in keep:
            assert previous is not None
            previous.require_tables([table.name])
            shardings[table.name], placements[table.name] = previous.tables[table.name], previous.placement(table.name)
            kind = next(name for name, each in SHARDINGS.items() if each is type(previous.tables[table.name]))
            tier = placements[table.name].placement
            found = found._replace(kind=kind, placement=tier, parts=len(previous.tables[table.name].targets or [0]))
        elif option.kind == "server":
            shardings[table.name] = RowWise() if rows_to_shard(table) >= model.ranks > 1 else TableWise(0)
        parts_of = solution.parts[first : first + len(of_table)]
        others = [named(*each, allowed) for each in zip(of_table, parts_of.tolist(), strict=True)]
        mine = found.kind, found.placement
        better = [n for n, each in enumerate(others) if (each.kind, each.placement) != mine and np.isfinite(cost[n])]
        best = min(better, key=cost.__getitem__, default=None)
        runner_up = (None, 0.0) if best is None else (others[best], float(cost[best] - cost[at - first]))
        picked.append((found, *runner_up))
    result = ShardingPlan(shardings, model.ranks, model.local, placements, model.copies)
    prediction = model.predict(result)
    each_table = zip(model.tables, picked, prediction.by_table.tolist(), model.sizes.tolist(), strict=True)
    tables = tuple(TableReport(table, option, *numbers, *others) for table, (option, *others), *numbers in each_table)
    load = prediction.load  # with whole rows cached, so it may be a little below the bound
    report = PlanReport(model, tables, prediction, min(solution.bound, load), max(solution.greedy, load))
    return replace(result, report=report), report


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
                f"{format_bytes(topology.host)} of host memory and {format_bytes(topology.disk)} of disk a node, and "
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
) -> tuple[Solution, dict[int, Sharding | None]]:
    """The plan in use with as few moves as keep it within `STAYS` of the new one; and the tables that stay."""
    chosen, before = fresh.placed.chosen.copy(), dict[int, list[tuple[int, int, float]]]()
    for number, table in enumerate(model.tables):
        cache, first, same = previous.apply(table).cache, int(problem.table_options[number]), []
        for at, option in enumerate(options[number], first):
            unit, last = problem.option_units[at : at + 2].tolist()
            most, stats = int(problem.unit_most[unit:last].sum()), model.stats[table.name]
            if (shards := shards_in(previous, table, stats, option, most, model.local)) is not None:
                part = max((share for _, _, share in shards), default=1.0) if option.kind == "row_wise" else 1.0
                rows = max(1, int(part * rows_to_shard(table)))
                cached, on_host = cache.num_device_rows(rows) / rows, (cache.num_host_rows(rows) or 0) / rows
                distance = abs(option.cached - cached) + abs(option.on_host - on_host)
                same.append((distance, at, [(unit + of, place, share) for of, place, share in shards]))
        if same:
            _, chosen[number], before[number] = min(same, key=lambda each: each[:2])
    units, places, shares = np.array([shard for each in before.values() for shard in each]).reshape(-1, 3).T
    running = Placed(chosen, units.astype(np.int64), places.astype(np.int64), shares)
    stayed = stay(problem, fresh, running, STAYS * fresh.load)
    after: dict[int, list[tuple[int, int, float]]] = {number: [] for number in before}
    owner = np.repeat(tables_of(problem), np.diff(problem.option_units))
    for unit, place, share in zip(*(each.tolist() for each in stayed.placed[1:]), strict=True):
        if int(owner[unit]) in after:
            after[int(owner[unit])].append((unit, place, share))
    return stayed, {
        number: previous.tables[model.tables[number].name]
        for number, shards in before.items()
        if sorted(shards) == sorted(after[number]) and not _other_rows(previous, model.tables[number])
    }


def _other_rows(plan: ShardingPlan, table: TableConfig) -> bool:
    """Whether a plan's blocks are those of a table with another number of rows."""
    sharding = plan.tables[table.name]
    return isinstance(sharding, RowWise) and sharding.rows is not None and sum(sharding.rows) != rows_to_shard(table)


def _why_not(model: CostModel, options: list[list[Option]], problem: Problem, solution: Solution | None) -> str:
    """Which budget is exceeded, and by how much."""
    if solution is not None:
        return (
            "the tables fit in sum, but no packing was found that keeps every budget, by "
            f"{100 * solution.violation:.2f} % of one"
        )
    top, found = model.topology, totals(problem, fewest_shards(problem, np.inf)[0])
    usable = {option.placement for each in options for option in each}
    # Of each tier that may be used: shares of it that options take, its size, how many there are, and words for it.
    budgets = [
        (values, float(size), count,
         f"{format_bytes(size * count)} of {name} ({words or f'{format_bytes(size)} a {of}'})", name)
        for tier, name, values, size, count, of, words in (
            ("device", "device memory", found[:, 1], top.hbm - model.memory_of_rank, model.ranks, "rank",
             model.memory_in_words()),
            ("host", "host memory", found[:, 2], top.host, model.nodes, "node", ""),
            ("disk", "disk", found[:, 3], top.disk, model.nodes, "node", ""),
            ("server", "memory of servers", found[:, 4] * top.servers, top.server_memory, top.servers, "server", ""),
        ) if tier in usable
    ]  # fmt: skip
    # The fewest bytes that the tables take, each where it takes fewest, beyond what all tiers have.
    taken = sum(values * size for values, size, *_ in budgets)
    least = float(np.minimum.reduceat(taken, problem.table_options[:-1]).sum())
    short = max(least - sum(size * count for _, size, count, *_ in budgets), 0.0)
    of = budgets[0][-1] if len(budgets) == 1 else "memory in all"
    by = f"by {format_bytes(short)} of {of}" if short else "of one of them: each table is on one tier alone"
    return (
        f"{len(model.tables)} tables need {format_bytes(model.sizes.sum() * model.copies)} with their states, "
        f"{format_bytes(least)} with caches and buffers; there is "
        f"{', '.join(has for *_, has, _ in budgets)}: short {by}"
    )


def _remedies(model: CostModel, bound: list[Constraint]) -> str:
    """What would make the tables fit: of each remedy the least that does, found by solving again."""
    top, tables, sizes = model.topology, model.tables, [2**n * 1e9 for n in range(3, 19)]

    def fits(rules: list[Constraint] = bound, **changes: Any) -> bool:
        try:
            return relax(make_problem(replace(model, copies=1, **changes), rules)[1], slack=0.01) is not None
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
        for name, words in (("host", "host memory a node"), ("disk", "disk a node"), ("hbm", "device memory a rank")):
            more = [(size, top.but(**{name: size})) for size in sizes if size > getattr(top, name)]
            yield [(f"{format_bytes(size)} of {words}", {"topology": larger}) for size, larger in more]
        if model.memory_of_rank > 0.1 * top.hbm:
            batches = [max(1, model.batch_size // parts) for parts in (2, 4, 8, 16)]
            yield [(f"batches of {number:,} samples a rank", {"batch_size": number}) for number in batches]
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
