import itertools
import math
import os
import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.logs import line, options, pa, parquet, random_lines, resumes, rows_of, write
from tritonemb.data import ClickLog, SplitRule, convert, open_for_scoring
from tritonemb.data.text import TextSource


def numbered(num_rows: int, first: int = 0) -> list[str]:
    """Lines whose int_1 is their number, of different lengths."""
    return [line(integers={1: str(number)}) for number in range(first, first + num_rows)]


def numbers(log: ClickLog, split) -> list[int]:
    return [round(row[1]) for row in rows_of(log, split)] if split in log.splits() else []


def reader(source, rule: SplitRule, **changes) -> ClickLog:
    return ClickLog(source, options(rule, log_transform=False, **changes))


@given(
    st.integers(20, 60),
    st.integers(1, 3),
    st.sampled_from(("", ".gz", ".parquet")),
    st.sampled_from(("end", "random")),
    st.sampled_from(((1 / 6, 0.0), (0.2, 0.2), (0.0, 0.3), (0.5, 0.0), (0.0, 0.0))),
    st.integers(100, 5000),
)
def test_splits_are_disjoint_and_complete(tmp_path_factory, num_rows, num_files, kind, by, shares, chunk_bytes):
    folder = tmp_path_factory.mktemp("log")
    (folder / "text").mkdir()
    for number in range(num_files):
        name = f"part_{number}.txt{kind if kind == '.gz' else ''}"
        write(folder / "text", numbered(num_rows, number * num_rows), name)
    source = folder / "text"
    if kind == ".parquet":
        convert(source, folder / "parquet", row_group_rows=17)
        source = folder / "parquet"
    test, validation = shares
    log = reader(source, SplitRule(by, test, validation), chunk_bytes=chunk_bytes)
    actual = {split: numbers(log, split) for split in ("train", "validation", "test")}
    assert sorted(itertools.chain(*actual.values())) == list(range(num_rows * num_files))
    assert (bool(actual["test"]), bool(actual["validation"])) == (test > 0, validation > 0) or by == "random"
    assert all(rows == sorted(rows) for rows in actual.values())
    if by == "end":
        assert [*actual["train"], *actual["validation"], *actual["test"]] == list(range(num_rows * num_files))
        expected = test * num_rows * num_files
        assert abs(len(actual["test"]) - expected) <= (0.5 if kind == ".parquet" else 2 + 0.02 * expected)


def test_parquet_is_cut_by_rows_exactly_and_knows_their_number(tmp_path):
    convert(write(tmp_path, numbered(60)), tmp_path / "log.parquet", row_group_rows=7)
    log = reader(tmp_path / "log.parquet", SplitRule(test_share=0.25, validation_share=0.1))
    assert [log.num_rows(split) for split in ("train", "validation", "test")] == [39, 6, 15]
    assert numbers(log, "validation") == list(range(39, 45))


@given(st.integers(0, 1999))
def test_a_cut_at_any_byte_falls_between_lines(tmp_path_factory, byte):
    folder = tmp_path_factory.mktemp("log")
    lines = numbered(12)
    path = write(folder, lines)
    size = path.stat().st_size
    byte = min(max(byte, 1), size - 1)
    log = reader(path, SplitRule(test_share=1 - byte / size), chunk_bytes=50)
    starts = list(itertools.accumulate((len(entry) + 1 for entry in lines), initial=0))[:-1]
    cut = size - round(size * (1 - byte / size))
    expected = sum(start < cut for start in starts)
    if expected == len(lines):
        with pytest.raises(ValueError, match="there are no test rows"):
            numbers(log, "test")
    else:
        assert numbers(log, "test") == list(range(expected, 12))
    assert numbers(log, "train") == list(range(expected))


@pytest.mark.more
def test_random_rows_do_not_depend_on_chunks_or_splits_of_bad_rows(tmp_path):
    lines = [*numbered(400), "bad"]
    path = write(tmp_path, lines)
    rule = SplitRule("random", 0.25, 0.25)
    results = [
        {split: numbers(reader(path, rule, chunk_bytes=size, on_bad_row="skip"), split) for split in ("train", "test")}
        for size in (300, 100_000)
    ]
    assert results[0] == results[1]
    assert 60 < len(results[0]["test"]) < 140
    for split, low, high in (("train", 0.0, 0.5), ("test", 0.75, 1.0)):
        assert results[0][split] == [row for row in range(400) if low <= place_of(row) < high]
    skipped = 0
    for split in ("train", "validation", "test"):
        with reader(path, rule, on_bad_row="skip").open(split, 64) as stream:
            list(stream)
            skipped += stream.report.skipped
    assert skipped == 1


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.few(1)
def test_random_rows_of_a_text_are_those_of_its_copy(tmp_path, quoted):
    """Neither the header nor blank lines are rows; nor is each line where quotes contain line ends."""
    note = '"n\nn"' if quoted else "n"
    lines = ["y,r,note,u", "", *(f"{row % 2},{row},{note},u{row}" + "\n\r\n" * (row % 7 == 0) for row in range(200))]
    schema = {"label": "y", "dense": ("r",), "sparse": ("u",), "quoted_newlines": quoted, "chunk_bytes": 100}
    path, rule = write(tmp_path, lines, "log.csv"), SplitRule("random", 0.3)
    convert(path, tmp_path / "log.parquet", options(**schema), row_group_rows=30)
    text, copy = (reader(source, rule, **schema) for source in (path, tmp_path / "log.parquet"))
    expected = [row for row in range(200) if place_of(row) >= 0.7]
    assert numbers(text, "test") == numbers(copy, "test") == expected
    shards = [[round(row[1]) for row in rows_of(text, "test", shard=(index, 3))] for index in range(3)]
    assert sorted(itertools.chain(*shards)) == expected
    assert resumes(text)


def test_random_rows_of_earlier_runs_stay_what_they_were(tmp_path):
    """Those numbered every line, the header and blank ones, too."""
    lines = ["y,r,u", "", *(f"{row % 2},{row},u" for row in range(100)), ""]
    path, rule = write(tmp_path, lines, "log.csv"), SplitRule("random", 0.3)
    log = reader(path, rule, label="y", dense=("r",), sparse=("u",), chunk_bytes=50)
    digest = log.rows_digest()
    log.number_by_line()
    assert numbers(log, "test") == [row for row in range(100) if place_of(row + 2) >= 0.7]
    assert log.rows_digest() != digest


def place_of(row: int) -> float:
    """Where the hash of a row of the first file falls in [0, 1): SplitMix64 of its number and the letters SPLIT."""
    z = row ^ 0x53504C4954
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = ((z ^ (z >> shift)) * factor) & (1 << 64) - 1
    return (z >> 11) / 2**53


def test_days_have_the_last_one_as_test(tmp_path):
    for day in range(11):
        write(tmp_path, numbered(3, 10 * day), f"day_{day}" + (".gz" if day % 2 else ""))
    log = reader(tmp_path, SplitRule())
    assert [path.name.removesuffix(".gz") for path in log.files] == [f"day_{day}" for day in range(11)]
    assert numbers(log, "train") == [10 * day + row for day in range(10) for row in range(3)]
    assert numbers(log, "test") == [100, 101, 102]
    assert log.splits() == ("train", "test")


def test_files_can_be_named(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    for day in range(4):
        write(folder, numbered(2, 10 * day), f"part-{day}.txt")
    outside = write(tmp_path, numbered(2, 90), "later.txt")
    rule = SplitRule(test_files=(str(outside),), validation_files=(str(folder / "part-1.txt"),))
    log = reader(folder, rule)
    assert numbers(log, "train") == [0, 1, 20, 21, 30, 31]
    assert numbers(log, "validation") == [10, 11]
    assert numbers(log, "test") == [90, 91]
    with pytest.raises(FileNotFoundError, match="nowhere: no such file"):
        reader(folder, SplitRule(test_files=("nowhere",)))
    with pytest.raises(ValueError, match="both a validation and a test file"):
        reader(folder, SplitRule(test_files=(str(outside),), validation_files=(str(outside),)))
    with pytest.raises(ValueError, match="all files are held out, no train rows are left"):
        reader(outside, SplitRule(test_files=(str(outside),)))


@pytest.mark.parametrize("kind", ["timestamp", "date", "integer", "text"])
def test_a_time_column_splits_a_parquet_file(tmp_path, kind):
    days = [f"2014-05-{day:02}" for day in (1, 2, 3, 20, 21, 30, 31)]
    times, bounds = {
        "timestamp": (pa.array([*days, None]).cast(pa.timestamp("ms")), ("2014-05-20", "2014-05-30T00:00:00")),
        "date": (pa.array([*days, None]).cast(pa.date32()), ("2014-05-20", "2014-05-30")),
        "integer": (pa.array([1, 2, 3, 20, 21, 30, 31, None]), ("20", "30")),
        "text": (pa.array([*days, None]), ("2014-05-20", "2014-05-30")),
    }[kind]
    table = pa.table({"when": times, "click": [0] * 8, "price": [float(i) for i in range(8)], "user": list("abcdefgh")})
    parquet.write_table(table, tmp_path / "log.parquet")
    schema = {"label": "click", "dense": ("price",), "sparse": ("user",)}
    rule = SplitRule(time_column="when", validation_from=bounds[0], test_from=bounds[1])
    log = reader(tmp_path / "log.parquet", rule, **schema)
    assert [numbers(log, split) for split in ("train", "validation", "test")] == [[0, 1, 2, 7], [3, 4], [5, 6]]
    assert log.splits() == ("train", "validation", "test")
    with pytest.raises(ValueError, match="'soon' is not a time of the time column, which is"):
        reader(tmp_path / "log.parquet", SplitRule(time_column="when", test_from="soon"), **schema)
    with pytest.raises(ValueError, match="column 'then' is missing; columns: when, click"):
        reader(tmp_path / "log.parquet", SplitRule(time_column="then", test_from="1"), **schema)


@pytest.mark.parametrize("kind", [pa.int32(), pa.decimal128(10, 0)], ids=str)
def test_shards_have_rows_without_a_time_whatever_the_types_of_other_files(tmp_path, kind):
    """pandas stores integers with missing ones as floating point, whose statistics omit NaN."""
    for name, times in (("a", [1.0, 2.0, math.nan, 9.0]), ("b", pa.array([3, 4, 5, 6], pa.int32()).cast(kind))):
        table = pa.table({"when": times, "click": [0] * 4, "price": [float(i) for i in range(4)], "user": list("abcd")})
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2)
    rule = SplitRule(time_column="when", test_from="7")
    log = reader(tmp_path, rule, label="click", dense=("price",), sparse=("user",))
    rows = [rows_of(log, shard=(index, 2)) for index in range(2)]
    assert sorted(rows[0] + rows[1]) == sorted(rows_of(log))


@pytest.mark.parametrize("bound", ["2026-01-02T06:00:00", "2026-01-02 06:00", "2026-01-02T06:00:00Z", "1767333600"])
def test_times_as_strings_are_times(tmp_path, bound):
    """However they are written: 72 hours, of which 30 are before the bound."""
    hours = [datetime(2026, 1, 1) + timedelta(hours=hour) for hour in range(72)]
    spellings = {
        "T": ["%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S.123456789"],
        "Z": ["%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S+00:00", "%Y-%m-%d %H:%M:%S.5+00:00"],
        "0": ["%s"],
    }
    kind = bound[-1] if bound.endswith("Z") else "T" if "-" in bound else "0"
    for texts in ("T", "Z", "0"):
        times = [
            str(round(hour.replace(tzinfo=UTC).timestamp())) if texts == "0"
            else hour.strftime(spellings[texts][place % len(spellings[texts])])
            for place, hour in enumerate(hours)
        ]  # fmt: skip
        if texts == "Z":
            times[::5] = [f"{(hour + timedelta(hours=2)).isoformat()}+02:00" for hour in hours[::5]]
        path = tmp_path / "log.parquet"
        table = {"when": [*times, None, ""], "click": [0] * 74, "price": range(74), "user": ["a"] * 74}
        for dictionary in (False, True):
            parquet.write_table(pa.table(table), path, row_group_size=20, use_dictionary=dictionary)
            if dictionary:
                parquet.write_table(pa.table({**table, "when": pa.array(table["when"]).dictionary_encode()}), path)
            rule = SplitRule(time_column="when", test_from=bound)
            log = reader(path, rule, label="click", dense=("price",), sparse=("user",))
            if texts == kind:
                assert numbers(log, "test") == list(range(30, 72))
                assert sorted(itertools.chain(*(rows_of(log, "train", shard=(at, 2)) for at in (0, 1)))) == sorted(
                    rows_of(log)
                )
                assert numbers(log, "train") == [*range(30), 72, 73]
            else:
                with pytest.raises(ValueError, match=r"its times have different formats \(.*\); write both as 2014"):
                    numbers(log, "test")


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz", "log.parquet"])
def test_a_split_without_rows_is_found_at_once(tmp_path, name):
    columns = {"label": "y", "dense": ("r",), "sparse": ("u",), "on_bad_row": "skip", "chunk_bytes": 300}
    lines = ["y,t,r,u", *(f"{n % 2},{n},{n},u" for n in range(200)), "y,x"]
    path = write(tmp_path, lines, name.replace("parquet", "csv"))
    if name == "log.parquet":
        rule = SplitRule(time_column="t", test_from="500")
        convert(path, tmp_path / name, options(rule, **columns), row_group_rows=60)

    def log(validation_from: str | None, test_from: str | None) -> ClickLog:
        return reader(tmp_path / name, SplitRule("time", 0, 0, (), (), "t", test_from, validation_from), **columns)

    for times, split, message in (
        ((None, "200"), "test", "no 't' is 200 or later"),
        (("200", None), "validation", "no 't' is 200 or later"),
        (("70", "70"), "validation", "no 't' is 70 or later, before 70"),
        (("0", "50"), "train", "no 't' is before 0"),
    ):
        with pytest.raises(ValueError, match=rf"data set '{name}': there are no {split} rows: {message}$"):
            log(*times).check_rows(split)
    for times in ((None, "199"), ("1", "2"), ("70", "71"), ("198", "199")):
        for split in log(*times).splits():
            log(*times).check_rows(split)
    with pytest.raises(ValueError, match=r"there are no test rows$"):
        reader(tmp_path / name, SplitRule("random", 1e-9), **columns).check_rows("test")


def test_late_rows_of_compressed_files_are_looked_for_in_the_last_file_first(tmp_path, monkeypatch):
    paths = [
        write(tmp_path, ["y,t,r,u", *(f"1,{n},{n},u" for n in range(7 * k, 7 * k + 7))], f"{k}.csv.gz")
        for k in range(3)
    ]
    log = reader(paths, SplitRule(time_column="t", test_from="19"), label="y", dense=("r",), sparse=("u",))
    files, chunks = list[int](), TextSource.chunks
    monkeypatch.setattr(
        TextSource, "chunks", lambda self, part, *args: files.append(part.file) or chunks(self, part, *args)
    )
    for split, file in (("test", 2), ("train", 0)):
        log.check_rows(split)
        assert files.pop() == file
    assert not files


@pytest.mark.parametrize(
    "spelling", ["{0}/day 2.csv", "file://{0}/day 2.csv", "FILE://{0}//day%202.csv", "{0}/../hard.csv"]
)
@pytest.mark.parametrize("source", ["{0}", "file://{0}", "local://{0}/"])
def test_a_held_out_file_may_be_spelled_otherwise(tmp_path, source, spelling):
    folder = tmp_path / "my logs"
    folder.mkdir()
    for day in range(3):
        write(folder, ["y,r,u", *(f"0,{row},u" for row in range(10 * day, 10 * day + 10))], f"day {day}.csv")
    os.link(folder / "day 2.csv", tmp_path / "hard.csv")
    rule = SplitRule(test_files=(spelling.format(folder),))
    source = source.format(str(folder).replace(" ", "%20") if "://" in source else folder)
    columns = {"label": "y", "dense": ("r",), "sparse": ("u",)}
    log = reader(source, rule, **columns)
    assert [numbers(log, "train"), numbers(log, "test")] == [list(range(20)), list(range(20, 30))]
    both = SplitRule(test_files=(spelling.format(folder),), validation_files=(str(folder / "day 2.csv"),))
    with pytest.raises(ValueError, match="is both a validation and a test file"):
        reader(folder, both, **columns)


def test_no_file_is_trained_and_tested_by_another_name(tmp_path):
    path = write(tmp_path, numbered(5), "a.txt")
    other = write(tmp_path, numbered(5), "a.txt.gz")
    os.link(path, tmp_path / "link.txt")
    for source, held_out in (
        ([path, tmp_path / "link.txt"], ()),
        ([path, write(tmp_path, numbered(2), "b.txt")], (str(other),)),
    ):
        with pytest.raises(ValueError, match="look like the same data twice; keep one of them"):
            reader(source, SplitRule(test_files=held_out))


def test_a_time_column_of_text_is_looked_for(tmp_path):
    with pytest.raises(ValueError, match="column 'when' is missing; columns: label, int_1"):
        reader(write(tmp_path, random_lines(3)), SplitRule(time_column="when", test_from="3"))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"test_share": 1.0}, "test_share must be a share of the rows, from 0 to less than 1, got 1.0"),
        ({"validation_share": -0.1}, "validation_share must be a share"),
        ({"test_share": 0.5, "validation_share": 0.5}, "shares of 0.5 and 0.5 leave no train rows"),
        ({"split_by": "end", "test_files": ("a",)}, "are for split_by=\"files\", not for split_by='end'"),
        ({"split_by": "random", "time_column": "a"}, 'a time column and times are for split_by="time"'),
        ({"split_by": "time", "time_column": "a"}, "needs time_column and test_from, validation_from or both"),
        ({"time_column": "a"}, "needs time_column and test_from"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rule, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SplitRule(**rule)


def test_too_few_rows_are_refused(tmp_path):
    path = write(tmp_path, random_lines(1))
    log = ClickLog(path, options(SplitRule()))
    with pytest.raises(ValueError, match="there are no test rows"):
        rows_of(log, "test")
    convert(path, tmp_path / "log.parquet")
    with pytest.raises(ValueError, match=r"too few rows for a share of 0\.167 as test rows"):
        ClickLog(tmp_path / "log.parquet", options(SplitRule()))


def test_a_missing_split_is_named(tmp_path):
    log = ClickLog(write(tmp_path, random_lines(9)), options(SplitRule()))
    for ask in (lambda: log.open("validation", 4), lambda: log.num_rows("validation")):
        with pytest.raises(ValueError, match=r"'train.txt' has no 'validation' rows, only train, test"):
            ask()


def test_a_log_to_score_has_all_rows_in_order_as_test_rows(tmp_path):
    path = write(tmp_path, numbered(30))
    log = open_for_scoring(path, options(SplitRule(), log_transform=False), ClickLog(path, options()).features)
    assert log.splits() == ("test",)
    assert numbers(log, "test") == list(range(30))
    with pytest.raises(ValueError, match=r"the log has .*num_embeddings=100000.*, the model was trained with .*=500"):
        open_for_scoring(path, options(), ClickLog(path, options(num_embeddings=500)).features)
    with pytest.raises(ValueError, match="the log has 26 features, the model 3"):
        open_for_scoring(path, options(), log.features[:3])
    with pytest.raises(FileNotFoundError, match="no such file or folder to score"):
        open_for_scoring(tmp_path / "missing", options(), log.features)


def test_unpacking_for_the_size_is_told(tmp_path, caplog):
    path = write(tmp_path, random_lines(9), "log.gz")
    ClickLog(path, options(SplitRule()))
    assert caplog.messages == ["log.gz: decompressing it once to find its size, because its last rows are held out"]
    ClickLog(path, options())
    ClickLog(write(tmp_path, random_lines(9)), options(SplitRule()))
    assert len(caplog.messages) == 1
