"""Ruin and recreate: the inner loop of the planner's search, which removes shards of tables and packs them again.

The objective is the excess plus costs. One thread; time is proportional to the number of scored bins.
"""

# ruff: noqa: NPY002  Numba knows this generator only; each kernel seeds it.

from typing import Any, NamedTuple

import numpy as np

from tritonemb.kernels.cpu.jit import compiled, uncounted
from tritonemb.sharding.planner.settings import SETTINGS
from tritonemb.sharding.planner.shard_packing import (
    NEXT_IN_BIN,
    UNIT,
    add_replicated,
    add_shard,
    copy_table,
    copy_tables,
    init_state,
    pack_unit,
    remove_shard,
    remove_table,
    shard_buffers,
    total_excess,
)
from tritonemb.sharding.table_stats import Array


class Ruin(NamedTuple):
    """The ruin of a step: shards to remove, their tables, and a backup of these tables."""

    counts: Array  # [3]: tables; shards in the backup; shards to remove
    index_of_table: Array  # [T]: into `tables`; -1: not in it
    tables: Array
    options: Array  # of the tables, before the step
    whole_table: Array  # bool: remove all shards of the table
    shards: Array
    backup: Any  # units, bins and shares of all shards of the tables, before the step


@uncounted
def _back_up_table(p, s, r, table, whole_table):
    """Back up a table, unless it is in the ruin already."""
    if r.index_of_table[table] < 0:
        index, option = r.counts[0], s.option[table]
        r.index_of_table[table], r.tables[index], r.options[index], r.whole_table[index] = index, table, option, False
        r.counts[0], r.counts[1] = index + 1, copy_table(p, s, table, r.backup, r.counts[1])
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
    # Walk the lists of shards of that rank, or of its node, and of further ranks, until there are enough shards.
    node, same_node = rank // p.local, np.random.random() < SETTINGS.same_node
    target_size = 1 + np.random.randint(SETTINGS.max_ruined)
    if np.random.random() < SETTINGS.large_ruin:
        same_node, target_size = True, SETTINGS.max_ruined_large
    for _ in range(4 * SETTINGS.max_ruined):
        if np.random.random() < SETTINGS.any_table:
            _back_up_table(p, s, r, np.random.randint(len(s.option)), True)
        shard = s.first_in_bin[p.ranks + rank // p.local if np.random.random() < SETTINGS.of_node else rank]
        while shard >= 0 and r.counts[2] < target_size:
            unit, selected = s.shard[shard, UNIT], False
            whole_table = s.num_shards[unit] == 1 or np.random.random() < SETTINGS.whole_table
            _back_up_table(p, s, r, s.table_of_unit[unit], whole_table)
            for index in range(r.counts[2]):
                selected |= r.shards[index] == shard
            if not selected:
                r.shards[r.counts[2]] = shard
                r.counts[2] += 1
            shard = s.shard[shard, NEXT_IN_BIN]
        if r.counts[2] >= target_size:
            break
        rank = node * p.local + np.random.randint(p.local) if same_node else np.random.randint(p.ranks)


@uncounted
def _remove_ruin(p, s, r, items, shares):
    """Remove what was selected. Set `items` to units with the `shares` removed, and to `-1 - table` for whole tables.
    Return the number of items, and the change of the excess.
    """
    num_items, change = 0, 0.0
    for index in range(r.counts[2]):
        unit, share = s.shard[r.shards[index], UNIT], s.share[r.shards[index]]
        if not r.whole_table[r.index_of_table[s.table_of_unit[unit]]]:
            change += remove_shard(p, s, r.shards[index])
            item = 0
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
def _restore(p, s, r):
    """Restore the tables of a ruin from its backup."""
    for index in range(r.counts[0]):
        remove_table(p, s, r.tables[index])
        s.option[r.tables[index]] = r.options[index]
        add_replicated(p, s, r.options[index], 1.0)
    for index in range(r.counts[1]):
        add_shard(p, s, r.backup[0][index], r.backup[1][index], r.backup[2][index])


@uncounted
def _cost(p, s, cost, per_shard, table):
    """Cost of a table's option and shards, without the excess."""
    option = s.option[table]
    total = cost[option]
    for unit in range(p.option_units[option], p.option_units[option + 1]):
        total += per_shard[unit] * s.num_shards[unit]
    return total


@uncounted
def _total_cost(p, s, cost, per_shard, tables):
    total = 0.0
    for table in tables:
        total += _cost(p, s, cost, per_shard, table)
    return total


@uncounted
def _recreate_table(p, s, cost, min_cost, per_shard, order, table, buffers):
    """Pack a removed table with the option of least cost and excess, of a random subset of its options. Return the
    change of the excess, and the number of scored bins.
    """
    lowest, best, num_scored, num_shards = np.inf, -1, 1, 0
    for index in range(p.table_options[table], p.table_options[table + 1]):
        option = order[index]
        if min_cost[option] >= lowest:  # options are in the order of their least cost
            break
        if best >= 0 and np.random.random() >= SETTINGS.tried_options:
            continue
        # Try the option, copy its shards if it is the best, and remove it.
        s.option[table] = option
        total = add_replicated(p, s, option, 1.0)
        for unit in range(p.option_units[option], p.option_units[option + 1]):
            change, scored = pack_unit(p, s, unit, 1.0, per_shard[unit])
            total, num_scored = total + change, num_scored + scored
        total += _cost(p, s, cost, per_shard, table)
        if total < lowest:
            lowest, best, num_shards = total, option, copy_table(p, s, table, buffers, 0)
        remove_table(p, s, table)
    s.option[table] = best
    change = add_replicated(p, s, best, 1.0)
    for index in range(num_shards):
        change += add_shard(p, s, buffers[0][index], buffers[1][index], buffers[2][index])
    return change, num_scored


@compiled
def ruin_and_recreate(
    p, cost, min_cost, per_shard, order, size, options, units, bins, shares, evaluations, hot, cold, slack_weight, seed
):
    """Minimize the excess of loads and budgets above 1. Return the best and the last packing.

    Ruin and recreate (Schrimpf et al., 2000; Shaw, 1998). A step removes shards of a rank or node and of others, or all
    shards of their tables, and packs them again, mostly the largest first. A removed table gets the option that adds
    least to excess and cost. Acceptance is that of simulated annealing, at temperatures from `hot` to `cold`, in loads.

    Costs are `cost [O]` of options and `per_shard [U]`; `min_cost [O]` is the cost with the fewest shards, by which
    `order [O]` sorts each table's options. `size [T]` tells which tables are large, `evaluations` is in scored bins.
    """
    np.random.seed(seed)
    s = init_state(p, options.copy(), units, bins, shares, slack_weight)
    best_options, best_shards, trial = s.option.copy(), shard_buffers(s), shard_buffers(s)
    num_best, max_items = copy_tables(p, s, best_shards), 5 * SETTINGS.max_ruined + SETTINGS.max_ruined_large
    r = Ruin(
        np.zeros(3, np.int64), np.full(len(options), -1), np.empty(max_items, np.int64), np.empty(max_items, np.int64),
        np.empty(max_items, np.bool_), np.empty(max_items, np.int64), shard_buffers(s),
    )  # fmt: skip
    items, shares, keys = np.empty(2 * max_items, np.int64), np.empty(2 * max_items), np.empty(2 * max_items)
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
        extra_cost = -_total_cost(p, s, cost, per_shard, tables)
        num_items, change = _remove_ruin(p, s, r, items, shares)
        # Order the items by size with noise, or randomly.
        by_size = np.random.random() < SETTINGS.by_size
        for index in range(num_items):
            unit = items[index]
            item_size = (
                size[-1 - unit]
                if unit < 0
                else shares[index] * (p.slope[unit, :2].sum() + p.slope[unit, 2:].sum() * p.local)
            )
            keys[index] = -item_size * (0.7 + 0.6 * np.random.random()) if by_size else np.random.random()
        # Recreate.
        for index in np.argsort(keys[:num_items]):
            item = items[index]
            if item < 0:
                added, scored = _recreate_table(p, s, cost, min_cost, per_shard, order, -1 - item, trial)
            else:
                added, scored = pack_unit(p, s, item, shares[index], per_shard[item])
            change, num_scored = change + added, num_scored + scored
        # Accept or restore.
        extra_cost += _total_cost(p, s, cost, per_shard, tables)
        if change + extra_cost > 1e-12 and np.random.random() >= np.exp(-(change + extra_cost) / temperature):
            _restore(p, s, r)
        else:
            excess += change
        r.index_of_table[tables] = -1
        if excess < best - 1e-9:
            excess = total_excess(p, s)
            best, num_best = excess, copy_tables(p, s, best_shards)
            best_options[:] = s.option
    num_last = copy_tables(p, s, trial)
    return (
        (best_options, best_shards[0][:num_best], best_shards[1][:num_best], best_shards[2][:num_best]),
        (s.option, trial[0][:num_last], trial[1][:num_last], trial[2][:num_last]),
    )
