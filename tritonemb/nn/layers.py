"""Dense layers of recommendation models: dot products of all pairs, MLP, cross layers of DCNv2."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from tritonemb.ops.interaction import cross, interaction, is_cross_fused, is_fused
from tritonemb.types import Device


class DotInteraction(nn.Module):
    """Dot products of all pairs of feature vectors, after the dense vector, in one kernel; differentiable once.

    Source: Naumov et al., arXiv:1906.00091, section 2.

    Shapes: `dense [B, D]`, `sparse [B, F * D]` or `[B, F, D]`; result `[B, D + F * (F + 1) / 2]`: the dense vector,
    then the lower triangle of the products of the `F + 1` vectors, row-major.

    Args:
        num_features: number of sparse vectors per sample, `F`.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        if num_features < 1:
            raise ValueError(f"num_features must be at least 1, got {num_features}")
        self.num_features = num_features
        self.num_pairs = num_features * (num_features + 1) // 2  # products in the result

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Return dense vector and products; raise ValueError unless `sparse` has `num_features` vectors of its
        width."""
        batch_size, dim = dense.shape
        if sparse.numel() != batch_size * self.num_features * dim:
            raise ValueError(
                f"sparse must be [{batch_size}, {self.num_features} * {dim}] for dense {tuple(dense.shape)}, "
                f"got {tuple(sparse.shape)}"
            )
        if is_fused(dense, sparse):
            return interaction(dense, sparse.reshape(batch_size, self.num_features * dim))
        vectors = torch.cat([dense.unsqueeze(1), sparse.reshape(batch_size, self.num_features, dim)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        num_vectors = self.num_features + 1
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1, device=dense.device)
        return torch.cat([dense, products.index_select(1, row * num_vectors + column)], dim=1)


class MLP(nn.Sequential):
    """Linear layers with ReLU between them: `[B, in_features]` to `[B, widths[-1]]`.

    Args:
        in_features: width of the input.
        widths: width of each layer.
        last_activation: whether a ReLU follows the last layer.
    """

    def __init__(
        self, in_features: int, widths: Sequence[int], last_activation: bool = True, device: Device = None
    ) -> None:
        if not widths or any(width < 1 for width in widths) or in_features < 1:
            raise ValueError(f"an MLP needs positive widths, got {in_features} -> {list(widths)}")
        layers: list[nn.Module] = []
        for pair in pairwise([in_features, *widths]):
            layers += [nn.Linear(*pair, device=device), nn.ReLU()]
        super().__init__(*(layers if last_activation else layers[:-1]))


class CrossNetwork(nn.Module):
    """Low-rank cross layers: `x_{l+1} = x_0 ⊙ (U_l (V_l x_l) + b_l) + x_l` (Wang et al., WWW 2021, equation 2).

    Args:
        width: width of the input and output, `[B, width]`.
        num_layers: number of layers, at least 1.
        low_rank: rank of `U V`; None for a full matrix per layer (equation 1).
    """

    def __init__(self, width: int, num_layers: int, low_rank: int | None = None, device: Device = None) -> None:
        super().__init__()
        if num_layers < 1 or (low_rank is not None and low_rank < 1):
            raise ValueError(
                f"a CrossNetwork needs num_layers and low_rank of at least 1, got {num_layers}, {low_rank}"
            )
        rank = width if low_rank is None else low_rank
        self.down = nn.ModuleList(
            nn.Identity() if low_rank is None else nn.Linear(width, rank, bias=False, device=device)
            for _ in range(num_layers)
        )
        self.up = nn.ModuleList(nn.Linear(rank, width, device=device) for _ in range(num_layers))

    def forward(self, inputs: Tensor) -> Tensor:
        crossed = inputs
        for down, up in zip(self.down, self.up, strict=True):
            # Not for subclasses or replacements of a linear layer, which may compute something else.
            if type(up) is torch.nn.modules.linear.Linear and is_cross_fused(inputs, up.weight):
                crossed = cross(inputs, nn.functional.linear(down(crossed), up.weight), up.bias, crossed)
            else:
                crossed = inputs * up(down(crossed)) + crossed
        return crossed
