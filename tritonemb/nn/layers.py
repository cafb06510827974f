"""Dense layers of recommendation models: MLP, cross layers of DCNv2."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tritonemb.ops.interaction import cross, is_cross_fused
from tritonemb.types import Device
from tritonemb.utils import rows_to_pad


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


def compute_runs_once(layers: MLP, min_rows: int) -> None:
    """Compute runs of equal rows, as of one user with many candidates, once: without gradients on a CPU, padded to
    `min_rows`, the smallest batch that rounds rows as large ones do. Other calls of the layers are as before."""
    layers.forward = partial(_forward_runs, layers, min_rows)  # type: ignore[method-assign]


def _forward_runs(layers: MLP, min_rows: int, input: Tensor) -> Tensor:
    forward = partial(MLP.forward, layers)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not input.is_cpu:
        return forward(input)
    # Most inputs without such runs show it by two of their columns.
    if 2 * int(_run_starts(input[:, [0, -1]]).sum()) > len(input):
        return forward(input)
    starts = _run_starts(input)
    (rows,) = starts.nonzero(as_tuple=True)
    padding = rows_to_pad(len(rows), min_rows)
    if 2 * (len(rows) + padding) > len(input):
        return forward(input)
    return forward(input[F.pad(rows, (0, padding))])[starts.cumsum(0) - 1]


def _run_starts(rows: Tensor) -> Tensor:
    """Return whether each of the rows `[N, W]` differs from the one before it, bool `[N]`."""
    return F.pad((rows[1:] != rows[:-1]).any(1), (1, 0), value=True)[: len(rows)]


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
