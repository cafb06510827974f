"""Modules: embedding collections and the recommendation models built from them."""

from tritonemb.nn.cross import CrossNetwork, DCNv2
from tritonemb.nn.dlrm import DLRM
from tritonemb.nn.embedding import Embedding
from tritonemb.nn.embedding_bag import EmbeddingBag
from tritonemb.nn.embedding_bag_collection import EmbeddingBagCollection
from tritonemb.nn.embedding_collection import EmbeddingCollection
from tritonemb.nn.interaction import DotInteraction
from tritonemb.nn.look_ahead import moment, send
from tritonemb.nn.mlp import MLP
from tritonemb.nn.moments import Moment
from tritonemb.nn.row_cache import CacheStatistics
from tritonemb.nn.sent import SentFeatures

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
    "Moment",
    "SentFeatures",
    "moment",
    "send",
]
