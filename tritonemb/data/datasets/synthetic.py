"""Synthetic data with a known ground truth, and so with a known Bayes-optimal AUC.

Every id of every feature has a hidden effect; a row's logit is the sum of its ids' effects (the mean for a multi-hot
feature) and of a linear part in the dense values; its label is 1 with probability sigmoid(logit). No model can be
expected to rank better than the logits themselves.
"""

from __future__ import annotations

import numpy as np
import torch

from tritonemb.data.columns import Column, Rows
from tritonemb.data.in_memory import Dataset
from tritonemb.data.protocol import Feature
from tritonemb.utils import require

FEATURES = (
    Feature("user", 2_000),
    Feature("item", 1_000),
    Feature("advertiser", 200),
    Feature("site", 100),
    Feature("device", 10),
    Feature("tags", 50, multi_hot=True),
)
NUM_DENSE = 4
ZIPF_EXPONENT = 1.05
MAX_TAGS = 6


def make_synthetic(num_train: int = 200_000, num_test: int = 50_000, seed: int = 0) -> Dataset:
    """Draw a synthetic data set; `best_auc` is the AUC of the true logits on the test rows.

    Raises:
        ValueError: for fewer than one row.
    """
    if num_train < 1 or num_test < 1:
        raise ValueError(f"num_train and num_test must be at least 1, got {num_train} and {num_test}")
    random = np.random.default_rng(seed)
    num_rows = num_train + num_test
    dense = random.standard_normal((num_rows, NUM_DENSE), dtype=np.float32)
    logits = dense @ random.normal(0.0, 0.4, NUM_DENSE) - 1.0
    columns = []
    for feature in FEATURES:
        effects = random.normal(0.0, 0.7, feature.num_embeddings)
        lengths = random.integers(0, MAX_TAGS + 1, num_rows) if feature.multi_hot else np.ones(num_rows, np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = _zipf(random, feature.num_embeddings, int(offsets[-1]))
        totals = np.concatenate([[0.0], np.cumsum(effects[ids])])
        logits += (totals[offsets[1:]] - totals[offsets[:-1]]) / np.maximum(lengths, 1)
        columns.append(Column(torch.from_numpy(ids), torch.from_numpy(offsets) if feature.multi_hot else None))
    labels = (random.random(num_rows) < 1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    rows = Rows(torch.from_numpy(dense), tuple(columns), torch.from_numpy(labels))
    best = _auc(logits[num_train:], labels[num_train:])
    return Dataset("synthetic", FEATURES, rows.slice(0, num_train), rows.slice(num_train, num_rows), best_auc=best)


def _zipf(random: np.random.Generator, num_embeddings: int, size: int) -> np.ndarray:
    """int32 ids whose frequency falls as rank^-ZIPF_EXPONENT; ranks are scattered over the ids."""
    weights = np.arange(1, num_embeddings + 1, dtype=np.float64) ** -ZIPF_EXPONENT
    ranks = np.searchsorted(np.cumsum(weights / weights.sum())[:-1], random.random(size), side="right")
    return random.permutation(num_embeddings).astype(np.int32)[ranks]


def _auc(logits: np.ndarray, labels: np.ndarray) -> float:
    if labels.min() == labels.max():
        raise ValueError("the test rows have labels of one kind only; ask for more of them")
    classification = require("torchmetrics.functional.classification")
    return float(classification.binary_auroc(torch.from_numpy(logits).sigmoid(), torch.from_numpy(labels).int()))
