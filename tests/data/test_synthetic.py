import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tritonemb.data import datasets as synthetic
from tritonemb.data import make_synthetic


def test_best_auc_leaves_room_for_learning_and_for_chance():
    data = make_synthetic(num_train=1_000, num_test=20_000, seed=1)
    assert data.best_auc is not None
    assert 0.7 < data.best_auc < 0.95


@given(st.lists(st.tuples(st.sampled_from([-1e30, -1.0, 0.0, 36.0, 37.0, 1e30]), st.booleans()), min_size=2))
def test_auc_is_the_share_of_pairs_in_order(rows):
    clicks, peers = ([logit for logit, label in rows if label == expected] for expected in (True, False))
    assume(clicks and peers)
    wins = sum((click > other) + (click == other) / 2 for click in clicks for other in peers)
    logits, labels = torch.tensor([row[0] for row in rows]), torch.tensor([float(row[1]) for row in rows])
    assert synthetic.exact_auc(logits, labels) == wins / (len(clicks) * len(peers))


def test_labels_follow_the_hidden_effects():
    """Users with many clicks among the training rows click more among the test rows too."""
    data = make_synthetic(num_train=50_000, num_test=50_000, seed=0)
    users = [rows.columns[0].values.long() for rows in (data.train, data.test)]
    counts = [torch.bincount(ids, minlength=2_000).double() for ids in users]
    clicks = [torch.bincount(ids, rows.labels.double(), minlength=2_000) for ids, rows in
              zip(users, (data.train, data.test), strict=True)]  # fmt: skip
    frequent = (counts[0] > 200) & (counts[1] > 200)
    rates = torch.stack([(click / count)[frequent] for click, count in zip(clicks, counts, strict=True)])
    assert int(frequent.sum()) > 10
    assert torch.corrcoef(rates)[0, 1] > 0.9


def test_ids_are_skewed_and_the_seed_decides():
    first, second, other = (make_synthetic(2_000, 500, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first.train.labels, second.train.labels)
    assert torch.equal(first.train.columns[5].values, second.train.columns[5].values)
    assert not torch.equal(first.train.labels, other.train.labels)
    counts = torch.bincount(first.train.columns[0].values).sort(descending=True).values
    assert counts[0] > 20 * counts[counts > 0].double().median()


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 10 and 0"):
        make_synthetic(10, 0)
    with pytest.raises(ValueError, match="all test rows have the same label"):
        make_synthetic(10, 1)
