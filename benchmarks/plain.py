"""A DLRM and row-wise Adagrad in plain `torch.nn`: what the accuracy of the fused embeddings is measured against."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

import tritonemb as te


class PlainRowWiseAdagrad(torch.optim.Optimizer):
    """`m += mean(g²)` a row, `w -= lr · g / (sqrt(m) + eps)`, on dense gradients of [rows, D] parameters.

    A row without a gradient has `g = 0`, which changes neither `m` nor `w`, so no row needs to be singled out.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not used here"
        for group in self.param_groups:
            for weight in group["params"]:
                if "sum" not in self.state[weight]:
                    self.state[weight]["sum"] = torch.zeros(weight.shape[0])
                total = self.state[weight]["sum"]
                total += weight.grad.square().mean(dim=1)
                weight -= group["lr"] * weight.grad / (total.sqrt() + group["eps"]).unsqueeze(1)


class PlainDLRM(nn.Module):
    """The network of `te.nn.DLRM` with one `torch.nn.EmbeddingBag` a table, which is looked up by the table's name."""

    below_diagonal: Tensor

    def __init__(
        self, tables: Sequence[te.TableConfig], num_dense: int, bottom_mlp: Sequence[int], top_mlp: Sequence[int]
    ) -> None:
        super().__init__()
        dim, num_vectors = tables[0].embedding_dim, len(tables) + 1
        self.keys = [table.name for table in tables]
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(table.num_embeddings, dim, mode=table.pooling, include_last_offset=True) for table in tables
        )
        self.bottom = nn.ModuleList(_linears([num_dense, *bottom_mlp, dim]))
        self.top = nn.ModuleList(_linears([dim + num_vectors * (num_vectors - 1) // 2, *top_mlp, 1]))
        self.register_buffer("below_diagonal", torch.ones(num_vectors, num_vectors).tril(-1).bool())

    def tables(self) -> list[nn.Parameter]:
        return list(self.bags.parameters())

    def dense_parameters(self) -> list[nn.Parameter]:
        return [*self.bottom.parameters(), *self.top.parameters()]

    def copy_weights(self, model: te.nn.DLRM) -> None:
        """Start where `model` starts."""
        state = model.state_dict()
        sources = [state[f"embeddings.{key}.weight"] for key in self.keys]
        sources += [*model.bottom.parameters(), *model.top.parameters()]
        with torch.no_grad():
            for target, source in zip([*self.tables(), *self.dense_parameters()], sources, strict=True):
                target.copy_(source)

    def forward(self, dense: Tensor, sparse: te.KeyedJaggedTensor) -> Tensor:
        vector = dense
        for layer in self.bottom:
            vector = torch.relu(layer(vector))
        vectors = torch.stack([vector, *self._pooled(sparse)], dim=1)
        products = torch.einsum("bid,bjd->bij", vectors, vectors)[:, self.below_diagonal]
        hidden = torch.cat([vector, products], dim=1)
        for layer in self.top[:-1]:
            hidden = torch.relu(layer(hidden))
        logits: Tensor = self.top[-1](hidden)
        return logits.squeeze(1)

    def _pooled(self, sparse: te.KeyedJaggedTensor) -> list[Tensor]:
        batch_size = (sparse.offsets().numel() - 1) // len(sparse.keys())
        pooled = []
        for key, bag in zip(self.keys, self.bags, strict=True):
            first = list(sparse.keys()).index(key) * batch_size
            offsets = sparse.offsets()[first : first + batch_size + 1]
            values = sparse.values()[int(offsets[0]) : int(offsets[-1])]
            pooled.append(bag(values, (offsets - offsets[0]).to(values.dtype)))
        return pooled


def _linears(widths: Sequence[int]) -> list[nn.Linear]:
    return [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(widths)]
