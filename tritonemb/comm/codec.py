"""One end of an exchange of matrices: what `quantize` needs beside the matrix, and what to do where nothing is sent.

In how many bits vectors and their gradients cross between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonemb.kernels.packing import CODECS
from tritonemb.ops import quantize
from tritonemb.ops.quantize import Packing, make_packing

Run = tuple[int, int]  # first column, number of columns


class Ends:
    """Packings by device, and a count of what was too large for a codec.

    Args:
        parts: for each rank, the runs of columns that its part of the message holds.
        width: columns of the matrix.
    """

    def __init__(self, parts: Sequence[Sequence[Run]], width: int, codec: str) -> None:
        self._parts, self._width, self._codec = parts, width, codec
        self._made: dict[torch.device, tuple[Packing, Tensor]] = {}

    def pack(self, matrix: Tensor, scale: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """See `ops.quantize_pack`."""
        packing, saturated = self._on(matrix.device)
        if packing.row_bytes == 0 or matrix.shape[0] == 0:
            return matrix.new_empty(0, dtype=torch.uint8)
        return quantize.quantize_pack(matrix.contiguous(), packing, saturated, scale, rows)

    def unpack(
        self,
        message: Tensor,
        num_rows: int,
        dtype: torch.dtype,
        scale: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `ops.quantize_unpack`."""
        packing, saturated = self._on(message.device)
        if packing.row_bytes == 0 or num_rows == 0:
            return message.new_zeros(num_rows, self._width, dtype=dtype)
        return quantize.quantize_unpack(message, packing, dtype, saturated, scale, rows)

    def part_bytes(self, device: torch.device) -> tuple[int, ...]:
        """Bytes of a row in each part."""
        return self._on(device)[0].part_bytes

    def saturated(self) -> int:
        """How many elements were too large for the codec so far. Waits for the device."""
        return sum(int(count) for _, count in self._made.values())

    def _on(self, device: torch.device) -> tuple[Packing, Tensor]:
        found = self._made.get(device)
        if found is None:
            with torch.inference_mode(False):
                packing = make_packing(self._parts, self._width, self._codec, device)
                found = packing, torch.zeros((), dtype=torch.int64, device=device)
            self._made[device] = found
        return found


_SCALED = ("fp16", "fp8_e4m3", "fp8_e5m2")  # whose smallest numbers are larger than gradients of a mean may be


@dataclass(frozen=True)
class ExchangePrecision:
    """Codecs of the exchanges: "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2" or "int8" (row-wise, see `quantize`).

    What is too large for a codec is kept at its largest value, and counted.

    Args:
        forward: of the vectors that were looked up.
        backward: of their gradients.
        gradient_scale: what gradients are multiplied with on their way. By default, for "fp16" and "fp8" the power of
            two next above the number of samples of all ranks, which undoes the mean of a loss over them; else 1.

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
        """What gradients of so many samples are multiplied with."""
        if self.gradient_scale is not None:
            return self.gradient_scale
        return float(1 << (max(1, num_samples) - 1).bit_length()) if self.backward in _SCALED else 1.0


EXACT = ExchangePrecision("fp32", "fp32")
