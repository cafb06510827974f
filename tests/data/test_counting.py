import shutil
from collections import Counter

import numpy as np
import pytest

from tests.data.logs import line, options, pa, parquet, random_lines, rows_of, write
from tritonemb.data import ClickLog, Schema, SplitRule, build_vocabulary, convert, encode, load_vocabulary

SCHEMA = {"label": "click", "dense": (), "sparse": ("user", "item", "tags")}
TABLE = {
    "click": [0, 1, 0, 1, 0, 1],
    "user": ["ann", "bob", "bob", None, "é", "new"],
    "item": [7, -3, 7, -3, 7, 99],
    "tags": [["x", "y"], [], ["y"], None, ["y", None], ["z"]],
}


def write_parquet(folder, table=TABLE):
    parquet.write_table(pa.table(table), folder / "log.parquet")
    return folder / "log.parquet"


def lists(log, split):
    batch = next(log.open(split, 100))
    return batch.sparse.to_lists()


@pytest.mark.parametrize("kind", ["log.txt", "log.gz", "log.parquet"])
def test_ids_follow_train_counts_then_values(tmp_path, kind):
    values = ["b"] * 3 + ["a", "1f", ""] + ["a"] + ["c"] + ["b", "d", "a", ""]
    path = write(tmp_path, [line(categories={1: value}) for value in values], kind.replace("parquet", "txt"))
    if kind == "log.parquet":
        convert(path, tmp_path / kind)
        path = tmp_path / kind
    split = SplitRule(test_share=1 / 3)
    target = tmp_path / "vocabulary.parquet"
    rows: list[int] = []
    report = build_vocabulary(ClickLog(path, options(split)), target, progress=rows.append)
    assert (report.rows, report.skipped, report.forgotten) == (8, 0, {})
    assert rows[-1] == 8
    assert report.num_embeddings["cat_1"] == 5
    assert report.num_embeddings["cat_2"] == 2
    log = ClickLog(path, options(split, vocabulary=target))
    assert [feature.num_embeddings for feature in log.features[:2]] == [5, 2]
    # b has 3 train rows, a 2, 0xc and 0x1f 1 each
    assert [row[14] for row in rows_of(log)] == [1, 1, 1, 2, 4, 0, 2, 3]
    assert [row[14] for row in rows_of(log, "test")] == [1, 0, 2, 0]
    stored = parquet.read_table(target).filter(pa.compute.field("feature") == "cat_1").to_pydict()
    assert stored["value"] == ["11", "10", "12", "31"]
    assert stored["id"] == [1, 2, 3, 4]
    assert stored["count"] == [3, 2, 1, 1]


def test_rare_values_and_large_vocabularies_are_cut(tmp_path):
    values = "aaaabbbcc" + "def"
    path = write(tmp_path, [line(categories={1: value}) for value in values])
    target = tmp_path / "vocabulary.parquet"
    for kwargs, expected in (
        ({"min_count": 2}, [1, 1, 1, 1, 2, 2, 2, 3, 3, 0, 0, 0]),
        ({"max_size": 2}, [1, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0]),
        ({"min_count": 9}, [0] * 12),
    ):
        build_vocabulary(ClickLog(path, options()), target, **kwargs)
        log = ClickLog(path, options(vocabulary=target))
        assert [row[14] for row in rows_of(log)] == expected
        assert log.features[0].num_embeddings == max(2, max(expected) + 1)


def test_strings_integers_and_lists(tmp_path):
    path, target = write_parquet(tmp_path), tmp_path / "vocabulary.parquet"
    split = SplitRule(test_share=1 / 6)
    report = build_vocabulary(ClickLog(path, options(split, **SCHEMA)), target)
    assert report.num_embeddings == {"user": 4, "item": 3, "tags": 3}
    log = ClickLog(path, options(split, **SCHEMA, vocabulary=target))
    assert lists(log, "train") == {
        "user": [[2], [1], [1], [0], [3]],
        "item": [[1], [2], [1], [2], [1]],
        "tags": [[2, 1], [], [1], [], [1, 0]],
    }
    assert lists(log, "test") == {"user": [[0]], "item": [[0]], "tags": [[0]]}


def test_many_values_over_many_chunks(tmp_path):
    users = [f"user {i % 97} {i % 3}" for i in range(2000)]
    table = {"click": [0, 1] * 1000, "user": users, "item": [i % 13 for i in range(2000)], "tags": [["t"]] * 2000}
    path, target = write_parquet(tmp_path, table), tmp_path / "vocabulary.parquet"
    build_vocabulary(ClickLog(path, options(**SCHEMA, chunk_bytes=256 * 61)), target)
    order = sorted(Counter(users).items(), key=lambda entry: (-entry[1], entry[0]))
    ids = {value: id for id, (value, _) in enumerate(order, start=1)}
    log = ClickLog(path, options(**SCHEMA, vocabulary=target, chunk_bytes=256 * 100))
    results = [bag[0] for batch in log.open("train", 128) for bag in batch.sparse.to_lists()["user"]]
    assert results == [ids[user] for user in users]


def test_memory_is_bounded_and_frequent_values_are_kept(tmp_path):
    """Every other row has one of five values, the others are all different: only 50 can be counted at a time."""
    values = [f"{i % 5 if i % 2 else 1000 + i:x}" for i in range(1500)]
    path, target = write(tmp_path, [line(categories={1: value}) for value in values]), tmp_path / "vocabulary.parquet"
    log = ClickLog(path, options(chunk_bytes=4000))
    report = build_vocabulary(log, target, max_size=5, capacity=50)
    assert report.forgotten["cat_1"] > 0
    result = load_vocabulary(target)["cat_1"]
    assert result.num_embeddings == 6
    stored = parquet.read_table(target).filter(pa.compute.field("feature") == "cat_1").to_pydict()
    assert sorted(stored["value"]) == ["0", "1", "2", "3", "4"]
    assert all(150 - report.forgotten["cat_1"] <= count <= 150 for count in stored["count"])


def test_the_encoding_of_a_log_is_that_of_its_vocabulary(tmp_path):
    """Two vocabularies of the same sizes, with the ids of two values exchanged."""
    paths = {
        name: write(tmp_path, [line(categories={1: value}) for value in name], f"{name}.txt") for name in ("aab", "abb")
    }
    for name, path in paths.items():
        build_vocabulary(ClickLog(path, options()), tmp_path / name)
    shutil.copy(tmp_path / "aab", tmp_path / "copy")

    def encoding(log: str, vocabulary: str) -> str:
        return ClickLog(paths[log], options(vocabulary=tmp_path / vocabulary)).encoding

    assert encoding("aab", "aab") == encoding("abb", "aab") == encoding("aab", "copy")
    assert encoding("aab", "aab") != encoding("aab", "abb")


def test_bad_rows_are_not_counted(tmp_path):
    path, target = tmp_path / "train.txt", tmp_path / "vocabulary.parquet"
    write(tmp_path, [line(categories={1: "a"}), line("x", categories={1: "b"}), line(categories={1: "b", 2: "z"})])
    report = build_vocabulary(ClickLog(path, options(on_bad_row="skip")), target)
    assert (report.rows, report.skipped, report.num_embeddings["cat_1"]) == (1, 2, 2)
    target.unlink()
    with pytest.raises(ValueError, match="line 2: field 1"):
        build_vocabulary(ClickLog(path, options()), target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.txt"]  # nothing half-written


def test_mistakes_are_named(tmp_path):
    path, target = write_parquet(tmp_path), tmp_path / "vocabulary.parquet"
    log = ClickLog(path, options(**SCHEMA))
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder to write v to"):
        build_vocabulary(log, tmp_path / "nowhere" / "v")
    with pytest.raises(ValueError, match="min_count must be at least 1, got 0"):
        build_vocabulary(log, target, min_count=0)
    with pytest.raises(
        FileNotFoundError, match=r"vocabulary.parquet: no such vocabulary; build it with `tritonemb vocab`"
    ):
        ClickLog(path, options(**SCHEMA, vocabulary=target))
    for content in (b"text", path.read_bytes()):
        target.write_bytes(content)
        with pytest.raises(ValueError, match=r"vocabulary.parquet is not a vocabulary of `tritonemb vocab`"):
            ClickLog(path, options(**SCHEMA, vocabulary=target))
    build_vocabulary(log, target)
    with pytest.raises(ValueError, match="has no feature 'click', only user, item, tags"):
        ClickLog(path, options(label="item", sparse=("user", "click"), vocabulary=target))
    with pytest.raises(ValueError, match="sizes are for hashed categories; the vocabulary determines its sizes"):
        ClickLog(path, options(**SCHEMA, vocabulary=target, sizes=("user=3",)))
    other = write_parquet(tmp_path, TABLE | {"user": [1, 2, 3, 4, 5, 6]})
    with pytest.raises(ValueError, match="feature 'user' has integers, the vocabulary strings; build it from this log"):
        lists(ClickLog(other, options(**SCHEMA, vocabulary=target)), "train")
    assert Schema(**SCHEMA).vocabulary is None


def test_the_encoding_follows_what_makes_numbers_of_a_row(tmp_path):
    path = write(tmp_path, random_lines(40))
    vocabularies = [tmp_path / "a.parquet", tmp_path / "b.parquet", tmp_path / "c.parquet"]
    for vocabulary, min_count in zip(vocabularies, (1, 1, 2), strict=True):
        build_vocabulary(ClickLog(path, options()), vocabulary, min_count=min_count)

    def encoding(file=path, **kwargs):
        return ClickLog(file, options(**kwargs)).encoding

    other = write(tmp_path, random_lines(50, seed=1), "other.txt")
    assert (
        encoding()
        == encoding(other)
        == encoding(split=SplitRule(), on_bad_row="skip", shuffle_rows=5, parser_threads=1)
    )
    assert encoding() == encoding(sizes=("cat_1=100000",))
    assert encoding(vocabulary=vocabularies[0]) == encoding(other, vocabulary=vocabularies[1])
    columns = {"label": "label", "dense": ("int_1", "int_2"), "sparse": ("cat_1", "cat_2")}
    changes = (
        {},
        {"log_transform": False},
        {"log_transform": ("int_1",)},
        {"num_embeddings": 1000},
        {"sizes": ("cat_1=1000",)},
        {"vocabulary": vocabularies[0]},
        {"vocabulary": vocabularies[2]},
        columns,
        columns | {"dense": ("int_2", "int_1")},
        columns | {"sparse": ("cat_2", "cat_1")},
    )
    assert len({encoding(**change) for change in changes}) == len(changes)


def test_values_of_equal_hash_are_told_apart_by_their_strings(monkeypatch):
    monkeypatch.setattr(encode, "hash_strings", lambda data, offsets, seed: np.zeros(len(offsets) - 1, dtype=np.uint64))
    numbering = encode.Numbering("item", 2, pa.array(["seen"]), np.array([1]))
    assert numbering.ids(pa.array(["seen", "unseen", None])).tolist() == [1, 0, 0]
