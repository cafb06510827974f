"""Metrics of click probabilities, and evaluation of a split."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tritonemb.data import Batch, Data, Split
from tritonemb.data.datasets import exact_auc
from tritonemb.data.encode import feature_seed, hash_integers
from tritonemb.data.protocol import Batches, Feature
from tritonemb.ops.registry import check_errors
from tritonemb.training.config import Precision
from tritonemb.training.ranks import UndefinedMetricsError, on_rank_zero
from tritonemb.training.step import Forward, logits_of, take
from tritonemb.training.train_state import TrainState
from tritonemb.utils import LARGE_BATCH, join_names

MIN_WIDTH = 16  # outputs of a linear layer, see `WideLinear`


@dataclass(frozen=True)
class Metrics:
    """Metrics of binary classification: with row weights, of rows that count as much; missing labels are left out.

    Args:
        auc: area under the ROC curve, exact.
        log_loss: mean binary cross-entropy in nats.
        normalized_entropy: log loss relative to always predicting the base rate; below 1 is better (He et al., 2014).
        num_samples: rows evaluated.
        samples_per_second: speed of the evaluation, without computing the metrics; 0 if not timed.
        num_skipped: bad rows skipped.
        best_threshold: probability threshold with the largest F1, the harmonic mean of precision and recall.
        best_f1: F1 at this threshold.
        calibration: curve in ten bins of equal size by probability: rows, mean probability, fraction of clicks.
        gauc: mean AUC of the groups, such as users, weighted by their rows (Zhou et al., 2018); None without groups.
        gauc_unweighted: mean AUC of the groups.
        num_groups: groups with an AUC: rows of both labels, and logits that differ.
        labels: metrics of each of several labels by name, whose means are `auc`, `log_loss`, `normalized_entropy`,
            `gauc` and `gauc_unweighted`.
    """

    auc: float
    log_loss: float
    normalized_entropy: float
    num_samples: int
    samples_per_second: float = 0.0
    num_skipped: int = 0
    best_threshold: float = 0.0
    best_f1: float = 0.0
    calibration: tuple[tuple[int, float, float], ...] = ()
    gauc: float | None = None
    gauc_unweighted: float | None = None
    num_groups: int = 0
    labels: dict[str, "Metrics"] = field(default_factory=dict)

    def values(self, names: Iterable[str]) -> dict[str, float]:
        """Return the fields with these names that are not None, of several labels also as `name[label]`."""
        scopes = {"": self, **{f"[{label}]": metrics for label, metrics in self.labels.items()}}
        values = {f"{name}{label}": getattr(scopes[label], name) for label in scopes for name in names}
        return {name: value for name, value in values.items() if value is not None}


MEANS = "auc", "log_loss", "normalized_entropy", "gauc", "gauc_unweighted"  # of several labels


def label_metrics(
    logits: Tensor, labels: Tensor, names: Sequence[str], seconds: float | None, *columns: Tensor | None
) -> Metrics:
    """Compute the metrics of several labels with these names, `logits` and `labels` `[N, L]`, NaN for missing labels;
    without names those of `binary_metrics`, whose `groups` and `weights` are `columns`. Its errors name the label."""
    if not names:
        return binary_metrics(logits, labels, seconds, *columns)
    metrics = dict[str, Metrics]()
    for name, label_logits, label in zip(names, logits.unbind(1), labels.unbind(1), strict=True):
        rows = ~label.isnan()
        label_columns = (None if column is None else column[rows] for column in columns)
        try:
            metrics[name] = binary_metrics(label_logits[rows], label[rows], None, *label_columns)
        except ValueError as error:
            raise type(error)(f"label {name!r}: {error}") from None
    values = {key: [getattr(entry, key) for entry in metrics.values()] for key in MEANS}
    means: Any = {key: None if None in numbers else sum(numbers) / len(names) for key, numbers in values.items()}
    speed = len(labels) / seconds if seconds else 0.0
    return Metrics(**means, num_samples=len(labels), samples_per_second=speed, labels=metrics)


def binary_metrics(
    logits: Tensor,
    labels: Tensor,
    seconds: float | None = None,
    groups: Tensor | None = None,
    weights: Tensor | None = None,
) -> Metrics:
    """Compute the metrics of `logits` `[N]` against `labels` `[N]` in {0, 1}; `groups` int64 `[N]` are those of GAUC,
    `weights` `[N]` those of the rows. Raise ValueError if the shapes differ, a logit is NaN, a label or a weight is
    invalid, or all labels are the same, for which AUC is undefined."""
    if logits.shape != labels.shape or logits.dim() != 1:
        raise ValueError(f"logits and labels must be [N], got {tuple(logits.shape)} and {tuple(labels.shape)}")
    for name, column in {"groups": groups, "weights": weights}.items():
        if column is not None and column.shape != labels.shape:
            raise ValueError(f"{name} must be [{len(labels)}] as labels, got {tuple(column.shape)}")
    logits, labels = logits.detach().double(), labels.double()
    weights = torch.ones_like(labels) if weights is None else weights.double()
    if not bool((((labels == 0) | (labels == 1)) & (weights >= 0) & weights.isfinite()).all()):
        raise ValueError("labels must be 0 or 1, and weights finite numbers of 0 or more")
    if bool(logits.isnan().any()):
        raise ValueError(f"{int(logits.isnan().sum())} of {logits.numel()} logits are NaN: training has diverged")
    base_rate = (labels * weights).sum() / weights.sum()
    if not 0 < float(base_rate) < 1:
        count, num_weighted = labels.numel(), int((weights > 0).sum())
        text = f"all {count} rows have the weight 0" if count else "there are no rows"
        if num_weighted:
            text = f"all {num_weighted} labels{' with a weight above 0' * (num_weighted < count)} are the same"
        raise UndefinedMetricsError(f"{text}, so neither AUC nor normalized entropy is defined")
    losses = -F.logsigmoid(torch.where(labels > 0, logits, -logits))  # not NaN for infinite logits
    log_loss = float((losses * weights)[weights > 0].sum() / weights.sum())
    base_loss = float(F.binary_cross_entropy(base_rate, base_rate))
    auc = exact_auc(logits, labels, weights)
    speed = labels.numel() / seconds if seconds else 0.0
    grouped = (None, None, 0) if groups is None else grouped_auc(logits, labels, groups, weights)
    logits, order = logits.sort(stable=True)
    sorted_rows = logits, labels[order], weights[order]
    curves = *best_threshold(*sorted_rows), calibration_of(*sorted_rows)
    return Metrics(auc, log_loss, log_loss / base_loss, labels.numel(), speed, 0, *curves, *grouped)


def grouped_auc(
    logits: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None
) -> tuple[float, float, int]:
    """Return the mean AUC of the groups, weighted by the weights of their rows and not, and their number; all inputs
    are `[N]`.

    A group of one row, of one label or of equal logits has no AUC and is left out, as in TorchRec's GAUC; equal logits
    of others count half. Raise UndefinedMetricsError if no group has one."""
    if weights is not None:  # rows of weight 0 count as none
        logits, labels, groups, weights = (column[weights > 0] for column in (logits, labels, groups, weights))
    order = logits.argsort(stable=True)
    order = order[groups[order].argsort(stable=True)]
    weights = torch.ones_like(labels, dtype=torch.float64) if weights is None else weights[order].double()
    logits, groups, clicks = logits[order], groups[order], labels[order].double() * weights
    # Runs of equal logits of a group, in the order of groups and logits.
    starts_group = F.pad(groups[1:] != groups[:-1], (1, 0), value=True)[: len(groups)]  # of no rows, too
    starts_run = starts_group | F.pad(logits[1:] != logits[:-1], (1, 0), value=True)[: len(groups)]
    group, run = starts_group.cumsum(0) - 1, starts_run.cumsum(0) - 1
    group_of_run = group[starts_run]
    positives, negatives = run.bincount(clicks), run.bincount(weights - clicks)
    # Of each run: pairs with a negative of a smaller logit in its group, and half of the pairs within the run.
    group_positives, group_negatives = group.bincount(clicks), group.bincount(weights - clicks)
    smaller = negatives.cumsum(0) - negatives - (group_negatives.cumsum(0) - group_negatives)[group_of_run]
    wins = group_of_run.bincount(positives * (smaller + negatives / 2))
    pairs = group_positives * group_negatives
    valid = (pairs > 0) & (group_of_run.bincount() > 1)
    if not valid.any():
        raise UndefinedMetricsError("no group has rows of both labels and logits that differ, so GAUC is not defined")
    aucs, sizes = wins[valid] / pairs[valid], group.bincount(weights)[valid]
    return float(aucs @ sizes / sizes.sum()), float(aucs.mean()), len(aucs)


def check_rows(data: Data, validation: bool, test: bool) -> None:
    """Raise ValueError if the data lack a split that a fit needs, or that split has no rows."""
    needs: dict[Split, bool] = {"train": True, "validation": validation, "test": test}
    for split in (split for split in needs if needs[split]):
        if split not in data.splits():
            raise ValueError(f"data set {data.name!r} has no {split!r} rows, only {join_names(data.splits())}")
        if (check := getattr(data, "check_rows", None)) is not None:
            check(split)


def check_group_by(name: str | None, features: Iterable[Feature]) -> None:
    """Raise ValueError unless `name` is None, or that of a feature with one id per row."""
    names = [feature.name for feature in features if not feature.multi_hot]
    if name is not None and name not in names:
        raise ValueError(f"group_by must be a sparse column of one value per row, got {name!r}: {join_names(names)}")


class GroupRecorder(Batches):
    """Batches of a stream, of which `groups` records the ids of a feature with one id per row, None: nothing; and, if
    `has_weights`, `weights` those of the rows."""

    def __init__(self, stream: Batches, feature: str | None, has_weights: bool = False) -> None:
        self._stream, self._feature, self._has_weights = stream, feature, has_weights
        self._ids, self._weights = list[Tensor](), list[Tensor]()

    def __next__(self) -> Batch:
        batch = next(self._stream)
        if self._feature is not None:
            self._ids.append(batch.sparse[self._feature].values().to(torch.int64, copy=True))
        if batch.weights is not None:
            self._weights.append(batch.weights.clone())  # a view would keep the batch's buffer in memory
        return batch

    def wait(self, seconds: float) -> bool:
        return self._stream.wait(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # position and report

    @property
    def groups(self) -> Tensor | None:
        """Ids int64 `[N]` of the batches so far."""
        return None if self._feature is None else torch.cat([torch.zeros(0, dtype=torch.int64), *self._ids])

    @property
    def weights(self) -> Tensor | None:
        """Weights float32 `[N]` of the rows so far; None if they have none."""
        return torch.cat([torch.zeros(0), *self._weights]) if self._has_weights else None


def probabilities(logits: Tensor) -> Tensor:
    """Sigmoid of logits, float32 of their shape, on the CPU by NumPy: torch rounds by an element's position."""
    with np.errstate(over="ignore"):
        return torch.from_numpy((1.0 / (1.0 + np.exp(-logits.detach().double().cpu().numpy()))).astype(np.float32))


def best_threshold(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return the largest threshold with the largest F1 of `probabilities`, and this F1. `logits` `[N]` ascend."""
    scores, clicks = probabilities(logits.flip(0)), (labels * weights).flip(0).cumsum(0)
    f1 = 2 * clicks / (weights.flip(0).cumsum(0) + clicks[-1])
    f1[:-1][scores[:-1] == scores[1:]] = 0.0  # a threshold cannot separate equal scores
    best = int(f1.argmax())
    return float(scores[best]), float(f1[best])


def calibration_of(
    logits: Tensor, labels: Tensor, weights: Tensor, num_bins: int = 10
) -> tuple[tuple[int, float, float], ...]:
    """Number of rows, mean probability and fraction of clicks of bins of equal size. `logits` `[N]` ascend."""
    columns = torch.stack([logits.sigmoid() * weights, labels * weights, weights])
    bins = [(values.shape[1], *values.sum(1).tolist()) for values in columns.tensor_split(num_bins, dim=1)]
    return tuple((size, score / total, clicks / total) for size, score, clicks, total in bins if total > 0)


def evaluate(state: TrainState, split: Split) -> Metrics:
    start = time.perf_counter()
    with state.ranks.monitor_failures():
        logits, labels, skipped, *columns = score(state, split)
        seconds = time.perf_counter() - start
        control, names = state.ranks.control, state.labels
        metrics = on_rank_zero(control, lambda: label_metrics(logits, labels, names, seconds, *columns))
    return replace(metrics, num_skipped=skipped)


def score(
    state: TrainState, split: Split, shards: int | None = None
) -> tuple[Tensor, Tensor, int, Tensor | None, Tensor | None]:
    """Return logits and labels `[N]`, or `[N, L]`, of a split, gathered on rank zero, the number of skipped rows, the
    groups int64 `[N]` of `group_by`, and the weights `[N]` of the rows. Collective. The rows of the shards, by default
    one per rank, follow one another; with one shard, which rank zero reads, rows are in their order."""
    ranks, step = state.ranks, state.step
    state.settle()  # collectives of the pipeline and of the evaluation must not interleave
    with state.open(split, shards=shards) as stream:
        rows = GroupRecorder(stream, state.options.group_by, state.has_weights)
        with state.steps(rows) as steps:
            batches = (batch for step_batches in steps for batch in take(step_batches))
            logits, labels = predict_logits(state.model, batches, state.device, step.precision, step.forward)
        skipped = sum(ranks.control.all_gather_object(stream.report.skipped))
    if (num_nan := ranks.sum(logits.isnan().sum())) and (cause := state.nonfinite_input(split)):
        raise ValueError(f"{num_nan:.0f} logits of the {split} rows are NaN: {cause}")
    shape = -1, *filter(None, [len(state.labels)])
    logits, labels = (ranks.gather_to_first(values.flatten()).view(shape) for values in (logits, labels))
    columns = (None if column is None else ranks.gather_to_first(column) for column in (rows.groups, rows.weights))
    return logits, labels, skipped, *columns


def warn_of_repeated_rows(state: TrainState, max_test_rows: int = 1_000, max_train_rows: int = 100_000) -> str:
    """Return a warning if the first `max_test_rows` test rows all occur in the first `max_train_rows` training rows."""
    if getattr(state.data, "is_stream", False):  # its first rows may be gone
        return ""
    try:
        missing = set(first_rows(state, "test", max_test_rows))
        for num_rows, row in enumerate(first_rows(state, "train", min(max_train_rows, state.progress.samples)), 1):
            missing.discard(row)
            if not missing:
                overlap = f"the first {max_test_rows:,}, or all, are among the first {num_rows:,} training rows"
                return f"test rows were trained on: {overlap}, with labels; test metrics do not hold for new rows"
    except (OSError, ValueError) as error:  # a bad row must not fail a finished run
        return f"test rows were not compared with training rows: {error}"
    return ""


def first_rows(state: TrainState, split: Split, max_rows: int) -> Iterator[int]:
    with state.data.open(split, state.options.batch_size) as stream:
        yield from islice(chain.from_iterable(map(row_hashes, stream)), max_rows)


def row_hashes(batch: Batch) -> list[int]:
    """Hash rows: uint64 sums of the hashes of label, dense features and ids; equal for equal rows."""
    columns = torch.cat([batch.labels[:, None].flatten(1), batch.dense], 1).T.contiguous().view(torch.int32).numpy()
    hashes = np.sum([hash_integers(column, feature_seed(f"dense {i}")) for i, column in enumerate(columns)], axis=0)
    offsets, ids = batch.sparse.offsets().numpy(), batch.sparse.values().numpy()
    for index, key in enumerate(batch.sparse.keys()):
        ends = offsets[index * len(batch) : (index + 1) * len(batch) + 1]
        sums = np.cumsum(hash_integers(ids[ends[0] : ends[-1]], feature_seed(key)))
        hashes = hashes + np.diff(np.append(np.uint64(0), sums)[ends - ends[0]])
    return list(hashes.tolist())


@cache
def rounds_by_position() -> bool:
    """Return whether this CPU rounds a row of a product of few columns by its position in the batch, as AMD's with MKL
    do for 2 to 11 columns, unless the number of inputs is a multiple of 4."""
    rows = torch.randn(LARGE_BATCH, 13, generator=torch.Generator().manual_seed(0))
    products = ((F.linear(rows, rows[:n]), F.linear(rows.flip(0), rows[:n])) for n in range(2, MIN_WIDTH))
    return any(not torch.equal(product, flipped.flip(0)) for product, flipped in products)


class WideLinear(TorchFunctionMode):
    """Mode in which a linear layer of 2 to 15 outputs, as a gate of an MMoE, is computed with 16, others 0."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_wide_linear if func is F.linear else func)(*args, **kwargs or {})


def _wide_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.dim() != 2 or not 1 < (width := len(weight)) < MIN_WIDTH:
        return F.linear(input, weight, bias)
    padding = 0, MIN_WIDTH - width
    bias = None if bias is None else F.pad(bias, padding)
    return F.linear(input, F.pad(weight, (0, 0, *padding)), bias)[..., :width].contiguous()


@torch.no_grad()
def predict_logits(
    model: nn.Module, batches: Iterable[Batch], device: torch.device, precision: Precision = "fp32",
    forward: Forward | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Predict in evaluation mode, by `forward` if compiled; return logits and labels, `[N]` or `[N, L]`, of the rows
    that have a label, on the CPU: padding has none."""
    if training := [module for module in model.modules() if module.training]:
        model.eval()
    is_narrow = any(1 < getattr(module, "out_features", 0) < MIN_WIDTH for module in model.modules())
    products = WideLinear() if is_narrow and device.type == "cpu" and rounds_by_position() else nullcontext()
    # Append to one tensor that doubles when it is full. A tensor kept of every batch would fragment the allocator's
    # memory between the temporary tensors of the forward pass: 160 bytes per sample, measured.
    pairs, size = torch.empty(2, 1 << 16, device=device), 0
    try:
        for batch in batches:
            moved = batch.to(device, non_blocking=True)
            with products:
                logits = logits_of(model if forward is None else forward, moved, precision, device)
            pair = torch.stack([logits, moved.labels]).movedim(1, -1)
            pairs = pairs if size else pair.new_empty(*pair.shape[:-1], pairs.shape[-1])
            if size + len(batch) > pairs.shape[-1]:
                pairs = F.pad(pairs, (0, max(len(batch), pairs.shape[-1])))
            pairs[..., size : size + len(batch)] = pair
            size += len(batch)
        check_errors(device)
    finally:
        for module in training:
            module.training = True
    pairs = pairs[..., :size].cpu()
    logits, labels = pairs[..., ~pairs[1].isnan().unsqueeze(0).flatten(0, -2).all(0)].movedim(-1, 1)
    return logits, labels
