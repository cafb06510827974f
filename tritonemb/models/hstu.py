"""HSTU: hierarchical sequential transduction units (Zhai et al., ICML 2024, arXiv:2402.17152)."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tritonemb.models.sequence import SequenceModel, Window, Windows
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig

NUM_BUCKETS = 128  # of time differences, by the authors' scale: a bucket is a factor of e^0.301 = 1.35
BUCKET_WIDTH = 0.301


class RelativeBias(nn.Module):
    """Bias of attention by differences of positions, `[1, L, L]`, plus those of times, `[B, L, L]`: `rab^{p,t}`."""

    def __init__(self, max_length: int, with_times: bool, device: Device = None) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(max_length, device=device))
        self.times = nn.Parameter(torch.empty(NUM_BUCKETS, device=device)) if with_times else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, length: int, times: Tensor | None) -> Tensor:
        columns = torch.arange(length, device=self.positions.device)
        bias = _select(self.positions, (columns[:, None] - columns).clamp(min=0))[None]
        if times is None or self.times is None:
            return bias
        buckets = (times[:, :, None] - times[:, None]).clamp(min=1).log() / BUCKET_WIDTH
        return bias + _select(self.times, buckets.long().clamp(max=NUM_BUCKETS - 1))


def _select(values: Tensor, indices: Tensor) -> Tensor:
    """Return `values[indices]`, whose gradient is summed in one order: on CPUs, threads of indexing add in any."""
    on_cpu = values.device.type == "cpu"
    return values.index_select(0, indices.flatten()).view_as(indices) if on_cpu else values[indices]


class HSTUBlock(nn.Module):
    """Pointwise projection, spatial aggregation and pointwise transformation (equations 1 to 3), with a residual:

    `U, V, Q, K = Split(SiLU(f_1(Norm(X))))`, `A = SiLU(Q K^T + rab^{p,t}) / L` under the causal mask,
    `Y = X + f_2(Norm(A V) * U)`. The sum of a row of A is not 1, so it says how many items agree.
    """

    def __init__(
        self, dim: int, num_heads: int, max_length: int, dropout: float, with_times: bool, device: Device = None
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads must divide the embedding_dim, {dim}, got {num_heads}")
        self.num_heads, self.max_length = num_heads, max_length
        self.norm, self.attention_norm = (nn.LayerNorm(dim, device=device) for _ in range(2))
        self.projection, self.out = nn.Linear(dim, 4 * dim, device=device), nn.Linear(dim, dim, device=device)
        self.bias = RelativeBias(max_length, with_times, device)
        self.dropout = nn.Dropout(dropout)

    def forward(self, items: Tensor, windows: Windows, times: Tensor | None) -> Tensor:
        gates, *projected = F.silu(self.projection(self.norm(items))).chunk(4, dim=1)
        attended = windows.attend(self.attend, *projected, *() if times is None else (times,))
        return items + self.out(self.dropout(self.attention_norm(attended) * gates))

    def attend(self, window: Window, value: Tensor, query: Tensor, key: Tensor, times: Tensor | None = None) -> Tensor:
        # Heads `[B, H, L, d]`.
        value, query, key = (x.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for x in (value, query, key))
        scores = query @ key.transpose(2, 3) + self.bias(query.shape[2], times)[:, None]
        weights = (F.silu(scores) / self.max_length).masked_fill(~window.causal_mask()[:, None], 0.0)
        return (weights @ value).transpose(1, 2).flatten(2)


class HSTU(SequenceModel):
    """HSTU: embeddings of items through blocks of pointwise attention with a bias by relative positions.

    Scores of items are dot products of their rows with a hidden state.

    Args:
        table: table of the items.
        max_length: longest sequence.
        num_blocks, num_heads, dropout: blocks, their heads, and rate of dropout.
        optimizer: optimizer of the table, fused into the backward; None for ordinary gradients.

    Shapes: as of `SequenceModel.forward`.
    """

    with_times: ClassVar[bool] = False

    def __init__(
        self,
        table: TableConfig,
        max_length: int = 50,
        num_blocks: int = 2,
        num_heads: int = 1,
        dropout: float = 0.2,
        optimizer: Optimizer | None = None,
        device: Device = None,
    ) -> None:
        super().__init__(table, max_length, optimizer, device)
        dim = table.embedding_dim
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            HSTUBlock(dim, num_heads, max_length, dropout, self.with_times, device) for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(dim, device=device)

    def encode(self, rows: Tensor, windows: Windows, times: Tensor | None = None) -> Tensor:
        """Return hidden states `[N, D]`."""
        if self.with_times != (times is not None):
            raise ValueError("TimedHSTU needs the times of its sequences, and HSTU takes none")
        hidden = self.dropout(rows)
        for block in self.blocks:
            hidden = block(hidden, windows, times)
        return self.norm(hidden)


class TimedHSTU(HSTU):
    """HSTU whose attention has a bias by time differences, too; sequences come with their times."""

    with_times = True
