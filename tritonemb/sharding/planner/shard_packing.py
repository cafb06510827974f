"""Shards of tables on ranks and nodes: what they cost there, and where there is room for more.

The excess is what loads have above 1, and budgets. One thread.
"""

# ruff: noqa: NPY002  Numba knows this generator only; it is its own, and seeded.

from typing import NamedTuple

import numpy as np

from tritonemb.kernels.cpu.jit import called, compiled, inlined, uncounted
from tritonemb.sharding.table_stats import Array

LOAD, HBM, HOST, DISK, SERVER = range(5)
WEIGHT, STEEP = 2.0, 4.0  # of a budget that is exceeded, in loads; how much more an excess counts, the larger it is
NOISE = 1024  # numbers
PIECES = 4  # of what fits nowhere
OVERHEAD, PLACED = 32, 32  # of a unit whose places are looked at, and of each shard, in places
FINE = 100_000  # steps: a unit of more is not cut at whole ones here
NOWHERE = 1e30
UNIT, PLACE, NEXT, LAST, OTHER, EARLIER = range(6)  # of a shard: neighbours on its rank or node, and of its unit


class Problem(NamedTuple):
    """Tables, their options, and the options' units, each of which is cut into shards of any size.

    A shard with a share of its unit costs `fixed + share * slope` on its rank; or on every rank of its node, and of
    host memory and disk once. `table_options [T + 1]` and `option_units [O + 1]` are offsets.
    """

    ranks: int
    local: int
    table_options: Array
    option_units: Array
    option_all: Array  # [O, 5]: load and device memory on every rank, host memory and disk on every node, of servers
    option_common: Array  # load on every rank, whatever the shards
    unit_common: Array  # likewise, of each shard
    unit_node: Array  # bool: its shards are on nodes
    unit_steps: Array  # shares are multiples of 1 / this
    unit_most: Array  # shards
    fixed: Array  # [U, 4]: load, shares of the budgets of device and host memory and disk
    slope: Array  # [U, 4]
    mutual: Array  # [U]: load of a shard for each other one of its unit


class State(NamedTuple):
    """Where shards are, and what ranks, nodes and servers have. Shards of a place and of a unit are linked lists."""

    chosen: Array  # the option of each table
    table: Array  # of each unit
    rank: Array  # [3, ranks]: load, device memory, excess
    node: Array  # [3, nodes]: host memory, disk, excess
    server: Array  # [1]
    shard: Array  # [shards, 6]
    share: Array  # [shards]
    head: Array  # [ranks + nodes]: the first shard there
    first: Array  # [U]: the first shard of a unit
    shards_of: Array  # [U]: how many it has
    free: Array  # numbers of shards that there are not; how many, last
    noise: Array  # what the room that is left counts is multiplied by
    room: Array  # [ranks]: the share of a unit that fits
    value: Array  # [ranks]: of a place for a shard, the smaller the better
    fit: float  # of the room that a place has left: what it counts where a shard is placed


@inlined
def _over(value):
    over = max(value - 1.0, 0.0)
    return over * (1.0 + STEEP * over)


@inlined
def _add_to_node(p, s, node, host, disk):
    s.node[0, node] += host
    s.node[1, node] += disk
    now = WEIGHT * p.local * (_over(s.node[0, node]) + _over(s.node[1, node]))
    change = now - s.node[2, node]
    s.node[2, node] = now
    return change


@inlined
def _add_to_rank(s, rank, load, hbm):
    s.rank[0, rank] += load
    s.rank[1, rank] += hbm
    now = _over(s.rank[0, rank]) + WEIGHT * _over(s.rank[1, rank])
    change = now - s.rank[2, rank]
    s.rank[2, rank] = now
    return change


@inlined
def _add(p, s, unit, place, fixed, share):
    """Add `fixed` times the fixed part of a shard, and a share, to its place; what that changes of the excess."""
    change, width = 0.0, p.local if p.unit_node[unit] else 1
    node = place if p.unit_node[unit] else place // p.local
    load = fixed * p.fixed[unit, LOAD] + share * p.slope[unit, LOAD]
    hbm = fixed * p.fixed[unit, HBM] + share * p.slope[unit, HBM]
    for rank in range(place * width, (place + 1) * width):
        change += _add_to_rank(s, rank, load, hbm)
    host = fixed * p.fixed[unit, HOST] + share * p.slope[unit, HOST]
    disk = fixed * p.fixed[unit, DISK] + share * p.slope[unit, DISK]
    if host != 0.0 or disk != 0.0:
        change += _add_to_node(p, s, node, host, disk)
    return change


@uncounted
def add_to_all(p, s, option, sign):
    """Add what an option costs everywhere; what that changes of the excess."""
    change, costs = 0.0, p.option_all[option]
    if costs[LOAD] != 0.0 or costs[HBM] != 0.0:
        for rank in range(p.ranks):
            change += _add_to_rank(s, rank, sign * costs[LOAD], sign * costs[HBM])
    if costs[HOST] != 0.0 or costs[DISK] != 0.0:
        for node in range(p.ranks // p.local):
            change += _add_to_node(p, s, node, sign * costs[HOST], sign * costs[DISK])
    if costs[SERVER] != 0.0:
        change -= WEIGHT * p.ranks * _over(s.server[0])
        s.server[0] += sign * costs[SERVER]
        change += WEIGHT * p.ranks * _over(s.server[0])
    return change


@uncounted
def excess_of_all(p, s):
    return s.rank[2].sum() + s.node[2].sum() + WEIGHT * p.ranks * _over(s.server[0])


@inlined
def _list(p, unit, place):
    return p.ranks + place if p.unit_node[unit] else place


@inlined
def _shard_at(p, s, unit, place):
    """The unit's shard on a place; -1 if there is none."""
    shard = s.head[_list(p, unit, place)]
    while shard >= 0 and s.shard[shard, UNIT] != unit:
        shard = s.shard[shard, NEXT]
    return shard


@uncounted
def _add_mutual(p, s, shard, sign):
    """Add what a shard and the others of its unit cost because there are others; what that changes of the excess."""
    unit, change, others = s.shard[shard, UNIT], 0.0, 0.0
    width = p.local if p.unit_node[unit] else 1
    other = s.first[unit] if p.mutual[unit] > 0.0 else -1
    while other >= 0:
        if other != shard:
            others += 1.0
            for rank in range(s.shard[other, PLACE] * width, (s.shard[other, PLACE] + 1) * width):
                change += _add_to_rank(s, rank, sign * p.mutual[unit], 0.0)
        other = s.shard[other, OTHER]
    if others > 0.0:
        for rank in range(s.shard[shard, PLACE] * width, (s.shard[shard, PLACE] + 1) * width):
            change += _add_to_rank(s, rank, sign * others * p.mutual[unit], 0.0)
    return change


@uncounted
def put(p, s, unit, place, share):
    """Place a share of a unit, as a shard or with that which is there; what that changes of the excess."""
    shard = _shard_at(p, s, unit, place)
    if shard >= 0:
        s.share[shard] += share
        return _add(p, s, unit, place, 0.0, share)
    s.free[-1] -= 1
    shard, at = s.free[s.free[-1]], _list(p, unit, place)
    s.share[shard] = share
    s.shard[shard, UNIT], s.shard[shard, PLACE] = unit, place
    s.shard[shard, NEXT], s.shard[shard, LAST] = s.head[at], -1
    s.shard[shard, OTHER], s.shard[shard, EARLIER] = s.first[unit], -1
    if s.head[at] >= 0:
        s.shard[s.head[at], LAST] = shard
    if s.first[unit] >= 0:
        s.shard[s.first[unit], EARLIER] = shard
    s.head[at] = s.first[unit] = shard
    s.shards_of[unit] += 1
    return _add_mutual(p, s, shard, 1.0) + _add(p, s, unit, place, 1.0, share)


@uncounted
def take(p, s, shard):
    """Take a shard away; what that changes of the excess."""
    unit, place = s.shard[shard, UNIT], s.shard[shard, PLACE]
    change = _add_mutual(p, s, shard, -1.0)
    before, after = s.shard[shard, LAST], s.shard[shard, NEXT]
    if before >= 0:
        s.shard[before, NEXT] = after
    else:
        s.head[_list(p, unit, place)] = after
    if after >= 0:
        s.shard[after, LAST] = before
    before, after = s.shard[shard, EARLIER], s.shard[shard, OTHER]
    if before >= 0:
        s.shard[before, OTHER] = after
    else:
        s.first[unit] = after
    if after >= 0:
        s.shard[after, EARLIER] = before
    s.shards_of[unit] -= 1
    s.free[s.free[-1]] = shard
    s.free[-1] += 1
    return change + _add(p, s, unit, place, -1.0, -s.share[shard])


@uncounted
def remove(p, s, table):
    """Take all of a table away; what that changes of the excess."""
    option = s.chosen[table]
    change = add_to_all(p, s, option, -1.0)
    for unit in range(p.option_units[option], p.option_units[option + 1]):
        while s.first[unit] >= 0:
            change += take(p, s, s.first[unit])
    return change


@called
def start(p, chosen, units, places, shares, fit):
    """The state of a problem; `chosen` becomes its own. Tables have options, and may lack shards."""
    nodes, number = p.ranks // p.local, len(p.unit_node)
    table, count = np.empty(number, np.int64), 0
    for each in range(len(chosen)):
        most = 0
        for option in range(p.table_options[each], p.table_options[each + 1]):
            first, last = p.option_units[option], p.option_units[option + 1]
            table[first:last] = each
            most = max(most, p.unit_most[first:last].sum())
        count += most
    s = State(
        chosen, table, np.zeros((3, p.ranks)), np.zeros((3, nodes)), np.zeros(1), np.empty((count, 6), np.int64),
        np.empty(count), np.full(p.ranks + nodes, -1), np.full(number, -1), np.zeros(number, np.int64),
        np.arange(count + 1), 1.0 + np.random.random(NOISE + p.ranks), np.empty(p.ranks), np.empty(p.ranks), fit,
    )  # fmt: skip
    for option in chosen:
        add_to_all(p, s, option, 1.0)
    for each in range(len(units)):
        put(p, s, units[each], places[each], shares[each])
    return s


@compiled
def usage(p, chosen, units, places, shares):
    """Load and memory of ranks, memory and disk of nodes, that of servers."""
    s = start(p, chosen, units, places, shares, 0.0)
    return s.rank[0], s.rank[1], s.node[0], s.node[1], s.server


@inlined
def _whole_steps(p, unit, share):
    steps = p.unit_steps[unit]
    return share if steps > FINE else np.floor(share * steps + 1e-6) / steps


@inlined
def _room_on_node(p, s, unit, node, fixed, room):
    """The share, up to `room`, that host memory and disk of a node have room for."""
    for tier in range(2):
        slope = p.slope[unit, HOST + tier]
        if slope > 0.0:
            room = min(room, (1.0 - s.node[tier, node] - fixed * p.fixed[unit, HOST + tier]) / slope)
    return room


@uncounted
def _look(p, s, unit, share, per_shard, offset):
    """Set the `room` of all places for a unit, and the `value`, by share: of the shard, and of what is left empty."""
    nodes, node_unit = p.ranks // p.local, p.unit_node[unit]
    load, hbm, slope_load, slope_hbm = p.fixed[unit, LOAD], p.fixed[unit, HBM], p.slope[unit, LOAD], p.slope[unit, HBM]
    load += p.mutual[unit] * s.shards_of[unit]
    of_load, of_hbm = 1.0 / max(slope_load, 1e-12), 1.0 / max(slope_hbm, 1e-12)
    room, value, has, noise = s.room, s.value, s.rank, s.noise[offset : offset + p.ranks]
    for rank in range(p.ranks):  # vectorized
        room[rank] = min(min((1.0 - load - has[0, rank]) * of_load, (1.0 - hbm - has[1, rank]) * of_hbm), share)
    if node_unit:
        for node in range(nodes):
            least = share
            for rank in range(node * p.local, (node + 1) * p.local):
                least = min(least, room[rank])
            room[node] = _room_on_node(p, s, unit, node, 1.0, least)
    elif p.slope[unit, HOST] > 0.0 or p.slope[unit, DISK] > 0.0:
        for node in range(nodes):
            most = _room_on_node(p, s, unit, node, 1.0, share)
            for rank in range(node * p.local, (node + 1) * p.local):
                room[rank] = min(room[rank], most)
    shard = s.first[unit]
    while shard >= 0:  # there the shard grows
        place = s.shard[shard, PLACE]
        if not node_unit:
            grown = min(min((1.0 - has[0, place]) * of_load, (1.0 - has[1, place]) * of_hbm), share)
            room[place] = _room_on_node(p, s, unit, place // p.local, 0.0, grown)
        shard = s.shard[shard, OTHER]
    places, width = (nodes, p.local) if node_unit else (p.ranks, 1)
    steps, least = p.unit_steps[unit], share - 1e-9 if p.unit_most[unit] == 1 else 1e-9
    if steps <= FINE:
        for place in range(places):
            room[place] = np.floor(room[place] * steps + 1e-6) / steps
    empty, both = 2.0 - load - hbm, slope_load + slope_hbm
    if node_unit:
        for node in range(nodes):
            left = 0.0
            for rank in range(node * width, (node + 1) * width):
                left += empty - has[0, rank] - has[1, rank]
            left = max(left - width * room[node] * both, 0.0)
            value[node] = (per_shard + s.fit * left * noise[node]) / max(room[node], 1e-9)
            value[node] += 0.0 if room[node] >= least else NOWHERE
    else:
        for rank in range(p.ranks):  # vectorized
            left = max(empty - has[0, rank] - has[1, rank] - room[rank] * both, 0.0)
            value[rank] = (per_shard + s.fit * left * noise[rank]) / max(room[rank], 1e-9)
            value[rank] += 0.0 if room[rank] >= least else NOWHERE
    shard = s.first[unit]
    while shard >= 0:
        place = s.shard[shard, PLACE]
        if value[place] < NOWHERE:
            value[place] = max(value[place] - per_shard / room[place], 0.0)
        shard = s.shard[shard, OTHER]
    return places


@uncounted
def _look_over(p, s, unit, share, places, noise):
    """Set the `value` of places: the excess that a share adds there."""
    width = p.local if p.unit_node[unit] else 1
    load = p.fixed[unit, LOAD] + share * p.slope[unit, LOAD] + p.mutual[unit] * s.shards_of[unit]
    hbm = p.fixed[unit, HBM] + share * p.slope[unit, HBM]
    host = p.fixed[unit, HOST] + share * p.slope[unit, HOST]
    disk = p.fixed[unit, DISK] + share * p.slope[unit, DISK]
    for rank in range(places * width):
        added = _over(s.rank[0, rank] + load) + WEIGHT * _over(s.rank[1, rank] + hbm) - s.rank[2, rank]
        if rank % width == 0:
            s.value[rank // width] = added
        else:
            s.value[rank // width] += added
    if host > 0.0 or disk > 0.0:
        for place in range(places):
            node = place if width > 1 or p.local == 1 else place // p.local
            added = WEIGHT * p.local * (_over(s.node[0, node] + host) + _over(s.node[1, node] + disk))
            s.value[place] += added - s.node[2, node]
    for place in range(places):
        s.value[place] *= noise[place]


@uncounted
def _not_with_others(p, s, unit):
    """A rank has one shard of a table: places with those of the option's other units are out."""
    option = s.chosen[s.table[unit]]
    for other in range(p.option_units[option], p.option_units[option + 1]):
        shard = s.first[other] if other != unit else -1
        while shard >= 0:
            s.value[s.shard[shard, PLACE]] = NOWHERE
            shard = s.shard[shard, OTHER]


@inlined
def _best_place(s, places):
    best, least = 0, s.value[0]
    for place in range(1, places):
        if s.value[place] < least:
            best, least = place, s.value[place]
    return best


@uncounted
def fill(p, s, unit, share, per_shard):
    """Place a share of a unit where it fits, in few shards; what fits nowhere where it adds least to the excess.

    What that changes of the excess, and how many places were looked at.
    """
    offset, change, tried = np.random.randint(NOISE), 0.0, OVERHEAD + p.ranks
    places = _look(p, s, unit, share, per_shard, offset)
    _not_with_others(p, s, unit)
    while share > 1e-9:
        place = _best_place(s, places)
        tried += places // 4 + PLACED
        if s.value[place] >= NOWHERE:
            break
        there, node = _shard_at(p, s, unit, place) >= 0, place if p.unit_node[unit] else place // p.local
        s.value[place] = NOWHERE
        if not there and s.shards_of[unit] >= p.unit_most[unit]:
            continue
        fits = _whole_steps(p, unit, _room_on_node(p, s, unit, node, 0.0 if there else 1.0, min(s.room[place], share)))
        if fits < (share - 1e-9 if p.unit_most[unit] == 1 else 1e-9):
            continue
        fits = share if share - fits < 1e-9 else fits
        change += put(p, s, unit, place, fits)
        share -= fits
    pieces = PIECES
    while share > 1e-9:
        full = s.shards_of[unit] >= p.unit_most[unit]
        piece = share if full or pieces <= 1 else share / pieces
        if p.unit_steps[unit] <= FINE:
            piece = min(np.ceil(piece * p.unit_steps[unit] - 1e-6) / p.unit_steps[unit], share)
        piece = share if share - piece < 1e-9 else piece
        _look_over(p, s, unit, piece, places, s.noise[offset:])
        tried += 2 * p.ranks
        _not_with_others(p, s, unit)
        place = _best_place(s, places)
        if full:
            shard = s.first[unit]
            place = s.shard[shard, PLACE]
            while shard >= 0:
                if s.value[s.shard[shard, PLACE]] < s.value[place]:
                    place = s.shard[shard, PLACE]
                shard = s.shard[shard, OTHER]
        change += put(p, s, unit, place, piece)
        share, pieces = share - piece, pieces - 1
    return change, tried


@uncounted
def copy(p, s, table, to, number):
    """Write a table's shards, their units, places and shares, behind the first `number`; how many there are then."""
    option = s.chosen[table]
    for unit in range(p.option_units[option], p.option_units[option + 1]):
        shard = s.first[unit]
        while shard >= 0:
            to[0][number], to[1][number], to[2][number] = unit, s.shard[shard, PLACE], s.share[shard]
            number, shard = number + 1, s.shard[shard, OTHER]
    return number


@uncounted
def copy_all(p, s, to):
    """Write all shards, table by table; how many."""
    number = 0
    for table in range(len(s.chosen)):
        number = copy(p, s, table, to, number)
    return number


@called
def room_for(s):
    """Units, places and shares of as many shards as there may be."""
    return np.empty(len(s.free), np.int64), np.empty(len(s.free), np.int64), np.empty(len(s.free))


@compiled
def place_greedily(p, chosen, units, places, shares, per_shard, size, fit):
    """Shards of the chosen options, the largest by `size [T]` first; tables that have shards already keep them.

    Returns: units, places and shares.
    """
    np.random.seed(0)
    s = start(p, chosen.copy(), units, places, shares, fit)
    for table in np.argsort(-size, kind="mergesort"):
        first, last = p.option_units[chosen[table]], p.option_units[chosen[table] + 1]
        if s.shards_of[first:last].sum() == 0:
            for unit in range(first, last):
                fill(p, s, unit, 1.0, per_shard[unit])
    to = room_for(s)
    number = copy_all(p, s, to)
    return to[0][:number], to[1][:number], to[2][:number]
