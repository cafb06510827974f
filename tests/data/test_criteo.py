import gzip
import math

import pytest
import torch

pytest.importorskip("pyarrow")

from tritonemb.data import CriteoOptions, load_criteo, open_dataset

ALL = CriteoOptions(test_fraction=0.25, min_count=1)


def line(label: str = "0", integers: dict[int, str] | None = None, categories: dict[int, str] | None = None) -> str:
    numbers = [(integers or {}).get(i, "1") for i in range(1, 14)]
    return "\t".join([label, *numbers, *[(categories or {}).get(i, "0000abcd") for i in range(1, 27)]])


def write(tmp_path, lines: list[str], name: str = "train.txt"):
    path, text = tmp_path / name, "".join(f"{entry}\n" for entry in lines)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["train.txt", "day_0.gz"])
def test_values_are_read_and_transformed(tmp_path, name):
    lines = [
        line("1", {1: "", 2: "-2", 3: "99"}, {1: "68fd1e64", 2: ""}),
        line("0", {1: "3"}, {1: "68FD1E64", 2: "7"}),
        line("0", categories={1: "ffffffff", 2: "00000007"}),
        line("1", categories={1: "12345678", 2: "00000007"}),
    ]
    data = load_criteo(write(tmp_path, lines, name), ALL)
    assert data.train.labels.tolist() == [1, 0, 0]
    assert data.test.labels.tolist() == [1]
    assert data.num_dense == 13
    assert data.train.dense.dtype == torch.float32
    assert data.train.dense[0, :4].tolist() == pytest.approx([0.0, 0.0, math.log(100), math.log(2)])
    assert data.train.dense[1, 0].item() == pytest.approx(math.log(4))
    assert data.train.columns[0].values.tolist() == [1, 1, 2]  # upper and lower case are one category
    assert data.test.columns[0].values.tolist() == [0]  # unseen in training
    assert data.train.columns[1].values.tolist() == [0, 1, 1]  # leading zeros do not matter
    assert [feature.num_embeddings for feature in data.features[:3]] == [3, 2, 2]


def test_the_last_sixth_is_held_out_by_default(tmp_path):
    lines = [line(str(i % 2), {1: str(i)}) for i in range(12)]
    data = load_criteo(write(tmp_path, lines))
    assert (len(data.train), len(data.test)) == (10, 2)
    assert data.test.dense[:, 0].tolist() == pytest.approx([math.log(11), math.log(12)])


def test_rare_categories_are_counted_on_training_rows(tmp_path):
    lines = [line(categories={1: "a"}), line(categories={1: "a"}), line(categories={1: "b"}), line(categories={1: "b"})]
    data = load_criteo(write(tmp_path, lines), CriteoOptions(test_fraction=0.25, min_count=2))
    assert data.train.columns[0].values.tolist() == [1, 1, 0]
    assert data.test.columns[0].values.tolist() == [0]


def test_many_blocks_give_one_vocabulary(tmp_path):
    """More than one 16 MiB block: ids must agree over all of them."""
    distinct = [line(str(i % 2), {1: str(i)}, {1: f"{i:08x}"}) for i in range(7)]
    lines = distinct * 10_000
    data = load_criteo(write(tmp_path, lines), ALL)
    ids = torch.cat([data.train.columns[0].values, data.test.columns[0].values])
    assert torch.equal(ids, ids[:7].repeat(10_000))
    assert sorted(ids[:7].tolist()) == [1, 2, 3, 4, 5, 6, 7]


GOOD = line()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line("2"), r"line 3: field 1 \(label\) is '2', expected 0 or 1"),
        (line(""), r"line 3: field 1 \(label\) is ''"),
        (line(integers={3: "1.5"}), r"line 3: field 4 \(int_3\) is '1.5', expected an integer"),
        (line(categories={2: "xyz"}), r"line 3: field 16 \(cat_2\) is 'xyz', expected up to 8 hexadecimal digits"),
        (line(categories={26: "0123456789"}), r"line 3: field 40 \(cat_26\) is '0123456789'"),
        (line(categories={4: "12 45678"}), r"line 3: field 18 \(cat_4\) is '12 45678'"),
        (line() + "\t1", "line 3: expected 40 tab-separated fields, found 41"),
        (line().partition("\t")[2], "line 3: .*found 39 .*test.txt has no labels"),
    ],
)
@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_a_bad_line_is_named(tmp_path, name, bad, message):
    with pytest.raises(ValueError, match=rf"{name}, {message}"):
        load_criteo(write(tmp_path, [GOOD, GOOD, bad, GOOD], name), ALL)


def test_a_bad_first_line_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"line 1: field 1 \(label\) is 'label'"):
        load_criteo(write(tmp_path, [line("label"), GOOD, GOOD]), ALL)


def test_an_empty_file_and_too_few_rows(tmp_path):
    with pytest.raises(ValueError, match="is empty"):
        load_criteo(write(tmp_path, []))
    with pytest.raises(ValueError, match="1 rows are too few"):
        load_criteo(write(tmp_path, [GOOD]))


def test_a_cut_off_gzip_file_is_refused(tmp_path):
    path = write(tmp_path, [GOOD] * 2000, "train.txt.gz")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"train.txt.gz is not a whole gzip file"):
        load_criteo(path, ALL)


def test_options_are_checked():
    with pytest.raises(ValueError, match="test_fraction must lie between 0 and 1, got 1"):
        CriteoOptions(test_fraction=1)
    with pytest.raises(ValueError, match="min_count must be at least 1, got 0"):
        CriteoOptions(min_count=0)


def test_open_dataset_takes_a_path_or_a_name(tmp_path):
    path = write(tmp_path, [GOOD] * 8)
    assert len(open_dataset(str(path), criteo=ALL).test) == 2
    assert len(open_dataset("criteo", path, criteo=ALL).test) == 2
    with pytest.raises(ValueError, match="'criteo' needs a path"):
        open_dataset("criteo")
    with pytest.raises(ValueError, match="'synthetic' takes no path"):
        open_dataset("synthetic", path)
    with pytest.raises(FileNotFoundError, match=r"'movielens' is neither a file nor one of .*'movielens-100k'"):
        open_dataset("movielens")
    with pytest.raises(ValueError, match=r"not one of .* but a path; a second one"):
        open_dataset(str(path), path)
