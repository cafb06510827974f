"""Recommendation models, each as in its paper; `MODELS` has their names in `tritonemb train --model`.

A model is built as `model(tables, num_dense, optimizer=..., device=..., **options)`, with those of `ModelOptions`, of
`bottom_mlp` and `top_mlp` that its signature names. A function that is called like that is a model of `--model`, too.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from tritonemb.models.dcnv2 import DCNv2, DCNv2Options
from tritonemb.models.deepfm import DeepFM
from tritonemb.models.din import DIN, DINOptions
from tritonemb.models.dlrm import DLRM, DotInteraction
from tritonemb.models.finalmlp import FinalMLP, FinalMLPOptions
from tritonemb.models.hstu import HSTU, TimedHSTU
from tritonemb.models.mmoe import MMoE, MMoEOptions
from tritonemb.models.ple import PLE
from tritonemb.models.sasrec import SASRec
from tritonemb.models.sequence import NextItem
from tritonemb.models.two_tower import TwoTower, TwoTowerOptions

__all__ = [
    "DIN",
    "DLRM",
    "HSTU",
    "PLE",
    "DCNv2",
    "DeepFM",
    "DotInteraction",
    "FinalMLP",
    "MMoE",
    "NextItem",
    "SASRec",
    "TimedHSTU",
    "TwoTower",
]
MODELS: dict[str, Callable[..., nn.Module]] = {
    "dlrm": DLRM,
    "dcnv2": DCNv2,
    "deepfm": DeepFM,
    "finalmlp": FinalMLP,
    "din": DIN,
    "two_tower": TwoTower,
    "mmoe": MMoE,
    "ple": PLE,
}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DCNv2Options, DINOptions, FinalMLPOptions, TwoTowerOptions, MMoEOptions):
    """Options of single models."""
