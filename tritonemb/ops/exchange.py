"""`tritonemb::all_to_all`: a collective as an op, so that a compiled graph holds it. What it calls, `comm` gives it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

AllToAll = Callable[[Tensor, Sequence[int], Sequence[int], str], Tensor]


class Exchange:
    """A collective that graphs know by its number."""

    _made: ClassVar[WeakValueDictionary[int, Exchange]] = WeakValueDictionary()
    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, call: AllToAll) -> None:
        self.number = next(self._numbers)
        self.call = call
        self._made[self.number] = self


def all_to_all(message: Tensor, send: Sequence[int], receive: Sequence[int], exchange: int, kind: str) -> Tensor:
    """`send[r]` elements of a 1-D message go to rank `r`; returns `receive[r]` of each rank, in order."""
    return torch.ops.tritonemb.all_to_all(message, list(send), list(receive), exchange, kind)


@torch.library.custom_op(
    "tritonemb::all_to_all",
    mutates_args=(),
    schema="(Tensor message, SymInt[] send, SymInt[] receive, int exchange, str kind) -> Tensor",
)
def _all_to_all(message: Tensor, send: list[int], receive: list[int], exchange: int, kind: str) -> Tensor:
    found = Exchange._made[exchange].call(message, send, receive, kind)
    return found.clone() if found is message else found


@_all_to_all.register_fake
def _(message: Tensor, send: list[int], receive: list[int], exchange: int, kind: str) -> Tensor:
    return message.new_empty(sum(receive))
