"""`plan`: choose sharding, tier and cache of each table, so that a step is fast and everything fits."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise, repeat
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.layout import rows_to_shard
from tritonemb.optimizers import Optimizer, RowWiseAdagrad
from tritonemb.sharding.plan import SHARDINGS, RowWise, Sharding, ShardingPlan, TablePlacement, uniform_plan
from tritonemb.sharding.planner.cost_model import PLACEMENTS, CostModel, Prediction
from tritonemb.sharding.planner.options import Constraint, Option, PlanError, decode, make_problem, with_blocks
from tritonemb.sharding.planner.report import PlanReport, RunnerUp
from tritonemb.sharding.planner.search import Solution, fewest_shards, relax, solve
from tritonemb.sharding.planner.settings import SETTINGS
from tritonemb.sharding.planner.shard_packing import Problem
from tritonemb.sharding.planner.statistics import Array, TableStats, tables_in
from tritonemb.sharding.planner.topology import Topology
from tritonemb.types import TableConfig, checked_number, checked_size
from tritonemb.utils import did_you_mean, format_bytes, require

_log = logging.getLogger(__name__)


def plan(
    tables: Sequence[TableConfig] | nn.Module, topology: Topology, *, batch_size: int | None = None,
    global_batch_size: int | None = None, optimizer: Optimizer | None = None,
    stats: Mapping[str, TableStats] | None = None, constraints: Mapping[str, Constraint] | None = None,
    previous: ShardingPlan | None = None, exchange: ExchangePrecision | None = None, copies: int | None = 1,
    dense_parameters: int | None = None, activation_bytes: float = 0.0, epoch_samples: int = 0,
) -> ShardingPlan:  # fmt: skip
    """Plan the sharding, tier and cached rows of tables on a cluster. Deterministic in its arguments.

    Args:
        tables: configs, or a model with embedding collections, which also has the optimizer and other layers.
        topology: ranks, memory, rates and latencies of the cluster.
        batch_size, global_batch_size: samples per step, per rank or of all ranks; pass one of them.
        optimizer: optimizer of the tables, for the size of its states; row-wise Adagrad by default.
        stats: usage of the tables, from `te.collect_stats`; by default one id per sample and feature, uniform.
        constraints: constraints by the name of a table, or by a pattern such as "user_*"; a name takes precedence over
            a pattern. A table's own `placement` is only a default.
        previous: the running plan: its shards stay unless that costs more than 2 % of the time.
        exchange: codecs of the output exchange.
        copies: number of replicas of the tables, each on a part of the nodes; None tries all numbers.
        dense_parameters: number of parameters of the other layers, if no model is passed.
        activation_bytes: bytes of activations of the other layers on each rank, at their peak.
        epoch_samples: samples of all ranks per epoch, for its duration and price in the report.

    Returns:
        The plan; `print(plan)` shows its `report`.

    Raises:
        PlanError: the tables do not fit.
        TypeError, ValueError: naming the argument, and the table.
        MissingExtraError: scipy is not installed.
    """
    require("scipy", "plan")
    # Check the arguments.
    if not isinstance(topology, Topology):
        raise TypeError(f"topology must be a te.Topology, got {topology!r}")
    if not isinstance(optimizer, Optimizer | None):
        raise TypeError(f"optimizer must be one of te.optim, got {optimizer!r}")
    if not isinstance(previous, ShardingPlan | None):
        raise TypeError(f"previous must be a plan, got {previous!r}")
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
        activation_bytes=activation_bytes, epoch_samples=checked_size("epoch_samples", epoch_samples, 0),
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
    reserve = np.zeros(3)
    while True:
        try:
            options, problem = make_problem(model, rules, reserve.tolist())
            solution = solve(problem)
            if solution is None or solution.violation > 0 or (reserve > SETTINGS.max_reserve).any():
                raise PlanError(_shortage(model, options, problem, solution))
        except PlanError as error:
            raise PlanError(f"{error}; {_remedies(model, rules)}") from None
        best = _decode(model, rules, options, problem, solution)
        if not (overrun := _overrun(model, model.predict(best))).any():
            break
        reserve += 1.1 * overrun  # rounding of blocks, and uneven ids, which the search only estimates
    # Uniform plans may be better; the running plan stays if it is nearly as good.
    best = min([best, *_uniform_plans(model)], key=lambda candidate: _load(model, rules, candidate))
    if previous is not None and previous.copies == model.copies:
        running = _adapt(previous, best, model)
        if _load(model, rules, running) <= SETTINGS.keep_within * _load(model, rules, best):
            best = running
    return replace(best, report=_report(model, rules, options, problem, solution, best))


def _overrun(model: CostModel, prediction: Prediction) -> Array:
    """Return the excess over the budgets of device memory, host memory and disk, as shares of these."""
    used = prediction.hbm - model.rank_hbm, prediction.host - model.topology.host, prediction.disk - model.topology.disk
    over = np.array([values.max(initial=0) for values in used]) / np.maximum(model.budgets[:3], 1.0)
    return np.where(over > 1e-9, over, 0.0)


def _load(model: CostModel, rules: list[Constraint], plan: ShardingPlan) -> float:
    """Return the load of a plan; infinite if it is invalid, violates a constraint, or does not fit."""
    for table, rule in zip(model.tables, rules, strict=True):
        kind, tier = plan.tables[table.name].kind, plan.placement(table.name).placement
        any_type = tier == "server" or model.ranks == 1
        if not (any_type or kind in (rule.types or [kind])) or tier not in (rule.placements or [tier]):
            return np.inf
    try:
        prediction = model.predict(plan)
    except ValueError:  # a sharding that a table cannot have
        return np.inf
    return np.inf if _overrun(model, prediction).any() else prediction.load


def _uniform_plans(model: CostModel) -> Iterator[ShardingPlan]:
    """Yield plans with one sharding type for all tables, on the device, and a plan by their sizes."""
    names, ranks, local = [table.name for table in model.tables], model.ranks, model.local
    kinds, encoded = cast(Any, SHARDINGS), [t for t in model.tables if t.dtype == torch.int8]
    placements = dict.fromkeys(names, TablePlacement()) | {t.name: TablePlacement(t.placement) for t in encoded}

    def make(shardings: Iterable[Sharding]) -> ShardingPlan:
        return ShardingPlan(dict(zip(names, shardings, strict=False)), ranks, local, placements, model.copies)

    # Whole tables go to the rank or node with the least load, the most expensive ones first.
    seconds = model.predict(make(repeat(kinds["table_wise"](0)))).by_table

    def spread(count: int) -> list[int]:
        load, bins = np.zeros(count), np.zeros(len(names), dtype=np.int64)
        for table in np.argsort(-seconds, kind="stable"):
            bins[table] = load.argmin()
            load[bins[table]] += seconds[table]
        return bins.tolist()

    yield make(map(kinds["table_wise"], spread(ranks)))
    yield from (make(repeat(kinds[kind]())) for kind in ("row_wise", "column_wise", "data_parallel"))
    if model.nodes > 1 and local > 1:
        yield from (make(map(kinds[kind], spread(model.nodes))) for kind in ("table_row_wise", "table_column_wise"))
        yield make(repeat(kinds["grid"]()))
    yield make(uniform_plan(model.tables, ranks, local).tables.values())


def _adapt(running: ShardingPlan, new: ShardingPlan, model: CostModel) -> ShardingPlan:
    """Return the running plan, with new shards of tables that it lacks; blocks of rows grow in proportion."""
    shardings = {table.name: running.tables.get(table.name, new.tables[table.name]) for table in model.tables}
    for table in model.tables:
        sharding = shardings[table.name]
        if isinstance(sharding, RowWise) and sharding.rows is not None:
            ends = np.cumsum(sharding.rows) * (rows_to_shard(table) / sum(sharding.rows))
            rows = np.diff(ends.round().astype(np.int64), prepend=0).tolist()
            shardings[table.name] = replace(sharding, rows=rows)
    placements = {name: (running if name in running.tables else new).placement(name) for name in shardings}
    return ShardingPlan(shardings, model.ranks, model.local, placements, model.copies)


def _decode(
    model: CostModel, rules: list[Constraint], options: list[Option], problem: Problem, solution: Solution
) -> ShardingPlan:
    shardings, placements, assignment = dict[str, Sharding](), dict[str, TablePlacement](), solution.assignment
    for number, (table, rule) in enumerate(zip(model.tables, rules, strict=True)):
        index = int(assignment.options[number])
        option, units = options[index], assignment.units[number] - int(problem.option_units[index])
        shares = assignment.shares[number]
        shardings[table.name] = decode(table, model.stats[table.name], option, rule, units, shares)
        cache_share, host_share = option.cache_share or None, option.host_share or None
        placements[table.name] = TablePlacement(option.placement, cache_share=cache_share, host_share=host_share)
    return ShardingPlan(shardings, model.ranks, model.local, placements, model.copies)


def _report(
    model: CostModel, rules: list[Constraint], options: list[Option], problem: Problem, solution: Solution,
    plan: ShardingPlan,
) -> PlanReport:  # fmt: skip
    """Report a plan, with the next best option of each table: the cheapest of another type or tier."""
    runner_ups: dict[str, RunnerUp] = {}
    shards = model.shards(plan)[0]
    unused = ~model.waits(shards.scheme, shards.placement).any(0)  # an option may need latencies that the plan has not
    costs = solution.cost + (problem.option_waits & unused) @ problem.latencies
    num_shards = solution.num_shards.tolist()
    for table, rule, (first, end) in zip(model.tables, rules, pairwise(problem.table_options.tolist()), strict=True):
        choice, cost = Option.of(plan, table), costs[first:end]
        alternatives = [with_blocks(options[n], num_shards[n], rule) for n in range(first, end)]
        # Any cache and any number of shards of the chosen type and tier are not alternatives.
        names = choice.kind, "row_wise" if choice.kind == "table_wise" else choice.kind
        same = [
            option.placement == choice.placement and (option.kind in names or alternative.kind == choice.kind)
            for option, alternative in zip(options[first:end], alternatives, strict=True)
        ]
        least = cost.min(where=same, initial=np.inf)
        # Cheaper ones do not fit beside the other tables: the search has tried them.
        extra = cost - (least if np.isfinite(least) else cost.min())
        extra[same | (extra < 1e-9)] = np.inf
        if np.isfinite(extra.min()):
            runner_ups[table.name] = alternatives[extra.argmin()], float(extra.min())
    load = model.predict(plan).load  # with whole rows cached, so it may be slightly below the bound
    return PlanReport.of(model, plan, runner_ups, min(solution.bound, load), max(solution.greedy, load))


def _constraints_of_tables(
    tables: Sequence[TableConfig], constraints: Mapping[str, Constraint], topology: Topology
) -> list[Constraint]:
    """Match constraints to tables; a name wins over patterns. ValueError for a pattern without a table, and for a table
    with two patterns.
    """
    names, rules = [table.name for table in tables], list[Constraint]()
    wildcards = [pattern for pattern in constraints if pattern not in names]
    lacking = {"host": topology.host, "disk": topology.disk, "server": topology.servers}
    for pattern, constraint in constraints.items():
        title = f"constraints[{pattern!r}]"
        if not isinstance(constraint, Constraint):
            raise TypeError(f"{title} must be a te.sharding.Constraint, got {constraint!r}")
        if pattern in wildcards and not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{title} matches no table{did_you_mean(pattern, names)}")
        if constraint.placements and all(not lacking.get(placement, 1) for placement in constraint.placements):
            raise ValueError(
                f"{title} asks for {list(constraint.placements)}, which the topology lacks: it has "
                f"{format_bytes(topology.host)} of host memory and {format_bytes(topology.disk)} of disk per node, and "
                f"{topology.servers} servers"
            )
    for name in names:
        matches = [name] if name in constraints else [pattern for pattern in wildcards if fnmatchcase(name, pattern)]
        if len(matches) > 1:
            raise ValueError(f"table {name!r} has two constraints, {matches[0]!r} and {matches[1]!r}; give it one")
        rules.append(constraints[matches[0]] if matches else Constraint())
    return rules


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


def _shortage(model: CostModel, options: list[Option], problem: Problem, solution: Solution | None) -> str:
    """Describe which budget is exceeded, and by how much."""
    if solution is not None:
        return (
            f"the tables fit in total, but no packing was found; the best exceeds a budget by {solution.violation:.2%}"
        )
    # The fewest bytes that the tables need, each with its smallest option, against the memory of all usable tiers.
    names = "device memory", "host memory", "disk", "server memory"
    available = model.budgets * (model.ranks, model.nodes, model.nodes, 1)
    available[0] -= (model.rank_hbm.max() - model.rank_hbm).sum()
    placements = {option.placement for option in options}
    usable = [number for number, placement in enumerate(PLACEMENTS) if placement in placements]
    needed = problem.totals(fewest_shards(problem, np.inf)[0])[:, 1:] @ model.budgets
    least = float(np.minimum.reduceat(needed, problem.table_options[:-1]).sum())
    short = least - float(available[usable].sum())
    return (
        f"{len(model.tables)} tables need {format_bytes(model.sizes.sum() * model.copies)} with optimizer states, "
        f"{format_bytes(least)} with caches and buffers; available: "
        f"{', '.join(f'{format_bytes(available[number])} of {names[number]}' for number in usable)}"
        f"{f' ({model.describe_memory()})' if 'device' in placements else ''}: "
        f"{f'short by {format_bytes(short)}' if short > 0 else 'a tier is too small, and a table must fit on one tier'}"
    )


def _remedies(model: CostModel, rules: list[Constraint]) -> str:
    """List the smallest change of each kind that makes the tables fit, by solving again."""
    top, tables, sizes = model.topology, model.tables, [2**n * 1e9 for n in range(3, 19)]
    memories = {"host": "host memory per node", "disk": "disk per node", "hbm": "device memory per rank"}
    halves = [replace(t, dtype=torch.bfloat16) if t.dtype == torch.float32 else t for t in tables]
    fewer = [model.batch_size // parts for parts in (2, 4, 8, 16) if model.batch_size >= parts]

    def more_ranks(times: int) -> Topology:
        memory, speed = (times * tuple(values) for values in (top.rank_memory, top.rank_speed))
        return top.but(world_size=times * top.world_size, rank_memory=memory, rank_speed=speed)

    def larger(name: str) -> list[tuple[str, dict[str, Any]]]:
        larger_sizes = [size for size in sizes if size > getattr(top, name)]
        return [(f"{format_bytes(s)} of {memories[name]}", {"topology": top.but(**{name: s})}) for s in larger_sizes]

    kinds: list[list[tuple[str, dict[str, Any]]]] = [
        [(f"{top.world_size * times} ranks", {"topology": more_ranks(times)}) for times in (2, 4, 8, 16)],
        [("16-bit tables (dtype=torch.bfloat16)", {"tables": halves})],
        *map(larger, memories),
        [(f"batches of {n:,} samples per rank", {"batch_size": n}) for n in fewer],
    ]

    def fits(changes: dict[str, Any]) -> bool:
        try:
            return relax(make_problem(replace(model, copies=1, **changes), rules)[1], slack=0.01) is not None
        except PlanError:
            return False

    fitting = [text for kind in kinds if (text := next((text for text, changes in kind if fits(changes)), None))]
    hint = "no single remedy makes it fit; combine more ranks, 16-bit tables, lower tiers"
    return "it fits with " + ", or ".join(fitting) if fitting else hint


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
        topology = Topology.detect(ranks, local, device.type)
        if group.backend_of(device) == "gloo":
            topology = topology.but(ids_over="cpu")
        if any(table.placement != "device" for table in local_tables):
            topology = topology.but(host=topology.host or 2e12, disk=topology.disk or 1e15)
        tiers = {table.name: Constraint((table.placement,)) for table in local_tables}
        size = batch_size or 1_024
        local_plan = plan(local_tables, topology, batch_size=size, optimizer=optimizer, constraints=tiers)
        _log.info("%s", local_plan.report.summary())
        server_plan = uniform_plan([table for table in tables if table.placement == "server"], ranks, local)
        return replace(local_plan, tables={**local_plan.tables, **server_plan.tables}, placements={})

    try:
        result: Any = make() if group.rank == 0 else None
    except Exception as error:  # raised on every rank, below
        result = error
    # The report stays on rank 0: a table's `init` need not be picklable.
    shared = group.all_gather_object(replace(result, report=None) if isinstance(result, ShardingPlan) else result)[0]
    if isinstance(shared, Exception):
        raise shared
    return result or shared
