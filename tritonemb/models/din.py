"""DIN: deep interest network (Zhou et al., KDD 2018, arXiv:1706.06978)."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tritonemb.jagged import Features
from tritonemb.models.pooled import pooled_embeddings
from tritonemb.models.sequence import can_read
from tritonemb.nn.collections import EmbeddingCollection
from tritonemb.nn.layers import MLP
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig
from tritonemb.utils import rows_to_pad


class TargetAttention(nn.Module):
    """Interest of a user in a target: the sum of the history's rows, each with a weight by row and target (equation 3).

    A weight is `MLP(row, target, row - target, row * target)`. Weights have no softmax, so that their sum says how
    strong the interest is. Hidden units are ReLUs: with the paper's Dice a weight would depend on the whole batch.
    """

    def __init__(self, dim: int, mlp: Sequence[int], device: Device = None) -> None:
        super().__init__()
        self.mlp = MLP(4 * dim, [*mlp, 1], last_activation=False, device=device)

    def forward(self, rows: Tensor, targets: Tensor, samples: Tensor, mask: Tensor) -> Tensor:
        """Return interests `[B, D]` in targets `[B, D]` by rows `[N, D]`, of samples `[N]`, if the mask has them."""
        target = targets.index_select(0, samples)
        inputs = torch.cat([rows, target, rows - target, rows * target], dim=1)
        if not (self.training or torch.compiler.is_compiling()) and inputs.device.type == "cpu":
            inputs = F.pad(inputs, (0, 0, 0, rows_to_pad(len(rows))))  # so that a weight does not depend on other rows
        weights = self.mlp(inputs)[: len(rows)]
        weighted = torch.where(mask[:, None], weights * rows, 0.0)
        return torch.zeros_like(targets).index_add(0, samples, weighted)


class DIN(nn.Module):
    """DIN: an MLP over dense features, pooled rows, and for each history the user's interest in the target.

    A table of several features has a target, its first one, with one id per sample, and histories of the same ids, such
    as the items that a user has clicked. `tritonemb train` makes such a table with `--share history=item`.

    Args:
        tables: at least one with a target and histories, all such tables of one dim; the others of any dims.
        num_dense: dense features per sample, at least 0.
        attention_mlp: widths of the hidden layers of the attention.
        top_mlp: widths of the hidden layers of the MLP.
        optimizer: optimizer of the tables, fused into the backward; None for ordinary gradients.

    Shapes: `dense [B, num_dense]` float, `sparse` a `KeyedJaggedTensor`; result: logits `[B]`.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        num_dense: int,
        attention_mlp: Sequence[int] = (80, 40),
        top_mlp: Sequence[int] = (512, 256),
        optimizer: Optimizer | None = None,
        device: Device = None,
    ) -> None:
        super().__init__()
        shared = [replace(table, pooling="none") for table in tables if len(table.feature_names) > 1]
        pooled = [table for table in tables if len(table.feature_names) == 1]
        if not shared:
            raise ValueError(
                "DIN needs a history with the table of its target: --share history=item, or "
                'TableConfig("item", ..., features=["item", "history"])'
            )
        self.sequence_embeddings = EmbeddingCollection(shared, optimizer, device)
        self.embeddings = pooled_embeddings(pooled, optimizer, device) if pooled else None
        self.histories = [(table.feature_names[0], name) for table in shared for name in table.feature_names[1:]]
        dim = shared[0].embedding_dim
        self.attentions = nn.ModuleList(TargetAttention(dim, attention_mlp, device) for _ in self.histories)
        pooled_width = sum(self.embeddings.embedding_dims) if self.embeddings is not None else 0
        width = num_dense + pooled_width + dim * (len(shared) + len(self.histories))
        self.top = MLP(width, [*top_mlp, 1], last_activation=False, device=device)

    def forward(self, dense: Tensor, sparse: Features) -> Tensor:
        """Return logits `[B]`."""
        sequences = self.sequence_embeddings(sparse)
        rows, offsets, keys = sequences.values().to(dense.dtype), sequences.offsets(), sequences.keys()
        bags = torch.arange(len(offsets) - 1, device=rows.device)
        bags = torch.repeat_interleave(bags, offsets.diff(), output_size=len(rows))
        size = sequences.stride()
        # Rows of each target: its only one of each sample.
        targets: dict[str, Tensor] = {}  # not `dict[...]()`, which Dynamo cannot trace
        for name in dict.fromkeys(target for target, _ in self.histories):
            bounds = offsets[keys.index(name) * size :][: size + 1]
            is_single = (lengths := bounds.diff()) == 1
            if not can_read(offsets):
                torch._assert_async(is_single.all(), f"a sample needs one id of {name}, the target of a history")
            elif not bool(is_single.all()):
                sample = int(is_single.long().argmin())
                text = f"sample {sample} has {int(lengths[sample])} ids of {name!r}, the target of a history"
                raise ValueError(f"{text}, expected one; its column must not be a list")
            targets[name] = rows.index_select(0, bounds[:-1])
        columns = [dense, *targets.values()]
        for attention, (target, history) in zip(self.attentions, self.histories, strict=True):
            key, part = keys.index(history), slice(None)
            if can_read(offsets):  # otherwise all rows, as their number is known
                part = slice(int(offsets[key * size]), int(offsets[(key + 1) * size]))
            samples, mask = bags[part] % size, bags[part] // size == key
            columns.append(attention(rows[part], targets[target], samples, mask))
        columns += [] if self.embeddings is None else [self.embeddings(sparse).to(dense.dtype)]
        return self.top(torch.cat(columns, dim=1)).squeeze(1)
