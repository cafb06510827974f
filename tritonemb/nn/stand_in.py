"""What stands in a `state_dict` for a table on disk where the table itself is not to be read into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tritonemb.nn.tiered_table import TieredTable

_wanted: ContextVar[bool] = ContextVar("stand_ins_wanted", default=False)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Within, a `state_dict` has an `OnDisk` for weight and states of a table on disk, and does not read them."""
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def are_wanted() -> bool:
    return _wanted.get()


class OnDisk(Tensor):
    """Has the shape and dtype of a table's weight or of one of its states, and no values.

    Args:
        table: that it belongs to.
        field: "weight", or the state's name.
    """

    table: TieredTable
    field: str

    @staticmethod
    def __new__(cls, table: TieredTable, field: str, size: tuple[int, ...], dtype: torch.dtype) -> OnDisk:
        made: OnDisk = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=torch.device("cpu"))
        made.table, made.field = table, field
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            own = args[0]
            return OnDisk(own.table, own.field, tuple(own.shape), own.dtype)
        raise NotImplementedError(f"{func} cannot work on a table that is on disk; read it with TieredTable.pieces()")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(f"{self!r} has no values to copy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self!r} has no values to pickle")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OnDisk({self.table.config.name!r}, {self.field!r}, {list(self.shape)}, {self.dtype})"

    __str__ = __repr__
