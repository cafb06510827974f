"""Models for serving: quantized embedding tables."""

from tritonemb.kernels.quantized_bag import dequantize_rows, from_aten, quantize_rows, to_aten
from tritonemb.serving.quantized_tables import QuantizedCollection, QuantizedTable, quantize

__all__ = [
    "QuantizedCollection",
    "QuantizedTable",
    "dequantize_rows",
    "from_aten",
    "quantize",
    "quantize_rows",
    "to_aten",
]
