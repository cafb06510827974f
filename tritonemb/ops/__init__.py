"""`torch.ops.tritonemb.*`: schema, fake, autograd formula, input checks and dispatch."""

from tritonemb.ops.embedding_bag import embedding_bag
from tritonemb.ops.embedding_bag_fused import Fused, embedding_bag_fused
from tritonemb.ops.row_groups import RowGroups, row_groups
from tritonemb.ops.row_update import row_update_

__all__ = ["Fused", "RowGroups", "embedding_bag", "embedding_bag_fused", "row_groups", "row_update_"]
