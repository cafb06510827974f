"""Quantized communication with embedding servers that apply the optimizer: codecs of pulled rows and pushed gradients.

A server and its trainers use the same codecs, so results depend on the codecs alone, not on the number of servers.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tritonemb.comm.output_exchange import ExchangePrecision, MessageCodec
from tritonemb.server.tables import CollectionSpec


class TableCodecs:
    """Encoder and decoder of rows `[n, dim]` of tables, which are given by their numbers in the collection."""

    def __init__(self, dims: Sequence[int], dtypes: Sequence[torch.dtype], codec: str) -> None:
        self._dtypes = dtypes
        self._codecs = None if codec == "fp32" else [MessageCodec([[(0, dim)]], dim, codec) for dim in dims]

    def pack(self, numbers: Sequence[int], rows: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
        """Encode rows for the network, multiplied by `scale`."""
        if self._codecs is None:
            return list(rows)
        return [self._codecs[number].pack(values, scale) for number, values in zip(numbers, rows, strict=True)]

    def unpack(self, numbers: Sequence[int], messages: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
        """Decode rows of `pack` into the tables' dtypes."""
        if self._codecs is None:
            return list(messages)
        rows = []
        for number, message in zip(numbers, messages, strict=True):
            codec, dtype = self._codecs[number], self._dtypes[number]
            (row_bytes,) = codec.part_bytes(message.device)
            rows.append(codec.unpack(message, message.numel() // row_bytes, dtype, scale))
        return rows


class RowCodecs:
    """Codecs of a collection's `rows`, and of their float32 `gradients`."""

    def __init__(self, spec: CollectionSpec) -> None:
        dims = [table.embedding_dim for table in spec.tables]
        self._precision = ExchangePrecision(spec.row_codec, spec.gradient_codec)
        self.rows = TableCodecs(dims, [getattr(torch, table.dtype) for table in spec.tables], spec.row_codec)
        self.gradients = TableCodecs(dims, [torch.float32] * len(dims), spec.gradient_codec)

    def scale(self, sums: Sequence[Tensor]) -> float:
        """Return the scale of gradients `sums`: none of them overflows the codec, and few underflow."""
        if self._precision.backward == "fp32":
            return 1.0
        largest = max((float(table_sums.abs().max()) for table_sums in sums if table_sums.numel()), default=0.0)
        return self._precision.scale_below(math.frexp(largest)[1] if math.isfinite(largest) else 128)
