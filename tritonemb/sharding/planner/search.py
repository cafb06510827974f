"""The search: an option for each table, and shards of any size of it, so that the slowest rank is fast.

A table has *options*: a sharding type on a tier, with so many rows cached. An option has *units*, ranges of rows or
all columns, each of which is cut into shards. A shard costs a fixed part and its share of the rest. `solve`

1. finds the least load for which an LP chooses options that keep the budgets, as if tables could be mixtures and ranks
   were one: with a load as limit, a unit needs so many shards at least. No plan is faster. A MIP, with one option for
   each table, raises this bound. (scipy's HiGHS; without it multipliers of the budgets, and a simple bound.)
2. chooses options by the MIP, and places shards greedily, the largest tables first;
3. for a load as a goal takes some shards away and places them again (ruin and recreate, Schrimpf et al., 2000; the
   loops are in `ruin_and_recreate.py`); then an LP finds the best shares for shards of rows where they are, which
   drops many. First options stay, until budgets are kept; then tables get other ones, too, at prices of budgets that
   begin with the LP's, and fall for what is left unused. Goals rise until one is kept, then fall.

Loads are seconds here, and shares of a goal in the loops, sizes shares of the budgets. Same problem, same answer.
"""

from typing import NamedTuple

import numpy as np

from tritonemb.sharding.planner.ruin_and_recreate import ruin_and_recreate
from tritonemb.sharding.planner.shard_packing import FINE, WEIGHT, Problem, place_greedily, usage
from tritonemb.sharding.table_stats import Array

INFEASIBLE = 2  # a status of scipy's
OPTIMAL, CLOSE = 1.003, 1.0299  # of the bound: nothing more is tried; after some rounds
PRECISION = 5e-4  # of the bound
EXCEEDED = 1e3  # cost in the LP of a budget that is exceeded by all of it, in loads
CHEAP = 0.1  # of a table's mean share of the bound: what options that are tried cost more than its cheapest, at most
ALIKE = 0.02  # of a budget: by how much they use more or less of it than the option that the MIP has chosen
DEARER = -0.7, 0.1, 0.5  # what budgets cost more than in the LP: at least, at first, at most
ENOUGH = 1.03  # of the bound: options that cost no more in all are chosen from few
MOST_CHOICES = 10_000_000  # tables times options, up to which a MIP raises the bound
USED, PACE = 0.997, 10.0  # of budgets: what prices aim at, and how fast they follow
SPARE, MOST_SPARE = 0.016, 0.01  # of each budget: what the MIP leaves, by ranks a table, and at most
FIT = 0.002  # of the room that a place has left: what it counts where a shard is placed
HOT, COLD = (0.1, 0.02), (0.005, 0.002)  # temperatures, of what a rank has of a table on average: at first, later
EVALUATIONS = 2_400, 60_000_000  # of places in a round, for each table and rank, and at most
LONGER = 6.25, 1.0, 4.0  # how many times as many where ranks have few tables: by ranks a table; at least, at most
FIRST_ROUNDS = 6  # with the options that the MIP has chosen, at most
ROUNDS, MORE_ROUNDS, IDLE = 12, 260, 80  # as long as it is not `CLOSE`; without a better plan
PATIENCE = 2  # rounds without gain, until something changes
NEARLY = 0.01  # of all loads: after so little excess the least load that keeps budgets is looked for
CHEAPER = 0.3  # what costs of options and shards count then, beside the excess, several times; then the goal rises
FIRST = 0.15, 0.03, 0.4  # of the bound: by how much the first goal is higher, by ranks a table; at least, at most
FEW = 60  # tables: of fewer more options are tried
SMALL_TABLES = 20  # tables a rank, from where any tier may be better than the cheapest: small tables fill budgets
LOWER, RISE, STEP = 0.15, 0.5, 0.002  # of the gap, a goal that is kept; of the excess, and at least, one that is not
BACK, HIGHER = 0.3, 1.3  # of the way to the load of the best plan; of the gap, as long as budgets are not kept
TOLERANCE = 1.001e-6  # of a budget
STAYING = 1e-6  # temperature
GAIN = 0.97  # of the excess before


class Relaxed(NamedTuple):
    """With a load as limit: a lower bound of the load, shares of options, shards of units, and costs at prices.

    `cost` is what each option, with so many shards, adds to the load, with its budgets at their `prices`: seconds.
    `known` are the options that the LP has looked at.
    """

    bound: float
    share: Array
    shards: Array
    cost: Array
    prices: Array  # seconds for all of device memory, host memory, disk and servers
    known: Array


class Placed(NamedTuple):
    """The option of each table; and the unit, the rank or node and the share of each shard."""

    chosen: Array
    units: Array
    places: Array
    shares: Array


class Solution(NamedTuple):
    """`violation` is 0 if all budgets are kept, `load` and `bound` are seconds; `greedy` is the load of greedy packing.

    `cost` is that of each option, see `Relaxed`, with the fewest shards that it can have, `parts`.
    """

    placed: Placed
    violation: float
    load: float
    bound: float
    greedy: float
    cost: Array
    parts: Array


def tables_of(problem: Problem) -> Array:
    """The table of each option."""
    return np.repeat(np.arange(len(problem.table_options) - 1), np.diff(problem.table_options))


def by_option(problem: Problem, of_units: Array) -> Array:
    """Sums over the units of each option."""
    option = np.repeat(np.arange(len(problem.option_all)), np.diff(problem.option_units))
    return np.bincount(option, of_units, len(problem.option_all))


def totals(problem: Problem, shards: Array) -> Array:
    """`[O, 5]`: load on all ranks, and all of each budget that options with so many shards of their units take."""
    p, nodes = problem, problem.ranks // problem.local
    sums = p.option_all * np.array([p.ranks, p.ranks, nodes, nodes, 1.0])
    sums[:, 0] += p.ranks * p.option_common
    width = np.where(p.unit_node, p.local, 1)[:, None] * np.array([1, 1, 0, 0]) + np.array([0, 0, 1, 1])
    units = p.fixed * shards[:, None] + p.slope
    units[:, 0] += p.mutual * shards * (shards - 1)
    units *= width
    units[:, 0] += p.ranks * p.unit_common * shards
    for column in range(4):
        sums[:, column] += by_option(p, units[:, column])
    return sums


def fewest_shards(problem: Problem, limit: float) -> tuple[Array, Array]:
    """The fewest shards of each unit that keep the limit and the budgets of a rank; and which options cannot."""
    p, table = problem, tables_of(problem)
    common = p.option_common + by_option(p, p.unit_common)
    least = np.minimum.reduceat(common, p.table_options[:-1])
    room = np.ones((len(p.fixed), 4))
    room[:, 0] = np.repeat(limit - (least.sum() - least[table] + common), np.diff(p.option_units))
    room -= p.fixed
    with np.errstate(divide="ignore", invalid="ignore"):
        need = np.where(p.slope <= 0, 0.0, np.where(room > 1e-12, p.slope / room, np.inf)).max(1, initial=1)
        need[(room < -1e-9 * np.array([max(limit, 1e-30) if np.isfinite(limit) else 1, 1, 1, 1])).any(1)] = np.inf
        steps = p.unit_steps
        # Of k shards the largest has ceil(steps / k) of the steps.
        fewest = np.where(need <= steps, np.ceil(steps / np.maximum(np.floor(steps / need + 1e-9), 1)), np.inf)
    out = by_option(p, fewest > p.unit_most) > 0
    out |= (p.option_all[:, 1:] > 1 + 1e-9).any(1) | (p.option_all[:, 0] + common > limit * (1 + 1e-9))
    return np.minimum(fewest, p.unit_most).astype(np.int64), out


def relax(problem: Problem, limit: float = np.inf, slack: float = 0.0, known: Array | None = None) -> Relaxed | None:
    """The LP relaxation; None if budgets, each smaller by `slack`, or a `limit` of loads cannot be kept.

    Options come into the LP as its prices ask for them; `known` ones are there from the beginning.
    """
    starts, table = problem.table_options[:-1], tables_of(problem)
    shards, out = fewest_shards(problem, limit)
    if np.logical_and.reduceat(out, starts).any():
        return None
    sums, nodes = totals(problem, shards), problem.ranks // problem.local
    sums[:, 0] /= problem.ranks
    sizes = np.array([problem.ranks, nodes, nodes, 1.0])
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array
    except ImportError:
        return _multipliers(problem, sums, sizes, shards, slack, out)
    unit = max(float(np.minimum.reduceat(sums[:, 0], starts).sum()), 1e-12)  # in which the LP counts seconds
    uses = sums / np.append(unit, sizes)
    inside = _first_options(uses, table, out) | (out & False if known is None else known & ~out)
    while True:
        at = np.flatnonzero(inside)
        ones = coo_array((np.ones(len(at)), (table[at], np.arange(len(at)))), (len(starts), len(at) + 5))
        above = np.concatenate([uses[at].T, -np.eye(5)], axis=1)
        cost = np.concatenate([np.zeros(len(at)), [1.0], np.full(4, EXCEEDED)])
        most = np.append(0.0, np.full(4, 1 - slack))
        result = linprog(cost, above, most, ones.tocsr(), np.ones(len(starts)), bounds=(0, None), method="highs-ds")
        assert result.x is not None, result.message
        prices = -result.ineqlin.marginals
        gain = uses @ prices - result.eqlin.marginals[table]
        gain[inside | out] = 0
        new = np.lexsort((gain, table))[starts]  # the best of each table
        new = new[gain[new] < -1e-7 * max(1.0, float(result.fun))]
        if not len(new):
            break
        inside[new] = True
    if result.x[len(at) + 1 :].max() > 1e-7:
        return None
    share = np.zeros(len(table))
    share[at] = result.x[: len(at)]
    prices = prices[1:] * unit
    cost = np.where(out, np.inf, sums[:, 0] + uses[:, 1:] @ prices)
    return Relaxed(float(result.fun) * unit, share, shards, cost, prices, inside)


def _first_options(uses: Array, table: Array, out: Array) -> Array:
    """Of each table the options that are best in something."""
    first = np.zeros(len(table), dtype=bool)
    starts = np.searchsorted(table, np.arange(table[-1] + 1))
    for values in (*uses.T, uses[:, 1] + uses[:, 2], uses[:, 1] + uses[:, 2] + uses[:, 3]):
        first[np.lexsort((uses[:, 0], values, out, table))[starts]] = True
    return first & ~out


def _multipliers(
    problem: Problem, sums: Array, sizes: Array, shards: Array, slack: float, out: Array
) -> Relaxed | None:
    """Options whose load, and budgets at prices that rise where one is exceeded, cost least; and the mean load."""
    starts, table = problem.table_options[:-1], tables_of(problem)
    load, uses = np.where(out, np.inf, sums[:, 0]), sums[:, 1:] / sizes
    bound = float(np.minimum.reduceat(load, starts).sum())
    prices, best, cost, least = np.zeros(4), None, load, np.inf
    for _ in range(200):
        cost = load + uses @ prices
        chosen = np.lexsort((cost, table))[starts]
        over = uses[chosen].sum(0) - (1 - slack)
        if (over <= 0).all() and load[chosen].sum() < least:
            best, least = chosen, load[chosen].sum()
        prices = np.maximum(0, prices + 0.2 * over * bound)
    if best is None:
        return None
    share = np.zeros(len(table))
    share[best] = 1
    return Relaxed(bound, share, shards, cost, prices, ~out)


def _bound(problem: Problem) -> tuple[float, Relaxed] | None:
    """A load that no plan is below, and the relaxation for a limit that is hardly above it; None if nothing fits."""
    if (found := relax(problem)) is None:
        return None
    low, known, best = max(found.bound, 1e-12), found.known, found

    def keep(limit: float) -> bool:
        nonlocal known, best
        found = relax(problem, limit, known=known)
        if found is not None:
            known, best = known | found.known, found if found.bound <= limit else best
        return found is not None and found.bound <= limit

    high, more = low * (1 + PRECISION), 0.01
    while not keep(high):
        low, high, more = high, high * (1 + more), 2 * more
    while high > low * (1 + PRECISION):
        middle = (low + high) / 2
        low, high = (low, middle) if keep(middle) else (middle, high)
    return _whole_bound(problem, low, best)


def _whole_bound(problem: Problem, low: float, best: Relaxed) -> tuple[float, Relaxed] | None:
    """A bound that a MIP has raised from `low`: each table has one option, no mixture; and the relaxation for it. None
    if nothing fits. Where there are many tables mixtures are few, and the MIP would take long.
    """
    starts, table, known, more = problem.table_options[:-1], tables_of(problem), best.known, PRECISION
    while (found := relax(problem, high := low * (1 + more), known=known)) is not None:
        best, known, able = found, known | found.known, np.isfinite(found.cost)
        # Other options cost so much that plans which have one are above the limit.
        among = able & (found.bound + found.cost - np.minimum.reduceat(found.cost, starts)[table] <= high)
        if among.sum() * len(starts) > MOST_CHOICES:
            break
        least = _choose(problem, found, np.flatnonzero(among))[1]
        if least < np.inf and least <= high:
            return max(low, least), best
        if high == np.inf:
            return None
        low, more = high, np.inf if least == np.inf and among.sum() == able.sum() else 2 * more
    return low, best


def solve(problem: Problem) -> Solution | None:
    """Options and shards of all tables; None if the budgets cannot be kept even by parts of tables."""
    if (found := _bound(problem)) is None:
        return None
    bound, relaxed = found
    starts = problem.table_options[:-1]
    goal = 1 + float(np.clip(FIRST[0] * problem.ranks / len(starts), *FIRST[1:]))
    common = problem.option_common + by_option(problem, problem.unit_common * relaxed.shards)
    more = float(common @ relaxed.share - np.minimum.reduceat(common, starts).sum())  # than `relax` counts
    relaxed = relax(problem, goal * bound - max(more, 0.0), known=relaxed.known) or relaxed
    table = tables_of(problem)
    likely = np.lexsort((-relaxed.share, table))[starts]
    chosen, sums = _whole(problem, relaxed, likely, bound), totals(problem, relaxed.shards)
    few, sizes = max(1.0, FEW / len(starts)), problem.ranks * np.array([1, 1 / problem.local, 1 / problem.local])
    alike = (np.abs(sums[:, 1:4] - sums[chosen[table], 1:4]) <= few * ALIKE * sizes).all(1)
    cost = np.where(alike, relaxed.cost, np.inf)
    among = cost <= np.minimum.reduceat(cost, starts)[table] + few * CHEAP / len(starts) * bound
    among[chosen] = among[likely] = True
    search = Search(problem, among, relaxed.shards, relaxed.prices, bound)
    search.consider(search.greedy(search.to_own(_without_shards(likely)), goal))
    greedy = search.best[1] * bound
    if search.best > (0.0, OPTIMAL):
        first = Search(problem, np.isin(np.arange(len(table)), chosen), relaxed.shards, relaxed.prices, bound)
        placed, left = first.greedy(first.to_own(_without_shards(chosen)), goal), 1.0
        for number in range(FIRST_ROUNDS):
            placed, left = first.recreate(placed, goal, number) if left > 0 else (placed, left)
        search.run(search.to_own(first.to_problem(placed)), goal)
    parts = np.maximum(by_option(problem, relaxed.shards), 1).astype(np.int64)
    (violation, load), placed = search.best, search.to_problem(search.best_placed)
    load *= bound  # 0 where nothing costs anything
    return Solution(placed, violation, load, min(bound, load), greedy, relaxed.cost, parts)


def stay(problem: Problem, fresh: Solution, before: Placed, load: float) -> Solution:
    """These options, and as many of these shards as keep a load; tables without any are placed."""
    bound = max(fresh.bound, 1e-12)
    goal = load / bound
    among = np.isin(np.arange(len(problem.option_all)), before.chosen)
    search = Search(problem, among, np.ones_like(problem.unit_most), np.zeros(4), bound)
    placed = search.greedy(search.to_own(before), goal)
    if search.score(placed) > (0.0, goal):
        placed, _ = search.recreate(placed, goal, 1, 1.0, STAYING)
    violation, highest = search.score(placed)
    return fresh._replace(placed=search.to_problem(placed), violation=violation, load=highest * bound)


def _without_shards(chosen: Array) -> Placed:
    return Placed(chosen, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


def only(problem: Problem, options: Array) -> tuple[Problem, Array, Array]:
    """The problem with some of its options; their numbers, and those of their units."""
    p, kept = problem, np.flatnonzero(options)
    table = tables_of(p)[kept]
    counts = np.diff(p.option_units)[kept]
    first = np.repeat(p.option_units[kept] - np.append(0, np.cumsum(counts))[:-1], counts)
    units = first + np.arange(counts.sum())
    return Problem(
        p.ranks, p.local, np.append(0, np.cumsum(np.bincount(table, minlength=len(p.table_options) - 1))),
        np.append(0, np.cumsum(counts)), p.option_all[kept], p.option_common[kept],
        *(each[units] for each in p[6:]),
    ), kept, units  # fmt: skip


def _choose(problem: Problem, relaxed: Relaxed, among: Array, spare: float = 0.0) -> tuple[Array | None, float]:
    """An option of each table, `among` these, that together cost least and keep budgets, each smaller by `spare`; None
    if none are found. And a load that none of these is below: infinite if there are none, 0 without scipy.
    """
    try:
        from scipy.optimize import LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError:
        return None, 0.0
    table, nodes = tables_of(problem)[among], problem.ranks // problem.local
    if not np.bincount(table, minlength=len(problem.table_options) - 1).all():
        return None, np.inf
    sums, unit = totals(problem, relaxed.shards)[among], max(relaxed.bound, 1e-12)
    one = coo_array((np.ones(len(among)), (table, np.arange(len(among)))), (table[-1] + 1, len(among))).tocsr()
    budgets = LinearConstraint((sums[:, 1:] / [problem.ranks, nodes, nodes, 1]).T, -np.inf, 1 - spare)
    result = milp(
        sums[:, 0] / problem.ranks / unit, constraints=[budgets, LinearConstraint(one, 1, 1)],
        integrality=np.ones(len(among)), bounds=(0, 1), options={"mip_rel_gap": 2 * PRECISION, "node_limit": 200},
    )  # fmt: skip
    if result.status == INFEASIBLE:
        return None, np.inf
    chosen = None if result.x is None else among[result.x > 0.5]
    return chosen, (result.mip_dual_bound or 0.0) * unit


def _whole(problem: Problem, relaxed: Relaxed, likely: Array, bound: float) -> Array:
    """The option of each table that together cost least and keep budgets: of those that cost little more than the best
    of a table, or, if that is above the bound, of all; the `likely` ones without scipy.
    """
    starts, table = problem.table_options[:-1], tables_of(problem)
    dearer = relaxed.cost - np.minimum.reduceat(relaxed.cost, starts)[table]
    sums, nodes = totals(problem, relaxed.shards), problem.ranks // problem.local
    uses = sums[:, 1:] / [problem.ranks, nodes, nodes, 1]
    tier = np.where(uses[:, 1:] > 0, [1, 2, 3], 0).max(1)
    order = np.lexsort((relaxed.cost, tier, table))
    best = np.zeros(len(table), dtype=bool)  # of its table, on its tier
    best[order] = np.append(True, (np.diff(table[order]) != 0) | (np.diff(tier[order]) != 0))
    best &= np.isfinite(relaxed.cost) & (len(starts) >= SMALL_TABLES * problem.ranks)
    left = min(SPARE * problem.ranks / len(starts), MOST_SPARE)
    found, least = likely, np.inf
    for cheap, spare in ((CHEAP, left), (20 * CHEAP, left), (np.inf, left), (np.inf, 0.0)):
        near = best | (dearer <= cheap / len(starts) * relaxed.bound) | (relaxed.share > 1e-6)
        chosen, _ = _choose(problem, relaxed, np.flatnonzero(near & np.isfinite(relaxed.cost)), spare)
        if chosen is None:
            continue
        load = float(sums[chosen, 0].sum()) / problem.ranks
        found, least = (chosen, load) if load < least else (found, least)
        if load <= ENOUGH * bound or cheap == np.inf:
            break
    return found


class Search:
    """Shards of some of a problem's options, at prices of its budgets; loads are shares of a `bound`.

    Args:
        among: bool `[O]`: the options.
        shards: the fewest that each unit can have.
        prices: seconds for all of device memory, host memory, disk and servers.
    """

    def __init__(self, problem: Problem, among: Array, shards: Array, prices: Array, bound: float) -> None:
        p, self._options, self._units = only(problem, among)
        loads = np.array([1 / bound, 1, 1, 1, 1])
        self.problem = p = p._replace(
            option_all=p.option_all * loads, option_common=p.option_common / bound, unit_common=p.unit_common / bound,
            fixed=p.fixed * loads[:4], slope=p.slope * loads[:4], mutual=p.mutual / bound,
        )  # fmt: skip
        self.tables, nodes, shards = len(p.table_options) - 1, p.ranks // p.local, shards[self._units]
        self._shards, self._dearer = shards, np.full(4, 1 + DEARER[1])
        self._prices = prices / bound * [1, p.ranks / nodes, p.ranks / nodes, p.ranks]
        self._set_costs()
        sums = totals(p, shards)
        self._size = sums[:, :2].sum(1) + sums[:, 2:4].sum(1) * p.local
        self.best, self.best_placed = (np.inf, np.inf), _without_shards(p.table_options[:-1])

    def _set_costs(self) -> None:
        """What a shard costs in all, an option besides, and with the fewest shards: loads, and budgets at prices."""
        p, weights = self.problem, np.append(1.0, self._dearer * self._prices)
        width = np.where(p.unit_node, p.local, 1)
        on_all = np.stack([width, width, np.ones_like(width), np.ones_like(width)], 1)
        mutual = 2 * p.mutual * self._shards * width
        self._per_shard = (p.fixed * on_all) @ weights[:4] + p.unit_common * p.ranks + mutual
        base = totals(p, np.zeros(len(width))) @ weights
        table, least = tables_of(p), base + by_option(p, self._per_shard * self._shards)
        cheapest = np.minimum.reduceat(least, p.table_options[:-1])[table]
        self._cost, self._least, self._order = base - cheapest, least - cheapest, np.lexsort((least, table))

    def to_own(self, placed: Placed) -> Placed:
        """The problem's options and shards in this search's numbers, without those that it does not have."""
        at = np.isin(placed.units, self._units)
        units = np.searchsorted(self._units, placed.units[at])
        return Placed(np.searchsorted(self._options, placed.chosen), units, placed.places[at], placed.shares[at])

    def to_problem(self, placed: Placed) -> Placed:
        """This search's options and shards in the problem's numbers."""
        chosen, units, places, shares = placed
        return Placed(self._options[chosen], self._units[units], places, shares)

    def consider(self, placed: Placed) -> None:
        """Keep what is better than the best."""
        if (score := self.score(placed)) < self.best:
            self.best, self.best_placed = score, placed

    def score(self, placed: Placed) -> tuple[float, float]:
        """By how much budgets are exceeded, and the largest load."""
        load, hbm, host, disk, server = usage(self.problem, *placed)
        over = sum(float(np.maximum(each - 1 - TOLERANCE, 0).sum()) for each in (hbm, host, disk, server))
        return over, float(load.max()) + self._common(placed)

    def run(self, placed: Placed, goal: float) -> None:
        """Ruin and recreate for goals that rise until one is kept, then fall; in between from the best plan again."""
        excess, stuck, part, last = np.inf, 0, 1.0, 0
        for number in range(MORE_ROUNDS):
            found, left = self.recreate(placed, goal, number, part)
            self._follow(found)
            stuck = 0 if left < GAIN * excess else stuck + 1
            placed, excess = (found, left) if left < excess else (placed, excess)
            before = self.best
            if left <= NEARLY * self.problem.ranks:
                self.consider(placed)
                self.consider(self.balance(placed) or placed)
            last = number if self.best < before else last
            if self.best <= (0.0, OPTIMAL) or (number >= ROUNDS and self.best <= (0.0, CLOSE)):
                break
            if number - last >= IDLE and self.best[0] == 0:
                break
            kept = self.best[0] == 0
            least = self.best[1] if kept else np.inf
            if excess == 0 or least <= goal:
                goal, excess, stuck, part = 1 + (min(goal, least) - 1) * (1 - LOWER), np.inf, 0, 1.0
            elif stuck >= PATIENCE:
                stuck, part = 0, part * CHEAPER
            if part < CHEAPER**3:
                goal += max(STEP, RISE * excess / self.problem.ranks, BACK * (least - goal) if kept else 0.0)
                goal = min(goal, 0.999 * least) if kept else 1 + HIGHER * (goal - 1)
                placed, excess, part = self.best_placed if kept else placed, np.inf, 1.0

    def _follow(self, placed: Placed) -> None:
        """Make budgets dearer that are exceeded in all, and cheaper those of which something is left."""
        used = np.array([each.mean() for each in usage(self.problem, *placed)[1:]])
        self._dearer = np.clip(self._dearer * (1 + PACE * (used - USED)), 1 + DEARER[0], 1 + DEARER[2])
        self._set_costs()

    def _common(self, placed: Placed) -> float:
        """The load that is on every rank, wherever shards are."""
        return float(self.problem.option_common[placed.chosen].sum() + self.problem.unit_common[placed.units].sum())

    def _scaled(self, goal: float, placed: Placed) -> tuple[Problem, float]:
        """With loads as shares of what a goal leaves beside what is on every rank anyway."""
        p, room = self.problem, max(goal - self._common(placed), 1e-3)
        scale = np.array([1 / room, 1, 1, 1])
        return p._replace(
            option_all=p.option_all * np.append(scale, 1.0), fixed=p.fixed * scale, slope=p.slope * scale,
            mutual=p.mutual / room,
        ), room  # fmt: skip

    def greedy(self, start: Placed, goal: float) -> Placed:
        """With shards of those tables, the largest first, that have none."""
        scaled, room = self._scaled(goal, start)
        found = place_greedily(scaled, *start, self._per_shard / room, self._size[start.chosen], FIT)
        return Placed(start.chosen, *found)

    def recreate(
        self, placed: Placed, goal: float, number: int, part: float = 1.0, temperature: float | None = None
    ) -> tuple[Placed, float]:
        """Ruin and recreate for a goal, and the best shares for what it finds; the excess that is left, in loads."""
        scaled, room = self._scaled(goal, placed)
        p, last = self.problem, min(number, 1)
        evaluations = min(EVALUATIONS[0] * self.tables * p.ranks, EVALUATIONS[1])
        evaluations = int(evaluations * np.clip(LONGER[0] * p.ranks / self.tables, *LONGER[1:]))
        hot, cold = (temperature or part * each[last] * p.ranks / self.tables for each in (HOT, COLD))
        found = ruin_and_recreate(
            scaled, *(part / room * each for each in (self._cost, self._least, self._per_shard)), self._order,
            self._size[placed.chosen], *placed, evaluations, hot, cold, part * FIT, number + 1,
        )  # fmt: skip
        if temperature is not None:
            return Placed(*found[0]), self._excess(Placed(*found[0]), goal)
        both = [self._balanced(Placed(*each), goal) for each in found]
        return min(both, key=lambda each: each[1])

    def _balanced(self, placed: Placed, goal: float) -> tuple[Placed, float]:
        while (better := self.balance(placed, goal)) is not None:
            fewer = len(better.units) < len(placed.units)
            placed = better
            if not fewer:
                break
        return placed, self._excess(placed, goal)

    def _excess(self, placed: Placed, goal: float) -> float:
        load, hbm, host, disk, _ = usage(self.problem, *placed)
        over = [np.maximum(each - 1, 0).sum() for each in (hbm, host, disk)]
        load = load + self._common(placed)
        total = np.maximum(load - goal, 0).sum() + WEIGHT * (over[0] + self.problem.local * (over[1] + over[2]))
        return float(total) if total > 1e-6 else 0.0

    def balance(self, placed: Placed, goal: float | None = None) -> Placed | None:
        """The shares of shards of rows, where they are, for which the excess over a goal is least, or without a goal
        the largest load; None if budgets cannot be kept then, or without scipy. Shards without a share are gone.
        """
        try:
            from scipy.optimize import linprog
            from scipy.sparse import coo_array
        except ImportError:
            return None
        p, (chosen, units, places, shares) = self.problem, placed
        nodes, number, free = p.ranks // p.local, len(units), p.unit_steps[units] > FINE
        load, hbm, host, disk, _ = usage(p, chosen, units, places, np.where(free, 0.0, shares))
        has = np.concatenate([load + self._common(placed), hbm, host, disk])
        width = np.where(p.unit_node[units], p.local, 1)
        node = np.where(p.unit_node[units], places, places // p.local)
        each = np.repeat(np.arange(number), width)
        rank = np.repeat(np.where(p.unit_node[units], places * p.local, places), width)
        rank += np.arange(len(rank)) - np.repeat(np.cumsum(width) - width, width)
        slope, every, sums = p.slope[units], np.arange(number), len(has)
        row = np.concatenate([rank, p.ranks + rank, 2 * p.ranks + node, 2 * p.ranks + nodes + node])
        column = np.concatenate([each, each, every, every])
        value = np.concatenate([slope[each, 0], slope[each, 1], slope[:, 2], slope[:, 3]])
        kept = free[column] & (value > 0)
        row, column, value = row[kept], column[kept], value[kept]
        most = np.concatenate([np.full(p.ranks, goal or 0.0), np.ones(sums - p.ranks)]) - has
        if goal is None:
            more = np.arange(p.ranks)
            cost, extra = np.append(np.zeros(number), 1.0), np.zeros(p.ranks, np.int64)
        else:
            more = extra = np.arange(sums)
            weights = [np.ones(p.ranks), np.full(p.ranks, WEIGHT), np.full(2 * nodes, WEIGHT * p.local)]
            cost = np.concatenate([np.zeros(number), *weights])
        at = np.append(row, more), np.append(column, number + extra)
        above = coo_array((np.append(value, -np.ones(len(more))), at), (sums, len(cost)))
        whole, of = np.unique(units[free], return_inverse=True)
        one = coo_array((np.ones(len(of)), (of, np.flatnonzero(free))), (len(whole), len(cost)))
        result = linprog(
            cost, above.tocsr(), most, one.tocsr(), np.ones(len(whole)), bounds=(0, None), method="highs-ds"
        )
        if result.x is None:
            return None
        shares = np.where(free, result.x[:number], shares)
        some = shares > 1e-7
        return Placed(chosen, units[some], places[some], shares[some])
