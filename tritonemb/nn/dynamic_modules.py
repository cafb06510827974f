"""What `EmbeddingBag` and `Embedding` of any int64 ids share: a collection of one dynamic table behind the module."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from tritonemb.nn.collections import EmbeddingBagCollection, EmbeddingCollection, TableCollection
from tritonemb.nn.single_table import SingleTable
from tritonemb.optimizers import Optimizer
from tritonemb.tables.optimizer import States
from tritonemb.types import Device, TableConfig


class DynamicModule(SingleTable):
    """Its parameters and buffers are those of `table`, and so is its `state_dict`.

    With an optimizer that has `updates` too, how many there have been: Adam needs it.
    """

    _collection: TableCollection  # no child, so keys of `state_dict` have no inner prefix

    def reset_parameters(self) -> None:
        """Forget all ids and draw another seed; zero the optimizer's states."""
        self._collection.reset_parameters()

    def _states(self) -> States:
        return self._collection._states()

    @property
    def learning_rate(self) -> Tensor:
        return self._collection._buffers["learning_rate"] if self.optimizer else super().learning_rate  # type: ignore

    def skipped_rows(self) -> int:
        return sum(self._collection.skipped_rows().values())

    def optimizer_states(self) -> dict[str, Tensor]:
        """`step`, and the optimizer's states by name, of all rows by id; none without a fused optimizer."""
        states = {"step": self._collection.step, **self.table.tensors()} if self.optimizer else {}
        return {name: value for name, value in states.items() if name != "weight"}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.table._save_to_state_dict(destination, prefix, keep_vars)
        if self.optimizer is not None:
            destination[f"{prefix}updates"] = self._collection.step.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        missing_keys, error_msgs, found = others[-3], others[-1], dict(state_dict)
        updates = found.pop(f"{prefix}updates", None) if self.optimizer is not None else None
        self.table._load_from_state_dict(found, prefix, *others)
        if updates is not None and not error_msgs:
            self._collection.step.fill_(int(updates))
        elif self.optimizer is not None and updates is None:
            missing_keys.append(f"{prefix}updates")

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._collection._apply(fn)
        return self


def become_dynamic(
    module: SingleTable, kind: type[DynamicModule], num_embeddings: int | None, embedding_dim: int, pooling: Any,
    device: Device, dtype: torch.dtype | None, optimizer: Optimizer | None, dynamic: Mapping[str, Any],
    refused: Mapping[str, Any], attributes: Mapping[str, Any],
) -> None:  # fmt: skip
    """Make `module`, which is being made, one of the subclass `kind`; TypeError or ValueError for what does not fit."""
    name = type(module).__name__
    dtype = dtype or torch.get_default_dtype()
    config = TableConfig(name, num_embeddings, embedding_dim, pooling=pooling, dtype=dtype, **dynamic)
    given = [option for option, there in refused.items() if there] if config.is_dynamic else [*dynamic]
    if given or not config.is_dynamic:
        raise ValueError(f"{name}: {', '.join(given)} does not go with num_embeddings={num_embeddings}; leave one out")
    if kind.__bases__[-1] is not type(module):
        raise TypeError(f"{name} is a subclass, and those need num_embeddings; let it own an embedding of any ids")
    collection = (EmbeddingCollection if pooling == "none" else EmbeddingBagCollection)([config], optimizer, device)
    nn.Module.__init__(module)
    module.__class__ = kind
    table, plain = collection.tables[0], {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False}
    vars(module).update(plain, sparse=False, num_embeddings=None, embedding_dim=config.embedding_dim, **attributes)
    vars(module).update(_collection=collection, _optimized=collection._optimized, table=table)
    vars(module).update(_parameters=table._parameters, _buffers=table._buffers)
