"""`AsyncTensor`: values that other ranks are sending; the first operator that reads them waits.

So a model that looks up its embeddings before it computes its bottom MLP hides the exchange behind that, unchanged.
Operators that only move, scale or add columns are postponed, too. In the backward, gradients are sent as soon as they
are known, and waited for when a table is to be updated: see `send_gradients_first`.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_FIRST = 1 << 62  # autograd runs the node of the largest number that is ready
_aten = torch.ops.aten
POSTPONED = {
    _aten.cat.default, _aten.index_select.default, _aten.index_copy.default, _aten.mul.Tensor, _aten.add.Tensor,
    _aten.constant_pad_nd.default, _aten._to_copy.default,
}  # fmt: skip


class AsyncTensor(Tensor):
    """A tensor whose values `receive` returns when they are first read; `like`, on meta, has its shape and dtype.

    Autograd sees an ordinary tensor. Any operator takes it; what is no operator, as `numpy()`, takes `wait()`.
    """

    _receive: Callable[[], Tensor] | None
    _arrived: Tensor

    def __new__(cls, like: Tensor, device: torch.device, receive: Callable[[], Tensor]) -> Self:
        made = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)
        made._receive = receive
        return made

    def wait(self) -> Tensor:
        """The values, as an ordinary tensor without gradients; raises what has failed on another rank."""
        if self._receive is not None:
            with torch.no_grad():
                self._arrived, self._receive = self._receive(), None
        return self._arrived

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = {} if kwargs is None else kwargs
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, AsyncTensor)]

        def run() -> Any:
            arrived, options = tree_map_only(AsyncTensor, AsyncTensor.wait, (args, kwargs))
            return func(*arrived, **options)

        if func not in POSTPONED or kwargs.get("device") or all(each._receive is None for each in given):
            return run()
        return AsyncTensor(func(*tree_map_only(Tensor, _on_meta, args), **kwargs), given[0].device, run)

    def numpy(self, *, force: bool = False) -> Any:
        return self.wait().numpy(force=force)

    def tolist(self) -> Any:
        return self.wait().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"AsyncTensor({self.wait()})"


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def wait(tensor: Tensor) -> Tensor:
    """The values, without gradients if they have to be waited for."""
    return tensor.wait() if isinstance(tensor, AsyncTensor) else tensor


def ordinary(tensor: Tensor) -> Tensor:
    """The tensor itself, or an ordinary one with the same values and gradients."""
    return _aten.alias(tensor) if isinstance(tensor, AsyncTensor) else tensor


def send_gradients_first(result: Tensor, exchange: type) -> None:
    """Have autograd run what lies between `result` and the first nodes of `exchange`, a function, before all else.

    The nodes of a bottom MLP are younger, and would be run before a gradient is sent that is known already.
    """
    nodes = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node._sequence_nr() < _FIRST:
            node._set_sequence_nr(_FIRST + node._sequence_nr())  # type: ignore[attr-defined]
            is_last = node.name() == f"{exchange.__name__}Backward"
            nodes += [] if is_last else [before for before, _ in node.next_functions]
