"""Data sets for binary click prediction, in memory or read as they are needed, and the batches cut from them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tritonemb.data.batch import Batch
from tritonemb.data.click_log import ClickLog, is_labelled
from tritonemb.data.columns import Column, Rows
from tritonemb.data.convert import VocabularyReport, build_vocabulary, cached_as_parquet, convert
from tritonemb.data.datasets import load_adult, load_movielens_100k, make_synthetic
from tritonemb.data.encode import load_vocabulary
from tritonemb.data.files import exists, find
from tritonemb.data.in_memory import Dataset
from tritonemb.data.loader import merge_positions, open_shards, rank_position
from tritonemb.data.protocol import (
    Batches,
    Data,
    Feature,
    OpenOptions,
    Position,
    PositionedBatch,
    ReadReport,
    Shard,
    Split,
    Stream,
)
from tritonemb.data.reader_host import ReaderHost, RemoteData
from tritonemb.data.schema import CRITEO, LogOptions, Schema, SplitRule
from tritonemb.data.workers import DataLoaderWorkers
from tritonemb.flight import SCHEMES

NAMES = ("movielens-100k", "synthetic", "adult", "criteo-kaggle", "criteo-terabyte")
ALIASES = {"criteo": "criteo-kaggle"}

__all__ = [
    "ALIASES",
    "CRITEO",
    "NAMES",
    "Batch",
    "Batches",
    "ClickLog",
    "Column",
    "Data",
    "DataLoaderWorkers",
    "Dataset",
    "Feature",
    "LogOptions",
    "OpenOptions",
    "Position",
    "PositionedBatch",
    "ReadReport",
    "ReaderHost",
    "RemoteData",
    "Rows",
    "Schema",
    "Shard",
    "Split",
    "SplitRule",
    "Stream",
    "VocabularyReport",
    "build_vocabulary",
    "cached_as_parquet",
    "convert",
    "from_dataframe",
    "kind_of",
    "load_adult",
    "load_movielens_100k",
    "load_vocabulary",
    "make_synthetic",
    "merge_positions",
    "open_dataset",
    "open_for_scoring",
    "open_shards",
    "rank_position",
]


def kind_of(name_or_path: str) -> str:
    """Which of `NAMES` is meant; a path counts as "criteo-kaggle", whose settings suit a log of the user's own best."""
    name = ALIASES.get(name_or_path, name_or_path)
    return name if name in NAMES else "criteo-kaggle"


def open_dataset(
    name_or_path: str,
    path: str | Path | None = None,
    *,
    log: LogOptions | None = None,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Dataset | ClickLog | RemoteData:
    """Open a data set by name, a log of clicks by its path, or what reader hosts serve by their addresses.

    Args:
        name_or_path: one of `NAMES` or `ALIASES`; or the path or URI of a file or folder: Criteo's TSV, CSV or Parquet;
            or the addresses of reader hosts, "grpc://HOST:PORT" or "grpc+tls://HOST:PORT", with commas between them.
        path: the file or folder of "criteo-kaggle" and "criteo-terabyte", the folder of "adult"; "movielens-100k" and
            "synthetic" take none.
        log: how a log is read.
        seed: of the synthetic data.
        say: is called before work that takes a pass over the data; see `ClickLog`.

    Raises:
        ValueError, FileNotFoundError, ConnectionError, PermissionError: saying what to do.
    """
    if name_or_path.startswith(SCHEMES):
        return RemoteData(name_or_path.split(","))
    kind = ALIASES.get(name_or_path, name_or_path)
    if kind not in NAMES:
        if path is not None:
            raise ValueError(f"{kind!r} is not one of {NAMES} but a path; a second one was given: {str(path)!r}")
        if not exists(kind):
            raise FileNotFoundError(f"{kind!r} is neither a file or folder nor one of the data sets {NAMES}")
        return ClickLog(kind, log, say=say)
    if kind in ("movielens-100k", "synthetic"):
        if path is not None:
            raise ValueError(f"data set {kind!r} takes no path, got {str(path)!r}")
        return load_movielens_100k() if kind == "movielens-100k" else make_synthetic(seed=seed)
    if path is None:
        needed = "file" if kind == "criteo-kaggle" else "folder"
        raise ValueError(f"data set {name_or_path!r} needs a path: the {needed} to read")
    return load_adult(path) if kind == "adult" else ClickLog(path, log, name=kind, say=say)


def from_dataframe(
    frame: Any, options: LogOptions | None = None, *, validation: Any = None, test: Any = None, name: str = "data frame"
) -> ClickLog:
    """A log of the rows of a data frame: pandas, Polars, a `pyarrow.Table` or anything else with the method
    `__arrow_c_stream__`. No column is copied.

    Columns are what they are in Parquet files; a column of integers that pandas holds as floating point, since some are
    missing, has to become one of integers (`convert_dtypes`) to be a sparse one.

    Args:
        options: how it is read; its split rule holds rows out, by default the last sixth, if no held-out frames are
            given.
        validation, test: held-out rows with the same columns.
        name: for messages.

    Raises:
        ValueError: not such a frame; a column is not there, or of another type than it needs.
    """
    frames = {"train": frame, "validation": validation, "test": test}
    return ClickLog({s: f for s, f in frames.items() if f is not None}, options, name=name)  # type: ignore[misc]


def open_for_scoring(path: str | Path, log: LogOptions, features: Sequence[Feature]) -> ClickLog:
    """Open a log whose rows, all of them and in their order, are test rows, for a model trained on these features.

    Args:
        log: as in training; its split rule is ignored. The label may be missing, as in Criteo's test.txt.

    Raises:
        ValueError, FileNotFoundError: the log can not be read, or has other features.
    """
    if not exists(path):
        raise FileNotFoundError(f"{str(path)!r}: no such file or folder to score")
    labelled = is_labelled(find(path)[0], log)
    opened = ClickLog(path, replace(log, split=SplitRule(split_by="end", test_share=0.0)), labelled=labelled)
    if len(opened.features) != len(features):
        raise ValueError(f"{path}: the log has {len(opened.features)} features, the model {len(features)}")
    for found, expected in zip(opened.features, features, strict=True):
        if found != expected:
            raise ValueError(f"{path}: the log has {found}, the model was trained with {expected}")
    return opened.all_rows_as("test")
