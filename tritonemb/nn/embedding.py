"""One table, looked up id by id: `torch.nn.Embedding` by tritonemb's kernels."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tritonemb.nn.single_table import SingleTable, new_weight
from tritonemb.ops.bag import Bags
from tritonemb.ops.row_groups import ID_DTYPES
from tritonemb.optimizers import Optimizer


class Embedding(SingleTable, torch.nn.Embedding):
    """A table's rows by id, with the arguments and the meaning of `torch.nn.Embedding`.

    It is a `torch.nn.Embedding`: one can stand in the other's place, and loads its `state_dict`. Its gradients are
    tritonemb's kernels': deterministic, summed in float32 for 16-bit rows, sparse ones coalesced (on the CPU).
    `scale_grad_by_freq` and what else those do not serve is left to PyTorch.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns.
        padding_idx: an id whose row gets no gradient; from the end if negative.
        max_norm: rows that a call uses are scaled down to this norm first, in place; None for no limit.
        norm_type: which norm, 2 for the Euclidean.
        scale_grad_by_freq: divide a row's gradient by the number of its uses in the call; by PyTorch.
        sparse: the weight's gradient is a sparse COO tensor.
        _weight: the table itself `[num_embeddings, embedding_dim]`, instead of a new one.
        _freeze: the weight takes no gradient.
        device: where the table lives.
        dtype: of the table.
        optimizer: with one of `tritonemb.optim`, the backward updates the weight exactly, deterministically and in
            place, and `weight.grad` stays None; `sparse` means nothing then.

    Shapes:
        input: int32 or int64 ids of any shape `[*]`. Result: `[*, embedding_dim]`, of the weight's dtype.

    Raises:
        IndexError: for an id out of range. On a GPU a ValueError at the next lookup, or from `te.check_errors`;
            compiled, with an optimizer, a ValueError.
        RuntimeError: for ids of another dtype.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        weight = new_weight(num_embeddings, embedding_dim, device, dtype) if _weight is None else _weight
        torch.nn.Embedding.__init__(
            self, num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, weight,
            _freeze,
        )  # fmt: skip
        if _weight is None:
            self.reset_parameters()
        self._fuse(optimizer)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        optimizer: Optimizer | None = None,
    ) -> Embedding:
        """A module around `embeddings` `[num_embeddings, embedding_dim]`; frozen, it is not trained."""
        module: Any = super().from_pretrained(
            embeddings, freeze, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
        module._fuse(optimizer)
        return cast(Embedding, module)

    def forward(self, input: Tensor) -> Tensor:
        """`[*, embedding_dim]`."""
        if not isinstance(input, Tensor) or not self._is_served(input):
            return torch.nn.Embedding.forward(self, input)
        if input.dtype not in ID_DTYPES:
            raise RuntimeError(f"input must be int32 or int64, got {input.dtype}")
        values = input.reshape(-1)
        if self.max_norm is not None:
            self._renormalise(values, self.max_norm, self.norm_type)
        trained = values if self.padding_idx is None else values.masked_fill(values == self.padding_idx, -1)
        offsets = torch.arange(2, device=values.device) * values.shape[0]
        rows = self._look_up(values, trained, None, Bags(offsets, False), self.weight.dtype)
        return rows.view(*input.shape, self.weight.shape[1])
