"""The inner loops of the planner's search: units of tables' options are placed on ranks, moved and swapped.

`sharding/planner/search.py` says what a problem is. The potential that is lowered is the sum over ranks of `load^16`,
plus `SOFT` times as much for the use of each budget, plus `PENALTY` for each budget as a whole that is exceeded. One
thread; time is proportional to the moves that are tried.
"""

# ruff: noqa: NPY002  Numba knows this generator only; it is its own, and seeded.

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritonemb.kernels.cpu.jit import called, compiled

Array = NDArray[Any]
RANK, NODE, ALL = range(3)  # where a unit is placed
PENALTY, SOFT = 1e5, 0.1
EMPTY = 0.6  # of a budget: up to here its use does not matter
KICKS = 1000  # in a row that have not helped
OPTIONS_TRIED = 12  # of a table: the cheapest where budgets are kept, else random ones
TABLES_TRIED = 256  # so many tables that are on all ranks are given other options, at most


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
    head: Array  # [ranks + nodes]
    after: Array
    before: Array


@called
def _power(value):
    value *= value
    value *= value
    value *= value
    return value * value


@called
def _over(value):
    """Of a budget that is used so far: little until it is full."""
    if value < EMPTY:
        return 0.0
    return max(0.0, value - 1.0) * PENALTY + SOFT * _power(value)


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
    if p.unit_kind[unit] != ALL:
        at = place if p.unit_kind[unit] == RANK else p.ranks + place
        s.after[unit], s.before[unit] = s.head[at], -1
        if s.head[at] >= 0:
            s.before[s.head[at]] = unit
        s.head[at] = unit


@called
def _take(p, s, unit):
    """Take a unit from its place."""
    place = s.where[unit]
    s.where[unit], s.taken[s.table[unit], place] = -1, False
    _add(p, s, unit, place, -1.0)
    if p.unit_kind[unit] != ALL:
        if s.before[unit] >= 0:
            s.after[s.before[unit]] = s.after[unit]
        else:
            s.head[place if p.unit_kind[unit] == RANK else p.ranks + place] = s.after[unit]
        if s.after[unit] >= 0:
            s.before[s.after[unit]] = s.before[unit]


@called
def _growth(p, s, unit, place):
    """What a unit on a place adds to the potential."""
    first, number = _ranks(p, unit, place)
    added, node, host, disk = 0.0, first // p.local, 0.0, 0.0
    for each in range(number):
        item, rank = _item(p, unit, each), first + each
        added += _power(s.load[rank] + p.load[item]) - _power(s.load[rank])
        added += _over(s.hbm[rank] + p.hbm[item]) - _over(s.hbm[rank])
        host += p.host[item]
        disk += p.disk[item]
        if each == number - 1 or (rank + 1) // p.local != node:
            added += _over(s.host[node] + host) - _over(s.host[node])
            added += _over(s.disk[node] + disk) - _over(s.disk[node])
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
def _potential(s):
    total = _over(s.server[0])
    for value in s.load:
        total += _power(value)
    for each in (s.hbm, s.host, s.disk):
        for value in each:
            total += _over(value)
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
        np.zeros((tables, p.ranks), dtype=np.bool_), np.empty(units, np.int64), np.full(p.ranks + nodes, -1),
        np.full(units, -1), np.full(units, -1),
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
def _best_move(p, s, a, gain):
    """A unit of rank `a`, another rank, and the unit to swap with or -1: what lowers the potential most."""
    unit, place, partner, tried, from_node = -1, -1, -1, 0, a // p.local
    for swaps in range(2):
        for b in range(p.ranks if unit < 0 else 0):
            if b == a:
                continue
            node = b // p.local
            before = _power(s.load[a]) + _over(s.hbm[a]) + _power(s.load[b]) + _over(s.hbm[b])
            mine = s.head[a]
            while mine >= 0:
                item = p.unit_items[mine]
                other = s.head[b] if swaps else -2
                if s.taken[s.table[mine], b]:
                    other = -1
                while other != -1:
                    tried += 1
                    load, hbm, host, disk = p.load[item], p.hbm[item], p.host[item], p.disk[item]
                    allowed = True
                    if swaps:
                        theirs = p.unit_items[other]
                        load, hbm = load - p.load[theirs], hbm - p.hbm[theirs]
                        host, disk = host - p.host[theirs], disk - p.disk[theirs]
                        allowed = not s.taken[s.table[other], a]
                    if allowed:
                        change = _power(s.load[a] - load) + _over(s.hbm[a] - hbm) - before
                        change += _power(s.load[b] + load) + _over(s.hbm[b] + hbm)
                        if node != from_node:
                            change += _over(s.host[from_node] - host) - _over(s.host[from_node])
                            change += _over(s.host[node] + host) - _over(s.host[node])
                            change += _over(s.disk[from_node] - disk) - _over(s.disk[from_node])
                            change += _over(s.disk[node] + disk) - _over(s.disk[node])
                        if change < gain:
                            gain, unit, place, partner = change, mine, b, other if swaps else -1
                    other = s.after[other] if swaps else -1
                mine = s.after[mine]
    return unit, place, partner, tried


@called
def _best_node(p, s, node, gain):
    """A unit of all ranks of a node, and the node where it adds less."""
    best, place, unit = -1, -1, s.head[p.ranks + node]
    while unit >= 0:
        _add(p, s, unit, node, -1.0)
        stays = _growth(p, s, unit, node)
        for other in range(p.ranks // p.local):
            if not s.taken[s.table[unit], other]:
                change = _growth(p, s, unit, other) - stays
                if change < gain:
                    gain, best, place = change, unit, other
        _add(p, s, unit, node, 1.0)
        unit = s.after[unit]
    return best, place


@called
def _change_option(p, s, a, tables_on_all):
    """Give a table with a unit on rank `a` the option that lowers the potential most; how much was tried, or -1."""
    before, within = _potential(s), _exceeded(s) == 0.0
    least, found, new, tried, places = before - 1e-7, -1, -1, 1, np.empty(0, np.int64)
    for table in range(len(s.chosen)):
        now = s.chosen[table]
        first, last = p.option_units[now], p.option_units[now + 1]
        kind = p.unit_kind[first]
        here = tables_on_all if kind == ALL else s.taken[table, a if kind == RANK else a // p.local]
        if not here or p.table_options[table + 1] - p.table_options[table] == 1:
            continue
        stood = s.where[first:last].copy()
        for unit in range(first, last):
            _take(p, s, unit)
        count = p.table_options[table + 1] - p.table_options[table]
        for number in range(min(count, OPTIONS_TRIED)):
            option = p.table_options[table] + number
            if count > OPTIONS_TRIED and not within:
                option = p.table_options[table] + np.random.randint(count)
            if option == now:
                continue
            _choose(p, s, table, option)
            units = range(p.option_units[option], p.option_units[option + 1])
            for unit in units:
                _put_greedily(p, s, unit)
            tried += len(units) * p.ranks + p.ranks
            value = _potential(s)
            if value < least:
                least, found, new = value, table, option
                places = s.where[p.option_units[option] : p.option_units[option + 1]].copy()
            for unit in units:
                _take(p, s, unit)
        _choose(p, s, table, now)
        for number in range(last - first):
            _put(p, s, first + number, stood[number])
    if found < 0:
        return -tried
    for unit in range(p.option_units[s.chosen[found]], p.option_units[s.chosen[found] + 1]):
        _take(p, s, unit)
    _choose(p, s, found, new)
    for number in range(len(places)):
        _put(p, s, p.option_units[new] + number, places[number])
    return tried


@called
def _kick(p, s, number, worst):
    """Move units of the worst rank and of random ones to random ranks."""
    for each in range(number):
        source = worst if each == 0 else np.random.randint(p.ranks)
        count, unit = 0, s.head[source]
        while unit >= 0:
            count, unit = count + 1, s.after[unit]
        if count:
            unit = s.head[source]
            for _ in range(np.random.randint(count)):
                unit = s.after[unit]
            place = np.random.randint(p.ranks)
            if not s.taken[s.table[unit], place]:
                _take(p, s, unit)
                _put(p, s, unit, place)


@called
def _kick_option(p, s, worst):
    """Give a random table, often one of the worst rank, another option, rather a cheap one."""
    table = np.random.randint(len(s.chosen))
    for _ in range(4):
        if not s.taken[table, worst]:
            table = np.random.randint(len(s.chosen))
    now, first = s.chosen[table], p.table_options[table]
    count = p.table_options[table + 1] - first
    for unit in range(p.option_units[now], p.option_units[now + 1]):
        _take(p, s, unit)
    option = first + np.int64(count * np.random.random() ** 2)
    _choose(p, s, table, option)
    for unit in range(p.option_units[option], p.option_units[option + 1]):
        _put_greedily(p, s, unit)


@compiled
def improve(p, chosen, where, evaluations, good_enough, keep_options, seed):
    """Better options and places; ends when nothing helps, `evaluations` moves were tried, or it is good enough.

    `keep_options`: change no table's, and give no kicks.
    """
    np.random.seed(seed)
    s = _start(p, chosen.copy(), where)
    best_chosen, best_where, best, since, used = chosen.copy(), s.where.copy(), np.inf, 0, 0
    stuck = np.zeros(p.ranks, dtype=np.bool_)
    while True:
        over, top = _exceeded(s), s.load.max()
        done = (over == 0.0 and top <= good_enough) or used >= evaluations
        a, highest, worst_rank, worst = (
            -1,
            0.0,
            0,
            0.0,
        )  # the rank that costs most, of those that are not stuck, and of all
        for rank in range(p.ranks):
            node = rank // p.local
            cost = _power(s.load[rank]) + _over(s.hbm[rank]) + (_over(s.host[node]) + _over(s.disk[node])) / p.local
            if cost > worst:
                worst_rank, worst = rank, cost
            if not stuck[rank] and cost > highest:
                a, highest = rank, cost
        if done or a < 0 or (over == 0.0 and highest < 0.8 * worst):
            value = PENALTY * over + top
            since += 1
            if value < best - 1e-9:
                best, since = value, 0
                best_chosen, best_where = s.chosen.copy(), s.where.copy()
            if done or keep_options or since > KICKS:
                break
            if value > best + 1e-9:
                s = _start(p, best_chosen.copy(), best_where)
            if since % 3 == 2:
                _kick_option(p, s, worst_rank)
            else:
                _kick(p, s, 2 + since % 5, worst_rank)
            used += 20 * p.ranks + len(chosen)
            stuck[:] = False
            continue
        unit, place, partner, tried = _best_move(p, s, a, -1e-9)
        used += tried
        if unit < 0:
            unit, place = _best_node(p, s, a // p.local, -1e-9)
        if unit >= 0:
            _take(p, s, unit)
            if partner >= 0:
                _take(p, s, partner)
                _put(p, s, partner, a)
            _put(p, s, unit, place)
            stuck[:] = False
            continue
        tried = -1
        if not keep_options:
            tried = _change_option(p, s, a, over > 0.0 or len(chosen) <= TABLES_TRIED)
        used += abs(tried)
        if tried < 0:
            stuck[a] = True
        else:
            stuck[:] = False
    return best_chosen, best_where
