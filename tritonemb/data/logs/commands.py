"""`tritonemb vocab` and `tritonemb convert`: their options, and the line that each ends with."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tritonemb.data.logs.click_log import ClickLog
from tritonemb.data.logs.convert import convert
from tritonemb.data.logs.counting import build_vocabulary
from tritonemb.data.logs.options import LogOptions

SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class VocabOptions:
    """Number the categories of a log's train rows by how often they occur, for --vocabulary.

    Example: tritonemb vocab --data train.txt --out vocabulary.parquet --min-count 10

    Args:
        data: the log, a file or a folder.
        out: the file to write.
        min_count: rarer values share id 0 with missing ones.
        max_size: the most frequent values that each feature keeps; all if not given.
        read: how the log is read.
    """

    data: Path
    out: Path = Path("vocabulary.parquet")
    min_count: int = 10
    max_size: int | None = None
    read: LogOptions = field(default_factory=LogOptions)


@dataclass(frozen=True)
class ConvertOptions:
    """Make Parquet files, which read faster, of a log in Criteo's format.

    Example: tritonemb convert --data day_0.gz --out day_0.parquet

    Args:
        data: the log: a file, or a folder of them.
        out: the file to write, or the folder for a folder.
        row_group_rows: rows of a row group.
        compression: of the columns.
        on_bad_row: stop at a row that is not as it should be, or leave it out and count it.
    """

    data: Path
    out: Path
    row_group_rows: int = 1 << 17
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = "zstd"
    on_bad_row: Literal["raise", "skip"] = "raise"


def make_vocabulary(options: VocabOptions) -> str:
    """Raises ValueError, FileNotFoundError: as `ClickLog` and `build_vocabulary`."""
    log = ClickLog(options.data, options.read, say=_say)
    report = build_vocabulary(log, options.out, options.min_count, options.max_size, progress=_progress("read"))
    sizes = ", ".join(f"{name} {size:,}" for name, size in report.num_embeddings.items())
    lines = [f"{options.out}: {report.rows:,} train rows{_skipped(report.skipped)}", f"ids: {sizes}"]
    for name, most in report.forgotten.items():
        lines.append(f"note: {name} has more distinct values than were counted at a time; counts may miss {most:,}")
    return "\n".join(lines)


def convert_log(options: ConvertOptions) -> str:
    """Raises ValueError, FileNotFoundError: as `convert`."""
    report = convert(
        options.data,
        options.out,
        options.row_group_rows,
        options.compression,
        on_bad_row=options.on_bad_row,
        progress=_progress("written"),
    )
    files = f" in {len(report.files):,} files" if options.data.is_dir() else ""
    return f"{options.out}: {report.rows:,} rows{files}{_skipped(report.skipped)}"


def _skipped(rows: int) -> str:
    return f"; {rows:,} bad rows were left out" if rows else ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _progress(verb: str) -> Callable[[int], None]:
    """Says how far it is, on stderr, every few seconds."""
    last = time.monotonic()

    def tell(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            _say(f"{rows:,} rows {verb}")

    return tell
