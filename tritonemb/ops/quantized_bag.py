"""`tritonemb::quantized_bag`, a lookup in quantized tables, not differentiable; see `kernels/quantized_bag.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonemb.layout import Batch, Layout
from tritonemb.ops.embedding_bag import check_devices, empty_output
from tritonemb.ops.registry import define, kernel
from tritonemb.ops.row_groups import check_ids


def quantized_bag(
    tables: Sequence[Tensor], bits: Sequence[int], batch: Batch, layout: Layout, check_bounds: bool, dtype: torch.dtype
) -> Tensor:
    """Look up a batch in tables of uint8 rows, of integers of `bits` each; `[B, width]`, or `[N, width]` if not pooled.

    Raise errors as `embedding_bag`.
    """
    check_ids(batch[0])
    check_devices(tables, batch[0], layout)
    return _quantized_bag(tables, bits, *batch, check_bounds, dtype, layout)


_quantized_bag = define(
    "quantized_bag",
    "(Tensor[] weights, int[] bits, *Batch, bool check_bounds, ScalarType output_dtype, *Layout) -> Tensor",
    lambda _t, _b, values, offsets, _s, _c, dtype, layout: empty_output(values, offsets, layout, dtype),
    lambda tables, bits, values, offsets, sample_weights, check_bounds, dtype, layout: kernel(
        "quantized_bag", values.device
    )(tables, bits, (values, offsets, sample_weights), layout, check_bounds, dtype),
)
