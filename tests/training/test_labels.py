"""Loss and metrics of several labels and of row weights, against sums over the rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tritonemb as te
from tests.training.jobs import Record
from tritonemb.data import Column, Dataset, Feature, Rows
from tritonemb.data.batch import gather_batch
from tritonemb.training import binary_metrics
from tritonemb.training.metrics import grouped_auc, label_metrics, predict_logits
from tritonemb.training.step import label_scales, label_totals, loss_of

NAMES = ("buy", "like")
NUM_ROWS, IDS = 203, 20


def data(labels: int = 2, weighted: bool = True, missing: float = 0.4) -> Dataset:
    """Labels depend on id and dense value; in the first 50 rows only the first one is known."""
    random = np.random.default_rng(0)
    ids, dense = random.integers(0, IDS, NUM_ROWS), random.standard_normal((NUM_ROWS, 1)).astype(np.float32)
    logits = np.stack([dense[:, 0] + ids % 2, dense[:, 0] - ids % 3], 1)
    values = (random.random((NUM_ROWS, 2)) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    hidden = random.random((NUM_ROWS, 2)) < missing
    hidden[:, 0] &= ~hidden[:, 1]
    hidden[:50] = [False, True]
    values = np.where(hidden, np.nan, values).astype(np.float32) if labels == 2 else values[:, 0]
    weights = random.integers(0, 4, NUM_ROWS).astype(np.float32) / 2 if weighted else None
    rows = Rows(
        torch.from_numpy(dense), (Column(torch.from_numpy(ids)),), torch.from_numpy(values),
        None if weights is None else torch.from_numpy(weights),
    )  # fmt: skip
    names = NAMES if labels == 2 else ()
    return Dataset("d", (Feature("user", IDS),), rows, rows.slice(100, NUM_ROWS), rows.slice(0, 160), labels=names)


class Linear(nn.Module):
    def __init__(self, num_labels: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        tables = [te.TableConfig("user", IDS, 4)]
        self.embeddings = te.nn.EmbeddingBagCollection(tables, te.optim.SGD(lr=0.1))
        self.linear = nn.Linear(5, num_labels or 1)
        self.num_labels = num_labels

    def forward(self, dense, sparse):
        logits = self.linear(torch.cat([dense, self.embeddings(sparse)], 1))
        return logits if self.num_labels else logits.squeeze(1)


def fit(rank: int, size: int, batch_size: int, accumulate: int = 1, **options):
    rows = data(**options)
    model = Linear(len(rows.labels))
    model = te.HybridParallel(model) if size > 1 else model
    record = Record()
    trainer = te.Trainer(
        model, rows, dense_optimizer=torch.optim.SGD, dense_lr=0.1, batch_size=batch_size, accumulate=accumulate,
        epochs=2, log_every=1, verbose=False, callbacks=[record], group_by="user",
    )  # fmt: skip
    trainer.fit()
    return record.losses, trainer.evaluate("test")


def slow_loss(logits, labels, weights) -> float:
    """Sum over labels of the weighted mean over rows that have the label."""
    total = 0.0
    for label in range(logits.shape[1]):
        rows = [row for row in range(len(logits)) if not math.isnan(labels[row, label])]
        losses = [math.log1p(math.exp(-logits[row, label] * (2 * labels[row, label] - 1))) for row in rows]
        mass = sum(float(weights[row]) for row in rows)
        total += sum(float(weights[row]) * loss for row, loss in zip(rows, losses, strict=True)) / mass
    return total


def test_the_loss_of_batches_adds_up_to_its_formula():
    rows = data().train
    logits = torch.randn(NUM_ROWS, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    parts = [slice(0, 50), slice(50, 51), slice(51, 51), slice(51, NUM_ROWS)]
    batches = [gather_batch(rows, ("user",), part) for part in parts]
    scales = label_scales(label_totals(batches, 2), NUM_ROWS, torch.device("cpu"))
    means = [loss_of(logits[part], batch, scales) for part, batch in zip(parts, batches, strict=True)]
    loss = sum(mean * (len(batch) / NUM_ROWS) for mean, batch in zip(means, batches, strict=True))
    assert loss.item() == pytest.approx(slow_loss(logits.detach(), rows.labels, rows.weights), rel=1e-5)
    loss.backward()
    assert logits.grad[rows.labels.isnan()].abs().max() == 0
    unknown = [gather_batch(rows, ("user",), slice(0, 50))]  # no row has the second label
    scales = label_scales(label_totals(unknown, 2), 50, torch.device("cpu"))
    expected = slow_loss(logits[:50, :1].detach(), rows.labels[:50, :1], rows.weights)
    assert loss_of(logits[:50], unknown[0], scales).item() == pytest.approx(expected, rel=1e-5)


def test_one_label_without_weights_is_the_mean_as_it_was():
    batch = gather_batch(data(labels=1, weighted=False).train, ("user",), slice(0, NUM_ROWS))
    logits = torch.randn(NUM_ROWS, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loss_of(logits, batch), F.binary_cross_entropy_with_logits(logits, batch.labels))
    assert label_totals([batch], 0) == ()
    with pytest.raises(ValueError, match="the data set needs `labels`, or `has_weights`"):
        label_totals([gather_batch(data().train, ("user",), slice(0, 5))], 0)
    assert label_scales((), NUM_ROWS, torch.device("cpu")) is None


@pytest.mark.parametrize("options", [{}, {"weighted": False}, {"labels": 1}], ids=str)
def test_accumulation_divides_a_step(options):
    losses, metrics = fit(0, 1, 60, **options)
    other_losses, other_metrics = fit(0, 1, 20, accumulate=3, **options)
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in other_losses], rel=1e-5)
    assert metrics.values(["auc", "log_loss", "gauc"]) == pytest.approx(
        other_metrics.values(["auc", "log_loss", "gauc"]), rel=1e-4
    )
    assert losses[-1][1] < losses[0][1]


@pytest.mark.more
def test_two_ranks_train_and_evaluate_as_one_process(ranks):
    losses, metrics = fit(0, 1, 60)
    for other_losses, other_metrics in ranks(2).run(fit, 2, 30):
        assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in other_losses], rel=1e-4)
        names = ["auc", "log_loss", "normalized_entropy", "gauc", "gauc_unweighted"]
        assert metrics.values(names) == pytest.approx(other_metrics.values(names), rel=1e-4)


def test_a_row_of_weight_k_counts_as_k_rows():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-9, 9, (NUM_ROWS,), generator=generator) / 3  # some are equal
    labels = torch.randint(2, (NUM_ROWS,), generator=generator).float()
    weights, groups = (torch.randint(n, (NUM_ROWS,), generator=generator) for n in (4, 30))
    metrics = binary_metrics(logits, labels, groups=groups, weights=weights)
    repeated = [t.repeat_interleave(weights) for t in (logits, labels, groups)]
    expected = binary_metrics(*repeated[:2], groups=repeated[2])
    for name in ("auc", "log_loss", "normalized_entropy", "best_threshold", "best_f1"):
        assert getattr(metrics, name) == pytest.approx(getattr(expected, name), rel=1e-12), name
    gauc = grouped_auc(logits, labels, groups, weights)
    assert gauc[0] == pytest.approx(expected.gauc, rel=1e-12)
    first = logits.argsort(stable=True)[:21]  # the first of ten bins
    mean = (logits[first].double().sigmoid() * weights[first]).sum() / weights[first].sum()
    assert metrics.calibration[0][:2] == (21, pytest.approx(float(mean), rel=1e-12))


def test_metrics_of_labels_are_those_of_the_rows_that_have_them():
    rows = data().test
    logits = torch.randn(len(rows), 2, generator=torch.Generator().manual_seed(0))
    groups = rows.columns[0].values.long()
    metrics = label_metrics(logits, rows.labels, NAMES, None, groups, rows.weights)
    for index, name in enumerate(NAMES):
        known = ~rows.labels[:, index].isnan()
        assert metrics.labels[name] == binary_metrics(
            logits[known, index], rows.labels[known, index], None, groups[known], rows.weights[known]
        )
        assert metrics.labels[name].num_samples == int(known.sum()) < metrics.num_samples == len(rows)
    assert metrics.auc == pytest.approx(sum(metrics.labels[name].auc for name in NAMES) / 2)
    assert metrics.values(["auc"])["auc[like]"] == metrics.labels["like"].auc
    same = rows.labels.clone()
    same[:, 1] = 0
    with pytest.raises(ValueError, match="label 'like': all 103 labels are the same"):
        label_metrics(logits, same, NAMES, None)


def test_evaluations_are_those_of_the_predictions():
    rows = data()
    model = Linear(2)
    trainer = te.Trainer(model, rows, batch_size=30, verbose=False, group_by="user")
    with rows.open("test", 40) as stream:
        logits, labels = predict_logits(model, stream, torch.device("cpu"))
    assert trainer.predict("test").shape == (103, 2)
    np.testing.assert_array_equal(labels, rows.test.labels)
    groups = rows.test.columns[0].values.long()
    expected = label_metrics(logits, labels, NAMES, None, groups, rows.test.weights)
    assert trainer.evaluate("test").values(["auc", "gauc"]) == pytest.approx(expected.values(["auc", "gauc"]), rel=1e-6)
    with pytest.raises(ValueError, match=r"must return logits \[30, 2\], got shape \[30\]"):
        te.Trainer(Linear(0), rows, batch_size=30, verbose=False).fit()
