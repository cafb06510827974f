"""In how many bits rows and gradients cross the network, where servers apply the optimizer: quantized communication.

A server and its trainers have the same codecs, so what is read and summed depends on them alone.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tritonemb.comm.output_exchange import ExchangePrecision, MessageCodec
from tritonemb.server.tables import CollectionSpec


class RowCodecs:
    """Packs rows and sums of gradients of tables, given by their numbers in the collection, and unpacks them."""

    def __init__(self, spec: CollectionSpec) -> None:
        self._precision, tables = ExchangePrecision(spec.rows_in, spec.gradients_in), spec.tables
        self._dtypes = [getattr(torch, table.dtype) for table in tables]
        self._rows, self._gradients = (
            None
            if codec == "fp32"
            else [MessageCodec([[(0, table.embedding_dim)]], table.embedding_dim, codec) for table in tables]
            for codec in (spec.rows_in, spec.gradients_in)
        )

    def pack_rows(self, numbers: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        """Rows `[n, dim]` in the tables' dtypes, as they are sent."""
        return _packed(self._rows, numbers, rows, 1.0)

    def unpack_rows(self, numbers: Sequence[int], messages: Sequence[Tensor]) -> list[Tensor]:
        """The reverse."""
        return _unpacked(self._rows, numbers, messages, self._dtypes, 1.0)

    def scale(self, sums: Sequence[Tensor]) -> float:
        """What gradients are multiplied with, so that few are too small and none is too large for the codec."""
        if self._gradients is None:
            return 1.0
        largest = max((float(of_table.abs().max()) for of_table in sums if of_table.numel()), default=0.0)
        return self._precision.scale_below(math.frexp(largest)[1] if math.isfinite(largest) else 128)

    def pack_gradients(self, numbers: Sequence[int], sums: Sequence[Tensor], scale: float) -> list[Tensor]:
        """Sums of gradients `[n, dim]`, float32, as they are sent."""
        return _packed(self._gradients, numbers, sums, scale)

    def unpack_gradients(self, numbers: Sequence[int], messages: Sequence[Tensor], scale: float) -> list[Tensor]:
        """The reverse."""
        return _unpacked(self._gradients, numbers, messages, [torch.float32] * len(self._dtypes), scale)


def _packed(
    codecs: Sequence[MessageCodec] | None, numbers: Sequence[int], rows: Sequence[Tensor], scale: float
) -> list[Tensor]:
    if codecs is None:
        return list(rows)
    return [codecs[number].pack(of_table, scale) for number, of_table in zip(numbers, rows, strict=True)]


def _unpacked(
    codecs: Sequence[MessageCodec] | None, numbers: Sequence[int], messages: Sequence[Tensor],
    dtypes: Sequence[torch.dtype], scale: float,
) -> list[Tensor]:  # fmt: skip
    if codecs is None:
        return list(messages)
    found, cpu = [], torch.device("cpu")
    for number, message in zip(numbers, messages, strict=True):
        codec, dtype = codecs[number], dtypes[number]
        (row_bytes,) = codec.part_bytes(cpu)
        found.append(codec.unpack(message, message.numel() // row_bytes, dtype, scale))
    return found
