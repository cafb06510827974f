"""Reading a log in Criteo's format: ours, to encoded rows and to shuffled batches, against pyarrow's CSV reader alone.

pyarrow only parses: its columns are numbers and strings, neither hashed nor cut into batches. The file is 1 GB of
synthetic lines, or, where TRITONEMB_SAMPLE names a file in Criteo's format, of its lines with some categories redrawn;
TRITONEMB_READER_BYTES makes it another size. The kernel keeps the file in memory, so what is measured is the processor.
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

NUM_BYTES = int(os.environ.get("TRITONEMB_READER_BYTES", 10**9))
BATCH_SIZE = 2048


class File(NamedTuple):
    path: Path
    num_rows: int

    def __str__(self) -> str:
        return f"{self.path.stat().st_size / 1e9:.1f} GB, {self.num_rows:,} rows"


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> File:
    random = np.random.default_rng(0)
    sample = os.environ.get("TRITONEMB_SAMPLE")
    lines = _sample(Path(sample), random) if sample else [_line(random) for _ in range(4000)]
    path = tmp_path_factory.mktemp("reader") / "day_0"
    block = b"\n".join(lines) + b"\n"
    repeats = max(NUM_BYTES // len(block), 1)
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


def read_with_pyarrow(path: Path, strings: Any, threads: bool) -> int:
    types = {LABEL: pa.int8()} | dict.fromkeys(INTEGERS, pa.int64()) | dict.fromkeys(CATEGORIES, strings)
    reader = csv.open_csv(
        path,
        read_options=csv.ReadOptions(column_names=FIELDS, block_size=1 << 24, use_threads=threads),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    )
    return sum(batch.num_rows for batch in reader)


def read_batches(log: ClickLog) -> int:
    with log.open("train", BATCH_SIZE, shuffle=True) as stream:
        return sum(map(len, stream))


def bench_reader(log_file: File, race: Any, threads: int) -> None:
    whole = SplitRule(split_by="end", test_share=0.0)
    log = ClickLog(log_file.path, LogOptions(split=whole, parser_threads=threads))
    readers: dict[str, Any] = {
        "tritonemb": lambda: read_batches(log),
        "tritonemb, rows only": lambda: sum(len(block.rows) for block in log.scan("train", log.encode)),
    }
    for name, strings in (("string", pa.string()), ("binary", pa.binary())):
        for kind, many in (("threads", True), ("one thread", False)):
            readers[f"pyarrow {name}, {kind}"] = partial(read_with_pyarrow, log_file.path, strings, many)
    for name, read in readers.items():
        assert read() == log_file.num_rows, name
    size = log_file.path.stat().st_size
    contenders = [Contender(name, lambda _: None, lambda _, read=read: read(), size) for name, read in readers.items()]
    timings = race("read Criteo's TSV", log_file, contenders, most_rounds=5, warmup_rounds=1)
    fastest = min(range(2, len(timings)), key=lambda number: timings[number].percentile(50))
    race.targets += [Goal(fused, fastest, most=1.25).row("read Criteo's TSV", log_file, timings) for fused in range(2)]
