"""Ruin and recreate: the inner loop of the planner's search, which removes shards of tables and packs them again.

The objective is the excess plus costs. One thread; time is proportional to the number of scored bins.
"""

# ruff: noqa: NPY002  Numba knows this generator only; each kernel seeds it.

from typing import NamedTuple

import numpy as np

from tritonemb.kernels.cpu.jit import compiled, uncounted
from tritonemb.sharding.planner.settings import SETTINGS
from tritonemb.sharding.planner.shard_packing import (
    add_replicated,
    add_table,
    copy_shards,
    init_state,
    node_excess,
    pack_unit,
    rank_excess,
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
    """The ruin of a step: tables, what was removed of each, and a backup."""

    num_tables: Array  # [1]
    last_step: Array  # [T]: in which a table was ruined
    tables: Array
    unit: Array  # of the removed shard; -1: all shards
    share: Array
    options: Array  # before the step
    units: Array  # [tables, ranks]: shards before the step
    shares: Array


@uncounted
def _remove(p, s, r, table, bin_index, step):
    """Remove a table's shard from a bin, or all its shards if `bin_index` is -1; a table only once per step."""
    if r.last_step[table] != step:
        index, r.last_step[table], r.num_tables[0] = r.num_tables[0], step, r.num_tables[0] + 1
        r.tables[index], r.unit[index], r.options[index] = table, -1, s.option[table]
        copy_shards(s, table, r.units[index], r.shares[index])
        if bin_index < 0:
            remove_table(p, s, table)
        else:
            r.unit[index], r.share[index] = s.unit[table, bin_index], s.share[table, bin_index]
            remove_shard(p, s, table, bin_index)


@uncounted
def _ruin(p, s, r, step):
    """Remove shards of a rank with a large excess, of its node and of other ranks; sometimes a random table."""
    # Tournament: the rank with the largest excess of a sample of ranks, or of all, weighted randomly.
    rank, highest, r.num_tables[0] = 0, -1.0, 0
    all_ranks = np.random.random() < SETTINGS.tournament_of_all
    for index in range(p.ranks if all_ranks else 1 + np.random.randint(SETTINGS.tournament)):
        contender = index if all_ranks else np.random.randint(p.ranks)
        excess = rank_excess(s, contender) + node_excess(p, s, contender // p.local) / p.local
        excess *= np.random.random() if all_ranks else 1.0
        if excess > highest:
            rank, highest = contender, excess
    # Shards of that rank, or of its node, and of further ranks, each from a random table on.
    node, same_node, num_tables = rank // p.local, np.random.random() < SETTINGS.same_node, len(s.option)
    target_size = 1 + np.random.randint(SETTINGS.max_ruined)
    for _ in range(4 * SETTINGS.max_ruined):
        if np.random.random() < SETTINGS.any_table:
            _remove(p, s, r, np.random.randint(num_tables), -1, step)
            target_size += 1
        of_node, first = np.random.random() < SETTINGS.of_node, np.random.randint(num_tables)
        bin_index = rank // p.local if of_node else rank
        for index in range(first, first + num_tables):
            table = index % num_tables
            unit = s.unit[table, bin_index]
            if unit >= 0 and p.unit_on_node[unit] == of_node:
                whole_table = s.num_shards[unit] == 1 or np.random.random() < SETTINGS.whole_table
                _remove(p, s, r, table, -1 if whole_table else bin_index, step)
                if r.num_tables[0] >= target_size:
                    return
        rank = node * p.local + np.random.randint(p.local) if same_node else np.random.randint(p.ranks)


@uncounted
def _cost(p, s, c, table):
    """Cost of a table's option and shards, without the excess."""
    option = s.option[table]
    total = c.cost[option]
    for unit in range(p.option_units[option], p.option_units[option + 1]):
        total += c.per_shard[unit] * s.num_shards[unit]
    return total


@uncounted
def _recreate_table(p, s, c, table, units, shares):
    """Pack a removed table with the option of least cost and excess, of a random subset of its options. Return the
    number of scored bins. `units` and `shares` are buffers `[ranks]`.
    """
    lowest, best, num_scored, excess = np.inf, -1, 1, total_excess(p, s)
    for index in range(c.offsets[table], c.offsets[table + 1]):
        if c.min_cost[index] >= lowest:  # options are in the order of their least cost
            break
        if best >= 0 and np.random.random() >= SETTINGS.tried_options:
            continue
        # Try the option, copy its shards if it is the best, and remove it.
        option = s.option[table] = c.option[index]
        add_replicated(p, s, option, 1.0)
        for unit in range(p.option_units[option], p.option_units[option + 1]):
            num_scored += pack_unit(p, s, unit, 1.0, c.per_shard[unit])
        total = total_excess(p, s) - excess + _cost(p, s, c, table)
        if total < lowest:
            lowest, best = total, option
            copy_shards(s, table, units, shares)
        remove_table(p, s, table)
    add_table(p, s, table, best, units, shares)
    return num_scored


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
    units, shares, size = np.empty(p.ranks, np.int64), np.empty(p.ranks), 6 * SETTINGS.max_ruined
    r = Ruin(
        np.zeros(1, np.int64), np.zeros(len(s.option), np.int64), np.empty(size, np.int64), np.empty(size, np.int64),
        np.empty(size), np.empty(size, np.int64), np.empty((size, p.ranks), np.int64), np.empty((size, p.ranks)),
    )  # fmt: skip
    keys, costs, best = np.empty(len(r.tables)), np.empty(len(s.option)), total_excess(p, s)
    for number in range(len(s.option)):
        costs[number] = _cost(p, s, c, number)
    num_scored, step, excess = 0, 0, best
    while num_scored < evaluations and best > 1e-9:
        temperature = hot * (cold / hot) ** (num_scored / evaluations)
        step, num_scored = step + 1, num_scored + p.ranks
        _ruin(p, s, r, step)
        # Order the tables by the size of what was removed, with noise, or randomly.
        by_size = np.random.random() < SETTINGS.by_size
        for index in range(r.num_tables[0]):
            unit, removed = r.unit[index], c.size[r.options[index]]
            if unit >= 0:
                removed = r.share[index] * (p.slope[unit, :2].sum() + p.slope[unit, 2:].sum() * p.local)
            keys[index] = -removed * (0.7 + 0.6 * np.random.random()) if by_size else np.random.random()
        # Recreate.
        for index in np.argsort(keys[: r.num_tables[0]]):
            unit = r.unit[index]
            if unit < 0:
                num_scored += _recreate_table(p, s, c, r.tables[index], units, shares)
            else:
                num_scored += pack_unit(p, s, unit, r.share[index], c.per_shard[unit])
        # Accept or restore.
        tables, new_excess = r.tables[: r.num_tables[0]], total_excess(p, s)
        change = new_excess - excess
        for table in tables:
            change += _cost(p, s, c, table) - costs[table]
        if change > 1e-12 and np.random.random() >= np.exp(-change / temperature):
            for index, table in enumerate(tables):
                remove_table(p, s, table)
                add_table(p, s, table, r.options[index], r.units[index], r.shares[index])
            continue
        excess = new_excess
        for table in tables:
            costs[table], is_changed[table] = _cost(p, s, c, table), True
        if excess < best - 1e-9:
            best = excess
            for table in np.flatnonzero(is_changed):
                best_option[table] = s.option[table]
                copy_shards(s, table, best_unit[table], best_share[table])
            is_changed[:] = False
    return (best_option, best_unit, best_share), (s.option, s.unit, s.share)
