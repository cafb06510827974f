"""Models of `tritonemb train`, built from its options."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from tritonemb.data.protocol import Feature, tables_of
from tritonemb.nn import DLRM, DCNv2
from tritonemb.optimizers import OPTIMIZERS, Optimizer
from tritonemb.training.config import TrainConfig


def build_model(config: TrainConfig, features: Sequence[Feature], num_dense: int) -> nn.Module:
    tables = config.server.place(config.tables.place(tables_of(tuple(features), config.embedding_dim)))
    options: dict[str, Any] = {"top_mlp": config.top_mlp, "optimizer": build_optimizer(config), "device": config.device}
    if config.model == "dcnv2":
        return DCNv2(tables, num_dense, **options)
    return DLRM(tables, num_dense, bottom_mlp=config.bottom_mlp, **options)


def build_optimizer(config: TrainConfig) -> Optimizer:
    return OPTIMIZERS[config.embedding_optimizer](lr=config.embedding_lr, weight_decay=config.embedding_weight_decay)
