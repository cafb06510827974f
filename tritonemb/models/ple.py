"""PLE: progressive layered extraction, experts of each label and shared ones (Tang et al., RecSys 2020,
doi:10.1145/3383313.3412236)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from tritonemb.jagged import Features
from tritonemb.models.mmoe import Experts, Gate, Towers
from tritonemb.models.pooled import PooledModel
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig


class ExtractionLevel(nn.Module):
    """Level of PLE: `num_experts` experts of each label and as many shared ones, and gates. A label's gate mixes the
    label's and the shared experts; that of the shared representation, absent in the last level, mixes all."""

    def __init__(
        self, in_features: int, width: int, num_labels: int, num_experts: int, is_last: bool, device: Device = None
    ) -> None:
        super().__init__()
        experts = (Experts(in_features, num_experts, [width], device) for _ in range(num_labels + 1))
        self.experts = nn.ModuleList(experts)  # those of the labels, then the shared ones
        sizes = [2 * num_experts] * num_labels + [(num_labels + 1) * num_experts] * (not is_last)
        self.gates = nn.ModuleList(Gate(in_features, size, device) for size in sizes)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Map the representations of the labels, then the shared one, to those of the next level."""
        *outputs, shared = (experts(x) for experts, x in zip(self.experts, inputs, strict=True))
        mixed = [torch.cat([output, shared], dim=1) for output in outputs] + [torch.cat([*outputs, shared], dim=1)]
        return [gate(x, experts) for gate, x, experts in zip(self.gates, inputs, mixed, strict=False)]


class PLE(PooledModel):
    """Progressive layered extraction: levels of shared experts and experts of each label, then a tower per label.

    All representations are `[dense features, pooled rows]` at first. In each level a label's gate mixes the experts of
    the label and the shared ones, and the shared gate mixes all experts. With one level this is the paper's CGC.

    Args:
        tables: tables of any dims.
        num_dense: dense features per sample, at least 0.
        num_labels: number of labels, at least 1.
        top_mlp: width of the one-layer experts of each level, then of the hidden layer of each tower: at least two.
        num_experts: experts of each label, and shared ones, per level.
        optimizer: optimizer of the tables, fused into the backward; None for ordinary gradients.

    Shapes: `dense [B, num_dense]` float, `sparse` a `KeyedJaggedTensor`; logits `[B, num_labels]`, `[B]` for one label.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        num_dense: int,
        num_labels: int = 1,
        top_mlp: Sequence[int] = (256, 64),
        num_experts: int = 4,
        optimizer: Optimizer | None = None,
        device: Device = None,
    ) -> None:
        super().__init__(tables, num_dense, optimizer, device)
        self.towers, widths = Towers(num_labels, top_mlp, device), [self.width, *top_mlp[:-1]]
        self.levels = nn.ModuleList(
            ExtractionLevel(*pair, num_labels, num_experts, level == len(widths) - 1, device)
            for level, pair in enumerate(pairwise(widths), 1)
        )

    def forward(self, dense: Tensor, sparse: Features) -> Tensor:
        """Return logits."""
        representations = [self.concatenated(dense, sparse)] * (len(self.towers) + 1)
        for level in self.levels:
            representations = level(representations)
        return self.towers(representations)
