"""MMoE: a mixture of experts with a gate per label (Ma et al., KDD 2018, doi:10.1145/3219819.3220007)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tritonemb.jagged import Features
from tritonemb.models.pooled import PooledModel
from tritonemb.nn.layers import MLP
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig


class Experts(nn.ModuleList):
    """MLPs of the same input: `[B, in_features]` to `[B, num_experts, widths[-1]]`."""

    def __init__(self, in_features: int, num_experts: int, widths: Sequence[int], device: Device = None) -> None:
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        super().__init__(MLP(in_features, widths, device=device) for _ in range(num_experts))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([expert(inputs) for expert in self], dim=1)


class Gate(nn.Module):
    """Mixture of the outputs of experts `[B, E, width]` with weights `softmax(W x)`: `[B, width]`."""

    def __init__(self, in_features: int, num_experts: int, device: Device = None) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_experts, device=device)

    def forward(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        return (self.linear(inputs).softmax(dim=1)[:, :, None] * outputs).sum(dim=1)


class Towers(nn.ModuleList):
    """An MLP per label. It maps the label's representation `[B, top_mlp[-2]]`, with a hidden layer of `top_mlp[-1]`
    units, to its logit. Result: `[B, num_labels]`, `[B]` for one label."""

    def __init__(self, num_labels: int, top_mlp: Sequence[int], device: Device = None) -> None:
        if num_labels < 1 or len(top_mlp) < 2:
            text = f"and top_mlp widths of experts and of towers, got {num_labels} and {list(top_mlp)}"
            raise ValueError(f"num_labels must be at least 1, {text}")
        super().__init__(MLP(top_mlp[-2], [top_mlp[-1], 1], False, device) for _ in range(num_labels))

    def forward(self, representations: Sequence[Tensor]) -> Tensor:
        logits = torch.cat([tower(x) for tower, x in zip(self, representations, strict=True)], dim=1)
        return logits if len(self) > 1 else logits.squeeze(1)


class MMoE(PooledModel):
    """Multi-gate mixture of experts: all labels share the experts `f_e`, and each has a gate and a tower:
    `logit_k = h_k(sum_e g_k(x)_e f_e(x))` with `g_k(x) = softmax(W_k x)` (equations 6 and 7).

    Args:
        tables: tables of any dims.
        num_dense: dense features per sample, at least 0.
        num_labels: number of labels, at least 1.
        top_mlp: widths of the layers of every expert, then the width of the hidden layer of each tower: at least two.
        num_experts: number of experts.
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
        self.towers = Towers(num_labels, top_mlp, device)
        self.experts = Experts(self.width, num_experts, top_mlp[:-1], device)
        self.gates = nn.ModuleList(Gate(self.width, num_experts, device) for _ in range(num_labels))

    def forward(self, dense: Tensor, sparse: Features) -> Tensor:
        """Return logits."""
        inputs = self.concatenated(dense, sparse)
        outputs = self.experts(inputs)
        return self.towers([gate(inputs, outputs) for gate in self.gates])
