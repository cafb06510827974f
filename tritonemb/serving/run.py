"""Trained runs: load a model, score and evaluate rows encoded as in training, look up rows of its tables."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tritonemb.data import open_dataset, open_for_scoring
from tritonemb.data.batch import Batch, Column, Rows, gather_batch, pad_batch
from tritonemb.data.click_log import ClickLog, encoding_digest, vocabulary_digest
from tritonemb.data.encode import make_numberings
from tritonemb.data.files import pa
from tritonemb.data.protocol import Data, Feature
from tritonemb.data.requests import RequestEncoder
from tritonemb.data.schema import FIELDS, LogOptions, Schema
from tritonemb.data.transforms import Transforms
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.models import MODELS
from tritonemb.nn.collections import TableCollection
from tritonemb.nn.layers import MLP, compute_runs_once
from tritonemb.server.attach import Servers, attach, attach_for_reading, collections_on_servers, flush, start
from tritonemb.serving.package import MANIFEST as PACKAGE_MANIFEST
from tritonemb.serving.package import load_package, read_package
from tritonemb.serving.quantized_tables import QuantizedCollection
from tritonemb.tables.dynamic_table import int64_ids
from tritonemb.training.checkpoint import CheckpointFolder, read_manifest, stored_tensors
from tritonemb.training.checkpoint.manager import data_changes, load_model
from tritonemb.training.config import TrainConfig
from tritonemb.training.doctor import check_device
from tritonemb.training.metrics import (
    GroupRecorder,
    Metrics,
    check_group_by,
    label_metrics,
    predict_logits,
    probabilities,
)
from tritonemb.training.model import build_model, import_factory
from tritonemb.training.toml import from_plain
from tritonemb.types import TableConfig
from tritonemb.utils import BATCH_MULTIPLE, LARGE_BATCH, Options, join_names, number

SKIPPED_PREFIXES = ("optimizer.", "rng.", "trainer.")  # of tensors that only training needs
READING_KEYS = "features", "num_dense", "read", "precision"  # of the config in checkpoints of old versions
DATASETS = "movielens-100k", "synthetic", "adult"  # data sets without raw rows: they are encoded in one piece
# Keys of the config that do not determine the model.
TRAINING_KEYS = "schedule evaluation checkpoint output profile parallel server offload converted features num_dense"
Factory = Callable[..., nn.Module]


def load_run(
    path: str | Path, *, model: nn.Module | Factory | None = None, device: str = "cpu", servers: Servers | None = None,
    transforms: Sequence[str] = (),
) -> "Run":  # fmt: skip
    """Load the trained model of a run: its best checkpoint, or its newest if none is marked best.

    Args:
        path: folder of a run of `tritonemb train` or `te.Trainer`, a checkpoint, or a folder of `te.export`.
        model: model as built for training, or a function that builds it; required for a run of `te.Trainer`. For a run
            of `tritonemb train --model MODULE:FUNCTION` this function, since a checkpoint must not decide which code is
            run; it is called as in training.
        device: device of the model.
        servers: embedding servers of the run, see `te.server.connect`; current rows are read from them. By default,
            rows that were on servers are read from the checkpoint into memory.
        transforms: those that the run was trained with, since a checkpoint must not decide which code is run.

    Raises:
        FileNotFoundError, ValueError: the checkpoint is missing, damaged, or does not fit the model.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder; expected the folder of a run, or a checkpoint")
    is_package = (path / PACKAGE_MANIFEST).is_file()
    for folder in (CheckpointFolder(path), CheckpointFolder(path / "checkpoints")) if not is_package else ():
        path = folder.best() or folder.latest() or path
    if is_package and servers is not None:
        raise ValueError(f"{path} was exported, with all rows; load it without servers, or a checkpoint with them")

    # Options of the model and of reading rows.
    manifest = read_package(path) if is_package else {"data": {}} | read_manifest(path)
    config, options, target = manifest["config"], None, check_device(device)
    reading = manifest.get("reading") or {name: config[name] for name in READING_KEYS if name in config}
    if "embedding_dim" in config:
        unused = {*TRAINING_KEYS.split()} - ({"server"} if servers is not None else set())
        values = {name: value for name, value in config.items() if name not in unused}
        values.get("tables", {}).pop("prefetch_depth", None)  # of older checkpoints
        options = replace(from_plain(values, TrainConfig(), str(path)), device=device)
    recorded = [name for values in (reading, config) for name in (values.get("read") or {}).get("transforms", ())]
    if unnamed := [name for name in recorded if name not in transforms]:
        text = f"pass transforms={tuple(dict.fromkeys(recorded))} to load_run, or --transforms to a command"
        raise ValueError(f"{path} was trained with the transform {unnamed[0]!r}, code that it must not select: {text}")
    kinds = manifest["run"].get("kinds", {})
    features = tuple(Feature(**entry | {"kind": kinds.get(entry["name"], "")}) for entry in reading.get("features", ()))

    # Build the model, without memory if it is exported, and load its tensors.
    shapes = None if options is None else options.without_pretrained("meta" if is_package else device)
    inputs: Any = features, reading.get("num_dense"), model, len(reading.get("labels", ()))
    if model is None:
        if options is None or shapes is None or not features:
            raise ValueError(
                f"{path} has no model config (not written by `tritonemb train`): pass a model, or a function that "
                "builds it, to load_run(path, model=...), or --model MODULE:FUNCTION to a command"
            )
        if options.model not in MODELS:
            text = "code that it must not select: pass model=FUNCTION to load_run, or --model to a command"
            raise ValueError(f"{path} was trained with the model {options.model!r}, {text}")
        model = build_model(shapes, *inputs)
    elif not isinstance(model, nn.Module):
        has_factory = shapes is not None and shapes.model not in MODELS
        model = build_model(shapes, *inputs) if shapes and has_factory else model()
    if is_package:
        model = load_package(path, model, manifest).to(target)
        return Run(path, model, manifest, reading, features, options, target)
    model = model.to(target)
    run = Run(path, model.eval(), manifest, reading, features, options, target)
    if servers is not None:
        attach_for_reading(model, servers)
    elif collections_on_servers(model):
        local_server = start(1)  # a thread of this process, which serves the checkpoint's rows while `run` exists
        weakref.finalize(run, local_server.close)
        attach(model, local_server, None)
    load_model(path, model, {}, stored_tensors(path), SKIPPED_PREFIXES, servers=servers is None)
    if servers is None:
        flush(model)
    return run


class Run:
    """Trained model with the encoding of its rows; see `load_run`.

    Attributes:
        path: path of the checkpoint.
        model: the model, in evaluation mode.
        features: categorical features of the model.
        labels, score_names: names of several labels, none if there is one; names of the scores of a row.
        schema: label, dense and sparse columns of a row; None if the model was not trained on a log.
        options: options of `tritonemb train`; None for a run of `te.Trainer`.
        device: device of the model.
        transforms: names of the functions that map Arrow batches of raw rows before they are encoded.
    """

    def __init__(
        self, path: Path, model: nn.Module, manifest: Mapping[str, Any], reading: Mapping[str, Any],
        features: tuple[Feature, ...], options: TrainConfig | None, device: torch.device,
    ) -> None:  # fmt: skip
        # What `te.export` writes of the run.
        self.description = {name: manifest[name] for name in ("config", "run", "data") if name in manifest}
        self.description["reading"] = dict(reading)
        self.path, self.model, self.features, self.options, self.device = path, model, features, options, device
        self._precision, self._num_dense = reading.get("precision", "fp32"), reading.get("num_dense", 0)
        self.labels = tuple(reading.get("labels", ()))
        self.score_names = [f"score[{label}]" for label in self.labels] or ["score"]
        self._encoding, self._kinds = manifest["run"].get("encoding", ""), manifest["run"].get("kinds", {})
        is_log = reading.get("read") and (options is None or options.data not in DATASETS)
        self._log_options = from_plain(reading["read"], LogOptions(), str(path)) if is_log else None
        self._from_text = reading.get("from_text", False)
        schema = None if self._log_options is None else self._log_options.schema
        self.schema = schema if schema is None or schema.label_columns else schema.of(FIELDS, str(path))
        self.transforms = () if self._log_options is None else self._log_options.transforms

    def predict(self, rows: Any, *, batch_size: int = 8192) -> Any:
        """Predict click probabilities: a float for one row, otherwise NumPy float32 `[N]`; of several labels `[L]` and
        `[N, L]`. On a CPU the result of a row is bitwise independent of the other rows.

        Args:
            rows: dictionary of raw values by column, or a list of these; a data frame; or the path or URI of a log.
            batch_size: maximum number of rows per batch.

        Raises:
            ValueError, FileNotFoundError: the rows cannot be read; the message names column, row and value.
        """
        if hasattr(rows, "to_dict") and hasattr(rows, "to_frame"):  # a row of a pandas data frame
            rows = rows.to_dict()
        if isinstance(rows, Mapping):
            (scores,) = self.predict([rows])
            return scores if self.labels else float(scores)
        if isinstance(rows, list | tuple) and all(isinstance(row, Mapping) for row in rows):
            if rows and self.transforms:
                return self.predict(self._raw_table(rows), batch_size=batch_size)
            min_size = self._request_size if len(rows) < LARGE_BATCH else LARGE_BATCH
            batches = (self.encoder(rows[n : n + batch_size], n) for n in range(0, len(rows), batch_size))
            return self._scores(pad_batch(batch, min_size) for batch in batches).numpy()
        return np.concatenate([scores.numpy() for _, scores in self.score_log(rows, batch_size=batch_size)])

    def score_log(self, data: Any, names: Sequence[str] = (), batch_size: int = 8192) -> Iterator[tuple[Any, Tensor]]:
        """Iterate over blocks of a log in order; yield the `pyarrow` columns `names` and the scores of `predict`."""
        log = self.open_log(data, tuple(names))
        with closing(log.scan("test", lambda read: ([*map(read.column, names)], log.encode(read)))) as blocks:
            for block in blocks:
                if block.report.rows:
                    columns, rows = block.rows
                    yield columns, self._scores(map(pad_batch, self._batches(rows, batch_size)))

    def score(self, batch: Batch) -> Any:
        """Predict as `predict` does, for rows that `encoder` has encoded; NumPy float32, NaN if a logit is."""
        min_size = self._request_size if len(batch) < LARGE_BATCH else LARGE_BATCH
        return probabilities(self._logits([pad_batch(batch, min_size)])).numpy()

    def evaluate(self, data: Any = None, *, batch_size: int = 8192, group_by: str | None = None) -> Metrics:
        """Compute the metrics on rows with labels: a log or a data frame, by default the run's test rows; GAUC by the
        values of the sparse column `group_by`. Raise ValueError if the data of the run have changed."""
        rows: Data = self._test_rows() if data is None else self.open_log(data, labelled=True)
        check_group_by(group_by, rows.features)
        with rows.open("test", batch_size) as stream:
            batches = GroupRecorder(stream, group_by, getattr(rows, "has_weights", False))
            pair = predict_logits(self.model, map(pad_batch, batches), self.device, self._precision)
            metrics = label_metrics(*pair, self.labels, None, batches.groups, batches.weights)
            return replace(metrics, num_skipped=stream.report.skipped)

    @property
    def tables(self) -> dict[str, "RunTable"]:
        """Tables of the model by name, also of one that has been set, as by `run.model = te.quantize(run.model)`."""
        collections = [m for m in self.model.modules() if isinstance(m, TableCollection | QuantizedCollection)]
        return {config.name: RunTable(config, c, self.device) for c in collections for config in c.configs}

    def ids(self, feature: str, values: Sequence[Any]) -> Tensor:
        """Encode raw values of a feature as ids int64 `[N]`, for `tables[...].lookup`; unknown values as in training.
        Raise ValueError if the feature is unknown, or a value cannot be encoded."""
        return self.encoder.ids(feature, values)

    def open_log(self, data: Any, names: tuple[str, ...] = (), labelled: bool = False) -> ClickLog:
        """Open a log or a data frame, encoded as in training, with all rows as test rows; also read the columns
        `names`, and with `labelled` the label. Raise TypeError for other data, ValueError for another encoding."""
        if not (isinstance(data, str | Path) or hasattr(data, "__arrow_c_stream__")) or hasattr(data, "to_frame"):
            raise TypeError(
                "expected the path of a log, or a data frame (predict also takes a dictionary or a list of them), got "
                f"a {type(data).__name__}"
            )
        # Raise on bad rows: skipping one would shift the scores of all later rows.
        options = replace(self.log_options, on_bad_row="raise")
        log = open_for_scoring(data, options, self.features, names, labelled)
        log = log.read_as(self._kinds, self._encoding)
        self._check_encoding(log.encoding, log.name)
        if self._from_text and log.text_schema() is None:
            log.encode = partial(log.encode, from_text=True)
        return log

    def _raw_table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Return the columns of rows that the transforms read, as an Arrow table."""
        schema = self.encoder.schema
        columns = self.encoder.raw_rows(rows, names=Transforms(self.transforms).columns(schema)).columns
        kinds = dict.fromkeys(schema.dense, pa.float64())
        kinds |= {f.name: pa.int64() if f.kind == "integers" else pa.string() for f in self.features}
        kinds |= {f.name: pa.list_(kinds[f.name]) for f in self.features if f.multi_hot}
        empty_columns = {name for name, values in columns.items() if all(value is None for value in values)}
        try:
            arrays = {n: pa.array(v, kinds.get(n) if n in empty_columns else None) for n, v in columns.items()}
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise ValueError(f"Arrow cannot represent the values of the rows' columns ({error})") from error
        return pa.table(arrays)

    def _test_rows(self) -> Data:
        if (options := self.options) is None:
            raise ValueError(f"{self.path} has no data set (not written by `tritonemb train`): pass rows to evaluate()")
        # Other options have no effect on data sets that are not logs.
        read = LogOptions(Schema(labels=options.read.schema.labels)) if options.data in DATASETS else options.read
        rows: Data = open_dataset(options.data, options.path, log=read, seed=options.seed)
        if "data" in self.description and (changes := data_changes(self.path, self.description, rows)):
            raise ValueError(f"{changes}. Test rows may have been trained on; restore the data, or evaluate other rows")
        return rows.read_as(self._kinds, self._encoding) if isinstance(rows, ClickLog) else rows

    @property
    def log_options(self) -> LogOptions:
        """Options of reading the run's logs; ValueError if it was trained on encoded rows."""
        if self._log_options is None:
            text = "call run.model(dense, sparse), or evaluate() its test rows"
            raise ValueError(f"{self.path} was trained on encoded rows, so raw rows cannot be scored; {text}")
        return self._log_options

    def _check_encoding(self, encoding: str, name: str) -> None:
        if encoding != self._encoding:
            text = "columns have changed; restore the vocabulary file, and use a log with the columns of training"
            raise ValueError(f"{name} would be encoded differently than in training: the vocabulary file or {text}")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {type(self.model).__name__}, tables: {join_names(self.tables)})"

    @cached_property
    def encoder(self) -> RequestEncoder:
        """Encoder of raw rows, as in training; ValueError if the model was trained on encoded rows."""
        schema = self.schema or self.log_options.schema
        vocabulary = vocabulary_digest(schema)
        names = self.log_options.transforms
        digest = partial(encoding_digest, features=self.features, vocabulary=vocabulary, transforms=names)
        if schema.log_transform is None and digest(schema) != self._encoding:
            schema = replace(schema, log_transform=True, clamp_negative=True)  # defaults of old versions
        self._check_encoding(digest(schema), "a row")
        return RequestEncoder(schema, self.features, make_numberings(schema), self._from_text)

    @cached_property
    def _request_size(self) -> int:
        """Smallest batch size with logits bitwise identical to those of large batches; others are padded to it."""
        size, generator, columns = LARGE_BATCH, torch.Generator().manual_seed(0), list[Column]()
        label_shape = filter(None, [len(self.labels)])
        for feature in self.features:
            ids = torch.randint(feature.num_embeddings, (size,), generator=generator)
            columns.append(Column(ids, torch.arange(size + 1) if feature.multi_hot else None))
        dense = torch.randn(size, self._num_dense, generator=generator)
        rows = Rows(dense, tuple(columns), torch.zeros(size, *label_shape))
        expected = self._logits(self._batches(rows, size))
        sizes = (1 << power for power in range(BATCH_MULTIPLE.bit_length() - 1, size.bit_length() - 1))
        results = ((n, self._logits(self._batches(rows.slice(0, n), n))) for n in sizes)
        size = next((n for n, logits in results if torch.equal(logits, expected[:n])), size)
        for layers in (module for module in self.model.modules() if isinstance(module, MLP)):
            compute_runs_once(layers, size)
        return size

    def _batches(self, rows: Rows, batch_size: int) -> Iterator[Batch]:
        keys, size = tuple(feature.name for feature in self.features), len(rows)
        return (gather_batch(rows, keys, slice(i, min(i + batch_size, size))) for i in range(0, size, batch_size))

    def _scores(self, batches: Iterable[Batch]) -> Tensor:
        logits = self._logits(batches)
        if num_nan := int(logits.isnan().sum()):
            text = f"{self.path}: {num_nan:,} scores are NaN, because training diverged; use another checkpoint"
            raise ValueError(text)
        return probabilities(logits)

    def _logits(self, batches: Iterable[Batch]) -> Tensor:
        logits = predict_logits(self.model, batches, self.device, self._precision)[0]
        return logits.reshape(-1, len(self.labels)) if self.labels else logits  # also without batches


class RunTable(NamedTuple):
    """Table of a model, for lookups by id."""

    config: TableConfig
    collection: TableCollection | QuantizedCollection
    device: torch.device

    def __repr__(self) -> str:
        return f"RunTable({self.config})"

    @torch.no_grad()
    def lookup(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Look up the rows `[N, embedding_dim]` of ids; in a dynamic table, ids without a row have initial values.
        ValueError names an id that is out of range; TypeError for ids that are not integers."""
        ids = int64_ids(ids, self.device)
        keys, (feature, *_) = self.collection.feature_names, self.config.feature_names
        lengths = torch.zeros(len(keys), len(ids), dtype=torch.int64, device=self.device)
        lengths[keys.index(feature)] = 1
        result = self.collection(KeyedJaggedTensor(list(keys), ids, lengths=lengths))
        if isinstance(result, Tensor):
            names = [name for config in self.collection.configs for name in config.feature_names]
            return result.split(self.collection.embedding_dims, dim=1)[names.index(feature)]
        return result[feature].values()


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options):
    """Run that a command loads."""

    POSITIONAL: ClassVar[str] = "checkpoint"
    checkpoint: Path
    model: str | None = None
    batch_size: int = number(8192, least=1)
    device: str = "cpu"
    transforms: tuple[str, ...] = ()

    def load(self) -> Run:
        """Load the run, with the model of MODULE:FUNCTION if given; raise ValueError if it cannot be imported."""
        factory = None if self.model is None else import_factory(self.model)
        return load_run(self.checkpoint, model=factory, device=self.device, transforms=self.transforms)
