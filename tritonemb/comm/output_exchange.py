"""Output exchanges: send embeddings from the ranks of the rows to the ranks of the samples.

Pooled: every rank has looked up its columns for the samples of all ranks, `[samples of all ranks, its columns]`, and
sends one encoded message to each rank. Partial sums, of ranks with other rows of the same columns, are added in the
order of ranks in float32: bitwise reproducible on any backend, with the bytes of a reduce-scatter. Bytes, forward and
backward: `columns · code size` per sample and rank with a part of its vector.

Sequence: the rows of received ids are returned in the order of the ids, and put at the positions of the ids. Bytes,
forward and backward: `dim · code size` per id.

The backward sends gradients in the other direction. Codecs quantize vectors and gradients. A message is sent at once,
and waited for on its first use (`AsyncTensor`).
"""

import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Any

import torch
from torch import Tensor

from tritonemb.comm.async_tensor import AsyncTensor, wait
from tritonemb.comm.group import RankGroup
from tritonemb.comm.id_exchange import RowRoutes
from tritonemb.ops import quantize
from tritonemb.ops.bag import Bags, weight_gradient
from tritonemb.ops.quantize import Packing, make_packing
from tritonemb.ops.registry import define, objects, register
from tritonemb.types import CODECS

ColumnRange = tuple[int, int]  # first column, number of columns


@dataclass(frozen=True)
class ExchangePrecision:
    """Codecs of the exchanges: "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2" or "int8" (row-wise, see `quantize`).

    Values out of range saturate and are counted.

    Args:
        forward: codec of embeddings.
        backward: codec of their gradients.
        gradient_scale: factor of gradients before they are encoded. By default, for "fp16" and "fp8", the power of two
            next above the number of samples of all ranks, which undoes a loss's mean over them; otherwise 1. Gradients
            summed over samples, of replicas, are scaled by the largest power of two without saturation.

    Raises:
        ValueError: an unknown codec, or a scale that is not positive.
    """

    forward: str = "fp16"
    backward: str = "bf16"
    gradient_scale: float | None = None

    def __post_init__(self) -> None:
        for name, codec in (("forward", self.forward), ("backward", self.backward)):
            if codec not in CODECS:
                raise ValueError(f"the {name} codec must be one of {sorted(CODECS)}, got {codec!r}")
        if self.gradient_scale is not None and not 0 < self.gradient_scale < float("inf"):
            raise ValueError(f"gradient_scale must be positive and finite, got {self.gradient_scale}")

    def scale(self, num_samples: int) -> float:
        """Return the factor of the gradients of `num_samples` samples."""
        if self.gradient_scale is not None:
            return self.gradient_scale
        return float(1 << (max(1, num_samples) - 1).bit_length()) if CODECS[self.backward].scales_gradients else 1.0

    @property
    def scales_by_size(self) -> bool:
        return self.gradient_scale is None and CODECS[self.backward].scales_gradients

    def scale_below(self, exponent: int) -> float:
        """Return the factor of gradient sums below `2^exponent`."""
        if not self.scales_by_size:
            return self.scale(1)
        return 2.0 ** (int(math.log2(CODECS[self.backward].largest)) - max(exponent, -100))


EXACT = ExchangePrecision("fp32", "fp32")


class MessageCodec:
    """Encodes matrices of `width` columns to messages, decodes messages, and counts saturated values.

    `parts` are the columns in each rank's part of the message.
    """

    def __init__(self, parts: Sequence[Sequence[ColumnRange]], width: int, codec: str) -> None:
        self.width, self._counters = width, list[Tensor]()

        @functools.cache
        @torch.inference_mode(False)
        def make(device: torch.device) -> tuple[Packing, Tensor]:
            self._counters.append(torch.zeros((), dtype=torch.int64, device=device))
            return make_packing(parts, width, codec, device), self._counters[-1]

        self._packings = make

    def pack(self, matrix: Tensor, scale: float = 1.0, rows: Tensor | None = None) -> Tensor:
        packing, saturated = self._packings(matrix.device)
        if packing.row_bytes == 0 or matrix.shape[0] == 0:
            return matrix.new_empty(0, dtype=torch.uint8)
        factor = _scale_tensor(scale, matrix.device)
        return quantize.quantize_pack(matrix.contiguous(), packing, saturated, factor, rows)

    def unpack(
        self, message: Tensor, num_rows: int, dtype: torch.dtype, scale: float = 1.0, rows: Tensor | None = None
    ) -> Tensor:
        packing, saturated = self._packings(message.device)
        if packing.row_bytes == 0 or num_rows == 0:
            return message.new_zeros(num_rows, self.width, dtype=dtype)
        return quantize.quantize_unpack(message, packing, dtype, saturated, _scale_tensor(scale, message.device), rows)

    def sizes(self, counts: Sequence[int], device: torch.device) -> list[int]:
        """Return the bytes of `counts` rows in the parts of ranks. If there is one part, each rank gets all columns."""
        return [count * size for count, size in zip(counts, cycle(self._packings(device)[0].part_bytes), strict=False)]

    def saturated(self) -> int:
        """Return the number of elements that have saturated. Waits for the device."""
        return sum(map(int, self._counters))


@functools.lru_cache(maxsize=64)
def _scale_tensor(value: float, device: torch.device) -> Tensor | None:
    with torch.inference_mode(False):
        return None if value == 1.0 else torch.tensor(value, dtype=torch.float32, device=device)


Receive = Callable[[], Tensor]  # waits for a message, and decodes it


class OutputExchange(ABC):
    """A differentiable exchange of the values of a batch.

    The result is an `AsyncTensor` with several ranks; under `torch.compile` an ordinary tensor, of an op that waits.
    Gradients are divided by `average`; bytes are counted as `kind`; `handle` identifies the exchange in graphs.
    """

    def __init__(self, group: RankGroup, precision: ExchangePrecision, average: int, kind: str) -> None:
        self.group, self.precision = group, EXACT if group.size == 1 else precision  # one rank sends nothing
        self.average, self.kind = average, kind
        self.codecs: tuple[MessageCodec, ...] = ()  # encoder and decoder of vectors, then of gradients
        self.handle = register(self)

    def __call__(self, values: Tensor, batch: Any) -> Tensor:
        if torch.compiler.is_compiling():
            previous_sent, previous_received = graph_order or (None, None)
            parts = self.handle, False, *self.flatten(batch)
            started, sent = torch.ops.tritonemb.start_exchange([values], previous_sent, *parts)
            values, ended = torch.ops.tritonemb.finish_exchange(started, previous_received, *parts)
            graph_order[:] = [sent, ended] if graph_order else []
            return values
        if values.requires_grad:
            values.register_hook(wait)  # as late as possible: before autograd uses the gradient
        return OutputExchangeFunction.apply(values, self, batch)

    def flatten(self, batch: Any) -> tuple[list[int], list[Tensor]]:
        """Return the numbers and tensors of a batch, as arguments of ops."""
        return batch, []

    def unflatten(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> Any:
        """Undo `flatten`."""
        return numbers

    @abstractmethod
    def shape(self, batch: Any, back: bool) -> tuple[int, int]:
        """Return the shape of the received vectors, or gradients (`back`)."""

    @abstractmethod
    def route(self, values: Tensor, batch: Any, back: bool) -> tuple[Any, ...]:
        """Return the rows to send; their number for and from each rank; their positions in the two messages, or None
        twice; and the number of samples."""

    def start(self, values: Sequence[Tensor], batch: Any, back: bool) -> Receive:
        """Send vectors, or gradients (`back`). The result waits for those of this rank's samples, or rows."""
        rows, sent, received, positions, num_samples = self.route(values[0], batch, back)
        (encoder, decoder), device, dtype = self.codecs[2 * back :][:2], rows.device, rows.dtype
        scale, kind = (self.precision.scale(num_samples), f"{self.kind} gradients") if back else (1.0, self.kind)
        num_rows, divisor = self.shape(batch, back)[0], scale * self.average if back else 1.0
        sizes = encoder.sizes(sent, device), decoder.sizes(received, device)
        message = self.group.all_to_all(encoder.pack(rows, scale, positions[0]), *sizes, kind)
        return lambda: decoder.unpack(message(), num_rows, dtype, divisor, positions[1])

    def exchange(self, values: Tensor, batch: Any, back: bool) -> Tensor:
        receive = self.start([values], batch, back)
        if self.group.size == 1:
            return receive()
        like = torch.empty(self.shape(batch, back), dtype=values.dtype, device="meta")
        return AsyncTensor(like, values.device, receive)


# Tokens that order the exchanges of a trace: each start and each end depends on the previous one, in reverse in the
# backward. All ranks must run collectives in the same order, and compilers preserve data dependencies only.
graph_order: list[Tensor] = []
_started: dict[int, Receive] = {}  # by address of the result of `start_exchange`; failed graphs leave entries


def _order(values: Tensor, previous: Tensor | None) -> Tensor:
    """Return a new token, on the device of `previous`, which its gradient must have."""
    return (values if previous is None else previous).new_empty(1)


def _start(
    values: Sequence[Tensor], previous: Tensor | None, handle: int, back: bool, *batch: Any
) -> tuple[Tensor, Tensor]:
    started, exchange = values[0].new_empty(1), objects[handle]
    _started[started.data_ptr()] = exchange.start(values, exchange.unflatten(*batch), back)
    return started, _order(values[0], previous)


def _finish(started: Tensor, previous: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return _started.pop(started.data_ptr())(), _order(started, previous)


def _finished(started: Tensor, previous: Tensor | None, handle: int, back: bool, *batch: Any) -> tuple[Tensor, Tensor]:
    exchange = objects[handle]
    return started.new_empty(exchange.shape(exchange.unflatten(*batch), back)), _order(started, previous)


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.ordered, ctx.batch = inputs[1] is not None, inputs[2:]


def _finish_back(ctx: Any, started: Tensor, _: Any) -> dict[str, Any]:
    """Backward of `start_exchange`: finish the exchange of gradients that the backward of `finish_exchange` started."""
    handle, back, *batch = ctx.batch
    return {"values": [torch.ops.tritonemb.finish_exchange(started, None, handle, not back, *batch)[0]]}


def _start_back(ctx: Any, grad: Tensor, order_grad: Tensor) -> dict[str, Any]:
    handle, back, *batch = ctx.batch
    started, sent = torch.ops.tritonemb.start_exchange([grad], order_grad, handle, not back, *batch)
    return {"started": started, "after": sent if ctx.ordered else None}


_SCHEMA = "(Tensor{}, Tensor? after, int handle, bool back, SymInt[] numbers, Tensor[] routes) -> (Tensor, Tensor)"
define(
    "start_exchange", _SCHEMA.format("[] values"),
    lambda values, previous, *_: (values[0].new_empty(1), _order(values[0], previous)), _start, _finish_back,
    _keep_arguments,
)  # fmt: skip
define("finish_exchange", _SCHEMA.format(" started"), _finished, _finish, _start_back, _keep_arguments)


class PooledExchange(OutputExchange):
    """Exchange of pooled embeddings. All ranks of the group create it with the same arguments.

    `columns` are, for each rank, the ranges of the result's `width` columns in its matrix, in order. Equal ranges of
    several ranks are added; other ranges must not overlap. Together they cover the result.
    """

    def __init__(
        self, group: RankGroup, columns: Sequence[Sequence[ColumnRange]], width: int, precision: ExchangePrecision,
        average: int = 1, kind: str = "pooled",
    ) -> None:  # fmt: skip
        super().__init__(group, precision, average, kind)
        local_columns = columns[group.rank]
        local_width = sum(size for _, size in local_columns)
        one_range = [[(0, local_width)] if local_width else []]
        by_table = [list(zip(_starts(local_columns), (size for _, size in local_columns), strict=True))]
        self._parts = _PartSums(columns, width)
        forward, backward = self.precision.forward, self.precision.backward
        self.codecs = (
            MessageCodec(by_table if CODECS[forward].row_wise else one_range, local_width, forward),
            MessageCodec(self._parts.columns, self._parts.width, forward),
            MessageCodec(columns, width, backward),
            MessageCodec(by_table if CODECS[backward].row_wise else one_range, local_width, backward),
        )
        self._local_columns, self._is_identity = local_columns, group.size == 1 and average == 1

    def __call__(self, values: Tensor, batch: Sequence[int]) -> Tensor:
        if not self._is_identity:
            return super().__call__(values, batch)
        if self._local_columns == sorted(self._local_columns):
            return values
        pieces = dict(
            zip(self._local_columns, values.split([size for _, size in self._local_columns], dim=1), strict=True)
        )
        return torch.cat([pieces[part] for part in sorted(self._local_columns)], dim=1)

    def shape(self, num_rows: Sequence[int], back: bool) -> tuple[int, int]:
        return (sum(num_rows), self.codecs[3].width) if back else (num_rows[self.group.rank], self.codecs[2].width)

    def route(self, values: Tensor, num_rows: Sequence[int], back: bool) -> tuple[Any, ...]:
        """`[sum(num_rows), local columns]` of all samples become `[num_rows[rank], width]` of this rank's."""
        local_rows = [num_rows[self.group.rank]] * self.group.size
        counts = (local_rows, num_rows) if back else (num_rows, local_rows)
        return values, *counts, (None, None), sum(num_rows)

    def start(self, values: Sequence[Tensor], batch: Any, back: bool) -> Receive:
        receive = super().start(values, batch, back)
        return receive if back else lambda: self._parts.add(receive())


class SequenceExchange(OutputExchange):
    """Exchange of sequence embeddings: return rows of `dim` columns to the ranks of their ids."""

    def __init__(self, group: RankGroup, dim: int, precision: ExchangePrecision, average: int = 1) -> None:
        super().__init__(group, precision, average, "rows")
        names = (self.precision.forward,) * 2 + (self.precision.backward,) * 2
        self.codecs = tuple(MessageCodec([[(0, dim)]], dim, name) for name in names)

    def flatten(self, routes: RowRoutes) -> tuple[list[int], list[Tensor]]:
        inverse = [] if routes.inverse is None else [routes.inverse]
        return [*routes.sent, *routes.received, routes.samples], [routes.source, routes.positions, *inverse]

    def unflatten(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> RowRoutes:
        size, (source, positions, *inverse) = self.group.size, tensors
        counts = list(numbers[:size]), list(numbers[size : 2 * size])
        return RowRoutes(*counts, source, positions, numbers[-1], inverse[0] if inverse else None, None)

    def shape(self, routes: RowRoutes, back: bool) -> tuple[int, int]:
        positions = routes.positions if routes.inverse is None else routes.inverse
        return (routes.source if back else positions).shape[0], self.codecs[0].width

    def route(self, rows: Tensor, routes: RowRoutes, back: bool) -> tuple[Any, ...]:
        """A row per received value, `[N, dim]`, becomes one per id of the batch; gradients of duplicates are added."""
        inverse, positions = routes.inverse, routes.positions
        if not back:
            positions = positions if inverse is None else positions[inverse]
            return rows, routes.received, routes.sent, (routes.source, positions), routes.samples
        if inverse is not None and len(positions):
            bags = Bags(inverse.new_tensor([0, inverse.shape[0]]), pooled=False, checked=False)
            rows = weight_gradient(rows, inverse, bags, len(positions))
        return rows, routes.sent, routes.received, (positions, routes.source), routes.samples


class OutputExchangeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, exchange: OutputExchange, batch: Any) -> Tensor:
        ctx.exchange, ctx.batch = exchange, batch
        return exchange.exchange(values, batch, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.exchange(wait(grad), ctx.batch, True), None, None


class _PartSums:
    """Layout of the received columns, and the sum of partial sums.

    Columns from a single rank come first, in the order of the result; then a slab per summand: the first part of every
    sum, the second part, and so on. `columns` are the positions of each rank's columns.
    """

    def __init__(self, columns: Sequence[Sequence[ColumnRange]], width: int) -> None:
        times = Counter(part for rank_columns in columns for part in rank_columns)
        single = sorted(part for part, count in times.items() if count == 1)
        # By falling number of summands: the slabs of later summands are prefixes of the first slab.
        summed = sorted((part for part, count in times.items() if count > 1), key=lambda part: (-times[part], part))
        ordered = (*single, *summed)
        order = [column for first, size in ordered for column in range(first, first + size)]
        assert sorted(order) == list(range(width)), "ranges must cover the result once, or be the same"
        self._num_single = sum(size for _, size in single)
        most = max([0, *[times[part] for part in summed]])
        self._slabs = [sum(size for first, size in summed if times[first, size] > n) for n in range(most)]
        self.width = self._num_single + sum(self._slabs)
        starts = dict(zip(ordered, _starts(ordered), strict=True))
        seen: Counter[ColumnRange] = Counter()
        self.columns: list[list[ColumnRange]] = []
        for rank_columns in columns:
            self.columns.append([(starts[part] + sum(self._slabs[: seen[part]]), part[1]) for part in rank_columns])
            seen.update(rank_columns)
        inverse = sorted(range(width), key=order.__getitem__)
        in_order = inverse == list(range(width))
        make = torch.inference_mode(False)(functools.partial(torch.tensor, inverse))
        self._order = None if in_order else functools.cache(make)

    def add(self, matrix: Tensor) -> Tensor:
        """Add the slabs, and return the columns in the order of the result."""
        if self._slabs:
            single, *slabs = matrix.split([self._num_single, *self._slabs], dim=1)
            total = slabs[0].float()
            for slab in slabs[1:]:
                total[:, : slab.shape[1]] += slab
            matrix = torch.cat([single, total.to(matrix.dtype)], dim=1)
        return matrix if self._order is None else matrix.index_select(1, self._order(device=matrix.device))


def _starts(columns: Sequence[ColumnRange]) -> list[int]:
    """Return the first column of each range if they are concatenated."""
    return list(accumulate((size for _, size in columns), initial=0))[:-1]
