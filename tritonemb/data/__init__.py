"""Data sets for binary click prediction, in memory or read as they are needed, and the batches cut from them."""

from tritonemb.data.batch import Batch, Column, Rows
from tritonemb.data.click_log import ClickLog
from tritonemb.data.convert import VocabularyReport, build_vocabulary, cached_as_parquet, convert
from tritonemb.data.datasets import Dataset, load_adult, load_movielens_100k, make_synthetic
from tritonemb.data.encode import load_vocabulary
from tritonemb.data.loader import DataLoaderWorkers, merge_positions, open_shards, rank_position
from tritonemb.data.negatives import NegativeSampler
from tritonemb.data.open import (
    ALIASES,
    NAMES,
    ReaderHost,
    RemoteData,
    SharedLog,
    from_dataframe,
    kind_of,
    open_dataset,
    open_for_scoring,
)
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
from tritonemb.data.schema import CRITEO, LogOptions, Schema, SplitRule
from tritonemb.data.sequences import keep_last, leave_one_out, read_sequences, take_rows
from tritonemb.data.streams import FolderStream, RowStream
from tritonemb.data.transforms import transform

__all__ = [
    "ALIASES", "CRITEO", "NAMES", "Batch", "Batches", "ClickLog", "Column", "Data", "DataLoaderWorkers", "Dataset",
    "Feature", "FolderStream", "LogOptions", "NegativeSampler", "OpenOptions", "Position", "PositionedBatch",
    "ReadReport", "ReaderHost", "RemoteData", "RowStream", "Rows", "Schema", "Shard", "SharedLog", "Split", "SplitRule",
    "Stream", "VocabularyReport", "build_vocabulary", "cached_as_parquet", "convert", "from_dataframe", "keep_last",
    "kind_of", "leave_one_out", "load_adult", "load_movielens_100k", "load_vocabulary", "make_synthetic",
    "merge_positions", "open_dataset", "open_for_scoring", "open_shards", "rank_position", "read_sequences",
    "take_rows", "transform",
]  # fmt: skip
