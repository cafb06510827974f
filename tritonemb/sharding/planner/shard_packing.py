"""Shards of tables in bins (ranks or nodes): what a shard adds to a bin, and the bins with capacity for more.

The excess is the sum of what loads and budgets exceed 1 by. A bin has at most one shard of a table. One thread.
"""

# ruff: noqa: NPY002  Numba knows this generator only; each kernel seeds it.

from typing import NamedTuple, Self

import numpy as np

from tritonemb.kernels.cpu.jit import called, compiled, inlined, uncounted
from tritonemb.sharding.planner.settings import SETTINGS
from tritonemb.sharding.planner.statistics import Array

LOAD, HBM, HOST, DISK, SERVER = range(5)
INFEASIBLE_SCORE = 1e30


class Problem(NamedTuple):
    """Tables, their options, and the options' units. A unit is split into shards of any size.

    A shard with a share of its unit costs `fixed + share * slope` on its bin: on its rank, or on every rank of its node
    for load and device memory, and once per node for host memory and disk. `table_options [T + 1]` and
    `option_units [O + 1]` are offsets. `local` is the number of ranks per node.
    """

    ranks: int
    local: int
    rank_speed: Array  # [ranks]: a rank takes its load divided by this
    rank_base: Array  # [2, ranks]: load and device memory that a rank has less than the best one
    table_options: Array
    option_units: Array
    option_replicated: Array  # [O, 5]: load and device memory of ranks, host memory and disk of nodes, servers
    option_common: Array  # [O]: load on every rank, independent of the shards
    unit_table: Array  # [U]
    unit_common: Array  # [U]: load on every rank, per shard
    unit_on_node: Array  # [U], bool: the bins of its shards are nodes
    unit_steps: Array  # [U]: shares are multiples of 1 / this
    unit_max_shards: Array  # [U]
    fixed: Array  # [U, 4]: load, shares of the budgets of device memory, host memory and disk
    slope: Array  # [U, 4]
    pairwise_load: Array  # [U]: load of a shard per other shard of its unit
    option_waits: Array  # [O, L], bool: the latencies that tables with the option wait for
    latencies: Array  # [L]: seconds, once per step
    waits: Array  # [L], bool: the latencies that a step waits for; options with others are excluded

    @property
    def option_table(self) -> Array:
        return np.repeat(np.arange(len(self.table_options) - 1), np.diff(self.table_options))

    @property
    def latency(self) -> float:
        return float(self.latencies @ self.waits)

    def sum_by_option(self, values: Array) -> Array:
        """Return the sums of `values [U]` over the units of each option."""
        option = np.repeat(np.arange(len(self.option_replicated)), np.diff(self.option_units))
        return np.bincount(option, values, len(self.option_replicated))

    def totals(self, num_shards: Array) -> Array:
        """Return each option's load summed over ranks and usage of each budget, `[O, 5]`, with `num_shards [U]`."""
        p, nodes = self, self.ranks // self.local
        sums = p.option_replicated * np.array([p.ranks, p.ranks, nodes, nodes, 1.0])
        sums[:, 0] += p.ranks * p.option_common
        units = p.fixed * num_shards[:, None] + p.slope
        units[:, 0] += p.pairwise_load * num_shards * (num_shards - 1)
        units[:, :2] *= np.where(p.unit_on_node, p.local, 1)[:, None]
        units[:, 0] += p.ranks * p.unit_common * num_shards
        for column in range(4):
            sums[:, column] += p.sum_by_option(units[:, column])
        return sums

    def scaled(self, unit: float) -> Self:
        """Return the problem with loads in a unit."""
        scale = np.array([1 / unit, 1, 1, 1])
        return self._replace(
            option_replicated=self.option_replicated * np.append(scale, 1), option_common=self.option_common / unit,
            unit_common=self.unit_common / unit, fixed=self.fixed * scale, slope=self.slope * scale,
            pairwise_load=self.pairwise_load / unit,
        )  # fmt: skip

    def mean_uses(self, num_shards: Array) -> Array:
        """Return `totals` as means: load of a rank at its speed, and shares of all budgets, `[O, 5]`."""
        nodes, memory = self.ranks // self.local, self.ranks - self.rank_base[1].sum()
        return self.totals(num_shards) / [self.rank_speed.sum(), memory, nodes, nodes, 1]


class Assignment(NamedTuple):
    """The option of each table `[T]`; by table and bin `[T, ranks]`, the unit of the shard, or -1, and its share."""

    options: Array
    units: Array
    shares: Array

    @classmethod
    def empty(cls, options: Array, ranks: int) -> Self:
        return cls(options, np.full((len(options), ranks), -1), np.zeros((len(options), ranks)))


class State(NamedTuple):
    """A packing: an assignment, and the usage of ranks, nodes and servers."""

    option: Array  # [T]: option of each table
    unit: Array  # [T, ranks]: unit of the table's shard in each bin, -1 for none
    share: Array  # [T, ranks]: of the unit
    num_shards: Array  # [U]
    rank: Array  # [2, ranks]: load, device memory
    node: Array  # [2, nodes]: host memory, disk
    server: Array  # [1]
    noise: Array  # factors of the slack
    capacity: Array  # [ranks]: the share of a unit that fits into a bin
    score: Array  # [ranks]: of a bin for a shard, lower is better


@inlined
def _over(value):
    over = max(value - 1.0, 0.0)
    return over * (1.0 + SETTINGS.excess_curvature * over)


@inlined
def rank_excess(s, rank):
    return _over(s.rank[0, rank]) + SETTINGS.budget_weight * _over(s.rank[1, rank])


@inlined
def node_excess(p, s, node):
    return SETTINGS.budget_weight * p.local * (_over(s.node[0, node]) + _over(s.node[1, node]))


@uncounted
def total_excess(p, s):
    total = SETTINGS.budget_weight * p.ranks * _over(s.server[0])
    for rank in range(p.ranks):
        total += rank_excess(s, rank)
    for node in range(p.ranks // p.local):
        total += node_excess(p, s, node)
    return total


@inlined
def _add_to_bin(p, s, unit, bin_index, fixed, share, pairwise):
    """Add `fixed` times the fixed cost of a shard, a share of its unit, and `pairwise` times the pairwise load."""
    width = p.local if p.unit_on_node[unit] else 1
    load = fixed * p.fixed[unit, LOAD] + share * p.slope[unit, LOAD] + pairwise * p.pairwise_load[unit]
    hbm = fixed * p.fixed[unit, HBM] + share * p.slope[unit, HBM]
    for rank in range(bin_index * width, (bin_index + 1) * width):
        s.rank[0, rank] += load
        s.rank[1, rank] += hbm
    s.node[0, bin_index * width // p.local] += fixed * p.fixed[unit, HOST] + share * p.slope[unit, HOST]
    s.node[1, bin_index * width // p.local] += fixed * p.fixed[unit, DISK] + share * p.slope[unit, DISK]


@uncounted
def add_replicated(p, s, option, sign):
    """Add the replicated cost of an option to all ranks, nodes and servers."""
    costs = p.option_replicated[option]
    if p.option_units[option] == p.option_units[option + 1]:
        for rank in range(p.ranks):
            s.rank[0, rank] += sign * costs[LOAD]
            s.rank[1, rank] += sign * costs[HBM]
        for node in range(p.ranks // p.local):
            s.node[0, node] += sign * costs[HOST]
            s.node[1, node] += sign * costs[DISK]
        s.server[0] += sign * costs[SERVER]


@uncounted
def _add_whole_shard(p, s, unit, bin_index, share, sign):
    """Add or subtract the cost of a shard, and the pairwise load of it and its siblings."""
    table, num_siblings = p.unit_table[unit], 0.0
    if p.pairwise_load[unit] > 0.0 and s.num_shards[unit] > 0:
        for sibling in range(p.ranks):
            if sibling != bin_index and s.unit[table, sibling] == unit:
                num_siblings += 1.0
                _add_to_bin(p, s, unit, sibling, 0.0, 0.0, sign)
    _add_to_bin(p, s, unit, bin_index, sign, sign * share, sign * num_siblings)


@uncounted
def add_shard(p, s, unit, bin_index, share):
    """Add a share of a unit to a bin: to the unit's shard there, or as a new shard."""
    table = p.unit_table[unit]
    if s.unit[table, bin_index] == unit:
        s.share[table, bin_index] += share
        _add_to_bin(p, s, unit, bin_index, 0.0, share, 0.0)
    else:
        s.unit[table, bin_index], s.share[table, bin_index] = unit, share
        s.num_shards[unit] += 1
        _add_whole_shard(p, s, unit, bin_index, share, 1.0)


@uncounted
def remove_shard(p, s, table, bin_index):
    unit = s.unit[table, bin_index]
    s.unit[table, bin_index] = -1
    s.num_shards[unit] -= 1
    _add_whole_shard(p, s, unit, bin_index, s.share[table, bin_index], -1.0)


@uncounted
def remove_table(p, s, table):
    """Remove all shards of a table and its replicated cost."""
    add_replicated(p, s, s.option[table], -1.0)
    for bin_index in range(p.ranks):
        if s.unit[table, bin_index] >= 0:
            remove_shard(p, s, table, bin_index)


@uncounted
def add_table(p, s, table, option, units, shares):
    """Add a table without shards, with an option and shards, `[ranks]`."""
    s.option[table] = option
    add_replicated(p, s, option, 1.0)
    for bin_index in range(p.ranks):
        if units[bin_index] >= 0:
            add_shard(p, s, units[bin_index], bin_index, shares[bin_index])


@inlined
def copy_shards(s, table, units, shares):
    """Copy the shards of a table to `units` and `shares`, `[ranks]`."""
    for bin_index in range(len(units)):
        units[bin_index], shares[bin_index] = s.unit[table, bin_index], s.share[table, bin_index]


@called
def init_state(p, assignment):
    """Build the state of a packing. Every table has an option; shards may be missing."""
    options, units, shares = assignment
    s = State(
        options.copy(), np.full(units.shape, -1), np.zeros(units.shape), np.zeros(len(p.unit_table), np.int64),
        p.rank_base.copy(), np.zeros((2, p.ranks // p.local)), np.zeros(1),
        1.0 + np.random.random(SETTINGS.num_noise + p.ranks), np.empty(p.ranks), np.empty(p.ranks),
    )  # fmt: skip
    for table in range(len(options)):
        add_table(p, s, table, options[table], units[table], shares[table])
    return s


@compiled
def usage(p, assignment):
    """Return load and device memory of ranks, host memory and disk of nodes, and memory of servers."""
    s = init_state(p, assignment)
    return s.rank[0], s.rank[1], s.node[0], s.node[1], s.server


@inlined
def _capacity_of_node(p, s, unit, node, fixed, share):
    """Return the share, at most `share`, that host memory and disk of a node have capacity for."""
    for tier in range(2):
        slope = p.slope[unit, HOST + tier]
        if slope > 0.0:
            share = min(share, (1.0 - s.node[tier, node] - fixed * p.fixed[unit, HOST + tier]) / slope)
    return share


@inlined
def _round_down(p, unit, share):
    steps = p.unit_steps[unit]
    return share if steps > SETTINGS.continuous_steps else np.floor(share * steps + 1e-6) / steps


@uncounted
def _score_by_fit(p, s, unit, share, per_shard, noise):
    """Set `capacity` and `score` of all bins for a unit; a score is a cost per share. Return the number of bins."""
    table, width = p.unit_table[unit], p.local if p.unit_on_node[unit] else 1
    load, hbm, slope_load, slope_hbm = p.fixed[unit, LOAD], p.fixed[unit, HBM], p.slope[unit, LOAD], p.slope[unit, HBM]
    load += p.pairwise_load[unit] * s.num_shards[unit]
    per_load, per_hbm = 1.0 / max(slope_load, 1e-12), 1.0 / max(slope_hbm, 1e-12)
    capacity, score, used, num_bins = s.capacity, s.score, s.rank, p.ranks // width
    # Capacity and slack of load and device memory of ranks, then of bins.
    for rank in range(p.ranks):  # vectorized
        capacity[rank] = min(min((1.0 - load - used[0, rank]) * per_load, (1.0 - hbm - used[1, rank]) * per_hbm), share)
        score[rank] = 2.0 - load - hbm - used[0, rank] - used[1, rank]
    for node in range(num_bins if width > 1 else 0):
        smallest, slack = share, 0.0
        for rank in range(node * width, (node + 1) * width):
            smallest, slack = min(smallest, capacity[rank]), slack + score[rank]
        capacity[node], score[node] = smallest, slack
    if p.slope[unit, HOST] > 0.0 or p.slope[unit, DISK] > 0.0:
        for bin_index in range(num_bins):
            limit = _capacity_of_node(p, s, unit, bin_index * width // p.local, 1.0, share)
            capacity[bin_index] = min(capacity[bin_index], limit)
    # A shard of the unit grows without another fixed cost.
    for rank in range(p.ranks if width == 1 and s.num_shards[unit] > 0 else 0):
        if s.unit[table, rank] == unit:
            growth = min(min((1.0 - used[0, rank]) * per_load, (1.0 - used[1, rank]) * per_hbm), share)
            capacity[rank] = _capacity_of_node(p, s, unit, rank // p.local, 0.0, growth)
    if p.unit_steps[unit] <= SETTINGS.continuous_steps:
        for bin_index in range(num_bins):
            capacity[bin_index] = _round_down(p, unit, capacity[bin_index])
    # Scores: a shard's cost, and the slack beside it.
    min_share, slope = share - 1e-9 if p.unit_max_shards[unit] == 1 else 1e-9, width * (slope_load + slope_hbm)
    for bin_index in range(num_bins):  # vectorized
        slack = max(score[bin_index] - capacity[bin_index] * slope, 0.0)
        score[bin_index] = (per_shard + SETTINGS.slack_weight * slack * noise[bin_index]) / max(
            capacity[bin_index], 1e-9
        )
        score[bin_index] += 0.0 if capacity[bin_index] >= min_share else INFEASIBLE_SCORE
    for bin_index in range(num_bins):
        if s.unit[table, bin_index] == unit and score[bin_index] < INFEASIBLE_SCORE:
            score[bin_index] = max(score[bin_index] - per_shard / capacity[bin_index], 0.0)
        elif s.unit[table, bin_index] >= 0:
            score[bin_index] = INFEASIBLE_SCORE
    return num_bins


@uncounted
def _score_by_excess(p, s, unit, share, num_bins, noise):
    """Set the `score` of bins to the excess that a share adds; only bins with a shard of the unit, if it has as many as
    it may have.
    """
    table, width, at_limit = p.unit_table[unit], p.ranks // num_bins, s.num_shards[unit] >= p.unit_max_shards[unit]
    load = p.fixed[unit, LOAD] + share * p.slope[unit, LOAD] + p.pairwise_load[unit] * s.num_shards[unit]
    hbm = p.fixed[unit, HBM] + share * p.slope[unit, HBM]
    host = p.fixed[unit, HOST] + share * p.slope[unit, HOST]
    disk = p.fixed[unit, DISK] + share * p.slope[unit, DISK]
    for bin_index in range(num_bins):
        added, node = 0.0, bin_index * width // p.local
        for rank in range(bin_index * width, (bin_index + 1) * width):
            added += _over(s.rank[0, rank] + load) + SETTINGS.budget_weight * _over(s.rank[1, rank] + hbm)
            added -= rank_excess(s, rank)
        if host > 0.0 or disk > 0.0:
            over = _over(s.node[0, node] + host) + _over(s.node[1, node] + disk)
            added += SETTINGS.budget_weight * p.local * over - node_excess(p, s, node)
        s.score[bin_index] = added * noise[bin_index]
        if s.unit[table, bin_index] != unit and (at_limit or s.unit[table, bin_index] >= 0):
            s.score[bin_index] = INFEASIBLE_SCORE


@uncounted
def pack_unit(p, s, unit, share, per_shard):
    """Place a share of a unit in few bins with capacity, else with least excess. Return the number of scored bins."""
    noise = s.noise[np.random.randint(SETTINGS.num_noise) :]
    num_bins, num_scored = _score_by_fit(p, s, unit, share, per_shard, noise), SETTINGS.unit_overhead + p.ranks
    # Fill the bins by score, each once.
    while share > 1e-9:
        bin_index = np.argmin(s.score[:num_bins])
        num_scored += num_bins // 4 + SETTINGS.shard_overhead
        if s.score[bin_index] >= INFEASIBLE_SCORE:
            break
        s.score[bin_index] = INFEASIBLE_SCORE
        is_new = s.unit[p.unit_table[unit], bin_index] != unit
        if is_new and s.num_shards[unit] >= p.unit_max_shards[unit]:
            continue
        fixed, limit = 1.0 if is_new else 0.0, min(s.capacity[bin_index], share)
        node = bin_index if p.unit_on_node[unit] else bin_index // p.local
        fitting = _round_down(p, unit, _capacity_of_node(p, s, unit, node, fixed, limit))
        if fitting < (share - 1e-9 if p.unit_max_shards[unit] == 1 else 1e-9):
            continue
        fitting = share if share - fitting < 1e-9 else fitting
        add_shard(p, s, unit, bin_index, fitting)
        share -= fitting
    # Split the remaining share into pieces, which exceed loads or budgets.
    pieces = SETTINGS.num_pieces
    while share > 1e-9:
        at_limit = s.num_shards[unit] >= p.unit_max_shards[unit]
        piece = share if at_limit or pieces <= 1 else share / pieces
        if p.unit_steps[unit] <= SETTINGS.continuous_steps:
            piece = min(np.ceil(piece * p.unit_steps[unit] - 1e-6) / p.unit_steps[unit], share)
        piece = share if share - piece < 1e-9 else piece
        _score_by_excess(p, s, unit, piece, num_bins, noise)
        num_scored += 2 * p.ranks
        add_shard(p, s, unit, np.argmin(s.score[:num_bins]), piece)
        share, pieces = share - piece, pieces - 1
    return num_scored


@compiled
def pack_greedily(p, assignment, per_shard, size):
    """Pack tables without shards, the largest by `size [T]` first. Return units and shares, `[T, ranks]`."""
    np.random.seed(0)
    s = init_state(p, assignment)
    for table in np.argsort(-size, kind="mergesort"):
        if (s.unit[table] < 0).all():
            for unit in range(p.option_units[s.option[table]], p.option_units[s.option[table] + 1]):
                pack_unit(p, s, unit, 1.0, per_shard[unit])
    return s.unit, s.share
