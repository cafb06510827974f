"""DCNv2: deep and cross network, version 2 (Wang et al., WWW 2021)."""

from collections.abc import Sequence

from torch import Tensor

from tritonemb.jagged import Features
from tritonemb.models.pooled import PooledModel
from tritonemb.nn.layers import MLP, CrossNetwork
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig


class DCNv2(PooledModel):
    """DCNv2 in its stacked form (Wang et al., WWW 2021): cross layers over dense features and pooled rows, then an MLP.

    Args:
        tables: tables of any dims.
        num_dense: dense features per sample, at least 0.
        num_cross_layers, low_rank: arguments of the `CrossNetwork`.
        top_mlp: widths of the hidden layers after the cross network.
        optimizer: optimizer of the tables, fused into the backward; None for ordinary gradients.

    Shapes: `dense [B, num_dense]` float, `sparse` a `KeyedJaggedTensor`; result: logits `[B]`.
    """

    def __init__(
        self, tables: Sequence[TableConfig], num_dense: int, num_cross_layers: int = 3, low_rank: int | None = None,
        top_mlp: Sequence[int] = (512, 256), optimizer: Optimizer | None = None, device: Device = None,
    ) -> None:  # fmt: skip
        super().__init__(tables, num_dense, optimizer, device)
        self.cross = CrossNetwork(self.width, num_cross_layers, low_rank, device)
        self.top = MLP(self.width, [*top_mlp, 1], last_activation=False, device=device)

    def forward(self, dense: Tensor, sparse: Features) -> Tensor:
        """Return logits `[B]`."""
        return self.top(self.cross(self.concatenated(dense, sparse))).squeeze(1)
