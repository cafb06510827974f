"""Reading a log as Criteo's text and as Parquet: ours, to encoded rows and to shuffled batches, against pyarrow alone.

pyarrow only parses: its columns are numbers and strings, neither hashed nor cut into batches. It is the floor of
readers that parse with it. The Parquet files have the same rows, with categories as strings and as integers. The text
is 1 GB of synthetic lines, or, where TRITONEMB_SAMPLE names a file in Criteo's format, of its lines with some
categories redrawn; TRITONEMB_READER_BYTES makes it another size. The kernel keeps the files in memory, so what is
measured is the processor.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.measuring.clock import Contender
from benchmarks.measuring.result_files import Goal
from tritonemb.data import ClickLog, LogOptions, SplitRule
from tritonemb.data.schema import CATEGORIES, FIELDS, INTEGERS, LABEL

pa = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")
parquet = pytest.importorskip("pyarrow.parquet")

NUM_BYTES = int(os.environ.get("TRITONEMB_READER_BYTES", 10**9))
BATCH_SIZE = 2048
WHOLE = SplitRule(split_by="end", test_share=0.0)


class File(NamedTuple):
    path: Path
    num_rows: int

    def __str__(self) -> str:
        return f"{self.path.stat().st_size / 1e9:.1f} GB, {self.num_rows:,} rows"


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> File:
    return write_text(tmp_path_factory.mktemp("reader") / "day_0", NUM_BYTES)


def write_text(path: Path, num_bytes: int) -> File:
    random = np.random.default_rng(0)
    sample = os.environ.get("TRITONEMB_SAMPLE")
    lines = _sample(Path(sample), random) if sample else [_line(random) for _ in range(4000)]
    block = b"\n".join(lines) + b"\n"
    repeats = max(num_bytes // len(block), 1)
    with path.open("wb") as file:
        for _ in range(repeats):
            file.write(block)
    return File(path, repeats * len(lines))


def _sample(path: Path, random: np.random.Generator) -> list[bytes]:
    lines = []
    for line in path.read_bytes().splitlines()[:20_000]:
        fields = line.split(b"\t")
        for place in random.integers(1 + len(INTEGERS), len(FIELDS), 3):
            if fields[place]:
                fields[place] = b"%08x" % random.integers(0, 1 << 32)
        lines.append(b"\t".join(fields))
    return lines


def _line(random: np.random.Generator) -> bytes:
    """Widths and missing values as often as in Criteo's."""
    integers = [b"" if u < 0.2 else b"%d" % int(10 ** (4 * v)) for u, v in random.random((len(INTEGERS), 2))]
    categories = [b"" if u < 0.1 else b"%08x" % random.integers(0, 1 << 32) for u in random.random(len(CATEGORIES))]
    return b"\t".join([b"%d" % random.integers(0, 2), *integers, *categories])


def open_with_pyarrow(path: Path, strings: Any, threads: bool) -> Any:
    types = {LABEL: pa.int8()} | dict.fromkeys(INTEGERS, pa.int64()) | dict.fromkeys(CATEGORIES, strings)
    return csv.open_csv(
        path,
        read_options=csv.ReadOptions(column_names=FIELDS, block_size=1 << 24, use_threads=threads),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    )


def read_with_pyarrow(path: Path, strings: Any, threads: bool) -> int:
    return sum(batch.num_rows for batch in open_with_pyarrow(path, strings, threads))


@pytest.fixture(scope="module", params=["strings", "integers"])
def parquet_file(request: pytest.FixtureRequest, log_file: File) -> File:
    return write_parquet(log_file, request.param)


def write_parquet(text: File, kind: str) -> File:
    """Write the rows of a text file, with categories as strings or as integers, in row groups of a chunk of text."""
    path = text.path.with_name(f"{kind}.parquet")
    log = ClickLog(text.path, LogOptions(split=WHOLE))
    batches = (
        open_with_pyarrow(text.path, pa.string(), True) if kind == "strings" else log.scan("train", lambda rows: rows)
    )
    writer = None
    for batch in batches:
        batch = getattr(batch, "rows", batch)
        writer = writer or parquet.ParquetWriter(path, batch.schema)
        writer.write_batch(batch)
    writer.close()
    return File(path, text.num_rows)


def read_parquet(path: Path, threads: bool) -> int:
    batches = parquet.ParquetFile(path).iter_batches(32_768, use_threads=threads)
    return sum(batch.num_rows for batch in batches)


def read_batches(log: ClickLog) -> int:
    with log.open("train", BATCH_SIZE, shuffle=True) as stream:
        return sum(map(len, stream))


def bench_reader(log_file: File, race: Any, threads: int) -> None:
    peers: dict[str, Any] = {}
    for name, strings in (("string", pa.string()), ("binary", pa.binary())):
        for kind, many in (("threads", True), ("one thread", False)):
            peers[f"pyarrow {name}, {kind}"] = partial(read_with_pyarrow, log_file.path, strings, many)
    race_readers("read Criteo's TSV", log_file, race, threads, peers)


def bench_parquet(parquet_file: File, race: Any, threads: int) -> None:
    kinds = {"threads": True, "one thread": False}
    peers = {f"pyarrow, {kind}": partial(read_parquet, parquet_file.path, many) for kind, many in kinds.items()}
    race_readers(f"read Parquet, {parquet_file.path.stem}", parquet_file, race, threads, peers)


def race_readers(title: str, file: File, race: Any, threads: int, peers: dict[str, Any]) -> None:
    log = ClickLog(file.path, LogOptions(split=WHOLE, parser_threads=threads))
    readers: dict[str, Any] = {
        "tritonemb": lambda: read_batches(log),
        "tritonemb, rows only": lambda: sum(len(block.rows) for block in log.scan("train", log.encode)),
        **peers,
    }
    for name, read in readers.items():
        assert read() == file.num_rows, name
    size = file.path.stat().st_size
    contenders = [Contender(name, lambda _: None, lambda _, read=read: read(), size) for name, read in readers.items()]
    timings = race(title, file, contenders, most_rounds=5, warmup_rounds=1)
    fastest = min(range(2, len(timings)), key=lambda number: timings[number].percentile(50))
    race.targets += [Goal(fused, fastest, most=1.25).row(title, file, timings) for fused in range(2)]
