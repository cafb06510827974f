import math
import re

import pytest

from tests.data.logs import line, options, rows_of, write
from tritonemb.data import NAMES, ClickLog, LogOptions, SplitRule, kind_of, open_dataset, open_for_scoring

GOOD = line()


@pytest.mark.parametrize("name", ["train.txt", "day_0.gz", "day_0.zst"])
def test_values_are_read_and_transformed(tmp_path, name):
    lines = [
        line("1", {1: "", 2: "-2", 3: "99", 4: "123456789012345678"}, {1: "68fd1e64", 2: ""}),
        line("0", {1: "3"}, {1: "68FD1E64", 2: "7"}),
        line("0", categories={1: "ffffffff", 2: "00000007"}),
        line("1", categories={1: "12345678", 2: "00000007"}),
    ]
    log = ClickLog(write(tmp_path, lines, name), options())
    assert log.num_dense == 13
    rows = rows_of(log)
    assert [row[0] for row in rows] == [1, 0, 0, 1]
    assert rows[0][1:6] == pytest.approx([0.0, 0.0, math.log(100), math.log(123456789012345679), math.log(2)])
    assert rows[1][1] == pytest.approx(math.log(4))
    first, second = ([row[14 + i] for row in rows] for i in range(2))
    assert first[0] == first[1]  # upper and lower case are one category
    assert len(set(first)) == 3
    assert second[0] == 0  # missing
    assert second[1] == second[2] == second[3] != 0  # leading zeros do not matter
    assert all(0 < id < 100_000 for id in first)


def test_numbers_without_logarithm(tmp_path):
    path = write(tmp_path, [line(integers={1: "-2", 2: "", 3: "7", 4: "6"})])
    assert rows_of(ClickLog(path, options(log_transform=False)))[0][1:5] == (-2, 0, 7, 6)
    chosen = rows_of(ClickLog(path, options(log_transform=("int_4",))))[0][1:5]
    assert chosen == pytest.approx((-2, 0, 7, math.log(7)))


def test_large_and_small_numbers_have_the_logarithm_that_numpy_gives(tmp_path):
    numbers = [*range(4090, 4100), *range(16_380, 16_390), 10**17, 0]
    rows = rows_of(ClickLog(write(tmp_path, [line(integers={1: str(n)}) for n in numbers]), options()))
    assert [row[1] for row in rows] == pytest.approx([math.log1p(n) for n in numbers], rel=1e-7)


def test_some_of_the_columns(tmp_path):
    path = write(tmp_path, [line(integers={3: "5", 9: "8"}, categories={7: "beef"})])
    log = ClickLog(path, options(label="label", dense=("int_9", "int_3"), sparse=("cat_7", "int_4")))
    assert [feature.name for feature in log.features] == ["cat_7", "int_4"]
    (row,) = rows_of(log)
    assert row[1:3] == pytest.approx((math.log(9), math.log(6)))


def test_sizes_of_features(tmp_path):
    lines = [line(categories={1: f"{i:x}", 2: f"{i:x}"}) for i in range(500)]
    log = ClickLog(write(tmp_path, lines), options(num_embeddings=50, sizes=("cat_2=3",)))
    assert [feature.num_embeddings for feature in log.features[:3]] == [50, 3, 50]
    rows = rows_of(log)
    assert {row[14] for row in rows} == set(range(1, 50))
    assert {row[15] for row in rows} == {1, 2}


def test_the_last_sixth_is_held_out_by_default(tmp_path):
    lines = [line(str(i % 2), {1: f"{i:02}"}) for i in range(12)]
    log = ClickLog(write(tmp_path, lines), LogOptions())
    assert len(rows_of(log)) == 10
    assert [row[1] for row in rows_of(log, "test")] == pytest.approx([math.log(11), math.log(12)])
    assert log.splits() == ("train", "test")


def test_ends_of_lines(tmp_path):
    """Carriage returns before line feeds, empty lines and a last line without an end."""
    text = f"{line('1')}\r\n\r\n{line('0')}\n\n\n{line('1')}"
    (tmp_path / "log").write_bytes(text.encode())
    log = ClickLog(tmp_path / "log", options())
    assert [row[0] for row in rows_of(log)] == [1, 0, 1]
    (tmp_path / "log").write_bytes(f"{line('1')}\r\n{line('0')}\r".encode())
    assert [row[0] for row in rows_of(ClickLog(tmp_path / "log", options()))] == [1, 0]


BAD = [
    (line("2"), "field 1 (label) is '2', expected 0 or 1"),
    (line(""), "field 1 (label) is '', expected 0 or 1"),
    (line("1.0"), "field 1 (label) is '1.0', expected 0 or 1"),
    *((line(label), f"field 1 (label) is '{label}', expected 0 or 1") for label in ("01", "00", "-0", "-1", "-")),
    (line(integers={3: "1.5"}), "field 4 (int_3) is '1.5', expected an integer or nothing"),
    (line(integers={3: "-"}), "field 4 (int_3) is '-', expected an integer or nothing"),
    (line(integers={3: "+1"}), "field 4 (int_3) is '+1', expected an integer or nothing"),
    (line(integers={3: " 1"}), "field 4 (int_3) is ' 1', expected an integer or nothing"),
    (line(integers={3: "1 "}), "field 4 (int_3) is '1 ', expected an integer or nothing"),
    (line(integers={3: "0x12"}), "field 4 (int_3) is '0x12', expected an integer or nothing"),
    (line(integers={3: "--1"}), "field 4 (int_3) is '--1', expected an integer or nothing"),
    (line(integers={3: "nan"}), "field 4 (int_3) is 'nan', expected an integer or nothing"),
    (line(integers={13: "1" * 19}), f"field 14 (int_13) is '{'1' * 19}', expected an integer or nothing"),
    (line(integers={3: "1" * 99}), f"field 4 (int_3) is '{'1' * 37}...', expected an integer or nothing"),
    (line(integers={3: "١"}), "field 4 (int_3) is '١', expected an integer or nothing"),  # noqa: RUF001
    (line(categories={2: "xyz"}), "field 16 (cat_2) is 'xyz', expected up to 8 hexadecimal digits or nothing"),
    (line(categories={2: "g"}), "field 16 (cat_2) is 'g', expected up to 8 hexadecimal digits or nothing"),
    (line(categories={2: "a\0"}), "field 16 (cat_2) is 'a\\x00', expected up to 8 hexadecimal digits or nothing"
     "; this does not look like text in ASCII or UTF-8, more like UTF-16 or a binary file"),
    (line(categories={26: "012345678"}), "field 40 (cat_26) is '012345678', expected up to 8 hexadecimal digits"),
    (line(categories={4: "12 45678"}), "field 18 (cat_4) is '12 45678', expected up to 8 hexadecimal digits"),
    (line(categories={26: "a\ra"}), "field 40 (cat_26) is 'a\\ra', expected up to 8 hexadecimal digits"),
    (line() + "\t1", "expected 40 tab-separated fields, found 41"),
    (line().partition("\t")[2], "expected 40 tab-separated fields, found 39 (Criteo's test.txt has no labels; use"),
    (" ", "expected 40 tab-separated fields, found 1"),
    ("\t" * 39, "field 1 (label) is '', expected 0 or 1"),
    (line()[:100], "expected 40 tab-separated fields, found 2"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_or_skipped_alone(tmp_path, bad, message):
    for name in ("train.txt", "train.txt.gz"):
        path = write(tmp_path, [line("1"), bad, line("0"), bad, bad, line("1")], name)
        with pytest.raises(ValueError, match="line 2") as caught:
            rows_of(ClickLog(path, options()))
        assert f"{path}, line 2: {message}" in str(caught.value)
    log = ClickLog(path, options(on_bad_row="skip"))
    with log.open("train", 2) as stream:
        labels = [label for batch in stream for label in batch.labels.tolist()]
        report = stream.report
    assert labels == [1, 0, 1]
    assert (report.rows, report.skipped) == (3, 3)
    assert len(report.problems) == 3
    assert f"{path}, line 2: {message}" in report.problems[0]
    assert [count for _, count in report.reasons] == [3]


@pytest.mark.parametrize("labels", [("1", "0"), ("-1", ""), None])
def test_rows_to_score_need_no_labels(tmp_path, labels):
    lines = [line(label or "0", {1: label or "1"}) for label in labels or ("1", "0")]
    lines = lines if labels else [entry.partition("\t")[2] for entry in lines]
    log = ClickLog(write(tmp_path, [GOOD]), options(log_transform=False))
    scored = open_for_scoring(write(tmp_path, ["", *lines], "test.txt"), log.options, log.features)
    assert [row[:2] for row in rows_of(scored, "test")] == [(0, float(label or 1)) for label in labels or ("1", "0")]
    with pytest.raises(ValueError, match=r"field 1 \(label\) is 'x', expected an integer or nothing"):
        open_for_scoring(write(tmp_path, [line("x")], "test.txt"), log.options, log.features)


def test_a_bad_first_line_is_named_before_anything_is_read(tmp_path):
    path = write(tmp_path, ["", line("label"), GOOD, GOOD])
    with pytest.raises(ValueError, match=r"line 2: field 1 \(label\) is 'label', expected 0 or 1"):
        ClickLog(path, options())
    assert len(rows_of(ClickLog(path, options(on_bad_row="skip")))) == 2


def test_many_bad_rows_are_counted_and_the_first_ten_told(tmp_path):
    lines = [GOOD, *[line("x")] * 30, *[line(integers={1: "y"})] * 5]
    log = ClickLog(write(tmp_path, lines), options(on_bad_row="skip", chunk_bytes=500))
    with log.open("train", 8) as stream:
        assert sum(map(len, stream)) == 1
        report = stream.report
    assert report.skipped == 35
    assert len(report.problems) == 10
    assert [(reason.rpartition(": ")[2], count) for reason, count in report.reasons] == [
        ("field 1 (label) is not 0 or 1", 30),
        ("field 2 (int_1) is not an integer or nothing", 5),
    ]


def test_another_encoding_is_recognised(tmp_path):
    path = tmp_path / "log.txt"
    path.write_bytes(f"{GOOD}\n{GOOD}\n".encode("utf-16"))
    with pytest.raises(
        ValueError, match="does not look like text in ASCII or UTF-8: it begins with a UTF-16 byte order mark"
    ):
        ClickLog(path, options())
    path.write_bytes(f"{GOOD}\n{GOOD}\n".encode("utf-16-le"))
    with pytest.raises(ValueError, match=r"line 1: .*this does not look like text in ASCII or UTF-8"):
        ClickLog(path, options())
    path.write_bytes(f"{GOOD}\n{GOOD}\n".encode("utf-8-sig"))
    with pytest.raises(ValueError, match=r"line 1: field 1 \(label\) is .*begins with a UTF-8 byte order mark: remove"):
        ClickLog(path, options())


def test_a_line_without_end_is_bad_and_needs_no_memory(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(f"{line('1')}\n".encode() + b"1\t" * 1_000_000 + f"\n{line('1')}\n".encode())
    with pytest.raises(ValueError, match="line 2: expected 40 tab-separated fields"):
        rows_of(ClickLog(path, options(chunk_bytes=1000)))
    for chunk_bytes in (1000, 1 << 23):
        assert len(rows_of(ClickLog(path, options(chunk_bytes=chunk_bytes, on_bad_row="skip")))) == 2


@pytest.mark.parametrize(("name", "what"), [("train.txt.gz", "gzip"), ("train.txt.zst", "zstd")])
@pytest.mark.parametrize("on_bad_row", ["raise", "skip"])
def test_a_cut_off_compressed_file_is_refused(tmp_path, name, what, on_bad_row):
    path = write(tmp_path, [line(categories={1: f"{i:x}"}) for i in range(2000)], name)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=rf"{name} is not a complete {what} file"):
        rows_of(ClickLog(path, options(on_bad_row=on_bad_row)))
    with pytest.raises(ValueError, match=rf"{name} is not a complete {what} file"):  # while its size is found out
        ClickLog(path, options(SplitRule(), on_bad_row=on_bad_row))


def test_a_damaged_gzip_file_is_refused(tmp_path):
    path = write(tmp_path, [line(categories={1: f"{i:x}"}) for i in range(2000)], "train.txt.gz")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"train.txt.gz is not a complete gzip file"):
        rows_of(ClickLog(path, options(on_bad_row="skip")))


def test_a_schema_of_other_columns_is_refused(tmp_path):
    path = write(tmp_path, [GOOD])
    with pytest.raises(
        ValueError, match=r"without a header, text files have Criteo's format, whose label is 'label' and not"
    ):
        ClickLog(path, options(label="click", sparse=("cat_1",)))
    with pytest.raises(ValueError, match="the schema's sparse column 'user' is missing; columns: label, int_1"):
        ClickLog(path, options(label="label", sparse=("user",)))
    with pytest.raises(ValueError, match=r"'cat_1' of Criteo's TSV cannot be dense: it is a category"):
        ClickLog(path, options(label="label", dense=("cat_1",), sparse=("cat_2",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_embeddings": 1}, "num_embeddings is 1, expected 2 to 2147483648: id 0 is for missing values"),
        ({"sizes": ("cat_1",)}, "sizes has 'cat_1', expected \"name=number\""),
        ({"sizes": ("cat_1=0",)}, "the size of 'cat_1' is 0"),
        ({"sizes": ("a=3",), "label": "label", "sparse": ("b",)}, "sizes has 'a=3', but sparse has no 'a': b"),
        ({"sizes": ("a=3", "a=4")}, "sizes names 'a' twice"),
        ({"sparse": ("a",)}, "dense or sparse columns are named, but no label column"),
        ({"label": "a"}, "no sparse columns are named"),
        ({"label": "a", "sparse": ("a",)}, "a named more than once among label, weight, dense and sparse"),
        (
            {"label": "a", "dense": ("b",), "sparse": ("c",), "log_transform": ("x",)},
            "log_transform names x, not among dense: b",
        ),
        ({"shuffle_rows": -1}, "shuffle_rows must not be negative, got -1"),
        ({"on_bad_row": "ignore"}, "on_bad_row must be one of ('raise', 'skip'), got 'ignore'"),
        ({"parser_threads": 0}, "parser_threads must be at least 1, got 0"),
        ({"chunk_bytes": 0}, "chunk_bytes must be from 1 to 268435456, got 0"),
    ],
)
def test_options_are_checked(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        options(**changes)


def test_open_dataset_takes_a_path_or_a_name(tmp_path):
    path = write(tmp_path, [GOOD] * 8)
    log = options(SplitRule(test_share=0.25))
    for opened in (open_dataset(str(path), log=log), open_dataset("criteo", path, log=log)):
        assert isinstance(opened, ClickLog)
        assert len(rows_of(opened, "test")) == 2
    assert open_dataset("criteo-kaggle", path, log=log).name == "criteo-kaggle"
    with pytest.raises(ValueError, match="'criteo' needs a path: the file to read"):
        open_dataset("criteo")
    with pytest.raises(ValueError, match="'criteo-terabyte' needs a path: the folder to read"):
        open_dataset("criteo-terabyte")
    with pytest.raises(ValueError, match="'synthetic' does not take a path"):
        open_dataset("synthetic", path)
    with pytest.raises(
        FileNotFoundError, match=r"'movielens' is neither a file or folder nor one of .*'movielens-100k'"
    ):
        open_dataset("movielens")
    with pytest.raises(ValueError, match=r"not one of .* but a path; remove the second path"):
        open_dataset(str(path), path)
    assert {kind_of(name) for name in NAMES} == set(NAMES)
    assert kind_of("criteo") == kind_of(str(path)) == "criteo-kaggle"
