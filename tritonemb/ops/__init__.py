"""`torch.ops.tritonemb.*`: schema, fake, autograd formula, input checks and dispatch."""

from tritonemb.layout import NO_ROW, POLICIES, WAYS, BatchGradient, FusedTables, segment_offsets
from tritonemb.ops.embedding_bag import BagGradient, FusedBatch, bag_fused, embedding_bag, fused_lookup, pinned_lookup
from tritonemb.ops.interaction import cross, interaction
from tritonemb.ops.jagged import block_bucketize, jagged_permute
from tritonemb.ops.quantize import Packing, make_packing, quantize_pack, quantize_unpack
from tritonemb.ops.quantized_bag import quantized_bag
from tritonemb.ops.row_cache import move_rows_, row_cache_allocate_, row_cache_look_up_, row_cache_translate
from tritonemb.ops.row_groups import RowGroups, row_groups, row_groups_async
from tritonemb.ops.row_update import row_gradients_, row_update_

__all__ = [
    "NO_ROW", "POLICIES", "WAYS", "BagGradient", "BatchGradient", "FusedBatch", "FusedTables", "Packing", "RowGroups",
    "bag_fused", "block_bucketize", "cross", "embedding_bag", "fused_lookup", "interaction", "jagged_permute",
    "make_packing", "move_rows_", "pinned_lookup", "quantize_pack", "quantize_unpack", "quantized_bag",
    "row_cache_allocate_", "row_cache_look_up_", "row_cache_translate", "row_gradients_", "row_groups",
    "row_groups_async", "row_update_", "segment_offsets",
]  # fmt: skip
