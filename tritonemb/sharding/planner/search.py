"""Search for a plan: an option for each table, and shards of any size, so that the slowest rank is fast.

docs/planner.md describes it. For each set of latencies that a step may wait for, an LP relaxation and a MILP give a
lower bound, and select an option per table; shards are packed greedily, then by ruin and recreate for a goal, a load
that no rank may exceed. Goals rise until one is met, then fall. Prices of the budgets start at the LP's duals, and fall
while budgets are unused. Loads are in seconds here, and relative to a goal in the loops; memory to the budgets.
"""

from typing import Any, NamedTuple

import numpy as np

from tritonemb.sharding.planner.ruin_and_recreate import Choices, ruin_and_recreate
from tritonemb.sharding.planner.settings import SETTINGS
from tritonemb.sharding.planner.shard_packing import Assignment, Problem, pack_greedily, usage
from tritonemb.sharding.planner.statistics import Array
from tritonemb.utils import LazyModule, stdout_to_stderr

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
    limit -= p.latency
    # Capacity of a bin for the proportional cost of one shard.
    capacity = np.ones((len(p.fixed), 4))
    most = limit * p.rank_speed.max() - (least.sum() - least[table] + common)
    capacity[:, 0] = np.repeat(most, np.diff(p.option_units))
    capacity -= p.fixed
    with np.errstate(divide="ignore", invalid="ignore"):
        need = np.where(p.slope <= 0, 0.0, np.where(capacity > 1e-12, p.slope / capacity, np.inf)).max(1, initial=1)
        scale = np.array([max(limit, 1e-30) if np.isfinite(limit) else 1, 1, 1, 1])
        need[(capacity < -1e-9 * scale).any(1)] = np.inf
        steps = p.unit_steps
        # Of k shards the largest has ceil(steps / k) of the steps.
        fewest = np.where(need <= steps, np.ceil(steps / np.maximum(np.floor(steps / need + 1e-9), 1)), np.inf)
    replicated = p.option_replicated
    infeasible = (p.sum_by_option(fewest > p.unit_max_shards) > 0) | (p.option_waits & ~p.waits).any(1)
    most = limit * p.rank_speed.min(), 1 - p.rank_base[1].max(), 1, 1, 1
    infeasible |= (replicated + np.eye(1, 5) * common[:, None] > np.array(most) * (1 + 1e-9)).any(1)
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
    one = _sums_to_one(table[option], np.arange(len(option)), (len(starts), len(option) + 5))
    above = sparse.csr_array(np.concatenate([uses[option].T, -np.eye(5)], axis=1))
    cost = np.concatenate([np.zeros(len(option)), [1.0], np.full(4, SETTINGS.overrun_cost)])
    most = np.append(0.0, np.full(4, 1 - slack))
    result = optimize.linprog(cost, above, most, one, np.ones(len(starts)), bounds=(0, None), method="highs-ds")
    assert result.x is not None, result.message
    bound = float(result.fun) * unit + problem.latency
    if result.x[len(option) + 1 :].max() > 1e-7 or bound > limit:
        return None
    share = np.zeros(len(table))
    share[option] = result.x[: len(option)]
    prices = -result.ineqlin.marginals[1:] * unit
    cost = np.where(infeasible, np.inf, means[:, 0] + uses[:, 1:] @ prices)
    return Relaxation(bound, share, min_shards, cost, prices)


def _sums_to_one(row: Array, variable: Array, shape: tuple[int, int]) -> Any:
    """Return the matrix whose rows sum up the variables of each table or unit."""
    return sparse.coo_array((np.ones(len(row)), (row, variable)), shape).tocsr()


def _lower_bound(problem: Problem) -> tuple[float, Relaxation] | None:
    """Return a lower bound of the load, and the relaxation for a limit slightly above; None if nothing fits."""
    if (best := relax(problem)) is None:
        return None
    # Find a feasible limit with growing steps, then bisect.
    low, high, growth = max(best.bound, 1e-12), np.inf, SETTINGS.bound_precision
    while high > low * (1 + SETTINGS.bound_precision):
        limit = low * (1 + growth) if high == np.inf else (low + high) / 2
        relaxation = relax(problem, limit)
        if relaxation is not None:
            high, best = limit, relaxation
        else:
            low, growth = limit, max(0.01, 2 * growth)
    return _milp_bound(problem, low, best)


def _milp_bound(problem: Problem, low: float, best: Relaxation) -> tuple[float, Relaxation] | None:
    """Raise a lower bound by a MILP with one option per table, unless tables are many; None if nothing fits."""
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
    # Sets of latencies: the unions of those of options. The best are tried first.
    sets = np.zeros((1, len(problem.latencies)), dtype=bool)
    for option_waits in np.unique(problem.option_waits, axis=0):
        sets = np.unique(np.concatenate([sets, sets | option_waits]), axis=0)
    problems = [problem._replace(waits=waits) for waits in sets]
    bounds = [np.inf if (relaxation := relax(p)) is None else relaxation.bound for p in problems]
    best, bound = None, np.inf
    for number in np.argsort(bounds, kind="stable")[: np.isfinite(bounds).sum()].tolist():
        # Skip sets with which no plan can be better by more than the precision of the bound.
        limit = bound * (1 - SETTINGS.bound_precision)
        if best is not None and best.violation == 0 and relax(problems[number], limit) is None:
            continue
        if (solution := _solve(problems[number])) is not None:
            bound = min(bound, solution.bound)
            best = min(filter(None, (best, solution)), key=lambda solution: (solution.violation, solution.load))
    return best and best._replace(bound=min(bound * (1 - SETTINGS.bound_precision), best.load))


def _solve(problem: Problem) -> Solution | None:
    """Find options and shards of all tables, with a set of latencies."""
    if (result := _lower_bound(problem)) is None:
        return None
    bound, relaxation = result
    latency, starts = problem.latency, problem.table_options[:-1]
    unit = max(bound - latency, 1e-12)  # of the loads in the search, which are without latencies
    # Relax for the first goal, less the common load that the relaxation does not count.
    goal = 1 + float(np.clip(SETTINGS.first_goal * problem.ranks / len(starts), *SETTINGS.first_goal_range))
    common = problem.option_common + problem.sum_by_option(problem.unit_common * relaxation.min_shards)
    uncounted = float(common @ relaxation.share - np.minimum.reduceat(common, starts).sum())
    relaxation = relax(problem, goal * unit - max(uncounted, 0.0) + latency) or relaxation
    # Options to search: the selected ones, and those that are alike in memory and cost little more.
    table = problem.option_table
    likely = np.lexsort((-relaxation.share, table))[starts]
    uses = problem.mean_uses(relaxation.min_shards)[:, 1:4]
    selected = _select_options(problem, relaxation, likely, unit)
    few = max(1.0, SETTINGS.few_tables / len(starts))
    alike = (np.abs(uses - uses[selected[table]]) <= few * SETTINGS.alike).all(1)
    cost = np.where(alike, relaxation.cost, np.inf)
    candidates = cost <= np.minimum.reduceat(cost, starts)[table] + few * SETTINGS.cheap / len(starts) * unit
    candidates[selected] = candidates[likely] = True
    # Greedy packing, then ruin and recreate with the selected options, then with all candidates.
    search = Search(problem, candidates, relaxation.min_shards, relaxation.prices, unit)
    search.update_incumbent(search.pack(Assignment.empty(likely, problem.ranks), goal))
    greedy = search.best_score[1] * unit + latency
    if search.best_score > (0.0, SETTINGS.optimal):
        search.set_candidates(np.isin(np.arange(len(table)), selected))
        assignment, excess = search.pack(Assignment.empty(selected, problem.ranks), goal), 1.0
        for number in range(SETTINGS.selected_rounds):
            assignment, excess = search.improve(assignment, goal, number) if excess > 0 else (assignment, excess)
        search.set_candidates(candidates)
        search.run(assignment, goal)
    # Costs of all options, also with other latencies.
    cost = problem.mean_uses(relaxation.min_shards) @ np.append(1.0, relaxation.prices)
    cost[fewest_shards(problem._replace(waits=np.ones_like(problem.waits)), np.inf)[1]] = np.inf
    num_shards = np.maximum(problem.sum_by_option(relaxation.min_shards), 1).astype(np.int64)
    violation, load = search.best_score[0], search.best_score[1] * unit + latency
    return Solution(search.incumbent, violation, load, min(bound, load), greedy, cost, num_shards)


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
    one = _sums_to_one(table, np.arange(len(table)), (table[-1] + 1, len(table)))
    budgets = optimize.LinearConstraint(means[:, 1:].T, -np.inf, 1 - spare)
    with stdout_to_stderr():  # HiGHS prints debug text, whatever its options
        result = optimize.milp(
            means[:, 0] / unit, constraints=[budgets, optimize.LinearConstraint(one, 1, 1)],
            integrality=np.ones(len(candidates)), bounds=(0, 1),
            options={"mip_rel_gap": 2 * SETTINGS.bound_precision, "node_limit": SETTINGS.max_milp_nodes},
        )  # fmt: skip
    if result.status == MILP_INFEASIBLE:
        return None, np.inf
    selected = None if result.x is None else candidates[result.x > 0.5]
    return selected, (result.mip_dual_bound or 0.0) * unit + problem.latency


def _select_options(problem: Problem, relaxation: Relaxation, likely: Array, bound: float) -> Array:
    """Select one option per table, by MILPs over ever larger sets of candidates."""
    starts, table = problem.table_options[:-1], problem.option_table
    extra_cost = relaxation.cost - np.minimum.reduceat(relaxation.cost, starts)[table]
    load = problem.mean_uses(relaxation.min_shards)[:, 0]
    reserve = min(SETTINGS.spare * problem.ranks / len(starts), SETTINGS.max_spare)
    selected, least = likely, np.inf
    for cheap, spare in ((SETTINGS.cheap, reserve), (20 * SETTINGS.cheap, reserve), (np.inf, reserve), (np.inf, 0.0)):
        near = (extra_cost <= cheap / len(starts) * bound) | (relaxation.share > 1e-6)
        options, _ = _solve_milp(problem, relaxation, np.flatnonzero(near & np.isfinite(relaxation.cost)), spare)
        if options is not None and (total := float(load[options].sum())) < least:
            selected, least = options, total
        if least <= SETTINGS.enough * bound or (options is not None and cheap == np.inf):
            break
    return selected


class Search:
    """Local search over `candidates` of a problem's options, bool `[O]`, at `prices` of its budgets, in seconds
    per whole budget. Loads are relative to a `bound`, and units have at least `min_shards`.
    """

    def __init__(self, problem: Problem, candidates: Array, min_shards: Array, prices: Array, bound: float) -> None:
        self.problem = p = problem.scaled(bound)
        self.num_tables = len(p.table_options) - 1
        # Costs, which depend on the premium of prices over the duals.
        self._min_shards, self._price_factor = min_shards, np.full(4, 1 + SETTINGS.initial_premium)
        self._prices = prices / bound * [1, p.local, p.local, p.ranks]
        sums = p.totals(min_shards)
        self._size = sums[:, :2].sum(1) + sums[:, 2:4].sum(1) * p.local
        self.set_candidates(candidates)
        # The incumbent, and its violation of budgets and largest load.
        self.best_score, self.incumbent = (np.inf, np.inf), Assignment.empty(p.table_options[:-1], p.ranks)

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
        return violation, float(self._rank_loads(load, assignment).max())

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
        p, units = self.problem, assignment.units[assignment.units >= 0]
        return float(p.option_common[assignment.options].sum() + p.unit_common[units].sum())

    def _rank_loads(self, load: Array, assignment: Assignment) -> Array:
        """Return the loads of ranks at their speeds, with what they have in common."""
        return (load + self._common(assignment)) / self.problem.rank_speed

    def _scaled(self, assignment: Assignment, goal: float) -> tuple[float, Problem]:
        """Return the load that a goal leaves for shards, and the problem with loads in this unit."""
        p = self.problem
        capacity = max(goal * p.rank_speed.max() - self._common(assignment), 1e-3)
        missing = goal * (p.rank_speed.max() - p.rank_speed) / capacity  # load that slower ranks cannot take
        return capacity, p.scaled(capacity)._replace(rank_base=np.stack([missing, p.rank_base[1]]))

    def pack(self, assignment: Assignment, goal: float) -> Assignment:
        """Add shards of tables that have none, greedily, the largest tables first."""
        (capacity, scaled), options = self._scaled(assignment, goal), assignment.options
        per_shard, size = self._choices.per_shard / capacity, self._choices.size[options]
        return Assignment(options, *pack_greedily(scaled, assignment, per_shard, size))

    def improve(self, assignment: Assignment, goal: float, number: int) -> tuple[Assignment, float]:
        """Run a round of ruin and recreate, and optimize the shares. Return it, and its excess."""
        p, c, (capacity, scaled) = self.problem, self._choices, self._scaled(assignment, goal)
        ranks_per_table, schedules = p.ranks / self.num_tables, (SETTINGS.hot, SETTINGS.cold)
        evaluations = min(SETTINGS.evaluations * self.num_tables * p.ranks, SETTINGS.max_evaluations)
        evaluations = int(evaluations * np.clip(SETTINGS.longer * ranks_per_table, *SETTINGS.longer_range))
        hot, cold = (schedule[min(number, 1)] * ranks_per_table for schedule in schedules)
        choices = c._replace(**{name: getattr(c, name) / capacity for name in ("cost", "min_cost", "per_shard")})
        packings = ruin_and_recreate(scaled, choices, assignment, hot, cold, evaluations, number + 1)
        results = [self._optimized(Assignment(*packing), goal) for packing in packings]
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
        of_budgets = over[0] + self.problem.local * (over[1] + over[2])
        over_goal = np.maximum(self._rank_loads(load, assignment) - goal, 0).sum()
        total = over_goal + SETTINGS.budget_weight * of_budgets
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
        on_rank = np.arange(p.ranks)[:, None] // width == bins
        on_node = np.arange(nodes)[:, None] == bins * width // p.local
        slopes = p.slope[units].T * free
        uses = np.concatenate([slopes[0] * on_rank, slopes[1] * on_rank, slopes[2] * on_node, slopes[3] * on_node])
        limits = np.concatenate([(goal or 0.0) * p.rank_speed, np.ones(len(used) - p.ranks)]) - used
        # Objective: one variable for the largest load, or one for the excess of each row.
        if goal is None:
            slack, weights = np.append(p.rank_speed, np.zeros(len(used) - p.ranks))[:, None], np.ones(1)
        else:
            over_budget = SETTINGS.budget_weight * np.array([1, p.local])
            slack, weights = np.eye(len(used)), np.repeat([1.0, *over_budget], [p.ranks, p.ranks, 2 * nodes])
        cost, above = np.append(np.zeros(num_shards), weights), sparse.csr_array(np.concatenate([uses, -slack], axis=1))
        # The shares of a unit add up to 1.
        free_units, unit_index = np.unique(units[free], return_inverse=True)
        one = _sums_to_one(unit_index, np.flatnonzero(free), (len(free_units), len(cost)))
        totals = np.ones(len(free_units))
        result = optimize.linprog(cost, above, limits, one, totals, bounds=(0, None), method="highs-ds")
        if result.x is None:
            return None
        # Shares of 0 drop their shards.
        new_units, new_shares = assignment.units.copy(), assignment.shares.copy()
        new_shares[table, bins] = np.where(free, result.x[:num_shards], shares)
        new_units[new_shares <= 1e-7] = -1
        return Assignment(assignment.options, new_units, new_shares)
