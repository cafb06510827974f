"""The search: an option for each table, and a place for each of its units, so that the slowest rank is fast.

A table has *options*: a sharding type, into how many parts, on which tier. An option has *units*, which are placed as
one: a shard on a rank, shards on all ranks of a node, or shards on all ranks. `solve`

1. chooses options by the LP relaxation (scipy's HiGHS; without it by multipliers of the budgets), whose value is a
   lower bound of the largest load: no plan is faster;
2. places units greedily, and by the largest differencing method of Karmarkar and Karp (1982), for several ways
   (Korf, 2009), and takes the better;
3. improves: of the rank with the largest load it moves a unit, swaps it with another's, or gives a table another
   option; then kicks a few units, and again (`kernels/cpu/plan_search.py`).

Loads are shares of the bound, sizes shares of the budgets, so 1 is full. Same problem, same answer.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritonemb.kernels.cpu.plan_search import ALL, NODE, RANK, Problem, improve, place_greedily, usage

Array = NDArray[Any]
Placed = tuple[tuple[float, float], Array, Array]  # how good it is (see `_score`), options, and places of units
EVALUATIONS = 120_000_000
OPTIMAL = 1.0002  # of the bound: nothing more is tried
CLOSE = 1.01  # of the bound: the choice of options is not tried again
ENOUGH = 1.08  # of the bound, where budgets are tight: polishing does the rest
SEEDS = 6  # of kicks, until budgets are kept and they gain little
SLOWER = 0.997  # of the load before, which is little
BISECTIONS = 7
EXCEEDED = 1e3  # cost in the LP of a budget that is exceeded by all of it, in loads
# Parts of the bound and of a budget that an item may take, where loads alone are hard to pack, and where budgets are.
LARGEST_ITEMS = (
    ((1.0, 1.0), (0.95, 1.0), (0.9, 1.0), (0.85, 1.0), (0.8, 1.0), (0.75, 1.0), (0.6, 1.0)),
    ((None, 1.0), (None, 0.5), (None, 0.35), (None, 0.25), (None, 0.18), (None, 0.12), (None, 0.08), (None, 0.06)),
)
SLACK = 0.025  # of every budget, that whole units need
ROOM = 1.02  # of the bound: what a rank may have when options are chosen so
MOST_DIFFERENCED = 4_096  # units


class Relaxed(NamedTuple):
    """A lower bound of the largest load; the share of each option; and what each adds to the load, with the budgets
    that it uses at their prices: seconds. `known` are the options that the LP has looked at, `out` those that it
    may not choose. Unless it is `exact`, that it finds no plan does not prove that there is none.
    """

    bound: float
    share: Array
    cost: Array
    known: Array
    out: Array
    exact: bool


class Solution(NamedTuple):
    """The option of each table, each unit's rank or node (-1: not placed), and how good that is.

    `violation` is 0 if all budgets are kept, `load` and `bound` are seconds; `greedy` is the load of the greedy start.
    """

    chosen: Array
    where: Array
    violation: float
    load: float
    bound: float
    greedy: float
    cost: Array  # of each option, see `Relaxed`


class Totals(NamedTuple):
    """Of each option, over its items: what the relaxation knows of it."""

    load: Array  # seconds on all ranks
    peak: Array  # seconds of its largest item
    most: Array  # of a budget that a unit takes
    hbm: Array
    host: Array
    disk: Array


def totals(problem: Problem) -> Totals:
    """Sums over the items of each option."""
    width = np.select([problem.unit_kind == RANK, problem.unit_kind == NODE], [1, problem.local], problem.ranks)
    copies = np.repeat(width / np.diff(problem.unit_items), np.diff(problem.unit_items))
    unit = np.repeat(np.arange(len(problem.unit_kind)), np.diff(problem.unit_items))
    option = np.repeat(np.arange(len(problem.option_shared)), np.diff(problem.option_units))[unit]
    number = len(problem.option_shared)
    load, hbm, host, disk = (
        np.bincount(option, values * copies, number)
        for values in (problem.load, problem.hbm, problem.host, problem.disk)
    )
    peak, most = np.zeros(number), np.zeros(number)
    np.maximum.at(peak, option, problem.load)
    of_node = np.where(problem.unit_kind == RANK, 1, problem.local)[unit]
    np.maximum.at(most, option, np.maximum(problem.hbm, np.maximum(problem.host, problem.disk) * of_node))
    return Totals(load + problem.ranks * problem.option_shared, peak, most, hbm, host, disk)


def relax(
    problem: Problem, slack: float = 0.0, limit: float = np.inf, largest: float = np.inf, part: float = 1.0,
    known: Array | None = None, shared: Array | None = None, outer: Array | None = None,
) -> Relaxed | None:  # fmt: skip
    """The LP relaxation; None if budgets, each smaller by the share `slack`, cannot be kept.

    With a `limit` no rank may have more load than that. Options with a larger item are out (or those with one above
    `largest`, or with more than this `part` of a budget), and items are counted by dual feasible functions (Fekete and
    Schepers, 2001): functions of an item's share of the limit that add up to 1 at most on a rank, since the shares do.
    With `shared`, what each option adds to the load of every rank, the least sum of that is found instead of the least
    load. Options `outer` are out, too. Options come into the LP as its prices ask for them; `known` ones are there from
    the beginning. Without scipy the bound is a simple one.
    """
    starts, numbers = problem.table_options[:-1], np.arange(len(problem.table_options) - 1)
    table, found = np.repeat(numbers, np.diff(problem.table_options)), totals(problem)
    smallest = np.minimum.reduceat(found.most, starts)[table]
    out = found.peak + problem.option_shared > min(limit, largest) * (1 + 1e-9)
    out |= found.most > 1 + 1e-9  # as a shard on each rank of a node may fit, but not all of them
    out |= outer if outer is not None else False
    out |= (found.most > part) & (found.most > smallest * (1 + 1e-9))
    if np.logical_and.reduceat(out, starts).any():
        return None
    unit = max(float(found.load.max(initial=0)) / problem.ranks, 1e-12)  # in which the LP counts seconds
    # Rows: load, budgets, cuts. Columns: options, then the largest load, what all ranks share, and what is exceeded.
    rows = [(found.load / problem.ranks / unit, 0.0)]
    rows += [(values, size * (1 - slack)) for values, size in _budgets(problem, found) if values.any()]
    budgets = len(rows)
    rows += [(values, float(problem.ranks)) for values in _cuts(problem, limit)] if np.isfinite(limit) else []
    uses, sizes = np.stack([values for values, _ in rows]), np.array([size for _, size in rows])
    try:
        from scipy.optimize import linprog
        from scipy.sparse import block_array, coo_array
    except ImportError:
        return _multipliers(problem, found, table, slack, out)
    inside = _first_options(found, table, out) | (out & False if known is None else known & ~out)
    while True:
        at = np.flatnonzero(inside)
        peaks = coo_array((found.peak[at] / unit, (table[at], np.arange(len(at)))), (len(numbers), len(at)))
        ones = coo_array((np.ones(len(at)), (table[at], np.arange(len(at)))), (len(numbers), len(at)))
        top, each = np.zeros((len(rows), 2 + len(rows) - 1)), np.tile([-1.0, 1.0], (len(numbers), 1))
        top[0, 0], top[1:, 2:] = -1.0, -np.eye(len(rows) - 1)
        above = block_array(
            [[coo_array(uses[:, at]), coo_array(top)], [peaks, coo_array(np.pad(each, ((0, 0), (0, len(rows) - 1))))]]
        )
        last = np.zeros((1, len(at) + len(rows) + 1))
        last[0, : len(at)], last[0, len(at) + 1] = problem.option_shared[at] / unit, -1.0
        one = block_array(
            [
                [ones, coo_array((len(numbers), len(rows) + 1))],
                [coo_array(last[:, : len(at)]), coo_array(last[:, len(at) :])],
            ]
        )
        least = np.zeros(len(at)) if shared is None else shared[at] / unit
        cost = np.concatenate([least, [float(shared is None), 0.0], np.full(len(rows) - 1, EXCEEDED)])
        top_limit = None if shared is None else limit / unit
        most = [(0, None)] * len(at) + [(0, top_limit)] + [(0, None)] * len(rows)
        result = linprog(
            cost, above.tocsr(), np.append(sizes, np.zeros(len(numbers))), one.tocsr(),
            np.append(np.ones(len(numbers)), 0.0),
            bounds=most, method="highs-ds",
        )  # fmt: skip
        assert result.x is not None, result.message
        prices, of_table = result.ineqlin.marginals, result.eqlin.marginals
        gain = -prices[: len(rows)] @ uses - prices[len(rows) :][table] * found.peak / unit
        gain = gain - of_table[-1] * problem.option_shared / unit - of_table[:-1][table]
        gain = gain if shared is None else gain + shared / unit
        gain[inside | out] = 0
        new = np.lexsort((gain, table))[starts]  # the best of each table
        new = new[gain[new] < -1e-7 * max(1.0, float(result.fun))]
        if not len(new):
            break
        inside[new] = True
    if result.x[len(at) + 2 :].max(initial=0) > 1e-7:
        return None
    added = found.load / problem.ranks - prices[1:budgets] @ uses[1:budgets] * unit
    share = np.zeros(len(table))
    share[at] = result.x[: len(at)]
    return Relaxed(float(result.fun) * unit, share, added, inside, out, True)


def _on_all(problem: Problem) -> Array:
    """What each option adds to the load of every rank."""
    unit = problem.option_units[:-1]
    least = np.minimum.reduceat(problem.load, problem.unit_items[:-1])[unit]
    return np.where(problem.unit_kind[unit] == ALL, least, 0) + problem.option_shared


def _within(problem: Problem, limit: float, known: Array) -> Relaxed | None:
    """The relaxation without options whose largest item does not fit beside what every rank has at least; None if
    no plan keeps the limit.
    """
    found, shared = totals(problem), _on_all(problem)
    out: Array | None = None
    peak = np.where(problem.unit_kind[problem.option_units[:-1]] == ALL, shared, found.peak + shared)
    while True:
        relaxed = relax(problem, limit=limit, known=known, outer=out)
        if relaxed is None or relaxed.bound > limit:
            return None
        known = known | relaxed.known
        least = relax(problem, limit=limit * (1 + 1e-6), known=known, shared=shared, outer=out)
        if least is None:
            return relaxed
        known, before = known | least.known, out
        out = peak + max(least.bound - 1e-6 * limit, 0) - shared > limit
        if before is not None and (out == before).all():
            return relaxed


def _first_options(found: Totals, table: Array, out: Array) -> Array:
    """Of each table the options that are best in something."""
    first = np.zeros(len(table), dtype=bool)
    starts = np.searchsorted(table, np.arange(table[-1] + 1))
    memory = found.hbm + found.host
    for values in (found.load, found.peak, found.most, found.hbm, found.host, found.disk + memory, memory):
        first[np.lexsort((found.load, values, out, table))[starts]] = True
    return first & ~out


def _cuts(problem: Problem, limit: float) -> list[Array]:
    """For each dual feasible function its sum over the items of each option."""
    starts = problem.table_options[:-1]
    room = limit - float(np.minimum.reduceat(problem.option_shared, starts).sum())
    share = problem.load / max(room, 1e-12) * (1 - 1e-9)  # not by rounding above what it is
    found = [
        np.where(share > 1 - least, 1.0, np.where(share < least, 0.0, share)) for least in (0.1, 0.2, 0.3, 0.4, 0.5)
    ]
    for k in (1, 2, 3, 4):
        scaled = share * (k + 1)
        found.append(np.where(np.abs(scaled - np.round(scaled)) < 1e-6, share, np.floor(scaled) / k))
    return [totals(problem._replace(load=values, option_shared=0 * problem.option_shared)).load for values in found]


def _budgets(problem: Problem, found: Totals) -> list[tuple[Array, float]]:
    nodes = problem.ranks // problem.local
    sizes = ((found.hbm, problem.ranks), (found.host, nodes), (found.disk, nodes), (problem.option_server, 1))
    return [(values, float(limit)) for values, limit in sizes]


def _multipliers(problem: Problem, found: Totals, table: Array, slack: float, out: Array) -> Relaxed | None:
    """Options whose load, and budgets at prices that rise where one is exceeded, cost least; and the mean load."""
    starts = problem.table_options[:-1]
    load = np.where(out, np.inf, found.load)
    cheapest = np.minimum.reduceat(found.load, starts).sum() / problem.ranks
    bound = max(float(cheapest), float(np.minimum.reduceat(found.peak + problem.option_shared, starts).max()))
    budgets = _budgets(problem, found)
    prices, best, cost = np.zeros(len(budgets)), None, load
    sizes = np.array([size for _, size in budgets])
    for _ in range(200):
        cost = load + sum(price * values for price, (values, _) in zip(prices, budgets, strict=True))
        chosen = np.lexsort((cost, table))[starts]
        over = np.array([values[chosen].sum() for values, _ in budgets]) / sizes - (1 - slack)
        if (over <= 0).all() and (best is None or load[chosen].sum() < load[best].sum()):
            best = chosen
        prices = np.maximum(0, prices + 0.2 * over * cheapest * problem.ranks / sizes)
    if best is None:
        return None
    share = np.zeros(len(table))
    share[best] = 1
    return Relaxed(bound, share, cost / problem.ranks, np.ones(len(table), dtype=bool), out, False)


def solve(problem: Problem, home: Solution | None = None, good_enough: float = OPTIMAL) -> Solution | None:
    """Options and places of units; None if the budgets cannot be kept even by parts of tables.

    Args:
        home: a solution to start from, whose options stay: the search ends as soon as budgets are kept and the load is
            at most `good_enough` times its bound.
    """
    if home is not None:
        scaled = _scaled(problem, home.bound)
        _, where = improve(scaled, home.chosen, home.where, EVALUATIONS, good_enough, True, 1)
        violation, load = _score(scaled, home.chosen, where)
        return home._replace(where=where, violation=violation, load=load * home.bound)
    relaxed = relax(problem)
    if relaxed is None:
        return None
    bound = max(relaxed.bound, 1e-12)
    best, greedy = _place(problem, relaxed, relaxed.known, bound, True)
    known = relaxed.known
    if best[0] > (0.0, CLOSE):  # few units a rank, or tight budgets: options with smaller and smaller items
        tight, low, high = best[0][0] > 0, bound, bound * best[0][1]
        for _ in range(BISECTIONS if relaxed.exact and not tight else 0):
            middle = (low + high) / 2
            found = _within(problem, middle, known)
            known = known if found is None else known | found.known
            low, high = (middle, high) if found is None else (low, middle)
        best, bound = ((best[0][0], best[0][1] * bound / low), *best[1:]), low
        for largest, part in LARGEST_ITEMS[tight]:
            limit = (ROOM if largest else np.inf) * bound
            found = relax(problem, SLACK * tight, limit, (largest or np.inf) * bound, part, known)
            if found is None:
                continue
            known = known | found.known
            best = min(best, _place(problem, found, known, bound, False)[0], key=lambda each: each[0])
            if best[0] <= (0.0, ENOUGH if tight else CLOSE):
                break
        for seed in range(SEEDS):
            before = best[0]
            best = min(best, _polish(problem, best, known, bound, 2 + seed, EVALUATIONS), key=lambda each: each[0])
            if best[0] <= (0.0, CLOSE) or (best[0][0] == before[0] == 0 and best[0][1] > SLOWER * before[1]):
                break
    (violation, load), chosen, where = best
    return Solution(chosen, where, violation, load * bound, bound, greedy * relaxed.bound, relaxed.cost)


def _scaled(problem: Problem, unit: float) -> Problem:
    """With loads as shares of this."""
    return problem._replace(load=problem.load / unit, option_shared=problem.option_shared / unit)


def _rounded(problem: Problem, relaxed: Relaxed, known: Array) -> Array:
    """The option of each table with the largest share; where budgets are exceeded then, cheap others."""
    tables = np.repeat(np.arange(len(problem.table_options) - 1), np.diff(problem.table_options))
    chosen = np.lexsort((-relaxed.share, tables))[problem.table_options[:-1]].astype(np.int64)
    used = np.stack([values / size for values, size in _budgets(problem, totals(problem))], 1)
    cost = np.where(relaxed.out | ~known, np.inf, relaxed.cost / max(relaxed.bound, 1e-12))
    for _ in range(len(chosen)):
        now = used[chosen].sum(0)
        over = np.maximum(now - (1 - SLACK), 0).sum()
        if over <= 1e-9:
            break
        after = now + used - used[chosen[tables]]
        gain = over - np.maximum(after - (1 - SLACK), 0).sum(1)
        worse = np.maximum(cost - cost[chosen[tables]], 0) + 1e-3
        best = int(np.where(gain > 1e-9, gain / worse, 0).argmax())
        if gain[best] <= 1e-9:
            break
        chosen[tables[best]] = best
    return chosen


def _place(problem: Problem, relaxed: Relaxed, known: Array, bound: float, differ: bool) -> tuple[Placed, float]:
    """The options with the largest shares placed and improved, of those that are known; and what greedy packing has."""
    unit = max(bound, relaxed.bound)
    some, kept, units = _only(_scaled(problem, unit), known)
    chosen = np.searchsorted(kept, _rounded(problem, relaxed, known))
    greedy = place_greedily(some, chosen, np.full(len(some.unit_kind), -1))
    starts = [greedy, _differencing(some, chosen, greedy)] if differ else [greedy]
    where = min(starts, key=lambda start: _score(some, chosen, start))
    packed = _score(some, chosen, greedy)[1] * unit / bound
    chosen, where = improve(some, chosen, where, EVALUATIONS // 8, OPTIMAL, True, 1)
    places = np.full(len(problem.unit_kind), -1)
    places[units] = where
    placed = (0.0, unit / bound), kept[chosen], places
    return _polish(problem, placed, known, bound, 1, EVALUATIONS // 8), packed


def _polish(problem: Problem, placed: Placed, known: Array, bound: float, seed: int, evaluations: int) -> Placed:
    """Options and places improved; loads are shares of what the largest is already, as their 16th power is compared."""
    unit = placed[0][1]
    some, kept, units = _only(_scaled(problem, unit * bound), known)
    chosen, where = np.searchsorted(kept, placed[1]), placed[2][units]
    chosen, where = improve(some, chosen, where, evaluations, OPTIMAL / unit, False, seed)
    violation, load = _score(some, chosen, where)
    places = np.full(len(problem.unit_kind), -1)
    places[units] = where
    return (violation, load * unit), kept[chosen], places


def _only(problem: Problem, known: Array) -> tuple[Problem, Array, Array]:
    """The problem with some of its options; their numbers, and those of their units."""
    options = np.flatnonzero(known)
    units = _ranges(problem.option_units, options)
    items = _ranges(problem.unit_items, units)
    table = np.repeat(np.arange(len(problem.table_options) - 1), np.diff(problem.table_options))[options]
    offsets = [
        np.concatenate([[0], np.cumsum(counts)])
        for counts in (
            np.bincount(table, minlength=len(problem.table_options) - 1),
            np.diff(problem.option_units)[options],
            np.diff(problem.unit_items)[units],
        )
    ]
    values = [each[items] for each in (problem.load, problem.hbm, problem.host, problem.disk)]
    return Problem(
        problem.ranks, problem.local, offsets[0], offsets[1], problem.unit_kind[units], offsets[2],
        values[0], values[1], values[2], values[3],
        problem.option_shared[options], problem.option_server[options],
    ), options, units  # fmt: skip


def _ranges(offsets: Array, which: Array) -> Array:
    """The numbers from `offsets[n]` to `offsets[n + 1]`, for each n of `which`."""
    counts = np.diff(offsets)[which]
    first = np.repeat(offsets[which] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    return np.asarray(first + np.arange(counts.sum()))


def _score(problem: Problem, chosen: Array, where: Array) -> tuple[float, float]:
    """By how much budgets are exceeded, and the largest load."""
    found = usage(problem, chosen, where)
    return float(found[-1]), float(found[0].max())


def _differencing(problem: Problem, chosen: Array, greedy: Array) -> Array:
    """Units of one rank by Karmarkar and Karp's differencing of their loads; others as they are placed already."""
    units = np.concatenate([np.arange(*problem.option_units[option : option + 2]) for option in chosen])
    alone = units[problem.unit_kind[units] == RANK]
    if not 2 <= len(alone) <= MOST_DIFFERENCED:
        return greedy
    heap: list[tuple[float, int, list[float], list[list[int]]]] = []  # loads of ranks, descending, and units of each
    others = problem.ranks - 1
    for number, unit in enumerate(alone.tolist()):
        load = float(problem.load[problem.unit_items[unit]])
        heap.append((-load, number, [load] + [0.0] * others, [[unit]] + [[] for _ in range(others)]))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        (_, _, one, of_one), (_, _, other, of_other) = heapq.heappop(heap), heapq.heappop(heap)
        sums = [a + b for a, b in zip(one, reversed(other), strict=True)]
        held = [a + b for a, b in zip(of_one, reversed(of_other), strict=True)]
        order = sorted(range(problem.ranks), key=lambda rank: -sums[rank])
        loads = [sums[rank] - sums[order[-1]] for rank in order]
        heapq.heappush(heap, (-loads[0], number, loads, [held[rank] for rank in order]))
        number += 1
    where, table = greedy.copy(), np.repeat(np.arange(len(chosen)), np.diff(problem.option_units)[chosen])
    table_of = dict(zip(units.tolist(), table.tolist(), strict=True))
    where[alone] = -1
    base = usage(problem, chosen, where)[0]
    for rank, held_units in zip(np.argsort(base, kind="stable").tolist(), heap[0][3], strict=True):
        apart = {table_of[unit]: unit for unit in held_units}  # units of one table have ranks of their own
        where[list(apart.values())] = rank
    return np.asarray(place_greedily(problem, chosen, where))
