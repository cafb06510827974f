"""The drawn ids follow the published histograms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.measuring.workload import (
    BIN_EDGES,
    HOTTEST_SHARE,
    MEAN_RUN_LENGTH,
    SHARE_OF_DISTINCT,
    SHARE_OF_LOOKUPS,
    Population,
    draw_ids,
    draw_run_lengths,
    longest_run,
    run_length_probabilities,
)

pytestmark = pytest.mark.more


def shares(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of the distinct ids and of the lookups in each published range of run lengths."""
    edges = np.array(BIN_EDGES) + 0.5
    distinct, _ = np.histogram(lengths, edges)
    lookups, _ = np.histogram(lengths, edges, weights=lengths)
    return distinct / len(lengths), lookups / lengths.sum()


def test_the_published_numbers_are_shares() -> None:
    assert len(SHARE_OF_DISTINCT) == len(SHARE_OF_LOOKUPS) == len(BIN_EDGES) - 1
    assert sum(SHARE_OF_DISTINCT) == pytest.approx(1, abs=0.005)
    assert sum(SHARE_OF_LOOKUPS) == pytest.approx(1, abs=0.005)


def test_probabilities_built_from_lookups_give_the_published_shares_of_distinct_ids() -> None:
    probabilities = run_length_probabilities()
    derived = [probabilities[low:high].sum() for low, high in itertools.pairwise(BIN_EDGES)]
    # The shares are published with three decimals; 0.004 covers what rounding does to a share of lookups of 0.027.
    np.testing.assert_allclose(derived, SHARE_OF_DISTINCT, atol=0.004)
    mean = (probabilities * np.arange(1, len(probabilities) + 1)).sum()
    assert mean == pytest.approx(MEAN_RUN_LENGTH, rel=0.02)


def test_a_large_batch_has_both_published_histograms() -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate([draw_run_lengths(1_780_000, rng) for _ in range(10)])
    distinct, lookups = shares(lengths)
    np.testing.assert_allclose(distinct, SHARE_OF_DISTINCT, atol=0.005)
    # The hottest range is a handful of ids, so its share of the lookups varies from batch to batch.
    np.testing.assert_allclose(lookups[:14], SHARE_OF_LOOKUPS[:14], atol=0.012)


@pytest.mark.parametrize("num_ids", [2048, 10_240, 53_248])
def test_a_small_batch_keeps_the_shares_of_distinct_ids_below_its_longest_run(num_ids: int) -> None:
    rng = np.random.default_rng(1)
    lengths = np.concatenate([draw_run_lengths(num_ids, rng) for _ in range(400_000 // num_ids + 100)])
    assert lengths.max() <= longest_run(num_ids) <= HOTTEST_SHARE * num_ids
    distinct, _ = shares(lengths)
    whole_ranges = [index for index, high in enumerate(BIN_EDGES[1:]) if high < longest_run(num_ids)]
    np.testing.assert_allclose(distinct[whole_ranges], np.array(SHARE_OF_DISTINCT)[whole_ranges], atol=0.015)


@pytest.mark.parametrize("num_ids", [0, 1, 2, 17, 5000])
def test_run_lengths_add_up(num_ids: int) -> None:
    lengths = draw_run_lengths(num_ids, np.random.default_rng(2))
    assert lengths.sum() == num_ids
    assert (lengths > 0).all()


def test_ids_are_spread_over_all_rows_in_random_order() -> None:
    rng = np.random.default_rng(3)
    ids = np.concatenate([draw_ids(100_000, 10_240, rng) for _ in range(30)])
    distinct = np.unique(ids)
    assert distinct.min() >= 0
    assert distinct.max() < 100_000
    quarters, _ = np.histogram(distinct, 4, range=(0, 100_000))
    np.testing.assert_allclose(quarters / len(distinct), 0.25, atol=0.02)
    # Sorted runs would give a share of equal neighbours near 1 - 1 / mean run; shuffled, only the hot ids do.
    assert (ids[1:] == ids[:-1]).mean() < 0.1


def test_ids_recur_as_often_as_their_run_lengths_say() -> None:
    ids = draw_ids(1_000_000, 20_000, np.random.default_rng(4))
    lengths = draw_run_lengths(20_000, np.random.default_rng(4))
    _, counts = np.unique(ids, return_counts=True)
    np.testing.assert_array_equal(np.sort(counts), np.sort(lengths))


def test_the_same_seed_draws_the_same_ids() -> None:
    first, second = (draw_ids(1000, 500, np.random.default_rng(5)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_table_with_too_few_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="only 10 rows; use a larger table or fewer ids"):
        draw_ids(10, 5000, np.random.default_rng(0))


def test_rows_of_a_population_come_back_by_their_popularity() -> None:
    population = Population(20_000, np.random.default_rng(4))
    batches = [population.draw_ids(20_000) for _ in range(30)]
    assert all(len(ids) == 20_000 for ids in batches)
    seen = np.zeros(20_000)
    for ids in batches:
        distinct, counts = np.unique(ids, return_counts=True)
        seen[distinct] += 1
        # Of a batch's rows the more popular ones recur more often.
        popular = population.popularity[distinct]
        assert counts[popular > np.median(popular)].mean() > 2 * counts[popular <= np.median(popular)].mean()
    by_popularity = seen[np.argsort(population.popularity)]
    quarters = [part.mean() / 30 for part in np.split(by_popularity, 4)]
    assert quarters[0] < 0.03
    assert quarters[3] > 0.2
