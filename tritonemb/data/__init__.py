"""Data sets for binary click prediction, in memory, and the batches cut from them."""

from __future__ import annotations

from pathlib import Path

from tritonemb.data.adult import load_adult
from tritonemb.data.batch import Batch
from tritonemb.data.criteo import CriteoOptions, load_criteo
from tritonemb.data.dataset import Column, Dataset, Feature, Rows, Split
from tritonemb.data.movielens import load_movielens_100k
from tritonemb.data.synthetic import make_synthetic

NAMES = ("movielens-100k", "synthetic", "criteo", "adult")

__all__ = [
    "NAMES",
    "Batch",
    "Column",
    "CriteoOptions",
    "Dataset",
    "Feature",
    "Rows",
    "Split",
    "load_adult",
    "load_criteo",
    "load_movielens_100k",
    "make_synthetic",
    "open_dataset",
]


def kind_of(name_or_path: str) -> str:
    """Which of `NAMES` is meant: a path stands for a file in Criteo's format."""
    return name_or_path if name_or_path in NAMES else "criteo"


def open_dataset(
    name_or_path: str, path: str | Path | None = None, *, criteo: CriteoOptions | None = None, seed: int = 0
) -> Dataset:
    """Open a data set by name, or a file in Criteo's format by its path.

    Args:
        name_or_path: one of `NAMES`, or a path.
        path: the file of "criteo", the folder of "adult"; "movielens-100k" and "synthetic" take none.
        criteo: how a Criteo file is split and numbered.
        seed: of the synthetic data.

    Raises:
        ValueError, FileNotFoundError, ConnectionError: saying what to do.
    """
    kind = kind_of(name_or_path)
    if kind in ("movielens-100k", "synthetic"):
        if path is not None:
            raise ValueError(f"data set {kind!r} takes no path, got {str(path)!r}")
        return load_movielens_100k() if kind == "movielens-100k" else make_synthetic(seed=seed)
    if name_or_path in NAMES:
        if path is None:
            raise ValueError(f"data set {kind!r} needs a path: the {'folder' if kind == 'adult' else 'file'} to read")
        return load_adult(path) if kind == "adult" else load_criteo(path, criteo)
    if path is not None:
        raise ValueError(f"{name_or_path!r} is not one of {NAMES} but a path; a second one was given: {str(path)!r}")
    if not Path(name_or_path).is_file():
        raise FileNotFoundError(f"{name_or_path!r} is neither a file nor one of the data sets {NAMES}")
    return load_criteo(name_or_path, criteo)
