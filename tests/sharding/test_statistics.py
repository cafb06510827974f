"""Access statistics of tables: their formulas, and counts in batches."""

import json
from collections import Counter
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonemb as te
from tritonemb.data import make_synthetic
from tritonemb.nn.collections import EmbeddingBagCollection
from tritonemb.sharding.planner import statistics
from tritonemb.sharding.planner.statistics import TableStats, collect_stats

ROWS = 1_000_000


def batch_of(**ids):
    return te.KeyedJaggedTensor.from_lists(ids)


def one_id_a_sample(ids):
    return te.KeyedJaggedTensor(["f"], torch.from_numpy(ids), lengths=torch.ones(len(ids), dtype=torch.int64))


def table(rows=ROWS, **options):
    return te.TableConfig("t", rows, 8, features=["f"], **options)


@pytest.fixture(scope="module")
def zipf():
    """Ids, a sampler of more, and what was counted in batches of 4,096."""
    random = np.random.default_rng(0)
    shares = np.arange(1, ROWS + 1) ** -1.1
    edges, where = np.cumsum(shares / shares.sum()), random.permutation(ROWS)

    def draw(count):
        return where[np.minimum(np.searchsorted(edges, random.random(count)), ROWS - 1)]

    batches = [draw(4096) for _ in range(250)]
    return batches, draw, collect_stats(map(one_id_a_sample, batches), [table()])["t"]


def test_of_a_few_ids_everything_is_as_counted():
    batches = [batch_of(f=[[0, 1], [1]], g=[[3], []]), batch_of(f=[[1]], g=[[1]])]
    config = te.TableConfig("t", 4, 8, features=["f", "g"])
    stats = collect_stats(batches, [config])["t"]
    ids = [0, 1, 1, 3, 1, 1]
    counts = Counter(ids)
    assert stats.pooling_factor == len(ids) / 3
    assert stats.row_share == tuple(counts[row] / len(ids) for row in range(4))
    assert stats.hotness == pytest.approx([(1, 4 / 6), (2, 2 / 6)])
    assert stats.share(1, 2, 4) == pytest.approx(4 / 6)
    assert stats.share(0.5, 1, 4) == pytest.approx((1 / 6 + 4 / 6) / 2)
    assert stats.share(0, 2, 8) == pytest.approx(1 / 6)  # of another number of rows, in proportion
    plain = TableStats(hotness=stats.hotness)
    for size in (1, 2, 7):
        expected = {row: 1 - (1 - count / len(ids)) ** size for row, count in counts.items()}
        assert plain.distinct(4, size) == pytest.approx(sum(expected.values()))
        assert plain.misses(4, size, 1) == pytest.approx(expected[0] + expected[3])
        assert plain.misses(4, size, 2) == pytest.approx(expected[0])
        assert plain.misses(4, size, 9) == 0
    assert stats.repeats == 0  # the first batch uses more rows than chance would


def test_without_measurements_all_rows_are_alike():
    stats = TableStats(2.0)
    assert stats.distinct(100, 50) == pytest.approx(100 * (1 - 0.99**50))
    assert stats.misses(100, 50, 25) == pytest.approx(75 * (1 - 0.99**50))
    assert stats.distinct(10**12, 1000) == pytest.approx(1000)
    assert stats.distinct(1, 5) == 1
    assert stats.distinct(5, 0) == stats.distinct(0, 5) == stats.misses(5, 5, 5) == 0
    assert stats.share(10, 20, 100) == pytest.approx(0.2)


def test_groups_have_fewer_rows_where_the_table_has():
    stats = TableStats(hotness=((10, 0.5), (90, 0.5)))
    assert stats.distinct(1000, 50) == stats.distinct(100, 50)
    assert stats.distinct(10, 10**6) == pytest.approx(10)


def test_distinct_rows_of_zipf_batches(zipf):
    batches, draw, stats = zipf
    for size in (512, 4096, 32_768):
        measured = np.mean([len(np.unique(draw(size))) for _ in range(10)])
        assert stats.distinct(ROWS, size) == pytest.approx(measured, rel=0.05)
    assert stats.distinct(ROWS, 4096) == pytest.approx(np.mean([len(np.unique(ids)) for ids in batches]), rel=0.02)
    assert stats.repeats < 0.02
    assert len(stats.hotness) <= statistics.MAX_GROUPS
    assert stats.pooling_factor == 1
    assert len(stats.row_share) == 64


def test_misses_of_a_cache_with_the_hottest_rows(zipf):
    _, draw, stats = zipf
    ids, counts = np.unique(np.concatenate([draw(4096) for _ in range(500)]), return_counts=True)
    by_use = ids[np.argsort(-counts)]
    for cached in (100, 3000, 20_000):
        measured = np.mean([len(np.setdiff1d(draw(4096), by_use[:cached])) for _ in range(10)])
        assert stats.misses(ROWS, 4096, cached) == pytest.approx(measured, rel=0.1)


def test_memory_is_bounded(zipf, monkeypatch):
    batches, _, exact = zipf
    monkeypatch.setattr(statistics, "MAX_IDS", 4096)
    counts, most = statistics._Counts(["f"], "t", ROWS), 0
    for ids in batches:
        counts.add({"f": (len(ids), ids)}, "")
        most = max(most, len(counts.ids))
    stats = counts.stats()
    assert most <= 4096 + 1024 + 4096  # with a batch
    assert len(counts.ids) <= 4096
    hottest, times = np.unique(np.concatenate(batches), return_counts=True)
    for place in np.argsort(-times)[:10]:
        where = np.flatnonzero(counts.ids == hottest[place])
        assert counts.counts[where].tolist() == [times[place]]
        assert counts.weights[where].tolist() == [1]
    for size in (512, 4096, 32_768):
        assert stats.distinct(ROWS, size) == pytest.approx(exact.distinct(ROWS, size), rel=0.1)
    assert stats.misses(ROWS, 4096, 3000) == pytest.approx(exact.misses(ROWS, 4096, 3000), rel=0.1)


@pytest.mark.parametrize("rows", [5000, 100_000])
@pytest.mark.parametrize("known", [True, False])
def test_uniform_ids(rows, known):
    ids = np.random.default_rng(1).integers(0, rows, 40_000)
    stats = collect_stats([one_id_a_sample(ids)], [table(rows)] if known else None)["t" if known else "f"]
    assert sum(count for count, _ in stats.hotness) == pytest.approx(rows, rel=0.1)
    for size in (1000, 40_000, 200_000):
        assert stats.distinct(rows, size) == pytest.approx(TableStats().distinct(rows, size), rel=0.05)
    assert stats.repeats < 0.03
    assert stats.row_share == (pytest.approx([1 / 64] * 64, rel=0.2) if known else ())


def test_ids_that_repeat_within_batches():
    random = np.random.default_rng(2)
    batches = [np.repeat(random.integers(0, ROWS, 500), 4) for _ in range(20)]
    stats = collect_stats(map(one_id_a_sample, batches), [table()])["t"]
    assert stats.repeats == pytest.approx(0.75, abs=0.01)
    assert stats.distinct(ROWS, 2000) == pytest.approx(500, rel=0.02)


class Step(NamedTuple):
    labels: torch.Tensor
    micro_batches: list


def test_what_may_hold_batches():
    one, two = batch_of(f=[[1, 2]], g=[[5]]), batch_of(f=[[3]], g=[[5]])
    expected = collect_stats([one, two])
    assert sorted(expected) == ["f", "g"]
    assert expected["f"].pooling_factor == 1.5
    for data in ([(one, 1.0), (two, 1.0)], [{"x": one}, {"x": two}], iter([one, two]), [one, two, two]):
        assert collect_stats(data, num_batches=2) == expected
    joint = collect_stats([Step(torch.ones(2), [one, two])])
    assert joint["f"].pooling_factor == 1.5
    assert collect_stats([one, two], num_batches=1)["f"].pooling_factor == 2
    module = torch.nn.Sequential(EmbeddingBagCollection([te.TableConfig("t", 9, 8, features=["g"])]))
    assert list(collect_stats([one], module)) == ["t"]


def test_a_data_set():
    data = make_synthetic(1000, 100)
    measured = collect_stats(data, data.tables(8), num_batches=1)
    assert list(measured) == [feature.name for feature in data.features]
    assert all(
        len(stats.row_share) == min(64, f.num_embeddings)
        for f, stats in zip(data.features, measured.values(), strict=True)
    )


def test_ids_of_dynamic_tables_are_any():
    config = te.TableConfig("t", None, 8, features=["f"], capacity=100)
    stats = collect_stats([batch_of(f=[[-5, 2**62], [-5]])], [config])["t"]
    assert (stats.row_share, stats.hotness) == ((), ((1, pytest.approx(2 / 3)), (1, pytest.approx(1 / 3))))


def test_a_table_that_is_not_used():
    stats = collect_stats([batch_of(f=[[], []])], [table(10)])["t"]
    assert stats.pooling_factor == stats.distinct(10, 0) == 0


def test_as_json(zipf):
    stats = zipf[2]
    assert TableStats(**json.loads(json.dumps(asdict(stats)))) == stats


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), max_size=5),
    st.integers(1, 3000),
    st.lists(st.integers(0, 10**6), min_size=2, max_size=2),
    st.integers(0, 3000),
)
def test_distinct_rows_are_no_more_than_ids_and_rows(groups, rows, sizes, cached):
    total = sum(share for _, share in groups)
    groups = sorted(((rows, share / total) for rows, share in groups), key=lambda group: -group[1] / group[0])
    stats = TableStats(hotness=tuple(groups))
    few, many = (stats.distinct(rows, size) for size in sorted(sizes))
    assert 0 <= few <= many * (1 + 1e-9)
    assert many <= min(max(sizes), rows) * (1 + 1e-9)
    assert 0 <= stats.misses(rows, sizes[0], cached) <= stats.distinct(rows, sizes[0]) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"pooling_factor": -1.0}, ValueError, "pooling_factor must be finite and not negative, got -1"),
        ({"pooling_factor": "1"}, TypeError, "pooling_factor must be a number, got '1'"),
        ({"row_share": [0.5, 0.4]}, ValueError, "row_share must add up to 1, got 0.9"),
        ({"row_share": 1.0}, TypeError, "hotness must be pairs and row_share numbers"),
        ({"hotness": [(1, 0.5, 3)]}, TypeError, "hotness must be pairs and row_share numbers"),
        ({"hotness": [(1, 0.1), (2, 0.9)]}, ValueError, "hottest first"),
        ({"hotness": [(0, 1.0)]}, ValueError, "groups of some rows"),
        ({"hotness": [(1, float("nan"))]}, ValueError, "hotness must be finite"),
        ({"repeats": 1.0}, ValueError, "repeats must be below 1"),
        ({"pooling": 1.0}, TypeError, "unexpected keyword argument 'pooling'"),
    ],
)
def test_what_is_refused(options, error, text):
    with pytest.raises(error, match=text):
        TableStats(**options)


def test_rows_that_a_table_does_not_have():
    with pytest.raises(ValueError, match="5 rows from row 6 on are out of range for a table of 10 rows"):
        TableStats().share(6, 5, 10)


@pytest.mark.parametrize(
    ("data", "options", "error", "text"),
    [
        ([], {}, ValueError, "there are no batches"),
        ([batch_of(g=[[1]])], {"tables": [table()]}, ValueError, r"batch 1 lacks feature 'f' of table 't'.*\['g'\]"),
        ([batch_of(f=[[1]]), batch_of(f=[[2, 10]])], {"tables": [table(10)]}, ValueError, "batch 2: feature 'f' has "
         "the id 10, but table 't' has 10 rows"),
        ([batch_of(f=[[-1]])], {"tables": [table(10)]}, ValueError, "id -1"),
        (batch_of(f=[[1]]), {}, TypeError, "data must be an iterable of batches"),
        ([torch.ones(3)], {}, TypeError, "batch 1 is a Tensor without a KeyedJaggedTensor"),
        ([batch_of(f=[[1]])], {"tables": [7]}, TypeError, "TableConfigs"),
        ([batch_of(f=[[1]])], {"tables": [table(), table()]}, ValueError, "two tables are named 't'"),
        ([batch_of(f=[[1]])], {"tables": torch.nn.Linear(1, 1)}, ValueError, "there are no tables"),
        ([batch_of(f=[[1]])], {"num_batches": 0}, ValueError, "num_batches must be at least 1"),
        ([te.KeyedJaggedTensor(["f"], torch.ones(1), lengths=torch.ones(1, dtype=torch.int64))], {}, TypeError,
         "int32 or int64"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured(data, options, error, text):
    with pytest.raises(error, match=text):
        collect_stats(data, **options)
