"""In how many bits vectors and their gradients cross between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from tritonemb.kernels.packing import CODECS

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
