import math
from contextlib import nullcontext

import pytest
import torch

from tritonemb.training import binary_metrics
from tritonemb.training.metrics import predict_logits


def test_metrics_by_hand():
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0])
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0])
    metrics = binary_metrics(logits, labels, seconds=2.0)
    log_loss = sum(math.log1p(math.exp(x)) for x in (-2.0, -1.0, 0.5, 0.0)) / 4
    assert metrics.auc == pytest.approx(3 / 4)
    assert metrics.log_loss == pytest.approx(log_loss)
    assert metrics.normalized_entropy == pytest.approx(log_loss / math.log(2))
    assert (metrics.num_samples, metrics.samples_per_second) == (4, 2.0)


def test_predicting_the_base_rate_has_normalized_entropy_one():
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    metrics = binary_metrics(torch.full((4,), math.log(1 / 3)), labels)
    assert metrics.normalized_entropy == pytest.approx(1.0)
    assert metrics.auc == 0.5


def test_ties_count_half_and_large_logits_stay_distinct():
    labels = torch.tensor([0.0, 1.0, 1.0])
    assert binary_metrics(torch.tensor([1.0, 1.0, 2.0]), labels).auc == pytest.approx(0.75)
    assert binary_metrics(torch.tensor([20.0, 21.0, 22.0]), labels).auc == 1.0  # equal as float32 probabilities


@pytest.mark.parametrize("shift", [-1000, -40, 0, 30, 40, 1000])
def test_logits_are_ranked_however_large_they_are(shift):
    """Their probabilities would be the same from 37 on, in float64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, generator=generator).round(decimals=2) + shift
    labels = (torch.rand(500, generator=generator) < (logits - shift).sigmoid()).float()
    pairs = logits[labels == 1, None] - logits[None, labels == 0]
    expected = ((pairs > 0).double() + 0.5 * (pairs == 0)).mean()
    assert binary_metrics(logits, labels).auc == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(3), torch.ones(3), "all 3 labels are the same"),
        (torch.zeros(3), torch.zeros(2), r"got \(3,\) and \(2,\)"),
        (torch.zeros(2, 1), torch.zeros(2, 1), r"must be \[N\]"),
        (torch.tensor([0.0, math.nan]), torch.tensor([0.0, 1.0]), "1 of 2 logits are NaN"),
    ],
)
def test_undefined_metrics_are_refused(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        binary_metrics(logits, labels)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_in_its_mode_again_after_predictions(training, fails):
    """And so are its modules, some of which may be frozen, also where the data fail."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1), torch.nn.Dropout()).train(training)
    model[1].train(not training)
    seen = []

    def batches():
        seen.append([module.training for module in model.modules()])
        if fails:
            raise ValueError("bad data")
        yield from ()

    with pytest.raises(ValueError, match="bad data") if fails else nullcontext():
        predict_logits(model, batches(), torch.device("cpu"))
    assert seen == [[False] * 4]
    assert [module.training for module in model.modules()] == [training, training, not training, training]
