"""The inner loop of the planner's search: shards of tables are taken away, and placed again where there is room.

What is lowered is the excess, and costs beside it. One thread; time is proportional to the places that are tried.
"""

# ruff: noqa: NPY002  Numba knows this generator only; it is its own, and seeded.

from typing import Any, NamedTuple

import numpy as np

from tritonemb.kernels.cpu.jit import compiled, uncounted
from tritonemb.sharding.planner.shard_packing import (
    NEXT,
    UNIT,
    add_to_all,
    copy,
    copy_all,
    excess_of_all,
    fill,
    put,
    remove,
    room_for,
    start,
    take,
)
from tritonemb.sharding.table_stats import Array

WHOLE_TABLE, ANY_TABLE, OF_NODE, SAME_NODE = 0.3, 0.1, 0.2, 0.5  # how often what is taken away is so
RUINED, MANY, OFTEN = 5, 40, 0.005  # shards that are taken away and placed again, at most; of one node, so often
LOOKED_AT = 0.5  # of options, a part
BY_SIZE = 0.7  # how often the largest are placed first
TOURNAMENT, ALL = 6, 0.2  # ranks, of which that with the most excess is ruined; how often it is one of all


class Ruin(NamedTuple):
    """What a step takes away: some shards, and all shards of some tables; and how it was before."""

    counts: Array  # [3]: tables; their shards before; shards to take away
    place_of: Array  # [T]: the number of a table among these; -1: it is not one
    tables: Array
    options: Array
    whole: Array  # bool: all shards of the table go
    shards: Array
    before: Any  # units, places and shares of all shards of the tables


@uncounted
def _note(p, s, r, table, whole):
    """Remember a table as it is, and whether all of it goes."""
    if r.place_of[table] < 0:
        number = r.counts[0]
        r.place_of[table], r.tables[number], r.options[number], r.whole[number] = number, table, s.chosen[table], False
        r.counts[0], r.counts[1] = number + 1, copy(p, s, table, r.before, r.counts[1])
    r.whole[r.place_of[table]] |= whole


@uncounted
def _choose(p, s, r):
    """Shards of a rank with much excess, of its node and of others, are what goes; and sometimes any table."""
    rank, highest, r.counts[:] = 0, -1.0, 0
    every = np.random.random() < ALL
    for number in range(p.ranks if every else 1 + np.random.randint(TOURNAMENT)):
        other = number if every else np.random.randint(p.ranks)
        value = s.rank[2, other] + s.node[2, other // p.local] / p.local
        value *= np.random.random() if every else 1.0
        if value > highest:
            rank, highest = other, value
    node, near, wanted = rank // p.local, np.random.random() < SAME_NODE, 1 + np.random.randint(RUINED)
    if np.random.random() < OFTEN:
        near, wanted = True, MANY
    for _ in range(4 * RUINED):
        if np.random.random() < ANY_TABLE:
            _note(p, s, r, np.random.randint(len(s.chosen)), True)
        shard = s.head[p.ranks + rank // p.local if np.random.random() < OF_NODE else rank]
        while shard >= 0 and r.counts[2] < wanted:
            unit, known = s.shard[shard, UNIT], False
            _note(p, s, r, s.table[unit], s.shards_of[unit] == 1 or np.random.random() < WHOLE_TABLE)
            for each in range(r.counts[2]):
                known |= r.shards[each] == shard
            if not known:
                r.shards[r.counts[2]] = shard
                r.counts[2] += 1
            shard = s.shard[shard, NEXT]
        if r.counts[2] >= wanted:
            break
        rank = node * p.local + np.random.randint(p.local) if near else np.random.randint(p.ranks)


@uncounted
def _take_away(p, s, r, units, shares):
    """Take away what was chosen: shares of units, and tables as units below 0; how many, and what that changes."""
    number, change = 0, 0.0
    for each in range(r.counts[2]):
        unit, share = s.shard[r.shards[each], UNIT], s.share[r.shards[each]]
        if not r.whole[r.place_of[s.table[unit]]]:
            change += take(p, s, r.shards[each])
            at = 0
            while at < number and units[at] != unit:
                at += 1
            if at == number:
                units[at], shares[at], number = unit, 0.0, number + 1
            shares[at] += share
    for each in range(r.counts[0]):
        if r.whole[each]:
            change += remove(p, s, r.tables[each])
            units[number], number = -1 - r.tables[each], number + 1
    return number, change


@uncounted
def _put_back(p, s, r):
    """Undo all of a step."""
    for each in range(r.counts[0]):
        remove(p, s, r.tables[each])
        s.chosen[r.tables[each]] = r.options[each]
        add_to_all(p, s, r.options[each], 1.0)
    for each in range(r.counts[1]):
        put(p, s, r.before[0][each], r.before[1][each], r.before[2][each])


@uncounted
def _cost(p, s, cost, per_shard, table):
    """Of a table as it is, beside its excess."""
    option = s.chosen[table]
    total = cost[option]
    for unit in range(p.option_units[option], p.option_units[option + 1]):
        total += per_shard[unit] * s.shards_of[unit]
    return total


@uncounted
def _cost_of_all(p, s, cost, per_shard, tables):
    total = 0.0
    for table in tables:
        total += _cost(p, s, cost, per_shard, table)
    return total


@uncounted
def _insert_best(p, s, cost, least_cost, per_shard, order, table, to):
    """Give a table that is not placed an option and shards that cost least together with the excess; some options are
    not looked at. What that adds to the excess, and how many places were looked at.
    """
    least, best, tried, number = np.inf, -1, 1, 0
    for each in range(p.table_options[table], p.table_options[table + 1]):
        option = order[each]
        if least_cost[option] >= least:
            break
        if best >= 0 and np.random.random() >= LOOKED_AT:
            continue
        s.chosen[table] = option
        total = add_to_all(p, s, option, 1.0)
        for unit in range(p.option_units[option], p.option_units[option + 1]):
            change, looked = fill(p, s, unit, 1.0, per_shard[unit])
            total, tried = total + change, tried + looked
        total += _cost(p, s, cost, per_shard, table)
        if total < least:
            least, best, number = total, option, copy(p, s, table, to, 0)
        remove(p, s, table)
    s.chosen[table] = best
    change = add_to_all(p, s, best, 1.0)
    for each in range(number):
        change += put(p, s, to[0][each], to[1][each], to[2][each])
    return change, tried


@compiled
def ruin_and_recreate(
    p, cost, least_cost, per_shard, order, size, chosen, units, places, shares, evaluations, hot, cold, fit, seed
):
    """Options and shards with no load above 1 and no budget exceeded, or little: the best, and the last.

    Ruin and recreate (Schrimpf et al., 2000; Shaw, 1998): shards of a rank or node, and of others, or all shards of
    their tables, are taken away and placed again, mostly the largest first, a table that has none with the option that
    adds least to the excess and to what it costs: `cost [O]`, and `per_shard [U]` for each shard; `least_cost [O]` is
    with the fewest shards. `order [O]` has the options of each table by that, `size [T]` says which tables are large.
    Changes are accepted as in annealing, at temperatures from `hot` to `cold`, in loads.
    """
    np.random.seed(seed)
    s = start(p, chosen.copy(), units, places, shares, fit)
    best_chosen, best_shards, trial = s.chosen.copy(), room_for(s), room_for(s)
    found, most = copy_all(p, s, best_shards), 5 * RUINED + MANY
    r = Ruin(
        np.zeros(3, np.int64), np.full(len(chosen), -1), np.empty(most, np.int64), np.empty(most, np.int64),
        np.empty(most, np.bool_), np.empty(most, np.int64), room_for(s),
    )  # fmt: skip
    units, shares, keys = np.empty(2 * most, np.int64), np.empty(2 * most), np.empty(2 * most)
    best = excess = excess_of_all(p, s)
    used, step = 0, 0
    while used < evaluations and best > 1e-9:
        if step % 256 == 0:
            excess = excess_of_all(p, s)
        temperature = hot * (cold / hot) ** (used / evaluations)
        step, used = step + 1, used + p.ranks
        _choose(p, s, r)
        tables = r.tables[: r.counts[0]]
        dearer = -_cost_of_all(p, s, cost, per_shard, tables)
        number, change = _take_away(p, s, r, units, shares)
        by_size = np.random.random() < BY_SIZE
        for each in range(number):
            unit = units[each]
            large = (
                size[-1 - unit]
                if unit < 0
                else shares[each] * (p.slope[unit, :2].sum() + p.slope[unit, 2:].sum() * p.local)
            )
            keys[each] = -large * (0.7 + 0.6 * np.random.random()) if by_size else np.random.random()
        for each in np.argsort(keys[:number]):
            if units[each] < 0:
                added, tried = _insert_best(p, s, cost, least_cost, per_shard, order, -1 - units[each], trial)
            else:
                added, tried = fill(p, s, units[each], shares[each], per_shard[units[each]])
            change, used = change + added, used + tried
        dearer += _cost_of_all(p, s, cost, per_shard, tables)
        if change + dearer > 1e-12 and np.random.random() >= np.exp(-(change + dearer) / temperature):
            _put_back(p, s, r)
        else:
            excess += change
        r.place_of[tables] = -1
        if excess < best - 1e-9:
            excess = excess_of_all(p, s)
            best, found = excess, copy_all(p, s, best_shards)
            best_chosen[:] = s.chosen
    last = copy_all(p, s, trial)
    return (
        (best_chosen, best_shards[0][:found], best_shards[1][:found], best_shards[2][:found]),
        (s.chosen, trial[0][:last], trial[1][:last], trial[2][:last]),
    )
