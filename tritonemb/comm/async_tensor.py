"""`AsyncTensor`: values in flight from other ranks; the first operator that reads them waits.

A model that looks up its embeddings before it computes its bottom MLP overlaps the exchange with the MLP, unchanged.
Operators that only move, scale or add columns are deferred, too. One that changes an `AsyncTensor` in place runs its
deferred readers first; an ordinary operand that was changed meanwhile is an error. In the backward pass, gradients are
sent as soon as they are computed, and waited for by the update of a table: see `send_gradients_first`.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import TensorWeakRef

_FIRST = 1 << 62  # of the ready nodes, autograd runs the one with the largest number
_aten = torch.ops.aten
_DEFERRED = {
    _aten.cat.default, _aten.index_select.default, _aten.index_copy.default, _aten.mul.Tensor, _aten.add.Tensor,
    _aten.constant_pad_nd.default, _aten._to_copy.default,
}  # fmt: skip


class AsyncTensor(Tensor):
    """A tensor that calls `receive` for its values on first use; `like`, on meta, has its shape and dtype.

    Autograd treats it as an ordinary tensor, and so do operators; methods such as `numpy()` call `wait()`.
    """

    _receive: Callable[[], Tensor] | None
    _result: Tensor
    _version_received: int  # of `_result`
    _readers: list[TensorWeakRef]  # results of deferred operators

    def __new__(cls, like: Tensor, device: torch.device, receive: Callable[[], Tensor]) -> Self:
        tensor = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)
        tensor._receive, tensor._readers = receive, []
        return tensor

    def wait(self) -> Tensor:
        """Return the values as an ordinary tensor without gradients. Raise the error of the exchange."""
        if self._receive is not None:
            with torch.inference_mode(False), torch.no_grad():  # with a version
                self._result, self._receive = self._receive(), None
            self._version_received = self._result._version
        return self._result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = {} if kwargs is None else kwargs
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        async_tensors = [tensor for tensor in tensors if isinstance(tensor, AsyncTensor)]
        pending = [tensor for tensor in async_tensors if tensor._receive is not None]

        def run() -> Any:
            arrived, options = tree_map_only(AsyncTensor, AsyncTensor.wait, (args, kwargs))
            return func(*arrived, **options)

        # Operators that are run at once. Those whose result is changed memory or a view of it run its readers first.
        operands = [tensor for tensor in tensors if getattr(tensor, "_receive", None) is None]
        operands += [operand._result for operand in operands if isinstance(operand, AsyncTensor)]
        is_deferred = func in _DEFERRED and pending and not kwargs.get("device")
        if not is_deferred or any(map(Tensor.is_inference, operands)):  # those have no versions
            readers = [reader for tensor in async_tensors for reader in tensor._readers]
            if readers and any(argument.alias_info is not None for argument in func._schema.arguments):
                for reader in readers:
                    if (result := reader()) is not None:
                        result.wait()
            return run()
        versions = [operand._version for operand in operands]

        def run_unchanged() -> Any:
            read = [*operands, *map(AsyncTensor.wait, pending)]
            expected = [*versions, *(tensor._version_received for tensor in pending)]
            for tensor, version in zip(read, expected, strict=True):
                if tensor._version != version:
                    raise RuntimeError(
                        f"an operand of {func} of shape {[*tensor.shape]} was changed in place before the embeddings "
                        "with which it is combined had arrived from other ranks; change a copy, or call wait() of the "
                        "operator's result before the change"
                    )
            return run()

        like = func(*tree_map_only(Tensor, _on_meta, args), **kwargs)
        deferred = AsyncTensor(like, async_tensors[0].device, run_unchanged)
        for tensor in pending:
            tensor._readers.append(TensorWeakRef(deferred))
        return deferred

    def numpy(self, *, force: bool = False) -> Any:
        return self.wait().numpy(force=force)

    def tolist(self) -> Any:
        return self.wait().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"AsyncTensor({self.wait()})"


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def wait(tensor: Tensor) -> Tensor:
    """Return the values; those of an `AsyncTensor` have no gradients."""
    return tensor.wait() if isinstance(tensor, AsyncTensor) else tensor


def to_ordinary(tensor: Tensor) -> Tensor:
    """Return the tensor, or for an `AsyncTensor` an ordinary one with the same values and gradients."""
    return _aten.alias(tensor) if isinstance(tensor, AsyncTensor) else tensor


def send_gradients_first(result: Tensor, exchange: type) -> None:
    """Prioritize the autograd nodes between `result` and the first nodes of the function `exchange`.

    By default autograd runs the newest nodes first, those of a bottom MLP, before it sends gradients that are ready.
    """
    nodes = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node._sequence_nr() < _FIRST:
            node._set_sequence_nr(_FIRST + node._sequence_nr())  # type: ignore[attr-defined]
            is_exchange = node.name() == f"{exchange.__name__}Backward"
            nodes += [] if is_exchange else [child for child, _ in node.next_functions]
