"""FinalMLP: two MLPs over gated features, fused by bilinear forms (Mao et al., AAAI 2023, arXiv:2304.00902)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tritonemb.jagged import Features
from tritonemb.models.pooled import PooledModel
from tritonemb.nn.layers import MLP
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig
from tritonemb.utils import join_names

GATE_WIDTH = 64  # hidden units of a gate's MLP: those of the authors' implementation in FuxiCTR


class FeatureGate(nn.Module):
    """Gates `2 * sigmoid(MLP(context))` of features (equations 5 and 6): `[B, context_width]` to `[B, width]`.

    With an empty context the gates are parameters `[width]`, and 1 at first."""

    def __init__(self, context_width: int, width: int, device: Device = None) -> None:
        super().__init__()
        self.mlp = MLP(context_width, [GATE_WIDTH, width], False, device) if context_width else None
        self.logits = None if context_width else nn.Parameter(torch.zeros(width, device=device))

    def reset_parameters(self) -> None:
        if self.logits is not None:
            nn.init.zeros_(self.logits)

    def forward(self, context: Tensor) -> Tensor:
        logits = self.logits if self.mlp is None else self.mlp(context)
        assert logits is not None
        return 2 * logits.sigmoid()


class BilinearFusion(nn.Module):
    """Fusion of two streams `[B, width]` to logits `[B]`, per head a bilinear form (equations 7 and 10):
    `b + w_1 x + w_2 y + sum_h x_h W_h y_h`, where `x_h` and `y_h` are the heads' shares of the columns."""

    def __init__(self, width: int, num_heads: int, device: Device = None) -> None:
        super().__init__()
        if num_heads < 1 or width % num_heads:
            raise ValueError(f"num_heads must divide the width of the streams, {width}, got {num_heads}")
        self.linear = nn.Linear(2 * width, 1, device=device)
        self.weight = nn.Parameter(torch.empty(num_heads, width // num_heads, width // num_heads, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_normal_(self.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # Heads `[H, B, width / H]` of both streams.
        x_heads, y_heads = (stream.unflatten(1, (len(self.weight), -1)).transpose(0, 1) for stream in (x, y))
        bilinear = (torch.bmm(x_heads, self.weight.to(x.dtype)) * y_heads).sum(dim=(0, 2))
        return self.linear(torch.cat([x, y], dim=1)).squeeze(1) + bilinear


class FinalMLP(PooledModel):
    """FinalMLP: two MLPs over all features, each with its own gates of these, and a bilinear fusion of their outputs.

    Args:
        tables: tables of any dims.
        num_dense: dense features per sample, at least 0.
        top_mlp: widths of the layers of each stream.
        gate_features: sparse features that are the context of the first stream's gates; all others are that of the
            second stream's. Without them the gates are learned and have no context.
        num_heads: heads of the fusion; it divides the last width of `top_mlp`.
        optimizer: optimizer of the tables, fused into the backward; None for ordinary gradients.

    Shapes: `dense [B, num_dense]` float, `sparse` a `KeyedJaggedTensor`; result: logits `[B]`.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        num_dense: int,
        top_mlp: Sequence[int] = (512, 256),
        gate_features: Sequence[str] = (),
        num_heads: int = 1,
        optimizer: Optimizer | None = None,
        device: Device = None,
    ) -> None:
        super().__init__(tables, num_dense, optimizer, device)
        names = [name for table in tables for name in table.feature_names]
        if unknown := [name for name in gate_features if name not in names]:
            raise ValueError(f"gate_features has {unknown[0]!r}, which no table has: {join_names(names)}")
        self.num_dense, self._dims = num_dense, self.embeddings.embedding_dims
        first = [index for index, name in enumerate(names) if name in gate_features]
        self._contexts = first, [index for index in range(len(names)) if first and index not in first]
        widths = [sum(self._dims[index] for index in context) for context in self._contexts]
        self.gates = nn.ModuleList(FeatureGate(width, self.width, device) for width in widths)
        self.streams = nn.ModuleList(MLP(self.width, top_mlp, device=device) for _ in range(2))
        self.fusion = BilinearFusion(top_mlp[-1], num_heads, device)

    def forward(self, dense: Tensor, sparse: Features) -> Tensor:
        """Return logits `[B]`."""
        inputs = self.concatenated(dense, sparse)
        columns, outputs = inputs[:, self.num_dense :].split(self._dims, dim=1), []
        for indices, gate, stream in zip(self._contexts, self.gates, self.streams, strict=True):
            context = torch.cat([columns[index] for index in indices], dim=1) if indices else inputs[:, :0]
            outputs.append(stream(inputs * gate(context)))
        return self.fusion(*outputs)
