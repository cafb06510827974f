"""Base of `EmbeddingBag` and `Embedding` with `num_embeddings=None`: modules of one dynamic table."""

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
    """Module with the parameters, buffers and `state_dict` of `table`.

    With an optimizer, the `state_dict` also has `updates`, the number of steps, which Adam needs.
    """

    _collection: TableCollection  # not a submodule, so that keys of `state_dict` have no prefix

    def reset_parameters(self) -> None:
        """Remove all ids, draw a new seed, and zero the optimizer's states."""
        self._collection.reset_parameters()

    def _states(self) -> States:
        return self._collection._states()

    @property
    def learning_rate(self) -> Tensor:
        return self._collection._buffers["learning_rate"] if self.optimizer else super().learning_rate  # type: ignore

    def skipped_rows(self) -> int:
        return sum(self._collection.skipped_rows().values())

    def optimizer_states(self) -> dict[str, Tensor]:
        """`step`, and the optimizer's states by name; empty without a fused optimizer."""
        states = {"step": self._collection.step, **self.table.tensors()} if self.optimizer else {}
        return {name: value for name, value in states.items() if name != "weight"}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.table._save_to_state_dict(destination, prefix, keep_vars)
        if self.optimizer is not None:
            destination[f"{prefix}updates"] = self._collection.step.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        missing_keys, error_msgs, table_state = args[-3], args[-1], dict(state_dict)
        updates = table_state.pop(f"{prefix}updates", None) if self.optimizer is not None else None
        self.table._load_from_state_dict(table_state, prefix, *args)
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
    unsupported: Mapping[str, Any], attributes: Mapping[str, Any],
) -> None:  # fmt: skip
    """Construct `module` as the subclass `kind`; raise TypeError or ValueError for unsupported arguments."""
    name = type(module).__name__
    dtype = dtype or torch.get_default_dtype()
    config = TableConfig(name, num_embeddings, embedding_dim, pooling=pooling, dtype=dtype, **dynamic)
    conflicting = [option for option, is_set in unsupported.items() if is_set] if config.is_dynamic else [*dynamic]
    if conflicting or not config.is_dynamic:
        raise ValueError(f"{name}: {', '.join(conflicting)} conflicts with num_embeddings={num_embeddings}; omit one")
    if kind.__bases__[-1] is not type(module):
        raise TypeError(f"{name} is a subclass, which needs num_embeddings; use an embedding with None as a submodule")
    collection = (EmbeddingCollection if pooling == "none" else EmbeddingBagCollection)([config], optimizer, device)
    nn.Module.__init__(module)
    module.__class__ = kind
    table, plain = collection.tables[0], {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False}
    vars(module).update(plain, sparse=False, num_embeddings=None, embedding_dim=config.embedding_dim, **attributes)
    vars(module).update(_collection=collection, _optimized=collection._optimized, table=table)
    vars(module).update(_parameters=table._parameters, _buffers=table._buffers)
