"""Shards of tables in bins (ranks or nodes): what a shard adds to a bin, and the bins with capacity for more.

The excess is the sum of what loads and budgets exceed 1 by. One thread.
"""

# ruff: noqa: NPY002  Numba knows this generator only; each kernel seeds it.

from typing import NamedTuple

import numpy as np

from tritonemb.kernels.cpu.jit import called, compiled, inlined, uncounted
from tritonemb.sharding.planner.settings import SETTINGS
from tritonemb.sharding.table_stats import Array

LOAD, HBM, HOST, DISK, SERVER = range(5)
INFEASIBLE_SCORE = 1e30
UNIT, BIN, NEXT_IN_BIN, PREV_IN_BIN, NEXT_IN_UNIT, PREV_IN_UNIT = range(6)  # columns of `State.shard`


class Problem(NamedTuple):
    """Tables, their options, and the options' units. A unit is split into shards of any size.

    A shard with a share of its unit costs `fixed + share * slope` on its bin: on its rank, or on every rank of its node
    for load and device memory, and once per node for host memory and disk. `table_options [T + 1]` and
    `option_units [O + 1]` are offsets. `local` is the number of ranks per node.
    """

    ranks: int
    local: int
    table_options: Array
    option_units: Array
    option_replicated: (
        Array  # [O, 5]: load and device memory of every rank, host memory and disk of every node, servers
    )
    option_common: Array  # [O]: load on every rank, independent of the shards
    unit_common: Array  # [U]: load on every rank, per shard
    unit_on_node: Array  # [U], bool: the bins of its shards are nodes
    unit_steps: Array  # [U]: shares are multiples of 1 / this
    unit_max_shards: Array  # [U]
    fixed: Array  # [U, 4]: load, shares of the budgets of device memory, host memory and disk
    slope: Array  # [U, 4]
    pairwise_load: Array  # [U]: load of a shard per other shard of its unit


class State(NamedTuple):
    """A packing: options, shards, and usage of ranks, nodes and servers. Lists of shards are doubly linked."""

    option: Array  # [T]: option of each table
    table_of_unit: Array  # [U]
    rank: Array  # [3, ranks]: load, device memory, excess
    node: Array  # [3, nodes]: host memory, disk, excess
    server: Array  # [1]
    shard: Array  # [shards, 6]: unit, bin, and links
    share: Array  # [shards]
    first_in_bin: Array  # [ranks + nodes]: head of the list of shards
    first_in_unit: Array  # [U]: head of the list of shards
    num_shards: Array  # [U]
    free_list: Array  # unused shard slots; the last element is their number
    noise: Array  # factors of the slack
    capacity: Array  # [ranks]: the share of a unit that fits into a bin
    score: Array  # [ranks]: of a bin for a shard, lower is better
    slack_weight: float  # of the slack that a placement leaves in its bin, in its score


@inlined
def _over(value):
    over = max(value - 1.0, 0.0)
    return over * (1.0 + SETTINGS.excess_curvature * over)


@inlined
def _add_to_node(p, s, node, host, disk):
    s.node[0, node] += host
    s.node[1, node] += disk
    excess = SETTINGS.budget_weight * p.local * (_over(s.node[0, node]) + _over(s.node[1, node]))
    change = excess - s.node[2, node]
    s.node[2, node] = excess
    return change


@inlined
def _add_to_rank(s, rank, load, hbm):
    s.rank[0, rank] += load
    s.rank[1, rank] += hbm
    excess = _over(s.rank[0, rank]) + SETTINGS.budget_weight * _over(s.rank[1, rank])
    change = excess - s.rank[2, rank]
    s.rank[2, rank] = excess
    return change


@inlined
def _add_to_bin(p, s, unit, bin_index, fixed, share):
    """Add `fixed` times the fixed cost of a shard, and a share of its unit. Return the change of the excess."""
    change, width = 0.0, p.local if p.unit_on_node[unit] else 1
    node = bin_index if p.unit_on_node[unit] else bin_index // p.local
    load = fixed * p.fixed[unit, LOAD] + share * p.slope[unit, LOAD]
    hbm = fixed * p.fixed[unit, HBM] + share * p.slope[unit, HBM]
    for rank in range(bin_index * width, (bin_index + 1) * width):
        change += _add_to_rank(s, rank, load, hbm)
    host = fixed * p.fixed[unit, HOST] + share * p.slope[unit, HOST]
    disk = fixed * p.fixed[unit, DISK] + share * p.slope[unit, DISK]
    if host != 0.0 or disk != 0.0:
        change += _add_to_node(p, s, node, host, disk)
    return change


@uncounted
def add_replicated(p, s, option, sign):
    """Add the replicated cost of an option to all ranks, nodes and servers. Return the change of the excess."""
    change, costs = 0.0, p.option_replicated[option]
    if costs[LOAD] != 0.0 or costs[HBM] != 0.0:
        for rank in range(p.ranks):
            change += _add_to_rank(s, rank, sign * costs[LOAD], sign * costs[HBM])
    if costs[HOST] != 0.0 or costs[DISK] != 0.0:
        for node in range(p.ranks // p.local):
            change += _add_to_node(p, s, node, sign * costs[HOST], sign * costs[DISK])
    if costs[SERVER] != 0.0:
        change -= SETTINGS.budget_weight * p.ranks * _over(s.server[0])
        s.server[0] += sign * costs[SERVER]
        change += SETTINGS.budget_weight * p.ranks * _over(s.server[0])
    return change


@uncounted
def total_excess(p, s):
    return s.rank[2].sum() + s.node[2].sum() + SETTINGS.budget_weight * p.ranks * _over(s.server[0])


@inlined
def _list_of_bin(p, unit, bin_index):
    return p.ranks + bin_index if p.unit_on_node[unit] else bin_index


@inlined
def _shard_in_bin(p, s, unit, bin_index):
    """Return the unit's shard in a bin, -1 for none."""
    shard = s.first_in_bin[_list_of_bin(p, unit, bin_index)]
    while shard >= 0 and s.shard[shard, UNIT] != unit:
        shard = s.shard[shard, NEXT_IN_BIN]
    return shard


@uncounted
def _add_pairwise_load(p, s, shard, sign):
    """Add the pairwise load of a shard and the other shards of its unit. Return the change of the excess."""
    unit, change, num_siblings = s.shard[shard, UNIT], 0.0, 0.0
    width = p.local if p.unit_on_node[unit] else 1
    sibling = s.first_in_unit[unit] if p.pairwise_load[unit] > 0.0 else -1
    while sibling >= 0:
        if sibling != shard:
            num_siblings += 1.0
            for rank in range(s.shard[sibling, BIN] * width, (s.shard[sibling, BIN] + 1) * width):
                change += _add_to_rank(s, rank, sign * p.pairwise_load[unit], 0.0)
        sibling = s.shard[sibling, NEXT_IN_UNIT]
    if num_siblings > 0.0:
        for rank in range(s.shard[shard, BIN] * width, (s.shard[shard, BIN] + 1) * width):
            change += _add_to_rank(s, rank, sign * num_siblings * p.pairwise_load[unit], 0.0)
    return change


@uncounted
def add_shard(p, s, unit, bin_index, share):
    """Add a share of a unit to a bin: to the unit's shard there, or as a new shard. Return the change of the excess."""
    shard = _shard_in_bin(p, s, unit, bin_index)
    if shard >= 0:
        s.share[shard] += share
        return _add_to_bin(p, s, unit, bin_index, 0.0, share)
    # Allocate a slot, and link it in front of both lists.
    s.free_list[-1] -= 1
    shard, head = s.free_list[s.free_list[-1]], _list_of_bin(p, unit, bin_index)
    s.share[shard] = share
    s.shard[shard, UNIT], s.shard[shard, BIN] = unit, bin_index
    s.shard[shard, NEXT_IN_BIN], s.shard[shard, PREV_IN_BIN] = s.first_in_bin[head], -1
    s.shard[shard, NEXT_IN_UNIT], s.shard[shard, PREV_IN_UNIT] = s.first_in_unit[unit], -1
    if s.first_in_bin[head] >= 0:
        s.shard[s.first_in_bin[head], PREV_IN_BIN] = shard
    if s.first_in_unit[unit] >= 0:
        s.shard[s.first_in_unit[unit], PREV_IN_UNIT] = shard
    s.first_in_bin[head] = s.first_in_unit[unit] = shard
    s.num_shards[unit] += 1
    return _add_pairwise_load(p, s, shard, 1.0) + _add_to_bin(p, s, unit, bin_index, 1.0, share)


@uncounted
def remove_shard(p, s, shard):
    """Remove a shard. Return the change of the excess."""
    unit, bin_index = s.shard[shard, UNIT], s.shard[shard, BIN]
    change = _add_pairwise_load(p, s, shard, -1.0)
    # Unlink it from the lists of its bin and of its unit, and free its slot.
    previous, successor = s.shard[shard, PREV_IN_BIN], s.shard[shard, NEXT_IN_BIN]
    if previous >= 0:
        s.shard[previous, NEXT_IN_BIN] = successor
    else:
        s.first_in_bin[_list_of_bin(p, unit, bin_index)] = successor
    if successor >= 0:
        s.shard[successor, PREV_IN_BIN] = previous
    previous, successor = s.shard[shard, PREV_IN_UNIT], s.shard[shard, NEXT_IN_UNIT]
    if previous >= 0:
        s.shard[previous, NEXT_IN_UNIT] = successor
    else:
        s.first_in_unit[unit] = successor
    if successor >= 0:
        s.shard[successor, PREV_IN_UNIT] = previous
    s.num_shards[unit] -= 1
    s.free_list[s.free_list[-1]] = shard
    s.free_list[-1] += 1
    return change + _add_to_bin(p, s, unit, bin_index, -1.0, -s.share[shard])


@uncounted
def remove_table(p, s, table):
    """Remove all shards of a table and its replicated cost. Return the change of the excess."""
    option = s.option[table]
    change = add_replicated(p, s, option, -1.0)
    for unit in range(p.option_units[option], p.option_units[option + 1]):
        while s.first_in_unit[unit] >= 0:
            change += remove_shard(p, s, s.first_in_unit[unit])
    return change


@called
def init_state(p, options, units, bins, shares, slack_weight):
    """Build the state of a packing, which takes over `options`. Every table has an option; shards may be missing."""
    nodes, num_units = p.ranks // p.local, len(p.unit_on_node)
    # Map units to tables, and count the shards that the largest option of each table can have.
    table_of_unit, max_shards = np.empty(num_units, np.int64), 0
    for table in range(len(options)):
        most = 0
        for option in range(p.table_options[table], p.table_options[table + 1]):
            first, last = p.option_units[option], p.option_units[option + 1]
            table_of_unit[first:last] = table
            most = max(most, p.unit_max_shards[first:last].sum())
        max_shards += most
    s = State(
        options, table_of_unit, np.zeros((3, p.ranks)), np.zeros((3, nodes)), np.zeros(1),
        np.empty((max_shards, 6), np.int64), np.empty(max_shards), np.full(p.ranks + nodes, -1),
        np.full(num_units, -1), np.zeros(num_units, np.int64), np.arange(max_shards + 1),
        1.0 + np.random.random(SETTINGS.num_noise + p.ranks), np.empty(p.ranks), np.empty(p.ranks), slack_weight,
    )  # fmt: skip
    for option in options:
        add_replicated(p, s, option, 1.0)
    for index in range(len(units)):
        add_shard(p, s, units[index], bins[index], shares[index])
    return s


@compiled
def usage(p, options, units, bins, shares):
    """Return load and device memory of ranks, host memory and disk of nodes, and memory of servers."""
    s = init_state(p, options, units, bins, shares, 0.0)
    return s.rank[0], s.rank[1], s.node[0], s.node[1], s.server


@inlined
def _round_down(p, unit, share):
    steps = p.unit_steps[unit]
    return share if steps > SETTINGS.continuous_steps else np.floor(share * steps + 1e-6) / steps


@inlined
def _capacity_of_node(p, s, unit, node, fixed, share):
    """Return the share, at most `share`, that host memory and disk of a node have capacity for."""
    for tier in range(2):
        slope = p.slope[unit, HOST + tier]
        if slope > 0.0:
            share = min(share, (1.0 - s.node[tier, node] - fixed * p.fixed[unit, HOST + tier]) / slope)
    return share


@uncounted
def _score_by_fit(p, s, unit, share, per_shard, offset):
    """Set `capacity` and `score` of all bins for a unit; a score is a cost per share. Return the number of bins."""
    nodes, on_node = p.ranks // p.local, p.unit_on_node[unit]
    load, hbm, slope_load, slope_hbm = p.fixed[unit, LOAD], p.fixed[unit, HBM], p.slope[unit, LOAD], p.slope[unit, HBM]
    load += p.pairwise_load[unit] * s.num_shards[unit]
    per_load, per_hbm = 1.0 / max(slope_load, 1e-12), 1.0 / max(slope_hbm, 1e-12)
    capacity, score, used, noise = s.capacity, s.score, s.rank, s.noise[offset : offset + p.ranks]
    # Capacity of ranks for a new shard, then of nodes, or of ranks on their nodes.
    for rank in range(p.ranks):  # vectorized
        capacity[rank] = min(min((1.0 - load - used[0, rank]) * per_load, (1.0 - hbm - used[1, rank]) * per_hbm), share)
    if on_node:
        for node in range(nodes):
            smallest = share
            for rank in range(node * p.local, (node + 1) * p.local):
                smallest = min(smallest, capacity[rank])
            capacity[node] = _capacity_of_node(p, s, unit, node, 1.0, smallest)
    elif p.slope[unit, HOST] > 0.0 or p.slope[unit, DISK] > 0.0:
        for node in range(nodes):
            limit = _capacity_of_node(p, s, unit, node, 1.0, share)
            for rank in range(node * p.local, (node + 1) * p.local):
                capacity[rank] = min(capacity[rank], limit)
    # Bins with a shard of the unit: it grows without another fixed cost.
    shard = s.first_in_unit[unit]
    while shard >= 0:
        rank = s.shard[shard, BIN]
        if not on_node:
            growth = min(min((1.0 - used[0, rank]) * per_load, (1.0 - used[1, rank]) * per_hbm), share)
            capacity[rank] = _capacity_of_node(p, s, unit, rank // p.local, 0.0, growth)
        shard = s.shard[shard, NEXT_IN_UNIT]
    num_bins, width = (nodes, p.local) if on_node else (p.ranks, 1)
    steps, min_share = p.unit_steps[unit], share - 1e-9 if p.unit_max_shards[unit] == 1 else 1e-9
    if steps <= SETTINGS.continuous_steps:
        for bin_index in range(num_bins):
            capacity[bin_index] = np.floor(capacity[bin_index] * steps + 1e-6) / steps
    # Scores: a shard's cost, and the slack of load and device memory beside it.
    empty, slope = 2.0 - load - hbm, slope_load + slope_hbm
    if on_node:
        for node in range(nodes):
            slack = 0.0
            for rank in range(node * width, (node + 1) * width):
                slack += empty - used[0, rank] - used[1, rank]
            slack = max(slack - width * capacity[node] * slope, 0.0)
            score[node] = (per_shard + s.slack_weight * slack * noise[node]) / max(capacity[node], 1e-9)
            score[node] += 0.0 if capacity[node] >= min_share else INFEASIBLE_SCORE
    else:
        for rank in range(p.ranks):  # vectorized
            slack = max(empty - used[0, rank] - used[1, rank] - capacity[rank] * slope, 0.0)
            score[rank] = (per_shard + s.slack_weight * slack * noise[rank]) / max(capacity[rank], 1e-9)
            score[rank] += 0.0 if capacity[rank] >= min_share else INFEASIBLE_SCORE
    # A shard that grows has paid its cost already.
    shard = s.first_in_unit[unit]
    while shard >= 0:
        bin_index = s.shard[shard, BIN]
        if score[bin_index] < INFEASIBLE_SCORE:
            score[bin_index] = max(score[bin_index] - per_shard / capacity[bin_index], 0.0)
        shard = s.shard[shard, NEXT_IN_UNIT]
    return num_bins


@uncounted
def _score_by_excess(p, s, unit, share, num_bins, noise):
    """Set the `score` of bins to the excess that a share adds."""
    width = p.local if p.unit_on_node[unit] else 1
    load = p.fixed[unit, LOAD] + share * p.slope[unit, LOAD] + p.pairwise_load[unit] * s.num_shards[unit]
    hbm = p.fixed[unit, HBM] + share * p.slope[unit, HBM]
    host = p.fixed[unit, HOST] + share * p.slope[unit, HOST]
    disk = p.fixed[unit, DISK] + share * p.slope[unit, DISK]
    for rank in range(num_bins * width):
        added = _over(s.rank[0, rank] + load) + SETTINGS.budget_weight * _over(s.rank[1, rank] + hbm) - s.rank[2, rank]
        if rank % width == 0:
            s.score[rank // width] = added
        else:
            s.score[rank // width] += added
    if host > 0.0 or disk > 0.0:
        for bin_index in range(num_bins):
            node = bin_index if width > 1 or p.local == 1 else bin_index // p.local
            added = SETTINGS.budget_weight * p.local * (_over(s.node[0, node] + host) + _over(s.node[1, node] + disk))
            s.score[bin_index] += added - s.node[2, node]
    for bin_index in range(num_bins):
        s.score[bin_index] *= noise[bin_index]


@uncounted
def _exclude_bins_of_table(p, s, unit):
    """Exclude the bins with shards of the option's other units: a rank has at most one shard of a table."""
    option = s.option[s.table_of_unit[unit]]
    for other_unit in range(p.option_units[option], p.option_units[option + 1]):
        shard = s.first_in_unit[other_unit] if other_unit != unit else -1
        while shard >= 0:
            s.score[s.shard[shard, BIN]] = INFEASIBLE_SCORE
            shard = s.shard[shard, NEXT_IN_UNIT]


@inlined
def _best_bin(s, num_bins):
    best, lowest = 0, s.score[0]
    for bin_index in range(1, num_bins):
        if s.score[bin_index] < lowest:
            best, lowest = bin_index, s.score[bin_index]
    return best


@uncounted
def pack_unit(p, s, unit, share, per_shard):
    """Place a share of a unit in bins with capacity, in few shards; a share that fits nowhere, where it adds the least
    excess. Return the change of the excess, and the number of scored bins.
    """
    offset, change, num_scored = np.random.randint(SETTINGS.num_noise), 0.0, SETTINGS.unit_overhead + p.ranks
    num_bins = _score_by_fit(p, s, unit, share, per_shard, offset)
    _exclude_bins_of_table(p, s, unit)
    # Fill the bins by score, each once.
    while share > 1e-9:
        bin_index = _best_bin(s, num_bins)
        num_scored += num_bins // 4 + SETTINGS.shard_overhead
        if s.score[bin_index] >= INFEASIBLE_SCORE:
            break
        has_shard = _shard_in_bin(p, s, unit, bin_index) >= 0
        node = bin_index if p.unit_on_node[unit] else bin_index // p.local
        s.score[bin_index] = INFEASIBLE_SCORE
        if not has_shard and s.num_shards[unit] >= p.unit_max_shards[unit]:
            continue
        fixed, limit = 0.0 if has_shard else 1.0, min(s.capacity[bin_index], share)
        fitting = _round_down(p, unit, _capacity_of_node(p, s, unit, node, fixed, limit))
        if fitting < (share - 1e-9 if p.unit_max_shards[unit] == 1 else 1e-9):
            continue
        fitting = share if share - fitting < 1e-9 else fitting
        change += add_shard(p, s, unit, bin_index, fitting)
        share -= fitting
    # Split the remaining share into pieces, which exceed loads or budgets.
    pieces = SETTINGS.num_pieces
    while share > 1e-9:
        at_limit = s.num_shards[unit] >= p.unit_max_shards[unit]
        piece = share if at_limit or pieces <= 1 else share / pieces
        if p.unit_steps[unit] <= SETTINGS.continuous_steps:
            piece = min(np.ceil(piece * p.unit_steps[unit] - 1e-6) / p.unit_steps[unit], share)
        piece = share if share - piece < 1e-9 else piece
        _score_by_excess(p, s, unit, piece, num_bins, s.noise[offset:])
        num_scored += 2 * p.ranks
        _exclude_bins_of_table(p, s, unit)
        bin_index = _best_bin(s, num_bins)
        if at_limit:  # only bins with a shard of the unit
            shard = s.first_in_unit[unit]
            bin_index = s.shard[shard, BIN]
            while shard >= 0:
                if s.score[s.shard[shard, BIN]] < s.score[bin_index]:
                    bin_index = s.shard[shard, BIN]
                shard = s.shard[shard, NEXT_IN_UNIT]
        change += add_shard(p, s, unit, bin_index, piece)
        share, pieces = share - piece, pieces - 1
    return change, num_scored


@uncounted
def copy_table(p, s, table, buffers, count):
    """Append units, bins and shares of a table's shards to the `count` in `buffers`. Return the new count."""
    option = s.option[table]
    for unit in range(p.option_units[option], p.option_units[option + 1]):
        shard = s.first_in_unit[unit]
        while shard >= 0:
            buffers[0][count], buffers[1][count], buffers[2][count] = unit, s.shard[shard, BIN], s.share[shard]
            count, shard = count + 1, s.shard[shard, NEXT_IN_UNIT]
    return count


@uncounted
def copy_tables(p, s, buffers):
    """Copy the shards of all tables to `buffers`. Return their number."""
    count = 0
    for table in range(len(s.option)):
        count = copy_table(p, s, table, buffers, count)
    return count


@called
def shard_buffers(s):
    """Allocate units, bins and shares for the largest possible number of shards."""
    return np.empty(len(s.free_list), np.int64), np.empty(len(s.free_list), np.int64), np.empty(len(s.free_list))


@compiled
def pack_greedily(p, options, units, bins, shares, per_shard, size, slack_weight):
    """Pack tables without shards, the largest by `size [T]` first. Return units, bins and shares of all shards."""
    np.random.seed(0)
    s = init_state(p, options.copy(), units, bins, shares, slack_weight)
    for table in np.argsort(-size, kind="mergesort"):
        first, last = p.option_units[options[table]], p.option_units[options[table] + 1]
        if s.num_shards[first:last].sum() == 0:
            for unit in range(first, last):
                pack_unit(p, s, unit, 1.0, per_shard[unit])
    buffers = shard_buffers(s)
    count = copy_tables(p, s, buffers)
    return buffers[0][:count], buffers[1][:count], buffers[2][:count]
