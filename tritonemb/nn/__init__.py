"""Modules: embeddings, embedding collections and recommendation models."""

from tritonemb.nn.collections import EmbeddingBagCollection, EmbeddingCollection
from tritonemb.nn.embeddings import Embedding, EmbeddingBag
from tritonemb.nn.models import DLRM, MLP, CrossNetwork, DCNv2, DotInteraction
from tritonemb.nn.tiled_linear import TiledLinear
from tritonemb.tables.cache import sequence_number
from tritonemb.tables.cache_storage import CacheStatistics
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.table import DynamicStatistics
from tritonemb.tables.table_set import PrefetchedFeatures, prefetch

__all__ = [
    "DLRM", "MLP", "CacheStatistics", "CrossNetwork", "DCNv2", "DotInteraction", "DynamicStatistics",
    "DynamicTable", "Embedding", "EmbeddingBag", "EmbeddingBagCollection", "EmbeddingCollection",
    "PrefetchedFeatures", "TiledLinear", "prefetch", "sequence_number",
]  # fmt: skip
