"""Open a data set by its name, its path or the reader hosts that serve it; `tritonemb reader` runs a reader host."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tritonemb.data.click_log import ClickLog
from tritonemb.data.datasets import Dataset, load_adult, load_movielens_100k, make_synthetic
from tritonemb.data.files import exists
from tritonemb.data.parquet import file_of_frame
from tritonemb.data.protocol import Data, Feature, Split
from tritonemb.data.reader_host import ReaderHost, RemoteData
from tritonemb.data.schema import ALL_ROWS, LogOptions
from tritonemb.flight import SCHEMES, TOKEN
from tritonemb.utils import did_you_mean

NAMES = ("movielens-100k", "synthetic", "adult", "criteo-kaggle", "criteo-terabyte")
ALIASES = {"criteo": "criteo-kaggle"}


def kind_of(name_or_path: str) -> str:
    """Return the name in `NAMES`, with aliases resolved; "criteo-kaggle", whose preset suits any log, for a path."""
    name = ALIASES.get(name_or_path, name_or_path)
    return name if name in NAMES else "criteo-kaggle"


def open_dataset(
    name_or_path: str, path: str | Path | None = None, *, log: LogOptions | None = None, seed: int = 0
) -> Dataset | ClickLog | RemoteData:
    """Open a data set by name, a click log by its path, or the data of reader hosts by their addresses. Raise
    ValueError, FileNotFoundError, ConnectionError or PermissionError.

    Args:
        name_or_path: one of `NAMES` or `ALIASES`; the path or URI of a file or folder: Criteo's TSV, CSV or Parquet;
            or the addresses of reader hosts, "grpc://HOST:PORT" or "grpc+tls://HOST:PORT", with commas between them.
        path: file or folder of "criteo-kaggle", "criteo-terabyte" and "adult"; the others do not take a path.
        log: options for reading a log.
        seed: seed of synthetic data.
    """
    if name_or_path.startswith(SCHEMES):
        return RemoteData(name_or_path.split(","))
    if (kind := ALIASES.get(name_or_path, name_or_path)) not in NAMES:
        if path is not None:
            raise ValueError(f"{kind!r} is not one of {NAMES} but a path; remove the second path {str(path)!r}")
        if not exists(kind):
            near = did_you_mean(kind, NAMES)
            raise FileNotFoundError(f"{kind!r} is neither a file or folder nor one of the data sets {NAMES}{near}")
        return ClickLog(kind, log)
    if kind in ("movielens-100k", "synthetic"):
        if path is not None:
            raise ValueError(f"data set {kind!r} does not take a path, got {str(path)!r}")
        return load_movielens_100k() if kind == "movielens-100k" else make_synthetic(seed=seed)
    if path is None:
        path_kind = "file" if kind == "criteo-kaggle" else "folder"
        raise ValueError(f"data set {name_or_path!r} needs a path: the {path_kind} to read")
    return load_adult(path) if kind == "adult" else ClickLog(path, log, name=kind)


def from_dataframe(
    frame: Any, options: LogOptions | None = None, *, validation: Any = None, test: Any = None, name: str = "data frame"
) -> ClickLog:
    """Open a data frame as a log, without a copy: pandas, Polars, a `pyarrow.Table`, any with `__arrow_c_stream__`.

    Column types are as in Parquet files. pandas stores a column of integers with missing values as floating point; use
    `convert_dtypes` to make it a sparse column. Raise ValueError for other objects, or unsuitable columns.

    Args:
        options: options for reading; without held-out frames their split rule applies, by default the last sixth.
        validation, test: frames of held-out rows with the same columns.
        name: name in messages.
    """
    frames: dict[Split, Any] = {"train": frame, "validation": validation, "test": test}
    frames = {split: data_frame for split, data_frame in frames.items() if data_frame is not None}
    suffix = " ({})" if len(frames) > 1 else ""
    files = {split: file_of_frame(frames[split], name + suffix.format(split)) for split in frames}
    return ClickLog(files, options, name=name)


def open_for_scoring(
    data: Any, log: LogOptions, features: Sequence[Feature], extra_columns: tuple[str, ...] = (), labelled: bool = False
) -> ClickLog:
    """Open a log to score with a model trained on these features: all rows are test rows, in their order.

    Args:
        data: path or URI of a log, or a data frame as for `from_dataframe`.
        log: options as in training; the split rule is ignored.
        features: features of the model; categories are read as their kinds.
        extra_columns: additional columns to read, for `ClickLog.scan`.
        labelled: whether to read the label; if not, it may be missing, as in Criteo's test.txt.

    Raises:
        ValueError, FileNotFoundError: the log cannot be read, or has other features.
    """
    is_frame = hasattr(data, "__arrow_c_stream__")
    name = "data frame" if is_frame else str(data)
    if not (is_frame or exists(data)):
        raise FileNotFoundError(f"{name!r}: no such file or folder to score")
    trained_kinds = {feature.name: feature.kind for feature in features}
    kinds = dict.fromkeys(log.schema.integers, "integers") | {k: kind for k, kind in trained_kinds.items() if kind}
    schema = replace(log.schema, integers=tuple(name for name, kind in kinds.items() if kind == "integers"))
    log = replace(log, schema=schema, split=ALL_ROWS)
    source: Any = {"train": file_of_frame(data, name)} if is_frame else data
    click_log = ClickLog(source, log, labelled=labelled, extra_columns=extra_columns).read_as(trained_kinds)
    if len(click_log.features) != len(features):
        raise ValueError(f"{name}: the log has {len(click_log.features)} features, the model {len(features)}")
    for feature, expected in zip(click_log.features, features, strict=True):
        if feature != expected:
            raise ValueError(f"{name}: the log has {feature}, the model was trained with {expected}")
    return click_log.all_rows_as("test")


@dataclass(frozen=True)
class ReaderOptions:
    """Read a data set for trainers on other machines, which connect with --data grpc://HOST:PORT.

    Clients need the token in the environment (TRITONEMB_TOKEN); without one, a random token is printed.

    Example: tritonemb reader --data day_0.tsv --address grpc+tls://0.0.0.0:8815 --certificate tls.crt --key tls.key

    Args:
        data: name of a data set, or path of a log.
        path: file or folder of the data set, for names that need it.
        address: grpc://HOST:PORT for this machine only, or grpc+tls://HOST:PORT with a certificate.
        certificate: PEM file for TLS.
        key: PEM file of the certificate's key.
        seed: seed of synthetic data.
        read: options for reading a log.
    """

    data: str
    path: Path | None = None
    address: str = "grpc://127.0.0.1:8815"
    certificate: Path | None = None
    key: Path | None = None
    seed: int = 0
    read: LogOptions = field(default_factory=LogOptions)


def run_reader(options: ReaderOptions) -> None:
    """Run a reader host until SIGINT or SIGTERM. Raise the errors of `open_dataset` and `ReaderHost`."""
    data: Data = open_dataset(options.data, options.path, log=options.read, seed=options.seed)
    with ReaderHost(data, options.address, certificate=options.certificate, key=options.key) as host:
        print(f"serving {data.name} at {host.address}", flush=True)
        if not os.environ.get(TOKEN):
            print(f"{TOKEN}={host.token}", flush=True)
        host.wait()
