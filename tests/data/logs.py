"""Small logs for the tests: lines in Criteo's format, files of them, and what a stream gave."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

from tritonemb.data import Batch, ClickLog, LogOptions, Schema, SplitRule  # noqa: E402

ALL_TRAIN = SplitRule(split_by="end", test_share=0.0)


def line(label: str = "0", integers: dict[int, str] | None = None, categories: dict[int, str] | None = None) -> str:
    numbers = [(integers or {}).get(i, "1") for i in range(1, 14)]
    return "\t".join([label, *numbers, *[(categories or {}).get(i, "0000abcd") for i in range(1, 27)]])


def random_lines(num_lines: int, seed: int = 0) -> list[bytes]:
    """Lines as different from each other as Criteo's: missing, negative and long values, odd widths."""
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(num_lines):
        integers = [
            b"" if draw < 0.2 else b"%d" % (int(random.integers(0, 10 ** int(random.integers(1, 18)))) - 2)
            for draw in random.random(13)
        ]
        categories = [
            b"" if draw < 0.1 else (b"%08x" if draw < 0.9 else b"%X") % int(random.integers(0, 1 << 32))
            for draw in random.random(26)
        ]
        lines.append(b"\t".join([b"%d" % random.integers(0, 2), *integers, *categories]))
    return lines


def write(folder: Path, lines: Iterable[str | bytes], name: str = "train.txt") -> Path:
    raw = b"".join(
        (entry if isinstance(entry, bytes) else entry.encode(errors="surrogateescape")) + b"\n" for entry in lines
    )
    path = folder / name
    if name.endswith(".gz"):  # in two members, as `cat a.gz b.gz` gives
        half = len(raw) // 2
        raw = gzip.compress(raw[:half]) + gzip.compress(raw[half:])
    elif name.endswith(".zst"):
        raw = pa.Codec("zstd").compress(raw, asbytes=True)
    path.write_bytes(raw)
    return path


def options(split: SplitRule = ALL_TRAIN, **changes: Any) -> LogOptions:
    """All rows are train rows, unless said otherwise; `num_embeddings` and the like go to the schema."""
    schema = {name: changes.pop(name) for name in tuple(changes) if name in Schema.__dataclass_fields__}
    return LogOptions(**({"schema": Schema(**schema), "split": split, "parser_threads": 2} | changes))


def contents(batch: Batch) -> list[torch.Tensor]:
    return [batch.dense, batch.labels, batch.sparse.values(), batch.sparse.lengths(), batch.sparse.offsets()]


def same(left: Iterable[Batch], right: Iterable[Batch]) -> bool:
    """Whether two runs of batches have the same bits."""
    left, right = list(left), list(right)
    return len(left) == len(right) and all(
        torch.equal(a, b) for pair in zip(left, right, strict=True) for a, b in zip(*map(contents, pair), strict=True)
    )


def resumes(
    log: ClickLog, split: Any = "train", batch_size: int = 8, after: int = 1, other: ClickLog | None = None, **how: Any
) -> bool:
    """Whether a log, or another one, opened at the position behind some batches, has the rest of them."""
    with log.open(split, batch_size, **how) as stream:
        list(itertools.islice(stream, after))
        position, remainder = stream.position, list(stream)
    return bool(remainder) and same((other or log).open(split, batch_size, **how, position=position), remainder)


def check_streams(data: Any, expected: Any, split: str, batch_size: int, **how: Any) -> None:
    """Check that both have the same batches, positions and reports, also where they resume behind two batches."""
    with data.open(split, batch_size, **how) as stream, expected.open(split, batch_size, **how) as other:
        assert same([next(stream), next(stream)], [next(other), next(other)])
        assert stream.position == other.position
        position = stream.position
        assert same(stream, other)
        assert (stream.position, stream.report) == (other.position, other.report)
    assert same(*(source.open(split, batch_size, **how, position=position) for source in (data, expected)))


def rows_of(log: ClickLog, split: Any = "train", batch_size: int = 64, **how: Any) -> list[tuple[float, ...]]:
    """Every row of a split: label, dense values and ids of one-hot features, in the order of the stream."""
    rows = []
    with log.open(split, batch_size, **how) as stream:
        for batch in stream:
            ids = batch.sparse.values().view(len(log.features), len(batch)).T
            for label, dense, row in zip(batch.labels.tolist(), batch.dense.tolist(), ids.tolist(), strict=True):
                rows.append((label, *dense, *row))
    return rows
