"""Quantized communication with embedding servers that apply the optimizer: codecs of pulled rows and pushed gradients.

A server and its trainers use the same codecs, so results depend on the codecs alone, not on the number of servers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tritonemb.comm.output_exchange import ExchangePrecision, MessageCodec
from tritonemb.server.spec import CollectionSpec
from tritonemb.server.transport import Message


@dataclass(frozen=True)
class PulledTable:
    """Rows of a table's ids that a trainer has pulled from one server."""

    rows: Tensor  # `[n, embedding_dim]`, of all ids, or of those whose versions differ from the trainer's
    versions: Tensor | None = None  # int64 per id, `NO_ROW` without a row; None: the trainer has no cache
    refused: Tensor | None = None  # int64, positions of ids that were not admitted and take no gradient, if any may be


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
            (row_bytes,) = codec.sizes([1], message.device)
            rows.append(codec.unpack(message, message.numel() // row_bytes, dtype, scale))
        return rows

    def pack_reply(self, numbers: Sequence[int], tables: Sequence[PulledTable], steps: int) -> Message:
        """Encode a reply to a pull, with the number of applied steps."""
        names = [field.name for field in fields(PulledTable) if tables and getattr(tables[0], field.name) is not None]
        columns = {name: [getattr(table, name).contiguous() for table in tables] for name in names}
        if tables:
            columns["rows"] = self.pack(numbers, columns["rows"])
        return {"steps": steps, "fields": names}, [tensor for column in columns.values() for tensor in column]

    def unpack_reply(self, numbers: Sequence[int], message: Message) -> dict[int, PulledTable]:
        (values, tensors), size = message, len(numbers)
        columns = {name: tensors[n * size : (n + 1) * size] for n, name in enumerate(values["fields"])}
        if numbers:
            columns["rows"] = self.unpack(numbers, columns["rows"])
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return {number: PulledTable(**row) for number, row in zip(numbers, rows, strict=True)}


class RowCodecs:
    """Codecs of a collection's `rows`, of their float32 `gradients`, and of `exact_rows`, which are for evaluation."""

    def __init__(self, spec: CollectionSpec) -> None:
        dims = [table.embedding_dim for table in spec.tables]
        self._precision = ExchangePrecision(spec.row_codec, spec.gradient_codec)
        self.rows = TableCodecs(dims, [getattr(torch, table.dtype) for table in spec.tables], spec.row_codec)
        self.exact_rows = TableCodecs(dims, [], "fp32")
        self.gradients = TableCodecs(dims, [torch.float32] * len(dims), spec.gradient_codec)

    def scale(self, sums: Sequence[Tensor]) -> float:
        """Return the scale of gradients `sums`: none of them overflows the codec, and few underflow."""
        if self._precision.backward == "fp32":
            return 1.0
        largest = max((float(table_sums.abs().max()) for table_sums in sums if table_sums.numel()), default=0.0)
        return self._precision.scale_below(math.frexp(largest)[1] if math.isfinite(largest) else 128)
