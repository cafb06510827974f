"""The inner loops of the planner's search: units of tables' options are placed on ranks, moved and swapped.

`sharding/planner/search.py` says what a problem is. The energy that is lowered is what loads and budgets exceed 1 by,
in loads of a rank, and a little for what is nearly full. One thread; time is proportional to the moves that are tried.
"""

# ruff: noqa: NPY002  Numba knows this generator only; it is its own, and seeded.

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritonemb.kernels.cpu.jit import called, compiled

Array = NDArray[Any]
RANK, NODE, ALL = range(3)  # where a unit is placed
SOFT = 1e-4  # of the 16th power of what is used: so units are placed where most is free
EMPTY = 0.6  # up to here nothing counts
WEIGHT = 1.5  # of a budget that is exceeded, in loads
STEEP = 5.0  # how much more a load costs, the more it is above 1
COST = 0.5  # of what an option costs by the prices
OFTEN = 0.05  # a table gets another option; two ranks are packed anew
TOURNAMENT = 4  # ranks, the fullest of which is packed anew
MOST_REPACKED = 64  # units


class Problem(NamedTuple):
    """Tables, their options, the options' units, and the units' items: one for each rank, or one that all are like.

    `table_options [T + 1]`, `option_units [O + 1]` and `unit_items [U + 1]` are offsets.
    """

    ranks: int
    local: int
    table_options: Array
    option_units: Array
    unit_kind: Array  # RANK, NODE or ALL
    unit_items: Array
    load: Array  # of each item
    hbm: Array  # shares of a rank's budget
    host: Array  # shares of a node's
    disk: Array
    option_shared: Array  # load on every rank
    option_server: Array  # share of all servers' memory


class State(NamedTuple):
    """Where units are, and what ranks, nodes and servers have. Units on each rank and each node are linked lists."""

    chosen: Array  # the option of each table
    where: Array  # the rank or node of each unit; -1: it is not placed
    load: Array
    hbm: Array
    host: Array
    disk: Array
    server: Array  # [1]
    taken: Array  # [tables, ranks]: whether a unit of the table is on this rank, or node
    table: Array  # of each unit
    placed: Array  # units that are, the first `number[0]`
    at: Array  # where in `placed` a unit is
    number: Array  # [1]


@called
def _cost(value):
    """Of a load or a budget that is used so far: next to nothing until it is full."""
    if value < EMPTY:
        return 0.0
    over, fourth = max(0.0, value - 1.0), (value * value) ** 2
    return over * (1.0 + STEEP * over) + SOFT * (fourth * fourth) ** 2


@called
def _of_rank(s, rank, load, hbm):
    """What a rank costs with this much more."""
    return _cost(s.load[rank] + load) + WEIGHT * _cost(s.hbm[rank] + hbm)


@called
def _of_node(p, s, node, host, disk):
    return WEIGHT * p.local * (_cost(s.host[node] + host) + _cost(s.disk[node] + disk))


@called
def _ranks(p, unit, place):
    """The first rank of a unit on this place, and their number."""
    kind = p.unit_kind[unit]
    if kind == RANK:
        return place, 1
    return (place * p.local, p.local) if kind == NODE else (0, p.ranks)


@called
def _item(p, unit, number):
    first = p.unit_items[unit]
    return first + number if p.unit_items[unit + 1] - first > 1 else first


@called
def _add(p, s, unit, place, sign):
    first, number = _ranks(p, unit, place)
    for each in range(number):
        item, rank = _item(p, unit, each), first + each
        s.load[rank] += sign * p.load[item]
        s.hbm[rank] += sign * p.hbm[item]
        s.host[rank // p.local] += sign * p.host[item]
        s.disk[rank // p.local] += sign * p.disk[item]


@called
def _put(p, s, unit, place):
    """Place a unit that is nowhere."""
    s.where[unit], s.taken[s.table[unit], place] = place, True
    _add(p, s, unit, place, 1.0)
    s.placed[s.number[0]], s.at[unit] = unit, s.number[0]
    s.number[0] += 1


@called
def _take(p, s, unit):
    """Take a unit from its place."""
    place = s.where[unit]
    s.where[unit], s.taken[s.table[unit], place] = -1, False
    _add(p, s, unit, place, -1.0)
    s.number[0] -= 1
    last = s.placed[s.number[0]]
    s.placed[s.at[unit]], s.at[last] = last, s.at[unit]


@called
def _growth(p, s, unit, place):
    """What a unit on a place adds to the potential."""
    first, number = _ranks(p, unit, place)
    added, node, host, disk = 0.0, first // p.local, 0.0, 0.0
    for each in range(number):
        item, rank = _item(p, unit, each), first + each
        added += _of_rank(s, rank, p.load[item], p.hbm[item]) - _of_rank(s, rank, 0.0, 0.0)
        host += p.host[item]
        disk += p.disk[item]
        if each == number - 1 or (rank + 1) // p.local != node:
            added += _of_node(p, s, node, host, disk) - _of_node(p, s, node, 0.0, 0.0)
            node, host, disk = node + 1, 0.0, 0.0
    return added


@called
def _put_greedily(p, s, unit):
    """Place a unit where it adds least to the potential, and none of its table's is."""
    kind = p.unit_kind[unit]
    places = p.ranks if kind == RANK else (p.ranks // p.local if kind == NODE else 1)
    best, least = 0, np.inf
    for place in range(places):
        if not s.taken[s.table[unit], place] and places > 1:
            added = _growth(p, s, unit, place)
            if added < least:
                best, least = place, added
    _put(p, s, unit, best)


@called
def _exceeded(s):
    """By how much budgets are exceeded, as a part of each."""
    over = max(0.0, s.server[0] - 1)
    for each in (s.hbm, s.host, s.disk):
        for value in each:
            over += max(0.0, value - 1)
    return over if over > 1e-9 else 0.0


@called
def _energy(p, s):
    """Loads above 1 in all, and by how much budgets are exceeded, in loads."""
    total = WEIGHT * p.ranks * _cost(s.server[0])
    for rank in range(p.ranks):
        total += _of_rank(s, rank, 0.0, 0.0)
    for node in range(p.ranks // p.local):
        total += _of_node(p, s, node, 0.0, 0.0)
    return total


@called
def _choose(p, s, table, option):
    """Give a table, none of whose units is placed, an option."""
    before = s.chosen[table]
    s.load[:] += p.option_shared[option] - p.option_shared[before]
    s.server[0] += p.option_server[option] - p.option_server[before]
    s.chosen[table] = option


@called
def _start(p, chosen, where):
    """The state of a problem; `chosen` and `where` become its own."""
    nodes, tables, units = p.ranks // p.local, len(chosen), len(where)
    s = State(
        chosen, where.copy(), np.zeros(p.ranks), np.zeros(p.ranks), np.zeros(nodes), np.zeros(nodes), np.zeros(1),
        np.zeros((tables, p.ranks), dtype=np.bool_), np.empty(units, np.int64),
        np.empty(units, np.int64), np.empty(units, np.int64), np.zeros(1, np.int64),
    )  # fmt: skip
    for table in range(tables):
        for option in range(p.table_options[table], p.table_options[table + 1]):
            s.table[p.option_units[option] : p.option_units[option + 1]] = table
        option = chosen[table]
        s.load[:] += p.option_shared[option]
        s.server[0] += p.option_server[option]
        for unit in range(p.option_units[option], p.option_units[option + 1]):
            if where[unit] >= 0:
                _put(p, s, unit, where[unit])
    return s


@compiled
def usage(p, chosen, where):
    """Load and memory of ranks, memory of nodes, that of servers; and by how much budgets are exceeded in all."""
    s = _start(p, chosen, where)
    return s.load, s.hbm, s.host, s.disk, s.server, _exceeded(s)


@compiled
def place_greedily(p, chosen, where):
    """The places of all units of the chosen options, largest first; those that `where` has already stay."""
    s = _start(p, chosen, where)
    units = np.empty(len(where), np.int64)
    sizes, number = np.empty(len(where)), 0
    for option in chosen:
        for unit in range(p.option_units[option], p.option_units[option + 1]):
            if s.where[unit] < 0:
                item = p.unit_items[unit]
                size = max(max(p.load[item], p.hbm[item]), max(p.host[item], p.disk[item]) * p.local)
                units[number], sizes[number] = unit, -size - 1e9 * p.unit_kind[unit]
                number += 1
    for each in np.argsort(sizes[:number], kind="mergesort"):
        _put_greedily(p, s, units[each])
    return s.where


@called
def _accepted(change, temperature):
    return change < -1e-12 or (temperature > 0 and np.random.random() < np.exp(-change / temperature))


@called
def _try_option(p, s, cost, table, temperature, energy):
    """Give a table a random option, rather a cheap one, whose units are placed greedily; the energy then."""
    now, first = s.chosen[table], p.table_options[table]
    count = p.table_options[table + 1] - first
    new = first + np.int64(count * np.random.random() ** 2)
    if new == now:
        return energy
    before, after = p.option_units[now : now + 2], p.option_units[new : new + 2]
    stood = s.where[before[0] : before[1]].copy()
    for unit in range(before[0], before[1]):
        _take(p, s, unit)
    _choose(p, s, table, new)
    for unit in range(after[0], after[1]):
        _put_greedily(p, s, unit)
    found = _energy(p, s)
    if _accepted(found - energy + COST * (cost[new] - cost[now]), temperature):
        return found
    for unit in range(after[0], after[1]):
        _take(p, s, unit)
    _choose(p, s, table, now)
    for number in range(len(stood)):
        _put(p, s, before[0] + number, stood[number])
    return energy


@called
def _try_node(p, s, unit, temperature):
    """Move a unit of a node to another; what it changes."""
    a, b = s.where[unit], np.random.randint(p.ranks // p.local)
    if s.taken[s.table[unit], b]:
        return 0.0
    before = _energy(p, s)
    _take(p, s, unit)
    _put(p, s, unit, b)
    change = _energy(p, s) - before
    if _accepted(change, temperature):
        return change
    _take(p, s, unit)
    _put(p, s, unit, a)
    return 0.0


@called
def _try_move(p, s, unit, temperature):
    """Move a unit of a rank to another, or swap it with one there; what it changes."""
    a, other = s.where[unit], -1
    if np.random.random() < 0.5:
        b = np.random.randint(p.ranks)
    else:
        other = s.placed[np.random.randint(s.number[0])]
        if p.unit_kind[other] != RANK:
            return 0.0
        b = s.where[other]
        if s.taken[s.table[other], a]:
            return 0.0
    if s.taken[s.table[unit], b]:
        return 0.0
    item = p.unit_items[unit]
    load, hbm, host, disk = p.load[item], p.hbm[item], p.host[item], p.disk[item]
    if other >= 0:
        item = p.unit_items[other]
        load, hbm, host, disk = load - p.load[item], hbm - p.hbm[item], host - p.host[item], disk - p.disk[item]
    change = _of_rank(s, a, -load, -hbm) - _of_rank(s, a, 0.0, 0.0)
    change += _of_rank(s, b, load, hbm) - _of_rank(s, b, 0.0, 0.0)
    m, n = a // p.local, b // p.local
    if m != n:
        change += _of_node(p, s, m, -host, -disk) - _of_node(p, s, m, 0.0, 0.0)
        change += _of_node(p, s, n, host, disk) - _of_node(p, s, n, 0.0, 0.0)
    if not _accepted(change, temperature):
        return 0.0
    _take(p, s, unit)
    if other >= 0:
        _take(p, s, other)
        _put(p, s, other, a)
    _put(p, s, unit, b)
    return change


@called
def _pair(p, s, a, b):
    """What two ranks and their nodes cost."""
    m, n = a // p.local, b // p.local
    cost = _of_rank(s, a, 0.0, 0.0) + _of_rank(s, b, 0.0, 0.0) + _of_node(p, s, m, 0.0, 0.0)
    return cost + _of_node(p, s, n, 0.0, 0.0) if m != n else cost


@called
def _repack(p, s, temperature):
    """Place the units of a rank, rather a full one, and another anew, in random order; what it changes."""
    a, b = np.random.randint(p.ranks), np.random.randint(p.ranks)
    for _ in range(TOURNAMENT):
        other = np.random.randint(p.ranks)
        if _of_rank(s, other, 0.0, 0.0) > _of_rank(s, a, 0.0, 0.0):
            a = other
    units, stood, number = np.empty(MOST_REPACKED, np.int64), np.empty(MOST_REPACKED, np.int64), 0
    for each in range(s.number[0]):
        unit = s.placed[each]
        if p.unit_kind[unit] == RANK and (s.where[unit] == a or s.where[unit] == b) and number < MOST_REPACKED:
            units[number], number = unit, number + 1
    if a == b or number == MOST_REPACKED:
        return 0.0
    before = _pair(p, s, a, b)
    for each in range(number):
        other = np.random.randint(each, number)
        units[each], units[other] = units[other], units[each]
        stood[each] = s.where[units[each]]
        _take(p, s, units[each])
    for each in range(number):
        unit = units[each]
        item = p.unit_items[unit]
        mine = max(s.load[a] + p.load[item], s.hbm[a] + p.hbm[item])
        theirs = max(s.load[b] + p.load[item], s.hbm[b] + p.hbm[item])
        taken = s.taken[s.table[unit], b] or (mine < theirs and not s.taken[s.table[unit], a])
        _put(p, s, unit, a if taken else b)
    change = _pair(p, s, a, b) - before
    if _accepted(change, temperature):
        return change
    for each in range(number):
        _take(p, s, units[each])
    for each in range(number):
        _put(p, s, units[each], stood[each])
    return 0.0


@compiled
def anneal(p, cost, chosen, where, tries, hot, cold, seed):
    """Options and places by simulated annealing, until no load is above 1 and no budget is exceeded.

    `cost [O]` is what each option costs by the prices of the relaxation, in loads of one rank. The temperature falls
    from `hot` to `cold`, in loads; at 0 options stay, and only what helps is done.
    """
    np.random.seed(seed)
    s = _start(p, chosen.copy(), where)
    energy, temperature, tried = _energy(p, s), hot, 0
    step = 0
    while tried < tries:
        if step % 1024 == 0:
            energy = _energy(p, s)
            temperature = hot * (cold / hot) ** (tried / tries) if hot > 0 else 0.0
        if step % 64 == 0 and s.load.max() <= 1.0 and _exceeded(s) == 0.0:
            break
        step += 1
        tried += 1
        if hot > 0 and np.random.random() < OFTEN:
            table = np.random.randint(len(s.chosen))
            energy = _try_option(p, s, cost, table, temperature, energy)
            option = s.chosen[table]
            tried += p.ranks // 16 * (1 + p.option_units[option + 1] - p.option_units[option])
        elif s.number[0] > 0:
            if hot > 0 and np.random.random() < OFTEN:
                energy += _repack(p, s, temperature)
                tried += 8 + s.number[0] // 64
            unit = s.placed[np.random.randint(s.number[0])]
            if p.unit_kind[unit] == NODE:
                energy += _try_node(p, s, unit, temperature)
            elif p.unit_kind[unit] == RANK:
                energy += _try_move(p, s, unit, temperature)
    return s.chosen, s.where
