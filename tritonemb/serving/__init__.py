"""Trained runs; quantized embedding tables; publishers of tables, and followers, which serve what these write."""

from tritonemb.kernels.quantized_bag import dequantize_rows, from_aten, quantize_rows, to_aten
from tritonemb.serving.export import export
from tritonemb.serving.follower import Follower, ModelFollower, look_up
from tritonemb.serving.package import check_contents, replace_table
from tritonemb.serving.publisher import Publisher
from tritonemb.serving.quantized_tables import ByFrequency, QuantizedCollection, QuantizedTable, quantize
from tritonemb.serving.retrieval import ItemIndex, encode_rows
from tritonemb.serving.run import Run, load_run

__all__ = [
    "ByFrequency", "Follower", "ItemIndex", "ModelFollower", "Publisher", "QuantizedCollection", "QuantizedTable",
    "Run", "check_contents", "dequantize_rows", "encode_rows", "export", "from_aten", "load_run", "look_up", "quantize",
    "quantize_rows", "replace_table", "to_aten",
]  # fmt: skip
