"""In how many bits rows and gradients cross the network, where servers apply the optimizer: quantized communication.

A server and its trainers have the same codecs, so what is read and summed depends on them alone.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tritonemb.comm.output_exchange import ExchangePrecision, MessageCodec
from tritonemb.server.tables import CollectionSpec


class TableCodecs:
    """Packs rows `[n, dim]` of tables, given by their numbers in the collection, as they are sent, and unpacks them."""

    def __init__(self, dims: Sequence[int], dtypes: Sequence[torch.dtype], codec: str) -> None:
        self._dtypes = dtypes
        self._codecs = None if codec == "fp32" else [MessageCodec([[(0, dim)]], dim, codec) for dim in dims]

    def pack(self, numbers: Sequence[int], rows: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
        """Rows as they are sent, multiplied with `scale`."""
        if self._codecs is None:
            return list(rows)
        return [self._codecs[number].pack(of_table, scale) for number, of_table in zip(numbers, rows, strict=True)]

    def unpack(self, numbers: Sequence[int], messages: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
        """The reverse, in the tables' dtypes."""
        if self._codecs is None:
            return list(messages)
        rows = []
        for number, message in zip(numbers, messages, strict=True):
            codec, dtype = self._codecs[number], self._dtypes[number]
            (row_bytes,) = codec.part_bytes(message.device)
            rows.append(codec.unpack(message, message.numel() // row_bytes, dtype, scale))
        return rows


class RowCodecs:
    """Codecs of the `rows` of a collection's tables, and of their `gradients`, float32."""

    def __init__(self, spec: CollectionSpec) -> None:
        dims = [table.embedding_dim for table in spec.tables]
        self._precision = ExchangePrecision(spec.rows_in, spec.gradients_in)
        self.rows = TableCodecs(dims, [getattr(torch, table.dtype) for table in spec.tables], spec.rows_in)
        self.gradients = TableCodecs(dims, [torch.float32] * len(dims), spec.gradients_in)

    def scale(self, sums: Sequence[Tensor]) -> float:
        """What gradients are multiplied with, so that few are too small and none is too large for the codec."""
        if self._precision.backward == "fp32":
            return 1.0
        largest = max((float(of_table.abs().max()) for of_table in sums if of_table.numel()), default=0.0)
        return self._precision.scale_below(math.frexp(largest)[1] if math.isfinite(largest) else 128)
