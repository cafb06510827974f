"""`tritonemb::quantized_bag`, a lookup in quantized tables, not differentiable; see `kernels/quantized_bag.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonemb.layout import HEADER_BYTES, Batch, Layout
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


def aten_bag(rows: Tensor, ids: Tensor, offsets: Tensor, bits: int) -> Tensor:
    """Sum the rows of bags by ATen's operator of rows of `to_aten`, float32 `[B, dim]`."""
    name = "byte" if bits == 8 else f"{bits}bit"
    result: Tensor = getattr(torch.ops.quantized, f"embedding_bag_{name}_rowwise_offsets")(rows, ids, offsets)
    return result


_SHAPES = torch.library.Library("quantized", "IMPL", "Meta")  # for `torch.export`; ATen has that of 8 bits only
for _bits in (4, 2):
    _name = f"embedding_bag_{_bits}bit_rowwise_offsets"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"quantized::{_name}", "Meta"):
        _SHAPES.impl(
            _name,
            lambda rows, _, offsets, *_o, bits=_bits, **_k: rows.new_empty(
                offsets.shape[0], (rows.shape[1] - HEADER_BYTES) * 8 // bits, dtype=torch.float32
            ),
        )
