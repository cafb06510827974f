"""`SearchSettings`: what tunes the search for a plan, and why each value is what it is."""

from typing import NamedTuple


class SearchSettings(NamedTuple):
    """Settings of the search. A NamedTuple, since the compiled loops read it as a constant.

    Loads are relative to the lower bound, and memory to the budgets. Probabilities are per step of ruin and recreate.
    """

    # When to stop: at once below `optimal`; below `close`, a gap that prediction errors exceed, after `min_rounds`.
    optimal: float = 1.002
    close: float = 1.0299
    min_rounds: int = 12
    max_rounds: int = 260  # bounds the planning time where no goal is met
    max_idle_rounds: int = 40  # without a better plan; a late gain is rare

    # Bound and selection of options, by LP and MILP.
    bound_precision: float = 5e-4  # relative; far below the gap of an `optimal` plan, which it would blur
    overrun_cost: float = 1e3  # cost of exceeding a budget by 100 %, in loads: far above any gain of load
    max_milp_size: int = 10_000_000  # tables times options; a larger MILP is slow, and raises the bound little
    max_milp_nodes: int = 200  # bounds its time; its bound is valid at any node
    # Extra cost of the options that the first MILP may select and the search may try, relative to a table's mean share
    # of the bound. Fewer tables have fewer mixtures: below `few_tables` more options are searched in proportion.
    cheap: float = 0.1
    few_tables: int = 60
    alike: float = 0.02  # difference in budget usage between options to search and the selected one
    enough: float = 1.03  # options of this load are selected without a wider set of candidates: within `close`
    # Share of each budget that the MILP leaves for packing, which cannot fill every rank: per rank and table; at most.
    spare: float = 0.016
    max_spare: float = 0.01

    # Goals: loads that no rank may exceed. The first is above the bound by the part that ranks with few tables waste.
    first_goal: float = 0.15  # times ranks per table
    first_goal_range: tuple[float, float] = (0.03, 0.4)
    lower: float = 0.15  # part of its gap by which a goal that is met falls: small, as a goal that fails costs rounds
    rise: float = 0.5  # part of the excess per rank by which a goal that is not met rises
    min_rise: float = 0.002  # or this, so that rounds do not repeat
    back: float = 0.3  # or this part of the way to the incumbent's load
    higher: float = 1.3  # factor of a goal's gap while budgets are exceeded: the load is not what fails
    gain: float = 0.97  # a round gains if its excess is below this part of the previous one; less is noise
    patience: int = 4  # rounds without gain before the goal rises: fewer leave local optima
    nearly: float = 0.01  # excess per rank up to which an LP of shares can still remove all of it
    tolerance: float = 1.001e-6  # of a budget: the rounding that budgets are reduced by

    # Prices of the budgets, relative to the LP's duals: they rise while a budget is exceeded and fall while it is not.
    initial_premium: float = 0.1  # packing needs more memory than the LP
    premium_range: tuple[float, float] = (-0.7, 0.5)  # prices stay near the duals, by which the options were chosen
    target_usage: float = 0.997  # of budgets: the last bytes are hard to pack
    price_step: float = 10.0  # relative change of prices per deviation

    # Rounds of ruin and recreate.
    selected_rounds: int = 6  # with the options that the MILP has selected, before others are tried
    evaluations: int = 2_400  # scored bins in a round per table and rank
    max_evaluations: int = 60_000_000  # bounds the time of a round
    longer: float = 6.25  # factor of these, times ranks per table: with few tables each move matters more
    longer_range: tuple[float, float] = (1.0, 2.0)
    # Temperatures at the begin and end of the first round and of later ones, relative to a rank's mean load per table:
    # the first may move whole tables, later ones polish.
    hot: tuple[float, float] = (0.1, 0.02)
    cold: tuple[float, float] = (0.005, 0.002)
    slack_weight: float = 0.002  # of the slack that a placement leaves in its bin, in its score: breaks ties

    # A ruin: it removes shards of the rank with the largest excess of a tournament, of its node and of other ranks.
    tournament: int = 6  # ranks: mostly bad ranks, not always the worst
    tournament_of_all: float = 0.2  # probability of a tournament of all ranks, which finds a single overloaded one
    of_node: float = 0.2  # probability to take shards of the node, whose host memory and disk ranks share
    same_node: float = 0.5  # probability to take further shards from the same node
    whole_table: float = 0.3  # probability to remove all shards of a shard's table, which may then change its option
    any_table: float = 0.1  # probability to remove a random table, too
    max_ruined: int = 5  # shards: small ruins are fast, and accepted more often

    # Recreation: packing of the removed shards.
    by_size: float = 0.7  # probability to recreate the largest first, else in random order
    tried_options: float = 0.5  # probability to try an option of a table after the cheapest
    num_pieces: int = 4  # into which a share that fits nowhere is split
    num_noise: int = 1024  # random factors of the slack, drawn once for all bins of all steps
    unit_overhead: int = 32  # cost of scoring the bins of a unit, in scored bins: the unit of time
    shard_overhead: int = 32  # cost of placing a shard, in scored bins
    # Steps of a unit, above which its shares are continuous: rounding to one is below `bound_precision`.
    continuous_steps: int = 100_000

    # The excess: what loads and budgets exceed 1 by. An exceeded budget counts in loads; the quadratic term spreads the
    # excess over ranks.
    budget_weight: float = 2.0
    excess_curvature: float = 4.0

    # Planning around the search.
    max_reserve: float = 0.5  # of a budget, kept free for rounding: planning fails above it
    keep_within: float = 1.02  # of a new plan's load: a running plan's shards stay up to this


SETTINGS = SearchSettings()
