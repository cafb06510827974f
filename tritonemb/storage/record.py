"""A row as one record of bytes: its weights and its optimizer state, which travel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonemb.optimizers import StateSpec

WEIGHT = "weight"


@dataclass(frozen=True)
class Field:
    """A part of a record.

    Args:
        name: "weight", or that of a piece of optimizer state.
        dtype: of its values.
        size: how many values a row has.
        offset: of the first, in bytes from the record's start.
        one_a_row: of a `size` of 1, whether it is a value of the row and no row of one element: its view is `[n]`.
    """

    name: str
    dtype: torch.dtype
    size: int
    offset: int
    one_a_row: bool = False

    @property
    def num_bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """The layout of a row's bytes: fields that do not overlap, each aligned to its values' size.

    Raises:
        ValueError: for fields that overlap, stand beyond the record's end, are not aligned, or share a name.
    """

    fields: tuple[Field, ...]
    num_bytes: int

    def __post_init__(self) -> None:
        end, names = 0, [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"a record has two fields of one name: {names}")
        for field in self.fields:
            if field.size < 1 or (field.one_a_row and field.size != 1):
                raise ValueError(f"field {field.name!r} of a record has a wrong size: {field}")
            if field.offset < end or field.offset % field.dtype.itemsize:
                raise ValueError(
                    f"field {field.name!r} of a record must start at or behind byte {end}, aligned: {field}"
                )
            end = field.offset + field.num_bytes
        if self.num_bytes < max(end, 1):
            raise ValueError(f"a record of {self.num_bytes} bytes has no room for fields that end at byte {end}")

    def views(self, records: Tensor) -> dict[str, Tensor]:
        """Each field of some records, without a copy.

        Args:
            records: uint8 `[n, num_bytes]`, contiguous; where `num_bytes` is no multiple of a field's value size, and n
                is greater than 1, that field has no view.

        Returns:
            by name, a view of the field's dtype: `[n, size]`, or `[n]` if a row has one value.

        Raises:
            ValueError: for records of another shape or dtype.
        """
        if records.dtype != torch.uint8 or records.dim() != 2 or records.shape[1] != self.num_bytes:
            raise ValueError(f"records must be uint8 [n, {self.num_bytes}], got {records.dtype} {list(records.shape)}")
        found = {}
        for field in self.fields:
            part = records[:, field.offset : field.offset + field.num_bytes].view(field.dtype)
            found[field.name] = part.squeeze(1) if field.one_a_row else part
        return found


def record_of(embedding_dim: int, dtype: torch.dtype, states: Sequence[StateSpec]) -> Record:
    """The record of a table's rows: the weight first, then the optimizer's states, always float32.

    Its size is a multiple of 4 bytes, so every field of many records has a view.
    """
    fields = [Field(WEIGHT, dtype, embedding_dim, 0)]
    for state in states:
        end = fields[-1].offset + fields[-1].num_bytes
        size = embedding_dim if state.per_element else 1
        fields.append(Field(state.name, torch.float32, size, -(-end // 4) * 4, not state.per_element))
    end = fields[-1].offset + fields[-1].num_bytes
    return Record(tuple(fields), -(-end // 4) * 4)
