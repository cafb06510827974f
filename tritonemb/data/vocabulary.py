"""From raw categories to ids, by what the training rows contain."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.utils import require


def encode(column: Any, num_train: int, min_count: int = 1) -> tuple[Tensor, int]:
    """Number the categories of a column whose first `num_train` rows are the training rows.

    Id 0 stands for missing, for unseen in training and for categories with fewer than `min_count` training rows; the
    others follow by descending count (ties by value), so that rows that are often used together lie together.

    Args:
        column: a `pyarrow` Array or ChunkedArray; null is missing.

    Returns:
        ids int32 `[len(column)]`, and the number of ids.
    """
    pa = require("pyarrow")
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    encoded = array.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    categories = encoded.dictionary.to_numpy(zero_copy_only=False)
    if categories.dtype == object:
        categories = categories.astype(str)
    train = codes[:num_train]
    counts = np.bincount(train[train >= 0], minlength=len(categories))
    order = np.lexsort((categories, -counts))
    kept = order[counts[order] >= max(min_count, 1)]
    id_of_code = np.zeros(len(categories) + 1, dtype=np.int32)  # the last one serves code -1
    id_of_code[kept] = np.arange(1, len(kept) + 1, dtype=np.int32)
    return torch.from_numpy(id_of_code[codes]), len(kept) + 1
