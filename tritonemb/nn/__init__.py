"""Modules: embeddings, embedding collections and layers of recommendation models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tritonemb.nn.collections import EmbeddingBagCollection, EmbeddingCollection
from tritonemb.nn.embeddings import Embedding, EmbeddingBag
from tritonemb.nn.layers import MLP, CrossNetwork
from tritonemb.nn.tiled_linear import TiledLinear
from tritonemb.tables.cache import sequence_number
from tritonemb.tables.cache_storage import CacheStatistics
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.table import DynamicStatistics
from tritonemb.tables.table_set import PrefetchedFeatures, prefetch

if TYPE_CHECKING:
    from tritonemb.models import DLRM as DLRM
    from tritonemb.models import DCNv2 as DCNv2
    from tritonemb.models import DotInteraction as DotInteraction

__all__ = [
    "MLP", "CacheStatistics", "CrossNetwork", "DynamicStatistics",
    "DynamicTable", "Embedding", "EmbeddingBag", "EmbeddingBagCollection", "EmbeddingCollection",
    "PrefetchedFeatures", "TiledLinear", "prefetch", "sequence_number",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a model of `tritonemb.models`, the layer above, at its first use."""
    if name not in ("DLRM", "DCNv2", "DotInteraction"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("tritonemb.models"), name)
