"""Top items in blocks and ranking metrics, against loops over a matrix of all scores."""

from __future__ import annotations

import math

import pytest
import torch

from tritonemb.training import RankingMetrics, top_items

NUM_QUERIES, NUM_ITEMS = 13, 37


def ranked(queries, items, excluded=()):
    """All items of each query by score, ties by item; -1 in place of excluded ones, last."""
    scores = (queries.double() @ items.double().T).tolist()
    for query, item in excluded:
        scores[query][item] = -math.inf
    orders = [sorted(range(len(row)), key=lambda item, row=row: (-row[item], item)) for row in scores]
    pairs = zip(scores, orders, strict=True)
    return [[item if row[item] > -math.inf else -1 for item in order] for row, order in pairs]


def vectors(seed=0):
    """Small integers, so that sums are exact and many scores are equal."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-2, 3, (n, 3), generator=generator).float() for n in (NUM_QUERIES, NUM_ITEMS)]


@pytest.mark.parametrize("block_items", [1, 5, 37, 100])
@pytest.mark.parametrize("k", [1, 4, 50])
def test_top_items_are_those_of_a_full_sort(block_items, k):
    queries, items = vectors()
    scores, numbers = top_items(queries, items, k, block_items=block_items)
    assert numbers.tolist() == [row[:k] for row in ranked(queries, items)]
    assert torch.equal(scores, (queries @ items.T).gather(1, numbers))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(top_items(queries, items, k, block_items=block_items)[0], scores)


def test_excluded_items_are_left_out_and_shards_can_be_merged():
    queries, items = vectors(1)
    excluded = [(q, i) for q in range(NUM_QUERIES) for i in range(NUM_ITEMS) if (q * i) % 3 == 0]
    pairs = tuple(torch.tensor(column) for column in zip(*excluded, strict=True))
    expected = [row[:6] for row in ranked(queries, items, excluded)]
    assert top_items(queries, items, 6, pairs, block_items=4)[1].tolist() == expected
    parts = [top_items(queries, items[a:b], 6, pairs, first_item=a, block_items=7) for a, b in ((0, 20), (20, 37))]
    scores, numbers = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :6]
    assert numbers.gather(1, order).tolist() == expected
    # An item that was left out is no hit, whatever the cutoff.
    metrics, relevant = RankingMetrics((NUM_ITEMS, 50)), torch.zeros(NUM_QUERIES, dtype=torch.int64)
    metrics.update(top_items(queries, items, 50, pairs)[1], relevant, torch.arange(NUM_QUERIES + 1))
    assert set(metrics.compute().values()) == {0.0}


def test_metrics_are_those_of_loops_and_batches_add_up():
    queries, items = vectors(2)
    generator = torch.Generator().manual_seed(3)
    relevant = [torch.randperm(NUM_ITEMS, generator=generator)[: q % 4].tolist() for q in range(NUM_QUERIES)]
    ks, totals, count = (1, 5, 50), {}, 0
    for row, positives in zip(ranked(queries, items), relevant, strict=True):
        count += bool(positives)
        for k in ks if positives else ():
            hits = [position for position, item in enumerate(row[:k], 1) if item in positives]
            values = {
                "recall": len(hits) / len(positives),
                "hit_rate": float(bool(hits)),
                "ndcg": sum(1 / math.log2(p + 1) for p in hits)
                / sum(1 / math.log2(p + 1) for p in range(1, min(k, len(positives)) + 1)),
                "mrr": 1 / hits[0] if hits else 0.0,
            }
            for name, value in values.items():
                totals[f"{name}@{k}"] = totals.get(f"{name}@{k}", 0.0) + value
    metrics, parts = RankingMetrics(ks), [RankingMetrics(ks), RankingMetrics(ks)]
    for start in range(0, NUM_QUERIES, 4):
        batch = relevant[start : start + 4]
        values = torch.tensor([item for items_of_query in batch for item in items_of_query], dtype=torch.int64)
        offsets = torch.tensor([0, *map(len, batch)]).cumsum(0)
        top = top_items(queries[start : start + 4], items, max(ks), block_items=10)[1]
        for accumulator in (metrics, parts[start % 8 // 4]):  # as two ranks
            accumulator.update(top, values, offsets)
    assert metrics.compute() == pytest.approx({name: total / count for name, total in totals.items()}, rel=1e-12)
    parts[0].sums += parts[1].sums
    assert parts[0].compute() == pytest.approx(metrics.compute(), rel=1e-12)


@pytest.mark.parametrize(
    ("items", "relevant", "recall"),
    [
        ([[1, 2, 3], [4, -1, -1]], [[7], [4]], 0.5),  # -1 fills a query of fewer items, and is never a hit
        ([[1, 2], [-1, -1]], [[5], [5]], 0.0),
        ([[1, 2], [-1, -1]], [[5], [-1]], 0.0),
        ([[], []], [[5], [1]], 0.0),
        ([[5, 2], [1, 2]], [[1], [-2]], 0.0),
        ([[-3, -5], [-4, -6]], [[-7], [-9]], 0.0),  # ids of dynamic tables may be negative
        ([[-3, -5], [-4, -(2**63)]], [[-5], [-(2**63), -3]], 0.75),
        ([[2**62, 1], [2**62, 2]], [[1], [2**62]], 1.0),
    ],
)
def test_hits_are_of_the_same_query_whatever_the_ids(items, relevant, recall):
    offsets = torch.tensor([0, *map(len, relevant)]).cumsum(0)
    metrics = RankingMetrics((k := max(1, len(items[0])),))
    values = torch.tensor([item for row in relevant for item in row])
    metrics.update(torch.tensor(items, dtype=torch.int64), values, offsets)
    assert metrics.compute()[f"recall@{k}"] == recall


def test_a_relevant_item_counts_once():
    metrics, single = RankingMetrics((1, 3)), RankingMetrics((1, 3))
    ranked_items = torch.tensor([[7, 8, 9], [4, 5, -1], [1, 2, 3]])
    metrics.update(ranked_items, torch.tensor([9, 7, 9, 7, 6, 4, 4]), torch.tensor([0, 5, 7, 7]))
    single.update(ranked_items, torch.tensor([7, 9, 6, 4]), torch.tensor([0, 3, 4, 4]))
    assert torch.equal(metrics.sums, single.sums)
    assert metrics.compute()["recall@3"] == pytest.approx((2 / 3 + 1) / 2)


@pytest.mark.parametrize(
    ("items", "relevant", "offsets", "message"),
    [
        ([[1, 2], [3, 3]], [1, 3], [0, 1, 2], "item 3 is ranked twice for query 1"),
        ([[1, 2]], [1, 3], [0, 1, 2], r"got \[1, 2\], \[2\] and \[3\]"),
        ([[1, 2]], [1, 3], [0, 1], r"expected items \[B, K\], relevant \[N\] and offsets \[B \+ 1\]"),
    ],
)
def test_rankings_that_do_not_fit_are_errors(items, relevant, offsets, message):
    with pytest.raises(ValueError, match=message):
        RankingMetrics().update(*map(torch.tensor, (items, relevant, offsets)))


def test_bad_input():
    queries, items = vectors()
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        top_items(queries, items, 0)
    with pytest.raises(ValueError, match="scores of items 5 and following are NaN"):
        top_items(queries, items * torch.nan, 3, first_item=5)
    with pytest.raises(ValueError, match="ks must be cutoffs of at least 1"):
        RankingMetrics([])
    with pytest.raises(ValueError, match="no query has relevant items"):
        RankingMetrics().compute()
