"""Ids that recur within a batch as often as they do in production.

The numbers come from the statistics that Meta publishes beside its embedding traces (facebookresearch/dlrm_datasets,
MIT licence, `embedding_bag/2022`): 788 tables, a batch of 131,072 samples, 1.78 million lookups a table. For every
range of run lengths (how often one distinct id recurs within the batch) they give the share of the distinct ids and
the share of the lookups. The first of its 16 batches is used; the others differ by at most 0.001.

How it is scaled to a smaller batch: the distribution of run lengths stays as published, up to the longest run that
the published batch itself can hold relative to its size (`HOTTEST_SHARE`); longer runs are cut to that length. So a
small batch keeps the published mixture of rare and hot ids without being filled by a single id.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Run lengths in (BIN_EDGES[i], BIN_EDGES[i + 1]]. The last published range is open; one octave stands for it here.
BIN_EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SHARE_OF_DISTINCT = (
    0.342, 0.144, 0.149, 0.138, 0.112, 0.068, 0.029, 0.010, 0.004, 0.002, 0.001, 0.001, 0.0, 0.0, 0.0, 0.0, 0.0,
)  # fmt: skip
SHARE_OF_LOOKUPS = (
    0.027, 0.023, 0.040, 0.068, 0.105, 0.120, 0.099, 0.070, 0.059, 0.054, 0.040, 0.072, 0.064, 0.047, 0.021, 0.017,
    0.076,
)  # fmt: skip
MEAN_RUN_LENGTH = 12.7

# All ids of the open range together hold this share of the lookups, so no single id can hold more.
HOTTEST_SHARE = SHARE_OF_LOOKUPS[-1]


@functools.cache
def run_length_probabilities() -> Floats:
    """Probability that a distinct id recurs k times, for k = 1, 2, ... (index k - 1).

    Built from the shares of lookups, whose three decimals still say something about the hot ids; within a range every
    run length holds the same share of the lookups. The shares of distinct ids follow from it (the tests compare them).
    """
    lengths = np.arange(1, BIN_EDGES[-1] + 1)
    widths = np.diff(BIN_EDGES)
    lookups = np.repeat(np.array(SHARE_OF_LOOKUPS) / widths, widths)
    distinct: Floats = lookups / lengths
    return distinct / distinct.sum()


def longest_run(num_ids: int) -> int:
    """The longest run that a batch of `num_ids` ids may hold."""
    return max(1, min(BIN_EDGES[-1], int(HOTTEST_SHARE * num_ids)))


def draw_run_lengths(num_ids: int, rng: np.random.Generator) -> Ints:
    """Run lengths of the distinct ids of one batch; they add up to `num_ids`."""
    cumulative = np.cumsum(run_length_probabilities())
    drawn: list[Ints] = []
    missing = num_ids
    while missing > 0:
        # At least one id a run, so `missing` draws always suffice; the mean says that far fewer usually do.
        picks = np.searchsorted(cumulative, rng.random(missing // 4 + 1) * cumulative[-1], side="right")
        runs = np.minimum(picks + 1, longest_run(num_ids)).astype(np.int64)
        fits = int(np.searchsorted(np.cumsum(runs), missing))
        runs = runs[: fits + 1]
        drawn.append(runs)
        missing -= int(runs.sum())
    lengths = np.concatenate(drawn) if drawn else np.empty(0, dtype=np.int64)
    if missing < 0:
        lengths[-1] += missing
    return lengths


def draw_ids(num_rows: int, num_ids: int, rng: np.random.Generator) -> Ints:
    """`num_ids` ids in [0, num_rows) with the published reuse, spread uniformly over the rows, in random order."""
    lengths = draw_run_lengths(num_ids, rng)
    if len(lengths) > num_rows:
        raise ValueError(
            f"draw_ids: {num_ids} ids with this reuse are {len(lengths)} distinct ones, but the table has only "
            f"{num_rows} rows; use a larger table or fewer ids"
        )
    distinct = rng.choice(num_rows, size=len(lengths), replace=False)
    ids: Ints = np.repeat(distinct, lengths)
    rng.shuffle(ids)
    return ids


class Population:
    """Rows of a table some of which are popular all the time, as `draw_ids` knows nothing of.

    The published statistics are of single batches. Here a row's popularity is a run length of their distribution: a
    batch's distinct rows are drawn with chances in proportion to it, without replacement, and the batch's longer runs
    go to those of them that are more popular. So each batch has the published reuse, and rows come back in later
    batches.
    """

    def __init__(self, num_rows: int, rng: np.random.Generator) -> None:
        probabilities = run_length_probabilities()
        self.popularity: Floats = 1.0 + rng.choice(len(probabilities), size=num_rows, p=probabilities)
        self._rng = rng

    def draw_ids(self, num_ids: int) -> Ints:
        """`num_ids` ids in random order."""
        lengths = np.sort(draw_run_lengths(num_ids, self._rng))[::-1]
        # The largest keys of u^(1/w) are a weighted sample without replacement (Efraimidis and Spirakis, IPL 2006).
        keys = np.log(self._rng.random(len(self.popularity))) / self.popularity
        distinct = np.argpartition(keys, -len(lengths))[-len(lengths) :]
        distinct = distinct[np.argsort(self.popularity[distinct], kind="stable")[::-1]]
        ids: Ints = np.repeat(distinct.astype(np.int64), lengths)
        self._rng.shuffle(ids)
        return ids
