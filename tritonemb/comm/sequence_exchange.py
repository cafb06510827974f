"""Rows of unpooled lookups on their way back to the ranks that asked for them, one row an id.

Forward: the rows of the ids that a rank has received go back in the order in which the ids came, and each is put where
its id was. Backward: their gradients, the same way to the rows' owners.

Bytes: `dim · code size` an id, forward and backward each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonemb.comm.codec import EXACT, Ends, ExchangePrecision
from tritonemb.comm.group import Group
from tritonemb.comm.id_exchange import Arrived


class RowExchange:
    """Sends rows of `dim` columns to the ranks that asked for them.

    Args:
        average: gradients are divided by this many.
    """

    def __init__(
        self, group: Group, dim: int, precision: ExchangePrecision, average: int = 1, kind: str = "rows"
    ) -> None:
        precision = EXACT if group.size == 1 else precision  # nothing is sent
        self.group, self.dim, self.precision, self.average, self.kind = group, dim, precision, average, kind
        self._ends = Ends([[(0, dim)]], dim, precision.forward)
        self._back = Ends([[(0, dim)]], dim, precision.backward)

    def __call__(self, rows: Tensor, ids: Arrived) -> Tensor:
        """`[N, dim]`, a row for each value of `ids.features` → `[M, dim]`, one for each id that was sent."""
        found: Tensor = _Exchange.apply(rows, self, ids)
        return found

    def saturated(self) -> int:
        """Elements too large for the codecs so far. Waits for the device."""
        return self._ends.saturated() + self._back.saturated()

    def forward(self, rows: Tensor, ids: Arrived) -> Tensor:
        (size,) = self._ends.part_bytes(rows.device)
        message = self.group.all_to_all(
            self._ends.pack(rows, rows=ids.source), [n * size for n in ids.received], [n * size for n in ids.sent],
            self.kind,
        )  # fmt: skip
        return self._ends.unpack(message, ids.places.shape[0], rows.dtype, rows=ids.places)

    def backward(self, grad: Tensor, ids: Arrived) -> Tensor:
        scale = self.precision.scale(ids.samples)
        (size,) = self._back.part_bytes(grad.device)
        message = self.group.all_to_all(
            self._back.pack(grad, _number(scale, grad.device), ids.places), [n * size for n in ids.sent],
            [n * size for n in ids.received], f"{self.kind} gradients",
        )  # fmt: skip
        divisor = _number(scale * self.average, grad.device)
        return self._back.unpack(message, ids.source.shape[0], grad.dtype, divisor, ids.source)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange, ids: Arrived) -> Tensor:
        ctx.exchange, ctx.ids = exchange, ids
        return exchange.forward(rows, ids)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.backward(grad, ctx.ids), None, None


def _number(value: float, device: torch.device) -> Tensor | None:
    return None if value == 1.0 else torch.full((), value, dtype=torch.float32, device=device)
