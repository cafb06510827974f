"""`plan`: choose sharding, tier and cache of each table, so that a step is fast and everything fits."""

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
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
from tritonemb.sharding.plan import Sharding, ShardingPlan, TablePlacement, uniform_plan
from tritonemb.sharding.planner.cost_model import CostModel
from tritonemb.sharding.planner.options import Constraint, Option, PlanError, decode, encode, make_problem, with_blocks
from tritonemb.sharding.planner.report import PlanReport, TableReport
from tritonemb.sharding.planner.search import Solution, fewest_shards, keep, relax, solve
from tritonemb.sharding.planner.settings import SETTINGS
from tritonemb.sharding.planner.shard_packing import Assignment, Problem
from tritonemb.sharding.planner.statistics import Array, TableStats, tables_in
from tritonemb.sharding.planner.topology import Topology
from tritonemb.types import TableConfig, checked_number, checked_size
from tritonemb.utils import did_you_mean, format_bytes, require

_log = logging.getLogger(__name__)
DEFAULT_BATCH_SIZE = 1_024  # samples per rank


def plan(
    tables: Sequence[TableConfig] | nn.Module, topology: Topology, *, batch_size: int | None = None,
    global_batch_size: int | None = None, optimizer: Optimizer | None = None,
    stats: Mapping[str, TableStats] | None = None, constraints: Mapping[str, Constraint] | None = None,
    previous: ShardingPlan | None = None, exchange: ExchangePrecision | None = None, copies: int | None = 1,
    dense_parameters: int | None = None, activation_bytes: float = 0.0,
) -> ShardingPlan:  # fmt: skip
    """Plan the sharding, tier and cached rows of tables on a cluster. Deterministic in its arguments.

    Args:
        tables: configs, or a model with embedding collections, which also has the optimizer and other layers.
        topology: ranks, memory, rates and latencies of the cluster.
        batch_size: samples per rank; or `global_batch_size`, of all ranks.
        optimizer: of the tables, for its states; row-wise Adagrad by default.
        stats: usage of the tables, from `te.collect_stats`; by default one id per sample and feature, uniform.
        constraints: by table, or by a pattern such as "user_*"; a table's own `placement` does not bind.
        previous: the running plan: its shards stay unless that costs more than 2 % of the time.
        exchange: codecs of the output exchange.
        copies: of the tables, each on a part of the nodes; None tries all numbers.
        dense_parameters: parameters of the other layers, if no model is passed.
        activation_bytes: of the other layers, at their peak, on each rank.

    Returns:
        a plan with a `report`; print it.

    Raises:
        PlanError: the tables do not fit.
        TypeError, ValueError: naming the argument, and the table.
        MissingExtraError: scipy is not installed.
    """
    require("scipy", "plan")
    # Check the arguments.
    collections, configs = tables_in(tables)
    if (batch_size is None) == (global_batch_size is None):
        raise ValueError("pass batch_size, the samples per rank, or global_batch_size, the samples of all ranks")
    if batch_size is None:
        batch_size = -(-checked_size("global_batch_size", global_batch_size) // topology.world_size)
    if dense_parameters is None:
        sizes = {id(p): p.numel() for p in tables.parameters()} if isinstance(tables, nn.Module) else {}
        embedding_ids = {id(parameter) for collection in collections for parameter in collection.parameters()}
        dense_parameters = sum(size for parameter, size in sizes.items() if parameter not in embedding_ids)
    optimizer = optimizer or next((c.optimizer for c in collections if c.optimizer), RowWiseAdagrad())
    rules = _constraints_of_tables(configs, constraints or {}, topology)
    size, exchange = checked_size("batch_size", batch_size), exchange or ExchangePrecision()
    if checked_number("activation_bytes", activation_bytes) < 0:
        raise ValueError(f"activation_bytes must be at least 0, got {activation_bytes}")
    if previous is not None and previous.world_size * previous.copies != topology.world_size:
        raise ValueError(
            f"previous is a plan for {previous.world_size * previous.copies} ranks, the topology has "
            f"{topology.world_size}; plan without previous and load a checkpoint, which works with any plan"
        )
    # Plan for each number of copies, and return the fastest plan.
    model = CostModel(
        configs, topology, size, optimizer, stats or {}, exchange, dense_parameters=dense_parameters,
        activation_bytes=activation_bytes,
    )  # fmt: skip
    plans, failures = list[ShardingPlan](), list[PlanError]()
    for num_copies in _copies_to_try(copies, topology, configs, previous):
        try:
            plans.append(_plan(replace(model, copies=num_copies), rules, previous))
        except PlanError as error:
            failures.append(error)
    if not plans:
        raise failures[0]
    return min(plans, key=lambda candidate: candidate.report.prediction.step)


def _plan(model: CostModel, rules: list[Constraint], previous: ShardingPlan | None) -> ShardingPlan:
    """Plan for a number of copies. PlanError if the tables do not fit."""
    previous = previous if previous is not None and previous.copies == model.copies else None
    reserve = np.zeros(3)
    while True:
        try:
            options, problem = make_problem(model, rules, previous, reserve.tolist())
            solution = solve(problem)
            if solution is None or solution.violation > 0 or (reserve > SETTINGS.max_reserve).any():
                raise PlanError(_shortage(model, options, problem, solution))
        except PlanError as error:
            raise PlanError(f"{error}; {_remedies(model, rules)}") from None
        new = _build(model, rules, options, problem, solution)
        if not (overrun := _overrun(new.report)).any():
            break
        reserve += 1.1 * overrun  # rounding of blocks, and uneven ids, which the search only estimates
    if previous is None:
        return new
    # Keep the running plan as it is, or with few moves, if it is feasible and fast enough.
    repaired, unmoved_tables = _keep_previous(model, options, problem, solution, previous)
    for candidate, unmoved in ((solution, range(len(model.tables))), (repaired, unmoved_tables)):
        try:
            result = _build(model, rules, options, problem, candidate, previous, unmoved)
        except ValueError:  # a table is new, or has another number of rows
            continue
        slower = result.report.load > SETTINGS.keep_within * new.report.load
        allowed = all(
            (rule.types is None or table.option.kind in rule.types)
            and (rule.placements is None or table.option.placement in rule.placements)
            for rule, table in zip(rules, result.report.tables, strict=True)
        )
        if allowed and not slower and not _overrun(result.report).any():
            return result
    return new


def _overrun(report: PlanReport) -> Array:
    """Return the excess over the budgets of device memory, host memory and disk, as shares of these."""
    model, prediction = report.model, report.prediction
    used = prediction.hbm.max() - model.reserved_bytes, prediction.host.max(initial=0), prediction.disk.max(initial=0)
    over = np.array(used) / np.maximum(model.budgets[:3], 1.0) - 1
    return np.where(over > 1e-9, over, 0.0)


def _build(
    model: CostModel, rules: list[Constraint], options: list[list[Option]], problem: Problem, solution: Solution,
    previous: ShardingPlan | None = None, unmoved: Container[int] = (),
) -> ShardingPlan:  # fmt: skip
    """Build a solution's plan and report. `unmoved` tables are as in the `previous` plan; ValueError if invalid."""
    shardings: dict[str, Sharding] = {}
    placements: dict[str, TablePlacement] = {}
    choices: list[tuple[Option, Option | None, float]] = []  # a table's option, its runner-up, and extra cost
    assignment = solution.assignment
    for number, (table, table_options, rule) in enumerate(zip(model.tables, options, rules, strict=True)):
        # The selected option, its costs, and its shards.
        first, index = int(problem.table_options[number]), int(assignment.options[number])
        option, cost = table_options[index - first], solution.cost[first : first + len(table_options)]
        rule = Constraint() if model.ranks == 1 else rule
        units = assignment.units[number] - int(problem.option_units[index])
        shards = units, assignment.shares[number]
        shardings[table.name], choice = decode(table, model.stats[table.name], option, rule, *shards)
        cache_share, host_share = option.cache_share or None, option.host_share or None
        placements[table.name] = TablePlacement(option.placement, cache_share=cache_share, host_share=host_share)
        if previous is not None and number in unmoved:
            previous.require_tables([table.name])
            sharding = previous.tables[table.name]
            shardings[table.name], placements[table.name] = sharding, previous.placement(table.name)
            placement, num_blocks = placements[table.name].placement, len(sharding.targets or [0])
            choice = choice._replace(kind=sharding.kind, placement=placement, num_blocks=num_blocks)
        # The best option of another type or tier.
        num_shards = solution.num_shards[first : first + len(table_options)].tolist()
        alternatives = [with_blocks(*values, rule) for values in zip(table_options, num_shards, strict=True)]
        eligible = [n for n, option in enumerate(alternatives) if option[:2] != choice[:2] and np.isfinite(cost[n])]
        best = min(eligible, key=cost.__getitem__, default=None)
        runner_up = (None, 0.0) if best is None else (alternatives[best], float(cost[best] - cost[index - first]))
        choices.append((choice, *runner_up))
    result = ShardingPlan(shardings, model.ranks, model.local, placements, model.copies)
    prediction = model.predict(result)
    rows = zip(model.tables, choices, prediction.by_table.tolist(), model.sizes.tolist(), strict=True)
    tables = tuple(TableReport(table, choice, *numbers, *runner_up) for table, (choice, *runner_up), *numbers in rows)
    load = prediction.load  # with whole rows cached, so it may be slightly below the bound
    report = PlanReport(model, tables, prediction, min(solution.bound, load), max(solution.greedy, load))
    return replace(result, report=report)


def _constraints_of_tables(
    tables: Sequence[TableConfig], constraints: Mapping[str, Constraint], topology: Topology
) -> list[Constraint]:
    """Match constraints to tables. ValueError for a pattern without a table, and for a table with two patterns."""
    pattern_of: dict[str, str] = {}
    names = [table.name for table in tables]
    lacking = {"host": topology.host, "disk": topology.disk, "server": topology.servers}
    for pattern, constraint in constraints.items():
        title = f"constraints[{pattern!r}]"
        if not isinstance(constraint, Constraint):
            raise TypeError(f"{title} must be a te.sharding.Constraint, got {constraint!r}")
        matches = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(f"{title} matches no table{did_you_mean(pattern, names)}")
        if twice := [name for name in matches if name in pattern_of]:
            raise ValueError(
                f"table {twice[0]!r} has two constraints, {pattern_of[twice[0]]!r} and {pattern!r}; give it one"
            )
        pattern_of |= dict.fromkeys(matches, pattern)
        if constraint.placements and all(not lacking.get(placement, 1) for placement in constraint.placements):
            raise ValueError(
                f"{title} asks for {list(constraint.placements)}, which the topology lacks: it has "
                f"{format_bytes(topology.host)} of host memory and {format_bytes(topology.disk)} of disk per node, and "
                f"{topology.servers} servers"
            )
    return [constraints[pattern_of[name]] if name in pattern_of else Constraint() for name in names]


def _copies_to_try(
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
        raise ValueError("dynamic tables cannot be replicated; plan with copies=1")
    return [copies]


def _keep_previous(
    model: CostModel, options: list[list[Option]], problem: Problem, new: Solution, previous: ShardingPlan
) -> tuple[Solution, set[int]]:
    """Repair the running plan with few moves, to a load within `keep_within` of the new one. Return unmoved tables."""
    shape = len(model.tables), model.ranks
    running = Assignment(new.assignment.options.copy(), np.full(shape, -1), np.zeros(shape))
    # The option of each table in the running plan, of nearest cache shares, and its shards.
    same_size = set[int]()  # tables with as many rows as in the running plan
    for number, table in enumerate(model.tables):
        cache, first, matches = previous.apply(table).cache, int(problem.table_options[number]), []
        for index, option in enumerate(options[number], first):
            first_unit, end_unit = problem.option_units[index : index + 2].tolist()
            max_shards, stats = int(problem.unit_max_shards[first_unit:end_unit].sum()), model.stats[table.name]
            if (shards := encode(previous, table, stats, option, max_shards, model.local)) is not None:
                largest = max((share for _, _, share in shards), default=1.0) if option.kind == "row_wise" else 1.0
                rows = max(1, int(largest * rows_to_shard(table)))
                cached, on_host = cache.num_device_rows(rows) / rows, (cache.num_host_rows(rows) or 0) / rows
                distance = abs(option.cache_share - cached) + abs(option.host_share - on_host)
                matches.append((distance, index, shards))
        if matches:
            _, running.options[number], shards = min(matches, key=lambda match: match[:2])
            for unit, target, share in shards:
                running.units[number, target] = problem.option_units[running.options[number]] + unit
                running.shares[number, target] = share
            block_rows = getattr(previous.tables[table.name], "rows", None)
            if block_rows is None or sum(block_rows) == rows_to_shard(table):
                same_size.add(number)
    repaired = keep(problem, new, running, SETTINGS.keep_within * new.load)
    # Compare the shards of each table before and after.
    same_share = (running.units < 0) | (running.shares == repaired.shares)
    is_same = ((running.units == repaired.units) & same_share).all(1)
    return new._replace(assignment=repaired), {number for number in same_size if is_same[number]}


def _shortage(model: CostModel, options: list[list[Option]], problem: Problem, solution: Solution | None) -> str:
    """Describe which budget is exceeded, and by how much."""
    if solution is not None:
        return (
            "the tables fit in total, but the search found no packing within every budget; the best exceeds one by "
            f"{100 * solution.violation:.2f} %"
        )
    top, uses = model.topology, problem.totals(fewest_shards(problem, np.inf)[0])
    usable = {option.placement for table_options in options for option in table_options}
    # Of each usable tier: its usage by options, in bins; size and number of bins; a description, and its name.
    budgets = [
        (values, float(size), count,
         f"{format_bytes(size * count)} of {name} ({text or f'{format_bytes(size)} per {owner}'})", name)
        for tier, name, values, size, count, owner, text in (
            ("device", "device memory", uses[:, 1], top.hbm - model.reserved_bytes, model.ranks, "rank",
             model.describe_memory()),
            ("host", "host memory", uses[:, 2], top.host, model.nodes, "node", ""),
            ("disk", "disk", uses[:, 3], top.disk, model.nodes, "node", ""),
            ("server", "server memory", uses[:, 4] * top.servers, top.server_memory, top.servers, "server", ""),
        ) if tier in usable
    ]  # fmt: skip
    # The fewest bytes that the tables need, each with its smallest option, against the memory of all tiers.
    needed = sum(values * size for values, size, *_ in budgets)
    least = float(np.minimum.reduceat(needed, problem.table_options[:-1]).sum())
    short = max(least - sum(size * count for _, size, count, *_ in budgets), 0.0)
    scope = f" of {budgets[0][-1]}" if len(budgets) == 1 else " in total"
    shortage = (
        f"short by {format_bytes(short)}{scope}" if short else "one tier is too small, and a table must fit on one tier"
    )
    return (
        f"{len(model.tables)} tables need {format_bytes(model.sizes.sum() * model.copies)} with optimizer states, "
        f"{format_bytes(least)} with caches and buffers; available: "
        f"{', '.join(text for *_, text, _ in budgets)}: {shortage}"
    )


def _remedies(model: CostModel, rules: list[Constraint]) -> str:
    """List the smallest change of each kind that makes the tables fit, by solving again."""
    top, tables, sizes = model.topology, model.tables, [2**n * 1e9 for n in range(3, 19)]

    def fits(rules: list[Constraint] = rules, **changes: Any) -> bool:
        try:
            return relax(make_problem(replace(model, copies=1, **changes), rules)[1], slack=0.01) is not None
        except PlanError:
            return False

    def remedies() -> Iterator[list[tuple[str, dict[str, Any]]]]:
        ranks = [top.world_size * times for times in (2, 4, 8, 16)]
        yield [(f"{number} ranks", {"topology": top.but(world_size=number)}) for number in ranks]
        if any(table.dtype == torch.float32 for table in tables):
            halves = [replace(t, dtype=torch.bfloat16) if t.dtype == torch.float32 else t for t in tables]
            yield [("16-bit tables (dtype=torch.bfloat16)", {"tables": halves})]
        memories = {"host": "host memory per node", "disk": "disk per node", "hbm": "device memory per rank"}
        for name, text in memories.items():
            larger = [(size, top.but(**{name: size})) for size in sizes if size > getattr(top, name)]
            yield [(f"{format_bytes(size)} of {text}", {"topology": topology}) for size, topology in larger]
        if model.reserved_bytes > 0.1 * top.hbm:
            batches = [max(1, model.batch_size // parts) for parts in (2, 4, 8, 16)]
            yield [(f"batches of {number:,} samples per rank", {"batch_size": number}) for number in batches]
        if any(rule.placements is not None for rule in rules):
            free = [Constraint(None, rule.types) for rule in rules]
            yield [("a lower tier: constraints that allow more placements", {"rules": free})]
        if any(table.capacity for table in tables):
            for_part = {
                part: [replace(t, capacity=max(1, int(t.capacity * part))) if t.capacity else t for t in tables]
                for part in (0.75, 0.5, 0.25, 0.1)
            }
            yield [(f"dynamic tables of {part:g} of their capacity", {"tables": t}) for part, t in for_part.items()]

    fitting = [next((text for text, changes in kind if fits(**changes)), None) for kind in remedies()]
    return (
        "it fits with " + ", or ".join(filter(None, fitting))
        if any(fitting)
        else "no single remedy makes it fit; combine more ranks, 16-bit tables, lower tiers"
    )


def plan_job(
    tables: Sequence[TableConfig], optimizer: Optimizer | None, group: RankGroup, ranks: int, local: int,
    device: torch.device, batch_size: int | None = None,
) -> ShardingPlan:  # fmt: skip
    """Plan a running job that was given no plan. A collective: rank 0 plans, and logs a summary of two lines.

    Tables exist already and keep their tiers: the plan has no placements, and tiers below the device count as large
    enough. For tables on embedding servers, `uniform_plan` assigns the rows in use to ranks. Rates are assumed, device
    memory is this machine's. `batch_size` is in samples per rank, 1,024 by default.
    """
    tables = list({table.name: table for table in tables}.values())  # collections may share a name
    local_tables = [table for table in tables if table.placement != "server"]
    if ranks == 1 or not local_tables:
        return uniform_plan(tables, ranks, local)

    def make() -> ShardingPlan:
        topology = Topology.here(ranks, local, device.type)
        if any(table.placement != "device" for table in local_tables):
            topology = topology.but(host=topology.host or 2e12, disk=topology.disk or 1e15)
        tiers = {table.name: Constraint((table.placement,)) for table in local_tables}
        size = batch_size or DEFAULT_BATCH_SIZE
        local_plan = plan(local_tables, topology, batch_size=size, optimizer=optimizer, constraints=tiers)
        _log.info("%s", local_plan.report.summary())
        server_plan = uniform_plan([table for table in tables if table.placement == "server"], ranks, local)
        return replace(local_plan, tables={**local_plan.tables, **server_plan.tables}, placements={})

    local_result: ShardingPlan | Exception | None = None
    try:
        local_result = make() if group.rank == 0 else None
    except Exception as error:  # raised on every rank, below
        local_result = error
    # The report stays on rank 0: a table's `init` need not be picklable.
    sent = replace(local_result, report=None) if isinstance(local_result, ShardingPlan) else local_result
    shared = group.all_gather_object(sent)[0]
    if isinstance(shared, Exception):
        raise shared
    return local_result if isinstance(local_result, ShardingPlan) else shared
