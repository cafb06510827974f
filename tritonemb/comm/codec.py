"""Quantized communication: in how many bits vectors and their gradients cross between ranks; codecs of messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tritonemb.ops import quantize
from tritonemb.ops.quantize import CODECS, Packing, make_packing

T = TypeVar("T")
ColumnRange = tuple[int, int]  # first column, number of columns
_SCALED = ("fp16", "fp8_e4m3", "fp8_e5m2")  # whose smallest numbers are larger than gradients of a mean may be


@dataclass(frozen=True)
class ExchangePrecision:
    """Codecs of the exchanges: "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2" or "int8" (row-wise, see `quantize`).

    What is too large for a codec is kept at its largest value, and counted.

    Args:
        forward: of the vectors that were looked up.
        backward: of their gradients.
        gradient_scale: what gradients are multiplied with before they are sent. By default, for "fp16" and "fp8" the
            power of two next above the number of samples of all ranks, which undoes the mean of a loss over them;
            else 1.

    Raises:
        ValueError: for an unknown codec, or a scale that is not positive.
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
        """What the gradients of `num_samples` samples are multiplied with."""
        if self.gradient_scale is not None:
            return self.gradient_scale
        return float(1 << (max(1, num_samples) - 1).bit_length()) if self.backward in _SCALED else 1.0


EXACT = ExchangePrecision("fp32", "fp32")


class PerDevice(Generic[T]):
    """Tensors made once for each device, outside of inference mode; called with a device."""

    def __init__(self, make: Callable[[torch.device], T]) -> None:
        self._make = make
        self.made: dict[torch.device, T] = {}

    def __call__(self, device: torch.device) -> T:
        found = self.made.get(device)
        if found is None:
            with torch.inference_mode(False):
                found = self.made[device] = self._make(device)
        return found


class MessageCodec:
    """Packs matrices into messages and unpacks them, and counts what was too large for the codec.

    Args:
        parts: for each rank, the columns that its part of the message holds.
        width: columns of the matrix.
    """

    def __init__(self, parts: Sequence[Sequence[ColumnRange]], width: int, codec: str) -> None:
        self._width = width
        self._packings: PerDevice[tuple[Packing, Tensor]] = PerDevice(
            lambda device: (
                make_packing(parts, width, codec, device),
                torch.zeros((), dtype=torch.int64, device=device),
            )
        )
        self._scales: dict[float, PerDevice[Tensor]] = {}

    def pack(self, matrix: Tensor, scale: float = 1.0, rows: Tensor | None = None) -> Tensor:
        """See `ops.quantize_pack`."""
        packing, saturated = self._packings(matrix.device)
        if packing.row_bytes == 0 or matrix.shape[0] == 0:
            return matrix.new_empty(0, dtype=torch.uint8)
        return quantize.quantize_pack(matrix.contiguous(), packing, saturated, self._scale(scale, matrix.device), rows)

    def unpack(
        self, message: Tensor, num_rows: int, dtype: torch.dtype, scale: float = 1.0, rows: Tensor | None = None
    ) -> Tensor:
        """See `ops.quantize_unpack`."""
        packing, saturated = self._packings(message.device)
        if packing.row_bytes == 0 or num_rows == 0:
            return message.new_zeros(num_rows, self._width, dtype=dtype)
        return quantize.quantize_unpack(message, packing, dtype, saturated, self._scale(scale, message.device), rows)

    def part_bytes(self, device: torch.device) -> tuple[int, ...]:
        """Bytes of a row in each part."""
        return self._packings(device)[0].part_bytes

    def saturated(self) -> int:
        """How many elements were too large for the codec so far. Waits for the device."""
        return sum(int(count) for _, count in self._packings.made.values())

    def _scale(self, value: float, device: torch.device) -> Tensor | None:
        if value == 1.0:
            return None
        if value not in self._scales:
            self._scales[value] = PerDevice(lambda d: torch.tensor(value, dtype=torch.float32, device=d))
        return self._scales[value](device)
