"""Lookups as plain float64 PyTorch: what collections must compute, differentiable by autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

import tritonemb as te


def pooled_lookup(
    configs: Sequence[te.TableConfig],
    weights: Sequence[Tensor],
    batch: te.KeyedJaggedTensor,
    sample_weights: Tensor | None = None,
) -> Tensor:
    """`[B, width]` by `torch.nn.functional.embedding_bag`, a table and feature at a time.

    A sum times per-sample weights is pooled by hand where PyTorch does not (means with weights).
    """
    batch_size, offsets, values = batch.stride(), batch.offsets().long(), batch.values().long()
    parts = []
    for config, weight in zip(configs, weights, strict=True):
        for feature in config.feature_names:
            key = batch.keys().index(feature)
            bounds = offsets[key * batch_size : (key + 1) * batch_size + 1]
            begin, end = int(bounds[0]), int(bounds[-1])
            scales = None if sample_weights is None else sample_weights[begin:end].to(weight.dtype)
            pooled = functional.embedding_bag(
                values[begin:end],
                weight,
                bounds - begin,
                mode="sum",
                per_sample_weights=scales,
                include_last_offset=True,
            )
            if config.pooling == "mean":
                pooled = pooled / torch.diff(bounds).clamp(min=1).unsqueeze(1)
            parts.append(pooled)
    return torch.cat(parts, dim=1)


def unpooled_lookup(
    configs: Sequence[te.TableConfig],
    weights: Sequence[Tensor],
    batch: te.KeyedJaggedTensor,
    sample_weights: Tensor | None = None,
) -> Tensor:
    """`[N, dim]`: each value's row, times its weight; zeros for keys that no table knows."""
    batch_size, offsets, values = batch.stride(), batch.offsets().long(), batch.values().long()
    tables = {config.feature_names[0]: weight for config, weight in zip(configs, weights, strict=True)}
    parts = [weights[0].new_zeros(0, weights[0].shape[1])]
    for key, name in enumerate(batch.keys()):
        ids = values[int(offsets[key * batch_size]) : int(offsets[(key + 1) * batch_size])]
        parts.append(tables[name][ids] if name in tables else weights[0].new_zeros(ids.numel(), weights[0].shape[1]))
    rows = torch.cat(parts)
    return rows if sample_weights is None else rows * sample_weights.to(rows.dtype).unsqueeze(1)
