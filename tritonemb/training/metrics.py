"""How good a model's click probabilities are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from tritonemb.utils import require


class UndefinedMetricsError(ValueError):
    """The rows have labels of one kind only, so that neither AUC nor normalized entropy is defined."""


@dataclass(frozen=True)
class Metrics:
    """Quality on some rows.

    Args:
        auc: area under the ROC curve, exact.
        log_loss: mean binary cross-entropy in nats.
        normalized_entropy: log loss over that of always predicting the rows' base rate; below 1 is better than that
            (He et al., ADKDD 2014).
        num_samples: rows evaluated.
        samples_per_second: speed of the evaluation, metrics not included; 0 where nothing was timed.
        num_skipped: bad rows that were left out.
    """

    auc: float
    log_loss: float
    normalized_entropy: float
    num_samples: int
    samples_per_second: float = 0.0
    num_skipped: int = 0


def binary_metrics(logits: Tensor, labels: Tensor, seconds: float | None = None) -> Metrics:
    """Metrics of `logits` `[N]` against `labels` `[N]` in {0, 1}.

    Raises:
        ValueError: where the shapes differ, a logit is NaN, or all labels are the same (no metric is defined then).
    """
    if logits.shape != labels.shape or logits.dim() != 1:
        raise ValueError(f"logits and labels must be [N], got {tuple(logits.shape)} and {tuple(labels.shape)}")
    logits, labels = logits.detach().double(), labels.double()
    if bool(logits.isnan().any()):
        raise ValueError(f"{int(logits.isnan().sum())} of {logits.numel()} logits are NaN: training has diverged")
    base_rate = labels.mean()
    if not 0 < float(base_rate) < 1:
        raise UndefinedMetricsError(
            f"all {labels.numel()} labels are the same, so neither AUC nor normalized entropy is defined"
        )
    binary_auroc = require("torchmetrics.functional.classification").binary_auroc
    log_loss = float(F.binary_cross_entropy_with_logits(logits, labels))
    base_loss = float(F.binary_cross_entropy(base_rate, base_rate))
    return Metrics(
        auc=float(binary_auroc(logits.sigmoid(), labels.int())),
        log_loss=log_loss,
        normalized_entropy=log_loss / base_loss,
        num_samples=labels.numel(),
        samples_per_second=labels.numel() / seconds if seconds else 0.0,
    )
