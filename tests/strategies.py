"""Hypothesis strategies: tables, and batches of ids for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import tritonemb as te
from tritonemb.optim import OPTIMIZERS

DIMS = (1, 3, 4, 7, 16, 60, 64, 128, 257)
NUM_ROWS = (1, 2, 5, 50, 1000)
ID_DTYPES = (torch.int32, torch.int64)
TABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

seeds = st.integers(0, 2**32 - 1)
id_dtypes = st.sampled_from(ID_DTYPES)


@st.composite
def tables(
    draw: st.DrawFn,
    dims: Sequence[int] = DIMS,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    poolings: Sequence[te.types.Pooling] = ("sum", "mean"),
    max_tables: int = 6,
    pooled: bool = True,
) -> list[te.TableConfig]:
    """Tables with several features, features that feed several tables; not pooled: neither that nor several dims."""
    num_tables = draw(st.integers(1, max_tables))
    dim = draw(st.sampled_from(dims))
    features = [f"feature{index}" for index in range(num_tables + 2)]
    configs = []
    for index in range(num_tables):
        if pooled:
            dim = draw(st.sampled_from(dims))
            local = draw(st.lists(st.sampled_from(features), min_size=1, max_size=3, unique=True))
        else:
            local = [features.pop(draw(st.integers(0, len(features) - 1)))]
        configs.append(
            te.TableConfig(
                f"table{index}",
                draw(st.sampled_from(NUM_ROWS)),
                dim,
                features=local,
                pooling=draw(st.sampled_from(poolings)) if pooled else "none",
                dtype=draw(st.sampled_from(dtypes)),
            )
        )
    return configs


def rows_of(configs: Sequence[te.TableConfig]) -> dict[str, int]:
    """For each feature, how many ids are valid in all tables that it feeds."""
    rows: dict[str, int] = {}
    for config in configs:
        for feature in config.feature_names:
            rows[feature] = min(config.num_embeddings, rows.get(feature, config.num_embeddings))
    return rows


@st.composite
def batches(
    draw: st.DrawFn,
    configs: Sequence[te.TableConfig],
    weighted: bool | None = None,
    keys: Sequence[str] | None = None,
    max_length: int | None = None,
    batch_size: int | None = None,
) -> te.KeyedJaggedTensor:
    """Valid ids, many repeated; keys in any order and, with ids that are out of range, keys that nobody uses."""
    rows = rows_of(configs)
    if keys is None:
        extra = [f"unused{index}" for index in range(draw(st.integers(0, 2)))]
        keys = draw(st.permutations([*rows, *extra]))
    if batch_size is None:
        batch_size = draw(st.sampled_from((0, 1, 2, 7, 33)))
    if max_length is None:
        max_length = draw(st.sampled_from((0, 1, 3, 12)))
    if weighted is None:
        weighted = draw(st.booleans())
    return random_batch(
        rows, keys, batch_size, max_length, weighted, draw(id_dtypes), draw(id_dtypes), draw(st.booleans()), draw(seeds)
    )


def random_batch(
    rows: dict[str, int],
    keys: Sequence[str],
    batch_size: int,
    max_length: int,
    weighted: bool = False,
    id_dtype: torch.dtype = torch.int64,
    offset_dtype: torch.dtype = torch.int64,
    by_offsets: bool = False,
    seed: int = 0,
) -> te.KeyedJaggedTensor:
    """Bags of 0 to `max_length` ids; half of the ids are among the first three of their feature."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, max_length + 1, (len(keys), batch_size), generator=generator)
    values = []
    for key, total in zip(keys, lengths.sum(1).tolist(), strict=True):
        low, high = (0, rows[key]) if key in rows else (-(2**31), 2**31)
        ids = torch.randint(low, high, (total,), generator=generator)
        few = torch.randint(0, min(3, high), (total,), generator=generator)
        values.append(torch.where(torch.rand(total, generator=generator) < 0.5, ids, few))
    flat = torch.cat([torch.empty(0, dtype=torch.int64), *values])
    weights = torch.randn(flat.numel(), generator=generator) if weighted else None
    batch = te.KeyedJaggedTensor(list(keys), flat.to(id_dtype), weights, lengths=lengths.to(offset_dtype))
    if by_offsets:
        return te.KeyedJaggedTensor(list(keys), batch.values(), weights, offsets=batch.offsets())
    return batch


@st.composite
def problems(draw: st.DrawFn, pooled: bool = True, **options: Any) -> tuple[list[te.TableConfig], te.KeyedJaggedTensor]:
    """Tables and a batch for them."""
    configs = draw(tables(pooled=pooled, **options))
    return configs, draw(batches(configs))


@st.composite
def optimizers(draw: st.DrawFn, name: str, **fixed: Any) -> te.optim.Optimizer:
    """An optimizer with any weight decay, gradient clipping, limit of norms, and CowClip.

    LAMB's rows grow by the factor 1 + lr a step, and rounding errors with them: its learning rates stay small.
    """
    mode = draw(st.sampled_from(("none", "l2", "decoupled")))
    options: dict[str, Any] = {
        "lr": draw(st.sampled_from((0.01, 0.05) if "lamb" in name else (0.01, 0.1, 0.5))),
        "weight_decay_mode": mode,
        "weight_decay": 0.0 if mode == "none" else draw(st.sampled_from((0.01, 0.1))),
        "max_gradient": draw(st.sampled_from((None, 0.3))),
        "max_norm": draw(st.sampled_from((None, 0.7))),
        "cow_clip": draw(st.sampled_from((None, 0.2))),
        "cow_clip_floor": draw(st.sampled_from((0.0, 0.1))),
    }
    if name == "ftrl":
        options |= {"l1": draw(st.sampled_from((0.0, 0.05))), "l2": draw(st.sampled_from((0.0, 0.1)))}
    return OPTIMIZERS[name](**(options | fixed))


def random_weights(configs: Sequence[te.TableConfig], seed: int = 0) -> list[Tensor]:
    """Normal weights for tables, in their dtypes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(c.num_embeddings, c.embedding_dim, generator=generator).to(c.dtype) for c in configs]
