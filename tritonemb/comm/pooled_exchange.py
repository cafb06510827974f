"""Pooled vectors on their way from the ranks that hold their columns to the ranks whose samples they are of.

Every rank has looked up some columns for the samples of all ranks: `[samples of all ranks, its columns]`. One message a
rank carries them, encoded; what arrives is put in place, and where several ranks looked up the same columns, by parts
of their rows, the parts are added in the order of ranks, in float32: the same bits on every run and with every
backend, for codecs that no network adds, and the same number of bytes as a reduce-scatter.

Backward: the gradient of a rank's samples goes to every rank that had a share in their vectors, the same way back.

Bytes: `columns · code size` for each sample and each rank that has a share in its vector, forward and backward each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonemb.comm.codec import EXACT, Ends, ExchangePrecision, Run
from tritonemb.comm.group import Group


class ColumnExchange:
    """Sends columns to the ranks of their samples; every rank of the group makes it with the same arguments.

    Args:
        runs: for each rank, which columns of the result those of its matrix are, in their order. Runs that several
            ranks have are added; runs do not overlap otherwise. Together they cover the result.
        width: columns of the result.
        average: gradients are divided by this many.
        kind: what the bytes are counted as.
    """

    def __init__(
        self,
        group: Group,
        runs: Sequence[Sequence[Run]],
        width: int,
        precision: ExchangePrecision,
        average: int = 1,
        kind: str = "pooled",
    ) -> None:
        precision = EXACT if group.size == 1 else precision  # nothing is sent
        self.group, self.width, self.precision, self.average, self.kind = group, width, precision, average, kind
        self.widths = [sum(size for _, size in mine) for mine in runs]
        own = self.widths[group.rank]
        staged = _Staging(runs, width)
        self._staged = staged
        whole: list[list[Run]] = [[(0, own)] if own else []]
        if precision.forward == "int8":  # each table by itself
            whole = [_in_order(runs[group.rank])]
        back = [_in_order(runs[group.rank])] if precision.backward == "int8" else [[(0, own)] if own else []]
        self._send = Ends(whole, own, precision.forward)
        self._arrive = Ends(staged.parts, staged.width, precision.forward)
        self._send_back = Ends(runs, width, precision.backward)
        self._arrive_back = Ends(back, own, precision.backward)
        self._scales: dict[tuple[float, torch.device], Tensor] = {}

    def __call__(self, matrix: Tensor, num_rows: Sequence[int]) -> Tensor:
        """`[sum(num_rows), own columns]` for all ranks' samples → `[num_rows[rank], width]` for one's own.

        Args:
            num_rows: samples of each rank, in order.
        """
        found: Tensor = _Exchange.apply(matrix, self, list(num_rows))
        return found

    def saturated(self) -> int:
        """Elements too large for the codecs so far. Waits for the device."""
        return sum(end.saturated() for end in (self._send, self._arrive, self._send_back, self._arrive_back))

    def forward(self, matrix: Tensor, num_rows: list[int]) -> Tensor:
        group, mine = self.group, num_rows[self.group.rank]
        (sent,) = self._send.part_bytes(matrix.device)
        arriving = self._arrive.part_bytes(matrix.device)
        message = group.all_to_all(
            self._send.pack(matrix), [rows * sent for rows in num_rows], [mine * size for size in arriving], self.kind
        )
        return self._staged.put(self._arrive.unpack(message, mine, matrix.dtype))

    def backward(self, grad: Tensor, num_rows: list[int]) -> Tensor:
        group, mine, device = self.group, num_rows[self.group.rank], grad.device
        scale = self.precision.scale(sum(num_rows))
        (arriving,) = self._arrive_back.part_bytes(device)
        sent = self._send_back.part_bytes(device)
        message = group.all_to_all(
            self._send_back.pack(grad, self._number(scale, device)),
            [mine * size for size in sent],
            [rows * arriving for rows in num_rows],
            f"{self.kind} gradients",
        )
        return self._arrive_back.unpack(message, sum(num_rows), grad.dtype, self._number(scale * self.average, device))

    def _number(self, value: float, device: torch.device) -> Tensor | None:
        if value == 1.0:
            return None
        found = self._scales.get((value, device))
        if found is None:
            with torch.inference_mode(False):
                found = self._scales[value, device] = torch.tensor(value, dtype=torch.float32, device=device)
        return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, exchange: ColumnExchange, num_rows: list[int]) -> Tensor:
        ctx.exchange, ctx.num_rows = exchange, num_rows
        return exchange.forward(matrix, num_rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.backward(grad, ctx.num_rows), None, None


class _Staging:
    """What arrives, as a matrix with each rank's columns in a place of their own, and how that becomes the result.

    Columns that one rank has come first, in the order of the result; then a slab for each summand: the first part of
    every sum, the second part, and so on.
    """

    def __init__(self, runs: Sequence[Sequence[Run]], width: int) -> None:
        times = Counter(run for mine in runs for run in mine)
        single = sorted(run for run, count in times.items() if count == 1)
        # By falling number of parts: the slabs of the last parts are prefixes of that of the first.
        summed = sorted((run for run, count in times.items() if count > 1), key=lambda run: (-times[run], run))
        columns = [column for first, size in (*single, *summed) for column in range(first, first + size)]
        assert sorted(columns) == list(range(width)), "runs must cover the result once, or be the same"
        self._num_single = sum(size for _, size in single)
        self._slabs = [
            sum(run[1] for run in summed if times[run] > part)
            for part in range(max([0, *[times[run] for run in summed]]))
        ]
        self.width = self._num_single + sum(self._slabs)
        place = dict(zip(single, _starts(single), strict=True))
        in_slab = dict(zip(summed, _starts(summed), strict=True))
        seen: Counter[Run] = Counter()
        self.parts: list[list[Run]] = []
        for mine in runs:
            part: list[Run] = []
            for run in mine:
                if run in place:
                    part.append((place[run], run[1]))
                else:
                    slab = self._num_single + sum(self._slabs[: seen[run]])
                    part.append((slab + in_slab[run], run[1]))
                    seen[run] += 1
            self.parts.append(part)
        order = [0] * width
        for where, column in enumerate(columns):
            order[column] = where
        self._order = None if order == list(range(width)) else order
        self._orders: dict[torch.device, Tensor] = {}

    def put(self, staged: Tensor) -> Tensor:
        """The result, from a staging matrix."""
        if self._slabs:
            single, *slabs = staged.split([self._num_single, *self._slabs], dim=1)
            total = slabs[0].float()
            for slab in slabs[1:]:
                total[:, : slab.shape[1]] += slab
            staged = torch.cat([single, total.to(staged.dtype)], dim=1)
        if self._order is None:
            return staged
        order = self._orders.get(staged.device)
        if order is None:
            with torch.inference_mode(False):
                order = self._orders[staged.device] = torch.tensor(self._order, device=staged.device)
        return staged.index_select(1, order)


def _starts(runs: Sequence[Run]) -> list[int]:
    """Where each run begins, one after the other."""
    starts = [0]
    for _, size in runs:
        starts.append(starts[-1] + size)
    return starts[:-1]


def _in_order(runs: Sequence[Run]) -> list[Run]:
    """Runs of the same widths, one after the other."""
    return [(start, size) for start, (_, size) in zip(_starts(runs), runs, strict=True)]
