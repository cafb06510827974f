"""Ruin and recreate: the inner loop of the planner's search, which removes shards of tables and packs them again.

The objective is the excess plus costs. One thread; time is proportional to the number of scored bins.
"""

# ruff: noqa: NPY002  Numba knows this generator only; each kernel seeds it.

from typing import NamedTuple

import numpy as np

from tritonemb.kernels.cpu.jit import called, compiled, uncounted
from tritonemb.sharding.planner.settings import SETTINGS
from tritonemb.sharding.planner.shard_packing import (
    add_replicated,
    add_table,
    copy_shards,
    init_state,
    pack_unit,
    remove_shard,
    remove_table,
    total_excess,
)
from tritonemb.sharding.planner.statistics import Array


class Choices(NamedTuple):
    """The options that a search may choose, by table from the least cost on, and costs beside the excess."""

    offsets: Array  # [T + 1]: of each table in the arrays [C]
    option: Array  # [C]
    min_cost: Array  # [C]: with the fewest shards
    cost: Array  # [O]: without shards
    per_shard: Array  # [U]
    size: Array  # [O]: the larger ones of tables are recreated first


class Ruin(NamedTuple):
    """The ruin of a step: shards to remove, their tables, and a backup of these tables."""

    counts: Array  # [2]: tables; shards to remove
    index_of_table: Array  # [T]: into `tables`; -1: not in it
    tables: Array
    whole_table: Array  # bool: remove all shards of the table
    shards: Array  # [2, shards]: table and bin
    options: Array  # of the tables, before the step
    units: Array  # [tables, ranks]: their shards, before the step
    shares: Array


@called
def _empty_ruin(p, num_tables):
    size = 5 * SETTINGS.max_ruined + SETTINGS.max_ruined_large
    return Ruin(
        np.zeros(2, np.int64), np.full(num_tables, -1), np.empty(size, np.int64), np.empty(size, np.bool_),
        np.empty((2, size), np.int64), np.empty(size, np.int64), np.empty((size, p.ranks), np.int64),
        np.empty((size, p.ranks)),
    )  # fmt: skip


@uncounted
def _back_up_table(s, r, table, whole_table):
    """Back up a table, unless it is in the ruin already."""
    if r.index_of_table[table] < 0:
        index = r.counts[0]
        r.index_of_table[table], r.tables[index], r.whole_table[index] = index, table, False
        r.options[index], r.counts[0] = s.option[table], index + 1
        copy_shards(s, table, r.units[index], r.shares[index])
    r.whole_table[r.index_of_table[table]] |= whole_table


@uncounted
def _select_ruin(p, s, r):
    """Select shards of a rank with a large excess, of its node and of other ranks; sometimes a random table."""
    # Tournament: the rank with the largest excess of a sample of ranks, or of all, weighted randomly.
    rank, highest, r.counts[:] = 0, -1.0, 0
    all_ranks = np.random.random() < SETTINGS.tournament_of_all
    for index in range(p.ranks if all_ranks else 1 + np.random.randint(SETTINGS.tournament)):
        contender = index if all_ranks else np.random.randint(p.ranks)
        excess = s.rank[2, contender] + s.node[2, contender // p.local] / p.local
        excess *= np.random.random() if all_ranks else 1.0
        if excess > highest:
            rank, highest = contender, excess
    # Collect shards of that rank, or of its node, and of further ranks, each from a random table on.
    node, same_node, num_tables = rank // p.local, np.random.random() < SETTINGS.same_node, len(s.option)
    target_size = 1 + np.random.randint(SETTINGS.max_ruined)
    if np.random.random() < SETTINGS.large_ruin:
        same_node, target_size = True, SETTINGS.max_ruined_large
    for _ in range(4 * SETTINGS.max_ruined):
        if np.random.random() < SETTINGS.any_table:
            _back_up_table(s, r, np.random.randint(num_tables), True)
        of_node, first = np.random.random() < SETTINGS.of_node, np.random.randint(num_tables)
        bin_index = rank // p.local if of_node else rank
        for index in range(first, first + num_tables):
            table = index % num_tables
            unit, selected = s.unit[table, bin_index], False
            if unit < 0 or p.unit_on_node[unit] != of_node:
                continue
            whole_table = s.num_shards[unit] == 1 or np.random.random() < SETTINGS.whole_table
            _back_up_table(s, r, table, whole_table)
            for other in range(r.counts[1]):
                selected |= r.shards[0, other] == table and r.shards[1, other] == bin_index
            if not selected:
                r.shards[0, r.counts[1]], r.shards[1, r.counts[1]] = table, bin_index
                r.counts[1] += 1
            if r.counts[1] >= target_size:
                return
        rank = node * p.local + np.random.randint(p.local) if same_node else np.random.randint(p.ranks)


@uncounted
def _remove_ruin(p, s, r, items, shares):
    """Remove what was selected. Set `items` to units with the `shares` removed, and to `-1 - table` for whole tables.
    Return the number of items, and the change of the excess.
    """
    num_items, change = 0, 0.0
    for index in range(r.counts[1]):
        table, bin_index = r.shards[0, index], r.shards[1, index]
        if not r.whole_table[r.index_of_table[table]]:
            unit, share, item = s.unit[table, bin_index], s.share[table, bin_index], 0
            change += remove_shard(p, s, table, bin_index)
            while item < num_items and items[item] != unit:
                item += 1
            if item == num_items:
                items[item], shares[item], num_items = unit, 0.0, num_items + 1
            shares[item] += share
    for index in range(r.counts[0]):
        if r.whole_table[index]:
            change += remove_table(p, s, r.tables[index])
            items[num_items], num_items = -1 - r.tables[index], num_items + 1
    return num_items, change


@uncounted
def _total_cost(p, s, c, tables):
    """Cost of the options and shards of tables, without the excess."""
    total = 0.0
    for table in tables:
        option = s.option[table]
        total += c.cost[option]
        for unit in range(p.option_units[option], p.option_units[option + 1]):
            total += c.per_shard[unit] * s.num_shards[unit]
    return total


@uncounted
def _recreate_table(p, s, c, table, units, shares):
    """Pack a removed table with the option of least cost and excess, of a random subset of its options. Return the
    change of the excess, and the number of scored bins. `units` and `shares` are buffers `[ranks]`.
    """
    lowest, best, num_scored = np.inf, -1, 1
    for index in range(c.offsets[table], c.offsets[table + 1]):
        if c.min_cost[index] >= lowest:  # options are in the order of their least cost
            break
        if best >= 0 and np.random.random() >= SETTINGS.tried_options:
            continue
        # Try the option, copy its shards if it is the best, and remove it.
        option = s.option[table] = c.option[index]
        total = add_replicated(p, s, option, 1.0)
        for unit in range(p.option_units[option], p.option_units[option + 1]):
            change, scored = pack_unit(p, s, unit, 1.0, c.per_shard[unit])
            total, num_scored = total + change, num_scored + scored
        total += _total_cost(p, s, c, (table,))
        if total < lowest:
            lowest, best = total, option
            copy_shards(s, table, units, shares)
        remove_table(p, s, table)
    return add_table(p, s, table, best, units, shares), num_scored


@compiled
def ruin_and_recreate(p, c, assignment, hot, cold, evaluations, seed):
    """Minimize the excess of loads and budgets above 1. Return the best and the last packing.

    Ruin and recreate (Schrimpf et al., 2000; Shaw, 1998). A step removes shards of a rank or node and of others, or all
    shards of their tables, and packs them again, mostly the largest first. A removed table gets the option that adds
    least to excess and cost. Acceptance is that of simulated annealing, from the temperature `hot` to `cold`, in loads.
    It ends after `evaluations` scored bins.
    """
    np.random.seed(seed)
    s = init_state(p, assignment)
    best_option, best_unit, best_share, is_changed = s.option.copy(), s.unit.copy(), s.share.copy(), s.option < 0
    r, units, shares_of_bins = _empty_ruin(p, len(s.option)), np.empty(p.ranks, np.int64), np.empty(p.ranks)
    items, shares, keys = (
        np.empty(2 * len(r.tables), np.int64),
        np.empty(2 * len(r.tables)),
        np.empty(2 * len(r.tables)),
    )
    best = excess = total_excess(p, s)
    num_scored, step = 0, 0
    while num_scored < evaluations and best > 1e-9:
        if step % 256 == 0:  # against the drift of rounding
            excess = total_excess(p, s)
        temperature = hot * (cold / hot) ** (num_scored / evaluations)
        step, num_scored = step + 1, num_scored + p.ranks
        # Ruin.
        _select_ruin(p, s, r)
        tables = r.tables[: r.counts[0]]
        extra_cost = -_total_cost(p, s, c, tables)
        num_items, change = _remove_ruin(p, s, r, items, shares)
        # Order the items by size with noise, or randomly.
        by_size = np.random.random() < SETTINGS.by_size
        for index in range(num_items):
            unit = items[index]
            if unit < 0:
                item_size = c.size[s.option[-1 - unit]]
            else:
                item_size = shares[index] * (p.slope[unit, :2].sum() + p.slope[unit, 2:].sum() * p.local)
            keys[index] = -item_size * (0.7 + 0.6 * np.random.random()) if by_size else np.random.random()
        # Recreate.
        for index in np.argsort(keys[:num_items]):
            item = items[index]
            if item < 0:
                added, scored = _recreate_table(p, s, c, -1 - item, units, shares_of_bins)
            else:
                added, scored = pack_unit(p, s, item, shares[index], c.per_shard[item])
            change, num_scored = change + added, num_scored + scored
        # Accept or restore.
        extra_cost += _total_cost(p, s, c, tables)
        if change + extra_cost > 1e-12 and np.random.random() >= np.exp(-(change + extra_cost) / temperature):
            for index, table in enumerate(tables):
                remove_table(p, s, table)
                add_table(p, s, table, r.options[index], r.units[index], r.shares[index])
        else:
            excess += change
            is_changed[tables] = True
        r.index_of_table[tables] = -1
        if excess < best - 1e-9:
            best = excess = total_excess(p, s)
            for table in np.flatnonzero(is_changed):
                best_option[table] = s.option[table]
                copy_shards(s, table, best_unit[table], best_share[table])
            is_changed[:] = False
    return (best_option, best_unit, best_share), (s.option, s.unit, s.share)
