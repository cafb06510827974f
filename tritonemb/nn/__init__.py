"""Modules: embedding collections and the recommendation models built from them."""

from tritonemb.nn.collections import EmbeddingBagCollection, EmbeddingCollection
from tritonemb.nn.embeddings import Embedding, EmbeddingBag
from tritonemb.nn.layers import MLP, DotInteraction
from tritonemb.nn.models import DLRM, CrossNetwork, DCNv2
from tritonemb.tables.cache_storage import CacheStatistics
from tritonemb.tables.lookup import PrefetchedFeatures, prefetch, sequence_number

__all__ = [
    "DLRM",
    "MLP",
    "CacheStatistics",
    "CrossNetwork",
    "DCNv2",
    "DotInteraction",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "PrefetchedFeatures",
    "prefetch",
    "sequence_number",
]
