"""Item sequences of users in time order, and their leave-one-out split."""

import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.data.batch import Array, Column, lengths_to_offsets, segment_positions
from tritonemb.data.protocol import Split
from tritonemb.utils import join_names

_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
_HELD_OUT: dict[Split, int] = {"train": 2, "validation": 1, "test": 0}  # items behind a split's last item


def read_sequences(path: str | Path) -> Column:
    """Read a text file with a user per line: the user, then item ids in time order; `.gz` or `.xz` if compressed.

    Users are numbered from 0, without blank lines. Raise ValueError for ids that are not integers, naming the line.
    """
    path, rows, number = Path(path), list[Array](), 1
    with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8", errors="surrogateescape") as file:
        try:
            for line in file:
                if fields := line.split():
                    rows.append(np.array(fields[1:], dtype=np.int64))
                number += 1
        except (ValueError, OverflowError, EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise ValueError(f"{path}, line {number}: expected a user and integer item ids ({error})") from error
    offsets = lengths_to_offsets(np.array([len(row) for row in rows], dtype=np.int64))
    return Column(torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *rows])), torch.from_numpy(offsets))


def keep_last(sequences: Column, length: int | None, drop: int = 0) -> Column:
    """Keep the last `length` values of each row, all if None, after `drop` values have been dropped from its end.
    ValueError for a negative number."""
    assert sequences.offsets is not None
    if min(length or 0, drop) < 0:
        raise ValueError(f"length and drop must be at least 0, got {length} and {drop}")
    offsets = sequences.offsets.numpy()
    ends = np.maximum(offsets[1:] - drop, offsets[:-1])
    starts = offsets[:-1] if length is None else np.maximum(offsets[:-1], ends - length)
    bounds = np.stack([starts, ends], axis=1).ravel()  # a kept segment, then one between
    positions, lengths = segment_positions(bounds, np.arange(len(starts)) * 2)
    return Column(sequences.values[torch.from_numpy(positions)], torch.from_numpy(lengths_to_offsets(lengths)))


def take_rows(sequences: Column, rows: Tensor) -> Column:
    """Gather rows by number, in this order."""
    assert sequences.offsets is not None
    positions, lengths = segment_positions(sequences.offsets.numpy(), rows.numpy())
    return Column(sequences.values[torch.from_numpy(positions)], torch.from_numpy(lengths_to_offsets(lengths)))


def leave_one_out(sequences: Column, split: Split) -> tuple[Column, Tensor]:
    """Return the history of each user, and the item to predict after it, int64 `[U]`.

    The last item of a user is that of the test split, the one before that of validation, the one before that the last
    of training. Raise ValueError for a user with fewer than three items.
    """
    assert sequences.offsets is not None
    if split not in _HELD_OUT:
        raise ValueError(f"split must be one of {join_names(_HELD_OUT)}, got {split!r}")
    lengths = sequences.offsets.diff()
    if len(lengths) and int(lengths.min()) < 3:
        raise ValueError(f"user {int(lengths.argmin())} has {int(lengths.min())} items; leave-one-out needs 3")
    ends = sequences.offsets[1:] - _HELD_OUT[split]
    return keep_last(sequences, None, drop=_HELD_OUT[split] + 1), sequences.values[ends - 1]
