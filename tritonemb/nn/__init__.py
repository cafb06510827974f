"""Modules: embedding collections and the recommendation models built from them."""

from tritonemb.nn.collections import EmbeddingBagCollection, EmbeddingCollection
from tritonemb.nn.embedding import Embedding
from tritonemb.nn.embedding_bag import EmbeddingBag
from tritonemb.nn.layers import MLP, DotInteraction
from tritonemb.nn.models import DLRM, CrossNetwork, DCNv2
from tritonemb.nn.prefetch import send
from tritonemb.tables.cache import CacheStatistics
from tritonemb.tables.pins import sequence_number
from tritonemb.tables.prefetched import SentFeatures

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
    "SentFeatures",
    "send",
    "sequence_number",
]
