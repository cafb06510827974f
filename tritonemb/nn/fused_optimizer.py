"""A collection's fused optimizer in the shape of `torch.optim.Optimizer`, for schedulers and training frameworks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tritonemb.nn.collection import Collection


class _ParamGroup(dict[str, Any]):
    """A parameter group whose learning rate is the collection's: setting one sets the other."""

    def __init__(self, items: dict[str, Any], set_learning_rate: Callable[[float], None]) -> None:
        super().__init__(items)
        self._set_learning_rate = set_learning_rate

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr":
            value = float(value)
            self._set_learning_rate(value)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class FusedOptimizer(torch.optim.Optimizer):
    """One parameter group with a collection's tables. The step has been done in the backward: `step` does nothing.

    `param_groups[0]["lr"]` may be set by hand or by `torch.optim.lr_scheduler`. `state_dict` holds each table's state
    tensors, the same that the collection's own `state_dict` holds.
    """

    def __init__(self, collection: Collection) -> None:
        spec = collection.optimizer
        assert spec is not None
        self._collection = collection
        super().__init__([table.weight for table in collection.tables], asdict(spec))
        group = dict(self.param_groups[0], lr=collection.current_learning_rate)
        self.param_groups[0] = _ParamGroup(group, collection.set_learning_rate)
        for table in collection.tables:
            self.state[table.weight] = {"step": collection.step, **dict(table.named_buffers())}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Does nothing: the backward has updated the tables. Returns the closure's result."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy learning rate and state into the collection's own tensors.

        Raises:
            ValueError: if a state is missing or has another shape; nothing has been copied then.
        """
        tables = self._collection.tables
        pairs = []
        for index, table in enumerate(tables):
            given = state_dict["state"].get(index, {})
            for name, tensor in self.state[table.weight].items():
                if name not in given or given[name].shape != tensor.shape:
                    found = tuple(given[name].shape) if name in given else "nothing"
                    raise ValueError(
                        f"table {table.config.name!r}: state {name!r} must have shape {tuple(tensor.shape)}, "
                        f"got {found}"
                    )
                pairs.append((tensor, given[name]))
        for tensor, value in pairs:
            tensor.copy_(value)
        group = {key: value for key, value in state_dict["param_groups"][0].items() if key != "params"}
        self.param_groups[0].update(group)
