"""Recommendation models, each as in its paper; `MODELS` has their names in `tritonemb train --model`.

A model is built as `model(tables, num_dense, optimizer=..., device=..., **options)`, with those of `ModelOptions`, of
`bottom_mlp` and `top_mlp` that its signature names. A function that is called like that is a model of `--model`, too.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from tritonemb.models.dcnv2 import DCNv2
from tritonemb.models.deepfm import DeepFM
from tritonemb.models.din import DIN
from tritonemb.models.dlrm import DLRM, DotInteraction
from tritonemb.models.finalmlp import FinalMLP
from tritonemb.models.hstu import HSTU, TimedHSTU
from tritonemb.models.mmoe import MMoE
from tritonemb.models.ple import PLE
from tritonemb.models.sasrec import SASRec
from tritonemb.models.sequence import NextItem
from tritonemb.models.two_tower import TwoTower
from tritonemb.utils import Options, number

__all__ = [
    "DIN", "DLRM", "HSTU", "PLE", "DCNv2", "DeepFM", "DotInteraction", "FinalMLP", "MMoE", "NextItem", "SASRec",
    "TimedHSTU", "TwoTower",
]  # fmt: skip
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
class ModelOptions(Options):
    """Options of single models.

    Args:
        num_experts: mmoe: experts that all labels share; ple: experts of each label, and shared ones, per level.
        user_features: two_tower: features of the user and of the context; all others are of the item.
        temperature: two_tower: divisor of the scores of unit vectors; if not given, a score is a dot product.
        gate_features: finalmlp: features that the gate of the first stream reads, the other gate reads the others;
            learned gates that read no features if not given.
        num_heads: finalmlp: heads of the bilinear fusion, a divisor of the last width of top_mlp.
        attention_mlp: din: widths of the hidden layers of its attention.
        num_cross_layers: dcnv2: cross layers.
        low_rank: dcnv2: rank of the matrix of a cross layer; full if not given.
    """

    num_experts: int = number(4, least=1)
    user_features: tuple[str, ...] = ()
    temperature: float | None = number(None, positive=True)
    gate_features: tuple[str, ...] = ()
    num_heads: int = number(1, least=1)
    attention_mlp: tuple[int, ...] = (80, 40)
    num_cross_layers: int = number(3, least=1)
    low_rank: int | None = number(None, least=1)
