"""One column of a chunk, as every format gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tritonemb.utils import require

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Values:
    """The values of a column.

    Args:
        numbers: integers or float64 `[N]`; anything where missing. With `strings`, indices into them.
        missing: bool `[N]`; None if nothing is.
        strings: the distinct strings, a `pyarrow` string array.
        offsets: `[num_rows + 1]` int64 where each row's values start, for a column of lists; None with one value a row.
    """

    numbers: Array
    missing: Array | None = None
    strings: Any = None
    offsets: Array | None = None


Sink = Callable[[str, Values], None]
"""Is given the columns of a chunk by name, one after the other."""


@dataclass(frozen=True)
class Checked:
    """Which rows of a chunk are good.

    Args:
        good: bool `[N]` of the rows that the sink was given; None if all are.
        rows: int64 `[N]`, the line or row of each in the chunk.
        bad_rows: int64, the lines or rows that are bad, ascending: of the sink's rows and of others.
        describe: what is wrong with the n-th of them, as (reason, message).
        num_rows: lines or rows of the chunk, blank ones too.
    """

    good: Array | None
    rows: Array
    bad_rows: Array
    describe: Callable[[int], tuple[str, str]]
    num_rows: int


def string_buffers(strings: Any) -> tuple[Array, Array]:
    """Bytes (uint8) and offsets `[N + 1]` of a `pyarrow` array of strings or binary, 32- or 64-bit."""
    pa = require("pyarrow")
    wide = pa.types.is_large_string(strings.type) or pa.types.is_large_binary(strings.type)
    dtype = np.dtype(np.int64 if wide else np.int32)
    if len(strings) == 0:
        return np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    _, offsets, data = strings.buffers()
    ends = np.frombuffer(offsets, dtype, len(strings) + 1, strings.offset * dtype.itemsize)
    return np.zeros(0, dtype=np.uint8) if data is None else np.frombuffer(data, np.uint8), ends
