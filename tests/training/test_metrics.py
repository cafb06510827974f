import math
from contextlib import nullcontext

import pytest
import torch

import tritonemb as te
from tests.training import jobs
from tritonemb.data import Batch
from tritonemb.training import binary_metrics, metrics
from tritonemb.training.metrics import GroupRecorder, grouped_auc, label_metrics, predict_logits
from tritonemb.training.ranks import UndefinedMetricsError


def test_metrics_by_hand():
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0])
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0])
    metrics = binary_metrics(logits, labels, seconds=2.0)
    log_loss = sum(math.log1p(math.exp(x)) for x in (-2.0, -1.0, 0.5, 0.0)) / 4
    assert metrics.auc == pytest.approx(3 / 4)
    assert metrics.log_loss == pytest.approx(log_loss)
    assert metrics.normalized_entropy == pytest.approx(log_loss / math.log(2))
    assert (metrics.num_samples, metrics.samples_per_second) == (4, 2.0)


class DeviceTensor(torch.Tensor):
    """Tensor that NumPy cannot read before it is copied to the CPU, as on a GPU."""

    def numpy(self, **_):
        raise TypeError("can't convert a device tensor to numpy")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_metrics_of_tensors_on_a_device_are_those_on_the_cpu():
    logits, labels = torch.tensor([2.0, -1.0, 0.5, 0.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert binary_metrics(logits.as_subclass(DeviceTensor), labels.as_subclass(DeviceTensor)) == binary_metrics(
        logits, labels
    )


class Narrow(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(13, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def forward(self, dense: torch.Tensor, sparse: object) -> torch.Tensor:
        return self.layers(dense).squeeze(1)


@pytest.mark.parametrize("width", [2, 4, 8, 11, 15])
def test_a_logit_does_not_depend_on_the_position_of_its_row(monkeypatch, width):
    """AMD's processors round rows of narrow layers by position; with the mode forced, others compute as they do."""
    torch.manual_seed(0)
    model, dense, size = Narrow(width), torch.randn(528, 13), 528
    sparse, order = te.KeyedJaggedTensor.from_lists({"a": [[]] * size}), torch.randperm(size)
    batches = [Batch(rows, sparse, torch.zeros(size)) for rows in (dense, dense[order])]
    expected = model(dense, sparse).detach()
    for forced in (False, True):
        if forced:
            monkeypatch.setattr(metrics, "rounds_by_position", lambda: True)
        logits, permuted = (predict_logits(model, [batch], torch.device("cpu"))[0] for batch in batches)
        assert torch.equal(logits[order], permuted)
        torch.testing.assert_close(logits, expected)


def test_predicting_the_base_rate_has_normalized_entropy_one():
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    metrics = binary_metrics(torch.full((4,), math.log(1 / 3)), labels)
    assert metrics.normalized_entropy == pytest.approx(1.0)
    assert metrics.auc == 0.5


def test_ties_count_half_and_large_logits_stay_distinct():
    labels = torch.tensor([0.0, 1.0, 1.0])
    assert binary_metrics(torch.tensor([1.0, 1.0, 2.0]), labels).auc == pytest.approx(0.75)
    assert binary_metrics(torch.tensor([20.0, 21.0, 22.0]), labels).auc == 1.0  # equal as float32 probabilities


def test_logits_of_a_model_in_float64_stay_distinct():
    data = jobs.planted(10)
    batch = next(data.open("test", 100))
    labels = batch.labels.double()
    pair = predict_logits(PerfectModel(labels), [batch], torch.device("cpu"))
    assert binary_metrics(*pair).auc == 1.0


class PerfectModel(torch.nn.Module):
    """Model whose logits differ by less than float32 can represent."""

    def __init__(self, labels: torch.Tensor) -> None:
        super().__init__()
        self.labels = labels

    def forward(self, dense, sparse):
        return 1.0 + 1e-12 * self.labels


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
        (torch.zeros(3), torch.tensor([0.0, 1.0, 2.0]), "labels must be 0 or 1, and weights finite"),
        (torch.zeros(3), torch.tensor([0.0, 1.0, 0.3]), "labels must be 0 or 1, and weights finite"),
        (torch.zeros(3), torch.tensor([0.0, 1.0, math.nan]), "labels must be 0 or 1, and weights finite"),
    ],
)
def test_undefined_metrics_are_refused(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        binary_metrics(logits, labels)


def test_columns_of_rows_are_checked():
    logits, labels = torch.arange(3.0), torch.tensor([0.0, 1.0, 0.0])
    for name in ("groups", "weights"):
        with pytest.raises(ValueError, match=rf"{name} must be \[3\] as labels, got \(3, 1\)"):
            binary_metrics(logits, labels, **{name: torch.ones(3, 1)})
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weights finite numbers of 0 or more"):
            binary_metrics(logits, labels, weights=torch.tensor([1.0, 1.0, weight]))


@pytest.mark.parametrize(
    ("rows", "weights", "message"),
    [
        (0, [], "there are no rows, so neither AUC"),
        (2, [0.0, 0.0], "all 2 rows have the weight 0, so"),
        (3, [0.0, 2.0, 1.0], "all 2 labels with a weight above 0 are the same, so"),
    ],
)
def test_undefined_metrics_of_weighted_rows_say_why(rows, weights, message):
    logits, labels = torch.arange(float(rows)), (torch.arange(rows) > 0).float()
    with pytest.raises(UndefinedMetricsError, match=rf"\A{message}"):
        binary_metrics(logits, labels, weights=torch.tensor(weights))
    missing = torch.full((3, 1), math.nan)
    with pytest.raises(UndefinedMetricsError, match=r"\Alabel 'b': there are no rows"):
        label_metrics(torch.zeros(3, 2), torch.cat([torch.eye(3)[:, :1], missing], 1), ("a", "b"), None)


def test_certain_predictions_cost_nothing_or_infinitely_much():
    logits, labels = torch.tensor([math.inf, -math.inf, 0.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert binary_metrics(logits, labels).log_loss == pytest.approx(math.log(2) / 2)
    assert binary_metrics(-logits, labels).log_loss == math.inf
    weights = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert binary_metrics(-logits, labels, weights=weights).log_loss == pytest.approx(math.log(2))


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


def slow_gauc(logits, labels, groups):
    """Mean AUC of groups by pairs, weighted by rows and not."""
    aucs, sizes = [], []
    for group in groups.unique().tolist():
        rows = (groups == group).nonzero()[:, 0].tolist()
        wins = [
            (logits[i] > logits[j]).item() + 0.5 * (logits[i] == logits[j]).item()
            for i in rows for j in rows if labels[i] == 1 and labels[j] == 0
        ]  # fmt: skip
        if wins and len({logits[i].item() for i in rows}) > 1:
            aucs.append(sum(wins) / len(wins))
            sizes.append(len(rows))
    weighted = sum(auc * size for auc, size in zip(aucs, sizes, strict=True)) / sum(sizes)
    return weighted, sum(aucs) / len(aucs), len(aucs)


@pytest.mark.parametrize("seed", range(4))
def test_gauc_is_the_mean_auc_of_the_groups_that_have_one(seed):
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(-40, 40, (300,), generator=generator) << 40  # ids of dynamic tables may be negative
    logits = torch.randint(-3, 3, (300,), generator=generator).float()  # many are equal
    labels = torch.randint(2, (300,), generator=generator).float()
    assert grouped_auc(logits, labels, groups) == pytest.approx(slow_gauc(logits, labels, groups), rel=1e-12)
    metrics = binary_metrics(logits, labels, groups=torch.zeros(300, dtype=torch.int64))
    assert (metrics.gauc, metrics.gauc_unweighted) == pytest.approx((metrics.auc, metrics.auc), rel=1e-12)


def test_groups_of_one_row_one_label_or_equal_logits_are_left_out():
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 1.0, 0.0, 2.0])
    labels = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    groups = torch.tensor([0, 1, 1, 2, 3, 3, 4, 4, 4])
    assert grouped_auc(logits, labels, groups) == (0.5, 0.5, 1)
    with pytest.raises(ValueError, match="no group has rows of both labels and logits that differ"):
        grouped_auc(logits[:6], labels[:6], groups[:6])
    weights = torch.tensor([1.0] * 6 + [0.0] * 3)  # rows of weight 0 make no group
    with pytest.raises(ValueError, match="no group has rows of both labels and logits that differ"):
        grouped_auc(logits, labels, torch.tensor([0, 1, 1, 2, 3, 3, 3, 3, 3]), weights)


def test_evaluations_have_gauc():
    data = jobs.planted()
    trainer = jobs.make_trainer(data, group_by="site")
    recorder = GroupRecorder(data.open("test", 50), "site")
    logits, labels = predict_logits(trainer.model, recorder, torch.device("cpu"))
    column = [feature.name for feature in data.features].index("site")
    assert torch.equal(recorder.groups, data.test.columns[column].values.long())
    expected = slow_gauc(logits, labels, recorder.groups)
    metrics = trainer.evaluate("test")
    assert (metrics.gauc, metrics.gauc_unweighted, metrics.num_groups) == pytest.approx(expected, rel=1e-6)
    for name in ("tags", "usr"):
        with pytest.raises(ValueError, match=f"a sparse column of one value per row, got '{name}': user, item"):
            jobs.make_trainer(data, group_by=name)
    with pytest.raises(ValueError, match="monitor is 'gauc', which needs group_by"):
        jobs.make_trainer(data, monitor="gauc")
