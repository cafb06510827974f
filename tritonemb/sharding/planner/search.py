"""Search for a plan: an option for each table, and shards of any size, so that the slowest rank is fast.

A table has *options*: a sharding type on a tier, with a share of its rows cached. An option has *units*, ranges of rows
or all columns, which are split into shards. A shard costs a fixed part, and a part proportional to its share. `solve`

1. computes a lower bound of the load: the least limit of loads for which an LP relaxation keeps the budgets. In it,
   tables are mixtures of options, all ranks are one, and the limit implies a least number of shards for each unit. A
   MILP, with one option per table, raises the bound. Both are solved by HiGHS, which scipy brings.
2. selects options by the MILP, and packs shards greedily, the largest tables first;
3. improves the packing by ruin and recreate (Schrimpf et al., 2000; the loops are in `ruin_and_recreate.py`) for a
   goal, a load that no rank may exceed; then an LP optimizes the shares of shards of rows in their bins, which drops
   many. The selected options are fixed at first, then replaced, too, at prices of the budgets that start at the LP's
   duals and fall while budgets are unused. Goals rise until one is met, then fall.

Loads are in seconds here, and relative to a goal in the loops; memory is relative to the budgets. The same problem has
the same solution.
"""

from typing import Any, NamedTuple

import numpy as np

from tritonemb.sharding.planner.ruin_and_recreate import Choices, ruin_and_recreate
from tritonemb.sharding.planner.settings import SETTINGS
from tritonemb.sharding.planner.shard_packing import Assignment, Problem, pack_greedily, usage
from tritonemb.sharding.planner.statistics import Array
from tritonemb.utils import LazyModule

optimize: Any = LazyModule("scipy.optimize", "plan")
sparse: Any = LazyModule("scipy.sparse", "plan")

MILP_INFEASIBLE = 2  # a status of scipy's


class Relaxation(NamedTuple):
    """The LP relaxation for a limit of loads: a lower bound, shares of options, shards of units, Lagrangian costs.

    `cost` is an option's load plus its budget usage at the dual `prices`, with `min_shards`: seconds.
    """

    bound: float
    share: Array  # [O]
    min_shards: Array  # [U]
    cost: Array  # [O]
    prices: Array  # seconds per whole budget of device memory, host memory, disk and servers


class Solution(NamedTuple):
    """An assignment, with loads in seconds. `violation` is 0 if all budgets are kept."""

    assignment: Assignment
    violation: float
    load: float
    bound: float
    greedy: float  # load of greedy packing
    cost: Array  # [O], see `Relaxation`
    num_shards: Array  # [O]: the fewest


def fewest_shards(problem: Problem, limit: float) -> tuple[Array, Array]:
    """Return the fewest shards of each unit that keep a limit of loads and a rank's budgets; and infeasible options."""
    p, table = problem, problem.option_table
    common = p.option_common + p.sum_by_option(p.unit_common)
    least = np.minimum.reduceat(common, p.table_options[:-1])
    # Capacity of a bin for the proportional cost of one shard.
    capacity = np.ones((len(p.fixed), 4))
    capacity[:, 0] = np.repeat(limit - (least.sum() - least[table] + common), np.diff(p.option_units))
    capacity -= p.fixed
    with np.errstate(divide="ignore", invalid="ignore"):
        need = np.where(p.slope <= 0, 0.0, np.where(capacity > 1e-12, p.slope / capacity, np.inf)).max(1, initial=1)
        scale = np.array([max(limit, 1e-30) if np.isfinite(limit) else 1, 1, 1, 1])
        need[(capacity < -1e-9 * scale).any(1)] = np.inf
        steps = p.unit_steps
        # Of k shards the largest has ceil(steps / k) of the steps.
        fewest = np.where(need <= steps, np.ceil(steps / np.maximum(np.floor(steps / need + 1e-9), 1)), np.inf)
    replicated = p.option_replicated
    infeasible = p.sum_by_option(fewest > p.unit_max_shards) > 0
    infeasible |= (replicated[:, 1:] > 1 + 1e-9).any(1) | (replicated[:, 0] + common > limit * (1 + 1e-9))
    return np.minimum(fewest, p.unit_max_shards).astype(np.int64), infeasible


def relax(problem: Problem, limit: float = np.inf, slack: float = 0.0) -> Relaxation | None:
    """Solve the LP relaxation; None if a `limit` of loads or budgets, each reduced by `slack`, cannot be kept."""
    starts, table = problem.table_options[:-1], problem.option_table
    min_shards, infeasible = fewest_shards(problem, limit)
    if np.logical_and.reduceat(infeasible, starts).any():
        return None
    means = problem.mean_uses(min_shards)
    unit = max(float(np.minimum.reduceat(means[:, 0], starts).sum()), 1e-12)  # scale of seconds in the LP
    uses, option = means / [unit, 1, 1, 1, 1], np.flatnonzero(~infeasible)
    # Variables: shares of options, the load, and overruns of the budgets.
    one = _sums_to_one(table[option], (len(starts), len(option) + 5))
    above = sparse.csr_array(np.concatenate([uses[option].T, -np.eye(5)], axis=1))
    cost = np.concatenate([np.zeros(len(option)), [1.0], np.full(4, SETTINGS.overrun_cost)])
    most = np.append(0.0, np.full(4, 1 - slack))
    result = optimize.linprog(cost, above, most, one, np.ones(len(starts)), bounds=(0, None), method="highs-ds")
    assert result.x is not None, result.message
    if result.x[len(option) + 1 :].max() > 1e-7:
        return None
    share = np.zeros(len(table))
    share[option] = result.x[: len(option)]
    prices = -result.ineqlin.marginals[1:] * unit
    cost = np.where(infeasible, np.inf, means[:, 0] + uses[:, 1:] @ prices)
    return Relaxation(float(result.fun) * unit, share, min_shards, cost, prices)


def _sums_to_one(row: Array, shape: tuple[int, int]) -> Any:
    """Return the matrix whose rows sum up the variables of each table or unit, `row` by variable."""
    return sparse.coo_array((np.ones(len(row)), (row, np.arange(len(row)))), shape).tocsr()


def _lower_bound(problem: Problem) -> tuple[float, Relaxation] | None:
    """Return a lower bound of the load, and the relaxation for a limit slightly above; None if nothing fits."""
    if (best := relax(problem)) is None:
        return None
    # Find a feasible limit with growing steps, then bisect.
    low, high, growth = max(best.bound, 1e-12), np.inf, SETTINGS.bound_precision
    while high > low * (1 + SETTINGS.bound_precision):
        limit = low * (1 + growth) if high == np.inf else (low + high) / 2
        relaxation = relax(problem, limit)
        if relaxation is not None and relaxation.bound <= limit:
            high, best = limit, relaxation
        else:
            low, growth = limit, max(0.01, 2 * growth)
    return _milp_bound(problem, low, best)


def _milp_bound(problem: Problem, low: float, best: Relaxation) -> tuple[float, Relaxation] | None:
    """Raise a lower bound by a MILP, in which each table has one option. Return it and its relaxation; None if nothing
    fits. With many tables the MILP would be slow, and the LP has few mixtures anyway: the bound stays.
    """
    starts, table = problem.table_options[:-1], problem.option_table
    growth = SETTINGS.bound_precision
    while (relaxation := relax(problem, high := low * (1 + growth))) is not None:
        best, feasible = relaxation, np.isfinite(relaxation.cost)
        # Reduced-cost fixing: plans with any other option are above the limit.
        cheapest = np.minimum.reduceat(relaxation.cost, starts)[table]
        candidates = feasible & (relaxation.bound + relaxation.cost - cheapest <= high)
        if candidates.sum() * len(starts) > SETTINGS.max_milp_size:
            break
        least = _solve_milp(problem, relaxation, np.flatnonzero(candidates))[1]
        if least < np.inf and least <= high:
            return max(low, least), best
        if high == np.inf:
            return None
        low, growth = high, np.inf if least == np.inf and candidates.sum() == feasible.sum() else 2 * growth
    return low, best


def solve(problem: Problem) -> Solution | None:
    """Find options and shards of all tables; None if even the relaxation cannot keep the budgets."""
    if (result := _lower_bound(problem)) is None:
        return None
    bound, relaxation = result
    starts = problem.table_options[:-1]
    # Relax for the first goal, less the common load that the relaxation does not count.
    goal = 1 + float(np.clip(SETTINGS.first_goal * problem.ranks / len(starts), *SETTINGS.first_goal_range))
    common = problem.option_common + problem.sum_by_option(problem.unit_common * relaxation.min_shards)
    uncounted = float(common @ relaxation.share - np.minimum.reduceat(common, starts).sum())
    relaxation = relax(problem, goal * bound - max(uncounted, 0.0)) or relaxation
    # Options to search: the selected ones, and those that are alike in memory and cost little more.
    table = problem.option_table
    likely = np.lexsort((-relaxation.share, table))[starts]
    uses = problem.mean_uses(relaxation.min_shards)[:, 1:4]
    selected = _select_options(problem, relaxation, likely, bound)
    few = max(1.0, SETTINGS.few_tables / len(starts))
    alike = (np.abs(uses - uses[selected[table]]) <= few * SETTINGS.alike).all(1)
    cost = np.where(alike, relaxation.cost, np.inf)
    candidates = cost <= np.minimum.reduceat(cost, starts)[table] + few * SETTINGS.cheap / len(starts) * bound
    candidates[selected] = candidates[likely] = True
    # Greedy packing, then ruin and recreate with the selected options, then with all candidates.
    search = Search(problem, candidates, relaxation.min_shards, relaxation.prices, bound)
    search.update_incumbent(search.pack(_without_shards(problem, likely), goal))
    greedy = search.best_score[1] * bound
    if search.best_score > (0.0, SETTINGS.optimal):
        search.set_candidates(np.isin(np.arange(len(table)), selected))
        assignment, excess = search.pack(_without_shards(problem, selected), goal), 1.0
        for number in range(SETTINGS.selected_rounds):
            assignment, excess = search.improve(assignment, goal, number) if excess > 0 else (assignment, excess)
        search.set_candidates(candidates)
        search.run(assignment, goal)
    num_shards = np.maximum(problem.sum_by_option(relaxation.min_shards), 1).astype(np.int64)
    violation, load = search.best_score[0], search.best_score[1] * bound  # 0 where nothing costs anything
    return Solution(search.incumbent, violation, load, min(bound, load), greedy, relaxation.cost, num_shards)


def keep(problem: Problem, new: Solution, running: Assignment, load: float) -> Assignment:
    """Keep as many shards of a running plan as a load allows, with its options; pack tables without shards."""
    bound = max(new.bound, 1e-12)
    goal = load / bound
    candidates = np.isin(np.arange(len(problem.option_replicated)), running.options)
    search = Search(problem, candidates, np.ones_like(problem.unit_max_shards), np.zeros(4), bound)
    assignment = search.pack(running, goal)
    if search.score(assignment) > (0.0, goal):
        assignment, _ = search.improve(assignment, goal, 1, SETTINGS.keep_temperature)
    return assignment


def _without_shards(problem: Problem, options: Array) -> Assignment:
    shape = len(options), problem.ranks
    return Assignment(options, np.full(shape, -1), np.zeros(shape))


def _solve_milp(
    problem: Problem, relaxation: Relaxation, candidates: Array, spare: float = 0.0
) -> tuple[Array | None, float]:
    """Select one of the `candidates` of each table, for the least total load within budgets reduced by `spare`. Return
    them or None, and a lower bound of that load: infinite if infeasible.
    """
    table = problem.option_table[candidates]
    if not np.bincount(table, minlength=len(problem.table_options) - 1).all():
        return None, np.inf
    means, unit = problem.mean_uses(relaxation.min_shards)[candidates], max(relaxation.bound, 1e-12)
    one = _sums_to_one(table, (table[-1] + 1, len(candidates)))
    budgets = optimize.LinearConstraint(means[:, 1:].T, -np.inf, 1 - spare)
    result = optimize.milp(
        means[:, 0] / unit, constraints=[budgets, optimize.LinearConstraint(one, 1, 1)],
        integrality=np.ones(len(candidates)), bounds=(0, 1),
        options={"mip_rel_gap": 2 * SETTINGS.bound_precision, "node_limit": SETTINGS.max_milp_nodes},
    )  # fmt: skip
    if result.status == MILP_INFEASIBLE:
        return None, np.inf
    selected = None if result.x is None else candidates[result.x > 0.5]
    return selected, (result.mip_dual_bound or 0.0) * unit


def _select_options(problem: Problem, relaxation: Relaxation, likely: Array, bound: float) -> Array:
    """Select one option per table, by MILPs over ever larger sets of candidates."""
    starts, table = problem.table_options[:-1], problem.option_table
    extra_cost = relaxation.cost - np.minimum.reduceat(relaxation.cost, starts)[table]
    means, best = problem.mean_uses(relaxation.min_shards), np.zeros(len(table), dtype=bool)
    if len(starts) >= SETTINGS.small_tables * problem.ranks:  # the best option of each table and tier is a candidate
        tier = np.where(means[:, 2:] > 0, [1, 2, 3], 0).max(1)
        order = np.lexsort((relaxation.cost, tier, table))
        best[order[np.unique(4 * table[order] + tier[order], return_index=True)[1]]] = True
    reserve = min(SETTINGS.spare * problem.ranks / len(starts), SETTINGS.max_spare)
    selected, least = likely, np.inf
    for cheap, spare in ((SETTINGS.cheap, reserve), (20 * SETTINGS.cheap, reserve), (np.inf, reserve), (np.inf, 0.0)):
        near = best | (extra_cost <= cheap / len(starts) * relaxation.bound) | (relaxation.share > 1e-6)
        options, _ = _solve_milp(problem, relaxation, np.flatnonzero(near & np.isfinite(relaxation.cost)), spare)
        if options is not None and (load := float(means[options, 0].sum())) < least:
            selected, least = options, load
        if least <= SETTINGS.enough * bound or (options is not None and cheap == np.inf):
            break
    return selected


class Search:
    """Local search over a subset of a problem's options, at prices of its budgets. Loads are relative to a `bound`.

    Args:
        candidates: bool `[O]`: the options.
        min_shards: `[U]`: the fewest shards of each unit.
        prices: seconds per whole budget of device memory, host memory, disk and servers.
    """

    def __init__(self, problem: Problem, candidates: Array, min_shards: Array, prices: Array, bound: float) -> None:
        self.problem = p = _scale_loads(problem, bound)
        nodes, self.num_tables = p.ranks // p.local, len(p.table_options) - 1
        # Costs, which depend on the premium of prices over the duals.
        self._min_shards, self._price_factor = min_shards, np.full(4, 1 + SETTINGS.initial_premium)
        self._prices = prices / bound * [1, p.ranks / nodes, p.ranks / nodes, p.ranks]
        sums = p.totals(min_shards)
        self._size = sums[:, :2].sum(1) + sums[:, 2:4].sum(1) * p.local
        self.set_candidates(candidates)
        # The incumbent, and its violation of budgets and largest load.
        self.best_score, self.incumbent = (np.inf, np.inf), _without_shards(p, p.table_options[:-1])

    def set_candidates(self, candidates: Array) -> None:
        """Restrict the search to candidates, and set their costs."""
        p, weights = self.problem, np.append(1.0, self._price_factor * self._prices)
        width = np.where(p.unit_on_node, p.local, 1)
        num_bins = np.stack([width, width, np.ones_like(width), np.ones_like(width)], 1)
        pairwise = 2 * p.pairwise_load * self._min_shards * width
        per_shard = (p.fixed * num_bins) @ weights[:4] + p.unit_common * p.ranks + pairwise
        base, table = p.totals(np.zeros(len(width))) @ weights, p.option_table
        least = np.where(candidates, base + p.sum_by_option(per_shard * self._min_shards), np.inf)
        cheapest = np.minimum.reduceat(least, p.table_options[:-1])[table]
        order = np.lexsort((least, table))
        order = order[candidates[order]]
        offsets = np.append(0, np.cumsum(np.bincount(table[order], minlength=self.num_tables)))
        self._candidates = candidates
        self._choices = Choices(offsets, order, (least - cheapest)[order], base - cheapest, per_shard, self._size)

    def update_incumbent(self, assignment: Assignment) -> None:
        """Replace the incumbent if the assignment is better."""
        if (score := self.score(assignment)) < self.best_score:
            self.best_score, self.incumbent = score, assignment

    def score(self, assignment: Assignment) -> tuple[float, float]:
        """Return the violation of budgets, and the largest load."""
        load, hbm, host, disk, server = usage(self.problem, assignment)
        violation = sum(float(np.maximum(used - 1 - SETTINGS.tolerance, 0).sum()) for used in (hbm, host, disk, server))
        return violation, float(load.max()) + self._common(assignment)

    def run(self, assignment: Assignment, goal: float) -> None:
        """Improve an assignment for goals that rise until one is met, then fall. A new goal starts at the incumbent."""
        excess, stuck, last_gain = np.inf, 0, 0
        for number in range(SETTINGS.max_rounds):
            # One round; accept it if its excess is lower.
            neighbor, new_excess = self.improve(assignment, goal, number)
            self._update_prices(neighbor)
            stuck = 0 if new_excess < SETTINGS.gain * excess else stuck + 1
            assignment, excess = (neighbor, new_excess) if new_excess < excess else (assignment, excess)
            previous_score = self.best_score
            if new_excess <= SETTINGS.nearly * self.problem.ranks:
                self.update_incumbent(assignment)
                self.update_incumbent(self.optimize_shares(assignment) or assignment)
            # Stop if the incumbent is good enough, or has not improved for long.
            last_gain, is_feasible = number if self.best_score < previous_score else last_gain, self.best_score[0] == 0
            least = self.best_score[1] if is_feasible else np.inf
            if least <= (SETTINGS.close if number >= SETTINGS.min_rounds else SETTINGS.optimal):
                break
            if is_feasible and number - last_gain >= SETTINGS.max_idle_rounds:
                break
            # Set the next goal: lower if this one is met, higher after rounds without gain.
            if excess == 0 or least <= goal:
                goal, excess, stuck = 1 + (min(goal, least) - 1) * (1 - SETTINGS.lower), np.inf, 0
            elif stuck >= SETTINGS.patience:
                back = SETTINGS.back * (least - goal) if is_feasible else 0.0
                goal += max(SETTINGS.min_rise, SETTINGS.rise * excess / self.problem.ranks, back)
                goal = min(goal, 0.999 * least) if is_feasible else 1 + SETTINGS.higher * (goal - 1)
                assignment, excess, stuck = self.incumbent if is_feasible else assignment, np.inf, 0

    def _update_prices(self, assignment: Assignment) -> None:
        """Raise the prices of budgets that are exceeded in total, and lower those of unused budgets."""
        used = np.array([values.mean() for values in usage(self.problem, assignment)[1:]])
        factor = self._price_factor * (1 + SETTINGS.price_step * (used - SETTINGS.target_usage))
        self._price_factor = np.clip(factor, *(1 + np.array(SETTINGS.premium_range)))
        self.set_candidates(self._candidates)

    def _common(self, assignment: Assignment) -> float:
        """Return the load that all ranks have in common, independent of the bins of shards."""
        units = assignment.units[assignment.units >= 0]
        return float(self.problem.option_common[assignment.options].sum() + self.problem.unit_common[units].sum())

    def _capacity(self, assignment: Assignment, goal: float) -> float:
        """Return the load of a goal without the common load."""
        return max(goal - self._common(assignment), 1e-3)

    def pack(self, assignment: Assignment, goal: float) -> Assignment:
        """Add shards of tables that have none, greedily, the largest tables first."""
        capacity, (options, *_), choices = self._capacity(assignment, goal), assignment, self._choices
        per_shard, size = choices.per_shard / capacity, choices.size[options]
        scaled = _scale_loads(self.problem, capacity)
        return Assignment(options, *pack_greedily(scaled, assignment, per_shard, size))

    def improve(
        self, assignment: Assignment, goal: float, number: int, temperature: float | None = None
    ) -> tuple[Assignment, float]:
        """Run a round of ruin and recreate, and optimize the shares. Return it, and its excess."""
        p, c, capacity = self.problem, self._choices, self._capacity(assignment, goal)
        ranks_per_table, schedules = p.ranks / self.num_tables, (SETTINGS.hot, SETTINGS.cold)
        evaluations = min(SETTINGS.evaluations * self.num_tables * p.ranks, SETTINGS.max_evaluations)
        evaluations = int(evaluations * np.clip(SETTINGS.longer * ranks_per_table, *SETTINGS.longer_range))
        hot, cold = (temperature or schedule[min(number, 1)] * ranks_per_table for schedule in schedules)
        choices = c._replace(**{name: getattr(c, name) / capacity for name in ("cost", "min_cost", "per_shard")})
        scaled = _scale_loads(p, capacity)
        best, last = ruin_and_recreate(scaled, choices, assignment, hot, cold, evaluations, number + 1)
        if temperature is not None:
            return Assignment(*best), self._excess(Assignment(*best), goal)
        results = [self._optimized(Assignment(*result), goal) for result in (best, last)]
        return min(results, key=lambda result: result[1])

    def _optimized(self, assignment: Assignment, goal: float) -> tuple[Assignment, float]:
        """Optimize shares until no more shards are dropped. Return the assignment and its excess."""
        while (better := self.optimize_shares(assignment, goal)) is not None:
            fewer = (better.units >= 0).sum() < (assignment.units >= 0).sum()
            assignment = better
            if not fewer:
                break
        return assignment, self._excess(assignment, goal)

    def _excess(self, assignment: Assignment, goal: float) -> float:
        load, hbm, host, disk, _ = usage(self.problem, assignment)
        over = [np.maximum(used - 1, 0).sum() for used in (hbm, host, disk)]
        load = load + self._common(assignment)
        of_budgets = over[0] + self.problem.local * (over[1] + over[2])
        total = np.maximum(load - goal, 0).sum() + SETTINGS.budget_weight * of_budgets
        return float(total) if total > 1e-6 else 0.0

    def optimize_shares(self, assignment: Assignment, goal: float | None = None) -> Assignment | None:
        """Optimize the shares of shards of rows in their bins by an LP, and drop shards of share 0. It minimizes the
        excess over a goal, or the largest load without one. None if infeasible.
        """
        # Usage of ranks and nodes by all but the free shares.
        p, (table, bins) = self.problem, np.nonzero(assignment.units >= 0)
        units, shares = assignment.units[table, bins], assignment.shares[table, bins]
        nodes, num_shards, free = p.ranks // p.local, len(units), p.unit_steps[units] > SETTINGS.continuous_steps
        all_free = p.unit_steps[assignment.units] > SETTINGS.continuous_steps
        fixed_part = assignment._replace(shares=np.where(all_free, 0.0, assignment.shares))
        load, hbm, host, disk, _ = usage(p, fixed_part)
        used = np.concatenate([load + self._common(assignment), hbm, host, disk])
        # Constraints: a row for the load and device memory of each rank, and host memory and disk of each node.
        width = np.where(p.unit_on_node[units], p.local, 1)
        node = bins * width // p.local
        shard_of_rank = np.repeat(np.arange(num_shards), width)
        rank = np.repeat(bins * width, width) + np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width)
        slope, shard, num_rows = p.slope[units], np.arange(num_shards), len(used)
        row = np.concatenate([rank, p.ranks + rank, 2 * p.ranks + node, 2 * p.ranks + nodes + node])
        column = np.concatenate([shard_of_rank, shard_of_rank, shard, shard])
        value = np.concatenate([slope[shard_of_rank, 0], slope[shard_of_rank, 1], slope[:, 2], slope[:, 3]])
        nonzero = free[column] & (value > 0)
        row, column, value = row[nonzero], column[nonzero], value[nonzero]
        limits = np.concatenate([np.full(p.ranks, goal or 0.0), np.ones(num_rows - p.ranks)]) - used
        # Objective: one variable for the largest load, or one for the excess of each row.
        if goal is None:
            slack_row = np.arange(p.ranks)
            cost, slack_column = np.append(np.zeros(num_shards), 1.0), np.zeros(p.ranks, np.int64)
        else:
            slack_row, weight = np.arange(num_rows), SETTINGS.budget_weight
            slack_column = slack_row
            cost = np.repeat([0.0, 1.0, weight, weight * p.local], [num_shards, p.ranks, p.ranks, 2 * nodes])
        entries = np.append(row, slack_row), np.append(column, num_shards + slack_column)
        above = sparse.coo_array((np.append(value, -np.ones(len(slack_row))), entries), (num_rows, len(cost)))
        # The shares of a unit add up to 1.
        free_units, unit_index = np.unique(units[free], return_inverse=True)
        entries, ones = (unit_index, np.flatnonzero(free)), np.ones(len(free_units))
        one = sparse.coo_array((np.ones(len(unit_index)), entries), (len(free_units), len(cost))).tocsr()
        result = optimize.linprog(cost, above.tocsr(), limits, one, ones, bounds=(0, None), method="highs-ds")
        if result.x is None:
            return None
        # Shares of 0 drop their shards.
        new_units, new_shares = assignment.units.copy(), assignment.shares.copy()
        new_shares[table, bins] = np.where(free, result.x[:num_shards], shares)
        new_units[new_shares <= 1e-7] = -1
        return Assignment(assignment.options, new_units, new_shares)


def _scale_loads(problem: Problem, unit: float) -> Problem:
    """Return the problem with loads in a unit."""
    p, scale = problem, np.array([1 / unit, 1, 1, 1])
    return p._replace(
        option_replicated=p.option_replicated * np.append(scale, 1), option_common=p.option_common / unit,
        unit_common=p.unit_common / unit, fixed=p.fixed * scale, slope=p.slope * scale,
        pairwise_load=p.pairwise_load / unit,
    )  # fmt: skip
