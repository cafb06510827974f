"""SASRec: self-attentive sequential recommendation (Kang and McAuley, ICDM 2018, arXiv:1808.09781)."""

from torch import Tensor, nn
from torch.nn import functional as F

from tritonemb.models.sequence import SequenceModel, Window, Windows
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig


class SelfAttention(nn.Module):
    """Causal attention of normalized queries to the items of their window (equations 2 to 4)."""

    def __init__(self, dim: int, num_heads: int, dropout: float, device: Device = None) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads must divide the embedding_dim, {dim}, got {num_heads}")
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, device=device) for _ in range(4))
        self.num_heads, self.dropout = num_heads, dropout

    def forward(self, queries: Tensor, items: Tensor, windows: Windows) -> Tensor:
        return self.out(windows.attend(self.attend, self.query(queries), self.key(items), self.value(items)))

    def attend(self, window: Window, *padded: Tensor) -> Tensor:
        query, key, value = (x.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for x in padded)  # [B, H, L, d]
        dropout = self.dropout if self.training else 0.0
        mask = window.causal_mask()[:, None]
        attended = F.scaled_dot_product_attention(query, key, value, mask, dropout)
        return attended.transpose(1, 2).flatten(2)


class SASRecBlock(nn.Module):
    """Self-attention, then a point-wise feed-forward network (equation 5), each with residual, dropout and layer norm.

    The residuals are of the normalized inputs, as in the authors' implementation.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float, device: Device = None) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(dim, device=device) for _ in range(2))
        self.attention = SelfAttention(dim, num_heads, dropout, device)
        hidden, out = (nn.Linear(dim, dim, device=device) for _ in range(2))
        self.feed_forward = nn.Sequential(hidden, nn.ReLU(), nn.Dropout(dropout), out, nn.Dropout(dropout))

    def forward(self, items: Tensor, windows: Windows) -> Tensor:
        queries = self.attention_norm(items)
        hidden = self.feed_forward_norm(queries + self.attention(queries, items, windows))
        return hidden + self.feed_forward(hidden)


class SASRec(SequenceModel):
    """SASRec: embeddings of items plus those of positions, through causal self-attention blocks.

    A position counts from the end of a sequence, as in windows that are padded at their start. Scores of items are dot
    products of their rows with a hidden state.

    Args:
        table: table of the items.
        max_length: longest sequence.
        num_blocks, num_heads, dropout: self-attention blocks, their heads, and rate of dropout.
        optimizer: optimizer of the table, fused into the backward; None for ordinary gradients.

    Shapes: as of `SequenceModel.forward`.
    """

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
        self.positions = nn.Embedding(max_length, dim, device=device)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(SASRecBlock(dim, num_heads, dropout, device) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill all matrices but the items' with initial values."""
        for parameter in (*self.positions.parameters(), *self.blocks.parameters()):
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)

    def encode(self, rows: Tensor, windows: Windows, times: Tensor | None = None) -> Tensor:
        """Return hidden states `[N, D]`."""
        hidden = self.dropout(rows + self.positions(windows.distances))
        for block in self.blocks:
            hidden = block(hidden, windows)
        return self.norm(hidden)
